"""Numbered test data, exact comparison, and the chi-square test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor


def assert_equal(actual: Any, expected: Any) -> None:
    """Asserts the same keys, shapes, dtypes and values, NaN included; a dict may stand for a TensorDict."""
    if isinstance(expected, dict | TensorDictBase):
        assert set(actual.keys()) == set(expected.keys())
        for key in expected.keys():  # noqa: SIM118 -- a TensorDict iterates over rows
            assert_equal(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected) and len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert actual == expected


def steps(start: int, stop: int) -> TensorDict:
    """The steps with the numbers `start` to `stop`, with leaves of several sizes."""
    return of_numbers(torch.arange(start, stop))


def of_numbers(n: Tensor) -> TensorDict:
    """Steps with these numbers, of any shape; every value follows from the number."""
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
        value = batch[key]
        assert value.dtype == expected[key].dtype and value.shape == expected[key].shape
        assert torch.equal(value, expected[key]), f"{key}: a step is made of parts of several"
    return n.tolist()


def state_of(rb: Any) -> Any:
    """The state of a buffer in a form that `==` compares: length, write count, cursor, step numbers."""
    rows = numbers(rb[:]) if len(rb) else []
    return len(rb), rb.write_count, cursor_of(rb), rows


def cursor_of(rb: Any) -> int | None:
    """The slot that the writer of a buffer writes next; None for a writer that keeps no cursor of TorchRL's name."""
    cursor: int | None = getattr(rb.writer, "_cursor", None)
    return cursor


_FEWEST = 5.0  # expected counts below which the chi-square distribution is a poor approximation


def chi_square(counts: Tensor | Sequence[float], expected: Tensor | Sequence[float] | None = None) -> float:
    """The probability that counts deviate at least as far as these do (Pearson's chi-square test).

    Args:
        counts: how often each cell was drawn.
        expected: relative frequencies of the cells, in any unit; None: all cells are equally likely. Cells in which
            fewer than 5 are expected are merged. One count in a cell where none is expected gives 0.0.

    Raises:
        ValueError: all counts are 0, the lengths differ, or a frequency is negative or infinite.

    Example:
        >>> chi_square([48, 52])
        0.6891565167793516
        >>> chi_square([900, 1100]) < 1e-4
        True
        >>> chi_square([10, 20, 70], expected=[1, 2, 7])
        1.0
    """
    observed = torch.as_tensor(counts, dtype=torch.float64).reshape(-1)
    frequencies = (
        torch.ones_like(observed) if expected is None else torch.as_tensor(expected, dtype=torch.float64).reshape(-1)
    )
    if len(observed) != len(frequencies):
        raise ValueError(f"there are {len(observed)} counts, but {len(frequencies)} expected frequencies")
    for name, values in (("counts", observed), ("expected", frequencies)):
        if not bool((values.isfinite() & (values >= 0)).all()) or not float(values.sum()) > 0:
            raise ValueError(f"{name} must be 0 or more, finite, and not all 0; got {values.tolist()!r:.200}")
    if bool((observed[frequencies == 0] > 0).any()):
        return 0.0
    observed, frequencies = _pooled(observed, frequencies * (observed.sum() / frequencies.sum()))
    statistic = ((observed - frequencies).square() / frequencies).sum()
    freedom = len(observed) - 1
    return 1.0 if freedom == 0 else float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), statistic / 2))


def _pooled(observed: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """The cells, with the rare ones merged into one."""
    order = frequencies.argsort()
    observed, frequencies = observed[order], frequencies[order]
    observed, frequencies = observed[frequencies > 0], frequencies[frequencies > 0]
    rare = int((frequencies < _FEWEST).sum())
    while 0 < rare < len(frequencies) and frequencies[:rare].sum() < _FEWEST:
        rare += 1
    if rare < 2:
        return observed, frequencies
    return torch.cat([observed[:rare].sum()[None], observed[rare:]]), torch.cat(
        [frequencies[:rare].sum()[None], frequencies[rare:]]
    )
