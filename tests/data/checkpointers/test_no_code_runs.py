"""No code runs on load: nothing on that path can execute, import, or make an object that a file names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import engram
from contracts.each import each

ROOT = Path(engram.__file__).parent

# By the last name of what is called, whatever it is called on.
EXECUTES = {
    *("eval", "exec", "compile", "execfile", "__import__", "import_module", "run_module", "run_path", "breakpoint"),
    *("Unpickler", "unpickle", "find_class", "__reduce__", "__reduce_ex__", "system", "popen", "Popen"),
    *("execv", "execve"),
    *("attrgetter", "methodcaller", "get_type_hints", "literal_eval", "safe_load", "yaml_load", "spawnv"),
}  # fmt: skip
MODULES = {
    *("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "importlib"),
    *("runpy", "pydoc", "subprocess", "code", "codeop", "ctypes", "pkgutil", "imp", "yaml", "copyreg"),
}  # fmt: skip
# `torch.load`, `np.load`, ... by what they are called on; `TensorDict.load` and the like read pickles.
LOADERS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("TensorDict", "load"), ("TensorDict", "load_memmap"),
           ("np", "fromfile"), ("torch", "from_file"), ("tensordict", "load"), ("torch", "jit")}  # fmt: skip
H5_OBJECTS = {"string_dtype", "vlen_dtype", "ref_dtype", "special_dtype", "regionref_dtype", "Reference"}
# What else needs them, and reads no file: the system's renameat2, for which Python has no function; "module:Name" of a
# gymnasium environment, which its caller gives; functions on their way to the worker processes of this program; what
# `pickle` and `copy` of a buffer, which the user calls, ask of it; the path to a method of a gymnasium environment, as
# a transform names it; `torch.compile` of a user's policy; the hook that sees TorchRL being imported; the sampler that
# a transform makes for its caller, from a package above its own; names of a package whose modules are imported when
# they are used, from a table that stands in the code; calls of a shard, which Ray or torch would send by pickle, too;
# modules under other paths, from a table; a module below gymnasium, which the caller names, and `ale_py`; copies of an
# environment for the worker processes of this program, and the errors that come back from them; texts of an HDF5 file
# that is written; `eval` of a module.
NEEDED = {
    "_system.py": ["import ctypes"],  # memfd_create of libc, for Pythons without it
    "_aliases.py": [
        *("import importlib", "import importlib.util", "import importlib.abc", "import importlib.machinery"),
        "importlib.import_module",
    ],
    "collectors/evaluator.py": ["import pickle", ".eval"],
    "collectors/makers.py": ["import pickle"],
    "envs/libs/gym.py": ["import importlib", "importlib.import_module"],
    "cli/__init__.py": ["import importlib", ".import_module"],
    "data/__init__.py": ["import importlib", "importlib.import_module"],
    "datasets/atomic_files.py": ["import ctypes"],
    "datasets/h5_files.py": [".string_dtype", ".string_dtype"],
    "distributed/ray_buffer.py": ["import pickle"],
    "distributed/rpc.py": ["operator.methodcaller"],
    "distributed/rpc_buffer.py": ["import pickle", "operator.methodcaller"],
    "envs/gym.py": [".attrgetter"],
    "envs/policies.py": ["torch.compile"],
    "specs/torchrl.py": ["import importlib.abc", "import importlib.machinery"],
    "envs/gym_make.py": ["import importlib", "importlib.import_module", "importlib.import_module"],
    "processes/worker.py": ["import pickle", "import cloudpickle"],
    "data/replay_buffers/storages/base.py": ["object.__reduce_ex__"],
    "_copies.py": ["object.__reduce_ex__", ".__reduce_ex__"],
}
# Functions that compute the name of an attribute, and where the name comes from: never from a file.
COMPUTED = {
    ("_advice.py", "advised"): "the names in the table that stands there, at import",
    ("_system.py", "advise_disk"): "the functions that call it",
    ("checkpoint/hooks.py", "_apply"): "names that stand there",
    ("store/episodes.py", "_query"): "the methods that call it",
    ("_checks.py", "attribute"): "the functions that call it, in which paths stand",
    ("data/replay_buffers/samplers/base.py", "_call"): "the methods that call it",
    ("data/replay_buffers/samplers/base.py", "__get__"): "the settings that stand there, at import",
    ("data/replay_buffers/samplers/base.py", "__set__"): "the settings that stand there, at import",
    ("data/replay_buffers/samplers/slices.py", "_rule_now"): "settings that stand there and that a child has anew",
    ("data/replay_buffers/samplers/epochs.py", "of_earlier_pickle"): "a table that stands there",
    ("data/replay_buffers/writers/round_robin.py", "_optional"): "the functions that call it",
    ("data/replay_buffers/scheduler.py", "__init__"): "the caller, who names a setting of his sampler",
    ("data/replay_buffers/scheduler.py", "_set"): "the caller, who names a setting of his sampler",
    ("data/replay_buffers/storages/users.py", "__getattr__"): "a user's own writer, which asks for an attribute",
    ("transforms/torchrl.py", "__getattr__"): "the transform, which asks for an attribute of the environment",
    ("transforms/base.py", "state_settings"): "_state_settings of the class",
    ("transforms/adapters.py", "_methods"): "the methods that stand there",
}

# The contracts in `testing` send parts to other processes, and load nothing.
FILES = sorted(file for file in ROOT.rglob("*.py") if file.parent.name != "testing")


def name_of(node: ast.AST) -> tuple[str, str]:
    """What something is called on, and its last name."""
    if isinstance(node, ast.Attribute):
        return (node.value.id if isinstance(node.value, ast.Name) else "", node.attr)
    return ("", node.id) if isinstance(node, ast.Name) else ("", "")


def found_in(tree: ast.AST) -> Iterator[str]:
    """Everything in a file that could run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = {alias.name for alias in node.names} | {module}
            yield from (f"import {name}" for name in names if name.split(".")[0] in MODULES)
            yield from (f"from {module} import {n}" for n in names if (module, n) in LOADERS or n in H5_OBJECTS)
        elif isinstance(node, ast.Call):
            owner, name = name_of(node.func)
            if (name in EXECUTES and owner != "re") or (owner, name) in LOADERS or name in H5_OBJECTS:
                yield f"{owner}.{name}"
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield "allow_pickle"
                if keyword.arg == "weights_only":
                    yield "weights_only"
        elif isinstance(node, ast.Attribute) and (name_of(node) in LOADERS or node.attr in H5_OBJECTS):
            yield ".".join(name_of(node))


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in FILES}


