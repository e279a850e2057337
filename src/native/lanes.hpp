// Lanes: who may believe which rows. One process appends to a lane; anybody reads at any time.
// Each fence is explained in docs/memory-model.md; ENGRAM_PLANT_* builds put in its place the reordering that it forbids.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "crc32c.hpp"
#include "header.hpp"
#include "region.hpp"

namespace engram {

// What a reader saw of one lane: rows [first, published) exist.
struct LaneView {
  uint64_t claimed = 0, published = 0, first = 0;
  uint64_t rows() const { return published > first ? published - first : 0; }
};

// The write number that a slot of a lane holds, without dividing by the capacity once a row.
struct SlotNumbers {
  uint64_t newest = 0, newest_slot = 0, capacity = 1, first = 0;
  bool any = false;
  SlotNumbers() = default;
  SlotNumbers(const LaneView& v, uint64_t lane_capacity) : capacity(lane_capacity), first(v.first) {
    any = v.rows() > 0;
    if (any) newest = v.published - 1, newest_slot = newest % capacity;
  }
  // False: the slot holds no row.
  bool find(uint64_t slot, uint64_t& number) const {
    if (!any) return false;
    const uint64_t back = slot <= newest_slot ? newest_slot - slot : newest_slot + capacity - slot;
    if (back > newest) return false;
    number = newest - back;
    return number >= first;
  }
};

// Read at the start and the end of a read: equal means that nothing but appends went on between.
struct Epoch {
  uint64_t incarnation = 0, edits = 0;
  bool operator==(const Epoch& o) const { return incarnation == o.incarnation && edits == o.edits; }
  bool quiet() const { return edits % 2 == 0; }
};

class Lanes {
 public:
  Lanes() = default;
  Lanes(StoreHeader* header, LaneHeader* lanes) : header_(header), lanes_(lanes) {}

  const Shape& shape() const { return header_->shape; }
  uint64_t count() const { return shape().lanes; }
  uint64_t capacity() const { return shape().lane_capacity; }
  uint64_t strands() const { return shape().strands; }
  StoreHeader& header() const { return *header_; }
  LaneHeader& lane(uint64_t l) const { return lanes_[l]; }

  // ---- appending: only by the process that holds the lane ----
  static constexpr uint64_t kPieces = 8;
  uint64_t piece() const { return std::max<uint64_t>(1, capacity() / kPieces); }

  // Announces that the n rows after `published` are being written; returns the first one's number.
  uint64_t claim(uint64_t l, uint64_t n) const {
    LaneHeader& h = lanes_[l];
    const uint64_t at = h.published.load(std::memory_order_relaxed);
#ifndef ENGRAM_PLANT_CLAIM_AFTER_COPY
    store_claimed(h, at + n);
    std::atomic_thread_fence(std::memory_order_release);
#endif
#ifdef ENGRAM_PLANT_PUBLISH_BEFORE_COPY
    h.published.store(at + n, std::memory_order_release);
#endif
    return at;
  }
  // Makes the n rows from `at` on visible. They have been written whole.
  void publish(uint64_t l, uint64_t at, uint64_t n) const {
    LaneHeader& h = lanes_[l];
#ifdef ENGRAM_PLANT_CLAIM_AFTER_COPY
    store_claimed(h, at + n);
#endif
    h.published.store(at + n, std::memory_order_release);
  }

  // ---- reading ----
  Epoch epoch() const {
    Epoch e;
    e.incarnation = header_->incarnation.load(std::memory_order_acquire);
    e.edits = header_->edits.load(std::memory_order_acquire);
    return e;
  }
  LaneView view(uint64_t l) const {
    const LaneHeader& h = lanes_[l];
    LaneView v;
    v.published = h.published.load(std::memory_order_acquire);
    v.claimed = h.claimed.load(std::memory_order_acquire);
    v.first = first_of(h, v.claimed);
    return v;
  }
  // The oldest row that is still whole, for a reader that has just copied rows: call after its acquire fence.
  uint64_t first_now(uint64_t l) const {
    const LaneHeader& h = lanes_[l];
    return first_of(h, h.claimed.load(std::memory_order_relaxed));
  }

  uint64_t rows() const {
    uint64_t total = 0;
    for (uint64_t l = 0; l < count(); ++l) total += view(l).rows();
    return total;
  }
  uint64_t write_count() const {
    uint64_t total = 0;
    for (uint64_t l = 0; l < count(); ++l)
      total += lanes_[l].published.load(std::memory_order_acquire) - lanes_[l].origin.load(std::memory_order_relaxed);
    return total;
  }

