"""Hooks get what users stored, return what they like, and what comes back is exact; a refused load changes nothing."""

from __future__ import annotations

import functools
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, NonTensorData, TensorClass, TensorDict

import engram
from contracts.each import each
from contracts.pairwise import in_turns
from contracts.tiers import in_quick
from engram import verify
from engram.checkpoint import encoding, writer
from engram.checkpoint import hooks as through_hooks
from engram.cli import info
from engram.data import (
    CompressedListStorage,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
    TensorStorageCheckpointer,
)
from engram.data.replay_buffers.checkpointers import open_snapshot, save_snapshot
from engram.data.replay_buffers.state import rows as row_loads
from engram.data.replay_buffers.utils import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
from engram.errors import CheckpointError, CheckpointMisfitError, CorruptCheckpointError, StorageInUseError

CHECKPOINTERS = [TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer]


def ted(n, start=0):
    """Episodes of seven steps; the observation after the last step of each is not that of the next one's first."""
    x = torch.arange(start, start + n + 1.0)
    done = (torch.arange(start, start + n) % 7 == 6).unsqueeze(-1)
    following = x[1:] + 100 * done[:, 0]
    return TensorDict({"x": x[:n], "pixels": torch.arange(n * 12, dtype=torch.uint8).view(n, 3, 4),
                       "next": {"x": following, "done": done, "reward": x[:n, None].clone()}}, [n])  # fmt: skip


def columns():
    storage = TensorStorage(ted(10))
    storage.empty()
    return storage


KINDS = {
    "list": lambda path: ListStorage(10),
    "compressed": lambda path: CompressedListStorage(10),
    "columns": lambda path: columns(),
    "memory": lambda path: LazyTensorStorage(10),
    "shared": lambda path: LazyTensorStorage(10, shared=True),
    "mapped": lambda path: LazyMemmapStorage(10),
    "named": lambda path: LazyMemmapStorage(10, scratch_dir=path / os.urandom(4).hex()),
    "lanes": lambda path: LazyMemmapStorage(20, lanes=2),
    "envs": lambda path: LazyTensorStorage(20, ndim=2),
    "mapped envs": lambda path: LazyMemmapStorage(20, ndim=2),
}


def write(rb, n, start=0):
    batch = ted(2 * n, start) if rb.storage.ndim == 2 else ted(n, start)
    rb.extend(batch.reshape(2, n) if rb.storage.ndim == 2 else batch)


def buffer(storage, there=None, back=None, **more):
    rb = TensorDictReplayBuffer(storage=storage, **more)
    if there is not None:
        rb.register_save_hook(there)
    if back is not None:
        rb.register_load_hook(back)
    return rb


def raw(value):
    """Data as bytes, with their form, so that `==` compares them."""
    if isinstance(value, torch.Tensor):
        flat = value.contiguous().reshape(-1)
        return value.dtype, value.shape, flat.view(torch.uint8).numpy().tobytes() if value.numel() else b""
    if hasattr(value, "batch_size"):
        return type(value), value.batch_size, {key: raw(entry) for key, entry in value.items()}
    if isinstance(value, dict):
        return {key: raw(entry) for key, entry in value.items()}
    return type(value), [raw(one) for one in value] if isinstance(value, list | tuple) else value


def state_of(rb):
    """Everything that must be as it was after a save and a load: rows, order, cursor, counts, where episodes end."""
    rows = raw(rb[:]) if len(rb) else None
    lanes = rb.storage.lanes.saved_states() if rb.storage.initialized else []
    return len(rb), rb.write_count, rb.writer._cursor, rows, [{**lane, "origin": None} for lane in lanes]


def save(rb, path, blocking=True):
    saved = rb.dumps(path, blocking=blocking)
    return saved if blocking else saved.result(300)


def same(rb, twin):
    """Whether two buffers hold the same, byte for byte, and go on the same way."""
    if state_of(rb) != state_of(twin):
        return False
    for one in (rb, twin):
        write(one, 4, 500)
    return state_of(rb) == state_of(twin)


PARTLY_FULL, FULL, WRAPPED, TWICE_WRAPPED = 3, 10, 13, 25


HOOKS = [
    *[(TED2Flat, Flat2TED, n) for n in (PARTLY_FULL, FULL, WRAPPED, TWICE_WRAPPED)],
    (TED2Nested, Nested2TED, WRAPPED), (H5Split, H5Combine, PARTLY_FULL),
]  # fmt: skip


