// An index of where trajectories start and end, which reads new rows only; and slices of trajectories.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "draw.hpp"
#include "follower.hpp"

namespace engram {

// Ascending numbers, added at the end and dropped at the front.
class SortedDeque {
 public:
  uint64_t size() const { return items_.size() - head_; }
  bool empty() const { return size() == 0; }
  uint64_t operator[](uint64_t i) const { return items_[head_ + i]; }
  void prefetch(uint64_t i) const {
    __builtin_prefetch(items_.data() + head_ + i);
    asm volatile("");  // GCC drops calls that only prefetch
  }
  uint64_t back() const { return items_.back(); }
  uint64_t dropped() const { return dropped_; }  // total number of dropped elements
  void push(uint64_t x) { items_.push_back(x); }
  void pop_back() { items_.pop_back(); }
  void drop(uint64_t n) {
    head_ += n, dropped_ += n;
    if (head_ < 64 || 2 * head_ < items_.size()) return;
    items_.erase(items_.begin(), items_.begin() + static_cast<ptrdiff_t>(head_));
    head_ = 0;
  }
  void clear() { drop(size()); }
  // The number of elements that are at most x.
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
  // Rows of one environment from a sequence on; they do not wrap around the ring.
  SignalRun run(uint64_t lane, uint64_t env, uint64_t from, uint64_t n) const {
    const StoreGeometry& s = store_.geometry();
    const uint64_t physical = store_.physical(lane, env, from % s.lane_capacity);
    // A mapped file is advised as randomly read, so a scan requests its own pages, and as many after them.
    if (store_.fd() >= 0 && n * s.row_stride >= kAskBytes) {
      const uint64_t start = s.rows_offset + physical * s.row_stride;
      Readahead(store_.fd()).ask(start, std::min(2 * n * s.row_stride, s.total_bytes - start));
    }
    return {store_.row(physical) + offset_, static_cast<ptrdiff_t>(s.row_stride)};
  }

 private:
  static constexpr uint64_t kAskBytes = 256 << 10;
  const Store& store_;
  uint64_t offset_;
};

struct Trajectory {
  uint64_t lane = 0, env = 0, start = 0, stop = 0;  // sequences [start, stop)
  uint64_t length() const { return stop - start; }
};

// The trajectories of a store, environment by environment, oldest first: a function of the stored rows alone, however the
// index was built. They follow each other without gaps, so that their starts are enough.
//
// A true flag ends a trajectory after its row. A change of id, a seam, and the oldest stored row begin one.
class EpisodeIndex {
 public:
  static constexpr uint64_t kBlock = 1 << 14;  // rows that a scan takes at a time
  static constexpr uint64_t kAhead = 16;       // environments whose first row is prefetched

  // `bytes` of a flag or id: 1, 2, 4 or 8.
  EpisodeIndex(bool by_id, uint64_t bytes) : by_id_(by_id), bytes_(bytes) {}

  struct Env {
    SortedDeque starts;
    uint64_t last = 0;  // the newest row's flag or id
    uint64_t edits = 0;
  };

  // Takes in new rows. Signals have `expect(lane, from, to)`, called before rows of a lane are read, and `run`.
  template <typename Signals>
  void poll(const Store& store, Signals& signals) {
    follower_.poll(store, Visitor<Signals>{*this, store, signals});
    // Data read from rows that were overwritten meanwhile is invalid: these rows are dropped with their boundaries.
    Lanes::Protocol::after_reading();
    for (uint64_t l = 0; l < lanes_.size(); ++l) forget(l, store.lanes.first_now(l));
  }
  bool follows(const Store& store) const { return follower_.follows(store); }
  void forget_all() { follower_.forget(); }
  // The approximate number of rows that the next poll will take in.
  uint64_t news(const Store& store) const {
    if (!follows(store)) return store.lanes.rows() * store.geometry().envs;
    uint64_t n = 0;
    for (uint64_t l = 0; l < lanes_.size(); ++l) n += store.lanes.view(l).published - lanes_[l].published;
    return n * store.geometry().envs;
  }

