// The protocol of observations that are stored once. The entries X and next.X of a row are stacks of `frames` frames, oldest first;
// one frame each where observations are not stacked. They lie beside the rows of a lane:
//   records  the newest frame of X of each row, and a word that tells where its other frames and a next.X are
//   heads    where observations are no stacks and words are to be short: the first unit of each *group* of rows side by side, of which the
//            words of its rows tell only how far behind it theirs is
//   units    frames that no record has, linked; those of a row are free again when its record is overwritten
//   tails    next.X of the newest rows: of the others it is found through the word of a later row. A *tail word* tells where each is
// Rows are appended and believed by `LaneProtocol`. docs/memory-model.md explains each step; the model (tests/model) runs this very
// code. `Columns` holds the words and frames, those of a store or of the model, and has
//   word(w), set_word(w, bits); link(unit), set_link(unit, next); tail_word(w), set_tail_word(w, bits): of record, unit and tail
//   head(group), set_head(group, unit): of groups of rows, row w's being number w / rows of a group
//   owns(unit): whether the unit lies in a segment of this lane, as seen after `published`
//   same(a, b, newest), is_zero(a), put(to, from): of the frames in two places; `newest`: of those that are the newest of their stacks
//   put_records(w, n): the newest frames of X of n new rows from w on; clear_words(w, n): sets their words to 0
//   each_new(from, to, ahead, differs): calls differs(w) of each row w of the batch in [from, to) whose X is not next.X of w - ahead,
//     which is in the batch, too; of observations that are no stacks
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "lane_protocol.hpp"

namespace engram {

// What stands with a record where rows form groups, in a byte. 0: next.X of row w - ahead is X of row w. Otherwise it is a unit.
struct GroupedWord {
  static constexpr uint64_t kMostRows = 64;  // of a group
  bool has_unit = false, is_in_line = false;  // `is_in_line`: its number is that of the head plus `rank`
  uint64_t rank = 0;                          // so many units of its group come before

  uint64_t pack() const { return has_unit ? 1 | uint64_t{is_in_line} << 1 | rank % kMostRows << 2 : 0; }
  static GroupedWord unpack(uint64_t bits) { return {bits % 2 != 0, (bits & 2) != 0, bits >> 2 & (kMostRows - 1)}; }
};

struct ObservationShape {
  static constexpr uint64_t kMostFrames = 15;
  uint64_t capacity = 0;           // rows of the lane
  uint64_t frames = 1;             // of a stack
  uint64_t ahead = 1;              // next.X of row w is usually X of row w + ahead
  uint64_t longest_piece = 1;      // rows that are claimed together
  uint64_t segment_units = 1;      // units of a segment
  uint64_t segments = 0;           // that the pool of the store may have, of all lanes together
  uint64_t tail_places = 0;        // from `fewest_tail_places` on; `tails`: row w has place w mod that many
  uint64_t group_rows = 0;         // of a group: a power of two, `capacity` at most; 0: each word tells its first unit
  // The oldest row's older frames are the newest ones of rows before it.
  uint64_t records() const { return capacity + frames - 1; }
  // Words of tails, row w's in place w mod that many: the piece that is being written leaves those of the rows before it alone.
  uint64_t tails() const { return longest_piece + ahead; }
  // Only the newest rows of a piece have tails, and the piece that is being written leaves those of as many rows before it alone.
  uint64_t fewest_tail_places() const { return ahead + std::min(ahead, longest_piece); }
  bool rows_have_places() const { return tail_places == tails(); }
  static uint64_t most_group_rows(uint64_t capacity) { return std::bit_floor(std::clamp<uint64_t>(capacity, 1, GroupedWord::kMostRows)); }
  uint64_t group(uint64_t w) const { return w / group_rows; }
  // Places of heads, that of a group in place group mod that many: another group has it only once the rows of this one are gone.
  uint64_t heads() const { return group_rows ? (capacity + group_rows - 1) / group_rows + 1 : 0; }
  // The newest row that needs the unit of row w: later ones of its group are found through it.
  uint64_t needs_until(uint64_t w) const { return group_rows ? w | (group_rows - 1) : w; }
  // Units that rows may need at a time.
  uint64_t most_units() const { return (2 * frames - 1) * records() + group_rows; }
  // What stands with a tail. `kind`: kMoved: only the newest frame is there, the others are those of X of its row; kWhole.
  static uint64_t tail_word(uint64_t kind, uint64_t place) { return kind | place << 2; }
  // Of any bits, torn ones too, one of the places.
  uint64_t tail_place(uint64_t w, uint64_t word) const { return (rows_have_places() ? w : word >> 2) % tail_places; }
  static uint64_t tail_kind(uint64_t word) { return word & 3; }
};

// What stands with the record of row w.
struct ObservationWord {
  enum Next : uint64_t { kSame, kMoved, kWhole };     // next.X of row w - ahead: X of w; its own X moved by one frame; units
  enum Rest : uint64_t { kEqual, kZero, kCarried };   // frames older than the run: as its oldest one; zeros; units

