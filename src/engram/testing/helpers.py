"""Comparing batches exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor


def assert_equal(found: Any, expected: Any) -> None:
    """The same keys, shapes, dtypes and values, NaN included; a dict may stand for a TensorDict."""
    if isinstance(expected, dict | TensorDictBase):
        assert set(found.keys()) == set(expected.keys())
        for key in expected.keys():  # noqa: SIM118 -- a TensorDict iterates over rows
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert found == expected


def steps(start: int, stop: int) -> TensorDict:
    """Steps number `start` to `stop`, with leaves of several sizes."""
    return of_numbers(torch.arange(start, stop))


def of_numbers(n: Tensor) -> TensorDict:
    """Steps of these numbers, of any shape."""
    data = {
        "n": n,
        "obs": torch.stack([n * 3.0, n + 0.5, -n], -1).float(),
        "done": (n % 5 == 0).unsqueeze(-1),
        "next": {"reward": (n * 2).double().unsqueeze(-1), "small": (n % 100).to(torch.int8)},
    }
    return TensorDict(data, batch_size=n.shape)


def env_steps(envs: int, start: int, stop: int) -> TensorDict:
    """Data [envs, time]: environment e at time t has the number 1000 * e + t."""
    return of_numbers(torch.arange(envs).unsqueeze(1) * 1000 + torch.arange(start, stop))


def numbers(batch: Any) -> Any:
    """The numbers of a batch, as nested lists; fails unless every value of every step belongs to its number."""
    if isinstance(batch, list):
        return [numbers(item) for item in batch]
    n = batch["n"]
    expected = of_numbers(n)
    for key in ("obs", "done", ("next", "reward"), ("next", "small")):
        found = batch[key]
        assert found.dtype == expected[key].dtype and found.shape == expected[key].shape
        assert torch.equal(found, expected[key]), f"{key}: a step is made of parts of several"
    return n.tolist()


def state_of(rb: Any) -> Any:
    """What two equal buffers agree in, in a form that `==` compares."""
    lanes = rb.storage.lanes
    if lanes is None:
        return 0, 0, 0, []
    rows = numbers(rb[:]) if len(rb) else []
    return len(rb), rb.write_count, getattr(rb.writer, "_cursor", None), rows


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
