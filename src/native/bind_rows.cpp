// Rows in and out: what `add`, `extend` and `sample` call, in one unit, because it shares most code.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "append.hpp"
#include "bare_observations.hpp"
#include "bind_batches.hpp"
#include "bind_store.hpp"
#include "bindings.hpp"
#include "draw.hpp"
#include "epoch_walk.hpp"
#include "items.hpp"
#include "n_step.hpp"
#include "numpy_random.hpp"
#include "push.hpp"
#include "row_pool.hpp"

namespace engram {

// ---- in ----
// Whether packed rows are appended as they are.
static void check_whole_rows(const Store& store, const Plan& plan) {
  if (store.observations()) throw nb::value_error("this store's rows have observations beside them: append their leaves");
  const size_t found = plan.leaves[0].bytes, rows = store.geometry().payload_bytes;
  if (found != rows)
    throw nb::value_error(("the rows have " + std::to_string(found) + " bytes each, those of the store " + std::to_string(rows)).c_str());
}

// Appends the steps of a checked batch from `first` on, or so many of them; returns their slots, or True where they are not `wanted`.
// None: the caller must get the turn first; this process was forked and holds no lane; or, where it `waits`, rows have to wait for
// those who sample.
nb::object append(Store& store, uint64_t lane, const Plan& plan, size_t first, std::optional<size_t> n, bool wanted, bool waits) {
  if (joined_after_fork() || (waits && (must_wait(store.lanes) || (store.moves_on() && store.lanes.is_queue())))) return nb::none();
  store.must_be_writable();
  check_lane(store, lane);
  if (first > plan.steps || n.value_or(0) > plan.steps - first) throw nb::index_error("the batch has fewer steps");
  const StoreGeometry& s = store.geometry();
  if (plan.envs != s.envs)
    throw nb::value_error(("the batch has " + std::to_string(plan.envs) + " environments, the store " +
                           std::to_string(s.envs)).c_str());
  if (!plan.looked_at.empty()) check_whole_rows(store, plan);
  for (const LeafSource& leaf : plan.leaves)
    if (!store.has_leaf(leaf.offset, leaf.bytes)) throw nb::value_error("a leaf lies outside the row");
  const auto from_first = [first](std::vector<LeafSource> leaves) {
    for (LeafSource& leaf : leaves)
      if (leaf.array) leaf.array += static_cast<ptrdiff_t>(first) * leaf.stride;
    return leaves;
  };
  std::vector<LeafSource> leaves = from_first(plan.leaves);  // a copy: others may append the same plan meanwhile
  const std::vector<LeafSource> looked_at = from_first(plan.looked_at);
  return append_leaves(store, lane, plan, leaves, looked_at, n.value_or(plan.steps - first), wanted, waits);
}

// Appends a row of any length in one lane, and returns the slot of its head. None: another process has the turn, or this one was forked.
nb::object append_row(Store& store, uint64_t lane, const RowBytes& given) {
  if (joined_after_fork()) return nb::none();
  store.must_be_writable();
  check_lane(store, lane);
  check_ragged(store);
  const std::span<const uint8_t> row(given.data(), given.size());
  const StoreGeometry& s = store.geometry();
  const uint64_t pages = pages_for(s, sizeof(RowHead) + row.size());
  if (pages > store.lanes.longest())
    throw nb::value_error(("a row of " + std::to_string(row.size()) + " bytes takes " + std::to_string(pages) + " pages of " +
                           std::to_string(s.payload_bytes) + " bytes, and the longest that a lane of " + std::to_string(s.lane_capacity) +
                           " pages takes has " + std::to_string(store.lanes.longest())).c_str());
  const bool is_long = writes_long(store, row.size());
  if (store.moves_on()) try {
    return nb::int_(append_moving_on(is_long, [&](auto&& pause) { return append_row_in_stint(store, row, pages, pause); }));
  } catch (const QueueFull&) {
    raise_queue_full(0, 1, nb::none());
  }
  const Turn turn(store, lane);
  if (turn.refused()) return nb::none();
  if (store.lanes.is_queue() && !has_queue_room(store.lanes, lane, pages, false)) raise_queue_full(0, 1, nb::none());
  uint64_t head = 0;
  maybe_without_gil(is_long, [&] {
    RowWriter writer(store);
    writer.prepare(lane, pages, {});
    head = writer.append_row(lane, row, pages);
  });
  return nb::int_(lane * s.lane_capacity + head % s.lane_capacity);
}

// A checked batch as packed rows: uint8 [steps, row bytes].
Tensor pack(const Plan& plan, size_t row_bytes) {
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
    if (!leaf.array) continue;  // the rows' own index, which they have not got yet: 0
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

// As `put_rows`, of a checked batch, for a store that keeps observations beside its rows: those of a lane in their order.
void put_leaves(Store& store, uint64_t lane, uint64_t start, const Plan& plan) {
  Observations& observations = observations_of(store, lane);
  const StoreGeometry& s = store.geometry();
  if (observations.restoring(lane).published.load() != start) throw nb::value_error("rows of a lane are restored in their order");
  if (plan.envs != s.envs || plan.steps > s.lane_capacity) throw nb::value_error("rows must be [envs, steps], with no more steps than a lane holds");
  if (plan.own) throw nb::value_error("restored rows have their index");
  for (const LeafSource& leaf : plan.leaves)
    if (!store.has_leaf(leaf.offset, leaf.bytes)) throw nb::value_error("a leaf lies outside the row");
  nb::gil_scoped_release unlocked;
  RowWriter(store).restore(lane, plan.steps, plan.leaves);
}

// ---- out ----
// The rows whose heads are in these slots, of any length; positions of those that were overwritten meanwhile, which may be any bytes, and
// of slots in which no row begins.
nb::tuple read_rows(Store& store, nb::handle slots_in) {
  store.check_file();
  check_ragged(store);
  const SlotsArg given(nb::borrow(slots_in));
  const std::vector<int64_t> slots(given.data, given.data + given.n);  // a copy, so that the checked slots are those that are read
  ReadScratch scratch;
  PageReader reader(store, scratch);
  if (!reader.find(slots.data(), slots.size())) refuse_slots(store);
  nb::list rows;
  for (size_t i = 0; i < slots.size(); ++i) {
    const nb::object row = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(reader.bytes(i))));
    if (!row.is_valid()) throw nb::python_error();
    reader.copy(i, reinterpret_cast<uint8_t*>(PyBytes_AsString(row.ptr())));
    rows.append(row);
  }
  ReadResult result;
  reader.settle(result);
  return nb::make_tuple(rows, positions(result.missing), positions(result.unwritten));
}

