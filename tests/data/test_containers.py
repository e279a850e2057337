"""What comes first decides the form of rows, and neither what is taken nor its cost; arrays are taken as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from contracts.each import each
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)


def nested(leaf: Callable[[Any], Any], first: int, *lead: int) -> dict[str, Any]:
    """A dict of steps, the leaves made by `leaf` of arrays."""
    n = int(np.prod(lead))
    number = np.arange(first, first + n, dtype=np.float32).reshape(lead)
    following = {"obs": number[..., None] + np.ones(2, np.float32), "done": number[..., None] % 5 == 4}
    return {"number": leaf(number), "next": {name: leaf(value) for name, value in following.items()}}


def tensordict(first: int, *lead: int) -> TensorDict:
    return TensorDict(nested(torch.as_tensor, first, *lead), lead, device="cpu")


def dict_with_a_tensordict(first: int, *lead: int) -> dict[str, Any]:
    steps = tensordict(first, *lead)
    return {"number": steps["number"], "next": steps["next"]}


FORMS: dict[str, Callable[..., Any]] = {
    "TensorDict": tensordict,
    "dict of tensors": lambda first, *lead: nested(torch.as_tensor, first, *lead),
    "dict of arrays": lambda first, *lead: nested(np.asarray, first, *lead),
    "dict with a TensorDict": dict_with_a_tensordict,
}
#: Of others than the first write, the leaves say how many steps there are.
WITHOUT_BATCH_SIZE = {
    "TensorDict without batch size": lambda first, *lead: TensorDict(nested(torch.as_tensor, first, *lead)),
}
WRITTEN = FORMS | WITHOUT_BATCH_SIZE
STORAGES = {
    "memory": lambda: LazyTensorStorage(60),
    "shared": lambda: LazyTensorStorage(60, shared=True),
    "file": lambda: LazyMemmapStorage(60),
}


def rows(rb: ReplayBuffer) -> list[list[float]]:
    """Numbers, next observations and flags of all rows, in their order."""
    stored = rb[: len(rb)]
    following = stored["next"]
    columns = stored["number"].unsqueeze(-1), following["obs"], following["done"].float()
    found: list[list[float]] = torch.cat(columns, -1).tolist()
    return found


class Watched:
    """A buffer, of each write to which it is known whether one native call did it."""

    def __init__(self, buffer: type[ReplayBuffer], storage: str, form: str) -> None:
        self.rb = buffer(storage=STORAGES[storage](), batch_size=4)
        self.rb.extend(FORMS[form](0, 4))
        self.pushed: list[bool] = []
        push = self.rb.storage.native.push
        assert push is not None

        def watched(*arguments: Any) -> Any:
            slots = push(*arguments)
            self.pushed.append(slots is not None)
            return slots

        self.rb.storage.native.push = watched


@each("buffer", [ReplayBuffer, TensorDictReplayBuffer])
@each("storage", STORAGES)
@each("begun", FORMS)
@settings(max_examples=25)  # for each of 42 cases
@given(st.lists(st.tuples(st.sampled_from(sorted(WRITTEN)), st.sampled_from(["add", "extend", "list"])), max_size=4))
def test_any_container_is_written_by_one_native_call_whichever_came_first(
    buffer: type[ReplayBuffer], storage: str, begun: str, writes: list[tuple[str, str]]
) -> None:
    watched, written = Watched(buffer, storage, begun), 4
    for form, call in writes:
        if call == "add":
            index = [int(watched.rb.add(WRITTEN[form](written)))]
        else:
            several = [WRITTEN[form](written + k) for k in range(3)] if call == "list" else WRITTEN[form](written, 3)
            index = watched.rb.extend(several).tolist()
        assert index == list(range(written, written + len(index))), (form, call)
        written += len(index)
    assert watched.pushed == [True] * len(writes), writes
    assert rows(watched.rb) == [[k, k + 1, k + 1, k % 5 == 4] for k in range(written)]
    came_first = FORMS[begun](0, 4)
    assert type(watched.rb[0]) is type(came_first) and type(watched.rb[0]["next"]) is type(came_first["next"])


def prioritized(n: int = 20) -> TensorDictPrioritizedReplayBuffer:
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(30), batch_size=4)
    rb.extend(tensordict(0, n))
    return rb


def after(index: Any, priority: Any) -> Any:
    """The priorities that an update leaves, or the kind of its error, after which all are as before."""
    rb = prioritized()
    before = rb.sampler.priorities(torch.arange(20))
    try:
        rb.update_priority(index, priority)
    except (ValueError, IndexError) as error:
        assert torch.equal(rb.sampler.priorities(torch.arange(20)), before)
        return type(error)
    return rb.sampler.priorities(torch.arange(20)).tolist()


@given(
    st.lists(st.tuples(st.integers(-25, 25), st.sampled_from([0.0, 0.5, 2.0, 3.0, -1.0, float("nan")])), max_size=5),
    st.sampled_from([np.float32, np.float64]),
    st.integers(1, 2),
)
def test_priorities_of_arrays_are_set_as_those_of_tensors_and_lists(
    updates: list[tuple[int, float]], dtype: type, step: int
) -> None:
    index = np.array([at for at, _ in updates], np.int64).repeat(step)[::step]
    priority = np.array([value for _, value in updates], dtype).repeat(step)[::step]
    expected = after(index.tolist(), priority.tolist())
    assert after(index, priority) == expected
    assert after(torch.as_tensor(index.copy()), torch.as_tensor(priority.copy())) == expected
    assert after(index, torch.as_tensor(priority.copy())) == expected
