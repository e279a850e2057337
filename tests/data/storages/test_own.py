"""Storages of a user's own: five methods are enough, and what buffers cannot use is refused when a buffer is made."""

import copy
import os
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram._copies import passing_fds
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    Storage,
    StorageEnsemble,
    TensorStorageCheckpointer,
)
from engram.data.replay_buffers.storages import Checked, Rows
from engram.errors import CheckpointMisfitError, StorageError
from engram.store.lanes import Lanes


class Own(Storage):
    """Keeps steps in a dict."""

    def __init__(self, max_size):
        super().__init__(max_size)
        self._lanes, self._steps = Lanes.in_memory(max_size), {}

    @property
    def lanes(self):
        return self._lanes

    def check(self, items, single, time_dim=0, index_key=None, index=None):
        steps = [items.clone()] if single else list(items.clone().unbind(time_dim))
        return Checked(len(steps), steps)

    def append(self, checked, most=None):
        slots = self._lanes.advance(len(checked.data[:most]))
        self._steps.update(zip(slots.tolist(), checked.data, strict=False))
        return slots

    def overwrite(self, slots, items, index_key=None):
        self._steps.update(zip(slots.tolist(), items.clone().unbind(0), strict=True))
        self._lanes.store.note_edits(slots)

    def read(self, slots, shape=None, extra=None, sequences=False):
        rows = torch.stack([self._steps[slot] for slot in slots.tolist()])
        return Rows(rows if shape is None else rows.reshape(shape), sequences=self._lanes.generations(slots))


