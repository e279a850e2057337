// Appends of a process that moves from lane to lane: it waits for a lane, begins stints, and continues a batch in the next one.
// The orders are those of stint_protocol.hpp.
#pragma once
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <tuple>
#include <vector>

#include "rows.hpp"

namespace engram {

// Every lane has been written to by other processes for as long as a writer waits.
struct LanesBusy : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A process's turn in one lane of its store, for a part of an append. The caller keeps this process's other threads out.
class StintTurn {
 public:
  static constexpr int kLooks = 64;  // before it sleeps
  static constexpr double kPause = 5e-5, kLongestPause = 2e-3;

  // Waits for a lane; `pause(seconds)` lets other threads of this process run meanwhile. `used`: lanes in which earlier rows of the
  // same batch are, which it does not replace before those of all other lanes. Throws LanesBusy, and SyncFailed where a dead
  // writer's lane cannot be taken over.
  template <class Pause>
  StintTurn(Store& store, std::vector<uint64_t>& used, Pause&& pause) : store_(store), used_(used) {
    if (take_own()) return;
    begins_ = true;
    const WriterLocks& locks = store.writer_locks();
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(locks.patience());
    for (int looks = 0; !take_another(locks);) {
      if (++looks <= kLooks) {
        ::sched_yield();
        continue;
      }
      if (std::chrono::steady_clock::now() > end) refuse(locks.patience());
      pause(std::min(kLongestPause, kPause * (looks - kLooks)));
    }
  }
  ~StintTurn() {
    Store::Stint& stint = store_.stint();
    if (stint.lane == lane_ && !stints().left()) {
      stint.border_agreed = BorderCheck(store_).look(lane_);  // of these rows, before they are another writer's
      stint.lane = Store::Stint::kNone;
    }
    store_.lanes.turns(lane_).give_back();
  }
  StintTurn(const StintTurn&) = delete;
  StintTurn& operator=(const StintTurn&) = delete;

  uint64_t lane() const { return lane_; }
  // Whether the next row begins a stint: `begin` is called before it.
  bool begins() const { return begins_; }
  Lanes::Stints stints() const { return store_.lanes.stints(lane_); }
  // How many rows can be appended in this turn.
  uint64_t room() const { return begins_ ? stints().room(finishes_) : stints().left(); }
  void begin() {
    Store::Stint& stint = store_.stint();
    const uint64_t writer = store_.writer();
    LaneHeader& header = store_.lanes.lane(lane_);
    // What was found out about the rows of the writer before says nothing of this one's.
    header.border_agreed.store(stint.border_agreed, std::memory_order_relaxed);
    header.border_looked.store(header.published.load(std::memory_order_relaxed), std::memory_order_relaxed);
    stints().begin(writer, writer, stint.position, finishes_, [&] { return store_.lanes.draw_ticket(); });
    stint.lane = lane_, begins_ = false;
  }

 private:
  bool take_own() {
    Store::Stint& stint = store_.stint();
    lane_ = stint.lane;
    if (lane_ == Store::Stint::kNone) return false;
    const auto own = stints();
    if (own.turns.take(store_.writer())) {
      if (own.goes_on(store_.writer())) return true;
      own.turns.give_back();
    }
    stint.lane = Store::Stint::kNone;
    return false;
  }
  bool take_another(const WriterLocks& locks) {
    const Lanes& lanes = store_.lanes;
    std::vector<uint64_t> alive;
    for (;;) {
      const LaneChoice choice = choose_lane<StdMemory>(
          lanes.count(), [&](uint64_t l) { return lanes.stints(l); },
          [&](uint64_t lane, uint64_t holder) { return has(used_, lane) || (holder && has(alive, holder)); });
      if (!choice.any()) {
        if (used_.empty()) return holder_ = alive.empty() ? 0 : alive.front(), false;
        used_.clear();
        continue;
      }
      if (choice.holder && choice.holder != store_.writer() && locks.is_alive(choice.holder)) {
        alive.push_back(choice.holder);
        continue;
      }
      lane_ = choice.lane, finishes_ = choice.is_overdue;
      if (!take_chosen<StdMemory>(stints(), choice, store_.writer())) continue;
      if (choice.holder) take_over(choice.holder);
      return true;
    }
  }
  static bool has(const std::vector<uint64_t>& some, uint64_t one) { return std::find(some.begin(), some.end(), one) != some.end(); }
  // A new term: rows that the dead writer left on the disk are not joined with those that follow.
  void take_over(uint64_t dead) {
    store_.lanes.lane(lane_).term.fetch_add(1);
    if (!store_.has_trailer() || store_.synced(0, store_.geometry().rows_offset)) return;
    store_.lanes.lane(lane_).turn.store(dead, std::memory_order_release);  // the next one that takes it makes it good
    throw SyncFailed("the header");
  }
  [[noreturn]] void refuse(double seconds) const {
    const auto pid = holder_ & ((uint64_t{1} << kPidBits) - 1);
    char waited[32];
    std::snprintf(waited, sizeof waited, "%g", seconds);
    throw LanesBusy("each of the " + std::to_string(store_.lanes.count()) + " lanes of this store has been written to for " +
                    waited + " seconds, one of them by process " + std::to_string(pid) +
                    ": it was stopped, or waits for something. Let it go on or end it; or make the store with a larger lanes=n");
  }

