// A store as a queue, for Python.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bind_store.hpp"
#include "bindings.hpp"
#include "queue.hpp"

namespace engram {

// Of one store, whose users it concerns; where the store has no such counters, it says so.
class StoreQueue {
 public:
  explicit StoreQueue(Store& store) : store_(store) {
    if (!store.lanes.has_flow()) throw nb::value_error("this store was made by an engram whose stores were no queues");
  }
  Store& looked() const {
    store_.check_file();
    return store_;
  }
  Store& written() const {
    store_.must_be_writable();
    return looked();
  }
  Queue queue() const { return Queue(looked().lanes); }
  Queue changed() const { return Queue(written().lanes); }
  Flow& flow() const { return looked().lanes.flow(); }
  bool has(uint64_t bit) const { return looked().lanes.flow_mode() & bit; }
  std::vector<uint64_t> cursors(bool kept) const {
    std::vector<uint64_t> all;
    for (uint64_t l = 0; l < looked().lanes.count(); ++l) {
      const auto lane = store_.lanes.queue(l);
      all.push_back(StdMemory::load(kept ? lane.kept : lane.consumed));
    }
    return all;
  }
  void check(const std::vector<uint64_t>& cursors) const {
    if (cursors.size() != looked().lanes.count()) throw nb::value_error("a queue has a cursor for each lane");
  }

 private:
  Store& store_;
};

static Tensor int64s(const std::vector<int64_t>& values) {
  return slots_out(values.size(), [&](int64_t* out) { std::copy(values.begin(), values.end(), out); });
}

void bind_queue(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<StoreQueue>(m, "StoreQueue")
      .def(nb::init<Store&>(), "store"_a, nb::keep_alive<1, 2>())
      // ---- settings ----
      .def_prop_ro("is_one", [](const StoreQueue& q) { return q.has(FlowMode::kQueue); })
      .def_prop_ro("overwrites", [](const StoreQueue& q) { return q.has(FlowMode::kOverwrites); })
      .def_prop_ro("commits", [](const StoreQueue& q) { return q.has(FlowMode::kCommits); })
      .def("begin", [](const StoreQueue& q, bool overwrites, bool commits) {
        if (q.written().lanes.is_limited()) throw nb::value_error("the store keeps a rate limiter");
        q.changed().begin(overwrites, commits);
      }, "overwrites"_a, "commits"_a)
      .def("end", [](const StoreQueue& q) { if (q.has(FlowMode::kQueue)) q.changed().end(); })
      // ---- writers ----
      .def_prop_ro("room", [](const StoreQueue& q) { return keeps_rows(q.looked().lanes) ? q.queue().room() : ~uint64_t{0} >> 1; })
      .def_prop_ro("total_room", [](const StoreQueue& q) { return q.queue().total_room(); })
      .def("check_room", [](const StoreQueue& q, uint64_t l, uint64_t n) {
        check_lane(q.looked(), l);
        if (q.has(FlowMode::kQueue) && !has_queue_room(q.looked().lanes, l, n, false)) raise_queue_full(0, n, nb::none());
      }, "lane"_a, "n"_a)
      .def("note_writer_waits", [](const StoreQueue& q) { q.changed().note_writer_waits(); })
      .def("note_reader_waits", [](const StoreQueue& q) { q.changed().note_reader_waits(); })
      .def_prop_ro("some_reader_waits", [](const StoreQueue& q) { return q.queue().some_reader_waits(); })
      .def_prop_ro("some_writer_waits", [](const StoreQueue& q) { return q.queue().some_writer_waits(); })
      // ---- consumers ----
      .def_prop_ro("waiting", [](const StoreQueue& q) { return q.queue().waiting(); })
      .def_prop_ro("lags", [](const StoreQueue& q) { return q.queue().lags(); })
      .def_prop_ro("just_missed", [](const StoreQueue& q) { return q.queue().missed(); })
      .def_prop_ro("missed", [](const StoreQueue& q) { return q.flow().missed.load(); })
      .def_prop_ro("stale", [](const StoreQueue& q) { return q.flow().stale.load(); })
      .def_prop_rw("consumer_version", [](const StoreQueue& q) { return q.flow().consumer_version.load(); },
                   [](const StoreQueue& q, uint64_t version) { q.written().lanes.flow().consumer_version.store(version); })
      // 0: this process has the turn; else who has it, or has died with it.
      .def("begin_turn", [](const StoreQueue& q, uint64_t dead) { return q.written().begin_taking(dead); }, "dead"_a = 0)
      .def("end_turn", [](const StoreQueue& q) { q.looked().end_taking(); })
      // How many rows, their slots and, where they are asked for, sequences; of each lane the row behind them, and how many were
      // overwritten before them.
      .def("choose", [](const StoreQueue& q, uint64_t n, bool sequences, const std::vector<uint64_t>& from) {
        const Queue::Chosen chosen = q.queue().choose(n, from);
        return nb::make_tuple(chosen.slots.size(), int64s(chosen.slots),
                              sequences ? nb::object(nb::cast(int64s(chosen.sequences))) : nb::none(), chosen.next, chosen.missed);
      }, "n"_a, "sequences"_a = false, "from_"_a = std::vector<uint64_t>{},
         nb::sig("def choose(self, n: int, sequences: bool = False, from_: collections.abc.Sequence[int] = []) -> "
                 "tuple[int, torch.Tensor, torch.Tensor | None, list[int], list[int]]"))
      .def("hand_out", [](const StoreQueue& q, const std::vector<uint64_t>& next, uint64_t missed, uint64_t stale, bool passes) {
        q.check(next);
        const Queue queue = q.changed();
        queue.hand_out(next, passes);
        queue.count(missed, stale);
      }, "next"_a, "missed"_a = 0, "stale"_a = 0, "passes"_a = false)
      .def("let_go", [](const StoreQueue& q, const std::vector<uint64_t>& to) {
        q.check(to);
        q.changed().let_go(to);
      }, "to"_a)
      // How many of these rows are gone; None: a lane has fewer.
      .def("seek", [](const StoreQueue& q, const std::vector<uint64_t>& to, uint64_t owner) {
        q.check(to);
        return q.changed().seek(to, owner);
      }, "to"_a, "owner"_a)
      .def_prop_ro("session", [](const StoreQueue& q) { return q.flow().session.load(); })
      .def_prop_ro("session_owner", [](const StoreQueue& q) { return q.flow().session_owner.load(); })
      .def_prop_ro("era", [](const StoreQueue& q) { return q.flow().era.load(); })
      .def_prop_ro("kept_rows", [](const StoreQueue& q) { return q.queue().kept_rows(); })
      .def_prop_ro("removed_next", [](const StoreQueue& q) { return q.queue().removed_next(); })
      .def("pass_removed", [](const StoreQueue& q) { q.changed().pass_removed(); })
      .def_prop_ro("consumed", [](const StoreQueue& q) { return q.cursors(false); })
      .def_prop_ro("kept", [](const StoreQueue& q) { return q.cursors(true); })
      // ---- of saves ----
      .def("restore", [](const StoreQueue& q, uint64_t l, uint64_t consumed, uint64_t kept) {
        check_lane(q.looked(), l);
        q.changed().restore(l, consumed, kept);
      }, "lane"_a, "consumed"_a, "kept"_a)
      .def("restore_counts", [](const StoreQueue& q, uint64_t missed, uint64_t stale) {
        Flow& flow = q.written().lanes.flow();
        flow.missed.store(missed), flow.stale.store(stale);
      }, "missed"_a, "stale"_a);
}

}  // namespace engram
