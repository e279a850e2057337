"""What is said where an optional package is missing, and where it is installed and cannot be imported."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import engram
from contracts.each import each
from engram._packages import packages

SOURCES = Path(engram.__file__).parent


@each(
    "adapter, hidden, install",
    [
        ("sb3", "stable_baselines3", "engram.compat.sb3 needs stable-baselines3: pip install stable-baselines3"),
        ("tianshou", "tianshou", "engram.compat.tianshou needs tianshou: pip install tianshou"),
        ("cleanrl", "gymnasium", 'engram.compat needs gymnasium: pip install "engram[gym]"'),
    ],
)
def test_an_adapter_without_its_library_says_what_to_install(
    adapter: str, hidden: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (adapter, "transitions"):
        monkeypatch.delitem(sys.modules, f"engram.compat.{module}", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == hidden]:
        monkeypatch.delitem(sys.modules, name)

    class Nowhere:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == hidden:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Nowhere, *sys.meta_path])
    with pytest.raises(ImportError) as raised:
        importlib.import_module(f"engram.compat.{adapter}")
    assert str(raised.value) == install and isinstance(raised.value.__cause__, ModuleNotFoundError)


@each(
    "content, cause",
    [
        ("import a_part_that_is_missing", "No module named 'a_part_that_is_missing'"),
        ("from math import no_such_name", "cannot import name 'no_such_name' from 'math'"),
        ("raise ImportError('lib\\x1bfoo.so.3: cannot open')", "lib\\x1bfoo.so.3: cannot open"),
    ],
)
def test_a_package_that_is_installed_and_broken_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, cause: str
) -> None:
    (tmp_path / "a_broken_package.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as raised, packages("a table", "engram[tables]", tables="a_broken_package"):
        import a_broken_package  # type: ignore[import-not-found]  # noqa: F401
    said = str(raised.value)
    assert (
        said.startswith("a table needs tables, and what is installed of it cannot be imported here (") and cause in said
    )
    assert said.endswith("pip install --force-reinstall tables") and isinstance(raised.value.__cause__, ImportError)


def test_every_import_of_an_optional_package_says_so_in_this_one_way() -> None:
    others: dict[str, Any] = {}
    for file in SOURCES.rglob("*.py"):
        text = file.read_text()
        if file.name != "_packages.py" and re.search(
            r"except (ImportError|ModuleNotFoundError)[^\n]*:\n\s*raise Imp", text
        ):
            others[str(file)] = "catches an ImportError and raises one of its own"
    assert others == {}
