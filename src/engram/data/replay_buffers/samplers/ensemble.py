"""The sampler of several buffers that are sampled together."""

from __future__ import annotations

import bisect
import copy
import itertools
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram import _forms as forms
from engram._checks import count_or_none
from engram._copies import refuse_what_stays
from engram._generator import Generator
from engram._overrides import overrides
from engram._system import drawing
from engram.data.replay_buffers.samplers.base import (
    Sampler,
    WorkerShare,
    as_sampler,
    plan_of,
    refuse_several_epochs,
    sample_checked,
    user_object,
)
from engram.data.replay_buffers.samplers.draw import DrawPlan
from engram.data.replay_buffers.state.parts import SavedEnsemble, SavedPart, as_saved
from engram.data.replay_buffers.storages.ensemble import StorageEnsemble
from engram.pytree import to_tensor

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage

_WEIGHTS = forms.record({"p": forms.nullable(forms.list_of(forms.number))})


class SamplerEnsemble(Sampler, built_in=True):
    """Draws members of an ensemble, then rows from each: a batch of 10 from two members is [2, 5].

    Args:
        samplers: one for each member.
        p: how likely each member is drawn, relative to the others; equally if None.
        sample_from_all: every member gives its part of each batch, instead of members that are drawn.
        num_buffer_sampled: how many members are drawn for a batch, with replacement; as many as there are if None.

    Raises:
        ValueError: settings that contradict each other, or weights that cannot be.
        TypeError: one of them is no sampler.

    Example:
        >>> sampler = SamplerEnsemble(RandomSampler(), RandomSampler(), p=[0.9, 0.1])
        >>> sampler[0]
        RandomSampler()
    """

    def __init__(
        self,
        *samplers: Any,
        p: Sequence[float] | Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        compilable: bool = False,
    ) -> None:
        super().__init__(compilable)
        if not samplers:
            raise ValueError("an ensemble needs at least one sampler")
        self.members = [as_sampler(sampler) for sampler in samplers]
        if sample_from_all and p is not None:
            raise ValueError("with sample_from_all every member is in every batch: leave p out")
        if sample_from_all and num_buffer_sampled not in (None, len(samplers)):
            raise ValueError(
                f"with sample_from_all all {len(samplers)} members are in every batch, not "
                f"num_buffer_sampled={num_buffer_sampled}; leave it out"
            )
        self.sample_from_all = sample_from_all
        self.num_buffer_sampled = count_or_none(num_buffer_sampled, "num_buffer_sampled") or len(samplers)
        self._uniform = torch.empty(self.num_buffer_sampled, dtype=torch.float64, device="cpu")
        self._chosen: dict[int, list[int]] = {}  # by thread: of its next batch, whose members were asked before
        self.p = p

    @property
    def samplers(self) -> list[Any]:
        """The samplers of the members."""
        return [user_object(sampler) for sampler in self.members]

    @property
    def p(self) -> list[float] | None:
        """How likely each member is drawn, relative to the others. None: equally."""
        return self._p

    @p.setter
    def p(self, p: Sequence[float] | Tensor | None) -> None:
        if p is not None and self.sample_from_all:
            raise ValueError("with sample_from_all every member is in every batch: p cannot be set")
        if isinstance(p, str):
            raise TypeError(
                f"p must have one weight for each of {len(self.members)} members, got {p!r}; can_sample(batch_size) "
                "of a buffer says whether it can be drawn from, and p may be set at any time"
            )
        weights = None if p is None else to_tensor(p, dtype=torch.float64).tolist()
        if weights is not None:
            if not isinstance(weights, list) or len(weights) != len(self.members):
                raise ValueError(f"p must have one weight for each of {len(self.members)} members, got {p!r}")
            if not all(math.isfinite(w) and w >= 0 for w in weights) or sum(weights) <= 0:
                raise ValueError(f"p must be weights of 0 or more, one above 0, got {weights}")
        self._p: list[float] | None = weights
        parts = [1.0] * len(self.members) if weights is None else weights
        self._bounds = list(itertools.accumulate(w / sum(parts) for w in parts))
        self._last = max(i for i, w in enumerate(parts) if w > 0)  # where rounding leads past the end

    # ---- sampling ----
    def check_batch_size(self, batch_size: int) -> None:
        """ValueError where a batch does not divide into equal parts."""
        n = self.num_buffer_sampled
        if batch_size % n:
            raise ValueError(
                f"batch_size={batch_size} does not divide into equal parts of {n} members; make it a multiple of {n}"
            )

    def choose(self, batch_size: int) -> tuple[list[int], int]:
        """The members that the next batch comes from, and how many rows of each.

        Raises:
            ValueError: the batch size does not divide.
        """
        self.check_batch_size(batch_size)
        if self._chosen and (ids := self._chosen.pop(threading.get_ident(), None)) is not None:
            return ids, batch_size // self.num_buffer_sampled
        return self._choose(batch_size)

    def _choose(self, batch_size: int) -> tuple[list[int], int]:
        n = self.num_buffer_sampled
        if self.sample_from_all:
            return list(range(n)), batch_size // n
        if isinstance(generator := self._generator, Generator):
            drawn = [generator.random() for _ in range(n)]
        else:
            with drawing:
                drawn = self._uniform.uniform_(generator=generator).tolist()
        return [min(bisect.bisect_right(self._bounds, u), self._last) for u in drawn], batch_size // n

    def choose_ahead(self, batch_size: int) -> tuple[list[int], int]:
        """As `choose`, of a batch that this thread draws next: `choose` gives it the same then.

        The caller holds the lock, and does not keep it until then: others draw meanwhile, from other members.

        Raises:
            TypeError: a child's own `choose` would not.
        """
        if "choose" in overrides(type(self), SamplerEnsemble):
            raise TypeError(
                f"{type(self).__name__} chooses members by a method of its own, and they have rate limiters, which are "
                "asked before: leave `choose` as it is, or the limiters out"
            )
        self.check_batch_size(batch_size)
        ids, each = self._choose(batch_size)
        self._chosen[threading.get_ident()] = ids
        return ids, each

    def forget_ahead(self) -> None:
        """What this thread has chosen ahead is not drawn after all, if it was not yet. The caller holds the lock."""
        self._chosen.pop(threading.get_ident(), None)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether all members that may be drawn can give their parts."""
        self.check_batch_size(batch_size)
        n = batch_size // self.num_buffer_sampled
        weights = [1.0] * len(self.members) if self._p is None else self._p
        drawn = zip(self.members, storage.storages, weights, strict=True)  # type: ignore[attr-defined]
        return all(sampler.can_sample(member, n) for sampler, member, weight in drawn if weight > 0)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """An index for each drawn member: int64 [members, rows] (a list where they are no such), and what to say.

        `info["buffer_ids"]` (int64 [members, rows]) says which member each row is from.
        """
        ids, n = self.choose(batch_size)
        members = storage.storages  # type: ignore[attr-defined]
        drawn = [sample_checked(self.members[i], members[i], n) for i in ids]
        index: Any = [index for index, _ in drawn]
        if all(isinstance(one, Tensor) and one.shape == index[0].shape for one in index):
            index = torch.stack(index)
        return index, {**joined([info for _, info in drawn]), "buffer_ids": ids_of(ids, n)}

    @property
    def ran_out(self) -> bool:
        return any(sampler.ran_out for sampler in self.members)

    # ---- the members' ----
    def __getitem__(self, index: int) -> Any:
        return self.samplers[index]

    def __len__(self) -> int:
        return len(self.members)

    def check_storage(self, storage: Storage) -> None:
        members = storage.storages if isinstance(storage, StorageEnsemble) else None
        if members is None or len(members) != len(self.members):
            what = f"a {type(storage).__name__}" if members is None else f"{len(members)} storages"
            raise ValueError(f"{len(self.members)} samplers are for an ensemble of as many storages, not {what}")
        for sampler, member in zip(self.members, members, strict=True):
            sampler.check_storage(member)

    def use_generator(self, generator: torch.Generator | Generator | None) -> None:
        """Members and rows are drawn from this generator; None: members go on with those that they have."""
        super().use_generator(generator)
        if generator is not None:
            for sampler in self.members:
                sampler.use_generator(generator)

    def draw_plan(self, storage: Storage) -> DrawPlan:
        members = zip(self.members, storage.storages, strict=True)  # type: ignore[attr-defined]
        updated = any(plan_of(sampler, member).takes_updates for sampler, member in members)
        return super().draw_plan(storage)._replace(takes_updates=updated)

    def update_priority(
        self,
        index: Any,
        priority: Any,
        *,
        generation: Any = None,
        storage: Storage | None = None,
        buffer_ids: Any = None,
    ) -> None:
        """Sets priorities of rows in the members that they came from.

        Args:
            index: the `info` of `sample`, or the `"index"` of its batch (both with `"index"` and `"buffer_ids"`), or
                the `"index"` of its info.
            priority: one for each row.
            generation: as in `info`.
            buffer_ids: as in `info`, where the index does not say it.
        """
        ids, index = _whose(index, buffer_ids)
        rows = index.reshape(ids.numel(), -1).squeeze(-1)
        priority = to_tensor(priority)
        if priority.ndim:
            priority = priority.reshape(ids.numel(), -1).squeeze(-1)
        generation = None if generation is None else to_tensor(generation).reshape(-1)
        for i in sorted(set(ids.reshape(-1).tolist())):
            mine = (ids == i).reshape(-1)
            # A sampler of a user's own may take no generation: it is only given where there is one.
            given = {} if generation is None else {"generation": generation[mine]}
            self.members[i].update_priority(
                rows[mine],
                priority[mine] if priority.ndim else priority,
                storage=None if storage is None else storage.storages[i],  # type: ignore[attr-defined]
                **given,
            )

    def mark_update(self, index: Any, *, storage: Storage | None = None, buffer_ids: Any = None) -> None:
        """Tells the members' samplers that stored rows have changed; arguments as `update_priority`."""
        ids, index = _whose(index, buffer_ids)
        rows = index.reshape(ids.numel(), -1).squeeze(-1)
        for i in sorted(set(ids.reshape(-1).tolist())):
            member = None if storage is None else storage.storages[i]  # type: ignore[attr-defined]
            self.members[i].mark_update(rows[(ids == i).reshape(-1)], storage=member)

    def empty(self) -> None:
        for sampler in self.members:
            sampler.empty()

    def _split_among_workers(self, share: WorkerShare) -> None:
        super()._split_among_workers(share)
        refuse_several_epochs(self, share)

    # ---- state ----
    def _check_sending(self) -> None:
        for sampler in self.members:
            refuse_what_stays(sampler)

    def state_dict(self) -> dict[str, Any]:
        return {
            "p": self._p,
            "sample_from_all": self.sample_from_all,
            "num_buffer_sampled": self.num_buffer_sampled,
            "samplers": [{"kind": s.saved_form.kind, "state": s.state_dict()} for s in self.members],
        }

    @property
    def saved_form(self) -> SavedPart:
        settings = {"sample_from_all": self.sample_from_all, "num_buffer_sampled": self.num_buffer_sampled}
        members = [sampler.saved_form for sampler in self.members]
        return as_saved(_SavedSamplers("samplers", self, members=members, settings=settings))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved_form.check_fits(state)
        self.p = state["p"]
        for sampler, saved in zip(self.members, state["samplers"], strict=True):
            sampler.load_state_dict(saved["state"])

    def __repr__(self) -> str:
        return (
            f"SamplerEnsemble(samplers={self.samplers}, p={self._p}, sample_from_all={self.sample_from_all}, "
            f"num_buffer_sampled={self.num_buffer_sampled})"
        )