  // Whether writers replaced a whole ring of rows during the last poll, so that none of the rows read is left.
  bool overtaken(const Store& store) const {
    for (uint64_t l = 0; l < lanes_.size(); ++l)
      if (lanes_[l].first >= lanes_[l].published &&
          store.lanes.view(l).published > std::max(lanes_[l].first, lanes_[l].published))
        return true;
    return false;
  }

  uint64_t envs() const { return envs_.size(); }  // of all lanes, lane by lane
  uint64_t version() const { return version_; }         // changes with the index
  uint64_t restarts() const { return restarts_; }       // changes with each restart
  uint64_t edits() const { return edits_; }  // counts boundaries that in-place changes made or removed
  uint64_t lane_version(uint64_t lane) const { return lanes_[lane].version; }
  uint64_t per_lane() const { return per_lane_; }
  const Env& env(uint64_t k) const { return envs_[k]; }
  uint64_t count(uint64_t k) const { return envs_[k].starts.size(); }
  // The i-th oldest trajectory of an environment.
  Trajectory trajectory(uint64_t k, uint64_t i) const {
    const uint64_t lane = per_lane_ == 1 ? k : k / per_lane_;
    const SortedDeque& starts = envs_[k].starts;
    return {lane, k - lane * per_lane_, std::max(starts[i], lanes_[lane].first),
            i + 1 < starts.size() ? starts[i + 1] : lanes_[lane].published};
  }
  // The trajectory of a row; false: the row is not stored.
  bool find(uint64_t k, uint64_t sequence, Trajectory& t) const {
    const uint64_t lane = k / per_lane_;
    if (sequence < lanes_[lane].first || sequence >= lanes_[lane].published) return false;
    t = trajectory(k, envs_[k].starts.up_to(sequence) - 1);
    return true;
  }
  // The rows of a lane that the index has taken in.
  LaneView indexed(uint64_t lane) const { return {lanes_[lane].published, lanes_[lane].published, lanes_[lane].first}; }
  uint64_t longest() const {
    uint64_t longest = 0;
    for (uint64_t k = 0; k < envs(); ++k)
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
    void restart(const Store&) { index.restart(store.geometry()); }
    void vanished(uint64_t lane, uint64_t, uint64_t to) { index.forget(lane, to); }
    void rows(uint64_t lane, uint64_t from, uint64_t to) { index.scan(store, signals, lane, from, to); }
    void edited(uint64_t slot) { index.edited(store, signals, slot); }
  };

  void restart(const StoreGeometry& s) {
    per_lane_ = s.envs;
    lanes_.assign(s.lanes, {});
    envs_.assign(s.lanes * s.envs, {});
    for (Lane& lane : lanes_) changed(lane);
    restarts_ = version_;
  }

  // Versions are unique within the process, over all indexes.
  void changed(Lane& lane) {
    static std::atomic<uint64_t> last{0};
    lane.version = version_ = ++last;
  }

