"""Advice for names of TorchRL's that are missing here: what to use instead."""

from engram._advice import advise_on_names, advised

__all__ = ["advise_on_names", "advised"]
