"""Transforms that rename, select and exclude entries."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from tensordict import TensorDictBase

from engram.pytree import (
    Key,
    Keys,
    as_key,
    copy_containers,
    get_tensor,
    has_keys,
    is_tensorclass,
    key_path,
    leaf_keys,
    missing_key_error,
    remove_entry,
    require_tensor,
    set_entry,
)
from engram.transforms.base import Transform, has_entries, root_key
from engram.transforms.env_specs import FLAGS, RESULT_KEYS, EnvSpecs, filter_leaves, is_within
from engram.transforms.roles import Role

# Entries that a buffer adds to a batch, and needs for updates of priorities.
_ATTACHED: list[Key] = ["index", "generation", "priority_weight"]


class RenameTransform(Transform, built_in=True):
    """Renames entries.

    Args:
        in_keys, out_keys: on reading, entries and their new names.
        in_keys_inv, out_keys_inv: on writing, `out_keys_inv` are the names in the caller's data, which are stored as
            `in_keys_inv`.
        create_copy: keep the entries under their old names, too.

    Raises:
        KeyError: an entry does not exist, or the new name exists already.

    In an environment it renames observations; a reward or flag can only be copied, and the action keeps its name.

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

    def _call(self, td: TensorDictBase) -> TensorDictBase:
        present = [(old, new) for old, new in self._env_pairs if td.get(old, None) is not None]
        return self._renamed(td, [old for old, _ in present], [new for _, new in present])

    def roles(self) -> Role:
        reading = Role.READING | Role.ENVIRONMENT if self.in_keys else Role.NOTHING
        return reading | (Role.WRITING if self.in_keys_inv else Role.NOTHING)

    def has_written(self, batch: Any) -> bool | None:
        return has_entries(batch, [key for key in self.in_keys_inv if key not in self.out_keys_inv])

    def _inverts(self) -> bool:
        return bool(self.in_keys_inv)

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        old, new = [source for source, _ in self._env_pairs], [target for _, target in self._env_pairs]
        specs.require(old, "RenameTransform")
        results = specs.result_keys
        reserved = [key for key in old if key in results and not self.create_copy]
        reserved += [key for key in new if key in (*RESULT_KEYS, *results)]
        if reserved:
            raise ValueError(
                f"RenameTransform changes {reserved}: rewards and flags of an environment keep their names"
            )
        if len(set(old)) < len(old):
            raise ValueError(f"RenameTransform gives an entry two names in an environment: {self._env_pairs}")
        lost = [key for key in new if key not in old and specs.entry(key) is not None]
        if lost:
            raise KeyError(f"RenameTransform would lose {lost}, which the environment has already; exclude it first")
        self._mapped_action(specs.action, lambda spec: spec)  # raises if the action would be renamed
        renamed = {target: specs.entry(source) for source, target in self._env_pairs}
        if not self.create_copy:
            removed = set(old)
            specs = specs._replace(observation=filter_leaves(specs.observation, lambda key: key not in removed))
        return specs.with_entries(renamed)  # type: ignore[arg-type]

    def inv(self, tensordict: Any) -> Any:
        if type(tensordict) is list:
            return [self.inv(item) for item in tensordict]
        if not self.in_keys_inv:
            return tensordict
        return self._renamed(copy_containers(tensordict), list(self.out_keys_inv), list(self.in_keys_inv))

    def _renamed(self, batch: Any, old: list[Key], new: list[Key]) -> Any:
        values = [require_tensor(batch, key, "RenameTransform") for key in old]
        for key in new:
            if key not in old and get_tensor(batch, key) is not None:
                raise KeyError(f"RenameTransform would lose {key!r}, which the batch has already; exclude it first")
        if not self.create_copy:
            for key in old:
                remove_entry(batch, key)
        for key, value in zip(new, values, strict=True):
            set_entry(batch, key, value)
        return batch

    def _settings(self) -> dict[str, Any]:
        return {"create_copy": True} if self.create_copy else {}


