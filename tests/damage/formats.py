"""Every format that engram reads, with what it promises about damaged files."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData

from contracts.checkpointer import RowRings
from contracts.corruption import ANYTHING, REFUSED, SAME, Budget, Saved
from data.datasets.support import raw, steps
from engram import verify
from engram.checkpoint.directory import MARKER
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from engram.data.datasets import iter_hdf5, iter_minari, iter_parquet, write_hdf5, write_minari, write_parquet
from engram.data.replay_buffers.checkpointers import TensorStorageCheckpointer, open_snapshot, save_snapshot
from engram.errors import CheckpointError, CorruptCheckpointError, DatasetError, StorageError
from golden.observed import held, unlike
from golden.recipes import RECIPES

ARCHIVE = Path(__file__).parents[1] / "data" / "foreign" / "torchrl.zip"


class Checkpoint(Saved):
    """Two snapshots, the second in force. Whatever is damaged is noticed and named."""

    errors = (CheckpointError,)
    #: Damage that `verify` is asked for, too.
    verified: tuple[str, ...] = ("lost", "exchanged", "outdated")

    def promise(self, kind: str, file: Path) -> str:
        return REFUSED

    def files(self) -> list[Path]:
        return [file for file in super().files() if "g-000001" not in file.parts and file.name != "LOCK"]

    def is_data(self, file: Path) -> bool:
        return file.suffix != ".json" and file.name not in ("CURRENT", MARKER)

    def older(self, file: Path) -> Path | None:
        return None if file.name in ("CURRENT", MARKER) else Path(str(file).replace("g-000002", "g-000001"))

    def check_error(self, kind: str, files: Sequence[Path], error: Exception) -> None:
        assert any(str(file) in str(error) for file in files), f"{kind} of {files}: {error}"
        if kind == "lost" and files[0].name == "CURRENT":
            assert "g-000002" in str(error)  # there is no checkpoint, and this could be one
            return
        assert isinstance(error, CorruptCheckpointError)
        if len(files) == 1 and kind != "folders linked":
            whole = "g-000002" if files[0].name == "CURRENT" else "g-000001"
            assert error.newest_whole == whole and whole in str(error)

    def check_report(self, kind: str, files: Sequence[Path]) -> None:
        # Without its marker a folder is not one of engram's, and without CURRENT there is nothing to compare.
        if kind in self.verified and not (kind == "cut" and files[0].name == MARKER) and files[0].name != "CURRENT":
            report = verify(self.root)
            assert not report.ok and any(str(file) in str(report) for file in files)


class Snapshots(Checkpoint):
    """Rings of bytes and a part with a tensor: so quick that every byte is changed."""

    verified = ("cut", "longer", "lost", "exchanged", "outdated")

    def __init__(self, path: Path) -> None:
        self.root = path / "checkpoint"
        for number in (1, 2):
            save_numbered(self.root, number, keep_last=number)
        self.remember()

    def holders(self, files: Sequence[Path]) -> Iterable[Any]:
        """Snapshots to be loaded: the one in force, and where it is damaged itself, by its name."""
        named = any("g-000002" in file.parts for file in files)
        return [[None, 0], *([["g-000002", 0]] if named and len(files) == 1 else [])]

    def load(self, holder: Any) -> None:
        holder[1] = load_numbered(self.root, holder[0])

    def state(self, holder: Any) -> Any:
        return holder[1]

    def check_error(self, kind: str, files: Sequence[Path], error: Exception) -> None:
        super().check_error(kind, files, error)
        if files[0].name == "CURRENT" and kind != "lost":
            assert not verify(self.root).ok


def rings_of(number: int) -> RowRings:
    rings = RowRings(lanes=2, strands=2)
    rings.append(0, 130, number)
    rings.append(1, 20, number)
    return rings


def save_numbered(path: Path, number: int, **options: Any) -> str:
    state = {"sampler": {"number": number, "tree": torch.full((500,), float(number))}}
    return save_snapshot(path, state, (TensorStorageCheckpointer(), rings_of(number)), **options)


def load_numbered(path: Path, snapshot: str | None = None) -> int:
    """The number that was saved, once every part has been seen to belong to it."""
    rings = RowRings(lanes=2, strands=2)
    with open_snapshot(path, snapshot) as opened:
        sampler = opened.components["sampler"]
        try:
            opened.load_storage(TensorStorageCheckpointer(), rings)
        except CheckpointError:
            assert rings.contents() == RowRings(lanes=2, strands=2).contents()
            raise
    number: int = sampler["number"]
    assert rings.contents() == rings_of(number).contents()
    assert torch.equal(sampler["tree"], torch.full((500,), float(number)))
    return number


class Buffers(Checkpoint):
    """A checkpoint of a whole buffer, which one that holds something loads, and an empty one."""

    def __init__(self, name: str, path: Path, empty_too: bool = True) -> None:
        self.root, self._recipe, self._empty_too = path / "checkpoint", RECIPES[name], empty_too
        rb = self._recipe.fill(self._recipe.fresh())
        rb.dumps(self.root)
        if self._recipe.more is not None:
            self._recipe.more(rb)
        rb.dumps(self.root, keep_last=2)
        self._holding = self._recipe.fill(self._recipe.fresh())
        self.remember()
        assert self.same(self.expected[0], held(rb, "held")) and verify(self.root).ok

    def holders(self, files: Sequence[Path]) -> Iterable[Any]:
        if not files:
            return [self._recipe.fresh()]
        return [self._holding, *([self._recipe.fresh()] if self._empty_too else [])]

    def load(self, holder: Any) -> None:
        holder.loads(self.root)

    def state(self, holder: Any) -> Any:
        return held(holder, "held")

    def same(self, one: Any, other: Any) -> bool:
        return unlike(one, other) == []


class TorchRL(Saved):
    """TorchRL's directories have no checksums: what shows is refused, other values are those of another save."""

    errors = (CheckpointError, ValueError)

    def __init__(self, name: str, path: Path) -> None:
        self.root, self._name = unpacked(name, path), name
        self._holding = torchrl_buffer(name)
        self.load(self._holding)
        self.remember()

    def promise(self, kind: str, file: Path) -> str:
        if file.name in ("prefetch.pkl", "buffer_metadata.json") or ("writer" in file.parts and kind == "lost"):
            return ANYTHING  # nothing in them is needed
        if kind in ("cut", "lost", "folders linked") or (kind == "longer" and file.suffix != ".h5"):
            return REFUSED
        return REFUSED if kind == "replaced" and file.suffix != ".h5" else ANYTHING

    def holders(self, files: Sequence[Path]) -> Iterable[Any]:
        return [torchrl_buffer(self._name), *([self._holding] if files else [])]

    def load(self, holder: Any) -> None:
        holder.loads(self.root)

    def state(self, holder: Any) -> Any:
        return [rows.clone() for rows in holder.storage.state_dict()["rows"]] if len(holder) else []

    def same(self, one: Any, other: Any) -> bool:
        return len(one) == len(other) and all(torch.equal(raw(a), raw(b)) for a, b in zip(one, other, strict=True))

    def check_error(self, kind: str, files: Sequence[Path], error: Exception) -> None:
        if kind in ("cut", "longer"):
            super().check_error(kind, files, error)


