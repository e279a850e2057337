"""The calls that `make instructions` counts: a process of its own, which callgrind runs (see `instructions.py`).

Every call is warmed up first, which callgrind does not count; then it is made a number of times between two markers.
Public names only, so that the same file counts another checkout's code.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import itertools
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from benchmarks.cluster_client import SAMPLERS, PreparedLink, client_step
from benchmarks.collect import FRAMES_PER_BATCH, Greedy
from benchmarks.data import cartpole
from engram.collectors import SyncDataCollector
from engram.compat import cleanrl
from engram.compat.transitions import TransitionRows, powers
from engram.data import (
    Composite,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    Unbounded,
)
from engram.envs import EnvBase, GymEnv
from engram.envs.transforms import CatFrames, Transform

ROWS, BATCH, APPENDED = 100_000, 256, 64
ADAPTED = 10_000
"""Steps in the buffers that stand in for those of other libraries: they are written one by one."""
SLICES, EPISODE = 8, 200
PAIRS, GAME = 32, 1000
"""Of stacks of four 84 x 84 frames, before and after a step; the steps that are stored."""
BOX = spaces.Box(-np.inf, np.inf, (4,), np.float32)
BUFFERS = {"ReplayBuffer": ReplayBuffer, "TensorDictReplayBuffer": TensorDictReplayBuffer}
WARM_UP, CALLS = 300, 300
OF_SHARDS, PER_CALL, GROWN = (16, 256), 100, 500
"""Shards; the batches for which they are asked in a call; and those until they are asked for so many."""
LISTS, LOADS, LOADED = 20, 50, 500
"""Lists of steps that are written in turn; the loads of a checkpoint, and its rows."""
BATCHES_COLLECTED = 2
"""Of the collectors, for warming up and for counting: each is 1,000 frames."""
ENVIRONMENTS, STEPS_OF_TENSORS = 8, 100
"""Environments that step together; the frames of a batch of an environment whose steps are tensors."""

PACKAGES = ("torch", "tensordict", "numpy", "gymnasium")

Call = Callable[[], object]


def calls() -> Iterator[tuple[str, Call, int]]:
    """Each call by its name, and how often it is made; one at a time, so that one buffer is there at a time."""
    data = cartpole(ROWS, episode=EPISODE)
    for kind, buffer in BUFFERS.items():
        rb = _full(buffer, data)
        yield f"sample({BATCH}), {kind}", lambda rb=rb: rb.sample(BATCH), CALLS
    for kind, buffer in BUFFERS.items():
        rb = _full(buffer, data, sampler=PrioritizedSampler(ROWS, 0.6, 0.4))
        rb.update_priority(torch.arange(ROWS), torch.rand(ROWS))
        yield f"prioritised sample({BATCH}), {kind}", lambda rb=rb: rb.sample(BATCH), CALLS
    yield f"update_priority of {BATCH}", _updating(rb), CALLS
    yield f"extend({APPENDED})", _writing(_full(ReplayBuffer, data).extend, data.split(APPENDED)), CALLS
    steps = data[: WARM_UP + CALLS]
    yield "add, TensorDict", _writing(_full(ReplayBuffer, data).add, steps.unbind(0)), CALLS
    nested = [_nested(step) for step in steps.unbind(0)]
    yield "add, dict of numpy", _writing(_full(ReplayBuffer, data.to_dict()).add, nested), CALLS
    sampler = SliceSampler(num_slices=SLICES, traj_key=("collector", "traj_ids"))
    rb = _full(ReplayBuffer, data, sampler=sampler)
    yield f"slices, {SLICES} x {BATCH // SLICES}", lambda rb=rb: rb.sample(BATCH), CALLS
    yield f"stacked pairs, {PAIRS}", _stacking(), CALLS
    once = _full(ReplayBuffer, data, compact=True)
    yield f"observations once: sample({BATCH})", lambda: once.sample(BATCH), CALLS
    yield f"observations once: extend({APPENDED})", _writing(once.extend, data.split(APPENDED)), CALLS
    yield "observations once: add, TensorDict", _writing(once.add, steps.unbind(0)), CALLS
    rb = _full(ReplayBuffer, data, sampler=SamplerWithoutReplacement())
    yield f"epoch, sample({BATCH})", lambda rb=rb: rb.sample(BATCH), CALLS
    yield from _slow_ways(data)
    yield from _adapters()
    yield from _clients_of_shards()
    yield f"{FRAMES_PER_BATCH} frames, random", _collecting(None), BATCHES_COLLECTED
    yield f"{FRAMES_PER_BATCH} frames, MLP 2x64", _collecting(Greedy()), BATCHES_COLLECTED
    yield f"{FRAMES_PER_BATCH} frames of {ENVIRONMENTS} environments, MLP 2x64", _collecting_vector(), BATCHES_COLLECTED
    yield f"{STEPS_OF_TENSORS} frames of tensors", _collecting_tensors(), BATCHES_COLLECTED
    yield "1 step into a buffer, MLP 2x64", _stepping(Greedy()), CALLS
    # Last, as it has threads: callgrind counts wrongly in windows after it.
    with tempfile.TemporaryDirectory() as folder:
        _full(ReplayBuffer, data[:LOADED]).dumps(folder)
        yield f"loads of {LOADED} rows", lambda: ReplayBuffer(storage=LazyTensorStorage(LOADED)).loads(folder), LOADS


def _slow_ways(data: TensorDict) -> Iterator[tuple[str, Call, int]]:
    """What has no native call of its own: other containers than the first, lists, transforms, and users' own parts."""
    steps, pieces = data[: WARM_UP + CALLS].unbind(0), data.split(APPENDED)
    dicts = [_nested(step) for step in steps]
    yield "add, dict into rows of TensorDicts", _writing(_full(ReplayBuffer, data).add, dicts), CALLS
    yield "add, TensorDict into rows of dicts", _writing(_full(ReplayBuffer, data.to_dict()).add, steps), CALLS
    lists = [[_nested(step) for step in piece.unbind(0)] for piece in pieces[:LISTS]]
    yield f"extend({APPENDED}), list of dicts", _writing(_full(ReplayBuffer, data.to_dict()).extend, lists), CALLS
    rb = _full(ReplayBuffer, data, transform=ScalesRewards())
    yield f"extend({APPENDED}) through an inverse transform", _writing(rb.extend, pieces), CALLS
    rb, row, places = _full(ReplayBuffer, data), steps[0].clone(), itertools.cycle(range(ROWS))
    yield "rb[i] = row", lambda: rb.__setitem__(next(places), row), CALLS
    rb = OwnBuffer(storage=OwnStorage(ROWS), sampler=OwnSampler(), writer=OwnWriter(), batch_size=BATCH)
    rb.extend(data)
    yield f"children that call super(): extend({APPENDED})", _writing(rb.extend, pieces), CALLS
    yield f"children that call super(): sample({BATCH})", lambda: rb.sample(BATCH), CALLS


