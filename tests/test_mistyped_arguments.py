"""An argument that a class does not have is refused by a sentence that says which one may be meant."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import engram.collectors
import engram.data
import engram.envs
from contracts.each import each
from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, PrioritizedSampler, Sampler, Spec, Storage, TensorDictReplayBuffer, Writer
from engram.envs import EnvBase, GymEnv, Transform

BASES = (Storage, Sampler, Writer, engram.data.ReplayBuffer, Spec, EnvBase, Transform)
MODULES = (engram.data, engram.envs, engram.collectors)
PARTS = {
    name: cls
    for module in MODULES
    for name in module.__all__
    if inspect.isclass(cls := getattr(module, name)) and not inspect.isabstract(cls) and cls not in BASES
    if issubclass(cls, BASES) or module is engram.collectors
}


def arguments(cls: type) -> list[str]:
    """Those of a class that takes no others."""
    own = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    named = [one.name for one in own if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return [] if any(one.kind is one.VAR_KEYWORD for one in own) else named[1:]


def test_most_parts_are_looked_at_here() -> None:
    assert len([cls for cls in PARTS.values() if arguments(cls)]) > 60


@each("name", [name for name, cls in PARTS.items() if arguments(cls)])
def test_a_mistyped_argument_of_a_part_is_answered_by_the_right_name(name: str) -> None:
    for argument in arguments(PARTS[name]):
        if len(argument) < 4:
            continue
        mistyped = argument[:-2] + argument[-1] + argument[-2] + "_"
        with pytest.raises(TypeError, match=rf"\w+\(\) has no argument '{mistyped}': did you mean '\w+'\?"):
            PARTS[name](**{mistyped: 1})


@each(
    "make, says",
    [
        (
            lambda: TensorDictReplayBuffer(batchsize=4),
            "TensorDictReplayBuffer() has no argument 'batchsize': did you mean 'batch_size'?",
        ),
        (lambda: TensorDictReplayBuffer(priorty_key="p"), "no argument 'priorty_key': did you mean 'priority_key'?"),
        (lambda: LazyTensorStorage(max_sise=4), "LazyTensorStorage() has no argument 'max_sise': did"),
        (lambda: SyncDataCollector(GymEnv("CartPole-v1"), frame_per_batch=4), "did you mean 'frames_per_batch'?"),
        (lambda: PrioritizedSampler(9, 0.6, 0.4, colour=3), "no argument 'colour': it has max_capacity, alpha, beta"),
    ],
)  # fmt: skip
def test_an_unknown_argument_is_told_from_the_others(make: Any, says: str) -> None:
    with pytest.raises(TypeError, match=re.escape(says)):
        make()


def test_a_class_of_a_users_own_may_have_others() -> None:
    class Mine(PrioritizedSampler):
        def __init__(self, colour: int, **options: Any) -> None:
            super().__init__(9, 0.6, 0.4, **options)
            self.colour = colour

    assert Mine(colour=3, eps=0.1).colour == 3
    with pytest.raises(TypeError, match=r"Mine\(\) has no argument 'epz': did you mean 'eps'"):
        Mine(3, epz=0.1)
