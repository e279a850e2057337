"""Every public name that clients rely on is looked up in engram, and in TorchRL where it has it."""

import importlib
import inspect
import operator
from typing import Any

import pytest

#: Names by module; `Class.method`, and `Class(argument=)` for an argument of its constructor, `f(argument=)` of others.
NAMES = {
    "data": """
        ReplayBuffer TensorDictReplayBuffer PrioritizedReplayBuffer TensorDictPrioritizedReplayBuffer
        ReplayBufferEnsemble RemoteTensorDictReplayBuffer ReplayBuffer(compilable=) ReplayBuffer(shared=)
        ReplayBuffer(batch_size=) ReplayBuffer(track_generations=) ReplayBuffer.set_rng ReplayBuffer.insert_transform
        ReplayBuffer.append_transform ReplayBuffer.share ReplayBuffer.stats ReplayBuffer.set_ ReplayBuffer.set_at_
        ReplayBuffer.update_ ReplayBuffer.read_all_in_order ReplayBuffer.update_if_present
        ReplayBuffer.update_if_present(index=) ReplayBuffer.update_if_present(generation=)
        ReplayBuffer.update_if_present(patch=) ReplayBuffer.update_if_present(version_key=)
        ReplayBuffer.update_if_present(version=) ReplayBuffer.update_if_present(require_newer=)
        ReplayBuffer.extend(update_priority=) ReplayBuffer.sample(return_info=) ReplayBuffer.state_dict
        ReplayBuffer.register_save_hook ReplayBuffer.register_load_hook
        TensorDictReplayBuffer.sample(include_info=) TensorDictReplayBuffer.update_tensordict_priority
        ReplayBufferEnsemble.update_tensordict_priority UpdateResult
        ListStorage LazyTensorStorage LazyMemmapStorage TensorStorage LazyStackStorage CompressedListStorage Storage
        StorageEnsemble ListStorage(compilable=) LazyTensorStorage(compilable=) LazyMemmapStorage(compilable=)
        LazyMemmapStorage(device=) LazyMemmapStorage(scratch_dir=) LazyMemmapStorage(auto_cleanup=)
        LazyTensorStorage(ndim=) LazyTensorStorage(shared_init=) LazyMemmapStorage(shared_init=)
        LazyTensorStorage.set LazyTensorStorage.get LazyTensorStorage.flatten LazyTensorStorage.attach
        LazyTensorStorage.shape LazyTensorStorage.__contains__ ListStorage.shape ListStorage.flatten ListStorage.attach
        Writer RoundRobinWriter TensorDictRoundRobinWriter TensorDictMaxValueWriter ImmutableDatasetWriter
        WriterEnsemble RoundRobinWriter(compilable=) RoundRobinWriter(track_generations=)
        TensorDictMaxValueWriter(rank_key=)
        RoundRobinWriter.register_storage RoundRobinWriter.add RoundRobinWriter.extend RoundRobinWriter.dumps
        RoundRobinWriter.loads RoundRobinWriter.generations_of
        RandomSampler SamplerWithoutReplacement PrioritizedSampler SliceSampler SliceSamplerWithoutReplacement
        PrioritizedSliceSampler SamplerEnsemble SamplerWithoutReplacement(drop_last=) PrioritizedSampler(max_capacity=)
        PrioritizedSampler(alpha=) PrioritizedSampler(beta=) PrioritizedSampler(eps=) SliceSampler(traj_key=)
        SliceSampler(end_key=) SliceSampler(end_keys=) SliceSampler(span=) SliceSampler(pad_output=)
        SliceSampler(slice_len=) SliceSampler(num_slices=) SliceSampler(strict_length=)
        PrioritizedSliceSampler(span=) RandomSampler(compilable=) RandomSampler.sample RandomSampler.dumps
        RandomSampler.loads DEFAULT_DONE_KEYS
        MultiStep MultiStep(gamma=) MultiStep(n_steps=)
        StorageCheckpointerBase ListStorageCheckpointer TensorStorageCheckpointer FlatStorageCheckpointer
        NestedStorageCheckpointer H5StorageCheckpointer StorageEnsembleCheckpointer
        Bounded Unbounded Binary Categorical OneHot MultiCategorical MultiOneHot Composite TensorSpec
        OneHot.space OneHot.zero OneHot.zeros OneHot.one OneHot.ones OneHot.cardinality Categorical.to_one_hot
        OneHot.to_categorical OneHot.to_torchrl OneHot.__hash__ Bounded.to_torchrl
    """,
    "data.replay_buffers": "find_start_stop_traj iter_trajectories",
    "data.replay_buffers.scheduler": "LinearScheduler StepScheduler LambdaScheduler SchedulerList",
    "data.datasets": "MinariExperienceReplay D4RLExperienceReplay",
    "envs": """
        EnvBase GymEnv DMControlEnv TransformedEnv ParallelEnv SerialEnv EnvCreator set_gym_backend
        ParallelEnv(serial_for_single=) EnvBase.append_transform EnvBase.action_spec_unbatched
        EnvBase.full_action_spec EnvBase.full_observation_spec EnvBase.full_reward_spec EnvBase.full_done_spec
        EnvBase.input_spec EnvBase.output_spec EnvBase.state_spec EnvBase.specs EnvBase.action_keys
        EnvBase.reward_keys EnvBase.done_keys EnvBase.set_seed EnvBase.set_seed(static_seed=) EnvBase.rollout
        Transform Compose Compose.clone ToTensorImage GrayScale Resize StepCounter RewardSum CatFrames
        CatFrames.make_rb_transform_and_sampler DoubleToFloat CatTensors SignTransform ClipTransform NoopResetEnv
        EndOfLifeTransform TensorDictPrimer TrajCounter NextStateReconstructor ObservationNorm
        ObservationNorm.init_stats(num_iter=) ObservationNorm.init_stats(cat_dim=)
        ObservationNorm.init_stats(reduce_dim=) ObservationNorm.init_stats(keep_dims=) MultiStepTransform
        MultiStepTransform(next_key=) Transform.register_buffer
    """,
    "envs.transforms": "TransformedEnv Compose Transform StepCounter MultiStepTransform",
    "envs.libs.gym": "GymEnv GymWrapper set_gym_backend",
    "collectors": """
        Collector MultiCollector MultiSyncCollector MultiAsyncCollector SyncDataCollector MultiSyncDataCollector
        MultiaSyncDataCollector Collector(create_env_kwargs=) Collector(policy_factory=) Collector(track_traj_ids=)
        Collector(post_collect_hook=) Collector(traj_format=) Collector(trajs_per_batch=)
        Collector(auto_register_policy_transforms=) Collector(compile_policy=) Collector(cudagraph_policy=)
        Collector(max_frames_per_traj=) MultiSyncCollector(set_truncated=) MultiSyncCollector(cat_results=)
        MultiSyncCollector(num_threads=) MultiSyncCollector(create_env_kwargs=) Collector.start Collector.pause
        Collector.async_shutdown Collector.__len__ Collector.reset Collector.set_seed Collector.set_seed(static_seed=)
        Collector.load_state_dict(state_dict=) Collector.next Collector.update_policy_weights_ Collector.rollout
        MultiSyncCollector.start MultiSyncCollector.pause MultiSyncCollector.async_shutdown MultiSyncCollector.reset
        MultiAsyncCollector.start MultiAsyncCollector.pause MultiAsyncCollector.async_shutdown
    """,
    "collectors.utils": "split_trajectories split_trajectories(prefix=) split_trajectories(as_nested=)",
}
#: What engram does not have yet.
MISSING: set[str] = set()
ALL = [(module, name) for module, names in NAMES.items() for name in names.split()]


