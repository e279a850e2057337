"""Which observations a storage keeps once: as a user says it, or as the first batch shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engram import pytree
from engram._system import human_bytes
from engram.errors import StorageError
from engram.pytree import Key, KeyPath
from engram.store.layout import LeafSpec, ObservationKeys, RowLayout
from engram.store.steps import Steps

#: Entries that are no observations: readers of trajectories look at them in the rows.
NO_OBSERVATIONS = frozenset(
    {"done", "terminated", "truncated", "is_init", "reward", "traj_ids", "episode", "index", "collector"}
)
NO_REPLACING = (
    "observations are stored once here (compact=), and several rows share a frame: a row cannot take the place of "
    "another one out of turn, as TensorDictMaxValueWriter writes. Make the storage without compact= for it"
)
_MOST_FRAMES = 15
_MOST_APART = 1024  # a row and the one whose observation is its next one, as given
_MOST_STEPS = 16  # between a row and the one whose observation is its next one, as looked for
_SELDOM = 0.5  # as the share of next observations that are those of a later row
#: Where n-step rows say how many steps after them their next observation comes (`MultiStepTransform`).
STEPS_TO_NEXT = "steps_to_next_obs"
#: Rows of no more bytes, and storages that would save no more of them, are as well off plain.
ROW_WORTH_IT, SAVING_WORTH_IT = 4096, 64 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 8  # a key found by itself takes at least this part of the bytes of the largest one


@dataclasses.dataclass(frozen=True)
class Compact:
    """Says which observations a storage keeps once, for `compact=`.

    Of a key X the rows hold neither X nor `("next", X)`: each frame is stored once, and what is not the frame of
    another row besides. Rows come back byte for byte, whatever the environment does: a wrong setting costs bytes.
    In flat rows, where no key is under `"next"`, `"next_X"` follows X.

    Args:
        keys: of the observations; None: all that the first batch has at its root and, with the same shape and dtype,
            under `"next"`, or as `"next_..."`, but for small ones beside large ones, rewards, flags and ids.
        frames: how many frames, along the first dimension, each observation is a stack of: a number for each key, or
            one for all. None: as many as the first batch shows.
        n_steps: how many rows behind a row the observation comes that is its next one: the n of n-step rows. None:
            that of the buffer's MultiStepTransform, or as the first batch shows; mostly 1.

    Raises:
        TypeError, ValueError: a setting that is not allowed.

    Example:
        >>> storage = LazyTensorStorage(1000, compact=Compact("pixels", frames=4))
        >>> pixels = torch.randint(0, 255, (24, 84, 84), dtype=torch.uint8).unfold(0, 4, 1).movedim(-1, 1)
        >>> steps = TensorDict({"pixels": pixels[:-1], "next": {"pixels": pixels[1:]}}, [20])
        >>> _ = ReplayBuffer(storage=storage).extend(steps)
        >>> (storage.get(range(20)) == steps).all(), storage.nbytes < 1000 * 2 * 4 * 84 * 84 / 6
        (True, True)
        >>> flat = LazyTensorStorage(1000, compact="obs")
        >>> _ = ReplayBuffer(storage=flat).extend({"obs": pixels[:-1], "next_obs": pixels[1:]})
        >>> torch.equal(flat.get(range(20))["next_obs"], pixels[1:]), flat.compact
        (True, Compact(keys=['obs'], frames={'obs': 4}, n_steps=1))
    """

    keys: Key | Sequence[Key] | None = None
    frames: int | Mapping[Key, int] | None = None
    n_steps: int | None = None

    def __post_init__(self) -> None:
        paths = self.paths
        if paths is not None and (not paths or len(set(paths)) < len(paths)):
            raise ValueError(f"keys of a Compact are one or more, each of them once; got {self.keys!r}")
        for path in paths or ():
            _refuse_other_entries(path)
        for n in self._given_frames.values():
            _check_number("frames", n, _MOST_FRAMES)
        if self.n_steps is not None:
            _check_number("n_steps", self.n_steps, _MOST_APART)
        if paths is not None and isinstance(self.frames, Mapping):
            others = [key for key in self.frames if pytree.as_path(key, "frames") not in paths]
            if others:
                raise ValueError(f"frames are given for {others[0]!r}, which is none of the keys {self.keys!r}")

    @property
    def paths(self) -> tuple[KeyPath, ...] | None:
        """The paths of the keys; None: they are found in the first batch."""
        if self.keys is None:
            return None
        keys: Sequence[Any] = [self.keys] if isinstance(self.keys, str | tuple) else self.keys
        return tuple(pytree.as_path(key, "keys") for key in keys)

    @property
    def _given_frames(self) -> dict[KeyPath | None, int]:
        """Frames of each key that are given; under None those of all."""
        if self.frames is None:
            return {}
        if isinstance(self.frames, Mapping):
            return {pytree.as_path(key, "frames"): n for key, n in self.frames.items()}
        return {None: self.frames}

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON, which `as_compact` takes."""
        paths = self.paths
        frames = [[None if path is None else list(path), n] for path, n in self._given_frames.items()]
        keys = None if paths is None else [list(path) for path in paths]
        return {"keys": keys, "frames": frames, "n_steps": self.n_steps}

    @classmethod
    def of(cls, found: ObservationKeys) -> Compact:
        """The settings that say what was found."""
        frames: dict[Key, int] = {pytree.as_key(path): n for path, n in found.frames.items()}
        return cls(list(frames), frames, found.n_steps)

    def check(self, layout: RowLayout, device: torch.device) -> None:
        """Refuses rows of which nothing can be stored once.

        Raises:
            ValueError: rows are not in memory of the CPU.
            StorageError: rows carry sequences, for a writer that replaces them out of turn.
        """
        if device.type != "cpu":
            raise ValueError(f"compact= stores observations once in memory of the CPU, not on {device}")
        if layout.carries_sequence:
            raise StorageError(NO_REPLACING)

    def find(self, layout: RowLayout, steps: FirstSteps | KnownSteps) -> ObservationKeys | None:
        """The keys in rows of a layout, of which these are the first ones; None: there is none.

        Raises:
            ValueError: a key that was given is not there, or is not the same after the step.
        """
        paths = _pairs(layout) if self.paths is None else self.paths
        if not paths:
            return None
        leaves = {leaf.path: leaf for leaf in layout.leaves}
        for path in paths:
            _check_pair(layout, leaves, path)
        pairs = [(path, layout.following[path]) for path in paths]
        frames = {path: self._frames_of(leaves[path], after, steps) for path, after in pairs}
        most = max(self._given_frames.values(), default=1)
        if most == 1:
            most = max(frames.values())
        if self.paths is None:  # records are of one number of frames: others stay in the rows
            frames = {path: n for path, n in frames.items() if n in (1, most)}
        elif len(others := {n for n in self._given_frames.values() if n > 1}) > 1:
            raise ValueError(
                f"stacks of {sorted(others)} frames were given: keys that are stored once together have as many "
                "frames each, or one. Leave some out of the keys"
            )
        else:  # a number that was only found, and does not fit, costs bytes
            frames = {path: n if n == most else 1 for path, n in frames.items()}
        n_steps = steps.n_steps(pairs) if self.n_steps is None else self.n_steps
        return ObservationKeys(frames, n_steps)

    def _frames_of(self, leaf: LeafSpec, after: KeyPath, steps: FirstSteps | KnownSteps) -> int:
        given = self._given_frames
        n = given.get(leaf.path, given.get(None))
        if n is None:
            return steps.frames(leaf, after)
        if n > 1 and (not leaf.shape or leaf.shape[0] % n):
            raise ValueError(
                f"{pytree.format_key(leaf.path)} has the shape {list(leaf.shape)}: {n} frames lie along the first "
                f"dimension, which {n} must divide; move the stack there, or give frames=1"
            )
        return n


