"""The README's first example does what it says, as often as it is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from engram.data import LazyTensorStorage, TensorDictReplayBuffer

README = Path(__file__).parents[2] / "README.md"


def first_example() -> str:
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


def test_it_goes_on_where_its_last_run_stopped(tmp_path: Path) -> None:
    for run in (1, 2):
        done = subprocess.run([sys.executable, "-c", first_example()], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        buffer = TensorDictReplayBuffer.open(tmp_path / "replay", batch_size=256)
        assert len(buffer) == buffer.write_count == 2_000 * run
        assert buffer.sample().batch_size == (256,)
        saved = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000))
        saved.loads(tmp_path / "checkpoint")
        assert len(saved) == len(buffer)
        buffer.storage.close()
