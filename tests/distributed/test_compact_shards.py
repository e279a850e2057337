"""Shards that store each observation once give back the rows that were written."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from distributed.shards import Link, client
from engram.data import Compact, LazyTensorStorage, ListStorage, RandomSampler, SliceSampler
from engram.distributed import ReplayShard
from engram.distributed.sharded import arguments_of_shards
from engram.envs.transforms import MultiStepTransform

SIDE, FRAMES = 12, 4


def stacks(first: int, n: int, trajectory: int) -> TensorDict:
    """Steps `first` to `first + n` of an episode, whose frames are pictures of their own number."""
    numbers = torch.arange(first - FRAMES + 1, first + n + 1).clamp(min=0) + 1000 * trajectory
    frames = numbers.view(-1, 1, 1).expand(-1, SIDE, SIDE).unfold(0, FRAMES, 1).movedim(-1, 1).to(torch.int32)
    done = torch.zeros(n, 1, dtype=torch.bool)
    return TensorDict(
        {"pixels": frames[:-1], "step": torch.arange(first, first + n), "traj": torch.full((n,), trajectory),
         "next": {"pixels": frames[1:], "done": done}}, [n],
    )  # fmt: skip


def expected(step: int, trajectory: int) -> TensorDict:
    return stacks(step, 1, trajectory)[0]


def uniform() -> RandomSampler:
    return RandomSampler()


def slices() -> SliceSampler:
    return SliceSampler(slice_len=4, traj_key="traj")


@pytest.mark.parametrize(
    ("sampler", "folder", "here"), [(uniform, False, False), (slices, True, False), (uniform, True, True)]
)
def test_rows_of_several_producers_are_drawn_as_they_were_written(tmp_path, sampler, folder, here) -> None:
    """`here`: producers and readers open the stores themselves."""
    shards = [
        ReplayShard(
            400, lanes=4, idle=1e9, timeout=0.0, sampler=sampler(), compact=Compact("pixels", frames=FRAMES),
            scratch_dir=tmp_path / str(k) if folder else None,
        ) for k in range(2)
    ]  # fmt: skip
    links = [Link(shard) for shard in shards]
    producers = [client(links, sampler=sampler(), local=[here, here]) for _ in range(3)]
    for start in range(0, 120, 20):
        for k, producer in enumerate(producers):
            producer.extend(stacks(start, 20, k))
    for producer in producers:
        producer.flush()
    reader = client(links, sampler=sampler(), local=[here, here])
    for _ in range(20):
        batch = reader.sample(16)
        wanted = torch.stack([expected(int(row["step"]), int(row["traj"])) for row in batch])
        for key in ("pixels", ("next", "pixels")):
            assert torch.equal(batch[key], wanted[key])
    assert all(shard._storage.compact is not None for shard in shards)
    whole = 2 * FRAMES * SIDE * SIDE * 4
    assert sum(shard._storage.nbytes for shard in shards) < 800 * whole / 2
    for shard in shards:
        shard.close()


class TestArguments:
    def test_shards_store_once_what_the_given_storage_would(self) -> None:
        made = arguments_of_shards(LazyTensorStorage(100, compact="pixels"), 2, 4, RandomSampler(), None)
        assert made["compact"] == Compact("pixels") and made["capacity"] == 50
        plain = arguments_of_shards(LazyTensorStorage(100), 1, 4, RandomSampler(), None)
        assert plain["compact"] is None

    def test_they_know_the_n_of_the_buffers_transform(self) -> None:
        transform = MultiStepTransform(n_steps=3, gamma=0.9)
        made = arguments_of_shards(LazyTensorStorage(100, compact=True), 2, 4, RandomSampler(), transform)
        assert made["compact"].n_steps == 3

    def test_another_storage_says_only_how_many_rows(self) -> None:
        assert arguments_of_shards(ListStorage(100), 2, 4, RandomSampler(), None)["compact"] is None
