"""What clients rely on when they collect."""

import time
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule
from torch import nn

from clients.packages import Package, sentence
from contracts.waiting import comes

NO_PAUSE = "its single collector has no pause(), and with workers it goes on beyond total_frames"


class Right(nn.Module):
    """Pushes the cart to the right, and writes its weight beside the action."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = observation.shape[:-1]
        return torch.tensor([0, 1]).expand(*shape, 2).clone(), self.weight.detach().expand(*shape, 1).clone()


def right() -> TensorDictModule:
    return TensorDictModule(Right(), in_keys=["observation"], out_keys=["action", "weight"])


def cartpole(rl: Package, **arguments: Any) -> Any:
    return rl.envs.GymEnv("CartPole-v1", **arguments)


def buffer(rl: Package, **arguments: Any) -> Any:
    return rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10_000, **arguments), batch_size=8)


def wait(is_true: Any) -> None:
    assert comes(is_true), "it never happened"


@sentence("A collector made by its newer name takes everything that its constructor names")
def newer_names(rl: Package) -> None:
    c = rl.collectors
    collector = c.Collector(
        lambda: cartpole(rl),
        right(),
        frames_per_batch=20,
        total_frames=60,
        device=None,
        storing_device="cpu",
        env_device="cpu",
        policy_device="cpu",
        init_random_frames=20,
        max_frames_per_traj=5,
        reset_at_each_iter=False,
        reset_when_done=True,
        postproc=None,
        split_trajs=False,
        exploration_type=rl.module("envs.utils").ExplorationType.RANDOM,
        return_same_td=False,
        interruptor=None,
        set_truncated=False,
        use_buffers=False,
        replay_buffer=None,
        extend_buffer=True,
        trust_policy=True,
        compile_policy=False,
        cudagraph_policy=False,
        no_cuda_sync=False,
        weight_updater=None,
        track_policy_version=False,
    )
    batches = list(collector)
    assert [batch.shape for batch in batches] == [torch.Size([20])] * 3 and len(collector) == 3
    assert bool(torch.cat(batches[1:])["action"][:, 1].all()) and not bool(batches[0]["action"][:, 1].all())
    collector.shutdown()
    for name in ("MultiCollector", "MultiSyncCollector", "MultiAsyncCollector"):
        assert isinstance(getattr(c, name), type)


@sentence("`create_env_kwargs=` reaches the function that makes the environment")
def arguments_of_environments(rl: Package) -> None:
    given = []

    def make(length: int) -> Any:
        given.append(length)
        return cartpole(rl)

    rl.collectors.Collector(make, right(), frames_per_batch=5, create_env_kwargs={"length": 3}).shutdown()
    assert given == [3]


def named(name: str) -> Any:
    """Makes an environment; of the module, so that it can be sent to workers."""
    return Package(name).envs.GymEnv("CartPole-v1")


@sentence("`create_env_kwargs=` and `policy_factory=` of collectors with workers may be one for each worker")
def arguments_of_each_worker(rl: Package) -> None:
    collector = rl.collectors.MultiSyncCollector(
        [named, named],
        policy_factory=[right, right],
        frames_per_batch=10,
        total_frames=10,
        create_env_kwargs=[{"name": rl.name}, {"name": rl.name}],
    )
    batch = next(iter(collector))
    collector.shutdown()
    assert batch.numel() == 10 and bool(batch["action"][..., 1].all())


@sentence("A module on observations may return several tensors: the action, and then `output1`, `output2`, ...")
def modules_with_several_outputs(rl: Package) -> None:
    class Two(nn.Module):
        def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
            action = torch.tensor([0, 1]).expand(*observation.shape[:-1], 2).clone()
            return action, observation * 2, observation.sum(-1, keepdim=True)

    serial = rl.envs.SerialEnv(2, lambda: cartpole(rl))
    for env in (lambda: cartpole(rl), serial, cartpole(rl, num_envs=2)):
        collector = rl.collectors.Collector(env, Two(), frames_per_batch=20, total_frames=40, init_random_frames=20)
        first, batch = collector
        collector.shutdown()
        assert set(first.keys()) == set(batch.keys()) and bool(batch["action"][..., 1].all())
        assert torch.equal(batch["output1"], batch["observation"] * 2)
        assert torch.equal(batch["output2"], batch["observation"].sum(-1, keepdim=True))


@sentence("Modules and functions whose parameters have the names of observations get these")
def policies_on_named_observations(rl: Package) -> None:
    class Two(nn.Module):
        def forward(self, observation: torch.Tensor, step_count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([0, 1]).expand(*observation.shape[:-1], 2).clone(), step_count * 2

    for policy in (Two(), lambda observation, step_count: Two()(observation, step_count)):
        env = rl.envs.TransformedEnv(cartpole(rl), rl.module("envs.transforms").StepCounter())
        collector = rl.collectors.Collector(env, policy, frames_per_batch=20, total_frames=20)
        batch = next(iter(collector))
        assert torch.equal(batch["output1"], batch["step_count"] * 2) and int(batch["output1"].max()) > 2


@sentence(
    "`weight_sync_schemes=` and `trajs_per_write=` are a TypeError that says what to use", not_in_torchrl="it has them"
)
def refused_arguments(rl: Package) -> None:
    for name in ("Collector", "MultiSyncCollector", "MultiAsyncCollector"):
        for arguments, words in (
            ({"weight_sync_schemes": {"policy": object()}}, "use update_policy_weights_(weights)"),
            ({"trajs_per_write": 2}, "use trajs_per_batch"),
        ):
            make = [lambda: cartpole(rl)] if name.startswith("Multi") else lambda: cartpole(rl)
            try:
                getattr(rl.collectors, name)(make, right(), frames_per_batch=10, **arguments)
            except TypeError as error:
                assert words in str(error) and next(iter(arguments)) in str(error)
            else:
                raise AssertionError(f"{arguments} was accepted")


@sentence(
    "A collector writes [environments, time] into a buffer of one dimension as steps, environment after environment",
    not_in_torchrl="it stores one item for each environment",
)
def steps_of_environments_are_flattened(rl: Package) -> None:
    rb = buffer(rl)
    env = rl.envs.SerialEnv(2, lambda: cartpole(rl))
    collector = rl.collectors.Collector(env, right(), frames_per_batch=40, total_frames=40, replay_buffer=rb)
    assert list(collector) == [None]
    rows = rb[:]
    joined = (rows["observation"][1:] == rows["next", "observation"][:-1]).all(-1)
    ends = rows["next", "done"][:-1].squeeze(-1).clone()
    ends[19] = True  # the last step of the first environment
    assert len(rows) == 40 and torch.equal(joined, ~ends)


class MakeCartPole:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> Any:
        return named(self.name)


@sentence("Workers fill a shared buffer whatever its sampler, which stays with the main process")
def workers_and_samplers(rl: Package) -> None:
    traj_key = ("collector", "traj_ids")
    check_workers(rl, rl.data.SliceSampler(num_slices=2, traj_key=traj_key, strict_length=False))


@sentence("Workers fill a shared buffer with priorities, too", not_in_torchrl="its tree does not load here")
def workers_and_priorities(rl: Package) -> None:
    check_workers(rl, rl.data.PrioritizedSampler(1000, 0.7, 0.5))


def check_workers(rl: Package, sampler: Any) -> None:
    storage = rl.data.LazyMemmapStorage(1000)
    rb = rl.data.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4, shared=True)
    make = [MakeCartPole(rl.name)]
    collector = rl.collectors.MultiSyncCollector(make, frames_per_batch=40, total_frames=80, replay_buffer=rb)
    list(collector)
    collector.shutdown()
    assert len(rb) == 80 and rb.sample()["observation"].shape[1:] == (4,)


@sentence("`policy_factory=` makes the policy, and a policy beside it is a TypeError")
def factories_of_policies(rl: Package) -> None:
    collector = rl.collectors.Collector(lambda: cartpole(rl), policy_factory=right, frames_per_batch=5, total_frames=5)
    assert bool(next(iter(collector))["action"][:, 1].all())
    try:
        rl.collectors.Collector(lambda: cartpole(rl), right(), policy_factory=right, frames_per_batch=5)
    except TypeError as error:
        assert "policy_factory" in str(error)
    else:
        raise AssertionError("both were accepted")


@sentence("`track_traj_ids=False` leaves the ids of trajectories out of the batches")
def batches_without_ids(rl: Package) -> None:
    collector = rl.collectors.Collector(lambda: cartpole(rl), frames_per_batch=5, total_frames=5, track_traj_ids=False)
    assert ("collector", "traj_ids") not in next(iter(collector)).keys(True)


@sentence("Hooks are called before each batch and with each batch")
def hooks(rl: Package) -> None:
    calls: list[Any] = []
    collector = rl.collectors.Collector(
        lambda: cartpole(rl),
        frames_per_batch=5,
        total_frames=10,
        pre_collect_hook=lambda: calls.append("before"),
        post_collect_hook=lambda batch: calls.append(batch.shape),
    )
    list(collector)
    assert calls == ["before", torch.Size([5])] * 2


@sentence("`trajs_per_batch` gives whole trajectories, padded or, with `traj_format='cat'`, one after the other")
def whole_trajectories(rl: Package) -> None:
    def first(**arguments: Any) -> Any:
        made = rl.collectors.Collector(
            lambda: cartpole(rl), right(), frames_per_batch=50, total_frames=200, trajs_per_batch=3, **arguments
        )
        return next(iter(made))

    padded, flat = first(), first(traj_format="cat")
    assert padded.ndim == 2 and len(padded) == 3 and padded["collector", "mask"].any(-1).all()
    assert flat.ndim == 1 and int(flat["next", "done"].sum()) == 3 and bool(flat["next", "done"][-1])
    try:
        first(traj_format="nested")
    except ValueError as error:
        assert "'padded' or 'cat'" in str(error)
    else:
        raise AssertionError("accepted")


@sentence("`split_trajectories(as_nested=True)` gives nested tensors without padding")
def nested_trajectories(rl: Package) -> None:
    steps = 47  # a prime: trajectories of one length, which torchrl returns as plain tensors, cannot occur
    batch = next(
        iter(rl.collectors.Collector(lambda: cartpole(rl), right(), frames_per_batch=steps, total_frames=steps))
    )
    split = rl.module("collectors.utils").split_trajectories(batch, as_nested=True)
    observation = split["observation"]
    assert split.batch_size == torch.Size([len(batch["collector", "traj_ids"].unique()), -1]) and observation.is_nested
    assert torch.equal(torch.cat(list(observation.unbind(0))), batch["observation"])
    assert ("collector", "mask") not in split.keys(True)


@sentence("`split_trajectories(prefix=)` says where ids and the mask are")
def prefix_of_trajectories(rl: Package) -> None:
    split_trajectories = rl.module("collectors.utils").split_trajectories
    batch = next(iter(rl.collectors.Collector(lambda: cartpole(rl), right(), frames_per_batch=60, total_frames=60)))
    renamed = batch.exclude("collector")
    renamed["episode", "traj_ids"] = batch["collector", "traj_ids"]
    expected, split = split_trajectories(batch), split_trajectories(renamed, prefix="episode")
    assert torch.equal(split["episode", "mask"], expected["collector", "mask"]) and split.shape == expected.shape
    made = split_trajectories(batch.exclude("collector"), prefix="episode")
    assert torch.equal(made["episode", "mask"], expected["collector", "mask"])
    assert made["episode", "traj_ids"][:, 0].tolist() == list(range(len(made)))


@sentence("`max_frames_per_traj` cuts episodes of environments that have no `truncated`, and adds it")
def episodes_without_truncated(rl: Package) -> None:
    theirs = Package("torchrl")  # what makes an environment is not what this is about

    class Counts(theirs.envs.EnvBase):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            specs = theirs.data
            self.observation_spec = specs.Composite(observation=specs.Unbounded(shape=(1,)))
            self.action_spec = specs.Bounded(low=-1, high=1, shape=(1,))
            self.reward_spec = specs.Unbounded(shape=(1,))
            flag = specs.Categorical(2, shape=(1,), dtype=torch.bool)
            self.done_spec = specs.Composite(done=flag, terminated=flag.clone())

        def entries(self, **more: Any) -> TensorDict:
            flags = {key: torch.zeros(1, dtype=torch.bool) for key in ("done", "terminated")}
            return TensorDict({"observation": torch.tensor([float(self.count)]), **flags, **more}, [])

        def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
            self.count = 0
            return self.entries()

        def _step(self, tensordict: Any) -> TensorDict:
            self.count += 1
            return self.entries(reward=torch.ones(1))

        def _set_seed(self, seed: Any) -> None:
            """Nothing is random."""

    collector = rl.collectors.Collector(Counts(), frames_per_batch=9, total_frames=9, max_frames_per_traj=3)
    batch = next(iter(collector))
    assert batch["observation"].flatten().tolist() == [0, 1, 2] * 3
    assert batch["next", "truncated"].flatten().tolist() == [False, False, True] * 3
    assert batch["next", "done"].flatten().tolist() == [False, False, True] * 3


@sentence("Collectors with workers take `set_truncated=`, `cat_results=` and `num_threads=`")
def arguments_of_workers(rl: Package) -> None:
    threads = torch.get_num_threads()
    for cat_results, shape in (("stack", (2, 10)), (0, (20,)), (None, (2, 10))):
        collector = rl.collectors.MultiSyncCollector(
            [lambda: cartpole(rl)] * 2,
            right(),
            frames_per_batch=20,
            total_frames=20,
            cat_results=cat_results,
            set_truncated=True,
            num_threads=1,
            use_buffers=True,
        )
        batch = next(iter(collector))
        assert torch.get_num_threads() == 1
        collector.shutdown()
        ends = batch.reshape(2, 10)["next", "done"][:, -1]
        assert batch.shape == shape and bool(ends.all())
    assert torch.get_num_threads() == threads
    try:
        rl.collectors.MultiAsyncCollector([lambda: cartpole(rl)], frames_per_batch=20, cat_results=0)
    except ValueError as error:
        assert "cat_results" in str(error)
    else:
        raise AssertionError("accepted")


@sentence("`MultiCollector(sync=)` makes either of the collectors with workers")
def either_of_two(rl: Package) -> None:
    c = rl.collectors
    for sync, name in ((True, "MultiSyncCollector"), (False, "MultiAsyncCollector")):
        collector = c.MultiCollector([lambda: cartpole(rl)], right(), frames_per_batch=20, total_frames=20, sync=sync)
        collector.shutdown()
        assert isinstance(collector, getattr(c, name))


@sentence("`len(collector)` is the number of batches, a TypeError without `total_frames`")
def lengths(rl: Package) -> None:
    assert len(rl.collectors.Collector(lambda: cartpole(rl), frames_per_batch=100, total_frames=330)) == 4
    try:
        len(rl.collectors.Collector(lambda: cartpole(rl), frames_per_batch=100, total_frames=-1))
    except TypeError:
        pass
    else:
        raise AssertionError("it has a length")


@sentence("A single collector fills the buffer in the background while the main thread samples and updates the weights")
def background_thread(rl: Package) -> None:
    rb, policy = buffer(rl), right()
    collector = rl.collectors.Collector(
        lambda: cartpole(rl), policy, frames_per_batch=50, total_frames=1000, replay_buffer=rb
    )
    collector.start()
    wait(lambda: len(rb) >= 50)
    for _ in range(20):
        assert rb.sample().shape == (8,)
        collector.update_policy_weights_(TensorDict.from_module(policy).data)
    wait(lambda: not collector.is_running())
    collector.async_shutdown()
    assert len(rb) == rb.write_count == 1000


@sentence("Collecting in the background needs a replay buffer: RuntimeError")
def background_without_buffer(rl: Package) -> None:
    collector = rl.collectors.Collector(lambda: cartpole(rl), frames_per_batch=50)
    try:
        collector.start()
    except RuntimeError as error:
        assert "replay" in str(error).lower()
    else:
        raise AssertionError("it started")


@sentence(
    "`with collector.pause()` nothing is collected, and afterwards it goes on, for single collectors too",
    not_in_torchrl=NO_PAUSE,
)
def pauses(rl: Package) -> None:
    rb = buffer(rl)
    collector = rl.collectors.Collector(lambda: cartpole(rl), right(), frames_per_batch=10, replay_buffer=rb)
    collector.start()
    try:
        wait(lambda: len(rb) >= 20)
        with collector.pause():
            before = rb.write_count
            state = collector.state_dict()
            time.sleep(0.05)
            assert rb.write_count == before == state["frames"]
        wait(lambda: rb.write_count > before)
    finally:
        collector.async_shutdown()


@sentence("Workers fill a shared buffer in the background; a pause stops them, `async_shutdown` ends them")
def background_workers(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyMemmapStorage(100_000), batch_size=8, shared=True)
    collector = rl.collectors.MultiAsyncCollector(
        [lambda: cartpole(rl)], right(), frames_per_batch=20, total_frames=-1, replay_buffer=rb
    )
    collector.start()
    wait(lambda: len(rb) >= 100)
    with collector.pause():
        time.sleep(0.2)
        before = rb.write_count
        time.sleep(0.2)
        assert rb.sample().shape == (8,) and rb.write_count == before
    wait(lambda: rb.write_count > before)
    collector.async_shutdown()


@sentence("In the background workers stop at `total_frames`, and the buffer has exactly these", not_in_torchrl=NO_PAUSE)
def background_total(rl: Package) -> None:
    for name in ("MultiSyncCollector", "MultiAsyncCollector"):
        rb = rl.data.ReplayBuffer(storage=rl.data.LazyMemmapStorage(100_000), batch_size=8, shared=True)
        collector = getattr(rl.collectors, name)(
            [lambda: cartpole(rl)], right(), frames_per_batch=20, total_frames=400, replay_buffer=rb
        )
        collector.start()
        wait(lambda buffer=rb: len(buffer) >= 400)
        time.sleep(0.3)
        collector.async_shutdown()
        assert rb.write_count == 400


@sentence("An error in the background is raised by the collector's next call", not_in_torchrl="it is printed only")
def background_errors(rl: Package) -> None:
    calls = iter(range(1000))

    class Breaks(Right):
        def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if next(calls) == 30:
                raise ArithmeticError("the policy broke")
            return super().forward(observation)

    policy = TensorDictModule(Breaks(), in_keys=["observation"], out_keys=["action", "weight"])
    collector = rl.collectors.Collector(
        lambda: cartpole(rl), policy, frames_per_batch=10, total_frames=-1, replay_buffer=buffer(rl)
    )
    collector.start()
    wait(lambda: not collector.is_running())
    try:
        collector.async_shutdown()
    except ArithmeticError as error:
        assert "the policy broke" in str(error)
    else:
        raise AssertionError("the error was lost")


@sentence("TorchRL's collector fills the package's buffer, by iterating and in the background")
def torchrl_collector(rl: Package) -> None:
    theirs = Package("torchrl")
    for runs_behind in (False, True):
        rb = buffer(rl)
        collector = theirs.collectors.Collector(
            lambda: cartpole(theirs), right(), frames_per_batch=20, total_frames=100, replay_buffer=rb
        )
        if runs_behind:
            collector.start()
            wait(lambda buffer=rb: len(buffer) == 100)
            collector.async_shutdown()
        else:
            assert list(collector) == [None] * 5
        rows = rb[:]
        over = rows["next", "done"][:-1].squeeze(-1)
        assert rb.sample().shape == (8,) and len(rows) == 100
        assert torch.equal(rows["observation"][1:][~over], rows["next", "observation"][:-1][~over])


@sentence(
    "The primers of recurrent policies are appended to the environment with `auto_register_policy_transforms=True`"
)
def primers_of_policies(rl: Package) -> None:
    class Remembers(TensorDictModule):
        def make_tensordict_primer(self) -> Any:
            return rl.module("envs.transforms").StepCounter(max_steps=4)

    policy = Remembers(Right(), in_keys=["observation"], out_keys=["action", "weight"])
    collector = rl.collectors.Collector(
        lambda: cartpole(rl), policy, frames_per_batch=20, total_frames=20, auto_register_policy_transforms=True
    )
    assert int(next(iter(collector))["step_count"].max()) == 3


@sentence("`compile_policy=` compiles the policy, `cudagraph_policy=` is accepted on the CPU")
def compiled_policies(rl: Package) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    collector = rl.collectors.Collector(
        lambda: cartpole(rl), right(), frames_per_batch=5, total_frames=5, compile_policy={"backend": backend}
    )
    assert bool(next(iter(collector))["action"][:, 1].all()) and graphs
    collector = rl.collectors.Collector(
        lambda: cartpole(rl), right(), frames_per_batch=5, total_frames=5, cudagraph_policy=True
    )
    assert next(iter(collector)).shape == (5,)


@sentence("`reset()` of a collector with workers: every environment begins a new trajectory at the next batch")
def workers_are_reset(rl: Package) -> None:
    make = [lambda: rl.envs.TransformedEnv(cartpole(rl), rl.envs.StepCounter())] * 2
    collector = rl.collectors.MultiSyncCollector(make, None, frames_per_batch=8, total_frames=1000, cat_results="stack")
    batches = iter(collector)
    assert next(batches)["step_count"][:, 0].flatten().tolist() == [0, 0]
    assert next(batches)["step_count"][:, 0].flatten().tolist() == [4, 4]
    collector.reset()
    assert next(batches)["step_count"][:, 0].flatten().tolist() == [0, 0]
    collector.shutdown()


def team_class(rl: Package) -> Any:
    """An environment of two agents that see and do things of different shapes; all numbers are the step's."""
    d = rl.data

    class Team(rl.envs.EnvBase):
        def __init__(self) -> None:
            super().__init__()
            seen = [d.Composite(obs=d.Unbounded((width,))) for width in (3, 5)]
            done = [d.Composite(action=d.Bounded(-1, 1, (width,))) for width in (2, 4)]
            self.observation_spec = d.Composite(agents=torch.stack(seen, 0), count=d.Unbounded((1,)))
            self.full_action_spec = d.Composite(agents=torch.stack(done, 0))
            self.full_reward_spec = d.Composite(agents=d.Composite(reward=d.Unbounded((2, 1)), shape=(2,)))
            self.full_done_spec = d.Composite(done=d.Categorical(2, (1,), dtype=torch.bool))

        def _observations(self) -> TensorDict:
            agents = [TensorDict({"obs": torch.full((width,), float(self.n))}) for width in (3, 5)]
            done = torch.tensor([self.n >= 5])
            entries = {"count": torch.full((1,), float(self.n)), "done": done, "terminated": done.clone()}
            return TensorDict({"agents": lazy_stack(agents, 0), **entries})

        def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
            self.n = 0
            return self._observations()

        def _step(self, tensordict: Any) -> TensorDict:
            assert [one["action"].shape for one in tensordict["agents"].unbind(0)] == [(2,), (4,)]
            self.n += 1
            return self._observations().set(("agents", "reward"), torch.full((2, 1), float(self.n)))

        def _set_seed(self, seed: Any) -> None:
            pass

    return Team


