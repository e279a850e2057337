"""Epochs while rows are overwritten between draw and read: no row of an epoch comes twice."""

import pytest
import torch
from tensordict import TensorDict

from engram.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement, SliceSamplerWithoutReplacement

pytestmark = pytest.mark.quick


def rows(start, n):
    return TensorDict({"n": torch.arange(start, start + n), "id": torch.arange(start, start + n) // 5}, [n])


def interfered(kind, writes, capacity=60, **how):
    """A buffer into which rows are written between a draw and its read: at draw k so many as `writes` says."""

    class Interfered(kind):
        draws = 0

        def sample(self, storage, batch_size):
            drawn = super().sample(storage, batch_size)
            n = writes.get(self.draws, 0)
            self.draws += 1
            if n:
                rb.extend(rows(rb.write_count, n))
            return drawn

    rb = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=Interfered(**how), batch_size=20)
    rb.extend(rows(0, capacity))
    return rb


def epochs_of(rb, batches):
    """The rows of each epoch, as the batches say which one they are of; and the sizes of the batches."""
    found, sizes = {}, []
    for _ in range(batches):
        batch, info = rb.sample(return_info=True)
        found.setdefault(info.epoch, []).extend(batch["n"].tolist())
        sizes.append(len(batch["n"]))
    return found, sizes


@pytest.mark.pairwise
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("writes", [{2: 7}, {1: 7}, {0: 5, 2: 5}, {2: 30}, {1: 30, 2: 20}])
@pytest.mark.parametrize("kind", [SamplerWithoutReplacement, SliceSamplerWithoutReplacement])
def test_rows_that_are_lost_are_not_replaced_from_another_epoch(kind, writes, prefetch):
    how = {} if kind is SamplerWithoutReplacement else {"slice_len": 5, "traj_key": "id"}
    for seed in range(5):
        torch.manual_seed(seed)
        rb = interfered(kind, writes, **how)
        found, sizes = epochs_of(rb, 8)
        assert len(found) > 1 and max(sizes) == 20 and min(sizes) > 0
        for drawn in found.values():
            assert len(set(drawn)) == len(drawn), "a row twice in an epoch"


@pytest.mark.parametrize("kind", [SamplerWithoutReplacement, SliceSamplerWithoutReplacement])
def test_an_iteration_over_an_epoch_has_no_row_twice_and_ends_with_it(kind):
    how = {} if kind is SamplerWithoutReplacement else {"slice_len": 5, "traj_key": "id"}
    for seed in range(10):
        torch.manual_seed(seed)
        rb = interfered(kind, {2: 6}, **how)
        seen = [n for batch in rb for n in batch["n"].tolist()]
        assert len(set(seen)) == len(seen) and 48 <= len(seen) <= 60


def test_with_drop_last_batches_stay_full():
    torch.manual_seed(0)
    rb = interfered(SamplerWithoutReplacement, {2: 30}, drop_last=True)
    assert [len(rb.sample()) for _ in range(6)] == [20] * 6
