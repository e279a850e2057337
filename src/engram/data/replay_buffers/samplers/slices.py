"""Sub-trajectories: trajectories uniformly, then starts uniformly; or all starts uniformly."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from engram import _native
from engram.data.replay_buffers.episodes import DONE, Episodes, Key, path_of
from engram.data.replay_buffers.samplers.base import EMPTY, Index, Sampler, stored_rows
from engram.data.replay_buffers.samplers.marks import has_keys, mark_last, put

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage

TRUNCATED = ("next", "truncated")
Weight = Literal["trajectories", "steps"]
_LOOKS = 10_000


class SliceSampler(Sampler):
    """Slices of trajectories: a trajectory uniformly among those that are long enough, then a start uniformly.

    So steps of short trajectories are drawn more often than others: an episode of 20 steps and one of 1,000 each get
    half of the draws. `weight="steps"` draws all starts that a slice can have with equal probability instead.

    A batch is flat, slice after slice, `[batch_size]`: `batch.reshape(num_slices, -1)` has a row for each where all are
    whole. The last step of each is marked truncated and done, `terminated` stays. `info["slice_id"]` (int64 [n]) says
    which slice a row is of, and with `truncated_key` `info` holds the marked flags under their keys. A slice never
    crosses the end of a trajectory, the write cursor, a seam, or goes from one lane or environment to another; it wraps
    around the ring. What is new since the last batch is taken in at each, whatever the size of the buffer.

    Args:
        num_slices, slice_len: exactly one of them; the batch size is a multiple of it.
        end_key, traj_key: where trajectories end, as for `Episodes`.
        ends, trajectories: flags or ids of a dataset that does not change, instead of keys, as for `Episodes`.
        cache_values: accepted for users of other libraries; boundaries are always kept and never read twice.
        truncated_key: bool [n, 1], added where the data lack it, and `done` beside it; None: nothing is marked.
        strict_length: draw only from trajectories of at least a slice's length. False: a shorter one is a slice whole,
            and the batch has fewer rows.
        span: slices may be cut by the begin and the end of their trajectory, `(begin, end)` or one bool for both, so
            that steps near them are as likely as others. With L the slice length and a trajectory of steps [a, b),
            windows of L steps start uniformly in [a, b - L]; with `begin` from a - L + 1 on, with `end` up to b - 1;
            what lies outside is left out, and the batch has fewer rows. With both, each step of a trajectory is in L of
            its b - a + L - 1 windows.
        slice_key: also put `slice_id` into the batch, here.
        weight: what is drawn uniformly. "trajectories": a trajectory that is long enough, then a start in it. "steps":
            one of all admissible starts in all trajectories that are long enough; that is every step from which
            `slice_len` steps lie in its trajectory, with `strict_length=False` every stored step (a slice is then cut
            by the end of its trajectory). With `span` one of all windows. A batch costs the same either way.

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

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Key = DONE,
        traj_key: Key | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Key | None = TRUNCATED,
        strict_length: bool = True,
        span: bool | tuple[bool, bool] = False,
        slice_key: Key | None = None,
        weight: Weight = "trajectories",
    ) -> None:
        super().__init__()
        if (num_slices is None) == (slice_len is None):
            raise ValueError(f"give exactly one of num_slices and slice_len, got {num_slices} and {slice_len}")
        self.num_slices = _positive(num_slices, "num_slices")
        self.slice_len = _positive(slice_len, "slice_len")
        self.episodes = Episodes(end_key=end_key, traj_key=traj_key, ends=ends, trajectories=trajectories)
        self.cache_values = cache_values
        self.truncated_key = None if truncated_key is None else path_of(truncated_key, "truncated_key")
        self._done_key = None if self.truncated_key is None else (*self.truncated_key[:-1], "done")
        self.strict_length = strict_length
        self.span = _pair(span)
        self.slice_key = None if slice_key is None else path_of(slice_key, "slice_key")
        if weight not in get_args(Weight):
            raise ValueError(f"weight must be one of {get_args(Weight)}, got {weight!r}")
        self.weight = weight
        self._planned: tuple[int, int, _native.SliceRule] | None = None

    # ---- drawing ----
    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        with self.lock:
            planned = self._planned
            if planned is None or planned[0] != batch_size:
                planned = self._plan(batch_size)
            return self._said(storage, self._slices(storage, planned[2], planned[1]))

    def most_rows(self, storage: Storage, batch_size: int) -> int:
        n, length = self._cut(batch_size)
        return n * min(length, stored_rows(storage))

    def _plan(self, batch_size: int) -> tuple[int, int, _native.SliceRule]:
        """Number and rule of the slices of a batch."""
        n, length = self._cut(batch_size)
        self._planned = batch_size, n, self._rule(length)
        return self._planned

    def _cut(self, batch_size: int) -> tuple[int, int]:
        """Number and length of the slices of a batch."""
        name, given = ("num_slices", self.num_slices) if self.slice_len is None else ("slice_len", self.slice_len)
        assert given is not None
        if batch_size % given:
            raise ValueError(f"batch_size={batch_size} is no multiple of {name}={given}; choose one that is")
        return (given, batch_size // given) if self.slice_len is None else (batch_size // given, given)

    def _rule(self, length: int) -> _native.SliceRule:
        before, after = (length - 1 if cut else 0 for cut in self.span)
        by_window = self.weight == "steps"
        if by_window and not self.strict_length:
            after = length - 1  # every step is a start
        return _native.SliceRule(length, length if self.strict_length else 1, before, after, by_window=by_window)

    def _slices(self, storage: Storage, rule: _native.SliceRule, n: int) -> _native.SliceBatch:
        seed = self.draw_seed(storage)
        slices = self._drawn(storage, rule, seed, n)
        if slices is None:
            with storage.mutex:  # after somebody who is replacing all rows
                slices = self._drawn(storage, rule, seed, n)
        for _ in range(_LOOKS):
            if slices is not None:
                return slices
            if not _being_written(storage):
                break
            time.sleep(0)
            slices = self._drawn(storage, rule, seed, n)
        raise self._nothing(storage, rule)

    def _drawn(self, storage: Storage, rule: _native.SliceRule, seed: Tensor, n: int) -> _native.SliceBatch | None:
        """n slices; None: there is no trajectory that is long enough."""
        return self.episodes.draw(storage, rule, seed, n)

    def _nothing(self, storage: Storage, rule: _native.SliceRule) -> RuntimeError:
        if not len(storage):
            return RuntimeError(f"{EMPTY} Add or extend it first.")
        return RuntimeError(
            f"no trajectory has {rule.min_length} steps; the longest that is stored has "
            f"{self.episodes.longest(storage)}. Use shorter slices, or strict_length=False"
        )

    def _said(self, storage: Storage, slices: _native.SliceBatch) -> tuple[Index, dict[str, Any]]:
        slots, ids = slices.slots(), slices.ids()
        # "slices" is for `redraw`, `replaced` and `finish`, which takes it out.
        info = {"slice_id": ids, "slices": slices}
        return (storage.outward(slots) if storage.ndim > 1 else slots), info

    # ---- after the read ----
    def replaced(self, storage: Storage, slots: Tensor, info: dict[str, Any]) -> list[int] | None:
        assert storage.lanes is not None
        stale = info["slices"].stale(storage.lanes.store)
        return torch.isin(info["slice_id"], torch.tensor(stale)).nonzero().flatten().tolist() if stale else None

    def redraw(self, storage: Storage, slots: Tensor, info: dict[str, Any], places: list[int]) -> Tensor:
        """Other slices for those that lost a row; with slices of several lengths the batch may get another one."""
        ids = info["slice_id"]
        which = sorted({int(ids[place]) for place in places if place < len(ids)})
        if not which:
            return slots
        slices: _native.SliceBatch = info["slices"]
        while which:  # an epoch's last draw may give fewer
            fresh = self._slices(storage, slices.rule, len(which))
            slices = slices.replaced(which[: len(fresh)], fresh)
            which = which[len(fresh) :]
        info.update(self._said(storage, slices)[1])
        return slices.slots()

    def finish(self, batch: Any, info: dict[str, Any]) -> Any:
        slices = info.pop("slices")
        if has_keys(batch):
            self._mark(batch, info, slices)
        return batch

    def _mark(self, batch: Any, info: dict[str, Any], slices: _native.SliceBatch) -> None:
        said: dict[Any, Any] = info  # users of the field look for the flags under their keys
        if self.truncated_key is not None and self._done_key is not None:
            for key in (self.truncated_key, self._done_key):
                said[key if len(key) > 1 else key[0]] = mark_last(batch, key, slices)
        if self.slice_key is not None:
            put(batch, self.slice_key, info["slice_id"])

    # ---- state ----
    def _decisive(self) -> dict[str, Any]:
        mine = {name: getattr(self, name) for name in ("num_slices", "slice_len", "strict_length", "span", "weight")}
        return {**super()._decisive(), **mine, **self.episodes.settings}

    def differences(self, state: dict[str, Any]) -> list[str]:
        return super().differences({"weight": "trajectories", **state})  # earlier versions had no other

    def position(self) -> Any:
        """Nothing: a draw changes the generator alone."""

    def rewind(self, position: Any) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_planned": None}

    def __repr__(self) -> str:
        said = f"num_slices={self.num_slices}" if self.slice_len is None else f"slice_len={self.slice_len}"
        return f"{type(self).__name__}({said}, strict_length={self.strict_length}, span={self.span}{self._weight_said})"

    @property
    def _weight_said(self) -> str:
        return "" if self.weight == "trajectories" else f", weight={self.weight!r}"


def _positive(n: Any, name: str) -> int | None:
    if n is None:
        return None
    if isinstance(n, bool) or not hasattr(n, "__index__") or int(n) < 1:
        raise ValueError(f"{name} must be a positive integer, got {n!r}")
    return int(n)


def _pair(span: Any) -> tuple[bool, bool]:
    pair = (span, span) if isinstance(span, bool) else span
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(s, bool) for s in pair):
        raise ValueError(f"span is a bool or a pair of them (begin, end), got {span!r}")
    return pair[0], pair[1]


def _being_written(storage: Storage) -> bool:
    """Whether a writer is replacing rows: a tiny lane shows fewer for that moment."""
    lanes = storage.lanes
    return lanes is not None and any(lane["claimed"] > lane["published"] for lane in lanes.states())
