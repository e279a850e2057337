"""Transforms of the shape of entries."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engram.data.specs import Categorical, OneHot, Spec
from engram.transforms.base import Transform
from engram.transforms.entries import Keys


class FlattenObservation(Transform):
    """Neighbouring dimensions made one.

    Args:
        first_dim, last_dim: the first and the last of them, counted from the end (-1 is the last), so that they are
            the same whatever batch dimensions there are.
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


class UnsqueezeTransform(Transform):
    """A new dimension of 1 on reading; `inv` takes it away.

    Args:
        dim: its place in the result, counted from the end (-1 is the last).
        in_keys, out_keys, in_keys_inv, out_keys_inv: as Transform's.
        allow_positive_dim: `dim` may be counted from the front, batch dimensions included.

    Raises:
        ValueError: `inv` meets a dimension that is not 1.

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
            raise ValueError(f"dimension {self.dim} must be 1 to be taken away, got shape {list(value.shape)}")
        return value.squeeze(self.dim)

    def _settings(self) -> dict[str, Any]:
        return {"dim": self.dim}


def _check_dim(name: str, dim: int, allow_positive_dim: bool) -> None:
    if dim >= 0 and not allow_positive_dim:
        raise ValueError(
            f"{name} must be negative, as batches may have any number of leading dimensions, got {dim}; "
            "allow_positive_dim=True counts from the front"
        )
