"""The errors of engram, as a tree.

    EngramError
    ├── StorageError                 a store cannot be made, opened or written
    │   ├── StorageInUseError        the operation needs the store alone
    │   └── NoFreeLaneError          every lane has a writer
    └── CheckpointError              a checkpoint cannot be written or read
        └── CorruptCheckpointError   its bytes are not those that were saved

Wrong arguments are the built-in `ValueError`, `TypeError`, `KeyError` and `IndexError`.
"""


class EngramError(Exception):
    """Base of every error that is engram's own."""


class StorageError(EngramError, RuntimeError):
    """A store cannot be made, opened or written."""


class StorageInUseError(StorageError):
    """The operation needs the store alone, and another process has it open."""


class NoFreeLaneError(StorageError):
    """Every lane of the store has a writer."""


class CheckpointError(EngramError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint does not hold the bytes that were saved; the message names it."""
