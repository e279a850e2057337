"""Forged checkpoints of whole buffers: every value that a manifest holds exchanged for one that cannot be."""

from __future__ import annotations

import copy
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from contracts.checkpointer import overwrite
from engram.checkpoint.directory import digest, from_checksummed_json, to_checksummed_json

Place = tuple[Any, ...]

DEEP: Any = 0
for _ in range(150):
    DEEP = [DEEP]

NASTY: list[Any] = [
    None, True, -1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63, 2**64, 2**200, 0.5, "", "x", "../../x", [], {}, [1], [-1],
    [2**62, 2**62], [[0, 0, 0, 2**62]], {"$unknown": 1}, {"$tuple": [1, 2]}, {"$int": "-0x1"}, {"kind": "x"}, DEEP,
    {"$tensor": {"dtype": "float32", "shape": [2**40], "at": 0, "nbytes": 2**42}},
    {"$array": {"dtype": "<U0", "shape": [2**40], "at": 0, "nbytes": 0}},
    {"$array": {"dtype": "|O", "shape": [1], "at": 0, "nbytes": 8}},
    {"$size": [2**62]}, {"$tensordict": {"batch_size": [2**40], "device": False, "names": None, "items": {}}},
]  # fmt: skip


def places(tree: Any, at: Place = ()) -> Iterator[Place]:
    """Every place in a JSON tree but its root."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield (*at, key)
        yield from places(child, (*at, key))


def exchanged(tree: Any, at: Place, value: Any) -> Any:
    """The tree with another value in one place."""
    made = copy.deepcopy(tree)
    here = made
    for key in at[:-1]:
        here = here[key]
    here[at[-1]] = value
    return made


def without(tree: Any, at: Place) -> Any:
    """The tree without one place."""
    made = copy.deepcopy(tree)
    here = made
    for key in at[:-1]:
        here = here[key]
    del here[at[-1]]
    return made


class Forger:
    """A checkpoint of one snapshot whose manifest says something else each time, with every hash right."""

    def __init__(self, original: Path, path: Path) -> None:
        shutil.copytree(original, path)
        self.path = path
        self._manifest, self._current = path / "g-000001" / "manifest.json", path / "CURRENT"
        self.document = _unsealed(self._manifest)
        self._pointer = _unsealed(self._current)

    def write(self, document: dict[str, Any]) -> None:
        self.write_bytes(to_checksummed_json(document))

    def write_text(self, edit: Callable[[bytes], bytes]) -> None:
        """Changes the text of the manifest, which need not be JSON then."""
        head = edit(to_checksummed_json(self.document)[:-48])
        self.write_bytes(head + b',"xxh3_128":"' + digest(head).encode() + b'"}\n')

    def write_bytes(self, manifest: bytes) -> None:
        overwrite(self._manifest, manifest)
        overwrite(self._current, to_checksummed_json({**self._pointer, "manifest": digest(manifest)}))

    def write_file(self, name: str, content: bytes) -> None:
        """Gives one of the snapshot's files another content."""
        overwrite(self.path / "g-000001" / name, content)
        document = copy.deepcopy(self.document)
        document["files"][name] = {"nbytes": len(content), "xxh3_128": digest(content)}
        self.write(document)


def _unsealed(file: Path) -> dict[str, Any]:
    return {key: value for key, value in from_checksummed_json(file.read_bytes()).items() if key != "xxh3_128"}


def limit_memory(nbytes: int) -> None:
    """From here on this process cannot take more than this on top of what it has."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, now + nbytes))
