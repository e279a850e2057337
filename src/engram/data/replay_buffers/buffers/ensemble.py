"""Several buffers that are sampled together: how their rows become one batch, and the buffer that they make up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor
from typing_extensions import Never

from engram._advice import advised
from engram.data.replay_buffers.buffers.buffer import ReplayBuffer, shown_buffer
from engram.data.replay_buffers.buffers.parts import BufferParts, PartSettings
from engram.data.replay_buffers.buffers.stats import BufferStats
from engram.data.replay_buffers.reading.reader import BatchReader
from engram.data.replay_buffers.samplers.base import plan_of
from engram.data.replay_buffers.samplers.ensemble import SamplerEnsemble
from engram.data.replay_buffers.storages.ensemble import StorageEnsemble
from engram.data.replay_buffers.writers.ensemble import WriterEnsemble
from engram.transforms.base import Transform
from engram.transforms.compose import Compose
from engram.transforms.roles import Role, warn_if_idle


@advised
class ReplayBufferEnsemble(ReplayBuffer):
    """Several buffers, sampled together: a batch of 10 from two of them is `[2, 5]`.

    Each member's rows go through its own transform, then the batch through the common one. Members whose keys differ
    are stacked lazily. `info["buffer_ids"]` (int64 [members, rows]) says which member each row came from,
    `info["index"]` where it is there; a TensorDict has both at its root, in a TensorDict `"index"`, whatever buffers
    the members are: `batch["index", "buffer_ids"]`. Data are written to the members: `rb[0].extend(...)`. Parts of
    members that are exchanged later belong to them alone: exchange them here, too.

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
        members = _members(rbs, storages, samplers, writers, batch_size)
        if collate_fns is not None and len(collate_fns) != len(members):
            raise ValueError(f"{len(members)} members, {len(collate_fns)} collate_fns; give one for each")
        for name in ("storage", "sampler", "writer", "shared", "dim_extend", "rate_limiter"):
            if name in kwargs:
                raise TypeError(f"{name} is the members'; an ensemble takes no {name}")
        self._members = members
        no_functions: list[Callable[[Any], Any] | None] = [None] * len(members)
        self._collate_fns = no_functions if collate_fns is None else list(collate_fns)
        if isinstance(samplers, SamplerEnsemble):
            if p is not None or sample_from_all or num_buffer_sampled is not None:
                raise ValueError("a SamplerEnsemble says itself how members are drawn; leave the settings to it")
            sampler = samplers
        else:
            sampler = SamplerEnsemble(
                *(rb._sampler for rb in members), p=p, sample_from_all=sample_from_all,
                num_buffer_sampled=num_buffer_sampled,
            )  # fmt: skip
        if batch_size is not None:
            sampler.check_batch_size(batch_size)
        super().__init__(
            storage=StorageEnsemble(*(rb.storage for rb in members), transforms=[rb.transform for rb in members]),
            sampler=sampler,
            writer=WriterEnsemble(*(rb._writer for rb in members)),
            transform=transform,
            batch_size=batch_size,
            collate_fn=collate_fn,
            **kwargs,
        )

    def _check_transform(self, transform: Transform) -> None:
        if transform.changes_writes():
            raise TypeError(
                f"{transform.kind} changes what is written, and nothing is written through an ensemble: give it to the "
                "members; for reading only, give the ensemble a callable, or one that names in_keys and no in_keys_inv"
            )
        warn_if_idle(transform, Role.READING, "in an ensemble")

    def _join_parts(self) -> BufferParts:
        parts: tuple[Any, Any, Any] = self._storage, self._sampler, self._writer
        kinds: tuple[type[Any], ...] = StorageEnsemble, SamplerEnsemble, WriterEnsemble
        for part, kind in zip(parts, kinds, strict=True):
            if not isinstance(part, kind) or len(part) != len(self._members):
                raise ValueError(
                    f"an ensemble of {len(self._members)} takes a {kind.__name__} of as many, got {part!r:.80}"
                )
        settings = self._part_settings()
        return BufferParts(
            *parts, self._transform, self._generator, settings, self._members,
            functools.partial(_reader, *parts[:2], self._transform, settings, self._members, self._collate_fns),
        )  # fmt: skip

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

    def stats(self) -> BufferStats:
        """The sums over the members; `draws` are batches of the ensemble."""
        members = [rb.stats() for rb in self._members]
        capacities, episodes = [one.capacity for one in members], [one.episodes for one in members]
        return BufferStats(
            rows=sum(one.rows for one in members),
            bytes=sum(one.bytes for one in members),
            capacity=None if None in capacities else sum(n or 0 for n in capacities),
            writes=sum(one.writes for one in members),
            draws=self._handed_out.batches,
            episodes=None if None in episodes else sum(n or 0 for n in episodes),
            removed=sum(one.removed for one in members),
            samples=sum(one.samples or 0 for one in members)
            if any(one.samples is not None for one in members)
            else None,
            waited_insert_s=sum(one.waited_insert_s for one in members),
            waited_sample_s=sum(one.waited_sample_s for one in members),
        )

    def empty(self, empty_write_count: bool = True) -> None:
        """Empties every member."""
        self._writer.check_mutable("empty")
        with self._parts.undisturbed(), self._storage.access.replacing("empty"):
            for rb in self._members:
                rb.empty(empty_write_count)
            self._transform.empty()

    # ---- not here ----
    @property
    def rate_limiter(self) -> None:
        """None: each member has its own, which counts, and holds, what is drawn from it."""

    @rate_limiter.setter
    def rate_limiter(self, limiter: Any) -> NoReturn:
        raise TypeError("rate_limiter is the members'; an ensemble takes none: rb[i].rate_limiter = ...")

    def add(self, data: Any, *others: Never, timeout: float | None = None) -> NoReturn:
        """An error: write to a member."""
        raise self._refusal("add(...)")

    def extend(
        self, data: Any, *others: Never, update_priority: bool | None = None, timeout: float | None = None
    ) -> NoReturn:
        """An error: write to a member."""
        raise self._refusal("extend(...)")

    def flush_transforms(self) -> NoReturn:
        """An error: transforms of members write to these."""
        raise self._refusal("flush_transforms()")

    def __setitem__(self, index: Any, items: Any) -> NoReturn:
        raise self._refusal("[...] = ...")

    def update_if_present(self, **records: Any) -> NoReturn:
        """An error: write to a member."""
        raise self._refusal("update_if_present(...)")

    def remove(self, index: Any, generation: Any = None) -> NoReturn:
        """An error: remove rows of a member."""
        raise self._refusal("remove(...)")

    @staticmethod
    def _refusal(operation: str) -> RuntimeError:
        dot = "" if operation.startswith("[") else "."
        return RuntimeError(f"an ensemble is not written to: write to a member, as rb[0]{dot}{operation}")

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

    def update_tensordict_priority(self, data: Any) -> None:
        """Sets the priorities of a batch's rows, of members that are TensorDict buffers, from `data[priority_key]`.

        For samplers without priorities there is nothing to do, whatever keys the batch has.

        Raises:
            KeyError: the batch has no such key, or no `"index"` with `"index"` and `"buffer_ids"`.
        """
        if not self._parts.plan.takes_updates:
            return
        key = next((rb.priority_key for rb in self._members if hasattr(rb, "priority_key")), "td_error")
        for name in (key, "index"):
            if name not in data.keys():  # noqa: SIM118 -- a TensorDict iterates over rows
                raise KeyError(f"the batch has no {name!r}; its keys are {sorted(map(str, data.keys()))}")
        self.update_priority(data["index"], data.get(key), data.get("generation", None))

    def __repr__(self) -> str:
        return shown_buffer(
            type(self).__name__,
            {
                "storages": self._storage,
                "samplers": self._sampler,
                "writers": self._writer,
                "batch_size": self._batch_size,
                "transform": self._transform,
                "collate_fn": self._collate_fn,
            },
        )


