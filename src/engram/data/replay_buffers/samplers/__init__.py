"""Which slots to read."""

from engram.data.replay_buffers.samplers.base import Sampler
from engram.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from engram.data.replay_buffers.samplers.uniform import RandomSampler, SamplerWithoutReplacement

__all__ = ["PrioritizedSampler", "RandomSampler", "Sampler", "SamplerWithoutReplacement"]
