"""The counters of a storage as checkpointers get them: which sequences exist in which lane."""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any

import numpy as np

from engram import _forms as forms
from engram._native import FIRST_REPLACED

_COUNT = forms.integer()
_SEQUENCE = forms.integer(0, (1 << 63) - 1)
_BITS = forms.nullable(forms.integer(0, (1 << 63) - 1))  # the evidence about the border of a lane: a bit for each entry
_LANE = forms.record(
    {
        "base": _COUNT, "published": _COUNT, "origin": forms.integer(0, (1 << 64) - 1), "seams": forms.list_of(_COUNT),
        "border": forms.record({"looked": _COUNT, "agreed": _BITS}), "replaced": _COUNT,
    },
    {
        "ticket": _COUNT, "left": _COUNT, "goes_on": forms.boolean, "carried": _BITS,
        "removed": forms.record({"first": _COUNT, "bits": forms.text}),
        "rate": forms.record({"written": _COUNT, "drawn": _COUNT}),
        "queue": forms.record(
            {"consumed": _SEQUENCE, "kept": _SEQUENCE},
            {"version": _SEQUENCE, "missed": _SEQUENCE, "stale": _SEQUENCE},
        ),
    },
)  # fmt: skip
_COUNTERS = forms.record({"lane_capacity": forms.nullable(_COUNT), "envs": _COUNT, "lanes": forms.list_of(_LANE)})


class Counters:
    """Checked view of `{"lane_capacity": int | None, "envs": int, "lanes": [{"base", "published", ...}]}`.

    ValueError when that is not what it is given.
    """

    def __init__(self, counters: dict[str, Any]) -> None:
        forms.check(_COUNTERS, counters, "counters")
        self.envs: int = counters["envs"]
        self._capacity: int | None = counters["lane_capacity"]
        self._lanes = [_checked(lane) for lane in counters["lanes"]]
        bits = (removed_bits(lane, self.envs) for lane in counters["lanes"])
        self.removed = sum(int.from_bytes(each, "little").bit_count() for each in bits)

    def check_envs(self, layout: dict[str, Any]) -> None:
        """ValueError where the layout names another number of environments than the counters."""
        shape = layout.get("envs", [self.envs])
        forms.check(forms.list_of(_COUNT), shape, "the layout's envs")
        if math.prod(shape) != self.envs or not self.envs:
            raise ValueError(f"the layout is of environments {shape!r}, the counters of {self.envs}")

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    @property
    def rows(self) -> int:
        """Rows that exist in all lanes and environments."""
        return self.envs * sum(self.stop(lane) - self.first(lane) for lane in range(self.lanes))

    def first(self, lane: int) -> int:
        """The oldest sequence that exists in the lane; `stop` when there is none."""
        base, published = self._lanes[lane]
        return base if self._capacity is None else max(base, published - self._capacity)

    def stop(self, lane: int) -> int:
        return self._lanes[lane][1]


def _checked(lane: dict[str, Any]) -> tuple[int, int]:
    """`base` and `published` of a lane; ValueError where its counters contradict each other."""
    base, published = lane["base"], lane["published"]
    if base > published:
        raise ValueError(f"a lane's base, {base}, is beyond what it has published, {published}")
    seams = list(lane["seams"])
    if seams != sorted(seams) or seams[-1:] > [published]:
        raise ValueError(f"the seams of a lane do not rise up to {published}: {seams}")
    if lane["border"]["looked"] > published:
        raise ValueError(f"{lane['border']!r:.80} cannot be the evidence about the border of a lane")
    return base, published


def removed_bits(lane: dict[str, Any], envs: int) -> bytes:
    """A bit for each row of a saved lane from `base` on, as `Store.restore_removed` takes them; empty: none is removed.

    What was saved may begin with rows that are not there any more, as others overwrote them before they were read.

    Raises:
        ValueError: no lane can have saved this.
    """
    removed, base, published = lane.get("removed"), lane["base"], lane["published"]
    if removed is None:
        return b""
    first, text = removed["first"], removed["bits"]
    n = (published - first) * envs
    try:
        packed = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the removed rows of a lane are no base 64: {text!r:.80} ({error})") from None
    if first > base or len(packed) != -(-n // 8):
        raise ValueError(
            f"the removed rows of a lane are {len(packed)} bytes of bits from row {first} on, which are not those of "
            f"its rows {base} to {published} of {envs} environments"
        )
    bits = np.unpackbits(packed, bitorder="little")
    if bits[n:].any():
        raise ValueError(f"the removed rows of a lane have bits behind its newest row, {published - 1}")
    left = bits[(base - first) * envs : n]
    return np.packbits(left, bitorder="little").tobytes() if left.any() else b""


def check_sequences(sequences: list[int], n: int) -> None:
    """Raises ValueError where these are not the sequences that n items can carry: 0, or one that no lane counts."""
    forms.check(forms.list_of(_SEQUENCE, n), sequences, "the sequences of the items")
    if any(0 < own < FIRST_REPLACED for own in sequences):
        raise ValueError(f"the sequences of {n} items are {sequences!r:.80}")
