"""A shard and a client of different versions of engram: both are told, at once, and nothing is changed."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pytest

import engram
from contracts.waiting import NEVER
from distributed.shards import Link, client, rows, shard
from engram.distributed import RayReplayBuffer
from engram.errors import ShardVersionError


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> str:
    """Clients are of another version than shards."""
    monkeypatch.setattr("engram.distributed.client.__version__", "9.8.7")
    return "9.8.7"


def test_each_call_of_a_client_of_another_version_names_both(
    newer: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    links = [Link(shard()) for _ in range(2)]
    with caplog.at_level(logging.ERROR, "engram"):
        rb = client(links, timeout=NEVER)
        calls = (lambda: rb.extend(rows(0, 3)), rb.sample, rb.stats, lambda: rb.dumps(tmp_path), rb.rows_in, rb.empty)
        for call in calls:
            with pytest.raises(ShardVersionError) as told:
                call()
            assert newer in str(told.value) and engram.__version__ in str(told.value)
    assert [len(link.shard) for link in links] == [0, 0] and not links[0].shard.facts().producers
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all(newer in one and engram.__version__ in one for one in said)  # one of each shard


def test_the_error_is_the_same_after_it_was_sent() -> None:
    error = pickle.loads(pickle.dumps(ShardVersionError("1.2", "1.3")))
    assert (error.shard, error.client) == ("1.2", "1.3") and "engram 1.2" in str(error)


def test_a_buffer_that_another_version_has_sent_is_refused() -> None:
    rb = RayReplayBuffer.__new__(RayReplayBuffer)
    for version in ({"version": "9.8.7"}, {}):
        with pytest.raises(ShardVersionError, match=engram.__version__):
            rb.__setstate__({"actors": [], "nodes": [], "stays": [], "settings": None, **version})
