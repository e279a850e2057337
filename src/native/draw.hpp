// Which slots to read: uniform draws, and permutations that need no memory.
#pragma once
#include <bit>
#include <numeric>
#include <vector>

#include "lanes.hpp"

namespace engram {

// SplitMix64 (Steele, Lea and Flood, 2014), as a function of a counter.
inline uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
inline uint64_t below(uint64_t random, uint64_t n) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(random) * n) >> 64);
}

// Rows of all lanes at one moment, and the slot of the i-th of them.
class RowMap {
 public:
  explicit RowMap(const Lanes& lanes) : capacity_(lanes.capacity()), envs_(lanes.envs()) {
    for (uint64_t l = 0; l < lanes.count(); ++l) {
      const LaneView v = lanes.view(l);
      add(v.first, v.rows());
    }
  }
  RowMap(uint64_t capacity, uint64_t envs) : capacity_(capacity), envs_(envs) {}
  void add(uint64_t first, uint64_t rows) {
    parts_.push_back({first, rows, rows ? first % capacity_ : 0});
    total_ += rows * envs_;
  }
  uint64_t total() const { return total_; }
  // Oldest first, lane after lane.
  int64_t by_age(uint64_t i) const {
    uint64_t time = i, env = 0;
    if (envs_ > 1) time = i / envs_, env = i - time * envs_;
    uint64_t lane = 0;
    while (time >= parts_[lane].rows) time -= parts_[lane++].rows;
    uint64_t slot = parts_[lane].first_slot + time;
    if (slot >= capacity_) slot -= capacity_;
    return static_cast<int64_t>((lane * capacity_ + slot) * envs_ + env);
  }
  // In the order of slots, lane after lane; also gives the row's lane and sequence.
  int64_t by_slot(uint64_t i, uint64_t& lane, uint64_t& sequence) const {
    uint64_t time = i, env = 0;
    if (envs_ > 1) time = i / envs_, env = i - time * envs_;
    lane = 0;
    while (time >= parts_[lane].rows) time -= parts_[lane++].rows;
    const Part& p = parts_[lane];
    const uint64_t before_wrap = std::min(p.rows, capacity_ - p.first_slot);  // rows from `first` to the ring's end
    const uint64_t wrapped = p.rows - before_wrap;
    sequence = p.first + (time < wrapped ? before_wrap + time : time - wrapped);
    const uint64_t slot = sequence % capacity_;
    return static_cast<int64_t>((lane * capacity_ + slot) * envs_ + env);
  }

 private:
  struct Part {
    uint64_t first, rows, first_slot;
  };
  uint64_t capacity_, envs_, total_ = 0;
  std::vector<Part> parts_;
};

inline bool draw_uniform(const Lanes& lanes, uint64_t seed, int64_t* out, size_t n) {
  const RowMap map(lanes);
  if (map.total() == 0) return false;
  for (size_t i = 0; i < n; ++i) out[i] = map.by_age(below(mix64(seed + i * 0x9E3779B97F4A7C15ull), map.total()));
  return true;
}

// A pseudorandom permutation of 0..n-1 from a key. Small ones are shuffled (Fisher and Yates); large ones are a
// Feistel network over the next power of two, walked until it lands inside (Black and Rogaway, 2002): O(1) memory.
class Permutation {
 public:
  static constexpr uint64_t kShuffled = 1 << 16;
  Permutation(uint64_t key, uint64_t n, bool shuffle) : key_(key), n_(n), shuffle_(shuffle) {
    if (!shuffle || n == 0) return;
    if (n <= kShuffled) {
      order_.resize(n);
      std::iota(order_.begin(), order_.end(), 0u);
      for (uint64_t i = n - 1; i > 0; --i) std::swap(order_[i], order_[below(mix64(key ^ mix64(i)), i + 1)]);
      return;
    }
    const int bits = 64 - std::countl_zero(n - 1);
    left_bits_ = bits / 2, right_bits_ = bits - left_bits_;
  }
  uint64_t size() const { return n_; }
  uint64_t at(uint64_t i) const {
    if (!shuffle_) return i;
    if (!order_.empty()) return order_[i];
    do i = cipher(i);
    while (i >= n_);
    return i;
  }

 private:
  uint64_t cipher(uint64_t x) const {
    int a = left_bits_, b = right_bits_;
    uint64_t left = x >> b, right = x & ((uint64_t{1} << b) - 1);
    for (uint64_t round = 0; round < 8; ++round) {  // even, so that the widths end where they began
      const uint64_t next = left ^ (mix64(key_ + round * 0xD1B54A32D192ED03ull + mix64(right)) & ((uint64_t{1} << a) - 1));
      left = right, right = next;
      std::swap(a, b);
    }
    return (left << right_bits_) | right;
  }
  uint64_t key_, n_;
  bool shuffle_;
  int left_bits_ = 0, right_bits_ = 0;
  std::vector<uint32_t> order_;
};

}  // namespace engram
