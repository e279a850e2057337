// A store as a queue: which rows wait in all lanes, and the turn of who takes some of them. The orders are those of
// queue_protocol.hpp. What holds, whoever is killed when:
//
//   1. kept <= consumed <= published <= kept + capacity, where writers wait, until a `seek` below `kept`; `consumed` and `kept` fall
//      only there.
//   2. Each row is handed out at most once between two seeks. (tests/model/queue.cpp; tests/crash/test_queue_kills.py)
//   3. A consumer that is killed leaves its turn to the next one, and at most the batch that it had not handed out.
#pragma once
#include <nanobind/nanobind.h>

#include <ctime>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stints.hpp"

namespace engram {

namespace nb = nanobind;

// Raises engram.errors.QueueFullError: no room for all of n steps, of which the first `done` were written, to `slots`.
[[noreturn, gnu::noinline]] inline void raise_queue_full(uint64_t done, uint64_t n, const nb::object& slots) {
  const nb::object kind = nb::module_::import_("engram.errors").attr("QueueFullError");
  const nb::object error = kind(done, n, done ? slots : nb::none());
  PyErr_SetObject(kind.ptr(), error.ptr());
  throw nb::python_error();
}

class Queue {
 public:
  static constexpr uint64_t kWaitsShown = 5'000'000;  // ns after which a writer that waits has looked again

  explicit Queue(const Lanes& lanes) : lanes_(lanes), flow_(lanes.flow()) {}

  bool lets_go() const { return !(lanes_.flow_mode() & FlowMode::kCommits); }

  // ---- writers ----
  // Says that a writer waits, so that those that do not let it go first.
  void note_writer_waits() const { flow_.writer_waits.store(now(), std::memory_order_relaxed); }
  bool some_writer_waits() const { return is_now(flow_.writer_waits); }
  // Says that somebody waits for a batch, so that those who would wait for more room write what there is room for.
  void note_reader_waits() const { flow_.reader_waits.store(now(), std::memory_order_relaxed); }
  bool some_reader_waits() const { return is_now(flow_.reader_waits); }
  // The most time steps that a lane takes.
  uint64_t room() const {
    uint64_t most = 0;
    for (uint64_t l = 0; l < lanes_.count(); ++l) most = std::max(most, lanes_.queue(l).room());
    return most;
  }

  // Time steps for which there is room.
  uint64_t total_room() const {
    uint64_t n = 0;
    for (uint64_t l = 0; l < lanes_.count(); ++l) n += lanes_.queue(l).room();
    return n;
  }

  // ---- settings, by who has the store to itself or keeps others out that would change them ----
  void begin(bool overwrites, bool commits) const {
    const bool was_one = flow_.in_use.load(std::memory_order_relaxed) & kIsQueue;  // and somebody has ended it
    if (!lanes_.is_queue())
      for (uint64_t l = 0; l < lanes_.count(); ++l) lanes_.queue(l).begin(was_one);
    flow_.in_use.fetch_or(kIsQueue, std::memory_order_relaxed);
    flow_.mode.store(FlowMode::kQueue | (overwrites ? FlowMode::kOverwrites : 0) | (commits ? FlowMode::kCommits : 0),
                     std::memory_order_release);
  }
  void end() const {
    flow_.mode.store(0, std::memory_order_release);
    for (uint64_t l = 0; l < lanes_.count(); ++l) lanes_.queue(l).end();
  }

