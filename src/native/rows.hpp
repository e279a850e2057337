// Appends rows to a store, reads them, and puts back rows that were saved.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "border.hpp"
#include "store.hpp"

namespace engram {

// ---- leaves between packed rows and arrays: all leaves of a block of rows while its cache lines are warm ----
constexpr size_t kBlockRows = 32;
constexpr size_t kPrefetchBytes = 1024;  // of each row; the hardware prefetcher continues by itself
constexpr size_t kNearBytes = 24 << 10;   // of a batch: prefetched rows stay in the first-level cache
constexpr size_t kWarmBytes = 256 << 10;  // of a batch: prefetched rows stay in the second-level cache until they are copied

// One leaf: where it sits in a row, and an array with a stride for each row.
struct LeafCopy {
  size_t offset;
  size_t bytes;
  uint8_t* array;
  ptrdiff_t stride;
};

template <size_t N>
inline void gather_fixed(const uint8_t* const* rows, size_t n, const LeafCopy& leaf) {
  const size_t offset = leaf.offset;  // a copy, because the compiler must assume that writes of bytes change the leaf
  const ptrdiff_t stride = leaf.stride;
  uint8_t* to = leaf.array;
  for (size_t i = 0; i < n; ++i, to += stride) std::memcpy(to, rows[i] + offset, N);
}
template <size_t N>
inline void scatter_fixed(uint8_t* const* rows, size_t n, const LeafCopy& leaf) {
  const size_t offset = leaf.offset;
  const ptrdiff_t stride = leaf.stride;
  const uint8_t* from = leaf.array;
  for (size_t i = 0; i < n; ++i, from += stride) std::memcpy(rows[i] + offset, from, N);
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

// `Cache`: the locality argument of `__builtin_prefetch`.
template <int Write, int Cache>
inline void prefetch_row(const uint8_t* row, size_t reach) {
  const uint8_t* last = row + reach - 1;
  for (const uint8_t* p = row; p < last; p += 64) __builtin_prefetch(p, Write, Cache);
  __builtin_prefetch(last, Write, Cache);
  asm volatile("");  // GCC drops calls that only prefetch
}
template <int Write>
inline void prefetch_rows(const uint8_t* const* rows, size_t n, size_t row_bytes) {
  const size_t reach = std::min(row_bytes, kPrefetchBytes);
  for (size_t i = 0; i < n; ++i) prefetch_row<Write, 3>(rows[i], reach);
}

// A run of leaves of one byte each that are adjacent in a row, as flags are.
constexpr size_t kRunBytes = 8;
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ENGRAM_SHUFFLES_BYTES
#endif
#endif

// The number of leaves, from the first one on, that form such a run; 1: there is none.
inline size_t byte_run(const LeafCopy* leaves, size_t n_leaves, size_t row_bytes) {
  size_t run = 1;
#ifdef ENGRAM_SHUFFLES_BYTES
  if (leaves[0].bytes != 1 || leaves[0].stride != 1 || row_bytes < kRunBytes) return 1;
  for (const size_t most = std::min(n_leaves, kRunBytes); run < most; ++run) {
    const LeafCopy& leaf = leaves[run];
    if (leaf.bytes != 1 || leaf.stride != 1 || leaf.offset != leaves[0].offset + run) break;
  }
#endif
  return run;
}

#ifdef ENGRAM_SHUFFLES_BYTES
// The bytes from `at` on of 8 rows: columns[c][i] is byte c of row i.
inline void transpose_bytes(const uint8_t* const* rows, size_t at, uint8_t (&columns)[kRunBytes][kRunBytes]) {
  using Bytes = uint8_t __attribute__((vector_size(16)));
  using Words = uint16_t __attribute__((vector_size(16)));
  using Quads = uint32_t __attribute__((vector_size(16)));
  using Longs = uint64_t __attribute__((vector_size(16)));
  const auto row = [&](size_t i) {
    uint64_t bytes;
    std::memcpy(&bytes, rows[i] + at, sizeof bytes);
    return reinterpret_cast<Bytes>(Longs{bytes, 0});
  };
  const auto pair = [&](size_t i) {
    return reinterpret_cast<Words>(
        __builtin_shufflevector(row(i), row(i + 1), 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
  };
  const auto low = [](Words a, Words b) {
    return reinterpret_cast<Quads>(__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11));
  };
  const auto high = [](Words a, Words b) {
    return reinterpret_cast<Quads>(__builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15));
  };
  const Words of01 = pair(0), of23 = pair(2), of45 = pair(4), of67 = pair(6);
  const Quads low0 = low(of01, of23), low4 = low(of45, of67), high0 = high(of01, of23), high4 = high(of45, of67);
  const Quads two[4] = {
      __builtin_shufflevector(low0, low4, 0, 4, 1, 5), __builtin_shufflevector(low0, low4, 2, 6, 3, 7),
      __builtin_shufflevector(high0, high4, 0, 4, 1, 5), __builtin_shufflevector(high0, high4, 2, 6, 3, 7)};
  std::memcpy(columns, two, sizeof two);
}

// As `gather_fixed<1>` of each leaf of a run, but with one load a row, which may include bytes of the row's other leaves.
inline void gather_byte_run(const uint8_t* const* rows, size_t n, size_t row_bytes, const LeafCopy* leaves, size_t run) {
  const size_t at = std::min(leaves[0].offset, row_bytes - kRunBytes), skipped = leaves[0].offset - at;
  size_t i = 0;
  for (uint8_t columns[kRunBytes][kRunBytes]; i + kRunBytes <= n; i += kRunBytes) {
    transpose_bytes(rows + i, at, columns);
    for (size_t k = 0; k < run; ++k) std::memcpy(leaves[k].array + i, columns[skipped + k], kRunBytes);
  }
  for (size_t k = 0; k < run && i < n; ++k) {
    LeafCopy rest = leaves[k];
    rest.array += i;
    gather_fixed<1>(rows + i, n - i, rest);
  }
}
#else
inline void gather_byte_run(const uint8_t* const*, size_t, size_t, const LeafCopy*, size_t) {}
#endif

// rows[i] -> leaf.array[i] of the first leaf, or of several that are copied together; returns how many. Advances their arrays.
inline size_t gather_leaf(const uint8_t* const* rows, size_t n, size_t row_bytes, LeafCopy* leaves, size_t n_leaves) {
  LeafCopy& leaf = leaves[0];
  if (leaf.bytes == 0) return 1;
  if (const size_t run = byte_run(leaves, n_leaves, row_bytes); run > 1) {
    gather_byte_run(rows, n, row_bytes, leaves, run);
    for (size_t k = 0; k < run; ++k) leaves[k].array += n;
    return run;
  }
  if (leaf.bytes <= kFixedSizes)
    kGatherLoops[leaf.bytes - 1](rows, n, leaf);
  else
    for (size_t i = 0; i < n; ++i)
      std::memcpy(leaf.array + static_cast<ptrdiff_t>(i) * leaf.stride, rows[i] + leaf.offset, leaf.bytes);
  leaf.array += static_cast<ptrdiff_t>(n) * leaf.stride;
  return 1;
}

// Long rows with many leaves are copied a few bytes at a time. The hardware prefetcher follows neither so many rows nor across
// their pages, so the code prefetches the next bytes of each row.
constexpr size_t kLongBlockRows = 16;
constexpr size_t kFirstBytes = 256;  // of each row, prefetched while the end of the rows before is copied
constexpr size_t kAheadBytes = 512;  // of each row beyond the bytes that are being copied

inline void ask_for_lines(const uint8_t* const* rows, size_t n, size_t from, size_t to) {
  for (; from < to; from += 64)
    for (size_t i = 0; i < n; ++i) __builtin_prefetch(rows[i] + from, 0, 3);
}

inline void gather_long_rows(const uint8_t* const* rows, size_t n, size_t row_bytes, LeafCopy* leaves, size_t n_leaves) {
  ask_for_lines(rows, std::min(n, kLongBlockRows), 0, kFirstBytes);
  for (size_t at = 0; at < n; at += kLongBlockRows) {
    const size_t block = std::min(kLongBlockRows, n - at), next = std::min(kLongBlockRows, n - at - block);
    bool asked_next = false;
    size_t asked = kFirstBytes;
    for (size_t k = 0; k < n_leaves;) {
      const size_t end = leaves[k].offset + leaves[k].bytes;
      if (leaves[k].bytes <= kAheadBytes)  // a longer one is read from end to end, which the hardware prefetches
        ask_for_lines(rows + at, block, asked, std::min(row_bytes, end + kAheadBytes));
      asked = std::max(asked, (std::min(row_bytes, end + kAheadBytes) + 63) / 64 * 64);
      if (asked >= row_bytes && !asked_next) ask_for_lines(rows + at + block, next, 0, kFirstBytes), asked_next = true;
      k += gather_leaf(rows + at, block, row_bytes, leaves + k, n_leaves - k);
    }
  }
}

// rows[i] -> leaf.array[i], every leaf; quickest in the order in which leaves lie in a row. `warm`: the rows were prefetched.
inline void gather_rows(const uint8_t* const* rows, size_t n, size_t row_bytes, LeafCopy* leaves, size_t n_leaves,
                        bool warm = false) {
  if (row_bytes > kPrefetchBytes && row_bytes / kAheadBytes < n_leaves)
    return gather_long_rows(rows, n, row_bytes, leaves, n_leaves);
  if (!warm) prefetch_rows<0>(rows, std::min(n, kBlockRows), row_bytes);
  for (size_t at = 0; at < n; at += kBlockRows) {
    const size_t block = std::min(kBlockRows, n - at);
    if (!warm && at + block < n) prefetch_rows<0>(rows + at + block, std::min(kBlockRows, n - at - block), row_bytes);
    for (size_t k = 0; k < n_leaves;) k += gather_leaf(rows + at, block, row_bytes, leaves + k, n_leaves - k);
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

  // Appends n time steps to a lane, a piece at a time; returns the first one's sequence. `looked_at`: the same steps, leaf by leaf, to
  // check whether they continue the newest row.
  uint64_t append(uint64_t lane, uint64_t n, const std::vector<LeafSource>& leaves,
                  const std::vector<LeafSource>& looked_at) {
    const uint64_t start = StdMemory::load(store_.lanes.protocol(lane).published);
    try {
      prepare(lane, n, leaves);
    } catch (const NoRoomForUnits& full) {
      throw NoRoomForUnits(std::string(full.what()) + ". Nothing was written");
    }
    if (n > 0 && store_.grows()) store_.make_room_behind(lane, n);
    const bool begins = n > 0 && this->begins(lane, n, looked_at);
    if (begins && !store_.geometry().seams_bytes) store_.add_seam(lane, start);
    append_part(lane, 0, n, begins, leaves);
    return start;
  }
  // Takes what n steps behind the newest row may need: a failure after a claim would lose the rows to be overwritten, and one
  // between two pieces would lose a part of the steps.
  // `from`: the first one's step in the batch.
  void prepare(uint64_t lane, uint64_t n, const std::vector<LeafSource>& leaves, uint64_t from = 0) {
    copies_.reserve(leaves.size());
    if (Observations* const observations = store_.observations(); observations && n > 0) {
      divided_ = &observations->divide(leaves);
      observations->plan(store_.lanes.protocol(lane), store_.lanes.header().incarnation.load(), lane, n, divided_->keys, from);
    }
    if (CopyOnWriteSnapshot* snapshot = store_.saving(); snapshot && n > 0)
      snapshot->preserve(lane, StdMemory::load(store_.lanes.protocol(lane).published) % store_.lanes.capacity(), n);
  }
  // Whether the first of n steps needs a seam.
  bool begins(uint64_t lane, uint64_t n, const std::vector<LeafSource>& leaves) const {
    return store_.next_is_seam(lane) || BorderCheck(store_).begins(lane, n, leaves);
  }
  // Appends n steps from step `from` of the leaves on, after `prepare`.
  void append_part(uint64_t lane, uint64_t from, uint64_t n, bool begins, const std::vector<LeafSource>& leaves) {
    if (n == 0) return;
    const Lanes::Protocol protocol = store_.lanes.with_removed(lane);
    const uint64_t piece = store_.lanes.piece();
    store_.begin_rows(lane);
    for (uint64_t done = 0; done < n; begins = false) {
      const uint64_t take = std::min(piece, n - done);
      append_piece(protocol, lane, take, leaves, from + done, begins);
      done += take;
    }
    store_.note_written(lane);
  }
  // Appends a row of any length, which takes so many pages, with one claim and one publication: it is there as a whole, or not at
  // all. After `prepare`. Returns the sequence of its head.
  uint64_t append_row(uint64_t lane, std::span<const uint8_t> row, uint64_t pages) {
    uint64_t head = 0;
    store_.begin_rows(lane);
    store_.lanes.with_removed(lane).append(pages, true, [&](uint64_t first) { write_pages(lane, head = first, row, pages); });
    store_.note_written(lane);
    return head;
  }
  // Writes the next n rows that are restored in a store that keeps observations, which no reader sees yet and whose seams are set.
  void restore(uint64_t lane, uint64_t n, const std::vector<LeafSource>& leaves) {
    Observations& observations = *store_.observations();
    copies_.reserve(leaves.size());
    divided_ = &observations.divide(leaves);
    const Lanes::Protocol protocol = observations.restoring(lane);
    has_seams_ = true;
    observations.plan(protocol, store_.lanes.header().incarnation.load(), lane, n, divided_->keys, 0);
    for (uint64_t done = 0; done < n;) {
      const uint64_t take = std::min(store_.lanes.piece(), n - done);
      append_piece(protocol, lane, take, leaves, done, false);
      done += take;
    }
  }

 private:
  // `skip`: the first step in the leaves.
  void append_piece(const Lanes::Protocol& protocol, uint64_t lane, uint64_t n, const std::vector<LeafSource>& leaves, uint64_t skip,
                    bool begins) {
    Observations* const observations = store_.observations();
    protocol.append(n, begins, [&](uint64_t first) {
      write(lane, first, n, observations ? divided_->in_row : leaves, skip, begins);
      if (observations) observations->store(protocol, lane, first, n, divided_->keys, term_of(lane));
    });
  }
  uint32_t term_of(uint64_t lane) const { return static_cast<uint32_t>(store_.lanes.lane(lane).term.load(std::memory_order_relaxed)); }
  void write(uint64_t lane, uint64_t first, uint64_t n, const std::vector<LeafSource>& leaves, uint64_t skip,
             bool begins) {
    const StoreGeometry& s = store_.geometry();
    const uint32_t term = term_of(lane);
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
            const bool is_seam = has_seams_ ? store_.seam(lane, first + done + i) : begins && done + i == 0;
            const uint64_t seam = is_seam ? Trailer::kSeam : 0;
            store_.seal(rows[i], store_.physical(lane, env, at), (first + done + i) | seam, term);
            if (++at == s.lane_capacity) at = 0;
          }
        }
        done += take;
      }
    }
  }

  void write_pages(uint64_t lane, uint64_t head, std::span<const uint8_t> row, uint64_t pages) {
    const StoreGeometry& s = store_.geometry();
    const uint32_t term = term_of(lane);
    const RowHead begin{sizeof(RowHead) + row.size()};
    size_t done = 0;
    for (uint64_t i = 0, slot = head % s.lane_capacity; i < pages; ++i, slot = slot + 1 == s.lane_capacity ? 0 : slot + 1) {
      const uint64_t at = store_.physical(lane, 0, slot), before = i ? 0 : sizeof begin;
      uint8_t* const page = store_.row(at);
      const size_t take = std::min<size_t>(row.size() - done, s.payload_bytes - before);
      if (before) std::memcpy(page, &begin, before);
      if (take) std::memcpy(page + before, row.data() + done, take);
      std::memset(page + before + take, 0, s.payload_bytes - before - take);
      if (store_.has_trailer()) store_.seal(page, at, (head + i) | (i ? 0 : Trailer::kSeam), term);
      done += take;
    }
  }

  Store& store_;
  std::vector<LeafCopy> copies_;
  const Observations::Divided* divided_ = nullptr;  // where observations are stored beside rows
  bool has_seams_ = false;  // the rows are restored: seams are those of the store
};

