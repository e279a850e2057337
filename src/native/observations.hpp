// Observations that are stored once: the columns of `ObservationProtocol`, and what appends to them and reads from them.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "crc32c.hpp"
#include "leaf_source.hpp"
#include "observation_memory.hpp"
#include "observation_protocol.hpp"

namespace engram {

// The observations of all rows. A *record* is the newest frames of all keys that are stored once, side by side. Each environment of
// a lane has columns and units of its own: for the protocol it is a lane.
//
// For codecs and batches rows have these leaves, too: X and next.X of each key lie one after the other behind the bytes of a stored row.
// Where observations are small and no stacks, X lies in the row itself, with a word of one byte, and only next.X behind it.
class Observations {
 public:
  using Rows = LaneProtocol<StdMemory>;
  // X and next.X of one key: so many frames one after the other, as many as those of every other key, or one.
  struct KeyGeometry {
    uint64_t frames = 1, frame_bytes = 0;
    uint64_t bytes() const { return frames * frame_bytes; }
  };
  // Where the word and X of each key lie in a row.
  struct InRow {
    uint64_t word = 0;
    std::vector<uint64_t> x;
    uint64_t row_stride = 0;
  };
  struct Geometry {
    uint64_t lanes = 1, envs = 1, capacity = 1, ahead = 1, longest_piece = 1;
    uint64_t first_byte = 0;  // where the first X lies: behind the bytes of a stored row
    std::vector<KeyGeometry> keys;
    std::optional<InRow> in_row;  // none: words and records have columns of their own
    bool ends = false;            // of records, units and tails
    uint32_t id_crc = 0;          // of the store, with which those of the ends begin
    uint64_t tail_places = 0, segment_units = 0;  // 0: as few and as many as take the least memory
  };
  static constexpr uint64_t kMostBytesInRow = 512;
  // X and next.X of one key, in the batch that is appended.
  struct Key {
    LeafSource x, next;
  };
  struct Leaf {
    size_t key;
    bool is_next;
  };
  // Where one leaf of rows goes: that of row i to array + i * stride.
  struct Target {
    Leaf leaf;
    uint8_t* array;
    ptrdiff_t stride;
  };

  // What decides where everything lies in a file, beside the geometry.
  struct Sizes {
    uint64_t longest_piece, tail_places, segment_units, sure_bytes;  // the last: of all but the units
    bool operator==(const Sizes&) const = default;
  };

  // `rows`: of the store; null where these have nothing of observations. `file`: of the store; none: private memory.
  explicit Observations(Geometry geometry, uint8_t* rows = nullptr, const std::optional<ObservationMemory::File>& file = std::nullopt)
      : geometry_(std::move(geometry)), offsets_(offsets_of(geometry_)), record_bytes_(record_bytes(geometry_)), columns_count_(geometry_.lanes * geometry_.envs),
        shape_(shape_of(geometry_)), memory_(places_of(geometry_), file), tail_stride_(memory_.places().tail_stride) {
    if (geometry_.in_row && (!rows || geometry_.ends || shape_.frames > 1 || record_bytes_ > kMostBytesInRow || geometry_.in_row->x.size() != geometry_.keys.size()))
      throw std::invalid_argument("only small single frames lie in rows");
    const ObservationPlaces& places = memory_.places();
    shape_.segment_units = places.segment_units, shape_.segments = places.segments;
    if (geometry_.in_row) {
      first_word_ = rows + geometry_.in_row->word, first_record_ = rows;
      word_stride_ = record_stride_ = geometry_.in_row->row_stride;
      record_offsets_ = geometry_.in_row->x;
    } else {
      first_word_ = memory_.at(places.words), first_record_ = memory_.at(places.records);
      word_stride_ = sizeof(std::atomic<uint64_t>), record_stride_ = places.record_stride;
      record_offsets_ = offsets_;
    }
    pools_.assign(columns_count_, UnitPool(shape_.segment_units));
    planned_.resize(geometry_.envs);
    restored_ = std::make_unique<Counters[]>(geometry_.lanes);
  }
  static Sizes sizes_of(const Geometry& g) {
    const ObservationPlaces places = places_of(g);
    return {g.longest_piece, shape_of(g).tail_places, places.segment_units, places.units};
  }
  // The geometry of a store that was made with these sizes; its other members are there.
  static Geometry as_made(Geometry g, const Sizes& sizes) {
    const uint64_t longest = g.longest_piece;
    g.longest_piece = sizes.longest_piece, g.tail_places = sizes.tail_places, g.segment_units = sizes.segment_units;
    const bool are_possible = g.longest_piece >= 1 && g.longest_piece <= longest && g.segment_units >= 1 &&
                              g.segment_units <= std::max<uint64_t>(1, ObservationPlaces::kMostPages * kPage / places_of(g).unit_stride);
    const ObservationShape shape = are_possible ? shape_of(g) : ObservationShape{};
    if (!are_possible || shape.tail_places < shape.fewest_tail_places() || shape.tail_places > shape.tails() || sizes_of(g) != sizes)
      throw std::runtime_error("its observations lie elsewhere than this engram looks for them; open it with the one that made it");
    return g;
  }
  // The sizes of a store that tells three numbers, as those did that were made before tails had places.
  static Sizes sizes_before(Geometry g, uint64_t longest_piece, uint64_t segment_bytes, uint64_t sure_bytes) {
    g.longest_piece = longest_piece, g.tail_places = longest_piece + g.ahead;
    const uint64_t units = ObservationPlaces::units_before(shape_of(g), record_bytes(g), places_of(g).unit_stride);
    g.segment_units = units;
    return {longest_piece, g.tail_places, places_of(g).segment_bytes == segment_bytes ? units : 0, sure_bytes};
  }

