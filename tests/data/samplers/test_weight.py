"""weight="steps": all starts of slices, and all last steps of sequences, with one probability."""

import random
from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from data.samplers.episode_data import episodes, slices_of
from data.samplers.test_slices import SliceContract
from data.samplers.test_uniform import assert_uniform
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from engram.testing import chi_square

MASK = ("collector", "mask")


class TestSliceSamplerByStep(SliceContract):
    def make(self):
        return SliceSampler(slice_len=2, end_key="done", truncated_key=None, weight="steps")


class TestSliceSamplerOfAnyStep(SliceContract):
    def make(self):
        return SliceSampler(
            num_slices=1, end_key="done", truncated_key=None, strict_length=False, span=(True, False), weight="steps"
        )


class TestSequenceSamplerByStep(SliceContract):
    def make(self):
        return SequenceSampler(slice_len=2, burn_in=1, end_key="done", truncated_key=None, weight="steps")


def first_steps(rb, n):
    """The numbers of the first steps of slices, of batches of n rows together."""
    found = []
    for _ in range(4):
        batch, info = rb.sample(n, return_info=True)
        begins = torch.cat([torch.tensor([True]), info["slice_id"].diff() != 0])
        found += batch["n"][begins].tolist()
    return found


# ---- what is uniform ----
def test_every_step_is_as_likely_the_last_of_a_stack_of_four_with_those_before_it_in_its_episode():
    torch.manual_seed(0)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2000), sampler=SequenceSampler(slice_len=4, burn_in=3, weight="steps")
    )
    rb.extend(episodes([20, 1000, 20, 20]))
    firsts = {step: first for first, length in ((0, 20), (20, 1000), (1020, 20), (1040, 20)) for step in
              range(first, first + length)}  # fmt: skip
    rows = torch.cat([rb.sample(400_000)["n"].reshape(-1, 4) for _ in range(3)])
    last = rows[:, 3].tolist()
    assert_uniform(last, range(1060))
    begin = torch.tensor([firsts[step] for step in last]).unsqueeze(1)
    assert torch.equal(rows, torch.maximum(rows[:, 3:] + torch.arange(-3, 1), begin))


def test_with_the_weight_of_trajectories_short_episodes_have_most_of_the_draws():
    torch.manual_seed(0)
    for kind, how in ((SequenceSampler, {"burn_in": 3}), (SliceSampler, {"strict_length": False})):
        rb = ReplayBuffer(storage=LazyTensorStorage(2000), sampler=kind(slice_len=4, **how))
        rb.extend(episodes([20] * 5 + [1000]))
        short = (rb.sample(40_000)["n"][::4] < 100).sum().item()
        assert chi_square([short, 10_000 - short], [5, 1]) > 1e-6


def test_padding_stands_before_a_sequence_and_never_behind():
    torch.manual_seed(0)
    sampler = SequenceSampler(slice_len=6, burn_in=2, weight="steps")
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler)
    rb.extend(episodes([7, 2]))
    drawn = Counter()
    for row in rb.sample(6 * 4000).reshape(-1, 6):
        n, mask = row["n"].tolist(), row[MASK].tolist()
        first = 0 if n[-1] < 7 else 7
        assert n == [max(first, n[-1] - back) for back in range(5, -1, -1)]
        assert mask == [n[-1] - back >= first for back in range(5, -1, -1)]
        assert row["is_init"].flatten().tolist() == [k == mask.index(True) for k in range(6)]
        assert row["next", "truncated"].flatten().tolist() == [False] * 5 + [True]
        drawn[n[-1]] += 1
    assert_uniform(list(drawn.elements()), range(9))


def test_only_trajectories_that_fill_the_training_rows_are_drawn_where_that_is_asked_for():
    torch.manual_seed(0)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(40),
        sampler=SequenceSampler(slice_len=5, burn_in=1, strict_length=True, weight="steps"),
    )
    rb.extend(episodes([3, 4, 6, 2]))
    assert_uniform(rb.sample(50_000)["n"][4::5].tolist(), range(3, 13))
    rb.empty()
    rb.extend(episodes([3, 2]))
    with pytest.raises(RuntimeError, match="no trajectory has 4 steps; the longest that is stored has 3"):
        rb.sample(10)


