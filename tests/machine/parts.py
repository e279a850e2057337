"""All that the machine can be made of."""

from machine.prioritized import PRIORITIZED
from machine.samplers import UNIFORM
from machine.slices import SLICES
from machine.storages import STORAGES
from machine.writers import WRITERS

SAMPLERS = {**UNIFORM, **PRIORITIZED, **SLICES}

__all__ = ["SAMPLERS", "STORAGES", "WRITERS"]
