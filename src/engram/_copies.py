"""What pickles and copies of an object hold, and how it is sent to other processes."""

from __future__ import annotations

import copy
import functools
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import reduction
from typing import Any, ClassVar, NamedTuple


class Computed(NamedTuple):
    """What pickles and copies of an object hold instead of an attribute: what a function of the object returns."""

    of: Callable[[Any], Any]


#: In place of an attribute that pickles and copies do not have.
LEFT_OUT = object()


class PartlyCopied:
    """An object of which some attributes are not copied: locks, caches, what it knows of one store.

    Example:
        >>> import copy
        >>> class Counter(PartlyCopied):
        ...     _copied_as = {"cache": None, "names": Computed(lambda counter: list(counter.names))}
        ...     def __init__(self):
        ...         self.n, self.cache, self.names = 3, {"seen": 3}, ["a"]
        >>> vars(copy.copy(Counter()))
        {'n': 3, 'cache': None, 'names': ['a']}
    """

    #: These attributes, where an object has them, and what pickles and copies hold instead: a value, a `Computed`
    #: or nothing (`LEFT_OUT`).
    _copied_as: ClassVar[Mapping[str, Any]] = {}

    def _complete_copy(self) -> None:
        """Makes what pickles and copies lack; called with all attributes that they hold."""

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self)}
        for name, held in self._copied_as.items():
            if held is LEFT_OUT:
                state.pop(name, None)
            elif name in state:
                state[name] = held.of(self) if type(held) is Computed else held
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._complete_copy()


class MadeAnew:
    """An object that pickles and copies make anew, from values that can be pickled or sent to another process."""

    __slots__ = ()

    @abstractmethod
    def _made_from(self) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """A function that makes it anew, and its arguments; None: by its `__getstate__`, as other objects."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = self._made_from()
        return super().__reduce_ex__(protocol) if made is None else made


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
        is_sent: whether other processes get these parts, too; else they get the object's `__getstate__`.
    """

    held_still: Callable[[], AbstractContextManager[Any]]
    parts: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    is_pickled: bool = True
    copied: Callable[[dict[int, Any]], Any] | None = None
    check_sending: Callable[[], None] = lambda: None
    is_sent: bool = False


class MadeFromParts(MadeAnew):
    """An object that copies make anew from copies of its parts; to other processes it is sent by its `__getstate__`."""

    @abstractmethod
    def _copy_form(self) -> CopyForm:
        """What copies are made of."""

    def _made_from(self) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        form = self._copy_form()
        if is_passing_fds():
            form.check_sending()
        if not (form.is_sent if is_passing_fds() else form.is_pickled):
            return None
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


# ---- to other processes ----
class _Passing(threading.local):
    fds: list[int] | None = None  # the descriptors that travel with what is being pickled or unpickled


_passing = _Passing()


@contextmanager
def passing_fds(descriptors: list[int]) -> Iterator[list[int]]:
    """A block for a channel that sends descriptors itself: pickling in it appends to the list, unpickling reads it."""
    before = _passing.fds
    _passing.fds = descriptors
    try:
        yield descriptors
    finally:
        _passing.fds = before


_checks: dict[type, Callable[[Any], None]] = {}


def pickle_by_state(cls: type, check: Callable[[Any], None]) -> None:
    """Sends objects of a class to other processes by their `__getstate__`, whatever `pickle` makes of them.

    Args:
        check: raises an error for an object that must not be sent.
    """
    _checks[cls] = check
    reduction.ForkingPickler.register(cls, functools.partial(_reduce_by_state, check))


def _reduce_by_state(check: Callable[[Any], None], part: Any) -> Any:
    check(part)
    return object.__reduce_ex__(part, 4)


class SentByState:
    """Objects that are sent to other processes by their `__getstate__`, whatever `pickle` makes of them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        pickle_by_state(cls, cls._check_sending)

    def _check_sending(self) -> None:
        """RuntimeError where it must not be sent to another process, alone or in a buffer."""


def refuse_what_stays(part: Any) -> None:
    """The check of its class that `pickle_by_state` was given: RuntimeError where a part of a buffer must stay here."""
    _checks[type(part)](part)


def is_passing_fds() -> bool:
    """Whether this thread pickles or unpickles inside `passing_fds`."""
    return _passing.fds is not None


class PassedFd:
    """A descriptor by its position in the list of `passing_fds`."""

    def __init__(self, position: int) -> None:
        self._position = position

    def detach(self) -> int:
        assert _passing.fds is not None
        return os.dup(_passing.fds[self._position])


def share_fd(fd: int) -> Any:
    """An object that gives another process the same file: its `detach()` there is a descriptor.

    It travels through `multiprocessing`'s own channels, or in a `passing_fds` block.
    """
    fds = _passing.fds
    if fds is None:
        return reduction.DupFd(fd)
    fds.append(fd)
    return PassedFd(len(fds) - 1)
