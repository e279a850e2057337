"""`sample(as_numpy=True)`: the same batches as dicts of NumPy arrays, which are the caller's."""

import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from engram.envs import DTypeCastTransform
from engram.errors import OutOfMemoryError
from engram.testing import steps

DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.bool, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def buffer(cls=TensorDictReplayBuffer, storage=LazyTensorStorage, n=40, **kwargs):
    rb = cls(storage=storage(50), **{"batch_size": 8} | kwargs)
    rb.extend(steps(0, n))
    return rb


def check(arrays, batch):
    """The arrays are those of the batch: keys, values, dtypes, and memory that may be written."""
    assert type(arrays) is dict and set(arrays) == set(batch.keys())
    for key, array in arrays.items():
        value = batch[key]
        if isinstance(array, dict):
            check(array, value)
            continue
        assert type(array) is np.ndarray and array.flags.writeable and array.flags.c_contiguous, key
        assert array.dtype == value.numpy().dtype and np.array_equal(array, value.numpy()), key


def both_ways(rb):
    torch.manual_seed(5)
    arrays = rb.sample(as_numpy=True)
    torch.manual_seed(5)
    return arrays, rb.sample()


class TestAsNumpy:
    @each("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
    @each("cls", [ReplayBuffer, TensorDictReplayBuffer])
    @each(
        "options",
        [
            {},
            {"sampler": PrioritizedSampler},
            {"sampler": SliceSampler},
            {"transform": lambda batch: batch.set("obs", batch["obs"] * 2)},
            {"track_generations": True},
            {"reuse_batches": True},
            {"collate_fn": lambda batch: batch if isinstance(batch, TensorDict) else torch.stack(batch)},
        ],
    )
    def test_the_arrays_are_those_of_the_tensors(self, storage, cls, options):
        makers = {
            PrioritizedSampler: lambda: PrioritizedSampler(50, 0.7, 0.5),
            SliceSampler: lambda: SliceSampler(num_slices=2, end_key="done"),
        }
        if "sampler" in options:
            options = {"sampler": makers[options["sampler"]]()}
        check(*both_ways(buffer(cls, storage, **options)))

    def test_of_an_epoch_each_row_comes_once(self):
        rb = buffer(sampler=SamplerWithoutReplacement(), n=44)
        batches = [rb.sample(as_numpy=True) for _ in range(6)]
        assert sorted(n for batch in batches for n in batch["n"].ravel().tolist()) == list(range(44))
        assert [len(batch["n"]) for batch in batches] == [8] * 5 + [4]

    def test_dicts_and_tuples_keep_their_form(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
        rb.extend({"a": torch.arange(10), "b": {"c": torch.arange(10.0)}, "d": (torch.arange(10), torch.ones(10))})
        batch = rb.sample(as_numpy=True)
        assert np.array_equal(batch["a"], batch["b"]["c"]) and type(batch["d"]) is tuple
        assert np.array_equal(batch["a"], batch["d"][0]) and batch["d"][1].dtype == np.float32

    def test_one_tensor_is_one_array(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
        rb.extend(torch.arange(20).reshape(10, 2))
        batch = rb.sample(as_numpy=True)
        assert type(batch) is np.ndarray and batch.shape == (4, 2) and (batch[:, 1] - batch[:, 0] == 1).all()

    @each("dtype", DTYPES)
    def test_every_dtype_that_numpy_has(self, dtype):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=6)
        rb.extend({"x": torch.arange(30).reshape(10, 3).to(dtype), "one": torch.arange(10).to(dtype)})
        arrays, tensors = both_ways(rb)
        check(arrays, tensors)
        assert arrays["x"].dtype == torch.empty(0, dtype=dtype).numpy().dtype

    def test_without_tensors_on_the_way(self, monkeypatch):
        rb = buffer()
        monkeypatch.setattr(type(rb._parts.reader), "sample", lambda *args, **kwargs: pytest.fail("made of tensors"))
        assert rb.sample(as_numpy=True)["obs"].shape == (8, 3)

    def test_the_arrays_are_the_callers(self):
        rb = buffer(n=20)
        stored = rb[:].clone()
        first, second = rb.sample(as_numpy=True), rb.sample(as_numpy=True)
        kept = second["obs"].copy()
        for array in (first["obs"], first["n"], first["next"]["reward"]):
            array[:] = 77
        assert (rb[:] == stored).all() and np.array_equal(second["obs"], kept)

    def test_large_arrays_outlive_the_batch_and_the_buffer(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=16)
        rows = torch.arange(20 * 20_000, dtype=torch.int32).reshape(20, 20_000)
        rb.extend({"x": rows, "n": torch.arange(20), "none": torch.zeros(20, 0)})
        kept = []
        for _ in range(6):
            batch = rb.sample(as_numpy=True)
            kept.append((batch["n"].copy(), batch["x"]))
            assert batch["none"].shape == (16, 0)
        del rb, batch
        for n, x in kept:
            assert x.flags.writeable and np.array_equal(x, rows.numpy()[n])

    def test_info_stays_as_it_is(self):
        batch, info = buffer().sample(return_info=True, as_numpy=True)
        assert isinstance(info["index"], torch.Tensor) and np.array_equal(batch["index"], info["index"].numpy())

    def test_with_prefetch(self):
        rb = buffer(prefetch=2, generator=torch.Generator().manual_seed(1))
        assert all(np.array_equal(b["n"].ravel(), b["index"]) for b in (rb.sample(as_numpy=True) for _ in range(5)))

    def test_of_an_ensemble_the_members_come_first(self):
        rb = ReplayBufferEnsemble(buffer(), buffer(), batch_size=8)
        check(*both_ways(rb))
        assert rb.sample(as_numpy=True)["index"]["buffer_ids"].shape == (2, 4)

    def test_priorities_go_back_by_the_index(self):
        rb = buffer(sampler=PrioritizedSampler(50, 1.0, 0.5))
        batch = rb.sample(as_numpy=True)
        rb.update_priority(batch["index"], np.ones(8))
        assert batch["priority_weight"].dtype == np.float32

    def test_batches_of_several_threads(self):
        rb, wrong = buffer(sampler=RandomSampler()), []

        def run():
            for _ in range(100):
                batch = rb.sample(as_numpy=True)
                if not np.array_equal(batch["n"].ravel(), batch["index"]):
                    wrong.append(batch)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


class TestWithoutANumpyDtype:
    def test_bfloat16_is_refused_before_anything_is_drawn(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
        rb.extend(TensorDict({"next": {"x": torch.zeros(10, dtype=torch.bfloat16)}}, [10]))
        rb.sample()
        left = rb.sampler.draw_plan(rb.storage).cursor()
        with pytest.raises(TypeError, match=r"\('next', 'x'\) is torch.bfloat16.*as_numpy=False"):
            rb.sample(as_numpy=True)
        assert rb.sampler.draw_plan(rb.storage).cursor() == left and rb.sample()["next", "x"].dtype is torch.bfloat16

    def test_dtype_without_a_numpy_equivalent_is_refused_in_lists(self):
        rb = ReplayBuffer(storage=ListStorage(10), batch_size=4)
        rb.extend(torch.zeros(10, 2, dtype=torch.bfloat16))
        with pytest.raises(TypeError, match="the tensor is"):
            rb.sample(as_numpy=True)

    def test_a_transform_may_cast_it(self):
        cast = DTypeCastTransform(torch.bfloat16, torch.float32)
        rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=cast, batch_size=4)
        rb.extend({"x": torch.zeros(10, dtype=torch.float32)})
        assert rb.storage[:]["x"].dtype is torch.bfloat16 and rb.sample(as_numpy=True)["x"].dtype == np.float32


def test_without_memory_nothing_is_drawn():
    rb = buffer(batch_size=None)
    with pytest.raises(OutOfMemoryError):
        rb.sample(1 << 60, as_numpy=True)
    assert len(rb.sample(8, as_numpy=True)["n"]) == 8
