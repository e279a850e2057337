"""Looking into stores, checkpoints and dataset files: what the command `engram` does, as functions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram.cli.activity import Activity, WriterActivity, top
    from engram.cli.conversion import Conversion, convert
    from engram.cli.description import Info, KeyInfo, LaneInfo, Summary, info
    from engram.cli.differences import Differences, KeyDifference, diff
    from engram.cli.film import play
    from engram.cli.html_report import report
    from engram.cli.plots import plot
    from engram.cli.rows import RowsShown, head, sample
    from engram.cli.verification import Damage, Verification, verify

__all__ = [
    "Activity",
    "Conversion",
    "Damage",
    "Differences",
    "Info",
    "KeyDifference",
    "KeyInfo",
    "LaneInfo",
    "RowsShown",
    "Summary",
    "Verification",
    "WriterActivity",
    "convert",
    "diff",
    "head",
    "info",
    "play",
    "plot",
    "report",
    "sample",
    "top",
    "verify",
]

# Names are looked up when they are used: to describe a store needs no torch, whose import takes a second.
_PLACES = {
    "activity": ("Activity", "WriterActivity", "top"),
    "conversion": ("Conversion", "convert"),
    "description": ("Info", "KeyInfo", "LaneInfo", "Summary", "info"),
    "differences": ("Differences", "KeyDifference", "diff"),
    "film": ("play",),
    "html_report": ("report",),
    "plots": ("plot",),
    "rows": ("RowsShown", "head", "sample"),
    "verification": ("Damage", "Verification", "verify"),
}


def __getattr__(name: str) -> Any:
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
