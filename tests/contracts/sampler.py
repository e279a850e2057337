"""What every sampler must do. Inherit, and implement `make`."""

from __future__ import annotations

import pickle

import pytest
import torch

from contracts.steps import env_steps, numbers, steps
from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer


class SamplerContract:
    def make(self):
        raise NotImplementedError

    @pytest.fixture(params=[ListStorage, LazyTensorStorage, LazyMemmapStorage], ids=lambda c: c.__name__)
    def rb(self, request):
        return ReplayBuffer(storage=request.param(10), sampler=self.make(), batch_size=4)

    def test_only_stored_steps_are_drawn_and_info_says_which(self, rb):
        for start in range(0, 35, 7):
            rb.extend(steps(start, start + 7))
            for _ in range(20):
                batch, info = rb.sample(return_info=True)
                assert info["index"].dtype == torch.int64 and 0 < len(info["index"]) <= 4
                assert numbers(batch) == numbers(rb[info["index"]] if not isinstance(rb[:], list) else batch)
                assert set(numbers(batch)) <= set(numbers(rb[:]))
                assert [rb[int(i)]["n"].item() for i in info["index"]] == numbers(batch)

    def test_an_empty_storage_cannot_be_sampled_and_says_what_to_do(self, rb):
        with pytest.raises(RuntimeError, match=r"Cannot sample from an empty storage\. Add or extend"):
            rb.sample()
        rb.extend(steps(0, 3))
        rb.empty()
        with pytest.raises(RuntimeError, match=r"Cannot sample from an empty storage\."):
            rb.sample()

    def test_a_seed_reproduces_the_draws(self, rb):
        rb.extend(steps(0, 10))

        def draw():
            rb.set_sampler(self.make())
            torch.manual_seed(3)
            return [rb.sample(return_info=True)[1]["index"].tolist() for _ in range(6)]

        assert draw() == draw()

    def test_the_buffers_own_generator_leaves_the_global_one_alone(self):
        def draw(global_seed):
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
    def test_a_state_saved_at_any_draw_goes_on_the_same(self, tmp_path, prefetch):
        def make():
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
            for path in (tmp_path / str(k),):
                twin, again = make(), make()
                twin.loads(path)
                again.loads(path)
                expected = [numbers(again.sample()) for _ in range(8)]
                assert [numbers(twin.sample()) for _ in range(4)] == expected[:4]
                middle = twin.state_dict()
                assert [numbers(twin.sample()) for _ in range(4)] == expected[4:]
                again.load_state_dict(middle)
                assert [numbers(again.sample()) for _ in range(4)] == expected[4:]

    def test_it_can_be_sent_to_another_process_in_the_middle(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=self.make(), batch_size=4)
        rb.extend(torch.arange(10))
        rb.sample()
        copy = pickle.loads(pickle.dumps(rb.sampler))
        torch.manual_seed(1)
        expected = rb.sample().tolist()
        rb.set_sampler(copy)
        torch.manual_seed(1)
        assert rb.sample().tolist() == expected

    def test_a_storage_that_is_exchanged_is_sampled_from_the_start(self, rb):
        rb.extend(steps(0, 10))
        rb.sample()
        storage = LazyTensorStorage(10)
        ReplayBuffer(storage=storage).extend(steps(50, 54))
        rb.set_storage(storage)
        for _ in range(10):
            batch = rb.sample()
            assert set(numbers(batch)) <= {50, 51, 52, 53}

    def test_a_sampler_used_for_two_buffers_mixes_nothing_up(self):
        sampler = self.make()
        rbs = [ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=3) for _ in range(2)]
        rbs[0].extend(torch.arange(10))
        rbs[1].extend(torch.arange(50, 54))
        for _ in range(10):
            assert rbs[0].sample().max() < 10 and rbs[1].sample().min() >= 50

    def test_environments_are_drawn_with_time(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(30, ndim=2), sampler=self.make(), batch_size=8)
        rb.extend(env_steps(3, 0, 14))
        for _ in range(8):
            batch, info = rb.sample(return_info=True)
            time, env = info["index"]
            assert numbers(batch) == numbers(rb.storage[time, env])

    def test_it_says_what_it_is(self):
        assert repr(self.make()).startswith(type(self.make()).__name__)
