"""Batches that one native call makes against those that are drawn, read and built step by step: `return_info=True`."""

import gc
import os
import pickle
import threading
import time
import warnings
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, tensorclass

from contracts.children import Child
from contracts.each import each
from engram import _native
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
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.data.replay_buffers.reading.reader import BatchReader
from engram.envs.transforms import RewardScaling, Transform
from engram.store.layout import use_torch


@tensorclass
class Step:
    obs: torch.Tensor
    reward: torch.Tensor


def nested(numbers):
    n = len(numbers)
    following = TensorDict({"obs": numbers.float().reshape(n, 1) + torch.arange(3), "done": numbers % 5 == 4}, [n])
    return TensorDict({"number": numbers, "reward": numbers.double(), "flag": numbers % 2 == 0, "next": following}, [n])


def flat(numbers, *entries):
    return TensorDict({f"{k}": entry for k, entry in enumerate(entries)}, [len(numbers)])


#: What is stored, from the numbers of its steps.
FORMS = {
    "nested TensorDict": nested,
    "dict": lambda numbers: {"a": numbers, "b": {"c": numbers.to(torch.int16).reshape(-1, 1, 1)}},
    "tensor": lambda numbers: numbers.reshape(-1, 1) * torch.arange(1, 4),
    "tensorclass": lambda numbers: Step(obs=numbers.float(), reward=numbers.half(), batch_size=[len(numbers)]),
    "views": lambda numbers: flat(numbers, torch.stack([numbers] * 4, -1)[:, ::2], numbers.flip(0)),
    "an entry without bytes": lambda numbers: flat(numbers, numbers, torch.zeros(len(numbers), 0)),
    "wide rows": lambda numbers: flat(numbers, numbers.reshape(-1, 1).expand(-1, 700)),
}
OF_TENSORDICTS = ("nested TensorDict", "views", "an entry without bytes", "wide rows")
#: Forms that the native call makes; the others it leaves to the reader.
NATIVE = ("nested TensorDict", "dict", "tensor", "views", "an entry without bytes", "wide rows")


def alike(a, b):
    """Whether two batches are the same: kind, keys in order, dtypes, shapes, device, bits."""
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and torch.equal(a, b) and a.is_contiguous() and a.stride() == b.stride()
    if type(a) is not type(b):
        return False
    if isinstance(a, Step):
        return alike(a.to_tensordict(), b.to_tensordict())
    if list(a.keys()) != list(b.keys()):
        return False
    if not isinstance(a, dict) and (a.batch_size != b.batch_size or a.device != b.device):
        return False
    return all(alike(a[key], b[key]) for key in list(a.keys()))


class Twins:
    """Two buffers that are used alike; `sample` compares a batch of the one with a batch and info of the other."""

    def __init__(self, kind, make, form="nested TensorDict", own_generator=True, **arguments):
        self.form, self.own_generator = FORMS[form], own_generator
        self.rbs = [
            kind(storage=make(), generator=torch.Generator() if own_generator else None, **arguments) for _ in range(2)
        ]
        self.written = 0
        for rb in self.rbs:
            if own_generator:
                rb.generator.manual_seed(5)

    def extend(self, n):
        for rb in self.rbs:
            rb.extend(self.form(torch.arange(self.written, self.written + n)))
        self.written += n

    def sample(self, n, seed=0):
        torch.manual_seed(seed)
        batch = self.rbs[0].sample(n)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        expected, info = self.rbs[1].sample(n, return_info=True)
        assert alike(batch, expected)
        assert torch.equal(torch.get_rng_state(), state)
        if self.own_generator:
            assert torch.equal(*(rb.generator.get_state() for rb in self.rbs))
        return batch, info


@pytest.fixture
def only_native(monkeypatch):
    """From its call on, batches without info come from the native call or not at all."""

    def begin():
        sample = BatchReader.sample

        def only_with_info(self, n, generations):
            assert generations, "the native call left this batch to the reader"
            return sample(self, n, generations)

        monkeypatch.setattr(BatchReader, "sample", only_with_info)

    return begin


PROGRAM = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 40)),
        st.tuples(st.just("sample"), st.integers(1, 70)),
        st.tuples(st.just("empty"), st.just(0)),
        st.tuples(st.just("set_rng"), st.integers(0, 3)),
        st.tuples(st.just("state"), st.just(0)),
        st.tuples(st.just("write"), st.integers(0, 30)),
        st.tuples(st.just("sampler"), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=20)
