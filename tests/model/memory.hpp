// The model's memory: Relacy's atomics under the protocol of src/native/lane_protocol.hpp, with kills, and with what can
// be taken away.
//
// Relacy runs the threads of a test in turns, picks at each access who goes on, and lets each load return any value that
// the C++ memory model allows, as far back as it remembers. What it leaves out (loads that return what is stored later)
// takes two threads that both load before they store; readers store nothing. Consumers of a queue do: their model has bytes
// that are no atomics, and Relacy finds a race where a load might return a later store.
#pragma once
// Relacy replaces `new`, `free` and `memory_order_*` by macros: whatever does not belong to it comes first.
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <optional>
#include <string>

#include "../../src/native/lane_protocol.hpp"

// It remembers three stores of each word and shows a load two of them in an exhaustive search: eight, always.
#include <relacy/base.hpp>
#include <relacy/thread_local_ctx.hpp>
#include <relacy/context_base.hpp>
#define atomic_history_size 8
#define is_random_sched() collecting_history() || true
#include <relacy/thread.hpp>
#undef is_random_sched
#include <relacy/relacy.hpp>

namespace model {

using engram::Order;

// What is done in a wrong order, or left out.
enum class Wrong {
  kNothing,
  kClaimAfterCopy,
  kPublishBeforeCopy,
  kSeamsBeforeClaim,
  kSeamsAfterPublish,
  kClaimedIsLowered,
  kClaimReadEarly,
  kRowsBeforePublished,
  kSeamsAfterCheck,
  kLockOrdersNothing,
  kOddIsBelieved,
  kEditsOnlyBefore,
  kEditsOnlyAfter,
  kFinishedUnannounced,
  kTurnWithoutExchange,
  kTurnEndsBeforeRows,
  kLivingIsTakenOver,
  kTakeoverWithoutExchange,
  kLastWriterForgotten,
  kLastWriterAfterRows,
  kNumberGivenTwice,
  kTicketNotSeenAgain,
  kExtentAfterRows,
  kExtentsBeforeRows,
  kExtentsNotCheckedAgain,
  kOwnWithoutExchange,
  kOwnWithoutLastWriter,
  kRecordNotBegun,
  kRecordNotRaised,
  kRecordAfterTurn,
  kRecordOnce,
  kRecordUnchecked,
  kDeadNotSettled,
  kLivingIsSettled,
  kCountWithoutTurn,
  kRecordsShort,
  kTailWordsShort,
  kTailPlacesShort,
  kTailsNotChecked,
  kTailsAfterPublish,
  kNewestAskedTwice,
  kUnitsBeforeClaim,
  kUnitsFreedEarly,
  kGroupFreedEarly,
  kGroupOfGoneForgotten,
  kHeadsShort,
  kUnitsForgotten,
  kUnitsOfVisibleRows,
  kOthersUnitsForgotten,
  kSegmentsBeforeRows,
  kSegmentAfterPublish,
  kSegmentWithoutExchange,
  kBitsClearedBeforeClaim,
  kBitsClearedAfterPublish,
  kBitsNotCleared,
  kRemovedWithoutTurn,
  kRemovedUnseen,
  kBitsReadAfterCheck,
  kCountNotMadeGood,
  kCountRaisedLast,
  kRoomLookedAtEarly,
  kRoomOneTooMany,
  kFreedBeforeCopy,
  kKeptBeforeConsumed,
  kTakenWithoutTurn,
  kDeadConsumerNotTakenOver,
  kLivingConsumerTakenOver,
  kDeadConsumersRowsKept,
  kSeekLeavesKept,
  kSeekOrdersNothing,
  kCommitBeforeSave,
  kRowInPieces,
  kLengthAfterCheck,
  kSeamsNotRead,
  kNeedForgotten,
};
inline Wrong wrong = Wrong::kNothing;
inline std::optional<Order> without;             // this access is relaxed, or this fence is not there
inline std::optional<Order> without_in_extents;  // the same, in the rings of extents alone

// A word that processes share, with a name for the histories that Relacy prints.
struct Word : rl::atomic<uint64_t> {
  const char* name = "row";
  bool never_stored = false;
  rl::debug_info here() const { return {name, "", 0}; }
};

struct Killed {};

struct Memory {
  using Word = model::Word;
  static constexpr uint64_t kSlotsPerWord = 2;  // so that three rows have two words of seams

