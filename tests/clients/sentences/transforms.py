"""What clients rely on in transforms, in buffers and in environments."""

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

from clients.packages import Package, sentence


class Lives(gym.Env):
    """Observes how many steps it took; every second one costs one of three lives, and the last of them the episode."""

    observation_space = gym.spaces.Box(0, 100, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    class Emulator:
        count = 3

        def lives(self):
            return self.count

    def __init__(self):
        self.ale = self.Emulator()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ale.count, self.steps = 3, 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        self.ale.count -= self.steps % 2 == 0
        return np.full(2, self.steps, np.float32), self.steps - 3.0, self.ale.count == 0, False, {}


gym.register("ClientLives-v0", Lives)


def lives(rl: Package, *transforms: object) -> object:
    return rl.envs.TransformedEnv(rl.envs.GymEnv("ClientLives-v0"), rl.envs.Compose(*transforms))


def buffer(rl: Package, transform: object, batch_size: int = 4) -> object:
    storage = rl.data.LazyTensorStorage(20)
    return rl.data.TensorDictReplayBuffer(storage=storage, transform=transform, batch_size=batch_size)


def numbers(n: int = 8) -> TensorDict:
    return TensorDict({"x": torch.arange(float(n)).unsqueeze(-1)}, [n])


# ---- in buffers ----
@sentence("A transform's inverse runs on writing: what is stored is what it makes")
def inverses_run_on_writing(rl: Package) -> None:
    rb = buffer(rl, rl.envs.ObservationNorm(1.0, 2.0, in_keys=["x"], in_keys_inv=["x"]))
    rb.extend(numbers())
    torch.testing.assert_close(rb.storage[:]["x"], (numbers()["x"] - 1) / 2)
    torch.testing.assert_close(rb[:]["x"], numbers()["x"])


@sentence("An own transform with `_inv_call` changes what is written")
def own_inv_call(rl: Package) -> None:
    class Doubled(rl.envs.Transform):
        def _inv_call(self, td):
            return td.set("x", td.get("x") * 2)

    rb = buffer(rl, Doubled())
    rb.extend(numbers())
    assert rb.storage[:]["x"].flatten().tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


@sentence("An own transform with `_apply_transform` and `_inv_apply_transform` changes the entries that its keys name")
def own_transform_by_keys(rl: Package) -> None:
    class Bytes(rl.envs.Transform):
        def _apply_transform(self, x):
            return x.float() / 10

        def _inv_apply_transform(self, x):
            return (x * 10).to(torch.uint8)

    rb = buffer(rl, Bytes(in_keys=["x"], out_keys=["x"], in_keys_inv=["x"], out_keys_inv=["x"]))
    rb.extend(numbers())
    assert rb.storage[:]["x"].dtype == torch.uint8 and rb[:]["x"].flatten().tolist() == list(range(8))


@sentence(
    "An own transform whose inverse names no entries is refused by name", not_in_torchrl="it does nothing, silently"
)
def an_inverse_without_keys_is_refused(rl: Package) -> None:
    class Nameless(rl.envs.Transform):
        def _inv_apply_transform(self, x):
            return x * 2

    try:
        buffer(rl, Nameless())
    except TypeError as error:
        assert "Nameless" in str(error) and "in_keys_inv" in str(error)
    else:
        raise AssertionError("it was accepted")


@sentence("TorchRL's own transforms in a buffer are honoured whole, their inverses and their Compose too")
def transforms_of_torchrl_in_a_buffer(rl: Package) -> None:
    import torchrl.envs.transforms as T

    cast = T.DTypeCastTransform(torch.float16, torch.float32, in_keys=["x"], in_keys_inv=["x"])
    rb = buffer(rl, T.Compose(cast, T.UnsqueezeTransform(-1, in_keys=["x"], in_keys_inv=["x"])))
    rb.extend(TensorDict({"x": torch.arange(8.0).reshape(8, 1)}, [8]))
    assert rb.storage[:]["x"].dtype == torch.float16 and rb.storage[:]["x"].shape == (8,)
    assert rb.sample()["x"].dtype == torch.float32


@sentence(
    "Any object with `forward` and `inv` is a transform: its inverse runs on writing",
    not_in_torchrl="it must be a module, whose `inv` is not called",
)
def any_object_is_a_transform(rl: Package) -> None:
    class Halves:
        def forward(self, td):
            return td.set("x", td["x"] / 2)

        def inv(self, td):
            return td.set("x", td["x"] * 2)

    for rb in (buffer(rl, Halves()), rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(20), batch_size=9)):
        if not len(rb._transform):
            rb.append_transform(Halves())
        rb.extend(numbers())
        rb.add(numbers()[3])
        assert rb.storage[:]["x"].flatten().tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 6]
        assert set(rb.sample()["x"].flatten().tolist()) <= set(range(8))


