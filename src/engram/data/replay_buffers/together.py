"""The read path of ensembles: rows of several members as one batch."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from engram import _native
from engram.data.replay_buffers.reading import Reader, Ticket, refuse_if_too_many, stack_items
from engram.data.replay_buffers.samplers.base import EpochInfo, lock_of
from engram.data.replay_buffers.samplers.ensemble import SamplerEnsemble, ids_of, joined
from engram.data.replay_buffers.trees import put_of_items
from engram.transforms.compose import Compose

_live: weakref.WeakSet[EnsembleReader] = weakref.WeakSet()

_Drawn = tuple[Any, dict[str, Any], bool]  # what a member's sampler drew and said, and whether its epoch ran out


class EnsembleReader:
    """Turns draws from several members into batches `[members, rows]`, as a Reader does for one buffer.

    Args:
        readers: of the members.
        sampler: draws members.
        transform: what batches go through after the members' transforms.
        collate_fn: makes a batch of the list of the members' batches; they are stacked if None.
    """

    def __init__(
        self,
        readers: list[Reader],
        sampler: SamplerEnsemble,
        transform: Compose,
        collate_fn: Callable[[list[Any]], Any] | None,
        pin_memory: bool,
    ) -> None:
        self.readers = readers
        self.sampler = sampler
        self.transform = transform
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self._attaches = all(reader.attaches for reader in readers)
        # Whether rows of all members can go straight into one batch.
        alike = all(reader.attaches == readers[0].attaches for reader in readers)
        self._at_once = alike and collate_fn is None and all(reader.only_reads for reader in readers)
        self._of_epochs = any(reader.of_epochs for reader in readers)
        self.lock = lock_of(sampler)
        _live.add(self)

    def check_room(self, n: int) -> None:
        """OutOfMemoryError where a batch of n rows cannot be held, before anything is drawn."""
        # Members give equal parts, over the ends of epochs if need be.
        refuse_if_too_many(n, max(reader.row_bytes for reader in self.readers), n)

    def draw(self, n: int) -> Ticket:
        """Asks the sampler for members, and their samplers for rows."""
        with self.lock:
            ids, each = self.sampler.choose(n)
            incarnation = self._incarnation(ids)
            drawn = [_exactly(self.readers[i], each) for i in ids]
        return Ticket(drawn, ids, {}, any(ran_out for _, _, ran_out in drawn), incarnation)  # type: ignore[arg-type]

    def sample(self, n: int, numbers: bool) -> tuple[Any, dict[str, Any]]:
        """A batch of n and what there is to say about it."""
        return self._read_once(n, numbers)[0]

    def next(self, n: int, numbers: bool) -> tuple[Any, bool]:
        """A batch of n, and whether it is the last of an epoch."""
        read, last = self._read_once(n, numbers)
        return read[0], last

    def _read_once(self, n: int, numbers: bool) -> tuple[tuple[Any, dict[str, Any]], bool]:
        """A batch with what there is to say about it; without memory for it epochs go on as `Reader.sample` has it."""
        while True:
            before, after = None, None
            try:
                with self.lock:
                    before = self.sampler.position() if self._of_epochs else None
                    try:
                        ticket = self.draw(n)
                    finally:
                        after = self._draws()
                read = self.fetch(ticket.slots, ticket.index, {}, numbers, ticket.incarnation)
            except MemoryError:
                with self.lock:
                    if before is not None and self._draws() == after:
                        self.sampler.rewind(before)
                raise
            if read is not None:
                return read, ticket.last

    def _draws(self) -> list[int]:
        return [reader.draws for reader in self.readers]

    def _incarnation(self, ids: list[int]) -> list[int]:
        return [self.readers[i].storage.incarnation for i in ids]

    def fetch(
        self, slots: Any, index: Any, info: dict[str, Any], numbers: bool, incarnation: Any
    ) -> tuple[Any, dict[str, Any]] | None:
        """Reads what `draw` gave: its slots are what each member's sampler drew, its index the members.

        None: since then all rows of one of them have been replaced by others.
        """
        drawn: list[_Drawn] = slots
        made = self._read_at_once(drawn, index, numbers) if self._at_once else None
        if made is None:
            made = self._read_one_by_one(drawn, index, numbers, incarnation)
            if made is None:
                return None
        batch, info = made
        if self.transform.transforms:
            batch = self.transform.forward(batch)
        if self._incarnation(index) != incarnation:
            return None
        return (batch.pin_memory() if self.pin_memory else batch), info

    def _read_at_once(self, drawn: list[_Drawn], ids: list[int], numbers: bool) -> tuple[Any, dict[str, Any]] | None:
        """Straight into one batch; None where it takes more than that."""
        readers = [self.readers[i] for i in ids]
        joint = _native.joint_index([one[0] for one in drawn], ids)
        if joint is None:
            return None
        index, buffer_ids = joint
        info = joined([one[1] for one in drawn])
        extra = None
        if self._attaches:
            extra = readers[0].entries(index, info)
            extra["buffer_ids"] = buffer_ids
        others = [reader.storage for reader in readers[1:]]
        shape = tuple(index.shape)
        parts: list[Any] | None = None
        for reader in readers:
            if reader.transform.transforms:
                parts = [r.entries(one[0], one[1]) or None for r, one in zip(readers, drawn, strict=True)]
                break
        read = readers[0].storage.read_with(others, index, shape, extra, numbers, parts)
        if read is None or read[1] is not None or read[2] is not None:
            return None  # rows that are gone are drawn anew by their own member
        for reader, one in zip(readers, drawn, strict=True):
            if reader.replaced(one[0], one[1]) is not None:
                return None
        batch, generation = read[0], read[3]
        if generation is not None:
            info["generation"] = generation.view(shape)
            if extra is not None and readers[0].with_generation:
                put_of_items(batch, "generation", info["generation"], 2)
                for part, of_part in zip(read[4] if parts else [], info["generation"], strict=False):
                    put_of_items(part, "generation", of_part)
        info["index"], info["buffer_ids"] = index, buffer_ids
        if parts is not None:
            batch = _transformed(batch, read[4], [reader.transform for reader in readers])
            if self._attaches:
                _put_ids(batch, buffer_ids)
        return batch, info

    def _read_one_by_one(
        self, drawn: list[_Drawn], ids: list[int], numbers: bool, incarnation: list[int]
    ) -> tuple[Any, dict[str, Any]] | None:
        batches, infos = [], []
        for i, (index, said, _), then in zip(ids, drawn, incarnation, strict=True):
            reader = self.readers[i]
            read = reader.fetch(reader.slots_of(index), index, said, numbers, then)
            if read is None:
                return None
            batch, info = read
            if isinstance(info["index"], tuple):
                info["index"] = torch.stack(info["index"], -1)
            batches.append(batch)
            infos.append(info)
        info = joined(infos)
        info["buffer_ids"] = ids_of(ids, len(infos[0]["index"]))
        if self.collate_fn is not None:
            return self.collate_fn(batches), info
        batch = stack_batches(batches)
        if self._attaches:
            _put_ids(batch, info["buffer_ids"])
        return batch, info


def _put_ids(batch: Any, ids: Tensor) -> None:
    """Puts each row's member into a batch that has a place for it."""
    if isinstance(batch, TensorDictBase) and batch.batch_size[:2] == ids.shape:
        more = batch.batch_size[2:]  # dimensions that transforms have added
        batch.set("buffer_ids", ids.reshape(*ids.shape, *(1 for _ in more)).expand(batch.batch_size) if more else ids)
    elif isinstance(batch, dict):
        batch["buffer_ids"] = ids


