"""The folder of a run, and what lies where in it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

_MARKER = ".engram-demo"
_WRITTEN = {_MARKER, "rows", "checkpoints", "ledger.jsonl", "history.json", "learning_curve.png"}


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @classmethod
    def made_new(cls, root: Path) -> RunFolder:
        """An empty folder. Raises FileExistsError for one that holds something else than an earlier run."""
        if os.path.lexists(root):
            if root.is_symlink() or not root.is_dir():
                raise FileExistsError(f"{root} is no folder; choose another --run-dir")
            names = {path.name for path in root.iterdir()}
            others = names - _WRITTEN if _MARKER in names else names
            if others:
                raise FileExistsError(f"{root / min(others)} was not made by this demo; choose another --run-dir")
            shutil.rmtree(root)
        root.mkdir(parents=True)
        (root / _MARKER).write_text("This folder is wiped when the demo runs again.\n")
        return cls(root)

    @property
    def rows(self) -> Path:
        """The buffer's mapped file."""
        return self.root / "rows"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def history(self) -> Path:
        return self.root / "history.json"

    @property
    def curve(self) -> Path:
        return self.root / "learning_curve.png"
