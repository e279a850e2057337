"""One thing left out of what is saved, loaded or rewound: each time the law must be seen to fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from engram.data import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
)
from engram.data.replay_buffers.reading.prefetch import Prefetcher
from engram.data.replay_buffers.samplers.epochs import RowEpochs, SliceEpochs
from engram.data.replay_buffers.state import buffers as saving
from engram.data.replay_buffers.state.checkpointers.ted import FlatChunkCodec, NestedChunkCodec
from engram.data.replay_buffers.state.generators import SavedGenerator
from engram.data.replay_buffers.state.parts import SavedTransforms
from engram.data.replay_buffers.state.rows import RowLoad
from engram.envs.transforms import CatFrames, Compose, MultiStepTransform, RewardSum, StepCounter, VecNorm
from engram.store.items import ItemRows
from engram.store.lanes import Lanes
from engram.store.packed_rows import PackedRows
from engram.store.snapshots import ChangeTracker
from law.combos import Combo
from law.own_parts import OwnSamplerWithState, OwnTransform

Patch = pytest.MonkeyPatch


class Mutant(NamedTuple):
    """`plant` patches it in; the law is broken for this combination."""

    plant: Callable[[Patch], None]
    combo: Combo


def loading(owner: Any, change: Callable[[dict[str, Any]], Any]) -> Callable[[Patch], None]:
    """`load_state_dict` gets another state: what `change` makes of a copy of it."""
    original = owner.load_state_dict

    def load(self: Any, state: Any) -> None:
        original(self, change({**state}) if state else state)

    return lambda patch: patch.setattr(owner, "load_state_dict", load)


def without(*path: str, value: Any = None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A state in which one field has another value, if it is there."""

    def change(state: dict[str, Any]) -> dict[str, Any]:
        inner = state
        for key in path[:-1]:
            if not isinstance(inner.get(key), dict):
                return state
            inner[key] = {**inner[key]}
            inner = inner[key]
        if path[-1] in inner:
            inner[path[-1]] = value(inner[path[-1]]) if callable(value) else value
        return state

    return change


def nothing(*_: Any, **__: Any) -> None:
    """In the place of what should have happened."""


def instead(owner: Any, name: str, method: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, method)


def around(owner: Any, name: str, changed: Callable[..., Any]) -> Callable[[Patch], None]:
    """`changed(original, *args)` in the place of a method or function."""
    original = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: changed(original, *args, **kwargs))


def _shared_with_a_late_save(patch: Patch) -> None:
    """Nothing is copied, and the save's thread comes to its work when the buffer has gone on."""
    save = saving.save_snapshot

    def late(*args: Any, **kwargs: Any) -> str:
        time.sleep(0.1)
        return save(*args, **kwargs)

    patch.setattr(saving, "save_snapshot", late)
    patch.setattr(saving.copy, "deepcopy", lambda value: value)


def restored(change: Callable[[list[Any]], list[Any]]) -> Callable[[Patch], None]:
    """The counters of a table come back changed: base, published, origin, seams."""

    def plant(patch: Patch) -> None:
        original = RowLoad.begin_restore

        def begin(self: Any, layout: Any, counters: Any) -> None:
            names = ("base", "published", "origin", "seams")
            changed = [change([lane[name] for name in names]) for lane in counters["lanes"]]
            lanes = [
                {**lane, **dict(zip(names, new, strict=True))}
                for lane, new in zip(counters["lanes"], changed, strict=True)
            ]
            original(self, layout, {**counters, "lanes": lanes})

        patch.setattr(RowLoad, "begin_restore", begin)

    return plant


def with_lanes(name: str, **values: Any) -> Callable[[Patch], None]:
    """What the lanes of a table say of their rate limiter, or of their queue, comes back changed."""

    def restore(original: Any, self: Any, i: int, lane: dict[str, Any], shift: int) -> None:
        said = lane.get(name)
        changed = {key: value(said) if callable(value) else value for key, value in values.items()} if said else {}
        original(self, i, {**lane, name: {**said, **changed}} if said else lane, shift)

    return around(Lanes, "restore_lane", restore)


def _no_flow(original: Any, self: Any) -> list[dict[str, Any]]:
    """Nothing is saved of who waits for whom."""
    return [{key: value for key, value in lane.items() if key not in ("rate", "queue")} for lane in original(self)]


def _one_less(ranges: list[list[int]]) -> list[list[int]]:
    return [[first, max(1, rows - 1)] for first, rows in ranges]


def _half(priorities: torch.Tensor) -> torch.Tensor:
    made = priorities.clone()
    made[:1] /= 2
    return made


def _no_values(original: Any, self: Any, rows: Any, cuts: Any) -> Any:
    """The steps that are no copies of the next observation are written with the first one's value."""
    details, blocks = original(self, rows, cuts)
    return details, [block[:1].repeat(len(block), 0) if getattr(block, "ndim", 0) == 2 and len(block) > 1 else block
                     for block in blocks]  # fmt: skip


