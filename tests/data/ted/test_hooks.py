"""Conversions of episode data: whatever the data, what comes back is what went in, byte for byte."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as s
from tensordict import NonTensorData, TensorDict

from engram.data.replay_buffers.utils import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested

PAIRS = [(TED2Flat, Flat2TED), (TED2Nested, Nested2TED), (H5Split, H5Combine)]
pairs = pytest.mark.parametrize(("there", "back"), PAIRS, ids=lambda hook: hook.__name__)


def chain(values, done):
    """TED of one observation `x` whose successor is the next one, whatever `done` says."""
    n = len(done)
    done = torch.as_tensor(done).reshape(n, 1)
    return TensorDict({"x": values[:n], "next": {"x": values[1:], "done": done}}, [n])


def raw(td):
    """Every entry as its dtype, shape and bytes: NaN is itself, and -0.0 is not 0.0."""
    return {
        key: (value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        if value.numel()
        else (value.dtype, tuple(value.shape))
        for key, value in td.items(include_nested=True, leaves_only=True)
    }


def assert_same(a, b):
    assert a.batch_size == b.batch_size and raw(a) == raw(b)


SPECIAL = [0.0, -0.0, float("nan"), 1.0, float("inf")]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.complex64]


@s.composite
def teds(draw):
    """Data of any dtype and shape, with the rule of TED in most places, and keys on one side only."""
    batch_size = draw(s.sampled_from([(1,), (2,), (7,), (1, 4), (3, 5), (2, 2, 3)]))
    generator = torch.Generator().manual_seed(draw(s.integers(0, 2**32)))
    td = TensorDict({}, batch_size)
    for number in range(draw(s.integers(0, 3))):
        key = ("deep", f"k{number}") if draw(s.booleans()) else (f"k{number}",)
        shape, dtype = draw(s.sampled_from([(), (1,), (3,), (2, 2), (0,), (9, 8)])), draw(s.sampled_from(DTYPES))
        values = _values((*batch_size, *shape), dtype, generator)
        where = draw(s.sampled_from(["both", "root", "next"]))
        if where in ("both", "root"):
            td.set(key, values)
        if where in ("both", "next"):
            following = values.roll(-1, len(batch_size) - 1)
            breaks = torch.rand(batch_size, generator=generator) < draw(s.sampled_from([0.0, 0.2, 1.0]))
            following[breaks] = _values((*batch_size, *shape), dtype, generator)[breaks]
            td.set(("next", *key), following)
    if draw(s.booleans()) or not list(td.keys()):
        done = torch.rand((*batch_size, 1), generator=generator) < 0.3
        td.update({"done": torch.zeros_like(done), "next": {"done": done, "reward": torch.randn(*batch_size, 1)}})
    if draw(s.booleans()):
        td["collector", "traj_ids"] = torch.rand(batch_size, generator=generator).mul(2).long()
    shift, is_full = draw(s.integers(0, batch_size[-1])), draw(s.booleans())
    return td, shift, is_full


def _values(shape, dtype, generator):
    if dtype in (torch.float32, torch.bfloat16):
        return torch.tensor(SPECIAL, dtype=dtype)[torch.randint(0, len(SPECIAL), shape, generator=generator)]
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@pairs
@given(teds())
@settings(max_examples=50, deadline=None)
def test_inverse_hook_restores_the_data(there, back, case):
    td, shift, is_full = case
    before = td.clone()
    assert_same(back()(there()(td, shift=shift, is_full=is_full)), td)
    assert_same(td, before)


def same_bytes(a, b):
    return raw(TensorDict({"v": a.clone().reshape(-1)}, [])) == raw(TensorDict({"v": b.clone().reshape(-1)}, []))


def expected_exceptions(now, following, batch_size, shift):
    """The rule in plain Python: steps counted strand after strand, oldest first."""
    steps = batch_size[-1]
    order = [(shift + t) % steps for t in range(steps)]
    return [
        place * steps + t
        for place, strand in enumerate(np.ndindex(*batch_size[:-1]))
        for t in range(steps)
        if t == steps - 1 or not same_bytes(following[(*strand, order[t])], now[(*strand, order[t + 1])])
    ]


@given(teds())
@settings(max_examples=40, deadline=None)
def test_flat_keeps_of_next_exactly_what_is_not_the_root_of_the_step_after(case):
    td, shift, is_full = case
    flat = TED2Flat()(td, shift=shift, is_full=is_full)
    roots = [(k if isinstance(k, tuple) else (k,)) for k in td.keys(include_nested=True, leaves_only=True)]
    for key in roots:
        following = td.get(("next", *key), None)
        shared = key[0] != "next" and key[-1] != "done" and following is not None and following.numel() > 0
        assert (("exceptions", *key, "step") in flat.keys(True)) == shared
        if shared:
            expected = expected_exceptions(td[key], following, td.batch_size, shift if is_full else 0)
            assert flat[("exceptions", *key, "step")].tolist() == expected
            assert ("next", *key) not in flat.keys(True)


@pytest.mark.parametrize("cls", [TED2Nested, H5Split])
def test_trajectories_end_at_flags_changed_ids_and_strands(cls):
    done = torch.zeros(2, 6, 1, dtype=torch.bool)
    done[0, 1] = True
    ids = torch.tensor([[0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 3, 3]])
    td = TensorDict({"x": torch.arange(12.0).reshape(2, 6), "next": {"done": done}, "episode": ids}, [2, 6])
    made = cls()(td)
    parts = (
        made["x"].unbind()
        if cls is TED2Nested
        else [made[k, "x"] for k in sorted(made.keys()) if k.startswith("trajectory")]
    )
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9], [10, 11]]


def test_a_ring_that_wrapped_comes_oldest_step_first():
    x = torch.arange(11)
    ring = {"x": x[:10].roll(3), "next": {"x": x[1:].roll(3), "done": torch.zeros(10, 1, dtype=torch.bool)}}
    ring = TensorDict(ring, [10])
    flat = TED2Flat()(ring, shift=3, is_full=True)
    assert flat["x"].tolist() == list(range(10)) and flat["exceptions", "x", "value"].tolist() == [10]
    assert TED2Flat()(ring, shift=3)["x"].tolist() == ring["x"].tolist()
    assert_same(Flat2TED()(flat), ring)


def test_nan_of_other_bits_and_minus_zero_are_exceptions():
    bits = torch.tensor([0x7FC00000, 0x7FC00001, 0x7FC00000, -(2**31), 0], dtype=torch.int32)
    x = bits.view(torch.float32)
    following = torch.tensor([0x7FC00001, 0x7FC00001, -(2**31), 0, 7], dtype=torch.int32).view(torch.float32)
    td = TensorDict({"x": x, "next": {"x": following}}, [5])
    flat = TED2Flat()(td)
    assert flat["exceptions", "x", "step"].tolist() == [1, 4]
    assert_same(Flat2TED()(flat), td)


@pairs
def test_no_steps_and_unfinished_trajectories_come_back(there, back):
    for n in (1, 2, 5):
        td = chain(torch.arange(n + 1.0), [False] * n)
        assert_same(back()(there()(td)), td)
    td = chain(torch.arange(1.0), [])
    if there is H5Split:
        with pytest.raises(ValueError, match="no steps"):
            there()(td)
    else:
        assert_same(back()(there()(td)), td)


def test_trajectories_that_are_not_as_long_as_the_data_are_refused():
    split = H5Split()(chain(torch.arange(5), [False] * 4))
    split["trajectory_00000000", "x"] = torch.arange(4)
    with pytest.raises(ValueError, match="do not have 4 steps together"):
        H5Combine()(split)


def test_rewards_and_flags_are_never_taken_from_the_step_after():
    same = torch.zeros(4, 1)
    keys = {"reward": same, "done": same.bool(), "truncated": same.bool(), "terminated": same.bool(), "r": same}
    flat = TED2Flat(reward_keys=("r", "reward"))(TensorDict({**keys, "next": dict(keys)}, [4]))
    assert "exceptions" not in flat.keys() and flat["next", "r"].shape == (4, 1)
    flat = TED2Flat(reward_keys=(("deep", "reward"),))(TensorDict({**keys, "next": dict(keys)}, [4]))
    assert set(flat["exceptions"].keys()) == {"reward", "r"}


def test_names_of_what_is_added_can_be_chosen_and_are_not_overwritten():
    td = chain(torch.arange(5), [False] * 4).set("shift", torch.arange(4))
    with pytest.raises(ValueError, match="'shift' is the name of an entry that the conversion adds"):
        TED2Flat()(td)
    flat = TED2Flat(shift_key="turned", is_full_key="wrapped")(td, shift=2, is_full=True)
    assert int(flat["turned"]) == 2 and bool(flat["wrapped"])
    assert_same(Flat2TED(shift_key="turned", is_full_key="wrapped")(flat), td)
    with pytest.raises(ValueError, match="differ"):
        TED2Flat(shift_key="next")
    with pytest.raises(ValueError, match="'shift' is missing"):
        Flat2TED()(TED2Flat(shift_key="turned")(td.exclude("shift")))


def test_several_done_flags_in_a_step_are_refused():
    td = TensorDict({"x": torch.zeros(4, 3), "next": {"done": torch.zeros(4, 3, 1).bool()}}, [4])
    for hook in (TED2Nested, H5Split):
        with pytest.raises(ValueError, match=r"\('next', 'done'\) has the shape \[3, 1\].*several agents"):
            hook()(td)


def test_value_that_is_not_a_tensor_is_refused_by_name():
    td = chain(torch.arange(5), [False] * 4)
    td["text"] = NonTensorData("a", batch_size=[4])
    with pytest.raises(TypeError, match="'text'"):
        TED2Flat()(td)


def test_bad_settings_are_refused():
    with pytest.raises(TypeError, match="done_keys is a sequence of keys"):
        TED2Flat(done_keys="done")
    with pytest.raises(TypeError, match="done_key: a key is a string"):
        TED2Flat(done_key=3)
    with pytest.raises(ValueError, match="shift is a number of steps from 0 to 4"):
        TED2Flat()(chain(torch.arange(5), [False] * 4), shift=5)
    with pytest.raises(ValueError, match="time dimension"):
        TED2Flat()(TensorDict({"x": torch.zeros(3)}, []))


def test_exceptions_out_of_range_are_refused():
    flat = TED2Flat()(chain(torch.arange(5), [False] * 4))
    flat["exceptions", "x", "step"] = torch.tensor([4])
    with pytest.raises(ValueError, match="name steps outside of the data"):
        Flat2TED()(flat)
