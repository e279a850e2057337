"""TransformedEnv keeps the contract of environments with every transform, and follows episodes exactly."""

from __future__ import annotations

import copy
import pickle
from contextlib import closing

import numpy as np
import pytest
import torch
from gymnasium import spaces

from contracts.each import each
from contracts.folded import assert_contract
from contracts.gym_worlds import SPACES, Countdown, Echo
from contracts.vector_worlds import Native
from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.envs import GymEnv, SerialEnv, TransformedEnv, check_env_specs
from engram.envs.transforms import (
    CatFrames,
    Compose,
    DTypeCastTransform,
    ExcludeTransform,
    FlattenObservation,
    GrayScale,
    InitTracker,
    MultiStepTransform,
    ObservationNorm,
    RenameTransform,
    Resize,
    Reward2GoTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SelectTransform,
    StepCounter,
    ToTensorImage,
    Transform,
    UnsqueezeTransform,
    VecNorm,
)
from engram.specs import Bounded, Unbounded
from engram.testing import EnvContract
from engram.testing.transform import assert_equal


def pictures(length=4):
    """Pixels, doubles, and an action of doubles."""
    shown = spaces.Dict(
        pixels=spaces.Box(0, 255, (6, 5, 3), np.uint8), observation=SPACES["box of doubles"], n=SPACES["discrete"]
    )
    return GymEnv(Echo(shown, spaces.Box(-1.0, 1.0, (2,), np.float64), length))


def doubled(td):
    return td.set("double", td["observation"] * 2)


def late(td):
    """What only steps have."""
    return td if td.get("reward", None) is None else td.set("twice", td["reward"] * 2)


TRANSFORMS = {
    "none": lambda: None,
    "ToTensorImage": lambda: ToTensorImage(),
    "Resize": lambda: Compose(ToTensorImage(), Resize(3, 4)),
    "bicubic": lambda: Compose(ToTensorImage(), Resize(3, 4, "bicubic")),
    "RenameTransform": lambda: RenameTransform(["observation", "reward"], [("a", "b"), "r"], create_copy=True),
    "RenameTransform, moving": lambda: RenameTransform(["observation", "pixels"], ["pixels", "observation"]),
    "GrayScale": lambda: Compose(ToTensorImage(), GrayScale()),
    "CatFrames": lambda: Compose(ToTensorImage(), CatFrames(3, -3)),
    "CatFrames, twice": lambda: CatFrames(3, -1, ["observation", "observation"], ["s", "t"]),
    "CatFrames, constant": lambda: CatFrames(3, -1, ["observation"], ["s"], padding="constant", padding_value=-7),
    "DTypeCastTransform": lambda: DTypeCastTransform(torch.float64, torch.float32),
    "DTypeCastTransform by keys": lambda: DTypeCastTransform(torch.uint8, torch.int16, ["pixels"], ["wide"]),
    "ObservationNorm": lambda: ObservationNorm(1.0, -2.0, ["observation"]),
    "ObservationNorm of actions": lambda: ObservationNorm(0.0, 0.5, in_keys_inv=["action"], standard_normal=True),
    "VecNorm": lambda: VecNorm(["observation", "reward"], ["observation", "normed"]),
    "RewardClipping": lambda: RewardClipping(clamp_max=0.5),
    "RewardScaling": lambda: RewardScaling(1.0, 0.5),
    "RewardScaling beside": lambda: RewardScaling(1.0, 0.5, ["reward"], ["scaled"]),
    "RewardSum": lambda: RewardSum(),
    "StepCounter": lambda: StepCounter(max_steps=3),
    "InitTracker": lambda: InitTracker(),
    "FlattenObservation": lambda: FlattenObservation(-3, -1),
    "UnsqueezeTransform": lambda: UnsqueezeTransform(-1, in_keys=["observation"]),
    "SelectTransform": lambda: SelectTransform("pixels"),
    "ExcludeTransform": lambda: ExcludeTransform("pixels", "absent"),
    "callable": lambda: doubled,
    "callable on steps": lambda: late,
    "Compose": lambda: Compose(
        ToTensorImage(), Compose(CatFrames(2, -3), StepCounter(3)), RewardSum(), VecNorm(["observation"]), doubled
    ),
}