@pytest.mark.parametrize(
    "kind, there, back, n", in_turns(KINDS, HOOKS, keep=2), ids=lambda value: getattr(value, "__name__", value)
)
def test_hooks_for_episode_data_are_undone_exactly(there, back, kind, n, tmp_path):
    rb, twin = (buffer(KINDS[kind](tmp_path), there(), back()) for _ in range(2))
    write(rb, n)
    save(rb, tmp_path / "saved", blocking=n != WRAPPED)
    rb.storage.dumps(tmp_path / "alone")
    twin.loads(tmp_path / "saved")
    alone = buffer(KINDS[kind](tmp_path), None, back())
    alone.storage.loads(tmp_path / "alone")
    assert state_of(alone) == state_of(rb)
    assert same(rb, twin)
    twin.loads(tmp_path / "saved")  # over rows
    assert state_of(twin) == state_of(alone)


@each("checkpointer", CHECKPOINTERS)
def test_every_checkpointer_of_rows_saves_through_hooks(checkpointer, tmp_path):
    rb, twin = (buffer(LazyTensorStorage(10, checkpointer=checkpointer()), TED2Flat(), Flat2TED()) for _ in range(2))
    write(rb, 13)
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert same(rb, twin)


@each("kind, expected", [
    ("memory", [10, 11, 12, 3, 4, 5, 6, 7, 8, 9]), ("mapped", [10, 11, 12, 3, 4, 5, 6, 7, 8, 9]),
    ("list", [10, 11, 12, 3, 4, 5, 6, 7, 8, 9]), ("columns", [10, 11, 12, 3, 4, 5, 6, 7, 8, 9]),
    ("lanes", list(range(13))), ("envs", [[10, 11, 12, *range(3, 10)], [23, 24, 25, *range(16, 23)]]),
])  # fmt: skip
def test_hooks_get_rows_in_the_order_of_slots_and_of_several_lanes_oldest_first(kind, expected, tmp_path):
    class Hook:
        shift = is_full = None

        def __call__(self, td):
            self.seen = td["x"].tolist(), self.shift, self.is_full
            return td

    hook, loading = Hook(), Hook()
    rb = buffer(KINDS[kind](tmp_path), hook)
    write(rb, 13)
    rb.dumps(tmp_path / "saved")
    told = (0, False) if kind == "lanes" else (3, True)
    assert hook.seen == (expected, *told)
    twin = buffer(KINDS[kind](tmp_path), None, loading)
    twin.loads(tmp_path / "saved")
    assert loading.seen == hook.seen and state_of(twin) == state_of(rb)


class Steps(TensorClass):
    x: torch.Tensor
    y: torch.Tensor


FORMS = {
    "tensor": lambda n: torch.arange(n * 3).view(n, 3),
    "dict": lambda n: {"a": torch.arange(n), "b": {"c": torch.ones(n, 2)}},
    "tuple": lambda n: (torch.arange(n), torch.zeros(n, dtype=torch.bool)),
    "TensorDict": lambda n: ted(n),
    "tensorclass": lambda n: Steps(x=torch.arange(n), y=torch.zeros(n, 2), batch_size=[n]),
}


