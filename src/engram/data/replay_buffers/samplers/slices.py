"""Samplers that draw slices of trajectories, and the entries by which a batch says where its slices begin and end."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
from torch import Tensor
from typing_extensions import Self

import engram._native as _native
from engram._advice import advised
from engram._checks import count, count_or_none, is_integer
from engram._system import drawing
from engram.data.replay_buffers.samplers.base import (
    DrawTotals,
    Sampler,
    StateSetting,
    WorkerShare,
    refuse_several_epochs,
    stored_rows,
)
from engram.data.replay_buffers.samplers.draw import Draw, DrawPlan, EpochInfo, Index, Mark
from engram.data.replay_buffers.samplers.epochs import SliceEpochs
from engram.data.replay_buffers.samplers.prioritized import PrioritizedSampler, PriorityTable
from engram.data.replay_buffers.samplers.runs import (
    TRUNCATED,
    Cut,
    Marking,
    RunDraw,
    RunPlan,
    RunRule,
    RunsOfRows,
    RunSource,
    SliceInfo,
    UniformRuns,
    Weight,
    mark,
    shown_key,
    stored_flags,
)
from engram.pytree import MASK, Key, KeyPath, as_path, map_outermost
from engram.store.episodes import EpisodeIndex

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


def mark_rows(batch: Any, sampler: SliceSampler, last: Tensor, mask: Tensor | None) -> None:
    """Marks slices in a batch that came as rows, in place, as a buffer on one machine does.

    Args:
        sampler: one with `slice_len`; all slices have that many rows.
        last: where slices end, bool [n]; mask: False where they are padded, bool [n].
    """
    assert sampler.slice_len is not None
    mark(batch, sampler._rule_now().marks, RunsOfRows(last, mask, sampler.slice_len), {})


class RuleSetting(property):
    """An attribute of a sampler that decides which slices are drawn, or what is marked in them: a part of its rule."""


def setting(name: str, checked: Callable[[Any], Any] | None = None) -> Any:
    """The attribute of this name.

    Args:
        checked: makes of what is assigned the value that it has; ValueError where that is none. None: any is one.
    """
    place = RunRule._fields.index(name)

    def value(self: SliceSampler) -> Any:
        return self._rule[place]

    def assign(self: SliceSampler, value: Any) -> None:
        value = value if checked is None else checked(value)
        with self.lock:
            self._rule = self._rule.changed(name, value)

    return RuleSetting(value, assign)


def _positive(n: Any, name: str) -> int | None:
    return count_or_none(n, name)


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
    return count(rows, "burn_in", 0)


def _settings_of(kind: type[SliceSampler]) -> list[str]:
    """The names of settings that samplers of a class have, in whatever way."""
    return [name for name in RunRule._fields if any(_is_setting(parent, name) for parent in kind.__mro__)]


def _is_setting(kind: type, name: str) -> bool:
    """Whether the attribute of this name is the setting as the library has it."""
    return isinstance(inspect.getattr_static(kind, name, None), RuleSetting)


@functools.cache
def _own_settings_of(kind: type[SliceSampler]) -> tuple[str, ...]:
    """The settings that a user's own class has in a way of its own."""
    return tuple(name for name in _settings_of(kind) if not _is_setting(kind, name))


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
        rank: of several learners with one seed, which one this is: `dist.get_rank()`. Each draws other slices.
        replacement: False makes a `SliceSamplerWithoutReplacement`, which also takes `drop_last` and `shuffle`.

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
    # Its settings as data, which are replaced as a whole; of a class, what its settings do not say.
    _rule = RunRule()

    def __new__(cls, *args: Any, replacement: bool = True, **settings: Any) -> Self:
        kind: Any = SliceSamplerWithoutReplacement if cls is SliceSampler and not replacement else cls
        return super().__new__(kind, *args, **settings)  # type: ignore[no-any-return]

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
        replacement: bool = True,
        rank: int = 0,
    ) -> None:
        if not replacement:
            raise TypeError(
                f"a {type(self).__name__} draws with replacement; SliceSamplerWithoutReplacement gives each trajectory "
                "once an epoch"
            )
        Sampler.__init__(
            self, compilable, rank=rank
        )  # not the next class: a child that draws by priority has a table of its own
        if (num_slices is None) == (slice_len is None):
            raise TypeError(f"give exactly one of num_slices and slice_len, got {num_slices} and {slice_len}")
        vars(self).pop("_rule", None)  # of settings that a child assigned before
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
            self._rule._replace(span=self.span).check_length(self.slice_len)
        self.slice_key = None if slice_key is None else as_path(slice_key, "slice_key")
        self.init_key = None if init_key is None else as_path(init_key, "init_key")
        self.weight = weight
        self.storage_state = UniformRuns()

    storage_state: RunSource  # how runs are drawn
    num_slices: int | None = setting("num_slices", partial(_positive, name="num_slices"))
    slice_len: int | None = setting("slice_len", partial(_positive, name="slice_len"))
    strict_length: bool = setting("strict_length", bool)
    span: Any = setting("span", _pair)
    weight: Weight = setting("weight", _weight)
    truncated_key: KeyPath | None = setting("truncated_key")
    pad_output: bool = setting("pad_output", bool)
    slice_key: KeyPath | None = setting("slice_key")
    init_key: KeyPath | None = setting("init_key")
    _plan: RunPlan | None = None  # of the last batch size

    @property
    def traj_key(self) -> Key | None:
        """Where trajectory ids are; None: where they usually are, if anywhere."""
        return None if self.episodes.traj_key is None else shown_key(self.episodes.traj_key)

    @property
    def end_key(self) -> Key | None:
        """Where flags are that end trajectories; None with `end_keys`."""
        return None if self.episodes.end_key is None else shown_key(self.episodes.end_key)

    @property
    def end_keys(self) -> tuple[Key, ...] | None:
        """Where flags are that end trajectories, where there are several."""
        return None if self.episodes.end_keys is None else tuple(map(shown_key, self.episodes.end_keys))

    @property
    def marked_keys(self) -> tuple[KeyPath, ...]:
        """Where the last step of each slice is marked: truncated, done beside it. None with `truncated_key=None`."""
        return self._rule_now().marked_keys

    def _rule_now(self) -> RunRule:
        """Its settings, with those that a user's own class has in a way of its own as they are now."""
        own = _own_settings_of(type(self))
        return self._rule._replace(**{name: getattr(self, name) for name in own}) if own else self._rule

    # ---- drawing ----
    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        plan, slots, info = self._draw_runs(storage, batch_size)
        index = storage.from_slots(slots) if storage.ndim > 1 else slots
        flags = plan.marking.flags
        if not flags:
            return index, info
        lazy = SliceInfo(info)
        lazy.epoch = info.epoch if isinstance(info, EpochInfo) else None
        lazy.promised, lazy.make = tuple(flags), partial(stored_flags, storage, flags, info["slices"])
        return index, lazy

    def _draw_runs(self, storage: Storage, batch_size: int) -> tuple[RunPlan, Tensor, dict[Any, Any]]:
        """Slots of a batch and what is said of them, without flags; by which plan they were drawn."""
        with self.lock:
            plan, rule = self._plan, self._rule_now()
            if plan is None or plan.batch_size != batch_size or plan.rule is not rule:
                self._plan = plan = rule.plan(batch_size)
            slices = self._slices(storage, plan.native, plan.n)
            info = self.storage_state.run_info({**self._entries(plan.marking, slices), "slices": slices})
        return plan, slices.slots(), info

    def _draw_batch(self, storage: Storage, batch_size: int) -> Draw:
        plan, slots, info = self._draw_runs(storage, batch_size)  # the buffer reads rows with their flags
        index: Index = storage.from_slots(slots) if storage.ndim > 1 else slots
        return self._draw_of(storage, plan.marking, index, slots, info)

    def as_draw(self, storage: Storage, drawn: Any, draw: Callable[[int], Draw], batch_size: int) -> Draw:
        plain = super().as_draw(storage, drawn, draw, batch_size)
        if "slices" not in plain.info:
            return plain  # steps of a child's own choice
        marking = self._rule_now().marking()
        self._check_slots(storage, marking, plain.slots, plain.info["slices"])
        runs = self._draw_of(storage, marking, plain.index, plain.slots, plain.info)
        runs.anew = partial(draw, batch_size)
        return runs

    def _draw_of(
        self, storage: Storage, marking: Marking, index: Index, slots: Tensor, info: dict[Any, Any]
    ) -> RunDraw:
        """The draw of the slices in an info, which are taken out of it."""
        slices, lanes = info.pop("slices"), storage.lanes
        if type(info) is SliceInfo:  # the flags of the batch are those that are read
            info.promised, info.make = (), None
        draw = RunDraw(index, slots, info, type(self).__name__, partial(self._slices, storage, slices.rule))
        draw.runs = draw.seen = slices
        draw.store, draw.marks, draw.flags = lanes.store, marking.marks, marking.flags
        draw.entries = partial(self._entries, marking)
        epoch = info.epoch if isinstance(info, EpochInfo) else None
        if epoch is not None and not self.storage_state.full_batches:
            draw.rest = partial(self._more_slices, storage, slices.rule, epoch)
        return draw

    def _check_slots(self, storage: Storage, marking: Marking, slots: Tensor, slices: _native.SliceBatch) -> None:
        """IndexError where the slots that a child gives are not those of the slices that would be marked."""
        layout = storage.layout
        # Entries that are marked only where they are must be there.
        marks = any(what != "first if any" or layout is None or path in layout.paths for what, path in marking.marks)
        if marks and not torch.equal(slots, slices.slots()):
            raise IndexError(
                f"{type(self).__name__}.sample returned {len(slots)} rows that are not the {slices.rows} of the "
                "slices in its info, whose ends are to be marked; return the index of the base as it is, or an "
                "info without 'slices' and 'slice_id', so that nothing is marked"
            )

    def draw_plan(self, storage: Storage) -> DrawPlan:
        native = None
        if isinstance(self.storage_state, UniformRuns):
            native = _native.SliceDraw(self, drawing, partial(self._planned, storage), ("_rule",))
        plan = super().draw_plan(storage)
        return plan._replace(
            most_rows=partial(self._most_rows, storage), native=native, episodes=self.episodes, is_loose=None,
            full_batches=self.storage_state.full_batches,
        )  # fmt: skip

    def _planned(
        self, storage: Storage, batch_size: int
    ) -> tuple[_native.Episodes, _native.Store, int, _native.SliceRule, tuple[Mark, ...]] | None:
        """What the native draw of such batches needs; None: `sample` draws."""
        plan, packed = self._rule_now().plan(batch_size), self.episodes.packed(storage)
        return None if packed is None else (*packed, plan.n, plan.native, plan.marking.marks)

    def totals(self, storage: Storage, batch_size: int | None = None, *, newest: bool = True) -> DrawTotals:
        with self.lock:
            rule = self._rule_now().native_for(batch_size)
            return self.storage_state.run_totals(storage, self.episodes, rule, newest)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        rule = self._rule_now()
        n, length = rule.divide(batch_size)
        if not len(storage):
            return False
        with self.lock:
            return self.storage_state.can_draw_runs(storage, self.episodes, rule.native(length), n)

    def _most_rows(self, storage: Storage, batch_size: int) -> int:
        rule = self._rule_now()
        n, length = rule.divide(batch_size)
        if rule.masks:
            return n * length
        return self.storage_state.most_rows_of_runs(n, length, stored_rows(storage))

    def _slices(self, storage: Storage, rule: _native.SliceRule, n: int) -> _native.SliceBatch:
        seed = partial(self._seed_of, storage)
        return self.storage_state.draw_runs(storage, self.episodes, rule, seed, n)

    def _more_slices(self, storage: Storage, rule: _native.SliceRule, epoch: int, n: int) -> _native.SliceBatch | None:
        return self.storage_state.more_runs(storage, self.episodes, rule, partial(self._seed_of, storage), n, epoch)

    def _seed_of(self, storage: Storage) -> Tensor:
        return self._draw_seed(storage, storage.lanes)

    def _entries(self, marking: Marking, slices: _native.SliceBatch) -> dict[Any, Any]:
        """What to say of these slices."""
        entries: dict[Any, Any] = {"slice_id": slices.ids()}
        for path in marking.masks:
            entries[shown_key(path)] = slices.mask()
        entries.update(self.storage_state.run_entries(slices))
        return entries

    # ---- state ----
    def _config(self) -> dict[str, Any]:
        rule = self._rule_now()
        own = {
            "num_slices": rule.num_slices, "slice_len": rule.slice_len, "strict_length": rule.strict_length,
            "span": rule.span, "weight": rule.weight,
        }  # fmt: skip
        return {**super()._config(), **own, **self.episodes.settings}

    @classmethod
    def _of_earlier_pickle(cls, attributes: dict[str, Any]) -> None:
        if "_rule" not in attributes:
            names = [name for name in _settings_of(cls) if name in attributes and name not in _own_settings_of(cls)]
            attributes["_rule"] = cls._rule._replace(**{name: attributes.pop(name) for name in names})
        attributes.setdefault("storage_state", UniformRuns())

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


