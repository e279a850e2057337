"""Every transform with default keys takes the rewards and flags of its environment, nested and several."""

from __future__ import annotations

import inspect

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram import transforms
from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.envs import EnvBase, SerialEnv, TransformedEnv, check_env_specs
from engram.specs import Bounded, Categorical, Composite, Unbounded
from engram.transforms import Compose, Transform

FLAGS = ("done", "terminated", "truncated")
AGENTS, LENGTH = 2, 4


class Groups(EnvBase):
    """Episodes of four steps; each of `groups` has a reward `[*batch, 2, 1]` and flags, () is the root.

    `names` are the rewards in each group.
    """

    def __init__(self, groups=(("agents",),), batch=(), names=("reward",), dtype=torch.float32):
        super().__init__(batch_size=batch)
        self.groups, self.names, self.dtype, self.time = groups, names, dtype, 0
        shape = (*batch, AGENTS)
        self.observation_spec = self.nested(
            {(): {"observation": Unbounded((*shape, 3))}, **{g: {"place": Unbounded((*shape, 1))} for g in groups if g}}
        )
        self.action_spec = Categorical(4, shape=shape)
        reward = Bounded(-20, 20, (*shape, 1), dtype=dtype)
        self.reward_spec = self.nested({g: dict.fromkeys(names, reward) for g in groups})
        flag = Categorical(2, shape=(*shape, 1), dtype=torch.bool)
        flags = {g: dict.fromkeys(("done", "terminated"), flag) for g in groups if g}
        if flags:
            self.done_spec = self.nested(flags)

    def nested(self, of_groups):
        root = Composite(of_groups.get((), {}), shape=self.batch_size)
        for group, specs in of_groups.items():
            for name in reversed(group):
                specs = {name: Composite(specs, shape=self.batch_size)}
            root.update(specs)
        return root

    def state(self, stepped):
        shape = (*self.batch_size, AGENTS)
        td = TensorDict({"observation": torch.full((*shape, 3), float(self.time))}, self.batch_size)
        ended = torch.tensor(self.time >= LENGTH)
        for group in self.groups:
            if group:
                td.set((*group, "place"), torch.full((*shape, 1), float(self.time)))
            flags = ended.expand(*shape, 1) if group else ended.expand(*self.batch_size, 1)
            td.set((*group, "done"), flags.clone()).set((*group, "terminated"), flags.clone())
            for k, name in enumerate(self.names if stepped else ()):
                scale = torch.tensor([3.0, -2.0]).unsqueeze(-1) + k
                td.set((*group, name), (scale * self.time - 4).expand(*shape, 1).to(self.dtype))
        return td

    def _reset(self, tensordict=None, **kwargs):
        self.time = 0
        return self.state(stepped=False)

    def _step(self, tensordict):
        self.time += 1
        return self.state(stepped=True)

    def _set_seed(self, seed):
        pass


#: Arguments of those that cannot be made without any.
ARGUMENTS = {
    "ActionScaling": None,  # of an action that these environments do not have
    "CatFrames": {"N": 2, "dim": -1, "in_keys": ["observation"]},
    "CenterCrop": None,
    "ClipTransform": {"low": -1.0, "high": 1.0},
    "DTypeCastTransform": {"dtype_in": torch.float32, "dtype_out": torch.float64},
    "EndOfLifeTransform": None,  # of environments with lives
    "GrayScale": None,  # of images
    "ToTensorImage": None,
    "FlattenObservation": {"first_dim": -2, "last_dim": -1, "in_keys": ["observation"]},
    "ObservationNorm": {"loc": 0.0, "scale": 2.0, "in_keys": ["observation"]},
    "NoopResetEnv": {"noops": 2, "random": False},
    "RandomTruncationTransform": {"min_horizon": 2, "max_horizon": 2},
    "RenameTransform": {"in_keys": ["observation"], "out_keys": ["seen"]},
    "Resize": None,  # of images
    "RewardClipping": {"clamp_min": -1.0, "clamp_max": 1.0},
    "RewardScaling": {"loc": 1.0, "scale": 2.0},
    "MultiStepTransform": {"n_steps": 2, "gamma": 0.5},
    "StepCounter": {"max_steps": 3},
    "TargetReturn": {"target_return": 10.0},
    "TensorDictPrimer": {"hidden": Unbounded((2,))},
    "UnsqueezeTransform": {"dim": -1, "in_keys": ["observation"]},
    "VecNorm": {"in_keys": ["observation"]},
    "VecNormV2": {"in_keys": ["observation"]},
}
REGISTERED = [
    name
    for name in transforms.__all__
    if inspect.isclass(kind := getattr(transforms, name)) and issubclass(kind, Transform) and kind is not Transform
]
SINGLE = {"FrameSkipTransform", "NoopResetEnv"}  # of one environment
OF_BUFFERS = {"MultiStepTransform", "NextStateReconstructor", "RandomCropTensorDict", "Reward2GoTransform"}


