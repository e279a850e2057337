"""`CatFrames`: the last frames of each trajectory as one observation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

import engram._native as _native
from engram import _forms as forms
from engram._advice import advised
from engram._checks import count, is_integer
from engram._providers import PROVIDERS
from engram.pytree import (
    Key,
    Keys,
    as_key,
    get_tensor,
    key_path,
    remove_entry,
    require_tensor,
    set_entry,
    take_rows,
    to_tensor,
)
from engram.specs import Bounded, Spec
from engram.transforms.base import EnvTransformMixin, FrameStacks, Transform, select_reset, to_device
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
    between writes: see TrajectoryTransform. `N` of an environment's transform may change between two batches of a
    collector; a subclass makes stacks at each step, so that `collector.reset()` must follow.

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
        N = count(N, "N")
        if not is_integer(dim) or dim >= 0:
            raise ValueError(f"dim must be negative, as batches may have any number of leading dimensions, got {dim!r}")
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
    _history: dict[Key, list[Tensor]]  #: by out_key: the last N frames, oldest first

    def _env_state(self, specs: EnvSpecs) -> dict[str, Any]:
        return {"_history": {}}

    def frame_stacks(self) -> FrameStacks | None:
        padding = None if self.padding == "same" else self.padding_value
        return FrameStacks(tuple(self._env_pairs), self.N, self.dim, padding) if type(self) is CatFrames else None

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        for source, _ in self._env_pairs:
            spec = specs.entry(source)
            if spec is not None:
                _check_dims(source, spec.ndim - specs.observation.ndim, self.dim)
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
            old: Sequence[Tensor | None] = self._last_frames(target) or [None] * self.N
            self._history[target] = [
                select_reset(td, *pair) for pair in zip(self._first_frames(frame), old, strict=True)
            ]
            self._set_frames(fresh, source, target)
        return fresh

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        for source, target in self._env_pairs:
            frame = following.get(source)
            history = self._last_frames(target)
            moved = None if history is None else [*(to_device(old, frame.device) for old in history[1:]), frame]
            self._history[target] = self._first_frames(frame) if moved is None else moved
            self._set_frames(following, source, target)
        return following

    def _last_frames(self, target: Key) -> list[Tensor] | None:
        """The last N frames; the oldest one again for those of which N did not count when they came."""
        history = self._history.get(target)
        return history and [*history[:1] * (self.N - len(history)), *history[-self.N :]]

    def _first_frames(self, frame: Tensor) -> list[Tensor]:
        constant = torch.as_tensor(self.padding_value, dtype=frame.dtype, device=frame.device)
        pad = frame if self.padding == "same" else constant.expand_as(frame)
        return [pad] * (self.N - 1) + [frame]

    def _set_frames(self, td: TensorDictBase, source: Key, target: Key) -> None:
        history = self._history[target]
        td.set(target, torch.cat(history, self.dim))
        if target != source:
            history[-1] = history[-1].clone()  # the caller holds the same tensor, and may write into it

    def _run(self, batch: Any, trajectories: TrajectoryBounds, continues: Tensor, before: Any) -> Any:
        # Reads all entries before setting any, as an out_key may be among in_keys.
        results: list[tuple[Key, Tensor]] = []
        pasts: dict[Key, _Past] = {}
        view = trajectories.view
        for source, target in self._pairs(batch):
            root = _root_of(batch, source)
            if root not in pasts:
                frames = self._frames(batch, root, view)
                pasts[root] = _Past.of(before, root, frames, continues, trajectories)
            newest = None if root == source else self._frames(batch, source, view).flatten(0, 1)
            stacks = _stack_frames(self, *pasts[root].steps(), newest)
            results.append((target, stacks.reshape((*view.shape, *stacks.shape[1:]))))
        for target, value in results:
            set_entry(batch, target, value)
        return {root: past.tail(self.N - 1) for root, past in pasts.items()}

    def _value_form(self) -> forms.Form:
        return _frames_by_key

    def _frames(self, batch: Any, key: Key, view: BatchView) -> Tensor:
        frames = view.split(require_tensor(batch, key, "CatFrames"), key)
        _check_dims(key, frames.ndim - 2, self.dim)
        return frames

    def _settings(self) -> dict[str, Any]:
        return {"N": self.N, "dim": self.dim, "padding": self.padding, **super()._settings()}


def _frames_by_key(value: Any) -> None:
    """The form of the last frames of each entry."""
    if not isinstance(value, dict):
        raise forms.WrongFormError(value, "a dict from keys")
    for name, frames in value.items():
        forms.key(name)
        forms.fields(forms.tensor(), forms.tensor(torch.int64, ndim=1))(frames)
        if frames[0].ndim < 2 or not bool(((frames[1] >= 0) & (frames[1] <= frames[0].shape[1])).all()):
            raise ValueError(f"the last frames of {name!r} are {list(frames[0].shape)}, and begin at {frames[1]}")


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
        last, first = _native.slice_bounds(ids.cpu().contiguous())
        last, first = last.to(ids.device), first.to(ids.device)
        stacks = []
        for source, target in self._pairs_of(batch):
            root = _root_of(batch, source)
            newest = None if root == source else self._frames(batch, source, len(ids))
            frames = self._frames(batch, root, len(ids))
            stacks.append((target, _stack_frames(self.frames, frames, last, first, newest, last)))
        remove_entry(batch, self.slice_key)
        batch = take_rows(batch, last)
        for target, value in stacks:
            set_entry(batch, target, value)
        return batch

    def _frames(self, batch: Any, key: Key, n: int) -> Tensor:
        leaf = require_tensor(batch, key, "CatFrames")
        frames = leaf if leaf.ndim and len(leaf) == n else BatchView((n,)).split(leaf, key)  # refuses it
        _check_dims(key, frames.ndim - 1, self.frames.dim)
        return frames

    def _pairs_of(self, batch: Any) -> list[tuple[Key, Key]]:
        """The entries to stack, and where: observations, and those under `next` that exist."""
        pairs = dict(zip(self.frames.in_keys, self.frames.out_keys, strict=True))
        for source, target in list(pairs.items()):
            following: Key = ("next", *key_path(source))
            if key_path(source)[0] != "next" and get_tensor(batch, following) is not None:
                pairs.setdefault(following, ("next", *key_path(target)))
        return list(pairs.items())

    def _settings(self) -> dict[str, Any]:
        return {"frames": self.frames}


class _Past:
    """The frames of a batch, preceded by the last frames of the batch before."""

    def __init__(self, frames: Tensor, length: int, first: Tensor, last_first: Tensor) -> None:
        self._frames = frames  # [S, length + T, ...]
        self._length = length  # the number of frames of the batch before
        self._first = first  # int64 [S, T]: where in `frames` each step's trajectory starts
        self._last_first = last_first  # int64 [S]: where in `frames` the trajectory of the last step starts

    @classmethod
    def of(cls, before: Any, root: Key, frames: Tensor, continues: Tensor, trajectories: TrajectoryBounds) -> _Past:
        first = trajectories.first()
        if before is None or root not in before:
            return cls(frames, 0, first, first[:, -1])
        earlier, last_first = (t.to(frames.device) for t in before[root])
        length = earlier.shape[1]
        start = torch.where((first == 0) & continues.unsqueeze(1), last_first.unsqueeze(1), first + length)
        return cls(torch.cat([earlier.to(frames.dtype), frames], 1), length, start, start[:, -1])

    def steps(self) -> tuple[Tensor, Tensor, Tensor]:
        """All frames, `[M, ...]`; int64 [S * T]: the last one of each step, and the first one of its trajectory."""
        environments, frames = self._frames.shape[:2]
        begins = torch.arange(environments, device=self._first.device).unsqueeze(1) * frames
        at = begins + torch.arange(self._length, frames, device=self._first.device)
        return self._frames.flatten(0, 1), at.flatten(), (begins + self._first).flatten()

    def tail(self, n: int) -> tuple[Tensor, Tensor]:
        """The last n frames, and where among them the trajectory of the last step starts."""
        start = max(0, self._frames.shape[1] - n)
        return self._frames[:, start:].clone(), (self._last_first - start).clamp_min(0)


def _root_of(batch: Any, key: Key) -> Key:
    """The entry that has the frames before those of `key`: for `("next", "pixels")` it is `"pixels"`."""
    if isinstance(key, tuple) and key[0] == "next":
        root = key[1] if len(key) == 2 else key[1:]
        if get_tensor(batch, root) is not None:
            return root
    return key


def _check_dims(key: Key, dims: int, dim: int) -> None:
    if dims < -dim:
        raise ValueError(f"dim={dim} needs frames of {-dim} dimensions or more; {key!r} has {dims} beside the batch's")


def _stack_frames(
    form: CatFrames, frames: Tensor, at: Tensor, first: Tensor, newest: Tensor | None, rows: Tensor | None = None
) -> Tensor:
    """[R, ...]: the last N frames at each of R steps.

    Args:
        form: how they are stacked.
        frames: [M, ...]; at: int64 [R]: the last frame of each step; first: int64 [R]: the first of its trajectory.
        newest: [L, ...]: frames that come behind those; rows: int64 [R]: which of them, None: all, L = R.
    """
    constant = None
    if form.padding == "constant":
        constant = to_tensor(form.padding_value, dtype=frames.dtype)
    if not (frames.requires_grad or (newest is not None and newest.requires_grad)):
        behind = None if newest is None else newest.contiguous()
        stacks = _native.stack_frames(frames.contiguous(), at, first, form.N, form.dim, behind, rows, constant)
        if stacks is not None:
            return stacks
    columns = []
    for age in range(form.N - 1 - (newest is not None), -1, -1):
        frame = frames[torch.maximum(at - age, first)]
        if constant is not None:
            exists = (at - age >= first).reshape(-1, *[1] * (frame.ndim - 1))
            frame = torch.where(exists, frame, constant)
        columns.append(frame)
    if newest is not None:
        columns.append(newest if rows is None else newest[rows])
    return torch.cat(columns, form.dim)
