"""Where a consumer of a queue is: positions that a model's checkpoint remembers, and the sessions that they begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import engram._native as _native
from engram import _forms as forms

if TYPE_CHECKING:
    from engram.store.lanes import Lanes

_ROW = forms.integer(0, (1 << 63) - 1)
_POSITION = forms.record(
    {"store": forms.text, "era": _ROW, "rows": forms.list_of(_ROW), "version": _ROW}
)  # fmt: skip
_GO_BACK = "`rb.seek(None)` goes on from what was committed last"


def position_at(lanes: Lanes, rows: list[int] | tuple[int, ...]) -> dict[str, Any]:
    """The position of a queue behind these rows, one a lane: plain numbers and a text, for JSON and `torch.save`."""
    queue = lanes.queue
    assert queue is not None
    version = queue.consumer_version
    return {"store": lanes.store.store_id.hex(), "era": queue.era, "rows": list(rows), "version": version}


def rows_of(lanes: Lanes, position: Any) -> list[int]:
    """The rows of a position of these lanes, one a lane.

    Raises:
        TypeError, ValueError: it is no position, or one of another store, or all rows were replaced since.
    """
    queue = lanes.queue
    assert queue is not None
    if not isinstance(position, dict):
        raise TypeError(
            f"a position is what rb.position() gives, a dict, or None: what was committed last; got a "
            f"{type(position).__name__}"
        )
    forms.check(_POSITION, position, "the position")
    own = lanes.store.store_id.hex()
    if position["store"] != own:
        raise ValueError(
            f"this position is one of another store, {position['store'][:8]}..., and this one is {own[:8]}...: a "
            f"position belongs to a store that outlives its processes (`scratch_dir=`). {_GO_BACK}"
        )
    if position["era"] != queue.era or len(position["rows"]) != lanes.store.lanes:
        raise ValueError(
            "all rows of this store were replaced since this position was taken (by `empty` or `loads`): its rows are "
            f"others now. {_GO_BACK}"
        )
    rows: list[int] = position["rows"]
    return rows


class Sessions:
    """Which session of a queue this process takes part in; the caller has the consumer's turn.

    `seek` begins one: whoever took rows in the one before is told so, and takes nothing. Attributes:
        number: None: it takes part in none yet.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._of: bytes | None = None  # the store

    def after_fork(self) -> None:
        """A child takes part in none."""
        self.number = None

    def begin(self, lanes: Lanes, rows: list[int], version: int | None) -> int:
        """Begins one in which the rows from there on come next; returns how many of them are gone.

        Raises:
            ValueError: the store has no such rows.
        """
        queue, store = lanes.queue, lanes.store
        assert queue is not None
        gone = queue.seek(rows, _number_of(lanes))
        if gone is None:
            raise ValueError(
                "this position lies beyond the rows of the store, of which some were lost by a power cut after it was "
                f"taken, or which is a copy of before. {_GO_BACK}"
            )
        if version is not None:
            queue.consumer_version = version
        self.number, self._of = queue.session, store.store_id
        return gone

    def check(self, lanes: Lanes, *, joins: bool) -> None:
        """Takes part in the session that is, where this process does in none.

        Args:
            joins: only in one that a living process has begun.

        Raises:
            RuntimeError: another one has begun since, or there is none to take part in.
        """
        queue, store = lanes.queue, lanes.store
        assert queue is not None
        now = queue.session
        if self.number is not None and self._of == store.store_id:
            if now == self.number:
                return
            pid = queue.session_owner & ((1 << _native.PID_BITS) - 1)
            raise RuntimeError(
                f"process {pid} has called seek() on this queue since this process did: it trains from now on, and "
                "this one takes nothing more. End it, or call rb.seek(...) here, which ends the other one"
            )
        if joins and not (now and _is_alive(lanes, queue.session_owner)):
            raise RuntimeError(
                'a queue with commit="manual" is told first which rows the model has: '
                'rb.seek(checkpoint["position"]), or rb.seek(None) for what was committed last. Of several ranks one '
                "does, when rows are there, and before the others sample"
            )
        self.number, self._of = now, store.store_id


def _number_of(lanes: Lanes) -> int:
    """What names this process in the store."""
    return lanes.store.guest or 1


def _is_alive(lanes: Lanes, owner: int) -> bool:
    if lanes.locks is None or owner == lanes.store.guest:
        return True
    return lanes.locks.is_writer_alive(owner >> _native.PID_BITS)
