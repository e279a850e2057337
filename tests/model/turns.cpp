// Writers that take turns in a lane: three of them, the first of which is killed at any of its stores, and a reader beside them.
#include "memory.hpp"

namespace model {

using Turns = engram::TurnProtocol<Memory>;

// Each writer appends kExtends batches of 1 to kPiece + 1 rows, in pieces of kPiece at most.
template <uint64_t kCapacity, uint64_t kPiece, uint64_t kExtends>
struct TakeTurns : rl::test_suite<TakeTurns<kCapacity, kPiece, kExtends>, 4> {
  static constexpr bool kExhaustive = false;
  static constexpr unsigned kWriters = 3, kLooks = 3;
  static constexpr uint64_t kStores = kExtends * (3 + 6 * (kPiece + 1));
  static constexpr uint64_t kMostRows = kCapacity + 2 * kWriters * kExtends * (kPiece + 1);

  Lane<kCapacity> lane;
  Word turn, last_writer;
  LaneLock of_first;  // the byte that tells that the first writer lives
  struct {
    uint64_t tag;
    bool seam;
    uint64_t writer;
  } truth[kMostRows];  // of each row
  // What is true, whatever a thread sees of it.
  struct {
    uint64_t published;
    unsigned appending;
    bool died;
  } real;

  void before() {
    Memory::stores_left = Memory::kNever;
    Memory::one_thread_stores = false;
    const uint64_t rows = rl::rand(kCapacity + 1);
    lane.begin(rows);
    turn.name = "turn", last_writer.name = "last writer";
    Memory::store(turn, 0), Memory::store(last_writer, 0);
    for (uint64_t w = 0; w < rows; ++w) truth[w] = {lane.tag(w, 0), false, 0};
    real = {rows, 0, false};
    of_first.begin();
    Memory::stores_left = rl::rand(static_cast<unsigned>(kStores + 1));
  }
  void thread(unsigned i) {
    if (i == kWriters) return read();
    try {
      for (uint64_t k = 0; k < kExtends; ++k) extend(i);
    } catch (const Killed&) {
      if (real.appending == i + 1) real.appending = 0;
      real.died = true;
    }
    if (i == 0) Memory::stores_left = Memory::kNever, of_first.give();
  }

  // Two processes may have one pid, one after the other; never one number.
  static uint64_t number(unsigned i) { return i == 2 && wrong == Wrong::kNumberGivenTwice ? 1 : i + 1; }

  void extend(unsigned i) {
    const Turns turns{turn, last_writer};
    const uint64_t me = number(i);
    await_turn(turns, me);
    RL_ASSERT(real.appending == 0);
    real.appending = i + 1;
    const Protocol p = lane.protocol();
    const uint64_t start = Memory::load(lane.published), n = 1 + rl::rand(kPiece + 1);
    RL_ASSERT(start == real.published);
    bool begins = start > 0 && !turns.continues(me);
    // A row behind one of another writer has a seam, and one behind its own has none: a kill may add one.
    const bool is_mine = start > 0 && truth[start - 1].writer == i + 1;
    RL_ASSERT(start == 0 || is_mine || begins);
    RL_ASSERT(!begins || !is_mine || real.died);
    if (wrong != Wrong::kLastWriterAfterRows && wrong != Wrong::kLastWriterForgotten) turns.begin_rows(me);
    for (uint64_t done = 0; done < n; begins = false) {
      const uint64_t take = std::min<uint64_t>(n - done, 1 + rl::rand(kPiece));
      p.append(take, begins, [&](uint64_t at) {
        for (uint64_t w = at; w < at + take; ++w) {
          truth[w] = {lane.tag(w, i + 1), begins && w == at, i + 1};
          lane.put(w, truth[w].tag);
        }
      });
      real.published += take;
      done += take;
      if (wrong == Wrong::kTurnEndsBeforeRows && done < n) turns.give_back();
    }
    if (wrong == Wrong::kLastWriterAfterRows) turns.begin_rows(me);
    RL_ASSERT(Memory::load(lane.published) == start + n);
    real.appending = 0;
    turns.give_back();
  }

  void await_turn(const Turns& turns, uint64_t me) {
    for (;; rl::yield(1, $)) {
      if (wrong == Wrong::kTurnWithoutExchange) {
        if (turns.holder() == 0) return Memory::store(turn, me);
      } else if (turns.take(me)) {
        return;
      }
      const uint64_t holder = turns.holder();
      if (holder != 1 || me == 1) continue;
      if (wrong != Wrong::kLivingIsTakenOver && !of_first.is_free()) continue;
      if (wrong == Wrong::kTakeoverWithoutExchange) return Memory::store(turn, me);
      if (turns.take(me, holder)) return;
    }
  }

  void read() {
    const Protocol p = lane.protocol();
    for (unsigned look = 0; look < kLooks; ++look) {
      typename Lane<kCapacity>::Copy rows[kCapacity];
      bool seam[kCapacity] = {};
      const engram::LaneView v = p.look();
      for (uint64_t w = v.first; w < v.published; ++w) rows[w % kCapacity] = lane.copy(w), seam[w % kCapacity] = p.seam(w);
      Protocol::after_reading();
      for (uint64_t w = std::max(p.first_now(), v.first); w < v.published; ++w) {
        RL_ASSERT(rows[w % kCapacity].is(truth[w].tag));
        RL_ASSERT(seam[w % kCapacity] == truth[w].seam);
        ++believed.rows, believed.seams += truth[w].seam;
      }
    }
  }
};

}  // namespace model

int main(int argc, char** argv) {
  using namespace model;
  const uint64_t executions = argc > 1 ? std::stoull(argv[1]) : 1000000;
  std::printf("Turns of three writers, a kill, a takeover\n");
  bool ok = run<TakeTurns<3, 2, 2>>({"everything in place: 3 rows, extends of 1 to 3"}, executions);
  ok &= run<TakeTurns<1, 1, 2>>({"everything in place: 1 row, extends of 1 and 2"}, executions);
  ok &= run<TakeTurns<3, 2, 2>>(
      {
          {"T1 relaxed: the exchange that takes the turn", Order::kTurnBeforeRows},
          {"T3 relaxed: the store that gives it back", Order::kRowsBeforeTurnEnd},
          {"the lock of a dead writer orders nothing", {}, Wrong::kLockOrdersNothing},
          {"the turn taken by a load and a store", {}, Wrong::kTurnWithoutExchange},
          {"the turn given back between two pieces", {}, Wrong::kTurnEndsBeforeRows},
          {"the turn of a living writer taken over", {}, Wrong::kLivingIsTakenOver},
          {"the turn of a dead writer taken over by a store", {}, Wrong::kTakeoverWithoutExchange},
          {"the last writer not stored", {}, Wrong::kLastWriterForgotten},
          {"T2 after the rows: the last writer stored after published", {}, Wrong::kLastWriterAfterRows},
          {"a number given to two writers", {}, Wrong::kNumberGivenTwice},
      },
      executions);
  return ok ? 0 : 1;
}
