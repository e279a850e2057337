// Checks a batch, or a list of items, and appends it, in one call: nothing is written before all of it was checked. Data that
// is not plain, or not of the store's layout, is left to the slower path, which raises the errors.
#pragma once
#include <nanobind/nanobind.h>

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "append.hpp"
#include "queue.hpp"
#include "rate_limit.hpp"

namespace engram {

// Copies the items of a list to rows side by side, and plans these. `check` fills a plan with the places of one item's leaves.
// False: `check` returned false for an item, the list is empty, or it changed while its items were checked.
inline bool plan_staged(PyObject* list, size_t envs, const Codec& codec, Plan& plan, auto&& check) {
  const size_t row_bytes = codec.row_end();
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
  plan.own = one.own, plan.own_dims = one.own_dims;
  plan.bytes = plan.staged.size(), plan.carries_sequence = one.carries_sequence;
  return true;
}

// Copies a list of items, and plans their rows. `dims`: batch dimensions of an item, 0 or 1 (its environments). False: an item
// is not plain, or not of the layout, or the list changed.
inline bool plan_list(const Codec& codec, PyObject* list, int dims, size_t envs, std::optional<size_t> own, int float_bits, Plan& plan) {
  const std::vector<int64_t> lead(static_cast<size_t>(dims), static_cast<int64_t>(envs));
  const Numbers numbers{float_bits};
  std::vector<nb::object> values;
  return plan_staged(list, envs, codec, plan, [&](PyObject* item, Plan& into) {
    return codec.check_without(into, values, item, dims, -1, own, numbers, &lead) && into.steps == 1 && into.envs == envs;
  });
}

// Plans the rows of a list of items, or of a batch of them, that are exactly of the codec's form (`Codec.check_same`), so that
// equal ones can be built again. False: one of them is of another form, or there is none.
inline bool plan_same(const Codec& codec, PyObject* items, std::optional<size_t> own, Plan& plan) {
  if (codec.sequence()) throw nb::value_error("items carry no sequence");
  std::vector<nb::object> values;
  if (!PyList_CheckExact(items)) {
    if (!codec.check_same(plan, values, items, true, own)) return false;
    plan.keep.insert(plan.keep.end(), values.begin(), values.end());
    return plan.steps > 0;
  }
  return plan_staged(items, 1, codec, plan, [&](PyObject* item, Plan& into) {
    return codec.check_same(into, values, item, false, own);
  });
}

// As `Codec.check`, whose rows may be those of items: a list of them, or a batch; what is given as their index are slots then,
// int64 [n], each for all steps of an item.
inline std::optional<Plan> check(const Codec& codec, nb::handle batch, int batch_dims, int time_dim, nb::handle extra) {
  if (!codec.of_items()) return codec.check(batch, batch_dims, time_dim, extra);
  PyObject *key = nullptr, *index = nullptr;
  if (!extra.is_none()) {
    if (!PyTuple_Check(extra.ptr())) throw nb::type_error("extra must be a tuple of a key and a value");
    if (!PyArg_ParseTuple(extra.ptr(), "OO", &key, &index)) throw nb::python_error();
  }
  const std::optional<size_t> own = key ? codec.root_leaf(key) : std::nullopt;
  if (key && (!own || !codec.index_dims(*own))) return std::nullopt;
  Plan plan;
  if (!plan_same(codec, batch.ptr(), own, plan)) return std::nullopt;
  if (!own || index == Py_None) return plan;
  const SlotsArg slots{nb::handle(index)};
  if (slots.n != plan.steps) throw nb::value_error("one slot for each item");
  LeafSource& leaf = plan.leaves[*own];
  const size_t each = leaf.bytes / 8;
  for (size_t i = 0; i < slots.n; ++i) plan.given_index.insert(plan.given_index.end(), each, slots.data[i]);
  leaf.array = reinterpret_cast<const uint8_t*>(plan.given_index.data()), leaf.stride = static_cast<ptrdiff_t>(leaf.bytes);
  plan.own.reset();
  return plan;
}

// The columns of many steps, an array for each leaf, whose memory stays where it is as long as the plan refers to them; what stands
// for leaf `own` is ignored. None: a column is another object, or does not fit.
inline std::optional<Plan> check_columns(const Codec& codec, nb::list columns, int batch_dims, int time_dim, std::optional<size_t> own) {
  Codec::check_dims(batch_dims, time_dim);
  Plan plan;
  if (!codec.check_columns(plan, columns.ptr(), batch_dims, time_dim, own)) return std::nullopt;
  const size_t arrays = codec.leaves().size() - (own ? 1 : 0);
  if (plan.buffers.size() != arrays || !plan.scalars.empty()) return std::nullopt;
  return plan;
}

// Appends the first n steps of checked leaves, which the caller has alone; rows that store their own index get it here. `looked_at`:
// where the border looks; empty: at the leaves. Returns their slots, or True where they are not `wanted`. None: another process has
// the turn; or, where it `declines`, a queue has no room for all of them, or other writers are to go first. Else QueueFullError, with
// the slots of those that were written.
inline nb::object append_leaves(Store& store, uint64_t lane, const Plan& plan, std::vector<LeafSource>& leaves,
                                const std::vector<LeafSource>& looked_at, size_t n, bool wanted = true, bool declines = true) {
  check_border(store, plan);
  if (store.lanes.is_ragged()) throw nb::value_error("the rows of this store have any length: use append_row");
  const std::vector<LeafSource>& looked = looked_at.empty() ? leaves : looked_at;
  const StoreGeometry& s = store.geometry();
  const bool is_long = writes_long(store, plan.steps ? plan.bytes / plan.steps * n : 0);
  std::optional<IndexNumbers> numbers;
  std::vector<int64_t> index;
  if (plan.own) {
    LeafSource& leaf = leaves[*plan.own];
    numbers.emplace(store, leaf.bytes, plan.own_dims);
    index.resize(n * plan.envs * numbers->each());
    leaf.array = reinterpret_cast<const uint8_t*>(index.data());
    leaf.stride = static_cast<ptrdiff_t>(plan.envs * leaf.bytes), leaf.env_stride = static_cast<ptrdiff_t>(leaf.bytes);
  }
  int64_t* own = index.data();
  const auto put_index = [&](uint64_t slot) {
    for (size_t env = 0; numbers && env < plan.envs; ++env, own += numbers->each()) numbers->put(slot, env, own);
  };
  if (store.moves_on()) {
    int64_t first = 0, *out = plan.single ? &first : nullptr;
    nb::object slots = nb::bool_(true);
    if (wanted && !plan.single) slots = nb::cast(slots_out(n, [&](int64_t* to) { out = to; }));
    try {
      const auto slot_at = [&](uint64_t i, uint64_t slot) {
        if (out) out[i] = static_cast<int64_t>(slot);
        put_index(slot);
      };
      append_moving_on(is_long, [&](auto&& pause) { append_in_stints(store, leaves, looked, n, slot_at, pause); });
    } catch (const QueueFull& full) {
      raise_queue_full(full.done, n, slots);
    }
    return wanted && plan.single ? nb::object(nb::int_(first)) : slots;
  }
  const Turn turn(store, lane);
  if (turn.refused()) return nb::none();
  if (store.lanes.is_queue() && !has_queue_room(store.lanes, lane, n, declines)) {
    if (declines) return nb::none();
    raise_queue_full(0, n, nb::none());
  }
  // The result is made before the rows: once they are published nothing may fail any more.
  std::optional<OutBlock> block;
  nb::object slots;
  const auto steps = static_cast<int64_t>(n);
  static const std::vector<int64_t> scalar;
  if (!wanted) {
    slots = nb::bool_(true);
  } else if (!plan.single) {
    block.emplace();
    block->plan({kDLInt, 64}, &steps, 1, scalar, n * 8);
    block->take();
    slots = block->make(0);  // may run Python code, such as another append: the first slot is looked up afterwards
  }
  const uint64_t first = store.lanes.lane(lane).published.load(), base = lane * s.lane_capacity;
  if (wanted && plan.single) slots = nb::int_(base + first % s.lane_capacity);
  uint64_t slot = first % s.lane_capacity;
  auto* out = block ? reinterpret_cast<int64_t*>(block->data(0)) : nullptr;
  for (size_t i = 0; (out || numbers) && i < n; ++i) {
    if (out) out[i] = static_cast<int64_t>(base + slot);
    put_index(base + slot);
    if (++slot == s.lane_capacity) slot = 0;
  }
  maybe_without_gil(is_long, [&] { RowWriter(store).append(lane, n, leaves, looked); });
  return slots;
}

// Plans for a store whose lane this process holds. False: it was forked, so that it holds none, or has to wait.
inline bool may_push(Store& store, const Codec& codec, uint64_t lane) {
  if (joined_after_fork()) return false;
  store.must_be_writable();
  check_lane(store, lane);
  check_codec(store, codec);
  const uint64_t mode = store.lanes.flow_mode();
  return !mode || (!must_wait(store.lanes) && !(mode & FlowMode::kQueue && store.moves_on()));
}

// Checks a batch and appends it: see `Codec.check` and `Store.append`. A list holds items, stacked along time; with
// `float_bits` Python's floats in it have so many bits. `own`: the leaf in which the rows store their own index. None: nothing
// was written, because the batch is not plain, does not fit, has no steps, another process has the turn, this process was
// forked and holds no lane, or has to wait for those who sample.
inline nb::object push(Store& store, const Codec& codec, uint64_t lane, nb::handle batch, int batch_dims, int time_dim,
                       std::optional<size_t> own, std::optional<int> float_bits) {
  if (!may_push(store, codec, lane)) return nb::none();
  Codec::check_dims(batch_dims, time_dim);
  const size_t envs = store.geometry().envs;
  Plan plan;
  if (codec.of_items()) {
    nb::list one;
    if (batch_dims == 0) one.append(batch);
    if (!plan_same(codec, batch_dims == 0 ? one.ptr() : batch.ptr(), own, plan)) return nb::none();
    plan.single = batch_dims == 0;
  } else if (float_bits) {
    if (batch_dims < 1 || !PyList_CheckExact(batch.ptr())) return nb::none();
    if (!plan_list(codec, batch.ptr(), batch_dims - 1, envs, own, *float_bits, plan)) return nb::none();
  } else {
    std::vector<nb::object> values;
    if (!codec.check_without(plan, values, batch.ptr(), batch_dims, time_dim, own, {})) return nb::none();
    if (plan.steps == 0 || plan.envs != envs) return nb::none();
    return append_leaves(store, lane, plan, plan.leaves, {}, plan.steps);  // while `values` hold the leaves
  }
  return append_leaves(store, lane, plan, plan.leaves, {}, plan.steps);
}

// As `push`, of the leaves of a batch in the order of the layout; what stands for leaf `own` is ignored. Whether it was written.
inline bool push_columns(Store& store, const Codec& codec, uint64_t lane, nb::handle columns, int batch_dims, int time_dim,
                         std::optional<size_t> own) {
  if (!may_push(store, codec, lane)) return false;
  Codec::check_dims(batch_dims, time_dim);
  Plan plan;
  if (!codec.check_columns(plan, columns.ptr(), batch_dims, time_dim, own)) return false;
  if (plan.steps == 0 || plan.envs != store.geometry().envs) return false;
  return !append_leaves(store, lane, plan, plan.leaves, {}, plan.steps, false).is_none();
}

// Appends one time step of all environments, of numpy arrays that are converted to what the rows have (`Codec::check_step`), and
// makes no index of it. False: nothing was written, for one of the reasons of `push`.
inline bool push_step(Store& store, const Codec& codec, uint64_t lane, nb::handle step) {
  if (!may_push(store, codec, lane)) return false;
  std::vector<nb::object> values;
  Plan plan;
  if (!codec.check_step(plan, values, step.ptr(), store.geometry().envs)) return false;
  return !append_leaves(store, lane, plan, plan.leaves, {}, 1, false).is_none();
}

}  // namespace engram
