"""Gymnasium's vector environments, in each autoreset mode, give what a slow loop over single ones gives."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torch.nn.functional import one_hot

from contracts.each import each
from contracts.gym_worlds import Countdown
from contracts.vector_worlds import Native, Nested
from engram.envs import EnvBase, GymEnv, SerialEnv, check_env_specs, gym_make, step_mdp
from engram.envs.engines import GymVectorEngine
from engram.envs.vector_env import VectorEnv
from engram.testing import EnvContract

MODES = list(AutoresetMode)
KINDS = [
    ("sync", {}),
    ("sync", {"copy": False}),
    ("async", {}),
    ("async", {"copy": False}),
]
every_mode = pytest.mark.parametrize("mode", MODES)


LOCAL = ("async", {"shared_memory": False})
every_kind = pytest.mark.parametrize(
    ("kind", "options", "mode"),
    [
        # Those in processes take long to start: each setting and each mode once.
        pytest.param(*kind, mode, marks=pytest.mark.deep if kind[0] == "async" and k != m else ())
        for k, kind in enumerate([("sync", {}), *KINDS[2:], LOCAL, KINDS[1]])
        for m, mode in enumerate(MODES, 1)
        if kind is not LOCAL or mode in MODES[1:]
    ],
)


def made(name, mode, vectorization="sync", n=3, options=None, **kwargs):
    vector_kwargs = {"autoreset_mode": mode, **(options or {})}
    return GymEnv(name, num_envs=n, vectorization_mode=vectorization, vector_kwargs=vector_kwargs, **kwargs)


class TestNative(EnvContract):
    def make(self):
        return GymEnv("CartPole-v1", num_envs=3)


class TestSync(EnvContract):
    def make(self):
        return GymEnv("CartPole-v1", num_envs=3, vectorization_mode="sync")


class TestSyncNested(EnvContract):
    def make(self):
        return GymEnv("engram/Nested-v0", num_envs=3)


class TestSyncNextStep(EnvContract):
    def make(self):
        return made("engram/Nested-v0", AutoresetMode.NEXT_STEP)


class TestSyncDisabled(EnvContract):
    def make(self):
        return made("engram/Nested-v0", AutoresetMode.DISABLED)


class TestAsync(EnvContract):
    @pytest.fixture(scope="class")  # whose processes are slow to start
    @classmethod
    def env(cls):
        env = made("engram/Nested-v0", AutoresetMode.NEXT_STEP, "async")
        yield env
        env.close()


class TestSerialEnvOfVectors(EnvContract):
    def make(self):
        return SerialEnv(2, lambda: GymEnv("CartPole-v1", num_envs=2))


class Slow:
    """One environment stepped by hand: `steps` of TED, from numpy and gymnasium alone."""

    def __init__(self, env, seed, act):
        self.env, self.act = env, act
        self.observation = np_copy(env.reset(seed=seed)[0])

    def step(self):
        action = self.act(self.observation)
        before = self.observation
        after, reward, terminated, truncated, _ = self.env.step(action)
        after = np_copy(after)
        self.observation = np_copy(self.env.reset()[0]) if terminated or truncated else after
        return before, action, after, reward, terminated, truncated


def np_copy(value):
    if isinstance(value, dict):
        return {key: np_copy(part) for key, part in value.items()}
    return tuple(np_copy(part) for part in value) if isinstance(value, tuple) else np.array(value)


def slow_rollouts(make, n, steps, seed, act):
    slow = [Slow(make(), seed + env, act) for env in range(n)]
    return [[world.step() for _ in range(steps)] for world in slow]


def assert_equal(batch, expected, tensors, encoded):
    """`batch` `[n, T]` is what the slow loops gave; `tensors` makes tensors of an observation, `encoded` of actions."""
    for row, steps in enumerate(expected):
        for t, (before, action, after, reward, terminated, truncated) in enumerate(steps):
            found = batch[row, t]
            next_flags = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
            flags = {key: torch.tensor([value]) for key, value in next_flags.items()}
            following = {**tensors(after), **flags, "reward": torch.tensor([reward], dtype=torch.float32)}
            root = {**tensors(before), **dict.fromkeys(flags, torch.tensor([False])), "action": encoded(action)}
            wanted = TensorDict({**root, "next": following})
            keys = set(wanted.keys(True, True))
            assert set(found.keys(True, True)) == keys
            for key in keys:
                assert found.get(key).dtype is wanted.get(key).dtype, key
                assert torch.equal(found.get(key), wanted.get(key)), (row, t, key)


def lean(observation):
    return np.int64(observation[2] < 0)


def lean_policy(td):
    return td.set("action", one_hot((td["observation"][..., 2] < 0).long(), 2))


def plain(observation):
    return {"observation": torch.from_numpy(observation)}


@every_kind
def test_cartpole_is_what_single_environments_give(kind, options, mode):
    env = made("CartPole-v1", mode, kind, options=options)
    env.set_seed(5)
    batch = env.rollout(40, lean_policy, break_when_any_done=False)
    env.close()
    expected = slow_rollouts(lambda: gymnasium.make("CartPole-v1"), 3, 40, 5, lean)
    assert sum(step[4] for steps in expected for step in steps) > 5
    assert_equal(batch, expected, plain, lambda action: one_hot(torch.tensor(action), 2))


@every_kind
def test_nested_spaces_truncations_and_reused_arrays_are_what_single_environments_give(kind, options, mode):
    env = made("engram/Nested-v0", mode, kind, options=options)
    env.set_seed(2)
    batch = env.rollout(25, nested_policy, break_when_any_done=False)
    env.close()
    expected = slow_rollouts(Nested, 3, 25, 2, nested_action)
    assert any(step[4] for steps in expected for step in steps) and any(step[5] for steps in expected for step in steps)
    assert_equal(batch, expected, nested_tensors, nested_encoded)


def nested_action(observation):
    turn = np.array([observation["left"][0] / 10, -0.5], np.float32)
    return {"push": np.int64(1 + observation["inner"][0] % 3), "turn": turn}


def nested_policy(td):
    push = one_hot((td["inner", "0"].argmax(-1) + 1) % 3, 3)
    turn = torch.stack([td["left"][..., 0] / 10, torch.full(td.batch_size, -0.5)], -1)
    return td.set("action", TensorDict({"push": push, "turn": turn}, batch_size=td.batch_size))


def nested_tensors(observation):
    discrete, bits = observation["inner"]
    inner = {"0": one_hot(torch.tensor(discrete - 1), 7), "1": torch.from_numpy(bits)}
    return {"left": torch.from_numpy(observation["left"]), "inner": TensorDict(inner)}


def nested_encoded(action):
    return TensorDict({"push": one_hot(torch.tensor(action["push"] - 1), 3), "turn": torch.from_numpy(action["turn"])})


@every_mode
def test_an_environment_written_for_many_is_what_single_ones_give(mode):
    env = GymEnv(Native(4, mode))
    env.set_seed(0)
    batch = env.rollout(20, countdown_policy, break_when_any_done=False)
    expected = slow_rollouts(Countdown, 4, 20, 0, lambda observation: np.int64(observation[0] % 3))
    assert_equal(batch, expected, plain, lambda action: one_hot(torch.tensor(action), 3))


def countdown_policy(td):
    return td.set("action", one_hot(td["observation"][..., 0].long() % 3, 3))


def test_native_cartpole_is_what_its_own_loop_gives_without_the_resets():
    n, wanted = 5, 60
    env = GymEnv("CartPole-v1", num_envs=n, max_episode_steps=9)
    env.set_seed(3)
    batch = env.rollout(wanted, lean_policy, break_when_any_done=False)
    envs = gymnasium.make_vec("CartPole-v1", num_envs=n, max_episode_steps=9)
    observation, _ = envs.reset(seed=3)
    over, expected = np.zeros(n, np.bool_), [[] for _ in range(n)]
    while min(map(len, expected)) < wanted:
        actions = np.array([lean(row) for row in observation])
        after, reward, terminated, truncated, _ = envs.step(actions)
        for row in np.flatnonzero(~over):
            step = observation[row], actions[row], after[row], reward[row], bool(terminated[row]), bool(truncated[row])
            expected[row].append(step)
        observation, over = after, terminated | truncated
    expected = [steps[:wanted] for steps in expected]
    assert {len({step[5] for step in steps}) for steps in expected} == {2}
    assert_equal(batch, expected, plain, lambda action: one_hot(torch.tensor(action), 2))


def test_a_call_that_only_resets_is_marked_and_asks_for_the_reset_that_hands_out_the_first_observation():
    env = GymEnv(Native(2, lengths=(1,)))
    env.gym_env.worlds[1].lengths = (5,)
    td = env.reset()
    stepped, state = env.step_and_maybe_reset(countdown_policy(td))
    assert stepped["_idle"].squeeze(-1).tolist() == [False, False]
    assert stepped["next", "done"].squeeze(-1).tolist() == [True, False]
    assert state["_idle"].squeeze(-1).tolist() == [True, False] and not state["done"].any()
    stepped, state = env.step_and_maybe_reset(countdown_policy(state))
    assert stepped["_idle"].squeeze(-1).tolist() == [True, False]
    assert stepped["next", "truncated"].squeeze(-1).tolist() == [True, False]
    assert stepped["next", "reward"][0] == 0
    assert state["_idle"].any().item() is False
    assert state["observation"][:, 0].tolist() == [1, 3]


def test_what_a_policy_keeps_is_zero_when_the_first_step_of_an_episode_comes():
    def remember(td):
        countdown_policy(td)
        return td.set(("next", "memory"), td.get("memory", torch.zeros(*td.batch_size, 1)) + 1)

    env = GymEnv(Native(2, lengths=(3,)))
    batch = env.rollout(6, remember, break_when_any_done=False)
    assert batch["next", "memory"].squeeze(-1).tolist() == [[1, 2, 3, 1, 2, 3]] * 2


def test_a_rollout_ends_with_the_first_step_that_is_done_also_among_idle_rows():
    env = GymEnv(Native(2, lengths=(2, 5)))
    env.set_seed(0)
    env.gym_env.reset(seed=0)
    td = env.reset()
    for _ in range(2):
        td = env.maybe_reset(step_mdp(env.step(countdown_policy(td))))
    assert td["_idle"].all()
    batch = env.rollout(9, countdown_policy, auto_reset=False, tensordict=td)
    assert batch.shape == (2, 5) and batch["next", "done"][:, -1].all() and not batch["next", "done"][:, :-1].any()


@every_mode
def test_a_step_after_the_end_of_an_episode_is_refused_unless_it_is_marked(mode):
    env = GymEnv(Native(2, mode, lengths=(1, 3)))
    env.set_seed(0)
    stepped = env.step(countdown_policy(env.reset()))
    if mode is AutoresetMode.NEXT_STEP:
        assert env.step(countdown_policy(step_mdp(stepped)))["_idle"].all()
    else:
        with pytest.raises(RuntimeError, match=r"environments \[0, 1\] are over; reset them"):
            env.step(countdown_policy(step_mdp(stepped)))


@pytest.mark.parametrize("kind", ["sync", "async"])
@every_mode
def test_callers_may_cut_episodes_of_gymnasiums_own_vector_environments(kind, mode):
    env = made("engram/Countdown-v0", mode, kind, n=2, lengths=(9,))
    env.set_seed(0)
    td = env.step(env.rand_action(env.reset()))
    cut = step_mdp(td).set("_reset", torch.tensor([[True], [False]]))
    assert env.reset(cut)["observation"][:, 0].tolist() == [9, 8]
    env.close()


def test_an_engine_that_cannot_reset_one_environment_alone_says_so():
    engine = GymEnv(Native(2, lengths=(9,))).vector_engine()
    engine.reset()
    with pytest.raises(ValueError, match=r"environments \[1\] of .* cannot be reset alone"):
        engine.reset(np.array([False, True]))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_environment_that_cannot_be_reset_alone_is_marked_until_its_episode_is_over(mode):
    env = GymEnv(Native(2, mode, lengths=(4, 6)))
    env.gym_env.worlds[0].lengths = (9,)
    env.set_seed(0)
    td = step_mdp(env.step(countdown_policy(env.reset())))
    td = env.reset(td.set("_reset", torch.tensor([[False], [True]]))).exclude("_reset")
    shown = [(td["_idle"].squeeze(-1).tolist(), td["observation"][:, 0].tolist())]
    while td["_idle"].any():
        stepped, td = env.step_and_maybe_reset(countdown_policy(td))
        assert stepped["next", "reward"][1] == 0 and stepped["next", "truncated"].squeeze(-1).tolist() == [False, True]
        shown.append((td["_idle"].squeeze(-1).tolist(), td["observation"][:, 0].tolist()))
    assert shown[0] == ([False, True], [8, 3]) and shown[-1][1] == [4 if mode is AutoresetMode.NEXT_STEP else 5, 6]
    assert td["_idle"].sum() == 0 and not td["done"].any()


def test_a_full_reset_in_the_middle_starts_all_anew():
    env = GymEnv(Native(2, lengths=(2, 9)))
    env.set_seed(0)
    td = env.step(countdown_policy(env.reset()))
    env.step(countdown_policy(step_mdp(td)))
    assert env.reset()["observation"][:, 0].tolist() == [9, 9]
    assert env.reset(TensorDict({"_reset": torch.ones(2, 1, dtype=torch.bool)}, [2]))["observation"][0, 0] == 2


@every_mode
def test_a_seed_goes_before_an_episode_that_has_begun_without_it(mode):
    env = made("engram/Countdown-v0", mode, n=2, lengths=(1, 5))
    env.set_seed(0)
    td = step_mdp(env.step(env.rand_action(env.reset())))
    env.set_seed(0)
    assert env.reset(td.set("_reset", td["done"]))["observation"][:, 0].tolist() == [1, 1]


@every_mode
def test_tensors_that_were_given_away_may_be_written_to(mode):
    env = GymEnv(Native(2, mode, lengths=(2, 3)))
    env.set_seed(0)
    td = env.reset()
    seen = []
    for _ in range(12):
        seen.append(td["observation"][:, 0].tolist() if not td.get("_idle", torch.zeros(1)).any() else None)
        stepped = env.step(countdown_policy(td))
        state = env.maybe_reset(step_mdp(stepped)).clone()
        stepped["next", "observation"].fill_(-1)
        td = state
    assert [left for left in seen if left is not None][:6] == [[2, 2], [1, 1], [3, 3], [2, 2], [1, 1], [2, 2]]


@each("kind", [None, "sync", "async"])
def test_equal_seeds_give_equal_episodes_over_resets(kind):
    batches = []
    for _ in range(2):
        env = GymEnv("CartPole-v1", num_envs=3, vectorization_mode=kind)
        assert env.set_seed(11) == 14
        batches.append(env.rollout(25, lean_policy, break_when_any_done=False))
        env.set_seed(11)
        batches.append(env.rollout(25, lean_policy, break_when_any_done=False))
        env.close()
    assert batches[0]["next", "done"].any()
    assert all(bool((batch == batches[0]).all()) for batch in batches[1:])


def test_the_environments_of_one_seed_are_those_of_the_seeds_that_follow():
    env = GymEnv("CartPole-v1", num_envs=3, vectorization_mode="sync")
    env.set_seed(4)
    first = env.reset()["observation"]
    for row, seed in enumerate(range(4, 7)):
        single = GymEnv("CartPole-v1")
        single.set_seed(seed)
        assert torch.equal(single.reset()["observation"], first[row])


def test_the_vector_entry_point_is_taken_where_there_is_one():
    names = [type(GymEnv(name, num_envs=2).gym_env.unwrapped).__name__ for name in ("CartPole-v1", "CartPole")]
    assert names == ["CartPoleVectorEnv"] * 2
    assert type(GymEnv("MountainCar-v0", num_envs=2).gym_env).__name__ == "SyncVectorEnv"
    assert type(GymEnv("CartPole-v1", num_envs=2, frame_skip=2).gym_env).__name__ == "SyncVectorEnv"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_frame_skip_repeats_in_each_environment(kind):
    env = GymEnv(
        "engram/Countdown-v0",
        num_envs=2,
        vectorization_mode=kind,
        lengths=(5, 4),
        frame_skip=3,
        categorical_action_encoding=True,
    )
    env.set_seed(0)
    batch = env.rollout(4, lambda td: td.set("action", torch.tensor([1, 0])), break_when_any_done=False)
    env.close()
    assert batch["observation"][..., 0].tolist() == [[5, 2, 4, 1]] * 2
    assert batch["next", "reward"].squeeze(-1).tolist() == [[4 + 3 + 2 + 30, 1 + 20, 6 + 30, 10], [9, 1, 6, 0]]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_pixels_of_several_environments(kind):
    env = GymEnv("engram/Shown-v0", num_envs=2, vectorization_mode=kind, from_pixels=True, pixels_only=False)
    env.set_seed(0)
    batch = env.rollout(4, break_when_any_done=False)
    env.close()
    assert batch["pixels"].shape == (2, 4, 4, 5, 3) and batch["pixels"].dtype is torch.uint8
    assert batch["next", "pixels"][..., 0, 0, 0].tolist() == batch["next", "observation"][..., 0].tolist()


@pytest.mark.parametrize("categorical", [False, True])
def test_actions_may_be_categories(categorical):
    env = GymEnv("engram/Nested-v0", num_envs=2, categorical_action_encoding=categorical)
    check_env_specs(env, seed=0, max_steps=10)


def test_the_outputs_of_several_environments_move_to_a_device():
    env = GymEnv("CartPole-v1", num_envs=2, device="cpu")
    batch = env.rollout(30, break_when_any_done=False)
    assert batch.device == torch.device("cpu") and batch["next"].device == torch.device("cpu")


@each(
    ("settings", "error", "message"),
    [
        ({"frame_skip": 2}, ValueError, "exists already"),
        ({"from_pixels": True}, ValueError, "exists already"),
        ({"num_envs": 3}, ValueError, "has 2"),
        ({"render_mode": "rgb_array"}, TypeError, "render_mode"),
    ],
)
def test_what_an_existing_vector_environment_cannot_become_is_refused(settings, error, message):
    with pytest.raises(error, match=message):
        GymEnv(Native(2), **settings)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="has no single environments"):
        GymEnv("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point", frame_skip=2)
    with pytest.raises(TypeError, match="needs a name"):
        GymEnv(Countdown(), num_envs=2)
    with pytest.raises(ValueError, match="num_envs must be an integer of 0"):
        GymEnv("CartPole-v1", num_envs=-1)


def test_workers_that_would_reset_twice_are_refused():
    with pytest.raises(ValueError, match="resets a second time"):
        made("CartPole-v1", AutoresetMode.NEXT_STEP, *LOCAL[:1], options=LOCAL[1])


def test_an_environment_that_hides_its_autoreset_mode_is_refused():
    envs = Native(2)
    envs.metadata = {}
    with pytest.raises(ValueError, match="autoreset_mode"):
        GymEnv(envs)


def test_an_environment_that_loses_last_observations_is_refused_when_it_does():
    class Loses(Native):
        def step(self, actions):
            return (*super().step(actions)[:4], {})

    env = GymEnv(Loses(2, AutoresetMode.SAME_STEP, lengths=(1,)))
    with pytest.raises(ValueError, match="final_obs"):
        env.rand_step(env.reset())


def test_a_child_class_that_changes_steps_is_not_stepped_behind_its_back():
    class Doubled(GymEnv):
        def _step(self, td):
            return super()._step(td).apply(lambda leaf: leaf)

    assert GymEnv("CartPole-v1", num_envs=2).vector_engine() is not None
    assert Doubled("CartPole-v1", num_envs=2).vector_engine() is None
    assert GymEnv("CartPole-v1").vector_engine() is None
    assert EnvBase.vector_engine(SerialEnv(1, lambda: GymEnv("CartPole-v1"))) is None


class Pool(Native):
    """As EnvPool's environments are: numbers of another source than gymnasium's, ids for a reset, float32 rewards."""

    def reset(self, env_id=None, *, seed=None, options=None):
        assert env_id is None
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        observation, reward, *rest = super().step(actions)
        return (observation, np.float32(reward), *rest)


def test_random_numbers_of_another_source_are_not_claimed_to_be_known():
    env = GymEnv(Pool(2))
    check_env_specs(env)
    env.rollout(5, break_when_any_done=False)
    assert env.random_state() is None
    asynchronous = made("CartPole-v1", AutoresetMode.SAME_STEP, "async", n=1)
    assert asynchronous.random_state() is None
    known = made("CartPole-v1", AutoresetMode.SAME_STEP, n=1)
    with pytest.raises(ValueError, match="use the same kind"):
        asynchronous.set_random_state(known.random_state())
    asynchronous.close()


class OldPool(gymnasium.Env):
    """As those of EnvPool 0.8 to 1.1, which say that they are single environments, and give batches of observations."""

    spec = SimpleNamespace(config=SimpleNamespace(num_envs=3))
    observation_space, action_space = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)


def test_an_environment_of_an_older_envpool_is_refused_with_the_version_that_works():
    with pytest.raises(TypeError, match=r"OldPool steps 3 environments together .* pip install 'envpool>=1.2'"):
        GymEnv(OldPool())


@pytest.mark.parametrize("mode", ["sync", "vector_entry_point"])
def test_an_environment_that_was_never_reset_takes_a_random_state(mode):
    def make():
        return GymEnv("CartPole-v1", num_envs=2, vectorization_mode=mode)

    first, second = make(), make()
    first.set_seed(3)
    first.reset()
    second.set_random_state(first.random_state())
    assert torch.equal(first.reset()["observation"], second.reset()["observation"])


def test_a_random_state_of_fewer_environments_is_refused():
    env = GymEnv("CartPole-v1", num_envs=2, vectorization_mode="sync")
    env.set_seed(3)
    env.reset()
    state = env.random_state()
    state["generator"]["each"].pop()
    with pytest.raises(ValueError, match=r"each in generator is .* it must be a list of 2"):
        env.set_random_state(state)


def test_closing_closes_the_environments_inside():
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    VectorEnv(GymVectorEngine(envs, categorical=False)).close()
    assert envs.closed
    closed, single = [], Countdown()
    single.close = lambda: closed.append(single)
    GymEnv(single).close()
    assert closed == [single]


class Reuses(gymnasium.Env):
    """Counts up in one array, which it gives at every step; a reset gives another dtype with `first`."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, first=np.float32):
        self.shown, self.first = np.zeros(2, np.float32), first

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown[:] = 0.5
        return self.shown.astype(self.first, copy=False), {}

    def step(self, action):
        self.shown += 1 + action
        return self.shown, int(action), bool(self.shown[0] > 4), np.bool_(self.shown[1] > 5), {"seen": 1}


