"""Each library behind the same few verbs, at the settings that its own documentation recommends for speed.

A *contender* is made by a function that builds a full buffer and returns the call to measure. Libraries are imported in
there, so that one that is missing or broken is reported as not available and the run goes on.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from tensordict import TensorDict

from benchmarks.data import flat_numpy, length, one_by_one

Call = Callable[[], object]
OURS = "engram"
PEERS = ("torchrl", "cpprb", "tianshou", "stable-baselines3")
LIBRARIES = (OURS, *PEERS)

SAME_API = {"engram": "engram.data", "torchrl": "torchrl.data"}
"""Libraries with `ReplayBuffer(storage=...)`, so that one adapter serves both."""


def buffer(
    library: str, items: Any, *, batch: int, storage: str = "memory", kind: str = "ReplayBuffer", **settings: Any
) -> Any:
    """A buffer of engram or TorchRL that is full of `items` (a batch; cut into single items for a list storage).

    `settings` are further arguments of the buffer.
    """
    data = importlib.import_module(SAME_API[library])
    logging.getLogger(library).setLevel(logging.ERROR)
    n = length(items)
    made = {
        "list": lambda: data.ListStorage(n),
        "memory": lambda: data.LazyTensorStorage(n),
        "mapped": lambda: data.LazyMemmapStorage(n),
    }[storage]()
    more = dict(settings)
    if storage == "list" and isinstance(items, dict) and library == "torchrl":
        more["collate_fn"] = stack_dicts  # its default does not stack dicts
    rb = getattr(data, kind)(storage=made, batch_size=batch, **more)
    rb.extend(one_by_one(items) if storage == "list" else items)
    return rb


def replay_buffers(library: str) -> Any:
    """The module of engram or TorchRL that has the buffers and all their parts."""
    module = importlib.import_module(f"{SAME_API[library]}.replay_buffers")
    logging.getLogger(library).setLevel(logging.ERROR)
    return module


def big_buffer(
    library: str,
    chunks: Iterable[Any],
    capacity: int,
    *,
    batch: int,
    kind: str = "ReplayBuffer",
    parts: Callable[[Any], dict[str, Any]] = lambda _: {},
) -> Any:
    """A buffer in memory filled chunk by chunk, so that the data are never there twice.

    `parts` gives further arguments out of the library's module: samplers, writers, settings.
    """
    data = replay_buffers(library)
    storage = data.LazyTensorStorage(capacity)
    rb = getattr(data, kind)(storage=storage, batch_size=batch, **parts(data))
    for chunk in chunks:
        rb.extend(chunk)
    return rb


def stack_dicts(items: list[dict[str, Any]]) -> dict[str, Any]:
    """A `collate_fn` for TorchRL's list storages of dicts."""
    import torch

    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


class Cpprb:
    """cpprb keeps numpy arrays by name; any keys."""

    def __init__(self, items: Any, *, mapped_to: str | None = None) -> None:
        import cpprb

        arrays = flat_numpy(items)
        n = length(arrays)
        env = {key: {"shape": value.shape[1:] or 1, "dtype": value.dtype} for key, value in arrays.items()}
        self.rb = cpprb.ReplayBuffer(n, env, mmap_prefix=mapped_to)
        self.rb.add(**arrays)

    def sample(self, batch: int) -> Call:
        return lambda: self.rb.sample(batch)

    def extend(self, items: Any) -> Call:
        arrays = flat_numpy(items)
        return lambda: self.rb.add(**arrays)


class CpprbPrioritized:
    """cpprb's prioritised buffer, filled chunk by chunk."""

    def __init__(self, chunks: Iterable[TensorDict], capacity: int, *, alpha: float, beta: float) -> None:
        import cpprb

        self._beta = beta
        for i, chunk in enumerate(chunks):
            arrays = flat_numpy(chunk)
            if i == 0:
                env = {key: {"shape": value.shape[1:] or 1, "dtype": value.dtype} for key, value in arrays.items()}
                self.rb = cpprb.PrioritizedReplayBuffer(capacity, env, alpha=alpha)
            self.rb.add(**arrays)

    def sample(self, batch: int) -> Any:
        return self.rb.sample(batch, beta=self._beta)


class Tianshou:
    """tianshou keeps seven fixed keys: obs, act, rew, terminated, truncated, done, obs_next."""

    def __init__(self, obs: np.ndarray, obs_next: np.ndarray, act: np.ndarray) -> None:
        from tianshou.data import ReplayBuffer

        n = len(obs)
        self._steps = {
            "obs": obs,
            "act": act,
            "rew": np.ones(n),
            "terminated": np.zeros(n, dtype=bool),
            "truncated": np.zeros(n, dtype=bool),
            "done": np.zeros(n, dtype=bool),
            "obs_next": obs_next,
        }
        self.rb = ReplayBuffer.from_data(**self._steps)

    def sample(self, batch: int) -> Call:
        return lambda: self.rb.sample(batch)

    def add(self) -> Call:
        from tianshou.data import Batch

        step = Batch(**{key: value[0] for key, value in self._steps.items() if key != "done"}, info=Batch())
        return lambda: self.rb.add(step)

    def extend(self, n: int) -> Call:
        """Its form of a batch is one step of each of `n` environments."""
        from tianshou.data import Batch, VectorReplayBuffer

        rb = VectorReplayBuffer(len(self.rb), n)
        steps = Batch(**{key: value[:n] for key, value in self._steps.items() if key != "done"}, info=Batch())
        return lambda: rb.add(steps)


class StableBaselines3:
    """stable-baselines3 keeps five fixed keys: observations, actions, next_observations, dones, rewards."""

    def __init__(self, obs: np.ndarray, obs_next: np.ndarray, act: np.ndarray, *, envs: int = 1) -> None:
        from gymnasium import spaces
        from stable_baselines3.common.buffers import ReplayBuffer

        self._n, self._envs = len(obs), envs
        if obs.dtype == np.uint8:
            space: Any = spaces.Box(0, 255, obs.shape[1:], np.uint8)
        else:
            space = spaces.Box(-np.inf, np.inf, obs.shape[1:], np.float32)
        self.rb = ReplayBuffer(self._n, space, spaces.Discrete(2), device="cpu", n_envs=envs)
        self._step = (
            obs[:envs],
            obs_next[:envs],
            act[:envs].reshape(envs, -1)[:, :1],
            np.ones(envs, dtype=np.float32),
            np.zeros(envs, dtype=np.float32),
            [{} for _ in range(envs)],
        )
        for at in range(self._n // envs):
            self.rb.add(obs[at : at + 1].repeat(envs, 0), obs_next[at : at + 1].repeat(envs, 0), *self._step[2:])

    def sample(self, batch: int) -> Call:
        return lambda: self.rb.sample(batch)

    def add(self) -> Call:
        return lambda: self.rb.add(*self._step)


def steps_of(items: TensorDict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Observations, next observations and actions of CartPole or pixel steps, for libraries with fixed keys."""
    key = "pixels" if "pixels" in items.keys() else "observation"  # noqa: SIM118  (a TensorDict has no `in`)
    obs, obs_next = items[key].numpy(), items["next", key].numpy()
    act = items["action"].argmax(-1).numpy() if "action" in items.keys() else np.zeros(len(obs), np.int64)  # noqa: SIM118
    return obs, obs_next, act
