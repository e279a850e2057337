"""First actions, lives, hidden states and numbers: what begins with an episode, in all kinds of environments."""

from __future__ import annotations

import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.collectors import SyncDataCollector
from engram.data import Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from engram.envs import GymEnv, ParallelEnv, SerialEnv, TransformedEnv, check_env_specs
from engram.envs.transforms import (
    CatTensors,
    Compose,
    EndOfLifeTransform,
    NoopResetEnv,
    ObservationNorm,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    TrajCounter,
    Transform,
)
from engram.testing.transform import assert_equal


class Lives(gym.Env):
    """Observes how many steps it took; every second one costs one of three lives, and the last of them the episode."""

    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    class Emulator:
        count = 3

        def lives(self):
            return self.count

    def __init__(self, length=6):
        self.ale, self.length = self.Emulator(), length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ale.count, self.steps = 3, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        self.ale.count -= self.steps % 2 == 0
        return np.full(1, self.steps, np.float32), 1.0, self.steps == self.length, False, {}


def lives(length=6):
    return GymEnv(Lives(length))


# ---- first actions ----
def test_episodes_begin_after_so_many_actions():
    env = TransformedEnv(lives(), Compose(StepCounter(), NoopResetEnv(4, random=False)))
    for _ in range(2):
        td = env.reset()
        assert td["observation"].item() == td["step_count"].item() == 4
        assert not td["done"].any() and "reward" not in td.keys() and "next" not in td.keys()
    env = TransformedEnv(lives(), Compose(NoopResetEnv(4, random=False), StepCounter()))
    assert env.rollout(5, break_when_any_done=False)["observation"].flatten().tolist() == [4, 5, 4, 5, 4]
    assert env.reset()["step_count"].item() == 0


def test_a_random_number_of_actions_is_below_the_largest():
    torch.manual_seed(0)
    env = TransformedEnv(lives(), NoopResetEnv(4))
    assert {int(env.reset()["observation"]) for _ in range(60)} == {0, 1, 2, 3}


def test_episodes_that_are_too_short_for_the_actions_are_an_error():
    env = TransformedEnv(lives(3), NoopResetEnv(3, random=False))
    with pytest.raises(RuntimeError, match="done 10 times before noops=3"):
        env.reset()
    for bad in (-1, 2.5, True):
        with pytest.raises(ValueError, match="noops must be an integer of 0 or more"):
            NoopResetEnv(bad)


def test_several_environments_take_their_first_actions_each():
    env = SerialEnv(2, lambda: TransformedEnv(lives(), NoopResetEnv(3, random=False)))
    rollout = env.rollout(7, break_when_any_done=False)
    assert rollout["observation"].squeeze(-1).tolist() == [[3, 4, 5, 3, 4, 5, 3]] * 2
    with pytest.raises(ValueError, match=r"a batch \[2\]"):
        TransformedEnv(SerialEnv(2, lives), NoopResetEnv(3))


# ---- lives ----
@each("how", ["alone", "around several", "in each"])
def test_steps_that_cost_a_life_are_marked(how):
    def marked():
        return TransformedEnv(lives(), EndOfLifeTransform())

    env = {
        "alone": marked,
        "around several": lambda: TransformedEnv(SerialEnv(2, lives), EndOfLifeTransform()),
        "in each": lambda: SerialEnv(2, marked),
    }[how]()
    check_env_specs(env)
    rollout = env.rollout(8, break_when_any_done=False)
    row = rollout if how == "alone" else rollout[1]
    assert row["lives"].tolist() == [3, 3, 2, 2, 1, 1, 3, 3]
    assert row["next", "lives"].tolist() == [3, 2, 2, 1, 1, 0, 3, 2]
    assert row["next", "end-of-life"].flatten().tolist() == [False, True] * 4
    assert row["next", "done"].flatten().tolist() == [False] * 5 + [True] + [False] * 2
    assert not row["end-of-life"][[0, 1, 3, 5, 6, 7]].any()


