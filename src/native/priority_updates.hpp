// Priorities on their way to shards: copies of what a learner gives, and these divided by the shards of their rows.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "leaves.hpp"

namespace engram {

// Rows by flat index, their priorities, and their generations, if these are known: int64, float64, int64 [n].
using RowUpdates = std::tuple<Tensor, Tensor, std::optional<Tensor>>;

// The memory of a contiguous tensor [n] on the CPU; null: it is something else.
template <typename Item>
inline const Item* column_of(nb::handle tensor, DType dtype, size_t& n) {
  TensorView view;
  if (!view.of(tensor.ptr()) || !(view.dtype == dtype) || view.ndim != 1) return nullptr;
  n = static_cast<size_t>(view.shape[0]);
  if (view.strides && n > 1 && view.strides[0] != 1) return nullptr;
  if (reinterpret_cast<uintptr_t>(view.data) % alignof(Item) != 0) return nullptr;
  static const Item none{};
  return n ? reinterpret_cast<const Item*>(view.data) : &none;
}

// Tensors for n updates in memory of their own, and where to write them.
struct UpdatesOut {
  UpdatesOut(size_t n, bool has_generations) : n_generations(has_generations ? 1 : 0) {
    out.add({kDLInt, 64}, n), out.add({kDLFloat, 64}, n);
    if (has_generations) out.add({kDLInt, 64}, n);
    out.take();
    index = out.data<int64_t>(0), priority = out.data<double>(1);
    generation = has_generations ? out.data<int64_t>(2) : nullptr;
  }
  RowUpdates make() {
    Tensor at = out.make(0), priorities = out.make(1);
    return {std::move(at), std::move(priorities), n_generations ? std::optional(out.make(2)) : std::nullopt};
  }
  Results out;
  int64_t *index = nullptr, *generation = nullptr;
  double* priority = nullptr;
  int n_generations;
};

// Copies of updates of rows below `end`. None: the tensors are not plain ones of one length, or an index lies outside.
inline std::optional<RowUpdates> copy_updates(nb::handle index, nb::handle priority, nb::handle generation, int64_t end) {
  size_t n = 0, n_priorities = 0, n_generations = 0;
  const int64_t* const at = column_of<int64_t>(index, {kDLInt, 64}, n);
  const double* const p = column_of<double>(priority, {kDLFloat, 64}, n_priorities);
  if (!at || !p || n != n_priorities || is_lazy(priority.ptr())) return std::nullopt;
  const int64_t* g = nullptr;
  if (!generation.is_none()) {
    g = column_of<int64_t>(generation, {kDLInt, 64}, n_generations);
    if (!g || n_generations != n) return std::nullopt;
  }
  UpdatesOut out(n, g != nullptr);
  bool is_inside = true;
  for (size_t i = 0; i < n; ++i) {  // copied before they are looked at: another thread may write to them
    const int64_t row = at[i];
    is_inside &= row >= 0 && row < end;
    out.index[i] = row;
  }
  if (!is_inside) return std::nullopt;
  std::copy_n(p, n, out.priority);
  if (g) std::copy_n(g, n, out.generation);
  return out.make();
}

// Updates, which all have generations or none of which has, divided by the shards of `capacity` rows each that their rows are
// of: for each shard that has some its number and these in their order. And how many are of rows behind the last shard.
inline std::tuple<size_t, std::vector<std::tuple<size_t, RowUpdates>>> divide_updates(const std::vector<RowUpdates>& given,
                                                                                      int64_t capacity, size_t shards) {
  if (capacity < 1 || shards == 0 || shards >= UINT32_MAX) throw nb::value_error("shards have room for rows");
  struct Part {
    const int64_t *index, *generation;
    const double* priority;
    size_t n;
  };
  std::vector<Part> parts;
  size_t total = 0;
  const bool has_generations = !given.empty() && std::get<2>(given[0]).has_value();
  for (const auto& [index, priority, generation] : given) {
    size_t n = 0, n_priorities = 0, n_generations = 0;
    const auto* const at = column_of<int64_t>(index, {kDLInt, 64}, n);
    const auto* const p = column_of<double>(priority, {kDLFloat, 64}, n_priorities);
    const auto* const g = generation ? column_of<int64_t>(*generation, {kDLInt, 64}, n_generations) : nullptr;
    if (!at || !p || n != n_priorities) throw nb::value_error("updates are contiguous int64 and float64 [n]");
    if (has_generations != generation.has_value()) throw nb::value_error("some updates have generations, others none");
    if (has_generations && (!g || n_generations != n)) throw nb::value_error("generations are contiguous int64 [n]");
    parts.push_back({at, g, p, n});
    total += n;
  }
  // Indices are read once: other threads may write to them.
  std::vector<int64_t> indices(total);
  std::vector<uint32_t> owners(total);
  std::vector<size_t> counts(shards + 1, 0);  // the last one: rows behind the last shard
  size_t at = 0;
  for (const Part& part : parts)
    for (size_t i = 0; i < part.n; ++i, ++at) {
      const int64_t index = part.index[i];
      if (index < 0) throw nb::index_error("an index is negative");
      const auto owner = std::min(static_cast<uint64_t>(index) / static_cast<uint64_t>(capacity), static_cast<uint64_t>(shards));
      indices[at] = index, owners[at] = static_cast<uint32_t>(owner);
      ++counts[owner];
    }
  std::vector<std::unique_ptr<UpdatesOut>> outs(shards);  // memory for each, as the parts of some shards may wait for long
  for (size_t k = 0; k < shards; ++k)
    if (counts[k]) outs[k] = std::make_unique<UpdatesOut>(counts[k], has_generations);
  std::vector<size_t> next(shards, 0);
  at = 0;
  for (const Part& part : parts)
    for (size_t i = 0; i < part.n; ++i, ++at) {
      const size_t k = owners[at];
      if (k == shards) continue;
      UpdatesOut& out = *outs[k];
      const size_t to = next[k]++;
      out.index[to] = indices[at], out.priority[to] = part.priority[i];
      if (has_generations) out.generation[to] = part.generation[i];
    }
  std::vector<std::tuple<size_t, RowUpdates>> divided;
  for (size_t k = 0; k < shards; ++k)
    if (outs[k]) divided.emplace_back(k, outs[k]->make());
  return {counts[shards], std::move(divided)};
}

}  // namespace engram
