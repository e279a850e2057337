"""Worker processes that collect all the time, a batch from whoever has one."""

from __future__ import annotations

from tensordict import TensorDictBase

from engram.collectors.multi import MultiCollector
from engram.collectors.multi_worker import Wrote


class MultiaSyncDataCollector(MultiCollector):
    """Worker processes that collect all the time; each batch is one worker's, in the order in which they are ready.

    A worker goes on while its batch waits and while the caller learns, up to two batches ahead: a batch may have been
    made with weights that are two updates old. Batches are `[time]`, or `[envs, time]`, of
    `frames_per_batch` frames, rounded up to whole rows. Trajectory ids count in the order in which batches are handed
    out. What is collected at the end and was not handed out is lost.

    Args:
        create_env_fn: a callable for each worker that makes its environment (lambdas too), or one and `num_workers`.
        policy: as in `SyncDataCollector`. Each worker has a copy; `update_policy_weights_` brings them up to date.
        frames_per_batch: of one worker's batch.
        total_frames: over all workers.
        num_workers, device, storing_device, policy_device, env_device, max_frames_per_traj, init_random_frames,
        reset_at_each_iter, exploration_type, postproc, split_trajs, replay_buffer, update_at_each_batch,
        track_policy_version, start_method, timeout:
            as in `MultiSyncDataCollector`.

    Raises:
        ValueError, TypeError: arguments that cannot work.
        WorkerError: a worker failed, with its traceback, or hung; all are ended then. What workers had handed over, the
            rows that the failing one had stepped before included, is handed out first, or written.

    >>> from engram.envs import GymEnv
    >>> make = lambda: GymEnv("CartPole-v1")
    >>> with MultiaSyncDataCollector([make, make], frames_per_batch=200, total_frames=400) as collector:
    ...     for batch in collector:
    ...         print(batch.shape)
    torch.Size([200])
    torch.Size([200])
    """

    _ahead = 2

    def _frames_of_batch(self) -> int:
        return max(self._frames)

    def _next(self) -> TensorDictBase | None:
        if self._is_to_be_attached() and not self._arrived and not any(self._owed):
            self._attach()
        if not self._is_to_be_attached():  # else nothing new is begun before all is written
            self._ask_for_more()
        while not self._arrived:
            self._wait()
        k, batch = self._arrived.popleft()
        if isinstance(batch, Wrote):
            self.frames += batch.frames
            return None
        self.frames += batch.numel()
        self._numbering.number([(k, batch)])
        if self._replay_buffer is None:
            return batch
        self._store(batch)
        return None

    def _ask_for_more(self) -> None:
        for k, owed in enumerate(self._owed):
            waiting = sum(1 for worker, _ in self._arrived if worker == k)
            self._ask(k, self._ahead - owed - waiting)
