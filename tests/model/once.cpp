// Observations that are stored once: three writers that take turns in lanes with one pool of units, the first of which is killed at any
// of its stores, and a reader beside them. Who ends last has the store to itself, edits rows and appends once more.
#include "../../src/native/observation_protocol.hpp"

#include "memory.hpp"

namespace model {

using Turns = engram::TurnProtocol<Memory>;
using engram::FramePlace;
using engram::ObservationShape;
using engram::StackPlaces;
using engram::UnitPool;

// Stacks of kFrames frames; next.X of row w is that of row w + kAhead until an episode of kEpisode steps ends. Each writer appends
// kExtends batches of 1 to kPiece + 1 rows, in pieces of kPiece at most. A pool of segments of kSegmentUnits units, which are those of single rows or of groups of kGroupRows.
struct Size {
  uint64_t lanes, capacity, frames, ahead, piece, extends, episode, looks, segment_units, group_rows = 0;
};

template <Size kSize>
struct Once : rl::test_suite<Once<kSize>, 4> {
  static constexpr bool kExhaustive = false;
  static constexpr unsigned kWriters = 3;
  static constexpr uint64_t kLanes = kSize.lanes, kCapacity = kSize.capacity, kFrames = kSize.frames, kAhead = kSize.ahead;
  static constexpr uint64_t kRecords = kCapacity + kFrames - 1, kTails = kSize.piece + kAhead, kTailPlaces = kAhead + std::min(kAhead, kSize.piece), kSegmentUnits = kSize.segment_units;
  static constexpr uint64_t kGroupRows = kSize.group_rows, kHeads = kGroupRows ? (kCapacity + kGroupRows - 1) / kGroupRows + 1 : 1;
  static constexpr uint64_t kSegments = kLanes * (((2 * kFrames - 1) * (kRecords + 2) + kGroupRows) / kSegmentUnits + 2);
  static constexpr uint64_t kRowStores = 8 + kFrames * 5;
  static constexpr uint64_t kStores = kSize.extends * (kSize.piece + 1) * kRowStores;
  static constexpr uint64_t kMostRows = (kWriters * kSize.extends + 1) * (kSize.piece + 1) * 2;

  struct Truth {
    uint64_t tag, edited_tag, edited_at;  // the row has edited_tag once `edits` is edited_at; 0: it was never edited
    bool seam;
    uint64_t writer, x[kFrames], next[kFrames];
  };
  struct Stored {
    Lane<kCapacity> lane;
    Word turn, last_writer, words[kRecords], heads[kHeads], records[kRecords], tail_words[kTails], tails[kTailPlaces][kFrames];
    Truth truth[kMostRows];
    uint64_t published;  // what is true, whatever a thread sees of it
    unsigned appending;
  } stored[kLanes];
  Word owners[kSegments], links[kSegments * kSegmentUnits], units[kSegments * kSegmentUnits];
  Word ended;         // writers; the last one has the store to itself
  LaneLock of_first;  // the byte that tells that the first writer lives
  bool died;

  // The words and frames of a lane, as one thread sees them.
  struct Columns {
    Once& store;
    Stored& lane;
    uint64_t owner;
    std::vector<uint64_t> owners_before;  // of a reader that looks at them before `published`

