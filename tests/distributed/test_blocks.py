"""Blocks: rows as bytes, whole or leaf by leaf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.distributed import Block, pack, unpack
from engram.store.layout import RowLayout


def images(n: int = 4) -> TensorDict:
    return TensorDict(
        {
            "pixels": torch.randint(0, 256, (n, 64, 80), dtype=torch.uint8),
            "half": torch.randn(n, 3).bfloat16(),
            "next": {
                "done": torch.rand(n, 1) < 0.5,
                "none": torch.zeros(n, 0),
                "wave": torch.randn(n, dtype=torch.complex64),
            },
        },
        [n],
    )


def small(n: int = 4) -> TensorDict:
    return images(n).exclude("pixels")


@each("data", [images, small])
@each("n", [0, 1, 7])
def test_a_batch_comes_back(data, n):
    batch = data(n)
    layout = RowLayout.of(batch, 1)
    back = unpack(layout, pack(layout, batch))
    assert set(back.keys(True, True)) == set(batch.keys(True, True)) and back.batch_size == batch.batch_size
    assert all(torch.equal(back[k], batch[k]) and back[k].dtype == batch[k].dtype for k in batch.keys(True, True))


def test_long_rows_travel_leaf_by_leaf():
    layout = RowLayout.of(images(), 1)
    assert len(pack(layout, images()).parts) == len(layout.leaves)
    layout = RowLayout.of(small(), 1)
    assert len(pack(layout, small()).parts) == 1


@pytest.mark.parametrize("data", [images, small])
def test_every_leaf_of_a_batch_can_be_written_whatever_memory_the_block_has(data):
    layout = RowLayout.of(data(), 1)
    block = Block(tuple(part.copy() for part in pack(layout, data()).parts))
    for part in block.parts:
        part.flags.writeable = False
    batch = unpack(layout, block)
    for leaf in batch.values(True, True):
        leaf.fill_(1)
    assert all(bool((leaf == 1).all()) for leaf in batch.values(True, True))


@pytest.mark.parametrize("data", [images, small])
def test_the_rest_of_a_block_is_its_last_rows(data):
    batch = data(6)
    layout = RowLayout.of(batch, 1)
    back = unpack(layout, pack(layout, batch).rest(4))
    assert torch.equal(back["half"], batch["half"][4:]) and len(pack(layout, batch).rest(6)) == 0


def test_bytes_that_lie_at_odd_addresses_are_read():
    batch = images(3)
    layout = RowLayout.of(batch, 1)
    odd = []
    for part in pack(layout, batch).parts:
        memory = np.zeros(part.size + 1, np.uint8)
        memory[1:] = part.reshape(-1)
        odd.append(memory[1:].reshape(part.shape))
    assert torch.equal(unpack(layout, Block(tuple(odd)))["half"], batch["half"])


@each("data", [images, small])
@each(
    "spoil",
    [
        lambda parts: (),
        lambda parts: parts[:-1],
        lambda parts: (*parts[:-1], parts[-1][:, :-1]),
        lambda parts: (*parts[:-1], parts[-1].view(np.int8)),
        lambda parts: (*parts, parts[0]),
        lambda parts: (parts[0][:2], *parts[1:], parts[0]),
    ],
)
def test_a_block_of_another_form_is_refused(data, spoil):
    layout = RowLayout.of(data(), 1)
    with pytest.raises(ValueError, match="not one of rows of this layout"):
        unpack(layout, Block(spoil(pack(layout, data()).parts)))
