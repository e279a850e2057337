"""The whole state of a buffer: to disk and back, or in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.data.replay_buffers.checkpointers.snapshot import open_snapshot, save_snapshot

if TYPE_CHECKING:
    from engram.data.replay_buffers.buffer import ReplayBuffer

PARTS = ("storage", "sampler", "writer", "generator")


def save(buffer: ReplayBuffer, path: Path, keep_last: int) -> None:
    """Saves every part as one snapshot. The caller holds the buffer still."""
    states = buffer.part_states()
    components = {
        "sampler": {"kind": type(buffer.sampler).__name__, "state": states["sampler"]},
        "writer": {"kind": type(buffer.writer).__name__, "state": states["writer"]},
        "generator": {"state": states["generator"]},
    }
    save_snapshot(path, components, (buffer.storage.checkpointer, buffer.storage), keep_last=keep_last)


def load(buffer: ReplayBuffer, path: Path, snapshot: str | None, parts: tuple[str, ...]) -> None:
    """Takes parts over, after everything that is wanted was found to fit. The caller holds the buffer still."""
    unknown = [p for p in parts if p not in PARTS]
    if unknown:
        raise ValueError(f"parts are {PARTS}, got {unknown}")
    with open_snapshot(path, snapshot) as saved:
        wanted: dict[str, Any] = {
            name: saved.components[name] for name in ("sampler", "writer", "generator") if name in parts
        }
        said = _differences(buffer, wanted)
        storage = buffer.storage
        if "storage" in parts:
            try:
                saved.check_storage(storage.checkpointer, storage)
            except ValueError as error:
                said.append(str(error))
        if said:
            raise ValueError(f"{path} does not fit this buffer: " + "; ".join(said))
        if "storage" in parts:
            with storage.alone("loads"):
                saved.load_storage(storage.checkpointer, storage)
        _adopt(buffer, wanted, storage_too="storage" in parts)


def state_of(buffer: ReplayBuffer) -> dict[str, Any]:
    """Everything, in memory."""
    return {"storage": buffer.storage.state_dict(), **_kinds(buffer), **buffer.part_states()}


def load_state(buffer: ReplayBuffer, state: dict[str, Any]) -> None:
    """Takes over what `state_of` gave."""
    wanted = {p: {"kind": state.get(f"{p}_kind"), "state": state[p]} for p in ("sampler", "writer", "generator")}
    said = _differences(buffer, wanted)
    if said:
        raise ValueError("the state does not fit this buffer: " + "; ".join(said))
    buffer.storage.load_state_dict(state["storage"])
    _adopt(buffer, wanted, storage_too=True)


def _kinds(buffer: ReplayBuffer) -> dict[str, str]:
    return {"sampler_kind": type(buffer.sampler).__name__, "writer_kind": type(buffer.writer).__name__}


def _differences(buffer: ReplayBuffer, wanted: dict[str, Any]) -> list[str]:
    said = []
    for name, part in (("sampler", buffer.sampler), ("writer", buffer.writer)):
        if name in wanted and wanted[name]["kind"] != type(part).__name__:
            said.append(f"the {name} is a {type(part).__name__} here, a {wanted[name]['kind']} there")
        elif name in wanted and hasattr(part, "differences"):
            said += part.differences(wanted[name]["state"])
    return said


def _adopt(buffer: ReplayBuffer, wanted: dict[str, Any], storage_too: bool) -> None:
    for name, part in (("sampler", buffer.sampler), ("writer", buffer.writer)):
        if name in wanted and hasattr(part, "load_state_dict"):
            part.load_state_dict(wanted[name]["state"])
    if "generator" in wanted and wanted["generator"]["state"] is not None and buffer.generator is not None:
        buffer.generator.set_state(wanted["generator"]["state"])
    lanes = buffer.storage.lanes
    if storage_too and lanes is not None and hasattr(buffer.sampler, "adopt"):
        buffer.sampler.adopt(lanes.store.incarnation, buffer.storage.shifts)
