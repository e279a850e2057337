"""Samplers of users' own: which draws are refused, in what form others reach batches, and what they say of rows."""

import itertools

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from contracts.each import each
from engram import _native
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.reading import prefetch
from engram.envs import MultiStepTransform


class Own:
    """Returns what a function of the number of rows returns, with this info."""

    def __init__(self, draw, info=None):
        self.draw, self.info = draw, info or (lambda index: {})

    def sample(self, storage, batch_size):
        index = self.draw(batch_size)
        return index, self.info(index)


def child_of(base, *args, **settings):
    """A class like `Own` whose base is a sampler of ours."""

    class Child(base):
        def __init__(self, draw):
            super().__init__(*args, **settings)
            self.draw = draw

        def sample(self, storage, batch_size):
            return self.draw(batch_size), {}

    return Child


def steps(start=0, stop=10):
    n = torch.arange(start, stop)
    return TensorDict({"n": n, "stored": n * 1.0, "next": {"done": (n % 5 == 4).unsqueeze(-1)}}, [len(n)])


@pytest.fixture
def threads_always(monkeypatch):
    """Batches are prepared ahead however quick they are."""
    monkeypatch.setattr(prefetch, "PAYS_FROM_S", 0.0)


def buffer(sampler, storage=LazyTensorStorage, **parts):
    rb = TensorDictReplayBuffer(storage=storage(20), sampler=sampler, batch_size=4, **parts)
    rb.extend(steps())
    return rb


def in_an_ensemble(sampler, **settings):
    joint = ReplayBufferEnsemble(buffer(sampler), buffer(RandomSampler()), batch_size=8, sample_from_all=True)
    return lambda: joint.sample()


def in_samplers_of_members(sampler):
    storages = ReplayBufferEnsemble(buffer(RandomSampler()), batch_size=4).storage
    return lambda: SamplerEnsemble(sampler).sample(storages, 4)


