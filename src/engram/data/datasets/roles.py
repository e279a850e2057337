"""Which key of an episode (TED) is which dataset of Minari and D4RL files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from engram.data.replay_buffers import trees
from engram.data.replay_buffers.layout import LeafSpec, RowLayout
from engram.data.replay_buffers.trees import Path

Array = npt.NDArray[Any]

OBSERVATION: Path = ("observation",)
ACTION: Path = ("action",)
INFO: Path = ("info",)
REWARD: Path = ("next", "reward")
DONE, TERMINATED, TRUNCATED = ("next", "done"), ("next", "terminated"), ("next", "truncated")
TRAJECTORY: Path = ("collector", "traj_ids")
#: What the datasets say in other words (where trajectories start and end), or what belongs to the buffer alone.
IMPLIED: tuple[Path, ...] = (TRAJECTORY, ("episode",), ("index",), ("done",), ("terminated",), ("truncated",), DONE)
_NO_PLACE = (torch.bfloat16, torch.complex64, torch.complex128)
INDEX = "_index_"


class Pair(NamedTuple):
    """A key at the root and what followed it under "next": numbers of leaves; -1: there is none."""

    name: tuple[str, ...]  # of the dataset, below its role
    now: int
    after: int


class Roles:
    """What the leaves of a stored step are to a dataset.

    Raises:
        ValueError: a key has no place in it, or one that it needs is missing; all of them are listed.
    """

    def __init__(self, layout: RowLayout, kind: str, lone_infos: str) -> None:
        self.layout = layout
        self._at = {leaf.path: i for i, leaf in enumerate(layout.leaves)}
        if not all(p and all(isinstance(part, str) for part in p) for p in self._at):
            raise ValueError(f"{kind} is made of TensorDicts or dicts of tensors; nothing was written")
        self._left = [p for p in self._at if p not in IMPLIED]
        self.reward = self._take(REWARD)
        self.terminated, self.truncated, self.done = (self._at.get(p, -1) for p in (TERMINATED, TRUNCATED, DONE))
        self._left = [p for p in self._left if p not in (TERMINATED, TRUNCATED)]
        self.actions = self._names([(p, p[1:], self._at[p], -1) for p in self._taken(lambda p: p[0] == "action")])
        self.infos = self._infos(lone_infos)
        pairs = [p for p in list(self._left) if p[0] != "next" and self._same(p)]
        self._left = [p for p in self._left if p not in pairs and p[1:] not in pairs]
        alone = pairs == [OBSERVATION]
        nested = not alone and all(p[0] == "observation" for p in pairs) and _is_tuple({p[1] for p in pairs})
        cut = 1 if alone or nested else 0
        self.observations = self._names([(p, p[cut:], self._at[p], self._at[following(p)]) for p in pairs])
        self._refuse(kind)

    def leaf(self, at: int) -> LeafSpec:
        return self.layout.leaves[at]

    def _take(self, path: Path) -> int:
        self._left = [p for p in self._left if p != path]
        return self._at.get(path, -1)

    def _taken(self, wanted: Any) -> list[Path]:
        found = [p for p in self._left if wanted(p)]
        self._left = [p for p in self._left if p not in found]
        return found

    def _same(self, path: Path) -> bool:
        other = self._at.get(following(path))
        if other is None:
            return False
        a, b = self.leaf(self._at[path]), self.leaf(other)
        return (a.dtype, a.shape) == (b.dtype, b.shape)

    def _infos(self, lone: str) -> list[Pair]:
        """Infos at both places, or only where `lone` allows it: "now", "after"."""
        names = dict.fromkeys(_at_root(p) for p in self._left if _at_root(p)[:1] == INFO)
        found = []
        for path in names:
            now, after = self._at.get(path, -1), self._at.get(following(path), -1)
            fits = self._same(path) if now >= 0 and after >= 0 else (now >= 0) == (lone == "now")
            if fits:
                found.append((path, path[1:], now, after))
                self._left = [p for p in self._left if p not in (path, ("next", *path))]
        return self._names(found)

    def _names(self, found: Sequence[tuple[Path, Path, int, int]]) -> list[Pair]:
        return [Pair(name, now, after) for name, (_, _, now, after) in zip(_names(found), found, strict=True)]

    def _refuse(self, kind: str) -> None:
        said = [f"{trees.show(p)} has no place in {kind}" for p in self._left]
        if self.reward < 0:
            said.append(f"{trees.show(REWARD)} is missing")
        if not self.actions:
            said.append("'action' is missing")
        if not self.observations:
            said.append("there is no observation: a key at the root and under 'next', of one dtype and shape")
        if self.terminated < 0 and self.done < 0:
            said.append(f"{trees.show(TERMINATED)} is missing")
        for at in (self.terminated, self.truncated, self.done):
            if at >= 0 and (self.leaf(at).nbytes != 1 or self.leaf(at).dtype != torch.bool):
                said.append(f"{trees.show(self.leaf(at).path)} is not one bool a step")
        said += [
            f"{trees.show(x.path)} is {x.dtype}, which {kind} has not"
            for x in self.layout.leaves
            if x.dtype in _NO_PLACE
        ]
        if said:
            raise ValueError(
                "; ".join(said) + ". exclude= leaves keys out; Parquet and checkpoints keep all of them. Nothing was "
                "written"
            )

    # ---- flags of a block of steps ----
    def flags(self, arrays: list[Array], last: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """`terminated` and `truncated`, bool [n]. Steps at `last` end a trajectory: truncated, if nothing else."""
        n = len(arrays[0])
        zeros = np.zeros(n, np.bool_)
        truncated = arrays[self.truncated].reshape(n).copy() if self.truncated >= 0 else zeros.copy()
        if self.terminated >= 0:
            terminated = arrays[self.terminated].reshape(n)
        else:
            terminated = arrays[self.done].reshape(n) & ~truncated
        truncated[last] |= ~terminated[last]
        return terminated, truncated

    def rewards(self, arrays: list[Array]) -> Array:
        """[n]; rewards of several numbers [n, k]."""
        found = arrays[self.reward]
        return found.reshape(len(found)) if self.leaf(self.reward).shape in ((), (1,)) else found


def flag_leaves(terminated: Array, truncated: Array) -> dict[Path, Array]:
    """The six flags of TED, [n, 1] each: a trajectory that is being read has not ended before a step."""
    terminated, truncated = (flag.reshape(-1, 1) for flag in (terminated, truncated))
    zeros = [np.zeros_like(terminated) for _ in range(3)]
    return {
        ("done",): zeros[0], ("terminated",): zeros[1], ("truncated",): zeros[2],
        DONE: terminated | truncated, TERMINATED: terminated, TRUNCATED: truncated,
    }  # fmt: skip


def following(path: Path) -> Path:
    """Where what followed a key of the root is."""
    return ("next", *path)


def _at_root(path: Path) -> Path:
    """Where a key under "next" has its counterpart."""
    return path[1:] if path[0] == "next" else path


def observation_key(name: tuple[str, ...]) -> Path:
    """The key of an observation: a space's own, as `GymEnv` has them; `observation` where it has none."""
    if not name or name[0].startswith(INDEX):
        return (*OBSERVATION, *plain(name))
    return plain(name)


