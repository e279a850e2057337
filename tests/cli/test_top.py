"""`top`: what goes on in stores beside the jobs that write them, by counters and by what learners publish."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from typer.testing import CliRunner

from cli.support import episodes, store
from contracts.children import Child
from engram.cli import Activity, activity, info, top
from engram.cli.main import command
from engram.cli.tables import activity_lines
from engram.data import LazyMemmapStorage, QueueSampler, ReplayBuffer, SampleToInsertRatio
from engram.store.header import StoreFile
from engram.store.observed import ObservedRows


def looks(*paths: Any) -> Any:
    return top(paths, every=0.05)


def test_rows_rates_and_writer_are_those_of_the_job(tmp_path):
    rb = store(tmp_path, capacity=500)
    seen = looks(tmp_path / "store")
    [first] = next(seen)
    rb.extend(episodes(300))
    [now] = next(seen)
    assert (first.rows, first.capacity, first.rate_in, first.in_use) == (300, 500, None, True)
    assert (now.rows, now.written) == (500, 600)
    assert now.rate_out == pytest.approx(now.rate_in / 3)  # 300 in, 100 of which in the place of others
    [writer] = now.writers
    assert writer[:5] == (os.getpid(), (0,), True, 500, 600) and writer.rate == pytest.approx(now.rate_in)
    rb.storage.close()
    [after] = next(seen)
    assert (after.in_use, after.writers[0].holds, after.rate_in) == (False, False, 0.0)


def test_episodes_that_end_are_counted_with_their_returns(tmp_path):
    rb = store(tmp_path, steps=250)
    seen = looks(tmp_path / "store")
    assert next(seen)[0].episodes == 0
    rb.extend(episodes(300)[50:])  # ends one of which the first steps are not known, and two more
    rb.extend(episodes(1))
    [now] = next(seen)
    assert now.episodes == 3 and now.returns == now.lengths == (100, 100, 100)


@pytest.mark.parametrize("envs", [1, 3])
def test_episodes_are_the_same_however_often_somebody_looks(tmp_path, envs):
    generator = torch.Generator().manual_seed(envs)
    steps, rb = 400, ReplayBuffer(storage=LazyMemmapStorage(2000, scratch_dir=tmp_path, ndim=min(envs, 2)))
    done = torch.rand(envs, steps, 1, generator=generator) < 0.1
    reward = torch.rand(envs, steps, 1, generator=generator)
    data = TensorDict({"next": {"done": done, "reward": reward}}, [envs, steps])
    if envs == 1:
        data = data[0]
    wanted = []  # every episode that ends before the last step, in the order of their ends
    for env in range(envs):
        ends = torch.where(done[env, :, 0])[0].tolist()
        for start, stop in itertools.pairwise([-1, *[end for end in ends if end < steps - 1]]):
            wanted.append((stop, float(reward[env, start + 1 : stop + 1].sum()), stop - start))
    rb.extend(data[..., :1])
    followed = activity._Episodes(ObservedRows(StoreFile.observed(tmp_path).store), 0)
    followed.last = deque()  # without a limit
    at = 1
    assert followed.follow()
    while at < steps:
        n = int(torch.randint(1, 40, (), generator=generator))
        rb.extend(data[..., at : at + n])
        at += n
        assert followed.follow()
    assert followed.count == len(wanted)
    assert sorted(length for _, length in followed.last) == sorted(length for _, _, length in wanted)
    assert np.allclose(sorted(value for value, _ in followed.last), sorted(value for _, value, _ in wanted))


def test_an_episode_whose_first_steps_were_missed_has_no_return(tmp_path, monkeypatch):
    rb = store(tmp_path, steps=10)
    monkeypatch.setattr(activity, "_MOST_STEPS", 150)
    seen = looks(tmp_path / "store")
    next(seen)
    rb.extend(episodes(300))
    rb.extend(episodes(1))
    [now] = next(seen)
    assert now.lengths == (100, 100, 100)  # of the newest 150 steps; the one that they begin in is not shown


def test_a_seam_ends_no_episode(tmp_path):
    rb = store(tmp_path, steps=50)
    seen = looks(tmp_path / "store")
    next(seen)
    rb.storage.mark_seam()
    rb.extend(episodes(60))
    assert next(seen)[0].episodes == 0


def test_steps_that_say_nothing_of_episodes_have_none(tmp_path):
    ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path)).extend(torch.arange(5))
    [now] = next(looks(tmp_path))
    assert now.rows == 5 and now.episodes is None and now.returns is None


def test_each_writer_is_shown_with_its_lanes(tmp_path):
    first, second = (LazyMemmapStorage(40, scratch_dir=tmp_path, lanes=4, existsok=True) for _ in range(2))
    ReplayBuffer(storage=first).extend(episodes(5))
    [alone] = next(looks(tmp_path))
    assert [writer.lanes for writer in alone.writers] == [(0,)]
    ReplayBuffer(storage=second).extend(episodes(7))
    [now] = next(looks(tmp_path))
    assert sum(writer.rows for writer in now.writers) == now.rows == 12
    assert sum(len(writer.lanes) for writer in now.writers) == 3 and all(writer.holds for writer in now.writers)


def test_steps_are_those_of_who_wrote_them_wherever_they_lie(tmp_path):
    """Writers move from lane to lane: who wrote to a lane last has not written all that is there."""
    rb = ReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path, lanes=2))
    rb.extend(episodes(40))
    child = Child(lambda: rb.extend(episodes(7)))
    child.result()
    seen = looks(tmp_path)
    [now] = next(seen)
    assert {writer.pid: (writer.rows, writer.written) for writer in now.writers} == {
        os.getpid(): (33, 40),
        child.pid: (7, 7),
    }
    rb.extend(episodes(5))
    [now] = next(seen)
    rates = {writer.pid: writer.rate for writer in now.writers}
    assert rates[os.getpid()] == pytest.approx(now.rate_in) and rates[child.pid] == 0 and now.rate_in > 0


def test_steps_of_nobody_known_have_no_rate(tmp_path):
    """A lane tells of its last writers: of many that wrote a step each, the first ones are forgotten."""
    rb = ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path, lanes=2))
    for k in range(24):
        Child(lambda k=k: rb.extend(episodes(1))).result()
    seen = looks(tmp_path)
    next(seen)
    [now] = next(seen)
    unknown = [writer for writer in now.writers if writer.pid is None]
    assert len(unknown) == 1 and unknown[0].rows > 0 and unknown[0].rate is None
    assert sum(writer.rows for writer in now.writers) == now.rows == 20


def test_a_pattern_finds_stores_that_are_made_later(tmp_path):
    store(tmp_path / "a")
    seen = looks(tmp_path / "*" / "store")
    assert len(next(seen)) == 1
    store(tmp_path / "b", steps=20)
    assert [now.rows for now in next(seen)] == [300, 20]


def test_a_store_that_is_made_anew_is_followed(tmp_path):
    rb = store(tmp_path)
    seen = looks(tmp_path / "store")
    next(seen)
    rb.storage.close()
    (tmp_path / "store" / "rows.engram").unlink()
    [gone] = next(seen)
    assert gone.problem is not None and gone.rows == 300
    store(tmp_path, steps=7)
    [now] = next(seen)
    assert now.problem is None and now.rows == 7


def test_all_rows_replaced_begin_a_new_count(tmp_path):
    rb = store(tmp_path)
    seen = looks(tmp_path / "store")
    next(seen)
    rb.empty()
    rb.extend(episodes(20))
    [now] = next(seen)
    assert now.rows == 20 and now.rate_in is None


def test_a_store_whose_rows_are_being_replaced_is_named(tmp_path):
    native = store(tmp_path).storage.lanes.store
    seen = looks(tmp_path / "store")
    next(seen)
    native.begin_restore()
    try:
        assert "being replaced" in next(seen)[0].problem
    finally:
        native.end_restore()
    assert next(seen)[0].problem is None


def test_a_path_without_a_store_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no store"):
        next(looks(tmp_path))
    with pytest.raises(ValueError, match="every must be"):
        next(top(tmp_path, every=0.0))


def test_top_needs_no_torch_and_two_percent_of_a_processor(tmp_path):
    rb = store(tmp_path, capacity=5000)
    code = (
        "import sys, time; from engram.cli import top; looks = top(sys.argv[1], every=0.05); next(looks); next(looks)\n"
        "before = time.process_time(); [next(looks) for _ in range(20)]; used = time.process_time() - before\n"
        "assert 'torch' not in sys.modules; print(used / 20)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
    while process.poll() is None:
        rb.extend(episodes(100))
        time.sleep(0.01)
    assert float(process.communicate()[0]) < 0.02  # seconds of one look, of which there is one a second


def test_the_command_shows_stores_and_prints_json(tmp_path):
    rb = store(tmp_path)
    runner, path = CliRunner(), str(tmp_path / "store")
    shown = runner.invoke(command(), ["top", path, "-n", "1"])
    assert shown.exit_code == 0 and "300 of 1,000 (30%)" in shown.stdout and "not published" in shown.stdout
    assert f"process {os.getpid()} holds lane 0" in shown.stdout
    lines = runner.invoke(command(), ["top", path, "-n", "2", "--every", "0.05", "--json"]).stdout.splitlines()
    assert [json.loads(line)[0]["rows"] for line in lines] == [300, 300]
    assert runner.invoke(command(), ["top", str(tmp_path / "nothing")]).exit_code == 2 and len(rb) == 300


def test_names_from_a_store_are_made_visible(tmp_path):
    folder = tmp_path / "a\x1b[2J"
    store(folder)
    shown = CliRunner().invoke(command(), ["top", str(folder / "store"), "-n", "1"]).stdout
    assert "\x1b" not in shown and r"a\x1b[2J" in shown


def test_an_activity_as_json_has_plain_values():
    assert json.loads(json.dumps(Activity("p").to_json()))["path"] == "p"


def test_ranges_of_lanes_are_short(tmp_path: Path):
    from engram.cli.tables import _ranges

    assert _ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_a_rate_limiter_is_shown_with_what_was_drawn_and_waited(tmp_path):
    limiter = SampleToInsertRatio(1.0, 4, error_buffer=8)
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path), batch_size=4, rate_limiter=limiter)
    rb.extend(torch.arange(10))
    rb.sample(), rb.sample()
    [now] = next(looks(tmp_path))
    assert now.rate == (repr(limiter), 10, 8, 6, 0.0, 0.0, 8 / 6)
    assert json.loads(json.dumps(now.to_json()))["rate"]["drawn"] == 8
    said = f"{limiter}: 8 rows drawn of 10 written (1.333 for each after the first), 6 more may be drawn"
    assert any(said in line for line in activity_lines([now]))
    assert any(f"rate limiter {said}" in note for note in info(tmp_path).notes)
    rb.rate_limiter = None
    assert next(looks(tmp_path))[0].rate is None


def test_a_queue_is_shown_with_what_waits_and_is_not_committed(tmp_path):
    sampler = QueueSampler(commit="manual")
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path), batch_size=4, sampler=sampler)
    rb.extend(torch.arange(10))
    rb.seek(None)
    rb.sample()
    [now] = next(looks(tmp_path))
    assert now.queue[:5] == ("QueueSampler(full='wait', commit='manual')", 6, 4, 90, 0) and now.rate is None
    assert json.loads(json.dumps(now.to_json()))["queue"]["waiting"] == 6
    said = "commit='manual'): 6 rows wait, 4 are not committed, room for 90 more; waited"
    assert any(said in line for line in activity_lines([now]))
    assert any(said in note for note in info(tmp_path).notes)
    rb.end_queue()
    assert next(looks(tmp_path))[0].queue is None
