"""Workers of collectors that fail or die and are replaced: every row is accounted for."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from collectors.failing import cartpole
from contracts.each import each
from contracts.kills import of_restarts
from contracts.tiers import in_ci, in_turns
from contracts.waiting import NEVER
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer, SliceSampler
from engram.envs import EnvBase, ParallelEnv, SerialEnv
from engram.errors import WorkerError
from engram.specs import Categorical, Composite, Unbounded
from engram.transforms import MultiStepTransform

BOTH = [MultiSyncDataCollector, MultiaSyncDataCollector]
IDS = ("collector", "traj_ids")


class Numbered(EnvBase):
    """Shows its worker, the number of its process, its seed, its episode and the step in it; episodes have 7 steps.

    `what` happens before step `at` of the first `lives` processes, which are counted in the file `lives_in`.
    """

    def __init__(self, worker, folder, *, at=None, what=None, lives=1, length=7):
        keys = ("worker", "life", "seed", "episode", "step")
        super().__init__(Composite({key: Unbounded((1,), dtype=torch.int64) for key in keys}), Categorical(2))
        with open(folder / f"lives-{worker}", "a+") as file:
            file.write("+")
            file.flush()
            self.life = file.tell()
        self.worker, self.at, self.what, self.length = worker, at, what if self.life <= lives else None, length
        self.seed, self.episode, self.left = -1, -1, at

    def _show(self):
        now = {
            "worker": self.worker,
            "life": self.life,
            "seed": self.seed,
            "episode": self.episode,
            "step": self.time,
        }
        return TensorDict({key: torch.tensor([value]) for key, value in now.items()})

    def _reset(self, mask):
        self.episode, self.time = self.episode + 1, 0
        return self._show()

    def _step(self, td):
        if self.what is not None:
            self.left -= 1
            if self.left == 0:
                self.what()
        self.time += 1
        shown = self._show().set("reward", torch.ones(1))
        return shown.set("terminated", torch.tensor([self.time == self.length]))

    def _set_seed(self, seed):
        self.seed = seed


class FailsOnce:
    """A policy that acts at random, and fails once at a step."""

    def __init__(self, marker, step):
        self.marker, self.step, self.n = marker, step, 0

    def __call__(self, td):
        if self.n == self.step and not self.marker.exists():
            self.marker.touch()
            raise ZeroDivisionError
        self.n += 1
        action = torch.randint(2, td.batch_size)
        return td.set("action", nn.functional.one_hot(action, 2))


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(7)


def fail():
    raise ArithmeticError("the simulator broke")


def hang():
    time.sleep(100)


HOW = {"SIGKILL": kill, "exit code 7": leave, "the simulator broke": fail}


def check_rows(rows, *, cut=()):
    """Rows of one worker in the order of time: each follows the one before it, or begins a trajectory with a reset."""
    seen = set()
    for before, row in zip([None, *rows[:-1]], rows, strict=True):
        name = tuple(int(row[key]) for key in ("worker", "life", "episode", "step"))
        assert name not in seen
        seen.add(name)
        is_next = before is not None and int(row[IDS]) == int(before[IDS])
        if is_next:
            assert not bool(before["next", "done"])
            for key in ("worker", "life", "seed", "episode", "step"):
                assert int(row[key]) == int(before["next", key])
        else:
            assert int(row["step"]) == 0
        if before is not None and bool(before["next", "done"]):
            assert not is_next


def check(batches, workers=2):
    """Each worker's rows are whole, and no trajectory id is used twice. Returns the rows by worker."""
    rows = [row for batch in batches for row in batch.reshape(-1)]
    by_worker = [[row for row in rows if int(row["worker"]) == k] for k in range(workers)]
    for mine in by_worker:
        check_rows(mine)
    owner_of = {}
    for row in rows:
        name = tuple(int(row[key]) for key in ("worker", "life", "episode"))
        assert owner_of.setdefault(int(row[IDS]), name) == name
    assert sorted(owner_of) == list(range(len(owner_of)))
    return by_worker


def makers(folder, **second):
    return [lambda: Numbered(0, folder), lambda: Numbered(1, folder, **second)]


def collected(collector, life=2, worker=1, more=2):
    """Batches until a worker has been replaced so often, some more of its, and some of each of the two workers."""
    batches, seen, workers = [], 0, set()
    while seen < more or len(workers) < 2:
        batches.append(collector.rollout())
        rows = batches[-1].reshape(-1)
        workers |= set(rows["worker"].flatten().tolist())
        seen += bool(((rows["worker"] == worker) & (rows["life"] >= life)).any())
        assert len(batches) < 10_000
    return batches


