"""What a transform must do in an environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.data.specs import Categorical, Composite, Unbounded
from engram.envs import EnvBase, TransformedEnv, check_env_specs
from engram.testing.comparing import assert_equal

FLAGS = ("done", "terminated", "truncated")
_NO_OBSERVATIONS = {*FLAGS, "next", "action", "collector"}


class Replayed(EnvBase):
    """Environments that show the root entries of `data` `[envs, time]` one after the other, and its rewards.

    Episodes of environment i are `lengths[i]` steps long, and the next one starts with the next row.
    """

    def __init__(self, data: TensorDictBase, lengths: Sequence[int]) -> None:
        root = data.exclude(*_NO_OBSERVATIONS)
        spec = Composite(shape=data.shape[:1])
        for key, value in root.items(True, True):
            spec[key] = Unbounded((len(data), *value.shape[2:]), dtype=value.dtype)
        super().__init__(spec, Categorical(2, data.shape[:1]), batch_size=data.shape[:1])
        self._root, self._rewards = root, data["next", "reward"].float()
        self._lengths = torch.as_tensor(lengths)
        self._at = torch.full((len(data),), -1)
        self._left = self._lengths.clone()

    def _shown(self) -> TensorDictBase:
        return self._root[torch.arange(len(self._at)), self._at].clone()

    def _reset(self, mask: Tensor | None) -> TensorDictBase:
        here = torch.ones_like(self._left, dtype=torch.bool) if mask is None else mask.squeeze(-1)
        self._at = self._at + here
        self._left = torch.where(here, self._lengths, self._left)
        return self._shown()

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        reward = self._rewards[torch.arange(len(self._at)), self._at]
        self._at, self._left = self._at + 1, self._left - 1
        return self._shown().update({"reward": reward, "terminated": (self._left == 0).unsqueeze(-1)})

    def _set_seed(self, seed: int) -> None:
        self._at = torch.full((len(self._root),), -1)
        self._left = self._lengths.clone()


class TransformInEnvContract:
    """Part of `TransformContract`."""

    #: Whether it works in environments.
    environments = True
    #: Whether what it makes of a value depends on other episodes, or other environments.
    learns = False

    def make(self) -> Any:
        raise NotImplementedError

    def batch(self, *shape: int) -> TensorDict:
        raise NotImplementedError

    def make_for_env(self) -> Any:
        """A fresh transform with keys that an environment has; `make()`, as a leading `"next"` does not count."""
        return self.make()

    @pytest.fixture
    def in_env(self) -> None:
        if not self.environments:
            pytest.skip("it does not work in environments")

    def _base(self, rows: slice = slice(None)) -> Replayed:
        return Replayed(self.batch(3, 60)[rows], [5, 3, 7][rows])

    def _env(self, rows: slice = slice(None), transform: Any = None) -> TransformedEnv:
        return TransformedEnv(self._base(rows), self.make_for_env() if transform is None else transform)

    @pytest.mark.usefixtures("in_env")
    def test_an_environment_with_it_gives_what_its_specs_say(self) -> None:
        env = self._env()
        check_env_specs(env, max_steps=12)
        env = self._env()
        reset, fake = env.reset(), env.fake_tensordict()
        assert set(reset.keys(True, True)) == {*env.observation_spec.leaves(), *FLAGS}
        step = env.rand_step(reset)
        assert set(step.keys(True, True)) == set(fake.keys(True, True))
        for key in fake.keys(True, True):
            assert step[key].shape == fake[key].shape and step[key].dtype == fake[key].dtype, key

    @pytest.mark.usefixtures("in_env")
    def test_a_rollout_with_it_is_what_reading_makes_of_the_bare_rollout(self) -> None:
        if self.learns:
            pytest.skip("it learns")
        torch.manual_seed(0)
        bare = self._base().rollout(20, break_when_any_done=False)
        torch.manual_seed(0)
        found = self._env().rollout(20, break_when_any_done=False)
        expected = TransformedEnv(self._base(), self.make_for_env()).transform.forward(bare.clone())
        for key in expected.keys(True, True):
            old = bare.get(key, None)
            is_same = old is not None and old.dtype == expected[key].dtype and torch.equal(old, expected[key])
            if not is_same:
                assert_equal(found[key], expected[key])

    @pytest.mark.usefixtures("in_env")
    def test_environments_that_end_at_different_times_mix_nothing_up(self) -> None:
        if self.learns:
            pytest.skip("it learns")
        together = self._env().rollout(20, break_when_any_done=False)
        for i in range(3):
            alone = self._env(slice(i, i + 1)).rollout(20, break_when_any_done=False)
            assert_equal(together[i : i + 1].exclude("action"), alone.exclude("action"))

    @pytest.mark.usefixtures("in_env")
    def test_one_object_in_two_environments_and_a_buffer_mixes_nothing_up(self) -> None:
        if self.learns:
            pytest.skip("it learns")
        transform, single = self.make_for_env(), slice(0, 1)
        one, other = self._env(single, transform), self._env(single, transform)
        alone = self._env(single)
        a, expected = one.reset(), alone.reset()
        for t in range(12):
            action = torch.tensor([t % 2])
            if t % 3 == 0:
                other.rollout(2, break_when_any_done=False)
            step, a = one.step_and_maybe_reset(a.set("action", action))
            wanted, expected = alone.step_and_maybe_reset(expected.set("action", action))
            assert_equal(step, wanted)
        if hasattr(transform, "state_dict"):
            assert_equal(transform.state_dict(), self.make_for_env().state_dict())

    @pytest.mark.usefixtures("in_env")
    def test_steps_leave_those_before_them_alone(self) -> None:
        env = self._env()
        td, kept = env.reset(), []
        for _ in range(9):
            step, td = env.step_and_maybe_reset(env.rand_action(td))
            kept.append((step, step.clone()))
        for step, copied in kept:
            assert_equal(step, copied)

    @pytest.mark.usefixtures("in_env")
    def test_what_the_caller_does_to_a_step_does_not_change_the_next(self) -> None:
        rough, gentle = self._env(), self._env()
        td, expected = rough.reset(), gentle.reset()
        for t in range(9):
            action = torch.full((3,), t % 2)
            wanted, expected = gentle.step_and_maybe_reset(expected.set("action", action))
            step, td = rough.step_and_maybe_reset(td.set("action", action))
            assert_equal(step["next"].exclude(*FLAGS), wanted["next"].exclude(*FLAGS))
            td = td.clone()
            for key in rough.observation_spec.leaves():
                step.get(key).zero_()
                step["next"].get(key).zero_()

    def test_where_it_works_in_no_environment_it_says_what_to_use(self) -> None:
        if self.environments:
            pytest.skip("it works in environments")
        with pytest.raises(TypeError, match="buffer"):
            self._env()
