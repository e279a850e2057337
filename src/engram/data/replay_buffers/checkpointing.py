"""How a buffer takes a saved state over: in one step for everybody else, and not at all where a part refuses."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.checkpoint.snapshot import save_snapshot
from engram.checkpoint.writer import SnapshotWriter
from engram.errors import CheckpointMisfitError, differences_of
from engram.interop.open import Part, Receiver, as_damage, open_saved
from engram.transforms.compose import Compose

if TYPE_CHECKING:
    from engram.data.replay_buffers.buffer import SavedBuffer

log = logging.getLogger("engram")

Malformed = Callable[[str], Exception]


def adopt(
    buffer: Any, wanted: dict[str, Any], fill: Callable[[], None] | None, malformed: Malformed | None = None
) -> None:
    """Takes states over that were found to fit. The caller holds the buffer still, and its storage alone.

    What a user's own part can refuse comes before the rows that it would destroy; an error leaves the buffer as it was.

    Args:
        fill: replaces the rows of the storage; None: they stay.
        malformed: makes the error for a state that turns out to be impossible when the rows are there.
    """
    storage = buffer.storage
    before = _Before(buffer, rows_too=fill is not None)
    with storage.mutex if fill is None else storage._replacing("loads"):
        try:
            fills_first = fill is not None and storage._is_empty
            if fill is not None and fills_first:
                fill()
                before.filled = True
                check_sampler(buffer, wanted, malformed)  # now that there is something to compare it with
            _load_parts(buffer, wanted)
            if fill is not None and not fills_first:
                fill()
                before.filled = True
            _join(buffer, rows_too=fill is not None)
        except BaseException:
            before.bring_back()
            raise


def take_over(buffer: Any, wanted: dict[str, Any]) -> None:
    """Brings a new buffer, which has its rows already, to these states of its parts."""
    _load_parts(buffer, wanted)
    _join(buffer, rows_too=True)


def _load_parts(buffer: Any, wanted: dict[str, Any]) -> None:
    for name, part in (("sampler", buffer.sampler), ("writer", buffer.writer)):
        if name in wanted and hasattr(part, "load_state_dict"):
            part.load_state_dict(wanted[name]["state"])
    if "transform" in wanted:
        _load_transforms(buffer.saved_transform, wanted["transform"]["state"])
    if "generator" in wanted:
        buffer.restore_generator(wanted["generator"]["state"])


def _load_transforms(transform: Compose, state: dict[str, Any] | None) -> None:
    """What transforms had learnt and held back there; where nothing was saved, nothing of before is carried on."""
    if state is None:
        transform.empty()
    else:
        transform.load_state_dict(state)


def _join(buffer: Any, rows_too: bool) -> None:
    """Brings rows and parts together."""
    storage, sampler = buffer.storage, buffer.sampler
    if rows_too:
        storage._rebase_sampler(sampler)
    if hasattr(sampler, "follow"):
        sampler.follow(storage)


class _Before:
    """What a buffer was before a load."""

    def __init__(self, buffer: Any, rows_too: bool) -> None:
        self.filled = False  # set when other rows have taken the place of those of before
        self._buffer = buffer
        self._rows_too = rows_too
        self._incarnations = _incarnations(buffer.storage)
        self._generator = buffer.generator_state()
        parts = [buffer.sampler, buffer.writer, buffer.saved_transform]
        self._parts = [_Part(part) for whole in parts for part in _with_members(whole)]
        self._undo = buffer.storage._restore_point() if rows_too else None
        # With rows that come back under another incarnation goes a sampler that is told so.
        keeps_state = self._undo is not None and hasattr(buffer.sampler, "state_dict")
        self._sampler = copy.deepcopy(buffer.sampler.state_dict()) if keeps_state else None

    def bring_back(self) -> None:
        """Makes the buffer what it was."""
        storage, sampler = self._buffer.storage, self._buffer.sampler
        touched = self._rows_too and (self.filled or _incarnations(storage) != self._incarnations)
        if touched and self._undo is None:
            if not self.filled:
                self._forget()
            return  # else: what was loaded stays, which is whole
        for part in self._parts:
            part.bring_back()
        self._buffer.restore_generator(self._generator)
        if not touched or self._undo is None:
            return
        with _tried(storage):
            self._undo()
        if self._sampler is not None and hasattr(sampler, "load_state_dict"):
            with _tried(sampler):
                sampler.load_state_dict(self._sampler)
                storage._rebase_sampler(sampler)

    def _forget(self) -> None:
        """The rows went in the middle of being replaced."""
        self._buffer.saved_transform.empty()
        for part in (self._buffer.sampler, self._buffer.writer):
            if hasattr(part, "empty"):
                part.empty()


class _Part:
    """A part of a buffer as it is now: its attributes, and of one of a user's own also what it would save."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._attributes = dict(vars(part)) if hasattr(part, "__dict__") else {}
        both = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        self._saves = both and not _ours(part)
        self._state = copy.deepcopy(part.state_dict()) if self._saves else None

    def bring_back(self) -> None:
        if self._saves:
            with _tried(self._part):
                self._part.load_state_dict(self._state)
                return
        # Ours never change the value of an attribute: they give it another one.
        mine = vars(self._part) if self._attributes else {}
        mine.update(self._attributes)
        for name in mine.keys() - self._attributes.keys():
            del mine[name]


