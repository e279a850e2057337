"""What clients rely on in environments and specs, with TorchRL's own modules and losses."""

import importlib
import math
import subprocess
import sys
from types import ModuleType

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn

from clients.packages import Package, sentence


def collector_of(rl: Package, env, frames_per_batch: int, total_frames: int):
    """A collector in this process, under the name that the package has."""
    names = ("SyncDataCollector", "Collector")
    kind = next(getattr(rl.collectors, name) for name in names if hasattr(rl.collectors, name))
    return kind(env, None, frames_per_batch=frames_per_batch, total_frames=total_frames)


# ---- specs ----
@sentence("Specs are hashable", not_in_torchrl="its specs define equality without a hash")
def specs_are_hashable(rl: Package) -> None:
    spec = rl.data.OneHot(3)
    assert {spec: 1}[rl.data.OneHot(3)] == 1
    assert hash(rl.data.Composite(a=spec)) == hash(rl.data.Composite(a=rl.data.OneHot(3)))


@sentence("Specs have `space` with `low`, `high` or `n`, `zero`/`zeros`, `one`/`ones`, `cardinality`")
def specs_have_spaces(rl: Package) -> None:
    spec = rl.data.Bounded(low=-2.0, high=3.0, shape=(2,))
    assert spec.space.low.tolist() == [-2.0, -2.0] and spec.space.high.tolist() == [3.0, 3.0]
    assert torch.equal(spec.zeros(), spec.zero()) and torch.equal(spec.ones((4,)), torch.ones(4, 2))
    assert rl.data.OneHot(3).space.n == rl.data.Categorical(3).space.n == rl.data.Categorical(3).cardinality() == 3
    assert int(rl.data.MultiCategorical([2, 3]).cardinality()) == 6 and spec.cardinality() == math.inf
    assert rl.data.Composite(a=rl.data.OneHot(3), b=rl.data.Categorical(2)).cardinality() == 6


@sentence("Every spec has `zero`, `zeros`, `one` and `ones`, of a batch too")
def specs_have_zeros_and_ones(rl: Package) -> None:
    d = rl.data
    specs = [d.Bounded(-2.0, 3.0, (2,)), d.Unbounded(3), d.OneHot(3), d.Categorical(3), d.Binary(3)]
    specs += [d.MultiCategorical([2, 3]), d.MultiOneHot([2, 3]), d.Categorical(3, shape=(2,))]
    for spec in specs:
        for makes, value in ((("zero", "zeros"), 0), (("one", "ones"), 1)):
            for name in makes:
                plain, batch = getattr(spec, name)(), getattr(spec, name)((4,))
                assert plain.shape == spec.shape and batch.shape == (4, *spec.shape) and plain.dtype == spec.dtype
                assert bool((plain == value).all()) and bool((batch == value).all())
    both = d.Composite(a=specs[0], b=d.Composite(c=specs[1]))
    assert both.one()["b", "c"].tolist() == [1.0] * 3 and both.zeros((4,))["a"].shape == (4, 2)


@sentence("Several choices go to one-hot vectors and back")
def several_choices_go_to_one_hot_and_back(rl: Package) -> None:
    one_hot, choices = rl.data.MultiOneHot([2, 3]), rl.data.MultiCategorical([2, 3])
    vector = one_hot.rand()
    assert torch.equal(one_hot.to_categorical_spec().to_one_hot(one_hot.to_categorical(vector)), vector)
    choice = choices.rand()
    assert torch.equal(choices.to_one_hot_spec().to_categorical(choices.to_one_hot(choice)), choice)


