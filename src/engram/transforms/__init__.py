"""What changes batches on their way in and out."""

from engram.transforms.base import Transform
from engram.transforms.compose import Compose

__all__ = ["Compose", "Transform"]
