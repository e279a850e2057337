"""How whole programs are measured: in turns, by CPU time, and part by part."""

from dataclasses import dataclass

import pytest
from benchmarks.programs import shares, turns


@dataclass
class Work:
    """A program that takes a given time for each of its frames, half of it in its learner."""

    frames: int
    clock: list
    cost: float

    def shorter(self):
        return Work(1, self.clock, self.cost)

    def parts(self):
        return shares.Parts(learner=[(self, "learn")], replay=[(self, "sample")])

    def learn(self):
        self.clock[0] += self.cost / 4
        self.sample()

    def sample(self):
        self.clock[0] += self.cost / 4

    def run(self):
        for _ in range(self.frames):
            self.clock[0] += self.cost / 2
            self.learn()
        return self.frames


@pytest.fixture
def clock(monkeypatch):
    """CPU time, in a list, that only the programs of a test spend."""
    spent = [0.0]
    monkeypatch.setattr(turns.time, "process_time", lambda: spent[0])
    return spent


def broken(settings):
    raise ImportError("no such library")


@pytest.mark.deep
def test_forms_are_measured_in_as_many_rounds_and_one_that_fails_says_why(clock):
    row = turns.Row(
        "key",
        "title",
        Work(5, clock, 2.0),
        {"by hand": lambda s: s, "engram": lambda s: Work(s.frames, clock, 3.0), "other": broken},
    )
    measured = turns.measure(row, rounds=3)
    assert measured.seconds == {"by hand": [2.0] * 3, "engram": [3.0] * 3}
    assert turns.ratio(measured.seconds, "engram", "by hand") == 1.5
    assert isinstance(measured.missing["other"], ImportError)


def test_time_counts_for_the_part_that_was_entered_last(clock):
    parts = shares.measured_parts(lambda: Work(4, clock, 1.0))
    assert parts == {"environment": 0, "policy": 0, "learner": 0.25, "replay": 0.25, "collection": 0.5}


def test_steps_of_an_iterator_count_for_its_part(clock):
    watch = shares.Clock()

    def batches(n):
        for number in range(n):
            clock[0] += 1
            yield number

    for _ in watch.timed_iterator(batches, shares.REPLAY)(3):
        clock[0] += 10
    watch.enter(shares.COLLECTION)
    assert watch.seconds == {shares.REPLAY: 3, shares.COLLECTION: 30}


def test_modules_that_the_learner_calls_are_not_the_policy(clock):
    watch = shares.Clock()
    act = watch.timed(lambda: clock.__setitem__(0, clock[0] + 1), shares.POLICY)
    watch.timed(act, shares.LEARNER)()
    act()
    assert watch.seconds[shares.LEARNER] == 1 and watch.seconds[shares.POLICY] == 1
