"""What clients rely on when their environments run in processes that may die, and when they cut trajectories."""

import os
import signal
import warnings
from typing import Any

import torch

from clients.packages import Package, sentence


def dies_once(rl: Package, folder: str) -> Any:
    """A CartPole whose first process kills itself at its 15th step."""

    class Dies(rl.envs.GymEnv):  # type: ignore[name-defined,misc]
        steps = 0

        def _step(self, tensordict: Any) -> Any:
            self.steps += 1
            if self.steps == 15 and not os.path.exists(f"{folder}/died"):
                open(f"{folder}/died", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return super()._step(tensordict)

    return Dies("CartPole-v1")


@sentence(
    "`restarts=n`: a worker of a multi collector that dies is replaced, and a warning says so",
    not_in_torchrl="has no such argument: the collector ends with an error",
)
def workers_come_back(rl: Package) -> None:
    where = os.getcwd()
    make = [lambda: rl.envs.GymEnv("CartPole-v1"), lambda: dies_once(rl, where)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collector = rl.collectors.MultiSyncCollector(make, frames_per_batch=20, total_frames=200, restarts=1)
        frames = sum(batch.numel() for batch in collector)
        collector.shutdown()
    assert frames == 200
    assert any("SIGKILL" in str(w.message) and "0 of 1 restarts are left" in str(w.message) for w in caught)


@sentence(
    "`restarts=n`: a worker of a ParallelEnv that dies is replaced, and the episode before is marked as truncated",
    not_in_torchrl="has no such argument: the environment ends with an error",
)
def environments_come_back(rl: Package) -> None:
    where = os.getcwd()
    env = rl.envs.ParallelEnv(2, [lambda: rl.envs.GymEnv("CartPole-v1"), lambda: dies_once(rl, where)], restarts=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        batch = env.rollout(30, break_when_any_done=False)
    env.close()
    assert os.path.exists("died") and batch.shape == (2, 30)
    after, before = batch["observation"][:, 1:], batch["next", "observation"][:, :-1]
    is_joined = (after == before).all(-1)
    assert bool((is_joined != batch["next", "done"][:, :-1].squeeze(-1)).all())


@sentence("`trajs_per_batch` in collectors with workers: each batch has so many whole trajectories")
def workers_collect_whole_trajectories(rl: Package) -> None:
    make = [lambda: rl.envs.GymEnv("CartPole-v1")] * 2
    collector = rl.collectors.MultiSyncCollector(make, frames_per_batch=64, total_frames=500, trajs_per_batch=4)
    batch = next(iter(collector))
    collector.shutdown()
    mask = batch["collector", "mask"]
    assert len(mask) == 4
    for row, steps in zip(batch, mask, strict=True):
        done = row["next", "done"].squeeze(-1)[steps]
        assert bool(done[-1]) and not bool(done[:-1].any())


@sentence(
    "The state of a collector with `trajs_per_batch` has the whole trajectories that wait, and none is lost",
    not_in_torchrl="its state has counters only",
)
def waiting_trajectories_are_saved(rl: Package) -> None:
    def make() -> Any:
        return rl.collectors.Collector(
            lambda: rl.envs.GymEnv("CartPole-v1"), frames_per_batch=200, total_frames=-1, trajs_per_batch=1
        )

    first, second = make(), make()
    next(iter(first))
    state = first.state_dict()
    expected = next(iter(first))
    second.load_state_dict(state)
    batch = next(iter(second))
    assert torch.equal(batch["observation"], expected["observation"])
    first.shutdown()
    second.shutdown()


@sentence("`max_frames_per_traj` cuts the trajectories of a vector environment")
def vector_environments_are_cut(rl: Package) -> None:
    env = rl.envs.GymEnv("CartPole-v1", num_envs=2)
    collector = rl.collectors.Collector(env, frames_per_batch=60, total_frames=60, max_frames_per_traj=5)
    batch = next(iter(collector))
    done, truncated = (batch["next", key].squeeze(-1) for key in ("done", "truncated"))
    assert done.reshape(2, -1, 5).any(-1).all() and truncated.any()
    collector.shutdown()
