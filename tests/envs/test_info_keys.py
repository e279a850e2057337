"""Entries of gymnasium's `info` come as observations on request."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from contracts.each import each
from contracts.vector_worlds import Native, Nested
from engram.collectors import SyncDataCollector
from engram.envs import GymEnv, SerialEnv, check_env_specs, step_mdp
from engram.envs.engines import InfoReader
from engram.specs import Unbounded
from engram.testing import EnvContract

KEYS = ["until", "place", ("deep", "t")]


class TestSingleWithInfo(EnvContract):
    def make(self):
        return GymEnv(Nested(), info_keys=KEYS)


class TestSyncWithInfo(EnvContract):
    def make(self):
        return GymEnv("engram/Nested-v0", num_envs=2, info_keys=KEYS)


def assert_true(batch):
    """What Nested says in `info` is what its observation shows; resets only say `until`."""
    following = batch["next"]
    until = following["left"][..., 1]
    assert torch.equal(following["until"], until.long())
    assert torch.equal(following["place"], following["left"] * 2)
    assert torch.equal(following["deep", "t"], (until - following["left"][..., 0]).double())
    assert torch.equal(batch["until"], batch["left"][..., 1].long())
    is_first = batch["left"][..., 0] == batch["left"][..., 1]
    assert is_first.any() and not batch["place"][is_first].any() and not batch["deep", "t"][is_first].any()
    assert torch.equal(batch["place"][~is_first], batch["left"][~is_first] * 2)


def test_a_single_environment_gives_its_entries_with_their_own_shapes_and_dtypes():
    env = GymEnv(Nested(), info_keys=KEYS)
    env.set_seed(0)
    batch = env.rollout(30, break_when_any_done=False)
    assert batch["until"].shape == (30,) and batch["until"].dtype is torch.int64
    assert batch["place"].shape == (30, 2) and batch["deep", "t"].dtype is torch.float64
    assert_true(batch)


@each("kind", ["sync", "async"])
@each("mode", AutoresetMode)
def test_several_environments_give_each_their_own(kind, mode):
    options = {"vectorization_mode": kind, "vector_kwargs": {"autoreset_mode": mode}}
    env = GymEnv("engram/Nested-v0", num_envs=3, info_keys=KEYS, **options)
    env.set_seed(0)
    batch = env.rollout(30, break_when_any_done=False)
    env.close()
    assert_true(batch)


@pytest.mark.parametrize("make", [lambda: GymEnv(Nested(), info_keys=KEYS)])
@pytest.mark.parametrize("n", [1, 2])
def test_collectors_carry_them(make, n):
    env = make() if n == 1 else SerialEnv(n, make)
    env.set_seed(0)
    with SyncDataCollector(env, frames_per_batch=60, total_frames=120) as collector:
        for batch in collector:
            assert_true(batch)


def test_a_mapping_gives_specs_and_entries_that_never_come_are_zero():
    specs = {"until": Unbounded((1,), dtype=torch.float32), "never": Unbounded((2, 2))}
    env = GymEnv(Nested(), info_keys=specs)
    check_env_specs(env, seed=0, max_steps=9)
    batch = env.rollout(3)
    assert batch["until"].dtype is torch.float32 and batch["until"].shape == (*batch.shape, 1)
    assert not batch["next", "never"].any() and batch["next", "never"].shape == (*batch.shape, 2, 2)


def test_without_keys_raw_observations_are_the_environments_own():
    env = GymEnv(Nested())
    [engine] = env.engines()
    assert set(engine.reset()) == {"left", "inner"}


@each(
    ("keys", "error", "message"),
    [
        (["unknown"], KeyError, "no 'unknown' after a reset and a step.*'deep', 'place', 'until'"),
        (["deep"], TypeError, "no tensor form"),
        (["left"], KeyError, "no 'left'"),
        ({"left": Unbounded((2,))}, ValueError, "'left' is an observation already"),
        ({"reward": Unbounded((1,))}, ValueError, "'reward'"),
        ("until", TypeError, "a list of keys"),
    ],
)
def test_keys_that_cannot_be_are_refused(keys, error, message):
    with pytest.raises(error, match=message):
        GymEnv(Nested(), info_keys=keys)


def test_a_value_that_does_not_fit_its_spec_names_the_key():
    env = GymEnv(Nested(), info_keys={"place": Unbounded((3,))})
    env.set_seed(0)
    with pytest.raises(ValueError, match=r"info\['place'\] is"):
        env.rand_step(env.reset())


def test_final_entries_of_an_environment_written_for_many_are_zero_where_it_has_none():
    env = GymEnv(Native(2, AutoresetMode.SAME_STEP, lengths=(1,)), info_keys={"x": Unbounded((1,))})
    assert not env.rollout(3, break_when_any_done=False)["next", "x"].any()


def test_a_first_observation_that_waits_is_whole_when_another_environment_is_cut():
    options = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP}}
    env = GymEnv("engram/Nested-v0", num_envs=2, info_keys=["until"], **options)
    env.set_seed(1)
    td = env.reset()
    while int((done := td["done"]).sum()) != 1:
        td = step_mdp(env.step(env.rand_action(env.maybe_reset(td))))
    begun = env.reset(td.set("_reset", torch.ones_like(done)))
    assert (begun["until"] > 0).all() and torch.equal(begun["until"], begun["left"][:, 1].long())


def test_what_the_mask_of_an_entry_leaves_out_is_zero():
    reader = InfoReader({"x": Unbounded((), dtype=torch.int64)})
    [column] = reader.read_batch({"x": np.array([5, 6]), "_x": np.array([True, False])}, 2)
    assert column.tolist() == [5, 0]
