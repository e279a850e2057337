"""Samplers that draw slices of trajectories, and the entries by which a batch says where its slices begin and end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from engram import _native
from engram._advice import advised
from engram._system import drawing
from engram.data.replay_buffers.samplers.base import (
    EMPTY,
    DrawTotals,
    EpochInfo,
    Index,
    Sampler,
    check_counts,
    check_epoch,
    check_full_batches,
    is_per_row,
    stored_rows,
)
from engram.data.replay_buffers.samplers.prioritized import PrioritizedSampler, PriorityTable
from engram.pytree import (
    Key,
    KeyPath,
    as_path,
    format_key,
    get_entries,
    get_entry,
    has_batch_size,
    has_keys,
    map_outermost,
    set_entry,
)
from engram.store.copies import CopiedAsPlain
from engram.store.episodes import EpisodeIndex
from engram.store.indexing import to_slots

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


def mark_last(batch: Any, path: KeyPath, slices: _native.SliceBatch) -> Tensor:
    """Sets a leaf to True at each slice's last step, in place; adds one where there is none: bool [n, 1]."""
    return _marked(batch, path, slices.mark_last, slices.last)


def mark_first(batch: Any, path: KeyPath, slices: _native.SliceBatch) -> Tensor:
    """Sets a leaf to True at each slice's first step, in place; adds one where there is none: bool [n, 1]."""
    return _marked(batch, path, slices.mark_first, slices.first)


def mark_first_if_any(batch: Any, path: KeyPath, slices: _native.SliceBatch) -> Tensor | None:
    """As `mark_first`, but only where a flat batch has such a leaf, else it stays: bool [n, ...]; None: it has none.

    A plain dict is flat where it has one flag a step: `[n]` or `[n, 1]`.
    """
    leaf = get_entry(batch, path)
    if not isinstance(leaf, Tensor):
        return None
    is_flat = batch.ndim == 1 if has_batch_size(batch) else leaf.numel() == len(leaf)
    return mark_first(batch, path, slices) if is_flat else leaf


def _marked(batch: Any, path: KeyPath, mark: Callable[[Any], bool], flags: Callable[[], Tensor]) -> Tensor:
    leaf: Tensor | None = get_entry(batch, path)
    if leaf is None:
        leaf = flags()
        put(batch, path, leaf)
    elif not mark(leaf):
        leaf[flags().flatten().to(leaf.device)] = 1
    return leaf


