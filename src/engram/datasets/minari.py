"""Minari datasets: an HDF5 file with a group for each episode, and metadata with the spaces."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from engram import pytree
from engram._progress import progress_bar
from engram.datasets.atomic_files import Replaceable, new_folder, replaceable_file
from engram.datasets.episodes import (
    DONE,
    INDEX,
    MAX_ROW_BYTES,
    NO_OBSERVATIONS,
    OBSERVATION,
    REWARD,
    TRAJECTORY,
    DatasetSize,
    Ints,
    KeyMapping,
    KeyPair,
    StepBlock,
    batch_of,
    block_rows,
    check_buffer,
    episode_source,
    flag_leaves,
    ingest,
    key_of,
    next_key,
    next_trajectory,
    read_json_object,
)
from engram.datasets.format import HDF5_MAGIC, DatasetFormat
from engram.datasets.h5_files import H5RowWriter, H5Source, create_plain, is_ours, open_foreign, text_dtype
from engram.datasets.parquet import (
    arrow_bytes,
    arrow_children,
    arrow_column,
    arrow_texts,
    arrow_values,
    has_fixed_numbers,
    has_texts,
    is_fixed_list,
    open_arrow,
)
from engram.errors import DatasetError
from engram.kernel.hdf5 import H5Dataset, import_h5py
from engram.kernel.rows import LeafSpec, RowLayout
from engram.kernel.spaces import EncodedSpaces, LeafSpace, leaf_spaces, observation_path, text_width
from engram.kernel.tools import parse_bytes, user_path
from engram.pytree import Key, KeyPath, as_path
from engram.specs import MultiOneHot, OneHot, Spec, Text, Unbounded, space_from_spec, spec_from_space

Array = npt.NDArray[Any]


class RawColumn(NamedTuple):
    """How an entry of steps is written: its space as JSON, and its values as those of the space."""

    space: dict[str, Any]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    values: Callable[[Array], Array]  #: of stored values `[n, ...]`; ValueError where one is not of the space


def space_of(leaves: Sequence[tuple[tuple[str, ...], dict[str, Any]]]) -> dict[str, Any]:
    """The JSON of the space with these leaves, which are JSON, too, and are named as datasets are."""
    (name, leaf), *_ = leaves
    if not name:
        return leaf
    below: dict[str, list[tuple[tuple[str, ...], dict[str, Any]]]] = {}
    for (first, *rest), leaf in leaves:
        below.setdefault(first, []).append((tuple(rest), leaf))
    parts = {key: space_of(group) for key, group in below.items()}
    if all(key.startswith(INDEX) for key in parts):
        return {"type": "Tuple", "subspaces": [parts[f"{INDEX}{i}"] for i in range(len(parts))]}
    return {"type": "Dict", "subspaces": parts}


def _widest(leaf: LeafSpec) -> RawColumn:
    """Values as they are stored, in the widest space of their dtype and shape."""
    shape = list(leaf.shape)
    name = str(leaf.dtype).removeprefix("torch.")
    if name == "bool":
        space: dict[str, Any] = {"type": "MultiBinary", "n": shape or 1}
    else:
        low, high = (-np.inf, np.inf) if leaf.dtype.is_floating_point else _limits(name)
        bounds = [np.full(shape, limit, object).tolist() for limit in (low, high)]
        space = {"type": "Box", "dtype": name, "shape": shape, "low": bounds[0], "high": bounds[1]}
    return RawColumn(space, _numpy_dtype(leaf), tuple(leaf.shape), lambda values: values)


def _limits(name: str) -> tuple[int, int]:
    info = np.iinfo(name)
    return int(info.min), int(info.max)


def space_json(space: Any) -> dict[str, Any]:
    """A gymnasium space as JSON, by the name of its class.

    Raises:
        TypeError: a space without a fixed shape.
    """
    kind = _kind_of(space)
    return {"type": kind, **_KINDS[kind](space)}


def _kind_of(space: Any) -> str:
    """The name in `_KINDS` of a space's class; TypeError for any other class."""
    for cls in type(space).__mro__:
        if cls.__name__ in _KINDS:
            return cls.__name__
    if isinstance(spec_from_space(space), Text):
        return "Text"
    raise TypeError(f"a space of type {type(space).__name__} cannot be written; these can: {', '.join(_KINDS)}")


def _box(s: Any) -> dict[str, Any]:
    return {"dtype": str(s.dtype), "shape": list(s.shape), "low": s.low.tolist(), "high": s.high.tolist()}


def _text(s: Any) -> dict[str, Any]:
    if type(s).__name__ != "Text":  # another space of `str`, such as a mission of MiniGrid
        return {"max_length": spec_from_space(s).shape[-1], "min_length": 0, "charset": string.printable}
    return {"max_length": int(s.max_length), "min_length": int(s.min_length), "charset": s.characters}


_KINDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Box": _box,
    "Discrete": lambda s: {"dtype": str(s.dtype), "start": int(s.start), "n": int(s.n)},
    "MultiBinary": lambda s: {"n": list(s.n) if isinstance(s.n, tuple | list | np.ndarray) else int(s.n)},
    "MultiDiscrete": lambda s: {
        "dtype": str(s.dtype), "nvec": s.nvec.tolist(), "start": np.asarray(s.start).tolist()
    },
    "Text": _text,
    "Dict": lambda s: {"subspaces": {str(key): space_json(part) for key, part in s.spaces.items()}},
    "Tuple": lambda s: {"subspaces": [space_json(part) for part in s.spaces]},
}  # fmt: skip


