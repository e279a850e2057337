"""`reuse_batches=True`, and the items of a list that a collate function gets: tensors that are used again.

What somebody still has never changes, and what somebody did to it is never seen.
"""

import copy
import functools
import gc
import pickle
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

import engram
from contracts.each import each
from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.data.replay_buffers.reading import reuse

N, BATCH = 1000, 64
pytestmark = pytest.mark.skipif(
    reuse.why_not_reusable() is not None, reason=f"no batch is reused here: {reuse.why_not_reusable()}"
)


def buffer(kind=TensorDictReplayBuffer, rows=N, batch_size=BATCH, extra=None, **arguments):
    rb = kind(
        storage=LazyTensorStorage(rows), batch_size=batch_size,
        **{"generator": engram.Generator(3), "reuse_batches": True, **arguments},
    )  # fmt: skip
    following = TensorDict({"obs": torch.randn(rows, 2), "done": torch.zeros(rows, 1, dtype=torch.bool)}, [rows])
    data = {"obs": torch.randn(rows, 4), "n": torch.arange(rows), "next": following, **(extra or {})}
    torch.manual_seed(0)
    rb.extend(TensorDict(data, [rows]))
    return rb


def buffer_of_items(copy=True, collate_fn=lambda items: items[5]):
    """The "batch" is the sixth of 8 items, of which each has the observations of a whole batch."""
    torch.manual_seed(0)
    storage = ListStorage(20, copy=copy)
    rb = ReplayBuffer(storage=storage, batch_size=8, collate_fn=collate_fn, generator=engram.Generator(3))
    rb.extend([{"obs": torch.randn(BATCH, 4), "n": torch.tensor(n)} for n in range(20)])
    return rb


@pytest.fixture(scope="module")
def rb():
    return buffer()


@pytest.fixture(scope="module", params=[buffer, buffer_of_items])
def source(request):
    """Of observations that are read into the memory of earlier ones."""
    return request.param()


def addresses(rb, n):
    """Where the observations of n batches lie, none of which is kept."""
    return {rb.sample()["obs"].data_ptr() for _ in range(n)}


def test_a_batch_that_nobody_keeps_is_read_into_again(rb):
    assert len(addresses(rb, 50)) <= 2
    first = rb.sample()
    where, tensors = first["obs"].data_ptr(), {id(value) for value in first.values(True, True)}
    assert where not in addresses(rb, 20)
    del first
    again = [rb.sample() for _ in range(8)]
    assert where in [batch["obs"].data_ptr() for batch in again]
    assert any({id(value) for value in batch.values(True, True)} == tensors for batch in again)


def test_batches_are_those_of_a_buffer_that_reuses_none():
    for kind in (ReplayBuffer, TensorDictReplayBuffer):
        with_reuse, without = buffer(kind), buffer(kind, reuse_batches=False)
        without[:] = with_reuse[:]
        for n in [BATCH] * 20 + [1, 7, BATCH, 7, 200, 1] * 3:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                a, b = with_reuse.sample(n), without.sample(n)
            assert list(a.keys(True)) == list(b.keys(True)) and bool((a == b).all()) and a.batch_size == b.batch_size


# ---- what somebody still has ----
WEIGHT = torch.ones(BATCH, 4, requires_grad=True)


def gradient_of(loss):
    WEIGHT.grad = None
    loss.backward()
    return WEIGHT.grad


def traced(obs):
    return torch.jit.trace(lambda x: x + obs, (torch.zeros(BATCH, 4),))


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, obs):
        ctx.save_for_backward(obs)
        return (weight * obs.clone()).sum()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def same(held):
    return held


