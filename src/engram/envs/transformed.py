"""`TransformedEnv`: an environment behind transforms."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.envs.base import EnvBase
from engram.transforms import Compose, Transform
from engram.transforms.adapters import as_transform
from engram.transforms.env_specs import FLAGS, EnvSpecs

Self = TypeVar("Self", bound="TransformedEnv")


class TransformedEnv(EnvBase):
    """An environment whose observations, rewards and actions go through a transform, a list of them, or a callable.

    Transforms change the root that a reset returns and the `"next"` that a step returns, in order; the action goes
    through their `inv` in reverse order. The specs are those of the transformed values. A callable gets these
    TensorDicts, without the reward at resets, and returns one.

    Transforms along time (`CatFrames`, `RewardSum`, `StepCounter`, `InitTracker`) start anew exactly where an
    environment is reset; this object has its own copies, which `transform` returns. All others are the caller's
    objects, so that a `VecNorm` may be shared. An entry that is computed from rewards only is zero at resets.

    Keys are those of the root: `"observation"`, `"reward"`. A base environment that reads its state from the TensorDict
    reads the caller's: there, use `out_keys` that leave the state's entries unchanged.

    Raises TypeError and ValueError for transforms that only work in buffers, or that remove rewards, flags or the
    action; KeyError for keys that the environment does not have.

    >>> from engram.envs import GymEnv
    >>> from engram.envs.transforms import RewardSum, StepCounter
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(max_steps=3), RewardSum()))
    >>> env.rollout(10)["next", "episode_reward"].flatten()
    tensor([1., 2., 3.])
    """

    def __init__(self, base_env: EnvBase, transform: Any = None) -> None:
        if not isinstance(base_env, EnvBase):
            raise TypeError(f"TransformedEnv takes an engram environment, got a {type(base_env).__name__}")
        self._base = base_env
        given = _as_list(transform)
        parts = [part for one in given for part in one.parts()]
        self._is_single = len(given) == 1 and given[0].parts() == given
        super().__init__(
            base_env.observation_spec, base_env.action_spec, batch_size=base_env.batch_size, device=base_env.device
        )
        self._attach(parts, 0)

    # ---- transforms ----
    @property
    def base_env(self) -> EnvBase:
        """The environment below the transforms."""
        return self._base

    @property
    def transform(self) -> Transform:
        """The transform, or a flat `Compose` of all of them, as this environment uses them."""
        return self._parts[0] if self._is_single else Compose(*self._parts)

    def append_transform(self, transform: Any) -> None:
        """Adds a transform at the end; one along time starts at the next reset."""
        self.insert_transform(len(self._parts), transform)

    def insert_transform(self, index: int, transform: Any) -> None:
        """Adds a transform before the one at `index`. Raises IndexError if the index is out of range."""
        n = len(self._parts)
        if not -n <= index <= n:
            raise IndexError(f"there are {n} transforms; index must be -{n} to {n}, got {index}")
        at = index + n if index < 0 else index
        new = [part for one in _as_list(transform) for part in one.parts()]
        self._attach([*self._parts[:at], *new, *self._parts[at:]], at)
        self._is_single = False

    def _attach(self, parts: list[Transform], n_attached: int) -> None:
        """Uses these transforms, of which the first `n_attached` are in use already."""
        attached, specs = [], self._base_specs()
        for i, part in enumerate(parts):
            own = part if i < n_attached else part.for_env(specs)
            specs = own.transform_specs(specs)
            attached.append(own)
        self._parts = attached
        self._update_specs()

    def _base_specs(self) -> EnvSpecs:
        base = self._base
        return EnvSpecs(base.observation_spec, base.action_spec, base.reward_spec, base.done_spec)

    def _update_specs(self) -> None:
        specs = self._base_specs()
        self._resets: list[tuple[Any, dict[Any, Any]]] = []  # each with the entries that it adds
        self._steps: list[Any] = []
        self._invs: list[Any] = []
        for part in self._parts:
            before, specs = specs.observation.leaves(), part.transform_specs(specs)
            added = {key: spec for key, spec in specs.observation.leaves().items() if key not in before}
            for calls in part.env_steps():
                self._resets.append((calls.reset, added))
                self._steps.append(calls.step)
                if calls.inv is not None:
                    self._invs.insert(0, calls.inv)
        self.observation_spec, self.action_spec = specs.observation, specs.action
        self.reward_spec, self.done_spec = specs.reward, specs.done

    # ---- episodes ----
    def random_state(self) -> Any:
        return self._base.random_state()

    def set_random_state(self, state: Any) -> None:
        self._base.set_random_state(state)

    def _reset(self, mask: Tensor | None) -> TensorDictBase:
        td = TensorDict(batch_size=self.batch_size, device=self.device)
        if mask is None:
            fresh = self._base.reset()
        else:
            # Rows without a reset are zeros: the base must not get the caller's, which transforms have changed.
            blank = self._base.observation_spec.zero().update(self._base.full_done_spec.zero())
            fresh = self._base.reset(blank.set("_reset", mask))
            fresh.pop("_reset", None)
            td.set("_reset", mask)
        for reset, added in self._resets:
            fresh = reset(td, fresh)
            for key, spec in added.items():
                if fresh.get(key, None) is None:
                    fresh.set(key, spec.zero())
        return fresh

    def step(self, td: TensorDictBase) -> TensorDictBase:
        self._check_open()
        if td.get("action", None) is None:
            raise KeyError(f"step needs an 'action', got keys {list(td.keys())}; use rand_step, or call a policy first")
        # A recurrent policy writes its next hidden state under "next": transforms do not see it.
        hidden = td.get("next", None)
        following = self._with_flags(self._step(td if hidden is None else td.exclude("next")))
        return td.set("next", following if hidden is None else hidden.copy().update(following))

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        inner = td
        if self._invs:
            inner = td.exclude("next")
            for inv in self._invs:
                inner = inv(inner)
        following = self._base.step(inner).get("next")
        for step in self._steps:
            following = step(td, following)
        return following

    def _with_flags(self, td: TensorDictBase) -> TensorDictBase:
        if not self._parts:
            return td
        terminated, truncated = td.get("terminated", None), td.get("truncated", None)
        if terminated is None or truncated is None:
            raise KeyError(f"a transform removed flags: the keys are {list(td.keys())}, and {FLAGS} must stay")
        return td.set("done", terminated | truncated)

    # ---- the rest of an environment ----
    def engines(self) -> None:
        """None: raw steps of the base environment would leave the transforms out."""

    def vector_engine(self) -> None:
        """None: as `engines`."""

    def deferrable_transforms(self) -> list[Transform] | None:
        """The transforms, for collectors that step `base_env` and apply them to whole batches.

        None where a child class has changed a step.
        """
        cls = type(self)
        return None if (cls._step, cls._reset, cls.step, cls.reset) != _UNCHANGED_METHODS else list(self._parts)

    def set_seed(self, seed: int) -> int:
        return self._base.set_seed(seed)

    def _set_seed(self, seed: int) -> None:
        self._base.set_seed(seed)

    def to(self: Self, device: torch.device | str) -> Self:
        self._base.to(device)
        self.device = self._base.device
        self._update_specs()
        return self

    def _close(self) -> None:
        self._base.close()

    def state_dict(self) -> dict[str, Any]:
        """The state of all transforms, in this environment and its base, without that of running episodes."""
        state = Compose(*self._parts).state_dict()
        below = self._base.state_dict() if isinstance(self._base, TransformedEnv) else {}
        return {**state, "base_env": below} if below else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state.

        Raises ValueError, which lists every difference, if it belongs to other transforms; nothing is changed then.
        """
        if differences := self.differences(state):
            raise ValueError("the state does not fit: " + "; ".join(differences))
        Compose(*self._parts).load_state_dict(state)
        if isinstance(self._base, TransformedEnv):
            self._base.load_state_dict(state.get("base_env", {}))

    def differences(self, state: dict[str, Any]) -> list[str]:
        """The reasons why a saved state cannot be loaded; empty if it can."""
        differences, below = Compose(*self._parts).differences(state), state.get("base_env", {})
        if isinstance(self._base, TransformedEnv):
            return differences + self._base.differences(below)
        return (
            [*differences, "the saved base_env had transforms with a state, and has none here"]
            if below
            else differences
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # private ones belong to the base, and `copy` asks before there is a base
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._base, name)

    def __repr__(self) -> str:
        return f"TransformedEnv(\n    env={self._base!r},\n    transform={self.transform!r})"


_UNCHANGED_METHODS = (TransformedEnv._step, TransformedEnv._reset, TransformedEnv.step, TransformedEnv.reset)


def _as_list(transform: Any) -> list[Transform]:
    if transform is None:
        return []
    return [as_transform(one) for one in (transform if isinstance(transform, list | tuple) else [transform])]
