"""What clients rely on when they sample."""

import warnings

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from clients.packages import Package, sentence

#: TorchRL keeps priorities in a compiled extension that is built for one release of torch.
NO_EXTENSION = "its sum tree is a compiled extension, which does not load here"


def steps(lengths: list[int], ids: bool = True, done: bool = True) -> TensorDict:
    """Episodes one after the other; `n` counts the steps."""
    n = sum(lengths)
    ends = torch.zeros(n, 1, dtype=torch.bool)
    ends[torch.tensor(lengths).cumsum(0) - 1] = True
    data = TensorDict({"n": torch.arange(n), "next": {"n": torch.arange(n) + 1}}, [n])
    if ids:
        data["ids"] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    if done:
        flags = {"done": ends, "terminated": ends.clone(), "truncated": torch.zeros_like(ends)}
        data["next"].update(flags)
    return data


def sliced(rl: Package, data: TensorDict, batch_size: int | None = None, **how):
    sampler = rl.data.SliceSampler(**how)
    rb = rl.data.TensorDictReplayBuffer(
        storage=rl.data.LazyTensorStorage(len(data)), sampler=sampler, batch_size=batch_size
    )
    rb.extend(data)
    return rb


# ---- slices ----
@sentence("A slice sampler without a buffer says truncated, done and terminated of its rows, each bool [n, 1]")
def slices_alone_have_flags(rl: Package) -> None:
    rb = sliced(rl, steps([4, 6, 5]), slice_len=2, traj_key="ids")
    sampler = rl.data.SliceSampler(slice_len=2, traj_key="ids")
    index, info = sampler.sample(rb._storage, 20)
    index = index[0] if isinstance(index, tuple) else index
    last = torch.tensor([[False], [True]]).repeat(10, 1)
    truncated, done, terminated = (info["next", name] for name in ("truncated", "done", "terminated"))
    for flag in (truncated, done, terminated):
        assert flag.dtype is torch.bool and flag.shape == (20, 1)
    assert bool((truncated & last == last).all()) and bool((done & last == last).all())
    assert torch.equal(terminated, steps([4, 6, 5])["next", "terminated"][index])


@sentence("The info of a sample of slices has terminated, too")
def samples_of_slices_have_terminated(rl: Package) -> None:
    rb = sliced(rl, steps([4, 6, 5]), slice_len=2, traj_key="ids")
    batch, info = rb.sample(20, return_info=True)
    assert info["next", "terminated"].shape == (20, 1)
    assert torch.equal(info["next", "terminated"], batch["next", "terminated"])


