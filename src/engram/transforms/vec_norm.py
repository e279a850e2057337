"""`VecNorm`: normalises with running statistics of the data."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram import _forms as forms
from engram._advice import advised
from engram.pytree import Keys, has_batch_size, key_path, require_tensor, set_entry
from engram.specs import Spec, Unbounded
from engram.transforms.base import IDLE, EnvTransformMixin, Transform, WriteRequest, root_key
from engram.transforms.compose import Compose
from engram.transforms.env_specs import EnvSpecs
from engram.transforms.values import ObservationNorm, cast_stat


class _Stats(NamedTuple):
    """Running statistics: weight (steps, or less with decay), mean, sum of squared differences.

    float64, never changed in place.
    """

    weight: float
    mean: Tensor
    squares: Tensor

    def is_possible(self) -> bool:
        """Whether these statistics are consistent."""
        finite = math.isfinite(self.weight) and all(bool(part.isfinite().all()) for part in (self.mean, self.squares))
        return finite and self.mean.shape == self.squares.shape and self.weight > 0 and bool((self.squares >= 0).all())

    def with_batch(self, batch: _Stats, decay: float) -> _Stats:
        """The statistics, decayed and then merged with those of a batch (Chan, Golub and LeVeque)."""
        old = decay * self.weight
        count = old + batch.weight
        delta = batch.mean.to(self.mean.device) - self.mean
        mean = self.mean + delta * (batch.weight / count)
        squares = (
            decay * self.squares + batch.squares.to(self.mean.device) + delta.square() * (old * batch.weight / count)
        )
        return _Stats(count, mean, squares)


_OF_ENTRY = forms.nullable(forms.fields(forms.number, forms.tensor(torch.float64), forms.tensor(torch.float64)))
_STATE = forms.record(
    {"stats": forms.list_of(_OF_ENTRY), "learns": forms.boolean, "nonfinite": forms.list_of(forms.integer())}
)


@advised
class VecNorm(Transform, built_in=True):
    """Normalises entries with their running mean and standard deviation.

    Args:
        in_keys: entries; each feature has statistics of its own.
        out_keys: as Transform's.
        decay: factor on the weight of all earlier steps at each new batch; 1 weighs every step the same.
        eps: added to the variance.

    TorchRL's `shapes`, `new_api`, `lock=None` and `shared_td=None` are accepted without effect.

    In a buffer it learns from written data, which are stored unchanged, and normalises data on reading. Called, or
    appended with `invert=True`, it learns from the batch and normalises it. `forward` alone only normalises. In an
    environment it learns from every step, and from the rows of every reset that start an episode, and normalises
    the policy's input; several environments may share one.

    A row of an entry with a NaN, an infinity, or a value whose square is too large for float64 (above 1e140) is left
    out of the statistics: `nonfinite` counts these rows, entry by entry, and the first one causes a warning. Such a row
    is stored and normalised like any other; an entry that has had no other rows is passed on unchanged.

    Raises:
        RuntimeError: it has no statistics yet.

    Example:
        >>> norm = VecNorm(in_keys=["obs"], decay=1.0)
        >>> norm(TensorDict({"obs": torch.tensor([[1.0], [3.0]])}, [2]))["obs"].round(decimals=2).flatten()
        tensor([-1.,  1.])
    """

    inverse_in_order = True
    forward_in_order = True

    def __init__(self, in_keys: Keys, out_keys: Keys = None, *, decay: float = 0.9999, eps: float = 1e-4) -> None:
        super().__init__(in_keys, out_keys)
        if not self.in_keys:
            raise ValueError("VecNorm needs in_keys")
        if not 0 < decay <= 1:
            raise ValueError(f"decay must lie above 0 and be at most 1, got {decay}")
        if eps < 0:
            raise ValueError(f"eps must be 0 or more, got {eps}")
        self.decay, self.eps = decay, eps
        self._learns = True
        self._stats: list[_Stats | None] | None = None  # None, in total or for an entry: no statistics yet
        self._nonfinite = [0] * len(self.in_keys)

    # ---- learning ----
    @property
    def nonfinite(self) -> int:
        """The number of rows of entries that are not in the statistics because they were not finite."""
        return sum(self._nonfinite)

    def learn(self, batch: Any, batch_dims: int | None = None) -> None:
        """Adds a batch to the statistics, unless frozen. Dicts have `batch_dims` batch dimensions, 1 if None."""
        if not self._learns:
            return
        if batch_dims is None:
            batch_dims = batch.batch_dims if has_batch_size(batch) else 1
        self._add([require_tensor(batch, key, type(self).__name__) for key in self.in_keys], batch_dims)

    def _add(self, values: list[Tensor | None], batch_dims: int) -> None:
        """Adds the entries of a batch to the statistics; None stands for an entry that the batch lacks."""
        each = [(None, 0) if value is None else _stats_of(value, batch_dims) for value in values]
        batch = [stats for stats, _ in each]
        running = self._stats or [None] * len(batch)
        for key, old, new in zip(self.in_keys, running, batch, strict=True):
            if old is not None and new is not None and old.mean.shape != new.mean.shape:
                raise ValueError(f"{key!r} has shape {list(new.mean.shape)}, and had {list(old.mean.shape)} before")
        skipped = [n for _, n in each]
        if any(skipped):
            self._count_skipped(skipped)
        if any(stats is not None for stats in batch):
            self._stats = [_merged(old, new, self.decay) for old, new in zip(running, batch, strict=True)]

    def _count_skipped(self, rows: list[int]) -> None:
        """Counts rows that are left out of the statistics, and warns at the first."""
        if not any(self._nonfinite):
            keys = [key for key, n in zip(self.in_keys, rows, strict=True) if n]
            warnings.warn(
                f"VecNorm found values of {keys} that are not finite: such rows are left out of its statistics from "
                "now on without another warning, and counted in `nonfinite`",
                stacklevel=2,
            )
        self._nonfinite = [old + new for old, new in zip(self._nonfinite, rows, strict=True)]

    def freeze(self) -> VecNorm:
        """Stops learning."""
        self._learns = False
        return self

    def unfreeze(self) -> VecNorm:
        """Starts learning again."""
        self._learns = True
        return self

    def frozen(self) -> VecNorm:
        """A frozen copy."""
        return copy.copy(self).freeze()

    frozen_copy = frozen

    #: Values are normalised by subtracting means and dividing by standard deviations.
    standard_normal = True

    def denorm(self, tensordict: Any) -> Any:
        """Reverses the normalisation of `out_keys` in the batch, in place."""
        for key, stats in zip(self.out_keys, self._norms(), strict=True):
            value = require_tensor(tensordict, key, f"{type(self).__name__}.denorm")
            if stats is not None:
                scale = self._deviation(stats)
                set_entry(tensordict, key, value * cast_stat(scale, value) + cast_stat(stats.mean, value))
        return tensordict

    def to_observation_norm(self) -> list[ObservationNorm]:
        """The present statistics as fixed transforms, one for each entry."""
        norms = zip(self.in_keys, self.out_keys, self._complete_stats(), strict=True)
        return [
            ObservationNorm(one.mean, self._deviation(one), [key], [target], standard_normal=True)
            for key, target, one in norms
        ]

    @property
    def loc(self) -> TensorDict:
        """Means, by key."""
        return self._by_name([stats.mean for stats in self._complete_stats()])

    @property
    def scale(self) -> TensorDict:
        """Standard deviations, by key."""
        return self._by_name([self._deviation(stats) for stats in self._complete_stats()])

    def _deviation(self, stats: _Stats) -> Tensor:
        return (stats.squares / stats.weight + self.eps).sqrt()

    def _by_name(self, values: list[Tensor]) -> TensorDict:
        dtype = torch.get_default_dtype()
        pairs = zip(self.in_keys, values, strict=True)
        return TensorDict({}, []).update({key_path(key): value.to(dtype) for key, value in pairs})

    def _complete_stats(self) -> list[_Stats]:
        """The statistics of all entries. Raises RuntimeError if one has none."""
        stats = [one for one in self._stats or () if one is not None]
        if len(stats) < len(self.in_keys):
            raise RuntimeError(_NO_STATISTICS)
        return stats

    def _norms(self) -> list[_Stats | None]:
        """The statistics to normalise with; None for an entry whose rows were all not finite, which stays unchanged."""
        stats = self._stats or [None] * len(self.in_keys)
        for key, one, skipped in zip(self.in_keys, stats, self._nonfinite, strict=True):
            if one is None and not skipped:
                raise RuntimeError(f"{_NO_STATISTICS} (about {key!r})")
        return stats

    # ---- batches ----
    def forward(self, batch: Any) -> Any:
        if type(batch) is list:
            return [self.forward(item) for item in batch]
        stats = self._norms()  # read once, as a writer in another thread may learn at the same time
        sources = [require_tensor(batch, key, type(self).__name__) for key in self.in_keys]
        for value, key, one in zip(sources, self.out_keys, stats, strict=True):
            set_entry(batch, key, self._normalised(value, one))
        return batch

    def _normalised(self, value: Tensor, stats: _Stats | None) -> Tensor:
        if stats is None:
            return value if value.is_floating_point() else value.to(torch.get_default_dtype())
        scale = self._deviation(stats)
        return (value - cast_stat(stats.mean, value)) / cast_stat(scale, value)

    def __call__(self, batch: Any) -> Any:
        self.learn(batch)
        return self.forward(batch)

    def inv(self, tensordict: Any) -> Any:
        return tensordict

    def inverse_stream(self, writing: WriteRequest) -> WriteRequest:
        self._learn_from(writing)
        return writing

    def forward_stream(self, writing: WriteRequest) -> WriteRequest:
        self._learn_from(writing)
        return writing.changed(self.forward)

    def _learn_from(self, writing: WriteRequest) -> None:
        if writing.items is None or writing.in_place:
            return
        dims = writing.batch_dims - writing.single
        batch = writing.items
        self.learn(batch, max(dims, batch.batch_dims) if isinstance(batch, TensorDictBase) else dims)

    # ---- environments ----
    def _call(self, td: TensorDictBase) -> TensorDictBase:
        self._learn_from_env(td)
        return self._normalised_entries(td)

    def _normalised_entries(self, td: TensorDictBase) -> TensorDictBase:
        stats = self._stats or [None] * len(self.in_keys)
        by_root = {root_key(key): i for i, key in enumerate(self.in_keys)}
        for source, target in self._env_pairs:
            value, i = td.get(source, None), by_root[source]
            if value is None:
                continue
            if stats[i] is None and not self._nonfinite[i]:
                raise RuntimeError(f"VecNorm has no statistics of {source!r} yet, and is frozen")
            td.set(target, self._normalised(value, stats[i]))
        return td

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        mask, postponed = td.get("_reset", None), fresh.get(IDLE, None)
        if postponed is not None:  # these rows repeat the last observation
            mask = ~postponed if mask is None else mask & ~postponed
        self._learn_from_env(fresh if mask is None else fresh[mask.reshape(fresh.batch_size)])
        return self._normalised_entries(fresh)

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        idle = td.get(IDLE, None)  # the following reset repeats the observation of these rows
        self._learn_from_env(following if idle is None else following[~idle.reshape(following.batch_size)])
        return self._normalised_entries(following)

    def _learn_from_env(self, td: TensorDictBase) -> None:
        if self._learns:
            self._add([td.get(root_key(key), None) for key in self.in_keys], td.batch_dims)

    def _inverts(self) -> bool:
        return False

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        return EnvTransformMixin.transform_specs(self, specs)

    def _mapped(self, spec: Any) -> Spec:
        dtype = spec.dtype if spec.dtype.is_floating_point else torch.get_default_dtype()
        return Unbounded(spec.shape, spec.device, dtype)

    # ---- state ----
    _state_settings = ("in_keys", "decay", "eps")

    def get_extra_state(self) -> dict[str, Any]:
        if self._stats is None and not self.nonfinite:
            return {}
        stats = self._stats or [None] * len(self.in_keys)
        saved = [None if one is None else tuple(one) for one in stats]
        return {"stats": saved, "learns": self._learns, "nonfinite": list(self._nonfinite)}

    def set_extra_state(self, state: Any) -> None:
        """Continues from a saved state; `{}` is that of a transform without statistics."""
        stats = [None if one is None else _Stats(*one) for one in state.get("stats", [])]
        self._stats = stats if any(one is not None for one in stats) else None
        self._learns = state["learns"] if state else self._learns
        self._nonfinite = list(state["nonfinite"]) if state else [0] * len(self.in_keys)

    def differences(self, state: dict[str, Any]) -> list[str]:
        forms.check(_STATE, state, f"the state of {self.kind}")
        n, counted = len(state["stats"]), len(state["nonfinite"])
        if n != len(self.in_keys) or counted != n:
            return [f"VecNorm has {len(self.in_keys)} in_keys here, {n} there"]
        saved = [(key, _Stats(*one)) for key, one in zip(self.in_keys, state["stats"], strict=True) if one is not None]
        return [f"VecNorm has impossible statistics of {key!r} there" for key, one in saved if not one.is_possible()]

    def _settings(self) -> dict[str, Any]:
        return {"decay": self.decay, **({} if self._learns else {"frozen": True})}


@advised
class VecNormV2(VecNorm, built_in=True):
    """`VecNorm` whose `frozen` is a property, and whose `to_observation_norm` gives one transform.

    Args:
        in_keys, out_keys, decay, eps: as VecNorm's.
        reduce_batch_dims: without effect: the statistics are those of all environments together.

    TorchRL's `stateful=True`, `lock=None` and `shared_data=None` are accepted without effect.

    Raises:
        TypeError: `stateful=False`, a `lock` or `shared_data`: the statistics are this object's, which the
            environments of a process may share.

    Example:
        >>> norm = VecNormV2(in_keys=["obs"], decay=1.0)
        >>> batch = norm(TensorDict({"obs": torch.tensor([[1.0], [3.0]])}, [2]))
        >>> norm.loc["obs"], norm.denorm(batch)["obs"].flatten()
        (tensor([2.]), tensor([1., 3.]))
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys = None,
        *,
        decay: float = 0.9999,
        eps: float = 1e-4,
        reduce_batch_dims: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys, decay=decay, eps=eps)
        self.reduce_batch_dims = reduce_batch_dims

    @property
    def frozen(self) -> bool:  # type: ignore[override]
        """Whether it has stopped learning."""
        return not self._learns

    def frozen_copy(self) -> VecNormV2:
        """A frozen copy."""
        own = copy.copy(self)
        own.freeze()
        return own

    def to_observation_norm(self) -> Any:
        """The present statistics as a fixed transform; a Compose of several if there are several entries."""
        norms = super().to_observation_norm()
        return norms[0] if len(norms) == 1 else Compose(*norms)


