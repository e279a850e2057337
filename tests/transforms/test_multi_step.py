"""n-step returns: a slow loop says what is right, streams are cut anywhere, and no step is lost."""

import pickle
import threading
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, tensorclass

from contracts.children import Child
from contracts.each import each
from engram.checkpoint.snapshot import save_snapshot
from engram.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MultiStep,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.errors import CheckpointError, CheckpointMisfitError
from engram.testing.transform import as_dict, assert_equal
from engram.transforms import Compose, MultiStepTransform, RewardScaling, StepCounter, Transform, VecNorm
from transforms.data import flags, steps


def stream(lengths, ids=False, seed=0):
    """Trajectories one after the other [T], each with a done at its end (or, with ids, with none at all)."""
    n = sum(lengths)
    ends = torch.zeros(n, dtype=torch.bool)
    ends[torch.tensor(lengths).cumsum(0) - 1] = not ids
    generator = torch.Generator().manual_seed(seed)
    data = {
        "n": torch.arange(n),
        "next": {"n": torch.arange(1, n + 1), "reward": torch.randn(n, 1, generator=generator).double(), **flags(ends)},
    }
    if ids:
        data["collector"] = {"traj_ids": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))}
    return TensorDict(data, [n])


def slow(lengths, data, n_steps, gamma):
    """What each step becomes, by loops: (reward, next n, steps, done)."""
    rows, start = [], 0
    for length in lengths:
        for t in range(start, start + length):
            end = min(t + n_steps, start + length)
            reward = sum(gamma ** (k - t) * data["next", "reward"][k].item() for k in range(t, end))
            rows.append((reward, end, end - t, bool(data["next", "done"][end - 1])))
        start += length
    return rows


def assert_n_step(found, rows, gamma, from_postproc=False):
    assert found["n"].tolist() == list(range(len(found)))
    rows = rows[: len(found)]
    torch.testing.assert_close(found["next", "reward"].flatten(), torch.tensor([r[0] for r in rows]).double())
    assert found["next", "n"].tolist() == [r[1] for r in rows]
    assert found["steps_to_next_obs"].flatten().tolist() == [r[2] for r in rows]
    assert found["next", "done"].flatten().tolist() == [r[3] for r in rows]
    torch.testing.assert_close(found["gamma"].flatten(), gamma ** found["steps_to_next_obs"].flatten().double())
    if from_postproc:
        assert found["nonterminal"].tolist() == [r[2] > 1 for r in rows]
    else:
        assert found["nonterminal"].flatten().tolist() == [not r[3] for r in rows]
    shape = (len(found),) if from_postproc else (len(found), 1)
    assert found["gamma"].shape == found["steps_to_next_obs"].shape == found["nonterminal"].shape == shape


lengths_of = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), lengths=lengths_of, n_steps=st.integers(1, 6), ids=st.booleans())
def test_streams_cut_anywhere_give_what_a_slow_loop_gives(data, lengths, n_steps, ids):
    batch, gamma = stream(lengths, ids), 0.9
    cuts = sorted(data.draw(st.sets(st.integers(0, len(batch)), max_size=10)) | {0, len(batch)})
    transform = MultiStepTransform(n_steps, gamma)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
    written = []
    for start, stop in pairwise(cuts):
        single = stop == start + 1 and data.draw(st.booleans())
        piece = batch[start] if single else batch[start:stop]
        piece = as_dict(piece) if data.draw(st.booleans()) and start == 0 else piece
        index = rb.add(piece) if single else rb.extend(piece)
        assert index.dtype == torch.int64 and index.ndim == 1
        written += index.tolist()
        assert len(rb) + transform.held_back == stop and transform.held_back <= n_steps - 1
    assert written == list(range(len(rb)))
    rows = slow(lengths, batch, n_steps, gamma)
    if len(rb):
        found = TensorDict(rb[:], [len(rb)])  # dicts where the first piece was one
        assert_n_step(found, rows, gamma)
        assert torch.equal(found["next", "original_reward"], batch["next", "reward"][: len(rb)])
    # Whatever waits belongs to a trajectory that has not ended.
    assert len(rb) == len(batch) if not ids else transform.held_back == min(n_steps - 1, lengths[-1])


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    envs=st.lists(st.lists(st.integers(1, 6), min_size=8, max_size=8), min_size=1, max_size=3),
    n_steps=st.integers(1, 5),
    dim_extend=st.sampled_from([0, 1]),
)
def test_environments_wait_for_the_slowest_and_stay_rectangular(data, envs, n_steps, dim_extend):
    T, gamma = 8, 0.5
    strands = [stream(lengths, seed=e)[:T] for e, lengths in enumerate(envs)]
    batch = torch.stack(strands)
    expected = []
    for lengths, strand in zip(envs, strands, strict=True):
        shown, left = [], T
        for length in lengths:
            shown.append(min(length, left))
            left -= shown[-1]
            if not left:
                break
        expected.append(slow(shown, strand, n_steps, gamma))
    cuts = sorted(data.draw(st.sets(st.integers(1, T), max_size=5)) | {0, T})
    rb = ReplayBuffer(
        storage=LazyTensorStorage(200, ndim=2), dim_extend=dim_extend, transform=MultiStepTransform(n_steps, gamma)
    )
    for start, stop in pairwise(cuts):
        piece = batch[:, start:stop]
        index = rb.extend(piece if dim_extend else piece.transpose(0, 1))
        assert index.shape[1] == 2
    done = rb._transform[0].held_back
    if len(rb):
        found = rb[:] if dim_extend else rb[:].transpose(0, 1)
        assert found.shape == (len(envs), T - done)
        for strand, rows in zip(found, expected, strict=True):
            assert_n_step(strand, rows, gamma)
    assert done <= n_steps - 1


