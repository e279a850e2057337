// A tree over many numbers: their sum, the leaf in which a prefix of the sum falls, and their extremes.
//
// A node is eight numbers wide, so that a tree over a million leaves has seven levels. Each number has a second one in the next
// cache line: above the leaves the lowest leaf under it, and at a leaf a number for the owner's own use. So a change of a leaf
// needs two neighbouring lines of memory for itself, and two for the node above.
//
// Every number above the leaves is computed only from the eight below it: a tree is bit for bit the one that a rebuild from its
// leaves would give, whatever its history.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "mapping.hpp"
#include "wide_vectors.hpp"

namespace engram {

constexpr uint64_t kWide = 8;

// The changed nodes of one level, then of the level above, and so on. Repetitions are harmless.
class DirtyNodes {
 public:
  void clear() { nodes_.clear(); }
  void reserve(size_t n) { nodes_.reserve(n); }
  void add(uint64_t node) { nodes_.push_back(node); }
  // Moves to the nodes above these. Neighbours mostly share theirs; finding other repetitions costs more than it saves.
  void up() {
    size_t n = 0;
    uint64_t last = ~uint64_t{0};
    for (uint64_t node : nodes_) {
      const uint64_t above = node / kWide;
      nodes_[n] = above;
      n += above != last;
      last = above;
    }
    nodes_.resize(n);
  }
  // Keeps only the nodes for which `keep(node)` is true, without a branch for each.
  template <typename Keep>
  void filter(Keep&& keep) {
    size_t n = 0;
    for (uint64_t node : nodes_) {
      nodes_[n] = node;
      n += keep(node);
    }
    nodes_.resize(n);
  }
  // Memory for n nodes; `cut` then keeps the first ones.
  uint64_t* room(size_t n) {
    nodes_.resize(n);
    return nodes_.data();
  }
  void cut(size_t n) { nodes_.resize(n); }
  const std::vector<uint64_t>& nodes() const { return nodes_; }

 private:
  std::vector<uint64_t> nodes_;
};

// Leaves that were set: the node of each, its old value and its new one.
class LeafChanges {
 public:
  // Clears the list, and reserves memory for this many: adding them, and refreshing a tree after them, then allocates nothing.
  void restart(size_t most) {
    n_ = 0;
    sums_.reserve(most), lows_.reserve(most);
    if (node_.size() < most) from_.resize(most), to_.resize(most), node_.resize(most);
  }
  void add(uint64_t node, double from, double to) {
    node_[n_] = node, from_[n_] = from, to_[n_] = to;
    ++n_;
  }

 private:
  friend class SumTree;
  size_t n_ = 0;
  std::vector<double> from_, to_;
  std::vector<uint64_t> node_;
  DirtyNodes sums_, lows_;  // during a refresh: the nodes whose sum, and those whose lowest, may change
};

#ifdef ENGRAM_CHOOSES_VECTORS
// Four nodes, and eight: number j of each of them side by side. GCC copies no vector of 32 bytes by one instruction where
// memcpy does, and does not unroll loops over few nodes by itself.
struct Columns4 {
  static constexpr size_t kNodes = 4;
  typedef double Numbers __attribute__((vector_size(32)));
  typedef int64_t Bits __attribute__((vector_size(32)));
  typedef double InMemory __attribute__((vector_size(32), may_alias, aligned(8)));

  [[gnu::always_inline]] static void load(Numbers& numbers, const void* from) {
    numbers = *static_cast<const InMemory*>(from);
  }
  [[gnu::always_inline]] static void store(void* to, const Numbers& numbers) { *static_cast<InMemory*>(to) = numbers; }