def cases(*lists, quick, deep=()):
    """All combinations: the ones named in `quick` are that, of the others CI has those in `deep`."""
    names = [(one, "quick" if one in quick else "deep" if one in deep else "long") for one in itertools.product(*lists)]
    return [pytest.param(*one, marks=getattr(pytest.mark, name)) for one, name in names]


QUICK = [(MultiSyncDataCollector, "SIGKILL"), (MultiaSyncDataCollector, "the simulator broke")]


@pytest.mark.parametrize(("cls", "how"), cases(BOTH, HOW, quick=QUICK, deep=[(BOTH[0], "exit code 7")]))
def test_a_worker_that_is_lost_costs_its_open_episode_only(cls, how, tmp_path):
    make = makers(tmp_path, at=25, what=HOW[how])
    with (
        pytest.warns(RuntimeWarning, match=rf"worker 1 of {cls.__name__} (?s:.*){how}(?s:.*)2 of 3 restarts are left"),
        cls(make, frames_per_batch=20, restarts=3) as collector,
    ):
        batches = collected(collector)
        assert collector.frames == 20 * len(batches)
    each = 10 if cls is MultiSyncDataCollector else 20
    assert all(batch.shape[-1] == each for batch in batches)
    first, second = check(batches)
    lives = [int(row["life"]) for row in second]
    assert lives == sorted(lives) and set(lives) == {1, 2}
    assert {int(row["life"]) for row in first} == {1}
    handed_over = 24 if how == "the simulator broke" else 24 // each * each
    assert lives.count(1) == handed_over
    last = second[handed_over - 1]
    if handed_over % each:  # the batch goes on with the rows of the new worker: the last one of the old is marked
        assert bool(last["next", "truncated"]) and bool(last["next", "done"]) and not bool(last["next", "terminated"])


@pytest.mark.parametrize("cls", BOTH)
def test_after_the_last_restart_the_error_comes_as_without_restarts(cls, tmp_path):
    make = makers(tmp_path, at=25, what=fail, lives=3)
    batches = []
    with (
        pytest.warns(RuntimeWarning) as warned,
        cls(make, frames_per_batch=20, restarts=2) as collector,
        pytest.raises(WorkerError, match="simulator broke"),
    ):
        for _ in range(10_000):
            batches.append(collector.rollout())
    ends = [message.rpartition("; ")[2] for message in of_restarts(warned)]
    assert ends == [f"{n} of 2 restarts are left" for n in (1, 0)]
    assert collector.is_shut_down
    _, second = check(batches)
    lives = [int(row["life"]) for row in second]
    assert [lives.count(life) for life in (1, 2, 3)] == [24, 24, 24]
    assert collector.frames == sum(batch.numel() for batch in batches)


def test_an_environment_that_fails_while_it_is_made_uses_up_the_restarts(tmp_path):
    made = tmp_path / "made"

    def broken():
        with open(made, "a") as file:
            file.write("+")
        fail()

    with pytest.warns(RuntimeWarning) as warned, pytest.raises(WorkerError, match="simulator broke"):
        MultiSyncDataCollector([lambda: Numbered(0, tmp_path), broken], frames_per_batch=20, restarts=3)
    assert len(of_restarts(warned)) == 3 and made.read_text() == "++++"


@pytest.mark.quick
@pytest.mark.parametrize("cls", [MultiSyncDataCollector, ParallelEnv])
def test_restarts_that_are_no_number_of_0_or_more_are_refused(cls):
    make = {ParallelEnv: lambda **a: ParallelEnv(1, fail, **a)}.get(
        cls, lambda **a: cls([fail], frames_per_batch=1, **a)
    )
    with pytest.raises(ValueError, match="restarts must be 0 or more, got -1"):
        make(restarts=-1)
    with pytest.raises(TypeError, match="restarts is how many workers"):
        make(restarts=True)


@pytest.mark.parametrize("cls", BOTH)
def test_two_workers_that_die_at_once_are_both_replaced(cls, tmp_path):
    make = [lambda k=k: Numbered(k, tmp_path, at=25, what=kill) for k in range(3)]
    with pytest.warns(RuntimeWarning), cls(make, frames_per_batch=20, restarts=3) as collector:
        batches = [batch for k in range(3) for batch in collected(collector, worker=k)]
    rows = check(batches, 3)
    assert all({int(row["life"]) for row in mine} == {1, 2} for mine in rows)


@pytest.mark.parametrize("cls", in_ci(BOTH, BOTH[:1]))
def test_a_worker_that_hangs_is_replaced(cls, tmp_path):
    make = makers(tmp_path, at=25, what=hang)
    with (
        pytest.warns(RuntimeWarning, match=r"step 25 of environment 0 did not end within timeout=2"),
        cls(make, frames_per_batch=20, restarts=1, timeout=2.0) as collector,
    ):
        check(collected(collector))