def test_environments_without_lives_are_refused_by_name():
    vector = GymEnv(gym.vector.SyncVectorEnv([Lives, Lives]))
    for env, why in ((GymEnv("CartPole-v1"), "no attribute 'ale'"), (vector, "gymnasium's vector environments")):
        with pytest.raises(TypeError, match=rf"EndOfLifeTransform counts lives by unwrapped\.ale\.lives.*{why}"):
            TransformedEnv(env, EndOfLifeTransform())
    TransformedEnv(lives(), EndOfLifeTransform(eol_attribute="unwrapped.ale.lives"))
    with pytest.raises(TypeError, match="nothing"):
        TransformedEnv(lives(), EndOfLifeTransform(eol_attribute="unwrapped.nothing"))


# ---- hidden states ----
def counting(td):
    """A policy that writes its next hidden state."""
    td["action"] = torch.zeros(*td.batch_size, 2, dtype=torch.int64)
    td["action"][..., 0] = 1
    td["next"] = TensorDict({"hidden": td["hidden"] + 1}, td.batch_size)
    return td


def primed():
    return TransformedEnv(lives(), TensorDictPrimer(hidden=Unbounded((2,)), default_value=5.0))


ENVIRONMENTS = {
    "alone": primed,
    "around several": lambda: TransformedEnv(
        SerialEnv(2, lives), TensorDictPrimer(hidden=Unbounded((2,)), default_value=5.0)
    ),
    "below another": lambda: TransformedEnv(SerialEnv(2, primed), RewardSum()),
    "in workers": lambda: ParallelEnv(2, primed),
}


@each("how", ENVIRONMENTS)
def test_what_the_policy_writes_is_carried_on_and_begins_anew_with_each_episode(how):
    env = ENVIRONMENTS[how]()
    try:
        for rollout in (
            env.rollout(8, counting, break_when_any_done=False),
            SyncDataCollector(env, counting, frames_per_batch=8 * env.batch_size.numel()).rollout(),
        ):
            rows = rollout.reshape(-1, 8)
            for row in rows:
                assert row["hidden"][:, 0].tolist() == [5, 6, 7, 8, 9, 10, 5, 6]
                assert row["next", "hidden"][:, 1].tolist() == [6, 7, 8, 9, 10, 11, 6, 7]
        bare = env.rollout(7, break_when_any_done=False)  # a policy that knows nothing of it
        assert bool((bare["hidden"] == 5).all()) and bool((bare["next", "hidden"] == 5).all())
        assert env.observation_spec["hidden"].shape == (*env.batch_size, 2)
    finally:
        env.close()


def test_what_episodes_begin_with_is_given_drawn_or_computed():
    specs = Composite(h=Unbounded((2,)), deep=Composite(n=Unbounded((3,), dtype=torch.int64)))
    zero = TransformedEnv(lives(), TensorDictPrimer(specs)).reset()
    assert zero["h"].tolist() == [0, 0] and zero["deep", "n"].tolist() == [0, 0, 0]
    each = TensorDictPrimer(specs, default_value={"h": lambda: torch.tensor([1.0, 2.0]), ("deep", "n"): 7})
    td = TransformedEnv(SerialEnv(2, lives), each).reset()
    assert td["h"].tolist() == [[1, 2]] * 2 and td["deep", "n"].tolist() == [[7] * 3] * 2
    torch.manual_seed(0)
    assert len(TransformedEnv(lives(), TensorDictPrimer(specs, random=True)).reset()["h"].unique()) == 2
    one = TensorDictPrimer(
        specs, default_value=lambda reset: specs.one().update({"reset": reset}), single_default_value=True
    )
    assert TransformedEnv(lives(), one).reset()["deep", "n"].tolist() == [1, 1, 1]
    shaped = Composite(h=Unbounded((2, 3)), shape=(2,))
    for expand, expected in ((None, (2, 3)), (False, (2, 3)), (True, (2, 2, 3))):
        env = TransformedEnv(SerialEnv(2, lives), TensorDictPrimer(shaped, expand_specs=expand))
        assert env.reset()["h"].shape == expected


