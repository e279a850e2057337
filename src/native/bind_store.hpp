// Python bindings of stores, codecs, plans and saves: arguments are checked here, before memory is touched.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
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

#include "codec.hpp"
#include "draw.hpp"
#include "recovery.hpp"
#include "stints.hpp"

namespace engram {

// Larger sizes exceed any memory and are refused before they are multiplied.
constexpr size_t kMostBytes = size_t{1} << 46;

// int64 [n].
inline Tensor slots_out(size_t n, auto fill) {
  if (n > kMostBytes / 8) throw std::bad_alloc();
  OutBlock block;
  const int64_t lead = static_cast<int64_t>(n);
  static const std::vector<int64_t> scalar;
  block.plan({kDLInt, 64}, &lead, 1, scalar, n * 8);
  block.take();
  fill(reinterpret_cast<int64_t*>(block.data(0)));
  return block.make(0);
}

inline std::string bytes_of(nb::bytes b) { return {b.c_str(), b.size()}; }

inline void check_lane(const Store& store, uint64_t lane) {
  store.check_file();
  if (lane >= store.geometry().lanes)
    throw nb::index_error(("lane " + std::to_string(lane) + " of " + std::to_string(store.geometry().lanes)).c_str());
}

// Releases the GIL for long copies only: acquiring it again beside a busy thread costs milliseconds.
template <typename F>
inline void maybe_without_gil(bool release, F&& work) {
  if (release) {
    nb::gil_scoped_release unlocked;
    work();
  } else {
    work();
  }
}

// Whether to release the GIL while rows of so many bytes are written. Rows that grow may move then: other threads wait.
inline bool writes_long(Store& store, size_t bytes) {
  return (bytes > kGilBytes && !store.grows()) || store.readahead().on();
}

// The time slots that n steps appended at sequence `first` take.
inline Tensor slots_from(const Store& store, uint64_t lane, uint64_t first, size_t n) {
  const uint64_t capacity = store.geometry().lane_capacity;
  return slots_out(n, [&](int64_t* out) {
    uint64_t slot = first % capacity;
    for (size_t i = 0; i < n; ++i) {
      out[i] = static_cast<int64_t>(lane * capacity + slot);
      if (++slot == capacity) slot = 0;
    }
  });
}

inline int64_t slot_in(const Store& store, uint64_t lane, uint64_t sequence) {
  const uint64_t capacity = store.geometry().lane_capacity;
  return static_cast<int64_t>(lane * capacity + sequence % capacity);
}

// The slots of the next n steps of a process that moves from lane to lane, if no other one writes meanwhile.
inline Tensor next_stint_slots(const Store& store, size_t n) {
  store.check_file();
  if (n > kMostBytes / 8) throw std::bad_alloc();
  const std::vector<LaneRun> runs = next_runs(store, n);
  return slots_out(n, [&](int64_t* out) {
    for (const LaneRun& run : runs)
      for (uint64_t i = 0; i < run.steps; ++i) *out++ = slot_in(store, run.lane, run.first + i);
  });
}

inline Tensor next_slots(Store& store, uint64_t lane, size_t n) {
  check_lane(store, lane);
  return slots_from(store, lane, store.lanes.lane(lane).published.load(), n);
}

// Holds the turn to append to a lane for the lifetime of this object, in a store whose writers take turns.
class Turn {
 public:
  Turn(Store& store, uint64_t lane) : store_(store), lane_(lane) {
    if (!store.writer() || store.has_turn()) return;
    // Before the first append the caller checks whether there is another writer.
    mine_ = store.has_written() && store.begin_turn(lane) == 0;
    refused_ = !mine_;
  }
  ~Turn() {
    if (mine_) store_.end_turn(lane_);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  bool refused() const { return refused_; }

 private:
  Store& store_;
  uint64_t lane_;
  bool mine_ = false, refused_ = false;
};

// Whether rows that store their own index store the time slots from this one on.
inline bool is_index_of(const Plan& plan, uint64_t time_slot) {
  if (!plan.index || plan.steps == 0) return true;
  int64_t stored = 0;
  std::memcpy(&stored, plan.leaves[*plan.index].at(0, 0), sizeof stored);
  return static_cast<uint64_t>(stored) == time_slot;
}

// Appends in stints; other threads run while this process waits for a lane, and signals are handled.
inline void append_moving_on(Store& store, const std::vector<LeafSource>& leaves, size_t n, std::optional<size_t> index,
                             int64_t* out, bool without_gil, const std::vector<LeafSource>* looked_at = nullptr) {
  const auto sleep = [](double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); };
  const auto handle_signals = [] {
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
  if (without_gil) {
    nb::gil_scoped_release unlocked;
    return append_in_stints(store, leaves, n, index, out, [&](double seconds) {
      sleep(seconds);
      nb::gil_scoped_acquire locked;
      handle_signals();
    }, looked_at);
  }
  append_in_stints(store, leaves, n, index, out, [&](double seconds) {
    {
      nb::gil_scoped_release unlocked;
      sleep(seconds);
    }
    handle_signals();
  }, looked_at);
}

// Called before rows are written: the rule of the border reads leaves of the layout for which it was made.
inline void check_border(const Store& store, const Plan& plan) {
  if (plan.codec != store.border().codec && !BorderCheck(store).fits(plan.leaves))
    throw nb::value_error("the layout is not that of the rows of this store");
}

// `most`: appends at most this many of the first steps. None: the caller must get the turn first; or it has the turn, and the
// rows store the index of others; or this process was forked and holds no lane.
inline nb::object append(Store& store, uint64_t lane, const Plan& plan, std::optional<size_t> most) {
  if (joined_after_fork()) return nb::none();
  store.must_be_writable();
  check_lane(store, lane);
  const size_t steps = most ? std::min(*most, plan.steps) : plan.steps;
  const StoreGeometry& s = store.geometry();
  if (plan.envs != s.envs)
    throw nb::value_error(("the batch has " + std::to_string(plan.envs) + " environments, the store " +
                           std::to_string(s.envs)).c_str());
  for (const LeafSource& leaf : plan.leaves)
    if (!store.has_leaf(leaf.offset, leaf.bytes)) throw nb::value_error("a leaf lies outside the row");
  check_border(store, plan);
  if (store.moves_on()) {
    int64_t first = 0, *out = &first;
    nb::object slots;
    if (!plan.single) slots = nb::cast(slots_out(steps, [&](int64_t* to) { out = to; }));
    append_moving_on(store, plan.leaves, steps, plan.index, out, writes_long(store, plan.bytes));
    return plan.single ? nb::object(nb::int_(first)) : slots;
  }
  const Turn turn(store, lane);
  if (turn.refused()) return nb::none();
  // Makes the result before the rows: once they are published nothing may fail any more. The caller keeps this process's other
  // writers out.
  const uint64_t first = store.lanes.lane(lane).published.load();
  const uint64_t first_slot = lane * s.lane_capacity + first % s.lane_capacity;
  if (store.writer() && !is_index_of(plan, first_slot)) return nb::none();
  nb::object slots = plan.single ? nb::object(nb::int_(first_slot))
                                 : slots_from(store, lane, first, steps);
  maybe_without_gil(writes_long(store, plan.bytes), [&] {
    RowWriter(store).append(lane, steps, plan.leaves);
  });
  return slots;
}

// ---- packed rows: uint8 [n, row bytes], in the layout of a store ----
using PackedRows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;

inline void check_packed(const PackedRows& rows, size_t row_bytes, const char* whose) {
  if (rows.shape(1) != row_bytes)
    throw nb::value_error(("the rows have " + std::to_string(rows.shape(1)) + " bytes each, those of " + whose + " " +
                           std::to_string(row_bytes)).c_str());
  if (rows.shape(0) > 0 && rows.shape(1) > 1 && rows.stride(1) != 1) throw nb::value_error("the bytes of a row must lie side by side");
  if (rows.shape(0) > kMostBytes / std::max<size_t>(1, row_bytes)) throw std::bad_alloc();
}

// Appends packed rows of the codec's layout; returns their slots. In a store of one lane the caller keeps its other writers out.
inline Tensor append_packed(Store& store, const Codec& codec, const PackedRows& rows) {
  if (joined_after_fork()) throw nb::value_error("this process was forked and is no writer yet; nothing was written");
  store.must_be_writable();
  const StoreGeometry& s = store.geometry();
  if (s.payload_bytes == 0) throw nb::value_error("this store's rows are kept elsewhere");
  if (store.observations()) throw nb::value_error("this store's rows have observations beside them: append their leaves");
  if (s.envs != 1) throw nb::value_error("packed rows are steps of one environment each");
  if (store.lanes.count() > 1 && !store.writer()) throw nb::value_error("this process has no number among the writers");
  if (store.lanes.count() == 1 && store.writer()) throw nb::value_error("packed rows are not appended in turns");
  if (codec.sequence()) throw nb::value_error("rows that carry their own sequence are not appended as they are");
  if (codec.row_end() > s.payload_bytes) throw nb::value_error("the layout does not fit the rows of this store");
  check_packed(rows, s.payload_bytes, "the store");
  const size_t n = rows.shape(0);
  const ptrdiff_t stride = rows.stride(0);
  const std::vector<LeafSource> whole{{0, s.payload_bytes, rows.data(), stride, 0}};
  std::vector<LeafSource> leaves;
  for (const Leaf& leaf : codec.leaves())
    leaves.push_back({leaf.offset, leaf.bytes, rows.data() + leaf.offset, stride, 0});
  if (!BorderCheck(store).fits(leaves)) throw nb::value_error("the layout is not that of the rows of this store");
  if (store.moves_on()) {
    int64_t* out = nullptr;
    Tensor slots = slots_out(n, [&](int64_t* to) { out = to; });
    append_moving_on(store, whole, n, std::nullopt, out, writes_long(store, n * s.payload_bytes), &leaves);
    return slots;
  }
  Tensor slots = slots_from(store, 0, store.lanes.lane(0).published.load(), n);
  maybe_without_gil(writes_long(store, n * s.payload_bytes), [&] {
    RowWriter(store).append(0, n, whole, leaves);
  });
  return slots;
}

// A checked batch as packed rows: uint8 [steps, row bytes].
inline Tensor pack(const Plan& plan, size_t row_bytes) {
  if (plan.envs != 1) throw nb::value_error("packed rows are steps of one environment each");
  if (row_bytes > kMostLeafBytes || plan.steps > kMostBytes / std::max<size_t>(1, row_bytes)) throw std::bad_alloc();
  for (const LeafSource& leaf : plan.leaves)
    if (leaf.offset > row_bytes || leaf.bytes > row_bytes - leaf.offset)
      throw nb::value_error("a leaf lies outside the row");
  OutBlock block;
  const auto lead = static_cast<int64_t>(plan.steps);
  const std::vector<int64_t> inner{static_cast<int64_t>(row_bytes)};
  block.plan({kDLUInt, 8}, &lead, 1, inner, plan.steps * row_bytes);
  block.take();
  uint8_t* const to = block.data(0);
  std::vector<uint8_t*> rows(plan.steps);
  std::vector<LeafCopy> copies;
  size_t leaf_bytes = 0;
  for (const LeafSource& leaf : plan.leaves) {
    copies.push_back({leaf.offset, leaf.bytes, const_cast<uint8_t*>(leaf.array), leaf.stride});
    leaf_bytes += leaf.bytes;
  }
  maybe_without_gil(plan.bytes > kGilBytes, [&] {
    if (leaf_bytes < row_bytes) std::memset(to, 0, plan.steps * row_bytes);  // bytes that belong to no leaf
    for (size_t i = 0; i < plan.steps; ++i) rows[i] = to + i * row_bytes;
    scatter_rows(rows.data(), plan.steps, copies.data(), copies.size());
  });
  return block.make(0);
}

// Packed rows as a batch [n] in memory of its own; a list of leaves where the codec has no tree. `extra`: entries to add at
// its root, a dict; None: there are none.
inline nb::object unpack(const Codec& codec, const PackedRows& packed, nb::handle extra) {
  check_packed(packed, std::max<size_t>(1, codec.row_end()), "the layout");
  const size_t n = packed.shape(0);
  const auto& leaves = codec.leaves();
  const std::vector<int64_t> lead(1, static_cast<int64_t>(n));
  std::vector<std::unique_ptr<OutBlock>> blocks;  // a block each, because a leaf may be kept without the others
  std::vector<LeafCopy> copies;
  for (const Leaf& leaf : leaves) {
    OutBlock& block = *blocks.emplace_back(std::make_unique<OutBlock>());
    block.plan(leaf.dtype, lead.data(), 1, leaf.shape, leaf.bytes * n);
    block.take();
    copies.push_back({leaf.offset, leaf.bytes, block.data(0), static_cast<ptrdiff_t>(leaf.bytes)});
  }
  std::vector<const uint8_t*> rows(n);
  maybe_without_gil(n * packed.shape(1) > kGilBytes, [&] {
    for (size_t i = 0; i < n; ++i) rows[i] = packed.data() + static_cast<ptrdiff_t>(i) * packed.stride(0);
    gather_rows(rows.data(), n, packed.shape(1), copies.data(), copies.size());
  });
  std::vector<nb::object> tensors;
  for (auto& block : blocks) tensors.push_back(block->make(0));
  return codec.build(tensors, lead, extra);
}

inline nb::object positions(const std::vector<uint32_t>& at) {
  if (at.empty()) return nb::none();
  nb::list list;
  for (uint32_t i : at) list.append(i);
  return nb::object(list);
}

struct Reading {
  ReadResult result;
  bool inside = true;
  size_t outside = 0;  // of several stores, the one with a slot outside

