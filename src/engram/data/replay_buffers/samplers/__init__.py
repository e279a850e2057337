"""Which slots to read."""

from engram.data.replay_buffers.samplers.base import Sampler
from engram.data.replay_buffers.samplers.slices import SliceSampler
from engram.data.replay_buffers.samplers.uniform import RandomSampler, SamplerWithoutReplacement

__all__ = ["RandomSampler", "Sampler", "SamplerWithoutReplacement", "SliceSampler"]
