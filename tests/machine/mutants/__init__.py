"""Parts that are wrong by one, planted one at a time."""

from machine.mutants.queues import LIMIT_MUTANTS, QUEUE_MUTANTS
from machine.mutants.samplers import PRIORITY_MUTANTS, SLICE_MUTANTS, UNIFORM_MUTANTS
from machine.mutants.storages import STORAGE_MUTANTS
from machine.mutants.writers import WRITER_MUTANTS

MUTANTS = {
    **STORAGE_MUTANTS, **UNIFORM_MUTANTS, **PRIORITY_MUTANTS, **SLICE_MUTANTS, **WRITER_MUTANTS, **QUEUE_MUTANTS,
    **LIMIT_MUTANTS,
}  # fmt: skip

__all__ = ["MUTANTS"]
