"""Small files that claim to hold more than there is memory for are refused before they are decoded."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.children import Child
from contracts.each import each
from data.datasets.support import assert_same_bits, steps
from engram import _system
from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer
from engram.data.datasets import (
    iter_hdf5,
    iter_minari,
    iter_parquet,
    parquet,
    read_parquet,
    write_minari,
    write_parquet,
)
from engram.datasets.parquet import _page_header
from engram.errors import DatasetError

pa = pytest.importorskip("pyarrow", reason='Parquet needs pyarrow: pip install "engram[parquet]"')
pq = pytest.importorskip("pyarrow.parquet")
h5py = pytest.importorskip("h5py", reason='HDF5 needs h5py: pip install "engram[h5]"')


@pytest.fixture
def little_memory(monkeypatch):
    """Makes the system say that so many bytes are free."""

    def say(nbytes):
        for module in (_system, parquet):
            monkeypatch.setattr(module, "free_memory", lambda: nbytes)
        monkeypatch.setattr(_system, "_SMALL", 1)

    return say


def lists(path, rows, values, fixed=False, name="a"):
    """A Parquet file of lists of equal values."""
    flat = pa.array(np.zeros(rows * values, np.int64))
    if fixed:
        column = pa.FixedSizeListArray.from_arrays(flat, values)
    else:
        column = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * values), flat)
    pq.write_table(pa.table({name: column}), path, compression="zstd")
    return path


@pytest.mark.parametrize("fixed", [False, True])
def test_lists_that_take_nothing_in_the_file_are_decoded_a_few_at_a_time(tmp_path, fixed):
    path = lists(tmp_path / "a.parquet", 400, 20_000, fixed)
    assert path.stat().st_size < 20_000
    batches = list(iter_parquet(path))
    assert max(batch["a"].nbytes for batch in batches) <= 16 << 20 and sum(map(len, batches)) == 400


def test_lists_of_nested_keys_are_checked_like_others(tmp_path):
    path = lists(tmp_path / "a.parquet", 4, 20_000, name="observation.state")
    with pytest.raises(DatasetError, match=r"has rows that need 240 KB to be decoded; max_row_bytes= allows 100 KB"):
        next(iter_parquet(path, max_row_bytes="100KB"))


@pytest.mark.parametrize("fixed", [False, True])
def test_lists_that_need_more_than_the_memory_are_refused_when_the_file_is_opened(tmp_path, little_memory, fixed):
    path = lists(tmp_path / "a.parquet", 4, 300_000, fixed)
    assert path.stat().st_size < 5_000
    little_memory(20_000_000)
    with pytest.raises(DatasetError, match=r"row group 0 needs 28\.8 MB of memory to be decoded; 20 MB are free"):
        next(iter_parquet(path))
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(DatasetError, match="of memory to be decoded"):
        read_parquet(path, rb)
    assert len(rb) == 0
    little_memory(40_000_000)
    assert read_parquet(path, rb) == 4


def test_a_batch_that_needs_more_than_the_memory_is_refused(tmp_path, little_memory):
    pq.write_table(pa.table({"a": pa.array(np.zeros(1_000_000, np.int64))}), tmp_path / "a.parquet")
    little_memory(10_000_000)
    with pytest.raises(DatasetError, match=r"a batch of 1000000 needs 24 MB of memory, .* use a smaller batch_size"):
        next(iter_parquet(tmp_path / "a.parquet", 1_000_000))
    assert len(next(iter_parquet(tmp_path / "a.parquet", 100_000))) == 100_000
    assert sum(map(len, iter_parquet(tmp_path / "a.parquet"))) == 1_000_000


def test_columns_that_are_not_read_may_be_as_large_as_they_are(tmp_path, little_memory):
    column = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(1_000_000, np.int64)), 250_000)
    pq.write_table(pa.table({"large": column, "small": pa.array(np.arange(4))}), tmp_path / "a.parquet")
    little_memory(10_000_000)
    (batch,) = iter_parquet(tmp_path / "a.parquet", columns=["small"])
    assert batch["small"].tolist() == [0, 1, 2, 3]


def footer(path):
    content = path.read_bytes()
    (size,) = struct.unpack("<I", content[-8:-4])
    return content[: -8 - size], content[-8 - size :]


@pytest.mark.parametrize("kind", ["lists", "values"])
def test_pages_that_hold_more_than_the_footer_says_are_refused(tmp_path, kind):
    """pyarrow believes the page: 4 values there were asked for, and 40 million could come."""
    if kind == "lists":
        much, little = lists(tmp_path / "much", 4, 100_000), lists(tmp_path / "little", 4, 1)
    else:
        much, little = tmp_path / "much", tmp_path / "little"
        pq.write_table(pa.table({"a": pa.array(np.zeros(400_000, np.int64))}), much)
        pq.write_table(pa.table({"a": pa.array(np.zeros(4, np.int64))}), little)
    forged = tmp_path / "forged.parquet"
    forged.write_bytes(footer(much)[0] + footer(little)[1])
    with pytest.raises(DatasetError, match=r"column '.*', has pages that hold more than its footer says"):
        list(iter_parquet(forged))


def test_a_page_that_says_it_is_larger_than_the_memory_is_refused(tmp_path, little_memory):
    rows = torch.zeros(3, 4_000_000, dtype=torch.uint8)
    write_parquet(TensorDict({"image": rows}, [3]), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    little_memory(2_000_000)
    with pytest.raises(DatasetError, match=r"'image', has a page of [\d.]+ MB; 2 MB of memory are free"):
        next(iter_parquet(tmp_path / "a.parquet"))


@pytest.mark.parametrize("compression", ["zstd", "snappy", "gzip", "lz4", "none"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_pages_of_honest_files_are_walked_over(tmp_path, compression, version):
    generator = np.random.default_rng(0)
    columns = {
        "f": generator.normal(size=30_000), "i": generator.integers(0, 9, 30_000), "b": np.arange(30_000) % 7 == 0,
        "v": pa.FixedSizeListArray.from_arrays(pa.array(generator.normal(size=90_000)), 3),
    }  # fmt: skip
    pq.write_table(
        pa.table(columns), tmp_path / "a.parquet", compression=compression, data_page_version=version,
        data_page_size=4096, row_group_size=9_000, write_page_index=True, write_page_checksum=True,
    )  # fmt: skip
    found = torch.cat(list(iter_parquet(tmp_path / "a.parquet")))
    assert np.array_equal(found["f"].numpy(), columns["f"]) and np.array_equal(found["b"].numpy(), columns["b"])
    assert found["v"].shape == (30_000, 3)


@pytest.mark.parametrize("rows", [0, 1, 5000])
def test_files_of_engram_are_walked_over(tmp_path, rows):
    batch = steps([rows or 1])
    write_parquet(batch, tmp_path / "a.parquet")
    assert_same_bits(torch.cat(list(iter_parquet(tmp_path / "a.parquet"))), batch)


def test_a_page_header_of_megabytes_is_refused():
    endless = b"\x18" + b"\x80\x80\x80\x02" + bytes(5 << 20)  # its first field is a text of 4 MB
    with pytest.raises(ValueError, match="has a page whose header is cut short"):
        _page_header(io.BytesIO(endless), 0, "a file")


def test_every_changed_byte_of_a_page_header_is_an_error_or_the_file(tmp_path):
    path = lists(tmp_path / "a.parquet", 4, 50)
    content = path.read_bytes()
    for at in range(4, 60):
        for bits in (1, 0x80, 0xFF):
            forged = bytearray(content)
            forged[at] ^= bits
            path.write_bytes(forged)
            try:
                list(iter_parquet(path))
            except DatasetError:
                pass


# ---- HDF5 ----
def test_a_row_of_hdf5_that_needs_more_than_the_memory_is_refused(tmp_path, little_memory):
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name in ("observations", "actions"):
            file.create_dataset(name, (2, 1_000_000), "f8", chunks=(1, 1_000_000), compression="gzip")[:] = 0
        for name in ("rewards", "terminals", "timeouts"):
            file[name] = np.zeros(2, np.float32 if name == "rewards" else bool)
    assert (tmp_path / "a.hdf5").stat().st_size < 100_000
    little_memory(6_000_000)
    with pytest.raises(DatasetError, match=r"needs [\d.]+ MB of memory, and 6 MB are free"):
        list(iter_hdf5(tmp_path / "a.hdf5"))


def test_an_episode_that_needs_more_than_the_memory_is_refused(tmp_path, little_memory):
    write_minari(steps([2000]), tmp_path / "set")
    little_memory(20_000)
    with pytest.raises(DatasetError, match="of memory, and 20 KB are free"):
        list(iter_minari(tmp_path / "set"))


# ---- checkpoints ----
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_state_that_needs_more_than_the_memory_is_refused_and_nothing_changes(storage, tmp_path, little_memory):
    def buffer(n):
        rb = ReplayBuffer(storage=storage(100), generator=torch.Generator().manual_seed(0))
        rb.extend(TensorDict({"n": torch.arange(n)}, [n]))
        return rb

    buffer(20).dumps(tmp_path / "a")
    rb = buffer(5)
    little_memory(2000)
    with pytest.raises(MemoryError, match=r"needs [\d.]+ KB of memory, and 2 KB are free"):
        rb.loads(tmp_path / "a")
    assert (
        [int(item["n"]) for item in rb[:]] == [0, 1, 2, 3, 4]
        if storage is ListStorage
        else rb[:]["n"].tolist() == [0, 1, 2, 3, 4]
    )


# ---- the limit of a row ----
def hdf5_rows(path, chunks):
    with h5py.File(path, "w") as file:
        options = {"chunks": chunks, "compression": "gzip"} if chunks else {}
        file.create_dataset("observations", (2, 1_000_000), "u1", **options)[:] = 0
        for name in ("actions", "rewards"):
            file[name] = np.zeros(2, np.float32)
        for name in ("terminals", "timeouts"):
            file[name] = np.ones(2, bool)
    return path


def minari_rows(path):
    batch = TensorDict({"observation": torch.zeros(2, 1_000_000, dtype=torch.uint8), "action": torch.zeros(2)}, [2])
    done = torch.tensor([[False], [True]])
    batch["next"] = {"observation": batch["observation"], "reward": torch.zeros(2, 1), "done": done, "terminated": done}
    write_minari(batch, path)
    return path


LARGE_ROWS = {  # a file, its reader, what its row needs
    "lists": (lambda path: lists(path, 3, 125_000), iter_parquet, 1_500_000),  # 8 bytes, and 4 of levels
    "fixed lists": (lambda path: lists(path, 3, 125_000, True), iter_parquet, 1_500_000),
    "bytes": (lambda path: engram_rows(path), iter_parquet, 1_000_000),
    "hdf5": (lambda path: hdf5_rows(path, None), iter_hdf5, 2_000_010),  # with the next observation
    "hdf5 in chunks": (lambda path: hdf5_rows(path, (1, 1_000_000)), iter_hdf5, 2_000_010),
    "minari": (minari_rows, iter_minari, 2_000_010),
}


def engram_rows(path):
    write_parquet(TensorDict({"x": torch.zeros(3, 1_000_000, dtype=torch.uint8)}, [3]), path, compression="none")
    return path


@pytest.mark.deep
@each("kind", LARGE_ROWS)
def test_a_row_that_is_larger_than_allowed_is_refused_by_an_error_that_names_the_limit(kind, tmp_path):
    make, read, needed = LARGE_ROWS[kind]
    path = make(tmp_path / "file")
    with pytest.raises(DatasetError, match=r"of 2 MB|need 1\.5 MB|a page of 3 MB") as error:
        next(read(path, max_row_bytes=needed // 2 if kind != "bytes" else 900_000))
    assert "max_row_bytes= allows" in str(error.value)
    assert len(next(read(path, max_row_bytes="4MB" if kind != "bytes" else "3.1 MB")))
    with pytest.raises(ValueError, match="max_row_bytes='much' is no size"):
        next(read(path, max_row_bytes="much"))


def test_a_chunk_that_is_larger_than_allowed_is_refused(tmp_path):
    path = hdf5_rows(tmp_path / "file", (2, 1_000_000))
    with pytest.raises(DatasetError, match=r"chunks .* of more than 1500000 bytes; max_row_bytes= allows more"):
        next(iter_hdf5(path, max_row_bytes=1_500_000))


def test_a_page_that_is_larger_than_allowed_is_refused(tmp_path):
    """It is decompressed whole, whatever its values need."""
    pq.write_table(pa.table({"a": pa.array(np.arange(100_000))}), tmp_path / "file", use_dictionary=False,
                   data_page_size=1 << 20)  # fmt: skip
    with pytest.raises(DatasetError, match=r"has a page of 160 KB; max_row_bytes= allows 100 KB"):
        next(iter_parquet(tmp_path / "file", max_row_bytes="100KB"))


@pytest.mark.deep
def test_by_default_no_small_file_gets_more_than_the_limit(tmp_path):
    path = lists(tmp_path / "a.parquet", 1, 25_000_000, True)
    assert path.stat().st_size < 1000
    rb = ReplayBuffer(storage=LazyTensorStorage(1))
    with pytest.raises(DatasetError, match=r"rows that need 300 MB to be decoded; max_row_bytes= allows 268 MB"):
        read_parquet(path, rb)
    assert len(rb) == 0


def peak_of(call):
    """How far the memory of a process that has read such a file before rises."""

    def measured():
        call(1000)
        Path("/proc/self/clear_refs").write_text("5")
        before = high_water()
        call(8_000_000)
        return high_water() - before

    return Child(measured).result()


def high_water():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["lists", "fixed lists", "hdf5", "hdf5 in chunks", "minari in chunks"])
def test_reading_takes_at_most_twice_what_the_limit_counts(kind, tmp_path):
    def file(n):
        path = tmp_path / f"{n}"
        if "lists" in kind:
            return lists(path, 1, n, kind == "fixed lists")
        with h5py.File(path, "w") as new:
            options = {"chunks": (1, 8 * n), "compression": "gzip"} if "chunks" in kind else {}
            if "hdf5" in kind:
                group, names, rows = new, ("rewards", "actions", "terminals", "timeouts"), 1
            else:
                group, names, rows = new.create_group("episode_0"), ("rewards", "actions"), 2
            group.create_dataset("observations", (rows, 8 * n), "u1", **options)[:] = 0
            for name in names[:2]:
                group[name] = np.zeros(1, np.float32)
            for name in names[2:] or ("terminations", "truncations"):
                group[name] = np.ones(1, bool)
        return path

    paths = {n: file(n) for n in (1000, 8_000_000)}  # in this process: what a child has freed, it has again

    def read(n):
        for batch in (iter_parquet if "lists" in kind else iter_hdf5 if "hdf5" in kind else iter_minari)(paths[n]):
            assert len(batch) == 1

    needed = 12 * 8_000_000 if "lists" in kind else 2 * 8 * 8_000_000
    assert peak_of(read) <= 2.1 * needed


@each("kind", ["f4", "i1", "u2", "i8", "f2"])
def test_decoded_values_are_handed_on_without_a_copy(kind):
    array = pa.array(np.arange(10, dtype=kind))
    assert parquet.values_of(array).data_ptr() == array.buffers()[1].address
    assert parquet.values_of(array[3:]).tolist() == [3, 4, 5, 6, 7, 8, 9]
