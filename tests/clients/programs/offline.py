import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import tempfile

import torch
from rl.collectors import Collector
from rl.data import ImmutableDatasetWriter, SamplerWithoutReplacement, TensorDictReplayBuffer, TensorStorage
from rl.envs import Compose, DoubleToFloat, GymEnv, StepCounter, TransformedEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torch import nn
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import IQLLoss, SoftUpdate

from clients.evaluation import evaluate


def make_env():
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(DoubleToFloat(), StepCounter()))


def swing(tensordict):
    """Pushes to and fro."""
    return tensordict.set("action", 2 * torch.sin(0.3 * tensordict["step_count"]))


def write_dataset(directory, seed):
    collector = Collector(make_env, swing, frames_per_batch=1001, total_frames=1001)
    collector.set_seed(seed)
    for data in collector:
        data[1:].exclude("collector").memmap_(directory)  # the first was made before the seed
    collector.shutdown()


def main(seed):
    with tempfile.TemporaryDirectory() as directory:
        write_dataset(directory, seed)
        rb = TensorDictReplayBuffer(
            storage=TensorStorage(TensorDict.load_memmap(directory)),
            sampler=SamplerWithoutReplacement(shuffle=False),
            writer=ImmutableDatasetWriter(),
            batch_size=100,
        )
        env = make_env()
        env.set_seed(seed + 1)
        torch.manual_seed(seed)
        net = nn.Sequential(MLP(in_features=3, out_features=2, num_cells=[64, 64]), NormalParamExtractor())
        actor = ProbabilisticActor(
            TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
            spec=env.action_spec,
            in_keys=["loc", "scale"],
            distribution_class=TanhNormal,
            distribution_kwargs={"low": env.action_spec.space.low, "high": env.action_spec.space.high},
        )
        qvalue = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[64]), in_keys=["observation", "action"])
        value = ValueOperator(MLP(in_features=3, out_features=1, num_cells=[64]), in_keys=["observation"])
        loss_module = IQLLoss(actor, qvalue, value_network=value, temperature=3.0, expectile=0.7)
        loss_module.make_value_estimator(gamma=0.99)
        updater = SoftUpdate(loss_module, tau=0.01)
        optim = torch.optim.Adam(loss_module.parameters(), lr=1e-3)

        losses = []
        for _ in range(5):
            for batch in rb:
                loss = loss_module(batch)
                total = loss["loss_actor"] + loss["loss_qvalue"] + loss["loss_value"]
                optim.zero_grad()
                total.backward()
                optim.step()
                updater.step()
                losses.append(total.item())
        trained = evaluate(env, actor, max_steps=100)
        try:
            rb.extend(trained)
        except RuntimeError:
            refused = True
        else:
            refused = False
    rewards = trained["next", "reward"].flatten().tolist()
    return {"frames": 1000, "loss": losses[-1], "refused": refused, "return": sum(rewards), "equal": losses}


if __name__ == "__main__":
    print(main(0))
