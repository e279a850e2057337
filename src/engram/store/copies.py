"""What pickles and copies of an object hold."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

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


class CopyForm(NamedTuple):
    """What copies of an object are made of.

    Attributes:
        held_still: a block in which no other thread changes the object.
        parts: inside that block, a function that makes a copy, and its arguments.
        is_pickled: whether pickles have these parts; else they have the object's `__getstate__`, as it names a file, or
            may be any object.
        copied: inside that block, from the memo of `copy.deepcopy`, a deep copy. None: it is made of copies of `parts`.
        check_sending: raises an error where the object must not be sent to another process.
    """

    held_still: Callable[[], AbstractContextManager[Any]]
    parts: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    is_pickled: bool = True
    copied: Callable[[dict[int, Any]], Any] | None = None
    check_sending: Callable[[], None] = lambda: None


class MadeFromParts:
    """An object that copies make anew from copies of its parts; to other processes it is sent by its `__getstate__`."""

    @abstractmethod
    def _copy_form(self) -> CopyForm:
        """What copies are made of."""

    def _check_sending(self) -> None:
        self._copy_form().check_sending()

    def __reduce_ex__(self, protocol: Any) -> Any:
        form = self._copy_form()
        if is_passing_fds():
            form.check_sending()
        if is_passing_fds() or not form.is_pickled:
            return super().__reduce_ex__(protocol)
        with form.held_still():
            return form.parts()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        form = self._copy_form()
        with form.held_still():
            if form.copied is not None:
                return form.copied(memo)
            make, parts = form.parts()
            memo[id(self)] = twin = make(*copy.deepcopy(parts, memo))
        return twin
