"""A real cluster of Ray on this machine: a head and two nodes, each with processes of its own."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Each cluster asks those that join it for a token, which Ray reads when it is imported.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
ray = pytest.importorskip("ray", reason="needs Ray: make test-ray")

# So that a node that is gone is noticed within seconds.
_HEALTH = {
    "health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}  # fmt: skip
LONG = pytest.mark.skipif(not os.environ.get("ENGRAM_RAY_LONG"), reason="needs ENGRAM_RAY_LONG=1")
_NODE = {"num_cpus": 2, "resources": {"shard": 8}, "object_store_memory": 100 << 20}


class Nodes:
    """A cluster, some nodes of which are killed."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.nodes = [cluster.add_node(**_NODE) for _ in range(2)]

    def kill(self, node_id: str) -> None:
        """Kills all processes of a node, and adds another one."""
        victim = next(node for node in self.nodes if node.node_id == node_id)
        self.cluster.remove_node(victim, allow_graceful=False)
        self.nodes = [*(node for node in self.nodes if node is not victim), self.cluster.add_node(**_NODE)]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Nodes]:
    from ray.cluster_utils import Cluster

    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    # Workers import what tests define.
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets have short names
    os.makedirs(os.path.join(folder, "ray"))
    os.environ["RAY_TMPDIR"] = folder
    head = {
        "num_cpus": 1, "include_dashboard": False, "object_store_memory": 200 << 20, "_system_config": _HEALTH,
        "include_log_monitor": False,  # which looks for something new in all logs all the time
    }  # fmt: skip
    made = Cluster(initialize_head=True, head_node_args=head)
    nodes = Nodes(made)
    ray.init(address=made.address, log_to_driver=False, logging_level=logging.ERROR)
    yield nodes
    ray.shutdown()
    made.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def buffer(cluster: Nodes) -> Iterator[Callable[..., Any]]:
    """Makes buffers whose shards are not on the node of the tests; they are ended with the test."""
    from engram.data import LazyTensorStorage
    from engram.distributed import RayReplayBuffer

    made: list[Any] = []

    def make(capacity: int = 100_000, **settings: Any) -> Any:
        config = {"resources": {"shard": 1}, **settings.pop("remote_config", {})}
        settings = {"batch_size": 64, "lanes": 2, "timeout": 20.0, "remote_config": config, **settings}
        kind = settings.pop("kind", RayReplayBuffer)
        made.append(kind(storage=LazyTensorStorage(capacity), **settings))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


@pytest.fixture(scope="module")
def spaces() -> Iterator[Any]:
    """A cluster of two nodes in namespaces of their own, beside the head; the driver belongs to it in the module."""
    from cluster.namespaces import namespace_cluster, why_not

    if reason := why_not():
        pytest.skip(reason)
    before = ray.get_runtime_context().gcs_address if ray.is_initialized() else None
    variables = dict(os.environ)
    ray.shutdown()
    with namespace_cluster(2) as made:
        yield made
    os.environ.clear()
    os.environ.update(variables)
    if before is not None:
        ray.init(address=before, log_to_driver=False, logging_level=logging.ERROR)