@settings(max_examples=25, deadline=None)
@given(lengths=lengths_of, n_steps=st.integers(1, 12), ids=st.booleans())
def test_the_postproc_gives_what_a_slow_loop_gives(lengths, n_steps, ids):
    batch = stream(lengths, ids)
    assert_n_step(MultiStep(0.9, n_steps)(batch), slow(lengths, batch, n_steps, 0.9), 0.9, from_postproc=True)
    made = MultiStep(0.9, n_steps)(torch.stack([batch, batch]))
    for row in made:
        assert_n_step(row, slow(lengths, batch, n_steps, 0.9), 0.9, from_postproc=True)
    assert_equal(MultiStep(0.9, n_steps)(as_dict(batch)), made[0])


def test_the_postproc_is_a_module_that_leaves_the_batch_as_it_was():
    batch, expected = stream([3, 4]), stream([3, 4])
    postproc = MultiStep(0.9, 2).to("cpu")
    assert isinstance(postproc, torch.nn.Module) and isinstance(pickle.loads(pickle.dumps(postproc)), MultiStep)
    made = postproc(batch)
    assert made is not batch and made["n"] is batch["n"]
    assert_equal(batch, expected)


@each("n_steps", [1, 2, 5])
def test_the_postproc_does_not_look_into_padding(n_steps):
    rows = [stream([5], ids=True), stream([2], ids=True)]
    padded = torch.stack([rows[0], torch.cat([rows[1], stream([3], ids=True)])])
    padded["collector", "traj_ids"].zero_()
    padded["collector", "mask"] = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    reward = padded["next", "reward"].clone()
    made = MultiStep(0.9, n_steps)(padded)
    for k, lengths in enumerate(([5], [2])):
        assert_n_step(made[k, : lengths[0]], slow(lengths, rows[k], n_steps, 0.9), 0.9, from_postproc=True)
    assert torch.equal(made["next", "reward"][1, 2:], reward[1, 2:])
    unmasked = MultiStep(0.9, n_steps, mask_key="absent")(padded.exclude("gamma", ("next", "original_reward")))
    assert unmasked.shape == (2, 5)


def test_one_step_changes_no_reward_and_no_next_observation():
    batch = stream([3, 4])
    made = MultiStep(0.5, 1)(batch.clone())
    assert_equal(made["next"].exclude("original_reward"), batch["next"])
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=MultiStepTransform(1, 0.5))
    assert rb.extend(batch[:5]).tolist() == [0, 1, 2, 3, 4]


@each("dtype", [torch.float16, torch.bfloat16])
@each("how", ["postproc", "transform"])
def test_rewards_of_half_precision_are_summed_in_float32(dtype, how):
    large = torch.tensor([60000.0, 60000, -60000, 256, 1, 1, 1, 1]).to(dtype)
    ends = torch.tensor([0, 0, 1, 0, 0, 0, 0, 1]).bool()
    batch = TensorDict({"next": {"reward": large.unsqueeze(-1), **flags(ends)}}, [8])
    if how == "postproc":
        made = MultiStep(1.0, 5)(batch)
    else:
        rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=MultiStepTransform(5, 1.0))
        rb.extend(batch)
        made = rb[:]
    assert made["next", "reward"].dtype is dtype
    assert torch.equal(made["next", "reward"][:3, 0], torch.tensor([60000.0, 0, -60000]).to(dtype))
    assert made["next", "reward"][3].item() == 260


def test_other_rewards_and_flags_can_be_named():
    batch = (
        stream([4]).rename_key_(("next", "reward"), ("next", "score")).rename_key_(("next", "done"), ("next", "over"))
    )
    made = MultiStep(0.5, 2, reward_keys=[("next", "score")], done_key=("next", "over"))(batch.clone())
    expected = MultiStep(0.5, 2)(stream([4]))
    assert torch.equal(made["next", "score"], expected["next", "reward"]) and ("next", "original_score") in made.keys(
        True
    )
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.append_transform(MultiStepTransform(2, 0.5, reward_keys=[("next", "score")], done_key=("next", "over")))
    rb.extend(batch)
    assert torch.equal(rb[:]["next", "score"], expected["next", "reward"])
    with pytest.raises(ValueError, match="under 'next'"):
        MultiStep(0.5, 2, reward_keys=["reward"])
    assert repr(MultiStepTransform(2, 0.5)) == "MultiStepTransform(n_steps=2, gamma=0.5)"
    two = MultiStepTransform(2, 0.5, reward_keys=["reward", "score"])
    assert "reward_keys=[('next', 'reward'), ('next', 'score')]" in repr(two)
    short = MultiStepTransform(2, 0.5, reward_keys=["score"], done_key="over", done_keys=["over"])
    assert (short.reward_keys, short.done_key) == ([("next", "score")], ("next", "over"))
    assert MultiStepTransform(2, 0.5).done_keys == [("next", flag) for flag in ("done", "truncated", "terminated")]
    with pytest.raises(KeyError, match=r"\('next', 'reward'\)"):
        MultiStep(0.5, 2, done_key=("next", "over"))(batch)


