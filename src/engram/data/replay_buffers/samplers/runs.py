"""Draws of slices: which entries of a batch say where its slices begin and end, and what is drawn for lost ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

import engram._native as _native
from engram._copies import CopiedAsPlain
from engram.data.replay_buffers.samplers.base import EMPTY, DrawTotals, StorageState, has_rows
from engram.data.replay_buffers.samplers.draw import Draw, EpochInfo, Mark, is_per_row
from engram.pytree import MASK, KeyPath, format_key, get_entry, has_batch_size, has_keys, set_entry
from engram.store.episodes import EpisodeIndex

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


_MAX_RETRIES = 10_000  # while a writer replaces the rows of a tiny lane
Seed = Callable[[], Tensor]  # int64 [1] from the sampler's generator, at each call


TRUNCATED: KeyPath = ("next", "truncated")
Weight = Literal["trajectories", "steps"]
#: By how much slices may be cut at one end: not at all, to one step, by so many steps at most.
Cut: TypeAlias = bool | int


class Marking(NamedTuple):
    """How slices are marked in batches.

    Attributes:
        marks: what is marked in a batch, in this order; `masks`: the paths of masks of padding among them.
        flags: keys in info, and paths in batches, of the flags that info gives, too.
    """

    marks: tuple[Mark, ...]
    masks: tuple[KeyPath, ...]
    flags: dict[Any, KeyPath]


class RunPlan(NamedTuple):
    """How slices of batches of one size are drawn and marked.

    Attributes:
        rule: what it was made of; of another rule, another plan is to be made.
        n: slices of a batch; `native`: how each of them is drawn.
    """

    rule: RunRule
    batch_size: int
    n: int
    native: _native.SliceRule
    marking: Marking


class RunRule(NamedTuple):
    """Which runs of rows a batch is made of, and what is marked in them, as data: a slice sampler's settings.

    Attributes:
        num_slices, slice_len: of a batch and of a slice; one of them is not None.
        counts_slices: whether a batch size is a number of slices, and not of rows.
        strict_length: whether a trajectory must be as long as a slice, less its burn-in.
        burn_in: so many rows at the begin of a slice may lie before its trajectory; only with `pads_around`.
        span: by how much slices may be cut at both ends; only without `pads_around`.
        weight: what is drawn uniformly.
        pads_around: slices have one length, with padding before and behind their steps, which repeats the nearest.
        pad_output: slices have one length, with padding behind their steps, which repeats the last.
        truncated_key, init_key, mask_key, slice_key: where slices are marked; None: they are not.
        adds_init: whether the first step is also marked where data have no flag for it.
    """

    num_slices: int | None = None
    slice_len: int | None = None
    counts_slices: bool = False
    strict_length: bool = True
    burn_in: int = 0
    span: tuple[Cut, Cut] = (False, False)
    weight: Weight = "trajectories"
    pads_around: bool = False
    pad_output: bool = False
    truncated_key: KeyPath | None = TRUNCATED
    init_key: KeyPath | None = None
    mask_key: KeyPath = MASK
    slice_key: KeyPath | None = None
    adds_init: bool = False

    def changed(self, name: str, value: Any) -> RunRule:
        """This rule with another value of one field; TypeError where nothing would say how long slices are."""
        rule = self._replace(**{name: value})
        if value is None and name == "slice_len" and self.counts_slices:
            raise TypeError("slice_len is the number of frames of a stack; it cannot be None")
        if value is None and name in ("num_slices", "slice_len") and rule.num_slices is None and rule.slice_len is None:
            other = "slice_len" if name == "num_slices" else "num_slices"
            if (self.num_slices if name == "num_slices" else self.slice_len) is not None:  # else a size comes later
                raise TypeError(f"{name} cannot be None where {other} is: assign {other} first")
        return rule

    def plan(self, batch_size: int) -> RunPlan:
        """How batches of this size are drawn; ValueError: they cannot be."""
        n, length = self.divide(batch_size)
        return RunPlan(self, batch_size, n, self.native(length), self.marking())

    def marking(self) -> Marking:
        """How slices are marked, whatever the size of their batch."""
        flags: tuple[KeyPath, ...] = ()
        if self.truncated_key is not None:
            flags = (*self.marked_keys, (*self.truncated_key[:-1], "terminated"))  # the last is given as it is
        return Marking(self.marks, self.masks, {shown_key(path): path for path in flags})

    def divide(self, batch_size: int) -> tuple[int, int]:
        """Number and length of the slices of a batch."""
        if self.slice_len is not None and self.counts_slices:
            return batch_size, self.slice_len
        name, given = ("num_slices", self.num_slices) if self.slice_len is None else ("slice_len", self.slice_len)
        assert given is not None
        if batch_size % given:
            raise ValueError(f"batch_size={batch_size} is no multiple of {name}={given}; choose one that is")
        return (given, batch_size // given) if self.slice_len is None else (batch_size // given, given)

    def native_for(self, batch_size: int | None) -> _native.SliceRule:
        """How slices of batches of this size are drawn; it may be None where `slice_len` says how long they are."""
        if self.slice_len is not None:
            return self.native(self.slice_len)
        if batch_size is None:
            raise ValueError("with num_slices the batch size decides how long slices are; pass batch_size")
        return self.native(self.divide(batch_size)[1])

    def native(self, length: int) -> _native.SliceRule:
        """How slices of this length are drawn; ValueError: there are none."""
        self.check_length(length)
        by_window = self.weight == "steps"
        before, after = self.rows_cut(length)
        return _native.SliceRule(
            length, length - self.burn_in if self.strict_length else 1, before, after, pad=self.pads_around,
            by_window=by_window, pad_behind=self.pad_output and not self.pads_around,
        )  # fmt: skip

    def check_length(self, length: int) -> None:
        """ValueError where nothing would be left of slices of this length."""
        if self.burn_in >= length:
            raise ValueError(
                f"burn_in={self.burn_in} leaves no row to train on of sequences of {length}; slice_len counts both"
            )
        if not self.pads_around and max(self._cuts(length)) >= length:
            raise ValueError(
                f"span={self.span} leaves nothing of slices of {length} steps; a number must be less than {length}"
            )

    def rows_cut(self, length: int) -> tuple[int, int]:
        """By how many rows slices of this length may stand out of their trajectory, at its begin and end."""
        if self.pads_around:
            return (length - 1 if self.weight == "steps" else self.burn_in), 0
        before, after = self._cuts(length)
        if self.weight == "steps" and not self.strict_length and not self.counts_slices:
            after = length - 1  # every step is a start; of slices that are counted, one for each row, it is the end
        return before, after

    def _cuts(self, length: int) -> tuple[int, int]:
        begin, end = (cut if type(cut) is int else (length - 1) * cut for cut in self.span)
        return begin, end

    @property
    def marked_keys(self) -> tuple[KeyPath, ...]:
        """Where the last step of each slice is marked: truncated, done beside it."""
        key = self.truncated_key
        return () if key is None else (key, (*key[:-1], "done"))

    @property
    def masks(self) -> tuple[KeyPath, ...]:
        """Where masks of rows that are padding go; none where there is no padding."""
        return (self.mask_key,) if self.pads_around or self.pad_output else ()

    @property
    def marks(self) -> tuple[Mark, ...]:
        """What is marked in a batch, in this order: the content of an entry, and its path."""
        marks: list[Mark] = [("last", path) for path in self.marked_keys]
        if self.init_key is not None and not self.adds_init:
            marks.append(("first if any", self.init_key))
        marks += [("mask", path) for path in self.masks]
        if self.slice_key is not None:
            marks.append(("slice_id", self.slice_key))
        if self.init_key is not None and self.adds_init:
            marks.append(("first", self.init_key))
        return tuple(marks)


def shown_key(path: KeyPath) -> Any:
    """A key as users write it: a string where it is one."""
    return path if len(path) > 1 else path[0]


class RunSource(StorageState):
    """A way to draw the runs of which slices are made: uniformly, in epochs, by priority or the newest ones.

    It is the state of a sampler.
    """

    def draw_runs(
        self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, seed: Seed, n: int
    ) -> _native.SliceBatch:
        """n slices by a rule; the last ones of an epoch may be fewer. RuntimeError: there is nothing to draw."""
        raise NotImplementedError

    def run_totals(self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, newest: bool) -> DrawTotals:
        """As `Sampler.totals`."""
        raise NotImplementedError

    def can_draw_runs(self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, n: int) -> bool:
        """Whether `draw_runs` would give n slices or, of an epoch, a batch."""
        return self.run_totals(storage, episodes, rule, True).share > 0

    def more_runs(
        self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, seed: Seed, n: int, epoch: int
    ) -> _native.SliceBatch | None:
        """Up to n slices more of this epoch, such that a last batch remains; None: there are none."""
        return None

    @property
    def full_batches(self) -> bool:
        """Whether batches that are not full are left out."""
        return False

    def most_rows_of_runs(self, n: int, length: int, stored: int) -> int:
        """The most rows that n slices of this length can have, without padding, of so many stored ones."""
        return n * min(length, stored)

    def run_info(self, entries: dict[Any, Any]) -> dict[Any, Any]:
        """The info of the slices that were drawn last."""
        return entries

    def run_entries(self, slices: _native.SliceBatch) -> dict[Any, Any]:
        """What info says of these slices beside what it says of all."""
        return {}


class UniformRuns(RunSource):
    """Runs that are drawn uniformly, with replacement."""

    def draw_runs(
        self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, seed: Seed, n: int
    ) -> _native.SliceBatch:
        drawn = seed()
        return draw_beside_writers(storage, episodes, rule, lambda: episodes.draw(storage, rule, drawn, n))

    def run_totals(self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, newest: bool) -> DrawTotals:
        return DrawTotals(float(episodes.choices(storage, rule)))


class NewestRuns(RunSource):
    """Runs of the newest trajectories, one of each, as near to its end as whole ones are; nothing is random.

    First one of each environment's newest trajectory, then one of each one's second newest, and so on; from the newest
    on again where there are fewer.
    """

    def draw_runs(
        self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, seed: Seed, n: int
    ) -> _native.SliceBatch:
        return draw_beside_writers(storage, episodes, rule, lambda: episodes.newest(storage, rule, n))

    def run_totals(self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, newest: bool) -> DrawTotals:
        raise TypeError("draws of the newest runs cannot be divided among several storages")

    def can_draw_runs(self, storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule, n: int) -> bool:
        return episodes.choices(storage, rule) > 0


def draw_beside_writers(
    storage: Storage,
    episodes: EpisodeIndex,
    rule: _native.SliceRule,
    draw: Callable[[], _native.SliceBatch | None],
) -> _native.SliceBatch:
    """What `draw` gives when it finds a trajectory that is long enough, which writers may hide for a moment."""
    slices = draw()
    if slices is None:
        with storage.mutex:  # after somebody who is replacing all rows
            slices = draw()
    for _ in range(_MAX_RETRIES):
        if slices is not None:
            return slices
        time.sleep(0)
        before = _counters(storage)
        slices = draw()
        if slices is None and not _is_being_written(before) and before == _counters(storage):
            break  # nobody has written since the look before the draw
    raise nothing_to_draw(storage, episodes, rule)


def nothing_to_draw(storage: Storage, episodes: EpisodeIndex, rule: _native.SliceRule) -> RuntimeError:
    """The error where no trajectory is long enough."""
    if not has_rows(storage, storage.lanes):
        return RuntimeError(f"{EMPTY} Add or extend it first.")
    lanes, shorter = storage.lanes, "shorter slices, or strict_length=False"
    if lanes.store.lanes > 1 and rule.min_length > lanes.store.lane_capacity:
        shorter += (
            f"; or a storage of fewer lanes (a smaller lanes=n, or none): this one has {lanes.store.lanes} of "
            f"{lanes.store.lane_capacity} steps each, and no trajectory goes on from one to the next"
        )
    return RuntimeError(
        f"no trajectory has {rule.min_length} steps; the longest that is stored has {episodes.longest(storage)}. Use "
        f"{shorter}"
    )


def _counters(storage: Storage) -> list[dict[str, Any]]:
    return storage.lanes.counters()


def _is_being_written(lanes: list[dict[str, Any]]) -> bool:
    """Whether a writer is replacing rows: a tiny lane shows fewer for that moment."""
    return any(lane["claimed"] > lane["published"] for lane in lanes)


class Runs(Protocol):
    """Slices of a batch, as `mark` needs them: of the native core, or made of rows that came over a network."""

    def last(self) -> Tensor: ...
    def first(self) -> Tensor: ...
    def mask(self) -> Tensor: ...
    def ids(self) -> Tensor: ...
    def mark_last(self, tensor: Any) -> bool: ...
    def mark_first(self, tensor: Any) -> bool: ...


class RunsOfRows:
    """Slices that came as rows, all of one length.

    Args:
        last: True in the last step of each, bool [n]; mask: False where they are padded, bool [n]; None: nowhere.
    """

    def __init__(self, last: Tensor, mask: Tensor | None, length: int) -> None:
        self._last, self._length = last, length
        self._mask = torch.ones_like(last) if mask is None else mask

    def last(self) -> Tensor:
        return self._last.unsqueeze(-1)

    def first(self) -> Tensor:
        steps = self._mask.reshape(-1, self._length)
        return (steps & (steps.cumsum(1) == 1)).reshape(-1, 1)

    def mask(self) -> Tensor:
        return self._mask

    def ids(self) -> Tensor:
        return torch.arange(len(self._last), device="cpu") // self._length

    def mark_last(self, tensor: Any) -> bool:
        """False: flags are not set in place."""
        return False

    mark_first = mark_last


def mark(batch: Any, marks: tuple[Mark, ...], runs: Runs, flags: dict[Any, KeyPath]) -> dict[Any, Tensor]:
    """Does to a batch with keys what the marks say, in place and in their order; the native core has its twin.

    "last" and "first" set a leaf to True at that step of each slice and add one, bool [n, 1], where there is none. With
    "first if any" only a leaf that a flat batch has is set; a plain dict is flat where it has one flag a step.

    Args:
        flags: keys, and paths of entries in the batch.

    Returns:
        the entries of `flags` by their keys, False where the batch has none; nothing of one without keys.
    """
    if not has_keys(batch):
        return {}
    leaves: dict[KeyPath, Any] = {}
    for what, path in marks:
        if what == "mask" or what == "slice_id":
            put(batch, path, runs.mask() if what == "mask" else runs.ids())
            continue
        leaf = get_entry(batch, path)
        if what == "first if any" and not (isinstance(leaf, Tensor) and _is_flat(batch, leaf)):
            continue
        set_in_place, of_rows = (runs.mark_last, runs.last) if what == "last" else (runs.mark_first, runs.first)
        if leaf is None:
            leaf = of_rows()
            put(batch, path, leaf)
        elif not set_in_place(leaf):
            leaf[of_rows().flatten().to(leaf.device)] = 1
        leaves[path] = leaf
    found: dict[Any, Tensor] = {}
    for key, path in flags.items():
        flag = leaves[path] if path in leaves else get_entry(batch, path)
        found[key] = torch.zeros_like(runs.last()) if flag is None else flag
    return found


def _is_flat(batch: Any, leaf: Tensor) -> bool:
    return bool(batch.ndim == 1) if has_batch_size(batch) else leaf.numel() == len(leaf)


def put(batch: Any, path: KeyPath, value: Tensor) -> None:
    """Adds an entry at a path, with the dictionaries on the way to it.

    Raises:
        TypeError: a tensorclass has no such field.
    """
    if isinstance(batch, dict):
        return set_entry(batch, path, value)
    value = value if batch.device is None else value.to(batch.device)
    try:
        batch.set(path, value)
    except (AttributeError, KeyError, ValueError) as error:
        raise TypeError(
            f"a {type(batch).__name__} has no place for {format_key(path)}, where slices are marked: {error}; add it, "
            "or pass None for this key"
        ) from error


class RunDraw(Draw):
    """The rows of slices: one that has lost a row is replaced as a whole.

    Attributes:
        entries: what info says of slices.
        again: draws n slices, or fewer at the end of an epoch; `rest`: up to n slices more of the same epoch, or None.
        anew: draws the whole batch anew, for a user's own sampler, whose info may say more of each row.
        Others: as Draw.
    """

    runs: _native.SliceBatch
    entries: Callable[[_native.SliceBatch], dict[Any, Any]]
    anew: Callable[[], Draw] | None = None

    def redraw(self, positions: list[int]) -> Draw:
        if self.anew is not None and self._has_own_rows():
            return self.anew()
        ids, runs = self.runs.ids(), self.runs
        which = sorted({int(ids[position]) for position in positions if position < len(ids)})
        if self.rest is not None and len(which) < len(runs):
            fresh = self.rest(len(which))
            done = 0 if fresh is None else len(fresh)
            runs = runs.replaced(which[:done], fresh) if done else runs
            runs = runs.without(which[done:])
        else:
            while which:  # an epoch's last draw may give fewer
                fresh = self.again(len(which))
                runs = runs.replaced(which[: len(fresh)], fresh)
                which = which[len(fresh) :]
                if which and self.rest is not None:  # the next epoch has no place in this batch
                    runs, which = runs.without(which), []
        if runs is not self.runs:
            self.runs = self.seen = runs
            self.slots = runs.slots()
            self.info.update(self.entries(runs))
        return self

    def _has_own_rows(self) -> bool:
        """Whether a user's own sampler has put entries with a value for each row into the info."""
        known = {*self.entries(self.runs), *self.flags}
        return any(is_per_row(value, self.runs.rows) for key, value in dict.items(self.info) if key not in known)