def _merged(old: _Stats | None, new: _Stats | None, decay: float) -> _Stats | None:
    return new or old if old is None or new is None else old.with_batch(new, decay)


def _stats_of(value: Tensor, batch_dims: int) -> tuple[_Stats | None, int]:
    """The statistics of all finite rows, None if there are none; and the number of rows that are not finite."""
    x = value.detach().to(torch.float64).reshape(-1, *value.shape[batch_dims:])
    stats = _stats_of_rows(x)
    # One number decides the common case: a value that is not finite, or too large, makes it large or NaN.
    if stats is None or float((stats.squares + stats.mean.square()).sum()) <= _LARGE:
        return stats, 0
    rows = len(x)
    x = x[(x.abs() <= _LARGEST).reshape(rows, -1).all(1)]  # also False for NaN
    return _stats_of_rows(x), rows - len(x)


def _stats_of_rows(x: Tensor) -> _Stats | None:
    if len(x) == 0:
        return None
    mean = x.mean(0)
    return _Stats(float(len(x)), mean, (x - mean).square().sum(0))


_LARGEST = 1e140  # the sum of the squares of 1e20 such values fits float64
_LARGE = _LARGEST**2
_NO_STATISTICS = "VecNorm has no statistics yet: write data through it, call it, or call learn(data)"
