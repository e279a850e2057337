"""Checkpoints of storages that keep each observation once."""

from __future__ import annotations

import json
import os
import random
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import engram._native as _native
from contracts.corruption import forge_file, forge_state
from contracts.each import each
from engram import verify
from engram.checkpoint import reader
from engram.data import (
    Compact,
    FlatStorageCheckpointer,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    ReplayBufferEnsemble,
)
from engram.data.replay_buffers.checkpointers import rows
from engram.data.replay_buffers.state.checkpointers.rows import ObservationCodec
from engram.errors import CheckpointError, CheckpointMisfitError, CorruptCheckpointError
from engram.store.layout import ObservationKeys, RowLayout
from engram.testing.compact import StackedEpisodes


def episodes(n: int, length: int, shape: tuple[int, ...] = (84, 84), n_steps: int = 1) -> TensorDict:
    """n steps with stacks of 4 frames, the first of an episode of its first frame; n-step rows at n_steps > 1."""
    parts = []
    for _ in range(0, n, length):
        shown = torch.randint(1, 256, (length + 1, *shape), dtype=torch.uint8)
        stacks = torch.cat([shown[:1]] * 3 + [shown]).unfold(0, 4, 1).movedim(-1, 1)
        after = torch.arange(length).add(n_steps).clamp(max=length)
        parts.append(TensorDict({"pixels": stacks[:-1], "next": {"pixels": stacks[after]}}, [length]))
    steps = torch.cat(parts)[:n]
    steps["action"] = torch.arange(n)
    return steps


def buffer(n: int, compact: Any = True, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(n, compact=compact, **options))


def filled(n: int = 90, compact: Any = True, length: int = 9, **options: Any) -> ReplayBuffer:
    torch.manual_seed(n)
    rb = buffer(n, compact)
    rb.extend(episodes(n, length, (3, 3), **options))
    return rb


def chunk_files(path: Path, snapshot: str = "g-000001") -> dict[str, Path]:
    return {file.name: file for file in sorted((path / snapshot / "storage").iterdir())}


def manifest(path: Path, snapshot: str = "g-000001") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / snapshot / "manifest.json").read_bytes())
    return found


def assert_same_rows(rb: ReplayBuffer, other: ReplayBuffer) -> None:
    assert len(rb) == len(other) and (rb.storage.get(slice(None)) == other.storage.get(slice(None))).all()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", 50)  # eleven rows of `filled`


# ---- size and memory ----
@each("length", [20, 100])
def test_a_step_takes_the_bytes_of_a_frame(tmp_path: Path, length: int) -> None:
    rb = buffer(400)
    rb.extend(episodes(400, length))
    rb.dumps(tmp_path)
    nbytes = sum(file.stat().st_size for file in chunk_files(tmp_path).values())
    given = 1 / length + 4 / 400  # of a last observation; and the first and last rows of a chunk
    assert nbytes / 400 <= 84 * 84 * (1 + given) + 8 + 2


def test_chunks_of_many_environments_are_long_enough() -> None:
    assert rows.rows_per_chunk(7_100, 256) == 2_363
    assert rows.rows_per_chunk(64 * 7_100, 256) == 147  # 64 MiB
    assert rows.rows_per_chunk(16 * 7_100, 256) == 256
    assert rows.rows_per_chunk(64 * 7_100) == 37


def test_a_save_and_a_load_never_have_the_whole_rows_in_memory(tmp_path: Path) -> None:
    rb, twin = buffer(600), buffer(600)
    rb.extend(episodes(600, 100))
    for call in (rb.dumps, twin.loads):
        tracemalloc.start()
        call(tmp_path)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 600 * 84 * 84 * 2, call  # whole rows are four times this
    assert_same_rows(twin, rb)


# ---- what comes back ----
@pytest.mark.usefixtures("small_chunks")
@each("n_steps", [1, 3])
@each("background", [False, True])
def test_compact_and_plain_storages_of_any_size_load_it(tmp_path: Path, n_steps: int, background: bool) -> None:
    rb = filled(n_steps=n_steps)
    saved = rb.dumps(tmp_path, blocking=not background)
    if background:
        saved.result()
    assert len(chunk_files(tmp_path)) > 5 and manifest(tmp_path)["features"] == ["observations"]
    for twin in (buffer(90), buffer(100), buffer(90, None), buffer(130, None), buffer(91, ["pixels"])):
        twin.loads(tmp_path)
        assert_same_rows(twin, rb)
        twin.loads(tmp_path)  # one that holds rows
        assert_same_rows(twin, rb)


