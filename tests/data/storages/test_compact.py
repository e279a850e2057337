"""Storages that keep each observation once."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from contracts.tiers import in_quick
from engram._native import testing
from engram.data import (
    Compact,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.checkpointers import rows
from engram.envs.transforms import MultiStepTransform
from engram.store.layout import StoredLayout
from engram.store.steps import Form
from engram.testing import CompactContract
from engram.testing.compact import TwoBuffers


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", 600)  # of a checkpoint: some steps each


class CompactInTiers(CompactContract):
    """Of the random programs the first few are quick."""

    quick = 2

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "program" in metafunc.fixturenames:
            metafunc.parametrize("program", in_quick(range(self.programs), range(self.quick)))


class TestCompactInPrivateMemory(CompactInTiers):
    quick = 12

    def make(self, capacity: int, compact: Any, ndim: int, path: Any) -> LazyTensorStorage:
        return LazyTensorStorage(capacity, ndim=ndim, compact=compact)

    def test_what_is_not_found_in_the_first_batch_is_stored_as_it_is(self, tmp_path: Path) -> None:
        storage = self.make(10, True, 1, tmp_path)
        with pytest.warns(UserWarning, match="stores whole rows here"):
            ReplayBuffer(storage=storage).extend(TensorDict({"x": torch.arange(3)}, [3]))
        assert storage.compact is None and storage.get([2])["x"].tolist() == [2]


class TestCompactInSharedMemory(CompactInTiers):
    programs = 12

    def make(self, capacity: int, compact: Any, ndim: int, path: Any) -> LazyTensorStorage:
        return LazyTensorStorage(capacity, ndim=ndim, compact=compact, shared=True)


class TestCompactInSharedMemoryOfFirstWriters(CompactInTiers):
    programs = 6

    def make(self, capacity: int, compact: Any, ndim: int, path: Any) -> LazyTensorStorage:
        return LazyTensorStorage(capacity, ndim=ndim, compact=compact, shared_init=True)


class TestCompactInSeveralLanes(CompactInTiers):
    programs, quick, frame_bytes = 12, 5, 1.5  # each lane has tails of its own

    def make(self, capacity: int, compact: Any, ndim: int, path: Any) -> LazyTensorStorage:
        return LazyTensorStorage(capacity, ndim=ndim, compact=compact, shared=True, lanes=2 if ndim == 1 else None)


class TestCompactInAFolder(CompactInTiers):
    programs, quick = 12, 5

    def make(self, capacity: int, compact: Any, ndim: int, path: Any) -> LazyMemmapStorage:
        return LazyMemmapStorage(capacity, ndim=ndim, compact=compact, scratch_dir=path)


class TestCompactInTemporaryFiles(CompactInTiers):
    programs = 6

    def make(self, capacity: int, compact: Any, ndim: int, path: Any) -> LazyMemmapStorage:
        return LazyMemmapStorage(capacity, ndim=ndim, compact=compact)


def stacks(n: int, frames: int = 4, shape: tuple[int, ...] = (3, 3), n_steps: int = 1) -> TensorDict:
    """n steps of one episode, whose observations are stacks."""
    shown = torch.randint(0, 256, (n + frames + n_steps, *shape), dtype=torch.uint8)
    pixels = shown.unfold(0, frames, 1).movedim(-1, 1)
    return TensorDict({"pixels": pixels[:n], "next": {"pixels": pixels[n_steps : n + n_steps]}}, [n])


def found(steps: TensorDict, compact: Any = True, ndim: int = 1) -> Compact | None:
    """What a storage finds in a first batch."""
    storage = LazyTensorStorage(64, ndim=ndim, compact=compact)
    ReplayBuffer(storage=storage).extend(steps)
    return storage.compact


def test_frames_and_steps_are_found_in_the_first_batch() -> None:
    assert found(stacks(1)) == Compact(["pixels"], {"pixels": 4}, 1)
    assert found(stacks(9, frames=3)) == Compact(["pixels"], {"pixels": 3}, 1)
    assert found(stacks(20, n_steps=3)) == Compact(["pixels"], {"pixels": 4}, 3)
    two = torch.stack([stacks(8), stacks(8)])
    assert found(two, ndim=2) == Compact(["pixels"], {"pixels": 4}, 1)


def with_n_steps(compact: Any, later: bool, single: bool) -> ReplayBuffer:
    """A buffer of 3-step rows, which a transform makes of single steps."""
    transform, steps = MultiStepTransform(n_steps=3, gamma=0.9), stacks(40)
    steps["next", "reward"], steps["next", "done"] = torch.ones(40, 1), torch.zeros(40, 1, dtype=torch.bool)
    rb = ReplayBuffer(storage=LazyTensorStorage(64, compact=compact), transform=None if later else transform)
    if later:
        rb.append_transform(transform)
    for part in steps.split(1) if single else [steps]:
        rb.extend(part)
    return rb


@each("later, single", [(False, True), (True, True), (False, False)])
def test_n_step_rows_that_a_transform_makes_are_stored_as_such(later: bool, single: bool) -> None:
    rb = with_n_steps(True, later, single)
    found, shares = rb.storage.compact, rb.stats().compact
    assert found == Compact(["pixels"], {"pixels": 4}, 3) and shares is not None and shares.same > 0.9
    assert with_n_steps(Compact(n_steps=2), later, single).storage.compact == Compact(["pixels"], {"pixels": 4}, 2)


FLAT_NAMES = ("obs", "observation", "observations", "state", ("seen", "pixels"), ("me", "obs"))


def flat(name: str | tuple[str, str], n: int = 40, **settings: Any) -> tuple[TensorDict, tuple[str, ...]]:
    """Steps without `"next"`, and where they have the observation that follows one."""
    steps = stacks(n, **settings)
    path = (name,) if isinstance(name, str) else name
    after = {"seen": ("next_seen", "pixels"), "me": ("me", "next_obs")}.get(path[0], (f"next_{path[0]}",))
    made = TensorDict({"reward": torch.ones(n), "done": torch.zeros(n, dtype=torch.bool)}, [n])
    made[path], made[after] = steps["pixels"], steps["next", "pixels"]
    return made, after


@each("named", [False, True])
@each("name", FLAT_NAMES)
def test_flat_rows_store_each_observation_once(name: str | tuple[str, str], named: bool) -> None:
    """As {"obs", "action", "reward", "next_obs", "done"}, at any depth."""
    steps, after = flat(name, 200, shape=(20, 20))
    storage = LazyTensorStorage(200, compact=[name] if named else True)
    rb = ReplayBuffer(storage=storage)
    rb.extend(steps[:195])
    for step in steps[195:]:
        rb.add(step)
    assert storage.compact == Compact([name], {name: 4}, 1)
    assert bool((storage.get(range(200)) == steps).all())
    assert storage.nbytes < 200 * 3 * 400 and rb.stats().compact.same > 0.9
    changed = steps[:3].clone()
    changed[after] += 1
    with pytest.raises(ValueError, match="stored once"):
        storage.set(range(3), changed)


def test_flat_rows_of_arrays_come_as_dicts_and_step_by_step() -> None:
    batch = flat("obs")[0]
    steps = {key: batch[key].numpy() for key in ("obs", "next_obs", "reward", "done")}
    storage = LazyTensorStorage(40, compact="obs")
    rb = ReplayBuffer(storage=storage)
    rb.extend({key: value[:20] for key, value in steps.items()})
    for k in range(20, 40):
        rb.add({key: value[k] for key, value in steps.items()})
    rows = rb[:]
    assert all(np.array_equal(rows[key], value) for key, value in steps.items()) and storage.compact is not None


@each("n_steps", [1, 3])
def test_flat_rows_of_n_steps_are_found(n_steps: int) -> None:
    assert found(flat("obs", n_steps=n_steps)[0]) == Compact(["obs"], {"obs": 4}, n_steps)
    storage = LazyTensorStorage(64, compact=True)
    rb = ReplayBuffer(storage=storage, transform=MultiStepTransform(n_steps, 0.9, next_key="next_obs"))
    batch = flat("obs")[0]
    batch["reward"], batch["done"] = batch["reward"].unsqueeze(1), batch["done"].unsqueeze(1)
    for step in batch.split(1):
        rb.extend(step)
    assert storage.compact == Compact(["obs"], {"obs": 4}, n_steps) and rb.stats().compact.same > 0.9
    assert torch.equal(rb[:]["next_obs"], batch["next_obs"][n_steps - 1 :])


def test_entries_that_only_look_like_pairs_stay_in_the_rows() -> None:
    """Under "next" alone where there is one; of three in a row the first two; others of another form."""
    nested = stacks(9)
    nested["other"], nested["next_other"] = nested["pixels"].clone(), nested["next", "pixels"].clone()
    assert found(nested) == Compact(["pixels"], {"pixels": 4}, 1)
    steps = flat("obs", 9)[0]
    steps["next_next_obs"] = steps["next_obs"].clone()
    assert found(steps) == Compact(["obs"], {"obs": 4}, 1)
    steps["reward"], steps["next_reward"] = torch.zeros(9, 100, 100), torch.zeros(9, 100, 100)
    steps["x"], steps["next_x"] = torch.zeros(9, 100, 100), torch.zeros(9, 100, 99)
    assert found(steps) == Compact(["obs"], {"obs": 4}, 1)


@each("keys, words", [
    ("next_obs", r"names 'next_obs': name 'obs', which it follows"),
    (["obs", "next_obs"], r"names 'next_obs': name 'obs', which it follows"),
    ("other", r"no 'other'"),
    ("reward", r"no observations"),
    ("done_at", r"no \('next', 'done_at'\); .*'next_obs'"),
])  # fmt: skip
def test_keys_of_flat_rows_that_cannot_be_are_refused(keys: Any, words: str) -> None:
    steps = flat("obs", 9)[0]
    steps["done_at"] = torch.zeros(9)
    with pytest.raises(ValueError, match=words):
        found(steps, keys)


def test_pictures_without_a_stack_are_one_frame_each() -> None:
    steps = stacks(9, frames=3)
    steps["next", "pixels"] = torch.roll(steps["pixels"], -1, 0)[..., :1].expand(9, 3, 3, 3).contiguous()
    assert found(steps) == Compact(["pixels"], {"pixels": 1}, 1)


def test_frames_of_several_channels_are_found() -> None:
    steps = stacks(9, frames=4, shape=(3, 2, 2))
    for key in ("pixels", ("next", "pixels")):
        steps[key] = steps[key].flatten(1, 2)
    assert found(steps) == Compact(["pixels"], {"pixels": 4}, 1)


def test_small_observations_beside_large_ones_stay_in_the_rows() -> None:
    steps = stacks(9)
    for key in ("vector", ("next", "vector")):
        steps[key] = torch.zeros(9, 1)
    assert found(steps) == Compact(["pixels"], {"pixels": 4}, 1)


WRONG: list[dict[str, Any]] = [
    {"keys": []}, {"keys": ["a", "a"]}, {"frames": 16}, {"frames": 0}, {"n_steps": 0}, {"frames": True},
    {"keys": ["a"], "frames": {"b": 2}}, {"keys": "reward"}, {"keys": [("next", "a")]},
]  # fmt: skip


@each("settings", WRONG)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Compact(**settings)


def test_frames_that_do_not_divide_the_observation_are_refused() -> None:
    with pytest.raises(ValueError, match="must divide"):
        found(stacks(3), Compact("pixels", frames=3))


def test_a_number_of_frames_that_was_only_found_and_does_not_fit_costs_bytes() -> None:
    steps, more = stacks(40, 4), stacks(40, 6)
    steps["other"], steps["next", "other"] = more["pixels"], more["next", "pixels"]
    storage = LazyTensorStorage(40, compact=["pixels", "other"])
    ReplayBuffer(storage=storage).extend(steps)
    assert storage.compact is not None and storage.compact.frames == {"pixels": 1, "other": 6}
    assert bool((storage.get(range(40)) == steps).all())
    with pytest.raises(ValueError, match=r"stacks of \[4, 6\] frames were given"):
        found(steps, Compact(["pixels", "other"], frames={"pixels": 4, "other": 6}))


@each("written, overwritten", [(0, []), (1, []), (4, []), (9, [0, 1]), (16, [0, 1, 2, 3])])
def test_newest_rows_are_whole_though_rows_come_between_look_and_copy(written: int, overwritten: list[int]) -> None:
    torch.manual_seed(0)
    steps = stacks(40)
    storage = LazyTensorStorage(16, compact=True)  # pieces of two rows
    rb = ReplayBuffer(storage=storage)
    rb.extend(steps[:16])
    table: Any = storage.access.table.rows
    codec, slots = StoredLayout(table.layout, table.observations).codec, torch.tensor([5, 8, 13, 15])

    def meanwhile() -> None:
        if written:
            rb.extend(steps[16 : 16 + written])

    (pixels, after), missing, absent = testing.gather_interrupted(storage.lanes.store, codec, slots, meanwhile)
    whole = [i for i in range(4) if i not in overwritten]
    assert (missing or []) == overwritten and absent is None
    assert torch.equal(pixels[whole], steps["pixels"][slots[whole]])
    assert torch.equal(after[whole], steps["next", "pixels"][slots[whole]])


def test_a_row_stays_itself_where_others_of_its_batch_are_copied_again() -> None:
    torch.manual_seed(0)
    steps, storage = stacks(40), LazyTensorStorage(16, compact=True)
    rb = ReplayBuffer(storage=storage)
    rb.extend(steps[:16])
    table: Any = storage.access.table.rows
    codec, slots = StoredLayout(table.layout, table.observations).codec, torch.tensor([0, 15])
    (pixels, after), missing, absent = testing.gather_interrupted(
        storage.lanes.store, codec, slots, lambda: rb.extend(steps[16:17]), lambda: rb.extend(steps[17:33])
    )
    assert missing is None and absent is None
    assert torch.equal(pixels, steps["pixels"][[32, 15]])
    assert torch.equal(after, steps["next", "pixels"][[32, 15]])


def test_batches_are_whole_beside_a_writer_that_goes_round_and_round() -> None:
    rng, size = np.random.default_rng(0), 4000
    shown = rng.integers(0, 256, (1100, size), np.uint8)
    stacks = np.lib.stride_tricks.sliding_window_view(shown, 4, axis=0).swapaxes(1, 2)
    storage = LazyTensorStorage(48, compact=Compact("x", frames=4))
    rb = TensorDictReplayBuffer(storage=storage, batch_size=40)

    def steps(start: int, stop: int) -> TensorDict:
        n, x, after = torch.arange(start, stop), stacks[start:stop], stacks[start + 1 : stop + 1]
        return TensorDict({"n": n, "x": x.copy(), "next": {"x": after.copy()}}, [stop - start])

    parts = [steps(at, at + 20) for at in range(0, 1000, 20)]  # written without the GIL, in pieces of six steps
    rb.extend(parts[-1])
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            for part in parts:
                rb.extend(part)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(400):
            batch = rb.sample()
            expected = batch["n"].numpy()
            assert np.array_equal(batch["x"], stacks[expected])
            assert np.array_equal(batch["next", "x"], stacks[expected + 1])
    finally:
        done.set()
        writer.join()


@each("written", [0, 1, 5, 16, 40])
def test_rows_that_are_overwritten_while_they_are_saved_are_saved_as_they_were(written: int) -> None:
    torch.manual_seed(0)
    steps, storage = stacks(56), LazyTensorStorage(16, compact=True)
    rb = ReplayBuffer(storage=storage)
    rb.extend(steps[:16])
    with storage.mutex:
        saved = storage.saved_form.source(background=True)
    for at in range(16, 16 + written):
        rb.extend(steps[at : at + 1])
    block = saved.read_block(0, 0, 16)
    saved.close()
    assert storage.layout is not None and saved.left_out == 0
    assert bool((storage.layout.unpack(block[0]) == steps[:16]).all())


def test_a_storage_says_what_its_rows_are_made_of() -> None:
    storage = LazyTensorStorage(400, compact=True)
    rb = ReplayBuffer(storage=storage)
    rb.extend(stacks(100))
    rb.extend(stacks(100))
    shares = rb.stats().compact
    assert shares is not None and (shares.frames, shares.n_steps, shares.advice) == ({"pixels": 4}, 1, None)
    assert shares.bytes_per_step == storage.nbytes / 400
    assert (round(shares.same * 199), round(shares.moved * 199), round(shares.whole * 199)) == (198, 1, 0)
    assert repr(storage) == "LazyTensorStorage(max_size=400, len=200, ndim=1, compact={'pixels': 4})"
    assert ReplayBuffer(storage=LazyTensorStorage(4)).stats().compact is None


def advice(steps: TensorDict, compact: Any = True) -> str:
    """What a storage advises for steps."""
    rb = ReplayBuffer(storage=LazyTensorStorage(1000, compact=compact))
    rb.extend(steps)
    shares = rb.stats().compact
    assert shares is not None and shares.advice is not None
    return shares.advice


def test_a_storage_advises_what_would_make_its_rows_smaller() -> None:
    torch.manual_seed(0)
    beside = torch.stack([stacks(100) for _ in range(4)], 1).reshape(-1)
    assert "ndim=2" in advice(beside, Compact("pixels", frames=4))
    turns = [stacks(90) for _ in range(6)]  # of writers that write ten steps at a time
    in_turns = torch.cat([steps[at : at + 10] for at in range(0, 90, 10) for steps in turns])
    assert "lanes=" in advice(in_turns, Compact("pixels", frames=4))
    assert "n_steps" in advice(stacks(200, n_steps=3), Compact("pixels", frames=4, n_steps=1))
    steps = stacks(200)
    for key in ("noise", ("next", "noise")):
        steps[key] = torch.rand(200, 8)
    assert "'noise'" in advice(steps, Compact(["pixels", "noise"], {"pixels": 4}))


def n_step_episodes(compact: Any, length: int, frames: int = 4, n_steps: int = 3) -> ReplayBuffer:
    """A buffer of n-step rows, of episodes whose last n rows have the last observation as their next one."""
    torch.manual_seed(0)
    storage = LazyTensorStorage(2000, compact=compact)
    rb = ReplayBuffer(storage=storage, transform=MultiStepTransform(n_steps, 0.9))
    for _ in range(400 // length):
        steps = stacks(length, frames)
        steps["next", "reward"] = torch.ones(length, 1)
        steps["next", "done"] = torch.zeros(length, 1, dtype=torch.bool)
        steps["next", "done"][-1] = True
        rb.extend(steps)
    return rb


@each("length, frames", [(20, 4), (10, 4), (5, 4), (4, 1)])
def test_the_ends_of_short_episodes_of_n_step_rows_are_no_reason_for_advice(length: int, frames: int) -> None:
    shares = n_step_episodes(Compact("pixels", frames), length, frames).stats().compact
    assert shares is not None and (shares.n_steps, shares.advice) == (3, None) and shares.whole > 0.09


@each("given, behind", [(1, 3), (5, 3), (3, 1), (100, 3)])
def test_advice_names_the_steps_behind_which_next_observations_are(given: int, behind: int) -> None:
    rb = n_step_episodes(Compact("pixels", 4, given), 20, n_steps=behind)
    assert f"say compact=Compact(n_steps={behind})" in str(rb.stats().compact)


def test_rows_in_no_order_get_no_advice_about_steps() -> None:
    steps = stacks(400, 3)
    for key in ("pixels", ("next", "pixels")):
        steps[key] = torch.rand(400, 20)
    rb = ReplayBuffer(storage=LazyTensorStorage(400, compact="pixels"))
    rb.extend(steps)
    shares = rb.stats().compact
    assert shares is not None and (shares.same, shares.whole, shares.advice) == (0, 1, None)


def written(compact: Any = True) -> tuple[TensorDict, TensorDictReplayBuffer]:
    """Steps, and a buffer that holds them."""
    torch.manual_seed(0)
    steps, rb = stacks(40), TensorDictReplayBuffer(storage=LazyTensorStorage(50, compact=compact), batch_size=8)
    rb.extend(steps)
    return steps, rb


def rows_of(storage: Any, index: Any = slice(None)) -> TensorDict:
    """Stored rows without the index that they store."""
    rows: TensorDict = storage.get(index).exclude("index")
    return rows


def test_a_forked_child_goes_on_with_a_copy() -> None:
    steps, rb = written()
    child = os.fork()
    if child == 0:
        try:
            rb.extend(steps[:30])
            same = bool((rows_of(rb.storage, range(20)) == steps[10:30]).all())
        finally:
            os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((rows_of(rb.storage) == steps).all())


def test_rows_go_as_bytes_from_one_storage_to_another() -> None:
    steps, rb = written()
    whole, by_leaf = (rb.storage.read_packed(torch.arange(10), by_leaf).batch for by_leaf in (False, True))
    for compact in (True, False):
        twin = LazyTensorStorage(50, compact=compact)
        twin.adopt(rb.storage.layout)
        twin.append_packed(whole[0])
        twin.append_leaves(by_leaf)
        assert bool((rows_of(twin) == torch.cat([steps[:10], steps[:10]])).all())


def test_plain_and_compact_members_of_an_ensemble_are_read_together() -> None:
    steps, rb = written()
    for other in (written(compact=False)[1], written()[1]):
        both = ReplayBufferEnsemble(other, rb, batch_size=16)
        batch = both.sample()
        for k in range(2):
            drawn = batch[k]["index", "index"]
            assert torch.equal(batch[k]["next", "pixels"], steps["next", "pixels"][drawn])


def test_columns_and_steps_of_collectors_are_taken_as_batches_are() -> None:
    steps, rb = written()
    table: Any = rb.storage.native.read
    columns = [steps[path[0] if len(path) == 1 else path].numpy() if path != ("index",) else None
               for path in [leaf.path for leaf in table.layout.leaves]]  # fmt: skip
    columns = [np.zeros(40, np.int64) if column is None else column for column in columns]
    assert rb.storage.native.appended is not None
    assert rb.storage.native.appended.push_columns(columns, Form(1, 0, "index"))
    assert bool((rows_of(rb.storage, range(40, 50)) == steps[:10]).all())
    assert bool((rows_of(rb.storage, range(30)) == steps[10:]).all())


def test_pictures_that_stand_still_at_first_are_taken_for_usual_stacks() -> None:
    """As a game shows them after its reset."""
    still = torch.zeros(1, 4, 84, 84, dtype=torch.uint8)
    assert found(TensorDict({"pixels": still, "next": {"pixels": still}}, [1])) == Compact(["pixels"], {"pixels": 4}, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("marks", [{"end_key": ("next", "done")}, {"traj_key": "z episode"}])
def test_flags_and_ids_are_read_where_stored_rows_have_them(dtype: torch.dtype, marks: dict[str, Any]) -> None:
    n = torch.arange(20)
    x = torch.arange(21 * 3).reshape(21, 3).to(dtype)
    following = {"obs": x[1:], "reward": torch.ones(20, 1), "done": (n % 5 == 4).unsqueeze(1)}
    steps = TensorDict({"obs": x[:20], "action": torch.zeros(20), "z episode": n // 5, "next": following}, [20])
    sampler = SliceSampler(slice_len=5, **marks)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40, compact="obs"), sampler=sampler, batch_size=20)
    rb.extend(steps)
    slices = rb.sample()["obs"].reshape(4, 5, 3)
    assert all(any(torch.equal(one, x[k : k + 5]) for k in (0, 5, 10, 15)) for one in slices)


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("width", [4, 20_000])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_all_rows_of_a_batch_from_a_file_have_their_observations(tmp_path, folder, width, prefetch) -> None:
    n = torch.arange(201)
    x = n.to(torch.uint8).unsqueeze(1).expand(-1, width).contiguous()
    steps = TensorDict({"n": n[:200], "x": x[:200], "next": {"x": x[1:]}}, [200])
    storage = LazyMemmapStorage(200, scratch_dir=tmp_path if folder else None, compact="x")
    rb = TensorDictReplayBuffer(storage=storage, batch_size=64, prefetch=prefetch)
    rb.extend(steps)
    for _ in range(10):
        batch = rb.sample()
        assert torch.equal(batch["x"][:, 0], batch["n"].to(torch.uint8))
        assert torch.equal(batch["next", "x"][:, -1], (batch["n"] + 1).to(torch.uint8))


def test_no_batch_has_rows_that_an_empty_took_while_it_was_made(tmp_path: Path) -> None:
    """Rows that are drawn before an `empty`, and looked up after it: nothing of their observations can be copied."""
    storage = LazyMemmapStorage(40, scratch_dir=tmp_path, compact="x")
    rb = TensorDictReplayBuffer(storage=storage, batch_size=16, prefetch=2)

    def steps(at: int) -> TensorDict:
        n = torch.arange(at, at + 21)
        x = (n % 251).to(torch.uint8).unsqueeze(1).expand(-1, 20_000).contiguous()
        return TensorDict({"n": n[:20], "x": x[:20], "next": {"x": x[1:]}}, [20])

    made, ended = [steps(20 * k) for k in range(12)], threading.Event()

    def write() -> None:
        while not ended.is_set():
            for k, some in enumerate(made):
                rb.extend(some)
                if k % 4 == 3:
                    rb.empty()

    rb.extend(made[0])
    writer = threading.Thread(target=write)
    writer.start()
    try:
        batches = 0
        while batches < 1500:
            try:
                batch = rb.sample()
            except RuntimeError:  # it is empty just now
                continue
            batches += 1
            assert torch.equal(batch["x"][:, 0].long(), batch["n"] % 251)
            assert torch.equal(batch["next", "x"][:, -1].long(), (batch["n"] + 1) % 251)
    finally:
        ended.set()
        writer.join()


def test_the_contract_compares_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = TwoBuffers(TestCompactInPrivateMemory(), random.Random(0), tmp_path)
    two.extend()
    two.sample()
    draw = two.compact.sample
    monkeypatch.setattr(two.compact, "sample", lambda: draw().apply(torch.zeros_like))
    with pytest.raises(AssertionError):
        two.sample()
