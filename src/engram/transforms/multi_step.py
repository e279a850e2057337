"""n-step returns: `MultiStep` for collected batches, `MultiStepTransform` for replay buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engram import _forms as forms
from engram._advice import advised
from engram._checks import count
from engram.pytree import (
    Key,
    Keys,
    TreeSpec,
    as_key,
    as_keys,
    as_tensor,
    collate_items,
    copy_containers,
    describe,
    flatten,
    format_key,
    get_tensor,
    has_batch_size,
    key_path,
    leaf_keys,
    map_outermost,
    require_tensor,
    set_entry,
    to_tensor,
    unflatten,
    unstack,
)
from engram.transforms.base import StreamTraits, Transform, WriteRequest, has_entries
from engram.transforms.env_specs import EnvSpecs
from engram.transforms.trajectory import DONE_KEYS, TrajectoryBounds, sibling_key, trajectory_bounds
from engram.transforms.values import first_key

NEXT_REWARD: Key = ("next", "reward")
_NOT_COMPARED = {"done", "terminated", "truncated", "reward"}


def checked_gamma(gamma: float) -> float:
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be 0 to 1, got {gamma}")
    return float(gamma)


def checked_n_steps(n_steps: int) -> int:
    return count(n_steps, "n_steps")


def reward_keys_of(keys: Any) -> list[Key]:
    """Keys of rewards; `("next", "reward")` if None. Raises ValueError for keys outside of `"next"`."""
    reward_keys = [NEXT_REWARD] if keys is None else as_keys(keys)
    if any(key[0] != "next" or isinstance(key, str) for key in reward_keys):
        raise ValueError(f"rewards of n steps are under 'next', got {reward_keys}")
    return reward_keys


def _under_next(key: Key) -> Key:
    return key if key_path(key)[0] == "next" else ("next", *key_path(key))


class NSteps(NamedTuple):
    """The horizons of the transitions of a batch, [S, T]."""

    steps: Tensor  #: int64: the number of steps that are summed
    done: Tensor  #: bool: whether the state after them is done
    gamma: Tensor  #: the discount to the power of the steps


def set_n_steps(
    batch: Any,
    now: TrajectoryBounds,
    gamma: float,
    n_steps: int,
    reward_keys: Sequence[Key],
    next_keys: Sequence[Key] = ("next",),
) -> NSteps:
    """Turns each step into an n-step transition, in place: sums rewards, and takes `next` from the last step.

    A transition has fewer steps where its trajectory or the batch ends. `next_keys` are the entries that follow a step.
    """
    end = torch.minimum(now.position + n_steps - 1, now.last())
    steps = end - now.position + 1
    if list(reward_keys) == [NEXT_REWARD] and get_tensor(batch, NEXT_REWARD) is None:  # those of groups of agents
        nested = [key for key in map(key_path, leaf_keys(batch)) if key[0] == "next" and key[-1] == "reward"]
        reward_keys = nested or reward_keys
    rewards = [(key, require_tensor(batch, key, "n-step returns")) for key in reward_keys]
    at_end = _at(now, end)
    for next_key in next_keys:
        following = require_tensor(batch, next_key, "n-step returns")
        set_entry(batch, next_key, map_outermost(following, at_end, lambda td: td.apply(at_end)))
    for key, reward in rewards:
        set_entry(batch, key, _summed(now, key, reward, end, gamma, n_steps))
        set_entry(batch, sibling_key(key, f"original_{key_path(key)[-1]}"), reward)
    done = now.done.gather(1, end)
    dtype = rewards[0][1].dtype if rewards and rewards[0][1].is_floating_point() else torch.get_default_dtype()
    return NSteps(steps, done, to_tensor(gamma, dtype=torch.float64).pow(steps).to(dtype))


def _at(now: TrajectoryBounds, end: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that selects a leaf's values at the steps `end`."""
    rows = torch.arange(end.shape[0], device=end.device).unsqueeze(1)
    return lambda leaf: now.view.join(now.view.split(leaf, "next")[rows, end])


