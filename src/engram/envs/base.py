"""What an environment is: TensorDicts in, TensorDicts out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.data.specs import Categorical, Composite, Spec, Unbounded
from engram.data.specs.base import usable_device
from engram.envs.batched import BatchEngine
from engram.envs.mdp import merge_where, reset_where, step_mdp
from engram.envs.policies import FLAGS, as_policy
from engram.envs.steps import FrameQueue
from engram.transforms.in_env import IDLE

Self = TypeVar("Self", bound="EnvBase")


class EnvBase(ABC):
    """An environment, or a batch of them, that reads and writes TensorDicts of shape `batch_size`.

    A child calls `__init__` with its specs (batch dimensions included) and implements `_reset`, `_step`, `_set_seed`.
    `reset` gives `observation_spec`'s keys and the flags `done`, `terminated`, `truncated` (bool `[*batch, 1]`, False);
    `step` reads `action` and adds `("next", ...)`: observations, `reward` (float32 `[*batch, 1]`) and flags. Both raise
    ValueError that names the key where the child gives another shape or dtype than its specs say.

    >>> class Counter(EnvBase):
    ...     def __init__(self):
    ...         super().__init__(Composite(count=Unbounded((1,))), Categorical(2))
    ...     def _reset(self, mask):
    ...         return TensorDict({"count": torch.zeros(1)})
    ...     def _step(self, td):
    ...         count = td["count"] + td["action"]
    ...         return TensorDict({"count": count, "reward": torch.ones(1), "terminated": count >= 3})
    ...     def _set_seed(self, seed):
    ...         pass
    >>> Counter().rollout(2).shape
    torch.Size([2])
    """

    def __init__(
        self,
        observation_spec: Composite,
        action_spec: Spec,
        *,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        self.batch_size = torch.Size(batch_size)
        self.device = usable_device(device, "device")
        self.observation_spec = observation_spec
        self.action_spec = action_spec
        self.reward_spec: Spec = Unbounded((*self.batch_size, 1), device=self.device)
        self.done_spec: Spec = Categorical(2, (*self.batch_size, 1), device=self.device, dtype=torch.bool)
        self.is_closed = False

    @property
    def full_done_spec(self) -> Composite:
        """Specs of the three flags."""
        flags = dict.fromkeys(FLAGS, self.done_spec)
        return Composite(flags, shape=self.batch_size, device=self.device)

    @abstractmethod
    def _reset(self, mask: Tensor | None) -> TensorDictBase:
        """Observations after a reset; with a `mask`, only where it holds (bool `[*batch, 1]`): the rest is not read.

        A mask that holds everywhere asks for the episodes that follow those that are over; None, for new ones at once.
        """

    @abstractmethod
    def _step(self, td: TensorDictBase) -> TensorDictBase:
        """Observations, reward and `terminated`, and `truncated` if there is such a thing."""

    @abstractmethod
    def _set_seed(self, seed: int) -> None:
        """The next reset starts the random numbers anew from `seed`."""

    def reset(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Starts episodes: everywhere, or where `td["_reset"]` (bool `[*batch, 1]`) holds; `td` has the rest."""
        self._refuse_if_closed()
        mask = None if td is None else td.get("_reset", None)
        fresh = self._with_flags(self._reset(mask))
        return fresh if td is None or mask is None or bool(mask.all()) else merge_where(mask, fresh, td)

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """`td` with what follows its `action` under `"next"`. Raises KeyError where there is no action."""
        self._refuse_if_closed()
        if td.get("action", None) is None:
            raise KeyError(f"step needs an 'action', got keys {list(td.keys())}; use rand_step, or call a policy first")
        following = self._with_flags(self._step(td))
        kept = td.get("next", None)  # a recurrent policy writes its next hidden state there
        return td.set("next", following if kept is None else kept.copy().update(following))

    def _with_flags(self, td: TensorDictBase) -> TensorDictBase:
        """What `_reset` or `_step` gave, with its flags. Raises ValueError for what is not of the specs."""
        self._refuse_misfits(td)
        done = td.get("done", None)
        if done is not None and td.get("terminated", None) is None:
            td.set("terminated", done)  # some environments know only that an episode is over
        for key in ("terminated", "truncated"):
            if td.get(key, None) is None:
                td.set(key, self.done_spec.zero())
        return td.set("done", td.get("terminated") | td.get("truncated"))

    def _refuse_misfits(self, td: TensorDictBase) -> None:
        """Raises ValueError where an observation is missing, or an entry has another shape or dtype than its spec."""
        for key, spec in self.observation_spec.leaves().items():
            _refuse_misfit(key, td.get(key, None), spec)
        for key, spec in (*((flag, self.done_spec) for flag in FLAGS), ("reward", self.reward_spec)):
            value = td.get(key, None)
            if value is not None:
                _refuse_misfit(key, value, spec)

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """`step`, and the state to go on from: reset where the episode is over. `next` keeps the true last state."""
        td = self.step(td)
        return td, self.maybe_reset(step_mdp(td))

    def maybe_reset(self, td: TensorDictBase) -> TensorDictBase:
        """`td`, reset where its `done` holds."""
        done = td.get("done")
        return reset_where(self, td, done) if bool(done.any()) else td

    def batch_engine(self) -> BatchEngine | None:
        """What steps all environments of the batch together with raw values, for collectors; None: nothing does."""
        return None

    def rand_action(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """`td` with a random `action`, drawn from torch's global generator."""
        td = TensorDict(batch_size=self.batch_size, device=self.device) if td is None else td
        return td.set("action", self.action_spec.rand())

    def rand_step(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """A step with a random action."""
        return self.step(self.rand_action(td))

    def rollout(
        self,
        max_steps: int,
        policy: Any = None,
        *,
        auto_reset: bool = True,
        tensordict: TensorDictBase | None = None,
        break_when_any_done: bool = True,
    ) -> TensorDictBase:
        """Up to `max_steps` steps as one batch `[*batch_size, T]`, from a fresh reset or from `tensordict`.

        Ends after the first step that is done anywhere, or (`break_when_any_done=False`) resets what is done and goes
        on. `policy` is whatever a collector takes. Rows that only reset (`"_idle"`, see `BatchedEnv`) are no steps: the
        others go on until every environment has its steps, and what is beyond is dropped. Raises ValueError for fewer
        than one step.
        """
        if max_steps < 1:
            raise ValueError(f"max_steps must be 1 or more, got {max_steps}")
        if not auto_reset and tensordict is None:
            raise ValueError("auto_reset=False needs the state to start from: pass tensordict=env.reset()")
        act, frames = as_policy(policy, self), FrameQueue(self.batch_size)
        td = self.reset() if auto_reset or tensordict is None else tensordict
        while True:
            stepped = self.step(act(td.copy()))
            frames.add(stepped)
            if break_when_any_done:
                max_steps = min(max_steps, _frames_of_ended(stepped, frames, default=max_steps))
            if frames.least >= max_steps:
                return frames.take(max_steps)[0]
            td = self.maybe_reset(step_mdp(stepped))

    def fake_tensordict(self) -> TensorDictBase:
        """A stepped TensorDict of zeros, with the keys, shapes and dtypes that real steps have."""
        state = self.observation_spec.zero().update(self.full_done_spec.zero())
        following = state.clone().set("reward", self.reward_spec.zero())
        return state.set("action", self.action_spec.zero()).set("next", following)

    def set_seed(self, seed: int) -> int:
        """The next reset starts from `seed`; returns the first seed that is still free."""
        self._set_seed(seed)
        return seed + self.batch_size.numel()

    def random_state(self) -> Any:
        """Where the environments' own random numbers stand, for `set_random_state`; None where nobody can tell."""
        return None

    def set_random_state(self, state: Any) -> None:
        """The next episodes are those that would have followed `random_state`, once everything is reset.

        Raises ValueError for a state of another environment, with nothing changed.
        """
        raise ValueError(f"{type(self).__name__} keeps no random state")

    def to(self: Self, device: torch.device | str) -> Self:
        """Moves specs and all further outputs to `device`; returns the environment itself."""
        self.device = usable_device(device, "device")
        for name in ("observation_spec", "action_spec", "reward_spec", "done_spec"):
            setattr(self, name, getattr(self, name).to(self.device))
        return self

    def close(self) -> None:
        """Releases what the environment holds; a second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self._close()

    def _close(self) -> None:
        """What there is to release."""

    def _refuse_if_closed(self) -> None:
        if self.is_closed:
            raise RuntimeError(f"this {type(self).__name__} was closed; make a new one")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_size={tuple(self.batch_size)}, device={self.device})"


def _frames_of_ended(td: TensorDictBase, frames: FrameQueue, *, default: int) -> int:
    """The fewest frames of an environment whose episode ends with the stepped `td`; `default` where none ends."""
    done = td.get(("next", "done"))
    if not bool(done.any()):
        return default
    idle, ends = td.get(IDLE, None), done.reshape(len(frames.waiting), -1).any(1)
    if idle is not None:
        ends = ends & ~idle.reshape(-1)
    return min(frames.waiting[ends.cpu().numpy()].tolist(), default=default)


def _refuse_misfit(key: Any, value: Any, spec: Any) -> None:
    if isinstance(value, Tensor) and value.shape == spec.shape and value.dtype == spec.dtype:
        return
    found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
    raise ValueError(
        f"the environment gave {key!r} as {found}, and its spec says {spec.dtype} {tuple(spec.shape)}; correct the "
        "environment or its spec"
    )
