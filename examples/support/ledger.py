"""What the writer says it wrote, on disk before and after each write, to hold against what is found after a crash.

The ledger knows nothing of the buffer: it is a text file of one JSON object a line, appended with `os.write`, so that
every line outlives `kill -9`. Two lines an `extend`:

    {"rows": ["4f0c...", ...]}   before: the checksum of each row that is going to be written
    {"returned": 6400}           after: `extend` has returned, and so many rows have been written since the start

and one, `{"found": 6450}`, whenever a process opens the buffer again: of the rows announced last, the rest is void.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from tensordict import TensorDictBase

from engram.data import ReplayBuffer


class Ledger:
    """Appends to a ledger."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def announce(self, batch: TensorDictBase) -> None:
        """Before `extend(batch)`."""
        self._append({"rows": checksums(batch)})

    def returned(self, write_count: int) -> None:
        """After it."""
        self._append({"returned": write_count})

    def found(self, write_count: int) -> None:
        """After the buffer was opened."""
        self._append({"found": write_count})

    def _append(self, line: dict[str, object]) -> None:
        os.write(self._fd, json.dumps(line).encode() + b"\n")


class Check(NamedTuple):
    """One thing that was logged and looked for."""

    what: str
    logged: str
    found: str
    holds: bool


def verify(ledger: Path, buffer: ReplayBuffer) -> list[Check]:
    """Holds a reopened buffer against the ledger.

    Every row of an `extend` that returned must be there. Of one that did not return there may be the first rows, and
    the rows that they replaced are gone.
    """
    begun, returned = _read(ledger)
    rows, count, cursor = _oldest_first(buffer), buffer.write_count, buffer.writer._cursor
    capacity = buffer.storage.max_size
    replaced = max(0, len(begun) - capacity)  # that many of the oldest rows had to make room, or were about to
    logged, found = begun[:count][-len(rows) :], checksums(rows)
    intact = sum(a == b for a, b in zip(logged, found, strict=False))
    checks = [
        ("write count", f"{returned:,} to {len(begun):,}", f"{count:,}", returned <= count <= len(begun)),
        ("rows", f"{returned - replaced:,} or more", f"{len(rows):,}", returned - replaced <= len(rows) <= capacity),
        ("cursor", f"{count % capacity:,}", f"{cursor:,}", cursor == count % capacity),
        ("rows intact", f"{len(logged):,}", f"{intact:,}", intact == len(rows)),
        ("checksum of all rows", _fingerprint(logged), _fingerprint(found), logged == found),
    ]
    return [Check(*check) for check in checks]


def checksums(batch: TensorDictBase) -> list[str]:
    """XXH3 of the bytes of each row, whatever the order of the keys; `index`, which the buffer adds, left out."""
    leaves = batch.exclude("index").items(include_nested=True, leaves_only=True)
    columns = [value.detach().numpy().reshape(len(batch), -1) for _, value in sorted(leaves, key=lambda kv: str(kv[0]))]
    rows = np.concatenate([np.ascontiguousarray(column).view(np.uint8) for column in columns], axis=1)
    return [xxhash.xxh3_64_hexdigest(row) for row in rows]


def _read(ledger: Path) -> tuple[list[str], int]:
    """The checksums of all rows that may be there, in the order of writing, and how many must have been written."""
    announced: list[str] = []
    returned = 0
    for text in ledger.read_bytes().split(b"\n")[:-1]:
        line = json.loads(text)
        announced += line.get("rows", [])
        if "found" in line:
            del announced[line["found"] :]
        returned = line.get("returned", line.get("found", returned))
    return announced, returned


def _oldest_first(buffer: ReplayBuffer) -> TensorDictBase:
    """All rows: the newest one is behind the cursor, and the others lie before it around the ring."""
    rows = len(buffer)
    return buffer[(buffer.writer._cursor - rows + torch.arange(rows)) % buffer.storage.max_size]


def _fingerprint(row_checksums: list[str]) -> str:
    return xxhash.xxh3_64_hexdigest("".join(row_checksums).encode())
