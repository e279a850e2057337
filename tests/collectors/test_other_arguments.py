"""Arguments that code written for other releases passes: each does its work, or is refused with what to use instead."""

from __future__ import annotations

import importlib
import inspect
import os

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from contracts.each import each
from contracts.gym_loop import WORLDS, Proxy, Rule
from contracts.gym_worlds import Countdown
from engram._advice import ARGUMENTS
from engram.collectors import (
    AsyncCollector,
    Collector,
    MultiaSyncDataCollector,
    MultiCollector,
    MultiSyncDataCollector,
    SyncDataCollector,
    aSyncDataCollector,
)
from engram.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.envs import EnvBase, GymEnv, SerialEnv, TransformedEnv
from engram.envs.transforms import InitTracker, StepCounter, TensorDictPrimer
from engram.specs import Bounded, Composite, Unbounded

MULTI = [MultiSyncDataCollector, MultiaSyncDataCollector]
CLASSES = ["SyncDataCollector", "MultiCollector"]
IDS = ("collector", "traj_ids")


def countdown(lengths=(3, 1, 4)):
    return GymEnv(Countdown(lengths))


class Remembers(nn.Module):
    """Acts by a rule, and counts the steps of each episode in its hidden state."""

    def __init__(self):
        super().__init__()
        self.rule = Rule()

    def forward(self, observation, hidden, is_init):
        return self.rule(observation), torch.where(is_init, 0.0, hidden) + 1


class Recurrent(TensorDictModule):
    def make_tensordict_primer(self):
        return TensorDictPrimer(hidden=Unbounded((1,)))


def recurrent():
    return Recurrent(Remembers(), ["observation", "hidden", "is_init"], ["action", ("next", "hidden")])


def serial():
    return SerialEnv(3, [lambda w=w: GymEnv(Countdown(w)) for w in WORLDS])


@each("package", ["data", "envs", "collectors", "distributed", "transforms", "specs"])
def test_no_argument_of_a_constructor_is_taken_as_one_without_effect(package):
    module = importlib.import_module(f"engram.{package}")
    for name in ARGUMENTS.keys() & set(dir(module)):
        own = inspect.signature(getattr(module, name)).parameters
        assert not own.keys() & ARGUMENTS[name].keys(), name


def test_an_asynchronous_collector_of_one_function_has_one_worker():
    assert AsyncCollector is aSyncDataCollector is MultiaSyncDataCollector
    with AsyncCollector(countdown, Rule(), frames_per_batch=8, total_frames=16) as collector:
        assert [batch.shape for batch in collector] == [(8,), (8,)] and collector.num_workers == 1