def advice_to_share(found: ObservationKeys, steps: int, plain: int, once: int) -> str:
    """What a storage without `compact=` tells that would save much by it.

    Args:
        found: what it would store once.
        steps: that fit.
        plain, once: bytes of all of them, now and with `compact=True`.

    Example:
        >>> print(advice_to_share(ObservationKeys({("pixels",): 4}), 1_000_000, 56_485_000_000, 7_100_000_000))
        these rows hold each observation several times ('pixels': stacks of 4 frames): 56485 bytes a step. A storage
        with compact=True (in engram.compat a buffer with optimize_memory_usage=True) stores each once, 7100 bytes a
        step, 7.1 GB instead of 56.5 GB, and hands out the same rows; compact=False leaves all as it is, without this
        advice
    """
    stacks = [f"{pytree.as_key(path)!r}: stacks of {n} frames" for path, n in found.frames.items() if n > 1]
    named = "; ".join(stacks) or ", ".join(repr(pytree.as_key(path)) for path in found.frames)
    return (
        f"these rows hold each observation several times ({named}): {plain // steps} bytes a step. A storage with "
        "compact=True (in engram.compat a buffer with optimize_memory_usage=True) stores each once, "
        f"{once // steps} bytes a step, {human_bytes(once)} instead of {human_bytes(plain)}, and hands out the same "
        "rows; compact=False leaves all as it is, without this advice"
    )


