"""Forged checkpoints, every hash of which is right: each is a clear error, takes no memory and changes nothing."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from contracts.checkpointer import lane_counters
from contracts.children import Child
from contracts.corruption import NASTY, Forger, exchanged, limit_memory, places, without
from contracts.tiers import in_quick
from engram.checkpoint.directory import to_checksummed_json
from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer
from engram.errors import CheckpointError, CorruptCheckpointError, EngramError
from golden.make import DATA
from golden.observed import held, unlike
from golden.recipes import RECIPES

MOST = 1 << 30  # of address space, which each thread takes a part of, on top of what the process has
KINDS = [
    "rows", "rows-wide", "rows-lanes", "rows-forms", "flat", "nested", "h5", "h5-groups", "list", "ensemble", "epoch",
    "slice-epoch", "prioritized", "prioritized-slices", "max-value", "max-value-list", "max-value-flat", "max-value-h5",
    "transforms-in-time", "transforms-n-steps",
]  # fmt: skip


@pytest.fixture
def forger(request: pytest.FixtureRequest, ram_path: Path) -> Forger:
    return Forger(ram_path / "forged", DATA / request.param / "checkpoint")


def of(*names: str) -> Any:
    return pytest.mark.parametrize("forger", names, indirect=True)


def bounded(work: Callable[[], Any]) -> Any:
    """Runs in a child that cannot take more memory, and that may die without harm."""

    def limited() -> Any:
        limit_memory(MOST)
        return work()

    return Child(limited, seconds=120).result()


def refused(path: Path, name: str, match: str) -> None:
    """By an empty buffer, which stays empty, and by one that holds something, which stays as it is."""
    recipe = RECIPES[name]

    def attack() -> None:
        for rb in (recipe.fresh(), recipe.fill(recipe.fresh())):
            before = held(rb, "held")
            with pytest.raises(CorruptCheckpointError, match=match):
                rb.loads(path)
            assert unlike(held(rb, "held"), before) == []

    bounded(attack)


# ---- every value of a manifest ----
def attacked(name: str, path: Path, seed: int, count: int | None) -> tuple[int, int]:
    """How many exchanged values were refused, and how many made no difference; anything else raises."""
    recipe, forger = RECIPES[name], Forger(path / "forged", DATA / name / "checkpoint")
    body = forger.document["body"]
    attacks = [(at, value) for at in places(body) for value in [*NASTY, KeyError]]
    random.Random(seed).shuffle(attacks)

    def all_of_them() -> tuple[int, int]:
        refusals = accepted = 0
        for at, value in attacks[:count]:
            forged = without(body, at) if value is KeyError else exchanged(body, at, value)
            forger.write({**forger.document, "body": forged})
            rb = recipe.fresh()
            empty = held(rb, "held")
            try:
                rb.loads(forger.path)
                accepted += 1
            except EngramError:
                assert list(held(rb, "held")["held counts"][:2]) == list(empty["held counts"][:2]), (at, value)
                refusals += 1
            except BaseException as error:
                raise AssertionError(f"{'/'.join(map(str, at))} = {value!r:.90}: {error!r}") from error
            else:
                if len(rb) and recipe.batch_size and at[:3] != ("components", "transform", "state"):
                    rb.sample(recipe.batch_size)
        return refusals, accepted

    made: tuple[int, int] = bounded(all_of_them)
    return made


@pytest.mark.parametrize("name", KINDS)
def test_some_exchanged_values_of_each_kind_are_refused_or_make_no_difference(name: str, ram_path: Path) -> None:
    refusals, accepted = attacked(name, ram_path, seed=0, count=30)
    assert refusals > accepted


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_every_exchanged_value_of_each_kind_is_refused_or_makes_no_difference(name: str, ram_path: Path) -> None:
    refusals, accepted = attacked(name, ram_path, seed=0, count=None)
    print(f"{name}: {refusals} refused, {accepted} without difference")
    assert refusals > accepted


# ---- states of parts, in a buffer that holds rows ----
def attacked_parts(name: str, path: Path, count: int | None) -> int:
    """How many exchanged values of the parts' states were refused; a refusal has left rows and parts as they were."""
    recipe, forger = RECIPES[name], Forger(path / "forged", DATA / name / "checkpoint")
    body = forger.document["body"]
    attacks = [
        (at, value) for at in places(body["components"], ("components",)) for value in [*NASTY, KeyError] if len(at) > 2
    ]
    random.Random(1).shuffle(attacks)

    def all_of_them() -> int:
        refusals, rb = 0, recipe.fill(recipe.fresh())
        before = held(rb, "held")
        for at, value in attacks[:count]:
            forged = without(body, at) if value is KeyError else exchanged(body, at, value)
            forger.write({**forger.document, "body": forged})
            try:
                rb.loads(forger.path)
            except EngramError:
                refusals += 1
                assert unlike(held(rb, "held"), before) == [], f"{'/'.join(map(str, at))} = {value!r:.90}"
            else:
                rb = recipe.fill(recipe.fresh())
                before = held(rb, "held")
        return refusals

    made: int = bounded(all_of_them)
    return made


