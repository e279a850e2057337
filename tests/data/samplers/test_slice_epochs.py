"""SliceSamplerWithoutReplacement: each trajectory once an epoch, and epochs that go on wherever they are loaded."""

import pytest
import torch

from data.samplers.episode_data import episodes, slices_of
from data.samplers.test_slices import SliceContract
from data.samplers.test_uniform import assert_uniform
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSamplerWithoutReplacement


class TestSliceSamplerWithoutReplacement(SliceContract):
    def make(self):
        return SliceSamplerWithoutReplacement(slice_len=2, end_key="done", truncated_key=None)


class TestInOrder(SliceContract):
    def make(self):
        return SliceSamplerWithoutReplacement(
            num_slices=1, end_key="done", truncated_key=None, drop_last=True, shuffle=False, strict_length=False
        )

    def test_a_sampler_used_for_two_buffers_mixes_nothing_up(self):
        super().test_a_sampler_used_for_two_buffers_mixes_nothing_up()


def buffer(capacity=100, batch_size=6, **how):
    sampler = SliceSamplerWithoutReplacement(slice_len=2, **how)
    generator = torch.Generator().manual_seed(3)
    return ReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=batch_size, generator=generator
    )


def ids_of(rb):
    """The episode of each slice, to the end of the epoch."""
    return [n for batch in rb for n in batch["id"][::2].tolist()]


def test_every_trajectory_that_is_long_enough_is_drawn_once_an_epoch():
    rb = buffer()
    rb.extend(episodes([5, 1, 3, 2, 9, 1, 4, 2, 2, 7]))
    for _ in range(5):
        sizes, seen = [], []
        for batch in rb:
            sizes.append(len(batch))
            seen += batch["id"][::2].tolist()
        assert sorted(seen) == [0, 2, 3, 4, 6, 7, 8, 9] and sizes == [6, 6, 4]
        assert rb.sampler.ran_out
    slices_of(*rb.sample(return_info=True))
    assert not rb.sampler.ran_out


def test_a_last_batch_that_is_not_full_can_be_left_out():
    rb = buffer(drop_last=True)
    rb.extend(episodes([2] * 8))
    for _ in range(3):
        assert [len(batch) for batch in rb] == [6, 6]
    assert rb.sample(16).shape == (16,)
    with pytest.raises(ValueError, match=r"9 slices are wanted, but only 8 trajectories have 2 steps"):
        rb.sample(18)


def test_in_order_means_oldest_first():
    rb = buffer(capacity=20, shuffle=False)
    rb.extend(episodes([2] * 13))
    assert ids_of(rb) == list(range(3, 13))


def test_orders_are_as_likely_and_so_are_starts():
    rb = buffer(batch_size=2)
    rb.extend(episodes([4, 4, 4]))
    first, starts = [], []
    for _ in range(3000):
        batches = [batch["n"][0].item() for batch in rb]
        first.append(tuple(n // 4 for n in batches))
        starts += batches
    assert_uniform(first, [(a, b, 3 - a - b) for a in range(3) for b in range(3) if a != b])
    assert_uniform(starts, [0, 1, 2, 4, 5, 6, 8, 9, 10])


def test_trajectories_that_come_during_an_epoch_join_the_next():
    rb = buffer()
    rb.extend(episodes([2, 2, 2, 2, 1], running=True))
    seen = rb.sample()["id"][::2].tolist()
    rb.extend(episodes([3, 2], start=9, first_id=4))
    assert sorted(seen + ids_of(rb)) == [0, 1, 2, 3]
    assert sorted(ids_of(rb)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("shuffle", [True, False])
def test_trajectories_that_are_overwritten_during_an_epoch_are_skipped(shuffle):
    for seed in range(20):
        rb = buffer(capacity=20, shuffle=shuffle)
        rb.generator.manual_seed(seed)
        rb.extend(episodes([2] * 10))
        seen = rb.sample()["id"][::2].tolist()
        rb.extend(episodes([2] * 4, start=20, first_id=10))
        seen += ids_of(rb) if not rb.sampler.ran_out else []
        assert len(seen) == len(set(seen)) and set(seen) | set(range(4)) == set(range(10))
        assert sorted(ids_of(rb)) == list(range(4, 14))


def test_another_batch_size_that_changes_the_length_begins_an_epoch():
    sampler = SliceSamplerWithoutReplacement(num_slices=2)
    rb = ReplayBuffer(storage=LazyTensorStorage(50), sampler=sampler)
    rb.extend(episodes([4, 2, 4, 2, 4]))
    rb.sample(4)
    seen = [n for _ in range(2) for n in rb.sample(8)["id"][::4].tolist()]
    assert sorted(seen) == [0, 2, 4]


def test_a_state_saved_at_every_step_goes_on_the_same_elsewhere(tmp_path):
    """Also where rows were written and overwritten between the last draw and the save."""
    for shuffle in (True, False):
        rb = buffer(capacity=40, batch_size=4, shuffle=shuffle)
        rb.extend(episodes([3, 2, 5, 1, 2, 2, 4, 2, 6]))
        at = 27
        for k in range(25):
            if k % 3 != 2:
                rb.sample()
            if k % 2:
                rb.extend(episodes([k % 5 + 1], start=at, first_id=100 + k, running=k % 4 == 1))
                at += k % 5 + 1
            path = tmp_path / f"{shuffle}{k}"
            rb.dumps(path)
            expected = [rb.sample()["n"].tolist() for _ in range(9)]
            for capacity in (40, 55):
                twin = buffer(capacity=capacity, batch_size=4, shuffle=shuffle)
                twin.loads(path)
                assert [twin.sample()["n"].tolist() for _ in range(9)] == expected, (shuffle, k, capacity)
            rb.loads(path)


def test_an_epoch_that_is_loaded_into_a_store_with_more_lanes_goes_on(tmp_path):
    rb = buffer()
    rb.extend(episodes([2] * 10))
    rb.sample()
    rb.dumps(tmp_path / "saved")
    expected = ids_of(rb)
    sampler = SliceSamplerWithoutReplacement(slice_len=2)
    twin = ReplayBuffer(
        storage=LazyMemmapStorage(400, lanes=2), sampler=sampler, batch_size=6, generator=torch.Generator()
    )
    twin.loads(tmp_path / "saved")
    assert ids_of(twin) == expected


def test_prepared_batches_are_those_without_preparation():
    def drawn(prefetch):
        sampler = SliceSamplerWithoutReplacement(slice_len=2)
        generator = torch.Generator().manual_seed(1)
        storage = LazyTensorStorage(60)
        rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4, generator=generator, prefetch=prefetch)
        rb.extend(episodes([4, 2, 6, 3, 2, 8, 5, 2, 2]))
        first = [rb.sample()["n"].tolist() for _ in range(4)]
        rb[0] = rb[0]  # drops what was prepared
        return first + [[b["n"].tolist() for b in rb] for _ in range(3)]

    assert drawn(0) == drawn(3)


def test_saved_settings_that_differ_are_refused():
    rb = buffer()
    rb.extend(episodes([2] * 5))
    with pytest.raises(ValueError, match="drop_last=True here, False there"):
        buffer(drop_last=True).load_state_dict(rb.state_dict())