def choose_checked(sampler: SamplerEnsemble, batch_size: int) -> tuple[list[int], int]:
    """What `choose` gives; ValueError where that of a user's own class is not what it must be."""
    ids, rows = sampler.choose(batch_size)
    members = len(sampler)
    whole = isinstance(ids, list) and all(type(i) is int and 0 <= i < members for i in ids)
    if not whole or not ids or type(rows) is not int or rows < 1:
        raise ValueError(
            f"choose must return a list of members, ints from 0 to {members - 1}, and how many rows are of each, an "
            f"int of 1 or more; it returned {ids!r:.80} and {rows!r:.80}"
        )
    return ids, rows


class _SavedSamplers(SavedEnsemble):
    """The sampler of an ensemble, as it is saved and loaded."""

    def state(self, storage: Any) -> Any:
        self.sync(storage)
        return self.part.state_dict()

    def differences(self, state: Any) -> list[str]:
        differences = super().differences(state)
        if not differences:
            forms.check(_WEIGHTS, state, "the state of the ensemble")
            copy.copy(self.part).p = state["p"]  # an error where these are no weights
        return differences


def ids_of(ids: list[int], n: int) -> Tensor:
    """The member of each row: int64 [members, n]."""
    return torch.tensor(ids, device="cpu").unsqueeze(1).repeat(1, n)


