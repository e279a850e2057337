"""Random lengths of episodes, returns to aim at, random pieces of sequences, statistics by key."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import TransformedEnv, check_env_specs
from engram.testing.transform import Replayed
from engram.transforms import (
    CenterCrop,
    Compose,
    RandomCropTensorDict,
    RandomTruncationTransform,
    StepCounter,
    TargetReturn,
    ToTensorImage,
    VecNorm,
    VecNormV2,
)
from transforms.data import steps
from transforms.test_actions import Noting


def truncated(n_envs: int = 4, **settings) -> TransformedEnv:
    base = Replayed(steps(n_envs, 300), [1000] * n_envs)
    return TransformedEnv(base, Compose(StepCounter(), RandomTruncationTransform(**settings)))


def lengths(env: TransformedEnv, most: int = 120) -> list[list[int]]:
    """The lengths of the episodes of each environment, in order."""
    done = env.rollout(most, break_when_any_done=False)["next", "done"].squeeze(-1)
    ends = [row.nonzero().flatten() + 1 for row in done]
    return [torch.diff(end, prepend=torch.zeros(1, dtype=torch.int64)).tolist() for end in ends]


# ---- random truncation ----
def test_first_episodes_differ_and_later_ones_have_the_longest_length():
    torch.manual_seed(0)
    each = lengths(truncated(16, min_horizon=5, max_horizon=20))
    assert all(1 <= n[0] <= 20 for n in each) and len({n[0] for n in each}) > 4
    assert {m for n in each for m in n[1:]} == {20}


def test_lengths_are_drawn_with_the_probability():
    torch.manual_seed(0)
    drawn = [each[1:] for each in lengths(truncated(8, min_horizon=2, max_horizon=5, prob=1.0))]
    assert {n for each in drawn for n in each} == {2, 3, 4, 5}
    half = [n for each in lengths(truncated(8, min_horizon=1, max_horizon=9, prob=0.5)) for n in each[1:]]
    assert 0.3 < sum(n == 9 for n in half) / len(half) < 0.8


def test_the_first_episode_after_a_reset_of_all_has_a_probability_of_its_own():
    torch.manual_seed(0)
    each = lengths(truncated(8, min_horizon=2, max_horizon=3, prob=0.0, first_episode_prob=1.0))
    assert {n[1] for n in each} == {2, 3} and {m for n in each for m in n[2:]} == {3}


def test_truncated_steps_are_done_and_not_terminated():
    torch.manual_seed(0)
    env = truncated(2, min_horizon=2, max_horizon=4)
    following = env.rollout(30, break_when_any_done=False)["next"]
    assert torch.equal(following["truncated"], following["done"]) and not following["terminated"].any()
    check_env_specs(env)


def test_horizon_needs_a_step_counter_before_it():
    with pytest.raises(RuntimeError, match="put a StepCounter before it"):
        TransformedEnv(Noting(), Compose(RandomTruncationTransform(1, 2), StepCounter()))


@each("arguments", [(0, 5), (5, 2), (1, 2, 1.5), (1, 2, 0.0, -1.0)])
def test_horizons_and_probabilities_that_cannot_be_are_refused(arguments):
    with pytest.raises(ValueError, match="must be"):
        RandomTruncationTransform(*arguments)


def test_random_truncation_of_a_batch_is_refused():
    with pytest.raises(NotImplementedError, match="put it into a TransformedEnv"):
        RandomTruncationTransform(1, 2)(TensorDict({}, [2]))


# ---- target return ----
def test_what_is_aimed_at_shrinks_by_the_rewards():
    rollout = TransformedEnv(Noting(length=3), TargetReturn(10.0)).rollout(9, break_when_any_done=False)
    assert rollout["target_return"].flatten().tolist() == [10, 9, 7] * 3
    assert rollout["next", "target_return"].flatten().tolist() == [9, 7, 4] * 3


def test_a_caller_may_aim_at_something_else_in_an_episode():
    env = TransformedEnv(Noting(), TargetReturn(10.0))
    step = env.step(env.rand_action(env.reset()).set("target_return", torch.full((1,), 3.0)))
    assert step["next", "target_return"].item() == 2


def test_a_constant_target_stays():
    env = TransformedEnv(Noting(), TargetReturn(10.0, mode="constant", in_keys=["reward"], out_keys=["aim"]))
    assert set(env.rollout(4)["next", "aim"].flatten().tolist()) == {10}
    check_env_specs(env)


def test_a_buffer_computes_targets_when_it_is_read_and_when_it_is_written():
    rollout = Noting(length=3).rollout(6, break_when_any_done=False)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), transform=TargetReturn(10.0), batch_size=2)
    rb.extend(rollout)
    assert rb[:]["target_return"].flatten().tolist() == [10, 9, 7, 10, 9, 7]
    written = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    written.append_transform(TargetReturn(10.0), invert=True)
    for i in range(6):
        written.extend(rollout[i : i + 1])
    assert written[:]["target_return"].flatten().tolist() == [10, 9, 7, 10, 9, 7]


def test_another_mode_or_reset_key_is_refused():
    with pytest.raises(ValueError, match="mode must be one of"):
        TargetReturn(1.0, mode="grow")
    with pytest.raises(ValueError, match="reset_key"):
        TargetReturn(1.0, reset_key="start")


# ---- pieces of sequences and images ----
def sequences(*shape: int) -> TensorDict:
    n = torch.Size(shape).numel()
    return TensorDict({"x": torch.arange(n).reshape(shape), "y": torch.arange(n * 2).reshape(*shape, 2)}, shape)


@each(("shape", "dim"), [((9,), -1), ((5, 9), -1), ((9, 5), 0), ((2, 9, 3), 1), ((2, 3, 9), -1)])
def test_a_piece_of_each_sequence_is_taken_whole(shape, dim):
    torch.manual_seed(0)
    piece = RandomCropTensorDict(4, sample_dim=dim)(sequences(*shape))
    along = dim % len(shape)
    assert piece.batch_size == torch.Size([*shape[:along], 4, *shape[along + 1 :]])
    step = torch.Size(shape[along + 1 :]).numel()
    assert (piece["x"].diff(dim=along) == step).all()
    assert torch.equal(piece["y"][..., 0], piece["x"] * 2)


def test_every_place_is_taken_and_sequences_have_places_of_their_own():
    torch.manual_seed(0)
    crop = RandomCropTensorDict(4)
    starts = torch.stack([crop(sequences(3, 6))["x"][:, 0] - torch.tensor([0, 6, 12]) for _ in range(60)])
    assert set(starts.flatten().tolist()) == {0, 1, 2} and (starts[:, 0] != starts[:, 1]).any()


def test_a_piece_has_no_padding():
    torch.manual_seed(0)
    batch = sequences(2, 12)
    batch["mask"] = torch.arange(12) < torch.tensor([[5], [9]])
    crop = RandomCropTensorDict(4, mask_key="mask")
    assert all(crop(batch.clone())["mask"].all() for _ in range(40))


def test_sequences_that_are_too_short_are_refused():
    with pytest.raises(RuntimeError, match=r"sub_seq_len=4 .* batch \[2, 3\] has 3"):
        RandomCropTensorDict(4)(sequences(2, 3))
    with pytest.raises(ValueError, match="sub_seq_len must be an integer of 1 or more"):
        RandomCropTensorDict(0)
    with pytest.raises(TypeError, match="takes TensorDicts"):
        RandomCropTensorDict(1)({"x": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="no dimension of a batch"):
        RandomCropTensorDict(1, sample_dim=1)(sequences(3))


def test_a_buffer_of_trajectories_gives_pieces_of_them():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), transform=RandomCropTensorDict(4), batch_size=3)
    rb.extend(sequences(2, 12))
    batch = rb.sample()
    assert batch.batch_size == (3, 4) and torch.equal(batch["x"] // 12, batch["index"])


def test_the_middle_of_an_image_is_cut_out():
    image = torch.arange(6 * 9).reshape(1, 6, 9)
    assert CenterCrop(2, 3)({"pixels": image})["pixels"].tolist() == [[[21, 22, 23], [30, 31, 32]]]
    with pytest.raises(ValueError, match=r"takes larger images, got shape \[1, 6, 9\]"):
        CenterCrop(7)({"pixels": image})
    with pytest.raises(ValueError, match="1 or more"):
        CenterCrop(0)


def test_a_single_image_may_become_a_batch_of_one():
    single, many = torch.zeros(4, 5, 3, dtype=torch.uint8), torch.zeros(2, 4, 5, 3, dtype=torch.uint8)
    to_image = ToTensorImage(unsqueeze=True)
    assert to_image({"pixels": single})["pixels"].shape == (1, 3, 4, 5)
    assert to_image({"pixels": many})["pixels"].shape == (2, 3, 4, 5)


# ---- statistics by key ----
@each("kind", [VecNorm, VecNormV2])
def test_statistics_are_given_by_key_and_values_restored(kind):
    norm = kind(["a", ("b", "c")], decay=1.0)
    batch = TensorDict({"a": torch.tensor([[1.0], [3.0]]), "b": {"c": torch.tensor([[2.0], [2.0]])}}, [2])
    before = batch.clone()
    norm(batch)
    assert norm.loc["a"].tolist() == [2] and norm.loc["b", "c"].tolist() == [2]
    assert norm.scale["a"].item() == pytest.approx(1, abs=1e-3)
    assert torch.allclose(norm.denorm(batch)["a"], before["a"])
    assert len(norm.to_observation_norm()) == 2


def test_the_newer_norm_says_whether_it_is_frozen():
    norm = VecNormV2(["a"])
    assert norm.frozen is False and norm.freeze().frozen and norm.unfreeze().frozen is False
    assert norm.frozen_copy().frozen


def test_statistics_are_learnt_from_what_a_step_returns():
    norm = VecNormV2(["a"], decay=1.0)
    Compose(norm)._call(TensorDict({"a": torch.tensor([[1.0], [3.0]])}, [2]))
    norm._call(TensorDict({"a": torch.tensor([[5.0]])}, [1]))
    assert norm.loc["a"].item() == 3


@each("refused", [{"stateful": False}, {"lock": object()}, {"shared_data": TensorDict()}])
def test_statistics_of_several_processes_or_in_steps_are_refused(refused):
    with pytest.raises(TypeError, match=next(iter(refused))):
        VecNormV2(["a"], **refused)
