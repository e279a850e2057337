"""What a storage of environments must do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram.data import ReplayBuffer, SamplerWithoutReplacement, Storage, TensorDictReplayBuffer
from engram.testing.numbered import env_steps, numbers, of_numbers, state_of


class StrandsContract:
    """Of a storage of environments, whose data are `[envs, time]`. Inherit, and implement `make`."""

    def make(self, capacity: int, path: Any, ndim: int = 2) -> Storage:
        """An empty storage with room for `capacity` steps; `path` is where it may keep files."""
        raise NotImplementedError

    @pytest.fixture
    def rb(self, tmp_path: Path) -> Any:
        return ReplayBuffer(storage=self.make(100, tmp_path / "store"), batch_size=5)

    def test_capacity_rounds_up_to_whole_rows_of_environments(self, rb: ReplayBuffer) -> None:
        assert rb.storage.max_size == 100
        rb.extend(env_steps(3, 0, 8))
        assert rb.storage.max_size == 102 and rb.storage._storage.batch_size == (34, 3)

    def test_one_environment_is_a_dimension_too(self, rb: ReplayBuffer) -> None:
        rb.extend(env_steps(1, 0, 8))
        assert rb.storage._storage.batch_size == (100, 1) and rb.storage[2:5].batch_size == (3, 1)
        assert numbers(rb[2:5]) == [[2, 3, 4]] and numbers(rb.storage[2:5]) == [[2], [3], [4]]

    def test_extend_returns_time_and_environment_of_each_step(self, rb: ReplayBuffer) -> None:
        index = rb.extend(env_steps(3, 0, 2))
        assert index.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
        assert (len(rb), rb.write_count, rb.writer._cursor) == (6, 6, 2)
        assert rb.add(env_steps(3, 2, 3)[:, 0]).tolist() == [[2, 0], [2, 1], [2, 2]]
        assert numbers(rb[:]) == [[0, 1, 2], [1000, 1001, 1002], [2000, 2001, 2002]]

    def test_reading_gives_environments_by_time(self, rb: ReplayBuffer) -> None:
        rb.extend(env_steps(3, 0, 8))
        whole = np.array([[1000 * e + t for t in range(8)] for e in range(3)])
        for index in (
            slice(None),
            slice(2, 5),
            [1, 3],
            [],
            torch.tensor([0, -1]),
            torch.tensor([True, False] * 4),
            range(2),
        ):
            where = np.asarray(index) if isinstance(index, list | range) else index
            where = where.numpy() if isinstance(where, torch.Tensor) else where
            expected = whole[:, where.astype(int) if isinstance(where, np.ndarray) and not where.size else where]
            assert np.array_equal(np.reshape(numbers(rb[index]), expected.shape), expected), index
        assert numbers(rb[3]) == [3, 1003, 2003] and numbers(rb[-1]) == [7, 1007, 2007]

    def test_a_tuple_goes_on_into_environments_and_time(self, rb: ReplayBuffer) -> None:
        rb.extend(env_steps(3, 0, 8))
        assert numbers(rb[1, 2]) == 1002 and numbers(rb[:, 2:4]) == [[2, 3], [1002, 1003], [2002, 2003]]
        assert numbers(rb[2, [0, 7]]) == [2000, 2007] and numbers(rb[0]) == [0, 1000, 2000]
        with pytest.raises(IndexError):
            rb[3, 0]

    def test_the_storage_takes_indices_as_samplers_give_them(self, rb: ReplayBuffer) -> None:
        rb.extend(env_steps(3, 0, 8))
        batch, info = rb.sample(50, return_info=True)
        assert isinstance(info["index"], tuple) and len(info["index"]) == 2
        assert numbers(rb.storage[info["index"]]) == numbers(batch)
        assert numbers(batch) == (info["index"][0] + 1000 * info["index"][1]).tolist()

    def test_time_goes_round_the_ring_for_all_environments_at_once(self, rb: ReplayBuffer) -> None:
        index = rb.extend(env_steps(3, 0, 40))
        assert index.shape == (120, 2) and index[-1].tolist() == [5, 2]
        assert (rb.writer._cursor, rb.write_count, len(rb), rb.storage._is_full) == (6, 120, 102, True)
        times = [34, 35, 36, 37, 38, 39, *range(6, 34)]
        assert numbers(rb[:]) == [[1000 * e + t for t in times] for e in range(3)]

    def test_time_can_be_the_first_dimension(self, tmp_path: Path) -> None:
        rb = ReplayBuffer(storage=self.make(100, tmp_path / "other"), dim_extend=0)
        rb.extend(env_steps(3, 0, 8).transpose(0, 1))
        assert rb.storage.max_size == 102 and rb[:].shape == (8, 3)
        assert numbers(rb[1:3]) == [[1, 1001, 2001], [2, 1002, 2002]]

    def test_time_steps_can_be_replaced(self, rb: ReplayBuffer) -> None:
        rb.extend(env_steps(3, 0, 8))
        rb[2] = of_numbers(torch.tensor([50, 51, 52]))
        rb[4:6] = of_numbers(torch.tensor([[60, 61], [62, 63], [64, 65]]))
        assert numbers(rb[2]) == [50, 51, 52] and numbers(rb[4:6]) == [[60, 61], [62, 63], [64, 65]]
        rb.storage[torch.tensor([7]), torch.tensor([1])] = of_numbers(torch.tensor([70]))
        assert numbers(rb[7]) == [7, 70, 2007] and numbers(rb[3]) == [3, 1003, 2003]
        with pytest.raises(IndexError, match="storage"):
            rb[0, 1] = of_numbers(torch.tensor(5))

    def test_other_environments_are_refused(self, rb: ReplayBuffer) -> None:
        rb.extend(env_steps(3, 0, 8))
        was = state_of(rb)
        for bad in (env_steps(4, 0, 8), env_steps(3, 0, 1)[:, 0], env_steps(3, 0, 0)):
            with pytest.raises(ValueError):
                rb.extend(bad)
        with pytest.raises(ValueError, match="2"):
            rb.add(env_steps(2, 0, 1)[:, 0])
        assert state_of(rb) == was

    def test_data_without_environments_are_refused_before_anything_is_made(self, rb: ReplayBuffer) -> None:
        with pytest.raises(ValueError, match="2 batch dimensions"):
            rb.extend(of_numbers(torch.arange(5)))
        assert rb.storage.lanes is None

    def test_a_list_of_time_steps_is_stacked(self, rb: ReplayBuffer) -> None:
        rb.extend([env_steps(3, t, t + 1)[:, 0] for t in range(4)])
        assert numbers(rb[:]) == [[1000 * e + t for t in range(4)] for e in range(3)]

    def test_samples_say_where_they_are_from(self, tmp_path: Path) -> None:
        rb = TensorDictReplayBuffer(storage=self.make(100, tmp_path / "td"), batch_size=16, track_generations=True)
        rb.extend(env_steps(3, 0, 40))
        batch, info = rb.sample(return_info=True)
        assert batch["index"].shape == (16, 2) and torch.equal(batch["index"], torch.stack(info["index"], -1))
        time = batch["n"] % 1000
        assert torch.equal(batch["index"][:, 0], time % 34) and torch.equal(batch["index"][:, 1], batch["n"] // 1000)
        assert torch.equal(batch["generation"], time)
        assert torch.equal(rb[:]["index"][1, 5], torch.tensor([5, 1]))

    def test_an_epoch_gives_every_step_of_every_environment_once(self, tmp_path: Path) -> None:
        sampler = SamplerWithoutReplacement()
        rb = ReplayBuffer(storage=self.make(100, tmp_path / "epoch"), sampler=sampler, batch_size=7)
        rb.extend(env_steps(3, 0, 40))
        seen = [n for batch in rb for n in numbers(batch)]
        assert sorted(seen) == sorted(1000 * e + t for e in range(3) for t in range(6, 40))

    @pytest.mark.parametrize("way", ["dumps", "state_dict"])
    @pytest.mark.parametrize("sizes", [[], [8], [40], [20, 20]], ids=str)
    def test_a_saved_state_is_the_same_in_a_twin(
        self, rb: ReplayBuffer, tmp_path: Path, sizes: list[Any], way: str
    ) -> None:
        twin = ReplayBuffer(storage=self.make(100, tmp_path / "twin"), batch_size=5)
        at = 0
        for n in sizes:
            rb.extend(env_steps(3, at, at + n))
            at += n
        if way == "dumps":
            rb.dumps(tmp_path / "saved")
            twin.loads(tmp_path / "saved")
        else:
            twin.load_state_dict(rb.state_dict())
        assert state_of(twin) == state_of(rb) and twin.storage.max_size == rb.storage.max_size

    def test_a_checkpoint_of_other_environments_is_refused(self, rb: ReplayBuffer, tmp_path: Path) -> None:
        other = ReplayBuffer(storage=self.make(100, tmp_path / "other"))
        other.extend(env_steps(4, 0, 2))
        rb.extend(env_steps(3, 0, 2))
        rb.dumps(tmp_path / "saved")
        with pytest.raises(ValueError, match=r"\[4\].*\[3\]"):
            other.loads(tmp_path / "saved")
        assert len(other) == 8

    def test_three_dimensions_are_two_of_environments_and_time(self, tmp_path: Path) -> None:
        rb = ReplayBuffer(storage=self.make(60, tmp_path / "three", ndim=3), batch_size=9)
        data = of_numbers(torch.arange(2 * 3 * 4).reshape(2, 3, 4))
        index = rb.extend(data)
        assert index.shape == (24, 3) and index[0].tolist() == [0, 0, 0] and index[-1].tolist() == [3, 1, 2]
        assert rb.storage.max_size == 60 and rb.storage._storage.batch_size == (10, 2, 3)
        assert numbers(rb[:]) == numbers(data) and numbers(rb[3]) == numbers(data[..., 3])
        batch, info = rb.sample(return_info=True)
        assert len(info["index"]) == 3 and numbers(rb.storage[info["index"]]) == numbers(batch)
        rb[1] = of_numbers(torch.arange(100, 106).reshape(2, 3))
        assert numbers(rb[1]) == [[100, 101, 102], [103, 104, 105]]
        rb[2:4] = of_numbers(torch.arange(200, 212).reshape(2, 3, 2))
        assert numbers(rb[2:4]) == torch.arange(200, 212).reshape(2, 3, 2).tolist()
        rb.add(of_numbers(torch.arange(300, 306).reshape(2, 3)))
        assert numbers(rb[-1]) == [[300, 301, 302], [303, 304, 305]]
        with pytest.raises(ValueError):
            rb.extend(of_numbers(torch.arange(24).reshape(3, 2, 4)))
        twin = ReplayBuffer(storage=self.make(60, tmp_path / "twin", ndim=3), batch_size=9)
        twin.load_state_dict(rb.state_dict())
        assert numbers(twin[:]) == numbers(rb[:])
