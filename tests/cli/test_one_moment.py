"""A command looks at one moment of a store that a job writes: its counts, rows and episodes fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.support import episodes, store
from engram.cli import convert, diff, html_report, info, plot, plots, report, verification, verify
from engram.cli import description as description_module
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.data.datasets import iter_parquet, write_parquet
from engram.data.replay_buffers.storages.memmap import ObservedMemmapStorage
from engram.errors import StorageInUseError
from engram.store.episodes import EpisodeIndex
from engram.store.observed import ObservedRows
from engram.store.places import ObservedLanes

LENGTH, MORE = 20, 40  # steps of an episode, and that the job writes at each look of a command

#: Capacities: a ring that grows while it is looked at, and one whose rows are overwritten meanwhile.
RINGS = pytest.mark.parametrize("capacity", [1_000_000, 2000], ids=["growing", "full"])


@pytest.fixture
def job(tmp_path: Path, capacity: int) -> TensorDictReplayBuffer:
    storage = LazyMemmapStorage(capacity, scratch_dir=tmp_path / "store")
    rb = TensorDictReplayBuffer(storage=storage, batch_size=8)
    rb.extend(episodes(3000, LENGTH))
    return rb


@contextmanager
def writing(job: ReplayBuffer[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A block in which a job writes before and after each look at its counters, rows and flags."""
    written, validated, counted, read = [0], ObservedLanes.validated, EpisodeIndex._query, ObservedRows.column

    def write() -> None:
        job.extend(episodes(MORE, LENGTH))
        written[0] += 1

    def look(self: Any, *arguments: Any, **options: Any) -> Any:
        write()
        result = validated(self, *arguments, **options)
        write()
        return result

    def count(self: Any, *arguments: Any) -> Any:
        write()
        result = counted(self, *arguments)
        write()
        return result

    def read_column(self: Any, *arguments: Any) -> Any:
        write()
        result = read(self, *arguments)
        write()
        return result

    with monkeypatch.context() as patches:
        patches.setattr(ObservedLanes, "validated", look)
        patches.setattr(ObservedRows, "column", read_column)
        patches.setattr(EpisodeIndex, "_query", count)
        yield written
    assert written[0]