def arguments_of(target: Any) -> set[str]:
    """The arguments that a function or a class takes by name, those that it hands on to its bases included."""
    classes = target.__mro__ if inspect.isclass(target) else ()
    functions = [vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)] if classes else [target]
    return {name for function in functions if function is not object.__init__ for name in signature_of(function)}


def signature_of(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # a built-in one
        return []


def has(package: str, module: str, name: str) -> bool:
    path, _, argument = name.partition("(")
    try:
        target = operator.attrgetter(path)(importlib.import_module(f"{package}.{module}"))
    except (ImportError, AttributeError):
        return False
    return not argument or argument.removesuffix("=)") in arguments_of(target)


def test_the_names_that_clients_rely_on_are_there(tell):
    missing = [f"{module}.{name}" for module, name in ALL if not has("engram", module, name)]
    theirs = [f"{module}.{name}" for module, name in ALL if not has("torchrl", module, name)]
    tell("Names", "names that clients use", "engram", f"{len(ALL) - len(missing)} of {len(ALL)} are there")
    tell("Names", "names that clients use", "torchrl", f"{len(ALL) - len(theirs)} of {len(ALL)} are there")
    for name in missing:
        tell("Names", name, "engram", "is not there")
    for name in theirs:
        tell("Names", name, "torchrl", "is not there")
    assert set(missing) == MISSING


@pytest.mark.parametrize("name", ["NoSuchClass", "ReplayBuffer.no_such_method", "ReplayBuffer(no_such_argument=)"])
def test_a_name_that_is_nowhere_is_missing(name: str):
    assert not has("engram", "data", name) and not has("torchrl", "data", name)
