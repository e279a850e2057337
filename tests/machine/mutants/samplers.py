"""Samplers that are wrong by one."""

from __future__ import annotations

from typing import Any

import torch

from engram import _native
from engram.data import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    Storage,
)
from engram.data.replay_buffers.reading import reader
from engram.data.replay_buffers.samplers.epochs import RowEpochs
from engram.data.replay_buffers.samplers.runs import RunRule
from engram.pytree import get_entry
from machine.mutants.base import Mutant, around


# ---- uniform samplers that are wrong by one ----
def newest_of(storage: Storage) -> int:
    generations = storage.lanes.generations(torch.arange(storage.max_size))
    return int(generations.argmax())


def never_the_newest(sample: Any, sampler: Any, storage: Storage, n: int) -> Any:
    slots, info = sample()
    return torch.where(slots == newest_of(storage), (slots + 1) % len(storage), slots), info


def one_further(sample: Any, sampler: Any, storage: Storage, n: int) -> Any:
    slots, info = sample()
    return (slots + 1) % storage.max_size, info


def of_runs(changed: Any) -> Any:
    """The same change of what a sampler of runs draws: a plan, slots and info."""

    def change(draw: Any, sampler: Any, storage: Storage, n: int) -> Any:
        plan, slots, info = draw()
        return plan, *changed(lambda: (slots, info), sampler, storage, n)

    return change


def repeats_its_first(sample: Any, sampler: Any, storage: Storage, n: int) -> Any:
    slots, info = sample()
    slots[-1] = slots[0]
    return slots, info


def one_short(sample: Any, sampler: Any, storage: Storage, n: int) -> Any:
    slots, info = sample()
    return slots[: max(1, len(slots) - 1)], info


def begins_at_the_second(begin: Any, epochs: Any, storage: Storage, lanes: Any, *_: Any) -> None:
    before = epochs.epoch
    begin()
    if before is None and len(lanes) > 1:
        epochs.place["position"] = 1


UNIFORM_MUTANTS = {
    "random draws that never hit the newest row": Mutant(around(RandomSampler, "sample", never_the_newest)),
    "random draws one further": Mutant(around(RandomSampler, "sample", one_further)),
    "random draws one row short": Mutant(around(RandomSampler, "sample", one_short)),
    "an epoch that repeats a row": Mutant(
        around(SamplerWithoutReplacement, "sample", repeats_its_first), sampler="epoch"
    ),
    "an epoch that leaves out its first row": Mutant(around(RowEpochs, "go_on", begins_at_the_second), sampler="epoch"),
    "an epoch in order that begins at the second row": Mutant(
        around(SamplerWithoutReplacement, "sample", one_further), sampler="epoch in order"
    ),
    "an epoch that drops one row more than the last batch": Mutant(
        around(SamplerWithoutReplacement, "sample", one_short), sampler="epoch, last dropped"
    ),
}


# ---- priorities that are wrong by one ----
def weights_of_the_neighbour(sample: Any, sampler: Any, storage: Storage, n: int) -> Any:
    slots, info = sample()
    return slots, {**info, "priority_weight": info["priority_weight"].roll(1)}


def one_before_is_updated(update: Any, sampler: Any, index: Any, *rest: Any) -> None:
    update((torch.as_tensor(index) - 1).clamp(min=0), *rest)


def next_stored(sample: Any, sampler: Any, storage: Storage, n: int) -> Any:
    slots, info = sample()
    return (slots + 1) % len(storage), info


def newest_has_half(sample: Any, sampler: Any, storage: Storage, n: int) -> Any:
    newest = storage.lanes.generations(torch.arange(storage.max_size)).argmax()
    sampler.update_priority(newest, sampler.priorities(newest, storage=storage) / 2, storage=storage)
    return sample()


PRIORITY_MUTANTS = {
    "weights of the neighbour": Mutant(
        around(PrioritizedSampler, "sample", weights_of_the_neighbour), sampler="priorities"
    ),
    "priorities that go to the row before": Mutant(
        around(PrioritizedSampler, "update_priority", one_before_is_updated), sampler="priorities"
    ),
    "draws by priority that are one further": Mutant(
        around(PrioritizedSampler, "sample", next_stored), sampler="priorities as they are"
    ),
    "the newest row has half of its priority": Mutant(
        around(PrioritizedSampler, "sample", newest_has_half), sampler="priorities as they are"
    ),
    "slices with the weights of their neighbours": Mutant(
        around(PrioritizedSliceSampler, "_draw_runs", of_runs(weights_of_the_neighbour)), sampler="slices by priority"
    ),
    "slices by priority that start one further": Mutant(
        around(PrioritizedSliceSampler, "_draw_runs", of_runs(one_further)), sampler="short slices by priority"
    ),
}


