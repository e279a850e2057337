"""The counters of a storage as checkpointers get them: which sequences exist in which lane."""

from __future__ import annotations

import base64
import math
from typing import Any

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
        self.removed = sum(map(_removed_in, counters["lanes"]))

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


def _removed_in(lane: dict[str, Any]) -> int:
    """How many rows of a saved lane were removed."""
    saved = lane.get("removed")
    return 0 if saved is None else int.from_bytes(base64.b64decode(saved["bits"]), "little").bit_count()


def check_sequences(sequences: list[int], n: int) -> None:
    """Raises ValueError where these are not the sequences that n items can carry: 0, or one that no lane counts."""
    forms.check(forms.list_of(_SEQUENCE, n), sequences, "the sequences of the items")
    if any(0 < own < FIRST_REPLACED for own in sequences):
        raise ValueError(f"the sequences of {n} items are {sequences!r:.80}")
