"""Workers of a ParallelEnv that fail or die and are replaced: every row is accounted for."""

from __future__ import annotations

import os
import signal

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from contracts.kills import of_restarts
from contracts.tiers import in_ci, in_turns
from engram.collectors import MultiSyncDataCollector, SyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer, SliceSampler
from engram.envs import EnvBase, GymEnv, ParallelEnv, TransformedEnv
from engram.envs.utils import check_env_specs
from engram.errors import WorkerError
from engram.specs import Categorical, Composite, Unbounded
from engram.transforms import RewardSum, StepCounter
from processes.test_restarts import HOW, cases, fail, hang, kill

IDS = ("collector", "traj_ids")
LENGTH = 7
ENV, LIFE, EPISODE, STEP, SEED = range(5)


class Lives(gymnasium.Env):
    """Shows its number, the number of its process, its episode, the step in it, and its seed.

    `what` happens before step `at` of the first `lives` processes, which are counted in a file.
    """

    observation_space = spaces.Box(-(2**40), 2**40, (5,), np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self, number, folder, at=None, what=None, lives=1, on_reset=False):
        with open(folder / f"lives-{number}", "a+") as file:
            file.write("+")
            file.flush()
            life = file.tell()
        self.shown = np.array([number, life, -1, 0, -1])
        self.left, self.what, self.on_reset = at, what if life <= lives else None, on_reset

    def _count(self):
        if self.what is not None:
            self.left -= 1
            if self.left == 0:
                self.what()

    def reset(self, *, seed=None, options=None):
        if self.on_reset:
            self._count()
        self.shown[EPISODE], self.shown[STEP] = self.shown[EPISODE] + 1, 0
        if seed is not None:
            self.shown[SEED] = seed
        return self.shown.copy(), {}

    def step(self, action):
        if not self.on_reset:
            self._count()
        self.shown[STEP] += 1
        return self.shown.copy(), 1.0, bool(self.shown[STEP] == LENGTH), False, {}


class Plain(GymEnv):
    """Has no raw steps, as it may have changed them."""

    def _step(self, td):
        return super()._step(td)


WAYS = {
    "raw values": (GymEnv, lambda env: env),
    "tensordicts": (Plain, lambda env: env),
    "transforms of batches": (GymEnv, lambda env: TransformedEnv(env, StepCounter())),
    "transforms of steps": (GymEnv, lambda env: TransformedEnv(env, lambda td: td)),
}


@pytest.fixture
def parallel(tmp_path):
    envs = []

    def make(cls=GymEnv, *, restarts=1, n=3, num_workers=2, **second):
        makers = [lambda k=k: cls(Lives(k, tmp_path, **(second if k == 1 else {}))) for k in range(n)]
        envs.append(ParallelEnv(n, makers, num_workers=num_workers, restarts=restarts))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


def check_rows(batch):
    """Rows `[time]` of one environment: each follows the one before it, or begins a trajectory with a reset."""
    shown, following = batch["observation"].tolist(), batch["next", "observation"].tolist()
    done, ids = batch["next", "done"].reshape(-1).tolist(), batch.get(IDS, None)
    for t in range(len(shown)):
        assert following[t] == [*shown[t][:STEP], shown[t][STEP] + 1, shown[t][SEED]]
        assert batch["next", "reward"][t] == 1
        is_next = t > 0 and shown[t] == following[t - 1]
        if t:
            assert is_next != done[t - 1] or (not is_next and ids is not None)  # between two batches the id says it
        if t and ids is not None:
            assert is_next == (ids[t] == ids[t - 1])
        assert is_next or shown[t][STEP] == 0


QUICK = [("raw values", 25, "SIGKILL"), ("tensordicts", 21, "the simulator broke")]


DEEP = [("transforms of batches", 21, "exit code 7"), ("transforms of steps", 25, "SIGKILL")]