class ScalesRewards(Transform):
    def _inv_call(self, tensordict: Any) -> Any:
        return tensordict.set(("next", "reward"), tensordict["next", "reward"] * 0.1)

    def forward(self, tensordict: Any) -> Any:
        return tensordict


class OwnBuffer(ReplayBuffer):
    def extend(self, *args: Any, **kwargs: Any) -> Any:
        return super().extend(*args, **kwargs)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return super().sample(*args, **kwargs)


class OwnStorage(LazyTensorStorage):
    def set(self, *args: Any, **kwargs: Any) -> Any:
        return super().set(*args, **kwargs)

    def get(self, index: Any) -> Any:
        return super().get(index)


class OwnSampler(RandomSampler):
    def sample(self, storage: Any, batch_size: int) -> Any:
        return super().sample(storage, batch_size)


class OwnWriter(TensorDictRoundRobinWriter):
    def extend(self, data: Any) -> Any:
        return super().extend(data)


def _full(buffer: type[ReplayBuffer], data: Any, compact: bool = False, **parts: Any) -> ReplayBuffer:
    rb = buffer(storage=LazyTensorStorage(ROWS, compact=compact), batch_size=BATCH, **parts)
    rb.extend(data)
    return rb


def _stacking() -> Call:
    frames = torch.zeros(GAME + 1, 1, 84, 84, dtype=torch.uint8)
    done = (torch.arange(GAME) % EPISODE == EPISODE - 1).unsqueeze(1)
    steps = {"pixels": frames[:-1], "action": torch.zeros(GAME), "next": {"pixels": frames[1:], "done": done}}
    stacks = CatFrames(4, dim=-3, in_keys=["pixels"], out_keys=["stack"])
    transform, sampler = stacks.make_rb_transform_and_sampler(PAIRS, end_key=("next", "done"), weight="steps")
    storage = LazyTensorStorage(GAME)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, transform=transform, batch_size=PAIRS)
    rb.extend(TensorDict(steps, [GAME]))
    return rb.sample


