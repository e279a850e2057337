"""What pickles and copies of an object hold."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from engram.store.files import is_passing_fds


class PartlyCopied:
    """An object of which some attributes are not copied: locks, caches, what it knows of one store.

    Example:
        >>> import copy
        >>> class Counter(PartlyCopied):
        ...     _copied_as = {"cache": None}
        ...     def __init__(self):
        ...         self.n, self.cache = 3, {"seen": 3}
        >>> vars(copy.copy(Counter()))
        {'n': 3, 'cache': None}
    """

    #: These attributes, and the values that they have in a copy.
    _copied_as: ClassVar[Mapping[str, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **self._copied_as}


class MadeAnew:
    """An object that pickles and copies make anew, from values that can be pickled or sent to another process."""

    __slots__ = ()

    @abstractmethod
    def _made_from(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A function that makes it anew, and its arguments."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._made_from()


class CopiedAsPlain(MadeAnew):
    """A dict or list of which pickles and copies are plain ones."""

    __slots__ = ()
    _plain: ClassVar[Callable[[Any], Any]]

    def _made_from(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        plain = type(self)._plain
        return plain, (plain(self),)


class MadeFromParts:
    """An object that copies make anew from copies of its parts; to other processes it is sent by its `__getstate__`."""

    @property
    @abstractmethod
    def _pickled_from_parts(self) -> bool:
        """Whether pickles have its parts; else its `__getstate__`, as it names a file, or as any object."""

    @abstractmethod
    def _held_still(self) -> AbstractContextManager[Any]:
        """A block in which no other thread changes it."""

    @abstractmethod
    def _copy_parts(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A function that makes a copy, and its arguments."""

    def _check_sending(self) -> None:
        """Called before it is sent to another process; an error where it must not be."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_passing_fds():
            self._check_sending()
        if is_passing_fds() or not self._pickled_from_parts:
            return super().__reduce_ex__(protocol)
        with self._held_still():
            return self._copy_parts()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._held_still():
            make, parts = self._copy_parts()
            memo[id(self)] = twin = make(*copy.deepcopy(parts, memo))
        return twin
