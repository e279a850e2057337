"""Collecting in worker processes."""

import gc
import itertools
import os
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from collectors.failing import Fails, cartpole, raises
from contracts.gym_worlds import Countdown
from contracts.tiers import in_ci
from contracts.waiting import NEVER, allowed, comes, has_named_memory, is_gone
from engram.collectors import (
    MultiAsyncCollector,
    MultiaSyncDataCollector,
    MultiSyncCollector,
    MultiSyncDataCollector,
    SyncDataCollector,
)
from engram.collectors.trajectories import GlobalTrajectoryIds, SharedCounter
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    MultiStep,
    PrioritizedSampler,
    TensorDictReplayBuffer,
)
from engram.envs import GymEnv, SerialEnv
from engram.errors import WorkerError
from engram.processes.shared_weights import SharedWeights

BOTH = [MultiSyncDataCollector, MultiaSyncDataCollector]
IDS = ("collector", "traj_ids")


def two_cartpoles():
    return SerialEnv(2, cartpole)


class Constant(nn.Module):
    """An action that its weight says, and the weight beside it."""

    def __init__(self, value=0.0, actions=2):
        super().__init__()
        self.weight, self.actions = nn.Parameter(torch.tensor(value)), actions

    def forward(self, observation):
        choice = (torch.zeros(observation.shape[:-1]) + self.weight > 0.5).long()
        return nn.functional.one_hot(choice, self.actions), (
            torch.zeros(observation.shape[:-1]) + self.weight
        ).unsqueeze(-1)


def constant(value=0.0, actions=2):
    return TensorDictModule(Constant(value, actions), in_keys=["observation"], out_keys=["action", "weight"])


def workers_of(pid=None):
    found = subprocess.run(["pgrep", "-P", str(pid or os.getpid())], capture_output=True, text=True).stdout.split()
    return {int(child) for child in found}


def rows_by_trajectory(batches):
    """Observations and those that follow, by trajectory id, in the order in which they came."""
    rows = {}
    for batch in batches:
        flat = batch.reshape(-1)
        for i in range(len(flat)):
            step = (flat["observation"][i].tolist(), flat["next", "observation"][i].tolist())
            rows.setdefault(int(flat[IDS][i]), []).append(step)
    return rows


def test_the_other_names_are_the_same_classes():
    assert MultiSyncCollector is MultiSyncDataCollector and MultiAsyncCollector is MultiaSyncDataCollector


# ---- batches ----
@pytest.mark.parametrize("cls", BOTH)
def test_batches_until_total_frames(cls):
    with cls([cartpole] * 2, frames_per_batch=60, total_frames=180) as collector:
        batches = list(collector)
    assert [batch.numel() for batch in batches] == [60] * 3 and collector.frames == 180 and collector.batches == 3
    assert batches[0].device is None and batches[0]["action"].dtype is torch.int64


SPAWNED = [(MultiSyncDataCollector, 2), (MultiaSyncDataCollector, 1)]


@pytest.mark.parametrize(("cls", "workers"), in_ci(SPAWNED, SPAWNED[1:]))
def test_spawned_workers(cls, workers):
    """All that is sent to them, as each takes seconds to start: an environment, a policy and its new weights."""
    env, n = GymEnv(Countdown((3, 1))), 8 * workers
    settings = {"frames_per_batch": n, "total_frames": 6 * n, "num_workers": workers, "start_method": "spawn"}
    batches = []
    with cls(env, constant(actions=3), **settings) as collector:
        for batch in collector:
            batches.append(batch)
            collector.update_policy_weights_({"module.weight": torch.tensor(0.25)})
    assert [batch.numel() for batch in batches] == [n] * 6 and (collector.frames, collector.batches) == (6 * n, 6)
    assert batches[0]["next", "done"].reshape(-1).tolist() == [False, False, True, True] * 2 * workers
    assert not batches[0]["weight"].any() and (batches[-1]["weight"] == 0.25).all()
    assert env.rollout(2).shape == (2,)


class OwnCartPole(GymEnv):
    def __init__(self):
        super().__init__("CartPole-v1")


@pytest.mark.quick
def test_workers_make_their_environments_from_a_class():
    with MultiSyncDataCollector(OwnCartPole, num_workers=2, frames_per_batch=20) as collector:
        assert collector.rollout().shape == (2, 10)