// ---- reading ----
// A reader's buffers, reused from call to call.
struct ReadScratch {
  std::vector<LaneView> views;
  std::vector<SlotSequences> sequences;
  std::vector<const uint8_t*> rows;
  std::vector<uint64_t> physical, slot, sequence, first;
  std::vector<uint32_t> lane, looked_at;
  std::vector<uint8_t> is_looked_at;
  std::vector<Observations::Target> observed;
  std::vector<uint8_t> from_tail;
};

// Looks up the rows of a batch of slots, copies them, and reports which of them were still stored after the copy.
class RowReader {
 public:
  RowReader(Store& store, ReadScratch& scratch)
      : store_(store), views_(scratch.views), sequences_(scratch.sequences), rows_(scratch.rows),
        physical_(scratch.physical), slot_(scratch.slot), first_(scratch.first), lane_(scratch.lane),
        looked_at_(scratch.looked_at), is_looked_at_(scratch.is_looked_at), observed_(scratch.observed),
        from_tail_(scratch.from_tail) {}

  // Looks up every slot. False: a slot lies outside the store, and nothing may be read.
  bool find(const int64_t* slots, size_t n) {
    if (store_.geometry().lanes > std::max<size_t>(n, 1)) {
      if (!locate(slots, n)) return false;
      choose_lanes();
#ifndef ENGRAM_PLANT_ROWS_BEFORE_PUBLISHED
      look();
#endif
      return true;
    }
#ifndef ENGRAM_PLANT_ROWS_BEFORE_PUBLISHED
    look();
#endif
    return locate(slots, n);
  }
  // Looks up which rows exist, before any is read. Limited to the lanes of the slots, if these are known and there are many
  // lanes.
  void look() {
    epoch_ = store_.lanes.epoch();
    if (in_some_lanes_) {
      for (uint32_t l : looked_at_) {
        views_[l] = store_.lanes.view(l);
        sequences_[l] = {views_[l], store_.geometry().lane_capacity};
      }
    } else {
      views_.clear(), sequences_.clear();
      for (uint64_t l = 0; l < store_.geometry().lanes; ++l) {
        views_.push_back(store_.lanes.view(l));
        sequences_.emplace_back(views_.back(), store_.geometry().lane_capacity);
      }
    }
#ifdef ENGRAM_PLANT_CLAIM_READ_EARLY
    read_claims_early();
#endif
  }
  // Whether the lookup happened during a change of all rows, such as a load.
  bool rows_are_being_replaced() const { return epoch_.incarnation % 2 == 1; }
  // The part of `find` after the lookup; the slots must outlive this reader's use of them.
  bool locate(const int64_t* slots, size_t n) {
    const StoreGeometry& s = store_.geometry();
    const uint64_t envs = s.envs, capacity = s.lane_capacity, lanes = s.lanes, all = store_.slots();
    rows_.resize(n);
    slots_ = slots, in_one_ring_ = envs == 1 && lanes == 1;
    if (in_one_ring_) {
      const uint8_t* const base = store_.row(0);
      const uint64_t stride = s.row_stride, room = store_.room();
      for (size_t i = 0; i < n; ++i) {
        const auto slot = static_cast<uint64_t>(slots[i]);
        if (slot >= room) return store_.grows() && locate_growing(n);
        rows_[i] = base + slot * stride;
      }
      return true;
    }
    physical_.resize(n), slot_.resize(n), lane_.resize(n);
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

  // Where slot i of the batch lies, and the sequence of the row that it held at the lookup; false: none.
  struct Place {
    uint64_t lane, env, slot;
  };
  Place place(size_t i) const {
    if (in_one_ring_) return {0, 0, static_cast<uint64_t>(slots_[i])};
    return {lane_[i], physical_[i] / store_.geometry().lane_capacity % store_.geometry().envs, slot_[i]};
  }
  bool find_row(size_t i, uint64_t& sequence) const {
    const Place at = place(i);
    return sequences_[at.lane].find(at.slot, sequence);
  }
  // Prefetches one of `parts` parts of the rows. Each part is spread over the whole batch: rows that lie next to each other in
  // a slice share pages, and prefetching them in turn waits for the address of each page. The target is the second-level cache,
  // because the first level can wait for fewer lines at a time; a few rows, which fit there, go into the first.
  void warm(size_t part, size_t parts) {
    const size_t n = rows_.size(), bytes = store_.geometry().row_stride;
    if (bytes > kPrefetchBytes || n * bytes > kWarmBytes) return;
    if (n * (bytes + 64) <= kNearBytes)
      for (size_t i = part; i < n; i += parts) prefetch_row<0, 3>(rows_[i], bytes);
    else
      for (size_t i = part; i < n; i += parts) prefetch_row<0, 2>(rows_[i], bytes);
    warm_ = true;
  }

  void copy(LeafCopy* leaves, size_t n_leaves, bool mapped_file) {
    const size_t n = rows_.size(), bytes = store_.geometry().row_stride;
    n_leaves = observe(leaves, n_leaves);
#ifdef ENGRAM_PLANT_ROWS_BEFORE_PUBLISHED
    gather_rows(rows_.data(), n, bytes, leaves, n_leaves);
    look();
    return;
#endif
#ifdef ENGRAM_PLANT_CLAIM_READ_EARLY
    read_claims_early();
#endif
    if (!mapped_file) {
      copy_observed(0, n);
      gather_rows(rows_.data(), n, bytes, leaves, n_leaves, warm_);
      return;
    }
    const size_t done = copy_first(leaves, n_leaves);
    copy_observed(done, n);
    gather_rows(rows_.data() + done, n - done, bytes, leaves, n_leaves);
  }
  // Copies the first rows of a mapped file, or all rows if their pages must be requested first. Returns how many, and advances
  // the leaves. Out of line: readers of memory, which never call it, are shorter so.
  [[gnu::noinline]] size_t copy_first(LeafCopy* leaves, size_t n_leaves) {
    const size_t n = rows_.size(), bytes = store_.geometry().row_stride;
    const auto copy_part = [&](size_t from, size_t to) {
      copy_observed(from, to);
      gather_rows(rows_.data() + from, to - from, bytes, leaves, n_leaves);
    };
    Readahead& pages = store_.readahead();
    size_t done = 0;
    if (!pages.on()) {
      done = std::min(n, Readahead::kProbeRows);
      const long before = Readahead::faults_of_this_thread();
      copy_part(0, done);
      pages.saw_faults(Readahead::faults_of_this_thread() - before);
      if (!pages.on()) return done;
    }
    for (size_t i = done; i < n; ++i) ask_for(i);
    const auto start = std::chrono::steady_clock::now();
    copy_part(done, n);
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start);
    if (n > done) pages.saw_batch(static_cast<uint64_t>(ns.count()), n - done);
    return n;
  }
  // Where observations are stored beside rows: notes where they go, in the memory of a whole batch. Returns how many of the leaves lie
  // in rows: the first ones.
  size_t observe(const LeafCopy* leaves, size_t n_leaves) {
    const Observations* const observations = store_.observations();
    if (!observations) return n_leaves;
    size_t in_row = 0;
    while (in_row < n_leaves && leaves[in_row].offset < store_.geometry().payload_bytes) ++in_row;
    observed_.clear(), from_tail_.assign(rows_.size(), 0), some_from_tails_ = false, some_absent_ = false;
    for (size_t k = in_row; k < n_leaves; ++k)
      if (const auto leaf = observations->leaf(leaves[k].offset, leaves[k].bytes))
        observed_.push_back({*leaf, leaves[k].array, leaves[k].stride});
    return in_row;
  }
  // Copies rows [from, to) only, into the memory of a whole batch. Several threads may each copy a part, after `observe`, which told
  // how many leaves lie in rows.
  void copy_rows(size_t from, size_t to, const LeafCopy* leaves, size_t n_leaves) {
    copy_observed(from, to);
    static thread_local std::vector<LeafCopy> part;
    part.assign(leaves, leaves + n_leaves);
    for (LeafCopy& leaf : part) leaf.array += static_cast<ptrdiff_t>(from) * leaf.stride;
    gather_rows(rows_.data() + from, to - from, store_.geometry().row_stride, part.data(), n_leaves);
  }
  // Copies the rows that are in the slots of these now.
  void copy_again(const std::vector<uint32_t>& rows, const LeafCopy* leaves, size_t n_leaves) {
    look();
    for (uint32_t i : rows) copy_rows(i, i + 1, leaves, n_leaves);
  }
  // After a copy whose rows are not whole: replaces overwritten rows in the batch by the rows that are in their slots now.
  // False: a slot holds no row, or rows are overwritten faster than they are copied.
  bool copy_newer(const LeafCopy* leaves, size_t n_leaves, int rounds) {
    ReadResult lost;
    settle(false, lost);
    for (; rounds > 0 && lost.unwritten.empty() && !lost.missing.empty(); --rounds) {
      copy_again(lost.missing, leaves, n_leaves);
      ReadResult now;
      settle(false, now);
      lost.unwritten = both(lost.missing, now.unwritten), lost.missing = both(lost.missing, now.missing);
    }
    return lost.unwritten.empty() && lost.missing.empty();
  }