  // Drops the rows below `first`, which are overwritten.
  void forget(uint64_t l, uint64_t first) {
    Lane& lane = lanes_[l];
    if (first <= lane.first) return;
    lane.first = first, changed(lane);
    for (uint64_t k = l * per_lane_; k < (l + 1) * per_lane_; ++k) {
      SortedDeque& starts = envs_[k].starts;
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
    const StoreGeometry& s = store.geometry();
    Lane& lane = lanes_[l];
    forget(l, std::max(from > lane.published ? from : 0, to > s.lane_capacity ? to - s.lane_capacity : 0));
    if (lane.first >= lane.published) lane.first = std::max(lane.first, from);
    std::vector<uint64_t> cuts = store.seams_of(l, from, to);
    cuts.push_back(to);
    signals.expect(l, from, to);
    for (uint64_t j = 0; j < per_lane_; ++j) {
      Env& env = envs_[l * per_lane_ + j];
      // With many environments, a few rows of each lie far apart.
      if (j + kAhead < per_lane_) __builtin_prefetch(signals.run(l, j + kAhead, from, 1).at);
      bool cut = env.starts.empty();
      uint64_t at = from;
      for (uint64_t next : cuts) {
        if (next < at) continue;
        if (next > at) scan_piece(s, signals, l, j, env, at, next, cut);
        at = next, cut = true;
      }
    }
    lane.published = to, changed(lane);
  }

  template <typename Signals>
  void scan_piece(const StoreGeometry& s, Signals& signals, uint64_t l, uint64_t j, Env& env, uint64_t from, uint64_t to,
                  bool cut) {
    while (from < to) {
      const uint64_t n = std::min({to - from, s.lane_capacity - from % s.lane_capacity, kBlock});
      const SignalRun run = signals.run(l, j, from, n);
      by_id_ ? scan_run<true>(env, run, from, n, cut) : scan_run<false>(env, run, from, n, cut);
      from += n, cut = false;
    }
  }
  template <bool kIds>
  void scan_run(Env& env, SignalRun run, uint64_t from, uint64_t n, bool cut) const {
    switch (bytes_) {
      case 1: return scan_typed<uint8_t, kIds>(env, run, from, n, cut);
      case 2: return scan_typed<uint16_t, kIds>(env, run, from, n, cut);
      case 4: return scan_typed<uint32_t, kIds>(env, run, from, n, cut);
      default: return scan_typed<uint64_t, kIds>(env, run, from, n, cut);
    }
  }
  template <typename T, bool kIds>
  static void scan_typed(Env& env, SignalRun run, uint64_t from, uint64_t n, bool cut) {
    uint64_t last = env.last;
    for (uint64_t i = 0; i < n; ++i, run.at += run.stride) {
      T now;
      std::memcpy(&now, run.at, sizeof now);
      if (cut || (kIds ? now != last : last != 0)) env.starts.push(from + i);
      cut = false, last = now;
    }
    env.last = last;
  }

  // ---- rows that changed in place ----
  template <typename Signals>
  void edited(const Store& store, Signals& signals, uint64_t slot) {
    const StoreGeometry& s = store.geometry();
    const uint64_t time = slot / s.envs, l = time / s.lane_capacity, j = slot % s.envs;
    const Lane& lane = lanes_[l];
    uint64_t sequence = 0;
    if (!SlotSequences(indexed(l), s.lane_capacity).find(time % s.lane_capacity, sequence)) return;
    const uint64_t from = sequence > lane.first ? sequence - 1 : sequence, to = std::min(sequence + 2, lane.published);
    signals.expect(l, from, to);
    Env& env = envs_[l * per_lane_ + j];
    for (uint64_t w = std::max(sequence, lane.first + 1); w < to; ++w)
      correct(l, env, w, starts_at(store, signals, l, j, w));
    if (sequence + 1 == lane.published) env.last = value(signals, l, j, sequence);
  }
  template <typename Signals>
  bool starts_at(const Store& store, Signals& signals, uint64_t l, uint64_t j, uint64_t w) const {
    if (store.seam(l, w)) return true;
    const uint64_t before = value(signals, l, j, w - 1);
    return by_id_ ? value(signals, l, j, w) != before : before != 0;
  }
  template <typename Signals>
  uint64_t value(Signals& signals, uint64_t l, uint64_t j, uint64_t w) const {
    uint64_t v = 0;  // little-endian: the low bytes come first
    std::memcpy(&v, signals.run(l, j, w, 1).at, bytes_);
    return v;
  }
  void correct(uint64_t l, Env& env, uint64_t w, bool starts) {
    if (env.starts.holds(w) == starts) return;
    starts ? env.starts.insert(w) : env.starts.erase(w);
    ++env.edits, ++edits_, changed(lanes_[l]);
  }

  bool by_id_;
  uint64_t bytes_;
  Follower follower_;
  uint64_t per_lane_ = 1, version_ = 0, restarts_ = 0, edits_ = 0;
  std::vector<Lane> lanes_;
  std::vector<Env> envs_;
};

// ---- slices: which trajectories are long enough, where a slice starts, which slots it is made of ----
// How slices are drawn: `length` rows of a trajectory of at least `min_length`. A window may begin up to `before` rows ahead
// of the trajectory and end up to `after` rows behind it: what lies outside is cut off or, with `pad`, filled with the
// nearest row; with `pad_behind` all padding stands behind the rows and repeats the last one. A trajectory is drawn and
// then a window in it or, with `by_window`, a window among those of all trajectories.
struct SliceRule {
  uint64_t length = 1, min_length = 1, before = 0, after = 0;
  bool pad = false, by_window = false, pad_behind = false;
  // The number of windows of a trajectory minus its number of rows (may be negative), if one of `min_length` has at least one.
  int64_t more_windows() const { return static_cast<int64_t>(before + after + 1) - static_cast<int64_t>(length); }
};

// One drawn slice: `rows` stored rows from sequence `first` on, with padding around them.
struct Slice {
  uint64_t lane = 0, env = 0, first = 0, rows = 0, pad_left = 0, pad_right = 0;
  uint64_t size() const { return pad_left + rows + pad_right; }
};

inline Slice slice_of(const SliceRule& rule, const Trajectory& t, int64_t window) {
  const auto start = static_cast<int64_t>(t.start), stop = static_cast<int64_t>(t.stop);
  const int64_t end = window + static_cast<int64_t>(rule.length);
  const int64_t from = std::max(window, start), to = std::min(end, stop);
  Slice s{t.lane, t.env, static_cast<uint64_t>(from), static_cast<uint64_t>(to - from), 0, 0};
  if (rule.pad) s.pad_left = static_cast<uint64_t>(from - window), s.pad_right = static_cast<uint64_t>(end - to);
  if (rule.pad_behind) s.pad_right = rule.length - s.rows;
  return s;
}

// The first and the last window that the rule allows in a trajectory.
inline std::pair<int64_t, int64_t> windows_of(const SliceRule& rule, const Trajectory& t) {
  const int64_t low = static_cast<int64_t>(t.start) - static_cast<int64_t>(rule.before);
  const int64_t last = static_cast<int64_t>(t.stop) - static_cast<int64_t>(rule.length);
  return {low, std::max(low, last + static_cast<int64_t>(rule.after))};
}

// A window drawn uniformly among those that the rule allows in a trajectory.
inline Slice draw_slice(const SliceRule& rule, const Trajectory& t, uint64_t random) {
  const auto [low, high] = windows_of(rule, t);
  return slice_of(rule, t, low + static_cast<int64_t>(below(random, static_cast<uint64_t>(high - low + 1))));
}

// ---- removed rows: no slice has one ----
inline bool has_removed(const Lanes& lanes, const Slice& s) {
  return lanes.with_removed(s.lane).has_removed(s.first, s.first + s.rows, s.env);
}
// The windows of a trajectory whose rows are all left, as ranges of first and last ones.
inline std::vector<std::pair<int64_t, int64_t>> windows_left(const Lanes& lanes, const SliceRule& rule, const Trajectory& t) {
  const auto [low, high] = windows_of(rule, t);
  const Lanes::Protocol rows = lanes.with_removed(t.lane);
  std::vector<std::pair<int64_t, int64_t>> left;
  for (uint64_t from = t.start; from < t.stop;) {
    uint64_t to = from;  // of rows that are left
    while (to < t.stop && !rows.is_removed(to, t.env)) ++to;
    const int64_t first = from == t.start ? low : static_cast<int64_t>(from);
    const int64_t last = to == t.stop ? high : static_cast<int64_t>(to) - static_cast<int64_t>(rule.length);
    if (to > from && std::max(low, first) <= std::min(high, last)) left.emplace_back(std::max(low, first), std::min(high, last));
    from = to + 1;
  }
  return left;
}
inline uint64_t number_of(const std::vector<std::pair<int64_t, int64_t>>& windows) {
  uint64_t n = 0;
  for (const auto& [first, last] : windows) n += static_cast<uint64_t>(last - first + 1);
  return n;
}
// A window drawn uniformly among those of a trajectory whose rows are all left; nothing: there is none.
inline std::optional<Slice> draw_slice_left(const Lanes& lanes, const SliceRule& rule, const Trajectory& t, uint64_t random) {
  if (!lanes.with_removed(t.lane).has_removed(t.start, t.stop, t.env)) return draw_slice(rule, t, random);
  const auto windows = windows_left(lanes, rule, t);
  const uint64_t n = number_of(windows);
  if (n == 0) return std::nullopt;
  uint64_t i = below(random, n);
  for (const auto& [first, last] : windows) {
    const auto here = static_cast<uint64_t>(last - first + 1);
    if (i < here) return slice_of(rule, t, first + static_cast<int64_t>(i));
    i -= here;
  }
  return std::nullopt;
}

// The trajectories of at least a given length, ordered by environment and age: a function of the stored rows alone, so that the
// same draws give the same trajectories wherever these rows lie. An update takes O(1) for each trajectory.
//
// With `by_window` their windows are numbered as well, over all that an environment ever had. The numbers have no gaps; the
// oldest trajectory loses windows at its begin, the running one gets new ones at its end.
class EligibleTrajectories {
 public:
  explicit EligibleTrajectories(const SliceRule& rule)
      : min_length_(rule.min_length), by_window_(rule.by_window), more_(rule.by_window ? rule.more_windows() : 0) {}

