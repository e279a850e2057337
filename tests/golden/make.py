"""Makes the golden files: checkpoints of every kind, and beside each what a buffer that reads it must hold and give.

    PYTHONPATH=src:tests python tests/golden/make.py [--force] [names]

A golden file is never made again: what was written once must be readable for ever. A new kind gets a new name.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import tempfile
from pathlib import Path

import torch

from engram.data import Compact, LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictMaxValueWriter
from engram.data.replay_buffers.checkpointers import rows
from engram.store.header import FILE_NAME
from golden.observed import Arrays, observed, write
from golden.recipes import CAPACITY, RECIPES, Recipe
from golden.steps import stacks, steps

DATA = Path(__file__).parent / "data"
INCREMENTAL = "incremental"  # two snapshots, the second of which took files over
STORE = "store"  # a mapped store's own file
BEST_STORE = "store-max-value"  # one whose rows carry their own sequences
COMPACT_STORE = "store-compact"  # one that keeps observations once, with as many tails as a piece has rows, and 3

REMOVED_STORE = "store-removed"  # one with removed rows, in two lanes


def make(name: str, recipe: Recipe, folder: Path) -> None:
    whole, rows.CHUNK_BYTES = rows.CHUNK_BYTES, recipe.chunk_bytes
    try:
        rb = recipe.fill(recipe.fresh())
        rb.dumps(folder / "checkpoint")
    finally:
        rows.CHUNK_BYTES = whole
    keep(folder, observed(rb, recipe.batch_size, recipe.more))


def make_incremental(folder: Path) -> None:
    whole, rows.CHUNK_BYTES = rows.CHUNK_BYTES, 600
    try:
        rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
        for i, n in enumerate((30, 4)):
            rb.extend(steps(30 * i, n))
            rb.dumps(folder / "checkpoint", keep_last=2)
            keep(folder, observed(rb, 8), f"expected-{i + 1}.npz")
    finally:
        rows.CHUNK_BYTES = whole


def make_store(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        rb = ReplayBuffer(storage=LazyMemmapStorage(12, scratch_dir=scratch, lanes=2))
        rb.extend(steps(0, 8).select("obs", "action", "next"))
        rb[3] = steps(500, 1).select("obs", "action", "next")[0]
        expected = observed(rb, 8)
        rb.storage.close()
        shutil.copytree(scratch, folder / "scratch")
    keep(folder, expected)


def make_best_store(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        rb = ReplayBuffer(
            storage=LazyMemmapStorage(8, scratch_dir=scratch), writer=TensorDictMaxValueWriter(("next", "reward"))
        )
        rb.extend(steps(0, 8).select("obs", "action", "next"))
        rb.extend(steps(20, 5).select("obs", "action", "next"))
        expected = observed(rb, 8)
        rb.storage.close()
        shutil.copytree(scratch, folder / "scratch")
    keep(folder, expected)


def make_compact_store(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        compact = Compact("pixels", frames=4, n_steps=3)
        rb = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=scratch, compact=compact))
        for start, n in ((0, 20), (20, 30), (50, 4)):
            rb.extend(stacks(start, n, n_steps=3))
        expected = observed(rb, 8)
        rb.storage.close()
        packed = gzip.compress((Path(scratch) / FILE_NAME).read_bytes(), mtime=0)  # mostly zeros
        (folder / f"{FILE_NAME}.gz").write_bytes(packed)
    keep(folder, expected)


def make_removed_store(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        rb = ReplayBuffer(storage=LazyMemmapStorage(12, scratch_dir=scratch, lanes=2))
        rb.extend(steps(0, 10).select("obs", "action", "next"))
        rb.remove(torch.tensor([1, 2, 5, 7]))
        rb.extend(steps(10, 6).select("obs", "action", "next"))
        rb.remove(torch.tensor([0]))
        expected = observed(rb, 8) | {"removed": rb.storage.is_removed(torch.arange(12)).numpy()}
        rb.storage.close()
        packed = gzip.compress((Path(scratch) / FILE_NAME).read_bytes(), mtime=0)  # mostly zeros
        (folder / f"{FILE_NAME}.gz").write_bytes(packed)
    keep(folder, expected)


def keep(folder: Path, expected: Arrays, name: str = "expected.npz") -> None:
    write(folder / name, expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--force", action="store_true", help="replace files that exist: what they promised is gone")
    asked = parser.parse_args()
    makers = {name: lambda folder, name=name: make(name, RECIPES[name], folder) for name in RECIPES}
    makers |= {INCREMENTAL: make_incremental, STORE: make_store, BEST_STORE: make_best_store}
    makers |= {COMPACT_STORE: make_compact_store, REMOVED_STORE: make_removed_store}
    for name in asked.names or makers:
        folder = DATA / name
        if folder.exists() and not asked.force:
            print(f"{name}: exists, and stays as it is (--force replaces it)")
            continue
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        torch.manual_seed(1)
        makers[name](folder)
        for unused in folder.rglob("LOCK"):
            unused.unlink()
        print(f"{name}: made")


if __name__ == "__main__":
    main()