gymnasium.register("engram/Reuses-v0", entry_point=Reuses, disable_env_checker=True)


@each(
    ("name", "settings"),
    [
        ("CartPole-v1", {}),
        ("MountainCarContinuous-v0", {}),
        ("FrozenLake-v1", {}),
        ("engram/Nested-v0", {}),
        ("engram/Reuses-v0", {}),
        ("engram/Reuses-v0", {"first": np.float64}),
    ],
)
def test_sync_environments_are_stepped_as_gymnasium_steps_them(name, settings):
    wrappers = {"from_pixels": False, "pixels_only": True, "frame_skip": None}
    one, other = (gym_make.make_vector(name, 3, {"vectorization_mode": "sync", **settings}, **wrappers) for _ in "ab")
    ours = gym_make.vector_engine(one, None, categorical=True, observation_key="observation")
    theirs = GymVectorEngine(other, categorical=True)
    assert isinstance(ours, gym_make.SyncEngine)
    theirs.env.action_space.seed(0)
    firsts = []
    for engine in (ours, theirs):
        engine.seed(5)
        firsts.append(copy.deepcopy(engine.reset()))
    assert data_equivalence(*firsts)
    has_ended = False
    for _ in range(200):
        action = theirs.env.action_space.sample()
        mine, expected = ours.step(action), theirs.step(action)
        assert data_equivalence(mine.observation, expected.observation, exact=True)
        for one, other in zip(mine[1:4], expected[1:4], strict=True):
            assert one.dtype == other.dtype and one.tolist() == other.tolist()
        assert data_equivalence(list(mine.last), list(expected.last)) and mine.idle is None
        has_ended = has_ended or bool(mine.last)
    assert has_ended or name == "MountainCarContinuous-v0"


@each("settings", [{"info_keys": ["prob"]}, {"vector_kwargs": {"autoreset_mode": AutoresetMode.NEXT_STEP}}])
def test_sync_environments_whose_infos_or_resets_matter_are_stepped_by_gymnasium(settings):
    env = GymEnv("FrozenLake-v1", num_envs=2, vectorization_mode="sync", **settings)
    assert not isinstance(env._stepper.engine, gym_make.SyncEngine)
