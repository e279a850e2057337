"""What is read is what was written: transforms that change writes are undone by reads, or are refused."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from functools import partial

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn

from contracts.each import each
from engram.collectors import MultiSyncDataCollector
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    StorageEnsemble,
    TensorDictReplayBuffer,
)
from engram.envs import GymEnv, TransformedEnv
from engram.errors import CheckpointMisfitError
from engram.testing import TransformContract
from engram.testing.helpers import assert_equal
from engram.transforms import (
    Compose,
    DTypeCastTransform,
    ExcludeTransform,
    MultiStepTransform,
    ObservationNorm,
    Reward2GoTransform,
    ToTensorImage,
    Transform,
    VecNorm,
)
from transforms.data import steps


# ---- transforms of users' own, in the forms that TorchRL's have ----
class Form(nn.Module):
    """A module with `forward`, `inv`, `_inv_call` and keys; its inverse gets containers of its own."""

    def __init__(self, in_keys=(), in_keys_inv=()):
        super().__init__()
        self.in_keys, self.out_keys = list(in_keys), list(in_keys)
        self.in_keys_inv, self.out_keys_inv = list(in_keys_inv), list(in_keys_inv)

    def forward(self, td):
        assert isinstance(td, TensorDictBase)
        for key in self.in_keys:
            td.set(key, td.get(key) / 2)
        return td

    def inv(self, td):
        assert isinstance(td, TensorDictBase)
        return self._inv_call(td.clone(recurse=False))

    def _inv_call(self, td):
        for key in self.in_keys_inv:
            td.set(key, td.get(key) * 2)
        return td


class Delayed(Form):
    """Holds the newest two steps of a trajectory back on writing, as multi-step transforms do."""

    def __init__(self):
        super().__init__()
        self._buffer = None
        self.seen = []

    def _inv_call(self, td):
        self.seen.append(td.batch_size)  # in place
        whole = td if self._buffer is None else torch.cat([self._buffer, td], -1)
        steps = whole.batch_size[-1]
        ready = steps if whole["next", "done"][..., -1, :].all() else max(steps - 2, 0)
        self._buffer = whole[..., ready:] if ready < steps else None
        return whole[..., :ready] if ready else None


class Silent(Delayed):
    """The same, with a batch without steps in the place of None."""

    def _inv_call(self, td):
        made = super()._inv_call(td)
        return td[..., :0] if made is None else made


class Plain:
    """`forward` and `inv`, on data of any form."""

    def forward(self, batch):
        return apply(batch, lambda x: x / 2)

    def inv(self, batch):
        return apply(batch, lambda x: x * 2)

    def __repr__(self):
        return f"{type(self).__name__}()"


class ByCall:
    """Only `_inv_call`, which sets entries in place."""

    def __call__(self, td):
        return td.set("x", td["x"] / 2)

    def _inv_call(self, td):
        return td.set("x", td["x"] * 2)

    __repr__ = Plain.__repr__


class ByKey:
    """Only `_inv_apply_transform`, with keys."""

    in_keys_inv = ["x"]

    def __call__(self, td):
        return td.set("x", td["x"] / 2)

    def _inv_apply_transform(self, value):
        return value * 2

    __repr__ = Plain.__repr__


class ChildByCall(Transform):
    """A child of our own with `_call` and `_inv_call`, written for environments."""

    def _call(self, td):
        return td.set("x", td["x"] / 2)

    def _inv_call(self, td):
        return td.set("x", td["x"] * 2)


class ChildByKey(Transform):
    """A child of our own that works key by key."""

    def __init__(self):
        super().__init__(in_keys=["x"], in_keys_inv=["x"])

    def _apply_transform(self, value):
        return value / 2

    def _inv_apply_transform(self, value):
        return value * 2


class ChildByInv(Transform):
    """A child of our own with `forward` and `inv`."""

    def forward(self, td):
        return td.set("x", td["x"] / 2)

    def inv(self, td):
        return [self.inv(item) for item in td] if isinstance(td, list) else td.copy().set("x", td["x"] * 2)


class ChildDelayed(Transform):
    """A child of our own that holds steps back in `_inv_call`."""

    def __init__(self):
        super().__init__()
        self._buffer = None
        self.seen = []

    _inv_call = Delayed._inv_call


class Declared:
    """Of those that hold steps back: declares them, as tensors, numbers and strings."""

    def get_extra_state(self):
        if self._buffer is None:
            return {}
        return {"buffer": self._buffer.to_dict(), "shape": list(self._buffer.batch_size), "seen": len(self.seen)}

    def set_extra_state(self, state):
        self._buffer = TensorDict(state["buffer"], state["shape"]) if state else None
        self.seen = self.seen[: state["seen"]] if state else []


class DelayedDeclared(Declared, Delayed):
    """A module that is no Transform of ours."""


class ChildDelayedDeclared(Declared, ChildDelayed):
    """A child of our own."""


class ObjectDelayedDeclared:
    """No module: it declares by `state_dict` and `load_state_dict`."""

    def __init__(self):
        self._buffer, self.seen = None, []

    def __call__(self, td):
        return td

    _inv_call = Delayed._inv_call
    state_dict = Declared.get_extra_state
    load_state_dict = Declared.set_extra_state


def apply(batch, fn):
    if isinstance(batch, dict):
        return {**batch, "x": fn(batch["x"])}
    return fn(batch) if isinstance(batch, torch.Tensor) else batch.copy().set("x", fn(batch["x"]))


HALVING = [
    lambda: Form(["x"], ["x"]),
    Plain,
    ByCall,
    ByKey,
    ChildByCall,
    ChildByKey,
    ChildByInv,
]  #: halve "x" on reading, and double it on writing
DECLARING = [DelayedDeclared, ChildDelayedDeclared, ObjectDelayedDeclared]
DELAYING = [Delayed, Silent, ChildDelayed, *DECLARING]


def users_object(rb):
    """The transform that a user gave a buffer."""
    return getattr(rb.transform[0], "transform", rb.transform[0])


# ---- whatever has an inverse has it called on writing; what cannot be honoured is refused by name ----
STORAGES = [ListStorage, LazyTensorStorage]


def stored(rb):
    rows = rb.storage.get(slice(None))
    return torch.stack(rows) if isinstance(rows, list) else rows


def running(n, start=0):
    """Steps of one trajectory that goes on; x counts them."""
    x = torch.arange(start, start + n, dtype=torch.float32).unsqueeze(-1)
    return TensorDict({"x": x, "next": {"x": x + 1, "done": torch.zeros(n, 1, dtype=torch.bool)}}, [n])


def ending(n, start=0):
    data = running(n, start)
    data["next", "done"][-1] = True
    return data


# ---- contracts ----
class OfSteps:
    def batch(self, *shape):
        return steps(*shape)


class TestForm(OfSteps, TransformContract):
    dicts = False

    def make(self):
        return Form(["x"], ["x"])


class TestDelayed(OfSteps, TransformContract):
    dicts = environments = False

    def make(self):
        return Delayed()


class TestPlain(OfSteps, TransformContract):
    lists = False

    def make(self):
        return Plain()


class TestByCall(OfSteps, TransformContract):
    dicts = lists = False

    def make(self):
        return ByCall()


class TestByKey(OfSteps, TransformContract):
    dicts = lists = False

    def make(self):
        return ByKey()


class TestChildByCall(OfSteps, TransformContract):
    dicts = lists = False

    def make(self):
        return ChildByCall()


# ---- every way to write ----
@each("storage", STORAGES)
@each("make", HALVING)
def test_each_way_of_writing_goes_through_the_inverse(make, storage):
    rb, data = TensorDictReplayBuffer(storage=storage(20), transform=make(), batch_size=4), steps(6)
    assert rb.extend(data).tolist() == list(range(6)) and rb.add(data[2]) == 6
    rb.extend([data[0], data[1]])
    rb.extend(lazy_stack([data[4], data[5]]))
    order = [0, 1, 2, 3, 4, 5, 2, 0, 1, 4, 5]
    assert torch.equal(stored(rb)["x"], 2 * data["x"][order])
    rb[3] = data[5]
    rb[0:2] = data[2:4]
    order[3], order[0:2] = 5, [2, 3]
    assert torch.equal(stored(rb)["x"], 2 * data["x"][order])
    assert torch.equal(torch.stack([rb[i] for i in range(11)])["x"], data["x"][order])
    assert (rb.sample()["x"].unsqueeze(1) == data["x"]).all(-1).any(1).all()


@each("make", HALVING)
def test_a_conditional_write_goes_through_the_inverse(make):
    rb, data = ReplayBuffer(storage=LazyTensorStorage(20), transform=make()), steps(6)
    rb.extend(data)
    assert rb.update_if_present(
        index=torch.tensor([1, 2]), generation=torch.tensor([1, 9]), patch=data[4:6]
    ).updated.tolist() == [True, False]
    assert torch.equal(stored(rb)["x"], 2 * data["x"][[0, 4, 2, 3, 4, 5]])


@each("dim_extend", [0, 1])
@each("make", HALVING)
def test_environments_side_by_side_go_through_the_inverse(make, dim_extend):
    rb = ReplayBuffer(storage=LazyTensorStorage(20, ndim=2), transform=make(), dim_extend=dim_extend)
    data = steps(2, 5)
    rb.extend(data[:, :4] if dim_extend else data[:, :4].transpose(0, 1))
    rb.add(data[:, 4])
    found = rb.storage.get(slice(None))
    assert torch.equal(found["x"], 2 * data["x"].transpose(0, 1))


@each("make", HALVING)
def test_an_inverse_of_tensors_or_of_parts_of_a_compose_runs_once(make):
    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    rb.append_transform(Compose(make(), Compose(make()))).append_transform(make())
    rb.insert_transform(0, make())
    rb.extend(steps(4))
    assert torch.equal(stored(rb)["x"], 16 * steps(4)["x"])
    assert torch.equal(rb[:]["x"], steps(4)["x"])


def test_an_object_with_forward_and_inv_takes_plain_tensors():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), transform=Plain())
    rb.extend(torch.arange(3.0))
    assert rb.add(torch.tensor(3.0)) == 3
    assert rb.storage.get(slice(None)).tolist() == [0, 2, 4, 6] and rb[:].tolist() == [0, 1, 2, 3]


def test_an_inverse_gets_the_callers_own_object():
    class Seen(Plain):
        def inv(self, batch):
            self.batch = batch
            return super().inv(batch)

    seen, data = Seen(), steps(3)
    ReplayBuffer(storage=LazyTensorStorage(20), transform=seen).extend(data)
    assert seen.batch is data


@each("make", HALVING)
def test_inverted_it_reads_by_the_inverse_and_writes_by_forward(make):
    rb = ReplayBuffer(storage=LazyTensorStorage(20)).append_transform(make(), invert=True)
    rb.extend(steps(4))
    assert torch.equal(stored(rb)["x"], steps(4)["x"] / 2) and torch.equal(rb[:]["x"], steps(4)["x"])


def test_members_of_an_ensemble_made_of_parts_write_through_their_transforms():
    storages = StorageEnsemble(LazyTensorStorage(9), LazyTensorStorage(9), transforms=[Form(["x"], ["x"]), None])
    rb = ReplayBufferEnsemble(
        storages=storages, samplers=[RandomSampler(), RandomSampler()], writers=[RoundRobinWriter(), RoundRobinWriter()]
    )
    for i in range(2):
        rb[i].extend(steps(3))
    assert torch.equal(stored(rb[0])["x"], 2 * stored(rb[1])["x"])


@each(
    "common",
    [
        *HALVING,
        Delayed,
        lambda: MultiStepTransform(2, 0.5),
        lambda: Reward2GoTransform(0.5),
        lambda: DTypeCastTransform(torch.float16, torch.float32),
        lambda: ExcludeTransform("x", inverse=True),
        lambda: Compose(Compose(ToTensorImage(), ObservationNorm(0.0, 1.0, in_keys_inv=["x"]))),
    ],
)
@each("way", ["transform=", "append", "insert", "_transform"])
def test_what_changes_writes_is_refused_as_the_common_transform_of_an_ensemble(common, way):
    members, transform = [ReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(2)], common()
    rb = ReplayBufferEnsemble(*members, transform=VecNorm(["x"]))
    with pytest.raises(TypeError, match=r"changes what is written.*give it to the members"):
        if way == "transform=":
            ReplayBufferEnsemble(*members, transform=transform)
        elif way == "append":
            rb.append_transform(transform)
        elif way == "insert":
            rb.insert_transform(0, transform)
        else:
            rb._transform = transform
    assert [t.kind for t in rb.transform] == ["VecNorm"]
    rb.append_transform(DTypeCastTransform(torch.float16, torch.float32, in_keys=["x"])).append_transform(lambda td: td)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_transform_that_is_set_is_used_from_the_next_call_on(prefetch):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, prefetch=prefetch)
    rb.extend(torch.ones_like(steps(4)))
    assert rb.sample()["x"].unique().tolist() == [1]
    rb._transform = Form(["x"], ["x"])
    assert rb.sample()["x"].unique().tolist() == [0.5] and isinstance(rb.transform, Compose)
    rb.extend(torch.ones_like(steps(4)))
    assert stored(rb)["x"].unique().tolist() == [1, 2]
    with pytest.raises(TypeError, match="a transform is a Transform or a callable, got a int"):
        rb._transform = 3
    rb._transform = None
    assert len(rb.transform) == 0 and rb.sample()["x"].max() >= 1


# ---- steps that are held back ----
@each("storage", STORAGES)
@each("make", DELAYING)
def test_steps_that_an_inverse_holds_back_are_written_when_it_gives_them(make, storage):
    rb = TensorDictReplayBuffer(storage=storage(30), transform=make())
    assert rb.extend(running(1)).shape == (0,) and len(rb) == 0
    assert rb.add(running(1, 1)[0]).shape == (0,)
    assert rb.extend(running(3, 2)).tolist() == [0, 1, 2]
    assert rb.add(running(1, 5)[0]) == 3
    assert rb.extend(ending(2, 6)).tolist() == [4, 5, 6, 7]
    assert rb.add(running(1, 8)[0]).shape == (0,) and len(rb) == 8
    assert stored(rb)["x"].flatten().tolist() == list(range(8))


@each("dim_extend", [0, 1])
@each("make", DELAYING)
def test_steps_of_several_environments_are_held_back(make, dim_extend):
    rb = ReplayBuffer(storage=LazyTensorStorage(30, ndim=2), transform=make(), dim_extend=dim_extend)
    data = torch.stack([running(6), running(6, 10)])
    assert rb.add(data[:, 0]).shape == (0, 2)
    written = data[:, 1:4] if dim_extend else data[:, 1:4].transpose(0, 1)
    assert rb.extend(written).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert rb.storage.get(slice(None))["x"].squeeze(-1).tolist() == [[0, 10], [1, 11]]


def refused(rb, start):
    """A write that the storage does not take."""
    bad = running(4, start)
    bad["x"] = bad["x"].double()
    with pytest.raises((ValueError, RuntimeError)):
        rb.extend(bad)


@each("make", DECLARING)
def test_a_refused_write_leaves_what_is_held_back_where_that_is_declared(make):
    transform = make()
    rb = ReplayBuffer(storage=LazyTensorStorage(30), transform=transform)
    rb.extend(running(5))
    seen = len(transform.seen)
    refused(rb, 5)
    assert len(transform.seen) == seen and transform._buffer["x"].dtype == torch.float32
    rb.extend(ending(4, 5))
    assert stored(rb)["x"].flatten().tolist() == list(range(9))


@each("make", [Delayed, ChildDelayed])
def test_a_refused_write_undoes_no_attribute_that_is_not_declared(make):
    transform = make()
    rb = ReplayBuffer(storage=LazyTensorStorage(30), transform=transform)
    rb.extend(running(5))
    refused(rb, 5)
    assert len(rb) == 3 and len(transform.seen) == 2 and transform._buffer["x"].flatten().tolist() == [7, 8]


@each("make", DELAYING)
def test_no_steps_are_an_error_and_not_nothing_for_now(make):
    rb = ReplayBuffer(storage=LazyTensorStorage(30), transform=make())
    with pytest.raises(ValueError, match="nothing to add"):
        rb.extend(running(0))


@each("make", DECLARING)
def test_declared_steps_are_forgotten_where_the_rows_are(make):
    rb = ReplayBuffer(storage=LazyTensorStorage(30, shared=True), transform=make())
    rb.extend(running(5))
    for forget in (lambda: rb.empty(), lambda: rb.__setstate__(copy.copy(rb.__getstate__()))):
        forget()
        assert users_object(rb)._buffer is None and users_object(rb).seen == []
        assert rb.flush_transforms().shape == (0,)
        assert rb.extend(running(2, 100)).shape == (0,)
        assert users_object(rb)._buffer["x"].flatten().tolist() == [100, 101]
    sent = pickle.loads(pickle.dumps(rb.transform))
    assert getattr(sent[0], "transform", sent[0])._buffer["x"].flatten().tolist() == [100, 101]


@each("make", [Delayed, ChildDelayed])
def test_emptying_a_buffer_resets_no_attribute_that_is_not_declared_and_says_so_of_steps(make):
    rb = ReplayBuffer(storage=LazyTensorStorage(30), transform=make())
    rb.extend(running(5))
    with pytest.warns(UserWarning, match="holds steps back and declares no state: those of before are written"):
        rb.empty()
    assert len(rb) == 0 and users_object(rb)._buffer["x"].flatten().tolist() == [3, 4]
    with pytest.raises(TypeError, match="holds steps back"):
        rb.flush_transforms()


def test_emptying_a_buffer_resets_registered_tensors_of_what_holds_steps_back_and_calls_an_own_empty():
    class Skipping(Transform):
        emptied = 0

        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros(()))

        def _inv_call(self, td):
            self.rows += len(td)
            return td[::2] if self.rows > 5 else td

    class Own(Skipping):
        def empty(self):
            self.emptied += 1

    for make, left in ((Skipping, [5, 0]), (Own, [5, 7])):
        rb = ReplayBuffer(storage=LazyTensorStorage(30), transform=make())
        for n, rows in zip((5, 2), left, strict=True):
            rb.extend(running(n))
            rb.empty()
            assert float(users_object(rb).rows) == rows, "numbers of all that was written outlast the rows"
    assert users_object(rb).emptied == 2


@each("make", DECLARING)
@each("way", ["dumps", "state_dict"])
def test_declared_steps_are_saved(make, way, tmp_path):
    rb, twin, other = (ReplayBuffer(storage=LazyTensorStorage(30), transform=make()) for _ in range(3))
    rb.extend(running(5))
    twin.extend(running(3, 50))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if way == "dumps":
            rb.dumps(tmp_path)
            twin.loads(tmp_path)
        else:
            twin.load_state_dict(rb.state_dict())
    for buffer in (rb, twin):
        buffer.extend(running(4, 5))
        buffer.extend(ending(2, 9))
    assert_equal(twin[:], rb[:])
    assert stored(twin)["x"].flatten().tolist() == list(range(11))
    twin.load_state_dict(other.state_dict())
    assert users_object(twin)._buffer is None


class Odd(Form):
    def _inv_call(self, td):
        self.last = {1: object()}
        self.count = 3
        return td


class ChildOdd(ChildByCall):
    def __init__(self):
        super().__init__()
        self.last, self.lengths, self.unused = {}, [], [1.5, torch.zeros(2)]

    def _inv_call(self, td):
        self.last[len(self.last)] = 3
        self.lengths.append(len(td))
        return td


@each(
    "make, said",
    [
        (Odd, r"Odd has changed last \(a dict\), count \(a int\)"),
        (ChildOdd, r"ChildOdd has changed last \(a dict\), lengths \(a list\)"),
    ],
)
def test_attributes_that_are_not_declared_are_not_saved_and_a_save_warns_of_them(make, said):
    rb = ReplayBuffer(storage=LazyTensorStorage(30), transform=make())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.state_dict()
    rb.extend(running(5))
    for one in (rb, pickle.loads(pickle.dumps(rb.transform))):
        with pytest.warns(UserWarning, match=rf"{said} on writing, which cannot be saved: a Transform declares"):
            state = one.state_dict()
    assert state == {}, "the transform's own"
    twin = ReplayBuffer(storage=LazyTensorStorage(30), transform=make())
    twin.extend(running(5))
    twin.load_state_dict(rb.state_dict())
    assert len(users_object(twin).last) == 1, "nor does a load change them"


class Mean(Form):
    def __init__(self, n=2):
        super().__init__()
        self.register_buffer("mean", torch.zeros(n))

    def _inv_call(self, td):
        self.mean += td["x"].mean()
        return td


def test_the_tensors_of_an_object_of_a_module_class_are_its_declaration(tmp_path):
    rb, twin, narrow = (ReplayBuffer(storage=LazyTensorStorage(30), transform=Mean(n)) for n in (2, 2, 1))
    rb.extend(running(5))
    refused(rb, 5)
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert users_object(rb).mean.tolist() == users_object(twin).mean.tolist() == [2, 2]
    with pytest.raises(CheckpointMisfitError, match=r"Mean has mean \[1\] here, \[2\] there"):
        narrow.loads(tmp_path)
    plain = ReplayBuffer(storage=LazyTensorStorage(30), transform=Form())
    plain.extend(running(5))
    state = rb.state_dict()
    state["transform"]["transforms"][0]["kind"] = "Form"
    with pytest.raises(CheckpointMisfitError, match="Form has no tensors here, mean there"):
        plain.load_state_dict(state)
    twin.load_state_dict(ReplayBuffer(storage=LazyTensorStorage(30)).state_dict())
    assert users_object(twin).mean.tolist() == [0, 0], "without a state it is as it was before it was used"


def test_tensors_that_are_as_they_were_made_are_settings_and_need_no_transform_where_they_are_loaded():
    rb, bare = (ReplayBuffer(storage=LazyTensorStorage(30), transform=t) for t in (Mean(), None))
    rb.extend(running(1))
    bare.load_state_dict(rb.state_dict())
    rb.extend(running(2))
    with pytest.raises(CheckpointMisfitError, match="the state of a Mean was saved, and the transforms here are none"):
        bare.load_state_dict(rb.state_dict())


class Sums(ByCall):
    """Sums up in place, and hands its own tensor out and keeps the one that it gets."""

    def __init__(self):
        self.total = torch.zeros(())

    def _inv_call(self, td):
        self.total += td["x"].sum()
        return td[::2]

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


@each("make", [Sums, Mean])
def test_no_state_of_an_object_is_changed_by_what_is_written_later(make):
    def value():
        return next(iter(rb.transform[0].state_dict()["object"].values())).sum()

    rb = ReplayBuffer(storage=LazyTensorStorage(30), transform=make())
    rb.extend(running(3))
    state, before = rb.transform[0].state_dict(), value()
    for _ in range(2):
        rb.extend(running(4))
        assert value() > before
        rb.transform[0].load_state_dict(state)
        assert value() == before
    for _ in range(2 if make is Sums else 0):  # which drops steps
        rb.empty()
        assert value() == 0
        rb.extend(running(4))


def test_the_state_of_an_object_is_refused_by_one_without():
    rb, plain = (ReplayBuffer(storage=LazyTensorStorage(30), transform=t) for t in (Sums(), ByCall()))
    for buffer in (rb, plain):
        buffer.extend(running(3))
    state = rb.state_dict()
    state["transform"]["transforms"][0]["kind"] = "ByCall"
    with pytest.raises(CheckpointMisfitError, match="ByCall has no state_dict here, and had one there"):
        plain.load_state_dict(state)


@each("invert", [False, True])
def test_a_load_that_fails_in_a_later_transform_puts_the_state_of_an_object_back(invert):
    class Refusing(Transform):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            raise RuntimeError("it cannot")

    buffers = []
    for start in (0, 10):
        rb = ReplayBuffer(storage=LazyTensorStorage(30)).append_transform(Mean(), invert=invert)
        rb.append_transform(Refusing()).extend(running(5, start))
        users_mean(rb).add_(start)
        buffers.append(rb)
    before = users_mean(buffers[1]).tolist()
    with pytest.raises(RuntimeError, match="it cannot"):
        buffers[1].load_state_dict(buffers[0].state_dict())
    assert users_mean(buffers[1]).tolist() == before != users_mean(buffers[0]).tolist()


def users_mean(rb):
    """The tensor of the `Mean` in a buffer, which may be inverted."""
    one = rb.transform[0].transform
    return getattr(one, "transform", one).mean


def test_steps_that_only_wait_elsewhere_leave_no_attribute_behind():
    class Counting(Transform):
        writes = 0

        def _inv_call(self, td):
            self.writes += 1
            self.newest = td
            return td

    counting, data = Counting(), running(9)
    data["next", "reward"] = torch.ones(9, 1)
    data["next", "done"][-1] = True
    for transform in (counting, Delayed()):
        rb = ReplayBuffer(storage=LazyTensorStorage(30))
        rb._transform = Compose(transform, MultiStepTransform(3, 0.5))  # MultiStepTransform first on writing
        for part in data.split(4):
            rb.extend(part)
        assert stored(rb)["x"].flatten().tolist() == list(range(9))
    assert counting.writes == 3
    rb = ReplayBuffer(storage=LazyTensorStorage(30), transform=counting)
    rb.extend(data)
    rb[0:2] = data[2:4]
    assert counting.writes == 4 and len(counting.newest) == 9, "nor do steps that replace others"
    rb._transform = other = Counting()
    rb[0:2] = data[2:4]
    assert not hasattr(other, "newest")


def test_what_holds_steps_back_names_what_it_cannot_do():
    rb = ReplayBuffer(storage=LazyTensorStorage(30), transform=Delayed())
    assert rb.flush_transforms().shape == (0,)
    rb.extend(running(5))
    before = rb._transform[0].transform._buffer.clone()
    with pytest.raises(TypeError, match=r"Delayed holds steps back.*engram.envs.transforms.MultiStepTransform"):
        rb.flush_transforms()
    with pytest.raises(TypeError, match="Delayed holds steps back"):
        rb[0] = running(1)[0]
    with pytest.raises(TypeError, match="Delayed holds steps back"):
        rb.update_if_present(index=torch.tensor([0]), generation=torch.tensor([0]), patch=running(1))
    assert_equal(rb._transform[0].transform._buffer, before)
    assert stored(rb)["x"].flatten().tolist() == [0, 1, 2]


def test_a_child_that_makes_another_number_of_steps_replaces_none():
    child = ChildDelayed()
    rb = ReplayBuffer(storage=LazyTensorStorage(30), transform=child)
    rb.extend(running(5))
    before = child._buffer.clone()
    with pytest.raises(TypeError, match="ChildDelayed holds steps back"):
        rb[0:1] = running(1)
    assert_equal(child._buffer, before)


def test_an_inverse_that_makes_another_number_of_steps_replaces_none():
    class Halved(Form):
        def _inv_call(self, td):
            self.calls = getattr(self, "calls", 0) + 1
            return td if self.calls == 1 else td[::2]

    rb = ReplayBuffer(storage=LazyTensorStorage(30), transform=Halved())
    rb.extend(running(5))
    with pytest.raises(TypeError, match="Halved changes the number of steps that are written"):
        rb[0:4] = running(4)
    assert rb.transform[0].transform.calls == 1


def test_threads_that_write_through_an_inverse_with_a_memory_lose_nothing():
    class Lagging(Form):
        def _inv_call(self, td):
            held, self.held = getattr(self, "held", None), td
            return held

    rb = ReplayBuffer(storage=LazyTensorStorage(500), transform=Lagging())

    def write(k):
        for i in range(30):
            rb.extend(running(1, 100 * k + i))

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rb.extend(running(1, 1000))
    assert sorted(stored(rb)["x"].flatten().tolist()) == [100 * k + i for k in range(4) for i in range(30)]


def test_our_steps_that_wait_go_through_an_inverse_before_them():
    for make in HALVING:
        rb, clean = ReplayBuffer(storage=LazyTensorStorage(30)), ReplayBuffer(storage=LazyTensorStorage(30))
        rb._transform = Compose(make(), MultiStepTransform(3, 0.5))  # MultiStepTransform first on writing
        clean._transform = MultiStepTransform(3, 0.5)
        for buffer in (rb, clean):
            whole = steps(9)
            buffer.extend(whole[:5])
            buffer.extend(whole[5:7])
            buffer.flush_transforms()
        assert torch.equal(stored(rb)["x"], 2 * stored(clean)["x"])
        assert torch.equal(stored(rb)["next"]["x"], stored(clean)["next"]["x"])


def test_workers_leave_writing_to_the_process_that_holds_steps_back():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(400, shared=True, lanes=2), transform=Delayed())
    make = partial(GymEnv, "Pendulum-v1")  # no episode ends: else the newest two might not wait
    with MultiSyncDataCollector([make] * 2, frames_per_batch=40, total_frames=120, replay_buffer=rb) as collector:
        for _ in collector:
            pass
    assert len(rb) == 118 and [writer.rows for writer in rb.stats().writers] == [118], (
        "the newest two wait; workers would each have kept two, and lost them"
    )


# ---- what is refused ----
class NoKeys:
    def __call__(self, batch):
        return batch

    def _inv_apply_transform(self, value):
        return value


class OnlyInverse:
    def inv(self, batch):
        return batch


@each(
    "transform, said",
    [
        (NoKeys(), r"a NoKeys has `_inv_apply_transform`, and no `in_keys_inv`"),
        (OnlyInverse(), r"a OnlyInverse has an inverse for writing, and for reading neither"),
        (Form, r"Form is a class: give Form\(...\)"),
        (VecNorm, r"VecNorm is a class: give VecNorm\(...\)"),
        (3, "got a int"),
    ],
)
@each("way", ["transform=", "append", "insert", "nested", "_transform", "in an environment"])
def test_what_cannot_be_honoured_is_named_and_changes_nothing(transform, said, way):
    rb = ReplayBuffer(storage=LazyTensorStorage(9))
    with pytest.raises(TypeError, match=said):
        if way == "transform=":
            ReplayBuffer(transform=transform)
        elif way == "append":
            rb.append_transform(transform)
        elif way == "insert":
            rb.insert_transform(0, transform, invert=True)
        elif way == "nested":
            Compose(Compose(transform))
        elif way == "_transform":
            rb._transform = transform
        else:
            TransformedEnv(GymEnv("CartPole-v1"), transform)
    assert len(rb.transform) == 0


@each("data", [{"x": torch.zeros(3)}, torch.zeros(3), [{"x": torch.zeros(3)}]])
def test_what_works_on_tensordicts_names_itself_for_other_data(data):
    rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=Form(["x"], ["x"]))
    with pytest.raises(TypeError, match=r"Form takes TensorDicts, and a (dict|Tensor) is written"):
        rb.extend(data)
    assert len(rb) == 0


# ---- inverses that do nothing ----
Root = type("Root", (Form,), {"__module__": "torchrl.envs", "inv": Form.inv, "_inv_call": Form._inv_call})


class Reading(Root):
    """A transform of TorchRL that only reads."""

    def _inv_apply_transform(self, value):
        return value


def test_an_inverse_of_torchrl_that_does_nothing_is_not_called():
    class Several(Root):
        def __init__(self, *transforms):
            super().__init__()
            self.transforms = torch.nn.ModuleList(transforms)

        def _inv_call(self, td):
            raise AssertionError("it was called")

    for transform in (Reading(["x"]), Several(Reading(["x"]), Reading())):
        rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=transform)
        assert not rb.transform.stream.inverse_is_ordered and not rb.transform.changes_writes()
        transform.register_buffer("scale", torch.ones(()))
        rb.extend(steps(3))
        assert rb.transform.state_dict() == {}
        rb.append_transform(transform)
        assert rb.flush_transforms().shape == (0,)
    for transform in (Reading(["x"], ["x"]), Several(Reading(["x"], ["x"]))):
        assert ReplayBuffer(transform=transform).transform.changes_writes()


# ---- dtypes ----
def test_a_cast_with_keys_for_writing_only_reads_everything():
    cast = DTypeCastTransform(torch.float16, torch.float32, in_keys_inv=["x"])
    rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=cast)
    rb.extend(steps(4))
    assert stored(rb)["x"].dtype == torch.float16 and stored(rb)["next", "x"].dtype == torch.float32
    assert_equal(rb[:], steps(4))
    renamed = DTypeCastTransform(torch.float16, torch.float32, in_keys_inv=["small"], out_keys_inv=["x"])
    assert renamed.inv({"x": torch.zeros(2)})["small"].dtype == torch.float16


def test_a_cast_of_actions_only_leaves_other_actions_specs():
    env = TransformedEnv(
        GymEnv("Pendulum-v1"), DTypeCastTransform(torch.float32, torch.float64, in_keys_inv=["action"])
    )
    assert env.action_spec.dtype == torch.float64 and env.rollout(3)["next", "observation"].dtype == torch.float64
    env = TransformedEnv(GymEnv("Pendulum-v1"), DTypeCastTransform(torch.float32, torch.float64, in_keys_inv=["other"]))
    assert env.action_spec.dtype == torch.float32


# ---- environments ----
class Turned(Form):
    """Actions the other way round."""

    def _inv_call(self, td):
        return td.set("action", -td["action"])


class ChildTurned(ChildByCall):
    def _call(self, td):
        return td

    _inv_call = Turned._inv_call


@each("make", [Turned, ChildTurned, lambda: Compose(Turned())])
def test_actions_go_through_the_inverse(make):
    env, bare = TransformedEnv(GymEnv("Pendulum-v1"), make()), GymEnv("Pendulum-v1")
    for one in (env, bare):
        one.set_seed(0)
    td, expected = env.reset(), bare.reset()
    for action in (0.5, -1.5):
        td = env.step(td.set("action", torch.tensor([action])))["next"]
        expected = bare.step(expected.set("action", torch.tensor([-action])))["next"]
        assert torch.equal(td["observation"], expected["observation"])


class Doubled(Form):
    def _inv_call(self, td):
        return td.set("action", 2 * td["action"])


class Wider(Form):
    def _inv_call(self, td):
        return td.set("action", td["action"].double())


class Fails(Form):
    def _inv_call(self, td):
        raise RuntimeError("it cannot")


@each("make", [Doubled, Wider, Fails, Delayed, Silent])
@each("way", ["transform", "append"])
def test_an_inverse_that_makes_no_actions_of_the_environment_is_refused(make, way):
    env = TransformedEnv(GymEnv("Pendulum-v1"))
    with pytest.raises(TypeError, match=rf"{make.__name__} does not turn actions of the environment"):
        TransformedEnv(GymEnv("Pendulum-v1"), make()) if way == "transform" else env.append_transform(make())
    env.rollout(2)


def test_a_mapped_store_is_written_through_the_inverse(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(9, scratch_dir=tmp_path / "s"), transform=Form(["x"], ["x"]))
    rb.extend(steps(4))
    rb.storage.close()
    again = ReplayBuffer.open(tmp_path / "s", transform=Form(["x"], ["x"]))
    again.extend(steps(4))
    assert torch.equal(stored(again)["x"], torch.cat([2 * steps(4)["x"]] * 2))


class Halved(Transform):
    """A user's class that works in both directions, where keys are named."""

    def _apply_transform(self, value):
        return value / 2

    def _inv_apply_transform(self, value):
        return value * 2


