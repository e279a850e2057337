"""Contracts for your own storages, samplers, writers, transforms and environments: tests to run with pytest.

A contract is a class of tests. Inherit it in a test file and say how to make your part; pytest does the rest:

    from engram.testing import SamplerContract

    class TestNewest(SamplerContract):
        def make(self):
            return Newest()

- storages: `StorageContract`, `TableContract` (packed rows), `StrandsContract` (several environments),
  `CompactContract` (observations that are stored once)
- samplers, classes with `sample(storage, batch_size) -> (index, info)`: `SamplerContract`
- writers: `WriterContract`, `RoundRobinWriterContract`
- transforms and callables, in buffers and in environments: `TransformContract`
- environments: `EnvContract`

`chi_square` tests whether draws have the frequencies that they should have. `steps`, `env_steps` and `of_numbers` make
data in which every value follows from the number of its step, and `numbers` fails where a row is torn or misplaced.
"""

from __future__ import annotations

from engram.kernel.tools import packages

with packages("engram.testing", "engram[testing]", pytest="pytest"):
    import pytest

# A contract that fails shows both sides of its comparisons, as a test file does.
_PARTS = (
    "compact", "env", "helpers", "sampler", "storage", "transform", "writer",
)  # fmt: skip
pytest.register_assert_rewrite(*(f"engram.testing.{part}" for part in _PARTS))

from engram.testing.compact import CompactContract  # noqa: E402
from engram.testing.env import EnvContract  # noqa: E402
from engram.testing.helpers import (  # noqa: E402
    chi_square,
    env_steps,
    numbers,
    of_numbers,
    state_of,
    steps,
)
from engram.testing.sampler import SamplerContract  # noqa: E402
from engram.testing.storage import StorageContract, StrandsContract, TableContract  # noqa: E402
from engram.testing.transform import TransformContract  # noqa: E402
from engram.testing.writer import RoundRobinWriterContract, WriterContract  # noqa: E402

__all__ = [
    "CompactContract",
    "EnvContract",
    "RoundRobinWriterContract",
    "SamplerContract",
    "StorageContract",
    "StrandsContract",
    "TableContract",
    "TransformContract",
    "WriterContract",
    "chi_square",
    "env_steps",
    "numbers",
    "of_numbers",
    "state_of",
    "steps",
]
