"""Messages of Ray's actors: in pieces that travel in a call itself, and whole on the other side."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from contracts.each import each
from engram.data.replay_buffers.samplers import DrawTotals
from engram.distributed import Block
from engram.distributed.ray_buffer import _MOST_PIECES, _pieces_for, _received, _to_send
from engram.distributed.shard import DrawnRows, ShardTotals

RAYS_LIMIT = 100 << 10  # bytes; larger objects go through the object store


def answer(n: int, width: int = 66) -> DrawnRows:
    rng = np.random.default_rng(n)
    block = Block((rng.integers(0, 256, (n, width), np.uint8),))
    totals = ShardTotals(7, n, n, DrawTotals(float(n)))
    return DrawnRows(block, torch.arange(n), torch.arange(n) * 3, torch.rand(n).double(), None, None, None, totals)


def tensors(message: Any) -> list[Any]:
    return [message.slots, message.generation, message.ratio, torch.from_numpy(message.block.parts[0])]


@each("n", [0, 1, 1000, 1093, 16_384, 30_000])
def test_pieces_are_small_and_what_comes_is_what_was_sent(n: int) -> None:
    message = answer(n)
    pieces = _to_send(message, 40)
    assert all(type(piece) is bytes and len(piece) < RAYS_LIMIT for piece in pieces)
    came = _received((*pieces, b"", b""))
    for one, other in zip(tensors(message), tensors(came), strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
        other.zero_()  # it can be written to
    assert came.totals == message.totals


@each("n", [0, 1, 954, 955, 1000, 1093, 16_384, 30_000])
def test_there_are_no_more_pieces_than_the_size_says(n: int) -> None:
    assert len(_to_send(answer(n), 40)) <= _pieces_for(n * (66 + 24))


@each(("n", "most"), [(16_384, 1), (16_384, 8), (1_000_000, _MOST_PIECES)])
def test_a_message_that_is_too_large_for_its_pieces_is_one_object(n: int, most: int) -> None:
    (whole,) = _to_send(answer(n), most)
    assert isinstance(whole, tuple) and isinstance(whole[1], np.ndarray)  # tensors are arrays, without a copy
    assert torch.equal(_received((whole, *[b""] * 3)).slots, torch.arange(n))


def test_answers_of_many_megabytes_are_not_asked_for_in_pieces() -> None:
    assert _pieces_for(10 << 20) == 1
