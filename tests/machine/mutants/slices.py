"""Slices that are wrong by one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engram import _native
from engram.data import SequenceSampler, SliceSampler, SliceSamplerWithoutReplacement
from engram.data.replay_buffers.samplers import slices
from machine.mutants.base import Mutant, Patch, around
from machine.mutants.uniform import one_further


def only_longer_ones(rule: Any, sampler: Any, length: int) -> Any:
    """A trajectory of exactly a slice's length is left out; short ones that are one step long, too."""
    before, after = (length - 1 if cut else 0 for cut in sampler.span)
    return _native.SliceRule(length, length + 1 if sampler.strict_length else 2, before, after)


def one_window_fewer(rule: Any, sampler: Any, length: int) -> Any:
    return _native.SliceRule(length, 1, length - 2, length - 1)


def marks_the_step_before(patch: Patch) -> None:
    original = slices.mark_last

    def mark(batch: Any, path: Any, drawn: Any) -> Tensor:
        leaf = original(batch, path, drawn)
        leaf.copy_(leaf.roll(-1, 0).clone())
        return leaf

    patch.setattr(slices, "mark_last", mark)


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


def burns_in_one_row_more(rule: Any, sampler: Any, length: int) -> Any:
    return _native.SliceRule(length, rule(length).min_length, before=sampler.burn_in + 1, pad=True)


def by_trajectory(rule: Any, sampler: Any, length: int) -> Any:
    """The weight is not heard of."""
    return _native.SliceRule(length, length)


def last_steps_start_nothing(rule: Any, sampler: Any, length: int) -> Any:
    return _native.SliceRule(length, 2, after=length - 2, by_window=True)


def one_window_fewer_by_step(rule: Any, sampler: Any, length: int) -> Any:
    return _native.SliceRule(length, 1, length - 2, length - 1, by_window=True)


def one_step_later(rule: Any, sampler: Any, length: int) -> Any:
    return _native.SliceRule(length, 1, length - 2, 1, pad=True, by_window=True)


def one_step_longer(rule: Any, sampler: Any, length: int) -> Any:
    return _native.SliceRule(length, rule(length).min_length + 1, length - 1, pad=True, by_window=True)


SLICE_MUTANTS = {
    "slices one further, so over a trajectory's end": Mutant(
        around(SliceSampler, "sample", one_further), sampler="slices"
    ),
    "slices of trajectories that are longer than a slice": Mutant(
        around(SliceSampler, "_rule", only_longer_ones), sampler="slices by id"
    ),
    "short slices of two steps at least": Mutant(
        around(SliceSampler, "_rule", only_longer_ones), sampler="short slices"
    ),
    "spans that miss one window": Mutant(around(SliceSampler, "_rule", one_window_fewer), sampler="spans"),
    "slices that mark the step before their last": Mutant(marks_the_step_before, sampler="two slices"),
    "an epoch of slices that repeats a trajectory": Mutant(
        around(SliceSamplerWithoutReplacement, "_slices", draws_the_last_again), sampler="slices in epochs"
    ),
    "an epoch of slices that leaves a trajectory out": Mutant(
        around(SliceSamplerWithoutReplacement, "_slices", leaves_one_out), sampler="slices in order"
    ),
    "sequences with one row of burn-in more": Mutant(
        around(SequenceSampler, "_rule", burns_in_one_row_more), sampler="sequences"
    ),
    "slices by step that weigh trajectories": Mutant(
        around(SliceSampler, "_rule", by_trajectory), sampler="slices by step"
    ),
    "slices by step that no last step starts": Mutant(
        around(SliceSampler, "_rule", last_steps_start_nothing), sampler="short slices by step"
    ),
    "spans by step that miss one window": Mutant(
        around(SliceSampler, "_rule", one_window_fewer_by_step), sampler="spans by step"
    ),
    "sequences by step that end one step later": Mutant(
        around(SequenceSampler, "_rule", one_step_later), sampler="sequences by step"
    ),
    "sequences by step of trajectories that are longer than what is trained on": Mutant(
        around(SequenceSampler, "_rule", one_step_longer), sampler="long sequences by step"
    ),
}
