"""What a learner says of its draws, in a small file beside its store, for those who watch it. Needs no torch."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from engram import _forms as forms
from engram._system import open_regular

_PREFIX, _SUFFIX = "learner-", ".json"
_MOST_BYTES = 1 << 16  # of a file; a longer one is none of ours
_FRESH = 10.0  # seconds for which a file counts: learners write one a second
_FORGOTTEN = 3600.0  # seconds after which the file of a learner that was killed is removed by the next one


class Histogram(NamedTuple):
    """How many numbers lie between each two of n + 1 edges: n counts."""

    edges: list[float]
    counts: list[float]


class LearnerStats(NamedTuple):
    """What a learner draws from its store: one published block.

    Attributes:
        pid: of the learner's process.
        time: when this was written, seconds since 1970.
        sampler: the kind of its sampler.
        batches: batches that it has been handed.
        batch_size: rows of a batch, as its buffer was made with; None: each call says it.
        rate: rows that it drew in a second, since the block before; None where `batch_size` is.
        ratio: rows drawn for each step written, since the buffer was made, or by all since its rate limiter counts;
            None where that is not known.
        ages: how many steps ago rows were written that it draws now: deciles, from the youngest to the oldest (11
            numbers); None where the sampler does not say how likely it draws which row.
        effective: how many rows count as much as all stored ones do with their chances: (sum w)^2 / sum w^2.
        rows: stored rows, of which `effective` is a part.
        priorities: of stored rows, as they weigh in draws; None without priorities.
    """

    pid: int
    time: float
    sampler: str
    batches: int
    batch_size: int | None
    rate: float | None
    ratio: float | None
    ages: list[float] | None
    effective: float | None
    rows: int
    priorities: Histogram | None


class LearnerFile:
    """The file in a store's folder to which one learner publishes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{_PREFIX}{os.getpid()}-{id(self):x}{_SUFFIX}"
        self._pid = os.getpid()

    def write(self, stats: LearnerStats) -> None:
        """Replaces the file, whole; OSError where it cannot be written."""
        new = self.path.with_suffix(".new")
        with open(open_regular(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            json.dump(stats._asdict(), file)
        os.replace(new, self.path)

    def remove(self) -> None:
        """Removes it; a forked child leaves its parent's alone."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def remove_forgotten(self) -> None:
        """Removes files of learners that have not written for an hour."""
        for path in self.path.parent.glob(f"{_PREFIX}*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                if path.lstat().st_mtime < time.time() - _FORGOTTEN:
                    path.unlink()


def is_learner_file(name: str) -> bool:
    """Whether a file in a store's folder has the name of one that a learner publishes to."""
    return name.startswith(_PREFIX) and name.endswith((_SUFFIX, ".new"))


def published_stats(folder: Path) -> list[LearnerStats]:
    """What learners of a store publish now, by process; what is malformed or older than ten seconds counts for nothing.

    Example:
        >>> import tempfile
        >>> published_stats(Path(tempfile.mkdtemp()))
        []
    """
    return sorted(_fresh(folder), key=lambda stats: stats.pid)


def _fresh(folder: Path) -> Iterator[LearnerStats]:
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            with open(open_regular(path)) as file:
                status = os.fstat(file.fileno())
                if status.st_mtime < time.time() - _FRESH or status.st_size > _MOST_BYTES:
                    continue
                stats = _parsed(json.load(file))
        except (OSError, ValueError, RecursionError):  # it is gone, or none of ours
            continue
        yield stats


_NUMBER = forms.nullable(forms.number)
_NUMBERS = forms.list_of(forms.number)
_BLOCK = forms.record(
    {
        "pid": forms.integer(), "time": forms.number, "sampler": forms.text, "batches": forms.integer(),
        "batch_size": forms.nullable(forms.integer(1)), "rate": _NUMBER, "ratio": _NUMBER,
        "ages": forms.nullable(_NUMBERS), "effective": _NUMBER, "rows": forms.integer(),
        "priorities": forms.nullable(forms.fields(_NUMBERS, _NUMBERS)),
    }
)  # fmt: skip


def _parsed(block: Any) -> LearnerStats:
    """A block that was read; ValueError where it is malformed."""
    forms.check(_BLOCK, block, "a block")
    histogram = block["priorities"]
    fields = {name: block[name] for name in LearnerStats._fields}
    return LearnerStats(**{**fields, "priorities": None if histogram is None else Histogram(*histogram)})
