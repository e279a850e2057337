"""Several buffers that are sampled together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from engram.data.replay_buffers.buffer import ReplayBuffer
from engram.data.replay_buffers.prefetch import Prefetcher
from engram.data.replay_buffers.samplers.ensemble import SamplerEnsemble
from engram.data.replay_buffers.storages.ensemble import StorageEnsemble
from engram.data.replay_buffers.together import EnsembleReader
from engram.data.replay_buffers.writers.ensemble import WriterEnsemble
from engram.transforms.base import Transform
from engram.transforms.compose import Compose


class ReplayBufferEnsemble(ReplayBuffer):
    """Several buffers, sampled together: a batch of 10 from two of them is `[2, 5]`.

    Each member's rows go through its own transform, then the batch through the common one. Members whose keys differ
    are stacked lazily. `info["buffer_ids"]` (int64 [members, rows]) says which member each row came from; batches of
    TensorDict buffers carry it, too. Data are written to the members: `rb[0].extend(...)`. Parts of members that are
    exchanged later belong to them alone: exchange them here, too.

    Args:
        rbs: the members; or
        storages, samplers, writers: the parts to make members of; a StorageEnsemble brings their transforms.
        transform: what whole batches go through on reading; nothing is written through an ensemble.
        batch_size: rows of a batch, of all members together.
        collate_fn: makes a batch of the list of the members' batches; they are stacked if None.
        collate_fns: for each member, instead of its own.
        p: how likely each member is drawn for a part of the batch, relative to the others.
        sample_from_all: every member gives its part of each batch.
        num_buffer_sampled: how many members are drawn for a batch, with replacement; as many as there are if None.
        generator: draws members and rows; without one, members draw from theirs. Saved with the ensemble, all of them.
        pin_memory, prefetch, checkpointer, track_generations: as ReplayBuffer.

    Raises:
        ValueError: settings that contradict each other; a batch size that does not divide.
        TypeError: a common transform that changes what is written.

    Example:
        >>> small, large = (ReplayBuffer(storage=LazyTensorStorage(10 ** k)) for k in (1, 2))
        >>> _ = small.extend(torch.zeros(5)), large.extend(torch.ones(50))
        >>> rb = ReplayBufferEnsemble(small, large, sample_from_all=True, batch_size=6)
        >>> rb.sample()
        tensor([[0., 0., 0.],
                [1., 1., 1.]])
    """

    def __init__(
        self,
        *rbs: ReplayBuffer,
        storages: StorageEnsemble | Sequence[Any] | None = None,
        samplers: SamplerEnsemble | Sequence[Any] | None = None,
        writers: WriterEnsemble | Sequence[Any] | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        collate_fns: Sequence[Callable[[Any], Any] | None] | None = None,
        p: Sequence[float] | Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        **kwargs: Any,
    ) -> None:
        members = _members(rbs, storages, samplers, writers)
        if collate_fns is not None and len(collate_fns) != len(members):
            raise ValueError(f"{len(members)} members, {len(collate_fns)} collate_fns; give one for each")
        for name in ("storage", "sampler", "writer", "shared", "dim_extend"):
            if name in kwargs:
                raise TypeError(f"{name} is the members'; an ensemble takes no {name}")
        self._members = members
        self._collate_fns = [None] * len(members) if collate_fns is None else list(collate_fns)
        if isinstance(samplers, SamplerEnsemble):
            if p is not None or sample_from_all or num_buffer_sampled is not None:
                raise ValueError("a SamplerEnsemble says itself how members are drawn; leave the settings to it")
            sampler = samplers
        else:
            sampler = SamplerEnsemble(
                *(rb.sampler for rb in members), p=p, sample_from_all=sample_from_all,
                num_buffer_sampled=num_buffer_sampled,
            )  # fmt: skip
        if batch_size is not None:
            sampler.check_batch_size(batch_size)
        super().__init__(
            storage=StorageEnsemble(*(rb.storage for rb in members), transforms=[rb.transform for rb in members]),
            sampler=sampler,
            writer=WriterEnsemble(*(rb.writer for rb in members)),
            transform=transform,
            batch_size=batch_size,
            collate_fn=collate_fn,
            **kwargs,
        )

    def _check_transform(self, transform: Transform) -> None:
        if transform.changes_what_is_written():
            raise TypeError(
                f"{transform.kind} changes what is written, and nothing is written through an ensemble: give it to the "
                "members; for reading only, give the ensemble a callable, or one that names in_keys and no in_keys_inv"
            )

    def _wire(self) -> None:
        self._check_parts()
        self._storage.attach(self)
        self._sampler.use_generator(self._generator)
        parts = zip(self._members, self._storage.storages, self._sampler.samplers, self._collate_fns, strict=True)  # type: ignore[attr-defined]
        readers = [rb.reading(storage, sampler, collate) for rb, storage, sampler, collate in parts]
        self._reader: Any = EnsembleReader(readers, self._sampler, self._transform, self._collate_fn, self._pin_memory)
        self._prefetcher = Prefetcher(self._reader, self._prefetch, self._drawn_from()) if self._prefetch else None

    def _check_parts(self) -> None:
        for part, kind in (
            (self._storage, StorageEnsemble), (self._sampler, SamplerEnsemble), (self._writer, WriterEnsemble)
        ):  # fmt: skip
            if not isinstance(part, kind) or len(part) != len(self._members):
                raise ValueError(
                    f"an ensemble of {len(self._members)} takes a {kind.__name__} of as many, got {part!r:.80}"
                )
        self._sampler.check_storage(self._storage)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for rb in (self, *self._members):
                held.enter_context(rb.paused())
            held.enter_context(self._reader.lock)
            # Members' own, and those of samplers that the ensemble draws with instead; in one order for all ensembles.
            locks = {id(r.lock): r.lock for r in (*self._reader.readers, *(rb._reader for rb in self._members))}
            for which in sorted(locks):
                held.enter_context(locks[which])
            yield

    # ---- members ----
    def __len__(self) -> int:
        """The number of members."""
        return len(self._members)

    def __getitem__(self, index: Any) -> Any:
        """A member; with a tuple `(member, ...)` steps of it.

        Raises:
            IndexError: there is no such member.
        """
        if isinstance(index, tuple) and len(index) > 1:
            return self[index[0]][index[1] if len(index) == 2 else index[1:]]
        if not hasattr(index, "__index__"):
            raise IndexError(f"{index!r:.80} is no member: rb[i] is member i of {len(self)}, rb[i, index] steps of it")
        i = int(index)
        if not -len(self) <= i < len(self):
            raise IndexError(f"there are {len(self)} members; index must be -{len(self)} to {len(self) - 1}, got {i}")
        return self._members[i]

    @property
    def write_count(self) -> int:
        """Steps ever written to the members."""
        return sum(rb.write_count for rb in self._members)

    def empty(self, empty_write_count: bool = True) -> None:
        """Empties every member."""
        self._writer.allow("empty")
        with self._undisturbed(), self._storage.replacing("empty"):
            for rb in self._members:
                rb.empty(empty_write_count)
            self._transform.empty()

    # ---- not here ----
    def add(self, item: Any) -> NoReturn:
        """An error: write to a member."""
        raise self._refusal("add(...)")

    def extend(self, items: Any) -> NoReturn:
        """An error: write to a member."""
        raise self._refusal("extend(...)")

    def flush_transforms(self) -> NoReturn:
        """An error: transforms of members write to these."""
        raise self._refusal("flush_transforms()")

    def __setitem__(self, index: Any, items: Any) -> NoReturn:
        raise self._refusal("[...] = ...")

    def update_if_present(self, index: Any, generation: Any, values: Any) -> NoReturn:
        """An error: write to a member."""
        raise self._refusal("update_if_present(...)")

    @staticmethod
    def _refusal(what: str) -> RuntimeError:
        dot = "" if what.startswith("[") else "."
        return RuntimeError(f"an ensemble is not written to: write to a member, as rb[0]{dot}{what}")

    # ---- priorities ----
    def update_priority(self, index: Any, priority: Any, generation: Any = None, *, buffer_ids: Any = None) -> None:
        """Sets priorities of steps in the members that they came from.

        Args:
            index: the `info` of `sample`, or its `"index"` beside its `buffer_ids`.
            priority: one for each step.
            generation: as in `info`: steps that are gone are skipped.
        """
        self._sampler.update_priority(
            index, priority, generation=generation, storage=self._storage, buffer_ids=buffer_ids
        )

    def mark_update(self, index: Any, *, buffer_ids: Any = None) -> None:
        """Tells the members' samplers that stored steps have changed; arguments as `update_priority`."""
        self._sampler.mark_update(index, storage=self._storage, buffer_ids=buffer_ids)

    def update_tensordict_priority(self, batch: Any) -> None:
        """Sets the priorities of a batch's rows, of members that are TensorDict buffers, from `batch[priority_key]`.

        Raises:
            KeyError: the batch has no such key, or no `"index"` and `"buffer_ids"`.
        """
        key = next((rb.priority_key for rb in self._members if hasattr(rb, "priority_key")), "td_error")
        for name in (key, "index", "buffer_ids"):
            if name not in batch.keys():  # noqa: SIM118 -- a TensorDict iterates over rows
                raise KeyError(f"the batch has no {name!r}; its keys are {sorted(map(str, batch.keys()))}")
        self.update_priority(batch, batch.get(key), batch.get("generation", None))

    # ---- state ----
    def _drawn_from(self) -> list[torch.Generator]:
        own = super()._drawn_from()  # which then goes to the members, too
        return own or [rb.generator for rb in self._members if rb.generator is not None]

    def generator_state(self) -> Any:
        states = [rb.generator_state() for rb in self._members]
        own = super().generator_state()
        return own if all(state is None for state in states) else {"own": own, "members": states}

    def restore_generator(self, state: Any) -> None:
        several = isinstance(state, dict)
        super().restore_generator(state["own"] if several else state)
        for rb, saved in zip(self._members, state["members"] if several else [], strict=several):
            rb.restore_generator(saved)

    def check_generator(self, state: Any) -> None:
        several = isinstance(state, dict)
        super().check_generator(state["own"] if several else state)
        for rb, saved in zip(self._members, state["members"] if several else [], strict=several):
            rb.check_generator(saved)

    @property
    def saved_transform(self) -> Any:
        return _Transforms([self._transform, *(rb.transform for rb in self._members)])

    def __repr__(self) -> str:
        collate = getattr(self._collate_fn, "__name__", self._collate_fn)
        said = {
            "storages": self._storage,
            "samplers": self._sampler,
            "writers": self._writer,
            "batch_size": self._batch_size,
            "transform": self._transform,
            "collate_fn": collate,
        }
        inner = ",\n".join(f"    {k}={v}" for k, v in said.items())
        return f"{type(self).__name__}(\n{inner})"


