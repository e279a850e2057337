"""Forged states and descriptions of every part that a checkpoint can name: refused without any change, or they fit.

What is forged has every hash right. `engram.load` makes what a description says, and nothing of it is a place on disk.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import engram
from contracts.children import Child
from contracts.corruption import NASTY, Forger, exchanged, limit_memory, places, without
from contracts.each import each
from damage.parts import BATCH, BUFFERS, SAMPLERS, STORAGES, TRANSFORMS, WRITERS, buffer, empty_buffer, steps
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.buffers import rebuild
from engram.errors import CheckpointError, CheckpointMisfitError, CorruptCheckpointError, StorageError
from engram.transforms import Transform
from engram.transforms.base import REGISTERED, UNUSED
from golden.observed import leaves, unlike

MOST = 2 << 30  # of address space, which each thread takes a part of, on top of what the process has
PARTS = [*STORAGES, *SAMPLERS, *WRITERS, *TRANSFORMS, *BUFFERS]
SOME = 20  # forged values of each part in an ordinary run
#: Values in the place of others: of every kind, in memory.
WRONG: list[Any] = [
    None, True, -1, 0, 1, 7, 2**31, 2**62, 2**63, 2**200, 0.5, float("nan"), float("inf"), "", "x", "../../x", b"x", [],
    {}, (), [1], [None], (1, 2), {"a": 1}, {1: 2}, {"kind": "x"}, object(), torch.zeros(0), torch.tensor(1.0),
    torch.arange(3), torch.zeros(2, 2, dtype=torch.bool), np.zeros(3),
]  # fmt: skip
#: The same in a file; what stands for the values of arguments besides.
WRITTEN: list[Any] = [
    *NASTY, 1e308, {"$float": "7ff8000000000000"}, ["a"], "cpu", "meta", "cuda:7", {"of": "part", "value": 3},
    {"of": "dtype", "value": "x"}, {"of": "missing", "value": 1}, {"of": "part", "value": {"kind": "ListStorage"}},
]  # fmt: skip
#: What a use of a buffer may say of settings that a forged description gave it: other keys, other sizes.
REFUSALS = (ValueError, TypeError, KeyError, IndexError, RuntimeError, OverflowError, NotImplementedError)


def test_each_part_that_a_checkpoint_can_name_is_attacked_here() -> None:
    for made, named in (
        (STORAGES, rebuild._STORAGES), (SAMPLERS, rebuild._SAMPLERS), (WRITERS, rebuild._WRITERS),
        (TRANSFORMS, rebuild._TRANSFORMS), (BUFFERS, rebuild._BUFFERS),
    ):  # fmt: skip
        assert made.keys() == named.keys()
    assert rebuild._STORAGE_ARGUMENTS.keys() == rebuild._STORAGES.keys()


# ---- forged trees ----
def nodes(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a state, the state itself first."""
    yield at
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    for key, child in children:
        yield from nodes(child, (*at, key))