def encoded_column(leaf: LeafSpec, space: Any, spec: Spec | None) -> RawColumn:
    """How an entry is written whose values are of a gymnasium space, or were encoded as `spec`.

    Without a spec, values are the space's own, one-hot vectors, or UTF-8 in a fixed width.

    Raises:
        ValueError: the entry's shape or dtype is not that of the space.
    """
    kind, name = _kind_of(space), pytree.format_key(leaf.path)
    if spec is None and not (spec := _likely_spec(leaf, space, kind)):
        raise ValueError(
            f"{name} is {str(leaf.dtype)[6:]} {list(leaf.shape)}, which is not of the space {space}; give the space of "
            "the stored values. Nothing was written"
        )
    json_of, dtype = space_json(space), np.dtype(object if kind == "Text" else space.dtype)
    if isinstance(spec, Text):
        return RawColumn(json_of, text_dtype(), (), lambda rows: _texts(rows, name))
    shape = tuple(space.shape)
    if kind in ("Discrete", "MultiDiscrete"):
        sizes = np.asarray(space.n if kind == "Discrete" else space.nvec, np.int64).reshape(-1)
        start = np.broadcast_to(np.asarray(space.start, np.int64), shape).reshape(-1)
        counts = not isinstance(spec, Unbounded)
        is_hot = isinstance(spec, OneHot | MultiOneHot)

        def choices(values: Array) -> Array:
            found = _hot_places(values, sizes, name) if is_hot else values.astype(np.int64).reshape(len(values), -1)
            found = found + start if counts else found
            wrong = np.argwhere((found < start) | (found >= start + sizes))
            if len(wrong):
                raise ValueError(
                    f"{name} has the value {found[tuple(wrong[0])]}, which is not of the space {space}. Nothing was "
                    "written"
                )
            return found.astype(dtype).reshape(len(values), *shape)

        return RawColumn(json_of, dtype, shape, choices)
    return RawColumn(json_of, dtype, shape, lambda values: values.astype(dtype, copy=False))


def _likely_spec(leaf: LeafSpec, space: Any, kind: str) -> Spec | None:
    """The spec that an entry of this dtype and shape has if its values are of the space; None: they are not.

    `Unbounded` is that of the space's own values.
    """
    shape = tuple(leaf.shape)
    if kind == "Text":
        return Text(shape[0]) if leaf.dtype is torch.uint8 and len(shape) == 1 and shape[0] else None
    is_number = leaf.dtype.is_floating_point or leaf.dtype is torch.bool
    if kind in ("Discrete", "MultiDiscrete"):
        if not is_number and (shape == tuple(space.shape) or (shape, tuple(space.shape)) == ((1,), ())):
            return Unbounded(shape, dtype=leaf.dtype)
        spec = spec_from_space(space)
        return spec if shape == tuple(spec.shape) and not leaf.dtype.is_floating_point else None
    fits = shape == tuple(space.shape) and np.can_cast(_numpy_dtype(leaf), space.dtype, "safe")
    return Unbounded(shape, dtype=leaf.dtype) if fits else None


def _hot_places(values: Array, sizes: Ints, name: str) -> Ints:
    """The places of the ones, int64 [n, len(sizes)], in one-hot vectors of these sizes, one behind the other."""
    bounds = np.cumsum([0, *sizes])
    parts = [values.reshape(len(values), -1)[:, a:b] for a, b in itertools.pairwise(bounds)]
    if any(((part != 0).sum(1) != 1).any() for part in parts):
        raise ValueError(f"{name} has a value that is not one-hot, as its space is written. Nothing was written")
    return np.stack([(part != 0).argmax(1) for part in parts], 1).astype(np.int64)


def _texts(rows: Array, name: str) -> Array:
    """Texts, of uint8 [n, width]."""
    texts = []
    for row in rows:
        content = row.tobytes().rstrip(b"\0")
        texts.append(content.decode(errors="replace"))
        if texts[-1].encode() != content or b"\0" in content:
            raise ValueError(
                f"{name} has the bytes {row.tobytes()!r:.80}, which are not text in UTF-8. Nothing was written"
            )
    return np.array(texts, text_dtype())


_OBSERVATIONS, _ACTIONS, _INFOS = "observations", "actions", "infos"
_REWARDS, _TERMINATIONS, _TRUNCATIONS = "rewards", "terminations", "truncations"
_ROLES = (_OBSERVATIONS, _ACTIONS, _REWARDS, _TERMINATIONS, _TRUNCATIONS, _INFOS)
_SPACE_OF = {_OBSERVATIONS: "observation_space", _ACTIONS: "action_space"}  # in the metadata