    Word& record_word(uint64_t w) { return lane.words[w % records()]; }
    static uint64_t records() { return kRecords - (wrong == Wrong::kRecordsShort); }
    static uint64_t tails() { return kTails - (wrong == Wrong::kTailWordsShort) * kAhead; }
    uint64_t word(uint64_t w) { return Memory::load(record_word(w)); }
    void set_word(uint64_t w, uint64_t bits) { Memory::store(record_word(w), bits); }
    uint64_t link(uint64_t unit) { return Memory::load(store.links[unit]); }
    void set_link(uint64_t unit, uint64_t next) { Memory::store(store.links[unit], next); }
    static uint64_t heads() { return kHeads - (wrong == Wrong::kHeadsShort); }
    uint64_t head(uint64_t group) { return Memory::load(lane.heads[group % heads()]); }
    void set_head(uint64_t group, uint64_t unit) { Memory::store(lane.heads[group % heads()], unit); }
    uint64_t tail_word(uint64_t w) { return Memory::load(lane.tail_words[w % tails()]); }
    void set_tail_word(uint64_t w, uint64_t bits) { Memory::store(lane.tail_words[w % tails()], bits); }
    bool owns(uint64_t unit) {
      const uint64_t segment = unit / kSegmentUnits;
      if (segment >= kSegments) return false;
      return (owners_before.empty() ? Memory::load(store.owners[segment]) : owners_before[segment]) == owner;
    }
    bool same(const FramePlace& a, const FramePlace& b, bool) { return frame(a) == frame(b); }
    bool is_zero(const FramePlace& a) { return frame(a) == 0; }
    void put(const FramePlace& to, const FramePlace& from) { Memory::store(*word_of(to), frame(from)); }
    void put_records(uint64_t w, uint64_t n) {
      for (const uint64_t end = w + n; w < end; ++w) put({FramePlace::kRecord, w, 0}, {FramePlace::kNewX, w, kFrames - 1});
    }
    void clear_words(uint64_t w, uint64_t n) {
      for (const uint64_t end = w + n; w < end; ++w) set_word(w, 0);
    }
    template <class Differs>
    void each_new(uint64_t from, uint64_t to, uint64_t ahead, Differs&& differs) {
      for (uint64_t w = from; w < to; ++w)
        if (lane.truth[w - ahead].next[0] != lane.truth[w].x[0]) differs(w);
    }
    uint64_t frame(const FramePlace& place) {
      switch (place.kind) {
        case FramePlace::kZeros: return 0;
        case FramePlace::kNewX: return lane.truth[place.number].x[place.frame];
        case FramePlace::kNewNext: return lane.truth[place.number].next[place.frame];
        default: return Memory::load(*word_of(place));
      }
    }
    Word* word_of(const FramePlace& place) {
      if (place.kind == FramePlace::kRecord) return &lane.records[place.number % records()];
      if (place.kind == FramePlace::kUnit) return &store.units[place.number];
      return &lane.tails[place.number][place.frame];
    }
  };
  using Observations = engram::ObservationProtocol<Memory, Columns>;

  Columns columns(uint64_t l) { return {*this, stored[l], l + 1, {}}; }
  static ObservationShape shape() {
    return {kCapacity, kFrames, kAhead, kSize.piece, kSegmentUnits, kSegments, kTailPlaces - (wrong == Wrong::kTailPlacesShort), kGroupRows};
  }

  void before() {
    Memory::stores_left = Memory::kNever, Memory::one_thread_stores = false;
    const auto begin = [](Word& w, const char* name) { w.name = name, Memory::store(w, 0); };
    for (Stored& s : stored) {
      s.lane.begin(0);
      begin(s.turn, "turn"), begin(s.last_writer, "last writer");
      for (Word& w : s.words) begin(w, "word");
      for (Word& w : s.heads) begin(w, "head");
      for (Word& w : s.records) begin(w, "record");
      for (Word& w : s.tail_words) begin(w, "tail word");
      for (auto& tail : s.tails)
        for (Word& w : tail) begin(w, "tail");
      s.published = 0, s.appending = 0;
    }
    for (Word& w : owners) begin(w, "owner");
    for (Word& w : links) begin(w, "link");
    for (Word& w : units) begin(w, "unit");
    begin(ended, "ended");
    of_first.begin();
    died = false;
    Memory::stores_left = rl::rand(static_cast<unsigned>(kStores + 1));
  }
  void thread(unsigned i) {
    if (i == kWriters) return read();
    try {
      Writer me(i);
      for (uint64_t k = 0; k < kSize.extends; ++k) extend(me);
      const auto order = wrong == Wrong::kLockOrdersNothing ? rl::mo_relaxed : rl::mo_acq_rel;
      if (ended.fetch_add(1, order, ended.here()) + 1 == kWriters) {
        edit(me);
        extend(me);
      }
    } catch (const Killed&) {
      for (Stored& s : stored)
        if (s.appending == i + 1) s.appending = 0;
      died = true;
    }
    if (i == 0) Memory::stores_left = Memory::kNever, of_first.give();
  }

