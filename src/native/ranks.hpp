// Finds the row of the lowest rank in a full store; ties go to the lowest slot, so that the result depends on the stored rows
// alone.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "follower.hpp"
#include "mapping.hpp"

namespace engram {

// Reduces the values of a row to its rank. Values are added one after the other, so that a row's rank does not depend on the
// batch that contained it.
enum class Reduction { kSum, kMean, kMax, kMedian, kMin };

template <typename T>
double rank_of(const T* values, size_t n, Reduction reduction, std::vector<double>& scratch) {
  auto value = [&](size_t i) { return static_cast<double>(values[i]); };
  double rank = value(0);
  if (n == 1) return rank;
  switch (reduction) {
    case Reduction::kSum:
    case Reduction::kMean:
      for (size_t i = 1; i < n; ++i) rank += value(i);
      return reduction == Reduction::kSum ? rank : rank / static_cast<double>(n);
    case Reduction::kMax:
    case Reduction::kMin:
      for (size_t i = 1; i < n; ++i) {
        const double v = value(i);
        if (std::isnan(v) || (reduction == Reduction::kMax ? v > rank : v < rank)) rank = v;
        if (std::isnan(rank)) break;
      }
      return rank;
    case Reduction::kMedian:
      scratch.resize(n);
      for (size_t i = 0; i < n; ++i) {
        scratch[i] = value(i);
        if (std::isnan(scratch[i])) return scratch[i];
      }
      std::nth_element(scratch.begin(), scratch.begin() + static_cast<ptrdiff_t>((n - 1) / 2), scratch.end());
      return scratch[(n - 1) / 2];  // of an even count the lower of the two in the middle
  }
  return rank;
}

// The targets of a batch's items, as if the items were written one by one.
struct Placement {
  size_t appended = 0;             // this many of the first items are appended
  std::vector<int64_t> slots;      // of each item; -1: refused
  std::vector<int64_t> items;      // the in-place writes, without items that later ones replace: item items[i] ...
  std::vector<int64_t> targets;    // ... over slot targets[i], each slot once
};

// A tournament tree of (rank, slot): ranks lie by slot, and each node above holds the winner of its eight children. So the slot
// leads to a row's rank, and a replacement touches one cache line in each level. Zeroed memory is an empty heap: pages are
// allocated when rows are added.
class RankHeap {
 public:
  explicit RankHeap(uint64_t capacity) : capacity_(capacity) {
    if (capacity < 1 || capacity > kMostSlots) throw std::invalid_argument("a heap has 1 to 2^40 slots");
    uint64_t nodes = capacity, total = 0;
    while (true) {
      offsets_.push_back(total);
      total += (nodes + kFan - 1) / kFan * kFan;
      if (nodes == 1) break;
      nodes = (nodes + kFan - 1) / kFan;
    }
    bytes_ = total * sizeof(uint64_t);
    clear();
  }
  RankHeap(const RankHeap&) = delete;

  uint64_t capacity() const { return capacity_; }
  Follower& follower() { return follower_; }

  void clear() {
    memory_ = MappedRegion::map(-1, bytes_);
    journal_.clear();
  }
  void set_rank(uint64_t slot, double rank) { set(slot, key_of(rank)); }
  void remove(uint64_t slot) { set(slot, 0); }
  // Whether a slot has a rank.
  bool holds(uint64_t slot) const { return level(0)[slot] != 0; }

  // Places n items: the first `room` are appended from slot `next` on; then each one replaces the lowest row, or is refused.
  // `undo` reverts it.
  void place(const double* ranks, size_t n, uint64_t room, uint64_t next, Placement& out) {
    // Allocates before the first change.
    journal_.clear(), events_.clear();
    journal_.reserve(n), events_.reserve(n);
    out.slots.resize(n), out.items.reserve(n), out.targets.reserve(n);
    out.appended = static_cast<size_t>(std::min<uint64_t>(n, room));
    if (capacity_ > kCached) {
      const uint64_t lowest_key = top();
      const auto higher = [&](double rank) { return key_of(rank) < lowest_key; };
      warm(static_cast<size_t>(std::count_if(ranks + out.appended, ranks + n, higher)));
    }
    for (size_t i = 0; i < n; ++i) {
      const uint64_t key = key_of(ranks[i]);
      out.slots[i] = -1;
      if (i < out.appended) {
        out.slots[i] = static_cast<int64_t>((next + i) % capacity_);
      } else if (key < top()) {
        out.slots[i] = static_cast<int64_t>(lowest());
        events_.emplace_back(out.slots[i], static_cast<int64_t>(i));
      } else {
        continue;
      }
      const auto slot = static_cast<uint64_t>(out.slots[i]);
      journal_.emplace_back(slot, level(0)[slot]);
      set(slot, key);
    }
    keep_last(out);
  }
  // Reverts the last `place`.
  void undo() {
    for (size_t i = journal_.size(); i-- > 0;) set(journal_[i].first, journal_[i].second);
    journal_.clear();
  }

