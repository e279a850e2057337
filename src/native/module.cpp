// The Python face of the native core. Every index is checked here or just below, before memory is touched.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "codec.hpp"
#include "draw.hpp"
#include "recovery.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace engram;

namespace {

// Sizes beyond any memory: refused before they are multiplied.
constexpr size_t kMostBytes = size_t{1} << 46;

// int64 [n] as a tensor; where torch lacks the exchange API as a bytearray, which Python turns into one.
nb::object slots_out(size_t n, auto fill) {
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

std::string bytes_of(nb::bytes b) { return {b.c_str(), b.size()}; }

void check_lane(const Store& store, uint64_t lane) {
  if (lane >= store.shape().lanes)
    throw nb::index_error(("lane " + std::to_string(lane) + " of " + std::to_string(store.shape().lanes)).c_str());
}

// Releases the GIL for the time of a long copy only: getting it back beside a busy thread costs milliseconds.
template <typename F>
void maybe_without_gil(bool release, F&& work) {
  if (release) {
    nb::gil_scoped_release unlocked;
    work();
  } else {
    work();
  }
}

// The time slots that n steps appended at write number `first` take.
nb::object slots_from(const Store& store, uint64_t lane, uint64_t first, size_t n) {
  const uint64_t capacity = store.shape().lane_capacity;
  return slots_out(n, [&](int64_t* out) {
    uint64_t slot = first % capacity;
    for (size_t i = 0; i < n; ++i) {
      out[i] = static_cast<int64_t>(lane * capacity + slot);
      if (++slot == capacity) slot = 0;
    }
  });
}

nb::object next_slots(Store& store, uint64_t lane, size_t n) {
  check_lane(store, lane);
  return slots_from(store, lane, store.lanes.lane(lane).published.load(), n);
}

nb::object append(Store& store, uint64_t lane, const Plan& plan) {
  check_lane(store, lane);
  const Shape& s = store.shape();
  if (plan.strands != s.strands)
    throw nb::value_error(("the batch has " + std::to_string(plan.strands) + " strands, the store " +
                           std::to_string(s.strands)).c_str());
  for (const LeafSource& leaf : plan.leaves)
    if (leaf.offset + leaf.bytes > s.payload_bytes) throw nb::value_error("a leaf lies outside the row");
  uint64_t first = 0;
  maybe_without_gil(plan.bytes > kGilBytes || store.pages().on(), [&] {
    first = RowWriter(store).append(lane, plan.steps, plan.leaves);
  });
  if (plan.single) return nb::int_(lane * s.lane_capacity + first % s.lane_capacity);
  return slots_from(store, lane, first, plan.steps);
}

nb::object positions(const std::vector<uint32_t>& at) {
  if (at.empty()) return nb::none();
  nb::list list;
  for (uint32_t i : at) list.append(i);
  return nb::object(list);
}

struct Reading {
  ReadResult result;
  bool inside = true;
};

void read_rows(Store& store, const int64_t* slots, size_t n, std::vector<LeafCopy>& copies, bool mapped, bool numbers,
               Reading& out) {
  static thread_local ReadScratch scratch;
  RowReader reader(store, scratch);
  if (!(out.inside = reader.find(slots, n))) return;
  reader.copy(copies.data(), copies.size(), mapped);
  reader.settle(numbers, out.result);
}

void check_codec(const Store& store, const Codec& codec) {
  for (const Leaf& leaf : codec.leaves())
    if (leaf.offset + leaf.bytes > store.shape().payload_bytes)
      throw nb::value_error("the layout does not fit the rows of this store");
}

nb::tuple finish_read(nb::object rows, const Reading& reading, bool numbers) {
  nb::object generation = nb::none();
  if (numbers)
    generation = slots_out(reading.result.numbers.size(), [&](int64_t* out) {
      std::copy(reading.result.numbers.begin(), reading.result.numbers.end(), out);
    });
  return nb::make_tuple(rows, positions(reading.result.missing), positions(reading.result.unwritten), generation);
}

void refuse_slots(const Store& store) {
  throw nb::index_error(("a slot lies outside 0 to " + std::to_string(store.slots() - 1)).c_str());
}

nb::tuple gather(Store& store, const Codec& codec, nb::handle slots_in, std::optional<std::vector<int64_t>> shape,
                 nb::handle extra, bool mapped, bool numbers) {
  if (!torch_api().api) throw nb::type_error("gather needs the exchange API; use gather_into");
  check_codec(store, codec);
  const SlotsArg slots(nb::borrow(slots_in));
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
  OutBlock shared(leaves.size());
  std::vector<std::unique_ptr<OutBlock>> own;
  std::vector<std::pair<OutBlock*, size_t>> where;
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
  if (any_shared) shared.take();
  for (auto& block : own) block->take();
  static thread_local std::vector<LeafCopy> copies;
  copies.clear();
  for (size_t k = 0; k < leaves.size(); ++k)
    copies.push_back({leaves[k].offset, leaves[k].bytes, where[k].first->data(where[k].second),
                      static_cast<ptrdiff_t>(leaves[k].bytes)});
  Reading reading;
  maybe_without_gil(bytes > kGilBytes || (mapped && store.pages().on()),
                    [&] { read_rows(store, slots.data, slots.n, copies, mapped, numbers, reading); });
  if (!reading.inside) refuse_slots(store);
  std::vector<nb::object> tensors;
  tensors.reserve(leaves.size());
  for (auto [block, i] : where) tensors.push_back(nb::steal(block->make(i)));
  return finish_read(codec.build(tensors, lead, extra), reading, numbers);
}

// The same into arrays that exist: one per leaf, [n, ...], writable and contiguous.
nb::tuple gather_into(Store& store, const Codec& codec, nb::handle slots_in, nb::list arrays, bool mapped,
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
  Reading reading;
  read_rows(store, slots.data, slots.n, copies, mapped, numbers, reading);
  if (!reading.inside) refuse_slots(store);
  return finish_read(nb::none(), reading, numbers);
}

void overwrite(Store& store, nb::handle slots_in, const Plan& plan) {
  const SlotsArg given(nb::borrow(slots_in));
  const std::vector<int64_t> slots(given.data, given.data + given.n);  // what is checked is what is written
  const Shape& s = store.shape();
  if (plan.strands != 1 || plan.steps != slots.size()) throw nb::value_error("one row for each slot");
  for (const LeafSource& leaf : plan.leaves)
    if (leaf.offset + leaf.bytes > s.payload_bytes) throw nb::value_error("a leaf lies outside the row");
  std::vector<SlotNumbers> numbers;
  for (uint64_t l = 0; l < s.lanes; ++l) numbers.emplace_back(store.lanes.view(l), s.lane_capacity);
  for (int64_t given_slot : slots) {
    const auto slot = static_cast<uint64_t>(given_slot);
    if (slot >= store.slots()) refuse_slots(store);
    const uint64_t time = slot / s.strands;
    uint64_t number = 0;
    if (!numbers[time / s.lane_capacity].find(time % s.lane_capacity, number))
      throw nb::index_error(("slot " + std::to_string(slot) + " has not been written").c_str());
  }
  InPlaceWriter(store).write(slots.data(), slots.size(), plan.leaves);
}

// Generations of slots: write numbers, -1 where a slot holds no row.
nb::object generations(Store& store, nb::handle slots_in) {
  const SlotsArg slots(nb::borrow(slots_in));
  const Shape& s = store.shape();
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

nb::object uniform(Store& store, nb::handle seed_in, size_t n) {
  const SlotsArg seed(nb::borrow(seed_in));
  if (seed.n < 1) throw nb::value_error("no seed");
  if (store.lanes.rows() == 0) return nb::none();
  bool drawn = false;
  nb::object slots = slots_out(n, [&](int64_t* out) {
    drawn = draw_uniform(store.lanes, static_cast<uint64_t>(seed.data[0]), out, n);
  });
  return drawn ? slots : nb::none();
}

// One pass over the rows that existed when it was made.
class EpochWalk {
 public:
  EpochWalk(const Store& store, uint64_t key, bool shuffle, std::vector<std::pair<uint64_t, uint64_t>> ranges)
      : map_(store.lanes.capacity(), store.lanes.strands()), ranges_(std::move(ranges)), permutation_(0, 0, false) {
    if (ranges_.size() != store.lanes.count()) throw nb::value_error("one range for each lane");
    for (auto [first, rows] : ranges_) {
      if (rows > store.lanes.capacity()) throw nb::value_error("a range is longer than its lane");
      map_.add(first, rows);
    }
    permutation_ = Permutation(key, map_.total(), shuffle);
  }
  uint64_t size() const { return map_.total(); }
  // Up to n slots from `position` on, rows overwritten since skipped; and the position after them.
  nb::tuple take(const Store& store, uint64_t position, size_t n) const {
    if (store.lanes.count() != ranges_.size()) throw nb::value_error("the walk was made for another store");
    std::vector<uint64_t> first;
    for (uint64_t l = 0; l < store.lanes.count(); ++l) first.push_back(store.lanes.view(l).first);
    std::vector<int64_t> found;
    found.reserve(std::min<uint64_t>(n, map_.total()));
    for (; position < map_.total() && found.size() < n; ++position) {
      uint64_t lane = 0, number = 0;
      const int64_t slot = map_.by_slot(permutation_.at(position), lane, number);
      if (number >= first[lane]) found.push_back(slot);
    }
    nb::object slots = slots_out(found.size(), [&](int64_t* out) {
      std::copy(found.begin(), found.end(), out);
    });
    return nb::make_tuple(slots, position);
  }

 private:
  RowMap map_;
  std::vector<std::pair<uint64_t, uint64_t>> ranges_;
  Permutation permutation_;
};

nb::dict lane_state(const Store& store, uint64_t l) {
  check_lane(store, l);
  const LaneHeader& h = store.lanes.lane(l);
  const LaneView v = store.lanes.view(l);
  nb::dict d;
  d["first"] = v.first, d["published"] = v.published, d["claimed"] = v.claimed;
  d["base"] = h.base.load(), d["origin"] = h.origin.load(), d["durable"] = h.durable.load();
  d["term"] = h.term.load(), d["seams"] = store.lanes.seams(l);
  return d;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a buffer that lives until the interpreter ends is no leak
  m.doc() = "The native core of engram: packed rows, lanes, and batches in and out.";
  m.attr("LOG_ENTRIES") = kLogEntries;
  m.attr("SEAMS") = kSeams;
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
  m.def("use_torch", &use_torch, "tensor_type"_a, "capsule"_a.none(), "lazy_bits"_a.none() = nb::none());
  m.def("has_exchange", [] { return torch_api().api != nullptr; });
  m.def("crc32c", [](nb::bytes b, uint32_t crc) { return crc32c(crc, b.c_str(), b.size()); }, "data"_a, "crc"_a = 0);
  m.def("crc32c_by_table", [](nb::bytes b) {
    return ~crc32c_table(~uint32_t{0}, reinterpret_cast<const uint8_t*>(b.c_str()), b.size());
  }, "data"_a);
  m.def("permutation", [](uint64_t key, uint64_t n, uint64_t start, size_t count) {
    const Permutation p(key, n, true);
    std::vector<uint64_t> out;
    for (uint64_t i = start; i < n && out.size() < count; ++i) out.push_back(p.at(i));
    return out;
  }, "key"_a, "n"_a, "start"_a, "count"_a);
  m.def("pool_bytes", [] { return BlockPool::instance().kept(); });

  nb::class_<Plan>(m, "Plan")
      .def_ro("steps", &Plan::steps)
      .def_ro("strands", &Plan::strands)
      .def_ro("bytes", &Plan::bytes);

  nb::class_<Codec>(m, "Codec")
      .def(nb::init<nb::list, nb::object, nb::handle, nb::object, nb::object, nb::handle, nb::handle>(), "leaves"_a,
           "tree"_a.none(), "td_type"_a, "td_template"_a.none(), "size_type"_a, "array_type"_a, "scalar_type"_a)
      .def("check", &Codec::check, "batch"_a.none(), "batch_dims"_a, "time_dim"_a,
           "extra"_a.none() = nb::none())
      .def("check_list", &Codec::check_list, "leaves"_a, "batch_dims"_a, "time_dim"_a, "raw"_a = false);

  nb::class_<EpochWalk>(m, "EpochWalk")
      .def(nb::init<const Store&, uint64_t, bool, std::vector<std::pair<uint64_t, uint64_t>>>(), "store"_a, "key"_a,
           "shuffle"_a, "ranges"_a)
      .def("take", &EpochWalk::take, "store"_a, "position"_a, "n"_a)
      .def("__len__", &EpochWalk::size);

  nb::class_<Store>(m, "Store")
      .def_static("create", [](int fd, uint64_t lanes, uint64_t lane_capacity, uint64_t strands, uint64_t payload_bytes,
                               uint64_t alignment, bool trailer, nb::bytes layout, nb::bytes store_id) {
        return Store::create(fd, {lanes, lane_capacity, strands, payload_bytes, alignment, trailer, bytes_of(layout),
                                  bytes_of(store_id)});
      }, "fd"_a, "lanes"_a, "lane_capacity"_a, "strands"_a, "payload_bytes"_a, "alignment"_a, "trailer"_a, "layout"_a,
         "store_id"_a)
      .def_static("size_needed", [](uint64_t lanes, uint64_t lane_capacity, uint64_t strands, uint64_t payload_bytes,
                                    uint64_t alignment, bool trailer, size_t layout_bytes) {
        return shape_of({lanes, lane_capacity, strands, payload_bytes, alignment, trailer,
                         std::string(layout_bytes, ' '), std::string(16, '\0')}).total_bytes;
      }, "lanes"_a, "lane_capacity"_a, "strands"_a, "payload_bytes"_a, "alignment"_a, "trailer"_a, "layout_bytes"_a)
      .def_static("open", &Store::open, "fd"_a, "bytes"_a)
      .def_prop_ro("lanes", [](const Store& s) { return s.shape().lanes; })
      .def_prop_ro("lane_capacity", [](const Store& s) { return s.shape().lane_capacity; })
      .def_prop_ro("strands", [](const Store& s) { return s.shape().strands; })
      .def_prop_ro("payload_bytes", [](const Store& s) { return s.shape().payload_bytes; })
      .def_prop_ro("row_stride", [](const Store& s) { return s.shape().row_stride; })
      .def_prop_ro("rows_offset", [](const Store& s) { return s.shape().rows_offset; })
      .def_prop_ro("redo_offset", [](const Store& s) { return s.shape().redo_offset; })
      .def_prop_ro("total_bytes", [](const Store& s) { return s.shape().total_bytes; })
      .def_prop_ro("has_trailer", &Store::has_trailer)
      .def_prop_ro("layout", [](const Store& s) { const auto l = s.layout(); return nb::bytes(l.data(), l.size()); })
      .def_prop_ro("store_id", [](const Store& s) { return nb::bytes(s.shape().store_id, 16); })
      .def_prop_ro("incarnation", [](const Store& s) { return s.header()->incarnation.load(); })
      .def_prop_ro("edits", [](const Store& s) { return s.header()->edits.load(); })
      .def_prop_ro("log_head", [](const Store& s) { return s.header()->log_head.load(); })
      .def("log", [](const Store& s, uint64_t from) {
        const uint64_t head = s.header()->log_head.load(std::memory_order_acquire);
        const auto* entries = reinterpret_cast<const Counter*>(s.at(s.shape().log_offset));
        if (from > head || head - from > kLogEntries) throw nb::index_error("the log does not reach back so far");
        std::vector<uint64_t> slots;
        for (uint64_t i = from; i < head; ++i) slots.push_back(entries[i % kLogEntries].load());
        return slots;
      }, "start"_a)
      .def_prop_rw("boot_id", [](const Store& s) { return nb::bytes(s.header()->boot_id, 16); },
                   [](Store& s, nb::bytes b) {
                     if (b.size() != 16) throw nb::value_error("a boot id has 16 bytes");
                     std::memcpy(s.header()->boot_id, b.c_str(), 16);
                   })
      .def_prop_rw("clean", [](const Store& s) { return s.header()->clean != 0; },
                   [](Store& s, bool clean) { s.header()->clean = clean; })
      .def("lane", &lane_state, "lane"_a)
      .def("rows", [](const Store& s) { return s.lanes.rows() * s.shape().strands; })
      .def("cursor", [](const Store& s, uint64_t l) {
        check_lane(s, l);
        return s.lanes.lane(l).published.load() % s.shape().lane_capacity;
      }, "lane"_a)
      .def("steps_written", [](const Store& s) { return s.lanes.write_count(); })
      .def("claim", [](const Store& s, uint64_t l, uint64_t n) { check_lane(s, l); return s.lanes.claim(l, n); },
           "lane"_a, "n"_a)
      .def("publish", [](const Store& s, uint64_t l, uint64_t at, uint64_t n) {
        check_lane(s, l);
        s.lanes.publish(l, at, n);
      }, "lane"_a, "at"_a, "n"_a)
      .def("add_seam", [](const Store& s, uint64_t l) { check_lane(s, l); s.lanes.add_seam(l); }, "lane"_a)
      .def("raise_term", [](const Store& s, uint64_t l) {
        check_lane(s, l);
        s.lanes.lane(l).term.fetch_add(1);
      }, "lane"_a)
      .def("mend", [](const Store& s) { s.lanes.mend(); })
      .def("mark_durable", [](const Store& s, const std::vector<uint64_t>& published) {
        if (published.size() != s.shape().lanes) throw nb::value_error("one number for each lane");
        for (uint64_t l = 0; l < s.shape().lanes; ++l) s.lanes.lane(l).durable.store(published[l]);
      }, "published"_a)
      .def("sync_header", [](const Store& s) {
        nb::gil_scoped_release unlocked;
        if (::msync(s.at(0), s.shape().rows_offset, MS_SYNC) != 0)
          throw std::runtime_error(std::string("cannot sync the header: ") + std::strerror(errno));
      })
      .def("empty", [](const Store& s, bool reset_count) { s.lanes.empty(reset_count); }, "reset_count"_a)
      .def("begin_restore", [](const Store& s) {
        s.lanes.begin_change();
        for (uint64_t l = 0; l < s.shape().lanes; ++l) {
          s.lanes.set_counters(l, 0, 0, 0, {});
          s.lanes.lane(l).term.fetch_add(1);  // so that no row from before is taken for one of the new
        }
      })
      .def("restore_lane", [](const Store& s, uint64_t l, uint64_t base, uint64_t published, uint64_t origin,
                              const std::vector<uint64_t>& seams) {
        check_lane(s, l);
        if (base > published) throw nb::value_error("base lies above published");
        s.lanes.set_counters(l, base, published, origin, seams);
      }, "lane"_a, "base"_a, "published"_a, "origin"_a, "seams"_a)
      .def("end_restore", [](const Store& s) { s.lanes.end_change(); })
      .def("seal", [](Store& s, uint64_t l, uint64_t start, uint64_t stop) {  // trailers of restored rows
        check_lane(s, l);
        if (!s.has_trailer() || stop < start || stop - start > s.shape().lane_capacity) return;
        const auto term = static_cast<uint32_t>(s.lanes.lane(l).term.load());
        for (uint64_t strand = 0; strand < s.shape().strands; ++strand)
          for (uint64_t w = start; w < stop; ++w) {
            const uint64_t p = s.physical(l, strand, w % s.shape().lane_capacity);
            s.seal(s.row(p), p, w, term);
          }
      }, "lane"_a, "start"_a, "stop"_a)
      .def("whole", [](const Store& s, uint64_t physical) {
        if (!s.has_trailer() || physical >= s.slots()) throw nb::index_error("no such row with a trailer");
        return s.whole(physical);
      }, "physical"_a)
      .def_prop_ro("interrupted", [](Store& s) { return InPlaceWriter(s).interrupted(); })
      .def_prop_ro("fd", [](const Store& s) { return s.fd(); })
      .def("finish_interrupted", [](Store& s) { return InPlaceWriter(s).finish_interrupted(); })
      .def("recover", [](Store& s) {
        if (!s.has_trailer()) throw nb::value_error("rows without trailers cannot be recovered");
        uint64_t dropped = 0;
        nb::gil_scoped_release unlocked;
        s.header()->incarnation.fetch_add(2);  // odd would say that a kill shall empty the store
        for (uint64_t l = 0; l < s.shape().lanes; ++l) {
          const LaneScan scan = scan_lane(s, l);
          restore_lane(s, l, scan);
          dropped += scan.dropped * s.shape().strands;
        }
        return dropped;
      })
      .def("memory", [](std::shared_ptr<Store> s) {
        const size_t shape[1] = {s->shape().total_bytes};
        auto* owner = new std::shared_ptr<Region>(s->region());
        nb::capsule keep(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<Region>*>(p); });
        return nb::ndarray<nb::numpy, uint8_t>(s->at(0), 1, shape, keep);
      })
      .def_prop_ro("asking_pages", [](Store& s) { return s.pages().on(); })
      .def("advise_random", [](const Store& s) { ::madvise(s.at(0), s.shape().total_bytes, MADV_RANDOM); })
      .def("next_slot", [](const Store& s, uint64_t l) {
        check_lane(s, l);
        return l * s.shape().lane_capacity + s.lanes.lane(l).published.load() % s.shape().lane_capacity;
      }, "lane"_a)
      .def("next_slots", &next_slots, "lane"_a, "n"_a)
      .def("append", &append, "lane"_a, "plan"_a)
      .def("gather", &gather, "codec"_a, "slots"_a, "shape"_a.none() = nb::none(), "extra"_a.none() = nb::none(),
           "mapped"_a = false, "numbers"_a = false)
      .def("gather_into", &gather_into, "codec"_a, "slots"_a, "arrays"_a, "mapped"_a = false, "numbers"_a = false)
      .def("overwrite", &overwrite, "slots"_a, "plan"_a)
      .def("generations", &generations, "slots"_a)
      .def("uniform", &uniform, "seed"_a, "n"_a);
}