@pytest.mark.parametrize("make", [lambda g, n: MultiStep(g, n), lambda g, n: MultiStepTransform(n, g)])
def test_bad_settings_are_refused_at_once(make):
    for gamma in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="gamma must be 0 to 1"):
            make(gamma, 3)
    for n in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="n_steps must be an integer of 1 or more"):
            make(0.9, n)


# ---- what waits ----
def buffer(storage=None, n_steps=3, **parts):
    storage = LazyTensorStorage(100) if storage is None else storage
    return ReplayBuffer(storage=storage, transform=MultiStepTransform(n_steps, 0.9), **parts)


def test_an_extend_that_leads_to_nothing_to_write_returns_no_indices():
    for storage in (LazyTensorStorage(10), ListStorage(10), LazyMemmapStorage(10)):
        rb = buffer(storage)
        index = rb.extend(stream([9])[:2])
        assert index.shape == (0,) and index.dtype == torch.int64 and len(rb) == 0 and rb.write_count == 0
        assert rb.add(stream([9])[2]).tolist() == [0]
    rb = buffer(LazyTensorStorage(10, ndim=2))
    assert rb.extend(stream([9])[:2].unsqueeze(0)).shape == (0, 2)
    for rb in (ReplayBuffer(storage=LazyTensorStorage(10)), buffer(), buffer(LazyTensorStorage(10))):
        for _ in range(2):
            with pytest.raises(ValueError, match="nothing to add"):
                rb.extend(stream([9])[:0])
            rb.extend(stream([9])[:2])


def test_waiting_steps_are_copies():
    rb, batch = buffer(), stream([6])
    piece = batch[:4].clone()
    rb.extend(piece)
    piece["n"].fill_(-1)
    piece["next", "reward"].fill_(-1)
    rb.extend(batch[4:])
    assert_n_step(rb[:], slow([6], batch, 3, 0.9), 0.9)


def test_what_waits_is_saved_and_goes_on_in_a_buffer_that_loads_it(tmp_path):
    batch = stream([3, 8])
    for ndim in (1, 2):
        shaped = batch if ndim == 1 else batch.unsqueeze(0)
        for stop in range(1, 11):
            rb, twin, other = (buffer(LazyTensorStorage(50, ndim=ndim)) for _ in range(3))
            rb.extend(shaped[..., :stop])
            rb.dumps(tmp_path / f"{ndim}-{stop}")
            twin.loads(tmp_path / f"{ndim}-{stop}")
            other.load_state_dict(rb.state_dict())
            for b in (rb, twin, other):
                b.extend(shaped[..., stop:])
                assert_n_step(b[:].reshape(-1), slow([3, 8], batch, 3, 0.9), 0.9)


def test_a_checkpoint_of_a_buffer_without_transforms_leaves_nothing_waiting(tmp_path):
    other, made, rb = ReplayBuffer(storage=LazyTensorStorage(100)), buffer(), buffer()
    made.extend(stream([4]))
    other.extend(made[:])
    other.dumps(tmp_path)
    for load in (lambda: rb.loads(tmp_path), lambda: rb.load_state_dict(other.state_dict())):
        rb.extend(stream([9])[:5])
        load()
        assert len(rb) == 4 and rb._transform[0].held_back == 0


def test_a_state_that_says_nothing_of_transforms_is_refused(tmp_path):
    rb = buffer()
    rb.extend(stream([9])[:5])
    components = {name: {"kind": name, "state": {}} for name in ("sampler", "writer", "generator")}
    save_snapshot(tmp_path, components, (rb.storage.checkpointer, rb.storage.saved_form.source(background=False)))
    state = rb.state_dict()
    del state["transform"]
    for load in (lambda: rb.loads(tmp_path), lambda: rb.load_state_dict(state)):
        with pytest.raises(CheckpointError, match="no transform"):
            load()
        assert rb._transform[0].held_back == 2


def test_what_waited_needs_a_place_where_it_is_loaded(tmp_path):
    rb, plain = buffer(), ReplayBuffer(storage=LazyTensorStorage(100))
    rb.extend(stream([9])[:5])
    rb.dumps(tmp_path)
    for load in (lambda: plain.loads(tmp_path), lambda: plain.load_state_dict(rb.state_dict())):
        with pytest.raises(ValueError, match="the state of a MultiStepTransform was saved"):
            load()
        assert len(plain) == 0
    plain.loads(tmp_path, parts=("storage",))
    assert len(plain) == 3
    settled = buffer()
    settled.extend(stream([5]))
    settled.dumps(tmp_path / "settled")
    plain.loads(tmp_path / "settled")
    assert len(plain) == 5


def test_emptying_drops_what_waits():
    rb = buffer()
    rb.extend(stream([9])[:5])
    rb.empty()
    assert rb._transform[0].held_back == 0
    rb.extend(stream([4]))
    assert_n_step(rb[:], slow([4], stream([4]), 3, 0.9), 0.9)


