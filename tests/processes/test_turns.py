"""Stores made without `lanes`: processes take turns in one ring, an `extend` at a time."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import random
import shutil
import time
import warnings

import pytest
import torch
from tensordict import TensorDict

from contracts.children import Child, Signal
from contracts.kills import killed_at, lines_of
from contracts.tiers import in_quick
from engram import _native
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.envs.transforms import MultiStepTransform
from engram.errors import EngramError, NoFreeLaneError, StorageError, StorageInUseError
from engram.store import lanes as lanes_module
from engram.store.episodes import EpisodeIndex
from engram.store.files import StoreSession
from engram.store.indexing import stored_slots
from engram.store.lanes import Turns
from engram.store.locks import LaneLocks
from engram.store.packed_rows import PackedRows
from engram.testing import env_steps, numbers, steps

SECOND = pytest.mark.filterwarnings("ignore:this process and process:RuntimeWarning")
pytestmark = [pytest.mark.quick, SECOND]

KINDS = {
    "shared memory": lambda path, n, **kw: LazyTensorStorage(n, shared=True, **kw),
    "temporary file": lambda path, n, **kw: LazyMemmapStorage(n, **kw),
    "named file": lambda path, n, **kw: LazyMemmapStorage(n, scratch_dir=path / "store", **kw),
}
BUFFERS = {"rows": ReplayBuffer, "rows with their index": TensorDictReplayBuffer}
SLICES = {"slice_len": 4, "end_key": ("next", "done"), "traj_key": None}


@pytest.fixture(params=KINDS)
def storage(request, tmp_path):
    return KINDS[request.param](tmp_path, 200)


@pytest.fixture
def shared():
    return LazyTensorStorage(200, shared=True)


def rows(who, first, n):
    """Steps of one trajectory that never ends: nothing in them but `who` tells those of two writers apart."""
    k = torch.arange(first, first + n)
    return TensorDict(
        {"who": torch.full((n,), who), "k": k, "next": {"done": torch.zeros(n, 1, dtype=torch.bool)}}, [n]
    )


def seams(rb):
    return rb.storage.lanes.states()[0]["seams"]


@contextlib.contextmanager
def turn_of_another(rb):
    """A block while which another process is in the middle of an extend."""
    inside, go = Signal(), Signal()

    def stay():
        with rb.storage.mutex, rb.storage.lanes.turn():
            inside.send()
            go.wait()

    child = Child(stay)
    inside.wait()
    try:
        yield child
    finally:
        go.send()


@pytest.mark.parametrize("buffer", BUFFERS)
def test_parent_and_child_write_one_ring_and_each_change_of_writer_is_a_seam(storage, buffer):
    rb = BUFFERS[buffer](storage=storage)
    assert rb.extend(steps(0, 5)).tolist() == [0, 1, 2, 3, 4]

    def child():
        index = [rb.extend(steps(100, 105)).tolist(), rb.add(steps(105, 106)[0])]
        return index, len(rb), rb.writer._cursor

    assert Child(child).result() == ([[5, 6, 7, 8, 9], 10], 11, 11)
    assert rb.extend(steps(5, 8)).tolist() == [11, 12, 13]
    assert rb.add(steps(8, 9)[0]) == 14
    assert numbers(rb[:]) == [*range(5), *range(100, 106), *range(5, 9)]
    assert seams(rb) == [5, 11]
    assert (len(rb), rb.write_count, rb.writer._cursor) == (15, 15, 15)
    if buffer == "rows with their index":
        assert rb[:]["index"].tolist() == list(range(15))


def test_processes_that_open_one_folder_write_one_ring(tmp_path):
    def write(start):
        rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path, existsok=True))
        index = rb.extend(steps(start, start + 3)).tolist()
        rb.storage.close()
        return index

    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path))
    rb.extend(steps(0, 2))
    assert Child(lambda: write(10)).result() == [2, 3, 4]
    assert ReplayBuffer.open(tmp_path).extend(steps(2, 4)).tolist() == [5, 6]
    assert numbers(rb[:]) == [0, 1, 10, 11, 12, 2, 3]
    assert seams(rb) == [2, 5, 7]  # its own next row is one, too


def _sent(rbs, queue):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        queue.put([(rb.extend(steps(100, 103)).tolist(), len(rb)) for rb in rbs])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_buffer_that_is_sent_writes_the_same_ring(tmp_path, method):
    context = mp.get_context(method)
    rbs = [TensorDictReplayBuffer(storage=make(tmp_path, 100)) for make in KINDS.values()]
    for rb in rbs:
        rb.extend(steps(0, 2))
    queue = context.Queue()
    child = context.Process(target=_sent, args=(rbs, queue))
    child.start()
    assert queue.get(timeout=300) == [([2, 3, 4], 5)] * 3
    child.join(300)
    for rb in rbs:
        assert rb.extend(steps(2, 4)).tolist() == [5, 6]
        assert numbers(rb[:]) == [0, 1, 100, 101, 102, 2, 3]
        assert seams(rb) == [2, 5]


def interleave(storage, buffer, writers=3, extends=60):
    """Writers extend at once, and each samples slices beside; then every row is looked at."""
    rb = buffer(storage=storage, sampler=SliceSampler(**SLICES), batch_size=32)
    rb.extend(rows(0, 0, 4))
    lengths = (1, 3, 7, 12)
    go = [Signal() for _ in range(writers)]

    def check_slices():
        batch = rb.sample()
        who, k = (batch[key].reshape(-1, 4) for key in ("who", "k"))
        assert (who == who[:, :1]).all(), "a slice has rows of two writers"
        assert torch.equal(k[:, 1:], k[:, :-1] + 1), "a slice has rows of two extends"

    def write(who):
        go[who - 1].wait()
        k, returned = 0, []
        for i in range(extends):
            n = lengths[(i + who) % len(lengths)]
            index = rb.extend(rows(who, k, n))
            returned.append((k, index.tolist()))
            k += n
            if i % 15 == 0:
                check_slices()
        return k, returned

    children = [Child(lambda who=who: write(who)) for who in range(1, writers + 1)]
    for signal in go:
        signal.send()
    results = [child.result() for child in children]
    check_slices()
    assert rb.write_count == 4 + sum(k for k, _ in results)
    # Where a row may still lie it is the one that its extend returned; rows of an extend lie behind each other.
    state, capacity = rb.storage.lanes.states()[0], rb.storage.max_size
    data, first = rb[:], state["first"]
    at = [int(data["who"][slot % capacity]) for slot in range(first, state["published"])]
    placed = {}
    for slot in range(first, state["published"]):
        placed[int(data["who"][slot % capacity]), int(data["k"][slot % capacity])] = slot
    for who, (_, returned) in enumerate(results, 1):
        for k, index in returned:
            slots = [placed.get((who, k + j)) for j in range(len(index))]
            there = [slot for slot in slots if slot is not None]
            assert there == list(range(there[0], there[0] + len(there))) if there else True
            assert [slot % capacity for slot in there] == index[len(index) - len(there) :]
    expected = [first + j for j in range(1, len(at)) if at[j] != at[j - 1]]
    assert state["seams"][: len(expected)] == expected and len(state["seams"]) <= len(expected) + 1
    if buffer is TensorDictReplayBuffer:
        assert data["index"].tolist() == list(range(capacity))


@pytest.mark.parametrize("buffer", in_quick(BUFFERS, ["rows with their index"]))
def test_extends_of_three_processes_are_whole_and_no_slice_has_rows_of_two(storage, buffer):
    interleave(storage, BUFFERS[buffer])


def test_environments_of_two_processes_share_a_lane():
    for storage in (LazyTensorStorage(30, ndim=2, shared=True), LazyMemmapStorage(30, ndim=2)):
        rb = TensorDictReplayBuffer(storage=storage)
        rb.extend(env_steps(3, 0, 4))
        index = Child(lambda rb=rb: rb.extend(env_steps(3, 4, 6)).tolist()).result()
        assert index == [[t, e] for t in (4, 5) for e in range(3)]
        rb.extend(env_steps(3, 6, 7))
        assert numbers(rb[:]) == [list(range(first, first + 7)) for first in (0, 1000, 2000)]
        assert seams(rb) == [4, 6]


def test_two_objects_of_one_process_are_two_writers(tmp_path):
    one, other = (ReplayBuffer(storage=LazyMemmapStorage(50, tmp_path, existsok=True)) for _ in range(2))
    for k, rb in enumerate((one, one, other, one, other, other)):
        rb.extend(steps(3 * k, 3 * k + 3))
    assert numbers(one[:]) == list(range(18))
    assert seams(one)[:3] == seams(other)[:3] == [6, 9, 12]
    assert seams(one)[3:] == [18] and seams(other)[3:] == []  # where the next row of each would begin


# ---- warnings and errors ----
def warned(work):
    """The warnings about turns that some work gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(w.message) for w in caught if "take turns" in str(w.message)]


