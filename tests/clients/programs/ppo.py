import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import torch
from rl.collectors import Collector
from rl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from rl.envs import Compose, DoubleToFloat, GymEnv, ObservationNorm, RewardSum, StepCounter, TransformedEnv
from tensordict.nn import TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torch import nn
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from clients.evaluation import evaluate


def main(seed):
    env = TransformedEnv(
        GymEnv("Pendulum-v1"),
        Compose(ObservationNorm(in_keys=["observation"]), DoubleToFloat(), StepCounter(), RewardSum()),
    )
    env.set_seed(seed)
    torch.manual_seed(seed)
    env.transform[0].init_stats(num_iter=200, reduce_dim=0, cat_dim=0)

    torch.manual_seed(seed)
    net = nn.Sequential(MLP(in_features=3, out_features=2, num_cells=[64, 64]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        spec=env.action_spec,
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": env.action_spec.space.low, "high": env.action_spec.space.high},
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(in_features=3, out_features=1, num_cells=[64, 64]), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    loss_module = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=1e-4)
    optim = torch.optim.Adam(loss_module.parameters(), lr=3e-4)

    collector = Collector(env, actor, frames_per_batch=500, total_frames=1500, split_trajs=False)
    rb = ReplayBuffer(storage=LazyTensorStorage(max_size=500), sampler=SamplerWithoutReplacement(), batch_size=100)
    frames, losses, rewards = 0, [], []
    for data in collector:
        frames += data.numel()
        rewards.append(data["next", "reward"].flatten().tolist())
        for _ in range(3):
            advantage(data)
            rb.extend(data.reshape(-1))
            for batch in rb:
                loss = loss_module(batch)
                total = loss["loss_objective"] + loss["loss_critic"] + loss["loss_entropy"]
                total.backward()
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
                optim.step()
                optim.zero_grad()
                losses.append(total.item())
    evaluate(env, actor)
    collector.shutdown()
    return {"frames": frames, "updates": len(losses), "loss": losses[-1], "return": sum(rewards[-1])}


if __name__ == "__main__":
    print(main(0))
