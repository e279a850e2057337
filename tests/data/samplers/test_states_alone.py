"""States of samplers and writers loaded alone where `SamplerContract` does not look: environments, ensembles, parts."""

import pytest
import torch

from contracts.each import each
from engram.data import (
    LazyTensorStorage,
    ListStorage,
    ListStorageCheckpointer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from engram.data.replay_buffers.samplers.frames import FrameStackSampler
from engram.errors import CheckpointMisfitError, OutOfMemoryError
from engram.testing import env_steps, numbers, steps

SAMPLERS = {
    "epoch": SamplerWithoutReplacement,
    "part of an epoch": lambda: SamplerWithoutReplacement(rank=1, world_size=2),
    "priority": lambda: PrioritizedSampler(None, 0.7, 0.9),
    "slices": lambda: SliceSamplerWithoutReplacement(slice_len=2, end_key="done", truncated_key=None),
    "frames": lambda: FrameStackSampler(slice_len=2, end_key="done"),
}


@pytest.fixture(params=SAMPLERS)
def sampler(request):
    return SAMPLERS[request.param]


def draws(rb, n=4):
    torch.manual_seed(3)
    return [numbers(rb.sample()) for _ in range(n)]


@pytest.mark.parametrize("order", [("storage", "sampler"), ("sampler", "storage")])
def test_environments_and_lanes(tmp_path, sampler, order):
    def make():
        return ReplayBuffer(storage=LazyTensorStorage(24, ndim=2), sampler=sampler(), batch_size=2)

    rb, twin = make(), make()
    rb.extend(env_steps(2, 0, 17))
    rb.update_priority((torch.arange(5), torch.zeros(5, dtype=torch.int64)), torch.tensor([0.5, 3.0, 0.1, 2.0, 1.5]))
    rb.sample()
    for part in order:
        getattr(rb, part).dumps(tmp_path / part)
    for part in order:
        getattr(twin, part).loads(tmp_path / part)
    assert draws(twin) == draws(rb)


@pytest.mark.pairwise
@pytest.mark.parametrize("order", [("storage", "sampler"), ("sampler", "storage")])
@pytest.mark.parametrize("capacity", [20, 32])
def test_parts_of_one_checkpoint_loaded_one_by_one(tmp_path, sampler, order, capacity):
    rb, whole, parts = (
        ReplayBuffer(storage=LazyTensorStorage(n), sampler=sampler(), batch_size=2) for n in (20, capacity, capacity)
    )
    rb.extend(steps(0, 33))
    rb.update_priority(torch.arange(5), torch.tensor([0.5, 3.0, 0.1, 2.0, 1.5]))
    rb.sample()
    rb.dumps(tmp_path)
    whole.loads(tmp_path)
    for part in order:
        parts.loads(tmp_path, parts=(part,))
    goes_on = []
    for buffer in (parts, whole):
        goes_on.append(draws(buffer, 2))
        buffer.extend(steps(40, 46))  # rows and trajectories of the next epoch
        goes_on.append(draws(buffer, 6))
    assert goes_on[:2] == goes_on[2:]


PRIORITIES = {
    "highest of all": lambda: PrioritizedSampler(None, 1.0, 1.0),
    "highest of those that are stored": lambda: PrioritizedSampler(None, 1.0, 1.0, max_priority_within_buffer=True),
    "of slices": lambda: PrioritizedSliceSampler(
        None, 1.0, 1.0, slice_len=2, end_key="done", truncated_key=None, max_priority_within_buffer=True
    ),
}


def replace_three(rb):
    rb[3:6] = steps(500, 503)


@pytest.mark.pairwise
@pytest.mark.parametrize("write", [replace_three, lambda rb: rb.extend(steps(100, 107))], ids=["in place", "new"])
@pytest.mark.parametrize("way", ["dumps", "state_dict"])
@pytest.mark.parametrize(
    "order", [("storage", "sampler"), ("sampler", "storage"), ("set", "storage"), ("storage", "set")]
)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("kind", PRIORITIES)
def test_priorities_of_rows_written_before_the_first_draw(tmp_path, kind, storage, used, order, way, write):
    rb, twin = (ReplayBuffer(storage=storage(10), sampler=PRIORITIES[kind](), batch_size=2) for _ in range(2))
    for buffer in (rb, twin) if used else (rb,):
        buffer.extend(steps(0, 17))
        buffer.update_priority(torch.arange(10), torch.linspace(3.0, 0.2, 10) if buffer is rb else torch.ones(10))
        buffer.sample()
    if way == "dumps" and storage is ListStorage:
        rb.storage.checkpointer = twin.storage.checkpointer = ListStorageCheckpointer()
    saved = {part: getattr(rb, part).state_dict() for part in ("storage", "sampler")}
    for step in order:
        target = PRIORITIES[kind]() if step == "set" else getattr(twin, step)
        part = "sampler" if step == "set" else step
        if way == "dumps":
            getattr(rb, part).dumps(tmp_path / part)
            target.loads(tmp_path / part)
        else:
            target.load_state_dict(saved[part])
        if step == "set":
            twin.set_sampler(target)
    for buffer in (rb, twin):
        write(buffer)
        buffer.sample()
    mine, theirs = (buffer.sampler.priorities(torch.arange(10)) for buffer in (rb, twin))
    assert torch.equal(mine, theirs) and draws(twin) == draws(rb)


def test_state_of_a_loaded_buffer_goes_back_into_it(tmp_path, sampler):
    rb, larger = (ReplayBuffer(storage=LazyTensorStorage(n), sampler=sampler(), batch_size=2) for n in (10, 16))
    rb.extend(steps(0, 17))
    rb.update_priority(torch.arange(5), torch.tensor([0.5, 3.0, 0.1, 2.0, 1.5]))
    rb.sample()
    rb.dumps(tmp_path)
    larger.loads(tmp_path)
    state = larger.sampler.state_dict()
    before = draws(larger)
    for _ in range(2):
        larger.sampler.load_state_dict(state)
        assert draws(larger) == before


@pytest.mark.parametrize("ahead", [None, 2])
def test_draw_that_is_undone_right_after_loading(tmp_path, monkeypatch, sampler, ahead):
    monkeypatch.setattr("engram.data.replay_buffers.reading.prefetch.PAYS_FROM_S", 0.0)

    def make(transform=None):
        storage = LazyTensorStorage(20)
        return ReplayBuffer(storage=storage, sampler=sampler(), batch_size=2, prefetch=ahead, transform=transform)

    rb, whole = make(), make()
    short = [True]

    def without_memory_once(batch):
        if short.pop() if short else False:
            raise MemoryError
        return batch

    parts = make(without_memory_once)
    rb.extend(steps(0, 33))
    rb.sample()
    rb.dumps(tmp_path / "whole")
    whole.loads(tmp_path / "whole")
    for part in ("sampler", "storage"):
        getattr(rb, part).dumps(tmp_path / part)
        getattr(parts, part).loads(tmp_path / part)
    torch.manual_seed(3)
    with pytest.raises(OutOfMemoryError):
        parts.sample()
    if not isinstance(whole.sampler, SamplerWithoutReplacement | SliceSamplerWithoutReplacement):
        return  # no epoch that could be lost
    assert parts.sampler.state_dict()["epoch"]["key"] == whole.sampler.state_dict()["epoch"]["key"]
    parts.sample()
    assert parts.sampler.state_dict()["epoch"]["key"] == whole.sampler.state_dict()["epoch"]["key"]


@each("way", ["dumps", "state_dict"])
@each("order", [("storage", "sampler", "writer"), ("writer", "sampler", "storage")])
def test_ensembles(tmp_path, way, order):
    def make():
        members = [
            ReplayBuffer(
                storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), writer=TensorDictMaxValueWriter()
            )
            for _ in range(2)
        ]
        return ReplayBufferEnsemble(*members, batch_size=8, sample_from_all=True)

    rb, twin = make(), make()
    for member, start in zip(rb._members, (0, 100), strict=True):
        member.extend(steps(start, start + 14))
    rb.sample()
    saved = {part: getattr(rb, part).state_dict() for part in order}
    for part in order:
        if way == "dumps":
            getattr(rb, part).dumps(tmp_path / part)
            getattr(twin, part).loads(tmp_path / part)
        else:
            getattr(twin, part).load_state_dict(saved[part])
    assert draws(twin) == draws(rb)
    for mine, theirs in zip(twin._members, rb._members, strict=True):
        assert mine.writer._current_top_values == theirs.writer._current_top_values
        assert mine.extend(steps(50, 55)).tolist() == theirs.extend(steps(50, 55)).tolist()


def test_state_without_a_lane_capacity_is_loaded(sampler):
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler(), batch_size=2) for _ in range(2))
    for buffer in (rb, twin):
        buffer.extend(steps(0, 17))
    rb.sample()
    state = rb.sampler.state_dict()
    old = {key: value for key, value in state.items() if key != "lane_capacity"}
    if old.get("epoch"):
        old["epoch"] = {key: value for key, value in old["epoch"].items() if key != "lane_capacity"}
    twin.sampler.load_state_dict(old)
    assert draws(twin) == draws(rb)


@each("wrong", [0, -1, 2.0, "16", [16]])
def test_invalid_lane_capacity_is_refused(sampler, wrong):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler(), batch_size=2)
    rb.extend(steps(0, 17))
    rb.sample()
    state = rb.sampler.state_dict()
    place = state.get("epoch", state)
    if "lane_capacity" not in place:
        pytest.skip("its state does not name rows")
    place["lane_capacity"] = wrong
    with pytest.raises(CheckpointMisfitError, match=r"lane_capacity in the state of the sampler is .* from 1 to"):
        rb.sampler.load_state_dict(state)
