"""A buffer of whole episodes as programs of TD-MPC2's kind have it, and every batch of it against plain lists."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from docs.pages import added_lines
from engram.data.replay_buffers import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from engram.data.replay_buffers.samplers import SliceSampler

HORIZON, SLICES, CAPACITY = 3, 16, 100


# ---- the program ----
class EpisodeBuffer:
    """Takes whole episodes; gives batches `[horizon + 1, slices]`, of which the learner plans from the first row."""

    def __init__(self, folder=None, prefetch=0):
        self.folder, self.prefetch, self.episodes, self.rows = folder, prefetch, 0, None

    def make(self):
        if self.folder is None:
            storage = LazyTensorStorage(CAPACITY, device=torch.device("cpu"))
        else:
            storage = LazyMemmapStorage(CAPACITY, scratch_dir=self.folder, existsok=True)
        return ReplayBuffer(
            storage=storage,
            sampler=SliceSampler(
                num_slices=SLICES,
                end_key=None,
                traj_key="episode",
                truncated_key=None,
                strict_length=True,
                cache_values=True,
            ),
            pin_memory=torch.cuda.is_available(),
            prefetch=self.prefetch,
            batch_size=SLICES * (HORIZON + 1),
        )

    def add(self, episode):
        if self.rows is None:
            self.rows = self.make()
        episode["episode"] = torch.full_like(episode["reward"], self.episodes, dtype=torch.int64)
        self.rows.extend(episode)
        self.episodes += 1

    def load(self, episodes):
        """Episodes of one length, `[episodes, time]`."""
        self.rows = self.make()
        self.episodes = len(episodes)
        number = torch.arange(len(episodes)).unsqueeze(1)
        episodes["episode"] = number.expand(episodes.shape)
        self.rows.extend(episodes.reshape(-1))

    def sample(self):
        td = self.rows.sample().view(-1, HORIZON + 1).permute(1, 0)
        td = td.select("obs", "action", "reward", "terminated", "task", strict=False)
        return td["obs"].contiguous(), td["action"][1:].contiguous(), td["reward"][1:].unsqueeze(-1).contiguous()


# ---- what it must give ----
def episode(number, length):
    """A row says where it is from; the first, of the reset, has neither an action nor a reward."""
    time = torch.arange(length, dtype=torch.float32)
    obs = torch.stack([torch.full((length,), float(number)), time], -1)
    action, reward = obs + 0.5, 1000.0 * number + time
    action[0], reward[0] = math.nan, math.nan
    return TensorDict({"obs": obs, "action": action, "reward": reward}, [length])


def admissible(lengths):
    """Where slices may begin: the steps (episode, time) with whole slices in the newest CAPACITY rows."""
    held = [(number, time) for number, length in enumerate(lengths) for time in range(length)][-CAPACITY:]
    return {(n, t) for n, t in held if (n, t + HORIZON) in held}


def starts(batch):
    """Where the slices of a batch begin, if each row is whole and follows the one before it in its episode."""
    obs, action, reward = batch
    assert obs.shape == (HORIZON + 1, SLICES, 2) and action.shape == (HORIZON, SLICES, 2)
    assert reward.shape == (HORIZON, SLICES, 1)
    number, time = obs.unbind(-1)
    assert torch.equal(number, number[0].expand_as(number))
    assert torch.equal(time, time[0] + torch.arange(HORIZON + 1.0).unsqueeze(-1))
    assert torch.equal(action, obs[1:] + 0.5) and torch.equal(reward[..., 0], 1000 * number[1:] + time[1:])
    return set(zip(number[0].int().tolist(), time[0].int().tolist(), strict=True))


def drawn(buffer, batches=60):
    return set().union(*(starts(buffer.sample()) for _ in range(batches)))


@each("prefetch", [0, 2])
@each("lengths", [[10, 4, 3, 1, 12], [30, 25, 7, 2, 45, 23]])
def test_slices_begin_at_every_step_of_an_episode_that_has_a_whole_slice_behind_it_and_nowhere_else(lengths, prefetch):
    torch.manual_seed(0)
    buffer = EpisodeBuffer(prefetch=prefetch)
    for number, length in enumerate(lengths):
        buffer.add(episode(number, length))
    assert drawn(buffer) == admissible(lengths)


def test_batches_between_episodes_have_the_new_ones_and_none_that_were_overwritten():
    torch.manual_seed(0)
    buffer, lengths = EpisodeBuffer(), []
    for number in range(25):
        lengths.append(5 + number % 9)
        buffer.add(episode(number, lengths[-1]))
        assert drawn(buffer, 3) <= admissible(lengths)
    assert drawn(buffer) == admissible(lengths)


def test_episodes_of_one_length_are_loaded_in_one_call():
    buffer = EpisodeBuffer()
    buffer.load(torch.stack([episode(number, 9) for number in range(8)]))
    assert drawn(buffer) == admissible([9] * 8)
    buffer.add(episode(8, 12))
    assert drawn(buffer) == admissible([*[9] * 8, 12])


def test_a_run_that_goes_on_in_a_file_may_count_its_episodes_from_0_again(tmp_path):
    first = EpisodeBuffer(tmp_path / "replay")
    first.add(episode(0, 10))
    del first
    second = EpisodeBuffer(tmp_path / "replay")
    second.add(episode(1, 10))
    assert second.rows[:]["episode"].tolist() == [0] * 20
    assert drawn(second) == admissible([10, 10])


def test_no_episode_that_is_long_enough_is_said_and_sampling_goes_on_with_the_next():
    buffer = EpisodeBuffer()
    buffer.add(episode(0, HORIZON))
    with pytest.raises(RuntimeError, match="4"):
        buffer.sample()
    buffer.add(episode(1, HORIZON + 1))
    assert drawn(buffer, 2) == {(1, 0)}


def test_lines_that_the_page_adds_are_lines_of_this_program():
    assert added_lines("docs/coming-from/tdmpc2.md", __file__) == []
