import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import torch
from rl.collectors import Collector
from rl.data import LazyMemmapStorage, TensorDictReplayBuffer
from rl.envs import (
    Compose,
    DoubleToFloat,
    ExplorationType,
    GymEnv,
    ParallelEnv,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
    set_exploration_type,
)
from tensordict.nn import TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torch import nn
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from clients.evaluation import evaluate


def make_pendulum():
    return GymEnv("Pendulum-v1")


def main(seed):
    env = TransformedEnv(
        ParallelEnv(2, make_pendulum),
        Compose(RewardScaling(loc=0.0, scale=0.1), DoubleToFloat(), StepCounter(max_steps=100), RewardSum()),
    )
    env.set_seed(seed)
    torch.manual_seed(seed)
    action_spec = env.action_spec_unbatched
    net = nn.Sequential(MLP(in_features=3, out_features=2, num_cells=[64, 64]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        spec=action_spec,
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": action_spec.space.low, "high": action_spec.space.high},
        default_interaction_type=ExplorationType.RANDOM,
    )
    qvalue = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[64, 64]), in_keys=["action", "observation"])
    loss_module = SACLoss(actor, qvalue, num_qvalue_nets=2, action_spec=action_spec)
    loss_module.make_value_estimator(gamma=0.99)
    updater = SoftUpdate(loss_module, tau=0.005)
    optim = torch.optim.Adam(loss_module.parameters(), lr=3e-4)

    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        untrained = env.rollout(50, actor)

    collector = Collector(env, actor, frames_per_batch=100, total_frames=800, init_random_frames=200)
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(10_000), batch_size=64)
    frames, losses, rewards = 0, [], []
    for data in collector:
        assert data.shape == (2, 50)
        frames += data.numel()
        rewards.append(data["next", "reward"].sum().item())
        rb.extend(data.reshape(-1))
        if frames <= 200:
            continue
        for _ in range(10):
            loss = loss_module(rb.sample())
            total = loss["loss_actor"] + loss["loss_qvalue"] + loss["loss_alpha"]
            optim.zero_grad()
            total.backward()
            optim.step()
            updater.step()
            losses.append(loss["loss_qvalue"].item())
        collector.update_policy_weights_()
    evaluate(env, actor)
    collector.shutdown()
    return {
        "frames": frames,
        "loss": losses[-1],
        "return": rewards[-1],
        "equal": untrained["next", "reward"].flatten().tolist(),
    }


if __name__ == "__main__":
    print(main(0))
