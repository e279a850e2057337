"""Contracts that parts of your own can be tested against, with pytest.

A contract is a class of tests. Inherit it in a test file and say how to make your part; pytest does the rest:

    from engram.testing import SamplerContract

    class TestNewest(SamplerContract):
        def make(self):
            return Newest()

`StorageContract`, `TableContract`, `StrandsContract`: storages; `SamplerContract`: classes with
`sample(storage, batch_size) -> (index, info)`; `WriterContract`, `RoundRobinWriterContract`: writers;
`TransformContract`: transforms and callables, in buffers and in environments; `EnvContract`: environments.
`chi_square` says whether draws have the
frequencies that they should have, and `steps`, `env_steps`, `of_numbers`, `numbers` are data of which it can be said
whether a row is torn or in another's place.
"""

from __future__ import annotations

try:
    import pytest
except ImportError as error:
    raise ImportError("engram.testing needs pytest: pip install pytest (or pip install 'engram[testing]')") from error

# A contract that fails shows both sides of its comparisons, as a test file does.
_PARTS = (
    "comparing", "env", "numbered", "sampler", "storage", "strands", "table", "transform", "transform_env", "writer",
)  # fmt: skip
pytest.register_assert_rewrite(*(f"engram.testing.{part}" for part in _PARTS))

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
