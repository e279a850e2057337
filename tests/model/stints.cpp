// Writers that move from lane to lane: three of them, the first of which is killed at any of its stores, and a reader beside them.
#include "memory.hpp"

#include "../../src/native/stint_protocol.hpp"

namespace model {

// The memory of the rings of extents, of which `without` takes nothing away.
struct ExtentMemory : Memory {
  static uint64_t acquire(const Word& w, Order order) {
    return w.load(order == without_in_extents ? rl::mo_relaxed : rl::mo_acquire, w.here());
  }
  static void release(Word& w, uint64_t x, Order order) {
    step();
    w.store(x, order == without_in_extents ? rl::mo_relaxed : rl::mo_release, w.here());
  }
  static void release_fence(Order order) {
    if (order != without_in_extents) rl::atomic_thread_fence(rl::mo_release, $);
  }
};

using Stints = engram::StintProtocol<Memory, ExtentMemory>;

// Each writer appends kExtends batches of 1 to kPiece + 1 rows, in pieces of kPiece at most; or, where kLongest is above 1, rows of 1 to
// kLongest pages, each in one piece.
template <uint64_t kLanes, uint64_t kCapacity, uint64_t kExtents, uint64_t kPiece, uint64_t kExtends, uint64_t kLongest = 1>
struct MoveOn : rl::test_suite<MoveOn<kLanes, kCapacity, kExtents, kPiece, kExtends, kLongest>, 4> {
  static constexpr bool kExhaustive = false;
  static constexpr unsigned kWriters = 3, kLooks = 2, kLongestPause = 120;
  static constexpr bool kIsRagged = kLongest > 1;
  static constexpr uint64_t kMost = kIsRagged ? kLongest : kPiece + 1;  // of an extend
  static constexpr uint64_t kStores = kExtends * kMost * 12;
  static constexpr uint64_t kMostRows = kCapacity + 2 * kWriters * kExtends * kMost;
  static constexpr uint64_t kNoLane = engram::LaneChoice::kNone;

  struct Stored {
    Lane<kCapacity> lane;
    Word turn, last_writer, ticket, until, x_claimed, x_published, x_base, records[kExtents * Stints::kExtentWords];
  } stored[kLanes];
  Word tickets;
  LaneLock of_first;  // the byte that tells that the first writer lives
  struct {
    uint64_t tag;
    bool seam;
    uint64_t stream, position, published;  // with it: where its piece ends
  } truth[kLanes][kMostRows];  // of each row
  // What is true, whatever a thread sees of it.
  struct {
    unsigned appending[kLanes];
    uint64_t ticket[kLanes], lane_of[kWriters], rows_of[kWriters];
  } real;

  Stints stints(uint64_t l) {
    Stored& s = stored[l];
    return {s.lane.protocol(), {s.turn, s.last_writer}, s.ticket, s.until,
            {s.x_claimed, s.x_published, s.x_base, nullptr, kExtents}, s.records};
  }

  void before() {
    Memory::stores_left = Memory::kNever, Memory::one_thread_stores = false;
    const bool full = rl::rand(2) == 0;  // a ring in its second round, whose rows are of stream 0, or an empty one
    tickets.name = "tickets", Memory::store(tickets, full ? kLanes : 0);
    for (uint64_t l = 0; l < kLanes; ++l) {
      Stored& s = stored[l];
      s.turn.name = "turn", s.last_writer.name = "last writer", s.ticket.name = "ticket", s.until.name = "until";
      s.x_claimed.name = "x claimed", s.x_published.name = "x published", s.x_base.name = "x base";
      s.lane.begin(full ? kCapacity : 0);
      for (Word* w : {&s.turn, &s.last_writer, &s.x_base}) Memory::store(*w, 0);
      for (Word* w : {&s.x_claimed, &s.x_published}) Memory::store(*w, full);
      for (Word& w : s.records) w.name = "extent", Memory::store(w, 0);
      Memory::store(s.records[2], l * kCapacity);
      Memory::store(s.ticket, full ? l + 1 : 0), Memory::store(s.until, full ? kCapacity : 0);
      for (uint64_t w = 0; w < kCapacity; ++w) truth[l][w] = {s.lane.tag(w, 0), false, 0, l * kCapacity + w, kCapacity};
      real.appending[l] = 0, real.ticket[l] = full ? l + 1 : 0;
    }
    for (unsigned i = 0; i < kWriters; ++i) real.lane_of[i] = kNoLane, real.rows_of[i] = 0;
    of_first.begin();
    Memory::stores_left = rl::rand(static_cast<unsigned>(kStores + 1));
  }
  void thread(unsigned i) {
    if (i == kWriters) return read();
    try {
      Writer me{i, number(i)};
      for (uint64_t k = 0; k < kExtends; ++k) {
        extend(me, 1 + rl::rand(kMost));
        // Long enough for others to begin stints in its lane.
        for (unsigned pause = rl::rand(2) == 0 ? rl::rand(kLongestPause) : 0; pause > 0; --pause) of_first.is_free();
      }
    } catch (const Killed&) {
      for (unsigned& appending : real.appending)
        if (appending == i + 1) appending = 0;
    }
    if (i == 0) Memory::stores_left = Memory::kNever, of_first.give();
  }

