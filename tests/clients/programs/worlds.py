import clients.chosen_package  # noqa: F401  `rl` is engram or TorchRL

# isort: split
import torch
from rl.collectors import Collector
from rl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from rl.envs import ExplorationType, RewardSum, TransformedEnv, check_env_specs, set_exploration_type
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss, ValueEstimators

from clients.evaluation import evaluate
from clients.torchrl_field import AGENTS, WORLDS, Field

STEPS = 10


def main(seed):
    env = TransformedEnv(Field(STEPS), RewardSum(in_keys=[("agents", "reward")], out_keys=[("agents", "return")]))
    check_env_specs(env)
    env.set_seed(seed)
    torch.manual_seed(seed)
    net = nn.Sequential(
        MultiAgentMLP(2, 4, AGENTS, centralized=False, share_params=True, depth=1, num_cells=32), NormalParamExtractor()
    )
    spec = env.full_action_spec_unbatched[env.action_key]
    actor = ProbabilisticActor(
        TensorDictModule(net, [("agents", "observation")], [("agents", "loc"), ("agents", "scale")]),
        spec=env.full_action_spec_unbatched,
        in_keys=[("agents", "loc"), ("agents", "scale")],
        out_keys=[env.action_key],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
        return_log_prob=True,
    )
    critic = TensorDictModule(
        MultiAgentMLP(2, 1, AGENTS, centralized=True, share_params=True, depth=1, num_cells=32),
        in_keys=[("agents", "observation")],
        out_keys=[("agents", "state_value")],
    )
    loss_module = ClipPPOLoss(actor, critic, normalize_advantage=False)
    loss_module.set_keys(
        reward=env.reward_key,
        action=env.action_key,
        value=("agents", "state_value"),
        done=("agents", "done"),
        terminated=("agents", "terminated"),
    )
    loss_module.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.9)
    optim = torch.optim.Adam(loss_module.parameters(), lr=3e-3)

    collector = Collector(env, actor, frames_per_batch=20 * WORLDS, total_frames=60 * WORLDS)
    rb = ReplayBuffer(storage=LazyTensorStorage(20 * WORLDS), sampler=SamplerWithoutReplacement(), batch_size=40)
    frames, losses, returns = 0, [], []
    for data in collector:
        frames += data.numel()
        assert data.shape == (WORLDS, 20)
        for name in ("done", "terminated"):
            flags = data["next", name].unsqueeze(-1).expand(data["next", "agents", "reward"].shape)
            data["next", "agents", name] = flags.clone()
        returns += data["next", "agents", "return"][data["next", "agents", "done"]].tolist()
        with torch.no_grad():
            loss_module.value_estimator(
                data, params=loss_module.critic_network_params, target_params=loss_module.target_critic_network_params
            )
        rb.extend(data.reshape(-1))
        for batch in rb:
            loss = loss_module(batch)
            total = loss["loss_objective"] + loss["loss_critic"] + loss["loss_entropy"]
            optim.zero_grad()
            total.backward()
            optim.step()
            losses.append(total.item())
        collector.update_policy_weights_()
    assert evaluate(env, actor).shape == (WORLDS, STEPS)  # world 0 is done first
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        whole = env.rollout(30, actor, break_when_any_done=False)
    ended = whole["next", "done"].sum((1, 2)).tolist()
    assert ended == [30 // (STEPS + world) for world in range(WORLDS)]
    collector.shutdown()
    return {"frames": frames, "loss": losses[-1], "return": returns[-1], "ended": ended}


if __name__ == "__main__":
    print(main(0))
