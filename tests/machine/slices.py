"""Sub-trajectories, with their rules in plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from itertools import groupby
from typing import Any

from engram.data import SequenceSampler, SliceSampler, SliceSamplerWithoutReplacement
from machine.ring import Row, is_init
from machine.samplers import RandomOracle


class SliceOracle(RandomOracle):
    """A trajectory uniformly, then a start uniformly."""

    batch_sizes = (3, 6, 7, 15)
    length = 3
    by_id = False
    strict = True
    span = False
    weight = "trajectories"

    def settings(self) -> dict[str, Any]:
        where = {"traj_key": "traj"} if self.by_id else {"end_key": ("next", "done")}
        weight = {"weight": self.weight} if self.weight != "trajectories" else {}
        return {"strict_length": self.strict, "span": self.span, **where, **weight}

    def make(self) -> Any:
        return SliceSampler(slice_len=self.length, **self.settings())

    def shape(self, n: int) -> tuple[int, int]:
        """Number and length of the slices of a batch."""
        return n // self.length, self.length

    def refusal(self, n: int) -> str | None:
        count, length = self.shape(n)
        if count * length != n:
            return "is no multiple of"
        shortest = self.shortest(length)
        none = all(len(piece) < shortest for piece in self.ring.trajectories(self.by_id))
        return super().refusal(n) or (f"no trajectory has {shortest} steps" if none else None)

    def shortest(self, length: int) -> int:
        """How many steps a trajectory has at least that slices are drawn from."""
        return length if self.strict else 1

    def slices(self, length: int) -> dict[tuple[Row, ...], float]:
        """Every slice that there can be, with its frequency."""
        pieces = self.ring.trajectories(self.by_id)
        found: Counter[tuple[Row, ...]] = Counter()
        for piece in pieces:
            if len(piece) < self.shortest(length):
                continue
            windows = range(max(len(piece) - length, 0) + 1)
            if self.span or (not self.strict and self.weight == "steps"):
                windows = range(1 - length if self.span else 0, len(piece))
            for start in windows:
                found[tuple(piece[max(start, 0) : start + length])] += 1 if self.weight == "steps" else 1 / len(windows)
        return found

    def drew(self, n: int, rows: list[Row], info: dict[str, Any], batch: Any) -> None:
        count, length = self.shape(n)
        ids = info["slice_id"].tolist()
        drawn, possible = self._cut(rows, ids), self.slices(length)
        assert len(ids) == len(rows) and ids == sorted(ids) and sorted(set(ids)) == list(range(len(drawn)))
        assert all(s in possible for s in drawn), (drawn, possible)
        self.drew_slices(count, drawn)
        last = [k + 1 == len(ids) or ids[k + 1] != i for k, i in enumerate(ids)]
        done = [self.ring.step(row).done or end for row, end in zip(rows, last, strict=True)]
        for key, expected in ((("next", "truncated"), last), (("next", "done"), done)):
            assert batch[key].squeeze(-1).tolist() == info[key].squeeze(-1).tolist() == expected, key
        begins = [k == 0 or ids[k - 1] != i or is_init(self.ring.step(rows[k]).n) for k, i in enumerate(ids)]
        assert batch["is_init"].squeeze(-1).tolist() == begins
        self._ids = ids

    def drew_slices(self, count: int, drawn: list[tuple[Row, ...]]) -> None:
        """Fails where these slices cannot have been drawn when `count` were asked for."""
        assert len(drawn) == count

    @staticmethod
    def _cut(rows: list[Row], ids: list[int]) -> list[tuple[Row, ...]]:
        return [tuple(row for _, row in part) for _, part in groupby(zip(ids, rows, strict=True), lambda pair: pair[0])]

    def frequencies(self) -> dict[Hashable, float]:
        return dict(self.slices(self.length))

    def units(self, rows: list[Row]) -> list[Hashable]:
        return list(self._cut(rows, self._ids))

    def many(self) -> int:
        return self.length * 40 * max(len(self.ring.rows()), len(self.slices(self.length)))


class SlicesByIdOracle(SliceOracle):
    by_id = True


class ShortSlicesOracle(SliceOracle):
    strict = False


class SpanOracle(SliceOracle):
    strict = False
    span = True
    by_id = True


class SlicesByStepOracle(SliceOracle):
    """Any start from which a whole slice lies in its trajectory, uniformly."""

    weight = "steps"
    length, batch_sizes = 2, (2, 4, 5, 8)

    def many(self) -> int:
        return 10 * super().many()  # a ring holds few trajectories, of about the same length


class ShortSlicesByStepOracle(SlicesByStepOracle):
    """Any step uniformly, and what follows it in its trajectory."""

    strict = False
    by_id = True


class SpanByStepOracle(SlicesByStepOracle):
    """Any window that holds a step of a trajectory, uniformly."""

    strict = False
    span = True


class NumberOfSlicesOracle(SliceOracle):
    """Two slices, whatever the batch size."""

    batch_sizes = (2, 4, 5, 8)
    has_frequencies = False

    def make(self) -> Any:
        return SliceSampler(num_slices=2, **self.settings())

    def shape(self, n: int) -> tuple[int, int]:
        return 2, n // 2


class SliceEpochOracle(SliceOracle):
    """A slice of each trajectory that is long enough, then all over again."""

    batch_sizes = (2, 4, 5, 8)
    length = 2
    has_frequencies = False
    may_be_short = True
    by_id = True
    shuffle = True

    def make(self) -> Any:
        return SliceSamplerWithoutReplacement(slice_len=self.length, shuffle=self.shuffle, **self.settings())

    def begin(self) -> None:
        self.left: list[tuple[int, int]] | None = None  # the newest row of each trajectory that may still come
        self.sure = True  # whether this is known: a change in place cuts trajectories, or joins them

    def emptied(self) -> None:
        self.begin()

    def replaced(self, slots: list[int]) -> None:
        self.sure = False

    def _long(self) -> list[list[Row]]:
        return [piece for piece in self.ring.trajectories(self.by_id) if len(piece) >= self.length]

    def _key(self, row: Row) -> tuple[int, int]:
        return row[1], self.ring.order[row[0]]

    def drew_slices(self, count: int, drawn: list[tuple[Row, ...]]) -> None:
        if not self.sure:
            return
        # A trajectory may have grown meanwhile: each row of it may have been its newest.
        long = {self._key(row): piece for piece in self._long() for row in piece}
        left = [key for key in self.left or [] if key in long] or [self._key(piece[-1]) for piece in self._long()]
        pieces = [long[key] for key in left]
        found = [next((k for k, piece in enumerate(pieces) if set(rows) <= set(piece)), -1) for rows in drawn]
        assert -1 not in found, (drawn, pieces)
        assert len(found) == len(set(found)) == min(count, len(left))
        assert self.shuffle or found == list(range(len(found)))
        self.left = [key for k, key in enumerate(left) if k not in found] or None

    def ran_out(self) -> bool:
        return self.left is None


class SlicesInOrderOracle(SliceEpochOracle):
    shuffle = False


class SequenceOracle(SliceOracle):
    """Windows of four rows: one of burn-in, three to train on; padded where their trajectory ends."""

    length, burn_in = 4, 1
    batch_sizes = (4, 8, 7, 16)
    strict = False

    def make(self) -> Any:
        settings = self.settings()
        del settings["span"]
        return SequenceSampler(slice_len=self.length, burn_in=self.burn_in, **settings)

    def windows(self) -> dict[tuple[tuple[Row, bool], ...], float]:
        """Rows and masks of every window that there can be."""
        found: Counter[tuple[tuple[Row, bool], ...]] = Counter()
        training = self.length - self.burn_in
        for piece in self.ring.trajectories(self.by_id):
            starts = range(max(len(piece) - training, 0) + 1)
            for start in starts:
                steps = range(start - self.burn_in, start + training)
                window = ((piece[min(max(k, 0), len(piece) - 1)], 0 <= k < len(piece)) for k in steps)
                found[tuple(window)] += 1 / len(starts)
        return found

    def drew(self, n: int, rows: list[Row], info: dict[str, Any], batch: Any) -> None:
        masks = batch["collector", "mask"].tolist()
        assert masks == info["collector", "mask"].tolist() and len(rows) == n
        self._drawn = list(zip(rows, masks, strict=True))
        first, last = [], []
        possible = self.windows()
        for window in self.units(rows):
            assert window in possible, window
            real = [k for k, (_, mask) in enumerate(window) if mask]
            first += [k == real[0] for k in range(len(window))]
            last += [k == real[-1] for k in range(len(window))]
        done = [self.ring.step(row).done or end for row, end in zip(rows, last, strict=True)]
        begins = [begin or is_init(self.ring.step(row).n) for row, begin in zip(rows, first, strict=True)]
        for key, expected in (("is_init", begins), (("next", "truncated"), last), (("next", "done"), done)):
            assert batch[key].squeeze(-1).tolist() == expected, key

    def frequencies(self) -> dict[Hashable, float]:
        return dict(self.windows())

    def units(self, rows: list[Row]) -> list[Any]:
        return [tuple(self._drawn[k : k + self.length]) for k in range(0, len(rows), self.length)]

    def many(self) -> int:
        return self.length * 40 * max(len(self.ring.rows()), len(self.windows()))


class SequenceByStepOracle(SequenceOracle):
    """Any step uniformly is the last one of its window, with those before it; padded before its trajectory's first."""

    weight = "steps"

    def windows(self) -> dict[tuple[tuple[Row, bool], ...], float]:
        return {
            tuple((piece[max(k, 0)], k >= 0) for k in range(last - self.length + 1, last + 1)): 1.0
            for piece in self.ring.trajectories(self.by_id)
            for last in range(len(piece))
            if len(piece) >= self.shortest(self.length)
        }


class LongSequenceByStepOracle(SequenceByStepOracle):
    """Only steps of trajectories that have as many steps as a window has to train on."""

    strict = True
    by_id = True

    def shortest(self, length: int) -> int:
        return length - self.burn_in


SLICES = {
    "slices": SliceOracle,
    "slices by id": SlicesByIdOracle,
    "short slices": ShortSlicesOracle,
    "spans": SpanOracle,
    "slices by step": SlicesByStepOracle,
    "short slices by step": ShortSlicesByStepOracle,
    "spans by step": SpanByStepOracle,
    "two slices": NumberOfSlicesOracle,
    "slices in epochs": SliceEpochOracle,
    "slices in order": SlicesInOrderOracle,
    "sequences": SequenceOracle,
    "sequences by step": SequenceByStepOracle,
    "long sequences by step": LongSequenceByStepOracle,
}