@sentence("The package is imported before torchrl's modules, and specs that were made before are known to these")
def specs_are_registered_late(rl: Package) -> None:
    script = (
        f"import sys, torch\nfrom {rl.name}.data import OneHot\nfrom tensordict import TensorDict\n"
        f"assert {rl.name!r} == 'torchrl' or 'torchrl' not in sys.modules\nspec = OneHot(3)\n"
        "from torchrl.modules import QValueModule\n"
        "made = QValueModule(spec=spec)(TensorDict({'action_value': torch.tensor([[1.0, 2.0, 0.0]])}, [1]))\n"
        "assert made['action'].int().tolist() == [[0, 1, 0]]\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-500:]


@sentence("Choices go to one-hot vectors and back")
def choices_go_to_one_hot_and_back(rl: Package) -> None:
    choice = torch.tensor([2, 0])
    vectors = rl.data.Categorical(3, shape=(2,)).to_one_hot(choice)
    assert vectors.tolist() == [[False, False, True], [True, False, False]]
    assert torch.equal(rl.data.OneHot(3, shape=(2, 3)).to_categorical(vectors), choice)
    assert rl.data.OneHot(3).to_categorical_spec().shape == () and rl.data.Categorical(3).to_one_hot_spec().shape == (
        3,
    )


@sentence("All specs are `TensorSpec`s, shapes may be numbers, a Composite takes `batch_size`-like shapes")
def specs_are_tensor_specs(rl: Package) -> None:
    composite = rl.data.Composite({"obs": rl.data.Unbounded(3)}, shape=[])
    assert isinstance(composite, rl.data.TensorSpec) and isinstance(composite["obs"], rl.data.TensorSpec)
    assert composite["obs"].shape == (3,) and composite.batch_size == ()


@sentence("`QValueActor(spec=)` acts, and `DQNLoss(action_space=)` learns with the action spec of an environment")
def q_learning_with_specs(rl: Package) -> None:
    from torchrl.modules import EGreedyModule, QValueActor, QValueModule
    from torchrl.objectives import DQNLoss, SoftUpdate

    env = rl.envs.GymEnv("CartPole-v1")
    actor = QValueActor(nn.Linear(4, 2), in_keys=["observation"], spec=env.action_spec)
    explore = EGreedyModule(env.action_spec, annealing_num_steps=10, eps_init=1.0)
    batch = env.rollout(5, TensorDictSequential(actor, explore), break_when_any_done=False)
    assert batch["action"].shape == (5, 2) and bool((batch["action"].sum(-1) == 1).all())
    loss = DQNLoss(actor, action_space=env.action_spec, delay_value=True)
    SoftUpdate(loss, eps=0.9)
    loss(batch)["loss"].backward()
    values = TensorDict({"action_value": torch.tensor([[1.0, 2.0, 0.0]])}, [1])
    assert QValueModule(spec=rl.data.Categorical(3))(values.clone())["action"].tolist() == [1]
    assert QValueModule(spec=rl.data.Composite(action=rl.data.OneHot(3)))(values)["action"].int().tolist() == [
        [0, 1, 0]
    ]


@sentence("`ProbabilisticActor` with `TanhNormal` between `spec.space.low` and `high`, `GAE`, PPO and SAC losses learn")
def continuous_control_with_specs(rl: Package) -> None:
    from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss, SACLoss
    from torchrl.objectives.value import GAE

    env = rl.envs.GymEnv("Pendulum-v1")
    spec = env.action_spec
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
        return_log_prob=True,
        safe=True,
    )
    with torch.no_grad():
        batch = env.rollout(6, actor)
    assert bool((batch["action"].abs() <= 2).all())
    value = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    GAE(gamma=0.9, lmbda=0.9, value_network=value)(batch)
    ClipPPOLoss(actor, value)(batch)["loss_objective"].backward()

    class Q(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
            return self.net(torch.cat([observation, action], -1))

    loss = SACLoss(actor, ValueOperator(Q(), in_keys=["observation", "action"]), action_spec=spec)
    assert float(loss.target_entropy) == -1.0
    loss(batch)["loss_qvalue"].backward()


@sentence("Noise modules take the action spec: Gaussian, Ornstein-Uhlenbeck; `Actor` and `TD3Loss`, too")
def noise_modules_with_specs(rl: Package) -> None:
    from torchrl.modules import Actor, AdditiveGaussianModule, ValueOperator
    from torchrl.modules.tensordict_module import OrnsteinUhlenbeckProcessModule
    from torchrl.objectives import TD3Loss

    env = rl.envs.TransformedEnv(rl.envs.GymEnv("Pendulum-v1"), rl.module("envs.transforms").InitTracker())
    actor = Actor(nn.Linear(3, 1), spec=env.action_spec)
    for noise in (AdditiveGaussianModule, OrnsteinUhlenbeckProcessModule):
        module = noise(spec=env.action_spec, annealing_num_steps=10)
        batch = env.rollout(4, TensorDictSequential(actor, module))
        assert batch["action"].shape == (4, 1) and bool((batch["action"].abs() <= 2).all())
    value = ValueOperator(nn.Bilinear(3, 1, 1), in_keys=["observation", "action"])
    TD3Loss(actor, value, action_spec=env.action_spec)(batch)["loss_qvalue"].backward()


@sentence(
    "A spec goes into a TorchRL Composite, and `to_torchrl` makes it one of TorchRL's", not_in_torchrl="ours only"
)
def specs_go_to_torchrl(rl: Package) -> None:
    from torchrl import data

    spec = rl.data.Bounded(-1, 1, (2,))
    assert data.Composite(action=spec).rand()["action"].shape == (2,)
    specs = [rl.data.OneHot(3), rl.data.Categorical(3), rl.data.MultiCategorical([2, 3]), rl.data.MultiOneHot([2, 3])]
    for one in (spec, *specs, rl.data.Binary(3), rl.data.Unbounded(3), rl.data.Composite(a=spec)):
        theirs = one.to_torchrl()
        assert isinstance(theirs, getattr(data, type(one).__name__)) and theirs.shape == one.shape
        assert isinstance(one, getattr(data, type(one).__name__)) and isinstance(one, data.TensorSpec)
    assert not isinstance(rl.data.OneHot(3), data.MultiOneHot)


# ---- environments ----
def counter_class(rl: Package):
    """An environment in TorchRL's form that adds its action to its state, which it reads from the TensorDict."""

    class Adder(rl.envs.EnvBase):
        batch_locked = False

        def __init__(self, goal: float = 3.0, batch_size=(), device="cpu"):
            super().__init__(device=device, batch_size=batch_size)
            b = self.batch_size
            limits = rl.data.Composite(goal=rl.data.Unbounded((*b, 1)), shape=b)
            self.observation_spec = rl.data.Composite(state=rl.data.Unbounded((*b, 1)), limits=limits, shape=b)
            self.state_spec = self.observation_spec.clone()
            self.action_spec = rl.data.Bounded(low=0.0, high=1.0, shape=(*b, 1), dtype=torch.float32)
            self.reward_spec = rl.data.Unbounded(shape=(*b, 1))
            self.goal = goal

        def _reset(self, tensordict, **kwargs):
            shape = self.batch_size if tensordict is None else tensordict.shape
            if tensordict is None or "limits" not in tensordict.keys():
                goal = torch.full((*shape, 1), self.goal)
            else:
                goal = tensordict["limits", "goal"]
            return TensorDict({"state": torch.zeros(*shape, 1), "limits": TensorDict({"goal": goal}, shape)}, shape)

        def _step(self, tensordict):
            state = tensordict["state"] + tensordict["action"]
            done = state >= tensordict["limits", "goal"]
            entries = {"state": state, "limits": tensordict["limits"], "reward": state.clone(), "done": done}
            return TensorDict(entries, tensordict.shape)

        def _set_seed(self, seed):
            self.seed_given = seed

    return Adder


def by_ones(td):
    return td.set("action", torch.ones(*td.shape, 1))


def check_adder(batch) -> None:
    assert batch["state"].squeeze(-1)[..., :3].reshape(-1, 3).tolist() == [[0.0, 1.0, 2.0]] * (
        batch.numel() // batch.shape[-1]
    )
    assert batch["next", "done"].squeeze(-1)[..., 2].all() and not batch["next", "done"].squeeze(-1)[..., :2].any()


@sentence("A custom environment (`_reset`, `_step`, `_set_seed`, specs set in its own `__init__`) rolls out")
def custom_environment_rolls_out(rl: Package) -> None:
    env = counter_class(rl)()
    rl.module("envs.utils").check_env_specs(env)
    env.set_seed(4)
    assert env.seed_given == 4
    batch = env.rollout(10, by_ones)
    check_adder(batch)
    assert batch.shape == (3,)
    assert batch["next", "reward"].flatten().tolist() == [1.0, 2.0, 3.0]


@sentence(
    "An environment with `batch_locked=False` steps TensorDicts of any batch size, and reads its parameters from them"
)
def unlocked_environment(rl: Package) -> None:
    env = counter_class(rl)()
    goal = torch.tensor([[2.0], [5.0]])
    start = TensorDict({"limits": TensorDict({"goal": goal}, [2])}, [2])
    stepped = env.step(by_ones(env.reset(start)))
    assert stepped["next", "state"].tolist() == [[1.0], [1.0]]
    batch = env.rollout(9, by_ones, auto_reset=False, tensordict=env.reset(start), break_when_any_done=True)
    assert batch.shape == (2, 2) and batch["next", "done"].squeeze(-1).tolist() == [[False, True], [False, False]]


@sentence("A batched custom environment is rolled out with its batch size")
def batched_custom_environment(rl: Package) -> None:
    env = counter_class(rl)(batch_size=(2,))
    batch = env.rollout(3, by_ones)
    check_adder(batch)
    assert batch.shape == (2, 3)


@sentence("A custom environment runs in `SerialEnv`, below transforms, and in a collector")
def custom_environment_in_series(rl: Package) -> None:
    transforms = rl.module("envs.transforms")
    env = rl.envs.SerialEnv(2, counter_class(rl))
    check_adder(env.rollout(3, by_ones))
    counted = rl.envs.TransformedEnv(counter_class(rl)(goal=1e9), transforms.StepCounter())
    assert counted.rollout(4, by_ones)["step_count"].flatten().tolist() == [0, 1, 2, 3]
    collector = collector_of(rl, rl.envs.SerialEnv(2, counter_class(rl)), 12, 24)
    assert [batch.shape for batch in collector] == [(2, 6), (2, 6)]
    collector.shutdown()


@sentence("A custom environment runs in `ParallelEnv`")
def custom_environment_in_parallel(rl: Package) -> None:
    env = rl.envs.ParallelEnv(2, counter_class(rl), mp_start_method="fork")
    try:
        check_adder(env.rollout(3, by_ones))
    finally:
        env.close()


@sentence("Rewards and flags without their last dimension get the shape of their spec")
def rewards_get_the_shape_of_their_spec(rl: Package) -> None:
    class Bare(rl.envs.EnvBase):
        def __init__(self):
            super().__init__(device="cpu", batch_size=[])
            self.observation_spec = rl.data.Composite(obs=rl.data.Unbounded(2))
            self.action_spec = rl.data.Categorical(2)
            self.reward_spec = rl.data.Unbounded(1)

        def _reset(self, tensordict=None, **kwargs):
            return TensorDict({"obs": torch.zeros(2)}, [])

        def _step(self, tensordict):
            entries = {"obs": torch.ones(2), "reward": torch.tensor(1.0), "done": torch.tensor(True)}
            return TensorDict({**entries, "terminated": torch.tensor(False)}, [])

        def _set_seed(self, seed):
            pass

    step = Bare().rand_step(Bare().reset())
    assert step["next", "reward"].shape == (1,) and step["next", "done"].tolist() == [True]
    assert step["next", "terminated"].tolist() == [False]


@sentence("`EnvBase` has its specs under all names, keys, and `append_transform`")
def environments_have_their_specs(rl: Package) -> None:
    env = rl.envs.SerialEnv(2, lambda: rl.envs.GymEnv("Pendulum-v1"))
    assert env.action_spec.shape == (2, 1) and env.action_spec_unbatched.shape == (1,)
    assert list(env.full_action_spec.keys()) == ["action"] == env.action_keys
    assert list(env.full_observation_spec.keys()) == ["observation"]
    assert list(env.full_reward_spec.keys()) == ["reward"] == env.reward_keys
    assert set(env.full_done_spec.keys()) == {"done", "terminated", "truncated"} == set(env.done_keys)
    assert set(env.input_spec.keys()) >= {"full_action_spec"} and env.state_spec.is_empty()
    assert set(env.output_spec.keys()) == {"full_observation_spec", "full_reward_spec", "full_done_spec"}
    assert set(env.specs.keys()) == {"input_spec", "output_spec"}
    assert env.specs["output_spec", "full_reward_spec", "reward"].shape == (2, 1)
    counted = env.append_transform(rl.module("envs.transforms").StepCounter())
    assert isinstance(counted, rl.envs.TransformedEnv) and "step_count" in counted.reset().keys()


@sentence("Nested actions, rewards and flags of several agents are rolled out and collected")
def several_agents(rl: Package) -> None:
    class Agents(rl.envs.EnvBase):
        def __init__(self):
            super().__init__(device="cpu", batch_size=[])
            group = {"obs": rl.data.Unbounded((2, 3))}
            self.observation_spec = rl.data.Composite(agents=rl.data.Composite(group, shape=(2,)))
            action = rl.data.Composite(action=rl.data.Categorical(4, shape=(2,)), shape=(2,))
            self.full_action_spec = rl.data.Composite(agents=action)
            reward = rl.data.Composite(reward=rl.data.Unbounded((2, 1)), shape=(2,))
            self.full_reward_spec = rl.data.Composite(agents=reward)

        def _reset(self, tensordict=None, **kwargs):
            self.step_count = 0
            return TensorDict({"agents": TensorDict({"obs": torch.zeros(2, 3)}, [2])}, [])

        def _step(self, tensordict):
            self.step_count += 1
            action = tensordict["agents", "action"]
            agents = {"obs": torch.full((2, 3), float(self.step_count)), "reward": action.unsqueeze(-1).float()}
            return TensorDict({"agents": TensorDict(agents, [2]), "done": torch.tensor([self.step_count >= 4])}, [])

        def _set_seed(self, seed):
            pass

    env = Agents()
    assert env.action_keys == [("agents", "action")] and env.reward_keys == [("agents", "reward")]
    batch = env.rollout(6, break_when_any_done=False)
    assert torch.equal(batch["next", "agents", "reward"].squeeze(-1), batch["agents", "action"].float())
    assert batch["agents", "obs"][:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 1.0]
    assert ("agents", "reward") not in batch.keys(True)
    for batch in collector_of(rl, Agents(), 6, 6):
        assert batch["agents", "obs"][:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 1.0]
    assert rl.envs.SerialEnv(2, Agents).rollout(3)["agents", "action"].shape == (2, 3, 2)


@sentence("The root device of a rollout is the environment's")
def root_device_of_rollouts(rl: Package) -> None:
    assert rl.envs.GymEnv("CartPole-v1", device="cpu").rollout(2).device == torch.device("cpu")
    assert rl.envs.GymEnv("CartPole-v1").rollout(2).device is None


@sentence("The root device of a collector's batches is the environment's", not_in_torchrl="it is None unless given")
def root_device_of_batches(rl: Package) -> None:
    collector = collector_of(rl, rl.envs.GymEnv("CartPole-v1", device="cpu"), 10, 10)
    assert next(iter(collector)).device == torch.device("cpu")
    collector.shutdown()


# ---- names ----
@sentence("Names are where scripts import them from: `envs.transforms.TransformedEnv`, `envs.libs.gym`, `envs.utils`")
def names_are_where_scripts_import_them(rl: Package) -> None:
    assert rl.module("envs.transforms").TransformedEnv is rl.envs.TransformedEnv
    gym = rl.module("envs.libs.gym")
    assert gym.GymEnv is rl.envs.GymEnv and gym.GymWrapper and gym.set_gym_backend is rl.envs.set_gym_backend
    utils = rl.module("envs.utils")
    for name in (
        "check_env_specs",
        "ExplorationType",
        "set_exploration_type",
        "exploration_type",
        "step_mdp",
        "RandomPolicy",
    ):
        assert hasattr(utils, name)


@sentence("`EnvCreator` and `set_gym_backend` pass through; `ParallelEnv(serial_for_single=True)` of one is in series")
def creators_pass_through(rl: Package) -> None:
    import gymnasium

    with rl.envs.set_gym_backend("gymnasium"):
        create = rl.envs.EnvCreator(lambda name: rl.envs.GymEnv(name), {"name": "CartPole-v1"})
        assert create().reset()["observation"].shape == (4,)
    assert rl.module("envs.libs.gym").gym_backend() is gymnasium
    env = rl.envs.ParallelEnv(1, create, serial_for_single=True)
    assert isinstance(env, rl.envs.SerialEnv) and env.rollout(2).shape == (1, 2)
    named = rl.envs.SerialEnv(num_workers=2, create_env_fn=create)
    assert named.batch_size == (2,)


@sentence("`step_mdp` takes the keys of actions, rewards and flags")
def step_mdp_takes_keys(rl: Package) -> None:
    root = {"agents": TensorDict({"obs": torch.zeros(1), "action": torch.zeros(1)}, [])}
    following = {
        "agents": TensorDict({"obs": torch.ones(1), "reward": torch.ones(1)}, []),
        "done": torch.ones(1).bool(),
    }
    td = TensorDict({**root, "next": TensorDict(following, [])}, [])
    moved = rl.module("envs.utils").step_mdp(
        td, action_keys=[("agents", "action")], reward_keys=[("agents", "reward")], exclude_done=True
    )
    assert set(moved.keys(True, True)) == {("agents", "obs")} and float(moved["agents", "obs"]) == 1.0


@sentence("`set_exploration_type` of either package governs TorchRL's modules")
def exploration_types_are_shared(rl: Package) -> None:
    from torchrl.envs.utils import ExplorationType, set_exploration_type
    from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal

    env = rl.envs.GymEnv("Pendulum-v1")
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    module = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
    actor = ProbabilisticActor(module, in_keys=["loc", "scale"], spec=env.action_spec, distribution_class=TanhNormal)
    state = env.reset()
    for utils in (rl.module("envs.utils"), sys.modules["torchrl.envs.utils"]):
        with utils.set_exploration_type(ExplorationType.DETERMINISTIC):
            assert rl.module("envs.utils").exploration_type() is ExplorationType.DETERMINISTIC
            assert torch.equal(actor(state.clone())["action"], actor(state.clone())["action"])
        with set_exploration_type(ExplorationType.RANDOM):
            assert not torch.equal(actor(state.clone())["action"], actor(state.clone())["action"])


@sentence(
    "`DMControlEnv` runs a task of the DeepMind Control Suite through shimmy",
    not_in_torchrl="it goes to dm_control directly, which is not installed",
)
def dm_control_through_shimmy(rl: Package) -> None:
    import gymnasium
    import numpy as np

    class Compatibility(gymnasium.Env):
        """Has the interface of shimmy's class, which is not installed here."""

        def __init__(self, task, render_mode=None):
            self.observation_space = gymnasium.spaces.Dict(position=gymnasium.spaces.Box(-9, 9, (2,), np.float64))
            self.action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float64)
            self.task = task

        def reset(self, seed=None, options=None):
            return {"position": np.zeros(2)}, {}

        def step(self, action):
            return {"position": np.ones(2)}, 1.0, False, False, {}

    suite, shimmy = ModuleType("dm_control.suite"), ModuleType("shimmy.dm_control_compatibility")
    suite.load = lambda domain, task, task_kwargs=None: (domain, task)
    shimmy.DmControlCompatibilityV0 = Compatibility
    fakes = {"dm_control": ModuleType("dm_control"), "dm_control.suite": suite, "shimmy": ModuleType("shimmy")}
    fakes["dm_control"].suite = suite
    fakes["shimmy.dm_control_compatibility"] = shimmy
    sys.modules.update(fakes)
    try:
        env = rl.envs.DMControlEnv("cheetah", "run", frame_skip=2)
        assert env.gym_env.unwrapped.task == ("cheetah", "run")
        batch = env.rollout(3)
        assert batch["position"].dtype == torch.float64 and batch["next", "reward"].flatten().tolist() == [2.0] * 3
    finally:
        for name in fakes:
            del sys.modules[name]


