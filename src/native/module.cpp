// The Python face of the native core. Every index is checked here or just below, before memory is touched.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include "calls.hpp"
#include "cells.hpp"
#include "episodes_module.hpp"
#include "priorities_module.hpp"
#include "heap_module.hpp"
#include "owner_watch.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace engram;

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a buffer that lives until the interpreter ends is no leak
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const FileCutShort& error) {
      PyErr_SetString(nb::module_::import_("engram.errors").attr("StorageError").ptr(), error.what());
    } catch (const SyncFailed& error) {
      PyErr_SetString(nb::module_::import_("engram.errors").attr("StorageError").ptr(), error.what());
    }
  });
  m.doc() = "The native core of engram: packed rows, lanes, and batches in and out.";
  m.attr("LOG_ENTRIES") = kLogEntries;
  m.attr("FEATURES") = feature_names(~uint64_t{0});
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
  m.def("gather_many", &gather_many, "stores"_a, "codec"_a, "slots"_a, "shape"_a.none() = nb::none(),
        "extra"_a.none() = nb::none(), "mapped"_a = false, "numbers"_a = false, "parts"_a.none() = nb::none());
  m.def("joint_index", &joint_index, "slots"_a, "members"_a);
  m.def("pool_bytes", [] { return BlockPool::instance().kept(); });
  m.def("empty_pool", [] { BlockPool::instance().empty(); });

  nb::class_<Plan>(m, "Plan")
      .def_ro("steps", &Plan::steps)
      .def_ro("strands", &Plan::strands)
      .def_ro("bytes", &Plan::bytes);

  nb::class_<Codec>(m, "Codec")
      .def(nb::init<nb::list, nb::object, nb::handle, nb::object, nb::object, nb::handle, nb::handle,
                    std::optional<size_t>>(),
           "leaves"_a, "tree"_a.none(), "td_type"_a, "td_template"_a.none(), "size_type"_a, "array_type"_a,
           "scalar_type"_a, "sequence"_a.none() = nb::none())
      .def("check", &Codec::check, "batch"_a.none(), "batch_dims"_a, "time_dim"_a,
           "extra"_a.none() = nb::none())
      .def("check_list", &Codec::check_list, "leaves"_a, "batch_dims"_a, "time_dim"_a, "raw"_a = false);

  nb::class_<EpochWalk>(m, "EpochWalk")
      .def(nb::init<const Store&, uint64_t, bool, std::vector<std::pair<uint64_t, uint64_t>>, uint64_t,
                    std::vector<uint64_t>>(),
           "store"_a, "key"_a, "shuffle"_a, "ranges"_a, "ring"_a = 0, "moved"_a = std::vector<uint64_t>())
      .def("take", &EpochWalk::take, "store"_a, "position"_a, "n"_a)
      .def("__len__", &EpochWalk::size);

  nb::class_<SharedPass>(m, "SavePass")
      .def("read", [](SharedPass& shared, uint64_t lane, uint64_t start, uint64_t stop,
                      nb::ndarray<uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu> out) {
        SavePass& pass = *shared.pass;
        if (!pass.covers(lane, start, stop)) throw nb::index_error("these rows are not part of the save");
        const Shape& s = pass.shape();
        if (out.shape(0) != s.strands || out.shape(1) != stop - start || out.shape(2) != s.payload_bytes)
          throw nb::value_error("room for [strands, rows, payload bytes] is needed");
        uint8_t* to = out.data();
        nb::gil_scoped_release unlocked;
        pass.read(lane, start, stop, to);
      }, "lane"_a, "start"_a, "stop"_a, "out"_a)
      .def("lost_below", [](SharedPass& shared, uint64_t lane) {
        SavePass& pass = *shared.pass;
        if (lane >= pass.shape().lanes) throw nb::index_error("no such lane");
        return pass.lost_below(lane);
      }, "lane"_a)
      .def_prop_ro("preserved_bytes", [](SharedPass& shared) { return shared.pass->preserved_bytes(); });

  nb::class_<Replacement>(m, "Replacement").def("write", &Replacement::write);

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
      .def_static("open", &Store::open, "fd"_a, "bytes"_a = nb::none(), "read_only"_a = false)
      .def_prop_ro("read_only", &Store::read_only)
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
      .def("left_as", [](Store& s) { s.check_file(); return left_as(s); })
      .def_prop_ro("unflushed", [](const Store& s) {
        s.check_file();
        for (uint64_t l = 0; l < s.shape().lanes; ++l)
          if (s.lanes.lane(l).durable.load() < s.lanes.lane(l).published.load()) return true;
        return false;
      })
      .def("epoch", [](const Store& s) {
        s.check_file();
        Lanes::Protocol::after_reading();  // what was read before this was read before the numbers
        const Epoch e = s.lanes.epoch();
        return std::pair(e.incarnation, e.edits);
      })
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
        s.must_be_writable();
                     if (b.size() != 16) throw nb::value_error("a boot id has 16 bytes");
                     std::memcpy(s.header()->boot_id, b.c_str(), 16);
                   })
      .def_prop_rw("replaced", [](const Store& s) { return s.header()->replaced.load(); },
                   [](const Store& s, uint64_t n) { s.must_be_writable(); s.header()->replaced.store(n); })
      .def_prop_rw("clean", [](const Store& s) { return s.header()->clean != 0; },
                   [](Store& s, bool clean) { s.must_be_writable(); s.header()->clean = clean; })
      .def("lane", &lane_state, "lane"_a)
      .def("check_file", &Store::check_file)
      .def("rows", [](const Store& s) { s.check_file(); return s.lanes.rows() * s.shape().strands; })
      .def("cursor", [](const Store& s, uint64_t l) {
        check_lane(s, l);
        return s.lanes.lane(l).published.load() % s.shape().lane_capacity;
      }, "lane"_a)
      .def("steps_written", [](const Store& s) { s.check_file(); return s.lanes.write_count(); })
      .def("claim", [](const Store& s, uint64_t l, uint64_t n) { s.must_be_writable(); check_lane(s, l); return s.lanes.claim(l, n); },
           "lane"_a, "n"_a)
      .def("publish", [](const Store& s, uint64_t l, uint64_t at, uint64_t n) {
        s.must_be_writable();
        check_lane(s, l);
        s.lanes.publish(l, at, n);
      }, "lane"_a, "at"_a, "n"_a)
      .def("advance", [](const Store& s, uint64_t l, uint64_t n, bool begins) {
        s.must_be_writable();
        check_lane(s, l);
        if (s.shape().payload_bytes != 0) throw nb::value_error("this store has its rows itself: append to it");
        return s.advance(l, n, begins);
      }, "lane"_a, "n"_a, "begins"_a = false)
      .def("mark_seam", [](const Store& s, uint64_t l) { check_lane(s, l); s.mark_seam(l); }, "lane"_a)
      .def("next_is_seam", [](const Store& s, uint64_t l) { check_lane(s, l); return s.next_is_seam(l); }, "lane"_a)
      .def("seams", [](const Store& s, uint64_t l) { check_lane(s, l); s.check_file(); return s.seams(l); }, "lane"_a)
      .def("is_seam", [](const Store& s, uint64_t l, uint64_t number) { check_lane(s, l); s.check_file(); return s.seam(l, number); },
           "lane"_a, "number"_a)
      .def("add_seam", [](const Store& s, uint64_t l, uint64_t number) {
        s.must_be_writable();
        check_lane(s, l);
        if (s.shape().payload_bytes != 0) throw nb::value_error("the seams of stored rows are written with them");
        s.add_seam(l, number);
      }, "lane"_a, "number"_a)
      .def("set_seams", [](const Store& s, uint64_t l, uint64_t base, uint64_t published,
                           nb::typed<nb::list, uint64_t> at) {
        s.must_be_writable();
        check_lane(s, l);
        if (base > published) throw nb::value_error("base lies above published");
        if (published - base > s.shape().lane_capacity) throw nb::value_error("more rows than the lane has room for");
        set_seams(s, l, base, published, at);
      }, "lane"_a, "base"_a, "published"_a, "at"_a)
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
      .def("mend", [](Store& s) { s.must_be_writable(); s.lanes.mend(); return left_as(s); })
      .def("mark_durable", [](const Store& s, const std::vector<uint64_t>& published) {
        s.must_be_writable();
        if (published.size() != s.shape().lanes) throw nb::value_error("one number for each lane");
        s.check_file();
        for (uint64_t l = 0; l < s.shape().lanes; ++l) s.lanes.lane(l).durable.store(published[l]);
      }, "published"_a)
      .def("sync_header", [](const Store& s) {
        s.must_be_writable();
        nb::gil_scoped_release unlocked;
        if (!s.synced(0, s.shape().rows_offset)) throw SyncFailed("the header");
      })
      .def_prop_ro("sync_failures", &Store::sync_failures)
      .def("count_sync_failure", &Store::count_sync_failure)
      .def("dirty_again", [](Store& s, const std::vector<uint64_t>& published) {
        s.must_be_writable();
        if (published.size() != s.shape().lanes) throw nb::value_error("one number for each lane");
        nb::gil_scoped_release unlocked;
        DirtyAgain(s).run(published);
      }, "published"_a)
      .def("empty", [](const Store& s, bool reset_count) {
        s.must_be_writable();
        if (s.saving()) s.saving()->settle();
        s.forget_seams();
        s.lanes.empty(reset_count);
      }, "reset_count"_a)
      .def("begin_restore", [](const Store& s) {
        s.must_be_writable();
        if (s.saving()) s.saving()->settle();
        s.lanes.begin_change();
        s.forget_seams();
        for (uint64_t l = 0; l < s.shape().lanes; ++l) {
          s.lanes.set_counters(l, 0, 0, 0);
          s.lanes.lane(l).term.fetch_add(1);  // so that no row from before is taken for one of the new
        }
      })
      .def("restore_lane", [](const Store& s, uint64_t l, uint64_t base, uint64_t published, uint64_t origin) {
        s.must_be_writable();
        check_lane(s, l);
        if (base > published) throw nb::value_error("base lies above published");
        s.lanes.set_counters(l, base, published, origin);
      }, "lane"_a, "base"_a, "published"_a, "origin"_a)
      .def("end_restore", [](const Store& s) { s.must_be_writable(); s.lanes.end_change(); })
      .def("put", &put_rows, "lane"_a, "start"_a, "rows"_a.noconvert())
      .def("whole", [](const Store& s, uint64_t physical) {
        if (!s.has_trailer() || physical >= s.slots()) throw nb::index_error("no such row with a trailer");
        s.check_file();
        return s.whole(physical);
      }, "physical"_a)
      .def_prop_ro("interrupted", [](Store& s) { s.check_file(); return InPlaceWriter(s).interrupted(); })
      .def_prop_ro("fd", [](const Store& s) { return s.fd(); })
      .def("finish_interrupted", [](Store& s) { s.must_be_writable(); return InPlaceWriter(s).finish_interrupted(); })
      .def("recover", [](Store& s) {
        s.must_be_writable();
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
      .def("memory", [](const Store& s) {
        s.check_file();
        const size_t shape[1] = {s.shape().total_bytes};
        auto* owner = new std::shared_ptr<Region>(s.region());
        nb::capsule keep(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<Region>*>(p); });
        if (s.read_only()) return nb::cast(nb::ndarray<nb::numpy, const uint8_t>(s.at(0), 1, shape, keep));
        return nb::cast(nb::ndarray<nb::numpy, uint8_t>(s.at(0), 1, shape, keep));
      }, nb::sig("def memory(self) -> numpy.typing.NDArray[numpy.uint8]"))
      .def_prop_ro("asking_pages", [](Store& s) { return s.pages().on(); })
      .def("advise_random", [](const Store& s) { ::madvise(s.at(0), s.shape().total_bytes, MADV_RANDOM); })
      .def("next_slot", [](const Store& s, uint64_t l) {
        check_lane(s, l);
        return l * s.shape().lane_capacity + s.lanes.lane(l).published.load() % s.shape().lane_capacity;
      }, "lane"_a)
      .def("next_slots", &next_slots, "lane"_a, "n"_a)
      .def("append", &append, "lane"_a, "plan"_a, "most"_a.none() = nb::none())
      .def("gather", &gather, "codec"_a, "slots"_a, "shape"_a.none() = nb::none(), "extra"_a.none() = nb::none(),
           "mapped"_a = false, "numbers"_a = false)
      .def("gather_into", &gather_into, "codec"_a, "slots"_a, "arrays"_a, "mapped"_a = false, "numbers"_a = false)
      .def("begin_save", [](Store& s, bool beside_writers) {
        if (s.shape().payload_bytes == 0) throw nb::value_error("this store's rows are kept elsewhere");
        return SharedPass{beside_writers ? s.begin_save() : s.watch_save()};
      }, "beside_writers"_a = true)
      .def("end_save", &Store::end_save)
      .def_prop_ro("saving", [](const Store& s) { return s.saving() != nullptr; })
      .def("overwrite", &overwrite, "slots"_a, "plan"_a, "rows"_a.none() = nb::none())
      .def("prepare_overwrite", [](Store& s, nb::handle slots, const Plan& plan, nb::handle rows,
                                   std::optional<uint64_t> first) {
        return std::make_unique<Replacement>(s, slots, plan, rows, first);
      }, "slots"_a, "plan"_a, "rows"_a.none() = nb::none(), "first"_a.none() = nb::none(), nb::keep_alive<0, 1>(), nb::keep_alive<0, 3>())
      .def("note_edits", &note_edits, "slots"_a)
      .def("generations", &generations, "slots"_a)
      .def("reserve_sequences", &reserve_sequences, "n"_a)
      .def("count_replaced", [](const Store& s, nb::handle slots_in) {  // as written; -1: not
        s.must_be_writable();
        const SlotsArg slots(nb::borrow(slots_in));
        const auto n = std::count_if(slots.data, slots.data + slots.n, [](int64_t slot) { return slot >= 0; });
        s.lanes.lane(0).origin.fetch_sub(static_cast<uint64_t>(n), std::memory_order_relaxed);
      }, "slots"_a)
      .def("widened", &widened, "payload_bytes"_a, "alignment"_a, "layout"_a, "moves"_a)
      .def("uniform", &uniform, "seed"_a, "n"_a);
  bind_episodes(m);
  bind_priorities(m);

  m.attr("FIRST_REPLACED") = kFirstReplaced;
  bind_heap(m);
  bind_cells(m);
  bind_owner_watch(m);
}