  Next next = kSame;
  Rest rest = kEqual;
  uint64_t run = 0;   // so many older frames of X are the newest ones of the rows before w
  uint64_t head = 0;  // the first unit: those of `next`, then those of `rest`

  uint64_t next_units(uint64_t frames) const { return next == kSame ? 0 : next == kMoved ? 1 : frames; }
  uint64_t rest_units(uint64_t frames) const { return rest == kCarried && run == 0 ? frames - 1 : 0; }
  uint64_t units(uint64_t frames) const { return next_units(frames) + rest_units(frames); }

  uint64_t pack() const { return uint64_t{next} | uint64_t{rest} << 2 | run << 4 | head << 8; }
  // Of any bits, torn ones too, a word whose run is shorter than a stack.
  static ObservationWord unpack(uint64_t bits, uint64_t frames) {
    const uint64_t next = bits & 3, rest = bits >> 2 & 3;
    return {Next{std::min<uint64_t>(next, kWhole)}, Rest{std::min<uint64_t>(rest, kCarried)}, std::min(bits >> 4 & 15, frames - 1),
            bits >> 8};
  }
};

// Where a frame lies.
struct FramePlace {
  enum Kind : uint8_t { kZeros, kRecord, kUnit, kTail, kNewX, kNewNext };
  Kind kind;        // kNewX, kNewNext: in the batch that is being written
  uint64_t number;  // the row's sequence, the unit, or the place of the tail
  uint64_t frame;   // of a tail or a batch: which frame of the stack
  bool operator==(const FramePlace&) const = default;
};
using StackPlaces = std::array<FramePlace, ObservationShape::kMostFrames>;  // the first ones: of as many frames as stacks have

// What one writer knows of the units of one lane: which are free, and whose record keeps the others. Private, and made anew from
// the words of the records by who has none: a kill can tear nothing.
class UnitPool {
 public:
  explicit UnitPool(uint64_t segment_units) : per_segment_(segment_units) {}