def _reader(
    storage: StorageEnsemble,
    sampler: SamplerEnsemble,
    transform: Compose,
    settings: PartSettings,
    rbs: list[ReplayBuffer],
    collate_fns: list[Callable[[Any], Any] | None],
) -> BatchReader:
    """What reads batches of several buffers."""
    parts = zip(rbs, storage.storages, sampler.members, collate_fns, strict=True)
    members = [rb._parts.member(rows, draws, rb.transform, collate) for rb, rows, draws, collate in parts]
    return BatchReader(
        members, transform, chooser=sampler, chooses_natively=plan_of(sampler, storage).takes_lock,
        collate_fn=settings.collate_fn, pin_memory=settings.pin_memory,
    )  # fmt: skip


def _members(
    rbs: tuple[Any, ...], storages: Any, samplers: Any, writers: Any, batch_size: int | None
) -> list[ReplayBuffer]:
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
    samplers = samplers.members if isinstance(samplers, SamplerEnsemble) else list(samplers)
    writers = writers.writers if isinstance(writers, WriterEnsemble) else list(writers)
    if not len(storages) == len(samplers) == len(writers):
        raise ValueError(
            f"{len(storages)} storages, {len(samplers)} samplers and {len(writers)} writers; give as many of each"
        )
    parts = zip(storages, samplers, writers, transforms or [None] * len(storages), strict=True)
    part = None if batch_size is None else max(1, batch_size // len(storages))  # samplers may need to know it
    return [ReplayBuffer(storage=s, sampler=d, writer=w, transform=t, batch_size=part) for s, d, w, t in parts]


__all__ = ["ReplayBufferEnsemble"]
