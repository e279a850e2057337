"""Steps that are written without an index, some entries of rows, n-step returns, and slots that NumPy draws."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

import engram._native as _native
from contracts.children import Child, Signal
from contracts.each import each
from engram._generator import draw_slots_by_numpy
from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler
from engram.data.replay_buffers.storages.single_steps import append_step, read_leaves, read_n_steps
from engram.store import n_step
from engram.store.n_step import NSteps
from engram.store.places import LaneCount

ENVS = 3
DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
STORED = {
    "in memory": lambda path, ndim: LazyTensorStorage(7 * ENVS if ndim == 2 else 7, ndim=ndim),
    "in a file": lambda path, ndim: LazyMemmapStorage(7 * ENVS if ndim == 2 else 7, scratch_dir=path, ndim=ndim),
    "in turns": lambda path, ndim: LazyTensorStorage(7 * ENVS if ndim == 2 else 7, shared=True, ndim=ndim),
}


def step(t: int, *lead: int) -> dict[str, Any]:
    """Whose rows continue one another."""
    obs = np.full((*lead, 2), t, np.float32)
    if lead:
        obs[:] += np.arange(lead[0], dtype=np.float32)[:, None] * 100
    done = np.full((*lead, 1), t % 4 == 3)
    following = {"obs": obs + 1, "reward": obs[..., :1] / 2, "done": done}
    return {"obs": obs, "action": np.full((*lead, 1), t, np.int64), "next": following}


def tensors(of: Any) -> Any:
    return {k: tensors(v) for k, v in of.items()} if isinstance(of, dict) else torch.from_numpy(of)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a.dtype == b.dtype and a.equal(b)


class TestAppendStep:
    @each("stored", STORED)
    @each("ndim", [1, 2])
    def test_rows_and_episodes_are_those_of_add(self, stored, ndim, tmp_path):
        lead = (ENVS,) if ndim == 2 else ()
        added, appended = (
            ReplayBuffer(storage=STORED[stored](tmp_path / name, ndim), sampler=SliceSampler(slice_len=2), batch_size=8)
            for name in ("added", "appended")
        )
        for t in range(20):
            break_at = t + 50 if t > 14 else t  # not what the newest row says that comes
            added.add(step(break_at, *lead))
            if not append_step(appended.storage, step(break_at, *lead)):
                assert t == 0 or stored == "in turns"
                appended.add(step(break_at, *lead))
        assert equal(added[:], appended[:])
        assert added.storage.lanes.states()[0]["seams"] == appended.storage.lanes.states()[0]["seams"] != []
        assert added.write_count == appended.write_count

    @each("found", DTYPES)
    @each("stored", [*DTYPES, "float16"])
    def test_numbers_become_those_that_numpy_makes(self, found, stored):
        numbers = np.array([0, 1, 2, 255, 1 << 40, -3], "float64" if found[0] == "f" else "int64").astype(found)
        converts = found == stored or (stored != "float16" and not (found[0] == "f" and stored[0] in "iu"))
        as_stored = numbers.astype(stored) if converts else np.zeros(1, stored)
        storage = LazyTensorStorage(100)
        ReplayBuffer(storage=storage).add({"x": np.zeros_like(as_stored[:1])})
        written = [append_step(storage, {"x": numbers[i : i + 1]}) for i in range(len(numbers))]
        assert written == [converts] * len(numbers)
        if converts:
            rows = storage[1:]["x"][:, 0].numpy()
            assert rows.dtype == as_stored.dtype and (rows == as_stored).all()

    def test_nan_is_true_and_larger_numbers_are_infinite(self):
        storage = LazyTensorStorage(10)
        ReplayBuffer(storage=storage).add({"flag": np.zeros(2, bool), "x": np.zeros(2, np.float32)})
        assert append_step(storage, {"flag": np.array([np.nan, 0.0]), "x": np.array([1e300, np.nan])})
        assert storage[1]["flag"].tolist() == [True, False]
        assert storage[1]["x"][0] == np.inf and storage[1]["x"][1].isnan()

    @each("taken, shape", [
        *((True, shape) for shape in ((ENVS, 2, 4), (1, ENVS, 2, 1, 4), (ENVS * 8,))),
        *((False, shape) for shape in ((ENVS, 4, 2), (2, ENVS, 4), (ENVS, 8), (ENVS, 2, 2, 2), (1, ENVS * 8))),
    ])  # fmt: skip
    def test_numbers_keep_their_places(self, taken, shape):
        storage = LazyTensorStorage(10 * ENVS, ndim=2)
        ReplayBuffer(storage=storage).add({"image": np.zeros((ENVS, 2, 4), np.uint8)})
        assert append_step(storage, {"image": np.zeros(shape, np.uint8)}) is taken

    def test_flat_arrays_and_lengths_of_1_are_taken(self):
        storage = LazyTensorStorage(10 * ENVS, ndim=2)
        ReplayBuffer(storage=storage).add({"x": np.zeros((ENVS, 2, 1), np.float32), "y": np.zeros((ENVS, 1))})
        assert append_step(storage, {"x": np.arange(6, dtype=np.float32), "y": np.arange(3.0)[None]})
        assert storage[1]["x"].flatten().tolist() == [0, 1, 2, 3, 4, 5] and storage[1]["y"].flatten().tolist() == [
            0,
            1,
            2,
        ]

    @each("name, given", {
        "a missing entry": {"x": np.zeros((ENVS, 2))},
        "one entry more": {"x": np.zeros((ENVS, 2)), "y": np.zeros(ENVS), "z": np.zeros(ENVS)},
        "too few numbers": {"x": np.zeros((ENVS, 1)), "y": np.zeros(ENVS)},
        "axes in another order": {"x": np.zeros((2, ENVS)), "y": np.zeros(ENVS)},
        "more of the environments' axis": {"x": np.zeros((2, ENVS, 1)), "y": np.zeros(ENVS)},
        "another number of environments": {"x": np.zeros((ENVS + 1, 2)), "y": np.zeros(ENVS + 1)},
        "gaps between numbers": {"x": np.zeros((2, ENVS)).T, "y": np.zeros(ENVS)},
        "another byte order": {"x": np.zeros((ENVS, 2), ">f8"), "y": np.zeros(ENVS)},
        "floats for integers": {"x": np.zeros((ENVS, 2)), "y": np.zeros(ENVS), "next": {"n": np.zeros(ENVS)}},
        "a tensor": {"x": torch.zeros(ENVS, 2), "y": np.zeros(ENVS)},
        "a number": {"x": np.zeros((ENVS, 2)), "y": 1.0},
        "objects": {"x": np.zeros((ENVS, 2), object), "y": np.zeros(ENVS)},
        "complex numbers": {"x": np.zeros((ENVS, 2), complex), "y": np.zeros(ENVS)},
        "no dict": np.zeros((ENVS, 2)),
        "nothing": None,
    }.items())  # fmt: skip
    def test_other_data_are_left_to_check_and_append(self, name, given):
        storage = LazyTensorStorage(10 * ENVS, ndim=2)
        first = {"x": np.zeros((ENVS, 2), np.float32), "y": np.zeros(ENVS)}
        if name == "floats for integers":
            first["next"] = {"n": np.zeros(ENVS, np.int64)}
        assert not append_step(storage, first) and len(storage) == 0
        ReplayBuffer(storage=storage).add(first)
        assert append_step(storage, given) is False and storage.write_count == ENVS

    def test_objects_that_are_no_rows_are_left_to_the_storage(self):
        storage = ListStorage(10)
        ReplayBuffer(storage=storage).add(1)
        assert not append_step(storage, {"x": np.zeros(2)})

    def test_a_storage_with_methods_of_its_own_gets_every_step(self):
        class Counting(LazyTensorStorage):
            checked = 0

            def check(self, *args, **kwargs):
                self.checked += 1
                return super().check(*args, **kwargs)

        storage = Counting(10)
        ReplayBuffer(storage=storage).add({"x": np.zeros(2)})
        assert not append_step(storage, {"x": np.zeros(2)}) and storage.checked == 1

    def test_a_layout_of_other_rows_is_refused(self):
        stores, codecs = [], []
        for width in (1, 4):
            storage = LazyTensorStorage(10)
            rows = {"a": np.zeros(width), "next": {"a": np.zeros(width), "done": np.zeros(1, bool)}}
            ReplayBuffer(storage=storage).add(rows)
            stores.append(storage.lanes.store), codecs.append(storage.layout.codec)
        rows = {"a": np.zeros(1), "next": {"a": np.zeros(1), "done": np.zeros(1, bool)}}
        with pytest.raises(ValueError, match="layout"):
            _native.push_step(stores[1], codecs[0], 0, rows)
        with pytest.raises(ValueError, match="layout"):
            _native.push_step(stores[0], codecs[1], 0, rows)
        with pytest.raises(IndexError):
            _native.push_step(stores[0], codecs[0], 1, rows)
        assert [store.rows() for store in stores] == [1, 1]

    def test_rows_that_are_only_observed_are_read_and_not_written(self, tmp_path):
        rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
        for t in range(4):
            rb.add(step(t))
        observed = ReplayBuffer.open(tmp_path, read_only=True).storage
        assert not append_step(observed, step(4)) and rb.write_count == 4
        assert read_leaves(observed, np.array([1]), (("action",),)).batch[0].tolist() == [[1]]
        assert read_n_steps(observed, np.array([1]), np.ones(6)).rewards.tolist() == [[0.5, 1, 1.5, 0, 0]]


class TestStepsBesideOthers:
    def test_a_step_behind_one_of_another_process_begins_a_trajectory(self):
        storage = LazyTensorStorage(20, shared=True)
        rb = ReplayBuffer(storage=storage)
        rb.add(step(0))
        Child(lambda: append_step(storage, step(1)) or rb.add(step(1))).result()
        rb.add(step(2))
        assert append_step(storage, step(3)) and storage.lanes.states()[0]["seams"] == [1, 2]

    def test_a_process_that_another_one_keeps_out_is_told(self):
        storage = LazyTensorStorage(20, shared=True)
        rb = ReplayBuffer(storage=storage)
        rb.add(step(0))
        go, there = Signal(), Signal()

        def hold():
            with storage.mutex, storage.access.turn():
                there.send(), go.wait()

        child = Child(hold)
        there.wait()
        assert not append_step(storage, step(1))
        go.send(), child.result()
        assert append_step(storage, step(1)) and rb.write_count == 2

    def test_steps_move_on_from_lane_to_lane(self):
        storage = LazyTensorStorage(8, shared=True, lanes=LaneCount(4))
        rb = ReplayBuffer(storage=storage)
        rb.add(step(0))
        assert all(append_step(storage, step(t)) for t in range(1, 5))
        Child(lambda: [append_step(storage, step(50)), rb.add(step(50))]).result()  # the first one is left to `add`
        assert append_step(storage, step(5)) and append_step(storage, step(6))
        lanes = storage.lanes.counters()
        assert [lane["published"] for lane in lanes] == [2, 2, 2, 2]
        assert storage.lanes.states()[3]["seams"] == [
            1,
            2,
        ]  # behind another process, and a stint
        assert storage[:]["action"].flatten().tolist() == [0, 1, 2, 3, 4, 5, 50, 6]

    def test_a_child_that_was_forked_by_other_code_does_not_write_to_its_parents_lane(self):
        storage = LazyTensorStorage(20, shared=True, lanes=2)
        ReplayBuffer(storage=storage).add(step(0))
        pid = ctypes.PyDLL(None).fork()  # of which no hook of Python's is told
        if pid == 0:
            code = 9
            with contextlib.suppress(BaseException):
                code = int(append_step(storage, step(1)))
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert append_step(storage, step(1)) and storage.write_count == 2


class TestReadLeaves:
    @each("ndim", [1, 2])
    @each("native", [True, False])
    def test_entries_are_those_of_the_rows(self, ndim, native, tmp_path):
        storage = STORED["in a file"](tmp_path, ndim)
        rb = ReplayBuffer(storage=storage)
        for t in range(12):
            rb.add(step(t, *(ENVS,) * (ndim - 1)))
        if not native:
            storage.native.read = None
        slots = torch.tensor([5, 0, 3, 3])
        rows = storage.read(slots).batch
        for given in (slots, slots.numpy()):
            found = read_leaves(storage, given, (("next", "reward"), ("obs",), ("next", "done"), ("obs",)))
            following, obs = rows["next"], rows["obs"]
            expected = [following["reward"], obs, following["done"], obs]
            assert all(equal(a, b) for a, b in zip(found.batch, expected, strict=True))
            assert found.absent is found.overwritten is None

    @each("native", [True, False])
    def test_an_entry_that_rows_do_not_have_is_named(self, native):
        storage = LazyTensorStorage(10)
        ReplayBuffer(storage=storage).add(step(0))
        if not native:
            storage.native.read = None
        with pytest.raises(KeyError, match="missing"):
            read_leaves(storage, np.zeros(1, np.int64), (("next", "missing"),))

    def test_slots_without_a_row_are_named_and_others_refused(self):
        storage = LazyTensorStorage(10)
        ReplayBuffer(storage=storage).add(step(0))
        assert read_leaves(storage, np.array([0, 4]), (("obs",),)).absent == [1]
        for slots in ([10], [-1]):
            with pytest.raises(IndexError):
                read_leaves(storage, np.array(slots), (("obs",),))
        for slots in (np.array([0.0]), np.array([[0]]), np.arange(4)[::2]):
            with pytest.raises(TypeError):
                read_leaves(storage, slots, (("obs",),))

    def test_a_leaf_that_the_layout_does_not_have_is_refused(self):
        storage = LazyTensorStorage(10)
        ReplayBuffer(storage=storage).add({"x": np.zeros(2)})
        other = LazyTensorStorage(10)
        ReplayBuffer(storage=other).add({"x": np.zeros(200)})
        with pytest.raises(IndexError, match="leaf"):
            storage.lanes.store.gather_leaves(storage.layout.codec, np.array([0]), [1])
        with pytest.raises(ValueError, match="layout"):
            storage.lanes.store.gather_leaves(other.layout.codec, np.array([0]), [0])


def walk(rows: list[dict[str, Any]], first: int, steps: int) -> tuple[list[float], int]:
    """The rewards of a step and those behind it, and the last of these, one after the other."""
    rewards = []
    for t in range(first, len(rows)):
        rewards.append(rows[t]["next"]["reward"].item())
        if rows[t]["next"]["done"] or len(rewards) == steps or t + 1 == len(rows):
            return rewards, t
    raise AssertionError


class TestReadNSteps:
    @each("written", [3, 7, 17])
    @each("ndim", [1, 2])
    @each("native", [True, False])
    @each("steps", [1, 2, 3, 9])
    def test_they_end_with_the_episode_and_with_the_newest_row(self, written, ndim, native, steps, tmp_path):
        envs = ENVS if ndim == 2 else 1
        storage = STORED["in memory"](tmp_path, ndim)
        rb = ReplayBuffer(storage=storage)
        for t in range(written):
            rb.add(step(t, *(ENVS,) * (ndim - 1)))
        if not native:
            storage.native.read = None
        powers = np.float32(0.9) ** np.arange(steps + 1)
        at = [(t, env) for t in range(max(0, written - 7), written) for env in range(envs)]
        found = read_n_steps(storage, np.array([t % 7 * envs + env for t, env in at]), powers)
        assert type(found) is NSteps and found.rewards.dtype == found.returns.dtype == found.discounts.dtype
        for i, (t, env) in enumerate(at):
            history = [step(s, *(ENVS,) * (ndim - 1)) for s in range(written)]
            mine = [{"next": {k: v[env] if ndim == 2 else v for k, v in h["next"].items()}} for h in history]
            rewards, last = walk(mine, t, steps)
            assert found.rewards[i].tolist() == rewards + [0.0] * (steps - len(rewards))
            assert (found.last[i], found.counts[i]) == (last % 7 * envs + env, len(rewards))
            assert found.returns[i].item() == pytest.approx(float(np.dot(rewards, powers[: len(rewards)])))
            assert found.discounts[i].tolist() == [np.float32(powers[len(rewards)])]

    @each("steps", [1, 2, 7, 8, 9, 16, 23, 128, 129, 300])
    def test_returns_are_numpys_to_the_last_bit(self, steps):
        storage = LazyTensorStorage(400)
        done = torch.zeros(400, dtype=torch.bool)
        done[torch.randint(0, 400, (3,))] = True
        ReplayBuffer(storage=storage).extend({"next": {"reward": torch.randn(400), "done": done}})
        powers = np.float32(0.99) ** np.arange(steps + 1, dtype=np.float32)
        slots = torch.arange(400)
        native = read_n_steps(storage, slots, powers)
        storage.native.read = None
        assert all(equal(a, b) for a, b in zip(native, read_n_steps(storage, slots, powers), strict=True))

    @each("native", [True, False])
    @each("ends", [(), (2,)])
    def test_of_no_steps_there_are_no_returns(self, native, ends):
        storage = LazyTensorStorage(4)
        rows = {"reward": torch.zeros(4), "done": torch.zeros(4, *ends, dtype=torch.bool)}
        ReplayBuffer(storage=storage).extend({"next": rows})
        if not native:
            storage.native.read = None
        found = read_n_steps(storage, torch.arange(0), np.ones(4))
        assert [part.shape for part in found] == [(0, 3), (0,), (0,), (0, 1), (0, 1)]

    @each("dtype", [torch.float32, torch.float64, torch.int64, torch.int8, torch.bool, torch.float16])
    def test_rewards_of_any_dtype_become_float32(self, dtype):
        storage = LazyTensorStorage(4)
        rewards = torch.tensor([0, 1, 1, 0]).to(dtype)
        done = torch.zeros(4, dtype=torch.bool)
        ReplayBuffer(storage=storage).extend({"next": {"reward": rewards, "done": done}})
        assert read_n_steps(storage, np.array([0]), [1, 0.5, 0.25]).returns.equal(torch.tensor([[0.5]]))

    @each("native", [True, False])
    def test_lanes_of_others_are_no_continuation(self, native):
        storage = LazyTensorStorage(8, shared=True, lanes=LaneCount(2))
        rb = ReplayBuffer(storage=storage)
        rb.add(step(0)), rb.add(step(1))
        Child(lambda: ReplayBuffer(storage=storage).extend(tensors(stacked(4, 5, 6)))).result()
        if not native:
            storage.native.read = None
        found = read_n_steps(storage, np.array([0, 1, 4, 6]), np.ones(4))
        assert found.rewards.tolist() == [[0, 0.5, 0], [0.5, 0, 0], [2, 2.5, 3], [3, 0, 0]]
        assert found.last.tolist() == [1, 1, 6, 6]

    @each("native", [True, False])
    def test_slots_without_a_row_are_an_error(self, native):
        storage = LazyTensorStorage(8)
        with pytest.raises(IndexError):
            read_n_steps(storage, np.array([0]), np.ones(3))
        ReplayBuffer(storage=storage).add(step(0))
        if not native:
            storage.native.read = None
        for slot in (1, 8, -1):
            with pytest.raises(IndexError):
                read_n_steps(storage, np.array([0, slot]), np.ones(3))

    @each("native", [True, False])
    def test_other_entries_are_refused(self, native):
        storage = LazyTensorStorage(8)
        ReplayBuffer(storage=storage).add(step(0))
        if not native:
            storage.native.read = None
        slots = np.array([0])
        for reward, done, error in (
            (("obs",), ("next", "done"), ValueError), (("action",), ("next", "reward"), ValueError),
            (("gone",), ("next", "done"), KeyError), (("action",), ("gone",), KeyError),
        ):  # fmt: skip
            with pytest.raises(error):
                read_n_steps(storage, slots, np.ones(3), reward, done)
        for discounts in ([1.0], [], np.ones((2, 2))):
            with pytest.raises(ValueError, match="discounts must be"):
                read_n_steps(storage, slots, discounts)

    def test_the_native_call_checks_what_it_is_given(self):
        storage = LazyTensorStorage(8)
        ReplayBuffer(storage=storage).add(step(0))
        codec, store, slots = storage.layout.codec, storage.lanes.store, np.array([0])
        discounts = np.ones(3, np.float32)
        for reward, done in ((9, 4), (1, 9)):
            with pytest.raises(IndexError, match="leaf"):
                _native.read_n_steps(store, codec, slots, discounts, reward, done)
        for wrong in (np.ones(1, np.float32), np.ones(0, np.float32), np.ones(3), np.ones(6, np.float32)[::2]):
            with pytest.raises((ValueError, TypeError)):
                _native.read_n_steps(store, codec, slots, wrong, 1, 4)
        assert _native.read_n_steps(store, codec, np.array([1]), discounts, 1, 4) is None

    def test_one_flag_of_several_is_enough(self):
        storage = LazyTensorStorage(8)
        flags = torch.tensor([[False, False], [False, True], [False, False]])
        ReplayBuffer(storage=storage).extend({"r": torch.arange(3.0), "ends": flags})
        assert read_n_steps(storage, np.array([0, 2]), np.ones(4), ("r",), ("ends",)).counts.tolist() == [2, 1]

    def test_rows_that_are_overwritten_meanwhile_are_not_taken(self):
        storage = LazyTensorStorage(4)
        rb = ReplayBuffer(storage=storage)
        for t in range(4):
            rb.add(step(t))
        reads = []

        def read(at):
            rows = read_leaves(storage, at, (("next", "reward"), ("next", "done")))
            if not reads:
                rb.add(step(9))  # in the place of the oldest
            reads.append(at)
            return rows.batch[0].reshape(-1), rows.batch[1].reshape(-1)

        assert n_step.read_n_steps(storage.lanes, torch.tensor([0]), np.ones(3, np.float32), read) is None
        assert n_step.read_n_steps(storage.lanes, torch.tensor([1]), np.ones(3, np.float32), read) is not None


class TestDrawsOfNumPy:
    @each("times", [1, 2, 3, 7, 8, 1000, 65_537, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 1 << 40])
    @each("envs", [1, 2, 3, 8])
    def test_numbers_and_state_are_those_of_randint(self, times, envs):
        np.random.seed(7)
        expected = np.random.randint(0, times, size=50) * envs + np.random.randint(0, envs, size=50)
        after = np.random.random(3)
        np.random.seed(7)
        assert draw_slots_by_numpy(50, times, envs).tolist() == expected.tolist()
        assert (np.random.random(3) == after).all()

    def test_nothing_to_draw_from_is_an_error(self):
        for times, envs in ((0, 1), (1, 0), (1 << 60, 8)):
            with pytest.raises(ValueError):
                draw_slots_by_numpy(1, times, envs)
        with pytest.raises(AttributeError):
            _native.draw_slots_by_numpy(object(), 1, 1, 1)

    def test_a_thread_that_draws_is_waited_for(self):
        drawing = threading.Thread(target=draw_slots_by_numpy, args=(5, 10), daemon=True)
        with np.random.get_bit_generator().lock:
            drawing.start()
            drawing.join(0.2)
            assert drawing.is_alive()
        drawing.join(300)
        assert not drawing.is_alive()

    def test_a_generator_that_was_put_in_its_place_is_drawn_from(self):
        before = np.random.get_bit_generator()
        try:
            np.random.set_bit_generator(np.random.PCG64(3))
            expected = np.random.randint(0, 10, size=20).tolist()
            np.random.set_bit_generator(np.random.PCG64(3))
            assert draw_slots_by_numpy(20, 10).tolist() == expected
        finally:
            np.random.set_bit_generator(before)


def stacked(*times: int) -> dict[str, Any]:
    rows = [step(t) for t in times]
    following = {k: np.stack([row["next"][k] for row in rows]) for k in rows[0]["next"]}
    return {k: following if k == "next" else np.stack([row[k] for row in rows]) for k in rows[0]}
