"""SequenceSampler: windows of one length, burn-in, padding, masks, and beginnings."""

import pytest
import torch

from data.samplers.episode_data import episodes
from data.samplers.test_slices import SliceContract
from data.samplers.test_uniform import assert_uniform
from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer, SequenceSampler, TensorDictReplayBuffer

MASK = ("collector", "mask")


class TestSequenceSampler(SliceContract):
    def make(self):
        return SequenceSampler(slice_len=2, end_key="done", truncated_key=None)


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("strict", [True, False])
def test_a_window_is_burn_in_and_training_steps_with_padding_around(storage, strict):
    sampler = SequenceSampler(slice_len=6, burn_in=2, strict_length=strict)
    rb = ReplayBuffer(storage=storage(40), sampler=sampler)
    rb.extend(episodes([7, 3, 4], start=0))
    trained = set()
    for _ in range(100):
        batch = rb.sample(12).reshape(2, 6)
        for row in batch:
            n, mask = row["n"].tolist(), row[MASK].tolist()
            real = [i for i, m in zip(n, mask, strict=True) if m]
            assert real == list(range(real[0], real[0] + len(real))) and len(set(row["id"].tolist())) == 1
            left = mask.index(True)
            right = 6 - left - len(real)
            assert n == [real[0]] * left + real + [real[-1]] * right
            assert left <= 2 and (left == 0 or real[0] in (0, 7, 10))
            assert right == 0 or (not strict and real[-1] == 9)
            ends = [i == left + len(real) - 1 for i in range(6)]
            done = row["next", "done"].flatten().tolist()
            assert row["next", "truncated"].flatten().tolist() == ends
            assert [d for d, m in zip(done, mask, strict=True) if m] == [
                e for e, m in zip(ends, mask, strict=True) if m
            ]
            assert row["is_init"].flatten().tolist() == [i == left for i in range(6)]
            trained |= {i for i, m in zip(n[2:], mask[2:], strict=True) if m}
        warm_up, training = sampler.split(batch)
        assert warm_up.shape == (2, 2) and torch.equal(training["n"], batch["n"][:, 2:])
    assert trained == {*range(7), *(range(7, 10) if not strict else ()), *range(10, 14)}


def test_starts_of_training_are_uniform():
    torch.manual_seed(0)
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=SequenceSampler(slice_len=5, burn_in=3))
    rb.extend(episodes([8]))
    assert_uniform(rb.sample(100_000)["n"].reshape(-1, 5)[:, 3].tolist(), range(7))


def test_without_burn_in_whole_windows_are_slices():
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=SequenceSampler(num_slices=3))
    rb.extend(episodes([8, 9]))
    batch, info = rb.sample(12, return_info=True)
    assert batch[MASK].all() and info[MASK].all() and (batch["n"].reshape(3, 4).diff() == 1).all()


def test_short_trajectories_are_padded_behind():
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=SequenceSampler(slice_len=5, strict_length=False))
    rb.extend(episodes([3]))
    batch, info = rb.sample(5, return_info=True)
    assert batch["n"].tolist() == [0, 1, 2, 2, 2] and batch[MASK].tolist() == [True] * 3 + [False] * 2
    assert info["slice_id"].tolist() == [0] * 5 and info["index"].tolist() == [0, 1, 2, 2, 2]


def test_marks_that_the_data_have_stay():
    data = episodes([4, 4])
    data["is_init"] = torch.tensor([1, 0, 1, 0, 1, 0, 0, 0]).bool().unsqueeze(-1)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=SequenceSampler(slice_len=4), batch_size=8)
    rb.extend(data)
    for row in rb.sample().reshape(2, 4):
        wanted = [True, False, row["id"].unique().item() == 0, False]
        assert row["is_init"].flatten().tolist() == wanted
    rb.set_sampler(SequenceSampler(slice_len=3, init_key=None, mask_key="real", traj_key="id"))
    batch = rb.sample(6)
    assert batch["real"].all() and "collector" not in batch


def test_burn_in_must_leave_steps_to_train_on():
    for burn_in in (-1, True, 1.5):
        with pytest.raises(ValueError, match="burn_in must be 0 or more"):
            SequenceSampler(slice_len=4, burn_in=burn_in)
    with pytest.raises(ValueError, match="burn_in=4 leaves no row to train on of sequences of 4"):
        SequenceSampler(slice_len=4, burn_in=4)
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=SequenceSampler(num_slices=2, burn_in=4))
    rb.extend(episodes([9]))
    with pytest.raises(ValueError, match="leaves no row to train on of sequences of 3"):
        rb.sample(6)
    with pytest.raises(TypeError, match="there is no span"):
        SequenceSampler(slice_len=4, span=True)
