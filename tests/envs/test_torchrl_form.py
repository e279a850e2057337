"""Environments in TorchRL's form, which set their specs themselves, and the names that scripts use."""

import contextlib
import subprocess
import sys
from types import ModuleType

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from contracts.programs import run_program
from engram.collectors import SyncDataCollector
from engram.data import Bounded, Categorical, Composite, Unbounded
from engram.envs import (
    DMControlEnv,
    EnvBase,
    EnvCreator,
    GymEnv,
    ParallelEnv,
    SerialEnv,
    TransformedEnv,
    check_env_specs,
    gym_backend,
    set_gym_backend,
    step_mdp,
)
from engram.envs.transforms import RewardSum, StepCounter
from engram.testing import EnvContract


class Adder(EnvBase):
    """Adds its action to its state until it reaches a goal; both are read from the TensorDict."""

    batch_locked = False

    def __init__(self, goal=3.0, batch_size=(), device=None):
        super().__init__(device=device, batch_size=batch_size)
        b = self.batch_size
        limits = Composite(goal=Unbounded((*b, 1)), shape=b)
        self.observation_spec = Composite(state=Unbounded((*b, 1)), limits=limits, shape=b)
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Bounded(0.0, 1.0, (*b, 1))
        self.goal = goal

    def _reset(self, tensordict, **options):
        shape = self.batch_size if tensordict is None else tensordict.shape
        state = torch.full((*shape, 1), options.get("start", 0.0))
        if tensordict is None or "limits" not in tensordict.keys():
            goal = torch.full((*shape, 1), self.goal)
        else:
            goal = tensordict["limits", "goal"]
        return TensorDict({"state": state, "limits": TensorDict({"goal": goal}, shape)}, shape)

    def _step(self, tensordict):
        state = tensordict["state"] + tensordict["action"]
        done = state >= tensordict["limits", "goal"]
        return TensorDict(
            {"state": state, "limits": tensordict["limits"], "reward": state.clone(), "done": done}, tensordict.shape
        )

    def _set_seed(self, seed):
        pass


class Agents(EnvBase):
    """Two agents, whose actions, rewards and flags are nested; episodes last four steps."""

    def __init__(self):
        super().__init__(batch_size=[])
        self.observation_spec = Composite(agents=Composite(obs=Unbounded((2, 3)), shape=(2,)))
        self.full_action_spec = Composite(agents=Composite(action=Categorical(4, shape=(2,)), shape=(2,)))
        self.full_reward_spec = Composite(agents=Composite(reward=Unbounded((2, 1)), shape=(2,)))
        flag = Categorical(2, (2, 1), dtype=torch.bool)
        self.full_done_spec = Composite(agents=Composite(done=flag, shape=(2,)))

    def _reset(self, tensordict=None, **options):
        self.count = 0
        return TensorDict({"agents": TensorDict({"obs": torch.zeros(2, 3)}, [2])}, [])

    def _step(self, tensordict):
        self.count += 1
        reward = tensordict["agents", "action"].unsqueeze(-1).float()
        done = torch.tensor([[self.count >= 4], [False]])
        obs = torch.full((2, 3), float(self.count))
        return TensorDict({"agents": TensorDict({"obs": obs, "reward": reward, "done": done}, [2])}, [])

    def _set_seed(self, seed):
        pass


def by_ones(td):
    return td.set("action", torch.ones(*td.shape, 1))


def with_goals(*goals):
    return TensorDict({"limits": TensorDict({"goal": torch.tensor(goals).unsqueeze(1)}, [len(goals)])}, [len(goals)])


class TestAdder(EnvContract):
    def make(self):
        return Adder()


class TestBatchOfAdders(EnvContract):
    def make(self):
        return Adder(batch_size=(2,))


class TestAddersInSeries(EnvContract):
    def make(self):
        return SerialEnv(2, Adder)


class TestAdderBelowTransforms(EnvContract):
    def make(self):
        return TransformedEnv(Adder(), StepCounter())


