"""Files that are read from start to end while their checksum is computed."""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from engram._system import advise_disk, check_memory, map_privately, open_regular, user_path
from engram.checkpoint.directory import (
    CURRENT,
    FEATURES,
    FORMAT,
    LARGEST_MANIFEST,
    LOCK,
    MANIFEST,
    MARKER,
    MARKER_CONTENT,
    VERSION,
    CheckpointDirectory,
    Pointer,
    digest,
    from_checksummed_json,
    is_file_name,
    open_folder_below,
)
from engram.errors import CheckpointError, CorruptCheckpointError
from engram.store.locks import FileLock

PIECE = 1 << 20  # hashed while it is still in the cache
_BLOCK = 1 << 22
_SMALL = 1 << 16  # read at once for many takes of a few bytes

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file, as the manifest lists them."""

    nbytes: int
    xxh3_128: str


class ChecksummedFile:
    """A file that is read once, from start to end, and compared with its checksum at the end."""

    def __init__(self, fd: int, path: str, record: FileRecord) -> None:
        self._fd = fd
        self._path = path
        self._record = record
        self._hasher = xxhash.xxh3_128()
        self._ahead = memoryview(b"")  # read and hashed, not yet handed out
        self.position = 0

    @property
    def remaining(self) -> int:
        return self._record.nbytes - self.position

    def take(self, buffer: Bytes) -> None:
        """Fills `buffer` with the next bytes."""
        view = buffer.data
        while len(view):
            if not self._ahead and len(view) < _SMALL:
                ahead = memoryview(bytearray(min(_SMALL, self.remaining) or 1))
                self._ahead = ahead[: self._read_into(ahead)]
            got = self._take_ahead(view) or self._read_into(view)
            self.position += got
            view = view[got:]

    def skip(self, nbytes: int) -> None:
        """Skips bytes that are not needed; they are part of the checksum."""
        block = np.empty(min(nbytes, _BLOCK), np.uint8)
        while nbytes > 0:
            self.take(block[:nbytes])
            nbytes -= min(nbytes, len(block))

    def finish(self) -> None:
        """Reads the rest; CorruptCheckpointError where the checksum of the whole file is not the saved one."""
        self.skip(self.remaining)
        if self._hasher.hexdigest() != self._record.xxh3_128:
            raise CorruptCheckpointError(self._path, "its checksum is not that of the bytes that were saved")

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        os.close(self._fd)

    def _take_ahead(self, view: memoryview) -> int:
        got = min(len(view), len(self._ahead))
        view[:got], self._ahead = self._ahead[:got], self._ahead[got:]
        return got

    def _read_into(self, view: memoryview) -> int:
        try:
            got = os.readv(self._fd, [view[:PIECE]])
        except OSError as error:
            raise CorruptCheckpointError(self._path, f"it cannot be read ({error.strerror})") from error
        if not got:
            raise CorruptCheckpointError(
                self._path, f"it ends at byte {self.position}, {self._record.nbytes} were saved"
            )
        self._hasher.update(view[:got])
        return got


class BytesInMemory:
    """The content of a file whose checksum has been compared; what is taken of it is not copied."""

    def __init__(self, content: Bytes) -> None:
        self._content = content
        self.position = 0

    @property
    def remaining(self) -> int:
        return len(self._content) - self.position

    def skip(self, nbytes: int) -> None:
        """Passes over the next bytes."""
        self.position += nbytes

    def view(self, nbytes: int) -> Bytes:
        """The next bytes."""
        self.skip(nbytes)
        return self._content[self.position - nbytes : self.position]


THREADS = 2  # that read, hash and copy: a disk answers several faster than one
JSON_AS_OBJECTS = 25  # times the text: `[]` and a comma are an object of 56 bytes and a pointer to it
_ATTEMPTS = 1000
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES)


class SnapshotGoneError(CheckpointError):
    """The snapshot does not exist, or a save is removing it."""


class SnapshotReader:
    """One snapshot, held by a shared lock: its `body`, and files that are compared with their checksums."""

    def __init__(self, directory: CheckpointDirectory, name: str, manifest_hash: str | None = None) -> None:
        self.name = name
        self._path = directory.path(name)
        self._folders = {"": self._open_directory()}
        try:
            self._lock = self._lock_marker()
            try:
                self._load_manifest(manifest_hash)
            except BaseException:
                self._lock.release()
                raise
        except BaseException:
            self._close_folders()
            raise

    def close(self) -> None:
        try:
            self._lock.release()
        finally:
            self._close_folders()

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def nbytes(self, name: str) -> int:
        """Size of a file; a CorruptCheckpointError where the manifest does not list it."""
        if name not in self.files:
            raise self.malformed(f"it does not list the file {name}")
        return self.files[name].nbytes

    def open(self, name: str) -> ChecksummedFile:
        """The file, to be read from its start. Its content may be used after `finish`, which compares the checksum."""
        self.nbytes(name)
        return ChecksummedFile(self._open_file(name), self.path(name), self.files[name])

    def verified(self, name: str) -> BinaryIO:
        """The file, open for reading, after its checksum was compared."""
        fd = self._open_file(name)
        try:
            with ChecksummedFile(os.dup(fd), self.path(name), self.files[name]) as file:
                file.finish()
            os.lseek(fd, 0, os.SEEK_SET)
            return open(fd, "rb", buffering=0)
        except BaseException:
            os.close(fd)
            raise

    def read_into(self, name: str, buffer: Bytes) -> None:
        """Reads a whole file into `buffer`, which has its size, and compares its checksum."""
        with self.open(name) as file:
            file.take(buffer)
            file.finish()

    def mapped(self, name: str) -> Bytes:
        """The content of a file after its checksum was compared: of a large one mapped, so that it takes no memory."""
        nbytes = self.nbytes(name)
        if nbytes <= _BLOCK:
            content = np.empty(nbytes, np.uint8)
            self.read_into(name, content)
            return content
        with self.verified(name) as file:
            return map_privately(file.fileno(), nbytes)

    def read_ahead(self, name: str) -> None:
        """Lets the disk start to read a file that will be needed soon."""
        fd = self._open_file(name)
        try:
            for begin in range(0, self.files[name].nbytes, PIECE):  # the kernel reads no more than about this at once
                advise_disk(fd, "WILLNEED", begin, PIECE)
        finally:
            os.close(fd)

    def copy(self, name: str, target: str) -> FileRecord | None:
        """Links a file of this snapshot to the path `target`, or copies it where the file system has no hard links and
        compares the checksum. None, and no file at `target`, where the file is damaged.
        """
        try:
            self._check_file(name)
        except CorruptCheckpointError:  # the save writes it again
            return None
        try:
            os.link(self.path(name), target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if not self._copied(name, target):
                return None
        return self.files[name]

    def _copied(self, name: str, target: str) -> bool:
        try:
            with self.open(name) as file, open(target, "xb") as copy:
                while file.remaining:
                    block = np.empty(min(file.remaining, _BLOCK), np.uint8)
                    file.take(block)
                    copy.write(block.data)
                file.finish()
                copy.flush()
                os.fchmod(copy.fileno(), 0o444)
                os.fsync(copy.fileno())
        except CorruptCheckpointError:
            os.unlink(target)
            return False
        return True

    def check(self, names: Iterable[str] | None = None) -> None:
        """Compares files (all by default) with their checksums; CorruptCheckpointError names the first that differs."""
        in_parallel(functools.partial(self._check, n) for n in (self.files if names is None else names))

    def _check(self, name: str) -> None:
        with self.open(name) as file:
            file.finish()

    def path(self, name: str) -> str:
        return os.path.join(self._path, name)

    def malformed(self, reason: str) -> CorruptCheckpointError:
        """The error for a manifest whose checksum is right and whose content cannot be true."""
        return CorruptCheckpointError(self.path(MANIFEST), reason)

    def _open_directory(self) -> int:
        try:
            return os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SnapshotGoneError(f"{self._path} does not exist") from None
        except OSError as error:
            raise CorruptCheckpointError(self._path, f"it is not a directory ({error.strerror})") from error

    def _lock_marker(self) -> FileLock:
        fd = self._open_file(MARKER)
        try:
            content = os.pread(fd, len(MARKER_CONTENT) + 1, 0)
        except OSError:
            os.close(fd)
            raise
        try:
            lock = FileLock(fd, exclusive=False)
        except BlockingIOError:
            raise SnapshotGoneError(f"{self._path} is being removed by a save") from None
        try:
            # Where the marker was removed just before the lock was taken, the lock protects nothing.
            if os.fstat(fd).st_nlink == 0:
                raise SnapshotGoneError(f"{self._path} was removed by a save")
            if content != MARKER_CONTENT:
                raise CorruptCheckpointError(self.path(MARKER), "it does not hold what every snapshot's marker holds")
        except BaseException:
            lock.release()
            raise
        return lock

    def _load_manifest(self, expected: str | None) -> None:
        try:
            with open(self._open_file(MANIFEST), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > LARGEST_MANIFEST:
                    raise ValueError(f"it has more than {LARGEST_MANIFEST:,} bytes")
                check_memory(JSON_AS_OBJECTS * size, self.path(MANIFEST))
                data = file.read()
            document = from_checksummed_json(data)
        except (OSError, ValueError) as error:
            raise self.malformed(str(error)) from None
        if expected is not None and digest(data) != expected:
            raise self.malformed(f"it is not the manifest that {CURRENT} was written for")
        if document.get("format") != FORMAT or document.get("snapshot") != self.name:
            raise self.malformed(f"it is the manifest of {document.get('snapshot')!r}, not of {self.name}")
        if document.get("version") != VERSION:
            raise CheckpointError(
                f"{self._path} has format version {document.get('version')}, this engram reads version {VERSION}; "
                "load it with the engram that wrote it, or a newer one"
            )
        if not isinstance(document.get("body"), dict):
            raise self.malformed("it has no body")
        self._check_features(document.get("features"))
        self.files = self._records(document.get("files"))
        self.body: dict[str, Any] = document["body"]
        for name in self.files:
            self._check_file(name)

    def _check_features(self, features: Any) -> None:
        if not isinstance(features, list) or not all(type(feature) is str for feature in features):
            raise self.malformed("it does not list the features that it uses")
        unknown = [feature for feature in features if feature not in FEATURES]
        if unknown:
            raise CheckpointError(
                f"{self._path} uses {', '.join(map(repr, unknown))}, which this engram does not know; load it with a "
                "newer one"
            )

    def _records(self, files: Any) -> dict[str, FileRecord]:
        if not isinstance(files, dict):
            raise self.malformed("it does not list files")
        records = {}
        for name, entry in files.items():
            if not is_file_name(name) or name in (MANIFEST, MARKER):
                raise self.malformed(f"it lists {name!r}, which is not a name of a file below a snapshot")
            nbytes, checksum = (entry.get("nbytes"), entry.get("xxh3_128")) if isinstance(entry, dict) else (None, None)
            if type(nbytes) is not int or nbytes < 0 or type(checksum) is not str:
                raise self.malformed(f"it lists {name} without size and checksum")
            records[name] = FileRecord(nbytes, checksum)
        return records

    def _open_file(self, name: str) -> int:
        """Opens a file and compares its size, so that memory can be taken for the size in the manifest."""
        try:
            folder, last = self._place(name)
            fd = open_regular(last, os.O_RDONLY, folder)
        except OSError as error:
            raise self._cannot_open(name, error) from error
        try:
            self._compare_size(name, os.fstat(fd).st_size)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_file(self, name: str) -> None:
        """Compares the size of a file without opening it, for snapshots of very many files."""
        try:
            folder, last = self._place(name)
            status = os.stat(last, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{name} is not a regular file")
        except OSError as error:
            raise self._cannot_open(name, error) from error
        self._compare_size(name, status.st_size)

    def _compare_size(self, name: str, nbytes: int) -> None:
        record = self.files.get(name) if name not in (MARKER, MANIFEST) else None
        if record is not None and nbytes != record.nbytes:
            raise CorruptCheckpointError(self.path(name), f"it has {nbytes} bytes, {record.nbytes} were saved")

    def _cannot_open(self, name: str, error: OSError) -> CorruptCheckpointError:
        return CorruptCheckpointError(self.path(name), f"it cannot be opened ({error.strerror or error})")

    def _place(self, name: str) -> tuple[int, str]:
        """The open folder that holds a file, and the file's name in it."""
        folder, _, last = name.rpartition("/")
        if folder not in self._folders:
            self._folders[folder] = open_folder_below(self._folders[""], folder)
        return self._folders[folder], last

    def _close_folders(self) -> None:
        while self._folders:
            os.close(self._folders.popitem()[1])