class EpisodeEntry(Protocol):
    """A key of the episodes: where it is in the dataset, and how many more entries than steps it has."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def key(self) -> KeyPath: ...
    @property
    def more(self) -> int: ...


class EpisodeDataset(NamedTuple):
    """A dataset that every episode has."""

    names: tuple[str, ...]  # below the episode's group
    key: KeyPath  # at the root; rewards and flags: under "next"
    more: int  # how many more entries than steps it has
    like: H5Dataset  # that of the first episode


class EpisodePart(NamedTuple):
    """Consecutive steps of one episode."""

    steps: int
    arrays: list[Array]  # one for each dataset, with one entry more where the dataset has


class EpisodeReader(ABC):
    """Reads the episodes of a dataset, which must all have the entries of the first.

    Attributes:
        path: the file or folder, for messages.
        datasets: the entries that every episode has; the last three are rewards, terminations and truncations.
    """

    path: Path | str
    datasets: Sequence[EpisodeEntry]
    _names: Sequence[Any]  # of the episodes, in their order
    _row_bytes: int

    def __len__(self) -> int:
        return len(self._names)

    def parts(self, most: int | None) -> Iterator[EpisodePart]:
        """The episodes, one after the other; those of more than `most` steps are cut."""
        for name in self._names:
            yield from self._parts_of(name, most)

    def blocks(self, first_id: int) -> Iterator[TensorDict]:
        """All steps, in batches of bounded size; episodes are numbered from `first_id` on."""
        most, held, ids, steps = block_rows(self._row_bytes), list[EpisodePart](), list[int](), 0
        for number, name in enumerate(self._names, first_id):
            for part in self._parts_of(name, most):
                if held and steps + part.steps > most:
                    yield self.batch_of_parts(held, ids)
                    held, ids, steps = [], [], 0
                held.append(part)
                ids.append(number)
                steps += part.steps
        if held:
            yield self.batch_of_parts(held, ids)

    @abstractmethod
    def _parts_of(self, name: Any, most: int | None) -> Iterator[EpisodePart]:
        """The steps of one episode."""

    def batch_of_parts(self, parts: list[EpisodePart], ids: list[int]) -> TensorDict:
        """One TED batch of parts of episodes."""
        n = sum(part.steps for part in parts)
        leaves: dict[KeyPath, Any] = {}
        for i, entry in enumerate(self.datasets[:-3]):
            arrays = [part.arrays[i] for part in parts]
            if entry.more:
                leaves[entry.key] = arrays[0][:-1] if len(arrays) == 1 else np.concatenate([a[:-1] for a in arrays])
                leaves[next_key(entry.key)] = np.concatenate(
                    [a[1:] for a in arrays]
                )  # never in the memory of the first
            else:
                is_next = entry.key[0] == "info"  # infos of steps alone are those that a step returned
                leaves[next_key(entry.key) if is_next else entry.key] = np.concatenate(arrays)
        reward, terminated, truncated = (np.concatenate([p.arrays[i] for p in parts]) for i in (-3, -2, -1))
        leaves[REWARD] = reward.reshape(n, 1) if reward.ndim == 1 else reward
        leaves |= flag_leaves(terminated, truncated)
        leaves[TRAJECTORY] = np.repeat(np.array(ids, np.int64), [part.steps for part in parts])
        return batch_of(leaves, n)


def _key(names: tuple[str, ...], space: Any) -> KeyPath:
    """The key that an entry of an episode becomes; `space` is that of its role, as JSON.

    `_index_3` is the key "3" of a Tuple, unless the space is a Dict that has an entry of this name.
    """
    role, *below = names
    key: list[str] = []
    is_own = bool(below) and (_is_dict_with(space, below[0]) or not below[0].startswith(INDEX))
    for name in below:
        key.append(name if _is_dict_with(space, name) else key_of((name,))[0])
        space = _subspace(space, name)
    if role == _OBSERVATIONS:
        return tuple(key) if is_own else (*OBSERVATION, *key)
    return ("action" if role == _ACTIONS else "info", *key)


def _is_dict_with(space: Any, name: str) -> bool:
    """Whether a space, of which this is the JSON, is a Dict with an entry of this name."""
    below = space.get("subspaces") if isinstance(space, dict) else None
    return isinstance(below, dict) and name in below


class H5EpisodeReader(EpisodeReader):
    """Reads the episodes of an HDF5 file.

    Raises:
        DatasetError: the file has no episodes, or an entry does not belong in it.
    """

    datasets: list[EpisodeDataset]

    def __init__(self, source: H5Source, metadata: Mapping[str, Any], infos: bool, exclude: Sequence[KeyPath]) -> None:
        self._source, self.path = source, source.path
        self._spaces = {role: _space(metadata, role) for role in (_OBSERVATIONS, _ACTIONS, _INFOS)}
        self._skipped, self._infos = tuple(exclude), infos
        names = source.names(source.root, "the file")
        others = [name for name in names if not _is_episode(name)]
        if others or not names:
            raise source.wrong(
                "the file", f"holds {others[0]!r}, which is not an episode" if others else "holds no episode"
            )
        self._names = sorted(names, key=lambda name: int(name[len("episode_") :]))
        self._groups: dict[tuple[str, ...], int] = {}  # the number of entries of each group, parents first
        self.datasets = self._first_episode()
        self._row_bytes = sum(
            e.like.dtype.itemsize * int(np.prod(e.like.shape[1:])) * (1 + e.more) for e in self.datasets
        )
        source.check_row(self._row_bytes)

    # ---- structure ----
    def _first_episode(self) -> list[EpisodeDataset]:
        """The datasets of the first episode; the last three are rewards, terminations and truncations."""
        name = self._names[0]
        group = self._source.group(self._source.root, name, name)
        datasets: list[EpisodeDataset] = []
        present = set(self._source.names(group, name))
        for role in (_OBSERVATIONS, _ACTIONS, _REWARDS, _TERMINATIONS, _TRUNCATIONS):
            if role not in present:
                raise self._source.wrong(f"{name}/{role}", "is missing")
        self._refuse_others(name, present - set(_ROLES))
        self._count = len(present)
        steps = self._source.rows(group, _REWARDS, f"{name}/{_REWARDS}").shape[0]
        for role in (_OBSERVATIONS, _ACTIONS, *([_INFOS] if self._infos and _INFOS in present else [])):
            self._add_below(group, (role,), self._spaces[role], name, steps, datasets)
        for role in (_REWARDS, _TERMINATIONS, _TRUNCATIONS):
            datasets.append(EpisodeDataset((role,), REWARD, 0, self._source.rows(group, role, f"{name}/{role}")))
        for flag in datasets[-2:]:
            if flag.like.dtype != np.bool_ or flag.like.shape[1:] not in ((), (1,)):
                raise self._source.wrong(f"{name}/{flag.names[0]}", f"is {flag.like.dtype}, not one bool a step")
        self._check_keys(datasets)
        return datasets

    def _refuse_others(self, name: str, others: set[str]) -> None:
        if others:
            raise self._source.wrong(f"{name}/{min(others)}", "does not belong to an episode")

    def _add_below(
        self, group: Any, names: tuple[str, ...], space: Any, episode: str, steps: int, datasets: list[EpisodeDataset]
    ) -> None:
        """Adds a dataset, or all datasets of a group."""
        place = "/".join((episode, *names))
        key = _key(names, self._spaces[names[0]])
        if key in self._skipped:
            return
        opened = self._source.open(group, names[-1], place)
        if self._source.is_group(opened):
            children = self._source.names(opened, place)
            self._groups[names] = len(children)
            for child in children:
                self._add_below(opened, (*names, child), _subspace(space, child), episode, steps, datasets)
            return
        array = self._source.checked_rows(opened, place, text_width=_text_width(space))
        more = 1 if names[0] == _OBSERVATIONS or (names[0] == _INFOS and len(array) == steps + 1) else 0
        datasets.append(EpisodeDataset(names, key, more, array))

    def _check_keys(self, datasets: list[EpisodeDataset]) -> None:
        """DatasetError where two datasets become one key, or one key lies below another."""
        used: list[KeyPath] = [(key,) for key in NO_OBSERVATIONS]
        if not any(entry.names[0] == _OBSERVATIONS for entry in datasets):
            raise self._source.wrong(f"{self._names[0]}/{_OBSERVATIONS}", "holds nothing")
        for entry in datasets[:-3]:
            clash = [t for t in used if entry.key[: len(t)] == t or t[: len(entry.key)] == entry.key]
            if clash:
                place = "/".join((self._names[0], *entry.names))
                raise self._source.wrong(
                    place,
                    f"would be the key {pytree.format_key(entry.key)}, beside {pytree.format_key(clash[0])};"
                    " exclude= leaves it out",
                )
            used.append(entry.key)

    # ---- steps ----
    def _parts_of(self, name: str, most: int | None) -> Iterator[EpisodePart]:
        arrays = self._open(name)
        steps = len(arrays[-1])
        for start in range(0, steps, most or max(1, steps)):
            stop = min(steps, start + (most or steps))
            with self._source.failures(name):
                values = [a.read(slice(start, stop + e.more)) for e, a in zip(self.datasets, arrays, strict=True)]
            yield EpisodePart(stop - start, values)

    def _open(self, name: str) -> list[H5Dataset]:
        """The datasets of an episode, compared with those of the first one."""
        source = self._source
        root = source.group(source.root, name, name)
        if source.count(root, name) != self._count:
            self._refuse_others(name, set(source.names(root, name)) - set(_ROLES))
        opened: dict[tuple[str, ...], Any] = {(): root}
        for names, count in self._groups.items():
            place = "/".join((name, *names))
            opened[names] = group = source.group(opened[names[:-1]], names[-1], place)
            if source.count(group, place) != count:
                present = source.names(group, place)
                raise source.wrong(place, f"holds {sorted(present)}, which is not what it holds in {self._names[0]}")
        arrays = []
        for entry in self.datasets:
            place = "/".join((name, *entry.names))
            arrays.append(source.rows(opened[entry.names[:-1]], entry.names[-1], place, entry.like))
        steps = len(arrays[-3])
        for entry, array in zip(self.datasets, arrays, strict=True):
            if len(array) != steps + entry.more:
                place = "/".join((name, *entry.names))
                raise source.wrong(
                    place, f"has {len(array)} entries; with {steps} rewards it must have {steps + entry.more}"
                )
        return arrays


def _is_episode(name: str) -> bool:
    return name.startswith("episode_") and name[len("episode_") :].isdecimal()


class ArrowColumn(NamedTuple):
    """A column of numbers, which may be in structs, that every episode's Arrow file has."""

    names: tuple[str, ...]
    key: KeyPath
    more: int
    shape: tuple[int, ...]
    kind: Any  # Arrow's type

    @property
    def nbytes(self) -> int:
        """The bytes of one value."""
        return self.shape[0] if has_texts(self.kind) else arrow_bytes(self.kind)

    def values_of(self, array: Any, file: Path) -> Array:
        """The values of an Arrow array, `[n, *shape]`."""
        if has_texts(self.kind):
            return arrow_texts(array, self.shape[0], ".".join(self.names), file)
        return arrow_values(array, file).reshape(len(array), *self.shape)


