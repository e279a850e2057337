import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import torch
from rl.collectors import Collector
from rl.collectors.utils import split_trajectories
from rl.data import LazyTensorStorage, ReplayBuffer, SliceSamplerWithoutReplacement
from rl.envs import GymEnv, RewardSum, StepCounter, TransformedEnv
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ReinforceLoss
from torchrl.objectives.value import TDLambdaEstimator

from clients.evaluation import evaluate


def main(seed):
    env = TransformedEnv(TransformedEnv(GymEnv("CartPole-v1"), StepCounter(100)), RewardSum())
    env.set_seed(seed)
    torch.manual_seed(seed)
    actor = ProbabilisticActor(
        TensorDictModule(MLP(in_features=4, out_features=2, num_cells=[32]), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        spec=env.action_spec,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[32]), in_keys=["observation"])
    advantage = TDLambdaEstimator(gamma=0.99, lmbda=0.95, value_network=critic)
    loss_module = ReinforceLoss(actor, critic)
    optim = torch.optim.Adam(loss_module.parameters(), lr=1e-2)

    collector = Collector(env, actor, frames_per_batch=300, total_frames=1200)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(300),
        sampler=SliceSamplerWithoutReplacement(num_slices=4, traj_key=("collector", "traj_ids"), strict_length=False),
        batch_size=64,
    )
    lengths, losses, frames = [], [], 0
    for data in collector:
        frames += data.numel()
        padded = split_trajectories(data)
        nested = split_trajectories(data, as_nested=True)
        rows = [row.sum().item() for row in nested["next", "reward"].unbind(0)]
        assert rows == (padded["next", "reward"].squeeze(-1) * padded["collector", "mask"]).sum(-1).tolist()
        lengths.append(rows)
        with torch.no_grad():
            advantage(padded)
        loss = loss_module(padded[padded["collector", "mask"]])
        total = loss["loss_actor"] + loss["loss_value"]
        optim.zero_grad()
        total.backward()
        optim.step()
        losses.append(total.item())
        rb.empty()
        rb.extend(data.exclude("sample_log_prob"))
        batch = rb.sample()
        assert batch["collector", "traj_ids"].unique().numel() <= 4
        collector.update_policy_weights_()
    evaluate(env, actor)
    collector.shutdown()
    return {
        "frames": frames,
        "loss": losses[-1],
        "return": max(lengths[-1]),
        "equal": losses + [length for batch in lengths for length in batch],
    }


if __name__ == "__main__":
    print(main(0))
