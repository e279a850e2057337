"""`engram.load`: a buffer from its checkpoint alone."""

import warnings

import pytest
import torch
from tensordict import TensorDict

import engram
from contracts.each import each
from engram.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.checkpointers import save_snapshot
from engram.envs.transforms import Compose, MultiStepTransform, RewardScaling
from engram.errors import CheckpointError
from engram.transforms import ObservationNorm, VecNorm


def steps(n: int = 20) -> TensorDict:
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[4::5] = True
    following = {"reward": torch.arange(float(n)).reshape(n, 1), "done": done, "terminated": done}
    return TensorDict({"obs": torch.arange(n * 2.0).reshape(n, 2), "next": following}, [n])


def again(rb: ReplayBuffer, path) -> ReplayBuffer:
    """What `load` makes, of which nothing may be missing."""
    rb.dumps(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return engram.load(path)


def same_batches(a: ReplayBuffer, b: ReplayBuffer, draws: int = 5) -> None:
    """Both draw the same, from torch's global generator in the same state."""
    for seed in range(draws):
        torch.manual_seed(seed)
        one = a.sample()
        torch.manual_seed(seed)
        other = b.sample()
        assert bool((one == other).all())


SAMPLERS = [
    lambda: RandomSampler(),
    lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
    lambda: PrioritizedSampler(None, 0.7, 0.5, reduction="mean", dtype=torch.float64),
    lambda: SliceSampler(slice_len=2, end_key=("next", "done"), weight="steps", truncated_key=None),
    lambda: SliceSamplerWithoutReplacement(num_slices=2, strict_length=False),
    lambda: SequenceSampler(slice_len=4, burn_in=1),
    lambda: PrioritizedSliceSampler(None, 0.7, 0.5, slice_len=2),
]


@each("make", SAMPLERS)
def test_each_sampler_comes_back_with_its_settings_and_draws_the_same(tmp_path, make):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=make(), batch_size=4)
    rb.extend(steps())
    rb.sample()
    loaded = again(rb, tmp_path)
    assert repr(loaded.sampler) == repr(rb.sampler) and type(loaded) is type(rb)
    same_batches(rb, loaded)


@pytest.mark.parametrize("make", [
    lambda path: LazyTensorStorage(30, lanes=2, shared=True),
    lambda path: LazyMemmapStorage(30, scratch_dir=path / "rows"),
    lambda path: ListStorage(30),
])  # fmt: skip
def test_each_storage_comes_back_with_its_rows_and_its_size(tmp_path, make):
    rb = TensorDictReplayBuffer(storage=make(tmp_path), batch_size=4)
    rb.extend(steps())
    loaded = again(rb, tmp_path / "saved")
    assert type(loaded.storage) is type(rb.storage) and loaded.storage.max_size == rb.storage.max_size
    same_batches(rb, loaded)
    assert rb.extend(steps()).tolist() == loaded.extend(steps()).tolist()


@pytest.mark.parametrize("make", [
    lambda: PrioritizedReplayBuffer(0.7, 0.5, storage=LazyTensorStorage(30), batch_size=4),
    lambda: TensorDictPrioritizedReplayBuffer(0.7, 0.5, priority_key="p", storage=LazyTensorStorage(30), batch_size=4),
])  # fmt: skip
def test_buffers_with_priorities_come_back(tmp_path, make):
    rb = make()
    rb.update_priority(rb.extend(steps()), torch.arange(20.0))
    rb.sampler.beta = 0.9  # after it was made
    loaded = again(rb, tmp_path)
    assert type(loaded) is type(rb) and loaded.sampler.beta == 0.9
    assert getattr(loaded, "priority_key", None) == getattr(rb, "priority_key", None)
    same_batches(rb, loaded)


def test_transforms_come_back_with_their_settings_and_what_they_learnt_and_hold(tmp_path):
    transforms = [RewardScaling(1.0, 2.0, in_keys=[("next", "reward")]), Compose(VecNorm(in_keys=["obs"]))]
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30), batch_size=4)
    for transform in (*transforms, MultiStepTransform(n_steps=3, gamma=0.5)):
        rb.append_transform(transform)
    rb.extend(steps())
    loaded = again(rb, tmp_path)
    assert repr(loaded.transform) == repr(rb.transform)
    same_batches(rb, loaded)
    assert rb.flush_transforms().tolist() == loaded.flush_transforms().tolist()


def test_given_and_computed_statistics_of_observation_norm_come_back(tmp_path):
    given = ObservationNorm(loc=torch.tensor([1.0, 2.0]), scale=torch.tensor([3.0, 4.0]), in_keys=["obs"])
    computed = ObservationNorm(in_keys=[("next", "reward")], standard_normal=True)
    computed.init_stats(steps(), key=("next", "reward"))
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30), batch_size=4, transform=Compose(given, computed))
    rb.extend(steps())
    loaded = again(rb, tmp_path)
    for before, after in zip(rb.transform, loaded.transform, strict=True):
        assert torch.equal(before.loc, after.loc) and torch.equal(before.scale, after.scale)
        assert (before.loc.dtype, before.initialized) == (after.loc.dtype, after.initialized)
    assert loaded.transform[0].loc.tolist() == [1, 2] and loaded.transform[1].loc.item() == 9.5
    same_batches(rb, loaded)