def _summed(now: TrajectoryBounds, key: Key, reward: Tensor, end: Tensor, gamma: float, n_steps: int) -> Tensor:
    split = now.view.split(reward, key)
    x = split if split.is_floating_point() else split.to(torch.get_default_dtype())
    x = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    total, steps = x.clone(), now.view.steps
    for ahead in range(1, min(n_steps, steps)):
        is_within = now.position[: steps - ahead] + ahead <= end[:, : steps - ahead]
        is_within = is_within.reshape(*is_within.shape, *[1] * (x.ndim - 2))
        total[:, : steps - ahead] += gamma**ahead * torch.where(is_within, x[:, ahead:], 0)
    return now.view.join(total.to(reward.dtype) if reward.is_floating_point() else total)


class _Rows(NamedTuple):
    """Steps `[*lead, time]` as a list of leaves and their structure; never changed in place."""

    form: TreeSpec
    paths: list[tuple[Any, ...]]
    leaves: list[Tensor]
    lead: tuple[int, ...]
    device: Any

    @property
    def axis(self) -> int:
        return len(self.lead)

    @property
    def steps(self) -> int:
        return self.leaves[0].shape[self.axis]

    @classmethod
    def of(cls, batch: Any, dims: int) -> _Rows:
        """The rows of a batch. Raises ValueError, with the leaf's name, if a leaf lacks the batch dimensions."""
        form, values = describe(batch, dims)
        paths, leaves = [path for path, _ in values], [as_tensor(value, path) for path, value in values]
        if not leaves:
            raise ValueError("nothing to add: the batch holds no tensor")
        shape = leaves[0].shape[:dims]
        for path, leaf in zip(paths, leaves, strict=True):
            if leaf.shape[:dims] != shape or len(shape) < dims:
                raise ValueError(
                    f"{format_key(path)} has shape {list(leaf.shape)}; all leaves begin with {dims} batch sizes"
                )
        return cls(form, paths, leaves, tuple(shape[:-1]), batch.device if has_batch_size(batch) else None)

    def then(self, later: Any, dims: int) -> _Rows:
        """These steps followed by those of a batch.

        Raises:
            ValueError: the batch has other keys, shapes or dtypes; the message names the leaf.
        """
        other = _Rows.of(later, dims)
        new = [as_tensor(v, p) for v, p in zip(flatten(self.form, later), self.paths, strict=True)]
        for path, mine, theirs in zip(self.paths, self.leaves, new, strict=True):
            rest = slice(self.axis + 1, None)
            if (
                mine.dtype != theirs.dtype
                or mine.shape[rest] != theirs.shape[rest]
                or theirs.shape[: self.axis] != self.lead
            ):
                raise ValueError(
                    f"{format_key(path)} is {theirs.dtype} {list(theirs.shape)}, the steps held back before it are "
                    f"{mine.dtype} {list(mine.shape)}; nothing was written"
                )
        leaves = [
            torch.cat([mine.to(theirs.device), theirs], self.axis)
            for mine, theirs in zip(self.leaves, new, strict=True)
        ]
        # In the batch's structure, as rows loaded from a state have lost their tensorclass.
        ordered = dict(zip(self.paths, leaves, strict=True))
        return other._replace(leaves=[ordered[path] for path in other.paths])

    def part(self, start: int, stop: int) -> _Rows:
        """The steps `start` to `stop - 1`, in new memory."""
        return self._replace(leaves=[t.narrow(self.axis, start, stop - start).clone() for t in self.leaves])

    def batch(self) -> Any:
        return unflatten(self.form, list(self.leaves), (*self.lead, self.steps), self.device)


_AGREED = forms.fields(forms.list_of(forms.text_or_integer), forms.nullable(forms.boolean))
_STATE = forms.record({}, {"agreed": forms.list_of(_AGREED)})
#: Where steps are held back.
_HELD = forms.record(
    {"form": forms.plain, "leaves": forms.list_of(forms.tensor()), "lead": forms.list_of(forms.integer())},
    {"cuts": forms.tensor(torch.bool, ndim=2)},
)


def _saved_rows(state: dict[str, Any]) -> _Rows:
    """Steps that a state has; ValueError where its leaves are not those of its form."""
    form, leaves, lead = TreeSpec.from_json(state["form"]), list(state["leaves"]), tuple(state["lead"])
    paths, shapes = form.paths(), {tuple(leaf.shape[: len(lead) + 1]) for leaf in leaves}
    if not leaves or len(leaves) != len(paths) or len(shapes) > 1 or len(shape := shapes.pop()) <= len(lead):
        raise ValueError(f"{len(leaves)} leaves of a state do not belong to the {len(paths)} of its form")
    if shape[:-1] != lead:
        raise ValueError(f"the leaves of a state are of environments {list(shape[:-1])}, the state of {list(lead)}")
    return _Rows(form, paths, leaves, lead, None)


