"""Worker processes that collect at the same time, one batch from all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from engram.collectors.multi import MultiCollector
from engram.collectors.multi_worker import Stop, Wrote


class MultiSyncDataCollector(MultiCollector):
    """Worker processes that collect at the same time; each batch has the frames of all, with the same weights.

    Workers wait while the caller has the batch, as on-policy learning needs it. A batch is `[workers, *]` where `*` is
    the shape of one worker's: `[time]`, or `[envs, time]`; `frames_per_batch` counts all workers and is rounded up to
    whole rows. Trajectory ids count over all workers in the order of the steps. Batches come through shared memory.

    Args:
        create_env_fn: a callable for each worker that makes its environment (lambdas too), or one and `num_workers`.
        policy: as in `SyncDataCollector`. Each worker has a copy; `update_policy_weights_` brings them up to date.
        frames_per_batch, total_frames: over all workers.
        num_workers: how many, where a single callable is given.
        device, storing_device, policy_device, env_device: as in `SyncDataCollector`.
        max_frames_per_traj, reset_at_each_iter, exploration_type, postproc, split_trajs: as in `SyncDataCollector`.
        init_random_frames: over all workers.
        replay_buffer: gets each batch; iterating then yields None. Workers write into it themselves where its storage
            is shared (`shared=True`, or mapped) and has a lane for each; else the batches come here first.
        update_at_each_batch: calls `update_policy_weights_()` before each batch.
        track_policy_version: int64 `("collector", "policy_version")` says which weights acted.
        preemptive_threshold: a fraction of the workers, in (0, 1]: when so many have their batch, the others hand out
            what they have. Missing steps are zeros, and `("collector", "mask")` says which are steps. None: all wait.
        cat_results: "stack", or the dimension along which the workers' batches are put one after the other.
        start_method: "fork", "spawn" or "forkserver"; None: fork unless CUDA is in use.
        timeout: seconds that one step or one reset of an environment may last, making it apart; of environments that
            step together, one of all. Then its worker is killed, whatever it does, and the WorkerError names the
            worker, the environment in it and the step, counted from 1. None: any time.

    Raises:
        ValueError, TypeError: arguments that cannot work.
        WorkerError: a worker failed, with its traceback, or hung; all are ended then. What workers had handed over, the
            rows that the failing one had stepped before included, is handed out first, `[1, *]` for one worker at a
            time, or written; what others were in the middle of is lost.

    >>> from engram.envs import GymEnv
    >>> make = lambda: GymEnv("CartPole-v1")
    >>> with MultiSyncDataCollector([make, make], frames_per_batch=200, total_frames=400) as collector:
    ...     for batch in collector:
    ...         print(batch.shape)
    torch.Size([2, 100])
    torch.Size([2, 100])
    """

    def __init__(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        policy: Any = None,
        *,
        frames_per_batch: int,
        preemptive_threshold: float | None = None,
        cat_results: str | int = "stack",
        **kwargs: Any,
    ) -> None:
        if cat_results != "stack" and (not isinstance(cat_results, int) or isinstance(cat_results, bool)):
            raise ValueError(f'cat_results must be "stack" or a dimension, got {cat_results!r}')
        if preemptive_threshold is not None and not 0 < preemptive_threshold <= 1:
            raise ValueError(f"preemptive_threshold must be in (0, 1], or None, got {preemptive_threshold}")
        self._cat_results = cat_results
        self._threshold = preemptive_threshold
        self._can_be_stopped = preemptive_threshold is not None
        super().__init__(create_env_fn, policy, frames_per_batch=frames_per_batch, **kwargs)

    def _frames_of_worker(self, frames_per_batch: int) -> int:
        return -(-frames_per_batch // self.num_workers)

    def _frames_of_batch(self) -> int:
        return sum(self._frames)

    def _next(self) -> TensorDictBase | None:
        if self._is_to_be_attached():
            self._attach()
        for k in range(self.num_workers):
            self._ask(k)
        enough = self.num_workers if self._threshold is None else math.ceil(self._threshold * self.num_workers)
        is_stopped = False
        while any(self._owed):
            self._wait()
            if len(self._arrived) >= enough and not is_stopped:
                self._tell_the_others()
                is_stopped = True
        results = sorted(self._arrived, key=lambda result: result[0])
        self._arrived.clear()
        return self._together(results)

    def _tell_the_others(self) -> None:
        for worker, owed in zip(self._workers, self._owed, strict=True):
            if owed:
                worker.post(Stop())

    def _together(self, results: list[Any]) -> TensorDictBase | None:
        batches = [(k, batch) for k, batch in results if not isinstance(batch, Wrote)]
        self.frames += sum(x.frames if isinstance(x, Wrote) else x.numel() for _, x in results)
        self._numbering.number(batches)
        found = [batch for _, batch in batches]
        if self._replay_buffer is not None:
            same = len({batch.shape for batch in found}) == 1
            for batch in [torch.stack(found).flatten(0, -2)] if same else found:  # [workers * envs, time]
                self._store(batch)
            return None
        return self._joined(found)

    def _joined(self, batches: list[TensorDictBase]) -> TensorDictBase:
        if self._threshold is not None:
            longest = max(batch.shape[-1] for batch in batches)
            batches = [_padded(batch, longest) for batch in batches]
        return torch.stack(batches) if self._cat_results == "stack" else torch.cat(batches, int(self._cat_results))

    def _as_whole(self, batch: TensorDictBase) -> TensorDictBase:
        return self._joined([batch])


def _padded(batch: TensorDictBase, length: int) -> TensorDictBase:
    """`[*, time]` as `[*, length]`, with a mask of what there was."""
    time, ndim = batch.shape[-1], batch.ndim
    mask = torch.zeros((*batch.shape[:-1], length), dtype=torch.bool)
    mask[..., :time] = True
    if time < length:

        def pad(leaf: torch.Tensor) -> torch.Tensor:
            rest = leaf.new_zeros((*batch.shape[:-1], length - time, *leaf.shape[ndim:]))
            return torch.cat([leaf, rest], ndim - 1)

        batch = batch.apply(pad, batch_size=[*batch.shape[:-1], length])
    return batch.set(("collector", "mask"), mask)
