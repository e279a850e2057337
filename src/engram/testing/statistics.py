"""How likely counts are under a distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FEWEST = 5.0  # expected counts below which the chi-square distribution is a poor approximation


def chi_square(counts: Tensor | Sequence[float], expected: Tensor | Sequence[float] | None = None) -> float:
    """The probability that counts deviate at least as far as these do (Pearson's chi-square test).

    Args:
        counts: how often each cell was drawn.
        expected: relative frequencies of the cells, in any unit; None: all cells are equally likely. Cells in which
            fewer than 5 are expected are taken together. One count in a cell where none is expected gives 0.0.

    Raises:
        ValueError: nothing was counted, other numbers of cells, or a negative or infinite frequency.

    Example:
        >>> chi_square([48, 52])
        0.6891565167793516
        >>> chi_square([900, 1100]) < 1e-4
        True
        >>> chi_square([10, 20, 70], expected=[1, 2, 7])
        1.0
    """
    found = torch.as_tensor(counts, dtype=torch.float64).reshape(-1)
    wanted = torch.ones_like(found) if expected is None else torch.as_tensor(expected, dtype=torch.float64).reshape(-1)
    if len(found) != len(wanted):
        raise ValueError(f"{len(found)} cells were counted, of {len(wanted)} the frequency is given")
    for name, values in (("counts", found), ("expected", wanted)):
        if not bool((values.isfinite() & (values >= 0)).all()) or not float(values.sum()) > 0:
            raise ValueError(f"{name} must be 0 or more, finite, and not all 0; got {values.tolist()!r:.200}")
    if bool((found[wanted == 0] > 0).any()):
        return 0.0
    found, wanted = _pooled(found, wanted * (found.sum() / wanted.sum()))
    statistic = ((found - wanted).square() / wanted).sum()
    freedom = len(found) - 1
    return 1.0 if freedom == 0 else float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), statistic / 2))


def _pooled(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The cells with the rare ones made one."""
    order = wanted.argsort()
    found, wanted = found[order], wanted[order]
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    rare = int((wanted < _FEWEST).sum())
    while 0 < rare < len(wanted) and wanted[:rare].sum() < _FEWEST:
        rare += 1
    if rare < 2:
        return found, wanted
    return torch.cat([found[:rare].sum()[None], found[rare:]]), torch.cat([wanted[:rare].sum()[None], wanted[rare:]])
