// Trees over many numbers: their sum, where a prefix of it falls, and their extremes.
//
// A node is a cache line of eight doubles, so that a tree over a million leaves has seven levels. Every number above the
// leaves is computed from the eight below it and from nothing else: a tree is bit for bit the one that a rebuild from its
// leaves would give, whatever happened to it before.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "region.hpp"

namespace engram {

constexpr uint64_t kWide = 8;

// Numbers of nodes of one level, then of the level above, and so on.
class Touched {
 public:
  void clear() { nodes_.clear(); }
  void add(uint64_t node) { nodes_.push_back(node); }
  // The nodes above these, of which there are `of` in all.
  void up(uint64_t of) {
    size_t kept = 0;
    for (uint64_t node : nodes_)  // neighbours mostly share the node above them
      if (kept == 0 || nodes_[kept - 1] != node / kWide) nodes_[kept++] = node / kWide;
    nodes_.resize(kept);
    settle(of);
  }
  // Leaves repetitions out where there may be many of them; a few are harmless, and cheaper than finding them.
  void settle(uint64_t of) {
    if (nodes_.size() < 2 || of > 16 * nodes_.size()) return;
    bits_.assign((of + 63) / 64, 0);
    for (uint64_t node : nodes_) bits_[node / 64] |= uint64_t{1} << node % 64;
    nodes_.clear();
    for (uint64_t w = 0; w < bits_.size(); ++w)
      for (uint64_t word = bits_[w]; word; word &= word - 1)
        nodes_.push_back(w * 64 + static_cast<uint64_t>(std::countr_zero(word)));
  }
  // Keeps the nodes for which `keep` holds.
  template <typename Keep>
  void filter(Keep&& keep) {
    size_t kept = 0;
    for (uint64_t node : nodes_)
      if (keep(node)) nodes_[kept++] = node;
    nodes_.resize(kept);
  }
  const std::vector<uint64_t>& nodes() const { return nodes_; }

 private:
  std::vector<uint64_t> nodes_, bits_;
};

// Numbers in levels: level k + 1 has one for each node of level k; the last level is a single node. All zero at first.
class Levels {
 public:
  // With `own_leaves` false level 0 is kept by somebody else and takes no memory here.
  Levels(uint64_t leaves, bool own_leaves) {
    uint64_t start = 0, n = round_up(std::max<uint64_t>(leaves, 1), kWide);
    for (;; n = round_up(n / kWide, kWide)) {
      const bool kept = own_leaves || !starts_.empty();
      starts_.push_back(start), counts_.push_back(n);
      if (kept) start += n;
      if (n == kWide) break;
    }
    memory_ = Region::map(-1, std::max<uint64_t>(start, kWide) * sizeof(double));
  }
  size_t top() const { return counts_.size() - 1; }
  uint64_t nodes(size_t k) const { return counts_[k] / kWide; }
  double* at(size_t k) const { return reinterpret_cast<double*>(memory_->data()) + starts_[k]; }

 private:
  std::vector<uint64_t> starts_, counts_;
  std::shared_ptr<Region> memory_;
};

// Sums of leaves that are 0 or more.
class SumTree {
 public:
  explicit SumTree(uint64_t leaves) : levels_(leaves, true) {}

  double* leaves() { return levels_.at(0); }
  const double* leaves() const { return levels_.at(0); }
  uint64_t leaf_nodes() const { return levels_.nodes(0); }
  double total() const { return total_; }
  void prefetch(uint64_t leaf) const {
    __builtin_prefetch(levels_.at(0) + leaf, 1);
    if (levels_.top() > 0) __builtin_prefetch(levels_.at(1) + leaf / kWide, 1);
  }

  // After leaves in these nodes changed.
  void refresh(Touched& touched) {
    for (size_t k = 0; k < levels_.top(); ++k) {
      const double* below = levels_.at(k);
      double* above = levels_.at(k + 1);
      for (uint64_t node : touched.nodes()) above[node] = sum(below + node * kWide);
      touched.up(levels_.nodes(k + 1));
    }
    total_ = sum(levels_.at(levels_.top()));
  }
  // After leaves in nodes [first, last] changed.
  void refresh(uint64_t first, uint64_t last) {
    for (size_t k = 0; k < levels_.top(); ++k, first /= kWide, last /= kWide) {
      const double* below = levels_.at(k);
      double* above = levels_.at(k + 1);
      for (uint64_t node = first; node <= last; ++node) above[node] = sum(below + node * kWide);
    }
    total_ = sum(levels_.at(levels_.top()));
  }