  // The units of rows below this one are known.
  uint64_t known() const { return known_; }
  void set_known(uint64_t published) { known_ = published; }
  // No record keeps a unit any more, and the next row has this sequence. Takes no memory.
  void forget_rows(uint64_t next) {
    std::ranges::fill(used_, 0), keepers_.clear();
    known_ = next, free_ = segments_.size() * per_segment_, lowest_ = oldest_ = 0;
  }
  // Segments below this one were looked at.
  uint64_t seen() const { return seen_; }
  // Segments come in ascending order: who looked at one has looked at those below it.
  void see(uint64_t segment, bool is_of_this_lane) {
    if (is_of_this_lane) {
      used_.resize(((segments_.size() + 1) * per_segment_ + 63) / 64);
      segments_.push_back(segment), free_ += per_segment_;
    }
    seen_ = segment + 1;
  }
  // Takes memory, so that this many units can be taken without it.
  void make_room(uint64_t units) {
    if (oldest_ > keepers_.size() / 2) keepers_.erase(keepers_.begin(), keepers_.begin() + static_cast<ptrdiff_t>(oldest_)), oldest_ = 0;
    if (keepers_.size() + units > keepers_.capacity()) keepers_.reserve(std::max(keepers_.size() + units, 2 * keepers_.capacity()));
  }
  // How many units are free once records below `oldest` are overwritten. `keepers`: so many records, the oldest ones, were counted
  // for a lower `oldest`, in `freed`.
  uint64_t free_from(uint64_t oldest, uint64_t& keepers, uint64_t& freed) const {
    for (; oldest_ + keepers < keepers_.size() && keepers_[oldest_ + keepers].first < oldest; ++keepers)
      freed += keepers_[oldest_ + keepers].second != kNoUnit;
    return free_ + freed;
  }
  void release(uint64_t oldest) {
    for (; oldest_ < keepers_.size() && keepers_[oldest_].first < oldest; ++oldest_)
      if (keepers_[oldest_].second != kNoUnit) set_free(keepers_[oldest_].second);
  }
  // Takes the lowest free unit, which is needed until the record of row w is overwritten; there is one.
  uint64_t take(uint64_t w) {
    while (~used_[lowest_] == 0) ++lowest_;
    const uint64_t at = lowest_ * 64 + static_cast<uint64_t>(std::countr_one(used_[lowest_]));
    return keep(w, segments_[at / per_segment_] * per_segment_ + at % per_segment_);
  }
  // Of a unit that is not free, and that another writer took: that one knows more rows as gone. Whether it was counted as needed with
  // the oldest rows; then it is free now.
  bool gives_up(uint64_t unit) {
    for (uint64_t i = oldest_; i < keepers_.size() && keepers_[i].first == keepers_[oldest_].first; ++i)
      if (keepers_[i].second == unit) return keepers_[i].second = kNoUnit, set_free(unit), true;
    return false;
  }
  // Notes that a unit of a segment that was seen is needed until then.
  uint64_t keep(uint64_t w, uint64_t unit) {
    keepers_.emplace_back(w, unit);  // it may fail
    const uint64_t at = place_of(unit);
    used_[at / 64] |= uint64_t{1} << at % 64, --free_;
    return unit;
  }
  // Whether a unit lies in a segment of the lane that was seen, and is free.
  bool is_free(uint64_t unit) const {
    const auto segment = std::ranges::lower_bound(segments_, unit / per_segment_);
    if (segment == segments_.end() || *segment != unit / per_segment_) return false;
    const uint64_t at = place_of(unit);
    return !(used_[at / 64] >> at % 64 & 1);
  }

 private:
  static constexpr uint64_t kNoUnit = ~uint64_t{0};
  void set_free(uint64_t unit) {
    const uint64_t at = place_of(unit);
    used_[at / 64] &= ~(uint64_t{1} << at % 64), ++free_, lowest_ = std::min(lowest_, at / 64);
  }
  uint64_t place_of(uint64_t unit) const {
    const auto segment = std::ranges::lower_bound(segments_, unit / per_segment_);
    return static_cast<uint64_t>(segment - segments_.begin()) * per_segment_ + unit % per_segment_;
  }

  uint64_t per_segment_, known_ = 0, seen_ = 0, free_ = 0, lowest_ = 0, oldest_ = 0;
  std::vector<uint64_t> segments_, used_;                // a bit for each unit of the segments
  std::vector<std::pair<uint64_t, uint64_t>> keepers_;   // (the newest row that needs it, unit), the oldest row first, from `oldest_` on
};

// One lane.
template <class Memory, class Columns>
struct ObservationProtocol {
  using Word = typename Memory::Word;
  // What `plan` decides of new rows.
  struct Plan {
    std::vector<uint64_t> words;       // of all, as they are stored
    std::vector<uint64_t> with_units;  // those of them that need units, ascending
    uint64_t units = 0;                // that these need

    void note_units(uint64_t i, uint64_t n) {
      if (n > 0) with_units.push_back(i), units += n;
    }
  };