  // The slot of the lowest rank; the heap is not empty.
  uint64_t lowest() const {
    uint64_t at = 0;
    const uint64_t key = top();
    for (size_t k = offsets_.size() - 1; k-- > 0;) {
      const uint64_t* group = level(k) + at * kFan;
      unsigned winners = 0;  // compares all eight: the branch predictor cannot know the winner
      for (unsigned i = 0; i < kFan; ++i) winners |= static_cast<unsigned>(group[i] == key) << i;
      at = at * kFan + static_cast<unsigned>(std::countr_zero(winners | 1u << (kFan - 1)));
    }
    return at;
  }

 private:
  static constexpr uint64_t kFan = 8;  // a cache line
  static constexpr uint64_t kMostSlots = uint64_t{1} << 40;
  static constexpr uint64_t kCached = 1 << 16;  // this many slots' ranks are mostly in the cache

  // Ranks as integers in descending order; 0: no rank. A NaN (from an in-place write) counts as the lowest rank.
  static uint64_t key_of(double rank) {
    if (std::isnan(rank)) rank = -HUGE_VAL;
    const auto bits = std::bit_cast<uint64_t>(rank + 0.0);  // -0.0 and 0.0 are the same rank
    return ~(bits ^ (bits >> 63 ? ~uint64_t{0} : uint64_t{1} << 63));
  }
  uint64_t* level(size_t k) const { return reinterpret_cast<uint64_t*>(memory_->data()) + offsets_[k]; }
  uint64_t top() const { return *level(offsets_.size() - 1); }
  // Brings the part of the tree for the n lowest rows into the cache, level by level: the misses of a level overlap, while a
  // replacement that searches its row waits for each level in turn. The n lowest rows lie below the n lowest nodes of every
  // level.
  void warm(size_t n) {
    if (n < 2) return;
    lowest_.assign(1, {0, 0});
    for (size_t k = offsets_.size() - 1; k-- > 0;) {
      for (const auto& [key, node] : lowest_) __builtin_prefetch(level(k) + node * kFan, 1);
      if (k == 0) return;
      const uint64_t least = lowest_.size() == n ? lowest_.back().first : 1;  // n rows of at most this rank are known
      below_.resize(lowest_.size() * kFan);
      size_t count = 0;
      for (const auto& [above, node] : lowest_)
        for (uint64_t i = node * kFan; i < (node + 1) * kFan; ++i) {
          below_[count] = {level(k)[i], i};
          count += level(k)[i] >= least;
        }
      const auto end = below_.begin() + static_cast<ptrdiff_t>(count), last = below_.begin() + static_cast<ptrdiff_t>(n) - 1;
      if (last < end)
        std::nth_element(below_.begin(), last, end, [](const auto& a, const auto& b) { return a.first > b.first; });
      below_.resize(std::min(count, n));
      lowest_.swap(below_);
    }
  }
  void set(uint64_t slot, uint64_t key) {
    level(0)[slot] = key;
    for (size_t k = 0; k + 1 < offsets_.size(); ++k) {
      slot /= kFan;
      const uint64_t* group = level(k) + slot * kFan;
      uint64_t best = group[0];
      for (uint64_t i = 1; i < kFan; ++i) best = std::max(best, group[i]);
      uint64_t& parent = level(k + 1)[slot];
      if (parent == best) return;
      parent = best;
    }
  }
  void keep_last(Placement& out) {
    std::sort(events_.begin(), events_.end());
    out.items.clear(), out.targets.clear();
    for (size_t i = 0; i < events_.size(); ++i)
      if (i + 1 == events_.size() || events_[i + 1].first != events_[i].first)
        out.targets.push_back(events_[i].first), out.items.push_back(events_[i].second);
  }

  uint64_t capacity_;
  size_t bytes_ = 0;
  std::vector<uint64_t> offsets_;  // of each level, ranks first
  std::shared_ptr<MappedRegion> memory_;
  std::vector<std::pair<uint64_t, uint64_t>> journal_;  // slot and previous key
  std::vector<std::pair<int64_t, int64_t>> events_;     // slot and item of each replacement
  std::vector<std::pair<uint64_t, uint64_t>> lowest_, below_;  // key and node, while a level is searched
  Follower follower_;
};

}  // namespace engram
