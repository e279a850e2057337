// Appending rows to a store, reading them, and putting back rows that were saved.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "border.hpp"
#include "store.hpp"

namespace engram {

// ---- leaves between packed rows and arrays: all leaves of a block of rows while its cache lines are warm ----
constexpr size_t kBlockRows = 32;
constexpr size_t kPrefetchBytes = 1024;  // of each row; the hardware prefetcher continues by itself

// One leaf: where it sits in a row, and an array with a stride for each row.
struct LeafCopy {
  size_t offset;
  size_t bytes;
  uint8_t* array;
  ptrdiff_t stride;
};

template <size_t N>
inline void gather_fixed(const uint8_t* const* rows, size_t n, const LeafCopy& leaf) {
  uint8_t* to = leaf.array;
  for (size_t i = 0; i < n; ++i, to += leaf.stride) std::memcpy(to, rows[i] + leaf.offset, N);
}
template <size_t N>
inline void scatter_fixed(uint8_t* const* rows, size_t n, const LeafCopy& leaf) {
  const uint8_t* from = leaf.array;
  for (size_t i = 0; i < n; ++i, from += leaf.stride) std::memcpy(rows[i] + leaf.offset, from, N);
}

using GatherLoop = void (*)(const uint8_t* const*, size_t, const LeafCopy&);
using ScatterLoop = void (*)(uint8_t* const*, size_t, const LeafCopy&);
template <size_t... N>
constexpr std::array<GatherLoop, sizeof...(N)> gather_loops(std::index_sequence<N...>) {
  return {&gather_fixed<N + 1>...};
}
template <size_t... N>
constexpr std::array<ScatterLoop, sizeof...(N)> scatter_loops(std::index_sequence<N...>) {
  return {&scatter_fixed<N + 1>...};
}
constexpr size_t kFixedSizes = 32;  // leaves of 1 to 32 bytes are copied by a loop of fixed size
inline constexpr auto kGatherLoops = gather_loops(std::make_index_sequence<kFixedSizes>{});
inline constexpr auto kScatterLoops = scatter_loops(std::make_index_sequence<kFixedSizes>{});

template <int Write>
inline void prefetch_rows(const uint8_t* const* rows, size_t n, size_t row_bytes) {
  const size_t reach = std::min(row_bytes, kPrefetchBytes);
  for (size_t i = 0; i < n; ++i) {
    const uint8_t* last = rows[i] + reach - 1;
    for (const uint8_t* p = rows[i]; p < last; p += 64) __builtin_prefetch(p, Write, 3);
    __builtin_prefetch(last, Write, 3);
  }
}

// rows[i] -> leaf.array[i], every leaf.
inline void gather_rows(const uint8_t* const* rows, size_t n, size_t row_bytes, LeafCopy* leaves, size_t n_leaves) {
  prefetch_rows<0>(rows, std::min(n, kBlockRows), row_bytes);
  for (size_t at = 0; at < n; at += kBlockRows) {
    const size_t block = std::min(kBlockRows, n - at);
    if (at + block < n) prefetch_rows<0>(rows + at + block, std::min(kBlockRows, n - at - block), row_bytes);
    for (size_t k = 0; k < n_leaves; ++k) {
      LeafCopy& leaf = leaves[k];
      if (leaf.bytes == 0) continue;
      if (leaf.bytes <= kFixedSizes)
        kGatherLoops[leaf.bytes - 1](rows + at, block, leaf);
      else
        for (size_t i = 0; i < block; ++i)
          std::memcpy(leaf.array + static_cast<ptrdiff_t>(i) * leaf.stride, rows[at + i] + leaf.offset, leaf.bytes);
      leaf.array += static_cast<ptrdiff_t>(block) * leaf.stride;
    }
  }
}

// leaf.array[i] -> rows[i], every leaf.
inline void scatter_rows(uint8_t* const* rows, size_t n, LeafCopy* leaves, size_t n_leaves) {
  for (size_t at = 0; at < n; at += kBlockRows) {
    const size_t block = std::min(kBlockRows, n - at);
    for (size_t k = 0; k < n_leaves; ++k) {
      LeafCopy& leaf = leaves[k];
      if (leaf.bytes == 0) continue;
      if (leaf.bytes <= kFixedSizes)
        kScatterLoops[leaf.bytes - 1](rows + at, block, leaf);
      else
        for (size_t i = 0; i < block; ++i)
          std::memcpy(rows[at + i] + leaf.offset, leaf.array + static_cast<ptrdiff_t>(i) * leaf.stride, leaf.bytes);
      leaf.array += static_cast<ptrdiff_t>(block) * leaf.stride;
    }
  }
}

// ---- appending ----
class RowWriter {
 public:
  explicit RowWriter(Store& store) : store_(store) {}

