import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import gymnasium
import numpy as np
import torch
from rl.collectors import Collector
from rl.data import LazyMemmapStorage, TensorDictReplayBuffer
from rl.envs import (
    CatFrames,
    Compose,
    GrayScale,
    GymEnv,
    RewardSum,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
)
from rl.envs.transforms import MultiStepTransform
from torch import nn
from torchrl.modules import MLP, ConvNet, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from clients.evaluation import evaluate


class Catch(gymnasium.Env):
    """A ball falls and a bar moves below it: 24 by 24 pixels in colour."""

    observation_space = gymnasium.spaces.Dict(pixels=gymnasium.spaces.Box(0, 255, (24, 24, 3), np.uint8))
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, frameskip=1):
        assert frameskip == 1

    def reset(self, *, seed=None, options=None):
        self.ball, self.height, self.bar = 20, 0, 12
        return self._frame(), {}

    def _frame(self):
        frame = np.zeros((24, 24, 3), np.uint8)
        frame[self.height, self.ball] = (255, 64, 0)
        frame[23, max(self.bar - 2, 0) : self.bar + 3] = (0, 128, 255)
        return {"pixels": frame}

    def step(self, action):
        self.bar = int(np.clip(self.bar + 2 * (int(action) - 1), 0, 23))
        self.height += 1
        over = self.height == 23
        reward = float(abs(self.bar - self.ball) <= 2) if over else 0.0
        return self._frame(), reward, over, False, {}


gymnasium.register("ClientCatch-v0", Catch)


def main(seed):
    env = TransformedEnv(
        GymEnv("ClientCatch-v0"),
        Compose(
            ToTensorImage(in_keys=["pixels"]),
            GrayScale(in_keys=["pixels"]),
            CatFrames(dim=-3, N=3, in_keys=["pixels"]),
            StepCounter(),
            RewardSum(),
        ),
    )
    env.set_seed(seed)
    torch.manual_seed(seed)
    net = nn.Sequential(
        ConvNet(in_features=3, num_cells=[8, 8], kernel_sizes=[4, 3], strides=[2, 2]),
        MLP(out_features=3, num_cells=[32]),
    )
    actor = QValueActor(net, in_keys=["pixels"], spec=env.action_spec)
    actor(env.reset())  # the lazy layers
    loss_module = DQNLoss(actor, action_space=env.action_spec, delay_value=True)
    updater = SoftUpdate(loss_module, eps=0.95)
    optim = torch.optim.Adam(loss_module.parameters(), lr=1e-3)

    collector = Collector(env, actor, frames_per_batch=60, total_frames=360)
    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(1_000), transform=MultiStepTransform(n_steps=3, gamma=0.95), batch_size=16
    )
    frames, losses, rewards = 0, [], []
    for data in collector:
        frames += data.numel()
        rb.extend(data)
        rewards.append(data["next", "reward"].flatten().tolist() + data["pixels"].mean((-1, -2, -3)).tolist())
        for _ in range(3):
            batch = rb.sample()
            assert batch["pixels"].shape == (16, 3, 24, 24) and "steps_to_next_obs" in batch.keys()
            loss = loss_module(batch)["loss"]
            optim.zero_grad()
            loss.backward()
            optim.step()
            updater.step()
            losses.append(loss.item())
        collector.update_policy_weights_()
    evaluate(env, actor)
    collector.shutdown()
    return {"frames": frames, "stored": len(rb), "loss": losses[-1], "equal": rewards[0]}


if __name__ == "__main__":
    print(main(0))
