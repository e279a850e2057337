"""Several buffers that are sampled together are what plain Python would be, and off-by-ones between them are found."""

import pytest

from machine.ensemble import EnsembleMachine
from machine.machine import run_machine
from machine.mutants.base import is_found
from machine.mutants.ensembles import ENSEMBLE_MUTANTS

pytestmark = pytest.mark.quick


def test_an_ensemble_is_what_plain_python_would_be():
    run_machine(EnsembleMachine, 40, 25)


@pytest.mark.long
def test_an_ensemble_is_what_plain_python_would_be_for_long():
    run_machine(EnsembleMachine, 1000, 40)


@pytest.mark.mutant
@pytest.mark.parametrize("name", ENSEMBLE_MUTANTS)
def test_the_machine_finds(monkeypatch, name):
    ENSEMBLE_MUTANTS[name](monkeypatch)
    assert is_found(lambda: run_machine(EnsembleMachine, 60, 30, shrink=False))
