// Changing rows in place so that a kill cannot tear them, and finding what a power cut left.
#pragma once
#include <vector>

#include "rows.hpp"

namespace engram {

// In-place writes. The caller is alone with the store; readers in this process see an odd `edits` and look again.
class InPlaceWriter {
 public:
  explicit InPlaceWriter(Store& store) : store_(store) {}

  // Writes plan row i over slot slots[i]. Every slot holds a row (the caller has looked).
  void write(const int64_t* slots, size_t n, const std::vector<LeafSource>& leaves) {
    const Shape& s = store_.shape();
    const bool redo = s.redo_bytes > 0;
    const size_t batch = redo ? std::max<size_t>(1, (s.redo_bytes - sizeof(RedoHeader)) / (8 + s.row_stride)) : 1024;
    for (size_t done = 0; done < n; done += batch) {
      const size_t take = std::min(batch, n - done);
      stage(slots + done, take, leaves, done);
      Counter& edits = store_.header()->edits;
      edits.fetch_add(1, std::memory_order_acq_rel);  // odd
      std::atomic_thread_fence(std::memory_order_release);
      if (redo) mark(take);
      apply(staged_.data(), physical_.data(), take);
      log(slots + done, take);
      if (redo) redo_header()->state.store(0, std::memory_order_release);
      edits.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  bool interrupted() const {
    return store_.shape().redo_bytes > 0 && redo_header()->state.load(std::memory_order_acquire) == kRedoMarked;
  }

  // Finishes a change that a kill interrupted. True: there was one.
  bool finish_interrupted() {
    const Shape& s = store_.shape();
    bool found = false;
    if (interrupted()) {
      RedoHeader* h = redo_header();
      const uint64_t most = (s.redo_bytes - sizeof(RedoHeader)) / (8 + s.row_stride);
      if (h->rows <= most && h->row_stride == s.row_stride && h->crc == redo_crc(h->rows)) {
        const auto* physical = reinterpret_cast<const uint64_t*>(h + 1);
        bool inside = true;
        for (uint64_t i = 0; i < h->rows; ++i) inside &= physical[i] < store_.slots();
        if (inside) apply(reinterpret_cast<const uint8_t*>(physical + h->rows), physical, h->rows);
        store_.header()->log_head.store(h->log_head, std::memory_order_release);
        found = inside;
      }
      h->state.store(0, std::memory_order_release);
    }
    Counter& edits = store_.header()->edits;
    if (edits.load() % 2) edits.fetch_add(1);
    return found;
  }

 private:
  RedoHeader* redo_header() const { return reinterpret_cast<RedoHeader*>(store_.at(store_.shape().redo_offset)); }
  uint32_t redo_crc(uint64_t rows) const {
    RedoHeader* h = redo_header();
    return crc32c(crc32c(0, &h->rows, sizeof(RedoHeader) - 8), h + 1, rows * (8 + store_.shape().row_stride));
  }
  // The new rows, whole, with the trailers they will have.
  void stage(const int64_t* slots, size_t n, const std::vector<LeafSource>& leaves, size_t skip) {
    const Shape& s = store_.shape();
    staged_.assign(n * s.row_stride, 0), physical_.resize(n);
    std::vector<uint8_t*> rows(n);
    for (size_t i = 0; i < n; ++i) {
      const auto slot = static_cast<uint64_t>(slots[i]);
      uint64_t time = slot / s.strands, lane = time / s.lane_capacity;
      physical_[i] = store_.physical(lane, slot % s.strands, time % s.lane_capacity);
      rows[i] = staged_.data() + i * s.row_stride;
    }
    std::vector<LeafCopy> copies;
    for (const LeafSource& leaf : leaves)
      copies.push_back({leaf.offset, leaf.bytes,
                        const_cast<uint8_t*>(leaf.array) + static_cast<ptrdiff_t>(skip) * leaf.stride, leaf.stride});
    scatter_rows(rows.data(), n, copies.data(), copies.size());
    if (!store_.has_trailer()) return;
    for (size_t i = 0; i < n; ++i) {
      const Trailer old = *store_.trailer(store_.row(physical_[i]));
      store_.seal(rows[i], physical_[i], old.number, old.term);
    }
  }
  void mark(size_t n) {
    RedoHeader* h = redo_header();
    h->rows = n, h->row_stride = store_.shape().row_stride;
    h->log_head = store_.header()->log_head.load(std::memory_order_relaxed) + n;
    auto* physical = reinterpret_cast<uint64_t*>(h + 1);
    std::memcpy(physical, physical_.data(), 8 * n);
    std::memcpy(physical + n, staged_.data(), staged_.size());
    h->crc = redo_crc(n);
    h->state.store(kRedoMarked, std::memory_order_release);
  }
  void apply(const uint8_t* rows, const uint64_t* physical, size_t n) {
    const size_t stride = store_.shape().row_stride;
    for (size_t i = 0; i < n; ++i) std::memcpy(store_.row(physical[i]), rows + i * stride, stride);
  }
  void log(const int64_t* slots, size_t n) {
    Counter& head = store_.header()->log_head;
    auto* entries = reinterpret_cast<Counter*>(store_.at(store_.shape().log_offset));
    uint64_t at = head.load(std::memory_order_relaxed);
    for (size_t i = 0; i < n; ++i, ++at)
      entries[at % kLogEntries].store(static_cast<uint64_t>(slots[i]), std::memory_order_relaxed);
    head.store(at, std::memory_order_release);
  }

  Store& store_;
  std::vector<uint8_t> staged_;
  std::vector<uint64_t> physical_;
};

struct LaneScan {
  uint64_t base = 0, published = 0, dropped = 0, term = 0;
};

// What of a lane is whole after a power cut (docs/memory-model.md, "Power loss"). Reads every row of the lane.
inline LaneScan scan_lane(Store& store, uint64_t l) {
  const Shape& s = store.shape();
  const uint64_t capacity = s.lane_capacity;
  constexpr uint64_t kNone = ~uint64_t{0};
  std::vector<uint64_t> number(capacity, kNone);
  std::vector<uint32_t> term(capacity, 0);
  LaneScan found;
  uint64_t newest = kNone;
  for (uint64_t slot = 0; slot < capacity; ++slot) {
    const Trailer first = *store.trailer(store.row(store.physical(l, 0, slot)));
    bool whole = true;
    for (uint64_t strand = 0; strand < s.strands && whole; ++strand) {
      const uint64_t p = store.physical(l, strand, slot);
      const Trailer t = *store.trailer(store.row(p));
      whole = store.whole(p) && t.number == first.number && t.term == first.term;
    }
    if (!whole) continue;
    number[slot] = first.number, term[slot] = first.term;
    found.term = std::max<uint64_t>(found.term, first.term);
    if (newest == kNone || first.number > newest) newest = first.number;
  }
  const LaneHeader& h = store.lanes.lane(l);
  const uint64_t before = h.published.load(), first_before = store.lanes.view(l).first;
  const uint64_t base = h.base.load(), durable = h.durable.load();
  const uint64_t had = before > first_before ? before - first_before : 0;
  found.base = found.published = std::max(before, newest == kNone ? 0 : newest + 1);
  if (newest == kNone || newest < base) {  // rows from before an `empty` are not rows
    found.dropped = had;
    return found;
  }
  const uint64_t low = std::max(base, newest + 1 > capacity ? newest + 1 - capacity : 0);
  auto whole = [&](uint64_t w) { return number[w % capacity] == w; };
  // The block must not let terms fall: rows beyond the fall are left over from before a recovery.
  auto joined = [&](uint64_t w) { return whole(w) && whole(w + 1) && term[w % capacity] <= term[(w + 1) % capacity]; };
  uint64_t seed = newest;
  if (durable > low && durable - 1 <= newest && whole(durable - 1)) seed = durable - 1;
  uint64_t from = seed, to = seed;
  while (from > low && joined(from - 1)) --from;
  while (to < newest && joined(to)) ++to;
  found.base = from, found.published = to + 1;
  const uint64_t kept = to + 1 - from;
  found.dropped = had > kept ? had - kept : 0;
  return found;
}

// The block's lower end can be above `published - capacity`: claimed must not hide rows, nor show overwritten ones.
inline void restore_lane(Store& store, uint64_t l, const LaneScan& scan) {
  LaneHeader& h = store.lanes.lane(l);
  h.base.store(scan.base), h.claimed.store(scan.published), h.published.store(scan.published);
  h.durable.store(scan.published);
  h.term.store(std::max(h.term.load(), scan.term) + 1);
}

}  // namespace engram
