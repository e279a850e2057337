"""Every path that draws, found by what is registered: samplers with their settings, storages, fronts; and three laws.

No path hands out rows that were removed; each counts what it hands out where draws are bound; and out of a queue each
takes what it hands out.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import pkgutil
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

import engram.data.replay_buffers.samplers
from engram._arguments import BUILT_IN
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SamplerEnsemble,
    SampleToInsertRatio,
    Storage,
    StorageEnsemble,
    TensorStorage,
)

CAPACITY = 40
FIRST = 1000  # the number of the first row: padding has 0
EPISODE = 8
BATCH = 10
MOST = 500  # batches


# ---- rows ----
def steps(start: int, stop: int, env: int | None = None) -> TensorDict:
    """Steps of episodes, told apart by `n`; [stop - start]."""
    t = torch.arange(start, stop)
    n = FIRST + t + (0 if env is None else 10_000 * env)
    frames = torch.stack([n + i for i in range(3)], 1).float()
    done = (t % EPISODE == EPISODE - 1).unsqueeze(-1)
    following = {"observation": frames + 1, "reward": n.float().unsqueeze(-1), "done": done, "terminated": done}
    following["truncated"] = torch.zeros_like(done)
    return TensorDict({"n": n, "observation": frames, "next": following}, [stop - start])


def chosen(n: torch.Tensor) -> torch.Tensor:
    """The rows to remove: one in each episode, after which three and four steps are left, and a whole one."""
    t = (n - FIRST) % 10_000
    return (t % EPISODE == 3) | (t // EPISODE == 2)


def numbers(batch: Any) -> set[int]:
    """The rows of a batch, of whatever form."""
    if isinstance(batch, list | tuple):
        return set().union(*map(numbers, batch))
    found = torch.as_tensor(batch["n"]).flatten().tolist()
    return {int(n) for n in found if n}


# ---- storages ----
class Place(NamedTuple):
    """How to make a storage, and how many environments its steps are of."""

    make: Callable[[Path], Storage]
    envs: int = 0


def _tensors(folder: Path) -> Storage:
    storage = TensorStorage(steps(0, CAPACITY))
    storage.empty()
    return storage


#: Beside one of each class that is registered.
PLACES: dict[str, Place] = {
    "TensorStorage": Place(_tensors),
    "shared": Place(lambda folder: LazyTensorStorage(CAPACITY, shared=True)),
    "lanes": Place(lambda folder: LazyTensorStorage(2 * CAPACITY, shared=True, lanes=2)),
    "compact": Place(lambda folder: LazyTensorStorage(CAPACITY, compact=True)),
    "compact, shared": Place(lambda folder: LazyTensorStorage(CAPACITY, compact=True, shared=True)),
    "named": Place(lambda folder: LazyMemmapStorage(CAPACITY, scratch_dir=folder / "store")),
    "environments": Place(lambda folder: LazyTensorStorage(2 * CAPACITY, ndim=2), 2),
    "environments, named": Place(lambda folder: LazyMemmapStorage(2 * CAPACITY, scratch_dir=folder / "e", ndim=2), 2),
    "without limit": Place(lambda folder: ListStorage()),
}


def places() -> dict[str, Place]:
    """All storages that can be written to: one of each registered class, made with a capacity, and other settings."""
    classes = {cls.__name__: cls for cls in sorted(subclasses(Storage), key=lambda cls: cls.__name__)}
    # The class of read-only storages is what `open` makes; members of an ensemble are storages themselves.
    for special in ("TableStorage", "ObservedMemmapStorage", StorageEnsemble.__name__):
        classes.pop(special, None)
    made = {name: Place(lambda folder, cls=cls: cls(CAPACITY)) for name, cls in classes.items() if name not in PLACES}
    return {**made, **PLACES}


def subclasses(cls: type) -> set[type]:
    """Those of the library's own, at any depth, without the class itself."""
    below = {sub for child in cls.__subclasses__() for sub in {child, *subclasses(child)}}
    return {sub for sub in below if sub.__module__.startswith("engram.")}


# ---- samplers ----
#: Values of the arguments that have no default, by name; and of a length that slices need.
NEEDED: dict[str, Any] = {"max_capacity": None, "alpha": 0.7, "beta": 0.5, "slice_len": 2}
#: Other values than the default of arguments that decide what is drawn, by name.
VARIED: dict[str, list[Any]] = {
    "replacement": [False], "drop_last": [True], "shuffle": [False], "strict_length": [False], "span": [True],
    "pad_output": [True], "weight": ["steps"], "burn_in": [1], "world_size": [2], "slice_key": ["slice"],
    "max_priority_within_buffer": [True], "rank": [1], "eps": [0.1], "num_slices": [5],
}  # fmt: skip


