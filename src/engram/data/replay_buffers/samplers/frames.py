"""Slices for stacks of frames: each stored step, with the frames before it."""

from __future__ import annotations

from typing import Any

from engram.data.replay_buffers.samplers.runs import RunRule
from engram.data.replay_buffers.samplers.slices import SliceSampler


class FrameStackSampler(SliceSampler, built_in=True):
    """Draws slices of the `slice_len` frames that end in a step, `batch_size` of them.

    A buffer with it needs the transform that `CatFrames.make_rb_transform_and_sampler` returns beside it, which makes a
    row of each slice. Slices are shorter near the beginning of a trajectory.

    Args:
        slice_len: the number of frames.
        settings: as SliceSampler's.

    Example:
        >>> from engram.envs.transforms import CatFrames
        >>> frames = CatFrames(N=3, dim=-1, in_keys=["x"], out_keys=["stack"])
        >>> transform, sampler = frames.make_rb_transform_and_sampler(batch_size=4, end_key="end")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, transform=transform, batch_size=4)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(9.0).unsqueeze(-1), "end": torch.arange(9) % 5 == 4}, [9]))
        >>> batch = rb.sample()
        >>> batch["stack"].shape, bool((batch["stack"][:, -1:] == batch["x"]).all())
        (torch.Size([4, 3]), True)
    """

    _rule = RunRule(counts_slices=True)

    def __init__(self, *, slice_len: int, **settings: Any) -> None:
        settings = {"span": (True, False), "strict_length": False, "truncated_key": None, "init_key": None, **settings}
        super().__init__(slice_len=slice_len, **settings)
