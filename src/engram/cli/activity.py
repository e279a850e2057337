"""What goes on in stores: rows, rates, writers, episodes, learners, looked at again and again. Needs no torch.

Counters of the header are read, and of new steps their flags and rewards; nothing is locked or written, and no memory
of the store's is changed.
"""

from __future__ import annotations

import glob
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engram.cli.description import Summary, summary
from engram.cli.kinds import store_folder
from engram.errors import EngramError, StorageInUseError
from engram.kernel.disk import (
    LearnerStats,
    ObservedRows,
    QueueFigures,
    RateFigures,
    StoreFile,
    published_stats,
    queue_figures,
    rate_figures,
    writer_shares,
)
from engram.kernel.tools import user_path

_EPISODES = 100  # of which returns and lengths are shown: the last ones
_FIRST_STEPS = 1 << 12  # of a lane, read at the first look
_MOST_STEPS = 1 << 15  # of a lane, read at each later one: of more, the newest
_SECONDS_APART = 1.0


class WriterActivity(NamedTuple):
    """One process that writes, or wrote.

    Attributes:
        pid: of the process; None: the store does not tell.
        lanes: the numbers of those that it wrote last.
        holds: whether it has one of them, so that nobody else may write there.
        rows: stored steps that are its own; where each writer has a lane, those of its lanes.
        written: steps that it ever wrote, of all environments; likewise.
        rate: steps a second, since the last look; None at the first, and of steps of which the store does not tell any
            more whose they are.
    """

    pid: int | None
    lanes: tuple[int, ...]
    holds: bool
    rows: int
    written: int
    rate: float | None


@dataclass(frozen=True)
class Activity:
    """What goes on in one store, at one look.

    Attributes:
        path: its folder.
        rows: stored steps, of all environments.
        removed: those of them that were removed, and are not drawn.
        capacity: steps that fit.
        written: steps ever written.
        rate_in: steps written a second, since the last look; None at the first.
        rate_out: stored steps overwritten a second.
        in_use: whether a process has it open.
        writers: who writes, by process.
        episodes: that ended since the first look; None where no key says where they end.
        returns: of the last hundred episodes that were seen from their first to their last step; None: there are none.
        lengths: of these.
        learners: what learners publish of their draws (`publish_stats=True`).
        problem: why nothing could be read; the rest is as it was at the last look.
        rate: the rate limiter, what was written and drawn, and how long anybody waited; None: there is none.
        queue: of a store whose rows are handed out once, what waits, and how long anybody waited; None: it is none.
    """

    path: str
    rows: int = 0
    capacity: int = 0
    written: int = 0
    rate_in: float | None = None
    rate_out: float | None = None
    in_use: bool = False
    writers: tuple[WriterActivity, ...] = ()
    episodes: int | None = None
    returns: Summary | None = None
    lengths: Summary | None = None
    learners: tuple[LearnerStats, ...] = ()
    problem: str | None = None
    removed: int = 0
    rate: RateFigures | None = None
    queue: QueueFigures | None = None

    def to_json(self) -> dict[str, Any]:
        """The same as JSON."""
        as_dict = dict(self.__dict__)
        as_dict["writers"] = [{**writer._asdict(), "lanes": list(writer.lanes)} for writer in self.writers]
        as_dict["learners"] = [learner._asdict() for learner in self.learners]
        for name in ("returns", "lengths", "rate", "queue"):
            as_dict[name] = None if as_dict[name] is None else as_dict[name]._asdict()
        return as_dict


def top(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, every: float = _SECONDS_APART
) -> Iterator[list[Activity]]:
    """Looks at stores again and again, beside the jobs that write them: yields what goes on in each, without end.

    Args:
        paths: folders of stores, or patterns of such (`runs/*/replay`), which are looked for again at each look.
        every: seconds between two looks.

    Raises:
        FileNotFoundError: there is no store at any of the paths, at the first look.
        ValueError: `every` is below 0.05.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder))
        >>> looks = top(folder, every=0.05)
        >>> _ = rb.extend(torch.arange(5))
        >>> [now.rows for now in next(looks)]
        [5]
        >>> _ = rb.extend(torch.arange(10))
        >>> [now.rate_in > 0 for now in next(looks)]
        [True]
    """
    if not every >= 0.05:
        raise ValueError(f"every must be 0.05 seconds or more, got {every}")
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    patterns = [os.fspath(user_path(path)) for path in given]
    watched: dict[Path, _Watch] = {}
    next_look = time.monotonic()
    while True:
        for folder in _stores(patterns):
            watched.setdefault(folder, _Watch(folder))
        if not watched:
            raise FileNotFoundError(2, f"no store (a folder with {StoreFile.NAME}) is there", " ".join(patterns))
        yield [watch.look() for watch in watched.values()]
        next_look = max(next_look + every, time.monotonic())
        time.sleep(max(0.0, next_look - time.monotonic()))