@pytest.mark.parametrize("threshold", [0.5, 1.0])
def test_batches_of_which_workers_hand_out_what_they_have_go_on(threshold, tmp_path):
    make = makers(tmp_path, at=25, what=fail)
    settings = {"frames_per_batch": 40, "restarts": 1, "preemptive_threshold": threshold}
    with pytest.warns(RuntimeWarning), MultiSyncDataCollector(make, **settings) as collector:
        batches = [batch[batch["collector", "mask"]] for batch in collected_masked(collector)]
    check(batches)


def collected_masked(collector):
    batches = []
    while not any(bool((b["life"].squeeze(-1)[b["collector", "mask"]] == 2).any()) for b in batches):
        batches.append(collector.rollout())
    return [*batches, collector.rollout()]


def test_the_same_seed_gives_a_successor_the_same_seed_another_than_before(tmp_path):
    seeds = []
    for run in range(2):
        folder = tmp_path / str(run)
        folder.mkdir()
        make = makers(folder, at=25, what=fail, lives=2)
        with pytest.warns(RuntimeWarning), MultiSyncDataCollector(make, frames_per_batch=20, restarts=2) as collector:
            assert collector.set_seed(5) == 7
            rows = check(collected(collector, life=3))
        seeds.append([{int(row["seed"]) for row in rows[1] if int(row["life"]) == life} for life in (1, 2, 3)])
    assert seeds[0] == seeds[1] and seeds[0][0] == {6}
    assert len(set.union(*seeds[0])) == 3


def test_a_successor_with_a_copy_of_an_environment_does_not_repeat_its_predecessor(tmp_path):
    env = cartpole()
    env.set_seed(5)
    act = FailsOnce(tmp_path / "failed", step=30)
    collector = MultiSyncDataCollector([env], act, frames_per_batch=80, restarts=1)
    with collector, pytest.warns(RuntimeWarning, match="is replaced"):
        batch = collector.rollout().reshape(-1)
    starts = batch["observation"][torch.cat([torch.tensor([True]), batch["next", "done"][:-1, 0]])]
    truncated = batch["next", "truncated"].squeeze(-1)
    assert bool(truncated[29]) and torch.equal(starts[0], env.reset()["observation"])
    assert len(starts.unique(dim=0)) == len(starts)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, step):
        shape = step.shape[:-1]
        return torch.zeros(shape, dtype=torch.int64), (torch.zeros(shape) + self.weight).unsqueeze(-1)


@pytest.mark.parametrize("updates", [0, 1])
def test_a_successor_has_the_weights_of_the_last_update_and_not_the_newer_ones_of_the_policy(updates, tmp_path):
    policy = TensorDictModule(Weighted(), in_keys=["step"], out_keys=["action", "weight"])
    make = makers(tmp_path, at=35, what=fail)
    settings = {"frames_per_batch": 20, "restarts": 1, "track_policy_version": True}
    with pytest.warns(RuntimeWarning), MultiSyncDataCollector(make, policy, **settings) as collector:
        first = collector.rollout()
        if updates:
            policy.module.weight.data += 0.25
            collector.update_policy_weights_()
        policy.module.weight.data += 1
        check([first, *(batches := collected(collector))])
    for batch in batches:
        assert batch["weight"].unique().tolist() == [0.25 * updates]
        assert batch["collector", "policy_version"].unique().tolist() == [updates]


def test_a_successor_has_its_random_frames_behind_it(tmp_path):
    policy = TensorDictModule(Weighted(), in_keys=["step"], out_keys=["action", "weight"])  # always 0
    make = makers(tmp_path, at=65, what=fail)
    with (
        pytest.warns(RuntimeWarning),
        MultiSyncDataCollector(make, policy, frames_per_batch=20, restarts=1, init_random_frames=100) as collector,
    ):
        rows = check(collected(collector))
    for mine in rows:
        actions = [int(row["action"]) for row in mine]
        assert any(actions[:50]) and not any(actions[50:])


