"""How large a cluster's parts must be: bytes, calls and CPU of collectors, shards and learners, and a simulation.

    python -m benchmarks.cluster_sizing                                      1000 collectors, 100 shards, one learner
    python -m benchmarks.cluster_sizing --per-call 400                       more batches in a round
    python -m benchmarks.cluster_sizing --row-bytes 28244 --per-call 400     pixels
    python -m benchmarks.cluster_sizing --measure                            costs here, with Ray of calls too

The simulation has every shard as a queue, in which the draws of learners wait for appends and for each other, and a
learner that keeps two rounds on their way. What is behind the defaults is in docs/how-to/many-machines.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import importlib.util
import random
import time


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster, its work, and what its parts cost.

    Attributes:
        frames_per_second: of one collector.
        updates: batches per second that all learners together want.
        fan_out: shards that are asked in one round of a learner.
        block: rows in a call that writes through Ray; 0: collectors write beside their shard, without calls.
        link: bytes per second of a machine's network.
        call_cpu: seconds of CPU of one call of an actor, on each of its two sides.
        frames_per_batch, reports: of a collector, and reports per second of all collectors together, at most.
        report_cpu, batch_cpu: seconds of CPU of the collectors' program for a report, beside its call, and a batch.
        row_in, row_out: seconds of CPU of a shard for a row that is appended, or drawn.
        byte_copy: seconds of CPU for a byte of a row, on each side.
        weight_bytes, weight_updates: of the policy, and how often a second it is published.
    """

    collectors: int = 1000
    shards: int = 100
    nodes: int = 50
    learners: int = 1
    frames_per_second: float = 1000.0
    row_bytes: int = 66
    batch: int = 256
    updates: float = 2000.0
    per_call: int = 64
    fan_out: int = 100
    block: int = 1000
    link: float = 1.25e9
    call_cpu: float = 0.22e-3
    row_in: float = 0.07e-6
    row_out: float = 0.02e-6
    byte_copy: float = 0.15e-9
    weight_bytes: float = 4e6
    weight_updates: float = 1.0
    frames_per_batch: int = 100
    reports: float = 400.0
    report_cpu: float = 0.4e-3
    batch_cpu: float = 6e-6

    @property
    def rows_in(self) -> float:
        """Rows per second that are written."""
        return self.collectors * self.frames_per_second

    @property
    def writing_share(self) -> float:
        """Of a shard's core, what writing takes."""
        rows = self.rows_in / self.shards
        calls = rows / self.block * self.call_cpu if self.block else 0.0
        return rows * (self.row_in + self.row_bytes * self.byte_copy) + calls

    @property
    def collecting_share(self) -> float:
        """Of the core of the program that has the collectors, what their reports take."""
        batches = self.rows_in / self.frames_per_batch
        return min(self.reports, batches) * (self.call_cpu + self.report_cpu) + batches * self.batch_cpu

    @property
    def rows_of_answer(self) -> float:
        """Rows that one shard gives to a round."""
        return self.batch * self.per_call / self.fan_out

    @property
    def shard_seconds(self) -> float:
        """CPU time of a shard for its part of a round."""
        return self.call_cpu + self.rows_of_answer * (self.row_out + self.row_bytes * self.byte_copy)

    @property
    def learner_seconds(self) -> float:
        """CPU time of a learner for a round: its calls, and merging the rows."""
        return self.fan_out * self.call_cpu + self.batch * self.per_call * self.row_bytes * self.byte_copy * 2


def report(c: Cluster) -> dict[str, float]:
    """Shares of what there is, 1.0 is all of it, by name."""
    rounds = c.updates / c.per_call
    drawn = c.updates * c.batch * c.row_bytes / c.learners
    sent = 0.0 if not c.block else c.rows_in * c.row_bytes / c.nodes
    return {
        "network of a node, rows in": sent / c.link,
        "network of a learner": drawn / c.link,
        "network of the node that publishes weights, if it serves all": c.weight_bytes
        * c.weight_updates
        * c.nodes
        / c.link,
        "core of the collectors' program": c.collecting_share,
        "core of a shard, writing": c.writing_share,
        "core of a shard, drawing": rounds * c.fan_out / c.shards * c.shard_seconds,
        "core of a learner, calls and merging": rounds / c.learners * c.learner_seconds,
    }


