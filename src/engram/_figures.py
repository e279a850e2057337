"""Figures with names, which are read as attributes, as a tuple or as a mapping."""

from __future__ import annotations

from typing import Any, ClassVar


class ReadAsMapping:
    """The base of a NamedTuple that is also read as a mapping: `dict(figures)`, `figures["rows"]`, `"rows" in figures`.

    In a `for` loop, with numbers between brackets and unpacked it stays a tuple.
    """

    _fields: ClassVar[tuple[str, ...]]
    #: Properties that are read by name, too; those that are None are left out.
    _derived: ClassVar[tuple[str, ...]] = ()

    def keys(self) -> tuple[str, ...]:
        """The names, in their order."""
        return (*self._fields, *(name for name in self._derived if getattr(self, name) is not None))

    def values(self) -> tuple[Any, ...]:
        """The values, in the order of their names."""
        return tuple(getattr(self, name) for name in self.keys())

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Each name with its value."""
        return tuple(zip(self.keys(), self.values(), strict=True))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a name; the default where there is no such name."""
        return getattr(self, key) if key in self.keys() else default

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)  # type: ignore[misc]  # of the tuple
        if key not in self.keys():
            raise KeyError(f"there is no {key!r}, but {', '.join(self.keys())}")
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in self.keys() if isinstance(key, str) else super().__contains__(key)  # type: ignore[misc]
