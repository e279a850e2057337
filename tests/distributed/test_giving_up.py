"""A RayCollector that collects in the background, and whose caller has given up; without a cluster."""

from types import SimpleNamespace

import pytest

from engram.collectors.background import Abandoned
from engram.distributed import collector as module


def test_a_thread_that_waits_for_an_answer_ends_when_the_caller_has_given_up(monkeypatch):
    looks = []

    def wait(references, timeout):
        looks.append(timeout)
        assert len(looks) < 10
        return [], references

    def raise_if_abandoned():
        if len(looks) == 3:
            raise Abandoned

    monkeypatch.setattr(module, "import_ray", lambda: SimpleNamespace(wait=wait))
    collector = module.RayCollector.__new__(module.RayCollector)
    collector._background = SimpleNamespace(raise_if_abandoned=raise_if_abandoned)
    collector._batch_timeout, collector._lives = None, [SimpleNamespace(busy_since=None)]
    with pytest.raises(Abandoned):
        collector._answer(0, object())
    assert looks == [module.ABANDON_INTERVAL] * 3
