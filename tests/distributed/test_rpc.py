"""Shards that are reached through torch's rpc: the sentences of `test_sharded`, and a group of several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.rpc

from contracts.waiting import NEVER, comes
from distributed import test_sharded
from distributed.shards import Link, client, shard
from engram.data import LazyTensorStorage, PrioritizedSampler
from engram.distributed import Timeouts
from engram.distributed.client import PendingCall, ShardLink

pytestmark = [
    pytest.mark.deep,  # `test_sharded` says the same of every transport
    pytest.mark.skipif(
        not torch.distributed.rpc.is_available(), reason="torch was built without torch.distributed.rpc"
    ),
]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A group of this process alone, which calls itself; its name there."""
    meeting = tmp_path_factory.mktemp("rpc") / "meeting"
    rpc = torch.distributed.rpc
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}", num_worker_threads=4)
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    yield "alone"
    rpc.shutdown()


class Served:
    """A shard of this process, as `Link` lets calls of it be lost."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *arguments: self.link.call(method, *arguments).result(NEVER)


class Answered(ShardLink):
    """A link each of whose calls has been answered when it was made, as sentences of `test_sharded` count on."""

    def __init__(self, link: ShardLink) -> None:
        self._link = link

    def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
        made = self._link.call(method, *arguments, answer_bytes=answer_bytes)
        assert comes(made.has_come)
        return made


@pytest.fixture(autouse=True)
def over_rpc(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of `test_sharded` reach their shards through torch's rpc."""
    from engram.distributed import rpc_buffer

    names: dict[int, str] = {}

    def over(link: Link) -> Any:
        name = names.setdefault(id(link), f"{len(names)}")
        rpc_buffer._shards[name] = Served(link)  # type: ignore[assignment]
        return Answered(rpc_buffer._RpcLink(group, name))

    def client_over_rpc(links: Sequence[Link], **settings: Any) -> Any:
        return client([over(link) for link in links], **settings)

    monkeypatch.setattr(test_sharded, "client", client_over_rpc)


class TestWriting(test_sharded.TestWriting):
    pass


class TestSampling(test_sharded.TestSampling):
    pass


class TestPriorities(test_sharded.TestPriorities):
    test_a_client_that_no_shard_has_answered_takes_updates = None  # here a shard that is silent holds up its link


class TestPrioritiesThatComeWithRows(test_sharded.TestPrioritiesThatComeWithRows):
    pass


class TestLife(test_sharded.TestLife):
    pass


class TestNames(test_sharded.TestNames):
    pass


class TestCounts(test_sharded.TestCounts):
    pass


ALL = """
    import sys, time
    import torch, torch.distributed.rpc as rpc
    from engram.data import LazyTensorStorage, PrioritizedSampler, RemoteTensorDictReplayBuffer
    from engram.distributed.rpc_buffer import RpcReplayBuffer
    from engram.errors import ShardUnavailableError
    from distributed.shards import rows, whole

    WORKERS = ["replay0", "replay1"]

    def join(name, rank):
        options = rpc.TensorPipeRpcBackendOptions(init_method={meeting!r})
        rpc.init_rpc(name, rank=rank, world_size=4, rpc_backend_options=options)

    def made():
        return RpcReplayBuffer(
            WORKERS, storage=LazyTensorStorage(10_000), batch_size=64, timeout=60.0, scratch_dir={folder!r}
        )
"""
WORKER = """
    join({name!r}, {rank})
    rpc.shutdown()
"""
WRITER = """
    join("writer", 2)
    rb = made()
    for k in range(50):
        rb.extend(rows(1000 + 20 * k, 1020 + 20 * k))
    rb.flush()
    assert rb.stats().accepted == 1000
    rpc.rpc_sync("learner", time.sleep, args=(0.0,))  # it has joined
    rb.close()
    rpc.shutdown()
"""
LEARNER = """
    join("learner", 3)
    rb = made()
    rb.extend(rows(0, 1000))
    rb.flush()
    until = time.monotonic() + 120
    while rb.stats().writes < 2000:
        assert time.monotonic() < until
    drawn = torch.cat([whole(rb.sample()) for _ in range(100)])
    assert 0 <= int(drawn.min()) < 1000 <= int(drawn.max()) < 2000
    there = rpc.remote("replay0", made)  # another client, in the process of a shard
    assert RemoteTensorDictReplayBuffer.sample(there).shape == (64,)
    assert RemoteTensorDictReplayBuffer.__len__(there) == 2000
    rb.dumps({saved!r})
    rb.empty()
    assert len(rb) == 0
    rb.loads({saved!r})
    assert len(rb) == 2000
    print("all is well", flush=True)
    del there
    rb.close()
    rpc.shutdown()
"""