def forged(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    """The state with another value in one place, or (KeyError) without it; what it does not change is the same."""
    if not at:
        return value
    key, *rest = at
    changed = dict(tree) if isinstance(tree, dict) else list(tree)
    if value is KeyError and not rest:
        del changed[key]
    else:
        changed[key] = forged(tree[key], tuple(rest), value)
    return type(tree)(changed) if isinstance(tree, tuple) else changed


def forgeries(state: Any, seed: str, count: int | None) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    attacks = [(at, value) for at in nodes(state) for value in [*WRONG, KeyError] if at or value is not KeyError]
    random.Random(seed).shuffle(attacks)
    for at, value in attacks[:count]:
        yield at, value, forged(state, at, value)


def seen(state: Any) -> Any:
    return dict(leaves(state, "state"))


def attacked_in_memory(part: str, count: int | None) -> int:
    """How many forged states of a whole buffer were refused, each of which left it as it was."""
    refusals, rb = 0, buffer(part)
    before = seen(rb.state_dict())
    for at, value, state in forgeries(buffer(part).state_dict(), part, count):
        try:
            rb.load_state_dict(state)
        except CheckpointError:
            assert unlike(seen(rb.state_dict()), before) == [], (at, value)
            refusals += 1
        except BaseException as error:
            raise AssertionError(f"{'/'.join(map(str, at))} = {value!r:.90}: {error!r}") from error
        else:
            rb.state_dict()
            rb = buffer(part)
            before = seen(rb.state_dict())
    return refusals


def bounded(work: Callable[[], Any]) -> Any:
    """Runs in a child that cannot take more memory, and that may die without harm."""

    def limited() -> Any:
        limit_memory(MOST)
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return work()

    return Child(limited, seconds=600).result()


@pytest.mark.parametrize("part", [*PARTS, "ensemble"])
def test_a_forged_state_in_memory_is_refused_and_changes_nothing_or_fits(part: str) -> None:
    assert bounded(lambda: attacked_in_memory(part, 3 * SOME)) > SOME


@pytest.mark.long
@pytest.mark.parametrize("part", [*PARTS, "ensemble"])
def test_every_forged_state_in_memory_is_refused_and_changes_nothing_or_fits(part: str) -> None:
    print(f"{part}: {bounded(lambda: attacked_in_memory(part, None))} refused")


def attacked_alone(part: str, count: int | None) -> int:
    """The same of the parts by themselves, each with its own `load_state_dict`."""
    refusals, rb = 0, buffer(part)
    for one in (rb.sampler, rb.writer, rb.storage, *([] if part == "ensemble" else rb.transform.transforms)):
        source = one.state_dict()
        before = seen(source)
        for at, value, state in forgeries(source, f"{part} {type(one).__name__}", count):
            try:
                one.load_state_dict(state)
            except CheckpointError:
                assert unlike(seen(one.state_dict()), before) == [], (at, value)
                refusals += 1
            except BaseException as error:
                said = f"{type(one).__name__}: {'/'.join(map(str, at))} = {value!r:.90}: {error!r}"
                raise AssertionError(said) from error
            else:
                one.load_state_dict(source)
    return refusals


@pytest.mark.parametrize("part", [*PARTS, "ensemble"])
def test_a_forged_state_of_a_part_alone_is_refused_and_changes_nothing_or_fits(part: str) -> None:
    assert bounded(lambda: attacked_alone(part, SOME)) > SOME


@pytest.mark.quick
@pytest.mark.parametrize("state", [[], 3, "x", True, {"transforms": 3}, {"transforms": [{}]}, torch.zeros(3)])
def test_a_forged_state_of_transforms_is_a_checkpoint_error(state: Any) -> None:
    rb = buffer("VecNorm")
    whole = rb.state_dict()
    with pytest.raises(CheckpointError, match="does not fit"):
        rb.load_state_dict({**whole, "transform": state})


# ---- descriptions, from which `engram.load` makes a buffer ----
def attacked_description(part: str, path: Path, count: int | None) -> int:
    """How many forged descriptions were refused; what is made of the others can be used, or says why not."""
    buffer(part).dumps(path)
    forger = Forger(path)
    body = forger.document["body"]
    attacks = [(at, value) for at in places(body["components"], ("components",)) for value in [*WRITTEN, KeyError]]
    random.Random(part).shuffle(attacks)
    refusals = 0
    for at, value in attacks[:count]:
        made = without(body, at) if value is KeyError else exchanged(body, at, value)
        forger.write({**forger.document, "body": made})
        try:
            rb = engram.load(path)
        except (CheckpointError, StorageError):
            refusals += 1
            continue
        except BaseException as error:
            raise AssertionError(f"{'/'.join(map(str, at))} = {value!r:.90}: {error!r}") from error
        rb.state_dict()
        for use in (lambda rb=rb: rb.sample(BATCH), lambda rb=rb: rb.extend(steps())):
            try:
                use()
            except REFUSALS:
                pass
    return refusals


@pytest.mark.parametrize("part", PARTS)
def test_a_forged_description_is_refused_or_makes_a_buffer(part: str, ram_path: Path) -> None:
    bounded(lambda: attacked_description(part, ram_path / "saved", SOME))


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_every_forged_description_is_refused_or_makes_a_buffer(part: str, ram_path: Path) -> None:
    print(f"{part}: {bounded(lambda: attacked_description(part, ram_path / 'saved', None))} refused")


# ---- places on disk ----
@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of the reader's."""
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(30, scratch_dir=tmp_path / "store"))
    rb.extend(steps())
    rb.storage.close()
    return tmp_path / "store"