@sentence("Where the stored data lack traj_key, trajectories end where end_key says")
def end_key_replaces_a_missing_traj_key(rl: Package) -> None:
    rb = sliced(rl, steps([4, 6], ids=False), slice_len=2, traj_key="ids", end_key=("next", "done"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        starts = rb.sample(200)["n"][::2]
    assert set(starts.tolist()) == {0, 1, 2, 4, 5, 6, 7, 8}


@sentence("That the stored data lack traj_key is said in one warning", not_in_torchrl="it says nothing")
def a_missing_traj_key_warns_once(rl: Package) -> None:
    rb = sliced(rl, steps([4, 6], ids=False), slice_len=2, traj_key="ids", end_key=("next", "done"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            rb.sample(4)
    assert sum("'ids'" in str(warning.message) for warning in caught) == 1


@sentence(
    "Neither traj_key nor end_key in the stored data: KeyError", not_in_torchrl="its RuntimeError speaks of the storage"
)
def no_key_at_all_is_a_key_error(rl: Package) -> None:
    rb = sliced(rl, steps([4, 6], ids=False, done=False), slice_len=2, traj_key="ids")
    with pytest.raises(KeyError):
        rb.sample(20)


@sentence("span=i leaves at least slice_len - i steps of a slice; it is a bool, a number or a pair of them")
def a_span_may_be_a_number(rl: Package) -> None:
    seen = set()
    for span in (2, (2, False), (False, 2), (0, 2), False):
        rb = sliced(rl, steps([9, 9]), slice_len=4, traj_key="ids", span=span, truncated_key=None)
        for _ in range(200):
            batch = rb.sample(4)
            assert len(batch) >= (4 if span is False else 2)
            seen.add(len(batch))
    assert seen == {2, 3, 4}


@sentence("The first of a pair of spans is that of the beginnings of slices, the second that of their ends")
def spans_are_of_beginnings_and_ends(rl: Package) -> None:
    for span, place, step in (((2, False), 0, 0), ((False, 2), -1, 8)):
        rb = sliced(rl, steps([9, 9]), slice_len=4, traj_key="ids", span=span, truncated_key=None)
        short = [n for n in (rb.sample(4)["n"] % 9 for _ in range(200)) if len(n) < 4]
        assert short and {int(n[place]) for n in short} == {step}


@sentence(
    "span=True lets slices begin and end anywhere: one step may be left",
    not_in_torchrl="some of its slices have no step at all",
)
def a_span_may_be_true(rl: Package) -> None:
    rb = sliced(rl, steps([9, 9]), slice_len=4, traj_key="ids", span=True, truncated_key=None)
    assert {len(rb.sample(4)) for _ in range(400)} == {1, 2, 3, 4}


@sentence("A span works with priorities, too", not_in_torchrl=NO_EXTENSION)
def a_span_works_with_priorities(rl: Package) -> None:
    sampler = rl.data.PrioritizedSliceSampler(18, 0.7, 0.9, slice_len=4, traj_key="ids", span=(False, 2))
    rb = rl.data.TensorDictReplayBuffer(storage=rl.data.LazyTensorStorage(18), sampler=sampler, batch_size=4)
    rb.extend(steps([9, 9]))
    assert {len(rb.sample()) for _ in range(200)} == {2, 3, 4}


@sentence("pad_output pads short slices and gives a mask")
def short_slices_are_padded(rl: Package) -> None:
    rb = sliced(rl, steps([3, 9]), slice_len=5, traj_key="ids", strict_length=False, pad_output=True)
    batch = rb.sample(100)
    mask = batch["collector", "mask"].reshape(20, 5)
    assert batch.shape == (100,) and mask.dtype is torch.bool
    assert set(mask.sum(1).tolist()) == {3, 5} and bool((mask[:, :3]).all())


@sentence("`sampler.traj_key` and `sampler.end_key` are readable")
def keys_of_a_slice_sampler_are_readable(rl: Package) -> None:
    sampler = rl.data.SliceSampler(slice_len=2, traj_key=("collector", "traj_ids"))
    assert sampler.traj_key == ("collector", "traj_ids") and sampler.end_key == ("next", "done")


@sentence("`SliceSampler(end_keys=)`: any of several flags ends a trajectory")
def several_end_keys(rl: Package) -> None:
    data = steps([4, 6], ids=False)
    data["next", "truncated"][6] = True
    rb = sliced(rl, data, slice_len=2, end_keys=[("next", "done"), ("next", "truncated")])
    assert set(rb.sample(400)["n"][::2].tolist()) == {0, 1, 2, 4, 5, 7, 8}


@sentence("`DEFAULT_DONE_KEYS` is public")
def default_done_keys(rl: Package) -> None:
    assert set(rl.data.DEFAULT_DONE_KEYS) == {"done", "terminated", "truncated"}
    assert rl.module("data.replay_buffers").DEFAULT_DONE_KEYS is rl.data.DEFAULT_DONE_KEYS


# ---- batch sizes and epochs ----
def samplers_of(rl: Package):
    return rl.module("data.replay_buffers.samplers")


@sentence("Samplers with drop_last=True need a batch size in the buffer: ValueError when it is made")
def full_batches_need_a_batch_size(rl: Package) -> None:
    for sampler in (
        samplers_of(rl).SamplerWithoutReplacement(drop_last=True),
        samplers_of(rl).SliceSamplerWithoutReplacement(drop_last=True, num_slices=2),
    ):
        with pytest.raises(ValueError, match="predictable batch-size"):
            rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10), sampler=sampler)


@sentence("With drop_last=True a batch larger than the storage is a ValueError")
def full_batches_fit_the_storage(rl: Package) -> None:
    for size in (8, 12):
        with pytest.raises(ValueError, match="greater than the storage capacity"):
            rb = rl.data.ReplayBuffer(
                storage=rl.data.LazyTensorStorage(10), batch_size=size,
                sampler=samplers_of(rl).SamplerWithoutReplacement(drop_last=True),
            )  # fmt: skip
            rb.extend(torch.arange(5))
            rb.sample()


@sentence("`_sample_list` is what is left of the epoch, None before the first")
def what_is_left_of_an_epoch(rl: Package) -> None:
    sampler = samplers_of(rl).SamplerWithoutReplacement()
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10), sampler=sampler)
    rb.extend(torch.arange(10))
    assert sampler._sample_list is None
    drawn = rb.sample(4).tolist()
    left = sampler._sample_list.tolist()
    assert len(left) == 6 and sorted(drawn + left) == list(range(10))
    assert rb.sample(4).tolist() == left[:4] and sampler._sample_list.tolist() == left[4:]


