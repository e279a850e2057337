// A tree over many numbers: their sum, where a prefix of it falls, and their extremes.
//
// A node is eight numbers wide, so that a tree over a million leaves has seven levels. Beside each number there is
// another one in the next cache line: above the leaves the lowest under it, at a leaf one that the owner keeps for
// himself. So a change of a leaf needs two neighbouring lines of memory for itself, and two for the node above.
//
// Every number above the leaves is computed from the eight below it and from nothing else: a tree is bit for bit the
// one that a rebuild from its leaves would give, whatever happened to it before.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "mapping.hpp"

namespace engram {

constexpr uint64_t kWide = 8;

// The changed nodes of one level, then of the level above, and so on. Repetitions are harmless.
class DirtyNodes {
 public:
  void clear() { nodes_.clear(); }
  void reserve(size_t n) { nodes_.reserve(n); }
  void add(uint64_t node) { nodes_.push_back(node); }
  // The nodes above these. Neighbours mostly share theirs; to find other repetitions costs more than it saves.
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
  const std::vector<uint64_t>& nodes() const { return nodes_; }

 private:
  std::vector<uint64_t> nodes_;
};

// Leaves are 0 or more; those of 0 have no part in the lowest.
class SumTree {
 public:
  // With `highest` also the highest of the numbers beside the leaves is kept.
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
  // 0 where every leaf is 0.
  double lowest() const { return lowest_; }
  double highest() const { return highest_; }
  // Has what changes of these leaves need brought from memory; one that there is not is left out. By loads, of which
  // many are in flight at once: of as many prefetches a core drops most, because it can track only some dozens.
  void prefetch(const int64_t* leaves, size_t n) const {
    const size_t parent = std::min<size_t>(1, top());
    uint64_t all = 0;
    auto load = [&](const Node& node) {
      all += std::bit_cast<uint64_t>(node.value[0]) + std::bit_cast<uint64_t>(node.beside[0]);
    };
    for (size_t i = 0; i < n; ++i) {
      const uint64_t node = static_cast<uint64_t>(leaves[i]) / kWide;
      if (node >= counts_[0]) continue;
      load(at(0)[node]), load(at(parent)[parent ? node / kWide : node]);
    }
    asm volatile("" : : "r"(all));  // or the compiler would leave the loads out
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

  // The leaves in which prefixes [0, total) of the sum fall, and their values, which are never 0. Uses `prefix` up.
  void find(double* __restrict prefix, uint64_t* __restrict leaf, double* __restrict value, size_t n) const {
    for (size_t i = 0; i < n; ++i) {
      leaf[i] = 0;
      prefix[i] = std::min(prefix[i], below(total_));
    }
    for (size_t k = top(); k > 0; --k) {
      const Node *level = at(k), *next = at(k - 1);
      for (size_t i = 0; i < n; ++i) {
        leaf[i] = leaf[i] * kWide + step(level[leaf[i]].value, prefix[i]);
        __builtin_prefetch(next[leaf[i]].value);
      }
    }
    for (size_t i = 0; i < n; ++i) {
      const double* node = at(0)[leaf[i]].value;
      const size_t child = step(node, prefix[i]);
      value[i] = node[child];
      leaf[i] = leaf[i] * kWide + child;
    }
  }

 private:
  struct Node {
    double value[kWide], beside[kWide];
  };
  // All nodes of a level one after the other cost less than a part of them at random.
  static constexpr uint64_t kDense = 2;

  static uint64_t nodes_over(uint64_t n) { return std::max<uint64_t>(1, (n + kWide - 1) / kWide); }
  size_t top() const { return counts_.size() - 1; }
  Node* at(size_t k) const { return reinterpret_cast<Node*>(memory_->data()) + starts_[k]; }
  // The highest under each node of level k.
  double* high(size_t k) const { return reinterpret_cast<double*>(high_memory_->data()) + high_starts_[k]; }

  // Enters into the level above what is in a node.
  void raise(size_t k, uint64_t node) {
    const Node& from = at(k)[node];
    Node& to = at(k + 1)[node / kWide];
    to.value[node % kWide] = sum(from.value);
    to.beside[node % kWide] = lowest(k == 0 ? from.value : from.beside);
    if (high_memory_) high(k)[node] = highest(k == 0 ? from.beside : high(k - 1) + node * kWide);
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

  // Two neighbours: compilers do not find these by themselves.
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
  // Of the numbers above 0. The number before 0 is not a number, which no comparison takes for the lower one.
  static double lowest(const double* n) {
    Pair best = both(kNone);
    for (size_t j = 0; j < kWide / 2; ++j) {
      const Pair x = reinterpret_cast<Pair>(reinterpret_cast<PairBits>(pairs(n)[j]) - 1);
      best = x < best ? x : best;
    }
    const double least = best[0] < best[1] ? best[0] : best[1];
    return least == kNone ? 0 : above(least);
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

  static constexpr double kNone = std::numeric_limits<double>::infinity();
  std::vector<uint64_t> starts_, counts_, high_starts_;  // of each level, the leaves first: nodes
  std::shared_ptr<MappedRegion> memory_, high_memory_;
  double total_ = 0, lowest_ = 0, highest_ = 0;
};

}  // namespace engram