  const LaneProtocol<Memory>& rows;
  const ObservationShape& shape;
  Columns& columns;
  Word* owners;    // of each segment of the store's pool: 0, or the lane that has it, plus 1
  uint64_t owner;  // of this lane

  // ---- the writer, which holds the lane or has the turn. Of all rows of an append: `learn`, `plan`, `prepare`; then in the
  // `rows.append` of each piece: `release`, `store_units`, `store_records`, `store_tails` ----
  // Rows below this one have no record once n rows behind `at` are claimed.
  uint64_t oldest_record(uint64_t at, uint64_t n = 0) const { return below(claimed_with(at + n), shape.records()); }
  // Reads what others wrote since this writer was here: their records keep units, too. Counted from `claimed`, as a piece that a kill
  // tore may have overwritten the words of older records; and with the records below the oldest row, whose frames and units it needs.
  void learn(UnitPool& pool) const {
    const uint64_t at = Memory::load(rows.published), oldest = oldest_record(at);
    pool.release(oldest);
    const uint64_t from = std::max({pool.known(), oldest, below(Memory::load(rows.base), shape.frames - 1)});
    const auto keep = [&](uint64_t v, uint64_t unit) {
      if (unit / shape.segment_units >= pool.seen()) see_segments(pool, unit / shape.segment_units);
      if (pool.is_free(unit) || (shape.group_rows && pool.gives_up(unit))) pool.keep(shape.needs_until(v), unit);
    };
    // Of the first group the pool may not know the units of rows that are gone, which those of the others are found through.
    bool knows_those_before = pool.known() >= from;
    for (uint64_t v = from; v < at; ++v) {
      if (!shape.group_rows) {
        each_unit(v, [&](uint64_t unit) { keep(v, unit); });
      } else if (const GroupedWord mine = grouped_word(v); mine.has_unit) {
        if (!std::exchange(knows_those_before, true) && shape.group(v) == shape.group(from))
          each_until(v, mine.rank, [&](uint64_t unit) { keep(v, unit); });
        keep(v, unit_of(v, mine));
      }
    }
    pool.set_known(std::max(pool.known(), at));
  }
  // W0: compares n new rows, which will be claimed `piece` at a time, with each other and with those before them, and decides their
  // words.
  void plan(uint64_t at, uint64_t n, uint64_t piece, Plan& plan) const {
    const uint64_t k = shape.frames, base = Memory::load(rows.base);
    plan.words.assign(n, 0), plan.with_units.clear(), plan.units = 0;
    if (k == 1) return plan_frames(at, n, piece, plan);
    uint64_t first = base;
    StackPlaces x, before, after;
    ObservationWord last;
    if (at > base) last = word(at - 1);
    for (uint64_t i = 0; i < n; ++i) {
      const uint64_t w = at + i;
      ObservationWord mine;
      place_x(w, at, x);
      if (i % piece == 0) first = oldest_row(at + std::min(n, i + piece));
      const bool has_next = w >= first + shape.ahead;
      if (has_next) mine.next = compare_next(w - shape.ahead, at, x, after);
      if (w > base) place_x(w - 1, at, before);
      // A tail that moved shares its older frames with X of its row: where X is the same as next.X, they need no second look.
      const StackPlaces& as_x = has_next && mine.next == ObservationWord::kSame ? after : x;
      if (w > base && same_older(as_x, before)) {
        mine.run = std::min(last.run + 1, k - 1);
        if (mine.run < k - 1) mine.rest = last.rest;
      } else {
        mine.rest = compare_rest(x);
      }
      plan.words[i] = mine.pack(), plan.note_units(i, mine.units(k));
      last = mine;
    }
  }
  // Whether the pool has fewer units than these rows need, each piece of them once it is claimed.
  bool lacks(const UnitPool& pool, uint64_t at, uint64_t piece, const Plan& plan) const {
    const auto units = [&](uint64_t k) {
      return shape.group_rows ? 1 : ObservationWord::unpack(plan.words[plan.with_units[k]], shape.frames).units(shape.frames);
    };
    uint64_t taken = 0, given_back = 0, counted = 0, gone = 0, keepers = 0, freed = 0;
    for (uint64_t done = 0; done < plan.words.size(); done += piece) {
      const uint64_t n = std::min<uint64_t>(piece, plan.words.size() - done), oldest = oldest_record(at + done, n);
      for (; gone < counted && shape.needs_until(at + plan.with_units[gone]) < oldest; ++gone) given_back += units(gone);
      for (; counted < plan.with_units.size() && plan.with_units[counted] < done + n; ++counted) taken += units(counted);
      if (pool.free_from(oldest, keepers, freed) + given_back < taken) return true;
    }
    return false;
  }
  // Gets the lane one more segment. `make_memory(segment)` is called first; where it throws nothing has happened. False: all segments
  // of the pool are taken.
  template <class MakeMemory>
  bool grow(UnitPool& pool, MakeMemory&& make_memory) const {
    while (pool.seen() < shape.segments) {
      const uint64_t s = pool.seen(), has = Memory::load(owners[s]);
      if (!has) {
        make_memory(s);
        Memory::replace(owners[s], 0, owner, Order::kSegmentTaken);
        continue;  // it may have become another lane's
      }
      pool.see(s, has == owner);
      if (has == owner) return true;
    }
    return false;
  }
  // After `plan`: takes the memory that these rows need. A failure has changed nothing. False: all segments of the pool are taken.
  template <class MakeMemory>
  bool prepare(UnitPool& pool, uint64_t at, uint64_t piece, const Plan& plan, MakeMemory&& make_memory) const {
    if (plan.units == 0) return true;
    pool.make_room(plan.units);
    while (lacks(pool, at, piece, plan))
      if (!grow(pool, make_memory)) return false;
    return true;
  }
  // W1, after the claim: units of records that are being overwritten are free.
  void release(UnitPool& pool, uint64_t at, uint64_t n) const { pool.release(oldest_record(at, n)); }
  // W3, of n rows from the one on that is number `from` of those that were planned behind `at`.
  void store_units(uint64_t at, uint64_t from, uint64_t n, Plan& plan, UnitPool& pool) const {
    const uint64_t k = shape.frames;
    if (shape.group_rows) return store_grouped_units(at, from, n, plan, pool);
    StackPlaces places;
    for (auto one = std::ranges::lower_bound(plan.with_units, from); one != plan.with_units.end() && *one < from + n; ++one) {
      ObservationWord mine = ObservationWord::unpack(plan.words[*one], k);
      uint64_t w = at + *one, last = 0, stored = 0;
      const auto store = [&](const FramePlace& from) {
        const uint64_t unit = pool.take(w);
        columns.put({FramePlace::kUnit, unit, 0}, from);
        if (stored++) columns.set_link(last, unit);
        else mine.head = unit;
        last = unit;
      };
      if (mine.next != ObservationWord::kSame) place_next(w - shape.ahead, at, places);
      for (uint64_t j = k - mine.next_units(k); j < k; ++j) store(places[j]);
      for (uint64_t j = 0; j < mine.rest_units(k); ++j) store({FramePlace::kNewX, w, j});
      columns.set_link(last, last);
      plan.words[*one] = mine.pack();
    }
  }
  void store_records(uint64_t at, uint64_t from, uint64_t n, const Plan& plan) const {
    if (shape.group_rows) {
      columns.clear_words(at + from, n);
      for (auto i = std::ranges::lower_bound(plan.with_units, from); i != plan.with_units.end() && *i < from + n; ++i) columns.set_word(at + *i, plan.words[*i]);
    } else {
      for (uint64_t i = from; i < from + n; ++i) columns.set_word(at + i, plan.words[i]);
    }
    columns.put_records(at + from, n);
  }
  // Those of the last of these rows, whose next.X no word tells yet.
  void store_tails(uint64_t at, uint64_t from, uint64_t n) const {
    const uint64_t k = shape.frames, begin = at + from, end = begin + n, first = std::max(begin, below(end, shape.ahead));
    uint64_t place = shape.rows_have_places() ? first : begin ? tail_place(begin - 1) + 1 : 0;
    StackPlaces x, after;
    for (uint64_t w = first; w < end; ++w, ++place) {
      place %= shape.tail_places;
      if (k == 1) {
        columns.set_tail_word(w, shape.tail_word(ObservationWord::kWhole, place));
        columns.put({FramePlace::kTail, place, 0}, next_frame(w, at));
        continue;
      }
      place_x(w, at, x), place_next(w, at, after);
      const auto kind = same_older(after, x) ? ObservationWord::kMoved : ObservationWord::kWhole;
      columns.set_tail_word(w, shape.tail_word(kind, place));
      for (uint64_t j = kind == ObservationWord::kMoved ? k - 1 : 0; j < k; ++j) columns.put({FramePlace::kTail, place, j}, after[j]);
    }
  }
  // After `rows.append`: the pool knows these rows.
  void written(UnitPool& pool, uint64_t at, uint64_t n) const { pool.set_known(at + n); }

