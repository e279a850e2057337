// Where trajectories start and end: an index that takes in new rows only.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "follow.hpp"

namespace engram {

// Numbers in rising order, added at the end and dropped at the front.
class Queue {
 public:
  uint64_t size() const { return items_.size() - head_; }
  bool empty() const { return size() == 0; }
  uint64_t operator[](uint64_t i) const { return items_[head_ + i]; }
  uint64_t back() const { return items_.back(); }
  uint64_t dropped() const { return dropped_; }  // how many ever left at the front
  void push(uint64_t x) { items_.push_back(x); }
  void pop_back() { items_.pop_back(); }
  void drop(uint64_t n) {
    head_ += n, dropped_ += n;
    if (head_ < 64 || 2 * head_ < items_.size()) return;
    items_.erase(items_.begin(), items_.begin() + static_cast<ptrdiff_t>(head_));
    head_ = 0;
  }
  void clear() { drop(size()); }
  // How many are at most x.
  uint64_t up_to(uint64_t x) const {
    const auto first = items_.begin() + static_cast<ptrdiff_t>(head_);
    return static_cast<uint64_t>(std::upper_bound(first, items_.end(), x) - first);
  }
  bool holds(uint64_t x) const {
    const uint64_t n = up_to(x);
    return n > 0 && (*this)[n - 1] == x;
  }
  void insert(uint64_t x) { items_.insert(at(up_to(x)), x); }
  void erase(uint64_t x) { items_.erase(at(up_to(x) - 1)); }

 private:
  std::vector<uint64_t>::iterator at(uint64_t i) { return items_.begin() + static_cast<ptrdiff_t>(head_ + i); }
  std::vector<uint64_t> items_;
  size_t head_ = 0;
  uint64_t dropped_ = 0;
};

// The flags or ids of consecutive rows.
struct SignalRun {
  const uint8_t* at;
  ptrdiff_t stride;
};

// Flags or ids read from packed rows.
class PackedSignals {
 public:
  PackedSignals(const Store& store, uint64_t offset) : store_(store), offset_(offset) {}
  void expect(uint64_t, uint64_t, uint64_t) {}
  // Rows of one strand from a write number on; they do not wrap.
  SignalRun run(uint64_t lane, uint64_t strand, uint64_t from, uint64_t n) const {
    const Shape& s = store_.shape();
    const uint64_t physical = store_.physical(lane, strand, from % s.lane_capacity);
    // A mapped file is advised that reads are random; a scan asks for what it reads, and for as much after it.
    if (store_.fd() >= 0 && n * s.row_stride >= kAskBytes) {
      const uint64_t start = s.rows_offset + physical * s.row_stride;
      PageAsker(store_.fd()).ask(start, std::min(2 * n * s.row_stride, s.total_bytes - start));
    }
    return {store_.row(physical) + offset_, static_cast<ptrdiff_t>(s.row_stride)};
  }

 private:
  static constexpr uint64_t kAskBytes = 256 << 10;
  const Store& store_;
  uint64_t offset_;
};

struct Trajectory {
  uint64_t lane = 0, strand = 0, start = 0, stop = 0;  // write numbers [start, stop)
  uint64_t length() const { return stop - start; }
};

// The trajectories of a store, strand by strand, oldest first: a function of the stored rows alone, however the index
// came to know them. They follow each other without gaps, so that their starts say all.
//
// A true flag ends a trajectory after its row; a change of id begins one. So do a seam, and the oldest row that is left.
class EpisodeIndex {
 public:
  static constexpr uint64_t kBlock = 1 << 14;  // rows that a scan takes at a time
  static constexpr uint64_t kAhead = 16;       // strands whose first row is brought in ahead

  // `bytes` of a flag or id: 1, 2, 4 or 8.
  EpisodeIndex(bool by_id, uint64_t bytes) : by_id_(by_id), bytes_(bytes) {}

  struct Strand {
    Queue starts;
    uint64_t last = 0;  // the newest row's flag or id
    uint64_t edits = 0;
  };

  // Takes in what is new. Signals have `expect(lane, from, to)`, called before rows of it are read, and `run`.
  template <typename Signals>
  void look(const Store& store, Signals& signals) {
    follower_.look(store, Visitor<Signals>{*this, store, signals});
    // What was read of rows that were overwritten meanwhile says nothing: they go, and their boundaries with them.
    Lanes::Protocol::after_reading();
    for (uint64_t l = 0; l < lanes_.size(); ++l) forget(l, store.lanes.first_now(l));
  }
  bool follows(const Store& store) const { return follower_.follows(store); }
  void forget_all() { follower_.forget(); }
  // Rows that the next look will take in, about.
  uint64_t news(const Store& store) const {
    if (!follows(store)) return store.lanes.rows() * store.shape().strands;
    uint64_t n = 0;
    for (uint64_t l = 0; l < lanes_.size(); ++l) n += store.lanes.view(l).published - lanes_[l].published;
    return n * store.shape().strands;
  }