WITH_STATE = ["epoch", "slice-epoch", "prioritized", "prioritized-slices", "max-value", "ensemble", "generator",
              "transforms-in-time", "transforms-n-steps", "transforms-norm"]  # fmt: skip


@pytest.mark.parametrize("name", WITH_STATE)
def test_an_impossible_state_of_a_part_leaves_the_rows_of_a_buffer_as_they_are(name: str, ram_path: Path) -> None:
    assert attacked_parts(name, ram_path, 40) > 10


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_STATE)
def test_no_impossible_state_of_a_part_changes_a_buffer_that_holds_rows(name: str, ram_path: Path) -> None:
    print(f"{name}: {attacked_parts(name, ram_path, None)} refused")


# ---- JSON that readers could take in two ways, or not at all ----
def nested(levels: int, opening: bytes, closing: bytes) -> bytes:
    return opening * levels + b"0" + closing * levels


DEEP = {"lists": (b"[", b"]"), "objects": (b'{"a":', b"}"), "tuples": (b'{"$tuple":[', b"]}")}


@of("rows")
@pytest.mark.parametrize("form", DEEP)
@pytest.mark.parametrize("levels", [500, 100_000])
def test_deep_nesting_is_an_error_and_no_overflow(forger: Forger, form: str, levels: int) -> None:
    deep = nested(levels, *DEEP[form])
    forger.write_text(lambda text: text.replace(b'"sampler":{"kind"', b'"sampler":{"deep":' + deep + b',"kind"'))
    refused(forger.path, "rows", r"manifest\.json is damaged.*(deep|keys)")


@of("rows")
def test_a_form_that_is_nested_too_deeply_is_an_error(forger: Forger) -> None:
    root = '{"kind":"list","children":[' * 200 + '{"kind":"leaf","leaf":0}' + "]}" * 200
    document = json.loads(json.dumps(forger.document))
    document["body"]["storage"]["state"]["layout"]["root"] = json.loads(root)
    forger.write(document)
    refused(forger.path, "rows", r"manifest\.json is damaged.*levels")


@of("list")
@pytest.mark.parametrize("form", DEEP)
def test_deeply_nested_items_are_an_error(forger: Forger, form: str) -> None:
    forger.write_file("storage/items-00000000.json", b"[" + nested(100_000, *DEEP[form]) + b"]")
    refused(forger.path, "list", "deep")


@pytest.mark.quick
@of("rows")
@pytest.mark.parametrize(
    ("once", "twice"),
    [
        (b'"snapshot":"g-000001"', b'"snapshot":"g-000001","snapshot":"g-000001"'),
        (b'"lane_capacity":40', b'"lane_capacity":40,"lane_capacity":40'),
        (b'"kind":"RandomSampler"', b'"kind":"SliceSampler","kind":"RandomSampler"'),
    ],
)
def test_a_key_that_stands_twice_is_an_error(forger: Forger, once: bytes, twice: bytes) -> None:
    forger.write_text(lambda text: text.replace(once, twice, 1))
    refused(forger.path, "rows", r"manifest\.json is damaged: its JSON has a key twice")