def plain(name: tuple[str, ...]) -> Path:
    """Names as keys: `_index_3` of a Tuple is the key "3"."""
    return tuple(part.removeprefix(INDEX) if _is_index(part) else part for part in name)


def _is_index(part: str) -> bool:
    return part.startswith(INDEX) and part[len(INDEX) :].isdecimal()


def _is_tuple(keys: set[str]) -> bool:
    return keys == {str(i) for i in range(len(keys))}


def _names(found: Sequence[tuple[Path, Path, int, int]]) -> list[tuple[str, ...]]:
    """Names of datasets: keys "0", "1", ... of one place are a Tuple, whose entries are called `_index_0`, ..."""
    below: dict[Path, set[str]] = {}
    for path, name, _, _ in found:
        for depth, part in enumerate(name):
            if part in ("", ".") or "/" in part or "\0" in part or part.startswith(INDEX):
                raise ValueError(f"{trees.show(path)}: {part!r} cannot be the name of a dataset; nothing was written")
            below.setdefault(name[:depth], set()).add(part)
    tuples = {place for place, keys in below.items() if _is_tuple(keys)}
    return [
        tuple(f"{INDEX}{part}" if name[:depth] in tuples else part for depth, part in enumerate(name))
        for _, name, _, _ in found
    ]


def batch_of(leaves: Mapping[Path, Any], n: int) -> TensorDict:
    """A TensorDict [n] with these leaves."""
    nested: dict[str, Any] = {}
    for path, array in leaves.items():
        here = nested
        for part in path[:-1]:
            here = here.setdefault(part, {})
        here[path[-1]] = torch.as_tensor(array)
    return TensorDict(nested, batch_size=[n])