def test_a_writer_that_keeps_the_best_comes_back(tmp_path):
    writer = TensorDictMaxValueWriter(rank_key=("next", "reward"))
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5), writer=writer, batch_size=4)
    rb.extend(steps())
    loaded = again(rb, tmp_path)
    assert type(loaded.writer) is TensorDictMaxValueWriter
    loaded.extend(steps(3))  # worse ones
    assert sorted(loaded[:]["next", "reward"].flatten().tolist()) == [15, 16, 17, 18, 19]


def test_a_generator_of_its_own_goes_on_where_it_stood(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(30), batch_size=4, generator=torch.Generator().manual_seed(3))
    rb.extend(torch.arange(20))
    rb.sample()
    loaded = again(rb, tmp_path)
    assert loaded.sample().tolist() == rb.sample().tolist()


def test_what_cannot_be_saved_is_named_in_one_warning(tmp_path):
    class Own(RandomSampler):
        pass

    rb = ReplayBuffer(storage=LazyTensorStorage(30), sampler=Own(), collate_fn=lambda x: x, batch_size=4)
    rb.append_transform(lambda batch: batch + 1)
    rb.register_save_hook(lambda rows: rows)
    rb.extend(torch.arange(20))
    rb.dumps(tmp_path)
    with pytest.warns(UserWarning) as warned:
        loaded = engram.load(tmp_path)
    text = str(warned[0].message)
    assert len(warned) == 1 and len(loaded) == 20 and loaded.sample().shape == (4,)
    for missing in ("the collate_fn", "hooks", "the sampler, Own", "transform 0, CallableTransform"):
        assert missing in text


def test_the_state_of_one_transform_is_not_given_to_another_of_its_kind(tmp_path):
    first, second = VecNorm(in_keys=["obs"]), VecNorm(in_keys=["obs"])
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30), batch_size=4, transform=Compose(first, second))
    first._arguments = None  # as of one that cannot be made
    rb.extend(steps())
    rb.dumps(tmp_path)
    with pytest.warns(UserWarning, match="transform 0, VecNorm"):
        loaded = engram.load(tmp_path)
    assert len(loaded.transform) == 1 and not loaded.transform[0].state_dict()


def test_a_mapped_store_is_opened_in_its_place(tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(30, scratch_dir=tmp_path))
    rb.extend(steps())
    observer = engram.load(tmp_path, read_only=True)
    assert isinstance(observer, TensorDictReplayBuffer) and len(observer) == 20
    rb.extend(steps(5))
    assert len(observer) == 25
    rb.storage.close()
    assert engram.load(tmp_path).extend(steps(1)).tolist() == [25]


def test_rows_go_to_the_storage_that_is_given(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(30), batch_size=4)
    rb.extend(torch.arange(20))
    rb.dumps(tmp_path / "saved")
    storage = LazyMemmapStorage(50, scratch_dir=tmp_path / "rows")
    assert engram.load(tmp_path / "saved", storage=storage).storage is storage and len(storage) == 20


def test_a_checkpoint_without_a_description_is_loaded_as_far_as_it_says(tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=PrioritizedSampler(None, 0.7, 0.5), batch_size=4)
    rb.update_priority(rb.extend(steps()), torch.arange(20.0))
    states = rb._saved_form.states()
    components = {
        "sampler": {"kind": "PrioritizedSampler", "state": states["sampler"]},
        "writer": {"kind": "TensorDictRoundRobinWriter", "state": states["writer"]},
        "transform": {"state": states["transform"]},
        "generator": {"state": None},
    }
    save_snapshot(tmp_path, components, (rb.storage.checkpointer, rb.storage.saved_form.source(background=False)))
    with pytest.warns(UserWarning, match="the batch size"):
        loaded = engram.load(tmp_path)
    torch.manual_seed(0)
    expected = rb.sample(6)
    torch.manual_seed(0)
    assert bool((loaded.sample(6) == expected).all())


def test_ensembles_and_single_parts_are_refused_with_what_to_do(tmp_path):
    member = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    member.extend(torch.arange(3))
    member.sampler.dumps(tmp_path / "sampler")
    with pytest.raises(CheckpointError, match="holds no buffer, but sampler alone"):
        engram.load(tmp_path / "sampler")
    ReplayBufferEnsemble(member).dumps(tmp_path / "ensemble")
    with pytest.raises(CheckpointError, match="ensemble of buffers was saved: make its members"):
        engram.load(tmp_path / "ensemble")


@pytest.mark.parametrize("kind", [CompressedListStorage, LazyStackStorage])
def test_the_other_storages_of_items_come_back(tmp_path, kind):
    rb = TensorDictReplayBuffer(storage=kind(30), batch_size=4)
    rb.extend(steps())
    loaded = again(rb, tmp_path)
    assert type(loaded.storage) is kind
    same_batches(rb, loaded)


def test_a_buffer_that_counts_generations_still_does(tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30), batch_size=4, track_generations=True)
    rb.extend(steps(40))
    assert "index_generation" in again(rb, tmp_path).sample().keys()
