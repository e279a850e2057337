"""`evaluate`: an evaluation as reference implementations write it, of environments of either package."""

import torch
from rl.envs import ExplorationType, set_exploration_type


def evaluate(env, policy, max_steps=50):
    """The rollout of a policy that does not explore; the environment is in evaluation mode meanwhile."""
    env.eval()
    policy.eval()
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        batch = env.rollout(
            policy=policy, auto_reset=True, auto_cast_to_device=True, break_when_any_done=True, max_steps=max_steps
        )
    modules = []
    env.apply(modules.append)  # recorders are asked for their videos so
    assert modules
    env.train()
    policy.train()
    done = batch["next", "done"]
    assert batch.shape[-1] == max_steps or done.any()
    return batch
