import gymnasium
import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer

import engram.data

STEPS = [(0, 1, False), (1, 2, True), (100, 101, False)]  # time is up after the second; an episode begins at 100
space = gymnasium.spaces.Box(-1_000, 1_000, (1,), np.float32)
there = ReplayBuffer(
    100, space, gymnasium.spaces.Discrete(2), optimize_memory_usage=True, handle_timeout_termination=False
)
here = engram.data.ReplayBuffer(storage=engram.data.LazyTensorStorage(100), batch_size=500)
for seen, following, is_cut in STEPS:
    now, then = np.full((1, 1), seen, np.float32), np.full((1, 1), following, np.float32)
    there.add(now, then, np.array([[0]]), np.array([0.0]), np.array([is_cut]), [{"TimeLimit.truncated": is_cut}])
    here.extend({"observation": now, "next": {"observation": then}})
drawn, batch = there.sample(500), here.sample()
print("there", sorted(set(zip(drawn.observations[:, 0].tolist(), drawn.next_observations[:, 0].tolist(), strict=True))))
pairs = zip(batch["observation"][:, 0].tolist(), batch["next"]["observation"][:, 0].tolist(), strict=True)
print("here ", sorted(set(pairs)))
