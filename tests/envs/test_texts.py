"""Texts in observations and actions: UTF-8 of a fixed width, from the environment to the sampled batch."""

from __future__ import annotations

import string
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from contracts.each import each
from engram.collectors import SyncDataCollector
from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.envs import GymEnv, ParallelEnv, SerialEnv
from engram.specs import Composite, Text, Unbounded, space_from_spec, spec_from_space
from engram.specs.spaces import TEXT_BYTES

WORDS = ["go to the red ball", "größer", "", "日本語", "open the door"]


class Missions(gymnasium.Env[Any, Any]):
    """Says step t: WORDS[t % 5] beside t. An episode has 5 steps."""

    def __init__(self, mission: Any = None, *, alone: bool = False) -> None:
        self.mission = mission or spaces.Text(20, min_length=0, charset=frozenset("".join(WORDS)))
        self.alone = alone
        self.action_space = spaces.Discrete(2)
        self.observation_space: Any = self.mission
        if not alone:
            self.observation_space = spaces.Dict({"t": spaces.Box(0, 9, (1,)), "mission": self.mission})
        self.t = 0

    def _shown(self) -> Any:
        word = WORDS[self.t % 5]
        return word if self.alone else {"t": np.array([self.t], np.float32), "mission": word}

    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        self.t = 0
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._shown(), 1.0, self.t == 5, False, {}