@sentence(
    "Agents that see and do things of different shapes, as lazy stacks, pass through a collector into every storage"
)
def heterogeneous_agents_are_collected(rl: Package) -> None:
    team = team_class(rl)
    for kind in ("ListStorage", "LazyTensorStorage", "LazyMemmapStorage", "LazyStackStorage"):
        rb = rl.data.TensorDictReplayBuffer(storage=getattr(rl.data, kind)(30), batch_size=6)
        for batch in rl.collectors.Collector(team(), None, frames_per_batch=7, total_frames=14):
            assert (
                batch["next", "agents", "reward"][:, 1].flatten().tolist() == batch["next", "count"].flatten().tolist()
            )
            rb.extend(batch)
        sample = rb.sample()
        for i, (seen, done) in enumerate(((3, 2), (5, 4))):
            agent = sample["agents"][..., i]
            assert agent["obs"].shape == (6, seen) and agent["action"].shape == (6, done)
            assert bool((agent["obs"] == sample["count"]).all())


@sentence("Specs of agents that differ stack, and several such environments step together")
def heterogeneous_environments_step_together(rl: Package) -> None:
    team = team_class(rl)
    spec = team().observation_spec["agents"]
    assert spec.shape == (2,) and spec["obs"].shape == (2, -1) and spec.is_in(spec.rand()) and spec == spec.clone()
    assert spec[1]["obs"].shape == (5,)
    batch = rl.envs.SerialEnv(2, team).rollout(3)
    assert batch.shape == (2, 3) and batch["agents"][..., 1]["obs"].shape == (2, 3, 5)