class WithTransform(EnvContract):
    def __init__(self, transform):
        self._transform = transform

    def make(self):
        return TransformedEnv(pictures(), TRANSFORMS[self._transform]())

    def test_equal_seeds_give_equal_episodes(self, env):
        if any(isinstance(part, VecNorm) for part in env.transform.parts()):
            pytest.skip("it learns from the first run")
        super().test_equal_seeds_give_equal_episodes(env)


@pytest.mark.deep
@each("transform", TRANSFORMS)
def test_an_environment_with_any_transform_keeps_the_contract(transform):
    contract = WithTransform(transform)
    assert assert_contract(contract, {"env": lambda: closing(contract.make())}) >= 12


class TestTransformedSerialEnv(EnvContract):
    def make(self):
        return TransformedEnv(SerialEnv(3, pictures), [RewardSum(), StepCounter(3), CatFrames(2, -1, "observation")])


class TestSerialEnvOfTransformedEnvs(EnvContract):
    def make(self):
        shared = Compose(StepCounter(max_steps=3), CatFrames(2, -1, "observation"), RewardScaling(0.0, 2.0))
        return SerialEnv(3, lambda: TransformedEnv(pictures(), shared))


class TestTransformedEnvOfTransformedEnvs(EnvContract):
    def make(self):
        inner = TransformedEnv(SerialEnv(2, pictures), Compose(ToTensorImage(), RenameTransform("observation", "o")))
        cast = DTypeCastTransform(torch.float64, torch.float32)
        return TransformedEnv(inner, Compose(CatFrames(2, -3), StepCounter(3), cast))


def counting(*lengths):
    return SerialEnv(len(lengths), [lambda n=n: GymEnv(Countdown(lengths=(n,))) for n in lengths])


# ---- episodes ----
def test_sums_counts_and_marks_start_anew_where_an_episode_does_and_nowhere_else():
    env = TransformedEnv(counting(2, 5), Compose(StepCounter(), RewardSum(), InitTracker()))
    env.set_seed(0)
    batch = env.rollout(6, break_when_any_done=False)
    assert batch["step_count"].squeeze(-1).tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 0]]
    assert batch["next", "step_count"].squeeze(-1).tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 1]]
    assert batch["is_init"].squeeze(-1).int().tolist() == [[1, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1]]
    assert not batch["next", "is_init"].any()
    rewards = batch["next", "reward"].squeeze(-1)
    sums = batch["next", "episode_reward"].squeeze(-1)
    assert torch.equal(sums[0].reshape(3, 2), rewards[0].reshape(3, 2).cumsum(1))
    assert sums[1, :5].tolist() == rewards[1, :5].cumsum(0).tolist() and sums[1, 5] == rewards[1, 5]


def test_step_counter_truncates_and_a_rollout_stops_there():
    env = TransformedEnv(GymEnv(Countdown(lengths=(9,))), StepCounter(max_steps=4))
    batch = env.rollout(20)
    assert batch["next", "truncated"].flatten().tolist() == [False] * 3 + [True]
    assert batch["next", "done"].flatten().tolist() == [False] * 3 + [True]
    assert not batch["next", "terminated"].any()


def test_max_steps_counts_for_each_environment_alone():
    env = TransformedEnv(counting(2, 9), StepCounter(max_steps=3))
    env.set_seed(0)
    batch = env.rollout(7, break_when_any_done=False)
    assert batch["next", "truncated"][1].flatten().int().tolist() == [0, 0, 1, 0, 0, 1, 0]
    assert batch["next", "done"][0].flatten().int().tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_the_last_frame_of_an_episode_does_not_reach_the_next_one():
    env = TransformedEnv(counting(2, 4), CatFrames(2, -1, ["observation"]))
    env.set_seed(0)
    seen = env.rollout(5, break_when_any_done=False)["observation"][..., [0, 2]].tolist()
    assert seen[0] == [[2, 2], [2, 1], [2, 2], [2, 1], [2, 2]]
    assert seen[1] == [[4, 4], [4, 3], [3, 2], [2, 1], [4, 4]]


