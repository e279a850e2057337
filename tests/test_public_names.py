"""The names that users import; this fails when one slips in or out."""

import importlib
import subprocess
import sys

from contracts.each import each

SCHEDULERS = {"LambdaScheduler", "LinearScheduler", "ParameterScheduler", "SchedulerList", "StepScheduler"}
BUFFERS = SCHEDULERS | {
    "Compact", "CompressedListStorage", "LazyStackStorage",
    "DEFAULT_DONE_KEYS", "Flat2TED", "FlatStorageCheckpointer", "H5Combine", "H5Split", "H5StorageCheckpointer",
    "ImmutableDatasetWriter", "LazyMemmapStorage", "LazyTensorStorage", "ListStorage",
    "ListStorageCheckpointer", "Nested2TED", "NestedStorageCheckpointer", "PrioritizedReplayBuffer",
    "PrioritizedSampler", "PrioritizedSliceSampler", "RandomSampler", "ReplayBuffer", "ReplayBufferEnsemble",
    "RoundRobinWriter", "Sampler", "SamplerEnsemble", "SamplerWithoutReplacement", "SequenceSampler",
    "SliceSampler", "SliceSamplerWithoutReplacement", "Storage", "StorageCheckpointerBase",
    "StorageEnsemble", "StorageEnsembleCheckpointer", "TED2Flat", "TED2Nested", "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer", "TensorDictReplayBuffer", "TensorDictRoundRobinWriter",
    "TensorStorage", "TensorStorageCheckpointer", "Writer", "WriterEnsemble",
    "BufferStats", "DrawTotals", "MinSize", "RateLimiter", "SampleToInsertRatio",
    "Trajectory", "UpdateResult", "find_start_stop_traj", "iter_trajectories",
}  # fmt: skip
TRANSFORMS = {
    "ActionScaling", "CatFrames", "CatTensors", "CenterCrop", "ClipTransform", "Compose", "DTypeCastTransform",
    "DoubleToFloat", "EndOfLifeTransform", "ExcludeTransform", "FlattenObservation", "FrameSkipTransform", "GrayScale",
    "InitTracker", "RandomCropTensorDict", "RandomTruncationTransform", "TargetReturn", "VecNormV2",
    "MultiStepTransform", "NextStateReconstructor", "NoopResetEnv", "ObservationNorm", "RenameTransform",
    "Resize", "Reward2GoTransform", "RewardClipping", "RewardScaling", "RewardSum", "SelectTransform", "SignTransform",
    "StepCounter", "TensorDictPrimer", "ToTensorImage", "TrajCounter", "Transform", "UnsqueezeTransform",
    "VecNorm",
}  # fmt: skip
SPECS = {
    "Binary", "Bounded", "BoundedContinuous", "BoundedDiscrete", "Categorical", "Composite", "MultiCategorical",
    "MultiOneHot", "OneHot", "Spec", "Stacked", "StackedComposite", "TensorSpec", "Text", "Unbounded",
    "UnboundedContinuous", "UnboundedDiscrete", "space_from_spec", "spec_from_space",
}  # fmt: skip
NAMES = {
    "engram": {"Generator", "__version__", "load", "verify"},
    "engram.data": BUFFERS | SPECS | {"MultiStep", "TensorDict"},
    "engram.data.specs": SPECS | {"BoxList", "CategoricalBox", "ContinuousBox"},
    "engram.data.replay_buffers": BUFFERS,
    "engram.data.replay_buffers.samplers": {
        "DrawTotals", "PrioritizedSampler", "PrioritizedSliceSampler", "RandomSampler", "Sampler", "SamplerEnsemble",
        "SamplerWithoutReplacement", "SequenceSampler", "SliceSampler", "SliceSamplerWithoutReplacement",
    },
    "engram.data.replay_buffers.scheduler": SCHEDULERS,
    "engram.data.replay_buffers.writers": {
        "ImmutableDatasetWriter", "RoundRobinWriter", "TensorDictMaxValueWriter", "TensorDictRoundRobinWriter",
        "Writer", "WriterEnsemble",
    },
    "engram.data.replay_buffers.storages": {
        "Checked", "Compact", "CompressedListStorage", "LazyMemmapStorage", "LazyStackStorage", "LazyTensorStorage",
        "ListStorage", "Rows", "Storage", "StorageEnsemble", "TensorStorage",
    },
    "engram.distributed": {
        "Acknowledgement", "Block", "DrawnRows", "RayCollector", "RayReplayBuffer", "ReplayShard", "SequenceDraw",
        "ShardFacts", "ShardTotals", "ShardedReplayBuffer", "ShardedSettings", "ShardedStats",
        "TakenRows", "Tenancy", "Timeouts",
        "divide", "draw_sequences", "importance_weights", "pack", "unpack",
    },
    "engram.data.datasets": {
        "D4RLExperienceReplay", "LeRobotInfo", "MinariExperienceReplay",
        "iter_hdf5", "iter_lerobot", "iter_minari", "iter_parquet", "lerobot_info", "read_hdf5", "read_lerobot",
        "read_minari", "read_parquet", "write_hdf5", "write_minari", "write_parquet",
    },
    "engram.envs.transforms": TRANSFORMS | {"TransformedEnv"},
    "engram.transforms": TRANSFORMS,
    "engram.cli": {
        "Activity", "Conversion", "Damage", "Differences", "Info", "KeyDifference", "KeyInfo", "LaneInfo", "RowsShown",
        "Summary", "Verification", "WriterActivity", "convert", "diff", "head", "info", "play", "plot", "report",
        "sample", "top", "verify",
    },
    "engram.testing": {
        "CompactContract", "EnvContract", "RoundRobinWriterContract", "SamplerContract", "StorageContract",
        "StrandsContract", "TableContract", "TransformContract", "WriterContract", "chi_square", "env_steps", "numbers",
        "of_numbers", "state_of", "steps",
    },
    "engram.data.replay_buffers.checkpointers": {
        "FlatStorageCheckpointer", "H5StorageCheckpointer", "ItemSink", "ItemSource", "ListStorageCheckpointer",
        "NestedStorageCheckpointer", "RowSink", "RowSource", "Snapshot", "StorageCheckpointerBase",
        "StorageEnsembleCheckpointer",
        "TensorStorageCheckpointer", "VerificationReport", "open_snapshot", "save_snapshot", "verify",
    },
    "engram.data.replay_buffers.utils": {
        "DEFAULT_DONE_KEYS", "Flat2TED", "H5Combine", "H5Split", "Nested2TED", "TED2Flat", "TED2Nested",
        "find_start_stop_traj",
    },
}  # fmt: skip
ERRORS = {
    "EngramError", "StorageError", "StorageInUseError", "NoFreeLaneError", "QueueFullError", "IncarnationError",
    "CheckpointError", "CorruptCheckpointError", "ShardGoneError", "ShardVersionError",
    "CheckpointMisfitError", "DatasetError", "OutOfMemoryError", "OutsideSpecError",
    "ShardUnavailableError", "WorkerError",
}  # fmt: skip
MEMBERS = {
    "ReplayBuffer": {
        "add", "append_transform", "as_iterable_dataset", "batch_size", "dim_extend", "dump", "dumps", "empty",
        "extend", "generator",
        "insert_transform", "load", "load_state_dict", "loads", "mark_update", "open", "register_load_hook",
        "register_save_hook", "sample", "sampler", "save", "set_rng", "set_sampler", "set_storage", "set_writer",
        "state_dict", "stats", "storage", "update_if_present", "update_priority", "write_count", "writer",
    },
    "LazyMemmapStorage": {
        "attach", "checkpointer", "close", "dumps", "empty", "flush", "get", "load_state_dict", "loads", "max_size",
        "nbytes", "open", "register_load_hook", "register_save_hook", "release", "set", "state_dict",
        "_is_full", "_storage",
    },
    "RoundRobinWriter": {"_cursor", "generations_of", "load_state_dict", "state_dict"},
    "RandomSampler": {"load_state_dict", "sample", "state_dict"},
}  # fmt: skip