@given(
    capacity=st.integers(1, 33),
    kind=st.sampled_from([ReplayBuffer, TensorDictReplayBuffer]),
    form=st.sampled_from(sorted(FORMS)),
    own_generator=st.booleans(),
    program=PROGRAM,
)
def test_every_batch_is_the_same_bit_for_bit_whatever_happens_in_between(capacity, kind, form, own_generator, program):
    if kind is TensorDictReplayBuffer and form not in OF_TENSORDICTS:
        form = "nested TensorDict"
    twins = Twins(kind, lambda: LazyTensorStorage(capacity), form, own_generator)
    twins.extend(3)
    for step, (what, n) in enumerate(program):
        rb = twins.rbs[0]
        if what == "extend":
            twins.extend(n)
        elif what == "sample" and len(rb):
            batch, info = twins.sample(n, step)
            if kind is TensorDictReplayBuffer:
                assert torch.equal(batch["index"], info["index"])
            at = rb.storage.get(info["index"])
            batch = batch if kind is ReplayBuffer else batch.exclude("index")
            assert alike(batch, at if kind is ReplayBuffer else at.exclude("index"))
        elif what == "empty":
            for each in twins.rbs:
                each.empty()
        elif what == "set_rng" and own_generator:
            for each in twins.rbs:
                each.set_rng(torch.Generator().manual_seed(n))
        elif what == "state":
            states = [each.state_dict() for each in twins.rbs]
            for each, state in zip(twins.rbs, states, strict=True):
                each.load_state_dict(state)
        elif what == "write" and n < len(rb):
            for each in twins.rbs:
                each[n] = each.storage.get((n + 1) % len(rb))
        elif what == "sampler":
            for each in twins.rbs:
                each.set_sampler(RandomSampler())


@pytest.mark.parametrize(
    ("kind", "form"),
    [(ReplayBuffer, form) for form in FORMS] + [(TensorDictReplayBuffer, form) for form in OF_TENSORDICTS],
)
def test_the_forms_of_tensordicts_dicts_and_tensors_come_from_the_native_call(kind, form, only_native):
    twins = Twins(kind, lambda: LazyTensorStorage(50), form)
    twins.extend(70)
    only_native()
    if form in NATIVE:
        for n in (1, 7, 64, 300):
            twins.sample(n)
    else:
        with pytest.raises(AssertionError, match="left this batch"):
            twins.sample(7)


STORAGES = {
    "lanes": lambda path: LazyTensorStorage(64, shared=True, lanes=2),
    "shared": lambda path: LazyTensorStorage(50, shared=True),
    "mapped": lambda path: LazyMemmapStorage(50, path),
    "mapped, without a folder": lambda path: LazyMemmapStorage(50),
    "tensors of the user's": lambda path: TensorStorage(nested(torch.arange(50))),
    "list": lambda path: ListStorage(50),
}


@each("kind", [ReplayBuffer, TensorDictReplayBuffer])
@each("name", STORAGES)
def test_every_storage_gives_the_same_batches_with_and_without_their_info(name, kind, tmp_path):
    paths = iter([tmp_path / "a", tmp_path / "b"])
    twins = Twins(kind, lambda: STORAGES[name](next(paths)))
    for n in (5, 30, 60):
        twins.extend(n)
        twins.sample(1), twins.sample(100)


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_environments_give_the_same_batches_with_and_without_their_info(shape):
    rbs = [
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(60, ndim=1 + len(shape)), generator=torch.Generator(), batch_size=16
        )
        for _ in range(2)
    ]
    for start in (0, 7, 40):
        numbers = torch.arange(start, start + torch.Size(shape).numel() * 7).reshape(*shape, 7)
        for rb in rbs:
            rb.extend(TensorDict({"n": numbers}, numbers.shape))
            rb.generator.manual_seed(start)
        assert alike(rbs[0].sample(), rbs[1].sample(return_info=True)[0])


def test_trajectories_as_items_and_large_leaves_give_the_same_batches():
    rbs = [TensorDictReplayBuffer(storage=LazyTensorStorage(20), generator=torch.Generator()) for _ in range(2)]
    for rb in rbs:
        rb.extend(TensorDict({"n": torch.arange(48).reshape(12, 4)}, [12, 4]))
        rb.generator.manual_seed(1)
    assert alike(rbs[0].sample(5), rbs[1].sample(5, return_info=True)[0])
    twins = Twins(TensorDictReplayBuffer, lambda: LazyTensorStorage(50), "wide rows")
    twins.extend(50)
    twins.sample(1024)  # 5.6 MB: in a block of its own, copied without the GIL


def test_rows_that_a_writer_puts_in_the_places_of_others_are_drawn_alike():
    twins = Twins(
        TensorDictReplayBuffer, lambda: LazyTensorStorage(10), writer=lambda: TensorDictMaxValueWriter("reward")
    )
    for n in (10, 25, 3):
        twins.extend(n)
        twins.sample(40)


def test_transforms_are_applied_to_what_comes_out(only_native):
    twins = Twins(
        TensorDictReplayBuffer, lambda: LazyTensorStorage(50), transform=RewardScaling(0.0, 2.0, in_keys=["reward"])
    )
    twins.extend(60)
    only_native()
    batch, _ = twins.sample(30)
    assert torch.equal(batch["reward"], batch["number"] * 2.0)


def test_iterating_gives_the_same_batches(only_native):
    rbs = [ReplayBuffer(storage=LazyTensorStorage(50), generator=torch.Generator(), batch_size=9) for _ in range(2)]
    for rb in rbs:
        rb.extend(torch.arange(60))
        rb.generator.manual_seed(1)
    expected = [rbs[1].sample(return_info=True)[0] for _ in range(3)]
    only_native()
    assert all(torch.equal(batch, other) for batch, other in zip(rbs[0], expected, strict=False))


