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

_Class = TypeVar("_Class", bound=type)
_ONE_PROCESS = "give one object to all environments of a process; those of workers learn by themselves"
_ANY: tuple[Any, ...] = ()  # every value of the argument is accepted and changes nothing

#: By class: the values of an argument that are accepted without effect, and what to do instead of giving another.
ARGUMENTS: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    # ---- specs ----
    # ---- buffers and their parts ----
    "ReplayBuffer": {"service_backend": ((None, "direct"), "use RayReplayBuffer")},
    # ---- environments ----
    # ---- transforms ----
    "CatFrames": {
        "as_inverse": ((False,), "use rb.append_transform(CatFrames(...), invert=True), which stacks on writing"),
        "future": ((False,), "reverse the batch in time before and after, or store the frames one by one"),
        "mask_key": ((None,), "take slices without padding, or stack before padding"),
        "reset_key": ((None, "_reset"), "episodes begin where '_reset' says"),
    },
    "MultiStepTransform": {"mask_key": ((None,), "write steps without padding")},
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
    # ---- buffers and their parts ----
    "ReplayBuffer": {"query": "choose from `rb[:]`; a later release has it"},
    # ---- environments ----
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
