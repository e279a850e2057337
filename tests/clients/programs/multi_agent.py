import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import torch
from rl.collectors import Collector
from rl.data import (
    Bounded,
    Categorical,
    Composite,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Unbounded,
)
from rl.envs import EnvBase, RewardSum, TransformedEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torch import nn
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss, ValueEstimators

from clients.evaluation import evaluate

AGENTS = 3


class Meeting(EnvBase):
    """Agents on a line are paid for being close to each other."""

    def __init__(self, steps=20, device="cpu"):
        super().__init__(device=device, batch_size=[])
        self.steps = steps
        self.observation_spec = Composite(agents=Composite(observation=Unbounded([AGENTS, 2]), shape=[AGENTS]))
        self.action_spec = Composite(
            agents=Composite(action=Bounded(-1.0, 1.0, [AGENTS, 1], dtype=torch.float32), shape=[AGENTS])
        )
        self.reward_spec = Composite(agents=Composite(reward=Unbounded([AGENTS, 1]), shape=[AGENTS]))
        self.done_spec = Composite(
            done=Categorical(2, [1], dtype=torch.bool), terminated=Categorical(2, [1], dtype=torch.bool)
        )

    def _set_seed(self, seed):
        self.rng = torch.Generator().manual_seed(0 if seed is None else seed)

    def _observation(self):
        agents = TensorDict({"observation": torch.stack([self.at, self.at - self.at.mean()], -1)}, [AGENTS])
        return TensorDict({"agents": agents}, [])

    def _reset(self, tensordict=None):
        self.time, self.at = 0, torch.randn(AGENTS, generator=self.rng)
        return self._observation()

    def _step(self, tensordict):
        self.time += 1
        self.at = self.at + 0.1 * tensordict["agents", "action"].squeeze(-1)
        out = self._observation()
        out["agents", "reward"] = -(self.at - self.at.mean()).abs().unsqueeze(-1)
        over = torch.tensor([self.time == self.steps])
        return out.update({"done": over, "terminated": over.clone()})


def main(seed):
    env = TransformedEnv(Meeting(), RewardSum(in_keys=[("agents", "reward")], out_keys=[("agents", "episode_reward")]))
    env.set_seed(seed)
    torch.manual_seed(seed)
    net = nn.Sequential(
        MultiAgentMLP(2, 2, AGENTS, centralized=False, share_params=True, depth=2, num_cells=32),
        NormalParamExtractor(),
    )
    spec = env.full_action_spec["agents", "action"]
    actor = ProbabilisticActor(
        TensorDictModule(net, [("agents", "observation")], [("agents", "loc"), ("agents", "scale")]),
        spec=spec,
        in_keys=[("agents", "loc"), ("agents", "scale")],
        out_keys=[("agents", "action")],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
        return_log_prob=True,
    )
    critic = TensorDictModule(
        MultiAgentMLP(2, 1, AGENTS, centralized=True, share_params=True, depth=2, num_cells=32),
        in_keys=[("agents", "observation")],
        out_keys=[("agents", "state_value")],
    )
    loss_module = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=1e-4, normalize_advantage=False)
    loss_module.set_keys(
        reward=env.reward_key,
        action=env.action_key,
        value=("agents", "state_value"),
        done=("agents", "done"),
        terminated=("agents", "terminated"),
    )
    loss_module.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.9)
    optim = torch.optim.Adam(loss_module.parameters(), lr=3e-3)

    collector = Collector(env, actor, frames_per_batch=200, total_frames=1000)
    rb = ReplayBuffer(storage=LazyTensorStorage(200), sampler=SamplerWithoutReplacement(), batch_size=50)
    frames, losses, rewards = 0, [], []
    for data in collector:
        frames += data.numel()
        rewards.append(data["next", "agents", "reward"].mean(-2).flatten().tolist())
        shape = data["next", "agents", "reward"].shape
        for name in ("done", "terminated"):
            data["next", "agents", name] = data["next", name].unsqueeze(-1).expand(shape).clone()
        with torch.no_grad():
            loss_module.value_estimator(
                data, params=loss_module.critic_network_params, target_params=loss_module.target_critic_network_params
            )
        rb.extend(data.reshape(-1))
        for _ in range(5):
            for batch in rb:
                loss = loss_module(batch)
                total = loss["loss_objective"] + loss["loss_critic"] + loss["loss_entropy"]
                optim.zero_grad()
                total.backward()
                optim.step()
                losses.append(total.item())
        collector.update_policy_weights_()
    evaluate(env, actor)
    collector.shutdown()
    return {
        "frames": frames,
        "loss": losses[-1],
        "return": sum(rewards[-1]) / len(rewards[-1]),
        "equal": rewards[0],
    }


if __name__ == "__main__":
    print(main(0))
