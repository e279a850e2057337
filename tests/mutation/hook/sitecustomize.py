"""Runs at the start of every Python process of a trial: engram's sources come mutated, or note which tests reach them.

ENGRAM_MUTANT   one mutant as JSON: file, start, end, new
ENGRAM_SITES    JSON of {file: {line: place}}: before the statements at these lines the place is noted in ENGRAM_HITS,
                a file of one byte for each place, which child processes share
ENGRAM_NATIVE   the native core with all its mutants (ENGRAM_NATIVE_MUTANT says which one is planted; `mutants.hpp`)

Nothing is written into the sources, and what is changed has no compiled files beside them.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import importlib.util
import json
import marshal
import mmap
import os
import sys


def map_hits() -> mmap.mmap:
    """The file of ENGRAM_HITS as memory, where instrumented modules find it."""
    with open(os.environ["ENGRAM_HITS"], "r+b") as file:
        builtins._engram_hits = mmap.mmap(file.fileno(), 0)
    return builtins._engram_hits


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        path = self.get_filename(fullname)
        name = path[path.rindex(os.sep + "engram" + os.sep) + 1 :]
        kept = f"{os.environ.get('ENGRAM_SITES')}-{fullname}"
        if os.path.exists(kept):
            with open(kept, "rb") as file:
                return marshal.load(file)
        data = self.get_data(path)
        if name == MUTANT.get("file"):
            data = data[: MUTANT["start"]] + MUTANT["new"].encode() + data[MUTANT["end"] :]
            open(os.environ["ENGRAM_PLANTED"], "w").close()
        tree = ast.parse(data, path)
        if name not in SITES:
            return compile(tree, path, "exec", dont_inherit=True)
        _note_hits(tree, SITES[name])
        code = compile(tree, path, "exec", dont_inherit=True)
        with open(f"{kept}.{os.getpid()}", "wb") as file:
            marshal.dump(code, file)
        os.rename(file.name, kept)
        return code


def _note_hits(tree, places):
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not isinstance(block, list):
                continue
            noted = []
            for statement in block:
                place = places.get(str(statement.lineno))
                future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
                if place is not None and not future:
                    note = ast.parse(f"_engram_hits[{place}] = 1").body[0]
                    for part in ast.walk(note):
                        if "lineno" in part._attributes:
                            ast.copy_location(part, statement)
                            part.end_lineno, part.end_col_offset = part.lineno, part.col_offset
                    noted.append(note)
                noted.append(statement)
            block[:] = noted


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] != "engram":
            return None
        if name == "engram._native" and os.environ.get("ENGRAM_NATIVE"):
            return importlib.util.spec_from_file_location(name, os.environ["ENGRAM_NATIVE"])
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not _Finder else None
            if spec is not None:
                break
        else:
            return None
        relative = str(spec.origin)[str(spec.origin).rfind(os.sep + "engram" + os.sep) + 1 :]
        if relative == MUTANT.get("file") or relative in SITES:
            where = spec.submodule_search_locations
            loader = _Loader(name, spec.origin)
            spec = importlib.util.spec_from_file_location(
                name, spec.origin, loader=loader, submodule_search_locations=where
            )
        return spec


MUTANT = json.loads(os.environ.get("ENGRAM_MUTANT", "{}"))
SITES = {}
if os.environ.get("ENGRAM_SITES"):
    with open(os.environ["ENGRAM_SITES"]) as sites:
        SITES = json.load(sites)
    map_hits()
sys.meta_path.insert(0, _Finder)
