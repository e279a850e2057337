"""The machine finds an off-by-one in every storage, sampler and writer."""

import pytest

from machine.machine import drive
from machine.mutants import MUTANTS
from machine.parts import SAMPLERS, STORAGES, WRITERS


@pytest.mark.parametrize("name", MUTANTS)
def test_the_machine_finds(monkeypatch, name):
    mutant = MUTANTS[name]
    mutant.plant(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):  # a mutant may show itself as any error
        drive(
            80, 30, places=[(mutant.storage, mutant.envs)], samplers=[mutant.sampler], writers=[list(mutant.writers)],
            shrink=False,
        )  # fmt: skip


def test_there_is_one_for_each_storage_sampler_and_writer():
    assert {m.storage for m in MUTANTS.values()} == set(STORAGES)
    assert {m.sampler for m in MUTANTS.values()} == set(SAMPLERS)
    assert {kind for m in MUTANTS.values() for kind in m.writers} == set(WRITERS)