def in_parallel(tasks: Iterable[Callable[[], object]], threads: int = THREADS) -> None:
    """Runs tasks in several threads, started in their order; raises the first error after the running tasks ended."""
    with ThreadPoolExecutor(threads, thread_name_prefix="engram-read") as pool:
        running: deque[Future[object]] = deque()
        try:
            for task in tasks:
                running.append(pool.submit(task))
                if len(running) > threads:
                    running.popleft().result()
            while running:
                running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def newest_whole(directory: CheckpointDirectory, damaged: str = "") -> str | None:
    """The newest snapshot whose files all verify, without the one that the file `damaged` belongs to."""
    for name in directory.snapshots():
        if damaged.startswith(directory.path(name, "")):
            continue
        try:
            with SnapshotReader(directory, name) as reader:
                reader.check()
            return name
        except CheckpointError:
            continue
    return None


def _open_current(directory: CheckpointDirectory) -> SnapshotReader:
    for _ in range(_ATTEMPTS):
        pointer = directory.current()
        if pointer is None:
            raise CheckpointError(_no_checkpoint(directory))
        try:
            return SnapshotReader(directory, pointer.snapshot, pointer.manifest)
        except SnapshotGoneError as error:
            if directory.current() == pointer:
                raise CorruptCheckpointError(directory.path(CURRENT), f"it names a snapshot, but {error}") from None
        except CorruptCheckpointError:
            if directory.current() == pointer:  # else a save was removing it
                raise
    raise CheckpointError(f"{directory.root}: saves replaced the snapshot {_ATTEMPTS} times while it was being opened")


