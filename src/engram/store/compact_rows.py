"""Packed rows with each observation stored once, beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

import engram._native as _native
from engram import pytree
from engram.errors import StorageError
from engram.store.compact import NO_REPLACING
from engram.store.lanes import Lanes
from engram.store.layout import StoredLayout
from engram.store.observation_shares import ObservationShares
from engram.store.packed_rows import PackedRows
from engram.store.rows import Rows


class CompactRows(PackedRows):
    """Packed rows without the observations that are stored once.

    Where others see a row, it is whole.
    """

    def __init__(
        self, lanes: Lanes, stored: StoredLayout, mapped: bool, env_shape: tuple[int, ...] = (), ndim: int = 1
    ) -> None:
        super().__init__(lanes, stored.logical, mapped, env_shape, ndim, stored=stored)
        self._stored_once = {path for pair in stored.following.items() for path in pair}

    @property
    def nbytes(self) -> int:
        return self._store.total_bytes + self._store.observation_bytes

    def with_sequences(self) -> NoReturn:
        raise StorageError(NO_REPLACING)

    def observation_shares(self) -> ObservationShares:
        assert self.observations is not None
        frames = {pytree.as_key(path): n for path, n in self.observations.frames.items()}
        with self.lanes.mutex:
            return ObservationShares.of(
                self._store, frames, self.observations.n_steps, self.nbytes / self.lanes.capacity
            )

    # ---- rows as bytes ----
    def plan_packed(self, rows: Tensor | np.ndarray[Any, Any]) -> _native.Plan:
        given: Any = rows
        leaves: Any = _native.unpack(self.layout.list_codec, given)
        plan = self.stored.list_codec.check_list(leaves, 1, 0)
        assert plan is not None
        return plan

    def read_packed(self, slots: Tensor, by_leaf: bool = False, sequences: bool = False) -> Rows:
        self.lanes.use()
        leaves, *rest = self._gather(self.stored.raw_leaf_codec, slots, None, None, self.mapped, sequences)
        return Rows(leaves if by_leaf else [self._packed(leaves)], *rest)

    def _packed(self, leaves: list[Tensor]) -> Tensor:
        """Whole rows of the bytes of their leaves: uint8 [n, payload_bytes]."""
        plan = self.layout.raw_leaf_codec.check_list(leaves, 1, 0)
        rows: Tensor = _native.pack(plan, self.layout.payload_bytes)
        return rows

    # ---- what lies in rows is read there; observations are gathered ----
    def read_n_steps(
        self,
        slots: Tensor | np.ndarray[Any, Any],
        discounts: np.ndarray[Any, Any],
        reward: pytree.KeyPath,
        done: pytree.KeyPath,
    ) -> tuple[Tensor, ...] | None:
        if self._stored_once.intersection((reward, done)):
            return None
        return super().read_n_steps(slots, discounts, reward, done)

    def view(self, steps: range | None = None) -> None:
        """None: there is none of observations."""

    # ---- rows that are changed in place ----
    def overwrite_plan(self, slots: Tensor, plan: _native.Plan) -> None:
        replacement = self._store.prepare_overwrite(slots, plan, None, None)
        differs = replacement.differing_leaf()
        if differs is not None:
            raise ValueError(
                f"{pytree.format_key(self.stored.leaf_at(differs).path)} is stored once (compact=), and other rows "
                "have frames of it: it cannot change in stored rows. All other entries can: give the observations as "
                "they are stored. Nothing was written"
            )
        replacement.write()

    def prepare_overwrite(
        self, slots: Tensor, plan: _native.Plan, rows: Tensor, first: int | None
    ) -> Callable[[], None]:
        raise StorageError(NO_REPLACING)

    # ---- whole blocks, for checkpoints ----
    def block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        s = self._store
        times = torch.arange(start, stop, device="cpu") % s.lane_capacity + lane * s.lane_capacity
        slots = times * s.envs + torch.arange(s.envs, device="cpu").unsqueeze(1)
        rows: Any = self.read_packed(slots.reshape(-1)).batch[0]
        block: np.ndarray[Any, Any] = rows.numpy().reshape(s.envs, stop - start, self.layout.payload_bytes)
        return block

    def block_writer(self, bases: list[int]) -> Callable[[int, int, np.ndarray[Any, Any]], None]:
        for lane, base in enumerate(bases):
            self._store.begin_leaves(lane, base)
        return _InOrder(self._store, self.set_block).write

    def set_block(self, lane: int, start: int, rows: np.ndarray[Any, Any]) -> None:
        """Writes packed rows, of a lane in their order."""
        leaves = [rows[..., leaf.offset : leaf.offset + leaf.nbytes] for leaf in self.layout.leaves]
        plan = self.stored.raw_leaf_codec.check_list(leaves, 2, 1)
        if plan is None:
            leaves = [np.ascontiguousarray(leaf) for leaf in leaves]
            plan = self.stored.raw_leaf_codec.check_list(leaves, 2, 1)
        assert plan is not None
        self._store.put_leaves(lane, start, plan)


class _InOrder:
    """Writes the blocks of each lane in the order of their rows, while several threads bring them."""

    def __init__(self, store: _native.Store, write: Callable[[int, int, np.ndarray[Any, Any]], None]) -> None:
        self._store, self._write = store, write
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], np.ndarray[Any, Any]] = {}

    def write(self, lane: int, start: int, rows: np.ndarray[Any, Any]) -> None:
        with self._lock:
            if start != self._store.next_leaves(lane):
                self._waiting[lane, start] = np.array(rows)  # a copy: the caller uses its memory again
                return
            block: np.ndarray[Any, Any] | None = rows
            while block is not None:
                self._write(lane, self._store.next_leaves(lane), block)
                block = self._waiting.pop((lane, self._store.next_leaves(lane)), None)