def test_an_inverse_that_nothing_names_is_refused_and_one_that_reads_only_is_warned_of():
    for place in (lambda t: ReplayBuffer(storage=LazyTensorStorage(9), transform=t), Compose):
        with pytest.raises(TypeError, match="Halved has `_inv_apply_transform`, and neither `in_keys_inv`"):
            place(Halved())
    with pytest.warns(UserWarning, match=r"\['x'\] are stored as they are written"):
        rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=Compose(Halved(["x"])))
    rb.extend(TensorDict({"x": torch.ones(3)}, [3]))
    assert rb[:]["x"].tolist() == [0.5] * 3 and rb.storage[:]["x"].tolist() == [1.0] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=Halved(["x"], in_keys_inv=["x"]))
    rb.extend(TensorDict({"x": torch.ones(3)}, [3]))
    assert rb[:]["x"].tolist() == [1.0] * 3 and rb.storage[:]["x"].tolist() == [2.0] * 3


def test_an_inverse_of_whole_batches_gives_all_back_where_it_has_a_flush():
    class Writes(Transform):
        def _inv_call(self, tensordict):
            return tensordict

    class Flushes(Writes):
        def flush(self, request):
            return request

    class FlushesItself(Transform):
        _inv_call, flush = Writes._inv_call, Flushes.flush

    assert not Writes().stream.flushes_all and FlushesItself().stream.flushes_all
