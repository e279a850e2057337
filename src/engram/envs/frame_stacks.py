"""Stacks of raw frames: what `CatFrames` shows of an environment, without a tensor for each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engram.envs.codecs import Array, ArrayCodec, SpaceLeaf
from engram.envs.engines import ArraySpace, GymEngine
from engram.pytree import Key, to_tensor
from engram.specs import Unbounded
from engram.transforms.base import FrameStacks


def can_stack(engine: GymEngine, stacks: FrameStacks) -> bool:
    """Whether the observations to stack are arrays that tensors hold as they are."""
    plain = {leaf.key for leaf in engine.leaves if leaf.codec.is_plain and 0 not in leaf.codec.raw_shape}
    for source, target in stacks.pairs:
        if source not in plain:
            return False
        plain.add(target)
    return True


class StackingEngine:
    """A gymnasium environment stepped with raw values, whose observations have stacks of the last frames.

    Its raw observations are arrays in the order of `leaves`, or one array. They are overwritten two calls later.
    """

    def __init__(self, engine: GymEngine, stacks: FrameStacks) -> None:
        self._step, self._reset, self._raw_leaves = engine.step, engine.reset, engine.leaves
        self._stacks: list[tuple[Key, Key, _Stack]] = []
        codecs = {leaf.key: leaf.codec for leaf in self._raw_leaves}
        for source, target in stacks.pairs:
            stack = _Stack(codecs[source], stacks)
            codecs[target] = stack.codec
            self._stacks.append((source, target, stack))
        self.action = engine.action
        self.leaves = [
            SpaceLeaf(key, (i,) if len(codecs) > 1 else (), codec) for i, (key, codec) in enumerate(codecs.items())
        ]

    def reset(self) -> Any:
        """The first raw observation of a new episode."""
        return self._shown(self._reset(), is_first=True)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """One step, as gymnasium's."""
        raw, reward, terminated, truncated, info = self._step(action)
        return self._shown(raw, is_first=False), reward, terminated, truncated, info

    def _shown(self, raw: Any, *, is_first: bool) -> Any:
        values = {leaf.key: leaf.value(raw) for leaf in self._raw_leaves}
        for source, target, stack in self._stacks:
            values[target] = stack.first(values[source]) if is_first else stack.following(values[source])
        shown = tuple(values.values())
        return shown if len(shown) > 1 else shown[0]


class _Stack:
    """The last n frames of an episode, in one of two arrays, which take turns."""

    def __init__(self, frame: ArrayCodec, stacks: FrameStacks) -> None:
        shape, axis = list(frame.raw_shape), len(frame.raw_shape) + stacks.dim
        size = shape[axis]
        shape[axis] = size * stacks.n
        before, last = (slice(None),) * axis, size * (stacks.n - 1)
        self._frames = [(*before, slice(at, at + size)) for at in range(0, last + 1, size)]
        self._kept, self._older, self._newest = (*before, slice(size, None)), (*before, slice(last)), self._frames[-1]
        self._now, self._before = (np.zeros(shape, frame.raw_dtype) for _ in range(2))
        spec = Unbounded(tuple(shape), dtype=torch.from_numpy(self._now).dtype)
        self.codec = ArrayCodec(spec, ArraySpace(frame.raw_dtype, tuple(shape)))
        self._padding: Array | None = None
        if stacks.padding is not None:
            self._padding = to_tensor(stacks.padding, dtype=spec.dtype).numpy()

    def first(self, frame: Array) -> Array:
        """The stack at the first frame of an episode."""
        for place in self._frames[:-1]:
            self._now[place] = frame if self._padding is None else self._padding
        self._now[self._newest] = frame
        return self._now

    def following(self, frame: Array) -> Array:
        """The stack at the frame that follows."""
        self._now, self._before = self._before, self._now
        self._now[self._older] = self._before[self._kept]
        self._now[self._newest] = frame
        return self._now
