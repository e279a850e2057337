"""What a roller gives."""

from __future__ import annotations

from typing import NamedTuple

from tensordict import TensorDictBase


class Rolled(NamedTuple):
    """A batch; with an `error`, the whole rows `[*batch_size, fewer steps]` that were stepped before it.

    A roller that has stepped no whole row raises the error itself. Either way it has restarted then.
    """

    batch: TensorDictBase
    error: BaseException | None = None
