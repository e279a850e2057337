"""A RayCollector that collects in the background, and whose caller has given up; without a cluster."""

from types import SimpleNamespace

import pytest

from engram.collectors.background import Abandoned
from engram.collectors.pooled import _ABANDON_INTERVAL
from engram.distributed import actors
from engram.distributed import collector as module
from engram.processes.pool import WorkerPool


def test_a_thread_that_waits_for_an_answer_ends_when_the_caller_has_given_up(monkeypatch):
    looks = []

    def wait(references, timeout):
        looks.append(timeout)
        assert len(looks) < 10
        return [], references

    def raise_if_abandoned():
        if len(looks) == 3:
            raise Abandoned

    def wait_once(references, num_returns, timeout):
        return wait(references, timeout)

    actor = SimpleNamespace(place=SimpleNamespace(remote=object))
    monkeypatch.setattr(actors, "import_ray", lambda: SimpleNamespace(wait=wait_once, is_initialized=lambda: False))
    collector = module.RayCollector.__new__(module.RayCollector)
    collector._background = SimpleNamespace(raise_if_abandoned=raise_if_abandoned)
    collector._pool = WorkerPool(actors.RayActors(object), ["collector 0"])
    collector._pool.workers.append(actors.RayWorker("collector 0", actor))
    with pytest.raises(Abandoned):
        collector._ask(0, lambda actor: object())
    assert looks == [_ABANDON_INTERVAL] * 3