@pytest.mark.parametrize(("how", "cls"), in_turns(HOW, BOTH))
def test_workers_that_write_into_the_buffer_leave_each_row_once_and_no_slice_joins_two_lives(cls, how, tmp_path):
    make = makers(tmp_path, at=75, what=HOW[how])
    storage = LazyTensorStorage(2000, shared=True, lanes=2)
    rb = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=3, traj_key=None), batch_size=60)
    with pytest.warns(RuntimeWarning), cls(make, frames_per_batch=20, replay_buffer=rb, restarts=1) as collector:
        while not bool((rb[:]["life"] == 2).any()) if len(rb) else True:
            collector.rollout()
        for _ in range(5):
            collector.rollout()
        frames = collector.frames
    stored = rb[:]
    ahead = len(stored) - frames  # an asynchronous collector has batches that it has not counted yet
    assert ahead == 0 if cls is MultiSyncDataCollector else ahead % 20 == 0 and 0 <= ahead <= 80
    for worker, life in ((0, 1), (1, 1), (1, 2)):
        mine = stored[((stored["worker"] == worker) & (stored["life"] == life)).reshape(-1)]
        numbers = (mine["episode"] * 7 + mine["step"]).reshape(-1).sort().values
        assert numbers.tolist() == list(range(len(numbers)))  # each once, and none is left out
        if (worker, life) == (1, 1):
            each = 10 if cls is MultiSyncDataCollector else 20
            assert len(mine) == (74 if how == "the simulator broke" else 74 // each * each)
    for _ in range(30):
        slices = rb.sample().reshape(-1, 3)
        assert bool((slices["step"][:, 1:] == slices["step"][:, :-1] + 1).all())
        for key in ("worker", "life", "episode"):
            assert bool((slices[key] == slices[key][:, :1]).all())
        assert bool((slices[IDS] == slices[IDS][:, :1]).all())


@pytest.mark.parametrize("cls", in_ci(BOTH, BOTH[:1]))
def test_a_buffer_written_here_joins_no_two_lives_in_slices_or_in_several_steps(cls, tmp_path):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(2000),
        sampler=SliceSampler(slice_len=3, traj_key=None),
        transform=MultiStepTransform(n_steps=3, gamma=0.5),
        batch_size=60,
    )
    make = [lambda: Numbered(1, tmp_path, at=75, what=kill)]
    with pytest.warns(RuntimeWarning), cls(make, frames_per_batch=20, replay_buffer=rb, restarts=1) as collector:
        while len(rb) == 0 or not bool((rb[:]["life"] == 2).any()):
            collector.rollout()
        collector.rollout()
    rows = rb[:]
    for key in ("life", "episode"):
        assert bool((rows[key] == rows["next", key]).all())
    for _ in range(30):
        slices = rb.sample().reshape(-1, 3)
        assert bool((slices["life"] == slices["life"][:, :1]).all())


@pytest.mark.parametrize("cls", in_ci(BOTH, BOTH[1:]))
def test_a_buffer_written_here_has_a_seam_where_no_entry_says_that_a_life_begins(cls, tmp_path):
    def without_next(batch):
        return batch.exclude(
            "collector", "episode", *[("next", key) for key in ("worker", "life", "seed", "episode", "step")]
        )

    sampler = SliceSampler(slice_len=3, traj_key=None)
    rb = ReplayBuffer(storage=LazyTensorStorage(2000), sampler=sampler, batch_size=60)
    make = [lambda: Numbered(1, tmp_path, at=65, what=kill)]
    settings = {"frames_per_batch": 20, "replay_buffer": rb, "postproc": without_next, "restarts": 1}
    with pytest.warns(RuntimeWarning), cls(make, **settings) as collector:
        while len(rb) == 0 or not bool((rb[:]["life"] == 2).any()):
            collector.rollout()
    assert not bool(rb[:]["next", "done"][rb[:]["life"].reshape(-1) == 1][-1])
    for _ in range(60):
        slices = rb.sample().reshape(-1, 3)
        assert bool((slices["life"] == slices["life"][:, :1]).all())


@pytest.mark.parametrize("cls", in_ci(BOTH, BOTH[1:]))
def test_a_state_after_restarts_goes_on_where_it_stopped(cls, tmp_path):
    make = makers(tmp_path, at=25, what=kill)
    with pytest.warns(RuntimeWarning), cls(make, frames_per_batch=20, restarts=1) as collector:
        batches = collected(collector)
        state = collector.state_dict()
    ids = max(int(batch[IDS].max()) for batch in batches)
    assert state["frames"] == collector.frames and state["trajectories"] > ids
    stepped = [worker["stepped"] for worker in state["workers"]]
    assert sum(stepped) >= collector.frames
    other = tmp_path / "other"
    other.mkdir()
    with cls(makers(other), frames_per_batch=20) as second:
        second.load_state_dict(state)
        batch = second.rollout()
        assert int(batch[IDS].min()) >= state["trajectories"] and second.frames == state["frames"] + 20
        assert [
            worker["stepped"] >= before for worker, before in zip(second.state_dict()["workers"], stepped, strict=True)
        ]