@each("before", [0, 1, 5])
@each("what", ["dtype", "narrower dtype", "shape", "missing", "new"])
def test_a_refused_extend_leaves_what_waits_as_it_was(before, what):
    batch, rb = stream([12]), buffer()
    example = buffer()
    example.extend(batch)
    if before == 0:
        # Nothing waits, and the storage has its layout: what would only wait is compared with that.
        rb = buffer(TensorStorage(example[:].clone()))
        rb.empty()
    else:
        rb.extend(batch[:before])
    bad = batch[before : before + 1].clone()
    if what == "dtype":
        bad["n"] = bad["n"].float()
    elif what == "narrower dtype":
        bad["n"] = bad["n"].int()
    elif what == "shape":
        bad["next", "reward"] = torch.zeros(1, 2)
    elif what == "missing":
        del bad["n"]
    else:
        bad["colour"] = torch.zeros(1)
    held, n = rb._transform[0].held_back, len(rb)
    with pytest.raises(ValueError, match={"new": "colour", "shape": "reward"}.get(what, "'n'")):
        rb.extend(bad)
    assert rb._transform[0].held_back == held and len(rb) == n
    rb.extend(batch[before:])
    assert_n_step(rb[:], slow([12], batch, 3, 0.9), 0.9)


def test_a_writer_that_refuses_also_refuses_what_would_only_wait():
    rb = buffer()
    rb.extend(stream([9]))
    rb.set_writer(ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="immutable"):
        rb.extend(stream([9])[:1])
    assert rb._transform[0].held_back == 0


def test_transforms_on_either_side_see_each_step_once():
    """RewardScaling is inverted: on writing. On its left it sees sums of n steps, on its right single steps."""
    batch = stream([7])

    class Scale(RewardScaling):
        inv = RewardScaling.forward

    scaled = batch.clone()
    scaled["next", "reward"] *= 2
    for order in (0, 1):
        parts = [MultiStepTransform(3, 0.9), Scale(0.0, 2.0)]
        rb = ReplayBuffer(storage=LazyTensorStorage(50), transform=Compose(*(parts if order else parts[::-1])))
        for t in range(7):
            rb.add(batch[t])
        torch.testing.assert_close(
            rb.storage[:]["next", "reward"].flatten(), torch.tensor([r[0] for r in slow([7], scaled, 3, 0.9)]).double()
        )
    rb = ReplayBuffer(storage=LazyTensorStorage(50))
    rb.append_transform(MultiStepTransform(3, 0.9))
    rb.append_transform(StepCounter(), invert=True)
    for t in range(7):
        rb.add(batch[t])
    assert rb[:]["step_count"].flatten().tolist() == list(range(7))
    assert rb[:]["next", "step_count"].flatten().tolist() == [3, 4, 5, 6, 7, 7, 7]


class Counting(Transform):
    """Notes what it is given on writing."""

    def __init__(self):
        self.seen = []

    def inverse_stream(self, writing):
        self.seen.append((writing.items, writing.held, writing.single, writing.in_place))
        return writing


def test_transforms_on_the_left_get_what_is_written_now_and_what_would_be_written():
    left, batch = Counting(), stream([9])
    rb = ReplayBuffer(storage=LazyTensorStorage(50), transform=Compose(left, MultiStepTransform(3, 0.9)))
    rb.extend(batch[:2])
    rb.extend(batch[2:5])
    (none, held, *_), (items, later, *_) = left.seen
    assert none is None and held["n"].tolist() == [0, 1]
    assert items["n"].tolist() == [0, 1, 2] and later["n"].tolist() == [3, 4]


def test_a_transform_along_time_on_the_left_of_it_is_not_disturbed_by_what_waits():
    """Ids, not flags, say where trajectories end: the flags of n steps come early."""
    batch = stream([9, 6], ids=True)
    for cuts in ((0, 15), (0, 2, 5, 6, 7, 12, 15), tuple(range(16))):
        rb = ReplayBuffer(storage=LazyTensorStorage(50))
        rb.append_transform(StepCounter(), invert=True)
        rb.append_transform(MultiStepTransform(3, 0.9))
        for start, stop in pairwise(cuts):
            rb.extend(batch[start:stop])
        assert rb[:]["step_count"].flatten().tolist() == [*range(9), *range(4)]


def test_two_horizons_one_after_the_other():
    batch = stream([7])
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50), transform=Compose(MultiStepTransform(2, 1.0), MultiStepTransform(3, 1.0))
    )
    for t in range(7):
        rb.add(batch[t])
    expected, own = MultiStep(1.0, 2)(MultiStep(1.0, 3)(batch)), ("gamma", "steps_to_next_obs", "nonterminal")
    assert_equal(rb[:].exclude(*own), expected.exclude(*own))
    for key in own[:2]:  # the transform's have a last dimension of 1, and its `nonterminal` is that of the done flags
        assert_equal(rb[:][key].squeeze(-1), expected[key])


def test_in_place_writes_and_reads_pass_by():
    rb, batch = buffer(), stream([5, 9])
    rb.extend(batch[:9])
    held = rb._transform[0].held_back
    rows = rb[:]
    rb[2] = rows[1]
    rb[3:5] = rows[0:2]
    generation = rb.storage.lanes.generations(torch.tensor([6]))
    assert rb.update_if_present(index=torch.tensor([6]), generation=generation, patch=rows[:1]).applied
    assert rb[:]["n"].tolist() == [0, 1, 1, 0, 1, 5, 0] and rb._transform[0].held_back == held
    assert rb.sample(3)["n"].shape == (3,)


def test_rows_that_are_trajectories_wait_for_nothing():
    rb = buffer(n_steps=3)
    batch = torch.stack([stream([4, 2]), stream([1, 5])])
    assert rb.extend(batch).tolist() == [0, 1]
    assert rb.add(stream([6])) == 2
    for row, lengths in zip(rb[:], ([4, 2], [1, 5], [6]), strict=True):
        assert_n_step(row, slow(lengths, stream(lengths), 3, 0.9), 0.9)


