"""TorchRL's transforms in environments of engram, with the same specs and results as in TorchRL.

TorchRL is never imported here: a user of its transforms has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from tensordict import TensorDictBase

from engram._copies import Computed, PartlyCopied
from engram._overrides import overrides
from engram.pytree import Key
from engram.specs.torchrl import spec_from_torchrl
from engram.transforms.base import Transform, TransformStep
from engram.transforms.env_specs import EnvSpecs


class TorchRLTransform(PartlyCopied, Transform, built_in=True):
    """Adapts a TorchRL transform, or a user's subclass of one, to an environment.

    Its `parent` is the environment before it, in TorchRL's form. Rewards that it adds are rewards of the
    environment. Other attributes are those of the wrapped transform.
    """

    _copied_as: ClassVar[Mapping[str, Any]] = {
        "_env": None,  # its class is created in this process
        "transform": Computed(lambda adapter: adapter.transform.clone()),
    }

    def __init__(self, transform: Any, root: Any) -> None:
        self.transform = transform
        for part in _parts(transform):
            if "_post_step_mdp_hooks" in overrides(type(part), root):
                raise TypeError(
                    f"{type(part).__name__} changes how one step becomes the next, which environments of engram do not "
                    f"let it: {_INSTEAD.get(type(part).__name__, _ELSEWHERE)}"
                )
        self._before: EnvSpecs | None = None  # the specs of the environment before it, and with it
        self._after: EnvSpecs | None = None
        self._env: Any = None  # the environment with it, as TorchRL sees it
        self._masks = any(isinstance(part, sys.modules["torchrl.envs"].ActionMask) for part in _parts(transform))

    def policy_entries(self) -> list[Key]:
        return primed_keys(self.transform)

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        if self._after is None or self._before != specs:
            self._connect(specs)
            changed = self._specs_of(self._env, specs)
            self._check_action(changed, specs)
            self._before, self._after = specs, changed
        return self._after

    def _connect(self, specs: EnvSpecs) -> None:
        """Gives the transform its parent."""
        if self.transform.container is not None:
            self.transform.reset_parent()
            self.transform.set_container(None)
        self._env = sys.modules["torchrl.envs"].TransformedEnv(_parent_class()(self.parent, specs), self.transform)

    def _connected(self) -> EnvSpecs:
        """The specs with the transform, whose parent is restored after a copy or unpickling."""
        assert self._before is not None and self._after is not None
        if self._env is None:
            self._connect(self._before)
        return self._after

    def _check_action(self, outer: EnvSpecs, inner: EnvSpecs) -> None:
        """Raises TypeError if the inverse does not turn an action of `outer` into one of `inner`."""
        state = outer.blank(stepped=False).set("action", outer.action.rand())
        try:
            action = self.transform.inv(state).get("action")
            fits = action.shape == inner.action.shape and action.dtype == inner.action.dtype
        except Exception as error:
            raise TypeError(f"{self._no_action} ({error!r:.200})") from error
        if not fits:
            raise TypeError(self._no_action)

    @property
    def _no_action(self) -> str:
        return (
            f"{self.kind} does not turn actions of the environment into such actions; append a transform for replay "
            "buffers to the buffer"
        )

    def _specs_of(self, env: Any, before: EnvSpecs) -> EnvSpecs:
        """The specs of a TorchRL environment. Raises TypeError, with the names, for unsupported entries."""
        parent = self.parent
        rewards, actions, flags = (
            spec_from_torchrl(spec) for spec in (env.full_reward_spec, env.full_action_spec, env.full_done_spec)
        )
        for what, spec, given, may_add in (
            ("rewards", rewards, parent.full_reward_spec, True),
            ("flags", flags, parent.full_done_spec, False),
            ("actions", actions, parent.full_action_spec, False),
        ):
            found, allowed = spec.leaves().keys(), given.leaves().keys()
            if not (found >= allowed if may_add else found == allowed):
                raise TypeError(
                    f"{self.kind} makes the {what} {sorted(map(str, found))} of an environment, where these are "
                    f"{sorted(map(str, allowed))}: use a transform of engram.envs, or append it to the replay buffer"
                )
        return before._replace(
            observation=spec_from_torchrl(env.observation_spec),
            action=actions["action"] if set(actions.keys()) == {"action"} else before.action,
            rewards=rewards,
            done=flags["done"],
        )

    # ---- steps ----
    def env_steps(self) -> list[TransformStep]:
        return [TransformStep(self, self._reset, self._step, self._inv_call, returns_own_tensors=False)]

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        specs, mask = self._connected(), td.get("_reset", None)
        if mask is not None:  # the other rows are not read
            td = specs.blank(stepped=False).set("_reset", mask)
        changed: TensorDictBase = self.transform._reset(self.transform._reset_env_preprocess(td), fresh)
        self._take_masks()
        return changed.exclude("_reset")

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        self._connected()
        changed: TensorDictBase = self.transform._step(td, following)
        self._take_masks()
        return changed

    def _take_masks(self) -> None:
        """Copies the mask that the transform set in its environment's action spec to ours (`ActionMask`)."""
        if not self._masks:
            return
        assert self._after is not None
        action: Any = self._after.action
        mask = self._env.action_spec.mask
        if mask is not None:
            action.update_mask(mask)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        self._connected()
        inner: TensorDictBase = self.transform.inv(td)
        return inner

    def to(self, *place: Any, **settings: Any) -> Any:
        self.transform.to(*place, **settings)
        return self

    @property
    def kind(self) -> str:
        return type(self.transform).__name__

    def forward(self, batch: Any) -> Any:
        return self.transform(batch)

    def inv(self, tensordict: Any) -> Any:
        return self.transform.inv(tensordict)

    def __repr__(self) -> str:
        return repr(self.transform)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "transform":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.transform, name)


