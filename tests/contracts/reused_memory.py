"""An environment and a policy that write into the same memory at every step, and the rows that they must give.

The first number of an observation counts steps: `1000 * episode + step`; the second is the action that led to it. The
reward is the first number after the step. So each row says itself whether it is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from engram.data import Composite, Unbounded
from engram.envs import EnvBase, Transform

LENGTH = 3  # steps of an episode
REWARD_FORMS = ("float", "numpy number", "0-d array", "view", "tensor", "list")


class ReusingEnv(gym.Env):
    """Hands out the same arrays, flags and infos at every step and reset, and writes into its actions."""

    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)
    static = np.zeros(2, np.float32)  # memory of all environments of a process

    def __init__(self, reward: str = "0-d array", nested: bool = False, static: bool = False) -> None:
        box = spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.observation_space = spaces.Dict(a=box, b=spaces.Tuple((box,))) if nested else box
        self.nested, self.reward_form, self.episode = nested, reward, -1
        self.array = self.static if static else np.zeros(2, np.float32)
        self.reward, self.reward_tensor, self.reward_list = np.zeros(1), torch.zeros(1), [0.0]
        self.flags = np.zeros(2, np.bool_)
        self.info = {"mark": np.zeros(1)}
        self.lives = np.zeros((), np.int64)

    def _shown(self, action: float) -> Any:
        self.array[:] = 1000 * self.episode + self.t, action
        self.info["mark"][:] = self.lives[...] = self.array[0]
        return {"a": self.array, "b": (self.array,)} if self.nested else self.array

    def count(self) -> Any:
        return self.lives

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._shown(0.0), self.info

    def step(self, action: Any) -> Any:
        self.t += 1
        shown = self._shown(float(action[0]))
        action[:] = 9.0
        self.reward[0] = self.reward_tensor[0] = self.reward_list[0] = float(self.array[0])
        self.flags[:] = self.t == LENGTH, False
        reward = {
            "float": float(self.reward[0]),
            "numpy number": self.reward[0],
            "0-d array": self.reward.reshape(()),
            "view": self.reward[:1],
            "tensor": self.reward_tensor[0],
            "list": self.reward_list,
        }[self.reward_form]
        return shown, reward, self.flags[0, ...], self.flags[1, ...], self.info


class ReusingTensors(EnvBase):
    """The same with TensorDicts: it keeps its state in the tensors that it returns, and writes into those it gets."""

    def __init__(self, batch: tuple[int, ...] = (), torchrl_form: bool = True) -> None:
        observation = Composite(observation=Unbounded((*batch, 2)), shape=batch)
        action = Unbounded((*batch, 1))
        if torchrl_form:
            super().__init__(batch_size=torch.Size(batch))
            self.observation_spec, self.action_spec, self.reward_spec = observation, action, Unbounded((*batch, 1))
        else:
            super().__init__(observation, action, batch_size=batch)
        self.state = TensorDict({"observation": torch.zeros(*batch, 2)}, batch)
        self.state["reward"] = torch.zeros(*batch, 1)
        self.state["done"] = self.state["terminated"] = torch.zeros(*batch, 1, dtype=torch.bool)

    def _mask(self, given: Any) -> Tensor:
        given = given.get("_reset", None) if isinstance(given, TensorDict) else given
        return torch.ones(*self.batch_size, 1, dtype=torch.bool) if given is None else given

    def _reset(self, given: Any = None, **kwargs: Any) -> TensorDict:
        count = self.state["observation"][..., :1]
        begins = torch.where(count == 0, count, 1000 * (count // 1000 + 1))
        self.state["observation"] = torch.where(
            self._mask(given), torch.cat([begins, torch.zeros_like(begins)], -1), self.state["observation"]
        )
        self.state["done"].masked_fill_(self._mask(given), False)
        if isinstance(given, TensorDict) and "observation" in given:
            given["observation"].fill_(-1)
        return self.state.exclude("reward")

    def _step(self, td: TensorDict) -> TensorDict:
        self.state["observation"][..., :1] += 1
        self.state["observation"][..., 1:] = td["action"]
        td["action"].fill_(9.0)
        td["observation"].fill_(-1)
        self.state["reward"].copy_(self.state["observation"][..., :1])
        self.state["done"].copy_(self.state["observation"][..., :1] % 1000 == LENGTH)
        return self.state

    def _set_seed(self, seed: int) -> None:
        pass


class UnevenTensors(ReusingTensors):
    """Two, whose episodes have different lengths; a reset writes into all that it gets, the mask, too."""

    def __init__(self, torchrl_form: bool = True) -> None:
        super().__init__((2,), torchrl_form)

    def _reset(self, given: Any = None, **kwargs: Any) -> TensorDict:
        fresh = super()._reset(given, **kwargs)
        for entry in given.values() if isinstance(given, TensorDict) else () if given is None else (given,):
            entry.fill_(1)
        return fresh

    def _step(self, td: TensorDict) -> TensorDict:
        state = super()._step(td)
        state["done"][0].logical_or_(state["observation"][0, :1] % 1000 == LENGTH - 1)
        return state


class OwnSteps(ReusingTensors):
    """The same by public methods of its own."""

    def step(self, tensordict: Any) -> Any:
        td = super().step(tensordict)
        self.state["observation"].copy_(td["next", "observation"])
        td["next", "observation"] = self.state["observation"]
        return td


class Foreign:
    """An environment of another library, which hands on what that of `ReusingTensors` returns."""

    def __init__(self) -> None:
        self.env = ReusingTensors((2,))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        return self._in_kept_tensors(self.env.reset(tensordict, **kwargs))

    def step(self, tensordict: Any) -> Any:
        td = self.env.step(tensordict)
        return td.set("next", self._in_kept_tensors(td["next"]))

    def _in_kept_tensors(self, td: Any) -> Any:
        self.env.state["observation"].copy_(td["observation"])
        return td.set("observation", self.env.state["observation"])


class ReusingTransform(Transform):
    """Adds the first number of the observation, in one tensor for all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: Tensor | None = None

    def _step(self, td: Any, following: Any) -> Any:
        value = following["observation"][..., :1]
        self.shown = value.clone() if self.shown is None else self.shown.copy_(value)
        return following.set("count", self.shown)

    def _reset(self, td: Any, fresh: Any) -> Any:
        return self._step(td, fresh)

    def transform_observation_spec(self, spec: Any) -> Any:
        spec["count"] = Unbounded((*spec.shape, 1))
        return spec


