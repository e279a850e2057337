"""Which slots to read."""

from engram.data.replay_buffers.samplers.base import (
    Sampler,
)
from engram.data.replay_buffers.samplers.ensemble import (
    SamplerEnsemble,
)
from engram.data.replay_buffers.samplers.prioritized import (
    PrioritizedSampler,
)
from engram.data.replay_buffers.samplers.prioritized_slices import (
    PrioritizedSliceSampler,
)
from engram.data.replay_buffers.samplers.sequences import (
    SequenceSampler,
)
from engram.data.replay_buffers.samplers.slice_epochs import (
    SliceSamplerWithoutReplacement,
)
from engram.data.replay_buffers.samplers.slices import (
    SliceSampler,
)
from engram.data.replay_buffers.samplers.uniform import (
    RandomSampler,
    SamplerWithoutReplacement,
)

__all__ = [
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SequenceSampler",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
]
