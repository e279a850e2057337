"""Resizing frames: what the transform adds to the bare function below it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch
from tensordict import TensorDict

from benchmarks.cases import Row, calling
from benchmarks.data import FRAMES
from benchmarks.libraries import Call

BATCH, SIDE = 32, 64
PLACES = {"engram": "engram.envs.transforms", "torchrl": "torchrl.envs.transforms"}


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """32 stacks of four 84 x 84 frames to 64 x 64."""
    frames = torch.rand(BATCH, *FRAMES)
    batch = TensorDict({"pixels": frames}, batch_size=[BATCH])

    def resizing(library: str) -> Call:
        made = importlib.import_module(PLACES[library]).Resize
        transform = made(SIDE, SIDE, in_keys=["pixels"], out_keys=["small"])
        return lambda: transform(batch)

    def bare() -> Call:
        shape = (SIDE, SIDE)
        return lambda: torch.nn.functional.interpolate(frames, shape, mode="bilinear", align_corners=False)

    yield [
        Row(
            "resize",
            f"Resize of {BATCH} x 4x84x84 float32 to {SIDE}x{SIDE}",
            {name: calling(lambda name=name: resizing(name)) for name in PLACES},
            floor=calling(bare),
            target={"floor": 1 / 1.1},
            notes=["the floor is F.interpolate alone"],
        )
    ]