// Packed rows as a batch [n] in memory of its own; a list of leaves where the codec has no tree. `extra`: entries to add at
// its root, a dict; None: there are none.
nb::object unpack(const Codec& codec, const PackedRows& packed, nb::handle extra) {
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
[[gnu::noinline]] static void read_rows(Store& store, const int64_t* slots, size_t n, std::vector<LeafCopy>& copies,
                                        bool mapped, bool sequences, Reading& out, ReadScratch& scratch) {
  RowReader reader(store, scratch);
  if (!(out.inside = reader.find(slots, n))) return;
  reader.copy(copies.data(), copies.size(), mapped);
  reader.settle(sequences, out.result);
}

static void read_rows(Store& store, const int64_t* slots, size_t n, std::vector<LeafCopy>& copies, bool mapped,
                      bool sequences, Reading& out) {
  static thread_local ReadScratch scratch;
  read_rows(store, slots, n, copies, mapped, sequences, out, scratch);
}

static nb::tuple finish_read(nb::object rows, const Reading& reading, bool sequences) {
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

// Reads the same number of rows from each of several stores of one layout into one batch; numbers and positions run through all
// of them. With `parts` (an extra dict or None for each store) also returns each store's rows as a batch, in the memory of the
// whole.
nb::tuple gather_many(const std::vector<Store*>& stores, const Codec& codec, nb::handle slots_in,
                             std::optional<std::vector<int64_t>> shape, nb::handle extra, bool mapped, bool sequences,
                             nb::handle parts) {
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
std::optional<std::pair<Tensor, Tensor>> joint_index(nb::list drawn, const std::vector<int64_t>& members) {
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

nb::tuple gather(Store& store, const Codec& codec, nb::handle slots_in, std::optional<std::vector<int64_t>> shape,
                        nb::handle extra, bool mapped, bool sequences) {
  return gather_many({&store}, codec, slots_in, std::move(shape), extra, mapped, sequences);
}

// ---- some leaves of rows, without the batch around them ----
// As `gather`, of the leaves with these numbers only: a list of a tensor [n, ...] for each, and the positions of rows that were
// overwritten meanwhile and of slots without a row.
nb::tuple gather_leaves(Store& store, const Codec& codec, nb::handle slots_in, const std::vector<size_t>& chosen,
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

std::optional<Tensor> uniform(Store& store, nb::handle seed_in, size_t n) {
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

// As `gather` of a list of leaves [n, ...]; `meanwhile` is called when the rows are looked up and none is copied.
// `again`: as where rows that are missing are copied again; it is called before that.
static nb::tuple gather_interrupted(Store& store, const Codec& codec, nb::handle slots_in, const nb::callable& meanwhile,
                                    const std::optional<nb::callable>& again) {
  check_codec(store, codec);
  const SlotsArg slots(nb::borrow(slots_in), true);
  const std::vector<int64_t> lead(1, static_cast<int64_t>(slots.n));
  LeafMemory memory(codec.leaves(), lead, slots.n, 0);
  memory.take();
  nb::list tensors;
  for (size_t k = 0; k < codec.leaves().size(); ++k) tensors.append(memory.make(k));
  std::vector<LeafCopy> copies;
  for (size_t k : codec.in_row()) {
    const Leaf& leaf = codec.leaves()[k];
    copies.push_back({leaf.offset, leaf.bytes, memory.data(k), static_cast<ptrdiff_t>(leaf.bytes)});
  }
  ReadScratch scratch;
  RowReader reader(store, scratch);
  if (!reader.find(slots.data, slots.n)) refuse_slots(store);
  meanwhile();
  ReadResult result;
  if (!again) {
    reader.copy(copies.data(), copies.size(), false);
    reader.settle(false, result);
  } else {
    const size_t in_row = reader.observe(copies.data(), copies.size());
    reader.copy_rows(0, slots.n, copies.data(), in_row);
    ReadResult lost;
    reader.settle(false, lost);
    (*again)();
    reader.copy_again(lost.missing, copies.data(), in_row);
    reader.settle(false, result);
  }
  return nb::make_tuple(tensors, positions(result.missing), positions(result.unwritten));
}

void bind_codec(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Plan>(m, "Plan")
      .def_ro("steps", &Plan::steps)
      .def_ro("envs", &Plan::envs)
      .def_ro("bytes", &Plan::bytes);

  nb::class_<Codec>(m, "Codec")
      .def(nb::init<nb::list, nb::object, nb::handle, nb::object, nb::object, nb::handle, nb::handle,
                    std::optional<size_t>, bool>(),
           "leaves"_a, "tree"_a.none(), "td_type"_a, "td_template"_a.none(), "size_type"_a, "array_type"_a,
           "scalar_type"_a, "sequence"_a.none() = nb::none(), "of_items"_a = false)
      .def("check", &check, "batch"_a.none(), "batch_dims"_a, "time_dim"_a, "extra"_a.none() = nb::none())
      .def("check_list", &Codec::check_list, "leaves"_a, "batch_dims"_a, "time_dim"_a)
      .def("check_columns", &check_columns, "columns"_a, "batch_dims"_a, "time_dim"_a, "own"_a.none() = nb::none(),
           nb::sig("def check_columns(self, columns: list[object], batch_dims: int, time_dim: int, own: int | None = None) -> "
                   "Plan | None"))
      .def("check_packed", &Codec::check_packed, "rows"_a.noconvert())
      .def("set_own", &Codec::set_own, "plan"_a, "leaf"_a)
      .def("index_dims", &Codec::index_dims, "leaf"_a);
}

void bind_push(nb::module_& m) {
  using namespace nb::literals;
  m.def("push_columns", &push_columns, "store"_a, "codec"_a, "lane"_a, "columns"_a, "batch_dims"_a, "time_dim"_a,
        "own"_a.none() = nb::none(),
        nb::sig("def push_columns(store: Store, codec: Codec, lane: int, columns: list[object], batch_dims: int, "
                "time_dim: int, own: int | None = None) -> bool"));
  m.def("push_step", &push_step, "store"_a, "codec"_a, "lane"_a, "step"_a.none());
  m.def("push", &push, "store"_a, "codec"_a, "lane"_a, "batch"_a.none(), "batch_dims"_a, "time_dim"_a,
        "own"_a.none() = nb::none(), "float_bits"_a.none() = nb::none(),
        nb::sig("def push(store: Store, codec: Codec, lane: int, batch: object | None, batch_dims: int, time_dim: int, "
                "own: int | None = None, float_bits: int | None = None) -> torch.Tensor | int | None"));
}

static void bind_generator(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<CounterGenerator>(m, "CounterGenerator")
      .def(nb::init<>())
      .def_rw("key", &CounterGenerator::key)
      .def_rw("counter", &CounterGenerator::counter)
      .def("next", &CounterGenerator::next)
      .def("random", [](CounterGenerator& g) { return static_cast<double>(g.next() >> 11) * 0x1p-53; })
      .def("write_seed", [](CounterGenerator& g, nb::handle out) {
        const SlotsArg value(nb::borrow(out));
        if (value.n < 1) throw nb::value_error("no room for a seed");
        *const_cast<int64_t*>(value.data) = static_cast<int64_t>(next_seed(g));
      }, "out"_a);
  m.def("mix", &mix64, "number"_a);
  m.def("seed_of_rank", &seed_of_rank, "seed"_a, "rank"_a);
}

void bind_batches(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<RowSource>(m, "RowSource")
      .def(nb::init<nb::object, nb::object, bool>(), "store"_a, "codec"_a, "mapped"_a);
  nb::class_<KeptTensor>(m, "KeptTensor")
      .def(nb::init<nb::object>(), "tensor"_a)
      .def("is_free", &KeptTensor::is_free)
      .def_prop_ro("tensor", [](const KeptTensor& kept) { return nb::borrow<Tensor>(kept.tensor()); });
  bind_generator(m);
  nb::class_<RowDraw>(m, "RowDraw")
      .def_prop_ro("joins", &RowDraw::joins)
      .def_prop_ro("asks_counters_only", &RowDraw::asks_counters_only);
  nb::class_<UniformDraw, RowDraw>(m, "UniformDraw")
      .def(nb::init<nb::object, nb::object>(), "sampler"_a, "lock"_a);
  nb::class_<EpochDraw, RowDraw>(m, "EpochDraw").def(nb::init<nb::object>(), "running"_a);
  nb::class_<BatchMaker>(m, "BatchMaker")
      .def(nb::init<nb::list, nb::object, nb::list, nb::object>(), "members"_a, "chooser"_a.none() = nb::none(),
           "forms"_a = nb::list(), "reuse"_a.none() = nb::none(),
           nb::sig("def __init__(self, members: list, chooser: object | None = None, "
                   "forms: list = [], reuse: object | None = None) -> None"))
      .def_prop_ro("is_made_here", &BatchMaker::is_made_here)
      .def("sample", &BatchMaker::sample, "sources"_a, "n"_a, "as_numpy"_a = false, "form"_a = 0)
      .def("prepare", &BatchMaker::prepare, "sources"_a, "n"_a, "threads"_a, "form"_a = 0,
           nb::sig("def prepare(self, sources: object, n: int, threads: CopyThreads, form: int = 0) -> "
                   "PreparedBatch | None"));
  nb::class_<CopyThreads>(m, "CopyThreads")
      .def(nb::init<size_t>(), "most"_a)
      .def("close", &CopyThreads::close);
  nb::class_<PreparedBatch>(m, "PreparedBatch")
      .def("take", &PreparedBatch::take)
      .def("cancel", &PreparedBatch::cancel)
      .def_prop_ro("seconds", &PreparedBatch::seconds);
}

void bind_epochs(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<EpochWalk>(m, "EpochWalk")
      .def(nb::init<const Store&, uint64_t, bool, std::vector<std::pair<uint64_t, uint64_t>>, uint64_t,
                    std::vector<uint64_t>, bool>(),
           "store"_a, "key"_a, "shuffle"_a, "ranges"_a, "ring"_a = 0, "moved"_a = std::vector<uint64_t>(), "with_removed"_a = false)
      .def("take", &EpochWalk::take, "store"_a, "position"_a, "n"_a, "stop"_a = UINT64_MAX)
      .def("__len__", &EpochWalk::size);
}

void bind_n_step(nb::module_& m) {
  using namespace nb::literals;
  m.def("read_n_steps", &read_n_steps, "store"_a, "codec"_a, "slots"_a, "discounts"_a.noconvert(), "reward"_a, "done"_a,
        "mapped"_a = false,
        nb::sig("def read_n_steps(store: Store, codec: Codec, slots: object, discounts: numpy.typing.NDArray[numpy.float32], "
                "reward: int, done: int, mapped: bool = False) -> tuple[torch.Tensor, ...] | None"));
}

void bind_numpy_random(nb::module_& m) {
  using namespace nb::literals;
  m.def("draw_slots_by_numpy", &draw_slots_by_numpy, "generator"_a, "n"_a, "times"_a, "envs"_a,
        nb::sig("def draw_slots_by_numpy(generator: object, n: int, times: int, envs: int) -> torch.Tensor"));
}

void bind_items(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<ItemReader>(m, "ItemReader")
      .def(nb::init<nb::object, nb::object, nb::object>(), "store"_a, "codec"_a, "row"_a)
      .def("pick", &ItemReader::pick, "list"_a, "slots"_a, "reuse"_a = false)
      .def("item", &ItemReader::item, "slot"_a);
}

void bind_row_pool(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<RowPool>(m, "RowPool")
      .def(nb::init<size_t, size_t, std::vector<size_t>, uint64_t>(), "shards"_a, "unit"_a, "widths"_a, "seed"_a)
      .def("put", &RowPool::put, "shard"_a, "share"_a, "lowest"_a.none(), "parts"_a, "slots"_a, "generation"_a,
           "ratio"_a.none(), "last"_a.none(), "mask"_a.none(), "first_index"_a, "low"_a)
      .def("drop", &RowPool::drop, "shard"_a)
      .def_prop_ro("total", &RowPool::total)
      .def("left", &RowPool::left, "shard"_a)
      .def("low", &RowPool::low)
      .def("take_run", &RowPool::take_run, "n"_a)
      .def("begin", &RowPool::begin, "n"_a)
      .def("fill", &RowPool::fill)
      .def("take", &RowPool::take, "codec"_a.none(), "attaches"_a, "beta"_a.none(), "wide"_a);
}

void bind_rows_testing(nb::module_& m) {
  using namespace nb::literals;
  m.def("permutation", [](uint64_t key, uint64_t n, uint64_t start, size_t count) {
    const Permutation p(key, n, true);
    std::vector<uint64_t> out;
    for (uint64_t i = start; i < n && out.size() < count; ++i) out.push_back(p.at(i));
    return out;
  }, "key"_a, "n"_a, "start"_a, "count"_a);
  m.def("permutation_block", [](uint64_t key, uint64_t n, uint64_t start, size_t count, bool shuffle) {
    if (count > Permutation::kBlock || count > n || start > n - count) throw nb::value_error("no such block");
    std::vector<uint64_t> out(count);
    Permutation(key, n, shuffle).at(start, out.data(), count);
    return out;
  }, "key"_a, "n"_a, "start"_a, "count"_a, "shuffle"_a = true);
  m.def("gather_interrupted", &gather_interrupted, "store"_a, "codec"_a, "slots"_a, "meanwhile"_a, "again"_a.none() = nb::none());
  nb::class_<BareObservations>(m, "Observations")
      .def(nb::init<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, const std::vector<std::pair<uint64_t, uint64_t>>&>(), "lanes"_a,
           "envs"_a, "capacity"_a, "ahead"_a, "longest_piece"_a, "keys"_a)
      .def("extend", &BareObservations::extend, "lane"_a, "keys"_a)
      .def("read", &BareObservations::read, "rows"_a, "out"_a)
      .def("published", &BareObservations::published, "lane"_a)
      .def_prop_ro("bytes", &BareObservations::bytes);
}

}  // namespace engram