@each("n, stepped, reset", [(4, [9, 9, 9, 8], [9, 9, 9, 9]), (2, [9, 8], [9, 9])])
def test_a_number_of_frames_may_change_in_mid_episode(n, stepped, reset):
    env = TransformedEnv(GymEnv(Countdown(lengths=(9,))), CatFrames(3, -1, ["observation"]))
    env.set_seed(0)
    first = env.reset()
    env.transform.N = n
    first = env.rand_action(first)
    assert env.step(first)["next", "observation"][::2].tolist() == stepped
    assert env.reset()["observation"][::2].tolist() == reset


def test_a_second_reset_in_mid_episode_starts_anew():
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum(), CatFrames(2, -1, "observation")))
    env.rollout(3)
    td = env.reset()
    assert td["step_count"].item() == 0 and td["episode_reward"].item() == 0
    assert torch.equal(td["observation"][:4], td["observation"][4:])


def test_vec_norm_learns_from_what_was_reset_only():
    base = counting(1, 9)
    base.set_seed(0)
    bare = base.rollout(3, break_when_any_done=False)
    norm = VecNorm(["observation"], decay=1.0)
    env = TransformedEnv(counting(1, 9), norm)
    env.set_seed(0)
    env.rollout(3, break_when_any_done=False)
    shown = [bare["observation"][:, 0], bare["next", "observation"][:, 0]]
    for t in (1, 2):  # environment 0 starts anew, environment 1 goes on
        shown += [bare["observation"][:1, t], bare["next", "observation"][:, t]]
    torch.testing.assert_close(norm.loc["observation"], torch.cat(shown).double().mean(0).float())


def test_random_states_are_those_of_the_environment_inside():
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    env.set_seed(3)
    env.reset()
    state = env.random_state()
    first = env.reset()["observation"]
    env.reset()
    env.set_random_state(state)
    assert torch.equal(env.reset()["observation"], first)


def test_a_frozen_vec_norm_learns_nothing_in_an_environment():
    norm = VecNorm(["observation"])
    env = TransformedEnv(GymEnv("CartPole-v1"), norm)
    env.rollout(5)
    norm.freeze()
    before = copy.deepcopy(norm.state_dict())
    env.rollout(5)
    assert_equal(norm.state_dict(), before)


# ---- keys, in and out ----
def test_a_transform_with_the_keys_of_a_buffer_serves_both():
    norm = ObservationNorm(0.0, 2.0, ["observation", ("next", "observation")])
    bare = GymEnv("CartPole-v1")
    bare.set_seed(0)
    env = TransformedEnv(GymEnv("CartPole-v1"), norm)
    env.set_seed(0)
    act = lambda td: td.set("action", torch.tensor([0, 1]))  # noqa: E731
    raw, live = bare.rollout(5, act), env.rollout(5, act)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=norm)
    rb.extend(raw)
    assert_equal(rb[:]["observation"], live["observation"])
    assert_equal(rb[:]["next", "observation"], live["next", "observation"])


def test_actions_go_through_inv_and_the_caller_keeps_its_own():
    world = Echo(SPACES["box"], spaces.Box(-10.0, 10.0, (2,), np.float32))
    scaled = ObservationNorm(0.0, 10.0, in_keys_inv=["action"], standard_normal=True)
    env = TransformedEnv(GymEnv(world), scaled)
    assert env.action_spec == Bounded(-1.0, 1.0, (2,))
    td = env.step(env.reset().set("action", torch.tensor([0.5, -1.0])))
    np.testing.assert_array_equal(world.actions[0], np.float32([5, -10]))
    assert td["action"].tolist() == [0.5, -1.0]