  // Appends another store's rows behind the first n.
  void join(const Reading& other, size_t n) {
    inside = inside && other.inside;
    result.sequences.insert(result.sequences.end(), other.result.sequences.begin(), other.result.sequences.end());
    for (uint32_t i : other.result.missing) result.missing.push_back(static_cast<uint32_t>(i + n));
    for (uint32_t i : other.result.unwritten) result.unwritten.push_back(static_cast<uint32_t>(i + n));
  }
};

// Not inlined: the thread's scratch memory would be looked up again for each row.
[[gnu::noinline]] inline void read_rows(Store& store, const int64_t* slots, size_t n, std::vector<LeafCopy>& copies,
                                        bool mapped, bool sequences, Reading& out, ReadScratch& scratch) {
  RowReader reader(store, scratch);
  if (!(out.inside = reader.find(slots, n))) return;
  reader.copy(copies.data(), copies.size(), mapped);
  reader.settle(sequences, out.result);
}

inline void read_rows(Store& store, const int64_t* slots, size_t n, std::vector<LeafCopy>& copies, bool mapped,
                      bool sequences, Reading& out) {
  static thread_local ReadScratch scratch;
  read_rows(store, slots, n, copies, mapped, sequences, out, scratch);
}

[[gnu::noinline]] inline bool has_all_leaves(const Store& store, const Codec& codec) {
  return !codec.sequence() && std::all_of(codec.leaves().begin(), codec.leaves().end(),
                                          [&](const Leaf& leaf) { return store.has_leaf(leaf.offset, leaf.bytes); });
}
inline void check_codec(const Store& store, const Codec& codec) {
  store.check_file();
  if (codec.row_end() > store.geometry().payload_bytes && !has_all_leaves(store, codec))
    throw nb::value_error("the layout does not fit the rows of this store");
}

inline nb::tuple finish_read(nb::object rows, const Reading& reading, bool sequences) {
  nb::object generation = nb::none();
  if (sequences)
    generation = slots_out(reading.result.sequences.size(), [&](int64_t* out) {
      std::copy(reading.result.sequences.begin(), reading.result.sequences.end(), out);
    });
  return nb::make_tuple(rows, positions(reading.result.missing), positions(reading.result.unwritten), generation);
}

// The sequences that rows carry, copied with the rows: they replace those that the lanes count.
class OwnSequences {
 public:
  OwnSequences(const Codec& codec, size_t n) : offset_(codec.sequence()), values_(offset_ ? n : 0) {}
  void add(std::vector<LeafCopy>& copies, size_t from) {
    if (values_.empty()) return;
    copies.push_back({*offset_, kSequenceBytes, reinterpret_cast<uint8_t*>(values_.data() + from), kSequenceBytes});
  }
  void put(std::vector<uint64_t>& sequences) const {
    for (size_t i = 0; i < values_.size(); ++i)
      if (values_[i] >= kFirstReplaced && values_[i] < kFirstReplaced * 2) sequences[i] = values_[i];
  }

