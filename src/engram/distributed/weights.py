"""A policy's weights on a cluster: one flat block in Ray's object store, which each node fetches once for a version."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram.distributed.ray_buffer import import_ray

_ALIGNED = 64
Bytes = np.ndarray[Any, Any]


class WeightsEntry(NamedTuple):
    """One tensor of a block.

    Attributes:
        start: its first byte.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightsLayout:
    """Where each of some named tensors lies in a block of bytes.

    >>> layout = WeightsLayout({"w": torch.ones(2), "steps": torch.tensor(3)})
    >>> block = layout.pack({"w": torch.zeros(2), "steps": torch.tensor(4)})
    >>> block.nbytes, layout.unpack(block)["steps"].item()
    (72, 4)
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.entries: list[WeightsEntry] = []
        end = 0
        for name, tensor in state.items():
            start = -(-end // _ALIGNED) * _ALIGNED
            self.entries.append(WeightsEntry(name, tensor.dtype, tuple(tensor.shape), start))
            end = start + self.entries[-1].nbytes
        self.nbytes = end

    def pack(self, state: Mapping[str, Tensor]) -> Bytes:
        """The values as bytes, uint8 [nbytes], wherever the tensors are.

        Raises:
            ValueError: other names, shapes or dtypes.
        """
        self.refuse_others(state)
        block = np.zeros(self.nbytes, np.uint8)
        for name, view in self._views(block).items():
            view.copy_(state[name])
        return block

    def unpack(self, block: Bytes) -> dict[str, Tensor]:
        """The tensors, in memory of their own."""
        return self._views(block.copy())

    def _views(self, block: Bytes) -> dict[str, Tensor]:
        whole = torch.from_numpy(block)
        return {
            entry.name: whole[entry.start : entry.start + entry.nbytes].view(entry.dtype).reshape(entry.shape)
            for entry in self.entries
        }

    def refuse_others(self, state: Mapping[str, Tensor]) -> None:
        """ValueError for weights of other names, shapes or dtypes."""
        allowed = {entry.name: (entry.dtype, entry.shape) for entry in self.entries}
        given = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
        differing = [name for name in {**allowed, **given} if allowed.get(name) != given.get(name)]
        if differing:
            raise ValueError(
                "these weights are not those of the policy.\n"
                + "\n".join(
                    f"  {name}: found {given.get(name)}, allowed {allowed.get(name)}" for name in differing[:10]
                )
            )


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
        state: dict[str, Tensor] = layout.unpack(block)
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
        state: dict[str, Tensor] = layout.unpack(block)
        return state
