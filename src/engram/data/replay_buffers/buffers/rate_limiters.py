"""How many rows are drawn for each row written: bounds that all users of a store keep together."""

from __future__ import annotations

import math
from types import EllipsisType
from typing import Any

from engram import _forms as forms
from engram._checks import count
from engram.store.flow import RateLimit

__all__ = ["MinSize", "RateLimiter", "SampleToInsertRatio"]

_LEAST_STEPS = 16  # that the default lets samplers, and those who write, be ahead
_SHARE_OF_MIN_SIZE = 10  # or this part of the rows that must be there, as in Acme


class RateLimiter:
    """Base of `SampleToInsertRatio` and `MinSize`.

    Attributes:
        limit: the bound, in numbers that a store keeps.
    """

    def __init__(self, limit: RateLimit) -> None:
        self.limit = limit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RateLimiter) and self.limit.is_as(other.limit)

    def __hash__(self) -> int:
        return hash(self.limit[:2])

    def __repr__(self) -> str:
        return str(self.limit)


class MinSize(RateLimiter):
    """Samplers wait until so many rows are stored; nobody who writes waits (`reverb.rate_limiters.MinSize`).

    Args:
        min_size_to_sample: rows, of all environments, that are stored and were not removed.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, rate_limiter=MinSize(3))
        >>> _ = rb.extend(torch.arange(2))
        >>> rb.can_sample(), rb.rate_limiter
        (False, MinSize(3))
    """

    def __init__(self, min_size_to_sample: int) -> None:
        least = count(min_size_to_sample, "min_size_to_sample")
        super().__init__(RateLimit(1.0, least, math.inf, math.inf, False))


class SampleToInsertRatio(RateLimiter):
    """Samplers wait for rows to be written, and those who write wait for samplers, so that a number of rows is drawn
    for each row written (`reverb.rate_limiters.SampleToInsertRatio`; Cassirer et al. 2021, "Reverb: A Framework For
    Experience Replay").

    Rows are counted, not batches: for u updates of `batch_size` rows for each environment step, an update-to-data ratio
    of u, it is `u * batch_size`. With ndim=2 a time step of E environments is E rows. Everybody who opens the store
    keeps the bound, and processes that are to find it there from the start name it, too: one function that makes the
    buffer, called by all. A batch counts with its batch size, also where it has fewer rows, as the last of an epoch.

    Args:
        samples_per_insert: rows drawn for each row written.
        min_size_to_sample: rows that must be stored before one is drawn; below it nobody who writes waits.
        error_buffer: rows that may be drawn too early, and rows that may be drawn too late. None: `samples_per_insert`
            times the larger of 16 and a tenth of `min_size_to_sample`, or the largest batch that is asked for, if that
            is more; and who waits for a batch that the sampler does not have yet (`wait=True`), as one of longer
            slices, lets more be written. A pair is Reverb's: the least and the largest difference between
            `samples_per_insert` times the rows written, and the rows drawn.
        ahead: only the first of the two.
        behind: only the second; None: those who write never wait.

    Raises:
        TypeError, ValueError: these are no such numbers, or `error_buffer` comes with `ahead` or `behind`.

    Example:
        >>> rb = ReplayBuffer(
        ...     storage=LazyTensorStorage(100), batch_size=8, rate_limiter=SampleToInsertRatio(2.0, error_buffer=8)
        ... )
        >>> _ = rb.extend(torch.arange(5))
        >>> batches = 0
        >>> while rb.can_sample():  # one thread: it asks, and does not wait
        ...     batches += len(rb.sample()) // 8
        >>> batches
        2
        >>> rb.stats().samples, rb.stats().samples_per_insert
        (16, 4.0)
    """

    def __init__(
        self,
        samples_per_insert: float,
        min_size_to_sample: int = 1,
        error_buffer: float | tuple[float, float] | None = None,
        *,
        ahead: float | None = None,
        behind: float | EllipsisType | None = ...,
    ) -> None:
        ratio = _number(samples_per_insert, "samples_per_insert")
        if not (ratio > 0 and math.isfinite(ratio)):
            raise ValueError(f"samples_per_insert must be more than 0, and finite; got {samples_per_insert!r}")
        least = count(min_size_to_sample, "min_size_to_sample")
        room = ratio * max(_LEAST_STEPS, least / _SHARE_OF_MIN_SIZE)
        widens = error_buffer is None and ahead is None and behind is ...
        before = after = room
        if error_buffer is not None:
            if ahead is not None or behind is not ...:
                raise TypeError("error_buffer is ahead= and behind= at once: give it, or these")
            if isinstance(error_buffer, tuple | list):
                low, high = (_number(each, "error_buffer") for each in error_buffer)
                before, after = ratio * least - low, high - ratio * least
                if high <= low:
                    raise ValueError(
                        f"a pair of error_buffer is the least and the largest difference, got {error_buffer}"
                    )
            else:
                before = after = _at_least_0(error_buffer, "error_buffer")
        if ahead is not None:
            before = _at_least_0(ahead, "ahead")
        if behind is None:
            after = math.inf
        elif not isinstance(behind, EllipsisType):
            after = _at_least_0(behind, "behind")
        if not before + after > 0:
            raise ValueError("ahead and behind must be more than 0 together: no batch could ever be drawn")
        super().__init__(RateLimit(ratio, least, before, after, widens))


def as_limit(given: Any) -> RateLimit | None:
    """The bound of what `rate_limiter=` was given. TypeError: it is none."""
    if given is None:
        return None
    if isinstance(given, RateLimiter):
        return given.limit
    raise TypeError(
        f"rate_limiter must be a SampleToInsertRatio, a MinSize or None, got a {type(given).__name__}: stores keep "
        "these, so that every process that opens one finds the same"
    )


def limiter_of(limit: RateLimit | None) -> RateLimiter | None:
    """What would be given for such a bound."""
    return None if limit is None else RateLimiter(limit)


#: A bound as JSON, which has no infinity: the fields of `RateLimit`, None for any number of rows.
DESCRIBED_LIMIT = forms.record(
    {
        "samples_per_insert": forms.number, "min_size": forms.integer(1), "ahead": forms.nullable(forms.number),
        "behind": forms.nullable(forms.number), "widens": forms.boolean,
    }
)  # fmt: skip


def described_limit(limit: RateLimit) -> dict[str, Any]:
    """A bound as JSON."""
    return {name: None if value == math.inf else value for name, value in limit._asdict().items()}


def limiter_described(saved: dict[str, Any]) -> RateLimiter:
    """What `described_limit` described, which is of this form. ValueError: no limiter is so."""
    numbers: dict[str, Any] = {name: math.inf if value is None else value for name, value in saved.items()}
    limit = RateLimit(**numbers)
    if not (limit.samples_per_insert > 0 and limit.ahead + limit.behind > 0):
        raise ValueError(f"no rate limiter is {saved!r:.200}")
    return RateLimiter(limit)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def _at_least_0(value: Any, name: str) -> float:
    number = _number(value, name)
    if number < 0:
        raise ValueError(f"{name} must be 0 or more, got {value!r}")
    return number