def test_a_sync_batch_has_a_row_for_each_worker_and_rounds_up_to_whole_rows():
    with MultiSyncDataCollector(two_cartpoles, num_workers=3, frames_per_batch=50) as collector:
        assert collector.frames_per_batch == 54 and collector.rollout().shape == (3, 2, 9)


@pytest.mark.parametrize(("dim", "shape"), [("stack", (2, 2, 10)), (0, (4, 10)), (-1, (2, 20))])
def test_cat_results_says_how_the_workers_batches_are_put_together(dim, shape):
    with MultiSyncDataCollector([two_cartpoles] * 2, frames_per_batch=40, cat_results=dim) as collector:
        assert collector.rollout().shape == shape


@pytest.mark.quick
def test_a_sync_batch_is_what_the_same_collectors_give_one_by_one():
    weights = torch.tensor([[0.3, -1.0, 2.0, 0.5], [-0.3, 1.0, -2.0, -0.5]])

    def act(td):
        scores = td["observation"] @ weights.T
        return td.set("action", nn.functional.one_hot(scores.argmax(-1), 2))

    with MultiSyncDataCollector([two_cartpoles] * 2, act, frames_per_batch=120, total_frames=480) as collector:
        assert collector.set_seed(7) == 11
        together = list(collector)
    for k in range(2):
        alone = SyncDataCollector(two_cartpoles, act, frames_per_batch=60, total_frames=240)
        alone.set_seed(7 + 2 * k)
        for batch, expected in zip(together, alone, strict=True):
            mine = batch[k]
            assert (mine.exclude(IDS) == expected.exclude(IDS)).all()
            assert (np.diff(mine[IDS]) == np.diff(expected[IDS])).sum() > 0


def test_ids_of_a_sync_collector_count_in_the_order_of_the_steps():
    with MultiSyncDataCollector([cartpole] * 3, frames_per_batch=300, total_frames=900) as collector:
        batches = torch.cat(list(collector), 1)
    ids, starts = batches[IDS], []
    for time_step in range(ids.shape[1]):
        for worker in range(3):
            number = int(ids[worker, time_step])
            if number not in starts:
                starts.append(number)
    assert starts == list(range(len(starts))) and len(starts) > 20


@pytest.mark.quick
@pytest.mark.parametrize("cls", BOTH)
def test_trajectories_go_on_from_batch_to_batch_and_are_never_mixed(cls):
    with cls([two_cartpoles] * 2, frames_per_batch=44, total_frames=880) as collector:
        rows = rows_by_trajectory(collector)
    assert sorted(rows) == list(range(len(rows)))
    for steps in rows.values():
        assert all(before[1] == after[0] for before, after in itertools.pairwise(steps))


def test_an_async_collector_hands_out_whoever_is_ready(tmp_path):
    go_on, gave_up = tmp_path / "go on", tmp_path / "gave up"

    def slow():
        return Fails(1, lambda: comes(go_on.exists) or gave_up.touch())

    with MultiaSyncDataCollector([slow, cartpole], frames_per_batch=20) as collector:
        for _ in range(10):
            collector.rollout()
        assert not gave_up.exists()
        go_on.touch()


def test_later_batches_do_not_change_earlier_ones():
    with MultiaSyncDataCollector([cartpole] * 2, frames_per_batch=30, total_frames=600) as collector:
        kept = [(batch, batch.clone()) for batch in collector]
    assert all((batch == copy).all() for batch, copy in kept)


def test_batches_of_another_size_than_before_fit():
    """A policy that writes more from its third call on makes longer rows."""

    class Grows(nn.Module):
        in_keys, out_keys = ["observation"], ["action"]

        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, td):
            self.calls += 1
            td["action"] = torch.tensor([1, 0])
            return td.set("extra", torch.zeros(1)) if self.calls > 10 else td

    with MultiaSyncDataCollector([cartpole], Grows(), frames_per_batch=10) as collector:
        assert ["extra" in collector.rollout().keys() for _ in range(3)] == [False, True, True]


# ---- arguments ----
def test_split_trajs_and_postproc_work_on_what_is_handed_out():
    with MultiSyncDataCollector(
        [cartpole] * 2, frames_per_batch=100, split_trajs=True, postproc=MultiStep(0.9, 3)
    ) as collector:
        batch = collector.rollout()
    assert batch["collector", "mask"].sum() == 100 and "nonterminal" in batch.keys()


