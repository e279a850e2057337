"""Trajectories as the episodes of a Minari file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from engram.data.datasets.h5_files import NEEDED_BY, H5Rows
from engram.data.datasets.roles import Pair, Roles
from engram.data.datasets.sources import Block, Ints
from engram.data.datasets.spaces import space_of
from engram.data.replay_buffers import trees
from engram.data.replay_buffers.checkpointers.h5 import library
from engram.data.replay_buffers.layout import RowLayout

Array = npt.NDArray[Any]


class EpisodeWriter:
    """Writes blocks of trajectories to an open file, given as h5py's low-level id."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._h5 = library(NEEDED_BY)
        self._roles: Roles | None = None
        self.episodes = 0
        self._open: list[H5Rows] = []
        self._after: list[Array] = []  # what the last step of the block before was followed by

    def spaces(self) -> dict[str, Any]:
        """The widest spaces of what was written."""
        assert self._roles is not None
        found = {"observation_space": self._roles.observations, "action_space": self._roles.actions}
        leaf = self._roles.leaf
        return {role: space_of([(p.name, leaf(p.now)) for p in pairs]) for role, pairs in found.items()}

    def write(self, block: Block, advance: Callable[[int], None]) -> int:
        """Writes the parts of trajectories in a block; returns their steps.

        Raises:
            ValueError: the steps do not fit this format, or those before.
        """
        if self._roles is None:
            self._roles = Roles(RowLayout.of(block.rows, 1), "a Minari dataset", lone_infos="after")
        if block.parts is None:
            raise ValueError("the steps have neither done flags nor trajectory ids: where episodes end is not known")
        arrays = [t.numpy() for t in self._roles.layout.fitting(block.rows, 1)]
        self._check_chain(arrays, block.parts)
        stops = np.cumsum(block.parts[:, 0])
        ends = stops[block.parts[:, 1] + block.parts[:, 0] == block.parts[:, 2]] - 1
        columns = self._columns(arrays, ends)
        stop = 0
        for n, before, length in block.parts.tolist():
            start, stop = stop, stop + n
            if not before:
                self._begin(length)
            self._put(columns, start, stop, ends=before + n == length)
        advance(stop)
        return stop

    def _chained(self) -> list[Pair]:
        assert self._roles is not None
        return [p for p in (*self._roles.observations, *self._roles.infos) if p.now >= 0]

    def _check_chain(self, arrays: list[Array], parts: Ints) -> None:
        """Each observation is what the step before was followed by, byte for byte: the file has it once."""
        assert self._roles is not None
        begins = np.zeros(len(arrays[0]), np.bool_)
        firsts = np.concatenate([[0], np.cumsum(parts[:-1, 0])])
        begins[firsts[parts[:, 1] == 0]] = True
        pairs = self._chained()
        for i, pair in enumerate(pairs):
            now, after = arrays[pair.now], arrays[pair.after]
            before = np.concatenate([self._after[i] if self._after else after[:1], after[:-1]])
            wrong = np.flatnonzero(_differs(now, before) & ~begins)
            if len(wrong):
                part = int(np.searchsorted(np.cumsum(parts[:, 0]), wrong[0], "right"))
                step = int(wrong[0]) - int(firsts[part]) + int(parts[part, 1])
                episode = self.episodes - int(parts[0, 1] > 0) + part
                raise ValueError(
                    f"{trees.show(self._roles.leaf(pair.now).path)} of step {step} of episode {episode} is not what "
                    "the step before was followed by, and a Minari dataset has each observation once; write Parquet "
                    "or HDF5, which keep both. Nothing was written"
                )
        self._after = [arrays[pair.after][-1:].copy() for pair in pairs]

    def _columns(self, arrays: list[Array], ends: Ints) -> list[tuple[Array, Array | None]]:
        """Values of each dataset; with what followed each step where the dataset has one entry more."""
        assert self._roles is not None
        terminated, truncated = self._roles.flags(arrays, ends)
        pairs = (*self._roles.observations, *self._roles.infos, *self._roles.actions)
        columns: list[tuple[Array, Array | None]] = [
            (arrays[p.now if p.now >= 0 else p.after], arrays[p.after] if p.now >= 0 and p.after >= 0 else None)
            for p in pairs
        ]
        return [*columns, (self._roles.rewards(arrays), None), (terminated, None), (truncated, None)]

    def _begin(self, length: int) -> None:
        """Makes an episode's group and datasets."""
        assert self._roles is not None
        h5g = self._h5.h5g
        group = h5g.create(self._file, f"episode_{self.episodes}".encode())
        self._describe(group, {"id": self.episodes, "total_steps": length})
        made: dict[tuple[str, ...], Any] = {(): group}
        self._open = []
        roles = self._roles
        for role, pairs in (("observations", roles.observations), ("infos", roles.infos), ("actions", roles.actions)):
            for pair in pairs:
                leaf = roles.leaf(pair.now if pair.now >= 0 else pair.after)
                rows = length + (pair.now >= 0 and pair.after >= 0)
                names = (role, *pair.name)
                for depth in range(1, len(names)):
                    if names[:depth] not in made:
                        made[names[:depth]] = h5g.create(made[names[: depth - 1]], names[depth - 1].encode())
                self._open.append(H5Rows(made[names[:-1]], names[-1], rows, leaf.shape, _numpy_dtype(leaf)))
        if not roles.infos:
            h5g.create(group, b"infos")
        reward = roles.leaf(roles.reward)
        shape = () if reward.shape in ((), (1,)) else reward.shape
        self._open.append(H5Rows(group, "rewards", length, shape, _numpy_dtype(reward)))
        for name in ("terminations", "truncations"):
            self._open.append(H5Rows(group, name, length, (), np.dtype(np.bool_)))
        self.episodes += 1

    def _describe(self, group: Any, attributes: dict[str, int]) -> None:
        h5 = self._h5
        scalar = h5.h5s.create(h5.h5s.SCALAR)
        for name, value in attributes.items():
            attribute = h5.h5a.create(group, name.encode(), h5.h5t.NATIVE_INT64, scalar)
            attribute.write(np.array(value, np.int64))

    def _put(self, columns: list[tuple[Array, Array | None]], start: int, stop: int, ends: bool) -> None:
        for rows, (values, after) in zip(self._open, columns, strict=True):
            if ends and after is not None:
                rows.write(np.concatenate([values[start:stop], after[stop - 1 : stop]]))
            else:
                rows.write(values[start:stop])


def _numpy_dtype(leaf: Any) -> np.dtype[Any]:
    return np.dtype(str(leaf.dtype).removeprefix("torch."))


def _differs(a: Array, b: Array) -> npt.NDArray[np.bool_]:
    """Which rows are not the same bytes: bool [n]."""
    n = len(a)
    if not a.size:
        return np.zeros(n, np.bool_)
    rows = [np.ascontiguousarray(x).reshape(n, -1).view(np.uint8) for x in (a, b)]
    found: npt.NDArray[np.bool_] = (rows[0] != rows[1]).any(1)
    return found
