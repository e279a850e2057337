"""Directories that TorchRL's `dumps` wrote, read without TorchRL and without running anything in them.

Nothing there has a checksum, and nothing is believed: names, dtypes, shapes and sizes are checked before memory is
taken, no link is followed, no class is looked up, and no pickle is opened."""

from engram.data.replay_buffers.checkpointers.torchrl.saved import TorchrlSaved, is_torchrl, open_torchrl

__all__ = ["TorchrlSaved", "is_torchrl", "open_torchrl"]
