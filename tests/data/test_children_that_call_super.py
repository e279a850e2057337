"""A child whose methods only call `super()` behaves as its parent: storages, samplers, writers, buffers, transforms."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict

import engram.data
from contracts.each import each
from contracts.pairwise import pairwise_product
from contracts.reused_memory import ReusingTensors
from contracts.super_children import FIRST_KEYS, Parts, assert_same, child_of, layered_child_of, overridable, steps
from contracts.tiers import in_ci, in_quick
from engram import transforms
from engram.collectors import SyncDataCollector
from engram.data import (
    CompressedListStorage,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    Storage,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
    Writer,
    WriterEnsemble,
)
from engram.envs import TransformedEnv
from law.world import difference, frozen


class Kind(NamedTuple):
    """A class, and what makes an object of it, or of a child, for a program."""

    kind: Any
    make: Callable[..., Any]
    envs: int = 0


def _given(cls: Any, program: Any) -> Any:
    storage = cls(steps(0, 40, 0, program.parts.first, program.parts.ids))
    storage.empty()
    return storage


STORAGES = {
    "memory": Kind(LazyTensorStorage, lambda cls, program: cls(40)),
    "environments": Kind(LazyTensorStorage, lambda cls, program: cls(80, ndim=2), envs=2),
    "shared": Kind(LazyTensorStorage, lambda cls, program: cls(40, shared=True)),
    "lanes": Kind(LazyTensorStorage, lambda cls, program: cls(40, shared=True, lanes=2)),
    "compact": Kind(LazyTensorStorage, lambda cls, program: cls(40, compact=True)),
    "temporary file": Kind(LazyMemmapStorage, lambda cls, program: cls(40)),
    "file": Kind(LazyMemmapStorage, lambda cls, program: cls(40, program.new_folder())),
    "file, environments": Kind(LazyMemmapStorage, lambda cls, program: cls(80, program.new_folder(), ndim=2), envs=2),
    "file, lanes": Kind(LazyMemmapStorage, lambda cls, program: cls(40, program.new_folder(), lanes=3)),
    "file, compact": Kind(LazyMemmapStorage, lambda cls, program: cls(40, program.new_folder(), compact=True)),
    "tensors": Kind(TensorStorage, _given),
    "room": Kind(TensorStorage, lambda cls, program: cls(TensorDict({}, [40]))),
    "list": Kind(ListStorage, lambda cls, program: cls(40)),
    "lazy stacks": Kind(LazyStackStorage, lambda cls, program: cls(40)),
    "compressed": Kind(CompressedListStorage, lambda cls, program: cls(40)),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue without rows is an error at once, in shared storages, too: these programs have one thread."""
    monkeypatch.setattr("engram.data.replay_buffers.buffers.waiting.nobody_else", lambda lanes: True)
    # Which tells how many seconds ago each process wrote, and is compared with what another run of the program gave.
    monkeypatch.setattr("engram.data.replay_buffers.buffers.waiting.writers_shown", lambda lanes: "")


#: Those in which a writer that keeps the best may replace rows.
PLAIN = ["memory", "temporary file", "file", "tensors", "room", "list", "lazy stacks", "compressed"]

SAMPLERS = {
    "uniform": Kind(RandomSampler, lambda cls: cls()),
    "epochs": Kind(SamplerWithoutReplacement, lambda cls: cls()),
    "queue": Kind(QueueSampler, lambda cls: cls(full="overwrite")),
    "priorities": Kind(PrioritizedSampler, lambda cls: cls(None, 0.7, 0.5)),
    "slices": Kind(SliceSampler, lambda cls: cls(slice_len=3, strict_length=False)),
    "padded slices": Kind(SliceSampler, lambda cls: cls(num_slices=3, strict_length=False, pad_output=True)),
    "epochs of slices": Kind(SliceSamplerWithoutReplacement, lambda cls: cls(slice_len=3, strict_length=False)),
    "slices by priority": Kind(
        PrioritizedSliceSampler, lambda cls: cls(None, 0.7, 0.5, slice_len=3, strict_length=False)
    ),
    "sequences": Kind(SequenceSampler, lambda cls: cls(slice_len=3, burn_in=1, strict_length=True)),
}
QUICK_SAMPLERS = ["uniform", "epochs", "priorities", "slices"]

