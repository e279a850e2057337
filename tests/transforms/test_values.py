"""Images, shapes, dtypes, names and norms: what comes out, and what is refused."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch.nn import functional

from contracts.each import each
from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.envs import GymEnv, TransformedEnv
from engram.testing.transform import as_dict, assert_equal
from engram.transforms import (
    Compose,
    DTypeCastTransform,
    ExcludeTransform,
    FlattenObservation,
    GrayScale,
    ObservationNorm,
    RenameTransform,
    Resize,
    RewardClipping,
    RewardScaling,
    SelectTransform,
    ToTensorImage,
    Transform,
    UnsqueezeTransform,
    VecNorm,
)
from transforms.data import steps

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


# ---- images ----
@each("dtype", INTEGERS)
@each("lead", [(), (2,), (2, 3)])
def test_integer_images_become_floats_of_one_255th(dtype, lead):
    image = (torch.arange(math.prod(lead) * 5 * 4 * 3) % 120).reshape(*lead, 5, 4, 3).to(dtype)
    out = ToTensorImage()({"pixels": image})["pixels"]
    assert out.shape == (*lead, 3, 5, 4) and out.dtype == torch.float32 and out.is_contiguous()
    assert torch.equal(out, image.movedim(-1, -3).float() / 255)


def test_float_images_are_only_permuted_unless_told_otherwise():
    image = torch.rand(2, 5, 4, 3, dtype=torch.float64)
    assert torch.equal(ToTensorImage()({"pixels": image})["pixels"], image.movedim(-1, -3))
    assert torch.equal(ToTensorImage(from_int=True)({"pixels": image})["pixels"], image.movedim(-1, -3) / 255)
    out = ToTensorImage(dtype=torch.float16)({"pixels": image})["pixels"]
    assert out.dtype == torch.float16
    whole = torch.full((5, 4, 3), 51, dtype=torch.uint8)
    assert ToTensorImage(from_int=False)({"pixels": whole})["pixels"].max() == 51
    assert ToTensorImage(dtype=torch.float64)({"pixels": whole})["pixels"].dtype == torch.float64
    assert ToTensorImage()({"pixels": whole > 3})["pixels"].max() == 1
    already = torch.rand(3, 5, 4)
    assert ToTensorImage(shape_tolerant=True)({"pixels": already})["pixels"].shape == (3, 5, 4)
    with pytest.raises(ValueError, match=r"H, W, C\], got shape \[5, 4\]"):
        ToTensorImage()({"pixels": whole[..., 0]})
    with pytest.raises(ValueError, match="floating point"):
        ToTensorImage(dtype=torch.int32)


@each("mode", ["nearest", "bilinear", "bicubic", "area"])
@each("lead", [(), (1,), (4,), (2, 3), (0,), (2, 0)])
def test_resizing_is_torchs_interpolation_for_any_leading_dimensions(mode, lead):
    image = torch.rand(*lead, 3, 12, 10)
    out = Resize(6, 8, mode)({"pixels": image})["pixels"]
    assert out.shape == (*lead, 3, 6, 8) and out.dtype == image.dtype
    if image.numel():
        flat = functional.interpolate(image.reshape(-1, 3, 12, 10), (6, 8), mode=mode)
        assert torch.equal(out.reshape(flat.shape), flat)
    assert Resize(6, interpolation=mode)({"pixels": image})["pixels"].shape == (*lead, 3, 6, 6)


@each("dtype", [*INTEGERS, torch.bool, torch.float64])
@each("mode", ["nearest", "bilinear", "bicubic", "area"])
def test_resized_images_keep_their_dtype_and_range(dtype, mode):
    image = (torch.rand(2, 3, 12, 10, generator=torch.Generator().manual_seed(0)) * 120).to(dtype)
    image[0] = 0
    out = Resize(7, 5, mode)({"pixels": image})["pixels"]
    exact = functional.interpolate(image.double(), (7, 5), mode=mode)
    if dtype in INTEGERS:
        exact = exact.clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    assert out.dtype == dtype
    if dtype is not torch.bool:
        assert (out.double() - exact).abs().max() <= (1e-9 if dtype is torch.float64 else 1.01)
    saturated = torch.full((1, 1, 4, 4), 255, dtype=torch.uint8)
    saturated[..., ::2] = 0
    assert Resize(9, interpolation="bicubic")({"pixels": saturated})["pixels"].dtype == torch.uint8


def test_resizing_can_average_and_refuses_what_it_cannot_do():
    image = torch.rand(1, 3, 64, 64)
    out = Resize(8, antialias=True)({"pixels": image})["pixels"]
    assert torch.equal(out, functional.interpolate(image, (8, 8), mode="bilinear", antialias=True))
    assert Resize(64)({"pixels": image})["pixels"] is image
    for bad in ({"w": 0}, {"w": 4, "h": -1}, {"w": 4, "interpolation": "best"}):
        with pytest.raises(ValueError):
            Resize(**bad)
    with pytest.raises(ValueError, match="antialias"):
        Resize(4, interpolation="nearest", antialias=True)
    with pytest.raises(ValueError, match=r"C, H, W\], got shape \[4, 4\]"):
        Resize(8)({"pixels": torch.zeros(4, 4)})


def test_resizing_copies_no_input():
    images = torch.rand(6, 3, 20, 20)
    seen = []

    class Watched(Resize):
        def _resized(self, flat):
            seen.append(flat.data_ptr())
            return super()._resized(flat)

    Watched(8)({"pixels": images.reshape(2, 3, 3, 20, 20)})
    assert seen == [images.data_ptr()]


def test_grey_is_the_weighted_sum_of_colours():
    image = torch.rand(2, 4, 3, 6, 5)
    out = GrayScale()({"pixels": image})["pixels"]
    weights = torch.tensor([0.2989, 0.587, 0.114]).reshape(3, 1, 1)
    torch.testing.assert_close(out, (image * weights).sum(-3, keepdim=True))
    whole = (image * 255).to(torch.uint8)
    assert GrayScale()({"pixels": whole})["pixels"].dtype == torch.uint8
    assert (
        GrayScale()({"pixels": whole})["pixels"].float() - (whole * weights).sum(-3, keepdim=True)
    ).abs().max() <= 0.51
    assert GrayScale()({"pixels": out})["pixels"] is out
    with pytest.raises(ValueError, match="got shape"):
        GrayScale()({"pixels": torch.zeros(4, 6, 5)})


def test_a_pipeline_of_images_in_a_buffer():
    data = TensorDict({"pixels": torch.randint(0, 256, (6, 21, 16, 3), dtype=torch.uint8)}, [6])
    compose = Compose(
        ToTensorImage(), GrayScale(), Resize(8), FlattenObservation(-3, -1), UnsqueezeTransform(-1, in_keys=["pixels"])
    )
    for storage in (LazyTensorStorage(10), ListStorage(10)):
        rb = TensorDictReplayBuffer(storage=storage, transform=compose, batch_size=4)
        rb.extend(data)
        assert rb.sample()["pixels"].shape == (4, 64, 1) and rb[2]["pixels"].shape == (64, 1)
        assert rb.storage.get(2)["pixels"].shape == (21, 16, 3)


# ---- shapes ----
def test_dimensions_are_counted_from_the_end():
    x = {"pixels": torch.zeros(2, 3, 4, 5)}
    assert FlattenObservation(-2, -1)(dict(x))["pixels"].shape == (2, 3, 20)
    assert FlattenObservation(1, 2, allow_positive_dim=True)(dict(x))["pixels"].shape == (2, 12, 5)
    for bad in (lambda: FlattenObservation(0, -1), lambda: UnsqueezeTransform(0, in_keys=["x"])):
        with pytest.raises(ValueError, match="must be negative"):
            bad()
    with pytest.raises(ValueError, match="must not come after"):
        FlattenObservation(-1, -2)
    with pytest.raises(ValueError, match="in_keys"):
        UnsqueezeTransform(-1)


def test_unsqueezing_is_undone_on_writing():
    unsqueeze = UnsqueezeTransform(-2, in_keys=["x"], in_keys_inv=["x"])
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=unsqueeze)
    given = {"x": torch.zeros(4, 1, 3)}
    rb.extend(given)
    assert given["x"].shape == (4, 1, 3), "the caller's batch stays as it is"
    assert rb.storage[:]["x"].shape == (4, 3) and rb[:]["x"].shape == (4, 1, 3)
    with pytest.raises(ValueError, match="must be 1"):
        rb.extend({"x": torch.zeros(4, 2, 3)})
    assert len(rb) == 4


# ---- names ----
@each("kind", [lambda td: td, as_dict])
@each("create_copy", [False, True])
def test_entries_are_renamed_both_ways(kind, create_copy):
    names = (["a", ("next", "a")], ["b", ("deep", "b")])
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=RenameTransform(*names, *names, create_copy=create_copy))
    outer = TensorDict({"b": torch.arange(4), "deep": {"b": torch.arange(4) + 1}, "c": torch.zeros(4)}, [4])
    before = outer.clone()
    rb.extend(kind(outer))
    assert_equal(outer, before)
    stored = rb.storage.get(slice(None))
    assert stored["a"].tolist() == [0, 1, 2, 3] and stored["next"]["a"].tolist() == [1, 2, 3, 4]
    assert ("b" in stored) == create_copy
    if not create_copy:
        assert_equal(rb[:]["b"], before["b"])
        assert_equal(rb[:]["deep"]["b"], before["deep", "b"])
        assert "a" not in rb[:]
    else:
        with pytest.raises(KeyError, match="would lose 'b'"):
            rb[:]


def test_renaming_only_on_reading_may_keep_the_source():
    for create_copy in (False, True):
        rb = ReplayBuffer(storage=LazyTensorStorage(20))
        rb.append_transform(RenameTransform(["a"], ["b"], create_copy=create_copy))
        rb.extend(TensorDict({"a": torch.randn(10)}, [10]))
        sample = rb.sample(2)
        assert "b" in sample.keys() and ("a" in sample.keys()) == create_copy
    swapped = RenameTransform(["a", "b"], ["b", "a"])({"a": 1.0, "b": 2.0})
    assert (swapped["a"], swapped["b"]) == (2, 1)
    with pytest.raises(KeyError, match="'z'"):
        RenameTransform(["z"], ["y"])({"a": torch.zeros(1)})
    with pytest.raises(ValueError, match="out_keys_inv"):
        RenameTransform(["a"], ["b"], ["a"])


def test_selecting_keeps_rewards_flags_and_what_the_buffer_adds():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), transform=SelectTransform("x"), batch_size=3)
    rb.extend(steps(6).set("y", torch.zeros(6)))
    assert set(rb.sample().keys(True, True)) == {
        "x", "index", ("next", "reward"), ("next", "done"), ("next", "terminated"), ("next", "truncated"),
    }  # fmt: skip
    batch = SelectTransform(("next", "x"), keep_rewards=False, keep_dones=False)(steps(4))
    assert set(batch.keys(True, True)) == {("next", "x")} and batch.batch_size == (4,)
    assert set(SelectTransform("next")(as_dict(steps(4)))["next"]) == set(steps(4)["next"].keys())
    with pytest.raises(KeyError, match=r"'y'.*'x'"):
        SelectTransform("y")(steps(4))


def test_excluding_on_reading_or_on_writing():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=ExcludeTransform(("next", "x"), "absent"))
    rb.extend(steps(4))
    assert ("next", "x") not in rb[:].keys(True) and ("next", "x") in rb.storage[:].keys(True)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=ExcludeTransform(("next", "x"), inverse=True))
    batch = steps(4)
    rb.extend(batch)
    rb.add(batch[0])
    assert ("next", "x") not in rb.storage[:].keys(True) and ("next", "x") in batch.keys(True)
    with pytest.raises(TypeError, match="has none"):
        ExcludeTransform("x")(torch.zeros(3))


# ---- dtypes and norms ----
def test_dtypes_are_cast_on_reading_and_back_on_writing():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=DTypeCastTransform(torch.float16, torch.float32))
    rb.extend({"x": torch.ones(3), "n": torch.arange(3), "d": torch.ones(3).double(), "deep": {"x": torch.zeros(3)}})
    stored, read = rb.storage[:], rb[:]
    assert [stored["x"].dtype, stored["deep"]["x"].dtype] == [torch.float16] * 2
    assert [read["x"].dtype, read["n"].dtype, read["d"].dtype] == [torch.float32, torch.int64, torch.float64]
    named = DTypeCastTransform(
        torch.uint8, torch.float32, in_keys=["x"], out_keys=["y"], in_keys_inv=["x"], out_keys_inv=["y"]
    )
    made = named.inv({"y": torch.tensor([3.0])})
    assert made["x"].dtype == torch.uint8 and named({"x": made["x"]})["y"].dtype == torch.float32
    assert named.in_keys == ["x"] and DTypeCastTransform(torch.float32, torch.float64, in_keys=["x"]).inv(
        {"x": 1.0}
    ) == {"x": 1.0}
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=DTypeCastTransform(torch.float16, torch.float32))
    rb.extend(torch.ones(3))
    assert rb.storage[:].dtype == torch.float16 and rb[:].dtype == torch.float32


def test_norms_shift_and_scale_and_go_back():
    x = torch.randn(5, 3, dtype=torch.float64)
    for standard in (False, True):
        norm = ObservationNorm(torch.arange(3.0), 2.0, ["x"], ["y"], ["x"], ["y"], standard_normal=standard)
        out = norm({"x": x})["y"]
        assert out.dtype == torch.float64
        torch.testing.assert_close(out, (x - torch.arange(3.0)) / 2 if standard else x * 2 + torch.arange(3.0))
        torch.testing.assert_close(norm.inv({"y": out})["x"], x)
    for bad in ({"loc": 1.0}, {"loc": 0.0, "scale": 0.0}, {"loc": float("nan"), "scale": 1.0}):
        with pytest.raises(ValueError):
            ObservationNorm(in_keys=["x"], **bad)
    with pytest.raises(ValueError, match="in_keys"):
        ObservationNorm(0.0, 1.0)


@pytest.mark.parametrize("standard", [False, True])
def test_statistics_of_data_make_them_standard(standard):
    data = TensorDict(
        {"x": torch.randn(50, 4, 3) * torch.tensor([1.0, 5.0, 0.0]) + 7, "z": torch.zeros(50, 4)}, [50, 4]
    )
    norm = ObservationNorm(in_keys=["x"], standard_normal=standard)
    with pytest.raises(RuntimeError, match=r"init_stats\(data\)"):
        norm(data.clone())
    assert not norm.initialized and norm.state_dict() == {}
    norm.init_stats(data)
    out = norm(data.clone())["x"]
    torch.testing.assert_close(out.mean((0, 1)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(out.std((0, 1))[:2], torch.ones(2), atol=0.05, rtol=0)
    other = ObservationNorm(in_keys=["x"], standard_normal=standard)
    other.load_state_dict(norm.state_dict())
    assert torch.equal(other(data.clone())["x"], out)
    norm.init_stats(torch.randint(0, 9, (100, 3)))
    norm.init_stats(data, key="x", reduce_dim=0)
    assert norm.loc.shape == (4, 3)
    with pytest.raises(ValueError, match="needs key="):
        ObservationNorm(in_keys=["x", "z"]).init_stats(data)
    with pytest.raises(ValueError, match="1 or more"):
        norm.init_stats(0)
    with pytest.raises(ValueError, match="needs data"):
        norm.init_stats(data[:0])


def test_state_of_computed_statistics_makes_an_equal_norm():
    data = TensorDict({"x": torch.randn(50, 3) * 4 + 2}, [50])
    computed = ObservationNorm(in_keys=["x"], standard_normal=True)
    computed.init_stats(data)
    state = computed.state_dict()
    made = ObservationNorm(in_keys=["x"], **state)
    loaded = ObservationNorm(1.0, 2.0, in_keys=["x"])
    loaded.load_state_dict(state)
    for norm in (made, loaded):
        assert_equal(norm(data.clone()), computed(data.clone()))
    assert_equal(ObservationNorm(in_keys=["x"], **loaded.state_dict())(data.clone()), computed(data.clone()))


def test_rewards_are_found_where_they_are():
    scaling = RewardScaling(1.0, 3.0)
    assert scaling({"next": {"reward": torch.tensor([2.0])}})["next"]["reward"] == 7
    assert scaling({"reward": torch.tensor([2.0])})["reward"] == 7
    assert RewardScaling(1.0, 2.0, standard_normal=True)({"reward": torch.tensor([2.0])})["reward"] == 0.5
    assert RewardScaling(0, 2)({"reward": torch.tensor([2])})["reward"].dtype == torch.float32
    with pytest.raises(KeyError, match=r"\('next', 'reward'\) or 'reward'.*'x'"):
        scaling({"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="in_keys"):
        RewardScaling(0.0, 1.0, out_keys=["r"])


def test_rewards_are_limited_and_nothing_else_is():
    batch = {"next": {"reward": torch.tensor([-3.0, 0.5, 3.0]), "x": torch.tensor([9.0])}}
    out = RewardClipping(-1, 1)(batch)
    assert out["next"]["reward"].tolist() == [-1, 0.5, 1] and out["next"]["x"] == 9
    assert RewardClipping(clamp_min=0.0)({"reward": torch.tensor([-3, 3])})["reward"].tolist() == [0, 3]
    assert RewardClipping(None, 0.0)({"reward": torch.tensor([-3, 3])})["reward"].tolist() == [-3, 0]
    out = RewardClipping(-1, 1, in_keys=["reward"], out_keys=["clipped"])({"reward": torch.tensor([5.0])})
    assert out["clipped"] == 1 and out["reward"] == 5
    with pytest.raises(TypeError, match="RewardClipping needs clamp_min, clamp_max or both"):
        RewardClipping()
    with pytest.raises(ValueError, match="clamp_min must be below clamp_max, got clamp_min=2 and clamp_max=1"):
        RewardClipping(2, 1)
    with pytest.raises(ValueError, match="RewardClipping with out_keys needs in_keys"):
        RewardClipping(-1, 1, out_keys=["r"])


def test_spec_of_limited_rewards_is_bounded():
    env = TransformedEnv(GymEnv("Pendulum-v1"), RewardClipping(-1, 1))
    assert env.reward_spec.space.low == -1 and env.reward_spec.space.high == 1
    assert (env.rollout(50)["next", "reward"] >= -1).all()


# ---- running norms ----
@each("cuts", [(0, 40), (0, 1, 2, 17, 40), tuple(range(41))])
def test_running_statistics_are_those_of_all_that_was_written(cuts):
    data = TensorDict({"x": torch.randn(40, 3) * 4 + 1e4}, [40])
    rb = ReplayBuffer(storage=LazyTensorStorage(50), transform=VecNorm(["x"], decay=1.0, eps=0.0))
    for start, stop in pairwise(cuts):
        if stop == start + 1:
            rb.add(data[start])
        else:
            rb.extend(data[start:stop])
    norm = rb._transform[0]
    torch.testing.assert_close(norm.loc["x"], data["x"].double().mean(0).float())
    torch.testing.assert_close(norm.scale["x"], data["x"].double().std(0, correction=0).float())
    assert torch.equal(rb.storage[:]["x"], data["x"]), "what is stored is as it came"
    torch.testing.assert_close(rb[:]["x"].mean(0), torch.zeros(3), atol=2e-3, rtol=0)
    before = norm.state_dict()
    rb.sample(10)
    rb[0] = rb.storage.get(0)
    assert_equal(norm.state_dict(), before)


def test_old_statistics_fade_and_follow_what_changes():
    norm = VecNorm(["x"], decay=0.5)
    for value in [0.0] * 20 + [10.0] * 20:
        norm.learn({"x": torch.full((4, 1), value) + torch.tensor([[-1.0], [1.0], [-1.0], [1.0]])})
    torch.testing.assert_close(norm.loc["x"], torch.tensor([10.0]), atol=1e-3, rtol=0)
    torch.testing.assert_close(norm.scale["x"], torch.tensor([1.0]), atol=1e-2, rtol=0)


def test_a_frozen_norm_learns_nothing():
    norm = VecNorm(["x"])
    with pytest.raises(RuntimeError, match="no statistics yet"):
        norm.forward(steps(3))
    norm(steps(5))
    frozen, before = norm.frozen(), norm.state_dict()
    norm(steps(9))
    assert_equal({**frozen.state_dict(), "learns": True}, before)
    out = frozen(steps(4))
    assert_equal({**frozen.state_dict(), "learns": True}, before)
    assert_equal(frozen.to_observation_norm()[0](steps(4))["x"], out["x"])
    assert norm.freeze().state_dict()["learns"] is False and "frozen" in repr(norm)
    norm.unfreeze()(steps(3))
    norm.learn({"x": torch.zeros(0, 3)})
    with pytest.raises(ValueError, match="shape"):
        norm.learn({"x": torch.zeros(2, 4)})
    for bad in ({"decay": 0.0}, {"decay": 1.1}, {"eps": -1.0}):
        with pytest.raises(ValueError):
            VecNorm(["x"], **bad)
    with pytest.raises(ValueError, match="in_keys"):
        VecNorm([])


def test_a_norm_streams_when_it_is_inverted():
    rb = ReplayBuffer(storage=LazyTensorStorage(50))
    rb.append_transform(VecNorm(["x"], decay=1.0), invert=True)
    expected, norm = [], VecNorm(["x"], decay=1.0)
    for k in range(3):
        rb.extend(steps(4 + k))
        expected.append(norm(steps(4 + k)))
    assert_equal(rb[:], torch.cat(expected))


def test_states_of_norms_find_their_own_by_kind_and_place(tmp_path):
    def make():
        return ReplayBuffer(
            storage=LazyTensorStorage(50),
            transform=Compose(VecNorm(["x"]), SelectTransform("x"), VecNorm([("next", "x")])),
        )

    rb, twin = make(), make()
    rb.extend(steps(9))
    rb.dumps(tmp_path)
    twin.append_transform(lambda batch: batch)
    twin.loads(tmp_path)
    assert_equal(twin._transform.state_dict(), rb._transform.state_dict())
    fewer = ReplayBuffer(storage=LazyTensorStorage(50), transform=VecNorm(["x", "y"]))
    with pytest.raises(ValueError, match=r"2 in_keys here, 1 there.*VecNorm was saved"):
        fewer.loads(tmp_path)
    assert len(fewer) == 0
    fewer.loads(tmp_path, parts=("storage", "sampler"))
    assert len(fewer) == 9


# ---- forms of data ----
@tensorclass
class Moment:
    x: torch.Tensor
    y: torch.Tensor


def test_tensorclasses_and_arrays():
    moment = Moment(x=torch.ones(4, 3), y=torch.zeros(4), batch_size=[4])
    norm = ObservationNorm(1.0, 2.0, ["x"])
    assert norm(moment).x.max() == 3
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=norm)
    rb.extend(Moment(x=torch.ones(4, 3), y=torch.zeros(4), batch_size=[4]))
    assert type(rb[:]) is Moment and rb.sample(3).x.max() == 3
    with pytest.raises(KeyError, match=r"Moment has no field 'z'.*'x'"):
        ObservationNorm(1.0, 2.0, ["x"], ["z"])(moment)
    with pytest.raises(KeyError, match="'z'"):
        ObservationNorm(1.0, 2.0, ["z"])(moment)
    for drops in (ExcludeTransform("x"), SelectTransform("x"), RenameTransform(["x"], ["y2"])):
        with pytest.raises(TypeError, match="Moment cannot lose"):
            drops(moment)
    inside = TensorDict({"m": Moment(x=torch.ones(4, 3), y=torch.zeros(4), batch_size=[4])}, [4])
    assert ObservationNorm(1.0, 2.0, [("m", "x")])(inside)["m"].x.max() == 3
    arrays = ObservationNorm(1.0, 2.0, ["x"], ["y"])({"x": np.ones((4, 3), np.float32)})
    assert arrays["y"].dtype == torch.float32 and arrays["y"].max() == 3
    lazy = TensorDict.lazy_stack([steps(3), steps(3)])
    assert norm(lazy)["x"].shape == (2, 3, 3)


def test_other_entries_than_tensors_pass_by():
    batch = TensorDict({"x": torch.ones(3), "name": "cart"}, [3])
    assert RenameTransform(["name"], ["title"])(batch)["title"] == "cart"
    assert SelectTransform("title")(batch)["title"] == "cart"


# ---- transforms of one's own ----
def test_user_transform_needs_one_method():
    class Negative(Transform):
        def _apply_transform(self, value):
            return -value

        def _inv_apply_transform(self, value):
            return -value

    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=Negative(["x"], None, ["x"]))
    rb.extend(steps(4))
    assert torch.equal(rb.storage[:]["x"], -steps(4)["x"]) and torch.equal(rb[:]["x"], steps(4)["x"])
    assert (
        repr(Negative(["x"], ["y"], "z", "w"))
        == "Negative(in_keys=['x'], out_keys=['y'], in_keys_inv=['z'], out_keys_inv=['w'])"
    )
    assert Negative("x").in_keys == ["x"] and Negative([("x",)]).in_keys == ["x"]
    assert Negative(("a", "b")).in_keys == [("a", "b")]
