"""ParallelEnv gives what SerialEnv gives."""

from __future__ import annotations

import os
from copy import deepcopy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from contracts.each import each
from contracts.gym_worlds import SPACES, Countdown, Echo
from contracts.tiers import in_ci, in_turns
from engram.collectors import SyncDataCollector
from engram.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv, step_mdp
from engram.specs import Categorical, Composite, Unbounded
from engram.testing import EnvContract


class Plain(GymEnv):
    """A GymEnv that a child class may have changed: it has no raw steps."""


class Walk(EnvBase):
    """Reads more than its action; its steps have entries that no spec names."""

    def __init__(self, extra=True, end=3):
        super().__init__(Composite(place=Unbounded((2,)), inner=Composite(n=Unbounded((1,)))), Categorical(3))
        self.extra, self.end, self.first = extra, end, 0

    def _reset(self, mask):
        self.first += 1
        return TensorDict({"place": torch.full((2,), float(self.first)), ("inner", "n"): torch.zeros(1)})

    def _step(self, td):
        pull = td.get("pull", torch.zeros(2, dtype=torch.float64))
        n = td["inner", "n"] + 1
        values = {"place": td["place"] + td["action"] + pull.float(), ("inner", "n"): n}
        following = TensorDict({**values, "reward": n, "terminated": n >= self.end})
        return following.set("note", n.double()) if self.extra else following

    def _set_seed(self, seed):
        self.first = seed


class TestParallelEnv(EnvContract):
    def make(self):
        return ParallelEnv(3, lambda: GymEnv("CartPole-v1"), num_workers=2)


class TestParallelEnvWithNestedSpaces(EnvContract):
    def make(self):
        return ParallelEnv(2, lambda: GymEnv(Echo(SPACES["dict"], SPACES["box"])), num_workers=2)


class TestParallelEnvThroughTensorDicts(EnvContract):
    def make(self):
        return ParallelEnv(3, lambda: Plain("CartPole-v1"), num_workers=2)


class TestParallelEnvOfSerialEnvs(EnvContract):
    def make(self):
        return ParallelEnv(2, lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")), num_workers=2)


@pytest.mark.long
class TestSpawnedParallelEnv(EnvContract):
    def make(self):
        return ParallelEnv(2, lambda: GymEnv("CartPole-v1"), num_workers=1, start_method="spawn")


@pytest.mark.long
class TestSpawnedParallelEnvThroughTensorDicts(EnvContract):
    def make(self):
        return ParallelEnv(2, lambda: Plain("CartPole-v1"), num_workers=1, start_method="spawn")


@pytest.fixture
def parallel():
    envs = []

    def make(n, make_env, **kwargs):
        envs.append(ParallelEnv(n, make_env, **{"num_workers": min(n, 2), **kwargs}))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


def same(a, b):
    assert set(a.keys(True, True)) == set(b.keys(True, True)) and a.batch_size == b.batch_size
    for key in a.keys(True, True):
        x, y = a.get(key), b.get(key)
        assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y), key


def played(env, seed=5):
    """Episodes with resets of some, of all, by hand and by rollout."""
    env.set_seed(seed)
    torch.manual_seed(seed)
    batches = [env.rollout(12, break_when_any_done=False), env.rollout(12), env.rollout(3)]
    td = env.reset()
    for k in range(6):
        td = step_mdp(env.rand_step(td))
        mask = td["done"].clone()
        mask[k % len(mask)] = True
        td = env.reset(td.set("_reset", mask)).exclude("_reset")
        batches.append(td.clone())
    env.set_seed(seed + 1)
    return [*batches, env.rollout(4, break_when_any_done=False)]


def compare(parallel, n, make_env, **kwargs):
    for mine, theirs in zip(played(parallel(n, make_env, **kwargs)), played(SerialEnv(n, make_env)), strict=True):
        same(mine, theirs)


@pytest.mark.quick
@pytest.mark.parametrize("cls", [GymEnv, Plain])
def test_episodes_are_those_of_a_serial_env(parallel, cls):
    compare(parallel, 3, [lambda k=k: cls(Countdown(lengths=(3, 1, 4 + k), reuse_array=k == 1)) for k in range(3)])
    compare(parallel, 3, lambda: cls("CartPole-v1"))