WRITERS = {
    "round robin": Kind(RoundRobinWriter, lambda cls: cls()),
    "with index": Kind(TensorDictRoundRobinWriter, lambda cls: cls()),
    "best": Kind(TensorDictMaxValueWriter, lambda cls: cls()),
}

BUFFERS = {"plain": ReplayBuffer, "TensorDicts": TensorDictReplayBuffer}


def _prioritized(cls: Any, **parts: Any) -> Any:
    return cls(alpha=0.7, beta=0.5, **{name: part for name, part in parts.items() if name != "sampler"})


BUFFERS_WITH_SAMPLERS = {
    "plain": Kind(ReplayBuffer, lambda cls, **parts: cls(**parts)),
    "TensorDicts": Kind(TensorDictReplayBuffer, lambda cls, **parts: cls(**parts)),
    "priorities": Kind(PrioritizedReplayBuffer, _prioritized),
    "priorities, TensorDicts": Kind(TensorDictPrioritizedReplayBuffer, _prioritized),
}

#: Without edits of stored rows, which a child's `_call` takes without entries that its parent's `forward` needs.
FEW_CALLS = [
    *("extend 7", "rows", "sample", "add", "extend_list 3", "sample", "dumps", "pickle", "extend 50", "rows", "sample")
]

TRANSFORMS = {
    "CatFrames": lambda cls: cls(2, -1, in_keys=["obs"], out_keys=["frames"]),
    "CatTensors": lambda cls: cls(in_keys=["obs", ("next", "obs")], out_key="both"),
    "ClipTransform": lambda cls: cls(in_keys=["obs"], low=-1.0, high=3.0),
    "DTypeCastTransform": lambda cls: cls(torch.float32, torch.float64, in_keys=["obs"], in_keys_inv=["obs"]),
    "MultiStepTransform": lambda cls: cls(n_steps=2, gamma=0.9),
    "ObservationNorm": lambda cls: cls(loc=1.0, scale=2.0, in_keys=["obs"], in_keys_inv=["obs"]),
    "RenameTransform": lambda cls: cls(["count"], ["counted"]),
    "RewardScaling": lambda cls: cls(1.0, 2.0, in_keys=[("next", "reward")]),
    "RewardSum": lambda cls: cls(),
    "StepCounter": lambda cls: cls(),
    "UnsqueezeTransform": lambda cls: cls(-1, in_keys=["obs"]),
    "VecNorm": lambda cls: cls(in_keys=["obs"]),
}

SETTINGS = pairwise_product(SAMPLERS, WRITERS, BUFFERS, FIRST_KEYS, [True, False])
random.Random(0).shuffle(SETTINGS)


def parts_of(number: int, *, replaces: bool = True, **given: Any) -> Parts:
    """The parts of a buffer, and the form of its data: others for each number, where they are not given."""
    sampler, writer, buffer, first, ids = SETTINGS[number % len(SETTINGS)]
    if writer == "best" and not replaces:
        writer = "with index"
    if sampler == "queue" and (
        writer == "best" or "writer" in given
    ):  # which puts rows elsewhere than behind the newest
        sampler = "uniform"
    made = {
        "storage": functools.partial(STORAGES["memory"].make, LazyTensorStorage),
        "sampler": functools.partial(SAMPLERS[sampler].make, SAMPLERS[sampler].kind),
        "writer": functools.partial(WRITERS[writer].make, WRITERS[writer].kind),
        "buffer": BUFFERS[buffer],
        "first": first,
        "ids": ids,
    }
    return Parts(**{**made, **given})


