"""Each transform keeps the contract."""

import torch

from contracts.transform import KeyedTransformContract, TimedTransformContract
from engram.testing import TransformContract
from engram.transforms import (
    CatFrames,
    Compose,
    DTypeCastTransform,
    ExcludeTransform,
    FlattenObservation,
    GrayScale,
    InitTracker,
    MultiStepTransform,
    ObservationNorm,
    RenameTransform,
    Resize,
    Reward2GoTransform,
    RewardScaling,
    RewardSum,
    SelectTransform,
    StepCounter,
    ToTensorImage,
    UnsqueezeTransform,
    VecNorm,
)
from transforms.data import steps, trajectory


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


class TestObservationNorm(Steps, KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return ObservationNorm(torch.arange(3.0), 2.0, in_keys, out_keys)


class TestRewardScaling(Steps, KeyedTransformContract):
    def make_for(self, in_keys, out_keys=None):
        return RewardScaling(1.0, 0.5, in_keys, out_keys)


class TestVecNorm(Steps, KeyedTransformContract):
    learns = True

    def make_for(self, in_keys, out_keys=None):
        return VecNorm(in_keys, out_keys)


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


class TestRewardSum(Steps, TimedTransformContract):
    trajectory = staticmethod(trajectory)

    def make(self):
        return RewardSum()


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
