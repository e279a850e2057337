"""engram: experience replay and data collection for reinforcement learning.

Nothing heavy is imported here: `import engram.data`, `import engram.collectors`, `import engram.envs` do that.
"""

import sys

if sys.platform == "win32":
    raise ImportError("engram runs on Linux and macOS; on Windows use the Linux subsystem (WSL 2)")

__version__ = "0.1.0"
