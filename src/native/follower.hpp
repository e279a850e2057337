// Followers: samplers poll a store for rows written since their last poll. Writers send no notifications.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "store.hpp"

namespace engram {

// The slot of a row as samplers use it: (lane * lane_capacity + sequence mod lane_capacity) * envs + env.
inline uint64_t slot_of(const StoreGeometry& s, uint64_t lane, uint64_t sequence, uint64_t env = 0) {
  return (lane * s.lane_capacity + sequence % s.lane_capacity) * s.envs + env;
}

// A follower's position in a store. One thread polls at a time.
//
// A visitor has
//   restart(store)             forget everything: another store, sequences were reset, or the log is too short;
//   vanished(lane, from, to)   rows with these sequences are gone or being overwritten, and their slots hold no new
//                              rows yet; the visitor may never have seen them;
//   rows(lane, from, to)       these rows are new; `from` is the last call's `to`, unless rows in between are gone again;
//   edited(slot)               a row changed in place; it may be gone since.
class Follower {
 public:
  template <typename Visitor>
  void poll(const Store& store, Visitor&& visitor) {
    const StoreHeader& h = *store.header();
    const StoreGeometry& s = store.geometry();
    const uint64_t incarnation = h.incarnation.load(std::memory_order_acquire);
    // Read before the counters: an edit after this point is seen by the next poll, when its row has been visited.
    const uint64_t log_head = h.log_head.load(std::memory_order_acquire);
    if (!follows(store, incarnation) || log_head < log_ || log_head - log_ > kLogEntries) {
      std::vector<Seen> none(s.lanes);
      visitor.restart(store);  // if memory runs out here, the next poll restarts again
      seen_.swap(none);
      std::memcpy(id_, s.store_id, sizeof id_);
      incarnation_ = incarnation, log_ = log_head, started_ = true;
    }
    for (uint64_t l = 0; l < s.lanes; ++l) {
      const LaneView view = store.lanes.view(l);
      Seen& seen = seen_[l];
      const uint64_t replaced = view.published > s.lane_capacity ? view.published - s.lane_capacity : 0;
      const uint64_t gone = std::max(seen.first, replaced);
      if (gone < view.first) visitor.vanished(l, gone, view.first);
      const uint64_t from = std::max(seen.published, view.first);
      if (from < view.published) visitor.rows(l, from, view.published);
      seen = {std::max(seen.first, view.first), std::max(seen.published, view.published)};
    }
    const auto* entries = reinterpret_cast<const Counter*>(store.at(s.log_offset));
    const uint64_t from = log_;
    for (; log_ < log_head; ++log_) {
      const uint64_t slot = entries[log_ % kLogEntries].load(std::memory_order_relaxed);
      if (slot < store.slots()) visitor.edited(slot);
    }
    // An observer reads while another process changes rows: log entries may have been overwritten while they were read. They
    // are stored before the head, at most kLogBatch at a time.
    Lanes::Protocol::after_reading();
    if (h.log_head.load(std::memory_order_relaxed) - from > kLogEntries - kLogBatch) started_ = false;
  }

  bool follows(const Store& store) const {
    return follows(store, store.header()->incarnation.load(std::memory_order_acquire));
  }
  // Makes the next poll restart.
  void forget() { started_ = false; }

  // ---- state, for checkpoints ----
  struct Seen {
    uint64_t first = 0, published = 0;
  };
  const std::vector<Seen>& seen() const { return seen_; }
  uint64_t log() const { return log_; }
  uint64_t incarnation() const { return incarnation_; }
  // Continues as a follower that has seen these rows of this store, and its log up to now.
  void resume(const Store& store, std::vector<Seen> seen) {
    seen_ = std::move(seen);
    std::memcpy(id_, store.geometry().store_id, sizeof id_);
    incarnation_ = store.header()->incarnation.load(std::memory_order_acquire);
    log_ = store.header()->log_head.load(std::memory_order_acquire);
    started_ = seen_.size() == store.geometry().lanes;
  }

 private:
  bool follows(const Store& store, uint64_t incarnation) const {
    return started_ && incarnation == incarnation_ && seen_.size() == store.geometry().lanes &&
           std::memcmp(id_, store.geometry().store_id, sizeof id_) == 0;
  }

  std::vector<Seen> seen_;
  uint64_t incarnation_ = 0, log_ = 0;
  uint8_t id_[16] = {};
  bool started_ = false;
};

}  // namespace engram
