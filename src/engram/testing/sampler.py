"""`SamplerContract`: what every sampler must do."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    TensorDictReplayBuffer,
)
from engram.errors import OutOfMemoryError
from engram.kernel.replay import as_sampler
from engram.testing.helpers import assert_equal, env_steps, numbers, steps


class SamplerContract:
    """Tests of a class with `sample(storage, batch_size) -> (index, info)`. Inherit, and implement `make`.

    Optional methods (`use_generator`, `state_dict`) are tested where a sampler has them. A sampler for storages
    of environments returns `storage.from_slots(slots)`; others set `environments = False`.

    Example:
        >>> class AnyStep:
        ...     def sample(self, storage, batch_size):
        ...         if not len(storage):
        ...             raise RuntimeError("Cannot sample from an empty storage.")
        ...         return storage.from_slots(torch.randint(len(storage), (batch_size,))), {}
        >>> class TestAnyStep(SamplerContract):
        ...     def make(self):
        ...         return AnyStep()
    """

    #: Whether it can draw from storages with ndim=2.
    environments = True

    def make(self) -> Any:
        """A new sampler."""
        raise NotImplementedError

    @pytest.fixture(params=[ListStorage, LazyTensorStorage, LazyMemmapStorage], ids=lambda c: c.__name__)
    def rb(self, request: Any) -> Any:
        return ReplayBuffer(storage=request.param(10), sampler=self.make(), batch_size=4)

    def test_only_stored_steps_are_drawn_and_info_says_which(self, rb: ReplayBuffer) -> None:
        for start in range(0, 35, 7):
            rb.extend(steps(start, start + 7))
            for _ in range(20):
                batch, info = rb.sample(return_info=True)
                assert info["index"].dtype == torch.int64 and 0 < len(info["index"]) <= 4
                assert numbers(batch) == numbers(rb[info["index"]] if not isinstance(rb[:], list) else batch)
                assert set(numbers(batch)) <= set(numbers(rb[:]))
                assert [rb[int(i)]["n"].item() for i in info["index"]] == numbers(batch)

    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_slots_are_integers_in_every_kind_of_buffer(self, prefetch: int) -> None:
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=self.make(), batch_size=4, prefetch=prefetch)
        rb.extend(steps(0, 10))
        for _ in range(4):
            batch, info = rb.sample(return_info=True)
            for index in (batch["index"], info["index"]):
                assert index.dtype == torch.int64 and index.tolist() == numbers(batch)
        joint = ReplayBufferEnsemble(rb, batch_size=4, prefetch=prefetch)
        for _ in range(4):
            batch, info = joint.sample(return_info=True)
            for index in (batch["index", "index"], info["index"]):
                assert index.dtype == torch.int64 and index.tolist() == numbers(batch)
        index, _ = SamplerEnsemble(self.make()).sample(joint.storage, 4)
        assert index.dtype == torch.int64 and 0 < index.numel() <= 4

    def test_an_empty_storage_cannot_be_sampled_and_says_so_before_it_draws(self, rb: ReplayBuffer) -> None:
        with pytest.raises(RuntimeError, match="empty storage"):
            rb.sample()
        rb.extend(steps(0, 3))
        rb.empty()
        state = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="empty storage"):
            rb.sample()
        assert torch.equal(state, torch.get_rng_state())

    def test_a_seed_reproduces_the_draws(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 10))

        def draw() -> list[list[int]]:
            rb.set_sampler(self.make())
            torch.manual_seed(3)
            return [rb.sample(return_info=True)[1]["index"].tolist() for _ in range(6)]

        assert draw() == draw()

    def _takes_generator(self) -> bool:
        return hasattr(self.make(), "use_generator")

    def test_the_buffers_own_generator_leaves_the_global_one_alone(self) -> None:
        if not self._takes_generator():
            pytest.skip("it has no use_generator: it draws from torch's global one")

        def draw(global_seed: int) -> list[list[int]]:
            torch.manual_seed(global_seed)
            rb = ReplayBuffer(
                storage=LazyTensorStorage(50),
                sampler=self.make(),
                generator=torch.Generator().manual_seed(5),
                batch_size=4,
            )
            rb.extend(torch.arange(50))
            before = torch.get_rng_state()
            drawn = [rb.sample().tolist() for _ in range(6)]
            assert torch.equal(before, torch.get_rng_state())
            return drawn

        assert draw(0) == draw(1)

    @pytest.mark.parametrize("prefetch", [0, 3])
    def test_a_state_saved_at_any_draw_goes_on_the_same(self, tmp_path: Path, prefetch: int) -> None:
        def make() -> TensorDictReplayBuffer:
            return TensorDictReplayBuffer(
                storage=LazyTensorStorage(10), sampler=self.make(), generator=torch.Generator(), batch_size=4,
                prefetch=prefetch,
            )  # fmt: skip

        rb = make()
        rb.extend(steps(0, 13))
        for k in range(8):
            rb.dumps(tmp_path / str(k))
            rb.sample()
        for k in range(8):
            twin, again = make(), make()
            for b in (twin, again):
                b.loads(tmp_path / str(k))
            torch.manual_seed(k)  # for samplers that do not use the buffer's own generator
            expected = [numbers(again.sample()) for _ in range(8)]
            torch.manual_seed(k)
            assert [numbers(twin.sample()) for _ in range(4)] == expected[:4]
            if prefetch and not self._takes_generator():
                continue  # what was prepared ahead has used up numbers of torch's global generator
            middle, seed = twin.state_dict(), torch.get_rng_state()
            assert [numbers(twin.sample()) for _ in range(4)] == expected[4:]
            again.load_state_dict(middle)
            torch.set_rng_state(seed)
            assert [numbers(again.sample()) for _ in range(4)] == expected[4:]

    @pytest.mark.parametrize("way", ["dumps", "state_dict"])
    @pytest.mark.parametrize("order", ["storage first", "sampler first", "sampler without a buffer"])
    @pytest.mark.parametrize("written", [8, 27])
    def test_a_state_saved_alone_goes_on_with_its_storage(
        self, tmp_path: Path, way: str, order: str, written: int
    ) -> None:
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=self.make(), batch_size=4)
        rb.extend(steps(0, written))
        rb.update_priority(torch.arange(5), torch.tensor([0.5, 3.0, 0.1, 2.0, 1.5]))
        for _ in range(3):
            for name, part in (("sampler", as_sampler(rb.sampler)), ("storage", rb.storage)):
                part.dumps(tmp_path / name)
            states = {"sampler": as_sampler(rb.sampler).state_dict(), "storage": rb.storage.state_dict()}
            states = copy.deepcopy(states)
            parts: dict[str, Any] = {"storage": LazyTensorStorage(10), "sampler": self.make()}
            if order != "sampler without a buffer":
                twin = ReplayBuffer(**parts, batch_size=4)
            for name in ("storage", "sampler") if order == "storage first" else ("sampler", "storage"):
                part = as_sampler(parts[name]) if name == "sampler" else parts[name]
                if way == "dumps":
                    part.loads(tmp_path / name)
                else:
                    part.load_state_dict(states[name])
                if name == "sampler":  # what was loaded is what would be saved
                    assert_equal(part.state_dict(), states[name])
            if order == "sampler without a buffer":
                twin = ReplayBuffer(**parts, batch_size=4)
            goes_on = []
            for buffer in (twin, copy.deepcopy(rb)):
                torch.manual_seed(3)
                goes_on.append([numbers(buffer.sample()) for _ in range(3)])
                buffer.extend(steps(50, 54))
                goes_on[-1] += [numbers(buffer.sample()) for _ in range(4)]
            assert goes_on[0] == goes_on[1]
            rb.sample()

    @pytest.mark.parametrize("order", ["storage first", "sampler first"])
    def test_a_state_saved_alone_goes_on_in_a_larger_storage_as_a_whole_buffer_does(
        self, tmp_path: Path, order: str
    ) -> None:
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=self.make(), batch_size=4)
        rb.extend(steps(0, 17))
        rb.update_priority(torch.arange(5), torch.tensor([0.5, 3.0, 0.1, 2.0, 1.5]))
        rb.sample()
        sampler, storage = as_sampler(rb.sampler), rb.storage
        sampler.dumps(tmp_path / "sampler")
        storage.dumps(tmp_path / "storage")
        rb.dumps(tmp_path / "both")
        whole, parts = (
            ReplayBuffer(storage=LazyTensorStorage(16), sampler=self.make(), batch_size=4) for _ in range(2)
        )
        whole.loads(tmp_path / "both")
        in_order: list[tuple[str, Any]] = [("storage", parts.storage), ("sampler", as_sampler(parts.sampler))]
        for name, part in in_order if order == "storage first" else reversed(in_order):
            part.loads(tmp_path / name)
        goes_on = []
        for buffer in (whole, parts):
            torch.manual_seed(3)
            goes_on.append([numbers(buffer.sample())])
            buffer.extend(steps(50, 54))
            goes_on[-1] += [numbers(buffer.sample()) for _ in range(5)]
        assert goes_on[0] == goes_on[1]

    def test_it_can_be_sent_to_another_process_in_the_middle(self) -> None:
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=self.make(), batch_size=4)
        rb.extend(torch.arange(10))
        rb.sample()
        copy = pickle.loads(pickle.dumps(rb.sampler))
        torch.manual_seed(1)
        expected = rb.sample().tolist()
        rb.set_sampler(copy)
        torch.manual_seed(1)
        assert rb.sample().tolist() == expected

    @pytest.mark.filterwarnings("ignore:sample was called")
    def test_a_batch_beyond_any_memory_is_refused_or_short_and_others_follow(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 10))
        try:
            assert len(numbers(rb.sample(4 * 10**12))) <= 4 * 10
        except (
            OutOfMemoryError,
            RuntimeError,
            ValueError,
        ):  # RuntimeError: torch has no memory, or no slice is so long
            pass
        assert set(numbers(rb.sample())) <= set(range(10))

    def test_a_storage_that_is_exchanged_is_sampled_from_the_start(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 10))
        rb.sample()
        storage = LazyTensorStorage(10)
        ReplayBuffer(storage=storage).extend(steps(50, 54))
        rb.set_storage(storage)
        for _ in range(10):
            batch = rb.sample()
            assert set(numbers(batch)) <= {50, 51, 52, 53}

    def test_a_sampler_used_for_two_buffers_mixes_nothing_up(self) -> None:
        sampler = self.make()
        rbs = [ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=3) for _ in range(2)]
        rbs[0].extend(torch.arange(10))
        rbs[1].extend(torch.arange(50, 54))
        for _ in range(10):
            assert rbs[0].sample().max() < 10 and rbs[1].sample().min() >= 50

    def test_environments_are_drawn_with_time(self) -> None:
        if not self.environments:
            pytest.skip("it is not for storages of environments")
        rb = ReplayBuffer(storage=LazyTensorStorage(30, ndim=2), sampler=self.make(), batch_size=8)
        rb.extend(env_steps(3, 0, 14))
        for _ in range(8):
            batch, info = rb.sample(return_info=True)
            time, env = info["index"]
            assert numbers(batch) == numbers(rb.storage[time, env])

    def test_it_says_what_it_is(self) -> None:
        assert type(self.make()).__name__ in repr(self.make())
