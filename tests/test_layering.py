"""Imports point down the list of the parts only."""

import ast
import functools
import importlib
from pathlib import Path

import pytest

import engram
import walls
from contracts.each import each

pytestmark = pytest.mark.deep  # as what else is said of all sources

ROOT = Path(engram.__file__).parent
BUFFERS = "engram.data.replay_buffers"
# From the top to the bottom: who stands on a line may import from its own line and from those below. A name stands for
# the module and everything in it; the longest name that fits counts.
LAYERS = [
    ["engram", "engram.cli", "engram.compat", "engram.distributed"],
    ["engram.datasets", "engram.testing"],
    ["engram.kernel.collecting"],
    ["engram.collectors"],
    ["engram.kernel.replay"],
    ["engram.data"],  # the public names
    [BUFFERS],
    ["engram.envs"],
    [f"{BUFFERS}.scheduler"],
    [f"{BUFFERS}.buffers"],
    [f"{BUFFERS}.reading"],
    [f"{BUFFERS}.samplers", f"{BUFFERS}.writers"],
    [f"{BUFFERS}.storages"],
    [f"{BUFFERS}.checkpointers", f"{BUFFERS}.state"],
    ["engram._progress", "engram.interop"],
    ["engram.kernel"],  # of rows and files
    ["engram.checkpoint"],
    ["engram.processes"],
    [f"{BUFFERS}.utils"],  # the conversions under their public path
    ["engram.ted"],
    ["engram.store"],
    ["engram.transforms"],
    ["engram.data.specs"],
    ["engram._hdf5"],
    ["engram.specs"],
    ["engram._arguments", "engram.pytree"],
    ["engram._generator", "engram._system"],
    ["engram._native"],
    ["engram.errors"],
    [
        "engram._advice",
        "engram._aliases",
        "engram._checks",
        "engram._copies",
        "engram._figures",
        "engram._forms",
        "engram._overrides",
        "engram._providers",
        "engram._packages",
        "engram._text",
    ],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
#: Parts around the kernel. They use what users import, the kernel's edge and each other.
SATELLITES = ("_progress", "cli", "compat", "datasets", "distributed", "interop", "testing")
#: What users import, of which satellites use the names in `__all__`; so they do of the modules below `engram.kernel`.
FACES = {f"engram.{name}" for name in ("collectors", "data", "envs", "envs.transforms", "envs.utils", "specs")}
FACES |= {f"{BUFFERS}.checkpointers", f"{BUFFERS}.storages"}
OPEN = ("engram.errors", "engram.pytree")  # of which they use every name
# Optional packages, and the only files that import each.
OWNERS = {
    "cloudpickle": ("processes/worker.py",),
    "dm_control": ("libs/dm_control.py",),
    "gymnasium": ("compat/cleanrl.py", "compat/sb3.py", "compat/transitions.py", "envs/gym_make.py", "specs/spaces.py"),
    "PIL": ("cli/film.py",),
    "h5py": ("engram/_hdf5.py",),
    "imageio": ("cli/film.py",),
    "matplotlib": ("cli/plots.py",),
    "minari": ("datasets/experience_replay.py",),
    "pyarrow": ("datasets/parquet.py",),
    "ray": ("distributed",),
    "rich": ("engram/_progress.py", "cli/main.py", "cli/terminal.py"),
    "shimmy": ("libs/dm_control.py",),
    "stable_baselines3": ("compat/sb3.py",),
    "tianshou": ("compat/tianshou.py",),
    "typer": ("cli/main.py",),
}


def level_of(module: str) -> int | None:
    parts = module.split(".")
    for k in range(len(parts), 0, -1):
        name = ".".join(parts[:k])
        if name in LEVEL:
            # An unknown part of a package stands nowhere.
            return LEVEL[name] if k == len(parts) or name not in ("engram", "engram.data", BUFFERS) else None
    return None


def modules() -> dict[str, Path]:
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        name = ".".join(("engram", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        found[name] = file
    return found


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@pytest.fixture(scope="module", autouse=True)
def trees_of_this_module():
    """They end with it: each later look for garbage would go through a million nodes."""
    yield
    parsed.cache_clear()


@functools.cache
def imports(file: Path) -> set[str]:
    """Modules that a file imports, `if TYPE_CHECKING` apart."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            return  # no statement lies below it
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                assert full != "engram._native", f"{file}: write `import {full} as _native`"
                found.add(full if full in MODULES else str(node.module))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parsed(file))
    return found


MODULES = modules()


@each("module", MODULES)
def test_imports_point_down(module):
    mine = level_of(module)
    assert mine is not None, f"{module} has no place in LAYERS: give it one"
    wrong = []
    for name in imports(MODULES[module]):
        if name.split(".")[0] != "engram" or name == "engram" or same_room(name, module):
            continue  # anybody may ask for the version
        level = level_of(name)
        assert level is not None, f"{module} imports {name}, which has no place in LAYERS"
        if level < mine:
            wrong.append(name)
    assert not wrong, f"{module} imports from above: {wrong}"


def is_satellite(module: str) -> bool:
    return any(f"{module}.".startswith(f"engram.{name}.") for name in SATELLITES)


@each("module", [module for module in MODULES if is_satellite(module)])
def test_satellites_use_public_names_of_the_kernel_only(module):
    wrong = []
    for node in ast.walk(parsed(MODULES[module])):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(str(node.module), alias.name) for alias in node.names]
        else:
            continue
        wrong += [f"{place}: {name}" for place, name in names if not may_be_used(place, name)]
    assert not wrong, f"{module} uses names of the kernel's inside; engram.kernel lists those that it may use: {wrong}"


def may_be_used(place: str, name: str) -> bool:
    full = f"{place}.{name}"
    if place.split(".")[0] != "engram" or is_satellite(place) or is_satellite(full) or {place, full} & {*OPEN}:
        return True
    if place == "engram":
        return name in ("__version__", "load") or full in FACES
    is_public = place in FACES or place.startswith("engram.kernel.")
    return is_public and name in importlib.import_module(place).__all__


def test_the_kernel_imports_no_satellite():
    for module, file in MODULES.items():
        if module != "engram" and not is_satellite(module):
            above = {name for name in imports(file) if is_satellite(name)}
            assert not above, f"{module} imports {above}"


def test_modules_are_imported_by_import_statements_only():
    """`importlib` hides an arrow from these tests: the kernel uses it for other packages and tables of names alone."""
    using = {module for module, file in MODULES.items() if "importlib" in imports(file)}
    assert using <= {
        "engram._aliases",
        "engram.cli",
        "engram.data",
        "engram.envs.gym_make",
        "engram.envs.libs.gym",
    }


def same_room(a: str, b: str) -> bool:
    return level_of(a) == level_of(b)


def test_modules_of_one_line_import_each_other_in_no_circle():
    edges = {m: {n for n in imports(f) if n in MODULES and n != m} for m, f in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle of imports: {' -> '.join((*path, module))}"
        if module not in done:
            for name in edges[module]:
                visit(name, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())


@each("package", OWNERS)
def test_an_optional_package_is_imported_by_its_owners_only(package):
    for module, file in MODULES.items():
        if not any(owner in str(file) for owner in OWNERS[package]):
            assert package not in {name.split(".")[0] for name in imports(file)}, module


@each("engine", ["store", "checkpoint", "processes", "ted", "interop"])
def test_engines_know_no_buffer(engine):
    for module, file in MODULES.items():
        if module.startswith(f"engram.{engine}."):
            above = {
                name for name in imports(file) if name.startswith(("engram.data", "engram.collectors", "engram.envs"))
            }
            assert not above, f"{module} imports {above}"


def test_checkpointers_see_no_storage_class():
    for module, file in MODULES.items():
        if module.startswith((f"{BUFFERS}.checkpointers", f"{BUFFERS}.state.checkpointers")):
            tables = {"engram.store.packed_rows", "engram.store.columnar_rows"}
            assert not any("storages" in name or name in tables for name in imports(file)), module


def test_nobody_imports_torchrl():
    for module, file in MODULES.items():
        assert "torchrl" not in {name.split(".")[0] for name in imports(file)}, module


#: What shows something to a person: progress, and the command.
SHOWING = ("engram._progress", "engram.cli.terminal")


def test_the_library_prints_nothing():
    for module, file in MODULES.items():
        calls = [node.func for node in ast.walk(parsed(file)) if isinstance(node, ast.Call)]
        names = {func.id for func in calls if isinstance(func, ast.Name)}
        assert "print" not in names or module in SHOWING, module


def test_there_is_one_logger():
    for module, file in MODULES.items():
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
                assert ast.unparse(node) == "logging.getLogger('engram')", module


#: What `make walls` counted last: none of it may grow, and where it shrinks, the new number goes here.
WALLS = {
    "copy and pickle dunders": 10,
    "constructors of 20 arguments": 4,
    "probes by identity of a method": 0,
    "hasattr and getattr": 86,
    "classes of 45 methods": 8,
    "uses of another object's private name": 30,
    "class flags that others ask": 2,
    "classes with __init_subclass__": 4,
    "classes of tables and of their rows": 13,
    "classes of places": 13,
    "questions whether anything is written": 53,
    "questions whether rows have a layout": 77,
    "time_dim, batch_dims, index_key below buffers": 144,
    "is_ours and BUILT_IN": 32,
    "unused_since_fork": 9,
}


def test_classes_use_no_more_of_each_others_inside_than_before():
    now = walls.count(ROOT, parsed)
    grown = {what: f"{now[what]}, was {most}" for what, most in WALLS.items() if now[what] > most}
    assert not grown, f"exchange data between the parts instead (docs/architecture.md): {grown}"
    assert now == {**now, **WALLS}, "fewer than before: write the new numbers into WALLS"