@pytest.mark.usefixtures("small_chunks")
def test_rows_that_were_saved_plain_and_compact_are_the_same(tmp_path: Path) -> None:
    rb, plain = filled(), filled(compact=None)
    plain.dumps(tmp_path / "plain")
    assert manifest(tmp_path / "plain")["features"] == []
    twin = buffer(90)
    twin.loads(tmp_path / "plain")
    assert_same_rows(twin, rb)
    for name, one in (("one", rb), ("other", twin)):
        one.dumps(tmp_path / name)
    contents = [[file.read_bytes() for file in chunk_files(tmp_path / name).values()] for name in ("one", "other")]
    assert contents[0] == contents[1]


def test_a_storage_finds_again_what_was_stored_once(tmp_path: Path) -> None:
    rb = buffer(40)
    flat = torch.arange(44 * 8).reshape(44, 8)
    stacks = torch.stack([flat[i : i + 4] for i in range(41)])  # of a shape that does not tell it
    rb.extend(TensorDict({"x": stacks[:38], "next": {"x": stacks[3:]}}, [38]))
    assert rb.storage.compact == Compact(["x"], {"x": 4}, 3)
    rb.dumps(tmp_path)
    found, said, other = buffer(40), buffer(40, Compact("x", 2, 1)), buffer(60)
    for twin in (found, said, other):
        twin.loads(tmp_path)
        assert_same_rows(twin, rb)
    assert found.storage.compact == other.storage.compact == rb.storage.compact
    assert said.storage.compact == Compact(["x"], {"x": 2}, 1)


def test_hdf5_flat_and_nested_have_whole_rows_and_any_storage_loads_them(tmp_path: Path) -> None:
    rb = filled()
    for i, checkpointer in enumerate((FlatStorageCheckpointer(), NestedStorageCheckpointer())):
        rb.storage.dumps(tmp_path / str(i), checkpointer=checkpointer)
        assert manifest(tmp_path / str(i))["features"] == []
        for compact in (True, None):
            twin = buffer(90, compact)
            twin.storage.loads(tmp_path / str(i), checkpointer=checkpointer)
            assert (twin.storage.get(slice(None)) == rb.storage.get(slice(None))).all()


def test_members_of_an_ensemble_are_saved_each_as_it_is(tmp_path: Path) -> None:
    rb = ReplayBufferEnsemble(filled(), filled(compact=None), batch_size=4)
    rb.dumps(tmp_path)
    assert manifest(tmp_path)["features"] == ["observations"]
    twin = ReplayBufferEnsemble(buffer(90), buffer(90, None), batch_size=4)
    twin.loads(tmp_path)
    for i in range(2):
        assert_same_rows(twin[i], rb[i])


# ---- later saves ----
@pytest.mark.usefixtures("small_chunks")
def test_a_later_save_takes_over_the_chunks_that_have_not_changed(tmp_path: Path) -> None:
    rb = buffer(90)
    rb.extend(episodes(90, 9, (3, 3)))
    rb.dumps(tmp_path, keep_last=3)
    rb.extend(episodes(15, 9, (3, 3)))
    rb.dumps(tmp_path, keep_last=3)
    first, second = (chunk_files(tmp_path, name) for name in ("g-000001", "g-000002"))
    same = [name for name in second if name in first and os.path.samefile(first[name], second[name])]
    assert len(same) >= len(second) - 2 > 5
    twin = buffer(90)
    twin.loads(tmp_path)
    assert_same_rows(twin, rb)
    rb.storage.set([40], rb.storage.get([40]).apply(lambda value: value, action=None))
    edited = rb.storage.get([40])
    edited["action"] += 1
    rb.storage.set([40], edited)
    rb.dumps(tmp_path, keep_last=3)
    third = chunk_files(tmp_path, "g-000003")
    changed = [name for name in third if name not in second or not os.path.samefile(second[name], third[name])]
    assert len(changed) == 1
    twin.loads(tmp_path)
    assert_same_rows(twin, rb)


