"""`TransformContract`: the behaviour of a transform in an environment and in a buffer."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer, ReplayBufferEnsemble
from engram.envs import EnvBase, TransformedEnv, check_env_specs
from engram.envs.transforms import Compose, Transform
from engram.specs import Categorical, Composite, Unbounded
from engram.testing.helpers import assert_equal, of_numbers

FLAGS = ("done", "terminated", "truncated")
_NO_OBSERVATIONS = {*FLAGS, "next", "action", "collector"}


class Replayed(EnvBase):
    """Environments that return the root entries of `data` `[envs, time]` step by step, and its rewards.

    Episodes of environment i have `lengths[i]` steps, and the next one starts with the next row.
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

    def _observation(self) -> TensorDictBase:
        return self._root[torch.arange(len(self._at)), self._at].clone()

    def _reset(self, mask: Tensor | None) -> TensorDictBase:
        is_reset = torch.ones_like(self._left, dtype=torch.bool) if mask is None else mask.squeeze(-1)
        self._at = self._at + is_reset
        self._left = torch.where(is_reset, self._lengths, self._left)
        return self._observation()

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        reward = self._rewards[torch.arange(len(self._at)), self._at]
        self._at, self._left = self._at + 1, self._left - 1
        return self._observation().update({"reward": reward, "terminated": (self._left == 0).unsqueeze(-1)})

    def _set_seed(self, seed: int) -> None:
        self._at = torch.full((len(self._root),), -1)
        self._left = self._lengths.clone()


class TransformInEnvContract:
    """The tests of a transform in environments: a part of `TransformContract`."""

    #: Whether it works in environments.
    environments = True
    #: Whether its results depend on other episodes, or other environments.
    learns = False

    def make(self) -> Any:
        raise NotImplementedError

    def batch(self, *shape: int) -> TensorDict:
        raise NotImplementedError

    def make_for_env(self) -> Any:
        """A new transform with keys that an environment has; `make()` by default, as a leading `"next"` is dropped."""
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
        rollout = self._env().rollout(20, break_when_any_done=False)
        expected = TransformedEnv(self._base(), self.make_for_env()).transform.forward(bare.clone())
        for key in expected.keys(True, True):
            old = bare.get(key, None)
            is_same = old is not None and old.dtype == expected[key].dtype and torch.equal(old, expected[key])
            if not is_same:
                assert_equal(rollout[key], expected[key])

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
            expected_step, expected = alone.step_and_maybe_reset(expected.set("action", action))
            assert_equal(step, expected_step)
        if hasattr(transform, "state_dict"):
            assert_equal(transform.state_dict(), self.make_for_env().state_dict())

    @pytest.mark.usefixtures("in_env")
    def test_steps_leave_those_before_them_alone(self) -> None:
        env = self._env()
        td, steps = env.reset(), []
        for _ in range(9):
            step, td = env.step_and_maybe_reset(env.rand_action(td))
            steps.append((step, step.clone()))
        for step, copied in steps:
            assert_equal(step, copied)

    @pytest.mark.usefixtures("in_env")
    def test_what_the_caller_does_to_a_step_does_not_change_the_next(self) -> None:
        rough, gentle = self._env(), self._env()
        td, expected = rough.reset(), gentle.reset()
        for t in range(9):
            action = torch.full((3,), t % 2)
            expected_step, expected = gentle.step_and_maybe_reset(expected.set("action", action))
            step, td = rough.step_and_maybe_reset(td.set("action", action))
            assert_equal(step["next"].exclude(*FLAGS), expected_step["next"].exclude(*FLAGS))
            td = td.clone()
            for key in rough.observation_spec.leaves():
                step.get(key).zero_()
                step["next"].get(key).zero_()

    def test_where_it_works_in_no_environment_it_says_what_to_use(self) -> None:
        if self.environments:
            pytest.skip("it works in environments")
        with pytest.raises(TypeError, match="buffer"):
            self._env()


def as_dict(batch: TensorDictBase) -> dict[str, Any]:
    return {k: as_dict(v) if isinstance(v, TensorDictBase) else v for k, v in batch.items()}


def leading(batch: TensorDictBase, shape: tuple[int, ...]) -> bool:
    return all(tuple(v.shape[: len(shape)]) == shape for v in batch.values(True, True))