def _stores(patterns: Sequence[str]) -> list[Path]:
    """The folders of the stores that the patterns name."""
    found = []
    for pattern in patterns:
        for path in [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern)):
            folder = store_folder(path)
            if StoreFile.is_in(folder):
                found.append(folder)
    return found


class _Watch:
    """One store, watched."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: _Opened | None = None
        self._last = Activity(str(folder))

    def look(self) -> Activity:
        try:
            if self._opened is None or self._opened.is_replaced():
                self._close()
                self._opened = _Opened(self._folder)
            self._last = replace(self._opened.look(), path=str(self._folder))
        except (EngramError, OSError) as error:
            self._close()
            return replace(self._last, problem=str(error), rate_in=None, rate_out=None)
        return self._last

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.file.close()


class _Opened:
    """A store's file, mapped read-only, and what was seen there before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = StoreFile.observed(folder)
        self._rows = ObservedRows(self.file.store)
        self._identity = os.fstat(self.file.fd)
        self._before: tuple[float, list[dict[str, Any]]] | None = None
        self._written_before: dict[int, int] = {}  # by each process
        self._incarnation = self.file.store.epoch()[0]
        self._episodes = [_Episodes(self._rows, lane) for lane in range(self.file.store.lanes)]

    def is_replaced(self) -> bool:
        """Whether another file lies there now."""
        now = os.stat(self._folder / StoreFile.NAME)
        return (now.st_dev, now.st_ino) != (self._identity.st_dev, self._identity.st_ino)

    def look(self) -> Activity:
        store = self.file.store
        incarnation = store.epoch()[0]
        if incarnation % 2:
            raise StorageInUseError("all rows are being replaced")
        if incarnation != self._incarnation:  # they have been: what was counted is of others
            self._incarnation, self._before, self._written_before = incarnation, None, {}
            self._episodes = [_Episodes(self._rows, lane) for lane in range(store.lanes)]
        store.check_file()
        now, lanes = time.monotonic(), [store.lane(i) for i in range(store.lanes)]
        before, self._before = self._before, (now, lanes)
        seconds = None if before is None else max(now - before[0], 1e-9)
        ends = [episodes.follow() for episodes in self._episodes]
        finished = [pair for episodes in self._episodes for pair in episodes.last]
        rates = [
            (0, 0) if before is None else (lane["published"] - old["published"], lane["first"] - old["first"])
            for lane, old in zip(lanes, lanes if before is None else before[1], strict=True)
        ]
        envs = store.envs
        return Activity(
            path="",
            rows=envs * sum(lane["published"] - lane["first"] for lane in lanes),
            capacity=store.lanes * store.lane_capacity * envs,
            written=envs * sum(_written(lane) for lane in lanes),
            rate_in=None if seconds is None else envs * sum(rate[0] for rate in rates) / seconds,
            rate_out=None if seconds is None else envs * sum(rate[1] for rate in rates) / seconds,
            in_use=self.file.is_in_use,
            writers=tuple(self._writers(lanes, [rate[0] for rate in rates], seconds)),
            episodes=sum(episodes.count for episodes in self._episodes) if all(ends) else None,
            returns=summary(np.array([pair[0] for pair in finished if pair[0] is not None])),
            lengths=summary(np.array([float(pair[1]) for pair in finished])),
            learners=tuple(published_stats(self._folder)),
            removed=store.removed_rows,
            rate=rate_figures(store),
            queue=queue_figures(store),
        )

    def _writers(self, lanes: list[dict[str, Any]], new: list[int], seconds: float | None) -> Iterator[WriterActivity]:
        """By process: of lanes which wrote them last, which is who writes there now, where anybody does."""
        envs, shares = self.file.store.envs, writer_shares(self.file.store)
        held = [self.file.has_writer(i, self.file.store) for i in range(len(lanes))]
        by_pid: dict[int, list[int]] = {}
        for i, lane in enumerate(lanes):
            if _written(lane) or held[i]:
                by_pid.setdefault(self.file.last_pid(i), []).append(i)
        for pid in {**dict.fromkeys(share.pid for share in shares), **by_pid}:
            numbers = by_pid.get(pid, [])
            if shares:  # writers move from lane to lane
                rows = sum(share.rows for share in shares if share.pid == pid)
                written = sum(share.written for share in shares if share.pid == pid)
                steps = written - self._written_before.get(pid, 0)
                self._written_before[pid] = written
            else:
                rows = sum(lanes[i]["published"] - lanes[i]["first"] for i in numbers)
                written = sum(_written(lanes[i]) for i in numbers)
                steps = sum(new[i] for i in numbers)
            yield WriterActivity(
                pid=pid or None,
                lanes=tuple(numbers),
                holds=any(held[i] for i in numbers),
                rows=envs * rows,
                written=envs * written,
                rate=None if seconds is None or (shares and not pid) else envs * max(0, steps) / seconds,
            )


