"""The Evaluator: what it returns, whose weights it uses, and what it does while it is busy."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from contracts.each import each
from contracts.gym_worlds import Countdown
from contracts.waiting import allowed
from engram.collectors import Evaluator
from engram.envs import GymEnv, SerialEnv
from engram.errors import WorkerError

LENGTHS = (3, 1, 4)


def countdown():
    return GymEnv(Countdown(LENGTHS))


class Always(nn.Module):
    """Always the same action, which is its weight."""

    def __init__(self, action=1):
        super().__init__()
        self.action = nn.Parameter(torch.tensor(float(action)), requires_grad=False)

    def forward(self, observation):
        return one_hot(self.action.long().expand(observation.shape[:-1]), 3)


def actions(batch):
    taken = batch["action"][batch["collector", "mask"]].argmax(-1)
    return {"actions": taken.unique().tolist()}


def fails_for_action_2(batch):
    if 2 in actions(batch)["actions"]:
        raise ZeroDivisionError("action 2")
    return actions(batch)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_an_evaluation_has_whole_trajectories_from_their_beginnings(backend):
    with Evaluator(countdown, Always(), num_trajectories=3, backend=backend, metrics_fn=actions) as evaluator:
        for step in (5, 6):
            result = evaluator.evaluate(step=step)
            rollout = countdown().rollout(8, Always(), break_when_any_done=False)
            assert result["eval/reward"] == pytest.approx(float(rollout["next", "reward"].sum()) / 3)
            assert result["eval/episode_length"] == pytest.approx(8 / 3) and result["eval/num_episodes"] == 3
            assert result["eval/step"] == step and result["eval/actions"] == [1]
            assert result["eval/reward_std"] > 0 and result["eval/fps"] > 0


def test_several_environments_and_a_limit_of_steps():
    env = SerialEnv(2, countdown)
    evaluator = Evaluator(env, num_trajectories=4, max_steps=2, log_prefix="test")
    for _ in range(2):
        assert evaluator.evaluate()["test/episode_length"] <= 2
    evaluator.shutdown()
    assert not env.is_closed


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_each_evaluation_has_the_weights_of_its_call(backend):
    policy = Always(0)
    with Evaluator(countdown, policy, num_trajectories=1, backend=backend, metrics_fn=actions) as evaluator:
        for action in (0, 2):
            policy.action.fill_(action)
            assert evaluator.evaluate()["eval/actions"] == [action]
        for weights in (Always(1), Always(1).state_dict(), Evaluator.extract_weights(Always(1))):
            assert evaluator.evaluate(weights)["eval/actions"] == [1]
        assert evaluator.evaluate(weights_dict={"policy": Always(1)})["eval/actions"] == [1]
        assert int(policy.action) == 2
        with pytest.raises(ValueError, match="none of \\['critic'\\]"):
            evaluator.evaluate(weights_dict={"critic": Always(1)})


class ActsByMode(Always):
    """Action 1 in train mode, 2 in eval mode."""

    def forward(self, observation):
        return one_hot(self.action.long().expand(observation.shape[:-1]) + (not self.training), 3)


@each("backend", ["thread", "process"])
@each("of_factory", [False, True])
@each("training", [False, True])
def test_policies_act_in_eval_mode_and_the_callers_stays_in_its_own(backend, of_factory, training):
    policy = ActsByMode().train(training)
    given = {"policy_factory": lambda: policy} if of_factory else {"policy": policy}
    with Evaluator(countdown, **given, num_trajectories=1, backend=backend, metrics_fn=actions) as evaluator:
        assert evaluator.evaluate()["eval/actions"] == [2]
        assert evaluator.evaluate(ActsByMode(0))["eval/actions"] == [1]
    assert policy.training is training and float(policy.action) == 1


def test_a_factory_may_take_the_environment():
    for factory in (lambda: Always(2), lambda env: Always(len(env.batch_size) + 2)):
        with Evaluator(countdown, policy_factory=factory, num_trajectories=1, metrics_fn=actions) as evaluator:
            assert evaluator.evaluate()["eval/actions"] == [2]
    with pytest.raises(TypeError, match="cannot be used with policy"):
        Evaluator(countdown, Always(), policy_factory=Always)


class Held:
    """A function of metrics that waits to be let go."""

    def __init__(self):
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, batch):
        self.begun.set()
        assert self.go.wait(allowed(60))
        return {}


@each("busy", ["skip", "queue", "error"])
def test_while_it_is_busy(busy):
    held, results = Held(), []
    evaluator = Evaluator(
        countdown, Always(), num_trajectories=1, metrics_fn=held, busy_policy=busy, on_result=results.append
    )
    assert evaluator.poll() is None and evaluator.wait() is None and not evaluator.pending
    assert evaluator.trigger_eval(step=1) and evaluator.pending and evaluator.poll() is None
    if busy == "error":
        with pytest.raises(RuntimeError, match="still running"):
            evaluator.trigger_eval(step=2)
    else:
        assert evaluator.trigger_eval(step=2) is (busy == "queue")
    held.go.set()
    steps = [evaluator.wait()["eval/step"] for _ in range(2 if busy == "queue" else 1)]
    assert steps == [1, 2][: len(steps)] and evaluator.wait() is None
    evaluator.shutdown()
    evaluator.shutdown()
    assert [int(one["eval/step"]) for one in results] == steps
    with pytest.raises(RuntimeError, match="was shut down"):
        evaluator.trigger_eval()


def test_evaluations_that_come_too_early_are_skipped():
    with Evaluator(countdown, Always(), num_trajectories=1, every=100, busy_policy="queue") as evaluator:
        steps = range(0, 300, 40)
        assert [step for step in steps if evaluator.trigger_eval(step=step)] == [0, 120, 240]
        state = evaluator.state_dict()
        assert state == {"evaluations": 3, "last_step": 240}
        other = Evaluator(countdown, every=100)
        other.load_state_dict(state)
        assert not other.trigger_eval(step=300)


def test_an_error_is_raised_where_the_result_would_be_returned():
    def fails(batch):
        raise ZeroDivisionError

    for backend, error in (("thread", ZeroDivisionError), ("process", WorkerError)):
        with Evaluator(countdown, num_trajectories=1, metrics_fn=fails, backend=backend) as evaluator:
            assert evaluator.trigger_eval()
            with pytest.raises(error):
                evaluator.wait()


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_evaluations_go_on_after_one_that_failed(backend):
    with Evaluator(
        countdown, Always(), num_trajectories=1, metrics_fn=fails_for_action_2, backend=backend
    ) as evaluator:
        with pytest.raises((ZeroDivisionError, WorkerError), match="action 2") as failed:
            evaluator.evaluate(Always(2))
        assert isinstance(failed.value if backend == "thread" else failed.value.__cause__, ZeroDivisionError)
        assert evaluator.evaluate(Always(1))["eval/actions"] == [1]


def test_a_shutdown_drops_evaluations_that_have_not_begun():
    held = Held()
    evaluator = Evaluator(countdown, Always(), num_trajectories=1, metrics_fn=held, busy_policy="queue")
    assert all(evaluator.trigger_eval(step=step) for step in range(3))
    assert held.begun.wait(allowed(60))
    evaluator.shutdown(timeout=0)
    held.go.set()
    assert evaluator.wait()["eval/step"] == 0 and evaluator.wait() is None


@each("arguments", [{"num_trajectories": 0}, {"busy_policy": "wait"}, {"backend": "ray"}])
def test_settings_that_cannot_work_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Evaluator(countdown, **arguments)
