"""Any environments in several processes: the leaves of their TensorDicts go through shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.crews import Crew, Seat
from engram.envs.batched import BatchEngine
from engram.shared_memory import SharedMemory
from engram.step_clocks import Timed

_STEP, _STEP_WITH_MORE, _RESET, _SEED = range(4)
Key = str | tuple[str, ...]
Columns = dict[Key, Tensor]


class More(NamedTuple):
    """What of one environment's TensorDict its columns do not say: which are not there, and entries without one."""

    absent: tuple[Key, ...] = ()
    rest: TensorDictBase | None = None


class TensorDictLayout:
    """What `n` environments share: a column `[n, ...]` for each leaf of a step, by `fake`, one environment's fake one.

    `root` is what a step reads and a reset gives, `following` what a step gives.
    """

    def __init__(self, n: int, fake: TensorDictBase, batch_size: Sequence[int]) -> None:
        self.n, self.batch_size = n, torch.Size(batch_size)
        self.following = fake.get("next").detach().cpu()
        self.root = fake.exclude("next").detach().cpu()
        self._leaves = [_leaves(self.root), _leaves(self.following)]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each column, for `SharedMemory`; the mask of resets comes first."""
        leaves = [leaf for group in self._leaves for leaf in group.values()]
        mask = self.n * self.batch_size.numel()
        return [mask, *(self.n * math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)]

    def columns(self, memory_blocks: Sequence[Any]) -> tuple[Tensor, Columns, Columns]:
        """The mask `[n, *batch, 1]`, and the columns of `root` and `following`, in blocks of these sizes."""
        blocks = iter([torch.from_numpy(block) for block in memory_blocks])
        mask = next(blocks).view(torch.bool).reshape(self.n, *self.batch_size, 1)
        root, following = (
            {key: next(blocks).view(leaf.dtype).reshape(self.n, *leaf.shape) for key, leaf in group.items()}
            for group in self._leaves
        )
        return mask, root, following

    def serve(self, envs: Sequence[Any], memory: SharedMemory, start: int, seat: Seat) -> None:
        """A worker's part, for ever: `envs` are environments `start` and following of all."""
        if seat.clock is not None:
            envs = [Timed(env, seat.clock, start + i) for i, env in enumerate(envs)]
        TensorDictMembers(envs, self, memory, start).serve(seat)


class TensorDictMembers:
    """A worker's part."""

    def __init__(self, envs: Sequence[Any], layout: TensorDictLayout, memory: SharedMemory, start: int) -> None:
        self._envs, self._layout = list(envs), layout
        columns = layout.columns(memory.attach(layout.sizes))
        rows = slice(start, start + len(envs))
        self._mask = columns[0][rows]
        self._root, self._following = ({key: column[rows] for key, column in group.items()} for group in columns[1:])

    def serve(self, seat: Seat) -> None:
        """Does what the owner's `TensorDictStepper` asks for, for ever."""
        while True:
            command = seat.next_command()
            if command == _SEED:
                seat.done(self._seeded(seat.message()))
                continue
            if command == _RESET:
                more = [self._reset(i) for i in range(len(self._envs))]
            else:
                sent = seat.message() if command == _STEP_WITH_MORE else [More()] * len(self._envs)
                more = [self._step(i, came) for i, came in enumerate(sent)]
            seat.done(*([more] if any(each != More() for each in more) else []))

    def _seeded(self, seed: int) -> int:
        for env in self._envs:
            seed = env.set_seed(seed)
        return seed

    def _reset(self, i: int) -> More:
        env, mask = self._envs[i], self._mask[i].clone()
        if not bool(mask.any()):
            return More()
        td = None
        if not bool(mask.all()):
            td = self._layout.root.exclude("action").apply(torch.zeros_like).set("_reset", mask).to(_device_of(env))
        return _put(env.reset(td).exclude("_reset", "action"), self._root, i)

    def _step(self, i: int, came: More) -> More:
        env = self._envs[i]
        td = _row(self._layout.root, self._root, i, came).to(_device_of(env))
        return _put(env.step(td if env.device is not None else td.clear_device_()).get("next"), self._following, i)