# ---- any rows ----
class Chunk:
    """Random rows of several environments, whose observations often coincide, and the codec that packs them."""

    def __init__(self, draw: random.Random) -> None:
        self.frames, self.n_steps = draw.randint(1, 5), draw.choice([1, 1, 2, 3, 7])
        self.envs, self.steps = draw.randint(1, 3), draw.randint(1, 30)
        episodes = [StackedEpisodes(draw, self.frames, self.n_steps) for _ in range(self.envs)]
        batch = torch.stack([torch.stack([one.step() for _ in range(self.steps)]) for one in episodes])
        self.layout = RowLayout.of(batch, 2)
        self.rows = self.layout.pack(batch.reshape(-1)).numpy().reshape(self.envs, self.steps, -1)
        frames = {("pixels",): self.frames, ("vector",): draw.choice([1, 5])}
        self.codec = ObservationCodec.of(self.layout, ObservationKeys(frames, self.n_steps))

    def packed(self) -> tuple[tuple[int, ...], np.ndarray]:
        details, blocks = self.codec.pack(lambda a, b: self.rows[:, a:b].copy(), self.envs, self.steps, [])
        content = np.concatenate([np.frombuffer(block, np.uint8) for block in blocks])
        assert len(content) == self.codec.nbytes(details, self.envs, self.steps)
        return details, content

    def unpacked(self, details: tuple[int, ...], content: np.ndarray, first: int = 0) -> np.ndarray:
        found = list(self.codec.unpack(content, details, self.envs, self.steps, first))
        assert [start for start, _ in found] == list(np.cumsum([first, *(b.shape[1] for _, b in found)])[:-1])
        return np.concatenate([block for _, block in found], 1)


