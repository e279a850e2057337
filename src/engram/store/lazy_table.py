"""Rows of one layout, in a table that a place makes when the first of them come."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from engram import pytree
from engram._text import warn_user
from engram.errors import StorageError
from engram.pytree import KeyPath, TreeSpec
from engram.store.columnar_rows import ColumnarRows
from engram.store.compact import (
    NO_REPLACING,
    NOTHING_TO_SHARE,
    ROW_WORTH_IT,
    SAVING_WORTH_IT,
    Compact,
    FirstSteps,
    KnownSteps,
    advice_to_share,
)
from engram.store.files import StoreSpec, refuse_if_memory_is_short
from engram.store.indexing import from_slots
from engram.store.layout import LeafSpec, ObservationKeys, RowLayout, specs_of
from engram.store.life import PlacedTable, Unwritten
from engram.store.packed_rows import PackedRows
from engram.store.places import (
    READ_ONLY,
    NewTable,
    Place,
    TableSize,
)
from engram.store.rows import Checked, OwnIndex, Rows, TableRows, check_count, expand_slots, warn_of_items, with_kept
from engram.store.steps import Steps
from engram.store.table import Replacing

_T = TypeVar("_T")
_NO_STEPS = "nothing to add: the batch has no steps"


class LazyTable(PlacedTable):
    """Rows of one layout.

    Args:
        size: how many.
        place: where.
        compact: which observations are stored once; None: none.
        advises: whether the first rows are looked at for what storing observations once would save.
    """

    def __init__(self, size: TableSize, place: Place, compact: Compact | None = None, *, advises: bool = False) -> None:
        super().__init__(size, place)
        self.compact, self._advises = compact, advises
        self.replaces_rows = compact is None
        self._expects_sequences = False
        self.renew()

    def renew(self) -> None:
        """Takes what it says of the rows from those that there are now, and binds native calls to them.

        `read` is that of the rows then, without a look at what they are.
        """
        rows = self.rows
        if rows.observations is not None and self.compact is None:
            self.compact, self.replaces_rows = Compact.of(rows.observations), False
        self.layout = rows.layout
        self.item_shape = () if self.layout is None else self.layout.within
        self._own_index = OwnIndex(self.current_lanes, self.item_shape, self.env_shape, self.ndim)
        self._bind()
        self.current_lanes.on_join = functools.partial(_bind_again, weakref.ref(self))

    def _bind(self) -> None:
        rows = self.rows
        self.__dict__.pop("read", None)
        if self.layout is not None:
            self.read = rows.read  # type: ignore[method-assign]
        if not isinstance(rows, PackedRows):
            self.native.unbind()
            return
        push: Any = rows.push
        if self.ndim > 1:
            push = functools.partial(_push_envs, rows, self.env_shape) if self.ndim == 2 else None
        self.native.bind(rows, push)

    # ---- facts ----
    @property
    def extra(self) -> str:
        lanes = self.lane_count
        each = "" if self.max_size is None else f", steps_per_lane={self.max_size // lanes}"
        of_lanes = f", lanes={lanes}{each}" if lanes > 1 else ""
        observations = self.rows.observations
        return of_lanes if observations is None else f"{of_lanes}, compact={observations}"

    @property
    def nbytes(self) -> int:
        self.look()
        return self.rows.nbytes

    @property
    def row_bytes(self) -> int:
        return 0 if self.layout is None else sum(leaf.nbytes for leaf in self.layout.leaves)

    def arguments(self) -> dict[str, Any] | None:
        arguments = self.place.arguments(self.size, None if self.layout is None else self.current_lanes)
        return arguments if arguments is None or self.compact is None else {**arguments, **self._as_found()}

    def _as_found(self) -> dict[str, Any]:
        """The argument of a constructor that says what was found in the first rows."""
        found = self.rows.observations
        return {"compact": self.compact if found is None else Compact.of(found)}

    # ---- making ----
    def make_for(
        self,
        layout: RowLayout,
        env_shape: tuple[int, ...],
        saved_lanes: int = 0,
        observations: ObservationKeys | None = None,
    ) -> None:
        """Makes the table for rows of a layout and environments of this shape, perhaps saved ones of so many lanes.

        Args:
            observations: those that were found to be stored once; None: as far as the layout says it.
        """
        if not self.size.is_given:
            raise ValueError("this storage needs a max_size, or max_bytes")
        if self._expects_sequences:
            layout = layout.with_sequence()
        size = self.size
        if self.compact is not None:
            self.compact.check(layout, self.place.device)
            if observations is None:
                observations = self.compact.find(layout, KnownSteps(ObservationKeys({}, self.horizon)))
        lanes, capacity = size.fit(layout, env_shape, self.place, saved_lanes, observations)
        new = NewTable(layout, env_shape, self.ndim, lanes, capacity, size.given_lanes, observations)
        self.make(new)

    def adopt(self, layout: RowLayout) -> None:
        """Makes the table for rows of this layout; the same again is no error.

        Raises:
            ValueError: it has another layout already; every difference is listed.
        """
        with self.mutex, self.first_write() as is_first:  # in the order of `extend`
            if is_first:
                self.make_for(layout, ())
        differences = [] if is_first or self.layout is None else self.layout.differences(layout)
        if differences:
            raise ValueError(f"this storage has another layout: {'; '.join(differences)}. Nothing was changed")

    def _make_for_first(self, steps: Steps, given: Steps) -> None:
        """Makes the table for rows like those of a first batch, which was given with all dimensions of environments."""
        with self.first_write() as is_first:
            if is_first:
                root, entries = pytree.describe(steps.items, steps.lead)
                self.place.note_device([leaf for _, leaf in entries])
                leaves = specs_of(entries, steps.lead)
                extra = _add_index(root, leaves, steps, self.ndim, required=self.requires_index)
                layout = RowLayout(root, leaves)
                # The first batch decides the layout only if it can be written itself.
                if not steps.plan(layout, extra).steps:
                    raise ValueError(_NO_STEPS)
                if steps.lead == self.ndim == 1 and layout.within:
                    warn_of_items(steps.items)
                observations = None
                if self.compact is not None:
                    observations = self.compact.find(layout, FirstSteps(steps, self.horizon))
                    if observations is None:
                        warn_user(NOTHING_TO_SHARE)
                self.make_for(layout, given.env_shape, observations=observations)
                if self._advises and layout.payload_bytes > ROW_WORTH_IT:
                    _advise_to_share(self, layout, FirstSteps(steps, self.horizon, most=32))
        if self.place.awaits_others():  # one of them may have made it
            self._check_envs(given)

    def _check_envs(self, steps: Steps) -> None:
        if steps.env_shape != self.env_shape:
            raise ValueError(
                f"the batch has environments of shape {list(steps.env_shape)}, this storage {list(self.env_shape)}"
            )

    def after_fork(self, mutex: Any) -> None:
        super().after_fork(mutex)
        self.native.pause()  # until this process uses the lanes

    # ---- sequences of rows that are written out of turn ----
    def expect_sequences(self, by_set: bool) -> None:
        if self.compact is not None:
            if not by_set:
                raise TypeError(NO_REPLACING)
            return
        self._expects_sequences = True
        if isinstance(self.rows, ColumnarRows):  # one column more, nothing is copied
            self.rows.carry_sequences()
            self.layout = self.rows.layout

    def carry_sequences(self, replacing: Replacing) -> None:
        rows, lanes = self.rows, self.current_lanes
        if rows.layout is None or rows.layout.carries_sequence:
            return
        if isinstance(rows, ColumnarRows):
            rows.carry_sequences()
            self.layout = rows.layout
            return
        if not self.can_widen:
            raise StorageError(
                "these rows were made for another writer: they have no place for the sequence that a replaced row "
                "carries, and rows in a file or in shared memory keep their layout. Save them with dumps, and take "
                "them over with loads into a storage that is made with a TensorDictMaxValueWriter; nothing was written"
            )
        with replacing("giving rows their sequences"):
            assert isinstance(rows, PackedRows)
            layout = rows.layout.with_sequence()
            refuse_if_memory_is_short(
                StoreSpec(layout, lanes.store.lanes, lanes.store.lane_capacity, lanes.envs, False)
            )
            self.exchange(rows.with_sequences())

    @property
    def can_widen(self) -> bool:
        """Whether stored rows can get room for sequences: not in a file, nor in shared memory."""
        rows = self.rows
        return isinstance(rows, ColumnarRows) or (isinstance(rows, PackedRows) and rows.can_widen)

    # ---- writing ----
    def fit(self, steps: Steps) -> Checked:
        merged = steps if steps.lead < 2 else steps.with_one_env_dim()
        if self.layout is None:
            self._make_for_first(merged, steps)
        elif steps.lead > 1:
            self._check_envs(steps)
        extra: tuple[str, Any] | None = None
        assert self.layout is not None
        if steps.index_key is not None and (steps.index_key,) in self.layout.paths:
            extra = steps.index_key, self._own_index.of(merged)
        checked = Checked(*self.rows.fit(merged, extra))
        if checked.steps == 0:
            raise ValueError(_NO_STEPS)
        return checked

    def append(self, checked: Checked, most: int | None = None) -> Tensor | int:
        slots, envs = self.rows.append(checked.data, most), self.current_lanes.envs
        return slots if envs == 1 else expand_slots(slots, envs)

    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        first = self.current_lanes.reserve_sequences(checked.steps)
        return self.rows.prepare_overwrite(slots, checked.data, rows, first)

    def overwrite(self, slots: Tensor, steps: Steps) -> None:
        """As `overwrite` of a storage, whatever environments it has; one step is repeated."""
        rows, n, items, key = self.rows, len(slots), steps.items, steps.index_key
        if self.is_single(items):
            items = pytree.expand(items, n)
        if self.kept:
            items = with_kept(rows.read(slots).batch, items, self.kept.get(int(slots[0]), frozenset()))
        if key is not None and self.layout is not None and (key,) in self.layout.paths:
            check_count(n, Steps(items).times)
            items = pytree.with_entry(items, key, self._own_index.of_slots(slots))
        count, data = rows.fit_rows(items)
        check_count(n, count)
        rows.overwrite(slots, data)

    def is_single(self, items: Any, env_dims: int = 0, *, unwritten: bool = False) -> bool:
        if self.layout is None:
            return unwritten
        leaf = self.layout.leaves[0]
        value = pytree.get_entry(items, leaf.path)
        if value is None:
            return False  # an error when the rows are checked
        return np.ndim(value) == env_dims + len(leaf.shape)

    # ---- reading ----
    def read(self, slots: Tensor, *how: Any) -> Rows:
        """As that of the rows, which stands in its place where there are any."""
        self.look()
        return self.rows.read(slots, *how)

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        leaves = () if self.layout is None else self.layout.leaves
        return next((leaf for leaf in leaves if leaf.path == path), None)

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        return self.rows.column(path, slots)

    def view(self) -> Any:
        store = self.lanes.store
        return _view(self.rows, self.env_shape, 0, store.lanes * store.lane_capacity)

    def slice(self, index: slice) -> Any:
        store = self.current_lanes.store
        lane = store.lane(0)
        rows = lane["published"] - lane["first"]
        # Without gaps and from slot 0 on: not where a recovery left the middle of a ring, not in several lanes.
        contiguous = store.lanes == 1 and (rows == store.lane_capacity or lane["first"] % store.lane_capacity == 0)
        start, stop, step = index.indices(max(0, rows))
        return _view(self.rows, self.env_shape, start, max(start, stop)) if contiguous and step == 1 else None

    # ---- copies and loads ----
    def row_form(self) -> Any:
        """What an empty copy must know about the rows before their state is loaded; None: there are none."""
        layout, observations = self.layout, self.rows.observations  # with its classes, which a state does not name
        if layout is None:
            return None
        form = layout.root, layout.leaves, layout.carries_sequence, self.env_shape, None
        return form if observations is None else (*form, observations)

    def take_row_form(self, form: Any) -> None:
        """Makes room for rows of what `row_form` returned."""
        if form is not None and self.layout is None:
            root, leaves, carries_sequence, env_shape, _, *observations = form
            self.make_for(RowLayout(root, leaves, carries_sequence), env_shape, 0, *observations)

    def make_room(self, layout: RowLayout, replacing: Replacing) -> None:
        """Before rows of this layout are restored: makes room for the sequences that they carry, where it can."""
        if (self._expects_sequences or layout.carries_sequence) and self.can_widen:
            self.carry_sequences(replacing)

    def sent_state(self, name: str) -> dict[str, Any]:
        state = super().sent_state(name)
        if self.compact is not None and not self.has_path:
            state["init"] = {**state["init"], **self._as_found()}
        return state


class ObservedTable(LazyTable):
    """Rows that other processes may be writing, and this one only reads: it reads those of one moment."""

    def _bind(self) -> None:
        """Native calls validate what they read themselves; all else is validated here."""
        if isinstance(self.rows, PackedRows):
            self.native.bind_source(self.rows)
        else:
            self.native.unbind()

    def read(self, slots: Tensor, *how: Any) -> Rows:
        read = super().read
        return self.current_lanes.validated(lambda: read(slots, *how))

    def view(self) -> Any:
        """A copy of all rows, written or not: torch has no views of read-only memory."""
        view = super().view
        return self.current_lanes.validated(lambda: view().clone())

    def slice(self, index: slice) -> Any:
        return None

    def fit(self, *args: Any) -> NoReturn:
        raise StorageError(READ_ONLY)

    def overwrite(self, slots: Tensor, steps: Steps) -> NoReturn:
        raise StorageError(READ_ONLY)


def _bind_again(table: weakref.ref[LazyTable]) -> None:
    """In a forked child that has begun to use a table's lanes."""
    if (alive := table()) is not None:
        alive._bind()