  // Whether writers went through a whole ring of rows while the last look was under way: nothing of it is left.
  bool overtaken(const Store& store) const {
    for (uint64_t l = 0; l < lanes_.size(); ++l)
      if (lanes_[l].first >= lanes_[l].published && store.lanes.view(l).published > lanes_[l].published) return true;
    return false;
  }

  uint64_t strands() const { return strands_.size(); }  // of all lanes, lane by lane
  uint64_t version() const { return version_; }         // another one after each change
  uint64_t restarts() const { return restarts_; }       // another one after each restart
  uint64_t edits() const { return edits_; }  // raised where a boundary in the middle came or went
  uint64_t lane_version(uint64_t lane) const { return lanes_[lane].version; }
  uint64_t per_lane() const { return per_lane_; }
  const Strand& strand(uint64_t k) const { return strands_[k]; }
  uint64_t count(uint64_t k) const { return strands_[k].starts.size(); }
  // The i-th oldest trajectory of a strand.
  Trajectory trajectory(uint64_t k, uint64_t i) const {
    const uint64_t lane = per_lane_ == 1 ? k : k / per_lane_;
    const Queue& starts = strands_[k].starts;
    return {lane, k - lane * per_lane_, std::max(starts[i], lanes_[lane].first),
            i + 1 < starts.size() ? starts[i + 1] : lanes_[lane].published};
  }
  // The trajectory of a row; false: the row is not there.
  bool find(uint64_t k, uint64_t number, Trajectory& found) const {
    const uint64_t lane = k / per_lane_;
    if (number < lanes_[lane].first || number >= lanes_[lane].published) return false;
    found = trajectory(k, strands_[k].starts.up_to(number) - 1);
    return true;
  }
  // The rows of a lane that are taken in.
  LaneView known(uint64_t lane) const { return {lanes_[lane].published, lanes_[lane].published, lanes_[lane].first}; }
  uint64_t longest() const {
    uint64_t longest = 0;
    for (uint64_t k = 0; k < strands(); ++k)
      for (uint64_t i = 0; i < count(k); ++i) longest = std::max(longest, trajectory(k, i).length());
    return longest;
  }

 private:
  struct Lane {
    uint64_t first = 0, published = 0, version = 0;  // rows [first, published) are taken in
  };

  template <typename Signals>
  struct Visitor {
    EpisodeIndex& index;
    const Store& store;
    Signals& signals;
    void restart(const Store&) { index.restart(store.shape()); }
    void vanished(uint64_t lane, uint64_t, uint64_t to) { index.forget(lane, to); }
    void rows(uint64_t lane, uint64_t from, uint64_t to) { index.scan(store, signals, lane, from, to); }
    void edited(uint64_t slot) { index.edited(store, signals, slot); }
  };

  void restart(const Shape& s) {
    per_lane_ = s.strands;
    lanes_.assign(s.lanes, {});
    strands_.assign(s.lanes * s.strands, {});
    for (Lane& lane : lanes_) changed(lane);
    restarts_ = version_;
  }

  // No two states of any index of the process have one number, whatever they are of.
  void changed(Lane& lane) {
    static std::atomic<uint64_t> last{0};
    lane.version = version_ = ++last;
  }

  // Rows below `first` are gone.
  void forget(uint64_t l, uint64_t first) {
    Lane& lane = lanes_[l];
    if (first <= lane.first) return;
    lane.first = first, changed(lane);
    for (uint64_t k = l * per_lane_; k < (l + 1) * per_lane_; ++k) {
      Queue& starts = strands_[k].starts;
      if (first >= lane.published) {
        starts.clear();
        continue;
      }
      uint64_t gone = 0;
      while (gone + 1 < starts.size() && starts[gone + 1] <= first) ++gone;
      starts.drop(gone);
    }
  }

