"""`nbytes_for`: what a storage will take, known before it is made."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from docs.pages import ROOT
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from engram.specs import Bounded, Categorical, Composite, Unbounded

STEPS = {
    "vector": {"obs": torch.zeros(17), "action": torch.zeros(6), "reward": 0.0, "done": False},
    "pixels": {"pixels": torch.zeros(84, 84, dtype=torch.uint8), "action": 0, "reward": np.float32(0), "done": False},
    "nested": TensorDict({"obs": torch.zeros(3), "next": {"done": torch.zeros(1).bool()}}, []),
    "tensor": torch.zeros(5),
}


@pytest.mark.parametrize("n", [1, 1000, 12345])
@pytest.mark.parametrize("step", STEPS)
def test_it_is_what_the_storage_has_once_it_is_written(tmp_path, step, n):
    for storage in (LazyTensorStorage(n), LazyMemmapStorage(n, scratch_dir=tmp_path)):
        ReplayBuffer(storage=storage).add(STEPS[step])
        assert type(storage).nbytes_for(STEPS[step], n) == storage.nbytes


def test_a_spec_stands_for_a_step_of_it():
    spec = Composite(obs=Unbounded((4,)), action=Categorical(3), pixels=Bounded(0, 255, (8, 8), dtype=torch.uint8))
    assert LazyTensorStorage.nbytes_for(spec, 100) == LazyTensorStorage.nbytes_for(spec.zero(), 100)


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "9"])
def test_a_number_of_steps_that_is_none_is_refused(n):
    with pytest.raises(ValueError, match="n must be an integer of 1 or more"):
        LazyTensorStorage.nbytes_for(torch.zeros(3), n)


def test_a_step_without_a_tensor_is_refused():
    with pytest.raises(ValueError, match="nothing to store"):
        LazyTensorStorage.nbytes_for({}, 10)


def test_the_table_of_the_page_is_true():
    page = (ROOT / "docs/how-to/memory.md").read_text()
    for name, line in _table(page).items():
        step = _PAGE_STEPS[name]
        needed = LazyTensorStorage.nbytes_for(step, 1_000_000), LazyMemmapStorage.nbytes_for(step, 1_000_000)
        assert [float(cell.split()[0]) for cell in line] == [float(f"{n / 1e9:.3g}") for n in needed], name


def _table(page: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if " GB |" in line]
    return {row[0]: row[2:4] for row in rows}


def _transition(**observation: torch.Tensor) -> dict[str, object]:
    return {**observation, "next": {**observation, "reward": torch.zeros(1), "done": torch.zeros(1).bool(),
            "terminated": torch.zeros(1).bool(), "truncated": torch.zeros(1).bool()}}  # fmt: skip


_U8 = torch.uint8
_PAGE_STEPS = {
    "CartPole, both observations": _transition(obs=torch.zeros(4)) | {"action": 0},
    "HalfCheetah, both observations": _transition(obs=torch.zeros(17)) | {"action": torch.zeros(6)},
    "84 x 84 frame, once": {"pixels": torch.zeros(84, 84, dtype=_U8), "action": 0, "next": {
        "reward": torch.zeros(1), "done": torch.zeros(1).bool(), "terminated": torch.zeros(1).bool(),
        "truncated": torch.zeros(1).bool()}},
    "stack of 4 x 84 x 84, both observations": _transition(obs=torch.zeros(4, 84, 84, dtype=_U8)) | {"action": 0},
    "64 x 64 x 3 frame, once": {"pixels": torch.zeros(64, 64, 3, dtype=_U8), "action": torch.zeros(6)},
    "1,024 tokens (int32) with log-probabilities": {"tokens": torch.zeros(1024, dtype=torch.int32),
        "log_prob": torch.zeros(1024), "reward": torch.zeros(1)},
}  # fmt: skip