  struct Writer {
    unsigned thread;
    std::vector<UnitPool> pools;
    bool has_pool[kLanes] = {};
    typename Observations::Plan plan;
    explicit Writer(unsigned i) : thread(i), pools(kLanes, UnitPool(kSegmentUnits)) {}
    uint64_t number() const { return thread + 1; }
  };

  // Both writers of one content go on from each other's rows, and those of two do not.
  void extend(Writer& me) {
    const uint64_t l = rl::rand(kLanes), content = rl::rand(2) ? me.number() : 0;
    Stored& s = stored[l];
    const Turns turns{s.turn, s.last_writer};
    await_turn(turns, me.number());
    RL_ASSERT(s.appending == 0);
    s.appending = me.thread + 1;
    const uint64_t start = Memory::load(s.lane.published), n = 1 + rl::rand(kSize.piece + 1);
    RL_ASSERT(start == s.published);
    bool begins = start > 0 && !turns.continues(me.number());
    turns.begin_rows(me.number());
    for (uint64_t done = 0; done < n; begins = false) {
      const uint64_t take = std::min<uint64_t>(n - done, 1 + rl::rand(kSize.piece));
      append(me, l, content, take, begins);
      done += take;
    }
    s.appending = 0;
    turns.give_back();
  }
  void await_turn(const Turns& turns, uint64_t me) {
    for (; !turns.take(me); rl::yield(1, $)) {
      const uint64_t holder = turns.holder();
      if (holder != 1 || me == 1) continue;
      if (wrong != Wrong::kLivingIsTakenOver && !of_first.is_free()) continue;
      if (turns.take(me, holder)) return;
    }
  }

  void append(Writer& me, uint64_t l, uint64_t content, uint64_t n, bool begins) {
    Stored& s = stored[l];
    Columns own = columns(l);
    const Protocol p = s.lane.protocol();
    const ObservationShape shape = Once::shape();
    const Observations o{p, shape, own, owners, l + 1};
    UnitPool& pool = me.pools[l];
    auto& plan = me.plan;
    const uint64_t at = Memory::load(p.published), early = wrong == Wrong::kUnitsFreedEarly ? 1 : wrong == Wrong::kGroupFreedEarly ? kGroupRows - 1 : 0;
    if (wrong == Wrong::kClaimedIsLowered) Memory::store(p.claimed, at + n);
    for (uint64_t w = at; w < at + n; ++w) s.truth[w] = row(s, w, content, me.number(), begins && w == at);
    learn(o, pool, me.has_pool[l], at);
    o.plan(at, n, n, plan);
    std::vector<uint64_t> unannounced;
    if (!grows_wrongly() && !early) RL_ASSERT(o.prepare(pool, at, n, plan, [](uint64_t) {}));
    while (lacks(o, pool, at, n + early, plan.units)) grow(pool, l, unannounced);
    if (wrong == Wrong::kUnitsBeforeClaim) o.release(pool, at, n), o.store_units(at, 0, n, plan, pool);
    p.append(n, begins, [&](uint64_t) {
      if (wrong != Wrong::kUnitsBeforeClaim) o.release(pool, at, n + early), o.store_units(at, 0, n, plan, pool);
      o.store_records(at, 0, n, plan);
      if (wrong != Wrong::kTailsAfterPublish) o.store_tails(at, 0, n);
      for (uint64_t w = at; w < at + n; ++w) s.lane.put(w, s.truth[w].tag);
    });
    if (wrong == Wrong::kTailsAfterPublish) o.store_tails(at, 0, n);
    for (uint64_t segment : unannounced) Memory::store(owners[segment], l + 1);
    o.written(pool, at, n);
    s.published += n;
  }
  void learn(const Observations& o, UnitPool& pool, bool& has_pool, uint64_t at) {
    const bool is_new = !std::exchange(has_pool, true);
    if (wrong == (is_new ? Wrong::kUnitsForgotten : Wrong::kOthersUnitsForgotten)) pool.set_known(at);
    if (wrong == Wrong::kUnitsOfVisibleRows)
      pool.set_known(std::max(pool.known(), Memory::load(o.rows.claimed) - std::min(Memory::load(o.rows.claimed), kCapacity)));
    if (wrong == Wrong::kGroupOfGoneForgotten) learn_own_units(o, pool, at);
    o.learn(pool);
  }
  static void learn_own_units(const Observations& o, UnitPool& pool, uint64_t at) {
    while (pool.seen() < kSegments && Memory::load(o.owners[pool.seen()])) pool.see(pool.seen(), Memory::load(o.owners[pool.seen()]) == o.owner);
    for (uint64_t v = std::max(pool.known(), o.oldest_record(at)); v < at; ++v) {
      const engram::ObservationWord word = o.word(v);
      if (word.next != engram::ObservationWord::kSame && pool.is_free(word.head)) pool.keep(o.shape.needs_until(v), word.head);
    }
    pool.set_known(at);
  }
  // As `Observations::lacks`, of units that are free once n rows are claimed.
  static bool lacks(const Observations& o, const UnitPool& pool, uint64_t at, uint64_t n, uint64_t needed) {
    uint64_t keepers = 0, freed = 0;
    return pool.free_from(o.oldest_record(at, n), keepers, freed) < needed;
  }
  static bool grows_wrongly() { return wrong == Wrong::kSegmentAfterPublish || wrong == Wrong::kSegmentWithoutExchange; }
  void grow(UnitPool& pool, uint64_t l, std::vector<uint64_t>& unannounced) {
    while (Memory::load(owners[pool.seen()])) pool.see(pool.seen(), Memory::load(owners[pool.seen()]) == l + 1);
    if (wrong == Wrong::kSegmentAfterPublish) unannounced.push_back(pool.seen());
    else Memory::store(owners[pool.seen()], l + 1);
    pool.see(pool.seen(), true);
  }