@each(
    ("settings", "why"),
    [
        ({}, "needs a spec"),
        ({"h": torch.zeros(2)}, "must be a spec"),
        ({"primers": {"h": Unbounded()}, "g": Unbounded()}, "both"),
        ({"h": Unbounded(), "random": True, "default_value": 1.0}, "not both"),
        ({"h": Unbounded(), "default_value": {"g": 1.0}}, "give one for each"),
        ({"h": Unbounded(), "reset_key": "mine"}, "reset_key"),
        ({"h": Unbounded(), "call_before_env_reset": True}, "call_before_env_reset"),
        ({"h": Unbounded(), "single_default_value": True}, "function"),
    ],
)
def test_bad_settings_of_a_primer_are_refused_at_once(settings, why):
    with pytest.raises(ValueError, match=why):
        TensorDictPrimer(**settings)


def test_values_that_are_not_what_the_spec_says_are_refused():
    env = TransformedEnv(lives(), TensorDictPrimer(h=Unbounded((2,)), default_value=lambda: torch.zeros(3)))
    with pytest.raises(ValueError, match=r"default_value of 'h' is torch.float32 \[3\]"):
        env.reset()
    with pytest.raises(ValueError, match="expand_specs=True adds"):
        TransformedEnv(SerialEnv(2, lives), TensorDictPrimer(h=Unbounded((3,)), expand_specs=False))


def test_a_primer_of_a_buffer_is_refused_data_that_are_no_tensordicts():
    with pytest.raises(TypeError, match="TensorDictPrimer takes TensorDicts, got a Tensor"):
        TensorDictPrimer(h=Unbounded((2,)))(torch.zeros(3))


# ---- numbers ----
def test_trajectories_are_numbered_in_the_order_in_which_they_begin():
    def numbered(*transforms):
        return TransformedEnv(SerialEnv(2, [lambda: lives(2), lambda: lives(3)]), Compose(*transforms, TrajCounter()))

    env = numbered()
    rollout = env.rollout(6, break_when_any_done=False)
    assert rollout["traj_count"].squeeze(-1).tolist() == [[0, 0, 2, 2, 4, 4], [1, 1, 1, 3, 3, 3]]
    assert_equal(rollout["next", "traj_count"], rollout["traj_count"])
    bare = SerialEnv(2, [lambda: lives(2), lambda: lives(3)]).rollout(6, break_when_any_done=False)
    assert_equal(TrajCounter()(bare)["traj_count"], rollout["traj_count"])
    other = numbered()
    other.load_state_dict(env.state_dict())
    assert env.reset()["traj_count"].flatten().tolist() == other.reset()["traj_count"].flatten().tolist() == [5, 6]


def test_numbers_go_on_from_one_write_to_the_next():
    rb = ReplayBuffer(storage=LazyTensorStorage(40))
    rb.append_transform(TrajCounter(), invert=True)
    bare = lives(3).rollout(8, break_when_any_done=False)
    for part in (bare[:4], bare[4:5], bare[5:]):
        rb.extend(part)
    assert rb[:]["traj_count"].flatten().tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


# ---- the environment that a transform is in ----
def test_a_transform_knows_the_environment_as_it_is_before_it():
    class Parent(Transform):
        def _call(self, td):
            return td.set("parent", torch.tensor([len(self.parent.observation_spec.leaves())]))

    own, step_counter = Parent(), StepCounter()
    env = TransformedEnv(lives(), Compose(step_counter, RewardSum(), own))
    assert env.rollout(2)["next", "parent"].flatten().tolist() == [3, 3]
    assert own.container is env and env.transform[0].parent is env.base_env
    assert [type(part) for part in own.parent.transform] == [StepCounter, RewardSum]
    assert own.parent is own.parent and "parent" in env.observation_spec.leaves()
    with pytest.raises(RuntimeError, match="StepCounter is in no environment"):
        _ = step_counter.parent  # the environment has a copy of its own
    twin = pickle.loads(pickle.dumps(TransformedEnv(lives(), Compose(StepCounter(), RewardSum()))))
    assert twin.transform[1].container is twin and twin.transform[1].clone().container is None


