"""Where engram differs from TorchRL on purpose."""

import os
import tempfile
from typing import Any

import torch
from tensordict import TensorDict

from clients.packages import Package, sentence


def numbers(n: int, start: int = 0) -> TensorDict:
    number = torch.arange(start, start + n)
    return TensorDict({"a": number, "episode": number // 5}, [n])


def buffer(rl: Package, storage: Any, **more: Any) -> Any:
    return rl.data.TensorDictReplayBuffer(storage=storage, batch_size=6, **more)


@sentence(
    "A transform of a TensorDictReplayBuffer may change the batch's shape", not_in_torchrl="it fails to set the index"
)
def transforms_may_change_the_shape(rl: Package) -> None:
    rb = buffer(rl, rl.data.LazyTensorStorage(10), transform=lambda td: td.reshape(2, 3))
    rb.extend(numbers(8))
    batch = rb.sample()
    assert batch.shape == (2, 3) and torch.equal(batch["index"], batch["a"])
    cut = buffer(rl, rl.data.LazyTensorStorage(10), transform=lambda td: td[:2])
    cut.extend(numbers(8))
    assert torch.equal(cut.sample()["index"], cut.sample()["a"]) or cut.sample().shape == (2,)


@sentence("A storage that was not written yet loads, and the ring goes on", not_in_torchrl="list storages do not load")
def unwritten_storages_load(rl: Package) -> None:
    for storage in (rl.data.LazyTensorStorage, rl.data.LazyMemmapStorage, rl.data.ListStorage):
        rb, saved, stated = (rl.data.ReplayBuffer(storage=storage(10)) for _ in range(3))
        for start, n in ((0, 8), (8, 4)):
            rb.extend(numbers(n, start))
        rb.dumps(folder := tempfile.mkdtemp())
        saved.loads(folder)
        stated.load_state_dict(rb.state_dict())
        for other in (saved, stated):
            other.extend(numbers(1, 50))
            assert [int(other[slot]["a"]) for slot in range(10)] == [10, 11, 50, 3, 4, 5, 6, 7, 8, 9]


@sentence("The `state_dict` of a storage of pytrees loads", not_in_torchrl="pytrees have none")
def pytrees_have_a_state(rl: Package) -> None:
    for storage in (rl.data.LazyTensorStorage, rl.data.LazyMemmapStorage):
        rb, other = (rl.data.ReplayBuffer(storage=storage(10)) for _ in range(2))
        rb.extend({"a": torch.arange(4), "b": (torch.arange(4) * 2,)})
        other.load_state_dict(rb.state_dict())
        assert other[:]["a"].tolist() == [0, 1, 2, 3] and other[:]["b"][0].tolist() == [0, 2, 4, 6]


@sentence("Slices are drawn from a list storage of TensorDicts", not_in_torchrl="they need a tensor storage")
def slices_of_lists(rl: Package) -> None:
    rb = buffer(rl, rl.data.ListStorage(20), sampler=rl.data.SliceSampler(slice_len=2, traj_key="episode"))
    rb.extend(numbers(10))
    slices = [rb.sample()["a"].view(-1, 2) for _ in range(50)]
    pairs = torch.cat(slices)
    assert torch.equal(pairs[:, 1], pairs[:, 0] + 1) and set(pairs[:, 0].tolist()) == {0, 1, 2, 3, 5, 6, 7, 8}


@sentence("List storages hold copies", not_in_torchrl="they hold what they were given")
def lists_hold_copies(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.ListStorage(20))
    batch, item, tensor = numbers(3), numbers(1, 3)[0], torch.zeros(2)
    rb.extend(batch)
    rb.add(item)
    rb.extend([tensor])
    rb.add({"k": tensor})
    for data in (batch["a"], item["a"], tensor):
        data += 50
    assert [int(rb[slot]["a"]) for slot in range(4)] == [0, 1, 2, 3]
    assert not rb[4].any() and not rb[5]["k"].any()


@sentence("`ListStorage(copy=False)` keeps the objects themselves", not_in_torchrl="it has no such argument")
def lists_keep_references(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.ListStorage(20, copy=False))
    batch, item = numbers(3), numbers(1, 3)[0]
    rb.add(item)
    rb.extend(batch)
    batch["a"] += 50
    assert rb.storage[0] is item and [int(rb[slot]["a"]) for slot in range(4)] == [3, 50, 51, 52]


@sentence(
    "A batch that lacks a stored key is refused, and no row is merged with the old one", not_in_torchrl="it is merged"
)
def rows_are_never_merged(rl: Package) -> None:
    for storage in (rl.data.LazyTensorStorage, rl.data.LazyMemmapStorage):
        rb = rl.data.ReplayBuffer(storage=storage(4))
        rb.extend(numbers(4))
        lacking = numbers(2, 50).exclude("episode")
        for write in (
            lambda rb=rb, new=lacking: rb.extend(new),
            lambda rb=rb, new=lacking: rb.add(new[0]),
            lambda rb=rb, new=lacking: rb.storage.set(0, new[0]),
        ):
            try:
                write()
            except (ValueError, KeyError) as error:
                assert "episode" in str(error)
            else:
                raise AssertionError("it was stored")
        assert rb[:]["a"].tolist() == [0, 1, 2, 3]


@sentence("An epoch repeats no row where the storage grew meanwhile", not_in_torchrl="it begins a new one")
def epochs_never_repeat(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(
        storage=rl.data.LazyTensorStorage(20), sampler=rl.data.SamplerWithoutReplacement(), batch_size=3
    )
    rb.extend(torch.arange(10))
    drawn = [*rb.sample().tolist(), *rb.sample().tolist()]
    rb.extend(torch.arange(10, 13))
    drawn += [*rb.sample().tolist(), *rb.sample().tolist()]
    assert sorted(drawn) == list(range(10))


@sentence("No checkpoint has a pickle, of lists of objects neither", not_in_torchrl="lists of objects are not saved")
def checkpoints_have_no_pickle(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.ListStorage(10))
    rb.extend([torch.zeros(2), "x", 3, {"k": (1.5, None)}])
    rb.dumps(folder := tempfile.mkdtemp())
    for root, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(root, name), "rb") as file:
                content = file.read()
            assert not content.startswith((b"\x80", b"PK")) and not name.endswith((".pkl", ".pickle", ".pt"))
    other = rl.data.ReplayBuffer(storage=rl.data.ListStorage(10))
    other.loads(folder)
    assert other[1:] == ["x", 3, {"k": (1.5, None)}]

    class Own:
        pass

    rb.add(Own())
    try:
        rb.dumps(tempfile.mkdtemp())
    except TypeError as error:
        assert "Own" in str(error)
    else:
        raise AssertionError("an object of a class was saved")


@sentence("What was prefetched is not saved but drawn again")
def prefetched_batches_are_drawn_again(rl: Package) -> None:
    rb, other = (
        rl.data.ReplayBuffer(
            storage=rl.data.LazyTensorStorage(20), sampler=rl.data.SamplerWithoutReplacement(), batch_size=4, prefetch=3
        )
        for _ in range(2)
    )
    rb.extend(numbers(20))
    drawn = rb.sample()["a"].tolist()
    rb.dumps(folder := tempfile.mkdtemp())
    other.loads(folder)
    for _ in range(4):
        drawn += other.sample()["a"].tolist()
    assert sorted(drawn) == list(range(20))


@sentence("Maps of TensorDicts, search trees and hashing modules are not here", not_in_torchrl="it has them")
def other_things_are_not_here(rl: Package) -> None:
    for name in ("TensorDictMap", "TensorMap", "MCTSForest", "Tree", "QueryModule", "RandomProjectionHash", "SipHash"):
        try:
            exec(f"from {rl.data.__name__} import {name}", {})
        except ImportError as error:
            assert f"has no {name}: it stays TorchRL's" in str(error)
        else:
            raise AssertionError(name)
