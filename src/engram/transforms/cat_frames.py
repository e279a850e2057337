"""`CatFrames`: the last frames of each trajectory as one observation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram._advice import advised
from engram._providers import PROVIDERS
from engram.pytree import (
    Key,
    Keys,
    as_key,
    get_tensor,
    key_path,
    map_outermost,
    remove_entry,
    require_tensor,
    set_entry,
)
from engram.specs import Bounded, Spec
from engram.transforms.base import EnvTransformMixin, Transform, select_reset, to_device
from engram.transforms.env_specs import EnvSpecs, map_spec
from engram.transforms.trajectory import BatchView, TrajectoryBounds, TrajectoryTransform


@advised
class CatFrames(TrajectoryTransform, built_in=True):
    """Concatenates each observation with the N - 1 before it in its trajectory, oldest first.

    Args:
        N: frames.
        dim: the dimension along which they are concatenated, counted from the end.
        in_keys: observations, `["pixels"]` if None. The frames before `("next", "pixels")` are those of `"pixels"`, if
            the batch has that entry.
        out_keys: as Transform's.
        padding: the frames before a trajectory's first one: "same" (repeats it) or "constant".
        padding_value: the constant.
        done_key, traj_key: where trajectories end; see TrajectoryTransform.

    TorchRL's `reset_key="_reset"`, `as_inverse=False`, `future=False` and `mask_key=None` are accepted without effect.

    A batch that starts in the middle of a trajectory is padded as if it started there. Trajectories, and carrying on
    between writes: see TrajectoryTransform.

    Example:
        >>> done = torch.tensor([[False], [True], [False]])
        >>> batch = {"x": torch.tensor([[1.0], [2.0], [3.0]]), "next": {"done": done}}
        >>> CatFrames(2, dim=-1, in_keys=["x"])(batch)["x"]
        tensor([[1., 1.],
                [1., 2.],
                [3., 3.]])
    """

    ACCEPTED_PADDING = ("same", "constant")
    reset_key, mask_key, as_inverse, future = "_reset", None, False, False  #: as TorchRL names them
    _state_settings = ("in_keys", "out_keys", "done_key", "traj_key", "N", "dim")

    def __init__(
        self,
        N: int,
        dim: int,
        in_keys: Keys = None,
        out_keys: Keys = None,
        padding: str = "same",
        padding_value: float = 0.0,
        *,
        done_key: Key | None = None,
        traj_key: Key | None = None,
    ) -> None:
        super().__init__("pixels" if in_keys is None else in_keys, out_keys, done_key=done_key, traj_key=traj_key)
        if N < 1:
            raise ValueError(f"N must be 1 or more, got {N}")
        if dim >= 0:
            raise ValueError(f"dim must be negative, as batches may have any number of leading dimensions, got {dim}")
        if padding not in self.ACCEPTED_PADDING:
            raise ValueError(f"padding must be 'same' or 'constant', got {padding!r}")
        self.N, self.dim = N, dim
        self.padding, self.padding_value = padding, padding_value

    def make_rb_transform_and_sampler(self, batch_size: int, **sampler_kwargs: Any) -> tuple[Transform, Any]:
        """The transform and the sampler of a buffer that stores single frames and stacks them when it is sampled.

        A batch has `batch_size` rows, each a step with the frames before it, as this transform gives them in an
        environment, padding included; also under `next`, where the stored steps have `("next", in_key)`.

        Args:
            batch_size: the batch size of the buffer.
            sampler_kwargs: of SliceSampler, above all `traj_key` or `end_key`.

        Raises:
            TypeError: `slice_len` or `num_slices`, which are N and `batch_size`.

        Example:
            >>> frames = CatFrames(N=4, dim=-3, in_keys=["pixels"])
            >>> transform, sampler = frames.make_rb_transform_and_sampler(batch_size=32, traj_key="episode")
            >>> sampler.slice_len
            4
        """
        if fixed := {"slice_len", "num_slices"} & sampler_kwargs.keys():
            raise TypeError(f"slices have N={self.N} frames, and there is one for each row: leave out {sorted(fixed)}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
        key = as_key(sampler_kwargs.pop("slice_key", None) or _SLICE)
        sampler = PROVIDERS["frame_stack_sampler"]()(slice_len=self.N, slice_key=key, **sampler_kwargs)
        return StackedFrames(self, key), sampler

    def unfolding(self, tensordict: Any) -> Any:
        """`forward`: a batch `[*, T]` with its observations stacked."""
        return self.forward(tensordict)

    # ---- environments ----
    _history: dict[Key, list[Tensor]]  #: the last N frames, oldest first

    def _env_state(self, specs: EnvSpecs) -> dict[str, Any]:
        return {"_history": {}}

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        for source, _ in self._env_pairs:
            spec = specs.entry(source)
            if spec is not None:
                self._check_dims(source, spec.ndim - specs.observation.ndim)
        return EnvTransformMixin.transform_specs(self, specs)

    def _mapped(self, spec: Any) -> Spec:
        def repeated(value: Tensor) -> Tensor:
            return torch.cat([value] * self.N, self.dim)

        whole = map_spec(spec, repeated, keeps_order=True)
        if self.padding == "same" or not isinstance(whole, Bounded):
            return whole
        pad = torch.as_tensor(self.padding_value, dtype=whole.dtype, device=whole.device)
        low, high = torch.minimum(whole.low, pad), torch.maximum(whole.high, pad)
        return Bounded(low, high, whole.shape, whole.device, whole.dtype)

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        for source, target in self._env_pairs:
            frame = fresh.get(source)
            old = self._history.get(source, [None] * self.N)
            self._history[source] = [
                select_reset(td, *pair) for pair in zip(self._first_frames(frame), old, strict=True)
            ]
            self._set_frames(fresh, source, target)
        return fresh

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        for source, target in self._env_pairs:
            frame = following.get(source)
            history = self._history.get(source)
            moved = None if history is None else [*(to_device(old, frame.device) for old in history[1:]), frame]
            self._history[source] = self._first_frames(frame) if moved is None else moved
            self._set_frames(following, source, target)
        return following

    def _first_frames(self, frame: Tensor) -> list[Tensor]:
        constant = torch.as_tensor(self.padding_value, dtype=frame.dtype, device=frame.device)
        pad = frame if self.padding == "same" else constant.expand_as(frame)
        return [pad] * (self.N - 1) + [frame]

    def _set_frames(self, td: TensorDictBase, source: Key, target: Key) -> None:
        history = self._history[source]
        td.set(target, torch.cat(history, self.dim))
        if target != source:
            history[-1] = history[-1].clone()  # the caller holds the same tensor, and may write into it

    def _run(self, batch: Any, trajectories: TrajectoryBounds, continues: Tensor, before: Any) -> Any:
        # Reads all entries before setting any, as an out_key may be among in_keys.
        results, left = [], {}
        for source, target in self._pairs(batch):
            root = _root_of(batch, source)
            frames = self._frames(batch, root, trajectories)
            past = _Past.of(before, root, frames, continues, trajectories, self.N)
            now = None if root == source else self._frames(batch, source, trajectories)
            results.append((target, trajectories.view.join(self._concatenated(past, now))))
            left[root] = past.tail(self.N - 1)
        for target, value in results:
            set_entry(batch, target, value)
        return left

    def _frames(self, batch: Any, key: Key, trajectories: TrajectoryBounds) -> Tensor:
        frames = trajectories.view.split(require_tensor(batch, key, "CatFrames"), key)
        self._check_dims(key, frames.ndim - 2)
        return frames

    def _check_dims(self, key: Key, dims: int) -> None:
        if dims < -self.dim:
            raise ValueError(
                f"dim={self.dim} needs frames of {-self.dim} dimensions or more; {key!r} has {dims} beside the batch's"
            )

    def _concatenated(self, past: _Past, now: Tensor | None) -> Tensor:
        """[S, T, ...]: the last N frames at each step; the newest is that of `now` if given."""
        rows = torch.arange(past.frames.shape[0], device=past.frames.device).unsqueeze(1)
        at = torch.arange(past.frames.shape[1], device=past.frames.device)[past.length :]
        ages = range(self.N - 1, -1, -1) if now is None else range(self.N - 2, -1, -1)
        columns = []
        for age in ages:
            place = torch.maximum(at - age, past.first)
            frame = past.frames[rows, place]
            if self.padding == "constant":
                exists = (at - age >= past.first).reshape(*place.shape, *[1] * (frame.ndim - 2))
                frame = torch.where(exists, frame, torch.as_tensor(self.padding_value, dtype=frame.dtype))
            columns.append(frame)
        return torch.cat(columns if now is None else [*columns, now], self.dim)

    def _settings(self) -> dict[str, Any]:
        return {"N": self.N, "dim": self.dim, "padding": self.padding, **super()._settings()}


_SLICE = "_slice"  # the entry with the number of each row's slice


class StackedFrames(Transform, built_in=True):
    """Reduces each slice to one row: its last step, with all frames stacked. See `CatFrames`."""

    def __init__(self, frames: CatFrames, slice_key: Key) -> None:
        super().__init__()
        self.frames, self.slice_key = frames, slice_key

    def for_env(self, specs: EnvSpecs) -> Any:
        raise TypeError("this transform is for a replay buffer with the sampler that was made with it; use CatFrames")

    def forward(self, batch: Any) -> Any:
        ids = get_tensor(batch, self.slice_key)
        if ids is None:  # `rb[:]` and `rb[i]`: single frames
            return batch
        ends = torch.ones_like(ids, dtype=torch.bool)
        ends[:-1] = ids[1:] != ids[:-1]
        ends = ends.unsqueeze(0)
        bounds = TrajectoryBounds(BatchView(tuple(ids.shape)), ends, None, torch.zeros_like(ends), ends)
        self._with_next(batch)._run(batch, bounds, torch.zeros(1, dtype=torch.bool), None)
        remove_entry(batch, self.slice_key)
        last = ends.flatten().nonzero().flatten()
        return map_outermost(batch, lambda leaf: leaf[last], lambda td: td[last])

    def _with_next(self, batch: Any) -> CatFrames:
        """The transform for the observations, and for those under `next` that exist."""
        both = copy.copy(self.frames)
        pairs = dict(zip(both.in_keys, both.out_keys, strict=True))
        for source, target in list(pairs.items()):
            following: Key = ("next", *key_path(source))
            if key_path(source)[0] != "next" and get_tensor(batch, following) is not None:
                pairs.setdefault(following, ("next", *key_path(target)))
        both.in_keys, both.out_keys = list(pairs), list(pairs.values())
        return both

    def _settings(self) -> dict[str, Any]:
        return {"frames": self.frames}


class _Past:
    """The frames of a batch, preceded by the last frames of the batch before."""

    def __init__(self, frames: Tensor, length: int, first: Tensor, last_first: Tensor) -> None:
        self.frames = frames  # [S, length + T, ...]
        self.length = length  # the number of frames of the batch before
        self.first = first  # int64 [S, T]: where in `frames` each step's trajectory starts
        self._last_first = last_first  # int64 [S]: where in `frames` the trajectory of the last step starts

    @classmethod
    def of(
        cls, before: Any, root: Key, frames: Tensor, continues: Tensor, trajectories: TrajectoryBounds, n: int
    ) -> _Past:
        first = trajectories.first()
        if before is None or root not in before:
            return cls(frames, 0, first, first[:, -1])
        earlier, last_first = (t.to(frames.device) for t in before[root])
        length = earlier.shape[1]
        start = torch.where((first == 0) & continues.unsqueeze(1), last_first.unsqueeze(1), first + length)
        return cls(torch.cat([earlier.to(frames.dtype), frames], 1), length, start, start[:, -1])

    def tail(self, n: int) -> tuple[Tensor, Tensor]:
        """The last n frames, and where among them the trajectory of the last step starts."""
        start = max(0, self.frames.shape[1] - n)
        return self.frames[:, start:].clone(), (self._last_first - start).clamp_min(0)


def _root_of(batch: Any, key: Key) -> Key:
    """The entry that has the frames before those of `key`: for `("next", "pixels")` it is `"pixels"`."""
    if isinstance(key, tuple) and key[0] == "next":
        root = key[1] if len(key) == 2 else key[1:]
        if get_tensor(batch, root) is not None:
            return root
    return key