def test_a_refused_transform_leaves_the_environment_as_it_was():
    env = TransformedEnv(lives(), StepCounter())
    with pytest.raises(KeyError, match="absent"):
        env.append_transform(RewardSum(["absent"], ["sum"]))
    assert len(env.transform.parts()) == 1 and env.rollout(3)["step_count"].flatten().tolist() == [0, 1, 2]


def test_a_clone_shares_no_state():
    one = Compose(ObservationNorm(1.0, 2.0, ["observation"]), StepCounter(3))
    other = one.clone()
    assert type(other) is Compose and len(other) == 2 and other[0] is not one[0] and repr(other) == repr(one)
    assert TransformedEnv(lives(), other).rollout(9).shape == (3,)
    assert [type(part) for part in one[:1]] == [ObservationNorm]


def test_statistics_are_computed_from_steps_of_the_environment():
    norm = ObservationNorm(in_keys=["observation"], standard_normal=True)
    with pytest.raises(RuntimeError, match="in no environment"):
        norm.init_stats(num_iter=4)
    env = TransformedEnv(lives(4), Compose(StepCounter(), norm))
    env.transform[1].init_stats(num_iter=8)
    assert norm.loc.tolist() == [1.5]
    torch.testing.assert_close(norm.scale, torch.tensor([np.sqrt(10 / 7)], dtype=torch.float32))
    with pytest.raises(RuntimeError, match="initialized already"):
        norm.init_stats(num_iter=8)


def test_statistics_of_several_environments_are_reduced_over_the_dimensions_that_are_named():
    def statistics(**settings):
        norm = ObservationNorm(in_keys=["observation"])
        env = TransformedEnv(SerialEnv(2, lambda: lives(4)), norm)
        norm.init_stats(num_iter=8, **settings)
        assert env.rollout(3)["observation"].shape == (2, 3, 1)
        return norm.loc.shape

    assert statistics() == statistics(reduce_dim=(0, 1), cat_dim=1) == (1,)
    assert statistics(reduce_dim=(0, 1), cat_dim=1, keep_dims=(1,)) == (1, 1)
    for settings, why in (
        ({"reduce_dim": (0, 1)}, "give cat_dim"),
        ({"reduce_dim": (0, 1), "cat_dim": 0}, "cat_dim is time, dimension 1"),
        ({"reduce_dim": 0, "cat_dim": 1}, "among reduce_dim"),
        ({"reduce_dim": 1, "keep_dims": 0}, "keep_dims must be among"),
    ):
        with pytest.raises(ValueError, match=why):
            statistics(**settings)


@pytest.mark.parametrize("mode", ["vector_entry_point", "sync"])
def test_collectors_step_vector_environments_with_transforms_that_need_every_step(mode):
    base = GymEnv("CartPole-v1", num_envs=3, vectorization_mode=mode)
    primer = TensorDictPrimer(hidden=Unbounded((2,)), default_value=4.0)
    env = TransformedEnv(base, Compose(CatTensors(out_key="vector"), StepCounter(7), TrajCounter(), primer))
    with SyncDataCollector(env, None, frames_per_batch=60) as collector:
        batch = collector.rollout()
    assert batch["vector"].shape == (3, 20, 4) and bool((batch["hidden"] == 4).all())
    assert_equal(batch["traj_count"].squeeze(-1), batch["collector", "traj_ids"])
    after, over = batch["next", "vector"][:, :-1], batch["next", "done"][:, :-1].squeeze(-1)
    assert torch.equal(after[~over], batch["vector"][:, 1:][~over]) and bool(over.any())
