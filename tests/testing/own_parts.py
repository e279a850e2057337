"""Parts as users write them, against engram's contracts; `Broken...` are wrong by one, and must fail."""

import pickle
import threading

import torch

from engram.data import LazyTensorStorage, ListStorage, RoundRobinWriter, Storage, Writer
from engram.data.replay_buffers.storages import Checked, Rows
from engram.store.lanes import Lanes
from engram.testing import RoundRobinWriterContract, SamplerContract, StorageContract, TransformContract, WriterContract
from engram.transforms import Transform


class PickledStorage(Storage):
    """Keeps each step as a pickle of its own; defines what a storage must define, and `empty`."""

    def __init__(self, max_size):
        super().__init__(max_size)
        self._lanes, self._pickles, self._nothing = Lanes.in_memory(max_size), {}, []

    @property
    def lanes(self):
        return self._lanes

    def check(self, items, single, time_dim=0, index_key=None, index=None):
        steps = [items] if single else list(items.unbind(time_dim))
        if not steps:
            raise ValueError("nothing to add")
        return Checked(len(steps), steps)

    def append(self, checked, most=None):
        slots = self._lanes.advance(len(checked.data[:most]))
        self._put(slots, checked.data[:most])
        return slots

    def overwrite(self, slots, items, index_key=None):
        absent = set(slots.tolist()) - set(self._pickles)
        if absent:
            raise IndexError(f"slots {absent} have not been written")
        if len(items) != len(slots):
            raise ValueError(f"{len(slots)} steps are indexed, {len(items)} given")
        self._put(slots, list(items.unbind(0)))
        self._lanes.store.note_edits(slots)

    def read(self, slots, shape=None, extra=None, sequences=False):
        absent = [k for k, slot in enumerate(slots.tolist()) if slot not in self._pickles]
        if absent:
            return Rows(None, absent=absent)
        rows = [pickle.loads(self._pickles[slot]) for slot in slots.tolist()]
        batch = torch.stack(rows) if rows else self._nothing
        batch = batch.reshape(shape) if rows and shape is not None else batch
        return Rows(batch, sequences=self._lanes.generations(slots) if sequences else None)

    def empty(self, reset_count=True):
        super().empty(reset_count)
        self._pickles.clear()

    def _put(self, slots, steps):
        for slot, step in zip(slots.tolist(), steps, strict=True):
            self._pickles[slot] = pickle.dumps(step.clone())
            self._nothing = step[None][:0].clone()


class TestPickledStorage(StorageContract):
    def make(self, capacity, path):
        return PickledStorage(capacity)


class TestBrokenStorage(StorageContract):
    def make(self, capacity, path):
        class Broken(PickledStorage):
            def read(self, slots, *rest, **more):
                return super().read((slots + 1) % max(1, len(self)), *rest, **more)

        return Broken(capacity)


class LockedStorage(LazyTensorStorage):
    """Keeps a lock, which no copy can have."""

    def __init__(self, max_size):
        super().__init__(max_size)
        self.lock = threading.Lock()


class TestLockedStorage(StorageContract):
    def make(self, capacity, path):
        return LockedStorage(capacity)


class OneStorage(ListStorage):
    """Hands out itself as its copy, and another one in a pickle."""

    def __deepcopy__(self, memo):
        return self

    def __reduce_ex__(self, protocol):
        return OneStorage, (self.max_size,)


class TestOneStorage(StorageContract):
    def make(self, capacity, path):
        return OneStorage(capacity)


def flipped(rows):
    return rows.flip(0)


class HookedStorage(LazyTensorStorage):
    """Registers hooks in its constructor; what a checkpoint holds is of no use without them."""

    def __init__(self, max_size, **settings):
        super().__init__(max_size, **settings)
        self.register_save_hook(flipped)
        self.register_load_hook(flipped)


class TestHookedStorage(StorageContract):
    def make(self, capacity, path):
        return HookedStorage(capacity)


class AnyStep:
    def sample(self, storage, batch_size):
        if not len(storage):
            raise RuntimeError("the storage is empty: Cannot sample from an empty storage.")
        return storage.from_slots(torch.randint(len(storage), (batch_size,))), {}


class BrokenSampler:
    def sample(self, storage, batch_size):
        if not len(storage):
            raise RuntimeError("Cannot sample from an empty storage.")
        return storage.from_slots(torch.randint(len(storage) + 1, (batch_size,))), {}


class FloatSampler:
    def sample(self, storage, batch_size):
        if not len(storage):
            raise RuntimeError("Cannot sample from an empty storage.")
        return torch.rand(batch_size) * len(storage), {}


class ForgetfulSampler:
    """Goes through the rows in order, and loses its place where it is saved."""

    def __init__(self):
        self.next = 0

    def sample(self, storage, batch_size):
        if not len(storage):
            raise RuntimeError("Cannot sample from an empty storage.")
        slots = torch.arange(self.next, self.next + batch_size) % len(storage)
        self.next = int(slots[-1]) + 1
        return slots, {}


class TestAnyStep(SamplerContract):
    def make(self):
        return AnyStep()


class TestBrokenSampler(SamplerContract):
    def make(self):
        return BrokenSampler()


class TestFloatSampler(SamplerContract):
    environments = False

    def make(self):
        return FloatSampler()


class TestForgetfulSampler(SamplerContract):
    environments = False

    def make(self):
        return ForgetfulSampler()


class KeepsFirst(Writer):
    """Drops what no longer fits."""

    def write(self, storage, items, single, time_dim):
        items, time_dim = (items[None], 0) if single else (items, time_dim)
        n = len(items) if storage.max_size is None else min(len(items), storage.max_size - len(storage))
        slots = torch.full((len(items),), -1)
        storage.check(items, False, time_dim)
        if n:
            slots[:n] = storage.append(storage.check(items[:n], False, time_dim))
        return slots


class TestKeepsFirst(WriterContract):
    drops = True

    def make(self):
        return KeepsFirst()


class KeepsFirstAlone:
    """The same, and inherits from nothing."""

    write = KeepsFirst.write


class TestKeepsFirstAlone(WriterContract):
    drops = True

    def make(self):
        return KeepsFirstAlone()


class TestBrokenWriter(WriterContract):
    drops = True

    def make(self):
        class Broken(KeepsFirst):
            def write(self, *args):
                slots = super().write(*args)
                return torch.where(slots > 0, slots - 1, slots)

        return Broken()


class TestBrokenRing(RoundRobinWriterContract):
    def make(self):
        class Broken(RoundRobinWriter):
            @property
            def _cursor(self):
                return super()._cursor + 1

        return Broken()


def halved(batch):
    batch["obs"] = batch["obs"] / 2
    return batch


def all_but_the_last(batch):
    return batch[:-1]


class Shifted(Transform):
    """Stores observations one lower."""

    def forward(self, batch):
        batch["obs"] = batch["obs"] + 1
        return batch

    def inv(self, batch):
        batch = batch.copy()
        batch["obs"] = batch["obs"] - 1
        return batch


class TestHalved(TransformContract):
    in_place = True
    lists = False

    def make(self):
        return halved


class TestShifted(TransformContract):
    in_place = True
    lists = False

    def make(self):
        return Shifted()


class TestBrokenTransform(TransformContract):
    def make(self):
        return all_but_the_last
