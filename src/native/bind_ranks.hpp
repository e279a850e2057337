// Python bindings of the max-value writer's heap.
#pragma once
#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "bind_store.hpp"
#include "ranks.hpp"

namespace engram {

inline Reduction reduction_of(const std::string& name) {
  if (name == "sum") return Reduction::kSum;
  if (name == "mean") return Reduction::kMean;
  if (name == "max") return Reduction::kMax;
  if (name == "median") return Reduction::kMedian;
  if (name == "min") return Reduction::kMin;
  throw nb::value_error(("unknown reduction " + name).c_str());
}

// Reduces contiguous values [rows, ...] of float32, float64 or int64 to one rank for each row.
inline std::vector<double> ranks_of(nb::handle values, Reduction reduction) {
  TensorView t;
  Buffer buffer;
  DType dtype{};
  const void* data = nullptr;
  std::vector<int64_t> shape;
  if (t.of(values.ptr())) {
    int64_t step = 1;
    for (int d = t.ndim - 1; d >= 0; --d) {
      if (t.strides && t.shape[d] > 1 && t.strides[d] != step) throw nb::type_error("values must be contiguous");
      step *= std::max<int64_t>(1, t.shape[d]);
    }
    data = t.data, dtype = t.dtype;
    shape.assign(t.shape, t.shape + t.ndim);
  } else if (buffer.get(values.ptr())) {
    const Py_buffer& v = buffer.view();
    if (!PyBuffer_IsContiguous(&v, 'C') || !dtype_of_format(v.format, v.itemsize, dtype))
      throw nb::type_error("values must be contiguous numbers");
    data = v.buf, shape.assign(v.shape, v.shape + v.ndim);
  } else {
    throw nb::type_error("values must be a tensor or an array on the CPU");
  }
  if (shape.empty()) throw nb::value_error("values need a dimension for their rows");
  const auto rows = static_cast<size_t>(shape[0]);
  size_t each = 1;
  for (size_t d = 1; d < shape.size(); ++d) each *= static_cast<size_t>(shape[d]);
  if (each == 0) throw nb::value_error("a row has no values to rank it by");
  if (rows > 0 && reinterpret_cast<uintptr_t>(data) % (dtype.bits / 8) != 0) throw nb::type_error("unaligned values");
  std::vector<double> ranks(rows), scratch;
  auto reduce = [&](auto* typed) {
    for (size_t i = 0; i < rows; ++i) ranks[i] = rank_of(typed + i * each, each, reduction, scratch);
  };
  if (dtype == DType{kDLFloat, 32}) reduce(static_cast<const float*>(data));
  else if (dtype == DType{kDLFloat, 64}) reduce(static_cast<const double*>(data));
  else if (dtype == DType{kDLInt, 64}) reduce(static_cast<const int64_t*>(data));
  else throw nb::type_error("values must be float32, float64 or int64");
  return ranks;
}

inline Tensor int64_out(const std::vector<int64_t>& values) {
  return slots_out(values.size(), [&](int64_t* out) { std::copy(values.begin(), values.end(), out); });
}

// Slots of rows that are new to the heap or were changed; None: there are none. The caller must pass their ranks to `put`.
inline std::optional<Tensor> heap_behind(RankHeap& heap, const Store& store) {
  const StoreGeometry& s = store.geometry();
  if (s.lanes != 1 || s.envs != 1 || s.lane_capacity != heap.capacity())
    throw nb::value_error("the heap was made for a store of another shape");
  struct Visitor {
    RankHeap& heap;
    const Store& store;
    std::vector<int64_t> slots;
    void restart(const Store&) { heap.clear(); }
    void vanished(uint64_t, uint64_t from, uint64_t to) {
      for (uint64_t w = std::max(from, to > heap.capacity() ? to - heap.capacity() : 0); w < to; ++w)
        heap.remove(w % heap.capacity());
    }
    void rows(uint64_t, uint64_t from, uint64_t to) {
      for (uint64_t w = from; w < to; ++w) slots.push_back(static_cast<int64_t>(w % heap.capacity()));
    }
    bool is_left(int64_t slot) const { return !store.lanes.is_removed(static_cast<uint64_t>(slot)); }
    void edited(uint64_t slot) {
      uint64_t sequence = 0;
      if (SlotSequences(store.lanes.view(0), heap.capacity()).find(slot, sequence))
        slots.push_back(static_cast<int64_t>(slot));
    }
  } visitor{heap, store, {}};
  try {
    heap.follower().poll(store, visitor);
    if (store.lanes.removals()) {  // removed rows are the first ones that others take the place of
      std::erase_if(visitor.slots, [&](int64_t slot) { return !visitor.is_left(slot); });
      store.lanes.each_removed(0, [&](uint64_t w, uint64_t) { heap.set_rank(w % heap.capacity(), -HUGE_VAL); });
    }
    return visitor.slots.empty() ? std::nullopt : std::optional(int64_out(visitor.slots));
  } catch (...) {
    heap.follower().forget();  // memory ran out before these rows were returned
    throw;
  }
}

inline void heap_put(RankHeap& heap, nb::handle slots_in, nb::handle values, const char* reduction) {
  const std::vector<double> ranks = ranks_of(values, reduction_of(reduction));
  const SlotsArg slots(nb::borrow(slots_in));
  if (slots.n != ranks.size()) throw nb::value_error("one rank for each slot");
  for (size_t i = 0; i < slots.n; ++i)
    if (static_cast<uint64_t>(slots.data[i]) >= heap.capacity()) throw nb::index_error("a slot lies outside the heap");
  for (size_t i = 0; i < slots.n; ++i) heap.set_rank(static_cast<uint64_t>(slots.data[i]), ranks[i]);
}

// Slots of the items, how many are appended, and which other items replace which rows (None: none).
using Placed = std::tuple<Tensor, size_t, std::optional<Tensor>, std::optional<Tensor>>;
inline Placed heap_place(RankHeap& heap, const Store* store, nb::handle values, const char* reduction) {
  const std::vector<double> ranks = ranks_of(values, reduction_of(reduction));
  for (size_t i = 0; i < ranks.size(); ++i)
    if (std::isnan(ranks[i]))
      throw nb::value_error(("the rank of item " + std::to_string(i) + " is NaN, which is neither above nor below others; "
                             "nothing was written").c_str());
  uint64_t room = heap.capacity(), next = 0;
  if (store) {
    if (!heap.follower().follows(*store)) throw nb::value_error("the heap does not follow this store");
    const LaneView view = store->lanes.view(0);
    room -= std::min(room, view.rows()), next = view.published % heap.capacity();
  }
  Placement placed;
  heap.place(ranks.data(), ranks.size(), room, next, placed);
  try {
    Tensor slots = int64_out(placed.slots);
    if (placed.items.empty()) return {std::move(slots), placed.appended, std::nullopt, std::nullopt};
    return {std::move(slots), placed.appended, int64_out(placed.items), int64_out(placed.targets)};
  } catch (...) {
    heap.undo();
    throw;
  }
}

}  // namespace engram
