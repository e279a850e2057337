"""A policy's weights on a cluster: one flat block in Ray's object store, which each node fetches once for a version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from engram.distributed.ray_buffer import import_ray
from engram.kernel.collecting import WeightsLayout


class WeightsOffer(NamedTuple):
    """The newest weights, as each call of a collector names them.

    Attributes:
        reference: a list with the reference of (layout, block): inside a list Ray hands it on without fetching it.
    """

    version: int
    reference: list[Any]


class WeightsPublisher:
    """Puts weights into the object store, one version after the other.

    Args:
        state: weights whose names, shapes and dtypes all later ones have; None: those of the first ones decide.
    """

    def __init__(self, state: Mapping[str, Tensor] | None) -> None:
        self._layout = None if state is None else WeightsLayout(state)
        #: The newest weights; None: collectors have those that they began with.
        self.offer: WeightsOffer | None = None

    @property
    def version(self) -> int:
        """How often weights were published."""
        return 0 if self.offer is None else self.offer.version

    def publish(self, state: Mapping[str, Tensor], version: int | None = None) -> None:
        """Makes these the newest weights; errors as `WeightsLayout.pack`. Later changes of them are not seen.

        Args:
            version: their number; None: one more than the last.
        """
        layout = WeightsLayout(state) if self._layout is None else self._layout
        reference = import_ray().put((layout, layout.pack(state)))
        self._layout = layout
        self.offer = WeightsOffer(self.version + 1 if version is None else version, [reference])

    def newest(self) -> dict[str, Tensor] | None:
        """The newest weights, in memory of their own; None: none were published."""
        if self.offer is None:
            return None
        layout, block = import_ray().get(self.offer.reference[0])
        state: dict[str, Tensor] = layout.views(block.copy())
        return state

    def refuse_others(self, state: Mapping[str, Tensor]) -> None:
        """ValueError where these are not weights of the policy."""
        if self._layout is not None:
            self._layout.refuse_others(state)


class WeightsFetcher:
    """Fetches weights that are newer than the last ones."""

    def __init__(self) -> None:
        self.version = -1  # those that the policy began with have version 0, and may be offered, too

    def fetch(self, offer: WeightsOffer | None) -> dict[str, Tensor] | None:
        """The offered weights; None where they are not newer."""
        if offer is None or offer.version <= self.version:
            return None
        layout, block = import_ray().get(offer.reference[0])
        self.version = offer.version
        state: dict[str, Tensor] = layout.views(block.copy())
        return state
