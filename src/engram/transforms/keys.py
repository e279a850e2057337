"""Transforms that rename, keep and remove entries."""

from __future__ import annotations

from typing import Any

from engram.transforms.base import Transform
from engram.transforms.entries import Key, Keys, as_key, drop, find, get, has_keys, is_class, missing, put, shallow

_REWARDS: list[Key] = ["reward", ("next", "reward")]
_FLAGS = ("done", "terminated", "truncated")
_DONES: list[Key] = [*_FLAGS, *(("next", flag) for flag in _FLAGS)]
# What a buffer puts into a batch, and needs again for an update of priorities.
_ATTACHED: list[Key] = ["index", "generation", "priority_weight"]


class RenameTransform(Transform):
    """Entries under other names.

    Args:
        in_keys, out_keys: on reading, entries and their new names.
        in_keys_inv, out_keys_inv: on writing, `out_keys_inv` are the names in the caller's data, which are stored as
            `in_keys_inv`.
        create_copy: the old names stay, too.

    Raises:
        KeyError: there is no such entry, or one of the new name exists already.

    Example:
        >>> rename = RenameTransform(["observation"], ["state"], ["observation"], ["state"])
        >>> rename({"observation": torch.zeros(3)})
        {'state': tensor([0., 0., 0.])}
        >>> rename.inv({"state": torch.zeros(3)})
        {'observation': tensor([0., 0., 0.])}
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        create_copy: bool = False,
    ) -> None:
        if out_keys is None or (in_keys_inv is None) != (out_keys_inv is None):
            raise ValueError("RenameTransform needs the new names: out_keys, and out_keys_inv beside in_keys_inv")
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.create_copy = create_copy

    def forward(self, batch: Any) -> Any:
        if type(batch) is list:
            return [self.forward(item) for item in batch]
        return self._renamed(batch, list(self.in_keys), list(self.out_keys))

    def inv(self, batch: Any) -> Any:
        if type(batch) is list:
            return [self.inv(item) for item in batch]
        if not self.in_keys_inv:
            return batch
        return self._renamed(shallow(batch), list(self.out_keys_inv), list(self.in_keys_inv))

    def _renamed(self, batch: Any, old: list[Key], new: list[Key]) -> Any:
        values = [get(batch, key, "RenameTransform") for key in old]
        for key in new:
            if key not in old and find(batch, key) is not None:
                raise KeyError(f"RenameTransform would lose {key!r}, which the batch has already; exclude it first")
        if not self.create_copy:
            for key in old:
                drop(batch, key)
        for key, value in zip(new, values, strict=True):
            put(batch, key, value)
        return batch

    def _settings(self) -> dict[str, Any]:
        return {"create_copy": True} if self.create_copy else {}


class SelectTransform(Transform):
    """Keeps these entries of what is read; and what a buffer adds to its samples (`"index"`, ...).

    Args:
        selected_keys: entries, also whole parts (`"next"`).
        keep_rewards, keep_dones: rewards, and the flags done, terminated and truncated, stay as well.

    Example:
        >>> batch = {"a": torch.zeros(3), "b": torch.ones(3), "done": torch.zeros(3, 1, dtype=torch.bool)}
        >>> list(SelectTransform("a")(batch))
        ['a', 'done']
    """

    def __init__(self, *selected_keys: Key, keep_rewards: bool = True, keep_dones: bool = True) -> None:
        super().__init__()
        self.selected_keys = [as_key(key) for key in selected_keys]
        self.keep_rewards, self.keep_dones = keep_rewards, keep_dones

    def forward(self, batch: Any) -> Any:
        if type(batch) is list:
            return [self.forward(item) for item in batch]
        wanted = [(key, get(batch, key, "SelectTransform")) for key in self.selected_keys]
        also = _ATTACHED + (_REWARDS if self.keep_rewards else []) + (_DONES if self.keep_dones else [])
        wanted += [(key, value) for key in also if (value := find(batch, key)) is not None]
        if is_class(batch):
            raise TypeError(f"{type(batch).__name__} cannot lose fields; store TensorDicts instead")
        kept: Any = {} if isinstance(batch, dict) else batch.select()
        for key, value in wanted:
            put(kept, key, value)
        return kept

    def _settings(self) -> dict[str, Any]:
        return {"keys": self.selected_keys}


class ExcludeTransform(Transform):
    """Removes these entries from what is read, where they exist.

    Args:
        excluded_keys: entries, also whole parts (`"next"`).
        inverse: removes them from what is written instead.

    Example:
        >>> ExcludeTransform("b")({"a": torch.zeros(3), "b": torch.ones(3)})
        {'a': tensor([0., 0., 0.])}
    """

    def __init__(self, *excluded_keys: Key, inverse: bool = False) -> None:
        super().__init__()
        self.excluded_keys = [as_key(key) for key in excluded_keys]
        self.inverse = inverse

    def forward(self, batch: Any) -> Any:
        return batch if self.inverse else self._excluded(batch)

    def inv(self, batch: Any) -> Any:
        return self._excluded(batch) if self.inverse else batch

    def _excluded(self, batch: Any) -> Any:
        if type(batch) is list:
            return [self._excluded(item) for item in batch]
        if not has_keys(batch):
            raise missing(batch, self.excluded_keys, "ExcludeTransform")
        batch = shallow(batch)
        for key in self.excluded_keys:
            if find(batch, key) is not None:
                drop(batch, key)
        return batch

    def _settings(self) -> dict[str, Any]:
        return {"keys": self.excluded_keys, **({"inverse": True} if self.inverse else {})}