# ---- custom environments ----
def test_the_batch_size_of_a_rollout_is_that_of_what_it_starts_from():
    batch = Adder().rollout(9, by_ones, tensordict=with_goals(2.0, 4.0), break_when_any_done=False)
    assert batch["state"].squeeze(-1).tolist() == [[0, 1, 0, 1, 0, 1, 0, 1, 0], [0, 1, 2, 3, 0, 1, 2, 3, 0]]
    check = Adder().rollout(9, by_ones, auto_reset=False, tensordict=Adder().reset(with_goals(2.0, 4.0)))
    assert check.shape == (2, 2)


@each("kind", ["alone", "in series", "parallel", "below transforms", "transforms in series"])
def test_a_reset_of_some_rows_reads_their_state(kind):
    with contextlib.ExitStack() as stack:
        if kind == "alone":
            env = Adder(batch_size=(2,))
        elif kind == "in series":
            env = SerialEnv(2, Adder)
        elif kind == "parallel":
            env = ParallelEnv(2, Adder, num_workers=1)
        elif kind == "below transforms":
            env = TransformedEnv(SerialEnv(2, Adder), StepCounter())
        else:
            env = SerialEnv(2, lambda: TransformedEnv(Adder(), StepCounter()))
        stack.callback(env.close)
        batch = env.rollout(9, by_ones, tensordict=with_goals(2.0, 4.0), break_when_any_done=False)
    assert batch["state"].squeeze(-1).tolist() == [[0, 1, 0, 1, 0, 1, 0, 1, 0], [0, 1, 2, 3, 0, 1, 2, 3, 0]]
    assert batch["limits", "goal"].squeeze(-1).tolist() == [[2.0] * 9, [4.0] * 9]
    if "transforms" in kind:
        assert batch["step_count"].equal(batch["state"].long())


def test_keywords_of_a_reset_reach_the_environment():
    for env in (Adder(), TransformedEnv(Adder(), StepCounter())):
        assert env.reset(TensorDict(), start=2.0)["state"].tolist() == [2.0]
    with pytest.raises(TypeError, match=r"takes no \['start'\]"):
        GymEnv("CartPole-v1").reset(start=2.0)


def test_a_collector_takes_an_environment_in_torchrls_form():
    with SyncDataCollector(SerialEnv(2, Adder), by_ones, frames_per_batch=12) as collector:
        batch = collector.rollout()
    assert batch["state"].squeeze(-1).tolist() == [[0, 1, 2, 0, 1, 2]] * 2
    assert batch["collector", "traj_ids"].tolist() == [[0, 0, 0, 2, 2, 2], [1, 1, 1, 3, 3, 3]]


def test_outputs_come_to_the_environments_device():
    env = Adder(device="cpu")
    step = env.rand_step(env.reset())
    assert step.device == torch.device("cpu") == step["next"].device
    assert env.rollout(3).device == torch.device("cpu") and Adder().rollout(3).device is None


def test_an_end_that_is_not_terminal_is_a_truncation():
    class Cut(Adder):
        def _step(self, tensordict):
            return super()._step(tensordict).set("terminated", torch.zeros(1).bool())

    last = Cut(goal=2.0).rollout(5, by_ones)[-1]["next"]
    assert last["done"].item() and last["truncated"].item() and not last["terminated"].item()


def test_rewards_and_flags_get_the_shape_of_their_spec_but_no_other_dtype():
    class Bare(Adder):
        def _step(self, tensordict):
            td = super()._step(tensordict)
            return td.set("reward", td["reward"].squeeze(-1).to(self.kind)).set("done", td["done"].squeeze(-1))

    env = Bare()
    env.kind = torch.float32
    assert env.rollout(3, by_ones)["next", "reward"].shape == (3, 1)
    env.kind = torch.float64
    with pytest.raises(ValueError, match=r"'reward' as torch\.float64"):
        env.rollout(3, by_ones)


def test_several_agents_have_nested_keys():
    env = Agents()
    assert env.action_keys == [("agents", "action")] and env.reward_keys == [("agents", "reward")]
    check_env_specs(env)
    for batch in (env.rollout(6, break_when_any_done=False), next(iter(SyncDataCollector(env, frames_per_batch=6)))):
        assert batch["agents", "obs"][:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 1.0]
        assert torch.equal(batch["next", "agents", "reward"].squeeze(-1), batch["agents", "action"].float())
        assert batch["next", "done"].flatten().tolist() == [False, False, False, True, False, False]
        assert ("agents", "reward") not in batch.keys(True)
    assert SerialEnv(2, Agents).rollout(3)["agents", "action"].shape == (2, 3, 2)


