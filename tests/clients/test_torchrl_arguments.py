"""What TorchRL's collectors and their functions accept is accepted by ours, or refused with what to use instead."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torchrl.collectors
import torchrl.collectors.utils

import engram.collectors
import engram.collectors.utils
from engram._advice import ARGUMENTS
from engram.envs import GymEnv

NAMES = ["Collector", "MultiCollector", "MultiSyncCollector", "MultiAsyncCollector"]
METHODS = ["start", "pause", "async_shutdown", "shutdown", "rollout", "state_dict", "is_running"]


def arguments_of(function: Any) -> dict[str, inspect.Parameter]:
    """The arguments that have a name."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(function).parameters
    return {name: one for name, one in parameters.items() if one.kind not in kinds and name != "self"}


def all_arguments(cls: type) -> dict[str, inspect.Parameter]:
    """The arguments of a constructor, those that it hands on to the classes that it inherits from included."""
    merged: dict[str, inspect.Parameter] = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base) and base.__module__.split(".")[0] in ("engram", "torchrl"):
            merged.update(arguments_of(base.__init__))
    return merged


THEIRS = [(name, argument) for name in NAMES for argument in all_arguments(getattr(torchrl.collectors, name))]


def make() -> GymEnv:
    return GymEnv("CartPole-v1")


@pytest.mark.parametrize(("name", "argument"), THEIRS)
def test_an_argument_is_known_with_its_default_or_refused_with_what_to_use(name: str, argument: str) -> None:
    ours, theirs = getattr(engram.collectors, name), all_arguments(getattr(torchrl.collectors, name))[argument]
    if argument in all_arguments(ours):
        return
    advice: dict[str, Any] = next(ARGUMENTS[one.__name__] for one in ours.__mro__ if one.__name__ in ARGUMENTS)
    assert argument in advice, f"{name} does not know {argument!r}"
    default = None if theirs.default is inspect.Parameter.empty else theirs.default
    allowed, instead = advice[argument]
    assert not allowed or any(default is one for one in allowed), "what everybody passes is accepted"
    creates = make if name == "Collector" else [make]
    ours(creates, frames_per_batch=5, **{argument: default}).shutdown()
    if instead:
        with pytest.raises(TypeError, match=": allowed "):
            ours(creates, frames_per_batch=5, **{argument: object()})


def test_there_are_arguments_to_compare() -> None:
    assert len(THEIRS) > 150 and ("Collector", "policy_factory") in THEIRS


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_a_method_takes_what_theirs_takes(name: str, method: str) -> None:
    theirs = getattr(getattr(torchrl.collectors, name), method, None)
    if theirs is None:
        pytest.skip("theirs has no such method")
    ours = arguments_of(getattr(getattr(engram.collectors, name), method))
    assert arguments_of(theirs).keys() <= ours.keys()


def test_trajectories_are_split_by_the_same_arguments() -> None:
    theirs, ours = (arguments_of(m.collectors.utils.split_trajectories) for m in (torchrl, engram))
    assert theirs.keys() - {"rollout_tensordict"} <= ours.keys()