def stack_batches(batches: list[Any]) -> Any:
    """The batches of several members as one: stacked; lazily where their keys or shapes differ."""
    if not isinstance(batches[0], TensorDictBase):
        return stack_items(batches)
    try:
        return torch.stack(batches)
    except (RuntimeError, KeyError, ValueError, AttributeError):  # a tensor here, a TensorDict there
        if len({batch.device for batch in batches}) > 1:  # one of a list storage has none
            batches = [batch.copy().clear_device_() for batch in batches]
        return lazy_stack(batches)


def _transformed(whole: Any, parts: list[Any], transforms: list[Compose]) -> Any:
    """The whole batch after each part of it has gone through its transform.

    Parts lie in the memory of the whole: what a transform left where it was, or changed in place, is in its place.
    """
    if type(whole) is not TensorDict:
        return stack_batches([t.forward(part) for t, part in zip(transforms, parts, strict=True)])
    before = [_held(part) for part in parts]
    after = [t.forward(part) for t, part in zip(transforms, parts, strict=True)]
    fits = all(type(part) is TensorDict and part.batch_size == whole.batch_size[1:] for part in after)
    try:
        if fits and _rejoin(whole, before, after):
            return whole
    except (RuntimeError, KeyError, TypeError):  # shapes that differ
        pass
    return stack_batches(after)


def _held(part: TensorDict) -> dict[str, Any]:
    """The entries of a TensorDict and of those in it, as they are now."""
    held = dict(part._tensordict)
    for key, value in part._tensordict.items():
        if type(value) is TensorDict:
            held[key] = _held(value)
    return held


def _rejoin(whole: TensorDict, before: list[dict[str, Any]], after: list[Any]) -> bool:
    """Brings a batch to what its parts have become; False where they cannot be one batch."""
    entries = [part._tensordict for part in after]
    keys, mine = entries[0].keys(), whole._tensordict
    if any(other.keys() != keys for other in entries[1:]):
        return False
    for key in [key for key in mine if key not in keys and key != "buffer_ids"]:
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


def _exactly(reader: Reader, n: int) -> _Drawn:
    """A draw of n rows, over the end of an epoch if need be: members give equal parts of a batch."""
    with reader.lock:
        reader.draws += 1
        sampler, storage = reader.sampler, reader.storage
        index, info = sampler.sample(storage, n)
        if isinstance(info, EpochInfo):
            info = dict(info)  # of no epoch: a row that is lost is replaced, by one of the next epoch if need be
        ran_out = getattr(sampler, "ran_out", False)
        while not info and _rows(index) < n:
            more, info = sampler.sample(storage, n - _rows(index))
            ran_out = ran_out or getattr(sampler, "ran_out", False)
            index = _both(index, more)
    return index, info, ran_out


def _both(index: Any, more: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(torch.cat(pair) for pair in zip(index, more, strict=True))
    return torch.cat([index, more])


def _rows(index: Any) -> int:
    one = index[0] if isinstance(index, tuple) else index
    return one.numel() if isinstance(one, Tensor) else len(one)


def _after_fork() -> None:
    for reader in list(_live):
        reader.lock = lock_of(reader.sampler)


os.register_at_fork(after_in_child=_after_fork)  # after that of the samplers, which are imported here
