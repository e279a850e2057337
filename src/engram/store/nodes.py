"""Which machine (node) uses a store, and on what file system it lies.

Memory maps of several nodes are not coherent on a network file system: a store there has one node at a time.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import engram._native as _native
from engram._text import warn_user
from engram.errors import StorageInUseError

#: `f_type` of statfs(2) of file systems that several nodes, or a virtual machine and its host, may have mounted.
NETWORK_FILE_SYSTEMS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x0BD00BD0: "Lustre",
    0x00C36400: "Ceph",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x20030528: "OrangeFS",
    0xAAD7AAEA: "PanFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x564C: "NCP",
    0x65735546: "FUSE",  # virtiofs has the same number
    0x01021997: "9P",
    0x786F4256: "VirtualBox shared folders",
    0xBACBACBC: "VMware shared folders",
    0x7C7C6673: "Parallels shared folders",
}

#: Where hardware and hypervisors say which machine this is. All containers of a machine read the same; virtual machines
#: made of one image read different ones. What an image or a container has of its own is left out: the machine id
#: (/etc/machine-id) and the host name.
_HARDWARE = ("/sys/class/dmi/id/product_uuid", "/sys/hypervisor/uuid", "/proc/device-tree/serial-number")
#: Placeholders of makers that number no machine.
_PLACEHOLDERS = {
    "03000200-0400-0500-0006-000700080009",
    "00020003-0004-0005-0006-000700080009",
    "12345678-1234-5678-90ab-cddeefaabbcc",
}
_FEW_DIGITS = 4  # of an id: all zeros, all ones and such


def network_file_system(fd: int) -> str | None:
    """The kind of the network file system that a file lies on; None: it is on none that is known."""
    return NETWORK_FILE_SYSTEMS.get(_native.file_system_type(fd))


def host_id(boot: bytes) -> bytes:
    """16 bytes that are this node's, if possible also after it has started again; zeros where nothing says so.

    Of its hardware, where this process may read that (of most PCs and virtual machines root may); else of its boot id
    (`boot`): then the node is another one after it has started again.
    """
    for path in _HARDWARE:
        number = _read(path)
        if number not in _PLACEHOLDERS and len(set(number) - {"-"}) > _FEW_DIGITS:
            return hashlib.blake2b(number.encode(), digest_size=16, person=b"engram hardware").digest()
    return hashlib.blake2b(boot, digest_size=16, person=b"engram boot").digest() if any(boot) else bytes(16)


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(256).decode(errors="replace").strip("\0 \n").lower()
    except OSError:
        return ""


def note_node(store: _native.Store, boot: bytes) -> None:
    """Writes into the header that this node uses the store, in the boot with this id."""
    store.boot_id, store.host_id = boot, host_id(boot)


def refuse_other_node(store: _native.Store, boot: bytes, fd: int, path: Path) -> None:
    """A StorageInUseError for a store on a network file system that another node has open, or left open.

    The header of an older engram does not say which node that was: such a store is opened.
    """
    kind = network_file_system(fd)
    if kind is None or store.clean or not any(store.host_id):
        return
    if (any(boot) and store.boot_id == boot) or store.host_id == host_id(boot):
        return
    raise StorageInUseError(
        f"{path} lies on {kind}, and another node has it open, or stopped without closing it (or this one did, and has "
        f"started again since; boot {store.boot_id.hex()} there, {boot.hex()} here). Two nodes would lose each other's "
        "rows: close it there. If no process uses it there any more, open it for writing with take_over=True, which "
        "drops rows that were left torn"
    )


def warn_of_network(fd: int, path: Path) -> None:
    """Warns where a store that is to be written lies on a network file system."""
    kind = network_file_system(fd)
    if kind is not None:
        warn_user(
            f"{path} lies on {kind}: memory maps of several nodes are not coherent there. All processes that use it "
            "must run on one node at a time; another node is refused until it is closed, or opens it with "
            "take_over=True. Rows that were flushed or closed are as safe as the file server keeps them. For writers "
            "on several nodes see engram.distributed; a local disk is faster",
            RuntimeWarning,
        )
