"""Actions on their way to an environment: `ActionScaling` and `FrameSkipTransform`."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import EnvBase, GymEnv, SerialEnv, TransformedEnv, check_env_specs
from engram.specs import Bounded, Categorical, Composite, Unbounded
from engram.transforms import ActionScaling, Compose, FrameSkipTransform, RewardScaling, RewardSum, StepCounter


class Noting(EnvBase):
    """Rewards each step by its number within the episode, which has `length` steps, and notes its actions."""

    def __init__(self, length: int = 10, action=None) -> None:
        spec = Bounded(-2, 6, (1,)) if action is None else action
        super().__init__(Composite({"at": Unbounded((1,))}), spec)
        self.reward_spec = Bounded(-1, 1000, (1,))
        self.length, self.actions, self._at = length, [], 0

    def _reset(self, mask):
        self._at = 0
        return TensorDict({"at": torch.zeros(1)}, [])

    def _step(self, td):
        self.actions.append(td["action"].tolist())
        self._at += 1
        at = torch.full((1,), float(self._at))
        over = torch.full((1,), self._at >= self.length)
        return TensorDict({"at": at, "reward": at.clone(), "terminated": over}, [])

    def _set_seed(self, seed):
        pass


def of_one(env: TransformedEnv, action: float):
    return env.step(env.reset().set("action", torch.full((1,), action)))


# ---- frame skip ----
def test_an_action_is_repeated_and_the_rewards_added_up():
    base = Noting()
    step = of_one(TransformedEnv(base, FrameSkipTransform(3)), 1.0)
    assert base.actions == [[1.0]] * 3
    assert step["next", "reward"].item() == 1 + 2 + 3 and step["next", "at"].item() == 3


def test_an_episode_that_ends_is_not_stepped_further():
    base = Noting(length=4)
    env = TransformedEnv(base, FrameSkipTransform(3))
    rollout = env.rollout(10)
    assert len(base.actions) == 4
    assert rollout["next", "reward"].flatten().tolist() == [6, 4]
    assert rollout["next", "done"].flatten().tolist() == [False, True]


def test_transforms_before_see_every_step_and_those_after_see_one_of_each_action():
    env = TransformedEnv(Noting(), Compose(StepCounter(step_count_key="frames"), FrameSkipTransform(2), StepCounter()))
    following = env.rollout(4)["next"]
    assert following["frames"].flatten().tolist() == [2, 4, 6, 8]
    assert following["step_count"].flatten().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("last", [0, 1])
def test_actions_go_through_the_transforms_on_both_sides(last):
    base, parts = Noting(), [FrameSkipTransform(3)]
    parts.insert(last, ActionScaling())
    of_one(TransformedEnv(base, Compose(*parts)), 0.5)
    assert base.actions == [[4.0]] * 3  # the middle of -2 and 6 is 2, half of the range 4


def test_rewards_before_it_are_scaled_each():
    env = TransformedEnv(Noting(), Compose(RewardScaling(1.0, 1.0), FrameSkipTransform(3), RewardSum()))
    assert of_one(env, 0.0)["next", "episode_reward"].item() == 6 + 3


def test_the_bounds_of_rewards_are_those_of_sums():
    env = TransformedEnv(Noting(), FrameSkipTransform(4))
    assert (env.reward_spec.low.item(), env.reward_spec.high.item()) == (-4, 4000)
    check_env_specs(TransformedEnv(GymEnv("CartPole-v1"), FrameSkipTransform(4)))


def test_a_batch_of_environments_has_it_in_each():
    with pytest.raises(ValueError, match=r"SerialEnv\(n, lambda: TransformedEnv"):
        TransformedEnv(SerialEnv(2, Noting), FrameSkipTransform(2))
    env = SerialEnv(2, lambda: TransformedEnv(Noting(), FrameSkipTransform(2)))
    assert env.rollout(2)["next", "at"].flatten(1).tolist() == [[2, 4], [2, 4]]


@pytest.mark.parametrize("frame_skip", [0, -1, 2.5, True])
def test_a_frame_skip_that_is_no_positive_integer_is_refused(frame_skip):
    with pytest.raises(ValueError, match="frame_skip must be an integer of 1 or more"):
        FrameSkipTransform(frame_skip)


def test_a_batch_cannot_be_given_to_it():
    with pytest.raises(RuntimeError, match="put it into a TransformedEnv"):
        FrameSkipTransform(2)(TensorDict({}, [2]))


# ---- scaled actions ----
def test_an_environment_takes_actions_of_minus_one_to_one():
    base = Noting()
    env = TransformedEnv(base, ActionScaling())
    assert (env.action_spec.low.item(), env.action_spec.high.item()) == (-1, 1)
    check_env_specs(TransformedEnv(GymEnv("Pendulum-v1"), ActionScaling()))
    step = of_one(env, -1.0)
    assert base.actions == [[-2.0]] and step["action"].item() == -1


def test_actions_may_be_scaled_to_zero_to_one():
    base = Noting()
    env = TransformedEnv(base, ActionScaling(standard_normal=False))
    assert (env.action_spec.low.item(), env.action_spec.high.item()) == (0, 1)
    of_one(env, 0.25)
    assert base.actions == [[0.0]]
    assert env.transform.normalize(torch.tensor([0.0])).tolist() == [0.25]
    assert env.transform.denormalize(torch.tensor([0.25])).tolist() == [0.0]


def test_the_object_of_an_environment_scales_in_a_buffer_too():
    scaling = ActionScaling()
    env = TransformedEnv(Noting(), scaling)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), transform=scaling, batch_size=2)
    rollout = env.rollout(3)
    rb.extend(rollout)
    assert torch.allclose(rb[:]["action"], rollout["action"])
    assert torch.allclose(rb.storage.get(slice(None))["action"], rollout["action"] * 4 + 2)


def test_another_environment_needs_an_object_of_its_own():
    scaling = ActionScaling()
    TransformedEnv(Noting(), scaling)
    TransformedEnv(Noting(), scaling)
    with pytest.raises(ValueError, match="from another environment"):
        TransformedEnv(GymEnv("Pendulum-v1"), scaling)


NO_RANGE = [Categorical(3), Unbounded((1,)), Bounded(-1, float("inf"), (1,)), Bounded(1, 1, (1,))]


@each("action", NO_RANGE)
def test_actions_without_bounds_or_range_are_refused(action):
    with pytest.raises(ValueError, match="ActionScaling needs"):
        TransformedEnv(Noting(action=action), ActionScaling())


def test_given_values_scale_actions_without_bounds():
    base = Noting(action=Unbounded((1,)))
    of_one(TransformedEnv(base, ActionScaling(loc=1.0, scale=3.0)), 2.0)
    assert base.actions == [[7.0]]


def test_statistics_give_loc_and_scale():
    assert ActionScaling.from_stats(mean=torch.tensor([1.0]), std=torch.tensor([0.0])).scale.tolist() == [
        pytest.approx(1e-6)
    ]
    scaling = ActionScaling.from_stats(low=-1.0, high=3.0, in_keys_inv=["move"])
    assert (float(scaling.loc), float(scaling.scale), scaling.in_keys) == (1, 2, ["move"])
    for wrong in ({}, {"mean": 1.0}, {"mean": 1.0, "high": 2.0}, {"mean": 1.0, "std": 1.0, "low": 0.0, "high": 1.0}):
        with pytest.raises(ValueError, match="give mean and std, or low and high"):
            ActionScaling.from_stats(**wrong)
    with pytest.raises(RuntimeError, match="no loc and scale yet"):
        ActionScaling()({"action": torch.ones(1)})
