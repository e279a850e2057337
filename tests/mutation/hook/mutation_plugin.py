"""A plugin of pytest: notes what each test reaches, or runs the tests of one trial.

With ENGRAM_REACH, a file: it gets for each test its name, its seconds, whether it passed and the places that it and its
child processes reached. With ENGRAM_PLAN, a file: only the tests that it names are run;
the test that runs is named in ENGRAM_STARTED.
"""

from __future__ import annotations

import array
import json
import os
import pickle
import sys
import time
from pathlib import Path

import pytest
import sitecustomize

# Before pytest's own, which rewrites the asserts of `engram.testing`.
sys.meta_path.remove(sitecustomize._Finder)
sys.meta_path.insert(0, sitecustomize._Finder)

if os.environ.get("ENGRAM_REACH"):
    _RESULT = Path(os.environ["ENGRAM_REACH"])
    _OWN = _RESULT.with_suffix(".hits")  # tests beside us have another one
    _OWN.write_bytes(bytes(os.path.getsize(os.environ["ENGRAM_HITS"])))
    os.environ["ENGRAM_HITS"] = str(_OWN)
    _HITS = sitecustomize.map_hits()
    _NOTHING = bytes(len(_HITS))
    _TESTS: list[tuple[str, float, bool, bytes]] = []
    _FAILED: set[str] = set()

    def _reached() -> bytes:
        """The places reached since the last call, as uint32."""
        found, at = array.array("I"), _HITS.find(b"\1")
        while at >= 0:
            found.append(at)
            at = _HITS.find(b"\1", at + 1)
        _HITS[:] = _NOTHING
        return found.tobytes()

    def pytest_collection_finish() -> None:
        _TESTS.append(("", 0.0, True, _reached()))  # what imports reach

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(item):
        started = time.perf_counter()
        result = yield
        seconds = time.perf_counter() - started
        _TESTS.append((item.nodeid, seconds, item.nodeid not in _FAILED, _reached()))
        return result

    def pytest_runtest_logreport(report) -> None:
        if not report.passed:
            _FAILED.add(report.nodeid)

    def pytest_sessionfinish() -> None:
        _RESULT.with_suffix(".part").write_bytes(pickle.dumps(_TESTS))
        _RESULT.with_suffix(".part").rename(_RESULT)
        _OWN.unlink()


if os.environ.get("ENGRAM_PLAN"):

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(config, items) -> None:
        wanted = set(json.loads(Path(os.environ["ENGRAM_PLAN"]).read_text()))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = [item for item in items if item.nodeid in wanted]

    def pytest_runtest_logstart(nodeid) -> None:
        Path(os.environ["ENGRAM_STARTED"]).write_text(nodeid)