  const Geometry& geometry() const { return geometry_; }
  uint64_t bytes() const { return memory_.bytes(); }
  // Of a file that other processes may cut short, counted from where the observations begin.
  uint64_t bytes_in_use() const { return memory_.bytes_in_use(); }
  // Whether the file has all segments that lanes have.
  bool has_all_segments() const { return memory_.is_whole(); }
  bool has_ends() const { return geometry_.ends; }
  bool are_in_rows() const { return geometry_.in_row.has_value(); }
  // Bytes of the leaves that lie behind a stored row.
  uint64_t bytes_of_leaves() const {
    uint64_t bytes = 0;
    for (const KeyGeometry& key : geometry_.keys) bytes += (are_in_rows() ? 1 : 2) * key.bytes();
    return bytes;
  }
  // Every leaf behind a stored row; `stride`: where it lies in the rows of codecs.
  std::vector<Target> targets() const {
    std::vector<Target> all;
    uint64_t at = geometry_.first_byte;
    for (size_t k = 0; k < geometry_.keys.size(); ++k)
      for (const bool is_next : {false, true}) {
        if (!is_next && are_in_rows()) continue;
        all.push_back({{k, is_next}, nullptr, static_cast<ptrdiff_t>(at)});
        at += geometry_.keys[k].bytes();
      }
    return all;
  }
  // The leaf that lies there in the rows of codecs.
  std::optional<Leaf> leaf(uint64_t offset, uint64_t bytes) const {
    uint64_t behind = geometry_.first_byte;
    for (size_t k = 0; k < geometry_.keys.size(); ++k)
      for (const bool is_next : {false, true}) {
        const bool is_in_row = !is_next && are_in_rows();
        if ((is_in_row ? geometry_.in_row->x[k] : behind) == offset && geometry_.keys[k].bytes() == bytes) return Leaf{k, is_next};
        if (!is_in_row) behind += geometry_.keys[k].bytes();
      }
    return std::nullopt;
  }
  // The leaves of a batch: those that lie in rows, and the observations; X may be both.
  struct Divided {
    std::vector<LeafSource> in_row;
    std::vector<Key> keys;
  };
  // What an append divides; the next one has it in the same memory. Throws where an observation is missing.
  const Divided& divide(const std::vector<LeafSource>& leaves) {
    auto& [in_row, keys] = divided_;
    in_row.clear(), keys.assign(geometry_.keys.size(), {});
    for (const LeafSource& one : leaves) {
      const auto observed = leaf(one.offset, one.bytes);
      const bool is_observed = observed && one.bytes > 0;
      if (is_observed) (observed->is_next ? keys[observed->key].next : keys[observed->key].x) = one;
      if (!is_observed || (!observed->is_next && are_in_rows())) in_row.push_back(one);
    }
    for (const Key& key : keys)
      if (!key.x.array || !key.next.array) throw std::invalid_argument("the layout is not that of the rows of this store");
    return divided_;
  }

  // ---- the writer: `plan` of all n steps that it appends behind `published`, then `store` in the claim of each piece. The caller keeps
  // other writers out ----
  // Takes the memory that these steps need: a failure leaves everything as it was. `from`: the first one's step in the batch.
  // `incarnation`: of the store's rows, all of which another process may have replaced.
  void plan(const Rows& rows, uint64_t incarnation, uint64_t lane, uint64_t n, const std::vector<Key>& keys, uint64_t from) {
    if (incarnation != incarnation_) pools_.assign(columns_count_, UnitPool(shape_.segment_units)), incarnation_ = incarnation;
    planned_at_ = StdMemory::load(rows.published), planned_from_ = from;
    for (uint64_t env = 0; env < geometry_.envs; ++env) {
      const Columns columns = columns_of(lane, env, {&keys, planned_at_, from});
      const Protocol protocol = protocol_of(rows, columns);
      UnitPool& pool = pools_[columns.owner - 1];
      protocol.learn(pool);
      protocol.plan(planned_at_, n, shape_.longest_piece, planned_[env]);
      const auto make = [&](uint64_t segment) { memory_.make_segment(segment); };
      if (!protocol.prepare(pool, planned_at_, shape_.longest_piece, planned_[env], make)) throw std::bad_alloc();
    }
  }
  // `term`: of the lane.
  void store(const Rows& rows, uint64_t lane, uint64_t at, uint64_t n, const std::vector<Key>& keys, uint32_t term) {
    const uint64_t from = at - planned_at_;
    for (uint64_t env = 0; env < geometry_.envs; ++env) {
      const Columns columns = columns_of(lane, env, {&keys, planned_at_, planned_from_});
      const Protocol protocol = protocol_of(rows, columns);
      UnitPool& pool = pools_[columns.owner - 1];
      protocol.release(pool, at, n);
      protocol.store_units(planned_at_, from, n, planned_[env], pool);
      protocol.store_records(planned_at_, from, n, planned_[env]);
      protocol.store_tails(planned_at_, from, n);
      if (geometry_.ends) seal(columns, StdMemory::load(rows.base), at, n, term);
      protocol.written(pool, at, n);
    }
  }
  // Forgets all rows of a lane, which no reader believes any more; the next one has this sequence. Takes no memory.
  void forget(uint64_t lane, uint64_t next) {
    for (uint64_t env = 0; env < geometry_.envs; ++env) {
      const Columns columns = columns_of(lane, env, {});
      // Whoever learns which units are used reads these words, too, of rows that were never written.
      for (uint64_t w = next - std::min(next, shape_.frames - 1); w < next; ++w) columns.set_word(w, 0);
      UnitPool& pool = pools_[columns.owner - 1];
      pool.forget_rows(next);
    }
  }
  // In a forked child: what the parent's writer knew may be halfway, as it was when a thread that is not here was writing. It is left
  // as it is.
  void after_fork() {
    new (&pools_) std::vector<UnitPool>(columns_count_, UnitPool(shape_.segment_units));
    new (&planned_) std::vector<Protocol::Plan>(geometry_.envs);
    new (&divided_) Divided();
  }
  // Rows of a lane are restored in their order, from sequence `base` on, and are seen by no reader until then.
  void begin_restore(uint64_t lane, uint64_t base) {
    Counters& c = restored_[lane];
    forget(lane, base);
    c.claimed.store(base), c.published.store(base), c.base.store(base);
  }
  // Their counters: `published` is the sequence of the next one.
  Rows restoring(uint64_t lane) {
    Counters& c = restored_[lane];
    return {c.claimed, c.published, c.base, nullptr, geometry_.capacity};
  }
  // Whether rows [base, published) of a lane can be shown: all of them were restored, or there are none.
  bool end_restore(uint64_t lane, uint64_t base, uint64_t published) {
    Counters& c = restored_[lane];
    const bool are_there = base == published || (c.base.load() <= base && c.published.load() == published);
    if (base == published) forget(lane, published);
    c.claimed.store(0), c.published.store(0), c.base.store(0);
    return are_there;
  }

