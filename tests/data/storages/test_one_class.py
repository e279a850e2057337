"""All behaviour of storages is in one class: what differs between them is their place, and their rows."""

import inspect

from engram.data import LazyMemmapStorage, LazyTensorStorage, Storage, StorageEnsemble

# A storage of storages hands out members where others hand out rows.
OF_MEMBERS = {"__getitem__", "attach", "contains", "get", "register_load_hook", "register_save_hook", "set", "__repr__"}
OF_MEMBERS |= {"_after_fork", "_copy_form", "__len__", "_is_full", "initialized", "release"}


def children(kind: type) -> list[type]:
    found = [child for child in kind.__subclasses__() if child.__module__.startswith("engram.data.")]
    return found + [grandchild for child in found for grandchild in children(child)]


def methods(kind: type) -> dict[str, object]:
    kinds = property | classmethod | staticmethod
    return {name: one for name, one in vars(kind).items() if inspect.isroutine(one) or isinstance(one, kinds)}


def test_no_class_overrides_a_method_of_storage():
    named = methods(Storage).keys() - {"__init__"}
    found = {kind: methods(kind).keys() & named for kind in children(Storage)}
    assert found.pop(StorageEnsemble) == OF_MEMBERS
    assert {kind: names for kind, names in found.items() if names} == {
        LazyTensorStorage: {"get"}, LazyMemmapStorage: {"get"},
    }  # fmt: skip


def test_a_get_with_another_name_for_its_argument_does_the_same():
    assert LazyTensorStorage.get.__code__.co_code == Storage.get.__code__.co_code
    assert LazyMemmapStorage.get is Storage.get