def _no_sequences(original: Any, self: Any, lane: int, start: int, rows: Any) -> None:
    """Rows come back as if none had ever been replaced."""
    offset = self.layout.sequence_offset
    if offset is not None:
        rows = rows.copy()
        rows[..., offset : offset + 8] = 0
    original(self, lane, start, rows)


def _no_sequences_of_flat(original: Any, self: Any, *content: Any) -> Any:
    rows = original(self, *content)
    for leaf in self._leaves:
        if leaf.hidden:
            rows[..., leaf.offset : leaf.offset + leaf.nbytes] = 0
    return rows


def _skip_transforms(original: Any, self: Any, state: Any) -> None:
    original(self, None)


def _first_for_all(original: Any, self: Any, state: dict[str, Any]) -> None:
    entries = state.get("transforms", [])
    original(self, {"transforms": [{**entry, "state": entries[0]["state"]} for entry in entries]} if entries else state)


def _only_sampler(original: Any, self: Any, cursor: Any, generators: Any) -> None:
    original(self, cursor, [generator.get_state() for generator in self._generators])


def _only_generator(original: Any, self: Any, cursor: Any, generators: Any) -> None:
    for generator, state in zip(self._generators, generators, strict=True):
        generator.set_state(state)


def _kept(original: Any, self: Any, state: Any) -> None:
    if state:
        original(self, state)


EPOCHS = Combo(sampler="epochs")
PRIORITIES = Combo(sampler="priorities")
SLICE_EPOCHS = Combo(sampler="slice epochs")

