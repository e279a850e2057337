"""A small Rainbow in the style of CleanRL: pixels, a categorical double network with noise, priorities, n steps."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium import spaces

LENGTH, ATOMS, V_MAX = 6, 11, 1.0


class Corridor(gym.Env):
    """A dot in a picture of one row: 1 is right, where the reward lies at the end; the left end ends the episode."""

    observation_space = spaces.Box(0, 255, (1, 1, LENGTH), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(1, LENGTH - 1))
        return self._picture(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at += 1 if action == 1 else -1
        return self._picture(), float(self.at == LENGTH - 1), self.at in (0, LENGTH - 1), False, {}

    def _picture(self) -> np.ndarray:
        picture = np.zeros((1, 1, LENGTH), np.uint8)
        picture[..., self.at] = 255
        return picture


class NoisyLinear(nn.Module):
    """A layer whose weights have learned, factorised noise (Fortunato et al., 2018)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mean = nn.Linear(inputs, outputs)
        self.weight_scale = nn.Parameter(torch.full((outputs, inputs), 0.5 / inputs**0.5))
        self.bias_scale = nn.Parameter(torch.full((outputs,), 0.5 / inputs**0.5))
        self.reset_noise()

    def reset_noise(self) -> None:
        x, y = (n.sign() * n.abs().sqrt() for n in (torch.randn(s) for s in self.weight_scale.shape[::-1]))
        self.noise = torch.outer(y, x), y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.noise
        return F.linear(x, self.mean.weight + self.weight_scale * weight, self.mean.bias + self.bias_scale * bias)


class Network(nn.Module):
    """The distribution of the return of each action: [n, actions, atoms]."""

    def __init__(self) -> None:
        super().__init__()
        self.support = torch.linspace(0, V_MAX, ATOMS)
        self.layers = nn.ModuleList([NoisyLinear(LENGTH, 32), NoisyLinear(32, 2 * ATOMS)])

    def reset_noise(self) -> None:
        for layer in self.layers:
            layer.reset_noise()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.layers[0](x.float().flatten(1) / 255.0))
        return self.layers[1](hidden).view(-1, 2, ATOMS).softmax(2)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return (self(x) * self.support).sum(2)


def projected(returns: torch.Tensor, support: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """A distribution over returns `[n, atoms]` as one over the support (Bellemare et al., 2017)."""
    at = returns.clamp(0, V_MAX) / (support[1] - support[0])
    near = (1 - (at.unsqueeze(1) - torch.arange(ATOMS).view(1, -1, 1)).abs()).clamp(min=0)
    return (near * probabilities.unsqueeze(1)).sum(2)


def main(PrioritizedReplayBuffer: Any, total_timesteps: int, seed: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    gamma, n_step, batch_size, device = 0.9, 3, 32, torch.device("cpu")
    envs = gym.vector.SyncVectorEnv(
        [lambda: gym.wrappers.TimeLimit(Corridor(), 8)], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )
    q_network, target_network = Network(), Network()
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=3e-3)
    rb = PrioritizedReplayBuffer(500, envs.single_observation_space.shape, device, n_step, gamma, 0.5, 0.4, 1e-6)
    losses = []
    obs, _ = envs.reset(seed=seed)
    for global_step in range(total_timesteps):
        rb.beta = min(1.0, 0.4 + global_step * (1.0 - 0.4) / total_timesteps)
        with torch.no_grad():
            actions = q_network.values(torch.Tensor(obs).to(device)).argmax(1).cpu().numpy()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        real_next_obs = next_obs.copy()
        for idx, trunc in enumerate(truncations):
            if trunc:
                real_next_obs[idx] = infos["final_obs"][idx]
        rb.add(obs, actions, rewards, real_next_obs, terminations)
        obs = next_obs
        q_network.reset_noise()
        if global_step < 50 or global_step % 2:
            continue
        target_network.reset_noise()
        data = rb.sample(batch_size)
        with torch.no_grad():
            best = q_network.values(data.next_observations).argmax(1)
            next_pmfs = target_network(data.next_observations)[torch.arange(batch_size), best]
            returns = data.rewards + gamma**n_step * q_network.support * (1 - data.dones.float())
            target = projected(returns, q_network.support, next_pmfs)
        predicted = q_network(data.observations)[torch.arange(batch_size), data.actions.squeeze(1)]
        loss_per_sample = -(target * predicted.clamp(1e-5, 1 - 1e-5).log()).sum(1)
        loss = (loss_per_sample * data.weights.squeeze()).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rb.update_priorities(data.indices, loss_per_sample.detach().cpu().numpy())
        if global_step % 20 == 0:
            target_network.load_state_dict(q_network.state_dict())
    envs.close()
    pictures = np.stack([np.eye(LENGTH, dtype=np.uint8)[at].reshape(1, 1, LENGTH) * 255 for at in range(1, LENGTH - 1)])
    for layer in q_network.layers:
        layer.noise = tuple(torch.zeros_like(part) for part in layer.noise)
    with torch.no_grad():
        return {"losses": losses, "values": q_network.values(torch.from_numpy(pictures))}