#: How a sampler's draw enters: a function of what it returns that makes a function that draws.
WAYS = {
    "buffer": lambda draw: buffer(Own(draw)).sample,
    "list storage": lambda draw: buffer(Own(draw), ListStorage).sample,
    "mapped storage": lambda draw: buffer(Own(draw), LazyMemmapStorage).sample,
    "info": lambda draw: lambda: buffer(Own(draw)).sample(return_info=True),
    "iterating": lambda draw: lambda: next(iter(buffer(Own(draw)))),
    "prefetch": lambda draw: buffer(Own(draw), prefetch=2).sample,
    "ensemble": lambda draw: in_an_ensemble(Own(draw)),
    "samplers of members": lambda draw: in_samplers_of_members(Own(draw)),
    "exchanged": lambda draw: (rb := buffer(RandomSampler())).set_sampler(Own(draw)) and rb.sample,
    "child of RandomSampler": lambda draw: buffer(child_of(RandomSampler)(draw)).sample,
    "child of an epoch": lambda draw: buffer(child_of(SamplerWithoutReplacement)(draw)).sample,
    "child by priority": lambda draw: buffer(child_of(PrioritizedSampler, None, 0.7, 0.9)(draw)).sample,
    "child of slices": lambda draw: buffer(child_of(SliceSampler, slice_len=2, end_key=("next", "done"))(draw)).sample,
}
REFUSED = {
    "floats": (torch.rand, "torch.float32"),
    "whole floats": (lambda n: torch.arange(float(n)), "torch.float32"),
    "numpy floats": (lambda n: np.arange(float(n)), "torch.float64"),
    "half": (lambda n: torch.zeros(n).half(), "torch.float16"),
    "NaN": (lambda n: torch.full((n,), torch.nan), "torch.float32"),
    "list of floats": (lambda n: [0.0] * n, "torch.float32"),
    "complex": (lambda n: torch.zeros(n, dtype=torch.complex64), "torch.complex64"),
    "mask": (lambda n: torch.ones(10, dtype=torch.bool), "nonzero"),
    "numpy mask": (lambda n: np.ones(n, bool), "nonzero"),
    "list of bools": (lambda n: [True] * n, "nonzero"),
    "too high": (lambda n: torch.full((n,), 20), "slot 20; there are 0 to 19"),
    "negative": (lambda n: torch.full((n,), -1), "slot -1"),
    "unsigned": (lambda n: np.full(n, 2**64 - 1, np.uint64), "slot -1"),
    "one number": (lambda n: 3, r"shape \[\]"),
    "rows and columns": (lambda n: torch.zeros(2, n // 2, dtype=torch.int64), r"shape \[2, 2\]"),
    "time and environment": (lambda n: (torch.arange(n), torch.arange(n)), r"shape \[\[4\], \[4\]\]"),
    "slice": (lambda n: slice(n), "is a slice"),
    "text": (lambda n: "0123", "is a str"),
    "nothing": (lambda n: None, "is a NoneType"),
    "objects": (lambda n: np.array([None] * n), "object"),
    "masked": (lambda n: np.ma.array(np.arange(n), mask=[True] * n), "masked"),
    "sparse": (lambda n: torch.arange(n).to_sparse(), "without plain memory"),
    "meta": (lambda n: torch.arange(n, device="meta"), "without plain memory"),
}


@pytest.mark.usefixtures("threads_always")
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
class TestIndex:
    @each("way", WAYS)
    def test_invalid_index_is_refused(self, way):
        for name, (draw, said) in REFUSED.items():
            with pytest.raises(IndexError, match=rf"(?s)sample returned.*{said}"):
                WAYS[way](draw)()
                pytest.fail(name)

    @each(
        "draw",
        [
            lambda n: torch.arange(n, dtype=torch.int32), lambda n: torch.arange(n, dtype=torch.uint8),
            lambda n: torch.arange(n).to(torch.uint64), np.arange, lambda n: np.arange(n, dtype=np.int16),
            lambda n: list(range(n)), range, lambda n: [torch.tensor(i) for i in range(n)],
            lambda n: torch.arange(n).unsqueeze(1), lambda n: (torch.arange(n),), lambda n: torch.arange(2 * n)[:n],
            lambda n: torch.arange(n * 1.0).long().requires_grad_(False), lambda n: np.arange(n)[::-1][::-1],
        ],
    )  # fmt: skip
    def test_integers_of_any_form_become_int64(self, draw):
        for rb in (buffer(Own(draw)), buffer(Own(draw), ListStorage), buffer(Own(draw), prefetch=2)):
            batch, info = rb.sample(return_info=True)
            for index in (batch["index"], info["index"], batch["n"]):
                assert type(index) is torch.Tensor and index.dtype is torch.int64 and index.tolist() == [0, 1, 2, 3]
        joint = in_an_ensemble(Own(draw))()
        assert joint["index", "index"][0].tolist() == joint["n"][0].tolist() == [0, 1, 2, 3]

    @each("n", [1, 3, 6])
    def test_draw_may_have_fewer_rows_or_more(self, n):
        batch = buffer(Own(lambda _: torch.arange(n))).sample()
        assert batch["n"].tolist() == list(range(n))

    def test_refused_draw_changes_nothing(self):
        given = [torch.rand]
        rb = buffer(Own(lambda n: given[0](n)), prefetch=2)
        for _ in range(3):
            with pytest.raises(IndexError):
                rb.sample()
            given[0] = np.arange
            assert rb.sample()["n"].tolist() == [0, 1, 2, 3] and len(rb) == 10
            given[0] = torch.rand
            rb.set_sampler(rb.sampler)  # drops what was prepared

    def test_unwritten_slot_is_named(self):
        with pytest.raises(IndexError, match="returns slot 15, which holds no row; 10 are stored"):
            buffer(Own(lambda n: torch.full((n,), 15))).sample()

    def test_unwritten_buffer_is_empty(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=Own(np.arange), batch_size=4)
        with pytest.raises(RuntimeError, match="empty storage"):
            rb.sample()

    @each("returned",
        [
            torch.arange(4), torch.arange(2), None, (torch.arange(4),), (torch.arange(4), None), (torch.arange(4), []),
            (torch.arange(4), {}, {}),
        ])  # fmt: skip
    def test_invalid_result_is_refused(self, returned):
        class Alone:
            def sample(self, storage, batch_size):
                return returned

        with pytest.raises(TypeError, match=r"Alone.sample must return \(index, info\)"):
            buffer(Alone()).sample()

    def test_ensemble_refuses_a_draw_without_rows(self):
        with pytest.raises(RuntimeError, match="and then none"):
            in_an_ensemble(Own(lambda n: torch.arange(0)))()

    def test_tensors_that_a_sampler_reuses_are_copied(self):
        slots = torch.zeros(4, dtype=torch.int64)

        def draw(n):
            slots.add_(1)
            return slots

        rb = buffer(Own(draw, lambda index: {"twice": index, "array": index.numpy()}), prefetch=3)
        for k in range(1, 5):
            batch, info = rb.sample(return_info=True)
            found = (batch["n"], batch["index"], batch["twice"], batch["array"], info["index"], info["twice"])
            assert [values.tolist() for values in found] == [[k] * 4] * 6


class TestEnvironments:
    def buffer(self, draw):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30, ndim=2), sampler=Own(draw), batch_size=4)
        rb.extend(TensorDict({"n": torch.arange(3).unsqueeze(1) * 100 + torch.arange(10)}, [3, 10]))
        return rb

    @each("draw",
        [
            lambda n: (torch.arange(n), torch.arange(n) % 3), lambda n: [torch.arange(n), torch.arange(n) % 3],
            lambda n: (np.arange(n), np.arange(n, dtype=np.int8) % 3), lambda n: (range(n), [i % 3 for i in range(n)]),
            lambda n: torch.stack([torch.arange(n), torch.arange(n) % 3], 1),
            lambda n: np.stack([np.arange(n), np.arange(n) % 3], 1),
        ])  # fmt: skip
    def test_index_of_any_form_becomes_time_and_environment(self, draw):
        rb = self.buffer(draw)
        for n in (2, 4):  # of two rows [2, 2] is rows by time and environment
            rb._batch_size = n
            batch, info = rb.sample(return_info=True)
            assert [part.tolist() for part in info["index"]] == [[0, 1, 2, 3][:n], [0, 1, 2, 0][:n]]
            assert batch["n"].tolist() == [0, 101, 202, 3][:n]
            assert batch["index"].tolist() == [[0, 0], [1, 1], [2, 2], [3, 0]][:n]

    @each(
        ("draw", "said"),
        [
            (lambda n: (torch.arange(n), torch.rand(n)), "torch.float32"),
            (lambda n: torch.rand(n, 2), "torch.float32"),
            (lambda n: (torch.arange(n), torch.ones(n, dtype=torch.bool)), "nonzero"),
            (torch.arange, r"shape \[4\]; it must be a tuple of 2 int64 \[n\], or int64 \[n, 2\]"),
            (lambda n: (torch.arange(n), 0), "shape"),
            (lambda n: (torch.arange(n), torch.arange(n - 1)), "shape"),
            (lambda n: (torch.arange(n),) * 3, "shape"),
            (lambda n: (torch.arange(n), torch.full((n,), 3)), "environment 3; there are 0 to 2"),
            (lambda n: (torch.arange(n), torch.full((n,), -1)), "environment -1"),
            (lambda n: (torch.arange(n) + 10, torch.zeros(n, dtype=torch.int64)), "slot 10; there are 0 to 9"),
            (lambda n: None, "is a NoneType"),
        ],
    )
    def test_invalid_index_is_refused(self, draw, said):
        with pytest.raises(IndexError, match=f"Own.sample returned.*{said}"):
            self.buffer(draw).sample()