@pytest.mark.parametrize(("way", "at", "how"), cases(WAYS, [25, 21], HOW, quick=QUICK, deep=DEEP))
def test_a_worker_that_is_lost_costs_its_open_episodes_only(parallel, way, at, how):
    cls, transformed = WAYS[way]
    env = transformed(parallel(cls, at=at, what=HOW[how]))
    collector = SyncDataCollector(env, frames_per_batch=30)
    with pytest.warns(RuntimeWarning, match=rf"environment worker 1 (?s:.*){how}(?s:.*)0 of 1 restarts are left"):
        batches = [collector.rollout() for _ in range(5)]
    batch = torch.cat(batches, -1)
    assert batch.shape == (3, 50) and "_idle" not in batch.keys()
    for row in batch:
        check_rows(row)
    lives = batch["observation"][..., LIFE]
    assert lives[0].tolist() == [1] * 50
    for row, mine in zip(batch[1:], lives[1:], strict=True):  # both environments of the worker are lost
        assert mine.tolist() == [1] * (at - 1) + [2] * (51 - at)
        assert bool(row["next", "truncated"][at - 2]) == (at == 25)
        assert int(row["next", "truncated"].sum()) == (at == 25)
    assert len(batch[IDS].unique()) == int(batch[IDS].max()) + 1


@pytest.mark.parametrize(("cls", "what"), in_turns([GymEnv, Plain], [kill, fail]))
def test_a_worker_lost_in_a_reset_is_replaced(parallel, cls, what):
    env = parallel(cls, at=3, what=what, on_reset=True, num_workers=3)
    collector = SyncDataCollector(env, frames_per_batch=30)
    with pytest.warns(RuntimeWarning):
        batch = torch.cat([collector.rollout() for _ in range(4)], -1)
    for row in batch:
        check_rows(row)
    handed_over = 13 if cls is GymEnv else 14  # with raw values the step that ends an episode has the reset in it
    assert batch["observation"][1, :, LIFE].tolist() == [1] * handed_over + [2] * (40 - handed_over)
    assert batch["observation"][1, 14, EPISODE] in (0, 1)  # its successor may have been reset a second time


@pytest.mark.parametrize("cls", [GymEnv, Plain])
def test_a_worker_killed_between_two_batches_begins_anew(parallel, cls):
    env = parallel(cls, num_workers=3)
    collector = SyncDataCollector(env, frames_per_batch=30)
    first = collector.rollout()
    os.kill(env.pids[1], signal.SIGKILL)
    with pytest.warns(RuntimeWarning):
        second = collector.rollout()
    assert first["observation"][1, -1, STEP] == 2 and not first["next", "done"][1, -1]
    assert second["observation"][1, 0].tolist()[:4] == [1, 2, second["observation"][1, 0, EPISODE], 0]
    assert second[IDS][1, 0] > first[IDS].max() and second[IDS][0, 0] == first[IDS][0, -1]
    for row in torch.cat([first, second], -1):
        check_rows(row)
    assert collector.stats.last_length == LENGTH  # the episode that was lost is none that ended


@pytest.mark.parametrize("cls", [GymEnv, Plain])
def test_steps_of_ones_own_find_the_rows_that_are_none_marked(parallel, cls):
    env = parallel(cls, num_workers=3)
    env.set_seed(10)
    state = env.reset()
    assert state["_idle"].sum() == 0
    stepped, state = env.step_and_maybe_reset(env.rand_action(state))
    os.kill(env.pids[1], signal.SIGKILL)
    with pytest.warns(RuntimeWarning):
        stepped, state = env.step_and_maybe_reset(env.rand_action(state))
    assert stepped["_idle"].reshape(-1).tolist() == [False, True, False]
    assert stepped["next", "truncated"].reshape(-1).tolist() == [False, True, False]
    assert stepped["next", "reward"].reshape(-1).tolist() == [1, 0, 1]
    assert state["observation"][:, STEP].tolist() == [2, 0, 2] and state["observation"][:, LIFE].tolist() == [1, 2, 1]
    assert state["observation"][:, SEED].tolist()[::2] == [10, 12]
    assert not state["done"].any() and not state["_idle"].any()
    stepped = env.step(env.rand_action(state))
    assert not stepped["_idle"].any() and stepped["next", "observation"][:, STEP].tolist() == [3, 1, 3]


