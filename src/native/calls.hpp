// What the module's functions do: arguments are checked here, before memory is touched.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "codec.hpp"
#include "draw.hpp"
#include "recovery.hpp"
#include "restore.hpp"

namespace engram {

constexpr size_t kWarmBytes = 256 << 10;  // of a batch: what stays in the second-level cache until it is copied


// Sizes beyond any memory: refused before they are multiplied.
constexpr size_t kMostBytes = size_t{1} << 46;

// int64 [n] as a tensor; where torch lacks the exchange API as a bytearray, which Python turns into one.
inline nb::object slots_out(size_t n, auto fill) {
  if (n > kMostBytes / 8) throw std::bad_alloc();
  if (!torch_api().api) {
    nb::object bytes = nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(n * 8)));
    if (!bytes.is_valid()) throw nb::python_error();
    fill(reinterpret_cast<int64_t*>(PyByteArray_AsString(bytes.ptr())));
    return bytes;
  }
  OutBlock block;
  const int64_t lead = static_cast<int64_t>(n);
  static const std::vector<int64_t> scalar;
  block.plan({kDLInt, 64}, &lead, 1, scalar, n * 8);
  block.take();
  fill(reinterpret_cast<int64_t*>(block.data(0)));
  return nb::steal(block.make(0));
}

inline std::string bytes_of(nb::bytes b) { return {b.c_str(), b.size()}; }

inline void check_lane(const Store& store, uint64_t lane) {
  store.check_file();
  if (lane >= store.shape().lanes)
    throw nb::index_error(("lane " + std::to_string(lane) + " of " + std::to_string(store.shape().lanes)).c_str());
}

// Releases the GIL for the time of a long copy only: getting it back beside a busy thread costs milliseconds.
template <typename F>
inline void maybe_without_gil(bool release, F&& work) {
  if (release) {
    nb::gil_scoped_release unlocked;
    work();
  } else {
    work();
  }
}

// The time slots that n steps appended at write number `first` take.
inline nb::object slots_from(const Store& store, uint64_t lane, uint64_t first, size_t n) {
  const uint64_t capacity = store.shape().lane_capacity;
  return slots_out(n, [&](int64_t* out) {
    uint64_t slot = first % capacity;
    for (size_t i = 0; i < n; ++i) {
      out[i] = static_cast<int64_t>(lane * capacity + slot);
      if (++slot == capacity) slot = 0;
    }
  });
}

inline nb::object next_slots(Store& store, uint64_t lane, size_t n) {
  check_lane(store, lane);
  return slots_from(store, lane, store.lanes.lane(lane).published.load(), n);
}

// `most`: only so many of the first steps.
inline nb::object append(Store& store, uint64_t lane, const Plan& plan, std::optional<size_t> most) {
  store.must_be_writable();
  check_lane(store, lane);
  const size_t steps = most ? std::min(*most, plan.steps) : plan.steps;
  const Shape& s = store.shape();
  if (plan.strands != s.strands)
    throw nb::value_error(("the batch has " + std::to_string(plan.strands) + " strands, the store " +
                           std::to_string(s.strands)).c_str());
  for (const LeafSource& leaf : plan.leaves)
    if (leaf.offset + leaf.bytes > s.payload_bytes) throw nb::value_error("a leaf lies outside the row");
  // Before the rows: when they are there nothing may fail any more. The caller keeps other writers of the lane out.
  const uint64_t first = store.lanes.lane(lane).published.load();
  nb::object slots = plan.single ? nb::object(nb::int_(lane * s.lane_capacity + first % s.lane_capacity))
                                 : slots_from(store, lane, first, steps);
  maybe_without_gil(plan.bytes > kGilBytes || store.pages().on(), [&] {
    RowWriter(store).append(lane, steps, plan.leaves);
  });
  return slots;
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
  size_t outside = 0;  // of several stores the one whose slots were not

  // Another store's rows, behind the first n.
  void join(const Reading& other, size_t n) {
    inside = inside && other.inside;
    result.numbers.insert(result.numbers.end(), other.result.numbers.begin(), other.result.numbers.end());
    for (uint32_t i : other.result.missing) result.missing.push_back(static_cast<uint32_t>(i + n));
    for (uint32_t i : other.result.unwritten) result.unwritten.push_back(static_cast<uint32_t>(i + n));
  }
};