def joined(infos: list[dict[str, Any]]) -> dict[str, Any]:
    """The infos of several members as one: tensors of one shape stacked, other things in a list."""
    info_of_all: dict[str, Any] = {}
    if not any(infos):
        return info_of_all
    for key in dict.fromkeys(key for info in infos for key in info):
        values: list[Any] = [info.get(key) for info in infos]
        first = values[0]
        alike = all(isinstance(v, Tensor) and v.shape == first.shape and v.dtype == first.dtype for v in values)
        info_of_all[key] = torch.stack(values) if alike else values
    return info_of_all


def _whose(index: Any, buffer_ids: Any) -> tuple[Tensor, Tensor]:
    """The member of each row, and its index there."""
    if not isinstance(index, Tensor | list) and hasattr(index, "keys"):
        if not isinstance(index["index"], Tensor | list):  # a batch
            index = index["index"]
        buffer_ids, index = index["buffer_ids"], index["index"]
    if buffer_ids is None:
        raise ValueError(
            "rows of an ensemble are known by member and index: pass info (or the batch) of sample, or buffer_ids"
        )
    if isinstance(index, list):
        index = torch.stack([torch.stack(one, -1) if isinstance(one, tuple) else one for one in index])
    ids = to_tensor(buffer_ids)
    return ids, to_tensor(index)
