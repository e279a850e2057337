"""Save at every step, load elsewhere: the rest of the stream is equal bit by bit."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contracts.tiers import in_ci
from engram.data.replay_buffers.checkpointers import rows
from engram.errors import CorruptCheckpointError
from law import ensembles
from law.combos import LEVELS, REFUSED, SAMPLERS, STORAGES, Combo, pairwise, product, refusal
from law.law import Broken, Trial
from law.mutants import MUTANTS
from law.world import World, steps, use_prompt_threads

pytestmark = pytest.mark.quick


TIED = [
    Combo(storage, writer=writer, checkpointer=checkpointer)
    for storage, writer, checkpointer in itertools.product(*(LEVELS[k] for k in ("storage", "writer", "checkpointer")))
] + [
    Combo(sampler=sampler, writer=writer, prefetch=prefetch, limiter=limiter)
    for sampler, writer, prefetch, limiter in itertools.product(
        *(LEVELS[k] for k in ("sampler", "writer", "prefetch", "limiter"))
    )
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that do not depend on the timing of threads, and chunks so small that a ring has several."""
    use_prompt_threads(monkeypatch)
    monkeypatch.setattr(rows, "CHUNK_BYTES", 500)


@pytest.fixture
def folder() -> Iterator[Callable[[], Path]]:
    """Makes folders that are quick to sync."""
    root = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=root) as path:
        yield lambda: Path(tempfile.mkdtemp(dir=path))


def test_batches_that_are_prepared_ahead_do_not_depend_on_copying_threads(folder: Callable[[], Path]) -> None:
    for _ in range(10):
        world = World(Combo(prefetch=3), folder())
        for k, name in enumerate(["extend", "iterate", "extend_beyond"]):  # overwrites the rows that were drawn ahead
            world.step(name, k)
        stored = world.rb[:]["observation"][:, 0].tolist()
        assert all(x in stored for _ in range(3) for x in world.rb.sample()["observation"][:, 0].tolist())
        world.end()


@pytest.mark.parametrize(
    "wide", [pytest.param(False, marks=pytest.mark.deep), pytest.param(True, marks=pytest.mark.long)], ids=["", "wide"]
)
@pytest.mark.parametrize("storage", STORAGES)
def test_the_law_holds_in_every_pair_of_levels(storage: str, wide: bool, folder: Callable[[], Path]) -> None:
    """In CI without the pairs of two wide factors."""
    for nth, combo in enumerate(pairwise(wide=wide)):
        if combo.storage == storage:
            Trial(combo, folder(), every=17, start=nth % 17).run(larger=nth % 3 == 0, unsaved=nth % 3 == 1)


@pytest.mark.long
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_the_law_holds_in_every_combination(storage: str, sampler: str, folder: Callable[[], Path]) -> None:
    for nth, combo in enumerate(product()):
        if (combo.storage, combo.sampler) == (storage, sampler) and refusal(combo) is None:
            Trial(combo, folder(), every=9, start=nth % 9).run(larger=1)


def test_every_pair_of_levels_is_tried_or_refused() -> None:
    tried = {pair for combo in pairwise() for pair in itertools.combinations(combo._asdict().items(), 2)}
    for pair in itertools.combinations(((name, level) for name in LEVELS for level in LEVELS[name]), 2):
        if pair[0][0] != pair[1][0] and pair not in tried:
            levels = dict(pair)
            assert levels.get("way") == "reopened" or refusal(Combo(**levels)) is not None, pair


@pytest.mark.parametrize("why", range(len(REFUSED)), ids=lambda i: REFUSED[i].why)
def test_what_is_refused_by_design_says_so(why: int, folder: Callable[[], Path]) -> None:
    found = [combo for combo in TIED if refusal(combo) is REFUSED[why]]
    assert found
    for combo in found:
        with pytest.raises(REFUSED[why].error, match=REFUSED[why].says):
            world = World(combo, folder())
            assert REFUSED[why].when != "made"
            world.rb.extend(steps(0, 3, combo.place.envs))
            assert REFUSED[why].when == "closed"
            world.closed()


@pytest.mark.deep
@pytest.mark.mutant
@pytest.mark.parametrize("name", in_ci(MUTANTS, list(MUTANTS)[::6]))
def test_the_law_notices_the_loss_of(name: str, folder: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.plant(monkeypatch)
    # Wrong rows, a state that is refused, or what our own code runs into when it is given another one's state.
    with pytest.raises((Broken, CorruptCheckpointError, TypeError)):
        Trial(mutant.combo, folder(), every=2).run()


#: Each ensemble is quick in one way, and the ways take turns.
ENSEMBLES = [
    pytest.param(name, way, marks=() if (k - j) % len(ensembles.WAYS) == 0 else pytest.mark.deep)
    for k, name in enumerate(ensembles.ENSEMBLES) for j, way in enumerate(ensembles.WAYS)
]  # fmt: skip


@pytest.mark.parametrize(("name", "way"), ENSEMBLES)
def test_the_law_holds_for_ensembles(name: str, way: str, folder: Callable[[], Path]) -> None:
    ensembles.hold(ensembles.ENSEMBLES[name], way, folder(), every=7)