@of("list")
def test_an_item_with_a_key_that_stands_twice_is_an_error(forger: Forger) -> None:
    text = (forger.path / "g-000001/storage/items-00000000.json").read_bytes()
    assert b'{"a":' in text or b'"$dict"' in text
    assert b'"items":[' in text
    forger.write_file("storage/items-00000000.json", text.replace(b'"items":[', b'"items":[{"a":1,"a":2},', 1))
    refused(forger.path, "list", "twice")


@pytest.mark.quick
@of("rows")
@pytest.mark.parametrize(
    "text",
    in_quick(
        [b"", b"null", b"[]", b"3", b"{}", b'{"a":NaN}', b'{"a":1e999}', b"\xff\xfe", b"{" * 50],
        [b"[]", b'{"a":NaN}', b"\xff\xfe"],
    ),
)
def test_a_sealed_file_that_is_no_document_is_an_error(forger: Forger, text: bytes) -> None:
    forger.write_text(lambda _: text)
    refused(forger.path, "rows", r"manifest\.json is damaged")


@of("rows")
@pytest.mark.parametrize(
    "pointer",
    [
        {}, {"snapshot": "g-000001"}, {"format": "engram checkpoint", "snapshot": ["g-000001"], "manifest": "x"},
        {"format": "engram checkpoint", "version": 1, "snapshot": "g-000001/../g-000001", "manifest": "x"},
        {"format": "engram checkpoint", "version": 1, "snapshot": "g-" + "9" * 400, "manifest": "x"},
    ],
)  # fmt: skip
def test_a_pointer_that_is_none_is_an_error(forger: Forger, pointer: dict[str, Any]) -> None:
    (forger.path / "CURRENT").write_bytes(to_checksummed_json(pointer))
    refused(forger.path, "rows", "CURRENT is damaged")


@of("rows")
def test_a_manifest_that_is_larger_than_any_is_not_read(forger: Forger) -> None:
    manifest = forger.path / "g-000001" / "manifest.json"
    os.chmod(manifest, 0o644)
    os.truncate(manifest, 1 << 40)  # sparse: it takes nothing on the disk
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json.*more than"):
        bounded_error(forger.path)


def bounded_error(path: Path) -> None:
    """With room for the largest manifest."""

    def load() -> None:
        limit_memory(2 << 30)
        ReplayBuffer(storage=LazyTensorStorage(40)).loads(path)

    Child(load, seconds=120).result()


# ---- sizes ----
@of("rows")
@pytest.mark.parametrize("rows", [1 << 20, 1 << 31, 1 << 40, (1 << 62) - 1])
def test_rows_that_are_said_to_exist_take_no_memory(forger: Forger, rows: int) -> None:
    document = json.loads(json.dumps(forger.document))
    state = document["body"]["storage"]["state"]
    state["counters"].update(lane_capacity=rows, lanes=[lane_counters(0, rows)])
    state.update(chunks=[[0, 0, 0, rows]], rows_per_chunk=rows)
    forger.write(document)

    def attack() -> int:
        with pytest.raises(EngramError):
            ReplayBuffer(storage=LazyTensorStorage(1000)).loads(forger.path)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    assert bounded(attack)


@of("flat", "nested")
def test_a_few_bytes_do_not_become_many_rows(forger: Forger) -> None:
    """Values that seldom change take a few bytes in the file, whatever the number of steps."""
    document = json.loads(json.dumps(forger.document))
    state = document["body"]["storage"]["state"]
    steps = 1 << 24  # 800 MB of rows
    state["counters"].update(lane_capacity=steps, lanes=[lane_counters(0, steps)])
    for chunk in state["chunks"]:
        chunk[1:4] = [0, 0, steps]
    state.update(chunks=state["chunks"][:1], rows_per_chunk=steps)
    forger.write(document)

    def attack() -> None:
        with pytest.raises(CorruptCheckpointError, match="cannot hold rows"):
            RECIPES[document["body"]["storage"]["format"]].fresh().loads(forger.path)

    bounded(attack)


# ---- HDF5 ----
def h5_file(forger: Forger) -> tuple[str, bytes]:
    (name,) = [name for name in forger.document["files"] if name.startswith("storage/")]
    return name, (forger.path / "g-000001" / name).read_bytes()


