"""A buffer in one process, for others through `torch.distributed.rpc`."""

from __future__ import annotations

import functools
import operator
from typing import Any

from torch.distributed import rpc

from engram.data import TensorDictReplayBuffer

if not rpc.is_available():
    raise ImportError("RemoteTensorDictReplayBuffer needs torch.distributed.rpc, which this build of torch leaves out")


def _reached(method: Any) -> Any:
    """`method`, with `self` where it is: here, or in the process to which an RRef belongs."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, rpc.PyRRef):  # type: ignore[attr-defined]  # what `rpc.remote` gives
            return method(self, *args, **kwargs)
        if self.is_owner():
            return operator.methodcaller(method.__name__, *args, **kwargs)(self.local_value())
        return rpc.rpc_sync(self.owner(), call, args=(self, *args), kwargs=kwargs)

    call.__module__, call.__qualname__ = __name__, f"RemoteTensorDictReplayBuffer.{method.__name__}"  # as it is sent
    return call


class RemoteTensorDictReplayBuffer(TensorDictReplayBuffer):
    """A TensorDictReplayBuffer whose methods also take an `RRef` of a buffer for `self`, and then work where that is.

    Everything goes through `torch.distributed.rpc` (which this imports, so it is loaded when it is first named): data
    are copied, and callers wait. On one machine, a buffer that is sent to other processes is much faster. `dumps` in
    the background gives a handle that cannot be sent: save with `blocking=True`.

    The `RRef` may be of another buffer, as of an `engram.distributed.rpc_buffer.RpcReplayBuffer`, whose rows lie in
    several processes; a process that makes one of its own reaches the same shards without a way round.

    Args:
        As TensorDictReplayBuffer.

    Raises:
        As TensorDictReplayBuffer, in the process that called.

    Example, in a process that has joined with `rpc.init_rpc`, beside one named "replay" in which a function makes the
    buffer (storages that are not shared are not sent):
        >>> buffer = rpc.remote("replay", make_buffer)  # doctest: +SKIP
        >>> RemoteTensorDictReplayBuffer.extend(buffer, steps)  # doctest: +SKIP
        >>> batch = buffer.rpc_sync().sample()  # the same, as torch spells it  # doctest: +SKIP
    """

    __getitem__ = _reached(TensorDictReplayBuffer.__getitem__)
    __len__ = _reached(TensorDictReplayBuffer.__len__)
    __setitem__ = _reached(TensorDictReplayBuffer.__setitem__)
    add = _reached(TensorDictReplayBuffer.add)
    dumps = _reached(TensorDictReplayBuffer.dumps)
    empty = _reached(TensorDictReplayBuffer.empty)
    extend = _reached(TensorDictReplayBuffer.extend)
    flush_transforms = _reached(TensorDictReplayBuffer.flush_transforms)
    load_state_dict = _reached(TensorDictReplayBuffer.load_state_dict)
    loads = _reached(TensorDictReplayBuffer.loads)
    mark_update = _reached(TensorDictReplayBuffer.mark_update)
    sample = _reached(TensorDictReplayBuffer.sample)
    state_dict = _reached(TensorDictReplayBuffer.state_dict)
    update_if_present = _reached(TensorDictReplayBuffer.update_if_present)
    update_priority = _reached(TensorDictReplayBuffer.update_priority)
    update_tensordict_priority = _reached(TensorDictReplayBuffer.update_tensordict_priority)