@each(
    "chosen", [([0, 2], 2), ([-1, 0], 2), ([0.0, 1.0], 2), (torch.tensor([0, 1]), 2), ([], 2), ([0, 1], 2.0), ([0], 0)]
)
def test_invalid_members_are_refused(chosen):
    class Chooses(SamplerEnsemble):
        def choose(self, batch_size):
            return chosen

    joint = ReplayBufferEnsemble(buffer(RandomSampler()), buffer(RandomSampler()), batch_size=4)
    joint.set_sampler(Chooses(RandomSampler(), RandomSampler()))
    with pytest.raises(ValueError, match="choose must return a list of members, ints from 0 to 1"):
        joint.sample()


# ---- what a sampler says of each row ----
def of_each_row(index):
    index = torch.as_tensor(index)
    return {
        "score": index * 2.0, "wide": torch.stack([index, -index], 1), ("aux", "array"): index.numpy() * 3,
        "listed": index.tolist(), "longer": torch.zeros(len(index) + 1), "number": torch.tensor(3.0), "word": "x",
        "stored": index * 0 - 1.0, ("n", "below"): index, "generation": index * 0 - 7, 5: index, (): index,
        "texts": np.array(["a"] * len(index)),
    }  # fmt: skip


def assert_says(batch, expected=("score", "wide", "aux")):
    """The entries of `of_each_row` are there that are per row, and of the row."""
    n = batch["n"]
    assert set(batch.keys()) - {"index_generation"} == {"n", "stored", "next", "index", *expected}
    assert torch.equal(batch["score"], n * 2.0) and torch.equal(batch["stored"], n * 1.0)
    assert torch.equal(batch["wide"], torch.stack([n, -n], -1)) and torch.equal(batch["aux"]["array"], n * 3)


