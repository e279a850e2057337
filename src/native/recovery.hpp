// In-place changes that a kill cannot tear, and the search for the rows that survived a power cut.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "pages.hpp"

namespace engram {

// In-place writes. The caller has the store to itself; readers of this process see an odd `edits` and read again.
class InPlaceWriter {
 public:
  explicit InPlaceWriter(Store& store) : store_(store) {}

  // Writes plan row i (rows[i], where `rows` are given) over slot slots[i]. Every slot holds a row (checked by
  // the caller).
  // A power cut during the edit of a flushed row must not tear it, which would split the lane's block of whole rows. Such
  // edits sync twice: the redo area, then the rows.
  // `replaces`: they are other rows, and no changes of those that are there, which may have been removed. `of_slots`: leaves that
  // have something for each slot, whichever row that takes.
  void write(const int64_t* slots, size_t n, const std::vector<LeafSource>& leaves, const int64_t* rows = nullptr,
             bool replaces = false, const std::vector<LeafSource>& of_slots = {}) {
    prepare(slots, n, leaves.size() + of_slots.size());
    const StoreGeometry& s = store_.geometry();
    const bool redo = s.redo_bytes > 0;
    const size_t batch = batch_rows();
    for (size_t done = 0; done < n; done += batch) {
      const size_t take = std::min(batch, n - done);
      stage(slots + done, take, leaves, done, rows, of_slots);
      bool applied = true;
      Lanes::Protocol::edit(store_.header()->edits, [&] {
        std::vector<int64_t> removed;
        if (replaces) removed = removed_among(slots + done, take);
        if (redo) mark(take, !removed.empty());
        const bool sync = redo && store_.fd() >= 0 && any_durable(take);
        bool marked = !sync || store_.synced(s.redo_offset, s.redo_bytes);
        // Bits go before rows: neither a kill nor a power cut may leave one that hides the new row.
        if (marked) forget_removed(removed);
        if (marked && sync && !removed.empty() && !planted(25) && !store_.removed_synced()) {
          for (int64_t slot : removed) removed_of(slot).set(bit_of(slot));
          marked = false;
        }
        if (marked) {
          apply(staged_.data(), physical_.data(), take);
          log(slots + done, take, store_.header()->log_head.load(std::memory_order_relaxed));
        }
        applied = !sync || (marked && rows_synced(take));
        // Rows that may be torn on disk need the mark on disk: it stays until they are synced.
        if (redo && (applied || !marked)) redo_header()->state.store(0, std::memory_order_release);
      });
      if (!applied)
        throw SyncFailed(redo_header()->state.load() ? "changed rows, which the next change brings to the disk first"
                                                     : "a change of rows, which was not made");
    }
  }

  // Allocates all memory that `write` will need: a change is made whole or not at all.
  void prepare(const int64_t* slots, size_t n, size_t leaves) {
    const size_t rows = std::min(batch_rows(), n);
    staged_.reserve(rows * store_.geometry().row_stride);
    physical_.reserve(rows), rows_.reserve(rows), copies_.reserve(leaves);
    for (size_t i = 0; i < n && store_.saving(); ++i) preserve(*store_.saving(), static_cast<uint64_t>(slots[i]));
  }

  // Enters changes in the log, for rows that are kept elsewhere.
  void note(const int64_t* slots, size_t n, bool replaces) {
    if (replaces) forget_removed(removed_among(slots, n));
    log(slots, n, store_.header()->log_head.load(std::memory_order_relaxed));
  }
  std::vector<int64_t> removed_among(const int64_t* slots, size_t n) const {
    std::vector<int64_t> removed;
    for (size_t i = 0; store_.lanes.removals() && i < n; ++i)
      if (removed_of(slots[i]).has(bit_of(slots[i]))) removed.push_back(slots[i]);
    return removed;
  }
  void forget_removed(const std::vector<int64_t>& slots) const {
    for (int64_t slot : slots) removed_of(slot).clear(bit_of(slot), 1);
  }

  bool interrupted() const {
    return store_.geometry().redo_bytes > 0 && redo_header()->state.load(std::memory_order_acquire) == kRedoMarked;
  }

