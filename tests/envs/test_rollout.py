"""`rollout`: recorded actions, devices, where the batch goes, and the names of arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from contracts.each import each
from contracts.gym_worlds import SPACES, Countdown, Echo
from engram.data import Categorical, Composite, Unbounded
from engram.envs import EnvBase, GymEnv, SerialEnv, step_mdp
from engram.testing.helpers import assert_equal


def cart_pole(**kwargs):
    return GymEnv("CartPole-v1", categorical_action_encoding=True, **kwargs)


@each(
    "given",
    [
        [1, 0, 1],
        np.array([1, 0, 1]),
        torch.tensor([1, 0, 1]),
        (TensorDict({"action": torch.tensor(a)}) for a in [1, 0, 1]),
    ],
)
def test_rollout_takes_recorded_actions_and_ends_with_the_last(given):
    assert cart_pole().rollout(10, actions=given)["action"].tolist() == [1, 0, 1]


def test_recorded_actions_end_with_max_steps():
    assert cart_pole().rollout(2, actions=iter([1, 0, 1]))["action"].tolist() == [1, 0]


def test_recorded_actions_of_a_batch_and_of_floats():
    env = SerialEnv(2, lambda: GymEnv(Echo(SPACES["box"], SPACES["box"])))
    actions = np.random.default_rng(0).uniform(-1, 1, (3, *env.action_spec.shape))  # float64, and the space is float32
    batch = env.rollout(3, actions=actions, break_when_any_done=False)
    assert torch.equal(batch["action"].transpose(0, 1), torch.as_tensor(actions, dtype=torch.float32))


@each(
    ("settings", "message"),
    [
        ({"actions": []}, "one action a step"),
        ({"actions": [1], "policy": torch.nn.Linear(4, 2)}, "not both"),
        ({"out": TensorDict(batch_size=[7])}, r"\(7,\).*\(3,\)"),
    ],
)
def test_rollout_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        cart_pole().rollout(3, **settings)


def test_recorded_actions_need_steps_that_do_not_only_reset():
    env = GymEnv("CartPole-v1", num_envs=2)  # its vector entry point has such rows
    with pytest.raises(ValueError, match="pass a policy"):
        env.rollout(3, actions=torch.zeros(3, 2, 2))


def test_several_actions_need_tensordicts():
    env = GymEnv(Echo(SPACES["box"], SPACES["dict"]))
    recorded = env.rollout(3)
    with pytest.raises(ValueError, match="several actions"):
        env.rollout(3, actions=[1])
    replayed = env.rollout(3, actions=recorded.unbind(0))
    assert (replayed["action"] == recorded["action"]).all()


def test_out_gets_the_batch_and_is_returned():
    env = cart_pole()
    out = env.fake_tensordict().expand(3).clone()
    kept = out["observation"]
    assert env.rollout(3, out=out) is out
    assert out["observation"] is kept and bool(kept.any())
    empty = TensorDict(batch_size=[3])
    assert "reward" in env.rollout(3, out=empty)["next"] and "action" in empty


class ElsewhereModule(torch.nn.Module):
    """A policy with a parameter on a device where no values can be, which says where its input was."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, device="meta"))
        self.seen = []

    def forward(self, observation):
        self.seen.append(observation.device.type)
        return torch.zeros((), dtype=torch.long, device=observation.device)


def test_auto_cast_moves_the_input_of_a_policy_to_its_parameters():
    inner = ElsewhereModule()
    policy = TensorDictModule(inner, in_keys=["observation"], out_keys=["action"])
    with pytest.raises((NotImplementedError, RuntimeError)):  # the action of a policy without values
        cart_pole().rollout(2, policy, auto_cast_to_device=True)
    assert inner.seen == ["meta"]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_auto_cast_brings_the_action_back(device):
    class Zero(torch.nn.Linear):
        def forward(self, observation):
            return observation.new_zeros((), dtype=torch.long)

    policy = TensorDictModule(Zero(4, 1), in_keys=["observation"], out_keys=["action"])
    batch = cart_pole(device=device).rollout(2, policy, auto_cast_to_device=True)
    assert batch.device == (None if device is None else torch.device(device))


def test_storing_device_is_that_of_the_batch():
    assert cart_pole().rollout(2, storing_device="meta")["observation"].device.type == "meta"
    assert cart_pole().rollout(2, storing_device="cpu").device == torch.device("cpu")
    assert cart_pole().rollout(2).device is None