class _Border:
    """Where steps that are held back meet later ones: whether these go on with the trajectories of those.

    Flags and ids do not tell a second run of a program, or another collector, that numbers its trajectories from 0,
    too. So entries that follow a step are compared with those of the next step, as the storage compares them
    (`engram.store.border`). One that differs counts only if it agreed the last time that two steps met, at a border or
    within a batch, however long ago that was. Other than there, one that agrees, and changed in the step, shows that
    the trajectory goes on all the same, as a goal may be set anew: a cut costs an n-step row all steps behind it, and a
    slice only its length.

    Args:
        next_keys: entries that follow a step, as `"next_obs"`; without them all that is under `"next"` does.
        agreed: the attribute of another border, to continue with.

    Attributes:
        agreed: of entries that were compared, whether they agreed the last time; None: at a border that the trajectory
            crossed they did not, as the hidden state of a policy that begins each batch with zeros. Then it says
            nothing that they agree within batches, and that they differ only counts where nothing agrees.
    """

    def __init__(self, next_keys: Sequence[Key], agreed: Mapping[tuple[Any, ...], bool | None] | None = None) -> None:
        self._next_paths = [key_path(key) for key in next_keys]
        self._paths: list[tuple[Any, ...]] = []
        self._pairs: list[tuple[int, int]] = []
        self.agreed: dict[tuple[Any, ...], bool | None] = dict(agreed or {})

    def cuts(self, rows: _Rows, at: int, now: TrajectoryBounds) -> Tensor:
        """bool [S]: in which environments another trajectory begins at step `at`, by the entries of the step before."""
        ended, pairs = now.ends[:, at - 1], self._pairs_of(rows)
        differs, goes_on = torch.zeros_like(ended), ended.clone()
        if not pairs or bool(ended.all()):
            return differs
        # After a cut, and in states of earlier versions: the steps beside the border say it.
        unknown = [pair for pair in pairs if rows.paths[pair[1]] not in self.agreed]
        if unknown and not self._learn(rows, unknown, max(0, at - 2), at, now):
            self._learn(rows, unknown, at, rows.steps, now)
        same = torch.stack([_meets(rows, before, after, at, now) | ended for before, after in pairs])
        for (before, after), agrees in zip(pairs, same, strict=True):
            agreed = self.agreed.get(rows.paths[after], False)
            if agreed or agreed is None:
                differs |= ~agrees if agreed else ~same.any(0)
            goes_on |= agrees & ~_same(rows, (before, at - 1), (after, at - 1), now)
        for (_, after), agrees in zip(pairs, same, strict=True):
            self._keep(rows.paths[after], agrees, goes_on)
        return differs & ~goes_on

    def _keep(self, path: tuple[Any, ...], agrees: Tensor, goes_on: Tensor) -> None:
        """Keeps whether an entry agrees at a border."""
        if bool(agrees.all()):
            self.agreed[path] = True
        elif bool((goes_on & ~agrees).any()):
            self.agreed[path] = None
        elif self.agreed.get(path, False):
            del self.agreed[path]  # it must be seen to agree again
        else:
            self.agreed.setdefault(path, False)

    def learn(self, rows: _Rows, start: int, stop: int, now: TrajectoryBounds) -> None:
        """Keeps whether entries agree between the last two joined steps of those from `start` to `stop - 1`, if any."""
        if stop - start > 1:
            self._learn(rows, self._pairs_of(rows), start, stop, now)

    def _learn(self, rows: _Rows, pairs: list[tuple[int, int]], start: int, stop: int, now: TrajectoryBounds) -> bool:
        """`learn` of these entries; returns whether there are two such steps."""
        joined = ~now.ends[:, start : max(start, stop - 1)]
        at = joined.any(0).nonzero()
        if not len(at):
            return False
        last = start + int(at[-1]) + 1
        for before, after in pairs:
            if self.agreed.get(rows.paths[after], False) is not None:
                same = _meets(rows, before, after, last, now) | now.ends[:, last - 1]
                self.agreed[rows.paths[after]] = bool(same.all())
        return True

    def _pairs_of(self, rows: _Rows) -> list[tuple[int, int]]:
        """Each leaf that follows a step, and the same of the step, where both have one form."""
        if rows.paths == self._paths:
            return self._pairs
        number = {path: i for i, path in enumerate(rows.paths)}
        pairs = []
        for path, i in number.items():
            j = number.get(self._step_path(path))
            if j is not None:
                a, b = rows.leaves[i], rows.leaves[j]
                if a.dtype == b.dtype and a.shape == b.shape:
                    pairs.append((i, j))
        self._paths, self._pairs = rows.paths, pairs
        return pairs

    def _step_path(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """Where the step has what follows it under this path; (): it is not known."""
        if not self._next_paths:
            return path[1:] if path[0] == "next" and not _NOT_COMPARED.intersection(path) else ()
        is_next = path in self._next_paths and str(path[-1]).startswith("next_")
        return (*path[:-1], str(path[-1]).removeprefix("next_")) if is_next else ()


def _meets(rows: _Rows, before: int, after: int, at: int, now: TrajectoryBounds) -> Tensor:
    """bool [S]: whether the leaf that follows step `at - 1` is that of step `at`."""
    return _same(rows, (before, at - 1), (after, at), now)


def _same(rows: _Rows, one: tuple[int, int], other: tuple[int, int], now: TrajectoryBounds) -> Tensor:
    """bool [S]: whether two leaves, each by its number and of a step, are the same; NaN equals NaN."""
    a, b = (rows.leaves[leaf].select(rows.axis, step) for leaf, step in (one, other))
    same = a == b
    if a.is_floating_point() or a.is_complex():
        same = same | (a.isnan() & b.isnan())
    return same.reshape(now.view.rows, -1).all(1)


@advised
class MultiStepTransform(Transform, built_in=True):
    """Turns written steps into n-step transitions; steps whose n-step future is not yet known are held back.

    Args:
        n_steps: the horizon; 1 changes no reward.
        gamma: the discount, 0 to 1.
        reward_keys: rewards, `[("next", "reward")]` if None, or, in batches without it, those of groups; `"reward"` is
            that, too.
        done_key, traj_key: where trajectories end; `("next", "done")` (or `"done"`, which is that, too) and
            `("collector", "traj_ids")` (or `"episode"`, where these exist) if None.
        done_keys: all flags, without effect: all entries under `next` come from n steps later, flags included.
        next_key: for flat batches (`obs`, `action`, `reward`, `next_obs`, `done`): the entry that follows a step, or a
            list of them, `"next_obs"`. Rewards are then `"reward"` if None, the flags those at the root, and they, too,
            come from n steps on; read "next" so below. None: all that follows a step is under `"next"`.

    TorchRL's `mask_key=None` is accepted without effect.

    A step gets `("next", "reward")`, the discounted sum of up to n rewards; everything else under `next` from n steps
    on; and `gamma` (to the power of the steps summed), `steps_to_next_obs` (int64), `nonterminal` (bool: the state
    after them is not done; all three `[*, 1]`) and `("next", "original_reward")`.

    The transform keeps copies of the newest steps until the n steps after each are known or its trajectory ends: then
    they are written with the rewards that exist. So `extend` may write fewer steps or more than it is given, and
    returns the indices of those that were written, which may be none; `add` then returns a tensor, too. With ndim=2,
    time steps wait for the slowest environment. Steps that are held back are part of saved states, and `empty` drops
    them; at the end of training `buffer.flush_transforms()` writes them with the rewards that exist, as at a
    trajectory's end. Data with more batch dimensions than the storage hold a whole trajectory in each row; none of
    their steps is held back. In-place writes (`rb[i] = ...`) are stored unchanged.

    Rows that were written without it stay as they are; with `invert=True` it changes slices on reading instead, each
    batch by itself: transitions then end with their slice.

    The steps of an `extend` continue those of the last one, unless a flag, another id or an observation says
    otherwise: one that is not the next one of the step before (entries at the root and under `next`, or `X` and
    `next_X`, are compared). Rows that have none of these need an id. The done flags of n-step transitions come early:
    other transforms along time must run before this one on writing, so put them after it in a Compose.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=MultiStepTransform(n_steps=2, gamma=0.5))
        >>> done = torch.zeros(4, 1, dtype=torch.bool)
        >>> following = {"obs": torch.arange(1, 5), "reward": torch.ones(4, 1), "done": done}
        >>> rb.extend(TensorDict({"obs": torch.arange(4), "next": following}, [4]))
        tensor([0, 1, 2])
        >>> rb[:]["next", "obs"], rb[:]["next", "reward"].flatten()
        (tensor([2, 3, 4]), tensor([1.5000, 1.5000, 1.5000]))
    """

    inverse_in_order = True
    _state_settings = ("n_steps", "gamma", "reward_keys", "done_key", "traj_key")

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        reward_keys: Keys = None,
        done_key: Key | None = None,
        traj_key: Key | None = None,
        next_key: Keys = None,
        done_keys: Keys = None,
    ) -> None:
        super().__init__()
        self.n_steps = checked_n_steps(n_steps)
        self.gamma = checked_gamma(gamma)
        self.next_keys = as_keys(next_key)
        if "next" in self.next_keys:
            raise ValueError('all that is under "next" follows a step: leave next_key out')
        self.done_key = None if done_key is None else as_key(done_key)
        if self.next_keys:
            self.reward_keys = as_keys(reward_keys) or ["reward"]
        else:
            self.reward_keys = reward_keys_of(reward_keys and [_under_next(key) for key in as_keys(reward_keys)])
            self.done_key = None if self.done_key is None else _under_next(self.done_key)
        done: Key = self.done_key or ("done" if self.next_keys else ("next", "done"))
        flags = [sibling_key(done, name) for name in ("truncated", "terminated")]
        self.done_keys, self.mask_key = as_keys(done_keys) or [done, *flags], None
        self.traj_key = None if traj_key is None else as_key(traj_key)
        self._held: _Rows | None = None

    # Of the class, as pickles of earlier versions lack them.
    _cuts: Tensor | None = None  # bool [S, held]: ends of trajectories that no flag and no id tells
    _border: _Border | None = None

    @property
    def stream(self) -> StreamTraits:
        return super().stream._replace(horizon=self.n_steps)

    @property
    def held_back(self) -> int:
        """The number of time steps that are held back."""
        return 0 if self._held is None else self._held.steps

    def inv(self, tensordict: Any) -> Any:
        """The complete steps, `[*, 0]` if there are none; the others are held back until the next call."""
        dims = tensordict.batch_dims if has_batch_size(tensordict) else 1
        written = self.inverse_stream(WriteRequest(tensordict, dims, dims - 1))
        if written.items is not None:
            return written.items
        return _Rows.of(written.held, dims).part(0, 0).batch()

    @property
    def needs_order(self) -> bool:
        return True

    def has_written(self, batch: Any) -> bool | None:
        return has_entries(batch, ["steps_to_next_obs"])

    def inv_alone(self, batch: Any) -> Any:
        if type(batch) is list:
            return unstack(self.inv_alone(collate_items(batch)), 0) if batch else batch
        return self._of_trajectories(batch)

    def for_env(self, specs: EnvSpecs) -> Any:
        raise TypeError(
            "MultiStepTransform needs later steps, which an environment does not have yet: append it to "
            "the replay buffer, or give a collector postproc=MultiStep(...)"
        )

    def inverse_stream(self, writing: WriteRequest) -> WriteRequest:
        if writing.in_place or (writing.items is None and writing.held is None):
            return writing
        if writing.rows_are_trajectories:
            return writing.changed(self._of_trajectories)
        ordered, dims = writing.in_order(), writing.batch_dims
        rows = self._held
        if ordered.items is not None and not _Rows.of(ordered.items, dims).steps:
            raise ValueError("nothing to add: the batch has no steps")
        if ordered.items is not None:
            rows = _Rows.of(ordered.items, dims) if rows is None else rows.then(ordered.items, dims)
        n_known = 0 if rows is None else rows.steps
        if ordered.held is not None:
            rows = _Rows.of(ordered.held, dims) if rows is None else rows.then(ordered.held, dims)
        assert rows is not None
        now, cuts = self._trajectories(rows, dims, n_known)
        ready = self._complete(now, n_known)
        complete = _Rows.of(self._with_n_steps(rows.batch(), now), dims)
        self._held = rows.part(ready, n_known) if ready < n_known else None
        self._cuts = None if cuts is None or self._held is None else cuts[:, ready:n_known].clone()
        return ordered._replace(
            items=complete.part(0, ready).batch() if ready else None,
            held=complete.part(ready, complete.steps).batch() if ready < complete.steps else None,
            resized=True,
        )

    def flush(self, writing: WriteRequest) -> WriteRequest:
        """All steps that are held back, with the rewards known so far, as at the end of their trajectories."""
        rows = self._held
        if writing.items is not None:  # from a transform before this one
            writing = writing.in_order()
            rows = rows.then(writing.items, writing.batch_dims) if rows else _Rows.of(writing.items, writing.batch_dims)
        if rows is None:
            return writing
        now, _ = self._trajectories(rows, writing.batch_dims, rows.steps)
        self._held = self._cuts = None
        items = self._with_n_steps(rows.batch(), now)
        return writing._replace(items=items, time_dim=writing.batch_dims - 1, resized=True)

    def _of_trajectories(self, batch: Any) -> Any:
        """The n-step transitions of a batch of whole trajectories."""
        batch = copy_containers(batch)
        return self._with_n_steps(batch, trajectory_bounds(batch, *self._bounding))

    @property
    def _bounding(self) -> tuple[str, Key | None, Key | None]:
        return "MultiStepTransform", self.done_key, self.traj_key

    def _trajectories(self, rows: _Rows, dims: int, known: int) -> tuple[TrajectoryBounds, Tensor | None]:
        """The trajectories of steps that begin with those that are held back; and which ends no flag and no id tells,
        bool [S, T], None where there are none. Those from `known` on come again.
        """
        now, held = trajectory_bounds(rows.batch(), *self._bounding, dims=dims), self.held_back
        if self._border is None:
            self._border = _Border(self.next_keys)
        cuts = None
        if self._cuts is not None:
            cuts = torch.zeros_like(now.ends)
            cuts[:, :held] = self._cuts.to(cuts.device)
            now.ends.logical_or_(cuts)
        if 0 < held < rows.steps:
            new = self._border.cuts(rows, held, now)
            if bool(new.any()):
                cuts = torch.zeros_like(now.ends) if cuts is None else cuts
                cuts[:, held - 1] |= new
                now.ends.logical_or_(cuts)
        self._border.learn(rows, held, known, now)
        return now, cuts

    def _with_n_steps(self, batch: Any, now: TrajectoryBounds) -> Any:
        reached = set_n_steps(batch, now, self.gamma, self.n_steps, self.reward_keys, self._next_keys_of(batch))
        for name, value in (
            ("gamma", reached.gamma),
            ("steps_to_next_obs", reached.steps),
            ("nonterminal", ~reached.done),
        ):
            set_entry(batch, name, now.view.join(value).unsqueeze(-1))
        return batch

    def _next_keys_of(self, batch: Any) -> list[Key]:
        """The entries of a batch that follow its steps, flags included."""
        if not self.next_keys:
            return ["next"]
        done = first_key(batch, DONE_KEYS, "MultiStepTransform") if self.done_key is None else self.done_key
        flags = dict.fromkeys([done, *(sibling_key(done, name) for name in ("terminated", "truncated"))])
        return [*self.next_keys, *(key for key in flags if get_tensor(batch, key) is not None)]

    def _complete(self, now: TrajectoryBounds, known: int) -> int:
        """The number of time steps whose n-step transition is known, in every environment."""
        if known == 0:
            return 0
        first = now.first()[:, known - 1]
        open_from = torch.clamp(torch.as_tensor(known - self.n_steps + 1, device=first.device), min=first)
        return int(torch.where(now.ends[:, known - 1], known, open_from).clamp(max=known).min())

    # ---- state ----
    def empty(self) -> None:
        self._held = self._cuts = self._border = None

    def remember(self) -> Any:
        return self._held, self._cuts, None if self._border is None else dict(self._border.agreed)

    def undo(self, before: Any) -> None:
        self._held, self._cuts, agreed = before
        self._border = None if agreed is None else _Border(self.next_keys, agreed)

    def state_is_optional(self) -> bool:
        return self._held is None

    def get_extra_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self._held is not None:
            held = self._held
            state = {"form": held.form.to_json(), "leaves": list(held.leaves), "lead": list(held.lead)}
        if self._cuts is not None:
            state["cuts"] = self._cuts
        if self._border is not None and self._border.agreed:
            state["agreed"] = [[list(path), agreed] for path, agreed in self._border.agreed.items()]
        return state

    def set_extra_state(self, state: Any) -> None:
        self._held, self._cuts = (_saved_rows(state), state.get("cuts")) if "form" in state else (None, None)
        agreed = {tuple(path): agreed for path, agreed in state.get("agreed", ())} if state else {}
        self._border = _Border(self.next_keys, agreed) if state else None

    def differences(self, state: dict[str, Any]) -> list[str]:
        forms.check(_STATE, state, f"the state of {self.kind}")
        if "form" in state:
            forms.check(_HELD, state, f"the state of {self.kind}")
            held = _saved_rows(state)
            shape = (math.prod(held.lead), held.steps)
            if "cuts" in state and tuple(state["cuts"].shape) != shape:
                raise ValueError(f"'cuts' of a MultiStepTransform is a bool {list(shape)}, got {state['cuts']!r:.80}")
        return super().differences(state)

    def state_settings(self) -> dict[str, Any]:
        flat = {"next_keys": self.next_keys} if self.next_keys else {}
        return {**super().state_settings(), **flat}

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"n_steps": self.n_steps, "gamma": self.gamma}
        if self.next_keys:
            settings["next_keys"] = self.next_keys
        return settings if len(self.reward_keys) == 1 else {**settings, "reward_keys": self.reward_keys}


