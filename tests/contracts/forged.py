"""Checkpoints whose every hash is right, as an attacker can make them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from contracts.checkpointer import overwrite
from engram.checkpoint.directory import digest, from_checksummed_json, to_checksummed_json

NEWEST = "g-000001"


def forge_file(path: Path, file: Path, content: bytes) -> None:
    """Gives a file of the checkpoint's only snapshot another content."""
    overwrite(file, content)
    name = str(file.relative_to(path / NEWEST))
    forge_manifest(path, lambda d: d["files"].update({name: {"nbytes": len(content), "xxh3_128": digest(content)}}))


def forge_state(path: Path, edit: Callable[[Any], Any]) -> None:
    """Changes what the manifest says of the storage."""
    forge_manifest(path, lambda document: edit(document["body"]["storage"]["state"]))


def forge_manifest(path: Path, edit: Callable[[Any], Any]) -> None:
    manifest, current = path / NEWEST / "manifest.json", path / "CURRENT"
    document = from_checksummed_json(manifest.read_bytes())
    edit(document)
    overwrite(manifest, _resealed(document))
    overwrite(
        current, _resealed({**from_checksummed_json(current.read_bytes()), "manifest": digest(manifest.read_bytes())})
    )


def _resealed(document: dict[str, Any]) -> bytes:
    return to_checksummed_json({key: value for key, value in document.items() if key != "xxh3_128"})