// A function of its own: inlined, the thread's scratch memory would be looked up again for each row.
[[gnu::noinline]] inline void read_rows(Store& store, const int64_t* slots, size_t n, std::vector<LeafCopy>& copies,
                                        bool mapped, bool numbers, Reading& out, ReadScratch& scratch) {
  RowReader reader(store, scratch);
  if (!(out.inside = reader.find(slots, n))) return;
  reader.copy(copies.data(), copies.size(), mapped);
  reader.settle(numbers, out.result);
}

inline void read_rows(Store& store, const int64_t* slots, size_t n, std::vector<LeafCopy>& copies, bool mapped,
                      bool numbers, Reading& out) {
  static thread_local ReadScratch scratch;
  read_rows(store, slots, n, copies, mapped, numbers, out, scratch);
}

inline void check_codec(const Store& store, const Codec& codec) {
  store.check_file();
  if (codec.row_end() > store.shape().payload_bytes)
    throw nb::value_error("the layout does not fit the rows of this store");
}

inline nb::tuple finish_read(nb::object rows, const Reading& reading, bool numbers) {
  nb::object generation = nb::none();
  if (numbers)
    generation = slots_out(reading.result.numbers.size(), [&](int64_t* out) {
      std::copy(reading.result.numbers.begin(), reading.result.numbers.end(), out);
    });
  return nb::make_tuple(rows, positions(reading.result.missing), positions(reading.result.unwritten), generation);
}

// The sequences that rows carry themselves, copied with them: in the place of those that their lanes count.
class OwnSequences {
 public:
  OwnSequences(const Codec& codec, size_t n) : offset_(codec.sequence()), values_(offset_ ? n : 0) {}
  void add(std::vector<LeafCopy>& copies, size_t from) {
    if (values_.empty()) return;
    copies.push_back({*offset_, kSequenceBytes, reinterpret_cast<uint8_t*>(values_.data() + from), kSequenceBytes});
  }
  void put(std::vector<uint64_t>& numbers) const {
    for (size_t i = 0; i < values_.size(); ++i)
      if (values_[i] >= kFirstReplaced && values_[i] < kFirstReplaced * 2) numbers[i] = values_[i];
  }

 private:
  std::optional<size_t> offset_;
  std::vector<uint64_t> values_;
};

inline void refuse_slots(const Store& store) {
  throw nb::index_error(("a slot lies outside 0 to " + std::to_string(store.slots() - 1)).c_str());
}

// Slots that are read from one store.
struct SlotRange {
  const int64_t* data;
  size_t n;
};

// Asks memory for one of `parts` parts of a batch's rows.
inline void warm_rows(const Store& store, const SlotRange& slots, size_t part, size_t parts) {
  const Shape& s = store.shape();
  if (s.row_stride > kPrefetchBytes || slots.n * s.row_stride > kWarmBytes) return;
  const uint64_t all = store.slots();
  for (size_t i = slots.n * part / parts; i < slots.n * (part + 1) / parts; ++i) {
    const auto slot = static_cast<uint64_t>(slots.data[i]);
    if (slot >= all) return;  // the read refuses it
    uint64_t time = slot, strand = 0, lane = 0;
    if (s.strands > 1) time = slot / s.strands, strand = slot - time * s.strands;
    if (s.lanes > 1) lane = time / s.lane_capacity, time -= lane * s.lane_capacity;
    const uint8_t* row = store.row(store.physical(lane, strand, time));
    prefetch_rows<0>(&row, 1, s.row_stride);
  }
}

