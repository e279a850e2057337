"""Directories that TorchRL's `dumps` wrote: rows, order and state are those that TorchRL reads from them itself."""

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, tensorclass

from contracts.programs import run_program
from engram.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.errors import CheckpointError

ARCHIVE = Path(__file__).parents[1] / "foreign" / "torchrl.zip"
STRANDS = {"three-dims": 3, "strands-partial": 2, "strands-wrapped": 2, "epoch-strands": 2}
TREES = ("one-tensor", "pytree", "tensorclass", "dataset")  # saved by a plain ReplayBuffer
TABLES = (
    "tensor-partial", "tensor-full", "tensor-wrapped", "memmap-wrapped", "strands-partial", "strands-wrapped",
    "dataset", "one-tensor", "pytree", "tensorclass", "three-dims", "emptied", "constant",
)  # fmt: skip
TRAJECTORIES = [
    f"{form}-{how}-{ndim}"
    for form in ("flat", "nested", "h5")
    for how in ("partial", "almost", "full", "wrapped")
    for ndim in (1, 2)
]


@pytest.fixture(scope="session")
def torchrl(tmp_path_factory):
    """Where the directories lie, as they were written."""
    path = tmp_path_factory.mktemp("torchrl")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(path)
    return path


@pytest.fixture(scope="session")
def facts(torchrl):
    return json.loads((torchrl / "facts.json").read_text())