  bool serves(const SliceRule& rule) const {
    return min_length_ == rule.min_length && by_window_ == rule.by_window &&
           (!by_window_ || more_ == rule.more_windows());
  }
  void follow(const EpisodeIndex& index) {
    if (version_ == index.version()) return;
    if (restarts_ != index.restarts()) envs_.assign(index.envs(), {}), restarts_ = index.restarts();
    before_.resize(envs_.size() + 1);
    before_[0] = 0;
    for (uint64_t k = 0; k < envs_.size(); ++k) {
      const uint64_t now = index.lane_version(k / index.per_lane());
      if (envs_[k].version != now) update(index, k, now);
      before_[k + 1] = before_[k] + (by_window_ ? windows(index, k) : envs_[k].which.size());
    }
    version_ = index.version();
  }
  // The number of trajectories or, by window, of windows.
  uint64_t total() const { return before_.back(); }
  // The same of what can be drawn beside removed rows: of a trajectory that has some, the share of its windows without one.
  double left(const Lanes& lanes, const EpisodeIndex& index, const SliceRule& rule) {
    const uint64_t removals = lanes.removals();
    if (!lanes.some_removed()) return static_cast<double>(total());
    if (left_removals_ == removals && left_version_ == version_) return left_;
    left_ = static_cast<double>(total());
    for (uint64_t k = 0; k < envs_.size(); ++k)
      for (uint64_t i = 0; lanes.removed_rows(k / index.per_lane()) && i < count(k); ++i) {
        const Trajectory t = at(index, k, i);
        if (!lanes.with_removed(t.lane).has_removed(t.start, t.stop, t.env)) continue;
        const auto [low, high] = windows_of(rule, t);
        const auto all = static_cast<double>(high - low + 1), some = static_cast<double>(number_of(windows_left(lanes, rule, t)));
        left_ -= by_window_ ? all - some : 1 - some / all;
      }
    left_removals_ = removals, left_version_ = version_;
    return left_;
  }
  uint64_t count(uint64_t k) const { return envs_[k].which.size(); }
  // The i-th trajectory of all.
  Trajectory at(const EpisodeIndex& index, uint64_t i) const {
    const uint64_t k = env_of(i);
    return at(index, k, i - before_[k]);
  }
  // Prefetches the data that `at` reads for the i-th of all, in two steps: the second one reads the data that the first one
  // requested.
  void prefetch_place(uint64_t i) const {
    const uint64_t k = env_of(i);
    envs_[k].which.prefetch(i - before_[k]);
  }
  void prefetch_start(const EpisodeIndex& index, uint64_t i) const {
    const uint64_t k = env_of(i);
    const SortedDeque& starts = index.env(k).starts;
    starts.prefetch(envs_[k].which[i - before_[k]] - starts.dropped());
  }
  // The i-th trajectory of an environment.
  Trajectory at(const EpisodeIndex& index, uint64_t k, uint64_t i) const {
    return index.trajectory(k, envs_[k].which[i] - index.env(k).starts.dropped());
  }
  // The i-th window of all.
  Slice window(const EpisodeIndex& index, const SliceRule& rule, uint64_t i) const {
    const uint64_t k = env_of(i);
    const uint64_t sequence = first_window(index, k) + (i - before_[k]);
    const uint64_t place = envs_[k].windows.up_to(sequence) - 1;
    const uint64_t begin = whole_start(index, k, place) + (sequence - envs_[k].windows[place]);
    return slice_of(rule, at(index, k, place), static_cast<int64_t>(begin) - static_cast<int64_t>(rule.before));
  }
  // The number of trajectories of an environment that start at or before a row.
  uint64_t up_to(const EpisodeIndex& index, uint64_t k, uint64_t sequence) const {
    uint64_t low = 0, high = count(k);
    while (low < high) {
      const uint64_t middle = (low + high) / 2;
      at(index, k, middle).start <= sequence ? low = middle + 1 : high = middle;
    }
    return low;
  }

