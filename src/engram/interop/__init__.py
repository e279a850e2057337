"""Checkpoints of other libraries, read as plain states and rows. Nothing here knows a buffer, a sampler or a writer."""