class TensorDictStepper:
    """The owner's part: steps all environments at once.

    Entries of a step that are not in the environments' specs, or come in another shape or dtype, travel beside the
    shared memory, which costs about 100 us. All environments must give the same ones: a ValueError names those that
    only some have.
    """

    engine: BatchEngine | None = None  # there is nothing raw to be stepped

    def __init__(self, crew: Crew, layout: TensorDictLayout, memory: SharedMemory, starts: Sequence[int]) -> None:
        self._crew, self._layout, self._bounds = crew, layout, [*starts, layout.n]
        self._mask, self._root, self._following = layout.columns(memory.allocate(layout.sizes))
        self._actions = {key: column for key, column in self._root.items() if "action" in (key, key[0])}
        self._shown = {key: column for key, column in self._root.items() if key not in self._actions}

    def seed(self, seed: int) -> None:
        """The next resets start from `seed`, as `set_seed` of one environment after the other leaves them."""
        for worker in range(len(self._crew)):
            seed = self._crew.round(_SEED, [worker], [seed] * len(self._crew))[worker]

    def reset(self, mask: Tensor | None) -> dict[str, Any]:
        """Entries after a reset of all, or where `mask` (bool `[n, *batch, 1]`) holds; the rest is not read."""
        self._crew.ready()
        self._mask.copy_(torch.ones_like(self._mask) if mask is None else mask)
        asked = [row for row in range(self._layout.n) if bool(self._mask[row].any())]
        return self._gathered(self._layout.root.exclude("action"), self._shown, self._crew.round(_RESET), asked)

    def step(self, td: TensorDictBase) -> dict[str, Any]:
        """What follows `td["action"]`. Raises ValueError for an action of another shape than the spec's."""
        self._refuse_other_shapes(td)
        self._crew.ready()
        sent = td.exclude("next")
        absent = tuple(key for key, column in self._root.items() if not _copied(sent.get(key, None), column))
        rest = _without(sent, self._root.keys() - set(absent))
        if not absent and rest is None:
            said = self._crew.round(_STEP)
        else:
            rows = [None] * self._layout.n if rest is None else [row.clone() for row in rest.cpu().unbind(0)]
            more = [More(absent, row) for row in rows]
            pairs = zip(self._bounds, self._bounds[1:], strict=False)
            said = self._crew.round(_STEP_WITH_MORE, messages=[more[start:stop] for start, stop in pairs])
        return self._gathered(self._layout.following, self._following, said, range(self._layout.n))

    def _refuse_other_shapes(self, td: TensorDictBase) -> None:
        for key, column in self._actions.items():
            value = td.get(key, None)
            if value is None or value.shape != column.shape:
                where = "" if key == "action" else f" {key!r}"
                found = "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
                raise ValueError(
                    f"action{where} is not what the environment takes.\n"
                    f"  found:   {found}\n  allowed: {column.dtype} {tuple(column.shape)}"
                )

    def _gathered(
        self, frame: TensorDictBase, columns: Columns, said: dict[int, list[More]], asked: Sequence[int]
    ) -> dict[str, Any]:
        if said:
            return dict(self._stacked(frame, columns, said, asked).items())
        td = frame.empty(recurse=True).expand(self._layout.n, *frame.batch_size).clear_device_()
        for key, column in columns.items():
            td.set(key, column.clone())
        return dict(td.items())

    def _stacked(
        self, frame: TensorDictBase, columns: Columns, said: dict[int, list[More]], asked: Sequence[int]
    ) -> TensorDictBase:
        more = [More()] * self._layout.n
        for worker, its in said.items():
            more[self._bounds[worker] : self._bounds[worker + 1]] = its
        rows = {i: _row(frame, columns, i, more[i]) for i in asked}
        everywhere = set.intersection(*(set(row.keys(True, True)) for row in rows.values()))
        for i, row in rows.items():
            if odd := set(row.keys(True, True)) - everywhere:
                raise ValueError(
                    f"environment {i} gave {sorted(odd, key=str)}, and not all others did; a batch needs the same "
                    "entries of all: put them in observation_spec, or leave them out"
                )
        blank = next(iter(rows.values()))  # for those that are not asked: they are not read
        return torch.stack([rows.get(i, blank) for i in range(self._layout.n)])


def _leaves(td: TensorDictBase) -> Columns:
    return {key: td.get(key) for key in td.keys(True, True) if isinstance(td.get(key), Tensor)}


def _row(frame: TensorDictBase, columns: Columns, i: int, more: More) -> TensorDictBase:
    """Environment i's TensorDict, in memory of its own."""
    td = frame.empty(recurse=True).clear_device_()
    for key, column in columns.items():
        if key not in more.absent:
            td.set(key, column[i].clone())
    return td if more.rest is None else td.update(more.rest)


def _put(td: TensorDictBase, columns: Columns, i: int) -> More:
    """Writes what there are columns for; returns the rest."""
    absent = tuple(key for key, column in columns.items() if not _copied(td.get(key, None), column[i]))
    rest = _without(td, columns.keys() - set(absent))
    return More(absent, None if rest is None else rest.detach().cpu().clone())


def _copied(value: Any, column: Tensor) -> bool:
    fits = isinstance(value, Tensor) and value.shape == column.shape and value.dtype == column.dtype
    if fits:
        column.copy_(value.detach())
    return fits


def _without(td: TensorDictBase, known: Any) -> TensorDictBase | None:
    """The entries of `td` other than `known`, if there are any."""
    rest = [key for key in td.keys(True, True) if key not in known]
    return td.select(*rest) if rest else None


def _device_of(env: Any) -> torch.device:
    return torch.device("cpu") if env.device is None else torch.device(env.device)
