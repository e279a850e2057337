"""What the batches of every collector have besides the steps: the name of the time, and counts of steps."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from contracts.gym_loop import WORLDS, Proxy, Rule
from contracts.gym_worlds import Countdown
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer
from engram.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv
from engram.store.layout import name_dimensions

MULTI = [MultiSyncDataCollector, MultiaSyncDataCollector]
NO_LIMIT = [None, 0, -1]


def countdown(lengths=(3, 1, 4)):
    return GymEnv(Countdown(lengths))


def serial():
    return SerialEnv(3, [lambda w=w: GymEnv(Countdown(w)) for w in WORLDS])


@each("make", [countdown, serial, lambda: Proxy(serial())])
@each("arguments", [{}, {"split_trajs": True}, {"trajs_per_batch": 2}, {"return_same_td": True}, {"compact_obs": True}])
def test_the_last_dimension_of_a_batch_has_the_name_time(make, arguments):
    seen = []
    collector = SyncDataCollector(
        make, Rule(), frames_per_batch=12, postproc=lambda td: seen.append(td.names) or td, **arguments
    )
    for _ in range(2):
        batch = collector.rollout()
        expected = [*(None for _ in batch.shape[1:]), "time"]
        assert batch.names == batch["next"].names == seen.pop() == expected
        assert batch[..., 0].names == expected[:-1]


@pytest.mark.parametrize("kind", MULTI)
def test_batches_of_workers_have_it_too(kind):
    with kind([countdown] * 2, Rule(), frames_per_batch=8) as collector:
        batch = collector.rollout()
        assert batch.names == [*(None for _ in batch.shape[1:]), "time"]


@pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage])
def test_the_name_changes_nothing_of_what_a_buffer_stores(storage):
    batch = SyncDataCollector(countdown, Rule(), frames_per_batch=8).rollout()
    named, plain = (ReplayBuffer(storage=storage(20), batch_size=5) for _ in range(2))
    named.extend(batch)
    named.add(batch[2])
    batch.names = None
    plain.extend(batch)
    plain.add(batch[2])
    one, other = (torch.stack([rb[i] for i in range(9)]) for rb in (named, plain))
    assert bool((one == other).all()) and named.sample().names == [None]
    if storage is ListStorage:
        assert named.storage._storage.packed is not None  # rows: copied and sampled in one call


@each("limit", NO_LIMIT)
def test_a_limit_of_none_of_these_forms_is_none(limit):
    collector = SyncDataCollector(lambda: countdown((9,)), Rule(), frames_per_batch=9, max_frames_per_traj=limit)
    batch = collector.rollout()
    assert batch["next", "done"].sum() == 1 and "step_count" not in batch.keys()
    with MultiaSyncDataCollector(
        [countdown], Rule(), frames_per_batch=9, max_frames_per_traj=limit, init_random_frames=limit, total_frames=None
    ) as collector:
        assert "step_count" not in collector.rollout().keys() and collector.total_frames == -1


def counts(batch):
    return batch["step_count"].squeeze(-1).tolist(), batch["next", "step_count"].squeeze(-1).tolist()


def test_a_limit_adds_counts_of_steps_that_begin_anew_with_each_episode():
    collector = SyncDataCollector(countdown, Rule(), frames_per_batch=7, max_frames_per_traj=2)
    assert counts(collector.rollout()) == ([0, 1, 0, 0, 1, 0, 1], [1, 2, 1, 1, 2, 1, 2])
    collector.reset()
    assert counts(collector.rollout())[0][0] == 0


def test_an_entry_of_the_environment_of_this_name_stays():
    env = TransformedEnv(countdown(), StepCounter())
    transformed = SyncDataCollector(env, Rule(), frames_per_batch=7, max_frames_per_traj=2).rollout()
    plain = SyncDataCollector(countdown, Rule(), frames_per_batch=7, max_frames_per_traj=2).rollout()
    assert counts(transformed) == counts(plain)


def test_counts_go_on_over_batches_and_start_anew_after_an_error():
    calls = []

    class Fails(Countdown):
        def step(self, action):
            calls.append(1)
            if len(calls) == 6:
                raise RuntimeError("broken")
            return super().step(action)

    collector = SyncDataCollector(lambda: GymEnv(Fails((9,))), Rule(), frames_per_batch=4, max_frames_per_traj=9)
    assert counts(collector.rollout())[0] == [0, 1, 2, 3]
    assert counts(collector.rollout())[0] == [4]
    with pytest.raises(RuntimeError, match="broken"):
        collector.rollout()
    assert counts(collector.rollout())[0] == [0, 1, 2, 3]


@each("make", [countdown, serial, lambda: Proxy(countdown())])
def test_compact_batches_lack_the_observations_under_next_alone(make):
    plain, compact = (
        SyncDataCollector(make, Rule(), frames_per_batch=12, compact_obs=value).rollout() for value in (False, True)
    )
    assert ("next", "observation") in plain.keys(True) and ("next", "observation") not in compact.keys(True)
    assert bool((plain.exclude(("next", "observation")) == compact).all())


@pytest.mark.parametrize("named", [False, True])
def test_dimensions_are_named_as_by_tensordict_itself(named):
    def made():
        inner = TensorDict({"b": torch.zeros(2, 3, 4)}, [2, 3, 4] if named else [2, 3])
        return TensorDict({"a": torch.zeros(2, 3), "in": TensorDict({"deep": inner}, [2, 3])}, [2, 3])

    ours, theirs = made(), made()
    name_dimensions(ours, [None, "time"])
    theirs.names = [None, "time"]
    for td in (ours, theirs):
        td["in"]["deep"]["more"] = torch.zeros(*td["in"]["deep"].batch_size)
    for one, other in ((ours, theirs), (ours["in"], theirs["in"]), (ours["in", "deep"], theirs["in", "deep"])):
        assert one.names == other.names and one.batch_size == other.batch_size