class TestOneProcess:
    def test_the_environment_is_made_with_arguments(self):
        collector = SyncDataCollector(countdown, Rule(), frames_per_batch=4, create_env_kwargs={"lengths": (2,)})
        assert collector.rollout()[IDS].tolist() == [0, 0, 1, 1]
        with pytest.raises(TypeError, match="got one made"):
            SyncDataCollector(countdown(), Rule(), frames_per_batch=4, create_env_kwargs={"lengths": (2,)})

    def test_the_policy_may_be_made_by_the_collector(self):
        collector = SyncDataCollector(countdown, policy_factory=Rule, frames_per_batch=4)
        assert isinstance(collector.policy, Rule) and collector.rollout().shape == (4,)
        with pytest.raises(TypeError, match="cannot be used with policy"):
            SyncDataCollector(countdown, Rule(), policy_factory=Rule, frames_per_batch=4)
        with pytest.raises(TypeError, match="must be a callable"):
            SyncDataCollector(countdown, policy_factory=3, frames_per_batch=4)

    @each("make", [countdown, serial, lambda: Proxy(countdown())])
    def test_without_ids_batches_are_the_same_but_for_them(self, make):
        batches = [
            SyncDataCollector(make(), Rule(), frames_per_batch=12, track_traj_ids=tracks).rollout()
            for tracks in (True, False)
        ]
        assert "collector" not in batches[1].keys()
        assert bool((batches[0].exclude("collector") == batches[1]).all())

    @pytest.mark.parametrize("arguments", [{"split_trajs": True}, {"trajs_per_batch": 2}])
    def test_trajectories_need_ids(self, arguments):
        with pytest.raises(ValueError, match="track_traj_ids=True"):
            SyncDataCollector(countdown, Rule(), frames_per_batch=4, track_traj_ids=False, **arguments)

    def test_whole_trajectories_may_come_one_after_the_other(self):
        padded, flat, default = (
            SyncDataCollector(countdown, Rule(), trajs_per_batch=3, traj_format=form).rollout()
            for form in ("padded", "cat", None)
        )
        assert bool((padded == default).all()) and padded.shape == (3, 4)
        assert bool((flat == padded.exclude(("collector", "mask"))[padded["collector", "mask"]]).all())

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            ({"traj_format": "nested", "trajs_per_batch": 1}, "'padded' or 'cat'"),
            ({"traj_format": "cat"}, "trajs_per_batch"),
        ],
    )
    def test_other_forms_are_refused(self, arguments, match):
        with pytest.raises(ValueError, match=match):
            SyncDataCollector(countdown, Rule(), frames_per_batch=4, **arguments)

    @pytest.mark.parametrize("has_buffer", [True, False])
    def test_hooks_are_called_before_each_batch_and_with_it(self, has_buffer):
        calls = []
        rb = ReplayBuffer(storage=LazyTensorStorage(100)) if has_buffer else None
        collector = SyncDataCollector(
            countdown,
            Rule(),
            frames_per_batch=4,
            total_frames=8,
            replay_buffer=rb,
            pre_collect_hook=lambda: calls.append("before"),
            post_collect_hook=lambda batch: calls.append(
                (batch.shape[0], "x" in batch.keys(), len(rb) if rb else None)
            ),
            postproc=lambda batch: batch.set("x", torch.zeros(batch.shape)),
        )
        list(collector)
        sizes = (4, 8) if has_buffer else (None, None)
        assert calls == ["before", (4, True, sizes[0]), "before", (4, True, sizes[1])]

    def test_what_recurrent_modules_need_is_appended_to_the_environment(self):
        class Recurrent(TensorDictModule):
            def make_tensordict_primer(self):
                return StepCounter(max_steps=2)

        policy = TensorDictSequential(Recurrent(Rule(), ["observation"], ["action"]))
        for env in (countdown(), TransformedEnv(countdown(), StepCounter(step_count_key="other"))):
            plain = SyncDataCollector(env, policy, frames_per_batch=8)
            assert "step_count" not in plain.rollout().keys()
            collector = SyncDataCollector(env, policy, frames_per_batch=8, auto_register_policy_transforms=True)
            assert collector.rollout()["step_count"].max() == 1

    @pytest.mark.parametrize("made_by", ["the collector", "GymEnv", "worker"])
    def test_recurrent_modules_get_marks_of_first_steps(self, made_by):
        policy = recurrent()
        if made_by == "GymEnv":
            env = GymEnv(Countdown((3, 5)), policy=policy)
            assert isinstance(env, TransformedEnv) and list(env.observation_spec.leaves())[1:] == ["is_init", "hidden"]
            collector = SyncDataCollector(env, policy, frames_per_batch=8)
        elif made_by == "worker":
            collector = MultiSyncDataCollector(
                [lambda: GymEnv(Countdown((3, 5)))], policy, frames_per_batch=8, auto_register_policy_transforms=True
            )
        else:
            own = TransformedEnv(GymEnv(Countdown((3, 5))), InitTracker())
            for env in (GymEnv(Countdown((3, 5))), own):
                collector = SyncDataCollector(env, policy, frames_per_batch=8, auto_register_policy_transforms=True)
                assert [type(part) for part in collector.env.transform] == [InitTracker, TensorDictPrimer]
        with collector:
            batch = collector.rollout()
        steps = [0, 1, 2, 0, 1, 2, 3, 4]
        assert batch["is_init"].flatten().tolist() == [n == 0 for n in steps]
        assert batch["next", "hidden"].flatten().tolist() == [n + 1 for n in steps]

    def test_a_policy_that_reads_marks_of_first_steps_is_told_of_them_by_name(self):
        said = r"the policy reads 'is_init', .* InitTracker\(\).*auto_register_policy_transforms=True"
        with pytest.raises(KeyError, match=said):
            SyncDataCollector(countdown(), recurrent(), frames_per_batch=8)
        with pytest.raises(KeyError, match=said):
            countdown().rollout(3, recurrent())
        with pytest.raises(KeyError, match=r"InitTracker\(\('a', 'is_init'\)\)"):
            countdown().rollout(3, TensorDictModule(Rule(), ["observation", ("a", "is_init")], ["action"]))
        env = countdown()
        given = env.reset().update({"is_init": torch.ones(1, dtype=torch.bool), "hidden": torch.zeros(1)})
        assert env.rollout(3, recurrent(), tensordict=given, auto_reset=False).shape == (3,)

    def test_an_environment_that_takes_no_transforms_says_so(self):
        class Recurrent(nn.Linear):
            def make_tensordict_primer(self):
                return StepCounter()

        class Env:
            batch_size = torch.Size([])

            def step(self, td):
                """Other libraries' environments have one."""

        with pytest.raises(TypeError, match="no append_transform"):
            SyncDataCollector(Env(), Recurrent(1, 1), frames_per_batch=8, auto_register_policy_transforms=True)

    @pytest.mark.deep
    @pytest.mark.parametrize("wrap", [pytest.param(False, marks=pytest.mark.long), True])
    def test_a_compiled_policy_acts_the_same(self, wrap):
        calls = []

        def backend(graph, inputs):
            calls.append(graph)
            return graph

        def policy():
            rule = Rule()
            return TensorDictModule(rule, ["observation"], ["action"]) if wrap else rule

        torch.compiler.reset()
        compiled = SyncDataCollector(
            serial(), policy(), frames_per_batch=12, compile_policy={"backend": backend}, cudagraph_policy=True
        )
        plain = SyncDataCollector(serial(), policy(), frames_per_batch=12)
        assert bool((compiled.rollout() == plain.rollout()).all()) and calls

    @pytest.mark.parametrize(
        "arguments, kind, workers",
        [
            ({"num_workers": 2}, MultiSyncDataCollector, 2),
            ({"num_workers": 1, "sync": False}, MultiaSyncDataCollector, 1),
            ({}, MultiSyncDataCollector, 1),
        ],
    )
    def test_a_collector_whose_backend_is_processes_has_workers(self, arguments, kind, workers):
        with Collector(countdown, Rule(), backend="process", frames_per_batch=8, **arguments) as collector:
            assert type(collector) is kind and collector.num_workers == workers
            assert collector.rollout().numel() == 8
        with Collector(countdown, Rule(), backend="direct", frames_per_batch=8) as collector:
            assert type(collector) is SyncDataCollector

    def test_other_backends_and_workers_without_one_are_refused_with_what_to_use(self):
        for wrong in ({"backend": "ray"}, {"num_workers": 2}):
            with pytest.raises(TypeError, match="backend='process'"):
                Collector(countdown, Rule(), frames_per_batch=8, **wrong)

    @each("name", ["use_buffers", "trust_policy", "local_init_rb", "extend_buffer"])
    def test_what_needs_nothing_here_is_accepted(self, name):
        assert SyncDataCollector(countdown, frames_per_batch=4, **{name: True}).rollout().shape == (4,)

    @pytest.mark.parametrize(
        "name", sorted({n for cls in CLASSES for n, (allowed, _) in ARGUMENTS[cls].items() if allowed})
    )
    @pytest.mark.parametrize("cls", [SyncDataCollector, *MULTI])
    def test_meaningless_argument_is_refused_with_an_alternative(self, cls, name):
        if any(name in inspect.signature(base.__init__).parameters for base in cls.__mro__):
            pytest.skip("it has a meaning there")
        value = False if name == "extend_buffer" else "given"
        with pytest.raises(TypeError, match=rf"{cls.__name__}\({name}=.*: allowed (is|are) .*; (use|leave|a batch)"):
            cls([countdown] if cls in MULTI else countdown, frames_per_batch=4, **{name: value})

    @each("cls", [SyncDataCollector, *MULTI])
    def test_unknown_arguments_are_type_errors(self, cls):
        with pytest.raises(TypeError, match="has no argument 'frames': did you mean 'total_frames'"):
            cls([countdown] if cls in MULTI else countdown, frames_per_batch=4, frames=3)

    @each("cls", [SyncDataCollector, *MULTI])
    def test_the_warning_of_a_remainder_points_at_the_line_that_made_the_collector(self, cls):
        with pytest.warns(UserWarning, match="not a multiple") as warned:
            cls([countdown] if cls in MULTI else countdown, frames_per_batch=4, total_frames=6).shutdown()
        # Others are Python's own, such as that of forks beside threads since 3.12.
        assert [warning.filename for warning in warned if "multiple" in str(warning.message)] == [__file__]


