"""Parquet files in and out."""

import json
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from contracts.each import each
from data.datasets.support import assert_same_bits, steps, with_bits
from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.data.datasets import iter_parquet, read_parquet, write_parquet
from engram.errors import DatasetError

pa = pytest.importorskip("pyarrow", reason='Parquet needs pyarrow: pip install "engram[parquet]"')
pq = pytest.importorskip("pyarrow.parquet")

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def buffer(capacity=1000, **options):
    return ReplayBuffer(storage=LazyTensorStorage(capacity, **options))


def filled(batch, capacity=1000):
    rb = buffer(capacity)
    rb.extend(batch)
    return rb


def whole(path, n=None):
    return torch.cat(list(iter_parquet(path, n)))


def random_bits(dtype, shape, generator):
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.from_numpy(np.frombuffer(generator.randbytes(max(count, 1)), np.uint8).copy())[:count]
    return (raw > 127).reshape(shape) if dtype == torch.bool else raw.view(dtype).reshape(shape)


@settings(max_examples=12)
@given(
    leaves=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=4
    ),
    n=st.integers(1, 40),
    random=st.randoms(use_true_random=False),
)
def test_any_bits_of_any_dtype_and_shape_come_back(tmp_path_factory, leaves, n, random):
    path = tmp_path_factory.mktemp("p") / "steps.parquet"
    made = {f"k{i}": random_bits(dtype, (n, *shape), random) for i, (dtype, shape) in enumerate(leaves)}
    batch = TensorDict({**made, "next": {"reward": torch.randn(n, 1), "a.b": torch.arange(n)}}, [n])
    assert write_parquet(filled(batch), path) == n
    rb = buffer()
    assert read_parquet(path, rb) == n
    assert_same_bits(rb[:], batch)
    assert_same_bits(whole(path, 7), batch)


@each("compression", ["zstd", "snappy", "lz4", "gzip", "none"])
def test_images_and_odd_floats_come_back_with_every_compression(tmp_path, compression):
    batch = with_bits(steps([40, 60]))
    batch["pixels"] = torch.randint(0, 255, (100, 3, 9, 9), dtype=torch.uint8)
    write_parquet(filled(batch), tmp_path / "s.parquet", compression=compression)
    assert_same_bits(whole(tmp_path / "s.parquet"), batch)


@settings(max_examples=20)
@given(n=st.integers(1, 60), capacity=st.integers(1, 30), block=st.sampled_from([1, 300, 1 << 20]))
def test_a_ring_is_written_oldest_first_in_blocks_of_any_size(tmp_path_factory, n, capacity, block):
    path = tmp_path_factory.mktemp("p") / "steps.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engram.datasets.episodes.BLOCK_BYTES", block)
        patch.setattr("engram.datasets.parquet.BLOCK_BYTES", block)
        batch = steps([n])
        write_parquet(filled(batch, capacity), path)
        assert_same_bits(whole(path), batch[-capacity:])


def test_data_come_back_in_the_form_they_had(tmp_path):
    for name, data in {
        "tensor": torch.arange(6).reshape(3, 2),
        "dict": {"a": torch.arange(3), "b": {"c": torch.zeros(3, 2)}},
        "tuple": (torch.arange(3), [torch.ones(3)]),
    }.items():
        rb, back = filled(data), buffer()
        assert write_parquet(rb, tmp_path / name) == len(rb)
        assert read_parquet(tmp_path / name, back) == len(rb)
        assert str(back[:]) == str(rb[:]) and type(back[:]) is type(data)


def test_constants_and_nested_batch_dimensions_come_back(tmp_path):
    batch = TensorDict(
        {"agents": TensorDict({"x": torch.zeros(4, 3, 2)}, [4, 3]), "env": NonTensorData("pole", batch_size=[4])}, [4]
    )
    write_parquet(filled(batch), tmp_path / "s")
    found = whole(tmp_path / "s")
    assert found["env"] == "pole" and found["agents"].batch_size == (4, 3)


def test_list_storages_indices_and_batches_are_written(tmp_path):
    batch = steps([3, 4])
    listed, keyed = ReplayBuffer(storage=ListStorage(10)), TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    listed.extend(batch)
    keyed.extend(batch)
    write_parquet(listed, tmp_path / "listed")
    write_parquet(keyed, tmp_path / "keyed")
    write_parquet((batch[:2], batch[2:]), tmp_path / "batches")
    write_parquet(batch, tmp_path / "batch", exclude=["action"])
    assert_same_bits(whole(tmp_path / "listed"), batch)
    assert_same_bits(whole(tmp_path / "batches"), batch)
    assert_same_bits(whole(tmp_path / "batch"), batch.exclude("action"))
    assert whole(tmp_path / "keyed")["index"].tolist() == list(range(7))