class ArrowEpisodeReader(EpisodeReader):
    """Reads the episodes of Minari's Arrow form: `data/<number>/part-0.arrow`, with one row more than steps.

    Raises:
        DatasetError: there are no episodes, or a column holds no numbers.
    """

    datasets: list[ArrowColumn]

    def __init__(
        self, folder: Path, metadata: Mapping[str, Any], infos: bool, exclude: Sequence[KeyPath], allowed: int
    ) -> None:
        self.path, self._skipped = str(folder), tuple(exclude)
        numbers = sorted(int(one.name) for one in folder.iterdir() if one.name.isdecimal())
        self._names = [folder / str(number) / ARROW_FILE for number in numbers]
        if not self._names:
            raise DatasetError(self.path, "holds no episode")
        self.datasets = []
        self._spaces = {role: _space(metadata, role) for role in (_OBSERVATIONS, _ACTIONS, _INFOS)}
        with open_arrow(self._names[0]) as table:
            for role in (_OBSERVATIONS, _ACTIONS, *((_INFOS,) if infos and _INFOS in table.schema.names else ())):
                self._add_below(self._field(table.schema, role), (role,), (role,), self._spaces[role])
            for role in (_REWARDS, _TERMINATIONS, _TRUNCATIONS):
                self.datasets.append(ArrowColumn((role,), REWARD, 0, (), self._field(table.schema, role).type))
        self._row_bytes = sum(c.nbytes * (1 + c.more) for c in self.datasets)
        if self._row_bytes > allowed:
            raise DatasetError(
                self.path, f"has rows of {self._row_bytes} bytes or more; max_row_bytes= allows {allowed}"
            )

    def _field(self, schema: Any, name: str) -> Any:
        if name not in schema.names:
            raise DatasetError(str(self._names[0]), f"has no column {name!r}; it has {schema.names}")
        return schema.field(name)

    def _add_below(self, field: Any, names: tuple[str, ...], place: tuple[str, ...], space: Any) -> None:
        """Adds a column, or all columns of a struct; in `place` a Tuple's entries are called as in HDF5 files."""
        key = _key(place, self._spaces[place[0]])
        if key in self._skipped:
            return
        if children := arrow_children(field.type):
            is_tuple = isinstance(space, dict) and isinstance(space.get("subspaces"), list)
            for child in children:
                named = f"{INDEX}{child.name}" if is_tuple else child.name
                self._add_below(child, (*names, child.name), (*place, named), _subspace(space, named))
            return
        more = 0 if names[0] == _ACTIONS else 1
        if has_texts(field.type):
            self.datasets.append(ArrowColumn(names, key, more, (_text_width(space),), field.type))
            return
        if not has_fixed_numbers(field.type):
            raise DatasetError(
                str(self._names[0]),
                f"has {'.'.join(names)!r} as {field.type}; engram reads texts, numbers, bools, and lists of "
                f"numbers of one length: exclude=[{pytree.format_key(key)}] leaves it out",
            )
        said = (field.metadata or {}).get(b"shape")
        shape = _shape_of(space) if said is None else [int(size) for size in re.findall(rb"\d{1,18}", said)]
        listed = [field.type.list_size] if is_fixed_list(field.type) else []
        if shape is None or math.prod(shape) != math.prod(listed):
            shape = listed
        self.datasets.append(ArrowColumn(names, key, more, tuple(shape), field.type))

    def _parts_of(self, file: Path, most: int | None) -> Iterator[EpisodePart]:
        with open_arrow(file) as table:
            arrays = [arrow_column(table, c.names, c.kind, file) for c in self.datasets]
            steps = len(arrays[-1]) - 1
            if steps < 0:
                raise DatasetError(str(file), "has no rows; an episode has one more than steps")
            for start in range(0, steps, most or max(1, steps)):
                n = min(steps - start, most or steps)
                values = [
                    c.values_of(array.slice(start, n + c.more), file)
                    for c, array in zip(self.datasets, arrays, strict=True)
                ]
                yield EpisodePart(n, values)