@tensorclass
class Moment:
    n: torch.Tensor
    next: TensorDict
    gamma: torch.Tensor | None = None
    steps_to_next_obs: torch.Tensor | None = None
    nonterminal: torch.Tensor | None = None


@each("form", ["list", "list of dicts", "constants", "ListStorage"])
def test_other_forms_of_data(form):
    batch, make = stream([6]), (lambda piece: piece)
    if form == "list":
        make = lambda piece: [piece[i] for i in range(len(piece))]  # noqa: E731
    elif form == "list of dicts":
        make = lambda piece: [as_dict(piece[i]) for i in range(len(piece))]  # noqa: E731
    elif form == "constants":
        make = lambda piece: piece.set("env", NonTensorData("CartPole", batch_size=piece.shape))  # noqa: E731
    rb = buffer(ListStorage(20) if form == "ListStorage" else None)
    for start, stop in ((0, 2), (2, 3), (3, 6)):
        rb.extend(make(batch[start:stop].clone()))
    found = torch.stack(rb[:]) if form == "ListStorage" else rb[:]
    if form == "list of dicts":
        found = TensorDict(found, [6])
    assert_n_step(found, slow([6], batch, 3, 0.9), 0.9)
    assert form != "constants" or found["env"] == "CartPole"


def test_a_process_that_shares_the_storage_does_not_write_what_waits_here():
    rb = buffer(LazyTensorStorage(50, shared=True, lanes=2))
    rb.extend(stream([9])[:5])
    copy = pickle.loads(pickle.dumps(rb._transform))
    assert copy[0].held_back == 2, "a transform alone keeps what it has"
    sent = pickle.loads(bytes(ForkingPickler.dumps(rb)))
    assert sent._transform[0].held_back == 0 and len(sent) == 3 and rb._transform[0].held_back == 2
    assert Child(lambda: rb._transform[0].held_back).result() == 0
    assert rb._transform[0].held_back == 2
    private = buffer()
    private.extend(stream([9])[:5])
    assert Child(lambda: private._transform[0].held_back).result() == 2


def test_threads_that_write_with_ids_lose_nothing():
    rb, errors = buffer(LazyTensorStorage(1600)), []

    def write(number):
        try:
            batch = stream([400], ids=True)
            batch["n"] += 1000 * number
            batch["collector", "traj_ids"] += number
            for start in range(0, 400, 10):
                rb.extend(batch[start : start + 10])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(rb) + rb._transform[0].held_back == 1600
    written = rb[:]["n"].tolist()
    assert len(set(written)) == len(written)
    for k in range(4):
        mine = [n for n in written if n // 1000 == k]
        assert mine == list(range(1000 * k, 1000 * k + len(mine)))


def test_called_by_hand_it_waits_as_well():
    transform, batch = MultiStepTransform(3, 0.9), stream([7])
    first = transform.inv(batch[:2])
    assert first.batch_size == (0,)
    assert_n_step(
        torch.cat([first, transform.inv(batch[2:5]), transform.inv(batch[5:])]), slow([7], batch, 3, 0.9), 0.9
    )
    assert transform.held_back == 0 and transform.forward(batch) is batch


def test_the_tensordict_buffer_samples_what_was_written():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50),
        transform=MultiStepTransform(3, 0.9),
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
    )
    for t in range(12):
        rb.add(stream([12])[t])
    seen = torch.cat(list(rb))
    assert sorted(seen["n"].tolist()) == list(range(12)) and torch.equal(seen["index"], seen["n"])
    assert steps(3).batch_size == (3,)


class TestFlushing:
    """Steps that are held back can be written at the end."""

    @staticmethod
    def data(n, start=0, envs=0):
        shape = (envs, n) if envs else (n,)
        number = torch.arange(start, start + n).expand(shape)
        following = {
            "obs": number + 1,
            "reward": torch.ones(*shape, 1),
            "done": torch.zeros(*shape, 1, dtype=torch.bool),
        }
        return TensorDict({"obs": number, "next": following}, shape)

    @pytest.mark.parametrize("envs", [0, 2])
    @pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
    def test_flush_writes_what_an_end_of_the_trajectories_would(self, envs, storage):
        if envs and storage is ListStorage:
            pytest.skip("a list has one dimension")
        ended, flushed = (
            ReplayBuffer(storage=storage(60, ndim=2) if envs else storage(60), transform=MultiStepTransform(3, 0.5))
            for _ in range(2)
        )
        data = self.data(7, envs=envs)
        flushed.extend(data)
        assert len(flushed) == 5 * max(1, envs)
        index = flushed.flush_transforms()
        assert index.shape == ((2 * envs, 2) if envs else (2,)) and flushed.transform[0].held_back == 0
        data["next", "done"][..., -1, :] = True
        ended.extend(data)
        assert len(ended) == len(flushed) == 7 * max(1, envs)
        mine, its = (torch.stack(rb[:]) if storage is ListStorage else rb[:] for rb in (flushed, ended))
        for key in ("obs", ("next", "obs"), ("next", "reward"), "gamma", "steps_to_next_obs"):
            assert torch.equal(mine[key], its[key]), key

    def test_what_follows_begins_anew_and_nothing_is_written_twice(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(60), transform=MultiStepTransform(3, 0.5))
        rb.extend(self.data(4))
        rb.flush_transforms()
        rb.extend(self.data(4, 4))
        rb.flush_transforms()
        assert rb[:]["obs"].tolist() == list(range(8))
        assert rb[:]["steps_to_next_obs"].flatten().tolist() == [3, 3, 2, 1] * 2

    def test_without_held_back_steps_nothing_is_written(self):
        for transform in (None, MultiStepTransform(3, 0.5), StepCounter()):
            rb = ReplayBuffer(storage=LazyTensorStorage(60), transform=transform)
            assert rb.flush_transforms().tolist() == [] and len(rb) == 0

    def test_of_two_the_first_ones_steps_go_through_the_second(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(60), transform=Compose(MultiStepTransform(2, 1.0), VecNorm("obs")))
        rb.append_transform(MultiStepTransform(2, 1.0))
        rb.extend(self.data(5))
        rb.flush_transforms()
        assert rb.write_count == 5 and rb.transform[1].state_dict()
        assert rb.storage[:]["next", "obs"].tolist() == [3, 4, 5, 5, 5]

    def test_a_refused_flush_goes_on_waiting(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(60), transform=MultiStepTransform(3, 0.5))
        rb.extend(self.data(4))
        old = rb.set_writer(ImmutableDatasetWriter())
        with pytest.raises(RuntimeError, match="immutable"):
            rb.flush_transforms()
        assert rb.transform[0].held_back == 2
        rb.set_writer(old)
        assert rb.flush_transforms().tolist() == [2, 3]


