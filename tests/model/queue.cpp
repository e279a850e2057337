// A lane as a queue: two writers that take turns and replace no row that may still be wanted, and two consumers that take turns, too.
// The first writer or the first consumer is killed at any of its stores. It is the library's own code that looks for room, hands out,
// lets go and seeks.
#include "memory.hpp"

#include "../../src/native/queue_protocol.hpp"

namespace model {

using Turns = engram::TurnProtocol<Memory>;

enum class Use {
  kOnce,        // rows may be overwritten when they are handed out
  kOverwrites,  // writers do not wait
  kSeeks,       // as kOnce, and consumers seek back to rows that may be gone
  kTrains,      // a learner, and after its end another one: rows may be overwritten when a model that saw them is saved
};

// Each writer appends kExtends batches of 1 to kPiece time steps of kEnvs rows, if there is room; consumers take as many.
template <uint64_t kCapacity, uint64_t kEnvs, uint64_t kPiece, uint64_t kExtends, uint64_t kTakes, bool kKillConsumer, Use kUse>
struct Consume : rl::test_suite<Consume<kCapacity, kEnvs, kPiece, kExtends, kTakes, kKillConsumer, kUse>, 4> {
  static constexpr bool kExhaustive = false;
  static constexpr bool writes(unsigned i) { return (i >= 2) == kKillConsumer; }  // thread 0 is killed
  static constexpr uint64_t kRing = kCapacity * kEnvs;
  static constexpr uint64_t kStores =
      kKillConsumer ? kTakes * (kUse == Use::kOnce ? 5 : 9) : kExtends * (5 + (1 + 2 * kEnvs) * kPiece);
  static constexpr uint64_t kMostRows = kRing + (2 * kExtends + 1) * kPiece * kEnvs;

  Lane<kRing> lane;
  // Of each row, beside its words. Relacy lets no load return what is stored later, but finds where one might: in a race.
  rl::var<uint64_t> bytes[kRing];
  Word turn, last_writer, consumer_turn, consumed, kept;
  Word seeks;  // of which writers have heard
  LaneLock of_first;  // the byte that tells that thread 0 lives
  // What is true, whatever a thread sees of it.
  uint64_t tag_of[kMostRows];
  uint64_t taken[kMostRows];  // how often, since the last seek
  struct {
    unsigned appending, consuming;  // who has a turn, counted from 1
    uint64_t seeks, consumed;       // begun; rows below it were handed out, or are gone
  } real;
  struct Model {
    uint64_t position, trained[kMostRows];  // how often, with each row
  } saved;

  void before() {
    Memory::stores_left = Memory::kNever, Memory::one_thread_stores = false;
    const uint64_t steps = rl::rand(kCapacity + 1);
    lane.begin(steps * kEnvs);
    Memory::store(lane.claimed, steps), Memory::store(lane.published, steps);
    turn.name = "turn", last_writer.name = "last writer", consumer_turn.name = "consumer's turn";
    seeks.name = "seeks", consumed.name = "consumed", kept.name = "kept";
    for (Word* w : {&turn, &last_writer, &consumer_turn, &seeks, &consumed, &kept}) Memory::store(*w, 0);
    for (auto& row : bytes) row($) = 0;
    for (uint64_t row = 0; row < kMostRows; ++row) tag_of[row] = lane.tag(row, 0), taken[row] = 0;
    real = {}, saved = {};
    of_first.begin();
    Memory::stores_left = rl::rand(static_cast<unsigned>(kStores + 1));
  }
  engram::QueueProtocol<Memory> queue() {
    return {{lane.claimed, lane.published, lane.base, lane.seams, kCapacity, kEnvs}, consumed, kept};
  }

  void thread(unsigned i) {
    try {
      if (writes(i))
        for (uint64_t k = 0; k < kExtends; ++k) extend(i);
      else if (kUse == Use::kTrains)
        train(i);
      else
        for (uint64_t k = 0; k < kTakes; ++k) take(i);
    } catch (const Killed&) {
      unsigned& has_turn = writes(i) ? real.appending : real.consuming;
      if (has_turn == i + 1) has_turn = 0;
    }
    if (i == 0) Memory::stores_left = Memory::kNever, of_first.give();
  }

  void await_turn(const Turns& turns, unsigned i, bool consumes) {
    for (int looks_at_dead = 0;; rl::yield(1, $)) {
      if (turns.take(i + 1)) return;
      const uint64_t holder = turns.holder();
      if (holder != 1 || i == 0) continue;
      if (!of_first.is_free() && !(wrong == Wrong::kLivingConsumerTakenOver && consumes)) continue;
      RL_ASSERT(++looks_at_dead < 4);  // nobody waits for a dead one
      if (wrong == Wrong::kDeadConsumerNotTakenOver && consumes) continue;
      if (turns.take(i + 1, holder)) return;
    }
  }

