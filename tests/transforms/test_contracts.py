"""Each transform against the contract of transforms, and what all of ours must do besides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from contracts.folded import assert_contract, contracts_in
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.specs import Unbounded
from engram.testing import TransformContract
from engram.testing.transform import Replayed, as_dict, assert_equal
from engram.transforms import (
    ActionScaling,
    CatFrames,
    CatTensors,
    CenterCrop,
    ClipTransform,
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    EndOfLifeTransform,
    ExcludeTransform,
    FlattenObservation,
    GrayScale,
    InitTracker,
    MultiStepTransform,
    NextStateReconstructor,
    NoopResetEnv,
    ObservationNorm,
    RenameTransform,
    Resize,
    Reward2GoTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SignTransform,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    ToTensorImage,
    TrajCounter,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)
from transforms.data import steps, trajectory


# ---- what transforms must do besides what `TransformContract` asks of any ----
class KeyedTransformContract(TransformContract):
    #: an entry of `batch` that the transform can work on
    source: Any = "x"

    def make(self) -> Any:
        return self.make_for([self.source])

    def make_for(self, in_keys: Any, out_keys: Any = None) -> Any:
        raise NotImplementedError

    def test_out_keys_leave_the_source_in_place(self):
        expected = self._result(self.make_for([self.source]), self.batch(6))[self.source]
        out = self._result(self.make_for([self.source], [("deep", "er", "out")]), self.batch(6))
        assert_equal(out[self.source], self.batch(6)[self.source])
        assert_equal(out["deep", "er", "out"], expected)

    @pytest.mark.parametrize("kind", [lambda td: td, as_dict], ids=["TensorDict", "dict"])
    def test_nested_keys_are_tuples(self, kind):
        expected = self._result(self.make_for([self.source]), self.batch(6))[self.source]
        batch = self.batch(6)
        batch["some", "where", "in"] = batch[self.source].clone()
        out = self._result(self.make_for([("some", "where", "in")], [("some", "out")]), kind(batch))
        assert_equal(out["some"]["out"], expected)

    def test_a_missing_key_is_an_error_that_names_it_and_those_that_exist(self):
        transform = self.make_for([("no", "such")])
        for batch in (self.batch(4), as_dict(self.batch(4))):
            with pytest.raises(KeyError, match=rf"{type(transform).__name__}.*\('no', 'such'\).*{self._a_key()}"):
                transform(batch)

    def test_a_plain_tensor_is_an_error_that_says_what_it_takes(self):
        with pytest.raises(TypeError, match="Tensor has none; give it TensorDicts, dicts or tensorclasses"):
            self.make()(torch.zeros(4, 3))

    def test_keys_are_strings_or_tuples_of_them_and_as_many_out_as_in(self):
        with pytest.raises(TypeError, match="3"):
            self.make_for([3])
        with pytest.raises(ValueError, match=r"2 keys.*1"):
            self.make_for(["a", "b"], ["c"])
        with pytest.raises(ValueError, match="twice"):
            self.make_for(["a", "b"], ["c", "c"])

    def test_its_keys_can_be_read(self):
        transform = self.make_for(["a", ("b", "c")], ["d", "e"])
        assert list(transform.in_keys) == ["a", ("b", "c")] and list(transform.out_keys) == ["d", "e"]
        assert "('b', 'c')" in repr(transform) and "'d'" in repr(transform)

    def _result(self, transform: Any, batch: Any) -> Any:
        return transform(batch)

    def _a_key(self) -> str:
        return str(next(iter(self.batch(4).keys())))


class TimedTransformContract(TransformContract):
    """`make` gives what works on reading; on writing it is appended with `invert=True`."""

    def trajectory(self, steps: int, number: int) -> TensorDict:
        """A whole trajectory [steps]; data depend on the number."""
        raise NotImplementedError

    def test_no_trajectory_sees_another(self):
        parts = [self.trajectory(n, k) for k, n in enumerate((4, 1, 7, 2))]
        expected = torch.cat([self.make().forward(part.clone()) for part in parts])
        assert_equal(self.make().forward(torch.cat(parts)), expected)
        rows = torch.stack([torch.cat(parts), torch.cat(parts[::-1])])
        both = self.make().forward(rows.clone())
        assert_equal(both[0], expected)
        assert_equal(both[1], self.make().forward(torch.cat(parts[::-1])))

    def test_a_batch_that_ends_within_a_trajectory_is_the_beginning_of_the_whole(self):
        whole = self.make().forward(self.trajectory(9, 3))
        assert_equal(self.make().forward(self.trajectory(9, 3)[:6]), whole[:6])

    def test_ids_and_init_marks_end_trajectories_too(self):
        replaced = {"is_init", *(("next", flag) for flag in ("done", "truncated", "terminated"))}
        parts = [self.trajectory(n, k) for k, n in enumerate((4, 3))]
        expected = torch.cat([self.make().forward(part.clone()) for part in parts])
        for name, value in (("ids", torch.tensor([7] * 4 + [9] * 3)), ("init", torch.arange(7) % 4 == 0)):
            batch = torch.cat(parts)
            for flag in ("done", "truncated", "terminated"):
                batch["next", flag] = torch.zeros(7, 1, dtype=torch.bool)
            batch[("collector", "traj_ids") if name == "ids" else "is_init"] = value
            found = self.make().forward(batch)
            for key in expected.keys(True, True):
                if key not in replaced:
                    assert_equal(found[key], expected[key])

    # Each child runs it by itself, with an example database entry of its own.
    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(data=st.data())
    def test_written_in_pieces_is_written_in_one(self, data):
        lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
        stream = torch.cat([self.trajectory(n, k) for k, n in enumerate(lengths)])
        cuts = sorted(data.draw(st.sets(st.integers(1, len(stream)), max_size=8)) | {0, len(stream)})
        rb = ReplayBuffer(storage=LazyTensorStorage(100))
        rb.append_transform(self.make(), invert=True)
        for start, stop in pairwise(cuts):
            if stop == start + 1:
                rb.add(stream[start])
            else:
                rb.extend(stream[start:stop] if data.draw(st.booleans()) else as_dict(stream[start:stop]))
        expected = self.make().forward(stream.clone())
        assert_equal(rb.storage.get(slice(None)), expected)

    def test_a_write_after_a_flush_continues_no_trajectory(self):
        parts = [self.trajectory(6, number)[:4] for number in (1, 2)]
        rb = ReplayBuffer(storage=LazyTensorStorage(40))
        rb.append_transform(self.make(), invert=True)
        for part in parts:
            rb.extend(part)
            rb.flush_transforms()
        expected = torch.cat([self.make().forward(part.clone()) for part in parts])
        assert_equal(rb.storage.get(slice(None)), expected)

    def test_environments_go_on_by_themselves(self):
        strands = [torch.cat([self.trajectory(n, k) for k, n in enumerate(ns)]) for ns in ((3, 5, 4), (6, 1, 5))]
        stream = torch.stack(strands)
        expected = self.make().forward(stream.clone())
        for dim_extend in (1, 0):
            rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2), dim_extend=dim_extend)
            rb.append_transform(self.make(), invert=True)
            for start, stop in ((0, 2), (2, 3), (3, 8), (8, 12)):
                rb.extend(stream[:, start:stop] if dim_extend else stream[:, start:stop].transpose(0, 1))
            rb.empty()
            for start, stop in ((0, 2), (3, 8), (8, 12)):
                if start == 3:
                    rb.add(stream[:, 2])
                rb.extend(stream[:, start:stop] if dim_extend else stream[:, start:stop].transpose(0, 1))
            found = rb[:]
            assert_equal(found if dim_extend else found.transpose(0, 1), expected)


# ---- each transform keeps the contract ----
class Steps:
    def batch(self, *shape):
        return steps(*shape)


class TestToTensorImage(KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return ToTensorImage(in_keys=in_keys, out_keys=out_keys)

    def batch(self, *shape):
        return steps(*shape, feature=(5, 4, 3), dtype=torch.uint8)


class TestResize(KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return Resize(3, 5, in_keys=in_keys, out_keys=out_keys)

    def batch(self, *shape):
        return steps(*shape, feature=(3, 6, 7))


class TestCenterCrop(KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return CenterCrop(3, 4, in_keys, out_keys)

    def batch(self, *shape):
        return steps(*shape, feature=(3, 6, 7))


class TestGrayScale(KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return GrayScale(in_keys, out_keys)

    def batch(self, *shape):
        return steps(*shape, feature=(3, 6, 7), dtype=torch.uint8)


class TestFlattenObservation(KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return FlattenObservation(-3, -2, in_keys, out_keys)

    def batch(self, *shape):
        return steps(*shape, feature=(2, 3, 4))


class TestUnsqueezeTransform(Steps, KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return UnsqueezeTransform(-1, in_keys=in_keys, out_keys=out_keys)


class TestDTypeCastTransform(Steps, KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return DTypeCastTransform(torch.float32, torch.float64, in_keys, out_keys)


class TestDTypeCastTransformOfEverything(Steps, TransformContract):
    def make(self):
        return DTypeCastTransform(torch.float16, torch.float32)


class TestDoubleToFloat(Steps, KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return DoubleToFloat(in_keys, out_keys, ["x"])

    def batch(self, *shape):
        return steps(*shape, dtype=torch.float64)


class TestSignTransform(Steps, KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return SignTransform(in_keys, out_keys, ["x"])


class TestClipTransform(Steps, KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return ClipTransform(in_keys, out_keys, ["x"], low=-0.5, high=100.0)


class TestCatTensors(TransformContract):
    def make(self):
        return CatTensors(["y", "x"], "vector")

    def batch(self, *shape):
        batch = steps(*shape)
        return batch.set("y", batch["x"][..., :2] * 2)


class TestObservationNorm(Steps, KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return ObservationNorm(torch.arange(3.0), 2.0, in_keys, out_keys)


class TestRewardClipping(Steps, KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return RewardClipping(-0.5, 100.0, in_keys, out_keys)


class TestRewardScaling(Steps, KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return RewardScaling(1.0, 0.5, in_keys, out_keys)


class TestVecNorm(Steps, KeyedTransformContract):
    learns = True

    def make_for(self, in_keys, out_keys=None):
        return VecNorm(in_keys, out_keys)


class TestVecNormV2(Steps, KeyedTransformContract):
    learns = True

    def make_for(self, in_keys, out_keys=None):
        return VecNormV2(in_keys, out_keys)


class TestActionScaling(Steps, TransformContract):
    environments = False  # such as have other actions

    def make(self):
        return ActionScaling(["x"], loc=1.0, scale=2.0)

    def make_for_env(self):
        return ActionScaling(loc=1.0, scale=2.0)

    def test_where_it_works_in_no_environment_it_says_what_to_use(self):
        with pytest.raises(ValueError, match="ActionScaling scales continuous actions"):
            self._env()


class TestRenameTransform(Steps, TransformContract):
    def make(self):
        return RenameTransform(["x", ("next", "x")], ["y", ("next", "deep", "y")])

    def make_for_env(self):
        return RenameTransform(["x", ("next", "x")], [("deep", "y"), ("next", "deep", "y")])


class TestSelectTransform(Steps, TransformContract):
    def make(self):
        return SelectTransform("x")


class TestExcludeTransform(Steps, TransformContract):
    def make(self):
        return ExcludeTransform(("next", "x"), "absent")


class TestCompose(Steps, TransformContract):
    def make(self):
        return Compose(VecNorm(["x"]), ObservationNorm(0.0, 2.0, ["x"]))

    learns = True

    def test_it_says_what_it_is(self):
        assert repr(Compose(Compose(GrayScale()))) == (
            "Compose(\n    Compose(\n        GrayScale(in_keys=['pixels'])))"
        )
        assert repr(Compose()) == "Compose()"


class TestReward2GoTransform(Steps, TransformContract):
    environments = False

    def make(self):
        return Reward2GoTransform(0.9)


class TestMultiStepTransform(Steps, TransformContract):
    environments = False

    def make(self):
        return MultiStepTransform(3, 0.9)


class TestNextStateReconstructor(Steps, TransformContract):
    environments = False

    def make(self):
        return NextStateReconstructor(["x"], traj_key=None)


class TestNoopResetEnv(Steps, TransformContract):
    environments = False

    def make(self):
        return NoopResetEnv(3)

    def test_where_it_works_in_no_environment_it_says_what_to_use(self):
        with pytest.raises(ValueError, match=r"SerialEnv\(n, lambda: TransformedEnv"):
            self._env()


class TestEndOfLifeTransform(Steps, TransformContract):
    class WithLives(Replayed):
        def call_below(self, path):
            assert path == "unwrapped.ale.lives"
            return (self._left // 2).tolist()

    def make(self):
        return EndOfLifeTransform()

    def _base(self, rows=slice(None)):
        return self.WithLives(self.batch(3, 60)[rows], [5, 3, 7][rows])


class TestTensorDictPrimer(Steps, TransformContract):
    dicts = False

    def make(self):
        return TensorDictPrimer({("agent", "hidden"): Unbounded((2,)), "count": Unbounded((1,), dtype=torch.int64)})


class TestTrajCounter(Steps, TransformContract):
    learns = True

    def make(self):
        return TrajCounter()


class TestRewardSum(Steps, TimedTransformContract):
    trajectory = staticmethod(trajectory)

    def make(self):
        return RewardSum()


class TestTargetReturn(Steps, TimedTransformContract):
    trajectory = staticmethod(trajectory)

    def make(self):
        return TargetReturn(100.0)


class TestConstantTargetReturn(Steps, TimedTransformContract):
    trajectory = staticmethod(trajectory)

    def make(self):
        return TargetReturn(100.0, mode="constant")


class TestStepCounter(Steps, TimedTransformContract):
    trajectory = staticmethod(trajectory)

    def make(self):
        return StepCounter()


class TestInitTracker(Steps, TimedTransformContract):
    trajectory = staticmethod(trajectory)

    def make(self):
        return InitTracker()


class TestCatFrames(Steps, KeyedTransformContract, TimedTransformContract):
    trajectory = staticmethod(trajectory)

    def make(self):
        return CatFrames(3, -1, ["x", ("next", "x")])

    def make_for(self, in_keys, out_keys=None):
        return CatFrames(3, -1, in_keys, out_keys)


class TestCatFramesWithConstants(TestCatFrames):
    def make(self):
        return CatFrames(4, -1, ["x"], ["y"], padding="constant", padding_value=-7)


CONTRACTS = contracts_in(dict(globals()), TransformContract)


@contextmanager
def in_environments(contract: Any) -> Iterator[None]:
    if not contract.environments:
        pytest.skip("it does not work in environments")
    yield


@pytest.mark.parametrize("every_case", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_transform_keeps_its_contract(contract, every_case, tmp_path_factory):
    of = CONTRACTS[contract]()
    fixtures = {
        "in_env": lambda: in_environments(of),
        "tmp_path": lambda: nullcontext(tmp_path_factory.mktemp("saved")),
    }
    assert assert_contract(of, fixtures, None if every_case else list(CONTRACTS).index(contract)) >= 12
