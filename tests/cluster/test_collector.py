"""RayCollector on a cluster: what it writes and counts, with which weights, and when collectors are killed."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from cluster.conftest import LONG, Nodes
from cluster.environments import Constant, EndsFirstLives, hanging_env, make_env
from cluster.rows import batches_of_producers
from engram.data import LazyTensorStorage, ReplayBuffer, SliceSampler
from engram.distributed import RayCollector, RayReplayBuffer
from engram.distributed import collector as distributed_collector
from engram.envs import GymEnv
from engram.envs.transforms import MultiStepTransform
from engram.errors import ShardUnavailableError, StorageInUseError, WorkerError

# Kills of collectors, frames in all, and kills of nodes with a shard and collectors.
KILLS, FRAMES, NODES = map(int, os.environ.get("ENGRAM_RAY_COLLECTOR_KILLS", "5,12000,0").split(","))
IDS = ("collector", "traj_ids")
VERSION = ("collector", "policy_version")
NODE = {"num_cpus": 0, "resources": {"shard": 1}}


def collector(**settings: Any) -> RayCollector:
    settings = {"frames_per_batch": 50, "num_collectors": 2, "remote_configs": NODE, **settings}
    return RayCollector(settings.pop("create_env_fn", make_env), settings.pop("policy", Constant()), **settings)


@pytest.fixture(scope="module")
def shards(cluster: Nodes) -> Iterator[RayReplayBuffer]:
    """Two shards for the tests that need no others: each process that is started takes seconds."""
    rb = RayReplayBuffer(
        storage=LazyTensorStorage(100_000), num_shards=2, batch_size=64, timeout=20.0,
        remote_config={"resources": {"shard": 1}},
    )  # fmt: skip
    yield rb
    rb.shutdown()


@pytest.fixture
def shared(shards: RayReplayBuffer) -> Iterator[RayReplayBuffer]:
    """A new client of empty shards, whose producers are those of this test."""
    _empty(shards)
    client = pickle.loads(pickle.dumps(shards))
    yield client
    client.close()


def _empty(shards: RayReplayBuffer) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            return shards.empty()
        except StorageInUseError:  # a collector that was killed is just ending
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


@pytest.fixture(scope="module")
def synchronous(cluster: Nodes) -> Iterator[tuple[RayCollector, Constant]]:
    """Collectors whose batches come here, and their policy."""
    policy = Constant()
    with collector(policy=policy, sync=True, total_frames=200) as collecting:
        yield collecting, policy


def check_every_step_once(rb: Any, n_steps: bool = False) -> int:
    """Fails unless each environment's steps are in once, in order, without gaps; returns how many there are.

    Args:
        n_steps: what follows a step is not the next one.
    """
    seen: set[tuple[float, float]] = set()
    rows = 0
    for lane in batches_of_producers(rb):
        observation, after = lane["observation"], lane["next", "observation"]
        assert n_steps or bool((after[:, 2] == observation[:, 2] + 1).all())
        starts = [0, *(1 + (observation[1:, :2] != observation[:-1, :2]).any(1).nonzero()[:, 0]).tolist(), len(lane)]
        for start, stop in itertools.pairwise(starts):
            env = (float(observation[start, 0]), float(observation[start, 1]))
            assert env not in seen  # an environment's steps are in one piece
            seen.add(env)
            assert observation[start:stop, 2].tolist() == list(range(stop - start))
        changes = (lane[IDS][1:] != lane[IDS][:-1]).tolist()
        ends = [bool(done) or k + 1 in starts for k, done in enumerate(lane["next", "done"][:-1, 0].tolist())]
        assert n_steps or changes == ends
        rows += len(lane)
    return rows


@pytest.mark.parametrize(("sync", "workers"), [(True, 1), (False, 1), (False, 2)])
def test_collectors_write_every_step_once_and_count_it(shared, sync: bool, workers: int) -> None:
    rb = shared
    with collector(replay_buffer=rb, sync=sync, num_workers_per_collector=workers, total_frames=600) as collecting:
        assert [batch for batch in collecting if batch is not None] == []
    assert collecting.frames == check_every_step_once(rb) == rb.write_count >= 600
    assert collecting.stats.episodes == sum(int(lane["next", "done"].sum()) for lane in batches_of_producers(rb))


def test_batches_come_here_without_a_replay_buffer_and_can_be_written_to(synchronous) -> None:
    batches = list(synchronous[0])
    assert [batch.shape for batch in batches] == [(2, 25)] * 4
    ids = torch.stack(batches)[IDS] >> 32
    assert len(ids[:, 0].unique()) == len(ids[:, 1].unique()) == 1 and len(ids.unique()) == 2
    for leaf in batches[-1].values(True, True):
        leaf.zero_()


def test_frames_have_the_version_of_the_weights_that_acted(synchronous) -> None:
    collecting, policy = synchronous
    for version in range(3):
        batch = collecting.rollout()
        assert set(batch[VERSION].unique().tolist()) == {version} and bool((batch["action"] == version).all())
        policy.weight.data += 1
        collecting.update_policy_weights_()
    assert collecting.policy_version == 3


def test_workers_have_the_version_of_the_weights_too(shared) -> None:
    rb = shared
    with collector(replay_buffer=rb, num_collectors=1, num_workers_per_collector=2, sync=True) as collecting:
        for version in range(3):
            collecting.rollout()
            collecting.update_policy_weights_({"weight": torch.full((1,), version + 1.0)})
    for lane in batches_of_producers(rb):
        assert lane[VERSION].unique().tolist() == [0, 1, 2]
        assert bool((lane["action"][:, 0] == lane[VERSION]).all())


def test_it_collects_in_the_background(shared) -> None:
    rb = shared
    collecting = collector(replay_buffer=rb, total_frames=400)
    collecting.start()
    while collecting.is_running():
        time.sleep(0.01)
    collecting.async_shutdown()
    assert collecting.frames == check_every_step_once(rb) >= 400


def test_collectors_report_several_batches_together(shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_collector, "_REPORTS", 2)  # as if there were hundreds of them
    reports = []
    note = RayCollector._note
    monkeypatch.setattr(RayCollector, "_note", lambda *of: (reports.append(of[2]), note(*of)))
    rb = shared
    with collector(replay_buffer=rb, total_frames=4000) as collecting:
        batches = len(list(collecting))
    assert collecting.frames == check_every_step_once(rb) == rb.write_count >= 4000
    assert len(reports) < batches and sum(report.batches for report in reports) == collecting.frames // 50
    assert collecting.stats.episodes == sum(int(lane["next", "done"].sum()) for lane in batches_of_producers(rb))


def pendulum() -> Any:
    return GymEnv("Pendulum-v1")


def test_seeds_decide_where_episodes_begin(cluster) -> None:
    with collector(policy=None, sync=True, create_env_fn=pendulum, reset_at_each_iter=True) as collecting:

        def first_observations(seed: int) -> torch.Tensor:
            assert collecting.set_seed(seed) == seed + 2
            return collecting.rollout()["observation"][:, 0]

        first = first_observations(5)
        assert not torch.equal(first, first_observations(7)) and torch.equal(first, first_observations(5))


def test_an_error_of_an_environment_is_raised_with_its_traceback(shared) -> None:
    rb = shared
    collecting = collector(replay_buffer=rb, create_env_kwargs={"fails_at": 120})
    with pytest.raises(WorkerError, match="the simulator broke"):
        for _ in range(20):
            collecting.rollout()
    with pytest.raises(RuntimeError, match="shut down"):
        collecting.rollout()


def test_a_collector_that_cannot_begin_says_why(cluster) -> None:
    with pytest.raises(WorkerError, match="no such simulator"):
        collector(create_env_fn=_broken, num_collectors=1)


def _broken() -> Any:
    raise OSError("no such simulator")


def _exits() -> Any:
    os._exit(1)


def test_a_collector_that_dies_at_each_beginning_is_an_error(cluster) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(WorkerError, match="before its first batch"):
            collector(create_env_fn=_exits, num_collectors=1)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch"),
        ({"num_workers_per_collector": 0}, ValueError, "num_workers_per_collector"),
        ({"batch_timeout": 0.0}, ValueError, "batch_timeout"),
        ({"remote_configs": [{}]}, ValueError, "remote_configs"),
        ({"update_after_each_batch": True, "policy": None}, ValueError, "update_after_each_batch"),
        ({"replay_buffer": ReplayBuffer(storage=LazyTensorStorage(10))}, TypeError, "RayReplayBuffer"),
        ({"nonsense": 1}, TypeError, "nonsense"),
    ],
)
def test_settings_that_are_not_allowed_are_refused(cluster, settings, error, words) -> None:
    with pytest.raises(error, match=words):
        collector(**settings)


def test_rows_that_a_collector_wrote_and_did_not_report_are_counted(buffer) -> None:
    rb = buffer(lanes=4, kind=EndsFirstLives)
    collecting = collector(replay_buffer=rb, num_collectors=1, total_frames=150)
    with pytest.warns(RuntimeWarning, match="is made anew"), collecting:
        for _ in collecting:
            assert collecting.frames >= 100  # those of the first life too
    assert collecting.frames == check_every_step_once(rb) == rb.write_count == 150


def test_one_alone_fills_all_shards_and_its_rows_are_counted_when_it_dies(buffer) -> None:
    rb = buffer(240, num_shards=4, lanes=2, kind=EndsFirstLives)
    collecting = collector(replay_buffer=rb, num_collectors=1, total_frames=400)
    with pytest.warns(RuntimeWarning, match="is made anew"), collecting:
        for _ in collecting:
            pass
    assert collecting.frames == rb.write_count == 400
    capacity = rb.stats().capacity
    assert len(rb) == capacity and rb.end_producer("nobody") == 0
    steps = rb.sample(2000)["observation"]
    assert len({tuple(step) for step in steps.tolist()}) > 0.9 * capacity  # its newest ones, in all shards


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=LONG)])
def test_one_that_hangs_is_ended_and_made_anew(shared, tmp_path: Any, workers: int) -> None:
    rb = shared
    collecting = collector(
        replay_buffer=rb, total_frames=600, batch_timeout=2.0, num_workers_per_collector=workers,
        # In its first batch, which each is asked for: the other may make all the rest before this one begins a second.
        create_env_kwargs=[{"hangs_at": 40, "marker": str(tmp_path / "hung")}, {}],
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="a batch did not end within batch_timeout=2 seconds"), collecting:
        for _ in collecting:
            pass
    assert collecting.frames == check_every_step_once(rb) == rb.write_count >= 600


@LONG
def test_one_that_hangs_each_time_is_an_error(cluster) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(WorkerError, match=r"making its environments did not end within batch_timeout=0\.3"):
            collector(create_env_fn=hanging_env, num_collectors=1, batch_timeout=0.3)


@LONG
def test_one_whose_batch_came_while_nobody_looked_does_not_hang(cluster) -> None:
    with collector(batch_timeout=0.5, total_frames=400) as collecting, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in collecting:
            time.sleep(0.4)
            if collecting.batches == 2:
                time.sleep(1.0)


def test_steps_that_transforms_hold_back_are_written_at_its_end(buffer) -> None:
    rb = buffer(lanes=4, transform=MultiStepTransform(n_steps=3, gamma=0.5))
    with collector(replay_buffer=rb, num_workers_per_collector=2, num_collectors=1, sync=True) as collecting:
        collecting.rollout()
        assert collecting.frames == 46  # of each worker the last two wait
    assert collecting.frames == check_every_step_once(rb, n_steps=True) == 50


def test_its_state_goes_on_in_another_one(shared) -> None:
    rb, policy, other_policy = shared, Constant(), Constant()
    with collector(replay_buffer=rb, policy=policy, sync=True) as collecting:
        collecting.rollout()
        policy.weight.data += 3
        for _ in range(2):
            collecting.update_policy_weights_()
            collecting.rollout()
        state = collecting.state_dict()
        collecting.rollout()
        assert (state["frames"], state["batches"], state["policy_version"]) == (150, 3, 2)
    with collector(replay_buffer=rb, policy=other_policy, sync=True) as other:
        other.rollout()
        other.load_state_dict(state)
        assert (other.frames, other.batches, other.policy_version) == (150, 3, 2)
        assert other_policy.weight.item() == 3 and other.stats.episodes == state["episodes"]["count"]
        other.rollout()
        assert other.frames == 200
    lanes = batches_of_producers(rb)
    newest = torch.cat([lane["action"][lane[VERSION] == 2] for lane in lanes])
    assert len(newest) == 150 and bool((newest == 3).all())
    ids = [trajectory for lane in lanes for trajectory in lane[IDS].unique_consecutive().tolist()]
    assert len(ids) == len(set(ids))  # none goes on in another lane, or after another one


def test_a_state_of_another_one_changes_nothing(synchronous) -> None:
    collecting, _ = synchronous
    collecting.rollout()
    state, frames = collecting.state_dict(), collecting.frames
    for wrong, words in (
        ({**state, "collectors": []}, "0 collectors, this has 2"),
        ({**state, "weights": {"weight": torch.zeros(2)}}, "not those of the policy"),
        ({"frames": 3}, "lacks"),
    ):
        with pytest.raises(ValueError, match=words):
            collecting.load_state_dict(wrong)
    collecting.rollout()
    assert collecting.frames == frames + 50


@pytest.mark.parametrize("workers", [1, 2])
def test_collectors_that_are_killed_come_back_and_no_row_is_twice_or_missing(
    cluster: Nodes, buffer, workers: int
) -> None:
    """One of the two collectors writes beside its shard, the other one through Ray."""
    rb = buffer(
        8 * (FRAMES + 100_000), num_shards=1, lanes=8, timeout=5.0, sampler=SliceSampler(slice_len=4, traj_key=IDS)
    )  # no lane is ever full
    collecting = collector(replay_buffer=rb, frames_per_batch=100, num_workers_per_collector=workers)
    rng, killed, failures = random.Random(0), [], []
    doomed: list[str] = []  # nodes for the main thread to kill: only there Ray can start another one
    plan = ["collector"] * KILLS + ["node"] * (NODES if workers == 1 else 0)
    rng.shuffle(plan)

    def kill() -> None:
        try:
            while len(killed) < len(plan) and not collecting.is_shut_down:
                time.sleep(0.3 + 0.5 * rng.random())
                try:
                    node, pid = ray.get(rng.choice(collecting.remote_collectors).place.remote(), timeout=20)
                    if plan[len(killed)] == "node":
                        doomed.append(node)
                        while doomed and not collecting.is_shut_down:
                            time.sleep(0.1)
                    else:
                        os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                except (ray.exceptions.RayError, ProcessLookupError, TimeoutError):
                    continue  # it has just died
        except BaseException as error:
            failures.append(error)

    killer = threading.Thread(target=kill, daemon=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def lives() -> int:
            return sum("is made anew" in str(one.message) for one in caught)

        with collecting:
            killer.start()
            while collecting.frames < FRAMES or killer.is_alive() or lives() < len(killed):
                if doomed:
                    cluster.kill(doomed[0])
                    doomed.clear()
                collecting.rollout()
                if collecting.frames >= FRAMES:
                    time.sleep(0.1)
                try:
                    batch = rb.sample()
                except ShardUnavailableError:  # its node was killed
                    continue
                slices = batch["observation"].reshape(-1, 4, 3)
                assert bool((slices[..., :2].diff(dim=1) == 0).all() and (slices[..., 2].diff(dim=1) == 1).all())
    killer.join()
    assert not failures and len(killed) == len(plan)
    assert lives() >= len(plan) if "node" in plan else lives() == KILLS  # there may have been two on a node
    assert not any("came back without" in str(one.message) for one in caught)
    assert collecting.frames == check_every_step_once(rb) == rb.write_count