 private:
  struct Env {
    SortedDeque which;        // positions of the trajectories among all that the environment ever had
    SortedDeque windows;      // the number of each one's first window, as if all its rows were still there
    uint64_t next = 0;  // the first undecided one: it is too short so far and may grow
    uint64_t version = 0, edits = 0;
  };
  // The environment of the i-th trajectory or window of all.
  uint64_t env_of(uint64_t i) const {
    if (envs_.size() <= 1) return 0;
    return static_cast<uint64_t>(std::upper_bound(before_.begin(), before_.end(), i) - before_.begin()) - 1;
  }
  void update(const EpisodeIndex& index, uint64_t k, uint64_t version) {
    Env& s = envs_[k];
    const SortedDeque& starts = index.env(k).starts;
    const uint64_t oldest = starts.dropped(), end = oldest + starts.size();
    // An in-place change split or joined trajectories.
    if (s.edits != index.env(k).edits)
      s.which.clear(), s.windows.clear(), s.next = 0, s.edits = index.env(k).edits;
    uint64_t gone = 0;  // rows are overwritten from the oldest on
    while (gone < s.which.size() && (s.which[gone] < oldest || length(index, k, s.which[gone]) < min_length_)) ++gone;
    // The running trajectory may grow again.
    if (gone > 0 && s.which[gone - 1] + 1 == end) s.next = end - 1;
    s.which.drop(gone);
    if (by_window_) s.windows.drop(gone);
    for (s.next = std::max(s.next, oldest); s.next < end; ++s.next) {
      if (length(index, k, s.next) >= min_length_)
        add(index, k, s.next);
      else if (s.next + 1 == end)
        break;
    }
    s.version = version;
  }
  void add(const EpisodeIndex& index, uint64_t k, uint64_t place) {
    Env& s = envs_[k];
    if (by_window_) s.windows.push(s.which.empty() ? 0 : end_of_windows(index, k));
    s.which.push(place);
  }
  uint64_t windows(const EpisodeIndex& index, uint64_t k) const {
    return envs_[k].which.empty() ? 0 : end_of_windows(index, k) - first_window(index, k);
  }
  // The first window's number: the oldest trajectory may have lost rows at its begin.
  uint64_t first_window(const EpisodeIndex& index, uint64_t k) const {
    return envs_[k].windows[0] + (at(index, k, 0).start - whole_start(index, k, 0));
  }
  // One more than the last window's number: the newest trajectory may have grown.
  uint64_t end_of_windows(const EpisodeIndex& index, uint64_t k) const {
    const uint64_t last = envs_[k].which.size() - 1;
    const uint64_t rows = at(index, k, last).stop - whole_start(index, k, last);
    return envs_[k].windows[last] + rows + static_cast<uint64_t>(more_);
  }
  // The start of a trajectory of the list, even if that row has been overwritten.
  uint64_t whole_start(const EpisodeIndex& index, uint64_t k, uint64_t i) const {
    const SortedDeque& starts = index.env(k).starts;
    return starts[envs_[k].which[i] - starts.dropped()];
  }
  static uint64_t length(const EpisodeIndex& index, uint64_t k, uint64_t place) {
    return index.trajectory(k, place - index.env(k).starts.dropped()).length();
  }

