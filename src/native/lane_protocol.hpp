// The protocol of one lane: the order in which its writer stores and its readers load the counters, rows and seams.
// docs/memory-model.md explains each step. `Memory` is the machine's (StdMemory) or that of the model (tests/model), which
// runs this very code under every order of loads and stores that the C++ memory model allows.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace engram {

// The accesses that need an order. The model removes each one and shows that readers then accept wrong rows.
enum class Order {
  kClaimBeforeRows,     // A2: a reader that does not see the claim sees no byte of a new row
  kRowsBeforePublish,   // A4: a reader that sees `published` sees the whole rows
  kPublishBeforeRows,   // R1: rows are read after `published`
  kRowsBeforeCheck,     // R3: and before `claimed` is looked at again
  kEditBeforeRows,      // E2: a reader that does not see `edits` odd sees no byte of a changed row
  kRowsBeforeEditEnd,   // E4: a reader that sees `edits` even sees the whole change
  kEditsBeforeRows,     // O1: an observer reads rows after `edits`
  kTurnBeforeRows,      // T1: the writer that gets the turn sees all stores of the one before it
  kRowsBeforeTurnEnd,   // T3: and gives the turn back after all its own stores
  kClaimBeforeRemoval,  // V1: a reader that sees a row's bit of removal sees the row's claim, which ends the row before it
  kKeptBeforeClaim,     // Q1: a writer that sees `kept` overwrites no row that a consumer still copies
  kCopiesBeforeKept,    // Q2: a consumer lets rows go after it has copied them
  kSegmentTaken,        // a segment of units becomes one lane's in one step; no order is needed
};

struct StdMemory {
  using Word = std::atomic<uint64_t>;
  static constexpr uint64_t kSlotsPerWord = 64;  // of seams
  static uint64_t load(const Word& w) { return w.load(std::memory_order_relaxed); }
  static uint64_t acquire(const Word& w, Order) { return w.load(std::memory_order_acquire); }
  static void store(Word& w, uint64_t x) { w.store(x, std::memory_order_relaxed); }
  static void release(Word& w, uint64_t x, Order) { w.store(x, std::memory_order_release); }
  // Stores x if the word has the value `expected`; false: it has another.
  static bool replace(Word& w, uint64_t expected, uint64_t x, Order) {
    return w.compare_exchange_strong(expected, x, std::memory_order_acquire, std::memory_order_relaxed);
  }
  static void release_fence(Order) { std::atomic_thread_fence(std::memory_order_release); }
  static void acquire_fence(Order) { std::atomic_thread_fence(std::memory_order_acquire); }
};

// A reader's view of one lane: rows [first, published) exist.
struct LaneView {
  uint64_t claimed = 0, published = 0, first = 0;
  uint64_t rows() const { return published > first ? published - first : 0; }
};

// The removed rows of a lane: a bit for each, in the order of slots, and how many are set. Who has the lane's turn sets them; its
// writer clears those of the rows that it writes, between claim and publication. The count is never less than the bits that are
// set, so that a writer that finds it 0 need not look at them.
template <class Memory>
struct RemovedRows {
  using Word = typename Memory::Word;
  static constexpr uint64_t kPerWord = Memory::kSlotsPerWord;
  Word* bits = nullptr;
  Word* count = nullptr;  // null: rows of this lane cannot be removed
  uint64_t end = 0;       // the number of bits

  bool any() const { return count && Memory::load(*count) != 0; }
  bool has(uint64_t bit) const { return bit < end && (Memory::load(bits[bit / kPerWord]) >> bit % kPerWord & 1); }
  // Whether one of n bits is set, those from `bit` on.
  bool has_any(uint64_t bit, uint64_t n) const {
    for (n = std::min(n, end - std::min(end, bit)); n > 0;) {
      const uint64_t take = std::min(n, kPerWord - bit % kPerWord);
      const uint64_t mask = take == 64 ? ~uint64_t{0} : (uint64_t{1} << take) - 1;
      if (Memory::load(bits[bit / kPerWord]) >> bit % kPerWord & mask) return true;
      bit += take, n -= take;
    }
    return false;
  }
  // False: it was set before.
  bool set(uint64_t bit) const {
    Word& word = bits[bit / kPerWord];
    const uint64_t before = Memory::load(word), one = uint64_t{1} << bit % kPerWord;
    if (before & one) return false;
    Memory::store(*count, Memory::load(*count) + 1);  // V0: a kill leaves it too high, never too low
    Memory::release(word, before | one, Order::kClaimBeforeRemoval);  // V1
    return true;
  }
  // Clears n bits, those from `bit` on.
  void clear(uint64_t bit, uint64_t n) const {
    uint64_t cleared = 0;
    for (n = std::min(n, end - std::min(end, bit)); n > 0;) {
      const uint64_t take = std::min(n, kPerWord - bit % kPerWord);
      const uint64_t mask = (take == 64 ? ~uint64_t{0} : (uint64_t{1} << take) - 1) << bit % kPerWord;
      Word& word = bits[bit / kPerWord];
      const uint64_t before = Memory::load(word);
      if (before & mask) Memory::store(word, before & ~mask), cleared += static_cast<uint64_t>(__builtin_popcountll(before & mask));
      bit += take, n -= take;
    }
    if (cleared) Memory::store(*count, Memory::load(*count) - cleared);
  }
  uint64_t bits_set() const {
    uint64_t n = 0;
    for (uint64_t w = 0; w * kPerWord < end; ++w) n += static_cast<uint64_t>(__builtin_popcountll(Memory::load(bits[w])));
    return n;
  }
  // Makes good what a writer that died in `set` or `clear` left; by who has its turn.
  void recount() const {
    if (count) Memory::store(*count, bits_set());
  }
};

