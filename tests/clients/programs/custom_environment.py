import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import math

import torch
from rl.collectors import Collector
from rl.data import Bounded, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from rl.envs import CatTensors, Compose, EnvBase, TransformedEnv, UnsqueezeTransform, check_env_specs
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP

from clients.evaluation import evaluate


class Pendulum(EnvBase):
    """A batch of pendulums, stateless: the state and the parameters travel in the TensorDict."""

    batch_locked = False

    def __init__(self, seed=0, device="cpu"):
        super().__init__(device=device, batch_size=[])
        self.observation_spec = Composite(
            th=Bounded(-math.pi, math.pi, [], dtype=torch.float32),
            thdot=Bounded(-8.0, 8.0, [], dtype=torch.float32),
            params=Composite(g=Unbounded([]), dt=Unbounded([]), shape=[]),
            shape=[],
        )
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Bounded(-2.0, 2.0, [1], dtype=torch.float32)
        self.reward_spec = Unbounded([1])
        self.set_seed(seed)

    @staticmethod
    def gen_params(batch_size=()):
        params = TensorDict({"g": torch.tensor(10.0), "dt": torch.tensor(0.05)}, [])
        tensordict = TensorDict({"params": params}, [])
        return tensordict.expand(batch_size).contiguous() if batch_size else tensordict

    def _set_seed(self, seed):
        self.rng = torch.manual_seed(seed)

    def _reset(self, tensordict):
        if tensordict is None or tensordict.is_empty() or "params" not in tensordict.keys():
            tensordict = self.gen_params(self.batch_size)
        shape = tensordict.shape
        th = (torch.rand(shape, generator=self.rng) * 2 - 1) * math.pi
        thdot = torch.rand(shape, generator=self.rng) * 2 - 1
        return TensorDict({"th": th, "thdot": thdot, "params": tensordict["params"]}, shape)

    def _step(self, tensordict):
        th, thdot = tensordict["th"], tensordict["thdot"]
        g, dt = tensordict["params", "g"], tensordict["params", "dt"]
        u = tensordict["action"].squeeze(-1).clamp(-2, 2)
        costs = th**2 + 0.1 * thdot**2 + 0.001 * u**2
        thdot = (thdot + (1.5 * g * th.sin() + 3 * u) * dt).clamp(-8, 8)
        th = ((th + thdot * dt + math.pi) % (2 * math.pi)) - math.pi
        reward = -costs.view(*tensordict.shape, 1)
        done = torch.zeros_like(reward, dtype=torch.bool)
        out = {"th": th, "thdot": thdot, "params": tensordict["params"], "reward": reward, "done": done}
        return TensorDict(out, tensordict.shape)


def main(seed):
    check_env_specs(Pendulum())
    env = TransformedEnv(
        Pendulum(seed),
        Compose(
            UnsqueezeTransform(dim=-1, in_keys=["th", "thdot"], out_keys=["angle", "speed"]),
            CatTensors(in_keys=["angle", "speed"], out_key="observation", dim=-1, del_keys=True),
        ),
    )
    torch.manual_seed(seed)
    policy = TensorDictModule(MLP(in_features=2, out_features=1, num_cells=[32]), ["observation"], ["action"])
    optim = torch.optim.Adam(policy.parameters(), lr=2e-3)

    env.set_seed(seed)
    rewards = []
    for _ in range(10):
        start = env.reset(env.gen_params(batch_size=[8]))
        rollout = env.rollout(20, policy, tensordict=start, auto_reset=False)
        assert rollout.shape == (8, 20)
        loss = -rollout["next", "reward"].mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        rewards.append(-loss.item())

    env.set_seed(seed)
    collector = Collector(env, policy, frames_per_batch=40, total_frames=80, max_frames_per_traj=20)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=16)
    for data in collector:
        rb.extend(data)
        rewards += data["next", "reward"].flatten().tolist()
    evaluate(env, policy)
    collector.shutdown()
    assert rb.sample().shape == (16,)
    return {"frames": len(rb), "loss": -rewards[9], "return": sum(rewards[-20:]), "equal": rewards}


if __name__ == "__main__":
    print(main(0))