class Endless(EnvBase):
    """Counts its steps; it never ends, and knows no `truncated`."""

    def __init__(self, batch_size=()):
        box = Bounded(0, 1000, (*batch_size, 1))
        super().__init__(Composite({"observation": box}, shape=batch_size), box, batch_size=batch_size)

    def flags(self):
        return {key: torch.zeros(*self.batch_size, 1, dtype=torch.bool) for key in ("done", "terminated")}

    def _reset(self, mask):
        if mask is None or not hasattr(self, "count"):
            self.count = torch.zeros(*self.batch_size, 1)
        else:
            self.count[mask] = 0
        return TensorDict({"observation": self.count.clone(), **self.flags()}, self.batch_size)

    def _step(self, td):
        self.count += 1
        entries = {"observation": self.count.clone(), "reward": torch.ones(*self.batch_size, 1), **self.flags()}
        return TensorDict(entries, self.batch_size)

    def _set_seed(self, seed):
        """Nothing is random."""


class Foreign:
    """An environment of another library, whose steps have no `truncated`."""

    def __init__(self, env):
        self.env = env
        self.batch_size, self.device = env.batch_size, None
        self.observation_spec, self.action_spec = env.observation_spec, env.action_spec

    def reset(self, td=None):
        return self.env.reset(td).exclude("truncated")

    def step(self, td):
        out = self.env.step(td)
        return out.exclude("truncated", ("next", "truncated"))

    def close(self):
        """Nothing to close."""


