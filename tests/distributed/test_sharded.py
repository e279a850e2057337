"""A client of several shards: rows go in once, and come out as from one buffer, whatever is lost on the way."""

from __future__ import annotations

import contextlib
import random
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from contracts.waiting import is_taken
from distributed.shards import LAYOUT, Link, client, read_all, rows, shard, whole, write
from engram.data import PrioritizedSampler, RandomSampler, SliceSampler
from engram.distributed import ReplayShard, priority_updates, unpack
from engram.envs.transforms import MultiStepTransform
from engram.errors import ShardUnavailableError, StorageError
from engram.store.layout import RowLayout
from engram.testing import chi_square

LEAST = 1e-4  # of the probability that counts deviate as far as they do


def links(n: int = 2, sampler: Any = RandomSampler) -> list[Link]:
    return [Link(ReplayShard(400, lanes=4, idle=1e9, timeout=0.0, sampler=sampler())) for _ in range(n)]


def stored(link: Link) -> list[int]:
    """The numbers of all rows of a shard, lane by lane."""
    return read_all(link.shard)


class TestWriting:
    def test_rows_of_one_client_go_to_one_shard_in_their_order(self) -> None:
        ls = links()
        rb = client(ls)
        index = torch.cat([rb.extend(rows(k, k + 7)) for k in range(0, 70, 7)])
        rb.flush()
        assert stored(ls[0]) == list(range(70)) and index.tolist() == list(range(70)) and len(rb) == 70

    def test_clients_go_to_the_shards_in_turn(self) -> None:
        ls = links()
        for k in range(4):
            rb = client(ls)
            rb.extend(rows(k, k + 1))
            rb.flush()
        assert [sorted(stored(link)) for link in ls] == [[0, 2], [1, 3]]

    @each("local", [False, True])
    def test_threads_that_write_take_turns(self, local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        link = Link(shard(scratch_dir=tmp_path / str(local)))
        rb = client([link], local=[local])
        rb.extend(rows(0, 1))
        producer, taken = rb._producer, []
        extend = producer.extend
        monkeypatch.setattr(producer, "extend", lambda *given: (taken.append(is_taken(rb._writing)), extend(*given))[1])
        rb.extend(rows(1, 5))
        rb.flush()
        assert taken == [True] and stored(link) == list(range(5))

    def test_no_other_thread_sends_what_is_held_while_one_writes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rb = client([Link(shard())])
        rb.extend(rows(0, 1))
        producer, sent = rb._producer, []
        with ThreadPoolExecutor(1) as another:
            monkeypatch.setattr(
                producer, "_look_for_place", lambda n: sent.append(another.submit(producer.send_held).result())
            )
            rb.extend(rows(1, 5))
        assert sent == [False]

    def test_an_index_is_that_of_its_row(self) -> None:
        ls = links()
        client(ls).extend(rows(0, 1))
        rb = client(ls)
        index = rb.extend(rows(10, 20))
        rb.flush()
        batch = rb.sample(64)
        own = batch["n"] >= 10
        assert torch.equal(batch["index"][own], index[batch["n"][own] - 10])

    @pytest.mark.parametrize("fate", ["call", "answer"])
    def test_rows_whose_call_or_answer_was_lost_go_in_once(self, fate: str) -> None:
        rng = random.Random(0)
        ls = links(1)
        ls[0].lose = lambda method: fate if rng.random() < 0.3 else None
        rb = client(ls)
        for k in range(0, 90, 9):
            rb.extend(rows(k, k + 9))
        rb.flush()
        ls[0].lose = lambda method: None
        assert stored(ls[0]) == list(range(90)) and rb.stats().unacknowledged == 0

    def test_a_shard_that_is_made_again_gets_what_was_not_in(self, tmp_path: Path) -> None:
        ls = [Link(shard(scratch_dir=tmp_path))]
        rb = client(ls)
        rb.extend(rows(0, 10))
        rb.flush()
        ls[0].lose = lambda method: "call"
        rb.extend(rows(10, 20))
        ls[0].shard.close()
        ls[0].shard, ls[0].lose = shard(scratch_dir=tmp_path), lambda method: None
        rb.extend(rows(20, 30))
        rb.flush()
        assert stored(ls[0]) == list(range(30))

    def test_a_shard_that_lost_its_rows_is_said_to_have_and_used_again(self) -> None:
        ls = links(1)
        rb = client(ls)
        rb.extend(rows(0, 10))
        rb.flush()
        ls[0].shard = links(1)[0].shard
        rb.extend(rows(10, 20))
        with pytest.warns(RuntimeWarning, match="without 10 rows"):
            rb.flush()
        assert stored(ls[0]) == list(range(10, 20))

    def test_one_whose_rows_have_all_been_replaced_goes_on_at_its_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engram.distributed.producers.LANE_KEPT", -1.0)
        ls = [Link(shard(capacity=40))]
        first, second = client(ls), client(ls)
        first.extend(rows(0, 3))
        first.flush()
        second.extend(rows(100, 180))
        second.flush()
        ls[0].lose = lambda method: "answer" if method == "extend" else None
        first.extend(rows(3, 6))
        ls[0].lose = lambda method: None
        first.flush()
        there = sorted(stored(ls[0]))
        assert there[:3] == [3, 4, 5] and there[3] > 130 and first.rows_in() == 6

    def test_rows_for_a_shard_that_is_away_are_refused_when_too_many_wait(self) -> None:
        ls = links(1)
        rb = client(ls, timeout=1.0)
        rb.extend(rows(0, 1))
        rb.flush()
        ls[0].lose = lambda method: "call"
        sent = 0
        with pytest.raises(ShardUnavailableError):
            for k in range(1, 100):
                rb.extend(rows(k, k + 1))
                sent = k
        ls[0].lose = lambda method: None
        rb.extend(rows(sent + 1, sent + 2))
        rb.flush()
        assert stored(ls[0]) == list(range(sent + 2))

    def test_no_more_rows_are_on_their_way_than_the_shard_has_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engram.distributed.shard._QUEUE_BYTES", 12 * LAYOUT.payload_bytes)
        ls = links(1)
        rb = client(ls)
        rb.extend(rows(0, 1))
        rb.flush()
        most = 0
        for k in range(1, 60, 5):
            rb.extend(rows(k, k + 5))
            most = max(most, rb._producer.unacknowledged)
        assert 5 < most <= 12

    def test_producers_that_begin_at_once_are_spread_over_the_shards(self) -> None:
        ls = links(4)
        writers = [client(ls) for _ in range(16)]  # each has heard of shards without producers
        for writer in writers:
            writer.extend(rows(0, 1))
        assert [len(link.shard.facts().producers) for link in ls] == [4] * 4

    def test_a_producer_joins_where_the_fewest_rows_were_written(self) -> None:
        ls = links(2)
        for n in (1, 30):
            writer = client(ls)
            writer.extend(rows(0, n))
            writer.close()
        few = min(ls, key=lambda link: link.shard.write_count)
        client(ls).extend(rows(0, 5))
        assert few.shard.write_count in (6, 35) and len(few.shard.facts().producers) == 1

    def test_the_index_is_that_of_the_rows_whoever_else_writes(self) -> None:
        ls = [Link(shard(capacity=120, lanes=2))]
        writers, index = [client(ls) for _ in range(5)], {}
        for n in range(12):
            for k, writer in enumerate(writers):
                at = writer.extend(rows(1000 * k + 2 * n, 1000 * k + 2 * n + 2))
                index.update(zip(at.tolist(), (1000 * k + 2 * n, 1000 * k + 2 * n + 1), strict=True))
        for writer in writers:
            writer.flush()
        slots = torch.tensor(sorted(index))
        there = whole(LAYOUT.unpack(ls[0].shard._storage.read_packed(slots).batch[0]))
        assert there.tolist() == [index[slot] for slot in slots.tolist()]

    def test_the_index_of_rows_that_pass_the_end_of_a_lane_goes_on_at_its_beginning(self) -> None:
        s = shard(capacity=40)  # lanes of ten rows
        for start in range(0, 180, 9):
            writer = client([Link(s)])  # so that many begin in the middle of a lane
            for k in range(start, start + 9, 3):
                at = writer.extend(rows(k, k + 3))
                assert whole(LAYOUT.unpack(s._storage.read_packed(at).batch[0])).tolist() == [k, k + 1, k + 2]
            writer.close()

    def test_one_step_is_stored(self) -> None:
        ls = links(1)
        rb = client(ls)
        assert [rb.add(rows(k, k + 1)[0]) for k in range(3)] == [0, 1, 2] and len(rb) == 3


class TestSampling:
    def two(self, sampler: Any = RandomSampler, **settings: Any) -> tuple[list[Link], Any]:
        """Two shards with the rows 0 to 50 and 100 to 150, and a client of them."""
        ls = links(2, sampler)
        for k in range(2):
            rb = client(ls, sampler=sampler(), **settings)
            rb.extend(rows(100 * k, 100 * k + 50, k))
            rb.flush()
        return ls, rb

    def test_batches_are_rows_of_all_shards(self) -> None:
        _, rb = self.two()
        numbers = torch.cat([whole(rb.sample()) for _ in range(10)])
        assert {int(n) // 100 for n in numbers} == {0, 1}

    def test_every_leaf_of_a_batch_can_be_written(self) -> None:
        _, rb = self.two()
        for leaf in rb.sample().values():
            leaf.zero_()
        assert len(whole(rb.sample()).unique()) > 1

    def test_nothing_is_drawn_from_an_empty_buffer(self) -> None:
        with pytest.raises(RuntimeError, match="empty"):
            client(links()).sample()

    def test_a_batch_size_is_needed(self) -> None:
        with pytest.raises(RuntimeError, match="batch_size not specified"):
            client(links(), batch_size=None).sample()

    def test_a_shard_that_is_away_is_left_out(self) -> None:
        ls, rb = self.two()
        rb.sample()
        ls[0].lose = lambda method: "call"
        numbers = torch.cat([whole(rb.sample()) for _ in range(80)])
        assert bool((numbers[-64:] >= 100).all()) and rb.stats().away == (0,)
        ls[0].lose = lambda method: None
        numbers = torch.cat([whole(rb.sample()) for _ in range(200)])
        assert bool((numbers < 100).any()) and rb.stats().away == ()

    def test_with_no_shard_left_there_is_an_error(self) -> None:
        ls, rb = self.two(timeout=1.0)
        for link in ls:
            link.lose = lambda method: "call"
        with pytest.raises(ShardUnavailableError):
            rb.sample()

    def test_one_without_rows_does_not_stand_for_those_that_are_away(self) -> None:
        ls = links(2)
        rb = client(ls, timeout=1.0)
        rb.extend(rows(0, 10))
        rb.sample()
        ls[0].lose = lambda method: "call"
        with pytest.raises(ShardUnavailableError, match="that has rows"):
            for _ in range(100):
                rb.sample()

    def test_rows_that_others_replaced_since_they_were_drawn_are_whole(self) -> None:
        ls = [Link(shard(capacity=80))]
        rb, writer = client(ls, batches_per_call=4), client(ls)
        gone = 0
        for k in range(0, 400, 10):
            writer.extend(rows(k, k + 10))
            writer.flush()
            ls[0].late = True
            batch = rb.sample()
            ls[0].late = False
            assert len(batch) == 16
            gone += int((whole(batch) < k - 20).sum())
        assert gone > 0  # when their batch was handed out

    def test_slices_are_whole_and_marked(self) -> None:
        _, rb = self.two(lambda: SliceSampler(slice_len=4, traj_key="traj"))
        for _ in range(20):
            batch = rb.sample()
            assert bool((whole(batch).reshape(-1, 4).diff() == 1).all())
            assert batch["next", "truncated"].reshape(-1, 4).tolist() == [[False, False, False, True]] * 4

    def test_slices_are_whole_where_answers_are_lost(self) -> None:
        ls, rb = self.two(lambda: SliceSampler(slice_len=4, traj_key="traj"))
        rng = random.Random(0)
        ls[0].lose = lambda method: "answer" if method == "sample" and rng.random() < 0.5 else None
        for _ in range(60):
            assert bool((whole(rb.sample()).reshape(-1, 4).diff() == 1).all())

    def test_batch_that_is_no_whole_number_of_slices_is_refused(self) -> None:
        with pytest.raises(ValueError, match="batch_size=10 is no multiple of slice_len=4; choose one that is"):
            self.two(lambda: SliceSampler(slice_len=4, traj_key="traj"))[1].sample(10)

    def test_slices_of_several_lengths_are_refused(self) -> None:
        with pytest.raises(ValueError, match="one length"):
            self.two(lambda: SliceSampler(slice_len=4, traj_key="traj", strict_length=False))[1].sample()


class TestPriorities:
    def buffer(self) -> tuple[list[Link], Any]:
        def sampler() -> PrioritizedSampler:
            return PrioritizedSampler(None, 1.0, 1.0, eps=0.0)

        ls = links(2, sampler)
        for k in range(2):
            rb = client(ls, sampler=sampler(), batches_per_call=4)
            rb.extend(rows(10 * k, 10 * k + 10))
            rb.flush()
        return ls, rb

    def test_updates_reach_their_rows(self) -> None:
        ls, rb = self.buffer()
        index = torch.cat([torch.arange(10), 400 + torch.arange(10)])
        rb.update_priority(index, torch.tensor([0.0] * 7 + [3.0] + [0.0] * 11 + [1.0]))
        rb.flush_priorities()
        assert [a.shard.totals(a.shard.incarnation).draws.share for a in ls] == [3.0, 1.0]
        batch = torch.cat([rb.sample() for _ in range(40)])[320:]
        weights = {int(n): float(w) for n, w in zip(batch["n"], batch["priority_weight"], strict=True)}
        assert weights == pytest.approx({7: 1 / 3, 19: 1.0})

    def test_they_are_sent_with_the_next_round(self) -> None:
        _, rb = self.buffer()
        for _ in range(20):
            batch = rb.sample()
            batch["td_error"] = torch.where(batch["n"] == 3, 1.0, 0.0)
            rb.update_tensordict_priority(batch)
        assert set(whole(torch.cat([rb.sample() for _ in range(8)])[-64:]).tolist()) == {3}

    def test_those_for_a_shard_that_is_away_are_set_when_it_is_back(self) -> None:
        ls, rb = self.buffer()
        info = rb.sample(return_info=True)[1]
        mine = info["index"] < 400
        index, generation = info["index"][mine], info["generation"][mine]
        for fate in ("call", "answer"):
            ls[0].lose = lambda method, fate=fate: fate if method in ("update_priority", "facts") else None
            for priority in (5.0, 0.0):
                rb.update_priority(index, priority, generation)
                rb.flush_priorities()
            ls[0].lose = lambda method: None
            assert rb.stats().away == ()
            rb.flush_priorities()
            left = 10 - len(index.unique())
            assert ls[0].shard.totals(ls[0].shard.incarnation).draws.share == pytest.approx(left * 1.0)

    def test_those_without_generations_are_dropped_while_their_shard_is_away(self) -> None:
        ls, rb = self.buffer()
        ls[0].lose = lambda method: "call"
        rb.update_priority(torch.arange(10), 5.0)
        with pytest.warns(RuntimeWarning, match="10 priorities of rows of shard 0 were dropped"):
            rb.flush_priorities()
        ls[0].lose = lambda method: None
        assert rb.stats().away == ()
        rb.flush_priorities()
        assert ls[0].shard.totals(ls[0].shard.incarnation).draws.share == 10.0

    def test_a_warning_says_so_once_for_each_outage(self) -> None:
        ls, rb = self.buffer()
        counts = []
        for outage in (1, 2):
            ls[0].lose = lambda method: "call"
            for _ in range(3):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    rb.update_priority(torch.arange(outage), 5.0)
                    rb.flush_priorities()
                counts.append([str(one.message).split()[0] for one in caught])
            ls[0].lose = lambda method: None
            assert rb.stats().away == ()
        assert counts == [["1"], [], [], ["2"], [], []]

    def test_a_warning_says_so_where_more_wait_than_there_is_room_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(priority_updates, "_MOST_WAITING", 12)
        ls, rb = self.buffer()
        ls[0].lose = lambda method: "call"
        generation = torch.arange(10)
        rb.update_priority(torch.arange(10), 5.0, generation)
        rb.flush_priorities()
        rb.update_priority(torch.arange(10), 0.0, generation)
        with pytest.warns(RuntimeWarning, match="8 priorities of rows of shard 0 were dropped"):
            rb.flush_priorities()

    @each("priority", [-1.0, float("nan"), torch.ones(3)])
    def test_wrong_ones_are_refused(self, priority: Any) -> None:
        with pytest.raises(ValueError):
            self.buffer()[1].update_priority(torch.arange(2), priority)

    def test_none_is_refused_in_words(self) -> None:
        with pytest.raises(TypeError, match=r"priorities are a number, .* found a NoneType: None; nothing was changed"):
            self.buffer()[1].update_priority(torch.arange(2), None)

    def test_columns_with_gaps_are_copied_without_a_warning(self) -> None:
        ls, rb = self.buffer()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rb.update_priority(torch.arange(10)[::2], torch.arange(10, dtype=torch.float64)[::2])
        rb.flush_priorities()
        found = ls[0].shard._sampler.priorities(torch.arange(0, 10, 2), storage=ls[0].shard._storage)
        assert found.tolist() == [0, 2, 4, 6, 8]

    def test_rows_outside_are_refused(self) -> None:
        with pytest.raises(IndexError, match="800 is not one of 0 to 799"):
            self.buffer()[1].update_priority(torch.tensor([800]), 1.0)

    def test_a_client_that_no_shard_has_answered_takes_updates(self) -> None:
        ls, _ = self.buffer()
        for link in ls:
            link.silent = True
        rb = client(ls, sampler=PrioritizedSampler(None, 1.0, 1.0, eps=0.0))
        rb.update_priority(torch.arange(10), 3.0)
        with pytest.raises(IndexError, match="-1 is not one of"):
            rb.update_priority(torch.tensor([-1]), 1.0)
        rb.update_priority(torch.tensor([800, 799]), 1.0, torch.tensor([0, 0]))
        rb.flush_priorities()
        for link in ls:
            link.silent = False
        with pytest.warns(RuntimeWarning, match="1 priorities were dropped: their indices"):
            rb.flush_priorities()
        assert ls[0].shard.totals(ls[0].shard.incarnation).draws.share == 30.0

    def test_no_more_updates_wait_for_shards_that_never_answered_than_there_is_room_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(priority_updates, "_MOST_WAITING", 12)
        ls, _ = self.buffer()
        for link in ls:
            link.silent = True
        rb = client(ls, sampler=PrioritizedSampler(None, 1.0, 1.0, eps=0.0))
        rb.update_priority(torch.arange(10), 3.0)
        with pytest.warns(RuntimeWarning, match="the oldest 10 priorities were dropped"):
            rb.update_priority(torch.arange(10), 2.0)

    @each("end", ["extend", "flush", "close"])
    def test_updates_of_a_producer_that_never_draws_are_sent(self, end: str) -> None:
        ls = links(1, self.sampler)
        rb = client(ls, sampler=self.sampler())
        index = rb.extend(rows(0, 10))
        rb.update_priority(index, 0.5)
        index.zero_()  # the caller's to change
        if end == "extend":
            rb.extend(rows(10, 11), priority=0.25)
            assert rb.extend(rows(11, 12), priority=0.25).tolist() == [11]
        else:
            getattr(rb, end)()
        share = ls[0].shard.totals(ls[0].shard.incarnation).draws.share
        assert share == (5.5 if end == "extend" else 5.0)

    def test_updates_with_and_without_generations_are_set_in_their_order(self) -> None:
        ls, rb = self.buffer()
        for generation in (None, torch.tensor([3]), None):
            rb.update_priority(torch.tensor([3]), 2.0, generation)
            rb.update_priority(torch.tensor([3]), 9.0, None if generation is not None else torch.tensor([3]))
        rb.flush_priorities()
        assert self.priorities(ls[0], torch.tensor([3])) == [9.0]

    @pytest.mark.parametrize("newer", [None, torch.tensor([3])])
    def test_one_whose_call_was_lost_does_not_take_the_place_of_a_newer_one(self, newer: torch.Tensor | None) -> None:
        ls, rb = self.buffer()
        fates = iter(["call"])
        ls[0].lose = lambda method: next(fates, None) if method == "update_priority" else None
        rb.update_priority(torch.tensor([3, 4]), 2.0, torch.tensor([3, 4]))
        rb.extend(rows(20, 21))  # with which they are sent
        rb.update_priority(torch.tensor([3]), 9.0, newer)
        rb.extend(rows(21, 22))
        for _ in range(2):
            rb.flush()
        assert self.priorities(ls[0], torch.tensor([3, 4])) == [9.0, 2.0]

    def test_an_update_that_a_shard_refuses_keeps_no_rows_out(self) -> None:
        ls, rb = self.buffer()
        with pytest.warns(RuntimeWarning, match="index 399 has not been written"):
            for k in range(30):
                rb.update_priority(torch.tensor([399]), 1.0)
                rb.extend(rows(100 + k, 101 + k))
        with pytest.raises(IndexError, match="has not been written"):
            rb.flush()
        assert [n for link in ls for n in stored(link) if n >= 100] == list(range(100, 130))

    @staticmethod
    def sampler() -> PrioritizedSampler:
        return PrioritizedSampler(None, 1.0, 1.0, eps=0.0)

    @staticmethod
    def priorities(link: Link, index: torch.Tensor) -> list[float]:
        return link.shard._sampler.priorities(index, storage=link.shard._storage).tolist()


class TestPrioritiesThatComeWithRows:
    def buffer(self, path: Path, local: bool = False) -> tuple[Link, Any]:
        link = Link(self.shard(path))
        return link, client([link], sampler=TestPriorities.sampler(), local=[local])

    def shard(self, path: Path) -> ReplayShard:
        return shard(scratch_dir=path, sampler=TestPriorities.sampler())

    def priorities(self, link: Link, index: torch.Tensor) -> list[float]:
        return TestPriorities.priorities(link, index)

    @pytest.mark.parametrize("local", [False, True])
    def test_rows_have_them_and_others_that_of_new_rows(self, tmp_path: Path, local: bool) -> None:
        link, rb = self.buffer(tmp_path, local)
        given = torch.tensor([0.5, 4.0, 0.25], dtype=torch.float64)
        index = [rb.extend(rows(0, 3), priority=given), rb.extend(rows(3, 5)), rb.extend(rows(5, 7), priority=2.0)]
        given.fill_(9.0)  # the caller's to change
        index.append(torch.tensor([rb.add(rows(7, 8)[0], priority=0.125)]))
        rb.flush()
        assert self.priorities(link, torch.cat(index)) == [0.5, 4.0, 0.25, 4.0, 4.0, 2.0, 2.0, 0.125]
        rb.close()
        link.shard.close()
        link.shard = self.shard(tmp_path)
        assert self.priorities(link, torch.cat(index)) == [0.5, 4.0, 0.25, 4.0, 4.0, 2.0, 2.0, 0.125]

    @each("fate", ["call", "answer"])
    @each("local", [False, True])
    def test_they_are_set_once_though_the_call_is_made_again(self, tmp_path: Path, fate: str, local: bool) -> None:
        link, rb = self.buffer(tmp_path, local)
        lost = iter([fate, fate])
        link.lose = lambda method: next(lost, None) if method in ("extend", "update_priority") else None
        given = torch.tensor([0.5, 0.5, 2.0, 2.0], dtype=torch.float64)
        index = rb.extend(rows(0, 4), priority=given)
        given.fill_(9.0)  # the caller's to change
        if fate == "answer":  # another client gives one of them a newer one, before the rows are sent again
            link.shard.update_priority(link.shard.incarnation, index[:1], torch.tensor([7.0], dtype=torch.float64))
        for _ in range(6):
            rb.flush()
        assert stored(link) == [0, 1, 2, 3]
        newest = 7.0 if fate == "answer" else 0.5
        assert self.priorities(link, index) == [newest, 0.5, 2.0, 2.0]

    def test_a_shard_killed_between_rows_and_priorities_sets_them_when_they_are_sent_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link, rb = self.buffer(tmp_path)
        rb.extend(rows(0, 2), priority=0.5)
        with monkeypatch.context() as patched:
            patched.setattr(ReplayShard, "_give_priorities", lambda *args: link.end())
            link.lose = lambda method: "answer" if method == "extend" else None
            index = rb.extend(rows(2, 6), priority=torch.tensor([0.5, 4.0, 3.0, 2.0]))
        link.lose, link.shard = (lambda method: None), self.shard(tmp_path)
        link.shard.update_priority(link.shard.incarnation, index[3:], torch.tensor([8.0], dtype=torch.float64))
        rb.flush()
        assert stored(link) == list(range(6)) and self.priorities(link, index) == [0.5, 4.0, 3.0, 8.0]

    @each("priority", [-1.0, float("nan"), torch.ones(3), torch.tensor([1.0, float("inf")])])
    def test_wrong_ones_are_refused_with_their_rows(self, tmp_path: Path, priority: Any) -> None:
        link, rb = self.buffer(tmp_path)
        with pytest.raises(ValueError):
            rb.extend(rows(0, 2), priority=priority)
        rb.extend(rows(5, 7))
        rb.flush()
        assert stored(link) == [5, 6]

    def test_buffers_without_priorities_refuse_them(self) -> None:
        ls = links(1)
        with pytest.raises(ValueError, match="RandomSampler draws without priorities"):
            client(ls).extend(rows(0, 2), priority=1.0)
        link_shard = ls[0].shard
        with pytest.raises(ValueError, match="draws without them"):
            write(shard(), "a", rows(0, 2), priority=torch.ones(2, dtype=torch.float64))
        assert link_shard.layout is None

    def test_a_transform_that_writes_other_steps_refuses_them(self, tmp_path: Path) -> None:
        link, _ = self.buffer(tmp_path)
        rb = client([link], sampler=TestPriorities.sampler(), transform=MultiStepTransform(n_steps=3, gamma=0.5))
        with pytest.raises(ValueError, match="call update_priority"):
            rb.extend(steps(0, 5), priority=1.0)
        assert rb.flush_transforms().tolist() == []


class TestLife:
    def test_emptying_forgets_every_row_and_writing_goes_on(self) -> None:
        ls = links(2)
        rb = client(ls)
        rb.extend(rows(0, 10))
        rb.sample()
        rb.empty()
        assert len(rb) == 0
        rb.extend(rows(50, 60))
        assert bool((whole(rb.sample()) >= 50).all()) and len(rb) == 10

    def test_another_clients_emptying_is_noticed(self) -> None:
        ls = links(1)
        rb, other = client(ls), client(ls)
        rb.extend(rows(0, 10))
        rb.flush()
        other.empty()
        rb.extend(rows(10, 20))
        rb.flush()
        assert stored(ls[0]) == list(range(10, 20)) and bool((whole(rb.sample()) >= 10).all())

    def test_one_that_closes_leaves_its_rows(self) -> None:
        ls = [Link(shard())]
        for k in range(3):
            rb = client(ls)
            rb.extend(rows(k, k + 1))
            rb.close()
        assert sorted(stored(ls[0])) == [0, 1, 2] and ls[0].shard.facts().producers == ()

    def test_a_layout_that_is_not_the_shards_is_refused(self) -> None:
        ls = links(1)
        client(ls).extend(rows(0, 1))
        with pytest.raises(ValueError, match="layout"):
            client(ls).extend(rows(0, 1).exclude("wide"))
        assert LAYOUT.paths == {("n",), ("wide",), ("traj",)}


class TestOnTheMachineOfTheShard:
    def test_rows_are_written_and_drawn_without_calls(self, tmp_path: Path) -> None:
        ls = [Link(shard(scratch_dir=tmp_path))]
        rb = client(ls, local=[True])
        rb.extend(rows(0, 10))
        assert bool((whole(rb.sample()) < 10).all())
        before = len(ls[0].calls)
        for k in range(10, 50, 10):
            rb.extend(rows(k, k + 10))
            whole(rb.sample())
        assert len(ls[0].calls) == before and stored(ls[0]) == list(range(50)) and len(rb) == 50

    @pytest.mark.parametrize("local", [(True, True), (True, False)])
    def test_of_several_shards_those_that_are_not_here_are_asked(self, tmp_path: Path, local: tuple[bool, ...]) -> None:
        ls = [Link(shard(scratch_dir=tmp_path / str(k))) for k in range(2)]
        for k in range(2):
            writer = client(ls)
            writer.extend(rows(1000 * k, 1000 * k + 90 * (k + 1)))  # the ring of the second one has wrapped
            writer.flush()
        rb = client(ls, local=local, generator=torch.Generator().manual_seed(0))
        for link in ls:
            link.calls.clear()
        batch = [rb.sample() for _ in range(1000)]
        assert [("draw" in link.calls) for link in ls] == [not one for one in local]
        numbers = torch.cat([whole(one) for one in batch])
        counts = torch.bincount(numbers, minlength=1180)
        assert chi_square(torch.cat([counts[:90], counts[1080:1180]])) > LEAST and int(counts.sum()) == 16_000
        stored_at = {n: k for k, link in enumerate(ls) for n in stored(link)}
        index = torch.cat([one["index"] for one in batch])
        assert [stored_at[int(n)] for n in numbers[:500]] == (index[:500] // 400).tolist()

    def test_rows_that_were_overwritten_since_the_look_are_left_out(self, tmp_path: Path) -> None:
        ls = [Link(shard(scratch_dir=tmp_path / str(k))) for k in range(2)]
        writers = [client(ls) for _ in ls]
        for k, writer in enumerate(writers):
            writer.extend(rows(1000 * k, 1000 * k + 100))
            writer.flush()
        rb = client(ls, local=[True, True], batches_per_call=4)
        for k in range(0, 2000, 30):
            for writer in writers:
                writer.extend(rows(10_000 + k, 10_030 + k))
                writer.flush()
            whole(rb.sample())

    def test_a_load_by_another_client_is_seen_from_beside(self, tmp_path: Path) -> None:
        ls = [Link(shard(scratch_dir=tmp_path / str(k))) for k in range(2)]
        writer, rb = client(ls), client(ls, local=[True, True], batches_per_call=1)
        writer.extend(rows(0, 50))
        writer.dumps(tmp_path / "saved")
        writer.extend(rows(50, 90))
        writer.flush()
        assert int(max(whole(rb.sample(200)))) >= 50
        writer.empty()
        with pytest.raises(RuntimeError, match="empty"):
            for _ in range(5):  # rounds that were read before
                rb.sample(200)
        writer.loads(tmp_path / "saved")
        assert {int(n) < 50 for _ in range(5) for n in whole(rb.sample(200))} == {True}

    def test_others_see_what_is_written(self, tmp_path: Path) -> None:
        ls = [Link(shard(scratch_dir=tmp_path))]
        beside, away = client(ls, local=[True]), client(ls)
        beside.extend(rows(0, 10))
        away.extend(rows(100, 110))
        away.flush()
        assert {int(n) // 100 for n in whole(beside.sample(200))} == {0, 1}
        assert {int(n) // 100 for n in whole(away.sample(200))} == {0, 1}

    def test_no_slice_goes_on_from_another_producer(self, tmp_path: Path) -> None:
        def sampler() -> SliceSampler:
            return SliceSampler(slice_len=4, traj_key="traj")

        ls = [Link(shard(30, scratch_dir=tmp_path, sampler=sampler()))]
        for k, local in enumerate((False, True, False, True)):
            rb = client(ls, local=[local], sampler=sampler())
            rb.extend(rows(100 * k, 100 * k + 6))
            rb.close()
        drawn = whole(client(ls, sampler=sampler()).sample(800)).reshape(-1, 4)
        assert bool((drawn.diff() == 1).all()) and {int(n) // 100 for n in drawn[:, 0]} == {0, 1, 2, 3}

    def test_emptying_stops_its_own_writing_first(self, tmp_path: Path) -> None:
        ls = [Link(shard(scratch_dir=tmp_path))]
        rb = client(ls, local=[True])
        rb.extend(rows(0, 10))
        rb.empty()
        rb.extend(rows(50, 60))
        assert stored(ls[0]) == list(range(50, 60)) and bool((whole(rb.sample()) >= 50).all())


class TestNames:
    @pytest.mark.parametrize("local", [False, True])
    def test_who_takes_the_name_of_one_that_died_goes_on_with_its_rows(self, tmp_path: Path, local: bool) -> None:
        ls = [Link(shard(scratch_dir=tmp_path / str(k))) for k in range(2)]
        client(ls).extend(rows(100, 101))  # so that the next one gets the other shard
        first = client(ls, local=[local] * 2).producing_as("collector 0")
        assert first.rows_in() == 0
        first.extend(rows(0, 10))
        first.flush()
        if local:
            first._producer.release()  # as its end does
        again = client(ls, local=[local] * 2).producing_as("collector 0")
        assert again.rows_in() == 10
        again.extend(rows(10, 15))
        again.flush()
        assert stored(ls[1]) == list(range(15))


def steps(start: int, stop: int) -> TensorDict:
    """Steps of a trajectory that does not end, with a reward of 1 each."""
    n = stop - start
    following = {"reward": torch.ones(n, 1), "done": torch.zeros(n, 1, dtype=torch.bool)}
    return TensorDict({"n": torch.arange(start, stop), "next": following}, [n])


class TestTransformsThatHoldStepsBack:
    def clients(self, n: int = 1, **settings: Any) -> tuple[list[Link], list[Any]]:
        ls = links(1)
        transform = MultiStepTransform(n_steps=3, gamma=0.5)
        return ls, [client(ls, transform=transform, **settings) for _ in range(n)]

    def returns(self, link: Link) -> dict[int, float]:
        """The n-step return of each stored step."""
        rb = client([link])
        batch, info = rb.sample(400, return_info=True)
        numbers = batch["n"].tolist()
        assert len(set(zip(numbers, info["index"].tolist(), strict=True))) == len(set(numbers))  # each is in once
        return dict(zip(numbers, batch["next", "reward"].flatten().tolist(), strict=True))

    def test_what_they_hold_is_written_when_the_producer_closes(self) -> None:
        ls, [rb] = self.clients()
        assert len(rb.extend(steps(0, 5))) == 3
        rb.close()
        assert self.returns(ls[0]) == {0: 1.75, 1: 1.75, 2: 1.75, 3: 1.5, 4: 1.0}

    def test_it_is_written_on_request_and_once(self) -> None:
        ls, [rb] = self.clients()
        rb.extend(steps(0, 5))
        assert [len(rb.flush_transforms()) for _ in range(2)] == [2, 0]
        rb.flush()
        assert len(self.returns(ls[0])) == 5 and rb.stats().accepted == 5

    def test_waiting_for_rows_does_not_end_their_returns(self) -> None:
        ls, [rb] = self.clients()
        rb.extend(steps(0, 5))
        rb.flush()
        rb.extend(steps(5, 8))
        rb.close()
        assert self.returns(ls[0])[4] == 1.75

    def test_each_producer_has_its_own(self) -> None:
        ls, [rb] = self.clients()
        producers = [rb.producing_as(name) for name in "ab"]
        for start in (0, 2, 4):
            for k, one in enumerate(producers):
                one.extend(steps(100 * k + start, 100 * k + start + 2))
        for one in producers:
            one.close()
        assert sorted(self.returns(ls[0])) == [*range(6), *range(100, 106)]
        assert read_numbers(ls[0]) == [*range(6), *range(100, 106)]

    def test_another_client_does_not_get_the_steps_that_wait(self) -> None:
        ls, [rb] = self.clients()
        rb.extend(steps(0, 5))
        other = rb.producing_as("other")
        other.close()
        rb.close()
        assert len(self.returns(ls[0])) == 5

    def test_a_transform_that_was_appended_goes_along(self) -> None:
        ls = links(1)
        rb = client(ls).append_transform(MultiStepTransform(n_steps=3, gamma=0.5))
        other = rb.producing_as("other")
        other.extend(steps(0, 5))
        other.close()
        assert self.returns(ls[0])[0] == 1.75

    def test_emptying_drops_what_waits(self) -> None:
        ls, [rb] = self.clients()
        rb.extend(steps(0, 5))
        rb.empty()
        rb.extend(steps(10, 12))
        rb.close()
        assert sorted(self.returns(ls[0])) == [10, 11]


def read_numbers(link: Link) -> list[int]:
    """The numbers of all rows of a shard of `steps`, lane by lane."""
    numbers: list[int] = []
    layout = RowLayout.from_bytes(link.shard.layout)
    for lane, (first, stop) in enumerate(link.shard.ranges(link.shard.incarnation).tolist()):
        sequence = torch.arange(first, stop)
        taken = link.shard.take(link.shard.incarnation, torch.full_like(sequence, lane), sequence)
        numbers += unpack(layout, taken.block)["n"].tolist()
    return numbers


class TestCounts:
    @pytest.mark.parametrize("local", [False, True])
    def test_accepted_rows_are_counted_over_all_tenancies(self, tmp_path: Path, local: bool) -> None:
        ls = [Link(shard(scratch_dir=tmp_path))]
        rb = client(ls, local=[local])
        rb.extend(rows(0, 10))
        rb.empty()
        assert rb.stats().accepted == 10
        rb.extend(rows(10, 15))
        other = client(ls)
        other.extend(rows(100, 107))
        other.flush()
        assert (rb.stats().accepted, rb.stats().writes, other.stats().accepted) == (15, 12, 7)
        rb.close()
        assert rb.stats().accepted == 15

    def test_rows_that_others_have_replaced_are_counted_once(self) -> None:
        ls = [Link(shard(capacity=4))]
        first, second = client(ls), client(ls)
        for k in range(3):
            first.extend(rows(k, k + 1))
            second.extend(rows(10 + k, 11 + k))
            first.flush()
            second.flush()
        assert first.stats().accepted == second.stats().accepted == 3


class TestFactsAfterAChange:
    def test_what_is_known_of_shards_is_of_after_it(self, tmp_path: Path) -> None:
        ls = [Link(shard()) for _ in range(2)]
        for k in range(2):
            write(ls[k].shard, "another", rows(10 * k, 10 * k + 10))
        rb = client(ls)
        rb.dumps(tmp_path)
        for link in ls:
            link.late = True  # answers come when somebody waits for them
        rb.empty()
        assert len(rb) == 0
        rb.loads(tmp_path)
        assert len(rb) == 20


class TestAShardWithOlderData:
    """The folder of a shard is replaced by an older copy while it is down, as from a backup."""

    def test_what_is_missing_is_told_and_the_producer_goes_on_without_doubles(self, tmp_path: Path) -> None:
        folder = tmp_path / "shard"
        link = Link(shard(scratch_dir=folder))
        rb = client([link])
        rb.extend(rows(0, 10))
        rb.flush()
        link.shard.close()
        shutil.copytree(folder, tmp_path / "older")
        link.shard = shard(scratch_dir=folder)
        rb.extend(rows(10, 30))
        rb.flush()
        link.end()
        shutil.rmtree(folder)
        (tmp_path / "older").rename(folder)
        link.shard = shard(scratch_dir=folder)
        with pytest.warns(RuntimeWarning, match="came back without 20 rows"):
            rb.extend(rows(30, 40))
            rb.flush()
        assert stored(link) == [*range(10), *range(30, 40)]


class TestCallsThatAreDeliveredTwice:
    def test_rows_are_in_once_and_in_order(self) -> None:
        rng = random.Random(0)
        ls = [Link(shard()) for _ in range(2)]
        late: list[tuple[Any, tuple[Any, ...]]] = []

        class Twice(Link):
            def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> Any:
                if method in ("extend", "join", "admit", "update_priority"):
                    late.append((self.shard, (method, arguments)))
                if late and rng.random() < 0.5:  # some call of before comes once more, at any time later
                    one, (name, given) = late[rng.randrange(len(late))]
                    with contextlib.suppress(StorageError, ValueError):
                        getattr(one, name)(*given)
                return super().call(method, *arguments, answer_bytes=answer_bytes)

        twice = [Twice(link.shard) for link in ls]
        for number in range(2):
            rb = client(twice)
            for k in range(0, 150, 5):
                rb.extend(rows(1000 * number + k, 1000 * number + k + 5))
            rb.flush()
        found = [stored(link) for link in ls]
        assert sorted(found) == [list(range(150)), list(range(1000, 1150))]
