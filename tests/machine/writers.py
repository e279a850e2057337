"""The writers that the machine drives, each with its rule in plain Python."""

from __future__ import annotations

from engram.data import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)
from machine.ring import Ring, Step, value_of


class RoundRobinOracle:
    """Behind the newest; in a full storage over the oldest."""

    stores_index = False
    takes_envs = True
    forbids = False  # any change is an error

    def make(self) -> Writer:
        return RoundRobinWriter()

    def write(self, ring: Ring, columns: list[list[Step]]) -> tuple[list[int], set[int]]:
        """Stores columns: the slot of each, -1 for one that is refused, and the slots that were written out of turn."""
        return ring.append(columns), set()


class TensorDictRoundRobinOracle(RoundRobinOracle):
    stores_index = True

    def make(self) -> Writer:
        return TensorDictRoundRobinWriter()


class ImmutableOracle(RoundRobinOracle):
    forbids = True

    def make(self) -> Writer:
        return ImmutableDatasetWriter()


class BestOracle(TensorDictRoundRobinOracle):
    """In a full storage over the lowest, of equal ones that in the first slot; what is not higher is refused."""

    takes_envs = False

    def make(self) -> Writer:
        return TensorDictMaxValueWriter(rank_key="value")

    def write(self, ring: Ring, columns: list[list[Step]]) -> tuple[list[int], set[int]]:
        where = []
        out_of_turn = set()
        for column in columns:
            if len(ring.stored()) < ring.capacity:
                where += ring.append([column])
                continue
            lowest = min(ring.stored(), key=lambda slot: (value_of(ring.step((slot, 0)).n), slot))
            better = value_of(column[0].n) > value_of(ring.step((lowest, 0)).n)
            where.append(lowest if better else -1)
            if better:
                ring.replace_out_of_turn(lowest, column)
                out_of_turn.add(lowest)
        return where, out_of_turn


WRITERS = {
    "round robin": RoundRobinOracle,
    "with index": TensorDictRoundRobinOracle,
    "immutable": ImmutableOracle,
    "best": BestOracle,
}