  // ---- what rows have ----
  static Truth row(const Stored& s, uint64_t w, uint64_t content, uint64_t writer, bool seam) {
    Truth t{s.lane.tag(w, writer), 0, 0, seam, writer, {}, {}};
    put_x(content, w, t.x);
    put_next(content, w, t.next);
    return t;
  }
  static uint64_t frame_of(uint64_t content, uint64_t w) { return 100000 * content + 10 * w + 5; }
  // The first stack of an episode repeats its frame, has others, or zeros.
  static void put_x(uint64_t content, uint64_t w, uint64_t* x) {
    const uint64_t start = w - w % kSize.episode, kind = w / kSize.episode % 3;
    for (uint64_t age = 0; age < kFrames; ++age) {
      const uint64_t first = frame_of(content, start);
      const uint64_t older = kind == 0 ? first : kind == 1 ? first + 1000 + age - (w - start) : 0;
      x[kFrames - 1 - age] = age <= w - start ? frame_of(content, w - age) : older;
    }
  }
  // Behind the last step of an episode comes one more frame, or another stack.
  static void put_next(uint64_t content, uint64_t w, uint64_t* next) {
    if (w % kSize.episode + kAhead < kSize.episode) return put_x(content, w + kAhead, next);
    uint64_t x[kFrames];
    put_x(content, w, x);
    const bool moves = w / kSize.episode % 2 == 0;
    for (uint64_t j = 0; j < kFrames; ++j)
      next[j] = moves && j + 1 < kFrames ? x[j + 1] : frame_of(content, w) + (moves ? 2 : 5000 + j);
  }

  void edit(const Writer& me) {
    for (Stored& s : stored) {
      const engram::LaneView v = s.lane.protocol().look();
      if (v.rows() == 0) continue;
      const uint64_t w = v.first + rl::rand(static_cast<unsigned>(v.rows()));
      s.truth[w].edited_tag = s.lane.tag(w, 500 + me.number()), s.truth[w].edited_at = Memory::load(s.lane.edits) + 2;
      Protocol::edit(s.lane.edits, [&] { s.lane.put(w, s.truth[w].edited_tag); });
    }
  }

