"""How a buffer is saved and loaded: a load is one step for everybody else, and none at all where a part refuses."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from engram._arguments import BUILT_IN
from engram._system import fork_registry, notice_fork
from engram._text import log
from engram.checkpoint.foreign import Part, Receiver, open_saved
from engram.checkpoint.snapshot import as_damage, save_snapshot
from engram.checkpoint.writer import SnapshotWriter
from engram.data.replay_buffers.samplers.base import Sampler
from engram.data.replay_buffers.state.plans import RowsPlan
from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.storages.ensemble import StorageEnsemble
from engram.data.replay_buffers.writers.round_robin import Writer
from engram.errors import CheckpointError, CheckpointMisfitError, differences_of
from engram.transforms.compose import Compose

Malformed = Callable[[str], Exception]


class SavedBuffer(Protocol):
    """What saving and loading need of a buffer: its parts, and the states of those that it keeps to itself."""

    _sampler: Any  # a Sampler; ensembles and prioritised buffers know of more than its methods
    _writer: Writer
    _saved_generator: Any  # a SavedGenerator, or SavedGenerators

    @property
    def storage(self) -> Storage: ...

    @property
    def batch_size(self) -> int | None: ...

    @property
    def _saved_transform(self) -> Any: ...

    def _part_states(self) -> dict[str, Any]: ...

    def _description(self) -> dict[str, Any]: ...


class BufferLoad:
    """A load of saved states that fit a buffer, and of its rows where there is a plan for them.

    The caller holds the buffer still, and its storage alone. What a user's own part can refuse comes before the rows
    that it would destroy; an error makes the buffer again what it was when this was made.

    Args:
        malformed: makes the error for a state that turns out to be impossible when the rows are there.
    """

    def __init__(
        self, buffer: SavedBuffer, states: dict[str, Any], rows: RowsPlan | None, malformed: Malformed | None = None
    ) -> None:
        self._buffer, self._states, self._rows, self._malformed = buffer, states, rows, malformed
        self._has_rows = False  # whether other rows have taken the place of those of before
        self._incarnations = _incarnations(buffer.storage)
        self._generator = buffer._saved_generator.state()
        parts = [buffer._sampler, buffer._writer, buffer._saved_transform]
        self._undo_parts = [_undo_of(part) for whole in parts for part in _with_members(whole)]
        # With rows that come back under another incarnation goes a sampler that is told so.
        goes_back = rows is not None and rows.undo is not None
        self._sampler = copy.deepcopy(buffer._sampler.state_dict()) if goes_back else None

    def run(self) -> None:
        """Commits it; after an error the buffer is as it was."""
        storage = self._buffer.storage
        with storage.mutex if self._rows is None else storage._replacing("loads"):
            try:
                if self._rows is not None and not self._rows.replaces_rows:
                    self._rows.commit()
                    self._has_rows = True
                    # now that there is something to compare it with
                    check_sampler(self._buffer, self._states, self._malformed)
                _load_parts(self._buffer, self._states)
                if self._rows is not None and self._rows.replaces_rows:
                    self._rows.commit()
                    self._has_rows = True
                _connect(self._buffer, rows_too=self._rows is not None)
            except BaseException:
                self._undo()
                raise

    def _undo(self) -> None:
        storage, sampler, rows = self._buffer.storage, self._buffer._sampler, self._rows
        touched = rows is not None and (self._has_rows or _incarnations(storage) != self._incarnations)
        if rows is not None and touched and rows.undo is None:
            if not self._has_rows:
                self._empty_parts()
            return  # else: what was loaded stays, which is whole
        for undo in self._undo_parts:
            undo()
        self._buffer._saved_generator.load(self._generator)
        if rows is None or rows.undo is None or not touched:
            return
        with _logging_errors(storage):
            rows.undo()
        with _logging_errors(sampler):
            sampler.load_state_dict(self._sampler)
            storage._rebase_sampler(sampler)

    def _empty_parts(self) -> None:
        """The rows went in the middle of being replaced."""
        self._buffer._saved_transform.empty()
        self._buffer._sampler.empty()
        self._buffer._writer.empty()


def restore_copy(buffer: Any, states: dict[str, Any]) -> None:
    """Brings a new buffer, which has its rows already, to these states of its parts."""
    _load_parts(buffer, states)
    _connect(buffer, rows_too=True)


def _load_parts(buffer: Any, states: dict[str, Any]) -> None:
    for name, part in (("sampler", buffer._sampler), ("writer", buffer._writer)):
        if name in states:
            part.load_state_dict(states[name]["state"])
    if "transform" in states:
        _load_transforms(buffer._saved_transform, states["transform"]["state"])
    if "generator" in states:
        buffer._saved_generator.load(states["generator"]["state"])


def _load_transforms(transform: Compose, state: dict[str, Any] | None) -> None:
    """Loads what transforms had learnt and held back; where nothing was saved, they begin anew."""
    if state is None:
        transform.empty()
    else:
        transform.load_state_dict(state)


def _connect(buffer: Any, rows_too: bool) -> None:
    """Brings the states of the parts and the rows together."""
    storage, sampler = buffer.storage, buffer._sampler
    if rows_too:
        storage._rebase_sampler(sampler)
    sampler._sync(storage)


def _undo_of(part: Any) -> Callable[[], None]:
    """A function that puts a part back as it is now: its attributes, or what one of a user's own would save."""
    own = _given(part)
    if not _is_built_in(part) and hasattr(own, "state_dict") and hasattr(own, "load_state_dict"):
        return functools.partial(_load_again, part, copy.deepcopy(part.state_dict()))
    # Built-in parts never change the value of an attribute: they assign another one.
    return functools.partial(_set_attributes, own, dict(vars(own))) if hasattr(own, "__dict__") else _nothing


