"""Figures with names, which are read as attributes, as a tuple or as a mapping."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, ValuesView
from typing import Any


class ReadAsMapping:
    """The base of a NamedTuple that is also read as a mapping: `dict(figures)`, `figures["rows"]`, `"rows" in figures`.

    In a `for` loop, with numbers between brackets and unpacked it stays a tuple.
    """

    def _asdict(self) -> dict[str, Any]:
        """By name, as every NamedTuple has it."""
        return super()._asdict()  # type: ignore[misc,no-any-return]

    def by_name(self) -> dict[str, Any]:
        """What the mapping has."""
        return self._asdict()

    def keys(self) -> KeysView[str]:
        """The names, in their order."""
        return self.by_name().keys()

    def values(self) -> ValuesView[Any]:
        """The values, in the order of their names."""
        return self.by_name().values()

    def items(self) -> ItemsView[str, Any]:
        """Each name with its value."""
        return self.by_name().items()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a name; the default where there is no such name."""
        return self.by_name().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)  # type: ignore[misc]  # of the tuple
        mapping = self.by_name()
        if key not in mapping:
            raise KeyError(f"there is no {key!r}, but {', '.join(mapping)}")
        return mapping[key]

    def __contains__(self, key: object) -> bool:
        return key in self.by_name() if isinstance(key, str) else super().__contains__(key)  # type: ignore[misc]
