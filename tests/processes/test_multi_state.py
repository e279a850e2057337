"""States of collectors with worker processes."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from contracts.gym_worlds import Countdown
from contracts.tiers import in_turns
from contracts.waiting import NEVER
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector, worker
from engram.envs import GymEnv, SerialEnv

BOTH = [MultiSyncDataCollector, MultiaSyncDataCollector]
VERSION = ("collector", "policy_version")


def cartpole():
    return GymEnv("CartPole-v1")


class Weighted(nn.Module):
    """Always the same action, and the weight beside it."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def forward(self, observation):
        shape = observation.shape[:-1]
        action = nn.functional.one_hot(torch.zeros(shape, dtype=torch.int64), 2)
        return action, (torch.zeros(shape) + self.weight).unsqueeze(-1)


def weighted(value=0.0):
    return TensorDictModule(Weighted(value), in_keys=["observation"], out_keys=["action", "weight"])


def made(cls, policy=None, make=cartpole, **settings):
    policy = weighted() if policy is None else policy
    return cls([make] * 2, policy, frames_per_batch=20, track_policy_version=True, **settings)


def told(batch):
    """The weights and the versions of a batch."""
    return batch["weight"].unique().tolist(), batch[VERSION].unique().tolist()


# ---- weights and versions ----
@pytest.mark.parametrize("cls", [SyncDataCollector, *BOTH])
def test_a_state_has_the_weights_of_an_update_that_no_batch_has_seen(cls):
    make = cartpole if cls is SyncDataCollector else [cartpole] * 2
    policy = weighted()
    with cls(make, policy, frames_per_batch=20) as collector:
        collector.rollout()
        policy.module.weight.data += 0.5
        collector.update_policy_weights_()
        state = collector.state_dict()
    for one in state.get("workers", [state]):
        assert one["policy_state_dict"]["module.weight"] == 0.5 and one["policy_version"] == 1


@pytest.mark.parametrize("cls", BOTH)
def test_loaded_weights_stand_and_their_version_goes_on(cls):
    with made(cls) as first:
        for weight in (0.25, 0.5, 0.75):
            first.update_policy_weights_({"module.weight": torch.tensor(weight)})
        state = first.state_dict()
    policy = weighted()
    with made(cls, policy) as second:
        second.rollout()
        for _ in range(2):  # the last of them is of the state's version and not seen by a worker
            second.update_policy_weights_({"module.weight": torch.tensor(9.0)})
        second.rollout()
        second.update_policy_weights_({"module.weight": torch.tensor(8.0)})
        second.load_state_dict(state)
        assert second.policy_version == 3 and policy.module.weight == 0.75
        assert told(second.rollout()) == ([0.75], [3])
        policy.module.weight.data += 0.25
        second.update_policy_weights_()
        assert second.policy_version == 4
        for _ in range(6):  # an asynchronous one has batches of before
            batch = second.rollout()
        assert told(batch) == ([1.0], [4])


@pytest.mark.parametrize("cls", BOTH)
def test_updates_at_each_batch_do_not_undo_a_load(cls):
    with made(cls, weighted(0.5)) as first, made(cls, update_at_each_batch=True) as second:
        second.rollout()
        second.load_state_dict(first.state_dict())
        assert told(second.rollout()) == ([0.5], [1])


@pytest.mark.quick
def test_workers_with_different_weights_in_a_state_get_the_newest():
    with made(MultiSyncDataCollector) as collector:
        state = collector.state_dict()
        newest = {"module.weight": torch.tensor(0.5, dtype=torch.float64)}
        state["workers"][1] = {**state["workers"][1], "policy_version": 2, "policy_state_dict": newest}
        collector.load_state_dict(state)
        assert collector.policy_version == 2 and told(collector.rollout()) == ([0.5], [2])


@pytest.mark.parametrize("cls", BOTH)
def test_threads_that_ask_at_once_have_the_answers_to_their_own_questions(cls):
    with made(cls) as collector:
        state = collector.state_dict()
        questions = [
            lambda: collector.state_dict().keys() == state.keys(),
            lambda: collector.set_seed(3) > 3,
            lambda: collector.reset() is None,
        ]
        with ThreadPoolExecutor(len(questions)) as threads:
            asked = [threads.submit(question) for _ in range(60) for question in questions]
            assert all(answer.result(NEVER) for answer in asked)
        assert collector.rollout() is not None


# ---- states that do not fit ----
def of_worker(k, **change):
    def changed(state):
        state["workers"][k] = {**state["workers"][k], **change}
        return state

    return changed


