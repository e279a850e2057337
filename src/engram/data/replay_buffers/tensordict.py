"""Replay buffers of TensorDicts: samples also say which rows they are."""

from __future__ import annotations

from typing import Any

import torch

from engram.data.replay_buffers.buffer import ReplayBuffer
from engram.data.replay_buffers.writers.base import Writer
from engram.data.replay_buffers.writers.round_robin import TensorDictRoundRobinWriter


class TensorDictReplayBuffer(ReplayBuffer):
    """A ReplayBuffer whose samples carry `"index"`, for data with keys.

    Args:
        priority_key: where samplers with priorities look for them.
        Others: as ReplayBuffer; the default writer is `TensorDictRoundRobinWriter`.

    Example:
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(10.0)}, [10]))
        >>> batch = rb.sample()
        >>> bool((rb[batch["index"]]["obs"] == batch["obs"]).all())
        True
    """

    def __init__(self, *args: Any, priority_key: str = "td_error", **kwargs: Any) -> None:
        self._priority_key = priority_key
        super().__init__(*args, **kwargs)

    def _default_writer(self) -> Writer:
        return TensorDictRoundRobinWriter()

    @property
    def priority_key(self) -> str:
        return self._priority_key

    @property
    def _attaches(self) -> bool:
        return True

    @staticmethod
    def _attach(index: Any, info: dict[str, Any]) -> dict[str, Any] | None:
        entries: dict[str, Any] = {"index": torch.stack(index, -1) if isinstance(index, tuple) else index}
        if "priority_weight" in info:
            entries["priority_weight"] = info["priority_weight"]
        return entries

    def update_tensordict_priority(self, batch: Any) -> None:
        """Sets the priorities of a batch's rows from `batch[priority_key]`.

        Raises:
            KeyError: the batch has no such key, or no `"index"`.
        """
        for key in (self._priority_key, "index"):
            if key not in batch.keys():  # noqa: SIM118 -- a TensorDict iterates over rows
                raise KeyError(f"the batch has no {key!r}; its keys are {sorted(map(str, batch.keys()))}")
        generation = batch.get("generation", None)
        self.update_priority(batch["index"], batch[self._priority_key], generation)