@sentence(
    "A transform of TorchRL's that an environment cannot honour is refused by its name",
    not_in_torchrl="these are its own",
)
def transforms_are_refused_by_name(rl: Package) -> None:
    import torchrl.envs.transforms as T

    for transform in (T.NextObservationDelta(), T.MultiStepTransform(n_steps=2, gamma=0.5)):
        try:
            lives(rl, transform)
        except TypeError as error:
            assert type(transform).__name__ in str(error)
        else:
            raise AssertionError(f"{transform} was accepted")


@sentence(
    "Every transform that `envs.transforms` has is in `envs`, too", not_in_torchrl="some are in `envs.transforms` only"
)
def transforms_are_in_both_modules(rl: Package) -> None:
    transforms = rl.module("envs.transforms")
    names = getattr(transforms, "__all__", None) or [name for name in dir(transforms) if name[0].isupper()]
    classes = [name for name in names if isinstance(getattr(transforms, name), type)]
    public = [name for name in classes if issubclass(getattr(transforms, name), rl.envs.Transform)]
    assert len(public) > 25 and [name for name in public if not hasattr(rl.envs, name)] == []


@sentence("`envs` and `envs.transforms` export every transform that scripts import")
def transforms_are_exported(rl: Package) -> None:
    for module in (rl.envs, rl.module("envs.transforms")):
        for name in (
            "CatFrames", "CatTensors", "ClipTransform", "Compose", "DTypeCastTransform", "DoubleToFloat",
            "EndOfLifeTransform", "ExcludeTransform", "FlattenObservation", "GrayScale", "InitTracker",
            "MultiStepTransform", "NoopResetEnv", "ObservationNorm", "RenameTransform", "Resize", "Reward2GoTransform",
            "RewardScaling", "RewardSum", "SelectTransform", "SignTransform", "StepCounter", "TensorDictPrimer",
            "ToTensorImage", "TrajCounter", "Transform", "UnsqueezeTransform", "VecNorm",
        ):  # fmt: skip
            assert callable(getattr(module, name)), name


@sentence("`data` exports every checkpointer")
def checkpointers_are_exported(rl: Package) -> None:
    for name in ("Flat", "H5", "List", "Nested", "Tensor"):
        assert issubclass(getattr(rl.data, f"{name}StorageCheckpointer"), rl.data.StorageCheckpointerBase)
    assert issubclass(rl.data.StorageEnsembleCheckpointer, rl.data.StorageCheckpointerBase)


@sentence("`MultiStep` is a module: a new TensorDict, its argument stays, its entries have the batch's shape")
def multi_step_is_a_module(rl: Package) -> None:
    done = torch.tensor([0, 0, 1, 0, 0]).bool().unsqueeze(-1)
    following = {"x": torch.arange(1.0, 6).unsqueeze(-1), "reward": torch.ones(5, 1), "done": done, "terminated": done}
    batch = numbers(5).set("next", TensorDict(following, [5]))
    before = batch.clone()
    postproc = rl.data.MultiStep(gamma=0.5, n_steps=2).to("cpu")
    made = postproc(batch)
    assert isinstance(postproc, torch.nn.Module) and made is not batch and bool((batch == before).all())
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert made["steps_to_next_obs"].tolist() == [2, 2, 1, 2, 1] and made["gamma"].tolist() == [
        0.25,
        0.25,
        0.5,
        0.25,
        0.5,
    ]
    assert made["nonterminal"].tolist() == [True, True, False, True, False]
    assert made["next", "reward"].flatten().tolist() == [1.5, 1.5, 1.0, 1.5, 1.0]