  // ---- what a power cut leaves: of stores whose records, units and tails have ends ----
  // Whether record and units of row w are whole, and of the row of this term.
  bool is_whole(uint64_t lane, uint64_t env, uint64_t w, uint32_t term) const {
    const Columns columns = columns_of(lane, env, {});
    const FrameEnd& end = columns.record_end(w);
    return (planted(1) || end.sequence == w) && (planted(2) || end.term == term) && (planted(3) || end.crc == columns.record_crc(w, end)) && (planted(4) || has_units(columns, w, planted(2) ? end.term : term));
  }
  // Whether row w + 1 was written behind row w of this term, and row w + `ahead` with this row there.
  bool is_linked(uint64_t lane, uint64_t env, uint64_t w, uint32_t term) const { return planted(9) || columns_of(lane, env, {}).record_end(w + 1).before == term + 1; }
  bool is_told(uint64_t lane, uint64_t env, uint64_t w, uint32_t term) const {
    return planted(10) || columns_of(lane, env, {}).record_end(w + shape_.ahead).ahead == term + 1;
  }
  // Whether X of row w, which is whole, is: its older frames may be those of rows that are not stored any more.
  bool has_x(uint64_t lane, uint64_t env, uint64_t w) const {
    const Columns columns = columns_of(lane, env, {});
    const ObservationWord word = ObservationWord::unpack(columns.word(w), shape_.frames);
    if (planted(11)) return true;
    if (word.run > w) return false;
    for (uint64_t v = w; v > w - word.run; --v) {
      const uint32_t before = columns.record_end(v).before;
      if (!before || !is_whole(lane, env, v - 1, before - 1)) return false;
    }
    return true;
  }
  uint64_t ahead() const { return shape_.ahead; }
  // Whether there is a whole tail of row w of this term.
  bool has_tail(uint64_t lane, uint64_t env, uint64_t w, uint32_t term) const { return find_tail(columns_of(lane, env, {}), lane, env, w, term); }
  // Whether the one that is read is.
  bool has_tail_in_place(uint64_t lane, uint64_t env, uint64_t w, uint32_t term) const {
    const Columns columns = columns_of(lane, env, {});
    return is_tail(columns, columns.tail(w), w, term);
  }
  // Puts the tails of the newest rows, from `first` on and of these terms, in places of theirs: those that are found, or, where there is
  // none, next.X as the row behind tells it.
  void keep_tails(const Rows& rows, uint64_t lane, uint64_t env, uint64_t first, const std::vector<uint32_t>& terms) {
    const Columns columns = columns_of(lane, env, {});
    std::vector<std::vector<uint8_t>> found(terms.size());  // a copy: their places may become those of others
    for (size_t i = 0; i < terms.size(); ++i)
      if (uint8_t* const tail = find_tail(columns, lane, env, first + i, terms[i])) found[i].assign(tail, tail + tail_stride_);
    for (size_t i = 0; i < terms.size(); ++i) {
      const uint64_t w = first + i, place = w % shape_.tail_places;
      uint8_t* const to = columns.tail_at(place);
      if (!found[i].empty()) {
        std::memcpy(to, found[i].data(), tail_stride_);
        columns.set_tail_word(w, shape_.tail_word(columns.tail_end(to).before, place));
        continue;
      }
      StackPlaces next;
      protocol_of(rows, columns).find_next(w, false, next);
      for (uint64_t j = 0; j < shape_.frames; ++j) columns.put({FramePlace::kTail, place, j}, next[j]);
      columns.set_tail_word(w, shape_.tail_word(ObservationWord::kWhole, place));
      seal_tail(columns, w, terms[i]);
    }
  }
  // Rows [base, published) are those that are kept. Records below them that are not whole keep no units.
  void forget_records_below(uint64_t lane, uint64_t env, uint64_t base) {
    const Columns columns = columns_of(lane, env, {});
    for (uint64_t w = base - std::min(base, shape_.frames - 1); w < base && !planted(15); ++w)
      if (!is_whole(lane, env, w, columns.record_end(w).term)) columns.set_word(w, 0);
  }
  void forget_missing_segments() { memory_.forget_what_is_missing(); }
  // Before a flush: copies the tails of the newest rows to where later rows do not overwrite them. Rows below `durable` were flushed
  // before: their copies stay until the next flush. Returns `published`: the flush is of the rows below it.
  uint64_t keep_durable_tails(const Rows& rows, uint64_t lane, uint64_t durable) {
    LaneView v = rows.look();
    while (!planted(16) && !copy_newest_tails(rows, lane, v, durable)) v = rows.look();
    return v.published;
  }
  // False: some of the newest rows of `v` were overwritten meanwhile.
  bool copy_newest_tails(const Rows& rows, uint64_t lane, const LaneView& v, uint64_t durable) {
    const uint64_t first = std::max(v.first, v.published - std::min(v.published, shape_.ahead));
    for (uint64_t env = 0; env < geometry_.envs; ++env) {
      const Columns columns = columns_of(lane, env, {});
      const uint64_t which = durable > 0 && has_durable_tail(columns, lane, env, 0, durable - 1) && !planted(17) ? 1 : 0;
      for (uint64_t w = first; w < v.published; ++w) copy_tail(rows, columns, w, durable_tail(lane, env, which, w));
    }
    Rows::after_reading();
    return rows.first_now() <= first;
  }
  // Each part of the memory of row w: `part(begin, bytes)`.
  template <class Part>
  void each_part(uint64_t lane, uint64_t env, uint64_t w, Part&& part) const {
    const Columns columns = columns_of(lane, env, {});
    part(columns.word_at(w), sizeof(uint64_t));
    part(columns.record(w), record_stride_);
    part(columns.tail(w), tail_stride_);
    each_unit(columns, w, [&](uint64_t unit, uint64_t) { part(memory_.unit_at(unit), memory_.places().unit_stride); });
  }
  // All that is neither a record nor a unit.
  std::pair<uint8_t*, uint64_t> rest() const { return {memory_.at(0), memory_.places().records}; }

