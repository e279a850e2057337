"""Where a transform stands, it changes something or says that it cannot, and where it would."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram import transforms
from engram.collectors import SyncDataCollector
from engram.data import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    Unbounded,
)
from engram.envs import GymEnv, TransformedEnv
from engram.testing.transform import Replayed
from engram.transforms import (
    ClipTransform,
    Compose,
    EndOfLifeTransform,
    ExcludeTransform,
    InitTracker,
    MultiStepTransform,
    NextStateReconstructor,
    NoopResetEnv,
    ObservationNorm,
    RandomCropTensorDict,
    RenameTransform,
    Reward2GoTransform,
    RewardSum,
    SelectTransform,
    StepCounter,
    Transform,
)
from engram.transforms.torchrl import TorchRLTransform
from transforms.data import flags, steps

MAKE = {
    "ActionScaling": lambda: transforms.ActionScaling(loc=0.0, scale=2.0),
    "ActionScaling on others": lambda: transforms.ActionScaling(loc=0.0, scale=2.0, in_keys_inv=["x"]),
    "CatFrames": lambda: transforms.CatFrames(2, -3, ["image"]),
    "CatTensors": lambda: transforms.CatTensors(["x", "y"], "cat"),
    "CenterCrop": lambda: transforms.CenterCrop(4, 4, ["image"]),
    "ClipTransform": lambda: ClipTransform(["x"], low=-0.1, high=0.1),
    "Compose": lambda: Compose(StepCounter(), NoopResetEnv(2)),
    "DTypeCastTransform": lambda: transforms.DTypeCastTransform(torch.float64, torch.float32),
    "DoubleToFloat": lambda: transforms.DoubleToFloat(["wide"]),
    "EndOfLifeTransform": lambda: EndOfLifeTransform(),
    "ExcludeTransform": lambda: ExcludeTransform("x"),
    "ExcludeTransform on writing": lambda: ExcludeTransform("x", inverse=True),
    "FlattenObservation": lambda: transforms.FlattenObservation(-3, -1, ["image"]),
    "FrameSkipTransform": lambda: transforms.FrameSkipTransform(2),
    "GrayScale": lambda: transforms.GrayScale(["image"]),
    "InitTracker": lambda: InitTracker(),
    "MultiStepTransform": lambda: MultiStepTransform(3, 0.9),
    "NextStateReconstructor": lambda: NextStateReconstructor(["y"], traj_key=None),
    "NoopResetEnv": lambda: NoopResetEnv(3),
    "ObservationNorm": lambda: ObservationNorm(1.0, 2.0, ["x"]),
    "ObservationNorm on writing": lambda: ObservationNorm(1.0, 2.0, in_keys_inv=["x"]),
    "RandomCropTensorDict": lambda: RandomCropTensorDict(2),
    "RandomTruncationTransform": lambda: transforms.RandomTruncationTransform(2, 5),
    "RenameTransform": lambda: RenameTransform(["x"], ["z"]),
    "RenameTransform on writing": lambda: RenameTransform([], [], ["z"], ["x"]),
    "Resize": lambda: transforms.Resize(4, 4, in_keys=["image"]),
    "Reward2GoTransform": lambda: Reward2GoTransform(0.5),
    "RewardClipping": lambda: transforms.RewardClipping(-1, 1),
    "RewardScaling": lambda: transforms.RewardScaling(0.0, 2.0),
    "RewardSum": lambda: RewardSum(),
    "SelectTransform": lambda: SelectTransform("x"),
    "SignTransform": lambda: transforms.SignTransform(["x"]),
    "StepCounter": lambda: StepCounter(),
    "TargetReturn": lambda: transforms.TargetReturn(10.0),
    "TensorDictPrimer": lambda: transforms.TensorDictPrimer(hidden=Unbounded((2,))),
    "ToTensorImage": lambda: transforms.ToTensorImage(["pixels"]),
    "TrajCounter": lambda: transforms.TrajCounter(),
    "Transform": lambda: Transform(["x"]),
    "UnsqueezeTransform": lambda: transforms.UnsqueezeTransform(-1, in_keys=["x"]),
    "VecNorm": lambda: transforms.VecNorm(["x"]),
    "VecNormV2": lambda: transforms.VecNormV2(["x"]),
}


def data(*shape):
    """One trajectory, or [*, steps] of them, with something for each transform."""
    batch = steps(*shape)
    n = batch.numel()
    batch["action"] = torch.ones(*shape, 1)
    batch["y"], batch["wide"] = torch.arange(n).reshape(*shape, 1).float(), torch.ones(*shape, 1).double()
    batch["image"] = torch.rand(*shape, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    batch["pixels"] = torch.zeros(*shape, 8, 8, 3, dtype=torch.uint8)
    return batch


def are_same(one, other):
    """Whether two batches have the same entries; those that buffers add do not count."""
    one, other = one.exclude("index"), other.exclude("index")
    if one.shape != other.shape or set(one.keys(True, True)) != set(other.keys(True, True)):
        return False
    pairs = [(one[key], other[key]) for key in one.keys(True, True)]
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def buffer(**parts):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(40, compact=False), batch_size=6, **parts)


def written_through(transform, *, invert=False):
    rb = buffer()
    rb.append_transform(transform, invert=invert)
    before = copy.deepcopy(transform.state_dict())
    rb.extend(data(6))
    rows = rb.storage[:]
    return not are_same(rows, data(6)) or transform.state_dict().keys() != before.keys() or not are_same(rb[:], rows)


def read_of_rows_of_before(transform):
    rb = buffer()
    rb.extend(data(6))
    rows = rb[:]
    rb.append_transform(transform)
    return not are_same(rb[:], rows)


def of_an_ensemble(transform):
    member = buffer(sampler=SliceSampler(slice_len=6))
    member.extend(data(6))
    bare = ReplayBufferEnsemble(member, batch_size=6).sample()
    return not are_same(ReplayBufferEnsemble(member, transform=transform, batch_size=6).sample(), bare)


def of_a_dataset(transform):
    rb = buffer()
    rb.extend(data(6))
    rb.set_writer(ImmutableDatasetWriter())
    rb.append_transform(transform)
    return not are_same(rb[:], data(6))


def of_a_collector(transform):
    collector = SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=2, total_frames=2, postproc=transform)
    collector.shutdown()
    return not are_same(collector.postproc(data(6)), data(6))


def of_an_environment(transform):
    def rollout(env):
        torch.manual_seed(0)
        env.set_seed(0)
        return env.rollout(9, break_when_any_done=False)

    base = [Replayed(data(1, 30), [4]) for _ in range(2)]
    return not are_same(rollout(base[0]), rollout(TransformedEnv(base[1], transform)))


PLACES = {
    "a buffer": written_through,
    "a buffer, inverted": lambda transform: written_through(transform, invert=True),
    "a buffer that has rows": read_of_rows_of_before,
    "an ensemble": of_an_ensemble,
    "a dataset": of_a_dataset,
    "a collector": of_a_collector,
    "an environment": of_an_environment,
}


def test_every_public_transform_is_looked_at():
    assert {name.split(" on ")[0] for name in MAKE} == set(transforms.__all__)


@each("place", PLACES)
@each("name", MAKE)
def test_a_transform_changes_something_where_it_stands_or_says_that_it_cannot(place, name):
    torch.manual_seed(0)
    kind = name.split(" on ")[0].removesuffix("V2")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            changes = PLACES[place](MAKE[name]())
        except (TypeError, RuntimeError, NotImplementedError, ValueError) as error:
            assert kind in str(error) or name == "Compose", "an error has the name of the transform"
            return
    said = [str(w.message) for w in given if "changes nothing" in str(w.message) or "written without" in str(w.message)]
    if name == "Compose":
        assert changes and [text for text in said if "NoopResetEnv" in text] == said
        return
    if (name, place) == ("ObservationNorm on writing", "a buffer that has rows"):
        assert not changes and not said, "rows do not show whether they went through it, and later ones will"
        return
    assert changes != bool(said), f"changes: {changes}, said: {said}"
    assert all(kind in text and ("append it" in text or "put it" in text or "no entry" in text) for text in said)


# ---- what is no reason to warn ----
class ByEntry(Transform):
    def _apply_transform(self, value):
        return value + 1


class OnWriting(Transform):
    def _inv_apply_transform(self, value):
        return value + 1


class ByCall(Transform):
    def _call(self, td):
        return td


class OfStreams(Transform):
    def inverse_stream(self, writing):
        return writing


class Recorder(Transform):
    def close(self):
        pass


class Hidden(Compose):
    def forward(self, batch):
        return batch


def test_a_users_class_is_not_warned_of_where_it_has_a_method_for_the_place():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for transform in (ByEntry(["x"]), OnWriting(in_keys_inv=["x"]), ByCall(), OfStreams(), Hidden()):
            rb = buffer(transform=transform)
            rb.append_transform(lambda batch: batch)
            rb.extend(data(6))
            rb.sample()
        for transform in (ByEntry(["x"]), ByCall(), Recorder(), OnWriting(in_keys_inv=["action"])):
            TransformedEnv(Replayed(data(1, 30), [4]), transform)
        buffer(transform=Compose())
    with pytest.warns(UserWarning, match="Recorder changes nothing in a replay buffer"):
        buffer(transform=Recorder())


def test_a_transform_warns_once_also_where_it_is_copied():
    transform = EndOfLifeTransform()
    with pytest.warns(UserWarning, match="EndOfLifeTransform changes nothing.*put it into a TransformedEnv"):
        buffer(transform=transform)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (transform, pickle.loads(pickle.dumps(transform)), copy.deepcopy(transform)):
            buffer(transform=one)
            SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=2, total_frames=2, postproc=one).shutdown()


@each("make", [lambda: MultiStepTransform(2, 0.5), lambda: ExcludeTransform("y", inverse=True), Reward2GoTransform])
def test_rows_that_went_through_it_are_no_reason_to_warn_wherever_they_come_from(make, tmp_path):
    rb = buffer(transform=make())
    rb.extend(data(6))
    rb.dumps(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = buffer(transform=make())
        loaded.loads(tmp_path)
        other = buffer(transform=Compose(make(), SelectTransform("x")))
        other.loads(tmp_path)
        for one in (rb, loaded, other, TensorDictReplayBuffer(storage=rb.storage, transform=make(), batch_size=2)):
            one.sample()
            one[:], one[0]


@each("make", [StepCounter, RewardSum, InitTracker])
def test_rows_that_it_was_appended_to_on_writing_are_no_reason_to_warn(make):
    rb = buffer()
    rb.append_transform(SelectTransform("x"))
    rb.append_transform(make(), invert=True)
    rb.extend(data(6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.sample()
        rb[:]
    later = buffer()
    later.extend(data(6))
    later.append_transform(make(), invert=True)
    with pytest.warns(UserWarning, match=f"inverted {make.__name__} finds rows that were written without it"):
        later.sample()


# ---- rows that do not follow each other ----
NEEDS_ORDER = {
    "StepCounter": StepCounter,
    "RewardSum": RewardSum,
    "Reward2GoTransform": Reward2GoTransform,
    "inverted MultiStepTransform": lambda: MultiStepTransform(2, 0.5),
    "NextStateReconstructor": lambda: NextStateReconstructor(["y"], traj_key=None),
    "RandomCropTensorDict": lambda: RandomCropTensorDict(2),
}


def filled(name, sampler, storage=None, rows=None):
    """A buffer with a transform that was appended after its rows were written."""
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40, compact=False) if storage is None else storage, sampler=sampler, batch_size=6
    )
    rb.extend(data(6) if rows is None else rows)
    return rb.append_transform(NEEDS_ORDER[name](), invert=name.startswith("inverted"))


@each("name", NEEDS_ORDER)
@each("sampler", [RandomSampler, SamplerWithoutReplacement])
@each("prefetch", [0, 2])
def test_single_rows_stay_as_they_are_with_a_warning(name, sampler, prefetch):
    rb = filled(name, sampler())
    rb = TensorDictReplayBuffer(storage=rb.storage, sampler=sampler(), transform=rb.transform, batch_size=6)
    with pytest.warns(UserWarning, match=f"{name} takes rows in the order of time") as given:
        batches = [rb.sample() for _ in range(3)]
    assert len([w for w in given if "order of time" in str(w.message)]) == 1
    stored = set(rb.storage[:].keys(True, True))
    assert all(set(batch.keys(True, True)) == stored and len(batch) == 6 for batch in batches)


@pytest.mark.filterwarnings("ignore:a batch of shape")
@each("name", NEEDS_ORDER)
@each("how", ["slices", "in order", "by index", "trajectories as items", "a list of trajectories"])
def test_rows_that_follow_each_other_are_changed_without_a_warning(name, how):
    sampler = {"slices": SliceSampler(slice_len=6), "in order": SamplerWithoutReplacement(shuffle=False)}.get(how)
    storage, rows = None, None
    if "trajectories" in how:
        rows, storage = data(8, 6), LazyTensorStorage(40) if how == "trajectories as items" else ListStorage(40)
    rb = filled(name, sampler or RandomSampler(), storage, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = rb[:] if how == "by index" else rb.sample()
    added = set(batch.keys(True, True)) - set(data(6).keys(True, True)) - {"index"}
    assert added or batch.shape[-1] == 2


def test_a_member_of_an_ensemble_leaves_single_rows_as_they_are():
    members = [filled("StepCounter", RandomSampler()) for _ in range(2)]
    with pytest.warns(UserWarning, match="StepCounter takes rows in the order of time"):
        batch = ReplayBufferEnsemble(*members, batch_size=6).sample()
    assert "step_count" not in batch.keys()
    plain = [buffer() for _ in range(2)]
    for member in plain:
        member.extend(data(6))
    with pytest.warns(UserWarning, match="StepCounter takes rows in the order of time"):
        batch = ReplayBufferEnsemble(*plain, transform=StepCounter(), batch_size=6).sample()
    assert "step_count" not in batch.keys()


def test_step_counts_say_which_rows_follow_each_other_in_any_draw():
    rb = buffer(transform=NextStateReconstructor(["y"], traj_key=None, step_count_key="n"))
    rb.extend(data(6).set("n", torch.arange(6)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = rb.sample()
    assert ("next", "y") in batch.keys(True)


# ---- sums and steps that lie ahead, on reading ----
def rewards_to_go(reward, gamma):
    sums, total = [], 0.0
    for value in reversed(reward.flatten().tolist()):
        total = value + gamma * total
        sums.append(total)
    return torch.tensor(sums[::-1]).unsqueeze(-1)


@each("when", ["before the data", "after the data", "after the data, inverted"])
@each("length", [6, [3, 9, 6]])
def test_returns_of_whole_slices_are_the_same_whenever_the_transform_came(when, length):
    torch.manual_seed(0)
    episodes = [data(n) for n in (length if isinstance(length, list) else [length])]
    sampler = SliceSampler(slice_len=9, end_key=("next", "done"), strict_length=False, pad_output=True)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40, compact=False), sampler=sampler, batch_size=9)
    transform = Reward2GoTransform(gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if when == "before the data":
            rb.append_transform(transform)
        rb.extend(torch.cat(episodes))
        if when != "before the data":
            rb.append_transform(transform, invert="inverted" in when)
        for _ in range(5):
            batch = rb.sample()
            batch = batch[batch["collector", "mask"]]
            torch.testing.assert_close(batch["reward_to_go"], rewards_to_go(batch["next", "reward"], 0.5))


@each("invert", [False, True])
def test_slices_that_end_before_their_episode_are_told(invert):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40, compact=False), sampler=SliceSampler(slice_len=3))
    rb.extend(data(9))
    rb.append_transform(Reward2GoTransform(gamma=0.5), invert=invert)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"\d of the 4 trajectories in this one end before their episode"):
        batch = rb.sample(12)
    for part in batch.split(3):
        torch.testing.assert_close(part["reward_to_go"], rewards_to_go(part["next", "reward"], 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        rb.sample(12)


@each("make", [lambda td: td, lambda td: td.to_dict()])
def test_returns_of_what_ends_by_a_time_limit_may_lack_rewards(make):
    batch = data(4)
    batch["next"].update(flags(torch.tensor([0, 0, 0, 1]).bool()))
    batch["next", "terminated"].zero_()
    with pytest.warns(UserWarning, match="1 of the 1 trajectories in this one end before their episode, or by trunc"):
        made = Reward2GoTransform(0.5)(make(batch.clone().set(("next", "truncated"), batch["next", "done"])))
    torch.testing.assert_close(made["reward_to_go"], rewards_to_go(batch["next", "reward"], 0.5))


def test_a_batch_that_is_written_and_ends_within_a_trajectory_is_told():
    rb = buffer(transform=Reward2GoTransform(0.5))
    with pytest.warns(UserWarning, match="the last trajectory of this one does not end in it"):
        rb.extend(torch.cat([data(4), data(6)[:3]]))
    expected = [rewards_to_go(part["next", "reward"], 0.5) for part in (data(4), data(6)[:3])]
    torch.testing.assert_close(rb[:]["reward_to_go"], torch.cat(expected))


def test_inverted_n_steps_are_those_of_each_slice():
    torch.manual_seed(0)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40, compact=False), sampler=SliceSampler(slice_len=4), batch_size=12
    )
    rb.extend(data(9))
    rb.append_transform(MultiStepTransform(3, 0.5), invert=True)
    for _ in range(3):
        batch = rb.sample().reshape(3, 4)
        assert batch["steps_to_next_obs"].squeeze(-1).tolist() == [[3, 3, 2, 1]] * 3
        first = batch["next", "original_reward"].squeeze(-1)
        torch.testing.assert_close(batch["next", "reward"][:, 0, 0], first[:, :3] @ torch.tensor([1.0, 0.5, 0.25]))
    assert isinstance(batch, TensorDict) and rb.transform[0].transform.held_back == 0


def test_a_list_of_rows_has_returns_too():
    rb = ReplayBuffer(storage=ListStorage(20))
    rb.extend([data(4)[i] for i in range(4)])
    rb.append_transform(Reward2GoTransform(0.5))
    torch.testing.assert_close(torch.stack(rb[:])["reward_to_go"], rewards_to_go(data(4)["next", "reward"], 0.5))


def test_deltas_of_observations_are_refused_by_what_stores_each_once():
    class Root:
        """As the base of TorchRL's transforms."""

        def _post_step_mdp_hooks(self, td):
            return td

    class NextObservationDelta(Root):
        def _post_step_mdp_hooks(self, td):
            return td.copy()

    with pytest.raises(TypeError, match=r"NextObservationDelta .*LazyTensorStorage\(n, compact=True\)"):
        TorchRLTransform(NextObservationDelta(), Root)
    with pytest.raises(ImportError, match="compact=True"):
        from engram.envs.transforms import NextObservationDelta