  struct Writer {
    unsigned thread;
    uint64_t number, lane = kNoLane, position = 0, ticket_after = 0;
    bool finishes = false;  // a stint that was overdue
    uint64_t stream() const { return thread + 1; }
  };
  static uint64_t number(unsigned i) { return i == 2 && wrong == Wrong::kNumberGivenTwice ? 1 : i + 1; }

  void extend(Writer& me, uint64_t n) {
    const uint64_t need = kIsRagged ? n : 1;
    while (n > 0) {
      bool begins = false;
      if (me.lane == kNoLane || !take_own(me, need)) begins = take_another(me, need);
      const uint64_t l = me.lane, from = Memory::load(stored[l].lane.published);
      Stints here = stints(l);
      if (begins) {
        begins = here.has_rows();
        begin(me, here, need);
      }
      const uint64_t take = kIsRagged ? n : std::min({n, here.left(), uint64_t{1} + rl::rand(kPiece)});
      RL_ASSERT(take > 0 && take <= here.left());
      append(me, here, take, begins || kIsRagged);
      if (wrong == Wrong::kExtentAfterRows && real.lane_of[me.thread] != l) here.record(from, me.stream(), me.position - take);
      if (wrong == Wrong::kLastWriterAfterRows) here.turns.begin_rows(me.number);
      real.lane_of[me.thread] = l, n -= take;
      if (wrong == Wrong::kTurnEndsBeforeRows && n > 0 && here.left() > 0) {
        here.turns.give_back();
        append(me, here, 1, false), --n;
      }
      const bool used_up = here.left() == 0;
      if (used_up && me.ticket_after) here.set_ticket(real.ticket[l] = me.ticket_after);
      real.appending[l] = 0;
      here.turns.give_back();
      if (used_up) me.lane = kNoLane;
    }
  }
  void append(Writer& me, const Stints& here, uint64_t n, bool begins) {
    if (wrong == Wrong::kClaimedIsLowered) Memory::store(here.rows.claimed, Memory::load(here.rows.published) + n);
    Lane<kCapacity>& lane = stored[me.lane].lane;
    here.rows.append(n, begins, [&](uint64_t at) {
      for (uint64_t w = at; w < at + n; ++w) {
        truth[me.lane][w] = {lane.tag(w, me.thread + 1), begins && w == at, me.stream(), me.position + (w - at), at + n};
        lane.put(w, truth[me.lane][w].tag);
      }
    });
    me.position += n, real.rows_of[me.thread] += n;
  }
  void begin(Writer& me, const Stints& here, uint64_t need) {
    const auto draw = [&] {
      Memory::step();
      const uint64_t drawn = tickets.fetch_add(1, rl::mo_relaxed, tickets.here()) + 1, overdue = Memory::load(here.ticket);
      me.ticket_after = me.finishes ? engram::OverdueStints::ticket_after(overdue, drawn) : 0;
      return real.ticket[me.lane] = drawn;
    };
    const uint64_t from = Memory::load(here.rows.published), rows = here.room(me.finishes, need, kLongest);
    switch (wrong) {
      default: return here.begin(me.number, me.stream(), me.position, rows, draw);
      case Wrong::kExtentAfterRows:
        real.lane_of[me.thread] = kNoLane;
        return here.set_end(rows), here.set_ticket(draw()), here.turns.begin_rows(me.number);
      case Wrong::kLastWriterForgotten:
        here.set_end(rows), here.set_ticket(draw()), here.record(from, me.stream(), me.position);
        if (Memory::load(here.turns.last_writer) == 0) here.turns.begin_rows(me.number);
        return;
      case Wrong::kLastWriterAfterRows:
        return here.set_end(rows), here.set_ticket(draw()), here.record(from, me.stream(), me.position);
    }
  }

