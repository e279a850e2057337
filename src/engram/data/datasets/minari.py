"""Spaces as Minari's metadata have them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

from engram import pytree
from engram._hdf5 import NEEDED_BY, H5Array, H5Rows, H5Source, create_plain, library, open_foreign
from engram.data.datasets.atomic_files import new_folder
from engram.data.datasets.episodes import (
    INDEX,
    REWARD,
    TRAJECTORY,
    Block,
    Ints,
    Pair,
    Roles,
    batch_of,
    block_rows,
    check_buffer,
    flag_leaves,
    following,
    next_trajectory,
    observation_key,
    plain,
    progress_bar,
    source_of,
    take,
)
from engram.errors import DatasetError
from engram.pytree import Key, KeyPath, as_path
from engram.store.episodes import DONE
from engram.store.layout import LeafSpec, RowLayout


def space_of(leaves: Sequence[tuple[tuple[str, ...], LeafSpec]]) -> dict[str, Any]:
    """The widest space with these leaves, named as datasets are: JSON."""
    (name, leaf), *_ = leaves
    if not name:
        return _widest(leaf)
    below: dict[str, list[tuple[tuple[str, ...], LeafSpec]]] = {}
    for (first, *rest), leaf in leaves:
        below.setdefault(first, []).append((tuple(rest), leaf))
    parts = {key: space_of(found) for key, found in below.items()}
    if all(key.startswith(INDEX) for key in parts):
        return {"type": "Tuple", "subspaces": [parts[f"{INDEX}{i}"] for i in range(len(parts))]}
    return {"type": "Dict", "subspaces": parts}


def _widest(leaf: LeafSpec) -> dict[str, Any]:
    shape = list(leaf.shape)
    name = str(leaf.dtype).removeprefix("torch.")
    if name == "bool":
        return {"type": "MultiBinary", "n": shape or 1}
    low, high = (-np.inf, np.inf) if leaf.dtype.is_floating_point else _limits(name)
    bounds = [np.full(shape, limit, object).tolist() for limit in (low, high)]
    return {"type": "Box", "dtype": name, "shape": shape, "low": bounds[0], "high": bounds[1]}


def _limits(name: str) -> tuple[int, int]:
    info = np.iinfo(name)
    return int(info.min), int(info.max)


def space_json(space: Any) -> dict[str, Any]:
    """A gymnasium space as JSON, by the name of its class.

    Raises:
        TypeError: a space without a fixed shape.
    """
    for cls in type(space).__mro__:
        if cls.__name__ in _KINDS:
            return {"type": cls.__name__, **_KINDS[cls.__name__](space)}
    raise TypeError(f"a space of type {type(space).__name__} is not written; there are {', '.join(_KINDS)}")


def _box(s: Any) -> dict[str, Any]:
    return {"dtype": str(s.dtype), "shape": list(s.shape), "low": s.low.tolist(), "high": s.high.tolist()}


_KINDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Box": _box,
    "Discrete": lambda s: {"dtype": str(s.dtype), "start": int(s.start), "n": int(s.n)},
    "MultiBinary": lambda s: {"n": list(s.n) if isinstance(s.n, tuple | list | np.ndarray) else int(s.n)},
    "MultiDiscrete": lambda s: {
        "dtype": str(s.dtype), "nvec": s.nvec.tolist(), "start": np.asarray(s.start).tolist()
    },
    "Dict": lambda s: {"subspaces": {key: space_json(part) for key, part in s.spaces.items()}},
    "Tuple": lambda s: {"subspaces": [space_json(part) for part in s.spaces]},
}  # fmt: skip


def dumped(space: dict[str, Any]) -> str:
    return json.dumps(space)


Array = npt.NDArray[Any]
_OBSERVATIONS, _ACTIONS, _INFOS = "observations", "actions", "infos"
_REWARDS, _TERMINATIONS, _TRUNCATIONS = "rewards", "terminations", "truncations"
_ROLES = (_OBSERVATIONS, _ACTIONS, _REWARDS, _TERMINATIONS, _TRUNCATIONS, _INFOS)


class Entry(NamedTuple):
    """A dataset that every episode has."""

    names: tuple[str, ...]  # from the episode's group on
    key: KeyPath  # at the root; rewards and flags: under "next"
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

    def __init__(self, source: H5Source, infos: bool, exclude: Sequence[KeyPath]) -> None:
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
    def _key(names: tuple[str, ...]) -> KeyPath:
        if names[0] == _OBSERVATIONS:
            return observation_key(names[1:])
        return ("action" if names[0] == _ACTIONS else "info", *plain(names[1:]))

    def _check_keys(self, found: list[Entry]) -> None:
        """Two datasets may not mean one key, or one key lie below another."""
        taken: list[KeyPath] = [("next",), ("done",), ("terminated",), ("truncated",), ("reward",), ("collector",)]
        if not any(entry.names[0] == _OBSERVATIONS for entry in found):
            raise self._source.wrong(f"{self._names[0]}/{_OBSERVATIONS}", "holds nothing")
        for entry in found[:-3]:
            clash = [t for t in taken if entry.key[: len(t)] == t or t[: len(entry.key)] == entry.key]
            if clash:
                place = "/".join((self._names[0], *entry.names))
                raise self._source.wrong(
                    place,
                    f"would be the key {pytree.format_key(entry.key)}, beside {pytree.format_key(clash[0])};"
                    " exclude= leaves it out",
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
    leaves: dict[KeyPath, Any] = {}
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
                    f"{pytree.format_key(self._roles.leaf(pair.now).path)} of step {step} of episode {episode} is not "
                    "what the step before was followed by, and a Minari dataset has each observation once; write "
                    "Parquet or HDF5, which keep both. Nothing was written"
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


FILE, METADATA = "main_data.hdf5", "metadata.json"
_LAYOUT_OF = "0.5.4"  # the Minari whose files these are like
_MOST_METADATA = 64 << 20


def read_minari(
    path: str | os.PathLike[str], buffer: Any, *, infos: bool = True, exclude: Sequence[Key] = (), progress: bool = True
) -> int:
    """Takes the episodes of a Minari dataset into a buffer; returns the number of steps.

    Steps are those of `iter_minari`, with trajectory ids that go on behind the buffer's own. They are written in blocks
    of about 16 MB: where one is refused, those before it stay, and it leaves nothing behind.

    Args:
        path: the dataset's folder, the `data` folder in it, or `main_data.hdf5`.
        buffer: with a storage of ndim=1.
        infos: take `infos` in, too.
        exclude: keys (as engram has them) to leave out.
        progress: show a bar, if there is a terminal.

    Raises:
        DatasetError: a file is damaged, or an episode has other keys, shapes or dtypes than the first; the message
            names file, episode and key, `rows_read` says how many steps were taken in.
        ImportError: h5py is missing: `pip install "engram[h5]"`.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/pole-v0"
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> done = torch.tensor([[False], [True]])
        >>> follows = {"observation": torch.ones(2, 4), "reward": torch.ones(2, 1), "terminated": done, "done": done}
        >>> steps = TensorDict({"observation": torch.ones(2, 4), "action": torch.ones(2), "next": follows}, [2])
        >>> write_minari(steps, folder)
        2
        >>> read_minari(folder, rb), rb[:]["next", "terminated"].flatten().tolist()
        (2, [False, True])
    """
    check_buffer(buffer)
    with _opened(path, infos, exclude) as (episodes, total):
        first = next_trajectory(buffer.storage)
        return take(episodes.blocks(first), buffer, episodes.path, total, progress)


def iter_minari(
    path: str | os.PathLike[str], *, infos: bool = True, exclude: Sequence[Key] = ()
) -> Iterator[TensorDict]:
    """The episodes of a Minari dataset, one after the other: TED batches `[steps]`.

    The T + 1 observations are the root's (the first T) and those under `"next"` (the last T); so are `infos`, as
    `("info", ...)`. `observation` is a Box's key, those of a Dict are its own, those of a Tuple `("observation", "0")`
    and so on. Rewards and flags are `[T, 1]`; values and dtypes are those of the file. Episodes are numbered from 0 in
    `("collector", "traj_ids")`.

    Raises:
        DatasetError, ImportError: as `read_minari`.
    """
    with _opened(path, infos, exclude) as (episodes, _):
        for number, piece in enumerate(episodes.pieces(None)):
            yield together(episodes.roles, [piece], [number])


class _opened:
    """The episodes of a dataset and the number of their steps, for a `with`."""

    def __init__(self, path: str | os.PathLike[str], infos: bool, exclude: Sequence[Key]) -> None:
        self._file = _find(Path(path))
        self._metadata = _read_metadata(self._file.with_name(METADATA))
        self._infos, self._exclude = infos, tuple(as_path(key, "exclude") for key in exclude)

    def __enter__(self) -> tuple[Episodes, int | None]:
        self._context = open_foreign(self._file)
        source = self._context.__enter__()
        try:
            episodes = Episodes(source, self._infos, self._exclude)
            wanted = self._metadata.get("total_episodes")
            if wanted is not None and wanted != len(episodes):
                raise DatasetError(str(self._file), f"has {len(episodes)} episodes, {METADATA} says {wanted}")
        except BaseException:
            self._context.__exit__(None, None, None)
            raise
        total = self._metadata.get("total_steps")
        return episodes, total if type(total) is int else None

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def _find(path: Path) -> Path:
    for file in (path / "data" / FILE, path / FILE, path):
        if file.is_file():
            return file
    if (path / "data" / METADATA).is_file():
        raise DatasetError(str(path), f"there is no data/{FILE}: only Minari's HDF5 format is read, not Arrow")
    raise FileNotFoundError(2, f"there is no Minari dataset (data/{FILE})", str(path))


def _read_metadata(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    if file.stat().st_size > _MOST_METADATA:
        raise DatasetError(str(file), f"is longer than {_MOST_METADATA} bytes")
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DatasetError(str(file), f"is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise DatasetError(str(file), "is no JSON object")
    return found


def write_minari(
    source: Any,
    path: str | os.PathLike[str],
    *,
    dataset_id: str | None = None,
    observation_space: Any = None,
    action_space: Any = None,
    metadata: Mapping[str, Any] | None = None,
    exclude: Sequence[Key] = (),
    end_key: Key = DONE,
    traj_key: Key | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> int:
    """Writes trajectories as a Minari dataset; returns the number of steps.

    The folder appears whole or not at all. A trajectory is an episode; one that has not ended is written with its last
    step truncated, as Minari does. Stored rows are written as they are, oldest first (transforms are not applied),
    while writers of this process wait. Trajectory ids, `index`, the flags at the root and `("next", "done")` are not
    written: they follow from the rest.

    Args:
        source: a buffer or storage; a TensorDict `[time]` or `[envs, time]`, or an iterable of such, as a collector. Of
            an iterable, trajectories are kept in memory until they end.
        path: the folder to make.
        dataset_id: Minari's name of it; the folder's name.
        observation_space, action_space: gymnasium's; else the widest that hold the stored values.
        metadata: more entries for `metadata.json`: `author`, `description`, `env_spec` (a string of JSON), ...
        exclude: keys to leave out.
        end_key, traj_key: what ends a trajectory, as for `SliceSampler`.
        overwrite: replace the Minari dataset at `path`.
        progress: show a bar, if there is a terminal.

    Raises:
        ValueError: nothing to write, keys without a place in this format (all are listed), or an observation that is
            not the one after the step before.
        FileExistsError: there is something at `path`.
        ImportError: h5py is missing: `pip install "engram[h5]"`.
    """
    folder, total = Path(path), 0
    found = source_of(source, end_key, traj_key, exclude)
    spaces = {"observation_space": observation_space, "action_space": action_space}
    given = {name: space_json(space) for name, space in spaces.items() if space is not None}
    with (
        new_folder(folder, overwrite, _is_dataset) as made,
        progress_bar(f"writing {folder}", found.total, progress) as advance,
    ):
        (made / "data").mkdir()
        with create_plain(made / "data" / FILE) as file:
            writer = EpisodeWriter(file.id)
            for block in found.blocks():
                total += writer.write(block, advance)
        described = {
            "total_episodes": writer.episodes,
            "total_steps": total,
            "data_format": "hdf5",
            "jpeg_encoding": False,
            **{name: dumped(space) for name, space in {**writer.spaces(), **given}.items()},
            "dataset_size": round((made / "data" / FILE).stat().st_size / 1e6, 1),
            "dataset_id": folder.name if dataset_id is None else dataset_id,
            "minari_version": _LAYOUT_OF,
            **(metadata or {}),
        }
        (made / "data" / METADATA).write_text(json.dumps(described))
    return total


def _is_dataset(path: Path) -> bool:
    return {p.name for p in path.iterdir()} == {"data"} and (path / "data" / METADATA).is_file()
