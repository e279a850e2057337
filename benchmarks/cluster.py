"""Replay over a Ray cluster of two nodes on this machine, against what it must reach, TorchRL's Ray buffer and Reverb.

    make bench-ray                              everything that is installed
    make bench-ray CLUSTER="--rounds 3"         a look
    make bench-ray CLUSTER="--only calls"       the cases whose names begin so
    make bench-ray-peers                        makes the environments of TorchRL and of Reverb first

Every round gives each case one turn, so that a slow spell hits all alike; a figure is the median of the rounds, and of
a ratio that of the ratios within them. CPU time is that of the learner's or producer's process with all its threads,
"stores" that of the processes that hold the rows. Both nodes and all writers share the machine's cores: beside other
work, times by the clock say how busy it was, and CPU times what the library costs.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import ray
import torch

from benchmarks import machine
from benchmarks.cluster_turns import Figures, PeerProcess, Turn, cpu_of, turn
from benchmarks.data import cartpole
from engram.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer
from engram.distributed import RayReplayBuffer

FOLDER = Path(__file__).resolve().parent.parent
ROWS = 100_000
MANY_ROWS = 1_000_000
BATCH = 256
STEPS = 1000
TRAINING_S = 1e-3
WRITTEN_BESIDE = 1e6  # rows a second
PEERS = {
    "torchrl": (".venv-ray-peers", "benchmarks.cluster_torchrl"),
    "reverb": (".venv-reverb", "benchmarks.cluster_reverb"),
}

TurnOf = Callable[[float], Turn]


class Writer:
    """A producer in a process of its own."""

    def __init__(self, buffer: RayReplayBuffer) -> None:
        torch.set_num_threads(1)
        self._buffer, self._steps = buffer, cartpole(STEPS)
        self._buffer.extend(self._steps)
        self._buffer.flush()

    def ready(self) -> int:
        return os.getpid()

    def extend(self, seconds: float, rate: float | None = None) -> dict[str, float]:
        """Writes for so long, at most `rate` rows a second, until all rows are in."""
        clock, cpu, rows = time.perf_counter(), time.process_time(), 0
        while (now := time.perf_counter() - clock) < seconds:
            if rate is not None and rows > now * rate:
                time.sleep(rows / rate - now)
            self._buffer.extend(self._steps)
            rows += STEPS
        self._buffer.flush()
        return {"units": rows, "wall": time.perf_counter() - clock, "cpu": time.process_time() - cpu}


@dataclass(frozen=True)
class Goal:
    """One line of the table.

    Attributes:
        value: of all figures by the names of their cases; KeyError where one of them was not measured.
        target: None: there is none.
        least: whether the target is the least that it should be, else the most.
    """

    label: str
    unit: str
    target: float | None
    value: Callable[[dict[str, Figures]], float]
    least: bool = False

    def verdict(self, value: float) -> str:
        if self.target is None:
            return ""
        is_met = value >= self.target if self.least else value <= self.target
        return f"{'>=' if self.least else '<='} {self.target:,.10g}{'' if is_met else '  missed'}"


def _us(name: str, cpu: bool = False) -> Callable[[dict[str, Figures]], float]:
    return lambda figures: 1e6 * (figures[name].cpu if cpu else figures[name].wall)


def _rate(name: str) -> Callable[[dict[str, Figures]], float]:
    return lambda figures: figures[name].rate


def _median_ratio(of: Callable[[Turn], float], name: str, other: str) -> Callable[[dict[str, Figures]], float]:
    def value(figures: dict[str, Figures]) -> float:
        rounds = zip(figures[name].turns, figures[other].turns, strict=True)
        return statistics.median(of(a) / of(b) for a, b in rounds)

    return value


def _rates(name: str, other: str) -> Callable[[dict[str, Figures]], float]:
    return _median_ratio(lambda one: one.units / one.wall, name, other)


def _per_cpu(name: str, other: str) -> Callable[[dict[str, Figures]], float]:
    """Units for a second of CPU of both sides."""
    return _median_ratio(lambda one: one.units / (one.cpu + one.others), name, other)


GOALS = [
    Goal("same node, 1 M rows, an actor writes 1 M rows/s: sample(256)", "us, the median call", 45,
         lambda figures: 1e6 * figures["same sample"].call),
    Goal("", "us CPU", None, _us("same sample", cpu=True)),
    Goal("same node: extend(1000), one producer", "rows/s", 10e6, _rate("same extend"), least=True),
    Goal("through calls, 64 batches a call: sample(256)", "us", 200, _us("calls sample 64")),
    Goal("", "us CPU", 80, _us("calls sample 64", cpu=True)),
    Goal("the same, 1 ms of training a batch, against the loop alone", "x", 1.15,
         _median_ratio(lambda one: one.wall / one.units, "calls loop and sample 64", "calls loop")),
    Goal("", "x CPU", None, _median_ratio(lambda one: one.cpu / one.units, "calls loop and sample 64", "calls loop")),
    Goal("extend(1000) through Ray, one producer", "rows/s", 500e3, _rate("calls extend"), least=True),
    Goal("extend(1000) through Ray, the slower of two producers", "rows/s", 300e3, _rate("calls extend two"), True),
    Goal("prioritised sample and update, 16 a call", "us", 350, _us("priorities 16")),
    Goal("", "us CPU", None, _us("priorities 16", cpu=True)),
    Goal("prioritised sample and update, 64 a call", "us", 220, _us("priorities 64")),
    Goal("", "us CPU", None, _us("priorities 64", cpu=True)),
    Goal("batches/s, of TorchRL's, 64 a call", "x", 25, _rates("calls sample 64", "torchrl sample"), least=True),
    Goal("", "x for a second of CPU", None, _per_cpu("calls sample 64", "torchrl sample")),
    Goal("batches/s, of TorchRL's, one a call", "x", 2, _rates("calls sample 1", "torchrl sample"), least=True),
    Goal("", "x for a second of CPU", None, _per_cpu("calls sample 1", "torchrl sample")),
    Goal("rows/s in, of TorchRL's", "x", 12, _rates("calls extend", "torchrl extend"), least=True),
    Goal("", "x for a second of CPU", None, _per_cpu("calls extend", "torchrl extend")),
    Goal("batches/s, of Reverb, 64 a call", "x", 60, _rates("calls sample 64", "reverb sample"), least=True),
    Goal("", "x for a second of CPU", None, _per_cpu("calls sample 64", "reverb sample")),
    Goal("rows/s in, of Reverb", "x", 60, _rates("calls extend", "reverb extend"), least=True),
    Goal("", "x for a second of CPU", None, _per_cpu("calls extend", "reverb extend")),
]  # fmt: skip


class Cluster:
    """Buffers on a head, where this process is, and on a second node.

    Attributes:
        cases: what can be measured, by name.
    """

    def __init__(self, only: tuple[str, ...]) -> None:
        self._buffers: list[RayReplayBuffer] = []
        self._writers: list[Any] = []
        self._data, self._steps = cartpole(ROWS), cartpole(STEPS)
        self.cases: dict[str, TurnOf] = {}
        for name, prepare in {"local": self._local, "same": self._same, "calls": self._calls,
                              "priorities": self._priorities}.items():  # fmt: skip
            if not only or any(one.startswith(name) or name.startswith(one) for one in only):
                self.cases.update(prepare())
        self.cases = {name: one for name, one in self.cases.items() if not only or name.startswith(only)}

    def _buffer(self, rows: int, *, here: bool, fill: int | None = None, **settings: Any) -> RayReplayBuffer:
        config = {"resources": {"here" if here else "there": 1}}
        buffer = RayReplayBuffer(
            storage=LazyTensorStorage(rows), batch_size=BATCH, timeout=30.0, remote_config=config,
            **{"lanes": 1, **settings},
        )  # fmt: skip
        self._buffers.append(buffer)
        for _ in range(0, rows if fill is None else fill, ROWS):
            buffer.extend(self._data)
        buffer.flush()
        return buffer

    @staticmethod
    def _stores(buffer: RayReplayBuffer) -> list[int]:
        return [pid for _, pid in ray.get([actor.place.remote() for actor in buffer._actors])]

    def _writer(self, buffer: RayReplayBuffer) -> Any:
        writer = ray.remote(num_cpus=0, resources={"here": 1})(Writer).remote(buffer)
        ray.get(writer.ready.remote())
        self._writers.append(writer)
        return writer

    # ---- cases ----
    def _local(self) -> dict[str, TurnOf]:
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS, shared=True), batch_size=BATCH)
        buffer.extend(self._data)
        return {
            "local sample": lambda s: turn(buffer.sample, s),
            "local extend": lambda s: turn(lambda: buffer.extend(self._steps), s, STEPS),
        }

    def _same(self) -> dict[str, TurnOf]:
        buffer = self._buffer(2 * MANY_ROWS, here=True, lanes=2, fill=MANY_ROWS)
        two = self._buffer(MANY_ROWS, here=True, num_shards=2)
        writer = self._writer(buffer)
        for _ in range(MANY_ROWS // ROWS):
            ray.get(writer.extend.remote(0.1))

        def sample(seconds: float) -> Turn:
            beside = writer.extend.remote(seconds + 0.3, WRITTEN_BESIDE)
            time.sleep(0.15)
            measured = turn(buffer.sample, seconds)
            written = ray.get(beside)
            if written["units"] / written["wall"] < 0.9 * WRITTEN_BESIDE:
                print(f"    the writer beside wrote only {written['units'] / written['wall']:,.0f} rows/s", flush=True)
            return measured

        return {
            "same sample": sample,
            "same sample alone": lambda s: turn(buffer.sample, s),
            "same extend": lambda s: turn(lambda: buffer.extend(self._steps), s, STEPS),
            "same two shards": lambda s: turn(two.sample, s),
        }

    def _calls(self) -> dict[str, TurnOf]:
        buffers = {k: self._buffer(ROWS, here=False, batches_per_call=k) for k in (1, 64)}
        written = self._buffer(4 * ROWS, here=False, lanes=4)
        writers = [self._writer(written) for _ in range(2)]
        stores = {k: self._stores(buffer) for k, buffer in buffers.items()} | {0: self._stores(written)}
        train = _training()

        def sample_and_train() -> None:
            buffers[64].sample()
            train()

        def extend(seconds: float) -> Turn:
            before, cpu, others = time.perf_counter(), time.process_time(), cpu_of(stores[0])
            rows = STEPS + turn(lambda: written.extend(self._steps), seconds, STEPS).units
            written.flush()
            wall, cpu = time.perf_counter() - before, time.process_time() - cpu
            return Turn(rows, wall, cpu, cpu_of(stores[0]) - others)

        def extend_two(seconds: float) -> Turn:
            each = ray.get([writer.extend.remote(seconds) for writer in writers])
            slower = min(each, key=lambda one: one["units"] / one["wall"])
            return Turn(**slower)

        return {
            "calls sample 64": lambda s: turn(buffers[64].sample, s, 1, stores[64]),
            "calls sample 1": lambda s: turn(buffers[1].sample, s, 1, stores[1]),
            "calls loop": lambda s: turn(train, s),
            "calls loop and sample 64": lambda s: turn(sample_and_train, s, 1, stores[64]),
            "calls extend": extend,
            "calls extend two": extend_two,
        }

    def _priorities(self) -> dict[str, TurnOf]:
        def case(per_call: int) -> TurnOf:
            sampler = PrioritizedSampler(ROWS, 0.6, 0.4)
            buffer = self._buffer(ROWS, here=False, sampler=sampler, batches_per_call=per_call)
            stores, priority = self._stores(buffer), torch.rand(BATCH)

            def step() -> None:
                batch = buffer.sample()
                buffer.update_priority(batch["index"], priority, batch["generation"])

            return lambda s: turn(step, s, 1, stores)

        return {f"priorities {k}": case(k) for k in (16, 64)}

    def close(self) -> None:
        for writer in self._writers:
            ray.kill(writer)
        for buffer in self._buffers:
            buffer.shutdown()


def _training() -> Callable[[], None]:
    """Products of matrices that take about `TRAINING_S` of CPU: a fixed work, whoever else wants the core."""
    a = torch.randn(96, 96)

    def product(n: int) -> float:
        began = time.process_time()
        for _ in range(n):
            torch.mm(a, a)
        return time.process_time() - began

    product(100)
    n = max(1, round(TRAINING_S / min(product(200) / 200 for _ in range(5))))

    def train() -> None:
        for _ in range(n):
            torch.mm(a, a)

    return train


@contextmanager
def two_nodes() -> Iterator[None]:
    """A cluster of a head, where this process is, and a second node, with processes of their own."""
    from ray.cluster_utils import Cluster as RayCluster

    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets have short names
    os.environ["RAY_TMPDIR"] = folder
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    options = {"num_cpus": 1, "object_store_memory": 200 << 20}
    cluster = RayCluster(
        initialize_head=True, head_node_args={**options, "include_dashboard": False, "resources": {"here": 32}}
    )
    cluster.add_node(**options, resources={"there": 32})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def start_peers(only: tuple[str, ...]) -> dict[str, PeerProcess]:
    """Those whose environment is here; says which are not."""
    peers = {}
    for name, (environment, module) in PEERS.items():
        python = FOLDER / environment / "bin" / "python"
        if only and not name.startswith(only) and not any(one.startswith(name) for one in only):
            continue
        if not python.exists():
            print(f"{name}: not available ({environment} is made by `make bench-ray-peers`)")
            continue
        try:
            peers[name] = PeerProcess(str(python), module, str(FOLDER))
        except RuntimeError as error:
            print(f"{name}: not measured, {error}", flush=True)
            continue
        print(f"{name}: {peers[name].facts}", flush=True)
    return peers


def run(rounds: int, seconds: float, only: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    facts = machine.facts(FOLDER)
    print(f"{facts['cpu']}, {facts['cores']} cores, load {facts['load']}, Python {facts['python']}, "
          f"torch {torch.__version__}, ray {ray.__version__}", flush=True)  # fmt: skip
    peers: dict[str, PeerProcess] = {}
    with two_nodes():
        try:
            peers = start_peers(only)
            cluster = Cluster(only)
            cases = dict(cluster.cases)
            for name, peer in peers.items():
                for what in ("sample", "extend"):
                    cases[f"{name} {what}"] = lambda s, peer=peer, what=what: peer.turn(what, s)  # type: ignore[misc]
            figures = {name: Figures() for name in cases}
            for case in cases.values():
                case(seconds / 4)
            for k in range(rounds):
                for name in list(cases)[:: 1 if k % 2 else -1]:
                    figures[name].turns.append(cases[name](seconds))
            print_figures(figures)
            print_goals(figures)
            cluster.close()
        finally:
            for peer in peers.values():
                peer.close()


def print_figures(figures: dict[str, Figures]) -> None:
    print(f"\n{'case':28} {'units/s':>12} {'best':>12} {'us wall':>10} {'us CPU':>10} {'us stores':>10}")
    for name, one in figures.items():
        print(f"{name:28} {one.rate:12,.0f} {one.best_rate:12,.0f} {1e6 * one.wall:10.3f} {1e6 * one.cpu:10.3f} "
              f"{1e6 * one.others:10.3f}")  # fmt: skip


def print_goals(figures: dict[str, Figures]) -> None:
    print(f"\n{'':62} {'measured':>12}")
    for goal in GOALS:
        try:
            value = goal.value(figures)
        except KeyError:
            continue
        measured = f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"
        print(f"{goal.label:62} {measured:>12} {goal.unit:22} {goal.verdict(value)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--only", action="append", default=[], help="beginnings of cases' names")
    arguments = parser.parse_args()
    run(arguments.rounds, arguments.seconds, tuple(arguments.only))


if __name__ == "__main__":
    main()
