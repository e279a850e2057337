import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import tempfile

import torch
from rl.collectors import Collector
from rl.data import LazyMemmapStorage, MultiStep, TensorDictReplayBuffer
from rl.envs import Compose, DoubleToFloat, GymEnv, RewardSum, StepCounter, TransformedEnv
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.modules import MLP, AdditiveGaussianModule, TanhModule, ValueOperator
from torchrl.objectives import SoftUpdate, TD3Loss

from clients.evaluation import evaluate


def make_env():
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(DoubleToFloat(), StepCounter(100), RewardSum()))


def main(seed):
    env = make_env()
    torch.manual_seed(seed)
    actor = TensorDictSequential(
        TensorDictModule(MLP(in_features=3, out_features=1, num_cells=[64, 64]), ["observation"], ["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=env.action_spec),
    )
    qvalue = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[64, 64]), in_keys=["action", "observation"])
    noise = AdditiveGaussianModule(spec=env.action_spec, sigma_init=0.1, sigma_end=0.1, device="cpu")
    loss_module = TD3Loss(actor, qvalue, action_spec=env.action_spec, num_qvalue_nets=2, loss_function="l2")
    loss_module.make_value_estimator(gamma=0.99)
    updater = SoftUpdate(loss_module, eps=0.995)
    actor_optim = torch.optim.Adam(loss_module.actor_network_params.values(True, True), lr=1e-3)
    value_optim = torch.optim.Adam(loss_module.qvalue_network_params.values(True, True), lr=1e-3)

    torch.manual_seed(seed)
    collector = Collector(
        make_env,
        TensorDictSequential(actor, noise),
        frames_per_batch=100,
        total_frames=1000,
        postproc=MultiStep(gamma=0.99, n_steps=3),
    )
    collector.set_seed(seed)
    rewards, losses, frames = [], [], 0
    with tempfile.TemporaryDirectory() as directory:
        rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(2_000, scratch_dir=directory), batch_size=64, prefetch=2)
        for data in collector:
            frames += data.numel()
            rewards.append(data["next", "original_reward"].flatten().tolist())
            rb.extend(data)
            for step in range(10):
                batch = rb.sample()
                loss = loss_module.value_loss(batch)[0]
                value_optim.zero_grad()
                loss.backward()
                value_optim.step()
                if step % 2:
                    actor_loss = loss_module.actor_loss(batch)[0]
                    actor_optim.zero_grad()
                    actor_loss.backward()
                    actor_optim.step()
                    updater.step()
                losses.append(loss.item())
        evaluate(make_env(), actor)
    collector.shutdown()
    return {"frames": frames, "loss": losses[-1], "return": sum(rewards[-1]), "equal": rewards[0]}


if __name__ == "__main__":
    print(main(0))
