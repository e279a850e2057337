"""The whole state of a buffer: to disk and back, or in memory."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engram.data.replay_buffers.adoption import Malformed, adopt, check_sampler, looking_at, take_over
from engram.data.replay_buffers.background import SaveHandle
from engram.data.replay_buffers.checkpointers.snapshot import save_snapshot
from engram.data.replay_buffers.draws import set_state, state_of
from engram.data.replay_buffers.parts import BufferParts
from engram.data.replay_buffers.storages.sharing import is_sent, sends
from engram.errors import CheckpointMisfitError, differences_of
from engram.interop.open import Part, Receiver, open_saved
from engram.transforms.compose import Compose

PARTS = ("storage", "sampler", "writer", "generator")


class SavedBuffer(BufferParts):
    """A buffer's parts that can be saved as one."""

    def dumps(self, path: str | os.PathLike[str], *, blocking: bool = True, keep_last: int = 1) -> SaveHandle | None:
        """Saves everything: a whole snapshot beside the last one, which it then replaces.

        Killed at any moment, `loads` finds the old state or the new one, exactly. What has not changed since the last
        snapshot there is not written again, but taken over by hard links.

        Args:
            blocking: if False, a thread saves the state of this moment while the buffer goes on, and a `SaveHandle`
                is returned: `done()`, `result()`, `progress`, `rows_left_out`. What is overwritten before it is
                saved is kept in memory until then.
            keep_last: how many of the newest snapshots stay.

        Raises:
            CheckpointError: it cannot be written (disk full, read-only, another save there, ...); the last snapshot
                is as it was.
        """
        # Batches that were prepared before the last writes are prepared again, here and where this is loaded.
        with self._undisturbed(), self._storage.mutex:
            if blocking:
                _save(self, Path(path), keep_last)
                return None
            return _save_in_background(self, Path(path), keep_last)

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        snapshot: str | None = None,
        parts: tuple[str, ...] = PARTS,
    ) -> None:
        """Takes over a saved state: the batches that follow are those that would have followed there.

        Directories that TorchRL's `dumps` wrote are read too (docs/other-formats.md says what of them).

        Other threads see the state of before or the new one, whole. After an error the buffer is as it was: rows,
        priorities, cursor, epochs, transforms; also where a load hook, or a part of a user's own, raised it. (Rows of
        more than 256 MB are not kept aside: what fails after all of them were verified, a disk that reads a file once
        and not twice, leaves the buffer empty; an error that comes when they are in their places leaves it with what
        was loaded.)

        Raises:
            CorruptCheckpointError: a file is not what was saved; the message names it.
            CheckpointMisfitError: the checkpoint does not fit this buffer; every difference is listed. It is a
                ValueError, too.
        """
        with self._undisturbed():
            _load(self, Path(path), snapshot, parts)

    dump = save = dumps
    load = loads

    def state_dict(self) -> dict[str, Any]:
        """The whole state in memory: rows, counters, sampler, writer, transforms, generator."""
        with self._undisturbed(), self._storage.mutex:
            return _state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave, as `loads` does; a ValueError where it does not fit, every difference."""
        with self._undisturbed():
            _load_state(self, state)

    # ---- copies: what `pickle` and `copy` make; what is sent to a process travels by `__getstate__` ----
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        sends(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_sent() or self._storage.travels_by_path:
            return super().__reduce_ex__(protocol)
        with self._undisturbed(), self._storage.mutex:
            return self._copied_from()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A buffer with equal parts and rows of its own: the batches that follow are the same in both."""
        with self._undisturbed(), self._storage.mutex:
            make, parts = self._copied_from()
            memo[id(self)] = made = make(*copy.deepcopy(parts, memo))
        return made

    def _copied_from(self) -> tuple[Any, tuple[Any, ...]]:
        return _copied, (type(self), self.__getstate__(), copy.deepcopy(self.part_states()))

    def part_states(self) -> dict[str, Any]:
        """States of sampler, writer, transforms and generator."""
        if hasattr(self._sampler, "follow"):
            self._sampler.follow(self._storage)
        sampler = self._sampler.state_dict() if hasattr(self._sampler, "state_dict") else {}
        generator = self.generator_state()
        writer, transform = self._writer.state_dict(), self.saved_transform.state_dict()
        return {"sampler": sampler, "writer": writer, "transform": transform, "generator": generator}

    def generator_state(self) -> Any:
        """Where the buffer's own generator stands; None without one."""
        return None if self._generator is None else state_of(self._generator)

    def restore_generator(self, state: Any) -> None:
        """Goes on where a generator stood; without one of its own, or a state, nothing changes."""
        if state is not None and self._generator is not None:
            set_state(self._generator, state)

    def check_generator(self, state: Any) -> None:
        """An error where `restore_generator` would be one."""
        if state is not None and self._generator is not None:
            set_state(torch.Generator(device=self._generator.device), state)

    @property
    def transform(self) -> Compose:
        """What changes batches on their way in and out."""
        return self._transform

    @property
    def saved_transform(self) -> Compose:
        """What of the transforms is saved."""
        return self._transform


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
    with storage.still() as source:
        save_snapshot(path, components, (storage.checkpointer, source), keep_last=keep_last)


def _save_in_background(buffer: SavedBuffer, path: Path, keep_last: int) -> SaveHandle:
    """The same in a thread, of what the parts are now. The caller holds the buffer still until this returns."""
    storage, checkpointer = buffer.storage, buffer.storage.checkpointer
    components = copy.deepcopy(_components(buffer))
    frozen = storage.freeze()

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
        "numbers": buffer.storage.numbers_state(),
    }


def _load(buffer: SavedBuffer, path: Path, snapshot: str | None, parts: tuple[str, ...]) -> None:
    """Takes parts over, after everything that is wanted was found to fit. The caller holds the buffer still."""
    unknown = [p for p in parts if p not in PARTS]
    if unknown:
        raise ValueError(f"parts are {PARTS}, got {unknown}")
    storage, with_rows = buffer.storage, "storage" in parts
    with open_saved(path, snapshot, _receiver(buffer)) as saved:
        wanted, said = saved.part_states(parts)
        if with_rows or "writer" in parts:
            wanted["numbers"] = saved.numbers()
        said += _differences(buffer, wanted, saved.malformed)
        if not said:
            _check_states(buffer, wanted, saved.malformed)
        if with_rows:
            said += _misfits(lambda: saved.check_storage(storage.checkpointer, storage))
        if said:
            raise CheckpointMisfitError(f"{path} does not fit this buffer", said, _advice(wanted))
        with storage.alone("loads") if with_rows else storage.mutex:
            fill = storage.read_aside(saved) if with_rows else None
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
    wanted = {p: {"kind": state.get(f"{p}_kind"), "state": state[p]} for p in ("sampler", "writer", "generator")}
    wanted["transform"] = {"state": state.get("transform")}
    said = _differences(buffer, wanted) + _misfits(lambda: buffer.storage.check_state(state["storage"]))
    if said:
        raise CheckpointMisfitError("the state does not fit this buffer", said)
    _check_states(buffer, wanted)
    wanted = copy.deepcopy(wanted)
    with buffer.storage.alone("load_state_dict"):
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
        buffer.storage.check_numbers(wanted.get("numbers"))
    check_sampler(buffer, wanted, malformed)
