// Python bindings of stores, codecs, plans and saves: arguments are checked here, before memory is touched.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <sys/vfs.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_store.hpp"
#include "bind_testing.hpp"
#include "bindings.hpp"
#include "draw.hpp"
#include "queue.hpp"
#include "rate_limit.hpp"
#include "recovery.hpp"
#include "stints.hpp"

namespace engram {

static std::string bytes_of(nb::bytes b) { return {b.c_str(), b.size()}; }

static int64_t slot_in(const Store& store, uint64_t lane, uint64_t sequence) {
  const uint64_t capacity = store.geometry().lane_capacity;
  return static_cast<int64_t>(lane * capacity + sequence % capacity);
}

// The slots of the next n steps of a process that moves from lane to lane, if no other one writes meanwhile.
static Tensor next_stint_slots(const Store& store, size_t n) {
  store.check_file();
  if (n > kMostBytes / 8) throw std::bad_alloc();
  const std::vector<LaneRun> runs = next_runs(store, n);
  return slots_out(n, [&](int64_t* out) {
    for (const LaneRun& run : runs)
      for (uint64_t i = 0; i < run.steps; ++i) *out++ = slot_in(store, run.lane, run.first + i);
  });
}

// Rows that will replace stored ones. The constructor allocates all memory that `write` needs. The caller keeps store and plan
// alive.
class Replacement {
 public:
  // `rows_in`: the row of the plan that each slot takes; None: one after the other. `first`: row i of the plan has the
  // sequence first + i; none: the row in a slot keeps the sequence that it has.
  // `replaces`: they are other rows, and not the stored ones with other values.
  Replacement(Store& store, nb::handle slots_in, const Plan& plan, nb::handle rows_in, std::optional<uint64_t> first,
              bool replaces = false)
      : store_(store), replaces_(replaces), writer_(store) {
    store.must_be_writable();
    if (store.lanes.is_ragged()) throw nb::value_error("rows of any length are not changed in place");
    const SlotsArg given(nb::borrow(slots_in));
    slots_.assign(given.data, given.data + given.n);  // a copy, so that the checked slots are the ones that are written
    if (!rows_in.is_none()) {
      const SlotsArg chosen(nb::borrow(rows_in));
      rows_.assign(chosen.data, chosen.data + chosen.n);
      chosen_ = true;
      for (int64_t row : rows_)
        if (static_cast<uint64_t>(row) >= plan.steps) throw nb::index_error("a row lies outside the batch");
    }
    const StoreGeometry& s = store.geometry();
    if (plan.envs != 1 || (chosen_ ? rows_.size() : plan.steps) != slots_.size())
      throw nb::value_error("one row for each slot");
    for (int64_t slot : slots_)
      if (static_cast<uint64_t>(slot) >= store.slots()) refuse_slots(store);
    for (size_t k = 0; k < plan.leaves.size(); ++k) {
      const LeafSource& leaf = plan.leaves[k];
      if (!store.has_leaf(leaf.offset, leaf.bytes)) throw nb::value_error("a leaf lies outside the row");
      if (k == plan.own) {
        give_index(leaf, plan.own_dims);
        continue;
      }
      const bool is_observed = leaf.bytes > 0 && store.observations() && store.observations()->leaf(leaf.offset, leaf.bytes);
      (is_observed ? observed_ : leaves_).push_back(leaf);
    }
    if (first) {
      if (!plan.carries_sequence) throw nb::value_error("these rows have no place for their sequence");
      for (uint64_t i = 0; i < plan.steps; ++i) own_sequences_.push_back(*first + i);
      leaves_.back().array = reinterpret_cast<const uint8_t*>(own_sequences_.data());
      leaves_.back().stride = kSequenceBytes;
    } else if (plan.carries_sequence) {
      leaves_.pop_back();
    }
    if (store.grows() && !slots_.empty())
      store.make_room(static_cast<uint64_t>(*std::max_element(slots_.begin(), slots_.end())) + 1);
    sequences_.reserve(s.lanes);
    writer_.prepare(slots_.data(), slots_.size(), leaves_.size() + index_.size());
  }
  Replacement(const Replacement&) = delete;
  // Every slot must hold a row by now.
  void write() {
    if (differing_leaf()) throw nb::value_error("observations that are stored once are shared by several rows, and stay as they are");
    writer_.write(slots_.data(), slots_.size(), leaves_, chosen_ ? rows_.data() : nullptr, replaces_, index_);
  }
  // The offset of an observation that is another one in the rows that are given than in those that are stored: frames are shared with
  // other rows, and cannot change.
  std::optional<uint64_t> differing_leaf() {
    find_rows();
    const StoreGeometry& s = store_.geometry();
    for (size_t i = 0; !observed_.empty() && i < slots_.size(); ++i) {
      const uint64_t slot = static_cast<uint64_t>(slots_[i]), time = slot / s.envs, lane = time / s.lane_capacity;
      const auto protocol = store_.lanes.protocol(lane);
      uint64_t sequence = 0;
      sequences_[lane].find(time % s.lane_capacity, sequence);
      for (const LeafSource& leaf : observed_) {
        const auto observed = store_.observations()->leaf(leaf.offset, leaf.bytes);
        const uint8_t* const bytes = leaf.at(chosen_ ? static_cast<uint64_t>(rows_[i]) : i, 0);
        if (observed && !store_.observations()->has_bytes(protocol, lane, slot % s.envs, sequence, *observed, bytes)) return leaf.offset;
      }
    }
    return std::nullopt;
  }

 private:
  // Rows store the index of the slots that they take, of which one row may take several.
  void give_index(LeafSource leaf, size_t dims) {
    const IndexNumbers numbers(store_, leaf.bytes, dims);
    const size_t envs = store_.geometry().envs;
    own_index_.resize(slots_.size() * numbers.each());
    for (size_t i = 0; i < slots_.size(); ++i)
      numbers.put(static_cast<uint64_t>(slots_[i]) / envs, static_cast<uint64_t>(slots_[i]) % envs, own_index_.data() + i * numbers.each());
    leaf.array = reinterpret_cast<const uint8_t*>(own_index_.data()), leaf.stride = static_cast<ptrdiff_t>(leaf.bytes);
    index_.push_back(leaf);
  }
  void find_rows() {
    store_.must_be_writable();
    const StoreGeometry& s = store_.geometry();
    sequences_.clear();
    for (uint64_t l = 0; l < s.lanes; ++l) sequences_.emplace_back(store_.lanes.view(l), s.lane_capacity);
    for (int64_t slot : slots_) {
      const uint64_t time = static_cast<uint64_t>(slot) / s.envs;
      uint64_t sequence = 0;
      if (!sequences_[time / s.lane_capacity].find(time % s.lane_capacity, sequence))
        throw nb::index_error(("slot " + std::to_string(slot) + " has not been written").c_str());
    }
  }