  // The leaves in which prefixes [0, total) of the sum fall, and their values, which are never 0. Uses `prefix` up.
  void find(double* prefix, uint64_t* leaf, double* value, size_t n) const {
    for (size_t i = 0; i < n; ++i) {
      leaf[i] = 0;
      prefix[i] = std::min(prefix[i], below(total_));
    }
    for (size_t k = levels_.top() + 1; k-- > 0;) {
      const double* level = levels_.at(k);
      const double* next = k > 0 ? levels_.at(k - 1) : level;
      for (size_t i = 0; i < n; ++i) {
        const double* node = level + leaf[i] * kWide;
        const size_t child = step(node, prefix[i]);
        value[i] = node[child];
        leaf[i] = leaf[i] * kWide + child;
        __builtin_prefetch(next + (k > 0 ? leaf[i] * kWide : 0));
      }
    }
  }

 private:
  // In this order, so that the last running prefix of a node is the number above it.
  static double sum(const double* node) {
    double s = node[0];
    for (size_t j = 1; j < kWide; ++j) s += node[j];
    return s;
  }
  // The largest number below one that is positive.
  static double below(double x) { return std::bit_cast<double>(std::bit_cast<uint64_t>(x) - 1); }
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

  Levels levels_;
  double total_ = 0;
};

struct Lowest {
  static double of(double a, double b) { return a < b ? a : b; }
  static constexpr double none = std::numeric_limits<double>::infinity();
};
struct Highest {
  static double of(double a, double b) { return a > b ? a : b; }
  static constexpr double none = 0;
};

// The lowest or highest of the positive numbers among leaves that somebody else keeps; 0 where there are none.
template <typename Which>
class ExtremeTree {
 public:
  explicit ExtremeTree(uint64_t leaves) : levels_(leaves, false) {}
  double best() const { return best_; }

  void prefetch(uint64_t leaf) const {
    if (levels_.top() > 0) __builtin_prefetch(levels_.at(1) + leaf / kWide, 1);
  }

  // A leaf has just changed from `before`; `refresh` must follow, with what is noted in `touched`.
  void note(const double* leaves, uint64_t leaf, double before, Touched& touched) {
    if (levels_.top() == 0) return;
    const uint64_t node = leaf / kWide;
    double& above = levels_.at(1)[node];
    const double now = leaves[leaf];
    // Most leaves neither are nor become the extreme of their node.
    if (before != above && !(now > 0 && Which::of(now, above > 0 ? above : Which::none) != above)) return;
    const double found = best(leaves + node * kWide);
    if (found == above) return;
    above = found;
    touched.add(node / kWide);
  }
  // After leaves that were noted changed. Goes up only where something changed.
  void refresh(const double* leaves, Touched& touched) {
    if (levels_.top() > 1) touched.settle(levels_.nodes(1));
    refresh_from(1, leaves, touched);
  }
  // After leaves in these nodes changed.
  void refresh_nodes(const double* leaves, Touched& touched) { refresh_from(0, leaves, touched); }
  void refresh(const double* leaves, uint64_t first, uint64_t last) {
    for (size_t k = 0; k < levels_.top(); ++k, first /= kWide, last /= kWide) {
      const double* below = k ? levels_.at(k) : leaves;
      double* above = levels_.at(k + 1);
      for (uint64_t node = first; node <= last; ++node) above[node] = best(below + node * kWide);
    }
    best_ = best(levels_.top() ? levels_.at(levels_.top()) : leaves);
  }

 private:
  void refresh_from(size_t from, const double* leaves, Touched& touched) {
    for (size_t k = from; k < levels_.top() && !touched.nodes().empty(); ++k) {
      const double* below = k ? levels_.at(k) : leaves;
      double* above = levels_.at(k + 1);
      touched.filter([&](uint64_t node) {
        const double now = best(below + node * kWide);
        const bool changed = now != above[node];
        above[node] = now;
        return changed;
      });
      touched.up(levels_.nodes(k + 1));
    }
    best_ = best(levels_.top() ? levels_.at(levels_.top()) : leaves);
  }
  static double best(const double* node) {
    double found = Which::none;
    for (size_t j = 0; j < kWide; ++j) found = Which::of(node[j] > 0 ? node[j] : Which::none, found);
    return found == Which::none ? 0 : found;
  }

  Levels levels_;
  double best_ = 0;
};

}  // namespace engram
