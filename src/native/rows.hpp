// Appending to, reading from and changing the rows of a store.
#pragma once
#include <algorithm>
#include <chrono>
#include <vector>

#include "border.hpp"
#include "store.hpp"

namespace engram {

class RowWriter {
 public:
  explicit RowWriter(Store& store) : store_(store) {}

  // Appends n time steps to a lane, a piece at a time; returns the first one's write number.
  uint64_t append(uint64_t lane, uint64_t n, const std::vector<LeafSource>& leaves) {
    const Lanes::Protocol protocol = store_.lanes.protocol(lane);
    const uint64_t start = StdMemory::load(protocol.published), piece = store_.lanes.piece();
    copies_.reserve(leaves.size());  // no memory: an error now, and not when rows have been claimed
    bool begins = n > 0 && (store_.next_is_seam(lane) || BorderCheck(store_).begins(lane, n, leaves));
    for (uint64_t done = 0; done < n; begins = false) {
      const uint64_t take = std::min(piece, n - done);
      if (SavePass* pass = store_.saving()) pass->preserve(lane, (start + done) % protocol.capacity, take);
      protocol.append(take, begins, [&](uint64_t first) { write(lane, first, take, leaves, done, begins); });
      done += take;
    }
    if (n > 0) store_.note_written(lane);
    return start;
  }

 private:
  void write(uint64_t lane, uint64_t first, uint64_t n, const std::vector<LeafSource>& leaves, uint64_t skip,
             bool begins) {
    const Shape& s = store_.shape();
    const auto term = static_cast<uint32_t>(store_.lanes.lane(lane).term.load(std::memory_order_relaxed));
    uint8_t* rows[kBlockRows];
    std::vector<LeafCopy>& copies = copies_;
    for (uint64_t strand = 0; strand < s.strands; ++strand) {
      uint64_t slot = first % s.lane_capacity;
      for (uint64_t done = 0; done < n;) {
        const uint64_t take = std::min<uint64_t>(kBlockRows, n - done);
        const uint64_t first_slot = slot;
        for (uint64_t i = 0; i < take; ++i) {
          rows[i] = store_.row(store_.physical(lane, strand, slot));
          if (++slot == s.lane_capacity) slot = 0;
        }
        copies.clear();
        for (const LeafSource& leaf : leaves)
          copies.push_back({leaf.offset, leaf.bytes,
                            const_cast<uint8_t*>(leaf.array) + static_cast<ptrdiff_t>(skip + done) * leaf.stride +
                                static_cast<ptrdiff_t>(strand) * leaf.strand_stride,
                            leaf.stride});
        scatter_rows(rows, take, copies.data(), copies.size());
        if (store_.has_trailer()) {
          uint64_t at = first_slot;
          for (uint64_t i = 0; i < take; ++i) {
            const uint64_t seam = begins && done + i == 0 ? Trailer::kSeam : 0;
            store_.seal(rows[i], store_.physical(lane, strand, at), (first + done + i) | seam, term);
            if (++at == s.lane_capacity) at = 0;
          }
        }
        done += take;
      }
    }
  }

  Store& store_;
  std::vector<LeafCopy> copies_;
};

// Memory of a reader, kept from call to call.
struct ReadScratch {
  std::vector<LaneView> views;
  std::vector<SlotNumbers> numbers;
  std::vector<const uint8_t*> rows;
  std::vector<uint64_t> physical, slot, number, first;
  std::vector<uint32_t> lane;
};

// Finds the rows of a batch of slots, copies them, and says which of them still exist.
class RowReader {
 public:
  RowReader(Store& store, ReadScratch& scratch)
      : store_(store), views_(scratch.views), numbers_(scratch.numbers), rows_(scratch.rows),
        physical_(scratch.physical), slot_(scratch.slot), first_(scratch.first), lane_(scratch.lane) {}

