"""A buffer of any combination in the middle of its life: the steps that it can take, what it holds, to the bit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from contracts.waiting import seems_alone
from engram import _native
from engram.data import ReplayBuffer, Storage, TensorDictReplayBuffer, TensorStorage
from engram.data.replay_buffers.reading import prefetch
from engram.store.positions import position_at
from law.combos import CAPACITY, CHECKPOINTERS, LIMITERS, SAMPLERS, TRANSFORMS, WRITERS, Combo

# ---- steps as environments bring them: every value follows from the time and the environment ----
_LENGTHS = [3, 5, 2, 7, 4, 6, 3, 9]
_MOST = 4000


def _episodes(env: int) -> tuple[list[int], list[int], list[bool]]:
    """Of each time step: its episode, its place in it, and whether it is the last one there."""
    ids, places, lasts, k = [], [], [], env
    while len(ids) < _MOST:
        n = _LENGTHS[k % len(_LENGTHS)]
        ids += [k * 8 + env] * n
        places += range(n)
        lasts += [False] * (n - 1) + [True]
        k += 1
    return ids[:_MOST], places[:_MOST], lasts[:_MOST]


_KNOWN = [_episodes(env) for env in range(3)]


def steps(start: int, count: int, envs: int) -> TensorDict:
    """Steps of TED, `[count]`, or `[envs, count]` with environments."""
    return _steps(start, count, envs).clone()


@functools.lru_cache(maxsize=1000)  # a buffer, its twins and the next buffers are given the same ones
def _steps(start: int, count: int, envs: int) -> TensorDict:
    rows = [_rows(env, start, count) for env in range(max(envs, 1))]
    return torch.stack(rows) if envs else rows[0]


def _rows(env: int, start: int, count: int) -> TensorDict:
    ids, places, lasts = (torch.tensor(known[start : start + count]) for known in _KNOWN[env])
    time = torch.arange(start, start + count)
    done = lasts.bool().unsqueeze(-1)
    following = _observation(ids, places + 1)
    # Where a step is followed by something else than it says, as after a wrapper's reset.
    following[time % 11 == 3] += 0.25
    reward = ((time * 7919 + env * 31) % 101).float().unsqueeze(-1) / 8
    made = {
        "observation": _observation(ids, places),
        "action": (time * 13 + env) % 5,
        "collector": TensorDict({"traj_ids": ids}, [count]),
        "td_error": (time * 31 % 17).float() / 4,
        "next": TensorDict(
            {
                "observation": following, "reward": reward, "done": done, "terminated": done.clone(),
                "truncated": torch.zeros_like(done),
            },
            [count],
        ),
    }  # fmt: skip
    return TensorDict(made, [count])


def _observation(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    k = (ids * 16 + places).float()
    return torch.stack([k, (k * 0.7).sin(), -k], -1)


def changed(rows: Any, by: float) -> Any:
    """Stored rows with another reward and observation, to be written in their place."""
    if isinstance(rows, list):
        return [changed(row, by) for row in rows]
    rows = rows.clone()
    rows["next", "reward"] = rows["next", "reward"] + by
    rows["observation"] = rows["observation"] - by
    return rows


# ---- values as something that `==` compares to the bit ----
# What names a store, and which nobody can draw from: the twin's has a name of its own, and counts its loads.
_OWN = ("incarnation", "store")


def frozen(value: Any) -> Any:
    """Types, dtypes, shapes, batch sizes and bits; dicts in any order."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.numpy().tobytes())
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, TensorDictBase):
        entries = {key: frozen(value.get(key)) for key in sorted(value.keys(), key=str)}
        return (type(value).__name__, tuple(value.batch_size), str(value.device), entries)
    if isinstance(value, dict):
        return {str(key): frozen(member) for key, member in value.items() if key not in _OWN}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(frozen, value)]
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, value)


def difference(mine: Any, its: Any, where: str = "") -> str | None:
    """The first place where two frozen values differ; None: they are equal."""
    if mine == its:
        return None
    if isinstance(mine, dict) and isinstance(its, dict) and mine.keys() == its.keys():
        parts = [(f"{where}[{key!r}]", mine[key], its[key]) for key in mine]
    elif isinstance(mine, list | tuple) and isinstance(its, list | tuple) and len(mine) == len(its):
        if mine[:1] == ("tensor",) and mine[:3] == its[:3]:
            return f"{where}: {_shown(mine)} and {_shown(its)}"
        parts = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(mine, its, strict=True))]
    else:
        return f"{where}: {mine!r:.300} and {its!r:.300}"
    return next(said for said in (difference(a, b, place) for place, a, b in parts) if said)


