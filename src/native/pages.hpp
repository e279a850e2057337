// Rows of any length (`RowHead`): how they are read by the slots of their heads, counted and listed.
// A row is believed as its head is: it is older than its pages, so that a writer that replaces one of them has claimed it, too. Its
// bit and its length are looked at between the two looks at the lane; docs/memory-model.md says why ("Rows of any length").
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "follower.hpp"
#include "rows.hpp"

namespace engram {

// A row says a length that no row has: its disk is damaged.
struct DamagedRow : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// How many pages so many bytes take.
inline uint64_t pages_for(const StoreGeometry& s, uint64_t bytes) { return (bytes + s.payload_bytes - 1) / s.payload_bytes; }
// What a head says of its row's bytes; 0: what no row says.
inline uint64_t bytes_in_row(const StoreGeometry& s, const uint8_t* head) {
  RowHead row;
  std::memcpy(&row, head, sizeof row);
  return row.bytes >= sizeof row && row.bytes <= longest_row(s) * s.payload_bytes ? row.bytes : 0;
}

// Reads a batch of rows: `find`, then `copy` of each, then `settle`. In between memory is taken for `bytes`.
class PageReader {
 public:
  PageReader(Store& store, ReadScratch& scratch) : store_(store), reader_(store, scratch), rows_(scratch.rows), views_(scratch.views) {}

  // Looks up the rows whose heads are in these slots, and how long they are. False: a slot lies outside the store, and nothing may be
  // read. The slots must outlive this reader's use of them.
  bool find(const int64_t* slots, size_t n) {
    if (!reader_.find(slots, n)) return false;
    slots_ = slots;
    is_head_.assign(n, 0), bytes_.assign(n, 0);
    for (const uint8_t* head : rows_) __builtin_prefetch(head);
    for (size_t i = 0; i < n; ++i) {
      uint64_t w = 0;
      if (!reader_.find_row(i, w) || !store_.lanes.is_head(static_cast<uint64_t>(slots[i]))) continue;
      is_head_[i] = 1;
      const uint64_t bytes = bytes_in_row(store_.geometry(), rows_[i]);
      if (pages_for(store_.geometry(), bytes) <= views_[reader_.place(i).lane].published - w) bytes_[i] = bytes;
    }
    ReadResult lost;  // whose lengths may be any bytes: no memory is taken for these
    reader_.settle(false, lost);
    for (uint32_t i : lost.missing) bytes_[i] = 0;
    return true;
  }
  // Of row i, without its `RowHead`; 0 where none is to be read.
  uint64_t bytes(size_t i) const { return bytes_[i] ? bytes_[i] - sizeof(RowHead) : 0; }
  // Copies the `bytes` of row i.
  void copy(size_t i, uint8_t* to) const {
    const StoreGeometry& s = store_.geometry();
    const RowReader::Place head = reader_.place(i);
    uint64_t slot = head.slot, before = sizeof(RowHead);
    for (uint64_t left = bytes(i); left > 0; before = 0) {
      // Without trailers pages lie side by side, up to the ring's end.
      const uint64_t pages = s.row_stride == s.payload_bytes ? s.lane_capacity - slot : 1;
      const uint64_t take = std::min(left, pages * s.payload_bytes - before);
      std::memcpy(to, store_.row(store_.physical(head.lane, 0, slot)) + before, take);
      to += take, left -= take;
      if ((slot += pages) == s.lane_capacity) slot = 0;
    }
  }
  // After the copies: which rows existed from their start to their end. A slot in which no row begins is one without a row.
  void settle(ReadResult& result) {
    reader_.settle(false, result);
    std::vector<uint8_t> is_gone(is_head_.size(), 0);
    for (uint32_t i : result.missing) is_gone[i] = 1;
    result.unwritten.clear();
    for (uint32_t i = 0; i < is_head_.size(); ++i) {
      if (is_gone[i]) continue;
      if (!is_head_[i]) result.unwritten.push_back(i);
      else if (!bytes_[i]) throw DamagedRow("the row in slot " + std::to_string(slots_[i]) + " says a length that no row there can have: the store is damaged");
    }
  }

 private:
  Store& store_;
  RowReader reader_;
  const std::vector<const uint8_t*>& rows_;
  const std::vector<LaneView>& views_;
  const int64_t* slots_ = nullptr;
  std::vector<uint8_t> is_head_;
  std::vector<uint64_t> bytes_;  // of each row, with its `RowHead`
};

// How many rows a store has: the bits of heads that came since it was asked last are added, and those of pages that went are taken
// off. It keeps a copy of the bits, as those of pages that went are others by then.
class HeadCount {
 public:
  uint64_t of(const Store& store) {
    follower_.poll(store, Visitor{*this, store});
    return heads_;
  }

 private:
  static constexpr uint64_t kPerWord = 64;
  struct Visitor {
    HeadCount& self;
    const Store& store;
    void restart(const Store& other) {
      self.bits_.assign((other.slots() + kPerWord - 1) / kPerWord, 0);
      self.heads_ = 0;
    }
    void vanished(uint64_t lane, uint64_t from, uint64_t to) { self.forget(store.geometry(), lane, from, to); }
    void rows(uint64_t lane, uint64_t from, uint64_t to) {
      self.forget(store.geometry(), lane, from, to);
      const std::vector<uint64_t> heads = store.lanes.protocol(lane).seams_of(from, to);
      Lanes::Protocol::after_reading();
      const uint64_t first = store.lanes.first_now(lane);
      for (uint64_t w : heads) {
        if (w < first) continue;  // the bit may be that of a newer page, which comes next
        const uint64_t slot = slot_of(store.geometry(), lane, w);
        self.bits_[slot / kPerWord] |= uint64_t{1} << slot % kPerWord, ++self.heads_;
      }
    }
    void edited(uint64_t) {}
  };
  void forget(const StoreGeometry& s, uint64_t lane, uint64_t from, uint64_t to) {
    for (uint64_t w = std::max(from, to - std::min(to, s.lane_capacity)); w < to;) {
      const uint64_t slot = slot_of(s, lane, w), bit = slot % kPerWord;
      const uint64_t take = std::min({to - w, kPerWord - bit, s.lane_capacity - w % s.lane_capacity});
      const uint64_t mask = (take == 64 ? ~uint64_t{0} : (uint64_t{1} << take) - 1) << bit;
      heads_ -= static_cast<uint64_t>(std::popcount(bits_[slot / kPerWord] & mask));
      bits_[slot / kPerWord] &= ~mask;
      w += take;
    }
  }

  Follower follower_;
  std::vector<uint64_t> bits_;  // of each slot: whether a row that is counted begins there
  uint64_t heads_ = 0;
};

}  // namespace engram
