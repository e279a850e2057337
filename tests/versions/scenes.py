"""Short scenes of what programs do first, each by itself, for versions of other packages: `make oldest`, `make newest`.

    python tests/versions/scenes.py                          # a line for each scene, and how many passed
    python tests/versions/scenes.py constraints-oldest.txt   # and whether these very versions are installed
    TRACE=1 python tests/versions/scenes.py "" kill tables   # these scenes, with the tracebacks of those that fail

Nothing here needs pytest, but for the scene of `engram.testing`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, tensorclass
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

import engram
from engram.cli import convert, info, plot, verify
from engram.collectors import MultiaSyncDataCollector, SyncDataCollector
from engram.data import (
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.data.datasets import read_hdf5, read_minari, read_parquet, write_hdf5, write_minari, write_parquet
from engram.envs import GymEnv, ParallelEnv, RewardSum, StepCounter, TransformedEnv, check_env_specs
from engram.envs.transforms import MultiStepTransform

SCENES: list[Callable[[Path], None]] = []


def scene(does: Callable[[Path], None]) -> Callable[[Path], None]:
    """Of a function that is given an empty folder."""
    SCENES.append(does)
    return does


def steps(count: int, begin: int = 0) -> TensorDict:
    """Steps `begin` to `begin + count`, in episodes of ten."""
    number = torch.arange(begin, begin + count)
    ends = (number % 10 == 9).unsqueeze(-1)
    fields = {"observation": number.float().unsqueeze(-1), "action": number % 3, "episode": number // 10}
    then = {"observation": number.float().unsqueeze(-1) + 1, "reward": torch.ones(count, 1), "done": ends}
    return TensorDict({**fields, "next": TensorDict({**then, "terminated": ends.clone()}, [count])}, [count])


def cart_poles(frames: int = 200) -> TensorDict:
    """Steps that random actions gave."""
    return torch.cat(list(SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=50, total_frames=frames)))


@scene
def dicts_of_arrays(folder: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=16)
    rows = {"obs": np.random.randn(40, 3).astype(np.float32), "action": np.arange(40), "done": np.zeros(40, bool)}
    buffer.extend(rows)
    buffer.add({key: column[7] for key, column in rows.items()})
    batch = buffer.sample()
    assert batch["obs"].shape == (16, 3) and len(buffer) == 41
    assert np.array_equal(np.asarray(buffer[40]["obs"]), rows["obs"][7])


@scene
def tensordicts(folder: Path) -> None:
    for storage in (LazyTensorStorage(100), LazyMemmapStorage(100, scratch_dir=folder / "store")):
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=16, sampler=SamplerWithoutReplacement())
        index = buffer.extend(steps(40))
        assert index.tolist() == list(range(40))
        batch = buffer.sample()
        assert type(batch) is TensorDict and batch["next", "reward"].shape == (16, 1)
        assert torch.equal(batch["observation"], batch["next", "observation"] - 1)
        buffer[:40] = steps(40, begin=100)
        assert buffer[0]["observation"] == 100


@scene
def tensorclasses_and_texts(folder: Path) -> None:
    @tensorclass
    class Step:
        obs: torch.Tensor
        reward: torch.Tensor

    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    buffer.extend(Step(obs=torch.randn(20, 4), reward=torch.ones(20), batch_size=[20]))
    assert buffer.sample().obs.shape == (8, 4)
    talks = ReplayBuffer(storage=ListStorage(10), batch_size=2, collate_fn=list)
    talks.extend([TensorDict({"tokens": torch.arange(n), "text": NonTensorData("a" * n)}, []) for n in (1, 2, 3)])
    assert all(len(talk["text"]) == len(talk["tokens"]) for talk in talks.sample())


@scene
def slices(folder: Path) -> None:
    sampler = SliceSampler(slice_len=4, traj_key="episode", strict_length=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=32)
    buffer.extend(steps(100))
    rows = buffer.sample()["observation"].reshape(8, 4)
    assert (rows.diff(dim=1) == 1).all() and (rows[:, 0] % 10 <= 6).all()


@scene
def priorities(folder: Path) -> None:
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(100), batch_size=32)
    buffer.extend(steps(50))
    batch = buffer.sample()
    batch["td_error"] = torch.rand(32)
    buffer.update_tensordict_priority(batch)
    buffer.update_priority(torch.arange(50), (torch.arange(50) == 3).float() * 1e6)
    assert (buffer.sample()["observation"] == 3).float().mean() > 0.9


@scene
def kill(folder: Path) -> None:
    """Rows in a mapped store outlive the process that wrote them."""
    process = subprocess.run([sys.executable, __file__, "--write-and-die", str(folder / "store")])
    assert process.returncode == -signal.SIGKILL
    buffer = TensorDictReplayBuffer.open(folder / "store", batch_size=32)
    assert len(buffer) == 60 and buffer[59]["observation"] == 59
    buffer.extend(steps(10, begin=60))
    assert buffer.sample()["observation"].shape == (32, 1) and buffer.write_count == 70


def write_and_die(folder: str) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder), batch_size=32)
    buffer.extend(steps(60))
    os.kill(os.getpid(), signal.SIGKILL)


@scene
def checkpoints(folder: Path) -> None:
    for name, checkpointer in (("plain", None), ("h5", H5StorageCheckpointer)):
        old, new = (
            TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=16, generator=torch.Generator())
            for _ in range(2)
        )
        if checkpointer:
            old.storage.checkpointer, new.storage.checkpointer = checkpointer(), checkpointer()
        old.extend(steps(50))
        old.dumps(folder / name)
        new.loads(folder / name)
        assert torch.equal(old.sample()["observation"], new.sample()["observation"])
    assert len(engram.load(folder / "plain")) == 50
    new.load_state_dict(old.state_dict())
    assert len(new) == 50


@scene
def each_observation_once(folder: Path) -> None:
    """Stacks of frames in an eighth of the memory."""
    frames = torch.randint(0, 255, (52, 8, 8), dtype=torch.uint8)
    stacks = torch.stack([frames[k : k + 4] for k in range(49)])
    rows = TensorDict({"pixels": stacks[:-1], "next": {"pixels": stacks[1:]}}, [48])
    rows["next", "done"] = torch.zeros(48, 1, dtype=torch.bool)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100, compact=True), batch_size=16)
    buffer.extend(rows)
    assert torch.equal(buffer[:]["next", "pixels"], stacks[1:]) and torch.equal(buffer[:]["pixels"], stacks[:-1])


@scene
def n_step(folder: Path) -> None:
    transform = MultiStepTransform(n_steps=3, gamma=0.5)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=transform, batch_size=16)
    buffer.extend(steps(30))
    assert buffer[0]["next", "reward"] == 1.75 and buffer[0]["next", "observation"] == 3


@scene
def prefetch(folder: Path) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=10, prefetch=2)
    buffer.extend(steps(50))
    assert all(buffer.sample().shape == (10,) for _ in range(5))


@scene
def environment(folder: Path) -> None:
    for name in ("CartPole-v1", "Pendulum-v1"):
        env = TransformedEnv(GymEnv(name), RewardSum())
        env.append_transform(StepCounter(max_steps=20))
        check_env_specs(env)
        rollout = env.rollout(30)
        assert torch.allclose(rollout["next", "episode_reward"][-1], rollout["next", "reward"].sum(0))


@scene
def collector(folder: Path) -> None:
    logits = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    draw = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=torch.distributions.Categorical
    )
    policy = ProbabilisticTensorDictSequential(logits, draw)
    sampler = SliceSampler(num_slices=4, traj_key=("collector", "traj_ids"))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500), sampler=sampler, batch_size=32)
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    for batch in SyncDataCollector(env, policy, frames_per_batch=100, total_frames=400):
        assert batch["logits"].shape == (100, 2)
        buffer.extend(batch)
    assert buffer.sample().shape == (32,)


@scene
def collector_without_batches(folder: Path) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=32)
    for _ in SyncDataCollector(GymEnv("Pendulum-v1"), frames_per_batch=100, total_frames=300, replay_buffer=buffer):
        buffer.sample()
    assert len(buffer) == 300


@scene
def vector(folder: Path) -> None:
    for batch in SyncDataCollector(GymEnv("CartPole-v1", num_envs=4), frames_per_batch=100, total_frames=400):
        assert batch.shape == (4, 25) and batch["observation"].shape == (4, 25, 4)


@scene
def parallel(folder: Path) -> None:
    """Environments in processes, and collectors in processes."""
    env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
    assert env.rollout(10, break_when_any_done=False).shape == (2, 10)
    env.close()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000, shared=True, lanes=2), batch_size=32)
    workers = MultiaSyncDataCollector(
        [lambda: GymEnv("CartPole-v1")], frames_per_batch=50, total_frames=200, replay_buffer=buffer
    )
    for _ in workers:
        pass
    workers.shutdown()
    assert buffer.write_count >= 200  # workers are ahead of the loop


@scene
def datasets(folder: Path) -> None:
    source = TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=32)
    source.extend(cart_poles())
    for name, write, read in (
        ("rows.h5", write_hdf5, read_hdf5),
        ("rows.parquet", write_parquet, read_parquet),
        ("cart-v0", write_minari, read_minari),
    ):
        assert write(source, folder / name, progress=name == "rows.parquet") == 200
        again = TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=32)
        assert read(folder / name, again, progress=name == "rows.parquet") == 200
        for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
            assert torch.equal(again[:][key].float(), source[:][key].float()), (name, key)


@scene
def command(folder: Path) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(500, scratch_dir=folder / "store"), batch_size=32)
    buffer.extend(cart_poles())
    buffer.storage.flush()
    assert info(folder / "store").rows == 200 and verify(folder / "store").ok
    for to in ("rows.parquet", "rows.h5"):
        convert(folder / "store", folder / to, drop=["ends"] if to == "rows.h5" else [])
        assert info(folder / to).rows == 200
    assert plot(folder / "store", output=folder / "plot.png").stat().st_size > 1000
    entry = [sys.executable, "-c", "from engram.cli.main import run; run()"]
    for words in (["play", "--help"], ["info", "store"], ["head", "store"], ["info", "store", "--json"]):
        done = subprocess.run([*entry, *words], cwd=folder, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), (words, done.stderr)
        assert words[1] != "--help" or "extra 'video'" in done.stdout
    assert json.loads(done.stdout)["rows"] == 200


@scene
def film(folder: Path) -> None:
    """A video of an episode, by imageio and the encoder that it brings."""
    from engram.cli import play

    ends = (torch.arange(8) == 7).unsqueeze(-1)
    then = {
        "done": ends,
        "reward": torch.ones(8, 1),
        "pixels": torch.randint(0, 255, (8, 3, 32, 32), dtype=torch.uint8),
    }
    rows = TensorDict({"pixels": then["pixels"].clone(), "next": TensorDict(then, [8])}, [8])
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=folder / "store"), batch_size=2)
    buffer.extend(rows)
    buffer.storage.flush()
    assert play(folder / "store", folder / "film.mp4").stat().st_size > 100


@scene
def contracts(folder: Path) -> None:
    """What `engram.testing` gives to those who write parts of their own, in the pytest that they have."""
    (folder / "test_mine.py").write_text(
        "from engram.data import RandomSampler\n"
        "from engram.envs import GymEnv\n"
        "from engram.testing import EnvContract, SamplerContract\n\n\n"
        "class TestMine(SamplerContract):\n"
        "    def make(self):\n"
        "        return RandomSampler()\n\n\n"
        "class TestMyEnv(EnvContract):\n"
        "    def make(self):\n"
        "        return GymEnv('CartPole-v1')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_mine.py"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-600:]


def wrong_versions(file: Path) -> list[str]:
    """What is not installed as the file has it."""
    wrong = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            found = importlib.metadata.version(name).split("+")[0]
            if found != version:
                wrong.append(f"{name} is {found}, not {version}")
    return wrong


def main(file: str = "", *names: str) -> int:
    wrong = wrong_versions(Path(file)) if file else []
    if wrong:
        print("\n".join(wrong))
        return 1
    shown = ("torch", "tensordict", "numpy", "gymnasium", "h5py", "pyarrow")
    print(f"Python {sys.version.split()[0]},", ", ".join(f"{n} {importlib.metadata.version(n)}" for n in shown))
    failed, chosen = 0, [one for one in SCENES if not names or one.__name__ in names]
    for one in chosen:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            try:
                one(Path(folder))
                ended = "passed"
            except Exception as error:
                ended, failed = f"FAILED: {type(error).__name__}: {error}", failed + 1
                if os.environ.get("TRACE"):
                    traceback.print_exc()
        print(f"{one.__name__}: {ended}", flush=True)
        for text in sorted({f"{type(one.message).__name__}: {one.message}".splitlines()[0] for one in told}):
            print(f"    {text[:200]}")
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write-and-die"]:
        write_and_die(sys.argv[2])
    sys.exit(main(*sys.argv[1:]))