  // ---- readers, between `rows.look` and `rows.after_reading` ----
  void prefetch(uint64_t lane, uint64_t env, uint64_t w) const {
    const uint64_t place = (lane * geometry_.envs + env) * shape_.records() + w % shape_.records();
    __builtin_prefetch(first_word_ + place * word_stride_);
    const uint8_t* const record = first_record_ + place * record_stride_;
    for (uint64_t b = 0; b < std::min<uint64_t>(record_bytes_, 512); b += 64) __builtin_prefetch(record + b);
  }
  void advise_random() const { memory_.advise_random(); }
  // What `copy` reads of row w in the store's file, but for words and tails: `range(offset, bytes)`, frames that lie side by side together.
  template <class Range>
  void each_range(const Rows& rows, uint64_t lane, uint64_t env, uint64_t w, uint64_t published, const std::vector<Target>& to, Range&& range) const {
    const Columns columns = columns_of(lane, env, {});
    const Protocol protocol = protocol_of(rows, columns);
    StackPlaces places;
    const uint8_t *begin = nullptr, *end = nullptr;
    const auto tell = [&] {
      if (begin) range(memory_.file_offset(begin), static_cast<uint64_t>(end - begin));
    };
    const auto add_all = [&] {
      for (uint64_t j = 0; j < shape_.frames; ++j) {
        const FramePlace& place = places[j];
        if (place.kind != FramePlace::kRecord && place.kind != FramePlace::kUnit) continue;
        const bool is_record = place.kind == FramePlace::kRecord;
        const uint8_t* const at = is_record ? columns.record(place.number) : memory_.unit_at(place.number);
        const uint8_t* const behind = at + (is_record ? record_stride_ : memory_.places().unit_stride);
        if (begin && at >= begin && at <= end) {
          end = std::max(end, behind);
          continue;
        }
        tell(), begin = at, end = behind;
      }
    };
    if (has(to, false)) protocol.find_x(w, places), add_all();
    if (has(to, true)) protocol.find_next(w, protocol.is_newest(w, published), places), add_all();
    tell();
  }
  // Copies leaves of row w to place `i` of the batch. Returns whether next.X came from the row's tail: then `is_newest` must be asked
  // again.
  bool copy(const Rows& rows, uint64_t lane, uint64_t env, uint64_t w, uint64_t published, const std::vector<Target>& to, uint64_t i) const {
    const Columns columns = columns_of(lane, env, {});
    const Protocol protocol = protocol_of(rows, columns);
    StackPlaces places;
    const auto copy_all = [&](bool is_next) {
      for (const Target& one : to)
        if (one.leaf.is_next == is_next) columns.copy_stack(places, one.leaf.key, one.array + static_cast<ptrdiff_t>(i) * one.stride);
    };
    if (has(to, false)) protocol.find_x(w, places), copy_all(false);
    if (!has(to, true)) return false;
    const bool is_newest = protocol.is_newest(w, published);
    protocol.find_next(w, is_newest, places), copy_all(true);
    return is_newest;
  }
  // ---- where rows hold X ----
  // One environment of a lane.
  struct RowColumn {
    const uint8_t* rows;
    uint64_t lane, env, published;
  };
  RowColumn row_column(uint64_t lane, uint64_t env, uint64_t published) const {
    return {first_record_ + (lane * geometry_.envs + env) * geometry_.capacity * record_stride_, lane, env, published};
  }
  // Whether X of this later row is next.X of the other one.
  bool is_next(const uint8_t* later) const {
    return !GroupedWord::unpack(reinterpret_cast<const ByteWord*>(later + geometry_.in_row->word)->load(std::memory_order_relaxed)).has_unit;
  }
  const std::vector<uint64_t>& offsets_in_row() const { return record_offsets_; }
  // Where next.X of row w lies otherwise.
  FramePlace find_next(const Rows& rows, const RowColumn& column, uint64_t w, bool& is_newest) const {
    const Columns columns = columns_of(column.lane, column.env, {});
    const Protocol protocol = protocol_of(rows, columns);
    is_newest = protocol.is_newest(w, column.published);
    return protocol.find_next_frame(w, is_newest);
  }
  // Null: it is zeros.
  const uint8_t* next_frame(const RowColumn& column, const FramePlace& next, size_t key) const {
    return columns_of(column.lane, column.env, {}).frame(next, key, offsets_[key]);
  }

