"""Three programs of an actor and a learner in processes of their own, which wait for each other: ours, and by hand.

    python -m benchmarks.programs.in_time                 # all three, about two minutes
    python -m benchmarks.programs.in_time --only groups

- **ratio**: Pendulum steps and a SAC-like update of 256 rows for each row, `SampleToInsertRatio(256)`; by hand two
  shared counters beside the same store; free: nobody waits for anybody.
- **once**: Pendulum steps, 32 at a time, of which each is trained once, 256 an update, `QueueSampler()`; by hand a
  `multiprocessing.Queue` of dicts of arrays; free: uniform draws, nobody waits.
- **groups**: groups of 8 completions, 32 an update, whose learner saves its model each ten updates and is killed now
  and then, `QueueSampler(commit="manual")`; by hand a manager's queue, and a checkpoint.

`ratio` and `once` run with a slower learner and with a slower actor; forms take turns. Printed: updates and rows a
second (median, least and most of the turns), draws for each row, and of `groups` how many were lost or trained twice.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import nn

from engram.data import LazyMemmapStorage, QueueSampler, ReplayBuffer, SampleToInsertRatio, TensorDictReplayBuffer

OURS, BY_HAND, FREE = "engram", "by hand", "free"
BATCH, PIECE, LEAST = 256, 32, 1_000
GROUPS, SAVED_EACH = 32, 10


class Speed(NamedTuple):
    updates: float  #: a second
    rows: float  #: a second
    draws: float  #: for each row


def _steps() -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Pendulum under a random policy, one step after the other."""
    env = gymnasium.make("Pendulum-v1")
    obs, _ = env.reset(seed=0)
    while True:
        action = env.action_space.sample()
        following, reward, terminated, truncated, _ = env.step(action)
        yield {
            "obs": obs,
            "action": action,
            "reward": np.float32(reward),
            "next": following,
            "done": np.asarray(terminated),
        }
        obs = env.reset()[0] if terminated or truncated else following


