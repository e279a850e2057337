"""How each golden checkpoint came about, and what it is read into."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from engram.data import (
    Compact,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    QueueSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.envs.transforms import (
    CatFrames,
    InitTracker,
    MultiStepTransform,
    ObservationNorm,
    RewardSum,
    StepCounter,
    TrajCounter,
    VecNorm,
)
from golden.steps import stacks, steps, strands

CAPACITY = 40


@dataclass(frozen=True)
class Recipe:
    """`fresh` makes the empty buffer, `fill` gives the one that is saved, `more` is written after it was loaded."""

    fresh: Callable[[], Any]
    fill: Callable[[Any], Any]
    batch_size: int | None = 8
    more: Callable[[Any], Any] | None = None
    chunk_bytes: int = 1 << 24


def wrapped(rb: Any) -> Any:
    """55 steps in three pieces, so that a ring of 40 has gone round."""
    rb.extend(steps(0, 20))
    rb.extend(steps(20, 30))
    rb.extend(steps(50, 5))
    return rb


def part_of_a_queue(rb: Any) -> Any:
    """35 steps, of which five were handed out."""
    rb.extend(steps(0, 20))
    rb.extend(steps(20, 15))
    rb.sample(5)
    return rb


def ten_more(rb: Any) -> None:
    rb.extend(steps(55, 10))


def plain(**parts: Any) -> Callable[[], Any]:
    """A buffer of 40 steps; every part is made anew."""
    made = {"storage": lambda: LazyTensorStorage(CAPACITY), **parts}
    return lambda: ReplayBuffer(**{name: make() for name, make in made.items()})


def wide() -> Any:
    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY, ndim=2))


def fill_wide(rb: Any) -> Any:
    for start in range(0, 20, 5):
        rb.extend(strands(start, 5))
    return rb


def wide_more(rb: Any) -> None:
    rb.extend(strands(20, 2))


def fill_lanes(rb: Any) -> Any:
    """Three writers of one store, one of which gave its lane up and another went on: a seam."""
    folder = tempfile.mkdtemp()
    first = ReplayBuffer(
        storage=LazyMemmapStorage(60, scratch_dir=folder, lanes=3), checkpointer=rb.storage.checkpointer
    )
    first.extend(steps(0, 15))
    second, third = (ReplayBuffer(storage=LazyMemmapStorage.open(folder)) for _ in range(2))
    second.extend(steps(1000, 31))
    third.extend(steps(2000, 9))
    second.storage.release()
    heir = ReplayBuffer(storage=LazyMemmapStorage.open(folder))
    heir.extend(steps(3000, 4))
    for writer in (second, third, heir):
        writer.storage.close()
    return first


def many_forms() -> TensorDict:
    n = 6
    t = torch.arange(n)
    big = torch.from_numpy(np.arange(n, dtype=np.uint64) + np.uint64(1 << 63))
    return TensorDict(
        {
            "half": (t / 4).to(torch.bfloat16), "wide": (t / 3).double().unsqueeze(1), "big": big,
            "complex": torch.complex(t.float(), -t.float()), "nothing": torch.zeros(n, 0), "flag": t % 2 == 0,
            "deep": TensorDict({"a": {"b": t.to(torch.int8)}, "task": NonTensorData("reach", batch_size=[n])}, [n]),
            "pixels": (t.reshape(n, 1, 1) + torch.arange(6).reshape(2, 3)).to(torch.uint8),
        },
        [n],
    )  # fmt: skip


def fill_forms(rb: Any) -> Any:
    rb.extend(many_forms())
    return rb


def fill_pytree(rb: Any) -> Any:
    t = torch.arange(9)
    rb.extend({"a": (t, [t.float(), {"b": t * 2}]), "c": t % 2 == 0})
    return rb


def fill_stacks(rb: Any) -> Any:
    """55 steps in three pieces."""
    for start, n in ((0, 20), (20, 30), (50, 5)):
        rb.extend(stacks(start, n))
    return rb


def wide_stacks(rb: Any, start: int = 0, n: int = 30) -> Any:
    """Steps of three environments, whose next observations are those of three steps later."""
    rb.extend(torch.stack([stacks(start + 1000 * env, n, 3, n_steps=3) for env in range(3)]))
    return rb


def emptied(rb: Any) -> Any:
    wrapped(rb).empty()
    return rb


def tensors() -> Any:
    return ReplayBuffer(storage=TensorStorage(steps(0, CAPACITY).zero_()))


ITEMS: list[Any] = [
    "text", "\ud83d lone", b"\0\1\2", None, 3, 2**70, 0.5, float("nan"), True,
    {"a": (1, ["x", {"b": torch.arange(3)}]), 7: "a number as key", "$int": "0x1"},
    np.arange(4, dtype="<u2").reshape(2, 2), np.float32(1.5), np.array(["ab", "c"]), torch.zeros(0, 3),
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), (torch.tensor(1.0), torch.tensor([True, False])),
    TensorDict({"x": torch.arange(3), "y": {"z": torch.ones(3, 2)}, "t": NonTensorData("hi", batch_size=[3])}, [3]),
]  # fmt: skip


def anything() -> Any:
    return ReplayBuffer(storage=ListStorage(20), collate_fn=lambda items: items)


def fill_anything(rb: Any) -> Any:
    for item in [*ITEMS, *ITEMS[:8]]:  # goes round
        rb.add(item)
    return rb


def words() -> Any:
    return ReplayBuffer(storage=ListStorage(), collate_fn=lambda items: items)


def fill_words(rb: Any) -> Any:
    rb.extend([f"word {i}" for i in range(30)])
    return rb


def ensemble() -> Any:
    flat = LazyTensorStorage(CAPACITY, checkpointer=FlatStorageCheckpointer())
    members = [
        ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SamplerWithoutReplacement()),
        ReplayBuffer(storage=flat, sampler=PrioritizedSampler(None, 0.6, 0.4)),
        ReplayBuffer(storage=ListStorage(CAPACITY), transform=VecNorm(["obs"])),
    ]
    return ReplayBufferEnsemble(*members, p=[0.5, 0.3, 0.2], generator=torch.Generator().manual_seed(5))


def fill_ensemble(rb: Any) -> Any:
    for i in range(3):
        rb[i].extend(steps(100 * i, 30))
    rb[1].update_priority(torch.arange(30), torch.arange(30) % 5)
    for _ in range(3):
        rb.sample(6)
    return rb


def ensemble_more(rb: Any) -> None:
    rb[0].extend(steps(30, 12))
    rb[1].update_priority(torch.arange(10), torch.arange(10) + 1.0)


def part_of_an_epoch(rb: Any) -> Any:
    wrapped(rb)
    torch.manual_seed(3)
    rb.sample(8)
    return rb


def with_priorities(rb: Any) -> Any:
    wrapped(rb)
    rb.update_priority(torch.arange(CAPACITY), torch.arange(CAPACITY) % 6 + 0.25)
    return rb


def new_priorities(rb: Any) -> None:
    ten_more(rb)
    rb.update_priority(torch.arange(10), torch.arange(10) * 2.0)


def best(storage: Callable[[], Any]) -> Callable[[], Any]:
    """A buffer of the best 12 steps, most of which have replaced others."""
    writer = functools.partial(TensorDictMaxValueWriter, rank_key=("next", "reward"))
    return lambda: TensorDictReplayBuffer(storage=storage(), writer=writer())


def index_too() -> Any:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))


def fill_dataset(rb: Any) -> Any:
    dataset = rb.set_writer(RoundRobinWriter())
    wrapped(rb).set_writer(dataset)
    return rb


def in_time() -> Any:
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    for transform in (
        RewardSum(),
        StepCounter(),
        InitTracker(),
        CatFrames(3, dim=-1, in_keys=["obs", ("next", "obs")]),
    ):
        rb.append_transform(transform, invert=True)
    return rb


def numbered() -> Any:
    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY)).append_transform(TrajCounter(), invert=True)


def normed() -> Any:
    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY), transform=VecNorm(["obs"], decay=0.9)).append_transform(
        ObservationNorm(in_keys=[("next", "obs")])
    )


def fill_normed(rb: Any) -> Any:
    rb._transform[1].init_stats(steps(0, 30), key=("next", "obs"))
    return wrapped(rb)


def n_steps() -> Any:
    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY), transform=MultiStepTransform(n_steps=3, gamma=0.9))


def generator() -> Any:
    own = torch.Generator().manual_seed(23)
    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY), generator=own, batch_size=8, prefetch=3)


def fill_generator(rb: Any) -> Any:
    wrapped(rb).sample()
    return rb


def kept_as(checkpointer: Any, **options: Any) -> Callable[[], Any]:
    return lambda: ReplayBuffer(storage=LazyTensorStorage(CAPACITY, **options), checkpointer=checkpointer())


def three_lanes(checkpointer: Any = None) -> Callable[[], Any]:
    made = (lambda: None) if checkpointer is None else checkpointer
    return lambda: ReplayBuffer(storage=LazyTensorStorage(60, lanes=3, shared=True), checkpointer=made())


def grouped() -> Any:
    return H5StorageCheckpointer(group_per_trajectory=True)


def gzipped() -> Any:
    return H5StorageCheckpointer(checkpoint_file="steps.h5", h5_kwargs={"compression": "gzip", "shuffle": True})


def with_exceptions(rb: Any) -> Any:
    rb.extend(steps(0, 55, exceptions=True))
    return rb


def some_removed(rb: Any) -> Any:
    """More rows than there is room for, of which some were removed: some of these are overwritten, others stay."""
    rb.extend(steps(0, CAPACITY))
    rb.remove(torch.tensor([0, 1, 17, 18, CAPACITY - 1]))
    rb.extend(steps(CAPACITY, 10))
    rb.remove(torch.tensor([5, 9]))
    return rb


def few(rb: Any) -> Any:
    rb.extend(steps(0, 20, exceptions=True))
    return rb


SLICES = {"slice_len": 4, "traj_key": ("collector", "traj_ids")}

RECIPES: dict[str, Recipe] = {
    "rows": Recipe(plain(), wrapped, more=ten_more),
    "rows-chunks": Recipe(plain(), wrapped, more=ten_more, chunk_bytes=600),
    "rows-mapped": Recipe(plain(storage=lambda: LazyMemmapStorage(CAPACITY)), wrapped, more=ten_more),
    "rows-wide": Recipe(wide, fill_wide, more=wide_more),
    "rows-lanes": Recipe(three_lanes(), fill_lanes, more=ten_more),
    "rows-forms": Recipe(plain(), fill_forms),
    "rows-pytree": Recipe(plain(), fill_pytree),
    "rows-emptied": Recipe(plain(), emptied, None, ten_more),
    "rows-never-written": Recipe(plain(), lambda rb: rb, None, ten_more),
    "rows-tensors": Recipe(tensors, wrapped, more=ten_more),
    "rows-compact": Recipe(
        plain(storage=lambda: LazyTensorStorage(CAPACITY, compact=True)),
        fill_stacks, more=lambda rb: rb.extend(stacks(55, 10)), chunk_bytes=150,
    ),
    "rows-compact-wide": Recipe(
        lambda: ReplayBuffer(storage=LazyTensorStorage(60, ndim=2, compact=Compact("pixels", 3, 3))),
        wide_stacks, more=lambda rb: wide_stacks(rb, 30, 4), chunk_bytes=100,
    ),
    "rows-removed": Recipe(plain(), some_removed, more=ten_more),
    "flat": Recipe(kept_as(FlatStorageCheckpointer), with_exceptions, more=ten_more, chunk_bytes=2000),
    "flat-wide": Recipe(kept_as(FlatStorageCheckpointer, ndim=2), fill_wide, more=wide_more, chunk_bytes=3000),
    "nested": Recipe(kept_as(NestedStorageCheckpointer), with_exceptions, more=ten_more, chunk_bytes=2000),
    "nested-lanes": Recipe(three_lanes(NestedStorageCheckpointer), fill_lanes, more=ten_more),
    "h5": Recipe(kept_as(H5StorageCheckpointer), with_exceptions, more=ten_more, chunk_bytes=2000),
    "h5-wide": Recipe(kept_as(gzipped, ndim=2), fill_wide, more=wide_more),
    "h5-groups": Recipe(kept_as(grouped), few, more=ten_more),
    "list": Recipe(anything, fill_anything, more=lambda rb: rb.add("one more")),
    "list-without-limit": Recipe(words, fill_words, more=lambda rb: rb.extend(["a", "b"])),
    "ensemble": Recipe(ensemble, fill_ensemble, 6, ensemble_more),
    "queue": Recipe(plain(sampler=QueueSampler), part_of_a_queue, 3, ten_more),
    "epoch": Recipe(plain(sampler=SamplerWithoutReplacement), part_of_an_epoch, more=ten_more),
    "prioritized": Recipe(plain(sampler=lambda: PrioritizedSampler(40, 0.7, 0.5)), with_priorities, 8, new_priorities),
    "slices": Recipe(plain(sampler=lambda: SliceSampler(**SLICES)), wrapped, more=ten_more),
    "slices-steps": Recipe(
        plain(sampler=lambda: SliceSampler(weight="steps", **SLICES)), wrapped, more=ten_more
    ),
    "slice-epoch": Recipe(
        plain(sampler=lambda: SliceSamplerWithoutReplacement(**SLICES)), part_of_an_epoch, more=ten_more
    ),
    "prioritized-slices": Recipe(
        plain(sampler=lambda: PrioritizedSliceSampler(40, 0.7, 0.5, **SLICES)), with_priorities, 8, new_priorities
    ),
    "sequences": Recipe(plain(sampler=lambda: SequenceSampler(burn_in=2, **SLICES)), wrapped, more=ten_more),
    "sequences-steps": Recipe(
        plain(sampler=lambda: SequenceSampler(burn_in=2, weight="steps", **SLICES)), wrapped, more=ten_more
    ),
    "max-value": Recipe(best(lambda: LazyTensorStorage(12)), wrapped, more=ten_more),
    "max-value-list": Recipe(best(lambda: ListStorage(12)), wrapped, more=ten_more),
    "max-value-flat": Recipe(
        best(lambda: LazyTensorStorage(12, checkpointer=FlatStorageCheckpointer())), wrapped, more=ten_more
    ),
    "max-value-nested": Recipe(
        best(lambda: LazyTensorStorage(12, checkpointer=NestedStorageCheckpointer())), wrapped, more=ten_more
    ),
    "max-value-h5": Recipe(
        best(lambda: LazyTensorStorage(12, checkpointer=H5StorageCheckpointer())), wrapped, more=ten_more
    ),
    "max-value-h5-groups": Recipe(
        best(lambda: LazyTensorStorage(12, checkpointer=grouped())), wrapped, more=ten_more
    ),
    "index": Recipe(index_too, wrapped, more=ten_more),
    "dataset": Recipe(plain(writer=ImmutableDatasetWriter), fill_dataset),
    "transforms-in-time": Recipe(in_time, wrapped, more=ten_more),
    "trajectory-numbers": Recipe(numbered, wrapped, more=ten_more),
    "transforms-norm": Recipe(normed, fill_normed, more=ten_more),
    "transforms-n-steps": Recipe(n_steps, wrapped, more=ten_more),
    "generator": Recipe(generator, fill_generator),  # no writes: what was prepared before may be read after them
}  # fmt: skip
