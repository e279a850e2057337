"""A program with a Ray cluster of its own and a shard there: prints the shard's folder, and what to kill."""

import sys

import ray

from engram.data import LazyTensorStorage
from engram.distributed import RayReplayBuffer

ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
rb = RayReplayBuffer(storage=LazyTensorStorage(1000), timeout=20.0)
folder = rb._links[0].call("facts").result(60.0).folder
pids = [info.process.pid for infos in ray._private.worker._global_node.all_processes.values() for info in infos]
print(folder, ray.get(rb._actors[0].place.remote())[1], *pids, flush=True)
sys.stdin.read()