def test_the_second_process_to_write_is_told_once_that_slices_end_where_another_wrote(storage):
    rb = ReplayBuffer(storage=storage)
    assert warned(lambda: rb.extend(steps(0, 3))) == []
    messages = Child(lambda: warned(lambda: [rb.extend(steps(k, k + 1)) for k in range(3)])).result()
    assert len(messages) == 1
    assert f"process {os.getpid()} " in messages[0] and "slices longer than one extend" in messages[0]
    assert "lanes=n" in messages[0]
    assert warned(lambda: rb.extend(steps(3, 6))) == []


def test_nobody_is_warned_of_a_writer_that_has_ended_or_that_only_reads(tmp_path):
    for _ in range(2):
        rb = ReplayBuffer(storage=LazyMemmapStorage(50, tmp_path, existsok=True), batch_size=2)
        assert warned(lambda rb=rb: rb.extend(steps(0, 3))) == []
        assert Child(lambda rb=rb: warned(rb.sample)).result() == []
        rb.storage.close()


def test_who_waits_too_long_for_a_turn_is_told_which_process_has_it(storage, monkeypatch):
    monkeypatch.setattr(lanes_module, "_TURN_TIMEOUT", 0.05)
    rb = TensorDictReplayBuffer(storage=storage)
    rb.extend(steps(0, 3))
    with turn_of_another(rb) as child:
        for write in (lambda: rb.extend(steps(3, 5)), lambda: rb.add(steps(3, 4)[0])):
            with pytest.raises(StorageInUseError, match=f"process {child.pid} has been writing .* 0.05 seconds"):
                write()
        assert numbers(rb[:]) == [0, 1, 2]
        assert numbers(rb.sample(4))
    assert child.result() is None
    assert rb.extend(steps(3, 5)).tolist() == [3, 4]
    assert seams(rb) == []