// How many time steps a writer overwrites at a time; a kill in the middle loses at most these. In a shared store 64 steps and
// 64 KB of each environment; an eighth of the lane where that is less; at least one step.
constexpr uint64_t kClaimSteps = 64, kClaimBytes = 64 << 10, kClaimParts = 8;
inline uint64_t claim_steps(uint64_t capacity, uint64_t row_stride, bool others_see_it) {
  uint64_t most = capacity / kClaimParts;
  if (others_see_it) most = std::min({most, kClaimSteps, kClaimBytes / std::max<uint64_t>(1, row_stride)});
  return std::max<uint64_t>(1, most);
}

template <class Memory>
struct LaneProtocol {
  using Word = typename Memory::Word;
  static constexpr uint64_t kPerWord = Memory::kSlotsPerWord;

  Word& claimed;
  Word& published;
  Word& base;
  Word* seams;  // a bit for each time slot; null where the rows are kept elsewhere
  uint64_t capacity;
  uint64_t envs = 1;  // rows of a time slot
  RemovedRows<Memory> removed = {};

  // ---- the writer: one process at a time ----
  // Announces that the n rows after `published` are being written; returns the first one's sequence.
  uint64_t claim(uint64_t n) const {
    const uint64_t at = Memory::load(published);
#ifndef ENGRAM_PLANT_CLAIM_AFTER_COPY
    raise_claimed(at + n);                                // A1
    Memory::release_fence(Order::kClaimBeforeRows);       // A2
#endif
#ifdef ENGRAM_PLANT_PUBLISH_BEFORE_COPY
    Memory::release(published, at + n, Order::kRowsBeforePublish);
#endif
    return at;
  }
  // Writes the seam bits of n claimed rows: with `begins` the first row gets one, the others get none. None of them is removed.
  void mark(uint64_t at, uint64_t n, bool begins) const {
    if (removed.any()) clear_removed(at, n);
    mark_seams(at, n, begins);
  }
  void mark_seams(uint64_t at, uint64_t n, bool begins) const {
    if (!seams) return;
    for (uint64_t slot = at % capacity; n > 0; begins = false) {
      const uint64_t bit = slot % kPerWord, take = std::min({n, kPerWord - bit, capacity - slot});
      const uint64_t mask = (take == 64 ? ~uint64_t{0} : (uint64_t{1} << take) - 1) << bit;
      Word& word = seams[slot / kPerWord];
      const uint64_t before = Memory::load(word);
      const uint64_t after = (before & ~mask) | (begins ? uint64_t{1} << bit : 0);
      if (after != before) Memory::store(word, after);
      slot = slot + take == capacity ? 0 : slot + take, n -= take;
    }
  }
  // Makes the n rows from `at` on visible. They are completely written and their seam bits are set.
  void publish(uint64_t at, uint64_t n) const {
#ifdef ENGRAM_PLANT_CLAIM_AFTER_COPY
    raise_claimed(at + n);
#endif
    Memory::release(published, at + n, Order::kRowsBeforePublish);  // A4
  }
  // Appends one piece: `copy(sequence)` writes the rows.
  template <class Copy>
  void append(uint64_t n, bool begins, Copy&& copy) const {
    const uint64_t at = claim(n);
    copy(at);             // A3
    mark(at, n, begins);  // A3
    publish(at, n);
  }

