"""What every transform must do. Inherit, and implement `make` and `batch`.

`TransformContract` is for any transform, `KeyedTransformContract` for those that read `in_keys` and set `out_keys`,
`TimedTransformContract` for those that work along time and go on from write to write.
"""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer
from engram.transforms import Compose


def assert_equal(found: Any, expected: Any) -> None:
    """The same keys, shapes, dtypes and values, NaN included; a dict may stand for a TensorDict."""
    if isinstance(expected, dict | TensorDictBase):
        assert set(found.keys()) == set(expected.keys())
        for key in expected.keys():
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert found == expected


def as_dict(batch: TensorDictBase) -> dict[str, Any]:
    return {k: as_dict(v) if isinstance(v, TensorDictBase) else v for k, v in batch.items()}


def leading(batch: TensorDictBase, shape: tuple[int, ...]) -> bool:
    return all(tuple(v.shape[: len(shape)]) == shape for v in batch.values(True, True))


class TransformContract:
    def make(self) -> Any:
        """A fresh transform, the same each time."""
        raise NotImplementedError

    def batch(self, *shape: int) -> TensorDict:
        """Data of this shape as `extend` gets them, the same each time; a trajectory ends with each last step."""
        raise NotImplementedError

    def prepared(self) -> Any:
        """A transform that has seen data."""
        transform = self.make()
        rb = ReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
        rb.extend(self.batch(6))
        return transform

    # ---- reading ----
    @pytest.mark.parametrize("shape", [(6,), (3, 4), (2, 3, 4)])
    def test_leading_dimensions_are_kept(self, shape):
        out = self.prepared().forward(self.batch(*shape))
        assert tuple(out.batch_size) == shape and leading(out, shape)

    @pytest.mark.parametrize("shape", [(6,), (3, 4)])
    def test_dicts_are_changed_as_tensordicts_are(self, shape):
        transform = self.prepared()
        found = transform.forward(as_dict(self.batch(*shape)))
        assert type(found) is dict
        assert_equal(found, transform.forward(self.batch(*shape)))

    def test_reading_changes_nothing_that_the_transform_knows(self):
        transform = self.prepared()
        before = copy.deepcopy(transform.state_dict())
        first = transform.forward(self.batch(5))
        assert_equal(transform.forward(self.batch(5)), first)
        assert_equal(transform.state_dict(), before)

    @pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage])
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_reading_changes_nothing_that_is_stored(self, storage, prefetch):
        rb = ReplayBuffer(storage=storage(50), transform=self.make(), batch_size=4, prefetch=prefetch)
        rb.extend(self.batch(8))
        before = [copy.deepcopy(rb.storage.get([i])) for i in range(len(rb))]
        for _ in range(3):
            rb.sample()
            rb[0]
            rb[:]
        for i, row in enumerate(before):
            found = rb.storage.get([i])
            assert_equal(found[0] if isinstance(found, list) else found, row[0] if isinstance(row, list) else row)

    # ---- writing ----
    def test_writing_leaves_the_callers_batch_as_it_was(self):
        transform, given_batch, expected = self.make(), self.batch(6), self.batch(6)
        rb = ReplayBuffer(storage=LazyTensorStorage(50), transform=transform)
        rb.extend(given_batch)
        self.make().inv(given_batch)
        assert_equal(given_batch, expected)
        other = ReplayBuffer(storage=LazyTensorStorage(50))
        other.append_transform(self.prepared(), invert=True)
        other.extend(given_batch)
        assert_equal(given_batch, expected)

    @pytest.mark.parametrize("invert", [False, True])
    def test_a_refused_write_changes_neither_the_buffer_nor_the_transform(self, invert):
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
    def test_a_saved_state_goes_on_the_same(self, tmp_path):
        one, other = self.prepared(), self.make()
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

    def test_it_can_be_sent_to_another_process(self):
        transform = self.prepared()
        sent = pickle.loads(pickle.dumps(transform))
        assert type(sent) is type(transform) and repr(sent) == repr(transform)
        assert_equal(sent.forward(self.batch(5)), transform.forward(self.batch(5)))

    def test_it_works_within_a_compose(self):
        transform = self.prepared()
        assert_equal(Compose(transform).forward(self.batch(5)), transform.forward(self.batch(5)))

    def test_it_says_what_it_is(self):
        name = type(self.make()).__name__
        assert repr(self.make()).startswith(f"{name}(")
        assert repr(Compose(self.make())) == f"Compose(\n    {self.make()!r})"