#: Packages of parts: what one of them offers, `engram.data` does, too, and need not be listed here.
PARTS = [f"engram.data.replay_buffers.{kind}" for kind in ("samplers", "storages", "writers")]
OFFER_PARTS = [*PARTS, "engram.data", "engram.data.replay_buffers"]
OF_AUTHORS = {"Checked", "Rows"}  # for who writes a storage: of `storages` alone


@each("module", NAMES)
def test_a_module_offers_these_names_and_no_others(module):
    found = importlib.import_module(module)
    kinds = PARTS if module in OFFER_PARTS else []
    parts = {name for kind in kinds for name in importlib.import_module(kind).__all__}
    assert NAMES[module] <= set(found.__all__) <= NAMES[module] | parts - OF_AUTHORS
    assert len(set(found.__all__)) == len(found.__all__)
    for name in found.__all__:
        assert getattr(found, name) is not None


@each("name", MEMBERS)
def test_a_class_offers_what_the_specification_names(name):
    assert MEMBERS[name] <= set(dir(getattr(importlib.import_module("engram.data"), name)))


def test_the_tree_of_errors_is_the_one_that_is_drawn():
    errors = importlib.import_module("engram.errors")
    assert {n for n, e in vars(errors).items() if isinstance(e, type)} == ERRORS
    assert all(n in errors.__doc__ and issubclass(getattr(errors, n), errors.EngramError) for n in ERRORS)


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, engram; print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'numpy', 'tensordict'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_engram_data_offers_every_part_of_a_package_of_parts():
    data = importlib.import_module("engram.data")
    for kind in PARTS:
        assert set(importlib.import_module(kind).__all__) - OF_AUTHORS <= set(data.__all__), kind