  // ---- who removes rows, with the lane's turn ----
  // Of time step w; false: it is not there any more, or was removed before.
  bool remove(uint64_t w, uint64_t env) const {
    const LaneView v = look();
    return w >= v.first && w < v.published && removed.set(w % capacity * envs + env);
  }
  bool is_removed(uint64_t w, uint64_t env) const { return removed.has(w % capacity * envs + env); }
  // Whether one of time steps [from, to) of an environment is removed.
  bool has_removed(uint64_t from, uint64_t to, uint64_t env) const {
    if (envs > 1) {
      while (from < to && !is_removed(from, env)) ++from;
      return from < to;
    }
    const uint64_t slot = from % capacity, behind = std::min(to - from, capacity - slot);
    return removed.has_any(slot, behind) || removed.has_any(0, to - from - behind);
  }
  // The bits of n time steps, which were written or are gone.
  [[gnu::noinline]] void clear_removed(uint64_t at, uint64_t n) const {
    const uint64_t slot = at % capacity, behind = std::min(n, capacity - slot);
    removed.clear(slot * envs, behind * envs);
    if (n > behind) removed.clear(0, std::min(n - behind, capacity) * envs);
  }

  // ---- readers: `look`, read rows and seams, `after_reading`, `first_now`: rows below that must be discarded ----
  LaneView look() const {
    LaneView v;
    v.published = Memory::acquire(published, Order::kPublishBeforeRows);  // R1
    v.claimed = Memory::load(claimed);  // may be outdated: rows overwritten since then are noticed at R4
    // In an intact header `claimed` is never below `published`; a damaged one must not show more rows than fit.
    v.first = first_of(std::max(v.claimed, v.published));
    return v;
  }
  // Whether row w has a seam: another writer took over there, or the writer was told that a trajectory begins.
  bool seam(uint64_t w) const {
    const uint64_t slot = w % capacity;
    return seams && (Memory::load(seams[slot / kPerWord]) >> slot % kPerWord & 1);
  }
  // The seams of rows [from, to), at most as many rows as the lane has room for.
  std::vector<uint64_t> seams_of(uint64_t from, uint64_t to) const {
    std::vector<uint64_t> at;
    for (uint64_t w = from; seams && w < to;) {
      const uint64_t slot = w % capacity, bit = slot % kPerWord, take = std::min({to - w, kPerWord - bit, capacity - slot});
      uint64_t word = Memory::load(seams[slot / kPerWord]) >> bit;
      if (take < 64) word &= (uint64_t{1} << take) - 1;
      for (; word; word &= word - 1) at.push_back(w + static_cast<uint64_t>(__builtin_ctzll(word)));
      w += take;
    }
    return at;
  }
  static void after_reading() { Memory::acquire_fence(Order::kRowsBeforeCheck); }  // R3
  uint64_t first_now() const { return first_of(Memory::load(claimed)); }          // R4

  // ---- in-place changes, by a process that has the store to itself ----
  template <class Change>
  static void edit(Word& edits, Change&& change) {
    const uint64_t odd = Memory::load(edits) | 1;
    Memory::store(edits, odd);                      // E1
    Memory::release_fence(Order::kEditBeforeRows);  // E2
    change();                                       // E3
    Memory::release(edits, odd + 1, Order::kRowsBeforeEditEnd);  // E4
  }
  static uint64_t edits_before_reading(const Word& edits) { return Memory::acquire(edits, Order::kEditsBeforeRows); }
  static uint64_t edits_after_reading(const Word& edits) { return Memory::load(edits); }  // after `after_reading`

 private:
  void raise_claimed(uint64_t to) const {
    if (to > Memory::load(claimed)) Memory::store(claimed, to);
  }
  uint64_t first_of(uint64_t claimed_now) const {
    const uint64_t from = Memory::load(base);
    return std::max(from, claimed_now > capacity ? claimed_now - capacity : 0);
  }
};

// The right to append to a lane in which several processes take turns: a word with the number of the writer that has it.
// Numbers are never given twice. Taken for one `extend` and given back after it.
template <class Memory>
struct TurnProtocol {
  using Word = typename Memory::Word;

  Word& turn;         // 0: free
  Word& last_writer;  // the writer of the lane's newest row; 0: unknown

  uint64_t holder() const { return Memory::load(turn); }
  // `from`: 0, or the number of a writer that has died with the turn.
  bool take(uint64_t writer, uint64_t from = 0) const {
    return Memory::replace(turn, from, writer, Order::kTurnBeforeRows);  // T1
  }
  // Whether this writer wrote the newest row itself. If not, its next row needs a seam.
  bool continues(uint64_t writer) const { return Memory::load(last_writer) == writer; }
  // Called before the first row of a turn is claimed: a kill must not leave rows whose writer is unknown.
  void begin_rows(uint64_t writer) const {
    if (!continues(writer)) Memory::store(last_writer, writer);  // T2
  }
  void give_back() const { Memory::release(turn, 0, Order::kRowsBeforeTurnEnd); }  // T3
};

}  // namespace engram
