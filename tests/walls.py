"""Counts how porous the walls between classes are: `make walls`. `test_layering` keeps what it counts from growing."""

from __future__ import annotations

import ast
import collections
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

COPIES = {"__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__deepcopy__", "__copy__"}
# Private names of TorchRL, torch, tensordict, gymnasium, tianshou or the standard library: their users rely on them.
THEIRS = frozenset(
    re.findall(
        r"\w+",
        """
        _replace _asdict _fields _make _tensordict _cursor _sampler _writer _storage _storages
        _inv_call _call _inv_apply_transform _apply_transform _step _reset _set_seed _transform
        _transforms _collate_fn _is_full _get_cursor _set_cursor _empty _C _sum_tree _min_tree
        _max_priority _current_top_values _sample_list _env _specs _new_unsafe _batch_size
        _td_dim_names _device _is_locked _parent _base _modules _buffers _parameters _getframe _exit
        _tensor _rng _len _init _ragged_idx _meta _save_only_last_obs _set_batch_for_children
        _is_zerotensor _functorch _from_tensordict _get_str _version _reset_env_preprocess
        _dispatch_keys _neg_view _cdata _non_tensordict _reconstruct
        """,
    )
)
WIDE = 20  # arguments of a constructor
MANY = 45  # methods in the body of a class
#: The classes at which families of tables begin: that of a storage, and that of the kinds of its rows.
TABLES = ("Table", "TableRows")
#: The class at which the family of places begins.
PLACES = ("Place",)
#: The question that only the file of a table's life should ask.
WRITTEN, LIFE = "questions whether anything is written", "store/table.py"
#: Words whose number shows how many places know one thing, and the files in which they are counted, below `engram`.
WORDS = {
    "time_dim, batch_dims, index_key below buffers": (
        re.compile(r"\b(?:time_dim|batch_dims|index_key)\b"),
        re.compile(r"store/|data/replay_buffers/(?!buffers/)"),
    ),
    "is_ours and BUILT_IN": (re.compile(r"\b(?:is_ours|BUILT_IN)\b"), re.compile(r"(?!datasets/|cli/)")),
    "unused_since_fork": (re.compile(r"\bunused_since_fork\b"), re.compile("")),
}


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def count(root: Path, parsed: Callable[[Path], ast.Module] = parsed) -> dict[str, int]:
    """What the sources below a folder `engram` show, without importing them. `parsed`: what has parsed them already."""
    now: collections.Counter[str] = collections.Counter()
    flags: set[str] = set()
    asked: collections.Counter[str] = collections.Counter()
    bases: dict[str, set[str]] = {}
    for file in sorted(root.rglob("*.py")):
        text = file.read_text()
        inside = file.relative_to(root).as_posix()
        for what, (pattern, where) in WORDS.items():
            now[what] += len(pattern.findall(text)) * bool(where.match(inside))
        now["Python files"] += 1
        now["lines"] += text.count("\n")
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Attribute):
                if _is_private(node.attr) and not _is_own(node.value):
                    now["uses of another object's private name"] += 1
                if not _is_own(node.value) and isinstance(node.ctx, ast.Load):
                    asked[node.attr] += 1
                now[WRITTEN] += inside != LIFE and node.attr == "initialized"
            elif isinstance(node, ast.Compare):
                now["probes by identity of a method"] += _is_probe(node)
                now[WRITTEN] += inside != LIFE and _asks_whether_written(node)
                now["questions whether rows have a layout"] += _is_compared(node, "None") == "layout"
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                now["hasattr and getattr"] += node.func.id in ("hasattr", "getattr")
                now[WRITTEN] += inside != LIFE and "Unwritten" in ast.unparse(node)
            elif isinstance(node, ast.FunctionDef):
                now["copy and pickle dunders"] += node.name in COPIES
                arguments = len(node.args.args + node.args.kwonlyargs)
                now[f"constructors of {WIDE} arguments"] += node.name == "__init__" and arguments >= WIDE
            elif isinstance(node, ast.ClassDef):
                own = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
                now[f"classes of {MANY} methods"] += len(own) >= MANY
                now["classes with __init_subclass__"] += "__init_subclass__" in own
                flags |= {name for part in node.body for name in _flags(part)}
                if inside.startswith(("store/", "data/replay_buffers/storages/")):
                    bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    now["class flags that others ask"] = sum(1 for name in flags if asked[name])
    now["classes of tables and of their rows"] = len(_families(bases, TABLES))
    now["classes of places"] = len(_families(bases, PLACES))
    return dict(now)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in THEIRS


def _is_own(value: ast.expr) -> bool:
    if isinstance(value, ast.Name):
        return value.id in ("self", "cls", "_native")
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super"


def _is_probe(node: ast.Compare) -> bool:
    """`type(x).get is not Storage.get`."""
    sides = [node.left, *node.comparators]
    names = {side.attr for side in sides if isinstance(side, ast.Attribute)}
    is_identity = isinstance(node.ops[0], ast.Is | ast.IsNot)
    return is_identity and len(sides) == 2 and len(names) == 1 and all(isinstance(s, ast.Attribute) for s in sides)


def _asks_whether_written(node: ast.Compare) -> bool:
    """`lanes is None`, `x.store is not None`, `rows is self._unwritten`."""
    return _is_compared(node, "None") in ("lanes", "store", "made") or bool(_is_compared(node, "self._unwritten"))


def _is_compared(node: ast.Compare, with_what: str) -> str:
    """The last name of what is compared by identity with this; "": nothing is."""
    asked = node.left.attr if isinstance(node.left, ast.Attribute) else getattr(node.left, "id", "")
    by_identity = isinstance(node.ops[0], ast.Is | ast.IsNot)
    return asked if by_identity and ast.unparse(node.comparators[0]) == with_what else ""


def _families(bases: dict[str, set[str]], heads: tuple[str, ...]) -> set[str]:
    """The classes at the heads of families, and all that inherit from them."""
    found = set(heads)
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def _flags(node: ast.stmt) -> list[str]:
    """Names that a statement in the body of a class sets to True or False."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and "ClassVar" in ast.unparse(node.annotation):
        targets, value = [node.target], node.value
    else:
        return []
    is_flag = isinstance(value, ast.Constant) and isinstance(value.value, bool)
    return [target.id for target in targets if isinstance(target, ast.Name)] if is_flag else []


def methods() -> dict[str, tuple[int, int]]:
    """Methods and properties of the central classes, inherited ones counted, dunders apart: all, and private ones."""
    from engram.data import ReplayBuffer, Sampler, Storage
    from engram.store.rows import TableRows
    from engram.store.table import Table

    found = {}
    for kind in (Storage, Table, TableRows, Sampler, ReplayBuffer):
        names = {
            name
            for parent in kind.__mro__
            if parent.__module__.startswith("engram.")
            for name, value in vars(parent).items()
            if inspect.isroutine(value) or isinstance(value, property | classmethod | staticmethod)
            if not (name.startswith("__") and name.endswith("__"))
        }
        found[kind.__name__] = len(names), sum(name.startswith("_") for name in names)
    return found


if __name__ == "__main__":
    trees = [Path(tree) for tree in sys.argv[1:] or ["."]]
    columns = [count(tree / "src/engram") for tree in trees]
    for what in columns[-1]:
        print(f"  {what:44}" + "".join(f"{column.get(what, 0):>9,}" for column in columns))
    for name, (every, private) in methods().items():
        print(f"  {f'methods of {name}, private ones':44}{every:>9} / {private}")