def test_random_frames_come_first():
    with MultiSyncDataCollector(
        [cartpole] * 2, constant(1.0), frames_per_batch=100, init_random_frames=200
    ) as collector:
        actions = [collector.rollout()["action"] for _ in range(3)]
    assert 20 < actions[0][..., 1].sum() < 80 and 20 < actions[1][..., 1].sum() < 80 and actions[2][..., 1].all()


@pytest.mark.parametrize("cls", BOTH)
def test_an_episode_is_cut_at_its_longest(cls):
    with cls([cartpole] * 2, frames_per_batch=40, max_frames_per_traj=5) as collector:
        rows = rows_by_trajectory([collector.rollout()])
    assert max(len(steps) for steps in rows.values()) == 5


def test_when_enough_workers_have_their_batch_the_others_hand_out_what_they_have():
    class Slow(Fails):
        def _step(self, td):
            time.sleep(0.02)
            return super()._step(td)

    def slow():
        return Slow(10**9, raises)

    with MultiSyncDataCollector(
        [cartpole, slow], frames_per_batch=640, preemptive_threshold=0.5, total_frames=640
    ) as collector:
        batch = collector.rollout()
        mask = batch["collector", "mask"]
        count = int(mask[1].sum())
        assert batch.shape == (2, 320) and mask[0].all() and 0 < count < 320 and mask[1, :count].all()
        assert not batch["observation"][1, count:].any() and collector.frames == 320 + count
        following = collector.rollout()
    last, first = batch[1, count - 1], following[1, 0]
    assert bool(last["next", "done"]) or torch.equal(last["next", "observation"], first["observation"])


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch must be an integer of 1 or more"),
        ({"frames_per_batch": 10, "total_frames": 0}, ValueError, "total_frames must be"),
        ({"frames_per_batch": 10, "num_workers": 3}, ValueError, "2 environments to make and num_workers=3"),
        ({"frames_per_batch": 10, "preemptive_threshold": 1.5}, ValueError, "preemptive_threshold must be in"),
        ({"frames_per_batch": 10, "cat_results": "mix"}, ValueError, 'cat_results must be "stack" or'),
        ({"frames_per_batch": 10, "start_method": "clone"}, ValueError, "start method must be one of"),
        ({"frames_per_batch": 10, "policy": 3}, TypeError, "policy must be a callable"),
    ],
)
def test_settings_that_cannot_work_are_refused_and_leave_no_process(kwargs, error, match):
    before = workers_of()
    with pytest.raises((error, WorkerError), match=match):
        MultiSyncDataCollector([cartpole] * 2, **kwargs)
    assert workers_of() <= before


def test_each_worker_gets_a_copy_of_an_environment():
    env = GymEnv(Countdown((3, 1)))
    with MultiSyncDataCollector(env, frames_per_batch=8, num_workers=2) as collector:
        batch = collector.rollout()
    assert batch["next", "done"].squeeze(-1).tolist() == [[False, False, True, True]] * 2
    assert env.rollout(2).shape == (2,)


def test_copies_of_one_environment_have_episodes_of_their_own():
    env = cartpole()
    env.set_seed(5)
    alone = cartpole()
    alone.set_seed(5)
    starts = []
    for _ in range(2):
        torch.manual_seed(0)
        with MultiSyncDataCollector([env] * 3, frames_per_batch=60) as collector:
            starts.append(collector.rollout()["observation"][:, 0])
    assert torch.equal(*starts)  # the seeds of copies follow from torch's
    assert torch.equal(starts[0][0], alone.reset()["observation"])
    assert len(starts[0].unique(dim=0)) == 3


def test_arguments_for_an_environment_that_is_made_are_refused():
    with pytest.raises(TypeError, match="create_env_kwargs are arguments of callables"):
        MultiSyncDataCollector([cartpole()], frames_per_batch=10, create_env_kwargs={"a": 1})


def test_an_environment_that_cannot_be_pickled_is_refused_at_once():
    env = cartpole()
    env.held = threading.Lock()
    with pytest.raises(TypeError, match=r"this GymEnv cannot be pickled.*give a callable"):
        MultiSyncDataCollector([env], frames_per_batch=10)
    with pytest.raises(TypeError, match="each worker makes its own environment"):
        MultiSyncDataCollector([3], frames_per_batch=10)


