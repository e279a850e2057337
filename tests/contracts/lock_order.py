"""A checker of the order in which threads take locks: that of the table "Locks" in docs/architecture.md.

While it is on, each lock that a module of engram makes is wrapped. It has the name of the attribute that it is assigned
to (`Storage.mutex`), so the source names no locks. Where a thread waits for a lock while it holds one that the table
does not allow to be held then, or takes two locks of one name in both orders, both stacks are reported; nothing has to
deadlock for that. An acquisition that does not wait is allowed anywhere.

Forked children are watched, too; other processes are not, and neither are native mutexes and files' locks.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import engram

SOURCE = Path(engram.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
#: What makes a lock that is watched; an event guards nothing.
FACTORIES = ("Lock", "RLock", "Condition")

_Stack = list[tuple[CodeType, int]]


# ---- the table ----
@dataclass(frozen=True)
class Row:
    """A lock, or several that are one lock once an object is whole."""

    names: tuple[str, ...]
    file: str  #: that makes the first of them
    takes: str  #: "below", "nothing", or names in backticks


def table(page: str) -> list[Row]:
    """The rows of the table of threads' locks, the outermost first."""
    lines = page.split("\n## Locks\n")[1].split("\n## ")[0].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| lock |")) + 2
    rows = []
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start:]):
        lock, _, _, takes, _ = (cell.strip() for cell in line.strip("|").split("|"))
        names, file = lock.split(" in ")
        rows.append(Row(tuple(_quoted(names)), file.strip("`"), takes))
    return rows


def _quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


class Order:
    """Which lock may be taken while another one is held.

    >>> outer, middle = Row(("outer",), "a.py", "`inner`"), Row(("middle",), "a.py", "below")
    >>> order = Order([outer, middle, Row(("inner",), "a.py", "nothing")])
    >>> order.allows("outer", "inner"), order.allows("outer", "middle"), order.allows("inner", "middle")
    (True, False, False)
    """

    def __init__(self, rows: list[Row]) -> None:
        self._ranks = {name: rank for rank, row in enumerate(rows) for name in row.names}
        self._takes = {name: row.takes for row in rows for name in row.names}

    def allows(self, held: str, taken: str) -> bool:
        """Whether `taken` may be waited for by a thread that holds `held`."""
        if held not in self._ranks or taken not in self._ranks:
            return False
        takes = self._takes[held]
        named = takes == "below" or taken in _quoted(takes)
        return named and self._ranks[held] < self._ranks[taken]

    def are_equal(self, held: str, taken: str) -> bool:
        """Whether both are of one row: then two of them are taken in one order only, as it shows."""
        return self._ranks.get(held, -1) == self._ranks.get(taken, -2)


# ---- names ----
@functools.cache
def locks_of(file: Path) -> dict[int, str]:
    """By line: the attribute or variable that a lock which is made there is assigned to."""
    found: dict[int, str] = {}
    text = file.read_text()
    if any(factory in text for factory in FACTORIES):
        _find(ast.parse(text), "", {}, found)
    return found


def _find(node: ast.AST, cls: str, annotations: dict[str, str], found: dict[int, str]) -> None:
    if isinstance(node, ast.ClassDef):
        cls = node.name
    elif isinstance(node, ast.FunctionDef):
        arguments = node.args.args
        annotations = {a.arg: ast.unparse(a.annotation) for a in arguments if a.annotation is not None}
        if cls and arguments:
            annotations[arguments[0].arg] = cls
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            for place, value in _pairs(target, node.value):
                if isinstance(value, ast.Call) and ast.unparse(value.func) in [f"threading.{f}" for f in FACTORIES]:
                    found[value.lineno] = _name(place, annotations)
    for child in ast.iter_child_nodes(node):
        _find(child, cls, annotations, found)


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _name(place: ast.expr, annotations: dict[str, str]) -> str:
    if isinstance(place, ast.Attribute) and isinstance(place.value, ast.Name):
        return f"{annotations[place.value.id]}.{place.attr}"
    return ast.unparse(place)


# ---- watching ----
@dataclass(eq=False)
class _Held:
    lock: WatchedLock
    stack: _Stack
    process: int
    depth: int = 1