#: How to hold an observation, and how to see it again.
HELD = {
    "the tensor": (same, same),
    "a list": (lambda o: [o], lambda h: h[0]),
    "a closure": (lambda o: lambda: o, lambda h: h()),
    "a slice": (lambda o: o[:], same),
    "rows": (lambda o: [o[i] for i in range(BATCH)], torch.stack),
    "detach": (lambda o: o.detach(), same),
    "data": (lambda o: o.data, same),
    "an array": (lambda o: o.numpy(), torch.from_numpy),
    "a memoryview": (lambda o: memoryview(o.numpy()), lambda h: torch.frombuffer(h, dtype=torch.float32)),
    "an array's base": (lambda o: np.asarray(o).reshape(-1)[::-1], lambda h: torch.from_numpy(h[::-1].copy())),
    "a DLPack capsule": (lambda o: o.__dlpack__(), torch.from_dlpack),
    "an array by DLPack": (np.from_dlpack, lambda h: torch.from_numpy(h.copy())),
    "a tensor by DLPack": (torch.from_dlpack, same),
    "the storage": (
        lambda o: (o.untyped_storage(), o.storage_offset()),
        lambda h: torch.empty(0).set_(h[0], h[1], (BATCH, 4), (4, 1)),
    ),
    "the typed storage": (lambda o: o.untyped_storage(), lambda h: torch.empty(0).set_(h, 0, (BATCH, 4), (4, 1))),
    "another dtype": (lambda o: o.view(torch.int32), lambda h: h.view(torch.float32)),
    "set_": (lambda o: torch.empty(0).set_(o), same),
    "a parameter": (torch.nn.Parameter, lambda h: h.detach()),
    "a subclass": (lambda o: o.as_subclass(torch.nn.Parameter), lambda h: h.as_subclass(torch.Tensor)),
    "an alias": (torch.ops.aten.alias, same),
    "expand": (lambda o: o.expand(2, BATCH, 4), lambda h: h[1]),
    "a transpose": (lambda o: o.T, lambda h: h.T),
    "unbind": (lambda o: o.unbind(0), torch.stack),
    "as_strided": (lambda o: o.as_strided((BATCH, 4), (4, 1)), same),
    "a view without gradients": (torch.no_grad()(lambda o: o[:]), same),
    "a view in inference mode": (torch.inference_mode()(lambda o: o[:]), lambda h: h.clone()),
    "a traced function": (traced, lambda h: h(torch.zeros(BATCH, 4))),
    "saved for backward": (lambda o: (WEIGHT * o).sum(), gradient_of),
    "a view saved for backward": (lambda o: (WEIGHT.t() * o.t()).sum(), gradient_of),
    "a function's own saved tensor": (lambda o: Function.apply(WEIGHT, o), gradient_of),
    "a partial": (lambda o: functools.partial(torch.add, o), lambda h: h(0)),
    "a generator's frame": (lambda o: (x for x in [o]), next),
    "an exception's frame": (lambda o: error_with(o), lambda h: h.__traceback__.tb_next.tb_frame.f_locals["obs"]),
    "a reference cycle": (lambda o: cycle_with(o), lambda h: h["obs"]),
    "a TensorDict": (lambda o: TensorDict({"a": o}, [BATCH]), lambda h: h["a"]),
    "a lazy stack": (lambda o: lazy_stack([TensorDict({"a": o}, [BATCH])] * 2), lambda h: h[0]["a"]),
    "a real view of a complex one": (lambda o: torch.view_as_complex(o.view(BATCH, 2, 2)), torch.view_as_real),
    "a negative view": (torch._neg_view, lambda h: -h),
    "a COO tensor": (
        lambda o: torch.sparse_coo_tensor(torch.arange(BATCH)[None], o, (BATCH, 4), is_coalesced=True),
        lambda h: h.values(),
    ),
}  # fmt: skip


def error_with(obs):
    def fail(obs):
        raise ValueError

    try:
        fail(obs)
    except ValueError as error:
        return error


def cycle_with(obs):
    cycle = {"obs": obs}
    cycle["itself"] = cycle
    return cycle


@pytest.mark.parametrize("name", HELD)
def test_referenced_parts_of_a_batch_do_not_change(source, name):
    hold, look = HELD[name]
    obs = source.sample()["obs"]
    where, expected = obs.data_ptr(), obs.clone()
    held = hold(obs)
    del obs
    assert where not in addresses(source, 30)
    assert torch.equal(look(held).reshape(BATCH, 4), expected)


