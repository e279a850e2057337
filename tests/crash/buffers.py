"""Buffers of every kind with state in every part, what is done to them, and what their saved states must equal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from contracts.ted_rings import ted_steps
from engram.data import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.checkpointers import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
)
from engram.transforms import Compose, MultiStepTransform, VecNorm

CAPACITY = 60
OLD, NEW, LATER = 1, 2, 3
#: What users keep beside a checkpoint: names that look a little like ours.
FOREIGN = (
    "notes.txt", "CURRENT.old", "rows.bin", ".hidden", "g-000500/data.bin", "g-12/x", "mine/manifest.json",
    "g-000400/ENGRAM-SNAPSHOT",
)  # fmt: skip


def _buffer(**parts: Any) -> Any:
    defaults = {"storage": LazyTensorStorage(CAPACITY), "generator": torch.Generator().manual_seed(3), "batch_size": 4}
    return TensorDictReplayBuffer(**{**defaults, **parts})


def _steps_held_back() -> Any:
    return Compose(VecNorm(in_keys=["action"]), MultiStepTransform(n_steps=3, gamma=0.5))


def _member(**parts: Any) -> Any:
    return _buffer(batch_size=None, **parts)


MAKERS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: _buffer(sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5), transform=VecNorm(in_keys=["reward"])),
    "best": lambda: _buffer(
        sampler=SamplerWithoutReplacement(), writer=TensorDictMaxValueWriter(rank_key=("collector", "traj_ids"))
    ),
    "flat": lambda: _buffer(
        storage=LazyTensorStorage(CAPACITY, checkpointer=FlatStorageCheckpointer()),
        sampler=SliceSampler(num_slices=2, strict_length=False),
    ),
    "nested": lambda: _buffer(
        storage=LazyTensorStorage(CAPACITY, checkpointer=NestedStorageCheckpointer()),
        sampler=SliceSamplerWithoutReplacement(num_slices=2, strict_length=False),
    ),
    "h5": lambda: _buffer(
        storage=LazyTensorStorage(CAPACITY, checkpointer=H5StorageCheckpointer(h5_kwargs={"compression": "gzip"})),
        sampler=SamplerWithoutReplacement(),
    ),
    "list": lambda: _buffer(storage=ListStorage(CAPACITY), sampler=SamplerWithoutReplacement()),
    "ensemble": lambda: ReplayBufferEnsemble(
        _member(storage=LazyTensorStorage(CAPACITY, checkpointer=FlatStorageCheckpointer())),
        _member(sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5)),
        generator=torch.Generator().manual_seed(4),
        batch_size=4,
    ),
}
KINDS = list(MAKERS)
STYLES = ["full", "incremental", "background"]


def grow(rb: Any, stage: int) -> None:
    """Writes, samples and updates: the same for the same stage."""
    members = [rb[0], rb[1]] if isinstance(rb, ReplayBufferEnsemble) else [rb]
    for k, member in enumerate(members):
        member.extend(ted_steps(25 if stage == OLD else 9, salt=[stage, k], length=6.0, exceptions=0.1))
    for _ in range(stage):
        batch, info = rb.sample(return_info=True)
        if isinstance(getattr(rb, "sampler", None), PrioritizedSampler):
            rb.update_priority(batch["index"], torch.arange(1.0, 1 + batch.numel()) * stage)
        del info


def save(rb: Any, path: Path, style: str) -> None:
    """The save that is killed or fails; in the background the buffer goes on meanwhile."""
    if style != "background":
        rb.dumps(path)
        return
    handle = rb.dumps(path, blocking=False)
    try:
        grow(rb, 7)
    finally:
        handle.result(300)


def begun(kind: str, style: str, path: Path) -> Any:
    """A buffer whose next save is to be watched; its old state, or another buffer's in the same state, is saved."""
    torch.manual_seed(0)
    rb = MAKERS[kind]()
    grow(rb, OLD)
    rb.dumps(path)
    if style == "full":  # rows of another session: nothing can be taken over
        torch.manual_seed(0)
        rb = MAKERS[kind]()
        grow(rb, OLD)
    grow(rb, NEW)
    return rb


def print_of(path: Path, kind: str) -> bytes:
    """Everything of the state that is saved at `path`, and the batches that follow."""
    rb = MAKERS[kind]()
    rb.loads(path)
    torch.manual_seed(1)
    state = rb.state_dict()
    found = _flat(state)
    for _ in range(3):
        found += _flat(rb.sample())
    return found


def _flat(value: Any) -> bytes:
    if isinstance(value, Tensor):
        return repr((value.dtype, tuple(value.shape))).encode() + value.contiguous().view(-1).numpy().tobytes()
    if isinstance(value, TensorDict):
        return _flat(dict(sorted(value.to_dict().items())))
    if hasattr(value, "tensordicts"):
        return _flat(list(value.tensordicts))
    if isinstance(value, dict):
        return b"{" + b",".join(_flat(k) + b":" + _flat(v) for k, v in value.items() if k not in _VOLATILE) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(_flat, value)) + b"]"
    if hasattr(value, "tobytes"):
        return bytes(value.tobytes())
    return repr(value).encode()


_VOLATILE = ("incarnation", "session", "store_id")  # they name objects of a process


def put_foreign(path: Path) -> None:
    path.mkdir(exist_ok=True)
    for name in FOREIGN:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name)


def check_foreign(path: Path) -> None:
    for name in FOREIGN:
        assert (path / name).read_text() == name


def own_names(path: Path) -> list[str]:
    """What lies at `path` beside the foreign files."""
    foreign = {name.split("/")[0] for name in FOREIGN}
    return sorted(entry.name for entry in path.iterdir() if entry.name not in foreign)


def fresh(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    put_foreign(path)
    return path