@pytest.mark.parametrize("cls", [GymEnv, Plain])
def test_an_environment_with_restarts_has_what_its_specs_say(parallel, cls):
    env = parallel(cls)
    assert "_idle" in env.observation_spec.leaves()
    assert "_idle" not in env.rollout(3).keys()
    check_env_specs(env)


@pytest.mark.parametrize(("cls", "breaks"), in_turns([GymEnv, Plain], [False, True]))
def test_a_rollout_leaves_out_what_a_lost_worker_did_not_step(parallel, cls, breaks):
    env = parallel(cls, at=4, what=kill)
    with pytest.warns(RuntimeWarning):
        batch = env.rollout(12, break_when_any_done=breaks)
    assert batch.shape == (3, 3 if breaks else 12)
    for row in batch:
        check_rows(row)
    assert batch["next", "truncated"].squeeze(-1)[:, 2].tolist() == [False, True, True]


@pytest.mark.parametrize("cls", [GymEnv, Plain])
def test_after_the_last_restart_the_error_comes_as_without_restarts(parallel, cls):
    env = parallel(cls, at=5, what=fail, lives=3, restarts=2)
    with pytest.warns(RuntimeWarning) as warned, pytest.raises(WorkerError, match="simulator broke"):
        env.rollout(100, break_when_any_done=False)
    ends = [message.rpartition("; ")[2] for message in of_restarts(warned)]
    assert ends == [f"{n} of 2 restarts are left" for n in (1, 0)]
    for call in (env.reset, env.rand_step):
        with pytest.raises(WorkerError):
            call()


def test_an_environment_that_fails_while_it_is_made_uses_up_the_restarts(tmp_path):
    made = tmp_path / "made"

    def broken():
        with open(made, "a") as file:
            file.write("+")
        fail()

    with pytest.warns(RuntimeWarning) as warned, pytest.raises(WorkerError, match="simulator broke"):
        ParallelEnv(2, [lambda: GymEnv(Lives(0, tmp_path)), broken], num_workers=2, restarts=3)
    assert len(of_restarts(warned)) == 3 and made.read_text() == "++++"


@pytest.mark.parametrize("cls", in_ci([GymEnv, Plain], [GymEnv]))
def test_a_worker_that_hangs_is_replaced_and_others_that_hang_after_it(cls, tmp_path):
    makers = [lambda k=k: cls(Lives(k, tmp_path, at=5, what=hang)) for k in range(2)]
    env = ParallelEnv(2, makers, num_workers=2, restarts=2, timeout=1.5)
    with pytest.warns(RuntimeWarning, match=r"step 5 of environment \d did not end within timeout=1.5"):
        batch = env.rollout(12, break_when_any_done=False)
    for row in batch:
        check_rows(row)
    assert batch["observation"][..., LIFE].unique().tolist() == [1, 2]
    env.close()


@pytest.mark.parametrize("cls", in_ci([GymEnv, Plain], [Plain]))
def test_the_same_seed_gives_a_successor_the_same_seed_another_than_before(cls, tmp_path):
    seeds = []
    for run in range(2):
        folder = tmp_path / str(run)
        folder.mkdir()
        makers = [lambda k=k, f=folder: cls(Lives(k, f, at=5, what=fail, lives=2)) for k in range(2)]
        with pytest.warns(RuntimeWarning):
            env = ParallelEnv(2, makers, num_workers=2, restarts=4)
            env.set_seed(5)
            batch = env.rollout(20, break_when_any_done=False)
        env.close()
        shown = batch["observation"]
        seeds.append([shown[shown[..., LIFE] == life][:, SEED].unique().tolist() for life in (1, 2, 3)])
    assert seeds[0] == seeds[1] and seeds[0][0] == [5, 6]
    assert len({seed for of_life in seeds[0] for seed in of_life}) == 6


