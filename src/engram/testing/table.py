"""What storages with a fixed layout must do besides: live views, and refusals that name the leaf."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram.data import ReplayBuffer
from engram.testing.numbered import numbers, steps
from engram.testing.storage import StorageContract

EXOTIC = ["sparse", "sparse_csr", "meta", "nested", "quantised", "FakeTensor"]


def exotic(kind: str) -> Any:
    """Three of a tensor that is not plain memory."""
    if kind == "FakeTensor":
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            return torch.zeros(3, 3)
    if kind == "nested":
        return torch.nested.nested_tensor([torch.zeros(3)] * 3)
    if kind == "quantised":
        return torch.quantize_per_tensor(torch.zeros(3, 3), 0.1, 0, torch.quint8)
    if kind == "meta":
        return torch.zeros(3, 3, device="meta")
    return torch.zeros(3, 3).to_sparse() if kind == "sparse" else torch.zeros(3, 3).to_sparse_csr()


class TableContract(StorageContract):
    """Of a storage whose first batch decides the layout of all rows. Inherit, and implement `make`."""

    #: Whether `make` gives a storage whose layout the first batch decides.
    fresh = True

    def test_the_first_batch_decides_the_layout(self, rb: ReplayBuffer, storage: Any) -> None:
        rb.extend(steps(0, 3))
        paths = {leaf.path: (leaf.dtype, leaf.shape) for leaf in storage.layout.leaves}
        assert paths == {
            ("n",): (torch.int64, ()),
            ("obs",): (torch.float32, (3,)),
            ("done",): (torch.bool, (1,)),
            ("next", "reward"): (torch.float64, (1,)),
            ("next", "small"): (torch.int8, ()),
        }

    def test_a_slice_of_the_storage_is_a_live_view(self, rb: ReplayBuffer, storage: Any) -> None:
        for before in (0, 13):
            rb.empty()
            rb.extend(steps(100, 100 + before)) if before else None
            rb.extend(steps(0, 6))
            view = storage[2:5]
            now = numbers(view)
            rb[2:5] = steps(70, 73)
            assert numbers(view) == [70, 71, 72] != now
            assert view["obs"].data_ptr() == storage[2:5]["obs"].data_ptr()
        assert storage._storage.batch_size == (storage.max_size,)

    def _refused(self, rb: ReplayBuffer, data: Any, error: type[Exception], *said: Any) -> None:
        storage: Any = rb.storage
        before = (rb.write_count, numbers(rb[:]), storage.layout)
        for write in (lambda: rb.extend(data), lambda: rb.add(data[0]), lambda: rb.__setitem__(slice(0, 3), data)):
            with pytest.raises(error) as raised:
                write()
            for word in said:
                assert re.search(word, str(raised.value)), str(raised.value)
        assert (rb.write_count, numbers(rb[:]), storage.layout) == before
        rb.extend(steps(5, 7))
        assert numbers(rb[:]) == [*before[1], 5, 6]

    def test_a_missing_leaf_is_refused_by_name(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        self._refused(rb, steps(0, 3).exclude(("next", "reward")), ValueError, r"\('next', 'reward'\)", "missing")

    def test_a_new_leaf_is_refused_by_name(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        self._refused(rb, steps(0, 3).set("extra", torch.zeros(3)), ValueError, "'extra'", "not in this storage")

    def test_another_dtype_is_refused_by_name(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        data = steps(0, 3).set("obs", torch.zeros(3, 3, dtype=torch.float64))
        self._refused(rb, data, ValueError, "'obs'", "float32", "float64")

    def test_another_shape_is_refused_by_name(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        self._refused(rb, steps(0, 3).set("obs", torch.zeros(3, 4)), ValueError, "'obs'", r"\[3\]", r"\[4\]")

    def test_a_tensor_where_a_group_was_is_refused_by_name(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        self._refused(rb, steps(0, 3).set("next", torch.zeros(3)), ValueError, "'next'", "found a Tensor")

    @pytest.mark.parametrize("kind", EXOTIC)
    def test_exotic_tensors_are_a_type_error_that_names_the_leaf(self, rb: ReplayBuffer, kind: str) -> None:
        rb.extend(dict(steps(0, 5).exclude("next", "done").items()))
        data = {"n": torch.arange(3), "obs": exotic(kind)}
        with pytest.raises(TypeError, match=f"'obs' is a .*{kind}"):
            rb.extend(data)
        with pytest.raises(TypeError, match=f"'obs' is a .*{kind}"):
            ReplayBuffer(storage=self.make(10, None)).extend(data) if self.fresh else rb.extend(data)
        assert len(rb) == 5

    def test_tensors_inside_vmap_are_a_type_error_that_names_the_leaf(self, rb: ReplayBuffer) -> None:
        rb.extend({"n": torch.arange(5), "obs": torch.zeros(5, 3)})
        with pytest.raises(TypeError, match=r"'obs' is a functorch"):
            torch.vmap(lambda x: rb.extend({"n": torch.arange(3), "obs": x}) * 1.0)(torch.zeros(2, 3, 3))
        assert len(rb) == 5

    def test_views_of_any_kind_are_stored_by_value(self, rb: ReplayBuffer) -> None:
        rb.extend({"c": torch.zeros(1, 2, dtype=torch.complex64), "x": torch.zeros(1, 4), "s": torch.zeros(1, 3, 2)})
        c = torch.tensor([[1 + 2j, 3 - 4j]]).conj()
        assert c.is_conj()
        x = torch.arange(8.0).reshape(1, 8)[:, ::2]
        s = torch.arange(6.0).reshape(1, 2, 3).transpose(1, 2).requires_grad_()
        rb.extend({"c": c, "x": x, "s": s})
        rb.extend({"c": c.imag.neg().to(torch.complex64), "x": torch.ones(1).expand(1, 4), "s": -s})
        assert rb[1]["c"].tolist() == c[0].tolist() and rb[1]["x"].tolist() == [0, 2, 4, 6]
        assert torch.equal(rb[1]["s"], s[0].detach()) and not rb[1]["s"].requires_grad
        assert rb[2]["x"].tolist() == [1] * 4 and torch.equal(rb[2]["s"], -s[0].detach())

    def test_a_batch_without_steps_is_refused(self, rb: ReplayBuffer) -> None:
        nothing: list[Any] = [steps(0, 0), []]
        for data in nothing:
            with pytest.raises(ValueError, match="nothing to add"):
                rb.extend(data)
        rb.extend(steps(0, 3))
        for data in nothing:
            with pytest.raises(ValueError, match="nothing to add"):
                rb.extend(data)
        assert len(rb) == 3

    def test_leaves_of_different_lengths_are_refused(self, rb: ReplayBuffer) -> None:
        rb.extend(dict(steps(0, 5).exclude("next", "done").items()))
        with pytest.raises(ValueError, match=r"'obs'.*4.*3"):
            rb.extend({"n": torch.arange(3), "obs": torch.zeros(4, 3)})
        assert len(rb) == 5

    def test_a_step_cannot_be_replaced_twice_at_once(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        for index in ([1, 1], torch.tensor([0, 4, -1])):
            with pytest.raises(ValueError, match="twice"):
                rb[index] = steps(50, 50 + len(index))
        assert numbers(rb[:]) == [0, 1, 2, 3, 4]

    def test_one_step_replaces_all_that_are_indexed(self, rb: ReplayBuffer) -> None:
        rb.extend(steps(0, 5))
        rb[1:4] = steps(50, 51)[0]
        assert numbers(rb[:]) == [0, 50, 50, 50, 4]

    def test_numpy_arrays_and_numbers_are_stored(self, rb: ReplayBuffer) -> None:
        rb.extend({"a": np.arange(6, dtype=np.int32).reshape(3, 2), "b": np.array([1, 2, 3], np.float32)})
        rb.add({"a": np.array([7, 8], np.int32), "b": 4})
        assert rb[:]["a"].tolist() == [[0, 1], [2, 3], [4, 5], [7, 8]] and rb[:]["b"].tolist() == [1, 2, 3, 4]
        for bad in ({"a": np.array(["x", "y"]), "b": 1.0}, {"a": np.array([None, 1]), "b": 1.0}):
            with pytest.raises(TypeError, match="'a'"):
                rb.add(bad)

    def test_a_number_that_its_leaf_cannot_hold_is_refused(self, rb: ReplayBuffer) -> None:
        rb.extend({"a": torch.zeros(2, dtype=torch.int8), "d": torch.zeros(2, dtype=torch.bool)})
        with pytest.raises(ValueError, match=r"'a'.*300"):
            rb.add({"a": 300, "d": True})
        with pytest.raises(ValueError, match="'d'"):
            rb.add({"a": 1, "d": 2})
        with pytest.raises(ValueError, match="'a'"):
            rb.add({"a": 1.5, "d": True})
        assert len(rb) == 2

    def test_data_of_dtypes_that_fill_rows_unevenly_come_back(self, rb: ReplayBuffer) -> None:
        dtypes = [
            torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
            torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
        ]  # fmt: skip
        bits = torch.randint(0, 2, (7, 3))
        data = TensorDict({str(d): bits.to(d) for d in dtypes} | {"none": torch.zeros(7, 0)}, [7])
        rb.extend(data)
        for index in (slice(None), torch.arange(7)):
            found = rb[index]
            for d in dtypes:
                assert found[str(d)].dtype == d and torch.equal(found[str(d)].to(torch.int64), bits)
        assert found["none"].shape == (7, 0)