MUTANTS = {
    # ---- samplers ----
    "the position in an epoch": Mutant(
        loading(SamplerWithoutReplacement, without("epoch", "position", value=0)), EPOCHS
    ),
    "the key of an epoch": Mutant(loading(SamplerWithoutReplacement, without("epoch", "key", value=1)), EPOCHS),
    "the rows of an epoch": Mutant(
        loading(SamplerWithoutReplacement, without("epoch", "ranges", value=_one_less)), EPOCHS
    ),
    "the epoch": Mutant(loading(SamplerWithoutReplacement, without("epoch")), EPOCHS),
    "that an epoch ran out": Mutant(loading(SamplerWithoutReplacement, without("ran_out", value=False)), EPOCHS),
    "that a store counts anew (epochs)": Mutant(instead(RowEpochs, "_move", nothing), EPOCHS),
    "copies of what parts say, for a state in memory": Mutant(
        lambda patch: _shared_with_a_late_save(patch),
        Combo(sampler="own, with state", way="in memory"),
    ),
    "the position in an epoch of slices": Mutant(
        loading(SliceSamplerWithoutReplacement, without("epoch", "position", value=0)), SLICE_EPOCHS
    ),
    "the key of an epoch of slices": Mutant(
        loading(SliceSamplerWithoutReplacement, without("epoch", "key", value=1)), SLICE_EPOCHS
    ),
    "the trajectories of an epoch of slices": Mutant(
        loading(SliceSamplerWithoutReplacement, without("epoch", "lasts", value=lambda v: [-1] * len(v))), SLICE_EPOCHS
    ),
    "that a store counts anew (slice epochs)": Mutant(
        instead(SliceEpochs, "_move", nothing), SLICE_EPOCHS
    ),
    "a priority": Mutant(loading(PrioritizedSampler, without("priorities", value=_half)), PRIORITIES),
    "the highest priority": Mutant(loading(PrioritizedSampler, without("max_priority", value=1.0)), PRIORITIES),
    "the latest priority": Mutant(
        loading(PrioritizedSampler, without("latest_priority", value=0.5)), Combo(sampler="priorities, within")
    ),
    "which rows have been seen": Mutant(
        loading(PrioritizedSampler, without("seen", value=lambda v: [[0, 0] for _ in v])), PRIORITIES
    ),
    "the count of skipped updates": Mutant(
        loading(PrioritizedSampler, without("skipped", value=0)), PRIORITIES._replace(tensordict=True)
    ),
    "beta": Mutant(loading(PrioritizedSampler, without("beta", value=0.5)), PRIORITIES),
    "the priority of a slice's start": Mutant(
        loading(PrioritizedSliceSampler, without("priorities", value=_half)), Combo(sampler="slices by priority")
    ),
    "the position of a user's own sampler": Mutant(
        loading(OwnSamplerWithState, without("at", value=lambda v: v * 0)), Combo(sampler="own, with state")
    ),
    # ---- writers and counters ----
    "the sequences of replaced rows": Mutant(around(PackedRows, "set_block", _no_sequences), Combo(writer="best")),
    "the sequences of replaced rows (flat)": Mutant(
        around(FlatChunkCodec, "unpack", _no_sequences_of_flat), Combo(writer="best", checkpointer="flat")
    ),
    "the sequences of replaced items": Mutant(
        around(ItemRows, "restore", lambda f, self, items, said, own: f(self, items, said, [0] * len(own))),
        Combo("list", writer="best", checkpointer="items"),
    ),
    "how many sequences were given": Mutant(
        around(Lanes, "restore_lane", lambda f, self, i, lane, shift: f(self, i, {**lane, "replaced": 0}, shift)),
        Combo(writer="best"),
    ),
    "the write count": Mutant(restored(lambda v: [v[0], v[1], 0, v[3]]), Combo(way="incremental")),
    "the seams": Mutant(restored(lambda v: [*v[:3], []]), Combo("shared, lanes", "slices")),
    "the newest row": Mutant(restored(lambda v: [v[0], max(v[0], v[1] - 1), v[2], v[3]]), Combo(way="in memory")),
    "the order of a list": Mutant(
        around(ItemRows, "restore", lambda f, self, items, *more: f(self, items[::-1], *more)),
        Combo("list", checkpointer="items"),
    ),
    # ---- queues and rate limiters ----
    "which rows were handed out": Mutant(with_lanes("queue", consumed=0, kept=0), Combo(sampler="queue")),
    "which rows were handed out, of those that are overwritten": Mutant(
        with_lanes("queue", consumed=lambda queue: queue["consumed"] - 1), Combo(sampler="queue, overwriting")
    ),
    "which rows are committed": Mutant(with_lanes("queue", kept=0), Combo(sampler="queue, committed")),
    "which rows are not committed": Mutant(
        with_lanes("queue", kept=lambda queue: queue["consumed"]), Combo(sampler="queue, committed", way="in memory")
    ),
    "the version that trains": Mutant(with_lanes("queue", version=0), Combo(sampler="queue, fresh")),
    "how many rows were missed": Mutant(with_lanes("queue", missed=0), Combo(sampler="queue, committed, overwriting")),
    "how many rows were too old": Mutant(with_lanes("queue", stale=0), Combo(sampler="queue, fresh")),
    "a queue": Mutant(around(Lanes, "saved_states", _no_flow), Combo("shared, lanes", "queue", way="background")),
    "how many rows were drawn": Mutant(with_lanes("rate", drawn=0), Combo(limiter="ratio")),
    "how many rows were written since draws are counted": Mutant(
        with_lanes("rate", written=lambda rate: rate["written"] + 1), Combo(limiter="ratio of draws alone")
    ),
    "the counts of a rate limiter": Mutant(
        around(Lanes, "saved_states", _no_flow), Combo("shared, lanes", way="in memory", limiter="ratio")
    ),
    # ---- transforms ----
    "rows that are held back": Mutant(
        around(MultiStepTransform, "load_state_dict", lambda f, self, state: f(self, {})), Combo(transform="n steps")
    ),
    "rows that the twin held back": Mutant(
        around(Compose, "load_state_dict", _kept), Combo(transform="n steps", way="in memory")
    ),
    "the weight of statistics": Mutant(
        loading(VecNorm, without("stats", value=lambda v: [(1.0, *one[1:]) for one in v])), Combo(transform="vec norm")
    ),
    "the statistics": Mutant(
        around(VecNorm, "load_state_dict", nothing), Combo(transform="vec norm", way="background")
    ),
    "the running sum": Mutant(instead(RewardSum, "load_state_dict", nothing), Combo(transform="reward sum")),
    "the count of steps": Mutant(instead(StepCounter, "load_state_dict", nothing), Combo(transform="step counter")),
    "the last frames": Mutant(instead(CatFrames, "load_state_dict", nothing), Combo(transform="frames")),
    "which of two transforms has which state": Mutant(
        around(Compose, "load_state_dict", _first_for_all), Combo(transform="several")
    ),
    "the state of a user's own transform": Mutant(
        loading(OwnTransform, without("writes", value=0)), Combo(transform="own")
    ),
    "all transforms": Mutant(around(SavedTransforms, "load", _skip_transforms), Combo(transform="init")),
    # ---- the buffer ----
    "the generator": Mutant(instead(SavedGenerator, "load", nothing), Combo()),
    "the rewind of the sampler": Mutant(around(Prefetcher, "_rewind", _only_generator), EPOCHS._replace(prefetch=3)),
    "the rewind of the generator": Mutant(around(Prefetcher, "_rewind", _only_sampler), Combo(prefetch=3)),
    "what was prepared before a load": Mutant(instead(Prefetcher, "drop", nothing), Combo(prefetch=3)),
    "copies of what parts say, for a background save": Mutant(
        lambda patch: patch.setattr(saving.copy, "deepcopy", lambda value: value),
        Combo(sampler="own, with state", way="background"),
    ),
    # ---- checkpointers ----
    "rows changed in place, since the last save": Mutant(
        instead(ChangeTracker, "edited", lambda self, since: []), Combo(way="incremental")
    ),
    "observations that do not follow (flat)": Mutant(
        around(FlatChunkCodec, "pack", _no_values), Combo(checkpointer="flat")
    ),
    "observations that do not follow (nested)": Mutant(
        around(NestedChunkCodec, "pack", _no_values), Combo(checkpointer="nested")
    ),
}  # fmt: skip
