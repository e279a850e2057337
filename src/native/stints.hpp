// Appends of a process that moves from lane to lane: it waits for a lane, begins stints, and continues a batch in the next one.
// The orders are those of stint_protocol.hpp.
#pragma once
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "rows.hpp"

namespace engram {

// Every lane has been written to by other processes for as long as a writer waits.
struct LanesBusy : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// No lane of a queue has room: rows have to be handed out first.
struct QueueFull {
  uint64_t done;  // steps that were written before
};

// Whether writers of a store may not replace rows that were not handed out.
inline bool keeps_rows(const Lanes& lanes) {
  return (lanes.flow_mode() & (FlowMode::kQueue | FlowMode::kOverwrites)) == FlowMode::kQueue;
}

// How many rows of one append are in each lane: it replaces none of them before all that were there before it.
class RowsHere {
 public:
  uint64_t in(uint64_t lane) const {
    for (const auto& [number, rows] : lanes_)
      if (number == lane) return rows;
    return 0;
  }
  void add(uint64_t lane, uint64_t n) {
    for (auto& [number, rows] : lanes_)
      if (number == lane) return void(rows += n);
    lanes_.emplace_back(lane, n);
  }
  // Whether this lane has no other rows, but another one has.
  bool leaves(uint64_t lane, uint64_t lanes, uint64_t capacity) const {
    return in(lane) >= capacity && !are_all(lanes, capacity);
  }
  // Whether the store has no other rows.
  bool are_all(uint64_t lanes, uint64_t capacity) const {
    return lanes_.size() == lanes && std::all_of(lanes_.begin(), lanes_.end(), [&](const auto& l) { return l.second >= capacity; });
  }
  bool any() const { return !lanes_.empty(); }
  void forget() { lanes_.clear(); }
  // The other lanes are not to be had: it waited for them as long as it may, and does not do so again.
  bool waits() const { return waits_; }
  void stop_waiting() { waits_ = false, forget(); }

 private:
  bool waits_ = true;
  std::vector<std::pair<uint64_t, uint64_t>> lanes_;
};

// Of a dead writer's lane, whose turn this process has taken. Its rows are counted (S2), and a new term begins: rows that it left on
// the disk are not joined with those that follow.
inline void take_over_lane(Store& store, uint64_t lane, uint64_t dead) {
  LaneHeader& header = store.lanes.lane(lane);
  store.streams().settle(lane, dead, header.last_writer.load(std::memory_order_relaxed), header.published.load(std::memory_order_relaxed));
  header.term.fetch_add(1);
  if (store.lanes.removed_rows(lane)) store.lanes.recount_removed(lane);
  if (!store.has_trailer() || store.synced(0, store.geometry().rows_offset)) return;
  header.turn.store(dead, std::memory_order_release);  // the next one that takes it makes it good
  throw SyncFailed("the header");
}

// A process's turn in one lane of its store, for a part of an append. The caller keeps this process's other threads out.
class StintTurn {
 public:
  static constexpr int kLooks = 64;  // before it sleeps
  static constexpr double kPause = 5e-5, kLongestPause = 2e-3;

  // Waits for a lane; `pause(seconds)` lets other threads of this process run meanwhile. `here`: the earlier rows of the append.
  // `need`: time steps that are to be in this lane, behind one another: 1, or the pages of a row.
  // Throws LanesBusy; QueueFull, which says nothing of the append; and SyncFailed where a dead writer's lane cannot be taken over.
  template <class Pause>
  StintTurn(Store& store, RowsHere& here, Pause&& pause, uint64_t need = 1) : store_(store), here_(here), need_(need) {
    if (here_.are_all(store.lanes.count(), store.lanes.capacity())) here_.forget();
    if (take_own()) {
      note_start();
      return;
    }
    begins_ = true;
    const WriterLocks& locks = store.writer_locks();
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(locks.patience());
    for (int looks = 0; !take_another(locks);) {
      if (++looks <= kLooks) {
        ::sched_yield();
        continue;
      }
      if (here_.any() && !here_.waits()) here_.forget();
      if (std::chrono::steady_clock::now() > end) {
        if (!here_.any()) refuse(locks.patience());
        here_.stop_waiting();
      }
      pause(std::min(kLongestPause, kPause * (looks - kLooks)));
    }
    note_start();
  }
  ~StintTurn() {
    Store::Stint& stint = store_.stint();
    stint.position += published() - from_;
    record();  // S1
    if (here_.leaves(lane_, store_.lanes.count(), store_.lanes.capacity())) stints().set_end(0);
    if (stint.lane == lane_ && !stints().left()) {
      stint.border_agreed = BorderCheck(store_).look(lane_);  // of these rows, before they are another writer's
      if (stint.ticket_after) stints().set_ticket(stint.ticket_after);
      stint.lane = Store::Stint::kNone;
    }
    if (stint.keeps && stint.lane == lane_)
      store_.keep_turn(lane_);
    else
      store_.give_turn_back(lane_);
  }
  StintTurn(const StintTurn&) = delete;
  StintTurn& operator=(const StintTurn&) = delete;

