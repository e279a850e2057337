"""All mutants of the sources: what is replaced by what, where, and the content by which later versions know them again.

Each mutant is a replacement of some bytes of one file. Left out is what no test can or should tell from the original:
annotations, texts of errors and warnings, asserts, overloads, protocols, decorators, sizes of chunks, times to wait.
Functions that send signals to processes are left out, too: a mutant of one may send them to all.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "==", "in": "not in", "is": "is not"}
NEGATED |= {"not in": "in", "is not": "is"}
BOUNDARY = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
TUNING = re.compile(
    r"(?i)timeout|interval|patience|wait|delay|poll|chunk|buffering|stacklevel|_s$|pays|version|maxsize"
)
UNTESTED = {"strict", "daemon", "indent", "copy", "non_blocking", "flush", "exist_ok"}  # keyword arguments
SILENT = re.compile(
    r"\b(warn\w*|log\w*|debug|collect|sleep|reserve|shrink_to_fit|madvise|\w*prefetch)$"
)  # calls whose loss nobody sees, or only as a text
COMMUTES = {"max", "min", "isinstance", "issubclass", "hasattr", "getattr", "cast", "equal", "gcd", "allclose"}
LINES_EACH, LEAST_LINES, NATIVE_MUTANTS = 150, 200, 150
WEIGHTS = {"raise removed": 2.0, "lock dropped": 8.0}  # how much more often than others they are drawn
SIGNALS = re.compile(r"\bkill(pg)?\(|send_signal|\bumount|setrlimit")


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str  # relative to `src`
    start: int  # bytes
    end: int
    new: str  # what stands there instead
    kind: str
    function: str
    line: int  # of the statement
    at_import: bool
    before: str  # the line, or the lines joined
    after: str
    number: str = ""  # of the content: function, kind, before and after

    @property
    def package(self) -> str:
        parts = Path(self.file).parts[:-1]
        return "native" if parts[0] == "native" else ".".join(parts[:4]).removeprefix("engram.")


class _Source:
    """One file, and what its mutants share."""

    def __init__(self, file: Path, root: Path) -> None:
        self.name = str(file.relative_to(root))
        self.data = file.read_bytes()
        self.starts = [0, *(m.end() for m in re.finditer(rb"\n", self.data))]

    def offset(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def mutant(self, start: int, end: int, new: str, kind: str, function: str, line: int, at_import: bool) -> Mutant:
        first = self.data.rfind(b"\n", 0, start) + 1
        last = self.data.find(b"\n", end)
        texts = [self.data[first:start], self.data[start:end], self.data[end : last if last >= 0 else None]]
        left, old, right = (text.decode() for text in texts)
        right = re.sub(r"\s\s(#|//).*", "", right)
        before, after = (" ".join((left + middle + right).split()) for middle in (old, new))
        new += "\n" * (old.count("\n") - new.count("\n"))  # no line moves
        return Mutant(self.name, start, end, new, kind, function, line, at_import, before, after)


class _Python:
    def __init__(self, source: _Source) -> None:
        self.source = source
        self.found: list[Mutant] = []
        self._walk(ast.parse(source.data), ast.Pass(), (), False)

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source.data[start:end].decode()

    def _span(self, node: ast.AST) -> tuple[int, int]:
        offset = self.source.offset
        return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)

    def _walk(self, node: ast.AST, statement: ast.stmt, scope: tuple[str, ...], inside: bool) -> None:
        """Visits a node of a statement; `inside` is whether a function is being executed there."""
        if isinstance(node, ast.stmt):
            statement = node
        self._statement, self._scope, self._inside = statement, scope, inside
        if self._is_left_out(node):
            return
        match node:
            case ast.Raise():
                return self._add(*self._span(node), "pass", "raise removed")
            case ast.Expr(value=ast.Call(func=called)):
                if SILENT.search(self._text(called)):
                    return None
                self._add(*self._span(node), "pass", "call dropped")
            case ast.With():
                self._lock(node)
            case ast.Compare(ops=[_]):
                self._comparison(node)
            case ast.Call():
                self._arguments(node)
            case ast.Constant():
                self._constant(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defaults = [d for d in [*node.args.defaults, *node.args.kw_defaults] if d is not None]
            for default in defaults:
                self._walk(default, statement, (*scope, node.name), inside)
            for child in node.body:
                self._walk(child, child, (*scope, node.name), True)
            return None
        if isinstance(node, ast.ClassDef):
            scope = (*scope, node.name)
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "decorator_list", "bases"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self._walk(child, statement, scope, inside)

    def _is_left_out(self, node: ast.AST) -> bool:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.JoinedStr():
                return True
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return True
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                return True
            case ast.ClassDef(bases=bases):
                return any(self._text(base).startswith("Protocol") for base in bases)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                decorated = any(self._text(d).endswith(("overload", "abstractmethod")) for d in node.decorator_list)
                contract = self.source.name.startswith("engram/testing") and node.name.startswith("test_")
                return decorated or contract or bool(SIGNALS.search(self._text(node)))
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
                return self._text(target).startswith("__") or bool(TUNING.search(self._text(target)))
            case ast.keyword(arg=name):
                return name is not None and (name in UNTESTED or bool(TUNING.search(name)))
            case ast.Call(func=called):
                return bool(re.search(r"\b(warn\w*|cast|TypeVar|Literal|logg\w+\.\w+)$", self._text(called)))
        return False

    def _add(self, start: int, end: int, new: str, kind: str) -> None:
        function = ".".join(self._scope) or f"<{Path(self.source.name).stem}>"
        line, at_import = self._statement.lineno, not self._inside
        self.found.append(self.source.mutant(start, end, new, kind, function, line, at_import))

    def _comparison(self, node: ast.Compare) -> None:
        start, end = self._span(node.left)[1], self._span(node.comparators[0])[0]
        between = self.source.data[start:end].decode()
        operator = " ".join(between.replace("(", " ").replace(")", " ").split())
        if operator not in NEGATED or operator not in between:
            return
        at = start + between.index(operator)
        constant = isinstance(node.comparators[0], ast.Constant) and isinstance(node.comparators[0].value, str)
        if not (operator == "==" and constant and "__name__" in self._text(node.left)):
            self._add(at, at + len(operator), NEGATED[operator], "comparison swapped")
        if operator in BOUNDARY:
            self._add(at, at + len(operator), BOUNDARY[operator], "boundary off by one")

    def _constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            new = str(not value)
        elif isinstance(value, int):
            new = str(value + 1)
        elif isinstance(value, float) and math.isfinite(value):
            new = repr(2 * value or 1.0)
        else:
            return
        self._add(*self._span(node), new, "constant changed")

    def _lock(self, node: ast.With) -> None:
        start = self._span(node)[0]
        end = self.source.data.index(b":", self._end_of(node.items[-1])) + 1
        for item in node.items:
            text = self._text(item.context_expr)
            locks = re.search(r"(?i)(lock|mutex)$|_exclusive\(|\.held\(\)$", text.split(" if ")[0])
            if locks and item.optional_vars is None:
                rest = [self.source.data[slice(*self._item(i))].decode() for i in node.items if i is not item]
                self._add(start, end, f"with {', '.join(rest)}:" if rest else "if True:", "lock dropped")

    def _item(self, item: ast.withitem) -> tuple[int, int]:
        return self._span(item.context_expr)[0], self._end_of(item)

    def _end_of(self, item: ast.withitem) -> int:
        return self._span(item.optional_vars or item.context_expr)[1]

    def _arguments(self, node: ast.Call) -> None:
        name = self._text(node.func).rsplit(".", 1)[-1]
        if name in COMMUTES or name.endswith(("Error", "refuse")):
            return
        for one, two in zip(node.args, node.args[1:], strict=False):
            plain = not any(isinstance(arg, ast.Starred | ast.Constant | ast.Lambda) for arg in (one, two))
            (start, middle), (after, end) = self._span(one), self._span(two)
            left, right = self._text(one), self._text(two)
            if plain and left != right:
                between = self.source.data[middle:after].decode()
                return self._add(start, end, right + between + left, "arguments swapped")


HERE, ORIGINAL = "@here", "@original"  # in `new` of a native mutant: its numbers, and what it replaces
_OPERATORS = {"<": "l", "<=": "L", ">": "g", ">=": "G", "==": "e", "!=": "n"}
_CALLED = r"(?!if|for|while|return|throw|switch|static_assert|delete)[\w:.]+(?:->[\w:.]+)*"
_CALL = re.compile(rf"^\s*(?:(?:else )?if \(.*\) )?({_CALLED}\(.*\));$")
_SIMPLE = r"([A-Za-z_][\w.]*(?:->\w+)*)"
_SWAP = re.compile(rf"(?<![\w.>:] )(?<![\w.>:])([\w:.]+)\({_SIMPLE}, {_SIMPLE}((?:, {_SIMPLE})*)\)")
_NOT_CODE = re.compile(
    r"^\s*(#|//|template|using |enum |namespace|case )|static_assert|constexpr|\boperator\b|= default|asm|__builtin"
)
_FUNCTION = re.compile(
    r"^(?: {0,4})(?!else|if|for|while|switch|return|do\b|throw)[\w:<>,&*~\s\[\]]*?\b((?:[A-Z]\w*::)?[\w~]+)\([^;]*$"
)
_BOUND = re.compile(r"\.def(?:_\w+)?\(\"(\w+)\"")
_CLASS = re.compile(r"^(?:template.*> )?(?:class|struct) (\w+)")


def _native(source: _Source) -> Iterator[Mutant]:
    """Mutants of C++, written with `mutants.hpp` so that all stand in one build.

    Found by their text; `native.py` leaves out those that do not compile, such as constants of templates.
    """
    function, inside, previous = "", "", ";"
    for row, (start, line) in enumerate(zip(source.starts, source.data.decode().split("\n"), strict=False), 1):
        if found := _CLASS.match(line):
            inside = found[1] + "."
        if line.startswith(("}", "inline", "template")):
            inside = ""
        if (found := _FUNCTION.match(line)) and not found[1].endswith(("sig", "arg", "_error", "_gil")):
            function = inside + found[1].replace("::", ".")  # of a member that is defined outside its class, too
        elif found := _BOUND.search(line):
            function = found[1]
        code = re.sub(r"\"(\\.|[^\"\\])*\"|'(\\.|[^'\\])'", lambda m: "_" * len(m[0]), line)
        code = re.sub(r"\s*//.*", "", code)
        ended, previous = previous.endswith((";", "{", "}", ")", ":")), code.rstrip() or previous
        if _NOT_CODE.search(code) or SIGNALS.search(code) or not line.isascii():
            continue

        def made(at: tuple[int, int], new: str, kind: str, shown: str) -> Mutant:
            where = (start + at[0], start + at[1], shown, kind, f"{Path(source.name).stem}: {function}", row, False)  # noqa: B023
            return dataclasses.replace(source.mutant(*where), new=new)

        for m in re.finditer(r" (<|<=|>|>=|==|!=) ", code):
            at_boundary = m[1] in BOUNDARY and zlib.crc32(code.encode()) & 1  # an operator has one mutant
            other = (BOUNDARY if at_boundary else NEGATED)[m[1]]
            join = "==" if m[1] in ("==", "!=") else "<"
            new = f"{join} ::mutants::At<{HERE}, '{_OPERATORS[m[1]]}', '{_OPERATORS[other]}'>{{}} {join}"
            yield made(m.span(1), new, "boundary off by one" if at_boundary else "comparison swapped", other)
        for m in re.finditer(r"(?<![\w.'])(\d+)(?:u|ull|ul)?(?![\w.'])|\b(true|false)\b", code):
            shown = str(int(m[1]) + 1) if m[1] else {"true": "false", "false": "true"}[m[2]]
            yield made(m.span(), f"::mutants::constant<{HERE}>({ORIGINAL})", "constant changed", shown)
        drop = f"(::mutants::planted<{HERE}>() ? void() : void({ORIGINAL}))"
        if (m := _CALL.match(code)) and ended and not SILENT.search(m[1].split("(")[0]):
            yield made(m.span(1), drop, "call dropped", "")
        if m := re.search(r"\b(throw [^;]+);$", code):
            yield made(m.span(1), f"(::mutants::planted<{HERE}>() ? void() : {ORIGINAL})", "raise removed", "")
        if m := re.search(r"(?:const )?std::lock_guard(?:<.*>)? (\w+)\((.+)\);$", code):
            yield made(m.span(), f"const auto {m[1]} = ::mutants::lock<{HERE}>({m[2]});", "lock dropped", "")
        for m in _SWAP.finditer(code):
            if m[2] != m[3] and m[1].rsplit("::", 1)[-1] not in COMMUTES:
                swapped = f"{m[1]}({m[3]}, {m[2]}{m[4]})"
                new = f"(::mutants::planted<{HERE}>() ? {swapped} : {ORIGINAL})"
                yield made(m.span(), new, "arguments swapped", swapped)


def candidates(root: Path) -> list[Mutant]:
    """All mutants of `root/engram` and `root/native`, each with a number that its content gives."""
    found: list[Mutant] = []
    for file in sorted((root / "engram").rglob("*.py")):
        found += _Python(_Source(file, root)).found
    for file in sorted((root / "native").glob("*.[hc]pp")):
        found += _native(_Source(file, root))
    seen: Counter[tuple[str, ...]] = Counter()
    numbered = []
    for m in found:
        content = (m.function, m.kind, m.before, m.after)
        seen[content] += 1
        number = hashlib.blake2s("\0".join((*content, str(seen[content]))).encode(), digest_size=4).hexdigest()
        numbered.append(dataclasses.replace(m, number=number))
    return numbered


def quotas(root: Path) -> dict[str, int]:
    """How many mutants each file is to have at least, by its lines; and how many all native files together."""
    lines = {str(file.relative_to(root)): file.read_text().count("\n") for file in (root / "engram").rglob("*.py")}
    of_python = {file: n // LINES_EACH for file, n in lines.items() if n > LEAST_LINES}
    return {**of_python, "native": NATIVE_MUTANTS}


def choose(
    found: Iterable[Mutant], count: int, seed: int, kept: Iterable[str] = (), wanted: Mapping[str, int] | None = None
) -> list[Mutant]:
    """`count` mutants: those of `kept` that are left, then as many as `wanted` of each file, then others, of each
    package and kind by the root of its size.

    The order is a function of each mutant's content, so that others take their places only where the source changed.
    Of a file, raises and locks come before others of their rank.
    """
    groups: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    of_files: dict[str, list[Mutant]] = defaultdict(list)
    kept = set(kept)
    for m in found:
        groups[m.package, m.kind].append(m)
        of_files["native" if m.package == "native" else m.file].append(m)

    def place(m: Mutant) -> float:
        drawn = hashlib.blake2s(f"{seed} {m.number}".encode(), digest_size=6).digest()
        return int.from_bytes(drawn, "big") / (WEIGHTS.get(m.kind, 1.0) * 2**48)

    first: set[str] = set()
    for file, n in (wanted or {}).items():
        ranked = sorted(of_files[file], key=lambda m: (m.number not in kept, place(m), m.number))
        first |= {m.number for m in ranked[:n]}
    order: list[tuple[bool, bool, float, str, Mutant]] = []
    for group in groups.values():
        group.sort(key=lambda m: (m.number not in kept, hashlib.blake2s(f"{seed} {m.number}".encode()).digest()))
        for rank, m in enumerate(group):
            share = (rank + 0.5) / math.sqrt(len(group))
            order.append((m.number not in kept, m.number not in first, share, m.number, m))
    return [m for *_, m in sorted(order, key=lambda entry: entry[:4])][:count]
