"""Names of TorchRL that this library does not have, and what to use instead of each.

Some are of other libraries: what they call it to store each observation once.

`@advised` puts them into a class: an argument that would change nothing here is accepted, any other is a TypeError with
advice, as is one that is mistyped, and reading a member is an AttributeError with advice (`hasattr` is False). With
`advise_on_names` importing a name from a module is an ImportError with advice, and reading it is an AttributeError
(`hasattr` is False).

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

import difflib
import functools
import inspect
import opcode
import sys
from collections.abc import Callable, Mapping
from types import FrameType, FunctionType
from typing import Any, TypeVar

import torch
from tensordict import TensorDict

_Class = TypeVar("_Class", bound=type)
_ONE_PROCESS = "give one object to all environments of a process; those of workers learn by themselves"
_Method = TypeVar("_Method", bound=Callable[..., Any])
_IMPORT_FROM = opcode.opmap["IMPORT_FROM"]
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
_LATER = "a later release has it; until then"
_WEIGHTS = "use update_policy_weights_(weights), which every collector has"
_ON_CPU = (None, "cpu", torch.device("cpu")), "priorities are kept and drawn from in memory; batches may go anywhere"
_PRIORITIES = {
    "sampler": ((None,), "a prioritized buffer makes its own sampler; for another one use ReplayBuffer(sampler=...)"),
    "sampler_device": _ON_CPU,
    "sync": (_ANY, ""),
}
_SLICES = {
    "compile": (_ANY, ""),
    "use_gpu": (_ANY, ""),
    "step_key": (_ANY, ""),
    "fragmented": (
        (False,),
        "trajectories of about n writers beside each other lie whole with LazyTensorStorage(lanes=n)",
    ),
}
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
    "backend": (
        (None, "direct"),
        "use Collector(backend='process', num_workers=n) for worker processes, engram.distributed for several machines",
    ),
    "backend_options": ((None,), "use the classes of engram.distributed for several machines"),
}
#: Of collectors on one machine.
_LOCAL_COLLECTORS: dict[str, tuple[tuple[Any, ...], str]] = {
    **_COLLECTORS,
    "num_collectors": ((None,), "use backend='process' and num_workers=, or MultiSyncDataCollector"),
}


def _stored_once(compact: str) -> dict[str, tuple[tuple[Any, ...], str]]:
    """What cpprb, Dopamine, stable-baselines3 and tianshou call it to store each observation once; `compact`: here."""
    once = f"{compact} stores each observation once"
    return {
        "next_of": ((None,), once),
        "stack_compress": ((None,), f"{once}, and each frame of stacks along its first dimension"),
        "stack_size": ((None, 1), f"write stacks, as FrameStackObservation or CatFrames makes them: {once}"),
        "update_horizon": ((None, 1), "use transform=MultiStepTransform(n, gamma) of the buffer"),
        "optimize_memory_usage": ((None, False), once),
        "stack_num": ((None, 1), f"write stacks, as FrameStackObservation or CatFrames makes them: {once}"),
        "save_only_last_obs": ((None, False), f"write whole stacks: {once}"),
        "ignore_obs_next": ((None, False), f"write next observations, too: {once}"),
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
    "ReplayBuffer": {
        "service_backend": ((None, "direct"), "use RayReplayBuffer"),
        "service_backend_options": ((None,), "leave it out: RayReplayBuffer has options of its own"),
        "transport": ((None, "auto", "direct"), "use RayReplayBuffer"),
        "transport_options": ((None,), "leave it out: RayReplayBuffer has options of its own"),
        "sample_unit": ((None,), "use SliceSampler for parts of trajectories; a later release has units"),
        "consume_after_n_samples": ((None,), "use QueueSampler; a later release has ConsumingSampler"),
        **_stored_once("storage=LazyTensorStorage(n, compact=True)"),
    },
    "ReplayBufferEnsemble": {
        "routing_key": ((None,), "nothing is written through an ensemble: write to a member, as rb[0].extend(...)"),
        "routing_dim": ((None,), "nothing is written through an ensemble: write to a member, as rb[0].extend(...)"),
    },
    "LazyTensorStorage": {"consolidated": (_ANY, ""), "cleanup_memmap": (_ANY, ""), **_stored_once("compact=True")},
    "LazyMemmapStorage": _stored_once("compact=True"),
    "PrioritizedReplayBuffer": _PRIORITIES,
    "TensorDictPrioritizedReplayBuffer": _PRIORITIES,
    "PrioritizedSampler": {"device": _ON_CPU},
    "SliceSampler": _SLICES,
    "PrioritizedSliceSampler": {**_SLICES, "device": _ON_CPU},
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
    "SyncDataCollector": {
        **_LOCAL_COLLECTORS,
        "sync": ((None,), "use MultiSyncDataCollector or MultiaSyncDataCollector"),
        "preemptive_threshold": ((None,), "use MultiSyncDataCollector, whose workers may be ended early"),
        "cat_results": ((None,), "use MultiSyncDataCollector, which joins the batches of its workers"),
        "num_workers": ((None,), "use backend='process', or MultiSyncDataCollector or MultiaSyncDataCollector"),
    },
    "MultiCollector": _LOCAL_COLLECTORS,
    "MultiSyncDataCollector": _LOCAL_COLLECTORS,
    "Evaluator": {
        "collector_cls": ((None,), "leave it out: trajectories come from a SyncDataCollector"),
        "collector_kwargs": ((None,), "give what they say to the environment or the Evaluator itself"),
        "weight_sync_schemes": ((None,), "use evaluate(weights) and trigger_eval(weights)"),
        "done_keys": (_ANY, ""),
        "num_gpus": (_ANY, ""),
        "ray_kwargs": ((None,), "use backend='process'"),
    },
    "RayCollector": {**_COLLECTORS, "no_cuda_sync": (_ANY, "")},
    "RayReplayBuffer": {"prefetch": (_ANY, "")},
}

_WEIGHTS = "use `update_policy_weights_(weights)`, which every collector has"
_PROFILER = "use torch.profiler around the loop over the collector"

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
    "ReplayBuffer": {
        "query": "choose from `rb[:]`; a later release has it",
        "as_remote": "use RayReplayBuffer, or shared=True for processes of one machine",
        "submit_update_if_present": "use update_if_present, which is done when it returns",
    },
    "ReplayBufferEnsemble": {"end_streams": "call mark_seam() of the storage of each member"},
    "CompressedListStorage": {"to_bytestream": "use tensor.numpy().tobytes()"},
    "Sampler": {"default_priority": "PrioritizedSampler has it; draws of other samplers need no priority"},
    "SliceSampler": {
        "fragmented": "trajectories of writers beside each other lie whole with lanes=n in their storage",
        "step_key": "steps of a trajectory are stored in their order",
    },
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
        "SEP": "statistics are TensorDicts by key: read norm.loc[key] and norm.scale[key]",
        "build_td_for_shared_vecnorm": _ONE_PROCESS,
    },
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


def _of_torchrl(module: str, names: str) -> dict[str, str]:
    where = f"it stays TorchRL's, which works beside engram: from {module} import"
    return {name: f"{where} {name}" for name in names.split()}


#: By module, for those below it too: names that are imported from there, and where they are or what to use instead.
NAMES: dict[str, dict[str, str]] = {
    "engram.data": {
        "HERReplayBuffer": f"{_LATER} relabel goals in what you extend with",
        "HindsightStrategy": f"{_LATER} relabel goals in what you extend with",
        "ConsumingSampler": f"{_LATER} QueueSampler hands out each row once, oldest first, to all processes",
        "StreamingSliceSampler": f"{_LATER} SliceSamplerWithoutReplacement gives each trajectory once an epoch",
        "StalenessAwareSampler": f"{_LATER} QueueSampler(max_staleness=) passes rows that are too old",
        "PromptGroupSampler": f"{_LATER} SliceSampler draws steps with the same traj_key together",
        "SampleUnit": f"{_LATER} samplers draw steps, SliceSampler parts of trajectories",
        "Sequence": f"{_LATER} SliceSampler and SequenceSampler draw parts of trajectories",
        "Transition": f"{_LATER} samplers draw steps, which are transitions",
        "OfflineToOnlineReplayBuffer": f"{_LATER} ReplayBufferEnsemble(offline, online, p=[...]) mixes two buffers",
        "query": f"{_LATER} choose from `rb[:]`, or from iter_trajectories(rb[:])",
        "filter_trajectories": f"{_LATER} choose from iter_trajectories(rb[:])",
        "TrajectoryPredicate": f"{_LATER} choose from iter_trajectories(rb[:])",
        "prefill_replay_buffer": "extend the buffer with what a collector gives before training",
        "ConditionalUpdateResult": "the result of update_if_present is an UpdateResult",
        "CompressedListStorageCheckpointer": "ListStorageCheckpointer saves a CompressedListStorage",
        "StoreStorage": "use LazyMemmapStorage for rows on disk, RayReplayBuffer for several machines",
        "BinaryDiscreteTensorSpec": "its name is Binary",
        "BoundedTensorSpec": "its name is Bounded",
        "CompositeSpec": "its name is Composite",
        "DiscreteTensorSpec": "its name is Categorical",
        "LazyStackedCompositeSpec": "its name is StackedComposite",
        "MultiDiscreteTensorSpec": "its name is MultiCategorical",
        "MultiOneHotDiscreteTensorSpec": "its name is MultiOneHot",
        "OneHotDiscreteTensorSpec": "its name is OneHot",
        "UnboundedContinuousTensorSpec": "its name is Unbounded",
        "UnboundedDiscreteTensorSpec": "its name is Unbounded, with an integer dtype",
        **_of_torchrl(
            "torchrl.data",
            "ActionTokenizerBase AdaptiveKLController BinaryToDecimal Choice ConstantKLController ContentBase "
            "DensifyReward HashToInt History MCTSForest NonTensor PairwiseDataset PromptData PromptTensorDictTokenizer "
            "QueryModule RandomProjectionHash RewardData RolloutFromModel SipHash TensorDictMap TensorDictTokenizer "
            "TensorMap TokenizedDatasetLoader TopKRewardSelector Tree UniformActionTokenizer VideoClipRef "
            "VocabTailActionTokenizer check_no_exclusive_keys consolidate_spec contains_lazy_spec "
            "create_infinite_iterator get_dataloader",
        ),
        **_of_torchrl(
            "torchrl.data.datasets",
            "AtariDQNExperienceReplay BaseDatasetExperienceReplay GenDGRLExperienceReplay LeRobotExperienceReplay "
            "OpenMLExperienceReplay OpenXExperienceReplay RobosetExperienceReplay VD4RLExperienceReplay",
        ),
        **_of_torchrl("torchrl.data.replay_buffers.samplers", "MinSegmentTreeFp32 MinSegmentTreeFp64"),
        **_of_torchrl("torchrl.data.replay_buffers.samplers", "SumSegmentTreeFp32 SumSegmentTreeFp64"),
    },
    "engram.envs": {
        "NextObservationDelta": "use LazyTensorStorage(n, compact=True), which stores each observation once",
        **_of_torchrl(
            "torchrl.envs",
            "ActionChunkTransform ActionDiscretizer ActionMask ActionTokenizerTransform AntEnv AsyncEnvPool "
            "AutoResetEnv AutoResetTransform BatchSizeTransform BinarizeReward BraxEnv BraxWrapper BurnInTransform "
            "ChessEnv ConditionalPolicySwitch ConditionalSkip CraftGroundEnv CraftGroundWrapper Crop "
            "DMControlWrapper DecodeVideoTransform DeviceCastTransform DiscreteActionProjection DreamerDecoder "
            "DreamerEnv ExpandAs FinancialRegimeEnv FiniteTensorDictCheck FlattenAction GenesisEnv GenesisWrapper "
            "GymLikeEnv HabitatEnv Hash HopperEnv HumanoidEnv ImaginedEnv IsaacGymEnv IsaacGymWrapper "
            "IsaacLabWrapper JumanjiEnv JumanjiWrapper KLRewardTransform LBForagingEnv LBForagingWrapper "
            "LLMHashingEnv LiberoEnv LiberoWrapper LineariseRewards MJLabEnv MJLabWrapper MOGymEnv MOGymWrapper "
            "MacroAction MarlGroupMapType MeltingpotEnv MeltingpotWrapper ModelBasedEnvBase ModuleTransform "
            "MujocoEnv MujocoPlaygroundEnv MujocoPlaygroundWrapper MultiAction MultiThreadedEnv "
            "MultiThreadedEnvWrapper ObservationTransform OpenMLEnv OpenSpielEnv OpenSpielWrapper PendulumEnv "
            "PermuteTransform PettingZooEnv PettingZooWrapper PinMemoryTransform PolicyAgeFilter "
            "ProcessorAsyncEnvPool ProcgenEnv ProcgenWrapper R3MTransform RNDTransform RayTransform "
            "RemoveEmptySpecs RoboHiveEnv RunningMeanStd SMACv2Env SMACv2Wrapper SqueezeTransform Stack "
            "SuccessReward TerminateTransform ThreadingAsyncEnvPool TicTacToeEnv TimeMaxPool Timer Tokenizer "
            "UnaryTransform UnityMLAgentsEnv UnityMLAgentsWrapper VC1Transform VIPRewardTransform VIPTransform "
            "VecGymEnvTransform Walker2dEnv WorldModelEnv check_marl_grouping "
            "default_info_dict_reader gSDENoise get_available_libraries make_composite_from_td "
            "register_gym_spec_conversion terminated_or_truncated",
        ),
    },
    "engram.collectors": {
        "AsyncBatchedCollector": "use MultiAsyncCollector",
        "BaseCollector": "use Collector",
        "DataCollectorBase": "use Collector",
        "MultiProcessedWeightUpdater": _WEIGHTS,
        "RayWeightUpdater": _WEIGHTS,
        "RemoteModuleWeightUpdater": _WEIGHTS,
        "VanillaWeightUpdater": _WEIGHTS,
        "WeightUpdaterBase": _WEIGHTS,
        **_of_torchrl("torchrl.collectors", "ProfileConfig"),
    },
}


def advised(cls: _Class) -> _Class:
    """A class decorator: gives the class the advice that the tables above have under its name."""
    arguments = ARGUMENTS.get(cls.__name__, {})
    if arguments or "__init__" in vars(cls):
        cls.__init__ = _accepting(cls.__init__, arguments)  # type: ignore[misc]
    for name, instead in MEMBERS.get(cls.__name__, {}).items():
        if name in vars(cls):
            raise TypeError(f"{cls.__name__} has {name!r}: delete the advice")
        setattr(cls, name, _Absent(name, instead))
    return cls


class SignatureOfInit:
    """The `__signature__` of a class whose `__new__` chooses another class: that of its `__init__`."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def absent_member(owner: type, name: str) -> AttributeError:
    """The error of a class that has a `__getattr__` of its own, for a name that this did not find."""
    found = next((vars(cls)[name] for cls in owner.__mro__ if name in vars(cls)), None)
    return found.error(owner) if isinstance(found, _Absent) else AttributeError(_has_no(owner, name))