  [[gnu::always_inline]] explicit Columns4(const double* const* nodes) {
#pragma GCC unroll 2
    for (size_t half = 0; half < kWide; half += 4) {
      Numbers r0, r1, r2, r3;
      load(r0, nodes[0] + half), load(r1, nodes[1] + half), load(r2, nodes[2] + half), load(r3, nodes[3] + half);
      const Numbers even01 = __builtin_shufflevector(r0, r1, 0, 4, 2, 6), odd01 = __builtin_shufflevector(r0, r1, 1, 5, 3, 7);
      const Numbers even23 = __builtin_shufflevector(r2, r3, 0, 4, 2, 6), odd23 = __builtin_shufflevector(r2, r3, 1, 5, 3, 7);
      of[half] = __builtin_shufflevector(even01, even23, 0, 1, 4, 5);
      of[half + 1] = __builtin_shufflevector(odd01, odd23, 0, 1, 4, 5);
      of[half + 2] = __builtin_shufflevector(even01, even23, 2, 3, 6, 7);
      of[half + 3] = __builtin_shufflevector(odd01, odd23, 2, 3, 6, 7);
    }
  }
  Numbers of[kWide];
};
struct Columns8 {
  static constexpr size_t kNodes = 8;
  typedef double Numbers __attribute__((vector_size(64)));
  typedef int64_t Bits __attribute__((vector_size(64)));
  typedef double InMemory __attribute__((vector_size(64), may_alias, aligned(8)));

  [[gnu::always_inline]] static void load(Numbers& numbers, const void* from) {
    numbers = *static_cast<const InMemory*>(from);
  }
  [[gnu::always_inline]] static void store(void* to, const Numbers& numbers) { *static_cast<InMemory*>(to) = numbers; }

  [[gnu::always_inline]] explicit Columns8(const double* const* nodes) {
    Numbers pair[2][4], four[4][2];  // of two nodes every second number, of four every fourth
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
      Numbers a, b;
      load(a, nodes[2 * i]), load(b, nodes[2 * i + 1]);
      pair[0][i] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
      pair[1][i] = __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    }
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half)
#pragma GCC unroll 2
      for (size_t odd = 0; odd < 2; ++odd) {
        const Numbers a = pair[odd][2 * half], b = pair[odd][2 * half + 1];
        four[odd][half] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
        four[odd + 2][half] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
      }
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
      of[j] = __builtin_shufflevector(four[j][0], four[j][1], 0, 1, 2, 3, 8, 9, 10, 11);
      of[j + 4] = __builtin_shufflevector(four[j][0], four[j][1], 4, 5, 6, 7, 12, 13, 14, 15);
    }
  }
  Numbers of[kWide];
};
#endif

// Leaves are 0 or more; leaves of 0 are ignored by the lowest.
class SumTree {
 public:
  // With `highest` the tree also keeps the highest of the numbers beside the leaves.
  explicit SumTree(uint64_t leaves, bool highest = false) {
    uint64_t all = 0, highs = 0;
    for (uint64_t n = nodes_over(leaves);; n = nodes_over(n)) {
      starts_.push_back(all), counts_.push_back(n);
      all += n;
      if (n == 1) break;
      high_starts_.push_back(highs), highs += round_up(n, kWide);
    }
    memory_ = MappedRegion::map(-1, all * sizeof(Node));
    if (highest) high_memory_ = MappedRegion::map(-1, std::max<uint64_t>(highs, kWide) * sizeof(double));
  }

  double& leaf(uint64_t i) { return at(0)[i / kWide].value[i % kWide]; }
  double leaf(uint64_t i) const { return at(0)[i / kWide].value[i % kWide]; }
  // The owner's number beside a leaf.
  double& beside(uint64_t i) { return at(0)[i / kWide].beside[i % kWide]; }
  double beside(uint64_t i) const { return at(0)[i / kWide].beside[i % kWide]; }
  uint64_t leaf_nodes() const { return counts_[0]; }
  double total() const { return total_; }
  // 0 if every leaf is 0.
  double lowest() const { return lowest_; }
  double highest() const { return highest_; }
  // Prefetches the memory that changes of these leaves need; invalid leaves are skipped.
  void prefetch(const int64_t* leaves, size_t n) const {
    const size_t parent = std::min<size_t>(1, top());
    const Node *nodes = at(0), *parents = at(parent);
    const uint64_t count = counts_[0];
    for (size_t i = 0; i < n; ++i) {
      const uint64_t node = static_cast<uint64_t>(leaves[i]) / kWide;
      if (node >= count) continue;
      __builtin_prefetch(nodes[node].value), __builtin_prefetch(nodes[node].beside);
      __builtin_prefetch(parents[parent ? node / kWide : node].value);  // the numbers beside rarely change there
    }
    asm volatile("");  // GCC drops calls that only prefetch
  }

