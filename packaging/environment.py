"""Makes a virtual environment of layers, each of which is installed once.

    python packaging/environment.py .venv "-c constraints.txt torch numpy" "-c constraints.txt pytest ruff"

A layer is what pip is asked to install over the layers before it. It is kept in a folder named by the hash of all that
it depends on: what is asked for (the files of `-c` and `-r` too), the layers below, Python, the machine, and where pip
looks for packages. The environment itself is empty but for a `.pth` file that names its layers, and for their scripts;
engram is then built into it. So `.venv`, `.venv-bench` and `.venv-ray` share one torch.

`ENGRAM_ENVIRONMENTS` is where layers are kept, for all clones; without it that is `.venv-layers` in the clone. Layers
that nothing uses any more may be deleted there.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = "layers.pth"
COMPLETE = ".complete"


def kept_in() -> Path:
    """The folder of layers, and of what passed in CI."""
    if folder := os.environ.get("ENGRAM_ENVIRONMENTS"):
        return Path(folder).resolve()
    return ROOT / ".venv-layers"


def packages(environment: Path) -> Path:
    """The site-packages of an environment of this Python."""
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def system() -> str:
    """What every layer depends on: the interpreter, the machine, and pip's settings, which say where packages are."""
    settings = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    python = os.path.realpath(sys.executable)
    return "\n".join([python, sys.version, platform.machine(), *platform.libc_ver(), settings.stdout])


def name_of(request: str, below: list[Path], system: str) -> str:
    """The folder name of a layer: a hash of everything that decides what pip installs."""
    words = shlex.split(request)
    files = [Path(word).read_text() for flag, word in pairwise(words) if flag in ("-c", "-r")]
    own = Path(__file__).read_text()
    parts = [own, system, request, *files, *(layer.name for layer in below)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def see(environment: Path, layers: list[Path]) -> None:
    """Lets an environment import from these layers, the last one first."""
    text = "".join(f"{packages(layer)}\n" for layer in reversed(layers))
    (packages(environment) / LAYERS).write_text(text)


def layer(request: str, below: list[Path], folder: Path, system: str) -> Path:
    """The complete layer of this request: the one that is kept, or a new one."""
    path = folder / name_of(request, below, system)
    with locked(path.with_suffix(".lock")):
        if (path / COMPLETE).exists():
            print(f"layer {path.name} is there: {request}", flush=True)
            return path
        shutil.rmtree(path, ignore_errors=True)
        # An upper layer uses the pip of the lowest one.
        subprocess.run([sys.executable, "-m", "venv", *["--without-pip"] * bool(below), path], check=True)
        see(path, below)
        pip = [path / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        # Python compiles the modules that it imports; to compile all takes longer than to install them.
        subprocess.run([*pip, "--no-compile", *shlex.split(request)], check=True)
        (path / COMPLETE).touch()
        return path


def scripts(environment: Path, layers: list[Path]) -> None:
    """Puts the commands of the layers into the environment, run by its own Python."""
    for below in layers:
        for file in sorted((below / "bin").iterdir()):
            if file.name.lower().startswith(("python", "activate")):
                continue
            mine = environment / "bin" / file.name
            mine.unlink(missing_ok=True)
            content = file.read_bytes()
            if content.startswith(b"#!"):
                mine.write_bytes(content.replace(os.fsencode(below / "bin"), os.fsencode(environment / "bin")))
                mine.chmod(0o755)
            else:
                mine.symlink_to(file)


def make(environment: Path, requests: list[str], *, fresh: bool) -> None:
    """Makes the environment of these layers. `fresh` empties one that this made before."""
    environment, folder, on = environment.resolve(), kept_in(), system()
    layers: list[Path] = []
    for request in requests:
        layers.append(layer(request, layers, folder, on))
    ours = any(path.exists() for path in (environment / ".run", packages(environment) / LAYERS))
    if fresh or not (environment / "bin" / "python").exists():
        clear = ["--clear"] * (fresh and ours)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", *clear, environment], check=True)
    see(environment, layers)
    scripts(environment, layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("layers", nargs="+", metavar="LAYER", help="what pip is asked for, in one argument")
    parser.add_argument("--fresh", action="store_true", help="begin anew, without what was installed before")
    asked = parser.parse_args()
    make(asked.environment, asked.layers, fresh=asked.fresh)


if __name__ == "__main__":
    main()