# ---- mixed use ----
@sentence(
    "An environment of here runs under TorchRL's transforms, in its SerialEnv and collector", not_in_torchrl="ours only"
)
def environments_go_to_torchrl(rl: Package) -> None:
    from torchrl import envs
    from torchrl.envs.transforms import RewardSum, StepCounter

    theirs = importlib.import_module("torchrl.collectors")

    def make():
        return rl.envs.GymEnv("CartPole-v1").to_torchrl()

    envs.check_env_specs(make())
    transformed = envs.TransformedEnv(envs.SerialEnv(2, make), envs.Compose(StepCounter(5), RewardSum()))
    batch = transformed.rollout(12, break_when_any_done=False)
    assert batch["next", "step_count"].max() == 5 and batch.shape == (2, 12)
    assert torch.equal(batch["next", "episode_reward"].long(), batch["next", "step_count"])
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(100), batch_size=4)
    for batch in theirs.Collector(make, None, frames_per_batch=50, total_frames=100):
        rb.extend(batch)
    assert len(rb) == 100 and rb.sample()["observation"].shape == (4, 4)


@sentence("Batched environments under TorchRL give the same episodes as alone", not_in_torchrl="ours only")
def batched_environments_go_to_torchrl(rl: Package) -> None:
    from torchrl import envs

    batches = []
    for adapt in (lambda env: env, lambda env: env.to_torchrl(), lambda env: envs.TransformedEnv(env.to_torchrl())):
        env = adapt(rl.envs.SerialEnv(2, lambda: rl.envs.GymEnv("CartPole-v1")))
        (env if isinstance(env, rl.envs.EnvBase) else getattr(env, "base_env", env).engram_env).set_seed(3)
        torch.manual_seed(0)
        batches.append(env.rollout(60, break_when_any_done=False))
    for batch in batches[1:]:
        assert bool(batch["next", "done"].any())
        for key in ("observation", "action", ("next", "observation"), ("next", "done"), ("next", "reward")):
            assert torch.equal(batch[key], batches[0][key])


