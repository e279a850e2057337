"""The parts of a buffer, put together: what draws, reads, writes and prepares batches with them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from engram._arguments import describe
from engram._generator import Generator
from engram.data.replay_buffers.buffers.batch_writer import BatchWriter, GivenPriorities
from engram.data.replay_buffers.buffers.in_place import change_entries
from engram.data.replay_buffers.buffers.queue_waits import QueueWaits
from engram.data.replay_buffers.buffers.rate_limiters import described_limit
from engram.data.replay_buffers.buffers.waiting import Waits, WaitsOfMembers
from engram.data.replay_buffers.reading.prefetch import Prefetcher
from engram.data.replay_buffers.reading.reader import BatchReader, Member
from engram.data.replay_buffers.samplers.base import Sampler, plan_of, user_object
from engram.data.replay_buffers.samplers.ensemble import SamplerEnsemble
from engram.data.replay_buffers.samplers.epochs import check_full_batches
from engram.data.replay_buffers.samplers.queue import QueueSampler
from engram.data.replay_buffers.state.buffers import SavedBuffer
from engram.data.replay_buffers.state.generators import SavedGenerator, SavedGenerators
from engram.data.replay_buffers.state.parts import SavedPart, SavedTransformsOfEach, saved_transforms
from engram.data.replay_buffers.state.plans import has_hooks
from engram.data.replay_buffers.storages.base import Storage, StorageUser
from engram.data.replay_buffers.writers.round_robin import Placing, Writer
from engram.pytree import collate_items
from engram.transforms.compose import Compose, describe_transform

#: From the index and the info of a batch, the entries that it gets at its root.
Entries = Callable[[Any, dict[str, Any]], "dict[str, Any] | None"]


class PartSettings(NamedTuple):
    """How a buffer uses its parts, as its constructor was told.

    Attributes:
        entries: makes what each batch gets at its root; None: nothing.
        priority_key: where priorities are in data that are written; None: data have none.
    """

    batch_size: int | None
    collate_fn: Callable[[Any], Any] | None
    prefetch: int
    dim_extend: int | None
    pin_memory: bool
    track_generations: bool
    reuse_batches: bool
    entries: Entries | None
    priority_key: Any


class BufferParts(StorageUser):
    """The parts of a buffer, and what draws, reads, writes and prepares batches with them.

    Args:
        members: the buffers that an ensemble consists of.
        make_reader: makes what reads batches, when the parts fit; None: a reader of this storage.

    Raises:
        ValueError: the parts do not fit each other.
    """

    def __init__(
        self,
        storage: Storage,
        sampler: Sampler,
        writer: Writer,
        transform: Compose,
        generator: torch.Generator | Generator | None,
        settings: PartSettings,
        members: Sequence[Any] = (),
        make_reader: Callable[[], BatchReader] | None = None,
    ) -> None:
        sampler.check_storage(storage)
        self.plan = plan = plan_of(sampler, storage)
        if plan.full_batches:
            check_full_batches(settings.batch_size, storage)
        self.storage, self.sampler, self.writer, self.transform = storage, sampler, writer, transform
        self.generator, self.settings, self._members = generator, settings, members
        storage.attach(self)
        storage.access.table.requires_index = settings.entries is not None
        storage.access.table.horizon = transform.stream.horizon
        if not members:  # else they have writers, which write to their storages
            writer.register_storage(storage)
            if settings.track_generations:
                writer.tracks_generations = True
        #: Whether batches say the generation of each row.
        self.tracks_generations = settings.track_generations or writer.tracks_generations
        sampler.use_generator(generator)
        #: The dimension of a batch that is time.
        self.time_dim = storage.ndim - 1 if settings.dim_extend is None else settings.dim_extend
        priorities = None
        if settings.priority_key is not None and plan.takes_priorities:
            priorities = GivenPriorities(storage, sampler, settings.priority_key)
        #: How callers wait for others, and, before each draw, whether draws are bound.
        if isinstance(sampler, SamplerEnsemble):
            self.waits: Waits = WaitsOfMembers(storage, sampler, bool(settings.prefetch))
        elif isinstance(sampler, QueueSampler):
            if writer.placing is not Placing.BEHIND:
                raise TypeError(
                    f"a QueueSampler hands out rows in the order in which they come, and a {type(writer).__name__} "
                    "puts them elsewhere: use a RoundRobinWriter"
                )
            self.waits = QueueWaits(storage, sampler, bool(settings.prefetch))
        else:
            self.waits = Waits(storage, sampler)
        self.flow = self.waits.flow
        self.batch_writer = BatchWriter(
            storage, writer, sampler, plan, transform, self.time_dim, priorities, self.waits
        )
        self.reader = self._make_reader() if make_reader is None else make_reader()
        #: What prepares batches ahead; None: each is made when it is wanted.
        self.prefetcher = Prefetcher(self.reader, settings.prefetch, self._generators()) if settings.prefetch else None

    def _make_reader(self) -> BatchReader:
        member, settings = self.member(self.storage, self.sampler), self.settings
        return BatchReader([member], self.transform, pin_memory=settings.pin_memory, reuse=settings.reuse_batches)

    def _generators(self) -> list[torch.Generator | Generator]:
        """The generators that draws change, but for torch's global one."""
        if self.generator is not None:  # which then is the members', too
            return [self.generator]
        return [rb.generator for rb in self._members if rb.generator is not None]

    def member(
        self,
        storage: Storage,
        sampler: Sampler,
        transform: Compose | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> Member:
        """How this buffer's rows are drawn and read; an ensemble reads its members' rows so, with samplers of its own.

        Args:
            collate_fn: instead of this buffer's own; None for that.
        """
        if collate_fn is None:
            collate_fn = self.settings.collate_fn or storage.access.table.rows.collate
        if collate_fn is torch.stack and storage.access.table.rows.collate is collate_items:
            collate_fn = collate_items  # of tensors and TensorDicts the same, which rows can be gathered for at once
        if user_object(sampler) is user_object(self.sampler):
            sampler = self.sampler  # whose lock all draws of a user's own sampler take
        entries, generations = self.settings.entries, self.tracks_generations
        return Member(storage, sampler, transform, collate_fn, entries, with_generation=generations)

    def use_transform(self, transform: Compose) -> None:
        """Batches go through this transform from now on."""
        self.transform = self.reader.transform = self.batch_writer.transform = transform
        self.storage.access.table.horizon = transform.stream.horizon

    # ---- blocks in which nobody else uses them ----
    @contextlib.contextmanager
    def held_still(self) -> Iterator[None]:
        """No draws, changes of priorities or writes of this process inside the block."""
        with self.undisturbed(), self.storage.mutex:
            yield

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """No draws or changes of priorities inside the block, and what was prepared ahead before is forgotten."""
        if not self._members and self.prefetcher is None:
            with self.sampler.lock:
                yield
            return
        with contextlib.ExitStack() as held:
            held.enter_context(self.paused())
            for rb in sorted(self._members, key=id):  # in one order for all ensembles
                held.enter_context(rb._parts.paused())
            held.enter_context(self.sampler.lock)
            # Members' own, and those of samplers that the ensemble draws with instead; in one order for all ensembles.
            samplers = [*(member.sampler for member in self.reader.members), *(rb._sampler for rb in self._members)]
            locks = {id(sampler.lock): sampler.lock for sampler in samplers}
            for which in sorted(locks):
                held.enter_context(locks[which])
            yield

    def paused(self) -> AbstractContextManager[None]:
        """A block in which nothing is prepared ahead, and before which what was prepared is forgotten."""
        return contextlib.nullcontext() if self.prefetcher is None else self.prefetcher.paused()

    def close(self) -> None:
        """Ends the threads that prepare batches."""
        if self.prefetcher is not None:
            self.prefetcher.close()

    # ---- stored steps ----
    def change_entries(self, values: Mapping[Any, Any], index: Any) -> None:
        """Sets some entries of the stored steps at an index."""
        self.writer.check_mutable("changing entries")
        with self.undisturbed(), self.storage.access.exclusive("changing entries"):
            change_entries(self.storage, self.time_dim, values, index, self.writer.index_key)

    # ---- state ----
    def saved_form(self, kind: str, batch_size: int | None) -> SavedBuffer:
        """A buffer of these parts, as it is saved and loaded; `kind` is the name of its class."""
        transforms: SavedPart = saved_transforms(self.transform)
        generator = SavedGenerator(self.generator, None)
        if self._members:
            transforms = SavedTransformsOfEach([self.transform, *(rb.transform for rb in self._members)])
            generator = SavedGenerators(self.generator, [rb.generator for rb in self._members])
        parts = {
            "sampler": self.sampler.saved_form,
            "writer": self.writer.saved_form,
            "transform": transforms,
            "generator": generator,
        }
        description = functools.partial(self._description, kind, batch_size)
        return SavedBuffer(self.storage, parts, self.writer.index_key, batch_size, description)

    def _description(self, kind: str, batch_size: int | None, sampler: Any) -> dict[str, Any]:
        """What a checkpoint says of the buffer, for who makes it anew (`engram.load`)."""
        if self._members:
            return {"kind": kind}
        settings, transforms = self.settings, self.transform.transforms
        missing = ["the collate_fn"] if settings.collate_fn is not None else []
        missing += ["the hooks of its checkpointer"] if has_hooks(self.storage.checkpointer) else []
        others: dict[str, Any] = {
            "prefetch": settings.prefetch or None,
            "dim_extend": settings.dim_extend,
            "pin_memory": settings.pin_memory,
            "track_generations": settings.track_generations,
        }
        if settings.priority_key is not None:
            others["priority_key"] = settings.priority_key
        # Looked at first: a save of a buffer without limiter makes no call for it.
        if self.flow.watched is not None and (limit := self.storage.access.table.flow.limit) is not None:
            others["rate_limiter"] = described_limit(limit)
        return {
            "kind": kind,
            "batch_size": batch_size,
            "settings": others,
            "storage": {"kind": type(self.storage).__name__, "arguments": self.storage.access.description()},
            "sampler": describe(sampler),
            "transforms": [describe_transform(transform) for transform in transforms],
            "missing": missing,
        }

    def after_load(self) -> None:
        # A sampler that was loaded before its storage finds its rows.
        self.sampler.saved_form.find(self.storage)

    def after_fork(self) -> None:
        # No steps that the parent will write, too.
        lanes = self.storage.lanes
        if lanes.locks is not None:
            self.transform.empty()
