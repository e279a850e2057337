"""Environments of TorchRL's that simulate many worlds with several agents at once, as Vmas does."""

from __future__ import annotations

import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import torch
from rl.data import Bounded, Categorical, Composite, Unbounded
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.envs import EnvBase

WORLDS, AGENTS = 4, 3


class Field(EnvBase):
    """Agents that are paid for being close to each other: `[worlds]`, with a group of agents; no `truncated` flag.

    World i ends after `steps + i` steps. With `differ` the agents see and do vectors of different lengths.
    """

    def __init__(self, steps: int = 5, *, differ: bool = False) -> None:
        super().__init__(batch_size=[WORLDS])
        self.steps, self.differ = steps, differ
        self.n_agents, self.agents = AGENTS, [f"agent_{i}" for i in range(AGENTS)]
        self.group_map = {"agents": self.agents}
        widths = [2 + differ * i for i in range(AGENTS)]
        self.observation_spec = self._of_agents(
            [Composite(observation=Unbounded((WORLDS, k)), shape=(WORLDS,)) for k in widths]
        )
        self.action_spec = self._of_agents(
            [Composite(action=Bounded(-1.0, 1.0, (WORLDS, k), dtype=torch.float32), shape=(WORLDS,)) for k in widths]
        )
        self.reward_spec = self._of_agents([Composite(reward=Unbounded((WORLDS, 1)), shape=(WORLDS,))] * AGENTS)
        flag = Categorical(2, (WORLDS, 1), dtype=torch.bool)
        self.full_done_spec = Composite(done=flag, terminated=flag, shape=(WORLDS,))
        self.time = torch.zeros(WORLDS, 1, dtype=torch.int64)
        self.at = [torch.zeros(WORLDS, k) for k in widths]
        self.rng = torch.Generator()

    @staticmethod
    def _of_agents(specs: list[Composite]) -> Composite:
        return Composite(agents=torch.stack(specs, 1), shape=(WORLDS,))

    def _observation(self) -> TensorDictBase:
        agents = [TensorDict({"observation": at.clone()}, [WORLDS]) for at in self.at]

        return TensorDict({"agents": lazy_stack(agents, 1) if self.differ else torch.stack(agents, 1)}, [WORLDS])

    def _reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        mask = torch.ones(WORLDS, 1, dtype=torch.bool) if mask is None else mask
        self.time = torch.where(mask, 0, self.time)
        self.at = [torch.where(mask, torch.randn(at.shape, generator=self.rng), at) for at in self.at]
        flags = {name: torch.zeros(WORLDS, 1, dtype=torch.bool) for name in ("done", "terminated")}
        return self._observation().update(flags)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.time = self.time + 1
        actions = [agent["action"] for agent in tensordict["agents"].unbind(1)]
        self.at = [at + 0.1 * action for at, action in zip(self.at, actions, strict=True)]
        place = torch.stack([at[:, 0] for at in self.at], 1)
        out = self._observation()
        out["agents", "reward"] = -(place - place.mean(1, keepdim=True)).abs().unsqueeze(-1)
        over = self.time >= self.steps + torch.arange(WORLDS).unsqueeze(1)
        return out.update({"done": over, "terminated": over.clone()})

    def _set_seed(self, seed: int | None) -> None:
        self.rng.manual_seed(0 if seed is None else seed)