@sentence(
    "TorchRL's classes that get an environment of here without `to_torchrl` say what to use", not_in_torchrl="ours only"
)
def torchrl_says_what_to_use(rl: Package) -> None:
    from torchrl import envs
    from torchrl.collectors import Collector

    env = rl.envs.GymEnv("CartPole-v1")
    for call in (
        lambda: envs.TransformedEnv(env, envs.StepCounter()).rollout(2),
        lambda: envs.SerialEnv(2, lambda: rl.envs.GymEnv("CartPole-v1")),
        lambda: Collector(env, None, frames_per_batch=10, total_frames=10),
        lambda: Collector(lambda: env, None, frames_per_batch=10, total_frames=10),
        lambda: envs.check_env_specs(env),
    ):
        try:
            call()
        except TypeError as error:
            assert "to_torchrl()" in str(error)
        else:
            raise AssertionError("TorchRL took it")


@sentence("TorchRL's environments and collectors fill buffers of here")
def torchrl_collectors_fill_buffers(rl: Package) -> None:
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv

    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(100), batch_size=4)
    for batch in Collector(lambda: GymEnv("CartPole-v1"), None, frames_per_batch=50, total_frames=100):
        rb.extend(batch)
    assert len(rb) == 100 and rb.sample()["next", "observation"].shape == (4, 4)


