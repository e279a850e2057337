"""How a buffer is saved and loaded: a load is one step for everybody else, and none at all where a part refuses."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from engram import _forms as forms
from engram._native import PrioritySnapshot
from engram._system import fork_registry, notice_fork
from engram._text import log
from engram.checkpoint.foreign import Part, Receiver, open_saved
from engram.checkpoint.snapshot import PART, as_damage, save_snapshot
from engram.checkpoint.writer import SnapshotWriter
from engram.data.replay_buffers.state.parts import SavedPart, logging_errors
from engram.data.replay_buffers.state.plans import RowsPlan, SavableStorage
from engram.errors import CheckpointError, CheckpointMisfitError, differences_of

Malformed = Callable[[str], Exception]


class SavedBuffer(NamedTuple):
    """A buffer, as it is saved and loaded. The caller holds it still.

    Attributes:
        parts: by the names that their states have: sampler, writer, transform, generator; loaded in this order.
        index_key: the key under which its writer stores each row's index; None: it stores none.
        description: makes what a checkpoint says of it, for who makes it anew (`engram.load`), of the user's sampler.
    """

    storage: SavableStorage
    parts: dict[str, SavedPart]
    index_key: str | None
    batch_size: int | None
    description: Callable[[Any], dict[str, Any]]

    def states(self) -> dict[str, Any]:
        """The state of each part beside the rows."""
        return {name: part.state(self.storage) for name, part in self.parts.items()}

    def components(self, frozen: bool = False) -> dict[str, Any]:
        """What a checkpoint has beside the rows; `frozen`: of this moment, as `SavedPart.frozen_state`."""
        description = self.description(self.parts["sampler"].given)
        saved: dict[str, Any] = {"buffer": copy.deepcopy(description) if frozen else description}
        for name, part in self.parts.items():
            state = part.frozen_state(self.storage) if frozen else part.state(self.storage)
            saved[name] = {"state": state} if part.kind is None else {"kind": part.kind, "state": state}
        return saved

    def kinds(self) -> dict[str, str]:
        return {f"{name}_kind": part.kind for name, part in self.parts.items() if part.kind is not None}

    def load_states(self, states: dict[str, Any]) -> None:
        """Gives the parts states that fit them."""
        for name, part in self.parts.items():
            if name in states:
                part.load(states[name]["state"])

    def connect(self, rows_too: bool) -> None:
        """After a load: brings the states of the parts and the rows together."""
        for part in self.parts.values():
            if rows_too:
                part.rebase(self.storage)
            part.sync(self.storage)


class BufferLoad:
    """A load of saved states into a buffer.

    The caller holds the buffer still, and its storage alone.

    Args:
        states: by the names of the parts; those that it does not have stay as they are.
        malformed: makes the error for a state that no part of its kind can have written.

    Attributes:
        differences: what of the states does not fit the parts; with any, it must not be run.
        misfits: the names of the parts whose states do not fit.
    """

    def __init__(self, buffer: SavedBuffer, states: dict[str, Any], malformed: Malformed) -> None:
        self._buffer, self._states, self._malformed = buffer, states, malformed
        self._each = [(name, part) for name, part in buffer.parts.items() if name in states]
        found = {name: self._differences(name, part) for name, part in self._each}
        self.differences = [what for each in found.values() for what in each]
        self.misfits = {name for name, each in found.items() if each}

    def _differences(self, name: str, part: SavedPart) -> list[str]:
        with as_damage(self._malformed, "this buffer", part.damage):
            saved = self._states[name]
            forms.check(PART, saved, f"the {name}")
            kind = saved.get("kind")
            if kind != part.kind and part.kind is not None:
                return [f"the {name} is a {part.kind} here, a {kind} there"]
            return part.differences(saved["state"])

    def check(self) -> None:
        """An error where a state cannot be taken over here, before anything is changed for it."""
        for name, part in self._each:
            with as_damage(self._malformed, "this buffer", part.damage):
                part.check(self._states[name]["state"], self._buffer.storage)

    def run(self, rows: RowsPlan | None) -> None:
        """Commits it, with its rows where there is a plan for them; after an error the buffer is as it was.

        What a user's own part can refuse comes before the rows that it would destroy.
        """
        storage = self._buffer.storage
        with storage.mutex if rows is None else storage.access.replacing("loads"):
            undo = _Undo(self._buffer, rows)
            try:
                if rows is not None and not rows.replaces_rows:
                    rows.commit()
                    undo.has_rows = True
                    self.check()  # now that there is something to compare it with
                self._buffer.load_states(self._states)
                if rows is not None and rows.replaces_rows:
                    rows.commit()
                    undo.has_rows = True
                self._buffer.connect(rows_too=rows is not None)
            except BaseException:
                undo.run()
                raise


class _Undo:
    """The way back of a load that failed, to what the buffer is when this is made."""

    def __init__(self, buffer: SavedBuffer, rows: RowsPlan | None) -> None:
        self._buffer, self._rows = buffer, rows
        self.has_rows = False  # whether other rows have taken the place of those of before
        self._incarnations = None if rows is None else rows.incarnations()
        self._parts = [part.restore_point() for part in buffer.parts.values()]
        # With rows that come back under another incarnation goes a sampler that is told so.
        goes_back = rows is not None and rows.undo is not None
        self._sampler = copy.deepcopy(buffer.parts["sampler"].part.state_dict()) if goes_back else None

    def run(self) -> None:
        storage, sampler, rows = self._buffer.storage, self._buffer.parts["sampler"], self._rows
        touched = rows is not None and (self.has_rows or rows.incarnations() != self._incarnations)
        if rows is not None and touched and rows.undo is None:
            if not self.has_rows:  # they went in the middle of being replaced
                for part in self._buffer.parts.values():
                    part.empty()
            return  # else: what was loaded stays, which is whole
        for undo in self._parts:
            undo()
        if rows is None or rows.undo is None or not touched:
            return
        with logging_errors(storage):
            rows.undo()
        with logging_errors(sampler.given):
            sampler.load(self._sampler)
            sampler.rebase(storage)


class SaveHandle:
    """A save in the background, as `dumps(path, blocking=False)` returns it.

    The interpreter waits for it before it ends.

    Example:
        >>> import tempfile
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(5))
        >>> with tempfile.TemporaryDirectory() as path:
        ...     handle = rb.dumps(path, blocking=False)
        ...     _ = rb.extend(torch.arange(5, 10))
        ...     handle.result(), handle.done(), handle.progress, handle.rows_left_out
        ('g-000001', True, 1.0, 0)
    """

    def __init__(self, work: Callable[[SaveHandle], str], source: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._source = source
        self._finish = finish
        self._writer: SnapshotWriter | None = None
        self._name: str | None = None
        self._error: BaseException | None = None
        self._left_out = 0
        self._begun, self._ended = threading.Event(), threading.Event()
        _live.add(self)
        self._thread = threading.Thread(target=self._run, name="engram-save")
        self._thread.start()

    def await_begin(self) -> None:
        """Waits until nobody else can save there; the error for which it cannot begin is raised here."""
        self._begun.wait()
        if self._writer is None:
            assert self._error is not None
            raise self._error

    def began(self, writer: SnapshotWriter) -> None:
        """Called by the work when nobody else saves at the path."""
        self._writer = writer
        self._begun.set()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        notice_fork()  # in a child it has no thread
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> str:
        """Waits for the end, at most `timeout` seconds; the name of the snapshot.

        Raises:
            TimeoutError: it has not ended yet.
            CheckpointError: it failed; what was saved there before is untouched.
        """
        notice_fork()
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save has not ended after {timeout} seconds ({self.progress:.0%} is written)")
        if self._error is not None:
            raise self._error
        assert self._name is not None
        return self._name

    @property
    def progress(self) -> float:
        """The part that is written, 0 to 1; 1 when the snapshot is in force."""
        if self._name is not None:
            return 1.0
        return 0.0 if self._writer is None else min(0.99, self._writer.progress)

    @property
    def rows_left_out(self) -> int:
        """Rows, the oldest ones, that other processes overwrote before they were saved."""
        return self._left_out if self.done() else int(self._source.left_out)

    def after_fork(self) -> None:
        """In a child: the saving thread runs in the parent only, and nobody here learns how the save ends."""
        if not self._ended.is_set():
            self._ended = threading.Event()
            self._error = CheckpointError("this save is made by the process that this one was forked from")
            self._ended.set()

    def _run(self) -> None:
        try:
            self._name = self._work(self)
        except BaseException as error:
            self._error = error
            if self._writer is not None:  # else `await_begin` raises it
                log.error("a save in the background failed: %s", error)
        finally:
            self._begun.set()  # before `finish`, which may have to wait until whoever waits for this lets go
            try:
                self._left_out = int(self._source.left_out)
                self._finish()
            finally:
                self._ended.set()

    def __repr__(self) -> str:
        state = f"{self.progress:.0%}" if not self.done() else "failed" if self._error else self._name
        return f"{type(self).__name__}({state})"


_live: weakref.WeakSet[SaveHandle] = fork_registry(SaveHandle.after_fork)


PARTS = ("storage", "sampler", "writer", "generator")


def _copied(cls: Any, attributes: dict[str, Any], states: dict[str, Any]) -> Any:
    """A buffer of copied parts, brought to the states that these had. Pickles name this function."""
    buffer = cls.__new__(cls)
    buffer.__setstate__(attributes)
    made = buffer._saved_form
    made.load_states({name: {"state": state} for name, state in states.items()})
    made.connect(rows_too=True)
    return buffer


def save_buffer(buffer: SavedBuffer, path: Path, keep_last: int) -> str:
    """Saves every part as one snapshot, and returns its name."""
    checkpointer = buffer.storage.checkpointer
    source = checkpointer.source(buffer.storage.saved_form)
    return save_snapshot(path, buffer.components(), (checkpointer, source), keep_last=keep_last)


def save_in_background(buffer: SavedBuffer, path: Path, keep_last: int) -> SaveHandle:
    """The same in a thread, of what the parts are now. The caller holds the buffer still until this returns.

    `SaveHandle.await_begin` says whether it can be saved there.
    """
    storage, checkpointer = buffer.storage, buffer.storage.checkpointer
    rows = checkpointer.source(storage.saved_form, background=True)
    try:
        components = [buffer.components(frozen=True)]
    except BaseException:
        rows.close()
        raise

    def work(handle: SaveHandle) -> str:
        states = _read_snapshots(components.pop())  # which nobody has any more then: nothing is kept for them
        return save_snapshot(path, states, (checkpointer, rows), keep_last=keep_last, began=handle.began)

    def finish() -> None:
        with storage.mutex:
            rows.close()

    return SaveHandle(work, rows, finish)


def _read_snapshots(state: Any) -> Any:
    """A frozen state with tensors in place of its snapshots."""
    if isinstance(state, PrioritySnapshot):
        return state.read()
    if type(state) is dict:
        return {key: _read_snapshots(value) for key, value in state.items()}
    return [_read_snapshots(value) for value in state] if type(state) is list else state


def load_buffer(
    buffer: SavedBuffer,
    path: Path,
    snapshot: str | None,
    parts: tuple[str, ...],
    select: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> None:
    """Loads parts of a buffer, after a check that all of them fit.

    `select` returns what is to be loaded of the saved states.
    """
    unknown = [p for p in parts if p not in PARTS]
    if unknown:
        raise ValueError(f"parts are {PARTS}, got {unknown}")
    storage, with_rows = buffer.storage, "storage" in parts
    form = storage.saved_form
    sink = form.sink()
    with open_saved(path, snapshot, _receiver(buffer, sink)) as saved:
        states, differences = saved.part_states(parts)
        load = BufferLoad(buffer, select(states), saved.malformed)
        differences += load.differences
        if not differences:
            load.check()
        misfits = load.misfits
        if with_rows and (of_rows := _differences_in(lambda: saved.check_storage(storage.checkpointer, sink))):
            differences += of_rows
            misfits = {*misfits, "storage"}
        if differences:
            advice = _advice([part for part in parts if part not in misfits])
            raise CheckpointMisfitError(f"{path} does not fit this buffer", differences, advice)
        with storage.access.exclusive("loads") if with_rows else storage.mutex:
            load.run(form.plan_load(saved) if with_rows else None)


def _receiver(buffer: SavedBuffer, sink: Any) -> Receiver:
    """The buffer, as another library's directory is read for it."""

    def part(name: str) -> Part:
        saved = buffer.parts[name]
        return Part(tuple(kind.__name__ for kind in type(saved.given).__mro__), saved.state(buffer.storage))

    return Receiver(sink, buffer.index_key, part)