def test_several_agents_run_in_workers():
    env = ParallelEnv(2, Agents, num_workers=1)
    try:
        batch = env.rollout(6, break_when_any_done=False)
    finally:
        env.close()
    assert batch["agents", "obs"][:, :, 0, 0].tolist() == [[0.0, 1.0, 2.0, 3.0, 0.0, 1.0]] * 2
    assert torch.equal(batch["next", "agents", "reward"].squeeze(-1), batch["agents", "action"].float())


def test_a_policy_that_leaves_an_action_out_is_named():
    with pytest.raises(TypeError, match=r"with an \('agents', 'action'\) entry"):
        Agents().rollout(2, lambda td: td.set("action", torch.zeros(1)))
    env = Agents()
    with pytest.raises(KeyError, match=r"needs an \('agents', 'action'\)"):
        env.step(env.reset())


def test_settings_that_cannot_be_honoured_are_refused():
    class Own(Adder):
        def __init__(self, *specs, **settings):
            EnvBase.__init__(self, *specs, **settings)

    with pytest.raises(TypeError, match="auto_reset=True is not supported"):
        Own(auto_reset=True)
    with pytest.raises(TypeError, match="both observation_spec and action_spec"):
        Own(Composite())


# ---- what every environment has ----
def test_specs_have_all_their_names():
    env = SerialEnv(2, lambda: GymEnv("Pendulum-v1"))
    assert env.action_spec_unbatched.shape == (1,) and env.full_action_spec_unbatched["action"].shape == (1,)
    assert env.observation_spec_unbatched["observation"].shape == (3,) and env.reward_spec_unbatched.shape == (1,)
    assert env.done_spec_unbatched.shape == (1,) and env.full_action_spec["action"] == env.action_spec
    assert env.action_keys == ["action"] == [env.action_key] and env.reward_keys == ["reward"] == [env.reward_key]
    assert env.done_keys == ["done", "terminated", "truncated"] and env.done_key == "done"
    assert env.observation_keys == ["observation"] and env.state_keys == [] and env.state_spec.is_empty()
    assert env.specs["output_spec", "full_reward_spec", "reward"] == env.reward_spec == env.full_reward_spec["reward"]
    assert env.specs["input_spec", "full_action_spec", "action"] == env.action_spec
    assert env.output_spec["full_observation_spec"] == env.observation_spec == env.full_observation_spec
    assert env.shape == (2,) and env.ndim == 1 and env.numel() == 2


def test_append_transform_gives_the_environment_behind_it():
    env = GymEnv("CartPole-v1").append_transform(StepCounter())
    assert isinstance(env, TransformedEnv) and env.append_transform(RewardSum()) is env
    assert {"step_count", "episode_reward"} <= set(env.reset().keys())


def test_a_rollout_calls_back_and_marks_its_last_step():
    seen = []
    env = GymEnv("CartPole-v1")
    batch = env.rollout(3, None, lambda env, td: seen.append(td["observation"]), set_truncated=True)
    assert torch.stack(seen).equal(batch["observation"][1:])
    assert (
        batch["next", "truncated"].flatten().tolist()
        == [False, False, True]
        == batch["next", "done"].flatten().tolist()
    )


def test_a_rollout_goes_on_until_all_are_done():
    env = Adder(batch_size=(2,))
    batch = env.rollout(9, by_ones, tensordict=with_goals(2.0, 4.0), break_when_all_done=True)
    assert batch["next", "done"].squeeze(-1).tolist() == [[False, True, True, True], [False, False, False, True]]


def test_closing_twice_raises_where_that_is_asked_for():
    env = Adder()
    env.close()
    with pytest.raises(RuntimeError, match="was closed"):
        env.close(raise_if_closed=True)