@pytest.mark.parametrize(("method", "cls"), in_turns(["state_dict", "set_seed", "load_state_dict"], BOTH))
def test_a_worker_that_is_found_dead_by_a_question_is_replaced_and_asked_again(cls, method, tmp_path):
    with cls(makers(tmp_path), frames_per_batch=20, restarts=1) as collector:
        batches = [collector.rollout()]
        state = collector.state_dict()
        arguments = {"state_dict": [], "set_seed": [0], "load_state_dict": [state]}[method]
        victim = collector._workers[1].pid
        os.kill(victim, signal.SIGKILL)
        os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)
        with pytest.warns(RuntimeWarning, match=f"process {victim}"):
            answer = getattr(collector, method)(*arguments)
        if method == "state_dict":
            assert len(answer["workers"]) == 2
        if method == "load_state_dict":
            batches.clear()  # all begin anew
        batches += [collector.rollout() for _ in range(8)]
    rows = [row for batch in batches for row in batch.reshape(-1)]
    for k in range(2):
        check_rows([row for row in rows if int(row["worker"]) == k])


# ---- whole trajectories ----
def trajectories_of(batches):
    """The rows of each trajectory, checked to be whole."""
    whole = []
    for batch in batches:
        for row in batch:
            steps = row[row["collector", "mask"]]
            assert int(steps["step"][0]) == 0 and bool(steps["next", "done"][-1])
            assert not bool(steps["next", "done"][:-1].any()) and len(steps[IDS].unique()) == 1
            assert steps["step"].reshape(-1).tolist() == list(range(len(steps)))
            whole.append(steps)
    return whole


@pytest.mark.parametrize(("cls", "frames"), cases(BOTH, [None, 6], quick=[(BOTH[0], None)], deep=[(BOTH[1], 6)]))
def test_whole_trajectories_of_workers_are_all_that_end(cls, frames, tmp_path):
    make = [lambda: Numbered(0, tmp_path, length=7), lambda: Numbered(1, tmp_path, length=5)]
    with cls(make, frames_per_batch=frames, trajs_per_batch=3) as collector:
        batches = [collector.rollout() for _ in range(6)]
        assert collector.frames == sum(int(batch["collector", "mask"].sum()) for batch in batches)
    whole = trajectories_of(batches)
    assert len(whole) == 18
    for worker, length in ((0, 7), (1, 5)):
        mine = [steps for steps in whole if int(steps["worker"][0]) == worker]
        assert [int(steps["episode"][0]) for steps in mine] == list(range(len(mine)))  # none is left out
        assert all(len(steps) == length for steps in mine)
    assert len({int(steps[IDS][0]) for steps in whole}) == 18


def test_whole_trajectories_of_one_worker_are_those_of_a_collector_in_this_process(tmp_path):
    def make():
        return SerialEnv(2, [lambda: Numbered(0, tmp_path, length=3), lambda: Numbered(1, tmp_path, length=5)])

    settings = {"frames_per_batch": 8, "trajs_per_batch": 3}
    with MultiSyncDataCollector([make], **settings) as collector:
        batches = [collector.rollout() for _ in range(5)]
    plain = SyncDataCollector(make, **settings)
    for batch in batches:
        expected = plain.rollout()
        assert bool(
            (
                batch.exclude("action", "life", ("next", "life"))
                == expected.exclude("action", "life", ("next", "life"))
            ).all()
        )


def test_whole_trajectories_of_workers_go_into_a_buffer_without_padding(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(500), batch_size=1)
    with MultiSyncDataCollector(makers(tmp_path), trajs_per_batch=4, replay_buffer=rb) as collector:
        assert collector.rollout() is None and collector.frames == len(rb) == 28
    assert int(rb[:]["next", "done"].sum()) == 4


@pytest.mark.parametrize("cls", BOTH)
def test_waiting_whole_trajectories_are_in_the_state_and_none_is_lost_at_resume(cls, tmp_path):
    (tmp_path / "first").mkdir(), (tmp_path / "second").mkdir()
    with cls(makers(tmp_path / "first"), frames_per_batch=80, trajs_per_batch=1) as first:
        batches = [first.rollout() for _ in range(2)]
        state = first.state_dict()
        expected = []
        while first._assembler.count:
            expected.append(first.rollout())
    waiting = state["waiting"]["lengths"]
    assert waiting == [7] * len(waiting) and len(waiting) == len(expected) > 2
    with cls(makers(tmp_path / "second"), frames_per_batch=80, trajs_per_batch=1) as second:
        second.load_state_dict(copy.deepcopy(state))
        resumed = [second.rollout() for _ in expected]
        new = second.rollout()
    for batch, other in zip(expected, resumed, strict=True):
        assert bool((batch == other).all())
    assert int(new[IDS].min()) >= state["trajectories"]
    trajectories_of([*batches, *resumed, new])