  void read() {
    for (unsigned look = 0; look < kSize.looks * kLanes; ++look) read(look % kLanes, false);
  }
  void read(uint64_t l, bool at_rest) {
    Stored& s = stored[l];
    Columns own = columns(l);
    const Protocol p = s.lane.protocol();
    const ObservationShape shape = Once::shape();
    const Observations o{p, shape, own, owners, l + 1};
    struct {
      typename Lane<kCapacity>::Copy row;
      bool seam, is_newest;
      uint64_t x[kFrames], next[kFrames];
    } copies[kCapacity];
    const uint64_t edits = Protocol::edits_before_reading(s.lane.edits);
    if (edits % 2 == 1) return;
    if (wrong == Wrong::kSegmentsBeforeRows)
      for (const Word& segment : owners) own.owners_before.push_back(Memory::load(segment));
    const engram::LaneView v = p.look();
    uint64_t first = v.first;
    if (wrong == Wrong::kClaimReadEarly) first = std::max(first, p.first_now());
    for (uint64_t w = v.first; w < v.published; ++w) {
      auto& copy = copies[w % kCapacity];
      StackPlaces places;
      copy.row = s.lane.copy(w), copy.seam = p.seam(w);
      o.find_x(w, places);
      for (uint64_t j = 0; j < kFrames; ++j) copy.x[j] = own.frame(places[j]);
      copy.is_newest = o.is_newest(w, wrong == Wrong::kNewestAskedTwice ? Memory::load(p.published) : v.published);
      o.find_next(w, copy.is_newest, places);
      for (uint64_t j = 0; j < kFrames; ++j) copy.next[j] = own.frame(places[j]);
    }
    Protocol::after_reading();
    if (wrong != Wrong::kClaimReadEarly) first = std::max(first, p.first_now());
    if (Protocol::edits_after_reading(s.lane.edits) != edits) return;
    for (uint64_t w = first; w < v.published; ++w) {
      const auto& copy = copies[w % kCapacity];
      const Truth& t = s.truth[w];
      const bool is_edited = t.edited_at && edits >= t.edited_at;
      RL_ASSERT(copy.row.is(is_edited ? t.edited_tag : t.tag));
      RL_ASSERT(copy.seam == t.seam);
      RL_ASSERT(std::equal(copy.x, copy.x + kFrames, t.x));
      ++believed.rows, believed.seams += t.seam, believed.edited += is_edited;
      if (copy.is_newest && wrong != Wrong::kTailsNotChecked && !o.is_newest(w, Memory::load(p.published))) {
        RL_ASSERT(!at_rest);
        continue;
      }
      RL_ASSERT(std::equal(copy.next, copy.next + kFrames, t.next));
    }
  }
  // At rest each published row is whole, whoever died.
  void after() {
    for (uint64_t l = 0; l < kLanes; ++l) read(l, true);
  }
};

}  // namespace model