def test_step_mdp_takes_the_keys_of_several_agents():
    agents = TensorDict({"obs": torch.zeros(1), "action": torch.ones(1)}, [])
    follows = {"agents": TensorDict({"obs": torch.ones(1), "reward": torch.ones(1)}, []), "done": torch.ones(1).bool()}
    td = TensorDict({"agents": agents, "next": TensorDict(follows, [])}, [])
    keys = {"action_keys": [("agents", "action")], "reward_keys": ("agents", "reward")}
    moved = step_mdp(td, exclude_done=True, **keys)
    assert set(moved.keys(True, True)) == {("agents", "obs")} and moved["agents", "obs"].item() == 1.0
    assert step_mdp(td, keep_other=False, exclude_action=False, **keys)["agents", "action"].item() == 1.0


# ---- names ----
def test_torchrls_names_of_arguments_are_taken():
    create = EnvCreator(GymEnv, {"name_or_env": "CartPole-v1"})
    assert SerialEnv(num_workers=2, create_env_fn=create, serial_for_single=True).batch_size == (2,)
    kwargs = [{"name_or_env": "CartPole-v1"}, {"name_or_env": "CartPole-v1"}]
    env = ParallelEnv(num_workers=2, create_env_fn=GymEnv, create_env_kwargs=kwargs, mp_start_method="fork")
    try:
        assert env.rollout(2).shape == (2, 2)
    finally:
        env.close()
    with pytest.raises(TypeError, match="only one of them"):
        SerialEnv(2, create, create_env_fn=create)
    with pytest.raises(ValueError, match="got 1 create_env_kwargs"):
        SerialEnv(2, GymEnv, create_env_kwargs=kwargs[:1])


def test_a_parallel_environment_of_one_may_be_in_series():
    env = ParallelEnv(1, lambda: GymEnv("CartPole-v1"), serial_for_single=True, num_workers=1)
    assert type(env) is SerialEnv and env.rollout(2).shape == (1, 2)


def test_the_only_library_of_gym_environments_is_gymnasium():
    with set_gym_backend("gymnasium") as backend:
        backend.set()
    assert set_gym_backend(gymnasium)(lambda: 3)() == 3 and gym_backend() is gymnasium
    with pytest.raises(ValueError, match="'brax' is not supported"):
        set_gym_backend("brax")


def test_an_environment_is_no_function():
    with pytest.raises(TypeError, match="give `lambda: env`"):
        SerialEnv(2, GymEnv("CartPole-v1"))


class Compatibility(gymnasium.Env):
    """What shimmy makes of a task."""

    observation_space = gymnasium.spaces.Dict(position=gymnasium.spaces.Box(-9, 9, (2,), np.float64))
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float64)

    def __init__(self, task, render_mode=None, **options):
        self.task, self.render_mode, self.options = task, render_mode, options

    def reset(self, seed=None, options=None):
        return {"position": np.zeros(2)}, {}

    def step(self, action):
        return {"position": np.ones(2)}, 1.0, False, False, {}


def test_a_task_of_the_control_suite_is_made_through_shimmy(monkeypatch):
    suite, shimmy = ModuleType("dm_control.suite"), ModuleType("shimmy.dm_control_compatibility")
    suite.load = lambda domain, task, task_kwargs=None: (domain, task, task_kwargs)
    shimmy.DmControlCompatibilityV0 = Compatibility
    package = ModuleType("dm_control")
    package.suite = suite
    for module in (package, suite, ModuleType("shimmy"), shimmy):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    env = DMControlEnv("cheetah", "run", frame_skip=2, task_kwargs={"random": 1}, render_kwargs={"camera_id": 3})
    inner = env.gym_env.unwrapped
    assert inner.task == ("cheetah", "run", {"random": 1}) and inner.options == {"camera_id": 3}
    with SyncDataCollector(env, frames_per_batch=3) as collector:
        batch = collector.rollout()
    assert batch["position"].dtype is torch.float64 and batch["next", "reward"].flatten().tolist() == [2.0] * 3


def test_without_shimmy_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dm_control", None)
    with pytest.raises(ImportError, match=r'pip install "engram\[dm-control\]"'):
        DMControlEnv("cheetah", "run")


