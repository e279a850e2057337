// The floor of prioritised replay: proportional draws from, and exact updates of, an 8-wide tree of sums.
#pragma once
#include <cmath>
#include <cstddef>
#include <vector>

#include <sys/mman.h>

#include "random.hpp"

class Tree {
 public:
  static constexpr float kAlpha = 0.6f, kBeta = 0.4f;

  explicit Tree(size_t leaves) : leaves_(leaves) {
    for (size_t nodes = whole(leaves);; nodes = whole(nodes)) {
      levels_.emplace_back();
      make(levels_.back(), nodes);
      if (nodes == 1) break;
    }
    for (size_t i = 0; i < leaves; ++i) slot(0, i) = raised();
    for (size_t level = 0; level + 1 < levels_.size(); ++level) add_up_all(level);
  }

  // A leaf for each place of `picked` in proportion to its value, with its importance weight.
  void draw(std::vector<size_t>& picked, std::vector<float>& weights) {
    const size_t n = picked.size();
    const double total = sum(levels_.back()[0]);
    rest_.resize(n);
    for (size_t i = 0; i < n; ++i) {
      rest_[i] = random_.unit() * total;
      picked[i] = 0;
    }
    for (size_t level = levels_.size(); level-- > 0;) {  // the whole batch a level at a time: its misses overlap
      for (size_t i = 0; i < n; ++i) {
        picked[i] = step_down(levels_[level][picked[i]], picked[i], rest_[i]);
        if (level > 0) __builtin_prefetch(&levels_[level - 1][picked[i]]);
      }
    }
    for (size_t i = 0; i < n; ++i) {
      if (picked[i] >= leaves_) picked[i] = leaves_ - 1;  // rounding may lead past the last leaf
      weights[i] = std::pow(static_cast<float>(slot(0, picked[i])), -kBeta);
    }
  }

  // New values for `n` random leaves; every sum above them is added up again, so that no error gathers.
  void update(size_t n) {
    touched_.resize(n);
    for (size_t& leaf : touched_) {
      leaf = random_.below(leaves_);
      __builtin_prefetch(&levels_[0][leaf / kWide]);
    }
    for (size_t leaf : touched_) slot(0, leaf) = raised();
    for (size_t level = 0; level + 1 < levels_.size(); ++level) {
      if (levels_[level].size() <= n) {
        add_up_all(level);
        continue;
      }
      for (size_t& at : touched_) {
        at /= kWide;
        slot(level + 1, at) = sum(levels_[level][at]);
      }
    }
  }

 private:
  static constexpr size_t kWide = 8, kPage = 4096;
  struct alignas(64) Node {
    double child[kWide] = {};
  };

  static void make(std::vector<Node>& level, size_t nodes) {  // on huge pages, asked for before the first is touched
    level.reserve(nodes);
    const auto first = (reinterpret_cast<uintptr_t>(level.data()) + kPage - 1) / kPage * kPage;
    const auto end = reinterpret_cast<uintptr_t>(level.data() + nodes) / kPage * kPage;
    if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
    level.resize(nodes);
  }
  static size_t whole(size_t n) { return (n + kWide - 1) / kWide; }
  static double sum(const Node& node) {
    const double* c = node.child;
    return ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7]));
  }
  static size_t step_down(const Node& node, size_t at, double& rest) {
    double before[kWide] = {};
    for (size_t k = 1; k < kWide; ++k) before[k] = before[k - 1] + node.child[k - 1];
    size_t child = 0;
    for (size_t k = 1; k < kWide; ++k) child += rest >= before[k];  // counted, as a jump here is mispredicted
    rest -= before[child];
    return at * kWide + child;
  }
  double& slot(size_t level, size_t at) { return levels_[level][at / kWide].child[at % kWide]; }
  float raised() { return std::pow(static_cast<float>(random_.unit()) + 1e-8f, kAlpha); }
  void add_up_all(size_t level) {
    for (size_t at = 0; at < levels_[level].size(); ++at) slot(level + 1, at) = sum(levels_[level][at]);
  }

  size_t leaves_;
  std::vector<std::vector<Node>> levels_;  // from the leaves up to the one node at the top
  std::vector<size_t> touched_;
  std::vector<double> rest_;
  Random random_{54321};
};