class ReusingPolicy(nn.Module):
    """Writes its action and a value into the same tensors at every step, and into its observation."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        action, value = (observation[..., :1] % 1000) / 10, observation[..., :1] + 0.5
        if self.kept is None or self.kept[0].shape != action.shape:
            self.kept = action.clone(), value.clone()
        self.kept[0].copy_(action)
        self.kept[1].copy_(value)
        observation.fill_(-7.0)
        return self.kept

    def on_tensordicts(self, td: Any) -> Any:
        """The same for TensorDicts; it also writes into flags, and into states that it hands on from step to step.

        It changes `acts`, of its own, in place.
        """
        key = "observation" if "observation" in td.keys() else "a"
        count = td[key][..., :1].clone()
        action, value = self(td[key])
        begins = count % 1000 == 0
        if getattr(self, "memory", None) is None or self.memory.shape != count.shape:
            self.memory = torch.zeros_like(count)
        before = td.get("memory", torch.zeros_like(count)).clone()
        self.memory.copy_(torch.where(begins, torch.ones_like(count), before + 1))
        td["done"].fill_(True)
        if "acts" in td.keys():
            td["acts"].add_(1)
        else:
            td["acts"] = torch.ones_like(count)
        return td.update({"action": action, "value": value, "memory": before, "next": {"memory": self.memory}})


def wrong_rows(batch: Any, lengths: Sequence[int] = ()) -> list[str]:
    """What is wrong in the rows of a batch `[*, time]`, in words; `lengths`: of the episodes of each environment."""
    found = []
    lengths = np.repeat(lengths or [LENGTH], batch.shape[-1] if lengths else batch.numel())
    for i, row in enumerate(batch.reshape(-1).unbind(0)):
        pairs = [(key, ("next", *(key if isinstance(key, tuple) else (key,)))) for key in _observations(row)]
        assert pairs
        before = int(row[pairs[0][0]][0])
        after = before + 1
        for key, following in pairs:
            if row[key][0] != before or row[following][0] != after:
                found.append(f"row {i}, {key}: {row[key].tolist()}, then {row[following].tolist()}")
            if not torch.isclose(row[following][1], row["action"][0]):
                found.append(f"row {i}: action {row['action'].tolist()}, and {row[following].tolist()} shows it")
        if before % 1000 >= lengths[i] or row["next", "reward"] != after:
            found.append(f"row {i}: step {before}, reward {row['next', 'reward'].tolist()}")
        if bool(row["next", "done"]) != (after % 1000 == lengths[i]) or bool(row["done"]):
            found.append(f"row {i}: step {before}, done {bool(row['done'])}, then {bool(row['next', 'done'])}")
        expected = {
            "value": (before + 0.5, None),
            "memory": (before % 1000, after % 1000),
            "acts": (before % 1000 + 1, None),
            "count": (before, after),
            "mark": (before, after),
        }
        for key, (now, later) in expected.items():
            if key in row.keys() and row[key].item() != now:
                found.append(f"row {i}, {key}: {row[key].tolist()} for {now}")
            if later is not None and key in row["next"].keys() and row["next", key].item() != later:
                found.append(f"row {i}, next {key}: {row['next', key].tolist()} for {later}")
    return found


def _observations(row: Any) -> list[Any]:
    return [key for key in row.keys(True, True) if _is_observation(key, row)]


def _is_observation(key: Any, row: Any) -> bool:
    first = key if isinstance(key, str) else key[0]
    return first in ("observation", "a", "b")