  // ---- writers ----
  void extend(unsigned i) {
    const Turns turns{turn, last_writer};
    const auto q = queue();
    const uint64_t early = wrong == Wrong::kRoomLookedAtEarly ? q.room() : 0;
    await_turn(turns, i, false);
    RL_ASSERT(real.appending == 0);
    real.appending = i + 1;
    const uint64_t seeks_seen = seeks.load(rl::mo_acquire, seeks.here()), at = Memory::load(lane.published);
    const uint64_t room = kUse == Use::kOverwrites ? kCapacity : wrong == Wrong::kRoomLookedAtEarly ? early : q.room();
    const uint64_t n = std::min<uint64_t>(1 + rl::rand(kPiece), room + (wrong == Wrong::kRoomOneTooMany));
    // Who has heard of a seek replaces no row that comes once more.
    RL_ASSERT(kUse != Use::kSeeks || n == 0 || seeks_seen != real.seeks || (at + n) * kEnvs <= kRing + real.consumed);
    if (n > 0) {
      turns.begin_rows(i + 1);
      q.rows.append(n, false, [&](uint64_t from) {
        for (uint64_t row = from * kEnvs; row < (from + n) * kEnvs; ++row) {
          tag_of[row] = lane.tag(row, i + 1);
          bytes[row % kRing]($) = tag_of[row];
          lane.put(row, tag_of[row]);
        }
      });
    }
    real.appending = 0;
    turns.give_back();
  }

  // ---- consumers ----
  Turns begin_consuming(unsigned i) {
    const Turns turns{consumer_turn, consumer_turn};
    if (wrong == Wrong::kTakenWithoutTurn) return turns;
    await_turn(turns, i, true);
    RL_ASSERT(real.consuming == 0);
    real.consuming = i + 1;
    return turns;
  }
  void end_consuming(const Turns& turns) {
    if (wrong == Wrong::kTakenWithoutTurn) return;
    real.consuming = 0;
    turns.give_back();
  }

  struct Batch {
    uint64_t from, end;
    typename Lane<kRing>::Copy rows[kRing];
  };
  // Of the first rows that wait, by who has the turn. Where writers wait they stay while they are copied, until somebody seeks back
  // to rows that were let go.
  Batch copy() {
    const auto q = queue();
    const auto waiting = q.waiting();
    Batch batch{waiting.from, waiting.from + std::min<uint64_t>(waiting.rows(), 1 + rl::rand(kPiece * kEnvs)), {}};
    const bool stay = kUse != Use::kOverwrites && real.seeks == 0;
    RL_ASSERT(!stay || waiting.missed == 0);
    RL_ASSERT(waiting.rows() <= kRing);
    RL_ASSERT(kUse != Use::kSeeks || Memory::load(kept) <= waiting.from);
    if (wrong == Wrong::kFreedBeforeCopy) Memory::release(kept, batch.end, Order::kCopiesBeforeKept);
    for (uint64_t row = batch.from; row < batch.end; ++row) {
      if (stay) static_cast<void>(static_cast<uint64_t>(bytes[row % kRing]($)));
      batch.rows[row % kRing] = lane.copy(row);
    }
    if (stay) return batch;  // no look back
    Protocol::after_reading();
    batch.from = std::max(batch.from, std::min(batch.end, q.rows.first_now() * kEnvs));
    return batch;
  }
  void check(const Batch& batch) {
    for (uint64_t row = batch.from; row < batch.end; ++row) RL_ASSERT(batch.rows[row % kRing].is(tag_of[row]));
    believed.rows += batch.end - batch.from, ++believed.seams;
  }

  void take(unsigned i) {
    const auto q = queue();
    const Turns turns = begin_consuming(i);
    if (kUse == Use::kSeeks && rl::rand(3) == 0) seek_back();
    const Batch batch = copy();
    real.consumed = batch.end;
    if (wrong == Wrong::kKeptBeforeConsumed) {
      Memory::release(kept, batch.end, Order::kCopiesBeforeKept), Memory::store(consumed, batch.end);
    } else if (wrong != Wrong::kDeadConsumersRowsKept || batch.from < batch.end) {
      q.hand_out(batch.end, true);  // also if there are no rows: what one has handed out that was then killed
    }
    if (wrong != Wrong::kTakenWithoutTurn) RL_ASSERT(Memory::load(kept) == Memory::load(consumed));
    check(batch);
    for (uint64_t row = batch.from; row < batch.end; ++row) RL_ASSERT(++taken[row] == 1);
    end_consuming(turns);
  }
  // To rows that were let go, too; then writers are told.
  void seek_back() {
    const auto q = queue();
    const uint64_t handed_out = Memory::load(consumed), to = handed_out - std::min<uint64_t>(handed_out, rl::rand(kRing + 1));
    for (uint64_t& times : taken) times = 0;
    ++real.seeks;
    real.consumed = to;
    if (wrong == Wrong::kSeekLeavesKept) {
      Memory::store(consumed, to);
    } else if (wrong == Wrong::kSeekOrdersNothing) {
      if (to < Memory::load(kept)) Memory::store(kept, to);
      Memory::store(consumed, to);
    } else {
      real.consumed += q.seek(to).replaced;
    }
    seeks.store(real.seeks, rl::mo_release, seeks.here());
  }