@pytest.mark.parametrize(("how", "cls"), in_turns(HOW, BOTH))
def test_whole_trajectories_of_a_lost_worker_end_where_it_was_lost(cls, how, tmp_path):
    make = makers(tmp_path, at=25, what=HOW[how])
    with pytest.warns(RuntimeWarning), cls(make, frames_per_batch=10, trajs_per_batch=2, restarts=1) as collector:
        batches = []
        while not any(bool(((b["worker"] == 1) & (b["life"] == 2)).any()) for b in batches):
            batches.append(collector.rollout())
    whole = trajectories_of([*batches])
    lost = [steps for steps in whole if (int(steps["worker"][0]), int(steps["life"][0])) == (1, 1)]
    cut = [steps for steps in lost if len(steps) < 7]
    assert len(cut) <= 1 and all(bool(steps["next", "truncated"][-1]) for steps in cut)
    handed_over = sum(map(len, lost))
    assert handed_over >= 20 and (how != "the simulator broke" or handed_over == 24)


@pytest.mark.quick
@each(
    "settings",
    [{"split_trajs": True}, {"reset_at_each_iter": True}, {"set_truncated": True}, {"reset_when_done": False}],
)
def test_settings_that_do_not_go_with_whole_trajectories_are_refused(settings):
    with pytest.raises(ValueError, match="trajs_per_batch gives whole trajectories"):
        MultiSyncDataCollector([fail], trajs_per_batch=2, **settings)


def test_waiting_trajectories_are_refused_by_a_collector_that_would_lose_them(tmp_path):
    with MultiSyncDataCollector([lambda: Numbered(0, tmp_path)], frames_per_batch=70, trajs_per_batch=1) as first:
        first.rollout()
        state = first.state_dict()
    with MultiSyncDataCollector([lambda: Numbered(0, tmp_path)], frames_per_batch=70) as second:
        with pytest.raises(ValueError, match="9 whole trajectories wait in the state"):
            second.load_state_dict(state)
        assert second.frames == 0


@pytest.mark.parametrize("cls", BOTH)
def test_whole_trajectories_of_workers_come_without_padding_if_the_format_says_so(cls, tmp_path):
    with cls(makers(tmp_path), trajs_per_batch=3, traj_format="cat") as collector:
        batch = collector.rollout()
    assert batch.shape == (21,) and ("collector", "mask") not in batch.keys(True)
    assert batch["step"].reshape(3, 7).tolist() == [list(range(7))] * 3
    with pytest.raises(ValueError, match="traj_format is the form of whole trajectories"):
        cls([fail], frames_per_batch=20, traj_format="cat")


# ---- in the background ----
def run_to_the_end(collector):
    collector.start()
    collector._background._thread.join(300)
    assert not collector.is_running()


SHARED = {"their own writes": {"shared": True, "lanes": 2}, "writes of the owner": {}}


IN_BACKGROUND = cases(BOTH, SHARED, quick=[(BOTH[1], "their own writes")], deep=[(BOTH[0], "writes of the owner")])


@pytest.mark.parametrize(("cls", "writes"), IN_BACKGROUND)
def test_a_collector_in_the_background_goes_on_with_the_successor_of_a_killed_worker(cls, writes, tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(1000, **SHARED[writes]), batch_size=1)
    make, settings = makers(tmp_path, at=25, what=kill), {"frames_per_batch": 20, "total_frames": 400, "restarts": 1}
    with (
        pytest.warns(RuntimeWarning, match="was killed by SIGKILL(?s:.*)0 of 1 restarts are left"),
        cls(make, replay_buffer=rb, **settings) as collector,
    ):
        run_to_the_end(collector)
        assert collector.frames == collector.state_dict()["frames"] == rb.write_count == 400
        assert sum(part["stepped"] for part in collector.state_dict()["workers"]) == 400  # all workers live on
    rows = rb[:]
    check_lives(rows)
    assert torch.cat([rows["worker"], rows["life"]], -1).unique(dim=0).tolist() == [[0, 1], [1, 1], [1, 2]]