  Store& store_;
  std::vector<int64_t> slots_, rows_, own_index_;
  std::vector<uint64_t> own_sequences_;
  bool chosen_ = false, replaces_ = false;
  std::vector<SlotSequences> sequences_;
  InPlaceWriter writer_;
  std::vector<LeafSource> leaves_;    // that lie in the row
  std::vector<LeafSource> observed_;  // that lie beside it
  std::vector<LeafSource> index_;     // that of the rows' own index, if it has to be given
};

static void overwrite(Store& store, nb::handle slots, const Plan& plan, nb::handle rows) {
  Replacement(store, slots, plan, rows, std::nullopt).write();
}

// Reserves the sequences of n rows that are about to be written over others; returns the first one. They are counted before the
// rows are written: a process that opens the store after a kill must not give these sequences to other rows.
static uint64_t reserve_sequences(const Store& store, uint64_t n) {
  store.must_be_writable();
  Counter& replaced = store.header()->replaced;
  const uint64_t given = std::min(replaced.load(), kFirstReplaced / 2);  // a damaged header
  replaced.store(given + std::min(n, kFirstReplaced / 4));
  return kFirstReplaced + given;
}

// A store in private memory with the same rows, counters and identity, whose rows are longer. `moves`: the old offset of bytes
// in a row, their new offset, and their number.
static std::unique_ptr<Store> widened(const Store& store, uint64_t payload_bytes, uint64_t alignment, nb::bytes layout,
                                      const std::vector<std::array<uint64_t, 3>>& moves) {
  const StoreGeometry& s = store.geometry();
  if (store.fd() >= 0 || s.payload_bytes == 0 || store.grows() || store.observations() || store.lanes.is_ragged())
    throw nb::value_error("only rows of one length in private memory can be made longer");
  for (const auto& [from, to, bytes] : moves)
    if (from > s.payload_bytes || bytes > s.payload_bytes - from || to > payload_bytes || bytes > payload_bytes - to)
      throw nb::value_error("bytes lie outside the row");
  const std::string id(reinterpret_cast<const char*>(s.store_id), sizeof s.store_id);
  auto wide = Store::create(-1, {s.lanes, s.lane_capacity, s.envs, payload_bytes, alignment, false, bytes_of(layout), id,
                                 (s.features & kHasExtents) != 0});
  wide->take_counters(store);
  for (uint64_t l = 0; l < s.lanes; ++l) {
    const SlotSequences sequences(store.lanes.view(l), s.lane_capacity);
    uint64_t sequence = 0;
    for (uint64_t t = 0; t < s.lane_capacity; ++t)
      for (uint64_t env = 0; sequences.find(t, sequence) && env < s.envs; ++env) {
        const uint64_t row = store.physical(l, env, t);
        for (const auto& [from, to, bytes] : moves) std::memcpy(wide->row(row) + to, store.row(row) + from, bytes);
      }
  }
  return wide;
}

// Enters changed slots in the log, for rows that are kept elsewhere, so that followers read them again.
// `replaced`: they are other rows by now.
static void note_edits(Store& store, nb::handle slots_in, bool replaced) {
  store.must_be_writable();
  const SlotsArg slots(nb::borrow(slots_in));
  for (size_t i = 0; i < slots.n; ++i)
    if (static_cast<uint64_t>(slots.data[i]) >= store.slots()) refuse_slots(store);
  InPlaceWriter(store).note(slots.data, slots.n, replaced);
}

// ---- removed rows ----
// Removes rows of a lane, whose turn this process has: those in these slots that still have these generations, as the lanes count.
// Slots of other lanes are left out. Returns how many were there, and not removed before.
static uint64_t remove_rows(Store& store, uint64_t lane, nb::handle slots_in, nb::handle generations_in) {
  store.must_be_writable();
  check_lane(store, lane);
  const Lanes& lanes = store.lanes;
  if (!lanes.has_flow()) throw nb::value_error("this store was made by an engram that removed no rows");
  const SlotsArg slots(nb::borrow(slots_in)), generations(nb::borrow(generations_in));
  if (slots.n != generations.n) throw nb::value_error("one generation for each slot");
  const uint64_t envs = lanes.envs(), rows = lanes.capacity() * envs;
  const SlotSequences here(lanes.view(lane), lanes.capacity());
  std::vector<std::pair<uint64_t, uint64_t>> chosen;  // sequence and environment
  uint64_t newest = 0, end = 0;
  for (size_t i = 0; i < slots.n; ++i) {
    const auto slot = static_cast<uint64_t>(slots.data[i]);
    if (slot >= store.slots()) refuse_slots(store);
    uint64_t w = 0;
    if (slot / rows != lane || !here.find(slot % rows / envs, w) || static_cast<uint64_t>(generations.data[i]) != w) continue;
    if (lanes.is_ragged() && !lanes.is_head(slot)) continue;
    chosen.emplace_back(w, slot % envs);
    newest = std::max(newest, w), end = std::max(end, slot % rows + 1);
  }
  if (chosen.empty()) return 0;
  // What may fail comes before the first change.
  store.sync_before_removing(lane, newest);
  lanes.make_room_to_remove(lane, end);
  lanes.flow().in_use.fetch_or(kRemovesRows, std::memory_order_relaxed);
  lanes.note_removals();
  const Lanes::Protocol protocol = lanes.with_removed(lane);
  uint64_t removed = 0;
  for (const auto& [w, env] : chosen) removed += protocol.remove(w, env);
  lanes.note_removals();
  return removed;
}

// A bit for each of rows [from, to) of a lane, in the order of time and environments, the lowest of a byte first: set where the row
// is removed. Empty: none is.
static nb::bytes removed_bits(const Store& store, uint64_t l, uint64_t from, uint64_t to) {
  check_lane(store, l);
  const Lanes::Protocol lane = store.lanes.with_removed(l);
  if (from > to || to - from > lane.capacity) throw nb::value_error("more rows than the lane has room for");
  std::string bits;
  if (lane.removed.any()) {
    bits.resize(((to - from) * lane.envs + 7) / 8);
    for (uint64_t w = from, i = 0; w < to; ++w)
      for (uint64_t env = 0; env < lane.envs; ++env, ++i)
        if (lane.is_removed(w, env)) bits[i / 8] = static_cast<char>(bits[i / 8] | 1 << i % 8);
    if (bits.find_first_not_of('\0') == std::string::npos) bits.clear();
  }
  return nb::bytes(bits.data(), bits.size());
}
// Removes the rows from `from` on whose bits are set, as part of a restore: bits as `removed_bits` gives them.
static void restore_removed(Store& store, uint64_t l, uint64_t from, nb::bytes given) {
  store.must_be_writable();
  check_lane(store, l);
  const std::string bits = bytes_of(given);
  const Lanes& lanes = store.lanes;
  if (bits.empty()) return;
  if (!lanes.has_flow()) throw nb::value_error("this store was made by an engram that removed no rows");
  if (bits.size() > (lanes.capacity() * lanes.envs() + 7) / 8) throw nb::value_error("more bits than the lane has rows");
  if (!planted(27)) store.sync_before_removing(l, lanes.published_now(l));  // which knows that a load has begun
  lanes.make_room_to_remove(l, std::min(lanes.capacity() * lanes.envs(), (from % lanes.capacity() * lanes.envs()) + bits.size() * 8));
  lanes.flow().in_use.fetch_or(kRemovesRows, std::memory_order_relaxed);
  lanes.note_removals();
  const Lanes::Protocol lane = lanes.with_removed(l);
  for (uint64_t i = 0; i < bits.size() * 8; ++i)
    if (static_cast<uint8_t>(bits[i / 8]) >> i % 8 & 1) lane.remove(from + i / lane.envs, i % lane.envs);
  lanes.note_removals();
}

// The counts of a store whose users wait for each other, for who changes them.
static RateLimiter writable_limiter(const Store& store) {
  store.must_be_writable();
  store.check_file();
  if (!store.lanes.has_flow()) throw nb::value_error("this store was made by an engram whose stores had no rate limiter");
  return RateLimiter(store.lanes);
}
static void set_rate_limit(const Store& store, std::optional<std::tuple<double, double, double, double, bool>> given) {
  const RateLimiter limiter = writable_limiter(store);
  if (store.lanes.is_queue()) throw nb::value_error("the store is a queue");
  if (!given) return limiter.clear();
  const auto [samples_per_insert, min_size, ahead, behind, widens] = *given;
  if (!(samples_per_insert > 0 && std::isfinite(samples_per_insert) && min_size >= 0 && ahead + behind > 0))
    throw nb::value_error("a rate limit needs a ratio of more than 0, and room for draws to be ahead or behind");
  limiter.set({samples_per_insert, min_size, ahead, behind, widens});
}
static void note_wait(const Store& store, bool inserts, uint64_t ns, bool begins) {
  store.check_file();
  if (store.read_only() || !store.lanes.has_flow()) return;
  Flow& flow = store.lanes.flow();
  if (begins) (inserts ? flow.insert_waits : flow.sample_waits).fetch_add(1, std::memory_order_relaxed);
  (inserts ? flow.insert_waited_ns : flow.sample_waited_ns).fetch_add(ns, std::memory_order_relaxed);
}

// Generations of slots as the lanes count: sequences, -1 where a slot holds no row.
static Tensor generations(const Store& store, nb::handle slots_in) {
  const SlotsArg slots(nb::borrow(slots_in));
  const StoreGeometry& s = store.geometry();
  store.check_file();
  std::vector<SlotSequences> sequences;
  for (uint64_t l = 0; l < s.lanes; ++l) sequences.emplace_back(store.lanes.view(l), s.lane_capacity);
  return slots_out(slots.n, [&](int64_t* out) {
    for (size_t i = 0; i < slots.n; ++i) {
      const auto slot = static_cast<uint64_t>(slots.data[i]);
      if (slot >= store.slots()) refuse_slots(store);
      const uint64_t time = slot / s.envs;
      uint64_t sequence = 0;
      const bool is_stored = sequences[time / s.lane_capacity].find(time % s.lane_capacity, sequence);
      out[i] = is_stored ? static_cast<int64_t>(sequence) : -1;
    }
  });
}

// Writes restored rows [envs, steps, payload bytes] with sequences from `start` on, which are not yet visible to readers.
static void put_rows(Store& store, uint64_t lane, uint64_t start,
                     nb::ndarray<const uint8_t, nb::ndim<3>, nb::device::cpu> rows) {
  store.must_be_writable();
  check_lane(store, lane);
  const StoreGeometry& s = store.geometry();
  if (s.payload_bytes == 0 || store.observations()) throw nb::value_error("this store's rows are kept elsewhere");
  if (rows.shape(0) != s.envs || rows.shape(1) > s.lane_capacity || rows.shape(2) != s.payload_bytes)
    throw nb::value_error("rows must be [envs, steps, payload bytes], with no more steps than a lane holds");
  if (rows.stride(2) != 1 && s.payload_bytes > 1) throw nb::value_error("the bytes of a row must lie side by side");
  if (start > UINT64_MAX - rows.shape(1)) throw nb::value_error("sequences end at 2^64");
  if (store.grows()) {
    const uint64_t slot = start % s.lane_capacity, n = rows.shape(1);
    store.make_room(n > s.lane_capacity - slot ? s.lane_capacity : slot + n);
  }
  int error = 0;
  {
    nb::gil_scoped_release unlocked;
    error = RowRestorer(store).put(lane, start, {rows.data(), rows.shape(1), rows.stride(0), rows.stride(1)});
  }
  if (error == 0) return;
  errno = error;
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

// Sets which leaves of a row tell whether the next row continues it, as indices of a codec's leaves; entries are pairs (at
// the root, under `next`).
static void set_border(Store& store, const Codec& codec, const std::vector<std::pair<size_t, size_t>>& entries,
                       const std::vector<size_t>& done, bool either, std::optional<size_t> id) {
  check_codec(store, codec);
  const auto& leaves = codec.leaves();
  auto leaf = [&](size_t k) -> const Leaf& {
    if (k >= leaves.size()) throw nb::index_error("no such leaf");
    return leaves[k];
  };
  auto observed = [&](const Leaf& one) -> std::optional<Observations::Leaf> {
    if (!store.observations() || one.bytes == 0) return std::nullopt;
    return store.observations()->leaf(one.offset, one.bytes);
  };
  BorderRule rule;
  rule.leaves = codec.sources(), rule.codec = codec.number(), rule.either = either;
  for (auto [root, next] : entries) {
    if (leaf(root).bytes != leaf(next).bytes) throw nb::value_error("an entry has another size under next");
    if (rule.entries.size() == BorderRule::kMostEntries || leaf(root).bytes == 0) continue;
    rule.entries.push_back({leaf(root).offset, leaf(next).offset, leaf(root).bytes, root, next});
    const auto x = observed(leaf(root)), after = observed(leaf(next));
    if (x.has_value() != after.has_value() || (x && (x->key != after->key || x->is_next || !after->is_next)))
      throw nb::value_error("an entry and the one under next are not those of one observation");
    if (x) rule.entries.back().is_observed = true, rule.entries.back().key = x->key;
  }
  for (size_t k : done)
    if (observed(leaf(k))) throw nb::value_error("an observation is no flag");
  if (id && observed(leaf(*id))) throw nb::value_error("an observation is no id");
  for (size_t k : done) rule.done.push_back({leaf(k).offset, leaf(k).bytes, k});
  if (id) rule.id = BorderRule::Flag{leaf(*id).offset, leaf(*id).bytes, *id};
  store.set_border(std::move(rule));
}

// Part of a restore, which must not fail any more: allocates nothing for stores that hold their rows.
static void set_seams(const Store& store, uint64_t lane, uint64_t base, uint64_t published, nb::list at) {
  auto sequence = [&](uint64_t i) {
    uint64_t w = 0;
    if (!nb::try_cast(at[i], w)) throw nb::type_error("seams are sequences");
    return w;
  };
  const uint64_t n = nb::len(at);
  for (uint64_t i = 0; i < n; ++i)
    if (sequence(i) < sequence(i ? i - 1 : 0)) throw nb::value_error("seams must be ascending");
  store.set_seams(lane, base, published, n, sequence);
}

// The state in which the last process left a store: (no change is half done, closed cleanly, boot id of the machine). The
// caller has checked the file.
static std::tuple<bool, bool, nb::bytes> left_as(Store& store) {
  const StoreHeader& h = store.lanes.header();
  const bool whole = h.incarnation.load() % 2 == 0 && h.edits.load() % 2 == 0 && !InPlaceWriter(store).interrupted();
  return {whole, h.clean != 0, nb::bytes(h.boot_id, 16)};
}

// `f_type` of statfs(2), of the file system that a file lies on; 0 where the system does not say.
static uint32_t file_system_type(int fd) {
  struct statfs system;
  return ::fstatfs(fd, &system) == 0 ? static_cast<uint32_t>(system.f_type) : 0;
}

static nb::dict lane_state(const Store& store, uint64_t l) {
  check_lane(store, l);
  const LaneHeader& h = store.lanes.lane(l);
  const LaneView v = store.lanes.settled_view(l);
  nb::dict d;
  d["first"] = v.first, d["published"] = v.published, d["claimed"] = v.claimed;
  d["base"] = h.base.load(), d["origin"] = store.lanes.origin(l), d["durable"] = h.durable.load();
  d["term"] = h.term.load(), d["written_at"] = h.written_at.load();
  d["ticket"] = h.ticket.load(), d["left"] = store.lanes.stints(l).left(), d["turn"] = h.turn.load();
  return d;
}

// What is known of whose rows a lane has: (first row, stream, position of that row in it), oldest first.
static std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> extents_of(const Store& store, uint64_t l) {
  check_lane(store, l);
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> known;
  const auto stints = store.lanes.stints(l);
  if (!stints.records) return known;
  stints.rows.look();
  const LaneView v = stints.look_at_extents();
  for (uint64_t e = v.first; e < v.published; ++e) {
    const Extent extent = stints.extent(e);
    known.emplace_back(extent.start, extent.stream, extent.position);
  }
  Lanes::Protocol::after_reading();
  const uint64_t gone = stints.first_extent_now() - std::min(stints.first_extent_now(), v.first);
  known.erase(known.begin(), known.begin() + static_cast<ptrdiff_t>(std::min<uint64_t>(gone, known.size())));
  return known;
}

// (stream, owner, lane, start, position) of an entry of the table of streams; None: it has none.
static std::optional<std::tuple<uint64_t, uint64_t, std::optional<uint64_t>, uint64_t, uint64_t>> stream_place(const Store& store,
                                                                                                             uint64_t entry) {
  const StreamPlace p = StreamRecord<StdMemory>(store.streams().record(entry)).read();
  if (!p.stream) return std::nullopt;
  return std::tuple(p.stream, p.owner, p.lane < store.lanes.count() ? std::optional(p.lane) : std::nullopt, p.start, p.position);
}
static void set_stream_place(const Store& store, uint64_t entry, uint64_t stream, std::optional<uint64_t> lane, uint64_t start,
                             uint64_t position) {
  const StreamRecord<StdMemory> record(store.streams().record(entry));
  record.write({stream, store.writer(), lane ? *lane : StreamPlace::kNoLane, start, position});
}
static Store::Stint adopt(Store& store, uint64_t entry) {
  store.must_be_writable();
  if (!store.writer()) throw nb::value_error("this process has no number among the writers");
  return adopt_stream(store, entry, [](double seconds) {
    {
      nb::gil_scoped_release unlocked;
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  });
}

// Offsets of the word and of X of each key.
using InRowPlaces = std::optional<std::pair<uint64_t, std::vector<uint64_t>>>;
static std::optional<Observations::InRow> in_row_of(const InRowPlaces& given) {
  if (!given) return std::nullopt;
  return Observations::InRow{given->first, given->second, 0};
}

// The bytes of an observation of rows [start, start + steps) of a lane: [steps, envs, bytes]. Of rows that are overwritten meanwhile
// they may be any.
static nb::object observation_column(const Store& store, uint64_t lane, uint64_t start, uint64_t steps, uint64_t offset, uint64_t bytes) {
  check_lane(store, lane);
  const StoreGeometry& s = store.geometry();
  const auto leaf = store.observations() ? store.observations()->leaf(offset, bytes) : std::nullopt;
  if (!leaf) throw nb::value_error("no observation lies there");
  if (steps > s.lane_capacity) throw nb::value_error("more rows than the lane has room for");
  if (bytes > kMostBytes / (steps * s.envs + 1)) throw std::bad_alloc();
  auto out = std::make_unique<uint8_t[]>(steps * s.envs * bytes);
  const Lanes::Protocol protocol = store.lanes.protocol(lane);
  for (uint64_t i = 0; i < steps; ++i)
    for (uint64_t env = 0; env < s.envs; ++env)
      store.observations()->copy(protocol, lane, env, start + i, store.lanes.published_now(lane),
                                 {{*leaf, out.get(), static_cast<ptrdiff_t>(bytes)}}, i * s.envs + env);
  nb::capsule keep(out.get(), [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
  const size_t shape[3] = {steps, s.envs, bytes};
  return nb::cast(nb::ndarray<nb::numpy, uint8_t>(out.release(), 3, shape, keep));
}

void bind_store(nb::module_& m) {
  using namespace nb::literals;
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const FileCutShort& error) {
      PyErr_SetString(nb::module_::import_("engram.errors").attr("StorageError").ptr(), error.what());
    } catch (const NoRoomForUnits& error) {
      PyErr_SetString(nb::module_::import_("engram.errors").attr("StorageError").ptr(), error.what());
    } catch (const DamagedRow& error) {
      PyErr_SetString(nb::module_::import_("engram.errors").attr("StorageError").ptr(), error.what());
    } catch (const LanesBusy& error) {
      PyErr_SetString(nb::module_::import_("engram.errors").attr("StorageInUseError").ptr(), error.what());
    } catch (const SyncFailed& error) {
      PyErr_SetString(nb::module_::import_("engram.errors").attr("StorageError").ptr(), error.what());
    }
  });
  m.attr("LOG_ENTRIES") = kLogEntries;
  m.attr("FEATURES") = feature_names(kKnownFeatures);
  m.attr("FIRST_REPLACED") = kFirstReplaced;
  m.attr("PID_BITS") = kPidBits;
  m.def("gather_many", &gather_many, "stores"_a, "codec"_a, "slots"_a, "shape"_a.none() = nb::none(),
        "extra"_a.none() = nb::none(), "mapped"_a = false, "sequences"_a = false, "parts"_a.none() = nb::none());
  m.def("pack", &pack, "plan"_a, "row_bytes"_a);
  m.def("unpack", &unpack, "codec"_a, "rows"_a.noconvert(), "extra"_a.none() = nb::none());
  m.def("file_system_type", &file_system_type, "fd"_a);
  m.def("joint_index", &joint_index, "slots"_a, "members"_a);

  nb::class_<Store::Stint>(m, "Stream")
      .def_ro("position", &Store::Stint::position)
      .def_ro("number", &Store::Stint::stream)
      .def_rw("keeps", &Store::Stint::keeps);
  bind_codec(m);
  bind_epochs(m);

  nb::class_<SharedSnapshot>(m, "CopyOnWriteSnapshot")
      .def("read", [](SharedSnapshot& shared, uint64_t lane, uint64_t start, uint64_t stop,
                      nb::ndarray<uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu> out) {
        CopyOnWriteSnapshot& snapshot = *shared.snapshot;
        if (!snapshot.covers(lane, start, stop)) throw nb::index_error("these rows are not part of the save");
        const StoreGeometry& s = snapshot.geometry();
        if (out.shape(0) != s.envs || out.shape(1) != stop - start || out.shape(2) != snapshot.row_bytes())
          throw nb::value_error("out must be [envs, rows, row bytes]");
        uint8_t* to = out.data();
        nb::gil_scoped_release unlocked;
        snapshot.read(lane, start, stop, to);
      }, "lane"_a, "start"_a, "stop"_a, "out"_a)
      .def_prop_ro("row_bytes", [](const SharedSnapshot& shared) { return shared.snapshot->row_bytes(); })
      .def("lost_below", [](SharedSnapshot& shared, uint64_t lane) {
        CopyOnWriteSnapshot& snapshot = *shared.snapshot;
        if (lane >= snapshot.geometry().lanes) throw nb::index_error("no such lane");
        return snapshot.lost_below(lane);
      }, "lane"_a);

  nb::class_<Replacement>(m, "Replacement")
      .def("write", &Replacement::write)
      .def("differing_leaf", &Replacement::differing_leaf);

  nb::class_<HeadCount>(m, "HeadCount")
      .def(nb::init<>())
      .def("of", [](HeadCount& count, const Store& store) {
        store.check_file();
        check_ragged(store);
        return count.of(store);
      }, "store"_a);

  nb::class_<Store>(m, "Store")
      .def_static("create", [](int fd, uint64_t lanes, uint64_t lane_capacity, uint64_t envs, uint64_t payload_bytes,
                               uint64_t alignment, bool trailer, nb::bytes layout, nb::bytes store_id, bool extents,
                               bool observations, bool flow, bool ragged) {
        return Store::create(fd, {lanes, lane_capacity, envs, payload_bytes, alignment, trailer, bytes_of(layout),
                                  bytes_of(store_id), extents, observations, flow, ragged});
      }, "fd"_a, "lanes"_a, "lane_capacity"_a, "envs"_a, "payload_bytes"_a, "alignment"_a, "trailer"_a, "layout"_a,
         "store_id"_a, "extents"_a = false, "observations"_a = false, "flow"_a = true, "ragged"_a = false)
      .def_static("size_needed", [](uint64_t lanes, uint64_t lane_capacity, uint64_t envs, uint64_t payload_bytes,
                                    uint64_t alignment, bool trailer, size_t layout_bytes) {
        return geometry_of({lanes, lane_capacity, envs, payload_bytes, alignment, trailer,
                         std::string(layout_bytes, ' '), std::string(16, '\0')}).total_bytes;
      }, "lanes"_a, "lane_capacity"_a, "envs"_a, "payload_bytes"_a, "alignment"_a, "trailer"_a, "layout_bytes"_a)
      .def_static("observation_sizes", [](uint64_t lanes, uint64_t lane_capacity, uint64_t envs, uint64_t payload_bytes,
                                          uint64_t alignment, bool trailer, uint64_t ahead, const KeySizes& keys, const InRowPlaces& in_row) {
        const StoreGeometry s = geometry_of({lanes, lane_capacity, envs, payload_bytes, alignment, trailer, "", std::string(16, '\0')});
        const auto sizes = Observations::sizes_of(Store::observations_beside(s, ahead, key_geometries(keys), in_row_of(in_row)));
        return std::tuple(sizes.longest_piece, sizes.tail_places, sizes.segment_units, sizes.sure_bytes);
      }, "lanes"_a, "lane_capacity"_a, "envs"_a, "payload_bytes"_a, "alignment"_a, "trailer"_a, "ahead"_a, "keys"_a, "in_row"_a.none() = nb::none())
      .def_static("open", &Store::open, "fd"_a, "bytes"_a = nb::none(), "read_only"_a = false)
      .def_prop_ro("read_only", &Store::read_only)
      .def_prop_ro("lanes", [](const Store& s) { return s.geometry().lanes; })
      .def_prop_ro("lane_capacity", [](const Store& s) { return s.geometry().lane_capacity; })
      .def_prop_ro("envs", [](const Store& s) { return s.geometry().envs; })
      .def_prop_ro("payload_bytes", [](const Store& s) { return s.geometry().payload_bytes; })
      .def_prop_ro("row_stride", [](const Store& s) { return s.geometry().row_stride; })
      .def_prop_ro("rows_offset", [](const Store& s) { return s.geometry().rows_offset; })
      .def_prop_ro("total_bytes", [](const Store& s) { return s.geometry().total_bytes; })
      .def_prop_ro("layout", [](const Store& s) { const auto l = s.layout(); return nb::bytes(l.data(), l.size()); })
      .def_prop_ro("store_id", [](const Store& s) { return nb::bytes(s.geometry().store_id, 16); })
      .def_prop_ro("incarnation", [](const Store& s) { return s.header()->incarnation.load(); })
      .def("left_as", [](Store& s) { s.check_file(); return left_as(s); })
      .def_prop_ro("unflushed", [](const Store& s) {
        s.check_file();
        for (uint64_t l = 0; l < s.geometry().lanes; ++l)
          if (s.lanes.lane(l).durable.load() < s.lanes.lane(l).published.load()) return true;
        return false;
      })
      .def("epoch", [](const Store& s) {
        s.check_file();
        Lanes::Protocol::after_reading();  // orders all earlier reads before the read of the epoch
        const Epoch e = s.lanes.epoch();
        return std::pair(e.incarnation, e.edits);
      })
      .def_prop_ro("log_head", [](const Store& s) { return s.header()->log_head.load(); })
      .def("log", [](const Store& s, uint64_t from) {
        const uint64_t head = s.header()->log_head.load(std::memory_order_acquire);
        const auto* entries = reinterpret_cast<const Counter*>(s.at(s.geometry().log_offset));
        if (from > head || head - from > kLogEntries) throw nb::index_error("the log does not reach back so far");
        std::vector<uint64_t> slots;
        for (uint64_t i = from; i < head; ++i) slots.push_back(entries[i % kLogEntries].load());
        return slots;
      }, "start"_a)
      .def_prop_rw("boot_id", [](const Store& s) { return nb::bytes(s.header()->boot_id, 16); },
                   [](Store& s, nb::bytes b) {
        s.must_be_writable();
                     if (b.size() != 16) throw nb::value_error("a boot id has 16 bytes");
                     std::memcpy(s.header()->boot_id, b.c_str(), 16);
                   })
      .def_prop_rw("host_id", [](const Store& s) { return nb::bytes(s.header()->host_id, 16); },
                   [](Store& s, nb::bytes b) {
                     s.must_be_writable();
                     if (b.size() != 16) throw nb::value_error("a host id has 16 bytes");
                     std::memcpy(s.header()->host_id, b.c_str(), 16);
                   })
      .def_prop_rw("replaced", [](const Store& s) { return s.header()->replaced.load(); },
                   [](const Store& s, uint64_t n) { s.must_be_writable(); s.header()->replaced.store(n); })
      .def_prop_rw("clean", [](const Store& s) { return s.header()->clean != 0; },
                   [](Store& s, bool clean) { s.must_be_writable(); s.header()->clean = clean; })
      .def("lane", &lane_state, "lane"_a)
      .def("freeze", [](Store& s) {
        if (!s.read_only()) throw nb::value_error("only a store that was opened to be observed is frozen");
        s.check_file();
        s.lanes.freeze();
      })
      .def("check_file", &Store::check_file)
      .def("rows", [](const Store& s) { s.check_file(); return s.lanes.rows() * s.geometry().envs; })
      .def("cursor", [](const Store& s, uint64_t l) {
        check_lane(s, l);
        return s.lanes.lane(l).published.load() % s.geometry().lane_capacity;
      }, "lane"_a)
      .def("steps_written", [](const Store& s) { s.check_file(); return s.lanes.write_count(); })
      .def("advance", [](const Store& s, uint64_t l, uint64_t n, bool begins) {
        s.must_be_writable();
        check_lane(s, l);
        if (s.geometry().payload_bytes != 0) throw nb::value_error("this store holds its rows itself: use append");
        if (s.lanes.is_queue() && !has_queue_room(s.lanes, l, n, false)) raise_queue_full(0, n, nb::none());
        return s.advance(l, n, begins);
      }, "lane"_a, "n"_a, "begins"_a = false)
      .def("mark_seam", [](const Store& s, uint64_t l) { check_lane(s, l); s.mark_seam(l); }, "lane"_a)
      .def("next_is_seam", [](const Store& s, uint64_t l) { check_lane(s, l); return s.next_is_seam(l); }, "lane"_a)
      .def("seams", [](const Store& s, uint64_t l) { check_lane(s, l); s.check_file(); return s.seams(l); }, "lane"_a)
      .def("add_seam", [](const Store& s, uint64_t l, uint64_t sequence) {
        s.must_be_writable();
        check_lane(s, l);
        if (s.geometry().payload_bytes != 0) throw nb::value_error("the seams of stored rows are written with them");
        s.add_seam(l, sequence);
      }, "lane"_a, "sequence"_a)
      .def("set_seams", [](const Store& s, uint64_t l, uint64_t base, uint64_t published,
                           nb::typed<nb::list, uint64_t> at) {
        s.must_be_writable();
        check_lane(s, l);
        if (base > published) throw nb::value_error("base lies above published");
        if (published - base > s.geometry().lane_capacity) throw nb::value_error("more rows than the lane has room for");
        set_seams(s, l, base, published, at);
      }, "lane"_a, "base"_a, "published"_a, "at"_a)
      .def("with_growing_rows", &Store::with_growing_rows, "payload_bytes"_a)
      .def_prop_ro("room", &Store::room)
      .def_prop_rw("env_shape", &Store::env_shape, &Store::set_env_shape)
      .def("set_border", &set_border, "codec"_a, "entries"_a, "done"_a, "either"_a, "id"_a.none())
      .def("border_evidence", [](const Store& s, uint64_t l) -> std::pair<uint64_t, std::optional<uint64_t>> {
        check_lane(s, l);
        s.check_file();
        const LaneHeader& h = s.lanes.lane(l);
        const uint64_t agreed = h.border_agreed.load();
        return {h.border_looked.load(), agreed & kBorderKnown ? std::optional(agreed & ~kBorderKnown) : std::nullopt};
      }, "lane"_a)
      .def("set_border_evidence", [](const Store& s, uint64_t l, uint64_t looked, std::optional<uint64_t> agreed) {
        s.must_be_writable();
        check_lane(s, l);
        s.check_file();
        LaneHeader& h = s.lanes.lane(l);
        h.border_agreed.store(agreed ? *agreed | kBorderKnown : 0);
        h.border_looked.store(looked);
      }, "lane"_a, "looked"_a, "agreed"_a.none())
      .def("after_fork", &Store::after_fork)
      .def("raise_term", [](const Store& s, uint64_t l) {
        s.must_be_writable();
        check_lane(s, l);
        s.lanes.lane(l).term.fetch_add(1);
      }, "lane"_a)
      .def("repair", [](Store& s) { s.must_be_writable(); s.lanes.repair(); return left_as(s); })
      .def("mark_durable", [](const Store& s, const std::vector<uint64_t>& published) {
        s.must_be_writable();
        if (published.size() != s.geometry().lanes) throw nb::value_error("one sequence for each lane");
        s.check_file();
        for (uint64_t l = 0; l < s.geometry().lanes; ++l) {  // another process may have flushed more of a lane meanwhile
          Counter& durable = s.lanes.lane(l).durable;
          for (uint64_t now = durable.load(); now < published[l] && !durable.compare_exchange_weak(now, published[l]);) {}
        }
      }, "published"_a)
      .def("sync_header", [](const Store& s) {
        s.must_be_writable();
        nb::gil_scoped_release unlocked;
        if (!s.synced(0, s.geometry().rows_offset)) throw SyncFailed("the header");
      })
      .def_prop_ro("sync_failures", &Store::sync_failures)
      .def("count_sync_failure", &Store::count_sync_failure)
      .def("keep_durable_tails", [](const Store& s) {
        s.must_be_writable();
        std::vector<uint64_t> published;
        for (uint64_t l = 0; l < s.geometry().lanes; ++l) {
          const LaneHeader& h = s.lanes.lane(l);
          const bool keeps = s.observations() && s.observations()->has_ends();
          published.push_back(keeps ? s.observations()->keep_durable_tails(s.lanes.protocol(l), l, h.durable.load()) : h.published.load());
        }
        return published;
      })
      .def("dirty_again", [](Store& s, const std::vector<uint64_t>& published) {
        s.must_be_writable();
        if (published.size() != s.geometry().lanes) throw nb::value_error("one sequence for each lane");
        nb::gil_scoped_release unlocked;
        DirtyAgain(s).run(published);
      }, "published"_a)
      .def("empty", [](const Store& s, bool reset_count) {
        s.must_be_writable();
        if (s.saving()) s.saving()->settle();
        s.forget_seams();
        s.lanes.empty(reset_count);
        for (uint64_t l = 0; s.observations() && l < s.geometry().lanes; ++l)
          s.observations()->forget(l, s.lanes.lane(l).published.load());
      }, "reset_count"_a)
      .def("begin_restore", [](const Store& s) {
        s.must_be_writable();
        if (s.saving()) s.saving()->settle();
        s.lanes.begin_change();
        s.forget_seams();
        for (uint64_t l = 0; l < s.geometry().lanes; ++l) {
          s.lanes.set_counters(l, 0, 0, 0);
          if (s.observations()) s.observations()->end_restore(l, 0, 0);
          s.lanes.lane(l).term.fetch_add(1);  // so that readers do not take an old row for a new one
        }
        s.lanes.header().tickets.store(0);
        s.lanes.forget_counts();  // a save of a store that was never written has no lane that says them
      })
      .def("restore_lane", [](const Store& s, uint64_t l, uint64_t base, uint64_t published, uint64_t origin) {
        s.must_be_writable();
        check_lane(s, l);
        if (base > published) throw nb::value_error("base lies above published");
        if (s.observations() && !s.observations()->end_restore(l, base, published))
          throw nb::value_error("not all rows between base and published were restored");
        s.lanes.set_counters(l, base, published, origin);
        s.lanes.count_anew();
      }, "lane"_a, "base"_a, "published"_a, "origin"_a)
      .def("end_restore", [](const Store& s) {
        s.must_be_writable();
        // A process that loads rows continues as their writer.
        for (uint64_t l = 0; s.writer() && l < s.geometry().lanes; ++l)
          s.lanes.lane(l).last_writer.store(s.writer(), std::memory_order_relaxed);
        s.lanes.end_change();
      })
      .def("put", &put_rows, "lane"_a, "start"_a, "rows"_a.noconvert())
      .def("begin_leaves", [](Store& s, uint64_t lane, uint64_t base) {
        if (base > UINT64_MAX / 2) throw nb::value_error("sequences end at 2^63");
        observations_of(s, lane).begin_restore(lane, base);
      }, "lane"_a, "base"_a)
      .def("next_leaves", [](Store& s, uint64_t lane) { return observations_of(s, lane).restoring(lane).published.load(); }, "lane"_a)
      .def("put_leaves", &put_leaves, "lane"_a, "start"_a, "plan"_a)
      .def("keep_observations", [](Store& s, uint64_t ahead, const KeySizes& keys, const InRowPlaces& in_row,
                                   const std::vector<uint64_t>& sizes) {
        s.keep_observations(ahead, key_geometries(keys), in_row_of(in_row), sizes);
      }, "ahead"_a, "keys"_a, "in_row"_a.none() = nb::none(), "sizes"_a = std::vector<uint64_t>())
      .def("observation_kinds", [](const Store& s, uint64_t most) {
        s.check_file();
        if (!s.observations()) throw nb::value_error("this store keeps no observations beside its rows");
        Observations::Kinds kinds;
        for (uint64_t l = 0; l < s.geometry().lanes; ++l) {
          const Observations& observations = *s.observations();
          const LaneView v = s.lanes.view(l);
          const uint64_t newest = v.published > most ? v.published - most : 0;
          observations.count_kinds(s.lanes.protocol(l), l, std::max(v.first, newest), kinds);
        }
        return std::tuple(kinds.rows, kinds.same, kinds.moved, kinds.whole, kinds.whole_x, kinds.same_of_key);
      }, "most"_a)
      .def("observation_distances", [](const Store& s, uint64_t most, uint64_t furthest) {
        s.check_file();
        if (!s.observations()) throw nb::value_error("this store keeps no observations beside its rows");
        if (furthest > Observations::kMostAhead) throw nb::value_error("rows so far behind are not looked at");
        Observations::Distances distances{std::vector<uint64_t>(furthest), std::vector<uint64_t>(furthest)};
        for (uint64_t l = 0; l < s.geometry().lanes; ++l) {
          const LaneView v = s.lanes.view(l);
          const uint64_t newest = v.published > most ? v.published - most : 0;
          s.observations()->count_distances(s.lanes.protocol(l), l, std::max(v.first, newest), distances);
        }
        return std::tuple(distances.looked, distances.agreed);
      }, "most"_a, "furthest"_a)
      .def_prop_ro("has_all_segments", [](const Store& s) { return !s.observations() || s.observations()->has_all_segments(); })
      .def_prop_ro("has_observations", [](const Store& s) { return (s.geometry().features & kHasObservations) != 0; })
      .def("observation_column", &observation_column, "lane"_a, "start"_a, "steps"_a, "offset"_a, "nbytes"_a,
           nb::sig("def observation_column(self, lane: int, start: int, steps: int, offset: int, nbytes: int) -> "
                   "numpy.typing.NDArray[numpy.uint8]"))
      .def_prop_ro("observation_bytes", [](const Store& s) { return s.observations() ? s.observations()->bytes() : 0; })
      .def_prop_ro("interrupted", [](Store& s) { s.check_file(); return InPlaceWriter(s).interrupted(); })
      .def_prop_ro("fd", [](const Store& s) { return s.fd(); })
      .def("finish_interrupted", [](Store& s) { s.must_be_writable(); return InPlaceWriter(s).finish_interrupted(); })
      .def("check_rows", [](const Store& s, uint64_t l, uint64_t start, uint64_t stop) {
        check_lane(s, l);
        if (!s.has_trailer()) throw nb::value_error("rows without trailers have no checksums");
        s.check_file();
        RowCheck result;
        {
          nb::gil_scoped_release unlocked;
          result = check_rows(s, l, start, stop);
        }
        return std::pair(result.checked, result.damaged);
      }, "lane"_a, "start"_a, "stop"_a)
      .def("recover", [](Store& s) {
        s.must_be_writable();
        if (!s.has_trailer()) throw nb::value_error("rows without trailers cannot be recovered");
        nb::gil_scoped_release unlocked;
        return recover(s) * s.geometry().envs;
      })
      .def("memory", [](const Store& s) {
        s.check_file();
        const size_t shape[1] = {s.geometry().total_bytes};
        auto* owner = new std::shared_ptr<MappedRegion>(s.region());
        nb::capsule keep(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<MappedRegion>*>(p); });
        if (s.read_only()) return nb::cast(nb::ndarray<nb::numpy, const uint8_t>(s.at(0), 1, shape, keep));
        return nb::cast(nb::ndarray<nb::numpy, uint8_t>(s.at(0), 1, shape, keep));
      }, nb::sig("def memory(self) -> numpy.typing.NDArray[numpy.uint8]"))
      .def("advise_random", [](const Store& s) {
        ::madvise(s.at(0), s.geometry().total_bytes, MADV_RANDOM);
        if (s.observations()) s.observations()->advise_random();
      })
      .def("next_slot", [](const Store& s, uint64_t l) {
        check_lane(s, l);
        return l * s.geometry().lane_capacity + s.lanes.lane(l).published.load() % s.geometry().lane_capacity;
      }, "lane"_a)
      .def("next_slots", &next_slots, "lane"_a, "n"_a)
      .def("next_stint_slots", &next_stint_slots, "n"_a)
      .def_prop_ro("keeps_extents", [](const Store& s) { return (s.geometry().features & kHasExtents) != 0; })
      .def_prop_ro("stint", [](const Store& s) -> std::optional<uint64_t> {
        const uint64_t lane = s.stint().lane;
        return lane < s.lanes.count() && s.lanes.stints(lane).goes_on(s.author()) ? std::optional(lane) : std::nullopt;
      })
      .def("append", &append, "lane"_a, "plan"_a, "first"_a = 0, "n"_a.none() = nb::none(), "wanted"_a = true, "waits"_a = false,
           nb::sig("def append(self, lane: int, plan: Plan, first: int = 0, n: int | None = None, wanted: bool = True, "
                   "waits: bool = False) -> torch.Tensor | int | None"))
      // ---- rows of any length ----
      .def_prop_ro("is_ragged", [](const Store& s) { return s.lanes.is_ragged(); })
      .def_prop_ro("longest_row", [](const Store& s) { return s.lanes.longest(); })
      .def("append_row", &append_row, "lane"_a, "row"_a.noconvert(),
           nb::sig("def append_row(self, lane: int, row: bytes | bytearray | memoryview) -> int | None"))
      .def("read_rows", &read_rows, "slots"_a,
           nb::sig("def read_rows(self, slots: torch.Tensor) -> tuple[list[bytes], list[int] | None, list[int] | None]"))
      .def("heads", [](const Store& s) {
        s.check_file();
        check_ragged(s);
        const std::vector<int64_t> heads = heads_of(s.lanes);
        return slots_out(heads.size(), [&](int64_t* out) { std::copy(heads.begin(), heads.end(), out); });
      })
      .def("new_writer", [](const Store& s, uint64_t l, uint64_t pid, uint64_t above) {
        s.must_be_writable();
        check_lane(s, l);
        constexpr uint64_t kMask = (uint64_t{1} << kPidBits) - 1, kEnd = uint64_t{1} << (64 - kPidBits);
        auto& writers = s.lanes.lane(l).writers;
        uint64_t last = writers.load(), number;
        do {
          number = std::max(last, above) + 1;
          if (number >= kEnd || number == 0) throw nb::value_error("there is no number left for another writer: the store's count is damaged");
        } while (!writers.compare_exchange_weak(last, number));
        return (number << kPidBits) | (pid & kMask);
      }, "lane"_a, "pid"_a, "above"_a = 0)
      .def_prop_rw("writer", &Store::writer, &Store::set_writer)
      .def("use_writer_locks", [](Store& s, int fd, int64_t first_byte, double patience) {
        s.set_writer_locks(WriterLocks(fd, first_byte, patience));
      }, "fd"_a, "first_byte"_a, "patience"_a)
      .def("extents", &extents_of, "lane"_a)
      // The table of streams. `use_streams` before a process appends.
      .def("use_streams", [](Store& s, int fd) { s.use_streams(StreamTable(fd)); }, "fd"_a)
      .def("stream_place", &stream_place, "entry"_a)
      .def("set_stream_place", &set_stream_place, "entry"_a, "stream"_a, "lane"_a.none(), "start"_a, "position"_a)
      .def("adopt_stream", &adopt, "entry"_a)
      .def("give_turns_back", [](Store& s, const Store::Stint* stream) { s.give_kept_back(stream); }, "stream"_a.none() = nb::none())
      // Where the next rows of a stream go, as long as its turn is kept: (lane, sequence, rows); None: it is not.
      .def("kept_place", [](const Store& s, const Store::Stint& stream) -> std::optional<std::tuple<uint64_t, uint64_t, uint64_t>> {
        if (stream.lane >= s.lanes.count() || !s.kept_for(stream.lane, stream)) return std::nullopt;
        return std::tuple(stream.lane, s.lanes.lane(stream.lane).published.load(), s.lanes.stints(stream.lane).left());
      }, "stream"_a)
      // Whether the stint in a lane lasts too long, so that others are to have the lane.
      .def("is_overdue", [](const Store& s, uint64_t l) {
        check_lane(s, l);
        OverdueStints overdue;
        for (uint64_t i = 0; i < s.lanes.count(); ++i) overdue.see(s.lanes.lane(i).ticket.load(), s.lanes.stints(i).left());
        const auto here = s.lanes.stints(l);
        return here.is_full(s.lanes.longest()) && overdue.has(s.lanes.count(), s.lanes.lane(l).ticket.load(), here.left());
      }, "lane"_a)
      .def("write_as", [](Store& s, Store::Stint* stream) { s.write_as(stream); }, "stream"_a.none())
      .def("set_stint", [](Store& s, uint64_t l, uint64_t ticket, uint64_t left) {
        s.must_be_writable();
        check_lane(s, l);
        LaneHeader& h = s.lanes.lane(l);
        h.ticket.store(ticket), h.until.store(h.published.load() + std::min(left, s.geometry().lane_capacity));
        s.stint().ticket_after = 0;
        if (Counter& tickets = s.lanes.header().tickets; tickets.load() < ticket) tickets.store(ticket);
      }, "lane"_a, "ticket"_a, "left"_a)
      .def_prop_rw(
          "carried_border",
          [](const Store& s) {
            const uint64_t agreed = s.stint().border_agreed;
            return agreed & kBorderKnown ? std::optional(agreed & ~kBorderKnown) : std::nullopt;
          },
          [](Store& s, std::optional<uint64_t> agreed) { s.stint().border_agreed = agreed ? *agreed | kBorderKnown : 0; },
          nb::for_setter(nb::arg("agreed").none()))
      .def("continue_stint", [](Store& s, uint64_t l) {
        check_lane(s, l);
        s.stint().lane = l;
      }, "lane"_a)
      .def_prop_ro("has_turn", &Store::has_turn)
      .def_prop_ro("has_written", &Store::has_written)
      .def("last_writer", [](const Store& s, uint64_t l) {
        check_lane(s, l);
        return s.lanes.lane(l).last_writer.load();
      }, "lane"_a)
      .def("begin_turn", [](Store& s, uint64_t l, uint64_t dead) {
        s.must_be_writable();
        check_lane(s, l);
        if (!s.writer()) throw nb::value_error("this process has no number among the writers");
        return s.begin_turn(l, dead);
      }, "lane"_a, "dead"_a = 0)
      .def("end_turn", [](Store& s, uint64_t l) { check_lane(s, l); s.end_turn(l); }, "lane"_a)
      .def("undo_takeover", [](Store& s, uint64_t l, uint64_t dead) {
        check_lane(s, l);
        s.undo_takeover(l, dead);
      }, "lane"_a, "dead"_a)
      .def("gather", &gather, "codec"_a, "slots"_a, "shape"_a.none() = nb::none(), "extra"_a.none() = nb::none(),
           "mapped"_a = false, "sequences"_a = false)
      .def("gather_leaves", &gather_leaves, "codec"_a, "slots"_a, "leaves"_a, "mapped"_a = false)
      .def("begin_save", [](Store& s, bool beside_writers) {
        if (s.geometry().payload_bytes == 0 || s.grows()) throw nb::value_error("this store's rows are kept elsewhere");
        return SharedSnapshot{beside_writers ? s.begin_save() : s.watch_save()};
      }, "beside_writers"_a = true)
      .def("end_save", &Store::end_save)
      .def_prop_ro("saving", [](const Store& s) { return s.saving() != nullptr; })
      .def("overwrite", &overwrite, "slots"_a, "plan"_a, "rows"_a.none() = nb::none())
      .def("prepare_overwrite", [](Store& s, nb::handle slots, const Plan& plan, nb::handle rows,
                                   std::optional<uint64_t> first, bool replaces) {
        return std::make_unique<Replacement>(s, slots, plan, rows, first, replaces);
      }, "slots"_a, "plan"_a, "rows"_a.none() = nb::none(), "first"_a.none() = nb::none(), "replaces"_a = false, nb::keep_alive<0, 1>(),
         nb::keep_alive<0, 3>())
      .def("note_edits", &note_edits, "slots"_a, "replaced"_a = false)
      .def_prop_ro("has_flow", [](const Store& s) { return s.lanes.has_flow(); })
      .def_prop_ro("removals", [](const Store& s) { return s.lanes.removals(); })
      .def_prop_ro("removed_rows", [](const Store& s) { s.check_file(); return s.lanes.removed_rows(); })
      .def("remove", &remove_rows, "lane"_a, "slots"_a, "generations"_a)
      // Positions of removed rows; None: there are none.
      .def("removed", [](const Store& s, nb::handle slots_in) -> std::optional<std::vector<uint32_t>> {
        s.check_file();
        const SlotsArg slots(nb::borrow(slots_in));
        std::vector<uint32_t> places = removed_places(s, slots.data, slots.n);
        return places.empty() ? std::nullopt : std::optional(std::move(places));
      }, "slots"_a)
      .def("removed_bits", &removed_bits, "lane"_a, "start"_a, "stop"_a)
      .def("restore_removed", &restore_removed, "lane"_a, "start"_a, "bits"_a)
      // ---- who waits for whom ----
      .def_prop_ro("is_limited", [](const Store& s) { s.check_file(); return s.lanes.flow_mode() != 0; })
      // Samples per insert, rows from which on, how far samplers may be ahead and behind, whether these two widen; None: no bound.
      .def_prop_ro("rate_limit", [](const Store& s) -> std::optional<std::tuple<double, double, double, double, bool>> {
        s.check_file();
        if (!s.lanes.is_limited()) return std::nullopt;
        const RateLimit limit = RateLimiter(s.lanes).limit();
        return std::tuple(limit.samples_per_insert, limit.min_size, limit.ahead, limit.behind, limit.widens);
      })
      .def("set_rate_limit", &set_rate_limit, "limit"_a.none())
      .def("may_insert", [](const Store& s) {
        s.must_be_writable();
        s.check_file();
        return !must_wait(s.lanes);
      })
      // 1: n rows were counted as drawn; 0: nobody counts them; -1: they may not be drawn now.
      .def("take_samples", [](const Store& s, uint64_t n) {
        s.check_file();
        return !s.lanes.is_limited() ? 0 : writable_limiter(s).take(n) ? 1 : -1;
      }, "n"_a)
      .def("let_write", [](const Store& s) { writable_limiter(s).let_write(); })
      .def("give_back_samples", [](const Store& s, uint64_t n) { writable_limiter(s).give_back(n); }, "n"_a)
      .def("restore_rate_counts", [](const Store& s, uint64_t inserts, uint64_t samples) {
        writable_limiter(s).restore(inserts, samples);
      }, "inserts"_a, "samples"_a)
      // Rows written and drawn since the counts began, rows that can be drawn, draws that there are to give.
      .def_prop_ro("rate_counts", [](const Store& s) -> std::optional<std::tuple<int64_t, uint64_t, uint64_t, double>> {
        s.check_file();
        if (!s.lanes.is_limited()) return std::nullopt;
        const RateLimiter limiter(s.lanes, !s.read_only());
        const double budget = limiter.budget();
        return std::tuple(static_cast<int64_t>(limiter.inserts()), limiter.samples(), limiter.stored(), budget);
      })
      // How often users of the store waited, and for how many ns: those who write, and those who sample.
      .def("note_wait", &note_wait, "inserts"_a, "ns"_a, "begins"_a)
      .def_prop_ro("waits", [](const Store& s) {
        s.check_file();
        if (!s.lanes.has_flow()) return std::array<uint64_t, 4>{};
        const Flow& flow = s.lanes.flow();
        return std::array<uint64_t, 4>{flow.insert_waits.load(), flow.insert_waited_ns.load(), flow.sample_waits.load(),
                                       flow.sample_waited_ns.load()};
      })
      .def_prop_rw("guest", &Store::guest, &Store::set_guest)
      .def("begin_removing", [](Store& s, uint64_t l, uint64_t dead) {
        s.must_be_writable();
        check_lane(s, l);
        if (!s.guest()) throw nb::value_error("this process has no number to remove rows under");
        const uint64_t holder = s.begin_removing(l, dead);
        try {
          if (dead && !holder && s.lanes.count() > 1) take_over_lane(s, l, dead);  // of one lane Python makes it good
        } catch (const SyncFailed&) {
          s.undo_takeover(l, dead);
          throw;
        }
        return holder;
      }, "lane"_a, "dead"_a = 0)
      .def("end_removing", [](Store& s, uint64_t l) { check_lane(s, l); s.end_removing(l); }, "lane"_a)
      .def("generations", &generations, "slots"_a)
      .def("reserve_sequences", &reserve_sequences, "n"_a)
      .def("count_replaced", [](const Store& s, nb::handle slots_in) {  // as written; -1: not replaced
        s.must_be_writable();
        const SlotsArg slots(nb::borrow(slots_in));
        const auto n = std::count_if(slots.data, slots.data + slots.n, [](int64_t slot) { return slot >= 0; });
        s.lanes.lane(0).origin.fetch_sub(static_cast<uint64_t>(n), std::memory_order_relaxed);
      }, "slots"_a)
      .def("widened", &widened, "payload_bytes"_a, "alignment"_a, "layout"_a, "moves"_a)
      .def("uniform", &uniform, "seed"_a, "n"_a);
}

void bind_fork_page(nb::module_& m) {
  m.def("is_new_process", [] { return ForkPage::instance().is_new_process(); });
  m.def("notice_fork", [] { joined_after_fork(); });
  m.def("acknowledge_fork", [] { ForkPage::instance().acknowledge(); });
}

void bind_store_testing(nb::module_& m) {
  using namespace nb::literals;
  m.attr("PLANTED") =
#if defined(ENGRAM_PLANT_CLAIM_AFTER_COPY)
      "CLAIM_AFTER_COPY";
#elif defined(ENGRAM_PLANT_CLAIM_READ_EARLY)
      "CLAIM_READ_EARLY";
#elif defined(ENGRAM_PLANT_PUBLISH_BEFORE_COPY)
      "PUBLISH_BEFORE_COPY";
#elif defined(ENGRAM_PLANT_ROWS_BEFORE_PUBLISHED)
      "ROWS_BEFORE_PUBLISHED";
#else
      "";
#endif
  m.def("crc32c", [](nb::bytes b, uint32_t crc) { return crc32c(crc, b.c_str(), b.size()); }, "data"_a, "crc"_a = 0);
  m.def("crc32c_by_table", [](nb::bytes b) {
    return ~crc32c_table(~uint32_t{0}, reinterpret_cast<const uint8_t*>(b.c_str()), b.size());
  }, "data"_a);
  m.def("is_lazy", [](Tensor tensor) { return is_lazy(tensor.ptr()); }, "tensor"_a);
  m.def("pool_bytes", [] { return BlockPool::instance().free_bytes(); });
  m.def("empty_pool", [] { BlockPool::instance().empty(); });

  m.def("block_fields", &block_fields);
  m.def("redo_offset", [](const Store& s) { return s.geometry().redo_offset; }, "store"_a);
  m.def("has_trailer", [](const Store& s) { return s.has_trailer(); }, "store"_a);
  m.def("is_whole", [](const Store& s, uint64_t physical_row) {
    if (!s.has_trailer() || physical_row >= s.slots()) throw nb::index_error("no such row with a trailer");
    s.check_file();
    return s.whole(physical_row);
  }, "store"_a, "physical_row"_a);
  m.def("reads_ahead", [](Store& s) { return s.readahead().on(); }, "store"_a);
  m.def("claim", [](const Store& s, uint64_t l, uint64_t n) {
    s.must_be_writable();
    check_lane(s, l);
    return s.lanes.claim(l, n);
  }, "store"_a, "lane"_a, "n"_a);
  m.def("publish", [](const Store& s, uint64_t l, uint64_t at, uint64_t n) {
    s.must_be_writable();
    check_lane(s, l);
    s.lanes.publish(l, at, n);
  }, "store"_a, "lane"_a, "at"_a, "n"_a);

  m.def("keep_durable_tails_interrupted", &keep_durable_tails_interrupted, "store"_a, "meanwhile"_a);
}

}  // namespace engram