  // ---- readers, between `rows.look` and `rows.after_reading`. Rows that are being overwritten have torn words: their places are those
  // of other frames, or zeros, and never outside the columns ----
  void find_x(uint64_t w, StackPlaces& x) const {
    const uint64_t k = shape.frames;
    const ObservationWord mine = word(w);
    for (uint64_t j = 0; j <= mine.run; ++j) x[k - 1 - j] = j <= w ? FramePlace{FramePlace::kRecord, w - j, 0} : FramePlace{};
    if (mine.run + 1 >= k) return;
    const uint64_t rest = k - 1 - mine.run;  // frames beyond the run
    if (mine.rest != ObservationWord::kCarried) {
      const FramePlace as = mine.rest == ObservationWord::kZero ? FramePlace{} : x[rest];
      for (uint64_t j = 0; j < rest; ++j) x[j] = as;
      return;
    }
    // The units are those of X where the run begins, of which the newest are still in the stack.
    const ObservationWord begin = mine.run ? word(below(w, mine.run)) : mine;
    uint64_t unit = begin.head;
    for (uint64_t skip = begin.next_units(k) + (k - 1 - rest); skip > 0; --skip) unit = next_unit(unit);
    for (uint64_t j = 0; j < rest; ++j, unit = next_unit(unit)) x[j] = unit_place(unit);
  }
  // `is_newest`: no row w + ahead was published, so that w has a tail.
  void find_next(uint64_t w, bool is_newest, StackPlaces& next) const {
    const uint64_t k = shape.frames;
    if (k == 1) {
      next[0] = find_next_frame(w, is_newest);
      return;
    }
    if (is_newest) {
      const bool moved = ObservationShape::tail_kind(columns.tail_word(w)) == ObservationWord::kMoved;
      const uint64_t place = tail_place(w);
      if (moved) moved_x(w, next);
      for (uint64_t j = moved ? k - 1 : 0; j < k; ++j) next[j] = {FramePlace::kTail, place, j};
      return;
    }
    const ObservationWord later = word(w + shape.ahead);
    if (later.next == ObservationWord::kSame) return find_x(w + shape.ahead, next);
    const bool moved = later.next == ObservationWord::kMoved;
    if (moved) moved_x(w, next);
    uint64_t unit = later.head;
    for (uint64_t j = moved ? k - 1 : 0; j < k; ++j, unit = next_unit(unit)) next[j] = unit_place(unit);
  }
  // The same where observations are no stacks.
  FramePlace find_next_frame(uint64_t w, bool is_newest) const {
    if (is_newest) return {FramePlace::kTail, tail_place(w), 0};
    const ObservationWord later = word(w + shape.ahead);
    if (later.next == ObservationWord::kSame) return {FramePlace::kRecord, w + shape.ahead, 0};
    return unit_place(later.head);
  }
  // Asked again after `rows.after_reading`, of a row whose tail was read: while it is one of the newest no other row has its tail's place.
  bool is_newest(uint64_t w, uint64_t published) const { return w + shape.ahead >= published; }
  uint64_t tail_place(uint64_t w) const { return shape.tail_place(w, columns.tail_word(w)); }
  ObservationWord word(uint64_t w) const {
    if (!shape.group_rows) return ObservationWord::unpack(columns.word(w), shape.frames);
    const GroupedWord mine = grouped_word(w);
    return mine.has_unit ? ObservationWord{.next = ObservationWord::kWhole, .head = unit_of(w, mine)} : ObservationWord{};
  }

