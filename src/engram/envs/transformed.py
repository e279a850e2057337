"""An environment seen through transforms."""

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
    """`base_env` with what it shows and takes changed by `transform`: one, a list, a `Compose` or a callable.

    Transforms change the root of what a reset gives and the `"next"` of what a step gives, in order; the action goes
    through their `inv` in reverse order. Specs are those of what comes out. A callable gets these TensorDicts, without
    the reward at resets, and returns one.

    Transforms that follow episodes (`CatFrames`, `RewardSum`, `StepCounter`, `InitTracker`) start anew exactly where a
    reset holds; the environment has copies of its own, which `transform` gives. All others are the caller's objects, so
    that a `VecNorm` may be shared. An entry that is only made of rewards is zero at resets.

    Keys are those of the root: `"observation"`, `"reward"`. A base environment that reads its state from the TensorDict
    gets that of the caller: there, leave the state's entries in place by `out_keys`.

    Raises TypeError and ValueError for transforms that only work in buffers, or that take rewards, flags or the action
    away; KeyError for keys that the environment does not have.

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
        given = _listed(transform)
        parts = [part for one in given for part in one.parts()]
        self._is_single = len(given) == 1 and given[0].parts() == given
        super().__init__(
            base_env.observation_spec, base_env.action_spec, batch_size=base_env.batch_size, device=base_env.device
        )
        self._attach(parts, 0)

    # ---- wiring ----
    @property
    def base_env(self) -> EnvBase:
        """The environment below the transforms."""
        return self._base

    @property
    def transform(self) -> Transform:
        """The one transform, or a `Compose` of all, as they are at work here; nested ones are laid flat."""
        return self._parts[0] if self._is_single else Compose(*self._parts)

    def append_transform(self, transform: Any) -> None:
        """Adds a transform at the end; those that follow episodes begin at the next reset."""
        self.insert_transform(len(self._parts), transform)

    def insert_transform(self, index: int, transform: Any) -> None:
        """Adds a transform before the one at `index`. Raises IndexError where there is no such place."""
        n = len(self._parts)
        if not -n <= index <= n:
            raise IndexError(f"there are {n} transforms; index must be -{n} to {n}, got {index}")
        at = index + n if index < 0 else index
        new = [part for one in _listed(transform) for part in one.parts()]
        self._attach([*self._parts[:at], *new, *self._parts[at:]], at)
        self._is_single = False

    def _attach(self, parts: list[Transform], kept: int) -> None:
        """Works with these transforms, of which the first `kept` do so already."""
        here, specs = [], self._base_specs()
        for i, part in enumerate(parts):
            own = part if i < kept else part.for_env(specs)
            specs = own.transform_specs(specs)
            here.append(own)
        self._parts = here
        self._take_specs()

    def _base_specs(self) -> EnvSpecs:
        base = self._base
        return EnvSpecs(base.observation_spec, base.action_spec, base.reward_spec, base.done_spec)

    def _take_specs(self) -> None:
        specs = self._base_specs()
        self._resets: list[tuple[Any, dict[Any, Any]]] = []  # with the entries that each makes
        self._steps: list[Any] = []
        self._invs: list[Any] = []
        for part in self._parts:
            before, specs = specs.observation.leaves(), part.transform_specs(specs)
            made = {key: spec for key, spec in specs.observation.leaves().items() if key not in before}
            for stage in part.stages():
                self._resets.append((stage.reset, made))
                self._steps.append(stage.step)
                if stage.inv is not None:
                    self._invs.insert(0, stage.inv)
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
            # Elsewhere the base would take what the caller has, which transforms have changed: it is merged after.
            blank = self._base.observation_spec.zero().update(self._base.full_done_spec.zero())
            fresh = self._base.reset(blank.set("_reset", mask))
            fresh.pop("_reset", None)
            td.set("_reset", mask)
        for reset, made in self._resets:
            fresh = reset(td, fresh)
            for key, spec in made.items():
                if fresh.get(key, None) is None:
                    fresh.set(key, spec.zero())
        return fresh

    def step(self, td: TensorDictBase) -> TensorDictBase:
        self._refuse_if_closed()
        if td.get("action", None) is None:
            raise KeyError(f"step needs an 'action', got keys {list(td.keys())}; use rand_step, or call a policy first")
        kept = td.get("next", None)  # a recurrent policy writes its next hidden state there: no transform's affair
        following = self._with_flags(self._step(td if kept is None else td.exclude("next")))
        return td.set("next", following if kept is None else kept.copy().update(following))

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
            raise KeyError(f"a transform took flags away: there are {list(td.keys())}, and {FLAGS} must stay")
        return td.set("done", terminated | truncated)

    # ---- the rest of an environment ----
    def engines(self) -> None:
        """None: whoever steps the base environment raw leaves the transforms out."""

    def batch_engine(self) -> None:
        """None: as `engines`."""

    def deferrable_transforms(self) -> list[Transform] | None:
        """The transforms, for collectors that step `base_env` and apply them to whole batches.

        None where a child class has changed a step.
        """
        cls = type(self)
        return None if (cls._step, cls._reset, cls.step, cls.reset) != _ITS_OWN else list(self._parts)

    def set_seed(self, seed: int) -> int:
        return self._base.set_seed(seed)

    def _set_seed(self, seed: int) -> None:
        self._base.set_seed(seed)

    def to(self: Self, device: torch.device | str) -> Self:
        self._base.to(device)
        self.device = self._base.device
        self._take_specs()
        return self

    def _close(self) -> None:
        self._base.close()

    def state_dict(self) -> dict[str, Any]:
        """What transforms have learnt, in this environment and those below; not what episodes are in the middle of."""
        state = Compose(*self._parts).state_dict()
        below = self._base.state_dict() if isinstance(self._base, TransformedEnv) else {}
        return {**state, "base_env": below} if below else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what was learnt.

        Raises ValueError where that belongs to other transforms; every difference is listed, and nothing is changed.
        """
        said = self.differences(state)
        if said:
            raise ValueError("the state does not fit: " + "; ".join(said))
        Compose(*self._parts).load_state_dict(state)
        if isinstance(self._base, TransformedEnv):
            self._base.load_state_dict(state.get("base_env", {}))

    def differences(self, state: dict[str, Any]) -> list[str]:
        """Why a saved state cannot be loaded; empty: it can."""
        said, below = Compose(*self._parts).differences(state), state.get("base_env", {})
        if isinstance(self._base, TransformedEnv):
            return said + self._base.differences(below)
        return [*said, "transforms of a base_env had learnt something, and it has none here"] if below else said

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # private ones are the base's own, and copies are made before there is a base
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._base, name)

    def __repr__(self) -> str:
        return f"TransformedEnv(\n    env={self._base!r},\n    transform={self.transform!r})"


_ITS_OWN = (TransformedEnv._step, TransformedEnv._reset, TransformedEnv.step, TransformedEnv.reset)


def _listed(transform: Any) -> list[Transform]:
    if transform is None:
        return []
    return [as_transform(one) for one in (transform if isinstance(transform, list | tuple) else [transform])]