def _shown(value: Any) -> str:
    dtype = getattr(torch, value[1].removeprefix("torch."))
    made = torch.frombuffer(bytearray(value[3]), dtype=dtype) if value[3] else torch.empty(0)
    return f"{made.reshape(value[2]).tolist()!r:.600}"


# ---- prefetch whose threads are done whenever a step ends: what a batch holds must not hang on the scheduler ----
_running: list[concurrent.futures.Future[Any]] = []


class PromptPool(concurrent.futures.ThreadPoolExecutor):
    """Knows what it was given."""

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        future = super().submit(*args, **kwargs)
        _running.append(future)
        return future


def use_prompt_threads(patch: pytest.MonkeyPatch) -> None:
    """Prefetching threads are done at the end of each step, and rows that no such thread copies are copied when their
    batch is taken: a copying thread may copy them before the writes of later steps or after.
    """
    patch.setattr(prefetch, "ThreadPoolExecutor", PromptPool)
    make = _native.CopyThreads
    patch.setattr(_native, "CopyThreads", lambda most: make(0))
    seems_alone(patch)


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """A block after which nothing is being prepared, also where it fails in its middle."""
    try:
        yield
    finally:
        while _running:
            concurrent.futures.wait([_running.pop()])


# ---- a buffer in the middle of its life, and the steps that it can take ----
BATCH = 6


class Memory(NamedTuple):
    """What the caller of a buffer knows: where its environments stand, and what it drew last."""

    time: int = 0
    index: Any = None
    generation: Any = None
    position: Any = None  # of each lane of a queue, the row behind those that were handed out; and the version