  // Looks every slot up. False: some are outside the store (nothing may be read then).
  bool find(const int64_t* slots, size_t n) {
    const Shape& s = store_.shape();
    const uint64_t strands = s.strands, capacity = s.lane_capacity, lanes = s.lanes, all = store_.slots();
#ifndef ENGRAM_PLANT_ROWS_BEFORE_PUBLISHED
    look();
#endif
    rows_.resize(n), physical_.resize(n), slot_.resize(n), lane_.resize(n);
    for (size_t i = 0; i < n; ++i) {
      const auto slot = static_cast<uint64_t>(slots[i]);
      if (slot >= all) return false;
      uint64_t time = slot, strand = 0, lane = 0;
      if (strands > 1) time = slot / strands, strand = slot - time * strands;
      if (lanes > 1) lane = time / capacity, time -= lane * capacity;
      lane_[i] = static_cast<uint32_t>(lane), slot_[i] = time;
      physical_[i] = store_.physical(lane, strand, time);
      rows_[i] = store_.row(physical_[i]);
    }
    return true;
  }

  void copy(LeafCopy* leaves, size_t n_leaves, bool mapped_file) {
    const size_t n = rows_.size(), bytes = store_.shape().row_stride;
#ifdef ENGRAM_PLANT_ROWS_BEFORE_PUBLISHED
    gather_rows(rows_.data(), n, bytes, leaves, n_leaves);
    look();
    return;
#endif
#ifdef ENGRAM_PLANT_CLAIM_READ_EARLY
    plant_first_.clear();
    for (uint64_t l = 0; l < views_.size(); ++l) plant_first_.push_back(store_.lanes.first_now(l));
    plant_epoch_ = store_.lanes.epoch();
#endif
    if (!mapped_file) {
      gather_rows(rows_.data(), n, bytes, leaves, n_leaves);
      return;
    }
    PageAsker& pages = store_.pages();
    size_t done = 0;
    if (!pages.on()) {
      done = std::min(n, PageAsker::kProbeRows);
      const long before = PageAsker::faults_of_this_thread();
      gather_rows(rows_.data(), done, bytes, leaves, n_leaves);
      pages.saw_faults(PageAsker::faults_of_this_thread() - before);
      if (!pages.on()) {
        gather_rows(rows_.data() + done, n - done, bytes, leaves, n_leaves);
        return;
      }
    }
    for (size_t i = done; i < n; ++i) pages.ask(store_.shape().rows_offset + physical_[i] * bytes, bytes);
    const auto start = std::chrono::steady_clock::now();
    gather_rows(rows_.data() + done, n - done, bytes, leaves, n_leaves);
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start);
    if (n > done) pages.saw_batch(static_cast<uint64_t>(ns.count()), n - done);
  }

  // After the copy: which of the rows were there from its start to its end.
  void settle(bool want_numbers, ReadResult& result) const {
    Lanes::Protocol::after_reading();
#ifdef ENGRAM_PLANT_CLAIM_READ_EARLY
    const Epoch now = plant_epoch_;
    first_ = plant_first_;
#else
    const Epoch now = store_.lanes.epoch();
    first_.clear();
    for (uint64_t l = 0; l < views_.size(); ++l) first_.push_back(store_.lanes.first_now(l));
#endif
    const bool undisturbed = epoch_ == now && epoch_.quiet();
    if (want_numbers) result.numbers.resize(rows_.size());
    for (size_t i = 0; i < rows_.size(); ++i) {
      uint64_t number = 0;
      if (!numbers_[lane_[i]].find(slot_[i], number))
        result.unwritten.push_back(static_cast<uint32_t>(i));
      else if (!undisturbed || number < first_[lane_[i]])
        result.missing.push_back(static_cast<uint32_t>(i));
      if (want_numbers) result.numbers[i] = number;
    }
  }

 private:
  void look() {
    epoch_ = store_.lanes.epoch();
    views_.clear(), numbers_.clear();
    for (uint64_t l = 0; l < store_.shape().lanes; ++l) {
      views_.push_back(store_.lanes.view(l));
      numbers_.emplace_back(views_.back(), store_.shape().lane_capacity);
    }
  }

  Store& store_;
  Epoch epoch_;
  std::vector<LaneView>& views_;
  std::vector<SlotNumbers>& numbers_;
  std::vector<const uint8_t*>& rows_;
  std::vector<uint64_t>&physical_, &slot_, &first_;
  std::vector<uint32_t>& lane_;
#ifdef ENGRAM_PLANT_CLAIM_READ_EARLY
  std::vector<uint64_t> plant_first_;
  Epoch plant_epoch_;
#endif
};

}  // namespace engram