 private:
  static uint64_t below(uint64_t w, uint64_t n) { return w > n ? w - n : 0; }
  // The oldest row once those below `to` are published: of those before it nobody asks for next.X.
  uint64_t oldest_row(uint64_t to) const { return std::max(Memory::load(rows.base), below(claimed_with(to), shape.capacity)); }
  uint64_t claimed_with(uint64_t to) const { return std::max(Memory::load(rows.claimed), to); }
  GroupedWord grouped_word(uint64_t w) const { return GroupedWord::unpack(columns.word(w)); }
  // The unit of row w, by its word.
  uint64_t unit_of(uint64_t w, const GroupedWord& mine) const {
    if (mine.is_in_line) return columns.head(shape.group(w)) + mine.rank;
    return each_until(w, mine.rank, [](uint64_t) {});
  }
  // The first units of the group of row w; returns the one behind them.
  template <class Each>
  uint64_t each_until(uint64_t w, uint64_t rank, Each&& each) const {
    uint64_t unit = columns.head(shape.group(w));
    for (; rank > 0; --rank, unit = next_unit(unit)) each(unit);
    return unit;
  }
  uint64_t next_unit(uint64_t unit) const { return columns.owns(unit) ? columns.link(unit) : unit; }
  FramePlace unit_place(uint64_t unit) const { return columns.owns(unit) ? FramePlace{FramePlace::kUnit, unit, 0} : FramePlace{}; }