STARTS = {  # of slices of 4, from episodes of 3, 6, 4, 9 and 5 steps: the first has lost two, the last is running
    "strict": ({}, [*range(3, 6), 9, *range(13, 19), *range(22, 24)]),
    "not strict": ({"strict_length": False}, list(range(2, 27))),
    "span to the end": ({"span": (False, True)}, list(range(3, 27))),
}


@each("case", STARTS)
@each("count", [{"slice_len": 4}, {"num_slices": 20_000}])
def test_every_start_that_a_slice_can_have_is_as_likely(case, count):
    torch.manual_seed(0)
    how, starts = STARTS[case]
    rb = ReplayBuffer(storage=LazyTensorStorage(25), sampler=SliceSampler(weight="steps", **count, **how))
    rb.extend(episodes([3, 6, 4, 9, 5], running=True))
    assert_uniform(first_steps(rb, 80_000), starts)


def test_with_a_span_over_both_ends_every_window_and_so_every_step_is_as_likely():
    torch.manual_seed(0)
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=SliceSampler(slice_len=4, span=True, weight="steps"))
    rb.extend(episodes([3, 6, 9]))
    batch, info = rb.sample(160_000, return_info=True)
    ends = torch.cat([info["slice_id"].diff() != 0, torch.tensor([True])])
    begins = torch.cat([torch.tensor([True]), ends[:-1]])
    windows = [(max(a, w), min(b, w + 4) - 1) for a, b in ((3, 9), (9, 18)) for w in range(a - 3, b)]
    drawn = list(zip(batch["n"][begins].tolist(), batch["n"][ends].tolist(), strict=True))
    assert len(set(windows)) == len(windows)
    assert_uniform(drawn, windows)


# ---- wherever the steps are, and however they came ----
SAMPLERS = {
    "slices": lambda: SliceSampler(slice_len=3, traj_key="id", weight="steps"),
    "short slices": lambda: SliceSampler(slice_len=4, strict_length=False, traj_key="id", weight="steps"),
    "sequences": lambda: SequenceSampler(slice_len=4, burn_in=2, traj_key="id", weight="steps"),
}


def windows_by_hand(pieces, sampler):
    """Of pieces of consecutive steps, the first and last step of every window that may be drawn."""
    length = sampler.slice_len
    found = []
    for piece in pieces:
        windows = range(len(piece) if not sampler.strict_length else len(piece) - length + 1)
        if isinstance(sampler, SequenceSampler):
            windows = range(1 - length, len(piece) - length + 1)
        found += [(piece[max(w, 0)], piece[min(w + length, len(piece)) - 1]) for w in windows]
    return found


def pieces_by_hand(rb, cuts):
    """The stored numbers in runs of one id, lane by lane, environment by environment, cut before these numbers."""
    runs = []
    size, strands = rb.storage.lanes.store.lane_capacity, rb.storage.lanes.envs
    for lane, state in enumerate(rb.storage.lanes.states()):
        for strand in range(strands):
            previous = None
            for number in range(state["first"], state["published"]):
                time = lane * size + number % size
                step = rb.storage[time, strand] if strands > 1 else rb.storage[time]
                n, traj = int(step["n"]), int(step["id"])
                if previous is None or traj != previous or n in cuts:
                    runs.append([])
                runs[-1].append(n)
                previous = traj
    return runs


def assert_windows_are_uniform(rb, sampler, cuts=()):
    possible = windows_by_hand(pieces_by_hand(rb, cuts), sampler)
    if not possible:
        return 0
    batch, info = rb.sample(sampler.slice_len * 60 * len(possible), return_info=True)
    ends = torch.cat([info["slice_id"].diff() != 0, torch.tensor([True])])
    begins = torch.cat([torch.tensor([True]), ends[:-1]])
    drawn = Counter(zip(batch["n"][begins].tolist(), batch["n"][ends].tolist(), strict=True))
    assert set(drawn) <= set(possible)
    assert chi_square([drawn[window] for window in possible]) > 1e-6
    return len(possible)