class World:
    """A buffer and its caller."""

    def __init__(self, combo: Combo, folder: Path, *, seed: int = 1, capacity: int = CAPACITY, rb: Any = None) -> None:
        self.combo, self.folder, self.seed, self.capacity = combo, folder, seed, capacity
        self.memory = Memory()
        self.rb = self._made(self._storage()) if rb is None else rb
        if self.combo.commits:
            self.rb.seek(None)

    # ---- making ----
    def _storage(self) -> Storage:
        place = self.combo.place
        total = self.capacity * max(place.envs, 1) * place.lanes
        made = place.make(total, self.new_folder)
        return self._tensors(total) if made is None else made

    def _tensors(self, total: int) -> Storage:
        """Around tensors with the keys that will be written, empty."""
        envs = self.combo.place.envs
        plain = {"storage": "memory, envs" if envs else "memory", "sampler": "random", "limiter": "none"}
        like = World(self.combo._replace(**plain), self.folder, capacity=99)
        like.rb.extend(steps(0, 60, envs))
        row = like.rb.storage.get(0)
        data = row.expand(self.capacity, *row.batch_size).clone()
        storage = TensorStorage(data, ndim=2 if envs else 1)
        storage.empty()
        return storage

    def _made(self, storage: Storage) -> Any:
        kind = TensorDictReplayBuffer if self.combo.tensordict else ReplayBuffer
        writer = "round robin" if self.combo.writer == "immutable" else self.combo.writer
        return self.with_transforms(kind(storage=storage, writer=WRITERS[writer](), **self.parts()))

    def parts(self) -> dict[str, Any]:
        """What a buffer is made of, but for storage and writer."""
        combo = self.combo
        return {
            "sampler": SAMPLERS[combo.sampler](), "prefetch": combo.prefetch, "batch_size": BATCH,
            "generator": torch.Generator().manual_seed(self.seed) if combo.own_generator else None,
            "checkpointer": None if combo.way == "in memory" else CHECKPOINTERS[combo.checkpointer](),
            "track_generations": combo.tensordict, "rate_limiter": LIMITERS[combo.limiter](),
        }  # fmt: skip

    def with_transforms(self, rb: Any) -> Any:
        for transform, invert in TRANSFORMS[self.combo.transform]():
            rb.append_transform(transform, invert=invert)
        return rb

    def closed(self) -> None:
        """From now on the data do not change, where the writer says so."""
        if self.combo.writer == "immutable":
            self.rb.set_writer(WRITERS["immutable"]())

    def goes_on(self) -> None:
        """Rows were loaded: whoever takes them out of a queue, and commits, has a model of the same moment."""
        if self.combo.commits:
            lanes = self.rb.storage.lanes
            self.rb.seek(position_at(lanes, lanes.queue.consumed) if self.rb.storage.initialized else None)

    def new_folder(self) -> Path:
        return next(path for i in itertools.count() if not (path := self.folder / f"store-{i}").exists())

    # ---- steps ----
    def step(self, name: str, number: int) -> Any:
        """Takes a step; what it gave, to the bit. Errors are what it gave, too."""
        torch.default_generator.manual_seed(1000 + number)  # `torch.manual_seed` without the other devices
        try:
            with settled():
                said = getattr(self, name)()
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError, TimeoutError) as error:
            said = (type(error).__name__, str(error))
        if self.combo.way == "reopened":
            if self.rb.storage.initialized:
                self.rb.storage.lanes.mark_seam()  # whoever comes next is another process
            self.rb.storage.release()
        return frozen(said)

    def _data(self, count: int) -> Any:
        time = self.memory.time
        self.memory = self.memory._replace(time=time + count)
        return steps(time, count, self.combo.place.envs)

    # Where those who write may wait, they write at once what there is room for, and a TimeoutError says how much that
    # was: there is no other thread that would make more. Nobody draws before there is a batch.
    @property
    def _at_once(self) -> dict[str, Any]:
        return {"timeout": 0} if self.combo.waits else {}

    def _check_batch(self) -> None:
        if self.combo.waits and not self.rb.can_sample():
            raise IndexError("no batch can be drawn")

    def extend(self) -> Any:
        return self.rb.extend(self._data(5), **self._at_once)

    def extend_whole_trajectories(self) -> Any:
        return self.rb.extend(self._data(10), **self._at_once)

    def extend_beyond(self) -> Any:
        return self.rb.extend(self._data(2 * CAPACITY + 5), **self._at_once)

    def extend_list(self) -> Any:
        data = self._data(3)
        return self.rb.extend(list(data.unbind(-1)), **self._at_once)

    def add(self) -> Any:
        return self.rb.add(self._data(1)[..., 0], **self._at_once)

    def sample(self) -> Any:
        self._check_batch()
        batch, info = self.rb.sample(return_info=True)
        self.memory = self.memory._replace(index=info["index"], generation=info.get("generation"))
        return batch, info

    def sample_three(self) -> Any:
        return [self.sample() for _ in range(3)]

    def iterate(self) -> Any:
        return self._batches(2)

    def finish_epoch(self) -> Any:
        return self._batches(20)

    def _batches(self, most: int) -> list[Any]:
        # A loop over a queue that nobody else can write to ends by itself, with the rest as a shorter batch.
        ends = self.combo.is_queue and not self.combo.commits and self.rb.storage.lanes.copied_by_fork
        found: list[Any] = []
        for batch in itertools.islice(self.rb, most if ends or not self.combo.waits or self.rb.can_sample() else 0):
            found.append(batch)
            if self.combo.waits and not ends and not self.rb.can_sample():
                break
        return found

    def update(self) -> Any:
        """Priorities of what was drawn last, some of several numbers each."""
        index = self._drawn()
        n = len(index[0]) if isinstance(index, tuple) else len(index)
        priority = torch.linspace(0.1, 3.0, n * 2).reshape(n, 2).flip(0)
        return self.rb.update_priority(index, priority, self.memory.generation)

    def update_one(self) -> Any:
        index = self._drawn()
        return self.rb.update_priority(index, torch.tensor(9.0))

    def flush(self) -> Any:
        lanes = self.rb.storage.lanes
        if self.combo.waits and not (lanes.store.may_insert() and (lanes.queue is None or lanes.queue.room > 9)):
            raise IndexError("no room")
        return self.rb.flush_transforms()

    def replace(self) -> Any:
        where = list(range(min(3, len(self._times()))))
        if not where:
            raise IndexError("nothing to replace")
        self.rb[where] = changed(self._raw(where), 0.5)

    def replace_present(self) -> Any:
        index = self._drawn()
        rows = self.rb.storage.get(index)
        return self.rb.update_if_present(index=index, generation=self.memory.generation, patch=changed(rows, 7.0))

    def mark(self) -> Any:
        return self.rb.mark_update(self._drawn())

    def empty(self) -> Any:
        self.memory = self.memory._replace(position=None)
        return self.rb.empty()

    def settings(self) -> Any:
        """What may be changed at any time."""
        sampler = self.rb.sampler
        if hasattr(sampler, "beta"):
            sampler.beta = 0.9
        if self.combo.is_queue and self.rb.storage.initialized:
            sampler.consumer_version = _KNOWN[0][0][self.memory.time]

    def position(self) -> Any:
        """Of the rows that were handed out of a queue, for a checkpoint."""
        if self.combo.is_queue:
            position = self.rb.position()
            self.memory = self.memory._replace(position=(position["rows"], position["version"]))
        return self.memory.position

    def commit(self) -> Any:
        return self.rb.commit(self._sought()) if self.combo.is_queue else None

    def seek(self) -> Any:
        """Back to the last position; what it was taken of is the model of this world."""
        return self.rb.seek(self._sought()) if self.combo.is_queue else None

    def _sought(self) -> Any:
        if self.memory.position is None:
            raise IndexError("no position")
        rows, version = self.memory.position
        return {**position_at(self.rb.storage.lanes, rows), "version": version}

    def others(self) -> Any:
        """Other processes write to lanes of their own."""
        if self.combo.place.lanes < 2:
            return self.rb.extend(self._data(4), **self._at_once)
        with contextlib.ExitStack() as opened:
            for count in (4, 9):
                storage = pickle.loads(bytes(ForkingPickler.dumps(self.rb.storage)))
                opened.callback(storage.close)
                other = self.with_transforms(ReplayBuffer(storage=storage, writer=type(self.rb.writer)()))
                other.extend(self._data(count), **self._at_once)
        return len(self.rb)

    def release(self) -> Any:
        """The lane is given back; whoever writes next is somebody else. With several lanes that may be anyone."""
        if self.combo.place.lanes == 1:
            self.rb.storage.release()

    def _times(self) -> range:
        storage = self.rb.storage
        return range(len(storage) // max(1, self.combo.place.envs))

    def _raw(self, where: list[int]) -> Any:
        rows = self.rb.storage.get(where)
        return rows.transpose(0, 1) if self.combo.place.envs else rows

    def _drawn(self) -> Any:
        if self.memory.index is None:
            raise IndexError("nothing was drawn")
        return self.memory.index

    # ---- what it is ----
    def state(self) -> Any:
        """Everything that there is to know about the buffer, to the bit."""
        rb, lanes = self.rb, self.rb.storage.lanes
        saved = rb.state_dict()
        for lane in saved["storage"].get("counters", {}).get("lanes", []):
            lane["seams"] = [seam for seam in lane.get("seams", []) if seam > lane["base"]]
            if "queue" in lane:  # rows that were overwritten are gone, whatever was done with them
                first = lane["base"] * max(1, self.combo.place.envs)
                lane["queue"] |= {name: max(lane["queue"][name], first) for name in ("consumed", "kept")}
        if not rb.write_count:  # what a twin keeps of the layout of its life before, nobody sees before the first row
            return frozen({"length": len(rb), "generator": saved["generator"]})
        numbers = lanes.generations(torch.arange(lanes.capacity))
        cursor = rb.writer._cursor
        return frozen(
            {
                "length": len(rb), "written": rb.write_count, "cursor": cursor, "generations": numbers, "saved": saved,
                "figures": self._figures(),
            }
        )  # fmt: skip

    def _figures(self) -> dict[str, Any]:
        """What there is to know of who waits for whom."""
        if not self.combo.waits:
            return {}
        stats, queue = self.rb.stats(), self.rb.storage.lanes.queue
        names = ("samples", "samples_per_insert", "waiting", "uncommitted", "stale", "versions")
        found = {name: getattr(stats, name) for name in names}
        # Those that were overwritten since the last batch count as missed with the next one.
        missed = stats.missed + queue.just_missed if self.combo.is_queue else 0
        return {**found, "missed": missed}

    def contents(self) -> Any:
        """What a buffer of another capacity has, too: rows by age, priorities, what transforms carry."""
        rb = self.rb
        saved = rb.state_dict()
        rows = {key: value for key, value in saved["storage"].items() if key in ("rows", "items", "layout")}
        said = {key: saved[key] for key in ("transform", "generator")}
        sampler = {key: value for key, value in saved["sampler"].items() if key in ("max_priority", "beta", "skipped")}
        said = {**said, "rows": rows, "sampler": sampler, "figures": self._figures()}
        return frozen({**said, "length": len(rb), "written": rb.write_count})

    def end(self) -> None:
        """Threads and files are given back."""
        self.rb.set_sampler(SAMPLERS["random"]())
        with contextlib.suppress(Exception):
            self.rb.storage.close()