def as_compact(given: Any) -> Compact | None:
    """The setting of a `compact=`: a bool, a list of keys, a `Compact`, or what its `to_json` gave.

    Example:
        >>> as_compact(False), as_compact(["pixels"])
        (None, Compact(keys=['pixels'], frames=None, n_steps=None))
    """
    if given is None or given is False:
        return None
    if given is True:
        return Compact()
    if isinstance(given, Compact):
        return given
    if isinstance(given, Mapping):
        paths, frames = given["keys"], [(None if path is None else tuple(path), n) for path, n in given["frames"]]
        keys = None if paths is None else [pytree.as_key(tuple(path)) for path in paths]
        by_key: Any = dict(frames)
        return Compact(keys, by_key.get(None) if None in by_key else by_key or None, given["n_steps"])
    if isinstance(given, str | tuple | list):
        return Compact(given)
    raise TypeError(f"compact is True, keys of observations, or a Compact(keys, frames=, n_steps=); got {given!r}")


NOTHING_TO_SHARE = (
    "compact= stores whole rows here: it looks for entries that steps have twice, of the same shape and dtype, as "
    "'obs' and ('next', 'obs'), or in flat steps 'obs' and 'next_obs', and the first steps have none"
)


class FirstSteps:
    """The first steps of a storage, in which frames and n_steps are found.

    Args:
        steps: they.
        horizon: that of n-step rows, where it is known; 1: it is found.
        most: how many of them are looked at.
    """

    def __init__(self, steps: Steps, horizon: int = 1, most: int = 256) -> None:
        self._given, self._most, self._horizon = steps, most, horizon

    def frames(self, leaf: LeafSpec, following: KeyPath) -> int:
        """As many as with which some next observation is its observation, moved along its first dimension.

        Where no observation differs from its next one, which tells nothing, as many as such a shape usually has.
        """
        size = leaf.shape[0] if len(leaf.shape) > 1 else 1
        x, after = (self._rows(path, len(leaf.shape)) for path in (leaf.path, following))
        if bool(_are_same(after, x).all()):
            return _usual_frames(leaf)
        most = min(size, _MOST_FRAMES)
        for shift in range(1, most):  # in n-step rows it has moved by several frames
            for n in range(most, shift, -1):
                if size % n == 0 and self._has_moved(x, after, shift * size // n):
                    return n
        return 1

    @staticmethod
    def _has_moved(x: Tensor, after: Tensor, by: int) -> bool:
        moved = _are_same(after[:, :-by], x[:, by:])
        return bool((moved & ~_are_same(after, x)).any())  # a picture that stands still tells nothing

    def n_steps(self, pairs: Sequence[tuple[KeyPath, KeyPath]]) -> int:
        """How far behind most steps the one comes whose observations are their next ones.

        As the transform that made them says, or n-step rows themselves, or the observations show it.
        """
        if self._horizon > 1:
            return min(self._horizon, _MOST_APART)
        said = pytree.get_tensor(self._given.items, STEPS_TO_NEXT)
        if said is not None and said.numel():
            return min(max(1, int(said.max())), _MOST_APART)
        n, share = self._agreement(pairs)
        return n if share > _SELDOM else 1

    def _agreement(self, observations: Sequence[tuple[KeyPath, KeyPath]]) -> tuple[int, float]:
        """How far behind most steps that one comes, and of how many of the steps that is so."""
        best, most = 1, 0.0
        if self._given.is_single:
            return best, most
        pairs = [(self._steps(path), self._steps(after)) for path, after in observations]
        for n in range(1, min(_MOST_STEPS, len(pairs[0][0]) - 1) + 1):
            same = [_are_same(after[:-n], x[n:]).to(torch.float32) for x, after in pairs]
            share = float(torch.stack(same).mean())
            if share > most:
                best, most = n, share
        return best, most

    def shared(self, layout: RowLayout) -> ObservationKeys | None:
        """What `Compact()` would store once of rows that do share observations, as these steps show; None: nothing."""
        found = Compact().find(layout, self)
        if found is None:
            return None
        pairs = list(layout.following_of(found).items())
        is_shared = max(found.frames.values()) > 1 or self._agreement(pairs)[1] > _SELDOM
        return found if is_shared else None

    def _steps(self, path: KeyPath) -> Tensor:
        """The first ones of an entry: [time, ...]."""
        value = pytree.as_tensor(pytree.get_entry(self._given.items, path), path)
        return value.movedim(self._given.time, 0)[: self._most]

    def _rows(self, path: KeyPath, dims: int) -> Tensor:
        """The first ones of an entry, of all environments: [n, *shape]."""
        value = pytree.as_tensor(pytree.get_entry(self._given.items, path), path)
        return value.reshape(-1, *value.shape[value.ndim - dims :])[: self._most]


class KnownSteps:
    """Steps of which none is seen: saved ones, whose storage had found frames and n_steps, or such as will come.

    Args:
        observations: as far as they are known.
    """

    def __init__(self, observations: ObservationKeys) -> None:
        self._observations = observations

    def frames(self, leaf: LeafSpec, following: KeyPath) -> int:
        """As many as are known; of another key as many as its shape says."""
        return self._observations.frames.get(leaf.path) or _usual_frames(leaf)

    def n_steps(self, pairs: Sequence[tuple[KeyPath, KeyPath]]) -> int:
        """As known."""
        return self._observations.n_steps


def _are_same(a: Tensor, b: Tensor) -> Tensor:
    """Of each of n rows whether all bytes are the same: bool [n]."""
    n = len(a)
    if a.numel() == 0:
        return torch.ones(n, dtype=torch.bool, device="cpu")
    left, right = (_as_integers(t).numpy() for t in (a, b))
    return torch.from_numpy((left == right).reshape(n, -1).all(1))  # by NumPy: no threads of torch to wait for


def _as_integers(values: Tensor) -> Tensor:
    """The same bytes, of which equal ones are equal: of floats NaN is not, and two zeros are."""
    integers = _INTEGERS.get(values.element_size())
    return values.contiguous().view(torch.uint8) if integers is None else values.view(integers)


def _usual_frames(leaf: LeafSpec) -> int:
    """The frames of an observation of which only the shape is known: those of pictures come first."""
    return leaf.shape[0] if len(leaf.shape) > 2 and leaf.shape[0] <= _MOST_FRAMES else 1


def _pairs(layout: RowLayout) -> tuple[KeyPath, ...]:
    """The observations of rows that are worth it, in the order of the rows."""
    leaves = {leaf.path: leaf for leaf in layout.leaves}
    pairs = []
    for path, leaf in leaves.items():
        if path not in layout.following or NO_OBSERVATIONS.intersection(path) or leaf.dtype == torch.bool:
            continue
        after = leaves[layout.following[path]]
        if leaf.nbytes and (leaf.shape, leaf.dtype) == (after.shape, after.dtype):
            pairs.append(leaf)
    largest = max((leaf.nbytes for leaf in pairs), default=0)
    return tuple(leaf.path for leaf in pairs if leaf.nbytes * _PART >= largest)


def _check_pair(layout: RowLayout, leaves: dict[KeyPath, LeafSpec], path: KeyPath) -> None:
    following = layout.following.get(path)
    if following is None:
        before = next((x for x, after in layout.following.items() if after == path), None)
        if before is not None:
            raise _names_next(path, before)
        missing: KeyPath = path if path not in leaves else ("next", *path)
        raise ValueError(
            f"compact= names {pytree.format_key(path)}, but the steps have no {pytree.format_key(missing)}; an "
            "observation is stored once where the steps have it at the root and under 'next', or, where nothing is "
            "under 'next', as 'obs' and 'next_obs'"
        )
    leaf, after = leaves[path], leaves[following]
    if (leaf.shape, leaf.dtype) != (after.shape, after.dtype) or not leaf.nbytes:
        raise ValueError(
            f"{pytree.format_key(path)} is {leaf.dtype} {list(leaf.shape)}, {pytree.format_key(following)} "
            f"{after.dtype} {list(after.shape)}: only observations of one shape and dtype, of at least a byte, are "
            "stored once"
        )


def _refuse_other_entries(path: KeyPath) -> None:
    if path[:1] == ("next",):
        raise _names_next(path, path[1:])
    if NO_OBSERVATIONS.intersection(path):
        raise ValueError(
            f"compact= names {pytree.format_key(path)}: rewards, flags and ids are no observations, and are read where "
            "they lie in the rows; leave it out of the keys"
        )


def _names_next(path: KeyPath, before: KeyPath) -> ValueError:
    named = f"name {pytree.format_key(before)}, which it follows" if before else "name an observation"
    return ValueError(f"compact= names {pytree.format_key(path)}: {named}")


def _check_number(name: str, n: Any, most: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= most:
        raise ValueError(f"{name} must be 1 to {most}, got {n!r}")