  // Finishes a change that a kill or a failing disk interrupted. True: there was such a change. Finishing counts as an edit,
  // because observers may read meanwhile, and after a power cut `edits` may be even, or may become visible later than the rows.
  bool finish_interrupted() {
    bool finished = false;
    Counter& edits = store_.header()->edits;
    bool on_disk = true;
    if (interrupted() || edits.load() % 2) Lanes::Protocol::edit(edits, [&] { finished = finish_marked(on_disk); });
    if (!on_disk) throw SyncFailed("rows");
    return finished;
  }

 private:
  uint64_t bit_of(int64_t slot) const { return static_cast<uint64_t>(slot) % (store_.lanes.capacity() * store_.lanes.envs()); }
  RemovedRows<StdMemory> removed_of(int64_t slot) const {
    return store_.lanes.removed(static_cast<uint64_t>(slot) / (store_.lanes.capacity() * store_.lanes.envs()));
  }
  RedoHeader* redo_header() const { return reinterpret_cast<RedoHeader*>(store_.at(store_.geometry().redo_offset)); }
  uint32_t redo_crc(const uint64_t* entry, uint64_t rows) const {
    const RedoHeader* h = redo_header();
    return crc32c(crc32c(0, &h->rows, sizeof(RedoHeader) - 8), entry, rows * (8 + store_.geometry().row_stride));
  }
  // If the disk does not take the rows, they are whole in memory, and the mark stays.
  bool finish_marked(bool& on_disk) {
    if (!interrupted()) return false;
    const StoreGeometry& s = store_.geometry();
    bool valid = false;
    RedoHeader* h = redo_header();
    const bool replaces = h->rows & kRedoReplaces;
    const uint64_t rows = h->rows & ~kRedoReplaces, most = (s.redo_bytes - sizeof(RedoHeader)) / (8 + s.row_stride);
    if (rows >= 1 && rows <= most && h->row_stride == s.row_stride) {
      // Copied, so that the checked bytes are the ones that are applied.
      std::vector<uint64_t> entry(rows * (8 + s.row_stride) / 8);
      std::memcpy(entry.data(), h + 1, entry.size() * 8);
      valid = h->crc == redo_crc(entry.data(), rows);
      for (uint64_t i = 0; i < rows; ++i) valid &= entry[i] < store_.slots();
      if (valid && !finish(entry, rows, h->log_head, replaces)) return on_disk = false, valid;
      // This changes flushed rows: if the mark were removed from the disk before the rows reached it, a power cut could tear
      // them.
      on_disk = !valid || store_.fd() < 0 || store_.synced(s.rows_offset, s.total_bytes - s.rows_offset);
      if (!on_disk) return valid;
    }
    h->state.store(0, std::memory_order_release);
    return valid;
  }
  // False: the disk did not take the bits of removed rows, and nothing was changed.
  bool finish(std::vector<uint64_t>& entry, uint64_t rows, uint64_t log_head, bool replaces) {
    const StoreGeometry& s = store_.geometry();
    auto* staged = reinterpret_cast<uint8_t*>(entry.data() + rows);
    std::vector<int64_t> slots, changed;
    std::vector<uint64_t> chosen;
    for (uint64_t i = 0; i < rows; ++i) {
      const uint64_t p = entry[i], env = p / s.lane_capacity % s.envs;
      const uint64_t time = p / (s.lane_capacity * s.envs) * s.lane_capacity + p % s.lane_capacity;
      slots.push_back(static_cast<int64_t>(time * s.envs + env));
      // After a power cut the entry may be older than the row; a newer row is kept.
      const Trailer mine = *reinterpret_cast<const Trailer*>(staged + (i + 1) * s.row_stride - sizeof(Trailer));
      if (store_.whole(p) && store_.trailer(store_.row(p))->sequence() > mine.sequence()) continue;
      chosen.push_back(i), changed.push_back(slots.back());
    }
    if (replaces && !planted(28)) {
      forget_removed(changed);
      if (store_.fd() >= 0 && !store_.removed_synced()) return false;
    }
    for (uint64_t i : chosen) apply(staged + i * s.row_stride, &entry[i], 1);
    // Only if these slots were not entered yet: other entries may follow them by now.
    if (store_.header()->log_head.load() < log_head) log(slots.data(), rows, log_head - rows);
    return true;
  }
  // The number of rows that are changed at a time.
  size_t batch_rows() const {
    const StoreGeometry& s = store_.geometry();
    const size_t fit = s.redo_bytes ? (s.redo_bytes - sizeof(RedoHeader)) / (8 + s.row_stride) : 1024;
    return std::min<size_t>(std::max<size_t>(1, fit), kLogBatch);
  }
  void preserve(CopyOnWriteSnapshot& snapshot, uint64_t slot) const {
    const uint64_t time = slot / store_.geometry().envs, capacity = store_.geometry().lane_capacity;
    snapshot.preserve(time / capacity, time % capacity, 1);
  }
  bool any_durable(size_t n) const {
    const StoreGeometry& s = store_.geometry();
    for (size_t i = 0; i < n; ++i) {
      const uint64_t lane = physical_[i] / (s.lane_capacity * s.envs);
      if (store_.trailer(store_.row(physical_[i]))->sequence() < store_.lanes.lane(lane).durable.load()) return true;
    }
    return false;
  }
  bool rows_synced(size_t n) const {
    const auto [low, high] = std::minmax_element(physical_.begin(), physical_.begin() + static_cast<ptrdiff_t>(n));
    const uint64_t stride = store_.geometry().row_stride;
    return store_.synced(store_.geometry().rows_offset + *low * stride, (*high - *low + 1) * stride);
  }
  // Builds the new rows with their trailers.
  void stage(const int64_t* slots, size_t n, const std::vector<LeafSource>& leaves, size_t skip,
             const int64_t* chosen, const std::vector<LeafSource>& of_slots) {
    const StoreGeometry& s = store_.geometry();
    staged_.resize(n * s.row_stride), physical_.resize(n);
    std::vector<uint8_t*>& rows = rows_;
    rows.resize(n);
    for (size_t i = 0; i < n; ++i) {
      const auto slot = static_cast<uint64_t>(slots[i]);
      uint64_t time = slot / s.envs, lane = time / s.lane_capacity;
      physical_[i] = store_.physical(lane, slot % s.envs, time % s.lane_capacity);
      rows[i] = staged_.data() + i * s.row_stride;
      const uint8_t* target = store_.row(physical_[i]);
      prefetch_rows<1>(&target, 1, s.row_stride);
    }
    for (size_t i = 0; i < n; ++i)  // bytes that no leaf of the batch covers keep their value
      std::memcpy(rows[i], store_.row(physical_[i]), s.row_stride);
    if (!chosen) scatter(rows.data(), n, leaves, skip);
    for (size_t i = 0; chosen && i < n; ++i) scatter(&rows[i], 1, leaves, static_cast<size_t>(chosen[skip + i]));
    if (!of_slots.empty()) scatter(rows.data(), n, of_slots, skip);
    if (!store_.has_trailer()) return;
    for (size_t i = 0; i < n; ++i) {
      const Trailer old = *store_.trailer(store_.row(physical_[i]));
      store_.seal(rows[i], physical_[i], old.sequence_and_seam, old.term);
    }
  }
  void scatter(uint8_t* const* rows, size_t n, const std::vector<LeafSource>& leaves, size_t first) {
    copies_.clear();
    for (const LeafSource& leaf : leaves)
      copies_.push_back({leaf.offset, leaf.bytes,
                         const_cast<uint8_t*>(leaf.array) + static_cast<ptrdiff_t>(first) * leaf.stride, leaf.stride});
    scatter_rows(rows, n, copies_.data(), copies_.size());
  }
  void mark(size_t n, bool replaces_removed) {
    RedoHeader* h = redo_header();
    h->rows = n | (replaces_removed ? kRedoReplaces : 0), h->row_stride = store_.geometry().row_stride;
    h->log_head = store_.header()->log_head.load(std::memory_order_relaxed) + n;
    auto* physical = reinterpret_cast<uint64_t*>(h + 1);
    std::memcpy(physical, physical_.data(), 8 * n);
    std::memcpy(physical + n, staged_.data(), staged_.size());
    h->crc = redo_crc(physical, n);
    h->state.store(kRedoMarked, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_release);  // the mark is written before any row changes
  }
  void apply(const uint8_t* rows, const uint64_t* physical, size_t n) {
    const size_t stride = store_.geometry().row_stride;
    for (size_t i = 0; i < n; ++i) std::memcpy(store_.row(physical[i]), rows + i * stride, stride);
  }
  void log(const int64_t* slots, size_t n, uint64_t at) {
    Counter& head = store_.header()->log_head;
    auto* entries = reinterpret_cast<Counter*>(store_.at(store_.geometry().log_offset));
    for (size_t i = 0; i < n; ++i, ++at)
      entries[at % kLogEntries].store(static_cast<uint64_t>(slots[i]), std::memory_order_relaxed);
    head.store(at, std::memory_order_release);
  }

