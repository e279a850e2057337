// Rows removed beside writers and readers: a writer and a second one that take turns, one that removes rows, and a reader. Either
// the first writer or the one that removes is killed at any of its stores. It is the library's own code that marks, removes and looks.
#include "memory.hpp"

namespace model {

using Turns = engram::TurnProtocol<Memory>;

// Each writer appends kExtends batches of 1 to kPiece time steps of kEnvs rows.
template <uint64_t kCapacity, uint64_t kEnvs, uint64_t kPiece, uint64_t kExtends, bool kKillRemover>
struct Removed : rl::test_suite<Removed<kCapacity, kEnvs, kPiece, kExtends, kKillRemover>, 4> {
  static constexpr bool kExhaustive = false;
  static constexpr uint64_t kRemoves = 3, kLooks = 12, kBits = kCapacity * kEnvs;
  static constexpr uint64_t kMostSteps = kCapacity + 3 * kExtends * kPiece + 1;
  static constexpr unsigned kRemover = kKillRemover ? 0 : 2, kReader = 3;  // thread 0 is killed
  static constexpr uint64_t kStores = kKillRemover ? kRemoves * 4 : kExtends * (5 + (3 + kEnvs) * kPiece);

  Lane<kCapacity> lane;
  Word turn, last_writer, count, bits[(kBits + Memory::kSlotsPerWord - 1) / Memory::kSlotsPerWord];
  LaneLock of_first;  // the byte that tells that thread 0 lives
  // What is true, whatever a thread sees of it.
  uint64_t tag_of[kMostSteps];
  struct {
    bool begun, done;  // whether it is being removed, and whether `remove` has returned
  } truth[kMostSteps][kEnvs];
  unsigned inside;  // who has the turn, counted from 1

  void before() {
    Memory::stores_left = Memory::kNever, Memory::one_thread_stores = false;
    const uint64_t steps = 1 + rl::rand(kCapacity);
    lane.begin(steps);
    turn.name = "turn", last_writer.name = "last writer", count.name = "count";
    for (Word* w : {&turn, &last_writer, &count}) Memory::store(*w, 0);
    for (Word& w : bits) w.name = "bits", Memory::store(w, 0);
    for (uint64_t w = 0; w < kMostSteps; ++w) begin_step(w, 0);
    inside = 0;
    of_first.begin();
    Memory::stores_left = rl::rand(static_cast<unsigned>(kStores + 1));
  }
  void begin_step(uint64_t w, uint64_t writer) {
    tag_of[w] = lane.tag(w, writer);
    for (auto& row : truth[w]) row = {false, false};
  }
  Protocol protocol() {
    Protocol without_bits = lane.protocol();
    return {lane.claimed, lane.published, lane.base, without_bits.seams, kCapacity, kEnvs, {bits, &count, kBits}};
  }

  void thread(unsigned i) {
    try {
      if (i == kReader)
        for (unsigned look = 0; look < kLooks; ++look) read(false);
      else if (i == kRemover)
        for (uint64_t k = 0; k < kRemoves; ++k) remove(i), read(true);
      else
        for (uint64_t k = 0; k < kExtends; ++k) extend(i);
    } catch (const Killed&) {
      if (inside == i + 1) inside = 0;
    }
    if (i == 0) Memory::stores_left = Memory::kNever, of_first.give();
  }

  // False: after a while it has not come; others may be waiting for a thread that only they can wake.
  bool await_turn(const Turns& turns, unsigned i) {
    for (int looks = 0; looks < 60; ++looks, rl::yield(1, $)) {
      if (turns.take(i + 1)) return begin_turn(i);
      const uint64_t holder = turns.holder();
      if (holder != 1 || i == 0 || !of_first.is_free() || !turns.take(i + 1, holder)) continue;
      // As `Store::begin_turn`: a count of 0 is right, as it is never less than the bits.
      if (wrong != Wrong::kCountNotMadeGood && protocol().removed.any()) protocol().removed.recount();
      return begin_turn(i);
    }
    return false;
  }
  bool begin_turn(unsigned i) {
    RL_ASSERT(inside == 0);
    inside = i + 1;
    RL_ASSERT(Memory::load(count) == protocol().removed.bits_set());
    return true;
  }

  void extend(unsigned i) {
    const Turns turns{turn, last_writer};
    if (!await_turn(turns, i)) return;
    const Protocol p = protocol(), without_bits = lane.protocol();
    const bool begins = !turns.continues(i + 1);
    turns.begin_rows(i + 1);
    const uint64_t n = 1 + rl::rand(kPiece), from = Memory::load(lane.published);
    const auto copy = [&](uint64_t at) {
      for (uint64_t w = at; w < at + n; ++w) begin_step(w, i + 1), lane.put(w, tag_of[w]);
    };
    switch (wrong) {
      default: p.append(n, begins, copy); break;
      case Wrong::kBitsClearedBeforeClaim: p.clear_removed(from, n), without_bits.append(n, begins, copy); break;
      case Wrong::kBitsClearedAfterPublish: without_bits.append(n, begins, copy), p.clear_removed(from, n); break;
      case Wrong::kBitsNotCleared: without_bits.append(n, begins, copy); break;
    }
    inside = 0;
    turns.give_back();
  }

