"""What a transform is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from engram.transforms.attributes import MEMORY, Memory, snapshot
from engram.transforms.entries import Key, Keys, as_keys, get, put, shallow
from engram.transforms.in_env import InEnvironment
from engram.transforms.specs import EnvSpecs, tried
from engram.transforms.writing import Writing


class Transform(InEnvironment):
    """Changes batches: `forward` when they are read, `inv` when they are written.

    A plain callable will do too: a buffer calls it on reading. Children that work entry by entry implement
    `_apply_transform(value)` and `_inv_apply_transform(value)`; others override `forward` and `inv`, or `_call` and
    `_inv_call`, which do the same in buffers.

    Args:
        in_keys: entries that `forward` reads; nested keys are tuples.
        out_keys: where it puts the results; where these differ from `in_keys` the source stays. `in_keys`.
        in_keys_inv: entries as they are stored, which `inv` makes.
        out_keys_inv: the same entries as the caller knows them, which `inv` reads. `in_keys_inv`.

    Batches are TensorDicts, nested dicts or tensorclasses. `forward` sets entries of the batch that it gets (a buffer
    gives it a fresh copy) and changes nothing that the transform knows, so that threads may prepare batches; `inv`
    returns a batch of its own with the other leaves of the caller's, None for nothing yet, or another number of steps:
    those are written. A transform that carries something from one written batch to the next does so in `write` and
    `stream`, or in `_inv_call` and attributes, which are then saved and undone like those of a `ForeignTransform`.
    What a transform does in an environment, and what children can change of that, says `InEnvironment`.

    Example:
        >>> class Double(Transform):
        ...     def _apply_transform(self, value):
        ...         return value * 2
        >>> double = Double(in_keys=["x", ("next", "x")])
        >>> batch = {"x": torch.ones(3), "next": {"x": torch.zeros(3)}}
        >>> double(batch)["x"]
        tensor([2., 2., 2.])
    """

    in_keys: Sequence[Key] = ()
    out_keys: Sequence[Key] = ()
    in_keys_inv: Sequence[Key] = ()
    out_keys_inv: Sequence[Key] = ()

    #: Whether what `write` (`stream`) does depends on the batches before: whole writes then follow each other, and
    #: one that is refused is undone by `load_state_dict`.
    write_in_order = False
    stream_in_order = False

    #: Whether `flush` gives all that is held back.
    can_flush = True

    _inverts_by_call = False  # whether `_inv_call` does the work of `inv`
    _has_memory = False  # whether an inverse that knows nothing of buffers may carry anything in attributes

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        by_call = cls._inv_call is not Transform._inv_call and cls.inv is Transform.inv
        if by_call and not cls._inverts_by_call:
            cls._inverts_by_call = cls._has_memory = cls.write_in_order = True
            cls.can_flush = cls.flush is not Transform.flush

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        self.in_keys, self.out_keys = _pair(in_keys, out_keys, "")
        self.in_keys_inv, self.out_keys_inv = _pair(in_keys_inv, out_keys_inv, "_inv")

    # ---- reading ----
    def forward(self, batch: Any) -> Any:
        """The batch as the caller shall see it.

        Raises:
            KeyError: an entry is missing; the message names it.
            TypeError: the batch has no keys.
        """
        if type(batch) is list:
            return [self.forward(item) for item in batch]
        kind = type(self)
        if kind._call is not Transform._call and kind.forward is Transform.forward:
            return self._call(batch)  # a child written for environments
        for source, target in self._pairs(batch):
            put(batch, target, self._apply_transform(get(batch, source, type(self).__name__)))
        return batch

    def _pairs(self, batch: Any) -> list[tuple[Key, Key]]:
        """Which entries `forward` reads and where it puts them."""
        return list(zip(self.in_keys, self.out_keys, strict=True))

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value

    def __call__(self, batch: Any) -> Any:
        """`forward`; transforms that learn from data also learn from this batch."""
        return self.forward(batch)

    # ---- environments ----
    def _call(self, td: TensorDictBase) -> TensorDictBase:
        return self._by_key(td) if type(self).forward is Transform.forward else self.forward(td)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        return self.inv(td)

    def _inverts(self) -> bool:
        kind = type(self)
        return bool(self.in_keys_inv) or kind.inv is not Transform.inv or kind._inv_call is not Transform._inv_call

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        kind = type(self)
        is_keyed = all(getattr(kind, name) is getattr(Transform, name) for name in _OF_VALUES)
        says_specs = any(getattr(kind, name) is not getattr(Transform, name) for name in _OF_SPECS)
        return super().transform_specs(specs) if is_keyed or says_specs else tried(self, specs)

    # ---- writing ----
    def inv(self, batch: Any) -> Any:
        """The batch as it shall be stored; gets the caller's own object. Errors as those of `forward`."""
        if not self.in_keys_inv and not self._inverts_by_call:
            return batch
        if type(batch) is list:
            return [self.inv(item) for item in batch]
        batch = shallow(batch)
        if self._inverts_by_call:
            return self._inv_call(batch)
        values = [self._inv_apply_transform(get(batch, key, type(self).__name__)) for key in self.out_keys_inv]
        for target, value in zip(self.in_keys_inv, values, strict=True):
            put(batch, target, value)
        return batch

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value

    def write(self, writing: Writing) -> Writing:
        """What a buffer calls on writing: `inv`, for batches that follow each other."""
        if not self._has_memory:
            return writing.inverted(self.inv, self, self._inv_leaving_nothing if self.write_in_order else self.inv)
        if writing.in_place and self._memory.holds_back:
            raise TypeError(
                f"{self.kind} holds steps back, so that what replaces stored steps cannot go through it; write to "
                "rb.storage, past the transforms"
            )
        whole, before = writing.as_steps(), snapshot(self._owner)
        made = whole.inverted(self.inv, self, self._inv_leaving_nothing)
        self._memory.note(self._owner, before, made.steps_differ_from(whole))
        return made if made.resized else made.in_form_of(writing)

    def changes_what_is_written(self) -> bool:
        """Whether what is stored is not what the caller writes."""
        return self._inverts()

    def _inv_leaving_nothing(self, batch: Any) -> Any:
        """`inv` of what is no next piece."""
        before = self.remember()
        try:
            return self.inv(batch)
        finally:
            self.undo(before)

    def stream(self, writing: Writing) -> Writing:
        """What a buffer calls on writing where the transform was appended with `invert=True`: `forward`."""
        return writing.changed(self.forward)

    def flush(self, writing: Writing) -> Writing:
        """`write`, after which nothing is held back: what `writing` has, if anything, is the last for now.

        Raises:
            TypeError: it holds steps back, and does not say how to get them.
        """
        if self._has_memory and self._memory.holds_back:
            raise TypeError(
                f"{self.kind} holds steps back, and nobody but itself knows how to ask for them: use "
                "engram.envs.MultiStepTransform, or a child of engram.envs.Transform with `flush`"
            )
        return writing if writing.items is None else self.write(writing)

    # ---- state ----
    @property
    def _memory(self) -> Memory:
        found: Memory = self.__dict__.setdefault(MEMORY, Memory())
        return found

    @property
    def _owner(self) -> Any:
        """Whose attributes the inverse changes."""
        return self

    def remember(self) -> Any:
        """What `undo` needs; nothing of it is changed in place later."""
        return self._memory.remember(self._owner) if self._remembers() else self.state_dict()

    def undo(self, before: Any) -> None:
        """Goes back to what it was, after a write that was refused."""
        if self._remembers():
            self._memory.undo(self._owner, before)
        elif before or self.state_dict():
            self.load_state_dict(before)

    def _remembers(self) -> bool:
        return self._has_memory and type(self).state_dict is Transform.state_dict

    def empty(self) -> None:
        """Forgets what is carried to the next written batch; called when the buffer is emptied."""
        if self._has_memory and self._memory.holds_back:
            self._memory.forget(self._owner)

    def state_dict(self) -> dict[str, Any]:
        """What must be saved; values are never changed in place later. Empty for transforms without state."""
        return self._memory.state_dict(self._owner, self.kind) if self._has_memory else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state."""
        if self._has_memory:
            self._memory.load_state_dict(self._owner, state)

    def differences(self, state: dict[str, Any]) -> list[str]:
        """Why a saved state cannot be loaded; empty: it can."""
        return self._memory.differences(self._owner, self.kind, state) if self._has_memory else []

    #: Attributes without which a state means nothing: saved beside it, and it is only loaded where they are the same.
    _decisive: tuple[str, ...] = ("in_keys", "out_keys")

    def decisive(self) -> dict[str, Any]:
        """The settings that a state belongs to."""
        return {name: getattr(self, name) for name in self._decisive}

    @property
    def kind(self) -> str:
        """The name that its state is saved under."""
        return type(self).__name__

    def _settings(self) -> dict[str, Any]:
        """What `repr` shows besides keys."""
        return {}

    def __repr__(self) -> str:
        said = {**self._settings()}
        if self.in_keys:
            said["in_keys"] = list(self.in_keys)
            if self.out_keys != self.in_keys:
                said["out_keys"] = list(self.out_keys)
        if self.in_keys_inv:
            said["in_keys_inv"] = list(self.in_keys_inv)
            if self.out_keys_inv != self.in_keys_inv:
                said["out_keys_inv"] = list(self.out_keys_inv)
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in said.items())})"


_OF_VALUES = ("forward", "_call", "_reset", "_step")
_OF_SPECS = tuple(f"transform_{name}_spec" for name in ("observation", "action", "reward", "done"))


def _pair(sources: Keys, targets: Keys, suffix: str) -> tuple[list[Key], list[Key]]:
    ins = as_keys(sources)
    outs = list(ins) if targets is None else as_keys(targets)
    if len(ins) != len(outs):
        raise ValueError(f"in_keys{suffix} has {len(ins)} keys, out_keys{suffix} {len(outs)}: {ins} and {outs}")
    if len(set(outs)) < len(outs) or (suffix and len(set(ins)) < len(ins)):
        raise ValueError(f"a key is named twice as a target: {ins if suffix else outs}")
    return ins, outs


class InvertedTransform(Transform):
    """A transform the other way round: `inv` on reading, `forward` on writing."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        self.write_in_order = transform.stream_in_order
        self.stream_in_order = transform.write_in_order

    def for_env(self, specs: EnvSpecs) -> Any:
        raise TypeError(f"{self!r} is for buffers; in an environment exchange in_keys and in_keys_inv instead")

    def forward(self, batch: Any) -> Any:
        return self.transform.inv(batch)

    def inv(self, batch: Any) -> Any:
        return self.transform.forward(shallow(batch))

    def write(self, writing: Writing) -> Writing:
        return self.transform.stream(writing.changed(shallow))

    def stream(self, writing: Writing) -> Writing:
        return self.transform.write(writing)

    def changes_what_is_written(self) -> bool:
        return True

    def remember(self) -> Any:
        return self.transform.remember()

    def undo(self, before: Any) -> None:
        self.transform.undo(before)

    def empty(self) -> None:
        self.transform.empty()

    def state_dict(self) -> dict[str, Any]:
        return self.transform.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.transform.load_state_dict(state)

    def differences(self, state: dict[str, Any]) -> list[str]:
        return self.transform.differences(state)

    def decisive(self) -> dict[str, Any]:
        return self.transform.decisive()

    @property
    def kind(self) -> str:
        return f"inverted {self.transform.kind}"

    def __repr__(self) -> str:
        return f"inverted {self.transform}"