def steps_of(n, start, ids):
    """Steps in trajectories of 1 to 9, `ids` counting on."""
    lengths = []
    while sum(lengths) < n:
        lengths.append(min(random.choice([1, 2, 3, 5, 9]), n - sum(lengths)))
    return episodes(lengths, start=start, first_id=ids), len(lengths)


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    torch.manual_seed(0)


@each("kind", SAMPLERS)
@each("storage", [LazyTensorStorage, ListStorage])
def test_windows_are_uniform_while_the_ring_goes_round_and_steps_are_changed_in_place(kind, storage):
    sampler = SAMPLERS[kind]()
    rb = ReplayBuffer(storage=storage(15 if storage is ListStorage else 30), sampler=sampler)
    written = ids = seen = 0
    rounds = 10 if storage is ListStorage else 25  # lists are slow to read
    for k in range(rounds):
        n = random.choice([1, 1, 2, 3, 7, 13])
        steps, count = steps_of(n, written, ids)
        rb.extend(steps)
        # Half of the time the last trajectory goes on.
        written, ids = written + n, ids + count - random.choice([0, 1])
        if k % 5 == 4 and len(rb) > 6:
            at = random.randrange(len(rb) - 1)
            changed = [rb[i] if storage is ListStorage else rb[i].clone() for i in (at, at + 1)]
            changed[1]["id"] = changed[0]["id"].clone() if k % 2 else torch.tensor(10_000 + k)
            rb[at + 1] = changed[1]
        seen += assert_windows_are_uniform(rb, sampler) > 0
    assert seen > rounds * 3 / 4


@each("kind", SAMPLERS)
def test_windows_are_uniform_over_environments(kind):
    sampler = SAMPLERS[kind]()
    rb = ReplayBuffer(storage=LazyTensorStorage(36, ndim=2), sampler=sampler)
    written = 0
    for _ in range(12):
        n = random.choice([1, 2, 5, 9])
        rb.extend(torch.stack([steps_of(n, 1000 * env + written, 1000 * written)[0] for env in range(3)]))
        written += n
        assert_windows_are_uniform(rb, sampler)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_windows_are_uniform_over_lanes_and_no_seam_is_crossed(kind, tmp_path):
    sampler = SAMPLERS[kind]()
    writers = [ReplayBuffer(storage=LazyMemmapStorage(50, tmp_path, existsok=True, lanes=2)) for _ in range(2)]
    writers[0].set_sampler(sampler)
    written, cuts = [0, 1000], set()
    for k in range(16):
        which = k % 2
        n = random.choice([2, 5, 9])
        # One and the same trajectory: what ends it is the ring and the seam alone.
        writers[which].extend(episodes([n], start=written[which], first_id=7 if k % 3 else 8, running=True))
        written[which] += n
        if k == 9:
            writers[1].storage.close()
            writers[1] = ReplayBuffer(storage=LazyMemmapStorage(50, tmp_path, existsok=True, lanes=2))
            cuts.add(written[1])
        assert_windows_are_uniform(writers[0], sampler, cuts)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_an_index_that_grew_draws_what_one_that_was_loaded_draws(kind, tmp_path):
    def made(capacity=60):
        return ReplayBuffer(
            storage=LazyTensorStorage(capacity), sampler=SAMPLERS[kind](), batch_size=12,
            generator=torch.Generator().manual_seed(1),
        )  # fmt: skip

    rb = made()
    for k in range(8):
        rb.extend(episodes([3, 5, 1, 2], start=11 * k, first_id=3 * k))
        rb.sample()
        if k % 4 == 3:
            rb[k : k + 2] = episodes([2], start=1000 + k, first_id=1000 + k)
        rb.dumps(tmp_path / str(k))
        expected = [rb.sample()["n"].tolist() for _ in range(3)]
        for capacity in (60, 90):
            twin = made(capacity)
            twin.loads(tmp_path / str(k))
            assert [twin.sample()["n"].tolist() for _ in range(3)] == expected