def test_inverses_run_in_reverse_order():
    world = Echo(SPACES["box"], spaces.Box(-10.0, 10.0, (), np.float32))
    first = ObservationNorm(1.0, 2.0, in_keys_inv=["action"], standard_normal=True)
    second = UnsqueezeTransform(-1, in_keys_inv=["action"])
    env = TransformedEnv(GymEnv(world), Compose(first, second))
    assert env.action_spec.shape == (1,)
    env.step(env.reset().set("action", torch.tensor([3.0])))
    assert world.actions[0] == 7.0


def test_doubles_are_cast_everywhere_and_back_for_the_base():
    env = TransformedEnv(pictures(), DTypeCastTransform(torch.float64, torch.float32))
    assert env.observation_spec["observation"].dtype is torch.float32 and env.action_spec.dtype is torch.float32
    assert env.observation_spec["pixels"].dtype is torch.uint8 and env.reward_spec.dtype is torch.float32
    env.rollout(3)
    assert all(action.dtype == np.float64 for action in env.base_env.gym_env.unwrapped.actions)


def test_a_recurrent_policys_state_is_no_transforms_affair():
    def remember(td):
        td.set("action", torch.tensor([1, 0]))
        return td.set(("next", "memory"), td.get("memory", torch.zeros(1)) + 1)

    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), SelectTransform("step_count")))
    batch = env.rollout(3, remember)
    assert batch["next", "memory"].flatten().tolist() == [1, 2, 3]


def test_transforms_do_not_see_what_a_policy_keeps_for_the_next_step():
    seen = []
    env = TransformedEnv(GymEnv("CartPole-v1"), lambda td: seen.append(set(td.keys())) or td)
    td = env.rand_action(env.reset())
    env.step(td.set(("next", "memory"), torch.ones(1)))
    assert "memory" not in seen[-1] and "reward" in seen[-1] and td["next", "memory"].item() == 1


def test_bounds_follow_the_values():
    env = TransformedEnv(pictures(), Compose(ToTensorImage(), RewardScaling(0.0, 2.0), CatFrames(2, -3)))
    assert env.observation_spec["pixels"] == Bounded(0.0, 1.0, (6, 6, 5))
    assert TransformedEnv(pictures(), VecNorm("n")).observation_spec["n"] == Unbounded((3,))


@each(("transform", "error", "words"),
    [
        (lambda: MultiStepTransform(3, 0.9), TypeError, "append it to the replay buffer"),
        (lambda: Reward2GoTransform(), TypeError, "append it to the replay buffer"),
        (lambda: ObservationNorm(0, 1, ["observatoin"]), KeyError, "observatoin.*'observation'"),
        (lambda: RewardSum(["no"], ["x"]), KeyError, "'no'"),
        (lambda: CatFrames(2, -1), KeyError, "'pixels'"),
        (lambda: CatFrames(2, -3, "observation"), ValueError, "dim=-3"),
        (lambda: ExcludeTransform("terminated"), ValueError, "flags stay"),
        (lambda: SelectTransform("observation", keep_dones=False), ValueError, "keep_dones"),
        (lambda: SelectTransform("no"), KeyError, "'no'"),
        (lambda: RenameTransform("reward", "r"), ValueError, "keep their names"),
        (lambda: RenameTransform([], [], ["action"], ["act"]), ValueError, "called 'action'"),
        (lambda: StepCounter(5, update_done=False), ValueError, "update_done"),
        (lambda: lambda td: None, TypeError, "must return a TensorDict"),
        (lambda: lambda td: td.select("observation"), KeyError, "removes 'done'"),
        (lambda: 3, TypeError, "Transform or a callable"),
    ])  # fmt: skip
def test_unsupported_transform_is_refused_with_an_alternative(transform, error, words):
    with pytest.raises(error, match=words):
        TransformedEnv(GymEnv("CartPole-v1"), transform())
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    with pytest.raises(error, match=words):
        env.append_transform(transform())
    assert len(env.transform.parts()) == 1
    check_env_specs(env)


def test_only_environments_can_be_transformed():
    with pytest.raises(TypeError, match="environment of engram, gymnasium or TorchRL, got a dict"):
        TransformedEnv({})