@pytest.mark.deep
@each("file", FILES)
def test_nothing_in_the_package_can_run_what_it_reads(file: Path, trees: dict[Path, ast.Module]) -> None:
    assert list(found_in(trees[file])) == NEEDED.get(str(file.relative_to(ROOT)), [])


@each("code",
    [
        "import pickle", "from pickle import loads", "import importlib.util", "importlib.import_module(n)", "eval(x)",
        "exec(x)", "builtins.eval(x)", "__import__(x)", "torch.load(f)", "np.load(f)", "load = torch.load",
        "read(f, allow_pickle=True)", "read(f, allow_pickle=flag)", "h5py.string_dtype()", "from h5py import Reference",
        "os.system(x)", "pickle.Unpickler(f)", "from torch import load", "from numpy import load as read_it",
    ])  # fmt: skip
def test_the_search_finds_what_it_looks_for(code: str) -> None:
    assert list(found_in(ast.parse(code)))


# ---- attributes by names that are not in the code ----
def computed(tree: ast.AST) -> Iterator[str]:
    """Functions that read, set or call attributes whose names they compute from what no string in them says."""

    stack: list[tuple[ast.AST, str, ast.AST]] = [(tree, "", tree)]
    while stack:
        node, inside, function = stack.pop()
        if isinstance(node, ast.FunctionDef):
            inside, function = node.name, node
        if isinstance(node, ast.Call) and is_computed(node, function):
            yield inside
        stack += [(child, inside, function) for child in ast.iter_child_nodes(node)]


def is_computed(call: ast.Call, inside: ast.AST) -> bool:
    """Whether a call finds something by a name that is none of the strings in the code."""
    function = name_of(call.func)[1]
    if function in ("globals", "locals"):
        return True
    if function not in ("getattr", "setattr", "vars") or len(call.args) < 2:
        return False
    name = call.args[1]
    return not isinstance(name, ast.Constant) and ast.unparse(name) not in literals(inside)


def literals(tree: ast.AST) -> set[str]:
    """Variables that only ever go over strings that stand in the code (or over what this file's constants hold)."""
    found, other = set(), set()
    for node in ast.walk(tree):
        pairs = []
        if isinstance(node, ast.For | ast.comprehension):
            pairs = [(node.target, node.iter)]
        for target, source in pairs:
            names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
            (found if is_literal(source) else other).update(names)
    return found - other


def is_literal(node: ast.AST) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return all(is_literal(e.value if isinstance(e, ast.Starred) else e) for e in node.elts)
    return (isinstance(node, ast.Constant)) or (isinstance(node, ast.Name) and node.id.isupper())


@pytest.mark.deep
def test_on_the_loading_path_no_attribute_is_named_by_what_was_read(trees: dict[Path, ast.Module]) -> None:
    """Names that are computed go over strings that stand in the code, but for those that are listed above."""
    found = set()
    for part in ("data/replay_buffers", "transforms", "store", "checkpoint", "interop", "ted", "*.py"):
        for file in sorted((ROOT / part).rglob("*.py") if "." not in part else ROOT.glob(part)):
            found |= {(str(file.relative_to(ROOT)), where) for where in computed(trees[file])}
    assert found == set(COMPUTED)
