"""One engine for damage to what was saved, in any format: files changed, cut, lost, exchanged, replaced, forged.

`Saved` says what a format promises; `damage` does every kind of damage to it and checks the promises.
"""

from __future__ import annotations

import copy
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.waiting import NEVER
from engram.checkpoint.directory import digest, from_checksummed_json, to_checksummed_json

# What a load of damaged files may do: refuse them; give what was saved all the same; give other values, too.
REFUSED, SAME, ANYTHING = "refused", "refused or the same", "refused or anything"
#: One bit of a byte, the case of a letter, another letter.
BITS = (1, 32, 128)


@dataclass(frozen=True)
class Budget:
    """How many of each kind: changed bytes of a file of metadata (None: every one) and of all data, and so on."""

    metadata: int | None = 6
    data: int = 8
    cuts: int = 2
    pairs: int | None = 4

    def times(self, n: int) -> Budget:
        """This budget where each kind has a number, so many times over."""
        metadata, pairs = (None if count is None else count * n for count in (self.metadata, self.pairs))
        return Budget(metadata, self.data * n, self.cuts * n, pairs)


EVERY_BYTE = Budget(None, 10_000, 100, None)


class Saved:
    """Files of one format below `root`. A holder is what loads them; it may hold something before."""

    root: Path
    #: What a load may raise.
    errors: tuple[type[Exception], ...] = ()
    #: How much of each damage is enough for an ordinary run.
    some = Budget()

    def promise(self, kind: str, file: Path) -> str:
        """What a load may do after damage of this kind to the file."""
        raise NotImplementedError

    def holders(self, files: Sequence[Path]) -> Iterable[Any]:
        """Those that are to load after damage to these files."""
        raise NotImplementedError

    def load(self, holder: Any) -> None:
        raise NotImplementedError

    def state(self, holder: Any) -> Any:
        """What it holds."""
        raise NotImplementedError

    def same(self, one: Any, other: Any) -> bool:
        return bool(one == other)

    def check_error(self, kind: str, files: Sequence[Path], error: Exception) -> None:
        """That the error says enough: by default it names one of the damaged files."""
        assert any(file.name in str(error) for file in files), f"{kind} of {files}: {error}"

    def check_report(self, kind: str, files: Sequence[Path]) -> None:
        """That whatever else looks at the files notices the damage, too."""

    def is_data(self, file: Path) -> bool:
        """Whether it is one of rows, of which a few changed bytes are enough, and not one that describes others."""
        return "storage" in file.parts

    def older(self, file: Path) -> Path | None:
        """The file of the same name in an earlier save."""
        return None

    def files(self) -> list[Path]:
        """Those that hold anything."""
        return sorted(file for file in self.root.rglob("*") if file.is_file() and file.stat().st_size)

    def remember(self) -> None:
        """Loads what is not damaged yet; everything later is compared with this."""
        self.expected = [self._loaded(holder) for holder in self.holders([])]

    def check_undamaged(self) -> None:
        for holder, expected in zip(self.holders([]), self.expected, strict=True):
            assert self.same(self._loaded(holder), expected)

    def _loaded(self, holder: Any) -> Any:
        self.load(holder)
        return self.state(holder)


def damage(saved: Saved, kind: str, budget: Budget | None = None) -> int:
    """Does one kind of damage in many places, one after the other; how many."""
    tried = 0
    for files in DAMAGES[kind](saved, random.Random(kind), budget or saved.some):
        tried += 1
        promises = [saved.promise(kind, file) for file in files]
        promise = next(one for one in (REFUSED, SAME, ANYTHING) if one in promises)
        for holder in saved.holders(files):
            before = saved.state(holder)
            try:
                saved.load(holder)
            except saved.errors as error:
                saved.check_error(kind, files, error)
                assert saved.same(saved.state(holder), before), f"{kind} of {files} was refused and has changed"
            else:
                assert promise != REFUSED, f"{kind} of {files} was not noticed"
                same = any(saved.same(saved.state(holder), expected) for expected in saved.expected)
                assert promise == ANYTHING or same, f"{kind} of {files} gave other values"
        if promise == REFUSED:
            saved.check_report(kind, files)
    saved.check_undamaged()
    return tried


# ---- kinds of damage: each leaves it in place while the caller looks ----
Damage = Callable[[Saved, random.Random, Budget], Iterator[Sequence[Path]]]