@pytest.mark.usefixtures("threads_always")
class TestInfo:
    @each("ahead", [0, 2])
    @each("storage", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
    def test_entries_per_row_are_in_tensordict_batches(self, storage, ahead):
        rb = buffer(Own(lambda n: torch.randint(10, (n,)), of_each_row), storage, prefetch=ahead)
        for _ in range(3):
            assert_says(rb.sample())
            batch, info = rb.sample(return_info=True)
            assert_says(batch)
            assert info["word"] == "x" and len(info["longer"]) == 5 and info["listed"] == batch["n"].tolist()
            assert torch.equal(info["score"], batch["score"]) and (info["stored"] == -1).all()
        assert_says(next(iter(rb)))

    def test_generation_entry_is_never_the_samplers(self):
        rb = buffer(Own(np.arange, of_each_row), track_generations=True)
        rb.extend(steps(10, 20))
        rb.extend(steps(0, 3))
        batch = rb.sample()
        assert_says(batch, ("score", "wide", "aux", "generation"))
        assert batch["generation"].tolist() == [20, 21, 22, 3]

    def test_dict_batches_have_them(self):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=Own(np.arange, of_each_row), batch_size=4)
        rb.extend(steps().to_dict())
        assert_says(rb.sample())

    def test_plain_buffers_and_tensorclasses_do_not(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=Own(np.arange, of_each_row), batch_size=4)
        rb.extend(steps())
        batch, info = rb.sample(return_info=True)
        assert set(batch.keys()) == {"n", "stored", "next"} and info["score"].tolist() == [0, 2, 4, 6]
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=Own(np.arange, of_each_row), batch_size=4)
        rb.extend(Step(torch.arange(10), torch.zeros(10, dtype=torch.int64), batch_size=[10]))
        batch, info = rb.sample(return_info=True)
        assert isinstance(batch, Step) and batch.index.tolist() == [0, 1, 2, 3] and "score" in info

    def test_transforms_see_them(self):
        rb = buffer(Own(np.arange, of_each_row), transform=lambda batch: batch.set("more", batch["score"] + 1))
        assert rb.sample(as_numpy=True)["more"].tolist() == [1, 3, 5, 7]

    def test_reshaping_collate_function_goes_without(self):
        rb = buffer(Own(np.arange, of_each_row), collate_fn=lambda batch: batch.reshape(2, 2))
        assert "score" not in rb.sample().keys()

    def test_each_step_of_a_trajectory_item_has_them(self):
        for storage in (ListStorage, LazyTensorStorage):
            sampler = Own(lambda n: torch.tensor([2, 0]), of_each_row)
            rb = TensorDictReplayBuffer(storage=storage(10), sampler=sampler, batch_size=2)
            with pytest.warns(UserWarning, match="items of 4 steps"):
                rb.extend(TensorDict({"x": torch.arange(12).reshape(3, 4)}, [3, 4]))
            batch = rb.sample()
            assert batch["score"].tolist() == [[4] * 4, [0] * 4] and batch["aux", "array"].shape == (2, 4)

    @pytest.mark.parametrize("ahead", [0, 2])
    def test_ensemble_batches_have_them(self, ahead):
        def own():
            return Own(lambda n: torch.randint(10, (n,)), of_each_row)

        joint = ReplayBufferEnsemble(buffer(own()), buffer(own()), batch_size=8, sample_from_all=True, prefetch=ahead)
        for _ in range(3):
            batch = joint.sample()
            assert batch.batch_size == (2, 4) and torch.equal(batch["index", "index"], batch["n"])
            assert_says(batch)

    def test_members_with_different_infos_are_stacked_lazily(self):
        joint = ReplayBufferEnsemble(
            buffer(Own(np.arange, of_each_row)), buffer(RandomSampler()), batch_size=8, sample_from_all=True
        )
        batch = joint.sample()
        assert batch[0]["score"].tolist() == [0, 2, 4, 6] and "score" not in batch[1].keys()

    @pytest.mark.parametrize("ahead", [0, 2])
    def test_weights_of_another_length_or_form_stay_in_the_info(self, ahead):
        forms = [torch.ones(3), torch.ones(5), torch.tensor(1.0), 1.0, [1.0] * 4, np.array(["a"] * 4), None]
        for storage, weight in itertools.product((LazyTensorStorage, ListStorage), forms):
            single = [
                buffer(Own(np.arange, lambda _, weight=weight: {"priority_weight": weight}), storage) for _ in range(2)
            ]
            joint = ReplayBufferEnsemble(*single, batch_size=8, sample_from_all=True, prefetch=ahead)
            for rb in (single[0], joint):
                batch, info = rb.sample(return_info=True)
                assert "priority_weight" not in batch.keys() and "priority_weight" in info
                assert "priority_weight" not in rb.sample().keys()

    def test_weights_are_tensors_and_as_long_as_the_batch(self):
        for weight in (np.ones(4), torch.ones(4), torch.ones(4, 1)):
            rb = buffer(Own(np.arange, lambda _, weight=weight: {"priority_weight": weight}))
            assert torch.equal(rb.sample()["priority_weight"], torch.as_tensor(weight))

    def test_slices_keep_their_marks(self):
        rb = buffer(Scored(slice_len=2, end_key=("next", "done")))
        batch, info = rb.sample(return_info=True)
        assert torch.equal(batch["score"], batch["n"] * 2.0)
        assert "slice_id" in info and "slice_id" not in batch.keys()  # as with a SliceSampler
        assert batch["next", "truncated"].flatten().tolist() == [False, True] * 2
        assert batch["next", "done"].flatten()[1::2].all()


