import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import torch
from rl.collectors import Collector
from rl.data import Bounded, Categorical, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from rl.envs import EnvBase, GymEnv, RewardSum, StepCounter, TransformedEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP

from clients.evaluation import evaluate


class Learned(EnvBase):
    """Pendulums whose next observation and reward are those of a network, which is a part of the environment."""

    def __init__(self, worlds):
        super().__init__(batch_size=[worlds])
        self.model = MLP(in_features=4, out_features=4, num_cells=[32])
        self.register_buffer("origin", torch.tensor([1.0, 0.0, 0.0]))
        self.observation_spec = Composite(observation=Unbounded((worlds, 3)), shape=(worlds,))
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Bounded(-2.0, 2.0, (worlds, 1), dtype=torch.float32)
        self.reward_spec = Unbounded((worlds, 1))
        self.done_spec = Categorical(2, (worlds, 1), dtype=torch.bool)

    def _reset(self, tensordict=None):
        return TensorDict({"observation": self.origin.expand(*self.batch_size, 3).clone()}, self.batch_size)

    def predict(self, observation, action):
        out = self.model(torch.cat([observation, action], -1))
        return observation + out[..., :3], out[..., 3:]

    def _step(self, tensordict):
        observation, reward = self.predict(tensordict["observation"], tensordict["action"])
        done = torch.zeros(*self.batch_size, 1, dtype=torch.bool)
        return TensorDict({"observation": observation, "reward": reward, "done": done}, self.batch_size)

    def _set_seed(self, seed):
        pass


def main(seed):
    torch.manual_seed(seed)
    env = TransformedEnv(Learned(8), RewardSum())
    names = {name for name, _ in env.named_parameters()}
    assert names == {f"base_env.{name}" for name, _ in env.base_env.named_parameters()} and len(names) == 4
    optim = torch.optim.Adam(env.parameters(), lr=1e-3)
    rb = ReplayBuffer(storage=LazyTensorStorage(400), batch_size=64)
    real = TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(100))
    collector = Collector(real, frames_per_batch=200, total_frames=400)
    losses = []
    for data in collector:
        rb.extend(data)
        for _ in range(20):
            batch = rb.sample()
            observation, reward = env.base_env.predict(batch["observation"], batch["action"])
            loss = (observation - batch["next", "observation"]).square().mean()
            loss = loss + (reward - batch["next", "reward"]).square().mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
            losses.append(loss.item())

    env.requires_grad_(False)
    policy = TensorDictModule(MLP(in_features=3, out_features=1, num_cells=[32]), ["observation"], ["action"])
    optim = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for _ in range(5):
        imagined = env.rollout(10, policy)
        loss = -imagined["next", "reward"].mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
    assert not any(parameter.requires_grad for parameter in env.parameters())
    evaluate(env, policy, max_steps=10)
    real_return = evaluate(real, policy, max_steps=100)["next", "reward"].sum().item()
    collector.shutdown()

    copy = Learned(8)
    copy.load_state_dict(env.base_env.state_dict())
    again = TransformedEnv(copy, RewardSum()).to("cpu").rollout(10, policy)
    imagined = env.rollout(10, policy)
    assert torch.equal(again["next", "episode_reward"], imagined["next", "episode_reward"])
    return {"frames": len(rb), "loss": losses[-1], "return": real_return}


if __name__ == "__main__":
    print(main(0))