def _changed_bytes(saved: Saved, rng: random.Random, budget: Budget) -> Iterator[Sequence[Path]]:
    total = sum(file.stat().st_size for file in saved.files() if saved.is_data(file))
    for file in saved.files():
        size = file.stat().st_size
        if saved.is_data(file):
            places = [(rng.randrange(size), 1 << rng.randrange(8)) for _ in range(max(1, budget.data * size // total))]
        elif budget.metadata is None:  # of a long file one bit of each byte: its hash covers all bytes alike
            places = [(k, bit) for k in range(size) for bit in (BITS if size < 500 else (1 << k % 8,))]
        else:  # and where a hash may not reach: its ends
            ends = {0, 1, size // 2, size - 2, size - 1} & set(range(size))
            some = [rng.randrange(size) for _ in range(max(0, budget.metadata - len(ends)))]
            places = [(k, rng.choice(BITS)) for k in (*sorted(ends), *some)]
        with changed(file):
            for position, bit in places:
                flip(file, position, bit)
                yield [file]
                flip(file, position, bit)


def _cut(saved: Saved, rng: random.Random, budget: Budget) -> Iterator[Sequence[Path]]:
    for file in saved.files():
        with changed(file) as content:
            size = len(content)
            for at in sorted({size * k // budget.cuts for k in range(budget.cuts)} | {min(1, size - 1), size - 1}):
                overwrite(file, content[:at])
                yield [file]


def _longer(saved: Saved, rng: random.Random, budget: Budget) -> Iterator[Sequence[Path]]:
    for file in saved.files():
        with changed(file) as content:
            for more in (b"\0", content):
                overwrite(file, content + more)
                yield [file]


def _lost(saved: Saved, rng: random.Random, budget: Budget) -> Iterator[Sequence[Path]]:
    for file in saved.files():
        with changed(file):
            file.unlink()
            yield [file]


def _replaced(saved: Saved, rng: random.Random, budget: Budget) -> Iterator[Sequence[Path]]:
    """By a folder, a pipe, or a link to the very same content."""
    elsewhere = saved.root.with_name("elsewhere")
    for file in saved.files():
        with changed(file) as content:
            for put in (Path.mkdir, os.mkfifo, lambda place: place.symlink_to(elsewhere)):
                elsewhere.write_bytes(content)
                file.unlink()
                put(file)
                with within(NEVER):
                    yield [file]
                file.rmdir() if file.is_dir() else file.unlink()
                elsewhere.unlink()
                file.touch()


def _folders_linked(saved: Saved, rng: random.Random, budget: Budget) -> Iterator[Sequence[Path]]:
    elsewhere = saved.root.with_name("elsewhere")
    for folder in sorted({file.parent for file in saved.files()} - {saved.root}):
        shutil.move(folder, elsewhere)
        folder.symlink_to(elsewhere)
        yield [folder]
        folder.unlink()
        shutil.move(elsewhere, folder)


def _exchanged(saved: Saved, rng: random.Random, budget: Budget) -> Iterator[Sequence[Path]]:
    files = saved.files()
    pairs = [(a, b) for a in files for b in files if a < b and a.read_bytes() != b.read_bytes()]
    if budget.pairs is not None:
        pairs = rng.sample(pairs, min(len(pairs), budget.pairs))
    for a, b in pairs:
        with changed(a) as one, changed(b) as other:
            overwrite(a, other)
            overwrite(b, one)
            yield [a, b]


def _outdated(saved: Saved, rng: random.Random, budget: Budget) -> Iterator[Sequence[Path]]:
    """Each file is the one of the same name in the save before."""
    for file in saved.files():
        older = saved.older(file)
        if older is not None and older.exists() and older.read_bytes() != file.read_bytes():
            with changed(file):
                overwrite(file, older.read_bytes())
                yield [file]


DAMAGES: dict[str, Damage] = {
    "changed bytes": _changed_bytes, "cut": _cut, "longer": _longer, "lost": _lost, "replaced": _replaced,
    "folders linked": _folders_linked, "exchanged": _exchanged, "outdated": _outdated,
}  # fmt: skip


# ---- bytes ----
def flip(file: Path, position: int, bit: int = 1) -> None:
    """Changes one byte in place, read-only file or not."""
    content = bytearray(file.read_bytes())
    content[position] ^= bit
    overwrite(file, bytes(content))


def overwrite(file: Path, content: bytes) -> None:
    os.chmod(file, 0o644)
    file.write_bytes(content)


@contextmanager
def changed(file: Path) -> Iterator[bytes]:
    """The file's content, which it has again afterwards."""
    content = file.read_bytes()
    # Alone: what is done to this file must not be done to a snapshot that links it.
    file.unlink()
    file.write_bytes(content)
    try:
        yield content
    finally:
        file.unlink(missing_ok=True)
        file.write_bytes(content)


# ---- what somebody else may have put in the place of a file: links, pipes, folders, devices ----
OUTSIDE = b"a file that is nobody's business here\n" * 100


def plant(kind: str, place: Path, outside: Path) -> None:
    """Puts something of a kind at `place`; links lead to `outside`."""
    outside.write_bytes(OUTSIDE)
    if place.is_dir() and not place.is_symlink():
        place = place / "into"
    if place.is_symlink() or place.exists():
        place.unlink()
    KINDS[kind](place, outside)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda place, outside: place.symlink_to(outside),
    "hard link": lambda place, outside: os.link(outside, place),
    "link to nothing": lambda place, outside: place.symlink_to(outside.with_name("nothing")),
    "link to a pipe": lambda place, outside: (
        os.mkfifo(outside.with_name("far pipe")),
        place.symlink_to(outside.with_name("far pipe")),
    ),
    "pipe": lambda place, outside: os.mkfifo(place),
    "folder": lambda place, outside: place.mkdir(),
    "full folder": lambda place, outside: (place.mkdir(), (place / "file").write_bytes(b"x")),
    "socket": lambda place, outside: os.mknod(place, 0o140600),
    "empty file": lambda place, outside: place.write_bytes(b""),
}


class TooLate(BaseException):
    """Not an OSError, as TimeoutError is, which a library may take for one of a file."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """TooLate where the block waits for ever."""

    def late(*_: object) -> None:
        raise TooLate(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def limit_memory(nbytes: int) -> None:
    """From here on this process cannot take more than this on top of what it has."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, now + nbytes))


# ---- every value of a document exchanged for one that cannot be ----
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
    if not at:
        return value
    tree = copy.deepcopy(tree)
    _parent(tree, at)[at[-1]] = value
    return tree


def without(tree: Any, at: Place) -> Any:
    """The tree without one place."""
    tree = copy.deepcopy(tree)
    del _parent(tree, at)[at[-1]]
    return tree


def _parent(tree: Any, at: Place) -> Any:
    for key in at[:-1]:
        tree = tree[key]
    return tree


# ---- checkpoints whose every hash is right, as an attacker can make them ----
class Forger:
    """A checkpoint whose manifest in force says something else each time, with every hash right."""

    def __init__(self, path: Path, original: Path | None = None) -> None:
        if original is not None:
            shutil.copytree(original, path)
        self.path, self._current = path, path / "CURRENT"
        self._pointer = _unsealed(self._current)
        self.snapshot = path / self._pointer["snapshot"]
        self.manifest = self.snapshot / "manifest.json"
        self.document = _unsealed(self.manifest)

    def edit(self, edit: Callable[[dict[str, Any]], Any]) -> Path:
        """Changes what the manifest says; where that is."""
        document = copy.deepcopy(self.document)
        edit(document)
        return self.write(document)

    def edit_state(self, edit: Callable[[Any], Any]) -> Path:
        """Changes what the manifest says of the storage."""
        return self.edit(lambda document: edit(document["body"]["storage"]["state"]))

    def write(self, document: dict[str, Any]) -> Path:
        return self.write_bytes(to_checksummed_json(document))

    def write_text(self, edit: Callable[[bytes], bytes]) -> Path:
        """Changes the text of the manifest, which need not be JSON then."""
        head = edit(to_checksummed_json(self.document)[:-48])
        return self.write_bytes(head + b',"xxh3_128":"' + digest(head).encode() + b'"}\n')

    def write_bytes(self, manifest: bytes) -> Path:
        overwrite(self.manifest, manifest)
        overwrite(self._current, to_checksummed_json({**self._pointer, "manifest": digest(manifest)}))
        return self.manifest

    def write_file(self, name: str, content: bytes) -> None:
        """Gives one of the snapshot's files another content."""
        overwrite(self.snapshot / name, content)
        self.edit(lambda d: d["files"].update({name: {"nbytes": len(content), "xxh3_128": digest(content)}}))

    def point(self, **entries: Any) -> None:
        """Changes what the checkpoint's pointer says."""
        overwrite(self._current, to_checksummed_json({**self._pointer, **entries}))


def forge_file(path: Path, file: Path, content: bytes) -> None:
    """Gives a file of the checkpoint's snapshot another content."""
    forger = Forger(path)
    forger.write_file(str(file.relative_to(forger.snapshot)), content)


def forge_state(path: Path, edit: Callable[[Any], Any]) -> None:
    """Changes what the manifest says of the storage."""
    Forger(path).edit_state(edit)


def _unsealed(file: Path) -> dict[str, Any]:
    return {key: value for key, value in from_checksummed_json(file.read_bytes()).items() if key != "xxh3_128"}
