"""A second reader of checkpoints, written from docs/format.md alone: nothing of engram is imported here.

It decodes rows, flat, nested, lists and the states of components into numpy arrays and plain Python values.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

MARKER = b"engram snapshot: this directory belongs to engram, which removes it when it is no longer needed\n"
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4,
    "float32": 4, "uint64": 8, "int64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip

Bytes = np.ndarray  # of uint8


# ---- files ----
def unsealed(data: bytes) -> dict[str, Any]:
    head, tail = data[:-48], data[-48:]
    assert tail == b',"xxh3_128":"' + xxhash.xxh3_128_hexdigest(head).encode() + b'"}\n'
    document = json.loads(data)
    document.pop("xxh3_128")
    return document


class Snapshot:
    """A snapshot whose every file has the size and the hash that its manifest says."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        current = unsealed((path / "CURRENT").read_bytes())
        assert (current["format"], current["version"]) == ("engram checkpoint", 1)
        self.folder = path / (name or current["snapshot"])
        assert (self.folder / "ENGRAM-SNAPSHOT").read_bytes() == MARKER
        manifest = (self.folder / "manifest.json").read_bytes()
        if name is None:
            assert xxhash.xxh3_128_hexdigest(manifest) == current["manifest"]
        document = unsealed(manifest)
        assert (document["format"], document["version"]) == ("engram snapshot", 1)
        assert document["features"] in ([], ["observations"])
        assert document["snapshot"] == self.folder.name
        self.body = document["body"]
        self.files = {name: self._checked(name, said) for name, said in document["files"].items()}

    def _checked(self, name: str, said: dict[str, Any]) -> bytes:
        content = (self.folder / name).read_bytes()
        assert (len(content), xxhash.xxh3_128_hexdigest(content)) == (said["nbytes"], said["xxh3_128"])
        return content

    def component(self, name: str) -> Any:
        return State(self.files.get(f"components/{name}.bin", b"")).decode(self.body["components"][name])

    def storage(self) -> Any:
        return storage_of(self.body["storage"], self.files)


def storage_of(saved: dict[str, Any], files: dict[str, bytes]) -> Any:
    """Lanes of rows, items and their sequences, or a list of such of an ensemble's members."""
    state = saved["state"]
    if saved["format"] == "ensemble":
        members = []
        for i, member in enumerate(state["members"]):
            below = f"member-{i:05d}/"
            members.append(storage_of(member, {n[len(below) :]: c for n, c in files.items() if n.startswith(below)}))
        return members
    if saved["format"] == "items":
        chunks = list(items_of(state, files))
        return [item for items, _ in chunks for item in items], [own for _, some in chunks for own in some]
    rows = unpack_observations if "observations" in state else unpack_rows
    unpack = {"rows": rows, "flat": unpack_flat, "nested": unpack_nested}[saved["format"]]
    return lanes_of(state, files, unpack)


# ---- states ----
@dataclass
class Tagged:
    """What has no counterpart in plain Python: its tag, and its content."""

    tag: str
    value: Any


