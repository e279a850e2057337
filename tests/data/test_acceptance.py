"""The acceptance scenario, from the buffer's side: three environments, checkpoints after every batch into a twin."""

import torch

from engram.data import LazyMemmapStorage, ReplayBuffer, SamplerWithoutReplacement, TensorDictReplayBuffer
from engram.testing import env_steps, numbers, state_of


def test_a_twin_is_equal_after_every_batch(tmp_path):
    for make in (ReplayBuffer, TensorDictReplayBuffer):

        def buffer(make=make):
            return make(
                storage=LazyMemmapStorage(100, ndim=2), sampler=SamplerWithoutReplacement(), batch_size=16,
                generator=torch.Generator(),
            )  # fmt: skip

        rb, twin = buffer(), buffer()
        frames = 0
        while frames < 400:
            rb.extend(env_steps(3, frames // 3, frames // 3 + 8))
            frames += 24
            rb.sample()
            rb.dumps(tmp_path / make.__name__)
            twin.loads(tmp_path / make.__name__)
            assert rb.storage.max_size == twin.storage.max_size == 102
            assert state_of(twin) == state_of(rb) and len(rb) == min(frames, 102)
            assert (rb[:] == twin[:]).all() and rb[:].batch_size == (3, min(frames, 102) // 3)
            assert rb.storage._is_full == twin.storage._is_full == (frames >= 102)
        for _ in range(20):
            assert numbers(rb.sample()) == numbers(twin.sample())
