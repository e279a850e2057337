import flashbax
import jax
import jax.numpy as jnp
import torch

import engram.data

# 63 rows of priority 1; that of row 3 is for a while a thousand million. Row 63 has no successor yet: priority 0.
there = flashbax.make_prioritised_flat_buffer(max_length=64, min_length=2, sample_batch_size=64, priority_exponent=1.0)
state = there.init({"x": jnp.zeros((), jnp.int32)})
for x in range(64):
    state = there.add(state, {"x": jnp.int32(x)})
state = there.set_priorities(state, jnp.arange(63), jnp.ones(63))
here = engram.data.PrioritizedSampler(64, alpha=1.0, beta=1.0, eps=0.0)
buffer = engram.data.ReplayBuffer(storage=engram.data.LazyTensorStorage(64), sampler=here, batch_size=64)
buffer.extend(torch.arange(64))
buffer.update_priority(torch.arange(64), (torch.arange(64) < 63).float())
for priority in (1e9, 1.0):
    state = there.set_priorities(state, jnp.array([3]), jnp.array([priority]))
    buffer.update_priority(torch.tensor([3]), priority)
drawn = jnp.concatenate([there.sample(state, jax.random.PRNGKey(k)).indices for k in range(20)])
print("there", f"row 3: {(drawn == 3).sum()} of {len(drawn)}, row 63: {(drawn == 63).sum()}")
drawn = torch.cat([buffer.sample(return_info=True)[1]["index"] for _ in range(20)])
print("here ", f"row 3: {(drawn == 3).sum()} of {len(drawn)}, row 63: {(drawn == 63).sum()}")