class OneOfFour(RandomSampler):
    def sample(self, storage, batch_size):
        slots, info = super().sample(storage, batch_size)
        return slots // 4 * 4, info


class Negative(LazyTensorStorage):
    def read(self, *args, **kwargs):
        rows = super().read(*args, **kwargs)
        return rows._replace(batch=-rows.batch)


def test_what_a_user_has_changed_in_a_sampler_storage_or_collate_function_is_asked():
    def buffer(**arguments):
        rb = ReplayBuffer(batch_size=50, **{"storage": LazyTensorStorage(40), **arguments})
        rb.extend(torch.arange(1, 41))
        return rb.sample()

    assert set((buffer(sampler=OneOfFour()) % 4).tolist()) == {1}
    assert buffer(storage=Negative(40)).max() < 0
    assert buffer(collate_fn=lambda rows: rows + 1000).min() > 1000


def test_generations_are_still_in_the_batches_of_buffers_that_track_them():
    twins = Twins(TensorDictReplayBuffer, lambda: LazyTensorStorage(10), track_generations=True)
    twins.extend(37)
    batch, _ = twins.sample(20)
    assert torch.equal(batch["generation"], batch["number"])


def test_an_empty_buffer_is_an_error_and_draws_nothing():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), generator=torch.Generator(), batch_size=3)
    rb.extend(torch.arange(4))
    rb.empty()
    state = rb.generator.get_state()
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        rb.sample()
    assert torch.equal(rb.generator.get_state(), state)


def test_a_sampler_in_two_buffers_draws_from_the_generator_that_it_was_given_last():
    sampler = RandomSampler()
    first = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, generator=torch.Generator(), batch_size=8)
    second = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, generator=torch.Generator(), batch_size=8)
    first.extend(torch.arange(10))
    before = first.generator.get_state(), second.generator.get_state()
    first.sample()
    assert torch.equal(first.generator.get_state(), before[0])
    assert not torch.equal(second.generator.get_state(), before[1])


@pytest.mark.filterwarnings("ignore:sample was called with")
@pytest.mark.parametrize("has_exchange", [True, False])
def test_a_finaliser_that_samples_in_the_middle_of_a_batch_changes_none_of_its_rows(has_exchange):
    rbs = [ReplayBuffer(storage=LazyTensorStorage(500), generator=torch.Generator(), batch_size=64) for _ in range(2)]
    for rb in rbs:
        rb.extend(TensorDict({f"{k}": torch.arange(500) * (k + 1) for k in range(12)}, [500]))
    rb, twin = rbs
    sampled, states = [], []

    class SamplesWhenCollected:
        def __init__(self):
            self.itself = self

        def __del__(self):
            sampled.append(rb.sample(len(sampled) % 60 + 1))
            states.append(rb.generator.get_state())

    def of_state(state):
        twin.generator.set_state(state)
        return twin.sample(return_info=True)[0]

    before = gc.get_threshold()
    try:
        if not has_exchange:
            use_torch(None)  # as with an older torch
        for threshold in range(1, 60):
            SamplesWhenCollected()
            states[:] = [rb.generator.get_state()]
            gc.set_threshold(threshold, 1, 1)
            batch = rb.sample()
            gc.set_threshold(*before)
            # Where Python code runs before the draw, so may the finaliser: the batch is then the next one.
            assert any(alike(batch, of_state(state)) for state in states)
    finally:
        gc.set_threshold(*before)
        use_torch()
    assert sampled
    for batch in sampled:
        assert all(torch.equal(batch[f"{k}"], batch["0"] * (k + 1)) for k in range(12))


def test_a_batch_waits_for_whoever_has_the_samplers_lock():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3)
    rb.extend(torch.arange(10))
    sampled = []
    thread = threading.Thread(target=lambda: sampled.append(rb.sample()), daemon=True)
    with rb.sampler.lock:
        thread.start()
        thread.join(0.05)
        assert not sampled
    thread.join(300)
    assert len(sampled) == 1


def test_two_threads_that_draw_at_once_draw_different_rows(monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=50)
    rb.extend(torch.arange(10_000))
    drawn, first = [], iter([None])
    other = threading.Thread(target=lambda: drawn.append(rb.sample()), daemon=True)

    class SeedThenLetTheOtherDraw(np.ndarray):
        def random_(self, generator=None):
            torch.from_numpy(self.view(np.ndarray)).random_(generator=generator)
            for _ in first:
                other.start()
                other.join(0.05)
            return self

    monkeypatch.setattr(rb.sampler, "_seed", rb.sampler._seed.numpy().view(SeedThenLetTheOtherDraw))
    drawn.append(rb.sample())
    other.join(300)
    assert len(drawn) == 2 and not torch.equal(*drawn)


@pytest.mark.filterwarnings("ignore")
def test_a_forked_child_that_only_samples_has_joined_the_store_before_its_first_batch():
    rb = ReplayBuffer(storage=LazyTensorStorage(10, shared=True), batch_size=3)
    rb.extend(torch.arange(10))
    rb.sample()

    def sample():
        rb.sample()
        return rb.storage.lanes.unused_since_fork

    assert Child(sample).result() is False