@contextlib.contextmanager
def _tried(part: Any) -> Iterator[None]:
    """A part's way back after an error, which is the one that is raised."""
    try:
        yield
    except Exception:
        log.exception("after a load that failed, a %s cannot go back to its state of before", type(part).__name__)


def _incarnations(storage: Any) -> list[int | None]:
    """What changes when rows are replaced, of a storage or of each of an ensemble's."""
    return [None if one.lanes is None else one.lanes.store.incarnation for one in storage._members()]


def _with_members(part: Any) -> Iterator[Any]:
    """A sampler, writer or transform, and those that it is made of."""
    yield part
    for name in ("samplers", "writers", "transforms"):
        members = vars(part).get(name) if hasattr(part, "__dict__") else None
        for member in members if isinstance(members, list) else []:
            yield from _with_members(member)


def _ours(part: Any) -> bool:
    return type(part).__module__.split(".")[0] == "engram"


def check_sampler(buffer: Any, wanted: dict[str, Any], malformed: Malformed | None) -> None:
    """An error where a sampler's state cannot be that of the rows."""
    storage, sampler = buffer.storage, buffer.sampler
    several = storage.lanes is None and hasattr(storage, "storages")
    if "sampler" in wanted and (several or storage.lanes is not None) and hasattr(sampler, "check_state"):
        with looking_at(sampler, malformed):
            sampler.check_state(wanted["sampler"]["state"], storage)


def looking_at(part: Any, malformed: Malformed | None) -> contextlib.AbstractContextManager[None]:
    """Around looks at a part's state: what ours run into there is damage, what a user's own raises is its own error."""
    if malformed is None or not all(map(_ours, _with_members(part) if part is not None else ())):
        return contextlib.nullcontext()
    return as_damage(malformed)


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
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> str:
        """Waits for the end, at most `timeout` seconds; the name of the snapshot.

        Raises:
            TimeoutError: it has not ended yet.
            CheckpointError: it failed; what was saved there before is untouched.
        """
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

    def _run(self) -> None:
        try:
            self._name = self._work(self)
        except BaseException as error:
            self._error = error
            if self._writer is not None:  # else `dumps` itself raises it
                log.error("a save in the background failed: %s", error)
        finally:
            self._begun.set()  # before `finish`, which may have to wait until whoever waits for this lets go
            self._left_out = int(self._source.left_out)
            self._finish()
            self._ended.set()

    def __repr__(self) -> str:
        state = f"{self.progress:.0%}" if not self.done() else "failed" if self._error else self._name
        return f"{type(self).__name__}({state})"


PARTS = ("storage", "sampler", "writer", "generator")


def _copied(cls: Any, attributes: dict[str, Any], states: dict[str, Any]) -> Any:
    """A buffer of copied parts, brought to the states that these had."""
    made = cls.__new__(cls)
    made.__setstate__(attributes)
    wanted: dict[str, Any] = {name: {"state": state} for name, state in states.items()}
    take_over(made, wanted)
    return made


def _save(buffer: SavedBuffer, path: Path, keep_last: int) -> None:
    """Saves every part as one snapshot. The caller holds the buffer still."""
    components, storage = _components(buffer), buffer.storage
    with storage._consistent_view() as source:
        save_snapshot(path, components, (storage.checkpointer, source), keep_last=keep_last)


def _save_in_background(buffer: SavedBuffer, path: Path, keep_last: int) -> SaveHandle:
    """The same in a thread, of what the parts are now. The caller holds the buffer still until this returns."""
    storage, checkpointer = buffer.storage, buffer.storage.checkpointer
    components = copy.deepcopy(_components(buffer))
    frozen = storage._snapshot_view()

    def work(handle: SaveHandle) -> str:
        return save_snapshot(path, components, (checkpointer, frozen), keep_last=keep_last, began=handle.began)

    def finish() -> None:
        with storage.mutex:
            frozen.close()

    return SaveHandle(work, frozen, finish)


