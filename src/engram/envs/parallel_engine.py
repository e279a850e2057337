"""Gymnasium environments in several processes: raw values go through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from engram.crews import Crew, Seat
from engram.envs.batched import Array, Autoreset, BatchEngine, BatchStep
from engram.envs.gym_codecs import Codec, Leaf, leaves_of
from engram.envs.gym_engine import GymEngine
from engram.envs.gym_values import flag_of, reward_of
from engram.shared_memory import SharedMemory
from engram.step_clocks import Timed

_STEP, _RESET, _SEED = range(3)
_TRUE = np.True_.tobytes()


class RawLayout:
    """What `n` environments with these codecs share: an array `[n, ...]` for each leaf, rewards, flags, a mask."""

    def __init__(self, n: int, action: Codec, leaves: Sequence[Leaf]) -> None:
        self.n, self.action, self.leaves = n, action, list(leaves)
        self.action_leaves = leaves_of(action, ("action",))
        flag = (np.dtype(np.bool_), (n,))
        observations = [(leaf.codec.raw_dtype, (n, *leaf.codec.raw_shape)) for leaf in self.leaves]
        actions = [(leaf.codec.raw_dtype, (n, *leaf.codec.raw_shape)) for leaf in self.action_leaves]
        self._fields = [*observations, *observations, *actions, (np.dtype(np.float64), (n,)), flag, flag, flag]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each array, for `SharedMemory`."""
        return [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for dtype, shape in self._fields]

    def arrays(self, blocks: Sequence[Array]) -> RawArrays:
        """The arrays in `blocks` of these sizes."""
        pairs = zip(blocks, self._fields, strict=True)
        arrays = iter([block.view(dtype).reshape(shape) for block, (dtype, shape) in pairs])
        shown, last = ([next(arrays) for _ in self.leaves] for _ in range(2))
        return RawArrays(shown, last, [next(arrays) for _ in self.action_leaves], *arrays)

    def serve(self, envs: Sequence[Any], memory: SharedMemory, start: int, seat: Seat) -> None:
        """A worker's part, for ever: `envs` are environments `start` and following of all."""
        engines: list[Any] = [engine for env in envs for engine in env.engines()]
        if seat.clock is not None:
            engines = [Timed(engine, seat.clock, start + i) for i, engine in enumerate(engines)]
        RawMembers(engines, self, memory, start).serve(seat)


class RawArrays(NamedTuple):
    """`shown`: what environments show now, by leaf; `last`: the last observations of episodes that a step has ended."""

    shown: list[Array]
    last: list[Array]
    actions: list[Array]
    reward: Array
    terminated: Array
    truncated: Array
    mask: Array


class RawMembers:
    """A worker's part: environments `start` to `start + len(engines)` of all."""

    def __init__(self, engines: Sequence[GymEngine], layout: RawLayout, memory: SharedMemory, start: int) -> None:
        rows = slice(start, start + len(engines))
        arrays = layout.arrays(memory.attach(layout.sizes))
        self._engines, self._start, self._layout = list(engines), start, layout
        self._steps = [engine.step for engine in engines]
        self._shown = [array[rows] for array in arrays.shown]
        self._last = [array[rows] for array in arrays.last]
        self._actions = nest(layout.action_leaves, [array[rows] for array in arrays.actions])
        self._reward, self._mask = arrays.reward[rows], arrays.mask[rows]
        self._terminated, self._truncated = arrays.terminated[rows], arrays.truncated[rows]
        self._have_ended = True  # whether a flag may stand
        # An environment is fresh when a step has reset it, and nobody has asked for that yet.
        self._is_fresh = [False] * len(engines)
        is_single = len(layout.leaves) == 1 and not layout.leaves[0].path
        codec = layout.leaves[0].codec
        # None: several arrays, or `_write` looks at the values.
        self._only_dtype = codec.raw_dtype if is_single and codec.limits is None else None

    def serve(self, seat: Seat) -> None:
        """Does what the owner's `ParallelEngine` asks for, for ever."""
        while True:
            command = seat.next_command()
            if command == _STEP:
                self._step_all()
            elif command == _RESET:
                self._reset_masked()
            else:
                self._seed_all(seat.message())
            seat.done()

    def _step_all(self) -> None:
        if self._have_ended:
            self._terminated[:] = self._truncated[:] = False
            self._have_ended = False
        rewards, only, ndarray = self._reward, self._shown[0], np.ndarray
        dtype, shape = self._only_dtype, self._layout.leaves[0].codec.raw_shape
        raws = self._layout.action.unbatch(self._actions)
        for i, (step, raw) in enumerate(zip(self._steps, raws, strict=True)):
            observation, reward, terminated, truncated, _ = step(raw)
            rewards[i] = reward if type(reward) is float else reward_of(reward)
            self._is_fresh[i] = False
            if terminated is not False or truncated is not False:
                terminated, truncated = flag_of(terminated, "terminated"), flag_of(truncated, "truncated")
            if terminated or truncated:
                self._have_ended = True
                self._terminated[i], self._truncated[i] = terminated, truncated
                self._write(self._last, i, observation)
                self._reset_one(i)
                self._is_fresh[i] = True
            elif type(observation) is ndarray and observation.dtype is dtype and observation.shape == shape:
                only[i] = observation
            else:
                self._write(self._shown, i, observation)

    def _reset_masked(self) -> None:
        for i in np.flatnonzero(self._mask).tolist():
            if not self._is_fresh[i]:
                self._reset_one(i)
            self._is_fresh[i] = False

    def _seed_all(self, seed: int) -> None:
        for i, engine in enumerate(self._engines):
            engine.seed(seed + self._start + i)
            self._is_fresh[i] = False

    def _reset_one(self, i: int) -> None:
        self._write(self._shown, i, self._engines[i].reset())

    def _write(self, columns: list[Array], i: int, observation: Any) -> None:
        for leaf, column in zip(self._layout.leaves, columns, strict=True):
            column[i] = leaf.value(observation)