# ---- datasets ----
def episodes() -> TensorDict:
    """Steps of two episodes, of 3 and 2."""
    done = torch.tensor([0, 0, 1, 0, 1]).bool().unsqueeze(1)
    obs = torch.arange(5.0).unsqueeze(1)
    follows = {"observation": obs + 1, "reward": obs * 10, "terminated": done, "done": done}
    ids = TensorDict({"traj_ids": torch.tensor([0, 0, 0, 1, 1])}, [5])
    return TensorDict({"observation": obs, "action": obs, "collector": ids, "next": TensorDict(follows, [5])}, [5])


@sentence(
    "`MinariExperienceReplay(dataset_id, batch_size, root=)` is an immutable buffer with samplers and transforms",
    not_in_torchrl="it reads datasets through the package minari, which is not installed",
)
def minari_experience_replay(rl: Package) -> None:
    datasets = rl.module("data.datasets")
    datasets.write_minari(episodes(), "cart/pole-v0")
    sampler = rl.data.SliceSampler(num_slices=2, traj_key="episode", strict_length=False)
    rb = datasets.MinariExperienceReplay(
        "cart/pole-v0", batch_size=4, root=".", download=False, sampler=sampler, split_trajs=False
    )
    assert len(rb) == 5 and rb[:]["next", "reward"].flatten().tolist() == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert set(rb.sample()["episode"].tolist()) <= {0, 1}
    try:
        rb.extend(rb[:])
    except RuntimeError:
        pass
    else:
        raise AssertionError("a dataset was written")