# ---- TorchRL, as a stand-in with the same names ----
STAND_IN = {
    "__init__.py": "",
    "data/__init__.py": "from torchrl.data.tensor_specs import *\nimport torchrl.data.utils\n",
    "data/tensor_specs.py": """
import abc
class TensorSpec(abc.ABC):
    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
    def __setitem__(self, key, value):
        self.kwargs[key] = value
names = "Unbounded Bounded Categorical Binary MultiCategorical OneHot MultiOneHot Composite Stacked StackedComposite"
for name in names.split():
    globals()[name] = type(TensorSpec)(name, (TensorSpec,), {})
""",
    "data/utils.py": "from torchrl.data.tensor_specs import OneHot\nACTION_SPACE_MAP = {OneHot: 'one_hot'}\n",
}
REGISTERED = """
spec = engram.specs.OneHot(3)
theirs = torchrl.data
assert theirs.utils.ACTION_SPACE_MAP[type(spec)] == 'one_hot'
assert isinstance(spec, theirs.OneHot) and isinstance(spec, theirs.TensorSpec)
assert not isinstance(spec, theirs.MultiOneHot) and isinstance(engram.specs.Composite(), theirs.Composite)
made = engram.specs.Bounded(-1, 1, (2,)).to_torchrl()
assert type(made) is theirs.Bounded and made.kwargs['low'].tolist() == [-1.0, -1.0] and made.kwargs['shape'] == (2,)
nested = engram.specs.Composite(a=spec, b=None).to_torchrl()
assert type(nested.args[0]['a']) is theirs.OneHot and nested.args[0]['b'] is None
of_theirs = theirs.Composite()
of_theirs["a"] = spec
assert type(of_theirs.kwargs["a"]) is theirs.OneHot
import sys
assert not any(type(finder).__name__ == '_RegisterAfterImport' for finder in sys.meta_path)
"""


@pytest.mark.deep
@pytest.mark.parametrize("first", ["torchrl", "engram"])
def test_specs_are_registered_with_torchrl_whichever_is_imported_first(first, tmp_path):
    for name, text in STAND_IN.items():
        (tmp_path / "torchrl" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "torchrl" / name).write_text(text)
    imports = ["import torchrl.data", "import engram.specs"]
    program = "\n".join([*(imports if first == "torchrl" else reversed(imports)), REGISTERED])
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    if first == "engram":  # as in the process that programs are forks of
        run_program(path + program).check_returncode()
    else:
        subprocess.run([sys.executable, "-c", path + program], check=True)


def test_without_torchrl_nothing_is_made_for_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrl.data", None)
    monkeypatch.setitem(sys.modules, "torchrl.envs", None)
    with pytest.raises(ImportError, match=r"import torchrl\.data"):
        Unbounded(2).to_torchrl()
    with pytest.raises(ImportError, match=r"import torchrl\.envs"):
        GymEnv("CartPole-v1").to_torchrl()


def test_rows_that_are_no_steps_do_not_go_to_torchrl():
    with pytest.raises(TypeError, match="rows that are no steps"):
        GymEnv("CartPole-v1", num_envs=2).to_torchrl()


def test_what_torchrl_asks_of_its_own_environments_only_says_what_to_use():
    for env in (GymEnv("CartPole-v1"), TransformedEnv(GymEnv("CartPole-v1"))):
        with pytest.raises(TypeError, match=r"env\.to_torchrl\(\)"):
            _ = env._has_dynamic_specs
        assert not hasattr(env, "_anything_else")


def test_environments_say_whether_a_reset_reads_a_state():
    single = GymEnv("CartPole-v1")
    for env in (single, TransformedEnv(single), SerialEnv(2, lambda: GymEnv("CartPole-v1"))):
        assert env._supports_set_state is False
        with pytest.raises(NotImplementedError):
            env.reset(TensorDict({}, env.batch_size), set_state=True)
    for env in (Agents(), TransformedEnv(Agents(), StepCounter())):
        assert env._supports_set_state is True
        env.reset(TensorDict({}, env.batch_size), set_state=True)


def test_the_rewards_of_a_group_of_agents_are_added_up():
    env = TransformedEnv(Agents(), RewardSum(in_keys=[("agents", "reward")]))
    following = env.rollout(4)["next", "agents"]
    assert torch.equal(following["episode_reward"], following["reward"].cumsum(0))
    with pytest.raises(KeyError, match=r"\('agents', 'reward'\)"):
        TransformedEnv(Agents(), RewardSum(in_keys=[("agents", "gain")]))