def test_a_stopped_first_write_leaves_the_lane_to_others(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes_module, "_TURN_TIMEOUT", 0.05)
    rb = ReplayBuffer(storage=LazyMemmapStorage(50, tmp_path))
    rb.extend(steps(0, 3))
    late = ReplayBuffer.open(tmp_path)
    with turn_of_another(rb) as child, pytest.raises(StorageInUseError):
        late.extend(steps(3, 4))
    child.result()
    assert late.extend(steps(3, 4)).tolist() == [3]


def test_a_refused_batch_takes_no_turn_and_changes_nothing(storage):
    rb = TensorDictReplayBuffer(storage=storage)
    rb.extend(steps(0, 3))

    def refused():
        with pytest.raises(ValueError, match="n"):
            rb.extend(steps(0, 3).exclude("n"))
        return rb.storage.lanes.store.has_turn

    assert Child(refused).result() is False
    assert rb.extend(steps(3, 5)).tolist() == [3, 4]
    assert seams(rb) == []


def test_lanes_that_were_given_are_held_as_before(tmp_path):
    for make in KINDS.values():
        rb = ReplayBuffer(storage=make(tmp_path, 100, lanes=1))
        rb.extend(steps(0, 3))
        with pytest.raises(NoFreeLaneError, match="all 1 lane of this store have a writer"):
            Child(lambda rb=rb: rb.extend(steps(3, 4)).tolist()).result()