@pytest.fixture(scope="session")
def rows(torchrl):
    with np.load(torchrl / "rows.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def ndim_of(name):
    return STRANDS.get(name, 2 if name.endswith("-2") else 1)


def buffer_for(name, size=None, storage=LazyTensorStorage, **parts):
    ndim = ndim_of(name)
    if name == "dataset":
        parts = {"writer": ImmutableDatasetWriter(), **parts}
    if name in ("three-dims",):
        parts = {"writer": RoundRobinWriter(), **parts}
    size = size or (7 if name == "constant" else {1: 10, 2: 20, 3: 24}[ndim])
    kind = ReplayBuffer if name in TREES else TensorDictReplayBuffer
    return kind(storage=storage(size, ndim=ndim), **{"batch_size": 3, **parts})


def leaves(data, path=()):
    if isinstance(data, torch.Tensor):
        yield path, data
    elif isinstance(data, list | tuple):
        for i, value in enumerate(data):
            yield from leaves(value, (*path, str(i)))
    else:
        for key in data.keys():
            value = data.get(key)
            if not isinstance(value, NonTensorData | str):
                yield from leaves(value, (*path, key))


def stored(buffer):
    """What lies in the slots, by key."""
    n = len(buffer) // int(np.prod(buffer.storage.env_shape, dtype=int))
    view = buffer.storage[0:n] if len(buffer) else buffer.storage._storage
    return {path: leaf[:n] for path, leaf in leaves(view)}


def same(buffer, rows, name, order=None):
    expected = {tuple(key.split("|")[1:]): value for key, value in rows.items() if key.split("|")[0] == name}
    found = stored(buffer)
    own_index = ("index",) if buffer.storage.ndim > 1 else None
    assert expected.keys() == found.keys()
    for path, value in expected.items():
        if path == own_index:
            continue  # here it has a number for each dimension
        leaf = found[path].view(torch.int16) if found[path].dtype is torch.bfloat16 else found[path]
        value = value if order is None else value[order]
        assert leaf.numpy().dtype == value.dtype, path
        assert leaf.numpy().tobytes() == value.tobytes(), (path, leaf, value)


@pytest.mark.parametrize("name", [*TABLES, *TRAJECTORIES])
def test_rows_cursor_and_write_count_come_over(torchrl, rows, facts, name):
    if name.startswith("h5"):
        pytest.importorskip("h5py")
    buffer = buffer_for(name, storage=LazyMemmapStorage if "wrapped" in name else LazyTensorStorage)
    buffer.loads(torchrl / name)
    same(buffer, rows, name)
    said = facts[name]
    assert len(buffer) == said["length"] * np.prod(buffer.storage.env_shape, dtype=int)
    if "cursor" in said:
        assert buffer.writer._cursor == said["cursor"]
        assert buffer.write_count == said["write_count"] * np.prod(buffer.storage.env_shape, dtype=int)


@pytest.mark.parametrize(
    "name", ["tensor-wrapped", "flat-wrapped-1", "nested-wrapped-1", "h5-wrapped-1", "strands-wrapped"]
)
def test_a_larger_buffer_holds_the_steps_in_the_order_of_time(torchrl, rows, name):
    if name.startswith("h5"):
        pytest.importorskip("h5py")
    buffer = buffer_for(name, 50)
    buffer.loads(torchrl / name)
    found = stored(buffer)
    del found["index",]
    for path, leaf in found.items():
        value = np.roll(rows["|".join((name, *path))], -3, 0)
        assert leaf.contiguous().view(torch.uint8).numpy().tobytes() == value.tobytes(), path


def test_writing_goes_on_over_the_oldest_step(torchrl):
    buffer = buffer_for("flat-wrapped-1")
    buffer.loads(torchrl / "flat-wrapped-1")
    batch = buffer[:].exclude("index")[:2]
    assert buffer.extend(batch).tolist() == [3, 4]
    assert (buffer[3:5]["obs"] == batch["obs"]).all() and buffer[5]["obs"][0] == 5


@pytest.mark.parametrize("name", ["tensor-wrapped", "strands-wrapped", "best"])
def test_a_tensordict_buffer_goes_on_after_its_own_index(torchrl, name):
    writer = {"writer": TensorDictMaxValueWriter(rank_key=("next", "reward"))} if name == "best" else {}
    buffer = buffer_for(name, **writer)
    buffer.loads(torchrl / name)
    batch = buffer[:].exclude("index").clone()
    buffer.extend(batch[:, :2] if buffer.storage.ndim == 2 else batch[:2])
    slots = buffer[:]["index"]
    if buffer.storage.ndim == 1:
        assert slots.tolist() == list(range(10))
    else:
        assert slots[1, :, 1].tolist() == [1] * 10 and slots[1, :, 0].tolist() == list(range(10))


@pytest.mark.parametrize("name", ["flat-wrapped-1", "h5-wrapped-2", "strands-wrapped"])
def test_slices_cross_neither_the_cursor_nor_the_end_of_a_trajectory(torchrl, name):
    if name.startswith("h5"):
        pytest.importorskip("h5py")
    sampler = SliceSampler(slice_len=2, strict_length=False, traj_key=("collector", "traj_ids"))
    buffer = buffer_for(name, sampler=sampler, batch_size=4)
    buffer.loads(torchrl / name, parts=("storage", "writer"))
    for _ in range(50):
        batch = buffer.sample()
        pairs, ids = batch["obs"][:, 0].reshape(-1, 2), batch["collector", "traj_ids"].reshape(-1, 2)
        assert (ids[:, 0] == ids[:, 1]).all() and (pairs[:, 1] - pairs[:, 0] == 1).all()


def test_a_storage_takes_over_a_storage_or_that_of_a_buffer(torchrl, rows):
    for path in (torchrl / "storage-alone", torchrl / "tensor-partial", torchrl / "ensemble" / "storage" / "1"):
        storage = LazyTensorStorage(10)
        storage.loads(path)
        assert len(storage) == (8 if "ensemble" in str(path) else 7)


# ---- the other parts ----
EPOCHS = [
    "epoch-begun",
    "epoch-over",
    "epoch-in-order",
    "epoch-drop-last",
    "epoch-partial",
    "epoch-wrapped",
    "epoch-strands",
]


@pytest.mark.parametrize("name", EPOCHS)
def test_an_epoch_goes_on_with_the_rows_that_were_left(torchrl, facts, name):
    sampler = SamplerWithoutReplacement(drop_last="drop" in name, shuffle="order" not in name)
    buffer = buffer_for(name, sampler=sampler)
    buffer.loads(torchrl / name)
    size = len(buffer)
    left = size - sum(map(len, facts[name]["drawn"])) % size if "drop" not in name else 4
    batches = left // 3 if "drop" in name else -(-left // 3)
    batches = min(batches, len(facts[name]["then"]))
    assert [buffer.sample()["index"].tolist() for _ in range(batches)] == facts[name]["then"][:batches]


@pytest.mark.parametrize("name", ["epoch-begun", "epoch-wrapped", "epoch-strands"])
@pytest.mark.parametrize("size", [None, 60])
def test_an_epoch_that_was_taken_over_is_saved_with_the_buffer_again(torchrl, tmp_path, name, size):
    buffer, twin = (buffer_for(name, s, sampler=SamplerWithoutReplacement()) for s in (size, 80))
    buffer.loads(torchrl / name)
    buffer.sample()
    buffer.dumps(tmp_path)
    twin.loads(tmp_path)
    assert twin.sample()["obs"].tolist() == buffer.sample()["obs"].tolist()


def test_rows_of_a_listed_epoch_that_are_overwritten_are_skipped(torchrl, facts):
    buffer = buffer_for("epoch-wrapped", sampler=SamplerWithoutReplacement())
    buffer.loads(torchrl / "epoch-wrapped")
    buffer.extend(buffer[:].exclude("index")[:6])  # over slots 3 to 8
    left = [i for batch in facts["epoch-wrapped"]["then"] for i in batch][:4]
    expected = [i for i in left if not 3 <= i < 9]
    drawn = buffer.sample()["index"].tolist() if expected else []
    assert drawn == expected and (not expected or buffer.sampler.ran_out)


@pytest.mark.parametrize("name", ["epoch-new", "epoch-extended"])
def test_an_epoch_that_has_not_begun_or_whose_rows_changed_begins_anew(torchrl, name):
    buffer = buffer_for(name, sampler=SamplerWithoutReplacement())
    buffer.loads(torchrl / name)
    drawn = [i for batch in buffer for i in batch["index"].tolist()]
    assert sorted(drawn) == list(range(len(buffer)))


def test_a_setting_of_the_sampler_that_differs_is_an_error(torchrl):
    buffer = buffer_for("epoch-begun", sampler=SamplerWithoutReplacement(drop_last=True))
    with pytest.raises(ValueError, match="drop_last=True here, False there"):
        buffer.loads(torchrl / "epoch-begun")


@pytest.mark.parametrize(
    ("name", "sampler", "said"),
    [
        ("epoch-begun", RandomSampler, "a RandomSampler here, one without replacement was saved"),
        ("tensor-partial", SamplerWithoutReplacement, "one without a state was saved"),
        ("tensor-partial", lambda: PrioritizedSampler(10, 1.0, 1.0), "one without a state was saved"),
        ("slices-begun", lambda: SliceSamplerWithoutReplacement(slice_len=1), "an epoch of slices had begun"),
    ],
)
def test_a_sampler_that_cannot_be_taken_over_says_which_parts_can(torchrl, rows, name, sampler, said):
    buffer = buffer_for(name, sampler=sampler())
    with pytest.raises(ValueError, match=said) as error:
        buffer.loads(torchrl / name)
    parts = ("storage", "writer", "generator")
    assert f"loads(path, parts={parts!r})" in str(error.value) and not len(buffer)
    buffer.loads(torchrl / name, parts=parts)
    same(buffer, rows, name)


def test_samplers_of_a_users_own_take_over_what_their_base_does_or_nothing(torchrl, rows, facts):
    class OwnEpochs(SamplerWithoutReplacement):
        pass

    class Own:
        def sample(self, storage, batch_size):
            return torch.zeros(batch_size, dtype=torch.int64), {}

    buffer = buffer_for("epoch-begun", sampler=OwnEpochs())
    buffer.loads(torchrl / "epoch-begun")
    assert buffer.sample()["index"].tolist() == facts["epoch-begun"]["then"][0]
    buffer = buffer_for("tensor-partial", sampler=Own())
    buffer.loads(torchrl / "tensor-partial")
    same(buffer, rows, "tensor-partial")
    with pytest.raises(ValueError, match="the sampler is a Own here, one without replacement was saved"):
        buffer.loads(torchrl / "epoch-begun")


def test_a_state_of_an_unknown_sampler_is_refused_and_the_rest_is_taken_over(torchrl, tmp_path, rows):
    saved = shutil.copytree(torchrl / "tensor-full", tmp_path / "saved")
    (saved / "sampler").mkdir()
    (saved / "sampler" / "sumtree.memmap").write_bytes(bytes(80))
    buffer = buffer_for("tensor-full")
    with pytest.raises(ValueError, match=r"does not take over; it holds sumtree\.memmap; loads\(path, parts="):
        buffer.loads(saved)
    buffer.loads(saved, parts=("storage", "writer", "generator"))
    same(buffer, rows, "tensor-full")


def test_epochs_of_slices_that_have_not_begun_are_taken_over(torchrl):
    sampler = SliceSamplerWithoutReplacement(slice_len=1, end_key=("next", "done"))
    buffer = buffer_for("slices-new", sampler=sampler)
    buffer.loads(torchrl / "slices-new")
    assert sum(len(batch) for batch in buffer) == 2  # two trajectories


@pytest.mark.parametrize("name", ["best", "best-partial"])
def test_a_writer_that_keeps_the_best_goes_on(torchrl, rows, facts, name):
    buffer = buffer_for(name, writer=TensorDictMaxValueWriter(rank_key=("next", "reward")))
    buffer.loads(torchrl / name)
    worst = buffer[:]["next", "reward"].argmin()
    batch = buffer[:].exclude("index")[:2].clone()
    batch["next", "reward"][:] = torch.tensor([[-1.0], [99.0]])
    full = len(buffer) == 10
    assert buffer.write_count == facts[name]["write_count"]
    assert buffer.extend(batch).tolist() == ([-1, int(worst)] if full else [7, 8])


def test_writers_of_other_kinds_or_keys_are_errors(torchrl):
    for writer, said in (
        (RoundRobinWriter(), "one that keeps the best was saved"),
        (TensorDictMaxValueWriter(rank_key="obs"), "rank_key"),
    ):
        with pytest.raises(ValueError, match=said):
            buffer_for("best", writer=writer).loads(torchrl / "best")
    with pytest.raises(ValueError, match="one that keeps the newest was saved"):
        buffer_for("x", writer=TensorDictMaxValueWriter()).loads(torchrl / "tensor-full")


def test_the_generator_comes_over(torchrl):
    buffer = buffer_for("generator", generator=torch.Generator().manual_seed(9))
    buffer.loads(torchrl / "generator")
    assert (buffer.generator.get_state() == torch.Generator().manual_seed(3).get_state()).all()


# ---- forms ----
def test_a_tensorclass_comes_over_into_a_buffer_that_knows_it(torchrl):
    @tensorclass
    class Known:
        b: torch.Tensor
        a: torch.Tensor

    buffer = buffer_for("tensorclass")
    buffer.extend(Known(a=torch.zeros(2).long(), b=torch.zeros(2, 2), batch_size=[2]))
    buffer.loads(torchrl / "tensorclass")
    assert type(buffer[:]) is Known and buffer[:].a.tolist() == list(range(7))


def test_a_pytree_gets_the_form_that_the_buffer_knows(torchrl):
    a = torch.arange(2)
    buffer = buffer_for("pytree")
    buffer.loads(torchrl / "pytree")
    assert isinstance(buffer[:]["b"], tuple) and buffer[:]["c.d"].tolist() == list(range(7))
    known = buffer_for("pytree")
    known.extend({"e": {"1": a}, "b": [a.float()[:, None], (a * 2,)], "a": a, "c.d": a})
    known.loads(torchrl / "pytree")
    assert isinstance(known[:]["b"], list) and known[:]["b"][1][0].tolist() == [2 * i for i in range(7)]


def test_a_constant_comes_over_and_values_that_change_are_refused(torchrl):
    buffer = buffer_for("constant")
    buffer.loads(torchrl / "constant")
    assert buffer[:].get("name").data == "cart"
    with pytest.raises(CheckpointError, match="'name' holds values that differ"):
        buffer_for("changing").loads(torchrl / "changing")


def test_a_buffer_that_knows_its_keys_says_which_flags_there_are(torchrl):
    twin = buffer_for("flat-wrapped-1")
    twin.loads(torchrl / "flat-wrapped-1")
    for drop in (("done",), ("done", "terminated", "truncated")):
        buffer = buffer_for("flat-wrapped-1")
        buffer.extend(twin[:2].exclude(*drop, "index"))
        buffer.loads(torchrl / "flat-wrapped-1")
        assert not set(drop) & set(buffer[:].keys()) and (buffer[:]["next"] == twin[:]["next"]).all()


def test_prepared_batches_are_drawn_anew_with_a_warning(torchrl, rows):
    buffer = buffer_for("prefetched")
    with pytest.warns(UserWarning, match=r"prefetch\.pkl holds batches .* never opens"):
        buffer.loads(torchrl / "prefetched")
    same(buffer, rows, "prefetched")


def test_what_is_not_read_says_what_to_do(torchrl):
    for name, said in (
        ("compressed", "compressed list, which engram does not read.* LazyTensorStorage"),
        ("ensemble", r"load its members one by one: rb\[0\]\.storage\.loads"),
        ("key-named-shape", r"shape\.memmap"),
    ):
        with pytest.raises(CheckpointError, match=said):
            buffer_for(name).loads(torchrl / name)
    with pytest.raises(ValueError, match="a ListStorage does not take them: use a LazyTensorStorage"):
        ReplayBuffer(storage=ListStorage(10)).loads(torchrl / "tensor-full")


def test_what_does_not_fit_is_listed_and_changes_nothing(torchrl):
    buffer = buffer_for("x", 5)
    buffer.extend(TensorDict({"mine": torch.arange(3)}, [3]))
    with pytest.raises(ValueError, match=r"'mine' is missing.*'obs' is new.*room for 5 steps here, 10"):
        buffer.loads(torchrl / "flat-wrapped-1", parts=("storage",))
    assert buffer[:]["mine"].tolist() == [0, 1, 2]
    for name in ("strands-wrapped", "strands-partial", "flat-wrapped-2", "h5-wrapped-2"):
        if name.startswith("h5"):
            pytest.importorskip("h5py")
        with pytest.raises(ValueError, match="ndim"):
            buffer.loads(torchrl / name)
    assert buffer[:]["mine"].tolist() == [0, 1, 2]


def test_a_snapshot_beside_it_comes_first(torchrl, tmp_path):
    buffer = buffer_for("tensor-full")
    buffer.extend(TensorDict({"own": torch.arange(4)}, [4]))
    (tmp_path / "buffer_metadata.json").write_text("{}")
    buffer.dumps(tmp_path)
    buffer.loads(tmp_path)
    assert buffer[:]["own"].tolist() == [0, 1, 2, 3]


@pytest.mark.deep
def test_torchrl_is_not_imported(torchrl):
    code = (
        "import sys; sys.modules['torchrl'] = None\n"
        "from engram.data import LazyTensorStorage, TensorDictReplayBuffer\n"
        "rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)\n"
        f"rb.loads({str(torchrl / 'flat-full-1')!r}); print(len(rb), 'torchrl.data' in sys.modules)"
    )
    done = run_program(code)
    assert done.stdout.split() == ["10", "False"]
