"""The law: save at every step, load elsewhere, and the rest of the stream is equal bit by bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engram.data import ReplayBuffer, TensorDictReplayBuffer
from law.combos import CAPACITY, Combo
from law.world import Memory, World, difference

# Everything that can happen, with loads in the middle of epochs, of trajectories and of the ring's turns.
PROGRAM = [
    "extend", "sample", "add", "extend_whole_trajectories", "sample", "update", "sample", "replace", "iterate",
    "replace_present", "position", "extend_whole_trajectories", "settings", "sample_three", "others", "update_one",
    "sample", "commit", "extend_list", "iterate", "mark", "release", "seek", "others", "sample", "flush", "commit",
    "finish_epoch", "extend_whole_trajectories", "sample", "empty", "extend_whole_trajectories", "sample",
    "extend_beyond", "update", "sample_three", "position", "extend", "settings", "sample_three", "commit", "update",
    "extend_whole_trajectories", "sample", "seek", "iterate",
]  # fmt: skip
DRAWS = ["extend_whole_trajectories", "extend_whole_trajectories"] + ["sample", "iterate", "sample", "sample_three"] * 3


class Saved(NamedTuple):
    """What was saved after a step, and how to bring it into a new world."""

    after: int
    capacity: int
    memory: Memory
    load: Callable[[World], World]


class Broken(AssertionError):
    """The law does not hold."""


class Trial:
    """One combination under the law.

    The original takes every step and is saved after some; then each save is loaded elsewhere, and takes the steps
    that followed. States in memory are loaded after the original has gone on, so that nothing may be shared.
    """

    def __init__(
        self, combo: Combo, folder: Path, program: Sequence[str] = PROGRAM, every: int = 1, start: int = 0
    ) -> None:
        self.combo, self.folder, self.program = combo, folder, list(program)
        # With prefetch a save has an effect: what was prepared is prepared again. So there are steps without one.
        self.points = list(range(start, len(self.program), max(every, 3 if combo.prefetch else 1)))
        self.folders = 0

    def run(self, larger: int = 3, unsaved: bool = True) -> None:
        """Raises Broken where the law is. So many saves also go to larger buffers."""
        original, said, states, saves = self.original()
        original.end()
        for nth, saved in enumerate(saves):
            self.follow(saved, said, states, used=nth % 2 == 1)
        if self.combo.way != "reopened":
            for saved in saves[:: -(-len(saves) // max(1, larger))][:larger]:
                self.follow_in_larger(saved, states)
        if unsaved:
            self.never_saved(said)

    def never_saved(self, said: list[Any]) -> None:
        """A save changes nothing; with prefetch, nothing that is drawn before the next write."""
        if not self.combo.prefetch:
            self.without_saves(said)
        elif self.combo.own_generator and self.combo.sampler != "own":  # which draws from elsewhere
            self.program, self.points = DRAWS, list(range(2, len(DRAWS), 2))
            self.without_saves(self.original()[1])

    def original(self) -> tuple[World, list[Any], dict[int, Any], list[Saved]]:
        """The buffer that is saved: what its steps gave, its contents and states after some, and the saves."""
        world, said, states, saves, finish = self.started(), [], {}, [], None
        for k, name in enumerate(self.program):
            said.append(world.step(name, k))
            if k in self.points:
                if finish is not None:  # a save in the background, which went on during these steps
                    finish()
                states[k] = world.state(), world.contents()
                saved, finish = self.save(world, k)
                saves.append(saved)
        if finish is not None:
            finish()
        states[len(self.program)] = world.state(), None
        return world, said, states, saves

    def started(self) -> World:
        world = World(self.combo, self.new_folder())
        if self.combo.writer == "immutable":
            world.step("extend_whole_trajectories", 0)
            world.closed()
        return world

    def without_saves(self, said: list[Any]) -> None:
        world = self.started()
        for k, name in enumerate(self.program):
            self.compare(said[k], world.step(name, k), f"{self.combo}\nnever saved: step {k} ({name})")
        world.end()

    # ---- saving and loading ----
    def save(self, world: World, k: int) -> tuple[Saved, Callable[[], Any] | None]:
        way, rb, memory = self.combo.way, world.rb, world.memory
        if way == "in memory":
            state = rb.state_dict()
            return Saved(
                k, world.capacity, memory, lambda twin: _loaded(twin, lambda: twin.rb.load_state_dict(state))
            ), None
        path = self.folder / ("saved" if way != "whole" else f"saved-{k}")
        if way == "background":
            handle = rb.dumps(path, blocking=False, keep_last=999)
            return Saved(k, world.capacity, memory, lambda twin: _loads(twin, path, handle.result())), handle.result
        rb.dumps(path, keep_last=999)
        name = f"g-{len(list(path.glob('g-*'))):06d}"
        if way == "reopened" and rb.storage.initialized:
            copy = self.new_folder()
            shutil.copytree(rb.storage.scratch_dir, copy / "store", dirs_exist_ok=True)
            return Saved(k, world.capacity, memory, lambda twin: self.reopened(twin, copy / "store", path, name)), None
        return Saved(k, world.capacity, memory, lambda twin: _loads(twin, path, name)), None

    def reopened(self, twin: World, store: Path, path: Path, name: str) -> World:
        """The store as it was left, with a checkpoint of the other parts."""
        twin.end()
        kind = TensorDictReplayBuffer if self.combo.tensordict else ReplayBuffer
        writer = type(twin.rb.writer)()
        twin.rb = twin.with_transforms(kind.open(store, writer=writer, **twin.parts()))
        twin.rb.loads(path, snapshot=name, parts=("sampler", "writer", "generator"))
        return twin

    def follow(self, saved: Saved, said: list[Any], states: dict[int, Any], used: bool) -> None:
        twin = self.twin(saved, used=used)
        where = (
            f"{self.combo}\nafter step {saved.after} ({self.program[saved.after]}), {'used' if used else 'new'} twin: "
        )
        self.compare(states[saved.after][0], twin.state(), f"{where}the state")
        for k in range(saved.after + 1, len(self.program)):
            self.compare(said[k], twin.step(self.program[k], k), f"{where}step {k} ({self.program[k]})")
            if k in self.points and self.combo.prefetch:
                twin.state()
        self.compare(states[len(self.program)][0], twin.state(), f"{where}the state at the end")
        twin.end()

    def follow_in_larger(self, saved: Saved, states: dict[int, Any]) -> None:
        """A larger buffer takes what was saved, and the law holds there."""
        first = self.twin(saved, capacity=CAPACITY + 9)
        where = self.place(saved, "larger twin")
        self.compare(states[saved.after][1], first.contents(), f"{where}the contents")
        again, finish = self.save(first, 1000 + saved.after)
        if finish is not None:
            finish()
        second = self.twin(again, capacity=CAPACITY + 9)
        self.compare(first.state(), second.state(), f"{where}the state of a second one")
        for k in range(saved.after + 1, len(self.program)):
            name = self.program[k]
            self.compare(first.step(name, k), second.step(name, k), f"{where}step {k} ({name})")
        self.compare(first.state(), second.state(), f"{where}the state at the end")
        first.end()
        second.end()

    def place(self, saved: Saved, twin: str) -> str:
        return f"{self.combo}\nsaved after step {saved.after} ({self.program[saved.after]}), {twin}: "

    def twin(self, saved: Saved, *, used: bool = False, capacity: int = CAPACITY) -> World:
        """Another buffer that has taken over what was saved."""
        twin = World(self.combo, self.new_folder(), seed=77, capacity=capacity)
        if used:
            use(twin)
        twin.closed()
        twin = saved.load(twin)
        twin.goes_on()
        # The rows of a larger buffer have other numbers.
        twin.memory = saved.memory if capacity == saved.capacity else saved.memory._replace(position=None)
        return twin

    @staticmethod
    def compare(mine: Any, its: Any, where: str) -> None:
        found = difference(mine, its)
        if found is not None:
            raise Broken(f"{where} differs at {found}")

    def new_folder(self) -> Path:
        self.folders += 1
        folder = self.folder / f"world-{self.folders}"
        folder.mkdir()
        return folder


def use(world: World) -> None:
    """Another life, before the load."""
    names = ("extend_beyond", "sample", "update", "iterate", "settings", "commit", "replace", "extend")
    for k, name in enumerate(names):
        world.memory = world.memory._replace(time=world.memory.time + 300 * (k == 0))
        world.step(name, 500 + k)


def _loads(twin: World, path: Path, snapshot: str) -> World:
    return _loaded(twin, lambda: twin.rb.loads(path, snapshot=snapshot))


def _loaded(twin: World, load: Callable[[], None]) -> World:
    load()
    return twin


__all__ = ["CAPACITY", "PROGRAM", "Broken", "Trial"]
