import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import time

import torch
from rl.collectors import MultiAsyncCollector
from rl.data import LazyMemmapStorage, ReplayBuffer
from rl.envs import GymEnv
from tensordict.nn import TensorDictSequential
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from clients.evaluation import evaluate


def make_env():
    return GymEnv("CartPole-v1")


def main(seed):
    torch.manual_seed(seed)
    env = make_env()
    actor = QValueActor(MLP(in_features=4, out_features=2, num_cells=[32]), spec=env.action_spec)
    exploration = EGreedyModule(spec=env.action_spec, eps_init=0.3, eps_end=0.3)
    loss_module = DQNLoss(actor, action_space=env.action_spec, delay_value=True)
    updater = SoftUpdate(loss_module, eps=0.99)
    optim = torch.optim.Adam(loss_module.parameters(), lr=1e-3)

    rb = ReplayBuffer(storage=LazyMemmapStorage(50_000), batch_size=32, shared=True)
    collector = MultiAsyncCollector(
        [make_env, make_env],
        TensorDictSequential(actor, exploration),
        replay_buffer=rb,
        frames_per_batch=50,
        total_frames=-1,
    )
    collector.start()
    losses = []
    while len(rb) < 500 or len(losses) < 50:
        if len(rb) < 100:
            time.sleep(0.01)
            continue
        loss = loss_module(rb.sample())["loss"]
        optim.zero_grad()
        loss.backward()
        optim.step()
        updater.step()
        losses.append(loss.item())
        if len(losses) % 20 == 0:
            collector.update_policy_weights_()
    with collector.pause():
        time.sleep(0.2)
        before = rb.write_count
        time.sleep(0.2)
        paused = rb.write_count == before
    after = time.monotonic() + 120
    while rb.write_count == before and time.monotonic() < after:
        time.sleep(0.01)
    went_on = rb.write_count > before
    evaluate(make_env(), actor)
    collector.async_shutdown()
    return {"frames": len(rb), "loss": losses[-1], "paused": paused, "went_on": went_on}


if __name__ == "__main__":
    print(main(0))
