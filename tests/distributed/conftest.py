"""Of shards that are equal a producer gets the first, so that tests know which."""

from __future__ import annotations

import pytest


class _NoTies:
    def random(self) -> float:
        return 0.0


@pytest.fixture(autouse=True)
def first_of_equal_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.distributed.shard_choice._ties", _NoTies())
