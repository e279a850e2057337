"""packaging/environment.py: equal requests share a layer, and other requests do not."""

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "packaging"))
        patch.delitem(sys.modules, "environment", raising=False)
        yield importlib.import_module("environment")
        sys.modules.pop("environment", None)


def test_layer_is_named_by_all_that_decides_what_is_installed(environment, tmp_path):
    file = tmp_path / "constraints.txt"
    file.write_text("torch==1\n")
    asked = f"-c {file} torch"
    name = environment.name_of(asked, [], "this")
    assert environment.name_of(asked, [], "this") == name
    others = [
        environment.name_of(f"-c {file} torch numpy", [], "this"),
        environment.name_of(asked, [tmp_path / "below"], "this"),
        environment.name_of(asked, [], "another Python"),
    ]
    file.write_text("torch==2\n")
    others.append(environment.name_of(asked, [], "this"))
    assert len({name, *others}) == 5


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"ENGRAM_ENVIRONMENTS": "/one", "XDG_CACHE_HOME": "/two"}, Path("/one")),
        ({}, ROOT / ".venv-layers"),
    ],
)
def test_layers_are_kept_where_the_variables_say_and_else_in_the_clone(environment, monkeypatch, variables, folder):
    for name in ("ENGRAM_ENVIRONMENTS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.kept_in() == folder


def wheel(folder: Path, name: str, version: str, needs: str = "") -> None:
    """A package with one module and one command, both of its name."""
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"import sys\nVERSION = {version!r}\ndef main():\n    print(VERSION, sys.prefix)\n")
        required = f"Requires-Dist: {needs}\n" if needs else ""
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/entry_points.txt", f"[console_scripts]\n{name} = {name}:main\n")
        file.writestr(f"{about}/RECORD", "")


def says(environment: Path, code: str) -> str:
    done = subprocess.run([environment / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.deep
def test_what_is_in_a_lower_layer_is_installed_once(environment, tmp_path, monkeypatch):
    kept, wheels, asks = tmp_path / "kept", tmp_path / "wheels", f"--no-index --find-links {tmp_path / 'wheels'}"
    monkeypatch.setenv("ENGRAM_ENVIRONMENTS", str(kept))
    wheels.mkdir()
    wheel(wheels, "lower", "1.0")
    wheel(wheels, "upper", "1.0", needs="lower")
    one, other = tmp_path / "one", tmp_path / "other"
    environment.make(one, [f"{asks} lower==1.0"], fresh=True)
    (base,) = (path for path in kept.iterdir() if path.is_dir())
    (one / "mine").touch()
    environment.make(one, [f"{asks} lower==1.0", f"{asks} upper"], fresh=False)
    assert (one / "mine").exists()
    (top,) = (path for path in kept.iterdir() if path.is_dir() and path != base)
    assert (environment.packages(base) / "lower.py").exists() and (environment.packages(top) / "upper.py").exists()
    assert not (environment.packages(top) / "lower.py").exists()
    assert says(one, "import upper, lower; print(lower.VERSION)") == "1.0"
    assert subprocess.check_output([one / "bin" / "upper"], text=True).split() == ["1.0", str(one)]

    # Another environment needs no package again: there is none to be had.
    for file in wheels.iterdir():
        file.unlink()
    environment.make(other, [f"{asks} lower==1.0", f"{asks} upper"], fresh=True)
    assert says(other, "import upper; print(upper.VERSION)") == "1.0"
    # Begun anew, it has nothing of what was installed into it.
    (environment.packages(other) / "lower.py").write_text("VERSION = 'stale'")
    environment.make(other, [f"{asks} lower==1.0"], fresh=True)
    assert says(other, "import lower; print(lower.VERSION)") == "1.0"

    # An upper layer may have another version, which comes first; a layer that was not completed is made again.
    wheel(wheels, "lower", "2.0")
    environment.make(other, [f"{asks} lower==1.0", f"{asks} lower==2.0"], fresh=True)
    assert says(other, "import lower; print(lower.VERSION)") == "2.0"
    wheel(wheels, "lower", "1.0")
    (base / environment.COMPLETE).unlink()
    (environment.packages(base) / "lower.py").unlink()
    environment.make(one, [f"{asks} lower==1.0"], fresh=True)
    assert says(one, "import lower; print(lower.VERSION)") == "1.0"