  template <typename Signals>
  void scan(const Store& store, Signals& signals, uint64_t l, uint64_t from, uint64_t to) {
    const Shape& s = store.shape();
    Lane& lane = lanes_[l];
    forget(l, std::max(from > lane.published ? from : 0, to > s.lane_capacity ? to - s.lane_capacity : 0));
    if (lane.first >= lane.published) lane.first = std::max(lane.first, from);
    std::vector<uint64_t> cuts = store.seams_of(l, from, to);
    cuts.push_back(to);
    signals.expect(l, from, to);
    for (uint64_t j = 0; j < per_lane_; ++j) {
      Strand& strand = strands_[l * per_lane_ + j];
      // Few rows of each of many strands, far from each other.
      if (j + kAhead < per_lane_) __builtin_prefetch(signals.run(l, j + kAhead, from, 1).at);
      bool cut = strand.starts.empty();
      uint64_t at = from;
      for (uint64_t next : cuts) {
        if (next < at) continue;
        if (next > at) scan_piece(s, signals, l, j, strand, at, next, cut);
        at = next, cut = true;
      }
    }
    lane.published = to, changed(lane);
  }

  template <typename Signals>
  void scan_piece(const Shape& s, Signals& signals, uint64_t l, uint64_t j, Strand& strand, uint64_t from, uint64_t to,
                  bool cut) {
    while (from < to) {
      const uint64_t n = std::min({to - from, s.lane_capacity - from % s.lane_capacity, kBlock});
      const SignalRun run = signals.run(l, j, from, n);
      by_id_ ? scan_run<true>(strand, run, from, n, cut) : scan_run<false>(strand, run, from, n, cut);
      from += n, cut = false;
    }
  }
  template <bool kIds>
  void scan_run(Strand& strand, SignalRun run, uint64_t from, uint64_t n, bool cut) const {
    switch (bytes_) {
      case 1: return scan_typed<uint8_t, kIds>(strand, run, from, n, cut);
      case 2: return scan_typed<uint16_t, kIds>(strand, run, from, n, cut);
      case 4: return scan_typed<uint32_t, kIds>(strand, run, from, n, cut);
      default: return scan_typed<uint64_t, kIds>(strand, run, from, n, cut);
    }
  }
  template <typename T, bool kIds>
  static void scan_typed(Strand& strand, SignalRun run, uint64_t from, uint64_t n, bool cut) {
    uint64_t last = strand.last;
    for (uint64_t i = 0; i < n; ++i, run.at += run.stride) {
      T now;
      std::memcpy(&now, run.at, sizeof now);
      if (cut || (kIds ? now != last : last != 0)) strand.starts.push(from + i);
      cut = false, last = now;
    }
    strand.last = last;
  }

  // ---- rows that changed in place ----
  template <typename Signals>
  void edited(const Store& store, Signals& signals, uint64_t slot) {
    const Shape& s = store.shape();
    const uint64_t time = slot / s.strands, l = time / s.lane_capacity, j = slot % s.strands;
    const Lane& lane = lanes_[l];
    uint64_t number = 0;
    if (!SlotNumbers(known(l), s.lane_capacity).find(time % s.lane_capacity, number)) return;
    const uint64_t from = number > lane.first ? number - 1 : number, to = std::min(number + 2, lane.published);
    signals.expect(l, from, to);
    Strand& strand = strands_[l * per_lane_ + j];
    for (uint64_t w = std::max(number, lane.first + 1); w < to; ++w)
      correct(l, strand, w, starts_at(store, signals, l, j, w));
    if (number + 1 == lane.published) strand.last = value(signals, l, j, number);
  }
  template <typename Signals>
  bool starts_at(const Store& store, Signals& signals, uint64_t l, uint64_t j, uint64_t w) const {
    if (store.seam(l, w)) return true;
    const uint64_t before = value(signals, l, j, w - 1);
    return by_id_ ? value(signals, l, j, w) != before : before != 0;
  }
  template <typename Signals>
  uint64_t value(Signals& signals, uint64_t l, uint64_t j, uint64_t w) const {
    uint64_t v = 0;  // a little-endian machine's first bytes
    std::memcpy(&v, signals.run(l, j, w, 1).at, bytes_);
    return v;
  }
  void correct(uint64_t l, Strand& strand, uint64_t w, bool starts) {
    if (strand.starts.holds(w) == starts) return;
    starts ? strand.starts.insert(w) : strand.starts.erase(w);
    ++strand.edits, ++edits_, changed(lanes_[l]);
  }

  bool by_id_;
  uint64_t bytes_;
  Follower follower_;
  uint64_t per_lane_ = 1, version_ = 0, restarts_ = 0, edits_ = 0;
  std::vector<Lane> lanes_;
  std::vector<Strand> strands_;
};

}  // namespace engram
