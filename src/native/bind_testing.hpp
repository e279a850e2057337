// Bindings that only tests call: parts of the core by themselves, and views of a store's internals.
#pragma once
#include <nanobind/nanobind.h>

#include <cstddef>
#include <tuple>
#include <vector>

#include "bind_priorities.hpp"
#include "bind_store.hpp"
#include "observations.hpp"

namespace engram {

// A sum tree with its minimum tree by itself.
struct BareTree {
  explicit BareTree(uint64_t n) : size(n), sum(n) {}
  void check(const SlotsArg& slots) const {
    for (size_t i = 0; i < slots.n; ++i)
      if (static_cast<uint64_t>(slots.data[i]) >= size) throw nb::index_error("no such leaf");
  }
  void set(nb::handle slots_in, nb::handle values_in) {
    const SlotsArg slots{nb::borrow(slots_in)};
    const NumbersArg values(values_in);
    if (!values.fits() || values.n != slots.n) throw nb::value_error("one value for each leaf");
    check(slots);
    LeafChanges changes;
    changes.restart(slots.n);
    for (size_t i = 0; i < slots.n; ++i) sum.set(static_cast<uint64_t>(slots.data[i]), values[i], 0, changes);
    sum.refresh(changes);
  }
  void fill(uint64_t from, uint64_t to, double value) {
    if (from >= to || to > size) throw nb::index_error("no such leaves");
    for (uint64_t leaf = from; leaf < to; ++leaf) sum.leaf(leaf) = value;
    sum.refresh(from / kWide, (to - 1) / kWide);
  }
  // The leaves and values that each implementation this processor supports finds.
  std::vector<std::pair<std::vector<uint64_t>, std::vector<double>>> find_in_all_ways(const std::vector<double>& prefixes) const {
    if (!(sum.total() > 0)) throw nb::value_error("the tree holds nothing");
    std::vector<std::pair<std::vector<uint64_t>, std::vector<double>>> found;
    const auto add = [&](auto&& find) {
      std::vector<double> prefix = prefixes, value(prefixes.size());
      std::vector<uint64_t> leaf(prefixes.size());
      find(prefix.data(), leaf.data(), value.data(), prefixes.size());
      found.emplace_back(std::move(leaf), std::move(value));
    };
    add([&](auto... to) { sum.find(to...); });
    add([&](auto... to) { sum.find_one_by_one(to...); });
#ifdef ENGRAM_CHOOSES_VECTORS
    if (__builtin_cpu_supports("avx2")) add([&](auto... to) { find_by_fours(to...); });
    if (__builtin_cpu_supports("x86-64-v4")) add([&](auto... to) { find_by_eights(to...); });
#endif
    return found;
  }
  std::vector<uint64_t> find(std::vector<double> prefixes) const { return find_in_all_ways(prefixes)[0].first; }
#ifdef ENGRAM_CHOOSES_VECTORS
  __attribute__((target("avx2"))) void find_by_fours(double* prefix, uint64_t* leaf, double* value, size_t n) const {
    sum.find_together<Columns4>(prefix, leaf, value, n);
  }
  __attribute__((target("arch=x86-64-v4"))) void find_by_eights(double* prefix, uint64_t* leaf, double* value, size_t n) const {
    sum.find_together<Columns8>(prefix, leaf, value, n);
  }
#endif
  uint64_t size;
  SumTree sum;
};

#ifdef ENGRAM_CHOOSES_VECTORS
// For processors that can fuse a product and a sum into one rounding.
__attribute__((target("avx2,fma"))) inline void raise_where_fused(double* x, size_t n, double y) {
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) raise_numbers<4>(x, n, y);
  else raise_to(x, n, y);
}
#else
inline void raise_where_fused(double* x, size_t n, double y) { raise_to(x, n, y); }
#endif