def made(name):
    arguments = ARGUMENTS.get(name, {})
    if arguments is None:
        return None
    transform = getattr(transforms, name)(**arguments)
    return Compose(transforms.StepCounter(), transform) if name == "RandomTruncationTransform" else transform


IN_ENVIRONMENTS = [name for name in REGISTERED if name not in OF_BUFFERS and ARGUMENTS.get(name, {}) is not None]
WORLDS = {
    "nested": {},
    "several groups": {"groups": (("a",), ("b", "c"))},
    "root and nested": {"groups": ((), ("agents",))},
    "several names": {"names": ("reward", "gain")},
    "several at the root": {"groups": ((),), "names": ("reward", "gain")},
    "other name": {"groups": ((),), "names": ("gain",)},
    "integers": {"dtype": torch.int64},
    "batched": {"batch": (3,)},
}


def leaves(td):
    return {key if isinstance(key, tuple) else (key,): value for key, value in td.items(True, True)}


def check(name, world):
    """The environment with this transform gives what its specs say, alone and in a collector."""
    if name in SINGLE and world == "batched":
        return
    if name == "TargetReturn" and len(WORLDS[world].get("names", "r")) > 1:
        with pytest.raises(ValueError, match=r"TargetReturn would write one .*: give it in_keys and out_keys"):
            TransformedEnv(Groups(**WORLDS[world]), made(name))
        return
    env = TransformedEnv(Groups(**WORLDS[world]), made(name))
    check_env_specs(env)
    following = SyncDataCollector(env, frames_per_batch=6 * env.numel()).rollout()["next"]
    for key in env.done_keys:
        assert following.get(key, None) is not None, key
    for key, spec in {**env.full_reward_spec.leaves(), **env.observation_spec.leaves()}.items():
        assert spec.is_in(following.get(key).select(env.ndim, 0)), key


@each("name", IN_ENVIRONMENTS)
def test_environments_with_rewards_and_flags_of_groups_keep_their_specs(name):
    check(name, "several groups")


@pytest.mark.deep
@each("name", IN_ENVIRONMENTS)
@each("world", WORLDS)
def test_environments_with_rewards_and_flags_anywhere_keep_their_specs(name, world):
    check(name, world)


@each("name", IN_ENVIRONMENTS)
def test_rewards_of_groups_are_changed_as_a_single_one_is(name):
    def rollout(env):
        torch.manual_seed(0)
        return leaves(env.rollout(5, break_when_any_done=False)["next"])

    groups = (("a",), ("b", "c"))
    before = rollout(Groups(((),)))
    after, nested = (rollout(TransformedEnv(Groups(where), made(name))) for where in (((),), groups))
    changed = {key for key in after if key not in before or not torch.equal(after[key], before[key])}
    for key in changed - {("observation_vector",)}:  # of all observations, which the groups have more of
        found = [nested.get((*group, *key)) for group in groups]
        for value in [nested[key]] if any(one is None for one in found) else found:
            if value.shape == after[key].shape or key[0] not in FLAGS:
                assert torch.equal(value, after[key]), (groups, key)


@each("name", ["StepCounter", "RandomTruncationTransform"])
def test_episodes_that_are_cut_end_for_all_agents(name):
    transform = transforms.StepCounter(max_steps=3) if name == "StepCounter" else made(name)
    following = TransformedEnv(Groups((("a",), ("b", "c"))), transform).rollout(8, break_when_any_done=False)["next"]
    cut = following["truncated"].squeeze(-1)
    assert cut.any()
    for group in (("a",), ("b", "c")):
        for flag in ("done", "truncated"):
            assert following[(*group, flag)].squeeze(-1)[cut].all(), (group, flag)


@each("kind", ["RewardSum", "RewardScaling", "RewardClipping", "TargetReturn", "Reward2GoTransform"])
def test_batches_whose_rewards_are_nested_are_changed_as_in_the_environment(kind):
    batch = Groups((("a",), ("b", "c"))).rollout(8, break_when_any_done=False)
    plain = Groups(((),)).rollout(8, break_when_any_done=False)
    changed, expected = made(kind)(batch.clone()), made(kind)(plain.clone())
    before = leaves(plain)
    for key, value in leaves(expected).items():
        if key in before and torch.equal(value, before[key]):
            continue
        root = key[:1] if key[0] == "next" else ()
        for group in (("a",), ("b", "c")):
            assert torch.equal(changed[(*root, *group, *key[len(root) :])], value), (group, key)


