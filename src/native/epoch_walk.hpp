// Epochs: each row that is stored once, in an order that a key gives. Of rows of any length positions are those of pages: those in
// which no row begins are passed over.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "draw.hpp"
#include "leaves.hpp"
#include "store.hpp"

namespace engram {

// One pass over the rows that existed when an epoch began, in a store whose lanes had `ring` steps (0: as this one's) and
// whose sequences were higher by `moved[lane]` (empty: by 0). A position of the epoch always means the same row.
class EpochWalk {
 public:
  EpochWalk(const Store& store, uint64_t key, bool shuffle, std::vector<std::pair<uint64_t, uint64_t>> ranges,
            uint64_t ring, std::vector<uint64_t> moved, bool with_removed)
      : with_removed_(with_removed), map_(ring ? ring : store.lanes.capacity(), store.lanes.envs()), moved_(std::move(moved)),
        permutation_(0, 0, false) {
    if (moved_.empty()) moved_.resize(ranges.size());
    if (ranges.size() != store.lanes.count() || moved_.size() != ranges.size())
      throw nb::value_error("one range for each lane");
    for (auto [first, rows] : ranges) {
      if (rows > store.lanes.capacity() || (ring && rows > ring)) throw nb::value_error("a range is longer than its lane");
      map_.add(first, rows);
      first_.push_back(first);
    }
    permutation_ = Permutation(key, map_.total(), shuffle);
    in_place_ = (!ring || ring == store.lanes.capacity()) && std::ranges::all_of(moved_, [](uint64_t m) { return m == 0; });
  }
  EpochWalk(const EpochWalk&) = delete;
  uint64_t size() const { return map_.total(); }
  bool is_of(const Store& store) const { return store.lanes.count() == moved_.size(); }
  // Whether rows of the epoch were overwritten since it began.
  bool some_overwritten(const Store& store) const {
    for (uint64_t l = 0; l < first_.size(); ++l)
      if (store.lanes.view(l).first + moved_[l] > first_[l]) return true;
    return false;
  }
  // Up to n slots from `position` on and before `stop`, without rows that were overwritten since, and the position after
  // them.
  std::pair<Tensor, uint64_t> take(const Store& store, uint64_t position, size_t n, uint64_t stop) const {
    if (!is_of(store)) throw nb::value_error("the walk was made for another store");
    store.check_file();
    std::vector<int64_t> drawn;
    drawn.reserve(std::min<uint64_t>(n, map_.total()));
    position = draw(store, position, n, stop, drawn);
    Tensor slots = slots_out(drawn.size(), [&](int64_t* out) { std::copy(drawn.begin(), drawn.end(), out); });
    return {std::move(slots), position};
  }
  // Whether a row comes behind a position.
  bool goes_on(const Store& store, uint64_t position) const {
    std::vector<int64_t> next;
    draw(store, position, 1, map_.total(), next);
    return !next.empty();
  }
  // As above, appended to `drawn` until it has n slots; the caller has checked the store. Returns the position.
  uint64_t draw(const Store& store, uint64_t position, size_t n, uint64_t stop, std::vector<int64_t>& drawn) const {
    const uint64_t capacity = store.lanes.capacity(), envs = store.lanes.envs();
    std::vector<uint64_t> first;
    for (uint64_t l = 0; l < store.lanes.count(); ++l) first.push_back(store.lanes.view(l).first);
    const uint64_t end = std::min(stop, map_.total());
    const bool some_removed = !with_removed_ && store.lanes.some_removed(), is_ragged = store.lanes.is_ragged();
    const bool all_in_one_ring = in_place_ && map_.is_one_ring() && first[0] <= first_[0];
    const bool rows_are_here = store.geometry().payload_bytes > 0;
    uint64_t rows[Permutation::kBlock];
    while (position < end && drawn.size() < n) {
      // At most as many as are still needed: the remaining positions come in the next batch.
      const size_t block = std::min<uint64_t>({Permutation::kBlock, end - position, n - drawn.size()});
      permutation_.at(position, rows, block);
      position += block;
      if (all_in_one_ring) {
        const size_t done = drawn.size();
        drawn.resize(done + block);
        map_.slots_in_ring(rows, block, drawn.data() + done);
        const auto pass_over = [&](auto&& is_no_row) {
          drawn.erase(std::remove_if(drawn.begin() + static_cast<ptrdiff_t>(done), drawn.end(), is_no_row), drawn.end());
        };
        if (some_removed) pass_over([bits = store.lanes.removed(0)](int64_t slot) { return bits.has(static_cast<uint64_t>(slot)); });
        if (is_ragged) pass_over([&](int64_t slot) { return !store.lanes.is_head(static_cast<uint64_t>(slot)); });
        // Prefetches the rows, which may lie anywhere, while the next numbers are computed.
        for (size_t i = done; rows_are_here && i < drawn.size(); ++i)
          __builtin_prefetch(store.row(static_cast<uint64_t>(drawn[i])), 0, 2);
        continue;
      }
      for (size_t i = 0; i < block; ++i) {
        uint64_t lane = 0, sequence = 0;
        const int64_t slot = map_.by_slot(rows[i], lane, sequence);
        if (sequence < moved_[lane] || sequence - moved_[lane] < first[lane]) continue;
        const uint64_t there = in_place_ ? static_cast<uint64_t>(slot)
                                         : (lane * capacity + (sequence - moved_[lane]) % capacity) * envs +
                                               static_cast<uint64_t>(slot) % envs;
        if (is_ragged && !store.lanes.is_head(there)) continue;
        if (!some_removed || !store.lanes.is_removed(there)) drawn.push_back(static_cast<int64_t>(there));
      }
    }
    return position;
  }

 private:
  bool with_removed_;
  RowMap map_;
  std::vector<uint64_t> moved_, first_;
  Permutation permutation_;
  bool in_place_ = false;  // each row is still in the slot that it had when the epoch began
};

}  // namespace engram