def _space(metadata: Mapping[str, Any], role: str) -> Any:
    """The JSON of the space of observations or actions; None where the metadata have none."""
    text = metadata.get(_SPACE_OF.get(role, ""))
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def _subspace(space: Any, name: str) -> Any:
    """The JSON of an entry's space, which is called `_index_3` in a Tuple; None where there is none."""
    below = space.get("subspaces") if isinstance(space, dict) else None
    if isinstance(below, list):
        at = name.removeprefix(INDEX)
        return below[int(at)] if at.isdecimal() and len(at) < 10 and int(at) < len(below) else None
    return below.get(name) if isinstance(below, dict) else None


def _shape_of(space: Any) -> list[int] | None:
    """The shape of the values of a space, of which this is the JSON; None where it does not say it."""
    said = space if isinstance(space, dict) else {}
    shape = said.get("shape", said.get("n"))
    if said.get("type") == "MultiDiscrete":
        try:
            shape = list(np.shape(said.get("nvec", 0)))
        except ValueError:  # ragged lists
            return None
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    return shape if is_shape else None


def _text_width(space: Any) -> int:
    """The bytes of the texts of a space, of which this is the JSON: as many as observations of it have."""
    length, characters = (space.get(key) if isinstance(space, dict) else None for key in ("max_length", "charset"))
    if type(length) is not int or length < 0 or not isinstance(characters, str):
        return text_width(None, ())
    return text_width(length, characters)


class KnownSpaces(NamedTuple):
    """The spaces of the steps to write, as far as they are known."""

    encoded: EncodedSpaces
    is_given: bool  #: whether the caller said that the steps have these specs; else those that fit count
    given: Mapping[str, Any]  #: by role, the space that the caller gave

    def columns(self, role: str, pairs: Sequence[KeyPair], layout: RowLayout) -> list[RawColumn]:
        """How the entries of a role are written.

        Raises:
            ValueError: they are not of the space that was given.
        """
        leaves = [layout.leaves[pair.root] for pair in pairs]
        if role not in self.given:
            return [self._column(leaf) for leaf in leaves]
        spaces, keys = given_spaces(role, self.given[role]), {leaf.path for leaf in leaves}
        if keys != spaces.keys():
            raise ValueError(
                f"the space {self.given[role]} has {_shown(spaces)}; the {role} are {_shown(keys)}; "
                "exclude= leaves keys out. Nothing was written"
            )
        return [encoded_column(leaf, spaces[leaf.path].space, None) for leaf in leaves]

    @property
    def spaces(self) -> dict[KeyPath, LeafSpace]:
        """The spaces of all entries whose space is known, by key."""
        known = dict(self.encoded.spaces)
        for role, space in self.given.items():
            known |= given_spaces(role, space)
        return known

    def _column(self, leaf: LeafSpec) -> RawColumn:
        specs, batch_dims, spaces = self.encoded
        spec = specs.get(leaf.path)
        if spec is None:
            return _widest(leaf)
        shape = tuple(spec.shape[batch_dims:])
        if (spec.dtype, shape) != (leaf.dtype, tuple(leaf.shape)):
            if self.is_given:
                raise ValueError(
                    f"{pytree.format_key(leaf.path)} is {str(leaf.dtype)[6:]} {list(leaf.shape)}, the environment has "
                    f"{str(spec.dtype)[6:]} {list(shape)}; give the one that the steps are from. Nothing was written"
                )
            return _widest(leaf)  # a collector's postproc may change its batches
        known = spaces.get(leaf.path)
        if known is not None:
            return encoded_column(leaf, known.space, spec)
        try:
            one = spec[(0,) * batch_dims] if batch_dims else spec  # type: ignore[index]
            space = space_from_spec(one)
        except (TypeError, ValueError, ImportError):  # it has no space, or gymnasium is missing
            return _widest(leaf)
        return encoded_column(leaf, space, spec)


def given_spaces(role: str, space: Any) -> dict[KeyPath, LeafSpace]:
    """The spaces below one that the caller gave, by the keys that steps of an environment with this space have."""
    path = ("action",) if role == _ACTIONS else observation_path(space, *OBSERVATION)
    return leaf_spaces(space, path)


def _shown(keys: Iterable[KeyPath]) -> str:
    return ", ".join(sorted(map(pytree.format_key, keys)))