def test_who_holds_a_lane_and_who_takes_turns_exclude_each_other(tmp_path):
    turns, held = (LazyMemmapStorage(50, tmp_path, existsok=True, lanes=lanes) for lanes in (None, 1))
    turns, held = ReplayBuffer(storage=turns), ReplayBuffer(storage=held)
    held.extend(steps(0, 3))
    with pytest.raises(NoFreeLaneError):
        turns.extend(steps(3, 4))
    held.storage.release()
    assert turns.extend(steps(3, 5)).tolist() == [3, 4]
    with pytest.raises(NoFreeLaneError):
        held.extend(steps(5, 6))
    turns.storage.release()
    held.extend(steps(5, 6))
    held.storage.release()
    turns.extend(steps(6, 7))  # it wrote before, but not the newest row
    assert seams(turns) == [3, 5, 6]


# ---- deaths ----
def die_in_turn(rb, before=lambda: None):
    """A child that is killed while it has the turn."""
    inside = Signal()

    def stay():
        before()
        with rb.storage.mutex, rb.storage.lanes.turn():
            inside.send()
            Signal().wait()

    child = Child(stay)
    inside.wait()
    child.kill()


def test_the_turn_of_a_process_that_is_killed_is_taken_over(storage):
    rb = TensorDictReplayBuffer(storage=storage)
    rb.extend(steps(0, 3))
    term = rb.storage.lanes.states()[0]["term"]
    die_in_turn(rb, before=lambda: rb.extend(steps(10, 12)))
    assert rb.extend(steps(3, 6)).tolist() == [5, 6, 7]
    assert numbers(rb[:]) == [0, 1, 2, 10, 11, 3, 4, 5]
    assert seams(rb) == [3, 5]
    if isinstance(storage, LazyMemmapStorage) and storage.scratch_dir is not None:
        # One for the child's first write, one for its death.
        assert rb.storage.lanes.states()[0]["term"] == term + 2


def test_a_takeover_that_fails_is_made_again_by_the_next(tmp_path, monkeypatch):
    rb = ReplayBuffer(storage=LazyMemmapStorage(50, tmp_path))
    rb.extend(steps(0, 3))
    die_in_turn(rb)
    lanes, term = rb.storage.lanes, rb.storage.lanes.states()[0]["term"]
    on_take = lanes._turns._on_take

    def fail(lane):
        raise StorageError("the disk failed")

    lanes._turns._on_take = fail
    with pytest.raises(StorageError, match="the disk failed"):
        rb.extend(steps(3, 4))
    lanes._turns._on_take = on_take
    assert rb.extend(steps(3, 4)).tolist() == [3]
    assert lanes.states()[0]["term"] == term + 1