  // After the copy: determines which rows existed from its start to its end.
  void settle(bool want_sequences, ReadResult& result) {
    settle_tails();
    const bool appended_only = look_again();
    if (want_sequences) result.sequences.resize(rows_.size());
    for (size_t i = 0; i < rows_.size(); ++i) {
      const uint64_t lane = in_one_ring_ ? 0 : lane_[i], slot = in_one_ring_ ? static_cast<uint64_t>(slots_[i]) : slot_[i];
      uint64_t sequence = 0;
      if (!sequences_[lane].find(slot, sequence))
        result.unwritten.push_back(static_cast<uint32_t>(i));
      else if (!appended_only || sequence < first_[lane])
        result.missing.push_back(static_cast<uint32_t>(i));
      if (want_sequences) result.sequences[i] = sequence;
    }
  }
  // After a copy of rows that existed at some moment since the lookup: whether all of them are whole.
  bool are_whole() {
    settle_tails();
    // `empty` came between the draw and the lookup: nothing was copied of observations that are stored once.
    bool overwritten = !look_again() || (!observed_.empty() && some_absent_);
    if (in_some_lanes_)
      for (uint32_t l : looked_at_) overwritten |= first_[l] != views_[l].first;
    else
      for (uint64_t l = 0; l < views_.size(); ++l) overwritten |= first_[l] != views_[l].first;
    if (!overwritten) return true;
    ReadResult result;
    settle(false, result);
    return result.missing.empty() && result.unwritten.empty();
  }

