"""What clients rely on of copies, processes, states, and the small newer abilities."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack

from clients.packages import Package, sentence
from contracts.waiting import NEVER

OLDER = "TorchRL 0.14"


def steps(start: int, stop: int) -> TensorDict:
    number = torch.arange(start, stop)
    done = (number % 5 == 4).unsqueeze(1)
    following = {"reward": torch.ones(len(number), 1), "done": done}
    return TensorDict({"n": number, "next": following, "episode": number // 5}, [stop - start])


def copied(rl: Package, way: Any, storage: Any) -> None:
    rb = rl.data.TensorDictReplayBuffer(storage=storage, batch_size=4)
    empty = way(rb)
    assert len(empty) == 0 and type(empty) is type(rb)
    rb.extend(steps(0, 7))
    made = way(rb)
    assert (made[:]["n"] == torch.arange(7)).all() and made.writer._cursor == 7
    rb.extend(steps(50, 53))
    assert len(made) == 7 and len(rb) == 10
    made.extend(steps(7, 9))
    assert len(made) == 9


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@sentence("`pickle` and `copy.deepcopy` of a buffer with a list storage copy its rows")
def lists_are_copied(rl: Package) -> None:
    for way in (pickled, copy.deepcopy):
        storage = rl.data.ListStorage(20)
        rb = rl.data.ReplayBuffer(storage=storage, batch_size=4)
        assert len(way(rb)) == 0
        rb.extend(steps(0, 7))
        made = way(rb)
        rb.extend(steps(7, 9))
        assert (len(made), len(rb)) == (7, 9) and int(made[3]["n"]) == 3


@sentence("`pickle` and `copy.deepcopy` of a buffer with a tensor storage copy its rows, written or not")
def tensors_are_copied(rl: Package) -> None:
    for way in (pickled, copy.deepcopy):
        copied(rl, way, rl.data.LazyTensorStorage(20))


@sentence(
    "`pickle` and `copy.deepcopy` of a buffer with a mapped storage without a folder copy its rows",
    not_in_torchrl="mapped tensors are pickled as what they are mapped to, which fails or stays the same rows",
)
def mapped_rows_are_copied(rl: Package) -> None:
    for way in (pickled, copy.deepcopy):
        copied(rl, way, rl.data.LazyMemmapStorage(20))


@sentence(
    "A pickle of a mapped storage with a `scratch_dir` keeps its path, and a deep copy has rows of its own",
    not_in_torchrl="each copy of it counts the rows that were there when it was made",
)
def a_folder_is_kept(rl: Package) -> None:
    folder = tempfile.mkdtemp()
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyMemmapStorage(20, scratch_dir=folder), batch_size=4)
    rb.extend(steps(0, 7))
    same, other = pickled(rb), copy.deepcopy(rb)
    assert str(same.storage.scratch_dir).rstrip("/") == folder
    rb.extend(steps(90, 91))
    assert (len(same), len(other)) == (8, 7)


@sentence(
    "`pickle` and `copy.deepcopy` copy the rows of a shared buffer, too", not_in_torchrl="its locks are not pickled"
)
def shared_rows_are_copied(rl: Package) -> None:
    for way in (pickled, copy.deepcopy):
        for storage in (rl.data.LazyTensorStorage, rl.data.LazyMemmapStorage):
            rb = rl.data.ReplayBuffer(storage=storage(20), batch_size=4, shared=True)
            rb.extend(steps(0, 7))
            made = way(rb)
            rb.extend(steps(7, 9))
            made.extend(steps(50, 53))
            assert rb[:]["n"].tolist() == list(range(9)) and made[:]["n"].tolist() == [*range(7), 50, 51, 52]


@sentence("`pickle` and `copy.deepcopy` of a buffer copy its parts: sampler, writer, transform, prefetching")
def parts_are_copied(rl: Package) -> None:
    d, transforms = rl.data, rl.module("envs.transforms")
    for way in (pickled, copy.deepcopy):
        for more in (
            {"writer": d.TensorDictMaxValueWriter(rank_key="n")},
            {"sampler": d.SliceSampler(num_slices=1, traj_key="episode", strict_length=False)},
            {"sampler": d.SamplerWithoutReplacement()},
            {"prefetch": 2},
            {"transform": transforms.DTypeCastTransform(torch.int64, torch.float32, in_keys=["n"])},
        ):
            rb = d.TensorDictReplayBuffer(storage=d.LazyTensorStorage(20), batch_size=4, **more)
            rb.extend(steps(0, 7))
            made = way(rb)
            assert type(made.writer) is type(rb.writer) and type(made.sampler) is type(rb.sampler)
            batches = [part.sample() for part in (rb, made)]
            assert batches[0]["n"].dtype == batches[1]["n"].dtype
            made.extend(steps(7, 9))
            assert (len(made), len(rb)) == (9, 7)


@sentence("`pickle` and `copy.deepcopy` of a buffer copy its priorities", not_in_torchrl="its tree does not load here")
def priorities_are_copied(rl: Package) -> None:
    for way in (pickled, copy.deepcopy):
        rb = rl.data.TensorDictReplayBuffer(
            storage=rl.data.LazyTensorStorage(20), sampler=rl.data.PrioritizedSampler(20, 1.0, 1.0, eps=0.0),
            batch_size=50,
        )  # fmt: skip
        rb.update_priority(rb.extend(steps(0, 4)), torch.tensor([0.0, 0.0, 1.0, 0.0]))
        made = way(rb)
        rb.update_priority(torch.arange(4), torch.tensor([1.0, 0.0, 0.0, 0.0]))
        assert set(made.sample()["n"].tolist()) == {2} and set(rb.sample()["n"].tolist()) == {0}


@sentence(
    "`pickle` and `copy.deepcopy` of ensembles and of buffers of pytrees copy their rows",
    not_in_torchrl="mapped tensors are not pickled",
)
def ensembles_and_pytrees_are_copied(rl: Package) -> None:
    for way in (pickled, copy.deepcopy):
        storages = [rl.data.ListStorage, rl.data.LazyTensorStorage, rl.data.LazyMemmapStorage]
        members = [rl.data.ReplayBuffer(storage=storage(20)) for storage in storages]
        for member in members:
            member.extend(steps(0, 7))
        made = way(rl.data.ReplayBufferEnsemble(*members, batch_size=6, sample_from_all=True))
        for member in members:
            member.empty()
        assert made.sample().shape == (3, 2)
        for storage in storages:
            rb = rl.data.ReplayBuffer(storage=storage(20), batch_size=4)
            rb.extend([{"a": torch.tensor(i), "b": (torch.tensor(i),)} for i in range(4)])
            assert set(way(rb).sample()["b"][0].tolist()) <= {0, 1, 2, 3}


@sentence(
    "A deep copy of a mapped storage with a `scratch_dir` has no name: the folder and the temporary files stay as "
    "they are",
    not_in_torchrl="its copies are the same rows",
)
def deep_copies_have_no_names(rl: Package) -> None:
    folder, temporary, usual = tempfile.mkdtemp(), tempfile.mkdtemp(), tempfile.tempdir
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyMemmapStorage(20, scratch_dir=folder), batch_size=4)
    rb.extend(steps(0, 7))
    before = sorted(os.listdir(folder))
    tempfile.tempdir = temporary  # where no other program makes files
    try:
        made = copy.deepcopy(rb)
        made.extend(steps(7, 9))
    finally:
        tempfile.tempdir = usual
    assert made.storage.scratch_dir is None and (len(made), len(rb)) == (9, 7)
    assert sorted(os.listdir(folder)) == before and os.listdir(temporary) == []


@sentence("A copy draws the batches that its original draws")
def copies_go_on_alike(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(
        storage=rl.data.LazyTensorStorage(20), sampler=rl.data.SamplerWithoutReplacement(), batch_size=4,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    rb.extend(steps(0, 16))
    rb.sample()
    made = copy.deepcopy(rb)
    assert [made.sample()["n"].tolist() for _ in range(5)] == [rb.sample()["n"].tolist() for _ in range(5)]


def refused_to_send(thing: Any, words: str) -> None:
    try:
        multiprocessing.get_context("spawn").Process(target=len, args=(thing,)).start()
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError("it was sent")


def extended(rb: Any, lengths: Any) -> None:
    """What a child does with the buffer that it is sent."""
    torch.set_num_threads(1)
    rb.extend(steps(100, 103))
    lengths.put(len(rb))


@sentence("A shared buffer that is sent to a process, a spawned one too, travels as the same rows")
def shared_buffers_are_sent(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(20), batch_size=4, shared=True)
    rb.extend(steps(0, 4))
    context = multiprocessing.get_context("forkserver")
    lengths = context.Queue()
    child = context.Process(target=extended, args=(rb, lengths))
    child.start()
    assert lengths.get(timeout=NEVER) == 7
    child.join(NEVER)
    assert len(rb) == 7 and rb[:]["n"].tolist() == [0, 1, 2, 3, 100, 101, 102]


@sentence("Sending a list storage to a process is a RuntimeError in the parent")
def lists_are_not_sent(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.ListStorage(20))
    rb.extend(steps(0, 5))
    refused_to_send(rb.storage, "Cannot share a storage of type")
    refused_to_send(rb, "Cannot share a storage of type")


@sentence(
    "Sending rows in private memory to a process is a RuntimeError in the parent",
    not_in_torchrl="0.14 moves the tensors into shared memory instead",
)
def private_tensors_are_not_sent(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(20))
    rb.extend(steps(0, 5))
    refused_to_send(rb, "Cannot share a storage of type")


@sentence("Sending a storage that was not written yet is a RuntimeError in the parent")
def unwritten_storages_are_not_sent(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyMemmapStorage(20))
    refused_to_send(rb, "has not been initialized")


@sentence("Sending a buffer with a max-value writer is a RuntimeError in the parent")
def best_rows_are_not_sent(rl: Package) -> None:
    rb = rl.data.TensorDictReplayBuffer(
        storage=rl.data.LazyMemmapStorage(20), writer=rl.data.TensorDictMaxValueWriter(rank_key="n")
    )
    rb.extend(steps(0, 5))
    refused_to_send(rb, "cannot be shared between processes")


@sentence(
    "Sending a buffer with a prioritised sampler is a RuntimeError in the parent",
    not_in_torchrl="its trees need a compiled extension that fits this torch",
)
def priorities_are_not_sent(rl: Package) -> None:
    sampler = rl.data.PrioritizedSampler(20, 0.7, 0.5)
    rb = rl.data.TensorDictReplayBuffer(storage=rl.data.LazyMemmapStorage(20), sampler=sampler)
    rb.extend(steps(0, 5))
    refused_to_send(rb, "cannot be shared between processes")


@sentence('`state_dict()["_batch_size"]` is the batch size, and loading it gives it back')
def states_have_the_batch_size(rl: Package) -> None:
    rb, other = (
        rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(20), batch_size=n, sampler=rl.data.RandomSampler())
        for n in (6, 3)
    )
    rb.extend(steps(0, 9))
    assert rb.state_dict()["_batch_size"] == 6
    other.extend(steps(0, 9))
    other.load_state_dict(rb.state_dict())
    assert other._batch_size == 6


class Hook:
    """A save hook that wants to know where the oldest row is."""

    shift = None
    is_full = None

    def __call__(self, data: Any, **more: Any) -> Any:
        self.seen = (self.shift, self.is_full)
        return data


@sentence("Save hooks with `shift` and `is_full` have them set before they are called")
def hooks_are_informed(rl: Package) -> None:
    for n, expected in ((3, (3, False)), (13, (3, True))):
        rb, hook = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10)), Hook()
        rb.register_save_hook(hook)
        for start in range(0, n, 5):
            rb.extend(steps(start, min(n, start + 5)))
        rb.dumps(tempfile.mkdtemp())
        assert hook.seen == expected, hook.seen


# ---- small newer abilities ----
def tracking(rl: Package, **more: Any) -> Any:
    writer = rl.data.TensorDictRoundRobinWriter(track_generations=True)
    rb = rl.data.TensorDictReplayBuffer(storage=rl.data.LazyTensorStorage(5), writer=writer, batch_size=4, **more)
    data = steps(0, 5)
    data["version"] = torch.arange(5)
    return rb, rb.extend(data)


@sentence("`track_generations=True` of a writer: `generations_of(index)` changes when another row takes a slot")
def writers_know_generations(rl: Package) -> None:
    rb, index = tracking(rl)
    before = rb.writer.generations_of(index)
    data = steps(5, 7)
    data["version"] = torch.zeros(2, dtype=torch.int64)
    rb.extend(data)
    after = rb.writer.generations_of(index)
    assert (before != after).tolist() == [True, True, False, False, False]
    fresh = rl.data.RoundRobinWriter(track_generations=True)
    rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(5), writer=fresh).extend(steps(0, 2))
    assert fresh.generations_of(torch.tensor([0, 4])).tolist() == [0, -1]


@sentence("Samples of a buffer that tracks generations have `index_generation`, and so has their info")
def samples_have_generations(rl: Package) -> None:
    rb, _ = tracking(rl)
    batch, info = rb.sample(return_info=True)
    assert torch.equal(batch["index_generation"], rb.writer.generations_of(batch["index"]))
    assert torch.equal(info["index_generation"], batch["index_generation"])


@sentence(
    "`track_generations=True` of a buffer is the same switch", not_in_torchrl=f"{OLDER} has it at the writer only"
)
def buffers_have_the_switch(rl: Package) -> None:
    rb = rl.data.TensorDictReplayBuffer(storage=rl.data.LazyTensorStorage(5), batch_size=4, track_generations=True)
    index = rb.extend(steps(0, 5))
    assert rb.writer.tracks_generations and "index_generation" in rb.sample().keys()
    assert (rb.writer.generations_of(index) >= 0).all()


@sentence("`update_if_present` patches entries of rows that are still there, and no others")
def rows_are_patched_if_present(rl: Package) -> None:
    rb, index = tracking(rl)
    generation = rb.writer.generations_of(index)
    data = steps(5, 7)
    data["version"] = torch.zeros(2, dtype=torch.int64)
    rb.extend(data)
    result = rb.update_if_present(index=index, generation=generation, patch={("next", "reward"): torch.zeros(5, 1)})
    assert result.updated.tolist() == [False, False, True, True, True]
    assert (result.updated_count, result.stale_count) == (3, 2)
    assert rb[:]["next", "reward"].flatten().tolist() == [1, 1, 0, 0, 0]
    assert rb[:]["n"].tolist() == [5, 6, 2, 3, 4]


@sentence("`update_if_present` with versions rejects older ones, equal ones with `require_newer`, and stores the rest")
def versions_decide(rl: Package) -> None:
    rb, index = tracking(rl)
    records = {"index": index, "generation": rb.writer.generations_of(index), "version_key": "version"}
    result = rb.update_if_present(**records, patch={"n": index + 50}, version=2)
    assert result.updated.tolist() == [True, True, True, False, False]
    assert result.version_rejected.tolist() == [False, False, False, True, True]
    assert rb[:]["version"].tolist() == [2, 2, 2, 3, 4]
    result = rb.update_if_present(**records, patch={"n": index + 90}, version=2, require_newer=True)
    assert result.updated_count == 0 and rb[:]["n"].tolist() == [50, 51, 52, 3, 4]


@sentence("A patch that does not fit changes nothing: an unknown key, another shape, a version without its key")
def patches_are_checked(rl: Package) -> None:
    rb, index = tracking(rl)
    records = {"index": index, "generation": rb.writer.generations_of(index)}
    for error, arguments in (
        (KeyError, {"patch": {"nothing": torch.zeros(5)}}),
        (ValueError, {"patch": {"n": torch.zeros(4, dtype=torch.int64)}}),
        (ValueError, {"patch": {"n": torch.zeros(5)}}),
        (ValueError, {"patch": {"n": index}, "version": 3}),
    ):
        try:
            rb.update_if_present(**records, **arguments)
        except error:
            assert rb[:]["n"].tolist() == list(range(5))
        else:
            raise AssertionError(f"{arguments} was taken")


@sentence("`update_if_present` takes its arguments by name")
def patches_are_given_by_name(rl: Package) -> None:
    rb, index = tracking(rl)
    try:
        rb.update_if_present(index, rb.writer.generations_of(index), {"n": index})
    except TypeError:
        return
    raise AssertionError("it was taken by place")


@sentence(
    "The result of `update_if_present` has `applied`, `updated`, `stale` and `rejected`",
    not_in_torchrl=f"{OLDER} has `updated` and `version_rejected`",
)
def results_say_all(rl: Package) -> None:
    rb, index = tracking(rl)
    generation = rb.writer.generations_of(index).clone()
    generation[4] = 77
    result = rb.update_if_present(
        index=index, generation=generation, patch={"n": index}, version_key="version", version=2
    )
    assert result.applied == 3 and result.stale.tolist() == [False] * 4 + [True]
    assert result.rejected.tolist() == [False, False, False, True, False]
    assert result._fields == ("applied", "updated", "stale", "rejected")


@sentence("`iter_trajectories` cuts flat data by trajectory ids")
def trajectories_are_iterated(rl: Package) -> None:
    trajectories = list(rl.module("data").iter_trajectories(steps(3, 12)))
    assert [t.data["n"].tolist() for t in trajectories] == [[3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert [t.length for t in trajectories] == [2, 5, 2] and float(trajectories[1].total_reward) == 5
    by_key = rl.module("data.replay_buffers").iter_trajectories(steps(3, 6), trajectory_key="n")
    assert [t.length for t in by_key] == [1, 1, 1]


@sentence("`find_start_stop_traj` says where trajectories of a ring begin and end")
def boundaries_are_found(rl: Package) -> None:
    find = rl.module("data.replay_buffers.utils").find_start_stop_traj
    end = torch.tensor([0, 1, 0, 0, 1, 0]).bool()
    for settings, expected in (
        ({"end": end, "at_capacity": False}, [[[0], [2], [5]], [[1], [4], [5]], [2, 3, 1]]),
        ({"end": end, "at_capacity": True, "cursor": 2}, [[[5], [2], [3]], [[1], [2], [4]], [3, 1, 2]]),
        ({"trajectory": torch.tensor([0, 0, 1, 1, 0, 0]), "at_capacity": True, "cursor": 3},
         [[[4], [2]], [[1], [3]], [4, 2]]),
        ({"end": torch.tensor([[0, 1], [0, 0], [1, 0]]).bool(), "at_capacity": True, "cursor": 0},
         [[[0, 0], [1, 0], [1, 1]], [[0, 0], [2, 0], [0, 1]], [1, 2, 3]]),
    ):  # fmt: skip
        assert [part.tolist() for part in find(**settings)] == expected


@sentence("`auto_cleanup=True` of a mapped storage removes its files at the end of the process")
def files_go_with_their_process(rl: Package) -> None:
    folder = tempfile.mkdtemp()
    script = (
        "import sys, torch\nfrom tensordict import TensorDict\n"
        f"from {rl.name}.data import LazyMemmapStorage, ReplayBuffer\n"
        "for cleans in (True, False):\n"
        f"    globals()[str(cleans)] = rb = ReplayBuffer(storage=LazyMemmapStorage(\n"
        f"        10, scratch_dir={folder!r} + '/' + str(cleans), auto_cleanup=cleans))\n"
        "    rb.extend(TensorDict({'n': torch.arange(3)}, [3]))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert os.listdir(folder) == ["False"]


@sentence(
    "`rb.stats()` says rows, bytes, capacity, writes, draws and episodes",
    not_in_torchrl=f"{OLDER} returns a dict with other names",
)
def buffers_have_stats(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10), batch_size=4)
    for start in range(0, 15, 5):
        rb.extend(steps(start, start + 5))
    rb.sample()
    stats = rb.stats()
    assert (stats.rows, stats.capacity, stats.writes, stats.draws, stats.episodes) == (10, 10, 15, 1, 2)
    assert stats.bytes > 0
    assert json.dumps(stats._asdict())


# ---- environments of several agents ----
class MakeAgents:
    """Makes an environment of two agents, whose action, reward and flags are in their group, in TorchRL's style."""

    def __init__(self, package: str, lazy: bool, root_flags: bool) -> None:
        self.settings = package, lazy, root_flags

    def __call__(self) -> Any:
        package, lazy, root_flags = self.settings
        rl = Package(package)
        composite, flag = rl.data.Composite, rl.data.Categorical

        class Agents(rl.envs.EnvBase):
            def __init__(self) -> None:
                super().__init__(device=None, batch_size=[])
                self.observation_spec = composite(
                    {"agents": composite({"observation": rl.data.Unbounded((2, 3))}, shape=(2,))}
                )
                self.action_spec = composite({"agents": composite({"action": flag(4, shape=(2,))}, shape=(2,))})
                self.reward_spec = composite({"agents": composite({"reward": rl.data.Unbounded((2, 1))}, shape=(2,))})
                flags = {name: flag(2, shape=(2, 1), dtype=torch.bool) for name in ("done", "terminated")}
                whole = {name: flag(2, shape=(1,), dtype=torch.bool) for name in ("done", "terminated")}
                self.done_spec = composite({"agents": composite(flags, shape=(2,)), **(whole if root_flags else {})})
                self.time = 0

            def _state(self, **entries: torch.Tensor) -> TensorDict:
                ended = torch.full((2, 1), self.time >= 4)
                observation = torch.full((2, 3), float(self.time))
                entries |= {"observation": observation, "done": ended, "terminated": ended.clone()}
                agents = TensorDict(entries, [2])
                flags = {"done": ended[0], "terminated": ended[0].clone()} if root_flags else {}
                return TensorDict({"agents": lazy_stack(list(agents.unbind(0))) if lazy else agents, **flags}, [])

            def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
                self.time = 0
                return self._state()

            def _step(self, tensordict: Any) -> TensorDict:
                self.time += 1
                return self._state(reward=tensordict["agents", "action"].float().unsqueeze(-1))

            def _set_seed(self, seed: Any = None) -> None:
                torch.manual_seed(seed or 0)

        return Agents()