@sentence("`MultiStep` of batches [environments, time] gives entries of that shape")
def multi_step_of_several_environments(rl: Package) -> None:
    done = torch.zeros(2, 5, 1, dtype=torch.bool)
    done[0, 2] = True
    x = torch.arange(10.0).view(2, 5, 1)
    following = {"x": x + 1, "reward": torch.ones(2, 5, 1), "done": done, "terminated": done}
    batch = TensorDict({"x": x, "next": TensorDict(following, [2, 5])}, [2, 5])
    made = rl.data.MultiStep(gamma=0.5, n_steps=2)(batch)
    assert made["steps_to_next_obs"].tolist() == [[2, 2, 1, 2, 1], [2, 2, 2, 2, 1]]
    assert made["gamma"].shape == made["nonterminal"].shape == (2, 5) and made["nonterminal"].dtype is torch.bool
    assert made["nonterminal"].tolist() == [[True, True, False, True, False], [True, True, True, True, False]]


@sentence("`NextStateReconstructor` makes next observations of the rows that follow, NaN at the end of a trajectory")
def next_states_are_reconstructed(rl: Package) -> None:
    batch = numbers(6).set("collector", TensorDict({"traj_ids": torch.arange(6) // 4}, [6]))
    batch["next"] = TensorDict({"done": (torch.arange(6) % 4 == 3).unsqueeze(-1)}, [6])
    made = rl.module("envs.transforms").NextStateReconstructor(keys=["x"])(batch)["next", "x"].flatten()
    assert made[[0, 1, 2, 4]].tolist() == [1, 2, 3, 5] and made.isnan().nonzero().flatten().tolist() == [3, 5]


@sentence("`CatFrames.make_rb_transform_and_sampler`: a buffer of single frames whose samples are stacks")
def stacks_of_frames_from_a_buffer(rl: Package) -> None:
    frames = rl.envs.CatFrames(N=3, dim=-1, in_keys=["observation"], out_keys=["stack"])
    env = lives(rl, frames)
    env.reset()
    transform, sampler = env.transform[0].make_rb_transform_and_sampler(batch_size=12, traj_key="episode")
    storage = rl.data.LazyTensorStorage(100)
    rb = rl.data.ReplayBuffer(storage=storage, sampler=sampler, transform=transform, batch_size=12)
    x = torch.arange(30.0).unsqueeze(-1)
    done = (torch.arange(30) % 10 == 9).unsqueeze(-1)
    following = {"observation": x + 1, "done": done}
    rb.extend(TensorDict({"observation": x, "episode": torch.arange(30) // 10, "next": following}, [30]))
    batch = rb.sample()
    assert batch.shape == (12,) and batch["stack"].shape == batch["next", "stack"].shape == (12, 3)
    assert torch.equal(batch["stack"][:, -1:], batch["observation"])
    inner = batch["observation"].flatten() % 10 >= 2
    assert bool((batch["stack"][inner].diff(dim=-1) == 1).all())


# ---- in environments ----
@sentence(
    "An own transform with `_call`, `_reset` and `transform_observation_spec` works in an environment, `parent` too"
)
def own_transform_in_an_environment(rl: Package) -> None:
    class Twice(rl.envs.Transform):
        def _call(self, td):
            return td.set("twice", td.get("observation") * 2)

        def _reset(self, td, fresh):
            return self._call(fresh).set("counted", torch.tensor([len(self.parent.observation_spec.keys())]))

        def _step(self, td, following):
            return self._call(following).set("counted", td["counted"])

        def transform_observation_spec(self, spec):
            spec["twice"] = spec["observation"].clone()
            spec["counted"] = rl.data.Unbounded((1,), dtype=torch.int64)
            return spec

    env = lives(rl, rl.envs.StepCounter(), Twice())
    rollout = env.rollout(3)
    assert torch.equal(rollout["twice"], rollout["observation"] * 2)
    assert torch.equal(rollout["next", "twice"], rollout["next", "observation"] * 2)
    assert rollout["counted"].flatten().tolist() == [2, 2, 2] and "twice" in env.observation_spec.keys()


@sentence("TorchRL's own transforms work in the package's TransformedEnv")
def transforms_of_torchrl_in_an_environment(rl: Package) -> None:
    import torchrl.envs.transforms as T

    frames = T.CatFrames(N=2, dim=-1, in_keys=["observation"], out_keys=["stack"])
    env = lives(rl, T.StepCounter(4), T.RewardSum(), T.InitTracker(), frames)
    rollout = env.rollout(6, break_when_any_done=False)
    assert rollout["step_count"].flatten().tolist() == [0, 1, 2, 3, 0, 1]
    assert rollout["next", "episode_reward"].flatten().tolist() == [-2, -3, -3, -2, -2, -3]
    assert rollout["is_init"].flatten().tolist() == [True, False, False, False, True, False]
    assert rollout["stack"].shape == (6, 4) and env.observation_spec["stack"].shape == (4,)


@sentence("`DoubleToFloat` casts float64 to float32, and back on writing")
def double_to_float(rl: Package) -> None:
    rb = buffer(rl, rl.envs.DoubleToFloat(in_keys=["x"], in_keys_inv=["x"]))
    rb.extend(numbers())
    assert rb.storage[:]["x"].dtype == torch.float64 and rb.sample()["x"].dtype == torch.float32


@sentence("`CatTensors` concatenates observations in the order of their names, and removes them")
def cat_tensors(rl: Package) -> None:
    batch = TensorDict({"b": torch.ones(3, 1), "a": torch.zeros(3, 2)}, [3])
    made = rl.envs.CatTensors(in_keys=["b", "a"], out_key="vector")(batch)
    assert made["vector"][0].tolist() == [0, 0, 1] and list(made.keys()) == ["vector"]
    env = lives(rl, rl.envs.CatTensors(in_keys=["observation"], out_key="vector", del_keys=False))
    assert env.rollout(2)["next", "vector"].shape == (2, 2) and env.observation_spec["vector"].shape == (2,)


@sentence("`SignTransform` and `ClipTransform` on rewards, with the bounds in the spec")
def signs_and_limits(rl: Package) -> None:
    env = lives(rl, rl.envs.SignTransform(in_keys=["reward"]))
    assert env.rollout(6)["next", "reward"].flatten().tolist() == [-1, -1, 0, 1, 1, 1]
    env = lives(rl, rl.envs.ClipTransform(in_keys=["reward"], low=-1.5, high=2.5))
    assert env.rollout(6)["next", "reward"].flatten().tolist() == [-1.5, -1, 0, 1, 2, 2.5]
    space = env.reward_spec.space
    torch.testing.assert_close(torch.cat([space.low, space.high]), torch.tensor([-1.5, 2.5]))
    for settings, error in (({}, TypeError), ({"low": 1, "high": 0}, ValueError)):
        try:
            rl.envs.ClipTransform(in_keys=["reward"], **settings)
        except error:
            continue
        raise AssertionError(f"{settings} was accepted")


@sentence("`NoopResetEnv` begins episodes with actions that nobody sees")
def first_actions(rl: Package) -> None:
    env = lives(rl, rl.envs.NoopResetEnv(3, random=False))
    assert env.rollout(2)["observation"][:, 0].tolist() == [3, 4]


@sentence("`EndOfLifeTransform` marks the steps that cost a life by `env.unwrapped.ale.lives()`")
def end_of_life(rl: Package) -> None:
    env = lives(rl, rl.envs.EndOfLifeTransform())
    rollout = env.rollout(8, break_when_any_done=False)
    assert rollout["next", "end-of-life"].flatten().tolist() == [False, True] * 4
    assert rollout["lives"].flatten().tolist() == [3, 3, 2, 2, 1, 1, 3, 3]


@sentence("`TensorDictPrimer` begins episodes with a hidden state, which the policy carries on under `next`")
def primers(rl: Package) -> None:
    def policy(td):
        td["action"] = rl.data.OneHot(2).rand()
        return td.set(("next", "hidden"), td["hidden"] + 1)

    env = lives(rl, rl.envs.TensorDictPrimer(hidden=rl.data.Unbounded((3,)), default_value=5.0))
    rollout = env.rollout(8, policy, break_when_any_done=False)
    assert rollout["hidden"][:, 0].tolist() == [5, 6, 7, 8, 9, 10, 5, 6]
    assert rollout["next", "hidden"].shape == (8, 3)


@sentence("`TrajCounter` numbers the trajectories of all environments, and goes on at the next reset")
def trajectories_are_numbered(rl: Package) -> None:
    env = rl.envs.SerialEnv(2, lambda: rl.envs.GymEnv("ClientLives-v0"))
    env = rl.envs.TransformedEnv(env, rl.envs.Compose(rl.envs.StepCounter(2), rl.envs.TrajCounter()))
    counts = env.rollout(6, break_when_any_done=False)["traj_count"].squeeze(-1)
    assert counts.tolist() == [[0, 0, 2, 2, 4, 4], [1, 1, 3, 3, 5, 5]]
    assert env.reset()["traj_count"].flatten().tolist() == [6, 7]


@sentence("`Compose.clone()` is a copy that can be used in another environment")
def composes_are_cloned(rl: Package) -> None:
    env = lives(rl, rl.envs.StepCounter(3), rl.envs.RewardSum())
    other = rl.envs.TransformedEnv(rl.envs.GymEnv("ClientLives-v0"), env.transform.clone())
    assert other.rollout(9).shape == env.rollout(9).shape == (3,)


@sentence("`ObservationNorm.init_stats(num_iter=, reduce_dim=, cat_dim=, keep_dims=)` takes steps of the environment")
def statistics_of_an_environment(rl: Package) -> None:
    env = lives(rl, rl.envs.ObservationNorm(in_keys=["observation"], standard_normal=True))
    env.transform[0].init_stats(num_iter=6, reduce_dim=0, cat_dim=0)
    torch.testing.assert_close(env.transform[0].loc, torch.full((2,), 2.5))
    torch.testing.assert_close(env.transform[0].scale, torch.full((2,), 3.5).sqrt())
    batch = rl.envs.SerialEnv(2, lambda: rl.envs.GymEnv("ClientLives-v0"))
    norm = rl.envs.ObservationNorm(in_keys=["observation"])
    env = rl.envs.TransformedEnv(batch, norm)
    env.transform.init_stats(num_iter=12, reduce_dim=(0, 1), cat_dim=1, keep_dims=(1,))
    assert env.transform.loc.shape == (1, 2)


@sentence("`Transform.register_buffer`: a tensor that is an attribute, in `state_dict`, loaded, and moved by `to`")
def transforms_register_tensors(rl: Package) -> None:
    class Centred(rl.envs.Transform):
        def __init__(self, mean):
            super().__init__(in_keys=["x"], out_keys=["x"])
            self.register_buffer("mean", torch.tensor(mean))

        def _apply_transform(self, value):
            return value - self.mean

    transform, other = Centred(2.0), Centred(0.0)
    rb = buffer(rl, transform)
    rb.extend(numbers(4))
    assert rb[:]["x"].flatten().tolist() == [-2, -1, 0, 1]
    other.load_state_dict(transform.state_dict())
    assert float(other.mean) == 2
    assert other.to(torch.float64) is other and other.mean.dtype == torch.float64
