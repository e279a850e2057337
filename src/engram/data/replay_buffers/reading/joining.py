"""How rows of the members of an ensemble become one batch, and what its transforms may be applied to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from engram._arguments import BUILT_IN
from engram.pytree import Key, collate_items, key_path, repeat_per_step
from engram.store.layout import tensordict_of
from engram.store.packed_rows import PackedRows
from engram.transforms.compose import Compose

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


def put_index(batch: Any, index: Tensor | list[Tensor], ids: Tensor) -> None:
    """Puts each row's index and member at the root of a batch that has keys, under `"index"`."""
    if isinstance(batch, dict):
        batch["index"] = {"index": index, "buffer_ids": ids}
    elif isinstance(batch, TensorDictBase) and batch.batch_size[:2] == ids.shape:
        inner = tuple(batch.batch_size[2:])  # of items that are trajectories, or that transforms have added
        if isinstance(index, list):  # of members of different dimensions
            rows = zip(index, ids, strict=True)
            batch.set("index", lazy_stack([_index_entry(at, of_one, inner) for at, of_one in rows]))
            return
        entry = _index_entry(index, ids, inner)
        if type(batch) is TensorDict and batch.device == entry.device and not batch.is_locked:
            batch._tensordict["index"] = entry  # `set` takes longer than the whole draw
        else:
            batch.set("index", entry)


def _index_entry(index: Tensor, ids: Tensor, inner: tuple[int, ...]) -> TensorDict:
    if inner:
        lead = ids.ndim
        index, ids = repeat_per_step(index, lead, inner), repeat_per_step(ids, lead, inner)
    return tensordict_of({"index": index, "buffer_ids": ids}, ids.shape)


def stack_batches(batches: list[Any]) -> Any:
    """The batches of several members as one: stacked; lazily where their keys or shapes differ."""
    if not isinstance(batches[0], TensorDictBase):
        return collate_items(batches)
    try:
        return torch.stack(batches)
    except (RuntimeError, KeyError, ValueError, AttributeError):  # a tensor here, a TensorDict there
        if len({batch.device for batch in batches}) > 1:  # one of a list storage has none
            batches = [batch.copy().clear_device_() for batch in batches]
        return lazy_stack(batches)


def joint_rows(storages: list[Storage]) -> list[PackedRows] | None:
    """The rows of storages, where they can be read into one batch; None: they cannot."""
    joint = [rows for storage in storages if (rows := storage.native.read) is not None]
    return joint if len(joint) == len(storages) and all(map(joint[0].same_rows, joint)) else None


def joint_transform(storage: Storage, transforms: Sequence[Compose]) -> Compose | None:
    """What may be applied to the batch of all members at once; None: each member's part is changed by itself.

    It is the same for all members, of which each has the same transforms or ones that do the same, and does the same to
    a row in any batch. What depends on the other rows of a batch (statistics, random numbers), or is a user's own, is
    not.

    Args:
        storage: of one of the members, for the shapes of its rows.
        transforms: of each member.
    """
    first, *others = (transform.transforms for transform in transforms)
    for other in others:
        if len(other) != len(first):
            return None
        for a, b in zip(first, other, strict=True):
            if a is not b and not (type(a) in BUILT_IN and a.does_the_same(b)):
                return None

    def row_ndim(key: Key) -> int | None:
        leaf = storage.leaf(key_path(key))
        return None if leaf is None else len(leaf.shape)

    return transforms[0] if transforms[0].acts_by_row(row_ndim) else None


def transform_parts(whole: Any, parts: list[Any], transforms: Sequence[Callable[[Any], Any]]) -> Any:
    """The whole batch, each part of which goes through its transform.

    Parts lie in the memory of the whole: what a transform left where it was, or changed in place, is in its place.
    """
    if type(whole) is not TensorDict:
        return stack_batches([change(part) for change, part in zip(transforms, parts, strict=True)])
    before = [_entries(part) for part in parts]
    after = [change(part) for change, part in zip(transforms, parts, strict=True)]
    fits = all(type(part) is TensorDict and part.batch_size == whole.batch_size[1:] for part in after)
    try:
        if fits and _rejoin(whole, before, after):
            return whole
    except (RuntimeError, KeyError, TypeError):  # shapes that differ
        pass
    return stack_batches(after)


def _entries(part: TensorDict) -> dict[str, Any]:
    """The entries of a TensorDict and of those in it, as they are now."""
    entries = dict(part._tensordict)
    for key, value in part._tensordict.items():
        if type(value) is TensorDict:
            entries[key] = _entries(value)
    return entries


def _rejoin(whole: TensorDict, before: list[dict[str, Any]], after: list[Any]) -> bool:
    """Brings a batch to what its parts have become; False where they cannot be one batch."""
    entries = [part._tensordict for part in after]
    keys, mine = entries[0].keys(), whole._tensordict
    if any(other.keys() != keys for other in entries[1:]):
        return False
    for key in [key for key in mine if key not in keys]:
        del mine[key]
    pairs = list(zip(entries, before, strict=True))
    for key, first in entries[0].items():
        nested = type(first) is TensorDict
        if not nested and key in mine:
            for one, old in pairs:
                if one[key] is not old.get(key):
                    break
            else:
                continue  # as the rows were read, in the memory of the whole
        values: list[Any] = [one[key] for one in entries]
        was: list[Any] = [old.get(key) for old in before]
        if nested and type(mine.get(key)) is TensorDict and all(type(old) is dict for old in was):
            if not (all(type(v) is TensorDict for v in values) and _rejoin(mine[key], was, values)):
                return False
        elif len({isinstance(v, TensorDictBase) for v in values}) > 1:
            return False
        else:
            mine[key] = torch.stack(values)
    return True