def check_agents(batch: Any) -> None:
    """Each trajectory is four steps long, every agent has its reward, and time goes on."""
    action, reward = batch["agents", "action"], batch["next", "agents", "reward"]
    assert action.shape == (*batch.shape, 2) and torch.equal(reward.squeeze(-1), action.float())
    after, ids = batch["next", "agents", "observation"][..., 0, 0], batch["collector", "traj_ids"]
    for times, trajectories in zip(after.reshape(-1, batch.shape[-1]), ids.reshape(-1, batch.shape[-1]), strict=True):
        assert times.tolist() == [1.0 + k % 4 for k in range(len(times))]
        assert (trajectories[1:] != trajectories[:-1]).tolist() == [k % 4 == 3 for k in range(len(times) - 1)]


@sentence("Environments with nested action, reward and done keys pass through a collector, agents as lazy stacks too")
def agents_are_collected(rl: Package) -> None:
    make_collector = getattr(rl.collectors, "Collector", None) or rl.collectors.SyncDataCollector
    for lazy in (False, True):
        for root_flags in (True, False):
            make = MakeAgents(rl.name, lazy, root_flags)
            assert make().action_keys == [("agents", "action")] and make().reward_keys == [("agents", "reward")]
            collector = make_collector(make(), None, frames_per_batch=10, total_frames=10)
            check_agents(next(iter(collector)))
            collector.shutdown()


