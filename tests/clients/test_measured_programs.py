"""The programs that `make bench` measures under other libraries do as much as the loop by hand."""

import pytest
import torch
from benchmarks.programs import dqn, pixel_dqn, ppo, sac
from benchmarks.programs.turns import one_thread

ROWS = {rows[0].key: rows[0] for rows in (dqn.ROWS, sac.ROWS, ppo.ROWS, pixel_dqn.ROWS)}


def done_by(make, settings, monkeypatch):
    """Frames and, of each optimizer that is not frozen, the steps that a program takes."""
    steps = {}
    original = torch.optim.Adam.step

    def step(self, *args, **kwargs):
        steps[id(self)] = steps.get(id(self), 0) + 1
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch, one_thread():
        patch.setattr(torch.optim.Adam, "step", step)
        return make(settings).run(), set(steps.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", ROWS)
def test_each_form_of_a_program_takes_as_many_frames_and_updates_as_the_loop_by_hand(key, monkeypatch):
    row = ROWS[key]
    settings = row.settings.shorter()
    expected = done_by(row.forms["by hand"], settings, monkeypatch)
    assert min(expected[1]) > 0
    for name, make in row.forms.items():
        assert done_by(make, settings, monkeypatch) == expected, name
