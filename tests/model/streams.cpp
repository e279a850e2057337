// The table of streams: three writers that move from lane to lane, the first of which is killed at any of its stores; another one
// goes on with its stream from the count that the table gives, and the count at the end is right for each.
#include "../../src/native/crc32c.hpp"
#include "memory.hpp"

#include "../../src/native/stint_protocol.hpp"
#include "../../src/native/stream_protocol.hpp"

namespace model {

using Stints = engram::StintProtocol<Memory>;
using Record = engram::StreamRecord<Memory>;
using engram::StreamPlace;

template <uint64_t kLanes, uint64_t kCapacity, uint64_t kPiece, uint64_t kExtends>
struct Continue : rl::test_suite<Continue<kLanes, kCapacity, kPiece, kExtends>, 3> {
  static constexpr bool kExhaustive = false;
  static constexpr unsigned kWriters = 3;
  static constexpr uint64_t kStores = kExtends * (kPiece + 1) * 22, kNoLane = engram::LaneChoice::kNone;

  struct Stored {
    Lane<kCapacity> lane;
    Word turn, last_writer, ticket, until, x_claimed, x_published, x_base;
  } stored[kLanes];
  Word tickets, records[kWriters][Record::kWords];
  LaneLock of_first;  // the byte that tells that the first writer lives
  struct {
    uint64_t rows_of[kWriters];  // published
  } real;

  Stints stints(uint64_t l) {
    Stored& s = stored[l];
    return {s.lane.protocol(), {s.turn, s.last_writer}, s.ticket, s.until,
            {s.x_claimed, s.x_published, s.x_base, nullptr, 1}, nullptr};
  }
  Record record(uint64_t stream) { return Record(records[stream - 1]); }

  void before() {
    Memory::stores_left = Memory::kNever, Memory::one_thread_stores = false;
    tickets.name = "tickets", Memory::store(tickets, 0);
    for (Stored& s : stored) {
      s.turn.name = "turn", s.last_writer.name = "last writer", s.ticket.name = "ticket", s.until.name = "until";
      s.lane.begin(0);
      for (Word* w : {&s.turn, &s.last_writer, &s.ticket, &s.until, &s.x_claimed, &s.x_published, &s.x_base}) Memory::store(*w, 0);
    }
    for (unsigned i = 0; i < kWriters; ++i) {
      for (Word& w : records[i]) w.name = "record", Memory::store(w, 0);
      record(i + 1).write({i + 1, i + 1});
      real.rows_of[i] = 0;
    }
    of_first.begin();
    Memory::stores_left = rl::rand(static_cast<unsigned>(kStores + 1));
  }
  void thread(unsigned i) {
    Writer me{i + 1, i + 1};
    try {
      for (uint64_t k = 0; k < kExtends; ++k) {
        extend(me, 1 + rl::rand(kPiece + 1));
        for (unsigned pause = rl::rand(3) == 0 ? rl::rand(60) : 0; pause > 0; --pause) of_first.is_free();
      }
    } catch (const Killed&) {
    }
    if (i == 0) Memory::stores_left = Memory::kNever, of_first.give();
    if (i == 2) go_on_for_first();
  }

  // The number that a turn is taken with, and the stream whose rows are appended: those of a process, and of a producer.
  struct Writer {
    uint64_t number, stream, lane = kNoLane, position = 0;
    bool finishes = false;
  };

  void go_on_for_first() {
    of_first.take();
    Writer me{3, 1};
    me.position = count(me);
    RL_ASSERT(me.position == real.rows_of[0]);
    ++believed.rows, ++believed.edited;
    extend(me, 1 + rl::rand(kPiece));
  }
  // S3: in the turn of the lane that the record names, which is taken over from a dead writer.
  uint64_t count(const Writer& me) {
    for (;; rl::yield(1, $)) {
      const StreamPlace place = read(me.stream);
      if (place.lane == StreamPlace::kNoLane) return place.position;
      const Stints there = stints(place.lane);
      if (wrong == Wrong::kCountWithoutTurn)
        return place.count(Memory::load(there.turns.last_writer), Memory::load(there.rows.published));
      const uint64_t holder = there.turns.holder();
      if ((holder && !is_dead(me, holder)) || !there.turns.take(me.number, holder)) continue;
      const StreamPlace now = read(me.stream);
      const uint64_t rows = now.count(Memory::load(there.turns.last_writer), Memory::load(there.rows.published));
      if (holder) settle(place.lane, holder);
      there.turns.give_back();
      if (now.lane == place.lane) return rows;
    }
  }