def test_trusted_policy_gets_the_tensordict():
    def policy(observation):
        return observation.set("action", torch.tensor(0))

    with pytest.raises(AttributeError):
        cart_pole().rollout(1, policy)
    assert cart_pole().rollout(1, policy, trust_policy=True)["action"].tolist() == [0]


class Counter(EnvBase):
    """Counts on from the state that a reset gets."""

    def __init__(self):
        super().__init__(batch_size=())
        self.observation_spec = Composite(count=Unbounded(()))
        self.action_spec = Categorical(2)
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict=None, **kwargs):
        given = None if tensordict is None else tensordict.get("count", None)
        return TensorDict({"count": torch.zeros(()) if given is None else given.clone()})

    def _step(self, td):
        return TensorDict({"count": td["count"] + 1, "reward": torch.zeros(1), "done": torch.zeros(1).bool()})

    def _set_seed(self, seed):
        pass


@each(("set_state", "first"), [(None, 5.0), (True, 5.0), (False, 0.0)])
def test_set_state_says_whether_a_reset_reads_the_state(set_state, first):
    state = TensorDict({"count": torch.tensor(5.0)})
    assert Counter().rollout(2, tensordict=state, set_state=set_state)["count"][0] == first


@each(("settings", "steps"), [({}, 5), ({"break_when_all_done": True}, 5), ({"actions": [1]}, 1)])
def test_callback_is_called_between_two_steps_with_the_next_root(settings, steps):
    env, seen = GymEnv(Countdown(lengths=(5,)), categorical_action_encoding=True), []

    def note(where, td):
        assert where is env and "next" not in td.keys()
        seen.append((td["observation"][0].item(), td["action"].item()))
        td["note"] = torch.tensor([len(seen)])

    batch = env.rollout(10, callback=note, **settings)
    assert batch.shape == (steps,) and len(seen) == steps - 1
    assert [observation for observation, _ in seen] == batch["observation"][1:, 0].tolist()
    assert [action for _, action in seen] == batch["action"][:-1].tolist()
    assert steps == 1 or batch["note"].flatten().tolist() == list(range(steps))


def test_callback_of_a_rollout_that_resets_gets_the_step_and_changes_nothing():
    env, seen = GymEnv(Countdown(lengths=(2,)), categorical_action_encoding=True), []

    def note(where, td):
        seen.append(td.clone())
        td["note"] = torch.tensor([len(seen)])

    batch = env.rollout(5, callback=note, break_when_any_done=False)
    assert_equal(torch.stack(seen), batch[:-1])
    assert len(seen) == 4 and batch["next", "done"].any()


def test_set_state_is_refused_where_no_state_is_read():
    env = cart_pole()
    with pytest.raises(NotImplementedError, match="reads no state"):
        env.reset(env.reset(), set_state=True)
    with pytest.raises(NotImplementedError, match="reads no state"):
        Counter().rollout(2, set_state=True)


def test_none_of_break_when_any_done_is_its_default():
    world = GymEnv(Countdown(lengths=[3]))
    assert world.rollout(10, break_when_any_done=None, break_when_all_done=None).shape == (3,)
    assert world.rollout(10, break_when_any_done=False).shape == (10,)


def test_tensordict_is_the_name_of_the_argument():
    env = cart_pole()
    td = env.rand_action(tensordict=env.reset(tensordict=None))
    stepped, _ = env.step_and_maybe_reset(tensordict=td)
    following = env.step_mdp(next_tensordict=stepped)
    env.step(tensordict=env.rand_action(tensordict=env.maybe_reset(tensordict=following)))
    env.rand_step(tensordict=following)


def test_step_mdp_writes_into_a_given_tensordict():
    env, given = cart_pole(), TensorDict()
    stepped = env.rand_step(env.reset())
    assert step_mdp(tensordict=stepped, next_tensordict=given) is given
    assert torch.equal(given["observation"], stepped["next", "observation"])
    assert "action" in step_mdp(stepped, None, True, True, False, False)


@pytest.mark.parametrize(("num_envs", "names"), [(0, ["time"]), (2, [None, "time"])])
def test_the_dimension_of_the_steps_is_named_time(num_envs, names):
    assert GymEnv("CartPole-v1", num_envs=num_envs).rollout(3).names == names
