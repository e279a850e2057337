// The protocol of stints: writers move from lane to lane, so that all lanes of a store together are one ring, whoever writes.
// A *stint* is a writer's stay in a lane, until it has filled it once. What it appends it appends by `LaneProtocol`, in turns
// by `TurnProtocol`. docs/memory-model.md explains each step; the model (tests/model) runs this very code.
#pragma once
#include <algorithm>
#include <cstdint>

#include "lane_protocol.hpp"

namespace engram {

// Rows of a lane from `start` on are those of `stream`, from its row number `position` on, until the next extent starts. A
// stream is what one writer appends, in whatever lanes.
struct Extent {
  uint64_t start = 0, stream = 0, position = 0;
};

// One lane. `ExtentMemory` is `Memory`, but for the model, which takes an order away from one of the two.
template <class Memory, class ExtentMemory = Memory>
struct StintProtocol {
  using Word = typename Memory::Word;
  static constexpr uint64_t kExtentWords = 3;

  LaneProtocol<Memory> rows;
  TurnProtocol<Memory> turns;
  Word& ticket;                         // rises with each stint of the store; 0: there was none in this lane
  Word& until;                          // the stint ends when `published` is here
  LaneProtocol<ExtentMemory> extents;   // the last stints, a ring of its own, without seams
  Word* records;                        // kExtentWords of each extent; null: this store keeps none

  bool has_rows() const { return stored() > 0; }
  // Whether a lane has no room for the longest row that may come. (If only this row had to fit, the rest of a lane would get short
  // stints of short rows, each with a new ticket, and its old rows would look new.)
  bool is_full(uint64_t longest = 1) const { return stored() + longest > rows.capacity; }
  // How many rows the stint may still append.
  uint64_t left() const {
    const uint64_t at = Memory::load(rows.published), end = Memory::load(until);
    return end > at ? end - at : 0;
  }

  // ---- the writer that has the turn ----
  // Whether its stint goes on: no other writer began one here since, and it has room for what is needed at once.
  bool goes_on(uint64_t writer, uint64_t need = 1) const { return turns.continues(writer) && left() >= need; }
  // How many rows a stint that begins now may append. `finishes`: the one before was overdue, and this one replaces the rows
  // that it has left, if these are as many as are needed.
  uint64_t room(bool finishes, uint64_t need = 1, uint64_t longest = 1) const {
    if (const uint64_t rest = finishes ? left() : 0; rest >= need) return rest;
    return is_full(longest) ? rows.capacity : rows.capacity - stored();
  }
  // Begins a stint of so many rows. A kill in between leaves the turn to a dead writer: who takes that over begins a stint of its own.
  template <class DrawTicket>
  void begin(uint64_t writer, uint64_t stream, uint64_t position, uint64_t n, DrawTicket&& draw_ticket) const {
    set_end(n);
    set_ticket(draw_ticket());
    record(Memory::load(rows.published), stream, position);
    turns.begin_rows(writer);  // L4
  }
  void set_end(uint64_t n) const { Memory::store(until, Memory::load(rows.published) + n); }  // L1
  void set_ticket(uint64_t drawn) const { Memory::store(ticket, drawn); }  // L2
  void record(uint64_t start, uint64_t stream, uint64_t position) const {
    if (!records) return;
    extents.append(1, false, [&](uint64_t number) {  // L3: X1 to X4, as A1 to A4
      Word* const words = words_of(number);
      Memory::store(words[0], start), Memory::store(words[1], stream), Memory::store(words[2], position);
    });
  }

  // ---- readers: `look_at_extents` after `rows.look`, then `extent`, `after_reading`, `first_extent_now` ----
  // Of row w tells the newest extent that is believed and starts at or below w; none: its stream is not known any more.
  LaneView look_at_extents() const { return extents.look(); }
  Extent extent(uint64_t number) const {
    const Word* const words = words_of(number);
    return {Memory::load(words[0]), Memory::load(words[1]), Memory::load(words[2])};
  }
  uint64_t first_extent_now() const { return extents.first_now(); }

 private:
  uint64_t stored() const {
    const uint64_t at = Memory::load(rows.published), base = Memory::load(rows.base);
    return at > base ? at - base : 0;
  }
  Word* words_of(uint64_t number) const { return records + number % extents.capacity * kExtentWords; }
};

// A lane for the next stint.
struct LaneChoice {
  static constexpr uint64_t kNone = ~uint64_t{0};
  uint64_t lane = kNone, holder = 0, ticket = 0;
  bool is_full = true, is_overdue = false;
  bool any() const { return lane != kNone; }
  bool comes_before(const LaneChoice& other) const {
    if (is_full != other.is_full) return other.is_full;
    if (is_overdue != other.is_overdue) return is_overdue;
    return ticket < other.ticket;
  }
};

// Stints that last too long: of writers that are slow, or pause, or died. The rows that such a stint would still replace are the
// oldest of all lanes.
struct OverdueStints {
  static constexpr uint64_t kShare = 8;  // of the lanes: a stint may last until others have begun in so many of them

  uint64_t newest = 0, unfinished = 0;
  void see(uint64_t ticket, uint64_t left) {
    newest = std::max(newest, ticket);
    unfinished += left > 0;
  }
  // Writers that are equally fast begin one stint each while one of them lasts.
  bool has(uint64_t lanes, uint64_t ticket, uint64_t left) const {
    return left > 0 && newest > ticket && newest - ticket > std::max(lanes / kShare, 2 * unfinished);
  }
  // The ticket of a lane when such a stint has been finished by another writer, by its own ticket and the other one's. Most rows there are
  // as old as the first, which would bring the lane's turn too soon; the second, too late.
  static uint64_t ticket_after(uint64_t overdue, uint64_t finishing) {
    return overdue + std::max(uint64_t{1}, (finishing - overdue) / 4);
  }
};

// The lane in which the fewest and oldest rows are replaced: one that is not full before one that is, then one whose stint is
// overdue, then the one whose stint began first. A hint, which `take_chosen` looks at again. `skips(lane, holder)`: this lane is
// not taken now, as the writer whose turn it is (0: none) lives, or for another reason. `longest`: as `is_full`.
template <class Memory, class StintsOf, class Skips>
LaneChoice choose_lane(uint64_t lanes, StintsOf&& stints_of, Skips&& skips, uint64_t longest = 1) {
  OverdueStints overdue;
  for (uint64_t l = 0; l < lanes; ++l) {
    const auto stints = stints_of(l);
    overdue.see(Memory::load(stints.ticket), stints.left());
  }
  LaneChoice best;
  for (uint64_t l = 0; l < lanes; ++l) {
    const auto stints = stints_of(l);
    LaneChoice next{l, stints.turns.holder(), Memory::load(stints.ticket), stints.is_full(longest)};
    next.is_overdue = next.is_full && overdue.has(lanes, next.ticket, stints.left());
    if ((best.any() && !next.comes_before(best)) || skips(l, next.holder)) continue;
    best = next;
  }
  return best;
}

// Takes the turn in a chosen lane. False: another writer was faster, choose again. From a dead writer it is taken whatever the
// ticket says: nobody else can have begun a stint since, and who takes over owes the lane a new term.
template <class Memory, class Stints>
bool take_chosen(const Stints& stints, const LaneChoice& choice, uint64_t writer) {
  if (!stints.turns.take(writer, choice.holder)) return false;
  if (choice.holder || Memory::load(stints.ticket) == choice.ticket) return true;
  stints.turns.give_back();  // another stint began and paused since: its rows are the newest
  return false;
}

}  // namespace engram
