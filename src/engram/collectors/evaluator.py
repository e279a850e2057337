"""Evaluating a policy on whole trajectories, beside training: in a thread or in a worker process."""

from __future__ import annotations

import copy
import inspect
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotReady
from typing import Any, NamedTuple

from tensordict import TensorDict, TensorDictBase
from torch import nn

from engram import _forms as forms
from engram._advice import advised
from engram._checks import attribute, count
from engram.collectors.policy_weights import State, copied_weights, state_of_weights
from engram.collectors.rollout import is_environment
from engram.collectors.settings import Device
from engram.collectors.sync import SyncDataCollector, one_of_weights
from engram.envs.gym import in_gym_env
from engram.envs.policies import ExplorationType, own_exploration_type
from engram.errors import WorkerError
from engram.processes.pool import Processes, WorkerPool
from engram.processes.worker import Channel, CloudpickleWrapper, Worker, packed_exception
from engram.pytree import Key, to_tensor

Metrics = dict[str, Any]


class EvaluationSettings(NamedTuple):
    """The settings of all evaluations of an `Evaluator`; the user's functions go to a worker in wrappers."""

    trajectories: int
    collector: dict[str, Any]
    reward_key: Key
    metrics: CloudpickleWrapper | None
    dumps_video: bool


class PolicyEvaluation:
    """Runs evaluations of one policy in one environment, with the weights that each call brings."""

    def __init__(self, make_env: Any, policy: Any, policy_factory: Any, settings: EvaluationSettings) -> None:
        is_made = is_environment(make_env)
        self.env = in_gym_env(make_env if is_made else make_env())
        self.closes_env = not is_made
        policy = policy if policy_factory is None else _made(policy_factory, self.env)
        is_module = isinstance(policy, nn.Module)
        self._policy: Any = copy.deepcopy(policy).eval() if is_module else policy  # a factory may return one in use
        self._settings = settings

    def run(self, weights: State | None) -> Metrics:
        """Returns the mean reward, its deviation, the mean length, frames per second, and the user's own metrics."""
        settings = self._settings
        if weights is not None:
            self._policy.load_state_dict(weights)
        collector = SyncDataCollector(self.env, self._policy, **settings.collector)  # begins with a reset
        start = time.perf_counter()
        batch = collector.rollout()
        assert batch is not None
        metrics = _metrics(batch, settings.reward_key, time.perf_counter() - start)
        if settings.metrics is not None:
            metrics |= settings.metrics(batch)
        dump = attribute(self.env, "transform.dump") if settings.dumps_video else None  # of any library
        if dump is not None:
            dump()
        return metrics

    def close(self) -> None:
        """Closes the environment if it was made here."""
        if self.closes_env:
            self.env.close()


def _made(factory: Callable[..., Any], env: Any) -> Any:
    """The policy of a factory, which may take the environment."""
    return factory(env) if inspect.signature(factory).parameters else factory()


def _metrics(batch: TensorDictBase, reward_key: Key, seconds: float) -> Metrics:
    """Means over the trajectories `[trajectories, longest]` of a padded batch."""
    mask = batch.get(("collector", "mask"))
    reward = batch.get(reward_key).double()
    returns = (reward.reshape(*mask.shape, -1).mean(-1) * mask).sum(1)  # of several agents the mean
    lengths = mask.sum(1)
    return {
        "reward": float(returns.mean()),
        "reward_std": float(returns.std()) if len(returns) > 1 else 0.0,
        "num_episodes": len(returns),
        "episode_length": float(lengths.double().mean()),
        "fps": float(lengths.sum()) / seconds,
    }


class _Failure(NamedTuple):
    """The message of a worker whose evaluation raised an error, in place of a result."""

    packed: bytes


def run_evaluations(channel: Channel, *parts: Any) -> None:
    """Runs a worker process: evaluates with each weights that come, until its owner closes the channel."""
    make_env, policy, factory, init, settings = parts
    if init is not None:
        init()
    evaluation = PolicyEvaluation(
        make_env.function, None if policy is None else policy.function, factory and factory.function, settings
    )
    try:
        while True:
            weights = channel.receive()
            try:
                metrics: Metrics | _Failure = evaluation.run(weights)
            except Exception as error:  # of the policy, the environment or a function of the user's; the worker stays
                metrics = _Failure(packed_exception(error))
            channel.send(metrics)
    finally:
        evaluation.env.close()


