"""A save of four shards that are killed at random while it is made: a load gets one whole save, whichever.

ENGRAM_RAY_SAVE_KILLS=10 makes so many of such saves.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ray

from cluster.rows import by_lane
from distributed.shards import rows
from engram.errors import CheckpointError, ShardUnavailableError

KILLS = int(os.environ.get("ENGRAM_RAY_SAVE_KILLS", "2"))
SHARDS, ROWS = 4, 20_000


def test_a_load_gets_all_shards_of_one_save(buffer: Any, tmp_path: Path) -> None:
    rng = random.Random(0)
    rb = buffer(SHARDS * 2 * ROWS * (KILLS + 3), num_shards=SHARDS, lanes=2, timeout=120.0)
    producers = [rb.producing_as(f"producer {k}") for k in range(SHARDS)]

    def write(a_round: int) -> None:
        for k, producer in enumerate(producers):
            start = 10**9 * k + a_round * ROWS
            producer.extend(rows(start, start + ROWS))
            producer.flush()

    def stored() -> list[list[int]]:
        numbers = sorted(lane for lane in by_lane(rb) if lane)
        of_producers = sorted(n // 10**9 for lane in numbers for n in lane)
        assert of_producers == sorted(list(range(SHARDS)) * (len(of_producers) // SHARDS))
        return numbers

    write(0)
    began = time.monotonic()
    rb.dumps(tmp_path)
    seconds = time.monotonic() - began
    in_force = stored()
    assert sum(map(len, in_force)) == SHARDS * ROWS
    assert len({producer._producer.shard.number for producer in producers}) == SHARDS
    failed = 0
    for a_round in range(1, KILLS + 1):
        write(a_round)
        now = stored()
        pid = ray.get(rng.choice(rb._actors).place.remote())[1]
        killer = threading.Timer(rng.random() * seconds, os.kill, (pid, signal.SIGKILL))
        killer.start()
        try:
            rb.dumps(tmp_path, timeout=120.0)
            in_force = now
        except (ShardUnavailableError, CheckpointError) as error:
            failed += 1
            print(f"save {a_round}: {type(error).__name__}")
        killer.join()
        rb.loads(tmp_path, timeout=120.0)
        assert stored() == in_force
    print(f"{failed} of {KILLS} saves were ended by a kill; one takes {1000 * seconds:.0f} ms")