def _load_again(part: Any, state: Any) -> None:
    with _logging_errors(part):
        part.load_state_dict(state)


def _set_attributes(part: Any, before: dict[str, Any]) -> None:
    attributes = vars(part)
    attributes.update(before)
    for name in attributes.keys() - before.keys():
        del attributes[name]


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _logging_errors(part: Any) -> Iterator[None]:
    """Around a part's way back after an error, which is the one that is raised."""
    try:
        yield
    except Exception:
        kind = type(_given(part)).__name__
        log.exception("after a load that failed, a %s cannot go back to its state of before", kind)


def _incarnations(storage: Any) -> list[int | None]:
    """What changes when rows are replaced, of a storage or of each of an ensemble's."""
    members = storage.storages if isinstance(storage, StorageEnsemble) else [storage]
    return [None if one.lanes is None else one.lanes.store.incarnation for one in members]


def _with_members(part: Any) -> Iterator[Any]:
    """A sampler, writer or transform, and those that it consists of."""
    yield part
    if isinstance(part, Sampler | Writer):
        members: Any = part._members
    else:
        members = vars(part).get("transforms") if hasattr(part, "__dict__") else None
    for member in members if isinstance(members, list) else []:
        yield from _with_members(member)


def _given(part: Any) -> Any:
    """The object that the user gave, of which a sampler or a writer may be an adapter."""
    return part._given if isinstance(part, Sampler | Writer) else part


def _is_built_in(part: Any) -> bool:
    """Whether a part is of one of the library's own classes."""
    return bool(part._built_in if isinstance(part, Sampler | Writer) else type(part) in BUILT_IN)


def check_sampler(buffer: Any, states: dict[str, Any], malformed: Malformed | None) -> None:
    """An error where a sampler's state cannot be that of the rows."""
    storage, sampler = buffer.storage, buffer._sampler
    if "sampler" in states and (isinstance(storage, StorageEnsemble) or storage.lanes is not None):
        with damage_of(sampler, malformed):
            sampler._check_state(states["sampler"]["state"], storage)


def damage_of(part: Any, malformed: Malformed | None) -> contextlib.AbstractContextManager[None]:
    """Around a check of a part's state: an exception in a built-in part means that the state is damaged; one that a
    user's own part raises is its own error.
    """
    if malformed is None or not all(map(_is_built_in, _with_members(part) if part is not None else ())):
        return contextlib.nullcontext()
    return as_damage(malformed, "this buffer")


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
        self._begun.wait()
        if self._writer is None:  # it could not even begin: somebody else saves there, ...
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
            if self._writer is not None:  # else `dumps` itself raises it
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
    """A buffer of copied parts, brought to the states that these had."""
    buffer = cls.__new__(cls)
    buffer.__setstate__(attributes)
    restore_copy(buffer, {name: {"state": state} for name, state in states.items()})
    return buffer


def save_buffer(buffer: SavedBuffer, path: Path, keep_last: int) -> str:
    """Saves every part as one snapshot, and returns its name. The caller holds the buffer still."""
    components, storage = _components(buffer), buffer.storage
    source = storage.saved_form.source(background=False)
    return save_snapshot(path, components, (storage.checkpointer, source), keep_last=keep_last)


def save_in_background(buffer: SavedBuffer, path: Path, keep_last: int) -> SaveHandle:
    """The same in a thread, of what the parts are now. The caller holds the buffer still until this returns."""
    storage, checkpointer = buffer.storage, buffer.storage.checkpointer
    components = copy.deepcopy(_components(buffer))
    frozen = storage.saved_form.source(background=True)

    def work(handle: SaveHandle) -> str:
        return save_snapshot(path, components, (checkpointer, frozen), keep_last=keep_last, began=handle.began)

    def finish() -> None:
        with storage.mutex:
            frozen.close()

    return SaveHandle(work, frozen, finish)