@pytest.mark.parametrize(("cls", "categorical"), in_turns([GymEnv, Plain], [False, True]))
def test_all_spaces_are_those_of_a_serial_env(parallel, cls, categorical):
    everything = spaces.Dict({name.replace(" ", "_"): space for name, space in SPACES.items()})
    actions = spaces.Dict({"all": everything, "pair": spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3, start=1)])})
    compare(parallel, 2, lambda: cls(Echo(*deepcopy((everything, actions))), categorical_action_encoding=categorical))


@pytest.mark.parametrize("space", in_ci(["scalar box", "discrete from 5", "multidiscrete grid", "tuple"], ["tuple"]))
def test_a_space_alone_is_that_of_a_serial_env(parallel, space):
    compare(parallel, 2, lambda: GymEnv(Echo(*deepcopy((SPACES[space],) * 2))))


@pytest.mark.parametrize("extra", [False, True])
def test_environments_of_any_kind_are_those_of_a_serial_env(parallel, extra):
    compare(parallel, 3, lambda: Walk(extra))


@pytest.mark.long  # of forked ones nothing is sent; a collector's are spawned in CI
def test_lambdas_are_sent_to_a_spawned_worker_and_give_the_same(parallel):
    length = 4
    compare(parallel, 2, lambda: GymEnv(Countdown(lengths=(length, 2))), start_method="spawn", num_workers=1)


def test_environments_with_different_action_spaces_of_equal_specs_go_through_tensordicts(parallel):
    makers = [lambda k=k: GymEnv(Echo(deepcopy(SPACES["box"]), spaces.Discrete(3, start=k))) for k in (0, 5)]
    env = parallel(2, makers)
    assert env.vector_engine() is None
    for mine, theirs in zip(played(env), played(SerialEnv(2, makers)), strict=True):
        same(mine, theirs)


@pytest.mark.quick
def test_a_collectors_batches_are_those_of_a_serial_env(parallel):
    batches = []
    for env in (parallel(3, lambda: GymEnv("CartPole-v1")), SerialEnv(3, lambda: GymEnv("CartPole-v1"))):
        env.set_seed(0)
        torch.manual_seed(0)
        with SyncDataCollector(env, frames_per_batch=60, total_frames=180, max_frames_per_traj=11) as collector:
            batches.append([batch.clone() for batch in collector])
    for mine, theirs in zip(*batches, strict=True):
        same(mine, theirs)


def test_what_a_policy_adds_reaches_the_environments(parallel):
    def policy(td):
        td.set("pull", torch.full((*td.batch_size, 2), 0.5, dtype=torch.float64))
        return td.set("action", torch.ones(td.batch_size, dtype=torch.int64))

    batches = []
    for env in (parallel(3, lambda: Walk(False)), SerialEnv(3, lambda: Walk(False))):
        env.set_seed(0)
        batches.append(env.rollout(7, policy, break_when_any_done=False))
    same(*batches)
    assert (batches[0]["next", "place"] != batches[0]["place"] + 1).all()


def test_an_action_of_another_dtype_reaches_the_environments_as_it_is(parallel):
    env = parallel(2, lambda: Walk(False))
    td = env.reset().set("action", torch.full((2,), 0.25))
    assert (env.step(td)["next", "place"] == td["place"] + 0.25).all()


def test_entries_that_only_some_environments_give_are_named(parallel):
    env = parallel(2, [lambda: Walk(True), lambda: Walk(False)])
    with pytest.raises(ValueError, match=r"environment 0 returned \['note'\], and not all others"):
        env.rand_step(env.reset())


def test_specs_that_differ_are_refused_like_those_of_a_serial_env(parallel):
    with pytest.raises(ValueError, match="environment 1 has another observation_spec"):
        parallel(2, [lambda: GymEnv("CartPole-v1"), lambda: GymEnv(Countdown())])


