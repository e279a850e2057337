"""Checks of actions: each action of a policy is compared with the environment's spec before the step.

Numbers beyond the choices, vectors that are not one-hot, texts of other characters or lengths, NaN, and numbers that an
integer dtype cannot hold are refused. The bounds of a Box are not checked: actions of Gaussian policies often exceed
them, and may be infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.pytree import key_path, to_tensor
from engram.specs.torchrl import stack_members

Array = np.ndarray[Any, Any]
_MAX_TABLE = 256  # choices: a table of one-hot rows then takes at most half a megabyte


class ActionCheck:
    """Compares actions `[*batch_size, *spec.shape]` with the specs of their leaves.

    Args:
        specs: the spec of each action leaf of one environment, by key; engram's or TorchRL's. The key None stands for
            an action that is one tensor.
        batch_size: the batch size of the environments.

    >>> from engram.specs import Categorical
    >>> check = ActionCheck({None: Categorical(3)}, [2])
    >>> check.accepts(torch.tensor([0, 2])), check.accepts(torch.tensor([0, 3]))
    (True, False)
    """

    def __init__(self, specs: Mapping[Any, Any], batch_size: Sequence[int] = ()) -> None:
        batch = torch.Size(batch_size)
        self._leaves = {key: _LeafCheck(spec, torch.Size((*batch, *spec.shape)), batch) for key, spec in specs.items()}
        self._only = self._leaves.get(None)
        if self._only is not None:
            #: Of actions that are one tensor: the numbers, where they are quickly found to be in the domain, else None.
            self.array_of: Callable[[Any], Array | None] = self._only.array_of

    def accepts(self, action: Any) -> bool:
        """Fast check: True if the action is valid. After False, `refuse` decides."""
        if self._only is not None:
            return self._only.accepts(action)
        if not isinstance(action, TensorDictBase):
            return False
        return all(leaf.accepts(action.get(key, None)) for key, leaf in self._leaves.items())

    def require(self, action: Any) -> None:
        """Raises ValueError for an invalid action."""
        if not self.accepts(action):
            self.refuse(action)

    def refuse(self, action: Any, step: int | None = None) -> None:
        """`require` without the fast check; `step` is the step's number in a batch, from 0."""
        for key, leaf in self._leaves.items():
            value = action if key is None else action.get(key, None) if isinstance(action, TensorDictBase) else action
            leaf.refuse(value, key, step)


class EntriesCheck:
    """Compares actions in TensorDicts with specs, batch dimensions included, of an environment of any library.

    Missing actions and other shapes are left to the environment.
    """

    def __init__(self, env: Any) -> None:
        batch = torch.Size(env.batch_size)
        self._leaves: list[tuple[Any, _LeafCheck]] = []
        self._stacks: list[tuple[Any, list[_LeafCheck]]] = []
        for key, spec in _action_specs(env).items():
            if (members := stack_members(spec)) is not None:
                self._stacks.append((key, [_LeafCheck(one, one.shape, batch) for one in members]))
            else:
                self._leaves.append((key, _LeafCheck(spec, spec.shape, batch)))

    def require(self, td: TensorDictBase, step: int) -> None:
        """Raises ValueError for an action that is not in its spec; `step` is its number in a batch, from 0."""
        for key, leaf in self._leaves:
            leaf.require(td.get(key, None), key, step)
        for key, members in self._stacks:
            values = td.get(key, None, as_list=True)
            for i, (leaf, value) in enumerate(zip(members, () if values is None else values, strict=False)):
                leaf.require(value, (*key_path(key), i), step)


def action_keys(env: Any) -> list[Any]:
    """The keys of all actions, of an environment of any library."""
    return list(getattr(env, "action_keys", ("action",)))


def _action_specs(env: Any) -> dict[Any, Any]:
    """The specs of all actions by key, of an environment of any library."""
    keys = action_keys(env)
    specs = {"action": env.action_spec} if keys == ["action"] else {key: env.full_action_spec[key] for key in keys}
    return {key: spec for key, spec in specs.items() if spec.dtype is not None}  # TorchRL has actions of no dtype