def _differences_in(check: Callable[[], None]) -> list[str]:
    """What a check of a state lists as not fitting."""
    try:
        check()
    except ValueError as error:
        return list(differences_of(error))
    return []


def _advice(fitting: list[str]) -> str:
    """How to load the parts that fit, where the rows are one of them."""
    if "storage" not in fitting:
        return ""
    return f"To load what fits, and leave the rest as it is here: loads(path, parts={tuple(fitting)})"


def buffer_state(buffer: SavedBuffer) -> dict[str, Any]:
    """Everything, in memory; parts of a user's own may hand out tensors that they go on with, so copies of them."""
    states = {**buffer.kinds(), **copy.deepcopy(buffer.states()), "_batch_size": buffer.batch_size}
    return {"storage": buffer.storage.state_dict(), **states}


_STATE = forms.record({}, {"_batch_size": forms.nullable(forms.integer(1))})


def load_buffer_state(buffer: SavedBuffer, state: dict[str, Any]) -> None:
    """Loads what `buffer_state` gave."""
    with as_damage(_misfit, "this buffer"):
        forms.check(_STATE, state, "the state of the buffer")
    missing = [f"it has no {part}" for part in (*PARTS, "transform") if part not in state]
    if missing:
        raise CheckpointMisfitError("the state does not fit this buffer", missing)
    states = {n: {"kind": state.get(f"{n}_kind"), "state": copy.deepcopy(state[n])} for n in buffer.parts}
    rows = buffer.storage.saved_form
    load = BufferLoad(buffer, states, _misfit)
    differences = load.differences + _differences_in(lambda: rows.check(state["storage"]))
    if differences:
        raise CheckpointMisfitError("the state does not fit this buffer", differences)
    load.check()
    with buffer.storage.access.exclusive("load_state_dict"):
        fill = functools.partial(buffer.storage.load_state_dict, state["storage"])
        load.run(RowsPlan(fill, rows.restore_point(), not rows.is_empty(), rows.incarnations))


def _misfit(reason: str) -> CheckpointMisfitError:
    return CheckpointMisfitError("the state does not fit this buffer", [reason])