class EpisodeWriter:
    """Writes blocks of trajectories to an open file, given as h5py's low-level id."""

    def __init__(self, file: Any, known: KnownSpaces) -> None:
        self._file, self._known = file, known
        self._columns_of: dict[str, list[RawColumn]] = {}  # by role, in the order of its pairs
        self._h5 = import_h5py("writing HDF5 datasets")
        self._mapping: KeyMapping | None = None
        self.episodes = 0
        self._writers: list[H5RowWriter] = []
        self._last_next: list[Array] = []  # the next observations and infos of the last step that was written

    def spaces(self) -> dict[str, Any]:
        """The spaces of observations and actions as JSON."""
        assert self._mapping is not None
        made = {}
        for role, pairs in ((_OBSERVATIONS, self._mapping.observations), (_ACTIONS, self._mapping.actions)):
            columns = zip(pairs, self._columns_of[role], strict=True)
            made[_SPACE_OF[role]] = space_of([(pair.name, column.space) for pair, column in columns])
        return made | {_SPACE_OF[role]: space_json(space) for role, space in self._known.given.items()}

    def write(self, block: StepBlock, advance: Callable[[int], None]) -> int:
        """Writes the parts of trajectories in a block; returns their steps.

        Raises:
            ValueError: the steps do not fit this format, or those before them.
        """
        if self._mapping is None:
            layout = RowLayout.of(block.rows, 1)
            self._mapping = mapping = KeyMapping(layout, "a Minari dataset", "next", self._known.spaces)
            for role, pairs in ((_OBSERVATIONS, mapping.observations), (_ACTIONS, mapping.actions)):
                self._columns_of[role] = self._known.columns(role, pairs, mapping.layout)
            leaves = [mapping.leaf(pair.root if pair.root >= 0 else pair.next) for pair in mapping.infos]
            self._columns_of[_INFOS] = [_widest(leaf) for leaf in leaves]
        if block.parts is None:
            raise ValueError(
                "the steps have neither done flags nor trajectory ids: engram cannot tell where episodes end"
            )
        arrays = [t.numpy() for t in self._mapping.layout.fitting(block.rows, 1)]
        self._check_continuous(arrays, block.parts)
        stops = np.cumsum(block.parts[:, 0])
        ends = stops[block.parts[:, 1] + block.parts[:, 0] == block.parts[:, 2]] - 1
        columns = self._columns(arrays, ends)
        stop = 0
        for n, before, length in block.parts.tolist():
            start, stop = stop, stop + n
            if not before:
                self._begin(length)
            self._write_rows(columns, start, stop, ends=before + n == length)
        advance(stop)
        return stop

    def _paired(self) -> list[KeyPair]:
        """Observations and infos at the root, whose dataset has one entry more than the episode has steps."""
        assert self._mapping is not None
        return [p for p in (*self._mapping.observations, *self._mapping.infos) if p.root >= 0]

    def _check_continuous(self, arrays: list[Array], parts: Ints) -> None:
        """ValueError unless each observation is, byte for byte, the next one of the step before: it is stored once."""
        assert self._mapping is not None
        begins = np.zeros(len(arrays[0]), np.bool_)
        firsts = np.concatenate([[0], np.cumsum(parts[:-1, 0])])
        begins[firsts[parts[:, 1] == 0]] = True
        pairs = self._paired()
        for i, pair in enumerate(pairs):
            now, after = arrays[pair.root], arrays[pair.next]
            before = np.concatenate([self._last_next[i] if self._last_next else after[:1], after[:-1]])
            wrong = np.flatnonzero(_differs(now, before) & ~begins)
            if len(wrong):
                part = int(np.searchsorted(np.cumsum(parts[:, 0]), wrong[0], "right"))
                step = int(wrong[0]) - int(firsts[part]) + int(parts[part, 1])
                episode = self.episodes - int(parts[0, 1] > 0) + part
                raise ValueError(
                    f"{pytree.format_key(self._mapping.leaf(pair.root).path)} of step {step} of episode {episode} is "
                    "not the next one of the step before, and a Minari dataset has each observation once; write "
                    "Parquet or HDF5, which keep both. Nothing was written"
                )
        self._last_next = [arrays[pair.next][-1:].copy() for pair in pairs]

    def _columns(self, arrays: list[Array], ends: Ints) -> list[tuple[Array, Array | None]]:
        """The values of each dataset; with those under "next" where the dataset has one entry more than steps."""
        assert self._mapping is not None
        terminated, truncated = self._mapping.flags(arrays, ends)
        pairs = (*self._mapping.observations, *self._mapping.infos, *self._mapping.actions)
        columns: list[tuple[Array, Array | None]] = [
            (arrays[p.root if p.root >= 0 else p.next], arrays[p.next] if p.root >= 0 and p.next >= 0 else None)
            for p in pairs
        ]
        return [*columns, (self._mapping.rewards(arrays), None), (terminated, None), (truncated, None)]

    def _begin(self, length: int) -> None:
        """Creates an episode's group and datasets."""
        assert self._mapping is not None
        h5g = self._h5.h5g
        group = h5g.create(self._file, f"episode_{self.episodes}".encode())
        self._describe(group, {"id": self.episodes, "total_steps": length})
        groups: dict[tuple[str, ...], Any] = {(): group}
        self._writers = []
        mapping = self._mapping
        for role, pairs in (
            (_OBSERVATIONS, mapping.observations),
            (_INFOS, mapping.infos),
            (_ACTIONS, mapping.actions),
        ):
            for pair, column in zip(pairs, self._columns_of[role], strict=True):
                rows = length + (pair.root >= 0 and pair.next >= 0)
                names = (role, *pair.name)
                for depth in range(1, len(names)):
                    if names[:depth] not in groups:
                        groups[names[:depth]] = h5g.create(groups[names[: depth - 1]], names[depth - 1].encode())
                self._writers.append(H5RowWriter(groups[names[:-1]], names[-1], rows, column.shape, column.dtype))
        if not mapping.infos:
            h5g.create(group, b"infos")
        reward = mapping.leaf(mapping.reward)
        shape = () if reward.shape in ((), (1,)) else reward.shape
        self._writers.append(H5RowWriter(group, "rewards", length, shape, _numpy_dtype(reward)))
        for name in ("terminations", "truncations"):
            self._writers.append(H5RowWriter(group, name, length, (), np.dtype(np.bool_)))
        self.episodes += 1

    def _describe(self, group: Any, attributes: dict[str, int]) -> None:
        h5 = self._h5
        scalar = h5.h5s.create(h5.h5s.SCALAR)
        for name, value in attributes.items():
            attribute = h5.h5a.create(group, name.encode(), h5.h5t.NATIVE_INT64, scalar)
            attribute.write(np.array(value, np.int64))

    def _write_rows(self, columns: list[tuple[Array, Array | None]], start: int, stop: int, ends: bool) -> None:
        raw = [column.values for role in (_OBSERVATIONS, _INFOS, _ACTIONS) for column in self._columns_of[role]]
        for writer, (values, after), as_raw in itertools.zip_longest(self._writers, columns, raw):
            rows = values[start:stop]
            if ends and after is not None:
                rows = np.concatenate([rows, after[stop - 1 : stop]])
            writer.write(rows if as_raw is None else as_raw(rows))