  // Sets a leaf and the owner's number beside it; the caller must then call `refresh(changes)`.
  void set(uint64_t i, double value, double beside, LeafChanges& changes) {
    Node& node = at(0)[i / kWide];
    double& leaf = node.value[i % kWide];
    changes.add(i / kWide, leaf, value);
    leaf = value, node.beside[i % kWide] = beside;
  }
  // After leaves were set. A node's lowest number changes only if a leaf was the lowest, or is it now.
  void refresh(LeafChanges& changes) {
    const size_t n = changes.n_;
    if (n == 0) return;
    uint64_t* const nodes = changes.sums_.room(n);
    std::copy_n(changes.node_.data(), n, nodes);
    if (top() == 0 || counts_[0] <= kDense * n || high_memory_) return refresh(changes.sums_);
    uint64_t* const lows = changes.lows_.room(n);
    changes.lows_.cut(enter_leaf_nodes(at(0), at(1), nodes, changes.from_.data(), changes.to_.data(), n, lows));
    changes.sums_.up();
    raise_sums(changes.sums_);
    raise_lows(changes.lows_);
    finish();
  }
  // After leaves in these nodes changed.
  void refresh(DirtyNodes& dirty) {
    for (size_t k = 0; k < top(); ++k) {
      if (counts_[k] <= kDense * dirty.nodes().size()) return refresh_from(k, 0, counts_[k] - 1);
      for (uint64_t node : dirty.nodes()) raise(k, node);
      dirty.up();
    }
    finish();
  }
  // After leaves in nodes [first, last] changed.
  void refresh(uint64_t first, uint64_t last) { refresh_from(0, first, last); }

  // The leaves in which prefixes [0, total) of the sum fall, and their values, which are never 0. Overwrites `prefix`.
  void find(double* prefix, uint64_t* leaf, double* value, size_t n) const {
    begin_find(prefix, leaf, n);
    for (size_t k = top(); k > 0; --k) step_down(at(k), at(k - 1), prefix, leaf, value, n);
    step_down(at(0), nullptr, prefix, leaf, value, n);
  }
  // As `find`, by each of the implementations from which `find` chooses one for the processor.
  void find_one_by_one(double* prefix, uint64_t* leaf, double* value, size_t n) const {
    begin_find(prefix, leaf, n);
    for (size_t k = top(); k > 0; --k) step_down_one_by_one(at(k), at(k - 1), prefix, leaf, value, n);
    step_down_one_by_one(at(0), nullptr, prefix, leaf, value, n);
  }
#ifdef ENGRAM_CHOOSES_VECTORS
  template <class Columns>
  [[gnu::always_inline]] void find_together(double* prefix, uint64_t* leaf, double* value, size_t n) const {
    begin_find(prefix, leaf, n);
    for (size_t k = top(); k > 0; --k) step_down_together<Columns>(at(k), at(k - 1), prefix, leaf, value, n);
    step_down_together<Columns>(at(0), nullptr, prefix, leaf, value, n);
  }
#endif

 private:
  struct Node {
    double value[kWide], beside[kWide];
  };
  // With at most this many nodes in a level for each changed one, all of them in order cost less than the changed ones at
  // random.
  static constexpr uint64_t kDense = 2;

  static uint64_t nodes_over(uint64_t n) { return std::max<uint64_t>(1, (n + kWide - 1) / kWide); }
  size_t top() const { return counts_.size() - 1; }
  Node* at(size_t k) const { return reinterpret_cast<Node*>(memory_->data()) + starts_[k]; }
  // The highest under each node of level k.
  double* high(size_t k) const { return reinterpret_cast<double*>(high_memory_->data()) + high_starts_[k]; }