  uint64_t lane() const { return lane_; }
  // Whether the next row begins a stint: `begin` is called before it.
  bool begins() const { return begins_; }
  Lanes::Stints stints() const { return store_.lanes.stints(lane_); }
  // How many rows can be appended in this turn.
  uint64_t room() const {
    const uint64_t steps = std::min(begins_ ? room_of_stint() : stints().left(), store_.lanes.capacity() - here_.in(lane_));
    return keeps_rows_ ? std::min(steps, store_.lanes.queue(lane_).room()) : steps;
  }
  void begin() {
    Store::Stint& stint = store_.stint();
    const uint64_t author = store_.author();
    LaneHeader& header = store_.lanes.lane(lane_);
    // What was found out about the rows of the writer before says nothing of this one's.
    header.border_agreed.store(stint.border_agreed, std::memory_order_relaxed);
    header.border_looked.store(header.published.load(std::memory_order_relaxed), std::memory_order_relaxed);
    const uint64_t ticket = store_.lanes.draw_ticket();
    stint.ticket_after = finishes_ ? OverdueStints::ticket_after(header.ticket.load(), ticket) : 0;
    record();  // S0
    stints().begin(author, author, stint.position, room_of_stint(), [&] { return ticket; });
    stint.lane = lane_, begins_ = false;
  }

 private:
  uint64_t room_of_stint() const { return stints().room(finishes_, need_, store_.lanes.longest()); }
  uint64_t published() const { return store_.lanes.lane(lane_).published.load(std::memory_order_relaxed); }
  void note_start() { from_ = published(); }
  void record() const {
    const Store::Stint& stint = store_.stint();
    if (stint.record) StreamRecord<StdMemory>(stint.record).write({stint.stream, store_.writer(), lane_, published(), stint.position});
  }
  bool take_own() {
    Store::Stint& stint = store_.stint();
    lane_ = stint.lane;
    if (lane_ == Store::Stint::kNone) return false;
    if (is_full(lane_)) {
      if (store_.keeps_turn(lane_)) throw QueueFull{0};
      stint.lane = Store::Stint::kNone;
      return false;
    }
    const auto own = stints();
    if (store_.keeps_turn(lane_) ? store_.kept_for(lane_, stint) : own.turns.take(store_.writer())) {
      if (own.goes_on(store_.author(), need_)) return true;
      if (own.goes_on(store_.author())) {  // a row is in one lane: the rest of the stint is left
        own.set_end(0);
        if (stint.ticket_after) own.set_ticket(stint.ticket_after);
      }
      store_.give_turn_back(lane_);
    }
    stint.lane = Store::Stint::kNone;
    return false;
  }
  bool take_another(const WriterLocks& locks) {
    const Lanes& lanes = store_.lanes;
    std::vector<uint64_t> alive;
    uint64_t most_here = 0;  // rows of this append in a lane that it takes
    bool has_room = !keeps_rows_;
    for (uint64_t l = 0; !has_room && l < lanes.count(); ++l) has_room = !is_full(l);
    if (!has_room) throw QueueFull{0};
    for (;;) {
      const LaneChoice choice = choose_lane<StdMemory>(
          lanes.count(), [&](uint64_t l) { return lanes.stints(l); },
          [&](uint64_t lane, uint64_t holder) {
            const bool is_kept = holder == store_.writer() && store_.keeps_turn(lane);
            return is_kept || is_full(lane) || here_.in(lane) > most_here || (holder && has(alive, holder));
          },
          lanes.longest());
      if (!choice.any()) {
        if (most_here > 0 || !here_.any()) return holder_ = alive.empty() ? 0 : alive.front(), false;
        most_here = lanes.capacity() - 1;
        continue;
      }
      if (choice.holder && choice.holder != store_.writer() && locks.is_alive(choice.holder)) {
        alive.push_back(choice.holder);
        continue;
      }
      lane_ = choice.lane;
      if (!take_chosen<StdMemory>(stints(), choice, store_.writer())) continue;
      finishes_ = choice.is_overdue && stints().left() >= need_;
      if (choice.holder) take_over_lane(store_, lane_, choice.holder);
      return true;
    }
  }
  static bool has(const std::vector<uint64_t>& some, uint64_t one) { return std::find(some.begin(), some.end(), one) != some.end(); }
  // Whether a queue does not let as many rows of a lane be replaced as are needed.
  bool is_full(uint64_t lane) const { return keeps_rows_ && store_.lanes.queue(lane).room() < need_; }
  [[noreturn]] void refuse(double seconds) const {
    const auto pid = holder_ & ((uint64_t{1} << kPidBits) - 1);
    char waited[32];
    std::snprintf(waited, sizeof waited, "%g", seconds);
    throw LanesBusy("each of the " + std::to_string(store_.lanes.count()) + " lanes of this store has been written to for " +
                    waited + " seconds, one of them by process " + std::to_string(pid) +
                    ": it was stopped, or waits for something. Let it go on or end it; or make the store with a larger lanes=n");
  }

