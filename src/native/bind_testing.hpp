// What only tests call: parts of the core by themselves, and looks inside a store.
#pragma once
#include <nanobind/nanobind.h>

#include <vector>

#include "bind_priorities.hpp"
#include "bind_store.hpp"

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
    DirtyNodes dirty;
    for (size_t i = 0; i < slots.n; ++i) {
      const auto leaf = static_cast<uint64_t>(slots.data[i]);
      sum.leaf(leaf) = values[i];
      dirty.add(leaf / kWide);
    }
    sum.refresh(dirty);
  }
  void fill(uint64_t from, uint64_t to, double value) {
    if (from >= to || to > size) throw nb::index_error("no such leaves");
    for (uint64_t leaf = from; leaf < to; ++leaf) sum.leaf(leaf) = value;
    sum.refresh(from / kWide, (to - 1) / kWide);
  }
  std::vector<uint64_t> find(std::vector<double> prefixes) const {
    if (!(sum.total() > 0)) throw nb::value_error("the tree holds nothing");
    std::vector<uint64_t> leaf(prefixes.size());
    std::vector<double> value(prefixes.size());
    sum.find(prefixes.data(), leaf.data(), value.data(), prefixes.size());
    return leaf;
  }
  uint64_t size;
  SumTree sum;
};

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
  m.def("pool_bytes", [] { return BlockPool::instance().free_bytes(); });
  m.def("empty_pool", [] { BlockPool::instance().empty(); });

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

  nb::class_<BareTree>(m, "SumTree")
      .def(nb::init<uint64_t>(), "size"_a)
      .def("set", &BareTree::set, "leaves"_a, "values"_a)
      .def("fill", &BareTree::fill, "start"_a, "stop"_a, "value"_a)
      .def("find", &BareTree::find, "prefixes"_a)
      .def_prop_ro("total", [](const BareTree& t) { return t.sum.total(); })
      .def_prop_ro("lowest", [](const BareTree& t) { return t.sum.lowest(); });
}

}  // namespace engram