 private:
  // Requests the pages of a row, and of the observations that are copied with it.
  void ask_for(size_t i) const {
    const Readahead& pages = store_.readahead();
    const size_t bytes = store_.geometry().row_stride;
    pages.ask(store_.geometry().rows_offset + physical_row(i) * bytes, bytes);
    const Observations* const observations = store_.observations();
    uint64_t w = 0;
    if (!observations || observed_.empty() || observations->are_in_rows() || !find_row(i, w)) return;
    const Place at = place(i);
    observations->each_range(store_.lanes.protocol(at.lane), at.lane, at.env, w, published(at.lane), observed_,
                             [&](uint64_t offset, uint64_t n) { pages.ask(offset, n); });
  }
  // Where X lies in the rows: copies next.X of rows [from, to), of those that exist. It is mostly X of the row `ahead` rows later: that
  // one is copied for all of a block, and then those that are something else.
  template <bool kOneRing>
  void copy_next(size_t from, size_t to) {
    const Observations& observations = *store_.observations();
    const uint64_t capacity = store_.geometry().lane_capacity, step = observations.ahead() % capacity, stride = store_.geometry().row_stride;
    const auto ring_of = [&](size_t i) {
      const Place of = kOneRing ? Place{0, 0, 0} : place(i);
      return NextRing{observations.row_column(of.lane, of.env, published(of.lane)), sequences_[of.lane].without_oldest(observations.ahead())};
    };
    const NextRing one_ring = kOneRing && from < to ? ring_of(from) : NextRing{};
    const uint8_t* later[kBlockRows];
    for (size_t at = from, block = 0; at < to; at += block) {
      block = std::min(kBlockRows, to - at);
      uint32_t others = 0;  // a bit for each row whose next.X is not X of the later row
      for (size_t i = 0; i < block; ++i) {
        const NextRing& ring = kOneRing ? one_ring : ring_of(at + i);
        uint64_t slot = (kOneRing ? static_cast<uint64_t>(slots_[at + i]) : slot_[at + i]) + step;
        if (slot >= capacity) slot -= capacity;
        later[i] = ring.column.rows + slot * stride;
        __builtin_prefetch(later[i]);
        if (!ring.later.has(slot)) others |= uint32_t{1} << i;
      }
      for (size_t i = 0; i < block; ++i)
        if (!observations.is_next(later[i])) others |= uint32_t{1} << i;
      for (const Observations::Target& one : observed_) copy_frames(later, block, one, at);
      for (; others; others &= others - 1) {
        const size_t i = at + static_cast<size_t>(std::countr_zero(others));
        copy_other_next(i, kOneRing ? one_ring.column : ring_of(i).column);
      }
    }
  }
  static_assert(kBlockRows <= 32);
  struct NextRing {
    Observations::RowColumn column{};
    SlotSequences::Range later;  // of rows that tell where next.X of an earlier one is
  };
  void copy_frames(const uint8_t* const* rows, size_t n, const Observations::Target& to, size_t at) const {
    const size_t bytes = store_.observations()->geometry().keys[to.leaf.key].frame_bytes;
    LeafCopy leaf{store_.observations()->offsets_in_row()[to.leaf.key], bytes, to.array + static_cast<ptrdiff_t>(at) * to.stride, to.stride};
    gather_leaf(rows, n, leaf.offset + bytes, &leaf, 1);
  }
  // Zeros where there is no row, or a frame is being overwritten.
  [[gnu::noinline]] void copy_other_next(size_t i, const Observations::RowColumn& column) {
    const Observations& observations = *store_.observations();
    uint64_t sequence = 0;
    const bool is_there = find_row(i, sequence);
    bool is_newest = false;
    FramePlace next{};
    if (is_there) next = observations.find_next(store_.lanes.protocol(column.lane), column, sequence, is_newest), note_tail(i, is_newest);
    else some_absent_.store(true, std::memory_order_relaxed);
    for (const Observations::Target& one : observed_) {
      const uint8_t* const frame = is_there ? observations.next_frame(column, next, one.leaf.key) : nullptr;
      const size_t bytes = observations.geometry().keys[one.leaf.key].frame_bytes;
      uint8_t* const to = one.array + static_cast<ptrdiff_t>(i) * one.stride;
      if (frame) std::memcpy(to, frame, bytes);
      else std::memset(to, 0, bytes);
    }
  }
  // Copies the observations of rows [from, to), of those that exist.
  void copy_observed(size_t from, size_t to) {
    if (!store_.observations() || observed_.empty()) return;
    if (store_.observations()->are_in_rows()) return in_one_ring_ ? copy_next<true>(from, to) : copy_next<false>(from, to);
    const Observations& observations = *store_.observations();
    uint64_t w = 0, ahead = 0;
    bool is_stored = from < to && find_row(from, w);
    for (size_t i = from; i < to; ++i, w = ahead) {
      const bool was_stored = std::exchange(is_stored, i + 1 < to && find_row(i + 1, ahead));
      const Place at = place(i);
      if (is_stored) observations.prefetch(place(i + 1).lane, place(i + 1).env, ahead);
      if (was_stored)
        note_tail(i, observations.copy(store_.lanes.protocol(at.lane), at.lane, at.env, w, published(at.lane), observed_, i));
      else
        some_absent_.store(true, std::memory_order_relaxed);
    }
  }
  // Whether next.X of a row came from its tail.
  void note_tail(size_t i, bool from_tail) {
    from_tail_[i] = from_tail;
    if (from_tail) some_from_tails_.store(true, std::memory_order_relaxed);
  }
  // Of the lookup; of all rows, where `freeze` hides the newest ones: they tell where next.X of the others is.
  uint64_t published(uint64_t lane) const { return store_.lanes.is_frozen() ? store_.lanes.published_now(lane) : views_[lane].published; }
  // The newest rows took next.X from their tails, whose places later pieces take: by then the rows behind them tell where it is.
  void settle_tails() {
    if (!store_.observations() || observed_.empty() || !some_from_tails_) return;
    Lanes::Protocol::after_reading();
    for (size_t i = 0; i < from_tail_.size(); ++i)
      if (std::exchange(from_tail_[i], 0)) settle_tail(i);  // once: of a later look the slot may hold another row
  }
  void settle_tail(size_t i) {
    const Observations& observations = *store_.observations();
    const Place at = place(i);
    const uint64_t published = store_.lanes.published_now(at.lane);
    uint64_t w = 0;
    find_row(i, w);
    if (!observations.is_newest(w, published)) observations.copy(store_.lanes.protocol(at.lane), at.lane, at.env, w, published, observed_, i);
  }
  // Limits later lookups to the lanes of the located slots.
  void choose_lanes() {
    const uint64_t lanes = store_.geometry().lanes;
    in_some_lanes_ = true;
    views_.resize(lanes), sequences_.resize(lanes), first_.resize(lanes), is_looked_at_.resize(lanes);
    looked_at_.clear();
    for (uint32_t l : lane_)
      if (!std::exchange(is_looked_at_[l], 1)) looked_at_.push_back(l);
    for (uint32_t l : looked_at_) is_looked_at_[l] = 0;
  }
  // After the copy; false: more than appends happened since the lookup.
  bool look_again() {
    Lanes::Protocol::after_reading();
#ifdef ENGRAM_PLANT_CLAIM_READ_EARLY
    const Epoch now = plant_epoch_;
    first_ = plant_first_;
#else
    const Epoch now = store_.lanes.epoch();
    if (in_some_lanes_) {
      for (uint32_t l : looked_at_) first_[l] = store_.lanes.first_now(l);
    } else {
      first_.clear();
      for (uint64_t l = 0; l < views_.size(); ++l) first_.push_back(store_.lanes.first_now(l));
    }
#endif
    return epoch_ == now && epoch_.quiet();
  }
  // The numbers that both ascending lists contain.
  static std::vector<uint32_t> both(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
    std::vector<uint32_t> common;
    std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(common));
    return common;
  }
  // As `locate`, of rows that grow: a slot without memory holds no row, which `settle` says.
  bool locate_growing(size_t n) {
    for (size_t i = 0; i < n; ++i) {
      const auto slot = static_cast<uint64_t>(slots_[i]);
      if (slot >= store_.slots()) return false;
      rows_[i] = store_.row(slot < store_.room() ? slot : 0);
    }
    return true;
  }
  uint64_t physical_row(size_t i) const { return in_one_ring_ ? static_cast<uint64_t>(slots_[i]) : physical_[i]; }

  Store& store_;
  Epoch epoch_;
  const int64_t* slots_ = nullptr;
  bool in_one_ring_ = false;  // one lane and one environment: a slot is the row's position
  bool warm_ = false;
  bool in_some_lanes_ = false;  // only the lanes of the slots are looked up
  std::vector<LaneView>& views_;
  std::vector<SlotSequences>& sequences_;
  std::vector<const uint8_t*>& rows_;
  std::vector<uint64_t>&physical_, &slot_, &first_;
  std::vector<uint32_t>&lane_, &looked_at_;
  std::vector<uint8_t>& is_looked_at_;
  std::vector<Observations::Target>& observed_;
  std::atomic<bool> some_from_tails_{false}, some_absent_{false};  // threads copy parts of a batch
  std::vector<uint8_t>& from_tail_;  // of each row: whether next.X came from its tail, which was not looked at again
