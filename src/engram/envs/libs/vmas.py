"""`VmasEnv` and `VmasWrapper`: scenarios of VMAS, whose environments and agents are simulated together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram._advice import advised
from engram._packages import packages
from engram.envs.base import EnvBase
from engram.pytree import to_tensor
from engram.specs import Bounded, Categorical, Composite, OneHot, Spec, Unbounded

_Agents = Mapping[str, Sequence[str]]


def _module() -> Any:
    """The module `vmas`. Raises ImportError where it is missing."""
    with packages("VmasEnv", "vmas", vmas="vmas"):
        import vmas
    return vmas


@advised
class VmasWrapper(EnvBase):
    """An environment of `vmas.make_env(..., terminated_truncated=True)`, batch `[num_envs]`, as an engram environment.

    Agents are in groups: `(group, "observation")`, `(group, "action")`, `(group, "reward")` and `(group, "info", ...)`
    are `[num_envs, agents, *]`, rewards `[num_envs, agents, 1]`. The flags, `[num_envs, 1]`, are those of all agents.

    Args:
        env: the environment of vmas, which is reset.
        categorical_actions: discrete actions are numbers; False: one-hot.
        group_map: the names of the agents in each group. None: agents whose names are one word and a number are a group
            of this word ("agents" for "agent"); where one has another name, all are "agents".

    Raises:
        TypeError: no environment of vmas with both flags.
        ValueError: the agents of a group differ in what they see or do, or an agent is in no group or in two.
    """

    libname = "vmas"

    def __init__(
        self,
        env: Any = None,
        *,
        categorical_actions: bool = True,
        group_map: _Agents | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not _has_both_flags(env):
            raise TypeError(
                f"VmasWrapper takes an environment of vmas.make_env(..., terminated_truncated=True), got a "
                f"{type(env).__name__}; VmasEnv(scenario, num_envs=n) makes one"
            )
        super().__init__(batch_size=[env.num_envs], device=env.device if device is None else device)
        vars(self)["_env"] = env
        self.agent_names = [agent.name for agent in env.agents]
        self.group_map: dict[str, list[str]] = _groups(self.agent_names, group_map)
        self._numbers = {
            group: [self.agent_names.index(name) for name in names] for group, names in self.group_map.items()
        }
        self._is_one_hot = not categorical_actions and not env.continuous_actions
        fresh = self._reset()
        groups = {group: fresh.get(group) for group in self._numbers}
        shape = self.batch_size
        observations = {group: _unbounded(td) for group, td in groups.items()}
        self.observation_spec = Composite(observations, shape=shape, device=self.device)
        actions = {group: self._action_spec_of(group) for group in groups}
        self.full_action_spec = self._by_group({group: {"action": spec} for group, spec in actions.items()})
        rewards = {group: Unbounded((*td.batch_size, 1), device=self.device) for group, td in groups.items()}
        self.full_reward_spec = self._by_group({group: {"reward": spec} for group, spec in rewards.items()})

    def _by_group(self, specs: Mapping[str, Mapping[str, Spec]]) -> Composite:
        groups = {
            group: Composite(dict(of), shape=(*self.batch_size, len(self._numbers[group])), device=self.device)
            for group, of in specs.items()
        }
        return Composite(groups, shape=self.batch_size, device=self.device)

    def _action_spec_of(self, group: str) -> Spec:
        spaces = [self.vmas_env.action_space[number] for number in self._numbers[group]]
        if any(space != spaces[0] for space in spaces):
            raise ValueError(
                f"the agents of {group!r} have different actions, {spaces}: put them into groups, group_map="
            )
        shape = (*self.batch_size, len(spaces))
        if type(spaces[0]).__name__ == "Discrete":  # gym's, or gymnasium's
            n = int(spaces[0].n)
            return OneHot(n, (*shape, n), self.device) if self._is_one_hot else Categorical(n, shape, self.device)
        if type(spaces[0]).__name__ != "Box":
            raise TypeError(f"actions of vmas are a Box or Discrete, got {spaces[0]}: leave multidiscrete_actions out")
        low, high = to_tensor(spaces[0].low), to_tensor(spaces[0].high)
        return Bounded(low.expand(*shape, -1), high.expand(*shape, -1), (*shape, *low.shape), self.device)

    @property
    def vmas_env(self) -> Any:
        """The environment of vmas."""
        return vars(self)["_env"]

    def _reads_state(self) -> bool:
        return False

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:  # type: ignore[override]
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or bool(mask.all()):
            self.vmas_env.reset(return_observations=False)
        else:
            for number in mask.reshape(-1).nonzero().flatten().tolist():
                self.vmas_env.reset_at(number, return_observations=False)
        seen, infos = self.vmas_env.get_from_scenario(
            get_observations=True, get_rewards=False, get_infos=True, get_dones=False
        )
        over = torch.zeros(*self.batch_size, 1, dtype=torch.bool, device=self.device)
        return self._state(seen, infos).update({"terminated": over, "truncated": over.clone(), "done": over.clone()})

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        actions: list[Tensor] = [torch.empty(0, device="cpu")] * len(self.agent_names)
        for group, numbers in self._numbers.items():
            given = td.get((group, "action"))
            given = given.long().argmax(-1) if self._is_one_hot else given
            for k, number in enumerate(numbers):
                actions[number] = given[:, k] if self.vmas_env.continuous_actions else given[:, k].unsqueeze(-1)
        seen, rewards, terminated, truncated, infos = self.vmas_env.step(actions)
        state = self._state(seen, infos)
        for group, numbers in self._numbers.items():
            state.set((group, "reward"), torch.stack([rewards[n] for n in numbers], 1).unsqueeze(-1).float())
        flags = {"terminated": terminated.unsqueeze(-1), "truncated": truncated.unsqueeze(-1)}
        return state.update({**flags, "done": flags["terminated"] | flags["truncated"]})

    def _state(self, seen: Sequence[Any], infos: Sequence[Mapping[str, Tensor]]) -> TensorDict:
        state = TensorDict(batch_size=self.batch_size, device=self.device)
        for group, numbers in self._numbers.items():
            shapes = {tuple(seen[n].shape[1:]) for n in numbers}
            if len(shapes) > 1:
                raise ValueError(
                    f"the agents of {group!r} see observations of the shapes {sorted(shapes)}: put them into groups of "
                    f"one shape, as group_map={{{group!r}: {self.group_map[group][:1]}, ...}}"
                )
            entries: dict[str, Any] = {"observation": torch.stack([seen[n] for n in numbers], 1)}
            shared = set.intersection(*(set(infos[n]) for n in numbers))
            if shared:
                entries["info"] = {
                    key: torch.stack([infos[n][key].reshape(*self.batch_size, -1) for n in numbers], 1)
                    for key in sorted(shared)
                }
            state.set(group, TensorDict(entries, batch_size=(*self.batch_size, len(numbers)), device=self.device))
        return state.clone()  # the simulator writes into its tensors

    def _set_seed(self, seed: int) -> None:
        self.vmas_env.seed(seed)

    def to(self, device: Any) -> VmasWrapper:  # type: ignore[override]
        """Moves the simulation, too."""
        self.vmas_env.to(device)
        super().to(device)
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_envs={self.batch_size[0]}, groups={self.group_map}, device={self.device})"


@advised
class VmasEnv(VmasWrapper):
    """A scenario of VMAS; see `VmasWrapper`.

    Args:
        scenario: its name, as "balance", or a scenario of vmas.
        num_envs: how many environments are simulated together.
        continuous_actions, max_steps, seed: as `vmas.make_env` takes them.
        categorical_actions, group_map, device: as `VmasWrapper`.
        kwargs: for `vmas.make_env`, which gives the scenario those that it does not know.

    Raises:
        ImportError: vmas is missing: `pip install vmas`.
    """

    def __init__(
        self,
        scenario: Any,
        *,
        num_envs: int,
        continuous_actions: bool = True,
        max_steps: int | None = None,
        categorical_actions: bool = True,
        seed: int | None = None,
        group_map: _Agents | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        env = _module().make_env(
            scenario=scenario, num_envs=num_envs, device="cpu" if device is None else device,
            continuous_actions=continuous_actions, max_steps=max_steps, seed=seed, terminated_truncated=True, **kwargs,
        )  # fmt: skip
        super().__init__(env, categorical_actions=categorical_actions, group_map=group_map, device=device)
        self.scenario_name = scenario if isinstance(scenario, str) else type(scenario).__name__


def _has_both_flags(env: Any) -> bool:
    try:
        return bool(env.terminated_truncated)
    except AttributeError:
        return False


def _groups(names: Sequence[str], given: _Agents | None) -> dict[str, list[str]]:
    """The agents of each group. Raises ValueError if an agent is in none or in several."""
    if given is not None:
        groups = {group: list(members) for group, members in given.items()}
        if sorted(name for members in groups.values() for name in members) != sorted(names):
            raise ValueError(f"group_map names each agent once; the agents are {list(names)}, got {groups}")
        return groups
    words = [re.fullmatch(r"(.+)_\d+", name) for name in names]
    if not all(words):
        return {"agents": list(names)}
    groups = {}
    for name, word in zip(names, words, strict=True):
        assert word is not None
        groups.setdefault("agents" if word[1] == "agent" else word[1], []).append(name)
    return groups


def _unbounded(td: TensorDictBase) -> Composite:
    """Specs of all entries."""
    entries: dict[str, Spec] = {}
    for key, value in td.items():
        is_nested = isinstance(value, TensorDictBase)
        entries[key] = _unbounded(value) if is_nested else Unbounded(value.shape, value.device, value.dtype)
    return Composite(entries, shape=td.batch_size, device=td.device)


__all__ = ["VmasEnv", "VmasWrapper"]
