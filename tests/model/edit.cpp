// Rows that are changed in place, by who is alone with the store and may be killed at any store; the next one finishes the
// change. An observer, who takes no lock, reads beside them.
#include "memory.hpp"

namespace model {

template <uint64_t kCapacity, uint64_t kActions, bool kEvery>
struct Edit : rl::test_suite<Edit<kCapacity, kActions, kEvery>, Threads<kEvery>::kCount> {
  static constexpr bool kExhaustive = kEvery;
  static constexpr unsigned kLooks = kEvery ? 1 : 4;
  static constexpr uint64_t kNumbers = kCapacity + 2 * kActions, kEdits = 2 * kActions + 2;
  static constexpr uint64_t kStores = 6 * kActions + (kEvery ? 0 : 4);

  Lane<kCapacity> lane;
  Threads<kEvery> threads;
  uint64_t truth[kNumbers][kEdits];  // the tag of each published row after so many edits
  uint64_t versions;
  // The redo area: what a marked change puts where. Only who holds the lock looks at it.
  struct {
    bool marked;
    uint64_t from, to, edit, version;
  } redo;

  void before() {
    Memory::stores_left = Memory::kNever;
    versions = 0, redo.marked = false;
    lane.begin(kCapacity);
    lane.claimed.never_stored = lane.published.never_stored = kEvery;
    for (uint64_t w = 0; w < kCapacity; ++w) know(w, 0, lane.tag(w, 0));
    threads.begin(kStores);
  }
  void thread(unsigned i) {
    threads.run(i, [&] { act(); }, [&] { finish(), kEvery ? void() : act(); }, [&] { observe(); });
  }
  void know(uint64_t number, uint64_t from_edit, uint64_t tag) {
    for (uint64_t e = from_edit; e < kEdits; ++e) truth[number][e] = tag;
  }

  void act() {
    for (uint64_t i = 0; i < kActions; ++i) kEvery || rl::rand(3) > 0 ? edit() : append();
  }
  void append() {
    lane.protocol().append(1, false, [&](uint64_t w) {
      know(w, 0, lane.tag(w, ++versions));
      lane.put(w, truth[w][0]);
    });
  }
  // Changes the newest rows: one, or all that there are.
  void edit() {
    const Protocol p = lane.protocol();
    const uint64_t to = Memory::load(lane.published), first = p.first_now();
    if (first >= to) return;  // the lane of a dead writer, of one row
    const uint64_t from = kEvery || rl::rand(2) == 0 ? to - 1 : first;
    const uint64_t edit = (Memory::load(lane.edits) | 1) / 2 + 1;
    Protocol::edit(lane.edits, [&] {
      Memory::step();
      redo = {true, from, to, edit, ++versions};
      apply();
    });
  }
  void apply() {
    for (uint64_t w = redo.from; w < redo.to; ++w) {
      know(w, redo.edit, lane.tag(w, redo.version));
      lane.put(w, lane.tag(w, redo.version));
    }
    Memory::step();
    redo.marked = false;
  }
  // What `open` does after a kill.
  void finish() {
    if (Memory::load(lane.edits) % 2 == 0) return;
    if (wrong == Wrong::kFinishedUnannounced) {
      if (redo.marked) apply();
      return Memory::release(lane.edits, Memory::load(lane.edits) + 1, Order::kRowsBeforeEditEnd);
    }
    Protocol::edit(lane.edits, [&] {
      if (redo.marked) apply();
    });
  }

  void observe() {
    const Protocol p = lane.protocol();
    for (unsigned look = 0; look < kLooks; ++look) {
      typename Lane<kCapacity>::Copy rows[kCapacity];
      uint64_t before = Protocol::edits_before_reading(lane.edits);
      const engram::LaneView v = p.look();
      for (uint64_t w = v.first; w < v.published; ++w) rows[w % kCapacity] = lane.copy(w);
      Protocol::after_reading();
      const uint64_t first = p.first_now();
      uint64_t after = Protocol::edits_after_reading(lane.edits);
      if (wrong == Wrong::kEditsOnlyBefore) after = before;
      if (wrong == Wrong::kEditsOnlyAfter) before = after;
      if (before != after || (before % 2 && wrong != Wrong::kOddIsBelieved)) continue;
      for (uint64_t w = std::max(first, v.first); w < v.published; ++w) {
        const uint64_t tag = truth[w][before / 2];
        RL_ASSERT(rows[w % kCapacity].is(tag));
        ++believed.rows, believed.edited += before > 0 && tag != truth[w][0];
      }
    }
  }
};

}  // namespace model

int main(int argc, char** argv) {
  using namespace model;
  const uint64_t executions = argc > 1 ? std::stoull(argv[1]) : 1000000;
  std::printf("Rows changed in place, a kill, who finishes the change, an observer\n");
  bool ok = run<Edit<2, 3, false>>({"everything in place: 2 rows, changed one or both at a time"}, executions);
  ok &= run<Edit<1, 2, true>>({"everything in place: 1 row, every execution"}, executions);
  ok &= run<Edit<2, 3, false>>(
      {
          {"E2 gone: the fence after edits became odd", Order::kEditBeforeRows},
          {"E4 relaxed: the store that makes edits even", Order::kRowsBeforeEditEnd},
          {"O1 relaxed: the load of edits before the rows", Order::kEditsBeforeRows},
          {"R3 gone: the fence before the second look at edits", Order::kRowsBeforeCheck},
          {"the lock orders nothing", {}, Wrong::kLockOrdersNothing},
          {"edits odd, and believed", {}, Wrong::kOddIsBelieved},
          {"edits looked at only before the copy", {}, Wrong::kEditsOnlyBefore},
          {"edits looked at only after the copy", {}, Wrong::kEditsOnlyAfter},
          {"a killed change finished without E1 and E2", {}, Wrong::kFinishedUnannounced},
      },
      executions);
  return ok ? 0 : 1;
}
