"""Lists of Python objects on disk: JSON and raw arrays, in chunks that are keyed by write number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from engram.data.replay_buffers.checkpointers.base import ItemSink, ItemSource, StorageCheckpointerBase, apply_hooks
from engram.data.replay_buffers.checkpointers.commit import SnapshotWriter
from engram.data.replay_buffers.checkpointers.counters import Counters
from engram.data.replay_buffers.checkpointers.reading import SnapshotReader
from engram.data.replay_buffers.checkpointers.sealed import from_json, to_json
from engram.data.replay_buffers.checkpointers.state import Blobs, decode, encode
from engram.data.replay_buffers.checkpointers.tensordicts import CODECS

ITEMS_PER_CHUNK = 4096


class ListStorageCheckpointer(StorageCheckpointerBase[ItemSource, ItemSink]):
    """Saves items that are tensors, TensorDicts, numpy arrays, numbers, strings, bytes, None, and dicts, lists and
    tuples of these. Anything else is a TypeError that names the item and its type; nothing is saved then.
    """

    format = "items"

    def nbytes(self, source: ItemSource) -> int:
        # encoded twice, once here: the encoding only refers to arrays, and a full disk is better known before
        return sum(
            len(text) + blobs.nbytes for _, text, blobs in self._chunks(source.items(), Counters(source.counters()))
        )

    def dumps(self, source: ItemSource, writer: SnapshotWriter) -> dict[str, Any]:
        counters, numbers = source.counters(), []
        for number, text, blobs in self._chunks(source.items(), Counters(counters)):
            writer.write_file(_text_file(number), [text])
            writer.write_file(_blob_file(number), blobs.blocks())
            numbers.append(number)
        return {"counters": from_json(to_json(counters)), "chunks": numbers}

    def check(self, sink: ItemSink, reader: SnapshotReader, state: dict[str, Any]) -> None:
        counters, _ = _checked(reader, state)
        sink.check_restore(counters)

    def loads(self, sink: ItemSink, reader: SnapshotReader, state: dict[str, Any]) -> None:
        counters, numbers = _checked(reader, state)
        sink.check_restore(counters)
        items = [item for number in numbers for item in _read(reader, number)]
        if len(items) != Counters(counters).rows:
            raise reader.malformed(f"its files hold {len(items)} items, its counters say {Counters(counters).rows}")
        sink.restore_items([apply_hooks(self.load_hooks, item) for item in items], counters)

    def _chunks(self, items: list[Any], counters: Counters) -> Iterator[tuple[int, bytes, Blobs]]:
        """Number, JSON and arrays of each chunk; chunk c holds write numbers c * 4096 to (c + 1) * 4096."""
        if counters.lanes != 1 or counters.rows != len(items):
            raise ValueError(
                f"the storage gave {len(items)} items, its counters say {counters.rows} in {counters.lanes} lanes"
            )
        first, stop = counters.first(0), counters.stop(0)
        for number in range(first // ITEMS_PER_CHUNK, -(-stop // ITEMS_PER_CHUNK) if stop > first else 0):
            begin, end = max(first, number * ITEMS_PER_CHUNK), min(stop, (number + 1) * ITEMS_PER_CHUNK)
            blobs = Blobs()
            tree = [self._encode(items[w - first], w - first, blobs) for w in range(begin, end)]
            yield number, to_json(tree), blobs

    def _encode(self, item: Any, index: int, blobs: Blobs) -> Any:
        return encode(apply_hooks(self.save_hooks, item), blobs, CODECS, place=f"item {index}")


def _checked(reader: SnapshotReader, state: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    try:
        counters, numbers = state["counters"], state["chunks"]
        if Counters(counters).lanes != 1 or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("there is one lane, and chunks have numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise reader.malformed(f"its description of the items is malformed ({error!r})") from error
    return counters, numbers


def _read(reader: SnapshotReader, number: int) -> list[Any]:
    text = np.empty(reader.nbytes(_text_file(number)), np.uint8)
    reader.read_into(_text_file(number), text)
    try:
        tree = from_json(text.tobytes())
        with reader.open(_blob_file(number)) as file:
            items = decode(tree, file, CODECS)
            file.finish()
    except ValueError as error:
        raise reader.malformed(f"{_text_file(number)}: {error}") from error
    if not isinstance(items, list):
        raise reader.malformed(f"{_text_file(number)} is not a list")
    return items


def _text_file(number: int) -> str:
    return f"storage/items-{number:08d}.json"


def _blob_file(number: int) -> str:
    return f"storage/items-{number:08d}.bin"