# ---- users' own ----
class Clock(Transform):
    """Written as users of the field write them."""

    def __init__(self):
        super().__init__()
        self.resets = 0

    def _reset(self, tensordict, tensordict_reset):
        self.resets += 1
        return tensordict_reset.set("clock", torch.zeros(1))

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("clock", tensordict["clock"] + 1)

    def transform_observation_spec(self, observation_spec):
        observation_spec["clock"] = Unbounded((1,))
        return observation_spec


class Clipped(Transform):
    def _apply_transform(self, value):
        return value.clamp(-1, 1)


def test_a_users_transform_has_its_own_reset_step_and_specs():
    clock = Clock()
    base = GymEnv("CartPole-v1")
    env = TransformedEnv(base, clock)
    check_env_specs(env, seed=0)
    assert "clock" not in base.observation_spec
    assert env.transform is clock
    assert env.rollout(3)["next", "clock"].flatten().tolist() == [1, 2, 3]


def test_trying_a_transform_for_its_specs_leaves_it_as_it_was():
    class Counting(Clock):
        transform_observation_spec = Transform.transform_observation_spec

    clock = Counting()
    env = TransformedEnv(GymEnv("CartPole-v1"), clock)
    assert clock.resets == 0 and "clock" in env.observation_spec


def test_a_users_transform_by_key_needs_nothing_else():
    env = TransformedEnv(GymEnv("CartPole-v1"), Clipped(in_keys=["observation"], out_keys=["clipped"]))
    check_env_specs(env, seed=0)
    assert env.rollout(5)["clipped"].abs().max() <= 1


def test_a_users_call_serves_buffers_too():
    class Doubled(Transform):
        def _call(self, td):
            return doubled(td)

    env = TransformedEnv(GymEnv("CartPole-v1"), Doubled())
    check_env_specs(env)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=Doubled())
    rb.extend(GymEnv("CartPole-v1").rollout(3))
    assert torch.equal(rb[:]["double"], rb[:]["observation"] * 2)


def test_what_a_callable_leaves_alone_keeps_its_spec():
    base = GymEnv("CartPole-v1")
    env = TransformedEnv(base, lambda td: td.set("x", torch.ones(1)))
    assert env.observation_spec["observation"] is base.observation_spec["observation"]
    wild = TransformedEnv(base, lambda td: td.set("observation", td["observation"].mul_(100)))
    assert wild.observation_spec["observation"] == Unbounded((4,))


# ---- the object ----
def test_transforms_can_be_added_at_the_end_and_in_the_middle():
    env = TransformedEnv(pictures(), ToTensorImage())
    env.append_transform(CatFrames(2, -3))
    assert env.observation_spec["pixels"].shape == (6, 6, 5)
    env.insert_transform(1, GrayScale())
    env.insert_transform(-1, lambda td: td)
    assert env.observation_spec["pixels"].shape == (2, 6, 5)
    assert [type(t).__name__ for t in env.transform][:2] == ["ToTensorImage", "GrayScale"]
    check_env_specs(env)
    with pytest.raises(IndexError, match="4 transforms"):
        env.insert_transform(5, GrayScale())


def test_what_is_not_known_is_asked_of_the_base():
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    assert env.gym_env is env.base_env.gym_env
    with pytest.raises(AttributeError):
        _ = env.nothing
    with pytest.raises(AttributeError):
        _ = env._engine


def test_no_raw_steps_lead_past_the_transforms():
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    assert env.base_env.engines() is not None
    assert env.engines() is None and env.vector_engine() is None


def test_closing_closes_the_base():
    env = TransformedEnv(TransformedEnv(GymEnv("CartPole-v1")), StepCounter())
    env.close()
    assert env.base_env.is_closed and env.base_env.base_env.is_closed