@pytest.mark.deep
def test_a_writer_killed_before_any_line_of_its_extend_blocks_nobody(tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(40, tmp_path))
    rb.extend(steps(0, 5))

    def work():
        rb.extend(steps(100, 130))

    total, whole = Child(lambda: lines_of(work)).result(), 5
    for line in range(0, total, max(1, total // 12)):
        killed_at(line, work)
        written = rb.write_count
        index = rb.extend(steps(5, 8))
        assert index.tolist() == [(written + j) % 40 for j in range(3)]
        values = rb[:]["n"].tolist()
        assert [values[i] for i in index] == [5, 6, 7]
        assert written - whole in (0, 30)
        whole = written + 3
        assert rb[:]["index"].tolist() == list(range(min(40, len(rb))))
        numbers(rb[:])


@pytest.mark.deep
@pytest.mark.parametrize("trials", [20, pytest.param(600, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_writers_killed_at_random_moments_tear_and_mix_nothing(tmp_path, kind, trials):
    draw = random.Random(1)
    rb = TensorDictReplayBuffer(storage=KINDS[kind](tmp_path, 2000), sampler=SliceSampler(**SLICES), batch_size=64)
    rb.extend(rows(0, 0, 8))

    def write(who, n, begun):
        first = 0
        begun.send()
        while True:
            rb.extend(rows(who, first, n))
            first += n

    k, takeovers = 8, 0
    for trial in range(600 + trials):
        if trial >= trials and takeovers > 3:
            break
        begun = Signal()
        children = []
        for who in (2 * trial + 1, 2 * trial + 2):
            n = draw.choice((1, 40, 1900))
            children.append(Child(lambda who=who, n=n, begun=begun: write(who, n, begun)))
        for _ in children:
            begun.wait()
        time.sleep(draw.uniform(0, 0.02))
        for child in children:
            child.kill()
        store = rb.storage.lanes.store
        takeovers += store.begin_turn(0) != 0
        store.end_turn(0)
        index = rb.extend(rows(0, k, 5))  # whoever had the turn is dead
        mine = rb.storage.get(index)
        assert mine["who"].tolist() == [0] * 5 and mine["k"].tolist() == list(range(k, k + 5))
        k += 5
        # Rows that the last piece was replacing are gone; each of the others lies where it says.
        assert rb[:]["index"].sort().values.tolist() == stored_slots(store).sort().values.tolist()
        batch = rb.sample()
        who, n = (batch[key].reshape(-1, 4) for key in ("who", "k"))
        assert (who == who[:, :1]).all() and torch.equal(n[:, 1:], n[:, :-1] + 1)
    assert takeovers > 3


# ---- what is saved, and what needs the store alone ----
def test_the_end_of_rows_that_another_wrote_last_is_saved_as_a_seam(shared, tmp_path):
    rb = ReplayBuffer(storage=shared)
    rb.extend(rows(0, 0, 3))
    rb.dumps(tmp_path / "mine")
    Child(lambda: rb.extend(rows(1, 0, 3)).tolist()).result()
    rb.dumps(tmp_path / "other")
    for name, expected in (("mine", [3]), ("other", [3, 3])):
        twin = ReplayBuffer(storage=LazyTensorStorage(200))
        twin.loads(tmp_path / name)
        twin.extend(rows(0, 3, 2))
        lengths = EpisodeIndex().trajectories(twin.storage).length.tolist()
        assert lengths == ([5] if name == "mine" else [3, 3, 2]), expected


def test_a_save_beside_another_writer_does_not_take_its_rows_for_ones_own(tmp_path, monkeypatch):
    one, other = (ReplayBuffer(storage=LazyMemmapStorage(50, tmp_path, existsok=True)) for _ in range(2))
    one.extend(rows(0, 0, 3))
    other.extend(rows(1, 0, 3))
    seams_of = _native.Store.seams

    def after_more_rows(store, lane):
        other.extend(rows(1, 3, 3))
        return seams_of(store, lane)

    monkeypatch.setattr(_native.Store, "seams", after_more_rows)
    saved = one.storage.lanes.saved_states()[0]
    assert saved["published"] == 6 and saved["seams"] == [3, 6]


def test_who_loads_rows_goes_on_as_their_writer(shared, tmp_path):
    rb = ReplayBuffer(storage=shared)
    rb.extend(rows(0, 0, 3))
    rb.dumps(tmp_path / "saved")
    done, go = Signal(), Signal()
    child = Child(lambda: (rb.extend(rows(1, 0, 3)), done.send(), go.wait()))
    done.wait()
    for refused in (rb.empty, lambda: rb.loads(tmp_path / "saved"), lambda: rb.__setitem__(0, rows(0, 0, 1)[0])):
        with pytest.raises(StorageInUseError, match="alone"):
            refused()
    go.send()
    child.result()
    rb.loads(tmp_path / "saved")
    rb.extend(rows(0, 3, 2))
    assert EpisodeIndex().trajectories(rb.storage).length.tolist() == [5]
    rb.empty()
    rb.extend(rows(0, 0, 2))
    assert EpisodeIndex().trajectories(rb.storage).length.tolist() == [2]


def test_a_released_turn_goes_on_where_nobody_else_wrote(storage):
    rb = ReplayBuffer(storage=storage)
    rb.extend(rows(0, 0, 3))
    rb.storage.release()
    rb.extend(rows(0, 3, 3))
    rb.storage.release()
    Child(lambda: rb.extend(rows(1, 0, 2)).tolist()).result()
    rb.extend(rows(0, 6, 2))
    assert EpisodeIndex().trajectories(rb.storage).length.tolist() == [6, 2, 2]


def test_after_a_power_cut_each_change_of_writer_is_a_seam_again(tmp_path, monkeypatch):
    begin, syncs = StoreSession._begin, []
    monkeypatch.setattr(StoreSession, "_begin", lambda self: (syncs.append(1), begin(self)))
    one, other = (ReplayBuffer(storage=LazyMemmapStorage(50, tmp_path / "a", existsok=True)) for _ in range(2))
    for k, rb in enumerate((one, other, other, one, one, other)):
        rb.extend(rows(k, 0, 4))
    assert len(syncs) == 2  # one for each writer, none for a turn
    one.storage.lanes.store.boot_id = b"another boot 123"
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    again = ReplayBuffer.open(tmp_path / "b")
    assert again.storage.dropped == 0
    assert EpisodeIndex().trajectories(again.storage).length.tolist() == [4, 8, 8, 4]
    again.extend(rows(9, 0, 4))
    assert EpisodeIndex().trajectories(again.storage).length.tolist() == [4, 8, 8, 4, 4]


# ---- beside other parts of a buffer ----
def test_a_sampler_gives_priorities_to_rows_of_other_processes(shared):
    rb = TensorDictReplayBuffer(storage=shared, sampler=PrioritizedSampler(200, 1.0, 1.0), batch_size=200)
    rb.extend(steps(0, 3))
    rb.update_priority(torch.arange(3), torch.tensor([1e-9, 1e-9, 1e-9]))
    Child(lambda: rb.extend(steps(10, 14)).tolist()).result()
    assert set(numbers(rb.sample())) <= {10, 11, 12, 13}
    batch = steps(20, 22)
    batch["td_error"] = torch.zeros(2)
    assert rb.extend(steps(20, 22)).tolist() == [7, 8]


def test_steps_that_a_transform_holds_back_stay_with_their_process(shared):
    rb = TensorDictReplayBuffer(storage=shared, transform=MultiStepTransform(n_steps=2, gamma=0.5))

    def batch(first, n):
        k = torch.arange(first, first + n, dtype=torch.float32).unsqueeze(-1)
        done = torch.zeros(n, 1, dtype=torch.bool)
        return TensorDict({"k": k, "next": {"k": k + 1, "reward": k, "done": done, "terminated": done}}, [n])

    rb.extend(batch(0, 3))
    Child(lambda: (rb.extend(batch(100, 3)).tolist(), rb.flush_transforms().tolist())).result()
    rb.extend(batch(3, 3))
    rb.flush_transforms()
    data = rb[:]
    mine, others = ((data["k"] < 100) == is_mine for is_mine in (True, False))
    assert data["k"][mine].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert data["next", "k"][mine].flatten().tolist() == [2, 3, 4, 5, 6, 6]
    assert data["k"][others].flatten().tolist() == [100, 101, 102]
    assert data["next", "k"][others].flatten().tolist() == [102, 103, 103]


def test_the_best_items_of_two_processes_fill_one_ring(tmp_path):
    def items(*ranks):
        return TensorDict({"r": torch.tensor(ranks)}, [len(ranks)])

    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(6, tmp_path), writer=TensorDictMaxValueWriter(rank_key="r"), batch_size=2
    )
    rb.extend(items(1.0, 2.0))
    Child(lambda: rb.extend(items(3.0, 4.0)).tolist()).result()
    assert rb.extend(items(5.0, 6.0)).tolist() == [4, 5]
    assert rb[:]["r"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] and rb[:]["index"].tolist() == list(range(6))
    assert rb.extend(items(7.0)).tolist() == [0]


class Slow(RoundRobinWriter):
    """Lets another process write between its check and its append."""

    index_key = "index"

    def __init__(self):
        super().__init__()
        self.between = lambda: None

    def write(self, storage, items, single, time_dim):
        checked = storage.check(items, single, time_dim, self.index_key)
        self.between()
        return storage.append(checked)


def test_rows_of_an_own_writer_store_the_index_that_they_get_though_others_write_between(storage):
    rb = ReplayBuffer(storage=storage, writer=Slow())
    rb.extend(steps(0, 3))
    rb.writer.between = lambda: Child(lambda: setattr(rb.writer, "between", lambda: None) or
                                      rb.extend(steps(10, 12)).tolist()).result()  # fmt: skip
    assert rb.extend(steps(3, 6)).tolist() == [5, 6, 7]
    assert rb[:]["index"].tolist() == list(range(8)) and rb[5:]["n"].flatten().tolist() == [3, 4, 5]


def test_a_child_forked_in_a_turn_has_not_got_it(shared, monkeypatch):
    monkeypatch.setattr(lanes_module, "_TURN_TIMEOUT", 0.05)
    rb = ReplayBuffer(storage=shared)
    rb.extend(steps(0, 3))
    with rb.storage.mutex, rb.storage.lanes.turn():
        child = Child(lambda: rb.extend(steps(3, 4)).tolist())
        with pytest.raises(StorageInUseError, match=f"process {os.getpid()} "):
            child.result()
    assert rb.extend(steps(3, 4)).tolist() == [3]


@pytest.mark.parametrize("form", ["native", "slow"])
def test_rows_store_their_own_index_though_another_writes_between_check_and_append(shared, monkeypatch, form):
    rb = TensorDictReplayBuffer(storage=shared)
    data = steps(0, 12)
    data["c"] = torch.ones(12, dtype=torch.complex64)
    if form == "slow":
        data["c"] = data["c"].conj()  # a view that the native core does not read
    rb.extend(data[:3])
    append, between = PackedRows.append, [lambda: Child(lambda: rb.extend(data[3:5]).tolist()).result()]

    def after_another(*args):
        if between:
            between.pop()()
        return append(*args)

    monkeypatch.setattr(PackedRows, "append", after_another)
    monkeypatch.setattr(
        rb._parts.batch_writer, "pushes", False
    )  # one call checks and appends in its turn: nothing comes in between
    assert rb.extend(data[5:8]).tolist() == [5, 6, 7]
    assert rb[:]["index"].tolist() == list(range(8)) and rb[:]["n"].tolist() == list(range(8))


# ---- protections taken out ----
def _take_over_without_a_new_term(turns, lane, dead):
    return not turns._store.begin_turn(lane, dead)


def _every_writer_has_one_number(turns, lane):
    turns._store.writer = 1 << 24 | 1


def _index_is_that_of_the_check(self, steps, index_key=None, plan=PackedRows.plan):
    return plan(self, steps._replace(own_index=self.lanes.next_slots(steps.times)), index_key)


PLANTED = {
    "whether a writer lives": (
        (LaneLocks, "is_writer_alive", lambda self, number: False),
        lambda path, patch: test_who_waits_too_long_for_a_turn_is_told_which_process_has_it(shared_memory(), patch),
    ),
    "turns": (
        (Turns, "join", lambda self, lane: None),
        lambda path, patch: interleave(shared_memory(), ReplayBuffer, extends=1000),
    ),
    "a number for each writer": (
        (Turns, "join", _every_writer_has_one_number),
        lambda path, patch: test_two_objects_of_one_process_are_two_writers(path),
    ),
    "the term of a takeover": (
        (Turns, "_take_over", _take_over_without_a_new_term),
        lambda path, patch: test_the_turn_of_a_process_that_is_killed_is_taken_over(LazyMemmapStorage(200, path)),
    ),
    "the turn of the dead after a takeover that failed": (
        (_native.Store, "undo_takeover", lambda self, lane, dead: None),
        lambda path, patch: test_a_takeover_that_fails_is_made_again_by_the_next(path, patch),
    ),
    "an index that rows get when they are written": (
        (PackedRows, "plan", _index_is_that_of_the_check),
        lambda path, patch: test_rows_store_their_own_index_though_another_writes_between_check_and_append(
            shared_memory(), patch, "native"
        ),
    ),
    "that a forked child has no turn": (
        (_native.Store, "after_fork", lambda self: None),
        lambda path, patch: test_a_child_forked_in_a_turn_has_not_got_it(shared_memory(), patch),
    ),
}


def shared_memory():
    return LazyTensorStorage(200, shared=True)


@pytest.mark.deep
@pytest.mark.mutant
@pytest.mark.parametrize("what", PLANTED)
def test_the_tests_of_turns_notice_the_loss_of(what, tmp_path, monkeypatch):
    protection, check = PLANTED[what]
    with monkeypatch.context() as sound:
        check(tmp_path / "sound", sound)
    noticed = (AssertionError, EngramError, RuntimeError, pytest.fail.Exception)  # whichever comes first
    with monkeypatch.context() as patch, pytest.raises(noticed):
        patch.setattr(*protection)
        check(tmp_path / "planted", patch)
