"""Environments in worker processes, as one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from engram.crews import Crew, Seat, usable_cores
from engram.data.specs.base import usable_device
from engram.envs.base import EnvBase
from engram.envs.batched import BatchEngine
from engram.envs.batched_env import BatchStepper
from engram.envs.parallel_engine import ParallelEngine, RawLayout
from engram.envs.parallel_tensordict import TensorDictLayout, TensorDictStepper
from engram.envs.vector import makers_of, refuse_other_specs
from engram.shared_memory import SharedMemory
from engram.step_clocks import checked_timeout
from engram.workers import PATIENCE, Channel, Portable

QUICKLY = 0.2  # seconds that workers have where there is an error to be told


class ParallelEnv(EnvBase):
    """`n` environments in worker processes: batch `[n, *their batch]`, values as `SerialEnv` gives them.

    Gymnasium environments with the same spaces are stepped with raw values, which go through shared memory, and start
    their next episode in the step that ends one. Those of any other kind are stepped through TensorDicts, whose leaves
    go through shared memory where the specs know them. Where steps follow each other within half a millisecond and each
    worker has a core, nobody has to be woken: workers look for the next step before they sleep.

    Args:
        n: how many environments.
        make_env: makes one, in its worker, or is a list of n that do; lambdas and local functions, too.
        num_workers: how many processes; None: one for each core that this process may use, or n if that is fewer.
            More than that pays where environments wait for something.
        start_method: "fork", "spawn" or "forkserver"; None: fork unless CUDA is in use.
        cpus: the cores on which workers run, worker i on `cpus[i % len(cpus)]` only; None: the system places them, and
            a worker that finds itself on the core of another one leaves it. Cores of their own can help on a machine
            that does nothing else, and do harm on a busy one.
        device: where outputs are; None: where the environments have theirs.
        patience: seconds that `close` gives a worker that is in the middle of a step before it ends it by force.
        timeout: seconds that one step or one reset of one environment may last, making it apart. Then its worker is
            killed, whatever it does, and the WorkerError names the environment, the worker and the step, counted from
            1. None: any time.

    Raises:
        ValueError: different specs, a list of another length, unknown start methods or cores, a timeout of 0 or less.
        TypeError: a timeout that is no number.
        WorkerError: an environment failed in its worker, whose traceback it has, or a worker was killed. The
            environment is then of no more use: every call raises it again, except `close`.
        RuntimeError: it was closed, or this is a fork of the process that made it.

    >>> from engram.envs import GymEnv
    >>> env = ParallelEnv(3, lambda: GymEnv("CartPole-v1"), num_workers=2)
    >>> env.rollout(2)["observation"].shape
    torch.Size([3, 2, 4])
    >>> env.close()
    """

    def __init__(
        self,
        n: int,
        make_env: Callable[[], Any] | Sequence[Callable[[], Any]],
        *,
        num_workers: int | None = None,
        start_method: str | None = None,
        cpus: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        patience: float = PATIENCE,
        timeout: float | None = None,
    ) -> None:
        checked_timeout(timeout)
        place = usable_device(device, "device")  # before anything is made
        makers = [Portable(make) for make in makers_of("ParallelEnv", n, make_env)]
        workers = _checked_workers(num_workers, n)
        cores = _cores(workers, cpus)
        starts = [n * i // workers for i in range(workers)]
        memory = SharedMemory()
        told = [
            (memory, makers[start:stop], start, core)
            for start, stop, core in zip(starts, [*starts[1:], n], cores, strict=True)
        ]
        self._crew = Crew(
            _run, told, name="environment worker", start_method=start_method, patience=patience, timeout=timeout
        )
        try:
            one, self._stepper = _assembled(self._crew, memory, starts, n)
        except BaseException:
            self._crew.close(QUICKLY)
            raise
        finally:
            memory.close()
        self._name = one.name
        super().__init__(
            one.observation_spec.expand(n, *one.observation_spec.shape),
            one.action_spec.expand(n, *one.action_spec.shape),
            batch_size=(n, *one.batch_size),
            device=one.device,
        )
        self.reward_spec = one.reward_spec.expand(n, *one.reward_spec.shape)
        self.done_spec = one.done_spec.expand(n, *one.done_spec.shape)
        if place is not None:
            self.to(place)

    @property
    def pids(self) -> list[int]:
        """The numbers of the worker processes."""
        return self._crew.pids

    def batch_engine(self) -> BatchEngine | None:
        """What steps gymnasium environments raw; None for others, and where a child class has changed a step."""
        cls = type(self)
        is_changed = (cls._step, cls._reset, cls.step, cls.reset) != _ITS_OWN
        return None if is_changed else self._stepper.engine

    def _reset(self, mask: torch.Tensor | None) -> TensorDictBase:
        return TensorDict(self._stepper.reset(mask), batch_size=self.batch_size, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return TensorDict(self._stepper.step(td), batch_size=self.batch_size, device=self.device)

    def _refuse_misfits(self, td: TensorDictBase) -> None:
        """Nothing: each environment has done it."""

    def _set_seed(self, seed: int) -> None:
        self._refuse_if_closed()
        self._stepper.seed(seed)

    def _close(self) -> None:
        self._crew.close()

    def __repr__(self) -> str:
        return f"ParallelEnv({self.batch_size[0]} x {self._name}, num_workers={len(self._crew)})"


_ITS_OWN = (ParallelEnv._step, ParallelEnv._reset, ParallelEnv.step, ParallelEnv.reset)


class _Described(NamedTuple):
    """What the owner has to know of an environment that it does not have."""

    name: str
    batch_size: torch.Size
    device: torch.device | None
    observation_spec: Any
    action_spec: Any
    reward_spec: Any
    done_spec: Any
    spaces: Any  # of a single gymnasium environment; None: it is something else
    raw: Any  # the same one's codecs
    fake: TensorDictBase

    @classmethod
    def of(cls, env: Any) -> _Described:
        engines = getattr(env, "engines", lambda: None)()
        engine = engines[0] if engines is not None and len(env.batch_size) == 0 else None
        return cls(
            repr(env),
            env.batch_size,
            env.device,
            env.observation_spec,
            env.action_spec,
            env.reward_spec,
            env.done_spec,
            None if engine is None else (engine.env.action_space, engine.env.observation_space),
            None if engine is None else (engine.action, engine.leaves),
            env.fake_tensordict(),
        )


def _run(
    channel: Channel,
    seat: Seat,
    memory: SharedMemory,
    makers: Sequence[Callable[[], Any]],
    start: int,
    core: int | None,
) -> None:
    """A worker: makes its environments, describes them, and serves as it is told."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    seat.sit(channel)
    envs: list[Any] = []
    try:
        for make in makers:
            envs.append(make())
        channel.say([_Described.of(env) for env in envs])
        channel.receive().serve(envs, memory, start, seat)
    finally:
        for env in envs:
            env.close()


