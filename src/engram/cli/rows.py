"""Rows at a path: the oldest ones, or some drawn at random."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engram.cli.cells import Cells, cell, check_count
from engram.cli.description import KeyInfo, shown_key
from engram.cli.own_files import PICTURE, write_target
from engram.cli.pixels import image_grid, is_image, no_images, png_of
from engram.cli.sources import open_rows
from engram.data import Storage
from engram.errors import StorageInUseError
from engram.kernel.tools import user_path
from engram.pytree import describe, to_tensor

_TRIES = 100  # beside a writer


class RowsShown(NamedTuple):
    """Some rows: their slots (int64 [n]), and the batch, or the list of items where steps are stored as items; and the
    positions of those that were removed.
    """

    slots: Tensor
    batch: Any
    removed: tuple[int, ...] = ()

    def _names(self) -> list[str]:
        """How a table names each row."""
        return [f"{slot} removed" if i in self.removed else str(slot) for i, slot in enumerate(self.slots.tolist())]

    def cells(self) -> Cells:
        """A table of them: names of the columns, and the cells of each row. Large leaves are summed up."""
        if isinstance(self.batch, list):
            return ("slot", "item"), [
                (name, " ".join(repr(item).split())[:200]) for name, item in zip(self._names(), self.batch, strict=True)
            ]
        leaves = [(shown_key(path), to_tensor(value)) for path, value in describe(self.batch, 1)[1]]
        head = ("slot", *(name for name, _ in leaves))
        return head, [
            (name, *(cell(_as_array(values[row])) for _, values in leaves)) for row, name in enumerate(self._names())
        ]

    def images(self) -> dict[str, Tensor]:
        """The leaves that are images, by key: uint8 `[rows, H, W]`, `[rows, C, H, W]` or `[rows, H, W, C]`."""
        if isinstance(self.batch, list):
            return {}
        leaves = [(shown_key(path), to_tensor(value)) for path, value in describe(self.batch, 1)[1]]
        return {name: values for name, values in leaves if is_image(_info_of(name, values))}

    def to_png(self, key: str | None = None) -> bytes:
        """A grid of the images under a key (None: the first that is one) as a PNG file.

        Raises:
            KeyError: no such key holds images; or none does.

        Example:
            >>> RowsShown(torch.arange(4), {"pixels": torch.zeros(4, 8, 8, dtype=torch.uint8)}).to_png()[1:4]
            b'PNG'
        """
        images = self.images()
        if not images or (key is not None and key not in images):
            raise KeyError(no_images(key, list(images)))
        return png_of(image_grid(images[next(iter(images)) if key is None else key].numpy()))

    def save_png(self, path: str | os.PathLike[str], key: str | None = None) -> None:
        """Writes `to_png` to a file, whole and in one step; it replaces nothing but a picture that engram drew.

        Raises:
            KeyError: no such key holds images; or none does.
            FileExistsError: something else is at the path, or a link.
        """
        write_target(user_path(path), self.to_png(key), PICTURE)

    def to_json(self) -> list[dict[str, Any]]:
        """A dict for each row: every value of every leaf; of a removed one also `removed`."""
        slots = [
            {"slot": slot, **({"removed": True} if i in self.removed else {})}
            for i, slot in enumerate(self.slots.tolist())
        ]
        if isinstance(self.batch, list):
            return [{**slot, "item": repr(item)} for slot, item in zip(slots, self.batch, strict=True)]
        leaves = [(shown_key(path), to_tensor(value).tolist()) for path, value in describe(self.batch, 1)[1]]
        return [{**slot, **{name: values[row] for name, values in leaves}} for row, slot in enumerate(slots)]


def _info_of(name: str, values: Tensor) -> KeyInfo:
    return KeyInfo(name, tuple(values.shape[1:]), str(values.dtype).removeprefix("torch."), 0)


def head(
    path: str | os.PathLike[str], n: int = 10, *, snapshot: str | None = None, progress: bool = False
) -> RowsShown:
    """The oldest n rows at a path (fewer where fewer are stored), lane by lane; with several environments steps of all.
    Those that were removed are among them, and marked.

    `progress` shows that a file is being read, if standard error is a terminal.

    Raises:
        ValueError: n is below 1, or what is at the path is nothing that engram reads.
        FileNotFoundError: there is nothing at the path.
        EngramError: it is damaged.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=folder))
        >>> _ = rb.extend(torch.arange(6))
        >>> rows = head(folder, 2)
        >>> rows.slots, rows.batch
        (tensor([2, 3]), tensor([2, 3]))
    """
    check_count(n)
    with open_rows(path, snapshot, progress=progress) as storage:
        return _read(storage, lambda: _oldest_first(storage, n))


def sample(
    path: str | os.PathLike[str],
    n: int = 10,
    *,
    seed: int | None = None,
    snapshot: str | None = None,
    progress: bool = False,
) -> RowsShown:
    """n rows at a path, drawn uniformly, with replacement; `seed` for the same ones again; none that was
    removed. Errors as `head`.
    """
    check_count(n)
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    with open_rows(path, snapshot, progress=progress) as storage:
        return _read(storage, lambda: _drawn(storage, n, generator))


def _as_array(value: Tensor) -> Any:
    """NumPy has no bfloat16."""
    return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()


def _oldest_first(storage: Storage, n: int) -> Tensor:
    lanes = storage.lanes
    slots, capacity, envs = [], lanes.store.lane_capacity, lanes.envs
    for lane, state in enumerate(lanes.states()):
        steps = range(state["first"], min(state["published"], state["first"] + n))
        slots += [(lane * capacity + step % capacity) * envs + env for step in steps for env in range(envs)]
    return torch.tensor(slots[:n], dtype=torch.int64, device="cpu")


def _drawn(storage: Storage, n: int, generator: torch.Generator) -> Tensor:
    seed = torch.empty(1, dtype=torch.int64, device="cpu").random_(generator=generator)
    slots = storage.lanes.uniform(seed, n)
    return torch.empty(0, dtype=torch.int64, device="cpu") if slots is None else slots


def _read(storage: Storage, choose: Callable[[], Tensor]) -> RowsShown:
    """The rows that `choose` names; others where a writer overwrote some of them before they were read."""
    for _ in range(_TRIES):
        slots = choose()
        if not len(slots):
            return RowsShown(slots, [])
        rows = storage.read(slots)
        if rows.overwritten is None and rows.absent is None:
            removed = tuple(storage.lanes.store.removed(slots) or ())
            return RowsShown(slots, rows.batch, removed)
    raise StorageInUseError("the rows are overwritten faster than they are read; try again")