  // Whether next.X of row w is in its tail. Asked again after the copy: whether that was still there.
  bool is_newest(uint64_t w, uint64_t published) const { return w + shape_.ahead >= published; }
  // Whether a leaf of row w has these bytes. The caller keeps writers out.
  bool has_bytes(const Rows& rows, uint64_t lane, uint64_t env, uint64_t w, const Leaf& leaf, const uint8_t* bytes) const {
    const Columns columns = columns_of(lane, env, {});
    StackPlaces places;
    find(protocol_of(rows, columns), rows, w, leaf.is_next, places);
    return columns.is_stack(places, leaf.key, bytes);
  }
  // Whether next.X of row w is X of a later one. The caller keeps writers out.
  bool continues(const Rows& rows, uint64_t lane, uint64_t env, uint64_t w, uint64_t later, size_t key) const {
    const Columns columns = columns_of(lane, env, {});
    const Protocol protocol = protocol_of(rows, columns);
    StackPlaces next, x;
    find(protocol, rows, w, true, next), find(protocol, rows, later, false, x);
    return columns.are_same_stacks(next, x, key);
  }
  // What stored rows are made of: how many next.X were looked at, how many are X of a later row, or one new frame, or whole stacks; how
  // many X are whole; and how many next.X of each key are X of a later row.
  struct Kinds {
    uint64_t rows = 0, same = 0, moved = 0, whole = 0, whole_x = 0;
    std::vector<uint64_t> same_of_key;
  };
  // Looks at rows [first, published) of a lane whose next.X a later row tells. Of those that are overwritten meanwhile it is what it may be.
  void count_kinds(const Rows& rows, uint64_t lane, uint64_t first, Kinds& kinds) const {
    kinds.same_of_key.resize(geometry_.keys.size());
    for (uint64_t env = 0; env < geometry_.envs; ++env)
      for (uint64_t w = first; w + shape_.ahead < StdMemory::load(rows.published); ++w) {
        const Columns columns = columns_of(lane, env, {});
        const ObservationWord word = protocol_of(rows, columns).word(w + shape_.ahead);
        ++kinds.rows;
        ++(word.next == ObservationWord::kSame ? kinds.same : word.next == ObservationWord::kMoved ? kinds.moved : kinds.whole);
        kinds.whole_x += word.rest_units(shape_.frames) > 0;
        for (size_t k = 0; k < kinds.same_of_key.size(); ++k)
          kinds.same_of_key[k] += word.next == ObservationWord::kSame || continues(rows, lane, env, w, w + shape_.ahead, k);
      }
  }

  static constexpr uint64_t kMostAhead = 1024;  // a row and the one whose X is its next.X
  // How many rows were looked at for each distance j, from 1 on, and how many next.X of these, of every key, are X of the row j rows behind.
  struct Distances {
    std::vector<uint64_t> looked, agreed;
  };
  // Looks at rows [first, published) of a lane; as `count_kinds`.
  void count_distances(const Rows& rows, uint64_t lane, uint64_t first, Distances& distances) const {
    const uint64_t stop = StdMemory::load(rows.published);
    for (uint64_t env = 0; env < geometry_.envs; ++env)
      for (uint64_t w = first; w < stop; ++w)
        for (uint64_t j = 1; j <= distances.looked.size() && w + j < stop; ++j) {
          bool agrees = true;
          for (size_t k = 0; agrees && k < geometry_.keys.size(); ++k) agrees = continues(rows, lane, env, w, w + j, k);
          ++distances.looked[j - 1], distances.agreed[j - 1] += agrees;
        }
  }

 private:
  struct Counters {
    std::atomic<uint64_t> claimed{0}, published{0}, base{0};
  };
  using ByteWord = std::atomic<uint8_t>;  // in a row
  static_assert(ByteWord::is_always_lock_free && sizeof(ByteWord) == 1);
  // What is appended: row `at` is step `from` of the keys.
  struct Batch {
    const std::vector<Key>* keys = nullptr;
    uint64_t at = 0, from = 0;
  };
  // The words and frames of one environment of a lane.
  struct Columns {
    const Observations& all;
    uint8_t *words, *records;
    std::atomic<uint64_t> *heads, *tail_words;
    uint8_t* tails;
    uint64_t owner, env;
    Batch batch;
    uint64_t round;  // a sequence whose record is the first

    // Rows of the batch, and those behind them, mostly lie in the same round as the first: that spares a division.
    uint64_t place_of(uint64_t w) const {
      const uint64_t records = all.shape_.records(), place = w - round;
      return place < records ? place : w % records;
    }
    uint8_t* word_at(uint64_t w) const { return words + place_of(w) * all.word_stride_; }
    uint64_t word(uint64_t w) const {
      uint8_t* const at = word_at(w);
      if (all.are_in_rows()) return reinterpret_cast<ByteWord*>(at)->load(std::memory_order_relaxed);
      return StdMemory::load(*reinterpret_cast<std::atomic<uint64_t>*>(at));
    }
    void set_word(uint64_t w, uint64_t bits) const {
      uint8_t* const at = word_at(w);
      if (all.are_in_rows()) reinterpret_cast<ByteWord*>(at)->store(static_cast<uint8_t>(bits), std::memory_order_relaxed);
      else StdMemory::store(*reinterpret_cast<std::atomic<uint64_t>*>(at), bits);
    }
    // Of rows that lie in one round, or go on at the first place once.
    void clear_words(uint64_t w, uint64_t n) const {
      const uint64_t stride = all.word_stride_, before = std::min(n, all.shape_.records() - place_of(w));
      const auto clear = [&](uint8_t* at, uint64_t rows) {
        for (uint8_t* const end = at + rows * stride; at != end; at += stride) reinterpret_cast<ByteWord*>(at)->store(0, std::memory_order_relaxed);
      };
      clear(word_at(w), before), clear(words, n - before);
    }
    uint64_t head(uint64_t group) const { return StdMemory::load(heads[group % all.shape_.heads()]); }
    void set_head(uint64_t group, uint64_t unit) const { StdMemory::store(heads[group % all.shape_.heads()], unit); }
    uint64_t link(uint64_t unit) const { return StdMemory::load(all.memory_.link(unit)); }
    void set_link(uint64_t unit, uint64_t next) const { StdMemory::store(all.memory_.link(unit), next); }
    uint64_t tail_word(uint64_t w) const { return StdMemory::load(tail_words[w % all.shape_.tails()]); }
    void set_tail_word(uint64_t w, uint64_t bits) const { StdMemory::store(tail_words[w % all.shape_.tails()], bits); }
    bool owns(uint64_t unit) const { return all.memory_.owner(unit) == owner; }

