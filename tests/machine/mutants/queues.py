"""Queues and rate limiters that are wrong by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram.data import QueueSampler
from engram.data.replay_buffers.buffers.waiting import Waits
from engram.store.flow import Flow, RateLimit
from machine.mutants.base import Mutant, around


# ---- queues that are wrong by one ----
def moved(by: int) -> Any:
    """The rows of a batch end elsewhere than they did."""

    def hand_out(hands: Any, sampler: QueueSampler, are_whole: bool) -> None:
        taking = sampler._own_taking()
        if taking is not None:
            sampler._taking = taking._replace(next=[row + by for row in taking.next])
        hands()

    return hand_out


def lets_go(hands: Any, sampler: QueueSampler, are_whole: bool) -> None:
    """What is handed out is committed."""
    taking = sampler._own_taking()
    hands()
    if taking is not None:
        taking.lanes.queue.let_go(taking.next)


def one_row_on(use: Any, sampler: QueueSampler, storage: Any, position: Any) -> Any:
    if position is not None:
        position = {**position, "rows": [row + 1 for row in position["rows"]]}
    return use(storage, position)


def one_version_older(versions: Any, sampler: QueueSampler, storage: Any, slots: Tensor) -> Tensor:
    return torch.as_tensor(versions()) - 1


# ---- rate limiters that are wrong by one ----
def one_row_fewer(take: Any, waits: Waits, n: int, *how: Any) -> Any:
    return take(n - 1, *how)


def from_one_row_more_on(name: Any, flow: Flow, limit: RateLimit) -> Any:
    return name(limit._replace(min_size=min(limit.min_size + 1, flow._rows.lanes.capacity)))


def one_draw_more(name: Any, flow: Flow, limit: RateLimit) -> Any:
    return name(limit._replace(ahead=limit.ahead + 1))


def never(wait: Any, waits: Waits, *how: Any) -> None:
    """Who writes does not look."""


QUEUE_MUTANTS = {
    "a queue that hands out its last row again": Mutant(around(QueueSampler, "_hand_out", moved(-1)), sampler="queue"),
    "a queue that leaves a row out": Mutant(
        around(QueueSampler, "_hand_out", moved(1)), sampler="overwriting queue", storage="list"
    ),
    "a queue whose rows are committed when they are handed out": Mutant(
        around(QueueSampler, "_hand_out", lets_go), sampler="committed queue"
    ),
    "a commit of one row more": Mutant(around(QueueSampler, "commit_rows", one_row_on), sampler="committed queue"),
    "a seek to the row behind": Mutant(around(QueueSampler, "seek", one_row_on), sampler="overwriting committed queue"),
    "rows that are too old one version early": Mutant(
        around(QueueSampler, "_versions", one_version_older), sampler="fresh queue"
    ),
}

LIMIT_MUTANTS = {
    "a batch that counts as one row less": Mutant(around(Waits, "take", one_row_fewer), limit="ratio"),
    "writes that do not wait for draws": Mutant(around(Waits, "await_room_until", never), limit="ratio"),
    "a draw ahead of the ratio": Mutant(around(Flow, "name", one_draw_more), limit="ratio of draws"),
    "draws from one row more on": Mutant(around(Flow, "name", from_one_row_more_on), limit="ratio of draws"),
}