def absent_name(module: str, name: str, reader: FrameType) -> ImportError | AttributeError:
    """The error of a module's `__getattr__` for a name that it does not have, with advice where there is some.

    Args:
        reader: the frame that called the `__getattr__`. Where it runs `from module import name`, an AttributeError
            would become Python's own ImportError, without advice; anywhere else `hasattr` must be False.

    Example:
        >>> print(absent_name("engram.data.replay_buffers", "HindsightStrategy", sys._getframe()))
        module 'engram.data.replay_buffers' has no attribute 'HindsightStrategy': a later release has it; until then
        relabel goals in what you extend with
    """
    advice = None
    for root, names in NAMES.items():
        if name in names and f"{module}.".startswith(f"{root}."):
            advice = names[name]
    if _imports(reader):
        if advice is not None:
            return ImportError(f"{module} has no {name}: {advice}", name=module)
        if close := difflib.get_close_matches(name, dir(sys.modules.get(module)), n=1, cutoff=0.8):
            return ImportError(f"cannot import name {name!r} from {module!r}: did you mean {close[0]!r}?", name=module)
    absent = f"module {module!r} has no attribute {name!r}"
    return AttributeError(absent if advice is None else f"{absent}: {advice}", name=name, obj=sys.modules.get(module))


def _imports(frame: FrameType) -> bool:
    """Whether a frame runs `from module import name` now."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM


def advise_on_names(module: str, known_as: str | None = None) -> None:
    """Gives a module a `__getattr__` that raises `absent_name`; type checkers do not see it.

    `known_as` is the path from which users import it, if that is another one.
    """

    def absent(name: str) -> Any:
        raise absent_name(module if known_as is None else known_as, name, sys._getframe(1))

    sys.modules[module].__getattr__ = absent  # type: ignore[method-assign]


def with_argument(method: _Method, name: str, other: str) -> _Method:
    """The same function with another name for one argument: a method around it would cost each call a second one.

    Example:
        >>> with_argument(lambda data: data + 1, "data", "tensordicts")(tensordicts=2)
        3
    """
    function: Any = method
    code = function.__code__
    renamed = code.replace(co_varnames=tuple(other if one == name else one for one in code.co_varnames))
    twin = FunctionType(renamed, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    functools.update_wrapper(twin, function, updated=())
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__annotations__ = {other if one == name else one: of for one, of in function.__annotations__.items()}
    del twin.__wrapped__  # type: ignore[attr-defined]  # whose signature is another
    return twin  # type: ignore[return-value]


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
    """A constructor that also takes the arguments without effect, and refuses one that it does not have."""

    @functools.wraps(init)
    def accepting(self: Any, *args: Any, **kwargs: Any) -> None:
        for argument in arguments.keys() & kwargs.keys():
            allowed, instead = arguments[argument]
            value = kwargs.pop(argument)
            if allowed and not any(value is one or value == one for one in allowed if type(value) is type(one)):
                choices = " and ".join(map(repr, allowed))
                verb = "is" if len(allowed) == 1 else "are"
                raise TypeError(f"{type(self).__name__}({argument}={value!r:.60}): allowed {verb} {choices}; {instead}")
        if kwargs:
            refuse_unknown_arguments(type(self), init, kwargs)
        init(self, *args, **kwargs)

    return accepting


def refuse_unknown_arguments(cls: type, init: Callable[..., None], given: Mapping[str, Any]) -> None:
    """A TypeError for an argument that a constructor does not have, which says which of the class's may be meant.

    Example:
        >>> from engram.data import LazyTensorStorage
        >>> LazyTensorStorage(max_sise=10)
        Traceback (most recent call last):
            ...
        TypeError: LazyTensorStorage() has no argument 'max_sise': did you mean 'max_size'?
    """
    parameters = _parameters(init)
    accepted = {one.name for one in parameters}.union(*(ARGUMENTS.get(base.__name__, {}) for base in cls.__mro__))
    if any(one.kind is one.VAR_KEYWORD for one in parameters) or accepted >= given.keys():
        return
    known = dict.fromkeys(
        one.name
        for base in cls.__mro__
        if "__init__" in vars(base) and base is not object
        for one in _parameters(vars(base)["__init__"])[1:]
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    )
    name = next(name for name in given if name not in accepted)
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known) if known else 'none'}"
    raise TypeError(f"{cls.__name__}() has no argument {name!r}: {meant}")


@functools.lru_cache(maxsize=256)  # of the classes that a program makes again and again; a signature takes 0.1 ms
def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())
