"""The classic comparison: 100 000 small items, batches of 128, three kinds of data in three kinds of storage."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import floors
from benchmarks.cases import Make, Row, calling
from benchmarks.data import CLASSIC_LEAVES, classic, length, one_by_one
from benchmarks.libraries import Call, Cpprb, StableBaselines3, Tianshou, buffer
from benchmarks.timing import Turn, repeat

ITEMS, BATCH = 100_000, 128
KINDS = ("tensor", "dict", "TensorDict")
STORAGES = ("list", "memory", "mapped")
TIMES_TORCHRL = {("TensorDict", "memory"): 5.0, ("TensorDict", "mapped"): 5.0, ("tensor", "memory"): 2.0}


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`sample(128)` and `extend(128)` for each kind and storage; a kind at a time, as lists of objects are large."""
    for kind in KINDS:
        items = classic(kind, ITEMS // 10 if quick else ITEMS)
        yield [row for storage in STORAGES for row in _rows(kind, storage, items)]


def _rows(kind: str, storage: str, items: Any) -> list[Row]:
    held = functools.cache(lambda library: buffer(library, items, batch=BATCH, storage=storage))
    first = {key: value[:BATCH] for key, value in items.items()} if kind == "dict" else items[:BATCH]
    more = one_by_one(first) if storage == "list" else first

    def call(library: str, verb: str) -> Call:
        rb = held(library)
        return (lambda: rb.sample(BATCH)) if verb == "sample" else (lambda: rb.extend(more))

    return [_row(kind, storage, items, verb, call) for verb in ("sample", "extend")]


def _row(kind: str, storage: str, items: Any, verb: str, call: Callable[[str, str], Call]) -> Row:
    contenders: dict[str, Make] = {
        "engram": calling(lambda: call("engram", verb)),
        "torchrl": calling(lambda: call("torchrl", verb)),
    }
    if kind == "dict" and storage != "list":  # the form that the others have: named arrays
        contenders |= _others(items, verb, mapped=storage == "mapped")
    times = TIMES_TORCHRL.get((kind, storage))
    leaves = {"data": 32} if kind == "tensor" else CLASSIC_LEAVES
    native = floors.gather if verb == "sample" else floors.scatter
    return Row(
        f"classic_{verb}_{kind}_{storage}",
        f"{verb}({BATCH}), {kind}, {storage}",
        contenders,
        floor=lambda: native(leaves, length(items), BATCH),
        target={"torchrl": times} if times and verb == "sample" else {},
    )


def _others(items: dict[str, Any], verb: str, *, mapped: bool) -> dict[str, Make]:
    obs, obs_next = items["observation"].numpy(), items["next_observation"].numpy()
    act = items["action"].numpy() % 2

    def cpprb() -> Turn:
        folder = tempfile.TemporaryDirectory() if mapped else None
        rb = Cpprb(items, mapped_to=f"{folder.name}/rb" if folder else None)
        turn = repeat(rb.sample(BATCH) if verb == "sample" else rb.extend({k: v[:BATCH] for k, v in items.items()}))

        def with_folder(n: int, folder: object = folder) -> float:  # the files live as long as the turn
            return turn(n)

        return with_folder

    made: dict[str, Make] = {"cpprb": cpprb}
    if mapped:
        return made
    if verb == "sample":
        made["tianshou"] = calling(lambda: Tianshou(obs, obs_next, act[:, 0]).sample(BATCH))
        made["stable-baselines3"] = calling(lambda: StableBaselines3(obs, obs_next, act[:, 0]).sample(BATCH))
    else:
        made["tianshou"] = calling(lambda: Tianshou(obs, obs_next, act[:, 0]).extend(BATCH))
        made["stable-baselines3"] = calling(lambda: StableBaselines3(obs, obs_next, act[:, 0], envs=BATCH).add())
    return made
