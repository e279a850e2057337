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
_ANY: tuple[Any, ...] = ()  # every value of the argument is accepted and changes nothing

_COLLECTORS: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_buffers": (_ANY, ""),
    "trust_policy": (_ANY, ""),
    "local_init_rb": (_ANY, ""),
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
    "worker_idx": ((None,), "leave it out: collectors with workers number them"),
    "collector_class": ((None,), "leave it out: workers run a SyncDataCollector"),
    "trajs_per_write": ((None,), "use trajs_per_batch, which writes so many whole trajectories at a time"),
    "num_collectors": ((None,), "use MultiSyncDataCollector or MultiaSyncDataCollector with num_workers"),
    "backend": ((None, "direct"), "use the classes of engram.distributed for several machines"),
    "backend_options": ((None,), "use the classes of engram.distributed for several machines"),
}

#: By class: the values of an argument that are accepted without effect, and what to do instead of giving another.
ARGUMENTS: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    # ---- specs ----
    # ---- buffers and their parts ----
    "ReplayBuffer": {"service_backend": ((None, "direct"), "use RayReplayBuffer")},
    # ---- environments ----
    # ---- transforms ----
    # ---- collectors ----
    "SyncDataCollector": {
        **_COLLECTORS,
        "sync": ((None,), "use MultiSyncDataCollector or MultiaSyncDataCollector"),
        "preemptive_threshold": ((None,), "use MultiSyncDataCollector, whose workers may be ended early"),
        "cat_results": ((None,), "use MultiSyncDataCollector, which joins the batches of its workers"),
        "num_workers": ((None,), "use MultiSyncDataCollector or MultiaSyncDataCollector with num_workers"),
    },
    "MultiCollector": _COLLECTORS,
    "MultiSyncDataCollector": _COLLECTORS,
    "Evaluator": {
        "collector_cls": ((None,), "leave it out: trajectories come from a SyncDataCollector"),
        "collector_kwargs": ((None,), "give what they say to the environment or the Evaluator itself"),
        "weight_sync_schemes": ((None,), "use evaluate(weights) and trigger_eval(weights)"),
        "done_keys": (_ANY, ""),
        "num_gpus": (_ANY, ""),
        "ray_kwargs": ((None,), "use backend='process'"),
    },
    "RayCollector": {**_COLLECTORS, "no_cuda_sync": (_ANY, "")},
}

_WEIGHTS = "use `update_policy_weights_(weights)`, which every collector has"
_PROFILER = "use torch.profiler around the loop over the collector"

#: By class, whose subclasses inherit them: members, and what to use instead.
MEMBERS: dict[str, dict[str, str]] = {
    # ---- specs ----
    # ---- buffers and their parts ----
    "ReplayBuffer": {"query": "choose from `rb[:]`; a later release has it"},
    # ---- environments ----
    # ---- transforms ----
    # ---- collectors ----
    "BackgroundCollector": {
        "cascade_execute": "read the attribute of `collector.env` or `collector.policy`, or use init_fn in workers",
        "disable_profile": _PROFILER,
        "enable_profile": _PROFILER,
        "fake_tensordict": "use `env.fake_tensordict()`, or `torch.zeros_like(batch)`, with the policy's entries too",
        "get_cached_weights": "read them from the policy, or a state_dict of the collector",
        "get_distant_attr": "read the attribute of the collector; workers have no others",
        "get_model": "use `collector.policy`, or the policy that the collector was made with",
        "getattr_env": "read the attribute of `collector.env`; those in workers are made by your callable",
        "getattr_policy": "read the attribute of the policy that the collector was made with",
        "getattr_rb": "read the attribute of `collector.replay_buffer`",
        "increment_version": "use `update_policy_weights_()`, which raises `policy_version`",
        "init_updater": _WEIGHTS,
        "map_fn": "call the methods of the collector: `set_seed`, `reset`, `state_dict` reach all workers",
        "profile_config": _PROFILER,
        "receive_weights": _WEIGHTS,
        "register_scheme_receiver": _WEIGHTS,
        "trajs_per_write": "use `trajs_per_batch`, which writes so many whole trajectories at a time",
        "verbose": "there is nothing to print; `logging.getLogger('engram')` has what happens",
        "weight_updater": _WEIGHTS,
        "worker_idx": "workers are numbered by their place in create_env_fn",
    },
    "MultiCollector": {
        "set_post_collect_hook": "give post_collect_hook= when the collector is made: its workers call it",
    },
}


def advised(cls: _Class) -> _Class:
    """A class decorator: gives the class the advice that the tables above have under its name."""
    if arguments := ARGUMENTS.get(cls.__name__):
        cls.__init__ = _accepting(cls.__init__, arguments)  # type: ignore[misc]
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


def _accepting(init: Callable[..., None], arguments: Mapping[str, tuple[tuple[Any, ...], str]]) -> Callable[..., None]:
    """A constructor that also takes the arguments without effect."""

    @functools.wraps(init)
    def accepting(self: Any, *args: Any, **kwargs: Any) -> None:
        for argument in arguments.keys() & kwargs.keys():
            allowed, instead = arguments[argument]
            value = kwargs.pop(argument)
            if allowed and not any(value is one or value == one for one in allowed if type(value) is type(one)):
                choices = " and ".join(map(repr, allowed))
                verb = "is" if len(allowed) == 1 else "are"
                raise TypeError(f"{type(self).__name__}({argument}={value!r:.60}): allowed {verb} {choices}; {instead}")
        init(self, *args, **kwargs)

    return accepting