  // ---- consumers ----
  // Rows that wait, without those that were removed.
  uint64_t waiting() const {
    uint64_t n = 0;
    for (uint64_t l = 0; l < lanes_.count(); ++l) {
      const auto here = lanes_.queue(l).waiting();
      n += here.rows() - removed(l, here.from, here.end);
    }
    return n;
  }
  // Whether a consumer was killed between its two stores: writers wait for what it has handed out.
  bool lags() const {
    for (uint64_t l = 0; lets_go() && l < lanes_.count(); ++l)
      if (StdMemory::load(lanes_.queue(l).kept) != StdMemory::load(lanes_.queue(l).consumed)) return true;
    return false;
  }
  // Rows that were overwritten and would have come next; where writers wait there are none, unless something was lost.
  uint64_t missed() const {
    uint64_t n = 0;
    for (uint64_t l = 0; l < lanes_.count(); ++l) n += lanes_.queue(l).waiting().missed;
    return n;
  }
  // By who has the turn: the next n rows, or as many as there are, those of each lane in their order, and of each lane its share of
  // what waits there. `from`: of each lane the row from which on, where that is behind what was handed out.
  struct Chosen {
    std::vector<int64_t> slots, sequences;
    std::vector<uint64_t> next;    // of each lane, behind those
    std::vector<uint64_t> missed;  // of each lane, rows that were overwritten and would have come before those
  };
  Chosen choose(uint64_t n, const std::vector<uint64_t>& from) const {
    const uint64_t lanes = lanes_.count();
    Chosen chosen;
    std::vector<uint64_t> ends(lanes);
    uint64_t waiting = 0;
    for (uint64_t l = 0; l < lanes; ++l) {
      const auto here = lanes_.queue(l).waiting();
      chosen.next.push_back(l < from.size() ? std::max(here.from, from[l]) : here.from);
      chosen.missed.push_back(l >= from.size() ? here.missed : chosen.next[l] - from[l]);
      ends[l] = std::max(here.end, chosen.next[l]);
      waiting += ends[l] - chosen.next[l];
    }
    const uint64_t most = std::min(n, waiting);
    chosen.slots.reserve(most), chosen.sequences.reserve(most);
    while (chosen.slots.size() < n && waiting > 0) {  // once more where rows were removed
      uint64_t left = n - chosen.slots.size();
      for (uint64_t l = 0, rest = waiting; l < lanes && rest > 0; ++l) {
        const uint64_t here = ends[l] - chosen.next[l];
        const auto share = static_cast<uint64_t>((static_cast<unsigned __int128>(here) * left + rest - 1) / rest);
        const uint64_t taken = take(l, std::min(share, left), ends[l], chosen);
        left -= taken, rest -= here;
      }
      waiting = 0;
      for (uint64_t l = 0; l < lanes; ++l) waiting += ends[l] - chosen.next[l];
    }
    return chosen;
  }
  // By who has the turn: rows below `next`, one a lane, are handed out; or, where it `passes`, they are passed without that, and where
  // none before them waits to be let go, their places are free at once.
  void hand_out(const std::vector<uint64_t>& next, bool passes = false) const {
    const bool lets_go = this->lets_go();
    for (uint64_t l = 0; l < lanes_.count(); ++l) {
      const auto lane = lanes_.queue(l);
      const uint64_t had = StdMemory::load(lane.consumed), kept = StdMemory::load(lane.kept);
      const uint64_t to = std::clamp(next[l], had, std::max(had, lane.waiting().end));
      if (to > had || (lets_go && !passes && kept != had)) lane.hand_out(to, passes ? kept >= had : lets_go);
    }
  }
  // Whether the row of a lane that comes next was removed: nobody takes it, and it keeps its place until it is passed.
  bool removed_next() const {
    for (uint64_t l = 0; l < lanes_.count(); ++l) {
      const auto here = lanes_.queue(l).waiting();
      if (!here.missed && past_removed(l, here.from, here.end) > here.from) return true;
    }
    return false;
  }
  // By who has the turn: removed rows that come next are passed.
  void pass_removed() const {
    std::vector<uint64_t> next(lanes_.count());
    for (uint64_t l = 0; l < lanes_.count(); ++l) {
      const auto here = lanes_.queue(l).waiting();
      next[l] = here.missed ? here.from - here.missed : past_removed(l, here.from, here.end);
    }
    hand_out(next, true);
  }
  // Of a lane that was loaded, with the cursors of its save.
  void restore(uint64_t l, uint64_t consumed, uint64_t kept) const {
    const auto lane = lanes_.queue(l);
    const LaneView v = lane.rows.look();
    const uint64_t first = v.first * lanes_.envs(), end = v.published * lanes_.envs();
    const uint64_t to = std::clamp(consumed, first, std::max(first, end));
    StdMemory::store(lane.consumed, to), StdMemory::store(lane.kept, std::clamp(kept, first, to));
  }
  // By who has the turn: rows below `to` may be overwritten.
  void let_go(const std::vector<uint64_t>& to) const {
    for (uint64_t l = 0; l < lanes_.count(); ++l) lanes_.queue(l).let_go(to[l]);
  }
  // By who has the turn: the rows from `to` on come next, in a session that `owner` begins; returns how many of them are gone. Nothing
  // is changed where a lane does not reach that far.
  std::optional<uint64_t> seek(const std::vector<uint64_t>& to, uint64_t owner) const {
    for (uint64_t l = 0; l < lanes_.count(); ++l)
      if (to[l] > lanes_.queue(l).waiting().end) return std::nullopt;
    // First the session: of a `seek` that is killed in its middle those of the session before take nothing, as after a whole one.
    flow_.session_owner.store(owner);
    flow_.session.fetch_add(1);
    uint64_t replaced = 0, lost = 0;
    for (uint64_t l = 0; l < lanes_.count(); ++l) {
      const auto lane = lanes_.queue(l);
      const auto sought = lane.seek(to[l]);
      replaced += sought.replaced, lost += sought.lost;
      if (sought.replaced) lane.hand_out(lane.waiting().from, true);  // who seeks is told, once, and nobody else
    }
    count(replaced + lost, 0);
    return replaced;
  }
  // Rows that were handed out, and are kept until they are let go. Where writers overwrite, some of them may be gone.
  uint64_t kept_rows() const {
    uint64_t n = 0;
    for (uint64_t l = 0; l < lanes_.count(); ++l) {
      const auto lane = lanes_.queue(l);
      const uint64_t first = lane.rows.look().first * lanes_.envs(), consumed = StdMemory::load(lane.consumed);
      const uint64_t kept = std::max(StdMemory::load(lane.kept), first);
      n += consumed > kept ? consumed - kept : 0;
    }
    return n;
  }
  void count(uint64_t missed, uint64_t stale) const {
    if (missed) flow_.missed.fetch_add(missed, std::memory_order_relaxed);
    if (stale) flow_.stale.fetch_add(stale, std::memory_order_relaxed);
  }