#: Within a batch, and between two batches.
MOMENTS = pytest.mark.parametrize(("at", "cls"), in_turns([25, 21], [GymEnv, Plain]))


@MOMENTS
def test_no_slice_in_a_buffer_joins_two_lives(parallel, cls, at):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(1000, ndim=2), sampler=SliceSampler(slice_len=3, traj_key=None), batch_size=60
    )
    env = parallel(cls, at=at, what=kill)
    collector = SyncDataCollector(env, frames_per_batch=30, replay_buffer=rb)
    with pytest.warns(RuntimeWarning):
        for _ in range(5):
            collector.rollout()
    for _ in range(20):
        shown = rb.sample()["observation"].reshape(-1, 3, 5)
        assert bool((shown[..., :STEP] == shown[:, :1, :STEP]).all())


@MOMENTS
def test_whole_trajectories_end_where_their_worker_was_lost(parallel, cls, at):
    env = parallel(cls, at=at, what=kill)
    collector = SyncDataCollector(env, frames_per_batch=30, trajs_per_batch=3)
    with pytest.warns(RuntimeWarning):
        batches = [collector.rollout() for _ in range(5)]
    rows = [row[row["collector", "mask"]] for batch in batches for row in batch]
    lengths = [len(row) for row in rows if row["observation"][0, LIFE] == 1 and row["observation"][0, ENV] > 0]
    assert sorted(lengths) == sorted([LENGTH] * (at // 7 * 2) + [(at - 1) % 7] * 2 * bool((at - 1) % 7)) or at == 21
    for row in rows:
        check_rows(row)
        assert bool(row["next", "done"][-1])
        assert bool(row["next", "truncated"][-1]) == (len(row) < LENGTH)


def test_environments_lost_in_a_worker_of_a_collector_begin_anew_in_its_batches(tmp_path):
    def make():
        return ParallelEnv(2, lambda: GymEnv(Lives(0, tmp_path, at=21, what=kill)), num_workers=1, restarts=1)

    with MultiSyncDataCollector([make], frames_per_batch=20) as collector:
        batch = torch.cat([collector.rollout()[0] for _ in range(4)], -1)
    for row in batch:
        check_rows(row)


def test_statistics_leave_out_episodes_that_were_lost_between_two_batches(parallel):
    env = TransformedEnv(parallel(at=21, what=kill), RewardSum())
    collector = SyncDataCollector(env, frames_per_batch=30)
    with pytest.warns(RuntimeWarning):
        batch = torch.cat([collector.rollout() for _ in range(5)], -1)
    ends = batch["next", "done"].squeeze(-1)
    assert collector.stats.episodes == int(ends.sum()) and set(collector._episodes.lengths) == {LENGTH}
    assert bool((batch["next", "episode_reward"].squeeze(-1) == batch["next", "observation"][..., STEP]).all())


class Stateless(EnvBase):
    """In TorchRL's form: reads the length of its episodes, and where it is in them; agents have an action each."""

    def __init__(self, folder, number, at=None, what=None, on_reset=False):
        super().__init__(batch_size=[])
        with open(folder / f"lives-{number}", "a+") as file:
            file.write("+")
            file.flush()
            self.life = file.tell()
        self.left, self.what, self.on_reset = at, what if self.life == 1 else None, on_reset
        shown = {key: Unbounded((1,), dtype=torch.int64) for key in ("step", "length", "life")}
        self.observation_spec = Composite(shown)
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Composite({"agents": Composite({"action": Categorical(2, (3,))})})
        self.reward_spec = Unbounded((1,))

    def _count(self):
        if self.what is not None:
            self.left -= 1
            if self.left == 0:
                self.what()

    def _reset(self, tensordict=None, **kwargs):
        if self.on_reset:
            self._count()
        given = None if tensordict is None else tensordict.get("length", None)
        length = torch.tensor([kwargs.get("length", 3)]) if given is None else given
        return TensorDict({"step": torch.tensor([0]), "length": length, "life": torch.tensor([self.life])}, [])

    def _step(self, tensordict):
        if not self.on_reset:
            self._count()
        assert tensordict["agents", "action"].shape == (3,)
        step, length = tensordict["step"] + 1, tensordict["length"]
        ends = {"reward": torch.ones(1), "terminated": step >= length}
        return TensorDict({"step": step, "length": length, "life": torch.tensor([self.life]), **ends}, [])

    def _set_seed(self, seed):
        pass


@pytest.fixture
def stateless(tmp_path):
    envs = []

    def make(num_workers=2, **second):
        makers = [lambda k=k: Stateless(tmp_path, k, **(second if k == 1 else {})) for k in range(3)]
        envs.append(ParallelEnv(3, makers, num_workers=num_workers, restarts=1))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


LENGTHS = TensorDict({"length": torch.tensor([[4], [5], [6]])}, [3])


@pytest.mark.parametrize(("extra", "what"), in_turns([False, True], [kill, fail]))
def test_environments_that_read_their_state_keep_it_when_their_worker_is_replaced(stateless, what, extra):
    env = stateless(at=8, what=what)
    td = env.reset(LENGTHS.copy().set("more", torch.ones(3)) if extra else LENGTHS.copy())
    if extra:
        td = td.set("more", torch.ones(3))
    with pytest.warns(RuntimeWarning, match="0 of 1 restarts are left"):
        batch = env.rollout(20, auto_reset=False, tensordict=td, break_when_any_done=False)
    assert batch.shape == (3, 20) and batch["agents", "action"].shape == (3, 20, 3)
    for k, row in enumerate(batch):
        length, step, life = 4 + k, row["step"].squeeze(-1).tolist(), row["life"].squeeze(-1).tolist()
        assert row["length"].unique().tolist() == row["next", "length"].unique().tolist() == [length]
        if k == 0:
            assert step == [t % 4 for t in range(20)] and set(life) == {1}
        else:  # two environments of one worker
            assert step == [t % length for t in range(7)] + [t % length for t in range(13)]
            assert life == [1] * 7 + [2] * 13
            assert bool(row["next", "truncated"][6]) and int(row["next", "truncated"].sum()) == 1


@pytest.mark.parametrize("is_partial", [False, True], ids=["all", "some"])
def test_a_worker_lost_in_a_reset_that_reads_the_state_is_reset_with_it(stateless, is_partial):
    env = stateless(at=2 if is_partial else 1, what=kill, on_reset=True)
    if is_partial:
        td = env.reset(LENGTHS.copy())
        mask = torch.tensor([[True], [True], [False]])
        with pytest.warns(RuntimeWarning):
            fresh = env.reset(td.set("_reset", mask))
    else:
        with pytest.warns(RuntimeWarning):
            fresh = env.reset(LENGTHS.copy())
    assert fresh["length"].flatten().tolist() == [4, 5, 6] and not fresh["step"].any()
    batch = env.rollout(9, auto_reset=False, tensordict=fresh.exclude("_reset"), break_when_any_done=False)
    assert [row["length"].unique().tolist() for row in batch] == [[4], [5], [6]]
    assert (batch["life"][1] == 2).all()


def test_a_rollout_until_all_are_done_keeps_the_end_of_the_others(stateless):
    env = stateless(at=3, what=kill)
    with pytest.warns(RuntimeWarning):
        batch = env.rollout(50, tensordict=LENGTHS.copy(), break_when_any_done=False, break_when_all_done=True)
    assert batch.shape == (3, 4) and bool(batch["next", "terminated"][0, -1])
    assert batch["next", "truncated"][:, :, 0].tolist() == [[False] * 4, *[[False, True, False, False]] * 2]
