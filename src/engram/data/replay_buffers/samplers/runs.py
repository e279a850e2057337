"""Draws of slices: which entries of a batch say where its slices begin and end, and what is drawn for lost ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

import engram._native as _native
from engram._copies import CopiedAsPlain
from engram.data.replay_buffers.samplers.base import EMPTY, DrawTotals, StorageState
from engram.data.replay_buffers.samplers.draw import Draw, EpochInfo, Mark, is_per_row
from engram.pytree import KeyPath, format_key, get_entry, has_batch_size, has_keys, set_entry
from engram.store.episodes import EpisodeIndex

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


_MAX_RETRIES = 10_000  # while a writer replaces the rows of a tiny lane
Seed = Callable[[], Tensor]  # int64 [1] from the sampler's generator, at each call


class RunSource(StorageState):
    """A way to draw the runs of which slices are made: uniformly, in epochs or by priority; the state of a sampler."""

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
    if not len(storage):
        return RuntimeError(f"{EMPTY} Add or extend it first.")
    return RuntimeError(
        f"no trajectory has {rule.min_length} steps; the longest that is stored has {episodes.longest(storage)}. Use "
        "shorter slices, or strict_length=False"
    )


def _counters(storage: Storage) -> list[dict[str, Any]]:
    lanes = storage.lanes
    return [] if lanes is None else lanes.counters()


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
        return torch.arange(len(self._last)) // self._length

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
        assert lanes is not None
        rows = storage.column(path, slots // lanes.envs)
        each = rows.reshape(len(slots), lanes.envs, -1)[torch.arange(len(slots)), slots % lanes.envs]
    return each.cpu().to(torch.bool).any(1, keepdim=True)
