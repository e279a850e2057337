import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import gymnasium
import torch
from rl.collectors import Collector
from rl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from rl.envs import (
    Compose,
    ExplorationType,
    GymEnv,
    GymWrapper,
    InitTracker,
    RewardSum,
    StepCounter,
    TransformedEnv,
    set_exploration_type,
)
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.modules import MLP, EGreedyModule, LSTMModule, QValueModule, set_recurrent_mode
from torchrl.objectives import DQNLoss, SoftUpdate

from clients.evaluation import evaluate


class SameStart(gymnasium.Wrapper):
    """Begins every episode in one state."""

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=7, options=options)


def recurrent(env, lstm):
    env = TransformedEnv(env, Compose(InitTracker(), StepCounter(200), RewardSum()))
    env.append_transform(lstm.make_tensordict_primer())
    return env


def main(seed):
    torch.manual_seed(seed)
    embed = TensorDictModule(MLP(in_features=4, out_features=32, num_cells=[32]), ["observation"], ["embed"])
    lstm = LSTMModule(input_size=32, hidden_size=32, in_key="embed", out_key="features")
    head = TensorDictModule(MLP(in_features=32, out_features=2, num_cells=[32]), ["features"], ["action_value"])
    env = recurrent(GymEnv("CartPole-v1"), lstm)
    env.set_seed(seed)
    actor = TensorDictSequential(embed, lstm, head, QValueModule(spec=env.action_spec))
    exploration = EGreedyModule(spec=env.action_spec, annealing_num_steps=500, eps_end=0.1)
    loss_module = DQNLoss(actor, action_space=env.action_spec, delay_value=True)
    loss_module.make_value_estimator(gamma=0.99)
    updater = SoftUpdate(loss_module, eps=0.95)
    optim = torch.optim.Adam(actor.parameters(), lr=3e-3)

    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        untrained = recurrent(GymWrapper(SameStart(gymnasium.make("CartPole-v1"))), lstm).rollout(100, actor)

    collector = Collector(env, TensorDictSequential(actor, exploration), frames_per_batch=50, total_frames=800)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2_000),
        sampler=SliceSampler(slice_len=8, traj_key=("collector", "traj_ids"), strict_length=True),
        batch_size=64,
    )
    frames, losses = 0, []
    for data in collector:
        frames += data.numel()
        exploration.step(data.numel())
        rb.extend(data)
        if frames < 200:
            continue
        for _ in range(3):
            batch = rb.sample().reshape(8, 8)
            with set_recurrent_mode("recurrent"):
                loss = loss_module(batch)["loss"]
            optim.zero_grad()
            loss.backward()
            optim.step()
            losses.append(loss.item())
        updater.step()
        collector.update_policy_weights_()
    evaluate(env, actor)
    collector.shutdown()
    return {
        "frames": frames,
        "loss": losses[-1],
        "return": data["next", "episode_reward"].max().item(),
        "equal": untrained["next", "observation"].flatten().tolist(),
    }


if __name__ == "__main__":
    print(main(0))
