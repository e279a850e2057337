"""What a collector refuses: settings that cannot work, states of another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

COUNTERS = ("frames", "stepped", "batches", "trajectories", "policy_version")


def refuse_bad_settings(
    *,
    frames_per_batch: int | None,
    total_frames: int,
    max_frames_per_traj: int | None,
    init_random_frames: int | None,
    trajs_per_batch: int | None,
    split_trajs: bool,
    return_same_td: bool,
    set_truncated: bool,
    reset_at_each_iter: bool,
    reset_when_done: bool,
    replay_buffer: Any,
) -> None:
    """Raises ValueError for the first setting that cannot work."""
    refuse_bad_counts(frames_per_batch, total_frames, max_frames_per_traj, init_random_frames, trajs_per_batch)
    has_whole = trajs_per_batch is not None
    if split_trajs and replay_buffer is not None:
        raise ValueError("split_trajs=True would write padding into the replay buffer; leave it out")
    if return_same_td and (split_trajs or has_whole or replay_buffer is not None):
        raise ValueError(
            "return_same_td=True needs batches of one shape that are handed out; leave out split_trajs, "
            "trajs_per_batch and replay_buffer"
        )
    if max_frames_per_traj is not None and not reset_when_done:
        raise ValueError("max_frames_per_traj ends episodes by resets; leave out reset_when_done=False")
    if has_whole and (split_trajs or set_truncated or reset_at_each_iter or not reset_when_done):
        raise ValueError(
            "trajs_per_batch gives whole trajectories, one a row, and goes on where it stopped; leave out split_trajs, "
            "set_truncated, reset_at_each_iter and reset_when_done"
        )
    if has_whole and getattr(getattr(replay_buffer, "storage", None), "ndim", 1) > 1:
        raise ValueError("trajs_per_batch writes steps one after the other; give a storage with ndim=1")


def refuse_bad_counts(
    frames_per_batch: int | None,
    total_frames: int,
    max_frames_per_traj: int | None,
    init_random_frames: int | None,
    trajs_per_batch: int | None = None,
) -> None:
    """Raises ValueError for a number that is too small."""
    if frames_per_batch is None and trajs_per_batch is None:
        raise ValueError("frames_per_batch says how many frames a batch has; give it, or trajs_per_batch")
    if frames_per_batch is not None and frames_per_batch < 1:
        raise ValueError(f"frames_per_batch must be 1 or more, got {frames_per_batch}")
    if total_frames < 1 and total_frames != -1:
        raise ValueError(f"total_frames must be 1 or more, or -1 for no end, got {total_frames}")
    if max_frames_per_traj is not None and max_frames_per_traj < 1:
        raise ValueError(f"max_frames_per_traj must be 1 or more, or None, got {max_frames_per_traj}")
    if init_random_frames is not None and init_random_frames < 0:
        raise ValueError(f"init_random_frames must be 0 or more, or None, got {init_random_frames}")
    if trajs_per_batch is not None and trajs_per_batch < 1:
        raise ValueError(f"trajs_per_batch must be 1 or more, or None, got {trajs_per_batch}")


def refuse_bad_state(state: Any, policy_state: Mapping[str, Any] | None) -> None:
    """Raises ValueError for what is no collector's state, or holds the weights of a policy unlike `policy_state`'s."""
    if not isinstance(state, Mapping):
        raise ValueError(f"a collector's state is a dict, got {type(state).__name__}")
    for key in COUNTERS:
        if not isinstance(state.get(key), int) or state[key] < 0:
            raise ValueError(f"a collector's state has a number {key!r} of 0 or more, got {state.get(key)!r}")
    if not isinstance(state.get("episodes"), Mapping) or state["episodes"].keys() != {"count", "returns", "lengths"}:
        raise ValueError(
            f"a collector's state has 'episodes' with count, returns, lengths, got {state.get('episodes')!r}"
        )
    ended = state["episodes"]
    numbers = [ended["count"], *_listed(ended, "returns"), *_listed(ended, "lengths")]
    if wrong := [number for number in numbers if not isinstance(number, int | float)]:
        raise ValueError(f"a collector's state has numbers in 'episodes', got {wrong[0]!r:.80}")
    found, allowed = _shapes(state.get("policy_state_dict")), _shapes(policy_state)
    if found != allowed:
        raise ValueError(
            f"the state's policy is not this collector's.\n  found:   {found}\n  allowed: {allowed}\n"
            "  Make the collector with a policy of the same parameters."
        )
    for name, value in (state.get("policy_state_dict") or {}).items():
        if policy_state and isinstance(policy_state[name], Tensor) and not isinstance(value, Tensor):
            raise ValueError(f"the policy's {name!r} is a tensor, got a {type(value).__name__}")


def _listed(episodes: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(episodes[name], list | tuple):
        raise ValueError(
            f"a collector's state has lists 'returns' and 'lengths' in 'episodes', got {episodes[name]!r:.80}"
        )
    return list(episodes[name])


def _shapes(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if state is None else {key: tuple(getattr(value, "shape", ())) for key, value in state.items()}