@advised
class Evaluator:
    """Evaluates a policy on whole trajectories while training continues, one evaluation at a time.

    `trigger_eval` starts one with a copy of the weights of that moment, `poll` or `wait` gives its result: a dict of
    `"eval/reward"` (mean of the returns), `"eval/reward_std"`, `"eval/num_episodes"`, `"eval/episode_length"`,
    `"eval/fps"`, `"eval/step"`, and what `metrics_fn` returns. `evaluate` does both. An error of an evaluation is
    raised where its result would be returned.

    Args:
        env: an environment, which stays the caller's to close and is not to be used meanwhile, or a callable that
            makes one. A worker process gets a copy.
        policy: as in `SyncDataCollector`. A module is copied, and its copy acts in its eval mode: evaluations do not
            touch the caller's. Another callable is called as it is, by a worker process a copy of it.
        policy_factory: makes the policy, instead of `policy`; it may take the environment.
        num_trajectories: how many trajectories an evaluation has.
        max_steps: where a trajectory is cut; None: where its episode ends.
        frames_per_batch: the frames that are stepped at a time; None: 32 of each environment.
        every: evaluations that come less than so many steps (`step`) after the last one are skipped.
        log_prefix: what the names of the results begin with.
        reward_keys: the entry that returns are sums of.
        device: of environment and policy.
        exploration_type: how stochastic policies act.
        metrics_fn: called with the trajectories `[num_trajectories, longest]`, padded, with `("collector", "mask")`;
            returns a dict of further results.
        dump_video: calls `env.transform.dump()`, where there is one, after each evaluation (video recorders).
        on_result: called with each result of `trigger_eval`, a TensorDict, in the thread of the evaluator.
        busy_policy: what `trigger_eval` does while an evaluation runs: "skip" it and return False, "queue" it, or
            raise an "error".
        backend: "thread", which draws random numbers (of stochastic and random policies) from torch's generator, as
            training does; or "process", a worker with generators of its own.
        init_fn: called first in the worker process.
        done_keys, num_gpus: accepted without effect.

    Raises:
        ValueError, TypeError: arguments that cannot work.

    >>> from engram.envs import GymEnv
    >>> evaluator = Evaluator(lambda: GymEnv("CartPole-v1"), num_trajectories=3, max_steps=5)
    >>> evaluator.trigger_eval(step=1000), evaluator.wait()["eval/episode_length"]
    (True, 5.0)
    >>> evaluator.shutdown()
    """

    def __init__(
        self,
        env: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        num_trajectories: int = 10,
        max_steps: int | None = None,
        frames_per_batch: int | None = None,
        every: int | None = None,
        log_prefix: str = "eval",
        reward_keys: Key = ("next", "reward"),
        device: Device = None,
        exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
        metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None = None,
        dump_video: bool = True,
        on_result: Callable[[TensorDictBase], Any] | None = None,
        busy_policy: str = "skip",
        backend: str = "thread",
        init_fn: Callable[[], Any] | None = None,
    ) -> None:
        num_trajectories = count(num_trajectories, "num_trajectories")
        if busy_policy not in ("skip", "queue", "error"):
            raise ValueError(f"busy_policy must be 'skip', 'queue' or 'error', got {busy_policy!r}")
        if backend not in ("thread", "process"):
            raise ValueError(f"backend must be 'thread' or 'process', got {backend!r}")
        if policy is not None and policy_factory is not None:
            raise TypeError("policy_factory makes the policy: it cannot be used with policy; give one of them")
        self._policy, self._prefix, self._every = policy, log_prefix, every
        self._on_result, self._busy_policy = on_result, busy_policy
        settings = EvaluationSettings(
            num_trajectories,
            {
                "trajs_per_batch": num_trajectories,
                "frames_per_batch": frames_per_batch,
                "max_frames_per_traj": max_steps,
                "device": device,
                "exploration_type": exploration_type,
            },
            reward_keys,
            None if metrics_fn is None else CloudpickleWrapper(metrics_fn),
            dump_video,
        )
        self._run: Callable[[State | None], Metrics]
        if backend == "thread":
            evaluation = PolicyEvaluation(env, policy, policy_factory, settings)
            self._run, close = evaluation.run, evaluation.close
        else:
            functions = (env, policy, policy_factory, init_fn)
            sent = [None if one is None else CloudpickleWrapper(one) for one in functions]
            pool = WorkerPool(Processes(run_evaluations), ["the worker of an Evaluator"])
            pool.start(0, *sent, settings)
            self._run, close = _Request(pool.workers[0]), pool.close
        self._close = weakref.finalize(self, close)
        self._thread = ThreadPoolExecutor(1, "engram evaluator", own_exploration_type)
        self._under_way: deque[Future[Metrics]] = deque()
        self._evaluations, self._last_step = 0, None if every is None else -every

    def evaluate(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> Metrics:
        """Evaluates now, after those that are under way, and returns the result.

        `weights` are a module, a state dict or a TensorDict of them, or `weights_dict["policy"]`; None: those that the
        policy has. `step` is what the result says in `"eval/step"`; None: the number of evaluations before.
        """
        return self._submit(one_of_weights(weights=weights, weights_dict=weights_dict), step, None).result()

    def trigger_eval(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> bool:
        """Starts an evaluation, with arguments as in `evaluate`; returns False where it is skipped.

        Raises RuntimeError while another one runs, with `busy_policy="error"`.
        """
        if None not in (self._every, step, self._last_step) and step - self._last_step < self._every:  # type: ignore[operator]
            return False
        if self.pending and self._busy_policy != "queue":
            if self._busy_policy == "skip":
                return False
            raise RuntimeError(
                "an evaluation is still running; wait() for it, or make the Evaluator with busy_policy='skip' or "
                "'queue'"
            )
        self._under_way.append(
            self._submit(one_of_weights(weights=weights, weights_dict=weights_dict), step, self._on_result)
        )
        if step is not None:
            self._last_step = step
        return True

    def _submit(self, weights: Any, step: int | None, on_result: Any) -> Future[Metrics]:
        if not self._close.alive:
            raise RuntimeError("this evaluator was shut down; make a new one")
        given = self._policy if weights is None and isinstance(self._policy, nn.Module) else weights
        state = None if given is None else copied_weights(state_of_weights(given))
        number = self._evaluations if step is None else step
        self._evaluations += 1
        return self._thread.submit(_result, self._run, state, self._prefix, number, on_result)

    @property
    def pending(self) -> bool:
        """Whether an evaluation of `trigger_eval` is running."""
        return any(not future.done() for future in self._under_way)

    def poll(self, timeout: float = 0) -> Metrics | None:
        """The oldest result that was not handed out, waiting for it `timeout` seconds; None where there is none."""
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> Metrics | None:
        """As `poll`, waiting as long as it takes where no `timeout` is given."""
        if not self._under_way:
            return None
        try:
            self._under_way[0].exception(timeout)
        except NotReady:
            return None
        return self._under_way.popleft().result()

    def state_dict(self) -> dict[str, Any]:
        """The number of evaluations, and the step of the last."""
        return {"evaluations": self._evaluations, "last_step": self._last_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on after a `state_dict`. Raises ValueError for anything else, and changes nothing."""
        forms.check(_STATE, state_dict, "the state of an Evaluator")
        self._evaluations, self._last_step = state_dict["evaluations"], state_dict["last_step"]

    @staticmethod
    def extract_weights(policy: nn.Module) -> TensorDictBase:
        """A copy of a module's parameters and buffers, as `evaluate` takes them."""
        return TensorDict.from_module(policy).data.clone()

    def shutdown(self, timeout: float = 5.0) -> None:
        """Ends evaluating; those that have not begun are dropped. A second call does nothing.

        A thread that is still in the middle of an evaluation after `timeout` seconds is left to end it.
        """
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._under_way = deque(future for future in self._under_way if not future.cancelled())
        for future in self._under_way:
            try:
                future.exception(timeout)
            except NotReady:
                break
        self._close()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


_STEP = forms.nullable(forms.integer(-forms.MOST_COUNTED))  # before the first one, as many as `every` back
_STATE = forms.record({"evaluations": forms.integer(), "last_step": _STEP})


class _Request:
    """Asks a worker process for an evaluation."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __call__(self, weights: State | None) -> Metrics:
        self._worker.send(weights)
        metrics: Metrics | _Failure = self._worker.receive()
        if isinstance(metrics, _Failure):
            cause, traceback = pickle.loads(metrics.packed)
            raise WorkerError(self._worker.name, traceback) from cause
        return metrics


def _result(
    run: Callable[[State | None], Metrics], weights: State | None, prefix: str, step: int, on_result: Any
) -> Metrics:
    result = {f"{prefix}/{name}": value for name, value in {**run(weights), "step": step}.items()}
    if on_result is not None:
        on_result(TensorDict({name: to_tensor(value) for name, value in result.items()}))
    return result
