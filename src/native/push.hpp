// Checks a batch, or a list of items, and appends it, in one call: nothing is written before all of it was checked. Data that
// is not plain, or not of the store's layout, is left to the slower path, which raises the errors.
#pragma once
#include <nanobind/nanobind.h>

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "append.hpp"

namespace engram {

// Copies the items of a list to rows side by side, and plans these. `check` fills a plan with the places of one item's leaves.
// False: `check` returned false for an item, the list is empty, or it changed while its items were checked.
inline bool plan_staged(PyObject* list, const StoreGeometry& s, const Codec& codec, Plan& plan, auto&& check) {
  const size_t envs = s.envs, row_bytes = std::max<size_t>(s.payload_bytes, codec.row_end());
  const Py_ssize_t items = PyList_Size(list);
  if (items <= 0) return false;
  if (static_cast<size_t>(items) > kMostBytes / std::max<size_t>(1, envs * row_bytes)) throw std::bad_alloc();
  plan.staged.resize(static_cast<size_t>(items) * envs * row_bytes);
  uint8_t* row = plan.staged.data();
  Plan one;
  for (Py_ssize_t i = 0; i < items; ++i) {
    if (PyList_Size(list) != items) return false;
    const nb::object item = nb::borrow(PyList_GetItem(list, i));
    one.clear();
    if (!check(item.ptr(), one)) return false;
    for (size_t env = 0; env < envs; ++env, row += row_bytes)
      for (const LeafSource& leaf : one.leaves)
        if (leaf.array && leaf.bytes) std::memcpy(row + leaf.offset, leaf.at(0, env), leaf.bytes);
  }
  plan.leaves = std::move(one.leaves);
  for (LeafSource& leaf : plan.leaves) {
    if (leaf.array) leaf.array = plan.staged.data() + leaf.offset;
    leaf.stride = static_cast<ptrdiff_t>(envs * row_bytes), leaf.env_stride = static_cast<ptrdiff_t>(row_bytes);
  }
  plan.steps = static_cast<size_t>(items), plan.envs = envs, plan.sized = true, plan.codec = one.codec;
  plan.bytes = plan.staged.size(), plan.carries_sequence = one.carries_sequence;
  return true;
}

// Copies a list of items, and plans their rows. `dims`: batch dimensions of an item, 0 or 1 (its environments). False: an item
// is not plain, or not of the layout, or the list changed.
inline bool plan_list(const Codec& codec, PyObject* list, int dims, const StoreGeometry& s, std::optional<size_t> own,
                      int float_bits, Plan& plan) {
  const std::vector<int64_t> lead(static_cast<size_t>(dims), static_cast<int64_t>(s.envs));
  const Numbers numbers{float_bits};
  std::vector<nb::object> values;
  return plan_staged(list, s, codec, plan, [&](PyObject* item, Plan& into) {
    return codec.check_without(into, values, item, dims, -1, own, numbers, &lead) && into.steps == 1 && into.envs == s.envs;
  });
}

// Plans the rows of a list of items, or of a batch of them, that are exactly of the codec's form (`Codec.check_same`), so that
// equal ones can be built again. False: one of them is of another form, or there is none.
inline bool plan_same(const Codec& codec, PyObject* items, bool batch, const StoreGeometry& s, std::optional<size_t> own,
                      Plan& plan) {
  std::vector<nb::object> values;
  if (batch) {
    if (!codec.check_same(plan, values, items, true, own)) return false;
    plan.keep.insert(plan.keep.end(), values.begin(), values.end());
    return plan.steps > 0;
  }
  return PyList_CheckExact(items) && plan_staged(items, s, codec, plan, [&](PyObject* item, Plan& into) {
    return codec.check_same(into, values, item, false, own);
  });
}

// Appends a checked batch; rows that store their own index in leaf `own` get it here. Returns its slots, or True where they are
// not `wanted`. None: another process has the turn.
inline nb::object append_checked(Store& store, uint64_t lane, Plan& plan, std::optional<size_t> own, bool with_env,
                                 bool wanted = true) {
  check_border(store, plan);
  const StoreGeometry& s = store.geometry();
  if (store.moves_on()) {
    int64_t first = 0, *out = plan.single ? &first : nullptr;
    nb::object slots = nb::bool_(true);
    if (wanted && !plan.single) slots = nb::cast(slots_out(plan.steps, [&](int64_t* to) { out = to; }));
    append_moving_on(store, plan.leaves, plan.steps, own, out, writes_long(store, plan.bytes));
    return wanted && plan.single ? nb::object(nb::int_(first)) : slots;
  }
  const Turn turn(store, lane);
  if (turn.refused()) return nb::none();
  std::vector<int64_t> index;
  if (own) {
    LeafSource& leaf = plan.leaves[*own];
    index.resize(plan.steps * plan.envs * leaf.bytes / 8);
    leaf.array = reinterpret_cast<const uint8_t*>(index.data());
    leaf.stride = static_cast<ptrdiff_t>(plan.envs * leaf.bytes), leaf.env_stride = static_cast<ptrdiff_t>(leaf.bytes);
  }
  std::optional<OutBlock> block;
  nb::object slots;
  const auto steps = static_cast<int64_t>(plan.steps);
  static const std::vector<int64_t> scalar;
  if (!wanted) {
    slots = nb::bool_(true);
  } else if (!plan.single) {
    block.emplace();
    block->plan({kDLInt, 64}, &steps, 1, scalar, plan.steps * 8);
    block->take();
    slots = block->make(0);  // may run Python code, such as another append: the first slot is looked up afterwards
  }
  const uint64_t first = store.lanes.lane(lane).published.load(), base = lane * s.lane_capacity;
  if (wanted && plan.single) slots = nb::int_(base + first % s.lane_capacity);
  uint64_t slot = first % s.lane_capacity;
  auto* out = block ? reinterpret_cast<int64_t*>(block->data(0)) : nullptr;
  int64_t* own_index = index.data();
  const size_t each = own ? plan.leaves[*own].bytes / 8 : 0;
  for (size_t i = 0; (out || each) && i < plan.steps; ++i) {
    const auto at = static_cast<int64_t>(base + slot);
    if (out) out[i] = at;
    for (size_t env = 0; each && env < plan.envs; ++env)
      for (size_t k = 0; k < each; ++k) *own_index++ = with_env && k % 2 ? static_cast<int64_t>(env) : at;
    if (++slot == s.lane_capacity) slot = 0;
  }
  maybe_without_gil(writes_long(store, plan.bytes), [&] {
    RowWriter(store).append(lane, plan.steps, plan.leaves);
  });
  return slots;
}

// Checks a batch and appends it: see `Codec.check` and `Store.append`. A list holds items, stacked along time; with
// `float_bits` Python's floats in it have so many bits. `own`: the leaf in which the rows store their own index. None: nothing
// was written, because the batch is not plain, does not fit, has no steps, another process has the turn, or this process
// was forked and holds no lane.
inline nb::object push(Store& store, const Codec& codec, uint64_t lane, nb::handle batch, int batch_dims, int time_dim,
                       std::optional<size_t> own, std::optional<int> float_bits) {
  if (joined_after_fork()) return nb::none();
  store.must_be_writable();
  check_lane(store, lane);
  check_codec(store, codec);
  Codec::check_dims(batch_dims, time_dim);
  bool with_env = false;
  if (own && !codec.holds_index(*own, with_env)) throw nb::value_error("this leaf has no room for an index");
  Plan plan;
  if (float_bits) {
    if (batch_dims < 1 || !PyList_CheckExact(batch.ptr())) return nb::none();
    if (!plan_list(codec, batch.ptr(), batch_dims - 1, store.geometry(), own, *float_bits, plan)) return nb::none();
    return append_checked(store, lane, plan, own, with_env);
  }
  std::vector<nb::object> values;
  if (!codec.check_without(plan, values, batch.ptr(), batch_dims, time_dim, own, {})) return nb::none();
  if (plan.steps == 0 || plan.envs != store.geometry().envs) return nb::none();
  return append_checked(store, lane, plan, own, with_env);
}

// As `push`, of the leaves of a batch in the order of the layout; what stands for leaf `own` is ignored. Whether it was written.
inline bool push_columns(Store& store, const Codec& codec, uint64_t lane, nb::handle columns, int batch_dims, int time_dim,
                         std::optional<size_t> own) {
  if (joined_after_fork()) return false;
  store.must_be_writable();
  check_lane(store, lane);
  check_codec(store, codec);
  Codec::check_dims(batch_dims, time_dim);
  bool with_env = false;
  if (own && !codec.holds_index(*own, with_env)) throw nb::value_error("this leaf has no room for an index");
  Plan plan;
  if (!codec.check_columns(plan, columns.ptr(), batch_dims, time_dim, own)) return false;
  if (plan.steps == 0 || plan.envs != store.geometry().envs) return false;
  return !append_checked(store, lane, plan, own, with_env, false).is_none();
}

// The columns of many steps, which were checked once; parts of them are appended as they are then.
struct CheckedColumns {
  Plan plan;
  std::optional<size_t> own;
  bool with_env = false;
};

// Checks columns as `push_columns` does, of numpy arrays, whose memory stays where it is as long as this refers to them. None: a
// column is another object, or does not fit.
inline std::unique_ptr<CheckedColumns> checked_columns(const Codec& codec, nb::list columns, int batch_dims, int time_dim,
                                                       std::optional<size_t> own) {
  Codec::check_dims(batch_dims, time_dim);
  auto checked = std::make_unique<CheckedColumns>();
  checked->own = own;
  if (own && !codec.holds_index(*own, checked->with_env)) throw nb::value_error("this leaf has no room for an index");
  if (!codec.check_columns(checked->plan, columns.ptr(), batch_dims, time_dim, own)) return nullptr;
  const size_t arrays = codec.leaves().size() - (own ? 1 : 0);
  return checked->plan.buffers.size() == arrays && checked->plan.scalars.empty() ? std::move(checked) : nullptr;
}

// As `push_columns`, of the rows [first, first + steps) of checked columns.
inline bool push_part(Store& store, uint64_t lane, const CheckedColumns& columns, size_t first, size_t steps) {
  if (joined_after_fork()) return false;
  store.must_be_writable();
  check_lane(store, lane);
  const Plan& whole = columns.plan;
  if (first > whole.steps || steps > whole.steps - first) throw nb::index_error("the columns have fewer rows");
  for (const LeafSource& leaf : whole.leaves)
    if (!store.has_leaf(leaf.offset, leaf.bytes)) throw nb::value_error("a leaf lies outside the row");
  if (steps == 0 || whole.envs != store.geometry().envs) return false;
  Plan part;
  part.codec = whole.codec, part.carries_sequence = whole.carries_sequence, part.sized = true;
  part.steps = steps, part.envs = whole.envs, part.bytes = whole.bytes / whole.steps * steps;
  part.leaves = whole.leaves;
  for (LeafSource& leaf : part.leaves)
    if (leaf.array) leaf.array += static_cast<ptrdiff_t>(first) * leaf.stride;
  return !append_checked(store, lane, part, columns.own, columns.with_env, false).is_none();
}

// Appends one time step of all environments, of numpy arrays that are converted to what the rows have (`Codec::check_step`), and
// makes no index of it. False: nothing was written, for one of the reasons of `push`.
inline bool push_step(Store& store, const Codec& codec, uint64_t lane, nb::handle step) {
  if (joined_after_fork()) return false;
  store.must_be_writable();
  check_lane(store, lane);
  check_codec(store, codec);
  std::vector<nb::object> values;
  Plan plan;
  if (!codec.check_step(plan, values, step.ptr(), store.geometry().envs)) return false;
  return !append_checked(store, lane, plan, std::nullopt, false, false).is_none();
}

inline void check_items_of(const Store& store, const Codec& codec, std::optional<size_t> own) {
  store.must_be_writable();
  check_codec(store, codec);
  bool with_env = false;
  if (codec.sequence()) throw nb::value_error("items carry no sequence");
  if (own && (!codec.holds_index(*own, with_env) || with_env)) throw nb::value_error("this leaf has no room for an index");
}

// As `push`, of a list of items, of one (`single`) or of a `batch` of them, all exactly of the codec's form.
inline nb::object push_items(Store& store, const Codec& codec, uint64_t lane, nb::handle items, bool single, bool batch,
                             std::optional<size_t> own) {
  if (joined_after_fork()) return nb::none();
  check_lane(store, lane);
  check_items_of(store, codec, own);
  nb::list one;
  if (single) one.append(items);
  Plan plan;
  if (!plan_same(codec, single ? one.ptr() : items.ptr(), batch && !single, store.geometry(), own, plan)) return nb::none();
  plan.single = single;
  return append_checked(store, lane, plan, own, false);
}

// A plan of such items for `Store.append`, which refers to a batch's memory. Rows that store their own index in leaf `own` store
// these slots, or where there are none those that `append` will give them. None: one of the items is of another form.
inline std::optional<Plan> plan_items(Store& store, const Codec& codec, uint64_t lane, nb::handle items, bool batch,
                                      std::optional<size_t> own, nb::handle index) {
  check_lane(store, lane);
  check_items_of(store, codec, own);
  Plan plan;
  if (!plan_same(codec, items.ptr(), batch, store.geometry(), own, plan)) return std::nullopt;
  if (!own) return plan;
  const nb::object given = index.is_none() ? nb::object(next_slots(store, lane, plan.steps)) : nb::borrow(index);
  const SlotsArg slots(given);
  if (slots.n != plan.steps) throw nb::value_error("one slot for each item");
  LeafSource& leaf = plan.leaves[*own];
  const size_t each = leaf.bytes / 8;
  for (size_t i = 0; i < slots.n; ++i) plan.own_index.insert(plan.own_index.end(), each, slots.data[i]);
  leaf.array = reinterpret_cast<const uint8_t*>(plan.own_index.data()), leaf.stride = static_cast<ptrdiff_t>(leaf.bytes);
  return plan;
}

}  // namespace engram