def _pieces(n: int) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    steps = _steps()
    while True:
        rows = [next(steps) for _ in range(n)]
        yield {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def _busy(seconds: float) -> None:
    """An environment, or a learner, that takes so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Learner:
    """Two critics and an actor, as SAC has, without what takes no time."""

    def __init__(self, width: int = 64) -> None:
        torch.set_num_threads(1)
        self.critics = [self._net(4, width) for _ in range(2)]
        self.actor = self._net(3, width)
        parameters = [p for net in (*self.critics, self.actor) for p in net.parameters()]
        self.optimizer = torch.optim.Adam(parameters, 1e-3)

    @staticmethod
    def _net(inputs: int, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 1))

    def update(self, batch: Any) -> None:
        obs, action, reward = (torch.as_tensor(batch[key]) for key in ("obs", "action", "reward"))
        both = torch.cat([obs, action], -1)
        loss = self.actor(obs).square().mean()
        for critic in self.critics:
            loss = loss + (critic(both)[:, 0] - reward.reshape(-1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


# ---- an actor and a learner that wait for each other ----
def _buffer(folder: str, **parts: Any) -> TensorDictReplayBuffer:
    rows = parts.pop("rows", 100_000)
    storage = LazyMemmapStorage(rows, scratch_dir=folder, shared_init=True, existsok=True)
    return TensorDictReplayBuffer(storage=storage, batch_size=BATCH, **parts)


class Ratio:
    """A row is drawn 256 times, after the first thousand."""

    piece = 1
    work_s = 2e-3  #: of the slower side, for each update or piece

    def __init__(self, form: str) -> None:
        self.form, self.folder = form, tempfile.mkdtemp()
        context = multiprocessing.get_context("spawn")
        self.written, self.drawn = context.Value("q", 0), context.Value("q", 0)

    def buffer(self) -> TensorDictReplayBuffer:
        limiter = SampleToInsertRatio(BATCH, LEAST) if self.form == OURS else None
        return _buffer(self.folder, rate_limiter=limiter)

    def writing(self) -> Callable[[Any], Any]:
        rb = self.buffer()

        def write(piece: Any) -> None:
            while self.form == BY_HAND and self.drawn.value < BATCH * (self.written.value - LEAST - 16):
                time.sleep(1e-4)
            rb.extend(piece)
            with self.written.get_lock():
                self.written.value += len(piece["obs"])

        return write

    def taking(self) -> Callable[[], Any]:
        rb = self.buffer()

        def take() -> Any:
            if self.form == BY_HAND:
                while self.drawn.value + BATCH > BATCH * (self.written.value - LEAST + 16):
                    time.sleep(1e-4)
            else:
                while self.form == FREE and len(rb) < LEAST:
                    time.sleep(1e-3)
            batch = rb.sample()
            with self.drawn.get_lock():
                self.drawn.value += BATCH
            return batch

        return take


class Once(Ratio):
    """Each row is trained once; there is room for three batches."""

    piece = PIECE
    work_s = 2e-2  #: more than it takes to step the rows of an update

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self.queue = multiprocessing.get_context("spawn").Queue(3 * BATCH // PIECE)

    def buffer(self) -> TensorDictReplayBuffer:
        if self.form == OURS:
            return _buffer(self.folder, rows=3 * BATCH, sampler=QueueSampler())
        return _buffer(self.folder)

    def writing(self) -> Callable[[Any], Any]:
        put: Callable[[Any], Any] = self.queue.put if self.form == BY_HAND else self.buffer().extend

        def write(piece: Any) -> None:
            put(piece)
            with self.written.get_lock():
                self.written.value += PIECE

        return write

    def taking(self) -> Callable[[], Any]:
        if self.form != BY_HAND:
            return super().taking()

        def take() -> Any:
            pieces = [self.queue.get() for _ in range(BATCH // PIECE)]
            with self.drawn.get_lock():
                self.drawn.value += BATCH
            return {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}

        return take


def _act(program: Ratio, work: float) -> None:
    torch.set_num_threads(1)
    write = program.writing()
    for piece in _pieces(program.piece):
        _busy(work)
        write(piece)


def speed(kind: type[Ratio], form: str, actor_s: float, learner_s: float, seconds: float) -> Speed:
    """Of a learner in this process and an actor in another, each of which works so long for an update or a piece."""
    program = kind(form)
    actor = multiprocessing.get_context("spawn").Process(target=_act, args=(program, actor_s), daemon=True)
    actor.start()
    learner, take = Learner(), program.taking()
    try:
        for _ in range(20):
            learner.update(take())
        written, drawn, began = program.written.value, program.drawn.value, time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            learner.update(take())
            _busy(learner_s)
        written, drawn = program.written.value - written, program.drawn.value - drawn
    finally:
        actor.kill()
        actor.join()
    return Speed(drawn / BATCH / passed, written / passed, drawn / max(1, written))


# ---- groups that are trained once, whoever is killed ----
class Groups:
    """Groups with a number each, and a learner whose checkpoint has the numbers that its model was trained with."""

    def __init__(self, form: str, groups: int) -> None:
        self.form, self.groups, self.folder = form, groups, tempfile.mkdtemp()
        self.path = os.path.join(self.folder, "model.pt")
        # One whose consumers may be killed: who is killed in the `get` of a plain one has its lock for ever.
        self.queue: Any = None if form == OURS else multiprocessing.Manager().Queue(1_024)

    def buffer(self) -> ReplayBuffer[Any]:
        storage = LazyMemmapStorage(1_024, scratch_dir=self.folder, shared_init=True, existsok=True)
        return ReplayBuffer(storage=storage, sampler=QueueSampler(commit="manual"), batch_size=GROUPS)

    def act(self) -> None:
        put: Callable[[Any], Any] = self.buffer().add if self.queue is None else self.queue.put
        obs = np.zeros((8, 64), np.float32)
        for number in range(self.groups):
            put({"obs": obs, "number": np.int64(number)})

    def learn(self) -> None:
        torch.set_num_threads(1)
        model, trained = nn.Linear(64, 1), list[int]()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        rb = self.buffer() if self.queue is None else None
        if rb is not None:
            rb.seek(None)
        if os.path.exists(self.path):
            saved = torch.load(self.path)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            trained = saved["trained"]
            if rb is not None:
                rb.seek(saved["position"])
        while len(trained) < self.groups:
            for _ in range(SAVED_EACH):
                if rb is not None:
                    batch = rb.sample()
                else:
                    groups = [self.queue.get() for _ in range(GROUPS)]
                    batch = {key: torch.as_tensor(np.stack([group[key] for group in groups])) for key in groups[0]}
                optimizer.zero_grad()
                model(batch["obs"]).square().mean().backward()
                optimizer.step()
                trained += batch["number"].tolist()
                _busy(5e-3)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "trained": trained}
            if rb is None:
                self._save(state)
            else:
                with rb.committing() as position:
                    self._save({**state, "position": position})

    def _save(self, state: Any) -> None:
        torch.save(state, self.path + ".new")
        os.replace(self.path + ".new", self.path)

    def run(self, kills: int) -> tuple[float, int, int, int]:
        """Groups a second, how many were trained, were lost, and were trained twice."""
        context = multiprocessing.get_context("spawn")
        actor = context.Process(target=self.act, daemon=True)
        actor.start()
        began, pauses = time.time(), random.Random(0)
        for left in range(kills, -1, -1):
            learner = context.Process(target=self.learn, daemon=True)
            learner.start()
            if left:
                learner.join(pauses.uniform(3.0, 4.0))
            else:
                self._wait_for(learner)
            learner.kill()
            learner.join()
        passed = self._saved_at() - began
        actor.kill()
        counts = Counter(torch.load(self.path)["trained"])
        twice = sum(n > 1 for n in counts.values())
        return sum(counts.values()) / passed, len(counts), self.groups - len(counts), twice

    def _wait_for(self, learner: Any) -> None:
        """Until it has all groups, or has saved nothing for five seconds: those that were lost never come."""
        while learner.is_alive():
            before = self._saved_at()
            learner.join(5.0)
            if before and before == self._saved_at():
                return

    def _saved_at(self) -> float:
        return os.path.getmtime(self.path) if os.path.exists(self.path) else 0.0


def _shown(figures: list[float]) -> str:
    return f"{statistics.median(figures):>10,.0f} ({min(figures):,.0f} to {max(figures):,.0f})"


def _compare(name: str, kind: type[Ratio], turns: int, seconds: float) -> None:
    for slower, actor_s, learner_s in (("learner", 0.0, kind.work_s), ("actor", kind.work_s, 0.0)):
        found: dict[str, list[Speed]] = {form: [] for form in (OURS, BY_HAND, FREE)}
        for _ in range(turns):
            for form, figures in found.items():
                figures.append(speed(kind, form, actor_s, learner_s, seconds))
        print(f"{name}, with a slower {slower}")
        for form, figures in found.items():
            updates, rows = _shown([f.updates for f in figures]), _shown([f.rows for f in figures])
            draws = statistics.median([f.draws for f in figures])
            print(f"  {form:<8} updates/s {updates}  rows/s {rows}  draws a row {draws:,.2f}")
        of_slower: Callable[[Speed], float] = (lambda f: f.updates) if slower == "learner" else (lambda f: f.rows)
        for other in (BY_HAND, FREE):
            ratios = [of_slower(a) / of_slower(b) for a, b in zip(found[OURS], found[other], strict=True)]
            print(
                f"  the {slower} has {statistics.median(ratios):.2f} of its speed {other} "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["ratio", "once", "groups"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--kills", type=int, default=5)
    given = parser.parse_args()
    for name, kind in (("ratio", Ratio), ("once", Once)):
        if given.only in (None, name):
            _compare(name, kind, given.turns, given.seconds)
    if given.only in (None, "groups"):
        for form in (OURS, BY_HAND):
            rate, trained, lost, twice = Groups(form, 32_000).run(given.kills)
            what = f"groups, killed {given.kills} times: {form:<8} {trained:,} trained, {lost:,} lost, {twice:,} twice"
            print(f"{what}; {rate:,.0f} groups/s", flush=True)


if __name__ == "__main__":
    main()