  // Enters a node's values into the level above.
  void raise(size_t k, uint64_t node) {
    const Node& from = at(k)[node];
    Node& to = at(k + 1)[node / kWide];
    to.value[node % kWide] = sum(from.value);
    to.beside[node % kWide] = lowest(k == 0 ? from.value : from.beside);
    if (high_memory_) high(k)[node] = highest(k == 0 ? from.beside : high(k - 1) + node * kWide);
  }
  // From level 1 on: the sums of these nodes, and of those above them.
  void raise_sums(DirtyNodes& dirty) {
    for (size_t k = 1; k < top(); ++k) {
      if (counts_[k] <= kDense * dirty.nodes().size()) {
        for (; k < top(); ++k) {
          const Node* level = at(k);
          Node* above = at(k + 1);
          for (uint64_t node = 0, n = counts_[k]; node < n; ++node) raise_sum(level, above, node);
        }
        return;
      }
      const Node* level = at(k);
      Node* above = at(k + 1);
      for (uint64_t node : dirty.nodes()) raise_sum(level, above, node);
      dirty.up();
    }
  }
  static void raise_sum(const Node* level, Node* above, uint64_t node) {
    above[node / kWide].value[node % kWide] = sum(level[node].value);
  }
  // From the leaves on: the lowest of these nodes, and of those above them, as far as it changes.
  void raise_lows(DirtyNodes& dirty) {
    for (size_t k = 0; k < top() && !dirty.nodes().empty(); ++k) {
      const Node* level = at(k);
      Node* above = at(k + 1);
      dirty.filter([&](uint64_t node) {
        double& entered = above[node / kWide].beside[node % kWide];
        const double before = std::exchange(entered, lowest(k == 0 ? level[node].value : level[node].beside));
        return before != entered;
      });
      dirty.up();
    }
  }
  void refresh_from(size_t k, uint64_t first, uint64_t last) {
    for (; k < top(); ++k, first /= kWide, last /= kWide)
      for (uint64_t node = first; node <= last; ++node) raise(k, node);
    finish();
  }
  void finish() {
    const Node& root = *at(top());
    total_ = sum(root.value);
    lowest_ = lowest(top() == 0 ? root.value : root.beside);
    if (high_memory_) highest_ = highest(top() == 0 ? root.beside : high(top() - 1));
  }

  // Two neighbours: compilers do not vectorise these loops by themselves.
  typedef double Pair __attribute__((vector_size(16), may_alias));
  typedef int64_t PairBits __attribute__((vector_size(16), may_alias));
  static const Pair* pairs(const double* n) { return reinterpret_cast<const Pair*>(n); }
  static Pair both(double x) { return Pair{x, x}; }

  // In this order, so that the last running prefix of a node is the number above it.
  static double sum(const double* node) {
    double s = node[0];
    for (size_t j = 1; j < kWide; ++j) s += node[j];
    return s;
  }
  // The lowest of the numbers above 0. The predecessor of 0 is a NaN, which no comparison takes for the lower one.
  static double lowest(const double* n) {
    const double least = lowest_rank(n);
    return least == kNone ? 0 : above(least);
  }
  // The predecessor of the lowest number; infinity if all are 0.
  static double lowest_rank(const double* n) {
    Pair best = both(kNone);
    for (size_t j = 0; j < kWide / 2; ++j) {
      const Pair x = reinterpret_cast<Pair>(reinterpret_cast<PairBits>(pairs(n)[j]) - 1);
      best = x < best ? x : best;
    }
    return best[0] < best[1] ? best[0] : best[1];
  }
  static double highest(const double* n) {
    double best = 0;
    for (size_t j = 0; j < kWide; ++j) best = n[j] > best ? n[j] : best;
    return best;
  }
  // The largest number below one that is positive, and the smallest above.
  static double below(double x) { return std::bit_cast<double>(std::bit_cast<uint64_t>(x) - 1); }
  static double above(double x) { return std::bit_cast<double>(std::bit_cast<uint64_t>(x) + 1); }
  // The child in which a prefix below the node's sum falls; the prefix becomes one of that child's sum. The child is the
  // first whose running prefix lies above, so it is not 0; rounding may put the rest at or above the child's own sum.
  static size_t step(const double* node, double& prefix) {
    double before[kWide];
    double running = node[0];
    before[0] = 0;
    size_t child = 0;
    for (size_t j = 1; j < kWide; ++j) {
      before[j] = running;
      child += prefix >= running;
      running += node[j];
    }
    prefix = std::min(prefix - before[child], below(node[child]));
    return child;
  }