  uint64_t min_length_;
  bool by_window_;
  int64_t more_;
  uint64_t version_ = 0, restarts_ = 0;
  std::vector<Env> envs_;
  std::vector<uint64_t> before_ = {0};
  double left_ = 0;  // as `left` found it, of this version and after so many removals
  uint64_t left_version_ = 0, left_removals_ = 0;
};

// The windows of all trajectories whose rows are all left, to draw one as likely as by drawing again until it has no removed row.
class SlicesLeft {
 public:
  SlicesLeft(const Lanes& lanes, const EpisodeIndex& index, const EligibleTrajectories& all, const SliceRule& rule) : rule_(rule) {
    for (uint64_t k = 0; k < index.envs(); ++k)
      for (uint64_t i = 0; i < all.count(k); ++i) {
        const Trajectory t = all.at(index, k, i);
        auto windows = windows_left(lanes, rule, t);
        const auto some = static_cast<double>(number_of(windows));
        if (some == 0) continue;
        const auto [low, high] = windows_of(rule, t);
        total_ += rule.by_window ? some : some / static_cast<double>(high - low + 1);
        parts_.push_back({t, std::move(windows), total_});
      }
  }
  bool any() const { return !parts_.empty(); }
  Slice draw(uint64_t which, uint64_t window) const {
    const double at = static_cast<double>(which >> 11) * 0x1p-53 * total_;
    const auto behind = std::upper_bound(parts_.begin(), parts_.end(), at, [](double x, const Part& part) { return x < part.end; });
    const Part& part = behind == parts_.end() ? parts_.back() : *behind;  // only rounding gives the total itself
    uint64_t i = below(window, number_of(part.windows));
    for (const auto& [first, last] : part.windows) {
      const auto here = static_cast<uint64_t>(last - first + 1);
      if (i < here) return slice_of(rule_, part.trajectory, first + static_cast<int64_t>(i));
      i -= here;
    }
    return slice_of(rule_, part.trajectory, part.windows.back().second);
  }

