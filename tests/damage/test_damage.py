"""Files of every format changed, cut, lost and exchanged: never wrong data, no crash, the file named each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from contracts.corruption import DAMAGES, EVERY_BYTE, Budget, Saved, damage
from damage.formats import BUFFERS, DATASETS, TORCHRL, Buffers, Dataset, Snapshots, Store, TorchRL
from engram.data.replay_buffers.checkpointers import rows

FORMATS: dict[str, Callable[[Path], Saved]] = {
    "store": Store,
    **{f"checkpoint {name}": (lambda path, name=name: Buffers(name, path)) for name in BUFFERS},
    **{f"TorchRL {name}": (lambda path, name=name: TorchRL(name, path)) for name in TORCHRL},
    **{f"dataset {name}": (lambda path, name=name: Dataset(name, path)) for name in DATASETS},
}
#: Of formats without an earlier save, without folders, or of one file.
NOTHING_TO_DO = {"outdated": ("store", "TorchRL", "dataset"), "folders linked": ("store", "dataset"),
                 "exchanged": ("store", "dataset")}  # fmt: skip


def does_nothing(form: str, kind: str) -> bool:
    return form.startswith(NOTHING_TO_DO.get(kind, ("nothing",)))


QUICK = ("store", "checkpoint flat", "TorchRL pytree", "dataset parquet")  # one of each


def some(names: Iterable[str], quick: Callable[[str], bool]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.quick] if quick(name) else []) for name in names]


def damage_of_every_kind(form: str, path: Path, times: int) -> None:
    saved = FORMATS[form](path)
    for kind in DAMAGES:
        done = damage(saved, kind, saved.some.times(times))
        assert done or does_nothing(form, kind), f"{kind}: nothing was damaged"


@pytest.mark.parametrize("form", some(FORMATS, lambda form: form in QUICK))
def test_damage_of_every_kind_is_noticed_and_named(form: str, ram_path: Path) -> None:
    damage_of_every_kind(form, ram_path, 1)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMATS)
def test_more_damage_of_every_kind_is_noticed_and_named(form: str, ram_path: Path) -> None:
    damage_of_every_kind(form, ram_path, 8)


@pytest.mark.parametrize("kind", some(DAMAGES, lambda kind: kind != "changed bytes"))
def test_damage_of_many_bytes_of_a_small_checkpoint_is_noticed(
    kind: str, ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1000)
    assert damage(Snapshots(ram_path), kind, Budget(60, 60, 2, None))


@pytest.mark.long
def test_a_change_of_every_byte_of_a_small_checkpoint_is_noticed(
    ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1000)
    assert damage(Snapshots(ram_path), "changed bytes", EVERY_BYTE)


@pytest.mark.long
@pytest.mark.parametrize("name", BUFFERS)
def test_every_byte_of_the_metadata_and_ten_thousand_of_the_data_are_noticed(name: str, ram_path: Path) -> None:
    saved: Any = Buffers(name, ram_path, empty_too=False)
    counts = {kind: damage(saved, kind, EVERY_BYTE) for kind in DAMAGES}
    print(f"{name}: {counts}")
    assert counts["changed bytes"] > 9000
