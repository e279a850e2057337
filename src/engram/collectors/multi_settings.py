"""What collectors with worker processes make of their arguments."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from engram.processes.shared_weights import tensors_of


def makers_of(create_env_fn: Any, num_workers: int | None) -> list[Callable[[], Any]]:
    """A callable for each worker. Raises ValueError and TypeError for what cannot give one."""
    makers = [create_env_fn] * (num_workers or 1) if callable(create_env_fn) else list(create_env_fn)
    if not makers or (num_workers is not None and len(makers) != num_workers):
        raise ValueError(
            f"{len(makers)} environments to make and num_workers={num_workers}; give a callable for each worker, or "
            "a single one and num_workers of 1 or more"
        )
    for maker in makers:
        if not callable(maker) or hasattr(maker, "step"):
            raise TypeError(
                f"each worker makes its own environment: give callables that do, got a {type(maker).__name__}"
            )
    return makers


def on_cpu(policy: Any) -> Any:
    """What may be sent to a process that has not begun to use a GPU."""
    is_elsewhere = isinstance(policy, nn.Module) and any(p.device.type != "cpu" for p in tensors_of(policy).values())
    return copy.deepcopy(policy).to("cpu") if is_elsewhere else policy


def can_be_shared(storage: Any, num_workers: int) -> bool:
    """Whether workers can write there; ValueError where only the number of lanes is in the way."""
    lanes = getattr(storage, "lanes", None)
    if lanes is None or getattr(lanes, "locks", None) is None:
        return False  # not made yet, or in this process's own memory
    if storage.ndim > 1 and num_workers > 1:
        return False  # such a storage has one lane
    if lanes.store.lanes < num_workers:
        raise ValueError(
            f"{num_workers} workers write to the replay buffer, and its storage has lanes={lanes.store.lanes}; make it "
            f"with lanes={num_workers}, one for each"
        )
    return True


def warn_of_remainder(total_frames: int, frames_per_batch: int) -> None:
    """Says so where the last batch has more frames than are wanted."""
    if total_frames > 0 and total_frames % frames_per_batch:
        whole = -(-total_frames // frames_per_batch) * frames_per_batch
        warnings.warn(
            f"total_frames={total_frames} is not a multiple of the {frames_per_batch} frames of a batch; "
            f"{whole} frames will be collected",
            stacklevel=5,
        )
