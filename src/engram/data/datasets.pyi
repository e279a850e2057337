# For type checkers, which read files; `engram._aliases` makes this path the module `engram.datasets`.
from engram.datasets import *  # noqa: F403
from engram.datasets import __all__ as __all__