class SliceSamplerWithoutReplacement(SliceSampler, built_in=True):
    """Epochs over trajectories: a slice of each one that is long enough, at a start drawn uniformly.

    Trajectories that become long enough during an epoch join the next one; those that are overwritten, or have become
    too short, are skipped. The last batch of an epoch may have fewer slices.

    Args:
        drop_last: leave out a last batch that is not full.
        shuffle: trajectories in random order; else lane by lane, environment by environment, oldest first.
        Others: as SliceSampler; there is no `weight`.

    Raises:
        TypeError: a `weight`, or `replacement=True`.

    Example:
        >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode", shuffle=False)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> _ = rb.extend(TensorDict({"episode": torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])}, [8]))
        >>> [batch["episode"].tolist() for batch in rb]
        [[0, 0, 1, 1], [2, 2]]
    """

    storage_state: SliceEpochs
    drop_last = StateSetting[bool]("Whether a last batch that is not full is left out.", checked=bool)
    shuffle = StateSetting[bool]("Trajectories in random order; else in the order of lanes.", checked=bool)

    def __init__(
        self, *, drop_last: bool = False, shuffle: bool = True, replacement: bool = False, **slices: Any
    ) -> None:
        if replacement:
            raise TypeError("an epoch has each trajectory once; SliceSampler draws with replacement")
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

    @classmethod
    def _of_earlier_pickle(cls, attributes: dict[str, Any]) -> None:
        if "storage_state" not in attributes:
            attributes["storage_state"] = SliceEpochs.of_earlier_pickle(attributes)
        super()._of_earlier_pickle(attributes)

    @property
    def ran_out(self) -> bool:
        return self.storage_state.ran_out

    def _split_among_workers(self, share: WorkerShare) -> None:
        super()._split_among_workers(share)
        refuse_several_epochs(self, share)

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
        super().__init__(weight=weight, strict_length=strict, init_key=init_key, **slices)
        self.burn_in = burn_in
        if self.slice_len is not None:
            self._rule._replace(burn_in=self.burn_in).check_length(self.slice_len)
        self.mask_key = as_path(mask_key, "mask_key")

    _rule = RunRule(pads_around=True, adds_init=True)
    burn_in: int = setting("burn_in", _burn_in)
    mask_key: KeyPath = setting("mask_key")

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
        rank: int = 0,
    ) -> None:
        SliceSampler.__init__(
            self, num_slices=num_slices, slice_len=slice_len, end_key=end_key, end_keys=end_keys, traj_key=traj_key,
            ends=ends, trajectories=trajectories, cache_values=cache_values, truncated_key=truncated_key,
            init_key=init_key, strict_length=strict_length, pad_output=pad_output, span=span, slice_key=slice_key,
            compilable=compilable, rank=rank,
        )  # fmt: skip
        self.storage_state = PriorityTable(
            max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, starts_only=True
        )

    @classmethod
    def _of_earlier_pickle(cls, attributes: dict[str, Any]) -> None:
        super(SliceSampler, cls)._of_earlier_pickle(attributes)  # of the table
        super()._of_earlier_pickle(attributes)

    def __repr__(self) -> str:
        settings = f"strict_length={self.strict_length}, {self.storage_state.settings_shown()}"
        return f"{type(self).__name__}({self._size_shown}, {settings})"