// The rows of several stores of one layout, the same number from each, as one batch; numbers and positions go through
// all of them. With `parts` (an extra dict or None for each store) also each store's rows as a batch, in the memory of
// the whole.
inline nb::tuple gather_many(const std::vector<Store*>& stores, const Codec& codec, nb::handle slots_in,
                             std::optional<std::vector<int64_t>> shape, nb::handle extra, bool mapped, bool numbers,
                             nb::handle parts = nb::none()) {
  if (!torch_api().api) throw nb::type_error("gather needs the exchange API; use gather_into");
  for (const Store* store : stores) check_codec(*store, codec);
  const SlotsArg slots(nb::borrow(slots_in), true);
  if (stores.empty() || slots.n % stores.size() != 0) throw nb::value_error("as many slots for each store");
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
  if (!extras.empty() && extras.size() != stores.size()) throw nb::value_error("one extra for each store");
  const std::vector<int64_t> part_lead(1, static_cast<int64_t>(each));
  OutBlock shared(leaves.size() * (1 + extras.size()));
  std::vector<std::unique_ptr<OutBlock>> own;
  std::vector<std::pair<OutBlock*, size_t>> where, part_where;
  where.reserve(leaves.size());
  size_t bytes = 0;
  bool any_shared = false;
  for (const Leaf& leaf : leaves) {
    if (leaf.bytes > kMostBytes / std::max<size_t>(1, slots.n)) throw std::bad_alloc();
    const size_t size = leaf.bytes * slots.n;
    if ((bytes += size) > kMostBytes) throw std::bad_alloc();
    OutBlock* block = &shared;
    if (size >= kBigLeaf)
      block = own.emplace_back(std::make_unique<OutBlock>()).get();
    else
      any_shared = true;
    where.emplace_back(block, block->plan(leaf.dtype, lead.data(), lead.size(), leaf.shape, size));
  }
  for (size_t p = 0; p < extras.size(); ++p)
    for (size_t k = 0; k < leaves.size(); ++k)
      part_where.emplace_back(where[k].first,
                              where[k].first->alias(where[k].second, part_lead.data(), 1, p * each * leaves[k].bytes));
  if (any_shared) shared.take();
  for (auto& block : own) block->take();
  // The tensors first, while the rows come in from memory behind them; then the copy into the tensors' memory.
  std::vector<nb::object> tensors;
  tensors.reserve(leaves.size());
  for (size_t k = 0; k < where.size(); ++k) {
    for (size_t p = 0; p < stores.size(); ++p) warm_rows(*stores[p], {slots.data + p * each, each}, k, where.size());
    tensors.push_back(nb::steal(where[k].first->make(where[k].second)));
  }
  std::vector<nb::object> part_tensors;
  for (auto [block, i] : part_where) part_tensors.push_back(nb::steal(block->make(i)));
  // From here to the copy no Python code runs, so that a finaliser that samples cannot use this memory meanwhile.
  static thread_local std::vector<LeafCopy> copies;
  Reading all;
  OwnSequences sequences(codec, numbers ? slots.n : 0);
  bool asking = false;
  for (Store* store : stores) asking |= store->pages().on();
  maybe_without_gil(bytes > kGilBytes || (mapped && asking), [&] {
    for (size_t p = 0; p < stores.size() && all.inside; ++p) {
      copies.clear();
      for (size_t k = 0; k < leaves.size(); ++k)
        copies.push_back({leaves[k].offset, leaves[k].bytes,
                          where[k].first->data(where[k].second) + p * each * leaves[k].bytes,
                          static_cast<ptrdiff_t>(leaves[k].bytes)});
      sequences.add(copies, p * each);
      if (p == 0) {
        read_rows(*stores[p], slots.data, each, copies, mapped, numbers, all);
      } else {
        Reading one;
        read_rows(*stores[p], slots.data + p * each, each, copies, mapped, numbers, one);
        all.join(one, p * each);
      }
      if (!all.inside) all.outside = p;
    }
  });
  if (!all.inside) refuse_slots(*stores[all.outside]);
  sequences.put(all.result.numbers);
  nb::tuple read = finish_read(codec.build(tensors, lead, extra), all, numbers);
  if (extras.empty()) return read;
  nb::list made;
  for (size_t p = 0; p < extras.size(); ++p) {
    std::vector<nb::object> mine;
    for (size_t k = 0; k < leaves.size(); ++k) mine.push_back(std::move(part_tensors[p * leaves.size() + k]));
    made.append(codec.build(mine, part_lead, extras[p]));
  }
  return nb::make_tuple(read[0], read[1], read[2], read[3], made);
}

