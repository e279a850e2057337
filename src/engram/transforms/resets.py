"""Transforms for the beginning of episodes: no-op actions, lives, hidden states, trajectory numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram import _forms as forms
from engram._advice import advised
from engram._checks import count
from engram.pytree import (
    Key,
    as_key,
    get_tensor,
    has_batch_size,
    key_path,
    require_tensor,
    set_entry,
    to_tensor,
)
from engram.specs import Categorical, Composite, Spec, Unbounded
from engram.transforms.base import Transform, has_entries, select_reset, to_device
from engram.transforms.env_specs import EnvSpecs
from engram.transforms.trajectory import DONE_KEYS, TrajectoryBounds, TrajectoryTransform
from engram.transforms.values import first_key

_MAX_TRIALS = 10  # the most resets of an environment whose episodes end during the first actions


class NoopResetEnv(Transform, built_in=True):
    """Takes some random actions at each reset, which returns the state after them.

    Args:
        noops: the number of actions; with `random` the largest number plus one.
        random: draw a number from 0 to `noops - 1` at each reset.

    It takes single environments only: put it below `SerialEnv` and `ParallelEnv`. In a buffer it does nothing, with a
    warning.

    Raises:
        ValueError: `noops` is negative, or the environment is a batch of several.
        RuntimeError: episodes end during these actions, ten times in a row.

    Example:
        >>> from engram.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), NoopResetEnv(3, random=False))
        >>> bool((env.reset()["observation"].abs() > 0.05).any())
        True
    """

    def __init__(self, noops: int = 30, random: bool = True) -> None:
        super().__init__()
        self.noops, self.random = count(noops, "noops", 0), random

    def for_env(self, specs: EnvSpecs) -> NoopResetEnv:
        if specs.observation.shape:
            raise ValueError(
                f"NoopResetEnv is for a single environment, and this is a batch {list(specs.observation.shape)} of "
                "them, whose episodes begin at different times; put it into each: "
                "SerialEnv(n, lambda: TransformedEnv(env, NoopResetEnv()))"
            )
        return copy.copy(self)  # which has this environment as its parent

    @property
    def base_env(self) -> Any:
        """The environment before this transform: `parent`."""
        return self.parent

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        return specs

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        steps = int(torch.randint(self.noops, (), device="cpu")) if self.random and self.noops else self.noops
        for _ in range(_MAX_TRIALS):
            after = self._after_actions(fresh, steps)
            if after is not None:
                return after
            fresh = self.parent.reset()
        raise RuntimeError(
            f"the environment was done {_MAX_TRIALS} times before noops={steps} actions were taken; use fewer"
        )

    def _after_actions(self, state: TensorDictBase, steps: int) -> TensorDictBase | None:
        """The state after some random actions; None if the episode ends during them."""
        for _ in range(steps):
            state = self.parent.rand_step(state).get("next").exclude(*self.parent.reward_keys)
            if bool(state.get("done").any()):
                return None
        return state

    def _settings(self) -> dict[str, Any]:
        return {"noops": self.noops, "random": self.random}


@advised
class EndOfLifeTransform(Transform, built_in=True):
    """Marks the steps that cost a life, in environments such as those of Atari: `end-of-life`, and the `lives` left.

    Args:
        eol_key: bool with the shape of the flags, True after a step that cost a life; a value learner may treat it as
            the end of the episode, although the episode continues.
        lives_key: int64 `[*batch]`.
        done_key: the flag whose shape `eol_key` takes.
        eol_attribute: the method of the gymnasium environment that counts the lives. `engram.load` makes no transform
            with one that a checkpoint names.

    In a buffer, whose steps have these entries from the environment, it does nothing, with a warning.

    Raises:
        TypeError: the environment has no such method, or it is one of a vector of gymnasium's, which begin the next
            episode within the step that ends one.

    Example:
        >>> EndOfLifeTransform(eol_key="life_lost")
        EndOfLifeTransform(eol_key='life_lost', lives_key='lives')
    """

    never_saved = ("eol_attribute", 3)

    def __init__(
        self,
        eol_key: Key = "end-of-life",
        lives_key: Key = "lives",
        done_key: Key = "done",
        eol_attribute: str = "unwrapped.ale.lives",
    ) -> None:
        super().__init__()
        self.eol_key, self.lives_key, self.done_key = as_key(eol_key), as_key(lives_key), as_key(done_key)
        self.eol_attribute = eol_attribute

    def register_keys(self, loss_or_advantage: Any) -> None:
        """Sets a TorchRL loss or value estimator to end episodes where a life is lost."""
        loss_or_advantage.set_keys(done=self.eol_key, terminated=self.eol_key)

    def for_env(self, specs: EnvSpecs) -> EndOfLifeTransform:
        return copy.copy(self)  # which has this environment as its parent

    def _count(self, like: TensorDictBase) -> Tensor:
        """The lives of each environment, int64 `[*batch]`."""
        try:
            lives = to_tensor(self.parent.call_below(self.eol_attribute)).to(torch.int64, copy=True)
        except AttributeError as error:
            raise TypeError(
                f"EndOfLifeTransform counts lives by {self.eol_attribute}(), which this environment does not have "
                f"({error}); eol_attribute= names another method"
            ) from error
        return lives.to(like.get(self.done_key).device).reshape(like.batch_size)

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        specs.require([self.done_key], "EndOfLifeTransform")
        shape, device = specs.observation.shape, specs.observation.device
        self._count(specs.blank(stepped=False))  # raises if the environment has no lives
        flag: Any = specs.entry(self.done_key)
        return specs.with_entries(
            {
                self.eol_key: Categorical(2, flag.shape, device, torch.bool),
                self.lives_key: Unbounded(shape, device, torch.int64),
            }
        )

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        mark = torch.zeros_like(fresh.get(self.done_key), dtype=torch.bool)
        return fresh.set(self.eol_key, mark).set(self.lives_key, self._count(fresh))

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        lives, before = self._count(following), require_tensor(td, self.lives_key, "EndOfLifeTransform")
        lost = (lives < before).reshape(following.get(self.done_key).shape)
        return following.set(self.eol_key, lost).set(self.lives_key, lives)

    def _settings(self) -> dict[str, Any]:
        return {"eol_key": self.eol_key, "lives_key": self.lives_key}


class TensorDictPrimer(Transform, built_in=True):
    """Adds initial entries at resets, such as the hidden state of a recurrent policy.

    Args:
        primers: specs by key, a mapping or a Composite; or pass them as keywords.
        random: draw the values from the specs.
        default_value: a number; a function that returns a value; or a mapping of these by key. 0 if None.
        reset_key: None or `"_reset"`: episodes begin where the environment is reset.
        expand_specs: whether the specs lack the environment's batch dimensions. None: they do unless `primers` is a
            Composite of the environment's batch size.
        single_default_value: `default_value` is one function for all entries: it gets `reset`, bool `[*batch, 1]`, and
            returns a TensorDict.

    The policy's `("next", key)` becomes the entry of the next step; if it writes none, the entry keeps its value.
    On reading from a buffer, missing entries are added.

    Raises:
        ValueError: no spec, both `random` and `default_value`, defaults of other keys, or batch dimensions that do not
            fit.

    Example:
        >>> from engram.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), TensorDictPrimer(hidden=Unbounded((2,)), default_value=1.0))
        >>> env.rollout(3)["hidden"].shape, env.reset()["hidden"]
        (torch.Size([3, 2]), tensor([1., 1.]))
    """

    def __init__(
        self,
        primers: Mapping[Key, Any] | None = None,
        random: bool | None = None,
        default_value: Any = None,
        reset_key: Key | None = None,
        expand_specs: bool | None = None,
        single_default_value: bool = False,
        call_before_env_reset: bool = False,
        **named: Any,
    ) -> None:
        super().__init__()
        if primers is not None and named:
            raise ValueError(f"give the specs in `primers` or by name, got both: {list(named)} by name")
        self.primers = _as_composite(primers or named)
        if random and default_value is not None:
            raise ValueError(f"values are drawn (random=True) or given (default_value={default_value!r}), not both")
        if reset_key not in (None, "_reset"):
            raise ValueError(f"episodes begin where '_reset' says, got reset_key={reset_key!r}")
        if call_before_env_reset:
            raise ValueError("the environments of engram take no entries at a reset: call_before_env_reset is False")
        if single_default_value and not callable(default_value):
            raise ValueError("single_default_value needs a function as default_value, which returns a TensorDict")
        self.random, self.expand_specs, self.single_default_value = bool(random), expand_specs, single_default_value
        self.default_value, self.reset_key = default_value, "_reset"
        if isinstance(default_value, Mapping) and set(map(as_key, default_value)) != set(self.primers.leaves()):
            raise ValueError(
                f"default_value is for {list(default_value)}, and the specs are of {list(self.primers.leaves())}: "
                "give one for each"
            )

    # ---- environments ----
    def policy_entries(self) -> list[Key]:
        return list(self.primers.leaves())

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        leaves = self._expanded(specs.observation.shape)
        return specs.with_entries({key: spec.to(specs.done.device or "cpu") for key, spec in leaves.items()})

    def _expanded(self, batch: torch.Size) -> dict[Key, Spec]:
        leaves, own = self.primers.leaves(), self.primers.shape
        if self.expand_specs is False or (self.expand_specs is None and len(own) and own == batch):
            for key, spec in leaves.items():
                if spec.shape[: len(batch)] != batch:
                    raise ValueError(
                        f"the spec of {key!r} has shape {list(spec.shape)} in an environment {list(batch)}; "
                        "expand_specs=True adds its batch dimensions"
                    )
            return leaves
        return {key: spec.expand(*batch, *spec.shape) for key, spec in leaves.items()}

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        leaves = self._expanded(fresh.batch_size)
        device = fresh.get("done").device
        if self.single_default_value:
            mask = td.get("_reset", None)
            values = self.default_value(reset=torch.ones_like(fresh.get("done")) if mask is None else mask)
            given = {key: require_tensor(values, key, "TensorDictPrimer") for key in leaves}
        else:
            given = {key: self._value(key, spec) for key, spec in leaves.items()}
        for key, spec in leaves.items():
            fresh.set(key, to_device(_fitting(given[key], key, spec), device))
        return fresh

    def _value(self, key: Key, spec: Spec) -> Tensor:
        if self.random:
            return spec.rand()  # type: ignore[no-any-return]
        default = self.default_value
        if isinstance(default, Mapping):
            default = next(value for name, value in default.items() if as_key(name) == key)
        value = default() if callable(default) else 0.0 if default is None else default
        return value if isinstance(value, Tensor) else torch.full(spec.shape, value, dtype=spec.dtype, device="cpu")

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        for key, spec in self._expanded(following.batch_size).items():
            if following.get(key, None) is None:
                value = td.get(key, None)
                value = spec.zero() if value is None else value.clone()
                following.set(key, to_device(value, following.get("done").device))
        return following

    # ---- buffers ----
    def has_changed(self, batch: Any) -> bool | None:
        return has_entries(batch, list(self.primers.leaves()))

    def forward(self, batch: Any) -> Any:
        if type(batch) is list:
            return [self.forward(item) for item in batch]
        if not has_batch_size(batch):
            raise TypeError(f"TensorDictPrimer takes TensorDicts, got a {type(batch).__name__}")
        for key, spec in self.primers.leaves().items():
            if get_tensor(batch, key) is None:
                shaped = spec.expand(*batch.batch_size, *spec.shape)
                set_entry(batch, key, _fitting(self._value(key, shaped), key, shaped))
        return batch

    def _settings(self) -> dict[str, Any]:
        shown = {"primers": list(self.primers.leaves()), "random": self.random, "default_value": self.default_value}
        return {name: value for name, value in shown.items() if value not in (None, False)}


def _as_composite(primers: Mapping[Any, Any]) -> Composite:
    """The specs of primers as a Composite. Raises ValueError if there are none, or if one is not a spec."""
    if isinstance(primers, Composite):
        leaves: Mapping[Key, Any] = primers.leaves()
        result = Composite(shape=primers.shape, device=primers.device)
    else:
        leaves, result = primers, Composite()
    for key, spec in leaves.items():
        if not isinstance(spec, Spec):
            raise ValueError(f"the primer of {key!r} must be a spec of engram.data, got a {type(spec).__name__}")
        result[as_key(key)] = spec
    if not len(result):
        raise ValueError("TensorDictPrimer needs a spec: TensorDictPrimer(hidden=Unbounded((64,)))")
    return result


def _fitting(value: Tensor, key: Key, spec: Any) -> Tensor:
    """A copy of a value in the shape of its spec. Raises ValueError for other shapes and dtypes."""
    if value.dtype != spec.dtype or value.shape != spec.shape[spec.ndim - value.ndim :]:
        raise ValueError(
            f"the default_value of {key!r} is {value.dtype} {list(value.shape)}, its spec says {spec.dtype} "
            f"{list(spec.shape)}"
        )
    return value.expand(spec.shape).clone()  # a default's tensor is the caller's


@advised
class TrajCounter(TrajectoryTransform, built_in=True):
    """Numbers the trajectories of an environment, or of a batch: `traj_count` is 0, 1, 2, ...; under `next`, too.

    Args:
        out_key: the number's key; int64 with the shape of the flags.
        done_key, traj_key: where trajectories end; see TrajectoryTransform.

    TorchRL's `repeats=None` is accepted without effect.

    Trajectories that begin at the same step are numbered in the order of the environments. In an environment every
    reset begins new ones, and a saved state continues the numbering; in a batch (reading) the numbers
    begin at 0, on writing (see TrajectoryTransform) they continue. Workers of a ParallelEnv count separately.

    Example:
        >>> done = torch.tensor([[False], [True], [False]])
        >>> TrajCounter()({"next": {"done": done}})["traj_count"].flatten()
        tensor([0, 0, 1])
    """

    def __init__(
        self, out_key: Key = "traj_count", *, done_key: Key | None = None, traj_key: Key | None = None
    ) -> None:
        super().__init__(done_key=done_key, traj_key=traj_key)
        self.out_key = as_key(out_key)
        self._next: int | None = None  # in an environment: the next trajectory's number

    # ---- environments ----
    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        return specs.with_entries({self.out_key: Unbounded(specs.done.shape, specs.done.device, torch.int64)})

    def has_changed(self, batch: Any) -> bool | None:
        return has_entries(batch, [self.out_key])

    _current: Tensor  # in an environment: the numbers of the running trajectories

    def _env_state(self, specs: EnvSpecs) -> dict[str, Any]:
        return {"_next": 0, "_current": torch.zeros(specs.done.shape, dtype=torch.int64, device="cpu")}

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        done = fresh.get("done")
        mask = td.get("_reset", None)
        begins = torch.ones_like(done, dtype=torch.bool) if mask is None else mask
        assert self._next is not None
        fresh_numbers = self._next + begins.flatten().cumsum(0).reshape(begins.shape) - 1
        self._current = select_reset(td, fresh_numbers, self._current)
        self._next += int(begins.sum())
        return fresh.set(self.out_key, self._current.clone())

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        self._current = to_device(self._current, following.get("done").device)
        return following.set(self.out_key, self._current.clone())

    # ---- batches ----
    def _run(self, batch: Any, trajectories: TrajectoryBounds, continues: Tensor, before: Any) -> Any:
        done_key = self.done_key or first_key(batch, DONE_KEYS, "TrajCounter")
        done = require_tensor(batch, done_key, "TrajCounter")
        begins = trajectories.first() == trajectories.position
        begins[:, 0] = ~continues
        count, current = (0, torch.zeros(len(begins), dtype=torch.int64, device="cpu")) if before is None else before
        numbers = (
            count + begins.T.flatten().cumsum(0).reshape(begins.T.shape).T - 1
        )  # step by step, then by environment
        numbers = torch.cat([current.to(numbers.device).unsqueeze(1), torch.where(begins, numbers, -1)], 1)
        numbers = numbers.cummax(1).values[:, 1:]
        shaped = trajectories.view.join(numbers)
        shaped = shaped.reshape(*shaped.shape, *[1] * (done.ndim - shaped.ndim)).expand(done.shape).contiguous()
        set_entry(batch, self.out_key, shaped)
        if done_key[0] == "next":
            set_entry(batch, ("next", *key_path(self.out_key)), shaped.clone())
        return count + int(begins.sum()), numbers[:, -1].clone()

    # ---- state ----
    def get_extra_state(self) -> dict[str, Any]:
        return super().get_extra_state() if self._next is None else {"next": self._next}

    def set_extra_state(self, state: Any) -> None:
        if self._next is None:
            super().set_extra_state(state)
        else:
            self._next = int(state.get("next", 0))

    def _state_form(self) -> forms.Form:
        return super()._state_form() if self._next is None else forms.record({}, {"next": forms.integer()})

    def _value_form(self) -> forms.Form:
        return forms.fields(forms.integer(), forms.tensor(torch.int64, ndim=1))

    def _settings(self) -> dict[str, Any]:
        return {"out_key": self.out_key, **super()._settings()}
