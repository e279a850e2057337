"""Samplers that draw slices of trajectories, and the entries by which a batch says where its slices begin and end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor

import engram._native as _native
from engram._advice import advised
from engram._arguments import BUILT_IN
from engram._checks import is_integer
from engram._system import drawing
from engram.data.replay_buffers.samplers.base import (
    DrawTotals,
    Sampler,
    StateSetting,
    stored_rows,
)
from engram.data.replay_buffers.samplers.draw import Draw, DrawPlan, EpochInfo, Index, Mark
from engram.data.replay_buffers.samplers.epochs import SliceEpochs
from engram.data.replay_buffers.samplers.prioritized import PrioritizedSampler, PriorityTable
from engram.data.replay_buffers.samplers.runs import (
    RunDraw,
    RunsOfRows,
    RunSource,
    SliceInfo,
    UniformRuns,
    mark,
    stored_flags,
)
from engram.pytree import Key, KeyPath, as_path, map_outermost
from engram.store.episodes import EpisodeIndex
from engram.store.indexing import to_slots

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


def mark_rows(batch: Any, sampler: SliceSampler, last: Tensor, mask: Tensor | None) -> None:
    """Marks slices in a batch that came as rows, in place, as a buffer on one machine does.

    Args:
        sampler: one with `slice_len`; all slices have that many rows.
        last: where slices end, bool [n]; mask: False where they are padded, bool [n].
    """
    assert sampler.slice_len is not None
    mark(batch, sampler._all_marks(), RunsOfRows(last, mask, sampler.slice_len), {})


T = TypeVar("T")
TRUNCATED = ("next", "truncated")
MASK = ("collector", "mask")
Weight = Literal["trajectories", "steps"]
#: By how much slices may be cut at one end: not at all, to one step, by so many steps at most.
Cut: TypeAlias = bool | int


class DrawSetting(Generic[T]):
    """An attribute of a sampler that decides which slices are drawn, or what is marked in them: the next draw obeys it.

    Args:
        checked: makes of what is assigned the value that it has; ValueError where that is none. None: any is one.
    """

    def __init__(self, checked: Callable[[Any], T] | None = None) -> None:
        self._checked = checked

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    if TYPE_CHECKING:

        def __get__(self, sampler: Any, owner: type | None = None) -> T: ...

    def __set__(self, sampler: SliceSampler, value: Any) -> None:  # read as any attribute
        sampler.__dict__[self._name] = value if self._checked is None else self._checked(value)
        sampler._marking = sampler._plan = None


def _positive(n: Any, name: str) -> int | None:
    if n is None:
        return None
    if not is_integer(n, 1):
        raise ValueError(f"{name} must be a positive integer, got {n!r}")
    return int(n)


def _pair(span: Any) -> tuple[Cut, Cut]:
    pair = tuple(span) if isinstance(span, tuple | list) else (span, span)
    if len(pair) != 2 or not all(isinstance(s, bool) or is_integer(s, 0) for s in pair):
        raise ValueError(
            f"span is a bool, a number of steps of 0 or more, or a pair of such (begin, end), got {span!r}"
        )
    begin, end = (s if isinstance(s, bool) else int(s) for s in pair)
    return begin, end


def _weight(weight: Any) -> Weight:
    if weight not in get_args(Weight):
        raise ValueError(f"weight must be one of {get_args(Weight)}, got {weight!r}")
    return weight  # type: ignore[no-any-return]


def _burn_in(rows: Any) -> int:
    if not is_integer(rows, 0):
        raise ValueError(f"burn_in must be 0 or more, got {rows!r}")
    return int(rows)


def _uniform_runs(attributes: dict[str, Any]) -> RunSource:
    """How runs are drawn by a sampler whose pickle does not say it."""
    return UniformRuns()


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

    _copied_as: ClassVar[Mapping[str, Any]] = {**Sampler._copied_as, "_plan": None, "_marking": None}

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
        self.num_slices = num_slices
        self.slice_len = slice_len
        self.episodes = EpisodeIndex(
            end_key=end_key, end_keys=end_keys, traj_key=traj_key, ends=ends, trajectories=trajectories
        )
        self.cache_values = cache_values
        self.truncated_key = None if truncated_key is None else as_path(truncated_key, "truncated_key")
        self.strict_length = strict_length
        self.pad_output = pad_output
        self.span = span
        if self.slice_len is not None:
            _rows_cut(self.span, self.slice_len)
        self.slice_key = None if slice_key is None else as_path(slice_key, "slice_key")
        self.init_key = None if init_key is None else as_path(init_key, "init_key")
        self.weight = weight
        self.storage_state = UniformRuns()

    storage_state: RunSource  # how runs are drawn
    _of_earlier_pickle = staticmethod(_uniform_runs)
    num_slices = DrawSetting[int | None](partial(_positive, name="num_slices"))
    slice_len = DrawSetting[int | None](partial(_positive, name="slice_len"))
    strict_length = DrawSetting[bool](bool)
    span = DrawSetting[tuple[Cut, Cut]](_pair)
    weight = DrawSetting[Weight](_weight)
    truncated_key = DrawSetting[KeyPath | None]()
    pad_output = DrawSetting[bool](bool)
    slice_key = DrawSetting[KeyPath | None]()
    init_key = DrawSetting[KeyPath | None]()
    _plan: tuple[int, int, _native.SliceRule] | None = None  # of the last batch size: it, slices, their rule
    # What is marked, and keys in info and paths in batches of flags that info gives, too; None: a setting has changed.
    _marking: tuple[tuple[Mark, ...], dict[Any, KeyPath]] | None = None

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
        key = self.truncated_key
        return () if key is None else (key, (*key[:-1], "done"))

    # ---- drawing ----
    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        index, info = self._sample_rows(storage, batch_size)
        _, flags = self._marking or self._mark_by_settings()
        if not flags:
            return index, info
        lazy = SliceInfo(info)
        lazy.epoch = info.epoch if isinstance(info, EpochInfo) else None
        lazy.promised, lazy.make = tuple(flags), partial(stored_flags, storage, flags, info["slices"])
        return index, lazy

    def _draw_batch(self, storage: Storage, batch_size: int) -> Draw:
        anew = None
        if type(self) in BUILT_IN:
            index, info = self._sample_rows(storage, batch_size)  # the buffer reads rows with their flags
            slots = index if type(index) is Tensor else to_slots(index, storage.env_shape, storage.max_size or 0)
        else:
            drawn = super()._draw_batch(storage, batch_size)
            if "slices" not in drawn.info:
                return drawn  # steps of its own choice
            index, slots, info = drawn.index, drawn.slots, drawn.info
            self._check_slots(storage, slots, info["slices"])
            anew = partial(self._draw_batch, storage, batch_size)
        slices = info.pop("slices")
        if type(info) is SliceInfo:  # the flags of the batch are those that are read
            info.promised, info.make = (), None
        lanes = storage.lanes
        assert lanes is not None
        draw = RunDraw(index, slots, info, type(self).__name__, partial(self._slices, storage, slices.rule))
        draw.runs = draw.seen = slices
        draw.store, (draw.marks, draw.flags) = lanes.store, self._marking or self._mark_by_settings()
        draw.entries, draw.anew = self._entries, anew
        epoch = info.epoch if isinstance(info, EpochInfo) else None
        if epoch is not None and not self.storage_state.full_batches:
            draw.rest = partial(self._more_slices, storage, slices.rule, epoch)
        return draw

    def _check_slots(self, storage: Storage, slots: Tensor, slices: _native.SliceBatch) -> None:
        """IndexError where the slots that a child gives are not those of the slices that would be marked."""
        if self._marks_rows_of(storage) and not torch.equal(slots, slices.slots()):
            raise IndexError(
                f"{type(self).__name__}.sample returned {len(slots)} rows that are not the {slices.rows} of the "
                "slices in its info, whose ends are to be marked; return the index of the base as it is, or an "
                "info without 'slices' and 'slice_id', so that nothing is marked"
            )

    def _marks_rows_of(self, storage: Storage) -> bool:
        """Whether batches of this storage are marked: entries that are marked only where they are must be there."""
        layout = storage.layout
        return any(what != "first if any" or layout is None or path in layout.paths for what, path in self._all_marks())

    def draw_plan(self, storage: Storage) -> DrawPlan:
        native = None
        if isinstance(self.storage_state, UniformRuns):
            native = _native.SliceDraw(self, drawing, partial(self._planned, storage), ("_plan",))
        plan = super().draw_plan(storage)
        return plan._replace(
            most_rows=partial(self._most_rows, storage), native=native, episodes=self.episodes,
            full_batches=self.storage_state.full_batches,
        )  # fmt: skip

    def _planned(
        self, storage: Storage, batch_size: int
    ) -> tuple[_native.Episodes, _native.Store, int, _native.SliceRule, tuple[Mark, ...]] | None:
        """What the native draw of such batches needs; None: `sample` draws."""
        plan = self._plan
        if plan is None or plan[0] != batch_size:
            plan = self._make_plan(batch_size)
        packed = self.episodes.packed(storage)
        return None if packed is None else (*packed, plan[1], plan[2], self._all_marks())

    def _all_marks(self) -> tuple[Mark, ...]:
        """What is marked in a batch, in this order: the content of an entry, and its path."""
        return (self._marking or self._mark_by_settings())[0]

    def _mark_by_settings(self) -> tuple[tuple[Mark, ...], dict[Any, KeyPath]]:
        paths: tuple[KeyPath, ...] = ()
        if self.truncated_key is not None:
            terminated = (*self.truncated_key[:-1], "terminated")  # is given as it is
            paths = (*self.marked_keys, terminated)
        self._marking = marking = self._make_marks(), {_shown_key(path): path for path in paths}
        return marking

    def _masks(self) -> tuple[KeyPath, ...]:
        """Where masks of rows that are padding go; none where there is no padding."""
        return (MASK,) if self.pad_output else ()

    def _make_marks(self) -> tuple[Mark, ...]:
        marks: list[Mark] = [("last", path) for path in self.marked_keys]
        if self.init_key is not None:
            marks.append(("first if any", self.init_key))
        marks += [("mask", path) for path in self._masks()]
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
            return self.storage_state.run_totals(storage, self.episodes, self._rule_of(batch_size), newest)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        n, length = self._divide(batch_size)
        if not len(storage):
            return False
        with self.lock:
            return self.storage_state.can_draw_runs(storage, self.episodes, self._rule(length), n)

    def _rule_of(self, batch_size: int | None) -> _native.SliceRule:
        if self.slice_len is not None:
            return self._rule(self.slice_len)
        if batch_size is None:
            raise ValueError("with num_slices the batch size decides how long slices are; pass batch_size")
        return self._rule(self._divide(batch_size)[1])

    def _most_rows(self, storage: Storage, batch_size: int) -> int:
        n, length = self._divide(batch_size)
        if self._masks():
            return n * length
        return self.storage_state.most_rows_of_runs(n, length, stored_rows(storage))

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
        seed = partial(self._seed_of, storage)
        return self.storage_state.draw_runs(storage, self.episodes, rule, seed, n)

    def _more_slices(self, storage: Storage, rule: _native.SliceRule, epoch: int, n: int) -> _native.SliceBatch | None:
        return self.storage_state.more_runs(storage, self.episodes, rule, partial(self._seed_of, storage), n, epoch)

    def _seed_of(self, storage: Storage) -> Tensor:
        return self._draw_seed(storage, storage.lanes)

    def _info(self, storage: Storage, slices: _native.SliceBatch) -> tuple[Index, dict[str, Any]]:
        slots = slices.slots()
        info = self.storage_state.run_info({**self._entries(slices), "slices": slices})
        return (storage.from_slots(slots) if storage.ndim > 1 else slots), info

    def _entries(self, slices: _native.SliceBatch) -> dict[Any, Any]:
        """What to say of these slices."""
        entries: dict[Any, Any] = {"slice_id": slices.ids()}
        for path in self._masks():
            entries[_shown_key(path)] = slices.mask()
        entries.update(self.storage_state.run_entries(slices))
        return entries

    # ---- state ----
    def _config(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("num_slices", "slice_len", "strict_length", "span", "weight")}
        return {**super()._config(), **own, **self.episodes.settings}

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


def _shown_key(path: KeyPath) -> Any:
    """A key as users write it: a string where it is one."""
    return path if len(path) > 1 else path[0]


def _rows_cut(span: tuple[Cut, Cut], length: int) -> tuple[int, int]:
    """By how many rows slices of this length may be cut at their begin and end."""
    begin, end = (cut if type(cut) is int else (length - 1) * cut for cut in span)
    if max(begin, end) >= length:
        raise ValueError(f"span={span} leaves nothing of slices of {length} steps; a number must be less than {length}")
    return begin, end


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

    _of_earlier_pickle = staticmethod(SliceEpochs.of_earlier_pickle)
    storage_state: SliceEpochs
    drop_last = StateSetting[bool]("Whether a last batch that is not full is left out.", checked=bool)
    shuffle = StateSetting[bool]("Trajectories in random order; else in the order of lanes.", checked=bool)

    def __init__(self, *, drop_last: bool = False, shuffle: bool = True, **slices: Any) -> None:
        if "weight" in slices:
            raise TypeError("an epoch has each trajectory once: there is no weight; use SliceSampler")
        super().__init__(**slices)
        self.storage_state = SliceEpochs(shuffle, drop_last)

    @property
    def _sample_list(self) -> Tensor | None:
        """The trajectories that are left of the epoch, in their order: int64, numbered as they were when it began.

        None before the first epoch; empty after its last batch.
        """
        with self.lock:
            return self.storage_state.rest()

    totals = Sampler.totals  # an epoch is one of a storage

    @property
    def ran_out(self) -> bool:
        return self.storage_state.ran_out

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
        self.burn_in = burn_in
        if self.slice_len is not None:
            self._check_burn_in(self.slice_len)
        self.mask_key = as_path(mask_key, "mask_key")
        self.init_key = None if init_key is None else as_path(init_key, "init_key")

    burn_in = DrawSetting[int](_burn_in)
    mask_key = DrawSetting[KeyPath]()

    def _make_marks(self) -> tuple[Mark, ...]:
        init = () if self.init_key is None else (("first", self.init_key),)
        return (*super()._make_marks(), *init)

    def _masks(self) -> tuple[KeyPath, ...]:
        return (self.mask_key,)

    def _check_burn_in(self, length: int) -> None:
        if self.burn_in >= length:
            raise ValueError(
                f"burn_in={self.burn_in} leaves no row to train on of sequences of {length}; slice_len counts both"
            )

    def _rule(self, length: int) -> _native.SliceRule:
        self._check_burn_in(length)
        least = length - self.burn_in if self.strict_length else 1
        if self.weight == "steps":
            return _native.SliceRule(length, least, before=length - 1, pad=True, by_window=True)
        return _native.SliceRule(length, least, before=self.burn_in, pad=True)

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

    storage_state: PriorityTable
    _of_earlier_pickle = staticmethod(PrioritizedSampler._of_earlier_pickle)

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
        self.storage_state = PriorityTable(
            max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, starts_only=True
        )

    def __repr__(self) -> str:
        settings = f"strict_length={self.strict_length}, {self.storage_state.settings_shown()}"
        return f"{type(self).__name__}({self._size_shown}, {settings})"