def test_the_frames_of_each_worker_may_be_given():
    for cls, shapes in ((MultiSyncDataCollector, [(12,)]), (MultiaSyncDataCollector, [(4,), (8,)])):
        joined = {"cat_results": 0} if cls is MultiSyncDataCollector else {}
        with cls([cartpole] * 2, frames_per_batch=[4, 8], device=["cpu", "cpu"], **joined) as collector:
            found = {tuple(collector.rollout().shape) for _ in range(3 * len(shapes))}
        assert found <= set(shapes) and (len(shapes) > 1 or found == set(shapes))
    with pytest.raises(ValueError, match="frames_per_batch has 1 values for 2 workers"):
        MultiSyncDataCollector([cartpole] * 2, frames_per_batch=[4])


def test_a_threshold_of_0_waits_for_the_first_worker():
    with MultiSyncDataCollector([cartpole] * 2, frames_per_batch=640, preemptive_threshold=0.0) as collector:
        mask = collector.rollout()["collector", "mask"]
    assert mask.shape == (2, 320) and mask.all(-1).any() and mask[:, 0].all()


# ---- weights ----
def test_new_weights_reach_the_workers():
    policy = constant()
    with MultiSyncDataCollector([cartpole] * 2, policy, frames_per_batch=20) as collector:
        assert not collector.rollout()["weight"].any()
        policy.module.weight.data += 0.25
        assert not collector.rollout()["weight"].any()
        collector.update_policy_weights_()
        assert (collector.rollout()["weight"] == 0.25).all()
        collector.update_policy_weights_({"module.weight": torch.tensor(0.75)})
        assert (collector.rollout()["weight"] == 0.75).all() and policy.module.weight.item() == 0.25
        collector.update_policy_weights_(constant(2.0))
        assert (collector.rollout()["weight"] == 2).all()


def test_weights_may_be_updated_before_each_batch():
    policy = constant()
    with MultiSyncDataCollector([cartpole], policy, frames_per_batch=20, update_at_each_batch=True) as collector:
        policy.module.weight.data += 0.25
        assert (collector.rollout()["weight"] == 0.25).all()


def test_a_policy_in_shared_memory_stays_the_callers():
    policy = constant()
    policy.share_memory()
    with MultiSyncDataCollector([cartpole], policy, frames_per_batch=20) as collector:
        collector.update_policy_weights_({"module.weight": torch.tensor(0.75)})
        collector.rollout()
        assert policy.module.weight.item() == 0


def test_weights_of_another_policy_are_refused_and_change_nothing():
    with MultiSyncDataCollector([cartpole], constant(1.0), frames_per_batch=20) as collector:
        with pytest.raises(ValueError, match=r"not those of the policy.*\n.*module.weight: found None"):
            collector.update_policy_weights_({"weight": torch.zeros(1)})
        assert (collector.rollout()["weight"] == 1).all()
    with MultiSyncDataCollector([cartpole], frames_per_batch=20) as collector:
        collector.update_policy_weights_()
        with pytest.raises(TypeError, match="has no weights"):
            collector.update_policy_weights_({"weight": torch.zeros(1)})


@pytest.mark.quick
def test_a_reader_never_sees_weights_that_are_half_new():
    shared = SharedWeights({"a": torch.zeros(5000), "b": torch.zeros(3, dtype=torch.int64)})
    stop, odd, versions = threading.Event(), [], set()

    def read():
        while not stop.is_set():
            found = shared.read()
            value = float(found["a"][0])
            versions.add(value)
            if not ((found["a"] == value).all() and (found["b"] == value).all()):
                odd.append(found)

    reader = threading.Thread(target=read)
    reader.start()
    k, until = 0, time.monotonic() + NEVER
    while k < 400 or (len(versions) < 5 and time.monotonic() < until):
        k += 1
        shared.write({"a": torch.full((5000,), float(k)), "b": torch.full((3,), k)})
    stop.set()
    reader.join()
    assert not odd and len(versions) >= 5 and shared.version == k


def test_each_frame_says_which_weights_acted():
    policy = constant()
    with MultiSyncDataCollector([cartpole], policy, frames_per_batch=20, track_policy_version=True) as collector:
        seen = []
        for updates in (0, 1, 2, 0):
            for _ in range(updates):
                collector.update_policy_weights_()
            seen.append(collector.rollout()["collector", "policy_version"].unique().tolist())
    assert seen == [[0], [1], [3], [3]] and collector.policy_version == 3


