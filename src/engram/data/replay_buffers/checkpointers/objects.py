"""Lists of Python objects on disk: JSON and raw arrays, in chunks that are keyed by write number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from engram._system import check_memory
from engram.checkpoint.directory import from_json, to_json
from engram.checkpoint.encoding import CODECS, Blobs, decode, encode
from engram.checkpoint.protocols import ItemSink, ItemSource, StorageCheckpointerBase, apply_hooks
from engram.checkpoint.reader import JSON_AS_OBJECTS, SnapshotReader
from engram.checkpoint.writer import SnapshotWriter
from engram.data.replay_buffers.checkpointers.rows import Unchanged
from engram.store.counters import Counters, check_sequences

ITEMS_PER_CHUNK = 4096


class ListStorageCheckpointer(StorageCheckpointerBase[ItemSource, ItemSink]):
    """Saves items that are tensors, TensorDicts, numpy arrays, numbers, strings, bytes, None, and dicts, lists and
    tuples of these. Anything else is a TypeError that names the item and its type; nothing is saved then.
    """

    format = "items"
    needs = "items"

    def nbytes(self, source: ItemSource, previous: dict[str, Any] | None = None) -> int:
        # encoded twice, once here: the encoding only refers to arrays, and a full disk is better known before
        kept = self._kept(source, previous)
        return sum(len(text) + blobs.nbytes for _, text, blobs in self._chunks(source, kept) if blobs is not None)

    def dumps(
        self, source: ItemSource, writer: SnapshotWriter, previous: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        numbers = []
        for number, text, blobs in self._chunks(source, self._kept(source, previous), writer):
            if blobs is not None:
                writer.write_file(_text_file(number), [text])
                writer.write_file(_blob_file(number), blobs.blocks())
            numbers.append(number)
        counters = from_json(to_json(source.counters()))
        return {"counters": counters, "chunks": numbers, "identity": None if self.save_hooks else source.identity()}

    def _kept(self, source: ItemSource, previous: dict[str, Any] | None) -> set[int]:
        """Chunks of the snapshot in force that hold what they would hold now."""
        unchanged = Unchanged(source, previous, {})
        if previous is None or self.save_hooks or not unchanged.any:
            return set()
        before, now = _cuts(Counters(previous["counters"])), _cuts(Counters(source.counters()))
        return {c for c in now if before.get(c) == now[c] and unchanged.holds(0, *now[c])}

    def check(self, sink: ItemSink, reader: SnapshotReader, state: dict[str, Any]) -> None:
        counters, _ = _checked(reader, state)
        sink.check_restore(counters)

    def loads(self, sink: ItemSink, reader: SnapshotReader, state: dict[str, Any]) -> None:
        counters, numbers = _checked(reader, state)
        sink.check_restore(counters)
        items: list[Any] = []
        sequences: list[int] = []
        for number in numbers:
            some, own = _read(reader, number)
            items += some
            sequences += own
        if len(items) != Counters(counters).rows:
            raise reader.malformed(f"its files hold {len(items)} items, its counters say {Counters(counters).rows}")
        sink.restore_items([apply_hooks(self.load_hooks, item) for item in items], counters, sequences)

    def _chunks(
        self, source: ItemSource, kept: set[int], writer: SnapshotWriter | None = None
    ) -> Iterator[tuple[int, bytes, Blobs | None]]:
        """Number, JSON and arrays of each chunk; no arrays for a chunk that is taken over (by `writer`)."""
        items, sequences, counters = source.items(), source.sequences(), Counters(source.counters())
        if counters.lanes != 1 or counters.rows != len(items):
            raise ValueError(
                f"the storage gave {len(items)} items, its counters say {counters.rows} in {counters.lanes} lanes"
            )
        first = counters.first(0)
        for number, (begin, end) in _cuts(counters).items():
            if number in kept and (writer is None or _taken_over(writer, number)):
                yield number, b"", None
                continue
            blobs = Blobs()
            tree = [self._encode(items[w - first], w - first, blobs) for w in range(begin, end)]
            own = sequences[begin - first : end - first]
            yield number, to_json({"items": tree, "sequences": own if any(own) else None}), blobs

    def _encode(self, item: Any, index: int, blobs: Blobs) -> Any:
        return encode(apply_hooks(self.save_hooks, item), blobs, CODECS, place=f"item {index}")


def _cuts(counters: Counters) -> dict[int, tuple[int, int]]:
    """First write number and end of each chunk; chunk c holds write numbers c * 4096 to (c + 1) * 4096."""
    first, stop = counters.first(0), counters.stop(0)
    numbers = range(first // ITEMS_PER_CHUNK, -(-stop // ITEMS_PER_CHUNK) if stop > first else 0)
    return {c: (max(first, c * ITEMS_PER_CHUNK), min(stop, (c + 1) * ITEMS_PER_CHUNK)) for c in numbers}


def _taken_over(writer: SnapshotWriter, number: int) -> bool:
    return writer.reuse(_text_file(number), _blob_file(number))


def _checked(reader: SnapshotReader, state: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    try:
        counters, numbers = state["counters"], state["chunks"]
        if Counters(counters).lanes != 1 or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("there is one lane, and chunks have numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise reader.malformed(f"its description of the items is malformed ({error!r})") from error
    return counters, numbers


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