@each("change", [lambda index: index[:3], lambda index: index.flip(0), lambda index: index.repeat(2)])
@each("base", [SliceSampler, SliceSamplerWithoutReplacement])
def test_rows_that_are_not_those_of_the_marked_slices_are_refused(base, change):
    class Child(base):
        def sample(self, storage, batch_size):
            index, info = super().sample(storage, batch_size)
            return change(index), info

    with pytest.raises(IndexError, match=r"Child.sample returned . rows that are not the 4 of the slices in its info"):
        buffer(Child(slice_len=2, end_key=("next", "done"))).sample()
    rb = buffer(Child(slice_len=2, end_key=("next", "done"), truncated_key=None))
    assert rb.sample()["n"].numel() == len(change(torch.zeros(4)))


@tensorclass
class Step:
    x: torch.Tensor
    index: torch.Tensor


class Scored(SliceSampler):
    """Says twice its slot of each row."""

    def sample(self, storage, batch_size):
        index, info = super().sample(storage, batch_size)
        return index, overtaken(self, storage, index, info)


def overtaken(sampler, storage, index, info):
    info["score"], info["array"], info["list"] = index * 2.0, index.numpy() * 2.0, (index * 2).tolist()
    act, sampler.meanwhile = getattr(sampler, "meanwhile", None), None
    if act is not None:
        act(storage)
    return info


def scored(base, *args, **settings):
    class Scores(base):
        def sample(self, storage, batch_size):
            index, info = super().sample(storage, batch_size)
            return index, overtaken(self, storage, index, info)

    return Scores(*args, **settings)


class Uniform:
    def sample(self, storage, batch_size):
        index = torch.randint(len(storage), (batch_size,))
        return index, overtaken(self, storage, index, {})


SLICES = {"slice_len": 2, "end_key": ("next", "done")}


@each("sampler",
    [
        Uniform, lambda: scored(RandomSampler), lambda: scored(SamplerWithoutReplacement),
        lambda: scored(PrioritizedSampler, None, 0.7, 0.9), lambda: Scored(**SLICES),
        lambda: scored(SliceSampler, **SLICES, strict_length=False, span=True),
        lambda: scored(SliceSamplerWithoutReplacement, **SLICES, strict_length=False),
    ])  # fmt: skip
