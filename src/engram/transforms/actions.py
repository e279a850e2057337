"""Transforms of actions: `FrameSkipTransform` and `ActionScaling`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram._checks import count
from engram.pytree import Key, Keys, key_path, to_tensor
from engram.specs import Bounded, Spec, Unbounded
from engram.transforms.base import Transform, WriteRequest
from engram.transforms.env_specs import EnvSpecs, map_leaves
from engram.transforms.roles import IN_BUFFERS, Role
from engram.transforms.values import ObservationNorm


class FrameSkipTransform(Transform, built_in=True):
    """Repeats each action, and adds up the rewards: one step of the caller is `frame_skip` steps of the environment.

    Args:
        frame_skip: the number of steps; fewer where the episode ends.

    Transforms before it see every step of the environment, those after it every `frame_skip`-th. It takes single
    environments only: put it below `SerialEnv` and `ParallelEnv`.

    Raises:
        ValueError: `frame_skip` is not an integer of 1 or more, or the environment is a batch of several.
        RuntimeError: it is called on a batch.

    Example:
        >>> from engram.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), FrameSkipTransform(3))
        >>> env.rollout(2)["next", "reward"].flatten()
        tensor([3., 3.])
    """

    _rewards: Sequence[Key] = ("reward",)
    _actions: Sequence[Key] = ("action",)
    _action: TensorDictBase | None = None  # state and action of the step, as the parent environment gets them

    def __init__(self, frame_skip: int = 1) -> None:
        super().__init__()
        self.frame_skip = count(frame_skip, "frame_skip")

    def for_env(self, specs: EnvSpecs) -> FrameSkipTransform:
        if specs.observation.shape:
            raise ValueError(
                f"FrameSkipTransform is for a single environment, and this is a batch {list(specs.observation.shape)} "
                "of them, whose episodes end at different times; put it into each: "
                "SerialEnv(n, lambda: TransformedEnv(env, FrameSkipTransform(4)))"
            )
        own = copy.copy(self)  # the copy has this environment as its parent
        vars(own).update(_rewards=specs.reward_keys, _actions=specs.action_keys)
        return own

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        return specs.with_rewards(lambda _, spec: self._summed(spec))

    def _summed(self, spec: Any) -> Spec:
        if not isinstance(spec, Bounded):
            return spec  # type: ignore[no-any-return]
        low = torch.minimum(spec.low, spec.low * self.frame_skip)
        high = torch.maximum(spec.high, spec.high * self.frame_skip)
        return Bounded(low, high, spec.shape, spec.device, spec.dtype)

    def roles(self) -> Role:
        return Role.ENVIRONMENT

    def _inverts(self) -> bool:
        return True

    def changes_writes(self) -> bool:
        return False

    def inverse_stream(self, writing: WriteRequest) -> WriteRequest:
        return writing

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        self._action = td
        return td

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        return fresh

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        assert self._action is not None
        rewards = [following.get(key) for key in self._rewards]
        for _ in range(self.frame_skip - 1):
            if bool(following.get("done").any()):
                break
            state = following.exclude(*self._rewards)
            for key in self._actions:
                state.set(key, self._action.get(key))
            following = self.parent.step(state).get("next")
            rewards = [one + following.get(key) for one, key in zip(rewards, self._rewards, strict=True)]
        for key, reward in zip(self._rewards, rewards, strict=True):
            following.set(key, reward)
        return following

    def forward(self, batch: Any) -> Any:
        raise RuntimeError("FrameSkipTransform repeats actions in an environment: put it into a TransformedEnv")

    def _settings(self) -> dict[str, Any]:
        return {"frame_skip": self.frame_skip}


class ActionScaling(ObservationNorm, built_in=True):
    """Scales actions to -1 to 1: an environment takes such actions, and a buffer stores those of the environment.

    Args:
        in_keys_inv, out_keys_inv, in_keys, out_keys: as Transform's; `["action"]` if None.
        loc, scale: the middle of the environment's actions and half of their range; without both, computed from the
            bounds of the environment.
        standard_normal: False: scale to 0 to 1 instead.

    Buffers scale actions on reading, and scale them back on writing. The object that was put into an environment
    keeps its bounds, so that it can be given to a buffer, too.

    Raises:
        ValueError: only one of `loc` and `scale`; an environment whose actions have no bounds, or other bounds than
            those from an earlier environment.
        RuntimeError: there are no `loc` and `scale` yet.

    Example:
        >>> from engram.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("Pendulum-v1"), ActionScaling())  # actions of -2 to 2
        >>> env.action_spec.low, env.action_spec.high
        (tensor([-1.]), tensor([1.]))
        >>> ActionScaling(loc=0.0, scale=2.0).inv({"action": torch.tensor([0.5])})
        {'action': tensor([1.])}
    """

    def __init__(
        self,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
        *,
        loc: Any = None,
        scale: Any = None,
        standard_normal: bool = True,
    ) -> None:
        inner: Keys = ["action"] if in_keys_inv is None else in_keys_inv
        super().__init__(
            loc, scale, inner if in_keys is None else in_keys, out_keys, inner, out_keys_inv, standard_normal
        )

    @classmethod
    def from_stats(
        cls, *, mean: Any = None, std: Any = None, low: Any = None, high: Any = None, eps: float = 1e-6, **settings: Any
    ) -> ActionScaling:
        """The transform for actions with this mean and standard deviation, or with these bounds.

        Args:
            eps: the smallest scale.
            settings: further arguments of the class.

        Raises:
            ValueError: neither pair is complete, or both pairs are given.

        Example:
            >>> ActionScaling.from_stats(low=torch.tensor([0.0]), high=torch.tensor([4.0])).scale
            tensor([2.])
        """
        pairs = [pair for pair in ((mean, std), (low, high)) if None not in pair]
        given = sum(value is not None for value in (mean, std, low, high))
        if len(pairs) != 1 or given != 2:
            raise ValueError(
                f"give mean and std, or low and high, got mean={mean}, std={std}, low={low} and high={high}"
            )
        one, other = (to_tensor(value) for value in pairs[0])
        loc, scale = (one, other) if mean is not None else ((one + other) / 2, (other - one) / 2)
        return cls(loc=loc, scale=scale.clamp_min(eps), **settings)

    def normalize(self, action: Tensor) -> Tensor:
        """The scaled form of an environment's action."""
        return self._apply_transform(action)

    def denormalize(self, action: Tensor) -> Tensor:
        """The environment's action from a scaled one."""
        return self._inv_apply_transform(action)

    def _apply_transform(self, value: Tensor) -> Tensor:
        loc, scale = self._cast(value)
        unit = (value - loc) / scale
        return unit if self.standard_normal else (unit + 1) / 2

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        loc, scale = self._cast(value)
        return (value if self.standard_normal else value * 2 - 1) * scale + loc

    # ---- environments ----
    def roles(self) -> Role:
        is_of_actions = any("action" in key_path(key) for key in self.in_keys_inv)
        return super().roles() if is_of_actions else super().roles() & IN_BUFFERS

    def for_env(self, specs: EnvSpecs) -> ActionScaling:
        if self._given:
            return self
        found: list[tuple[Tensor, Tensor]] = []

        def collect(key: Key, spec: Any) -> Spec:
            if key in self.in_keys_inv:
                if not isinstance(spec, Bounded) or not spec.dtype.is_floating_point:
                    raise ValueError(f"ActionScaling needs the bounds of {key!r}, which is {spec}; give loc and scale")
                found.append(((spec.low + spec.high) / 2, (spec.high - spec.low) / 2))
            return spec  # type: ignore[no-any-return]

        map_leaves(specs.action, "action", collect)
        if len(found) != 1:
            raise ValueError(
                f"ActionScaling takes the bounds of one action, and {self.in_keys_inv} are {len(found)}: give loc and "
                "scale, or one transform for each"
            )
        same = self._stats is None or all(
            mine.shape == theirs.shape and bool((mine == theirs).all())
            for mine, theirs in zip(self._stats, found[0], strict=True)
        )
        if not same:
            raise ValueError(
                f"ActionScaling has loc={self.loc} and scale={self.scale} from another environment, and here they are "
                f"{found[0][0]} and {found[0][1]}: make a new one"
            )
        if not bool(torch.isfinite(found[0][1]).all()) or bool((found[0][1] == 0).any()):
            raise ValueError(f"ActionScaling needs finite bounds, and a range, of the action: {specs.action}")
        self._stats = found[0]
        return self

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        return specs._replace(action=self.transform_action_spec(specs.action))

    def transform_action_spec(self, action_spec: Spec) -> Spec:
        return self._mapped_action(action_spec, self._scaled)

    def _scaled(self, spec: Any) -> Spec:
        if not spec.dtype.is_floating_point or not isinstance(spec, Bounded | Unbounded):
            raise ValueError(f"ActionScaling scales continuous actions, and the environment takes {spec}")
        if isinstance(spec, Unbounded):
            return spec
        ends = (self._apply_transform(spec.low), self._apply_transform(spec.high))
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        return Bounded(low, high, spec.shape, spec.device, spec.dtype)

    # The results of resets and steps have no action.
    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        return fresh

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        return following
