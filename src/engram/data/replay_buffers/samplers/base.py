"""Which slots to read."""

from __future__ import annotations

import abc
import copy
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram._system import drawing, fork_registry
from engram.store.indexing import to_slots

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage

Index = Tensor | tuple[Tensor, ...]

EMPTY = "Cannot sample from an empty storage."


class EpochInfo(dict[str, Any]):
    """What is said of a batch that is of an epoch: as any info, and which epoch it is (a number in this process).

    Rows of it that are overwritten before they are read are drawn anew from the same epoch or not at all: from another
    one a row could come that was in this one already.
    """

    numbers = itertools.count()
    epoch: int | None = None


class Sampler(abc.ABC):
    """Chooses which stored steps a batch is made of.

    A sampler of your own is a class with `sample(storage, batch_size) -> (index, info)`.

    Draws come from torch's global generator, or from the buffer's own where it has one.
    """

    def __init__(self) -> None:
        #: Held by whoever draws, changes what decides the draws, or reads it. Taken before a storage's mutex.
        self.lock = threading.RLock()
        _live.add(self)
        self._generator: torch.Generator | None = None
        self._seed = torch.empty(1, dtype=torch.int64)
        # While a view of it lives, `random_` releases the GIL once instead of four times (torch 2.13).
        self._seed_view = self._seed.view(1)

    @abc.abstractmethod
    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Slots to read: int64 [batch_size] (a tuple (time, strand) of such with ndim=2), and what there is to say.

        Raises:
            RuntimeError: the storage is empty.
        """

    def most_rows(self, storage: Storage, batch_size: int) -> int:
        """The most rows that a batch of this size can have: asked before a huge one is drawn."""
        return batch_size

    def redraw(self, storage: Storage, slots: Tensor, info: dict[str, Any], places: list[int]) -> Tensor:
        """Other rows for some places of a batch, whose rows were overwritten while they were read.

        Args:
            slots: int64 [n], what was drawn.
            info: what `sample` said of it; what it says of these places is changed too.
            places: positions in the batch.

        Returns:
            the slots to read instead, int64 [n].
        """
        return redrawn(self, storage, slots, info, places)

    def replaced(self, storage: Storage, slots: Tensor, info: dict[str, Any]) -> list[int] | None:
        """Positions in a batch that was just read whose slots may hold other rows than those that were drawn.

        For samplers to whom it matters which rows these are; None: there are none, or it does not matter.
        """
        return None

    def finish(self, batch: Any, info: dict[str, Any]) -> Any:
        """The batch as this sampler hands it out, from the rows that were read; `info` is what `sample` said."""
        return batch

    def check_storage(self, storage: Storage) -> None:
        """Called when a buffer puts the two together. ValueError: the sampler cannot be used with this storage."""

    def follow(self, storage: Storage) -> None:
        """Takes in what was written since it last looked: before a state is saved, and after one was loaded."""

    def use_generator(self, generator: torch.Generator | None) -> None:
        """Draws from this generator from now on; None: torch's global one."""
        self._generator = generator

    def draw_seed(self, storage: Storage) -> Tensor:
        """int64 [1] from the generator; the same tensor at every call.

        Raises RuntimeError for an empty storage, before anything is drawn.
        """
        lanes = storage.lanes
        if lanes is None or not (len(lanes) or lanes.any_rows() or len(storage)):
            raise RuntimeError(f"{EMPTY} Add or extend it first.")
        with drawing:
            return self._seed.random_(generator=self._generator)

    def empty(self) -> None:
        """Forgets what was stored."""

    @property
    def ran_out(self) -> bool:
        """Whether an epoch has just ended."""
        return False

    # ---- state ----
    def _decisive(self) -> dict[str, Any]:
        """Settings that decide which rows are drawn. They are saved, and a state is only loaded where they are the
        same; those that say in which form rows are handed out are the constructor's alone.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What must be saved for the draws to go on as they would have."""
        return self._decisive()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
            ValueError: it is that of a sampler with other settings; every difference is listed.
        """
        different = self.differences(state)
        if different:
            raise ValueError("; ".join(different))

    def differences(self, state: dict[str, Any]) -> list[str]:
        """What of a saved state does not fit this sampler."""
        return [
            f"the sampler has {name}={mine!r} here, {state.get(name)!r} there"
            for name, mine in self._decisive().items()
            if name not in state or state[name] != mine
        ]

    def check_state(self, state: dict[str, Any], storage: Storage) -> None:
        """A ValueError where a state without differences cannot be one of this storage, which holds rows; changes
        nothing. Called before the rows are replaced by those that were saved with it.
        """

    def position(self) -> Any:
        """What a draw changes, for `rewind`: taken before every batch that is prepared ahead, so small.

        The caller holds the lock.
        """
        return copy.deepcopy(self.state_dict())  # which may hold tensors that draws change in place

    def rewind(self, position: Any) -> None:
        """Draws again what was drawn since this position."""
        self.load_state_dict(position)

    def __getstate__(self) -> dict[str, Any]:
        # The generator comes with its buffer. Tensors that are sent to another process stay shared with it.
        return {k: v for k, v in self.__dict__.items() if k not in ("lock", "_generator", "_seed")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Sampler.__init__(self)
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def stored_rows(storage: Storage) -> int:
    """How many rows there are, of all environments."""
    lanes = storage.lanes
    return 0 if lanes is None else sum(s["published"] - s["first"] for s in lanes.states()) * lanes.envs


def check_counts(values: Any, least: int = 0) -> None:
    """ValueError where a saved list is none of integers that write numbers and counts can be."""
    if type(values) is not list or not all(type(n) is int and least <= n < 1 << 62 for n in values):
        raise ValueError(f"a saved state has {values!r:.80} where there are counts")


def check_epoch(state: dict[str, Any], *names: str) -> None:
    """ValueError where a saved state holds an epoch that none has made."""
    epoch, _ = state["epoch"], state["ran_out"]
    if epoch is None:
        return
    check_counts([epoch[name] for name in names])
    if type(epoch["key"]) is not int or not 0 <= epoch["key"] < 1 << 64:
        raise ValueError(f"a saved epoch has the key {epoch['key']!r:.80}")


def redrawn(sampler: Any, storage: Storage, slots: Tensor, info: dict[str, Any], places: list[int]) -> Tensor:
    """`Sampler.redraw` for a sampler that draws each row by itself, with an entry a row in its info."""
    slots, n, done = slots.clone(), len(slots), 0
    while done < len(places):  # an epoch's last draw may give fewer
        index, said = sampler.sample(storage, len(places) - done)
        found = to_slots(index, storage.env_shape, storage.max_size or 0)[: len(places) - done]
        at = torch.tensor(places[done : done + len(found)])
        slots[at] = found
        put_rows(info, said, at, n)
        done += len(found)
    return slots


def put_rows(info: dict[str, Any], said: dict[str, Any], at: Tensor, n: int) -> None:
    """Puts what is said of rows that were drawn anew in their places (int64) of what is said of a batch of n."""
    for key, value in said.items():
        old = info.get(key)
        if isinstance(value, Tensor) and isinstance(old, Tensor) and value.ndim and len(old) == n:
            info[key] = old.index_copy(0, at, value[: len(at)])


def position_of(sampler: Any) -> Any:
    """Where a sampler stands; one of a user's own may have a state only, or none."""
    if hasattr(sampler, "position"):
        with lock_of(sampler):
            return sampler.position()
    return copy.deepcopy(sampler.state_dict()) if hasattr(sampler, "state_dict") else None


def go_back(sampler: Any, position: Any) -> None:
    """Puts a sampler where it stood at a position."""
    rewind = getattr(sampler, "rewind", None) or getattr(sampler, "load_state_dict", None)
    if rewind is not None:
        rewind(position)


def lock_of(sampler: Any) -> Any:
    """The lock of a sampler; one of a user's own may have none: a new one."""
    lock = getattr(sampler, "lock", None) if isinstance(sampler, Sampler) else None
    return threading.RLock() if lock is None else lock


def _renew_lock(sampler: Sampler) -> None:
    sampler.lock = threading.RLock()  # a thread of the parent may hold the old one


_live: weakref.WeakSet[Sampler] = fork_registry(_renew_lock)
