"""Random chains of transforms in environments against plain Python, and against the same chains on stored steps."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.gym_worlds import Countdown
from engram.envs import GymEnv, SerialEnv, TransformedEnv, check_env_specs
from engram.envs.transforms import (
    CatFrames,
    Compose,
    InitTracker,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    StepCounter,
)
from engram.testing.transform import assert_equal


class Model:
    """One environment with its chain, in plain Python: lists of numbers."""

    def __init__(self, lengths, chain):
        self.lengths, self.chain, self.episode, self.total = lengths, chain, -1, 0

    def reset(self):
        self.episode += 1
        self.left = self.lengths[self.episode % len(self.lengths)]
        self.memory = [{} for _ in self.chain]
        return self.shown({"x": [float(self.left), float(self.total)]}, first=True)

    def step(self, action):
        self.left, self.total = self.left - 1, self.total + 1
        state = {"x": [float(self.left), float(self.total)], "reward": float(self.left + 10 * action)}
        state["done"] = self.left == 0
        return self.shown(state, first=False)

    def shown(self, state, first):
        for (name, value), memory in zip(self.chain, self.memory, strict=True):
            getattr(self, name)(state, value, memory, first)
        return state

    def norm(self, state, value, memory, first):
        state["x"] = [x * value + 1 for x in state["x"]]

    def scale(self, state, value, memory, first):
        if not first:
            state["reward"] = state["reward"] * value + 2

    def frames(self, state, value, memory, first):
        n, padding = value
        if first:
            pad = [-3.0] * len(state["x"]) if padding == "constant" else state["x"]
            memory["frames"] = [pad] * (n - 1)
        memory["frames"] = [*memory["frames"], state["x"]][-n:]
        state["x"] = [x for frame in memory["frames"] for x in frame]

    def sum(self, state, value, memory, first):
        memory["sum"] = 0.0 if first else memory["sum"] + state["reward"]
        state[f"sum{value}"] = memory["sum"]

    def count(self, state, value, memory, first):
        memory["count"] = 0 if first else memory["count"] + 1
        state["step_count"] = memory["count"]
        if value is not None and memory["count"] >= value:
            state["done"] = True

    def init(self, state, value, memory, first):
        state["is_init"] = first


def made(name, value):
    return {
        "norm": lambda: ObservationNorm(1.0, value, ["observation"]),
        "scale": lambda: RewardScaling(2.0, value),
        "frames": lambda: CatFrames(value[0], -1, ["observation"], padding=value[1], padding_value=-3.0),
        "sum": lambda: RewardSum(["reward"], [f"sum{value}"]),
        "count": lambda: StepCounter(max_steps=value),
        "init": lambda: InitTracker(),
    }[name]()


# Numbers that floats hold exactly, however they are summed.
links = st.one_of(
    st.tuples(st.just("norm"), st.sampled_from([2, -1])),
    st.tuples(st.just("scale"), st.sampled_from([2, -1])),
    st.tuples(st.just("frames"), st.tuples(st.integers(1, 3), st.sampled_from(["same", "constant"]))),
    st.tuples(st.just("sum"), st.integers(0, 9)),
    st.tuples(st.just("count"), st.one_of(st.none(), st.integers(1, 5))),
    st.tuples(st.just("init"), st.none()),
)
chains = st.lists(links, max_size=5).filter(lambda c: sum(v[0] if n == "frames" else 0 for n, v in c) < 7)
episodes = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3)


def world(lengths, chain, cut):
    def bare():
        envs = [Countdown(lengths=ls) for ls in lengths]
        return SerialEnv(len(envs), [lambda e=e: GymEnv(e, categorical_action_encoding=True) for e in envs])

    inner = TransformedEnv(bare(), [made(*link) for link in chain[:cut]])
    return TransformedEnv(inner, [made(*link) for link in chain[cut:]]) if cut < len(chain) else inner


def as_list(td, key):
    return td[key].squeeze(-1).tolist()


@settings(max_examples=16, deadline=None)
@given(
    lengths=episodes,
    chain=chains,
    cut=st.integers(0, 5),
    actions=st.lists(st.integers(0, 2), min_size=12, max_size=12),
)
def test_any_chain_is_that_of_plain_python(lengths, chain, cut, actions):
    env = world(lengths, chain, cut)
    models = [Model(ls, chain) for ls in lengths]
    keys = [*(f"sum{v}" for n, v in chain if n == "sum"), *("step_count" for n, _ in chain if n == "count")]
    keys += ["is_init" for n, _ in chain if n == "init"]
    td, states = env.reset(), [model.reset() for model in models]

    def compare(found, wanted, also):
        assert found["observation"].tolist() == [state["x"] for state in wanted]
        for key in [*keys, *also]:
            assert as_list(found, key) == [state[key] for state in wanted], key

    for action in actions:
        compare(td, states, [])
        step, td = env.step_and_maybe_reset(td.set("action", torch.full((len(lengths),), action)))
        after = [model.step(action) for model in models]
        compare(step["next"], after, ["reward", "done"])
        states = [m.reset() if state["done"] else state for m, state in zip(models, after, strict=True)]
    check_env_specs(env)


@settings(max_examples=12, deadline=None)
@given(lengths=episodes, chain=chains)
def test_a_rollout_with_transforms_is_what_they_make_of_stored_steps(lengths, chain):
    chain = [(name, None if name == "count" else value) for name, value in chain]  # truncation is known live only

    def act(td):
        return td.set("action", torch.ones(len(lengths), dtype=torch.int64))

    bare = world(lengths, chain, len(chain)).base_env.rollout(12, act, break_when_any_done=False)
    found = world(lengths, chain, len(chain)).rollout(12, act, break_when_any_done=False)
    both = ["observation", ("next", "observation")]
    stored = {
        "norm": lambda v: ObservationNorm(1.0, v, both),
        "frames": lambda v: CatFrames(v[0], -1, both, padding=v[1], padding_value=-3.0),
        "sum": lambda v: RewardSum([("next", "reward")], [("next", f"sum{v}")]),
        "scale": lambda v: RewardScaling(2.0, v),
        "count": lambda v: StepCounter(),
        "init": lambda v: InitTracker(),
    }
    offline = Compose(*(stored[name](value) for name, value in chain)).forward(bare)
    for key in offline.keys(True, True):
        assert_equal(found[key], offline[key])
