"""`Compose`: several transforms, one after the other."""

from __future__ import annotations

import functools
import operator
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any, overload

from torch import nn

from engram import _forms as forms
from engram._arguments import BUILT_IN, describe
from engram.pytree import Key
from engram.transforms.adapters import as_transform
from engram.transforms.base import HOW_TO_DECLARE, StreamTraits, Transform, WriteRequest
from engram.transforms.roles import Role


def describe_transform(transform: Transform) -> dict[str, Any]:
    """`describe` of a transform, for a Compose of its present transforms."""
    if type(transform) is not Compose:
        return describe(transform)
    parts = [{"of": "part", "value": describe_transform(part)} for part in transform.transforms]
    return {"kind": "Compose", "arguments": {"args": parts, "kwargs": {}}}


_OF_NONE = StreamTraits(inverse_is_ordered=False, forward_is_ordered=False, flushes_all=True)
_OF_ONE = forms.record(
    {"kind": forms.text, "nth": forms.integer(), "state": forms.anything, "settings": forms.mapping_of(forms.anything)},
    {"optional": forms.boolean},
)
_STATE = forms.record({}, {"transforms": forms.list_of(_OF_ONE)})


class Compose(Transform, built_in=True):
    """Runs its transforms in order on reading, and in reverse order on writing.

    Example:
        >>> compose = Compose(lambda x: x + 1, lambda x: x * 2)
        >>> compose(3)
        8
    """

    def __init__(self, *transforms: Any) -> None:
        self.transforms = [as_transform(t) for t in transforms]

    def roles(self) -> Role:
        return functools.reduce(operator.or_, (transform.roles() for transform in self.transforms), Role.NOTHING)

    def read(self, batch: Any, loose: int = 0) -> Any:
        if not self.is_idle(batch, loose):
            return self.forward(batch)
        for transform in self.transforms:
            batch = transform.read(batch, loose)
        return batch

    def is_idle(self, batch: Any, loose: int = 0) -> bool:
        """Whether one of its transforms is."""
        return any(transform.is_idle(batch, loose) for transform in self.transforms)

    def forward(self, batch: Any) -> Any:
        for transform in self.transforms:
            batch = transform.forward(batch)
        return batch

    def __call__(self, batch: Any) -> Any:
        for transform in self.transforms:
            batch = transform(batch)
        return batch

    def _call(self, td: Any) -> Any:
        for transform in self.transforms:
            td = transform._call(td)
        return td

    def inv(self, tensordict: Any) -> Any:
        for transform in reversed(self.transforms):
            tensordict = transform.inv(tensordict)
        return tensordict

    @property
    def takes_whole_trajectories(self) -> bool:
        return any(transform.takes_whole_trajectories for transform in self.transforms)

    def inv_alone(self, batch: Any) -> Any:
        for transform in reversed(self.transforms):
            batch = transform.inv_alone(batch)
        return batch

    def acts_by_row(self, row_ndim: Callable[[Key], int | None]) -> bool:
        return all(type(t) in BUILT_IN and t.acts_by_row(row_ndim) for t in self.transforms)

    def inverse_stream(self, writing: WriteRequest) -> WriteRequest:
        for transform in reversed(self.transforms):
            writing = transform.inverse_stream(writing)
        return writing

    def flush(self, writing: WriteRequest) -> WriteRequest:
        for transform in reversed(self.transforms):
            writing = transform.flush(writing)
        return writing

    def forward_stream(self, writing: WriteRequest) -> WriteRequest:
        for transform in self.transforms:
            writing = transform.forward_stream(writing)
        return writing

    def changes_writes(self) -> bool:
        return any(t.changes_writes() for t in self.transforms)

    @property
    def stream(self) -> StreamTraits:
        streams = [transform.stream for transform in self.transforms]
        return functools.reduce(StreamTraits.and_those_of, streams) if streams else _OF_NONE

    def parts(self) -> list[Transform]:
        return [part for transform in self.transforms for part in transform.parts()]

    def append(self, transform: Any, *, invert: bool = False) -> None:
        """Adds a transform at the end."""
        self.transforms.append(as_transform(transform, invert))

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Adds a transform before the one at `index`.

        Raises:
            ValueError: the index is out of range.
        """
        n = len(self.transforms)
        if not -n <= index <= n:
            raise ValueError(f"there are {n} transforms; index must be -{n} to {n}, got {index}")
        self.transforms.insert(index, as_transform(transform, invert))

    def pop(self, index: int = -1) -> Transform:
        """Removes the transform at `index` (the last one by default) and returns it.

        Raises:
            IndexError: the index is out of range.
        """
        transform = self.transforms.pop(index)
        transform.reset_parent()
        return transform

    def close(self) -> None:
        for transform in self.transforms:
            transform.close()

    def dump(self, **settings: Any) -> None:
        for transform in self.transforms:
            transform.dump(**settings)

    def empty_cache(self) -> None:
        for transform in self.transforms:
            transform.empty_cache()

    def reset_parent(self) -> None:
        super().reset_parent()
        for transform in self.transforms:
            transform.reset_parent()

    def set_missing_tolerance(self, mode: bool = False) -> None:
        super().set_missing_tolerance(mode)
        for transform in self.transforms:
            transform.set_missing_tolerance(mode)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        yield from super().named_children()
        yield from ((f"transforms.{i}", transform) for i, transform in enumerate(self.transforms))

    def to(self, *place: Any, **settings: Any) -> Any:
        for transform in self.transforms:
            transform.to(*place, **settings)
        return self

    # ---- state ----
    def remember(self) -> list[Any]:
        return [transform.remember() for transform in self.transforms]

    def undo(self, before: list[Any]) -> None:
        for transform, state in zip(self.transforms, before, strict=True):
            transform.undo(state)

    def empty(self) -> None:
        for transform in self.transforms:
            transform.empty()

    def get_extra_state(self) -> dict[str, Any]:
        """The states of the transforms that have one, each with its kind and its position among those of that kind."""
        entries = []
        for (kind, nth), transform in self._named().items():
            state = transform.state_dict()
            if lost := transform.lost_attributes():
                warnings.warn(
                    f"{kind} has changed {', '.join(lost)} on writing, which cannot be saved: {HOW_TO_DECLARE}",
                    stacklevel=2,
                )
            if state:
                entry = {"kind": kind, "nth": nth, "state": state, "settings": transform.state_settings()}
                entries.append({**entry, "optional": True} if transform.state_is_optional() else entry)
        return {"transforms": entries} if entries else {}

    def set_extra_state(self, state: Any) -> None:
        """Restores a saved state; a transform without a saved state is reset.

        Raises:
            CheckpointMisfitError: a state belongs to a transform that does not exist here, or cannot be loaded; every
                difference is listed.
        """
        self._require_fit(state)
        own = self._named()
        fitting = [(name, entry) for name, entry in self._entries(state) if not self._misfits(own.get(name), entry)]
        saved = {name: entry["state"] for name, entry in fitting}
        for name, transform in own.items():
            if name in saved:
                transform.load_state_dict(saved[name])
            elif transform.state_dict():
                transform.load_state_dict({})

    def differences(self, state: dict[str, Any]) -> list[str]:
        """The reasons why a saved state cannot be loaded; transforms without a state do not count."""
        forms.check(_STATE, state, "the state of the transforms")
        differences, own = [], self._named()
        for name, entry in self._entries(state):
            transform = own.get(name)
            if type(transform) in BUILT_IN:
                forms.check(forms.mapping_of(forms.plain), entry["settings"], f"the settings of {entry['kind']}")
            misfits = self._misfits(transform, entry)
            if misfits and entry.get("optional", False):
                continue
            differences += misfits
            if transform is None:
                continue
            differences += transform.differences(entry["state"])
        return differences

    @staticmethod
    def _entries(state: dict[str, Any]) -> list[tuple[tuple[str, int], dict[str, Any]]]:
        """The saved states, by kind and position."""
        return [((entry["kind"], entry["nth"]), entry) for entry in state.get("transforms", [])]

    def _misfits(self, transform: Transform | None, entry: dict[str, Any]) -> list[str]:
        """The reasons why a state is not that of this transform."""
        if transform is None:
            kinds = [t.kind for t in self.transforms]
            return [f"the state of a {entry['kind']} was saved, and the transforms here are {kinds or 'none'}"]
        saved = entry["settings"]
        return [
            f"{entry['kind']} has {name}={mine!r} here, {saved.get(name)!r} there"
            for name, mine in transform.state_settings().items()
            if name not in saved or saved[name] != mine
        ]

    def _named(self) -> dict[tuple[str, int], Transform]:
        """The transforms by kind and position among those of that kind."""
        named: dict[tuple[str, int], Transform] = {}
        for transform in self.transforms:
            nth = sum(kind == transform.kind for kind, _ in named)
            named[transform.kind, nth] = transform
        return named

    # ---- a list of transforms ----
    def __len__(self) -> int:
        return len(self.transforms)

    @overload
    def __getitem__(self, index: int) -> Transform: ...
    @overload
    def __getitem__(self, index: slice) -> Compose: ...
    def __getitem__(self, index: int | slice) -> Transform:
        return Compose(*self.transforms[index]) if isinstance(index, slice) else self.transforms[index]

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)

    def __repr__(self) -> str:
        if not self.transforms:
            return "Compose()"
        inner = ",\n".join(textwrap.indent(repr(t), "    ") for t in self.transforms)
        return f"Compose(\n{inner})"
