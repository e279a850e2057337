"""Where time runs in the data: every step lands in its slot with its own priority, index and history, as loops say."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.transforms import MultiStepTransform, Reward2GoTransform, RewardSum

GAMMA, FAR = 0.5, 40


class Stream:
    """What the environments do, as TensorDicts and as plain numbers; `inner` is their shape."""

    def __init__(self, inner: tuple[int, ...], done: list[list[bool]]) -> None:
        self.inner, self.done = inner, done
        n = torch.tensor([[1000 * env + t for t in range(FAR)] for env in range(len(done))])
        flags = torch.tensor(done)
        batch = TensorDict(
            {
                "n": n,
                "td_error": (n + 1).double(),
                "next": {
                    "n": n + 1,
                    "reward": (n % 7 + 1).double().unsqueeze(-1),
                    "done": flags.unsqueeze(-1),
                    "terminated": flags.unsqueeze(-1),
                },
            },
            [len(done), FAR],
        )
        self.batch = batch.reshape(*inner, FAR) if inner else batch[0]

    def piece(self, start: int, stop: int, time_dim: int) -> TensorDict:
        piece = self.batch[..., start:stop]
        return piece if time_dim else piece.permute(len(self.inner), *range(len(self.inner)))

    def rewards(self, env: int, start: int, stop: int) -> list[int]:
        return [(1000 * env + t) % 7 + 1 for t in range(start, stop)]

    def last(self, env: int, t: int, most: int) -> int:
        """One behind the last step of the trajectory of a step, at most `most`."""
        return next((k + 1 for k in range(t, most) if self.done[env][k]), most)

    def first(self, env: int, t: int) -> int:
        return next((k + 1 for k in range(t - 1, -1, -1) if self.done[env][k]), 0)

    def ready(self, known: int, n_steps: int) -> int:
        """Time steps that have all the future that they need, in every environment."""
        return min(
            next((t for t in range(known) if t + n_steps > known and not any(done[t:known])), known)
            for done in self.done
        )

    def row(self, env: int, t: int, known: int, n_steps: int) -> tuple[float, ...]:
        """n, what follows it, its n-step reward and the rewards of its trajectory up to there."""
        end = min(t + n_steps, self.last(env, t, known))
        summed = sum(GAMMA**k * r for k, r in enumerate(self.rewards(env, t, end)))
        so_far = sum(self.rewards(env, self.first(env, end - 1), end))
        return 1000 * env + t, 1000 * env + end, summed, so_far


def assert_like(rb: TensorDictReplayBuffer, stream: Stream, written: int, rows, given) -> None:
    """Each slot holds the row of its step, knows where it is, and has the priority that was given to it."""
    envs, capacity = len(stream.done), rb.storage.max_size // len(stream.done)
    slots, expected = [], []
    for t in range(max(0, written - capacity), written):
        for env in range(envs):
            slots.append(t % capacity * envs + env)
            expected.append((*rows[t][env], given[t, env]))
    at = rb.storage.from_slots(torch.tensor(slots))
    stored = rb.storage[at]
    found = torch.stack(
        [
            stored["n"].double(), stored["next", "n"].double(), stored["next", "reward"].flatten(),
            stored["next", "episode_reward"].flatten(), rb.sampler.priorities(at, storage=rb.storage),
        ],
        -1,
    )  # fmt: skip
    assert found.tolist() == [list(map(float, row)) for row in expected]
    own = torch.stack(at, -1) if isinstance(at, tuple) else at
    assert torch.equal(stored["index"], own)
    shown = rb[:]["n"]
    if stream.inner:
        shown = shown.movedim(rb.dim_extend, 0)
    in_order = sorted(zip(slots, expected, strict=True))
    assert shown.flatten().tolist() == [row[0] for _, row in in_order]


@settings(max_examples=24)
@given(data=st.data())
def test_wherever_time_runs_each_step_keeps_its_priority_its_index_and_its_history(data):
    inner = data.draw(st.sampled_from([(), (1,), (2,), (3,), (2, 2)]))
    envs, ndim = torch.Size(inner).numel(), 1 + len(inner)
    time_dim = data.draw(st.sampled_from(sorted({0, ndim - 1})))
    n_steps = data.draw(st.sampled_from([None, 1, 2, 4]))
    stream = Stream(inner, data.draw(st.lists(_DONE, min_size=envs, max_size=envs)))
    slices = data.draw(st.booleans())
    sampler = PrioritizedSliceSampler(num_slices=2, strict_length=False, max_capacity=1000, alpha=1, beta=1)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12 * envs, ndim=ndim), dim_extend=time_dim,
        sampler=sampler if slices else PrioritizedSampler(None, 1.0, 1.0), batch_size=4,
        transform=None if n_steps is None else MultiStepTransform(n_steps, GAMMA),
    )  # fmt: skip
    rb.append_transform(RewardSum(), invert=True)
    known, written, rows, given = 0, 0, [], {}
    for size in data.draw(st.lists(st.integers(1, 15), min_size=1, max_size=5)):
        size = min(size, FAR - known)
        how = data.draw(st.sampled_from(["extend", "add", "list"])) if size == 1 else "extend"
        if size == 0:
            break
        piece = stream.piece(known, known + size, time_dim)
        if how == "extend":
            index = rb.extend(piece)
        else:
            step = piece.select("n", "td_error", "next").squeeze(time_dim) if inner else piece[0]
            index = rb.add(step) if how == "add" else rb.extend([step])
        known += size
        before, written = written, stream.ready(known, n_steps or 1)
        rows += [[stream.row(e, t, known, n_steps or 1) for e in range(envs)] for t in range(before, written)]
        new = [(t % 12, e) for t in range(before, written) for e in range(envs)]
        expected = [list(_unravelled(t * envs + e, inner)) for t, e in new] if inner else [t for t, _ in new]
        assert torch.as_tensor(index).reshape(len(new), ndim).tolist() == [x if inner else [x] for x in expected]
        given |= {(t, e): 1000 * e + t + 1 for t in range(before, written) for e in range(envs)}
        if written:
            _update_some(data, rb, stream, written, given)
            assert_like(rb, stream, written, rows, given)
    flushed = rb.flush_transforms()
    rows += [[stream.row(e, t, known, n_steps or 1) for e in range(envs)] for t in range(written, known)]
    given |= {(t, e): 1000 * e + t + 1 for t in range(written, known) for e in range(envs)}
    assert len(flushed) == (known - written) * envs
    assert_like(rb, stream, known, rows, given)


_DONE = st.sets(st.integers(0, FAR - 1), max_size=8).map(lambda ends: [t in ends for t in range(FAR)])


def _unravelled(slot: int, inner: tuple[int, ...]) -> tuple[int, ...]:
    parts = []
    for size in reversed(inner):
        parts.append(slot % size)
        slot //= size
    return slot, *reversed(parts)


def _update_some(data, rb, stream, written, given) -> None:
    """New priorities for a sampled batch, told in one of the ways in which users tell it."""
    batch, info = rb.sample(return_info=True)
    index, ids = batch["index"], batch["n"]
    assert torch.equal(rb.storage[info["index"]]["n"], ids)
    value = torch.arange(len(ids), dtype=torch.float64) + 0.5
    how = data.draw(st.sampled_from(["batch", "tensor", "tuple"]))
    if how == "batch":
        rb.update_tensordict_priority(batch.set("td_error", value))
    else:
        rb.update_priority(info["index"] if how == "tuple" else index, value)
    given |= {(n % 1000, n // 1000): v for n, v in zip(ids.tolist(), value.tolist(), strict=True)}


@pytest.mark.parametrize("time_dim", [0, 1])
def test_rewards_to_go_of_environments_are_those_of_their_steps_and_their_priorities_too(time_dim):
    done = [[t % 5 == 4 for t in range(FAR)], [t % 10 == 9 for t in range(FAR)]]
    stream = Stream((2,), done)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40, ndim=2), sampler=PrioritizedSampler(None, 1.0, 1.0), dim_extend=time_dim,
        transform=Reward2GoTransform(GAMMA),
    )  # fmt: skip
    for start in range(0, FAR, 10):
        rb.extend(stream.piece(start, start + 10, time_dim))
    for t, env in itertools.product(range(20), range(2)):
        rewards = stream.rewards(env, 20 + t, stream.last(env, 20 + t, FAR))
        row = rb.storage[torch.tensor([t]), torch.tensor([env])]
        assert row["n"].item() == 1000 * env + 20 + t
        assert row["reward_to_go"].item() == sum(GAMMA**k * r for k, r in enumerate(rewards))
        assert rb.sampler.priorities((torch.tensor([t]), torch.tensor([env])), storage=rb.storage).item() == (
            1000 * env + 21 + t
        )


@settings(max_examples=20)
@given(ranks=st.lists(st.integers(0, 9), min_size=1, max_size=30), n_steps=st.sampled_from([None, 2]), data=st.data())
def test_rows_that_a_max_value_writer_keeps_have_their_own_priorities(ranks, n_steps, data):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(5), sampler=PrioritizedSampler(None, 1.0, 1.0),
        writer=TensorDictMaxValueWriter(rank_key="rank"),
        transform=None if n_steps is None else MultiStepTransform(n_steps, GAMMA),
    )  # fmt: skip
    stream = Stream((), [[False] * FAR])
    batch = stream.batch[: len(ranks)].set("rank", torch.tensor(ranks, dtype=torch.float64))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ranks)), max_size=4)) | {0, len(ranks)})
    for start, stop in itertools.pairwise(cuts):
        rb.extend(batch[start:stop])
    rb.flush_transforms()
    stored = rb[:]
    assert sorted(stored["rank"].tolist()) == sorted(map(float, ranks))[-5:]
    assert rb.sampler.priorities(slice(None), storage=rb.storage).tolist() == stored["td_error"].tolist()
    assert stored["index"].tolist() == list(range(len(stored)))
