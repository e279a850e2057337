"""Spaces of environments, and texts as the bytes of a row."""

from engram.specs.spaces import EncodedSpaces, HasSpaces, leaf_spaces, text_width
from engram.specs.text import bytes_of_text

__all__ = [
    "EncodedSpaces",
    "HasSpaces",
    "bytes_of_text",
    "leaf_spaces",
    "text_width",
]