  Store& store_;
  RowsHere& here_;
  const uint64_t need_;
  uint64_t lane_ = Store::Stint::kNone, holder_ = 0, from_ = 0;
  bool begins_ = false, finishes_ = false;
  const bool keeps_rows_ = keeps_rows(store_.lanes);
};

// The slots that the next n steps of this process go to, if no other process writes meanwhile: runs of (lane, sequence, steps).
// Where rows have any length they are the pages of one row.
struct LaneRun {
  uint64_t lane, first, steps;
};
inline std::vector<LaneRun> next_runs(const Store& store, uint64_t n) {
  const Lanes& lanes = store.lanes;
  const uint64_t capacity = lanes.capacity(), longest = lanes.longest(), need = lanes.is_ragged() ? n : 1;
  struct Place {
    uint64_t here, ticket, published, stored, capacity, steps_left, ticket_after;
    struct {
      static uint64_t holder() { return 0; }
    } turns;
    uint64_t left() const { return steps_left; }
    bool is_full(uint64_t longest) const { return stored + longest > capacity; }
  };
  struct Plain {
    static uint64_t load(uint64_t value) { return value; }
  };
  std::vector<LaneRun> runs;
  std::vector<Place> places;
  uint64_t tickets = lanes.header().tickets.load();
  for (uint64_t l = 0; l < lanes.count(); ++l) {
    const LaneHeader& h = lanes.lane(l);
    const uint64_t at = h.published.load(), base = h.base.load();
    places.push_back({0, h.ticket.load(), at, std::min(capacity, at - std::min(at, base)), capacity, lanes.stints(l).left(), 0, {}});
  }
  const Store::Stint& stint = store.stint();
  Place* own = nullptr;
  if (stint.lane < lanes.count() && lanes.stints(stint.lane).goes_on(store.author())) {
    own = &places[stint.lane];
    own->ticket_after = stint.ticket_after;
  }
  const auto are_all_here = [&] {
    return std::all_of(places.begin(), places.end(), [&](const Place& place) { return place.here == capacity; });
  };
  while (n > 0) {
    if (are_all_here())
      for (Place& place : places) place.here = 0;
    if (!own || own->steps_left < need) {
      if (own && own->ticket_after) own->ticket = own->ticket_after;
      if (own) own->steps_left = 0;
      const auto choose = [&](uint64_t most_here) {
        return choose_lane<Plain>(
            lanes.count(), [&](uint64_t l) { return places[l]; }, [&](uint64_t l, uint64_t) { return places[l].here > most_here; },
            longest);
      };
      LaneChoice choice = choose(0);
      if (!choice.any()) choice = choose(capacity - 1);
      own = &places[choice.lane];
      const bool finishes = choice.is_overdue && own->steps_left >= need;
      if (!finishes) own->steps_left = own->is_full(longest) ? capacity : capacity - own->stored;
      own->ticket_after = finishes ? OverdueStints::ticket_after(own->ticket, tickets + 1) : 0;
      own->ticket = ++tickets;
    }
    const uint64_t take = std::min({n, own->steps_left, capacity - own->here});
    runs.push_back({static_cast<uint64_t>(own - places.data()), own->published, take});
    own->steps_left -= take, own->here += take, own->published += take, own->stored = std::min(capacity, own->stored + take);
    if (own->here == capacity && !are_all_here()) own->steps_left = 0;
    n -= take;
  }
  return runs;
}

// How much of an append that fails was written before.
inline std::string written(uint64_t done, uint64_t n) {
  if (done == 0) return ". Nothing was written";
  return ". The first " + std::to_string(done) + " of " + std::to_string(n) + " steps were written";
}

// Appends steps over as many stints as they take. `slot_at(i, slot)` is told where step i comes to lie, before it is written.
// `looked_at`: as `RowWriter::append`.
template <class Pause, class SlotAt>
inline void append_in_stints(Store& store, const std::vector<LeafSource>& leaves, const std::vector<LeafSource>& looked_at, uint64_t n,
                             SlotAt&& slot_at, Pause&& pause) {
  const uint64_t capacity = store.lanes.capacity();
  RowWriter writer(store);
  RowsHere here;
  uint64_t done = 0;
  while (done < n) try {
    StintTurn turn(store, here, pause);
    const uint64_t lane = turn.lane(), take = std::min(n - done, turn.room());
    const bool begins_stint = turn.begins();
    if (take == 0) continue;  // of a queue, whose room another writer took
    writer.prepare(lane, take, leaves, done);  // may fail: before the stint and the rows
    const bool begins = begins_stint ? turn.stints().has_rows() : done == 0 && writer.begins(lane, n, looked_at);
    uint64_t slot = store.lanes.lane(lane).published.load(std::memory_order_relaxed) % capacity;
    for (uint64_t i = done; i < done + take; ++i) {
      slot_at(i, lane * capacity + slot);
      if (++slot == capacity) slot = 0;
    }
    if (begins_stint) turn.begin();
    writer.append_part(lane, done, take, begins, leaves);
    done += take;
    if (done < n) here.add(lane, take);
  } catch (const QueueFull&) {
    throw QueueFull{done};
  } catch (const LanesBusy& busy) {
    throw LanesBusy(busy.what() + written(done, n));
  } catch (const NoRoomForUnits& full) {
    throw NoRoomForUnits(full.what() + written(done, n));
  }
}

// Appends a row in one lane, and returns the slot of its head; `pages`: how many it takes.
template <class Pause>
inline uint64_t append_row_in_stint(Store& store, std::span<const uint8_t> row, uint64_t pages, Pause&& pause) {
  RowWriter writer(store);
  RowsHere here;
  try {
    for (;;) {
      StintTurn turn(store, here, pause, pages);
      if (turn.room() < pages) continue;  // of a queue, whose room another writer took
      const uint64_t lane = turn.lane();
      writer.prepare(lane, pages, {});  // may fail: before the stint and the row
      if (turn.begins()) turn.begin();
      return lane * store.lanes.capacity() + writer.append_row(lane, row, pages) % store.lanes.capacity();
    }
  } catch (const LanesBusy& busy) {
    throw LanesBusy(busy.what() + written(0, 1));
  }
}

// S3: makes this process the owner of a stream, and tells how many rows it has; whoever owned it has ended. `pause` as StintTurn.
template <class Pause>
inline Store::Stint adopt_stream(Store& store, uint64_t entry, Pause&& pause) {
  const Lanes& lanes = store.lanes;
  const WriterLocks& locks = store.writer_locks();
  const uint64_t me = store.writer();
  Store::Stint stint;
  stint.record = store.streams().record(entry);
  const StreamRecord<StdMemory> record(stint.record);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(locks.patience());
  for (;; pause(StintTurn::kPause)) {
    const uint64_t lane = record.read().lane;
    const bool has_lane = lane < lanes.count();
    bool keeps = false;  // this process has the turn for another stream
    if (has_lane) {
      const auto turns = lanes.turns(lane);
      const uint64_t holder = turns.holder();
      keeps = store.keeps_turn(lane);
      if (!keeps && ((holder && holder != me && locks.is_alive(holder)) || !turns.take(me, holder))) {
        if (std::chrono::steady_clock::now() > end)
          throw LanesBusy("lane " + std::to_string(lane) + " of this store has been written to by process " +
                          std::to_string(holder & ((uint64_t{1} << kPidBits) - 1)) + " for as long as a writer waits; nothing was changed");
        continue;
      }
      if (holder && !keeps) take_over_lane(store, lane, holder);
    }
    const StreamPlace place = record.read();
    if (place.lane == lane) {
      const LaneHeader* const header = has_lane ? &lanes.lane(lane) : nullptr;
      const uint64_t writer = header ? header->last_writer.load() : 0, published = header ? header->published.load() : 0;
      stint.stream = place.stream, stint.position = place.count(writer, published);
      record.write({place.stream, me, has_lane ? lane : StreamPlace::kNoLane, published, stint.position});
      if (has_lane && lanes.stints(lane).goes_on(stint.stream)) stint.lane = lane;
    }
    if (has_lane && !keeps) lanes.turns(lane).give_back();
    if (place.lane == lane) return stint;
  }
}

}  // namespace engram
