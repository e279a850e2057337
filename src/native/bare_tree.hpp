// A sum tree by itself, and powers as each implementation computes them, for tests.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "power.hpp"
#include "sum_tree.hpp"
#include "tensors.hpp"

namespace engram {

// A sum tree with its minimum tree by itself.
struct BareTree {
  explicit BareTree(uint64_t n) : size(n), sum(n) {}
  void check(const SlotsArg& slots) const {
    for (size_t i = 0; i < slots.n; ++i)
      if (static_cast<uint64_t>(slots.data[i]) >= size) throw nb::index_error("no such leaf");
  }
  void set(nb::handle slots_in, nb::handle values_in) {
    const SlotsArg slots{nb::borrow(slots_in)};
    const NumbersArg values(values_in);
    if (!values.fits() || values.n != slots.n) throw nb::value_error("one value for each leaf");
    check(slots);
    LeafChanges changes;
    changes.restart(slots.n);
    for (size_t i = 0; i < slots.n; ++i) sum.set(static_cast<uint64_t>(slots.data[i]), values[i], 0, changes);
    sum.refresh(changes);
  }
  void fill(uint64_t from, uint64_t to, double value) {
    if (from >= to || to > size) throw nb::index_error("no such leaves");
    for (uint64_t leaf = from; leaf < to; ++leaf) sum.leaf(leaf) = value;
    sum.refresh(from / kWide, (to - 1) / kWide);
  }
  // The leaves and values that each implementation this processor supports finds.
  std::vector<std::pair<std::vector<uint64_t>, std::vector<double>>> find_in_all_ways(const std::vector<double>& prefixes) const {
    if (!(sum.total() > 0)) throw nb::value_error("the tree holds nothing");
    std::vector<std::pair<std::vector<uint64_t>, std::vector<double>>> found;
    const auto add = [&](auto&& find) {
      std::vector<double> prefix = prefixes, value(prefixes.size());
      std::vector<uint64_t> leaf(prefixes.size());
      find(prefix.data(), leaf.data(), value.data(), prefixes.size());
      found.emplace_back(std::move(leaf), std::move(value));
    };
    add([&](auto... to) { sum.find(to...); });
    add([&](auto... to) { sum.find_one_by_one(to...); });
#ifdef ENGRAM_CHOOSES_VECTORS
    if (__builtin_cpu_supports("avx2")) add([&](auto... to) { find_by_fours(to...); });
    if (__builtin_cpu_supports("x86-64-v4")) add([&](auto... to) { find_by_eights(to...); });
#endif
    return found;
  }
  std::vector<uint64_t> find(std::vector<double> prefixes) const { return find_in_all_ways(prefixes)[0].first; }
#ifdef ENGRAM_CHOOSES_VECTORS
  __attribute__((target("avx2"))) void find_by_fours(double* prefix, uint64_t* leaf, double* value, size_t n) const {
    sum.find_together<Columns4>(prefix, leaf, value, n);
  }
  __attribute__((target("arch=x86-64-v4"))) void find_by_eights(double* prefix, uint64_t* leaf, double* value, size_t n) const {
    sum.find_together<Columns8>(prefix, leaf, value, n);
  }
#endif
  uint64_t size;
  SumTree sum;
};

#ifdef ENGRAM_CHOOSES_VECTORS
// For processors that can fuse a product and a sum into one rounding.
__attribute__((target("avx2,fma"))) inline void raise_where_fused(double* x, size_t n, double y) {
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) raise_numbers<4>(x, n, y);
  else raise_to(x, n, y);
}
#else
inline void raise_where_fused(double* x, size_t n, double y) { raise_to(x, n, y); }
#endif

// Powers as each implementation computes them.
inline std::vector<std::vector<double>> all_powers(nb::handle values_in, double y) {
  const NumbersArg values(values_in);
  if (!values.fits()) throw nb::type_error("contiguous float64");
  std::vector<double> x;
  for (size_t i = 0; i < values.n; ++i) x.push_back(values[i]);
  std::vector<std::vector<double>> ways(6, x);
  raise_to(ways[0].data(), x.size(), y);
  for (double& one : ways[1]) one = raised(one, y);
  raise_numbers<2>(ways[2].data(), x.size(), y);
  raise_numbers<4>(ways[3].data(), x.size(), y);
  raise_numbers<8>(ways[4].data(), x.size(), y);
  raise_where_fused(ways[5].data(), x.size(), y);
  return ways;
}

}  // namespace engram
