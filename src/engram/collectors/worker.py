"""A worker process of a collector: its messages, its loop, and batches that go to the owner in shared memory."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import nn

from engram.collectors.rollout import random_state_of
from engram.collectors.settings import CollectorSettings
from engram.collectors.stats import EpisodeStats
from engram.collectors.sync import ROWS_FOR_TRAJECTORIES, BufferWriter, SyncDataCollector, truncate_last_step
from engram.collectors.trajectories import GlobalTrajectoryIds, SharedCounter
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.envs.gym import in_gym_env
from engram.processes.shared_weights import SharedWeights
from engram.processes.timeouts import CallTimer
from engram.processes.worker import Channel, CloudpickleWrapper
from engram.specs.spaces import EncodedSpaces
from engram.store.waits import while_waiting

MAX_PIECES = 32  # a batch that can be stopped is collected in so many pieces at most


class Hello(NamedTuple):
    """The worker is ready: its batches have `frames` frames, over `envs` environments.

    `policy_state` is the state of a module that the policy's factory has made here.
    """

    frames: int
    envs: int
    policy_state: dict[str, Any] | None


class Collect(NamedTuple):
    """Asks for one more batch, with so many steps of each environment; the answer is a `BatchReady`.

    None: as many as a batch has.
    """

    steps: int | None = None


class Stop(NamedTuple):
    """Ends the batch that is being collected with the steps that it has."""


class Call(NamedTuple):
    """Calls a method of the worker's `CollectorProcess`; what it returns is the answer, unless nobody waits for it."""

    method: Callable[..., Any]
    args: tuple[Any, ...] = ()
    is_question: bool = True


class WroteFrames(NamedTuple):
    """The number of frames that the worker wrote into the replay buffer."""

    frames: int


class AwaitsRoom(NamedTuple):
    """The worker has stepped its whole batch, and waits until the replay buffer has room for the rest of it.

    It answers each `Call` meanwhile.
    """


class BatchReady(NamedTuple):
    """A batch, and returns and lengths of the episodes that ended in it.

    `is_last`: the next message is the error that cut the batch short. `begins`: a trajectory in it begins where none
    had ended.
    """

    batch: SharedBatchRef | WroteFrames
    returns: list[float]
    lengths: list[int]
    is_last: bool
    begins: bool


class Predecessor(NamedTuple):
    """The state that a worker takes over from the one that it replaces.

    The number of its frames, which were random first, and arguments of `set_seed` (None: there was no call of it).
    `has_own_weights`: its policy was made by the policy's factory and was never updated.
    """

    frames: int
    seed: tuple[int, bool] | None
    has_own_weights: bool


class WorkerCalls(NamedTuple):
    """Functions of the user that a worker calls: at first, before each batch, and with each batch."""

    init: CloudpickleWrapper | None
    before_batch: CloudpickleWrapper | None
    after_batch: CloudpickleWrapper | None


class WorkerConfig(NamedTuple):
    """The arguments of a worker process."""

    make_env: CloudpickleWrapper
    policy_factory: CloudpickleWrapper | None
    settings: CollectorSettings
    can_be_stopped: bool
    batches_in_memory: int
    calls: WorkerCalls
    threads: int
    policy: CloudpickleWrapper | None = None
    weights: SharedWeights | None = None
    predecessor: Predecessor | None = None


class SteppingCollector(SyncDataCollector):
    """The collector inside a worker process: its steps are timed, and it continues for a worker that was lost."""

    def __init__(
        self, env: Any, policy: Any, settings: CollectorSettings, clock: CallTimer | None, frames_before: int
    ) -> None:
        super().__init__(env, policy, **settings.arguments())
        if clock is not None:
            self._rollout = self._make_rollout(clock)
        self.frames = self._stepped = frames_before

    def rollout_of(self, steps: int | None) -> TensorDictBase:
        """As `rollout`, with so many steps of each environment; None: as many as a batch has."""
        usual = self._steps
        self._steps = usual if steps is None else steps
        try:
            batch = self.rollout()
        finally:
            self._steps = usual
        assert batch is not None  # without a replay buffer
        return batch


def run_worker(channel: Channel, config: WorkerConfig) -> None:
    """Runs a worker process until its owner closes the channel."""
    CollectorProcess(channel, config).run()