# ---- flat batches ----
def flat(data):
    """The same steps with `next_n`, `reward` and the flags at the root."""
    following = data["next"]
    entries = {"next_n": following["n"], **{key: following[key] for key in following.keys() if key != "n"}}
    return data.exclude("next").update(entries)


@each("pieces", [[17], [1] * 17, [5, 7, 5]])
@each("keys", [{}, {"reward_keys": ["reward"], "done_key": "done"}])
@each("form", [lambda td: td, lambda td: td.to_dict()])
def test_flat_batches_become_the_transitions_that_nested_ones_become(pieces, keys, form):
    data = stream([4, 6, 1, 6])
    nested = ReplayBuffer(storage=LazyTensorStorage(40), transform=MultiStepTransform(3, 0.5))
    rb = ReplayBuffer(storage=LazyTensorStorage(40), transform=MultiStepTransform(3, 0.5, next_key="next_n", **keys))
    for one, other in zip(data.split(pieces), flat(data).split(pieces), strict=True):
        assert torch.equal(nested.extend(one), rb.extend(form(other)))
    expected, stored = nested[:], rb[:]
    assert set(stored.keys()) == {*flat(data).keys(), *expected.keys(), "original_reward"} - {"next"}
    for key in ("n", "gamma", "steps_to_next_obs", "nonterminal"):
        assert torch.equal(stored[key], expected[key])
    for key in ("reward", "original_reward", "done", "terminated", "truncated"):
        assert torch.equal(stored[key], expected["next", key])
    assert torch.equal(stored["next_n"], expected["next", "n"])


def test_several_entries_may_follow_a_step():
    data = flat(stream([5]))
    data["other", "next_m"] = data["next_n"] * 10
    rb = ReplayBuffer(
        storage=LazyTensorStorage(9), transform=MultiStepTransform(2, 0.5, next_key=["next_n", ("other", "next_m")])
    )
    rb.extend(data)
    assert torch.equal(rb[:]["other", "next_m"], rb[:]["next_n"] * 10) and rb[:]["next_n"].tolist() == [2, 3, 4, 5, 5]


def test_entries_that_follow_must_be_there_and_next_is_none_of_them():
    rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=MultiStepTransform(2, 0.5, next_key="next_obs"))
    with pytest.raises(KeyError, match="'next_obs'"):
        rb.extend(flat(stream([5])))
    assert len(rb) == 0
    with pytest.raises(ValueError, match="leave next_key out"):
        MultiStepTransform(2, 0.5, next_key="next")


def test_what_waits_of_flat_batches_is_saved_for_a_transform_of_flat_batches():
    def buffer(**how):
        return ReplayBuffer(storage=LazyTensorStorage(40), transform=MultiStepTransform(3, 0.5, **how))

    data = flat(stream([9])).split([4, 5])
    rb, other = buffer(next_key="next_n"), buffer(next_key="next_n")
    rb.extend(data[0])
    saved = rb.state_dict()
    other.load_state_dict(saved)
    rb.extend(data[1]), other.extend(data[1])
    assert bool((rb[:] == other[:]).all()) and len(rb) == 9
    with pytest.raises(ValueError, match="next_keys"):
        buffer(next_key="other", reward_keys="reward").load_state_dict(saved)


def runs(lead=()):
    """Two batches [*lead, 5] of runs that number their trajectory 0, which does not end; the second counts from 100."""
    open_rows = stream([5], ids=True).expand(*lead, 5).clone()
    later = open_rows.clone()
    for key in ("n", ("next", "n")):
        later[key] = later[key] + 100
    return open_rows, later


@pytest.mark.parametrize("loaded", [False, True], ids=["one object", "loaded in between"])
@pytest.mark.parametrize("how", ["nested", "flat"])
@pytest.mark.parametrize("size", [1, 5], ids=["add", "extend"])
def test_runs_that_count_from_the_same_id_are_not_joined_as_the_next_observation_is_another(how, loaded, size):
    def buffer():
        return ReplayBuffer(storage=LazyTensorStorage(40), transform=MultiStepTransform(3, 0.5, **keys))

    keys = {"next_key": "next_n"} if how == "flat" else {}
    first, second = ((flat(run) if keys else run) for run in runs())
    rb, alone = buffer(), buffer()
    for part in first.split(size):
        rb.extend(part)
    if loaded:
        state, rb = rb.state_dict(), buffer()
        rb.load_state_dict(state)
    for part in second.split(size):
        rb.extend(part)
    rb.flush_transforms()
    for run in (first, second):
        alone.extend(run)
        alone.flush_transforms()
    assert_equal(rb[:], alone[:])


