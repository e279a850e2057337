"""Flat and nested: episode data without the second copy of the observations, byte for byte what was saved."""

import pytest

from contracts.checkpointer import CheckpointerContract, RowRings
from contracts.ted_rings import TedRings
from engram.data.replay_buffers.checkpointers import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
    tensor,
)


class TedContract(CheckpointerContract):
    def make_filled(self, salt=0):
        rings = TedRings(lanes=2, strands=3, exceptions=0.1)
        rings.append(0, 130, salt)
        rings.append(1, 7, salt)
        return rings

    def make_empty(self):
        return TedRings(lanes=2, strands=3)

    def make_misfit(self):
        rings = RowRings(lanes=2, strands=3, row_bytes=8)
        rings.append(0, 5)
        return rings


@pytest.mark.parametrize("chunk_bytes", [None, 3000], ids=["one chunk", "several chunks"])
class ChunkedTedContract(TedContract):
    @pytest.fixture(autouse=True)
    def chunks(self, chunk_bytes, monkeypatch):
        if chunk_bytes:
            monkeypatch.setattr(tensor, "CHUNK_BYTES", chunk_bytes)


class TestFlat(ChunkedTedContract):
    def make(self):
        return FlatStorageCheckpointer()


class TestNested(ChunkedTedContract):
    def make(self):
        return NestedStorageCheckpointer()


class TestH5(ChunkedTedContract):
    def make(self):
        return H5StorageCheckpointer()


class TestH5Compressed(TedContract):
    def make(self):
        return H5StorageCheckpointer(h5_kwargs={"compression": "gzip", "shuffle": True, "fletcher32": True})


class TestH5GroupPerTrajectory(ChunkedTedContract):
    def make(self):
        return H5StorageCheckpointer(group_per_trajectory=True)
