"""Power cuts: whatever mix of old and new pages there is, rows are whole and in place, and none flushed is lost."""

from __future__ import annotations

import pytest

from contracts.each import each
from crash import sessions
from engram.store import files as recovery
from engram.store import places

pytestmark = pytest.mark.quick

SHAPES = [
    {"lanes": 1, "capacity": 40, "envs": 1, "width": 40},
    {"lanes": 1, "capacity": 12, "envs": 1, "width": 700},
    {"lanes": 3, "capacity": 24, "envs": 1, "width": 20},
    {"lanes": 1, "capacity": 16, "envs": 3, "width": 60},
    {"lanes": 5, "capacity": 9, "envs": 1, "width": 130},
    {"lanes": 1, "capacity": 24, "envs": 1, "width": 3, "frames": 4, "n_steps": 1, "size": 700},
    {"lanes": 1, "capacity": 20, "envs": 2, "width": 3, "frames": 2, "n_steps": 3, "size": 300},
    {"lanes": 3, "capacity": 12, "envs": 1, "width": 3, "frames": 1, "n_steps": 1, "size": 40},
    {"lanes": 1, "capacity": 8, "envs": 1, "width": 20, "frames": 3, "n_steps": 2, "size": 2000},
]
#: Of these rows are removed, too.
REMOVING = [
    {"lanes": 1, "capacity": 40, "envs": 1, "width": 40, "removes": 1},
    {"lanes": 1, "capacity": 12, "envs": 1, "width": 700, "removes": 1},
    {"lanes": 3, "capacity": 24, "envs": 1, "width": 20, "removes": 1},
    {"lanes": 1, "capacity": 16, "envs": 3, "width": 60, "removes": 1},
    {"lanes": 8, "capacity": 9, "envs": 1, "width": 120, "removes": 1},  # bits lie on another page than counters
]


@pytest.fixture(autouse=True)
def boots(monkeypatch):
    for module in (recovery, places):
        monkeypatch.setattr(module, "boot_id", module.boot_id)


def cuts(path, shape, seed, sessions_in_a_row, each):
    path.mkdir()
    sessions.make(path, shape)
    cuts = sessions.PowerCuts(path, shape, seed, each)
    cuts._generation = 0
    cuts.promise.start(*cuts._states()[:2], durable=False)
    for generation in range(1, sessions_in_a_row + 1):
        cuts.session(generation)
        cuts.cut()
    return cuts


@pytest.mark.deep
@each("shape", SHAPES)
def test_rows_that_come_back_after_a_power_cut_are_whole_and_none_flushed_is_missing(ram_path, shape):
    done = cuts(ram_path / "p", shape, 1, 2, 0.2)
    assert done.images > 10 and done.rows["durable"] > 20


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s.values())))
def test_thousands_of_power_cuts(ram_path, shape):
    images, rows = 0, sessions.Counter()
    for seed in range(20):
        done = cuts(ram_path / f"p{seed}", shape, seed, 3, 0.5)
        images, rows = images + done.images, rows + done.rows
    print(f"{shape}: {images} images, {rows['found']} rows found, {rows['durable']} of those had to be")
    assert images > 1000


@pytest.mark.deep
@each("shape", REMOVING)
def test_after_a_power_cut_flushed_removals_are_kept_and_no_other_row_is_hidden(ram_path, shape):
    done = cuts(ram_path / "p", shape, 1, 2, 0.2)
    assert done.images > 10 and done.rows["removed"] > 20 and done.rows["removed and flushed"] > 10


@pytest.mark.long
@pytest.mark.parametrize("shape", REMOVING, ids=lambda s: "x".join(map(str, s.values())))
def test_after_thousands_of_power_cuts_no_row_is_hidden_that_nobody_removed(ram_path, shape):
    images, rows = 0, sessions.Counter()
    for seed in range(20):
        done = cuts(ram_path / f"p{seed}", shape, seed, 3, 0.5)
        images, rows = images + done.images, rows + done.rows
    print(f"{shape}: {images} images, {dict(rows)}")
    assert images > 1000
