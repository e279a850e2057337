"""The native core is compiled in several units, which agree about everything that they share."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src" / "native"


def test_every_unit_is_built() -> None:
    built = re.findall(r"^  src/native/(\w+\.cpp)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
    assert sorted(built) == sorted(file.name for file in NATIVE.glob("*.cpp"))


def test_every_unit_has_the_same_converters_of_types() -> None:
    users = {file.name for file in NATIVE.glob("*.[hc]pp") if "<nanobind/stl/" in file.read_text()}
    assert users == {"casters.hpp"}, "include casters.hpp: units without a converter take its type for a bound class"


def test_no_header_has_state_of_which_each_unit_would_have_its_own() -> None:
    own = re.compile(r"^(?:static |thread_local |const |namespace \{).*", re.MULTILINE)  # others would not link
    found = {file.name: own.findall(file.read_text()) for file in NATIVE.glob("*.hpp")}
    assert not {name: lines for name, lines in found.items() if lines}
