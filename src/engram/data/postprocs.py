"""What is done to batches after they were collected."""

from __future__ import annotations

from typing import Any

from engram.transforms.entries import Key, Keys, as_key
from engram.transforms.n_step import checked_gamma, checked_n_steps, reward_keys_of, set_n_steps
from engram.transforms.strands import trajectories_of


class MultiStep:
    """Makes the steps of a collected batch `[*, time]` n-step transitions.

    Args:
        gamma: the discount, 0 to 1.
        n_steps: the horizon; 1 changes no reward.
        reward_keys: rewards, `[("next", "reward")]` if None.
        done_key, traj_key: where trajectories end; `("next", "done")` and `("collector", "traj_ids")` (or `"episode"`,
            where these exist) if None.
        mask_key: bool, False for padding, which no step looks into; used where the batch has it.

    Returns the batch, changed in place: `("next", "reward")` is the discounted sum of up to n rewards; everything else
    under `next` comes from n steps on, the flags included; and there are `gamma` (to the power of the steps summed),
    `steps_to_next_obs` (int64), `nonterminal` (bool: the state after them is not done; all three `[*, time, 1]`) and
    `("next", "original_reward")`. Steps are fewer than n where their trajectory ends, or the batch does; a buffer with
    `MultiStepTransform` waits for the next batch instead.

    Raises:
        KeyError: the batch has no rewards or no flags; the message names them.

    Example:
        >>> done = torch.tensor([[False], [False], [True]])
        >>> following = {"obs": torch.arange(1, 4), "reward": torch.ones(3, 1), "done": done}
        >>> batch = TensorDict({"obs": torch.arange(3), "next": following}, [3])
        >>> batch = MultiStep(gamma=0.5, n_steps=2)(batch)
        >>> batch["next", "reward"].flatten(), batch["next", "obs"], batch["steps_to_next_obs"].flatten()
        (tensor([1.5000, 1.5000, 1.0000]), tensor([2, 3, 3]), tensor([2, 2, 1]))
    """

    def __init__(
        self,
        gamma: float,
        n_steps: int,
        *,
        reward_keys: Keys = None,
        done_key: Key | None = None,
        traj_key: Key | None = None,
        mask_key: Key = ("collector", "mask"),
    ) -> None:
        self.gamma = checked_gamma(gamma)
        self.n_steps = checked_n_steps(n_steps)
        self.reward_keys = reward_keys_of(reward_keys)
        self.done_key = None if done_key is None else as_key(done_key)
        self.traj_key = None if traj_key is None else as_key(traj_key)
        self.mask_key = as_key(mask_key)

    def __call__(self, batch: Any) -> Any:
        now = trajectories_of(batch, "MultiStep", self.done_key, self.traj_key, self.mask_key)
        set_n_steps(batch, now, self.gamma, self.n_steps, self.reward_keys)
        return batch

    forward = __call__

    def __repr__(self) -> str:
        return f"MultiStep(gamma={self.gamma}, n_steps={self.n_steps})"