class MissionSpace(spaces.Space[str]):
    """As MiniGrid's: a space of str, and no `Text`."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def sample(self, *args: Any, **kwargs: Any) -> str:
        return WORDS[0]

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


def expected(t: torch.Tensor) -> Any:
    return np.array(WORDS, object)[t.squeeze(-1).long().numpy() % 5].tolist()


@each("make", [lambda: Missions(), lambda: Missions(MissionSpace())])
@each(
    "together",
    [
        GymEnv,
        lambda env: SerialEnv(2, lambda: GymEnv(env)),
        lambda env: GymEnv(SyncVectorEnv([lambda: env] * 1, autoreset_mode=AutoresetMode.SAME_STEP)),
        lambda env: GymEnv(SyncVectorEnv([lambda: env] * 1, autoreset_mode=AutoresetMode.NEXT_STEP)),
    ],
)
def test_collected_texts_are_those_of_their_steps(make, together):
    env = together(make())
    collector = SyncDataCollector(env, None, frames_per_batch=24, total_frames=24)
    (batch,) = collector
    spec = env.observation_spec["mission"]
    for part in (batch, batch["next"]):
        texts = Text(spec.width).decode(part["mission"])
        assert texts == expected(part["t"])
    ended = batch["next", "done"].squeeze(-1)
    assert ended.any() and batch["next", "t"][ended].unique().tolist() == [5]
    collector.shutdown()


def test_parallel_environments_give_texts():
    env = ParallelEnv(2, lambda: GymEnv(Missions()))
    steps = env.rollout(3)
    assert env.observation_spec["mission"].decode(steps["mission"]) == [WORDS[:3], WORDS[:3]]
    env.close()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_sampled_batches_give_the_texts_back(storage, tmp_path):
    env = GymEnv(Missions())
    buffer = TensorDictReplayBuffer(storage=storage(50), batch_size=20)
    buffer.extend(env.rollout(20, break_when_any_done=False))
    sample = buffer.sample()
    spec = env.observation_spec["mission"]
    assert spec.is_in(sample["mission"])
    assert spec.decode(sample["mission"]) == expected(sample["t"])
    assert spec.decode(sample["next", "mission"]) == expected(sample["next", "t"])


def test_an_observation_that_is_one_text_is_collected():
    env = GymEnv(Missions(alone=True))
    for policy in (None, lambda td: td.set("action", torch.tensor([1, 0]))):
        collector = SyncDataCollector(env, policy, frames_per_batch=7, total_frames=7)
        (batch,) = collector
        assert env.observation_spec["observation"].decode(batch["next", "observation"])[:4] == WORDS[1:]
        collector.shutdown()


def test_actions_may_be_texts():
    class Parrot(Missions):
        action_space = spaces.Text(8)

        def step(self, action: Any) -> Any:
            assert isinstance(action, str)
            self.heard = action
            return super().step(action)

    parrot = Parrot()
    parrot.action_space = spaces.Text(8)
    env = GymEnv(parrot)
    env.step(env.reset().set("action", env.action_spec.encode("hello")))
    assert parrot.heard == "hello"
    collector = SyncDataCollector(env, None, frames_per_batch=4, total_frames=8)
    last = list(collector)[-1]
    assert env.action_spec.decode(last["action"])[-1] == parrot.heard
    constant = lambda td: td.set("action", env.action_spec.encode("policy"))  # noqa: E731
    collector = SyncDataCollector(env, constant, frames_per_batch=4, total_frames=4)
    assert env.action_spec.decode(next(iter(collector))["action"]) == ["policy"] * 4 and parrot.heard == "policy"


@each(
    ("word", "message"),
    [("x" * 300, "300 bytes"), ("a\0b", "character 0"), (7, "space says text"), (None, "space says text")],
)
def test_unstorable_text_is_refused_by_key(word, message, monkeypatch):
    env = GymEnv(Missions(MissionSpace()))
    monkeypatch.setattr(Missions, "_shown", lambda self: {"t": np.zeros(1, np.float32), "mission": word})
    with pytest.raises(ValueError, match=message) as error:
        env.reset()
    assert "'mission'" in str(error.value)


# ---- the spec ----
def test_texts_are_encoded_and_decoded():
    spec = Text(16)
    for word in WORDS[1:]:
        assert spec.decode(spec.encode(word)) == word == spec.to_numpy(spec.encode(word))
    both = spec.expand(2, 2, 16)
    nested = [["a", "日本語"], ["", "größer"]]
    assert both.decode(both.encode(nested)) == nested and both.to_numpy(both.encode(nested)).shape == (2, 2)
    assert both[1].encode(nested[1]).shape == both[1].shape == (2, 16)
    with pytest.raises(ValueError, match="18 bytes"):
        spec.encode("go to the red ball")


def test_draws_are_texts_and_other_bytes_are_projected_on_texts():
    spec = Text(12)
    drawn = spec.rand((50,))
    assert spec.is_in(drawn) and len(set(spec.decode(drawn))) > 40
    noise = torch.randint(256, (50, 12), dtype=torch.uint8)
    assert not spec.is_in(noise) and spec.is_in(spec.project(noise))
    hole = torch.tensor([*b"ab\0c", *[0] * 8], dtype=torch.uint8)
    assert not spec.is_in(hole) and spec.decode(spec.project(hole)) == "abc"


def test_a_spec_has_the_characters_and_lengths_of_its_space_and_the_width_that_these_need():
    letters = string.ascii_letters + string.digits
    assert spec_from_space(spaces.Text(5)) == Text(5, charset=letters, min_length=1, max_length=5)
    assert spec_from_space(spaces.Text(5, charset="日本")) == Text(15, charset="日本", min_length=1, max_length=5)
    assert spec_from_space(MissionSpace()) == Text(TEXT_BYTES)
    spec = Composite(a=spec_from_space(spaces.Text(7, min_length=2, charset="aé")), b=Unbounded((2,)))
    assert spec_from_space(space_from_spec(spec)) == spec
    assert space_from_spec(Text(5)) == spaces.Text(5, min_length=0, charset=string.printable)
    assert Text(4, charset="ab") != Text(4, charset="ac") and Text(4, charset="ab") != Text(4)


def test_draws_and_projections_of_a_charset_have_its_characters_and_lengths():
    spec = Text(12, (3, 12), charset="xé日", min_length=2, max_length=4)
    drawn = spec.rand((40,))
    assert spec.is_in(drawn) and drawn.shape == (40, 3, 12)
    texts = np.array(spec.decode(drawn)).ravel().tolist()
    assert {*"".join(texts)} == {*"xé日"} and {*map(len, texts)} == {2, 3, 4}
    projected = spec.project(torch.randint(256, (40, 3, 12), dtype=torch.uint8))
    assert spec.is_in(projected) and torch.equal(spec.project(drawn), drawn)
    assert spec[0].decode(spec[0].project(Text(12).encode("axyx日xx"))) == "xx日x"


@each(("text", "message"), [("ab", "the character 'b'"), ("", "0 characters; it must have 1 to 3"), ("aaaa", "4 char")])
def test_a_text_beyond_the_charset_or_lengths_is_not_encoded(text, message):
    spec = Text(6, charset="aé", min_length=1)
    assert not spec.is_in(Text(6).encode(text))
    with pytest.raises(ValueError, match=message):
        spec.encode(text)


@each(
    "make",
    [
        lambda: Text(0),
        lambda: Text(4, shape=(3,)),
        lambda: Text(4, dtype=torch.int64),
        lambda: Text(4, charset="é", max_length=3),
        lambda: Text(4, min_length=5),
        lambda: Text(4, min_length=3, max_length=2),
        lambda: Text(4, charset="\0", min_length=1),
    ],
)
def test_a_text_spec_that_cannot_be_is_refused(make):
    with pytest.raises(ValueError):
        make()


# ---- spaces of no fixed form ----
@each(
    ("space", "reason"),
    [
        (spaces.Sequence(spaces.Discrete(3)), "any length"),
        (spaces.Graph(spaces.Box(0, 1, (2,)), None), "any number of nodes"),
        (spaces.OneOf([spaces.Discrete(3), spaces.Box(0, 1, (2,))]), "now of one space"),
    ],
)
def test_values_of_no_fixed_form_are_refused_with_the_storage_that_holds_them(space, reason):
    with pytest.raises(TypeError, match=reason) as error:
        GymEnv(Missions(space))
    assert "ReplayBuffer(storage=ListStorage(n), collate_fn=list)" in str(error.value)
    buffer = ReplayBuffer(storage=ListStorage(10), collate_fn=list, batch_size=4)
    value = space.sample()
    buffer.extend([{"observation": value, "reward": 1.0} for _ in range(3)])
    assert all(type(item["observation"]) is type(value) for item in buffer.sample())


@each("value", [b"go", None, 5, ["go", ["left"]]])
def test_text_refuses_to_encode_what_is_no_text(value):
    with pytest.raises(TypeError, match="a text is a str, found a"):
        Text(8).encode(value)
