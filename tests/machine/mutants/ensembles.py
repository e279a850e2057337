"""Ensembles that are wrong by one."""

from __future__ import annotations

from typing import Any

from engram import _native
from engram.data import SamplerEnsemble, StorageEnsemble, WriterEnsemble
from engram.data.replay_buffers.reading import reader
from machine.mutants.base import Patch, around


def draws_the_next_member(choose: Any, sampler: Any, n: int) -> Any:
    ids, each = choose()
    return [(i + 1) % len(sampler) for i in ids], each


def names_the_next_member(patch: Patch) -> None:
    original = reader.ids_of
    patch.setattr(reader, "ids_of", lambda ids, n: 1 - original(ids, n))
    joint = _native.joint_index

    def named(drawn: Any, ids: Any) -> Any:
        both = joint(drawn, ids)
        return both and (both[0], 1 - both[1])

    patch.setattr(_native, "joint_index", named)


def updates_the_next_member(update: Any, sampler: Any, index: Any, *rest: Any, **more: Any) -> None:
    update({**index, "buffer_ids": (index["buffer_ids"] + 1) % len(sampler)}, *rest, **more)


def saves_from_the_second(state: Any, storage: Any) -> Any:
    saved = state()
    return {**saved, "members": saved["members"][1:] + saved["members"][:1]}


def cursors_from_the_second(patch: Patch) -> None:
    original = WriterEnsemble._cursor.fget
    patch.setattr(WriterEnsemble, "_cursor", property(lambda writer: original(writer)[::-1]))


ENSEMBLE_MUTANTS = {
    "draws from the next member": around(SamplerEnsemble, "choose", draws_the_next_member),
    "info that names the next member": names_the_next_member,
    "priorities that go to the next member": around(SamplerEnsemble, "update_priority", updates_the_next_member),
    "storages that are saved from the second on": around(StorageEnsemble, "state_dict", saves_from_the_second),
    "cursors that are those of the next member": cursors_from_the_second,
}
