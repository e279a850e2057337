"""JSON that ends in a checksum of itself, so that no changed byte goes unnoticed."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from typing import Any, NoReturn

import xxhash

from engram._system import open_regular, sync_directory
from engram.errors import CheckpointError, CorruptCheckpointError
from engram.store.locks import FileLock

_BEFORE_HASH = b',"xxh3_128":"'
_AFTER_HASH = b'"}\n'
_HASH_LENGTH = 32
_TAIL_LENGTH = len(_BEFORE_HASH) + _HASH_LENGTH + len(_AFTER_HASH)


def digest(data: bytes) -> str:
    """XXH3-128 of `data`, as 32 lower-case hexadecimal digits."""
    return str(xxhash.xxh3_128(data).hexdigest())


def to_checksummed_json(document: dict[str, Any]) -> bytes:
    """`document` as one line of JSON whose last key, `xxh3_128`, is the hash of all bytes before that key."""
    head = to_json(document)[:-1]
    return head + _BEFORE_HASH + digest(head).encode() + _AFTER_HASH


def from_checksummed_json(data: bytes) -> dict[str, Any]:
    """The document that `to_checksummed_json` wrote; a ValueError says why it is not one."""
    if len(data) <= _TAIL_LENGTH:
        raise ValueError(f"it has {len(data)} bytes, too few for a document with a checksum")
    head = data[:-_TAIL_LENGTH]
    if data[-_TAIL_LENGTH:] != _BEFORE_HASH + digest(head).encode() + _AFTER_HASH:
        raise ValueError("its bytes do not match the hash at its end")
    document = from_json(head + b"}")
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    return document


class DocumentFile:
    """A file with one JSON document and its checksum. A write replaces it whole or not at all, also in a power cut."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)

    def read(self) -> dict[str, Any]:
        """The document. OSError where the file cannot be opened, ValueError where it is damaged."""
        with open(open_regular(self._path), "rb") as file:
            return from_checksummed_json(file.read())

    def write(self, document: dict[str, Any]) -> None:
        """Replaces the document; OSError where the disk refuses it."""
        aside = self._path + ".new"
        # A file of this name may be a link or a pipe: opening it could write to a file elsewhere, or block.
        if _exists(aside):
            os.unlink(aside)
        try:
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                data = to_checksummed_json(document)
                while data:
                    data = data[os.write(fd, data) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(aside, self._path)
        except BaseException:
            if os.path.lexists(aside):
                os.unlink(aside)
            raise
        sync_directory(os.path.dirname(self._path) or os.curdir)


def to_json(value: Any) -> bytes:
    """Compact ASCII JSON; NaN and infinities, which JSON does not have, are a ValueError."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def from_json(data: bytes) -> Any:
    """The value that `to_json` wrote; anything that is not JSON is a ValueError."""
    try:
        value = json.loads(data, parse_constant=_no_constant)
        if to_json(value) == data:  # so it has no key twice
            return value
        del value  # frees its memory before the text, which has another layout, is parsed a second time
        return json.loads(data, parse_constant=_no_constant, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):  # readers could differ in which of them counts
        raise ValueError("its JSON has a key twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


CURRENT = "CURRENT"
LOCK = "LOCK"
MANIFEST = "manifest.json"
MARKER = "ENGRAM-SNAPSHOT"
MARKER_CONTENT = b"engram snapshot: this directory belongs to engram, which removes it when it is no longer needed\n"

FORMAT = "engram snapshot"
VERSION = 1
HOOKS = "hooks"  #: the feature of snapshots in which save hooks changed rows
OBSERVATIONS = "observations"  #: the feature of snapshots with rows of which each observation is written once
REMOVED = "removed"  #: the feature of snapshots with rows, or items, that were removed
#: Features beyond version 1 that a snapshot may use, by name. A reader refuses a snapshot with others.
FEATURES: tuple[str, ...] = (HOOKS, OBSERVATIONS, REMOVED)
HOOKED = "hooked"  #: the format of a storage whose rows save hooks changed

LARGEST_MANIFEST = 1 << 28  # a sparse file of any size costs nothing to make

_SNAPSHOT_NAME = re.compile(r"g-(\d{6,18})", re.ASCII)
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*", re.ASCII)
_POINTER_FORMAT = "engram checkpoint"


@dataclass(frozen=True)
class Pointer:
    """The content of CURRENT: the name of the current snapshot and the XXH3-128 of its manifest file."""

    snapshot: str
    manifest: str


@dataclass(frozen=True)
class Listing:
    """The content of a checkpoint's directory, read by a save that holds the lock: no other process changes it.

    Attributes:
        numbered: directories that have the name of a snapshot, of any origin.
        snapshots: those of them that carry our marker, newest first; unfinished ones included.
        pointer: the content of CURRENT; None where that is missing or damaged.
        damage: why CURRENT is damaged; None where it is not.
    """

    numbered: list[str]
    snapshots: list[str]
    pointer: Pointer | None
    damage: CorruptCheckpointError | None


def is_file_name(name: object) -> bool:
    """Whether this is a relative name of a file below a snapshot: without `..`, not hidden."""
    return isinstance(name, str) and len(name) < 256 and _FILE_NAME.fullmatch(name) is not None


def open_folder_below(directory: int, name: str) -> int:
    """Opens the folder `name` below the open directory, following no symbolic link on the way."""
    fd = directory
    try:
        for part in name.split("/"):
            above, fd = fd, os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            if above != directory:
                os.close(above)
    except BaseException:
        if fd != directory:
            os.close(fd)
        raise
    return fd


class CheckpointDirectory:
    """The directory of a checkpoint: CURRENT, LOCK and snapshots `g-000001`, ...; it may hold other files too."""

    def __init__(self, root: str) -> None:
        self.root = root

    @staticmethod
    def is_name(name: object) -> bool:
        """Whether a snapshot may have this name."""
        return isinstance(name, str) and _SNAPSHOT_NAME.fullmatch(name) is not None

    def path(self, *names: str) -> str:
        return os.path.join(self.root, *names)

    def has_pointer(self) -> bool:
        """Whether there is a CURRENT, of any origin."""
        return os.path.lexists(self.path(CURRENT))

    def snapshots(self) -> list[str]:
        """Names of the directories that carry our name and our marker, newest first; unfinished ones included."""
        return self._marked(self._numbered())

    def listing(self) -> Listing:
        """The facts about the directory that a save needs before it changes something."""
        numbered = self._numbered()
        snapshots = self._marked(numbered)
        try:
            return Listing(numbered, snapshots, self.current(), None)
        except CorruptCheckpointError as error:
            return Listing(numbered, snapshots, None, error)

    def _marked(self, numbered: list[str]) -> list[str]:
        return sorted(filter(self._is_marked, numbered), key=_number, reverse=True)

    def next_name(self) -> str:
        # Also above directories that only look like ours: we neither write into them nor remove them.
        return f"g-{max(map(_number, self._numbered()), default=0) + 1:06d}"

    def current(self) -> Pointer | None:
        """The content of CURRENT; None where there is no such file, a CorruptCheckpointError where it is damaged."""
        try:
            return self._pointer(self._read(CURRENT, most=1 << 16))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CorruptCheckpointError(self.path(CURRENT), f"it cannot be opened ({error.strerror})") from error

    def point_to(self, pointer: Pointer) -> None:
        """Replaces CURRENT. Everything that `pointer` names must be on disk before this is called."""
        document = {"format": _POINTER_FORMAT, "version": 1, "snapshot": pointer.snapshot, "manifest": pointer.manifest}
        DocumentFile(self.path(CURRENT)).write(document)

    def refuse_foreign(self, listing: Listing) -> None:
        """CheckpointError where CURRENT was not written by engram, and would be replaced."""
        if listing.damage is not None and not listing.snapshots:
            raise CheckpointError(
                f"{self.path(CURRENT)} was not written by engram and would be replaced; save to another directory"
            ) from listing.damage

    def clean(self, listing: Listing, keep_last: int) -> list[str]:
        """Removes what killed saves left: snapshots without a manifest, those that CURRENT never pointed to, and
        those that should have been pruned. Done first: saves that are killed again and again do not fill the disk.

        Returns the names of the snapshots that stay, newest first.
        """
        leftovers = self._leftovers(listing, keep_last)
        if leftovers:
            # A save that was killed just after it moved CURRENT has not synced the move, and a sync that failed there
            # may make the next one believe that it has: after a power cut CURRENT may still name what is removed here.
            self._move_again(listing.pointer)
        stay = list(listing.snapshots)
        for name in leftovers:
            if self.remove(name):
                stay.remove(name)
        for name in listing.numbered:
            if name not in listing.snapshots:
                self._remove_if_empty(name)
        return stay

    def _move_again(self, pointer: Pointer | None) -> None:
        """Makes sure that CURRENT, as it is now, survives a power cut."""
        if pointer is None:
            sync_directory(self.root)
        else:
            self.point_to(pointer)

    def _leftovers(self, listing: Listing, keep_last: int) -> list[str]:
        names, pointer = listing.snapshots, listing.pointer
        unfinished = {name for name in names if not _exists(self.path(name, MANIFEST))}
        if listing.damage is not None:
            return list(unfinished)  # any finished snapshot may be the current one: keep them all
        if pointer is not None:
            older = [name for name in names if _number(name) < _number(pointer.snapshot) and name not in unfinished]
            return [name for name in names if name not in [pointer.snapshot, *older[: keep_last - 1]]]
        # No save ever came to its end, or CURRENT was deleted by hand: what loads(snapshot=...) could rescue stays.
        rescue = next((name for name in names if self._is_finished(name)), None)
        return [name for name in names if name != rescue]

    def remove(self, name: str) -> bool:
        """Removes a marked snapshot; False where it is being read. Killed half-way, it is marked and unfinished."""
        folder = self.path(name)
        marker, manifest = os.path.join(folder, MARKER), os.path.join(folder, MANIFEST)
        try:
            lock = FileLock(open_regular(marker, os.O_RDWR), exclusive=True)
        except BlockingIOError:
            return False
        try:
            if _exists(manifest) and not stat.S_ISDIR(os.lstat(manifest).st_mode):
                os.unlink(manifest)
            _remove_content(folder, except_for=MARKER)
            os.unlink(marker)
            os.rmdir(folder)
        finally:
            lock.release()
        return True

    def _read(self, *names: str, most: int) -> bytes:
        """The first bytes of a regular file; OSError where there is none."""
        with open(open_regular(self.path(*names), os.O_RDONLY), "rb") as file:
            return file.read(most)

    def _pointer(self, data: bytes) -> Pointer:
        try:
            document = from_checksummed_json(data)
        except ValueError as error:
            raise CorruptCheckpointError(self.path(CURRENT), str(error)) from None
        snapshot, manifest = document.get("snapshot"), document.get("manifest")
        if document.get("format") != _POINTER_FORMAT or not self.is_name(snapshot) or not isinstance(manifest, str):
            raise CorruptCheckpointError(self.path(CURRENT), "it does not name a snapshot and the hash of its manifest")
        return Pointer(str(snapshot), manifest)

    def _numbered(self) -> list[str]:
        try:
            # A disk that cannot list it is an error: a number given twice would cost a snapshot.
            with os.scandir(self.root) as entries:
                return [e.name for e in entries if _SNAPSHOT_NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _is_marked(self, name: str) -> bool:
        try:
            # a save killed while it wrote the marker leaves the beginning of it
            return MARKER_CONTENT.startswith(self._read(name, MARKER, most=len(MARKER_CONTENT) + 1))
        except OSError:
            return False

    def _is_finished(self, name: str) -> bool:
        try:
            if not stat.S_ISREG(os.lstat(self.path(name, MANIFEST)).st_mode):
                return False
            from_checksummed_json(self._read(name, MANIFEST, most=LARGEST_MANIFEST + 1))
        except (FileNotFoundError, ValueError):
            return False
        return True

    def _remove_if_empty(self, name: str) -> None:
        try:
            os.rmdir(self.path(name))  # a save killed before it wrote the marker
        except OSError:
            pass


def _exists(path: str) -> bool:
    """As `os.path.lexists`, but raises the disk's errors: only what is certainly a leftover is removed."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _number(name: str) -> int:
    return int(name[2:])


def _remove_content(path: str, except_for: str) -> None:
    with os.scandir(path) as entries:
        content = list(entries)
    for entry in content:
        if entry.is_dir(follow_symlinks=False):
            _remove_content(entry.path, except_for="")
            os.rmdir(entry.path)
        elif entry.name != except_for:
            os.unlink(entry.path)