  // Enters the sums of changed leaf nodes into the level above. Returns how many of the nodes, which are written to `lows`, may
  // have another lowest number now.
  static size_t enter_one_by_one(const Node* leaves, Node* above, const uint64_t* nodes, const double* from,
                                 const double* to, size_t n, uint64_t* lows) {
    size_t count = 0;
    for (size_t i = 0; i < n; ++i) {
      const uint64_t node = nodes[i];
      above[node / kWide].value[node % kWide] = sum(leaves[node].value);
      const double least = lowest_rank(leaves[node].value);
      lows[count] = node;
      count += (below(from[i]) <= least) | (below(to[i]) <= least);
    }
    return count;
  }
  void begin_find(double* prefix, uint64_t* leaf, size_t n) const {
    for (size_t i = 0; i < n; ++i) {
      leaf[i] = 0;
      prefix[i] = std::min(prefix[i], below(total_));
    }
  }
  // Descends from nodes of a level: each `leaf` becomes the child in which its prefix falls. With `next`, the level below, that
  // child is prefetched; without it `value` becomes the child's number.
  static void step_down_one_by_one(const Node* level, const Node* next, double* __restrict prefix, uint64_t* __restrict leaf,
                                   double* __restrict value, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      const double* node = level[leaf[i]].value;
      const size_t child = step(node, prefix[i]);
      leaf[i] = leaf[i] * kWide + child;
      if (next) __builtin_prefetch(next[leaf[i]].value);
      else value[i] = node[child];
    }
  }
