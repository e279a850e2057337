"""No memory, at each native allocation of each call: an error, nothing changed, and the same call then succeeds."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.ted_rings import ted_steps
from contracts.tiers import in_ci
from crash.buffers import _flat
from engram import _native
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.storages import single_steps as time_steps
from engram.store import files as recovery
from engram.testing.helpers import env_steps, numbers, steps
from native.allocations import World, check

CAPACITY = 60


def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="engram-alloc-"))


#: What each of a case's many worlds begins with is made once in its child.
once = functools.cache


@once
def _rows(n: int, salt: int) -> TensorDict:
    return ted_steps(n, salt=[salt], length=6.0)


def rows_of(n: int, salt: int) -> TensorDict:
    return _rows(n, salt).clone()


STORAGES: dict[str, Callable[[], Any]] = {
    "memory": lambda: LazyTensorStorage(CAPACITY),
    "shared": lambda: LazyTensorStorage(CAPACITY, shared=True),
    "temporary": lambda: LazyMemmapStorage(CAPACITY),
    "named": lambda: LazyMemmapStorage(CAPACITY, scratch_dir=folder()),
    "list": lambda: ListStorage(CAPACITY),
}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "prioritised": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
    "prioritised within": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5, max_priority_within_buffer=True),
    "slices": lambda: SliceSampler(num_slices=2, strict_length=False),
    "weighed": lambda: SliceSampler(num_slices=2, weight="steps"),
    "slice epochs": lambda: SliceSamplerWithoutReplacement(num_slices=2, strict_length=False),
    "sequences": lambda: SequenceSampler(slice_len=3, burn_in=2),
    "prioritised slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, num_slices=2, strict_length=False),
}


def sampler_state(rb: Any) -> bytes:
    if not len(rb):
        return b""
    return _flat(rb.state_dict()["sampler"])


def seen(rb: Any) -> Callable[[], dict[str, Any]]:
    def found() -> dict[str, Any]:
        lanes = rb.storage.lanes
        return {
            "length": len(rb),
            "count": rb.write_count,
            "rows": _flat(rb[:]) if len(rb) else b"",
            "lanes": [[one["first"], one["published"], one["seams"]] for one in lanes.states()],
            "sampler": sampler_state(rb),
            "writer": _flat(rb.writer.state_dict()),
        }

    return found


def buffer(storage: str = "memory", sampler: str = "random", rows: int = 80, **parts: Any) -> Any:
    rb = TensorDictReplayBuffer(storage=STORAGES[storage](), sampler=SAMPLERS[sampler](), batch_size=6, **parts)
    for start in range(0, rows, 40):
        rb.extend(rows_of(40, start))
    return rb


def batch_of(result: Any) -> bytes:
    return _flat(result)


def first_extend(storage: str) -> World:
    rb = TensorDictReplayBuffer(storage=STORAGES[storage](), batch_size=6)
    rows = rows_of(25, 7)

    def found() -> dict[str, Any]:
        return {"length": len(rb), "rows": _flat(rb[:]) if len(rb) else b""}

    return World(lambda: rb.extend(rows), found, batch_of, keeps_open=storage != "memory")


def extend(storage: str) -> World:
    rb = buffer(storage)
    rows = rows_of(25, 7)
    return World(lambda: rb.extend(rows), seen(rb), batch_of)


def add(storage: str) -> World:
    rb = buffer(storage)
    row = rows_of(1, 7)[0]
    return World(lambda: rb.add(row), seen(rb), batch_of)


def append_step(storage: str) -> World:
    rb = ReplayBuffer(storage=STORAGES[storage](), batch_size=6)
    row = {"x": np.ones(3), "next": {"x": np.zeros(3, np.float32), "done": np.zeros(1, np.bool_)}}
    rb.add({"x": np.zeros(3, np.float32), "next": {"x": np.ones(3, np.float32), "done": np.zeros(1, np.bool_)}})
    return World(lambda: time_steps.append_step(rb.storage, row), seen(rb), batch_of)


def read_leaves(storage: str) -> World:
    rb = buffer(storage)
    done, reward = ("next", "done"), ("next", "reward")
    slots, discounts = np.array([3, 50, 4]), np.ones(4)
    return World(
        lambda: (
            time_steps.read_leaves(rb.storage, slots, (reward, done)).batch,
            [*time_steps.read_n_steps(rb.storage, slots, discounts, reward, done)],
        ),
        seen(rb),
        batch_of,
    )


def replace(storage: str) -> World:
    rb = buffer(storage)
    rb.storage.flush() if storage == "named" else None
    rows = rows_of(40, 7)
    slots = torch.arange(5, 45)
    return World(lambda: rb.__setitem__(slots, rows), seen(rb))


def read(storage: str) -> World:
    few = storage == "list"  # each item is allocated by itself, in the same way
    rb = TensorDictReplayBuffer(storage=ListStorage(9), batch_size=6) if few else buffer(storage)
    if few:
        rb.extend(rows_of(12, 0))
    return World(lambda: (rb[torch.tensor([3, 8 if few else 50, 4])], rb[:], rb[-1]), seen(rb), batch_of)


def sample(storage: str, sampler: str) -> World:
    rb = buffer(storage, sampler)
    return World(lambda: rb.sample(return_info=True), seen(rb), lambda found: batch_of(found[0]))


def sample_again(sampler: str) -> World:
    """With rows since the last time, more than one round of them, and some that changed in place."""
    rb = buffer("memory", sampler)
    rb.sample()
    if "prioritised" in sampler:
        rb.update_priority(torch.arange(60), torch.arange(1.0, 61.0))
    rb.extend(rows_of(25, 8))
    rb[30:40] = rows_of(10, 9)
    return World(rb.sample, seen(rb), batch_of)


def iterated(sampler: str) -> World:
    rb = buffer("memory", sampler)
    return World(lambda: next(iter(rb)), seen(rb), batch_of)


def last_of_an_epoch(sampler: str) -> World:
    rb = buffer("memory", sampler)
    for batch in rb:
        if len(batch) < 6 or rb.sampler.ran_out:
            break
    return World(rb.sample, seen(rb), batch_of)


def update(storage: str, sampler: str = "prioritised", again: bool = False) -> World:
    rb = buffer(storage, sampler)
    slots, priorities = torch.arange(0, 40, 2), torch.arange(1.0, 21.0)
    if again:
        rb.update_priority(slots, priorities)
        rb.extend(rows_of(25, 8))
        rb[30:40] = rows_of(10, 9)
    return World(lambda: rb.update_priority(slots, priorities), seen(rb))


def growing_priorities() -> World:
    """Of a list without limit, whose tree of priorities grows."""
    sampler = PrioritizedSampler(None, 0.7, 0.5)
    rb = ReplayBuffer(storage=ListStorage(None), sampler=sampler, batch_size=6)
    rb.extend(list(range(1000)))
    rb.update_priority(torch.arange(1000), torch.arange(1.0, 1001.0))
    rb.extend(list(range(1000, 1100)))
    return World(rb.sample, lambda: {"sampler": sampler_state(rb)}, batch_of)


def best(storage: str, rows: int = 80, changed: bool = False) -> World:
    """Rows that replace others; with fewer stored ones some that are appended; with `changed` ranks that are new."""
    rb = buffer(storage, rows=0, writer=TensorDictMaxValueWriter(rank_key=("collector", "traj_ids")))
    for start in range(0, rows, 10):  # fewer at a time than come later
        rb.extend(rows_of(10, start))
    if changed:
        rb[10:20] = rows_of(10, 9)
    more = rows_of(25, 7)
    more["collector", "traj_ids"] += 5
    return World(lambda: rb.extend(more), seen(rb), batch_of)


def best_of_too_many() -> World:
    rb = buffer("memory", rows=40, writer=TensorDictMaxValueWriter(rank_key=("collector", "traj_ids")))
    rb.empty()
    rows = rows_of(80, 7)
    return World(lambda: rb.extend(rows), seen(rb), batch_of)


def environments() -> World:
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY, ndim=2), batch_size=6)
    rb.extend(env_steps(3, 0, 18))

    def found() -> dict[str, Any]:
        return {"rows": numbers(rb[:]), "count": rb.write_count}

    return World(lambda: rb.extend(env_steps(3, 18, 30)), found, batch_of)


def ensemble() -> World:
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY)) for _ in range(3)]
    for k, member in enumerate(members):
        member.extend(steps(100 * k, 100 * k + 30))
    rb = ReplayBufferEnsemble(*members, batch_size=6)
    return World(rb.sample, lambda: {"rows": [_flat(one[:]) for one in members]}, batch_of)


def ensemble_of_epochs() -> World:
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SAMPLERS["epochs"]()) for _ in "ab"]
    for k, member in enumerate(members):
        member.extend(steps(100 * k, 100 * k + 30))
    rb = ReplayBufferEnsemble(*members, batch_size=6)
    return World(rb.sample, lambda: {"samplers": [sampler_state(one) for one in members]}, batch_of)


def empty() -> World:
    rb = buffer("memory", "prioritised")
    rb.sample()
    return World(rb.empty, lambda: {"length": len(rb), "count": rb.write_count})


def state() -> World:
    rb = buffer("memory", "prioritised")
    return World(rb.state_dict, seen(rb), lambda found: batch_of(found["sampler"]))


@once
def saved_state(sampler: str) -> dict[str, Any]:
    return buffer("memory", sampler, rows=40).state_dict()


def load_state(sampler: str) -> World:
    saved, rb = saved_state(sampler), buffer("memory", sampler)
    return World(lambda: rb.load_state_dict(saved), seen(rb))


def save(sampler: str) -> World:
    rb, path = buffer("memory", sampler), folder() / "saved"
    tries = itertools.count()
    return World(lambda: rb.dumps(path / str(next(tries))), seen(rb))


@once
def saved_folder(storage: str, sampler: str) -> Path:
    path = folder() / "saved"
    buffer(storage, sampler, rows=40).dumps(path)
    return path


def load(storage: str, sampler: str, rows: int = 80) -> World:
    path = saved_folder("list" if storage == "list" else "memory", sampler)
    rb = buffer(storage, sampler, rows)

    def found() -> dict[str, Any]:
        return seen(rb)() if len(rb) else {"length": 0}

    return World(lambda: rb.loads(path), found, keeps_open=not rows)


def extend_beside_a_save() -> World:
    rb = buffer()
    frozen = rb.storage.saved_form.source(background=True)
    rows = rows_of(25, 7)
    found = seen(rb)
    return World(lambda: rb.extend(rows), lambda: {**found(), "left out": frozen.left_out}, batch_of)


@once
def closed_store(unclean: bool) -> tuple[Path, bytes]:
    """The folder of a store, and its rows."""
    rb = buffer("named")
    path, rows = Path(rb.storage.scratch_dir), _flat(rb[:])
    if unclean:
        rb.storage.flush()
        rb.storage.lanes.store.boot_id = b"another boot id."
        rb.storage.lanes.close()
    else:
        rb.storage.close()
    return path, rows


def opened(unclean: bool) -> World:
    store, before = closed_store(unclean)
    path = folder()
    shutil.copytree(store, path, dirs_exist_ok=True)

    def act() -> Any:
        found = ReplayBuffer.open(path)
        rows = _flat(found[:])
        found.storage.close()
        return rows

    return World(act, dict, lambda rows: rows == before)


def create() -> World:
    fd = os.memfd_create("engram-alloc")
    os.ftruncate(fd, _native.Store.size_needed(2, 8, 1, 8, 8, False, 2))

    def maps() -> dict[str, Any]:
        return {"maps": Path("/proc/self/maps").read_text().count("engram-alloc")}

    return World(lambda: _native.Store.create(fd, 2, 8, 1, 8, 8, False, b"{}", bytes(16)).lanes, maps)


def watch() -> World:
    ours, theirs = os.pipe()
    masks: list[Any] = []

    def act() -> None:
        try:
            _native.exit_when_readable(ours)
        finally:
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    return World(act, lambda: {"blocked signals": set().union(*masks), "open": os.stat(theirs).st_ino > 0})


def flush() -> World:
    rb = buffer("named")
    rb.storage.lanes.store.count_sync_failure()
    return World(rb.storage.flush, seen(rb))


QUICK: dict[str, Callable[[], World]] = {
    "first extend": lambda: first_extend("memory"),
    "update": lambda: update("memory"),
    "extend": lambda: extend("memory"),
    "extend, named": lambda: extend("named"),
    "add": lambda: add("memory"),
    "step without an index": lambda: append_step("memory"),
    "some leaves": lambda: read_leaves("memory"),
    "sample": lambda: sample("memory", "random"),
    "prioritised": lambda: sample_again("prioritised"),
    "slices": lambda: sample_again("slices"),
    "replace": lambda: replace("named"),
}
ALL: dict[str, Callable[[], World]] = {
    **{f"first extend, {s}": lambda s=s: first_extend(s) for s in STORAGES},
    **{f"extend, {s}": lambda s=s: extend(s) for s in STORAGES},
    **{f"add, {s}": lambda s=s: add(s) for s in STORAGES},
    **{f"replace, {s}": lambda s=s: replace(s) for s in STORAGES},
    **{f"read, {s}": lambda s=s: read(s) for s in STORAGES},
    **{f"best, {s}": lambda s=s: best(s) for s in STORAGES},
    **{f"best in what is not full, {s}": lambda s=s: best(s, 50) for s in STORAGES},
    **{f"best after a change, {s}": lambda s=s: best(s, changed=True) for s in STORAGES},
    **{f"sample, {s}": lambda s=s: sample("memory", s) for s in SAMPLERS},
    **{f"sample, {s}": lambda s=s: sample(s, "random") for s in STORAGES},
    **{f"sample again, {s}": lambda s=s: sample_again(s) for s in SAMPLERS},
    **{f"update, {s}": lambda s=s: update(s) for s in STORAGES},
    **{f"update again, {s}": lambda s=s: update("memory", s, True) for s in SAMPLERS if "prioritised" in s},
    **{f"end of an epoch, {s}": lambda s=s: last_of_an_epoch(s) for s in SAMPLERS if "epochs" in s},
    "growing priorities": growing_priorities,
    **{f"load state, {s}": lambda s=s: load_state(s) for s in SAMPLERS},
    **{f"save, {s}": lambda s=s: save(s) for s in SAMPLERS},
    **{f"load, {s}": lambda s=s: load("memory", s) for s in SAMPLERS},
    **{f"load into, {s}": lambda s=s: load(s, "prioritised") for s in STORAGES},
    **{f"load into an empty one, {s}": lambda s=s: load(s, "random", 0) for s in ("memory", "named", "list")},
    "create": create,
    "watch": watch,
    "best of more than fit": best_of_too_many,
    "environments": environments,
    "ensemble": ensemble,
    "ensemble of epochs": ensemble_of_epochs,
    "batches of an epoch": lambda: iterated("epochs"),
    "empty": empty,
    "state": state,
    "extend beside a save": extend_beside_a_save,
    "open": lambda: opened(False),
    "open after a power cut": lambda: opened(True),
    "flush after a failure": flush,
}


@pytest.fixture(autouse=True)
def tidy(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(recovery, "boot_id", recovery.boot_id)


# Cases that take about a second each.
LONGER = ("first extend", "update", "extend, named", "slices", "replace")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.deep if c in LONGER else ()) for c in QUICK])
def test_an_allocation_that_fails_is_an_error_that_changes_nothing(case):
    assert check(QUICK[case]) > 0


def some_of_each_call() -> list[str]:
    """Each call, with a few of the parts that it is made of; all of those whose native code differs by sampler."""
    kept, calls = [], dict[str, list[str]]()
    for case in ALL:
        calls.setdefault(case.rpartition(", ")[0] or case, []).append(case)
    for k, (call, cases) in enumerate(calls.items()):
        step = 1 if "again" in call else min(5, len(cases)) if len(cases) > len(STORAGES) else len(cases)
        kept += cases[(k + 1) % step :: step]
    return [*kept, "extend, list"]


@pytest.mark.deep
@pytest.mark.parametrize("case", in_ci(ALL, some_of_each_call()))
def test_each_allocation_of_every_call_fails(case):
    check(ALL[case])