def _components(buffer: SavedBuffer) -> dict[str, Any]:
    states = buffer.part_states()
    return {
        "sampler": {"kind": type(buffer.sampler).__name__, "state": states["sampler"]},
        "writer": {"kind": type(buffer.writer).__name__, "state": states["writer"]},
        "transform": {"state": states["transform"]},
        "generator": {"state": states["generator"]},
    }


def _load(buffer: SavedBuffer, path: Path, snapshot: str | None, parts: tuple[str, ...]) -> None:
    """Takes parts over, after everything that is wanted was found to fit. The caller holds the buffer still."""
    unknown = [p for p in parts if p not in PARTS]
    if unknown:
        raise ValueError(f"parts are {PARTS}, got {unknown}")
    storage, with_rows = buffer.storage, "storage" in parts
    with open_saved(path, snapshot, _receiver(buffer)) as saved:
        wanted, said = saved.part_states(parts)
        said += _differences(buffer, wanted, saved.malformed)
        if not said:
            _check_states(buffer, wanted, saved.malformed)
        if with_rows:
            said += _misfits(lambda: saved.check_storage(storage.checkpointer, storage._sink()))
        if said:
            raise CheckpointMisfitError(f"{path} does not fit this buffer", said, _advice(wanted))
        with storage._exclusive("loads") if with_rows else storage.mutex:
            fill = storage._prepare_load(saved) if with_rows else None
            adopt(buffer, wanted, fill, saved.malformed)


def _receiver(buffer: SavedBuffer) -> Receiver:
    """The buffer, as another library's directory is read for it."""

    def part(name: str) -> Part:
        owner = {"sampler": buffer.sampler, "writer": buffer.writer}[name]
        state = owner.state_dict() if hasattr(owner, "state_dict") else {}
        return Part(tuple(kind.__name__ for kind in type(owner).__mro__), state)

    return Receiver(buffer.storage, getattr(buffer.writer, "index_key", None), part)


def _misfits(check: Callable[[], None]) -> list[str]:
    try:
        check()
    except ValueError as error:
        return list(differences_of(error))
    return []


def _advice(wanted: dict[str, Any]) -> str:
    return "What is not wanted from there can be left out: loads(path, parts=...)" if "sampler" in wanted else ""


def _state_of(buffer: SavedBuffer) -> dict[str, Any]:
    """Everything, in memory; parts of a user's own may hand out tensors that they go on with, so copies of them."""
    return {"storage": buffer.storage.state_dict(), **_kinds(buffer), **copy.deepcopy(buffer.part_states())}


def _load_state(buffer: SavedBuffer, state: dict[str, Any]) -> None:
    """Takes over what `state_of` gave."""
    missing = [f"it has no {part}" for part in (*PARTS, "transform") if part not in state]
    if missing:
        raise CheckpointMisfitError("the state does not fit this buffer", missing)
    wanted = {p: {"kind": state.get(f"{p}_kind"), "state": state[p]} for p in ("sampler", "writer", "generator")}
    wanted["transform"] = {"state": state["transform"]}
    said = _differences(buffer, wanted) + _misfits(lambda: buffer.storage._check_state(state["storage"]))
    if said:
        raise CheckpointMisfitError("the state does not fit this buffer", said)
    _check_states(buffer, wanted)
    wanted = copy.deepcopy(wanted)
    with buffer.storage._exclusive("load_state_dict"):
        adopt(buffer, wanted, functools.partial(buffer.storage.load_state_dict, state["storage"]))


def _kinds(buffer: SavedBuffer) -> dict[str, str]:
    return {"sampler_kind": type(buffer.sampler).__name__, "writer_kind": type(buffer.writer).__name__}


def _differences(buffer: SavedBuffer, wanted: dict[str, Any], malformed: Malformed | None = None) -> list[str]:
    said: list[str] = []
    for name, part in (("sampler", buffer.sampler), ("writer", buffer.writer)):
        if name not in wanted:
            continue
        with looking_at(part, malformed):
            kind, state = wanted[name]["kind"], wanted[name]["state"]
            if kind != type(part).__name__:
                said.append(f"the {name} is a {type(part).__name__} here, a {kind} there")
            elif hasattr(part, "differences"):
                said += part.differences(state)
    if "transform" in wanted:
        with looking_at(buffer.saved_transform, malformed):
            state = wanted["transform"]["state"]
            said += [] if state is None else buffer.saved_transform.differences(state)
    return said


def _check_states(buffer: SavedBuffer, wanted: dict[str, Any], malformed: Malformed | None = None) -> None:
    """An error where a state cannot be taken over here, before anything is changed for it."""
    with looking_at(None, malformed):
        if "generator" in wanted:
            buffer.check_generator(wanted["generator"]["state"])
    check_sampler(buffer, wanted, malformed)
