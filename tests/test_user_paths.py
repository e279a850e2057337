"""Files that users name are opened by `engram._system.open_regular`, which no pipe, device or link can hold up."""

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import engram
from contracts.each import each
from engram._system import open_regular

ROOT = Path(engram.__file__).parent
#: What returns a descriptor that was checked, or has no name that a user could give.
CHECKED = ("open_regular", "_open_file", "fd")
#: Flags with which `os.open` never waits and never opens what was there before, or opens a folder.
SAFE_FLAGS = ("O_DIRECTORY", "O_EXCL", "O_TMPFILE")
METHODS = (
    "open", "read_text", "read_bytes", "write_text", "write_bytes", "load", "save", "memmap", "fromfile", "tofile",
    "File", "FileIO", "ParquetFile", "ParquetWriter", "savefig", "savez", "genfromtxt", "loadtxt", "savetxt", "touch",
)  # fmt: skip
#: Receivers of such a method that reach the file system, besides paths, which are told by their names below.
MODULES = ("io", "os", "np", "torch", "h5py", "parquet", "codecs", "gzip")
PURE_PATH = ("read_text", "read_bytes", "write_text", "write_bytes", "touch", "tofile", "savefig")
#: The function, its call, and why it may open what it does by itself.
ALLOWED = {
    ("_system", "boot_id", "open"): "a file of the kernel's",
    ("_system", "_machine_free", "open"): "a file of the kernel's",
    ("_system", "_group_free", "open"): "a file of the kernel's",
    ("_system", "_read", "open"): "a file of the kernel's",
    ("_system", "open_regular", "os.open"): "this is the check",
    ("_hdf5", "opened", "h5py.File"): "a file that is open",
    ("datasets.h5_files", "open_foreign", "h5py.File"): "the descriptor of a file that was checked",
    ("datasets.h5_files", "is_ours", "import_h5py(NEEDED_BY).File"): "the descriptor of a file that was checked",
    ("_hdf5", "__init__", "io.FileIO"): "a new file in the folder of a new snapshot",
    ("_hdf5", "create_checked", "h5py.File"): "a file that is open",
    ("datasets.h5_files", "create_plain", "h5py.File"): "a new file in a new folder",
    ("checkpoint.hooks", "room", "np.memmap"): "a file that is open",
    ("checkpoint.reader", "_copied", "open"): "mode x: a new file",
    ("checkpoint.writer", "_create", "os.open"): "flags with O_EXCL: a new file",
    ("cli.conversion", "_write_json", "file.write_text"): "a new file in a new folder",
    ("cli.own_files", "write_target", "new.write_bytes"): "a new file in a new folder",
    ("cli.tables", "_command_of", "Path(f'/proc/{pid}/cmdline').read_bytes"): "a file of the kernel's",
    ("cli.plots", "png_of_figure", "fig.savefig"): "into memory",
    ("datasets.minari", "write_minari", "(new / 'data' / METADATA).write_text"): "a new file in a new folder",
    ("datasets.parquet", "_is_ours", "import_pyarrow().parquet.ParquetFile"): "a file that is open",
    ("datasets.parquet", "_arrow_file", "parquet.ParquetFile"): "the descriptor of a file that was checked",
    ("datasets.parquet", "_begin", "import_pyarrow().parquet.ParquetWriter"): "a new file in a new folder",
    ("distributed.node_folders", "_began", "Path(f'/proc/{process}/stat').read_text"): "a file of the kernel's",
    ("distributed.node_folders", "_is_abandoned", "mark.touch"): "makes or marks, and reads nothing",
    ("distributed.priority_file", "__init__", "np.memmap"): "a file that is open",
    ("store.locks", "_open_again", "os.open"): "a descriptor of this process",
    ("store.nodes", "_read", "open"): "a file of the kernel's",
    ("store.first_writers", "_opened_anew", "os.open"): "a descriptor of this process",
    ("store.files", "open_passed_store", "os.open"): "a descriptor of this process",
}


def opens(module: str, tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Every call that opens a file by a name: module, function, what is called."""

    waiting: list[tuple[ast.AST, str]] = [(tree, "")]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and is_bare(node):
            yield module, function, ast.unparse(node.func)
        waiting += [(child, function) for child in ast.iter_child_nodes(node)]


def is_bare(call: ast.Call) -> bool:
    func = call.func
    if isinstance(func, ast.Name):
        return func.id in ("open", "FileIO", "memmap") and not is_checked(call.args[0])
    if not isinstance(func, ast.Attribute) or func.attr not in METHODS:
        return False
    receiver = ast.unparse(func.value)
    if receiver == "os" and func.attr == "open":
        return not any(flag in ast.unparse(part) for part in call.args[1:] for flag in SAFE_FLAGS)
    if func.attr in PURE_PATH or func.attr in ("File", "ParquetFile", "ParquetWriter"):
        return True
    return receiver in MODULES or receiver.startswith("Path(") or receiver.endswith(("path", "place"))


def is_checked(argument: ast.expr) -> bool:
    name = argument.func if isinstance(argument, ast.Call) else argument
    return ast.unparse(name).split(".")[-1] in CHECKED


@pytest.mark.deep
def test_no_file_of_a_user_is_opened_unchecked():
    found = set()
    for file in sorted(ROOT.rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        if not module.startswith("testing."):  # a user's tests, in folders of their own
            found |= set(opens(module, ast.parse(file.read_text())))
    new = sorted(found - ALLOWED.keys())
    assert not new, f"open these with engram._system.open_regular, or say here why not: {new}"
    assert not ALLOWED.keys() - found, "these are no longer there: take them out of ALLOWED"


@each(
    "text",
    [
        "open(path)", "os.open(path, os.O_RDONLY)", "Path(path).open()", "Path(path).read_text()", "place.read_bytes()",
        "np.load(path)", "torch.load(path)", "h5py.File(path)", "io.open(path)", "open(os.path.join(a, b), 'rb')",
        "file.write_text(text)", "np.memmap(path)", "figure.savefig(path)",
    ],
)  # fmt: skip
def test_the_check_finds_each_way_to_open_a_file(text):
    assert list(opens("module", ast.parse(text)))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)  # to bind one takes a short path


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


PLANTS = [pipe, bound_socket, device, loop, Path.mkdir]


@each("plant", PLANTS)
def test_what_is_no_regular_file_is_an_error_at_once(plant, tmp_path):
    plant(tmp_path / "it")
    for follow_links in (False, True):
        with pytest.raises(OSError):
            open_regular(tmp_path / "it", follow_links=follow_links)


def test_the_descriptor_of_a_refused_file_is_closed(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is not a regular file"):
        open_regular(tmp_path / "pipe")
    still_open = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert os.path.realpath(tmp_path / "pipe") not in still_open


def test_a_link_to_a_file_is_followed_where_a_user_names_it_and_nowhere_else(tmp_path):
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    with open(open_regular(tmp_path / "link", follow_links=True), "rb") as file:
        assert file.read() == b"content"
    with pytest.raises(OSError):
        open_regular(tmp_path / "link")
