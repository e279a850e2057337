"""Transforms of values: dtypes, shifts and scales, shapes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram import _forms as forms
from engram._checks import is_integer
from engram.pytree import (
    Key,
    Keys,
    as_key,
    copy_containers,
    get_tensor,
    has_batch_size,
    has_keys,
    key_path,
    leaf_keys,
    missing_key_error,
    remove_entry,
    require_tensor,
    set_entry,
    to_tensor,
)
from engram.specs import Bounded, Categorical, OneHot, Spec, Unbounded
from engram.transforms.base import IDLE, Deferred, Transform, root_key, root_pairs
from engram.transforms.env_specs import RESULT_KEYS, EnvSpecs, bounds_of, cast_spec, filter_leaves, map_leaves

Self = TypeVar("Self", bound="_OfRewards")
REWARD_KEYS: tuple[Key, ...] = (("next", "reward"), "reward")


class DTypeCastTransform(Transform, built_in=True):
    """Casts entries of one dtype to another on reading, and back on writing.

    Args:
        dtype_in: the dtype in the storage.
        dtype_out: the dtype that the caller sees.
        in_keys, out_keys, in_keys_inv, out_keys_inv: as Transform's. Without `in_keys` every entry of `dtype_in` is
            cast on reading; with neither `in_keys` nor `in_keys_inv` also every entry of `dtype_out` on writing.

    In an environment it casts what has a spec of `dtype_in`: without `in_keys` every observation and the reward; with
    neither `in_keys` nor `in_keys_inv` also the action.

    Example:
        >>> cast = DTypeCastTransform(torch.float16, torch.float32)
        >>> cast.inv({"x": torch.ones(2), "n": torch.arange(2)})
        {'x': tensor([1., 1.], dtype=torch.float16), 'n': tensor([0, 1])}
    """

    def __init__(
        self,
        dtype_in: torch.dtype,
        dtype_out: torch.dtype,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        if not (isinstance(dtype_in, torch.dtype) and isinstance(dtype_out, torch.dtype)):
            raise TypeError(f"dtype_in and dtype_out are dtypes of torch, got {dtype_in!r} and {dtype_out!r}")
        self.dtype_in, self.dtype_out = dtype_in, dtype_out
        self._reads_all = in_keys is None
        self._all = in_keys is None and in_keys_inv is None

    def forward(self, batch: Any) -> Any:
        return self._cast_all(batch, self.dtype_in, self.dtype_out) if self._reads_all else super().forward(batch)

    def acts_by_row(self, row_ndim: Callable[[Key], int | None]) -> bool:
        return True

    def does_the_same(self, other: Transform) -> bool:
        return self._has_settings_of(other)

    def inv(self, tensordict: Any) -> Any:
        return (
            self._cast_all(copy_containers(tensordict), self.dtype_out, self.dtype_in)
            if self._all
            else super().inv(tensordict)
        )

    # ---- environments ----
    def for_env(self, specs: EnvSpecs) -> DTypeCastTransform:
        if not self._reads_all:
            return self
        own, actions = copy.copy(self), []

        def collect(key: Key, spec: Spec) -> Spec:
            if spec.dtype is self.dtype_in:
                actions.append(key)
            return spec

        if all(key_path(key)[0] == "action" for key in specs.action_keys):  # those of groups stay as they are
            map_leaves(specs.action, "action", collect)
        entries = {**specs.observation.leaves(), **specs.rewards.leaves()}
        own.in_keys = own.out_keys = [key for key, spec in entries.items() if spec.dtype is self.dtype_in]
        if self._all:
            own.in_keys_inv = own.out_keys_inv = actions
        own.__dict__.pop("_env_pairs", None)
        return own

    def _call(self, td: TensorDictBase) -> TensorDictBase:
        return self._by_key(td)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        return Transform.inv(self, td)

    def _inverts(self) -> bool:
        return bool(self.in_keys_inv)

    def changes_writes(self) -> bool:
        return self._all or self._inverts()

    def _mapped(self, spec: Spec) -> Spec:
        return cast_spec(spec, self.dtype_out)

    def transform_action_spec(self, action_spec: Spec) -> Spec:
        return self._mapped_action(action_spec, self._mapped)

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.to(self.dtype_out)

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value.to(self.dtype_in)

    def _cast_all(self, batch: Any, source: torch.dtype, target: torch.dtype) -> Any:
        if type(batch) is list:
            return [self._cast_all(copy_containers(item), source, target) for item in batch]
        if isinstance(batch, Tensor):
            return batch.to(target) if batch.dtype is source else batch
        if not has_keys(batch):
            raise missing_key_error(batch, [], "DTypeCastTransform")
        for key in leaf_keys(batch):
            value = get_tensor(batch, key)
            if isinstance(value, Tensor) and value.dtype is source:
                set_entry(batch, key, value.to(target))
        return batch

    def _settings(self) -> dict[str, Any]:
        return {"dtype_in": self.dtype_in, "dtype_out": self.dtype_out}


class DoubleToFloat(DTypeCastTransform, built_in=True):
    """Casts entries from float64 to float32 on reading, and back on writing; see DTypeCastTransform.

    Args:
        in_keys, out_keys, in_keys_inv, out_keys_inv: as DTypeCastTransform's.

    Example:
        >>> DoubleToFloat(in_keys=["x"])({"x": torch.ones(2, dtype=torch.float64)})["x"].dtype
        torch.float32
    """

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        super().__init__(torch.float64, torch.float32, in_keys, out_keys, in_keys_inv, out_keys_inv)

    def _settings(self) -> dict[str, Any]:
        return {}


_STATISTICS = forms.record(
    {"loc": forms.tensor(), "scale": forms.tensor()}, {"standard_normal": forms.tensor(torch.bool, ndim=0)}
)


class ObservationNorm(Transform, built_in=True):
    """Normalises entries: `value * scale + loc`, or with `standard_normal` `(value - loc) / scale`; `inv` reverses it.

    Args:
        loc, scale: numbers, or tensors that broadcast with the entries; without both, `init_stats` computes them.
        in_keys, out_keys, in_keys_inv, out_keys_inv: as Transform's.
        standard_normal: `loc` and `scale` are a mean and a standard deviation.
        eps: the smallest standard deviation that `init_stats` gives.

    Raises:
        RuntimeError: there are no `loc` and `scale` yet.

    Example:
        >>> norm = ObservationNorm(loc=1.0, scale=2.0, in_keys=["obs"], standard_normal=True)
        >>> norm({"obs": torch.tensor([1.0, 5.0])})["obs"]
        tensor([0., 2.])
    """

    def __init__(
        self,
        loc: Any = None,
        scale: Any = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        standard_normal: bool = False,
        eps: float = 1e-6,
    ) -> None:
        if in_keys is None and in_keys_inv is None:
            raise ValueError("ObservationNorm needs in_keys, in_keys_inv or both")
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        if (loc is None) != (scale is None):
            raise ValueError(f"give loc and scale, or neither and call init_stats; got loc={loc}, scale={scale}")
        self.standard_normal = bool(standard_normal)  # a saved state has it as a tensor
        self.eps = eps
        self._given = loc is not None
        self._stats = None if loc is None else _checked_stats(loc, scale)

    @property
    def loc(self) -> Tensor | None:
        return None if self._stats is None else self._stats[0]

    @property
    def scale(self) -> Tensor | None:
        return None if self._stats is None else self._stats[1]

    @property
    def initialized(self) -> bool:
        return self._stats is not None

    def init_stats(
        self,
        num_iter: Any = None,
        reduce_dim: int | Sequence[int] | None = None,
        cat_dim: int | None = None,
        key: Key | None = None,
        keep_dims: int | Sequence[int] | None = None,
        *,
        data: Any = None,
    ) -> None:
        """Computes mean and standard deviation (at least `eps`) of data, or of steps of its environment.

        Args:
            num_iter: the number of steps with random actions that the environment takes, as it is before this
                transform; it is reset first. Or the data: a batch with the entry `key`, or a tensor.
            reduce_dim: dimensions to average over; the batch dimensions if None (of tensors and dicts the first).
            cat_dim: time, the last batch dimension of an environment's steps; it must be among `reduce_dim`.
            key: the only one of `in_keys` if None.
            keep_dims: the dimensions of `reduce_dim` that are kept with size 1.
            data: the same as data given first.

        The standard deviation of the environment's steps is that of a sample (n - 1).

        Raises:
            RuntimeError: it is in no environment; or it has `loc` and `scale` already, and `num_iter` is given.
            ValueError: no data, data that are not finite, several `in_keys` and no `key`, dimensions that do not fit.
                Nothing is changed.
        """
        data, is_sample = num_iter if data is None else data, False
        if key is None and not isinstance(data, Tensor):
            keys = list(self.in_keys) or list(self.in_keys_inv)
            if len(keys) > 1:
                raise ValueError(f"init_stats needs key=, one of {keys}, where there are several in_keys")
            key = keys[0]
        reduced = None if reduce_dim is None else _as_dims(reduce_dim)
        if isinstance(data, int):
            data, is_sample = self._steps_of_environment(data, reduced, cat_dim), True
            key = root_key(key) if key is not None and get_tensor(data, key) is None else key
            key = key if key is None or get_tensor(data, key) is not None else ("next", *key_path(key))
        value = data if key is None else require_tensor(data, key, "ObservationNorm.init_stats")
        if reduced is None:
            reduced = tuple(range(data.batch_dims if has_batch_size(data) else 1))
        if value.numel() == 0:
            raise ValueError(f"init_stats needs data, got shape {list(value.shape)}")
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        value = value.to(torch.float64)  # squares and sums of float16 would overflow
        if bad := value.numel() - int(value.isfinite().sum()):
            raise ValueError(
                f"init_stats found {bad} values of {value.numel()} that are not finite, and no statistics of them "
                "exist: leave these rows out, or use VecNorm, which does"
            )
        mean = value.mean(reduced, keepdim=True)
        count = value.numel() // max(mean.numel(), 1)
        variance = (value - mean).square().sum(reduced, keepdim=True) / max(count - is_sample, 1)
        std = variance.sqrt().clamp_min(self.eps)
        kept = {dim % value.ndim for dim in _as_dims(() if keep_dims is None else keep_dims)}
        if others := kept - {dim % value.ndim for dim in reduced}:
            raise ValueError(f"keep_dims must be among reduce_dim={reduced}, got {sorted(others)} besides")
        for dim in sorted({dim % value.ndim for dim in reduced} - kept, reverse=True):
            mean, std = mean.squeeze(dim), std.squeeze(dim)
        loc, scale = (mean, std) if self.standard_normal else (-mean / std, 1 / std)
        # In float16 a deviation of 1e-6, or its inverse, would be 0 or infinite.
        dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        self._stats = _checked_stats(loc.to(dtype), scale.to(dtype))

    def _steps_of_environment(self, steps: int, reduced: tuple[int, ...] | None, cat_dim: int | None) -> Any:
        """Steps `[*batch, steps]` under random actions."""
        if steps < 1:
            raise ValueError(f"num_iter must be 1 or more, got {steps}")
        if self._stats is not None:
            raise RuntimeError(
                f"loc and scale are initialized already: loc={self.loc}, scale={self.scale}; make a new ObservationNorm"
            )
        env = self.parent
        time = len(env.batch_size)
        if cat_dim is None and reduced is not None and len(reduced) > 1:
            raise ValueError(f"with several dimensions in reduce_dim={reduced}, give cat_dim, that of time: {time}")
        if cat_dim is not None and (cat_dim != time or (reduced is not None and cat_dim not in reduced)):
            raise ValueError(
                f"cat_dim is time, dimension {time} of this environment's steps, and must be among reduce_dim; got "
                f"cat_dim={cat_dim} and reduce_dim={reduced}"
            )
        return env.rollout(steps, break_when_any_done=False)

    # ---- environments ----
    @property
    def _keeps_order(self) -> bool:  # type: ignore[override]
        return self._given  # a later call of init_stats changes the bounds

    def _mapped(self, spec: Any) -> Spec:
        if self._stats is not None:
            return super()._mapped(spec)
        dtype = spec.dtype if spec.dtype.is_floating_point else torch.get_default_dtype()
        return Unbounded(spec.shape, spec.device, dtype)

    def transform_action_spec(self, action_spec: Spec) -> Spec:
        return self._mapped_action(action_spec, self._mapped)

    def _apply_transform(self, value: Tensor) -> Tensor:
        loc, scale = self._cast(value)
        return (value - loc) / scale if self.standard_normal else value * scale + loc

    def acts_by_row(self, row_ndim: Callable[[Key], int | None]) -> bool:
        # A statistic with as many dimensions as a batch would differ between the batch's rows.
        within = [row_ndim(key) for key in self.in_keys]
        return self._stats is not None and all(
            is_number(stat) or all(n is not None and stat.ndim <= n for n in within) for stat in self._stats
        )

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        loc, scale = self._cast(value)
        return value * scale + loc if self.standard_normal else (value - loc) / scale

    def _cast(self, value: Tensor) -> tuple[Tensor, Tensor]:
        if self._stats is None:
            raise RuntimeError("ObservationNorm has no loc and scale yet: give them, or call init_stats(data)")
        return cast_stat(self._stats[0], value), cast_stat(self._stats[1], value)

    def get_extra_state(self) -> dict[str, Any]:
        """The statistics that `init_stats` computed; `loc` and `scale` given to `__init__` are settings.

        They can also be passed to `__init__`: `ObservationNorm(in_keys=..., **norm.state_dict())`.
        """
        if self._given or self._stats is None:
            return {}
        return {
            "standard_normal": torch.tensor(self.standard_normal, device="cpu"),
            "loc": self._stats[0],
            "scale": self._stats[1],
        }

    def set_extra_state(self, state: Any) -> None:
        if state:
            self._stats, self._given = (state["loc"], state["scale"]), False
            self.standard_normal = bool(state.get("standard_normal", self.standard_normal))
        elif not self._given:
            self._stats = None

    def differences(self, state: dict[str, Any]) -> list[str]:
        if self._given:
            return [f"ObservationNorm was given loc={self.loc} and scale={self.scale} here, and computed them there"]
        return self._refusals(state)

    def _refusals(self, state: Any) -> list[str]:
        # Statistics that are loaded alone take the place of given ones.
        forms.check(_STATISTICS, state, f"the state of {self.kind}")
        try:
            _checked_stats(state["loc"], state["scale"])
        except ValueError as error:
            return [f"ObservationNorm has an impossible state: {error}; call init_stats(data) anew"]
        return []

    def state_settings(self) -> dict[str, Any]:
        own = {"in_keys_inv": self.in_keys_inv, "standard_normal": self.standard_normal}
        return {**super().state_settings(), **own}

    def _settings(self) -> dict[str, Any]:
        return {"loc": self.loc, "scale": self.scale, "standard_normal": self.standard_normal}


def _as_dims(dims: int | Sequence[int]) -> tuple[int, ...]:
    return (dims,) if isinstance(dims, int) else tuple(dims)


class _OfRewards(Transform, built_in=True):
    """A transform of rewards, and of other entries if `in_keys` names them."""

    _keeps_order = True

    def __init__(self, in_keys: Keys, out_keys: Keys) -> None:
        if in_keys is None and out_keys is not None:
            raise ValueError(f"{type(self).__name__} with out_keys needs in_keys")
        super().__init__(in_keys, out_keys)

    def _pairs(self, batch: Any) -> list[tuple[Key, Key]]:
        if self.in_keys:
            return super()._pairs(batch)
        return [(key, key) for key in rewards_of(batch, type(self).__name__)]

    # ---- environments ----
    @cached_property
    def _env_pairs(self) -> list[tuple[Key, Key]]:
        return root_pairs(self.in_keys, self.out_keys) if self.in_keys else [("reward", "reward")]

    def for_env(self: Self, specs: EnvSpecs) -> Self:
        if self.in_keys or specs.reward_keys == ["reward"]:
            return self
        own = copy.copy(self)
        vars(own)["_env_pairs"] = [(key, key) for key in specs.reward_keys]
        return own

    def does_the_same(self, other: Transform) -> bool:
        return self._has_settings_of(other)

    def _deferred(self) -> Deferred | None:
        pairs = self._env_pairs
        if any(source != target or key_path(source)[-1] != "reward" for source, target in pairs):
            return None

        def apply(batch: TensorDictBase, starts: Tensor) -> None:
            following = batch.get("next")
            for key, _ in pairs:
                following.set(key, self._apply_transform(following.get(key)))

        return Deferred(tuple(key for key, _ in pairs), None, apply)


class RewardScaling(_OfRewards, built_in=True):
    """Scales rewards: `reward * scale + loc`, or with `standard_normal` `(reward - loc) / scale`.

    Args:
        loc, scale: numbers, or tensors that broadcast with rewards.
        in_keys: rewards; `("next", "reward")` if None, or `"reward"` in batches without it.
        out_keys: as Transform's.
        standard_normal: `loc` and `scale` are a mean and a standard deviation.

    In an environment `in_keys` of None are `"reward"`.

    Example:
        >>> RewardScaling(loc=0.0, scale=0.1)({"next": {"reward": torch.tensor([[5.0]])}})["next"]["reward"]
        tensor([[0.5000]])
    """

    def __init__(
        self, loc: Any, scale: Any, in_keys: Keys = None, out_keys: Keys = None, standard_normal: bool = False
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.loc, self.scale = _checked_stats(loc, scale)
        self.standard_normal = bool(standard_normal)

    def _apply_transform(self, value: Tensor) -> Tensor:
        loc, scale = cast_stat(self.loc, value), cast_stat(self.scale, value)
        return (value - loc) / scale if self.standard_normal else value * scale + loc

    def acts_by_row(self, row_ndim: Callable[[Key], int | None]) -> bool:
        return is_number(self.loc) and is_number(self.scale)

    def deferred(self) -> Deferred | None:
        is_scalar = self.loc.numel() == self.scale.numel() == 1
        return self._deferred() if type(self) is RewardScaling and is_scalar else None

    def _settings(self) -> dict[str, Any]:
        return {"loc": self.loc.tolist(), "scale": self.scale.tolist(), "standard_normal": self.standard_normal}


class RewardClipping(_OfRewards, built_in=True):
    """Limits rewards to `clamp_min` and `clamp_max`.

    Args:
        clamp_min, clamp_max: numbers, of which one may be None.
        in_keys: rewards; `("next", "reward")` if None, or `"reward"` in batches without it.
        out_keys: as Transform's.

    In an environment `in_keys` of None are `"reward"`.

    Raises:
        TypeError: neither `clamp_min` nor `clamp_max`, or one that is not a number.
        ValueError: `clamp_min` is not below `clamp_max`.

    Example:
        >>> RewardClipping(-1.0, 1.0)({"next": {"reward": torch.tensor([[5.0]])}})["next"]["reward"]
        tensor([[1.]])
    """

    def __init__(
        self,
        clamp_min: float | None = None,
        clamp_max: float | None = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.clamp_min, self.clamp_max = _checked_limits(self, clamp_min=clamp_min, clamp_max=clamp_max)

    def _mapped(self, spec: Any) -> Spec:
        return _limited(super()._mapped(spec), self.clamp_min, self.clamp_max)

    def _apply_transform(self, value: Tensor) -> Tensor:
        return torch.clamp(value, self.clamp_min, self.clamp_max)

    def acts_by_row(self, row_ndim: Callable[[Key], int | None]) -> bool:
        return True

    def deferred(self) -> Deferred | None:
        return self._deferred() if type(self) is RewardClipping else None

    def _settings(self) -> dict[str, Any]:
        return {"clamp_min": self.clamp_min, "clamp_max": self.clamp_max}


class SignTransform(Transform, built_in=True):
    """Replaces entries by their signs, -1, 0 or 1, on reading; actions and other entries on writing.

    Args:
        in_keys, out_keys, in_keys_inv, out_keys_inv: as Transform's.

    Example:
        >>> SignTransform(["reward"])({"reward": torch.tensor([-3.0, 0.0, 0.5])})["reward"]
        tensor([-1.,  0.,  1.])
    """

    _keeps_order = True

    def _mapped(self, spec: Any) -> Spec:
        mapped: Any = super()._mapped(spec)
        signed = mapped.dtype.is_floating_point or mapped.dtype.is_signed
        return Bounded(-1, 1, mapped.shape, mapped.device, mapped.dtype) if signed else mapped

    def transform_action_spec(self, action_spec: Spec) -> Spec:
        return self._mapped_action(action_spec, lambda spec: self._mapped(_number_spec(self, spec)))

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.sign()

    def acts_by_row(self, row_ndim: Callable[[Key], int | None]) -> bool:
        return True

    def does_the_same(self, other: Transform) -> bool:
        return self._has_settings_of(other)

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value.sign()


class ClipTransform(Transform, built_in=True):
    """Limits entries to `low` and `high` on reading; actions and other entries on writing.

    Args:
        in_keys, out_keys, in_keys_inv, out_keys_inv: as Transform's.
        low, high: numbers, of which one may be None.

    Raises:
        TypeError: neither `low` nor `high`, or one that is not a number.
        ValueError: `low` is not below `high`.

    Example:
        >>> ClipTransform(["reward"], low=-1.0, high=1.0)({"reward": torch.tensor([-3.0, 0.5])})["reward"]
        tensor([-1.0000,  0.5000])
    """

    _keeps_order = True

    def __init__(
        self,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        *,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.low, self.high = _checked_limits(self, low=low, high=high)

    def _mapped(self, spec: Any) -> Spec:
        return _limited(super()._mapped(spec), self.low, self.high)

    def transform_action_spec(self, action_spec: Spec) -> Spec:
        return self._mapped_action(action_spec, lambda spec: self._mapped(_number_spec(self, spec)))

    def _apply_transform(self, value: Tensor) -> Tensor:
        return torch.clamp(value, self.low, self.high)

    def acts_by_row(self, row_ndim: Callable[[Key], int | None]) -> bool:
        return True

    def does_the_same(self, other: Transform) -> bool:
        return self._has_settings_of(other)

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return self._apply_transform(value)

    def _settings(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high}


def _checked_limits(transform: Transform, **limits: Any) -> tuple[float | None, float | None]:
    """The limits as numbers. Raises TypeError if both are None or one is not a number; ValueError for a wrong order."""
    (first, given_low), (second, given_high) = limits.items()
    low, high = _checked_limit(first, given_low), _checked_limit(second, given_high)
    if low is None and high is None:
        raise TypeError(f"{type(transform).__name__} needs {first}, {second} or both")
    if low is not None and high is not None and not low < high:
        raise ValueError(f"{first} must be below {second}, got {first}={low} and {second}={high}")
    return low, high


def _limited(spec: Any, low: float | None, high: float | None) -> Spec:
    """The spec of values with these limits, bounded if its dtype is floating point."""
    if isinstance(spec, Bounded) or not spec.dtype.is_floating_point:
        return spec  # type: ignore[no-any-return]
    ends = -math.inf if low is None else low, math.inf if high is None else high
    return Bounded(*ends, spec.shape, spec.device, spec.dtype)


def _checked_limit(name: str, limit: Any) -> float | None:
    if limit is None:
        return None
    number = limit.item() if isinstance(limit, Tensor) and limit.numel() == 1 else limit
    if isinstance(number, bool) or not isinstance(number, int | float) or math.isnan(number):
        raise TypeError(f"{name} must be a number or None, got {limit!r}")
    return number


def _number_spec(transform: Transform, spec: Spec) -> Spec:
    """The spec of an action. Raises ValueError for choices, which have no order."""
    if not isinstance(spec, Bounded | Unbounded):
        raise ValueError(f"{type(transform).__name__} cannot be used on an action of {spec}")
    return spec


class CatTensors(Transform, built_in=True):
    """Concatenates entries to a single one on reading.

    Args:
        in_keys: entries; None in an environment: all observations.
        out_key: the key of the result.
        dim: the dimension along which they are concatenated, counted from the end (-1 is the last).
        del_keys: remove the entries.
        unsqueeze_if_oor: entries without dimensions besides the batch's are treated as vectors of size 1.
        sort: concatenate in the order of the keys' names, not in that of `in_keys`.

    Raises:
        KeyError: an entry is missing; the message names it.
        ValueError: no `in_keys`, outside of an environment.

    Example:
        >>> batch = {"position": torch.zeros(3, 2), "angle": torch.ones(3, 1)}
        >>> CatTensors(["position", "angle"], out_key="state")(batch)["state"][0]
        tensor([1., 0., 0.])
    """

    def __init__(
        self,
        in_keys: Keys = None,
        out_key: Key = "observation_vector",
        dim: int = -1,
        *,
        del_keys: bool = True,
        unsqueeze_if_oor: bool = False,
        sort: bool = True,
    ) -> None:
        super().__init__(in_keys)
        _check_dim("dim", dim, allow_positive_dim=False)
        if sort:
            self.in_keys = sorted(self.in_keys, key=lambda key: ".".join(key_path(key)))
        self.out_keys = [as_key(out_key)]
        self.dim, self.del_keys, self.unsqueeze_if_oor, self.sort = dim, del_keys, unsqueeze_if_oor, sort

    @property
    def _out_key(self) -> Key:
        return self.out_keys[0]

    @property
    def keys_to_exclude(self) -> list[Key]:
        """The entries that it removes."""
        return [key for key in self.in_keys if key != self._out_key] if self.del_keys else []

    def forward(self, batch: Any) -> Any:
        if type(batch) is list:
            return [self.forward(item) for item in batch]
        if not self.in_keys:
            raise ValueError("CatTensors needs in_keys: a batch does not say which of its entries are observations")
        return self._concatenated(batch, list(self.in_keys), self._out_key)

    def _concatenated(self, batch: Any, keys: list[Key], out_key: Key) -> Any:
        lead = batch.batch_dims if has_batch_size(batch) else 0
        values = [require_tensor(batch, key, "CatTensors") for key in keys]
        if self.unsqueeze_if_oor:
            values = [value.unsqueeze(-1) if value.ndim - lead < -self.dim else value for value in values]
        result = torch.cat(values, self.dim)
        if self.del_keys:
            for key in keys:
                if key != out_key:
                    remove_entry(batch, key)
        set_entry(batch, out_key, result)
        return batch

    # ---- environments ----
    def for_env(self, specs: EnvSpecs) -> CatTensors:
        if self.in_keys:
            return self
        own = copy.copy(self)
        keys = [key for key in specs.observation.leaves() if key != IDLE]
        own.in_keys = sorted(keys, key=lambda key: ".".join(key_path(key))) if self.sort else keys
        return own

    @cached_property
    def _env_pairs(self) -> list[tuple[Key, Key]]:
        out_key = root_key(self._out_key)
        return [(key, out_key) for key in dict.fromkeys(map(root_key, self.in_keys))]

    def _call(self, td: TensorDictBase) -> TensorDictBase:
        result: TensorDictBase = self._concatenated(td, [key for key, _ in self._env_pairs], self._env_pairs[0][1])
        return result

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        keys, out_key = [source for source, _ in self._env_pairs], self._env_pairs[0][1]
        observations = specs.observation.leaves()
        if others := [key for key in (*keys, out_key) if key in RESULT_KEYS]:
            raise ValueError(f"CatTensors concatenates observations of an environment, got {others}")
        specs.require(keys, "CatTensors")
        parts = [observations[key] for key in keys]
        zero, limits = self._call(specs.blank(stepped=False)).get(out_key), [bounds_of(spec) for spec in parts]
        spec: Spec = Unbounded(zero.shape, zero.device, zero.dtype)
        if None not in limits and len({one.dtype for one in parts}) == 1:
            low, high = (self._ends(specs, keys, out_key, [pair[i] for pair in limits]) for i in (0, 1))  # type: ignore[index]
            spec = Bounded(low, high, zero.shape, zero.device, zero.dtype)
        if self.del_keys:
            specs = specs._replace(observation=filter_leaves(specs.observation, lambda key: key not in keys))
        return specs.with_entries({out_key: spec})

    def _ends(self, specs: EnvSpecs, keys: list[Key], out_key: Key, values: list[Tensor]) -> Tensor:
        blank = specs.blank(stepped=False)
        for key, value in zip(keys, values, strict=True):
            blank.set(key, value)
        result: Tensor = self._call(blank).get(out_key)
        return result

    def _settings(self) -> dict[str, Any]:
        return {"out_key": self._out_key, "dim": self.dim, "del_keys": self.del_keys}

    def __repr__(self) -> str:
        settings = {"in_keys": list(self.in_keys), **self._settings()}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def first_key(batch: Any, keys: tuple[Key, ...], who: str) -> Key:
    """The first of the keys that exists in the batch.

    Raises:
        KeyError: none of them exists.
    """
    for key in keys:
        if has_keys(batch) and get_tensor(batch, key) is not None:
            return key
    raise missing_key_error(batch, keys, who)


def rewards_of(batch: Any, who: str) -> list[Key]:
    """The keys of a batch's rewards: `("next", "reward")`, or `"reward"`, or else those of groups, of this name.

    Raises:
        KeyError: it has none.
    """
    if not has_keys(batch):
        raise missing_key_error(batch, REWARD_KEYS, who)
    for key in REWARD_KEYS:
        if get_tensor(batch, key) is not None:
            return [key]
    nested = [key for key in map(key_path, leaf_keys(batch)) if key[-1] == "reward"]
    after = [key for key in nested if key[0] == "next"]
    if not nested:
        raise missing_key_error(batch, REWARD_KEYS, who)
    return list(after or nested)


def is_number(stat: Tensor) -> bool:
    """Whether a statistic is a single number for all values of a batch."""
    return stat.ndim <= 1 and stat.numel() == 1


def cast_stat(stat: Tensor, value: Tensor) -> Tensor:
    """A statistic on the device of `value`, in a dtype that preserves floating point dtypes of values."""
    dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    return stat.to(device=value.device, dtype=dtype)


def _checked_stats(loc: Any, scale: Any) -> tuple[Tensor, Tensor]:
    loc, scale = to_tensor(loc), to_tensor(scale)
    if not bool(torch.isfinite(loc).all()) or not bool((torch.isfinite(scale) & (scale != 0)).all()):
        raise ValueError(f"loc and scale must be finite and scale not 0, got {loc} and {scale}")
    return loc, scale


class FlattenObservation(Transform, built_in=True):
    """Flattens neighbouring dimensions into one.

    Args:
        first_dim, last_dim: the first and the last of them, counted from the end (-1 is the last), so that they do not
            depend on the number of batch dimensions.
        in_keys: entries, `["pixels"]` if None.
        out_keys: as Transform's.
        allow_positive_dim: dimensions may be counted from the front, batch dimensions included.

    Example:
        >>> FlattenObservation(-3, -1)({"pixels": torch.zeros(5, 3, 8, 8)})["pixels"].shape
        torch.Size([5, 192])
    """

    def __init__(
        self,
        first_dim: int,
        last_dim: int,
        in_keys: Keys = None,
        out_keys: Keys = None,
        allow_positive_dim: bool = False,
    ) -> None:
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)
        for name, dim in (("first_dim", first_dim), ("last_dim", last_dim)):
            _check_dim(name, dim, allow_positive_dim)
        if (first_dim < 0) == (last_dim < 0) and first_dim > last_dim:
            raise ValueError(f"first_dim must not come after last_dim, got {first_dim} and {last_dim}")
        self.first_dim, self.last_dim = first_dim, last_dim

    _keeps_order = True

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.flatten(self.first_dim, self.last_dim)

    def _settings(self) -> dict[str, Any]:
        return {"first_dim": self.first_dim, "last_dim": self.last_dim}


class UnsqueezeTransform(Transform, built_in=True):
    """Adds a dimension of 1 on reading; `inv` removes it.

    Args:
        dim: its position in the result, counted from the end (-1 is the last).
        in_keys, out_keys, in_keys_inv, out_keys_inv: as Transform's.
        allow_positive_dim: `dim` may be counted from the front, batch dimensions included.

    Raises:
        ValueError: the dimension that `inv` removes is not 1.

    Example:
        >>> UnsqueezeTransform(-3, in_keys=["frame"])({"frame": torch.zeros(5, 8, 8)})["frame"].shape
        torch.Size([5, 1, 8, 8])
    """

    def __init__(
        self,
        dim: int,
        allow_positive_dim: bool = False,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        _check_dim("dim", dim, allow_positive_dim)
        if not self.in_keys and not self.in_keys_inv:
            raise ValueError("UnsqueezeTransform needs in_keys, in_keys_inv or both")
        self.dim = self.unsqueeze_dim = dim

    _keeps_order = True

    def transform_action_spec(self, action_spec: Spec) -> Spec:
        return self._mapped_action(action_spec, self._unsqueezed)

    def _unsqueezed(self, spec: Any) -> Spec:
        shape = self._apply_transform(spec.zero()).shape
        if type(spec) is Categorical:
            return Categorical(spec.n, shape, spec.device, spec.dtype)
        if type(spec) is OneHot and shape[-1] == spec.n:
            return OneHot(spec.n, shape, spec.device, spec.dtype)
        if type(spec).__name__ not in ("Bounded", "Unbounded"):
            raise ValueError(f"UnsqueezeTransform(dim={self.dim}) cannot be used on an action of {spec}")
        return self._mapped(spec)

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.unsqueeze(self.dim)

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        if value.shape[self.dim] != 1:
            raise ValueError(f"dimension {self.dim} must be 1 to be removed, got shape {list(value.shape)}")
        return value.squeeze(self.dim)

    def _settings(self) -> dict[str, Any]:
        return {"dim": self.dim}


def _check_dim(name: str, dim: int, allow_positive_dim: bool) -> None:
    if not is_integer(dim):
        raise ValueError(f"{name} must be an integer, got {dim!r}")
    if dim >= 0 and not allow_positive_dim:
        raise ValueError(
            f"{name} must be negative, as batches may have any number of leading dimensions, got {dim}; "
            "allow_positive_dim=True counts from the front"
        )