def unpacked(name: str, path: Path) -> Path:
    if name == "memory maps":
        steps([7, 3]).set("about", NonTensorData({"of": "one run"}, batch_size=[10])).memmap(path / name)
        return path / name
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(path, [n for n in archive.namelist() if n.startswith(f"{name}/")])
    return path / name


def torchrl_buffer(name: str) -> Any:
    """An empty one that can load the directory of this name."""
    kind = ReplayBuffer if name == "pytree" else TensorDictReplayBuffer
    parts = {"sampler": SamplerWithoutReplacement()} if name.startswith("epoch") else {}
    ndim = 2 if name.endswith("-2") else 1
    return kind(storage=LazyTensorStorage(10 * ndim, ndim=ndim), batch_size=3, **parts)


class Dataset(Saved):
    """A data set of 33 steps: where it is read, the rows that come before the damage are yielded."""

    errors = (DatasetError, OSError)  # OSError: there is no file, or a folder in its place
    some = Budget(data=50, cuts=5)
    READ = {"parquet": iter_parquet, "hdf5": iter_hdf5, "minari": iter_minari}

    def __init__(self, name: str, path: Path) -> None:
        self.root, self._name = path / "set", name
        self._path = self.root if name == "minari" else self.root / name
        self.root.mkdir(exist_ok=True)
        batch = steps([20, 13])
        if name == "parquet":
            write_parquet(batch, self._path, compression="none")
        elif name == "hdf5":
            write_hdf5(batch, self._path)
        else:
            self.root.rmdir()
            write_minari(batch, self._path)
        self.remember()

    def promise(self, kind: str, file: Path) -> str:
        if self._name == "parquet":
            return {"cut": REFUSED, "lost": REFUSED, "changed bytes": SAME}.get(kind, ANYTHING)
        return {"cut": SAME, "lost": REFUSED}.get(kind, ANYTHING) if file.suffix != ".json" else ANYTHING

    def is_data(self, file: Path) -> bool:
        return file.suffix != ".json"

    def holders(self, files: Sequence[Path]) -> Iterable[Any]:
        return [[]]

    def load(self, holder: Any) -> None:
        holder[:] = self.READ[self._name](self._path)

    def state(self, holder: Any) -> Any:
        return torch.cat(holder) if holder else None

    def same(self, one: Any, other: Any) -> bool:
        if one is None or other is None:
            return one is other
        keys = set(one.keys(True, True))
        return keys == set(other.keys(True, True)) and all(torch.equal(raw(one[key]), raw(other[key])) for key in keys)


class Store(Saved):
    """The file of a mapped store: its shape has a checksum, its rows have one only after a power cut."""

    errors = (StorageError,)

    def __init__(self, path: Path) -> None:
        self.root = path / "store"
        rb = ReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=self.root, lanes=2))
        rb.extend(steps([20, 13]))
        rb.storage.close()
        self.remember()

    def promise(self, kind: str, file: Path) -> str:
        return REFUSED if kind in ("cut", "lost") else ANYTHING

    def is_data(self, file: Path) -> bool:
        return True

    def holders(self, files: Sequence[Path]) -> Iterable[Any]:
        return [[]]

    def load(self, holder: Any) -> None:
        storage = LazyMemmapStorage.open(self.root)
        try:
            holder[:] = [storage.get(slice(None))]
        finally:
            storage.close()

    def state(self, holder: Any) -> Any:
        return holder[0] if holder else None

    same = Dataset.same


#: Of each form of a checkpoint a buffer whose sampler, writer or transforms have a state with arrays, too.
BUFFERS = [
    "rows-lanes", "rows-compact", "flat", "nested", "h5", "h5-groups", "list", "ensemble", "prioritized",
    "transforms-n-steps",
]  # fmt: skip
TORCHRL = [
    "tensor-partial", "flat-wrapped-1", "nested-wrapped-2", "epoch-begun", "pytree", "h5-wrapped-1", "memory maps",
]  # fmt: skip
DATASETS = ["parquet", "hdf5", "minari"]
