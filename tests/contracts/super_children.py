"""Children of public classes whose methods only call `super()`, and programs that such a child and its parent run."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDict

import engram
from law.world import difference, frozen

#: Methods of Python's and TorchRL's that users override besides public ones.
_BY_OTHER_NAMES = {"__len__", "__getitem__", "__setitem__", "__contains__", "__repr__", "_empty"}
_OF_TRANSFORMS = {"_call", "_inv_call", "_apply_transform", "_inv_apply_transform", "_step", "_reset"}


def overridable(kind: type) -> list[str]:
    """The methods and properties of a class of the library that a child may have of its own."""
    names = []
    for name in dir(kind):
        owner = next(parent for parent in kind.__mro__ if name in vars(parent) or parent is object)
        member = vars(owner).get(name)
        is_public = not name.startswith("_") or name in _BY_OTHER_NAMES | _OF_TRANSFORMS
        if is_public and owner.__module__.startswith("engram.") and (
            isinstance(member, property) or inspect.isfunction(member)
        ):  # fmt: skip
            names.append(name)
    return names


def child_of(kind: type, names: Iterable[str]) -> Any:
    """A child of a class that has methods with these names, each of which only calls that of its parent."""
    members = {name: inspect.getattr_static(kind, name) for name in names}
    made: list[Any] = []

    def calling(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(super(made[0], self), name)(*args, **kwargs)

        return method

    def reading(name: str, inherited: property) -> property:
        return property(lambda self: getattr(super(made[0], self), name), inherited.fset)

    own: dict[str, Any] = {
        name: reading(name, member) if isinstance(member, property) else calling(name)
        for name, member in members.items()
    }
    name = f"{kind.__name__}{_CHILD}{next(_numbers)}"
    child = type(name, (kind,), {"__module__": __name__, "__qualname__": name, **own})
    made.append(child)
    globals()[name] = child  # where `pickle` looks for it
    return child


_CHILD, _numbers = "ChildThatCallsSuper", itertools.count()


def layered_child_of(kind: type, names: Iterable[str]) -> Any:
    """As `child_of`, with a class for each method, the first one next to the parent."""
    for name in names:
        kind = child_of(kind, [name])
    return kind


# ---- programs ----
#: Rows have their largest items first: the first key is sometimes that which lies at the beginning of a row.
FIRST_KEYS = [torch.int64, torch.uint8, torch.bool, torch.float16, torch.float64, torch.complex128]


class Parts(NamedTuple):
    """What a buffer is made of. Each makes a part, given the program that it is for.

    Attributes:
        envs: environments of the data; 0: none.
        first: the dtype of their first key.
        ids: whether they have ids of trajectories beside flags.
    """

    storage: Callable[[Program], Any]
    sampler: Callable[[], Any]
    writer: Callable[[], Any]
    buffer: Callable[..., Any]
    transform: Callable[[], Any] | None = None
    envs: int = 0
    first: torch.dtype = torch.int64
    ids: bool = True


def steps(start: int, n: int, envs: int, first: torch.dtype, ids: bool) -> TensorDict:
    """Steps of episodes of five, `[n]`, or `[envs, n]` with environments."""
    if envs:
        return torch.stack([steps(start + 1000 * env, n, 0, first, ids) for env in range(envs)])
    i = torch.arange(start, start + n)
    done = (i % 5 == 4).unsqueeze(-1)
    column = i.float().unsqueeze(-1)
    following = {
        "obs": column.expand(n, 3) + 1, "reward": column % 7, "done": done, "terminated": done.clone(),
        "truncated": torch.zeros_like(done),
    }  # fmt: skip
    data = {"action": (i % 3).to(first), "obs": column.expand(n, 3).clone(), "count": i % 4, "next": following}
    return TensorDict({**data, **({"collector": {"traj_ids": i // 5}} if ids else {})}, [n], names=None)


class Program:
    """A buffer and all that is done with it; `trace` has what each call gave, to the bit, errors too."""

    def __init__(self, parts: Parts, folder: Path) -> None:
        self.parts, self._folder = parts, folder
        self.trace: list[tuple[str, Any]] = []
        self._time, self._index = 0, torch.arange(1)
        self._rb = self._made()

    def run(self, calls: Iterable[str]) -> list[tuple[str, Any]]:
        for call in calls:
            name, *numbers = call.split()
            torch.default_generator.manual_seed(len(self.trace))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    said = getattr(self, name)(*map(int, numbers))
                except (RuntimeError, ValueError, KeyError, IndexError) as error:
                    said = type(error).__name__, _plain(str(error))
            warned = [] if name == "loaded" else sorted({_plain(str(one.message)) for one in caught})
            self.trace.append((call, frozen((said, warned))))
        return self.trace

    def _made(self) -> Any:
        parts = self.parts
        rb = parts.buffer(storage=parts.storage(self), sampler=parts.sampler(), writer=parts.writer(), batch_size=12)
        if parts.transform is not None:
            rb.append_transform(parts.transform())
        return rb

    def new_folder(self) -> Path:
        return self._folder / f"{next(_numbers)}"

    def data(self, n: int) -> TensorDict:
        self._time += n
        return steps(self._time - n, n, self.parts.envs, self.parts.first, self.parts.ids)

    # ---- writing ----
    def extend(self, n: int) -> Any:
        return self._rb.extend(self.data(n))

    def extend_list(self, n: int) -> Any:
        return self._rb.extend(list(self.data(n).unbind(-1)))

    def add(self) -> Any:
        return self._rb.add(self.data(1)[..., 0])

    def empty(self) -> None:
        self._rb.empty()

    # ---- reading ----
    def sample(self) -> Any:
        batch, info = self._rb.sample(return_info=True)
        self._index = info["index"]
        return batch, dict(info)

    def iterate(self) -> Any:
        return list(itertools.islice(self._rb, 3))

    def rows(self) -> Any:
        storage = self._rb.storage
        read = self._rb[:], self._rb[0], self._rb[1:3], storage[0], storage[:2], storage.get(torch.arange(2))
        return *read, 1 in storage, 10**6 in storage

    def flattened(self) -> Any:
        return self._rb.storage.flatten().get(slice(None))

    def facts(self) -> Any:
        rb, storage = self._rb, self._rb.storage
        layout = None if storage.layout is None else storage.layout.to_json()
        stats = rb.stats()._replace(writers=(), waited_insert_s=0.0, waited_sample_s=0.0)
        about = storage.initialized, storage.max_size, storage.shape, storage.env_shape, storage._is_full, layout
        return len(rb), rb.write_count, stats, about, _plain(repr(rb)), rb.keys()

    # ---- edits ----
    def update_priority(self) -> None:
        n = len(self._index[0] if isinstance(self._index, tuple) else self._index)
        self._rb.update_priority(self._index, torch.linspace(0.1, 3.0, n))

    def mark_update(self) -> None:
        self._rb.mark_update(self._index)

    def assign(self) -> None:
        parts = self.parts
        self._rb[1] = steps(5000, 1, parts.envs, parts.first, parts.ids)[..., 0]
        self._rb[2:4] = steps(6000, 2, parts.envs, parts.first, parts.ids)

    def assign_beyond(self) -> None:
        """An error: no step is stored behind the newest one."""
        parts = self.parts
        stored = len(self._rb.storage) // max(1, parts.envs)
        self._rb[stored] = steps(7000, 1, parts.envs, parts.first, parts.ids)[..., 0]

    def set_entries(self) -> None:
        self._rb.update_({"count": torch.zeros((), dtype=torch.int64)})
        self._rb.set_("obs", torch.zeros(3)).set_at_("obs", torch.ones(3), 1)

    def set_rows(self) -> None:
        storage = self._rb.storage
        rows = storage.get(torch.arange(2))
        for row in rows if isinstance(rows, list) else [rows]:
            row["count"] = row["count"] + 70
        storage.set(torch.arange(2), rows)
        storage[0] = rows[0]

    def update_if_present(self) -> Any:
        index = torch.stack(self._index, -1) if isinstance(self._index, tuple) else self._index
        generation, patch = self._rb.writer.generations_of(index), {"count": torch.arange(len(index))}
        first = self._rb.update_if_present(index=index, generation=generation, patch=patch)
        patch = {("next", "reward"): torch.rand(len(index), 1)}
        version = {"version_key": "count", "version": 3}
        return tuple(first), tuple(
            self._rb.update_if_present(index=index, generation=generation, patch=patch, **version)
        )

    # ---- saves, with whose copy the program goes on ----
    def state_dict(self) -> Any:
        state, rb = self._rb.state_dict(), self._made()
        rb.load_state_dict(state)
        self._rb = rb
        return state["storage"]

    def dumps(self) -> None:
        path, rb = self.new_folder(), self._made()
        self._rb.dumps(path)
        rb.loads(path)
        self._rb = rb

    def dumps_in_background(self) -> None:
        path, rb = self.new_folder(), self._made()
        self._rb.dumps(path, blocking=False).result()
        rb.loads(path)
        self._rb = rb

    def dumps_storage(self) -> None:
        path = self.new_folder()
        self._rb.storage.dumps(path)
        self._rb.storage.loads(path)

    def deepcopy(self) -> None:
        self._rb = copy.deepcopy(self._rb)

    def pickle(self) -> None:
        self._rb = pickle.loads(pickle.dumps(self._rb))

    def loaded(self) -> Any:
        """What `engram.load` makes, which knows the library's classes only."""
        path = self.new_folder()
        self._rb.dumps(path)
        rb = engram.load(path)
        rows = rb.storage.get(slice(None))
        return len(rb), list(rows.unbind(0)) if isinstance(rows, LazyStackedTensorDict) else rows


