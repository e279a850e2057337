"""The folder of a run, and what lies where in it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

_MARKER = ".engram-demo"


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @classmethod
    def made_new(cls, root: Path) -> RunFolder:
        """An empty folder. Raises FileExistsError for one that holds something else than an earlier run."""
        if root.exists():
            if not (root / _MARKER).exists() and (not root.is_dir() or any(root.iterdir())):
                raise FileExistsError(f"{root} exists and was not made by this demo; choose another --run-dir")
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