class TransformContract(TransformInEnvContract):
    """The tests of a `Transform`, or of a callable that a buffer applies on reading. Inherit, and implement `make`.

    It is tested in buffers, and in environments that replay `batch`. Set `environments = False` if it is not for
    environments, and implement `make_for_env` if it has other keys there.

    Example:
        >>> def halved(batch):
        ...     batch["obs"] = batch["obs"] / 2
        ...     return batch
        >>> class TestHalved(TransformContract):
        ...     in_place = True
        ...     def make(self):
        ...         return halved
    """

    #: Whether it changes the batch that it is given, on writing too.
    in_place: bool = False
    #: Whether it takes dicts besides TensorDicts.
    dicts = True
    #: Whether it takes lists of items, which it gets from `rb[:]` with a ListStorage.
    lists = True

    def make(self) -> Any:
        """A new transform, the same each time."""
        raise NotImplementedError

    def batch(self, *shape: int) -> TensorDict:
        """Data of this shape for `extend`, the same each time; a trajectory ends with each last step."""
        data = of_numbers(torch.arange(math.prod(shape)).reshape(shape))
        data["next", "reward"] = data["next", "reward"].float()
        data["next", "done"] = torch.zeros(*shape, 1, dtype=torch.bool)
        data["next", "done"][..., -1:, :] = True
        return data

    def _made(self) -> Transform:
        return Compose(self.make()).transforms[0]

    def prepared(self) -> Transform:
        """A transform through which data were written."""
        transform = self._made()
        rb = ReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
        rb.extend(self.batch(6))
        return transform

    # ---- reading ----
    @pytest.mark.parametrize("shape", [(6,), (3, 4), (2, 3, 4)])
    def test_leading_dimensions_are_kept(self, shape: tuple[int, ...]) -> None:
        out = self.prepared().forward(self.batch(*shape))
        assert tuple(out.batch_size) == shape and leading(out, shape)

    @pytest.mark.parametrize("shape", [(6,), (3, 4)])
    def test_dicts_are_changed_as_tensordicts_are(self, shape: tuple[int, ...]) -> None:
        if not self.dicts:
            pytest.skip("it takes no dicts")
        transform = self.prepared()
        found = transform.forward(as_dict(self.batch(*shape)))
        assert type(found) is dict
        assert_equal(found, transform.forward(self.batch(*shape)))

    def test_reading_changes_nothing_that_the_transform_knows(self) -> None:
        transform = self.prepared()
        before = copy.deepcopy(transform.state_dict())
        first = transform.forward(self.batch(5))
        assert_equal(transform.forward(self.batch(5)), first)
        assert_equal(transform.state_dict(), before)

    @pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage])
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_reading_changes_nothing_that_is_stored(self, storage: Any, prefetch: int) -> None:
        rb = ReplayBuffer(storage=storage(50), transform=self.make(), batch_size=4, prefetch=prefetch)
        rb.extend(self.batch(8))
        before = [copy.deepcopy(rb.storage.get([i])) for i in range(len(rb))]
        for _ in range(3):
            rb.sample()
            rb[0]
            if self.lists or storage is not ListStorage:
                rb[:]
        for i, row in enumerate(before):
            found = rb.storage.get([i])
            assert_equal(found[0] if isinstance(found, list) else found, row[0] if isinstance(row, list) else row)

    # ---- writing ----
    @pytest.mark.parametrize("way", ["transform=", "append", "insert", "nested", "_transform", "a member's"])
    def test_a_buffer_stores_what_its_inverse_makes(self, way: str) -> None:
        transform = self.make()
        given_now = {"transform=": transform, "nested": Compose(Compose(transform)), "a member's": transform}.get(way)
        rb = ReplayBuffer(storage=LazyTensorStorage(50), transform=given_now)
        if way == "append":
            rb.append_transform(transform)
        elif way == "insert":
            rb.insert_transform(0, transform)
        elif way == "_transform":
            rb._transform = transform
        elif way == "a member's":
            rb = ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(9)), rb)[1]
        rb.extend(self.batch(6))
        assert_equal(rb.storage.get(slice(None)), self._made().inv(self.batch(6)))

    def test_writing_leaves_the_callers_batch_as_it_was(self) -> None:
        if self.in_place:
            pytest.skip("it changes what it is given")
        transform, given_batch, expected = self._made(), self.batch(6), self.batch(6)
        rb = ReplayBuffer(storage=LazyTensorStorage(50), transform=transform)
        rb.extend(given_batch)
        self._made().inv(given_batch)
        assert_equal(given_batch, expected)
        other = ReplayBuffer(storage=LazyTensorStorage(50))
        other.append_transform(self.prepared(), invert=True)
        other.extend(given_batch)
        assert_equal(given_batch, expected)

    @pytest.mark.parametrize("invert", [False, True])
    def test_a_refused_write_changes_neither_the_buffer_nor_the_transform(self, invert: bool) -> None:
        rb = ReplayBuffer(storage=LazyTensorStorage(50))
        transform = self.prepared()
        rb.append_transform(transform, invert=invert)
        rb.extend(self.batch(6))
        before, n = copy.deepcopy(transform.state_dict()), len(rb)
        bad = self.batch(6)
        bad["next", "reward"] = bad["next", "reward"].double()
        with pytest.raises(ValueError, match="reward"):
            rb.extend(bad)
        assert len(rb) == n
        assert_equal(transform.state_dict(), before)
        rb.extend(self.batch(6))

    # ---- state ----
    def test_a_saved_state_goes_on_the_same(self, tmp_path: Path) -> None:
        one, other = self.prepared(), self._made()
        other.load_state_dict(pickle.loads(pickle.dumps(one.state_dict())))
        assert_equal(other.state_dict(), one.state_dict())
        assert_equal(other.forward(self.batch(5)), one.forward(self.batch(5)))
        rb, twin = (ReplayBuffer(storage=LazyTensorStorage(50), transform=self.make()) for _ in range(2))
        rb.extend(self.batch(6))
        rb.dumps(tmp_path)
        twin.loads(tmp_path)
        for buffer in (rb, twin):
            buffer.extend(self.batch(6))
        assert_equal(twin._transform.state_dict(), rb._transform.state_dict())
        assert_equal(twin[:], rb[:])

    def test_it_can_be_sent_to_another_process(self) -> None:
        transform = self.prepared()
        sent = pickle.loads(pickle.dumps(transform))
        assert type(sent) is type(transform) and repr(sent) == repr(transform)
        assert_equal(sent.forward(self.batch(5)), transform.forward(self.batch(5)))

    def test_it_works_within_a_compose(self) -> None:
        transform = self.prepared()
        assert_equal(Compose(transform).forward(self.batch(5)), transform.forward(self.batch(5)))

    def test_it_says_what_it_is(self) -> None:
        made = self.make()
        name = getattr(made, "__name__", type(made).__name__)
        assert name in repr(self._made()) and repr(self._made()) in repr(Compose(made))