class _LeafCheck:
    """The check of one action leaf, for a batch of environments."""

    def __init__(self, spec: Any, shape: torch.Size, batch: torch.Size) -> None:
        self._spec, self._shape, self._batch = spec, shape, batch
        self._domain = _domain_of(spec)
        self._choices = range(0 if shape else self._domain.choices)

    def accepts(self, value: Any) -> bool:
        """Fast check: True if the value is in the domain. After False, `refuse` decides."""
        if self._choices and type(value) is Tensor and value.shape == self._shape and value.dtype is torch.int64:
            return value.item() in self._choices  # a third of the cost of an array
        return self.array_of(value) is not None

    def array_of(self, value: Any) -> Array | None:
        """The value as an array, if a fast check finds it in the domain; else None."""
        if type(value) is not Tensor or value.shape != self._shape or not value.is_cpu:
            return None
        try:
            array = value.numpy()
        except (TypeError, RuntimeError):  # numpy has no such dtype; a gradient
            return None
        return array if self._domain.holds(array) else None

    def require(self, value: Any, key: Any, step: int) -> None:
        """Raises ValueError for a tensor of this shape that is outside the domain."""
        if isinstance(value, Tensor) and value.shape == self._shape and not self.accepts(value):
            self.refuse(value, key, step)

    def refuse(self, value: Any, key: Any, step: int | None) -> None:
        """Raises ValueError for a value of another shape, or outside the domain."""
        fits = isinstance(value, Tensor) and value.shape == self._shape
        if fits:
            inside = self._domain.inside(value.detach()).reshape(self._batch.numel(), -1).all(-1)
            if bool(inside.all()):
                return
        places = [] if step is None else [f"step {step + 1} of the batch"]
        found = _described(value)
        if fits and self._batch.numel() > 1:
            env = int(inside.logical_not().nonzero()[0])
            places.insert(0, f"environment {env}")
            found = _described(value.reshape(self._batch.numel(), *self._shape[len(self._batch) :])[env])
        entry = "" if key in (None, "action") else f" {key!r}"
        before = "" if self._spec.shape == self._shape else f", after the batch dimensions {tuple(self._batch)}"
        raise ValueError(
            f"action{entry} is not what the environment takes.\n"
            f"  found:   {found}\n"
            + (f"  where:   {', '.join(places)}\n" if places else "")
            + f"  allowed: {self._spec}{before}\n"
            f"  {self._domain.advice}"
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}: {value}"
    return f"a {type(value).__name__} instead of a tensor: {value!r:.200}"


class _Numbers:
    """The domain of all numbers that a dtype can hold, except NaN; bounds are ignored."""

    choices = 0  #: of a scalar with choices 0, 1, ...: how many
    advice = "NaN is in no space: a network's weights, or its observation, have become NaN or infinite."

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._is_float = dtype.is_floating_point or dtype.is_complex
        if not self._is_float:
            self._array_dtype = torch.zeros(0, dtype=dtype, device="cpu").numpy().dtype
            self.advice = f"Every number must be one that {dtype} can hold."

    def holds(self, array: Array) -> bool:
        """Whether all numbers are inside; False where that takes a closer look."""
        if not self._is_float:
            return bool(array.dtype == self._array_dtype)
        return b"\1" not in np.isnan(array).tobytes()  # a tenth of the cost of `any`

    def inside(self, value: Tensor) -> Tensor:
        """bool, of the shape of `value`: which numbers are inside."""
        if not value.dtype.is_floating_point:
            return torch.ones_like(value, dtype=torch.bool) if self._is_float else self._fits(value.double())
        return ~value.isnan() if self._is_float else self._fits(value.double())

    def _fits(self, number: Tensor) -> Tensor:
        if self._dtype is torch.bool:
            return (number == 0) | (number == 1)
        limits = torch.iinfo(self._dtype)
        whole = number.trunc()
        return (whole >= float(limits.min)) & (whole < float(limits.max + 1))


