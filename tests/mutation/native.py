"""One build of the native core with all its mutants, of which ENGRAM_NATIVE_MUTANT plants one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .candidates import HERE, ORIGINAL, Mutant

ROOT = Path(__file__).parents[2]


def planted(data: bytes, mutants: list[tuple[int, Mutant]]) -> bytes:
    """A file's text with all these mutants, each with its place among the hits; no line moves."""
    edits: list[tuple[int, int, int, str]] = []  # where, closing before opening, the outer ones first, text
    covered: list[tuple[int, int]] = []
    for place, m in mutants:
        new = m.new.rstrip("\n").replace(HERE, f"0x{m.number}u, {place}u")
        if ORIGINAL in new:
            left, right = new.split(ORIGINAL)
            edits += [(m.start, 1, -m.end, left), (m.end, 0, -m.start, right)]
        else:
            covered.append((m.start, m.end))
            edits.append((m.start, 2, 0, new))
    out, at = [], 0
    ends = dict(covered)
    for where, order, _, text in sorted(edits):
        out += [data[at:where], text.encode()]
        at = ends[where] if order == 2 else max(at, where)
    return b"".join([*out, data[at:]])


def build(mutants: list[Mutant], folder: Path) -> tuple[Path, set[str]]:
    """Builds the core in `folder`, unless it is there; returns it and the numbers of the mutants that it has."""
    bad = folder.parent / "not-compiling.json"  # of former builds, which makes the next one quicker
    refused = set(json.loads(bad.read_text())) if bad.exists() else set()
    made, alive = folder / "alive.json", {m.number: (i, m) for i, m in enumerate(mutants) if m.number not in refused}
    if not made.exists():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ROOT / "src" / "native", folder / "src" / "native")
        text = (ROOT / "CMakeLists.txt").read_text()
        (folder / "CMakeLists.txt").write_text(re.sub("-O[23]", "-O1", text))  # quicker to build
        flags = f"-include {Path(__file__).with_name('mutants.hpp')} -w"
        options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_CXX_FLAGS={flags}"]
        _run(["cmake", "-S", folder, "-B", folder / "build", *options])
        _leave_out_what_does_not_compile(alive, folder)
        bad.write_text(json.dumps(sorted({m.number for m in mutants} - set(alive))))
        _run(["cmake", "--build", folder / "build", "--parallel"])
        made.write_text(json.dumps(list(alive)))
    (core,) = (folder / "build").glob("_native*.so")
    return core, set(json.loads(made.read_text()))


def _run(command: list[object]) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}\n{done.stdout[-3000:]}{done.stderr[-6000:]}")


def _leave_out_what_does_not_compile(alive: dict[str, tuple[int, Mutant]], folder: Path) -> None:
    commands = json.loads((folder / "build" / "compile_commands.json").read_text())
    units = [c["command"] for c in commands if Path(c["file"]).parent == folder / "src" / "native"]
    checks = [re.sub(r" -o \S+ -c ", " -fsyntax-only -fmax-errors=0 ", unit).replace(" -O1", "") for unit in units]
    for _ in range(30):
        by_file: dict[str, list[tuple[int, Mutant]]] = defaultdict(list)
        for place, m in alive.values():
            by_file[m.file].append((place, m))
        for name in {path.name for path in (folder / "src" / "native").glob("*.[hc]pp")}:
            data = (ROOT / "src" / "native" / name).read_bytes()
            (folder / "src" / "native" / name).write_bytes(planted(data, by_file["native/" + name]))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            done = list(pool.map(lambda check: _errors(check, folder / "build"), checks))
        checks = [check for check, errors in zip(checks, done, strict=True) if errors]
        if not checks:  # a unit that compiles also does so with fewer mutants
            return
        errors = "".join(done)
        wrong = {(file, int(line)) for file, line in re.findall(r"src/(native/[\w.]+):(\d+)", errors)}
        on_line: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
        for _, m in alive.values():
            if (m.file, m.line) in wrong:
                on_line[m.file, m.line].append(m)
        if not on_line:
            break
        for found in on_line.values():  # the likeliest first, one kind at a time
            kinds = sorted({m.kind for m in found})
            for m in found:
                if m.kind == kinds[0]:
                    del alive[m.number]
    raise SystemExit(f"the core with mutants does not compile:\n{errors[:6000]}")


def _errors(check: str, folder: Path) -> str:
    """The compiler's complaints about a unit; empty where there are none."""
    done = subprocess.run(check, shell=True, cwd=folder, capture_output=True, text=True)
    return done.stderr if done.returncode else ""
