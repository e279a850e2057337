"""Which slots to read."""

from engram._advice import advise_on_names
from engram.data.replay_buffers.samplers.base import (
    DrawTotals,
    Sampler,
)
from engram.data.replay_buffers.samplers.ensemble import (
    SamplerEnsemble,
)
from engram.data.replay_buffers.samplers.prioritized import (
    PrioritizedSampler,
)
from engram.data.replay_buffers.samplers.queue import QueueSampler
from engram.data.replay_buffers.samplers.random import RandomSampler, SamplerWithoutReplacement
from engram.data.replay_buffers.samplers.slices import (
    PrioritizedSliceSampler,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

__all__ = [
    "DrawTotals",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "QueueSampler",
    "RandomSampler",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SequenceSampler",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
]

advise_on_names(__name__)