class CollectorProcess:
    """A collector that carries out the messages of its owner."""

    def __init__(self, channel: Channel, config: WorkerConfig) -> None:
        self._channel, self._weights = channel, config.weights
        self._calls, self._settings = config.calls, config.settings
        torch.set_num_threads(config.threads)
        if config.calls.init is not None:
            config.calls.init()
        policy = None if config.policy is None else config.policy.function
        # A copy: after a fork, parameters in shared memory would still be the owner's.
        policy = copy.deepcopy(policy) if isinstance(policy, nn.Module) else policy
        self._policy_state: dict[str, Any] | None = None
        if config.policy_factory is not None:
            policy = config.policy_factory()
            if isinstance(policy, nn.Module):
                self._policy_state = {key: _on_cpu(value) for key, value in policy.state_dict().items()}
        self._env = in_gym_env(config.make_env.function())
        self._envs = self._env.batch_size.numel()
        frames = config.settings.frames_per_batch
        steps = ROWS_FOR_TRAJECTORIES if frames is None else -(-frames // self._envs)
        self._pieces = _number_of_pieces(steps) if config.can_be_stopped else 1
        settings = config.settings.only_steps(steps // self._pieces * self._envs)
        frames_before = 0 if config.predecessor is None else config.predecessor.frames
        self._collector = SteppingCollector(self._env, policy, settings, channel.clock, frames_before)
        self._shared_batches = SharedBatchWriter(config.batches_in_memory)
        self._writer: BufferWriter | None = None
        self._global_ids: GlobalTrajectoryIds | None = None
        self._updates = 0  # of the shared weights, which this worker has
        self._begins = False  # whether a trajectory in the batch begins where none had ended
        self._failure: BaseException | None = None  # of the environment or the policy, after a batch's first steps
        self._episodes = EpisodeStats(self._envs)
        self._asked_ahead: deque[Collect] = deque()  # what came while a batch waited for room
        self._awaits_room = False
        if config.predecessor is not None:
            self._follow(config.predecessor)

    def _follow(self, predecessor: Predecessor) -> None:
        """Goes on where another worker was lost."""
        if not predecessor.has_own_weights:
            self._updates = -1  # the policy may have changed since the last update: only the shared weights count
        if predecessor.seed is not None:
            self.set_seed(*predecessor.seed)

    def run(self) -> None:
        try:
            self._channel.send(Hello(self._collector.frames_per_batch * self._pieces, self._envs, self._policy_state))
            while True:
                message = self._asked_ahead.popleft() if self._asked_ahead else self._channel.receive()
                if isinstance(message, Call):
                    self._answer(message)
                elif isinstance(message, Collect):  # a Stop that comes after the batch has ended is ignored
                    self._channel.send(self._collect(message.steps))
                    if self._failure is not None:
                        raise self._failure
        finally:
            if self._writer is not None:
                self._writer.flush()  # steps that transforms hold back
            self._env.close()

    def _answer(self, call: Call) -> None:
        answer = call.method(self, *call.args)
        if call.is_question:
            self._channel.send(answer)

    def _while_it_waits(self) -> None:
        """Where a batch waits for room in the buffer: the owner hears of it, and is answered."""
        if not self._awaits_room:
            self._awaits_room = True
            self._channel.send(AwaitsRoom())
        while self._channel.has_message():
            message = self._channel.receive()
            if isinstance(message, Call):
                self._answer(message)
            elif isinstance(message, Collect):
                self._asked_ahead.append(message)

    def attach_buffer(self, replay_buffer: Any, ids: SharedCounter) -> None:
        """Writes batches into this buffer from now on, with trajectory ids from this counter."""
        self._writer = BufferWriter(replay_buffer)
        self._global_ids = GlobalTrajectoryIds(ids.take)

    def detach_buffer(self) -> None:
        """Writes no more, and has the buffer's storage open no longer."""
        if self._writer is not None:
            self._writer.flush()
        self._writer = self._global_ids = None

    def attach_weights(self, weights: SharedWeights) -> None:
        """Takes the weights from here from their next version on."""
        self._weights = weights

    def encoded_spaces(self) -> EncodedSpaces:
        """Those of the collector."""
        return self._collector.encoded_spaces()

    def set_seed(self, seed: int, static: bool) -> int:
        """Seeds the next reset of the environments, all of them alike if `static`; returns the first free seed."""
        return self._collector.set_seed(seed, static)

    def reset(self) -> None:
        """Resets every environment before the next batch."""
        self._collector.reset()
        self._episodes.restart()
        self._begins = True

    def _load_weights(self) -> None:
        """Loads the weights if the owner has written new ones."""
        if self._weights is not None and self._weights.updates != self._updates:
            weights = self._weights.read()
            self._updates = self._weights.read_updates
            self._collector.update_policy_weights_(weights, version=self._weights.read_version)

    def state(self) -> dict[str, Any]:
        """That of the collector."""
        self._load_weights()  # an update counts as soon as it is made, also before the next batch
        return self._collector.state_dict()

    def refusal(self, random_state: Any) -> str | None:
        """Why the environments could not load this random state; None: they could."""
        before = random_state_of(self._env)
        try:
            self._env.set_random_state(random_state)
        except Exception as error:  # a user's environment may do anything here
            return str(error) or type(error).__name__
        finally:
            if before is not None:
                self._env.set_random_state(before)
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Loads a state of the collector."""
        self._collector.load_state_dict(state)  # its weights are the shared ones by now
        self._episodes.restart()
        if self._global_ids is not None:
            self._global_ids.forget()
        if self._writer is not None:
            self._writer.restart()

    def _collect(self, steps: int | None) -> BatchReady:
        self._load_weights()
        if self._calls.before_batch is not None:
            self._calls.before_batch()
        batch = self._collect_steps(steps)
        returns, lengths = self._episodes.ended_in(batch)
        if self._settings.set_truncated:
            truncate_last_step(batch)
        begins, self._begins = self._begins, False
        handed_over = self._hand_over(batch, begins=begins)
        if self._calls.after_batch is not None:
            self._call_after_batch(self._calls.after_batch, batch)
        return BatchReady(handed_over, returns, lengths, is_last=self._failure is not None, begins=begins)

    def _call_after_batch(self, hook: Callable[[TensorDictBase], Any], batch: TensorDictBase) -> None:
        """Calls the user's hook; where it fails, that is told after the batch, which is handed over."""
        try:
            hook(batch)
        except Exception as error:
            self._failure = self._failure or error

    def _hand_over(self, batch: TensorDictBase, *, begins: bool) -> SharedBatchRef | WroteFrames:
        if self._writer is None or self._global_ids is None:
            return self._shared_batches.put(batch)
        self._global_ids.number([(0, batch)])
        if self._settings.reset_at_each_iter or begins:
            self._writer.restart()
        with while_waiting(self._while_it_waits):
            self._writer.write(batch)
        self._awaits_room = False
        return WroteFrames(batch.numel())

    def _collect_steps(self, steps: int | None) -> TensorDictBase:
        pieces: list[TensorDictBase] = []
        while len(pieces) < self._pieces and self._failure is None:
            try:
                piece = self._collector.rollout_of(steps)
            except Exception as error:
                if not pieces:
                    raise
                self._failure = error
                break
            pieces.append(piece)
            for env in self._collector.broken_off:
                self._episodes.drop(env)
                self._begins = True
            self._failure = self._collector.failure
            if self._pieces > 1 and self._channel.has_message():
                break  # a Stop: nothing else is sent while a batch is collected, but the end, which is received next
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _number_of_pieces(steps: int) -> int:
    return max(k for k in range(1, MAX_PIECES + 1) if steps % k == 0)


class SharedBatchRef(NamedTuple):
    """Where a batch is in shared memory; `storage` is sent where it is a new one, and `batch` itself where its steps
    cannot be rows: agents with entries of different shapes.
    """

    shape: tuple[int, ...]
    first: int  #: sequence of the first row
    storage: LazyTensorStorage | None
    batch: TensorDictBase | None = None


class SharedBatchWriter:
    """Puts batches as packed rows into a shared storage with room for `batches` batches that were not read yet.

    The first batch decides the layout. A batch of another layout, or one too long for the storage, gets a new storage;
    the memory of the old one is freed when the owner has read its batches.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._buffer: ReplayBuffer | None = None
        self._capacity = 0

    def put(self, batch: TensorDictBase) -> SharedBatchRef:
        """Copies a batch into shared memory; the one put `batches` batches ago may be overwritten."""
        rows = batch.reshape(-1)
        is_new = self._buffer is None or rows.numel() * self._batches > self._capacity
        if not is_new:
            try:
                return self._put(rows, batch.shape)
            except (KeyError, ValueError):  # other keys, shapes or dtypes than before; nothing was written
                pass
        self._capacity = rows.numel() * self._batches
        storage = LazyTensorStorage(self._capacity, shared=True)
        self._buffer = ReplayBuffer(storage=storage, batch_size=1)
        try:
            return self._put(rows, batch.shape, new_storage=storage)
        except ValueError:  # it has no layout
            self._buffer = None
            return SharedBatchRef(tuple(batch.shape), 0, None, batch)

    def _put(
        self, rows: TensorDictBase, shape: torch.Size, *, new_storage: LazyTensorStorage | None = None
    ) -> SharedBatchRef:
        assert self._buffer is not None
        first = self._buffer.write_count
        self._buffer.extend(rows)
        return SharedBatchRef(tuple(shape), first, new_storage)


class SharedBatchReader:
    """Reads the batches that a `SharedBatchWriter` in a worker process has put into shared memory."""

    def __init__(self) -> None:
        self._storage: Any = None

    def take(self, ref: SharedBatchRef) -> TensorDictBase:
        """A copy of a batch, in memory of its own."""
        if ref.batch is not None:
            return ref.batch
        if ref.storage is not None:
            self._storage = ref.storage
        n, capacity = torch.Size(ref.shape).numel(), self._storage.max_size
        slots = torch.arange(ref.first, ref.first + n, device="cpu").remainder_(capacity)
        batch: TensorDictBase = self._storage.get(slots)
        return batch.reshape(ref.shape).clear_device_()
