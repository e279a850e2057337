"""The law for programs that hypothesis makes up: any steps in any order, saved after every one of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from engram.data.replay_buffers.checkpointers import rows
from law import combos
from law.combos import LEVELS, Combo
from law.law import PROGRAM, Trial
from law.world import use_prompt_threads

pytestmark = pytest.mark.quick

NAMES = sorted(set(PROGRAM))
ANY = st.builds(Combo, **{name: st.sampled_from(levels) for name, levels in LEVELS.items()})
# Writes and draws come more often than what is done now and then.
STEP = st.one_of(
    st.sampled_from(["extend", "extend_whole_trajectories", "extend_beyond"]),
    st.sampled_from(["sample", "sample_three", "iterate"]),
    st.sampled_from(NAMES),
)


def hold(combo: Combo, program: list[str]) -> None:
    assume(combos.exists(combo) and combos.refusal(combo) is None)
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as folder, pytest.MonkeyPatch.context() as patch:
        use_prompt_threads(patch)
        patch.setattr(rows, "CHUNK_BYTES", 500)
        Trial(combo, Path(folder), program).run(larger=1)


def searched(examples: int, steps: int) -> Any:
    """Runs a test with so many combinations and programs."""
    programs = st.lists(STEP, min_size=3, max_size=steps)
    return lambda test: settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck)
    )(given(combo=ANY, program=programs)(test))  # fmt: skip


@searched(10, 7)
def test_any_short_program_obeys_the_law(combo: Combo, program: list[str]) -> None:
    hold(combo, program)


@pytest.mark.long
@searched(1000, 20)
def test_any_program_obeys_the_law(combo: Combo, program: list[str]) -> None:
    hold(combo, program)