  Store& store_;
  std::vector<uint8_t> staged_;
  std::vector<uint64_t> physical_;
  std::vector<uint8_t*> rows_;
  std::vector<LeafCopy> copies_;
};

// After a failed sync the kernel may regard pages as clean that never reached the disk: another sync would succeed without
// writing them. Marks the pages of the header and of every row in [durable, published[lane]) dirty again, unchanged. Throws
// where a row is lost, because its page was dropped from memory and read again from the disk.
class DirtyAgain {
 public:
  explicit DirtyAgain(Store& store) : store_(store) {}
  void run(const std::vector<uint64_t>& published) {
    const StoreGeometry& s = store_.geometry();
    for (uint64_t l = 0; l < s.lanes; ++l)
      for (uint64_t env = 0; env < s.envs; ++env) rows(l, env, published[l]);
    touch(store_.at(0), s.rows_offset);
    if (!store_.observations()) return;
    const auto [begin, bytes] = store_.observations()->rest();
    touch(begin, bytes);
  }

 private:
  void rows(uint64_t l, uint64_t env, uint64_t published) {
    const StoreGeometry& s = store_.geometry();
    const uint64_t first = std::max(store_.lanes.view(l).first, store_.lanes.lane(l).durable.load());
    for (uint64_t w = first; w < published; ++w) {
      const uint64_t p = store_.physical(l, env, w % s.lane_capacity);
      if (store_.has_trailer() && !store_.has_whole_row(l, env, w)) {
        if (w < store_.lanes.view(l).first) continue;  // its writer is overwriting it
        throw std::runtime_error("row " + std::to_string(w) + " of lane " + std::to_string(l) +
                                 " is lost: the disk failed, and did not keep it");
      }
      touch(store_.row(p), s.row_stride);
      if (store_.observations()) store_.observations()->each_part(l, env, w, [&](uint8_t* begin, uint64_t bytes) { touch(begin, bytes); });
    }
  }
  void touch(uint8_t* begin, uint64_t bytes) {
    const auto from = reinterpret_cast<uintptr_t>(begin), to = from + bytes;
    for (uintptr_t page = from / kPage * kPage; page < to; page += kPage) {
      if (page == last_) continue;
      last_ = page;
      // Another process may be writing here: exchanging a value for itself overwrites nothing.
      auto* word = reinterpret_cast<uint64_t*>(page);
      uint64_t value = __atomic_load_n(word, __ATOMIC_RELAXED);
      while (!__atomic_compare_exchange_n(word, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    }
  }
  Store& store_;
  uintptr_t last_ = 0;
};

// Compares rows [start, stop) of a lane with their checksums, beside a writer: `checked` counts the rows of all
// environments that still exist after they were read, `damaged` are sequence and environment of those that differ.
struct RowCheck {
  uint64_t checked = 0;
  std::vector<std::pair<uint64_t, uint64_t>> damaged;
};
// Whether next.X of row w is whole, where it is told by no later row. One that is overwritten meanwhile is told by a later row by now.
inline bool has_next(const Store& store, uint64_t l, uint64_t env, uint64_t w) {
  const Observations* const observations = store.observations();
  if (!observations || w + observations->ahead() < store.lanes.published_now(l)) return true;
  const uint64_t p = store.physical(l, env, w % store.geometry().lane_capacity);
  if (observations->has_tail_in_place(l, env, w, store.trailer(store.row(p))->term)) return true;
  Lanes::Protocol::after_reading();
  return !observations->is_newest(w, store.lanes.published_now(l));
}
inline RowCheck check_rows(const Store& store, uint64_t l, uint64_t start, uint64_t stop) {
  const StoreGeometry& s = store.geometry();
  const LaneView v = store.lanes.view(l);
  start = std::max(start, v.first), stop = std::min(stop, v.published);
  RowCheck result;
  for (uint64_t env = 0; env < s.envs; ++env)
    for (uint64_t w = start; w < stop; ++w) {
      const Observations* const observations = store.observations();
      const bool is_whole = store.has_whole_row(l, env, w) && (!observations || observations->has_x(l, env, w));
      if (!is_whole || !has_next(store, l, env, w)) result.damaged.emplace_back(w, env);
    }
  Lanes::Protocol::after_reading();
  const uint64_t first = store.lanes.first_now(l);
  std::erase_if(result.damaged, [&](const auto& row) { return row.first < first; });  // its writer is overwriting it
  start = std::max(start, first);
  result.checked = stop > start ? (stop - start) * s.envs : 0;
  return result;
}

struct LaneScan {
  uint64_t base = 0, published = 0, dropped = 0, term = 0;
  std::vector<uint64_t> seams;
  std::vector<uint32_t> newest_terms;  // of the newest rows, whose tails are to be there, the oldest first
};

// Finds the whole rows of a lane after a power cut (docs/memory-model.md, "Power loss"). Reads every row of the lane.
inline LaneScan scan_lane(Store& store, uint64_t l) {
  const StoreGeometry& s = store.geometry();
  const uint64_t capacity = s.lane_capacity;
  const Observations* const observations = store.observations();
  constexpr uint64_t kNone = ~uint64_t{0};
  std::vector<uint64_t> sequence(capacity, kNone);
  std::vector<uint32_t> term(capacity, 0);
  std::vector<bool> seam(capacity, false);
  LaneScan scan;
  uint64_t newest = kNone;  // of the highest term: rows of lower terms may be left over from before a recovery
  for (uint64_t slot = 0; slot < capacity; ++slot) {
    const Trailer first = *store.trailer(store.row(store.physical(l, 0, slot)));
    bool whole = true;
    for (uint64_t env = 0; env < s.envs && whole; ++env) {
      const uint64_t p = store.physical(l, env, slot);
      const Trailer t = *store.trailer(store.row(p));
      whole = store.whole(p) && t.sequence_and_seam == first.sequence_and_seam && t.term == first.term;
      whole = whole && (!observations || observations->is_whole(l, env, first.sequence(), first.term));
    }
    if (!whole) continue;
    sequence[slot] = first.sequence(), term[slot] = first.term, seam[slot] = first.seam();
    if (newest == kNone || std::pair(uint64_t{first.term}, first.sequence()) > std::pair(scan.term, newest))
      scan.term = first.term, newest = first.sequence();
  }
  const LaneHeader& h = store.lanes.lane(l);
  const uint64_t before = h.published.load(), first_before = store.lanes.view(l).first;
  const uint64_t base = h.base.load(), durable = h.durable.load();
  const uint64_t had = before > first_before ? before - first_before : 0;
  scan.base = scan.published = std::max({before, base, newest == kNone ? 0 : newest + 1});
  if (newest == kNone || newest < base) {  // rows from before an `empty` do not count
    scan.dropped = had;
    return scan;
  }
  const uint64_t low = std::max(base, newest + 1 > capacity ? newest + 1 - capacity : 0);
  auto whole = [&](uint64_t w) { return sequence[w % capacity] == w; };
  // Terms must not decrease within the block: rows after a decrease are left over from before a recovery.
  // Of observations the next row also names the term of the one that it was written behind: without it a row that a recovery dropped
  // would stand before rows that were written after another one.
  auto in_all = [&](auto&& holds) {
    bool all = true;
    for (uint64_t env = 0; all && observations && env < s.envs; ++env) all = holds(env);
    return all;
  };
  // Of rows of any length pages of one that was never finished may stand before those of the rows that replaced it. A row is of one
  // term, and the next one begins behind as many pages as its head says, where that is still there.
  const bool is_ragged = store.lanes.is_ragged();
  auto pages_of = [&](uint64_t head) { return pages_for(s, bytes_in_row(s, store.row(store.physical(l, 0, head % capacity)))); };
  auto is_torn = [&](uint64_t w) {
    if (!is_ragged || planted(30)) return false;
    uint64_t head = w;
    auto is_one = [&](uint64_t behind) { return term[(behind - 1) % capacity] == term[behind % capacity] && !seam[behind % capacity]; };
    if (!seam[(w + 1) % capacity]) return !is_one(w + 1);
    while (head > low && whole(head - 1) && is_one(head)) --head;
    return seam[head % capacity] && head + pages_of(head) != w + 1;
  };
  auto joined = [&](uint64_t w) {
    return whole(w) && whole(w + 1) && (planted(19) || term[w % capacity] <= term[(w + 1) % capacity]) && !is_torn(w) &&
           in_all([&](uint64_t env) { return observations->is_linked(l, env, w, term[w % capacity]); });
  };
  const uint64_t ahead = observations ? observations->ahead() : 0;
  // Whether row w + `ahead` was written with this row there.
  auto told = [&](uint64_t w) { return in_all([&](uint64_t env) { return observations->is_told(l, env, w, term[w % capacity]); }); };
  uint64_t seed = newest;
  if (durable > low && durable - 1 <= newest && whole(durable - 1)) seed = durable - 1;
  uint64_t from = seed, to = seed;
  while (from > low && joined(from - 1) && (from - 1 + ahead > seed || told(from - 1))) --from;
  while (to < newest && joined(to) && (to + 1 < from + ahead || told(to + 1 - ahead))) ++to;
  while (from < to && !in_all([&](uint64_t env) { return observations->has_x(l, env, from); })) ++from;
  bool is_left = in_all([&](uint64_t env) { return observations->has_x(l, env, from); });
  // The newest rows need their tails; those of rows before them can be made from the rows that are dropped.
  const uint64_t end = to;
  auto has_next = [&](uint64_t w) {
    return w + ahead <= end || in_all([&](uint64_t env) { return observations->has_tail(l, env, w, term[w % capacity]); });
  };
  auto has_tails = [&](uint64_t at) {
    if (planted(18)) return true;
    for (uint64_t w = at; ahead > 0 && w + ahead > at && w + 1 > from; --w)
      if (!has_next(w)) return false;
    return true;
  };
  while (is_left && !has_tails(to)) {
    if (to == from) is_left = false;
    else --to;
  }
  // The newest row of any length, if its last pages are not there; pages behind its last one are those of no row.
  for (uint64_t head = to; is_ragged && is_left && !planted(29); --head) {
    if (seam[head % capacity]) {
      const uint64_t pages = pages_of(head);
      if (pages > 0 && pages <= to + 1 - head) to = head + pages - 1;
      else if (head == from) is_left = false;
      else to = head - 1;
      break;
    }
    if (head == from) break;
  }
  if (!is_left) {
    scan.dropped = had;
    return scan;
  }
  // The rows of a queue that were flushed may all have been replaced since by rows that were not, but for some that nobody wants any
  // more. The numbers of the others are given to no rows: the position of a model names them.
  if (store.lanes.is_queue() && to + 1 < durable) {
    scan.dropped = had;
    return scan;
  }
  for (uint64_t w = to + 1 - std::min({ahead, to + 1 - from, to + 1}); ahead > 0 && w <= to; ++w) scan.newest_terms.push_back(term[w % capacity]);
  scan.base = from, scan.published = to + 1;
  // A new term means a new writer. Other seams are in the rows' trailers; that of the oldest one tells only where a row of any length
  // begins.
  if (is_ragged && seam[from % capacity]) scan.seams.push_back(from);
  for (uint64_t w = from + 1; w <= to; ++w)
    if (seam[w % capacity] || term[w % capacity] != term[(w - 1) % capacity]) scan.seams.push_back(w);
  const uint64_t rows = to + 1 - from;
  scan.dropped = had > rows ? had - rows : 0;
  return scan;
}

// After a power cut a bit may be that of a row before the one that is in its slot, which was not flushed, or of one behind it, which
// is lost. Rows that were flushed, and whose slot the header on the disk gives to no later row, have the bits that were set: that
// header was on the disk before a bit of a later row was (`Store::sync_before_removing`). The bits of all others are cleared.
// Returns whether there were some.
inline bool forget_doubtful_removals(Store& store, uint64_t l, const LaneScan& scan) {
  if (!store.lanes.has_flow()) return false;
  const LaneHeader& h = store.lanes.lane(l);
  const uint64_t capacity = store.lanes.capacity(), claimed = h.claimed.load();
  uint64_t from = std::max(scan.base, claimed > capacity ? claimed - capacity : 0), to = std::min(h.durable.load(), scan.published);
  if (planted(22)) from = scan.base;
  if (planted(23)) to = scan.published;
  const Lanes::Protocol lane = store.lanes.with_removed(l);
  const uint64_t before = lane.removed.bits_set();  // whatever the count says
  for (uint64_t w = scan.base; before && w < scan.base + capacity; ++w)
    if (w < from || w >= to) lane.clear_removed(w, 1);
  store.lanes.recount_removed(l);
  return lane.removed.bits_set() != before;
}

// A kill in here does no harm: the next `open` scans again and finds the same block.
inline void restore_lane(Store& store, uint64_t l, const LaneScan& scan) {
  LaneHeader& h = store.lanes.lane(l);
  for (uint64_t env = 0; store.observations() && env < store.geometry().envs; ++env) {
    const uint64_t first = scan.published - scan.newest_terms.size();
    store.observations()->keep_tails(store.lanes.protocol(l), l, env, first, scan.newest_terms);
    store.observations()->forget_records_below(l, env, scan.base);
  }
  store.set_seams(l, scan.base, scan.published, scan.seams.size(), [&](uint64_t i) { return scan.seams[i]; });
  h.claimed.store(scan.published), h.published.store(scan.published);
  h.base.store(scan.base);
  h.durable.store(scan.published);
  h.border_looked.store(0);  // the sequences of dropped rows are used again
  store.lanes.forget_stints(l);  // whose words may be older or newer than the rows
  h.term.store(std::max(h.term.load(), scan.term) + 1);
}

// Finds the rows that survived a power cut, and shows them; returns how many time steps are lost.
inline uint64_t recover(Store& store) {
  if (store.observations()) store.observations()->forget_missing_segments();
  store.header()->incarnation.fetch_add(2);  // by 2: an odd one would make a kill empty the store
  std::vector<LaneScan> scans;
  bool cleared = false;
  for (uint64_t l = 0; l < store.geometry().lanes; ++l) {
    scans.push_back(scan_lane(store, l));
    cleared |= forget_doubtful_removals(store, l, scans.back());
  }
  // Before the counters change by which a second recovery would take these bits for those of the rows in their slots.
  if (cleared && !planted(26) && store.fd() >= 0 && ::fsync(store.fd()) != 0) throw SyncFailed("which rows were removed");
  uint64_t dropped = 0;
  for (uint64_t l = 0; l < store.geometry().lanes; ++l) {
    restore_lane(store, l, scans[l]), dropped += scans[l].dropped;
    store.lanes.limit_cursors(l);
  }
  store.lanes.forget_consumers();
  store.lanes.count_anew();  // the page of the counts may be older or newer than the rows
  return dropped;
}

}  // namespace engram