def _assembled(
    crew: Crew, memory: SharedMemory, starts: Sequence[int], n: int
) -> tuple[_Described, BatchStepper | TensorDictStepper]:
    """One of the environments that the workers have made, and the owner's side of all."""
    members = [member for of_worker in crew.first_words() for member in of_worker]
    one = members[0]
    for index, member in enumerate(members):
        refuse_other_specs(index, member, one)
    if one.spaces is not None and all(member.spaces == one.spaces for member in members):
        raw = RawLayout(n, *one.raw)
        stepper = BatchStepper(ParallelEngine(crew, raw, memory, starts))
        crew.tell(raw)
        return one, stepper
    layout = TensorDictLayout(n, one.fake, one.batch_size)
    steps = TensorDictStepper(crew, layout, memory, starts)
    crew.tell(layout)
    return one, steps


def _checked_workers(num_workers: int | None, n: int) -> int:
    if num_workers is None:
        return min(n, len(usable_cores()))
    if not 1 <= num_workers <= n:
        raise ValueError(f"num_workers must be between 1 and the number of environments, {n}, got {num_workers}")
    return num_workers


def _cores(workers: int, cpus: Sequence[int] | None) -> list[int | None]:
    """The core of each worker; None: whichever the system chooses."""
    if cpus is None:
        return [None] * workers
    usable = usable_cores()
    if not cpus or not set(cpus) <= set(usable):
        raise ValueError(f"cpus must be cores that this process may use, {usable}, got {list(cpus)}")
    return [cpus[i % len(cpus)] for i in range(workers)]