# ---- slices that are wrong by one ----
def only_longer_ones(native: Any, rule: RunRule, length: int) -> Any:
    """A trajectory of exactly a slice's length is left out; short ones that are one step long, too."""
    before, after = (length - 1 if cut else 0 for cut in rule.span)
    return _native.SliceRule(length, length + 1 if rule.strict_length else 2, before, after)


def one_window_fewer(native: Any, rule: RunRule, length: int) -> Any:
    return _native.SliceRule(length, 1, length - 2, length - 1)


def marks_the_step_before(mark: Any, batch: Any, marks: Any, *rest: Any) -> Any:
    flags = mark()
    for path in [path for what, path in marks if what == "last"]:
        leaf = get_entry(batch, path)
        leaf.copy_(leaf.roll(-1, 0).clone())
    return flags


def draws_the_last_again(slices: Any, sampler: Any, *args: Any) -> Any:
    """The epoch goes on with the trajectory that was drawn last."""
    drawn = slices()
    state = sampler.state_dict()
    if state["epoch"] is not None:
        state["epoch"]["position"] -= 1
        sampler.load_state_dict(state)
    return drawn


def leaves_one_out(slices: Any, sampler: Any, *args: Any) -> Any:
    drawn = slices()
    state = sampler.state_dict()
    if state["epoch"] is not None:
        state["epoch"]["position"] += 1
        sampler.load_state_dict(state)
    return drawn


def burns_in_one_row_more(native: Any, rule: RunRule, length: int) -> Any:
    return _native.SliceRule(length, native(length).min_length, before=rule.burn_in + 1, pad=True)


def by_trajectory(native: Any, rule: RunRule, length: int) -> Any:
    """The weight is not heard of."""
    return _native.SliceRule(length, length)


def last_steps_start_nothing(native: Any, rule: RunRule, length: int) -> Any:
    return _native.SliceRule(length, 2, after=length - 2, by_window=True)


def one_window_fewer_by_step(native: Any, rule: RunRule, length: int) -> Any:
    return _native.SliceRule(length, 1, length - 2, length - 1, by_window=True)


def one_step_later(native: Any, rule: RunRule, length: int) -> Any:
    return _native.SliceRule(length, 1, length - 2, 1, pad=True, by_window=True)


def one_step_longer(native: Any, rule: RunRule, length: int) -> Any:
    return _native.SliceRule(length, native(length).min_length + 1, length - 1, pad=True, by_window=True)


SLICE_MUTANTS = {
    "slices one further, so over a trajectory's end": Mutant(
        around(SliceSampler, "_draw_runs", of_runs(one_further)), sampler="slices"
    ),
    "slices of trajectories that are longer than a slice": Mutant(
        around(RunRule, "native", only_longer_ones), sampler="slices by id"
    ),
    "short slices of two steps at least": Mutant(around(RunRule, "native", only_longer_ones), sampler="short slices"),
    "spans that miss one window": Mutant(around(RunRule, "native", one_window_fewer), sampler="spans"),
    "slices that mark the step before their last": Mutant(
        around(reader, "mark", marks_the_step_before), sampler="two slices"
    ),
    "an epoch of slices that repeats a trajectory": Mutant(
        around(SliceSamplerWithoutReplacement, "_slices", draws_the_last_again), sampler="slices in epochs"
    ),
    "an epoch of slices that leaves a trajectory out": Mutant(
        around(SliceSamplerWithoutReplacement, "_slices", leaves_one_out), sampler="slices in order"
    ),
    "sequences with one row of burn-in more": Mutant(
        around(RunRule, "native", burns_in_one_row_more), sampler="sequences"
    ),
    "slices by step that weigh trajectories": Mutant(
        around(RunRule, "native", by_trajectory), sampler="slices by step"
    ),
    "slices by step that no last step starts": Mutant(
        around(RunRule, "native", last_steps_start_nothing), sampler="short slices by step"
    ),
    "spans by step that miss one window": Mutant(
        around(RunRule, "native", one_window_fewer_by_step), sampler="spans by step"
    ),
    "sequences by step that end one step later": Mutant(
        around(RunRule, "native", one_step_later), sampler="sequences by step"
    ),
    "sequences by step of trajectories that are longer than what is trained on": Mutant(
        around(RunRule, "native", one_step_longer), sampler="long sequences by step"
    ),
}