  void enter(const Writer& me) {
    RL_ASSERT(real.appending[me.lane] == 0);
    real.appending[me.lane] = me.thread + 1;
  }
  // Takes the turn in the lane of its stint; false: the stint has ended.
  bool take_own(Writer& me, uint64_t need) {
    const Stints own = stints(me.lane);
    if (wrong == Wrong::kOwnWithoutExchange) return own.goes_on(me.number) && (enter(me), true);
    if (own.turns.take(me.number)) {
      if (wrong == Wrong::kOwnWithoutLastWriter ? own.left() > 0 : own.goes_on(me.number, wrong == Wrong::kNeedForgotten ? 1 : need))
        return enter(me), true;
      if (own.goes_on(me.number)) leave_rest(me, own);
      own.turns.give_back();
    }
    return me.lane = kNoLane, false;
  }
  // As `StintTurn`: a row is in one lane.
  void leave_rest(const Writer& me, const Stints& own) {
    own.set_end(0);
    if (me.ticket_after) own.set_ticket(real.ticket[me.lane] = me.ticket_after);
  }
  bool take_another(Writer& me, uint64_t need) {
    for (;; rl::yield(1, $)) {
      const engram::LaneChoice choice = engram::choose_lane<Memory>(
          kLanes, [&](uint64_t l) { return stints(l); }, [&](uint64_t, uint64_t holder) { return holder && !is_dead(me, holder); }, kLongest);
      if (!choice.any() || !take(me, choice)) continue;
      me.lane = choice.lane, me.finishes = choice.is_overdue && stints(choice.lane).left() >= need;
      enter(me);
      // A writer that died between drawing its ticket and storing it has begun no stint.
      RL_ASSERT(choice.holder || real.ticket[choice.lane] == choice.ticket);
      return true;
    }
  }
  bool is_dead(const Writer& me, uint64_t holder) const {
    return holder == 1 && me.thread != 0 && (wrong == Wrong::kLivingIsTakenOver || of_first.is_free());
  }
  bool take(const Writer& me, const engram::LaneChoice& choice) {
    const Stints chosen = stints(choice.lane);
    if (wrong == Wrong::kTakeoverWithoutExchange && choice.holder)
      return Memory::store(chosen.turns.turn, me.number), true;
    if (wrong == Wrong::kTurnWithoutExchange && !choice.holder)
      return chosen.turns.holder() == 0 && (Memory::store(chosen.turns.turn, me.number), true);
    if (wrong == Wrong::kTicketNotSeenAgain) return chosen.turns.take(me.number, choice.holder);
    return engram::take_chosen<Memory>(chosen, choice, me.number);
  }

  void read() {
    for (unsigned look = 0; look < kLooks * kLanes; ++look) {
      const uint64_t l = look % kLanes;
      const Stints here = stints(l);
      typename Lane<kCapacity>::Copy rows[kCapacity];
      bool seam[kCapacity] = {};
      engram::Extent extents[kExtents];
      engram::LaneView x;
      if (wrong == Wrong::kExtentsBeforeRows) x = here.look_at_extents();
      const engram::LaneView v = here.rows.look();
      if (wrong != Wrong::kExtentsBeforeRows) x = here.look_at_extents();
      for (uint64_t e = x.first; e < x.published; ++e) extents[e % kExtents] = here.extent(e);
      for (uint64_t w = v.first; w < v.published; ++w)
        rows[w % kCapacity] = stored[l].lane.copy(w), seam[w % kCapacity] = here.rows.seam(w);
      Protocol::after_reading();
      if (wrong != Wrong::kExtentsNotCheckedAgain) x.first = std::max(x.first, here.first_extent_now());
      for (uint64_t w = std::max(v.first, here.rows.first_now()); w < v.published; ++w) {
        const auto& t = truth[l][w];
        RL_ASSERT(rows[w % kCapacity].is(t.tag));
        RL_ASSERT(seam[w % kCapacity] == t.seam);
        RL_ASSERT(!kIsRagged || v.published >= t.published);
        ++believed.rows, believed.seams += t.seam;
        for (uint64_t e = x.published; e-- > x.first;) {
          const engram::Extent& extent = extents[e % kExtents];
          if (extent.start > w) continue;
          RL_ASSERT(extent.stream == t.stream && extent.position + (w - extent.start) == t.position);
          ++believed.extents;
          break;
        }
      }
    }
  }