  // Appends n time steps to a lane, a piece at a time; returns the first one's sequence.
  uint64_t append(uint64_t lane, uint64_t n, const std::vector<LeafSource>& leaves) {
    const Lanes::Protocol protocol = store_.lanes.protocol(lane);
    const uint64_t start = StdMemory::load(protocol.published), piece = store_.lanes.piece();
    // Allocate first: a failure after a claim would lose the rows to be overwritten, one between two pieces a part of them.
    copies_.reserve(leaves.size());
    if (CopyOnWriteSnapshot* snapshot = store_.saving(); snapshot && n > 0)
      snapshot->preserve(lane, start % protocol.capacity, n);
    bool begins = n > 0 && (store_.next_is_seam(lane) || BorderCheck(store_).begins(lane, n, leaves));
    for (uint64_t done = 0; done < n; begins = false) {
      const uint64_t take = std::min(piece, n - done);
      protocol.append(take, begins, [&](uint64_t first) { write(lane, first, take, leaves, done, begins); });
      done += take;
    }
    if (n > 0) store_.note_written(lane);
    return start;
  }

 private:
  void write(uint64_t lane, uint64_t first, uint64_t n, const std::vector<LeafSource>& leaves, uint64_t skip,
             bool begins) {
    const StoreGeometry& s = store_.geometry();
    const auto term = static_cast<uint32_t>(store_.lanes.lane(lane).term.load(std::memory_order_relaxed));
    uint8_t* rows[kBlockRows];
    std::vector<LeafCopy>& copies = copies_;
    for (uint64_t env = 0; env < s.envs; ++env) {
      uint64_t slot = first % s.lane_capacity;
      for (uint64_t done = 0; done < n;) {
        const uint64_t take = std::min<uint64_t>(kBlockRows, n - done);
        const uint64_t first_slot = slot;
        for (uint64_t i = 0; i < take; ++i) {
          rows[i] = store_.row(store_.physical(lane, env, slot));
          if (++slot == s.lane_capacity) slot = 0;
        }
        copies.clear();
        for (const LeafSource& leaf : leaves)
          copies.push_back({leaf.offset, leaf.bytes,
                            const_cast<uint8_t*>(leaf.array) + static_cast<ptrdiff_t>(skip + done) * leaf.stride +
                                static_cast<ptrdiff_t>(env) * leaf.env_stride,
                            leaf.stride});
        scatter_rows(rows, take, copies.data(), copies.size());
        if (store_.has_trailer()) {
          uint64_t at = first_slot;
          for (uint64_t i = 0; i < take; ++i) {
            const uint64_t seam = begins && done + i == 0 ? Trailer::kSeam : 0;
            store_.seal(rows[i], store_.physical(lane, env, at), (first + done + i) | seam, term);
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

// ---- reading ----
// A reader's buffers, reused from call to call.
struct ReadScratch {
  std::vector<LaneView> views;
  std::vector<SlotSequences> sequences;
  std::vector<const uint8_t*> rows;
  std::vector<uint64_t> physical, slot, sequence, first;
  std::vector<uint32_t> lane;
};

// Looks up the rows of a batch of slots, copies them, and tells which of them were still there after the copy.
class RowReader {
 public:
  RowReader(Store& store, ReadScratch& scratch)
      : store_(store), views_(scratch.views), sequences_(scratch.sequences), rows_(scratch.rows),
        physical_(scratch.physical), slot_(scratch.slot), first_(scratch.first), lane_(scratch.lane) {}

  // Looks up every slot. False: a slot lies outside the store, and nothing may be read.
  bool find(const int64_t* slots, size_t n) {
    const StoreGeometry& s = store_.geometry();
    const uint64_t envs = s.envs, capacity = s.lane_capacity, lanes = s.lanes, all = store_.slots();
#ifndef ENGRAM_PLANT_ROWS_BEFORE_PUBLISHED
    look();
#endif
    rows_.resize(n), physical_.resize(n), slot_.resize(n), lane_.resize(n);
    for (size_t i = 0; i < n; ++i) {
      const auto slot = static_cast<uint64_t>(slots[i]);
      if (slot >= all) return false;
      uint64_t time = slot, env = 0, lane = 0;
      if (envs > 1) time = slot / envs, env = slot - time * envs;
      if (lanes > 1) lane = time / capacity, time -= lane * capacity;
      lane_[i] = static_cast<uint32_t>(lane), slot_[i] = time;
      physical_[i] = store_.physical(lane, env, time);
      rows_[i] = store_.row(physical_[i]);
    }
    return true;
  }

  void copy(LeafCopy* leaves, size_t n_leaves, bool mapped_file) {
    const size_t n = rows_.size(), bytes = store_.geometry().row_stride;
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
    Readahead& pages = store_.readahead();
    size_t done = 0;
    if (!pages.on()) {
      done = std::min(n, Readahead::kProbeRows);
      const long before = Readahead::faults_of_this_thread();
      gather_rows(rows_.data(), done, bytes, leaves, n_leaves);
      pages.saw_faults(Readahead::faults_of_this_thread() - before);
      if (!pages.on()) {
        gather_rows(rows_.data() + done, n - done, bytes, leaves, n_leaves);
        return;
      }
    }
    for (size_t i = done; i < n; ++i) pages.ask(store_.geometry().rows_offset + physical_[i] * bytes, bytes);
    const auto start = std::chrono::steady_clock::now();
    gather_rows(rows_.data() + done, n - done, bytes, leaves, n_leaves);
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start);
    if (n > done) pages.saw_batch(static_cast<uint64_t>(ns.count()), n - done);
  }

  // After the copy: which rows existed from its start to its end.
  void settle(bool want_sequences, ReadResult& result) const {
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
    if (want_sequences) result.sequences.resize(rows_.size());
    for (size_t i = 0; i < rows_.size(); ++i) {
      uint64_t sequence = 0;
      if (!sequences_[lane_[i]].find(slot_[i], sequence))
        result.unwritten.push_back(static_cast<uint32_t>(i));
      else if (!undisturbed || sequence < first_[lane_[i]])
        result.missing.push_back(static_cast<uint32_t>(i));
      if (want_sequences) result.sequences[i] = sequence;
    }
  }

 private:
  void look() {
    epoch_ = store_.lanes.epoch();
    views_.clear(), sequences_.clear();
    for (uint64_t l = 0; l < store_.geometry().lanes; ++l) {
      views_.push_back(store_.lanes.view(l));
      sequences_.emplace_back(views_.back(), store_.geometry().lane_capacity);
    }
  }

  Store& store_;
  Epoch epoch_;
  std::vector<LaneView>& views_;
  std::vector<SlotSequences>& sequences_;
  std::vector<const uint8_t*>& rows_;
  std::vector<uint64_t>&physical_, &slot_, &first_;
  std::vector<uint32_t>& lane_;
#ifdef ENGRAM_PLANT_CLAIM_READ_EARLY
  std::vector<uint64_t> plant_first_;
  Epoch plant_epoch_;
#endif
};

// ---- restoring: rows are written to their places before readers can see them ----
// Payloads [envs, steps], with any stride along both.
struct RowBlock {
  const uint8_t* data;
  uint64_t steps;
  ptrdiff_t per_env, per_step;
};

// Rows of a file are assembled in a small buffer and written with pwrite. Stores through the map would fault on every page
// and read or zero its old bytes first; writing whole pages needs neither. On Linux a file and its maps share their pages.
class RowRestorer {
 public:
  static constexpr size_t kPieceBytes = 1 << 20;  // still in the cache when written; smaller writes cost the file system more

  explicit RowRestorer(Store& store) : store_(store), stride_(store.geometry().row_stride) {
    per_piece_ = std::max<uint64_t>(1, kPieceBytes / stride_);
    const uint64_t whole_pages = kPage / std::gcd(stride_, uint64_t{kPage});  // this many rows end at a page's end
    if (per_piece_ > whole_pages) per_piece_ -= per_piece_ % whole_pages;
    // Zeroed once: rows lie at the same places in each piece, and the gaps between them are never written. Without memory
    // for the buffer rows go through the map: to fail here would lose the rows from before the restore.
    if (store.file_is_there()) piece_.reset(new (std::nothrow) uint8_t[per_piece_ * stride_]());
  }

  // Writes rows with sequences from `start` on, at most as many as the lane holds; their seams are set already. Returns 0,
  // or the errno of a write that failed.
  int put(uint64_t lane, uint64_t start, const RowBlock& block) {
    const StoreGeometry& s = store_.geometry();
    term_ = static_cast<uint32_t>(store_.lanes.lane(lane).term.load());
    lane_ = lane;
    for (uint64_t env = 0; env < s.envs; ++env) {
      const uint8_t* from = block.data + static_cast<ptrdiff_t>(env) * block.per_env;
      for (uint64_t done = 0; done < block.steps;) {
        const uint64_t sequence = start + done, slot = sequence % s.lane_capacity;
        const uint64_t at = store_.physical(lane, env, slot);
        const uint64_t n = std::min({block.steps - done, s.lane_capacity - slot, per_piece_ - at % per_piece_});
        if (const int error = put_piece(at, sequence, n, from, block.per_step)) return error;
        from += static_cast<ptrdiff_t>(n) * block.per_step, done += n;
      }
    }
    return 0;
  }

 private:
  // Consecutive rows from the physical row `at` on.
  int put_piece(uint64_t at, uint64_t sequence, uint64_t n, const uint8_t* from, ptrdiff_t per_step) {
    uint8_t* const rows = piece_ ? piece_.get() : store_.row(at);
    for (uint64_t i = 0; i < n; ++i) {
      uint8_t* row = rows + i * stride_;
      std::memcpy(row, from + static_cast<ptrdiff_t>(i) * per_step, store_.geometry().payload_bytes);
      if (!store_.has_trailer()) continue;
      const uint64_t seam = store_.seam(lane_, sequence + i) ? Trailer::kSeam : 0;
      store_.seal(row, at + i, (sequence + i) | seam, term_);
    }
    return piece_ ? write(rows, n * stride_, store_.geometry().rows_offset + at * stride_) : 0;
  }
  int write(const uint8_t* from, size_t bytes, uint64_t offset) const {
    while (bytes > 0) {
      const ssize_t done = ::pwrite(store_.fd(), from, bytes, static_cast<off_t>(offset));
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) return done < 0 ? errno : EIO;
      from += done, bytes -= static_cast<size_t>(done), offset += static_cast<uint64_t>(done);
    }
    return 0;
  }

  Store& store_;
  uint64_t stride_, per_piece_, lane_ = 0;
  uint32_t term_ = 0;
  std::unique_ptr<uint8_t[]> piece_;  // none: rows are written through the map
};

}  // namespace engram
