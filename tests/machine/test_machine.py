"""Whatever is done to a buffer, in whatever order, it holds and draws what plain Python would."""

import pytest

from machine.machine import drive
from machine.parts import SAMPLERS, STORAGES

RINGS = [["round robin", "immutable"], ["with index"]]  # writers that may follow each other
PLACES = [(storage, envs) for storage, kind in STORAGES.items() for envs in ((0, 2) if kind.takes_envs else (0,))]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("storage, envs", PLACES)
def test_a_buffer_is_what_plain_python_would_be(storage, envs, sampler):
    drive(4, 25, storages=[storage], samplers=[sampler], writers=RINGS[envs // 2], envs=envs)


@pytest.mark.parametrize("writers", RINGS)
def test_samplers_and_writers_may_be_exchanged_at_any_time(writers):
    drive(20, 30, storages=["memory", "named"], samplers=list(SAMPLERS), writers=writers)


@pytest.mark.parametrize("envs", [0, 2])
def test_batches_that_are_prepared_ahead_held_true_once(envs):
    drive(12, 20, storages=["memory", "named"], samplers=list(SAMPLERS), writers=RINGS[1], envs=envs, prefetch=2)


@pytest.mark.long
@pytest.mark.parametrize("writers", RINGS)
@pytest.mark.parametrize("storage, envs", PLACES)
def test_a_buffer_is_what_plain_python_would_be_for_long(storage, envs, writers):
    drive(300, 50, storages=[storage], samplers=list(SAMPLERS), writers=writers, envs=envs)
