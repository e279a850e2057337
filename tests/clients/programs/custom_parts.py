import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import gymnasium
import torch
from rl.collectors import Collector
from rl.data import ReplayBuffer
from rl.data.replay_buffers.samplers import Sampler
from rl.data.replay_buffers.storages import Storage
from rl.data.replay_buffers.writers import Writer
from rl.envs import GymWrapper, TransformedEnv
from rl.envs.transforms import Transform
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from clients.evaluation import evaluate


class SameStart(gymnasium.Wrapper):
    """Begins every episode in one state."""

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=7, options=options)


class AddTime(Transform):
    """Appends the part of the episode that is over to the observation."""

    def __init__(self, horizon):
        super().__init__(in_keys=["observation"], out_keys=["observation"])
        self.horizon = horizon
        self.time = 0

    def _append(self, tensordict):
        time = torch.full((1,), self.time / self.horizon)
        return tensordict.set("observation", torch.cat([tensordict["observation"], time], -1))

    def _reset(self, tensordict, tensordict_reset):
        self.time = 0
        return self._append(tensordict_reset)

    def _step(self, tensordict, next_tensordict):
        self.time += 1
        return self._append(next_tensordict)

    def transform_observation_spec(self, observation_spec):
        spec = observation_spec["observation"]
        low = torch.cat([spec.space.low, torch.zeros(1)])
        high = torch.cat([spec.space.high, torch.ones(1)])
        observation_spec["observation"] = type(spec)(low=low, high=high, shape=(5,), dtype=spec.dtype)
        return observation_spec


class HalfPrecision(Transform):
    """Stores rewards in half precision."""

    def _inv_call(self, tensordict):
        return tensordict.set(("next", "reward"), tensordict["next", "reward"].half())

    def forward(self, tensordict):
        return tensordict.set(("next", "reward"), tensordict["next", "reward"].float())


class DictStorage(Storage):
    """Items in a dictionary."""

    def __init__(self, max_size):
        super().__init__(max_size)
        self.items = {}

    def set(self, cursor, data, **kwargs):
        if isinstance(cursor, int):
            self.items[cursor] = data
        else:
            for index, item in zip(torch.as_tensor(cursor).tolist(), data, strict=True):
                self.items[index] = item

    def get(self, index):
        if isinstance(index, int):
            return self.items[index]
        return torch.stack([self.items[i] for i in torch.as_tensor(index).tolist()])

    def __len__(self):
        return len(self.items)

    def contains(self, item):
        return item in self.items

    def _empty(self):
        self.items.clear()

    def state_dict(self):
        return {"items": self.items}

    def load_state_dict(self, state_dict):
        self.items = state_dict["items"]


class EverySecond(Writer):
    """Keeps every second step."""

    def __init__(self):
        super().__init__()
        self.cursor = 0

    def add(self, data):
        index = self.cursor % self._storage.max_size
        self._storage.set(index, data)
        self.cursor += 1
        return index

    def extend(self, data):
        data = data[::2]
        index = torch.arange(self.cursor, self.cursor + len(data)) % self._storage.max_size
        self._storage.set(index, data)
        self.cursor += len(data)
        return index

    def _empty(self):
        self.cursor = 0

    def dumps(self, path):
        raise NotImplementedError

    def loads(self, path):
        raise NotImplementedError

    def state_dict(self):
        return {"cursor": self.cursor}

    def load_state_dict(self, state_dict):
        self.cursor = state_dict["cursor"]


class Strides(Sampler):
    """Walks over the storage with a stride, the same in every run."""

    def __init__(self):
        super().__init__()
        self.at = 0

    def sample(self, storage, batch_size):
        index = (self.at + 7 * torch.arange(batch_size)) % len(storage)
        self.at = (self.at + 7 * batch_size) % len(storage)
        return index, {"stride": 7}

    def _empty(self):
        self.at = 0

    def dumps(self, path):
        raise NotImplementedError

    def loads(self, path):
        raise NotImplementedError

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state_dict):
        self.at = state_dict["at"]


def main(seed):
    env = TransformedEnv(GymWrapper(SameStart(gymnasium.make("CartPole-v1"))), AddTime(horizon=500))
    torch.manual_seed(seed)
    actor = QValueActor(MLP(in_features=5, out_features=2, num_cells=[32]), spec=env.action_spec)
    loss_module = DQNLoss(actor, action_space=env.action_spec, delay_value=True)
    updater = SoftUpdate(loss_module, eps=0.95)
    optim = torch.optim.Adam(loss_module.parameters(), lr=1e-2)

    collector = Collector(env, actor, frames_per_batch=100, total_frames=600)
    rb = ReplayBuffer(
        storage=DictStorage(200),
        writer=EverySecond(),
        sampler=Strides(),
        transform=HalfPrecision(),
        collate_fn=lambda batch: batch,
        batch_size=32,
    )
    frames, losses, observations = 0, [], []
    for data in collector:
        frames += data.numel()
        assert rb.extend(data).numel() == 50
        observations += data["next", "observation"].sum(-1).tolist()
        for _ in range(5):
            loss = loss_module(rb.sample())["loss"]
            optim.zero_grad()
            loss.backward()
            optim.step()
            updater.step()
            losses.append(loss.item())
        collector.update_policy_weights_()
    evaluate(env, actor)
    collector.shutdown()
    assert rb[0]["next", "reward"].dtype == torch.float32
    return {"frames": frames, "stored": len(rb), "loss": losses[-1], "equal": losses + observations}


if __name__ == "__main__":
    print(main(0))
