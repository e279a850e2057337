"""All that the machine can be made of."""

from machine.samplers import UNIFORM
from machine.slices import SLICES
from machine.storages import STORAGES
from machine.writers import WRITERS

SAMPLERS = {**UNIFORM, **SLICES}

__all__ = ["SAMPLERS", "STORAGES", "WRITERS"]