 private:
  struct Part {
    Trajectory trajectory;
    std::vector<std::pair<int64_t, int64_t>> windows;
    double end;  // the sum of the weights up to this one
  };
  SliceRule rule_;
  std::vector<Part> parts_;
  double total_ = 0;
};

// The last window with as many rows of a trajectory as any has.
inline Slice last_slice(const SliceRule& rule, const Trajectory& t) {
  const auto [low, high] = windows_of(rule, t);
  const int64_t last = static_cast<int64_t>(t.stop) - static_cast<int64_t>(rule.length);
  return slice_of(rule, t, std::clamp(last, low, high));
}

// The i-th random number of a seed.
inline uint64_t random_at(uint64_t seed, uint64_t i) { return mix64(seed + i * 0x9E3779B97F4A7C15ull); }

// The slices of one batch.
struct SliceBatch {
  static constexpr uint64_t kMostRows = uint64_t{1} << 43;  // beyond any memory
  StoreGeometry geometry{};
  uint64_t incarnation = 0;
  SliceRule rule;
  std::vector<Slice> slices;

  uint64_t rows() const {
    uint64_t n = 0;
    for (const Slice& s : slices)
      if ((n += s.size()) > kMostRows) throw std::bad_alloc();
    return n;
  }
  void slots(int64_t* out) const {
    const uint64_t capacity = geometry.lane_capacity, envs = geometry.envs;
    for (const Slice& s : slices) {
      const uint64_t lane = s.lane * capacity;
      uint64_t time = s.first % capacity;
      auto slot = [&] { return static_cast<int64_t>((lane + time) * envs + s.env); };
      out = std::fill_n(out, s.pad_left, slot());
      for (uint64_t i = 0; i < s.rows; ++i) {
        *out++ = slot();
        if (i + 1 < s.rows && ++time == capacity) time = 0;
      }
      out = std::fill_n(out, s.pad_right, slot());
    }
  }
  void ids(int64_t* out) const {
    int64_t id = 0;
    for (const Slice& s : slices) out = std::fill_n(out, s.size(), id++);
  }
  void mask(uint8_t* out) const {
    for (const Slice& s : slices) {
      out = std::fill_n(out, s.pad_left, uint8_t{0});
      out = std::fill_n(out, s.rows, uint8_t{1});
      out = std::fill_n(out, s.pad_right, uint8_t{0});
    }
  }
  // The positions in the batch of each slice's first and last stored row.
  template <typename F>
  void ends(F&& take) const {
    uint64_t at = 0;
    for (const Slice& s : slices) {
      take(at + s.pad_left, at + s.pad_left + s.rows - 1);
      at += s.size();
    }
  }
  // Positions in the batch of slices that lost a row, whose slot may hold a whole row of another trajectory by now. Call after
  // the rows were copied.
  std::vector<uint32_t> stale(const Store& store) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    const bool other = store.header()->incarnation.load(std::memory_order_relaxed) != incarnation ||
                       std::memcmp(store.geometry().store_id, geometry.store_id, sizeof geometry.store_id) != 0;
    std::vector<uint32_t> places;
    uint64_t at = 0;
    for (const Slice& s : slices) {
      const uint64_t end = at + s.size();
      if (other || s.first < store.lanes.first_now(s.lane))
        for (uint64_t i = at; i < end; ++i) places.push_back(static_cast<uint32_t>(i));
      at = end;
    }
    return places;
  }
};

// An epoch over the trajectories that were long enough when it began: for each environment their count, and the last row of the
// newest one (-1: gone). The stored rows determine which of them are left.
struct SliceEpoch {
  Permutation order{0, 0, false};
  std::vector<uint64_t> counts, before = {0};
  std::vector<int64_t> lasts;