def _adapters() -> Iterator[tuple[str, Call, int]]:
    """The buffers for CleanRL, and the rows behind those for stable-baselines3, which is not installed here."""
    rb = cleanrl.ReplayBuffer(ADAPTED, BOX, spaces.Discrete(2), "cpu", handle_timeout_termination=False)
    yield from _written("CleanRL adapter", rb, (*_step(1), {}))
    yield f"CleanRL adapter: sample({BATCH})", lambda: rb.sample(BATCH), CALLS
    obs, _, *rest = _step(1)
    rainbow = cleanrl.PrioritizedReplayBuffer(ADAPTED, (4,), "cpu", 3, 0.99, observation_dtype=np.float32)
    yield from _written("Rainbow adapter", rainbow, (obs, *rest[:2], obs, rest[2]))
    yield f"Rainbow adapter: sample({BATCH})", lambda: rainbow.sample(BATCH), CALLS
    data = rainbow.sample(BATCH)
    errors = data.weights.numpy()
    yield f"Rainbow adapter: update of {BATCH}", lambda: rainbow.update_priorities(data.indices, errors), CALLS
    slots = np.random.default_rng(0).integers(0, ADAPTED, BATCH)
    kinds = {"1 environment": (1, BOX), "8 environments": (8, BOX), "dict": (1, spaces.Dict(position=BOX, goal=BOX))}
    for name, (envs, space) in kinds.items():
        rows = TransitionRows(ADAPTED // envs, envs, space, spaces.Discrete(2))
        yield from _written(f"SB3 adapter's rows, {name}", rows, (*_step(envs, space), np.zeros(envs, np.bool_)))
        yield f"SB3 adapter's rows, {name}: sample({BATCH})", _sampling(rows), CALLS
        yield f"SB3 adapter's rows, {name}: add, none truncated", _adding(rows, _step(envs, space)), CALLS
    discounts = powers(0.99, 3)
    yield f"SB3 adapter's rows, {name}: 3 steps of {BATCH}", lambda: rows.n_steps(slots, discounts), CALLS


def _clients_of_shards() -> Iterator[tuple[str, Call, int]]:
    """Batches of a client of shards, whose own work is not counted, and which asks each of them three times."""
    for kind in SAMPLERS:
        for shards in OF_SHARDS:
            step = client_step(shards, kind, {"max_batch_age": 3600.0, "batches_per_call": PER_CALL}, PreparedLink)
            for _ in range(GROWN):
                step()
            priorities = ", update" if kind == "prioritised" else ""
            yield f"shards: {kind} sample({BATCH}) of {shards}{priorities}", step, CALLS


def _written(name: str, rb: Any, step: tuple[Any, ...]) -> Iterator[tuple[str, Call, int]]:
    """`add` to a buffer that is full."""
    for _ in range(ADAPTED):
        rb.add(*step)
    yield f"{name}: add", lambda: rb.add(*step), CALLS


def _adding(rows: TransitionRows, step: tuple[Any, ...]) -> Call:
    return lambda: rows.add(*step)


def _sampling(rows: TransitionRows) -> Call:
    return lambda: rows.transitions(rows.draw(BATCH))


def _step(envs: int, space: Any = BOX) -> tuple[Any, ...]:
    """obs, next_obs, action, reward and done of a step, as a vector environment gives them."""
    obs = np.ones((envs, 4), np.float32)
    given: Any = {"position": obs, "goal": obs} if isinstance(space, spaces.Dict) else obs
    return given, given, np.ones(envs, np.int64), np.ones(envs), np.zeros(envs, np.bool_)


def _updating(rb: ReplayBuffer) -> Call:
    indices, priorities = torch.randint(0, ROWS, (CALLS, BATCH)), torch.rand(CALLS, BATCH)
    batches = itertools.cycle(zip(indices.unbind(), priorities.unbind(), strict=True))
    return lambda: rb.update_priority(*next(batches))


def _writing(write: Callable[[Any], object], pieces: Any) -> Call:
    """Writes one piece after the other, each of which goes on where the last one ended."""
    following = itertools.cycle([piece.clone() if isinstance(piece, TensorDict) else piece for piece in pieces])
    return lambda: write(next(following))


def _nested(step: TensorDict) -> dict[str, object]:
    return {key: _nested(value) if isinstance(value, TensorDict) else value.numpy() for key, value in step.items()}


def _collecting(policy: Any) -> Call:
    env = GymEnv("CartPole-v1", categorical_action_encoding=policy is not None)
    env.set_seed(0)
    batches = iter(SyncDataCollector(env, policy, frames_per_batch=FRAMES_PER_BATCH, total_frames=-1))
    return lambda: next(batches)


def _collecting_vector() -> Call:
    env = GymEnv("CartPole-v1", num_envs=ENVIRONMENTS, categorical_action_encoding=True)
    env.set_seed(0)
    batches = iter(SyncDataCollector(env, Greedy(), frames_per_batch=FRAMES_PER_BATCH, total_frames=-1))
    return lambda: next(batches)


class Tensors(EnvBase):
    """An environment as users write them, whose steps are tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((4,)))
        self.action_spec = Unbounded((1,))

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        return TensorDict({"observation": torch.zeros(4), "terminated": torch.zeros(1, dtype=torch.bool)})

    def _step(self, tensordict: Any) -> TensorDict:
        observation = tensordict["observation"] + 1
        return TensorDict({"observation": observation, "reward": torch.ones(1), "terminated": observation[:1] > 100})

    def _set_seed(self, seed: int | None) -> None:
        pass


def _collecting_tensors() -> Call:
    policy = TensorDictModule(torch.nn.Linear(4, 1), in_keys=["observation"], out_keys=["action"])
    batches = iter(SyncDataCollector(Tensors(), policy, frames_per_batch=STEPS_OF_TENSORS, total_frames=-1))
    return lambda: next(batches)


def _stepping(policy: Any) -> Call:
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    env.set_seed(0)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=BATCH)
    return SyncDataCollector(env, policy, frames_per_batch=1, total_frames=-1, replay_buffer=rb).rollout


def count(library: ctypes.PyDLL, only: str) -> dict[str, int]:
    """Makes every call whose name has `only` in it between its markers; how often each was made."""
    made: dict[str, int] = {}
    gc.freeze()  # what is imported is looked through no more
    for name, call, times in calls():
        if only not in name:
            continue
        for _ in range(min(WARM_UP, times)):
            call()
        gc.collect()
        title = name.encode()
        library.count_start()
        for _ in range(times):
            call()
        library.count_stop(title)
        made[name] = times
    return made


def cpu(library: ctypes.PyDLL) -> str:
    """The CPU that this process sees: under callgrind the one that it emulates, not that of the machine."""
    numbers = (ctypes.c_uint32 * 9)()
    library.cpu_seen(numbers)
    vendor = bytes(numbers)[:12].rstrip(b"\0").decode("latin-1")
    features = " ".join(f"{number:x}" for number in numbers[3:])
    return f"{platform.machine()} {vendor} {features}" if vendor else platform.machine()


def versions() -> dict[str, str]:
    """The versions that the counts depend on."""
    own = {"python": platform.python_version(), "libc": "-".join(platform.libc_ver())}
    return own | {name: importlib.metadata.version(name) for name in PACKAGES}


def main() -> None:
    """Arguments: the library with the markers, the file for what was counted how often, and a part of names."""
    markers, made = map(Path, sys.argv[1:3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.disable()
    library = ctypes.PyDLL(str(markers))  # which keeps the GIL: nobody else runs between the markers
    machine = {"cpu": cpu(library), **versions()}
    made.write_text(json.dumps({"machine": machine, "made": count(library, sys.argv[3])}))


if __name__ == "__main__":
    main()