#ifdef ENGRAM_CHOOSES_VECTORS
  // As the functions above, for several nodes at a time, which changes no bit.
  template <class Columns>
  [[gnu::always_inline]] static size_t enter_together(const Node* leaves, Node* above, const uint64_t* nodes,
                                                      const double* from, const double* to, size_t n, uint64_t* lows) {
    constexpr size_t kNodes = Columns::kNodes;
    using Numbers = typename Columns::Numbers;
    using Bits = typename Columns::Bits;
    size_t i = 0, count = 0;
    for (; i + kNodes <= n; i += kNodes) {
      const double* at[kNodes];
#pragma GCC unroll 8
      for (size_t k = 0; k < kNodes; ++k) at[k] = leaves[nodes[i + k]].value;
      const Columns columns(at);
      Numbers total = columns.of[0], least = Numbers{} + kNone;
#pragma GCC unroll 8
      for (size_t j = 1; j < kWide; ++j) total += columns.of[j];
#pragma GCC unroll 8
      for (size_t j = 0; j < kWide; ++j) {
        const Numbers rank = (Numbers)((Bits)columns.of[j] - 1);
        least = rank < least ? rank : least;
      }
      Numbers was, is;
      Columns::load(was, from + i), Columns::load(is, to + i);
      const Bits other = ((Numbers)((Bits)was - 1) <= least) | ((Numbers)((Bits)is - 1) <= least);
#pragma GCC unroll 8
      for (size_t k = 0; k < kNodes; ++k) {
        const uint64_t node = nodes[i + k];
        above[node / kWide].value[node % kWide] = total[k];
        lows[count] = node;
        count -= static_cast<size_t>(other[k]);  // true is -1
      }
    }
    return count + enter_one_by_one(leaves, above, nodes + i, from + i, to + i, n - i, lows + count);
  }
  template <class Columns>
  [[gnu::always_inline]] static void step_down_together(const Node* level, const Node* next, double* __restrict prefix,
                                                        uint64_t* __restrict leaf, double* __restrict value, size_t n) {
    constexpr size_t kNodes = Columns::kNodes;
    using Numbers = typename Columns::Numbers;
    using Bits = typename Columns::Bits;
    size_t i = 0;
    for (; i + kNodes <= n; i += kNodes) {
      const double* at[kNodes];
#pragma GCC unroll 8
      for (size_t k = 0; k < kNodes; ++k) at[k] = level[leaf[i + k]].value;
      const Columns columns(at);
      Numbers whole, place;
      Columns::load(whole, prefix + i), Columns::load(place, leaf + i);
      Numbers running = columns.of[0], before{}, own = columns.of[0];
      Bits child{};
#pragma GCC unroll 8
      for (size_t j = 1; j < kWide; ++j) {
        const Bits beyond = whole >= running;
        before = beyond ? running : before, own = beyond ? columns.of[j] : own;
        child -= beyond;  // true is -1
        running += columns.of[j];
      }
      const Numbers rest = whole - before, most = (Numbers)((Bits)own - 1);
      Columns::store(prefix + i, most < rest ? most : rest);
      Columns::store(leaf + i, (Numbers)((Bits)place * static_cast<int64_t>(kWide) + child));
      if (next)
#pragma GCC unroll 8
        for (size_t k = 0; k < kNodes; ++k) __builtin_prefetch(next[leaf[i + k]].value);
      else
        Columns::store(value + i, own);
    }
    step_down_one_by_one(level, next, prefix + i, leaf + i, value + i, n - i);
  }
#define ENGRAM_STEPPED const Node *level, const Node *next, double *prefix, uint64_t *leaf, double *value, size_t n
  __attribute__((target("default"))) static void step_down(ENGRAM_STEPPED) {
    step_down_one_by_one(level, next, prefix, leaf, value, n);
  }
  __attribute__((target("avx2"))) static void step_down(ENGRAM_STEPPED) {
    step_down_together<Columns4>(level, next, prefix, leaf, value, n);
  }
  __attribute__((target("arch=x86-64-v4"))) static void step_down(ENGRAM_STEPPED) {
    step_down_together<Columns8>(level, next, prefix, leaf, value, n);
  }
#undef ENGRAM_STEPPED
#define ENGRAM_ENTERED \
  const Node *leaves, Node *above, const uint64_t *nodes, const double *from, const double *to, size_t n, uint64_t *lows
  __attribute__((target("default"))) static size_t enter_leaf_nodes(ENGRAM_ENTERED) {
    return enter_one_by_one(leaves, above, nodes, from, to, n, lows);
  }
  __attribute__((target("avx2"))) static size_t enter_leaf_nodes(ENGRAM_ENTERED) {
    return enter_together<Columns4>(leaves, above, nodes, from, to, n, lows);
  }
#undef ENGRAM_ENTERED
#else
  static void step_down(const Node* level, const Node* next, double* prefix, uint64_t* leaf, double* value, size_t n) {
    step_down_one_by_one(level, next, prefix, leaf, value, n);
  }
  static size_t enter_leaf_nodes(const Node* leaves, Node* above, const uint64_t* nodes, const double* from, const double* to,
                                 size_t n, uint64_t* lows) {
    return enter_one_by_one(leaves, above, nodes, from, to, n, lows);
  }
#endif

  static constexpr double kNone = std::numeric_limits<double>::infinity();
  std::vector<uint64_t> starts_, counts_, high_starts_;  // nodes of each level, leaves first
  std::shared_ptr<MappedRegion> memory_, high_memory_;
  double total_ = 0, lowest_ = 0, highest_ = 0;
};

}  // namespace engram