def test_rewards_of_groups_are_summed_over_n_steps():
    written, plain = (
        made("MultiStepTransform").inv(Groups(where).rollout(8, break_when_any_done=False))["next"]
        for where in ((("a",), ("b", "c")), ((),))
    )
    for group in (("a",), ("b", "c")):
        for name in ("reward", "original_reward"):
            assert torch.equal(written[(*group, name)], plain[name])


def test_batches_without_rewards_are_refused_by_name():
    for kind in ("RewardSum", "RewardScaling", "TargetReturn", "Reward2GoTransform"):
        with pytest.raises(KeyError, match=rf"{kind} needs the key .*'reward'"):
            made(kind)(TensorDict({"next": {"done": torch.ones(3, 1).bool()}, "done": torch.zeros(3, 1).bool()}, [3]))


def test_clipped_rewards_of_groups_have_bounds():
    env = TransformedEnv(Groups((("a",), ("b",))), transforms.RewardClipping(-1.0, 1.0))
    assert {(float(s.low.min()), float(s.high.max())) for s in env.full_reward_spec.leaves().values()} == {(-1.0, 1.0)}


def test_several_environments_of_agents_sum_their_rewards():
    env = TransformedEnv(SerialEnv(2, Groups), transforms.RewardSum())
    following = env.rollout(LENGTH)["next", "agents"]
    assert torch.equal(following["episode_reward"], following["reward"].cumsum(1))


def test_selected_entries_come_with_the_rewards_and_flags_of_groups():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), transform=transforms.SelectTransform("observation"), batch_size=4)
    rb.extend(Groups().rollout(LENGTH))
    kept = leaves(rb.sample())
    assert ("next", "agents", "reward") in kept and ("agents", "done") in kept and ("agents", "place") not in kept


@each(
    "make",
    [lambda: transforms.ExcludeTransform("agents"), lambda: transforms.RenameTransform([("agents", "reward")], ["r"])],
)
def test_rewards_and_flags_of_groups_stay(make):
    with pytest.raises(ValueError, match="rewards and flags"):
        TransformedEnv(Groups(), make())


def child_of(kind, *names):
    """A child whose methods of these names only call those of their parent."""

    def calling(name):
        def method(self, *args):
            return getattr(super(child, self), name)(*args)

        return method

    child = type(f"Child{kind.__name__}", (kind,), {name: calling(name) for name in names})
    return child


@each("names", [("forward",), ("_call",), ("_reset", "_step"), ("_apply_transform",), ("_inv_apply_transform",)])
@each("kind, arguments", [("RewardClipping", (-1.0, 1.0)), ("RewardScaling", (0.0, 0.5))])
@each("groups", [((),), (("a",), ("b",))])
def test_child_whose_methods_call_their_parents_has_its_rewards_and_specs(names, kind, arguments, groups):
    kind = getattr(transforms, kind)
    envs = [TransformedEnv(Groups(groups), one(*arguments)) for one in (kind, child_of(kind, *names))]
    parent, child = (leaves(env.rollout(6, break_when_any_done=False)["next"]) for env in envs)
    assert parent.keys() == child.keys() and all(torch.equal(parent[key], child[key]) for key in parent)
    assert envs[0].full_reward_spec == envs[1].full_reward_spec
    assert all(isinstance(spec, Bounded) for spec in envs[1].full_reward_spec.leaves().values())


def test_child_that_does_more_than_its_parent_has_no_bounds_of_it():
    class Larger(transforms.RewardClipping):
        def _step(self, td, following):
            following = super()._step(td, following)
            return following.set("reward", following["reward"] * 100)

    env = TransformedEnv(Groups(((),)), Larger(-1.0, 1.0))
    assert isinstance(env.reward_spec, Unbounded) and env.rollout(3)["next", "reward"].max() == 100


def test_child_with_an_inverse_that_calls_its_parents_is_taken():
    kind = child_of(transforms.RewardSum, "_inv_apply_transform")
    assert "episode_reward" in TransformedEnv(Groups(((),)), kind()).rollout(3)["next"].keys()
    with pytest.warns(UserWarning, match="in_keys_inv"):
        rb = ReplayBuffer(storage=LazyTensorStorage(20), transform=kind(), batch_size=4)
    rb.extend(Groups(((),)).rollout(LENGTH))
    assert "episode_reward" in rb[:]["next"].keys()