int main(int argc, char** argv) {
  using namespace model;
  const uint64_t executions = argc > 1 ? std::stoull(argv[1]) : 1000000;
  std::printf("Observations stored once: three writers in turns, a kill, takeovers, one pool of units, edits\n");
  constexpr Size one{1, 3, 3, 1, 2, 2, 3, 4, 2}, two{2, 2, 2, 1, 2, 2, 2, 2, 2}, few{1, 1, 2, 1, 1, 2, 2, 9, 2};
  constexpr Size edited{1, 2, 2, 1, 1, 1, 2, 9, 2}, narrow{1, 4, 1, 1, 1, 3, 3, 6, 2};
  constexpr Size grouped{1, 4, 1, 1, 2, 3, 2, 3, 2, 4};
  using Test = Once<one>;
  bool ok = run<Test>({"everything in place: 3 rows, stacks of 3"}, executions);
  ok &= run<Once<two>>({"everything in place: 2 lanes of 2 rows, stacks of 2"}, executions);
  ok &= run<Once<Size{1, 2, 1, 1, 1, 3, 3, 4, 2}>>({"everything in place: 2 rows, no stacks, pieces of 1"}, executions);
  ok &= run<Once<Size{1, 1, 3, 1, 1, 3, 3, 4, 2}>>({"everything in place: 1 row, stacks of 3"}, executions);
  ok &= run<Once<Size{1, 4, 2, 2, 2, 2, 3, 3, 2}>>({"everything in place: 4 rows, stacks of 2, n-step rows of 2"}, executions);
  ok &= run<Once<Size{1, 4, 2, 2, 3, 2, 3, 3, 2}>>({"everything in place: 4 rows, stacks of 2, n-step rows of 2, pieces of 3"}, executions);
  ok &= run<Once<Size{1, 4, 1, 3, 2, 2, 4, 3, 2}>>({"everything in place: 4 rows, no stacks, n-step rows of 3"}, executions);
  ok &= run<Once<Size{1, 4, 1, 1, 1, 4, 2, 4, 2, 2}>>({"everything in place: 4 rows, no stacks, groups of 2"}, executions);
  ok &= run<Once<grouped>>({"everything in place: 4 rows, no stacks, groups of 4, pieces of 2"}, executions);
  ok &= run<Once<Size{1, 5, 1, 2, 2, 3, 2, 3, 2, 4}>>({"everything in place: 5 rows, no stacks, groups of 4, n-step rows of 2"}, executions);
  ok &= run<Once<Size{2, 2, 1, 1, 1, 3, 2, 3, 2, 2}>>({"everything in place: 2 lanes of 2 rows, no stacks, groups of 2"}, executions);
  // What a lane's units were written with comes to others by the turn: of a segment only counts that one writer gets it.
  ok &= run<Once<two>>({"the exchange that takes a segment relaxed, which does no harm", Order::kSegmentTaken, {}, {}, true}, executions);
  ok &= run<Test>(
      {
          {"A4 relaxed: the store of published", Order::kRowsBeforePublish},
          {"R1 relaxed: the load of published", Order::kPublishBeforeRows},
          {"T1 relaxed: the exchange that takes the turn", Order::kTurnBeforeRows},
          {"T3 relaxed: the store that gives it back", Order::kRowsBeforeTurnEnd},
          {"the lock of a dead writer orders nothing", {}, Wrong::kLockOrdersNothing},
          {"the turn of a living writer taken over", {}, Wrong::kLivingIsTakenOver},
          {"claimed lowered by who takes over", {}, Wrong::kClaimedIsLowered},
          {"units freed one row early", {}, Wrong::kUnitsFreedEarly},
          {"one record less", {}, Wrong::kRecordsShort},
          {"units written before the claim", {}, Wrong::kUnitsBeforeClaim},
          {"all units free for who is new in the lane", {}, Wrong::kUnitsForgotten},
          {"only the units of visible rows kept", {}, Wrong::kUnitsOfVisibleRows},
          {"the units of others' rows not looked at again", {}, Wrong::kOthersUnitsForgotten},
          {"as many words of tails as rows in a piece", {}, Wrong::kTailWordsShort},
          {"one place less for tails", {}, Wrong::kTailPlacesShort},
          {"tails written after published", {}, Wrong::kTailsAfterPublish},
          {"asked again which rows are the newest", {}, Wrong::kNewestAskedTwice},
          {"owners of segments looked at before published", {}, Wrong::kSegmentsBeforeRows},
          {"a segment announced after published", {}, Wrong::kSegmentAfterPublish},
      },
      executions);
  ok &= run<Once<few>>(
      {
          {"claimed read before the copy", {}, Wrong::kClaimReadEarly},
          {"R3 gone: the fence before the second look", Order::kRowsBeforeCheck},
          {"A2 gone: the fence after the claim", Order::kClaimBeforeRows},
      },
      executions);
  ok &= run<Once<edited>>(
      {
          {"E2 gone: the fence after edits became odd", Order::kEditBeforeRows},
          {"E4 relaxed: the store of even edits", Order::kRowsBeforeEditEnd},
          {"O1 relaxed: the load of edits", Order::kEditsBeforeRows},
      },
      executions);
  ok &= run<Once<grouped>>(
      {
          {"units of a group freed with its first row", {}, Wrong::kGroupFreedEarly},
          {"units of rows that are gone forgotten, before others of their group", {}, Wrong::kGroupOfGoneForgotten},
          {"one head less", {}, Wrong::kHeadsShort},
      },
      executions);
  ok &= run<Once<narrow>>({"tails not checked", {}, Wrong::kTailsNotChecked}, executions);
  ok &= run<Once<two>>({"a segment taken by a load and a store", {}, Wrong::kSegmentWithoutExchange}, executions);
  return ok ? 0 : 1;
}