@pytest.mark.parametrize("cls", BOTH)
def test_the_end_does_not_wait_for_the_successor_of_a_killed_worker_that_hangs(cls, tmp_path):
    class Hangs(Numbered):
        def _step(self, td):
            return super()._step(td) if self.life == 1 else hang()

    rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=1)
    with pytest.warns(RuntimeWarning, match="SIGKILL"):
        collector = cls([lambda: Hangs(0, tmp_path, at=7, what=kill)], frames_per_batch=5, replay_buffer=rb, restarts=1)
        collector.start()
        until = time.monotonic() + 120
        while not collector._pool.replaced[0] and time.monotonic() < until:
            time.sleep(0.001)
        collector.shutdown(timeout=0.01)
    assert not collector.is_running() and collector._pool.replaced == [1] and collector.is_shut_down
    assert collector.frames == len(rb) == 5


@pytest.mark.parametrize(("what", "cls"), in_turns([None, kill], BOTH))
def test_whole_trajectories_are_collected_in_the_background(cls, what, tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=1)
    make, settings = makers(tmp_path, at=25, what=what), {"trajs_per_batch": 30, "total_frames": 280, "restarts": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with cls(make, replay_buffer=rb, frames_per_batch=20, **settings) as collector:
            collector.start()
            with collector.pause():
                assert rb.write_count == collector.frames
            run_to_the_end(collector)
            assert rb.write_count == collector.frames >= 280
            waiting = collector.state_dict()["waiting"]["lengths"]
    rows = rb[:]
    ends = rows["next", "done"].squeeze(-1).nonzero().squeeze(-1)
    assert int(ends[-1]) == len(rows) - 1 and len(ends) == len(rows[IDS].unique())
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1] + 1])
    assert not rows["step"][begins].any()
    assert all(1 <= length <= 7 for length in waiting)


# ---- policies and calls of the workers ----
def weighted(weight):
    policy = TensorDictModule(Weighted(), in_keys=["step"], out_keys=["action", "weight"])
    policy.module.weight.data += weight
    return policy


@pytest.mark.parametrize("change", [None, "update", "state"])
def test_a_successor_makes_its_own_policy_and_has_the_last_update_if_there_was_one(change, tmp_path):
    factories = [lambda: weighted(0.5), lambda: weighted(0.75)]
    make = makers(tmp_path, at=35, what=fail)
    settings = {"frames_per_batch": 20, "restarts": 1, "track_policy_version": True, "policy_factory": factories}
    with pytest.warns(RuntimeWarning), MultiSyncDataCollector(make, **settings) as collector:
        first = collector.rollout()
        assert first["weight"][:, 0].flatten().tolist() == [0.5, 0.75]
        if change == "update":
            collector.update_policy_weights_(weighted(0.25))
        if change == "state":
            collector.load_state_dict(collector.state_dict())  # all have the weights of one of them then
        batches = collected(collector)
    expected = {None: [0.5, 0.75], "update": [0.25, 0.25], "state": [0.5, 0.5]}[change]
    assert {int(row["life"]) for batch in batches for row in batch[1]} == {1, 2}
    for batch in batches:
        assert [mine["weight"].unique().tolist() for mine in batch] == [[weight] for weight in expected]
        assert batch["collector", "policy_version"].unique().tolist() == [int(change == "update")]


def test_a_worker_that_dies_before_it_gets_the_shared_weights_of_a_factory_is_replaced(tmp_path, monkeypatch):
    share = MultiSyncDataCollector._share_weights_of_factory

    def share_after_a_kill(collector):
        os.kill(collector._workers[1].pid, signal.SIGKILL)
        collector._workers[1]._process.join()
        share(collector)

    monkeypatch.setattr(MultiSyncDataCollector, "_share_weights_of_factory", share_after_a_kill)
    settings = {"frames_per_batch": 20, "restarts": 1, "policy_factory": lambda: weighted(0.5)}
    with pytest.warns(RuntimeWarning), MultiSyncDataCollector(makers(tmp_path), **settings) as collector:
        assert collector.rollout()["weight"].unique().tolist() == [0.5]
        collector.update_policy_weights_(weighted(0.25))
        assert collector.rollout()["weight"].unique().tolist() == [0.25]


def test_successor_has_settings_and_calls_of_its_predecessor(tmp_path):
    multiprocessing.set_forkserver_preload(["engram.collectors"])  # torch is imported once, for three workers

    def note(name, *_):
        with open(tmp_path / name, "a") as file:
            file.write(f"{os.getpid()} {torch.get_num_threads()}\n")

    make = [lambda **settings: Numbered(0, tmp_path, **settings), lambda **settings: Numbered(1, tmp_path, **settings)]
    calls = {"init_fn": "first", "pre_collect_hook": "before", "post_collect_hook": "after"}
    with (
        pytest.warns(RuntimeWarning),
        MultiSyncDataCollector(
            make,
            frames_per_batch=20,
            restarts=1,
            create_env_kwargs=[{"length": 5}, {"length": 4, "at": 25, "what": fail}],
            set_truncated=True,
            num_sub_threads=2,
            start_method="forkserver",
            timeout=60.0,
            **{argument: functools.partial(note, name) for argument, name in calls.items()},
        ) as collector,
    ):
        batches = collected(collector)
        pid = str(collector._workers[1].pid)
    for name in calls.values():
        lines = [line.split() for line in (tmp_path / name).read_text().splitlines()]
        assert [pid, "2"] in lines and len({line[0] for line in lines}) == 3
    for batch in batches:
        assert batch["next", "done"][:, -1].all()
        assert not batch["step"][1].ge(4).any()


