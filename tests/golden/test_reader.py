"""docs/format.md says enough: a reader written from it alone finds what engram loads."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from contracts.each import each
from engram.data import ListStorage
from engram.data.replay_buffers.checkpointers import open_snapshot
from golden import reader
from golden.make import DATA
from golden.reader import Lane, Snapshot, Tagged
from golden.recipes import RECIPES

H5 = {name for name in RECIPES if "h5" in name}
NAMES = [name for name in RECIPES if name not in H5]


def snapshot(name: str) -> Snapshot:
    return Snapshot(DATA / name / "checkpoint")


def test_the_reader_imports_nothing_of_engram() -> None:
    tree = ast.parse(inspect.getsource(reader))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in imported if name.startswith(("engram", "torch", "tensordict"))}


@each("name", NAMES)
def test_the_reader_finds_the_rows_that_engram_loads(name: str) -> None:
    rb = RECIPES[name].fresh()
    rb.loads(DATA / name / "checkpoint")
    storages = getattr(rb.storage, "storages", None)
    found = snapshot(name).storage()
    for storage, part in zip(storages or [rb.storage], found if storages else [found], strict=True):
        if part and isinstance(part[0], Lane):
            assert_same_lanes(part, storage)
        else:
            items, sequences = part if part else ([], [])
            is_list = isinstance(storage, ListStorage)
            assert_same(items, storage._held_table.rows.items() if is_list else [])
            assert sequences == (storage._held_table.rows.sequences() if is_list else [])


def assert_same_lanes(lanes: list[Lane], storage: Any) -> None:
    leaves = storage.layout.stored
    saved = storage.saved_form.sink()
    counters = saved.counters()["lanes"]
    for number, (lane, counts) in enumerate(zip(lanes, counters, strict=True)):
        assert lane.first == counts["base"]
        raw = saved.read_block(number, counts["base"], counts["published"])
        assert [leaf.path for leaf in leaves] == list(lane.columns)
        for leaf in leaves:
            ours = np.ascontiguousarray(raw[:, :, leaf.offset : leaf.offset + leaf.nbytes]).tobytes()
            assert lane.columns[leaf.path].tobytes() == ours, leaf.path


@each("name", RECIPES)
def test_the_reader_finds_the_states_of_the_components(name: str) -> None:
    found = snapshot(name)
    with open_snapshot(DATA / name / "checkpoint") as ours:
        assert set(found.body["components"]) == set(ours.components) >= {"sampler", "writer", "transform", "generator"}
        for component in ours.components:
            assert_same(found.component(component), ours.components[component])


def assert_same(found: Any, ours: Any) -> None:
    """What the reader made of a value is what engram made of it, in type and in every bit."""
    if isinstance(ours, torch.Tensor):
        assert isinstance(found, Tagged) and f"torch.{found.tag}" == str(ours.dtype)
        assert list(found.value.shape) == list(ours.shape)
        raw = ours.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if ours.numel() else b""
        assert found.value.tobytes() == raw
    elif isinstance(ours, TensorDict):
        assert isinstance(found, Tagged) and found.tag == "tensordict"
        assert found.value["batch_size"] == Tagged("size", list(ours.batch_size))
        assert found.value["device"] is (ours.device is not None)
        assert_same(found.value["items"], dict(ours.items()))
    elif isinstance(ours, NonTensorData):
        assert isinstance(found, Tagged) and (found.tag, found.value["data"]) == ("nontensor", ours.data)
    elif isinstance(ours, dict):
        assert list(found) == list(ours)
        for key in ours:
            assert_same(found[key], ours[key])
    elif isinstance(ours, torch.Size):
        assert found == Tagged("size", list(ours))
    elif isinstance(ours, list | tuple):
        assert type(found) is type(ours) and len(found) == len(ours)
        for one, other in zip(found, ours, strict=True):
            assert_same(one, other)
    elif isinstance(ours, np.ndarray | np.generic):
        assert (found.dtype, found.shape, found.tobytes()) == (ours.dtype, ours.shape, ours.tobytes())
    else:
        assert type(found) is type(ours) and (found == ours or (found != found and ours != ours))


def test_the_reader_finds_both_snapshots_of_an_incremental_save() -> None:
    first, second = (Snapshot(DATA / "incremental" / "checkpoint", name) for name in ("g-000001", "g-000002"))
    (before,), (after,) = first.storage(), second.storage()
    overlap = before.first + before.columns["obs",].shape[1] - after.first
    assert overlap > 10
    assert np.array_equal(before.columns["obs",][:, -overlap:], after.columns["obs",][:, :overlap])