@each("storage", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
@each("form", FORMS)
def test_hooks_get_the_form_that_users_stored(form, storage, tmp_path):
    data, seen = FORMS[form](7), []
    rb = ReplayBuffer(storage=storage(10))
    rb.register_save_hook(lambda batch: seen.append(batch) or batch)
    rb.extend(data)
    rb.dumps(tmp_path)
    twin = ReplayBuffer(storage=storage(10))
    twin.extend(data[:1] if form not in ("dict", "tuple") else FORMS[form](1))  # the storage knows the class
    twin.register_load_hook(lambda batch: seen.append(batch) or batch)
    twin.loads(tmp_path)
    expected = type(data)
    assert type(seen[0]) is expected and (type(seen[1]) is expected or (form, storage) == ("tensorclass", ListStorage))
    if form not in ("dict", "tuple"):
        assert seen[0].shape[:1] == (7,) and bool((seen[0] == data).all())
    if (form, storage) != ("tensorclass", ListStorage):  # a list storage does not know classes
        assert state_of(twin) == state_of(rb)


def test_whole_trajectories_as_items_come_oldest_first(tmp_path):
    seen = []
    rb, twin = (buffer(LazyTensorStorage(3), TED2Flat(), Flat2TED()) for _ in range(2))
    rb.storage.checkpointer.save_hooks.insert(0, lambda td: seen.append(td["x"][:, 0].tolist()) or td)
    rb.extend(ted(20).reshape(5, 4))
    rb.dumps(tmp_path)
    assert seen == [[8, 12, 16]] and rb[:]["x"][:, 0].tolist() == [12, 16, 8]
    twin.loads(tmp_path)
    assert state_of(twin) == state_of(rb)


def test_rows_that_replaced_others_out_of_turn_come_back_with_their_sequences(tmp_path):
    def make():
        return buffer(LazyTensorStorage(5), TED2Flat(), Flat2TED(), writer=TensorDictMaxValueWriter())

    rb, twin = make(), make()
    rewards = torch.tensor([3.0, 9, 1, 7, 5, 8, 2, 6, 4])
    data = ted(9)
    data["next", "reward"] = rewards[:, None]
    rb.extend(data)
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    slots = torch.arange(5)
    generations = [one.storage.lanes.generations(slots).tolist() for one in (rb, twin)]
    assert generations[0] == generations[1] and max(generations[0]) > 9  # out of turn
    assert state_of(twin) == state_of(rb)
    for one in (rb, twin):
        data["next", "reward"] = rewards[:, None] + 0.5
        one.extend(data)
    assert state_of(twin) == state_of(rb) and rb[:]["next", "reward"].min() == 7.5


@each("kind", KINDS)
def test_writes_into_what_a_hook_gets_change_no_stored_row(kind, tmp_path):
    def spoil(td):
        td["x"].fill_(-1)
        td["pixels"].numpy()[:] = 0
        td["next", "reward"] = torch.zeros_like(td["next", "reward"])
        return td

    rb = buffer(KINDS[kind](tmp_path), spoil)
    write(rb, 13)
    before = state_of(rb)
    for blocking in (True, False):
        save(rb, tmp_path / "saved", blocking)
        assert state_of(rb) == before
    twin = buffer(KINDS[kind](tmp_path))
    twin.loads(tmp_path / "saved")
    assert torch.stack([td["x"] for td in twin.storage[:]]).eq(-1).all()


@pytest.mark.parametrize("items", [
    [{"a": torch.zeros(2)}, {"a": torch.zeros(3)}],
    [TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.zeros(3)})],
    [TensorDict({"a": torch.zeros(2)}), {"a": torch.zeros(2)}, torch.zeros(2)],
])  # fmt: skip
def test_writes_into_items_that_do_not_stack_change_no_stored_item(items, tmp_path):
    seen = []

    def spoil(found):
        seen.append(type(found))
        for item in found.tensordicts if isinstance(found, LazyStackedTensorDict) else found:
            (item if isinstance(item, torch.Tensor) else item["a"]).fill_(-1)
        return found

    rb, twin = (ReplayBuffer(storage=ListStorage(5)) for _ in range(2))
    rb.register_save_hook(spoil)
    rb.extend(items)
    before = raw(rb[:])
    rb.dumps(tmp_path)
    assert raw(rb[:]) == before
    assert seen == [LazyStackedTensorDict if all(isinstance(one, TensorDict) for one in items) else list]
    twin.loads(tmp_path)
    found = [one if isinstance(one, torch.Tensor) else one["a"] for one in twin[:]]
    assert all(bool(one.eq(-1).all()) for one in found) and list(map(type, twin[:])) == list(map(type, items))


