"""What a client of many shards costs: CPU time of a batch in the process that draws, without what carries calls.

    python -m benchmarks.cluster_client                      uniform and prioritised, over 1, 16, 64 and 256 shards
    python -m benchmarks.cluster_client --lanes              a shard's answer, and `sample` of a store, by its lanes

The shards are in this process, and their own time is not counted: what is left is dividing draws among them, their
answers, and making batches of these. Each figure is the least of several rounds, which take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.data import cartpole
from engram.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, ReplayBuffer, Sampler
from engram.distributed import ReplayShard, ShardedReplayBuffer, ShardedSettings, pack
from engram.distributed.client import PendingCall, ShardLink
from engram.distributed.shard import DrawnRows
from engram.kernel.rows import RowLayout

BATCH, ROWS, ROUNDS = 256, 1000, 3
PREPARED = 8192  # rows of an answer that is given again and again
SHARDS, LANES = (1, 16, 64, 256), (1, 64, 1024)
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "uniform": RandomSampler,
    "prioritised": lambda: PrioritizedSampler(None, 0.6, 0.4),
}


class _Answer(PendingCall):
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def result(self, timeout: float) -> Any:
        return self._answer

    def has_come(self) -> bool:
        return True


class CountingLink(ShardLink):
    """Calls of a shard in this process, whose time is counted apart.

    Attributes:
        seconds: CPU time of all shards.
        calls: how many calls there were.
    """

    seconds, calls = 0.0, 0

    def __init__(self, shard: ReplayShard) -> None:
        self._shard = shard

    def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
        began = time.thread_time()
        answer = _Answer(getattr(self._shard, method)(*arguments))
        CountingLink.calls += 1
        CountingLink.seconds += time.thread_time() - began
        return answer


class PreparedLink(ShardLink):
    """Answers that a shard in this process gave before: nothing of what it does is in a count.

    `draw` and `sample` are answered with the first rows of one long answer, other calls as ever, but for priorities,
    which are set in no shard.
    """

    def __init__(self, shard: ReplayShard) -> None:
        self._shard = shard
        self._drawn: DrawnRows = shard.sample(shard.incarnation, PREPARED)

    def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
        if method == "update_priority":
            return _Answer(self._drawn.totals)
        if method not in ("draw", "sample"):
            return _Answer(getattr(self._shard, method)(*arguments))
        n, drawn = arguments[1], self._drawn
        ratio = None if drawn.ratio is None else drawn.ratio[:n]
        block, slots, generation = drawn.block.start(n), drawn.slots[:n], drawn.generation[:n]
        return _Answer(drawn._replace(block=block, slots=slots, generation=generation, ratio=ratio))


def filled_shard(rows: int, lanes: int, sampler: Sampler | None = None) -> ReplayShard:
    """A shard of so many rows, all of which one producer wrote."""
    data = cartpole(ROWS)
    layout = RowLayout.of(data, 1)
    shard = ReplayShard(rows, lanes=lanes, sampler=sampler)
    shard.adopt(shard.incarnation, layout.to_bytes())
    tenancy = shard.join(shard.incarnation, "measured")
    block = pack(layout, data)
    for first in range(0, rows, ROWS):
        shard.extend(shard.incarnation, "measured", tenancy.number, first, block)
    return shard


def client_step(
    shards: int, kind: str, settings: dict[str, Any], link: Callable[[ReplayShard], ShardLink] = CountingLink
) -> Callable[[], object]:
    """A call that draws a batch, and gives it new priorities where draws are by priority."""
    make, generator = SAMPLERS[kind], torch.Generator().manual_seed(0)
    links = [link(filled_shard(ROWS, 2, make())) for _ in range(shards)]
    buffer = ShardedReplayBuffer(links, ShardedSettings(make(), batch_size=BATCH, **settings), generator=generator)
    if kind == "uniform":
        return buffer.sample
    priorities = torch.rand(BATCH) + 0.1

    def step() -> None:
        batch = buffer.sample()
        buffer.update_priority(batch["index"], priorities, batch["generation"])

    return step


def of_client(step: Callable[[], object], batches: int) -> tuple[float, float]:
    """Seconds of CPU of the client for a batch, and calls of shards for it."""
    here, there, calls = time.thread_time(), CountingLink.seconds, CountingLink.calls
    for _ in range(batches):
        step()
    seconds = time.thread_time() - here - (CountingLink.seconds - there)
    return seconds / batches, (CountingLink.calls - calls) / batches


def of_calls(call: Callable[[], object], times: int = 200) -> float:
    """Seconds of CPU for one of so many calls."""
    began = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - began) / times


def measure_clients(batches: int, settings: dict[str, Any]) -> None:
    """Prints a line for each kind of draws and number of shards."""
    for kind in SAMPLERS:
        for shards in SHARDS:
            step = client_step(shards, kind, settings)
            of_client(step, 2 * batches)
            figures = [of_client(step, batches) for _ in range(ROUNDS)]
            cpu, calls = min(one[0] for one in figures), min(one[1] for one in figures)
            print(
                f"{kind:12} {shards:4} shards  {1e6 * cpu:8.1f} us CPU a batch  {calls:6.2f} calls a batch", flush=True
            )


def measure_lanes() -> None:
    """Prints what answers cost by the number of lanes."""
    data = cartpole(ROWS)
    for lanes in LANES:
        buffer = ReplayBuffer(storage=LazyTensorStorage(64 * 1024, shared=True, lanes=lanes), batch_size=BATCH)
        shard = filled_shard(64 * 1024, lanes)
        for _ in range(66):
            buffer.extend(data)
        calls: dict[str, Callable[[], object]] = {
            "sample": buffer.sample,
            "totals": lambda shard=shard: shard.totals(shard.incarnation),
        }
        for call in calls.values():
            of_calls(call)
        line = {name: min(of_calls(call) for _ in range(4 * ROUNDS)) for name, call in calls.items()}
        print(
            f"{buffer.storage.lanes.store.lanes:5} lanes", *(f"{1e6 * us:8.1f} us {name}" for name, us in line.items())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", action="store_true", help="answers by the number of lanes, nothing else")
    parser.add_argument("--batches", type=int, default=2048, help="of a round")
    parser.add_argument("--batches-per-call", type=int, help="of the buffer; as it is made without saying")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.lanes:
        return measure_lanes()
    per_call = arguments.batches_per_call
    return measure_clients(arguments.batches, {} if per_call is None else {"batches_per_call": per_call})


if __name__ == "__main__":
    main()