 private:
  static bool is_now(const Counter& at) {
    const uint64_t then = at.load(std::memory_order_relaxed);
    return then && now() - then < kWaitsShown;
  }
  static uint64_t now() {
    timespec at{};
    ::clock_gettime(CLOCK_REALTIME, &at);
    return static_cast<uint64_t>(at.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(at.tv_nsec);
  }
  // The first row of a lane from `from` on that was not removed; `end`: there is none before it.
  uint64_t past_removed(uint64_t l, uint64_t from, uint64_t end) const {
    if (!lanes_.removals() || !lanes_.removed_rows(l)) return from;
    const auto bits = lanes_.removed(l);
    const uint64_t ring = lanes_.capacity() * lanes_.envs();
    while (from < end && bits.has(from % ring)) ++from;
    return from;
  }
  uint64_t removed(uint64_t l, uint64_t from, uint64_t end) const {
    if (!lanes_.removals() || !lanes_.removed_rows(l)) return 0;
    const auto bits = lanes_.removed(l);
    const uint64_t ring = lanes_.capacity() * lanes_.envs();
    uint64_t n = 0;
    for (uint64_t row = from; row < end; ++row) n += bits.has(row % ring);
    return n;
  }
  // Up to n rows of a lane that were not removed; returns how many.
  uint64_t take(uint64_t l, uint64_t n, uint64_t end, Chosen& chosen) const {
    const uint64_t envs = lanes_.envs(), ring = lanes_.capacity() * envs;
    const bool some_removed = lanes_.removals() && lanes_.removed_rows(l);
    const auto bits = lanes_.removed(l);
    uint64_t& row = chosen.next[l];
    uint64_t taken = 0;
    for (uint64_t at = row % ring; taken < n && row < end; ++row, at = at + 1 == ring ? 0 : at + 1) {
      if (some_removed && bits.has(at)) continue;
      chosen.slots.push_back(static_cast<int64_t>(l * ring + at));
      chosen.sequences.push_back(static_cast<int64_t>(envs == 1 ? row : row / envs));
      ++taken;
    }
    row = past_removed(l, row, end);  // so that nobody waits for these
    return taken;
  }

  const Lanes& lanes_;
  Flow& flow_;
};

// Whether n steps may be written to a lane of a queue, in its turn; with `lets_others_go` not while other writers wait.
[[gnu::noinline]] inline bool has_queue_room(const Lanes& lanes, uint64_t l, uint64_t n, bool lets_others_go) {
  if (!keeps_rows(lanes)) return true;
  return lanes.queue(l).room() >= n && !(lets_others_go && Queue(lanes).some_writer_waits());
}

}  // namespace engram
