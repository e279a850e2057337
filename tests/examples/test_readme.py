"""The README's examples do what they say."""

from __future__ import annotations

import re
from pathlib import Path

from contracts.programs import Program, finished
from engram.data import LazyTensorStorage, TensorDictReplayBuffer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def example(heading: str) -> str:
    """The first block of code under a heading."""
    block = re.search(r"```python\n(.*?)```", README[README.index(f"## {heading}\n") :], re.DOTALL)
    assert block is not None
    return block.group(1)


def run(code: str, folder: Path) -> str:
    file = folder / "example.py"
    file.write_text(code)
    done = finished(Program(file, cwd=folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_goes_on_where_its_last_run_stopped(tmp_path: Path) -> None:
    for times in (1, 2):
        run(example("First example"), tmp_path)
        buffer = TensorDictReplayBuffer.open(tmp_path / "replay", batch_size=256)
        assert len(buffer) == buffer.write_count == 2_000 * times
        assert buffer.sample().batch_size == (256,)
        saved = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000))
        saved.loads(tmp_path / "checkpoint")
        assert len(saved) == len(buffer)
        buffer.storage.close()


def test_a_batch_of_numpy_dicts_is_a_dict_of_tensors(tmp_path: Path) -> None:
    code = example("With dicts of NumPy arrays") + "print(len(buffer), type(batch).__name__, *batch['obs'].shape)"
    assert run(code, tmp_path).split() == ["64", "dict", "256", "4"]