def _numpy_dtype(leaf: Any) -> np.dtype[Any]:
    return np.dtype(str(leaf.dtype).removeprefix("torch."))


def _differs(a: Array, b: Array) -> npt.NDArray[np.bool_]:
    """bool [n]: the rows whose bytes differ."""
    n = len(a)
    if not a.size:
        return np.zeros(n, np.bool_)
    rows = [np.ascontiguousarray(x).reshape(n, -1).view(np.uint8) for x in (a, b)]
    different: npt.NDArray[np.bool_] = (rows[0] != rows[1]).any(1)
    return different


FILE, METADATA, ARROW_FILE = "main_data.hdf5", "metadata.json", "part-0.arrow"
_MINARI_VERSION = "0.5.4"  # whose layout the files have


def read_minari(
    path: str | os.PathLike[str],
    buffer: Any,
    *,
    infos: bool = True,
    exclude: Sequence[Key] = (),
    progress: bool = True,
    max_row_bytes: int | str = MAX_ROW_BYTES,
) -> int:
    """Reads the episodes of a Minari dataset into a buffer; returns the number of steps.

    Steps are those of `iter_minari`, with trajectory ids above the buffer's own. They are written in blocks of about 16
    MB: where one is refused, those before it stay, and nothing of it is written.

    Args:
        path: the dataset's folder, the `data` folder in it, or `main_data.hdf5`.
        buffer: a buffer whose storage has ndim=1.
        infos: read `infos`, too.
        exclude: keys (as engram has them) to leave out.
        progress: show a progress bar, if standard error is a terminal.
        max_row_bytes: the most that a row may take while it is decoded, and a compressed chunk: bytes, or "2GB".
            A small file may claim a row of any size.

    Raises:
        DatasetError: a file is damaged, a row is too large, or an episode has other keys, shapes or dtypes than the
            first; the message names file, episode and key, `rows_read` is the number of steps that were written to the
            buffer.
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
    with _open_episodes(path, infos, exclude, max_row_bytes) as (episodes, total):
        first = next_trajectory(buffer.storage)
        return ingest(episodes.blocks(first), buffer, episodes.path, total, progress)


def iter_minari(
    path: str | os.PathLike[str],
    *,
    infos: bool = True,
    exclude: Sequence[Key] = (),
    max_row_bytes: int | str = MAX_ROW_BYTES,
) -> Iterator[TensorDict]:
    """The episodes of a Minari dataset, one after the other: TED batches `[steps]`.

    The T + 1 observations are the root's (the first T) and those under `"next"` (the last T); so are `infos`, as
    `("info", ...)`. `observation` is a Box's key, those of a Dict are its own, those of a Tuple `("observation", "0")`
    and so on. Rewards and flags are `[T, 1]`; values and dtypes are those of the file. Episodes are numbered from 0 in
    `("collector", "traj_ids")`.

    Raises:
        DatasetError, ImportError: as `read_minari`.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/pole-v0"
        >>> follows = {"observation": torch.ones(2, 4), "reward": torch.ones(2, 1), "done": torch.ones(2, 1).bool()}
        >>> steps = TensorDict({"observation": torch.ones(2, 4), "action": torch.ones(2), "next": follows}, [2])
        >>> write_minari(steps, folder)
        2
        >>> [len(episode) for episode in iter_minari(folder)]
        [1, 1]
    """
    with _open_episodes(path, infos, exclude, max_row_bytes) as (episodes, _):
        for number, part in enumerate(episodes.parts(None)):
            yield episodes.batch_of_parts([part], [number])


def minari_size(path: str | os.PathLike[str]) -> DatasetSize:
    """Episodes of a dataset, and its steps where its metadata have them; errors as `read_minari`."""
    with _open_episodes(path, True, ()) as (episodes, steps):
        return DatasetSize(steps, len(episodes))


@contextmanager
def _open_episodes(
    path: str | os.PathLike[str],
    infos: bool,
    exclude: Sequence[Key],
    max_row_bytes: int | str = MAX_ROW_BYTES,
) -> Iterator[tuple[EpisodeReader, int | None]]:
    """Opens a dataset: its episodes and, if its metadata have it, the number of their steps."""
    excluded = tuple(as_path(key, "exclude") for key in exclude)
    with ExitStack() as stack:
        episodes: EpisodeReader
        place = _arrow_folder(user_path(path))
        if place is not None:
            metadata, allowed = read_json_object(place / METADATA), parse_bytes(max_row_bytes, "max_row_bytes")
            episodes = ArrowEpisodeReader(place, metadata, infos, excluded, allowed)
        else:
            place = _find(user_path(path))
            metadata = read_json_object(place.with_name(METADATA))
            source = stack.enter_context(open_foreign(place, max_row_bytes))
            episodes = H5EpisodeReader(source, metadata, infos, excluded)
        expected = metadata.get("total_episodes")
        if expected is not None and expected != len(episodes):
            raise DatasetError(str(place), f"has {len(episodes)} episodes, {METADATA} says {expected}")
        total = metadata.get("total_steps")
        yield episodes, total if type(total) is int else None


def _arrow_folder(path: Path) -> Path | None:
    """The folder of the episodes, where a dataset has Arrow's form."""
    folders = (folder for folder in (path / "data", path) if (folder / METADATA).is_file())
    return next((f for f in folders if read_json_object(f / METADATA).get("data_format") == "arrow"), None)


def _find(path: Path) -> Path:
    for file in (path / "data" / FILE, path / FILE, path):
        if file.is_file():
            return file
    if (path / "data" / METADATA).is_file():
        raise DatasetError(str(path), f"data/{FILE} is missing")
    raise FileNotFoundError(2, f"there is no Minari dataset (data/{FILE})", str(path))