def on(number: int, *, plain: bool = False) -> dict[str, Any]:
    """A storage of the library: another one for each number."""
    names = [name for name in STORAGES if not plain or name in PLAIN]
    kind, make, envs = STORAGES[names[number % len(names)]]
    return {"storage": functools.partial(make, kind), "envs": envs}


def forms_of(kind: type) -> dict[str, Callable[[type], Any]]:
    """Children of a class: with one method each, with all of them, and with a class for each, in both orders."""
    names = overridable(kind)
    return {
        **{name: functools.partial(child_of, names=[name]) for name in names},
        "all": functools.partial(child_of, names=names),
        "one after the other": functools.partial(layered_child_of, names=names),
        "the other way round": functools.partial(layered_child_of, names=names[::-1]),
    }


def forms_in_turns(kinds: dict[str, Kind], name: str, each_with: int) -> list[tuple[int, str]]:
    """Children of one of several kinds, numbered. A method that all kinds have is overridden in `each_with` of them."""
    shared = sorted(set.intersection(*(set(overridable(kind.kind)) for kind in kinds.values())))
    place = list(kinds).index(name)
    return [
        (number, form)
        for number, form in enumerate(forms_of(kinds[name].kind))
        if form not in shared or (shared.index(form) - place) % len(kinds) < each_with
    ]


#: Children that are compared with one run of their parent.
TOGETHER = 3


