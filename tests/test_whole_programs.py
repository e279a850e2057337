"""What `make bench` measures as whole programs: the loop by hand and engram do the same, to the last bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.programs import dqn, pixel_dqn, ppo, sac

from contracts.tiers import in_quick


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Recorder:
    """A buffer that keeps the slots of the batches that were drawn from it."""

    def __init__(self, buffer):
        self._buffer, self.slots = buffer, []

    def extend(self, batch):
        self._buffer.extend(batch)

    def sample(self):
        return self._recorded(self._buffer.sample())

    def __iter__(self):
        return map(self._recorded, self._buffer)

    def _recorded(self, batch):
        self.slots.append(batch["index"].numpy().copy())
        return batch


def run_recorded(program, frames):
    """Runs a program with engram; returns its buffer and the slots that it drew."""
    buffer = program.buffer
    program.buffer = recorder = Recorder(buffer)
    assert program.run() == frames
    return buffer, recorder.slots


def assert_same_weights(one, other):
    for (name, mine), its in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, its), name


def first_weights(module):
    return {name: weight.clone() for name, weight in module.state_dict().items()}


def assert_changed(module, before):
    assert any(not torch.equal(weight, before[name]) for name, weight in module.state_dict().items())


class Replays:
    """A loop by hand that draws given slots."""

    def replay(self, slots):
        self._slots = iter(slots)

    def draw(self, stored):
        return next(self._slots)


class DQNReplayed(Replays, dqn.ByHand):
    pass


class PixelDQNReplayed(Replays, pixel_dqn.ByHand):
    pass


class SACReplayed(Replays, sac.ByHand):
    pass


def assert_same_rows(hand, rows, frames):
    """The ring of a loop by hand holds what the buffer does."""
    for mine, its in [
        (hand.observations, rows["observation"]),
        (hand.actions, rows["action"]),
        (hand.rewards, rows["next", "reward"][:, 0]),
        (hand.next_observations, rows["next", "observation"]),
        (hand.terminations, rows["next", "terminated"][:, 0]),
    ]:
        assert np.array_equal(mine[:frames], its.numpy())


DQN = dqn.Settings(frames=320, learning_starts=64, capacity=200, batch_size=32, copy_every=50)


@pytest.mark.parametrize(
    "settings",
    in_quick(
        [DQN, replace(DQN, frames_per_batch=16, updates_per_batch=16), replace(DQN, frames_per_batch=4)],
        [replace(DQN, frames_per_batch=4)],
    ),
    ids=["an update each step", "16 updates every 16 steps", "an update every 4 steps"],
)
def test_dqn_by_hand_stores_the_same_rows_and_learns_the_same_weights_from_the_slots_that_engram_drew(settings):
    ours = dqn.Engram(settings)
    before = first_weights(ours.learner.q)
    buffer, slots = run_recorded(ours, settings.frames)
    hand = DQNReplayed(settings)
    hand.replay(slots)
    assert hand.run() == settings.frames
    assert_same_rows(hand, buffer[:], settings.frames)
    assert_same_weights(hand.learner.q, ours.learner.q)
    assert_changed(ours.learner.q, before)


@pytest.mark.deep
def test_pixel_dqn_by_hand_learns_the_same_weights_from_the_slots_that_engram_drew():
    settings = pixel_dqn.Settings(frames=120, learning_starts=60, batch_size=8, capacity=200)
    ours = pixel_dqn.Engram(settings)
    before = first_weights(ours.learner.q)
    buffer, slots = run_recorded(ours, settings.frames)
    hand = PixelDQNReplayed(settings)
    hand.replay(slots)
    assert hand.run() == settings.frames
    assert_same_rows(hand, buffer[:], settings.frames)
    assert_same_weights(hand.learner.q, ours.learner.q)
    assert_changed(ours.learner.q, before)


@pytest.mark.deep
def test_sac_by_hand_stores_the_same_rows_and_learns_the_same_weights_from_the_slots_that_engram_drew():
    settings = sac.Settings(frames=260, random_frames=150, batch_size=32, width=32)
    ours = sac.Engram(settings)
    before = first_weights(ours.actor)
    buffer, slots = run_recorded(ours, settings.frames)
    hand = SACReplayed(settings)
    hand.replay(slots)
    assert hand.run() == settings.frames
    assert_same_rows(hand, buffer[:], settings.frames)
    assert_same_weights(hand.actor, ours.actor)
    assert_same_weights(hand.learner.critics, ours.learner.critics)
    assert_changed(ours.actor, before)


PPO = ppo.Settings(envs=4, steps=64, batches=3, epochs=2, minibatch=64)


def rows_of(program, batches):
    """What each environment did, by column: `batches` of a loop by hand, without calls that only reset it."""
    calls = [program.collect() for _ in range(batches)]
    kept = ~np.concatenate([batch["idle"] for batch in calls])
    columns = {key: np.concatenate([batch[key] for batch in calls]) for key in ppo.COLUMNS}
    return [{key: column[kept[:, env], env] for key, column in columns.items()} for env in range(kept.shape[1])]


@pytest.mark.parametrize("vectorization", ["sync", ppo.NATIVE])
def test_ppo_of_the_same_seeds_takes_the_same_actions_as_the_loop_by_hand(vectorization):
    settings = replace(PPO, vectorization=vectorization)
    batches = list(ppo.CollectWithEngram(settings).collector)
    hand = rows_of(ppo.CollectByHand(settings), settings.batches)
    for env, rows in enumerate(hand):
        ours = torch.cat([batch[env] for batch in batches])
        n = len(rows["action"])
        assert n > settings.steps * (settings.batches - 1)
        for key in ("observation", "action"):
            assert np.array_equal(rows[key], ours[key][:n].numpy()), key
        for key in ("log_prob", "value"):  # a matrix product's last bit depends on where its rows lie, on some CPUs
            np.testing.assert_allclose(rows[key], ours[key][:n].numpy(), rtol=1e-4, atol=1e-6, err_msg=key)
        assert np.array_equal(rows["reward"], ours["next", "reward"][:n, 0].numpy())
        assert np.array_equal(rows["done"], ours["next", "done"][:n, 0].numpy())


class PPOReplayed(ppo.ByHand):
    def replay(self, slots):
        """Slots of a buffer that has one environment after the other; here rows lie one step after the other."""
        s = self.s
        env, t = np.divmod(np.concatenate(slots), s.steps)
        self._epochs = iter((t * s.envs + env).reshape(-1, s.steps * s.envs))

    def epoch(self):
        return next(self._epochs)


def test_ppo_by_hand_learns_the_same_weights_from_the_minibatches_that_engram_drew():
    ours = ppo.Engram(PPO)
    before = first_weights(ours.agent)
    frames = PPO.envs * PPO.steps * PPO.batches
    _, slots = run_recorded(ours, frames)
    hand = PPOReplayed(PPO)
    hand.replay(slots)
    assert hand.run() == frames
    assert_same_weights(hand.agent, ours.agent)
    assert_changed(ours.agent, before)
