"""What a worker process of a collector does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from engram.collectors.asking import ask
from engram.collectors.numbering import Numbering, SharedCount
from engram.collectors.shelf import Shelf, Shelved
from engram.collectors.stats import Episodes
from engram.collectors.sync import SyncDataCollector, as_rows
from engram.collectors.writing import BufferWriter
from engram.processes.shared_weights import SharedWeights
from engram.processes.timeouts import CallTimer
from engram.processes.worker import Channel, CloudpickleWrapper

MOST_PIECES = 32  # of a batch that can be stopped between two


class Ready(NamedTuple):
    """The collector stands; so many frames are in one of its batches, over so many environments."""

    frames: int
    envs: int


class Collect(NamedTuple):
    """Wanted: one more batch."""


class Stop(NamedTuple):
    """The batch that is being collected is long enough."""


class Seed(NamedTuple):
    """The environments' next reset starts from this seed; the answer is the first that is free."""

    seed: int


class State(NamedTuple):
    """Wanted: the collector's state."""


class Try(NamedTuple):
    """Could the environments go on from these random numbers? The answer says why not; None: they could."""

    random_state: Any


class Load(NamedTuple):
    """The state to go on from; the answer is None."""

    state: dict[str, Any]


class Attach(NamedTuple):
    """From now on batches go into this buffer, with ids from this count."""

    replay_buffer: Any
    ids: SharedCount


class Wrote(NamedTuple):
    """So many frames went into the replay buffer."""

    frames: int


class Collected(NamedTuple):
    """A batch, and returns and lengths of the episodes that ended in it; the last one of a worker that then fails."""

    batch: Shelved | Wrote
    returns: list[float]
    lengths: list[int]
    is_last: bool


class Task(NamedTuple):
    """All that a worker is made from."""

    make_env: CloudpickleWrapper
    policy: CloudpickleWrapper | None
    weights: SharedWeights | None
    settings: dict[str, Any]
    can_be_stopped: bool
    shelf_batches: int
    clock: CallTimer | None


def work(channel: Channel, task: Task) -> None:
    """The worker's whole life."""
    _CollectorProcess(channel, task).run()


class _CollectorProcess:
    """A collector that does what its owner's messages say."""

    def __init__(self, channel: Channel, task: Task) -> None:
        self._channel, self._weights = channel, task.weights
        policy = None if task.policy is None else task.policy.function
        # A copy of its own: after a fork parameters in shared memory would still be the owner's.
        policy = copy.deepcopy(policy) if isinstance(policy, nn.Module) else policy
        self._env = task.make_env.function()
        self._envs = self._env.batch_size.numel()
        steps = -(-task.settings["frames_per_batch"] // self._envs)
        self._pieces = _divisor(steps) if task.can_be_stopped else 1
        settings = {**task.settings, "frames_per_batch": steps // self._pieces * self._envs}
        self._collector = SyncDataCollector(self._env, policy, **settings)
        if task.clock is not None:
            self._collector._enter_steps_in(task.clock)
        self._resets_each = bool(task.settings["reset_at_each_iter"])
        self._shelf = Shelf(task.shelf_batches)
        self._writer: BufferWriter | None = None
        self._numbering: Numbering | None = None
        self._version = 0
        self._failure: BaseException | None = None  # of the environment or the policy, after a batch's first steps
        self._episodes = Episodes(self._envs)

    def run(self) -> None:
        collector = self._collector
        answers: dict[type, Callable[[Any], Any]] = {
            Collect: lambda message: self._collected(),
            Seed: lambda message: collector.set_seed(message.seed),
            State: lambda message: self._state(),
            Try: lambda message: self._refusal_of(message.random_state),
            Load: lambda message: self._load(message.state),
        }
        try:
            self._channel.send(Ready(collector.frames_per_batch * self._pieces, self._envs))
            while True:
                message = self._channel.receive()
                if isinstance(message, Attach):
                    self._writer, self._numbering = BufferWriter(message.replay_buffer), Numbering(message.ids.take)
                elif not isinstance(message, Stop):  # one that came after the batch had ended says nothing
                    self._channel.send(answers[type(message)](message))
                    if self._failure is not None:
                        raise self._failure
        finally:
            if self._writer is not None:
                self._writer.replay_buffer.flush_transforms()  # steps that waited for those that would follow
            self._env.close()

    def _take_weights(self) -> None:
        """Takes in what the owner wrote since the last time."""
        if self._weights is not None and self._weights.version != self._version:
            weights = self._weights.read()
            self._version = self._weights.read_version
            self._collector.update_policy_weights_(weights, version=self._version)

    def _state(self) -> dict[str, Any]:
        self._take_weights()  # an update holds from when it was made, whether or not there was a batch since
        return self._collector.state_dict()

    def _refusal_of(self, random_state: Any) -> str | None:
        before = ask(self._env, "random_state")
        try:
            self._env.set_random_state(random_state)
        except Exception as error:  # a user's environment may do anything here
            return str(error) or type(error).__name__
        finally:
            if before is not None:
                self._env.set_random_state(before)
        return None

    def _load(self, state: dict[str, Any]) -> None:
        self._collector.load_state_dict(state)
        self._version = state["policy_version"]  # its weights are the shared ones; an update of before is void
        self._episodes.restart()
        if self._numbering is not None:
            self._numbering.forget()
        if self._writer is not None:
            self._writer.restart()

    def _collected(self) -> Collected:
        self._take_weights()
        batch = self._rolled()
        since = self._episodes.count
        reward, done = batch.get(("next", "reward"), None), batch.get(("next", "done"), None)
        if reward is not None and done is not None:  # others keep theirs in groups of agents
            self._episodes.add(as_rows(reward, batch.shape, np.add), as_rows(done, batch.shape, np.logical_or))
        return Collected(self._handed_over(batch), *self._episodes.latest(since), self._failure is not None)

    def _handed_over(self, batch: TensorDictBase) -> Shelved | Wrote:
        if self._writer is None or self._numbering is None:
            return self._shelf.put(batch)
        self._numbering.number([(0, batch)])
        if self._resets_each:
            self._writer.restart()
        self._writer.write(batch)
        return Wrote(batch.numel())

    def _rolled(self) -> TensorDictBase:
        pieces: list[TensorDictBase] = []
        while len(pieces) < self._pieces and self._failure is None:
            try:
                piece = self._collector.rollout()
            except Exception as error:
                if not pieces:
                    raise
                self._failure = error
                break
            assert piece is not None
            pieces.append(piece)
            self._failure = self._collector.failure
            if self._pieces > 1 and self._channel.has_message():
                break  # a Stop: while a batch is being collected nothing else is sent, but the end, which comes next
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def _divisor(steps: int) -> int:
    return max(k for k in range(1, MOST_PIECES + 1) if steps % k == 0)