class KeyedTransformContract(TransformContract):
    #: an entry of `batch` that the transform can work on
    source: Any = "x"

    def make(self) -> Any:
        return self.make_for([self.source])

    def make_for(self, in_keys: Any, out_keys: Any = None) -> Any:
        raise NotImplementedError

    def test_out_keys_leave_the_source_in_place(self):
        expected = self._made(self.make_for([self.source]), self.batch(6))[self.source]
        out = self._made(self.make_for([self.source], [("deep", "er", "out")]), self.batch(6))
        assert_equal(out[self.source], self.batch(6)[self.source])
        assert_equal(out["deep", "er", "out"], expected)

    @pytest.mark.parametrize("kind", [lambda td: td, as_dict], ids=["TensorDict", "dict"])
    def test_nested_keys_are_tuples(self, kind):
        expected = self._made(self.make_for([self.source]), self.batch(6))[self.source]
        batch = self.batch(6)
        batch["some", "where", "in"] = batch[self.source].clone()
        out = self._made(self.make_for([("some", "where", "in")], [("some", "out")]), kind(batch))
        assert_equal(out["some"]["out"], expected)

    def test_a_missing_key_is_an_error_that_names_it_and_those_that_exist(self):
        transform = self.make_for([("no", "such")])
        for batch in (self.batch(4), as_dict(self.batch(4))):
            with pytest.raises(KeyError, match=rf"{type(transform).__name__}.*\('no', 'such'\).*{self._a_key()}"):
                transform(batch)

    def test_a_plain_tensor_is_an_error_that_says_what_it_takes(self):
        with pytest.raises(TypeError, match="Tensor has none; give it TensorDicts, dicts or tensorclasses"):
            self.make()(torch.zeros(4, 3))

    def test_keys_are_strings_or_tuples_of_them_and_as_many_out_as_in(self):
        with pytest.raises(TypeError, match="3"):
            self.make_for([3])
        with pytest.raises(ValueError, match=r"2 keys.*1"):
            self.make_for(["a", "b"], ["c"])
        with pytest.raises(ValueError, match="twice"):
            self.make_for(["a", "b"], ["c", "c"])

    def test_its_keys_can_be_read(self):
        transform = self.make_for(["a", ("b", "c")], ["d", "e"])
        assert list(transform.in_keys) == ["a", ("b", "c")] and list(transform.out_keys) == ["d", "e"]
        assert "('b', 'c')" in repr(transform) and "'d'" in repr(transform)

    def _made(self, transform: Any, batch: Any) -> Any:
        return transform(batch)

    def _a_key(self) -> str:
        return str(next(iter(self.batch(4).keys())))


class TimedTransformContract(TransformContract):
    """`make` gives what works on reading; on writing it is appended with `invert=True`."""

    def trajectory(self, steps: int, number: int) -> TensorDict:
        """A whole trajectory [steps]; data depend on the number."""
        raise NotImplementedError

    def test_no_trajectory_sees_another(self):
        parts = [self.trajectory(n, k) for k, n in enumerate((4, 1, 7, 2))]
        expected = torch.cat([self.make().forward(part.clone()) for part in parts])
        assert_equal(self.make().forward(torch.cat(parts)), expected)
        rows = torch.stack([torch.cat(parts), torch.cat(parts[::-1])])
        both = self.make().forward(rows.clone())
        assert_equal(both[0], expected)
        assert_equal(both[1], self.make().forward(torch.cat(parts[::-1])))

    def test_a_batch_that_ends_within_a_trajectory_is_the_beginning_of_the_whole(self):
        whole = self.make().forward(self.trajectory(9, 3))
        assert_equal(self.make().forward(self.trajectory(9, 3)[:6]), whole[:6])

    def test_ids_and_init_marks_end_trajectories_too(self):
        replaced = {"is_init", *(("next", flag) for flag in ("done", "truncated", "terminated"))}
        parts = [self.trajectory(n, k) for k, n in enumerate((4, 3))]
        expected = torch.cat([self.make().forward(part.clone()) for part in parts])
        for name, value in (("ids", torch.tensor([7] * 4 + [9] * 3)), ("init", torch.arange(7) % 4 == 0)):
            batch = torch.cat(parts)
            for flag in ("done", "truncated", "terminated"):
                batch["next", flag] = torch.zeros(7, 1, dtype=torch.bool)
            batch[("collector", "traj_ids") if name == "ids" else "is_init"] = value
            found = self.make().forward(batch)
            for key in expected.keys(True, True):
                if key not in replaced:
                    assert_equal(found[key], expected[key])

    # Each child runs it by itself, with an example database entry of its own.
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(data=st.data())
    def test_written_in_pieces_is_written_in_one(self, data):
        lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
        stream = torch.cat([self.trajectory(n, k) for k, n in enumerate(lengths)])
        cuts = sorted(data.draw(st.sets(st.integers(1, len(stream)), max_size=8)) | {0, len(stream)})
        rb = ReplayBuffer(storage=LazyTensorStorage(100))
        rb.append_transform(self.make(), invert=True)
        for start, stop in pairwise(cuts):
            if stop == start + 1:
                rb.add(stream[start])
            else:
                rb.extend(stream[start:stop] if data.draw(st.booleans()) else as_dict(stream[start:stop]))
        expected = self.make().forward(stream.clone())
        assert_equal(rb.storage.get(slice(None)), expected)

    def test_environments_go_on_by_themselves(self):
        strands = [torch.cat([self.trajectory(n, k) for k, n in enumerate(ns)]) for ns in ((3, 5, 4), (6, 1, 5))]
        stream = torch.stack(strands)
        expected = self.make().forward(stream.clone())
        for dim_extend in (1, 0):
            rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2), dim_extend=dim_extend)
            rb.append_transform(self.make(), invert=True)
            for start, stop in ((0, 2), (2, 3), (3, 8), (8, 12)):
                rb.extend(stream[:, start:stop] if dim_extend else stream[:, start:stop].transpose(0, 1))
            rb.empty()
            for start, stop in ((0, 2), (3, 8), (8, 12)):
                if start == 3:
                    rb.add(stream[:, 2])
                rb.extend(stream[:, start:stop] if dim_extend else stream[:, start:stop].transpose(0, 1))
            found = rb[:]
            assert_equal(found if dim_extend else found.transpose(0, 1), expected)