class SelectTransform(Transform, built_in=True):
    """Keeps only these entries on reading, and those that a buffer adds to its samples (`"index"`, ...).

    Args:
        selected_keys: entries, or whole sub-batches (`"next"`).
        keep_rewards, keep_dones: also keep rewards, and the flags done, terminated and truncated.

    In an environment the keys are observations; rewards and flags always stay.

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
        entries = [(key, require_tensor(batch, key, "SelectTransform")) for key in self.selected_keys]
        names = (["reward"] if self.keep_rewards else []) + ([*FLAGS] if self.keep_dones else [])
        also = [*_ATTACHED, *(key for key in leaf_keys(batch) if key_path(key)[-1] in names)]
        entries += [(key, value) for key in also if (value := get_tensor(batch, key)) is not None]
        if is_tensorclass(batch):
            raise TypeError(f"{type(batch).__name__} cannot lose fields; store TensorDicts instead")
        selected: Any = {} if isinstance(batch, dict) else batch.select()
        for key, value in entries:
            set_entry(selected, key, value)
        return selected

    def acts_by_row(self, row_ndim: Callable[[Key], int | None]) -> bool:
        return True

    def does_the_same(self, other: Transform) -> bool:
        return self._has_settings_of(other)

    @cached_property
    def _selected_roots(self) -> list[Key]:
        return [key for key in dict.fromkeys(map(root_key, self.selected_keys)) if key != "action"]

    def _call(self, td: TensorDictBase) -> TensorDictBase:
        return td.select(*self._selected_roots, *self._results, strict=False)

    _results: Sequence[Key] = RESULT_KEYS

    def for_env(self, specs: EnvSpecs) -> SelectTransform:
        own = copy.copy(self)
        vars(own).update(_results=specs.result_keys)
        return own

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        if not (self.keep_rewards and self.keep_dones):
            raise ValueError("an environment's rewards and flags stay: leave keep_rewards and keep_dones True")
        available = [*specs.observation.leaves(), *specs.result_keys]
        for key in self._selected_roots:
            if not any(is_within(leaf, key) for leaf in available):
                raise KeyError(f"SelectTransform needs the key {key!r}; the environment has {available}")
        selected = filter_leaves(
            specs.observation, lambda leaf: any(is_within(leaf, key) for key in self._selected_roots)
        )
        return specs._replace(observation=selected)

    def _settings(self) -> dict[str, Any]:
        return {"keys": self.selected_keys}


class ExcludeTransform(Transform, built_in=True):
    """Removes these entries on reading, where they exist.

    Args:
        excluded_keys: entries, or whole sub-batches (`"next"`).
        inverse: remove them on writing instead.

    In an environment the keys are observations; rewards and flags always stay.

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

    def acts_by_row(self, row_ndim: Callable[[Key], int | None]) -> bool:
        return True

    def does_the_same(self, other: Transform) -> bool:
        return self._has_settings_of(other)

    def inv(self, tensordict: Any) -> Any:
        return self._excluded(tensordict) if self.inverse else tensordict

    @cached_property
    def _excluded_roots(self) -> list[Key]:
        return list(dict.fromkeys(map(root_key, self.excluded_keys)))

    def _call(self, td: TensorDictBase) -> TensorDictBase:
        return td if self.inverse else td.exclude(*self._excluded_roots)

    def roles(self) -> Role:
        return Role.WRITING if self.inverse else Role.READING | Role.ENVIRONMENT

    def has_written(self, batch: Any) -> bool | None:
        return self.has_changed(batch) if self.inverse else None

    def has_changed(self, batch: Any) -> bool | None:
        return not any(get_tensor(batch, key) is not None for key in self.excluded_keys) if has_keys(batch) else None

    def _inverts(self) -> bool:
        return self.inverse

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        excluded = self._excluded_roots
        if self.inverse:
            return specs
        results = specs.result_keys
        if reserved := [key for key in excluded if any(is_within(result, key) for result in results)]:
            raise ValueError(f"ExcludeTransform would remove {reserved}: an environment's rewards and flags stay")
        remaining = filter_leaves(specs.observation, lambda leaf: not any(is_within(leaf, key) for key in excluded))
        return specs._replace(observation=remaining)

    def _excluded(self, batch: Any) -> Any:
        if type(batch) is list:
            return [self._excluded(item) for item in batch]
        if not has_keys(batch):
            raise missing_key_error(batch, self.excluded_keys, "ExcludeTransform")
        batch = copy_containers(batch)
        for key in self.excluded_keys:
            if get_tensor(batch, key) is not None:
                remove_entry(batch, key)
        return batch

    def _settings(self) -> dict[str, Any]:
        return {"keys": self.excluded_keys, **({"inverse": True} if self.inverse else {})}