_ELSEWHERE = "append it to the replay buffer, or use an environment of TorchRL's"
#: By the name of a transform: what to use in its place.
_INSTEAD = {
    "NextObservationDelta": "leave it out, and give the buffer LazyTensorStorage(n, compact=True), which stores each "
    "observation once, byte for byte"
}


def primed_keys(transform: Any) -> list[Key]:
    """The entries that a transform's primers add at resets."""
    specs = [part.primers for part in _parts(transform) if hasattr(part, "primers")]
    return [key for spec in specs for key in spec_from_torchrl(spec).leaves()]


def _parts(transform: Any) -> list[Any]:
    """The transforms in a TorchRL Compose; the transform itself if it is a single one."""
    if not hasattr(transform, "transforms"):
        return [transform]
    return [part for inner in transform.transforms for part in _parts(inner)]


@lru_cache(maxsize=1)
def _parent_class() -> Any:
    """The class of the `parent` of TorchRL transforms: an engram environment in TorchRL's form."""
    theirs: Any = sys.modules["torchrl.envs"]

    class Parent(theirs.EnvBase):  # type: ignore[misc]
        def __init__(self, env: Any, specs: EnvSpecs) -> None:
            super().__init__(device=env.device, batch_size=env.batch_size)
            self.engram_env = env
            self.observation_spec = specs.observation.to_torchrl()
            self.full_action_spec = env.full_action_spec.to_torchrl()
            self.full_reward_spec = env.full_reward_spec.to_torchrl()
            self.full_done_spec = env.full_done_spec.to_torchrl()

        def _reset(self, tensordict: Any = None, **_: Any) -> Any:
            td = None if tensordict is None or tensordict.get("_reset", None) is None else tensordict
            return self.engram_env.reset(td).exclude("_reset")

        def _step(self, tensordict: Any) -> Any:
            return self.engram_env.step(tensordict.exclude("next")).get("next")

        def _set_seed(self, seed: Any) -> None:
            self.engram_env.set_seed(seed)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                if name.startswith("_") or name == "engram_env":
                    raise
                try:
                    gym_env = self.engram_env.gym_env
                except AttributeError:
                    raise error from None
                return getattr(gym_env, name)  # as TorchRL's environments of gymnasium do

    return Parent
