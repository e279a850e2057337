"""What every transform must do."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer, ReplayBufferEnsemble
from engram.testing.comparing import assert_equal
from engram.testing.numbered import of_numbers
from engram.testing.transform_env import TransformInEnvContract
from engram.transforms import Compose, Transform
from engram.transforms.foreign import as_transform


def as_dict(batch: TensorDictBase) -> dict[str, Any]:
    return {k: as_dict(v) if isinstance(v, TensorDictBase) else v for k, v in batch.items()}


def leading(batch: TensorDictBase, shape: tuple[int, ...]) -> bool:
    return all(tuple(v.shape[: len(shape)]) == shape for v in batch.values(True, True))


class TransformContract(TransformInEnvContract):
    """Of a `Transform`, or of a callable that a buffer applies on reading. Inherit, and implement `make`.

    It is tried in buffers, and in environments that play `batch`; `environments = False` if it is not for them, and
    `make_for_env` if it has other keys there.

    Example:
        >>> def halved(batch):
        ...     batch["obs"] = batch["obs"] / 2
        ...     return batch
        >>> class TestHalved(TransformContract):
        ...     in_place = True
        ...     def make(self):
        ...         return halved
    """

    #: Whether it changes the batch that it is given, on writing too.
    in_place = False
    #: Whether it takes dicts besides TensorDicts.
    dicts = True
    #: Whether it takes lists of items, which is what `rb[:]` gives it with a ListStorage.
    lists = True

    def make(self) -> Any:
        """A fresh transform, the same each time."""
        raise NotImplementedError

    def batch(self, *shape: int) -> TensorDict:
        """Data of this shape as `extend` gets them, the same each time; a trajectory ends with each last step."""
        data = of_numbers(torch.arange(math.prod(shape)).reshape(shape))
        data["next", "reward"] = data["next", "reward"].float()
        data["next", "done"] = torch.zeros(*shape, 1, dtype=torch.bool)
        data["next", "done"][..., -1:, :] = True
        return data

    def _made(self) -> Transform:
        return as_transform(self.make())

    def prepared(self) -> Transform:
        """A transform that has seen data."""
        transform = self._made()
        rb = ReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
        rb.extend(self.batch(6))
        return transform

    # ---- reading ----
    @pytest.mark.parametrize("shape", [(6,), (3, 4), (2, 3, 4)])
    def test_leading_dimensions_are_kept(self, shape: tuple[int, ...]) -> None:
        out = self.prepared().forward(self.batch(*shape))
        assert tuple(out.batch_size) == shape and leading(out, shape)

    @pytest.mark.parametrize("shape", [(6,), (3, 4)])
    def test_dicts_are_changed_as_tensordicts_are(self, shape: tuple[int, ...]) -> None:
        if not self.dicts:
            pytest.skip("it takes no dicts")
        transform = self.prepared()
        found = transform.forward(as_dict(self.batch(*shape)))
        assert type(found) is dict
        assert_equal(found, transform.forward(self.batch(*shape)))

    def test_reading_changes_nothing_that_the_transform_knows(self) -> None:
        transform = self.prepared()
        before = copy.deepcopy(transform.state_dict())
        first = transform.forward(self.batch(5))
        assert_equal(transform.forward(self.batch(5)), first)
        assert_equal(transform.state_dict(), before)

    @pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage])
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_reading_changes_nothing_that_is_stored(self, storage: Any, prefetch: int) -> None:
        rb = ReplayBuffer(storage=storage(50), transform=self.make(), batch_size=4, prefetch=prefetch)
        rb.extend(self.batch(8))
        before = [copy.deepcopy(rb.storage.get([i])) for i in range(len(rb))]
        for _ in range(3):
            rb.sample()
            rb[0]
            if self.lists or storage is not ListStorage:
                rb[:]
        for i, row in enumerate(before):
            found = rb.storage.get([i])
            assert_equal(found[0] if isinstance(found, list) else found, row[0] if isinstance(row, list) else row)

    # ---- writing ----
    @pytest.mark.parametrize("way", ["transform=", "append", "insert", "nested", "_transform", "a member's"])
    def test_a_buffer_stores_what_its_inverse_makes(self, way: str) -> None:
        transform = self.make()
        given_now = {"transform=": transform, "nested": Compose(Compose(transform)), "a member's": transform}.get(way)
        rb = ReplayBuffer(storage=LazyTensorStorage(50), transform=given_now)
        if way == "append":
            rb.append_transform(transform)
        elif way == "insert":
            rb.insert_transform(0, transform)
        elif way == "_transform":
            rb._transform = transform
        elif way == "a member's":
            rb = ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(9)), rb)[1]
        rb.extend(self.batch(6))
        assert_equal(rb.storage.get(slice(None)), self._made().inv(self.batch(6)))

    def test_writing_leaves_the_callers_batch_as_it_was(self) -> None:
        if self.in_place:
            pytest.skip("it changes what it is given")
        transform, given_batch, expected = self._made(), self.batch(6), self.batch(6)
        rb = ReplayBuffer(storage=LazyTensorStorage(50), transform=transform)
        rb.extend(given_batch)
        self._made().inv(given_batch)
        assert_equal(given_batch, expected)
        other = ReplayBuffer(storage=LazyTensorStorage(50))
        other.append_transform(self.prepared(), invert=True)
        other.extend(given_batch)
        assert_equal(given_batch, expected)

    @pytest.mark.parametrize("invert", [False, True])
    def test_a_refused_write_changes_neither_the_buffer_nor_the_transform(self, invert: bool) -> None:
        rb = ReplayBuffer(storage=LazyTensorStorage(50))
        transform = self.prepared()
        rb.append_transform(transform, invert=invert)
        rb.extend(self.batch(6))
        before, n = copy.deepcopy(transform.state_dict()), len(rb)
        bad = self.batch(6)
        bad["next", "reward"] = bad["next", "reward"].double()
        with pytest.raises(ValueError, match="reward"):
            rb.extend(bad)
        assert len(rb) == n
        assert_equal(transform.state_dict(), before)
        rb.extend(self.batch(6))

    # ---- state ----
    def test_a_saved_state_goes_on_the_same(self, tmp_path: Path) -> None:
        one, other = self.prepared(), self._made()
        other.load_state_dict(pickle.loads(pickle.dumps(one.state_dict())))
        assert_equal(other.state_dict(), one.state_dict())
        assert_equal(other.forward(self.batch(5)), one.forward(self.batch(5)))
        rb, twin = (ReplayBuffer(storage=LazyTensorStorage(50), transform=self.make()) for _ in range(2))
        rb.extend(self.batch(6))
        rb.dumps(tmp_path)
        twin.loads(tmp_path)
        for buffer in (rb, twin):
            buffer.extend(self.batch(6))
        assert_equal(twin._transform.state_dict(), rb._transform.state_dict())
        assert_equal(twin[:], rb[:])

    def test_it_can_be_sent_to_another_process(self) -> None:
        transform = self.prepared()
        sent = pickle.loads(pickle.dumps(transform))
        assert type(sent) is type(transform) and repr(sent) == repr(transform)
        assert_equal(sent.forward(self.batch(5)), transform.forward(self.batch(5)))

    def test_it_works_within_a_compose(self) -> None:
        transform = self.prepared()
        assert_equal(Compose(transform).forward(self.batch(5)), transform.forward(self.batch(5)))

    def test_it_says_what_it_is(self) -> None:
        made = self.make()
        name = getattr(made, "__name__", type(made).__name__)
        assert name in repr(self._made()) and repr(self._made()) in repr(Compose(made))
