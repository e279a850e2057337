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
  // `shape` was checked; the copy in the store may change under us (a damaged disk, another process).
  Lanes(StoreHeader* header, LaneHeader* lanes, const Shape& shape) : header_(header), lanes_(lanes), shape_(shape) {}

  const Shape& shape() const { return shape_; }
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
    // Claimed is never below published in a sound header; a damaged one must not show more rows than there is room for.
    v.first = first_of(h, std::max(v.claimed, v.published));
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
    if (end - first > kSeams) first = end > kSeams ? end - kSeams : 0;  // a damaged header
    if (at <= first_row) return;  // nothing before it: no trajectory to cut
    if (end > first && h.seams[(end - 1) % kSeams].load(std::memory_order_relaxed) == at) return;
    while (first < end && h.seams[first % kSeams].load(std::memory_order_relaxed) <= first_row) ++first;
    if (end - first == kSeams) {  // forget the oldest seam together with the rows before it
      h.base.store(h.seams[first % kSeams].load(std::memory_order_relaxed), std::memory_order_release);
      ++first;
    }
    h.seam_first.store(first, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_release);  // whoever sees the new number in the old one's place sees that
    h.seams[end % kSeams].store(at, std::memory_order_relaxed);
    h.seam_end.store(end + 1, std::memory_order_release);
  }
  std::vector<uint64_t> seams(uint64_t l) const {
    const LaneHeader& h = lanes_[l];
    const uint64_t end = h.seam_end.load(std::memory_order_acquire);
    uint64_t first = h.seam_first.load(std::memory_order_acquire);
    if (end - first > kSeams) first = end - kSeams;
    std::vector<uint64_t> found;
    for (uint64_t i = first; i < end; ++i) found.push_back(h.seams[i % kSeams].load(std::memory_order_relaxed));
    // Meanwhile the oldest may have been forgotten, and their places used again.
    std::atomic_thread_fence(std::memory_order_acquire);
    const uint64_t now = h.seam_first.load(std::memory_order_relaxed);
    const uint64_t gone = now > first ? std::min<uint64_t>(now - first, found.size()) : 0;
    found.erase(found.begin(), found.begin() + static_cast<ptrdiff_t>(gone));
    const uint64_t oldest = first_of(h, h.claimed.load(std::memory_order_relaxed));
    std::erase_if(found, [oldest](uint64_t w) { return w <= oldest; });
    return found;
  }

  // ---- alone ----
  // Write numbers start again. The incarnation is odd meanwhile, so that `mend` notices a kill.
  void begin_change() const {
    if (header_->incarnation.load() % 2 == 0) header_->incarnation.fetch_add(1);
  }
  void end_change() const {
    if (header_->incarnation.load() % 2 == 1) header_->incarnation.fetch_add(1);
  }
  // Every row is gone, the cursor is 0. Numbers never go back, so that a reader's old number finds nothing.
  void empty(bool reset_count) const {
    begin_change();
    for (uint64_t l = 0; l < count(); ++l) empty_lane(l, reset_count);
    end_change();
  }
  // Whoever is killed inside leaves a lane that shows nothing, and what `mend` needs to finish emptying it: `base`
  // says where the numbers go on, `durable` how many rows were ever written.
  void set_counters(uint64_t l, uint64_t base, uint64_t published, uint64_t origin,
                    const std::vector<uint64_t>& seams) const {
    LaneHeader& h = lanes_[l];
    h.durable.store(published - origin);
    h.base.store(kMoving | published);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    set_seams(l, seams);
    h.origin.store(origin);
    h.claimed.store(published);
    h.published.store(published);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    h.base.store(std::max(base, below_seams(seams)));
    h.durable.store(base);
  }
  // Of more seams than the table holds the oldest are forgotten, together with the rows below this number.
  static uint64_t below_seams(const std::vector<uint64_t>& seams) {
    return seams.size() > kSeams ? seams[seams.size() - kSeams - 1] : 0;
  }
  // Finishes an `empty` that a kill interrupted, and empties what an interrupted `loads` left.
  void mend() const {
    const bool interrupted = header_->incarnation.load() % 2 == 1;
    for (uint64_t l = 0; l < count(); ++l) {
      LaneHeader& h = lanes_[l];
      const uint64_t base = h.base.load();
      if (base & kMoving) {
        const uint64_t at = base & ~kMoving;
        set_counters(l, at, at, at - h.durable.load(), {});
      } else if (interrupted) {
        empty_lane(l, false);
      }
      const uint64_t published = h.published.load();
      if (h.base.load() > published) h.base.store(published);
      if (h.claimed.load() < published) h.claimed.store(published);
      if (h.durable.load() > published) h.durable.store(published);
    }
    end_change();
  }
  void set_seams(uint64_t l, const std::vector<uint64_t>& at) const {
    LaneHeader& h = lanes_[l];
    const size_t skip = at.size() > kSeams ? at.size() - kSeams : 0;
    h.seam_end.store(0), h.seam_first.store(0);
    for (size_t i = skip; i < at.size(); ++i) h.seams[i - skip].store(at[i], std::memory_order_relaxed);
    h.seam_end.store(at.size() - skip, std::memory_order_release);
  }

 private:
  static constexpr uint64_t kMoving = uint64_t{1} << 63;
  void empty_lane(uint64_t l, bool reset_count) const {
    LaneHeader& h = lanes_[l];
    const uint64_t at = h.published.load();
    const uint64_t next = round_up(std::max(at, h.claimed.load()), capacity());
    set_counters(l, next, next, next - (reset_count ? 0 : at - h.origin.load()), {});
  }
  static void store_claimed(LaneHeader& h, uint64_t to) {
    if (to > h.claimed.load(std::memory_order_relaxed)) h.claimed.store(to, std::memory_order_relaxed);
  }
  uint64_t first_of(const LaneHeader& h, uint64_t claimed) const {
    const uint64_t base = h.base.load(std::memory_order_relaxed);
    return std::max(base, claimed > capacity() ? claimed - capacity() : 0);
  }

  StoreHeader* header_ = nullptr;
  LaneHeader* lanes_ = nullptr;
  Shape shape_{};
};

}  // namespace engram