class SliceInfo(CopiedAsPlain, EpochInfo):
    """The info of a batch of slices: a dict that makes the flags of its rows when somebody looks for them.

    Who draws without a buffer finds the flags as they are stored at that moment; a buffer puts those of the batch that
    it read in their place.
    """

    _plain: ClassVar[Any] = dict
    promised: tuple[Any, ...] = ()  # keys that `make` will add
    make: Callable[[], dict[Any, Any]] | None = None

    def _complete(self) -> None:
        if self.make is not None:
            make, self.make, self.promised = self.make, None, ()
            for key, value in make().items():
                self.setdefault(key, value)

    def __missing__(self, key: Any) -> Any:
        if key not in self.promised:
            raise KeyError(key)
        self._complete()
        return self[key]

    def __contains__(self, key: Any) -> bool:
        return dict.__contains__(self, key) or key in self.promised

    def __iter__(self) -> Iterator[Any]:  # also that of dict(info) and {**info}
        self._complete()
        return dict.__iter__(self)

    def __len__(self) -> int:
        self._complete()
        return dict.__len__(self)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: Any) -> bool:
        return bool(dict(self) == other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(dict(self))

    def keys(self) -> Any:
        self._complete()
        return dict.keys(self)

    def values(self) -> Any:
        self._complete()
        return dict.values(self)

    def items(self) -> Any:
        self._complete()
        return dict.items(self)

    def get(self, key: Any, default: Any = None) -> Any:
        self._complete()
        return dict.get(self, key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self.promised:
            self._complete()
        return dict.pop(self, key, *default)

    def copy(self) -> dict[Any, Any]:
        return dict(self)


def stored_flags(storage: Storage, flags: dict[Any, KeyPath], runs: _native.SliceBatch) -> dict[Any, Tensor]:
    """The flags of these slices' rows as they are stored, with the last step of each marked: bool [n, 1]."""
    slots, last = runs.slots(), runs.last()
    truncated, done, terminated = (_stored_flag(storage, path, slots) for path in flags.values())
    truncated = last if truncated is None else truncated | last
    done = truncated if done is None else done | last
    terminated = torch.zeros_like(last) if terminated is None else terminated
    return dict(zip(flags, (truncated, done, terminated), strict=True))


def _stored_flag(storage: Storage, path: KeyPath, slots: Tensor) -> Tensor | None:
    """The flags of stored rows, bool [n, 1]; None where these have no such leaf."""
    with storage.mutex:
        if storage.leaf(path) is None:
            return None
        lanes = storage.lanes
        rows = storage.column(path, slots // lanes.envs)
        each = rows.reshape(len(slots), lanes.envs, -1)[torch.arange(len(slots), device="cpu"), slots % lanes.envs]
    return each.cpu().to(torch.bool).any(1, keepdim=True)