def steps(start, stop):
    n = torch.arange(start, stop)
    return TensorDict({"n": n, "episode": n // 4}, [stop - start])


def buffer(storage=None, **parts):
    return ReplayBuffer(storage=Own(10) if storage is None else storage, batch_size=8, **parts)


def numbers(rb):
    return rb[:]["n"].tolist() if len(rb) else []


def twin(rb, path):
    rb.dumps(path)
    made = buffer()
    made.loads(path)
    return made


def test_a_storage_defines_five_methods():
    class Nothing(Storage):
        pass

    with pytest.raises(TypeError, match="it has no append, check, lanes, overwrite, read"):
        Nothing(10)


def test_user_storage_loads_what_it_saved(tmp_path):
    rb = buffer()
    rb.extend(steps(0, 6))
    rb.storage.mark_seam()
    rb.extend(steps(6, 13))
    other = twin(rb, tmp_path)
    assert numbers(other) == numbers(rb) == [10, 11, 12, *range(3, 10)]
    assert other.storage.lanes.saved_states() == rb.storage.lanes.saved_states()
    for one in (rb, other):
        one.extend(steps(13, 15))
    assert numbers(other) == numbers(rb) and other.write_count == rb.write_count == 15


def test_failed_load_leaves_a_user_storage_unchanged(tmp_path):
    rb, failing = buffer(), buffer()
    rb.extend(steps(0, 6))
    rb.dumps(tmp_path)
    failing.extend(steps(50, 63))
    before = numbers(failing)
    failing.storage.register_load_hook(lambda steps: steps if len(steps) < 5 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.loads(tmp_path)
    assert numbers(failing) == before and failing.write_count == 13


def test_an_error_in_the_middle_of_a_load_brings_the_rows_of_before_back(tmp_path, monkeypatch):
    rb, failing = buffer(), buffer()
    rb.extend(steps(0, 6))
    rb.dumps(tmp_path)
    failing.extend(steps(50, 63))
    before, check = numbers(failing), Own.check

    def fails_at_the_fourth(self, items, single, *rest, **more):
        if int(items["n"].reshape(-1)[0]) == 3:
            raise OSError("the disk of this storage fails")
        return check(self, items, single, *rest, **more)

    monkeypatch.setattr(Own, "check", fails_at_the_fourth)
    with pytest.raises(OSError, match="fails"):
        failing.loads(tmp_path)
    assert numbers(failing) == before and failing.write_count == 13


def test_user_storage_is_sampled_by_slices_and_written_by_index():
    rb = buffer(sampler=SliceSampler(slice_len=4))
    rb.extend(steps(0, 8))
    assert {tuple(part.tolist()) for part in rb.sample()["n"].split(4)} <= {(0, 1, 2, 3), (4, 5, 6, 7)}
    rb[2] = steps(70, 71)[0]
    rb[3:5] = steps(80, 82)
    rb[5:7] = steps(90, 91)[0]
    assert numbers(rb) == [0, 1, 70, 80, 81, 90, 90, 7]


def test_user_storage_has_nbytes_and_data():
    storage = Own(10)
    assert storage.nbytes == 0 and storage._storage is None
    buffer(storage).extend(steps(0, 3))
    assert storage.nbytes == 3 * 16 and storage._storage["n"].tolist() == [0, 1, 2]


def test_user_storage_is_saved_as_member_of_an_ensemble(tmp_path):
    members = [Own(10), LazyTensorStorage(10)]
    for i, member in enumerate(members):
        buffer(member).extend(steps(10 * i, 10 * i + 4))
    StorageEnsemble(*members).dumps(tmp_path)
    others = [Own(10), LazyTensorStorage(10)]
    buffer(others[0]).extend(steps(70, 75))
    StorageEnsemble(*others).loads(tmp_path)
    assert [member[:]["n"].tolist() for member in others] == [[0, 1, 2, 3], [10, 11, 12, 13]]


def test_another_storages_checkpointer_is_refused():
    with pytest.raises(TypeError, match="ListStorageCheckpointer"):
        Own(10).checkpointer = TensorStorageCheckpointer()


@each("given", [[1, 2], torch.zeros(3), steps(0, 3), 5])
def test_value_that_is_not_a_storage_is_refused_with_an_alternative(given):
    with pytest.raises(TypeError, match=r"storage must be a storage.*TensorStorage"):
        ReplayBuffer(storage=given)
    with pytest.raises(TypeError, match=r"storage must be a storage.*TensorStorage"):
        buffer().set_storage(given)


def test_a_function_that_makes_no_storage_is_refused():
    with pytest.raises(TypeError, match="got a list"):
        ReplayBuffer(storage=list)
    assert isinstance(ReplayBuffer(storage=ListStorage).storage, ListStorage)


def test_a_storage_whose_methods_lack_arguments_is_refused_when_a_buffer_is_made():
    class Short(Own):
        def append(self, checked):
            return super().append(checked)

    with pytest.raises(TypeError, match=r"Short\.append has no argument 'most'"):
        ReplayBuffer(storage=Short(10))


def test_a_member_of_an_ensemble_that_is_no_storage_is_refused():
    with pytest.raises(TypeError, match="got a int"):
        StorageEnsemble(LazyTensorStorage(10), 5)


def test_steps_that_carry_their_own_sequences_are_not_saved_without_them(tmp_path):
    rb = buffer()
    rb.extend(steps(0, 4))
    rb.storage.lanes.own_sequences = lambda slots: torch.zeros_like(slots)
    with pytest.raises(StorageError, match="a Own with rows that carry sequences needs a checkpointer of its own"):
        rb.dumps(tmp_path)
    assert numbers(rb) == [0, 1, 2, 3]


def test_in_a_forked_child_its_lanes_have_the_mutex_of_the_storage():
    storage = Own(10)
    child = os.fork()
    if not child:
        os._exit(storage.lanes.mutex is not storage.mutex)
    assert os.waitpid(child, 0)[1] == 0


class Asking(Own):
    """Asks `Storage` first, in the methods and properties that it defines."""

    @property
    def lanes(self):
        assert not len(super(Own, self).lanes)
        return self._lanes

    @property
    def env_shape(self):
        return super().env_shape

    @property
    def read_only(self):
        return False


def test_properties_of_storage_are_there_for_a_child_that_overrides_them():
    rb = buffer(Asking(10))
    rb.extend(steps(0, 6))
    assert numbers(rb) == list(range(6)) and rb.storage.env_shape == ()
    rb[2] = steps(50, 51)[0]
    assert numbers(rb) == [0, 1, 50, 3, 4, 5] and rb.sample()["n"].shape == (8,)


class WithLanesFromTheFirstWriteOn(Own):
    _made = False

    @property
    def lanes(self):
        return self._lanes if self._made else None


def test_a_storage_without_lanes_before_its_first_write_is_refused_with_what_makes_some():
    with pytest.raises(TypeError, match=r"WithLanesFromTheFirstWriteOn\.lanes is None: .*Lanes\.in_memory"):
        buffer(WithLanesFromTheFirstWriteOn(10))


def test_methods_that_a_child_must_define_are_errors_in_storage():
    storage, slots = Own(10), torch.tensor([0])
    checked = storage.check(steps(0, 1), False)
    storage.append(checked)
    calls = {
        "check": (steps(0, 1), False), "append": (checked,), "overwrite": (slots, steps(0, 1)), "read": (slots,),
        "replace": (checked, slots, slots),
    }  # fmt: skip
    for name, args in calls.items():
        with pytest.raises(NotImplementedError, match=name):
            getattr(super(Own, storage), name)(*args)


def test_child_of_a_storage_with_a_layout_may_define_read_only():
    class Frozen(LazyTensorStorage):
        @property
        def read_only(self):
            return False

    rb = buffer(Frozen(10))
    rb.extend(steps(0, 4))
    assert numbers(rb) == [0, 1, 2, 3]


def test_a_patch_of_some_entries_keeps_the_others_of_rows_of_any_layout():
    rb = buffer()
    rb.extend(steps(0, 6))
    index = torch.tensor([1, 5])
    patch = {"n": torch.tensor([50, 60])}
    rb.update_if_present(index=index, generation=rb.writer.generations_of(index), patch=patch)
    assert numbers(rb) == [0, 50, 2, 3, 4, 60] and rb[:]["episode"].tolist() == [0, 0, 0, 0, 1, 1]


class Kept(Own):
    """Says itself what a copy is made of: all but its counters, which it makes anew."""

    def __getstate__(self):
        return {**vars(self), "_lanes": len(self)}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._lanes = Lanes.in_memory(self.max_size)
        self._lanes.advance(state["_lanes"])


def passed(part):
    with passing_fds([]):
        return pickle.loads(pickle.dumps(part))


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda part: pickle.loads(pickle.dumps(part)),
        lambda part: pickle.loads(ForkingPickler.dumps(part)),
        passed,
    ],
    ids=["deepcopy", "pickle", "sent", "passed"],
)
def test_class_may_say_that_all_its_attributes_are_copied(copied):
    rb = buffer(Kept(10))
    rb.extend(steps(0, 6))
    twin = buffer(copied(rb.storage))
    assert numbers(twin) == list(range(6)) and twin.storage.mutex is not rb.storage.mutex
    twin.extend(steps(6, 8))
    assert numbers(twin) == list(range(8)) and numbers(rb) == list(range(6))


class Around(Storage):
    """Keeps steps in a storage of ours, with its counters, and hands out episodes of two."""

    def __init__(self, inner):
        super().__init__(inner.max_size)
        self.inner = inner

    @property
    def lanes(self):
        return self.inner.lanes

    def check(self, *args, **kwargs):
        return self.inner.check(*args, **kwargs)

    def append(self, *args, **kwargs):
        return self.inner.append(*args, **kwargs)

    def overwrite(self, *args, **kwargs):
        self.inner.overwrite(*args, **kwargs)

    def read(self, *args, **kwargs):
        rows = self.inner.read(*args, **kwargs)
        rows.batch["episode"] = rows.batch["n"] // 2
        return rows


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
def test_storage_around_one_of_ours_is_sampled_by_the_trajectories_that_it_reads(make):
    rb = buffer(Around(make(20)), sampler=SliceSampler(slice_len=2, traj_key="episode"))
    data = steps(0, 20)
    rb.extend(TensorDict({"first": torch.zeros(20, dtype=torch.int64), **data}, [20]))
    assert rb.stats().episodes == 10
    n = rb.sample()["n"].reshape(4, 2)
    assert torch.equal(n[:, 0] % 2, torch.zeros(4).long()) and torch.equal(n[:, 1], n[:, 0] + 1)


def test_a_save_with_more_steps_than_there_is_room_for_is_refused(tmp_path):
    saved, rb = (ReplayBuffer(storage=Own(n), batch_size=2) for n in (5, 3))
    saved.extend(torch.arange(5))
    rb.extend(torch.arange(2))
    saved.dumps(tmp_path)
    for load in (lambda: rb.loads(tmp_path), lambda: rb.load_state_dict(saved.state_dict())):
        with pytest.raises(CheckpointMisfitError, match="room for 3 items here, 5 saved there"):
            load()
        assert rb[:].tolist() == [0, 1]