 private:
  std::optional<size_t> offset_;
  std::vector<uint64_t> values_;
};

inline void refuse_slots(const Store& store) {
  throw nb::index_error(("a slot lies outside 0 to " + std::to_string(store.slots() - 1)).c_str());
}

// The memory of a batch's leaves `[lead..., inner...]`: small ones share a block, each big one has a block of its own. `leaves`
// and `lead` must outlive this object. `more`: further tensors that the caller plans.
class LeafMemory {
 public:
  explicit LeafMemory(size_t expected) : shared_(expected) { at_.reserve(expected); }
  LeafMemory(const std::vector<Leaf>& leaves, const std::vector<int64_t>& lead, size_t rows, size_t more)
      : LeafMemory(leaves.size() + more) {
    for (const Leaf& leaf : leaves) plan(leaf, lead, rows);
  }
  size_t plan(const Leaf& leaf, const std::vector<int64_t>& lead, size_t rows) {
    if (leaf.bytes > kMostBytes / std::max<size_t>(1, rows)) throw std::bad_alloc();
    return plan(leaf.dtype, lead, leaf.shape, leaf.bytes * rows);
  }
  // Plans a further tensor of this many bytes; returns its position.
  size_t plan(DType dtype, const std::vector<int64_t>& lead, const std::vector<int64_t>& inner, size_t bytes) {
    if ((bytes_ += bytes) > kMostBytes) throw std::bad_alloc();
    OutBlock* block = &shared_;
    if (bytes >= kBigLeaf)
      block = own_.emplace_back(std::make_unique<OutBlock>()).get();
    else
      any_shared_ = true;
    at_.emplace_back(block, block->plan(dtype, lead.data(), lead.size(), inner, bytes));
    return at_.size() - 1;
  }
  // A tensor `[lead, inner...]` over a part of tensor i, from `offset` (bytes) on; returns its position.
  size_t alias(size_t i, const std::vector<int64_t>& lead, size_t offset) {
    const auto [block, place] = at_[i];
    at_.emplace_back(block, block->alias(place, lead.data(), lead.size(), offset));
    return at_.size() - 1;
  }
  void take() {
    if (any_shared_) shared_.take();
    for (auto& block : own_) block->take();
  }
  size_t bytes() const { return bytes_; }
  uint8_t* data(size_t i) const { return at_[i].first->data(at_[i].second); }
  Tensor make(size_t i) { return at_[i].first->make(at_[i].second); }