#: Writes before and round the end of a ring of 40 steps, longer than it, and into an emptied one.
CALLS = [
    *("facts", "sample", "extend 7", "rows", "sample", "add", "update_priority", "sample", "extend 11", "sample"),
    *("extend_list 3", "iterate", "assign", "assign_beyond", "sample", "set_entries", "rows", "update_if_present"),
    *("rows", "mark_update", "set_rows", "sample", "facts", "state_dict", "sample", "update_priority", "dumps"),
    *("sample", "dumps_in_background", "dumps_storage", "sample", "deepcopy", "sample", "pickle", "sample", "loaded"),
    *("extend 30", "rows", "sample", "extend 90", "sample", "rows", "facts", "flattened"),
    *("empty", "facts", "extend 90", "rows", "sample", "add", "sample"),
]


def assert_same(parent: Parts, *children: Parts, folder: Path, calls: Iterable[str] = tuple(CALLS)) -> None:
    """Each child gives the same as its parent at every call of a program."""
    given = Program(parent, folder).run(calls)
    for k, child in enumerate(children):
        for number, (mine, its) in enumerate(zip(given, Program(child, folder).run(calls), strict=True)):
            assert mine == its, (
                f"child {k}, call {number}, {mine[0]}: of the parent and of the child: {difference(mine[1], its[1])}"
            )


def _plain(text: str) -> str:
    """A text without the names of folders and children."""
    return re.sub(rf"{_CHILD}\d+", "", re.sub(r"(/[\w.-]+)+/\d+", "FOLDER", text))
