"""What does not fit is listed in one error, all of it, and nothing is changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from contracts.each import each
from engram.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    TensorStorageCheckpointer,
)
from engram.envs.transforms import CatFrames, MultiStepTransform, ObservationNorm, RewardSum, StepCounter, VecNorm
from engram.errors import CheckpointError, CheckpointMisfitError
from golden.steps import steps

CHECKPOINTERS = [
    TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer,
    lambda: H5StorageCheckpointer(group_per_trajectory=True),
]  # fmt: skip
N = 12


def data(without: str = "", dtype: Any = torch.float32, width: int = 2, constant: str = "reach") -> TensorDict:
    made = TensorDict({"a": torch.ones(N, width), "b": torch.arange(N).to(dtype), "c": torch.zeros(N)}, [N])
    made["task"] = NonTensorData(constant, batch_size=[N])
    return made.exclude(without) if without else made


# A name, what it changes of the buffer that loads, and what the error must say of it.
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"data": {"without": "c"}}, "'c' is new"),
    "shape": ({"data": {"width": 3}}, r"'a' is torch.float32 [3] here, torch.float32 [2] there"),
    "dtype": ({"data": {"dtype": torch.int64}}, "'b' is torch.int64 [] here, torch.float32 [] there"),
    "constant": ({"data": {"constant": "push"}}, "'task' is the constant 'push' here, 'reach' there"),
    "capacity": ({"capacity": N - 1}, f"room for {N - 1} steps here, {N} saved there"),
    "sampler": ({"sampler": SamplerWithoutReplacement}, "the sampler is a SamplerWithoutReplacement here, a SliceS"),
    "slice_len": ({"slice_len": 2}, "the sampler has slice_len=2 here, 3 there"),
    "writer": (
        {"writer": TensorDictRoundRobinWriter},
        "the writer is a TensorDictRoundRobinWriter here, a TensorDictMaxValueWriter there",
    ),
    "rank": ({"rank": "a"}, "the writer has rank_key=('a',) here, ('b',) there"),
    "transform": ({"transform": RewardSum}, "the state of a VecNorm was saved, and the transforms here are"),
    "in_keys": ({"in_keys": ["c"]}, "VecNorm has in_keys=['c'] here, ['a'] there"),
}
EXCLUSIVE = [{"sampler", "slice_len"}, {"writer", "rank"}, {"transform", "in_keys"}, {"key", "in_keys"}]


def buffer(checkpointer: Callable[[], Any], mapped: bool = False, filled: bool = True, **parts: Any) -> ReplayBuffer:
    kind = LazyMemmapStorage if mapped else LazyTensorStorage
    sampler = parts.get("sampler", lambda: SliceSampler(slice_len=parts.get("slice_len", 3), traj_key="c"))()
    writer = parts.get("writer", lambda: TensorDictMaxValueWriter(rank_key=parts.get("rank", "b")))()
    transform = parts.get("transform", lambda: VecNorm(parts.get("in_keys", ["a"])))()
    storage = kind(parts.get("capacity", N), checkpointer=checkpointer())
    rb = ReplayBuffer(storage=storage, sampler=sampler, writer=writer)
    if filled:
        rb.extend(data(**parts.get("data", {})))
    rb.append_transform(transform)
    if "transform" not in parts and filled:
        transform.learn(data())
    return rb


def combined(names: Any) -> tuple[dict[str, Any], list[str]]:
    made: dict[str, Any] = {"data": {}}
    for name in names:
        change, _ = DIFFERENCES[name]
        made["data"] |= change.get("data", {})
        made |= {key: value for key, value in change.items() if key != "data"}
    return made, [DIFFERENCES[name][1] for name in names]


def possible(names: Any) -> bool:
    return not any(pair <= set(names) for pair in EXCLUSIVE)


@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.sets(st.sampled_from(sorted(DIFFERENCES)), min_size=1).filter(possible), in_memory=st.booleans())
def test_every_combination_of_differences_is_listed_in_one_error(ram_path, checkpointer, names, in_memory):
    parts, said = combined(sorted(names))
    saved, rb = buffer(checkpointer), buffer(checkpointer, **parts)
    saved.dumps(ram_path)
    state = saved.state_dict() if in_memory else None
    before = rb.storage.get(slice(None)), rb.write_count
    with pytest.raises(CheckpointMisfitError) as caught:
        rb.load_state_dict(state) if in_memory else rb.loads(ram_path)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, CheckpointError)
    for one in said:
        assert one in str(caught.value) and any(one in found for found in caught.value.differences)
    assert len(caught.value.differences) == len(said)
    assert (rb.storage.get(slice(None)) == before[0]).all() and rb.write_count == before[1]


@each("pair", [pair for pair in itertools.combinations(DIFFERENCES, 2) if possible(pair)])
def test_any_two_differences_are_both_listed(ram_path, pair):
    parts, said = combined(pair)
    buffer(TensorStorageCheckpointer).dumps(ram_path)
    with pytest.raises(CheckpointMisfitError) as caught:
        buffer(TensorStorageCheckpointer, **parts).loads(ram_path)
    assert all(any(one in found for found in caught.value.differences) for one in said)


def test_without_differences_everything_is_loaded_and_nothing_is_said(ram_path):
    saved, rb = buffer(TensorStorageCheckpointer), buffer(FlatStorageCheckpointer)
    rb.storage.checkpointer = TensorStorageCheckpointer()
    saved.dumps(ram_path)
    rb.loads(ram_path)
    assert (rb.storage.get(slice(None)) == saved.storage.get(slice(None))).all()


def test_an_empty_buffer_that_does_not_fit_stays_without_a_layout(ram_path):
    buffer(TensorStorageCheckpointer).dumps(ram_path)
    rb = buffer(TensorStorageCheckpointer, capacity=5, sampler=RandomSampler, filled=False)
    with pytest.raises(CheckpointMisfitError, match=r"SliceSampler there; .*room for 5 steps"):
        rb.loads(ram_path)
    assert rb.storage.layout is None and len(rb) == 0


@each("checkpointer", CHECKPOINTERS[1:])
def test_a_checkpointer_of_another_kind_is_listed_with_the_rest(ram_path, checkpointer):
    buffer(checkpointer).dumps(ram_path)
    with pytest.raises(
        CheckpointMisfitError, match=r"slice_len=2 here.*was saved as .*use the checkpointer that saved"
    ):
        buffer(TensorStorageCheckpointer, slice_len=2).loads(ram_path)


def test_the_error_says_how_to_leave_out_what_is_not_wanted(ram_path):
    saved = buffer(TensorStorageCheckpointer)
    saved.dumps(ram_path)
    rb = buffer(TensorStorageCheckpointer, slice_len=2, filled=False)
    with pytest.raises(CheckpointMisfitError, match=r"loads\(path, parts=\('storage', 'writer', 'generator'\)\)"):
        rb.loads(ram_path)
    rb.loads(ram_path, parts=("storage", "writer", "generator"))
    assert len(rb) == N and rb.sampler.slice_len == 2


# ---- lists and ensembles ----
def test_differences_of_a_list_storage_are_listed_together(ram_path):
    saved = ReplayBuffer(storage=ListStorage(20), sampler=SamplerWithoutReplacement())
    saved.extend(list(range(15)))
    saved.dumps(ram_path)
    rb = ReplayBuffer(storage=ListStorage(9), sampler=SamplerWithoutReplacement(shuffle=False))
    rb.extend([1, 2])
    for load in (lambda: rb.loads(ram_path), lambda: rb.load_state_dict(saved.state_dict())):
        with pytest.raises(
            CheckpointMisfitError, match=r"shuffle=False here, True there; room for 9 items here, 15"
        ) as e:
            load()
        assert len(e.value.differences) == 2
    assert rb[:] == [1, 2]


def ensemble(
    first: int, second: int, checkpointer: Any, sampler: Any = RandomSampler, dtype: Any = torch.float32
) -> Any:
    members = [
        ReplayBuffer(storage=LazyTensorStorage(first, checkpointer=checkpointer()), sampler=sampler()),
        ReplayBuffer(storage=LazyTensorStorage(second), writer=TensorDictRoundRobinWriter()),
    ]
    for rb in members:
        rb.extend(data(dtype=dtype).exclude("task"))
    return ReplayBufferEnsemble(*members)


@each("checkpointer", CHECKPOINTERS)
@each("in_memory", [False, True])
def test_differences_of_every_member_of_an_ensemble_are_listed_together(ram_path, checkpointer, in_memory):
    saved = ensemble(N, N, checkpointer)
    saved.dumps(ram_path)
    rb = ensemble(N - 2, N - 1, checkpointer, SamplerWithoutReplacement, torch.int64)
    before = [member.storage.get(slice(None)) for member in (rb[0], rb[1])]
    with pytest.raises(CheckpointMisfitError) as caught:
        rb.load_state_dict(saved.state_dict()) if in_memory else rb.loads(ram_path)
    said = "; ".join(caught.value.differences)
    assert "sampler 0 is a SamplerWithoutReplacement here, a RandomSampler there" in said
    for i, room in enumerate((N - 2, N - 1)):
        assert f"member {i}: 'b' is torch.int64 [] here, torch.float32 [] there" in said
        assert f"member {i}: room for {room} steps here, {N} saved there" in said
    assert len(caught.value.differences) == 5
    assert all((rb[i].storage.get(slice(None)) == before[i]).all() for i in range(2))


def test_an_ensemble_whose_second_member_does_not_fit_keeps_its_first(ram_path):
    saved, rb = ensemble(N, N, TensorStorageCheckpointer), ensemble(N, N - 1, TensorStorageCheckpointer)
    saved[0][:] = data().exclude("task") * 5
    with pytest.raises(CheckpointMisfitError, match="member 1"):
        rb.load_state_dict(saved.state_dict())
    assert rb[0][0]["a"].tolist() == [1.0, 1.0]


# ---- what decides which rows come ----
SLICES = {"slice_len": 4, "traj_key": ("collector", "traj_ids")}
SAMPLERS = {
    "slices": (SliceSampler, {}), "epochs": (SliceSamplerWithoutReplacement, {}), "sequences": (SequenceSampler, {}),
    "prioritized": (lambda **more: PrioritizedSliceSampler(40, 0.7, 0.5, **more), {}),
}  # fmt: skip
CHANGES = [
    {"slice_len": 3}, {"slice_len": None, "num_slices": 4}, {"traj_key": None}, {"strict_length": False},
    {"traj_key": None, "end_key": "done"}, {"traj_key": None, "ends": torch.arange(20) % 7 == 6},
]  # fmt: skip
FORMS = [{"truncated_key": None}, {"slice_key": "slice"}, {"cache_values": True}]


def sliced(kind: Any, **change: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=kind(**{**SLICES, **change}), batch_size=8)
    rb.extend(steps(0, 20))
    return rb


@each("kind", SAMPLERS)
@each("change", CHANGES)
def test_other_slices_are_a_difference(ram_path, kind, change):
    sliced(SAMPLERS[kind][0]).dumps(ram_path)
    rb = sliced(SAMPLERS[kind][0], **change)
    with pytest.raises(CheckpointMisfitError) as caught:
        rb.loads(ram_path)
    names = {"boundaries" if name == "ends" else name for name in change}
    assert all(any(f"has {name}=" in said for said in caught.value.differences) for name in names)


@each("kind", SAMPLERS)
@each("form", FORMS)
def test_the_form_in_which_slices_are_handed_out_is_the_constructors(ram_path, kind, form):
    saved, rb = sliced(SAMPLERS[kind][0]), sliced(SAMPLERS[kind][0], **form)
    saved.dumps(ram_path)
    rb.loads(ram_path)
    torch.manual_seed(3)
    expected = saved.sample()["action"]
    torch.manual_seed(3)
    assert torch.equal(rb.sample()["action"], expected)


def test_burn_in_and_span_are_differences_too(ram_path):
    sliced(SequenceSampler, burn_in=1).dumps(ram_path / "a")
    with pytest.raises(CheckpointMisfitError, match="burn_in=2 here, 1 there"):
        sliced(SequenceSampler, burn_in=2).loads(ram_path / "a")
    sliced(SliceSampler, span=True).dumps(ram_path / "b")
    with pytest.raises(CheckpointMisfitError, match=r"span=\(False, False\) here, \(True, True\) there"):
        sliced(SliceSampler).loads(ram_path / "b")


@each(
    ("saved", "here", "said"),
    [
        (lambda: MultiStepTransform(3, 0.9), lambda: MultiStepTransform(2, 0.8), ["n_steps=2 here, 3", "gamma=0.8"]),
        (lambda: CatFrames(3, -1, ["obs"]), lambda: CatFrames(4, -1, ["obs"]), ["N=4 here, 3 there"]),
        (lambda: RewardSum(("next", "reward")), RewardSum, ["in_keys=[]"]),
        (StepCounter, lambda: StepCounter(done_key="done"), ["done_key='done' here, None there"]),
        (lambda: VecNorm(["obs", "action"]), lambda: VecNorm(["action", "obs"]), ["in_keys=['action', 'obs'] here"]),
        (lambda: found_norm(), lambda: ObservationNorm(0.0, 1.0, ["obs"]), ["was given loc"]),
        (lambda: found_norm(), lambda: ObservationNorm(in_keys=["action"]), ["in_keys=['action'] here"]),
    ],
)
def test_a_state_is_not_given_to_a_transform_with_other_settings(ram_path, saved, here, said):
    one, other = (ReplayBuffer(storage=LazyTensorStorage(40)) for _ in range(2))
    for rb, make in ((one, saved), (other, here)):
        transform = make()
        rb.append_transform(transform, invert=not isinstance(transform, MultiStepTransform | VecNorm | ObservationNorm))
    one.extend(steps(0, 10))
    one.dumps(ram_path)
    with pytest.raises(CheckpointMisfitError) as caught:
        other.loads(ram_path)
    assert all(any(what in found for found in caught.value.differences) for what in said)


def found_norm() -> ObservationNorm:
    norm = ObservationNorm(in_keys=["obs"])
    norm.init_stats(steps(0, 10))
    return norm


# ---- rows whose keys came in another order ----
@each("checkpointer", CHECKPOINTERS)
@each("way", ["loads", "load_state_dict"])
def test_keys_in_another_order_keep_their_values(ram_path, checkpointer, way):
    one, other = (ReplayBuffer(storage=LazyTensorStorage(N, checkpointer=checkpointer())) for _ in range(2))
    one.extend(TensorDict({"a": torch.arange(N), "b": -torch.arange(N), "c": torch.ones(N, 3)}, [N]))
    other.extend(TensorDict({"b": torch.zeros(N).long(), "c": torch.zeros(N, 3), "a": torch.zeros(N).long()}, [N]))
    one.dumps(ram_path)
    other.loads(ram_path) if way == "loads" else other.load_state_dict(one.state_dict())
    assert other[:]["a"].tolist() == list(range(N)) and other[:]["b"].tolist() == [-i for i in range(N)]


def test_a_store_that_two_processes_made_keeps_values_under_their_keys(tmp_path):
    one, other = (ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "store", lanes=2)) for _ in range(2))
    x = torch.arange(3.0)
    one.extend({"a": (x,), "b": x + 100})
    other.extend({"b": x + 200, "a": (x + 300,)})
    for rb in (one, other):
        assert rb[:]["b"].tolist() == [100, 101, 102, 200, 201, 202]
        assert rb[:]["a"][0].tolist() == [0, 1, 2, 300, 301, 302]
