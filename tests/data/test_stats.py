"""`rb.stats()`: what a buffer holds and what was done with it, counted when somebody asks."""

import threading

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)


def steps(start, stop, **more):
    n = torch.arange(start, stop)
    return TensorDict({"n": n, "next": {"done": (n % 4 == 3).unsqueeze(1)}, **more}, [stop - start])


@each("storage", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
@each("sampler", [None, PrioritizedSampler, SliceSampler])
def test_stats_count_writes_draws_and_episodes(storage, sampler):
    arguments = {
        PrioritizedSampler: lambda: PrioritizedSampler(None, 0.7, 0.5),
        SliceSampler: lambda: SliceSampler(slice_len=2),
    }
    rb = ReplayBuffer(storage=storage(10), sampler=arguments.get(sampler), batch_size=4)
    assert rb.stats()[:9] == (0, 0, 10, 0, 0, 0, (), None, 0)
    rb.extend(steps(0, 6))
    for _ in range(3):
        rb.sample()
    found = rb.stats()
    assert (found.rows, found.capacity, found.writes, found.draws, found.episodes) == (6, 10, 6, 3, 2)
    assert found.bytes == rb.storage.nbytes > 0
    rb.extend(steps(6, 15))
    assert rb.stats()[:1] + rb.stats()[2:9] == (10, 10, 15, 3, 3, (), None, 0)  # steps 5 to 14
    rb.empty()
    assert (rb.stats().rows, rb.stats().episodes, rb.stats().draws) == (0, 0, 3)


def test_episodes_are_those_of_the_slice_sampler_where_it_has_its_own_keys():
    data = steps(0, 8, cut=torch.tensor([0, 1] * 4).bool())
    for settings, episodes in (({}, 2), ({"end_key": "cut"}, 4), ({"trajectories": torch.arange(8)}, 8)):
        rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=SliceSampler(slice_len=1, **settings))
        rb.extend(data)
        assert rb.stats().episodes == episodes


@each("data", [torch.arange(5), TensorDict({"next": {"done": torch.zeros(5, 2, 1).bool()}}, [5]), ["a"]])
def test_no_number_of_episodes_where_steps_do_not_say_it(data):
    rb = ReplayBuffer(storage=ListStorage(9) if type(data) is list else LazyTensorStorage(9))
    rb.extend(data)
    assert rb.stats().episodes is None and rb.stats().rows == len(data)


def test_an_unlimited_list_has_no_capacity():
    rb = ReplayBuffer(storage=ListStorage())
    rb.extend(steps(0, 3))
    assert rb.stats().capacity is None and rb.stats().writes == 3


def test_environments_count_as_steps_and_trajectories_of_their_own():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=4)
    rb.extend(torch.stack([steps(0, 4), steps(1, 5), steps(2, 6)]))
    assert rb.stats()[2:9] == (12, 12, 0, 5, (), None, 0) and rb.stats().rows == 12


def test_writes_of_several_lanes_count_on_when_all_rows_were_dropped():
    rb = ReplayBuffer(storage=LazyTensorStorage(60, lanes=3, shared=True), batch_size=2)
    rb.extend(steps(0, 22))
    rb.empty()
    rb.extend(steps(0, 9))
    rb.extend(steps(0, 3))
    assert rb.stats().writes == rb.write_count == 12


def test_tensors_that_exist_count_as_written():
    rb = ReplayBuffer(storage=TensorStorage(steps(0, 8)))
    assert rb.stats()[:9] == (8, rb.storage.nbytes, 8, 8, 0, 2, (), None, 0)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_every_batch_that_was_handed_out_is_a_draw(prefetch):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=prefetch
    )
    rb.extend(steps(0, 10))
    assert len(list(rb)) == rb.stats().draws == 3
    rb.sample()
    next(rb)
    rb.set_sampler(PrioritizedSampler(None, 0.7, 0.5))
    rb.sample(return_info=True)
    assert rb.stats().draws == 6
    with pytest.raises(RuntimeError):
        ReplayBuffer(storage=LazyTensorStorage(3), batch_size=1).sample()


def test_draws_of_several_threads_are_all_counted():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=1)
    rb.extend(torch.arange(10))
    threads = [threading.Thread(target=lambda: [rb.sample() for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rb.stats().draws == 2000


def test_an_ensemble_sums_its_members():
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4) for _ in range(2)]
    for k, member in enumerate(members):
        member.extend(steps(0, 4 + 4 * k))
    both = ReplayBufferEnsemble(*members, batch_size=4)
    both.sample()
    one, other = (member.stats() for member in members)
    assert (
        both.stats()[:9] == (12, one.bytes + other.bytes, 20, 12, 1, 3, (), None, 0) and one.draws == other.draws == 0
    )


def test_observer_counts_its_draws(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.extend(steps(0, 6))
    assert ReplayBuffer.open(tmp_path, read_only=True).stats() == rb.stats()
    rb.storage.close()


def test_asking_changes_no_draw():
    batches = []
    for asks in (False, True):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(40), sampler=SliceSampler(slice_len=2), batch_size=8,
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        for start in range(0, 60, 6):
            rb.extend(steps(start, start + 6))
            if asks:
                rb.stats()
            batches.append(rb.sample()["n"].tolist())
    assert batches[:10] == batches[10:]


def test_keys_are_those_of_a_stored_step():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    assert rb.keys() == []
    rb.extend(TensorDict({"obs": torch.zeros(4, 3), "next": {"reward": torch.zeros(4, 1)}}, [4]))
    assert rb.keys() == ["obs", ("next", "reward"), "index"]
    items = ReplayBuffer(storage=ListStorage(10))
    items.extend(["a", "b"])
    assert items.keys() == []
    items.empty()
    items.extend([{"obs": torch.zeros(3), "next": {"x": torch.zeros(1)}}])
    assert items.keys() == ["obs", ("next", "x")]


def test_repr_shows_keys_rows_bytes_and_episodes():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    assert "rows" not in repr(rb)
    done = torch.tensor([0, 0, 1, 0]).bool()
    rb.extend(TensorDict({"obs": torch.zeros(4, 3), "next": {"done": done}}, [4]))
    shown = repr(rb)
    assert "rows=4" in shown and "episodes=2" in shown and "bytes=" in shown
    assert "keys={'obs': float32 [3], ('next', 'done'): bool []}" in shown


def test_repr_waits_for_no_other_thread():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(TensorDict({"next": {"done": torch.ones(4).bool()}}, [4]))
    shown = []
    with rb.storage.mutex:
        thread = threading.Thread(target=lambda: shown.append(repr(rb)))
        thread.start()
        thread.join(120)
    assert shown and "rows=4" in shown[0] and "episodes" not in shown[0]


def test_stats_are_read_as_a_mapping_with_torchrls_names_too():
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend(torch.arange(10))
    stats = rb.stats()
    assert {**stats} == dict(stats.items()) and tuple(stats.keys())[: len(stats)] == stats._fields
    assert (stats["rows"], stats["size"], stats["write_count"], stats["utilization"]) == (8, 8, 10, 1.0)
    assert stats[0] == 8 and next(iter(stats)) == 8 and "writes" in stats and "rose" not in stats and 10 in stats
    assert stats.get("rose", 3) == 3 and tuple(stats.values())[:2] == stats[:2]
    with pytest.raises(KeyError, match="there is no 'rose', but rows, bytes"):
        stats["rose"]
    endless = ReplayBuffer(storage=ListStorage()).stats()
    assert "utilization" not in endless and "capacity" in endless