#: What to do with whole batches and still have their tensors.
OF_BATCHES = {
    "itself": same,
    "a part of it": lambda b: b["next"],
    "clone(recurse=False)": lambda b: b.clone(recurse=False),
    "select": lambda b: b.select("obs", "next"),
    "to_dict": lambda b: b.to_dict(),
    "flatten_keys": lambda b: b.flatten_keys("."),
    "unbind": lambda b: b.unbind(0),
    "rows": lambda b: b[3:9],
    "locked": lambda b: b.lock_(),
    "split": lambda b: b.split(10),
    "view": lambda b: b.view(2, BATCH // 2),
    "its index": lambda b: b["index"],
}


@pytest.mark.parametrize("name", OF_BATCHES)
def test_batches_and_what_is_made_of_them_do_not_change(rb, name):
    for _ in range(3):
        batch = rb.sample()
        tensors = {key: (value.data_ptr(), value.clone()) for key, value in batch.items(True, True)}
        held = OF_BATCHES[name](batch)
        before = pickle.dumps(held)
        del batch
        for _ in range(10):
            rb.sample()
        assert pickle.dumps(held) == before and tensors
        del held


@pytest.mark.parametrize("make", [buffer, buffer_of_items])
def test_a_tensor_that_a_thread_is_still_working_with_does_not_change(make):
    rb, wrong = make(), []

    def work():
        for _ in range(200):
            obs = rb.sample()["obs"]
            expected = obs.clone()
            time.sleep(0)
            if not torch.equal(obs, expected):
                wrong.append(obs)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


# ---- what somebody did ----
def retyped(obs):
    obs.__class__ = torch.nn.Parameter


def hooked(obs):
    obs.requires_grad_().register_hook(print)
    obs.requires_grad_(False)


def hooked_after_accumulation(obs):
    obs.requires_grad_().register_post_accumulate_grad_hook(print)
    obs.requires_grad_(False)


def swapped(obs):
    torch.utils.swap_tensors(obs, torch.zeros(2, 2, dtype=torch.int32))


def reference_from_a_dict(obs):
    REFERENCES[obs] = 1


REFERENCES = weakref.WeakKeyDictionary()
DONE = {
    "requires_grad_": lambda o: o.requires_grad_(),
    "requires_grad_ and back": lambda o: o.requires_grad_().requires_grad_(False),
    "a gradient": lambda o: setattr(o, "grad", torch.zeros(BATCH, 4)),
    "an attribute": lambda o: setattr(o, "of_a_user", 1),
    "many attributes": lambda o: o.__dict__.update({f"a{k}": k for k in range(40)}),
    "resize_": lambda o: o.resize_(10, 2),
    "t_": lambda o: o.t_(),
    "unsqueeze_": lambda o: o.unsqueeze_(0),
    "as_strided_": lambda o: o.as_strided_((2, 2), (1, 1)),
    "set_": lambda o: o.set_(torch.zeros(BATCH, 4)),
    "data": lambda o: setattr(o, "data", torch.zeros(BATCH, 4)),
    "data of another dtype": lambda o: setattr(o, "data", torch.zeros(BATCH, 4, dtype=torch.float64)),
    "share_memory_": lambda o: o.share_memory_(),
    "mul_ with a gradient": lambda o: o.mul_(WEIGHT),
    "mul_ and detach_": lambda o: o.mul_(WEIGHT).detach_(),
    "a hook": hooked,
    "a hook after accumulation": hooked_after_accumulation,
    "another class": retyped,
    "names": lambda o: setattr(o, "names", ("row", "column")),
    "swap_tensors": swapped,
    "resized storage": lambda o: o.untyped_storage().resize_(1 << 16),
    "emptied storage": lambda o: o.untyped_storage().resize_(0),
    "storage in a dict of weak references": reference_from_a_dict,
    "a child in place": lambda o: o.index_fill_(0, torch.tensor([0]), 5.0),
}  # fmt: skip


def pairs():
    """A buffer that reuses tensors and one with the same rows and draws that does not."""
    rb, other = buffer(), buffer(reuse_batches=False)
    other[:] = rb[:]
    return {"batches": (rb, other), "items": (buffer_of_items(), buffer_of_items(copy=False))}


@pytest.mark.filterwarnings("ignore")
@each("kind", ["batches", "items"])
@each("name", DONE)
def test_changes_to_a_dropped_tensor_are_not_visible_in_later_batches(name, kind):
    rb, other = pairs()[kind]
    for _ in range(5):
        obs = rb.sample()["obs"]
        other.sample()
        try:
            DONE[name](obs)
        except RuntimeError as error:  # torch allows it on no tensor over foreign memory
            assert "resiz" in str(error)
        del obs
        for _ in range(4):
            obs, expected = rb.sample()["obs"], other.sample()["obs"]
            assert torch.equal(obs, expected) and obs.shape == (BATCH, 4) and obs.stride() == (4, 1)
            assert type(obs) is torch.Tensor and obs.dtype is torch.float32 and obs.is_leaf and not obs.is_shared()
            assert not obs.requires_grad and obs.grad is None and obs.grad_fn is None and not vars(obs)
            assert obs._backward_hooks is None and obs._post_accumulate_grad_hooks is None
            assert getattr(obs, "names", (None, None)) == (None, None) and weakref.getweakrefcount(obs) == 0
            assert obs.untyped_storage().nbytes() >= obs.nbytes
            del obs


def test_a_weak_reference_to_a_tensor_does_not_show_a_later_batch(source):
    for _ in range(10):
        obs = source.sample()["obs"]
        where, reference = obs.data_ptr(), weakref.ref(obs)
        del obs
        assert where not in addresses(source, 20) or reference() is None


def test_writing_into_a_batch_changes_no_later_one():
    rb, other = buffer(), buffer(reuse_batches=False)
    other[:] = rb[:]
    for _ in range(20):
        batch, expected = rb.sample(), other.sample()
        assert bool((batch == expected).all())
        for value in batch.values(True, True):
            value.zero_()
        batch["obs"] = torch.ones(BATCH)
        batch.pop("n")
        del batch


# ---- limits ----
def test_at_most_eight_batches_wait():
    rb = buffer(batch_size=61)
    held = [rb.sample() for _ in range(30)]
    del held
    gc.collect()
    kept = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == (61, 2)]
    assert 1 <= len(kept) <= 8


