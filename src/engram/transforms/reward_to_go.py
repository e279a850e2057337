"""What each step still earns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram.transforms.entries import Key, Keys, get, put, shallow
from engram.transforms.scale import REWARDS, first_key
from engram.transforms.specs import EnvSpecs
from engram.transforms.strands import Trajectories, discounted_to_go, summable
from engram.transforms.timed import TimedTransform
from engram.transforms.writing import Writing


class Reward2GoTransform(TimedTransform):
    """On writing: the discounted sum of rewards from each step to its trajectory's end, as `reward_to_go`.

    Args:
        gamma: the discount, 0 to 1.
        in_keys: rewards; `("next", "reward")` if None, or `"reward"` in batches without it.
        out_keys: where the sums are put; `"reward_to_go"` if None.
        done_key, traj_key: where trajectories end; see TimedTransform.

    `inv` and writing into a buffer compute it, from one batch alone: extend by whole trajectories. Steps after the
    last end in a batch count the rewards up to the end of the batch; a batch without any end is an error. Reading
    leaves batches as they are; appended with `invert=True` it is the other way round, for samplers of slices.

    Raises:
        ValueError: no trajectory ends in the batch.

    Example:
        >>> done = torch.tensor([[False], [True]])
        >>> batch = {"next": {"reward": torch.ones(2, 1), "done": done}}
        >>> Reward2GoTransform(gamma=0.5).inv(batch)["reward_to_go"].flatten()
        tensor([1.5000, 1.0000])
    """

    write_in_order = True
    stream_in_order = False

    def __init__(
        self,
        gamma: float = 1.0,
        in_keys: Keys = None,
        out_keys: Keys = None,
        done_key: Key | None = None,
        *,
        traj_key: Key | None = None,
    ) -> None:
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be 0 to 1, got {gamma}")
        outs = "reward_to_go" if out_keys is None else out_keys
        super().__init__(["reward"] if in_keys is None else in_keys, outs, done_key=done_key, traj_key=traj_key)
        self.gamma = float(gamma)
        self._finds_reward = in_keys is None

    def for_env(self, specs: EnvSpecs) -> Any:
        raise TypeError(
            "Reward2GoTransform needs the rewards that come later, which an environment does not have yet: append it "
            "to the replay buffer, or call its inv on a rollout"
        )

    def forward(self, batch: Any) -> Any:
        return batch

    def inv(self, batch: Any) -> Any:
        return self._alone(batch if type(batch) is list else shallow(batch))

    def write(self, writing: Writing) -> Writing:
        return self._next_piece(writing)

    def changes_what_is_written(self) -> bool:
        return True

    def stream(self, writing: Writing) -> Writing:
        return writing

    def _pairs(self, batch: Any) -> list[tuple[Key, Key]]:
        if not self._finds_reward:
            return super()._pairs(batch)
        return [(first_key(batch, REWARDS, "Reward2GoTransform"), self.out_keys[0])]

    def _run(self, batch: Any, trajectories: Trajectories, goes_on: Tensor, before: Any) -> Any:
        if not bool(trajectories.ends.any()):
            raise ValueError(
                "no trajectory ends in this batch, so what its steps still earn is not known; extend by whole "
                "trajectories, or mark the last step truncated and done"
            )
        last = trajectories.last()
        for source, target in self._pairs(batch):
            reward = get(batch, source, "Reward2GoTransform")
            split = trajectories.strands.split(reward, source)
            x = summable(split)
            x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
            to_go = discounted_to_go(x, last, self.gamma).reshape(split.shape)
            dtype = reward.dtype if reward.is_floating_point() else to_go.dtype
            put(batch, target, trajectories.strands.join(to_go.to(dtype)))
        return None

    # What is computed from one batch alone leaves nothing behind.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def _settings(self) -> dict[str, Any]:
        return {"gamma": self.gamma, **super()._settings()}