// Powers as each implementation computes them.
inline std::vector<std::vector<double>> all_powers(nb::handle values_in, double y) {
  const NumbersArg values(values_in);
  if (!values.fits()) throw nb::type_error("contiguous float64");
  std::vector<double> x;
  for (size_t i = 0; i < values.n; ++i) x.push_back(values[i]);
  std::vector<std::vector<double>> ways(6, x);
  raise_to(ways[0].data(), x.size(), y);
  for (double& one : ways[1]) one = raised(one, y);
  raise_numbers<2>(ways[2].data(), x.size(), y);
  raise_numbers<4>(ways[3].data(), x.size(), y);
  raise_numbers<8>(ways[4].data(), x.size(), y);
  raise_where_fused(ways[5].data(), x.size(), y);
  return ways;
}

// Observations by themselves, with the counters of lanes and no rows.
class BareObservations {
 public:
  using Stacks = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;      // [steps, envs, frames * bytes]
  using StacksOut = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;         // [rows, frames * bytes]

  // `keys`: frames and bytes of a frame of each.
  BareObservations(uint64_t lanes, uint64_t envs, uint64_t capacity, uint64_t ahead, uint64_t longest_piece,
                   const std::vector<std::pair<uint64_t, uint64_t>>& keys)
      : observations_(Observations::Geometry{lanes, envs, capacity, ahead, longest_piece, 0, key_geometries(keys), {}}),
        counters_(3 * lanes) {}
  uint64_t bytes() const { return observations_.bytes(); }
  uint64_t published(uint64_t lane) const { return counters_.at(3 * lane + 1).load(); }
  // Appends steps to a lane, piece by piece.
  void extend(uint64_t lane, const std::vector<std::pair<Stacks, Stacks>>& keys) {
    const Observations::Geometry& g = observations_.geometry();
    std::vector<Observations::Key> from;
    for (size_t k = 0; k < keys.size(); ++k) from.push_back({source(k, keys[k].first), source(k, keys[k].second)});
    const uint64_t n = keys.empty() ? 0 : keys[0].first.shape(0);
    if (keys.size() != g.keys.size() || lane >= g.lanes) throw nb::value_error("one X and one next.X for each key");
    for (const auto& [x, next] : keys)
      if (x.shape(0) != n || next.shape(0) != n) throw nb::value_error("as many steps of each");
    const Observations::Rows rows = lane_of(lane);
    observations_.plan(rows, 0, lane, n, from, 0);
    for (uint64_t done = 0; done < n;) {
      const uint64_t take = std::min(n - done, g.longest_piece);
      rows.append(take, false, [&](uint64_t at) { observations_.store(rows, lane, at, take, from, 0); });
      done += take;
    }
  }
  // Reads rows (lane, environment, sequence) of which all are stored. Returns how many were not whole.
  size_t read(const std::vector<std::array<uint64_t, 3>>& wanted, const std::vector<std::pair<StacksOut, StacksOut>>& out) const {
    const Observations::Geometry& g = observations_.geometry();
    std::vector<Observations::Target> to;
    for (size_t k = 0; k < out.size(); ++k) {
      if (k >= g.keys.size()) throw nb::value_error("one X and one next.X for each key");
      for (const bool is_next : {false, true}) {
        const StacksOut& one = is_next ? out[k].second : out[k].first;
        if (one.shape(0) < wanted.size() || one.shape(1) != g.keys[k].bytes()) throw nb::value_error("a stack for each row");
        to.push_back({{k, is_next}, one.data(), static_cast<ptrdiff_t>(one.shape(1))});
      }
    }
    std::vector<char> is_newest(wanted.size());
    size_t gone = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const uint64_t lane = wanted[i][0], env = wanted[i][1], w = wanted[i][2];
      if (lane >= g.lanes || env >= g.envs) throw nb::index_error("no such lane or environment");
      const LaneView v = lane_of(lane).look();
      if (w < v.first || w >= v.published) throw nb::index_error("no such row");
      if (i + 1 < wanted.size() && wanted[i + 1][0] < g.lanes && wanted[i + 1][1] < g.envs)
        observations_.prefetch(wanted[i + 1][0], wanted[i + 1][1], wanted[i + 1][2]);
      is_newest[i] = observations_.copy(lane_of(lane), lane, env, w, v.published, to, i);
    }
    Observations::Rows::after_reading();
    for (size_t i = 0; i < wanted.size(); ++i) {
      const Observations::Rows rows = lane_of(wanted[i][0]);
      gone += wanted[i][2] < rows.first_now() || (is_newest[i] && !observations_.is_newest(wanted[i][2], rows.look().published));
    }
    return gone;
  }

 private:
  LeafSource source(size_t k, const Stacks& stacks) const {
    const Observations::Geometry& g = observations_.geometry();
    if (k >= g.keys.size() || stacks.shape(1) != g.envs || stacks.shape(2) != g.keys[k].bytes())
      throw nb::value_error("[steps, environments, frames * bytes]");
    const auto bytes = static_cast<ptrdiff_t>(stacks.shape(2));
    return {0, stacks.shape(2), stacks.data(), bytes * static_cast<ptrdiff_t>(g.envs), bytes};
  }
  Observations::Rows lane_of(uint64_t lane) const {
    auto& c = const_cast<std::vector<Counter>&>(counters_);
    return {c[3 * lane], c[3 * lane + 1], c[3 * lane + 2], nullptr, observations_.geometry().capacity};
  }

  Observations observations_;
  std::vector<Counter> counters_;  // claimed, published and base of each lane
};