def test_a_trajectory_that_was_cut_in_one_environment_stays_so_while_the_other_goes_on():
    def buffer():
        return ReplayBuffer(storage=LazyTensorStorage(40, ndim=2), transform=MultiStepTransform(3, 0.5))

    first, second = runs((2,))
    second[0] = stream([10], ids=True)[5:]
    rb = buffer()
    rb.extend(first)
    for t in range(5):
        rb.extend(second[:, t : t + 1])
        state, rb = rb.state_dict(), buffer()
        rb.load_state_dict(state)
    rb.flush_transforms()
    assert rb[:]["steps_to_next_obs"].squeeze(-1).tolist() == [[3] * 8 + [2, 1], [3, 3, 3, 2, 1] * 2]


def test_an_entry_that_never_was_the_next_one_cuts_nothing():
    data = stream([9], ids=True)
    data["next", "n"] += 1  # as a transform that changes one side only
    rb = ReplayBuffer(storage=LazyTensorStorage(40), transform=MultiStepTransform(3, 0.5))
    for row in data.split(1):
        rb.extend(row)
    assert rb[:]["steps_to_next_obs"].flatten().tolist() == [3] * 7


def test_what_agreed_before_is_saved_so_that_a_run_that_is_loaded_is_cut_at_its_first_step():
    def buffer():
        return ReplayBuffer(storage=LazyTensorStorage(40), transform=MultiStepTransform(2, 0.5))

    first, second = runs()
    rb, twin = buffer(), buffer()
    for row in first.split(1):
        rb.extend(row)
    twin.load_state_dict(rb.state_dict())
    for row in second.split(1):
        twin.extend(row)
    twin.flush_transforms()
    assert twin[:]["steps_to_next_obs"].flatten().tolist() == [2, 2, 2, 2, 1] * 2


@pytest.mark.parametrize("size", [1, 3], ids=["add", "extend"])
def test_an_entry_that_is_set_anew_cuts_nothing_where_another_one_goes_on(size):
    data = stream([9], ids=True)
    data["hidden"], data["next", "hidden"] = torch.arange(9) % 3, torch.arange(9) % 3 + 1
    rb = ReplayBuffer(storage=LazyTensorStorage(40), transform=MultiStepTransform(3, 0.5))
    for part in data.split(size):
        rb.extend(part)
    assert rb[:]["steps_to_next_obs"].flatten().tolist() == [3] * 7


def test_rows_that_do_not_connect_are_cut_once_at_most_where_they_seemed_to():
    data = stream([12], ids=True)
    data["n"], data["next", "n"] = data["n"] * 2, data["next", "n"] * 2 - 1
    data["n"][:3], data["next", "n"][:3] = 0, 0  # it stands still at first
    rb = ReplayBuffer(storage=LazyTensorStorage(40), transform=MultiStepTransform(3, 0.5))
    for row in data.split(1):
        rb.extend(row)
    assert rb[:]["steps_to_next_obs"].flatten().tolist() == [3, 2, 1] + [3] * 7


def run(start, n, done=()):
    """n steps of a run whose observations count from `start`; those at `done` end an episode."""
    steps = stream([n], ids=True).exclude("collector")
    steps["n"], steps["next", "n"] = steps["n"] + start, steps["next", "n"] + start
    steps["next", "done"][list(done)] = True
    return steps


def reached(rb):
    """How many steps each row sums, once all are written."""
    rb.flush_transforms()
    return rb[:]["steps_to_next_obs"].flatten().tolist()


@pytest.mark.parametrize(
    ("n_steps", "done", "later"),
    [
        (2, [], [1] * 4),
        (3, [8], [1] * 4),
        (5, [8], [1] * 4),
        (3, [], [2, 2]),
        (2, [], [4]),
    ],
    ids=["one step waits", "one step of an episode waits", "of long n", "small batches", "one batch"],
)
@each("form", ["nested", "flat"])
def test_a_run_after_whole_batches_of_another_is_cut_at_its_first_step(n_steps, done, later, form):
    keys, made = ({"next_key": "next_n"}, flat) if form == "flat" else ({}, lambda steps: steps)
    rb = ReplayBuffer(storage=LazyTensorStorage(40), transform=MultiStepTransform(n_steps, 0.5, **keys))
    rb.extend(made(run(0, 10, done)))
    for part in made(run(100, 4, [0])).split(later):
        rb.extend(part)
    ends = [*done, 9, 10, 13]
    expected = [min(n_steps, next(end for end in ends if end >= t) - t + 1) for t in range(14)]
    assert reached(rb) == expected


