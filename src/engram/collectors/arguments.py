"""Arguments of other releases' collectors: those that need nothing here, and what to use instead of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What an argument may be, where it then has no effect, and what to use instead of anything else.
OTHER_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_buffers": ((None, True, False), ""),
    "trust_policy": ((None, True, False), ""),
    "local_init_rb": ((None, True, False), ""),
    "extend_buffer": ((None, True), "a batch is written by one `extend`; give a smaller frames_per_batch"),
    "interruptor": (
        (None,),
        "use MultiSyncDataCollector(preemptive_threshold=...), which ends the batches of slow workers",
    ),
    "weight_updater": ((None,), "use update_policy_weights_(weights), which every collector has"),
    "weight_sync_schemes": (
        (None,),
        "use update_policy_weights_(weights), or update_at_each_batch=True with workers",
    ),
    "weight_recv_schemes": ((None,), "use update_policy_weights_(weights) of the collector whose policy it is"),
    "compact_obs": ((None, False), "leave it out: batches have each observation under 'next', too"),
    "worker_idx": ((None,), "leave it out: collectors with workers number them"),
    "collector_class": ((None,), "leave it out: workers run a SyncDataCollector"),
    "trajs_per_write": ((None,), "use trajs_per_batch, which writes so many whole trajectories at a time"),
    "num_collectors": ((None,), "use MultiSyncDataCollector or MultiaSyncDataCollector with num_workers"),
    "sync": ((None,), "use MultiSyncDataCollector or MultiaSyncDataCollector"),
    "backend": ((None,), "use the classes of engram.distributed for several machines"),
    "backend_options": ((None,), "use the classes of engram.distributed for several machines"),
}


def settle_other_arguments(collector: str, arguments: Mapping[str, Any]) -> None:
    """Accepts those that need nothing here.

    Raises TypeError for what has no meaning here, with what to use instead, and for unknown arguments.
    """
    for name, value in arguments.items():
        if name not in OTHER_ARGUMENTS:
            raise TypeError(f"{collector}.__init__() got an unexpected keyword argument {name!r}")
        allowed, instead = OTHER_ARGUMENTS[name]
        if not any(value is one for one in allowed):
            choices = " or ".join(map(repr, allowed))
            raise TypeError(f"{collector}({name}={value!r:.60}) is not supported, allowed is {choices}; {instead}")