def test_one_sampler_draws_by_step_from_batches_of_several_sizes():
    sampler = SliceSampler(num_slices=10, weight="steps")
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler)
    for k in range(8):
        rb.extend(episodes([3, 9], start=12 * k, first_id=2 * k))
        for length in (1, 2, 3, 5, 8, 9):
            for n in slices_of(*rb.sample(10 * length, return_info=True)):
                assert len(n) == length and n[0] >= rb.write_count - 40


def test_windows_of_several_sizes_that_reach_over_begins_are_not_mixed_up():
    how = {"strict_length": False, "span": (True, False), "weight": "steps"}
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=SliceSampler(num_slices=3000, **how))
    rb.extend(episodes([3, 9]))
    for length in (2, 5, 3):
        drawn = Counter(first_steps(rb, 3000 * length))
        expected = Counter(max(a, w) for a, b in ((0, 3), (3, 12)) for w in range(a - length + 1, b))
        assert set(drawn) <= set(expected)
        assert chi_square([drawn[n] for n in expected], list(expected.values())) > 1e-6


# ---- settings ----
def test_a_weight_is_trajectories_or_steps():
    assert SliceSampler(slice_len=2).weight == SequenceSampler(slice_len=2).weight == "trajectories"
    for kind in (SliceSampler, SequenceSampler):
        for weight in ("step", None, 1, ["steps"], torch.zeros(2)):
            with pytest.raises(ValueError, match=r"weight must be one of \('trajectories', 'steps'\), got"):
                kind(slice_len=2, weight=weight)
        assert "weight='steps'" in repr(kind(slice_len=2, weight="steps")) and "weight" not in repr(kind(slice_len=2))
    assert SequenceSampler(slice_len=2).strict_length and not SequenceSampler(slice_len=2, weight="steps").strict_length


@pytest.mark.parametrize("weight", ["steps", "trajectories"])
def test_other_samplers_have_no_weight(weight):
    with pytest.raises(TypeError, match="an epoch has each trajectory once: there is no weight"):
        SliceSamplerWithoutReplacement(slice_len=2, weight=weight)
    for make in (
        lambda: PrioritizedSliceSampler(10, 0.7, 0.5, slice_len=2, weight=weight),
        lambda: PrioritizedSampler(10, 0.7, 0.5, weight=weight),
        lambda: SamplerWithoutReplacement(weight=weight),
        lambda: RandomSampler(weight=weight),
    ):
        with pytest.raises(TypeError, match="weight"):
            make()


@pytest.mark.parametrize("kind", [SliceSampler, SequenceSampler])
def test_a_state_is_loaded_where_the_weight_is_the_same(kind):
    state = kind(slice_len=2, strict_length=False, weight="steps").state_dict()
    kind(slice_len=2, strict_length=False, weight="steps").load_state_dict(state)
    with pytest.raises(ValueError, match="the sampler has weight='trajectories' here, 'steps' there"):
        kind(slice_len=2, strict_length=False).load_state_dict(state)
    without = {name: value for name, value in state.items() if name != "weight"}
    for weight in ("trajectories", "steps"):
        with pytest.raises(ValueError, match=f"the sampler has weight='{weight}' here, None there"):
            kind(slice_len=2, strict_length=False, weight=weight).load_state_dict(without)


def test_boundaries_of_a_dataset_are_weighed_by_step_too():
    ends = torch.tensor([0, 1, 0, 0, 0, 0, 0, 0, 0, 1]).bool()
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=2, ends=ends, weight="steps", truncated_key=None)
    )
    rb.extend(TensorDict({"n": torch.arange(10)}, [10]))
    assert_uniform(rb.sample(20_000)["n"][::2].tolist(), [0, *range(2, 9)])
