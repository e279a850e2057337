"""The writers that the machine drives, each with its rule in plain Python."""

from __future__ import annotations

from engram.data import ImmutableDatasetWriter, RoundRobinWriter, TensorDictRoundRobinWriter, Writer
from machine.ring import Ring, Step


class RoundRobinOracle:
    """Behind the newest; in a full storage over the oldest."""

    stores_index = False
    takes_envs = True
    forbids = False  # any change is an error

    def make(self) -> Writer:
        return RoundRobinWriter()

    def begin(self, ring: Ring) -> None:
        """It takes over a buffer that holds this."""

    def write(self, ring: Ring, columns: list[list[Step]]) -> list[int]:
        """Stores columns; the slot of each, -1 for one that is refused."""
        return ring.append(columns)


class TensorDictRoundRobinOracle(RoundRobinOracle):
    stores_index = True

    def make(self) -> Writer:
        return TensorDictRoundRobinWriter()


class ImmutableOracle(RoundRobinOracle):
    forbids = True

    def make(self) -> Writer:
        return ImmutableDatasetWriter()


WRITERS = {
    "round robin": RoundRobinOracle,
    "with index": TensorDictRoundRobinOracle,
    "immutable": ImmutableOracle,
}
