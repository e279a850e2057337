"""What a buffer is made of: the factors, how each level is made, and what is refused by design."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engram.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    QueueSampler,
    RandomSampler,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SampleToInsertRatio,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    TensorStorageCheckpointer,
)
from engram.envs.transforms import (
    CatFrames,
    InitTracker,
    MultiStepTransform,
    Reward2GoTransform,
    RewardSum,
    StepCounter,
    VecNorm,
)
from law.own_parts import OwnSampler, OwnSamplerWithState, OwnTransform

CAPACITY = 26  # time steps of a lane


class Place(NamedTuple):
    """A storage: `make(capacity, folder)`; environments (0: ndim=1), lanes."""

    make: Callable[[int, Callable[[], Path]], Storage | None]  # None: around tensors, which the data decide
    envs: int = 0
    lanes: int = 1


def _memory(ndim: int = 1, shared: bool = False, lanes: int = 1) -> Callable[..., Storage]:
    return lambda n, folder: LazyTensorStorage(n, ndim=ndim, shared=shared, lanes=lanes)


def _mapped(named: bool, ndim: int = 1, lanes: int = 1) -> Callable[..., Storage]:
    return lambda n, folder: LazyMemmapStorage(n, scratch_dir=folder() if named else None, ndim=ndim, lanes=lanes)


STORAGES = {
    "list": Place(lambda n, folder: ListStorage(n)),
    "memory": Place(_memory()),
    "shared": Place(_memory(shared=True)),
    "tensors": Place(lambda n, folder: None),
    "temporary": Place(_mapped(False)),
    "named": Place(_mapped(True)),
    "memory, envs": Place(_memory(2), envs=2),
    "shared, envs": Place(_memory(2, shared=True), envs=2),
    "tensors, envs": Place(lambda n, folder: None, envs=2),
    "temporary, envs": Place(_mapped(False, 2), envs=2),
    "named, envs": Place(_mapped(True, 2), envs=2),
    "shared, lanes": Place(_memory(shared=True, lanes=3), lanes=3),
    "temporary, lanes": Place(_mapped(False, lanes=3), lanes=3),
    "named, lanes": Place(_mapped(True, lanes=3), lanes=3),
}

SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "epochs, last dropped": lambda: SamplerWithoutReplacement(drop_last=True),
    "epochs, in order": lambda: SamplerWithoutReplacement(shuffle=False),
    "epochs, in order, last dropped": lambda: SamplerWithoutReplacement(drop_last=True, shuffle=False),
    "priorities": lambda: PrioritizedSampler(None, 0.7, 0.5),
    "priorities, within": lambda: PrioritizedSampler(None, 0.7, 0.5, max_priority_within_buffer=True),
    "priorities, mean": lambda: PrioritizedSampler(None, 1.0, 1.0, reduction="mean", dtype=torch.float64),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices, short": lambda: SliceSampler(num_slices=2, strict_length=False, span=True),
    "slices by step": lambda: SliceSampler(slice_len=2, weight="steps"),
    "slices, short, by step": lambda: SliceSampler(num_slices=2, strict_length=False, weight="steps"),
    "slice epochs": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "slice epochs, in order, last dropped": lambda: SliceSamplerWithoutReplacement(
        slice_len=2, drop_last=True, shuffle=False
    ),
    "slices by priority": lambda: PrioritizedSliceSampler(None, 0.7, 0.5, slice_len=2),
    "slices by priority, within": lambda: PrioritizedSliceSampler(
        None, 0.7, 0.5, slice_len=3, strict_length=False, max_priority_within_buffer=True
    ),
    "sequences": lambda: SequenceSampler(slice_len=3, burn_in=1),
    "sequences by step": lambda: SequenceSampler(slice_len=3, burn_in=2, weight="steps"),
    "own": OwnSampler,
    "own, with state": OwnSamplerWithState,
    "queue": QueueSampler,
    "queue, overwriting": lambda: QueueSampler(full="overwrite"),
    "queue, committed": lambda: QueueSampler(commit="manual"),
    "queue, committed, overwriting": lambda: QueueSampler(full="overwrite", commit="manual"),
    # Rows of later trajectories have a higher version.
    "queue, fresh": lambda: QueueSampler(max_staleness=30, version_key=("collector", "traj_ids")),
}

#: Bounds on the draws for each row written, so narrow that both sides meet them.
LIMITERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "ratio": lambda: SampleToInsertRatio(0.5, 8, ahead=12, behind=20),
    "ratio of draws alone": lambda: SampleToInsertRatio(1.0, 3, ahead=8, behind=None),
}

WRITERS: dict[str, Callable[[], Any]] = {
    "round robin": RoundRobinWriter,
    "with index": TensorDictRoundRobinWriter,
    "best": TensorDictMaxValueWriter,
    "immutable": ImmutableDatasetWriter,
}

# Transforms, each with whether it is appended with invert=True.
TRANSFORMS: dict[str, Callable[[], list[tuple[Any, bool]]]] = {
    "none": list,
    "vec norm": lambda: [(VecNorm(in_keys=["observation"], decay=0.9), False)],
    "vec norm on writing": lambda: [(VecNorm(in_keys=["observation"], out_keys=["normed"]), True)],
    "reward sum": lambda: [(RewardSum(), True)],
    "step counter": lambda: [(StepCounter(max_steps=4), True)],
    "frames": lambda: [(CatFrames(3, -1, in_keys=["observation"], out_keys=["frames"]), True)],
    "n steps": lambda: [(MultiStepTransform(3, 0.9), False)],
    "init": lambda: [(InitTracker(), True)],
    "reward to go": lambda: [(Reward2GoTransform(0.9), False)],
    "several": lambda: [
        (MultiStepTransform(2, 0.9), False),
        (StepCounter(), True),
        (RewardSum(), True),
        (VecNorm(in_keys=["observation"]), False),
        (CatFrames(2, -1, in_keys=["observation"], out_keys=["frames"]), True),
    ],
    "own": lambda: [(OwnTransform(), False)],
    "own, twice": lambda: [(OwnTransform(), False), (OwnTransform(), False)],
}

CHECKPOINTERS: dict[str, Callable[[], Any]] = {
    "rows": TensorStorageCheckpointer,
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
    "h5, groups": lambda: H5StorageCheckpointer(group_per_trajectory=True),
    "items": ListStorageCheckpointer,
}

WAYS = ["whole", "incremental", "background", "in memory", "reopened"]


class Combo(NamedTuple):
    """One level of each factor."""

    storage: str = "memory"
    sampler: str = "random"
    writer: str = "round robin"
    transform: str = "none"
    checkpointer: str = "rows"
    way: str = "whole"
    prefetch: int = 0
    own_generator: bool = True
    tensordict: bool = False
    limiter: str = "none"

    @property
    def place(self) -> Place:
        return STORAGES[self.storage]

    @property
    def is_queue(self) -> bool:
        return self.sampler.startswith("queue")

    @property
    def commits(self) -> bool:
        return self.sampler.startswith("queue, committed")

    @property
    def waits(self) -> bool:
        """Whether those who draw or write may wait for each other."""
        return self.is_queue or self.limiter != "none"


LEVELS: dict[str, list[Any]] = {
    "storage": list(STORAGES),
    "sampler": list(SAMPLERS),
    "writer": list(WRITERS),
    "transform": list(TRANSFORMS),
    "checkpointer": list(CHECKPOINTERS),
    "way": WAYS,
    "prefetch": [0, 3],
    "own_generator": [True, False],
    "tensordict": [False, True],
    "limiter": list(LIMITERS),
}


class Refusal(NamedTuple):
    """`error` that says `says` is what combinations get for which `holds`.

    `when` they are "made", or "written", or "closed".
    """

    why: str
    holds: Callable[[Combo], bool]
    when: str
    error: type[Exception]
    says: str


REFUSED = [
    Refusal(
        "a list is saved as items, not as rows",
        lambda c: c.storage == "list" and c.checkpointer != "items" and c.way != "in memory",
        "made", TypeError, "cannot save a ListStorage.*use a ListStorageCheckpointer",
    ),
    Refusal(
        "rows are not saved as items",
        lambda c: c.storage != "list" and c.checkpointer == "items" and c.way != "in memory",
        "made", TypeError, "a ListStorageCheckpointer cannot save.*use a TensorStorageCheckpointer",
    ),
    Refusal(
        "the writer that keeps the best replaces rows one by one, in one dimension",
        lambda c: c.writer == "best" and c.place.envs > 0, "made", ValueError, "ndim=1",
    ),
    Refusal(
        "and in one lane",
        lambda c: c.writer == "best" and c.place.lanes > 1, "written", ValueError, "lanes=1",
    ),
    Refusal(
        "rows of a queue come in the order in which they were written",
        lambda c: c.is_queue and c.writer == "best", "made", TypeError, "a TensorDictMaxValueWriter puts them",
    ),
    Refusal(
        "a batch of a queue is taken when it is wanted",
        lambda c: c.is_queue and c.prefetch > 0, "made", ValueError, "make the buffer without prefetch",
    ),
    Refusal(
        "a queue has rules of its own for who waits",
        lambda c: c.is_queue and c.limiter != "none", "made", ValueError, "either a rate limiter or is a queue",
    ),
    Refusal(
        "nobody writes to an immutable dataset behind its newest row",
        lambda c: c.is_queue and c.writer == "immutable", "closed", TypeError, "a ImmutableDatasetWriter puts them",
    ),
]  # fmt: skip


def refusal(combo: Combo) -> Refusal | None:
    """Why a combination is refused; None: it is not."""
    return next((one for one in REFUSED if one.holds(combo)), None)


def exists(combo: Combo) -> bool:
    """Whether the levels mean something together.

    Only stores with a name are reopened; where writers move from lane to lane, who opens one does not write where its
    predecessor would have.
    """
    return combo.way != "reopened" or (combo.storage.startswith("named") and combo.place.lanes == 1)


# ---- selections ----
#: The factors with the most levels: their pairs are more than those of all others.
WIDE = ("storage", "sampler", "transform")


@functools.cache
def pairwise(seed: int = 0, wide: bool = True) -> list[Combo]:
    """Few combinations in which every possible pair of levels of two factors occurs; none that is refused.

    Without `wide` the levels of two wide factors need not meet, which makes half as many.
    """
    chance, names = random.Random(seed), list(LEVELS)
    levels = [(name, level) for name in names for level in LEVELS[name]]
    missing = {
        (x, y)
        for x, y in itertools.combinations(levels, 2)
        if x[0] != y[0] and (wide or not {x[0], y[0]} <= set(WIDE)) and _possible(dict((x, y)))
    }
    waiting = sorted(missing, key=lambda pair: [names.index(pair[0][0]), str(pair)])
    found = []
    for pair in waiting:
        if pair in missing:
            found.append(_completed(dict(pair), missing, chance))
            missing -= set(itertools.combinations(found[-1]._asdict().items(), 2))
    return found


def _completed(made: dict[str, Any], missing: set[Any], chance: random.Random) -> Combo:
    """The other levels, so that many of the missing pairs are in it."""
    names = [name for name in LEVELS if name not in made]
    chance.shuffle(names)
    for name in names:
        levels = [level for level in LEVELS[name] if _possible({**made, name: level})]
        chance.shuffle(levels)
        items = list(made.items())
        made[name] = max(
            levels,
            key=lambda level: sum(
                ((name, level), item) in missing or (item, (name, level)) in missing for item in items
            ),
        )
    return Combo(**made)


# The factors whose levels may not go together.
_TIED = ("storage", "writer", "checkpointer", "way", "sampler", "prefetch", "limiter")


def _possible(some: dict[str, Any]) -> bool:
    """Whether a combination with these levels exists and is not refused."""
    return _possible_ties(tuple(some.get(name) if name not in _ALIKE else _alike(some, name) for name in _TIED))


# Of the samplers, what is refused looks at whether it is a queue; of limiters, whether there is one.
_ALIKE = {"sampler": ("random", "queue"), "limiter": ("none", "ratio")}


def _alike(some: dict[str, Any], name: str) -> str | None:
    """The level that stands for all that are alike; None: it is not decided."""
    level = some.get(name)
    return (
        None if level is None else next((one for one in _ALIKE[name][::-1] if level.startswith(one)), _ALIKE[name][0])
    )


@functools.cache
def _possible_ties(given: tuple[Any, ...]) -> bool:
    levels = {**LEVELS, **_ALIKE}
    free = (levels[name] if level is None else [level] for name, level in zip(_TIED, given, strict=True))
    made = (Combo(**dict(zip(_TIED, levels, strict=True))) for levels in itertools.product(*free))
    return any(exists(combo) and refusal(combo) is None for combo in made)


def product() -> Iterator[Combo]:
    """Every combination of storage, sampler, writer and checkpointer; the other factors take turns."""
    others = [name for name in LEVELS if name not in ("storage", "sampler", "writer", "checkpointer")]
    chance = random.Random(0)
    turns = {name: itertools.cycle(chance.sample(LEVELS[name] * 7, len(LEVELS[name]) * 7)) for name in others}
    for s, d, w, c in itertools.product(STORAGES, SAMPLERS, WRITERS, CHECKPOINTERS):
        combo = Combo(s, d, w, checkpointer=c, **{name: next(turns[name]) for name in others})
        if combo.way == "in memory" or not exists(combo):
            combo = combo._replace(way="incremental")
        if combo.is_queue:
            combo = combo._replace(prefetch=0, limiter="none")
        yield combo
        if c == "rows":
            yield combo._replace(way="in memory")
