"""Buffers as users hold them: their parts together, writing, saving, what they count."""