  static uint64_t load(const Word& w) { return load(w, rl::mo_relaxed); }
  static uint64_t acquire(const Word& w, Order order) { return load(w, order == without ? rl::mo_relaxed : rl::mo_acquire); }
  static void store(Word& w, uint64_t x) {
    step();
    w.store(x, rl::mo_relaxed, w.here());
  }
  static void release(Word& w, uint64_t x, Order order) {
    step();
    w.store(x, order == without ? rl::mo_relaxed : rl::mo_release, w.here());
  }
  static bool replace(Word& w, uint64_t expected, uint64_t x, Order order) {
    step();
    const auto taking = order == without ? rl::mo_relaxed : rl::mo_acquire;
    return w.compare_exchange_strong(expected, x, taking, w.here(), rl::mo_relaxed, w.here());
  }
  static void release_fence(Order order) {
    if (order != without) rl::atomic_thread_fence(rl::mo_release, $);
  }
  static void acquire_fence(Order order) {
    if (order != without) rl::atomic_thread_fence(rl::mo_acquire, $);
  }

  // How many stores the first writer makes before it is killed. A kill between two of them is one before the next.
  static constexpr uint64_t kNever = ~uint64_t{0};
  static inline uint64_t stores_left = kNever;
  static void step() {
    if (stores_left == kNever || rl::thread_index() != 0) return;
    if (stores_left == 0) throw Killed{};
    --stores_left;
  }

  // Only thread 0 stores. Then an exhaustive search need not ask who goes on before that thread loads.
  static inline bool one_thread_stores = false;

 private:
  static uint64_t load(const Word& w, rl::memory_order order) {
    if (!one_thread_stores || (rl::thread_index() != 0 && !w.never_stored)) return w.load(order, w.here());
    const rl::preemption_disabler nobody_else(rl::ctx());
    return w.load(order, w.here());
  }
};

using Protocol = engram::LaneProtocol<Memory>;

// A lane. A row is two words; a whole one has its tag twice.
template <uint64_t kCapacity>
struct Lane {
  Word claimed, published, base, edits;
  Word seams[(kCapacity + Memory::kSlotsPerWord - 1) / Memory::kSlotsPerWord], rows[kCapacity][2];

  void begin(uint64_t rows_there) {
    claimed.name = "claimed", published.name = "published", base.name = "base", edits.name = "edits";
    Memory::store(claimed, rows_there), Memory::store(published, rows_there);
    Memory::store(base, 0), base.never_stored = true;
    Memory::store(edits, 0);
    for (Word& w : seams) w.name = "seams", Memory::store(w, 0);
    for (uint64_t slot = 0; slot < kCapacity; ++slot) put(slot, slot < rows_there ? tag(slot, 0) : 0);
  }
  Protocol protocol() { return {claimed, published, base, seams, kCapacity}; }