class _Transforms:
    """The common transform and the members', for saving."""

    def __init__(self, each: list[Compose]) -> None:
        self._each = each

    def state_dict(self) -> dict[str, Any]:
        return {"each": [transform.state_dict() for transform in self._each]}

    def differences(self, state: dict[str, Any]) -> list[str]:
        saved = state.get("each", [])
        if len(saved) != len(self._each):
            return [f"the ensemble has transforms of {len(self._each) - 1} members here, of {len(saved) - 1} there"]
        return [said for mine, one in zip(self._each, saved, strict=True) for said in mine.differences(one)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for transform, saved in zip(self._each, state["each"], strict=True):
            transform.load_state_dict(saved)

    def empty(self) -> None:
        for transform in self._each:
            transform.empty()


def _members(rbs: tuple[Any, ...], storages: Any, samplers: Any, writers: Any) -> list[ReplayBuffer]:
    """The buffers of an ensemble, given or made of parts."""
    given = [storages, samplers, writers]
    if rbs:
        if any(part is not None for part in given):
            raise ValueError("an ensemble is made of buffers, or of storages, samplers and writers; not of both")
        for rb in rbs:
            if not isinstance(rb, ReplayBuffer):
                raise TypeError(f"the members of an ensemble are replay buffers, got a {type(rb).__name__}")
        return list(rbs)
    if any(part is None for part in given):
        raise ValueError("an ensemble needs buffers, or storages, samplers and writers")
    transforms = storages.transforms if isinstance(storages, StorageEnsemble) else None
    storages = storages.storages if isinstance(storages, StorageEnsemble) else list(storages)
    samplers = samplers.samplers if isinstance(samplers, SamplerEnsemble) else list(samplers)
    writers = writers.writers if isinstance(writers, WriterEnsemble) else list(writers)
    if not len(storages) == len(samplers) == len(writers):
        raise ValueError(
            f"{len(storages)} storages, {len(samplers)} samplers and {len(writers)} writers; give as many of each"
        )
    made = zip(storages, samplers, writers, transforms or [None] * len(storages), strict=True)
    return [ReplayBuffer(storage=s, sampler=d, writer=w, transform=t) for s, d, w, t in made]


__all__ = ["ReplayBufferEnsemble"]
