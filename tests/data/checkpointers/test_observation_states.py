"""`state_dict` of storages that keep each observation once: each frame once, and nothing of it is believed."""

from __future__ import annotations

import copy
import io
import pickle
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from contracts.tiers import in_quick
from engram.data import Compact, LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from engram.data.replay_buffers.checkpointers import rows

SIDE = 12


def stacks(n: int, side: int = SIDE) -> TensorDict:
    """n steps of one episode, whose observations are stacks of four frames."""
    shown = torch.randint(0, 256, (n + 4, side, side), dtype=torch.uint8)
    pixels = shown.unfold(0, 4, 1).movedim(-1, 1)
    return TensorDict({"n": torch.arange(n), "pixels": pixels[:n], "next": {"pixels": pixels[1 : n + 1]}}, [n])


def buffer(compact: Any = True, capacity: int = 90, **settings: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(capacity, compact=compact, **settings))


def filled(n: int = 70, side: int = SIDE, **settings: Any) -> ReplayBuffer:
    torch.manual_seed(0)
    rb = buffer(**settings)
    rb.extend(stacks(n, side))
    return rb


def rows_of(rb: ReplayBuffer) -> TensorDict:
    rows: TensorDict = rb.storage.get(slice(None))
    return rows


def in_order(rb: ReplayBuffer) -> TensorDict:
    """The rows by their numbers."""
    rows = rows_of(rb)
    return rows[rows["n"].argsort()]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", 300)


def test_a_state_has_each_frame_once_and_torch_saves_it() -> None:
    rb = filled(400, 84, capacity=400)
    file = io.BytesIO()
    torch.save(rb.state_dict(), file)
    assert file.tell() < 1.05 * 400 * 84 * 84, "whole rows are eight times this"
    assert len(pickle.dumps(rb)) < 1.05 * 400 * 84 * 84
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for compact in (True, False, Compact("pixels", frames=2)):
        twin = buffer(compact, 400)
        twin.load_state_dict(state)
        assert bool((rows_of(twin) == rows_of(rb)).all()) and twin.write_count == 400


def test_a_state_is_made_and_taken_without_whole_rows_in_memory() -> None:
    rb, twin = filled(600, 84, capacity=600), buffer(True, 600)
    tracemalloc.start()
    state = rb.state_dict()
    twin.load_state_dict(state)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 600 * 84 * 84 * 3, "whole rows are eight times a frame"


@pytest.mark.usefixtures("small_chunks")
@each("written", [3, 70, 130])
def test_a_state_of_any_part_of_a_ring_is_taken_by_any_storage(written: int) -> None:
    rb = filled(written)
    state = rb.state_dict()
    assert written < 70 or len(state["storage"]["chunks"]) > 3
    for twin in (buffer(), buffer(False), buffer(capacity=200), buffer(False, 200), filled(9)):
        twin.load_state_dict(copy.deepcopy(state))
        assert bool((in_order(twin) == in_order(rb)).all())
        more = stacks(10)
        more["n"] += written
        twin.extend(more)
        assert bool((in_order(twin)[-10:] == more).all())


@pytest.mark.usefixtures("small_chunks")
def test_states_of_several_environments_and_of_processes_come_back(tmp_path: Any) -> None:
    wide = ReplayBuffer(storage=LazyTensorStorage(60, ndim=2, compact=True))
    wide.extend(torch.stack([stacks(25), stacks(25)]))
    shared = buffer(shared=True, lanes=3)
    folder = ReplayBuffer(storage=LazyMemmapStorage(90, scratch_dir=tmp_path, compact=True))
    for rb in (shared, folder):
        rb.extend(stacks(70))
    twins = [ReplayBuffer(storage=LazyTensorStorage(60, ndim=2)), buffer(shared=True, lanes=3), buffer()]
    for rb, twin in zip((wide, shared, folder), twins, strict=True):
        twin.load_state_dict(rb.state_dict())
        assert bool((rows_of(twin) == rows_of(rb)).all())
    observer = ReplayBuffer.open(tmp_path, read_only=True)
    twin = buffer()
    twin.storage.load_state_dict(observer.storage.state_dict())
    assert bool((rows_of(twin) == rows_of(folder)).all())


