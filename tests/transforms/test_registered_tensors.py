"""`Transform.register_buffer`: tensors that are attributes, saved with the transform, and moved with it."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import EnvBase, GymEnv, TransformedEnv
from engram.envs.transforms import Compose, Transform


class Centred(Transform):
    def __init__(self, mean, **settings):
        super().__init__(in_keys=["observation"])
        self.register_buffer("mean", torch.as_tensor(mean), **settings)

    def _apply_transform(self, value):
        return value - self.mean


class Counted(Transform):
    """Counts what is written in place, in one tensor, and in another that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("written", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)

    def _inv_call(self, td):
        self.written += len(td)
        self.seen += len(td)
        return td


def steps(n: int) -> TensorDict:
    return TensorDict({"observation": torch.arange(float(n)).unsqueeze(-1)}, [n])


def buffer(transform) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=transform, batch_size=4)


def test_a_registered_tensor_is_an_attribute_and_may_be_assigned():
    transform = Centred(2.0)
    transform.mean = torch.tensor(5.0)
    assert transform(steps(3))["observation"].flatten().tolist() == [-5, -4, -3]
    assert transform.state_dict() == {"buffers": {"mean": torch.tensor(5.0)}}


def test_it_is_saved_with_the_buffer_and_loaded(tmp_path):
    rb, other = buffer(Centred(2.0)), buffer(Centred(0.0))
    rb.extend(steps(4))
    rb.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert float(other.transform[0].mean) == 2 and other[:]["observation"].flatten().tolist() == [-2, -1, 0, 1]


def test_a_state_is_not_changed_by_what_is_written_later():
    rb = buffer(Counted())
    rb.extend(steps(3))
    state = rb.state_dict()
    rb.extend(steps(4))
    assert int(rb.transform[0].written) == 7
    rb.load_state_dict(state)
    rb.extend(steps(1))
    assert int(rb.transform[0].written) == 4


def test_a_tensor_that_is_not_persistent_is_in_no_state():
    transform = Counted()
    assert list(transform.state_dict()["buffers"]) == ["written"]
    buffer(transform).extend(steps(3))
    assert int(transform.seen) == 3 and "seen" not in repr(transform.state_dict())


def test_a_write_that_is_refused_leaves_the_tensors_as_they_were():
    rb = buffer(Counted())
    rb.extend(steps(3))
    with pytest.raises((ValueError, KeyError)):
        rb.extend(TensorDict({"other": torch.zeros(5)}, [5]))
    assert (int(rb.transform[0].written), int(rb.transform[0].seen)) == (3, 3)


def test_a_state_from_before_the_tensor_sets_it_back_to_its_first_value():
    transform = Centred(2.0)
    transform.mean = torch.tensor(7.0)
    transform.load_state_dict({})
    assert float(transform.mean) == 2


def test_a_state_with_other_tensors_is_refused_by_name(tmp_path):
    rb = buffer(Centred([1.0, 2.0]))
    rb.extend(steps(4))
    state = rb.state_dict()
    with pytest.raises(ValueError, match=r"mean \[\] here, \[2\] there"):
        buffer(Centred(1.0)).load_state_dict(state)
    with pytest.raises(ValueError, match="no buffer 'mean' here"):
        buffer(Centred(1.0, persistent=False)).load_state_dict(state)


def test_a_tensor_that_is_assigned_later_is_saved_from_then_on():
    class Late(Transform):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", None)

    late, other = Late(), Late()
    assert late.scale is None and late.state_dict() == {}
    late.scale = torch.tensor(3.0)
    other.load_state_dict(late.state_dict())
    assert float(other.scale) == 3
    other.load_state_dict({})
    assert other.scale is None


@each("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), Transform.clone])
def test_copies_have_tensors_of_their_own(copied):
    transform = Centred(2.0)
    other = copied(transform)
    other.mean += 1
    assert (float(transform.mean), float(other.mean)) == (2, 3) and list(other.state_dict()["buffers"]) == ["mean"]


def test_to_moves_tensors_and_casts_those_of_floating_point():
    transform = Counted()
    transform.register_buffer("scale", torch.ones(2))
    compose = Compose(transform, torch.nn.Linear(1, 1)).to(torch.float64)
    assert (transform.written.dtype, transform.scale.dtype) == (torch.int64, torch.float64)
    assert compose[1].fn.weight.dtype == torch.float64
    assert compose.to("meta")[0] is transform and transform.seen.device.type == "meta"


def test_an_environment_moves_the_tensors_of_its_transforms():
    moved = []

    class Noted(Centred):
        def to(self, *place):
            moved.append(place)
            return super().to(*place)

    env: EnvBase = TransformedEnv(GymEnv("CartPole-v1"), Noted(2.0))
    env.to("cpu")
    assert moved == [("cpu",)] and env.transform.mean.device.type == "cpu"


@each(
    ("arguments", "error"),
    [
        (("in_keys", torch.zeros(1)), KeyError),
        (("forward", torch.zeros(1)), KeyError),
        (("a.b", torch.zeros(1)), KeyError),
        ((3, torch.zeros(1)), TypeError),
        (("scale", 1.5), TypeError),
    ],
)
def test_names_and_values_that_cannot_be_registered_are_refused(arguments, error):
    transform = Centred(2.0)
    with pytest.raises(error):
        transform.register_buffer(*arguments)
    assert list(transform.state_dict()["buffers"]) == ["mean"] and not hasattr(transform, "scale")