# ---- large batches, which two threads copy where torch may use several ----
@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def frames(sampler=RandomSampler, **arguments):
    """A batch of 32 rows has 2 MB."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(50), sampler=sampler(), batch_size=32, **arguments)
    numbers = torch.arange(50)
    rb.extend(flat(numbers, numbers.reshape(-1, 1).expand(-1, 8000), numbers * 2))
    return rb


def copying_threads():
    return sum(name_of(task).startswith("engram-copy") for task in Path("/proc/self/task").iterdir())


def name_of(task):
    try:
        return (task / "comm").read_text()
    except OSError:  # it has just ended
        return ""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the kernel lists no threads here")
@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement, lambda: PrioritizedSampler(50, 0.7, 1)])
def test_two_threads_copy_what_one_does(two_threads, sampler):
    def batches():
        torch.manual_seed(0)
        rb = frames(sampler)
        return [rb.sample() for _ in range(4)]

    by_two = batches()
    assert copying_threads() > 0
    torch.set_num_threads(1)
    for mine, theirs in zip(by_two, batches(), strict=True):
        assert list(mine.keys()) == list(theirs.keys()) and (mine == theirs).all()
        assert (mine["0"] == mine["index"].unsqueeze(-1)).all()


def test_what_two_threads_copy_was_not_overwritten_meanwhile(two_threads):
    rb, stop = ReplayBuffer(storage=LazyTensorStorage(6), batch_size=8), threading.Event()
    rb.extend(torch.zeros(6, 40_000, dtype=torch.int64))

    def write():
        number = 0
        while not stop.is_set():
            rb.add(torch.full((40_000,), number := number + 1))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(60):
            batch = rb.sample()
            assert (batch == batch[:, :1]).all()
    finally:
        stop.set()
        writer.join()


def test_threads_that_sample_at_once_share_the_one_that_helps(two_threads):
    rb, wrong = frames(), []

    def sample():
        for _ in range(20):
            batch = rb.sample()
            if not (batch["0"] == batch["index"].unsqueeze(-1)).all():
                wrong.append(batch)

    threads = [threading.Thread(target=sample) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore")
def test_a_forked_child_copies_with_a_thread_of_its_own(two_threads):
    rb = frames()
    rb.sample()

    def sample():
        torch.set_num_threads(2)
        rb.sample()  # joins the store
        batch = rb.sample()
        return bool((batch["0"].numpy() == batch["index"].numpy()[:, None]).all()), copying_threads()

    assert Child(sample).result() == (True, 1)


# ---- samplers with a state of their own ----
SAMPLERS = {
    "prioritised": lambda: PrioritizedSampler(None, 0.7, 0.5),
    "prioritised, float64": lambda: PrioritizedSampler(None, 0.6, 0.4, dtype=torch.float64),
    "prioritised, half": lambda: PrioritizedSampler(None, 0.6, 0.4, dtype=torch.float16),
    "prioritised, within": lambda: PrioritizedSampler(None, 0.5, 1.0, max_priority_within_buffer=True),
    "epochs": lambda: SamplerWithoutReplacement(),
    "epochs in order": lambda: SamplerWithoutReplacement(shuffle=False),
    "epochs, full batches": lambda: SamplerWithoutReplacement(drop_last=True),
}
#: After its first batch, of rows that nobody overwrites, and before its last one, an epoch comes from the native call.
STATEFUL = st.lists(
    st.one_of(
        st.tuples(st.just("sample"), st.integers(1, 9)),
        st.tuples(st.just("samples"), st.integers(1, 9)),
        st.tuples(st.just("extend"), st.integers(1, 50)),
        st.tuples(st.just("update"), st.integers(0, 100)),
        st.tuples(st.just("state"), st.just(0)),
        st.tuples(st.just("empty"), st.just(0)),
        st.tuples(st.just("write"), st.integers(0, 30)),
        st.tuples(st.just("beta"), st.integers(0, 10)),
        st.tuples(st.just("dtype"), st.integers(0, 2)),
    ),
    max_size=14,
)


@pytest.mark.filterwarnings("ignore:sample was called with batch_size")
@settings(max_examples=25)
@given(
    capacity=st.integers(1, 60),
    kind=st.sampled_from([ReplayBuffer, TensorDictReplayBuffer]),
    name=st.sampled_from(sorted(SAMPLERS)),
    own_generator=st.booleans(),
    program=STATEFUL,
)
def test_batches_by_priority_and_of_epochs_are_the_same_whatever_happens_in_between(
    capacity, kind, name, own_generator, program
):
    twins = Twins(
        kind, lambda: LazyTensorStorage(capacity), own_generator=own_generator, sampler=SAMPLERS[name], batch_size=1
    )
    twins.extend(min(capacity, 40))
    by_priority = name.startswith("prioritised")
    for step, (what, n) in enumerate(program):
        samplers = [rb.sampler for rb in twins.rbs]
        if what in ("sample", "samples") and len(twins.rbs[0]):
            n = min(n, len(twins.rbs[0]))
            for k in range(5 if what == "samples" else 1):
                batch, info = twins.sample(n, step * 10 + k)
                if by_priority and kind is TensorDictReplayBuffer:
                    assert torch.equal(batch["priority_weight"], info["priority_weight"])
                assert samplers[0].ran_out == samplers[1].ran_out
        elif what == "extend":
            twins.extend(n)
        elif what == "update" and len(twins.rbs[0]):
            torch.manual_seed(n)
            index, priority = torch.randint(len(twins.rbs[0]), (n % 20,)), torch.rand(n % 20) * n
            for rb in twins.rbs:
                rb.update_priority(index, priority)
        elif what == "state":
            states = [rb.state_dict() for rb in twins.rbs]
            for rb, state in zip(twins.rbs, states, strict=True):
                rb.load_state_dict(state)
        elif what == "empty":
            for rb in twins.rbs:
                rb.empty()
        elif what == "write" and n < len(twins.rbs[0]):
            for rb in twins.rbs:
                rb[n] = rb.storage.get((n + 1) % len(rb))
        elif what == "beta" and by_priority:
            for sampler in samplers:
                sampler.beta = n / 10
        elif what == "dtype" and by_priority:
            for sampler in samplers:
                sampler.dtype = (torch.float32, torch.float64, torch.bfloat16)[n]


@pytest.mark.filterwarnings("ignore:sample was called with batch_size")
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("name", [name for name in SAMPLERS if "half" not in name])
def test_batches_by_priority_and_of_epochs_come_from_the_native_call(name, kind, only_native):
    twins = Twins(kind, lambda: LazyTensorStorage(200), sampler=SAMPLERS[name], batch_size=7)
    twins.extend(200)
    twins.sample(20)
    only_native()
    for n in (1, 7, 64):
        twins.sample(n)


@pytest.mark.parametrize("shuffle", [True, False])
def test_iterating_gives_every_row_of_an_epoch_once(shuffle):
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(shuffle=shuffle), batch_size=7)
    rb.extend(torch.arange(100))
    for _ in range(3):
        batches = list(rb)
        assert [len(batch) for batch in batches] == [7] * 14 + [2]
        assert sorted(torch.cat(batches).tolist()) == list(range(100))


def test_a_batch_of_an_epoch_for_which_there_is_no_memory_leaves_no_row_out(monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=10)
    rb.extend(torch.arange(100))
    batches = [rb.sample()]
    reader = rb._parts.reader

    class Maker:
        def sample(self, source, n, as_numpy):
            maker.sample(source, n)
            raise MemoryError("none left")

    maker = reader._maker
    with monkeypatch.context() as patch:
        patch.setattr(reader, "_maker", Maker())
        with pytest.raises(MemoryError):
            rb.sample()
    batches += [rb.sample() for _ in range(9)]
    assert sorted(torch.cat(batches).tolist()) == list(range(100))


def test_an_epoch_goes_on_with_the_same_rows_where_the_native_call_gives_no_batch(monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=10)
    rb.extend(torch.arange(100))
    batches = [rb.sample()]
    reader = rb._parts.reader

    class Maker:
        def sample(self, source, n, as_numpy):
            maker.sample(source, n)  # rows were torn, say

    maker = reader._maker
    monkeypatch.setattr(reader, "_maker", Maker())
    batches += [rb.sample() for _ in range(9)]
    assert sorted(torch.cat(batches).tolist()) == list(range(100))


class RunsOutOfMemory(Transform):
    """Once, when `fails` is set."""

    def __init__(self):
        super().__init__()
        self.fails = False

    def forward(self, batch):
        if self.fails:
            self.fails = False
            raise MemoryError("none left")
        return batch


@pytest.mark.parametrize("iterated", [False, True])
def test_an_epoch_goes_on_with_the_same_rows_where_a_transform_has_no_memory(iterated, only_native):
    transform = RunsOutOfMemory()
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=10, transform=transform
    )
    rb.extend(TensorDict({"number": torch.arange(100)}, [100]))
    drawn = iter(rb) if iterated else iter(rb.sample, None)
    batches = [next(drawn)]
    only_native()
    transform.fails = True
    with pytest.raises(MemoryError):
        next(drawn)
    drawn = iter(rb) if iterated else drawn
    batches += [*(next(drawn) for _ in range(8)), rb.sample(return_info=True)[0]]
    assert sorted(torch.cat([batch["number"] for batch in batches]).tolist()) == list(range(100))


@pytest.mark.parametrize("prepared", [False, True])
def test_a_batch_of_another_thread_is_not_drawn_again_where_a_transform_has_no_memory(prepared):
    transform, others = RunsOutOfMemory(), []
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=10, transform=transform
    )
    rb.extend(TensorDict({"number": torch.arange(100)}, [100]))
    batches = [rb.sample()]
    forward = transform.forward

    def drawn_in_between(batch):
        transform.forward = forward
        # As a thread of `prefetch` gets one.
        others.append(rb._parts.reader.read(rb._parts.reader.draw(10), False)[0] if prepared else rb.sample())
        raise MemoryError("none left")

    transform.forward = drawn_in_between
    with pytest.raises(MemoryError):
        rb.sample()
    batches += [*others, *(rb.sample() for _ in range(7))]
    assert len(torch.cat([batch["number"] for batch in batches]).unique()) == 90


def test_a_sampler_without_replacement_in_two_buffers_begins_anew_in_each():
    sampler = SamplerWithoutReplacement(shuffle=False)
    rbs = [ReplayBuffer(storage=LazyTensorStorage(50), sampler=sampler, batch_size=5) for _ in range(2)]
    for k, rb in enumerate(rbs):
        rb.extend(torch.arange(50) + 1000 * k)
    first = [rbs[0].sample().tolist() for _ in range(3)]
    assert first == [list(range(k, k + 5)) for k in (0, 5, 10)]
    assert [rbs[1].sample().tolist() for _ in range(2)] == [list(range(k, k + 5)) for k in (1000, 1005)]
    assert rbs[0].sample().tolist() == [0, 1, 2, 3, 4]


def test_no_step_can_be_drawn_where_all_priorities_are_zero():
    rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=PrioritizedSampler(9, 1.0, 1.0, eps=0.0), batch_size=3)
    index = rb.extend(torch.arange(9))
    rb.update_priority(index, torch.zeros(9))
    with pytest.raises(RuntimeError, match="are 0"):
        rb.sample()
    rb.update_priority(index[4:5], torch.ones(1))
    assert rb.sample().tolist() == [4, 4, 4]


# ---- slices ----
def episodic(numbers, lengths=(1, 9, 3, 5, 14, 2)):
    """Steps whose episodes have these lengths, over and over."""
    n, period = len(numbers), sum(lengths)
    begins = torch.tensor([sum(lengths[:k]) for k in range(len(lengths))])
    place = numbers % period
    which = torch.bucketize(place, begins, right=True) - 1
    ends = torch.isin(place + 1, torch.cat([begins, torch.tensor([period])]))
    none = torch.zeros(n, 1, dtype=torch.bool)
    following = TensorDict({"obs": numbers.float(), "done": ends.unsqueeze(-1), "terminated": none}, [n])
    steps = {
        "number": numbers,
        "id": numbers // period * len(lengths) + which,
        "flag": numbers % 3 == 0,
        "next": following,
    }
    return TensorDict(steps, [n])


FORMS["episodes"] = episodic
FORMS["episodes with all flags"] = lambda numbers: episodic(numbers).update(
    {"next": {"truncated": numbers.reshape(-1, 1) % 7 == 0}, "is_init": numbers % 11 == 0}
)
FORMS["episodes as dicts"] = lambda numbers: episodic(numbers).to_dict()
EPISODES = sorted(form for form in FORMS if form.startswith("episodes"))
LIMITS = st.one_of(st.booleans(), st.integers(0, 2))


@st.composite
def slice_samplers(draw):
    """A sampler of slices of three steps or more, made from a number of settings; and the length of its slices."""
    length, num_slices = draw(st.integers(3, 9)), draw(st.booleans())
    settings = {
        "traj_key": draw(st.sampled_from(["id", None])),
        "truncated_key": draw(st.sampled_from([("next", "truncated"), None, "cut", ("a", "b", "cut")])),
        "slice_key": draw(st.sampled_from([None, "slice", ("next", "slice"), ("a", "slice"), "flag"])),
        "weight": draw(st.sampled_from(["trajectories", "steps"])),
        "strict_length": draw(st.booleans()),
        "slice_len" if not num_slices else "num_slices": length if not num_slices else 4,
    }
    if draw(st.booleans()):
        kind, more = SequenceSampler, {
            "burn_in": draw(st.integers(0, 2)),
            "init_key": draw(st.sampled_from(["is_init", None, ("next", "begins")])),
            "mask_key": draw(st.sampled_from([("collector", "mask"), "mask"])),
        }  # fmt: skip
    else:
        kind, more = SliceSampler, {"span": draw(st.tuples(LIMITS, LIMITS)), "pad_output": draw(st.booleans())}
    return (lambda: kind(**settings, **more)), length


def outcome(call):
    """What a call gives, or its error."""
    try:
        return call(), None
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        return None, (type(error), str(error))


@pytest.mark.filterwarnings("ignore:sample was called with batch_size", "ignore:.*no trajectory ids")
@settings(max_examples=25)
@given(
    sampler=slice_samplers(),
    capacity=st.integers(5, 90),
    kind=st.sampled_from([ReplayBuffer, TensorDictReplayBuffer]),
    form=st.sampled_from(EPISODES),
    reuse=st.booleans(),
    own_generator=st.booleans(),
    program=st.lists(
        st.tuples(st.sampled_from(["extend", "sample", "samples", "empty", "write", "state"]), st.integers(1, 40)),
        min_size=3, max_size=12,
    ),
)  # fmt: skip
def test_slices_and_sequences_are_the_same_whatever_happens_in_between(
    sampler, capacity, kind, form, reuse, own_generator, program
):
    make, length = sampler
    form = "episodes" if kind is TensorDictReplayBuffer and "dict" in form else form
    twins = Twins(kind, lambda: LazyTensorStorage(capacity), form, own_generator, sampler=make, reuse_batches=reuse)
    twins.extend(30)
    for step, (what, n) in enumerate(program):
        if what == "extend":
            twins.extend(n)
        elif what in ("sample", "samples"):
            for k in range(4 if what == "samples" else 1):
                torch.manual_seed(step * 10 + k)
                batch, error = outcome(lambda: twins.rbs[0].sample(length * 4))
                state = torch.get_rng_state()
                torch.manual_seed(step * 10 + k)
                expected, other = outcome(lambda: twins.rbs[1].sample(length * 4, return_info=True))
                assert error == other and (error is not None or alike(batch, expected[0]))
                assert torch.equal(torch.get_rng_state(), state)
                if own_generator:
                    assert torch.equal(*(rb.generator.get_state() for rb in twins.rbs))
        elif what == "empty":
            for rb in twins.rbs:
                rb.empty()
        elif what == "write" and n < len(twins.rbs[0]):
            for rb in twins.rbs:  # ends a trajectory in the middle, or joins two
                rb[n] = rb.storage.get((n * 3) % len(rb))
        elif what == "state":
            states = [rb.state_dict() for rb in twins.rbs]
            for rb, state in zip(twins.rbs, states, strict=True):
                rb.load_state_dict(state)


SLICES = {
    "slices": lambda: SliceSampler(slice_len=4, traj_key="id"),
    "slices by flags": lambda: SliceSampler(num_slices=4),
    "slices by step": lambda: SliceSampler(slice_len=4, weight="steps", span=True, strict_length=False),
    "padded slices": lambda: SliceSampler(slice_len=4, strict_length=False, pad_output=True, slice_key="slice"),
    "sequences": lambda: SequenceSampler(slice_len=4, burn_in=2),
    "frames": lambda: SequenceSampler(slice_len=4, burn_in=3, weight="steps", truncated_key=None),
}


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("name", SLICES)
def test_slices_and_sequences_come_from_the_native_call_once_their_storage_has_an_index(name, kind, only_native):
    twins = Twins(kind, lambda: LazyTensorStorage(200), "episodes", sampler=SLICES[name])
    twins.extend(250)
    twins.sample(16)
    only_native()
    for n in (16, 16, 48, 16):
        twins.sample(n)
    twins.extend(30)
    twins.sample(16)


def test_new_dictionaries_of_a_batch_are_like_those_that_tensordict_makes():
    twins = Twins(ReplayBuffer, lambda: LazyTensorStorage(200), "episodes", sampler=SLICES["sequences"])
    twins.extend(100)
    twins.sample(16)
    batch, expected = twins.rbs[0].sample(16), twins.rbs[1].sample(16, return_info=True)[0]
    mine, theirs = (vars(each["collector"]) for each in (batch, expected))
    assert all(mine[name] == theirs[name] for name in mine if name != "_tensordict")
    assert {name for name in theirs if not name.startswith("_has_")} <= mine.keys()  # those are looked up when needed


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        (lambda numbers: episodic(numbers).update({"next": {"truncated": numbers.to(torch.uint8)}}), {}),
        (lambda numbers: episodic(numbers), {"slice_key": "next"}),
        (lambda numbers: episodic(numbers), {"truncated_key": ("number", "truncated")}),
    ],
)
def test_marks_that_are_no_flags_and_keys_without_a_place_are_the_samplers(form, settings):
    rbs = [
        ReplayBuffer(storage=LazyTensorStorage(90), generator=torch.Generator(), sampler=SliceSampler(
            slice_len=3, traj_key="id", **settings)) for _ in range(2)
    ]  # fmt: skip
    for rb in rbs:
        rb.extend(form(torch.arange(90)))
    for seed in range(3):
        for rb in rbs:
            rb.generator.manual_seed(seed)
        results = [
            outcome(lambda rb=rb, i=i: rb.sample(12, return_info=i)) for i, rb in zip((False, True), rbs, strict=True)
        ]
        assert results[0][1] == results[1][1]
        assert results[0][1] is not None or alike(results[0][0], results[1][0][0])


def test_a_setting_that_is_assigned_later_holds_from_the_next_batch_on(only_native):
    twins = Twins(ReplayBuffer, lambda: LazyTensorStorage(200), "episodes", sampler=SLICES["sequences"])
    twins.extend(100)
    twins.sample(16)
    only_native()
    for name, value in [("slice_key", ("slice",)), ("init_key", None), ("mask_key", ("mask",)), ("slice_key", None)]:
        for rb in twins.rbs:
            setattr(rb.sampler, name, value)
        twins.sample(16)


def test_a_sampler_of_slices_in_two_buffers_draws_each_ones_trajectories():
    sampler = SliceSampler(slice_len=3, traj_key="id")
    rbs = [ReplayBuffer(storage=LazyTensorStorage(90), sampler=sampler) for _ in range(2)]
    for k, rb in enumerate(rbs):
        rb.extend(episodic(torch.arange(90) + 1000 * k, (4 + k, 7)))
    for _ in range(10):
        for k, rb in enumerate(rbs):
            batch = rb.sample(12).reshape(4, 3)
            assert bool((batch["number"].diff() == 1).all()) and bool((batch["id"].diff() == 0).all())
            assert bool((batch["number"] // 1000 == k).all())


@each("name", SLICES)
@each("lengths", [[3, 4], [5] * 8, [7] * 17])
def test_slices_that_a_writer_overwrites_between_the_draw_and_the_copy_are_refused(name, lengths):
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=SLICES[name]())
    torch.manual_seed(0)
    rb.extend(episodic(torch.arange(40)))
    rb.sample(16)
    numbers, refused = iter(range(40, 100_000)), 0

    def overwrite():
        """Asked between the draw and the copy whether the tensors of an earlier batch may be used."""
        for n in lengths:
            steps = episodic(torch.tensor([next(numbers) for _ in range(n)]), (n,))
            rb.extend(steps.set("id", torch.full((n,), 10_000 + rb.write_count)))
        return True

    maker = _native.BatchMaker([(rb.sampler.draw_plan(rb.storage).native, rb.sampler)], reuse=(overwrite,))
    for _ in range(30):
        batch = maker.sample(rb.storage.native.source, 16)
        refused += batch is None
        if batch is not None:
            assert bool((batch["number"] >= rb.write_count - 40).all())
    assert refused >= (5 if sum(lengths) < 40 else 30)


@pytest.mark.quick
def test_no_slice_is_torn_or_crosses_an_end_beside_a_thread_that_writes():
    wide = 400  # a batch of 64 x 4 of these rows is over 256 KB: it is copied without the GIL
    rb = ReplayBuffer(storage=LazyTensorStorage(600), sampler=SliceSampler(slice_len=4, traj_key="id"))
    stop, changed, newest = threading.Event(), 0, 0

    def rows(start, n):
        numbers = torch.arange(start, start + n)
        wide_numbers = numbers.reshape(-1, 1).expand(-1, wide)
        return TensorDict({"number": numbers, "id": torch.full((n,), start), "wide": wide_numbers}, [n])

    def write():
        while not stop.is_set():
            rb.extend(rows(rb.write_count, 4 + rb.write_count % 5))

    rb.extend(rows(0, 600))
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        until = time.monotonic() + 200
        while changed < 50 and time.monotonic() < until:
            batch, before = rb.sample(256).reshape(64, 4), newest
            newest = int(batch["number"].max())
            assert bool((batch["number"].diff(dim=1) == 1).all()) and bool((batch["id"].diff(dim=1) == 0).all())
            assert bool((batch["wide"] == batch["number"].unsqueeze(-1)).all())
            assert bool(batch["next", "truncated"][:, -1].all()) and not batch["next", "truncated"][:, :-1].any()
            changed += newest != before
    finally:
        stop.set()
        writer.join(300)
    assert changed >= 50


def test_slices_by_priority_are_those_of_trajectories():
    rb = ReplayBuffer(storage=LazyTensorStorage(60), batch_size=12, sampler=PrioritizedSliceSampler(
        60, 0.6, 0.4, slice_len=4, end_key=("next", "done")))  # fmt: skip
    rb.extend(nested(torch.arange(50)))
    assert bool((rb.sample()["number"].reshape(3, 4).diff() == 1).all())


@each("form", ["memory", "shared", "file"])
def test_a_forked_child_is_given_native_batches_from_its_second_on(form):
    kinds = {"memory": LazyTensorStorage, "shared": partial(LazyTensorStorage, shared=True), "file": LazyMemmapStorage}
    rb = ReplayBuffer(storage=kinds[form](20), batch_size=4)
    rb.extend(torch.arange(8))
    assert rb.storage.native.source is not None

    def work():
        before = rb.storage.native.source is None
        with warnings.catch_warnings():  # of the child's own copy
            warnings.simplefilter("ignore")
            rb.sample()
        return before, rb.storage.native.source is not None

    assert Child(work).result() == (True, True)


@pytest.mark.parametrize("form", ["shared", "file"])
def test_a_storage_that_was_sent_gives_native_batches_and_takes_native_writes(form):
    kinds = {"shared": partial(LazyTensorStorage, shared=True), "file": LazyMemmapStorage}
    rb = ReplayBuffer(storage=kinds[form](20), batch_size=4)
    rb.extend(torch.arange(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = pickle.loads(ForkingPickler.dumps(rb.storage))
    assert twin.native.source is not None and twin.native.push is not None and len(twin) == 8


def test_a_closed_storage_offers_native_calls_nothing():
    rb = ReplayBuffer(storage=LazyMemmapStorage(20))
    rb.extend(torch.arange(8))
    rb.storage.close()
    native = rb.storage.native
    assert (native.source, native.push, native.read, native.appended) == (None, None, None, None)


def test_of_a_class_that_has_a_method_of_its_own_the_native_calls_beside_it_are_not_used():
    class Reads(LazyTensorStorage):
        def get(self, index):
            return super().get(index)

    class Writes(LazyTensorStorage):
        def set(self, cursor, data, *args, **kwargs):
            super().set(cursor, data, *args, **kwargs)

    reads, writes = (ReplayBuffer(storage=kind(20)) for kind in (Reads, Writes))
    for rb in (reads, writes):
        rb.extend(torch.arange(8))
    assert reads.storage.native.source is None and reads.storage.native.push is not None
    assert writes.storage.native.push is None and writes.storage.native.source is not None