def test_a_state_with_whole_rows_is_taken_as_before() -> None:
    """As plain storages give it, and compact ones gave it."""
    plain, twin = filled(compact=False), filled(9)
    state = plain.state_dict()
    assert set(state["storage"]) == {"layout", "counters", "rows"}
    twin.load_state_dict(state)
    assert bool((rows_of(twin) == rows_of(plain)).all()) and twin.storage.compact is not None


def test_a_storage_without_rows_has_a_state() -> None:
    rb, twin = filled(), filled(9)
    rb.empty()
    twin.load_state_dict(rb.state_dict())
    assert len(twin) == 0
    twin.extend(stacks(5))
    fresh, other = buffer(), buffer()
    other.load_state_dict(fresh.state_dict())
    assert len(other) == 0


def content(state: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = next(iter(state["files"].values()))
    return found


def replace(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], Any]:
    def forge(state: dict[str, Any]) -> None:
        name = next(iter(state["files"]))
        state["files"][name] = change(state["files"][name])

    return forge


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no file": lambda state: state["files"].clear(),
    "no files": lambda state: state.update(files=None),
    "a file cut short": replace(lambda bytes_: bytes_[:-1]),
    "a longer file": replace(lambda bytes_: torch.cat([bytes_, bytes_[:1]])),
    "a file of floats": replace(torch.Tensor.float),
    "a file of two dimensions": replace(lambda bytes_: bytes_.unsqueeze(0)),
    "a file that is nothing": replace(lambda bytes_: None),
    "a file on no device": replace(lambda bytes_: bytes_.to("meta")),
    "kinds that lead outside": replace(lambda bytes_: torch.full_like(bytes_, 255)),
    "no chunks": lambda state: state.update(chunks=[]),
    "a chunk twice": lambda state: state["chunks"].append(state["chunks"][-1]),
    "a chunk of more rows": lambda state: state["chunks"][0].__setitem__(3, 10**9),
    "a chunk of another lane": lambda state: state["chunks"][0].__setitem__(0, 1),
    "more frames than there are": lambda state: state["chunks"][0].__setitem__(4, 2**63),
    "no observations": lambda state: state.pop("observations"),
    "observations of no leaf": lambda state: state["observations"].update(keys=[[1, 9, 4]]),
    "observations that overlap": lambda state: state["observations"].update(keys=[[1, 1, 4]]),
    "frames that do not divide": lambda state: state["observations"].update(keys=[[1, 2, 5]]),
    "steps that are none": lambda state: state["observations"].update(n_steps=0),
    "chunks of no rows": lambda state: state.update(rows_per_chunk=-1),
    "another layout": lambda state: state["layout"].update(row_bytes=7),
    "no layout": lambda state: state.update(layout=None),
    "a layout that is none": lambda state: state.update(layout=3),
    "no dimensions": lambda state: state["layout"].pop("ndim"),
    "counters of more rows": lambda state: state["counters"]["lanes"][0].update(published=71),
    "no counters": lambda state: state.pop("counters"),
    "counters of no lanes": lambda state: state["counters"].update(lanes=[]),
}  # fmt: skip


@each("compact", [True, False])
@each("forged", FORGED)
def test_a_state_that_cannot_be_is_refused_and_the_rows_stay(forged: str, compact: bool) -> None:
    twin, empty = filled(9, compact=compact), buffer(compact)
    before, state = rows_of(twin).clone(), filled().state_dict()
    FORGED[forged](state["storage"])
    for one in (twin, empty):
        with pytest.raises(ValueError, match="does not fit this buffer"):
            one.load_state_dict(state)
        with pytest.raises(ValueError, match=r"state|layout|fit"):
            one.storage.load_state_dict(state["storage"])
    assert bool((rows_of(twin) == before).all()) and len(empty) == 0 and empty.storage.nbytes == 0


@pytest.mark.parametrize("seed", in_quick(range(8), [0, 1]))
def test_forged_bytes_are_an_error_or_give_rows(seed: int) -> None:
    draw, saved = random.Random(seed), filled().state_dict()
    for _ in range(60):
        state, twin = copy.deepcopy(saved), filled(9, compact=draw.random() < 0.5)
        bytes_ = content(state["storage"])
        start = draw.choice([0, 70 * 8])  # of what is no observation, and of the kinds
        for _ in range(draw.randint(1, 3)):
            bytes_[draw.randrange(start, min(len(bytes_), start + 80))] = draw.randrange(256)
        try:
            twin.load_state_dict(state)
        except ValueError:
            assert len(twin) == 9
        else:
            assert len(rows_of(twin)) == 70