@sentence(
    "`D4RLExperienceReplay(dataset_id, batch_size, root=)` is a buffer over a file",
    not_in_torchrl="it downloads files, or asks the package d4rl",
)
def d4rl_experience_replay(rl: Package) -> None:
    datasets = rl.module("data.datasets")
    datasets.write_hdf5(episodes(), "hopper-medium-v2.hdf5")
    rb = datasets.D4RLExperienceReplay(
        "hopper-medium-v2",
        4,
        rl.data.SamplerWithoutReplacement(),
        root=".",
        download=False,
        transform=lambda td: td.set("seen", td["action"] + 1),
    )
    batch = rb.sample()
    assert torch.equal(batch["seen"], batch["action"] + 1) and len(rb) == 5


@sentence(
    "`set_seed(seed, static_seed=True)` of environments and collectors: all begin with this seed, which is returned"
)
def static_seeds(rl: Package) -> None:
    single = rl.envs.GymEnv("CartPole-v1")
    single.set_seed(5)
    expected = single.reset()["observation"]
    env = rl.envs.SerialEnv(2, lambda: rl.envs.GymEnv("CartPole-v1"))
    assert single.set_seed(5, static_seed=True) == env.set_seed(5, static_seed=True) == 5
    assert torch.equal(env.reset()["observation"], expected.expand(2, 4))
    env.set_seed(5)
    first = env.reset()["observation"]
    assert not torch.equal(first[0], first[1])
    collector = collector_of(rl, rl.envs.GymEnv("CartPole-v1"), 4, 4)
    assert collector.set_seed(5, static_seed=True) == 5
    collector.shutdown()