@sentence("No batch size anywhere: `sample()` and iterating raise RuntimeError")
def no_batch_size_is_a_runtime_error(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10))
    rb.extend(torch.arange(5))
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        rb.sample()
    with pytest.raises(RuntimeError, match="Batch_size was not specified"):
        next(iter(rb))


# ---- priorities ----
def prioritized(rl: Package, capacity: int = 10, size: int = 10):
    sampler = rl.data.PrioritizedSampler(capacity, 0.7, 0.4)
    return rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(size), sampler=sampler, batch_size=4)


@sentence("A max_capacity below the storage's max_size warns", not_in_torchrl=NO_EXTENSION)
def a_small_capacity_warns(rl: Package) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prioritized(rl, 10, 20)
    assert any("capacity" in str(warning.message) for warning in caught)


@sentence("A step that is stored beyond max_capacity is an error", not_in_torchrl=NO_EXTENSION)
def steps_beyond_the_capacity_are_refused(rl: Package) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rb = prioritized(rl, 10, 20)
    rb.extend(torch.arange(10))
    with pytest.raises(ValueError, match="capacity"):
        rb.extend(torch.arange(1))


@sentence("alpha, beta and eps of a prioritised sampler may be set at any time", not_in_torchrl=NO_EXTENSION)
def settings_of_priorities_may_be_set(rl: Package) -> None:
    rb = prioritized(rl)
    rb.update_priority(rb.extend(torch.arange(10)), torch.arange(10.0))
    for name in ("alpha", "beta", "eps"):
        setattr(rb._sampler, name, 0.25)
        assert getattr(rb._sampler, name) == 0.25 and len(rb.sample()) == 4


@sentence("What alpha, beta and eps are set to decides the next priorities and weights", not_in_torchrl=NO_EXTENSION)
def settings_of_priorities_count(rl: Package) -> None:
    sampler = rl.data.PrioritizedSampler(2, 1.0, 1.0, eps=0.0)
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(2), sampler=sampler, batch_size=4000)
    rb.extend(torch.arange(2))

    def share(*priorities: float) -> float:
        rb.update_priority(torch.arange(2), torch.tensor(priorities))
        return float((rb.sample() == 1).float().mean())

    assert abs(share(1.0, 9.0) - 0.9) < 0.05
    sampler.alpha = 0.5
    assert abs(share(1.0, 9.0) - 0.75) < 0.05
    sampler.eps = 1.0
    assert abs(share(0.0, 0.0) - 0.5) < 0.05 and share(0.0, 8.0) < 0.8
    sampler.beta = 0.0
    assert rb.sample(return_info=True)[1]["priority_weight"].unique().tolist() == [1.0]


def scheduled(rl: Package, make) -> list[float]:
    rb = prioritized(rl)
    schedulers, scheduler = rl.module("data.replay_buffers.scheduler"), None
    scheduler = make(schedulers, rb)
    values = []
    for _ in range(4):
        scheduler.step()
        values.append(round(float(rb._sampler.beta), 6))
    return values