_UNSIGNED = {"bool": "uint8", **{f"{sign}int{bits}": f"uint{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}}
_SIGNED = {"bool": "int8"}
_NEEDS_CHOICE = (
    "A network's scores need an argmax: one_hot(scores.argmax(-1), n), or scores.argmax(-1) with "
    "GymEnv(..., categorical_action_encoding=True)."
)


class _Choices:
    """Integers from 0 to below `n`, a number or a tensor with a number for each element of the last dimensions."""

    advice = _NEEDS_CHOICE

    def __init__(self, n: int | Tensor) -> None:
        self._n = to_tensor(n)
        self.choices = int(self._n) if self._n.ndim == 0 else 0
        self._ends: dict[str, Array | None] = {}  # by dtype, as unsigned numbers: negative values then exceed them, too

    def holds(self, array: Array) -> bool:
        """Whether all numbers are inside; False where that takes a closer look."""
        kind = array.dtype.char  # its name costs more than all of this
        if kind not in self._ends:
            self._ends[kind] = self._end_as(array.dtype.name)
        end = self._ends[kind]
        return end is not None and b"\0" not in np.less(array.view(end.dtype), end).tobytes()

    def _end_as(self, name: str) -> Array | None:
        if name not in _UNSIGNED or int(self._n.max()) > np.iinfo(_SIGNED.get(name, name)).max:
            return None
        return self._n.numpy().astype(_UNSIGNED[name])

    def inside(self, value: Tensor) -> Tensor:
        number = value.double()
        return (number >= 0) & (number < self._n.to(value.device)) & (number == number.trunc())


class _OneHots:
    """Concatenated one-hot vectors of the lengths `nvec`."""

    choices = 0
    advice = (
        "A number is passed as torch.nn.functional.one_hot(number, n), or as it is to GymEnv(..., "
        f"categorical_action_encoding=True). {_NEEDS_CHOICE}"
    )

    def __init__(self, nvec: Sequence[int]) -> None:
        self._nvec = list(nvec)
        self._starts = np.cumsum([0, *self._nvec[:-1]])
        self._rows: dict[str, frozenset[bytes]] = {}  # by dtype: all one-hot rows as bytes, if there are few

    def holds(self, array: Array) -> bool:
        if array.ndim == 1 and len(self._nvec) == 1 and self._nvec[0] <= _MAX_TABLE:
            rows = self._rows.get(array.dtype.char)
            if rows is None:
                rows = frozenset(row.tobytes() for row in np.eye(self._nvec[0], dtype=array.dtype))
                self._rows[array.dtype.char] = rows
            return array.tobytes() in rows
        # Each vector sums to 1, and there are no more nonzero numbers than vectors: each has a single 1.
        ones = np.add.reduceat(array, self._starts, -1)
        return np.count_nonzero(array) == ones.size and b"\0" not in np.equal(ones, 1).tobytes()

    def inside(self, value: Tensor) -> Tensor:
        parts = torch.split(value, self._nvec, -1)
        return torch.stack([((p == 0) | (p == 1)).all(-1) & (p != 0).sum(-1).eq(1) for p in parts], -1)


class _Texts:
    """Texts of the charset and lengths of a spec."""

    choices = 0

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self.advice = (
            f"A text of {spec.min_length} to {spec.max_length} characters is passed as env.action_spec.encode(text): "
            "UTF-8, with zeros after its end."
        )

    def holds(self, array: Array) -> bool:
        return bool(array.dtype == np.uint8) and bool(self.inside(torch.from_numpy(array)).all())

    def inside(self, value: Tensor) -> Tensor:
        """bool, without the last dimension: which texts are inside."""
        inside: Tensor = self._spec.are_texts(value)
        return inside


_Domain = _Numbers | _Choices | _OneHots | _Texts


def _domain_of(spec: Any) -> _Domain:
    """The domain of a spec of engram or TorchRL; of other classes all numbers of the dtype."""
    name = type(spec).__name__
    if name == "Binary":
        return _Choices(2)
    if name in ("Categorical", "OneHot") and spec.space.n > 0:
        return _Choices(int(spec.space.n)) if name == "Categorical" else _OneHots([int(spec.space.n)])
    if name == "MultiCategorical":
        return _Choices(to_tensor(spec.nvec))
    if name == "MultiOneHot":
        nvec = [int(n) for n in to_tensor(spec.nvec).reshape(-1)]
        if spec.shape[-1:] == (sum(nvec),):
            return _OneHots(nvec)
    if name == "Text":
        return _Texts(spec)
    return _Numbers(spec.dtype)
