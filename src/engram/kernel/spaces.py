"""Spaces of environments, and texts as the bytes of a row."""

from engram.specs.spaces import HasSpaces, leaf_spaces, text_width
from engram.specs.text import bytes_of_text

__all__ = [
    "HasSpaces",
    "bytes_of_text",
    "leaf_spaces",
    "text_width",
]
