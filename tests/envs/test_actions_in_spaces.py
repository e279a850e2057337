"""Every action that is drawn, or decoded from a policy's tensor, is contained in the space of its environment."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from contracts.each import each
from contracts.tiers import in_quick
from engram.collectors import SyncDataCollector
from engram.envs import GymEnv, ParallelEnv, SerialEnv
from engram.specs import Spec, Text


class Echo(gymnasium.Env[Any, Any]):
    """Shows the action of the last step, which must be one of the space, of the type that the space's samples have."""

    def __init__(self, space: Any) -> None:
        self.action_space = space
        self.observation_space = spaces.Dict(echo=space)
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return {"echo": self.action_space.sample()}, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} ({type(action).__name__}) is not in {self.action_space}"
        sample = self.action_space.sample()
        assert forms_of(action) == forms_of(sample), (action, sample)
        self.t += 1
        return {"echo": copy.deepcopy(action)}, 1.0, self.t == 3, False, {}


gymnasium.register("engram/EchoSpace-v0", entry_point=Echo, disable_env_checker=True)


def forms_of(value: Any) -> Any:
    """The types of a raw value and its parts; of arrays the dtype, in native byte order.

    An array without dimensions is as a number: gymnasium's vector environments, and its samples, give one or the other.
    """
    if isinstance(value, dict):
        return {key: forms_of(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(forms_of, value))
    if isinstance(value, np.ndarray):
        return (np.ndarray, value.dtype.newbyteorder("=")) if value.ndim else value.dtype.type
    return type(value)


def in_vector(space: Any, mode: AutoresetMode, encoding: dict[str, bool]) -> Any:
    return GymEnv(SyncVectorEnv([lambda: Echo(space)] * 2, autoreset_mode=mode), **encoding)


def by_name(space: Any, encoding: dict[str, bool]) -> Any:
    settings = {"num_envs": 2, "vectorization_mode": "sync", "space": space}
    return GymEnv("engram/EchoSpace-v0", **settings, **encoding)


MAKERS = {
    "alone": lambda space, encoding: GymEnv(Echo(space), **encoding),
    "in a series": lambda space, encoding: SerialEnv(2, lambda: GymEnv(Echo(space), **encoding)),
    "reset in the next step": lambda space, encoding: in_vector(space, AutoresetMode.NEXT_STEP, encoding),
    "reset in the same step": lambda space, encoding: in_vector(space, AutoresetMode.SAME_STEP, encoding),
    "reset by the caller": lambda space, encoding: in_vector(space, AutoresetMode.DISABLED, encoding),
    "made by name": by_name,
}
ENCODINGS = [{"categorical_action_encoding": is_categorical} for is_categorical in (False, True)]


def as_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers in another dtype, where it can hold them."""
    other = value.to(dtype)
    is_same = torch.equal(other.to(value.dtype), value) and torch.equal(other.double(), value.double())
    return other if is_same else value


def in_dtype(action: Any, dtype: torch.dtype) -> Any:
    if isinstance(action, torch.Tensor):
        return as_dtype(action, dtype)
    return action.apply(lambda value: as_dtype(value, dtype))


def assert_echoed(batch: TensorDict, spec: Spec) -> None:
    """The stored actions are of the spec, and their values those that the environments got."""
    assert spec.is_in(batch["action"])
    action, shown = batch["action"], batch["next", "echo"]
    pairs = (
        [(action, shown)]
        if isinstance(action, torch.Tensor)
        else zip(action.values(True, True), shown.values(True, True), strict=True)
    )
    for stored, echo in pairs:
        assert torch.equal(stored, echo)


def collect(env: Any, dtype: torch.dtype | None, frames: int) -> None:
    """Two batches of a policy that draws actions of its own and casts them to `dtype`; None: of the random policy."""

    def policy(td: Any) -> Any:
        return td.set("action", in_dtype(env.action_spec.rand(), dtype))

    collector = SyncDataCollector(
        env, None if dtype is None else policy, frames_per_batch=frames, init_random_frames=frames // 2
    )
    for _ in range(2):
        assert_echoed(collector.rollout(), env.action_spec_unbatched)
    collector.shutdown()


def step(env: Any) -> None:
    td = env.reset()
    for _ in range(2):
        td = env.step(env.rand_action(td))
        assert_echoed(td, env.action_spec)
        td = td["next"].exclude("reward")


USES = {
    "steps": step,
    "at random": lambda env: collect(env, None, 12),
    "at random, few": lambda env: collect(env, None, 4),
    **{
        f"as {dtype}": lambda env, dtype=dtype: collect(env, dtype, 12)
        for dtype in (torch.float32, torch.int32, torch.bool)
    },
    **{f"as {dtype}, few": lambda env, dtype=dtype: collect(env, dtype, 4) for dtype in (torch.bfloat16, torch.uint16)},
}

INTEGERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]


@st.composite
def discretes(draw: Any) -> spaces.Discrete:
    dtype = draw(st.sampled_from(INTEGERS))
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    n = draw(st.integers(1, min(high, 300)))
    return spaces.Discrete(n, start=dtype.type(draw(st.integers(low, high - n + 1))), dtype=dtype)


@st.composite
def multi_discretes(draw: Any) -> spaces.MultiDiscrete:
    dtype = draw(st.sampled_from(INTEGERS))
    shape = draw(hnp.array_shapes(max_dims=3, max_side=2))
    nvec = draw(hnp.arrays(dtype, shape, elements=st.integers(1, 5)))
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    return spaces.MultiDiscrete(
        nvec, dtype=dtype, start=draw(hnp.arrays(dtype, shape, elements=st.integers(low, high - 4)))
    )


@st.composite
def boxes(draw: Any) -> spaces.Box:
    dtype = np.dtype(draw(st.sampled_from(["f2", "f4", "f8", ">f4", *INTEGERS])))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=2, max_side=2))
    if dtype.kind == "f":
        ends = st.floats(-1000, 1000, width=16)
        low, high = (draw(hnp.arrays("f8", shape, elements=ends)) for _ in range(2))
        low, high = np.minimum(low, high), np.maximum(low, high)
        low, high = (
            np.where(draw(hnp.arrays(bool, shape)), end, side) for end, side in ((-np.inf, low), (np.inf, high))
        )
        return spaces.Box(low, high, dtype=dtype)
    limits = np.iinfo(dtype)  # gymnasium cannot sample up to the last int64
    ends = hnp.arrays(dtype, shape, elements=st.integers(max(limits.min, -(2**62)), min(limits.max, 2**62)))
    low, high = draw(ends), draw(ends)
    return spaces.Box(np.minimum(low, high), np.maximum(low, high), shape, dtype)


@st.composite
def texts(draw: Any) -> spaces.Text:
    charset = draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5))
    longest = draw(st.integers(0, 5))
    shortest = draw(st.integers(0, longest)) if charset != "\0" else 0
    return spaces.Text(longest, min_length=shortest, charset=charset)


LEAVES = st.one_of(
    discretes(), multi_discretes(), boxes(), texts(), hnp.array_shapes(max_dims=2, max_side=3).map(spaces.MultiBinary)
)
SPACES = st.recursive(
    LEAVES,
    lambda part: st.one_of(
        st.lists(part, min_size=1, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.text("ab01", min_size=1, max_size=2), part, min_size=1, max_size=3).map(spaces.Dict),
    ),
    max_leaves=4,
)


@given(SPACES, st.sampled_from(list(MAKERS)), st.sampled_from(ENCODINGS), st.sampled_from(list(USES)))
@settings(max_examples=80, deadline=None)
def test_actions_are_contained_in_their_space_and_stored_by_value(space, maker, encoding, use):
    USES[use](MAKERS[maker](space, encoding))


FIXED = {
    "int32": spaces.Discrete(5, dtype=np.int32),
    "int8 from 2": spaces.Discrete(5, start=2, dtype=np.int8),
    "large uint64": spaces.Discrete(5, start=np.uint64(2**63 + 4), dtype=np.uint64),
    "many": spaces.Discrete(300, start=7, dtype=np.int16),
    "other byte order": spaces.Discrete(4, dtype=">i4"),
    "grid": spaces.MultiDiscrete([[3, 4], [1, 2]], dtype=np.uint8, start=[[1, 2], [3, 4]]),
    "large grid": spaces.MultiDiscrete([3], dtype=np.uint64, start=np.array([2**63 + 2], np.uint64)),
    "halves": spaces.Box(0, np.inf, (2,), np.float16),
    "flags": spaces.Box(0, 1, (2,), np.bool_),
    "letters": spaces.Text(5, charset="abc"),
    "one letter": spaces.Text(1),
    "wide letters": spaces.Text(4, min_length=2, charset="日a"),
    "no letters": spaces.Text(0, min_length=0),
    "nested": spaces.Dict(
        a=spaces.Discrete(3, dtype=np.int8, start=1),
        b=spaces.Tuple([spaces.Text(3, charset="xy"), spaces.MultiDiscrete([2, 3], dtype=np.int32)]),
    ),
}


@each("name", FIXED)
@each("encoding", ENCODINGS)
@pytest.mark.parametrize("maker", in_quick(MAKERS, ["alone", "made by name"]))
def test_actions_of_each_kind_of_space_are_contained_in_it(name, encoding, maker):
    for use in ("steps", "at random", "as torch.float32"):
        USES[use](MAKERS[maker](FIXED[name], encoding))


@each("name", ["int8 from 2", "nested"])
def test_processes_get_actions_that_are_contained_in_their_space(name):
    space = FIXED[name]
    env = ParallelEnv(2, lambda: GymEnv(Echo(space)), num_workers=1)
    collect(env, None, 12)
    collect(env, torch.float32, 12)
    vector = GymEnv(
        AsyncVectorEnv([lambda: Echo(space)] * 2, shared_memory=False, autoreset_mode=AutoresetMode.SAME_STEP)
    )
    collect(vector, None, 12)
    for made in (env, vector):
        made.close()


def test_the_choice_of_an_action_is_counted_from_the_start_of_its_space():
    class Recorder(Echo):
        def step(self, action: Any) -> Any:
            got.append(action)
            return super().step(action)

    got: list[Any] = []
    for encoding in ENCODINGS:
        env = GymEnv(Recorder(spaces.Discrete(5, start=-2, dtype=np.int8)), **encoding)
        batch = SyncDataCollector(env, frames_per_batch=20).rollout()
        choice = batch["action"] if env.action_spec.ndim == 0 else batch["action"].argmax(-1)
        assert (choice - 2).tolist() == got[-20:] and {type(action) for action in got} == {np.int8}


def test_texts_in_the_shared_memory_of_gymnasium_are_refused():
    env = AsyncVectorEnv([lambda: Echo(spaces.Text(3, charset="xy"))])
    with pytest.raises(ValueError, match=r"reads texts \('echo'\) only once, when it is made; use shared_memory=False"):
        GymEnv(env)
    env.close()


# ---- what has no tensor form, or is no action ----
@each(
    ("space", "message"),
    [
        (spaces.Sequence(spaces.Discrete(3)), "any length"),
        (spaces.Dict(a=spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (1,))])), "now of one space"),
        (spaces.Tuple([spaces.Graph(spaces.Box(0, 1, (2,)), None)]), "any number of nodes"),
        (spaces.Dict({}), "a Dict without entries, which has no tensor form"),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([])), "a Tuple without entries, which has no tensor form"),
        (spaces.Box(0, 1, (2,), np.longdouble), "torch has no such numbers"),
    ],
)
def test_action_spaces_without_a_tensor_form_are_refused(space, message):
    for make in (Echo, lambda space: SyncVectorEnv([lambda: Echo(space)])):
        with pytest.raises(TypeError, match=message):
            GymEnv(make(space))


def test_an_observation_space_without_entries_is_refused():
    env = Echo(spaces.Discrete(2))
    env.observation_space = spaces.Dict({})
    with pytest.raises(TypeError, match="has no entries; give the environment an observation"):
        GymEnv(env)


@each(
    "space",
    [spaces.Discrete(100, start=100, dtype=np.int8), spaces.MultiDiscrete([2, 100], dtype=np.int8, start=[0, 100])],
)
def test_a_space_whose_dtype_cannot_hold_its_numbers_is_refused(space):
    with pytest.raises(ValueError, match="has numbers up to 199, which its dtype int8 cannot hold"):
        GymEnv(Echo(space))


@each("text", ["ad", ""])
@each("maker", MAKERS)
def test_a_text_that_the_space_has_not_is_refused_before_the_step(text, maker):
    env = MAKERS[maker](spaces.Text(4, min_length=1, charset="abc"), {})
    action = Text(4).encode(text).expand(*env.batch_size, 4)
    for use in (
        lambda: SyncDataCollector(env, lambda td: td.set("action", action), frames_per_batch=4).rollout(),
        lambda: env.step(env.reset().set("action", action)),
    ):
        with pytest.raises(ValueError, match="A text of 1 to 4 characters is passed as"):
            use()
