"""`EnvContract`: the tests that every environment must pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from engram.envs import check_env_specs, step_mdp

FLAGS = ("done", "terminated", "truncated")


class EnvContract:
    """The tests of an environment with the TensorDict interface. Inherit, and implement `make`.

    Example:
        >>> class TestCartPole(EnvContract):
        ...     def make(self):
        ...         return GymEnv("CartPole-v1")
    """

    def make(self) -> Any:
        """A new environment; it is closed after each test."""
        raise NotImplementedError

    @pytest.fixture
    def env(self) -> Any:
        env = self.make()
        yield env
        env.close()

    def test_every_value_is_what_its_spec_says(self, env: Any) -> None:
        check_env_specs(env, seed=0)

    def test_a_reset_gives_the_observations_and_flags_that_are_false(self, env: Any) -> None:
        td = env.reset()
        assert set(td.keys()) == {*env.observation_spec.keys(), *FLAGS}
        assert td.batch_size == env.batch_size
        for flag in FLAGS:
            assert td[flag].dtype is torch.bool and td[flag].shape == (*env.batch_size, 1) and not td[flag].any()

    def test_a_step_puts_what_follows_under_next(self, env: Any) -> None:
        td = env.rand_step(env.reset())
        assert set(td["next"].keys()) == {*env.observation_spec.keys(), *FLAGS, "reward"}
        assert td["next", "reward"].dtype is torch.float32 and td["next", "reward"].shape == (*env.batch_size, 1)
        assert (td["next", "done"] == (td["next", "terminated"] | td["next", "truncated"])).all()

    def test_a_rollout_has_time_as_its_last_dimension(self, env: Any) -> None:
        batch = env.rollout(4, break_when_any_done=False)
        assert batch.batch_size == (*env.batch_size, 4)

    def test_a_rollout_goes_on_where_the_last_step_ended(self, env: Any) -> None:
        batch = env.rollout(30, break_when_any_done=False)
        before, after = batch[..., 1:], batch[..., :-1]
        goes_on = ~after["next", "done"].squeeze(-1)
        for key in env.observation_spec.leaves().keys() - {"_idle"}:  # rollouts have no rows that are marked so
            old = after["next"].get(key)[goes_on]
            assert torch.equal(before.get(key)[goes_on], old)

    def test_the_structure_of_a_step_is_that_of_the_fake_one(self, env: Any) -> None:
        step, fake = env.rand_step(env.reset()), env.fake_tensordict()
        keys = set(fake.keys(True, True))
        assert set(step.keys(True, True)) == keys
        assert all(step.get(k).shape == fake.get(k).shape and step.get(k).dtype == fake.get(k).dtype for k in keys)

    def test_equal_seeds_give_equal_episodes(self, env: Any) -> None:
        env.set_seed(3)
        torch.manual_seed(0)
        first = env.rollout(10)
        env.set_seed(3)
        torch.manual_seed(0)
        assert bool((env.rollout(10) == first).all())

    def test_set_seed_returns_the_first_seed_that_is_free(self, env: Any) -> None:
        assert env.set_seed(5) == 5 + env.batch_size.numel()

    def test_later_steps_do_not_change_earlier_ones(self, env: Any) -> None:
        td = env.rand_step(env.reset())
        kept = td.clone()
        env.rand_step(env.maybe_reset(step_mdp(td)))
        assert bool((td == kept).all())

    def test_outputs_are_on_no_device_unless_one_was_asked_for(self, env: Any) -> None:
        assert env.reset().device is None
        env.to("cpu")
        td = env.rand_step(env.reset())
        assert td.device == torch.device("cpu") and td["next"].device == torch.device("cpu")

    def test_a_step_without_an_action_says_so(self, env: Any) -> None:
        td = env.reset()
        with pytest.raises(KeyError, match="needs an 'action'"):
            env.step(td)

    def test_an_action_of_another_shape_is_refused(self, env: Any) -> None:
        td = env.reset()
        wrong = torch.zeros(*env.batch_size, 17)
        with pytest.raises(ValueError, match=r"action.* is not what the environment takes"):
            env.step(TensorDict({**td, "action": wrong}, batch_size=env.batch_size))

    def test_a_closed_environment_refuses_steps_and_opens_again_at_a_reset(self, env: Any) -> None:
        td = env.rand_action(env.reset())
        env.close()
        env.close()
        with pytest.raises(RuntimeError, match="was closed"):
            env.step(td)
        assert env.rand_step(env.reset()).batch_size == env.batch_size