@sentence("`LinearScheduler` goes to a final value in equal steps", not_in_torchrl=NO_EXTENSION)
def a_linear_scheduler(rl: Package) -> None:
    assert scheduled(rl, lambda s, rb: s.LinearScheduler(rb, "beta", 1.0, 3)) == [0.6, 0.8, 1.0, 1.0]


@sentence("`StepScheduler` multiplies or adds at every nth step", not_in_torchrl=NO_EXTENSION)
def a_step_scheduler(rl: Package) -> None:
    assert scheduled(rl, lambda s, rb: s.StepScheduler(rb, "beta", gamma=0.5, n_steps=2)) == [0.4, 0.2, 0.2, 0.1]
    added = scheduled(rl, lambda s, rb: s.StepScheduler(rb, "beta", gamma=0.1, mode="additive", max_value=0.55))
    assert added == [0.5, 0.55, 0.55, 0.55]


@sentence("`LambdaScheduler` multiplies the initial value by a function of the step", not_in_torchrl=NO_EXTENSION)
def a_lambda_scheduler(rl: Package) -> None:
    assert scheduled(rl, lambda s, rb: s.LambdaScheduler(rb, "beta", lambda i: i / 2)) == [0.2, 0.4, 0.6, 0.8]


@sentence("`SchedulerList` steps several schedulers", not_in_torchrl=NO_EXTENSION)
def a_list_of_schedulers(rl: Package) -> None:
    def both(s, rb):
        return s.SchedulerList([s.LinearScheduler(rb, "alpha", 0.0, 2), s.LinearScheduler(rb, "beta", 1.0, 3)])

    assert scheduled(rl, both) == [0.6, 0.8, 1.0, 1.0]


@sentence("Schedulers have a state that goes on", not_in_torchrl=NO_EXTENSION)
def schedulers_have_a_state(rl: Package) -> None:
    schedulers = rl.module("data.replay_buffers.scheduler")
    first = schedulers.LinearScheduler(prioritized(rl), "beta", 1.0, 3)
    first.step()
    rb = prioritized(rl)
    second = schedulers.LinearScheduler(rb, "beta", 1.0, 3)
    second.load_state_dict(first.state_dict())
    second.step()
    assert float(rb._sampler.beta) == pytest.approx(0.8)


@sentence("`_sum_tree[i]`, `_sum_tree.query(a, b)` and `_max_priority` show the tree", not_in_torchrl=NO_EXTENSION)
def the_sum_tree_can_be_looked_at(rl: Package) -> None:
    rb = prioritized(rl)
    p = torch.arange(1.0, 6.0)
    rb.update_priority(rb.extend(torch.arange(5)), p)
    tree, leaves = rb._sampler._sum_tree, p**0.7
    assert float(tree[2]) == pytest.approx(float(leaves[2]), rel=1e-4)
    assert float(tree.query(1, 4)) == pytest.approx(float(leaves[1:4].sum()), rel=1e-4)
    assert float(rb._sampler._max_priority[0]) == 5.0 and int(rb._sampler._max_priority[1]) == 4


# ---- ensembles ----
def ensemble(rl: Package, *classes: str, **how):
    members = [getattr(rl.data, name)(storage=rl.data.LazyTensorStorage(20)) for name in classes]
    for k, member in enumerate(members):
        member.extend(TensorDict({"n": torch.arange(20) + 100 * k}, [20]))
    return rl.data.ReplayBufferEnsemble(*members, batch_size=10, **how)


@sentence("A TensorDict from an ensemble has at its root `index`, with `index` and `buffer_ids`")
def ensembles_say_index_and_member(rl: Package) -> None:
    batch = ensemble(rl, "TensorDictReplayBuffer", "TensorDictReplayBuffer", p=[0.5, 0.5]).sample()
    assert isinstance(batch["index"], TensorDictBase) and batch["index"].shape == (2, 5)
    ids, index = batch["index", "buffer_ids"], batch["index", "index"]
    assert ids.dtype is torch.int64 and torch.equal(batch["n"], ids * 100 + index)