  // ---- seams: before the first row of a process that takes the lane over ----
  void add_seam(uint64_t l) const {
    LaneHeader& h = lanes_[l];
    const uint64_t at = h.published.load(std::memory_order_relaxed);
    const uint64_t first_row = first_of(h, h.claimed.load(std::memory_order_relaxed));
    uint64_t first = h.seam_first.load(std::memory_order_relaxed), end = h.seam_end.load(std::memory_order_relaxed);
    if (at <= first_row) return;  // nothing before it: no trajectory to cut
    if (end > first && h.seams[(end - 1) % kSeams].load(std::memory_order_relaxed) == at) return;
    while (first < end && h.seams[first % kSeams].load(std::memory_order_relaxed) <= first_row) ++first;
    if (end - first == kSeams) {  // forget the oldest seam together with the rows before it
      h.base.store(h.seams[first % kSeams].load(std::memory_order_relaxed), std::memory_order_release);
      ++first;
    }
    h.seam_first.store(first, std::memory_order_release);
    h.seams[end % kSeams].store(at, std::memory_order_relaxed);
    h.seam_end.store(end + 1, std::memory_order_release);
  }
  std::vector<uint64_t> seams(uint64_t l) const {
    const LaneHeader& h = lanes_[l];
    std::vector<uint64_t> found;
    const uint64_t end = h.seam_end.load(std::memory_order_acquire);
    uint64_t i = h.seam_first.load(std::memory_order_acquire);
    if (end - i > kSeams) i = end - kSeams;
    for (; i < end; ++i) {
      const uint64_t w = h.seams[i % kSeams].load(std::memory_order_relaxed);
      if (w > first_of(h, h.claimed.load(std::memory_order_relaxed))) found.push_back(w);
    }
    return found;
  }

  // ---- alone ----
  // Every row is gone, the cursor is 0. Numbers never go back, so that a reader's old number finds nothing.
  void empty(bool reset_count) const {
    header_->incarnation.fetch_add(1, std::memory_order_acq_rel);
    for (uint64_t l = 0; l < count(); ++l) {
      LaneHeader& h = lanes_[l];
      const uint64_t at = h.published.load(std::memory_order_relaxed);
      const uint64_t next = round_up(std::max(at, h.claimed.load(std::memory_order_relaxed)), capacity());
      const uint64_t count = reset_count ? 0 : at - h.origin.load(std::memory_order_relaxed);
      set_counters(l, next, next, next - count);
    }
    header_->incarnation.fetch_add(1, std::memory_order_acq_rel);
  }
  void set_counters(uint64_t l, uint64_t base, uint64_t published, uint64_t origin) const {
    LaneHeader& h = lanes_[l];
    // `base` past everything first: whoever is killed between these stores leaves an empty lane, never a wrong row.
    h.base.store(~uint64_t{0} >> 1, std::memory_order_seq_cst);
    h.seam_first.store(0, std::memory_order_relaxed);
    h.seam_end.store(0, std::memory_order_relaxed);
    h.origin.store(origin, std::memory_order_relaxed);
    h.durable.store(base, std::memory_order_relaxed);
    h.claimed.store(published, std::memory_order_seq_cst);
    h.published.store(published, std::memory_order_seq_cst);
    h.base.store(base, std::memory_order_seq_cst);
  }
  void set_seams(uint64_t l, const std::vector<uint64_t>& at) const {
    LaneHeader& h = lanes_[l];
    const size_t skip = at.size() > kSeams ? at.size() - kSeams : 0;
    for (size_t i = skip; i < at.size(); ++i) h.seams[i - skip].store(at[i], std::memory_order_relaxed);
    h.seam_first.store(0, std::memory_order_relaxed);
    h.seam_end.store(at.size() - skip, std::memory_order_release);
  }

 private:
  static void store_claimed(LaneHeader& h, uint64_t to) {
    if (to > h.claimed.load(std::memory_order_relaxed)) h.claimed.store(to, std::memory_order_relaxed);
  }
  uint64_t first_of(const LaneHeader& h, uint64_t claimed) const {
    const uint64_t base = h.base.load(std::memory_order_relaxed);
    return std::max(base, claimed > capacity() ? claimed - capacity() : 0);
  }

  StoreHeader* header_ = nullptr;
  LaneHeader* lanes_ = nullptr;
};

}  // namespace engram
