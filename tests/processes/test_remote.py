"""A buffer of one process that others reach through torch's RPC."""

import subprocess
import sys

import pytest
import torch
import torch.distributed.rpc
from tensordict import TensorDict

import engram.data

pytestmark = pytest.mark.skipif(
    not torch.distributed.rpc.is_available(), reason="torch was built without torch.distributed.rpc"
)

ALL = """
    import warnings
    warnings.simplefilter("ignore")
    import torch, torch.distributed.rpc as rpc
    from tensordict import TensorDict
    from engram.data import LazyTensorStorage, RemoteTensorDictReplayBuffer

    def join(name, rank):
        options = rpc.TensorPipeRpcBackendOptions(init_method={meeting!r})
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)

    def made():
        return RemoteTensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=64)

    def steps(first):
        numbers = torch.arange(first, first + 100)
        return TensorDict({{"n": numbers, "next": {{"n": numbers + 1}}}}, [100])
"""
OWNER = """
    join("replay", 0)
    rpc.shutdown()  # waits for the other one
"""
USER = """
    join("user", 1)
    buffer = rpc.remote("replay", made)
    for first in (0, 100, 200):
        slots = RemoteTensorDictReplayBuffer.extend(buffer, steps(first))
    assert slots.tolist() == list(range(200, 300))
    assert RemoteTensorDictReplayBuffer.__len__(buffer) == 300
    for _ in range(5):
        batch = RemoteTensorDictReplayBuffer.sample(buffer)
        assert batch.shape == (64,) and torch.equal(batch["n"], batch["index"])
        assert torch.equal(batch["next", "n"], batch["n"] + 1)
    assert rpc.rpc_sync("replay", RemoteTensorDictReplayBuffer.sample, args=(buffer, 7)).shape == (7,)
    assert buffer.rpc_sync().sample(9).shape == (9,)
    try:
        RemoteTensorDictReplayBuffer.extend(buffer, TensorDict({{"n": torch.zeros(2)}}, [2]))
    except Exception as error:
        print(type(error).__name__, error)
    assert RemoteTensorDictReplayBuffer.__len__(buffer) == 300
    print("all is well")
    rpc.shutdown()
"""


def test_another_process_writes_and_samples_through_a_reference(script, tmp_path):
    meeting = f"file://{tmp_path}/meeting"
    owner, user = script(ALL + OWNER, meeting=meeting), script(ALL + USER, meeting=meeting)
    said, failure = user.communicate(timeout=300)
    assert "all is well" in said, failure
    assert said.startswith("ValueError") and "'next'" in said, "the error of the process that has the buffer"
    assert owner.wait(timeout=300) == 0


def test_where_it_is_it_is_a_buffer_like_any_other():
    buffer = engram.data.RemoteTensorDictReplayBuffer(storage=engram.data.LazyTensorStorage(10), batch_size=2)
    buffer.extend(TensorDict({"n": torch.arange(5)}, [5]))
    assert len(buffer) == 5 and buffer[3]["n"] == 3 and isinstance(buffer, engram.data.TensorDictReplayBuffer)


@pytest.mark.long  # a fresh interpreter
def test_it_is_loaded_when_it_is_named():
    code = "import sys, engram.data; print('engram.distributed.rpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_other_names_are_missing_as_ever():
    with pytest.raises(AttributeError, match="no attribute 'RemoteBuffer'"):
        _ = engram.data.RemoteBuffer
