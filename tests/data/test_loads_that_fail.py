"""A load that fails, wherever it does, leaves the buffer as it was."""

import itertools
import tracemalloc

import pytest
import torch
from tensordict import TensorDict

from contracts.corruption import Forger
from contracts.each import each
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.data.replay_buffers.checkpointers import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
    TensorStorageCheckpointer,
    rows,
)
from engram.data.replay_buffers.state import rows as row_loads
from engram.data.replay_buffers.state.buffers import SavedBuffer
from engram.data.replay_buffers.state.parts import SavedTransforms
from engram.envs.transforms import Transform
from engram.errors import CheckpointError, CheckpointMisfitError, CorruptCheckpointError, StorageError
from engram.store.items import ItemRows


class RefusedError(Exception):
    """What users' code raises here."""


def steps(start, stop):
    at = torch.arange(start, stop)
    following = {
        "reward": at.float().unsqueeze(-1),
        "done": (at % 8 == 7).unsqueeze(-1),
        "truncated": torch.zeros(len(at), 1, dtype=torch.bool),
    }
    return TensorDict({"n": at, "next": following}, [len(at)])


def emptied(storage):
    storage.empty()
    return storage


class Counting(Transform):
    """Adds up what is written; its state is a number."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def inv(self, batch):
        self.total += int(batch["n"].sum())
        return batch

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


STORAGES = {
    "memory": lambda path: LazyTensorStorage(40),
    "shared": lambda path: LazyTensorStorage(40, shared=True),
    "mapped": lambda path: LazyMemmapStorage(40),
    "named": lambda path: LazyMemmapStorage(40, scratch_dir=path / f"store-{next(_names)}"),
    "list": lambda path: ListStorage(40),
    "columns": lambda path: emptied(TensorStorage(steps(0, 40).set("index", torch.arange(40)))),
}
_names = itertools.count()
SAMPLERS = {
    "prioritized": lambda: PrioritizedSampler(None, 0.7, 0.5),
    "epochs": SamplerWithoutReplacement,
    "slice epochs": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "prioritized slices": lambda: PrioritizedSliceSampler(None, 0.7, 0.5, slice_len=4),
}


def buffer(path, storage="memory", sampler="prioritized", **settings):
    return TensorDictReplayBuffer(
        storage=STORAGES[storage](path), sampler=SAMPLERS[sampler]() if isinstance(sampler, str) else sampler,
        batch_size=8, generator=torch.Generator().manual_seed(3), **{"transform": Counting(), **settings},
    )  # fmt: skip


def ensemble(path):
    return ReplayBufferEnsemble(
        buffer(path), buffer(path, sampler="epochs"), buffer(path, "list"), batch_size=24,
        generator=torch.Generator().manual_seed(4),
    )  # fmt: skip


def members(rb):
    return [rb[i] for i in range(len(rb))] if isinstance(rb, ReplayBufferEnsemble) else [rb]


def used(rb, rows, seed=0):
    """A buffer in the middle of its life."""
    for one in members(rb):
        index = one.extend(steps(*rows))
        index = index[index >= 0]
        if hasattr(one.sampler, "priorities"):
            one.update_priority(index, torch.rand(len(index), generator=torch.Generator().manual_seed(seed)))
    rb.sample()
    return rb


def observed(rb):
    """All that a user can see of a buffer, and the batches that come next."""
    before = rb.state_dict()
    if isinstance(rb, ReplayBufferEnsemble):
        found = [observed(one) for one in members(rb)]
    else:
        rows = rb[:] if len(rb) else []
        rows = torch.stack(rows) if isinstance(rows, list) and rows else rows
        found = [len(rb), rb.write_count, rb.writer._cursor, rb.storage._is_full]
        found.append(sorted(rows.flatten_keys().items()) if len(rb) else None)
        if hasattr(rb.sampler, "priorities") and len(rb):
            found.append(rb.sampler.priorities(torch.arange(len(rb)), storage=rb.storage))
            found += [rb.sampler.skipped, rb.sampler.default_priority]
        found.append(rb.transform.state_dict())
    found.append([rb.sample().get("n") for _ in range(6)] if len(rb) else None)
    rb.load_state_dict(before)
    return found


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def fails(rb, load, error=RefusedError):
    """Sees a load fail with this very error, and the buffer as it was."""
    before = observed(rb)
    with pytest.raises(error) as caught:
        load()
    assert type(caught.value) is error
    assert same(before, observed(rb))
    return caught.value


def saved(make, path):
    rb = used(make(), (100, 126), seed=1)
    rb.dumps(path / "saved")
    return path / "saved"


def raise_refused(*args, **kwargs):
    raise RefusedError


def failing_at(nth, fn=lambda x: x):
    calls = itertools.count()

    def hook(value):
        if next(calls) == nth:
            raise RefusedError
        return fn(value)

    return hook


@pytest.fixture(params=[(1 << 28, 1 << 25), (1 << 28, 100), (100, 100)], ids=["in memory", "in a file", "too many"])
def small_chunks(request, monkeypatch):
    """Several blocks in a checkpoint, and what is kept aside in memory or on disk."""
    most, in_memory = request.param
    monkeypatch.setattr(rows, "CHUNK_BYTES", 100)
    monkeypatch.setattr(row_loads, "_COPY_BLOCK_BYTES", 100)
    monkeypatch.setattr(row_loads, "_STAGED_BYTES", most)
    monkeypatch.setattr(row_loads, "_IN_MEMORY_BYTES", in_memory)


# ---- load hooks ----
@pytest.mark.pairwise
@pytest.mark.parametrize("nth", [0, 1])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_load_hook_that_raises(storage, nth, small_chunks, tmp_path):
    path = saved(lambda: buffer(tmp_path, storage), tmp_path)
    rb = used(buffer(tmp_path, storage), (0, 55))
    fails_once = failing_at(nth)
    for _ in range(2):  # the first hook raises, or the second one
        rb.register_load_hook(fails_once)
    fails(rb, lambda: rb.loads(path))
    rb.loads(path)  # the hook does not raise again
    assert len(rb) == 26
    fails_alone = failing_at(nth)
    for _ in range(2):
        rb.register_load_hook(fails_alone)
    fails(rb, lambda: rb.storage.loads(path))


CHECKPOINTERS = [TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer]


@pytest.mark.parametrize("checkpointer", CHECKPOINTERS, ids=lambda c: c.__name__)
def test_a_load_hook_gets_all_rows_once(checkpointer, small_chunks, tmp_path):
    path = saved(lambda: buffer(tmp_path, checkpointer=checkpointer()), tmp_path)
    seen = []
    fresh, rb = (buffer(tmp_path, checkpointer=checkpointer()) for _ in range(2))
    used(rb, (0, 30))
    for one in (fresh, rb):
        seen.append([])
        one.register_load_hook(lambda td, mine=seen[-1]: mine.append(td["n"].tolist()) or td)
        one.loads(path)
    assert seen[0] == seen[1] == [list(range(100, 126))]
    assert same(observed(fresh), observed(rb))


def test_a_load_hook_may_look_at_the_buffer(small_chunks, tmp_path):
    path = saved(lambda: buffer(tmp_path), tmp_path)
    rb = used(buffer(tmp_path), (0, 30))
    seen = []
    rb.register_load_hook(lambda rows: seen.append((len(rb), rb[:]["n"].tolist())) or rows)
    rb.loads(path)
    assert seen and all(found == (30, list(range(30))) for found in seen)


def full(*args):
    raise OSError(28, "No space left on device")


def test_no_room_for_what_hooks_make_is_an_error_that_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(row_loads, "_STAGED_BYTES", 10)
    monkeypatch.setattr(row_loads, "_IN_MEMORY_BYTES", 10)
    path = saved(lambda: buffer(tmp_path), tmp_path)
    rb = used(buffer(tmp_path), (0, 30))
    rb.register_load_hook(lambda rows: rows)
    before = observed(rb)
    monkeypatch.setattr(row_loads.os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"TMPDIR.*empty\(\)"):
        rb.loads(path)
    monkeypatch.undo()
    assert same(before, observed(rb))


def test_without_room_in_a_file_rows_are_kept_aside_in_memory(small_files, monkeypatch, tmp_path):
    path = saved(lambda: buffer(tmp_path), tmp_path)
    rb, twin = (used(buffer(tmp_path), (0, 55)) for _ in range(2))
    monkeypatch.setattr(row_loads.os, "pwrite", full)
    rb.register_load_hook(failing_at(0))
    fails(rb, lambda: rb.loads(path))
    rb.loads(path)
    monkeypatch.undo()
    twin.loads(path)
    assert same(observed(rb), observed(twin))


# ---- in a temporary file ----
@pytest.fixture
def small_files(monkeypatch):
    """Of more than a few rows what is kept aside is in a temporary file."""
    monkeypatch.setattr(row_loads, "_IN_MEMORY_BYTES", 100)
    monkeypatch.setattr(row_loads, "_COPY_BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1 << 12)


@pytest.mark.parametrize("storage", ["memory", "mapped", "shared"])
def test_rows_that_a_failed_load_has_overwritten_come_back_from_the_file(storage, small_files, monkeypatch, tmp_path):
    path = saved(lambda: buffer(tmp_path, storage, **own("follow")), tmp_path)
    rb = used(buffer(tmp_path, storage, **own("follow")), (0, 55))
    before = observed(rb)
    with monkeypatch.context() as patched:
        patched.setattr(Following, "refuses", True)
        with pytest.raises(RefusedError):
            rb.loads(path)
    assert same(before, observed(rb))


@pytest.mark.parametrize("make", CHECKPOINTERS, ids=lambda c: c.__name__)
def test_a_load_needs_little_memory_beside_the_rows(make, small_files, tmp_path):
    n = 16_000
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(n, checkpointer=make()), batch_size=4)
    rb.extend(steps(0, n))
    rb.dumps(tmp_path)
    nbytes = rb.storage.nbytes
    tracemalloc.start()
    try:
        rb.loads(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes, f"{peak:,} bytes to load {nbytes:,}"


# ---- parts of a user's own ----
class Parts:
    """Parts that refuse a state, before they have taken it or after."""

    late = False
    refuses = False

    def load_state_dict(self, state):
        if self.refuses and not self.late:
            type(self).refuses = False
            raise RefusedError
        super().load_state_dict(state)
        if self.refuses:
            type(self).refuses = False  # going back is no load
            raise RefusedError


class OwnPrioritized(Parts, PrioritizedSampler):
    pass


class OwnEpochs(Parts, SamplerWithoutReplacement):
    pass


class OwnWriter(Parts, RoundRobinWriter):
    index_key = "index"


class OwnTransform(Parts, Counting):
    pass


class InPlace(Transform):
    """Keeps its state in a tensor, as modules do."""

    refuses = False

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(1)

    def inv(self, batch):
        self.total += batch["n"].sum()
        return batch

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total.copy_(state["total"])
        if self.refuses:
            type(self).refuses = False
            raise RefusedError


class Following(PrioritizedSampler):
    """Refuses when the rows are there."""

    refuses = False

    @property
    def saved_form(self):
        form = super().saved_form
        sync = form.sync

        def sync_and_refuse(storage):
            sync(storage)
            if self.refuses:
                raise RefusedError

        form.sync = sync_and_refuse
        return form


def own(kind):
    return {
        "sampler": lambda: {"sampler": OwnPrioritized(None, 0.7, 0.5)},
        "epochs": lambda: {"sampler": OwnEpochs()},
        "writer": lambda: {"writer": OwnWriter()},
        "transform": lambda: {"transform": OwnTransform()},
        "transform in place": lambda: {"transform": InPlace()},
        "follow": lambda: {"sampler": Following(None, 0.7, 0.5)},
    }[kind]()


REFUSING = {
    "sampler": OwnPrioritized,
    "epochs": OwnEpochs,
    "writer": OwnWriter,
    "transform": OwnTransform,
    "transform in place": InPlace,
    "follow": Following,
}


@pytest.mark.pairwise
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("storage", ["memory", "named", "list", "columns"])
@pytest.mark.parametrize("kind", REFUSING)
def test_a_part_that_refuses_its_state(kind, storage, late, tmp_path, monkeypatch):
    path = saved(lambda: buffer(tmp_path, storage, **own(kind)), tmp_path)
    state = used(buffer(tmp_path, storage, **own(kind)), (200, 220), seed=2).state_dict()
    rb = used(buffer(tmp_path, storage, **own(kind)), (0, 55))
    cls = REFUSING[kind]
    monkeypatch.setattr(cls, "late", late, raising=False)
    for load in (lambda: rb.loads(path), lambda: rb.load_state_dict(state)):
        before = observed(rb)
        monkeypatch.setattr(cls, "refuses", True)
        with pytest.raises(RefusedError):
            load()
        monkeypatch.setattr(cls, "refuses", False)
        assert same(before, observed(rb))


def test_a_part_that_cannot_go_back_either_is_logged(tmp_path, caplog, monkeypatch):
    path = saved(lambda: buffer(tmp_path, "memory", **own("sampler")), tmp_path)
    rb = used(buffer(tmp_path, "memory", **own("sampler")), (0, 55))
    cls = REFUSING["sampler"]

    def refuse(sampler, state):
        raise RefusedError

    monkeypatch.setattr(cls, "load_state_dict", refuse)
    with pytest.raises(RefusedError):
        rb.loads(path)
    assert f"a {cls.__name__} cannot go back to its state of before" in caplog.text


@each("storage", STORAGES)
def test_a_part_that_refuses_its_state_in_a_buffer_without_rows(storage, tmp_path, monkeypatch):
    path = saved(lambda: buffer(tmp_path, storage, **own("sampler")), tmp_path)
    fresh, empty = (
        buffer(tmp_path, storage, **own("sampler")),
        used(buffer(tmp_path, storage, **own("sampler")), (0, 9)),
    )
    empty.empty(empty_write_count=False)
    for rb, count in ((fresh, 0), (empty, 9)):
        monkeypatch.setattr(OwnPrioritized, "refuses", True)
        with pytest.raises(RefusedError):
            rb.loads(path)
        monkeypatch.setattr(OwnPrioritized, "refuses", False)
        assert (len(rb), rb.write_count, rb.writer._cursor) == (0, count, 0)
        used(rb, (5, 20))
        assert rb.write_count == count + 15
    if storage in ("memory", "shared", "mapped", "list"):
        rb = buffer(tmp_path, storage, **own("sampler"))
        monkeypatch.setattr(OwnPrioritized, "refuses", True)
        with pytest.raises(RefusedError):
            rb.loads(path)
        monkeypatch.setattr(OwnPrioritized, "refuses", False)
        rb.extend(TensorDict({"n": torch.zeros(3), "another": torch.zeros(3)}, [3]))  # nothing has decided the layout
        assert len(rb) == 3


def test_members_of_an_ensemble(tmp_path, monkeypatch):
    path = saved(lambda: ensemble(tmp_path), tmp_path)
    rb = used(ensemble(tmp_path), (0, 55))
    rb[2].register_load_hook(failing_at(0))
    fails(rb, lambda: rb.loads(path))
    monkeypatch.setattr(ItemRows, "restore", raise_refused)
    monkeypatch.setattr(ItemRows, "restore_point", lambda self: lambda: None)
    state = rb.state_dict()
    for load in (lambda: rb.loads(path), lambda: rb.load_state_dict(state)):
        with pytest.raises(RefusedError):
            load()
        assert [len(one) for one in members(rb)] == [40, 40, 40]
    monkeypatch.undo()
    rb.loads(path)
    assert [len(one) for one in members(rb)] == [26, 26, 26]


def test_a_member_of_an_ensemble_that_refuses_when_the_rows_are_there(tmp_path, monkeypatch):
    def make():
        return ReplayBufferEnsemble(
            buffer(tmp_path, **own("follow")), buffer(tmp_path), batch_size=16,
            generator=torch.Generator().manual_seed(4),
        )  # fmt: skip

    path, state = saved(make, tmp_path), used(make(), (200, 220), seed=2).state_dict()
    rb = used(make(), (0, 55))
    for load in (lambda: rb.loads(path), lambda: rb.load_state_dict(state)):
        before = observed(rb)
        monkeypatch.setattr(Following, "refuses", True)
        with pytest.raises(RefusedError):
            load()
        monkeypatch.setattr(Following, "refuses", False)
        assert same(before, observed(rb))


def test_a_writer_that_keeps_the_best(tmp_path):
    def make():
        return buffer(tmp_path, writer=TensorDictMaxValueWriter())

    path = saved(make, tmp_path)
    rb = used(make(), (0, 70))
    rb.register_load_hook(raise_refused)
    fails(rb, lambda: rb.loads(path))


# ---- our own errors are not the file's ----
STEPS = {
    "states": (SavedBuffer, "load_states"),
    "rows": (SavedBuffer, "connect"),
    "transforms": (SavedTransforms, "load"),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("step", STEPS)
def test_an_error_of_our_own_while_a_state_is_adopted(step, sampler, storage, tmp_path, monkeypatch):
    path = saved(lambda: buffer(tmp_path, storage, sampler), tmp_path)
    rb = used(buffer(tmp_path, storage, sampler), (0, 55))

    def bug(*args, **kwargs):
        raise TypeError("'NoneType' object does not support item assignment")

    before = observed(rb)
    with monkeypatch.context() as patched:
        patched.setattr(*STEPS[step], bug)
        with pytest.raises(TypeError, match="NoneType") as caught:
            rb.loads(path)
    assert not isinstance(caught.value, CheckpointError)
    assert same(before, observed(rb))


def test_a_disk_that_fails_while_rows_are_put_in_their_places(tmp_path, monkeypatch):
    path = saved(lambda: buffer(tmp_path, "named"), tmp_path)
    rb = used(buffer(tmp_path, "named"), (0, 55))
    table, put = type(rb.storage._held_table.rows), type(rb.storage._held_table.rows).set_block
    calls = itertools.count()

    def fail_once(self, *args):
        if next(calls) == 0:
            raise StorageError("the disk fails")
        return put(self, *args)

    before = observed(rb)
    calls = itertools.count()
    with monkeypatch.context() as patched:
        patched.setattr(table, "set_block", fail_once)
        with pytest.raises(StorageError):
            rb.loads(path)
    assert same(before, observed(rb))


# ---- more rows than are kept aside ----
def test_of_more_rows_than_are_kept_aside_damage_is_found_before_anything_is_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(row_loads, "_STAGED_BYTES", 10)
    path = saved(lambda: buffer(tmp_path), tmp_path)
    file = next((path / "g-000001" / "storage").iterdir())
    file.chmod(0o644)
    file.write_bytes(b"\x07" + file.read_bytes()[1:])
    rb = used(buffer(tmp_path), (0, 55))
    fails(rb, lambda: rb.loads(path), CorruptCheckpointError)


def test_of_more_rows_than_are_kept_aside_what_was_loaded_stays_where_a_part_refuses_it_in_the_end(
    tmp_path, monkeypatch
):
    path = saved(lambda: buffer(tmp_path, **own("follow")), tmp_path)
    rb, twin = (used(buffer(tmp_path, **own("follow")), (0, 55)) for _ in range(2))
    twin.loads(path)
    monkeypatch.setattr(row_loads, "_STAGED_BYTES", 10)
    monkeypatch.setattr(Following, "refuses", True)
    with pytest.raises(RefusedError):
        rb.loads(path)
    monkeypatch.undo()
    assert same(observed(rb), observed(twin))


@each("part", ["sampler", "writer", "transform"])
def test_a_state_of_a_part_that_is_no_dict_changes_nothing(part, tmp_path):
    rb = used(buffer(tmp_path, sampler=RandomSampler()), (0, 55))
    state, before = rb.state_dict(), observed(rb)
    with pytest.raises(CheckpointMisfitError, match=f"the state of the {part}s? is .*; it must be a dict"):
        rb.load_state_dict({**state, part: [3]})
    assert same(before, observed(rb))


@each("part", ["sampler", "writer", "transform", "generator"])
def test_a_part_of_a_checkpoint_without_a_state_changes_nothing(part, tmp_path):
    path = saved(lambda: buffer(tmp_path, sampler=RandomSampler()), tmp_path)
    Forger(path).edit(lambda document: document["body"]["components"].update({part: [3]}))
    rb = used(buffer(tmp_path, sampler=RandomSampler()), (0, 55))
    error = fails(rb, lambda: rb.loads(path), CorruptCheckpointError)
    assert f"the {part} is [3]; it must be a dict" in str(error)


@each("replaced", [-1, 1.0, None, 1 << 62, "1"])
def test_a_state_in_memory_with_an_impossible_count_of_replaced_rows_changes_nothing(replaced, tmp_path):
    rb = used(buffer(tmp_path), (0, 55))
    state = rb.state_dict()
    counters = state["storage"]["counters"]
    lanes = [{**lane, "replaced": replaced} for lane in counters["lanes"]]
    state["storage"] = {**state["storage"], "counters": {**counters, "lanes": lanes}}
    before = observed(rb)
    with pytest.raises(ValueError):
        rb.load_state_dict(state)
    assert same(before, observed(rb))
