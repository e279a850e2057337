"""`engram.envs.transforms`: the transforms and `TransformedEnv`, as in `torchrl.envs.transforms`."""

from engram._advice import advise_on_names
from engram.envs.transformed import TransformedEnv as TransformedEnv
from engram.transforms import *  # noqa: F403
from engram.transforms import __all__ as _transforms
from engram.transforms.base import apply_to_composite as _apply_to_composite  # noqa: F401 -- users' transforms have it
from engram.transforms.base import apply_to_composite_inv as _apply_to_composite_inv  # noqa: F401

__path__: list[str] = []  # its submodules are only aliases
__all__ = sorted([*_transforms, "TransformedEnv"])

advise_on_names(__name__)
