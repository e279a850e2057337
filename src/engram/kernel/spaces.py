"""Spaces of the steps of environments, and of texts among them."""

from engram.specs.spaces import EncodedSpaces, text_width

__all__ = ["EncodedSpaces", "text_width"]
