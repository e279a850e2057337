"""Draws, permutations and checksums against what they must be."""

from __future__ import annotations

import random

import numpy as np
import torch

from contracts.each import each
from engram import _native
from engram.testing import chi_square
from native.core.support import powers, store
from native.support import append_strands, append_words, slots, words


def mix64(x: int) -> int:
    """SplitMix64."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def in_lane(lane: int, written: int, capacity: int) -> list[int]:
    """Slots of a lane's rows, the oldest first."""
    return [lane * capacity + w % capacity for w in range(max(0, written - capacity), written)]


class TestUniform:
    @each(("capacity", "lanes", "strands", "written"), [
        (64, 1, 1, [64]), (64, 1, 1, [150]), (64, 2, 1, [100, 30]), (20, 3, 2, [55, 3, 20]), (50, 1, 3, [17]),
        (10, 40, 1, [*range(40)]), (10, 40, 1, [0, 25, 0, 7] * 10), (10, 40, 1, [0, 0, 0, 3] * 5),
        (10, 300, 1, [30] * 300), (10, 40, 2, [13, 4] * 20), (5, 300, 1, [*[0] * 140, 9, *[0] * 150, 2]),
    ])  # fmt: skip
    def test_every_stored_row_is_equally_likely_and_no_other_is_drawn(
        self, capacity: int, lanes: int, strands: int, written: list[int]
    ) -> None:
        code, width = words(1)
        s = store(width, capacity, lanes=lanes, strands=strands)
        for lane, n in enumerate(written):
            append_strands(s, code, n, lane)
        there = s.generations(torch.arange(capacity * lanes * strands)) >= 0
        drawn = torch.cat([s.uniform(slots(seed * 7919), 1000) for seed in range(200)])
        counts = torch.bincount(drawn, minlength=len(there))
        assert counts[~there].sum() == 0
        assert chi_square(counts[there]) > 1e-6

    def test_the_same_seed_draws_the_same_slots(self) -> None:
        code, width = words(1)
        s = store(width, 1000)
        append_words(s, code, 1000)
        assert torch.equal(s.uniform(slots(5), 100), s.uniform(slots(5), 100))
        assert not torch.equal(s.uniform(slots(5), 100), s.uniform(slots(6), 100))

    def test_nothing_stored_gives_nothing(self) -> None:
        assert store(8, 4).uniform(slots(1), 3) is None
        assert store(8, 4, lanes=100).uniform(slots(1), 3) is None

    @each("lanes", [1, 2, 16])
    def test_of_one_or_a_few_lanes_the_slots_of_a_seed_are_those_of_the_counts(self, lanes: int) -> None:
        code, width = words(1)
        s = store(width, 30, lanes=lanes)
        for lane in range(lanes):
            append_words(s, code, 20 + 2 * lane, lane=lane)
        there = [slot for lane in range(lanes) for slot in in_lane(lane, 20 + 2 * lane, 30)]
        numbers = [mix64(12345 + i * 0x9E3779B97F4A7C15) * len(there) >> 64 for i in range(100)]
        assert s.uniform(slots(12345), 100).tolist() == [there[i] for i in numbers]


class TestPermutations:
    @each("n", [*range(1, 70), *powers(8, 18), 65536, 65537, 100_003])
    def test_hold_every_number_once(self, n: int) -> None:
        made = _native.testing.permutation(n * 31, n, 0, n)
        assert sorted(made) == list(range(n))

    @each("n", [1, 5, 64, 65536, 65537, 100_003, (1 << 17) + 1, 1 << 24, (1 << 24) + 1, 60_000_000, (1 << 62) + 1])
    def test_of_blocks_are_those_of_the_single_positions(self, n: int) -> None:
        for count in {1, 2, 63, 64}:
            if count <= n:
                for start in {0, n // 3, n - count}:
                    start = min(start, n - count)
                    block = _native.testing.permutation_block(31, n, start, count)
                    assert block == _native.testing.permutation(31, n, start, count)
                    ordered = _native.testing.permutation_block(1, n, start, count, shuffle=False)
                    assert ordered == list(range(start, start + count))

    def test_of_enormous_ranges_stay_inside_and_do_not_repeat(self) -> None:
        for n in (60_000_000, (1 << 40) + 3, (1 << 62) + 1):
            made = _native.testing.permutation(3, n, n - 5000, 5000)
            assert len(set(made)) == 5000 and max(made) < n

    @each("n", [3, 4, 5])
    def test_of_few_numbers_are_equally_likely(self, n: int) -> None:
        counts: dict[tuple[int, ...], int] = {}
        for key in range(20_000):
            made = tuple(_native.testing.permutation(key, n, 0, n))
            counts[made] = counts.get(made, 0) + 1
        orders = 1
        for i in range(2, n + 1):
            orders *= i
        assert len(counts) == orders
        assert chi_square(torch.tensor(list(counts.values()))) > 1e-6

    def test_of_many_numbers_put_each_number_anywhere(self) -> None:
        n = 70_000  # the first place, over many keys, in 64 bins
        first = torch.tensor([_native.testing.permutation(key, n, 0, 1)[0] for key in range(20_000)])
        assert chi_square(torch.bincount(first * 64 // n, minlength=64)) > 1e-6
        step = torch.tensor(_native.testing.permutation(1, n, 0, n))
        assert chi_square(torch.bincount((step[1:] - step[:-1]) % n * 64 // n, minlength=64)) > 1e-6


class TestChecksums:
    def test_are_those_of_the_standard(self) -> None:
        # RFC 3720, B.4
        assert _native.testing.crc32c(b"123456789") == 0xE3069283
        assert _native.testing.crc32c(bytes(32)) == 0x8A9136AA
        assert _native.testing.crc32c(b"\xff" * 32) == 0x62A8AB43
        assert _native.testing.crc32c(bytes(range(32))) == 0x46DD794E
        assert _native.testing.crc32c(bytes(range(31, -1, -1))) == 0x113FDB5C
        assert _native.testing.crc32c(b"") == 0

    def test_by_table_and_by_instruction_agree_and_continue(self) -> None:
        draw = random.Random(0)
        for n in [*range(40), 1000, 4097]:
            data = draw.randbytes(n)
            assert _native.testing.crc32c(data) == _native.testing.crc32c_by_table(data)
            cut = draw.randrange(n + 1)
            first = _native.testing.crc32c(data[:cut])
            assert _native.testing.crc32c(data[cut:], first) == _native.testing.crc32c(data)


def test_leaves_of_a_sum_tree_are_found_as_often_as_they_are_large() -> None:
    draw = np.random.default_rng(0)
    values = draw.random(50)
    values[10:20] = 0
    tree = _native.testing.SumTree(50)
    tree.set(np.arange(50), values)
    found = np.bincount(tree.find((draw.random(200_000) * tree.total).tolist()), minlength=50)
    there = values > 0
    counts, frequency = torch.from_numpy(found[there]), torch.from_numpy(values[there] / values.sum())
    assert found[~there].sum() == 0 and chi_square(counts, frequency) > 1e-6
    assert chi_square(counts) < 1e-6  # it can fail
