"""Items that a ListStorage keeps as packed rows; the same storage with objects only is the oracle."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from contracts.each import each
from contracts.pairwise import in_turns
from contracts.waiting import is_taken
from engram import _native
from engram.data import (
    LazyStackStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.pytree import is_tensorclass
from engram.store.items import COPIES, ROW, ItemRows, PackedItems
from engram.store.lanes import Lanes

CAPACITY = 40


class Objects(ListStorage):
    """Keeps every item as an object."""

    def __init__(self, max_size: int | None) -> None:
        self.device = None
        self._hold_items(max_size, COPIES._replace(packs=False), None, {})


@tensorclass
class Step:
    x: torch.Tensor
    episode: torch.Tensor
    after: Any = None


@tensorclass
class Indexed:
    x: torch.Tensor
    index: torch.Tensor


def stored(storage: Any) -> list[Any]:
    """What the list holds, unread."""
    return list(list.__iter__(storage._storage))


def packed(storage: Any) -> int:
    return sum(item is ROW for item in stored(storage))


def steps_of(n: int, salt: int = 0) -> TensorDict:
    """Steps of episodes of 7, which go on from one to the next."""
    at = torch.arange(n)
    x = torch.stack([at + 0.5, torch.full((n,), float(salt))], 1)
    after = TensorDict({"x": x + torch.tensor([1.0, 0.0]), "done": (at % 7 == 6).unsqueeze(1)}, [n])
    return TensorDict({"x": x, "episode": at // 7, "next": after}, [n])


def form(item: Any) -> Any:
    """Everything about an item: kinds, order of keys, batch sizes, devices, dtypes, shapes and bytes."""
    if isinstance(item, TensorDict):
        inner = {key: form(item.get(key)) for key in item.keys()}
        return "TensorDict", tuple(item.batch_size), item.device, item.names, item.is_locked, list(inner.items())
    if is_tensorclass(item):
        return type(item).__name__, form(item._tensordict), item._non_tensordict
    if isinstance(item, dict):
        return "dict", [(key, form(value)) for key, value in item.items()]
    if isinstance(item, torch.Tensor):
        return (
            type(item).__name__,
            item.dtype,
            tuple(item.shape),
            item.requires_grad,
            item.detach().resolve_neg().numpy().tobytes(),
        )
    if isinstance(item, list | tuple):
        return type(item).__name__, [form(value) for value in item]
    return type(item).__name__, item.tobytes() if isinstance(item, np.ndarray) else item


def outcome(call: Any) -> Any:
    try:
        return form(call())
    except (ValueError, TypeError, RuntimeError, KeyError, IndexError) as error:
        return type(error), str(error)


class Twins:
    """Two buffers, one of which keeps objects only; every call must give the same, to the last bit."""

    def __init__(self, kind: Any = ReplayBuffer, max_size: int | None = CAPACITY, **parts: Any) -> None:
        made = [{name: part() if callable(part) else part for name, part in parts.items()} for _ in range(2)]
        self.both = [kind(storage=cls(max_size), **own) for cls, own in zip((ListStorage, Objects), made, strict=True)]
        self.rows, self.objects = self.both

    def same(self, call: Any) -> Any:
        outcomes = []
        for rb in self.both:
            torch.manual_seed(3)
            outcomes.append(outcome(lambda rb=rb: call(rb)))
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    def check(self) -> None:
        self.same(lambda rb: [rb[:], len(rb), rb.write_count, rb.storage.nbytes])
        states = [rb.storage.lanes.saved_states() for rb in self.both]
        assert states[0] == states[1]
        assert packed(self.objects.storage) == 0


def of_kind(batch: TensorDict, kind: str) -> Any:
    if kind == "class":
        after = batch["next"].clone() if batch["next"].batch_size == batch.batch_size else None
        return Step(batch["x"], batch["episode"], after, batch_size=batch.batch_size)
    if kind == "tensor":
        return batch["x"].clone()
    return batch if kind == "td" else batch.to_dict()


FORMS = [
    "td", "dict", "class", "tensor", "a list of td", "a list of dict", "a list of class", "a list of tensor", "mixed"
]  # fmt: skip


def data_of(rng: random.Random, batch: TensorDict, kind: str) -> Any:
    if kind == "mixed":
        items: list[Any] = list(batch.unbind(0))
        return [rng.choice([item, item.to_dict(), item.exclude("next"), "text", item["next"]]) for item in items]
    if kind.startswith("a list"):
        return [of_kind(item, kind[10:]) for item in batch.unbind(0)]
    return of_kind(batch, kind)


@pytest.mark.parametrize(
    ("kind", "buffer", "max_size"),
    in_turns(FORMS, [(ReplayBuffer, CAPACITY), (TensorDictReplayBuffer, CAPACITY), (ReplayBuffer, None)]),
)
def test_random_programs_give_the_same_with_rows_as_with_objects(kind: str, buffer: Any, max_size: Any) -> None:
    rng = random.Random(f"{kind} {buffer.__name__} {max_size}")
    twins = Twins(buffer, max_size, collate_fn=None if kind != "mixed" else lambda: list)
    batches = [steps_of(120, salt) for salt in range(2)]
    at = 0
    for step in range(16):
        n = rng.choice([1, 2, 7, 25])
        if at + n > 120 or rng.random() < 0.2:
            at, batches = 0, batches[::-1]
        batch, at = batches[0][at : at + n], at + n
        data, turn = data_of(rng, batch, kind), rng.randrange(8)
        if turn == 0:
            single = data[0] if isinstance(data, list) else of_kind(batch[0], kind)
            twins.same(lambda rb, single=single: rb.add(single))
        elif turn == 1 and len(twins.rows):
            at_slots = [rng.randrange(len(twins.rows)) for _ in range(3)]
            others = [of_kind(batch[0], kind.split()[-1] if kind != "mixed" else "td")] * 3
            twins.same(lambda rb, at_slots=at_slots, others=others: rb.__setitem__(at_slots, others))
        elif turn == 2 and rng.random() < 0.3:
            twins.same(lambda rb: rb.empty())
        else:
            twins.same(lambda rb, data=data: rb.extend(data))
        if len(twins.rows):
            twins.same(lambda rb: rb.sample(4))
            twins.same(lambda rb: [rb[0], rb[-1], rb[torch.tensor([0, len(rb) - 1])]])
        if step % 4 == 3:
            twins.check()
    if kind != "mixed":
        assert packed(twins.rows.storage) == len(twins.rows)


@each("kind", [kind for kind in FORMS[:-1] if "class" not in kind])  # which no file holds
def test_saves_copies_and_states_are_those_of_objects(kind: str, tmp_path: Any) -> None:
    rng, batch = random.Random(0), steps_of(60)
    twins = Twins(TensorDictReplayBuffer, batch_size=6)
    twins.same(lambda rb: rb.extend(data_of(rng, batch, kind)))
    for name, rb in zip(("rows", "objects"), twins.both, strict=True):
        rb.dumps(tmp_path / name)
    twins.same(lambda rb: rb.state_dict()["_storage"] if "_storage" in rb.state_dict() else rb.storage.state_dict())
    for other, rb in zip(("objects", "rows"), twins.both, strict=True):
        rb.empty()
        rb.loads(tmp_path / other)
    twins.check()
    assert packed(twins.rows.storage) == CAPACITY
    for made in (copy.deepcopy(twins.rows), pickle.loads(pickle.dumps(twins.rows))):
        assert form(made[:]) == form(twins.objects[:]) and packed(made.storage) == CAPACITY
        made.extend(data_of(rng, batch[:3], kind))
        assert form(twins.rows[:]) == form(twins.objects[:])
    twins.rows.load_state_dict(twins.objects.state_dict())
    twins.same(lambda rb: rb.extend(data_of(rng, batch[:7], kind)))
    twins.check()


def test_other_samplers_and_writers_see_the_same_steps() -> None:
    batch = steps_of(60)
    for parts in (
        {"sampler": lambda: SliceSampler(num_slices=2, strict_length=False, traj_key="episode")},
        {"sampler": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5)},
        {"writer": lambda: TensorDictMaxValueWriter(rank_key="x")},
    ):
        twins = Twins(TensorDictReplayBuffer, batch_size=6, track_generations=True, **parts)
        for first in (0, 25, 35):
            twins.same(lambda rb, first=first: rb.extend(batch[first : first + 25]))
            twins.same(lambda rb: rb.sample())
            twins.same(lambda rb: rb.sample(return_info=True)[1]["index"])
            twins.check()
        assert packed(twins.rows.storage) == CAPACITY


def variants() -> dict[str, Any]:
    """Items in pairs: the first has the form, the second differs from it in one thing."""
    plain = TensorDict({"a": torch.zeros(2), "b": TensorDict({"c": torch.zeros(2, 3)}, [])}, [])
    named = TensorDict({"a": torch.zeros(2)}, [2], names=["t"])
    gradient = {"a": torch.zeros(2, requires_grad=True)}
    return {
        "device": (plain, plain.to("cpu")),
        "inner device": (plain, TensorDict({"a": torch.zeros(2), "b": plain["b"].to("cpu")}, [])),
        "batch size": (plain, TensorDict({"a": torch.zeros(2), "b": plain["b"]}, [2])),
        "inner batch size": (plain, TensorDict({"a": torch.zeros(2), "b": TensorDict(plain["b"], [2])}, [])),
        "names": (TensorDict({"a": torch.zeros(2)}, [2]), named),
        "names first": (named, TensorDict({"a": torch.zeros(2)}, [2])),
        "locked": (plain, plain.clone().lock_()),
        "order": ({"a": torch.zeros(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.zeros(1)}),
        "kind": (plain, plain.to_dict()),
        "dtype": ({"a": torch.zeros(2)}, {"a": torch.zeros(2).double()}),
        "shape": ({"a": torch.zeros(2)}, {"a": torch.zeros(2, 1)}),
        "more": ({"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)}),
        "fewer": ({"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.zeros(2)}),
        "array": ({"a": torch.zeros(2)}, {"a": np.zeros(2, np.float32)}),
        "number": ({"a": torch.zeros(())}, {"a": 0.0}),
        "array first": ({"a": np.zeros(2, np.float32)}, {"a": torch.zeros(2)}),
        "gradient": ({"a": torch.zeros(2)}, gradient),
        "gradient first": (gradient, {"a": torch.zeros(2)}),
        "parameter": ({"a": torch.zeros(2)}, {"a": torch.nn.Parameter(torch.zeros(2))}),
        "negative": ({"a": torch.zeros(2)}, {"a": torch.ones(2, dtype=torch.complex64).mul(1j).conj().imag}),
        "empty": ({"a": torch.zeros(2), "b": {}}, {"a": torch.zeros(2)}),
        "no bytes": ({"a": torch.zeros(2), "b": torch.zeros(0)}, {"a": torch.zeros(2), "b": torch.zeros(0, 1)}),
        "integer keys": ({0: torch.zeros(2)}, {1: torch.zeros(2)}),
        "index in front": ({"index": torch.zeros(()), "a": torch.zeros(2)}, {"a": torch.zeros(2)}),
        "index inside": ({"a": torch.zeros(2), "b": {"index": torch.zeros(1)}}, {"a": torch.zeros(2), "b": {}}),
        "class": (plain, Indexed(torch.zeros(2), torch.zeros(()), batch_size=[])),
        "class first": (Indexed(torch.zeros(2), torch.zeros(()), batch_size=[]), plain),
        "another class": (
            Indexed(torch.zeros(2), torch.zeros(()), batch_size=[]),
            Step(torch.zeros(2), torch.zeros(()), batch_size=[]),
        ),
        "no tensor in a class": (
            Step(torch.zeros(2), torch.zeros(()), torch.zeros(1), batch_size=[]),
            Step(torch.zeros(2), torch.zeros(()), "text", batch_size=[]),
        ),
        "strided": ({"a": torch.zeros(2, 3)}, {"a": torch.randn(3, 2).t()}),
        "sparse": ({"a": torch.zeros(2)}, {"a": torch.zeros(2).to_sparse()}),
    }


@pytest.mark.parametrize(("name", "buffer"), in_turns(variants(), [(ReplayBuffer,), (TensorDictReplayBuffer,)]))
def test_an_item_that_differs_in_one_thing_comes_back_as_it_was(name: str, buffer: Any) -> None:
    first, second = variants()[name]
    twins = Twins(buffer, collate_fn=lambda: list, batch_size=8)
    for items in ([first, first], [second], [first, second], [second, first]):
        twins.same(lambda rb, items=items: rb.extend(items))
        twins.same(lambda rb, items=items: rb.add(items[0]))
        twins.check()
        twins.same(lambda rb: rb.sample())
    twins.same(lambda rb: rb.storage.state_dict()["items"])


def test_changing_what_came_in_or_was_handed_out_changes_nothing_that_is_stored() -> None:
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=4, collate_fn=lambda items: items)
    given = [{"a": torch.full((2,), float(i))} for i in range(4)]
    rb.extend(given)
    handed_out = [rb[0], rb[-1], *rb[:], *rb.sample(), *rb.storage._storage, *rb.storage._held_table.rows.items()]
    for item in [*given, *handed_out]:
        item["a"].zero_()
        item["b"] = 1
    stacked = ReplayBuffer(storage=rb.storage, batch_size=4)
    stacked.sample()["a"].zero_()
    assert [item["a"].tolist() for item in rb[:]] == [[float(i)] * 2 for i in range(4)]
    assert all(list(item) == ["a"] for item in rb[:]) and packed(rb.storage) == 4


def test_without_copies_the_very_objects_that_came_in_are_kept_and_handed_out() -> None:
    rb = ReplayBuffer(storage=ListStorage(10, copy=False), batch_size=4, collate_fn=lambda items: items)
    given = [{"a": torch.zeros(2)}, TensorDict({"a": torch.zeros(2)}, []), torch.zeros(2), [1]]
    rb.extend(given)
    rb.add(given[0])
    assert all(rb[i] is item for i, item in enumerate([*given, given[0]]))
    assert all(any(item is one for one in given) for item in rb.sample())
    given[0]["a"].fill_(7)
    assert rb[4]["a"].tolist() == [7.0, 7.0]
    rb[1] = given[2]
    assert rb[1] is given[2]
    twin = copy.deepcopy(rb)
    assert twin[0] is not given[0] and twin.storage._held_table.arguments()["copy"] is False
    batch = TensorDict({"a": torch.arange(3.0)}, [3])
    rb.extend(batch)
    batch["a"].zero_()
    assert [item["a"].tolist() for item in rb[5:8]] == [0.0, 0.0, 0.0]
    keyed = TensorDictReplayBuffer(storage=ListStorage(10, copy=False), batch_size=2)
    keyed.extend([TensorDict({"a": torch.zeros(2)}, [])] * 2)
    assert keyed.sample()["index"].shape == (2,) and keyed[1]["index"] == 1


def test_rows_are_new_memory_each_and_a_kept_item_holds_no_batch() -> None:
    rb = ReplayBuffer(storage=ListStorage(300))
    rb.extend([{"a": torch.full((1000,), float(i))} for i in range(300)])
    items = rb[:]
    kept = items[7]["a"]
    del items, rb
    gc.collect()
    again = ReplayBuffer(storage=ListStorage(300))
    again.extend([{"a": torch.zeros(1000)} for _ in range(300)])
    again[:]
    assert kept.unique().tolist() == [7.0]


def test_the_form_is_that_of_the_first_item_until_the_storage_is_empty_again() -> None:
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.add({"a": torch.zeros(1)})
    rb.add({"b": torch.zeros(1)})
    assert [item is ROW for item in stored(rb.storage)] == [True, False]
    rb.empty()
    rb.add({"b": torch.zeros(1)})
    rb.add({"a": torch.zeros(1)})
    assert [item is ROW for item in stored(rb.storage)] == [True, False] and rb[0] == {"b": torch.zeros(1)}


def test_the_list_itself_is_compared_searched_and_copied_by_its_items() -> None:
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend([{"a": torch.tensor(1)}, {"a": torch.tensor(2)}])
    items = rb.storage._storage
    assert items == [{"a": 1}, {"a": 2}] and {"a": 2} in items and {"a": 3} not in items
    for twin in (copy.deepcopy(items), pickle.loads(pickle.dumps(items)), copy.copy(items)):
        assert type(twin) is list and twin == [{"a": 1}, {"a": 2}]


def test_batches_of_a_lazy_stack_are_made_of_rows_too() -> None:
    rb = TensorDictReplayBuffer(storage=LazyStackStorage(10), batch_size=4)
    rb.extend(TensorDict({"n": torch.arange(6)}, [6]))
    batch = rb.sample()
    assert packed(rb.storage) == 6 and torch.equal(batch["n"], batch["index"])


class OwnRead(ListStorage):
    def read(self, *args: Any, **kwargs: Any) -> Any:
        self.reads = getattr(self, "reads", 0) + 1
        return super().read(*args, **kwargs)


def test_a_child_with_a_read_of_its_own_is_asked() -> None:
    rb = TensorDictReplayBuffer(storage=OwnRead(10), batch_size=4)
    rb.extend(TensorDict({"n": torch.arange(6)}, [6]))
    batch = rb.sample()
    assert rb.storage.reads == 1 and torch.equal(batch["n"], batch["index"])


def test_bad_arguments_of_the_native_rows_are_errors() -> None:
    rows, other = (PackedItems({"a": torch.zeros(n)}, Lanes.in_memory(10)) for n in (2, 50))
    plan, wide = rows.plan([{"a": torch.ones(2)}] * 3, single=False), other.plan({"a": torch.ones(50)}, single=True)
    assert plan is not None and wide is not None
    store, codec, counts = rows._store, rows._codec, rows._lanes.store
    reader = _native.ItemReader(store, codec, ROW)
    given, index = [{"a": torch.ones(2)}], Indexed(torch.zeros(2), torch.zeros((), dtype=torch.int64), batch_size=[])
    own = PackedItems(index._tensordict, Lanes.in_memory(10))
    rows.rows.append_plan(plan)
    for error, call in (
        (IndexError, lambda: reader.item(5000)),
        (IndexError, lambda: reader.item(1 << 60)),
        (IndexError, lambda: reader.pick([ROW], [1])),
        (IndexError, lambda: reader.pick([ROW] * 6000, [5999])),
        (IndexError, lambda: store.gather(codec, torch.tensor([10]))),
        (IndexError, lambda: store.gather(codec, torch.tensor([-1]))),
        (TypeError, lambda: store.gather(codec, torch.tensor([0.5]))),
        (ValueError, lambda: store.append(0, wide)),
        (IndexError, lambda: store.overwrite(torch.tensor([10, 0, 1]), plan)),
        (IndexError, lambda: store.overwrite(torch.tensor([3, 4, 5]), plan)),
        (ValueError, lambda: store.overwrite(torch.tensor([0]), wide)),
        (ValueError, lambda: store.put(0, 0, np.zeros((1, 11, 8), np.uint8))),
        (ValueError, lambda: store.put(0, 0, np.zeros((1, 3, 9), np.uint8))),
        (ValueError, lambda: store.begin_save()),
        (ValueError, lambda: store.widened(16, 8, b"", [])),
        (ValueError, lambda: store.with_growing_rows(8)),
        (ValueError, lambda: counts.with_growing_rows(0)),
        (ValueError, lambda: counts.with_growing_rows(1 << 47)),
        (ValueError, lambda: Lanes.in_memory(10, envs=2).store.with_growing_rows(8)),
        (TypeError, lambda: codec.check(given, 1, 0, "index")),
        (ValueError, lambda: own.plan(index._tensordict, True, "index", torch.arange(2))),
        (TypeError, lambda: own.plan(index._tensordict, True, "index", torch.zeros(1))),
        (ValueError, lambda: _native.push(counts, codec, 0, given, 1, 0)),
        (ValueError, lambda: _native.push(store, codec, 0, given, 1, 0, 0)),
        (IndexError, lambda: _native.push(store, codec, 1, given, 1, 0)),
        (ValueError, lambda: _native.ItemReader(counts, codec, ROW)),
        (ValueError, lambda: _native.ItemReader(store, other._codec, ROW)),
        (ValueError, lambda: PackedItems([torch.zeros(2)], Lanes.in_memory(10))),
        (ValueError, lambda: _native.push(store, _with_sequence(), 0, given, 1, 0)),
    ):
        with pytest.raises(error):
            call()
    assert store.gather(codec, torch.tensor([9]))[2] == [0] and rows.gather(torch.tensor([1, 9]), None) is None
    for items in ([], None, [1], [{"a": torch.zeros(3)}], {"a": torch.zeros(0, 2)}):
        assert _native.push(store, codec, 0, items, 1, 0) is None
    assert reader.item(2)["a"].tolist() == [1.0, 1.0] and len(rows._lanes) == 3


def _with_sequence() -> Any:
    return (
        PackedItems({"a": torch.zeros(0)}, Lanes.in_memory(10)).layout.with_sequence().item_codec(torch.device("cpu"))
    )


def test_rows_without_a_limit_take_memory_as_they_are_written() -> None:
    rb = ReplayBuffer(storage=ListStorage(), batch_size=4)
    for first in range(0, 40_000, 500):
        rb.extend([{"a": torch.full((3,), i), "b": torch.tensor(-i)} for i in range(first, first + 500)])
    assert packed(rb.storage) == len(rb) == 40_000
    store = rb.storage._held_table.rows.by_slot.packed._store
    assert rb.storage.nbytes == 40_000 * 32 and 40_000 <= store.room < 100_000
    assert all(rb[i]["a"].tolist() == [i] * 3 and rb[i]["b"] == -i for i in (0, 1, 499, 500, 20_000, 39_999))
    with pytest.raises(IndexError):
        rb[40_000]


def test_objects_between_rows_are_no_rows_wherever_they_are() -> None:
    rb = ReplayBuffer(storage=ListStorage(5000), collate_fn=lambda items: items)
    rb.add({"a": torch.zeros(1)})
    rb.extend([str(i) for i in range(4000)])
    rb.add({"a": torch.ones(1)})
    assert packed(rb.storage) == 2 and rb[4001] == {"a": torch.ones(1)} and rb[3000] == "2999"
    rb[2000] = {"a": torch.full((1,), 2.0)}
    assert rb[2000] == {"a": torch.full((1,), 2.0)} and packed(rb.storage) == 3


def test_rows_of_megabytes_are_stored_one_after_another():
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=2)
    for i in range(5):
        rb.add({"x": torch.full((3 << 20,), i, dtype=torch.uint8)})
    assert [int(rb[i]["x"][-1]) for i in range(5)] == [0, 1, 2, 3, 4]
    assert [len(rb[i]["x"]) for i in range(5)] == [3 << 20] * 5


def test_a_column_is_not_read_while_somebody_writes():
    storage = ListStorage(10)
    ReplayBuffer(storage=storage, batch_size=2).extend([{"x": torch.tensor(i)} for i in range(4)])
    read = threading.Event()

    def column():
        assert storage.column(("x",), torch.arange(4)).tolist() == [0, 1, 2, 3]
        read.set()

    thread = threading.Thread(target=column)
    with storage.mutex:
        thread.start()
        assert not read.wait(0.1)
    thread.join()
    assert read.is_set()


def test_no_thread_writes_before_the_items_of_a_batch_are_copies(monkeypatch):
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=2, collate_fn=list)
    rb.extend([{"x": [i]} for i in range(4)])
    copied, taken = ItemRows.own, []

    def own(rows, *read):
        taken.append(is_taken(rb.storage.mutex))
        return copied(rows, *read)

    monkeypatch.setattr(ItemRows, "own", own)
    rb.sample()
    assert taken == [True]


def test_a_batch_that_was_checked_is_stored_as_it_was_then():
    storage = ListStorage(10)
    batch = TensorDict({"x": torch.zeros(3)}, [3])
    checked = storage.check(batch, single=False)
    batch["x"].fill_(7)
    storage.append(checked)
    assert [float(storage.get(i)["x"]) for i in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("first", [{"x": torch.arange(3) + 5}, {"y": torch.ones(5)}, "object"])
def test_items_that_were_checked_before_the_first_of_others_are_refused(first):
    storage = ListStorage(10)
    checked = storage.check([{"x": torch.arange(3)}], single=False)
    storage.append(storage.check([first], single=False))
    with pytest.raises(ValueError, match="check them again"):
        storage.append(checked)
    assert len(storage) == 1
    storage.append(storage.check([{"x": torch.arange(3)}], single=False))
    assert storage.get(1)["x"].tolist() == [0, 1, 2]