@pytest.mark.parametrize("of_factory", [False, True])
def test_an_update_counts_whatever_its_version_is(of_factory):
    makers = {"policy_factory": constant} if of_factory else {"policy": constant()}
    with MultiSyncDataCollector([cartpole], **makers, frames_per_batch=20, track_policy_version=True) as collector:
        for value, version in ((0.25, 0), (0.5, 7), (0.75, 7), (1.0, 3)):
            collector.update_policy_weights_({"module.weight": torch.tensor(value)}, version=version)
            batch = collector.rollout()
            assert batch["weight"].unique().tolist() == [value]
            assert batch["collector", "policy_version"].unique().tolist() == [version]


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        self.extra = state


def test_weights_of_a_policy_with_extra_state_reach_the_workers():
    policy = TensorDictModule(WithExtraState(4, 2), in_keys=["observation"], out_keys=["scores"])
    chosen = TensorDictModule(lambda scores: torch.eye(2)[scores.argmax(-1)], in_keys=["scores"], out_keys=["action"])
    net = TensorDictSequential(policy, chosen)
    with MultiSyncDataCollector([cartpole], net, frames_per_batch=20) as collector:
        with torch.no_grad():
            policy.module.weight.zero_()
            policy.module.bias.copy_(torch.tensor([2.0, 3.0]))
        collector.update_policy_weights_()
        assert (collector.rollout()["scores"] == torch.tensor([2.0, 3.0])).all()


def test_a_version_that_rows_cannot_have_is_refused_and_changes_nothing():
    with MultiSyncDataCollector([cartpole], constant(1.0), frames_per_batch=20) as collector:
        for version, error in ((-1, ValueError), (2**63, ValueError), (1.5, TypeError)):
            with pytest.raises(error, match="version of weights"):
                collector.update_policy_weights_({"module.weight": torch.tensor(0.5)}, version=version)
            assert (collector.rollout()["weight"] == 1).all() and collector.policy_version == 0


# ---- numbers of trajectories ----
def test_numbers_from_several_processes_are_all_different():
    count, read, write = SharedCounter(), *os.pipe()
    children = []
    for _ in range(3):
        children.append(os.fork())
        if children[-1] == 0:
            for _ in range(300):
                os.write(write, count.take(2).to_bytes(4, "little"))
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    taken = np.frombuffer(os.read(read, 1 << 16), np.int32)
    os.close(read)
    os.close(write)
    assert sorted(taken) == list(range(0, 1800, 2)) and count.value == 1800


def test_what_goes_on_keeps_its_number():
    from tensordict import TensorDict

    def batch(ids):
        return TensorDict({IDS: torch.tensor(ids)}, batch_size=[len(ids), len(ids[0])])

    count = SharedCounter()
    numbering = GlobalTrajectoryIds(count.take)
    first, second = batch([[0, 0, 2]]), batch([[0, 1, 1]])
    numbering.number([(0, first), (1, second)])
    assert first[IDS].tolist() == [[0, 0, 3]] and second[IDS].tolist() == [[1, 2, 2]]
    later = batch([[1, 3, 3]])
    numbering.number([(1, later)])
    assert later[IDS].tolist() == [[2, 4, 4]]


# ---- replay buffers ----
STORAGES = {
    "shared memory": lambda path: LazyTensorStorage(6000, shared=True, lanes=3),
    "mapped": lambda path: LazyMemmapStorage(6000, scratch_dir=path, lanes=3),
    "temporary": lambda path: LazyMemmapStorage(6000, lanes=3),
    "one ring in shared memory": lambda path: LazyTensorStorage(6000, shared=True),
    "own memory": lambda path: LazyTensorStorage(6000),
    "ndim 2": lambda path: LazyTensorStorage(6000, ndim=2, shared=True),
}


#: Each kind of storage with one of the collectors.
IN_TURN = [BOTH[k % 2] for k in range(len(STORAGES))]


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        pytest.param(cls, kind, marks=pytest.mark.quick if cls is first else ())
        for kind, first in zip(STORAGES, IN_TURN, strict=True)
        for cls in BOTH
    ],
)
def test_a_replay_buffer_gets_every_row_once_in_order(cls, kind, tmp_path):
    buffer = TensorDictReplayBuffer(storage=STORAGES[kind](tmp_path / "rows"), batch_size=32)
    with cls([two_cartpoles] * 2, frames_per_batch=80, total_frames=1600, replay_buffer=buffer) as collector:
        assert list(collector) == [None] * len(range(0, 1600, collector.frames_per_batch)) and collector.frames == 1600
        assert buffer.sample()[IDS].shape[0] == 32
    assert buffer.write_count >= 1600 and len(buffer) == buffer.write_count <= 1600 + 2 * 2 * 80
    rows = rows_by_trajectory([buffer[:]])
    assert sorted(rows) == list(range(len(rows)))
    for steps in rows.values():
        assert all(before[1] == after[0] for before, after in itertools.pairwise(steps))


