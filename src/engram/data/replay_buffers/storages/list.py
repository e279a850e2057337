"""A storage of any objects."""

from __future__ import annotations

import functools
from typing import Any

import torch

from engram._advice import advised
from engram.data.replay_buffers.state.items import SavedItems
from engram.data.replay_buffers.storages.base import Storage
from engram.specs.tensors import usable_device
from engram.store.items import COPIES, ITEMS_THEMSELVES, ItemCodec, ItemRows
from engram.store.places import Objects, TableSize, checked_max_size
from engram.store.table import Table


@advised
class ListStorage(Storage):
    """Keeps any objects in a list; the default storage of a buffer.

    What it keeps are copies. Tensors, TensorDicts and dicts of tensors that have the form of the first item are kept as
    packed rows: each read makes a new object of them, and the default batch of them is gathered at once. All others,
    and with `copy=False` every item, are kept as objects.

    Args:
        max_size: items that fit; without limit if None.
        copy: if False, the items themselves are kept and handed out, not copies of them: who changes one changes what
            is stored. (With an index that is stored along, it is a shallow copy.)
        device: where the tensors of items are moved to when they are written; they stay where they are if None.
        compilable: accepted, without effect.

    Example:
        >>> storage = ListStorage(10)
        >>> rb = ReplayBuffer(storage=storage, collate_fn=lambda items: items)
        >>> rb.extend(["a", {"b": 1}])
        tensor([0, 1])
        >>> rb[:]
        ['a', {'b': 1}]
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        copy: bool = True,
        device: torch.device | str | None = None,
        checkpointer: Any = None,
        compilable: bool = False,
    ) -> None:
        self.device = usable_device(device, "device")
        arguments = {**({} if copy else {"copy": False}), **({} if device is None else {"device": str(self.device)})}
        self._hold_items(max_size, COPIES if copy else ITEMS_THEMSELVES, checkpointer, arguments, self.device)

    def _hold_items(
        self,
        max_size: int | None,
        codec: ItemCodec,
        checkpointer: Any,
        arguments: dict[str, Any],
        device: torch.device | None = None,
    ) -> None:
        rows, size = ItemRows(checked_max_size(max_size), codec, device), TableSize(max_size, None, 1, None)
        self._hold(Table(size, Objects(arguments), rows), checkpointer, functools.partial(SavedItems, rows=rows))


__all__ = ["ListStorage"]