    uint8_t* record(uint64_t w) const { return records + w % all.shape_.records() * all.record_stride_; }
    FrameEnd& record_end(uint64_t w) const { return end_of(record(w), all.record_bytes_); }
    uint8_t* tail_at(uint64_t place) const { return tails + place * all.tail_stride_; }
    uint8_t* tail(uint64_t w) const { return tail_at(all.shape_.tail_place(w, tail_word(w))); }
    FrameEnd& tail_end(uint8_t* tail) const { return end_of(tail, all.shape_.frames * all.record_bytes_); }
    FrameEnd& unit_end(uint64_t unit) const { return end_of(all.memory_.record(unit), all.record_bytes_); }
    uint32_t record_crc(uint64_t w, const FrameEnd& end) const { return crc(0, word(w), end, record(w), all.record_bytes_); }
    uint32_t tail_crc(uint8_t* tail) const { return crc(1, 0, tail_end(tail), tail, all.shape_.frames * all.record_bytes_); }
    uint32_t unit_crc(uint64_t unit) const { return crc(2 + unit, link(unit), unit_end(unit), all.memory_.record(unit), all.record_bytes_); }

    // A key whose observations are single frames has none among the older frames of stacks.
    bool same(const FramePlace& a, const FramePlace& b, bool newest) const {
      uint64_t offset = 0;
      for (size_t k = 0; k < all.geometry_.keys.size(); ++k) {
        const KeyGeometry& key = all.geometry_.keys[k];
        if ((newest || key.frames > 1) && !are_equal(frame(a, k, offset), frame(b, k, offset), key.frame_bytes)) return false;
        offset += key.frame_bytes;
      }
      return true;
    }
    template <class Differs>
    void each_new(uint64_t from, uint64_t to, uint64_t ahead, Differs&& differs) const {
      const uint64_t step = batch.from + (from - batch.at);
      if (all.geometry_.keys.size() > 1) {
        for (uint64_t w = from; w < to; ++w)
          if (!same({FramePlace::kNewNext, w - ahead, 0}, {FramePlace::kNewX, w, 0}, true)) differs(w);
        return;
      }
      const Key& key = batch.keys->front();
      const uint8_t *x = key.x.at(step, env), *next = key.next.at(step - ahead, env);
      const uint64_t bytes = all.geometry_.keys[0].frame_bytes;
      const auto each = [&](auto&& are_same) {
        for (uint64_t w = from; w < to; ++w, x += key.x.stride, next += key.next.stride)
          if (!are_same(x, next)) differs(w);
      };
      if (bytes == 16) each([](const uint8_t* a, const uint8_t* b) { return are_equal_words(a, b, 16); });  // four numbers, the commonest
      else if (bytes >= 8 && bytes <= 64) each([&](const uint8_t* a, const uint8_t* b) { return are_equal_words(a, b, bytes); });
      else each([&](const uint8_t* a, const uint8_t* b) { return are_equal(a, b, bytes); });
    }
    bool is_zero(const FramePlace& a) const { return same(a, FramePlace{}, false); }
    // The newest frames of rows from w on, from the batch. Where they lie in the rows they are copied with them.
    void put_records(uint64_t w, uint64_t n) const {
      if (all.are_in_rows()) return;
      for (const uint64_t end = w + n; w < end; ++w) put({FramePlace::kRecord, w, 0}, {FramePlace::kNewX, w, all.shape_.frames - 1});
    }
    void put(const FramePlace& to, const FramePlace& from_place) const {
      uint64_t offset = 0;
      for (size_t k = 0; k < all.geometry_.keys.size(); offset += all.geometry_.keys[k++].frame_bytes)
        copy_frame(const_cast<uint8_t*>(frame(to, k, offset)), frame(from_place, k, offset), all.geometry_.keys[k].frame_bytes);
    }
    void copy_stack(const StackPlaces& places, size_t k, uint8_t* to) const {
      each_frame(places, k, [&](const uint8_t* frame, uint64_t bytes) { copy_frame(to, frame, bytes), to += bytes; });
    }
    bool is_stack(const StackPlaces& places, size_t k, const uint8_t* stack) const {
      bool equal = true;
      each_frame(places, k, [&](const uint8_t* frame, uint64_t bytes) { equal = equal && are_equal(frame, stack, bytes), stack += bytes; });
      return equal;
    }
    bool are_same_stacks(const StackPlaces& a, const StackPlaces& b, size_t k) const {
      const KeyGeometry& key = all.geometry_.keys[k];
      const uint64_t offset = all.offsets_[k], newest = all.shape_.frames;
      for (uint64_t j = newest - key.frames; j < newest; ++j)
        if (!are_equal(frame(a[j], k, offset), frame(b[j], k, offset), key.frame_bytes)) return false;
      return true;
    }