def test_a_hook_that_fails_after_a_batch_loses_no_row_that_was_written(tmp_path):
    def fails_once(batch):
        if int(batch["worker"][0]) == 1 and int(batch["life"][0]) == 1 and int(batch["episode"][-1]) == 2:
            fail()

    rb = ReplayBuffer(storage=LazyTensorStorage(1000, shared=True, lanes=2), batch_size=1)
    settings = {"frames_per_batch": 20, "total_frames": 200, "restarts": 1, "post_collect_hook": fails_once}
    with (
        pytest.warns(RuntimeWarning, match="simulator broke"),
        MultiSyncDataCollector(makers(tmp_path), replay_buffer=rb, **settings) as collector,
    ):
        for _ in collector:
            pass
        assert collector.frames == rb.write_count == 200
    rows = rb[:]
    check_lives(rows)
    assert sorted(rows["life"][rows["worker"] == 1].tolist()) == [1] * 20 + [2] * 80


# ---- at any moment ----
def killed_at_random(collector, times, rows):
    """Kills a random worker at a random moment so often, while batches are collected, until each has been replaced."""
    draw = random.Random(len(collector._workers))
    killed = set()
    for _ in range(times):
        pid = draw.choice(collector._workers).pid
        killed.add(pid)
        timer = threading.Timer(draw.uniform(0, 0.05), kill_if_there, [pid])
        timer.start()
        rows.append(collector.rollout())
        timer.join()
        rows.extend(collector.rollout() for _ in range(draw.randrange(3)))
    end = time.monotonic() + NEVER
    while sum(collector._pool.replaced) < len(killed) and time.monotonic() < end:
        rows.append(collector.rollout())
    assert sum(collector._pool.replaced) == len(killed)


def kill_if_there(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_at_random(cls, kind, times, folder):
    make = [lambda k=k: Numbered(k, folder) for k in range(3)]
    rb = None
    if kind != "batches":
        shared = {"shared": True, "lanes": 3} if kind == "their own writes" else {}
        rb = ReplayBuffer(storage=LazyTensorStorage(1_000_000, **shared), batch_size=1)
    batches = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with cls(make, frames_per_batch=30, replay_buffer=rb, restarts=10 * times) as collector:
            killed_at_random(collector, times, batches)
            frames = collector.frames
    assert len(of_restarts(warned)) == sum(collector._pool.replaced)
    rows = torch.cat([batch.reshape(-1) for batch in batches]) if rb is None else rb[:]
    assert frames == len(rows) if rb is None else frames <= len(rows)
    check_lives(rows)


def check_lives(rows):
    """Every process's rows are there from the first to some last one, each once, and joined to its own only."""
    table = torch.cat([rows[key] for key in ("worker", "life", "episode", "step")], -1)
    after = torch.cat([rows["next", key] for key in ("worker", "life", "episode", "step")], -1)
    assert bool((after[:, :3] == table[:, :3]).all()) and bool((after[:, 3] == table[:, 3] + 1).all())
    for worker, life in table[:, :2].unique(dim=0).tolist():
        mine = table[(table[:, 0] == worker) & (table[:, 1] == life)]
        numbers = (mine[:, 2] * 7 + mine[:, 3]).sort().values
        assert numbers.tolist() == list(range(len(numbers)))
    names = torch.cat([rows[IDS].unsqueeze(-1), table[:, :3]], -1).unique(dim=0)
    assert len(names) == len(names[:, 0].unique())  # no trajectory id is of two episodes


KINDS = ["batches", "writes of the owner", "their own writes"]


@pytest.mark.parametrize(("kind", "cls"), in_turns(KINDS, BOTH))
def test_workers_killed_at_random_moments_lose_no_row_that_was_handed_over(cls, kind, tmp_path):
    kill_at_random(cls, kind, 5, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", BOTH)
def test_workers_killed_at_hundreds_of_random_moments_lose_no_row_that_was_handed_over(cls, kind, tmp_path):
    kill_at_random(cls, kind, 150, tmp_path)