class State:
    """Decodes a tree; its arrays are the next ones of a binary file."""

    def __init__(self, blob: bytes) -> None:
        self._blob, self._at = blob, 0

    def decode(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.decode(one) for one in tree]
        if not isinstance(tree, dict):
            return tree
        if len(tree) == 1 and next(iter(tree)).startswith("$"):
            ((tag, body),) = tree.items()
            return getattr(self, "_" + tag[1:])(body)
        return {key: self.decode(value) for key, value in tree.items()}

    def _take(self, body: dict[str, Any]) -> bytes:
        start = -(-self._at // 64) * 64
        assert body["at"] == start and not any(self._blob[self._at : start])
        self._at = start + body["nbytes"]
        assert self._at <= len(self._blob)
        return self._blob[start : self._at]

    def _int(self, body: str) -> int:
        return int(body, 16)

    def _float(self, body: str) -> float:
        return struct.unpack(">d", bytes.fromhex(body))[0]

    def _str(self, body: str) -> str:
        return bytes.fromhex(body).decode("utf-8", "surrogatepass")

    def _bytes(self, body: dict[str, Any]) -> bytes:
        return self._take(body)

    def _tuple(self, body: list[Any]) -> tuple[Any, ...]:
        return tuple(self.decode(one) for one in body)

    def _size(self, body: list[int]) -> Tagged:
        return Tagged("size", body)

    def _dict(self, body: list[Any]) -> dict[Any, Any]:
        return {self.decode(key): self.decode(value) for key, value in body}

    def _tensor(self, body: dict[str, Any]) -> Tagged:
        raw = self._take(body)
        return Tagged(body["dtype"], values(np.frombuffer(raw, np.uint8), body["dtype"], body["shape"]))

    def _array(self, body: dict[str, Any]) -> np.ndarray:
        return np.frombuffer(self._take(body), np.dtype(body["dtype"])).reshape(body["shape"])

    def _scalar(self, body: dict[str, Any]) -> Any:
        return self._array(body)[()]

    def _tensordict(self, body: Any) -> Tagged:
        return Tagged("tensordict", self.decode(body))

    def _nontensor(self, body: Any) -> Tagged:
        return Tagged("nontensor", self.decode(body))


def values(raw: Bytes, dtype: str, shape: list[int]) -> np.ndarray:
    """Bytes as numbers; of bfloat16, which numpy lacks, the bits."""
    kind = {"bool": "?", "bfloat16": "<u2"}.get(dtype) or np.dtype(dtype).newbyteorder("<")
    return np.ascontiguousarray(raw).reshape(-1).view(kind).reshape(shape)


def items_of(state: dict[str, Any], files: dict[str, bytes]) -> Iterator[tuple[list[Any], list[int]]]:
    for number in state["chunks"]:
        chunk = json.loads(files[f"storage/items-{number:08d}.json"])
        items = State(files[f"storage/items-{number:08d}.bin"]).decode(chunk["items"])
        sequences = chunk["sequences"] or [0] * len(items)
        assert len(sequences) == len(items) and all(own == 0 or own >= 1 << 62 for own in sequences)
        yield items, sequences


# ---- rows ----
@dataclass
class Leaf:
    path: tuple[Any, ...]
    dtype: str
    shape: list[int]
    nbytes: int
    offset: int = 0


class Layout:
    """Where each key sits in a row."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.leaves = [
            Leaf(tuple(x["path"]), x["dtype"], x["shape"], ITEM_BYTES[x["dtype"]] * math.prod(x["shape"]))
            for x in said["leaves"]
        ]
        assert said.get("hidden", []) in ([], ["sequence"])
        self.leaves += [Leaf((name,), "int64", [], 8) for name in said.get("hidden", [])]
        at = 0
        for leaf in sorted(self.leaves, key=lambda leaf: -ITEM_BYTES[leaf.dtype]):  # a stable sort
            leaf.offset, at = at, at + leaf.nbytes
        self.row_bytes = said["row_bytes"]
        assert self.row_bytes == max(1, at)


@dataclass
class Lane:
    first: int  # the oldest write number
    columns: dict[tuple[Any, ...], np.ndarray]  # [strands, steps, ...]


def lanes_of(state: dict[str, Any], files: dict[str, bytes], unpack: Any) -> list[Lane]:
    counters = state["counters"]
    if state["layout"] is None:
        assert not state["chunks"]
        return []
    layout, strands, lanes = Layout(state["layout"]), counters["envs"], []
    for number, lane in enumerate(counters["lanes"]):
        first = max(lane["base"], lane["published"] - counters["lane_capacity"])
        parts, reached = [np.zeros((strands, 0, layout.row_bytes), np.uint8)], first
        for entry in (chunk for chunk in state["chunks"] if chunk[0] == number):
            chunk, start, stop, details = entry[1], entry[2], entry[3], entry[4:]
            assert chunk * state["rows_per_chunk"] <= start < stop <= (chunk + 1) * state["rows_per_chunk"]
            assert start == reached or (start < reached == first)
            content = np.frombuffer(files[f"storage/rows-{number:05d}-{chunk:08d}.bin"], np.uint8)
            rows = unpack(content, layout, state, details, strands, stop - start)
            parts.append(rows[:, reached - start :])
            reached = stop
        assert reached == lane["published"]
        rows = np.concatenate(parts, 1)
        lanes.append(Lane(first, {leaf.path: column(rows, leaf) for leaf in layout.leaves}))
    return lanes


def column(rows: Bytes, leaf: Leaf) -> np.ndarray:
    return values(rows[:, :, leaf.offset : leaf.offset + leaf.nbytes], leaf.dtype, [*rows.shape[:2], *leaf.shape])


def unpack_rows(content: Bytes, layout: Layout, state: Any, details: list[int], strands: int, steps: int) -> Bytes:
    return content.reshape(strands, steps, layout.row_bytes)


class Sections:
    """The sections of a file, front to back."""

    def __init__(self, content: Bytes) -> None:
        self._content, self._at = content, 0

    def take(self, nbytes: int) -> Bytes:
        self._at += nbytes
        assert self._at <= len(self._content)
        return self._content[self._at - nbytes : self._at]

    def positions(self, count: int) -> list[int]:
        found = self.take(4 * count).view("<u4").tolist()
        assert found == sorted(set(found))
        return found

    def values(self, count: int, nbytes: int) -> Bytes:
        return self.take(count * nbytes).reshape(count, nbytes)

    def changes(self, detail: int, nbytes: int, n: int) -> Bytes:
        """One value a step, or the steps where it changes and the new values."""
        if detail == -1:
            return self.values(n, nbytes)
        starts, given = self.positions(detail), self.values(detail, nbytes)
        out = np.zeros((n, nbytes), np.uint8)
        for i, start in enumerate(starts):
            out[start : starts[i + 1] if i + 1 < len(starts) else n] = given[i]
        return out

    def finish(self) -> None:
        assert self._at == len(self._content)


def unpack_observations(
    content: Bytes, layout: Layout, state: Any, details: list[int], strands: int, steps: int
) -> Bytes:
    n, sections, ahead = strands * steps, Sections(content), state["observations"]["n_steps"]
    rows = np.zeros((strands, steps, layout.row_bytes), np.uint8)
    keys = [(layout.leaves[x], layout.leaves[after], frames) for x, after, frames in state["observations"]["keys"]]
    rest = np.ones(layout.row_bytes, bool)
    for x, after, _ in keys:
        for leaf in (x, after):
            assert rest[leaf.offset : leaf.offset + leaf.nbytes].all()
            rest[leaf.offset : leaf.offset + leaf.nbytes] = False
    rows[..., rest] = sections.values(n, int(rest.sum())).reshape(strands, steps, -1)
    for (x, after, frames), count in zip(keys, details, strict=True):
        kinds = sections.take(n).reshape(strands, steps)
        newest = sections.values(n, x.nbytes // frames).reshape(strands, steps, -1)
        given = iter(sections.values(count, x.nbytes // frames))
        for strand in range(strands):
            seen, following = stacks(kinds[strand], newest[strand], given, frames, ahead)
            rows[strand, :, x.offset : x.offset + x.nbytes] = seen.reshape(steps, -1)
            rows[strand, :, after.offset : after.offset + after.nbytes] = following.reshape(steps, -1)
        assert not list(given)
    sections.finish()
    return rows


def stacks(kinds: Bytes, newest: Bytes, given: Iterator[Bytes], frames: int, ahead: int) -> tuple[Bytes, Bytes]:
    """The observations of one environment, and the ones that followed: [steps, frames, bytes of a frame]."""
    steps = len(kinds)
    seen, following = (np.zeros((steps, frames, newest.shape[1]), np.uint8) for _ in range(2))
    later = []
    for t in range(steps + min(ahead, steps)):
        if t < steps:
            seen[t, -1], kind = newest[t], kinds[t] % 4
            if kind == 0:
                seen[t, :-1] = seen[t - 1, 1:] if t else 1 / 0
            elif kind == 1:
                seen[t, :-1] = newest[t]
            elif kind == 3:
                seen[t, :-1] = [next(given) for _ in range(frames - 1)] or 0
        earlier = t - ahead if ahead <= steps else t - steps
        if earlier >= 0:
            kind = kinds[earlier] // 4
            if kind == 0:
                later.append(earlier)
            else:
                moved = kind - 1
                following[earlier, : frames - moved] = seen[earlier, moved:]
                for i in range(frames - moved, frames):
                    following[earlier, i] = next(given)
    for t in later:
        following[t] = seen[t + ahead]
    return seen, following


def unpack_flat(content: Bytes, layout: Layout, state: Any, details: list[int], strands: int, steps: int) -> Bytes:
    n, roots, sections = strands * steps, dict(state["shared"]), Sections(content)
    rows, exceptions = np.zeros((n, layout.row_bytes), np.uint8), {}
    for i, leaf in enumerate(layout.leaves):
        if i in roots:
            exceptions[i] = sections.positions(details[i]), sections.values(details[i], leaf.nbytes)
        else:
            rows[:, leaf.offset : leaf.offset + leaf.nbytes] = sections.changes(details[i], leaf.nbytes, n)
    sections.finish()
    for i, (at, given) in exceptions.items():
        leaf, root = layout.leaves[i], layout.leaves[roots[i]]
        assert set(range(steps - 1, n, steps)) <= set(at)
        following = np.roll(rows[:, root.offset : root.offset + root.nbytes], -1, axis=0)
        following[at] = given
        rows[:, leaf.offset : leaf.offset + leaf.nbytes] = following
    return rows.reshape(strands, steps, -1)


def unpack_nested(content: Bytes, layout: Layout, state: Any, details: list[int], strands: int, steps: int) -> Bytes:
    n, roots, sections = strands * steps, dict(state["shared"]), Sections(content)
    k, *details = details
    last = sections.positions(k)
    assert set(range(steps - 1, n, steps)) <= set(last)
    copies = {root: copy for copy, root in roots.items()}
    rows, exceptions = np.zeros((n, layout.row_bytes), np.uint8), {}
    for i, leaf in enumerate(layout.leaves):
        place = slice(leaf.offset, leaf.offset + leaf.nbytes)
        if i in copies:
            assert details[i] == -1
            now, following = split(sections.values(n + k, leaf.nbytes), last)
            copy = layout.leaves[copies[i]]
            rows[:, place] = now
            rows[:, copy.offset : copy.offset + copy.nbytes] = following
        elif i in roots:
            exceptions[place.start, place.stop] = (
                sections.positions(details[i]),
                sections.values(details[i], leaf.nbytes),
            )
        else:
            rows[:, place] = sections.changes(details[i], leaf.nbytes, n)
    sections.finish()
    for (start, stop), (at, given) in exceptions.items():
        rows[at, start:stop] = given
    return rows.reshape(strands, steps, -1)


def split(given: Bytes, last: list[int]) -> tuple[Bytes, Bytes]:
    """The values of the steps, and what followed each, of trajectories with one value more than steps."""
    now, following, start, at = [], [], 0, 0
    for end in last:
        length = end + 1 - start
        now.append(given[at : at + length])
        following.append(given[at + 1 : at + length + 1])
        start, at = end + 1, at + length + 1
    assert at == len(given)
    return np.concatenate(now), np.concatenate(following)
