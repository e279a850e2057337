"""Random numbers that are drawn without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

import engram._native as _native
from engram._checks import is_integer

_STATE_BYTES = 16


class Generator(_native.CounterGenerator):
    """Random numbers for a buffer's draws, for `generator=`: the same in every process from the same seed.

    A counter-based generator (SplitMix64 of a key and a counter): its state is these two numbers, 16 bytes, and a draw
    takes a few nanoseconds. torch's generators let other Python threads run at each draw, and the buffer then waits for
    its turn, for milliseconds where these are busy; this one does not. It is saved with the buffer, pickled and copied.
    Samplers of your own that hand `use_generator`'s argument to torch need a `torch.Generator`.

    Args:
        seed: any integer; its lowest 64 bits count.

    Example:
        >>> import engram
        >>> from engram.data import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), generator=engram.Generator(0), batch_size=3)
        >>> _ = rb.extend(torch.arange(10))
        >>> first = rb.sample()
        >>> rb.generator.manual_seed(0).get_state().shape
        torch.Size([16])
        >>> torch.equal(rb.sample(), first)
        True
    """

    #: Where its numbers are made.
    device = torch.device("cpu")

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> Self:
        """Begins anew with this seed; returns itself."""
        if not is_integer(seed):
            raise TypeError(f"a seed is an integer, got {seed!r:.80}")
        self.key, self.counter = _native.mix(seed.__index__() & (1 << 64) - 1), 0
        return self

    def get_state(self) -> Tensor:
        """Where it stands: uint8 [16]."""
        state = self.key.to_bytes(8, "little") + self.counter.to_bytes(8, "little")
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> Self:
        """Goes on where a generator stood when its state was taken; returns itself.

        Raises:
            ValueError: it is no state of such a generator. Nothing is changed.
        """
        if not is_state(state):
            raise ValueError(f"the state of an engram.Generator is a tensor of 16 uint8, got {state!r:.80}")
        state_bytes = bytes(state.tolist())
        self.key, self.counter = (int.from_bytes(state_bytes[i : i + 8], "little") for i in (0, 8))
        return self

    def __reduce__(self) -> Any:
        return _from_numbers, (type(self), self.key, self.counter)

    def __repr__(self) -> str:
        return f"engram.Generator(key={self.key:#x}, drawn={self.counter})"


def draw_slots_by_numpy(n: int, times: int, envs: int = 1) -> Tensor:
    """The slots of n rows in `times` time slots of `envs` environments, int64 [n], from NumPy's global generator.

    `numpy.random.randint(0, times, n) * envs + numpy.random.randint(0, envs, n)`, to the last number and the state of
    the generator, in a fifth of the time.

    Raises:
        ValueError: there is no such slot.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # which NumPy's stubs leave out
    return _native.draw_slots_by_numpy(generator, n, times, envs)


def is_state(state: Any) -> bool:
    """Whether this is a state of an `engram.Generator`, and not one of torch's, which are longer."""
    return isinstance(state, Tensor) and state.dtype is torch.uint8 and tuple(state.shape) == (_STATE_BYTES,)


def _from_numbers(cls: type[Generator], key: int, counter: int) -> Generator:
    generator = cls()
    generator.key, generator.counter = key, counter
    return generator
