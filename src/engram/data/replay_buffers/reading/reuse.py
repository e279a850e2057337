"""Whether the tensors of batches can be used again with this Python and torch: `reuse_batches=True`."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

import engram._native as _native
from engram.store.layout import has_exchange_api

#: While one of these says yes, batches get new tensors.
PREVENT_REUSE: tuple[Callable[[], bool], ...] = (torch.is_inference_mode_enabled, torch.compiler.is_compiling)


@functools.cache
def why_not_reusable() -> str | None:
    """Why no tensor may be used again here; None: they may.

    The native core sees from the bytes of a tensor whether somebody has it or its memory, or has changed what it is.
    Which bytes these are depends on torch, so everything that it must see is tried out.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this Python runs without a GIL"
    if not has_exchange_api():
        return f"torch {torch.__version__} has no DLPack exchange API"
    with torch.inference_mode(False), torch.enable_grad():
        for name, use in {**_HELD, **_CHANGED}.items():
            try:
                is_seen = _is_seen(use, lasting=name in _CHANGED)
            except (RuntimeError, TypeError, ValueError) as error:  # in a mode in which tensors are no plain ones
                return f"{name} cannot be tried out: {error}"
            if not is_seen:
                return f"{name} cannot be seen in a tensor of torch {torch.__version__} with Python {sys.version[:6]}"
    return None


def may_reuse() -> bool:
    """Whether tensors may be used again at this moment."""
    return why_not_reusable() is None and not any(prevents() for prevents in PREVENT_REUSE)


def _is_seen(use: Callable[[Tensor], Any], lasting: bool) -> bool:
    """Whether a tensor that was free is not while it is used, and, if that is not lasting, is again after it."""
    tensor = from_dlpack(np.zeros((4, 3), np.float32))
    kept = _native.KeptTensor(tensor)
    if kept.is_free():
        return False  # we have it
    held: Any = None
    del tensor
    was_free = kept.is_free()
    held = use(kept.tensor)
    is_seen = not kept.is_free()
    del held
    return was_free and is_seen and kept.is_free() != lasting


def _zeros() -> Tensor:
    """Whatever the default dtype and device are."""
    return torch.zeros(4, 3, dtype=torch.float32, device="cpu")


def _saved_for_backward(tensor: Tensor) -> Tensor:
    weight = _zeros().requires_grad_()
    return (weight * tensor).sum()


_HELD: dict[str, Callable[[Tensor], Any]] = {
    "a reference": lambda t: t,
    "a view": lambda t: t[:2],
    "a detached alias": lambda t: t.detach(),
    "an array": lambda t: t.numpy(),
    "a DLPack capsule": lambda t: t.__dlpack__(),
    "a storage": lambda t: t.untyped_storage(),
    "a tensor saved for backward": _saved_for_backward,
    "a weak reference": weakref.ref,
}
_CHANGED: dict[str, Callable[[Tensor], Any]] = {
    "requires_grad": lambda t: t.requires_grad_().requires_grad_(False),
    "a gradient": lambda t: setattr(t, "grad", _zeros()),
    "an attribute": lambda t: setattr(t, "name_of_a_user", 1),
    "another shape": lambda t: t.resize_(2, 3),
    "other strides": lambda t: t.t_(),
    "other memory": lambda t: setattr(t, "data", _zeros()),
    "names of dimensions": lambda t: setattr(t, "names", ("a", "b")),
    "a swapped tensor": lambda t: torch.utils.swap_tensors(t, _zeros()),  # type: ignore[no-untyped-call]
}