def _open_named(directory: CheckpointDirectory, name: str) -> SnapshotReader:
    if not CheckpointDirectory.is_name(name):
        raise ValueError(f"{name!r} is not the name of a snapshot; names look like 'g-000042'")
    try:
        return SnapshotReader(directory, name)
    except SnapshotGoneError as error:
        raise CheckpointError(f"no snapshot {name}: {error}; there are {_snapshot_names(directory)}") from None


def _no_checkpoint(directory: CheckpointDirectory) -> str:
    if not os.path.isdir(directory.root):
        return f"no checkpoint at {directory.root}: there is no such directory"
    message = f"no checkpoint at {directory.root}: there is no {directory.path(CURRENT)}"
    whole = newest_whole(directory)
    return message if whole is None else f"{message}; {_advice(whole)}"


def _snapshot_names(directory: CheckpointDirectory) -> str:
    names = directory.snapshots() if os.path.isdir(directory.root) else []
    return ", ".join(names) if names else "none"


@contextmanager
def _with_advice(directory: CheckpointDirectory) -> Iterator[None]:
    """Adds to a CorruptCheckpointError which snapshot could be loaded instead."""
    try:
        yield
    except CorruptCheckpointError as error:
        whole = newest_whole(directory, error.file)
        raise CorruptCheckpointError(error.file, error.reason, _advice(whole), whole) from error


