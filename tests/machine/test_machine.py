"""Whatever is done to a buffer, in whatever order, it holds and draws what plain Python would."""

import pytest

from machine.driven import takes_envs
from machine.limits import LIMITS
from machine.machine import drive
from machine.parts import PLACES, SAMPLERS, WRITERS_THAT_FOLLOW

# The programs draw batches of any size.
pytestmark = pytest.mark.filterwarnings("ignore:sample was called with batch_size")


def runs(n):
    """So many with each sampler, storage and writer find almost all planted errors."""
    return pytest.mark.parametrize("runs", [n, pytest.param(100, marks=pytest.mark.long)])


@runs(6)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_draws_what_plain_python_would(sampler, runs):
    drive(runs, 25, places=PLACES, samplers=[sampler], writers=WRITERS_THAT_FOLLOW)


@runs(8)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_storage_holds_what_a_list_would(place, runs):
    drive(runs, 25, places=[place], samplers=list(SAMPLERS), writers=WRITERS_THAT_FOLLOW)


@pytest.mark.parametrize("writers", WRITERS_THAT_FOLLOW, ids=str)
def test_a_writer_writes_where_its_rule_says(writers):
    places = [place for place in PLACES if not place[1] or takes_envs(writers)]
    drive(14, 25, places=places, samplers=list(SAMPLERS), writers=[writers])


@runs(14)
def test_draws_and_writes_keep_to_a_rate_limiter(runs):
    limits = [limit for limit in LIMITS if limit != "none"]
    drive(runs, 25, places=PLACES, samplers=list(SAMPLERS), writers=WRITERS_THAT_FOLLOW, limits=limits)


def test_batches_that_are_prepared_ahead_held_true_once():
    drive(14, 20, places=PLACES, samplers=list(SAMPLERS), writers=WRITERS_THAT_FOLLOW, limits=[*LIMITS], prefetch=2)


@pytest.mark.long
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_storage_with_every_sampler_and_writer_for_long(place, sampler):
    drive(60, 40, places=[place], samplers=[sampler], writers=WRITERS_THAT_FOLLOW)
