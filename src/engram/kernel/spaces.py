"""Spaces of environments, and texts as the bytes of a row."""

from engram.specs.spaces import TEXT_BYTES, EncodedSpaces, HasSpaces, leaf_spaces, text_width
from engram.specs.text import bytes_of_text, text_of_bytes

__all__ = [
    "TEXT_BYTES",
    "EncodedSpaces",
    "HasSpaces",
    "bytes_of_text",
    "leaf_spaces",
    "text_of_bytes",
    "text_width",
]
