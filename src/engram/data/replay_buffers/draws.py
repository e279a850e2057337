"""torch's generators and fork: no thread of ours is inside one at the moment of a fork.

A generator has a mutex, and torch gives the GIL away while it holds it. A child that is forked at such a moment has a
generator whose mutex nobody will ever unlock: its first draw would wait for ever. So all our uses of generators hold
one lock, and a fork takes that lock before and gives it back after, here and in the child.
"""

from __future__ import annotations

import os
import threading

import torch
from torch import Tensor

# The innermost lock: who holds it takes no other, so that a fork may wait for it whatever the forking thread holds.
# Reentrant, as a finaliser or a signal handler may fork or sample inside.
drawing = threading.RLock()

os.register_at_fork(before=drawing.acquire, after_in_parent=drawing.release, after_in_child=drawing.release)


def state_of(generator: torch.Generator) -> Tensor:
    """Where a generator stands: uint8 [n]."""
    with drawing:
        return generator.get_state()


def set_state(generator: torch.Generator, state: Tensor) -> None:
    """Puts a generator where it stood at a state."""
    with drawing:
        generator.set_state(state)
