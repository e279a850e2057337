"""What the contract of storages says of those with several lanes, where it says something else."""

from __future__ import annotations

from pathlib import Path

import torch

from engram.data import ReplayBuffer
from engram.testing import numbers, steps


class SeveralLanes:
    """One process writes all lanes, one after the other: they are one ring."""

    test_a_slice_of_the_storage_is_a_live_view = None  # lanes may have gaps between them

    def test_generations_never_go_back(self, rb, storage):
        seen = torch.full((10,), -1)
        for round_ in range(6):
            rb.extend(steps(0, 7))
            generations = storage.lanes.generations(torch.arange(10))
            assert (generations[generations >= 0] > seen[generations >= 0]).all() or round_ % 2
            if round_ % 2:
                seen = torch.maximum(seen, generations)  # each lane counts by itself
                rb.empty()
                assert (storage.lanes.generations(torch.arange(10)) == -1).all()

    def test_a_larger_storage_takes_what_a_smaller_one_saved(self, rb, tmp_path: Path):
        larger = ReplayBuffer(storage=self.make(20, tmp_path / "twin"), batch_size=4)
        rb.extend(steps(0, 13))
        rb.dumps(tmp_path / "saved")
        larger.loads(tmp_path / "saved")
        assert sorted(numbers(larger[:])) == [*range(3, 13)] and larger.write_count == 13  # the lanes are longer here
        larger.extend(steps(13, 15))
        assert sorted(numbers(larger[:])) == [*range(3, 15)]