@settings(max_examples=25, deadline=None)
@given(data=st.data(), n_steps=st.integers(2, 5), envs=st.integers(1, 2))
def test_random_runs_are_cut_where_they_meet_and_a_loaded_buffer_goes_on_alike(data, n_steps, envs):
    """The first run comes in one batch, and the others in any pieces; each has two steps of one episode."""

    def buffer():
        return ReplayBuffer(storage=LazyTensorStorage(400, ndim=2), transform=MultiStepTransform(n_steps, 0.5))

    rb, loaded, expected = buffer(), buffer(), []
    for k in range(data.draw(st.integers(2, 4))):
        length = data.draw(st.integers(2, 12))
        done = data.draw(st.sets(st.integers(1, length - 1)))
        steps = run(1000 * k, length, done).expand(envs, length)
        ends = sorted({*done, length - 1})
        expected += [min(n_steps, next(end for end in ends if end >= t) - t + 1) for t in range(length)]
        stops = {0, length} | (data.draw(st.sets(st.integers(1, length - 1))) if k else set())
        for start, stop in pairwise(sorted(stops)):
            for one in (rb, loaded):
                one.extend(steps[:, start:stop])
            if data.draw(st.booleans()):
                loaded = buffer()
                loaded.load_state_dict(rb.state_dict())
    assert reached(rb) == reached(loaded) == expected * envs


def test_what_agreed_in_batches_outlives_a_refused_write_and_a_save_where_nothing_waits():
    def buffer():
        return ReplayBuffer(storage=LazyTensorStorage(40), transform=MultiStepTransform(2, 0.5))

    rb, loaded = buffer(), buffer()
    rb.extend(run(0, 6, [5]))
    assert rb.transform[0].held_back == 0
    with pytest.raises(ValueError, match="'n'"):
        rb.extend(run(6, 2).set("n", torch.zeros(2, 3)))
    loaded.load_state_dict(rb.state_dict())
    for one in (rb, loaded, pickle.loads(pickle.dumps(rb))):
        one.extend(run(50, 1))
        one.extend(run(70, 1))
        assert reached(one) == [2] * 5 + [1, 1, 1]


def test_a_state_in_which_nothing_waits_is_loaded_without_the_transform_and_with_other_settings():
    rb = buffer()
    rb.extend(stream([6]))
    for transform in (None, MultiStepTransform(4, 0.1), Compose(StepCounter())):
        other = ReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
        other.load_state_dict(rb.state_dict())
        assert len(other) == 6
    rb.extend(stream([9])[:4])
    with pytest.raises(ValueError, match="MultiStepTransform"):
        ReplayBuffer(storage=LazyTensorStorage(100)).load_state_dict(rb.state_dict())


def ordinary(kind, n, size, envs):
    """Batches of one run, with an entry that begins anew in each; the observation may stand still in some steps."""
    batches = []
    for k, batch in enumerate(run(0, n).split(size)):
        length = len(batch)
        if kind != "action":
            batch["n"], batch["next", "n"] = batch["n"] * 2 // 3, batch["next", "n"] * 2 // 3
        count = torch.arange(length + 1)
        values = {"hidden": count, "goal": torch.full((length + 1,), k), "action": (count * (k + 1)) % 3}[kind]
        batch[kind], batch["next", kind] = values[:-1], values[1:].clone()
        if kind == "action":  # that of the policy before
            batch["next", kind][-1] = (length * (k + 1) + 1) % 3
        batches.append(batch.expand(envs, length))
    return batches


@pytest.mark.deep
@each("kind", ["hidden", "goal", "action"])
@each("size", [1, 2, 5, [5, 1, 1, 5] * 5])
@each("envs", [1, 2])
def test_entries_that_batches_begin_anew_cut_hardly_anything(kind, size, envs):
    rb = ReplayBuffer(storage=LazyTensorStorage(400, ndim=2), transform=MultiStepTransform(3, 0.5))
    for batch in ordinary(kind, 60, size, envs):
        rb.extend(batch)
    assert sum(count < 3 for count in reached(rb)) <= 4 * envs  # the end, and once where only it could be compared


def test_a_transform_without_what_is_known_of_borders_goes_on_as_one_of_an_earlier_version():
    transform, data = MultiStepTransform(3, 0.5), stream([9], ids=True)
    rb = ReplayBuffer(storage=LazyTensorStorage(40), transform=transform)
    rb.extend(data[:4])
    for name in ("_cuts", "_border"):
        transform.__dict__.pop(name, None)
    rb.extend(data[4:])
    assert rb[:]["steps_to_next_obs"].flatten().tolist() == [3] * 7


@pytest.mark.parametrize(
    "cuts", [torch.zeros(1, 3, dtype=torch.bool), torch.zeros(1, 2), "no"], ids=["shape", "dtype", "text"]
)
def test_a_state_with_other_cuts_than_its_rows_can_have_is_refused(cuts):
    transform = MultiStepTransform(3, 0.5)
    ReplayBuffer(storage=LazyTensorStorage(40), transform=transform).extend(stream([4], ids=True))
    state = transform.get_extra_state()
    with pytest.raises(CheckpointMisfitError, match=r"cuts.* a (tensor )?bool (\[1, 2\]|of 2 dimensions)"):
        MultiStepTransform(3, 0.5).load_state_dict({**state, "cuts": cuts})


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_ids_of_whole_numbers_part_trajectories_in_any_dtype(dtype):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=MultiStepTransform(n_steps=2, gamma=0.5))
    following = {"reward": torch.ones(4, 1), "done": torch.zeros(4, 1, dtype=torch.bool)}
    rb.extend(TensorDict({"episode": torch.tensor([3, 3, 4, 4], dtype=dtype), "next": following}, [4]))
    rb.flush_transforms()
    assert rb[:]["next", "reward"].flatten().tolist() == [1.5, 1.0, 1.5, 1.0]