def test_tensors_over_a_megabyte_are_new_each_time_and_others_beside_them_are_used_again():
    rb = buffer(rows=40, batch_size=2000, extra={"image": torch.zeros(40, 600, dtype=torch.uint8)})
    numbers = {id(rb.sample()["n"]) for _ in range(10)}
    assert len(numbers) == 1
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == (2000, 600)]


def test_no_more_than_64_megabytes_wait():
    rb = buffer(rows=40, batch_size=1000, extra={f"{k}": torch.zeros(40, 1000, dtype=torch.uint8) for k in range(12)})
    held = [rb.sample() for _ in range(10)]
    del held
    gc.collect()
    kept = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == (1000, 1000)]
    assert 0 < sum(o.nbytes for o in kept) <= 64 << 20


def test_inference_mode_has_tensors_of_its_own(source):
    outside = source.sample()
    assert not outside["obs"].is_inference()
    del outside
    with torch.inference_mode():
        inside = [source.sample()["obs"] for _ in range(3)]
        assert all(obs.is_inference() for obs in inside)
        del inside
    for _ in range(10):
        assert not source.sample()["obs"].is_inference()


def test_while_torch_compiles_each_batch_is_new(rb, monkeypatch):
    where = rb.sample()["obs"].data_ptr()
    assert where in addresses(rb, 10)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling()
    kept = {id(value) for _ in range(3) for value in rb.sample().values()}
    monkeypatch.undo()
    assert kept and where in addresses(rb, 20)