def without_weights(state):
    return {**state, "workers": [{k: v for k, v in w.items() if k != "policy_state_dict"} for w in state["workers"]]}


OTHERS = {
    "no weights": (without_weights, "worker 0: .*not this collector's"),
    "shape": (of_worker(1, policy_state_dict={"module.weight": torch.zeros(3)}), r"worker 1: .*not this collector's"),
    "no tensor": (of_worker(1, policy_state_dict={"module.weight": "heavy"}), r"worker 1: .*'module.weight'"),
    "counter": (of_worker(1, stepped=None), r"worker 1: .*'stepped' of 0 or more, got None"),
    "episodes": (of_worker(1, episodes={}), "worker 1: .*episodes in a collector's state"),
    "lists": (
        of_worker(1, episodes={"count": 1, "returns": 2.0, "lengths": 3}),
        "worker 1: .*episodes.returns in",
    ),
    "random numbers": (of_worker(1, env_random_state=[1, 2]), "worker 1: .*a random state is .* a dict"),
    "too many": (of_worker(1, env_random_state=[1, 2, 3]), "worker 1: .*SerialEnv of 2 takes a list"),
    "no part": (lambda state: {**state, "workers": [state["workers"][0], None]}, "worker 1: .*is a dict, got NoneType"),
    "one worker": (lambda state: {**state, "workers": state["workers"][:1]}, "of 1 workers, and this collector has 2"),
    "frames": (lambda state: {**state, "frames": -1}, "'frames' of 0 or more, got -1"),
    "all episodes": (lambda state: {**state, "episodes": {"count": 1}}, "episodes in a collector's state"),
    "nothing": (lambda state: {}, "'workers'"),
    "no state": (lambda state: None, "is a dict, got NoneType"),
}


@pytest.mark.parametrize(("case", "cls"), in_turns(OTHERS, BOTH))
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(cls, case):
    change, message = OTHERS[case]
    with made(cls, make=lambda: SerialEnv(2, cartpole)) as collector:
        if cls is MultiSyncDataCollector:  # the other one's workers go on meanwhile
            collector.rollout()
        collector.update_policy_weights_({"module.weight": torch.tensor(0.5)})
        collector.set_seed(5)
        other = collector.state_dict()
        collector.set_seed(9)  # other random numbers than in what worker 0 could load
        before = collector.state_dict()
        with pytest.raises(ValueError, match=f"(?s){message}"):
            collector.load_state_dict(change(other))
        assert str(collector.state_dict()) == str(before)
        assert collector.policy_version == 1 and told(collector.rollout()) == ([0.5], [1])


@pytest.mark.quick
def test_no_batch_is_lost_by_a_state_that_is_refused():
    with made(MultiaSyncDataCollector) as collector:
        state = of_worker(1, env_random_state=7)(collector.state_dict())
        rows = {}
        for _ in range(8):
            batch = collector.rollout()
            with pytest.raises(ValueError, match=r"worker 1: a random state is .* a dict"):
                collector.load_state_dict(state)
            for step in batch:
                rows.setdefault(int(step["collector", "traj_ids"]), []).append(step)
    for steps in rows.values():
        assert all((a["next", "observation"] == b["observation"]).all() for a, b in itertools.pairwise(steps))


def test_a_state_of_a_collector_without_workers_is_refused():
    state = SyncDataCollector(cartpole, weighted(), frames_per_batch=20).state_dict()
    with made(MultiSyncDataCollector) as collector:
        with pytest.raises(ValueError, match=r"(?s)has 'workers'.*found.*'stepped'"):
            collector.load_state_dict(state)
        assert len(collector.rollout()) == 2


def test_a_large_state_and_a_large_batch_that_meet_do_not_wait_for_each_other(monkeypatch):
    def sent_whole(writer, batch):  # as batches are whose agents differ
        return worker.SharedBatchRef(tuple(batch.shape), 0, None, batch)

    def act(observation):
        time.sleep(1e-5)
        return torch.tensor([1, 0, 0])

    monkeypatch.setattr(worker.SharedBatchWriter, "put", sent_whole)
    policy = nn.Linear(1000, 1000)
    policy.forward = act
    policy = TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])
    with MultiaSyncDataCollector([lambda: GymEnv(Countdown((1000,)))], policy, frames_per_batch=10_000) as collector:
        state = collector.state_dict()
        for part in state["workers"]:
            part.pop("env_random_state", None)  # which some environments do not have
        collector.rollout()
        assert any(member.pending for member in collector._members)
        loading = threading.Thread(target=collector.load_state_dict, args=(state,), daemon=True)
        loading.start()
        loading.join(60)
        assert not loading.is_alive()