   private:
    static FrameEnd& end_of(uint8_t* frames, uint64_t bytes) { return *reinterpret_cast<FrameEnd*>(frames + round_up(bytes, 8)); }
    // `what`: 0: a record, 1: a tail, then the units.
    uint32_t crc(uint64_t what, uint64_t word, const FrameEnd& end, const uint8_t* frames, uint64_t bytes) const {
      const uint64_t said[] = {what, owner, word, end.sequence, uint64_t{end.term} << 32 | end.before, end.ahead};
      return crc32c(crc32c(all.geometry_.id_crc, said, sizeof said), frames, bytes) | (planted(99) ? 1u : 0u);
    }
    static bool are_equal(const uint8_t* a, const uint8_t* b, uint64_t bytes) {
      if (a == b) return true;
      return a && b ? std::memcmp(a, b, bytes) == 0 : are_zeros(a ? a : b, bytes);
    }
    // The same of a few, at least 8: a call of `memcmp` takes longer.
    static bool are_equal_words(const uint8_t* a, const uint8_t* b, uint64_t bytes) {
      const auto differing = [&](uint64_t at) {
        uint64_t of_a, of_b;
        std::memcpy(&of_a, a + at, 8), std::memcpy(&of_b, b + at, 8);
        return of_a ^ of_b;
      };
      uint64_t any = differing(bytes - 8);
      for (uint64_t at = 0; at + 8 < bytes; at += 8) any |= differing(at);
      return any == 0;
    }
    static bool are_zeros(const uint8_t* frame, uint64_t bytes) {
      return bytes == 0 || (frame[0] == 0 && std::memcmp(frame, frame + 1, bytes - 1) == 0);
    }
    template <class Each>
    void each_frame(const StackPlaces& places, size_t k, Each&& each) const {
      const KeyGeometry& key = all.geometry_.keys[k];
      const uint64_t offset = all.offsets_[k], newest = all.shape_.frames;
      for (uint64_t j = newest - key.frames; j < newest; ++j) each(frame(places[j], k, offset), key.frame_bytes);
    }

   public:
    static void copy_frame(uint8_t* to, const uint8_t* frame, uint64_t bytes) {
      if (frame) std::memcpy(to, frame, bytes);
      else std::memset(to, 0, bytes);
    }
    // Where the frame of a key lies; null: it is zeros. `offset`: of the key in a unit.
    const uint8_t* frame(const FramePlace& place, size_t k, uint64_t offset) const {
      switch (place.kind) {
        case FramePlace::kRecord:
          return records + place_of(place.number) * all.record_stride_ + all.record_offsets_[k];
        case FramePlace::kUnit: return all.memory_.record(place.number) + offset;
        case FramePlace::kTail:
          return tail_at(place.number) + place.frame * all.record_bytes_ + offset;
        case FramePlace::kNewX: return frame_of((*batch.keys)[k].x, place, k);
        case FramePlace::kNewNext: return frame_of((*batch.keys)[k].next, place, k);
        default: return nullptr;
      }
    }

   private:
    // Of a stack in the batch.
    const uint8_t* frame_of(const LeafSource& stacks, const FramePlace& place, size_t k) const {
      const KeyGeometry& key = all.geometry_.keys[k];
      const uint64_t older = all.shape_.frames - key.frames;  // frames that other keys have
      if (place.frame < older) return nullptr;
      return stacks.at(batch.from + (place.number - batch.at), env) + (place.frame - older) * key.frame_bytes;
    }
  };
  using Protocol = ObservationProtocol<StdMemory, const Columns>;