def mapped_bytes():
    """Bytes of files that this process has mapped and may write to privately."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, mode, _, _, inode, *_ = line.split()
        if mode == "rw-p" and inode != "0":
            first, last = (int(end, 16) for end in place.split("-"))
            found += last - first
    return found


def test_the_rows_of_a_mapped_store_are_seen_where_they_lie(monkeypatch, tmp_path):
    """Neither a block is read nor a file of rows is made."""
    monkeypatch.setattr(through_hooks, "_RowFile", None)
    rb, mapped = buffer(LazyMemmapStorage(10)), []
    write(rb, 13)
    before = mapped_bytes()
    rb.register_save_hook(lambda td: mapped.append(mapped_bytes() - before) or td.select("x"))
    rb.dumps(tmp_path)
    assert mapped[0] >= 10 * rb.storage.layout.payload_bytes


@pytest.mark.parametrize("lanes, n", [(None, 6), (2, 8)])
def test_rows_that_others_may_overwrite_are_copied_to_the_disk_of_the_snapshot(lanes, n, monkeypatch, tmp_path):
    monkeypatch.setattr(through_hooks, "_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(through_hooks, "_BLOCK_BYTES", 100)
    rb = buffer(LazyMemmapStorage(10, scratch_dir=tmp_path / "store", lanes=lanes), TED2Flat())
    with_another = LazyMemmapStorage.open(tmp_path / "store") if lanes is None and write(rb, 1) else None
    write(rb, 13)
    rb.dumps(tmp_path / "saved")
    twin = buffer(LazyMemmapStorage(10, lanes=lanes), None, Flat2TED())
    twin.loads(tmp_path / "saved")
    assert state_of(twin) == state_of(rb) and with_another is None


def test_a_store_whose_rows_others_overwrite_meanwhile_is_not_saved(tmp_path):
    rb, others = buffer(LazyMemmapStorage(10, scratch_dir=tmp_path / "store")), []
    write(rb, 13)

    def another_writes(td):
        others.append(buffer(LazyMemmapStorage.open(tmp_path / "store")))
        write(others[0], 2, 900)
        return td

    rb.register_save_hook(another_writes)
    with pytest.raises(StorageInUseError, match="nothing was saved"):
        rb.dumps(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("g-*"))
    rb.storage.checkpointer.save_hooks[:] = [lambda td: td]
    rb.dumps(tmp_path / "saved")  # the other one is there from the beginning: rows are copied
    twin = buffer(LazyMemmapStorage(10))
    twin.loads(tmp_path / "saved")
    assert state_of(twin) == state_of(rb)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("blocking", in_quick([True, False], [True]))
def test_hooks_on_a_mapped_store_need_little_memory(blocking, monkeypatch, tmp_path):
    """The pages of the store and of the snapshot are those of files, which the system can take back."""
    for limit in (through_hooks, encoding):
        for name in ("_BLOCK_BYTES", "_MOST_COPIED", "_IN_MEMORY_BYTES"):
            if hasattr(limit, name):
                monkeypatch.setattr(limit, name, 1 << 20)
    n = 10_000  # so that what else the process allocates meanwhile is little beside it
    rb, twin = (ReplayBuffer(storage=LazyMemmapStorage(n)) for _ in range(2))
    for i in range(0, n, 100):
        rb.extend({"pixels": torch.full((100, 1 << 14), i % 251, dtype=torch.uint8), "x": torch.arange(i, i + 100.0)})
    taken, write_all = [0], writer._write_all

    def anonymous():
        (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon"))
        return int(line.split()[1]) << 10

    def note(value=None, *rest):
        taken.append(anonymous() - before)
        return write_all(value, *rest) if rest else value

    monkeypatch.setattr(writer, "_write_all", note)
    rb.register_save_hook(lambda batch: {"sum": batch["x"].sum()} if len(taken) == 1 else batch)
    before = anonymous()
    rb.register_save_hook(note)
    save(rb, tmp_path, blocking)
    save(rb, tmp_path, blocking)  # everything
    twin.register_load_hook(note)
    twin.loads(tmp_path)
    assert max(taken) < rb.storage.nbytes / 2, f"{max(taken):,} bytes for {rb.storage.nbytes:,}"
    assert torch.equal(twin[-1]["pixels"], rb[-1]["pixels"]) and twin[:]["x"].tolist() == list(range(n))


# ---- what hooks return ----
CONTENTS = {
    "nothing else": lambda td: {},
    "values": lambda td: {"about": {"when": 3, "who": "me", "rate": float("inf"), "none": None, 5: (1, [2.5])}},
    "another batch size": lambda td: td[:2],
    "non tensors": lambda td: TensorDict({"x": td["x"], "name": NonTensorData("run", batch_size=[])}, []),
    "many non tensors": lambda td: LazyStackedTensorDict.lazy_stack(
        [TensorDict({"name": NonTensorData(text)}, []) for text in "abc"]
    ),
    "nested": lambda td: TensorDict(
        {
            "jagged": torch.nested.nested_tensor([td["x"][:2], td["x"][:5]], layout=torch.jagged),
            "strided": torch.nested.nested_tensor([td["x"][:2], td["x"][:5]], layout=torch.strided),
        },
        [],
    ),
    "arrays": lambda td: [td["x"].numpy(), np.float32(3), b"raw", torch.nn.Parameter(td["x"].clone())],
    "tensorclass": lambda td: {"steps": Steps(x=td["x"], y=td["pixels"], batch_size=td.batch_size)},
}


def plain(content):
    """Content without the classes and tensors that `==` does not compare."""
    if isinstance(content, torch.Tensor) and content.is_nested:
        return str(content.layout), [plain(part) for part in content.unbind(0)]
    if isinstance(content, torch.Tensor):
        return str(content.dtype), content.tolist()
    if isinstance(content, NonTensorData):
        return content.data
    if isinstance(content, LazyStackedTensorDict):
        return [plain(member) for member in content.tensordicts]
    if isinstance(content, dict | TensorDict | Steps):
        return {key: plain(value) for key, value in content.items()}
    if isinstance(content, np.ndarray):
        return str(content.dtype), content.tolist()
    return [plain(part) for part in content] if isinstance(content, list | tuple) else content


@each("what", CONTENTS)
@each("kind", ["list", "memory"])
def test_content_of_any_form_reaches_the_load_hook(what, kind, tmp_path):
    kept, found = [], []

    def there(td):
        kept.append(plain(CONTENTS[what](td)))
        return {"rows": td, "more": CONTENTS[what](td)}

    def back(content):
        found.append(plain(content["more"]))
        return content["rows"]

    rb, twin = (buffer(KINDS[kind](tmp_path), there, back) for _ in range(2))
    write(rb, 13)
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert found == kept and same(rb, twin)
    assert not [file for file in tmp_path.rglob("*") if b"pickle" in file.name.encode() or file.suffix == ".pt"]


class Own:
    pass


@each("content, match", [
    (lambda td: None, "the save hook .* returned None"),
    (lambda td: {"a": Own()}, r"what the save hooks returned\['a'\] is a .*Own, which cannot be saved"),
    (lambda td: td.set("name", NonTensorData(Own(), batch_size=td.batch_size)), "Own, which cannot be saved"),
    (lambda td: 1 / 0, "division by zero"),
])  # fmt: skip
@each("kind", ["list", "memory", "mapped"])
def test_a_save_hook_that_fails_leaves_the_snapshot_of_before(kind, content, match, tmp_path):
    rb = buffer(KINDS[kind](tmp_path))
    write(rb, 13)
    rb.dumps(tmp_path / "saved")
    rb.register_save_hook(content)
    before = state_of(rb)
    with pytest.raises((TypeError, ZeroDivisionError), match=match):
        rb.dumps(tmp_path / "saved")
    with pytest.raises((TypeError, ZeroDivisionError), match=match):
        save(rb, tmp_path / "saved", blocking=False)
    assert [p.name for p in (tmp_path / "saved").glob("g-*")] == ["g-000001"]
    twin = buffer(KINDS[kind](tmp_path))
    twin.loads(tmp_path / "saved")
    assert state_of(twin) == state_of(rb) == before


def test_a_hook_is_not_called_where_there_are_no_rows(tmp_path):
    for make in (lambda: ListStorage(5), lambda: LazyTensorStorage(5), lambda: LazyMemmapStorage(5)):
        rb, twin = (buffer(make(), lambda td: 1 / 0, lambda td: 1 / 0) for _ in range(2))
        for _ in range(2):
            rb.dumps(tmp_path)
            twin.loads(tmp_path)
            assert len(twin) == 0
            rb.extend(ted(3))
            rb.empty()


# ---- arguments ----
def test_save_hooks_with_path_may_leave_large_tensors_there(tmp_path):
    seen = []

    def there(td, path):
        seen.append(path)
        assert path.is_dir() and os.stat(path).st_dev == os.stat(tmp_path).st_dev
        kept = MemoryMappedTensor.from_tensor(td["x"].contiguous(), filename=str(path / "x.memmap"), existsok=True)
        return td.set("x", kept)

    rb, twin = (buffer(LazyTensorStorage(10), there) for _ in range(2))
    write(rb, 13)
    for blocking in (True, False):
        save(rb, tmp_path / "saved", blocking)
    twin.loads(tmp_path / "saved")
    assert state_of(twin) == state_of(rb) and isinstance(seen[0], Path) and not seen[0].exists()


@pytest.mark.parametrize("in_memory", [0, 1 << 24])
def test_load_hooks_with_out_may_fill_it(in_memory, monkeypatch, tmp_path):
    monkeypatch.setattr(through_hooks, "_IN_MEMORY_BYTES", in_memory)

    def back(td, *, out=None):
        assert out.batch_size == (10,) and out["x"].eq(0).all()
        out.update_(td)
        return out

    rb, twin = buffer(LazyTensorStorage(10), lambda td: td), buffer(LazyTensorStorage(10), None, back)
    write(rb, 13)
    rb.dumps(tmp_path / "hooked")
    rb.storage.checkpointer.save_hooks.clear()
    rb.dumps(tmp_path / "plain")
    for name in ("hooked", "plain", "hooked"):
        twin.loads(tmp_path / name)
        assert state_of(twin) == state_of(rb)


def test_arguments_are_given_to_hooks_that_take_them_and_were_not_given_any():
    def both(data, path=None, out=None):
        pass

    assert through_hooks._takes(both, "path") and through_hooks._takes(both, "out")
    assert not through_hooks._takes(functools.partial(both, path="mine"), "path")
    assert through_hooks._takes(functools.partial(both, path="mine"), "out")
    assert not any(
        through_hooks._takes(hook, "path")
        for hook in (lambda path: path, lambda data, **more: data, dict, torch.nn.Identity(), np.sum, lambda *path: 0)
    )


# ---- loads that do not fit ----
def test_what_hooks_made_is_loaded_without_hooks_where_it_fits_and_a_line_says_so(caplog, tmp_path):
    rb, twin = buffer(LazyTensorStorage(10), lambda td: td.set("x", td["x"] * 2)), buffer(LazyTensorStorage(10))
    write(rb, 13)
    rb.dumps(tmp_path)
    with caplog.at_level(logging.WARNING, "engram"):
        twin.loads(tmp_path)
    assert "1 save hook changed what was saved" in caplog.text and "no load hook is registered" in caplog.text
    assert torch.equal(twin[:]["x"], rb[:]["x"] * 2) and twin.write_count == 13


MISFITS = [
    ([TED2Flat()], [],
     r"1 save hook made a TensorDict of shape \[\].*steps of the shape \[10\].*register the load hook"),
    ([TED2Flat(), lambda td: {"td": td}], [lambda made: made["td"]],
     r"1 load hook made a TensorDict of shape \[\].*2 save hooks had changed it"),
    ([], [lambda td: td[:4]], r"1 load hook made a TensorDict of shape \[4\].*steps of the shape \[10\].*no save hook"),
    ([lambda td: td.exclude("pixels")], [], "'pixels' is missing"),
    ([lambda td: td.set("x", td["x"].half())], [], r"'x' is torch.float32 \[\] here, torch.float16 \[\] there"),
    ([], [lambda td: "text"], "1 load hook made a str"),
    ([], [lambda td: None], "the load hook .* returned None"),
    ([], [lambda td: [1, 2]], "1 load hook made a list of 2"),
]  # fmt: skip


@each("save_hooks, load_hooks, match", MISFITS)
@each("kind", ["list", "memory", "mapped", "columns"])
def test_a_load_that_does_not_fit_changes_nothing(kind, save_hooks, load_hooks, match, tmp_path):
    rb, twin = buffer(KINDS[kind](tmp_path)), buffer(KINDS[kind](tmp_path))
    write(rb, 13)
    for hook in save_hooks:
        rb.register_save_hook(hook)
    for hook in load_hooks:
        twin.register_load_hook(hook)
    rb.dumps(tmp_path)
    write(twin, 6)
    before = state_of(twin)
    if kind == "list":
        if "here" in match or "missing" in match:  # a list takes items of any form
            return
        match = match.replace(r"steps of the shape \[10\]", "10 items")
    for load in (twin.loads, twin.storage.loads):
        with pytest.raises((CheckpointMisfitError, TypeError), match=match):
            load(tmp_path)
        assert state_of(twin) == before


def test_rows_are_not_loaded_as_items_nor_items_as_rows(tmp_path):
    for saving, loading in ((ListStorage(10), LazyTensorStorage(10)), (LazyTensorStorage(10), ListStorage(10))):
        rb, twin = buffer(saving, lambda td: td), buffer(loading, None, lambda td: td)
        write(rb, 3)
        rb.dumps(tmp_path)
        with pytest.raises(CheckpointMisfitError, match="were saved, through hooks; this storage takes"):
            twin.loads(tmp_path)


def test_a_load_hook_may_give_rows_the_form_that_the_storage_has_now(tmp_path):
    rb, twin = buffer(LazyTensorStorage(10)), buffer(LazyTensorStorage(10), None, lambda td: td.exclude("pixels"))
    write(rb, 13)
    rb.dumps(tmp_path)
    twin.extend(ted(2).exclude("pixels"))
    twin.loads(tmp_path)
    assert twin.write_count == 13 and "pixels" not in twin[:].keys()
    assert bool((twin[:] == rb[:].exclude("pixels")).all())


def test_a_load_into_another_capacity(tmp_path):
    rb, twin = buffer(LazyTensorStorage(10), TED2Flat()), buffer(LazyTensorStorage(16), None, Flat2TED())
    write(rb, 13)
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert twin[:]["x"].tolist() == list(range(3, 13))
    small = buffer(LazyTensorStorage(5), None, Flat2TED())
    with pytest.raises(CheckpointMisfitError, match="room for 5 steps here, 10 saved there"):
        small.loads(tmp_path)
    assert len(small) == 0


@each("failing", [0, 1])
@each("filled, most", [(False, 1 << 28), (True, 1 << 28), (True, 10)])
def test_a_member_whose_content_does_not_fit_leaves_all_members(filled, most, failing, monkeypatch, tmp_path):
    monkeypatch.setattr(row_loads, "_STAGED_BYTES", most)

    def make():
        members = LazyTensorStorage(10), ListStorage(10)
        return [buffer(member) for member in members]

    saved, loaded = make(), make()
    for i, one in enumerate(saved):
        write(one, 13, 50 * i)
    saved[failing].register_save_hook(TED2Flat())
    storage = StorageEnsemble(*[one.storage for one in saved])
    storage.dumps(tmp_path)
    for i, one in enumerate(loaded if filled else []):
        write(one, 5, 70 * i)
    before = [state_of(one) for one in loaded]
    twin = StorageEnsemble(*[one.storage for one in loaded])
    with pytest.raises(CheckpointMisfitError, match="register the load hook"):
        twin.loads(tmp_path)
    assert [state_of(one) for one in loaded] == before
    loaded[failing].register_load_hook(Flat2TED())
    twin.loads(tmp_path)
    assert [state_of(one) for one in loaded] == [state_of(one) for one in saved]


def test_a_member_whose_rows_do_not_fit_leaves_all_members(monkeypatch, tmp_path):
    monkeypatch.setattr(row_loads, "_STAGED_BYTES", 10)
    saved, loaded = ([buffer(LazyTensorStorage(10)) for _ in range(2)] for _ in range(2))
    for i, one in enumerate(saved):
        write(one, 13, 50 * i)
        one.register_save_hook(lambda td: td.set("x", td["x"].half()) if td["x"].max() > 50 else td)
    StorageEnsemble(*[one.storage for one in saved]).dumps(tmp_path)
    for one in loaded:
        write(one, 5)
    before = [state_of(one) for one in loaded]
    with pytest.raises(CheckpointMisfitError, match=r"member 1: 'x' is torch.float32 \[\] here, torch.float16"):
        StorageEnsemble(*[one.storage for one in loaded]).loads(tmp_path)
    assert [state_of(one) for one in loaded] == before


def test_hooks_of_an_ensemble_of_buffers(tmp_path):
    def make():
        rb = ReplayBufferEnsemble(*[buffer(make(tmp_path)) for make in (KINDS["memory"], KINDS["list"])], batch_size=4)
        rb.storage.register_save_hook(TED2Nested())
        rb.storage.register_load_hook(Nested2TED())
        return rb

    rb, twin = make(), make()
    for i in range(2):
        write(rb[i], 13, 50 * i)
    for blocking in (True, False):
        save(rb, tmp_path, blocking)
    twin.loads(tmp_path)
    assert [state_of(twin[i]) for i in range(2)] == [state_of(rb[i]) for i in range(2)]


def test_storages_that_hooks_cannot_be_applied_to_are_refused(tmp_path):
    class Rows:
        """Lacks the method that gives hooks the layout."""

        def __init__(self, storage):
            self._storage = storage

        def __getattr__(self, name):
            if name == "row_layout":
                raise AttributeError(name)
            return getattr(self._storage, name)

        def __len__(self):
            return len(self._storage)

    rb = buffer(LazyTensorStorage(10))
    write(rb, 3)
    checkpointer = TensorStorageCheckpointer()
    save_snapshot(tmp_path, {}, (checkpointer, Rows(rb.storage.saved_form.sink())))
    checkpointer.register_save_hook(lambda td: td)
    with pytest.raises(TypeError, match=r"hooks need a storage with all methods of a RowSource.*; a Rows lacks some"):
        save_snapshot(tmp_path, {}, (checkpointer, Rows(rb.storage.saved_form.sink())))
    checkpointer.register_load_hook(lambda td: td)
    with open_snapshot(tmp_path) as saved, pytest.raises(TypeError, match="a Rows lacks some"):
        saved.load_storage(checkpointer, Rows(LazyTensorStorage(10)))


# ---- the snapshot ----
def hooked(path, kind="memory", **more):
    rb = buffer(KINDS[kind](path), TED2Flat(), **more)
    write(rb, 13)
    rb.dumps(path / "saved")
    return rb


def manifest(path):
    (file,) = path.glob("saved/g-*/manifest.json")
    return json.loads(file.read_text())


def test_the_manifest_names_the_feature_only_where_hooks_changed_something(tmp_path):
    rb = hooked(tmp_path)
    assert manifest(tmp_path)["features"] == ["hooks"]
    state = manifest(tmp_path)["body"]["storage"]
    assert state["format"] == "hooked" and state["state"]["saved_by"] == "rows" and state["state"]["save_hooks"] == 1
    rb.storage.checkpointer.save_hooks.clear()
    rb.dumps(tmp_path / "saved")
    assert manifest(tmp_path)["features"] == [] and manifest(tmp_path)["body"]["storage"]["format"] == "rows"


@pytest.mark.parametrize("kind", ["memory", "list"])
def test_damage_of_what_hooks_made_is_noticed_and_changes_nothing(kind, tmp_path):
    hooked(tmp_path, kind)
    for file in sorted(tmp_path.glob("saved/g-*/storage/*")):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        os.chmod(file, 0o644)
        whole = file.read_bytes()
        file.write_bytes(content)
        assert not verify(tmp_path / "saved").ok
        twin = buffer(KINDS[kind](tmp_path), None, Flat2TED())
        write(twin, 5)
        before = state_of(twin)
        with pytest.raises(CorruptCheckpointError):
            twin.loads(tmp_path / "saved")
        assert state_of(twin) == before
        file.write_bytes(whole)
    assert verify(tmp_path / "saved").ok


def resealed(path, change):
    """Changes the manifest of the snapshot at `path` and gives it, and CURRENT, the right hashes."""
    from engram.checkpoint.directory import CheckpointDirectory, Pointer, digest, to_checksummed_json

    (file,) = path.glob("saved/g-*/manifest.json")
    document = json.loads(file.read_text())
    del document["xxh3_128"]
    change(document["body"]["storage"]["state"])
    data = to_checksummed_json(document)
    os.chmod(file, 0o644)
    file.write_bytes(data)
    CheckpointDirectory(str(path / "saved")).point_to(Pointer(file.parent.name, digest(data)))


@each("key, value", [
    ("kind", "words"), ("order", {"oldest": 11, "shift": 0, "is_full": True}), ("order", {"oldest": 0}),
    ("order", None), ("order", {"oldest": -1, "shift": 0, "is_full": True}), ("counters", {}), ("layout", None),
    ("layout", {"leaves": 3}), ("save_hooks", "x"), ("tensorclass", None), ("kind", "items"),
])  # fmt: skip
def test_a_description_that_cannot_be_true_is_an_error(key, value, tmp_path):
    hooked(tmp_path)
    resealed(tmp_path, lambda state: state.update({key: value}) if value is not None else state.pop(key))
    twin = buffer(LazyTensorStorage(10), None, Flat2TED())
    write(twin, 4)
    before = state_of(twin)
    with pytest.raises(CheckpointError):
        twin.loads(tmp_path / "saved")
    assert state_of(twin) == before


def test_engram_load_makes_a_storage_for_what_hooks_made_and_says_what_is_missing(tmp_path):
    rb = buffer(LazyTensorStorage(10), lambda td: td.set("x", -td["x"]))
    write(rb, 13)
    rb.dumps(tmp_path)
    with pytest.warns(UserWarning, match="hooks of its checkpointer"):
        loaded = engram.load(tmp_path)
    assert loaded[:]["x"].tolist() == (-rb[:]["x"]).tolist()
    rb.register_save_hook(TED2Flat())
    rb.dumps(tmp_path)
    with pytest.raises(CheckpointMisfitError, match="register the load hook that undoes it"):
        engram.load(tmp_path)


def test_the_command_line_says_that_hooks_changed_the_rows(tmp_path):
    hooked(tmp_path)
    about = info(tmp_path / "saved")
    assert about.rows == 10 and about.parts["storage"] == "rows, changed by 1 save hook"


def test_states_in_memory_do_not_pass_hooks():
    rb, twin = (buffer(LazyTensorStorage(10), lambda td: 1 / 0, lambda td: 1 / 0) for _ in range(2))
    write(rb, 13)
    twin.load_state_dict(rb.state_dict())
    assert state_of(twin) == state_of(rb)