@pytest.mark.quick
def test_workers_write_to_a_shared_buffer_themselves():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6000, shared=True, lanes=2), batch_size=32)
    with MultiSyncDataCollector([cartpole] * 2, frames_per_batch=100, replay_buffer=buffer) as collector:
        for _ in range(5):
            collector.rollout()
        writers = buffer.stats().writers
    rows = [writer.rows for writer in writers if writer.pid != os.getpid()]  # the first batch came here
    assert len(rows) == 2 and min(rows) >= 200 and len(buffer) == 500


def test_a_learner_with_priorities_samples_what_workers_write():
    storage = LazyTensorStorage(6000, shared=True, lanes=2)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(6000, 0.7, 0.5), batch_size=64)
    with MultiaSyncDataCollector([cartpole] * 2, frames_per_batch=50, total_frames=1000, replay_buffer=buffer) as c:
        for _ in c:
            batch = buffer.sample()
            batch["td_error"] = torch.rand(64)
            buffer.update_tensordict_priority(batch)
    assert len(buffer) >= 1000


def test_a_shared_storage_for_one_writer_is_refused():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6000, shared=True, lanes=1), batch_size=32)
    buffer.extend(SyncDataCollector(cartpole, frames_per_batch=10).rollout())
    before = workers_of()
    with pytest.raises(ValueError, match=r"3 workers write to the replay buffer, and its storage has lanes=1.*lanes=3"):
        MultiSyncDataCollector([cartpole] * 3, frames_per_batch=30, replay_buffer=buffer)
    assert workers_of() <= before


def test_more_workers_than_lanes_said_write_themselves():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6000, shared=True, lanes=2), batch_size=32)
    with MultiSyncDataCollector([cartpole] * 3, frames_per_batch=90, replay_buffer=buffer) as collector:
        for _ in range(3):
            collector.rollout()
        rows = [writer.rows for writer in buffer.stats().writers if writer.pid != os.getpid()]  # the first came here
    assert len(buffer) == 270 and rows == [60, 60, 60]


# ---- state ----
@pytest.mark.parametrize("cls", BOTH)
def test_counters_weights_and_ids_go_on_from_a_state(cls):
    def make():
        return cls([cartpole] * 2, constant(0.0), frames_per_batch=40, total_frames=400)

    with make() as first, make() as second:
        first.update_policy_weights_({"module.weight": torch.tensor(0.25)})
        ids = torch.cat([first.rollout()[IDS].reshape(-1) for _ in range(5)])
        second.load_state_dict(first.state_dict())
        assert second.frames == 200 and second.batches == 5
        batch = second.rollout()
        assert batch[IDS].min() > ids.max() and len(list(second)) == 4
        third = cls([cartpole] * 3, constant(), frames_per_batch=60)
        with third, pytest.raises(ValueError, match="the state is of 2 workers, and this collector has 3"):
            third.load_state_dict(first.state_dict())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("cls", BOTH)
def test_statistics_are_those_of_the_episodes_that_ended(cls, shared):
    storage = LazyTensorStorage(5000, shared=True, lanes=3) if shared else None
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=8) if shared else None
    with cls([two_cartpoles] * 2, frames_per_batch=100, total_frames=1000, replay_buffer=buffer) as collector:
        batches = list(collector)
        stats = collector.stats
    assert stats.frames == 1000 and stats.batches == len(batches) and stats.steps_per_second > 0
    if shared:
        assert 15 < stats.mean_return < 35 and stats.mean_return == stats.mean_length and stats.episodes > 20
    else:
        rows = rows_by_trajectory(batches)
        ended = {int(i) for b in batches for i in b[IDS][b["next", "done"].squeeze(-1)]}
        lengths = [len(steps) for number, steps in rows.items() if number in ended]
        assert stats.episodes >= len(lengths)  # an asynchronous one knows of batches that were not handed out
        if cls is MultiSyncDataCollector:
            assert stats.episodes == len(lengths) and stats.mean_length == pytest.approx(
                np.mean(lengths[-100:]), rel=0.2
            )