@sentence("An ensemble's members may be buffers of every class")
def ensembles_take_every_class(rl: Package) -> None:
    for classes in (("ReplayBuffer", "ReplayBuffer"), ("TensorDictReplayBuffer", "ReplayBuffer")):
        batch = ensemble(rl, *classes, sample_from_all=True).sample()
        assert torch.equal(batch["n"], batch["index", "buffer_ids"] * 100 + batch["index", "index"])


@sentence("`update_tensordict_priority` of an ensemble takes its batches", not_in_torchrl=NO_EXTENSION)
def ensembles_take_priorities_back(rl: Package) -> None:
    members = [
        rl.data.TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=rl.data.LazyTensorStorage(20))
        for _ in range(2)
    ]
    for member in members:
        member.extend(TensorDict({"n": torch.arange(20)}, [20]))
    rb = rl.data.ReplayBufferEnsemble(*members, batch_size=10, sample_from_all=True)
    batch = rb.sample()
    rb.update_tensordict_priority(batch.set("td_error", torch.full((2, 5), 7.0)))
    assert all(float(member._sampler._max_priority[0]) == 7.0 for member in members)


# ---- buffers ----
@sentence("`rb.set_rng(generator)` decides the draws from then on")
def a_generator_may_be_set(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(100), batch_size=20)
    rb.extend(torch.arange(100))
    rb.set_rng(torch.Generator().manual_seed(1))
    first = rb.sample()
    rb.set_rng(torch.Generator().manual_seed(1))
    assert torch.equal(rb.sample(), first) and not torch.equal(rb.sample(), first)


@sentence("`rb._transform = x` is used by the next `sample`")
def a_transform_may_be_assigned(rl: Package) -> None:
    rb = rl.data.TensorDictReplayBuffer(storage=rl.data.LazyTensorStorage(10), batch_size=4)
    rb.extend(TensorDict({"a": torch.ones(5), "b": torch.ones(5)}, [5]))
    transforms = rl.module("envs.transforms")
    rb._transform = transforms.Compose(transforms.ExcludeTransform("b"))
    assert set(rb.sample().keys()) == {"a", "index"}


@sentence("`insert_transform` at a bad place: ValueError")
def transforms_are_inserted_at_places_that_exist(rl: Package) -> None:
    transforms = rl.module("envs.transforms")
    rb = rl.data.TensorDictReplayBuffer(storage=rl.data.LazyTensorStorage(10), batch_size=4)
    rb.append_transform(transforms.RewardScaling(0.0, 1.0))
    for place in (5, -5):
        with pytest.raises(ValueError):
            rb.insert_transform(place, transforms.RewardScaling(0.0, 1.0))
    rb.insert_transform(0, transforms.RewardScaling(0.0, 1.0))
    assert len(rb._transform) == 2


@sentence("`TensorDictReplayBuffer.sample(include_info=...)` is accepted")
def include_info_is_accepted(rl: Package) -> None:
    rb = rl.data.TensorDictReplayBuffer(storage=rl.data.LazyTensorStorage(10), batch_size=4)
    rb.extend(TensorDict({"a": torch.ones(5)}, [5]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "index" in rb.sample(include_info=True).keys()


@sentence(
    "`MultiStepTransform(next_key=...)` takes flat batches: obs, action, reward, next_obs, done",
    not_in_torchrl="this release has no next_key",
)
def n_step_returns_of_flat_batches(rl: Package) -> None:
    transform = rl.module("envs.transforms").MultiStepTransform(n_steps=2, gamma=0.5, next_key="next_obs")
    rb = rl.data.TensorDictReplayBuffer(storage=rl.data.LazyTensorStorage(10), transform=transform, batch_size=4)
    done = torch.tensor([0, 0, 0, 1]).bool().unsqueeze(-1)
    flat = {"obs": torch.arange(4), "next_obs": torch.arange(1, 5), "reward": torch.ones(4, 1), "done": done}
    rb.extend(TensorDict({**flat, "action": torch.zeros(4)}, [4]))
    assert rb[:]["next_obs"].tolist() == [2, 3, 4, 4] and rb[:]["reward"].flatten().tolist() == [1.5, 1.5, 1.5, 1.0]
