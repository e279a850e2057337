"""Several transforms, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engram.transforms.base import Transform, as_transform


class Compose(Transform):
    """Runs its transforms in order on reading, and in reverse order on writing.

    Example:
        >>> compose = Compose(lambda x: x + 1, lambda x: x * 2)
        >>> compose(3)
        8
    """

    def __init__(self, *transforms: Any) -> None:
        self.transforms = [as_transform(t) for t in transforms]

    def forward(self, batch: Any) -> Any:
        for transform in self.transforms:
            batch = transform.forward(batch)
        return batch

    def inv(self, batch: Any) -> Any:
        for transform in reversed(self.transforms):
            batch = transform.inv(batch)
        return batch

    def append(self, transform: Any, *, invert: bool = False) -> None:
        """Adds a transform at the end."""
        self.transforms.append(as_transform(transform, invert))

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Adds a transform before the one at `index`.

        Raises:
            IndexError: there is no such place.
        """
        n = len(self.transforms)
        if not -n <= index <= n:
            raise IndexError(f"there are {n} transforms; index must be -{n} to {n}, got {index}")
        self.transforms.insert(index, as_transform(transform, invert))

    def __len__(self) -> int:
        return len(self.transforms)

    def __getitem__(self, index: int) -> Transform:
        return self.transforms[index]

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"