def test_processes_of_a_group_share_the_rows_of_shards(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent), prepend=os.pathsep)
    facts = {
        "meeting": f"file://{tmp_path}/meeting", "folder": str(tmp_path / "shards"), "saved": str(tmp_path / "saved"),
    }  # fmt: skip
    workers = [script(ALL + WORKER, name=f"replay{k}", rank=k, **facts) for k in range(2)]
    writer, learner = script(ALL + WRITER, **facts), script(ALL + LEARNER, **facts)
    said, failure = learner.communicate(timeout=300)
    assert "all is well" in said, failure
    for other in (*workers, writer):
        assert other.wait(timeout=300) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_batch_age": -1.0}, "max_batch_age must be 0 or more"),
        ({"timeout": 0.0}, "timeout must be more than 0"),
        ({"timeout": Timeouts(extend=0.0)}, "timeout must be more than 0 seconds, got 0.0 for extend"),
        ({"batches_per_call": 0}, "batches_per_call must be an integer of 1 or more"),
        ({"lanes": True}, "lanes must be an integer of 1 or more"),
    ],
)
def test_settings_that_are_not_allowed_are_refused(settings: dict[str, Any], words: str) -> None:
    from engram.distributed.rpc_buffer import RpcReplayBuffer

    with pytest.raises(ValueError, match=words):
        RpcReplayBuffer(["alone"], storage=LazyTensorStorage(10), **settings)


def test_a_second_buffer_of_one_name_is_another_client_only_with_the_same_settings(group: str, tmp_path: Path) -> None:
    from engram.distributed.rpc_buffer import RpcReplayBuffer

    def made(n: int = 100, **settings: Any) -> Any:
        return RpcReplayBuffer([group], name="shared", storage=LazyTensorStorage(n), **settings)

    rb = made(sampler=PrioritizedSampler(100, 0.6, 0.4))
    made(sampler=PrioritizedSampler(100, 0.6, 0.4)).close()
    others: list[tuple[dict[str, Any], str]] = [
        ({"n": 50, "sampler": PrioritizedSampler(100, 0.6, 0.4)}, "room for 100 rows, not 50 rows"),
        ({}, r"the sampler PrioritizedSampler\(100, 0.6, 0.4\), not RandomSampler\(\)"),
        ({"sampler": PrioritizedSampler(100, 0.9, 0.4)}, r"the sampler .*0\.6.*, not .*0\.9"),
        ({"sampler": PrioritizedSampler(100, 0.6, 0.4), "lanes": 2}, "lanes of 8, not 2"),
        ({"sampler": PrioritizedSampler(100, 0.6, 0.4), "scratch_dir": tmp_path}, "the folder None, not "),
    ]
    for settings, words in others:
        with pytest.raises(ValueError, match=f"(?s)shard shared-0 already, made with {words}.*another name="):
            made(**settings)
    rb.shutdown()
    made().shutdown()


def test_a_shard_that_is_ended_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    from engram.distributed import rpc_buffer

    ended, closed = shard(), []
    monkeypatch.setattr(ended, "close", lambda: closed.append(ended))
    rpc_buffer._shards["ended"] = ended
    for _ in range(2):  # the second time it is there no more
        rpc_buffer._end("ended")
    assert closed == [ended]