def mark_rows(batch: Any, sampler: SliceSampler, last: Tensor, mask: Tensor | None) -> None:
    """Marks slices in a batch that came as rows, in place, as a buffer on one machine does.

    Args:
        sampler: one with `slice_len`; all slices have that many rows.
        last: where slices end, bool [n]; mask: False where they are padded, bool [n].
    """
    if not has_keys(batch):
        return
    for path in sampler.marked_keys:
        _mark_where(batch, path, last)
    if mask is not None:
        put(batch, sampler.mask_key if isinstance(sampler, SequenceSampler) else MASK, mask)
    length = sampler.slice_len
    assert length is not None
    if sampler.init_key is not None:
        steps = (torch.ones_like(last) if mask is None else mask).reshape(-1, length)
        first = (steps & (steps.cumsum(1) == 1)).flatten()
        if isinstance(sampler, SequenceSampler) or get_entry(batch, sampler.init_key) is not None:
            _mark_where(batch, sampler.init_key, first)
    if sampler.slice_key is not None:
        put(batch, sampler.slice_key, torch.arange(len(last)) // length)


def _mark_where(batch: Any, path: KeyPath, flags: Tensor) -> None:
    leaf: Tensor | None = get_entry(batch, path)
    if leaf is None:
        put(batch, path, flags.unsqueeze(-1))
    else:
        leaf[flags] = 1


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


TRUNCATED = ("next", "truncated")
MASK = ("collector", "mask")
Weight = Literal["trajectories", "steps"]
#: By how much slices may be cut at one end: not at all, to one step, by so many steps at most.
Cut: TypeAlias = bool | int
_MAX_RETRIES = 10_000  # while a writer replaces the rows of a tiny lane


@advised
class SliceSampler(Sampler, built_in=True):
    """Slices of trajectories: a trajectory uniformly among those that are long enough, then a start uniformly.

    So steps of short trajectories are drawn more often than others: an episode of 20 steps and one of 1,000 each get
    half of the draws. `weight="steps"` draws all starts that a slice can have with equal probability instead.

    A batch is flat, slice after slice, `[batch_size]`: `batch.reshape(num_slices, -1)` has a row for each where all are
    whole. The last step of each is marked truncated and done, `terminated` stays. Where steps have a flag `init_key`,
    it is set at the first step of each, so that recurrent modules begin there with the state stored in that step, and
    carry none over from the slice before; batches `[B, T]`, of stored sequences, keep theirs. What is stored is not
    changed. `info["slice_id"]` (int64 [n]) says which slice a row is of, and with `truncated_key` `info` holds the
    marked flags, and `terminated`, under their keys (bool [n, 1]; also of a sampler that is used without a buffer:
    `sampler.sample(storage, n)`). A slice never crosses the end of a trajectory, the write cursor, a seam, or goes from
    one lane or environment to another; it wraps around the ring. What is new since the last batch is taken in at each,
    whatever the size of the buffer.

    Args:
        num_slices, slice_len: exactly one of them; the batch size is a multiple of it.
        end_key, end_keys, traj_key: where trajectories end, as for `EpisodeIndex`.
        ends, trajectories: flags or ids of a dataset that does not change, instead of keys, as for `EpisodeIndex`.
        cache_values: accepted for users of other libraries; boundaries are always kept and never read twice.
        truncated_key: bool [n, 1], added where the data lack it, and `done` beside it; None: neither is marked.
        init_key: flags of the first steps of trajectories, where data have them; None: they are not marked.
        strict_length: draw only from trajectories of at least a slice's length. False: a shorter one is a slice whole,
            and the batch has fewer rows.
        span: slices may be cut by the begin and the end of their trajectory, `(begin, end)` or one value for both, so
            that steps near them are as likely as others. With L the slice length and a trajectory of steps [a, b),
            windows of L steps start uniformly in [a, b - L]; with `begin` from a - L + 1 on, with `end` up to b - 1;
            what lies outside is left out, and the batch has fewer rows. With both, each step of a trajectory is in L of
            its b - a + L - 1 windows. A number i instead of True: at least L - i steps of a slice remain at that end.
        pad_output: fill slices that are short, behind, with copies of their last step: each has L rows, the last step
            is marked, not the last row, and `("collector", "mask")` (bool [n], in the batch and in `info`) is False in
            the padding.
        slice_key: also put `slice_id` into the batch, here.
        weight: what is drawn uniformly. "trajectories": a trajectory that is long enough, then a start in it. "steps":
            one of all admissible starts in all trajectories that are long enough; that is every step from which
            `slice_len` steps lie in its trajectory, with `strict_length=False` every stored step (a slice is then cut
            by the end of its trajectory). With `span` one of all windows. A batch costs the same either way.
        compile, use_gpu, step_key: accepted, without effect: slices are drawn by native code, and steps of a trajectory
            are stored in their order. `fragmented` may be False.

    Raises:
        ValueError: a setting that is not allowed; at `sample`, a batch size that does not divide.
        RuntimeError: nothing is stored, or no trajectory is long enough; it says how long the longest is.
        KeyError: the data have no such key.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=3, end_key="end"))
        >>> end = torch.tensor([0, 0, 0, 1, 0, 0, 0, 1]).bool()
        >>> _ = rb.extend(TensorDict({"step": torch.arange(8), "end": end}, [8]))
        >>> batch, info = rb.sample(6, return_info=True)
        >>> batch["step"].reshape(-1, 3).diff().tolist(), info["slice_id"].tolist()
        ([[1, 1], [1, 1]], [0, 0, 0, 1, 1, 1])
        >>> batch["next", "truncated"].reshape(-1, 3).tolist()
        [[False, False, True], [False, False, True]]
    """

    _copied_as: ClassVar[Mapping[str, Any]] = {**Sampler._copied_as, "_plan": None}

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Key | None = TRUNCATED,
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        span: Cut | tuple[Cut, Cut] = False,
        slice_key: Key | None = None,
        weight: Weight = "trajectories",
        compilable: bool = False,
    ) -> None:
        Sampler.__init__(self, compilable)  # not the next class: a child that draws by priority has a table of its own
        if (num_slices is None) == (slice_len is None):
            raise TypeError(f"give exactly one of num_slices and slice_len, got {num_slices} and {slice_len}")
        self.num_slices = _positive(num_slices, "num_slices")
        self.slice_len = _positive(slice_len, "slice_len")
        self.episodes = EpisodeIndex(
            end_key=end_key, end_keys=end_keys, traj_key=traj_key, ends=ends, trajectories=trajectories
        )
        self.cache_values = cache_values
        self.truncated_key = None if truncated_key is None else as_path(truncated_key, "truncated_key")
        self._flags: tuple[KeyPath, ...] = ()  # marked, marked, and handed out as it is
        if self.truncated_key is not None:
            beside = self.truncated_key[:-1]
            self._flags = self.truncated_key, (*beside, "done"), (*beside, "terminated")
        self._flag_keys = tuple(map(_shown_key, self._flags))
        self._flag_names = tuple(flag[-1] for flag in self._flags)
        self.strict_length = strict_length
        self.pad_output = bool(pad_output)
        self.span = _pair(span)
        if self.slice_len is not None:
            _rows_cut(self.span, self.slice_len)
        self.slice_key = None if slice_key is None else as_path(slice_key, "slice_key")
        self.init_key: KeyPath | None = None if init_key is None else as_path(init_key, "init_key")
        if weight not in get_args(Weight):
            raise ValueError(f"weight must be one of {get_args(Weight)}, got {weight!r}")
        self.weight = weight
        self._plan: tuple[int, int, _native.SliceRule] | None = None  # of the last batch size: it, slices, their rule

    @property
    def traj_key(self) -> Key | None:
        """Where trajectory ids are; None: where they usually are, if anywhere."""
        return None if self.episodes.traj_key is None else _shown_key(self.episodes.traj_key)

    @property
    def end_key(self) -> Key | None:
        """Where flags are that end trajectories; None with `end_keys`."""
        return None if self.episodes.end_key is None else _shown_key(self.episodes.end_key)

    @property
    def end_keys(self) -> tuple[Key, ...] | None:
        """Where flags are that end trajectories, where there are several."""
        return None if self.episodes.end_keys is None else tuple(map(_shown_key, self.episodes.end_keys))

    @property
    def marked_keys(self) -> tuple[KeyPath, ...]:
        """Where the last step of each slice is marked: truncated, done beside it. None with `truncated_key=None`."""
        return self._flags[:2]

    @property
    def _episode_index(self) -> EpisodeIndex:
        return self.episodes

    # ---- drawing ----
    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        index, info = self._sample_rows(storage, batch_size)
        return index, self._with_stored_flags(storage, info)

    def _sampling(self) -> Callable[[Storage, int], tuple[Index, dict[str, Any]]]:
        return self._sample_rows if self._built_in else super()._sampling()  # the buffer reads rows with their flags

    def _sample_checked(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        index, info = super()._sample_checked(storage, batch_size)
        if not self._built_in and "slices" in info and self._marks_rows_of(storage):
            slots = to_slots(index, storage.env_shape, storage.max_size or 0)
            if not torch.equal(slots, info["slices"].slots()):
                raise IndexError(
                    f"{self._kind}.sample returned {len(slots)} rows that are not the {info['slices'].rows} of the "
                    "slices in its info, whose ends are to be marked; return the index of the base as it is, or an "
                    "info without 'slices' and 'slice_id', so that nothing is marked"
                )
        return index, info

    def _marks_rows_of(self, storage: Storage) -> bool:
        """Whether batches of this storage are marked: entries that are marked only where they are must be there."""
        layout = storage.layout
        return any(what != "first if any" or layout is None or path in layout.paths for what, path in self._marks())

    #: Attributes that decide what `_planned` gives, beside those of which `_plan` is made.
    _watched: tuple[str, ...] = ("_plan", "pad_output", "slice_key", "init_key")

    def _native_draw(self, storage: Storage) -> _native.RowDraw | None:
        return _native.SliceDraw(self, drawing, partial(self._planned, storage), self._watched)

    def _planned(
        self, storage: Storage, batch_size: int
    ) -> tuple[_native.Episodes, _native.Store, int, _native.SliceRule, tuple[tuple[str, KeyPath], ...]] | None:
        """What the native draw of such batches needs; None: `sample` draws."""
        plan = self._plan
        if plan is None or plan[0] != batch_size:
            plan = self._make_plan(batch_size)
        packed = self.episodes.packed(storage)
        return None if packed is None else (*packed, plan[1], plan[2], self._marks())

    def _marks(self) -> tuple[tuple[str, KeyPath], ...]:
        """What `_mark` does to a batch, in this order: the content of an entry, and its path."""
        marks = [("last", path) for path in self.marked_keys]
        if self.init_key is not None:
            marks.append(("first if any", self.init_key))
        if self.pad_output:
            marks.append(("mask", MASK))
        if self.slice_key is not None:
            marks.append(("slice_id", self.slice_key))
        return tuple(marks)

    def _sample_rows(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """As `sample`, without flags."""
        with self.lock:
            plan = self._plan
            if plan is None or plan[0] != batch_size:
                plan = self._make_plan(batch_size)
            _, n, rule = plan
            return self._info(storage, self._slices(storage, rule, n))

    def totals(self, storage: Storage, batch_size: int | None = None, *, newest: bool = True) -> DrawTotals:
        with self.lock:
            return DrawTotals(float(self.episodes.choices(storage, self._rule_of(batch_size))))

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        self._divide(batch_size)  # for its error
        return bool(len(storage)) and self.totals(storage, batch_size).share > 0

    def _rule_of(self, batch_size: int | None) -> _native.SliceRule:
        if self.slice_len is not None:
            return self._rule(self.slice_len)
        if batch_size is None:
            raise ValueError("with num_slices the batch size decides how long slices are; pass batch_size")
        return self._rule(self._divide(batch_size)[1])

    def _max_rows(self, storage: Storage, batch_size: int) -> int:
        if self.pad_output:
            return batch_size
        n, length = self._divide(batch_size)
        return n * min(length, stored_rows(storage))

    def _make_plan(self, batch_size: int) -> tuple[int, int, _native.SliceRule]:
        n, length = self._divide(batch_size)
        self._plan = batch_size, n, self._rule(length)
        return self._plan

    def _divide(self, batch_size: int) -> tuple[int, int]:
        """Number and length of the slices of a batch."""
        name, given = ("num_slices", self.num_slices) if self.slice_len is None else ("slice_len", self.slice_len)
        assert given is not None
        if batch_size % given:
            raise ValueError(f"batch_size={batch_size} is no multiple of {name}={given}; choose one that is")
        return (given, batch_size // given) if self.slice_len is None else (batch_size // given, given)

    def _rule(self, length: int) -> _native.SliceRule:
        before, after = _rows_cut(self.span, length)
        by_window = self.weight == "steps"
        if by_window and not self.strict_length:
            after = length - 1  # every step is a start
        return _native.SliceRule(
            length, length if self.strict_length else 1, before, after, by_window=by_window, pad_behind=self.pad_output
        )

    def _slices(self, storage: Storage, rule: _native.SliceRule, n: int) -> _native.SliceBatch:
        seed = self._draw_seed(storage, storage.lanes)
        slices = self._draw(storage, rule, seed, n)
        if slices is None:
            with storage.mutex:  # after somebody who is replacing all rows
                slices = self._draw(storage, rule, seed, n)
        for _ in range(_MAX_RETRIES):
            if slices is not None:
                return slices
            time.sleep(0)
            before = _counters(storage)
            slices = self._draw(storage, rule, seed, n)
            if slices is None and not _is_being_written(before) and before == _counters(storage):
                break  # nobody has written since the look before the draw
        raise self._nothing_to_draw(storage, rule)

    def _draw(self, storage: Storage, rule: _native.SliceRule, seed: Tensor, n: int) -> _native.SliceBatch | None:
        """n slices; None: there is no trajectory that is long enough."""
        return self.episodes.draw(storage, rule, seed, n)

    def _nothing_to_draw(self, storage: Storage, rule: _native.SliceRule) -> RuntimeError:
        if not len(storage):
            return RuntimeError(f"{EMPTY} Add or extend it first.")
        return RuntimeError(
            f"no trajectory has {rule.min_length} steps; the longest that is stored has "
            f"{self.episodes.longest(storage)}. Use shorter slices, or strict_length=False"
        )

    def _info(self, storage: Storage, slices: _native.SliceBatch) -> tuple[Index, dict[str, Any]]:
        slots = slices.slots()
        return (storage.from_slots(slots) if storage.ndim > 1 else slots), self._entries(slices)

    def _with_stored_flags(self, storage: Storage, info: dict[str, Any]) -> dict[str, Any]:
        """The same info, with the flags of its rows when somebody looks for them."""
        if not self._flag_keys:
            return info
        lazy = SliceInfo(info)
        lazy.epoch = info.epoch if isinstance(info, EpochInfo) else None
        lazy.promised, lazy.make = self._flag_keys, partial(self._stored_flags, storage, info["slices"])
        return lazy

    def _entries(self, slices: _native.SliceBatch) -> dict[Any, Any]:
        """What to say of these slices."""
        # "slices" is for `_redraw`, `_find_stale` and `_postprocess`, which takes it out.
        entries: dict[Any, Any] = {"slice_id": slices.ids(), "slices": slices}
        if self.pad_output:
            entries[MASK] = slices.mask()
        return entries

    def _stored_flags(self, storage: Storage, slices: _native.SliceBatch) -> dict[Any, Tensor]:
        """The flags of these slices' rows as they are stored, with the last step of each marked: bool [n, 1]."""
        slots, last = slices.slots(), slices.last()
        truncated, done, terminated = (_stored_flag(storage, path, slots) for path in self._flags)
        truncated = last if truncated is None else truncated | last
        done = truncated if done is None else done | last
        terminated = torch.zeros_like(last) if terminated is None else terminated
        return dict(zip(self._flag_keys, (truncated, done, terminated), strict=True))

    # ---- after the read ----
    def _find_stale(self, storage: Storage, slots: Tensor, info: dict[str, Any]) -> list[int] | None:
        if "slices" not in info:
            return None  # a user's child has drawn steps of its own choice
        lanes = storage.lanes
        assert lanes is not None
        stale = info["slices"].stale(lanes.store)
        return torch.isin(info["slice_id"], torch.tensor(stale)).nonzero().flatten().tolist() if stale else None

    def _redraw(self, storage: Storage, slots: Tensor, info: dict[str, Any], positions: list[int]) -> Tensor:
        """Other slices for those that lost a row; with slices of several lengths the batch may get another one."""
        if "slices" not in info:
            return super()._redraw(storage, slots, info, positions)
        if self._has_own_rows(info):
            return self._draw_all_again(storage, info)
        ids = info["slice_id"]
        which = sorted({int(ids[position]) for position in positions if position < len(ids)})
        if not which:
            return slots
        slices: _native.SliceBatch = info["slices"]
        while which:  # an epoch's last draw may give fewer
            fresh = self._slices(storage, slices.rule, len(which))
            slices = slices.replaced(which[: len(fresh)], fresh)
            which = which[len(fresh) :]
        info.update(self._entries(slices))
        return slices.slots()

    def _has_own_rows(self, info: dict[str, Any]) -> bool:
        """Whether a child of a user's own has put entries with a value for each row into the info."""
        if self._built_in:
            return False
        slices = info["slices"]
        known = {*self._entries(slices), *self._flag_keys}
        return any(is_per_row(value, slices.rows) for key, value in dict.items(info) if key not in known)

    def _draw_all_again(self, storage: Storage, info: dict[str, Any]) -> Tensor:
        """Slots of another batch, whose info takes the place of this one: a child adds entries in `sample` only."""
        index, fresh = self._sample_checked(storage, self._asked_for(info["slices"]))
        if isinstance(info, SliceInfo):
            info.promised, info.make = (), None  # the flags are those of the batch that is read
        if isinstance(info, EpochInfo):
            info.epoch = fresh.epoch if isinstance(fresh, EpochInfo) else None
        dict.clear(info)
        dict.update(info, dict(dict.items(fresh)))
        return to_slots(index, storage.env_shape, storage.max_size or 0)

    def _asked_for(self, slices: _native.SliceBatch) -> int:
        """The batch size that these slices were drawn for."""
        return len(slices) * slices.rule.length

    def _postprocess(self, batch: Any, info: dict[str, Any]) -> Any:
        if "slices" not in info:
            return batch
        slices = info.pop("slices")
        if type(info) is SliceInfo:  # the flags of the batch are those that were read
            info.promised, info.make = (), None
        if has_keys(batch):
            self._mark(batch, info, slices)
        return batch

    def _mark(self, batch: Any, info: dict[str, Any], slices: _native.SliceBatch) -> None:
        if self._flags:
            flags: dict[Any, Any] = info  # where other libraries have them under their keys, too
            truncated_key, done_key, terminated_key = self._flag_keys
            truncated, done, terminated = get_entries(batch, self._flags[0][:-1], self._flag_names)
            marked = truncated is not None and slices.mark_last(truncated)
            flags[truncated_key] = truncated if marked else mark_last(batch, self._flags[0], slices)
            marked = done is not None and slices.mark_last(done)
            flags[done_key] = done if marked else mark_last(batch, self._flags[1], slices)
            flags[terminated_key] = torch.zeros_like(slices.last()) if terminated is None else terminated
        if self.init_key is not None:
            mark_first_if_any(batch, self.init_key, slices)
        if self.pad_output:
            put(batch, MASK, slices.mask())
        if self.slice_key is not None:
            put(batch, self.slice_key, info["slice_id"])

    # ---- state ----
    def _config(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("num_slices", "slice_len", "strict_length", "span", "weight")}
        return {**super()._config(), **own, **self.episodes.settings}

    def _get_cursor(self) -> Any:
        """Nothing: a draw changes the generator alone."""

    def _set_cursor(self, cursor: Any) -> None:
        pass

    def __repr__(self) -> str:
        settings = f"strict_length={self.strict_length}, span={self.span}{self._weight_shown}"
        return f"{type(self).__name__}({self._size_shown}, {settings})"

    @property
    def _size_shown(self) -> str:
        """The size of slices, as `repr` shows it."""
        return f"num_slices={self.num_slices}" if self.slice_len is None else f"slice_len={self.slice_len}"

    @property
    def _weight_shown(self) -> str:
        return "" if self.weight == "trajectories" else f", weight={self.weight!r}"


def _positive(n: Any, name: str) -> int | None:
    if n is None:
        return None
    if isinstance(n, bool) or not hasattr(n, "__index__") or int(n) < 1:
        raise ValueError(f"{name} must be a positive integer, got {n!r}")
    return int(n)


def _shown_key(path: KeyPath) -> Any:
    """A key as users write it: a string where it is one."""
    return path if len(path) > 1 else path[0]


def _pair(span: Any) -> tuple[Cut, Cut]:
    pair = tuple(span) if isinstance(span, tuple | list) else (span, span)
    if len(pair) != 2 or not all(isinstance(s, bool) or (hasattr(s, "__index__") and int(s) >= 0) for s in pair):
        raise ValueError(
            f"span is a bool, a number of steps of 0 or more, or a pair of such (begin, end), got {span!r}"
        )
    begin, end = (s if isinstance(s, bool) else int(s) for s in pair)
    return begin, end


def _rows_cut(span: tuple[Cut, Cut], length: int) -> tuple[int, int]:
    """By how many rows slices of this length may be cut at their begin and end."""
    begin, end = (cut if type(cut) is int else (length - 1) * cut for cut in span)
    if max(begin, end) >= length:
        raise ValueError(f"span={span} leaves nothing of slices of {length} steps; a number must be less than {length}")
    return begin, end


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


def _counters(storage: Storage) -> list[dict[str, Any]]:
    lanes = storage.lanes
    return [] if lanes is None else lanes.counters()


def _is_being_written(lanes: list[dict[str, Any]]) -> bool:
    """Whether a writer is replacing rows: a tiny lane shows fewer for that moment."""
    return any(lane["claimed"] > lane["published"] for lane in lanes)


class SliceSamplerWithoutReplacement(SliceSampler, built_in=True):
    """Epochs over trajectories: a slice of each one that is long enough, at a start drawn uniformly.

    Trajectories that become long enough during an epoch join the next one; those that are overwritten, or have become
    too short, are skipped. The last batch of an epoch may have fewer slices.

    Args:
        drop_last: leave out a last batch that is not full.
        shuffle: trajectories in random order; else lane by lane, environment by environment, oldest first.
        Others: as SliceSampler; there is no `weight`.

    Raises:
        TypeError: a `weight`.

    Example:
        >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode", shuffle=False)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> _ = rb.extend(TensorDict({"episode": torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])}, [8]))
        >>> [batch["episode"].tolist() for batch in rb]
        [[0, 0, 1, 1], [2, 2]]
    """

    _copied_as: ClassVar[Mapping[str, Any]] = {**SliceSampler._copied_as, "_walk": None}

    def __init__(self, *, drop_last: bool = False, shuffle: bool = True, **slices: Any) -> None:
        if "weight" in slices:
            raise TypeError("an epoch has each trajectory once: there is no weight; use SliceSampler")
        super().__init__(**slices)
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._epoch: dict[str, Any] | None = None  # all that is saved
        self._walk: _native.SliceEpoch | None = None
        self._store_id: bytes | None = None  # of the store that the epoch is about; None: the next one
        self._is_loaded = False  # and nobody has said where its rows are now
        self._ran_out = False
        self._epoch_id = self._drawn_epoch_id = -1  # of the epoch, and of that of the last draw, in this process

    def _native_draw(self, storage: Storage) -> _native.RowDraw | None:
        return None  # an epoch has a state

    def _info(self, storage: Storage, slices: _native.SliceBatch) -> tuple[Index, dict[str, Any]]:
        index, of_slices = super()._info(storage, slices)
        info = EpochInfo(of_slices)
        info.epoch = self._drawn_epoch_id
        return index, info

    def _check_batch_size(self, batch_size: int | None, storage: Storage) -> None:
        if self.drop_last:
            check_full_batches(batch_size, storage)

    def _max_rows(self, storage: Storage, batch_size: int) -> int:
        return batch_size if self.pad_output else min(batch_size, stored_rows(storage))

    @property
    def _sample_list(self) -> Tensor | None:
        """The trajectories that are left of the epoch, in their order: int64, numbered as they were when it began.

        None before the first epoch; empty after its last batch.
        """
        with self.lock:
            if self._walk is None or self._epoch is None:
                return torch.empty(0, dtype=torch.int64) if self._ran_out else None
            return self._walk.rest(self._epoch["position"])

    def _redraw(self, storage: Storage, slots: Tensor, info: dict[str, Any], positions: list[int]) -> Tensor:
        """Slices of other trajectories of the same epoch; where it has no more, the batch has fewer slices."""
        if "slices" not in info or self._has_own_rows(info):
            return super()._redraw(storage, slots, info, positions)
        slices: _native.SliceBatch = info["slices"]
        ids = info["slice_id"]
        which = sorted({int(ids[position]) for position in positions if position < len(ids)})
        epoch = info.epoch if isinstance(info, EpochInfo) else None
        if self.drop_last or epoch is None or len(which) == len(slices):
            return super()._redraw(storage, slots, info, positions)
        with self.lock:
            fresh = self._draw_more(storage, slices.rule, epoch, len(which))
        done = 0 if fresh is None else len(fresh)
        if fresh is not None:
            slices = slices.replaced(which[:done], fresh)
        slices = slices.without(which[done:])
        info.update(self._entries(slices))
        return slices.slots()

    def _draw_more(self, storage: Storage, rule: _native.SliceRule, epoch: int, n: int) -> _native.SliceBatch | None:
        """Up to n more slices of this epoch, such that a last batch remains, which says that it is the last."""
        now, walk = self._epoch, self._walk
        if now is None or walk is None or self._epoch_id != epoch:
            return None
        seed = self._draw_seed(storage, storage.lanes)
        slices, position, more = self.episodes.take(storage, rule, walk, now["position"], seed, n, 1)
        if not more:
            return None
        now["position"] = position
        return slices

    def _slices(self, storage: Storage, rule: _native.SliceRule, n: int) -> _native.SliceBatch:
        for _ in range(100):  # an epoch can be over before it gave a slice, when writers overwrite all of it
            epoch, walk = self._begin_if_needed(storage, rule)
            if self.drop_last and n > len(walk):
                raise ValueError(
                    f"a batch is {n} slices, but only {len(walk)} trajectories have {rule.min_length} steps, and "
                    "drop_last leaves out batches that are not full; sample fewer"
                )
            seed = self._draw_seed(storage, storage.lanes)
            slices, position, more = self.episodes.take(
                storage, rule, walk, epoch["position"], seed, n, n if self.drop_last else 1
            )
            epoch["position"] = position
            self._drawn_epoch_id, self._ran_out = self._epoch_id, not more
            if self._ran_out:
                self._epoch = self._walk = None
            if len(slices) == n or (len(slices) and not self.drop_last):
                return slices
        raise RuntimeError("writers overwrite the trajectories of an epoch before they can be read; use SliceSampler")

    totals = Sampler.totals  # an epoch is one of a storage

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        slices, length = self._divide(batch_size)
        if not len(storage):
            return False
        with self.lock:
            return self.episodes.choices(storage, self._rule(length)) >= (slices if self.drop_last else 1)

    def _begin_if_needed(self, storage: Storage, rule: _native.SliceRule) -> tuple[dict[str, Any], _native.SliceEpoch]:
        lanes = storage.lanes
        if lanes is None or not (len(lanes) or len(storage)):
            raise self._nothing_to_draw(storage, rule)
        if self._is_loaded:
            self._place(storage, lanes.store)
        store, epoch = lanes.store, self._epoch
        fits = self._goes_on(store) and epoch is not None and epoch["min_length"] == rule.min_length
        self._store_id = store.store_id
        if not fits or epoch is None:
            key = int(self._draw_seed(storage, lanes)) if self.shuffle else 0
            walk = self.episodes.begin_epoch(storage, rule, key, self.shuffle)
            if not len(walk):
                raise self._nothing_to_draw(storage, rule)
            epoch = {
                "key": key, "position": 0, "incarnation": store.incarnation, "min_length": rule.min_length,
                "counts": walk.counts, "lasts": walk.lasts, "lane_capacity": store.lane_capacity,
            }  # fmt: skip
            self._walk, self._epoch_id = walk, next(EpochInfo.ids)
        self._epoch = epoch
        return epoch, self._resumed(store, epoch)

    def _place(self, storage: Storage, store: _native.Store) -> None:
        """Finds the rows of an epoch that was loaded alone in the store of its storage."""
        if self._is_loaded and self._epoch is not None:
            self._rebase(store.incarnation, storage._shifts_since(self._epoch.get("lane_capacity")))

    def _goes_on(self, store: _native.Store) -> bool:
        """Whether the epoch is one of this store."""
        epoch, same_store = self._epoch, self._store_id in (None, store.store_id)
        return same_store and epoch is not None and bool(epoch["incarnation"] == store.incarnation)

    def _resumed(self, store: _native.Store, epoch: dict[str, Any]) -> _native.SliceEpoch:
        if self._walk is None:
            self._check_epoch(store, epoch)
            # A store with more lanes than the one that was saved: they are not in the epoch.
            rest = store.lanes * store.envs - len(epoch["counts"])
            counts, lasts = epoch["counts"] + [0] * rest, epoch["lasts"] + [-1] * rest
            self._walk = _native.SliceEpoch(epoch["key"], self.shuffle, counts, lasts)
            epoch["lane_capacity"] = store.lane_capacity
            self._epoch_id = next(EpochInfo.ids)
        return self._walk

    def _sync(self, storage: Storage) -> None:
        # An epoch that was loaded, and that cannot be one of this store, is an error now and not at the next batch.
        lanes = storage.lanes
        with self.lock:
            if lanes is not None:
                self._place(storage, lanes.store)
            if lanes is not None and self._epoch is not None and self._goes_on(lanes.store):
                self._resumed(lanes.store, self._epoch)

    def empty(self) -> None:
        with self.lock:
            self._epoch = self._walk = None
            self._ran_out = False

    @property
    def ran_out(self) -> bool:
        return self._ran_out

    # ---- state ----
    def state_dict(self) -> dict[str, Any]:
        with self.lock:
            epoch = None if self._epoch is None else {**self._epoch}
            return {"epoch": epoch, "ran_out": self._ran_out, **self._config()}

    def _config(self) -> dict[str, Any]:
        return {**super()._config(), "shuffle": self.shuffle, "drop_last": self.drop_last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.lock:
            super().load_state_dict(state)
            self._epoch, self._walk, self._store_id = state["epoch"] and {**state["epoch"]}, None, None
            self._is_loaded = True
            self._ran_out = bool(state["ran_out"])

    def _differences(self, state: dict[str, Any]) -> list[str]:
        check_epoch(state, "position", "incarnation", "min_length")
        if state["epoch"]:
            check_counts(state["epoch"]["counts"])
            check_counts(state["epoch"]["lasts"], least=-1)
            if len(state["epoch"]["counts"]) != len(state["epoch"]["lasts"]):
                raise ValueError("a saved epoch does not have a last step for each environment")
        return super()._differences(state)

    def _check_state(self, state: dict[str, Any], storage: Storage) -> None:
        super()._check_state(state, storage)
        if storage.lanes is not None and state["epoch"] is not None:
            self._check_epoch(storage.lanes.store, state["epoch"])

    @staticmethod
    def _check_epoch(store: _native.Store, epoch: dict[str, Any]) -> None:
        if any(count > store.lane_capacity for count in epoch["counts"]):
            raise ValueError(f"an epoch of {max(epoch['counts'])} trajectories is not one of this storage")
        if len(epoch["counts"]) > store.lanes * store.envs:
            raise ValueError(f"an epoch of {len(epoch['counts'])} environments is not one of this storage")

    def _get_cursor(self) -> Any:
        return self._epoch and {**self._epoch}, self._walk, self._ran_out, self._is_loaded

    def _set_cursor(self, cursor: Any) -> None:
        epoch, walk, ran_out, is_loaded = cursor
        with self.lock:
            self._epoch, self._walk, self._ran_out = epoch and {**epoch}, walk, ran_out
            self._is_loaded = is_loaded

    def _rebase(self, incarnation: int, shifts: list[int]) -> None:
        with self.lock:
            self._is_loaded = False
            if self._epoch is not None:
                lasts = self._epoch["lasts"]
                if shifts:
                    envs = max(1, len(lasts) // len(shifts))
                    lasts = [max(-1, last - shifts[k // envs]) for k, last in enumerate(lasts)]
                self._epoch = {**self._epoch, "incarnation": incarnation, "lasts": lasts}
                self._walk = None

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, drop_last={self.drop_last}, shuffle={self.shuffle})"


class SequenceSampler(SliceSampler, built_in=True):
    """Slices of exactly `slice_len` rows, to be reshaped to `[num_slices, slice_len]`.

    The first `burn_in` rows of each are there to bring a recurrent state up to date (Kapturowski et al., "Recurrent
    Experience Replay in Distributed Reinforcement Learning", 2019); the others are to be trained on. A trajectory is
    drawn uniformly, then where the training rows start in it, so that its first steps are trained on as well: there
    the burn-in is short or empty, and rows of padding stand before it. With `strict_length=False` also trajectories
    with fewer steps than training rows are drawn, with padding behind. Padding repeats the nearest step of the
    trajectory; `mask_key` is False there.

    `weight="steps"` draws every stored step with equal probability as the last of its sequence, with the steps before
    it in its trajectory, and padding before these where there are fewer than `slice_len`; never behind. That is what a
    learner needs that trains on one step and reads some before it, as DQN with stacks of four frames:
    `SequenceSampler(slice_len=4, burn_in=3, weight="steps")`.

    Args:
        burn_in: rows of burn-in, fewer than `slice_len`, which counts them too.
        mask_key: bool [n], True for steps, False for padding.
        init_key: bool [n, 1], marked at each sequence's first step (marks that the data have stay); None: not at all.
        weight: what is drawn uniformly: "trajectories" (then where training starts in it) or "steps" (the last of each
            sequence).
        strict_length: draw only from trajectories of at least as many steps as there are training rows. The default is
            True with `weight="trajectories"`, and False with "steps", so that every stored step is drawn.
        Others: as SliceSampler; there is no `span` and no `pad_output`. The last step, not the last row, is marked
            truncated and done.

    Raises:
        ValueError: `burn_in` is negative, or leaves no training rows (at `sample` where `num_slices` is given).

    Example:
        >>> sampler = SequenceSampler(num_slices=2, burn_in=2, traj_key="episode")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=10)
        >>> steps = TensorDict({"episode": torch.zeros(9).long(), "step": torch.arange(9)}, [9])
        >>> _ = rb.extend(steps)
        >>> batch = rb.sample().reshape(2, 5)
        >>> batch["step"].tolist(), batch["collector", "mask"].tolist()
        ([[0, 0, 1, 2, 3], [2, 3, 4, 5, 6]], [[False, True, True, True, True], [True, True, True, True, True]])
        >>> warm_up, training = sampler.split(batch)
        >>> warm_up.shape, training["step"].tolist()
        (torch.Size([2, 2]), [[1, 2, 3], [4, 5, 6]])
    """

    def __init__(
        self,
        *,
        burn_in: int = 0,
        mask_key: Key = MASK,
        init_key: Key | None = "is_init",
        weight: Weight = "trajectories",
        strict_length: bool | None = None,
        **slices: Any,
    ) -> None:
        if "span" in slices or "pad_output" in slices:
            raise TypeError(
                "sequences have one length and are padded: there is no span, no pad_output; use SliceSampler"
            )
        strict = weight == "trajectories" if strict_length is None else strict_length
        super().__init__(weight=weight, strict_length=strict, **slices)
        if isinstance(burn_in, bool) or not hasattr(burn_in, "__index__") or int(burn_in) < 0:
            raise ValueError(f"burn_in must be 0 or more, got {burn_in!r}")
        self.burn_in = int(burn_in)
        if self.slice_len is not None:
            self._check_burn_in(self.slice_len)
        self.mask_key = as_path(mask_key, "mask_key")
        self.init_key = None if init_key is None else as_path(init_key, "init_key")

    _watched = (*SliceSampler._watched, "mask_key")

    def _marks(self) -> tuple[tuple[str, KeyPath], ...]:
        init = () if self.init_key is None else (("first", self.init_key),)
        return (*super()._marks(), ("mask", self.mask_key), *init)

    def _check_burn_in(self, length: int) -> None:
        if self.burn_in >= length:
            raise ValueError(
                f"burn_in={self.burn_in} leaves no row to train on of sequences of {length}; slice_len counts both"
            )

    def _max_rows(self, storage: Storage, batch_size: int) -> int:
        return batch_size

    def _rule(self, length: int) -> _native.SliceRule:
        self._check_burn_in(length)
        least = length - self.burn_in if self.strict_length else 1
        if self.weight == "steps":
            return _native.SliceRule(length, least, before=length - 1, pad=True, by_window=True)
        return _native.SliceRule(length, least, before=self.burn_in, pad=True)

    def _entries(self, slices: _native.SliceBatch) -> dict[Any, Any]:
        return {**super()._entries(slices), _shown_key(self.mask_key): slices.mask()}

    def _mark(self, batch: Any, info: dict[str, Any], slices: _native.SliceBatch) -> None:
        super()._mark(batch, info, slices)
        put(batch, self.mask_key, slices.mask())
        if self.init_key is not None:
            mark_first(batch, self.init_key, slices)

    def _config(self) -> dict[str, Any]:
        return {**super()._config(), "burn_in": self.burn_in}

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Burn-in and training rows of a batch `[num_slices, slice_len]`: `[num_slices, burn_in]` and the rest.

        A batch of dicts is one whose tensors have that shape first.
        """
        before, after = (slice(None), slice(self.burn_in)), (slice(None), slice(self.burn_in, None))
        return (
            map_outermost(batch, lambda part: part[before]),
            map_outermost(batch, lambda part: part[after]),
        )

    def __repr__(self) -> str:
        settings = f"burn_in={self.burn_in}, strict_length={self.strict_length}{self._weight_shown}"
        return f"{type(self).__name__}({self._size_shown}, {settings})"


@advised
class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler, built_in=True):
    """Slices of trajectories that start at a step with probability proportional to `(p + eps) ** alpha` of that step.

    A step can be a start when a whole slice from it on lies in its trajectory; with `strict_length=False` also the
    first step of a trajectory that is shorter, which is a slice whole. `info["priority_weight"]` has for each row the
    weight of its slice's start, P_min over the steps that can be starts. Batches and `info` are otherwise those of
    `SliceSampler`, priorities those of `PrioritizedSampler`.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer: as `PrioritizedSampler`.
        span: as `SliceSampler`. With `end` steps near the end of their trajectory can be starts, too; with `begin` a
            slice that starts at the first step of its trajectory is cut by a number of steps that is drawn uniformly.
            The probabilities of starts are those of their priorities all the same.
        Others: as `SliceSampler`. There is no `weight`: priorities decide.

    Raises:
        ValueError: a setting that is not allowed.

    Example:
        >>> sampler = PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=3, end_key="end", truncated_key=None)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler)
        >>> end = torch.tensor([0, 0, 0, 1, 0, 0, 0, 1]).bool()
        >>> index = rb.extend(TensorDict({"step": torch.arange(8), "end": end}, [8]))
        >>> rb.update_priority(index, torch.tensor([0.0, 0, 0, 0, 0, 1, 0, 0]))
        >>> rb.sample(6)["step"].tolist()
        [5, 6, 7, 5, 6, 7]
    """

    def __init__(
        self,
        max_capacity: int | None,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Key | None = TRUNCATED,
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        span: Cut | tuple[Cut, Cut] = False,
        slice_key: Key | None = None,
        compilable: bool = False,
    ) -> None:
        SliceSampler.__init__(
            self, num_slices=num_slices, slice_len=slice_len, end_key=end_key, end_keys=end_keys, traj_key=traj_key,
            ends=ends, trajectories=trajectories, cache_values=cache_values, truncated_key=truncated_key,
            init_key=init_key, strict_length=strict_length, pad_output=pad_output, span=span, slice_key=slice_key,
            compilable=compilable,
        )  # fmt: skip
        self._table = PriorityTable(
            max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, starts_only=True
        )

    # ---- sampling ----
    def _native_draw(self, storage: Storage) -> _native.RowDraw | None:
        return None  # nor by priority, as PrioritizedSampler does

    def _draw(self, storage: Storage, rule: _native.SliceRule, seed: Tensor, n: int) -> _native.SliceBatch | None:
        if storage.lanes is None:
            return None
        return self.episodes.draw_starts(storage, self._table.following(storage, storage.lanes), rule, seed, n)

    def totals(self, storage: Storage, batch_size: int | None = None, *, newest: bool = True) -> DrawTotals:
        with self.lock:
            rule = self._rule_of(batch_size)
            return self._table.totals(
                lambda p: self.episodes.poll_starts(storage, p, rule) if newest else None, storage
            )

    def _entries(self, slices: _native.SliceBatch) -> dict[Any, Any]:
        return {**super()._entries(slices), "priority_weight": self._table.start_weights(slices)}

    def __repr__(self) -> str:
        settings = f"strict_length={self.strict_length}, {self._table.settings_shown()}"
        return f"{type(self).__name__}({self._size_shown}, {settings})"
