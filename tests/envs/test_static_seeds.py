"""`set_seed(seed, static_seed=True)` gives every environment of a batch the same seed."""

import pytest
import torch

from contracts.each import each
from engram.collectors import Collector
from engram.envs import GymEnv, ParallelEnv, SerialEnv, StepCounter, TransformedEnv


def cartpole():
    return GymEnv("CartPole-v1")


def counted():
    return TransformedEnv(cartpole(), StepCounter())


BATCHES = {
    "serial": lambda: SerialEnv(3, cartpole),
    "transformed": lambda: TransformedEnv(SerialEnv(3, cartpole), StepCounter()),
    "vector": lambda: GymEnv("CartPole-v1", num_envs=3, vectorization_mode="sync"),
    "raw workers": lambda: ParallelEnv(3, cartpole, num_workers=2),
    "workers": lambda: ParallelEnv(3, counted, num_workers=2),
}


@each("kind", BATCHES)
def test_all_environments_begin_as_one_with_this_seed_does(kind):
    env, single = BATCHES[kind](), cartpole()
    single.set_seed(5)
    assert env.set_seed(5, static_seed=True) == 5
    assert torch.equal(env.reset()["observation"], single.reset()["observation"].expand(3, 4))
    assert env.set_seed(5) == 8
    first = env.reset()["observation"]
    env.close()
    assert not torch.equal(first[0], first[1])


def test_environments_that_share_a_generator_refuse_it_and_keep_their_seed():
    env, other = (GymEnv("CartPole-v1", num_envs=3) for _ in range(2))
    for one in (env, other):
        one.set_seed(4)
    with pytest.raises(ValueError, match="static_seed=True"):
        env.set_seed(5, static_seed=True)
    assert torch.equal(env.reset()["observation"], other.reset()["observation"])


def test_the_random_state_of_equally_seeded_environments_is_taken_back():
    env = GymEnv("CartPole-v1", num_envs=3, vectorization_mode="sync")
    env.set_seed(5, static_seed=True)
    state = env.random_state()
    first = env.reset()["observation"]
    env.set_random_state(state)
    assert torch.equal(env.reset()["observation"], first)


def test_a_collector_seeds_all_its_environments_alike():
    collector = Collector(SerialEnv(2, cartpole), frames_per_batch=4, total_frames=-1)
    assert collector.set_seed(7, static_seed=True) == 7
    first = collector.rollout()["observation"][:, 0]
    collector.shutdown()
    assert torch.equal(first[0], first[1])