def test_actions_are_not_replaced_while_workers_may_read_those_of_a_step_that_was_interrupted(parallel, monkeypatch):
    engine = parallel(2, lambda: GymEnv(Countdown())).vector_engine()
    engine.reset()
    engine.step(np.zeros(2, np.int64))
    before = [column.copy() for _, column in engine._action_columns]

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(engine._pool, "wait_idle", interrupted)
        engine.step(np.ones(2, np.int64))
    for kept, (_, column) in zip(before, engine._action_columns, strict=True):
        assert np.array_equal(kept, column)


def test_a_reset_that_a_step_has_made_is_not_made_again(parallel):
    engine = parallel(2, [lambda: GymEnv(Countdown((1, 5, 7))), lambda: GymEnv(Countdown((3, 9)))]).vector_engine()
    engine.seed(0)
    assert engine.reset()[:, 0].tolist() == [1, 3]
    shown, reward, terminated, truncated, last, idle = engine.step(np.array([1, 2]))
    assert shown[:, 0].tolist() == [5, 2] and reward.tolist() == [10, 22]
    assert terminated.tolist() == [True, False] and not truncated.any() and idle is None
    assert [(i, raw.tolist()) for i, raw in last] == [(0, [0, 1])]
    assert engine.reset(np.array([True, False]))[:, 0].tolist() == [5, 2]
    assert engine.reset()[:, 0].tolist() == [7, 9]


def test_an_engine_refuses_masks_and_actions_of_another_form(parallel):
    engine = parallel(2, lambda: GymEnv(Countdown())).vector_engine()
    with pytest.raises(ValueError, match=r"a mask must be bool \[2\], got bool \[3\]"):
        engine.reset(np.ones(3, np.bool_))
    engine.reset()
    with pytest.raises(ValueError, match=r"actions must have shape \[2\], got \[3\]"):
        engine.step(np.zeros(3, np.int64))
    with pytest.raises(TypeError, match="same_kind"):
        engine.step(np.full(2, 0.5))


def test_an_environment_may_keep_its_action(parallel):
    class Keeps(gymnasium.Env):
        observation_space = action_space = spaces.Box(-1, 1, (2,), np.float32)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.before = np.zeros(2, np.float32)
            return self.before, {}

        def step(self, action):
            before, self.before = self.before, action
            return before, 0.0, False, False, {}

    compare(parallel, 2, lambda: GymEnv(Keeps()))


def test_outputs_move_to_a_device_and_specs_too(parallel):
    env = parallel(2, lambda: Plain("CartPole-v1"), device="cpu")
    assert env.to("cpu") is env and env.device == torch.device("cpu") == env.action_spec.device
    td = env.rand_step(env.reset())
    assert td.device == td["next"].device == torch.device("cpu")


def test_it_says_what_it_is(parallel):
    env = parallel(3, lambda: Walk(False), num_workers=2)
    assert repr(env) == "ParallelEnv(3 x Walk(batch_size=(), device=None), num_workers=2)"
    assert not env.is_closed
    env.close()
    assert env.is_closed


@pytest.mark.quick
@each(
    "settings, message",
    [
        ({"n": 0}, "n must be an integer of 1 or more, got 0"),
        ({"make_env": [Walk]}, r"ParallelEnv\(2, ...\) got 1 callables"),
        ({"num_workers": 3}, "num_workers must be between 1 and the number of environments, 2, got 3"),
        ({"num_workers": 0}, "num_workers must be an integer of 1 or more"),
        ({"cpus": [4096]}, "cpus must be cores that this process may use"),
        ({"cpus": []}, "cpus must be cores that this process may use"),
        ({"start_method": "clone"}, "start method must be one of"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ParallelEnv(**{"n": 2, "make_env": Walk, **settings})


def test_workers_run_on_the_cores_that_were_named(parallel):
    core = min(os.sched_getaffinity(0))
    env = parallel(2, lambda: GymEnv(Countdown()), cpus=[core])
    assert [os.sched_getaffinity(pid) for pid in env.pids] == [{core}] * 2


@pytest.mark.parametrize("settings", [{"timeout": 60}, {"restarts": 1}])
def test_a_single_environment_with_a_timeout_or_restarts_has_a_worker(settings):
    env = ParallelEnv(1, lambda: GymEnv("CartPole-v1"), serial_for_single=True, **settings)
    try:
        assert isinstance(env, ParallelEnv) and len(env.pids) == 1
    finally:
        env.close()
