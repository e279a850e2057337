"""The machine finds an off-by-one in every storage, sampler and writer."""

import pytest

from contracts.tiers import in_ci
from machine.limits import LIMITS
from machine.machine import drive
from machine.mutants import MUTANTS
from machine.mutants.base import is_found
from machine.parts import SAMPLERS, STORAGES, WRITERS

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:sample was called with batch_size")]


@pytest.mark.mutant
@pytest.mark.deep
@pytest.mark.parametrize("name", in_ci(MUTANTS, list(MUTANTS)[::6]))
def test_the_machine_finds(monkeypatch, name):
    mutant = MUTANTS[name]
    mutant.plant(monkeypatch)
    places, writers = [(mutant.storage, mutant.envs)], [list(mutant.writers)]
    parts = {"samplers": [mutant.sampler], "writers": writers, "limits": [mutant.limit]}
    # Most are found by the twentieth run; which runs there are depends on the modules that happen to be imported.
    assert is_found(lambda: drive(500, 30, places=places, **parts, shrink=False))


def test_there_is_one_for_each_storage_sampler_limit_and_writer():
    assert {m.storage for m in MUTANTS.values()} == set(STORAGES)
    assert {m.sampler for m in MUTANTS.values()} == set(SAMPLERS)
    assert {m.limit for m in MUTANTS.values()} == set(LIMITS)
    assert {kind for m in MUTANTS.values() for kind in m.writers} == set(WRITERS)