class MultiStep(nn.Module):
    """Makes n-step transitions of the steps of a collected batch `[*, time]`.

    Args:
        gamma: the discount, 0 to 1.
        n_steps: the horizon; 1 changes no reward.
        reward_keys: rewards, `[("next", "reward")]` if None.
        done_key, traj_key: where trajectories end; `("next", "done")` and `("collector", "traj_ids")` (or `"episode"`,
            where these exist) if None.
        mask_key: bool, False for padding, which no transition reaches into; ignored if the batch lacks it.

    Returns a new batch, which shares what does not change with the one that it is given: `("next", "reward")` is the
    discounted sum of up to n rewards; everything else under `next` comes from n steps on, the flags included; and there
    are `("next", "original_reward")` and, all three `[*, time]`, `gamma` (to the power of the steps summed),
    `steps_to_next_obs` (int64) and `nonterminal` (bool: False for a step that reaches no further one, as the last of a
    trajectory). Transitions have fewer than n steps where their trajectory or the batch ends; a buffer with
    `MultiStepTransform` waits for the next batch instead.

    Raises:
        KeyError: the batch has no rewards or no flags; the message names them.

    Example:
        >>> done = torch.tensor([[False], [False], [True]])
        >>> following = {"obs": torch.arange(1, 4), "reward": torch.ones(3, 1), "done": done}
        >>> batch = TensorDict({"obs": torch.arange(3), "next": following}, [3])
        >>> batch = MultiStep(gamma=0.5, n_steps=2)(batch)
        >>> batch["next", "reward"].flatten(), batch["next", "obs"], batch["steps_to_next_obs"]
        (tensor([1.5000, 1.5000, 1.0000]), tensor([2, 3, 3]), tensor([2, 2, 1]))
    """

    def __init__(
        self,
        gamma: float,
        n_steps: int,
        *,
        reward_keys: Keys = None,
        done_key: Key | None = None,
        traj_key: Key | None = None,
        mask_key: Key = ("collector", "mask"),
    ) -> None:
        super().__init__()
        self.gamma = checked_gamma(gamma)
        self.n_steps = checked_n_steps(n_steps)
        self.reward_keys = reward_keys_of(reward_keys)
        self.done_key = None if done_key is None else as_key(done_key)
        self.traj_key = None if traj_key is None else as_key(traj_key)
        self.mask_key = as_key(mask_key)

    def forward(self, batch: Any) -> Any:
        batch = copy_containers(batch)
        now = trajectory_bounds(batch, "MultiStep", self.done_key, self.traj_key, self.mask_key)
        made = set_n_steps(batch, now, self.gamma, self.n_steps, self.reward_keys)
        for name, value in (("gamma", made.gamma), ("steps_to_next_obs", made.steps), ("nonterminal", made.steps > 1)):
            set_entry(batch, name, now.view.join(value))
        return batch

    def __repr__(self) -> str:
        return f"MultiStep(gamma={self.gamma}, n_steps={self.n_steps})"