  static uint64_t tag(uint64_t number, uint64_t version) { return number * 1000 + version + 1; }
  void put(uint64_t number, uint64_t tag) {
    for (Word& w : rows[number % kCapacity]) Memory::store(w, tag);
  }
  struct Copy {
    uint64_t words[2] = {};
    bool is(uint64_t tag) const { return words[0] == tag && words[1] == tag; }
  };
  Copy copy(uint64_t number) const {
    Copy c;
    for (int i = 0; i < 2; ++i) c.words[i] = Memory::load(rows[number % kCapacity][i]);
    return c;
  }
};

// The lock of a lane, which the second writer gets when the first has died or let go. The kernel's part in it is nothing
// that a kill can interrupt.
struct LaneLock {
  Word free;
  void begin() { free.name = "lock", free.store(0, rl::mo_relaxed, free.here()); }
  void give() { free.store(1, wrong == Wrong::kLockOrdersNothing ? rl::mo_relaxed : rl::mo_release, free.here()); }
  bool is_free() const {
    return free.load(wrong == Wrong::kLockOrdersNothing ? rl::mo_relaxed : rl::mo_acquire, free.here()) != 0;
  }
  void take() {
    while (!is_free()) rl::yield(1, $);
  }
};

// Threads 0 and 1 write, one after the other; thread 0 may be killed at any store. Thread 2 reads. In an exhaustive
// search thread 0 is both writers, and thread 1 reads.
template <bool kExhaustive>
struct Threads {
  static constexpr int kCount = kExhaustive ? 2 : 3;
  LaneLock lock;

  void begin(uint64_t most_stores) {
    lock.begin();
    Memory::one_thread_stores = kExhaustive;
    Memory::stores_left = rl::rand(static_cast<unsigned>(most_stores + 1));
  }
  template <class First, class Second, class Reader>
  void run(unsigned i, First&& first, Second&& second, Reader&& reader) {
    if (i + 1 == kCount) return reader();
    if (i == 0) {
      try {
        first();
      } catch (const Killed&) {
      }
      Memory::stores_left = Memory::kNever;
      if (!kExhaustive) return lock.give();
    } else {
      lock.take();
    }
    second();
  }
};

// What readers believed: a model in which nobody believes what is new is always sound.
struct Believed {
  uint64_t rows = 0, seams = 0, edited = 0, extents = 0;
};
inline Believed believed;

inline std::string thousands(uint64_t n) {
  std::string digits = std::to_string(n), grouped;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) grouped += ',';
    grouped += digits[i];
  }
  return grouped;
}

struct Run {
  const char* what;
  std::optional<Order> without = {};
  Wrong wrong = Wrong::kNothing;
  std::optional<Order> without_in_extents = {};
  bool harmless = false;  // what is left out is not needed
  bool sound() const { return harmless || (!without && !without_in_extents && wrong == Wrong::kNothing); }
};

// Runs a test and says in a line what came of it. Returns whether that is what should.
template <class Test>
bool run(const Run& r, uint64_t executions) {
  without = r.without, without_in_extents = r.without_in_extents, wrong = r.wrong, believed = {};
  rl::ostringstream history, progress;
  rl::test_params p;
  p.iteration_count = executions;
  p.search_type = Test::kExhaustive ? rl::fair_full_search_scheduler_type : rl::random_scheduler_type;
  p.execution_depth_limit = 100000;
  p.output_stream = &history, p.progress_stream = &progress;
  rl::simulate<Test>(p);
  std::printf("  %-62s ", r.what);
  bool expected;
  if (p.test_result == rl::test_result_success) {
    expected = r.sound() && believed.rows > 0 && believed.seams + believed.edited > 0;
    std::printf("SOUND in %s executions; rows believed %s, seams %s, edited %s", thousands(p.stop_iteration).c_str(),
                thousands(believed.rows).c_str(), thousands(believed.seams).c_str(), thousands(believed.edited).c_str());
    if (believed.extents) std::printf(", by extents %s", thousands(believed.extents).c_str());
  } else {
    const bool is_race = p.test_result == rl::test_result_data_race;
    expected = !r.sound() && (is_race || p.test_result == rl::test_result_user_assert_failed);
    std::printf("VIOLATION after %s", thousands(p.stop_iteration).c_str());
    if (!expected) std::printf("\n%s", history.str().c_str());
  }
  std::printf("%s\n", expected ? "" : "  <-- NOT WHAT IT SHOULD BE");
  std::fflush(stdout);
  return expected;
}

template <class Test>
bool run(std::initializer_list<Run> all, uint64_t executions) {
  bool ok = true;
  for (const Run& r : all) ok &= run<Test>(r, executions);
  return ok;
}

}  // namespace model