def arguments(cls: type) -> set[str]:
    """The names of a constructor's arguments, those that it hands to its base included."""
    names: set[str] = set()
    for base in cls.__mro__:
        own = inspect.signature(base.__init__).parameters if "__init__" in vars(base) else {}
        names |= own.keys()
        if own and not any(p.kind is p.VAR_KEYWORD for p in own.values()):
            break
    return names


def samplers() -> dict[str, Callable[[], Any]]:
    """Each registered sampler, with each setting that it allows, and some as users write them."""
    package = engram.data.replay_buffers.samplers
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    made: dict[str, Callable[[], Any]] = dict(OWN)
    for cls in sorted((c for c in BUILT_IN if issubclass(c, Sampler)), key=lambda c: c.__name__):
        # Those of ensembles alone; a queue hands each row out once (tests/data/test_queue.py).
        if issubclass(cls, SamplerEnsemble | QueueSampler):
            continue
        names = arguments(cls)
        base = {name: value for name, value in NEEDED.items() if name in names}
        variants = [{}] + [{name: value} for name, values in VARIED.items() if name in names for value in values]
        variants += [{"strict_length": False, name: value} for name, value in (("weight", "steps"), ("span", True))]
        for variant in variants:
            given = {**base, **variant}
            if "num_slices" in variant:
                given.pop("slice_len", None)
            if not given.keys() <= names:
                continue
            try:
                cls(**given)
            except (TypeError, ValueError):
                continue  # settings that do not go together
            label = ", ".join([cls.__name__, *(f"{name}={value}" for name, value in variant.items())])
            made[label] = lambda cls=cls, given=given: cls(**given)
    return made


class AnyRows:
    """A user's sampler, which looks at nothing."""

    def sample(self, storage: Any, batch_size: int) -> Any:
        rows = torch.randint(len(storage), (batch_size,))
        return storage.from_slots(rows), {"drawn": torch.arange(batch_size)}


class ChildOfRandom(RandomSampler):
    """A child whose draws are its own."""

    def sample(self, storage: Any, batch_size: int) -> Any:
        return storage.from_slots(torch.randint(len(storage), (batch_size,))), {}


class FixedSlots:
    """Goes through all slots in order, whatever is in them."""

    def __init__(self) -> None:
        self.at = 0

    def sample(self, storage: Any, batch_size: int) -> Any:
        rows = torch.arange(self.at, self.at + batch_size) % len(storage)
        self.at += batch_size
        return storage.from_slots(rows), {}


OWN: dict[str, Callable[[], Any]] = {"own": AnyRows, "own, a child": ChildOfRandom, "own, fixed slots": FixedSlots}


# ---- fronts and ways to read ----
def fronts() -> dict[str, Callable[..., ReplayBuffer]]:
    """How to make a buffer of each registered class that takes parts."""
    return {
        cls.__name__: cls
        for cls in (ReplayBuffer, *sorted(subclasses(ReplayBuffer), key=lambda cls: cls.__name__))
        if not issubclass(cls, ReplayBufferEnsemble)
        and "storage" in arguments(cls)  # others bring a dataset of their own
    }


class Reading(NamedTuple):
    """Arguments of a buffer, what gives its next batches, and how many of these were prepared before a `remove`."""

    arguments: dict[str, Any]
    batches: Callable[[ReplayBuffer], Iterable[Any]]
    ahead: int = 0


def _one(**how: Any) -> Callable[[ReplayBuffer], Iterable[Any]]:
    return lambda rb: [rb.sample(**how)]


def _loader(rb: ReplayBuffer) -> Iterable[Any]:
    dataset = rb.as_iterable_dataset(batches=4)
    return DataLoader(dataset, batch_size=None, collate_fn=dataset.collate)


_besides: weakref.WeakKeyDictionary[ReplayBuffer, ReplayBuffer] = weakref.WeakKeyDictionary()


def _beside(rb: ReplayBuffer) -> Iterable[Any]:
    """Of another buffer of the same storage, which knows nothing of a rate limiter."""
    if rb not in _besides:
        _besides[rb] = type(rb)(storage=rb.storage, sampler=copy.deepcopy(rb.sampler), batch_size=BATCH)
    return [_besides[rb].sample()]


