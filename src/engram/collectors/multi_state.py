"""What collectors with worker processes refuse to load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engram.collectors.settings import refuse_bad_state


def refuse_bad_states(state: Any, num_workers: int, policy_state: Mapping[str, Any] | None) -> None:
    """Raises ValueError for what is no state of a collector with so many workers, or of another policy.

    Whether the environments can go on from the random numbers in it, only the workers can tell.
    """
    if isinstance(state, Mapping) and not isinstance(state.get("workers"), (list, tuple)):
        raise ValueError(
            "the state of a collector with worker processes has 'workers', a list with a state of each; found "
            f"{sorted(map(str, state))}. Load it into a collector of the class that it was saved by"
        )
    refuse_bad_state({"stepped": 0, "policy_version": 0, **state} if isinstance(state, Mapping) else state, None)
    if len(state["workers"]) != num_workers:
        raise ValueError(
            f"the state is of {len(state['workers'])} workers, and this collector has {num_workers}; "
            "make it with as many"
        )
    for k, part in enumerate(state["workers"]):
        try:
            refuse_bad_state(part, policy_state)
        except ValueError as error:
            raise ValueError(f"the state of worker {k}: {error}") from None