@RINGS
def test_info_counts_rows_lanes_and_episodes_of_one_moment(
    job: ReplayBuffer[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(job, monkeypatch):
        found = info(tmp_path / "store", episodes=True, returns=True)
    assert found.episodes is not None and found.lengths is not None
    assert found.rows == sum(lane.rows for lane in found.lanes) == round(found.episodes * found.lengths.mean)
    assert found.lanes[0].written % MORE == 0 and found.lanes[0].written < job.write_count


@RINGS
def test_stats_count_rows_writes_and_episodes_of_one_moment(
    job: ReplayBuffer[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = job.storage.max_size
    for rb in (job, ReplayBuffer.open(tmp_path / "store", read_only=True)):
        with writing(job, monkeypatch):
            found = rb.stats()
        assert found.rows == min(found.writes, capacity) and found.episodes == found.rows / LENGTH
        with writing(job, monkeypatch):
            shown = dict(line.strip().split("=", 1) for line in repr(rb).splitlines() if "=" in line)
        assert int(shown["rows"].strip(",")) == LENGTH * int(shown["episodes"].strip(","))


@pytest.mark.parametrize("capacity", [pytest.param(1_000_000, marks=pytest.mark.long), 2000], ids=["growing", "full"])
def test_a_report_shows_the_counts_of_one_moment(
    job: ReplayBuffer[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    seen: list[Any] = []
    head, section = html_report._head, html_report._sections
    monkeypatch.setattr(html_report, "_head", lambda described: seen.append(described) or head(described))
    monkeypatch.setattr(
        html_report, "_sections", lambda rows, progress: seen.append(len(rows)) or section(rows, progress)
    )
    with writing(job, monkeypatch):
        report(tmp_path / "store", output=tmp_path / "r.html")
    described, rows = seen
    assert described.rows == sum(lane.rows for lane in described.lanes) == described.episodes * described.lengths.mean
    assert rows <= described.rows  # of which the job overwrites some


@RINGS
@pytest.mark.parametrize("to", ["store", "checkpoint", "torchrl", "parquet"])
def test_a_conversion_writes_the_rows_of_one_moment(
    job: ReplayBuffer[Any], tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(job, monkeypatch):
        done = convert(tmp_path / "store", tmp_path / "out", to=to, drop=["ends"])
    found = info(tmp_path / "out", episodes=True)
    assert found.rows == done.rows > 0
    assert found.lengths is not None and found.lengths.most == LENGTH  # no gap within an episode


def test_a_conversion_leaves_out_no_row_of_a_ring_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = store(tmp_path, steps=300, capacity=100_000)
    with writing(job, monkeypatch):
        assert convert(tmp_path / "store", tmp_path / "out", to="store").rows in range(300, job.write_count)
    kept = LazyMemmapStorage.open(tmp_path / "out").get(slice(None))
    assert kept["action"][:300].tolist() == list(range(300))


@RINGS
def test_a_dataset_of_a_buffer_that_others_write_has_rows_and_episodes_of_one_moment(
    job: ReplayBuffer[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = ReplayBuffer.open(tmp_path / "store", read_only=True)  # not frozen
    with writing(job, monkeypatch):
        rows = write_parquet(observer, tmp_path / "d.parquet")
    batch = torch.cat(list(iter_parquet(tmp_path / "d.parquet")))
    assert len(batch) == rows and int(batch["next", "done"].sum()) == rows / LENGTH


@RINGS
def test_a_store_does_not_differ_from_itself(
    job: ReplayBuffer[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(job, monkeypatch):
        found = diff(tmp_path / "store", tmp_path / "store")
    assert found.equal and found.only_a == found.only_b == 0


def test_a_comparison_counts_rows_that_are_overwritten_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = store(tmp_path, steps=1000, capacity=1000)
    job.dumps(tmp_path / "saved")
    with writing(job, monkeypatch):
        found = diff(tmp_path / "store", tmp_path / "saved", by="sequence")
    assert found.rows == 0 and found.only_a + found.compared <= 1000
    assert found.only_b == 1000 - found.compared - sum(
        int(note.split()[0]) for note in found.notes if "overwritten" in note
    )


@RINGS
def test_a_plot_shows_the_rows_of_one_moment(
    job: ReplayBuffer[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    keep = plots.figure
    monkeypatch.setattr(plots, "figure", lambda series, histogram: drawn.extend(series) or keep(series, histogram))
    with writing(job, monkeypatch):
        plot(tmp_path / "store", ["next.reward"], output=tmp_path / "p.png")
    (series,) = drawn
    assert (series.mean == 1).all() and (series.least == 1).all() and series.counts.sum() in (3000 + MORE, *range(2000))


@RINGS
def test_verify_counts_its_rows_once(job: ReplayBuffer[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = verification._pieces
    totals: list[int] = []

    def then_write(observed: Any) -> Any:
        found = pieces(observed)
        totals.append(sum(stop - start for _, start, stop in found))
        job.extend(episodes(MORE, LENGTH))
        return found

    monkeypatch.setattr(verification, "_pieces", then_write)
    result = verify(tmp_path / "store")
    assert result.ok and int(result.checked.split()[0].replace(",", "")) in (totals[0], totals[0] - MORE)


def test_rows_of_a_frozen_store_go_with_those_that_replace_them_and_none_comes(tmp_path: Path) -> None:
    job = store(tmp_path, steps=300, capacity=1000)
    observed = LazyMemmapStorage.open(tmp_path / "store", read_only=True)
    assert isinstance(observed, ObservedMemmapStorage)
    observed.freeze()
    job.extend(episodes(500))
    assert len(observed) == observed.write_count == 300 and len(observed.get(slice(None))) == 300
    assert 299 in observed and 300 not in observed and not observed._is_full
    job.extend(episodes(400))  # the first 200 rows are overwritten
    assert len(observed) == 100 and observed.get(250)["action"] == 250
    job.extend(episodes(100))
    assert len(observed) == 0 and EpisodeIndex().trajectories(observed).length.tolist() == []
    observed.freeze()
    assert len(observed) == 1000 and observed.write_count == 1300
    job.empty()
    with pytest.raises(StorageInUseError, match=r"all rows of the store in .* were replaced"):
        len(observed)


def test_info_of_a_checkpoint_is_about_one_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000))
    rb.extend(episodes(100, LENGTH))
    rb.dumps(tmp_path)
    described = description_module._of_checkpoint

    def then_save(*arguments: Any) -> Any:
        found = described(*arguments)
        rb.extend(episodes(100, LENGTH))
        rb.dumps(tmp_path)
        return found

    monkeypatch.setattr(description_module, "_of_checkpoint", then_save)
    found = info(tmp_path, episodes=True)
    assert (found.rows, found.episodes) == (100, 100 / LENGTH)