  // At rest: each published row is whole, and the newest extent of a writer that was not killed counts its rows.
  void after() {
    for (uint64_t l = 0; l < kLanes; ++l) {
      const Stints here = stints(l);
      const engram::LaneView v = here.rows.look(), x = here.look_at_extents();
      for (uint64_t w = v.first; w < v.published; ++w) RL_ASSERT(stored[l].lane.copy(w).is(truth[l][w].tag));
      if (x.rows() == 0) continue;  // of one extent: a writer died while it replaced it
      const engram::Extent newest = here.extent(x.published - 1);
      if (newest.stream > 1 && real.lane_of[newest.stream - 1] == l)
        RL_ASSERT(newest.position + (v.published - newest.start) == real.rows_of[newest.stream - 1]);
    }
  }
};

}  // namespace model

int main(int argc, char** argv) {
  using namespace model;
  const uint64_t executions = argc > 1 ? std::stoull(argv[1]) : 1000000;
  std::printf("Stints of three writers, a kill, takeovers\n");
  using Test = MoveOn<2, 2, 2, 2, 2>;
  bool ok = run<Test>({"everything in place: 2 lanes of 2 rows, 2 extents each"}, executions);
  ok &= run<MoveOn<3, 1, 1, 1, 3>>({"everything in place: 3 lanes of 1 row, 1 extent each"}, executions);
  ok &= run<MoveOn<2, 3, 2, 2, 2>>({"everything in place: 2 lanes of 3 rows, 2 extents each"}, executions);
  ok &= run<MoveOn<1, 3, 3, 2, 2>>({"everything in place: 1 lane of 3 rows"}, executions);
  using Ragged = MoveOn<2, 4, 2, 1, 3, 2>;
  ok &= run<Ragged>({"everything in place: 2 lanes of 4 pages, rows of 1 and 2"}, executions);
  ok &= run<MoveOn<3, 3, 1, 1, 2, 3>>({"everything in place: 3 lanes of 3 pages, rows of 1 to 3"}, executions);
  ok &= run<Ragged>({"a stint goes on without room for the row", {}, Wrong::kNeedForgotten}, executions);
  // Needed where rows are written in turns alone; here who takes over begins a stint of its own.
  ok &= run<Test>({"L4 after the rows, which does no harm", {}, Wrong::kLastWriterAfterRows, {}, true}, executions);
  ok &= run<Test>(
      {
          {"A2 gone: the fence after the claim of rows", Order::kClaimBeforeRows},
          {"A4 relaxed: the store of published", Order::kRowsBeforePublish},
          {"R1 relaxed: the load of published", Order::kPublishBeforeRows},
          {"R3 gone: the fence before the second look", Order::kRowsBeforeCheck},
          {"T1 relaxed: the exchange that takes a lane", Order::kTurnBeforeRows},
          {"T3 relaxed: the store that gives it back", Order::kRowsBeforeTurnEnd},
          {"the lock of a dead writer orders nothing", {}, Wrong::kLockOrdersNothing},
          {"X2 gone: the fence after the claim of an extent", {}, {}, Order::kClaimBeforeRows},
          {"X4 relaxed: the store of published extents", {}, {}, Order::kRowsBeforePublish},
          {"X1 relaxed: the load of published extents", {}, {}, Order::kPublishBeforeRows},
          {"the ticket not looked at again after the exchange", {}, Wrong::kTicketNotSeenAgain},
          {"L3 after the rows", {}, Wrong::kExtentAfterRows},
          {"extents looked at before rows", {}, Wrong::kExtentsBeforeRows},
          {"extents not looked at again", {}, Wrong::kExtentsNotCheckedAgain},
          {"the own lane without the exchange", {}, Wrong::kOwnWithoutExchange},
          {"the own lane whoever wrote there since", {}, Wrong::kOwnWithoutLastWriter},
          {"the lane of a living writer taken over", {}, Wrong::kLivingIsTakenOver},
          {"the lane of a dead writer taken over by a store", {}, Wrong::kTakeoverWithoutExchange},
          {"a lane taken by a load and a store", {}, Wrong::kTurnWithoutExchange},
          {"the last writer not stored", {}, Wrong::kLastWriterForgotten},
          {"the turn given back between two pieces", {}, Wrong::kTurnEndsBeforeRows},
          {"a number given to two writers", {}, Wrong::kNumberGivenTwice},
          {"claimed lowered by who takes over", {}, Wrong::kClaimedIsLowered},
      },
      executions);
  return ok ? 0 : 1;
}
