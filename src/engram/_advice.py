"""Names of TorchRL that this library does not have, and what to use instead of each.

`@advised` puts them into a class: an argument that would change nothing here is accepted, any other is a TypeError with
advice, and reading a member is an AttributeError with advice (`hasattr` is False).

Example:
    >>> from engram.data import ReplayBuffer
    >>> ReplayBuffer(service_backend="direct").query
    Traceback (most recent call last):
        ...
    AttributeError: 'ReplayBuffer' object has no attribute 'query': choose from `rb[:]`; a later release has it
    >>> ReplayBuffer(service_backend="ray")
    Traceback (most recent call last):
        ...
    TypeError: ReplayBuffer(service_backend='ray'): allowed are None and 'direct'; use RayReplayBuffer
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tensordict import TensorDict

_Class = TypeVar("_Class", bound=type)
_ONE_PROCESS = "give one object to all environments of a process; those of workers learn by themselves"
_ANY: tuple[Any, ...] = ()  # every value of the argument is accepted and changes nothing

_WORKERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "allow_step_when_done": ((False,), "reset environments whose episode is over: env.maybe_reset, or rollout"),
    "policy_proof": ((None,), "entries that a policy writes need no proof: leave it out"),
    "consolidate": (_ANY, ""),
    "daemon": (_ANY, ""),
    "memmap": (_ANY, ""),
    "metadata_from_workers": (_ANY, ""),
    "non_blocking": (_ANY, ""),
    "num_sub_threads": (_ANY, ""),
    "num_threads": (_ANY, ""),
    "pin_memory": (_ANY, ""),
    "share_individual_td": (_ANY, ""),
    "shared_memory": (_ANY, ""),
    "use_buffers": (_ANY, ""),
}
_NEW_WORKERS: dict[str, str] = {
    "non_blocking": "copies to other devices are complete when a call returns",
    "select_and_clone": "use td.select(...).clone()",
    "update_kwargs": "give create_env_kwargs to a new environment",
}

#: By class: the values of an argument that are accepted without effect, and what to do instead of giving another.
ARGUMENTS: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    # ---- specs ----
    "Composite": {
        "data_cls": ((None, TensorDict), "values are TensorDicts: convert them by data_cls.from_tensordict(value)"),
        "step_mdp_static": ((False,), "keep entries that no step changes out of step_mdp by its exclude arguments"),
    },
    "MultiCategorical": {"remove_singleton": ((True, False), "values have the spec's shape: squeeze them yourself")},
    "OneHot": {"use_register": ((False,), "encode the number of a choice; keep other names of it in a dict")},
    "MultiOneHot": {"use_register": ((False,), "encode the numbers of choices; keep other names of them in a dict")},
    # ---- buffers and their parts ----
    "ReplayBuffer": {"service_backend": ((None, "direct"), "use RayReplayBuffer")},
    # ---- environments ----
    "ParallelEnv": _WORKERS,
    "SerialEnv": {**_WORKERS, "mp_start_method": (_ANY, ""), "shutdown_timeout": (_ANY, "")},
    "TransformedEnv": {"auto_unwrap": (_ANY, ""), "cache_specs": (_ANY, "")},
    "GymEnv": {
        "allow_done_after_reset": (_ANY, ""),
        "auto_reset": ((False,), "collectors and rollout reset where `done` holds"),
        "auto_reset_replace": (_ANY, ""),
        "convert_actions_to_numpy": (_ANY, ""),
        "missing_obs_value": (_ANY, ""),
        "native_autoreset": ((False,), "give an environment in any autoreset mode: its resets are no steps"),
        "num_workers": ((None, 0, 1), "use num_envs, or ParallelEnv(n, lambda: GymEnv(...))"),
        "run_type_checks": (_ANY, ""),
        "spec_locked": (_ANY, ""),
    },
    # ---- transforms ----
    "CatFrames": {
        "as_inverse": ((False,), "use rb.append_transform(CatFrames(...), invert=True), which stacks on writing"),
        "future": ((False,), "reverse the batch in time before and after, or store the frames one by one"),
        "mask_key": ((None,), "take slices without padding, or stack before padding"),
        "reset_key": ((None, "_reset"), "episodes begin where '_reset' says"),
    },
    "MultiStepTransform": {"mask_key": ((None, "mask"), "write steps without padding")},
    "RewardSum": {
        "reset_keys": ((None, "_reset", ["_reset"], ("_reset",)), "episodes begin where '_reset' says"),
        "reward_spec": ((False,), "read the spec of the sum in observation_spec"),
    },
    "TrajCounter": {"repeats": ((None, 1), "divide the numbers: traj_count // repeats")},
    "VecNorm": {
        "lock": ((None,), _ONE_PROCESS),
        "new_api": (_ANY, "leave it out"),
        "shapes": (_ANY, "leave it out"),
        "shared_td": ((None,), _ONE_PROCESS),
    },
    "VecNormV2": {
        "lock": ((None,), _ONE_PROCESS),
        "shared_data": ((None,), _ONE_PROCESS),
        "stateful": ((True,), "read the statistics from `loc` and `scale`, and save them with `state_dict`"),
    },
    # ---- collectors ----
}

#: By class, whose subclasses inherit them: members, and what to use instead.
MEMBERS: dict[str, dict[str, str]] = {
    # ---- specs ----
    "Spec": {
        "memoize_encode": "encode has no table to fill: leave the call out",
        "erase_memoize_cache": "encode has no table to fill: leave the call out",
        "make_neg_dim": "sizes are known here: leave the call out",
        "implements_for_spec": "torch.stack takes specs, other functions of torch do not",
    },
    # ---- buffers and their parts ----
    "ReplayBuffer": {"query": "choose from `rb[:]`; a later release has it"},
    # ---- environments ----
    "EnvBase": {
        "all_actions": "enumerate env.action_spec",
        "auto_specs_": "set observation_spec, action_spec, reward_spec and done_spec in __init__",
        "collector": "an environment does not know its collector: keep a reference to it",
        "configure_parallel": "use ParallelEnv(n, make_env), whose arguments these are",
        "eager": "steps are not compiled",
        "empty_cache": "nothing is cached: leave the call out",
        "make_parallel": "use ParallelEnv(n, make_env)",
        "register_collector": "an environment does not know its collector: keep a reference to it",
        "register_gym": "register a gymnasium.Env with gymnasium.register",
        "set_state": "use env.reset(tensordict, set_state=True)",
    },
    "EnvCreator": {"meta_data": "make the environment and read its specs"},
    "GymEnv": {
        "auto_register_info_dict": "give info_keys=[...] to GymEnv",
        "fast_encoding": "actions and observations are encoded natively",
        "get_library_name": "it is always gymnasium",
        "git_url": "it is https://github.com/Farama-Foundation/Gymnasium",
        "info_dict_reader": "give info_keys=[...] to GymEnv",
        "read_action": "override _step",
        "read_done": "override _step",
        "read_obs": "override _reset and _step",
        "read_reward": "override _step",
        "rebuild_with_kwargs": "make a new GymEnv",
        "set_info_dict_reader": "give info_keys=[...] to GymEnv",
        "validated": "use check_env_specs(env)",
    },
    "ParallelEnv": _NEW_WORKERS,
    "SerialEnv": _NEW_WORKERS,
    "TransformedEnv": {"set_missing_tolerance": "use env.transform.set_missing_tolerance(...)"},
    # ---- transforms ----
    "CatFrames": {"inplace": "out_keys other than in_keys leave the source unchanged"},
    "EndOfLifeTransform": {"NO_PARENT_ERR": "catch the RuntimeError of `parent`"},
    "MultiStepTransform": {"ENV_ERR": "catch the TypeError of TransformedEnv"},
    "Reward2GoTransform": {"ENV_ERR": "catch the TypeError of TransformedEnv"},
    "StepCounter": {
        "all_done_keys": "use `done_keys`",
        "all_truncated_keys": "use `truncated_keys`",
        "full_done_spec": "use `parent.full_done_spec`",
    },
    "Transform": {
        "collector": "give the transform what it needs of the collector",
        "enable_inv_on_reset": "inverses change actions and what is written; change a reset in `_reset`",
        "init": "begin episodes in `_reset`",
        "transform_env_batch_size": "a transform keeps the batch size of its environment",
        "transform_env_device": "a transform keeps the device of its environment; move both by `env.to(device)`",
        "transform_fake_tensordict": "call `fake_tensordict` of the environment",
    },
    "VecNorm": {
        "SEP": "statistics are lists in the order of in_keys, and by key with VecNormV2",
        "build_td_for_shared_vecnorm": _ONE_PROCESS,
    },
    # ---- collectors ----
}


def advised(cls: _Class) -> _Class:
    """A class decorator: gives the class the advice that the tables above have under its name."""
    if arguments := ARGUMENTS.get(cls.__name__):
        cls.__init__ = _accepting(cls.__init__, cls.__name__, arguments)  # type: ignore[misc]
    for name, instead in MEMBERS.get(cls.__name__, {}).items():
        if name in vars(cls):
            raise TypeError(f"{cls.__name__} has {name!r}: delete the advice")
        setattr(cls, name, _Absent(name, instead))
    return cls


def absent_member(owner: type, name: str) -> AttributeError:
    """The error of a class that has a `__getattr__` of its own, for a name that this did not find."""
    found = next((vars(cls)[name] for cls in owner.__mro__ if name in vars(cls)), None)
    return found.error(owner) if isinstance(found, _Absent) else AttributeError(_has_no(owner, name))


def _has_no(owner: type, name: str) -> str:
    return f"{owner.__name__!r} object has no attribute {name!r}"


class _Absent:
    """A class attribute that is not there: it may be set on an object and overridden in a subclass."""

    def __init__(self, name: str, instead: str) -> None:
        self.name, self.instead = name, instead

    def error(self, owner: type) -> AttributeError:
        return AttributeError(f"{_has_no(owner, self.name)}: {self.instead}")

    def __get__(self, instance: Any, owner: type) -> Any:
        raise self.error(owner)


def _accepting(
    init: Callable[..., None], name: str, arguments: Mapping[str, tuple[tuple[Any, ...], str]]
) -> Callable[..., None]:
    """A constructor that also takes the arguments without effect."""

    @functools.wraps(init)
    def accepting(self: Any, *args: Any, **kwargs: Any) -> None:
        for argument in arguments.keys() & kwargs.keys():
            allowed, instead = arguments[argument]
            value = kwargs.pop(argument)
            if allowed and not any(value is one or value == one for one in allowed if type(value) is type(one)):
                choices = " and ".join(map(repr, allowed))
                verb = "is" if len(allowed) == 1 else "are"
                raise TypeError(f"{name}({argument}={value!r:.60}): allowed {verb} {choices}; {instead}")
        init(self, *args, **kwargs)

    return accepting