// As `gather` of a list of leaves [n, ...]; `meanwhile` is called when the rows are looked up and none is copied.
// `again`: as where rows that are missing are copied again; it is called before that.
inline nb::tuple gather_interrupted(Store& store, const Codec& codec, nb::handle slots_in, const nb::callable& meanwhile,
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

// As `Store.keep_durable_tails` of the first lane; `meanwhile` is called when it is known which rows are the newest.
inline bool keep_durable_tails_interrupted(Store& store, const nb::callable& meanwhile) {
  const Observations::Rows rows = store.lanes.protocol(0);
  const LaneView v = rows.look();
  meanwhile();
  return store.observations()->copy_newest_tails(rows, 0, v, store.lanes.lane(0).durable.load());
}

// Name, offset and bytes of each field of the blocks of a store's file, for tests that damage them.
using Fields = std::vector<std::tuple<const char*, size_t, size_t>>;
inline nb::dict block_fields() {
#define ENGRAM_FIELD(name) {#name, offsetof(Block, name), sizeof(Block::name)}
  const auto geometry = [] {
    using Block = StoreGeometry;
    return Fields{ENGRAM_FIELD(magic), ENGRAM_FIELD(version), ENGRAM_FIELD(lane_version), ENGRAM_FIELD(features),
                  ENGRAM_FIELD(feature_names), ENGRAM_FIELD(lanes), ENGRAM_FIELD(lane_capacity), ENGRAM_FIELD(envs),
                  ENGRAM_FIELD(payload_bytes), ENGRAM_FIELD(row_stride), ENGRAM_FIELD(seams_offset),
                  ENGRAM_FIELD(seams_bytes), ENGRAM_FIELD(layout_bytes), ENGRAM_FIELD(layout_offset),
                  ENGRAM_FIELD(log_offset), ENGRAM_FIELD(redo_offset), ENGRAM_FIELD(redo_bytes),
                  ENGRAM_FIELD(consumers_offset), ENGRAM_FIELD(arena_offset), ENGRAM_FIELD(rows_offset),
                  ENGRAM_FIELD(total_bytes), ENGRAM_FIELD(store_id), ENGRAM_FIELD(layout_crc), ENGRAM_FIELD(crc)};
  };
  const auto session = [] {
    using Block = StoreHeader;
    return Fields{ENGRAM_FIELD(incarnation), ENGRAM_FIELD(edits), ENGRAM_FIELD(log_head), ENGRAM_FIELD(replaced),
                  ENGRAM_FIELD(boot_id), ENGRAM_FIELD(clean), ENGRAM_FIELD(session_unused), ENGRAM_FIELD(host_id),
                  ENGRAM_FIELD(tickets), ENGRAM_FIELD(unused)};
  };
  const auto lane = [] {
    using Block = LaneHeader;
    return Fields{ENGRAM_FIELD(claimed), ENGRAM_FIELD(published), ENGRAM_FIELD(base), ENGRAM_FIELD(origin),
                  ENGRAM_FIELD(durable), ENGRAM_FIELD(term), ENGRAM_FIELD(version), ENGRAM_FIELD(version_unused),
                  ENGRAM_FIELD(border_looked), ENGRAM_FIELD(border_agreed), ENGRAM_FIELD(turn),
                  ENGRAM_FIELD(last_writer), ENGRAM_FIELD(writers), ENGRAM_FIELD(written_at),
                  ENGRAM_FIELD(ticket), ENGRAM_FIELD(until), ENGRAM_FIELD(extents_claimed),
                  ENGRAM_FIELD(extents_published), ENGRAM_FIELD(extents_base), ENGRAM_FIELD(extents), ENGRAM_FIELD(unused)};
  };
  const auto trailer = [] {
    using Block = Trailer;
    return Fields{ENGRAM_FIELD(sequence_and_seam), ENGRAM_FIELD(term), ENGRAM_FIELD(crc)};
  };
  const auto redo = [] {
    using Block = RedoHeader;
    return Fields{ENGRAM_FIELD(state), ENGRAM_FIELD(crc), ENGRAM_FIELD(rows), ENGRAM_FIELD(row_stride),
                  ENGRAM_FIELD(log_head)};
  };
#undef ENGRAM_FIELD
  nb::dict blocks;
  const auto add = [&](const char* block, size_t bytes, const Fields& fields) {
    nb::dict named;
    for (const auto& [name, offset, size] : fields) named[name] = nb::make_tuple(offset, size);
    blocks[block] = nb::make_tuple(bytes, named);
  };
  add("StoreGeometry", sizeof(StoreGeometry), geometry()), add("StoreHeader", sizeof(StoreHeader), session());
  add("LaneHeader", sizeof(LaneHeader), lane()), add("Trailer", sizeof(Trailer), trailer());
  add("RedoHeader", sizeof(RedoHeader), redo());
  return blocks;
}

inline void bind_testing(nb::module_& m) {
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
  m.def("is_lazy", [](Tensor tensor) { return Codec::lazy(tensor.ptr()); }, "tensor"_a);
  m.def("all_powers", &all_powers, "values"_a, "exponent"_a);
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

  m.def("gather_interrupted", &gather_interrupted, "store"_a, "codec"_a, "slots"_a, "meanwhile"_a, "again"_a.none() = nb::none());
  m.def("keep_durable_tails_interrupted", &keep_durable_tails_interrupted, "store"_a, "meanwhile"_a);
  nb::class_<BareObservations>(m, "Observations")
      .def(nb::init<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, const std::vector<std::pair<uint64_t, uint64_t>>&>(), "lanes"_a,
           "envs"_a, "capacity"_a, "ahead"_a, "longest_piece"_a, "keys"_a)
      .def("extend", &BareObservations::extend, "lane"_a, "keys"_a)
      .def("read", &BareObservations::read, "rows"_a, "out"_a)
      .def("published", &BareObservations::published, "lane"_a)
      .def_prop_ro("bytes", &BareObservations::bytes);

  nb::class_<BareTree>(m, "SumTree")
      .def(nb::init<uint64_t>(), "size"_a)
      .def("set", &BareTree::set, "leaves"_a, "values"_a)
      .def("fill", &BareTree::fill, "start"_a, "stop"_a, "value"_a)
      .def("find", &BareTree::find, "prefixes"_a)
      .def("find_in_all_ways", &BareTree::find_in_all_ways, "prefixes"_a)
      .def_prop_ro("total", [](const BareTree& t) { return t.sum.total(); })
      .def_prop_ro("lowest", [](const BareTree& t) { return t.sum.lowest(); });
}

}  // namespace engram