def simulate(c: Cluster, seconds: float = 5.0, ahead: int = 2, seed: int = 0) -> dict[str, float]:
    """Runs learners that train at their share of `updates`; returns batches per second, and how long rounds take.

    Draws of a shard wait for each other in turn; appends, which are many and short, slow them by the core's share.
    """
    rng = random.Random(seed)
    slowdown = 1 / max(1e-3, 1 - c.writing_share)
    free_at = [0.0] * c.shards  # when each shard has answered what it was asked
    training = c.per_call * c.learners / c.updates
    rounds, latencies = 0, []
    waiting: list[tuple[float, int]] = [(rng.random() * training, k) for k in range(c.learners)]
    heapq.heapify(waiting)
    on_their_way: list[list[tuple[float, float]]] = [[] for _ in range(c.learners)]
    link_free_at = [0.0] * c.learners
    answer_seconds = c.batch * c.per_call * c.row_bytes / c.link
    end = 0.0
    while waiting:
        now, k = heapq.heappop(waiting)
        if now > seconds:
            break
        cpu = 0.0
        while len(on_their_way[k]) < ahead:
            last = now
            for number, shard in enumerate(rng.sample(range(c.shards), c.fan_out)):
                asked = now + cpu + (number + 1) * c.call_cpu / 2
                free_at[shard] = max(asked, free_at[shard]) + c.shard_seconds * slowdown
                last = max(last, free_at[shard])
            cpu += c.fan_out * c.call_cpu / 2
            link_free_at[k] = max(link_free_at[k], now) + answer_seconds
            on_their_way[k].append((now, max(last, link_free_at[k])))
        began, arrived = on_their_way[k].pop(0)
        latencies.append(arrived - began)
        taken = max(now + cpu, arrived) + c.learner_seconds - c.fan_out * c.call_cpu / 2
        rounds, end = rounds + 1, taken
        heapq.heappush(waiting, (max(taken, now + training), k))
    latencies.sort()
    return {
        "batches per second": rounds * c.per_call / max(end, 1e-9),
        "median round, ms": 1e3 * latencies[len(latencies) // 2],
        "slowest of 100 rounds, ms": 1e3 * latencies[int(len(latencies) * 0.99)],
    }


def measure(rows: int = 200_000) -> dict[str, float]:
    """CPU time of a shard for a row that it appends and for one that it draws, in seconds, on this machine."""
    import torch
    from tensordict import TensorDict

    from engram.distributed import ReplayShard, pack
    from engram.store.layout import RowLayout

    torch.set_num_threads(1)
    steps = TensorDict(
        {"observation": torch.randn(1000, 4), "action": torch.zeros(1000, dtype=torch.int64),
         "next": {"observation": torch.randn(1000, 4), "reward": torch.zeros(1000, 1), "done": torch.zeros(1000, 1)},
        }, [1000],
    )  # fmt: skip
    layout = RowLayout.of(steps, 1)
    shard = ReplayShard(rows, lanes=1)
    shard.adopt(shard.incarnation, layout.to_bytes())
    tenancy = shard.join(shard.incarnation, "measured")
    block = pack(layout, steps)
    began = time.process_time()
    for first in range(0, rows, 1000):
        shard.extend(shard.incarnation, "measured", tenancy.number, first, block)
    row_in = (time.process_time() - began) / rows
    began = time.process_time()
    for _ in range(100):
        shard.sample(shard.incarnation, 16_384)
    row_out = (time.process_time() - began) / (100 * 16_384)
    return {"bytes of a row": float(layout.payload_bytes), "row_in": row_in, "row_out": row_out}


def measure_calls(calls: int = 1000) -> dict[str, float]:
    """CPU time of an actor's call on each side, and its time by the clock one after the other, in seconds."""
    import ray

    @ray.remote(num_cpus=0)
    class Idle:
        def call(self) -> float:
            return time.process_time()

    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    actor = Idle.remote()
    before = ray.get([actor.call.remote() for _ in range(100)])[-1]
    here, clock = time.process_time(), time.perf_counter()
    for _ in range(calls // 8):
        after = ray.get([actor.call.remote() for _ in range(8)])[-1]
    done = calls // 8 * 8
    costs = {
        "call_cpu, caller": (time.process_time() - here) / done,
        "call_cpu, actor": (after - before) / done,
        "call, by the clock": (time.perf_counter() - clock) / done,
    }
    ray.shutdown()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="costs of a row on this machine, nothing else")
    for field in dataclasses.fields(Cluster):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    arguments = vars(parser.parse_args())
    if arguments.pop("measure"):
        with_ray = importlib.util.find_spec("ray") is not None
        for name, value in {**measure(), **(measure_calls() if with_ray else {})}.items():
            print(f"{name:20} {value:.3g}")
        return
    if not 1 <= arguments["fan_out"] <= arguments["shards"]:
        parser.error("--fan-out must be between 1 and the number of shards")
    cluster = Cluster(**arguments)
    print(f"{cluster.rows_in:,.0f} rows/s in, {cluster.updates * cluster.batch:,.0f} out; "
          f"{cluster.rows_of_answer:,.0f} rows an answer")  # fmt: skip
    for name, share in sorted(report(cluster).items(), key=lambda one: -one[1]):
        print(f"{100 * share:8.1f} %  {name}")
    for name, value in simulate(cluster).items():
        print(f"{value:10,.1f}  {name}")


if __name__ == "__main__":
    main()
