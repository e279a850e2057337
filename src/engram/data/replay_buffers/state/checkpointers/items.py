"""The checkpointer of a ListStorage: items as JSON and raw arrays, in chunks by sequence."""

from __future__ import annotations

from typing import Any

import numpy as np

from engram._system import check_memory
from engram.checkpoint.directory import from_json, to_json
from engram.checkpoint.encoding import CODECS, EncodedArrays, decode, encode
from engram.checkpoint.protocols import (
    ItemSink,
    ItemSource,
    RestorePlan,
    SavePlan,
    StorageCheckpointerBase,
)
from engram.checkpoint.reader import JSON_AS_OBJECTS, SnapshotReader
from engram.checkpoint.writer import SnapshotWriter
from engram.data.replay_buffers.state.checkpointers.rows import ReusableChunks
from engram.store.counters import Counters, check_sequences

ITEMS_PER_CHUNK = 4096


class ListStorageCheckpointer(StorageCheckpointerBase[ItemSource, ItemSink]):
    """Saves items that are tensors, TensorDicts, numpy arrays, numbers, strings, bytes, None, and dicts, lists and
    tuples of these. Anything else is a TypeError that names the item and its type; nothing is saved then.
    """

    format = "items"
    needs = "items"

    def plan_save(self, source: ItemSource, previous: dict[str, Any] | None = None) -> SavePlan:
        return _ItemSavePlan(source, previous)

    def plan_restore(self, reader: SnapshotReader, state: dict[str, Any]) -> RestorePlan[ItemSink]:
        return _ItemRestorePlan(reader, state)


class _ItemSavePlan:
    """One save of items: the chunks that hold them, and which of these the current snapshot has already."""

    def __init__(self, source: ItemSource, previous: dict[str, Any] | None) -> None:
        self._items, self._sequences = source.items(), source.sequences()
        self._counters, self._identity = from_json(to_json([source.counters(), source.identity()]))
        counters = Counters(self._counters)
        if counters.lanes != 1 or counters.rows != len(self._items):
            raise ValueError(
                f"the storage gave {len(self._items)} items, its counters say {counters.rows} in {counters.lanes} lanes"
            )
        self._first, self._cuts = counters.first(0), _cuts(counters)
        self._reusable = set() if previous is None else self._find_reusable(source, previous)
        # Encoded here for its size and again to be written: an encoding only refers to arrays, but its text would
        # need memory until then, and a full disk is better noticed before.
        encoded = [self._encode(number) for number in self._cuts if number not in self._reusable]
        self.nbytes = sum(len(text) + arrays.nbytes for text, arrays in encoded)

    def _find_reusable(self, source: ItemSource, previous: dict[str, Any]) -> set[int]:
        """Chunks of the current snapshot that hold what they would hold now."""
        reusable = ReusableChunks(source, previous, {})
        if not reusable.any:
            return set()
        before = _cuts(Counters(previous["counters"]))
        return {c for c, cut in self._cuts.items() if before.get(c) == cut and reusable.unchanged(0, *cut)}

    def write(self, writer: SnapshotWriter) -> dict[str, Any]:
        for number in self._cuts:
            if number in self._reusable and writer.reuse(_text_file(number), _blob_file(number)):
                continue
            text, arrays = self._encode(number)
            writer.write_file(_text_file(number), [text])
            writer.write_file(_blob_file(number), arrays.blocks())
        return {"counters": self._counters, "chunks": list(self._cuts), "identity": self._identity}

    def _encode(self, number: int) -> tuple[bytes, EncodedArrays]:
        """JSON and arrays of a chunk."""
        arrays, (begin, end) = EncodedArrays(), self._cuts[number]
        tree = [self._encode_item(sequence - self._first, arrays) for sequence in range(begin, end)]
        own = self._sequences[begin - self._first : end - self._first]
        return to_json({"items": tree, "sequences": own if any(own) else None}), arrays

    def _encode_item(self, index: int, arrays: EncodedArrays) -> Any:
        return encode(self._items[index], arrays, CODECS, place=f"item {index}")


class _ItemRestorePlan:
    """One load of items: the snapshot's description of them, checked, and their chunks."""

    def __init__(self, reader: SnapshotReader, state: dict[str, Any]) -> None:
        self._reader = reader
        try:
            self._counters, self._numbers = state["counters"], state["chunks"]
            counters = Counters(self._counters)
            if counters.lanes != 1 or not all(type(number) is int and number >= 0 for number in self._numbers):
                raise ValueError("a list has one lane, and its chunks have numbers")
        except (KeyError, TypeError, ValueError) as error:
            raise reader.malformed(f"its description of the items is malformed ({error!r})") from error
        self._count = counters.rows

    def check(self, sink: ItemSink) -> None:
        sink.check_restore(self._counters)

    def load(self, sink: ItemSink) -> None:
        self.check(sink)
        items: list[Any] = []
        sequences: list[int] = []
        for number in self._numbers:
            of_chunk, own = _read(self._reader, number)
            items += of_chunk
            sequences += own
        if len(items) != self._count:
            raise self._reader.malformed(f"its files hold {len(items)} items, its counters say {self._count}")
        sink.restore_items(items, self._counters, sequences)


def _cuts(counters: Counters) -> dict[int, tuple[int, int]]:
    """First sequence and end of each chunk; chunk c holds the sequences c * 4096 to (c + 1) * 4096."""
    first, stop = counters.first(0), counters.stop(0)
    numbers = range(first // ITEMS_PER_CHUNK, -(-stop // ITEMS_PER_CHUNK) if stop > first else 0)
    return {c: (max(first, c * ITEMS_PER_CHUNK), min(stop, (c + 1) * ITEMS_PER_CHUNK)) for c in numbers}


def _read(reader: SnapshotReader, number: int) -> tuple[list[Any], list[int]]:
    """The items of a chunk, and the sequences that they carry."""
    check_memory(JSON_AS_OBJECTS * reader.nbytes(_text_file(number)), _text_file(number))
    text = np.empty(reader.nbytes(_text_file(number)), np.uint8)
    reader.read_into(_text_file(number), text)
    try:
        tree = from_json(text.tobytes())
        with reader.open(_blob_file(number)) as file:
            items = decode(tree["items"], file, CODECS)
            file.finish()
        if not isinstance(items, list):
            raise ValueError("its items are not a list")
        own = [0] * len(items) if tree["sequences"] is None else tree["sequences"]
        check_sequences(own, len(items))
    except (KeyError, TypeError, ValueError) as error:
        raise reader.malformed(f"{_text_file(number)}: {error}") from error
    return items, own


def _text_file(number: int) -> str:
    return f"storage/items-{number:08d}.json"


def _blob_file(number: int) -> str:
    return f"storage/items-{number:08d}.bin"
