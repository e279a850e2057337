"""Rows as cells of a table, and the oldest rows of a store as such. Needs no torch."""

from __future__ import annotations

import os
from typing import Any

import numpy.typing as npt

from engram.cli.description import shown_key
from engram.cli.kinds import store_folder
from engram.errors import StorageInUseError
from engram.kernel.disk import ObservedRows, StoreFile

_TRIES = 100  # beside a writer
_MOST_SHOWN = 6  # numbers of a leaf that are shown one by one

#: Names of columns, and the cells of each row.
Cells = tuple[tuple[str, ...], list[tuple[str, ...]]]


def cell(value: npt.NDArray[Any]) -> str:
    """The numbers of a leaf, or of a large one its shape, least and largest number.

    Example:
        >>> import numpy as np
        >>> cell(np.array([1.0, 0.25])), cell(np.array(3)), cell(np.arange(8))
        ('[1 0.25]', '3', '[8] 0 to 7')
    """
    if value.size <= _MOST_SHOWN:
        shown = [f"{x:.5g}" if isinstance(x, float) else str(x) for x in value.reshape(-1).tolist()]
        return shown[0] if len(shown) == 1 else f"[{' '.join(shown)}]"
    if value.dtype.kind == "c":
        return str(list(value.shape))
    return f"{list(value.shape)} {value.min().item():.5g} to {value.max().item():.5g}"


def check_count(n: int) -> None:
    """ValueError where n is not a number of rows to show."""
    if n < 1:
        raise ValueError(f"the number of rows must be 1 or more, got {n}")


def oldest_cells(path: str | os.PathLike[str], n: int) -> Cells:
    """The oldest n rows of a store, as `RowsShown.cells` of what `head` returns; errors as there.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> _ = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=folder)).extend({"x": torch.arange(6)})
        >>> oldest_cells(folder, 2)
        (('slot', 'x'), [('2', '2'), ('3', '3')])
    """
    check_count(n)
    with StoreFile.observed(store_folder(path)) as opened:
        rows = ObservedRows(opened.store)
        for _ in range(_TRIES):
            cells = rows.validated(lambda: _oldest_cells(rows, n))
            if cells is not None:
                return cells
    raise StorageInUseError("the rows are overwritten faster than they are read; try again")


def _oldest_cells(rows: ObservedRows, n: int) -> Cells | None:
    """None: a writer has overwritten some of them."""
    store = rows.store
    cells: list[tuple[str, ...]] = []
    for lane in range(store.lanes):
        stored = rows.stored(lane)
        steps = stored[: -(-(n - len(cells)) // store.envs)]
        columns = [rows.column(leaf, lane, steps) for leaf in rows.leaves]
        if steps and rows.stored(lane).start > steps.start:
            return None
        for at, step in enumerate(steps):
            for env in range(store.envs):
                slot = (lane * store.lane_capacity + step % store.lane_capacity) * store.envs + env
                cells.append((str(slot), *(cell(column[at, env]) for column in columns)))
    return ("slot", *(shown_key(leaf.path) for leaf in rows.leaves)), cells[:n]
