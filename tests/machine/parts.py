"""All that the machine can be made of."""

from machine.prioritized import PRIORITIZED
from machine.prioritized_slices import PRIORITIZED_SLICES
from machine.samplers import UNIFORM
from machine.slices import SLICES
from machine.storages import STORAGES
from machine.writers import WRITERS

SAMPLERS = {**UNIFORM, **PRIORITIZED, **SLICES, **PRIORITIZED_SLICES}
PLACES = [(name, envs) for name, kind in STORAGES.items() for envs in ((0, 2) if kind.takes_envs else (0,))]
# Writers that store the same, so that one may follow the other.
WRITERS_THAT_FOLLOW = [["round robin", "immutable"], ["with index"], ["best", "with index"]]

__all__ = ["PLACES", "SAMPLERS", "STORAGES", "WRITERS", "WRITERS_THAT_FOLLOW"]