def content(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize(
    "added",
    [
        {"existsok": True}, {"existsok": True, "auto_cleanup": True}, {"existsok": True, "take_over": True}, {},
        {"shared_init": True, "existsok": True},
    ],
    ids=lambda added: "-".join(added) or "a new folder",
)  # fmt: skip
def test_no_description_opens_fills_or_deletes_a_store(
    kind: str, added: dict[str, bool], store: Path, tmp_path: Path
) -> None:
    buffer(kind).dumps(tmp_path / "saved")
    place = store if added else store.with_name("new")
    before = content(store)

    def forge(document: Any) -> None:
        described = document["body"]["components"]["buffer"]["storage"]
        described["arguments"] |= {"scratch_dir": str(place), **added}

    Forger(tmp_path / "saved").edit(forge)
    with pytest.raises(CorruptCheckpointError, match=r"'scratch_dir' in the arguments of the \w+Storage is"):
        engram.load(tmp_path / "saved")
    assert content(store) == before and not store.with_name("new").exists()


@pytest.mark.parametrize(
    "setting",
    ["storage", "checkpointer", "publish_stats", "delayed_init", "transform_factory", "shared", "sampler", "generator"],
)
def test_no_description_gives_a_buffer_other_arguments_than_saves_name(setting: str, tmp_path: Path) -> None:
    buffer("RandomSampler").dumps(tmp_path)
    Forger(tmp_path).edit(lambda d: d["body"]["components"]["buffer"]["settings"].update({setting: True}))
    with pytest.raises(CorruptCheckpointError, match=f"{setting}.* in the description of the buffer"):
        engram.load(tmp_path)


@pytest.mark.parametrize("kind", ["LazyMemmapStorage", "LazyTensorStorage"])
def test_a_storage_that_is_said_to_be_larger_than_the_memory_is_refused(kind: str, tmp_path: Path) -> None:
    ReplayBuffer(storage=rebuild._STORAGES[kind](30)).dumps(tmp_path / "empty")
    rb = ReplayBuffer(storage=rebuild._STORAGES[kind](30))
    rb.extend(torch.arange(5))
    rb.dumps(tmp_path / "saved")
    Forger(tmp_path / "saved").edit(
        lambda d: d["body"]["components"]["buffer"]["storage"]["arguments"].update(max_size=10**15)
    )
    with pytest.raises(StorageError, match="TB"):
        bounded(lambda: engram.load(tmp_path / "saved"))


def test_a_mapped_store_that_was_saved_is_loaded_into_a_temporary_file_or_where_the_caller_says(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(30, scratch_dir=tmp_path / "rows"), batch_size=BATCH)
    rb.extend(steps())
    rb.dumps(tmp_path / "saved")
    before = content(tmp_path / "rows")
    loaded = engram.load(tmp_path / "saved")
    assert type(loaded.storage) is LazyMemmapStorage and loaded.storage.scratch_dir is None and len(loaded) == 10
    loaded.extend(steps())
    given = engram.load(tmp_path / "saved", storage=LazyMemmapStorage(30, scratch_dir=tmp_path / "mine"))
    given.storage.close()
    assert len(LazyMemmapStorage.open(tmp_path / "mine")) == 10
    assert content(tmp_path / "rows") == before


def test_a_method_of_an_environment_is_not_named_by_a_checkpoint(tmp_path: Path) -> None:
    rb = empty_buffer("EndOfLifeTransform")
    rb.transform.transforms[0]._arguments = ((), {"eol_attribute": "unwrapped.close"})
    rb.extend(steps())
    rb.dumps(tmp_path)
    with pytest.warns(UserWarning, match="transform 0, EndOfLifeTransform, which was made with eol_attribute="):
        assert len(engram.load(tmp_path).transform) == 0


class Counting(Transform):
    """Changes an attribute with each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def _inv_call(self, batch: TensorDict) -> TensorDict:
        self.writes += 1
        return batch


def test_no_state_sets_an_attribute_of_a_transform() -> None:
    counting = Counting()
    rb = ReplayBuffer(storage=LazyTensorStorage(30), transform=counting)
    rb.extend(TensorDict(obs=torch.zeros(3), batch_size=[3]))
    whole, before = rb.state_dict(), {**vars(counting)}
    for name in ("writes", "forward", "inv", "kind", "_inv_call", "_modules", "_forward_hooks", REGISTERED, UNUSED):
        attribute = {"place": 0, "name": name, "value": {"value": 7}}
        entry = {"kind": "Counting", "nth": 0, "settings": counting.state_settings()}
        entry["state"] = {"attributes": [attribute], "holds_back": True}  # as states had them until now
        with pytest.warns(UserWarning, match="the state of Counting has attributes .* which are not loaded"):
            rb.load_state_dict({**whole, "transform": {"transforms": [entry]}})
        assert vars(counting) == before


class Module(torch.nn.Module):
    """Has an inverse and a tensor, and is no Transform of engram's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, batch: TensorDict) -> TensorDict:
        return batch

    def inv(self, batch: TensorDict) -> TensorDict:
        return batch


@each("state", [{"object": 3}, {"object": {}}, {"object": {"mean": "x"}}, {"object": {"mean": torch.zeros(3)}}])
def test_a_state_that_a_module_cannot_load_is_refused_and_changes_nothing(state: dict[str, Any]) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(30), transform=Module())
    rb.extend(TensorDict(obs=torch.zeros(3), batch_size=[3]))
    whole = rb.state_dict()
    entry = {**whole["transform"]["transforms"][0], "state": state}
    with pytest.raises(CheckpointError, match="Module"):
        rb.load_state_dict({**whole, "transform": {"transforms": [entry]}})
    assert rb.transform[0].transform.mean.tolist() == [0, 0] and len(rb) == 3