  void remove(unsigned i) {
    const Turns turns{turn, last_writer};
    const Protocol p = protocol();
    const engram::LaneView v = p.look();  // the rows that were asked for
    if (v.rows() == 0) return;
    const uint64_t w = v.first + rl::rand(static_cast<unsigned>(v.rows())), env = rl::rand(kEnvs);
    const bool in_turn = wrong != Wrong::kRemovedWithoutTurn;
    if (in_turn && !await_turn(turns, i)) return;
    const bool is_there = p.look().first <= w;  // true, as nobody claims rows meanwhile
    truth[w][env].begun |= is_there;
    if (wrong == Wrong::kRemovedUnseen) p.removed.set(w % kCapacity * kEnvs + env);
    else if (wrong == Wrong::kCountRaisedLast) set_count_last(w % kCapacity * kEnvs + env);
    else p.remove(w, env);
    truth[w][env].done |= is_there;
    if (!in_turn) return;
    inside = 0;
    turns.give_back();
  }
  void set_count_last(uint64_t bit) {
    Word& word = bits[bit / Memory::kSlotsPerWord];
    const uint64_t before = Memory::load(word), one = uint64_t{1} << bit % Memory::kSlotsPerWord;
    if (before & one) return;
    Memory::store(word, before | one);
    Memory::store(count, Memory::load(count) + 1);
  }

  // As readers of batches do: rows that are there, whether they are removed, the rows, and the look back.
  void read(bool by_remover) {
    const Protocol p = protocol();
    typename Lane<kCapacity>::Copy rows[kCapacity];
    bool removed[kCapacity][kEnvs] = {};
    const engram::LaneView v = p.look();
    const auto look = [&] {
      for (uint64_t w = v.first; w < v.published; ++w)
        for (uint64_t env = 0; env < kEnvs; ++env) removed[w % kCapacity][env] = p.is_removed(w, env);
    };
    const bool bits_first = rl::rand(2) == 0, late = wrong == Wrong::kBitsReadAfterCheck;
    if (bits_first && !late) look();
    for (uint64_t w = v.first; w < v.published; ++w) rows[w % kCapacity] = lane.copy(w);
    if (!bits_first && !late) look();
    Protocol::after_reading();
    const uint64_t first = std::max(p.first_now(), v.first);
    if (late) look();
    for (uint64_t w = first; w < v.published; ++w) {
      RL_ASSERT(rows[w % kCapacity].is(tag_of[w]));
      for (uint64_t env = 0; env < kEnvs; ++env) {
        const bool is = removed[w % kCapacity][env];
        // Who has removed a row does not draw it again. That it hides no row, a look behind the second look does not promise.
        RL_ASSERT(!by_remover || !truth[w][env].done || is);
        RL_ASSERT(late || !is || truth[w][env].begun);
        ++believed.rows, believed.seams += is;
      }
    }
  }
};

}  // namespace model

int main(int argc, char** argv) {
  using namespace model;
  const uint64_t executions = argc > 1 ? std::stoull(argv[1]) : 100000;
  using A = Removed<3, 1, 2, 3, false>;
  using B = Removed<2, 1, 1, 4, true>;
  using C = Removed<2, 2, 1, 3, false>;
  using D = Removed<1, 1, 1, 2, false>;
  std::printf("Removed rows: two writers, one that removes, a reader, a kill (seams: rows seen as removed)\n");
  bool ok = run<A>({"everything in place: 3 rows, a writer is killed"}, executions);
  ok &= run<B>({"everything in place: 2 rows, the one that removes is killed"}, executions);
  ok &= run<C>({"everything in place: 2 steps of 2 environments"}, executions);
  ok &= run<D>({"everything in place: 1 row"}, executions);
  ok &= run<A>(
      {
          {"bits cleared before the claim", {}, Wrong::kBitsClearedBeforeClaim},
          {"bits cleared after the rows are published", {}, Wrong::kBitsClearedAfterPublish},
          {"bits not cleared", {}, Wrong::kBitsNotCleared},
          {"a bit set without the turn", {}, Wrong::kRemovedWithoutTurn},
          {"a bit set without a look whether the row is there", {}, Wrong::kRemovedUnseen},
          {"bits loaded after the second look at claimed", {}, Wrong::kBitsReadAfterCheck},
          {"A2 gone: the fence after the claim", Order::kClaimBeforeRows},
          {"R1 relaxed: the load of published", Order::kPublishBeforeRows},
          {"R3 gone: the fence before the second look at claimed", Order::kRowsBeforeCheck},
          {"A4 relaxed: the store of published", Order::kRowsBeforePublish},
          {"T1 relaxed: the exchange that takes the turn", Order::kTurnBeforeRows},
          {"T3 relaxed: the store that gives it back", Order::kRowsBeforeTurnEnd},
      },
      executions);
  ok &= run<D>({"V1 relaxed: the store of the bit", Order::kClaimBeforeRemoval}, executions);
  ok &= run<B>(
      {
          {"the count not made good after a death", {}, Wrong::kCountNotMadeGood},
          {"the count raised after the bit", {}, Wrong::kCountRaisedLast},
      },
      executions);
  return ok ? 0 : 1;
}