def edited(content: bytes, path: Path, edit: Callable[[Any], None]) -> bytes:
    file = path / "edited.h5"
    file.write_bytes(content)
    with h5py.File(file, "r+") as opened:
        edit(opened)
    return file.read_bytes()


ACTION = "lane_0/steps/action"


def replaced(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    def edit(file: Any) -> None:
        del file[ACTION]
        make(file)

    return edit


def bomb(file: Any) -> None:
    file.create_dataset(ACTION, (1 << 36,), "i8", chunks=(1 << 16,), compression="gzip")


def opaque_filter(file: Any) -> None:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_chunk((40,))
    creation.set_filter(307, h5py.h5z.FLAG_OPTIONAL, ())  # bzip2, a plugin that readers would have to load
    space = h5py.h5s.create_simple((40,))
    h5py.h5d.create(file.id, ACTION.encode(), h5py.h5t.NATIVE_INT64, space, creation)


H5_EDITS = {
    "compression bomb": replaced(bomb),
    "filter of a plugin": replaced(opaque_filter),
    "compound": replaced(lambda f: f.create_dataset(ACTION, (40,), np.dtype("i4,i4"))),
    "variable length": replaced(lambda f: f.create_dataset(ACTION, (40,), h5py.vlen_dtype("i8"))),
    "enum": replaced(lambda f: f.create_dataset(ACTION, (40,), h5py.enum_dtype({"A": 0}, basetype="i4"))),
    "a type by name": replaced(lambda f: f.__setitem__(ACTION, np.dtype("f8"))),
    "scalar": replaced(lambda f: f.__setitem__(ACTION, 3)),
    "no space": replaced(lambda f: f.create_dataset(ACTION, dtype="i8", data=h5py.Empty("i8"))),
    "a loop of groups": replaced(lambda f: f.__setitem__(ACTION, f["lane_0"])),
    "a dataset more": lambda f: f.__setitem__("lane_0/more", np.zeros(3)),
}


@of("h5")
@pytest.mark.parametrize("edit", H5_EDITS)
def test_a_forged_hdf5_file_is_refused_and_takes_no_memory(forger: Forger, edit: str, tmp_path: Path) -> None:
    name, content = h5_file(forger)
    forger.write_file(name, edited(content, tmp_path, H5_EDITS[edit]))
    refused(forger.path, "h5", name)


@of("h5")
def test_an_hdf5_file_that_says_it_is_longer_than_it_is_is_refused(forger: Forger) -> None:
    name, content = h5_file(forger)
    end = content.index(len(content).to_bytes(8, "little"))  # the end of the file in its superblock
    for size in (len(content) * 2, 1 << 40, (1 << 63) - 1):
        forger.write_file(name, content[:end] + size.to_bytes(8, "little") + content[end + 8 :])
        refused(forger.path, "h5", name)
    for size in (0, 1, 100, len(content) // 2, len(content) - 1):
        forger.write_file(name, content[:size])
        refused(forger.path, "h5", name)


@of("h5", "h5-groups")
def test_changed_bytes_of_an_hdf5_file_are_refused_or_give_other_values_of_the_same_shape(forger: Forger) -> None:
    fuzzed(forger, 25)


@pytest.mark.long
@of("h5", "h5-groups", "h5-wide")
def test_many_changed_bytes_of_an_hdf5_file_do_no_harm(forger: Forger) -> None:
    fuzzed(forger, 3000)


def fuzzed(forger: Forger, count: int) -> None:
    """HDF5's own structures are believed by its library: whatever they say, nothing worse than an error may come."""
    name, content = h5_file(forger)
    rng = random.Random(1)

    def attack() -> int:
        accepted = 0
        for _ in range(count):
            changed = bytearray(content)
            for _ in range(rng.choice((1, 1, 4))):
                changed[rng.randrange(len(changed))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            forger.write_file(name, bytes(changed))
            rb = RECIPES[forger_name(forger)].fresh()
            try:
                rb.loads(forger.path)
                accepted += 1
            except CorruptCheckpointError:
                assert len(rb) == 0
        return accepted

    assert bounded(attack) < count


def forger_name(forger: Forger) -> str:
    groups = forger.document["body"]["storage"]["state"]["group_per_trajectory"]
    wide = forger.document["body"]["storage"]["state"]["layout"]["ndim"] == 2
    return "h5-groups" if groups else "h5-wide" if wide else "h5"


# ---- names ----
@of("list")
@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "storage/../../secret", "storage/link/x", "storage/link"]
)
def test_a_file_outside_the_snapshot_is_never_opened(forger: Forger, name: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"secret")
    (forger.path / "secret").write_bytes(b"secret")
    (forger.path / "g-000001/storage/link").symlink_to(tmp_path)
    document = json.loads(json.dumps(forger.document))
    document["files"][name] = {"nbytes": 6, "xxh3_128": "0" * 32}
    forger.write(document)
    refused(forger.path, "list", r"is not a name of a file|cannot be opened")


@of("h5")
def test_an_hdf5_file_that_is_a_link_is_refused(forger: Forger, tmp_path: Path) -> None:
    name, _ = h5_file(forger)
    file = forger.path / "g-000001" / name
    shutil.move(file, tmp_path / "elsewhere.h5")
    file.symlink_to(tmp_path / "elsewhere.h5")
    refused(forger.path, "h5", "cannot be opened")


# ---- the other parts ----
def test_a_checkpoint_without_a_part_says_which_it_has(tmp_path: Path) -> None:
    from engram.data.replay_buffers.checkpointers import save_snapshot

    save_snapshot(tmp_path, {"other": 1})
    with pytest.raises(CheckpointError, match="holds no sampler; its components are other"):
        ReplayBuffer(storage=ListStorage(3)).loads(tmp_path)


@of("max-value-list")
@pytest.mark.parametrize(
    "sequences", [[], [0] * 11, [0] * 13, [1] * 12, [-1] * 12, [1 << 63] * 12, [True] * 12, ["x"] * 12, "x", 7, {}]
)
def test_sequences_that_no_item_can_carry_leave_the_items_as_they_are(forger: Forger, sequences: Any) -> None:
    name = "storage/items-00000000.json"
    chunk = json.loads((forger.path / "g-000001" / name).read_bytes())
    assert len(chunk["items"]) == 12
    forger.write_file(name, json.dumps({**chunk, "sequences": sequences}).encode())
    refused(forger.path, "max-value-list", r"items-00000000\.json: ")


@pytest.mark.quick
@of("max-value")
@pytest.mark.parametrize(
    "hidden",
    in_quick(
        [["sequence", "sequence"], ["other"], "sequence", None, 1, {}, [["sequence"]], [1]],
        [["sequence", "sequence"], ["other"], None],
    ),
)
def test_a_layout_with_hidden_entries_that_are_not_known_leaves_rows_as_they_are(forger: Forger, hidden: Any) -> None:
    document = json.loads(json.dumps(forger.document))
    document["body"]["storage"]["state"]["layout"]["hidden"] = hidden
    forger.write(document)
    refused(forger.path, "max-value", "hidden entries")


@pytest.mark.quick
@of("rows-lanes")
@pytest.mark.parametrize(
    "counters",
    in_quick([
        {"seams": [1 << 63]}, {"seams": [-1]}, {"seams": [9, 3]}, {"seams": "x"}, {"origin": -1}, {"origin": 1 << 64},
        {"origin": None}, {"base": 1 << 62}, {"base": -1}, {"published": 1 << 63}, {"border": None}, {"border": {}},
        {"border": {"looked": -1, "agreed": None}}, {"replaced": -1}, {"replaced": None}, {"replaced": 1 << 62},
    ], [{"seams": [9, 3]}, {"origin": 1 << 64}, {"base": 1 << 62}, {"published": 1 << 63}, {"border": None}]),
)  # fmt: skip
def test_counters_that_cannot_be_leave_rows_as_they_are(forger: Forger, counters: dict[str, Any]) -> None:
    document = json.loads(json.dumps(forger.document))
    document["body"]["storage"]["state"]["counters"]["lanes"][0].update(counters)
    forger.write(document)
    refused(forger.path, "rows-lanes", r"manifest\.json is damaged: its description of the rows is malformed")