@pytest.mark.filterwarnings("ignore:max_capacity=3")
def test_priorities_of_more_steps_than_the_sampler_takes_do_not_fit(tmp_path: Path) -> None:
    buffer("PrioritizedSampler").dumps(tmp_path)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=PrioritizedSampler(3, 0.7, 0.5))
    with pytest.raises(CheckpointMisfitError, match=r"takes 3 steps \(max_capacity\) here, .* priorities of 10 there"):
        rb.loads(tmp_path)
    assert len(rb) == 0


@pytest.mark.parametrize("kind", ["CompressedListStorage", "LazyStackStorage"])
def test_items_that_a_storage_does_not_take_do_not_fit(kind: str, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=ListStorage(9))
    rb.extend(["a", "b"])
    rb.dumps(tmp_path)
    other = ReplayBuffer(storage=STORAGES[kind]())
    with pytest.raises(CheckpointMisfitError, match="the saved items do not fit this storage"):
        other.loads(tmp_path)
    assert len(other) == 0


@pytest.mark.parametrize("kind", ["LazyTensorStorage", "ListStorage"])
def test_a_lane_with_more_rows_than_it_has_room_for_does_not_fit(kind: str, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=rebuild._STORAGES[kind](9))
    rb.extend(torch.arange(5) if kind == "LazyTensorStorage" else list("abcde"))
    rb.dumps(tmp_path)
    Forger(tmp_path).edit(lambda d: d["body"]["storage"]["state"]["counters"].update(lane_capacity=3))
    with pytest.raises(CheckpointError, match=r"5 .*3"):
        rb.loads(tmp_path)
    state = rb.storage.state_dict()
    state["counters"]["lane_capacity"] = 3
    with pytest.raises(CheckpointError, match=r"5 .*3"):
        rb.storage.load_state_dict(state)
    assert len(rb) == 5