 private:
  OutBlock shared_;
  std::vector<std::unique_ptr<OutBlock>> own_;
  std::vector<std::pair<OutBlock*, size_t>> at_;
  size_t bytes_ = 0;
  bool any_shared_ = false;
};

// Reads the same number of rows from each of several stores of one layout into one batch; numbers and positions run through all
// of them. With `parts` (an extra dict or None for each store) also returns each store's rows as a batch, in the memory of the
// whole.
inline nb::tuple gather_many(const std::vector<Store*>& stores, const Codec& codec, nb::handle slots_in,
                             std::optional<std::vector<int64_t>> shape, nb::handle extra, bool mapped, bool sequences,
                             nb::handle parts = nb::none()) {
  for (const Store* store : stores) check_codec(*store, codec);
  const SlotsArg slots(nb::borrow(slots_in), true);
  if (stores.empty() || slots.n % stores.size() != 0) throw nb::value_error("as many slots are needed for each store");
  const size_t each = slots.n / stores.size();
  std::vector<int64_t> lead(1, static_cast<int64_t>(slots.n));
  if (shape) {
    unsigned __int128 rows = 1;
    for (int64_t d : *shape) {
      if (d < 0 || rows > kMostBytes) throw nb::value_error("a dimension is negative or too large");
      rows *= static_cast<uint64_t>(d);
    }
    if (rows != slots.n) throw nb::value_error("shape and number of slots differ");
    lead = std::move(*shape);
  }
  const auto& leaves = codec.leaves();
  std::vector<nb::object> extras;
  if (!parts.is_none())
    for (nb::handle one : nb::cast<nb::list>(parts)) extras.push_back(nb::borrow(one));
  if (!extras.empty() && extras.size() != stores.size()) throw nb::value_error("parts needs one entry for each store");
  const std::vector<int64_t> part_lead(1, static_cast<int64_t>(each));
  LeafMemory memory(leaves, lead, slots.n, leaves.size() * extras.size());
  for (size_t p = 0; p < extras.size(); ++p)
    for (size_t k = 0; k < leaves.size(); ++k) memory.alias(k, part_lead, p * each * leaves[k].bytes);
  memory.take();
  std::vector<nb::object> tensors;
  tensors.reserve(leaves.size());
  for (size_t k = 0; k < leaves.size(); ++k) tensors.push_back(memory.make(k));
  std::vector<nb::object> part_tensors;
  for (size_t i = 0; i < leaves.size() * extras.size(); ++i) part_tensors.push_back(memory.make(leaves.size() + i));
  // No Python code runs from here until the copy ends: a finaliser that samples would use the same scratch memory.
  static thread_local std::vector<LeafCopy> copies;
  Reading all;
  OwnSequences own_sequences(codec, sequences ? slots.n : 0);
  bool asking = false, grows = false;  // rows that grow may move while another thread runs
  for (Store* store : stores) asking |= store->readahead().on(), grows |= store->grows();
  maybe_without_gil(!grows && (memory.bytes() > kGilBytes || (mapped && asking)), [&] {
    for (size_t p = 0; p < stores.size() && all.inside; ++p) {
      copies.clear();
      for (size_t k : codec.in_row())
        copies.push_back({leaves[k].offset, leaves[k].bytes,
                          memory.data(k) + p * each * leaves[k].bytes,
                          static_cast<ptrdiff_t>(leaves[k].bytes)});
      own_sequences.add(copies, p * each);
      if (p == 0) {
        read_rows(*stores[p], slots.data, each, copies, mapped, sequences, all);
      } else {
        Reading one;
        read_rows(*stores[p], slots.data + p * each, each, copies, mapped, sequences, one);
        all.join(one, p * each);
      }
      if (!all.inside) all.outside = p;
    }
  });
  if (!all.inside) refuse_slots(*stores[all.outside]);
  own_sequences.put(all.result.sequences);
  nb::tuple read = finish_read(codec.build(tensors, lead, extra), all, sequences);
  if (extras.empty()) return read;
  nb::list part_batches;
  for (size_t p = 0; p < extras.size(); ++p) {
    std::vector<nb::object> mine;
    for (size_t k = 0; k < leaves.size(); ++k) mine.push_back(std::move(part_tensors[p * leaves.size() + k]));
    part_batches.append(codec.build(mine, part_lead, extras[p]));
  }
  return nb::make_tuple(read[0], read[1], read[2], read[3], part_batches);
}

// The members' draws of an ensemble as int64 [members, rows]: slots, and the id of each slot's member. None: the draws are not
// slots (but tuples or masks), or have different lengths.
inline std::optional<std::pair<Tensor, Tensor>> joint_index(nb::list drawn, const std::vector<int64_t>& members) {
  if (nb::len(drawn) != members.size() || members.empty()) throw nb::value_error("slots are needed for each member");
  std::vector<const int64_t*> slots;
  std::vector<nb::object> keep;
  size_t n = 0;
  for (nb::handle h : drawn) {
    TensorView t;
    keep.push_back(nb::borrow(h));
    if (!t.of(h.ptr()) || t.ndim != 1 || !(t.dtype == DType{kDLInt, 64})) return std::nullopt;
    if ((t.strides && t.strides[0] != 1 && t.shape[0] > 1) || (slots.size() && static_cast<size_t>(t.shape[0]) != n))
      return std::nullopt;
    n = static_cast<size_t>(t.shape[0]);
    slots.push_back(reinterpret_cast<const int64_t*>(t.data));
  }
  if (n > kMostBytes / 8 / members.size()) throw std::bad_alloc();
  const int64_t lead[2] = {static_cast<int64_t>(members.size()), static_cast<int64_t>(n)};
  static const std::vector<int64_t> scalar;
  OutBlock block(2);
  for (int k = 0; k < 2; ++k) block.plan({kDLInt, 64}, lead, 2, scalar, members.size() * n * 8);
  block.take();
  for (size_t m = 0; m < members.size(); ++m) {
    std::copy_n(slots[m], n, reinterpret_cast<int64_t*>(block.data(0)) + m * n);
    std::fill_n(reinterpret_cast<int64_t*>(block.data(1)) + m * n, n, members[m]);
  }
  Tensor index = block.make(0), ids = block.make(1);
  return std::pair(std::move(index), std::move(ids));
}

inline nb::tuple gather(Store& store, const Codec& codec, nb::handle slots_in, std::optional<std::vector<int64_t>> shape,
                        nb::handle extra, bool mapped, bool sequences) {
  return gather_many({&store}, codec, slots_in, std::move(shape), extra, mapped, sequences);
}

// ---- some leaves of rows, without the batch around them ----
inline const Leaf& leaf_of(const Codec& codec, size_t k) {
  if (k >= codec.leaves().size()) throw nb::index_error("the rows have no such leaf");
  return codec.leaves()[k];
}

// As `gather`, of the leaves with these numbers only: a list of a tensor [n, ...] for each, and the positions of rows that were
// overwritten meanwhile and of slots without a row.
inline nb::tuple gather_leaves(Store& store, const Codec& codec, nb::handle slots_in, const std::vector<size_t>& chosen,
                               bool mapped) {
  check_codec(store, codec);
  const SlotsArg slots(nb::borrow(slots_in));
  const std::vector<int64_t> lead(1, static_cast<int64_t>(slots.n));
  LeafMemory memory(chosen.size());
  for (size_t k : chosen) memory.plan(leaf_of(codec, k), lead, slots.n);
  if (!chosen.empty()) memory.take();
  nb::list tensors;
  for (size_t i = 0; i < chosen.size(); ++i) tensors.append(memory.make(i));
  // No Python code runs from here until the copy ends: a finaliser that reads would use the same scratch memory.
  static thread_local std::vector<LeafCopy> copies;
  copies.clear();
  for (size_t i = 0; i < chosen.size(); ++i) {
    const Leaf& leaf = codec.leaves()[chosen[i]];
    copies.push_back({leaf.offset, leaf.bytes, memory.data(i), static_cast<ptrdiff_t>(leaf.bytes)});
  }
  std::sort(copies.begin(), copies.end(), [](const LeafCopy& a, const LeafCopy& b) { return a.offset < b.offset; });
  Reading reading;
  // Rows that grow may move while another thread runs.
  const bool release = !store.grows() && (memory.bytes() > kGilBytes || (mapped && store.readahead().on()));
  maybe_without_gil(release, [&] { read_rows(store, slots.data, slots.n, copies, mapped, false, reading); });
  if (!reading.inside) refuse_slots(store);
  return nb::make_tuple(tensors, positions(reading.result.missing), positions(reading.result.unwritten));
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
    for (const LeafSource& leaf : plan.leaves) {
      if (!store.has_leaf(leaf.offset, leaf.bytes)) throw nb::value_error("a leaf lies outside the row");
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
    for (int64_t slot : slots_)
      if (static_cast<uint64_t>(slot) >= store.slots()) refuse_slots(store);
    if (store.grows() && !slots_.empty())
      store.make_room(static_cast<uint64_t>(*std::max_element(slots_.begin(), slots_.end())) + 1);
    sequences_.reserve(s.lanes);
    writer_.prepare(slots_.data(), slots_.size(), leaves_.size());
  }
  // Every slot must hold a row by now.
  void write() {
    if (differing_leaf()) throw nb::value_error("observations that are stored once are shared by several rows, and stay as they are");
    writer_.write(slots_.data(), slots_.size(), leaves_, chosen_ ? rows_.data() : nullptr, replaces_);
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
  std::vector<int64_t> slots_, rows_;
  std::vector<uint64_t> own_sequences_;
  bool chosen_ = false, replaces_ = false;
  std::vector<SlotSequences> sequences_;
  InPlaceWriter writer_;
  std::vector<LeafSource> leaves_;    // that lie in the row
  std::vector<LeafSource> observed_;  // that lie beside it
};

inline void overwrite(Store& store, nb::handle slots, const Plan& plan, nb::handle rows) {
  Replacement(store, slots, plan, rows, std::nullopt).write();
}

// Reserves the sequences of n rows that are about to be written over others; returns the first one. They are counted before the
// rows are written: a process that opens the store after a kill must not give these sequences to other rows.
inline uint64_t reserve_sequences(const Store& store, uint64_t n) {
  store.must_be_writable();
  Counter& replaced = store.header()->replaced;
  const uint64_t given = std::min(replaced.load(), kFirstReplaced / 2);  // a damaged header
  replaced.store(given + std::min(n, kFirstReplaced / 4));
  return kFirstReplaced + given;
}

// A store in private memory with the same rows, counters and identity, whose rows are longer. `moves`: the old offset of bytes
// in a row, their new offset, and their number.
inline std::unique_ptr<Store> widened(const Store& store, uint64_t payload_bytes, uint64_t alignment, nb::bytes layout,
                                      const std::vector<std::array<uint64_t, 3>>& moves) {
  const StoreGeometry& s = store.geometry();
  if (store.fd() >= 0 || s.payload_bytes == 0 || store.grows() || store.observations()) throw nb::value_error("only rows in private memory can be made longer");
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
inline void note_edits(Store& store, nb::handle slots_in, bool replaced) {
  store.must_be_writable();
  const SlotsArg slots(nb::borrow(slots_in));
  for (size_t i = 0; i < slots.n; ++i)
    if (static_cast<uint64_t>(slots.data[i]) >= store.slots()) refuse_slots(store);
  InPlaceWriter(store).note(slots.data, slots.n, replaced);
}

// ---- removed rows ----
// Removes rows of a lane, whose turn this process has: those in these slots that still have these generations, as the lanes count.
// Slots of other lanes are left out. Returns how many were there, and not removed before.
inline uint64_t remove_rows(Store& store, uint64_t lane, nb::handle slots_in, nb::handle generations_in) {
  store.must_be_writable();
  check_lane(store, lane);
  const Lanes& lanes = store.lanes;
  if (!lanes.can_remove()) throw nb::value_error("this store was made by an engram that removed no rows");
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

// The positions among these slots of rows that are removed.
inline std::vector<uint32_t> removed_places(const Store& store, const int64_t* slots, size_t n) {
  std::vector<uint32_t> places;
  if (!store.lanes.some_removed()) return places;
  if (store.lanes.count() == 1) {  // as below, without a division for each
    const RemovedRows<StdMemory> removed = store.lanes.removed(0);
    for (size_t i = 0; i < n; ++i)
      if (removed.has(static_cast<uint64_t>(slots[i]))) places.push_back(static_cast<uint32_t>(i));
    return places;
  }
  for (size_t i = 0; i < n; ++i)
    if (store.lanes.is_removed(static_cast<uint64_t>(slots[i]))) places.push_back(static_cast<uint32_t>(i));
  return places;
}

// A bit for each of rows [from, to) of a lane, in the order of time and environments, the lowest of a byte first: set where the row
// is removed. Empty: none is.
inline nb::bytes removed_bits(const Store& store, uint64_t l, uint64_t from, uint64_t to) {
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
inline void restore_removed(Store& store, uint64_t l, uint64_t from, nb::bytes given) {
  store.must_be_writable();
  check_lane(store, l);
  const std::string bits = bytes_of(given);
  const Lanes& lanes = store.lanes;
  if (bits.empty()) return;
  if (!lanes.can_remove()) throw nb::value_error("this store was made by an engram that removed no rows");
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

// Generations of slots as the lanes count: sequences, -1 where a slot holds no row.
inline Tensor generations(const Store& store, nb::handle slots_in) {
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

inline std::optional<Tensor> uniform(Store& store, nb::handle seed_in, size_t n) {
  const SlotsArg seed(nb::borrow(seed_in));
  if (seed.n < 1) throw nb::value_error("no seed");
  store.check_file();
  if (store.lanes.rows() == 0) return std::nullopt;
  bool drawn = false;
  Tensor slots = slots_out(n, [&](int64_t* out) {
    drawn = draw_uniform(store.lanes, static_cast<uint64_t>(seed.data[0]), out, n);
  });
  return drawn ? std::optional(std::move(slots)) : std::nullopt;
}

// One pass over the rows that existed when an epoch began, in a store whose lanes had `ring` steps (0: as this one's) and
// whose sequences were higher by `moved[lane]` (empty: by 0). A position of the epoch always means the same row.
class EpochWalk {
 public:
  EpochWalk(const Store& store, uint64_t key, bool shuffle, std::vector<std::pair<uint64_t, uint64_t>> ranges,
            uint64_t ring, std::vector<uint64_t> moved, bool with_removed)
      : with_removed_(with_removed), map_(ring ? ring : store.lanes.capacity(), store.lanes.envs()), moved_(std::move(moved)),
        permutation_(0, 0, false) {
    if (moved_.empty()) moved_.resize(ranges.size());
    if (ranges.size() != store.lanes.count() || moved_.size() != ranges.size())
      throw nb::value_error("one range for each lane");
    for (auto [first, rows] : ranges) {
      if (rows > store.lanes.capacity() || (ring && rows > ring)) throw nb::value_error("a range is longer than its lane");
      map_.add(first, rows);
      first_.push_back(first);
    }
    permutation_ = Permutation(key, map_.total(), shuffle);
    in_place_ = (!ring || ring == store.lanes.capacity()) && std::ranges::all_of(moved_, [](uint64_t m) { return m == 0; });
  }
  uint64_t size() const { return map_.total(); }
  bool is_of(const Store& store) const { return store.lanes.count() == moved_.size(); }
  // Whether rows of the epoch were overwritten since it began.
  bool some_overwritten(const Store& store) const {
    for (uint64_t l = 0; l < first_.size(); ++l)
      if (store.lanes.view(l).first + moved_[l] > first_[l]) return true;
    return false;
  }
  // Up to n slots from `position` on and before `stop`, without rows that were overwritten since, and the position after
  // them.
  std::pair<Tensor, uint64_t> take(const Store& store, uint64_t position, size_t n, uint64_t stop) const {
    if (!is_of(store)) throw nb::value_error("the walk was made for another store");
    store.check_file();
    std::vector<int64_t> drawn;
    drawn.reserve(std::min<uint64_t>(n, map_.total()));
    position = draw(store, position, n, stop, drawn);
    Tensor slots = slots_out(drawn.size(), [&](int64_t* out) { std::copy(drawn.begin(), drawn.end(), out); });
    return {std::move(slots), position};
  }
  // Whether a row comes behind a position.
  bool goes_on(const Store& store, uint64_t position) const {
    std::vector<int64_t> next;
    draw(store, position, 1, map_.total(), next);
    return !next.empty();
  }
  // As above, appended to `drawn` until it has n slots; the caller has checked the store. Returns the position.
  uint64_t draw(const Store& store, uint64_t position, size_t n, uint64_t stop, std::vector<int64_t>& drawn) const {
    const uint64_t capacity = store.lanes.capacity(), envs = store.lanes.envs();
    std::vector<uint64_t> first;
    for (uint64_t l = 0; l < store.lanes.count(); ++l) first.push_back(store.lanes.view(l).first);
    const uint64_t end = std::min(stop, map_.total());
    const bool some_removed = !with_removed_ && store.lanes.some_removed();
    const bool all_in_one_ring = in_place_ && map_.is_one_ring() && first[0] <= first_[0];
    const bool rows_are_here = store.geometry().payload_bytes > 0;
    uint64_t rows[Permutation::kBlock];
    while (position < end && drawn.size() < n) {
      // At most as many as are still needed: the remaining positions come in the next batch.
      const size_t block = std::min<uint64_t>({Permutation::kBlock, end - position, n - drawn.size()});
      permutation_.at(position, rows, block);
      position += block;
      if (all_in_one_ring) {
        const size_t done = drawn.size();
        drawn.resize(done + block);
        map_.slots_in_ring(rows, block, drawn.data() + done);
        if (some_removed) {
          const auto is_removed = [bits = store.lanes.removed(0)](int64_t slot) { return bits.has(static_cast<uint64_t>(slot)); };
          drawn.erase(std::remove_if(drawn.begin() + static_cast<ptrdiff_t>(done), drawn.end(), is_removed), drawn.end());
        }
        // Prefetches the rows, which may lie anywhere, while the next numbers are computed.
        for (size_t i = done; rows_are_here && i < drawn.size(); ++i)
          __builtin_prefetch(store.row(static_cast<uint64_t>(drawn[i])), 0, 2);
        continue;
      }
      for (size_t i = 0; i < block; ++i) {
        uint64_t lane = 0, sequence = 0;
        const int64_t slot = map_.by_slot(rows[i], lane, sequence);
        if (sequence < moved_[lane] || sequence - moved_[lane] < first[lane]) continue;
        const uint64_t there = in_place_ ? static_cast<uint64_t>(slot)
                                         : (lane * capacity + (sequence - moved_[lane]) % capacity) * envs +
                                               static_cast<uint64_t>(slot) % envs;
        if (!some_removed || !store.lanes.is_removed(there)) drawn.push_back(static_cast<int64_t>(there));
      }
    }
    return position;
  }

 private:
  bool with_removed_;
  RowMap map_;
  std::vector<uint64_t> moved_, first_;
  Permutation permutation_;
  bool in_place_ = false;  // each row is still in the slot that it had when the epoch began
};

// Writes restored rows [envs, steps, payload bytes] with sequences from `start` on, which are not yet visible to readers.
inline void put_rows(Store& store, uint64_t lane, uint64_t start,
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

inline Observations& observations_of(Store& store, uint64_t lane) {
  store.must_be_writable();
  check_lane(store, lane);
  if (!store.observations()) throw nb::value_error("this store keeps no observations beside its rows");
  return *store.observations();
}
// As `put_rows`, of a checked batch, for a store that keeps observations beside its rows: those of a lane in their order.
inline void put_leaves(Store& store, uint64_t lane, uint64_t start, const Plan& plan) {
  Observations& observations = observations_of(store, lane);
  const StoreGeometry& s = store.geometry();
  if (observations.restoring(lane).published.load() != start) throw nb::value_error("rows of a lane are restored in their order");
  if (plan.envs != s.envs || plan.steps > s.lane_capacity) throw nb::value_error("rows must be [envs, steps], with no more steps than a lane holds");
  for (const LeafSource& leaf : plan.leaves)
    if (!store.has_leaf(leaf.offset, leaf.bytes)) throw nb::value_error("a leaf lies outside the row");
  nb::gil_scoped_release unlocked;
  RowWriter(store).restore(lane, plan.steps, plan.leaves);
}

// Sets which leaves of a row tell whether the next row continues it, as indices of a codec's leaves; entries are pairs (at
// the root, under `next`).
inline void set_border(Store& store, const Codec& codec, const std::vector<std::pair<size_t, size_t>>& entries,
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
inline void set_seams(const Store& store, uint64_t lane, uint64_t base, uint64_t published, nb::list at) {
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
inline std::tuple<bool, bool, nb::bytes> left_as(Store& store) {
  const StoreHeader& h = store.lanes.header();
  const bool whole = h.incarnation.load() % 2 == 0 && h.edits.load() % 2 == 0 && !InPlaceWriter(store).interrupted();
  return {whole, h.clean != 0, nb::bytes(h.boot_id, 16)};
}

// `f_type` of statfs(2), of the file system that a file lies on; 0 where the system does not say.
inline uint32_t file_system_type(int fd) {
  struct statfs system;
  return ::fstatfs(fd, &system) == 0 ? static_cast<uint32_t>(system.f_type) : 0;
}

inline nb::dict lane_state(const Store& store, uint64_t l) {
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
inline std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> extents_of(const Store& store, uint64_t l) {
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
inline std::optional<std::tuple<uint64_t, uint64_t, std::optional<uint64_t>, uint64_t, uint64_t>> stream_place(const Store& store,
                                                                                                             uint64_t entry) {
  const StreamPlace p = StreamRecord<StdMemory>(store.streams().record(entry)).read();
  if (!p.stream) return std::nullopt;
  return std::tuple(p.stream, p.owner, p.lane < store.lanes.count() ? std::optional(p.lane) : std::nullopt, p.start, p.position);
}
inline void set_stream_place(const Store& store, uint64_t entry, uint64_t stream, std::optional<uint64_t> lane, uint64_t start,
                             uint64_t position) {
  const StreamRecord<StdMemory> record(store.streams().record(entry));
  record.write({stream, store.writer(), lane ? *lane : StreamPlace::kNoLane, start, position});
}
inline Store::Stint adopt(Store& store, uint64_t entry) {
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

// (frames, bytes of a frame) of each key.
using KeySizes = std::vector<std::pair<uint64_t, uint64_t>>;
inline std::vector<Observations::KeyGeometry> key_geometries(const KeySizes& keys) {
  std::vector<Observations::KeyGeometry> all;
  for (const auto& [frames, bytes] : keys) all.push_back({frames, bytes});
  return all;
}

// Offsets of the word and of X of each key.
using InRowPlaces = std::optional<std::pair<uint64_t, std::vector<uint64_t>>>;
inline std::optional<Observations::InRow> in_row_of(const InRowPlaces& given) {
  if (!given) return std::nullopt;
  return Observations::InRow{given->first, given->second, 0};
}

// The bytes of an observation of rows [start, start + steps) of a lane: [steps, envs, bytes]. Of rows that are overwritten meanwhile
// they may be any.
inline nb::object observation_column(const Store& store, uint64_t lane, uint64_t start, uint64_t steps, uint64_t offset, uint64_t bytes) {
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

inline void bind_store(nb::module_& m) {
  using namespace nb::literals;
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
  nb::class_<Plan>(m, "Plan")
      .def_ro("steps", &Plan::steps)
      .def_ro("envs", &Plan::envs)
      .def_ro("bytes", &Plan::bytes);

  nb::class_<Codec>(m, "Codec")
      .def(nb::init<nb::list, nb::object, nb::handle, nb::object, nb::object, nb::handle, nb::handle,
                    std::optional<size_t>>(),
           "leaves"_a, "tree"_a.none(), "td_type"_a, "td_template"_a.none(), "size_type"_a, "array_type"_a,
           "scalar_type"_a, "sequence"_a.none() = nb::none())
      .def("check", &Codec::check, "batch"_a.none(), "batch_dims"_a, "time_dim"_a,
           "extra"_a.none() = nb::none())
      .def("check_list", &Codec::check_list, "leaves"_a, "batch_dims"_a, "time_dim"_a)
      .def("set_index", &Codec::set_index, "plan"_a, "leaf"_a)
      .def("holds_index", [](const Codec& c, size_t leaf) { bool with_env; return c.holds_index(leaf, with_env); },
           "leaf"_a);

  nb::class_<EpochWalk>(m, "EpochWalk")
      .def(nb::init<const Store&, uint64_t, bool, std::vector<std::pair<uint64_t, uint64_t>>, uint64_t,
                    std::vector<uint64_t>, bool>(),
           "store"_a, "key"_a, "shuffle"_a, "ranges"_a, "ring"_a = 0, "moved"_a = std::vector<uint64_t>(), "with_removed"_a = false)
      .def("take", &EpochWalk::take, "store"_a, "position"_a, "n"_a, "stop"_a = UINT64_MAX)
      .def("__len__", &EpochWalk::size);

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

  nb::class_<Store>(m, "Store")
      .def_static("create", [](int fd, uint64_t lanes, uint64_t lane_capacity, uint64_t envs, uint64_t payload_bytes,
                               uint64_t alignment, bool trailer, nb::bytes layout, nb::bytes store_id, bool extents,
                               bool observations, bool flow) {
        return Store::create(fd, {lanes, lane_capacity, envs, payload_bytes, alignment, trailer, bytes_of(layout),
                                  bytes_of(store_id), extents, observations, flow});
      }, "fd"_a, "lanes"_a, "lane_capacity"_a, "envs"_a, "payload_bytes"_a, "alignment"_a, "trailer"_a, "layout"_a,
         "store_id"_a, "extents"_a = false, "observations"_a = false, "flow"_a = true)
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
      })
      .def("restore_lane", [](const Store& s, uint64_t l, uint64_t base, uint64_t published, uint64_t origin) {
        s.must_be_writable();
        check_lane(s, l);
        if (base > published) throw nb::value_error("base lies above published");
        if (s.observations() && !s.observations()->end_restore(l, base, published))
          throw nb::value_error("not all rows between base and published were restored");
        s.lanes.set_counters(l, base, published, origin);
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
      .def("append", &append, "lane"_a, "plan"_a, "most"_a.none() = nb::none(),
           nb::sig("def append(self, lane: int, plan: Plan, most: int | None = None) -> torch.Tensor | int | None"))
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
        return here.is_full() && overdue.has(s.lanes.count(), s.lanes.lane(l).ticket.load(), here.left());
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
      .def("append_packed", &append_packed, "codec"_a, "rows"_a.noconvert())
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
      .def_prop_ro("can_remove", [](const Store& s) { return s.lanes.can_remove(); })
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
      .def_prop_rw("remover", &Store::remover, &Store::set_remover)
      .def("begin_removing", [](Store& s, uint64_t l, uint64_t dead) {
        s.must_be_writable();
        check_lane(s, l);
        if (!s.remover()) throw nb::value_error("this process has no number to remove rows under");
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

}  // namespace engram