def _components(buffer: SavedBuffer) -> dict[str, Any]:
    states = buffer._part_states()
    return {
        "buffer": buffer._description(),
        "sampler": {"kind": buffer._sampler._kind, "state": states["sampler"]},
        "writer": {"kind": buffer._writer._kind, "state": states["writer"]},
        "transform": {"state": states["transform"]},
        "generator": {"state": states["generator"]},
    }


def load_buffer(
    buffer: SavedBuffer,
    path: Path,
    snapshot: str | None,
    parts: tuple[str, ...],
    select: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> None:
    """Loads parts of a buffer, after a check that all of them fit. The caller holds the buffer still.

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
        states = select(states)
        differences += _differences(buffer, states, saved.malformed)
        if not differences:
            _check_states(buffer, states, saved.malformed)
        if with_rows:
            differences += _differences_in(lambda: saved.check_storage(storage.checkpointer, sink))
        if differences:
            raise CheckpointMisfitError(f"{path} does not fit this buffer", differences, _advice(states))
        with storage._exclusive("loads") if with_rows else storage.mutex:
            rows = form.plan_load(saved) if with_rows else None
            BufferLoad(buffer, states, rows, saved.malformed).run()


def _receiver(buffer: SavedBuffer, sink: Any) -> Receiver:
    """The buffer, as another library's directory is read for it."""
    parts: dict[str, Sampler | Writer] = {"sampler": buffer._sampler, "writer": buffer._writer}

    def part(name: str) -> Part:
        kinds = type(parts[name]._given).__mro__
        state = buffer._writer._state_beside_rows() if name == "writer" else parts[name].state_dict()
        return Part(tuple(kind.__name__ for kind in kinds), state)

    return Receiver(sink, buffer._writer.index_key, part)


def _differences_in(check: Callable[[], None]) -> list[str]:
    """What a check of a state lists as not fitting."""
    try:
        check()
    except ValueError as error:
        return list(differences_of(error))
    return []


def _advice(states: dict[str, Any]) -> str:
    return "What is not wanted from there can be left out: loads(path, parts=...)" if "sampler" in states else ""


def buffer_state(buffer: SavedBuffer) -> dict[str, Any]:
    """Everything, in memory; parts of a user's own may hand out tensors that they go on with, so copies of them."""
    states = {**_kinds(buffer), **copy.deepcopy(buffer._part_states()), "_batch_size": buffer.batch_size}
    return {"storage": buffer.storage.state_dict(), **states}


def load_buffer_state(buffer: SavedBuffer, state: dict[str, Any]) -> None:
    """Loads what `_state_of` gave."""
    missing = [f"it has no {part}" for part in (*PARTS, "transform") if part not in state]
    if missing:
        raise CheckpointMisfitError("the state does not fit this buffer", missing)
    states = {p: {"kind": state.get(f"{p}_kind"), "state": state[p]} for p in ("sampler", "writer", "generator")}
    states["transform"] = {"state": state["transform"]}
    rows = buffer.storage.saved_form
    differences = _differences(buffer, states) + _differences_in(lambda: rows.check(state["storage"]))
    if differences:
        raise CheckpointMisfitError("the state does not fit this buffer", differences)
    _check_states(buffer, states)
    states = copy.deepcopy(states)
    with buffer.storage._exclusive("load_state_dict"):
        fill = functools.partial(buffer.storage.load_state_dict, state["storage"])
        BufferLoad(buffer, states, RowsPlan(fill, rows.restore_point(), not rows.is_empty())).run()


def _kinds(buffer: SavedBuffer) -> dict[str, str]:
    return {"sampler_kind": buffer._sampler._kind, "writer_kind": buffer._writer._kind}


def _differences(buffer: SavedBuffer, states: dict[str, Any], malformed: Malformed | None = None) -> list[str]:
    """What of saved states does not fit the parts."""
    differences: list[str] = []
    parts: tuple[tuple[str, Sampler | Writer], ...] = (("sampler", buffer._sampler), ("writer", buffer._writer))
    for name, part in parts:
        if name not in states:
            continue
        with damage_of(part, malformed):
            kind, state = states[name]["kind"], states[name]["state"]
            if part._built_in and not isinstance(state, dict):
                raise ValueError(f"the state of the {name} is {state!r:.80}, no dict")
            if kind != part._kind:
                differences.append(f"the {name} is a {part._kind} here, a {kind} there")
            else:
                differences += part._differences(state)
    if "generator" in states:
        with damage_of(None, malformed):
            differences += buffer._saved_generator.differences(states["generator"]["state"])
    if "transform" in states:
        transform = buffer._saved_transform
        with damage_of(transform, malformed):
            state = states["transform"]["state"]
            differences += [] if state is None else transform.differences(state)
    return differences


def _check_states(buffer: SavedBuffer, states: dict[str, Any], malformed: Malformed | None = None) -> None:
    """An error where a state cannot be taken over here, before anything is changed for it."""
    with damage_of(None, malformed):
        if "generator" in states:
            buffer._saved_generator.check(states["generator"]["state"])
    check_sampler(buffer, states, malformed)