  SliceEpoch(uint64_t key, bool shuffle, std::vector<uint64_t> counts_in, std::vector<int64_t> lasts_in)
      : counts(std::move(counts_in)), lasts(std::move(lasts_in)) {
    for (uint64_t n : counts) before.push_back(before.back() + n);
    order = Permutation(key, before.back(), shuffle);
  }
  static SliceEpoch begin(const EpisodeIndex& index, const EligibleTrajectories& all, uint64_t key, bool shuffle) {
    std::vector<uint64_t> counts;
    std::vector<int64_t> lasts;
    for (uint64_t k = 0; k < index.envs(); ++k) {
      counts.push_back(all.count(k));
      lasts.push_back(counts.back() ? static_cast<int64_t>(all.at(index, k, counts.back() - 1).stop) - 1 : -1);
    }
    return {key, shuffle, std::move(counts), std::move(lasts)};
  }
  uint64_t size() const { return before.back(); }
  // The numbers of the trajectories from a position on, as numbered when the epoch began.
  void rest(uint64_t position, int64_t* out) const {
    for (; position < size(); ++position) *out++ = static_cast<int64_t>(order.at(position));
  }
  void follow(const EpisodeIndex& index, const EligibleTrajectories& all) {
    if (!left_.empty() && version_ == index.version()) return;
    left_.resize(counts.size());
    for (uint64_t k = 0; k < counts.size(); ++k) left_[k] = lasts[k] < 0 ? 0 : all.up_to(index, k, lasts[k]);
    version_ = index.version();
  }
  // The trajectory at a position of the epoch; false: it was overwritten, or has become too short.
  bool at(const EpisodeIndex& index, const EligibleTrajectories& all, uint64_t position, Trajectory& t) const {
    const uint64_t i = order.at(position);
    uint64_t k = 0;
    if (counts.size() > 1) k = std::upper_bound(before.begin(), before.end(), i) - before.begin() - 1;
    const uint64_t gone = counts[k] - std::min(counts[k], left_[k]), place = i - before[k];
    if (place < gone) return false;
    t = all.at(index, k, left_[k] - (counts[k] - place));
    return true;
  }

 private:
  std::vector<uint64_t> left_;
  uint64_t version_ = 0;
};

}  // namespace engram
