"""Spaces of the steps of environments, and of texts among them."""

from engram.specs.spaces import EncodedSpaces, LeafSpace, leaf_spaces, observation_path, text_width

__all__ = ["EncodedSpaces", "LeafSpace", "leaf_spaces", "observation_path", "text_width"]