// What the members of an ensemble were drawn for, as int64 [members, rows]: their slots, and which member each is of.
// None: they are no slots (tuples, masks), or not as many of each.
inline nb::object joint_index(nb::list drawn, const std::vector<int64_t>& members) {
  if (!torch_api().api) throw nb::type_error("a joint index needs the exchange API");
  if (nb::len(drawn) != members.size() || members.empty()) throw nb::value_error("slots for each member");
  std::vector<const int64_t*> slots;
  std::vector<nb::object> keep;
  size_t n = 0;
  for (nb::handle h : drawn) {
    DLTensor t{};
    keep.push_back(nb::borrow(h));
    if (!torch_api().view(h.ptr(), t) || t.ndim != 1 || t.dtype.code != kDLInt || t.dtype.bits != 64) return nb::none();
    if ((t.strides && t.strides[0] != 1 && t.shape[0] > 1) || (slots.size() && static_cast<size_t>(t.shape[0]) != n))
      return nb::none();
    n = static_cast<size_t>(t.shape[0]);
    slots.push_back(reinterpret_cast<const int64_t*>(static_cast<const uint8_t*>(t.data) + t.byte_offset));
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
  nb::object index = nb::steal(block.make(0)), ids = nb::steal(block.make(1));
  return nb::make_tuple(index, ids);
}

inline nb::tuple gather(Store& store, const Codec& codec, nb::handle slots_in, std::optional<std::vector<int64_t>> shape,
                        nb::handle extra, bool mapped, bool numbers) {
  return gather_many({&store}, codec, slots_in, std::move(shape), extra, mapped, numbers);
}

// The same into arrays that exist: one per leaf, [n, ...], writable and contiguous.
inline nb::tuple gather_into(Store& store, const Codec& codec, nb::handle slots_in, nb::list arrays, bool mapped,
                      bool numbers) {
  check_codec(store, codec);
  const SlotsArg slots(nb::borrow(slots_in));
  const auto& leaves = codec.leaves();
  if (nb::len(arrays) != leaves.size()) throw nb::value_error("one array for each leaf");
  std::vector<Buffer> buffers(leaves.size());
  std::vector<LeafCopy> copies;
  for (size_t k = 0; k < leaves.size(); ++k) {
    if (!buffers[k].get(nb::object(arrays[k]).ptr(), true)) throw nb::type_error("arrays must be writable buffers");
    const Py_buffer& v = buffers[k].view();
    if (static_cast<size_t>(v.len) != leaves[k].bytes * slots.n || !PyBuffer_IsContiguous(&v, 'C'))
      throw nb::value_error("an array has the wrong size or is not contiguous");
    copies.push_back({leaves[k].offset, leaves[k].bytes, static_cast<uint8_t*>(v.buf),
                      static_cast<ptrdiff_t>(leaves[k].bytes)});
  }
  OwnSequences sequences(codec, numbers ? slots.n : 0);
  sequences.add(copies, 0);
  Reading reading;
  read_rows(store, slots.data, slots.n, copies, mapped, numbers, reading);
  if (!reading.inside) refuse_slots(store);
  sequences.put(reading.result.numbers);
  return finish_read(nb::none(), reading, numbers);
}

// Rows that are to replace stored ones: made with all the memory that `write` needs. The caller keeps store and plan.
class Replacement {
 public:
  // `rows_in`: the row of the plan that each slot takes; None: one after the other. `first`: row i of the plan has the
  // sequence first + i; none: what is in a slot keeps the sequence that it has.
  Replacement(Store& store, nb::handle slots_in, const Plan& plan, nb::handle rows_in, std::optional<uint64_t> first)
      : store_(store), writer_(store), leaves_(plan.leaves) {
    store.must_be_writable();
    const SlotsArg given(nb::borrow(slots_in));
    slots_.assign(given.data, given.data + given.n);  // what is checked is what is written
    if (!rows_in.is_none()) {
      const SlotsArg chosen(nb::borrow(rows_in));
      rows_.assign(chosen.data, chosen.data + chosen.n);
      chosen_ = true;
      for (int64_t row : rows_)
        if (static_cast<uint64_t>(row) >= plan.steps) throw nb::index_error("a row lies outside the batch");
    }
    const Shape& s = store.shape();
    if (plan.strands != 1 || (chosen_ ? rows_.size() : plan.steps) != slots_.size())
      throw nb::value_error("one row for each slot");
    for (const LeafSource& leaf : plan.leaves)
      if (leaf.offset + leaf.bytes > s.payload_bytes) throw nb::value_error("a leaf lies outside the row");
    if (first) {
      if (!plan.carries_sequence) throw nb::value_error("these rows have no place for their sequence");
      for (uint64_t i = 0; i < plan.steps; ++i) sequences_.push_back(*first + i);
      leaves_.back().array = reinterpret_cast<const uint8_t*>(sequences_.data());
      leaves_.back().stride = kSequenceBytes;
    } else if (plan.carries_sequence) {
      leaves_.pop_back();
    }
    for (int64_t slot : slots_)
      if (static_cast<uint64_t>(slot) >= store.slots()) refuse_slots(store);
    numbers_.reserve(s.lanes);
    writer_.prepare(slots_.data(), slots_.size(), leaves_.size());
  }
  // Every slot must hold a row by now.
  void write() {
    store_.must_be_writable();
    const Shape& s = store_.shape();
    numbers_.clear();
    for (uint64_t l = 0; l < s.lanes; ++l) numbers_.emplace_back(store_.lanes.view(l), s.lane_capacity);
    for (int64_t slot : slots_) {
      const uint64_t time = static_cast<uint64_t>(slot) / s.strands;
      uint64_t number = 0;
      if (!numbers_[time / s.lane_capacity].find(time % s.lane_capacity, number))
        throw nb::index_error(("slot " + std::to_string(slot) + " has not been written").c_str());
    }
    writer_.write(slots_.data(), slots_.size(), leaves_, chosen_ ? rows_.data() : nullptr);
  }

 private:
  Store& store_;
  std::vector<int64_t> slots_, rows_;
  std::vector<uint64_t> sequences_;
  bool chosen_ = false;
  std::vector<SlotNumbers> numbers_;
  InPlaceWriter writer_;
  std::vector<LeafSource> leaves_;
};

inline void overwrite(Store& store, nb::handle slots, const Plan& plan, nb::handle rows) {
  Replacement(store, slots, plan, rows, std::nullopt).write();
}

// The sequence of the first of n rows that are about to be written over others. Counted before they are: whoever opens the
// store after a kill must not give their sequences to others.
inline uint64_t reserve_sequences(const Store& store, uint64_t n) {
  store.must_be_writable();
  Counter& replaced = store.header()->replaced;
  const uint64_t given = std::min(replaced.load(), kFirstReplaced / 2);  // a damaged header
  replaced.store(given + std::min(n, kFirstReplaced / 4));
  return kFirstReplaced + given;
}

// A store in private memory with the same rows, counters and identity, whose rows are longer: `moves` say of bytes of a
// row where they were, where they go, and how many there are.
inline std::unique_ptr<Store> widened(const Store& store, uint64_t payload_bytes, uint64_t alignment, nb::bytes layout,
                                      const std::vector<std::array<uint64_t, 3>>& moves) {
  const Shape& s = store.shape();
  if (store.fd() >= 0 || s.payload_bytes == 0) throw nb::value_error("only rows in private memory can be made longer");
  for (const auto& [from, to, bytes] : moves)
    if (from > s.payload_bytes || bytes > s.payload_bytes - from || to > payload_bytes || bytes > payload_bytes - to)
      throw nb::value_error("bytes lie outside the row");
  const std::string id(reinterpret_cast<const char*>(s.store_id), sizeof s.store_id);
  auto made = Store::create(-1, {s.lanes, s.lane_capacity, s.strands, payload_bytes, alignment, false, bytes_of(layout), id});
  made->take_counters(store);
  for (uint64_t l = 0; l < s.lanes; ++l) {
    const SlotNumbers numbers(store.lanes.view(l), s.lane_capacity);
    uint64_t number = 0;
    for (uint64_t t = 0; t < s.lane_capacity; ++t)
      for (uint64_t strand = 0; numbers.find(t, number) && strand < s.strands; ++strand) {
        const uint64_t row = store.physical(l, strand, t);
        for (const auto& [from, to, bytes] : moves) std::memcpy(made->row(row) + to, store.row(row) + from, bytes);
      }
  }
  return made;
}

// Changes of rows that are kept elsewhere: followers look at these slots again.
inline void note_edits(Store& store, nb::handle slots_in) {
  store.must_be_writable();
  const SlotsArg slots(nb::borrow(slots_in));
  for (size_t i = 0; i < slots.n; ++i)
    if (static_cast<uint64_t>(slots.data[i]) >= store.slots()) refuse_slots(store);
  InPlaceWriter(store).note(slots.data, slots.n);
}

// Generations of slots as the lanes count: write numbers, -1 where a slot holds no row.
inline nb::object generations(const Store& store, nb::handle slots_in) {
  const SlotsArg slots(nb::borrow(slots_in));
  const Shape& s = store.shape();
  store.check_file();
  std::vector<SlotNumbers> numbers;
  for (uint64_t l = 0; l < s.lanes; ++l) numbers.emplace_back(store.lanes.view(l), s.lane_capacity);
  return slots_out(slots.n, [&](int64_t* out) {
    for (size_t i = 0; i < slots.n; ++i) {
      const auto slot = static_cast<uint64_t>(slots.data[i]);
      if (slot >= store.slots()) refuse_slots(store);
      const uint64_t time = slot / s.strands;
      uint64_t number = 0;
      const bool there = numbers[time / s.lane_capacity].find(time % s.lane_capacity, number);
      out[i] = there ? static_cast<int64_t>(number) : -1;
    }
  });
}

inline nb::object uniform(Store& store, nb::handle seed_in, size_t n) {
  const SlotsArg seed(nb::borrow(seed_in));
  if (seed.n < 1) throw nb::value_error("no seed");
  store.check_file();
  if (store.lanes.rows() == 0) return nb::none();
  bool drawn = false;
  nb::object slots = slots_out(n, [&](int64_t* out) {
    drawn = draw_uniform(store.lanes, static_cast<uint64_t>(seed.data[0]), out, n);
  });
  return drawn ? slots : nb::none();
}

// One pass over the rows that existed when it was made: in a store whose lanes had `ring` steps (0: as this one's) and
// whose write numbers were higher by `moved`, one for each lane (empty: as they are). Places keep their rows.
class EpochWalk {
 public:
  EpochWalk(const Store& store, uint64_t key, bool shuffle, std::vector<std::pair<uint64_t, uint64_t>> ranges,
            uint64_t ring, std::vector<uint64_t> moved)
      : map_(ring ? ring : store.lanes.capacity(), store.lanes.strands()), moved_(std::move(moved)),
        permutation_(0, 0, false) {
    if (moved_.empty()) moved_.resize(ranges.size());
    if (ranges.size() != store.lanes.count() || moved_.size() != ranges.size())
      throw nb::value_error("one range for each lane");
    for (auto [first, rows] : ranges) {
      if (rows > store.lanes.capacity() || (ring && rows > ring)) throw nb::value_error("a range is longer than its lane");
      map_.add(first, rows);
    }
    permutation_ = Permutation(key, map_.total(), shuffle);
  }
  uint64_t size() const { return map_.total(); }
  // Up to n slots from `position` on, rows overwritten since skipped; and the position after them.
  nb::tuple take(const Store& store, uint64_t position, size_t n) const {
    if (store.lanes.count() != moved_.size()) throw nb::value_error("the walk was made for another store");
    store.check_file();
    const uint64_t capacity = store.lanes.capacity(), strands = store.lanes.strands();
    std::vector<uint64_t> first;
    for (uint64_t l = 0; l < store.lanes.count(); ++l) first.push_back(store.lanes.view(l).first);
    std::vector<int64_t> found;
    found.reserve(std::min<uint64_t>(n, map_.total()));
    for (; position < map_.total() && found.size() < n; ++position) {
      uint64_t lane = 0, number = 0;
      const uint64_t strand = static_cast<uint64_t>(map_.by_slot(permutation_.at(position), lane, number)) % strands;
      if (number < moved_[lane] || number - moved_[lane] < first[lane]) continue;
      found.push_back(static_cast<int64_t>((lane * capacity + (number - moved_[lane]) % capacity) * strands + strand));
    }
    nb::object slots = slots_out(found.size(), [&](int64_t* out) {
      std::copy(found.begin(), found.end(), out);
    });
    return nb::make_tuple(slots, position);
  }

 private:
  RowMap map_;
  std::vector<uint64_t> moved_;
  Permutation permutation_;
};

// Restored rows [strands, steps, payload bytes] with write numbers from `start` on, which nobody sees yet.
inline void put_rows(Store& store, uint64_t lane, uint64_t start,
                     nb::ndarray<const uint8_t, nb::ndim<3>, nb::device::cpu> rows) {
  store.must_be_writable();
  check_lane(store, lane);
  const Shape& s = store.shape();
  if (s.payload_bytes == 0) throw nb::value_error("this store's rows are kept elsewhere");
  if (rows.shape(0) != s.strands || rows.shape(1) > s.lane_capacity || rows.shape(2) != s.payload_bytes)
    throw nb::value_error("rows must be [strands, steps, payload bytes], no more steps than a lane has room for");
  if (rows.stride(2) != 1 && s.payload_bytes > 1) throw nb::value_error("the bytes of a row must lie side by side");
  if (start > UINT64_MAX - rows.shape(1)) throw nb::value_error("write numbers end at 2^64");
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

// Which entries of a row tell whether the next one belongs behind it: leaf numbers of a codec, entries as pairs (at the
// root, under `next`).
inline void set_border(Store& store, const Codec& codec, const std::vector<std::pair<size_t, size_t>>& entries,
                       const std::vector<size_t>& done, bool either, std::optional<size_t> id) {
  check_codec(store, codec);
  const auto& leaves = codec.leaves();
  auto leaf = [&](size_t k) -> const Leaf& {
    if (k >= leaves.size()) throw nb::index_error("no such leaf");
    return leaves[k];
  };
  BorderRule rule;
  rule.leaves = codec.sources(), rule.either = either;
  for (auto [root, next] : entries) {
    if (leaf(root).bytes != leaf(next).bytes) throw nb::value_error("an entry has another size under next");
    if (rule.entries.size() < BorderRule::kMostEntries && leaf(root).bytes > 0)
      rule.entries.push_back({leaf(root).offset, leaf(next).offset, leaf(root).bytes, root, next});
  }
  for (size_t k : done) rule.done.push_back({leaf(k).offset, leaf(k).bytes, k});
  if (id) rule.id = BorderRule::Flag{leaf(*id).offset, leaf(*id).bytes, *id};
  store.set_border(std::move(rule));
}

// In the middle of a restore, whose rows would be lost if it ended here: takes no memory, as far as bits are set.
inline void set_seams(const Store& store, uint64_t lane, uint64_t base, uint64_t published, nb::list at) {
  auto number = [&](uint64_t i) {
    uint64_t w = 0;
    if (!nb::try_cast(at[i], w)) throw nb::type_error("seams are write numbers");
    return w;
  };
  const uint64_t n = nb::len(at);
  for (uint64_t i = 0; i < n; ++i)
    if (number(i) < number(i ? i - 1 : 0)) throw nb::value_error("seams do not rise");
  store.set_seams(lane, base, published, n, number);
}

// How the last user left a store: (no change is half done, cleanly, in which boot of the machine). The caller has looked at
// the file.
inline std::tuple<bool, bool, nb::bytes> left_as(Store& store) {
  const StoreHeader& h = store.lanes.header();
  const bool whole = h.incarnation.load() % 2 == 0 && h.edits.load() % 2 == 0 && !InPlaceWriter(store).interrupted();
  return {whole, h.clean != 0, nb::bytes(h.boot_id, 16)};
}

inline nb::dict lane_state(const Store& store, uint64_t l) {
  check_lane(store, l);
  const LaneHeader& h = store.lanes.lane(l);
  const LaneView v = store.lanes.view(l);
  const uint64_t base = h.base.load();
  nb::dict d;
  d["first"] = std::max(v.first, std::min(base, v.published)), d["published"] = v.published, d["claimed"] = v.claimed;
  d["base"] = base, d["origin"] = h.origin.load(), d["durable"] = h.durable.load();
  d["term"] = h.term.load();
  return d;
}

}  // namespace engram
