"""engram: experience replay and data collection for reinforcement learning.

Nothing heavy is imported here: `import engram.data`, `import engram.collectors`, `import engram.envs` do that.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        f"engram runs on Linux, and this is {sys.platform}: use WSL 2 (the Linux of Windows), or a Linux container"
    )

from engram._aliases import install as _install_aliases
from engram._providers import PROVIDERS as _PROVIDERS

if TYPE_CHECKING:
    from engram._generator import Generator
    from engram.data.replay_buffers.checkpointers import VerificationReport

_install_aliases()

__version__ = "0.1.0"
__all__ = ["Generator", "__version__", "load", "verify"]


def __getattr__(name: str) -> Any:
    if name == "Generator":  # it needs torch
        from engram._generator import Generator

        return Generator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _directory_forms() -> Any:
    from engram.interop import FORMS

    return FORMS


def _frame_stack_sampler() -> Any:
    from engram.data.replay_buffers.samplers.frames import FrameStackSampler

    return FrameStackSampler


def _multi_collector() -> Any:
    from engram.collectors.multi import MultiCollector

    return MultiCollector


def _stack_specs() -> Any:
    from engram.specs.stacked import stack_specs

    return stack_specs


def _transformed_env() -> Any:
    from engram.envs.transformed import TransformedEnv

    return TransformedEnv


_PROVIDERS.update(
    directory_forms=_directory_forms,
    frame_stack_sampler=_frame_stack_sampler,
    multi_collector=_multi_collector,
    stack_specs=_stack_specs,
    transformed_env=_transformed_env,
)


def verify(path: str | os.PathLike[str]) -> VerificationReport:
    """Compares every file of every snapshot in a checkpoint directory with its checksum.

    Example:
        >>> import tempfile, torch
        >>> from engram.data import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(5))
        >>> path = tempfile.mkdtemp()
        >>> _ = rb.dumps(path)
        >>> verify(path).ok
        True
    """
    from engram.data.replay_buffers.checkpointers import verify as verify_snapshots

    return verify_snapshots(path)


def load(path: str | os.PathLike[str], **options: Any) -> Any:
    """The buffer that was saved at a path, made anew, or a mapped store opened, without the code that made them.

    Storage, sampler, writer, transforms, batch size and their state come back; what cannot be saved (functions, hooks,
    parts of classes of one's own) is left out, and one warning names all of it.

    Args:
        path: a checkpoint that a buffer's `dumps` wrote, or the folder of a mapped store.
        options: `snapshot=` names another than the current one; `storage=` takes the rows instead of one like that
            which was saved; `read_only=True` only looks at a store, which another process may be writing.

    Raises:
        CheckpointError: there is no buffer to make: a part was saved alone, or an ensemble of buffers.
        CorruptCheckpointError: a file is not what was saved.
        StorageError: the store is damaged.

    Example:
        >>> import tempfile, torch
        >>> from engram.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=2)
        >>> _ = rb.extend(torch.arange(5))
        >>> path = tempfile.mkdtemp()
        >>> _ = rb.dumps(path)
        >>> again = load(path)
        >>> again.sampler, again.batch_size, len(again)
        (SamplerWithoutReplacement(drop_last=False, shuffle=True), 2, 5)
    """
    from engram.data.replay_buffers.buffers.rebuild import load as load_buffer

    return load_buffer(path, **options)