#ifdef ENGRAM_PLANT_CLAIM_READ_EARLY
  void read_claims_early() {
    plant_first_.clear();
    for (uint64_t l = 0; l < views_.size(); ++l) plant_first_.push_back(store_.lanes.first_now(l));
    plant_epoch_ = store_.lanes.epoch();
  }
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

// Assembles rows of a file in a small buffer and writes them with pwrite. Stores through the map would fault on every page and
// read or zero its old bytes first; writing whole pages needs neither. On Linux a file and its maps share their pages.
class RowRestorer {
 public:
  static constexpr size_t kPieceBytes = 1 << 20;  // fits in the cache until written; smaller writes cost the file system more

  explicit RowRestorer(Store& store) : store_(store), stride_(store.geometry().row_stride) {
    per_piece_ = std::max<uint64_t>(1, kPieceBytes / stride_);
    const uint64_t whole_pages = kPage / std::gcd(stride_, uint64_t{kPage});  // this many rows end at a page's end
    if (per_piece_ > whole_pages) per_piece_ -= per_piece_ % whole_pages;
    // Zeroed once: rows lie at the same places in each piece, and the gaps between them are never written. If there is no
    // memory for the buffer, rows are written through the map: a failure here would lose the rows from before the restore.
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
  std::unique_ptr<uint8_t[]> piece_;  // null: rows are written through the map
};

}  // namespace engram