def test_what_was_learnt_is_saved_and_loaded_at_every_level():
    def make():
        inner = TransformedEnv(GymEnv("CartPole-v1"), VecNorm(["observation"]))
        return TransformedEnv(inner, Compose(StepCounter(), VecNorm(["reward"])))

    one, other = make(), make()
    one.rollout(10)
    one.transform[1].freeze()
    state = pickle.loads(pickle.dumps(one.state_dict()))
    other.load_state_dict(state)
    assert_equal(other.state_dict(), one.state_dict())
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="does not fit"):
        TransformedEnv(GymEnv("CartPole-v1"), StepCounter()).load_state_dict(state)
    other.rollout(3)
    assert_equal(other.state_dict()["transforms"], before["transforms"])  # frozen


def test_a_copy_goes_on_by_itself():
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))
    td = env.rand_step(env.reset())
    twin = copy.deepcopy(env)
    env.rand_step(td.copy().exclude("next"))
    assert twin.rand_step(td.copy().exclude("next"))["next", "step_count"].item() == 2


def test_it_says_what_it_is():
    assert "StepCounter(max_steps=5)" in repr(TransformedEnv(GymEnv("CartPole-v1"), StepCounter(5)))


def test_moving_to_a_device_in_mid_episode_keeps_the_counts():
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum(), CatFrames(2, -1, "observation")))
    env.rand_step(env.reset())
    env.to("cpu")
    td = env.rand_step()
    assert td["next", "step_count"].item() == 2 and td["next"].device == torch.device("cpu")


# ---- collectors ----
def test_trajectories_of_a_collector_end_where_a_step_counter_truncates():
    env = TransformedEnv(counting(3, 50), Compose(StepCounter(max_steps=5), RewardSum()))
    with SyncDataCollector(env, frames_per_batch=24, total_frames=48) as collector:
        collector.set_seed(0)
        batch = torch.cat(list(collector), 1)
    done = batch["next", "done"].squeeze(-1)
    assert done[0].int().tolist() == [0, 0, 1] * 8 and done[1].int().tolist() == [0, 0, 0, 0, 1] * 4 + [0] * 4
    for row in batch:
        ids = row["collector", "traj_ids"]
        assert torch.equal(ids[1:] != ids[:-1], row["next", "done"].squeeze(-1)[:-1])
        starts = torch.cat([torch.ones(1, dtype=torch.bool), row["next", "done"].squeeze(-1)[:-1]])
        assert torch.equal(row["step_count"].squeeze(-1) == 0, starts)
    assert batch["collector", "traj_ids"].unique().tolist() == list(range(13))


def test_a_collectors_own_limit_starts_episodes_of_the_transforms_anew():
    env = TransformedEnv(GymEnv(Countdown(lengths=(50,))), StepCounter())
    with SyncDataCollector(env, frames_per_batch=10, total_frames=10, max_frames_per_traj=4) as collector:
        assert next(iter(collector))["step_count"].flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_a_serial_env_has_the_specs_of_its_members_rewards():
    def make(dtype=torch.float64):
        return TransformedEnv(GymEnv("CartPole-v1"), DTypeCastTransform(torch.float32, dtype, ["reward"]))

    env = SerialEnv(2, make)
    assert env.reward_spec == Unbounded((2, 1), dtype=torch.float64)
    check_env_specs(env)
    with pytest.raises(ValueError, match="another reward_spec"):
        SerialEnv(2, [make, lambda: make(torch.float16)])


@pytest.mark.parametrize("lengths", [(2,), (3, 1, 4)])
def test_norms_learn_from_each_observation_once_where_calls_only_reset(lengths):
    def make():
        return GymEnv(Native(2, lengths=lengths))

    env = TransformedEnv(make(), VecNorm(["observation"], decay=1.0))
    env.rollout(40, break_when_any_done=False)
    bare = make().rollout(40, break_when_any_done=False)
    starts = torch.cat([torch.ones(2, 1, dtype=torch.bool), bare["next", "done"][:, :-1, 0]], 1)
    shown = torch.cat([bare["observation"][starts], bare["next", "observation"].reshape(-1, 2)])
    (stats,) = env.transform._stats
    assert float(stats.weight) == len(shown)
    torch.testing.assert_close(env.transform.loc["observation"], shown.double().mean(0).float())
