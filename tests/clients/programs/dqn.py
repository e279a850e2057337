import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import gymnasium
import torch
from rl.collectors import Collector
from rl.data import LazyTensorStorage, TensorDictReplayBuffer
from rl.envs import (
    Compose,
    ExplorationType,
    GymEnv,
    GymWrapper,
    RewardSum,
    StepCounter,
    TransformedEnv,
    set_exploration_type,
)
from tensordict.nn import TensorDictSequential
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from clients.evaluation import evaluate


class SameStart(gymnasium.Wrapper):
    """Begins every episode in one state."""

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=7, options=options)


def with_counters(env):
    return TransformedEnv(env, Compose(StepCounter(max_steps=200), RewardSum()))


def main(seed):
    env = with_counters(GymEnv("CartPole-v1"))
    env.set_seed(seed)
    torch.manual_seed(seed)
    actor = QValueActor(MLP(in_features=4, out_features=2, num_cells=[64, 64]), spec=env.action_spec)
    exploration = EGreedyModule(spec=env.action_spec, annealing_num_steps=1000, eps_end=0.05)
    loss_module = DQNLoss(actor, action_space=env.action_spec, delay_value=True, double_dqn=True)
    loss_module.make_value_estimator(gamma=0.99)
    updater = SoftUpdate(loss_module, eps=0.99)
    optim = torch.optim.Adam(loss_module.parameters(), lr=1e-3)

    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        untrained = with_counters(GymWrapper(SameStart(gymnasium.make("CartPole-v1")))).rollout(200, actor)

    collector = Collector(
        env, TensorDictSequential(actor, exploration), frames_per_batch=100, total_frames=2000, init_random_frames=200
    )
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=64)
    frames, losses, returns = 0, [], []
    for data in collector:
        frames += data.numel()
        exploration.step(data.numel())
        rb.extend(data.reshape(-1))
        done = data["next", "done"]
        returns += data["next", "episode_reward"][done].tolist()
        if len(rb) < 200:
            continue
        for _ in range(10):
            loss = loss_module(rb.sample())["loss"]
            optim.zero_grad()
            loss.backward()
            optim.step()
            updater.step()
            losses.append(loss.item())
        collector.update_policy_weights_()
    evaluate(env, actor)
    collector.shutdown()
    return {
        "frames": frames,
        "loss": sum(losses[-10:]) / 10,
        "return": sum(returns[-5:]) / 5,
        "equal": untrained["next", "observation"].flatten().tolist(),
    }


if __name__ == "__main__":
    print(main(0))
