"""Writing over stored steps only where they are still the ones that somebody has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram.data.replay_buffers.storages.base import Storage
from engram.pytree import (
    Key,
    KeyPath,
    TreeSpec,
    as_leaf,
    as_path,
    as_tensor,
    clone,
    describe,
    format_key,
    get_entry,
    has_batch_size,
    has_keys,
    key_path,
    leaf_keys,
    select_rows,
    set_entry,
    unflatten,
    unstack,
)
from engram.store.indexing import last_of_each, stored_generations
from engram.store.rows import TableRows


class UpdateResult(NamedTuple):
    """What `update_if_present` did with each record: it is in exactly one of the three masks.

    Attributes:
        applied: the number of records that were written.
        updated: bool [n], which they are.
        stale: bool [n], whose step was overwritten, removed or forgotten since its generation was read: nothing was
            written.
        rejected: bool [n], whose step is still there and has this version or a newer one: nothing was written.

    Example:
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictRoundRobinWriter())
        >>> index = rb.extend(TensorDict({"value": torch.zeros(3)}, [3]))
        >>> generation = rb.writer.generations_of(index)
        >>> _ = rb.extend(TensorDict({"value": torch.ones(1)}, [1]))  # over the first of them
        >>> result = rb.update_if_present(index=index, generation=generation, patch={"value": torch.full((3,), 7.0)})
        >>> result.applied, result.stale.tolist(), rb[:]["value"].tolist()
        (2, [True, False, False], [1.0, 7.0, 7.0])
    """

    applied: int
    updated: Tensor
    stale: Tensor
    rejected: Tensor

    @property
    def updated_count(self) -> int:
        """The number of records that were written, as `applied`."""
        return self.applied

    @property
    def stale_count(self) -> int:
        """The number of records whose step is not there any more."""
        return int(self.stale.sum())

    @property
    def version_rejected(self) -> Tensor:
        """bool [n], as `rejected`."""
        return self.rejected

    @property
    def version_rejected_count(self) -> int:
        """The number of records that came with a version that is not new enough."""
        return int(self.rejected.sum())


class Version(NamedTuple):
    """Versions of the records: the leaf that holds them, one for each record, and whether equal ones are too old."""

    path: KeyPath
    values: Tensor
    require_newer: bool


def as_patch(patch: Any) -> Any:
    """A patch whose keys may be tuples (`{("next", "reward"): ...}`) as nested dicts; others as they are."""
    if has_batch_size(patch) or not isinstance(patch, Mapping):
        return patch
    if type(patch) is dict and not any(isinstance(key, tuple) for key in patch):
        return patch
    nested: dict[Any, Any] = {}
    for key, value in patch.items():
        set_entry(nested, as_path(key), value)
    return nested


def as_version(version_key: Key | None, version: Any, require_newer: bool, patch: Any, n: int) -> Version | None:
    """The versions of n records; None where none was given.

    Raises:
        ValueError: a key without a version or the reverse, another number of versions, or the key is in the patch.
    """
    if (version_key is None) != (version is None):
        raise ValueError("version_key and version must be given together; nothing was written")
    if version_key is None:
        return None
    path = as_path(version_key, "version_key")
    if get_entry(patch, path) is not None:
        raise ValueError(f"version_key {format_key(path)} may not be in the patch: each record gets its version there")
    values = as_tensor(np.asarray(version) if isinstance(version, list | tuple) else version, path).reshape(-1)
    if len(values) not in (1, n):
        raise ValueError(f"version is one number or one for each of the {n} records, got {len(values)}")
    if values.dtype.is_complex:
        raise ValueError(f"versions are numbers with an order, got {values.dtype}")
    return Version(path, values.expand(n), require_newer)


def write_if_present(
    storage: Storage,
    slots: Tensor,
    generation: Tensor,
    patch: Any,
    version: Version | None,
    index_key: str | None,
) -> UpdateResult:
    """Writes the entries of a patch over the rows that still have these generations; others, and removed ones, stay.

    The caller uses the storage exclusively. Records of one slot act as if they came one after the other.

    Raises:
        KeyError: the rows have no such entry.
        ValueError, TypeError: an entry of the patch does not fit the rows. Nothing was written.
    """
    n, access = len(slots), storage.access
    source: Storage | TableRows = storage if access.writes_as_read else access.table.rows
    change = _ItemPatch(patch, n) if access.item_reader is not None else _RowPatch(source, patch, n, index_key)
    present = (stored_generations(storage.lanes, slots) == generation) & (generation >= 0)
    if (lanes := storage.lanes) is not None and (removed := lanes.store.removed(slots.clamp(min=0))):
        present[removed] = False
    updated = present if version is None else present & _new_enough(source, slots, present, version)
    chosen = updated.nonzero().flatten()
    if (last := last_of_each(slots[chosen])) is not None:
        chosen = chosen[last]
    if len(chosen):
        # A patch of whole rows needs none that are stored, unless these keep what it does not have.
        stored = source.read(slots[chosen]).batch if version is not None or not change.is_whole else None
        rows = change.applied(stored, chosen)
        rows = rows if version is None else _with_versions(rows, version, chosen)
        kept: Mapping[int, frozenset[KeyPath]] = {}
        if access.writes_as_read and not change.is_whole:
            also = set[KeyPath]() if version is None else {version.path}
            kept = kept_entries(slots[chosen], stored, 1, [paths | also for paths in change.paths(chosen)])
        with access.keeping(kept):
            storage.overwrite(slots[chosen], rows, index_key)
    return UpdateResult(int(updated.sum()), updated, ~present, present & ~updated)


class _RowPatch:
    """A patch for a storage whose rows all have one form: some of their entries, or whole rows of any form.

    Args:
        n: the number of records.
        index_key: an entry that the storage sets itself.

    Raises:
        KeyError, ValueError, TypeError: an entry is not one of the rows, or does not fit.
    """

    def __init__(self, storage: Storage | TableRows, patch: Any, n: int, index_key: str | None) -> None:
        self._patch, self._n, self._entries = patch, n, dict[KeyPath, Tensor]()
        self.is_whole = True
        if not has_keys(patch):
            return
        root, entries = describe(patch, 1)
        self._entries = {path: _checked_entry(storage, path, value, n) for path, value in entries}
        layout = storage.layout
        self.is_whole = (
            layout is not None
            and root.kind == layout.root.kind
            and {*layout.paths} - {(index_key,)} <= self._entries.keys()
        )
        if not self.is_whole and _has_constants(root):
            raise TypeError("a value that is no tensor is the same in all steps: a patch of some entries has none")

    def paths(self, positions: Tensor) -> Sequence[Set[KeyPath]]:
        """The entries that the records at these positions change."""
        return [self._entries.keys()] * len(positions)

    def applied(self, stored: Any, positions: Tensor) -> Any:
        """The rows to write for the records at these positions."""
        if self.is_whole:
            mask = torch.zeros(self._n, dtype=torch.bool, device="cpu")
            mask[positions] = True
            return select_rows(self._patch, mask)
        if isinstance(stored, list):
            return _ItemPatch(self._patch, self._n).applied(stored, positions)
        root, entries = describe(stored, 1)
        leaves = [
            self._entries[path][positions].to(value.device) if path in self._entries else value
            for path, value in entries
        ]
        return unflatten(root, leaves, (len(positions),), stored.device if has_batch_size(stored) else None)


class _ItemPatch:
    """A patch for a storage of items: entries of each one that has keys; of others whole items."""

    def __init__(self, patch: Any, n: int) -> None:
        self._items = unstack(patch, 0)
        if len(self._items) != n:
            raise ValueError(f"{n} steps are indexed, the patch has {len(self._items)}; nothing was written")
        self.is_whole = not any(has_keys(item) for item in self._items)

    def paths(self, positions: Tensor) -> Sequence[Set[KeyPath]]:
        """The entries that the records at these positions change."""
        items = [self._items[k] for k in positions.tolist()]
        return [set(map(key_path, leaf_keys(item))) if has_keys(item) else set[KeyPath]() for item in items]

    def applied(self, stored: Any, positions: Tensor) -> list[Any]:
        """The items to write for the records at these positions."""
        items = [self._items[k] for k in positions.tolist()]
        if self.is_whole:
            return items
        return [_item_with(old, new) if has_keys(new) else new for old, new in zip(stored, items, strict=True)]


def kept_entries(
    slots: Tensor, read: Any, batch_dims: int, changed: Sequence[Set[KeyPath]]
) -> Mapping[int, frozenset[KeyPath]]:
    """The entries of rows that stay as they are, by slot: those of the rows as they were read, but for what is changed.

    Args:
        read: the rows, a batch or a list of items.
        changed: the paths of what is changed, of each row.
    """
    if not len(slots):
        return {}
    if isinstance(read, list):
        each = [set(map(key_path, leaf_keys(item))) if has_keys(item) else set[KeyPath]() for item in read]
        return {slot: frozenset(own - new) for slot, own, new in zip(slots.tolist(), each, changed, strict=True)}
    paths = frozenset(path for path, _ in describe(read, batch_dims)[1])
    return dict.fromkeys(slots.tolist(), paths - changed[0])


def _checked_entry(storage: Storage | TableRows, path: KeyPath, value: Any, n: int) -> Tensor:
    leaf, tensor = storage.leaf(path), as_tensor(value, path)
    if leaf is None:
        raise KeyError(f"the stored steps have no {format_key(path)}; a patch changes entries that are there")
    if tuple(tensor.shape) != (n, *leaf.shape):
        raise ValueError(
            f"{format_key(path)} of the patch has shape {list(tensor.shape)}; for {n} records it is "
            f"{[n, *leaf.shape]}. Nothing was written"
        )
    if tensor.dtype != leaf.dtype:
        raise ValueError(f"{format_key(path)} of the patch is {tensor.dtype}, stored is {leaf.dtype}; convert it")
    return tensor


def _has_constants(form: TreeSpec) -> bool:
    return form.kind == "constant" or any(_has_constants(child) for child in form.children)


def _item_with(item: Any, entries: Any) -> Any:
    """A copy of an item with these entries in the place of its own."""
    if not has_keys(item):
        raise KeyError(f"a stored item is a {type(item).__name__}, which has no entries that a patch could change")
    changed = clone(item)
    for key in leaf_keys(entries):
        old, new = get_entry(item, key), get_entry(entries, key)
        if old is None:
            raise KeyError(f"a stored item has no {format_key(key_path(key))}; a patch changes entries that are there")
        if isinstance(old, Tensor) and (
            not isinstance(new, Tensor) or new.shape != old.shape or new.dtype != old.dtype
        ):
            given = f"{new.dtype} {list(new.shape)}" if isinstance(new, Tensor | np.ndarray) else type(new).__name__
            raise ValueError(
                f"{format_key(key_path(key))} of a stored item is {old.dtype} {list(old.shape)}, of the patch {given}; "
                "nothing was written"
            )
        set_entry(changed, key, clone(new))
    return changed


# ---- versions ----
def _new_enough(storage: Storage | TableRows, slots: Tensor, present: Tensor, version: Version) -> Tensor:
    """bool [n]: whose version is not older (newer, where that is required) than that of the step as it is by then."""
    accepted = torch.zeros(len(slots), dtype=torch.bool, device="cpu")
    positions = present.nonzero().flatten()
    if not len(positions):
        return accepted
    rows = storage.read(slots[positions]).batch
    stored = [_version_of(row, version.path) for row in (rows if isinstance(rows, list) else unstack(rows, 0))]
    newest: dict[int, Any] = {}
    for k, old in zip(positions.tolist(), stored, strict=True):
        slot, new = int(slots[k]), version.values[k].item()
        old = newest.get(slot, old)
        if new > old or (new == old and not version.require_newer):
            accepted[k] = True
            newest[slot] = new
    return accepted


def _version_of(row: Any, path: KeyPath) -> Any:
    value = get_entry(row, path) if has_keys(row) else None
    if value is None:
        raise KeyError(f"a stored step has no {format_key(path)}, where its version should be")
    tensor = as_tensor(value.cpu() if isinstance(value, Tensor) else value, path)
    if tensor.numel() != 1 or tensor.dtype.is_complex:
        raise ValueError(f"{format_key(path)} is {tensor.dtype} {list(tensor.shape)} a step; a version is one number")
    return tensor.item()


def _with_versions(rows: Any, version: Version, positions: Tensor) -> Any:
    """Rows that are about to be written, with the versions of the records at these positions."""
    values = version.values[positions]
    for row, value in zip(rows, values, strict=True) if isinstance(rows, list) else [(rows, values)]:
        old = as_leaf(get_entry(row, version.path), version.path)
        new = value.to(old.dtype)
        if not bool((new.to(value.dtype) == value).all()):
            raise ValueError(
                f"{format_key(version.path)} is stored as {old.dtype}, which {value.tolist()} does not fit"
            )
        set_entry(row, version.path, new.reshape(old.shape).to(old.device))
    return rows
