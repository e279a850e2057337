"""The episodes of a Minari file, as they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

from engram.data.datasets.h5_files import H5Array, H5Source
from engram.data.datasets.roles import REWARD, TRAJECTORY, batch_of, flag_leaves, following, observation_key, plain
from engram.data.datasets.sources import block_rows
from engram.data.replay_buffers import trees
from engram.data.replay_buffers.trees import Path

Array = npt.NDArray[Any]
_OBSERVATIONS, _ACTIONS, _INFOS = "observations", "actions", "infos"
_REWARDS, _TERMINATIONS, _TRUNCATIONS = "rewards", "terminations", "truncations"
_ROLES = (_OBSERVATIONS, _ACTIONS, _REWARDS, _TERMINATIONS, _TRUNCATIONS, _INFOS)


class Entry(NamedTuple):
    """A dataset that every episode has."""

    names: tuple[str, ...]  # from the episode's group on
    key: Path  # at the root; rewards and flags: under "next"
    more: int  # how many more entries than steps it has
    like: H5Array


class Piece(NamedTuple):
    """Steps of one episode that follow each other."""

    steps: int
    arrays: list[Array]  # of each entry; where it has more entries than steps, so has this


class Episodes:
    """What all episodes of a file have; and their steps.

    Raises:
        DatasetError: the file has no episodes, or what lies in it does not belong there.
    """

    def __init__(self, source: H5Source, infos: bool, exclude: Sequence[Path]) -> None:
        self._source, self.path = source, source.path
        self._skipped, self._infos = tuple(exclude), infos
        names = source.names(source.root, "the file")
        strange = [name for name in names if not _is_episode(name)]
        if strange or not names:
            said = f"holds {strange[0]!r}, which is no episode" if strange else "holds no episode"
            raise source.wrong("the file", said)
        self._names = sorted(names, key=lambda name: int(name[len("episode_") :]))
        self._groups: dict[tuple[str, ...], int] = {}  # how many entries each group has, as opened from the top
        self.roles = self._entries()

    def __len__(self) -> int:
        return len(self._names)

    # ---- what there is ----
    def _entries(self) -> list[Entry]:
        """As the first episode has it."""
        name = self._names[0]
        group = self._source.group(self._source.root, name, name)
        found: list[Entry] = []
        there = set(self._source.names(group, name))
        for role in (_OBSERVATIONS, _ACTIONS, _REWARDS, _TERMINATIONS, _TRUNCATIONS):
            if role not in there:
                raise self._source.wrong(f"{name}/{role}", "is missing")
        self._strange(name, there - set(_ROLES))
        self._count = len(there)
        steps = self._source.array(group, _REWARDS, f"{name}/{_REWARDS}").shape[0]
        for role in (_OBSERVATIONS, _ACTIONS, *([_INFOS] if self._infos and _INFOS in there else [])):
            self._walk(group, (role,), name, steps, found)
        for role in (_REWARDS, _TERMINATIONS, _TRUNCATIONS):
            found.append(Entry((role,), REWARD, 0, self._source.array(group, role, f"{name}/{role}")))
        for flag in found[-2:]:
            if flag.like.dtype != np.bool_ or flag.like.shape[1:] not in ((), (1,)):
                raise self._source.wrong(f"{name}/{flag.names[0]}", f"is {flag.like.dtype}, not one bool a step")
        self._check_keys(found)
        return found

    def _strange(self, name: str, strange: set[str]) -> None:
        if strange:
            raise self._source.wrong(f"{name}/{min(strange)}", "does not belong to an episode")

    def _walk(self, group: Any, names: tuple[str, ...], episode: str, steps: int, found: list[Entry]) -> None:
        place = "/".join((episode, *names))
        key = self._key(names)
        if key in self._skipped:
            return
        opened = self._source.open(group, names[-1], place)
        if self._source.is_group(opened):
            children = self._source.names(opened, place)
            self._groups[names] = len(children)
            for child in children:
                self._walk(opened, (*names, child), episode, steps, found)
            return
        array = self._source.as_array(opened, place)
        more = 1 if names[0] == _OBSERVATIONS or (names[0] == _INFOS and len(array) == steps + 1) else 0
        found.append(Entry(names, key, more, array))

    @staticmethod
    def _key(names: tuple[str, ...]) -> Path:
        if names[0] == _OBSERVATIONS:
            return observation_key(names[1:])
        return ("action" if names[0] == _ACTIONS else "info", *plain(names[1:]))

    def _check_keys(self, found: list[Entry]) -> None:
        """Two datasets may not mean one key, or one key lie below another."""
        taken: list[Path] = [("next",), ("done",), ("terminated",), ("truncated",), ("reward",), ("collector",)]
        if not any(entry.names[0] == _OBSERVATIONS for entry in found):
            raise self._source.wrong(f"{self._names[0]}/{_OBSERVATIONS}", "holds nothing")
        for entry in found[:-3]:
            clash = [t for t in taken if entry.key[: len(t)] == t or t[: len(entry.key)] == entry.key]
            if clash:
                place = "/".join((self._names[0], *entry.names))
                raise self._source.wrong(
                    place,
                    f"would be the key {trees.show(entry.key)}, beside {trees.show(clash[0])}; exclude= leaves it out",
                )
            taken.append(entry.key)

    # ---- steps ----
    def pieces(self, most: int | None) -> Iterator[Piece]:
        """Episode by episode; with `most`, long ones are cut."""
        for name in self._names:
            yield from self._pieces_of(name, most)

    def _pieces_of(self, name: str, most: int | None) -> Iterator[Piece]:
        arrays = self._open(name)
        steps = len(arrays[-1])
        for start in range(0, steps, most or max(1, steps)):
            stop = min(steps, start + (most or steps))
            with self._source.failures(name):
                values = [a.read(start, stop + e.more) for e, a in zip(self.roles, arrays, strict=True)]
            yield Piece(stop - start, values)

    def _open(self, name: str) -> list[H5Array]:
        """The datasets of an episode, compared with those of the first one."""
        source = self._source
        root = source.group(source.root, name, name)
        if source.count(root) != self._count:
            self._strange(name, set(source.names(root, name)) - set(_ROLES))
        opened: dict[tuple[str, ...], Any] = {(): root}
        for names, count in self._groups.items():
            place = "/".join((name, *names))
            opened[names] = group = source.group(opened[names[:-1]], names[-1], place)
            if source.count(group) != count:
                found = source.names(group, place)
                raise source.wrong(place, f"holds {sorted(found)}, which is not what it holds in {self._names[0]}")
        arrays = []
        for entry in self.roles:
            place = "/".join((name, *entry.names))
            arrays.append(source.array(opened[entry.names[:-1]], entry.names[-1], place, entry.like))
        steps = len(arrays[-3])
        for entry, array in zip(self.roles, arrays, strict=True):
            if len(array) != steps + entry.more:
                place = "/".join((name, *entry.names))
                raise source.wrong(
                    place, f"has {len(array)} entries; {steps} rewards ask for {steps + entry.more} of them"
                )
        return arrays

    def blocks(self, first_id: int) -> Iterator[TensorDict]:
        """All steps, in batches of bounded size; episodes are numbered from `first_id` on."""
        most = block_rows(
            sum(e.like.dtype.itemsize * int(np.prod(e.like.shape[1:])) * (1 + e.more) for e in self.roles)
        )
        held: list[Piece] = []
        ids: list[int] = []
        steps = 0
        for number, name in enumerate(self._names):
            for piece in self._pieces_of(name, most):
                if held and steps + piece.steps > most:
                    yield together(self.roles, held, ids)
                    held, ids, steps = [], [], 0
                held.append(piece)
                ids.append(first_id + number)
                steps += piece.steps
        if held:
            yield together(self.roles, held, ids)


def _is_episode(name: str) -> bool:
    return name.startswith("episode_") and name[len("episode_") :].isdecimal()


def together(roles: list[Entry], pieces: list[Piece], ids: list[int]) -> TensorDict:
    """Pieces as one TED batch."""
    n = sum(piece.steps for piece in pieces)
    leaves: dict[Path, Any] = {}
    for i, entry in enumerate(roles[:-3]):
        arrays = [piece.arrays[i] for piece in pieces]
        if entry.more:
            leaves[entry.key] = np.concatenate([a[:-1] for a in arrays])
            leaves[following(entry.key)] = np.concatenate([a[1:] for a in arrays])
        else:
            after = entry.key[0] == "info"
            leaves[following(entry.key) if after else entry.key] = np.concatenate(arrays)
    reward, terminated, truncated = (np.concatenate([p.arrays[i] for p in pieces]) for i in (-3, -2, -1))
    leaves[REWARD] = reward.reshape(n, 1) if reward.ndim == 1 else reward
    leaves |= flag_leaves(terminated, truncated)
    leaves[TRAJECTORY] = np.repeat(np.array(ids, np.int64), [piece.steps for piece in pieces])
    return batch_of(leaves, n)