  // The second learner begins when the first has ended, with the model that was saved last.
  void train(unsigned i) {
    if (i != 0) of_first.take();
    Model model = load_model(i);
    for (uint64_t k = 0; k < kTakes; ++k) {
      const Turns turns = begin_consuming(i);
      const Batch batch = copy();
      queue().hand_out(batch.end, false);
      end_consuming(turns);
      check(batch);
      for (uint64_t row = batch.from; row < batch.end; ++row) ++model.trained[row];
      model.position = batch.end;
      switch (rl::rand(3)) {
        case 0: save_model(i, model); break;
        case 1: model = load_model(i); break;
      }
    }
  }
  Model load_model(unsigned i) {
    const Turns turns = begin_consuming(i);
    const uint64_t gone = queue().seek(saved.position).replaced;
    RL_ASSERT(gone == 0);
    end_consuming(turns);
    return saved;
  }
  // A save is whole or did not happen. A model was trained once with each row below its position.
  void save_model(unsigned i, const Model& model) {
    if (wrong == Wrong::kCommitBeforeSave) commit(i, model.position);
    saved = model;
    for (uint64_t row = 0; row < kMostRows; ++row) RL_ASSERT(saved.trained[row] == (row < saved.position));
    if (wrong != Wrong::kCommitBeforeSave) commit(i, model.position);
  }
  void commit(unsigned i, uint64_t position) {
    const Turns turns = begin_consuming(i);
    queue().let_go(position);
    end_consuming(turns);
  }
};

}  // namespace model

int main(int argc, char** argv) {
  using namespace model;
  const uint64_t executions = argc > 1 ? std::stoull(argv[1]) : 100000;
  using A = Consume<3, 1, 2, 4, 6, false, Use::kOnce>;
  using B = Consume<2, 1, 2, 4, 6, true, Use::kOnce>;
  using C = Consume<1, 1, 1, 4, 6, true, Use::kOnce>;
  using D = Consume<2, 2, 2, 4, 6, true, Use::kOnce>;
  using E = Consume<2, 1, 2, 4, 6, true, Use::kOverwrites>;
  using F = Consume<2, 1, 2, 4, 6, true, Use::kSeeks>;
  using G = Consume<2, 1, 2, 4, 6, true, Use::kTrains>;
  std::printf("A queue: two writers, two consumers, a kill, a takeover (seams: batches)\n");
  bool ok = run<A>({"everything in place: 3 rows, a writer is killed"}, executions);
  ok &= run<B>({"everything in place: 2 rows, a consumer is killed"}, executions);
  ok &= run<C>({"everything in place: 1 row, a consumer is killed"}, executions);
  ok &= run<D>({"everything in place: 2 steps of 2 environments"}, executions);
  ok &= run<E>({"everything in place: writers that do not wait"}, executions);
  ok &= run<F>({"everything in place: consumers seek back"}, executions);
  ok &= run<G>({"everything in place: a learner goes on with a saved model"}, executions);
  ok &= run<B>(
      {
          {"Q1 relaxed: the load of kept", Order::kKeptBeforeClaim},
          {"Q2 relaxed: the store of kept", Order::kCopiesBeforeKept},
          {"R1 relaxed: the load of published", Order::kPublishBeforeRows},
          {"A4 relaxed: the store of published", Order::kRowsBeforePublish},
          {"T1 relaxed: the exchange that takes a turn", Order::kTurnBeforeRows},
          {"T3 relaxed: the store that gives it back", Order::kRowsBeforeTurnEnd},
          {"the lock of a dead consumer orders nothing", {}, Wrong::kLockOrdersNothing},
          {"room looked at before the turn", {}, Wrong::kRoomLookedAtEarly},
          {"one row too many replaced", {}, Wrong::kRoomOneTooMany},
          {"kept raised before the rows are copied", {}, Wrong::kFreedBeforeCopy},
          {"kept stored before consumed", {}, Wrong::kKeptBeforeConsumed},
          {"rows taken without a turn", {}, Wrong::kTakenWithoutTurn},
          {"the turn of a dead consumer not taken over", {}, Wrong::kDeadConsumerNotTakenOver},
          {"the turn of a living consumer taken over", {}, Wrong::kLivingConsumerTakenOver},
          {"what a dead consumer handed out not let go", {}, Wrong::kDeadConsumersRowsKept},
      },
      executions);
  ok &= run<E>(
      {
          {"A2 gone: the fence after the claim", Order::kClaimBeforeRows},
          {"R3 gone: the fence before the second look at claimed", Order::kRowsBeforeCheck},
      },
      executions);
  ok &= run<F>(
      {
          {"a seek that leaves kept as it is", {}, Wrong::kSeekLeavesKept},
          {"a seek that stores kept relaxed", {}, Wrong::kSeekOrdersNothing},
      },
      executions);
  ok &= run<G>(
      {
          {"Q1 relaxed: the load of kept", Order::kKeptBeforeClaim},
          {"Q2 relaxed: the store of kept by a commit", Order::kCopiesBeforeKept},
          {"a commit before the model is saved", {}, Wrong::kCommitBeforeSave},
      },
      executions);
  return ok ? 0 : 1;
}
