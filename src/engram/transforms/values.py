"""Transforms of values: dtypes, shifts and scales, shapes."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.pytree import (
    Key,
    Keys,
    copy_containers,
    get_tensor,
    has_batch_size,
    has_keys,
    leaf_keys,
    missing_key_error,
    require_tensor,
    set_entry,
)
from engram.specs import Categorical, OneHot, Spec, Unbounded
from engram.transforms.base import Deferred, Transform, root_pairs
from engram.transforms.env_specs import EnvSpecs, cast_spec, map_leaves

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
        self.dtype_in, self.dtype_out = dtype_in, dtype_out
        self._reads_all = in_keys is None
        self._all = in_keys is None and in_keys_inv is None

    def forward(self, batch: Any) -> Any:
        return self._cast_all(batch, self.dtype_in, self.dtype_out) if self._reads_all else super().forward(batch)

    def inv(self, batch: Any) -> Any:
        return (
            self._cast_all(copy_containers(batch), self.dtype_out, self.dtype_in) if self._all else super().inv(batch)
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

        map_leaves(specs.action, "action", collect)
        entries = {**specs.observation.leaves(), "reward": specs.reward}
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
        self.standard_normal = standard_normal
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

    def init_stats(self, data: Any, key: Key | None = None, reduce_dim: Any = None) -> None:
        """Computes mean and standard deviation (at least `eps`) of data: a batch with the entry `key`, or a tensor.

        Args:
            key: the only one of `in_keys` if None.
            reduce_dim: dimensions to average over; the batch dimensions if None (of tensors and dicts the first).

        Raises:
            ValueError: no data, data that are not finite, or several `in_keys` and no `key`. Nothing is changed.
        """
        if isinstance(data, int):
            raise TypeError("init_stats takes data (a batch or a tensor), not a number of steps")
        if key is None and not isinstance(data, Tensor):
            keys = list(self.in_keys) or list(self.in_keys_inv)
            if len(keys) > 1:
                raise ValueError(f"init_stats needs key=, one of {keys}, where there are several in_keys")
            key = keys[0]
        value = data if key is None else require_tensor(data, key, "ObservationNorm.init_stats")
        if reduce_dim is None:
            dims = data.batch_dims if has_batch_size(data) else 1
            reduce_dim = tuple(range(dims))
        if value.numel() == 0:
            raise ValueError(f"init_stats needs data, got shape {list(value.shape)}")
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        value = value.to(torch.float64)  # squares and sums of float16 would soon be infinite
        if bad := value.numel() - int(value.isfinite().sum()):
            raise ValueError(
                f"init_stats found {bad} values of {value.numel()} that are not finite, and no statistics of them "
                "exist: leave these rows out, or use VecNorm, which does"
            )
        mean = value.mean(reduce_dim)
        std = (value - value.mean(reduce_dim, keepdim=True)).square().mean(reduce_dim).sqrt().clamp_min(self.eps)
        loc, scale = (mean, std) if self.standard_normal else (-mean / std, 1 / std)
        # In float16 a deviation of 1e-6, or its inverse, would be 0 or infinite.
        dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        self._stats = _checked_stats(loc.to(dtype), scale.to(dtype))

    # ---- environments ----
    @property
    def _keeps_order(self) -> bool:  # type: ignore[override]
        return self._given  # init_stats may be called again, and then changes the bounds

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

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        loc, scale = self._cast(value)
        return value * scale + loc if self.standard_normal else (value - loc) / scale

    def _cast(self, value: Tensor) -> tuple[Tensor, Tensor]:
        if self._stats is None:
            raise RuntimeError("ObservationNorm has no loc and scale yet: give them, or call init_stats(data)")
        return cast_stat(self._stats[0], value), cast_stat(self._stats[1], value)

    def state_dict(self) -> dict[str, Any]:
        """The statistics that `init_stats` computed; `loc` and `scale` given to `__init__` are settings."""
        return {} if self._given or self._stats is None else {"loc": self._stats[0], "scale": self._stats[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self._given:
            self._stats = (state["loc"], state["scale"]) if state else None

    def differences(self, state: dict[str, Any]) -> list[str]:
        if self._given:
            return [f"ObservationNorm was given loc={self.loc} and scale={self.scale} here, and computed them there"]
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


class RewardScaling(Transform, built_in=True):
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
        if in_keys is None and out_keys is not None:
            raise ValueError("RewardScaling with out_keys needs in_keys")
        super().__init__(in_keys, out_keys)
        self.loc, self.scale = _checked_stats(loc, scale)
        self.standard_normal = standard_normal

    def _pairs(self, batch: Any) -> list[tuple[Key, Key]]:
        if self.in_keys:
            return super()._pairs(batch)
        key = first_key(batch, REWARD_KEYS, "RewardScaling")
        return [(key, key)]

    _keeps_order = True

    @cached_property
    def _env_pairs(self) -> list[tuple[Key, Key]]:
        return root_pairs(self.in_keys, self.out_keys) if self.in_keys else [("reward", "reward")]

    def _apply_transform(self, value: Tensor) -> Tensor:
        loc, scale = cast_stat(self.loc, value), cast_stat(self.scale, value)
        return (value - loc) / scale if self.standard_normal else value * scale + loc

    def deferred(self) -> Deferred | None:
        is_scalar = self.loc.numel() == self.scale.numel() == 1
        if type(self) is not RewardScaling or not is_scalar or self._env_pairs != [("reward", "reward")]:
            return None

        def apply(batch: TensorDictBase, starts: Tensor) -> None:
            following = batch.get("next")
            following.set("reward", self._apply_transform(following.get("reward")))

        return Deferred(("reward",), None, apply)

    def _settings(self) -> dict[str, Any]:
        return {"loc": self.loc.tolist(), "scale": self.scale.tolist(), "standard_normal": self.standard_normal}


def first_key(batch: Any, keys: tuple[Key, ...], who: str) -> Key:
    """The first of the keys that exists in the batch.

    Raises:
        KeyError: none of them exists.
    """
    for key in keys:
        if has_keys(batch) and get_tensor(batch, key) is not None:
            return key
    raise missing_key_error(batch, keys, who)


def cast_stat(stat: Tensor, value: Tensor) -> Tensor:
    """A statistic on the device of `value`, in a dtype that keeps that of floating point values."""
    dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    return stat.to(device=value.device, dtype=dtype)


def _checked_stats(loc: Any, scale: Any) -> tuple[Tensor, Tensor]:
    loc, scale = torch.as_tensor(loc), torch.as_tensor(scale)
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
        dim: its place in the result, counted from the end (-1 is the last).
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
        self.dim = dim

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
    if dim >= 0 and not allow_positive_dim:
        raise ValueError(
            f"{name} must be negative, as batches may have any number of leading dimensions, got {dim}; "
            "allow_positive_dim=True counts from the front"
        )