@sentence("Environments with nested action, reward and done keys pass through collectors with workers")
def agents_are_collected_by_workers(rl: Package) -> None:
    make_collector = getattr(rl.collectors, "MultiSyncCollector", None) or rl.collectors.MultiSyncDataCollector
    make = MakeAgents(rl.name, True, False)
    collector = make_collector([make, make], None, frames_per_batch=12, total_frames=12, cat_results="stack")
    try:
        check_agents(next(iter(collector)))
    finally:
        collector.shutdown()


@sentence("Slices of agents' steps are sampled from the buffer that a collector fills")
def agents_are_sampled(rl: Package) -> None:
    make_collector = getattr(rl.collectors, "Collector", None) or rl.collectors.SyncDataCollector
    rb = rl.data.TensorDictReplayBuffer(
        storage=rl.data.LazyTensorStorage(100),
        sampler=rl.data.SliceSampler(slice_len=2, traj_key=("collector", "traj_ids")), batch_size=8,
    )  # fmt: skip
    collector = make_collector(MakeAgents(rl.name, False, True)(), None, frames_per_batch=24, total_frames=24)
    rb.extend(next(iter(collector)))
    collector.shutdown()
    time = rb.sample()["agents", "observation"][:, 0, 0].reshape(-1, 2)
    assert (time.diff() == 1).all()