class Watch:
    """What threads hold, and a report of each lock that was taken out of order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._local = threading.local()
        self._numbers = itertools.count()
        # Of locks of one row: those that were taken while it was held, and where that was first.
        self._after: dict[int, dict[int, str]] = {}
        self.seen: set[tuple[str, str]] = set()  #: (held, taken), of all threads of this process
        # Forked children write there, too.
        self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def close(self) -> None:
        self._file.close()

    def reports(self) -> str:
        """What was found, in this process and in forked children; each pair of places once."""
        self._file.seek(0)
        found = dict.fromkeys(filter(None, self._file.read().split("\0")))
        return "\n".join(found)

    def next_number(self) -> int:
        return next(self._numbers)

    def held(self) -> list[_Held]:
        """What the calling thread holds."""
        return list(self._held)

    @property
    def _held(self) -> list[_Held]:
        try:
            held: list[_Held] = self._local.held
        except AttributeError:
            held = self._local.held = []
        return held

    def before(self, lock: WatchedLock, waits: bool) -> None:
        """Compares a lock that a thread is about to take with what it holds."""
        process = os.getpid()
        others = [held for held in self._held if held.process == process]  # a forked child has locks of its own
        if not waits or any(held.lock is lock for held in others):
            return
        for held in others:
            self.seen.add((held.lock.name, lock.name))
            if held in lock.made_under:  # in a copy: no other thread has it yet
                continue
            if self._order.are_equal(held.lock.name, lock.name):
                after = self._after.setdefault(held.lock.number, {})
                if lock.number not in after:
                    after[lock.number] = _both(held, lock)
                    if other := self._way(lock.number, held.lock.number):
                        self._report(held, lock, "two of them are taken in both orders", other)
            elif not self._order.allows(held.lock.name, lock.name):
                self._report(held, lock, "the table does not allow this order")

    def _way(self, start: int, end: int) -> list[str]:
        """How the lock `end` was taken after `start`, or after one that was taken after it; empty: it was not."""
        ways: dict[int, list[str]] = {start: []}
        waiting = [start]
        while waiting:
            before = waiting.pop()
            for number, stacks in list(self._after.get(before, {}).items()):
                if number not in ways:
                    ways[number] = [*ways[before], stacks]
                    waiting.append(number)
        return ways.get(end, [])

    def after(self, lock: WatchedLock, n: int = 1) -> None:
        """A thread has taken a lock, or has it back n times over."""
        process = os.getpid()
        for held in self._held:
            if held.lock is lock and held.process == process:
                held.depth += n
                return
        self._held.append(_Held(lock, _stack(), process, n))

    def released(self, lock: WatchedLock, wholly: bool = False) -> int:
        """A thread has given a lock back, once or wholly; returns how often it had it."""
        for i, held in reversed(list(enumerate(self._held))):
            if held.lock is lock:
                depth = held.depth
                held.depth = 0 if wholly else depth - 1
                if not held.depth:
                    del self._held[i]
                return depth
        return 1  # another thread took it

    def _report(self, held: _Held, lock: WatchedLock, why: str, others: Sequence[str] = ()) -> None:
        report = f"{lock.name} is taken while {held.lock.name} is held: {why} (docs/architecture.md, Locks)\n"
        report += "  before:\n".join([_both(held, lock), *others])
        print(report, file=sys.__stderr__)  # at once: the thread may now wait for ever
        os.write(self._file.fileno(), f"{report}\0".encode())


def _stack() -> _Stack:
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < 30:
        if frame.f_code.co_filename != __file__:
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


def _both(held: _Held, lock: WatchedLock) -> str:
    return (
        f"  {held.lock.name} ({held.lock.number}) was taken here:\n{_shown(held.stack)}"
        f"  {lock.name} ({lock.number}) is taken here:\n{_shown(_stack())}"
    )


def _shown(stack: _Stack) -> str:
    return "".join(f"    {code.co_filename}:{line} {code.co_name}\n" for code, line in stack)


class WatchedLock:
    """A lock of a module of engram, told to a `Watch`."""

    def __init__(self, lock: Any, name: str, watch: Watch) -> None:
        self._lock, self.name, self._watch = lock, name, watch
        self.number, self.made_under = watch.next_number(), watch.held()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._watch.before(self, blocking)
        taken: bool = self._lock.acquire(blocking, timeout)
        if taken:
            self._watch.after(self)
        return taken

    def release(self) -> None:
        self._lock.release()
        self._watch.released(self)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # What a condition asks of its RLock.
    def _is_owned(self) -> bool:
        owned: bool = self._lock._is_owned()
        return owned

    def _release_save(self) -> tuple[Any, int]:
        return self._lock._release_save(), self._watch.released(self, wholly=True)

    def _acquire_restore(self, state: tuple[Any, int]) -> None:
        self._watch.before(self, True)
        self._lock._acquire_restore(state[0])
        self._watch.after(self, state[1])


@contextlib.contextmanager
def checking() -> Iterator[Watch]:
    """A block after which an AssertionError says where locks were taken out of the order of docs/architecture.md."""
    with watching() as watch:
        yield watch
        reports = watch.reports()
        assert not reports, reports


@contextlib.contextmanager
def watching(order: Order | None = None) -> Iterator[Watch]:
    """A block in which locks that modules of engram make, and those of the modules themselves, are watched."""
    watch = Watch(Order(table(PAGE.read_text())) if order is None else order)
    made = {name: getattr(threading, name) for name in FACTORIES}

    def make(factory: str, *args: Any) -> Any:
        caller = sys._getframe(2)
        name = _name_of(Path(caller.f_code.co_filename), caller.f_lineno)
        if name is None:
            return made[factory](*args)
        if factory == "Condition":
            return made[factory](WatchedLock(made["RLock"](), name, watch))
        return WatchedLock(made[factory](), name, watch)

    with contextlib.ExitStack() as undo:
        undo.callback(watch.close)
        for module, attribute, lock in _locks_of_modules(type(made["RLock"]())):
            undo.callback(setattr, module, attribute, lock)
        wrapped: dict[int, WatchedLock] = {}
        for module, attribute, lock in _locks_of_modules(type(made["RLock"]())):
            setattr(module, attribute, wrapped.setdefault(id(lock), WatchedLock(lock, attribute, watch)))
        for name, factory in made.items():
            undo.callback(setattr, threading, name, factory)
            setattr(threading, name, lambda *args, factory=name: make(factory, *args))
        yield watch


def _name_of(file: Path, line: int) -> str | None:
    return locks_of(file).get(line) if file.is_relative_to(SOURCE) else None


def _locks_of_modules(kind: type) -> Iterator[tuple[Any, str, Any]]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "engram":
            yield from ((module, key, value) for key, value in list(vars(module).items()) if isinstance(value, kind))