  void extend(Writer& me, uint64_t n) {
    while (n > 0) {
      bool begins = false;
      if (me.lane == kNoLane || !take_own(me)) begins = take_another(me);
      const uint64_t l = me.lane;
      Stints here = stints(l);
      if (begins) {
        begins = here.has_rows();
        if (wrong != Wrong::kRecordNotBegun) write(me, Memory::load(here.rows.published));  // S0
        here.begin(me.stream, me.stream, me.position, here.room(me.finishes),
                   [&] { Memory::step(); return tickets.fetch_add(1, rl::mo_relaxed, tickets.here()) + 1; });
      }
      const uint64_t take = std::min({n, here.left(), uint64_t{1} + rl::rand(kPiece)});
      const uint64_t from = Memory::load(here.rows.published);
      here.rows.append(take, begins, [&](uint64_t at) {
        for (uint64_t w = at; w < at + take; ++w) stored[l].lane.put(w, stored[l].lane.tag(w, me.stream));
      });
      real.rows_of[me.stream - 1] += take;  // in the same step as A4: nothing is between them that a kill could be before
      me.position += take, n -= take;
      if (wrong != Wrong::kRecordAfterTurn && wrong != Wrong::kRecordNotRaised) write(me, from + take);  // S1
      const bool used_up = here.left() == 0;
      here.turns.give_back();
      if (wrong == Wrong::kRecordAfterTurn) write(me, from + take);
      if (used_up) me.lane = kNoLane;
    }
  }
  void write(const Writer& me, uint64_t start) {
    const StreamPlace place{me.stream, me.number, me.lane, start, me.position};
    if (wrong != Wrong::kRecordOnce) return record(me.stream).write(place);
    Word* const words = records[me.stream - 1];  // in the place of the one before
    Memory::store(words[3], place.lane), Memory::store(words[4], place.start), Memory::store(words[5], place.position);
  }
  StreamPlace read(uint64_t stream) {
    if (wrong != Wrong::kRecordOnce && wrong != Wrong::kRecordUnchecked) return record(stream).read();
    const Word* const words = records[stream - 1];
    uint64_t k = 0;
    if (wrong == Wrong::kRecordUnchecked) k = Memory::load(words[0]) > Memory::load(words[Record::kCopyWords]) ? 0 : Record::kCopyWords;
    return {Memory::load(words[k + 1]), Memory::load(words[k + 2]), Memory::load(words[k + 3]), Memory::load(words[k + 4]),
            Memory::load(words[k + 5])};
  }
  // S2: before anybody else writes in a dead writer's lane.
  void settle(uint64_t lane, uint64_t dead) {
    if (wrong == Wrong::kDeadNotSettled) return;
    const Stints there = stints(lane);
    const uint64_t writer = Memory::load(there.turns.last_writer);
    if (!writer) return;
    if (wrong == Wrong::kLivingIsSettled) dead = record(writer).read().owner;
    record(writer).settle(lane, dead, writer, Memory::load(there.rows.published));
  }

  bool take_own(Writer& me) {
    const Stints own = stints(me.lane);
    if (own.turns.take(me.number)) {
      if (own.goes_on(me.stream)) return true;
      own.turns.give_back();
    }
    return me.lane = kNoLane, false;
  }
  bool take_another(Writer& me) {
    for (;; rl::yield(1, $)) {
      const engram::LaneChoice choice = engram::choose_lane<Memory>(
          kLanes, [&](uint64_t l) { return stints(l); }, [&](uint64_t, uint64_t holder) { return holder && !is_dead(me, holder); });
      if (!choice.any() || !engram::take_chosen<Memory>(stints(choice.lane), choice, me.number)) continue;
      me.lane = choice.lane, me.finishes = choice.is_overdue;
      if (choice.holder) settle(me.lane, choice.holder);
      return true;
    }
  }
  bool is_dead(const Writer& me, uint64_t holder) const { return holder == 1 && me.number != 1 && of_first.is_free(); }

  // At rest: each stream's count is that of its rows.
  void after() {
    for (uint64_t s = 1; s <= kWriters; ++s) {
      const StreamPlace place = read(s);
      uint64_t rows = place.position;
      if (place.lane != StreamPlace::kNoLane) {
        const Stints there = stints(place.lane);
        rows = place.count(Memory::load(there.turns.last_writer), Memory::load(there.rows.published));
      }
      RL_ASSERT(rows == real.rows_of[s - 1]);
      ++believed.seams;
    }
  }
};

}  // namespace model

int main(int argc, char** argv) {
  using namespace model;
  const uint64_t executions = argc > 1 ? std::stoull(argv[1]) : 1000000;
  std::printf("The table of streams: three writers, a kill, one that goes on\n");
  using Test = Continue<2, 2, 2, 2>;
  bool ok = run<Test>({"everything in place: 2 lanes of 2 rows"}, executions);
  ok &= run<Continue<3, 1, 1, 3>>({"everything in place: 3 lanes of 1 row"}, executions);
  ok &= run<Continue<1, 3, 2, 2>>({"everything in place: 1 lane of 3 rows"}, executions);
  ok &= run<Test>(
      {
          {"T1 relaxed: the exchange that takes a lane", Order::kTurnBeforeRows},
          {"T3 relaxed: the store that gives it back", Order::kRowsBeforeTurnEnd},
          {"the lock of a dead writer orders nothing", {}, Wrong::kLockOrdersNothing},
          {"S0 gone: the record of a stint that begins", {}, Wrong::kRecordNotBegun},
          {"S1 gone: the count at the end of an append", {}, Wrong::kRecordNotRaised},
          {"S1 after T3", {}, Wrong::kRecordAfterTurn},
          {"S2 gone: the count of who died in a lane", {}, Wrong::kDeadNotSettled},
          {"S3: the count looked at without the lane's turn", {}, Wrong::kCountWithoutTurn},
          {"one copy instead of two", {}, Wrong::kRecordOnce},
          {"a copy believed without its checksum", {}, Wrong::kRecordUnchecked},
      },
      executions);
  ok &= run<Continue<3, 1, 1, 3>>({"S2 of a stream that lives", {}, Wrong::kLivingIsSettled}, executions);
  return ok ? 0 : 1;
}
