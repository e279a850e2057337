"""A buffer with each part that a checkpoint can name, small, with a state where it has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from engram import transforms
from engram.data import (
    CompressedListStorage,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from engram.specs import Unbounded
from engram.transforms.base import InvertedTransform

BATCH = 4

STORAGES: dict[str, Callable[[], Any]] = {
    "CompressedListStorage": lambda: CompressedListStorage(30),
    "LazyMemmapStorage": lambda: LazyMemmapStorage(30, lanes=2),
    "LazyStackStorage": lambda: LazyStackStorage(30),
    "LazyTensorStorage": lambda: LazyTensorStorage(30, compact=["obs"]),
    "ListStorage": lambda: ListStorage(30),
}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "PrioritizedSampler": lambda: PrioritizedSampler(None, 0.7, 0.5),
    "PrioritizedSliceSampler": lambda: PrioritizedSliceSampler(30, 0.7, 0.5, slice_len=2),
    "QueueSampler": lambda: QueueSampler(full="overwrite"),
    "RandomSampler": RandomSampler,
    "SamplerWithoutReplacement": SamplerWithoutReplacement,
    "SequenceSampler": lambda: SequenceSampler(slice_len=2, burn_in=1),
    "SliceSampler": lambda: SliceSampler(slice_len=2, end_keys=[("next", "done")]),
    "SliceSamplerWithoutReplacement": lambda: SliceSamplerWithoutReplacement(num_slices=2),
}
WRITERS: dict[str, Callable[[], Any]] = {
    "ImmutableDatasetWriter": RoundRobinWriter,  # replaced when the rows are there
    "RoundRobinWriter": RoundRobinWriter,
    "TensorDictMaxValueWriter": lambda: TensorDictMaxValueWriter(rank_key=("next", "reward")),
    "TensorDictRoundRobinWriter": TensorDictRoundRobinWriter,
}
TRANSFORMS: dict[str, Callable[[], Any]] = {
    "ActionScaling": lambda: transforms.ActionScaling(["obs"], loc=1.0, scale=2.0),
    "CatFrames": lambda: transforms.CatFrames(2, -1, ["obs"]),
    "CatTensors": lambda: transforms.CatTensors(["obs", ("next", "obs")], "both"),
    "CenterCrop": lambda: transforms.CenterCrop(2, 2, ["pixels"]),
    "ClipTransform": lambda: transforms.ClipTransform(["obs"], low=-1.0, high=1.0),
    "Compose": lambda: transforms.Compose(transforms.VecNorm(["obs"]), transforms.StepCounter()),
    "DTypeCastTransform": lambda: transforms.DTypeCastTransform(torch.float32, torch.float64, ["obs"]),
    "DoubleToFloat": lambda: transforms.DoubleToFloat(["obs"]),
    "EndOfLifeTransform": transforms.EndOfLifeTransform,
    "ExcludeTransform": lambda: transforms.ExcludeTransform("pixels"),
    "FlattenObservation": lambda: transforms.FlattenObservation(-2, -1, ["pixels"]),
    "FrameSkipTransform": lambda: transforms.FrameSkipTransform(2),
    "GrayScale": lambda: transforms.GrayScale(["pixels"]),
    "InitTracker": transforms.InitTracker,
    "InvertedTransform": lambda: InvertedTransform(transforms.VecNorm(["obs"])),
    "MultiStepTransform": lambda: transforms.MultiStepTransform(3, 0.5),
    "NextStateReconstructor": lambda: transforms.NextStateReconstructor(["obs"], traj_key=None),
    "NoopResetEnv": lambda: transforms.NoopResetEnv(3),
    "ObservationNorm": lambda: _fitted(transforms.ObservationNorm(in_keys=["obs"])),
    "RandomCropTensorDict": lambda: transforms.RandomCropTensorDict(2),
    "RandomTruncationTransform": lambda: transforms.RandomTruncationTransform(2, 5),
    "RenameTransform": lambda: transforms.RenameTransform(["obs"], ["seen"], create_copy=True),
    "Resize": lambda: transforms.Resize(3, 3, in_keys=["pixels"]),
    "Reward2GoTransform": transforms.Reward2GoTransform,
    "RewardClipping": lambda: transforms.RewardClipping(-1.0, 1.0, [("next", "reward")]),
    "RewardScaling": lambda: transforms.RewardScaling(1.0, 2.0, [("next", "reward")]),
    "RewardSum": transforms.RewardSum,
    "SelectTransform": lambda: transforms.SelectTransform("obs"),
    "SignTransform": lambda: transforms.SignTransform(["obs"]),
    "StepCounter": lambda: transforms.StepCounter(max_steps=50),
    "TargetReturn": lambda: transforms.TargetReturn(10.0),
    "TensorDictPrimer": lambda: transforms.TensorDictPrimer(hidden=Unbounded((2,))),
    "ToTensorImage": lambda: transforms.ToTensorImage(in_keys=["pixels"]),
    "TrajCounter": transforms.TrajCounter,
    "Transform": lambda: transforms.Transform(["obs"]),
    "UnsqueezeTransform": lambda: transforms.UnsqueezeTransform(-1, in_keys=["obs"]),
    "VecNorm": lambda: transforms.VecNorm(["obs"]),
    "VecNormV2": lambda: transforms.VecNormV2(["obs"]),
}
#: Those that have a state where they are applied on writing.
IN_TIME = ("CatFrames", "InitTracker", "RewardSum", "StepCounter", "TargetReturn", "TrajCounter")
BUFFERS: dict[str, Callable[[], Any]] = {
    "ReplayBuffer": lambda: ReplayBuffer(storage=LazyTensorStorage(30), batch_size=BATCH),
    "TensorDictReplayBuffer": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(30), batch_size=BATCH),
    "PrioritizedReplayBuffer": lambda: PrioritizedReplayBuffer(
        0.7, 0.5, storage=LazyTensorStorage(30), batch_size=BATCH, generator=torch.Generator()
    ),
    "TensorDictPrioritizedReplayBuffer": lambda: TensorDictPrioritizedReplayBuffer(
        0.7, 0.5, priority_key="p", storage=LazyTensorStorage(30), batch_size=BATCH
    ),
}


def steps(n: int = 10) -> TensorDict:
    """An episode, and the beginning of another."""
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[n // 2 - 1] = True
    obs = torch.arange(2.0 * (n + 1)).reshape(n + 1, 2)
    following = {"obs": obs[1:], "reward": torch.arange(float(n))[:, None], "done": done, "terminated": done}
    pixels = torch.zeros(n, 3, 4, 4, dtype=torch.uint8)
    return TensorDict({"obs": obs[:-1], "pixels": pixels, "next": following}, [n])


def _fitted(norm: Any) -> Any:
    norm.init_stats(steps(), key="obs")
    return norm


def empty_buffer(part: str) -> Any:
    """A buffer with the part of this name, without rows; `ensemble` is one of two buffers."""
    if part in BUFFERS:
        return BUFFERS[part]()
    if part == "ensemble":
        members = [empty_buffer("SamplerWithoutReplacement"), empty_buffer("VecNorm")]
        return ReplayBufferEnsemble(*members, p=[0.5, 0.5], generator=torch.Generator(), batch_size=BATCH)
    storage = STORAGES.get(part, lambda: LazyTensorStorage(30))()
    sampler = SAMPLERS.get(part, RandomSampler)()
    writer = WRITERS.get(part, TensorDictRoundRobinWriter)()
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, writer=writer, batch_size=BATCH)
    if part in TRANSFORMS:
        rb.append_transform(TRANSFORMS[part](), invert=part in IN_TIME)
    return rb


def buffer(part: str) -> Any:
    """The same with rows, after a batch, so that the part has a state where it can have one."""
    rb = empty_buffer(part)
    for member in rb._members if part == "ensemble" else [rb]:
        member.extend(steps())
    if part == "ImmutableDatasetWriter":
        rb.set_writer(ImmutableDatasetWriter())
    if part not in TRANSFORMS and part != "ensemble":
        rb.sample()
    return rb