# ---- failures and endings ----
@pytest.mark.parametrize("cls", BOTH)
def test_an_exception_in_an_environment_comes_with_its_traceback_within_a_second(cls):
    before = workers_of()
    collector = cls([cartpole, lambda: Fails(25, raises)], frames_per_batch=40)
    with pytest.raises(
        WorkerError, match=r"worker 1 of Multi\w+ failed(.|\n)*in raises(.|\n)*simulator broke"
    ) as caught:
        for _ in collector:
            began = time.monotonic()
    assert isinstance(caught.value.__cause__, ArithmeticError) and time.monotonic() - began < allowed(2)
    assert workers_of() <= before and collector.is_shut_down
    with pytest.raises(RuntimeError, match="was shut down"):
        collector.rollout()


def test_an_exception_in_a_policy_comes_with_its_traceback():
    def policy(td):
        raise ArithmeticError("no action today")

    with pytest.raises(WorkerError, match="no action today"):
        MultiSyncDataCollector([cartpole] * 2, policy, frames_per_batch=40).rollout()


def test_an_exception_while_environments_are_made_comes_at_once_and_leaves_no_process():
    before = workers_of()
    with pytest.raises(WorkerError, match="simulator broke"):
        MultiSyncDataCollector([cartpole, raises], frames_per_batch=40)
    assert workers_of() <= before


@pytest.mark.parametrize("cls", BOTH)
def test_a_killed_worker_is_noticed_within_a_second(cls):
    before = workers_of()
    with cls([cartpole, lambda: Fails(30, lambda: time.sleep(1000))], frames_per_batch=40) as collector:
        pid = sorted(workers_of() - before)[1]
        killer = threading.Timer(0.5, os.kill, [pid, signal.SIGKILL])
        killer.start()
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            for _ in collector:
                pass
        assert workers_of() <= before


def test_an_exception_of_the_consumer_leaves_no_process():
    before = workers_of()
    with pytest.raises(KeyError), MultiaSyncDataCollector([cartpole] * 2, frames_per_batch=40) as collector:
        for _ in collector:
            raise KeyError
    assert workers_of() <= before


def test_a_collector_that_nobody_holds_ends_its_workers():
    before = workers_of()
    collector = MultiaSyncDataCollector([cartpole] * 2, frames_per_batch=40)
    collector.rollout()
    assert len(workers_of() - before) == 2
    del collector
    gc.collect()
    assert workers_of() <= before


@pytest.mark.long  # it waits for five seconds; of a worker test_workers.py sees that it is ended after fewer
def test_shutting_down_ends_a_worker_that_is_stuck_in_a_step():
    before = workers_of()
    collector = MultiaSyncDataCollector([lambda: Fails(50, lambda: time.sleep(1000))], frames_per_batch=40)
    collector.rollout()
    time.sleep(0.2)
    began = time.monotonic()
    collector.shutdown()
    collector.shutdown()
    assert time.monotonic() - began < allowed(8) and workers_of() <= before


SCRIPT = """
    import os, time
    from engram.collectors import MultiaSyncDataCollector
    from engram.envs import GymEnv

    if __name__ == "__main__":
        collector = MultiaSyncDataCollector(lambda: GymEnv("CartPole-v1"), num_workers=2, frames_per_batch=100)
        try:
            for k, batch in enumerate(collector):
                if k == 3:
                    print("going", flush=True)
                {then}
        except KeyboardInterrupt:
            collector.shutdown()
            print("caught", flush=True)
"""


def begun(script, then):
    process = script(SCRIPT, then=then)
    assert process.stdout.readline() == "going\n"
    return process, workers_of(process.pid)


@pytest.mark.parametrize("then", in_ci(["pass", "time.sleep(0.2)"], ["pass"]))
def test_ctrl_c_ends_everything_within_a_second(script, then):
    process, pids = begun(script, then)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of them get it
    assert process.stdout.readline() == "caught\n" and time.monotonic() - began < allowed(2)
    assert len(pids) == 2 and all(is_gone(pid) for pid in pids)
    process.communicate(timeout=NEVER)


def test_workers_end_when_the_collecting_process_is_killed(script):
    process, pids = begun(script, "pass")
    assert len(pids) == 2 and not any(has_named_memory(pid) for pid in (process.pid, *pids))
    process.kill()
    process.communicate()
    assert all(is_gone(pid) for pid in pids)  # and with them the memory, which has no name