READINGS: dict[str, Reading] = {
    "sample": Reading({}, _one()),
    "info": Reading({}, lambda rb: [rb.sample(return_info=True)[0]]),
    "numpy": Reading({}, _one(as_numpy=True)),
    "iteration": Reading({}, lambda rb: itertools.islice(rb, 4)),
    "collate function": Reading({"collate_fn": lambda batch: batch}, _one()),
    "transform": Reading({"transform": lambda batch: batch}, _one()),
    "prefetch": Reading({"prefetch": 2}, _one(), 3),
    "prefetch through a transform": Reading({"prefetch": 2, "transform": lambda batch: batch}, _one(), 3),
    "tensors used again": Reading({"reuse_batches": True}, _one()),
    "generations": Reading({"track_generations": True}, _one()),
    "published": Reading({"publish_stats": True}, _one()),  # of a named store
    "dataset": Reading({}, lambda rb: rb.as_iterable_dataset(batches=4)),
    "data loader": Reading({}, _loader),
    "next": Reading({}, lambda rb: [batch for batch in [rb.next()] if batch is not None]),  # None ends an epoch
    "next()": Reading({}, lambda rb: [next(rb)]),
    "another buffer": Reading({}, _beside),
}


# ---- the law ----
def filled(
    storage: Storage, envs: int = 0, front: Callable[..., ReplayBuffer] = ReplayBuffer, **parts: Any
) -> ReplayBuffer:
    """A buffer of which the ring has come round, where it is one."""
    rb = front(storage=storage, batch_size=BATCH, **parts)
    for start, stop in ((0, 25), (25, CAPACITY + 6)):
        rb.extend(steps(start, stop) if not envs else torch.stack([steps(start, stop, env) for env in range(envs)]))
    return rb


def remove_chosen(rb: ReplayBuffer) -> tuple[set[int], set[int]]:
    """Removes rows; returns the numbers of those, and of those that are left."""
    everything = numbers(rb[:])
    gone = {n for n in everything if bool(chosen(torch.tensor(n)))}
    assert rb.remove(lambda rows: chosen(rows["n"])) == len(gone) > 0
    assert rb.stats().removed == len(gone)
    return gone, everything - gone


def law(batches: Callable[[], Iterable[Any]], removed: set[int], left: set[int], ahead: int = 0) -> None:
    """AssertionError where a batch has a removed row, or one of the others does not come.

    Args:
        ahead: batches that were prepared before the rows were removed.
    """
    seen: set[int] = set()
    for _ in range(MOST):
        for batch in batches():
            found, ahead = numbers(batch), ahead - 1
            if ahead >= 0:
                continue
            assert not found & removed, f"{sorted(found & removed)} were removed"
            seen |= found
        if seen >= left:
            return
    raise AssertionError(f"{sorted(left - seen)} never come")


def check(rb: ReplayBuffer, batches: Callable[[ReplayBuffer], Iterable[Any]], ahead: int = 0) -> None:
    """Draws, removes rows, and looks at the law."""
    for _ in batches(rb):
        pass
    gone, left = remove_chosen(rb)
    law(lambda: batches(rb), gone, left, ahead)


# ---- the laws of a rate limiter and of a queue ----
#: Of what `filled` writes, so many rows may be drawn.
DRAWS = 40
LIMITER = SampleToInsertRatio(1.0, 8, ahead=DRAWS - (CAPACITY + 6 - 8), behind=100)


def count(batch: Any) -> int:
    """The rows of a batch, of whatever form."""
    return sum(map(count, batch)) if isinstance(batch, list | tuple) else torch.as_tensor(batch["n"]).numel()


def check_counted(rb: ReplayBuffer, batches: Callable[[ReplayBuffer], Iterable[Any]]) -> None:
    """AssertionError where a batch of a `filled` buffer with the LIMITER is not counted, or comes beyond its bound.

    The caller sees to it that a wait which nobody can end is an error: contracts.waiting.seems_alone. In a file, where
    somebody might, no batch is asked for that would wait. A batch counts as the rows that were asked for: the last one
    of an epoch may have fewer, and one of stacks of frames has more.
    """
    drawn, may_ask = 0, rb.storage.lanes.copied_by_fork
    try:
        while may_ask or rb.can_sample():
            for _ in batches(rb):
                drawn += BATCH
                assert rb.stats().samples == drawn <= DRAWS, f"{drawn} rows came, {rb.stats().samples} were counted"
    except RuntimeError as error:
        assert "sample waits for" in str(error)
    assert drawn == DRAWS


def check_once(rb: ReplayBuffer, batches: Callable[[ReplayBuffer], Iterable[Any]]) -> None:
    """AssertionError where a row of a `filled` queue comes twice, or not at all, or although it was removed."""
    gone, left = remove_chosen(rb)
    seen: set[int] = set()
    while rb.can_sample():
        for batch in batches(rb):
            found = numbers(batch)
            assert count(batch) == len(found) and not found & (seen | gone), f"{sorted(found & (seen | gone))} came"
            seen |= found
            assert rb.stats().waiting == len(left - seen), (
                f"{rb.stats().waiting} rows wait, {len(left - seen)} are left"
            )
    assert seen <= left and len(left - seen) < BATCH