def write_minari(
    source: Any,
    path: str | os.PathLike[str],
    *,
    dataset_id: str | None = None,
    env: Any = None,
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
    written: readers derive them.

    The dataset has the spaces of the environment, where it is known, and values as these spaces have them: one-hot
    vectors and categories become the numbers of Discrete and MultiDiscrete, from their start on, `Text` becomes text.
    Entries that are not the environment's, and all of them without an environment, are written as they are stored,
    with the widest space of their dtype and shape; keys "0", "1", ... of one TensorDict are then a Tuple.

    Args:
        source: a buffer or storage; a TensorDict `[time]` or `[envs, time]`, or an iterable of such, as a collector. Of
            an iterable, trajectories are kept in memory until they end.
        path: the folder to create.
        dataset_id: Minari's name of it; the folder's name.
        env: the environment that the steps are from (transforms included), or a collector of it; None: a collector's
            own, if `source` is one.
        observation_space, action_space: gymnasium spaces, instead of those of `env`: the stored values are theirs,
            one-hot vectors, or texts as uint8 `[width]`, under the keys that `GymEnv` gives them.
        metadata: more entries for `metadata.json`: `author`, `description`, `env_spec` (a string of JSON), ...
        exclude: keys to leave out.
        end_key, traj_key: what ends a trajectory, as for `SliceSampler`.
        overwrite: replace the Minari dataset at `path`, if engram wrote it and nothing else is in its folder.
        progress: show a progress bar, if standard error is a terminal.

    Raises:
        ValueError: nothing to write, keys without a place in this format (all are listed), an observation that is
            not the next one of the step before, or values that are not of the given spaces or environment.
        TypeError: `env` is not an environment or collector of engram's, or a space cannot be written.
        FileExistsError: there is something at `path`.
        ImportError: h5py is missing: `pip install "engram[h5]"`.

    Example:
        >>> import json, pathlib, tempfile
        >>> from engram.collectors import SyncDataCollector
        >>> from engram.envs import GymEnv
        >>> folder = tempfile.mkdtemp() + "/cartpole-v0"
        >>> collector = SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=50, total_frames=100)
        >>> write_minari(collector, folder)
        100
        >>> json.loads(pathlib.Path(folder, "data/metadata.json").read_text())["action_space"]
        '{"type": "Discrete", "dtype": "int64", "start": 0, "n": 2}'
    """
    folder, total = user_path(path), 0
    steps = episode_source(source, end_key, traj_key, exclude)
    known = _known_spaces(source, env, observation_space, action_space)
    with (
        new_folder(folder, overwrite, Replaceable("a Minari dataset of engram's", _not_ours)) as new,
        progress_bar(f"writing {folder}", steps.total, progress) as advance,
    ):
        (new / "data").mkdir()
        with create_plain(new / "data" / FILE) as file:
            writer = EpisodeWriter(file.id, known)
            for block in steps.blocks():
                total += writer.write(block, advance)
        described = {
            "total_episodes": writer.episodes,
            "total_steps": total,
            "data_format": "hdf5",
            "jpeg_encoding": False,
            **{name: json.dumps(space) for name, space in writer.spaces().items()},
            "dataset_size": round((new / "data" / FILE).stat().st_size / 1e6, 1),
            "dataset_id": folder.name if dataset_id is None else dataset_id,
            "minari_version": _MINARI_VERSION,
            **(metadata or {}),
        }
        (new / "data" / METADATA).write_text(json.dumps(described))
    return total


def _known_spaces(source: Any, env: Any, observation_space: Any, action_space: Any) -> KnownSpaces:
    """The known spaces of steps; TypeError for an `env` that does not know them, or a space of an unsupported kind."""
    spaces = {_OBSERVATIONS: observation_space, _ACTIONS: action_space}
    given = {role: space for role, space in spaces.items() if space is not None}
    for space in given.values():
        _refuse_empty(space_json(space), space)
    encoded = EncodedSpaces.of(source if env is None else env)
    if env is not None and encoded is None:
        raise TypeError(
            f"env is an environment or a collector of engram's, got a {type(env).__name__}: GymEnv(env) makes one of "
            "gymnasium's, TransformedEnv(env) one of TorchRL's; observation_space= and action_space= take spaces"
        )
    return KnownSpaces(encoded or EncodedSpaces({}, 0, {}), env is not None, given)


def _refuse_empty(json_of: Mapping[str, Any], whole: Any) -> None:
    """Raises ValueError for a Dict or Tuple without entries, for which steps have nothing."""
    parts = json_of.get("subspaces", True)
    if not parts:
        raise ValueError(
            f"the space {whole} has a {json_of['type']} without entries; leave it out. Nothing was written"
        )
    for part in parts.values() if isinstance(parts, dict) else parts if isinstance(parts, list) else ():
        _refuse_empty(part, whole)


def _not_ours(path: Path) -> str | None:
    """Why a folder is no Minari dataset that engram wrote, and nothing else; None where it is."""
    if path.is_symlink() or not path.is_dir():
        return "it is not a folder"
    for folder, names in ((path, {"data"}), (path / "data", {FILE, METADATA})):
        for other in {entry.name for entry in folder.iterdir()} ^ names:
            return f"{other} is missing" if other in names else f"{other} is not part of it"
    metadata = path / "data" / METADATA
    if metadata.is_symlink() or not metadata.is_file():
        return f"{METADATA} is not a file"
    return replaceable_file("its file", is_ours).refusal(path / "data" / FILE)


def _is_folder(place: Path) -> bool:
    files = place / "data" / FILE, place / FILE
    return any(file.is_file() for file in files) or any(place.glob(f"data/*/{ARROW_FILE}"))


DATASET_FORMAT = DatasetFormat(
    kind="Minari dataset",
    batches=iter_minari,
    size=minari_size,
    is_folder=_is_folder,
    is_file=lambda place, start: place.name == FILE and start == HDF5_MAGIC,
    word="minari",
    write=write_minari,
    holds_flags_only=True,
)
