"""Folders of shards in a node's memory: the owner of each, and removing those whose owner is gone for good."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from engram.distributed.folder_lock import remove_folder
from engram.kernel.tools import open_regular

PREFIX = "engram-"
_OWNER = "owner.json"
_ABANDONED = "abandoned"  # made when no process of its cluster was found here
_MOST_JSON = 1 << 16  # bytes; any user may put a folder there
_GRACE = 600.0  # seconds in which a node that went down may join its cluster again, and continue with its rows
_ANSWER = 1.0  # seconds that the head of a cluster has to answer


@dataclasses.dataclass(frozen=True)
class FolderOwner:
    """The actor to which a folder belongs; Ray may start it again, so it may live while it has no process.

    Attributes:
        cluster: the address of its Ray cluster; `namespace` and `name`: of the actor there.
        parent: the process that starts it on this node, and when that itself began, in ticks since the boot.
        processes: the namespace in which that process has its number.
    """

    cluster: str
    namespace: str
    name: str
    parent: tuple[int, int]
    processes: str

    @classmethod
    def of_this_process(cls, cluster: str, namespace: str, name: str) -> FolderOwner:
        """The owner whose actor is this process."""
        return cls(cluster, namespace, name, (os.getppid(), _began(os.getppid()) or 0), _process_namespace())

    @property
    def has_parent(self) -> bool:
        """Whether the process lives that would start the actor again here; True where that cannot be seen."""
        return self.processes != _process_namespace() or _began(self.parent[0]) == self.parent[1]


def claim_folder(folder: Path, owner: FolderOwner) -> None:
    """Makes a folder, and writes its owner into it."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{_OWNER}.new"
    with open(open_regular(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        json.dump(dataclasses.asdict(owner), file)
    aside.replace(folder / _OWNER)
    (folder / _ABANDONED).unlink(missing_ok=True)


def remove_abandoned_folders(
    memory: Path, cluster: str, lives: Callable[[FolderOwner], bool], grace: float = _GRACE
) -> list[Path]:
    """Removes folders of shards that were killed and will not start again; returns them.

    A folder is removed if no process holds its lock and its actor is gone for good. An actor of this cluster is gone
    when the cluster no longer knows it. One of another cluster is gone when the process is that would start it again
    here, and with it the cluster, whose head was on this machine; or when that process was gone at an earlier call,
    `grace` seconds ago, too. In doubt a folder stays.

    Args:
        cluster: the address of this process's Ray cluster.
        lives: whether the actor of this cluster lives, or is being started again.
    """
    removed = []
    for folder in sorted(memory.glob(f"{PREFIX}*")):
        owner = _owner_of(folder)
        if owner is None or owner.processes != _process_namespace():
            continue
        is_gone = not lives(owner) if owner.cluster == cluster else _is_abandoned(folder, owner, grace)
        if is_gone and remove_folder(folder):
            removed.append(folder)
    return removed


def _is_abandoned(folder: Path, owner: FolderOwner, grace: float) -> bool:
    """Whether a folder of another cluster has been without its process for so long."""
    if owner.has_parent:
        return False
    if _has_ended(owner.cluster):
        return True
    mark = folder / _ABANDONED
    try:
        if not mark.exists():
            mark.touch()
        return time.time() - mark.stat().st_mtime >= grace
    except OSError:  # another user's
        return False


def _has_ended(cluster: str) -> bool:
    """Whether the head of a cluster, by its address, was a process of this machine, and there is none any more."""
    host, _, port = cluster.rpartition(":")
    host = host.strip("[]")
    try:
        at = (host, int(port))
        if not 0 < at[1] < 1 << 16:
            return False
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as own:
            own.bind((host, 0))  # only an address of this machine can be taken
        with socket.create_connection(at, timeout=_ANSWER):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False


def _owner_of(folder: Path) -> FolderOwner | None:
    try:
        with open(open_regular(folder / _OWNER), "rb") as file:
            state = json.loads(file.read(_MOST_JSON))
        return FolderOwner(**{**state, "parent": tuple(state["parent"])})
    except (OSError, ValueError, KeyError, TypeError):  # another's, older, or just being made
        return None


def _process_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _began(process: int) -> int | None:
    """The start of a process, in ticks since the boot; None: it does not exist, or is a zombie."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