def _push_envs(table: PackedRows, env_shape: tuple[int, ...], *data: Any) -> Any:
    """As `PackedRows.push`, of steps of several environments."""
    slots: Any = table.push(*data)
    if slots is None:
        return None
    slots = expand_slots(slots, table.lanes.envs)
    return torch.stack(tuple(from_slots(slots, env_shape)), -1)


def _add_index(
    root: TreeSpec, leaves: list[LeafSpec], steps: Steps, ndim: int, *, required: bool
) -> tuple[str, Tensor] | None:
    """Adds the key under which rows store their own index to the root of their form, and to their leaves.

    Returns it with a place for the index of each step; None where there is none. A tensorclass without such a field is
    left as it is, unless the index is required.
    """
    key, kind, cls = steps.index_key, root.kind, root.cls
    if key is None:
        return None
    lacks_field = cls is not None and key not in {field.name for field in dataclasses.fields(cls)}
    if kind not in ("td", "dict", "class") or (lacks_field and required):
        named = {"leaf": "tensor", "stack": "lazy stack of different members"}
        form = f"{cls.__name__} without such a field" if cls is not None else named.get(kind, kind)
        raise TypeError(f"a {form} has no place for {key!r}; use RoundRobinWriter, which stores no index")
    if lacks_field:
        return None
    if kind == "class":
        root = root.children[0]
    index = LeafSpec((key,), torch.int64, (*root.batch, *(() if ndim == 1 else (ndim,))))
    if key in root.keys:
        leaves[root.children[root.keys.index(key)].leaf] = index
    else:
        leaves.append(index)
        root.keys, root.children = (*root.keys, key), (*root.children, TreeSpec("leaf", leaf=len(leaves) - 1))
    return key, torch.zeros((*steps.shape, *index.shape), dtype=torch.int64, device="cpu")


def _view(rows: TableRows | Unwritten, env_shape: tuple[int, ...], start: int, stop: int) -> Any:
    """Live views of time slots, with all dimensions of environments."""
    view = rows.view(start, stop)
    if view is None:
        return None
    if (len(env_shape) > 1 or env_shape == (1,)) and isinstance(rows, PackedRows):
        lead, merged = (stop - start, *env_shape), 1 if env_shape == (1,) else 2
        view = pytree.map_outermost(view, lambda part: part.reshape(*lead, *part.shape[merged:]))
    return view


def _advise_to_share(table: LazyTable, layout: RowLayout, steps: FirstSteps) -> None:
    """Warns where storing observations once would save much of the memory of a table that was just made."""
    lanes, place = table.current_lanes, table.place
    if place.device.type != "cpu" or (found := steps.shared(layout)) is None:
        return
    size = lanes.store.lanes, lanes.store.lane_capacity, table.size.given_lanes
    new = NewTable(layout, table.env_shape, table.ndim, *size)
    plain, once = (place.bytes_of(new._replace(observations=keys)) for keys in (None, found))
    if plain - once > SAVING_WORTH_IT:
        warn_user(advice_to_share(found, lanes.capacity, plain, once))
