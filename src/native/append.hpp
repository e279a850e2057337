// What every append does: the turn, stints, and the rule of the border.
#pragma once
#include <nanobind/nanobind.h>

#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "bind_store.hpp"
#include "stints.hpp"

namespace engram {

// Whether to release the GIL while rows of so many bytes are written. Rows that grow may move then: other threads wait.
inline bool writes_long(Store& store, size_t bytes) {
  return (bytes > kGilBytes && !store.grows()) || store.readahead().on();
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

// Calls `append(pause)`, which appends in stints; other threads run while this process waits for a lane, and signals are handled.
inline auto append_moving_on(bool without_gil, auto&& append) {
  const auto sleep = [](double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); };
  const auto handle_signals = [] {
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
  if (without_gil) {
    nb::gil_scoped_release unlocked;
    return append([&](double seconds) {
      sleep(seconds);
      nb::gil_scoped_acquire locked;
      handle_signals();
    });
  }
  return append([&](double seconds) {
    {
      nb::gil_scoped_release unlocked;
      sleep(seconds);
    }
    handle_signals();
  });
}

// Called before rows are written: the rule of the border reads leaves of the layout for which it was made.
inline void check_border(const Store& store, const Plan& plan) {
  if (plan.codec != store.border().codec && !BorderCheck(store).fits(plan.looked_at.empty() ? plan.leaves : plan.looked_at))
    throw nb::value_error("the layout is not that of the rows of this store");
}

}  // namespace engram