def _written(lane: dict[str, Any]) -> int:
    """Steps ever written to a lane."""
    return int((lane["published"] - lane["origin"]) % (1 << 64))


class _Episodes:
    """The episodes of a lane, followed as they are written: those that end, with returns where there are rewards."""

    def __init__(self, rows: ObservedRows, lane: int) -> None:
        self._rows, self._lane = rows, lane
        self._seen: int | None = None  # the sequence after the last step that was read
        self._is_first = True
        self._tells: bool | None = None  # whether a key says where episodes end; None: not looked at yet
        envs = rows.store.envs
        self._running_return, self._running_length = np.zeros(envs), np.zeros(envs, np.int64)
        self._whole = np.zeros(envs, bool)  # whether the running episode was seen from what is known as its first step
        self.count = 0
        self.last: deque[tuple[float | None, int]] = deque(maxlen=_EPISODES)  #: return and length of those that ended

    def follow(self) -> bool:
        """Reads the steps that are new. False: no key says where episodes end."""
        stored = self._rows.stored(self._lane)
        most = _FIRST_STEPS if self._is_first else _MOST_STEPS
        start = max(stored.start, stored.stop - most, 0 if self._seen is None else self._seen)
        steps = range(min(start, stored.stop), stored.stop)
        if not steps and self._tells is not None:  # most lanes of a store with many of them
            return self._tells
        bounds = self._rows.boundaries(self._lane, steps)
        self._tells = bounds is not None
        if bounds is None or not steps:
            return self._tells
        leaf = self._rows.outcome("reward")
        rewards = None
        if leaf is not None:
            column = self._rows.column(leaf, self._lane, steps)
            rewards = column.astype(np.float64).reshape(len(steps), self._rows.store.envs, -1).sum(-1)
        if self._seen != steps.start or self._rows.stored(self._lane).start > steps.start:
            self._whole[:] = False  # steps were missed
        if self._rows.stored(self._lane).start <= steps.start:
            begins, ended = bounds
            is_start = steps.start == self._rows.store.lane(self._lane)["base"]  # of all that the lane was ever given
            known = ended | (begins & is_start)
            known[1:] &= ended[1:]
            self._take(begins, ended, known, rewards)
        self._seen, self._is_first = steps.stop, False
        return True

    def _take(
        self,
        begins: npt.NDArray[np.bool_],
        ended: npt.NDArray[np.bool_],
        known: npt.NDArray[np.bool_],
        rewards: npt.NDArray[np.float64] | None,
    ) -> None:
        """Takes in steps: which begin a trajectory, before which one ended, which surely begin an episode."""
        n, envs = begins.shape
        totals = np.zeros((n + 1, envs))
        if rewards is not None:
            totals[1:] = rewards.cumsum(0)
        env_of, at = np.nonzero(begins.T)
        first = np.append(True, env_of[1:] != env_of[:-1])[: len(at)]  # the first boundary of its environment here
        before = np.where(first, 0, np.append(0, at[:-1])[: len(at)])
        returns = totals[at, env_of] - totals[before, env_of] + np.where(first, self._running_return[env_of], 0.0)
        lengths = at - before + np.where(first, self._running_length[env_of], 0)
        whole = np.where(first, self._whole[env_of], known[before, env_of])
        over = ended[at, env_of]
        if not self._is_first:
            self.count += int(over.sum())
        for k in np.flatnonzero(over & whole & (lengths > 0))[np.argsort(at[over & whole & (lengths > 0)])][
            -_EPISODES:
        ]:
            self.last.append((None if rewards is None else float(returns[k]), int(lengths[k])))
        last = np.append(env_of[1:] != env_of[:-1], True)[: len(at)]
        start = np.zeros(envs, np.int64)
        start[env_of[last]] = at[last]
        goes_on = ~begins.any(0)
        running = totals[n] - totals[start, np.arange(envs)]
        self._running_return = np.where(goes_on, self._running_return, 0.0) + running
        self._running_length = np.where(goes_on, self._running_length, 0) + n - start
        self._whole = np.where(goes_on, self._whole, known[start, np.arange(envs)])