def _advice(whole: str | None) -> str:
    if whole is None:
        return "no other snapshot there verifies whole"
    return f"the newest snapshot that verifies whole is {whole}: loads(path, snapshot={whole!r})"


@dataclass(frozen=True)
class SnapshotReport:
    """The result for one snapshot: how many files and bytes were compared, and what is damaged."""

    name: str
    in_force: bool
    files: int
    nbytes: int
    problems: tuple[str, ...]
    damaged: tuple[str, ...] = ()  #: names of the files below the snapshot that are not what was saved

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        state = "whole" if self.ok else "; ".join(self.problems)
        return (
            f"{self.name}{' (in force)' if self.in_force else ''}: {self.files} files, {self.nbytes:,} bytes, {state}"
        )


@dataclass(frozen=True)
class VerificationReport:
    """The result of `verify`: a report for each snapshot, newest first, and problems of the directory itself."""

    path: str
    snapshots: tuple[SnapshotReport, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the current snapshot can be loaded."""
        return not self.problems and any(report.in_force and report.ok for report in self.snapshots)

    @property
    def newest_whole(self) -> str | None:
        return next((report.name for report in self.snapshots if report.ok), None)

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.path}: {'whole' if self.ok else 'DAMAGED'}", *self.problems, *map(str, self.snapshots)]
        )


class Checkpoint(CheckpointDirectory):
    """The snapshots at a path, for reading and verifying."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.path.abspath(user_path(path)))

    @contextmanager
    def reading(self, snapshot: str | None = None) -> Iterator[SnapshotReader]:
        """A reader of the current snapshot, or of the one named; no save removes it inside the block.

        Raises:
            CheckpointError: there is none.
            CorruptCheckpointError: from here or from inside the block; it names the damaged file, and the newest
                snapshot that is whole.
        """
        with _with_advice(self):
            reader = _open_current(self) if snapshot is None else _open_named(self, snapshot)
            with reader:
                yield reader

    def verify(self, advance: Callable[[str], object] = lambda file: None) -> VerificationReport:
        """Compares every file of every snapshot with its checksum; damage is reported, not raised.

        Changes nothing; saves may run at the same time. `advance` is called with the name of each file that was
        compared.

        Raises:
            CheckpointError: there is none.
        """
        if not os.path.isdir(self.root):
            raise CheckpointError(f"no checkpoint at {self.root}: there is no such directory")
        pointer, problems = _pointer(self)
        if pointer is None and not problems and not self.snapshots():
            raise CheckpointError(f"no checkpoint at {self.root}: there is no {self.path(CURRENT)}")
        names = self.snapshots()
        if pointer is not None and pointer.snapshot not in names and os.path.isdir(self.path(pointer.snapshot)):
            names = [pointer.snapshot, *names]  # its marker is damaged, which the report says
        every = [_report(self, name, pointer, advance) for name in names]
        reports = tuple(report for report in every if report is not None)
        if pointer is not None and not any(report.in_force for report in reports) and self.current() == pointer:
            problems = (*problems, f"{self.path(CURRENT)} names {pointer.snapshot}, which is not there")
        return VerificationReport(self.root, reports, problems)

    def files(self) -> set[str]:
        """The names of the files and folders that a save wrote.

        Raises:
            CheckpointError: it is being saved or read, or something in it was not written by a save.
        """
        own = {CURRENT, LOCK}
        self.current()  # raises where engram did not write it
        lock = self.path(LOCK)
        if os.path.lexists(lock) and os.lstat(lock).st_size:
            raise CheckpointError(f"{LOCK} is not empty, as engram's is")
        with ExitStack() as locked:
            try:
                if os.path.lexists(lock):
                    locked.callback(_alone(lock).release)
                for name in self.snapshots():
                    own |= {name, *(os.path.join(name, file) for file in _files_of_snapshot(self, name))}
                    locked.callback(_alone(self.path(name, MARKER)).release)  # after the reader has let go of it
            except BlockingIOError as error:
                raise CheckpointError("it is being saved or read") from error
        return own


def verify(path: str | os.PathLike[str], *, advance: Callable[[str], object] = lambda file: None) -> VerificationReport:
    """As `Checkpoint.verify`."""
    return Checkpoint(path).verify(advance)


def _pointer(directory: CheckpointDirectory) -> tuple[Pointer | None, tuple[str, ...]]:
    try:
        return directory.current(), ()
    except CorruptCheckpointError as error:
        return None, (str(error),)


def _report(
    directory: CheckpointDirectory, name: str, pointer: Pointer | None, advance: Callable[[str], object]
) -> SnapshotReport | None:
    """The report for one snapshot; None where a save removed it, or has not finished it."""
    in_force = pointer is not None and pointer.snapshot == name
    if not in_force and not os.path.lexists(directory.path(name, MANIFEST)):
        return None
    try:
        reader = SnapshotReader(directory, name, pointer.manifest if in_force and pointer else None)
    except SnapshotGoneError:
        return None
    except CheckpointError as error:
        return SnapshotReport(name, in_force, 0, 0, (str(error),))
    with reader:
        problems = {}
        for file in reader.files:
            problem = _problem(reader, file)
            if problem is not None:
                problems[file] = problem
            advance(file)
        nbytes = sum(record.nbytes for record in reader.files.values())
        return SnapshotReport(name, in_force, len(reader.files), nbytes, tuple(problems.values()), tuple(problems))


def _problem(reader: SnapshotReader, file: str) -> str | None:
    try:
        reader.check([file])
    except CorruptCheckpointError as error:
        return str(error)
    return None


def _alone(path: str) -> FileLock:
    return FileLock(open_regular(path, os.O_RDWR), exclusive=True)


def _files_of_snapshot(directory: CheckpointDirectory, name: str) -> Iterator[str]:
    """The files of a snapshot, and the folders that they lie in."""
    with SnapshotReader(directory, name) as reader:
        yield from (MANIFEST, MARKER)
        for file in reader.files:
            yield from (file, *(str(folder) for folder in PurePath(file).parents))