def test_trajectories_that_only_the_buffer_knows_are_numbered(tmp_path):
    """Two environments without ids: where one's rows end, no flag says so."""
    one, two = steps([4, 6], seed=1, ids=False), steps([10], seed=2, ids=False)
    one["next", "done"][-1] = False
    rb = buffer(100, ndim=2)
    rb.extend(torch.stack([one, two]))
    write_parquet(rb, tmp_path / "s")
    found = whole(tmp_path / "s")
    assert found["collector", "traj_ids"].tolist() == [0] * 4 + [1] * 6 + [2] * 10
    assert_same_bits(found.exclude("collector"), torch.cat([one, two]))


def test_trajectories_on_both_sides_of_a_seam_are_numbered(tmp_path):
    rb = buffer()
    rb.extend(steps([5], ids=False, flagged=False))
    rb.storage.release()  # whoever writes next may be another, in the middle of something
    rb.extend(steps([3], ids=False, flagged=False))
    write_parquet(rb, tmp_path / "s")
    assert whole(tmp_path / "s")["collector", "traj_ids"].tolist() == [0] * 5 + [1] * 3


def test_trajectories_that_show_are_not_numbered(tmp_path):
    batch = steps([4, 6], ids=False)
    write_parquet(filled(batch), tmp_path / "s")
    assert_same_bits(whole(tmp_path / "s"), batch)
    assert pq.read_table(tmp_path / "s")["engram.trajectory"].to_pylist() == [0] * 4 + [1] * 6