  Store& store_;
  std::vector<uint64_t>& used_;
  uint64_t lane_ = Store::Stint::kNone, holder_ = 0;
  bool begins_ = false, finishes_ = false;
};

// The slots that the next n steps of this process go to, if no other process writes meanwhile: runs of (lane, sequence, steps).
struct LaneRun {
  uint64_t lane, first, steps;
};
inline std::vector<LaneRun> next_runs(const Store& store, uint64_t n) {
  const Lanes& lanes = store.lanes;
  const uint64_t capacity = lanes.capacity();
  struct Place {
    bool is_used, is_full;
    uint64_t ticket, lane, published, stored, left;
  };
  std::vector<LaneRun> runs;
  std::vector<Place> places;
  uint64_t tickets = 0;
  for (uint64_t l = 0; l < lanes.count(); ++l) {
    const LaneHeader& h = lanes.lane(l);
    const uint64_t at = h.published.load(), base = h.base.load();
    const uint64_t stored = std::min(capacity, at - std::min(at, base));
    places.push_back({false, stored == capacity, h.ticket.load(), l, at, stored, lanes.stints(l).left()});
    tickets = std::max(tickets, places.back().ticket);
  }
  uint64_t own = store.stint().lane;
  if (own < lanes.count() && !lanes.stints(own).goes_on(store.writer())) own = Store::Stint::kNone;
  while (n > 0) {
    Place* next = own < lanes.count() ? &places[own] : nullptr;
    if (!next) {
      OverdueStints overdue;
      for (const Place& place : places) overdue.see(place.ticket, place.left);
      const auto is_overdue = [&](const Place& place) {
        return place.is_full && overdue.has(lanes.count(), place.ticket, place.left);
      };
      if (std::all_of(places.begin(), places.end(), [](const Place& place) { return place.is_used; }))
        for (Place& place : places) place.is_used = false;
      next = &*std::min_element(places.begin(), places.end(), [&](const Place& a, const Place& b) {
        return std::tuple(a.is_used, a.is_full, !is_overdue(a), a.ticket, a.lane) <
               std::tuple(b.is_used, b.is_full, !is_overdue(b), b.ticket, b.lane);
      });
      if (!is_overdue(*next)) next->left = next->is_full ? capacity : capacity - next->stored;
      next->ticket = ++tickets;
    }
    own = Store::Stint::kNone, next->is_used = true;
    const uint64_t take = std::min(n, next->left);
    next->left -= take;
    runs.push_back({next->lane, next->published, take});
    next->published += take, next->stored = std::min(capacity, next->stored + take), next->is_full = next->stored == capacity;
    n -= take;
  }
  return runs;
}

// Appends steps over as many stints as they take. `out`: the slot of each step; null: nobody asks. `index_leaf`: the leaf in
// which rows store their own slot, whatever the batch has there.
template <class Pause>
inline void append_in_stints(Store& store, const std::vector<LeafSource>& leaves, uint64_t n, std::optional<size_t> index_leaf,
                             int64_t* out, Pause&& pause) {
  std::vector<int64_t> index;
  std::vector<LeafSource> with_index;
  const std::vector<LeafSource>& sources = index_leaf ? with_index : leaves;
  size_t each = 0;
  if (index_leaf) {
    with_index = leaves;
    LeafSource& leaf = with_index[*index_leaf];
    each = leaf.bytes / 8;
    index.resize(n * each);
    leaf.array = reinterpret_cast<const uint8_t*>(index.data()), leaf.stride = static_cast<ptrdiff_t>(leaf.bytes), leaf.env_stride = 0;
  }
  const uint64_t capacity = store.lanes.capacity();
  RowWriter writer(store);
  std::vector<uint64_t> used;
  used.reserve(std::min(store.lanes.count(), n / capacity + 2));
  uint64_t done = 0;
  while (done < n) try {
    StintTurn turn(store, used, pause);
    const uint64_t lane = turn.lane(), take = std::min(n - done, turn.room());
    const bool begins_stint = turn.begins();
    writer.prepare(lane, take, sources, done);  // may fail: before the stint and the rows
    const bool begins = begins_stint ? turn.stints().has_rows() : done == 0 && writer.begins(lane, n, sources);
    uint64_t slot = store.lanes.lane(lane).published.load(std::memory_order_relaxed) % capacity;
    for (uint64_t i = done; i < done + take; ++i) {
      const auto at = static_cast<int64_t>(lane * capacity + slot);
      if (out) out[i] = at;
      std::fill_n(index.begin() + static_cast<ptrdiff_t>(i * each), each, at);
      if (++slot == capacity) slot = 0;
    }
    if (begins_stint) turn.begin();
    writer.append_part(lane, done, take, begins, sources);
    store.stint().position += take, done += take;
    if (done < n) used.push_back(lane);
  } catch (const LanesBusy& busy) {
    throw LanesBusy(busy.what() + (done ? ". The first " + std::to_string(done) + " of " + std::to_string(n) + " steps were written"
                                        : std::string(". Nothing was written")));
  }
}

}  // namespace engram
