"""Settings of samplers that change as training goes on, as `beta` of a prioritised one from 0.4 to 1."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from engram import _forms as forms
from engram._checks import count
from engram.data.replay_buffers.buffers.buffer import ReplayBuffer, SupportsSample
from engram.data.replay_buffers.samplers.base import Sampler

__all__ = ["LambdaScheduler", "LinearScheduler", "ParameterScheduler", "SchedulerList", "StepScheduler"]

Mode: TypeAlias = Literal["multiplicative", "additive"]


class ParameterScheduler(abc.ABC):
    """Sets a number that a sampler has, at each `step`; a child says by `_value` to what.

    Args:
        obj: the sampler, or a buffer: then always the one that it has.
        param_name: of the attribute, `"alpha"`, `"beta"`, `"eps"`, or any number of a sampler of your own.
        min_value, max_value: what goes beyond is set to these; None: no bound.

    Raises:
        TypeError: `obj` is no buffer and no sampler.
        ValueError: the sampler has no such number, or the bounds leave nothing.
    """

    def __init__(
        self,
        obj: ReplayBuffer | Sampler | SupportsSample,
        param_name: str,
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        if not isinstance(obj, ReplayBuffer) and (isinstance(obj, type) or not hasattr(obj, "sample")):
            raise TypeError(
                f"a scheduler changes a sampler: pass one, or its replay buffer, got a {type(obj).__name__}"
            )
        self._obj = obj
        self.param_name = param_name
        self.min_value = -math.inf if min_value is None else float(min_value)
        self.max_value = math.inf if max_value is None else float(max_value)
        if self.min_value > self.max_value:
            raise ValueError(f"min_value={min_value} is more than max_value={max_value}")
        try:
            self.initial_value = float(getattr(self.sampler, param_name))
        except (AttributeError, TypeError, ValueError):
            raise ValueError(
                f"a {type(self.sampler).__name__} does not have an attribute {param_name!r} that is a number"
            ) from None
        self.steps = 0

    @property
    def sampler(self) -> Any:
        """The sampler whose number it sets."""
        return self._obj.sampler if isinstance(self._obj, ReplayBuffer) else self._obj

    @abc.abstractmethod
    def _value(self) -> float:
        """The number after `self.steps` steps, before it is bounded."""

    def step(self) -> None:
        """Goes one step on, and sets the number."""
        self.steps += 1
        self._set()

    def _set(self) -> None:
        setattr(self.sampler, self.param_name, min(max(float(self._value()), self.min_value), self.max_value))

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: the parameter's name, its initial value, and the steps so far."""
        return {"param_name": self.param_name, "initial_value": self.initial_value, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state, and sets the number as it was there.

        Raises:
            ValueError: it is the state of a scheduler of another parameter, or no such state; nothing is changed.
        """
        self.initial_value, self.steps = _checked_state(self.param_name, state)
        if self.steps:
            self._set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.param_name}, steps={self.steps})"


class LinearScheduler(ParameterScheduler):
    """Goes from the value that the parameter has to another one in equal steps, and stays there.

    Args:
        obj, param_name: as ParameterScheduler.
        final_value: where it ends.
        num_steps: after how many steps.

    Raises:
        ValueError: `num_steps` is less than 1; others as ParameterScheduler.

    Example:
        >>> rb = PrioritizedReplayBuffer(0.7, 0.4, storage=LazyTensorStorage(10))
        >>> scheduler = LinearScheduler(rb, "beta", final_value=1.0, num_steps=2)
        >>> scheduler.step()
        >>> rb.sampler.beta
        0.7
    """

    def __init__(
        self, obj: ReplayBuffer | Sampler | SupportsSample, param_name: str, final_value: float, num_steps: int
    ) -> None:
        super().__init__(obj, param_name)
        self.final_value = float(final_value)
        self.num_steps = count(num_steps, "num_steps")

    def _value(self) -> float:
        if self.steps >= self.num_steps:
            return self.final_value
        return self.initial_value + (self.final_value - self.initial_value) * (self.steps / self.num_steps)


class StepScheduler(ParameterScheduler):
    """Multiplies the parameter by `gamma`, or adds it, at every `n_steps`-th step.

    Args:
        obj, param_name, min_value, max_value: as ParameterScheduler.
        gamma: what it is multiplied by, or what is added.
        n_steps: how many steps there are between two changes.
        mode: `"multiplicative"` or `"additive"`.

    Raises:
        ValueError: `n_steps` is less than 1, there is no such mode; others as ParameterScheduler.

    Example:
        >>> sampler = PrioritizedSampler(10, alpha=0.8, beta=0.5)
        >>> scheduler = StepScheduler(sampler, "alpha", gamma=0.5, n_steps=2)
        >>> for _ in range(4):
        ...     scheduler.step()
        >>> sampler.alpha
        0.2
    """

    def __init__(
        self,
        obj: ReplayBuffer | Sampler | SupportsSample,
        param_name: str,
        gamma: float = 0.9,
        n_steps: int = 1,
        mode: Mode = "multiplicative",
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, got {mode!r}")
        self.gamma = float(gamma)
        self.n_steps = count(n_steps, "n_steps")
        self.mode = mode

    def _value(self) -> float:
        changes = self.steps // self.n_steps
        if self.mode == "additive":
            return self.initial_value + changes * self.gamma
        return float(self.initial_value * self.gamma**changes)


class LambdaScheduler(ParameterScheduler):
    """Sets the parameter to its initial value times `lambda_fn(steps)`, where `steps` counts from 1.

    Args:
        obj, param_name, min_value, max_value: as ParameterScheduler.
        lambda_fn: from the number of steps to a factor. It is no part of the state.

    Raises:
        As ParameterScheduler.

    Example:
        >>> sampler = PrioritizedSampler(10, alpha=0.8, beta=0.5)
        >>> scheduler = LambdaScheduler(sampler, "beta", lambda steps: 1 + 0.5 * steps, max_value=1.0)
        >>> scheduler.step()
        >>> sampler.beta
        0.75
    """

    def __init__(
        self,
        obj: ReplayBuffer | Sampler | SupportsSample,
        param_name: str,
        lambda_fn: Callable[[int], float],
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        self.lambda_fn = lambda_fn

    def _value(self) -> float:
        return float(self.initial_value * self.lambda_fn(self.steps))


class SchedulerList:
    """Several schedulers that step together.

    Args:
        schedulers: the schedulers.

    Raises:
        TypeError: one of them is no scheduler.

    Example:
        >>> sampler = PrioritizedSampler(10, alpha=0.8, beta=0.5)
        >>> schedulers = SchedulerList([LinearScheduler(sampler, "beta", 1.0, 5), StepScheduler(sampler, "alpha", 0.5)])
        >>> schedulers.step()
        >>> sampler.beta, sampler.alpha
        (0.6, 0.4)
    """

    def __init__(self, schedulers: Sequence[ParameterScheduler] = ()) -> None:
        self.schedulers: list[ParameterScheduler] = []
        for scheduler in schedulers:
            self.append(scheduler)

    def append(self, scheduler: ParameterScheduler) -> None:
        """Adds a scheduler."""
        if not isinstance(scheduler, ParameterScheduler):
            raise TypeError(f"a list of schedulers takes schedulers, got a {type(scheduler).__name__}")
        self.schedulers.append(scheduler)

    def step(self) -> None:
        """One step of each, in their order."""
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Where each of them stands."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
            ValueError: it is that of other schedulers; nothing is changed.
        """
        saved = state.get("schedulers") if isinstance(state, Mapping) else None
        if not isinstance(saved, list) or len(saved) != len(self.schedulers):
            count = len(saved) if isinstance(saved, list) else "no list of"
            raise ValueError(f"there are {len(self.schedulers)} schedulers here, {count} there")
        for scheduler, one in zip(self.schedulers, saved, strict=True):
            _checked_state(scheduler.param_name, one)
        for scheduler, one in zip(self.schedulers, saved, strict=True):
            scheduler.load_state_dict(one)

    def __len__(self) -> int:
        return len(self.schedulers)

    def __repr__(self) -> str:
        return f"SchedulerList({self.schedulers})"


_STATE = forms.record({"param_name": forms.text, "initial_value": forms.number, "steps": forms.integer()})


def _checked_state(param_name: str, state: dict[str, Any]) -> tuple[float, int]:
    """Initial value and steps of a saved state of a scheduler of this parameter."""
    forms.check(_STATE, state, "a scheduler's state")
    name, initial = state["param_name"], float(state["initial_value"])
    if name != param_name:
        raise ValueError(f"the scheduler sets {param_name!r} here, {name!r} there")
    if not math.isfinite(initial):
        raise ValueError(f"a scheduler's state has a finite initial_value, got {initial}")
    return initial, state["steps"]
