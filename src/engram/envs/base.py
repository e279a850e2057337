"""`EnvBase`, the interface of all environments, and `step_mdp`, from one step to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.envs.engines import VectorEngine
from engram.envs.policies import FLAGS, as_policy
from engram.specs import Categorical, Composite, Spec, Unbounded
from engram.specs.tensors import usable_device
from engram.transforms.base import IDLE


def step_mdp(
    td: TensorDictBase,
    *,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = True,
) -> TensorDictBase:
    """The root of step t+1 from a stepped TensorDict of step t: its `"next"` entries, moved to the root.

    Other root keys (those that a policy writes) stay unless `keep_other=False`. The result is a new TensorDict that
    shares its tensors with `td`. Raises KeyError if `td` has no `"next"`.

    >>> from tensordict import TensorDict
    >>> step_mdp(TensorDict({"a": torch.zeros(1), "next": {"a": torch.ones(1), "reward": torch.ones(1)}}))["a"]
    tensor([1.])
    """
    following = td.get("next", None)
    if following is None:
        raise KeyError(
            f"step_mdp needs a stepped TensorDict with a 'next' entry, got keys {sorted(td.keys(), key=str)}"
        )
    root = td.exclude("next", "reward", *(("action",) if exclude_action else ())) if keep_other else td.empty()
    dropped = (("reward",) if exclude_reward else ()) + (("done", "terminated", "truncated") if exclude_done else ())
    root = root.exclude(*dropped) if dropped else root
    if not exclude_action and not keep_other:
        root.set("action", td.get("action"))
    return root.copy().update(
        following.exclude(*dropped).copy()
    )  # copies: nested TensorDicts must not be shared with `td`


def reset_where(env: Any, td: TensorDictBase, mask: Tensor) -> TensorDictBase:
    """`td` after a reset of the environments where `mask` (bool `[*batch, 1]`) holds.

    All other entries become zero there: a policy's hidden state does not reach into the next trajectory.
    """
    fresh = env.reset(td.copy().set("_reset", mask))
    return zero_where(mask, td).update(fresh.exclude("_reset"))


def zero_where(mask: Tensor, td: TensorDictBase) -> TensorDictBase:
    """A copy of `td` that is zero where `mask` (bool `[*batch, 1]`) holds."""
    return td.apply(lambda leaf: torch.where(_like(mask, leaf, td.ndim), torch.zeros_like(leaf), leaf))


def merge_where(mask: Tensor, new: TensorDictBase, old: TensorDictBase) -> TensorDictBase:
    """`new` where `mask` (bool `[*batch, 1]`) holds, else `old`; the keys are those of `new`."""
    return new.named_apply(
        lambda key, leaf: torch.where(_like(mask, leaf, new.ndim), leaf, old.get(key)), nested_keys=True
    )


def stack_steps(steps: Sequence[TensorDictBase], dim: int) -> TensorDictBase:
    """`torch.stack` of steps; an entry that only some steps have is zero in the others.

    >>> from tensordict import TensorDict
    >>> stack_steps([TensorDict(), TensorDict({"hidden": torch.ones(1)})], 0)["hidden"].tolist()
    [[0.0], [1.0]]
    """
    keys = [set(step.keys(True, True)) for step in steps]
    if any(k != keys[0] for k in keys):
        models = {key: step.get(key) for step, k in zip(steps, keys, strict=True) for key in k}
        for step, k in zip(steps, keys, strict=True):
            for key in models.keys() - k:
                step.set(key, torch.zeros_like(models[key]))
    return torch.stack(list(steps), dim)


def _like(mask: Tensor, leaf: Tensor, batch_dims: int) -> Tensor:
    flat = mask.reshape(mask.shape[:batch_dims])
    return flat.reshape((*flat.shape, *(1,) * (leaf.ndim - batch_dims)))


Array = np.ndarray[Any, Any]


class FrameIndex:
    """Which calls of `step` are frames of which environment, and which frames no batch has taken yet.

    Each call steps all `n` environments. An environment that a call only resets has no frame of that call: the other
    environments then have more frames than it, which open the next batch, in their order.

    >>> index = FrameIndex(2)
    >>> for idle in (None, np.array([True, False]), None):
    ...     index.add(idle)
    >>> index.count()
    >>> index.waiting.tolist()
    [2, 3]
    >>> calls, dropped = index.take(2)
    >>> calls.tolist(), dropped, index.waiting.tolist()
    ([[0, 2], [0, 1]], 2, [0, 1])
    """

    def __init__(self, n: int) -> None:
        self.waiting = np.zeros(n, np.int64)  # frames that no batch has taken, by environment
        self._taken = np.zeros(n, np.int64)  # frames of the calls in this index, each environment's first ones
        self._idle: list[bytes] = []  # bool [n] by call; bytes: a tenth of the cost of small arrays
        self._none_idle = bytes(n)
        self._counted = 0

    def add(self, idle: Array | None) -> None:
        """Adds one call; `idle`, bool `[n]`, says which environments it only reset (None: no environment)."""
        self._idle.append(self._none_idle if idle is None else idle.tobytes())

    def count(self, calls: int | None = None) -> None:
        """Makes waiting frames of the calls since the last count, or of the first `calls` of them."""
        new = self._idle[self._counted :] if calls is None else self._idle[self._counted : self._counted + calls]
        self._counted += len(new)
        self.waiting += len(new) - self._as_array(new).sum(0)

    def take(self, steps: int) -> tuple[Array, int]:
        """Takes the first `steps` waiting frames of each environment, oldest first.

        Returns which call made each, int64 `[n, steps]`, where call 0 is the oldest one in this index; and the number
        of calls, from the oldest on, that hold no waiting frame any more: the index drops them.
        """
        total, waiting = self._counted, self.waiting
        are_frames = ~self._as_array(self._idle[:total]).T
        frames, counts = np.flatnonzero(are_frames), self._taken + waiting
        starts = counts.cumsum() - counts + self._taken  # where in `frames` the first waiting frame of each stands
        calls = frames[starts[:, None] + np.arange(steps)] - np.arange(0, total * len(waiting), total)[:, None]
        waiting -= steps
        self._taken += steps
        first_waiting = frames.take((starts + steps)[waiting > 0]) % total
        dropped = int(first_waiting.min()) if len(first_waiting) else total
        del self._idle[:dropped]
        self._counted -= dropped
        self._taken -= are_frames[:, :dropped].sum(1)
        return calls, dropped

    def _as_array(self, idle: list[bytes]) -> Array:
        return np.frombuffer(bytearray().join(idle), np.bool_).reshape(-1, len(self.waiting))


class FrameQueue:
    """Stepped TensorDicts of shape `batch_size`, until whole batches can be cut out of them.

    A row whose `"_idle"` holds was a reset and is no frame, see `FrameIndex`. `version` is any number that a call's
    frames carry.

    >>> from tensordict import TensorDict
    >>> queue = FrameQueue([2])
    >>> for number, idle in enumerate([[False, False], [True, False], [False, False]]):
    ...     idle = torch.tensor(idle).unsqueeze(1)
    ...     queue.add(TensorDict({"x": torch.full((2,), number), "_idle": idle, "next": {}}, [2]), version=number)
    >>> batch, versions = queue.take(queue.least)
    >>> batch["x"].tolist(), versions.tolist(), queue.least
    ([[0, 2], [0, 1]], [[0, 2], [0, 1]], 0)
    """

    def __init__(self, batch_size: Sequence[int]) -> None:
        self._batch_size = torch.Size(batch_size)
        self._steps: list[TensorDictBase] = []
        self._versions: list[int] = []
        self._index: FrameIndex | None = None  # once a call has marks

    @property
    def least(self) -> int:
        """The number of waiting frames that every environment has."""
        return len(self._steps) if self._index is None else int(self._index.waiting.min())

    @property
    def waiting(self) -> Array:
        """The number of waiting frames of each environment, int64 `[environments]`."""
        return np.full(self._batch_size.numel(), self.least) if self._index is None else self._index.waiting

    def add(self, td: TensorDictBase, version: int = 0) -> None:
        """Adds what one call of `step` gave."""
        idle = td.get(IDLE, None)
        if idle is not None:
            td = td.exclude(IDLE, ("next", IDLE))
            if self._index is None:
                self._index = FrameIndex(self._batch_size.numel())
            self._index.add(idle.reshape(-1).cpu().numpy())
            self._index.count()
        self._steps.append(td)
        self._versions.append(version)

    def take(self, steps: int) -> tuple[TensorDictBase, Array]:
        """The first `steps` frames of each environment, `[*batch_size, steps]`, and their versions `[envs, steps]`."""
        n, total = self._batch_size.numel(), len(self._steps)
        batch = stack_steps(self._steps, len(self._batch_size))
        versions = np.array(self._versions, np.int64)
        if self._index is None:
            calls, dropped = np.broadcast_to(np.arange(steps), (n, steps)), steps
        else:
            calls, dropped = self._index.take(steps)
        del self._steps[:dropped], self._versions[:dropped]
        if steps < total:
            rows = batch.reshape(n, total)[torch.arange(n)[:, None], torch.from_numpy(calls.copy())]
            batch = rows.reshape(*self._batch_size, steps)
        return batch, versions[calls]


Self = TypeVar("Self", bound="EnvBase")


class EnvBase(ABC):
    """An environment, or a batch of environments, that reads and writes TensorDicts of shape `batch_size`.

    A subclass calls `__init__` with its specs (batch dimensions included) and implements `_reset`, `_step` and
    `_set_seed`. `reset` returns the entries of `observation_spec` and the flags `done`, `terminated`, `truncated` (bool
    `[*batch, 1]`, False); `step` reads `action` and adds `("next", ...)`: observations, `reward` (float32
    `[*batch, 1]`) and flags. Both raise ValueError, which names the key, if the subclass returns another shape or dtype
    than that of the spec.

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
        """The specs of the three flags."""
        flags = dict.fromkeys(FLAGS, self.done_spec)
        return Composite(flags, shape=self.batch_size, device=self.device)

    @abstractmethod
    def _reset(self, mask: Tensor | None) -> TensorDictBase:
        """Observations after a reset, of all environments or where `mask` (bool `[*batch, 1]`) holds.

        The other rows are not read. With a mask the environments go on to the next episodes; with None they start new
        ones at once, also in the middle of an episode.
        """

    @abstractmethod
    def _step(self, td: TensorDictBase) -> TensorDictBase:
        """Observations, reward, `terminated`, and `truncated` if the environment has time limits."""

    @abstractmethod
    def _set_seed(self, seed: int) -> None:
        """Seeds the random numbers from the next reset on."""

    def reset(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Starts episodes, everywhere or where `td["_reset"]` (bool `[*batch, 1]`) holds; the rest is as in `td`."""
        self._check_open()
        mask = None if td is None else td.get("_reset", None)
        fresh = self._with_flags(self._reset(mask))
        return fresh if td is None or mask is None or bool(mask.all()) else merge_where(mask, fresh, td)

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """Takes `td["action"]` and puts the results under `td["next"]`. Raises KeyError without an action."""
        self._check_open()
        if td.get("action", None) is None:
            raise KeyError(f"step needs an 'action', got keys {list(td.keys())}; use rand_step, or call a policy first")
        following = self._with_flags(self._step(td))
        hidden = td.get("next", None)  # a recurrent policy writes its next hidden state there
        return td.set("next", following if hidden is None else hidden.copy().update(following))

    def _with_flags(self, td: TensorDictBase) -> TensorDictBase:
        """The result of `_reset` or `_step` with all flags. Raises ValueError for values that do not fit the specs."""
        self._check_values(td)
        done = td.get("done", None)
        if done is not None and td.get("terminated", None) is None:
            td.set("terminated", done)  # an environment may report only that an episode is over
        for key in ("terminated", "truncated"):
            if td.get(key, None) is None:
                td.set(key, self.done_spec.zero())
        return td.set("done", td.get("terminated") | td.get("truncated"))

    def _check_values(self, td: TensorDictBase) -> None:
        """Raises ValueError if an observation is missing, or an entry has another shape or dtype than its spec."""
        for key, spec in self.observation_spec.leaves().items():
            _check_value(key, td.get(key, None), spec)
        for key, spec in (*((flag, self.done_spec) for flag in FLAGS), ("reward", self.reward_spec)):
            value = td.get(key, None)
            if value is not None:
                _check_value(key, value, spec)

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """`step`, and the root of the next step, reset where the episode is over; `next` keeps the last observation."""
        td = self.step(td)
        return td, self.maybe_reset(step_mdp(td))

    def maybe_reset(self, td: TensorDictBase) -> TensorDictBase:
        """`td`, reset where its `done` holds."""
        done = td.get("done")
        return reset_where(self, td, done) if bool(done.any()) else td

    def vector_engine(self) -> VectorEngine | None:
        """The engine that steps the whole batch with raw values, for collectors; None if there is none."""
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

        Ends after the first step that is done in any environment, or (`break_when_any_done=False`) resets those that
        are done and continues. `policy` is anything that a collector takes. Rows that only reset (`"_idle"`, see
        `VectorEnv`) are no steps: the rollout continues until every environment has its steps, and drops what others
        have beyond. Raises ValueError for fewer than one step.
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
        """Seeds the environments from the next reset on; returns the first seed that none of them uses."""
        self._set_seed(seed)
        return seed + self.batch_size.numel()

    def random_state(self) -> Any:
        """The state of the environments' random generators, for `set_random_state`; None if it cannot be read."""
        return None

    def set_random_state(self, state: Any) -> None:
        """Sets the random generators to a `random_state`: after a reset of all, the same episodes follow.

        Raises ValueError for a state of another environment, and changes nothing.
        """
        raise ValueError(f"{type(self).__name__} has no random state")

    def to(self: Self, device: torch.device | str) -> Self:
        """Moves specs and all further outputs to `device`; returns the environment itself."""
        self.device = usable_device(device, "device")
        for name in ("observation_spec", "action_spec", "reward_spec", "done_spec"):
            setattr(self, name, getattr(self, name).to(self.device))
        return self

    def close(self) -> None:
        """Releases the environment's resources; a second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self._close()

    def _close(self) -> None:
        """Releases the resources of a subclass."""

    def _check_open(self) -> None:
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


def _check_value(key: Any, value: Any, spec: Any) -> None:
    """Raises ValueError if a value has another shape or dtype than its spec."""
    if isinstance(value, Tensor) and value.shape == spec.shape and value.dtype == spec.dtype:
        return
    kind = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
    raise ValueError(
        f"the environment gave {key!r} as {kind}, and its spec says {spec.dtype} {tuple(spec.shape)}; correct the "
        "environment or its spec"
    )