def test_two_files_are_never_joined_to_one_trajectory(tmp_path):
    write_parquet(steps([3], flagged=False), tmp_path / "s")
    rb = buffer()
    read_parquet(tmp_path / "s", rb)
    with pytest.raises(ValueError, match="new_ids=True"):
        read_parquet(tmp_path / "s", rb)
    assert len(rb) == 3
    read_parquet(tmp_path / "s", rb, new_ids=True)
    assert rb[:]["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1]


def test_other_tools_read_the_columns(tmp_path):
    batch = steps([3])
    write_parquet(filled(batch), tmp_path / "s")
    table = pq.read_table(tmp_path / "s")
    assert np.allclose(np.stack(table["next.observation"].to_pylist()), batch["next", "observation"].numpy())
    assert {"observation", "action", "next.reward", "next.done", "collector.traj_ids"} <= set(table.column_names)


# ---- files by others ----
def test_a_file_by_others_is_read_by_its_columns(tmp_path):
    table = pa.table(
        {
            "obs": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
            "grid": pa.array([[[1], [2]]] * 3, pa.list_(pa.list_(pa.int8()))),
            "next.reward": pa.array([1.0, 2.0, 3.0], pa.float32()),
            "next.done": [False, False, True],
            "who": ["a", "b", "c"],
        }
    )
    pq.write_table(table, tmp_path / "other", row_group_size=2)
    with pytest.raises(DatasetError, match=r"has 'who' as string.*choose columns="):
        read_parquet(tmp_path / "other", buffer())
    rb = buffer()
    names = ["obs", "grid", "next.reward", "next.done"]
    assert read_parquet(tmp_path / "other", rb, columns=names) == 3
    found = rb[:]
    assert found["obs"].dtype == torch.float64 and found["obs"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert found["grid"].shape == (3, 2, 1) and found["grid"].dtype == torch.int8
    assert found["next", "reward"].tolist() == [1, 2, 3] and found["next", "done"].tolist() == [False, False, True]


@each(
    ("columns", "said"),
    [
        ({"a": [1, None]}, "no value in 1 places of 'a'"),
        ({"a": [[1], [1, 2]]}, "lists of 1 to 2 values in 'a'"),
        ({"a": [[1, None], [1, 2]]}, "no value in 1 places of 'a'"),
        ({"a.b": [1], "a": [2]}, "would be one key"),
        ({"a": [b"x"]}, "has 'a' as binary"),
    ],
)
def test_columns_that_are_no_tensors_are_named(tmp_path, columns, said):
    pq.write_table(pa.table(columns), tmp_path / "other")
    rb = buffer()
    with pytest.raises(DatasetError, match=said):
        read_parquet(tmp_path / "other", rb)
    assert len(rb) == 0


class MatrixType(pa.ExtensionType):
    """An extension type over nested lists, as Hugging Face's Array2D is one."""

    def __init__(self):
        super().__init__(pa.list_(pa.list_(pa.float32())), "engram.tests.matrix")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type, serialized):
        return cls()


@pytest.mark.parametrize("registered", [True, False])
def test_column_of_an_extension_type_is_read_as_what_it_stores(tmp_path, registered):
    values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    column = pa.ExtensionArray.from_storage(MatrixType(), pa.array(values.tolist(), MatrixType().storage_type))
    pq.write_table(pa.table({"grid": column}), tmp_path / "grids.parquet")
    if registered:
        pa.register_extension_type(MatrixType())
    try:
        np.testing.assert_array_equal(whole(tmp_path / "grids.parquet", 3)["grid"].numpy(), values)
    finally:
        if registered:
            pa.unregister_extension_type("engram.tests.matrix")


def test_column_of_tensors_of_fixed_shape_keeps_their_shape(tmp_path):
    values = np.arange(24, dtype=np.int64).reshape(4, 2, 3)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    pq.write_table(pa.table({"grid": column}), tmp_path / "grids.parquet")
    np.testing.assert_array_equal(whole(tmp_path / "grids.parquet", 3)["grid"].numpy(), values)


def test_a_column_that_is_not_there_is_named(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other")
    with pytest.raises(DatasetError, match="has no column 'b'"):
        read_parquet(tmp_path / "other", buffer(), columns=["b"])


def test_a_later_row_group_that_is_wrong_leaves_the_earlier_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("engram.datasets.episodes.BLOCK_BYTES", 8)
    pq.write_table(pa.table({"a": [1, 2, 3, None]}), tmp_path / "other", row_group_size=1)
    rb = buffer()
    with pytest.raises(DatasetError, match="no value") as caught:
        read_parquet(tmp_path / "other", rb)
    assert caught.value.rows_read == len(rb) > 0


# ---- damage ----
def forged(path, change):
    table = pq.read_table(path)
    made = json.loads(table.schema.metadata[b"engram"])
    change(made)
    pq.write_table(table.replace_schema_metadata({b"engram": json.dumps(made).encode()}), path)  # a footer of its own


FORGERIES = {
    "version": lambda m: m.update(version=2),
    "shape": lambda m: m["layout"]["leaves"][0].update(shape=[1 << 62]),
    "negative": lambda m: m["layout"]["leaves"][0].update(shape=[-1]),
    "text": lambda m: m["layout"]["leaves"][0].update(shape="x"),
    "dtype": lambda m: m["layout"]["leaves"][0].update(dtype="object"),
    "other dtype": lambda m: m["layout"]["leaves"][0].update(dtype="int32"),
    "leaf": lambda m: m["layout"]["root"]["children"][0].update(leaf=7),
    "kind": lambda m: m["layout"]["root"].update(kind="class"),
    "keys": lambda m: m["layout"]["root"].update(keys=["a"]),
    "name": lambda m: m["columns"][0].update(name="next.reward"),
    "columns": lambda m: m.pop("columns"),
    "layout": lambda m: m.update(layout=[]),
    "deep": lambda m: m.update(layout=json.loads("[" * 900 + "]" * 900)),
}


@each("name", FORGERIES)
def test_metadata_that_are_not_true_are_refused(tmp_path, name):
    write_parquet(filled(steps([3])), tmp_path / "s")
    forged(tmp_path / "s", FORGERIES[name])
    rb = buffer()
    with pytest.raises(DatasetError):
        read_parquet(tmp_path / "s", rb)
    assert len(rb) == 0


def test_a_form_that_leaves_a_column_out_is_refused(tmp_path):
    write_parquet(filled((torch.zeros(3), torch.ones(3))), tmp_path / "s")
    forged(tmp_path / "s", lambda m: m["layout"]["root"]["children"][1].update(leaf=0))
    with pytest.raises(DatasetError, match="form are not numbered from 0 on"):
        read_parquet(tmp_path / "s", buffer())


def test_wrong_arguments_are_errors(tmp_path):
    with pytest.raises(ValueError, match="compression is"):
        write_parquet(steps([3]), tmp_path / "s", compression="best")
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        next(iter_parquet(tmp_path / "s", 0))
    with pytest.raises(FileNotFoundError):
        read_parquet(tmp_path / "s", buffer())
    with pytest.raises(ValueError, match="the buffer is empty"):
        write_parquet(buffer(), tmp_path / "s")
    with pytest.raises(ValueError, match=r"exclude names 'x'"):
        write_parquet(steps([3]), tmp_path / "s", exclude=["x"])
    assert os.listdir(tmp_path) == []