  // `plan` where observations are no stacks.
  void plan_frames(uint64_t at, uint64_t n, uint64_t piece, Plan& plan) const {
    const uint64_t with_unit = shape.group_rows ? GroupedWord{.has_unit = true}.pack() : ObservationWord{.next = ObservationWord::kWhole}.pack();
    const auto differs = [&](uint64_t w) { plan.words[w - at] = with_unit, plan.note_units(w - at, 1); };
    for (uint64_t done = 0; done < n; done += piece) {
      const uint64_t end = at + std::min(n, done + piece);
      uint64_t w = std::max(at + done, oldest_row(end) + shape.ahead);
      for (; w < end && w < at + shape.ahead; ++w)
        if (!columns.same(next_frame(w - shape.ahead, at), {FramePlace::kNewX, w, 0}, true)) differs(w);
      if (w < end) columns.each_new(w, end, shape.ahead, differs);
    }
  }
  // `store_units` where rows form groups. Units of a group are linked, those of its older rows first. Nobody follows the link of the last
  // one, not that of a published row either, so that what a kill left behind it is overwritten.
  void store_grouped_units(uint64_t at, uint64_t from, uint64_t n, Plan& plan, UnitPool& pool) const {
    constexpr uint64_t kNone = ~uint64_t{0};
    uint64_t last = kNone, group = kNone;  // the last unit of the group
    GroupedWord before;                    // the word of its row
    for (auto one = std::ranges::lower_bound(plan.with_units, from); one != plan.with_units.end() && *one < from + n; ++one) {
      const uint64_t w = at + *one, unit = pool.take(shape.needs_until(w));
      if (std::exchange(group, shape.group(w)) != shape.group(w)) last = find_last_unit(at + from, w, before);
      columns.put({FramePlace::kUnit, unit, 0}, next_frame(w - shape.ahead, at));
      GroupedWord mine{.has_unit = true, .is_in_line = true};
      if (last == kNone) {
        columns.set_head(group, unit);
      } else {
        columns.set_link(last, unit);
        mine.rank = before.rank + 1, mine.is_in_line = unit == columns.head(group) + mine.rank;
      }
      plan.words[*one] = mine.pack();
      last = unit, before = mine;
    }
  }
  // The last unit of the group of row w, and the word of its row; none: no row below `at` has one that still exists once these are claimed.
  uint64_t find_last_unit(uint64_t at, uint64_t w, GroupedWord& before) const {
    const uint64_t begin = std::max(w - w % shape.group_rows, oldest_row(at));
    for (uint64_t v = at; v > begin; --v) {
      before = grouped_word(v - 1);
      if (!before.has_unit) continue;
      const uint64_t unit = unit_of(v - 1, before);
      if (columns.owns(unit)) return unit;
    }
    return ~uint64_t{0};
  }
  template <class Each>
  void each_unit(uint64_t w, Each&& each) const {
    const ObservationWord mine = word(w);
    uint64_t unit = mine.head;
    for (uint64_t n = mine.units(shape.frames); n > 0; --n, unit = next_unit(unit)) each(unit);
  }
  void see_segments(UnitPool& pool, uint64_t last) const {
    for (uint64_t s = pool.seen(); s <= last && s < shape.segments; ++s) {
      const uint64_t has = Memory::load(owners[s]);
      if (!has) return;
      pool.see(s, has == owner);
    }
  }
  // X of row w, moved by one frame: all but the newest one of the stack.
  void moved_x(uint64_t w, StackPlaces& to) const {
    find_x(w, to);
    std::rotate(to.begin(), to.begin() + 1, to.begin() + static_cast<ptrdiff_t>(shape.frames));
  }
  // Rows from `at` on are those of the batch.
  void place_x(uint64_t w, uint64_t at, StackPlaces& x) const {
    if (w < at) return find_x(w, x);
    for (uint64_t j = 0; j < shape.frames; ++j) x[j] = {FramePlace::kNewX, w, j};
  }
  void place_next(uint64_t w, uint64_t at, StackPlaces& next) const {
    if (w < at) return find_next(w, true, next);
    for (uint64_t j = 0; j < shape.frames; ++j) next[j] = {FramePlace::kNewNext, w, j};
  }
  // The same where observations are no stacks.
  FramePlace next_frame(uint64_t w, uint64_t at) const {
    return w < at ? find_next_frame(w, true) : FramePlace{FramePlace::kNewNext, w, 0};
  }
  // The newest frames differ most often: they are compared first.
  bool same(const StackPlaces& a, const StackPlaces& b) const {
    for (uint64_t j = shape.frames; j-- > 0;)
      if (!(a[j] == b[j]) && !columns.same(a[j], b[j], j + 1 == shape.frames)) return false;
    return true;
  }
  // Whether the older frames of a stack are the newest ones of another one, moved by one frame.
  bool same_older(const StackPlaces& stack, const StackPlaces& before) const {
    for (uint64_t j = shape.frames - 1; j-- > 0;)
      if (!(stack[j] == before[j + 1]) && !columns.same(stack[j], before[j + 1], false)) return false;
    return true;
  }
  ObservationWord::Next compare_next(uint64_t w, uint64_t at, const StackPlaces& later_x, StackPlaces& after) const {
    place_next(w, at, after);
    if (same(after, later_x)) return ObservationWord::kSame;
    StackPlaces x;
    place_x(w, at, x);
    return same_older(after, x) ? ObservationWord::kMoved : ObservationWord::kWhole;
  }
  ObservationWord::Rest compare_rest(const StackPlaces& x) const {
    const uint64_t k = shape.frames;
    bool equal = true, zero = true;
    for (uint64_t j = 0; j + 1 < k && (equal || zero); ++j) {
      equal = equal && columns.same(x[j], x[k - 1], false);
      zero = zero && columns.is_zero(x[j]);
    }
    return equal ? ObservationWord::kEqual : zero ? ObservationWord::kZero : ObservationWord::kCarried;
  }
};

}  // namespace engram