def test_redrawn_rows_have_their_own_info(sampler):
    for seed in range(8):
        torch.manual_seed(seed)
        stored = 10 if seed % 2 else 25
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(stored), sampler=sampler(), batch_size=6)
        rb.extend(steps(0, stored))
        rb.sampler.meanwhile = lambda storage: _native.testing.claim(storage.lanes.store, 0, 4)
        batch, info = rb.sample(return_info=True)
        assert not {0, 1, 2, 3} & set(batch["n"].tolist())
        for said in (info["score"], info["array"], info["list"], batch["score"], batch["array"]):
            assert torch.as_tensor(said).tolist() == (batch["n"] * 2).tolist()
        assert batch["index"].tolist() == batch["n"].tolist()


class Told:
    """Notes what it is told of."""

    def __init__(self):
        super().__init__()
        self.told = []

    def add(self, index):
        self.told.append(index)

    def extend(self, index):
        self.told.append(index.tolist())

    def sample(self, storage, batch_size):
        return torch.zeros(batch_size, dtype=torch.int64), {}


class ToldChild(Told, Sampler):
    """The same, as a child of Sampler."""


@pytest.mark.pairwise
@pytest.mark.parametrize("sampler", [Told, ToldChild])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("transform", [None, lambda batch: batch])
def test_user_sampler_is_notified_of_written_slots(sampler, storage, buffer, transform):
    rb = buffer(storage=storage(5), sampler=sampler(), transform=transform)
    rb.add(steps()[0])
    rb.extend(steps(1, 4))
    rb.extend(list(steps(4, 7)))
    assert rb.sampler.told == [0, [1, 2, 3], [4, 0, 1]]


def test_user_sampler_is_notified_of_steps_held_back_by_a_transform():
    rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=Told(), transform=MultiStepTransform(n_steps=3, gamma=0.5))
    following = {"reward": torch.ones(4, 1), "done": torch.zeros(4, 1, dtype=torch.bool)}
    rb.extend(TensorDict({"next": following}, [4]))
    rb.flush_transforms()
    assert rb.sampler.told == [[0, 1], [2, 3]]


def test_with_several_environments_it_is_told_times_and_environments():
    rb = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), sampler=Told())
    rb.extend({"n": torch.zeros(2, 2)})
    assert rb.sampler.told == [[[0, 0], [0, 1], [1, 0], [1, 1]]]


def test_attributes_that_a_user_sampler_gains_later_are_used():
    class InTurn:
        def __init__(self):
            self.at = 0

        def sample(self, storage, batch_size):
            slots = torch.arange(self.at, min(self.at + batch_size, len(storage)))
            self.at += batch_size
            self.ran_out = self.at >= len(storage)  # the constructor has none
            return slots, {}

    sampler, told = InTurn(), []
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
    rb.extend(torch.arange(10))
    assert [len(batch) for batch in itertools.islice(rb, 10)] == [4, 4, 2]
    sampler.update_priority = lambda index, priority, **more: told.append(priority)
    rb.update_priority(torch.tensor([0]), 2.0)
    assert told == [2.0]


class Prioritized(Told):
    def update_priority(self, index, priority, **more):
        self.told.append(priority.tolist())


class PrioritizedChild(Prioritized, Sampler):
    """The same, as a child of Sampler."""


@each("sampler", [Told, ToldChild, Prioritized, PrioritizedChild])
def test_priorities_of_a_batch_are_asked_for_where_the_sampler_takes_them(sampler):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler(), priority_key="error", batch_size=2)
    rb.extend(steps(0, 5))
    batch = rb.sample()
    if issubclass(sampler, Prioritized):
        with pytest.raises(KeyError, match="the batch needs 'index' and 'error'"):
            rb.update_tensordict_priority(batch)
    else:
        rb.update_tensordict_priority(batch)
    rb.update_tensordict_priority(batch.set("error", torch.ones(2)))
    assert rb.sampler.told[1:] == ([[1.0, 1.0]] if issubclass(sampler, Prioritized) else [])


def test_a_child_that_empties_itself_as_in_torchrl_does_so_with_its_buffer():
    class Emptied(RandomSampler):
        def _empty(self):
            self.is_empty = True

    rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=Emptied())
    rb.empty()
    assert rb.sampler.is_empty
