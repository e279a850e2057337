"""What a transform is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Transform:
    """Changes batches: `forward` when they are read, `inv` when they are written.

    A plain callable will do too: a buffer calls it on reading.
    """

    def forward(self, batch: Any) -> Any:
        """The batch as the caller shall see it."""
        return batch

    def inv(self, batch: Any) -> Any:
        """The batch as it shall be stored; gets the caller's own object."""
        return batch

    def __call__(self, batch: Any) -> Any:
        return self.forward(batch)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class CallableTransform(Transform):
    """A callable as a transform: on reading, or with `invert` on writing."""

    def __init__(self, fn: Callable[[Any], Any], invert: bool = False) -> None:
        self.fn = fn
        self.invert = invert

    def forward(self, batch: Any) -> Any:
        return batch if self.invert else self.fn(batch)

    def inv(self, batch: Any) -> Any:
        return self.fn(batch) if self.invert else batch

    def __repr__(self) -> str:
        return f"{getattr(self.fn, '__name__', self.fn)}{' (on writing)' if self.invert else ''}"


class InvertedTransform(Transform):
    """A transform the other way round: `inv` on reading, `forward` on writing."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def forward(self, batch: Any) -> Any:
        return self.transform.inv(batch)

    def inv(self, batch: Any) -> Any:
        return self.transform.forward(batch)

    def __repr__(self) -> str:
        return f"inverted {self.transform}"


def as_transform(transform: Any, invert: bool = False) -> Transform:
    """A Transform from what a user gave.

    Raises:
        TypeError: it is not callable.
    """
    if isinstance(transform, Transform):
        return InvertedTransform(transform) if invert else transform
    if callable(transform):
        return CallableTransform(transform, invert)
    raise TypeError(f"a transform is a Transform or a callable, got a {type(transform).__name__}")
