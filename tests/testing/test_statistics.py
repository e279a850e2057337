"""chi_square, against values from tables and against draws."""

import pytest
import torch

from contracts.each import each
from engram.testing import chi_square


@each(
    "freedom, statistic, p",
    [
        (1, 3.841, 0.05),
        (1, 10.828, 0.001),
        (5, 11.070, 0.05),
        (10, 2.156, 0.995),
        (30, 59.703, 0.001),
        (2, 9.210, 0.01),
    ],
)
def test_the_values_are_those_of_the_tables(freedom, statistic, p):
    cells = freedom + 1
    d = (statistic * 1000 / 2) ** 0.5  # two cells are off by d: 2 d^2 / 1000
    assert chi_square([1000 + d, 1000 - d, *[1000] * (cells - 2)]) == pytest.approx(p, rel=2e-3)


def test_small_values_keep_their_precision():
    d = (2 * 40.0 * 1000 / 4) ** 0.5
    assert chi_square([1000 + d, 1000 - d]) == pytest.approx(2.54e-10, rel=0.01)


def test_frequencies_may_be_in_any_unit():
    for unit in (1, 0.1, 700):
        assert chi_square([90, 210], [1 * unit, 2 * unit]) == pytest.approx(0.2207, rel=1e-3)


def test_counts_of_any_shape_are_a_list_of_cells():
    counts = torch.tensor([[40, 60], [45, 55]])
    assert chi_square(counts) == chi_square(counts.flatten()) == chi_square(counts.tolist(), torch.ones(2, 2)) < 0.5


def test_a_draw_of_what_cannot_be_drawn_is_impossible():
    assert chi_square([10_000, 10_000, 1], [1, 1, 0]) == 0
    assert chi_square([10_000, 10_000, 0], [1, 1, 0]) == 1


def test_rare_cells_are_taken_together():
    torch.manual_seed(0)
    frequencies = torch.cat([torch.full((200,), 1e-3), torch.tensor([0.8])])
    counts = torch.bincount(torch.multinomial(frequencies, 2000, replacement=True), minlength=201)
    assert chi_square(counts, frequencies) > 1e-3
    counts[:200] += 1  # each of them is rare, all together are not
    assert chi_square(counts, frequencies) < 1e-6
    assert chi_square([3], [1]) == 1


def test_true_draws_are_called_unlikely_as_often_as_that_is():
    torch.manual_seed(0)
    p = torch.tensor([chi_square(torch.bincount(torch.randint(20, (4000,)), minlength=20)) for _ in range(2000)])
    assert chi_square(torch.histc(p, 10, 0, 1)) > 1e-6


def test_a_small_bias_is_found():
    torch.manual_seed(0)
    drawn = torch.randint(40, (110_000,))
    drawn[:1500] = 7
    assert chi_square(torch.bincount(drawn, minlength=40)) < 1e-6


@each("counts, expected, said",
    [
        ([1, 2], [1, 2, 3], "there are 2 counts, but 3 expected"), ([], None, "counts"), ([0, 0], None, "counts"),
        ([1, -1], None, "counts"), ([1, 2], [1, -1], "expected"), ([1, 2], [0, 0], "expected"),
        ([1, 2], [1, float("inf")], "expected"), ([1, 2], [1, float("nan")], "expected"),
    ])  # fmt: skip
def test_what_is_no_distribution_is_refused(counts, expected, said):
    with pytest.raises(ValueError, match=said):
        chi_square(counts, expected)