def few_together(forms: Sequence[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    """Numbered forms, a few at a time, with the number of the first."""
    for first in range(0, len(forms), TOGETHER):
        few = forms[first : first + TOGETHER]
        yield few[0][0], [form for _, form in few]


def check(kind: type, forms: Iterable[str], parts: Callable[[Any], Parts], folder: Path) -> None:
    """A class and its children of these forms are the same in a buffer of these parts."""
    made = forms_of(kind)
    assert_same(parts(kind), *(parts(made[form](kind)) for form in forms), folder=folder)


def turns(few: int, kinds: dict[str, Kind]) -> Any:
    """For `each_with`: in CI a method is overridden in few kinds, at night in all."""
    return pytest.mark.parametrize("each_with", in_ci([few, len(kinds)], [few]))


def public(base: type) -> set[type]:
    """The public classes of one kind that can be made."""
    found = [getattr(engram.data, name) for name in engram.data.__all__]
    return {kind for kind in found if isinstance(kind, type) and issubclass(kind, base) and kind is not base}


def test_every_public_class_has_children():
    assert {kind.kind for kind in STORAGES.values()} == public(Storage) - {StorageEnsemble}
    assert {kind.kind for kind in SAMPLERS.values()} == public(Sampler) - {SamplerEnsemble}
    assert {kind.kind for kind in WRITERS.values()} == public(Writer) - {WriterEnsemble, ImmutableDatasetWriter}
    assert {kind.kind for kind in BUFFERS_WITH_SAMPLERS.values()} == {ReplayBuffer, *public(ReplayBuffer)} - {
        ReplayBufferEnsemble
    }


# ---- storages ----
#: Children of storages that meet all other parts; in CI each of them some.
PARTLY = ["get", "set", "read", "append", "overwrite", "column", "all", "the other way round"]


#: Children of a storage whose `set` writes: a writer that keeps the best refuses them.
WRITING = ("set", "one after the other", "the other way round")


def check_storage(name: str, forms: Iterable[str], number: int, folder: Path) -> None:
    kind, make, envs = STORAGES[name]
    for replaces, some in itertools.groupby(forms, lambda form: name in PLAIN and form not in WRITING):
        check(
            kind,
            some,
            lambda cls, replaces=replaces: parts_of(
                number, replaces=replaces, storage=functools.partial(make, cls), envs=envs
            ),
            folder,
        )


@pytest.mark.parametrize("name", in_quick(STORAGES, ["memory", "lanes", "file, compact", "list"]))
def test_child_of_a_storage_behaves_as_its_parent(name, ram_path):
    place = list(STORAGES).index(name)
    check_storage(name, (("get", "all"), ("set", "one after the other"))[place % 2], 2 * place, ram_path)


#: Of each implementation one.
DIFFERENT = {name: STORAGES[name] for name in ("memory", "environments", "file, lanes", "list")}


@pytest.mark.deep
@turns(1, DIFFERENT)
@pytest.mark.parametrize("name", in_ci(STORAGES, DIFFERENT))
def test_child_with_any_method_of_a_storage_behaves_as_its_parent(name, each_with, ram_path):
    kinds = DIFFERENT if name in DIFFERENT else {name: STORAGES[name]}
    for number, forms in few_together(forms_in_turns(kinds, name, each_with)):
        check_storage(name, forms, number + 5 * list(STORAGES).index(name), ram_path)


@pytest.mark.deep
@pytest.mark.parametrize("step", in_ci([1, len(PARTLY)], [len(PARTLY)]))
@pytest.mark.parametrize("form", PARTLY)
def test_child_of_a_storage_behaves_as_its_parent_with_all_parts(form, step, ram_path):
    for number in range(PARTLY.index(form) % step, len(SETTINGS), step):
        check_storage(list(STORAGES)[number % len(STORAGES)], [form], number, ram_path)


# ---- samplers, writers, buffers ----
def check_sampler(name: str, forms: Iterable[str], number: int, folder: Path) -> None:
    kind, make, _ = SAMPLERS[name]
    storage = on(number)
    parts = lambda cls: parts_of(number, replaces=False, sampler=functools.partial(make, cls), **storage)  # noqa: E731
    check(kind, forms, parts, folder)


@pytest.mark.parametrize("name", in_quick(SAMPLERS, QUICK_SAMPLERS))
def test_child_of_a_sampler_behaves_as_its_parent(name, ram_path):
    check_sampler(name, ["sample", "all"], 2 * list(SAMPLERS).index(name), ram_path)


@pytest.mark.deep
@turns(1, SAMPLERS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_child_with_any_method_of_a_sampler_behaves_as_its_parent(name, each_with, ram_path):
    for number, forms in few_together(forms_in_turns(SAMPLERS, name, each_with)):
        check_sampler(name, forms, number, ram_path)


def check_writer(name: str, forms: Iterable[str], number: int, folder: Path) -> None:
    kind, make, _ = WRITERS[name]
    storage = on(number, plain=name == "best")
    check(kind, forms, lambda cls: parts_of(number, writer=functools.partial(make, cls), **storage), folder)


@pytest.mark.parametrize("name", in_quick(WRITERS, ["round robin"]))
def test_child_of_a_writer_behaves_as_its_parent(name, ram_path):
    check_writer(name, ["write", "extend", "all"], 3 * list(WRITERS).index(name), ram_path)


@pytest.mark.deep
@pytest.mark.parametrize("name", WRITERS)
def test_child_with_any_method_of_a_writer_behaves_as_its_parent(name, ram_path):
    for number, forms in few_together([*enumerate(forms_of(WRITERS[name].kind))]):
        check_writer(name, forms, number, ram_path)


def check_buffer(name: str, forms: Iterable[str], number: int, folder: Path) -> None:
    kind, make, _ = BUFFERS_WITH_SAMPLERS[name]
    storage = on(number)
    parts = lambda cls: parts_of(number, replaces=False, buffer=functools.partial(make, cls), **storage)  # noqa: E731
    check(kind, forms, parts, folder)


@pytest.mark.parametrize("name", in_quick(BUFFERS_WITH_SAMPLERS, ["plain", "priorities, TensorDicts"]))
def test_child_of_a_buffer_behaves_as_its_parent(name, ram_path):
    place = list(BUFFERS_WITH_SAMPLERS).index(name)
    check_buffer(name, (("extend", "sample"), ("add", "all"))[place % 2], 2 * place, ram_path)


@pytest.mark.deep
@turns(1, BUFFERS_WITH_SAMPLERS)
@pytest.mark.parametrize("name", BUFFERS_WITH_SAMPLERS)
def test_child_with_any_method_of_a_buffer_behaves_as_its_parent(name, each_with, ram_path):
    for number, forms in few_together(forms_in_turns(BUFFERS_WITH_SAMPLERS, name, each_with)):
        check_buffer(name, forms, number, ram_path)


# ---- transforms ----
@pytest.mark.parametrize(
    "name", in_quick(TRANSFORMS, ["CatFrames", "MultiStepTransform", "ObservationNorm", "RenameTransform"])
)
def test_child_of_a_transform_behaves_as_its_parent(name, ram_path):
    kind = getattr(transforms, name)
    number = 3 * list(TRANSFORMS).index(name)
    classes = kind, *(child_of(kind, [form]) for form in ("forward", "inv", "_inv_call"))
    parts = [
        parts_of(number, replaces=False, transform=functools.partial(TRANSFORMS[name], cls), **on(number))
        for cls in classes
    ]
    assert_same(*parts, folder=ram_path, calls=FEW_CALLS)


# ---- ensembles ----
@each("form", ["get", "sample", "write", "all"])
def test_ensemble_of_children_behaves_as_one_of_their_parents(form):
    def batches(make: Callable[[type], type]) -> Any:
        members = [
            TensorDictReplayBuffer(
                storage=make(LazyTensorStorage)(20), sampler=make(SliceSampler)(slice_len=2),
                writer=make(TensorDictRoundRobinWriter)(),
            )
            for _ in range(2)
        ]  # fmt: skip
        for k, member in enumerate(members):
            member.extend(steps(100 * k, 15, 0, torch.int64, k == 0))
        whole = make(ReplayBufferEnsemble)(
            storages=make(StorageEnsemble)(*(member.storage for member in members)),
            samplers=make(SamplerEnsemble)(*(member.sampler for member in members), p=[0.3, 0.7]),
            writers=make(WriterEnsemble)(*(member.writer for member in members)),
            batch_size=8,
        )
        torch.manual_seed(0)
        return frozen([whole.sample(return_info=True) for _ in range(4)])

    def child(kind: type) -> type:
        names = [name for name in overridable(kind) if form in (name, "all")]
        return child_of(kind, names) if names else kind

    assert difference(batches(lambda kind: kind), batches(child)) is None


#: What makes transforms that work in environments; those in `TRANSFORMS` have the keys of buffers.
IN_ENVIRONMENTS = {
    "CatFrames": lambda cls: cls(2, -1, in_keys=["observation"], out_keys=["frames"]),
    "ClipTransform": lambda cls: cls(in_keys=["observation", "reward"], low=-1.0, high=3.0),
    "ObservationNorm": lambda cls: cls(loc=1.0, scale=2.0, in_keys=["observation", ("next", "observation")]),
    "RewardClipping": lambda cls: cls(0.0, 2.0),
    "RewardScaling": lambda cls: cls(1.0, 2.0),
    "RewardSum": lambda cls: cls(),
    "SignTransform": lambda cls: cls(in_keys=["reward"]),
    "StepCounter": lambda cls: cls(max_steps=2),
    "VecNorm": lambda cls: cls(in_keys=["observation", "reward"]),
}


@pytest.mark.parametrize("name", in_quick(IN_ENVIRONMENTS, ["CatFrames", "RewardScaling", "StepCounter"]))
def test_child_of_a_transform_behaves_as_its_parent_in_an_environment(name):
    kind = getattr(transforms, name)

    def steps_with(cls: Any) -> Any:
        env = TransformedEnv(ReusingTensors((2,)), IN_ENVIRONMENTS[name](cls))
        torch.manual_seed(0)
        collector = SyncDataCollector(env, frames_per_batch=12, total_frames=24)
        return frozen([env.rollout(7, break_when_any_done=False), *(batch.clone() for batch in collector)])

    given = steps_with(kind)
    for form in ("forward", "_call", "_reset", "_step", "_apply_transform", "deferred"):
        assert difference(given, steps_with(child_of(kind, [form]))) is None, form
