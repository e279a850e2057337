"""Batches in and out: what is taken as it lies, what is made plain first, and what is refused."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from contracts.each import each
from engram import _native
from engram.store.layout import RowLayout, has_exchange_api, use_dispatch_keys, use_torch
from native.core.support import store
from native.support import DTYPES, codec, slots


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    raw = torch.randint(0, 2 if dtype == torch.bool else 100, shape)
    made = raw.to(dtype)
    return made * (1 + 2j) if dtype.is_complex else made


def kept(data: Any, batch_dims: int = 1, time_dim: int = 0, form: Any = None) -> Any:
    """What a store gives back for a batch of one lane, through the layout of `form` or of the batch itself."""
    layout = RowLayout.of(data if form is None else form, batch_dims)
    plan = layout.plan(data, batch_dims, time_dim)
    s = store(layout.payload_bytes, max(plan.steps, 1), strands=plan.envs, alignment=layout.alignment)
    s.append(0, plan)
    where = torch.arange(plan.steps * plan.envs)
    rows = s.gather(layout.codec, where)[0]
    return rows if layout.plain else layout.build(rows, (len(where),))


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def plain_td(n: int = 3) -> TensorDict:
    inner = {"reward": torch.ones(n, 1), "done": torch.zeros(n, 1, dtype=torch.bool)}
    return TensorDict({"a": torch.arange(n * 2.0).reshape(n, 2), "next": TensorDict(inner, [n])}, [n])


class TestTensorsGoInAndOut:
    @each("dtype", DTYPES)
    def test_of_every_dtype(self, dtype: torch.dtype) -> None:
        data = {"x": values(dtype, 5, 3), "y": values(dtype, 5)}
        back = kept(data)
        assert same(back["x"], data["x"]) and same(back["y"], data["y"])

    @each("size", [1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 1000])
    @each("n", [1, 2, 31, 32, 33, 100])
    def test_of_every_size_in_every_number(self, size: int, n: int) -> None:
        x = torch.randint(0, 255, (n, size), dtype=torch.uint8)
        assert same(kept({"x": x, "y": x.flip(1)})["x"], x)

    def test_strided_transposed_sliced_expanded_and_flipped(self) -> None:
        base = torch.arange(240.0).reshape(4, 6, 10)
        for x in (base[:, ::2], base.transpose(0, 2), base[1:, :, 3:7], base[:, :1].expand(4, 6, 10), base.flip(0),
                  base[:, 0, 0], base.permute(2, 1, 0)[::3]):  # fmt: skip
            assert same(kept({"x": x})["x"], x.contiguous())

    def test_views_with_an_offset_into_their_memory(self) -> None:
        x = torch.arange(20.0)[7:13]
        assert same(kept({"x": x})["x"], x.clone())

    def test_conjugates_negatives_and_their_parts(self) -> None:
        z = torch.complex(torch.randn(4, 2), torch.randn(4, 2))
        for x in (z.conj(), z.conj().imag, z.imag, z.real, -z.conj(), torch._neg_view(z)):
            assert same(kept({"x": x})["x"], x.resolve_conj().resolve_neg().contiguous())

    def test_gradients_are_left_behind(self) -> None:
        x = torch.randn(4, 2, requires_grad=True)
        for leaf in (x, x * 2, torch.nn.Parameter(torch.randn(4, 2))):
            back = kept({"x": leaf})["x"]
            assert not back.requires_grad and torch.equal(back, leaf.detach())

    def test_tensors_of_zeros_without_memory(self) -> None:
        x = torch._efficientzerotensor((4, 2))
        assert same(kept({"x": x})["x"], torch.zeros(4, 2))

    def test_leaves_and_batches_of_size_0(self) -> None:
        back = kept({"x": torch.zeros(4, 0), "y": torch.ones(4), "z": torch.zeros(4, 0, 3)})
        assert back["x"].shape == (4, 0) and back["z"].shape == (4, 0, 3) and same(back["y"], torch.ones(4))
        assert kept({"x": torch.zeros(4, 2, 0)})["x"].shape == (4, 2, 0)
        assert kept({"x": torch.zeros(0, 3)})["x"].shape == (0, 3)

    def test_tensordicts_keep_their_nested_batch_sizes(self) -> None:
        td = TensorDict({"a": torch.ones(3, 2), "in": TensorDict({"b": torch.zeros(3, 4, 5)}, [3, 4])}, [3])
        back = kept(td)
        assert type(back) is TensorDict and back.batch_size == (3,) and back["in"].batch_size == (3, 4)
        assert (back == td).all() and back.device == torch.device("cpu")

    def test_a_dict_and_a_tensordict_stand_for_each_other_and_come_back_in_the_form_of_the_layout(self) -> None:
        td = plain_td()
        mixed = {"a": td["a"], "next": td["next"]}, TensorDict({"a": td["a"]}, [3]).set("next", td["next"].to_dict())
        for form in (td, td.to_dict()):
            for data in (td, td.to_dict(), *mixed):
                assert RowLayout.of(form, 1).codec.check(data, 1, 0).steps == 3
                back = kept(data, form=form)
                assert type(back) is type(form) and type(back["next"]) is type(form["next"])
                assert same(back["a"], td["a"]) and same(back["next"]["reward"], td["next", "reward"])

    def test_lists_of_leaves(self) -> None:
        data = [torch.ones(3, 2), torch.arange(3)]
        back = kept(data)
        assert isinstance(back, list) and same(back[0], data[0]) and same(back[1], data[1])


class TestArraysAndNumbers:
    @each("name", ["b", "h", "i", "l", "q", "B", "H", "I", "L", "Q", "e", "f", "d", "?", "F", "D"])
    def test_numpy_arrays_of_every_kind(self, name: str) -> None:
        x = np.arange(6).reshape(3, 2).astype(name)
        assert np.array_equal(kept({"x": x})["x"].numpy(), x)

    def test_strided_flipped_and_swapped_arrays(self) -> None:
        base = np.arange(24.0).reshape(4, 6)
        for x in (base[::-1], base[:, ::-1], base.T, base[::2, 1::2], base.astype(">f8"), np.asfortranarray(base)):
            assert np.array_equal(kept({"x": x})["x"].numpy(), x.astype("=f8"))

    def test_arrays_that_may_not_be_written(self) -> None:
        x = np.arange(6.0).reshape(3, 2)
        x.flags.writeable = False
        assert np.array_equal(kept({"x": x})["x"].numpy(), x)

    def test_numpy_scalars_and_python_numbers_are_steps(self) -> None:
        form = {
            "f": torch.tensor(0.0), "d": torch.tensor(0.0, dtype=torch.float64), "i": torch.tensor(0),
            "s": torch.tensor(0, dtype=torch.int8), "b": torch.tensor(False), "u": torch.tensor(0, dtype=torch.uint8),
        }  # fmt: skip
        for data in (
            {"f": 1.5, "d": 2, "i": -3, "s": 127, "b": True, "u": 255},
            {"f": np.float32(1.5), "d": np.float64(2), "i": np.int64(-3), "s": np.int8(127), "b": np.bool_(True),
             "u": np.uint8(255)},
        ):  # fmt: skip
            back = {k: v[0].item() for k, v in kept(data, 0, 0, form).items()}
            assert back == {"f": 1.5, "d": 2.0, "i": -3, "s": 127, "b": True, "u": 255}

    @each("bad", [128, -129, 1 << 70, True, 1.0, "1", None, 1j])
    def test_numbers_that_do_not_fit_are_refused(self, bad: Any) -> None:
        layout = RowLayout.of({"x": torch.tensor(0, dtype=torch.int8)}, 0)
        with pytest.raises((ValueError, TypeError, OverflowError, RuntimeError)):
            layout.plan({"x": bad}, 0, 0)

    @each("bad", [np.array(["a", "b"]), np.array([None, 1]), np.array([1, 2], "M8[s]"), np.zeros(2, "f4,i4"), object()])
    def test_what_no_tensor_holds_is_refused_by_name(self, bad: Any) -> None:
        with pytest.raises(TypeError, match="'x'"):
            RowLayout.of({"x": bad}, 1)


class TestRefusals:
    def test_exotic_tensors_are_refused_by_name(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        layout = RowLayout.of({"x": torch.zeros(4, 2)}, 1)
        with FakeTensorMode():
            fake = torch.zeros(4, 2)
        freed = torch.zeros(4, 2)
        freed.untyped_storage().resize_(0)
        for bad in (
            torch.zeros(4, 2, device="meta"), torch.zeros(4, 2).to_sparse(), fake, freed,
            torch.quantize_per_tensor(torch.zeros(4, 2), 0.1, 0, torch.quint8),
        ):  # fmt: skip
            with pytest.raises(TypeError, match="'x'"):
                layout.plan({"x": bad}, 1, 0)

    def test_tensors_inside_vmap_and_grad_are_refused_by_name(self) -> None:
        layout = RowLayout.of({"x": torch.zeros(4, 2)}, 1)

        def use(x: Tensor) -> Tensor:
            layout.plan({"x": x}, 1, 0)
            return x.sum()

        with pytest.raises(TypeError, match="functorch"):
            torch.vmap(use)(torch.zeros(3, 4, 2))
        with pytest.raises(TypeError, match="functorch"):
            torch.func.grad(use)(torch.zeros(4, 2))

    @each("change", [
        lambda d: d.pop("a"), lambda d: d.update(c=torch.zeros(3)), lambda d: d.update(a=torch.zeros(3, 3)),
        lambda d: d.update(a=torch.zeros(3, 2, dtype=torch.float64)), lambda d: d.update(a=torch.zeros(2, 2)),
        lambda d: d.update(a=torch.zeros(3)), lambda d: d.update(a={"x": torch.zeros(3, 2)}),
        lambda d: d.update(b=torch.zeros(3, 1)), lambda d: d.update(a=torch.zeros(3, 2, 1)),
    ])  # fmt: skip
    def test_other_keys_shapes_and_dtypes_are_refused_by_name(self, change: Any) -> None:
        layout = RowLayout.of({"a": torch.zeros(3, 2), "b": torch.zeros(3)}, 1)
        data = {"a": torch.zeros(3, 2), "b": torch.zeros(3)}
        change(data)
        assert layout.codec.check(data, 1, 0) is None
        with pytest.raises(ValueError, match=r"'[abc]'"):
            layout.plan(data, 1, 0)

    def test_what_is_no_mapping_does_not_stand_for_one(self) -> None:
        for form in (plain_td(), plain_td().to_dict()):
            layout = RowLayout.of(form, 1)
            for other in (torch.zeros(3), None, [], "a", collections.OrderedDict(form)):
                assert layout.codec.check(other, 1, 0) is None
            lacks_one = {"a": form["a"], "next": torch.zeros(3)}
            assert layout.codec.check(lacks_one, 1, 0) is None

    def test_an_object_whose_class_cannot_be_told_is_refused(self) -> None:
        class Liar:
            @property
            def __class__(self) -> type:  # type: ignore[override]
                raise RuntimeError("no")

        code, _ = codec((torch.float32, (2,)))
        assert code.check_list([Liar()], 1, 0) is None

    def test_an_object_that_empties_the_batch_while_it_is_looked_at(self) -> None:
        data: dict[str, Any] = {}

        class Emptier:
            @property
            def __class__(self) -> type:  # type: ignore[override]
                data.clear()
                return int

        data.update(a=Emptier(), b=torch.zeros(3, 1 << 12))
        layout = RowLayout.of({"a": torch.zeros(3, 1), "b": torch.zeros(3, 1 << 12)}, 1)
        assert layout.codec.check(data, 1, 0) is None

    @each("dims", [(-1, 0), (3, 0), (1, 1), (1, -2), (2, -1), (2, 2)])
    def test_dimensions_that_do_not_exist_are_refused(self, dims: tuple[int, int]) -> None:
        code, _ = codec((torch.float32, (2,)))
        with pytest.raises(ValueError, match="batch_dims"):
            code.check_list([torch.zeros(3, 2)], *dims)

    @each("leaf", [
        (2, 12, (2,), 0), (9, 32, (2,), 0), (2, 32, (-1,), 0), (2, 32, (1 << 50,), 0), (2, 32, (0, 1 << 50), 0),
        (2, 32, (1 << 30, 1 << 30), 0), (2, 32, (2,), (1 << 64) - 4), (2, 32, (2,)),
    ])  # fmt: skip
    def test_leaves_that_no_row_holds_are_refused(self, leaf: tuple[Any, ...]) -> None:
        with pytest.raises(ValueError):
            _native.Codec([leaf], None, TensorDict, None, torch.Size, np.ndarray, np.generic)

    @each("tree", [
        ("leaf",), ("leaf", 1), ("leaf", 0), ("dict", (("a", ("leaf", 0)), ("b", ("leaf", 0)))), ("set", ()),
        ("td", (("a", ("leaf", 0)), ("b", ("leaf", 1)))), ("dict", (("a",),)),
    ])  # fmt: skip
    def test_trees_that_do_not_name_each_leaf_once_are_refused(self, tree: tuple[Any, ...]) -> None:
        leaves = [(2, 32, (), 0), (2, 32, (), 4)]
        with pytest.raises(ValueError):
            _native.Codec(leaves, tree, TensorDict, None, torch.Size, np.ndarray, np.generic)

    def test_a_codec_that_does_not_fit_the_rows_reads_and_writes_nothing(self) -> None:
        s = store(8, 4)
        narrow, _ = codec((torch.float32, (2,)))
        wide, _ = codec((torch.float32, (3,)))
        s.append(0, narrow.check_list([torch.zeros(4, 2)], 1, 0))
        with pytest.raises(ValueError, match="outside the row"):
            s.append(0, wide.check_list([torch.zeros(4, 3)], 1, 0))
        with pytest.raises(ValueError, match="does not fit"):
            s.gather(wide, slots(0))


class TestStrands:
    def test_env_first_and_time_first_batches_hold_the_same_rows(self) -> None:
        x = torch.arange(24).reshape(3, 4, 2)  # [envs, time, 2]
        code, width = codec((torch.int64, (2,)))
        for data, time_dim in ((x, 1), (x.transpose(0, 1), 0), (x.transpose(0, 1).contiguous(), 0)):
            s = store(width, 4, strands=3)
            assert s.append(0, code.check_list([data], 2, time_dim)).tolist() == [0, 1, 2, 3]
            rows = s.gather(code, torch.arange(12))[0][0]
            assert torch.equal(rows.reshape(4, 3, 2), x.transpose(0, 1))

    def test_one_step_of_all_envs(self) -> None:
        code, width = codec((torch.int64, ()))
        s = store(width, 4, strands=3)
        for t in range(3):
            s.append(0, code.check_list([torch.arange(3) + 10 * t], 1, -1))
        assert s.gather(code, torch.arange(9))[0][0].tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22]

    def test_another_number_of_envs_is_refused(self) -> None:
        code, width = codec((torch.int64, ()))
        s = store(width, 4, strands=3)
        with pytest.raises(ValueError, match="environments"):
            s.append(0, code.check_list([torch.zeros(2, 4, dtype=torch.int64)], 2, 1))
        assert s.rows() == 0


def tensors_of_all_kinds() -> list[torch.Tensor]:
    z = torch.randn(3, 2, dtype=torch.complex64)
    x = torch.randn(4, requires_grad=True)
    with torch.inference_mode():
        made_there = torch.zeros(2)
        negative_there = torch._neg_view(made_there)
    return [
        x, x.detach(), x[1:], (x * 2).detach(), torch.zeros(()), torch.zeros(0), torch.ones(2, dtype=torch.bool),
        torch.from_numpy(np.ones(3)), made_there, negative_there, z, z.conj(), z.conj().imag, z.conj().real, -z.conj(),
        torch.view_as_real(z), torch._neg_view(x.detach()), torch._neg_view(x.detach())[1:], z.conj().resolve_conj(),
    ]  # fmt: skip


class TestLazyViews:
    def test_the_keys_of_tensors_tell_lazy_views(self) -> None:
        assert use_dispatch_keys() or not has_exchange_api()
        for t in tensors_of_all_kinds():
            assert _native.testing.is_lazy(t) == (t.is_neg() or t.is_conj())

    @pytest.mark.parametrize("kinds", [slice(0, 1), slice(None)])
    def test_keys_at_no_one_place_are_left_alone_and_torch_is_asked(self, kinds: slice) -> None:
        wrong = [(t, t._cdata, 7 + i) for i, t in enumerate(tensors_of_all_kinds()[kinds])]
        try:
            assert not _native.use_dispatch_keys(wrong, 1)
            for t in tensors_of_all_kinds():
                assert _native.testing.is_lazy(t) == (t.is_neg() or t.is_conj())
        finally:
            use_dispatch_keys()


def test_a_capsule_of_something_else_is_refused_and_changes_nothing() -> None:
    import datetime

    with pytest.raises(ValueError, match="PyCapsule"):
        use_torch(datetime.datetime_CAPI)
    assert same(kept({"x": torch.ones(2)})["x"], torch.ones(2))
