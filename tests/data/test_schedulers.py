"""Schedulers of samplers' settings: the values they go through, their bounds, states and errors."""

import pytest
import torch

from contracts.each import each
from engram.data import (
    LambdaScheduler,
    LazyTensorStorage,
    LinearScheduler,
    ParameterScheduler,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SchedulerList,
    StepScheduler,
)


def sampler(alpha=0.8, beta=0.4):
    return PrioritizedSampler(10, alpha, beta)


def values(make, name="beta", steps=6, **settings):
    """The parameter before and after each step."""
    s = sampler(**settings)
    scheduler = make(s)
    out = [getattr(s, name)]
    for _ in range(steps):
        scheduler.step()
        out.append(getattr(s, name))
    return pytest.approx(out)


def test_a_linear_one_reaches_the_final_value_and_stays_there():
    assert values(lambda s: LinearScheduler(s, "beta", 1.0, 4)) == [0.4, 0.55, 0.7, 0.85, 1.0, 1.0, 1.0]
    assert values(lambda s: LinearScheduler(s, "alpha", 0.0, 2), "alpha", 3) == [0.8, 0.4, 0.0, 0.0]


def test_the_last_step_of_a_linear_one_gives_the_final_value_itself():
    s = sampler(beta=0.2)
    LinearScheduler(s, "beta", 0.9, 1).step()
    assert s.beta == 0.9 != 0.2 + (0.9 - 0.2)


def test_steps_multiply_or_add_at_every_nth_step_within_the_bounds():
    assert values(lambda s: StepScheduler(s, "beta", 0.5, 2)) == [0.4, 0.4, 0.2, 0.2, 0.1, 0.1, 0.05]
    assert values(lambda s: StepScheduler(s, "beta", 0.1, 2, "additive", max_value=0.55)) == [
        0.4, 0.4, 0.5, 0.5, 0.55, 0.55, 0.55,
    ]  # fmt: skip
    assert values(lambda s: StepScheduler(s, "beta", 0.1, min_value=0.03), steps=3) == [0.4, 0.04, 0.03, 0.03]
    assert values(lambda s: StepScheduler(s, "beta"), steps=2) == [0.4, 0.36, 0.324]


def test_a_function_gives_the_factor_of_each_step_within_the_bounds():
    settings = {"min_value": 0.5, "max_value": 1.0}
    bounded = values(lambda s: LambdaScheduler(s, "beta", lambda i: i, **settings), steps=4)
    assert bounded == [0.4, 0.5, 0.8, 1.0, 1.0]


def test_a_buffers_scheduler_follows_the_sampler_that_the_buffer_has():
    rb = PrioritizedReplayBuffer(0.8, 0.4, storage=LazyTensorStorage(10), batch_size=4)
    scheduler = LinearScheduler(rb, "beta", 1.0, 2)
    rb.set_sampler(sampler(beta=0.1))
    scheduler.step()
    assert rb.sampler.beta == pytest.approx(0.7)


def test_a_new_alpha_is_used_by_the_next_draw():
    rb = PrioritizedReplayBuffer(1.0, 0.4, storage=LazyTensorStorage(10), batch_size=2000)
    rb.update_priority(rb.extend(torch.arange(2)), torch.tensor([1.0, 3.0]))
    assert 0.7 < rb.sample().double().mean() < 0.8
    LinearScheduler(rb, "alpha", 0.0, 1).step()
    assert 0.45 < rb.sample().double().mean() < 0.55


def test_any_number_of_any_sampler_can_be_scheduled():
    class Own(RandomSampler):
        temperature = 8

    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=Own())
    StepScheduler(rb, "temperature", 0.5).step()
    assert rb.sampler.temperature == 4


@each("make", [
    lambda s: LinearScheduler(s, "beta", 1.0, 7), lambda s: StepScheduler(s, "beta", 0.9, 2),
    lambda s: LambdaScheduler(s, "beta", lambda i: 1 / i),
    lambda s: SchedulerList([LinearScheduler(s, "alpha", 0.0, 5), StepScheduler(s, "beta", 0.5)]),
])  # fmt: skip
def test_a_state_saved_at_every_step_goes_on_the_same(make):
    first = sampler()
    scheduler = make(first)
    for _ in range(9):
        scheduler.step()
        second = sampler(alpha=first.alpha, beta=0.987)
        other = make(second)
        other.load_state_dict(scheduler.state_dict())
        assert (second.alpha, second.beta) == pytest.approx((first.alpha, first.beta))
        scheduler.step()
        other.step()
        assert (second.alpha, second.beta) == pytest.approx((first.alpha, first.beta))


def test_a_list_steps_all_of_its_schedulers():
    s = sampler()
    schedulers = SchedulerList([LinearScheduler(s, "beta", 1.0, 2)])
    schedulers.append(StepScheduler(s, "alpha", 0.5))
    schedulers.step()
    assert (s.alpha, s.beta, len(schedulers)) == (pytest.approx(0.4), pytest.approx(0.7), 2)


@each("wrong, error, match", [
    (lambda s: LinearScheduler(s, "gamma", 1.0, 4), ValueError, "does not have an attribute 'gamma'"),
    (lambda s: LinearScheduler(s, "reduction", 1.0, 4), ValueError, "does not have an attribute 'reduction'"),
    (lambda s: LinearScheduler(3, "beta", 1.0, 4), TypeError, "pass one, or its replay buffer, got a int"),
    (lambda s: LinearScheduler(s, "beta", 1.0, 0), ValueError, "num_steps must be an integer of 1 or more"),
    (lambda s: StepScheduler(s, "beta", n_steps=0), ValueError, "n_steps must be an integer of 1 or more"),
    (lambda s: StepScheduler(s, "beta", mode="other"), ValueError, "mode must be one of"),
    (lambda s: StepScheduler(s, "beta", min_value=2, max_value=1), ValueError, "min_value=2 is more than max_value=1"),
    (lambda s: SchedulerList([s]), TypeError, "takes schedulers, got a PrioritizedSampler"),
    (lambda s: ParameterScheduler(s, "beta"), TypeError, "abstract"),
])  # fmt: skip
def test_unschedulable_setting_is_refused(wrong, error, match):
    with pytest.raises(error, match=match):
        wrong(sampler())


@each("change", [
    {"param_name": "alpha"}, {"initial_value": None}, {"initial_value": float("inf")}, {"steps": -1}, {"steps": True},
    {"steps": 0.5},
])  # fmt: skip
def test_a_state_that_is_not_its_own_is_refused_and_changes_nothing(change):
    s = sampler()
    schedulers = SchedulerList([LinearScheduler(s, "beta", 1.0, 4), StepScheduler(s, "beta")])
    schedulers.step()
    before = schedulers.state_dict(), s.beta
    good, bad = schedulers.schedulers[0].state_dict(), {**schedulers.schedulers[1].state_dict(), **change}
    with pytest.raises(ValueError, match="scheduler"):
        schedulers.load_state_dict({"schedulers": [{**good, "steps": 3}, bad]})
    with pytest.raises(ValueError, match="scheduler"):
        schedulers.schedulers[1].load_state_dict(bad)
    with pytest.raises(ValueError, match="2 schedulers here, 0 there"):
        schedulers.load_state_dict({"schedulers": []})
    with pytest.raises(ValueError, match="a scheduler's state is"):
        schedulers.schedulers[0].load_state_dict({})
    assert (schedulers.state_dict(), s.beta) == before
