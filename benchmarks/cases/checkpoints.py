"""Checkpoints: saves against copies of the same bytes, loads against reads, incremental and background saves, sizes.

Everything that is compared takes turns in one process, a save or load each: on a busy disk believe ratios only.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import FLOOR, Result, Row, missing, result
from benchmarks.cases import checkpoint_work as work
from benchmarks.cases.checkpoint_work import Saved
from benchmarks.data import CARTPOLE_LEAVES, cartpole, one_by_one
from benchmarks.libraries import OURS, replay_buffers

PEER = "torchrl"
ROW = sum(CARTPOLE_LEAVES.values())
SAVED, COLD, WARM = 1 / 1.25, 1 / 1.25, 1 / 1.5  # of the speed of their floors
SMALL = "floor, into the same 4 MB"
WRITE = "floor, only writing the store's file"
ALLOWED_S = 0.010  # that a call may take longer beside a save
ROWS_APART = {"flat": "Flat", "nested": "Nested", "h5": "H5"}


def results(*, quick: bool) -> list[Result]:
    """All rows of this case."""
    folder = Path(tempfile.mkdtemp(prefix="engram-bench-"))
    nbytes, rounds = (100_000_000, 2) if quick else (1_000_000_000, 3)
    made: list[Result] = []
    try:
        for storage in work.STORAGES:
            made += _full(storage, nbytes, rounds, folder)
        for storage in work.STORAGES:
            made += _background(storage, nbytes, rounds, folder)
        made += _forms(nbytes // 4, rounds, folder)
        made += _lists(1_000 if quick else 10_000, rounds, folder)
        made += _sizes(quick, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return made


# ---- saves and loads of rows as they are ----
def _full(storage: str, nbytes: int, rounds: int, folder: Path) -> list[Result]:
    rows = nbytes // ROW
    ours = Saved(OURS, storage, rows, folder)
    peer, reason = _peer(storage, rows, folder)
    steps = cartpole(rows // 100)
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for (row, name), seconds_of in _one_round(ours, peer, steps):
            seconds.setdefault((row, name), []).append(seconds_of)
    made = _full_rows(storage, nbytes, statistics.median(seconds["full", OURS]))
    for (row, name), figures in seconds.items():
        made[row]["contenders"][name] = _figure(figures)
    if peer is None:
        for row in ("full", "cold", "warm"):
            made[row]["contenders"][PEER] = missing(reason)
    for row in ("full", "cold", "warm"):
        made[row]["notes"].append(_speeds(made[row], ours.nbytes))
    shutil.rmtree(ours.path)
    return list(made.values())


def _one_round(ours: Saved, peer: Saved | None, steps: Any) -> Iterator[tuple[tuple[str, str], float]]:
    yield ("full", OURS), ours.save()
    yield ("full", FLOOR), ours.copy(ours.nbytes)
    yield ("more", OURS), ours.save_more(steps)
    if peer is not None:
        yield ("full", PEER), peer.save()
    for row, cold in (("cold", True), ("warm", False)):
        if ours.storage == "mapped":
            yield (row, WRITE), ours.write_store()
        yield (row, FLOOR), ours.read(cold=cold, fresh=True)
        yield (row, OURS), ours.load(cold=cold)
        yield (row, SMALL), ours.read(cold=cold, fresh=False)
        if peer is not None:
            yield (row, PEER), peer.load(cold=cold)
    if peer is not None:
        shutil.rmtree(peer.path)


def _full_rows(storage: str, nbytes: int, full_s: float) -> dict[str, Result]:
    what = f"{nbytes / 1e9:g} GB of CartPole, {storage}"
    read = "the floor reads the same files into new memory of their size; another one into the same 4 MB"
    if storage == "mapped":
        read += "; a third writes a file as long as the store's, with its trailers, and reads nothing"
    titles = {
        "full": Row(f"save_{storage}", f"full save, {what}", {}, target={FLOOR: SAVED},
                    notes=["the floor writes the same bytes from the rows' memory to one file, and syncs it; TorchRL "
                           "does not sync"]),
        "more": Row(f"save_more_{storage}", f"save after 1 % was appended, {what}", {},
                    target={"us": (0.03 * full_s + 0.05) * 1e6}),
        "cold": Row(f"load_cold_{storage}", f"load into an empty buffer, not in the page cache, {what}", {},
                    target={FLOOR: COLD}, notes=[read]),
        "warm": Row(f"load_warm_{storage}", f"load into an empty buffer, from the page cache, {what}", {},
                    target={WRITE if storage == "mapped" else FLOOR: WARM}, notes=[read]),
    }  # fmt: skip
    return {key: result(row) for key, row in titles.items()}


def _peer(storage: str, rows: int, folder: Path) -> tuple[Saved | None, str]:
    try:
        return Saved(PEER, storage, rows, folder), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _speeds(row: Result, nbytes: int) -> str:
    known = {name: value["median"] for name, value in row["contenders"].items() if "median" in value}
    return "MB/s: " + ", ".join(f"{name} {nbytes / seconds / 1e6:,.0f}" for name, seconds in known.items())


def _figure(rounds: list[float]) -> Result:
    return {"median": statistics.median(rounds), "rounds": rounds}


# ---- calls beside a save in the background ----
def _background(storage: str, nbytes: int, rounds: int, folder: Path) -> list[Result]:
    saved, steps = Saved(OURS, storage, nbytes // ROW, folder), cartpole(64)
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    seconds: list[float] = []
    for _ in range(rounds):
        stop = time.perf_counter() + 2
        alone.append(_at_p99(work.latencies(saved.rb, steps, lambda stop=stop: time.perf_counter() < stop)))
        shutil.rmtree(saved.path, ignore_errors=True)
        start = time.perf_counter()
        handle = saved.rb.dumps(saved.path, blocking=False)
        beside.append(_at_p99(work.latencies(saved.rb, steps, lambda handle=handle: not handle.done())))
        seconds.append(time.perf_counter() - start)
        handle.result()
    shutil.rmtree(saved.path)
    made = []
    for i, call in enumerate(("extend(64)", "sample(256)")):
        usual = statistics.median(figures[i] for figures in alone)
        row = Row(
            f"background_{storage}_{call[:6]}", f"{call} at the 99th percentile beside a save, {storage}", {},
            target={"us": (usual + ALLOWED_S) * 1e6},
            notes=[f"{usual * 1e3:.3g} ms without a save; the saves took {statistics.median(seconds):.2g} s"],
        )  # fmt: skip
        made.append(result(row))
        made[-1]["contenders"][OURS] = _figure([figures[i] for figures in beside])
    return made


def _at_p99(seconds: tuple[np.ndarray, np.ndarray]) -> list[float]:
    return [float(np.percentile(some, 99)) for some in seconds]


# ---- the other forms ----
def _forms(nbytes: int, rounds: int, folder: Path) -> list[Result]:
    made = []
    for name, form in ROWS_APART.items():
        saved = Saved(OURS, "memory", nbytes // ROW, folder, form)
        speeds: dict[str, list[float]] = {"save": [], "load": []}
        most: dict[str, list[float]] = {"save": [], "load": []}
        for _ in range(rounds):
            with work.memory_peak() as peak:
                speeds["save"].append(nbytes / saved.save() / 1e6)
            most["save"].append(peak[0] / 1e6)
            saved.cache(cold=False)
            with work.memory_peak() as peak:  # into a buffer that has its memory: only what a load needs beside it
                speeds["load"].append(nbytes / work.timed(lambda saved=saved: saved.rb.loads(saved.path)) / 1e6)
            most["load"].append(peak[0] / 1e6)
        for verb in speeds:
            what = f"{verb}, {name}, {nbytes / 1e9:g} GB of CartPole"
            made.append(result(Row(f"{verb}_{name}", what, {}), unit="MB/s", better="higher"))
            made[-1]["contenders"][OURS] = _figure(speeds[verb])
            made.append(result(Row(f"{verb}_{name}_memory", f"memory beside the rows, {what}", {},
                                   target={"most": 200}), unit="MB"))  # fmt: skip
            made[-1]["contenders"][OURS] = _figure(most[verb])
        shutil.rmtree(saved.path)
    return made


def _lists(n: int, rounds: int, folder: Path) -> list[Result]:
    path, data, items = folder / "list", replay_buffers(OURS), one_by_one(cartpole(n))
    made = {
        verb: result(Row(f"{verb}_list", f"{verb}, a list of {n:,} TensorDicts", {}), unit="items/s", better="higher")
        for verb in ("save", "load")
    }
    rb = data.ReplayBuffer(storage=data.ListStorage(n), batch_size=256)
    rb.extend(items)
    for _ in range(rounds):
        shutil.rmtree(path, ignore_errors=True)
        twin = data.ReplayBuffer(storage=data.ListStorage(n), batch_size=256)
        for verb, call in (("save", rb.dumps), ("load", twin.loads)):
            figures = made[verb]["contenders"].setdefault(OURS, {"rounds": []})
            figures["rounds"].append(n / work.timed(lambda call=call: call(path)))
            figures["median"] = statistics.median(figures["rounds"])
    return list(made.values())


# ---- sizes ----
def _sizes(quick: bool, folder: Path) -> list[Result]:
    sources = {
        "CartPole": (work.real_cartpole(20_000 if quick else 50_000), "observation", 0.65),
        "84 x 84 pixels": (work.pixel_steps(1_000 if quick else 4_000), "pixels", 0.55),
    }
    made = []
    for title, (steps, key, most) in sources.items():
        whole = f"size_{key}_tensor"
        made.append(_size_row(whole, f"bytes, tensor, {title}", _saved_bytes("Tensor", steps, folder)))
        for name in ROWS_APART:
            as_is, broken = f"size_{key}_{name}", f"size_{key}_{name}_broken"
            form = ROWS_APART[name]
            made.append(
                _size_row(as_is, f"bytes, {name}, {title}", _saved_bytes(form, steps, folder), of=whole, most=most)
            )
            nbytes = _saved_bytes(form, work.break_rule(steps, key), folder)
            made.append(
                _size_row(broken, f"bytes, {name}, {title}, 0.1 % of the steps broken", nbytes, of=as_is, most=1.01)
            )
    return made


def _size_row(key: str, title: str, nbytes: int, of: str | None = None, most: float | None = None) -> Result:
    made = result(Row(key, title, {}, target={} if most is None else {"own": most}, own_of=of), unit="bytes")
    made["contenders"][OURS] = _figure([float(nbytes)])
    return made


def _saved_bytes(form: str, steps: Any, folder: Path) -> int:
    """The size of a checkpoint of these steps, which is loaded and compared."""
    data, path = replay_buffers(OURS), folder / "sizes"
    rb, twin = (data.ReplayBuffer(storage=data.LazyTensorStorage(len(steps)), batch_size=1) for _ in range(2))
    for buffer in (rb, twin):
        buffer.storage.checkpointer = getattr(data, f"{form}StorageCheckpointer")()
    rb.extend(steps)
    rb.dumps(path)
    twin.loads(path)
    if not (twin[:] == steps).all():
        raise AssertionError(f"{form}: what was loaded is not what was saved")
    found = work.size(path)
    shutil.rmtree(path)
    return found