@each("seed", range(40))
def test_any_rows_come_back_from_any_step_on(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    chunk = Chunk(draw)
    monkeypatch.setattr(rows, "_BLOCK_BYTES", draw.choice([1, 300, 1000, 1 << 20]))
    details, content = chunk.packed()
    monkeypatch.setattr(rows, "_BLOCK_BYTES", draw.choice([1, 300, 1000, 1 << 20]))
    for first in {0, draw.randrange(chunk.steps), chunk.steps - 1}:
        assert (chunk.unpacked(details, content, first) == chunk.rows[:, first:]).all()


# ---- damage ----
@pytest.mark.deep
def test_a_forged_byte_is_an_error_or_gives_frames_of_the_chunk() -> None:
    chunk = Chunk(random.Random(3))
    chunk.rows[chunk.rows == 77] = 78
    details, content = chunk.packed()
    outside = np.full(3 * len(content), 77, np.uint8)  # what lies around the content is in no frame
    inside = outside[len(content) : 2 * len(content)]
    refused = 0
    for at in range(len(content)):
        for value in (0, 1, 2, 3, 4, 8, 12, 27, 255):
            inside[:] = content
            inside[at] = value
            try:
                found = chunk.unpacked(details, inside)
            except ValueError:
                refused += 1
                continue
            assert not any(77 in frame for frame in frames_of(chunk, found)), (at, value)
    assert refused > 100


def frames_of(chunk: Chunk, whole: np.ndarray) -> list[np.ndarray]:
    """The frames of all stacks."""
    leaves = [leaf for leaf in chunk.layout.leaves if leaf.path[-1] == "pixels"]
    return [
        frame
        for leaf in leaves
        for frame in whole[..., leaf.offset : leaf.offset + leaf.nbytes].reshape(-1, leaf.nbytes // chunk.frames)
    ]


ONE_KEY = (2, 3, 9, 1, [(0, 4, 2, 2)])  # environments, steps, bytes of a row, n_steps; X of two frames of two bytes
KINDS = [1 | 0 << 2, 0, 0 | 2 << 2] * 2


def decode(kinds: list[int], given: int = 2, content: int = 0, form: Any = ONE_KEY) -> Any:
    n = 6
    frames = [np.ones(2 * count, np.uint8) for count in (n, given)]
    sections = [np.zeros(n, np.uint8), np.array(kinds, np.uint8), *frames]
    whole = np.concatenate([*sections, np.zeros(max(0, content), np.uint8)])
    return _native.ObservationDecoder(whole[: len(whole) + min(0, content)], [given], *form)


def test_rows_that_can_be_are_decoded() -> None:
    out = np.zeros((2, 3, 9), np.uint8)
    decode(KINDS).read(0, out)
    assert out.sum() == 2 * 3 * 8


@each(
    "what",
    [
        ([0, *KINDS[1:]], 2, 0, "no row before it"),
        ([*KINDS[:3], 0, *KINDS[4:]], 2, 0, "no row before it"),
        ([*KINDS[:2], 0, *KINDS[3:]], 1, 0, "no row behind it"),
        ([*KINDS[:5], 0], 1, 0, "no row behind it"),
        ([*KINDS[:5], 4 << 2], 4, 0, "more frames than it has"),
        ([*KINDS[:5], 63 << 2], 2, 0, "more frames than it has"),
        ([3, *KINDS[1:]], 2, 0, "not as many frames"),
        (KINDS, 3, 0, "not as many frames"),
        (KINDS, 2, 1, "not as long"),
        (KINDS, 2, -1, "not as long"),
    ],
)
def test_each_kind_that_would_lead_outside_is_refused(what: tuple[list[int], int, int, str]) -> None:
    kinds, given, content, words = what
    with pytest.raises(ValueError, match=words):
        decode(kinds, given, content)


@each(
    "form",
    [
        (2, 3, 9, 1, [(0, 3, 2, 2)]), (2, 3, 9, 1, [(0, 6, 2, 2)]), (2, 3, 9, 1, [(2**64 - 1, 4, 2, 2)]),
        (2, 3, 9, 1, [(0, 4, 2**63, 2)]), (2, 3, 9, 1, [(0, 4, 0, 2)]), (2, 3, 9, 0, [(0, 4, 2, 2)]),
        (2, 3, 9, 1, []), (2, 3, 9, 1, [(0, 4, 2, 2), (0, 4, 2, 2)]), (0, 3, 9, 1, [(0, 4, 2, 2)]),
        (2, 3, 9, 1, [(0, 4, 2, 2**62)]), (2, 0, 9, 1, [(0, 4, 2, 2)]), (2, 3, 0, 1, [(0, 4, 2, 2)]),
        (2, 3, 9, 1, [(0, 4, 2, 0)]), (2, 3, 64, 1, [(0, 32, 16, 2)]),
    ],
)  # fmt: skip
def test_observations_that_are_not_those_of_a_row_are_refused(form: Any) -> None:
    with pytest.raises(ValueError):
        decode(KINDS, form=form)
    with pytest.raises(ValueError):
        _native.ObservationEncoder(*form)


def test_more_rows_than_there_can_be_are_refused() -> None:
    form = (2, 2**63, 9, 1, [(0, 4, 2, 2)])  # twice 2^63 are none, modulo 2^64
    with pytest.raises(MemoryError):
        _native.ObservationDecoder(np.zeros(0, np.uint8), [0], *form)
    with pytest.raises(MemoryError):
        _native.ObservationEncoder(*form)


@each("given", [[], [2, 2]])
def test_numbers_of_frames_of_other_keys_are_refused(given: list[int]) -> None:
    sections = [np.zeros(6, np.uint8), np.array(KINDS, np.uint8), np.ones(2 * (6 + 2), np.uint8)]
    with pytest.raises(ValueError, match="other keys"):
        _native.ObservationDecoder(np.concatenate(sections), given, *ONE_KEY)


@each("first, second", [(2**63 + 2, 2), (2, 2**63 + 2), (2 + 2**62, 2 - 2**62 + 2**64), (2**64 - 3, 7)])
def test_numbers_of_frames_that_fit_modulo_2_64_are_refused(first: int, second: int) -> None:
    kinds, form = np.array(KINDS, np.uint8), (2, 3, 16, 1, [(0, 4, 2, 2), (8, 12, 2, 2)])
    of_one = [kinds, np.ones(2 * (6 + 2), np.uint8)]
    with pytest.raises(ValueError, match="not as many frames"):
        _native.ObservationDecoder(np.concatenate(of_one * 2), [first, second], *form)


def test_rows_that_a_chunk_has_not_are_refused() -> None:
    decoder = decode(KINDS)
    for start, n in ((0, 4), (3, 1), (4, 0), (2**63, 1)):
        with pytest.raises(IndexError):
            decoder.read(start, np.zeros((2, n, 9), np.uint8))
    for shape in ((1, 3, 9), (2, 3, 8)):
        with pytest.raises(ValueError):
            decoder.read(0, np.zeros(shape, np.uint8))
    encoder = _native.ObservationEncoder(*ONE_KEY)
    with pytest.raises(ValueError, match="missing"):
        encoder.sections()
    for shape in ((2, 4, 9), (1, 3, 9), (2, 3, 8)):
        with pytest.raises(ValueError):
            encoder.append(np.zeros(shape, np.uint8))


@pytest.mark.usefixtures("small_chunks")
def test_forged_rows_are_a_corrupt_checkpoint_and_change_nothing(tmp_path: Path) -> None:
    rb, twin = filled(), filled(95)
    rb.dumps(tmp_path)
    before = twin.storage.get(slice(None)).clone()
    name = "storage/" + list(chunk_files(tmp_path))[2]
    content = bytearray((tmp_path / "g-000001" / name).read_bytes())
    content[11 * 8] = 0xFF  # the first row's kinds stand behind all actions
    forge_file(tmp_path, tmp_path / "g-000001" / name, bytes(content))
    for holder in (twin, buffer(90), buffer(90, None)):
        with pytest.raises(CorruptCheckpointError, match=re.escape(name)):
            holder.loads(tmp_path)
    assert (twin.storage.get(slice(None)) == before).all()


@pytest.mark.usefixtures("small_chunks")
@each(
    "keys, n_steps",
    [
        ([], 1), ([[0, 2, 4]], 1), ([[0, 0, 4]], 1), ([[0, 1, 0]], 1), ([[0, 1, 5]], 1), ([[0, 1, 18]], 1), ([3], 1),
        ([[0, 1, 4]], 0), ([[0, 1, 4]], "1"), ([[0, 1, 4]], 2**70), ([[0, 1, 4]], None), ([[0, -1, 4]], 1), (3, 1),
        ([[0, 99, 4]], 1), ([[0, 1, True]], 1), ([[0, 1, 4], [0, 1, 4]], 1), ([[0, 1]], 1),
    ],
)  # fmt: skip
def test_a_manifest_that_cannot_be_is_refused(tmp_path: Path, keys: Any, n_steps: Any) -> None:
    filled().dumps(tmp_path)
    state = manifest(tmp_path)["body"]["storage"]["state"]
    assert state["observations"] == {"keys": [[0, 1, 4]], "n_steps": 1}
    forge_state(tmp_path, lambda saved: saved.update(observations={"keys": keys, "n_steps": n_steps}))
    with pytest.raises(CorruptCheckpointError, match="malformed"):
        buffer(90).loads(tmp_path)


def test_an_engram_that_does_not_know_it_refuses_it_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled().dumps(tmp_path)
    monkeypatch.setattr(reader, "FEATURES", ("hooks",))
    with pytest.raises(CheckpointError, match="'observations', which this engram does not know"):
        buffer(90).loads(tmp_path)
    monkeypatch.undo()
    assert verify(tmp_path).ok


@each(
    "compact, cannot", [(Compact("obs"), "have no 'obs'"), (Compact("pixels", frames=3), "which 3 must divide")]
)  # fmt: skip
def test_a_storage_whose_compact_names_what_the_saved_rows_lack_does_not_fit(
    tmp_path: Path, compact: Compact, cannot: str
) -> None:
    filled().dumps(tmp_path)
    rb = ReplayBuffer(storage=LazyTensorStorage(90, compact=compact))
    with pytest.raises(CheckpointMisfitError, match=cannot):
        rb.loads(tmp_path)
    assert len(rb) == 0
