import time

import torch
import torchrl.data
from tensordict import TensorDict

import engram.data


def milliseconds(data, rows):
    """CPU time of a batch of 8 slices of 32 steps after each 10 new steps: the least of 9."""
    sampler = data.SliceSampler(slice_len=32, traj_key="episode")
    buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(rows), sampler=sampler, batch_size=256)
    buffer.extend(TensorDict({"episode": torch.arange(rows) // 100}, [rows]))
    buffer.sample()
    times = []
    for k in range(9):
        buffer.extend(TensorDict({"episode": torch.full((10,), rows + k)}, [10]))
        began = time.process_time()
        buffer.sample()
        times.append(1e3 * (time.process_time() - began))
    return min(times)


torch.set_num_threads(1)
for name, data in (("there", torchrl.data), ("here ", engram.data)):
    print(name, *(f"{rows:,} rows: {milliseconds(data, rows):.3f} ms" for rows in (10_000, 2_000_000)), sep="  ")
