"""Imported before TorchRL, makes its workers forks of a process that has imported it, which takes five seconds.

engram's workers do not go by this setting.
"""

import multiprocessing

multiprocessing.set_start_method("forkserver")
multiprocessing.set_forkserver_preload(["torchrl.collectors", "torchrl.envs", "torchrl.modules", "engram.data"])