class ParallelEngine(BatchEngine):
    """The owner's part: steps all environments at once; what it returns lies in shared memory.

    An episode that ends is followed by the next one in the same step, without another round. A reset that a step has
    made is not made again when it is asked for.
    """

    autoreset = Autoreset.SAME_STEP
    can_reset_some = True

    def __init__(self, crew: Crew, layout: RawLayout, memory: SharedMemory, starts: Sequence[int]) -> None:
        self.n, self.action, self.leaves = layout.n, layout.action, layout.leaves
        self._crew = crew
        self._starts = list(starts)
        self._arrays = layout.arrays(memory.allocate(layout.sizes))
        self._observation = nest(layout.leaves, self._arrays.shown)
        self._action_columns = list(zip(layout.action_leaves, self._arrays.actions, strict=True))

    def seed(self, seed: int) -> None:
        self._crew.round(_SEED, messages=[seed] * len(self._crew))

    def reset(self, mask: Array | None = None) -> Any:
        self._crew.ready()
        if mask is not None and (mask.shape != (self.n,) or mask.dtype != np.bool_):
            raise ValueError(f"a mask must be bool [{self.n}], got {mask.dtype} {list(mask.shape)}")
        self._arrays.mask[:] = True if mask is None else mask
        self._crew.round(_RESET, None if mask is None else self._workers_of(mask))
        return self._observation

    def _workers_of(self, mask: Array) -> list[int]:
        wanted = np.logical_or.reduceat(mask, self._starts)
        return [int(i) for i in np.flatnonzero(wanted)]

    def step(self, actions: Any) -> BatchStep:
        self._crew.ready()
        for leaf, column in self._action_columns:
            value = np.asarray(leaf.pick(actions))
            if value.shape != column.shape:
                raise ValueError(f"actions must have shape {list(column.shape)}, got {list(value.shape)}")
            np.copyto(column, value, casting="same_kind")
        self._crew.round(_STEP)
        _, _, _, reward, terminated, truncated, _ = self._arrays
        has_ended = _TRUE in terminated.tobytes() or _TRUE in truncated.tobytes()  # a tenth of what `any` takes
        return BatchStep(self._observation, reward, terminated, truncated, self._last_ones() if has_ended else ())

    def _last_ones(self) -> list[tuple[int, Any]]:
        ended = np.flatnonzero(self._arrays.terminated | self._arrays.truncated).tolist()
        last = self._arrays.last
        return [(i, nest(self.leaves, [column[i].copy() for column in last])) for i in ended]

    def close(self) -> None:
        self._crew.close()


def nest(leaves: Sequence[Leaf], values: Sequence[Any]) -> Any:
    """Values in the form of a raw one: Dicts by the names, Tuples by the numbers in the leaves' paths.

    >>> from gymnasium.spaces import Dict, Discrete, Tuple
    >>> from engram.envs.gym_codecs import codec_for
    >>> space = Tuple([Discrete(2), Dict(a=Discrete(2))])
    >>> nest(leaves_of(codec_for(space), ("observation",)), [1, 2])
    (1, {'a': 2})
    """
    return _nested([leaf.path for leaf in leaves], list(values))


def _nested(paths: list[tuple[Any, ...]], values: list[Any]) -> Any:
    if paths == [()]:
        return values[0]
    groups: dict[Any, tuple[list[Any], list[Any]]] = {}
    for path, value in zip(paths, values, strict=True):
        inner = groups.setdefault(path[0], ([], []))
        inner[0].append(path[1:])
        inner[1].append(value)
    built = {name: _nested(*inner) for name, inner in groups.items()}
    return tuple(built.values()) if all(type(name) is int for name in built) else built