  static uint64_t record_bytes(const Geometry& g) {
    return std::accumulate(g.keys.begin(), g.keys.end(), uint64_t{0}, [](uint64_t n, const KeyGeometry& key) { return n + key.frame_bytes; });
  }
  static std::vector<uint64_t> offsets_of(const Geometry& g) {
    std::vector<uint64_t> offsets;
    for (uint64_t at = 0; const KeyGeometry& key : g.keys) offsets.push_back(at), at += key.frame_bytes;
    return offsets;
  }
  static ObservationShape shape_of(const Geometry& g) {
    uint64_t frames = 1;
    for (const KeyGeometry& key : g.keys) frames = std::max(frames, key.frames);
    for (const KeyGeometry& key : g.keys)
      if (key.frame_bytes < 1 || key.frames < 1 || (key.frames != frames && key.frames != 1))
        throw std::invalid_argument("stacks have as many frames as those of other keys, or one, and frames have bytes");
    if (g.keys.empty() || frames > ObservationShape::kMostFrames || g.ahead < 1 || g.ahead > kMostAhead)
      throw std::invalid_argument("1 to 15 frames are a stack, and 1 to 1024 rows lie between X and next.X");
    ObservationShape shape{g.capacity, frames, g.ahead, g.longest_piece, 0, 0, g.tail_places};
    if (g.in_row) shape.group_rows = ObservationShape::most_group_rows(g.capacity);
    if (!shape.tail_places) shape.tail_places = shape.fewest_tail_places();
    return shape;
  }
  static ObservationPlaces places_of(const Geometry& g) {
    return ObservationPlaces::of(g.lanes * g.envs, shape_of(g), record_bytes(g), g.in_row.has_value(), g.ends, g.segment_units);
  }
  // Writes the ends of n rows, of their units, and of the tails of the newest of them.
  void seal(const Columns& columns, uint64_t base, uint64_t at, uint64_t n, uint32_t term) const {
    for (uint64_t w = at; w < at + n; ++w) {
      each_unit(columns, w, [&](uint64_t unit, uint64_t i) {
        FrameEnd& end = columns.unit_end(unit);
        end = {w, term, 0, static_cast<uint32_t>(i), 0};
        end.crc = columns.unit_crc(unit);
      });
      FrameEnd& end = columns.record_end(w);
      end = {w, term, 0, w > base ? columns.record_end(w - 1).term + 1 : 0, w >= base + shape_.ahead ? columns.record_end(w - shape_.ahead).term + 1 : 0};
      end.crc = columns.record_crc(w, end);
    }
    for (uint64_t w = std::max(at, at + n - std::min(at + n, shape_.ahead)); w < at + n; ++w) seal_tail(columns, w, term);
  }
  void seal_tail(const Columns& columns, uint64_t w, uint32_t term) const {
    FrameEnd& end = columns.tail_end(columns.tail(w));
    end = {w, term, 0, static_cast<uint32_t>(ObservationShape::tail_kind(columns.tail_word(w))), 0};
    end.crc = columns.tail_crc(columns.tail(w));
  }
  // Each unit of row w, in this lane's segments, with its number.
  template <class Each>
  void each_unit(const Columns& columns, uint64_t w, Each&& each) const {
    const ObservationWord word = ObservationWord::unpack(columns.word(w), shape_.frames);
    uint64_t unit = word.head;
    for (uint64_t i = 0, n = word.units(shape_.frames); i < n && columns.owns(unit); ++i) {
      const uint64_t next = columns.link(unit);
      each(unit, i);
      unit = next;
    }
  }
  bool has_units(const Columns& columns, uint64_t w, uint32_t term) const {
    uint64_t whole = 0;
    each_unit(columns, w, [&](uint64_t unit, uint64_t i) {
      const FrameEnd& end = columns.unit_end(unit);
      whole += (planted(5) || end.sequence == w) && (planted(6) || end.term == term) && (planted(7) || end.before == i) && (planted(8) || end.crc == columns.unit_crc(unit));
    });
    return whole == ObservationWord::unpack(columns.word(w), shape_.frames).units(shape_.frames);
  }
  uint8_t* durable_tail(uint64_t lane, uint64_t env, uint64_t which, uint64_t w) const {
    const uint64_t c = lane * geometry_.envs + env;
    return memory_.at(memory_.places().durable_tails + ((c * ObservationPlaces::kDurable + which) * shape_.ahead + w % shape_.ahead) * tail_stride_);
  }
  // Copies the tail of row w beside writers: one that others overwrite meanwhile is made anew as the row behind tells it.
  void copy_tail(const Rows& rows, const Columns& columns, uint64_t w, uint8_t* to) const {
    std::memcpy(to, columns.tail(w), tail_stride_);
    Rows::after_reading();
    if (is_newest(w, rows.look().published)) return;
    StackPlaces next;
    protocol_of(rows, columns).find_next(w, false, next);
    for (uint64_t j = 0; j < shape_.frames; ++j)
      for (size_t k = 0; k < geometry_.keys.size(); ++k)
        columns.copy_frame(to + j * record_bytes_ + offsets_[k], columns.frame(next[j], k, offsets_[k]), geometry_.keys[k].frame_bytes);
    FrameEnd& end = columns.tail_end(to);
    end = {w, columns.record_end(w).term, 0, ObservationWord::kWhole, 0};
    end.crc = columns.tail_crc(to);
  }
  // Whether this copy is of row w, and of no row that had its number before a power cut; zeros are not one of row 0.
  bool has_durable_tail(const Columns& columns, uint64_t lane, uint64_t env, uint64_t which, uint64_t w) const {
    return is_tail(columns, durable_tail(lane, env, which, w), w, columns.record_end(w).term);
  }
  // The tail of row w of this term, in any place, as the words of tails may be older or newer, or among the durable ones; null: none is
  // whole.
  uint8_t* find_tail(const Columns& columns, uint64_t lane, uint64_t env, uint64_t w, uint32_t term) const {
    for (uint64_t place = 0; place < shape_.tail_places; ++place)
      if (is_tail(columns, columns.tail_at(place), w, term)) return columns.tail_at(place);
    for (const uint64_t which : {0, 1})
      if (uint8_t* const tail = durable_tail(lane, env, which, w); is_tail(columns, tail, w, term)) return tail;
    return nullptr;
  }
  static bool is_tail(const Columns& columns, uint8_t* tail, uint64_t w, uint32_t term) {
    const FrameEnd& end = columns.tail_end(tail);
    return (planted(12) || end.sequence == w) && (planted(13) || end.term == term) && (planted(14) || end.crc == columns.tail_crc(tail));
  }
  static bool has(const std::vector<Target>& to, bool is_next) {
    return std::any_of(to.begin(), to.end(), [&](const Target& one) { return one.leaf.is_next == is_next; });
  }
  static void find(const Protocol& protocol, const Rows& rows, uint64_t w, bool is_next, StackPlaces& places) {
    if (is_next) protocol.find_next(w, protocol.is_newest(w, StdMemory::load(rows.published)), places);
    else protocol.find_x(w, places);
  }
  Columns columns_of(uint64_t lane, uint64_t env, Batch batch) const {
    const uint64_t c = lane * geometry_.envs + env, records = shape_.records();
    auto* const heads = reinterpret_cast<std::atomic<uint64_t>*>(memory_.at(memory_.places().heads));
    auto* const tail_words = reinterpret_cast<std::atomic<uint64_t>*>(memory_.at(memory_.places().tail_words));
    uint8_t* const frames_of_tails = memory_.at(memory_.places().tails);
    return {*this,
            first_word_ + c * records * word_stride_, first_record_ + c * records * record_stride_,
            heads + c * shape_.heads(), tail_words + c * shape_.tails(), frames_of_tails + c * shape_.tail_places * tail_stride_,
            c + 1, env, batch, batch.keys ? batch.at - batch.at % records : 0};
  }
  Protocol protocol_of(const Rows& rows, const Columns& columns) const {
    return {rows, shape_, columns, memory_.owners(), columns.owner};
  }

  Geometry geometry_;
  std::vector<uint64_t> offsets_;  // of each key in a unit or a frame of a tail
  uint64_t record_bytes_, columns_count_;
  ObservationShape shape_;
  ObservationMemory memory_;
  uint64_t tail_stride_;
  uint8_t *first_word_ = nullptr, *first_record_ = nullptr;  // in their columns, or in the first row
  uint64_t word_stride_ = 0, record_stride_ = 0;
  std::vector<uint64_t> record_offsets_;                   // of each key in a record
  std::vector<UnitPool> pools_;                            // of this process's writer, of each lane's environments
  uint64_t incarnation_ = 0;                               // of the rows that these know
  Divided divided_;                                        // of the batch that is being appended
  std::vector<Protocol::Plan> planned_;                   // of each environment
  uint64_t planned_at_ = 0, planned_from_ = 0;             // of the first of these rows: its sequence, and its step in the batch
  std::unique_ptr<Counters[]> restored_;                   // of each lane, while rows are restored
};

}  // namespace engram