def test_a_buffer_warns_where_no_batch_can_be_reused(monkeypatch):
    monkeypatch.setattr("engram.data.replay_buffers.buffers.buffer.why_not_reusable", lambda: "the reason")
    monkeypatch.setattr("engram.data.replay_buffers.reading.reader.why_not_reusable", lambda: "the reason")
    with pytest.warns(UserWarning, match="reuse_batches=True does nothing here: the reason"):
        rb = buffer()
    held = [rb.sample() for _ in range(3)]
    assert len({batch["obs"].data_ptr() for batch in held}) == 3


@each("name", [*reuse._HELD, *reuse._CHANGED])
def test_whatever_must_be_seen_in_a_tensor_is_tried_before_any_is_reused(name, monkeypatch):
    table = reuse._HELD if name in reuse._HELD else reuse._CHANGED
    monkeypatch.setitem(table, name, lambda tensor: None)  # as if the native core did not see it
    assert f"{name} cannot be seen" in reuse.why_not_reusable.__wrapped__()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_default_dtype_does_not_matter_to_the_trial(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert reuse.why_not_reusable.__wrapped__() is None
    finally:
        torch.set_default_dtype(before)


def test_failed_trial_is_a_reason_and_no_error(monkeypatch):
    def fail(tensor):
        raise RuntimeError("tensors are fake here")

    monkeypatch.setitem(reuse._HELD, "a view", fail)
    assert reuse.why_not_reusable.__wrapped__() == "a view cannot be tried out: tensors are fake here"


def test_collate_function_gets_the_same_tensors_again_with_the_drawn_rows():
    seen = []
    rb = buffer_of_items(collate_fn=lambda items: seen.append([(id(i["obs"]), int(i["n"])) for i in items]))
    for _ in range(20):
        _, info = rb.sample(return_info=True)
        assert [n for _, n in seen[-1]] == info["index"].tolist()
    assert len({at for items in seen for at, _ in items}) == 8


@pytest.mark.parametrize("items", [list(torch.randn(30, 4)), [{"a": {"b": x}} for x in torch.randn(30, 4)]])
def test_lists_that_a_collate_function_keeps_do_not_change(items):
    kept, expected = [], []
    rb = ReplayBuffer(storage=ListStorage(30), batch_size=16, collate_fn=lambda items: items)
    rb.extend(items)
    for round in range(300):
        drawn, info = rb.sample(return_info=True)
        kept.append(drawn if round % 7 < 4 else drawn[3:4])
        slots = info["index"].tolist()
        expected.append([items[slot] for slot in (slots if round % 7 < 4 else slots[3:4])])
        if round % 50 == 49:
            del kept[::2], expected[::2]
    leaf = (lambda item: item) if isinstance(items[0], torch.Tensor) else (lambda item: item["a"]["b"])
    pairs = [
        (leaf(a), leaf(b))
        for some, others in zip(kept, expected, strict=True)
        for a, b in zip(some, others, strict=True)
    ]
    assert len(pairs) > 200 and all(torch.equal(a, b) for a, b in pairs)


def test_large_and_long_lists_of_items_wait_for_nobody():
    for items in ([torch.zeros(1 << 16)] * 5, [torch.zeros(1)] * 2049):
        rb = ReplayBuffer(storage=ListStorage(), batch_size=len(items), collate_fn=lambda items: items[0])
        rb.extend(items)
        reference = weakref.ref(rb.sample())
        gc.collect()
        assert reference() is None


def test_copies_and_pickles_of_the_buffer_reuse_batches_of_their_own(rb):
    batch = rb.sample()
    for copied in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        assert len(addresses(copied, 20)) <= 2
        assert bool((copied.sample()["n"] < N).all())
    assert bool((batch == batch.clone()).all())


def test_another_table_gets_batches_of_its_own():
    rb = buffer()
    rb.sample()
    rb.set_storage(LazyTensorStorage(10))
    rb.extend(TensorDict({"obs": torch.zeros(10, 4, dtype=torch.float64)}, [10]))
    for _ in range(3):
        assert rb.sample()["obs"].dtype is torch.float64 and set(rb.sample().keys()) == {"obs", "index"}