@each("wrap", [lambda env: env, Foreign])
@each("envs", [(), (2,)])
def test_episodes_without_truncated_are_cut_and_get_one(wrap, envs):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    collector = SyncDataCollector(wrap(Endless(envs)), frames_per_batch=7 * (2 if envs else 1), max_frames_per_traj=3)
    for _ in range(2):
        batch = collector.rollout()
        rb.extend(batch.reshape(-1))
    cut = batch["next", "truncated"].squeeze(-1)
    assert torch.equal(cut, batch["next", "done"].squeeze(-1))
    before = batch["observation"].squeeze(-1)
    assert torch.equal(cut, before == 2) and not batch["truncated"].any() and not batch["next", "terminated"].any()
    assert len(rb) == 14 * (2 if envs else 1)


class Constant(nn.Module):
    """Writes its weight beside the action."""

    def __init__(self, value=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def forward(self, observation):
        return torch.tensor([1, 0, 0]), self.weight.unsqueeze(0)


def constant(value=0.0):
    return TensorDictModule(Constant(value), in_keys=["observation"], out_keys=["action", "weight"])


class TestWorkers:
    @each("sync", [True, False, None])
    def test_the_base_makes_either(self, sync):
        given = {} if sync is None else {"sync": sync}
        with MultiCollector([countdown], Rule(), frames_per_batch=4, **given) as collector:
            assert type(collector) is (MultiaSyncDataCollector if sync is False else MultiSyncDataCollector)
            assert isinstance(collector, MultiCollector) and collector.rollout().numel() == 4
        with pytest.raises(TypeError, match="leave it out"):
            MultiSyncDataCollector([countdown], frames_per_batch=4, sync=False)

    @pytest.mark.parametrize("kwargs", [{"lengths": (2,)}, [{"lengths": (2,)}, {"lengths": (1,)}]])
    def test_environments_are_made_with_arguments(self, kwargs):
        with MultiSyncDataCollector(
            [countdown] * 2, Rule(), frames_per_batch=4, create_env_kwargs=kwargs, cat_results=None
        ) as collector:
            assert collector.rollout()[IDS].unique().numel() == (2 if isinstance(kwargs, dict) else 3)
        with pytest.raises(ValueError, match="are for 1 workers, and there are 2"):
            MultiSyncDataCollector([countdown] * 2, frames_per_batch=4, create_env_kwargs=[{}])

    def test_workers_make_their_policies_and_take_new_weights(self):
        factories = [lambda: constant(1.0), lambda: constant(2.0)]
        with MultiSyncDataCollector([countdown] * 2, policy_factory=factories, frames_per_batch=4) as collector:
            assert collector.rollout()["weight"].flatten().tolist() == [1, 1, 2, 2]
            with pytest.raises(TypeError, match="give the weights"):
                collector.update_policy_weights_()
            collector.update_policy_weights_(constant(3.0))
            assert collector.rollout()["weight"].flatten().tolist() == [3] * 4 and collector.policy_version == 1
            state = collector.state_dict()
            collector.update_policy_weights_(policy_or_weights={"module.weight": torch.tensor(4.0)})
            collector.load_state_dict(state)
            assert collector.rollout()["weight"].flatten().tolist() == [3] * 4

    @each(
        ("arguments", "error", "match"),
        [
            ({"policy": Rule(), "policy_factory": Rule}, TypeError, "cannot be used with policy"),
            ({"policy_factory": [Rule]}, ValueError, "1 factories in policy_factory for 2 workers"),
            ({"policy_factory": [3, 4]}, TypeError, "must be callables"),
            ({"policy_factory": Rule, "update_at_each_batch": True}, ValueError, "policy_factory leaves none here"),
            ({"max_frames_per_traj": 3, "reset_when_done": False}, ValueError, "leave out reset_when_done"),
            ({"num_threads": 0}, ValueError, "must be an integer of 1 or more"),
            ({"num_sub_threads": 0}, ValueError, "must be an integer of 1 or more"),
            ({"num_sub_threads": 2, "start_method": "fork"}, ValueError, "leave start_method out"),
        ],
    )
    def test_settings_that_cannot_work_are_refused(self, arguments, error, match):
        with pytest.raises(error, match=match):
            MultiSyncDataCollector([countdown] * 2, frames_per_batch=4, **arguments)

    def test_batches_of_one_worker_are_not_joined(self):
        with pytest.raises(ValueError, match="cat_results can only be used with MultiSync"):
            MultiaSyncDataCollector([countdown], frames_per_batch=4, cat_results=1)
        arguments = {"cat_results": "stack", "preemptive_threshold": 0.0}
        with MultiaSyncDataCollector([countdown], frames_per_batch=4, **arguments) as collector:
            assert collector.rollout().shape == (4,)

    @pytest.mark.parametrize("cls", MULTI)
    def test_each_workers_batch_ends_as_truncated_on_request_and_the_episode_goes_on(self, cls):
        with cls([lambda: countdown((100,))] * 2, Rule(), frames_per_batch=6, set_truncated=True) as collector:
            for _ in range(2):
                batch = collector.rollout().reshape(-1, 3 if cls is MultiSyncDataCollector else 6)
                assert batch["next", "truncated"][:, -1].all() and not batch["next", "truncated"][:, :-1].any()
            assert batch[IDS].max() <= 1 and collector.stats.episodes == 0

    def test_functions_of_the_user_run_in_the_workers(self, tmp_path):
        def note(what):
            with open(tmp_path / what, "a") as file:
                file.write(f"{os.getpid()} {torch.get_num_threads()}\n")

        before = torch.get_num_threads()
        with MultiSyncDataCollector(
            [countdown] * 2,
            Rule(),
            frames_per_batch=4,
            init_fn=lambda: note("init"),
            pre_collect_hook=lambda: note("before"),
            post_collect_hook=lambda batch: note(f"after-{batch.shape[0]}"),
            num_threads=before + 1,
        ) as collector:
            assert torch.get_num_threads() == before + 1
            for _ in range(2):
                collector.rollout()
            pids = {worker.pid for worker in collector._workers}
        assert torch.get_num_threads() == before
        lines = {path.name: path.read_text().split("\n")[:-1] for path in tmp_path.iterdir()}
        assert {name: len(found) for name, found in lines.items()} == {"init": 2, "before": 4, "after-2": 4}
        assert {line for found in lines.values() for line in found} == {f"{pid} 1" for pid in pids}

    @pytest.mark.deep
    def test_several_threads_in_a_worker_work_where_this_process_has_used_its_own(self):
        class Multiplies(nn.Module):
            def forward(self, observation):
                assert torch.get_num_threads() == 2
                (torch.ones(600, 600) @ torch.ones(600, 600)).sum()
                return torch.tensor([1, 0, 0])

        torch.ones(600, 600) @ torch.ones(
            600, 600
        )  # a process forked after that would wait for threads that it has not
        with MultiSyncDataCollector(
            [countdown], policy_factory=Multiplies, frames_per_batch=4, num_sub_threads=2
        ) as collector:
            assert collector.rollout().numel() == 4


class TestOtherNames:
    def test_weights_reach_workers_under_each_of_their_names(self):
        policy = nn.Sequential(nn.Linear(1, 1), Rule())
        with MultiSyncDataCollector([countdown], frames_per_batch=4, policy_factory=lambda: policy) as collector:
            for given in (
                {"weights": policy},
                {"policy": policy},
                {"policy_or_weights": policy.state_dict()},
                {"weights_dict": {"policy": policy}, "model_id": "policy"},
            ):
                collector.update_policy_weights_(**given)
            assert collector.get_policy_version() == 4 and collector.frames_per_batch_worker() == 4
            for wrong, error in (
                ({"weights": policy, "policy": policy}, TypeError),
                ({"model_id": "critic"}, ValueError),
                ({"weights_dict": {"critic": policy}}, ValueError),
                ({"worker_ids": [0]}, ValueError),
            ):
                with pytest.raises(error):
                    collector.update_policy_weights_(**wrong)

    def test_settings_and_hooks_can_be_read_and_the_hook_set(self):
        rb, seen = ReplayBuffer(storage=LazyTensorStorage(20)), []
        collector = SyncDataCollector(
            countdown, Rule(), frames_per_batch=4, total_frames=4, replay_buffer=rb, max_frames_per_traj=2
        )
        assert collector.replay_buffer is rb and collector.max_frames_per_traj == 2 and collector.postproc is None
        assert collector.traj_format == "padded" and collector.trajs_per_batch is None
        collector.set_post_collect_hook(seen.append)
        assert list(collector.iterator()) == [None] and collector.post_collect_hook == seen.append
        assert [batch.shape for batch in seen] == [(4,)]
        with pytest.raises(ValueError, match="leave index=0 out"):
            collector.reset(index=0)

    def test_another_release_s_member_says_what_to_use(self):
        collector = SyncDataCollector(countdown, frames_per_batch=4)
        assert not hasattr(collector, "getattr_env")
        with pytest.raises(AttributeError, match=r"read the attribute of `collector.env`"):
            collector.getattr_env("batch_size")
