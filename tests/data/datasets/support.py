"""Steps of short trajectories, and batches compared bit by bit."""

import torch
from tensordict import TensorDict


def steps(lengths, flagged=True, seed=0, ids=True):
    """TED steps `[sum(lengths)]` of trajectories of these lengths; the last of each is terminated, if `flagged`."""
    generator = torch.Generator().manual_seed(seed)
    n, ends = sum(lengths), torch.tensor(lengths).cumsum(0) - 1
    seen = torch.randn(n + len(lengths), 3, generator=generator)
    places = torch.cat([torch.arange(k) + start for k, start in zip(lengths, _starts(lengths), strict=True)])
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[ends] = flagged
    none = torch.zeros_like(done)
    made = TensorDict(
        {
            "observation": seen[places],
            "action": torch.randint(0, 5, (n, 2), generator=generator),
            **{flag: none.clone() for flag in ("done", "terminated", "truncated")},
            "next": {
                "observation": seen[places + 1],
                "reward": torch.randn(n, 1, generator=generator),
                "done": done,
                "terminated": done.clone(),
                "truncated": none.clone(),
            },
        },
        [n],
    )
    if ids:
        made["collector", "traj_ids"] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return made


def _starts(lengths):
    return [sum(lengths[:i]) + i for i in range(len(lengths))]


def with_bits(batch):
    """Floats that compare badly: NaNs of two kinds, infinities, a negative zero."""
    odd = torch.tensor([0x7FC00001, 0x7FC00000, -0x3FFFFF, -0x80000000, 0x7F800000], dtype=torch.int32)
    n = len(batch)
    batch["next", "reward"] = odd[torch.arange(n) % len(odd)].view(torch.float32).reshape(n, 1)
    return batch


def assert_same_bits(found, wanted):
    """The same keys, dtypes, shapes and bytes."""
    assert set(found.keys(True, True)) == set(wanted.keys(True, True))
    assert found.batch_size == wanted.batch_size
    for key in wanted.keys(True, True):
        a, b = found[key], wanted[key]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), key
        assert torch.equal(raw(a), raw(b)), key


def raw(tensor):
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
