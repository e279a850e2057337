// Priorities of stored rows: follows new rows, takes priorities from learners, and draws rows in proportion to them.
#pragma once
#include <sys/types.h>
#include <unistd.h>

#include <cmath>
#include <memory>
#include <mutex>
#include <optional>

#include "draw.hpp"
#include "episodes.hpp"
#include "power.hpp"
#include "sum_tree.hpp"

namespace engram {

// The leaf value of a stored row of priority 0, because 0 means that a slot holds no row. The smallest normal number, because
// threads may be set to treat subnormal ones as 0.
constexpr double kZeroPriority = std::numeric_limits<double>::min();
// Keeps the sum finite over as many leaves as a store can have rows.
constexpr double kMostLeaf = 1e280;

// The transform of priorities before they are summed: (p + eps)^alpha.
struct PriorityTransform {
  double alpha = 0.6, eps = 1e-8;
  double leaf(double p) const {
    leaves(&p, 1);
    return p;
  }
  // Turns each priority p[i], which is 0 or more, into its leaf.
  void leaves(double* p, size_t n) const {
    for (size_t i = 0; i < n; ++i) p[i] = (p[i] == kZeroPriority ? 0 : p[i]) + eps;
    if (alpha == 0.5)
      for (size_t i = 0; i < n; ++i) p[i] = std::sqrt(p[i]);
    else if (alpha != 1)
      n == 1 ? void(*p = raised(*p, alpha)) : raise_to(p, n, alpha);
    for (size_t i = 0; i < n; ++i) p[i] = p[i] <= kZeroPriority ? 0 : p[i];
  }
  bool takes(double p) const { return p >= 0 && std::isfinite(p) && leaf(p) <= kMostLeaf; }
  bool same(const PriorityTransform& o) const { return alpha == o.alpha && eps == o.eps; }
};

// The rows that the slots of a draw referred to. When a slot is read it may hold another whole row, for which the weight of the
// drawn one would be wrong.
class DrawnRows {
 public:
  // `follower` has polled just before the draw.
  explicit DrawnRows(const Follower& follower) : first_(follower) {}

  // Whether no row has changed since the draw; call after the rows were copied.
  bool lasts(const Store& store) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return later_.empty() && first_.lasts(store);
  }
  // Positions in the batch whose slots hold other rows than the drawn ones, or rows that were changed in place; call after the
  // rows were copied.
  std::vector<uint32_t> stale(const Store& store, const int64_t* slots, size_t n) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    std::vector<uint32_t> places;
    for (uint32_t k = 0; k <= later_.size(); ++k) {
      const Moment& moment = k == 0 ? first_ : later_[k - 1];
      if (moment.lasts(store)) continue;
      const Changes changes(moment, store);
      for (size_t i = 0; i < n; ++i)
        if ((i < which_.size() ? which_[i] : 0) == k && changes.touch(static_cast<uint64_t>(slots[i])))
          places.push_back(static_cast<uint32_t>(i));
    }
    return places;
  }
  // Records that these positions of the batch were drawn again.
  void replace(const std::vector<uint32_t>& places, const DrawnRows& fresh) {
    later_.push_back(fresh.first_);
    for (uint32_t place : places) {
      if (place >= which_.size()) which_.resize(place + 1, 0);
      which_[place] = static_cast<uint32_t>(later_.size());
    }
  }

 private:
  struct Moment {
    std::vector<Follower::Seen> seen;
    uint64_t incarnation, log;
    explicit Moment(const Follower& f) : seen(f.seen()), incarnation(f.incarnation()), log(f.log()) {}

    bool same_sequences(const Store& store) const {
      return store.header()->incarnation.load(std::memory_order_relaxed) == incarnation &&
             seen.size() == store.geometry().lanes;
    }
    // Whether every row of that moment is still stored and unchanged.
    bool lasts(const Store& store) const {
      if (!same_sequences(store) || store.header()->log_head.load(std::memory_order_relaxed) != log) return false;
      for (uint64_t l = 0; l < seen.size(); ++l)
        if (store.lanes.first_now(l) > seen[l].first) return false;
      return true;
    }
  };
  // The changes since a moment.
  class Changes {
   public:
    Changes(const Moment& moment, const Store& store) : geometry_(store.geometry()) {
      const uint64_t head = store.header()->log_head.load(std::memory_order_relaxed);
      all_ = !moment.same_sequences(store) || head - moment.log > kLogEntries;
      if (all_) return;
      const auto* entries = reinterpret_cast<const Counter*>(store.at(geometry_.log_offset));
      for (uint64_t i = moment.log; i < head; ++i)
        edited_.push_back(entries[i % kLogEntries].load(std::memory_order_relaxed));
      std::sort(edited_.begin(), edited_.end());
      for (uint64_t l = 0; l < geometry_.lanes; ++l) {
        LaneView then;
        then.published = moment.seen[l].published, then.first = moment.seen[l].first;
        sequences_.emplace_back(then, geometry_.lane_capacity);
        first_.push_back(store.lanes.first_now(l));
      }
    }
    bool touch(uint64_t slot) const {
      if (all_ || std::binary_search(edited_.begin(), edited_.end(), slot)) return true;
      const uint64_t time = slot / geometry_.envs, lane = time / geometry_.lane_capacity;
      uint64_t sequence = 0;
      return lane < geometry_.lanes && sequences_[lane].find(time % geometry_.lane_capacity, sequence) &&
             sequence < first_[lane];
    }

   private:
    const StoreGeometry& geometry_;
    bool all_ = false;
    std::vector<uint64_t> edited_, first_;
    std::vector<SlotSequences> sequences_;
  };

  Moment first_;                 // the moment of the draw
  std::vector<Moment> later_;    // the moments of later draws of some positions
  std::vector<uint32_t> which_;  // for each position: 0: first_, i: later_[i - 1]; positions beyond its end: first_
};

// The priorities of the rows of one moment, which are read later, in another thread: before a slot's priority changes, the ones of
// its block are kept as they were. (A tree that takes the place of this one changes nothing here.)
class PrioritySnapshot {
 public:
  using Seen = std::vector<std::pair<uint64_t, uint64_t>>;  // for each lane: the rows [first, published)
  PrioritySnapshot(const StoreGeometry& geometry, Seen seen, const SumTree* tree, uint64_t capacity)
      : lane_capacity_(geometry.lane_capacity), envs_(geometry.envs), seen_(std::move(seen)), capacity_(tree ? capacity : 0) {
    if (tree) tree_.emplace(*tree);  // shares its memory
    kept_.resize((capacity_ + kBlock - 1) / kBlock);
  }
  uint64_t rows() const {
    uint64_t n = 0;
    for (const auto& [first, published] : seen_) n += (published - first) * envs_;
    return n;
  }
  // A child was forked while the thread that reads may have held the mutex.
  bool is_of_this_process() const { return process_ == ::getpid(); }
  // Called before the priorities of slots [from, to) change.
  void preserve(uint64_t from, uint64_t to) {
    to = std::min(to, capacity_);
    const std::lock_guard<std::mutex> guard(mutex_);
    for (uint64_t block = from / kBlock; from < to && block <= (to - 1) / kBlock; ++block) {
      if (kept_[block]) continue;
      auto copy = std::make_unique<double[]>(kBlock);
      const uint64_t first = block * kBlock, end = std::min(first + kBlock, capacity_);
      for (uint64_t slot = first; slot < end; ++slot) copy[slot - first] = tree_->beside(slot);
      kept_[block] = std::move(copy);
    }
  }
  // The priorities of all rows, lane after lane, oldest first.
  void read(double* out) {
    for (uint64_t lane = 0; lane < seen_.size(); ++lane) {
      const auto [oldest, end] = seen_[lane];
      for (uint64_t w = oldest; w < end;) {
        const uint64_t at = w % lane_capacity_, n = std::min(end - w, lane_capacity_ - at);
        const uint64_t first = (lane * lane_capacity_ + at) * envs_;
        out = read_slots(first, first + n * envs_, out);
        w += n;
      }
    }
  }

 private:
  static constexpr uint64_t kBlock = 512;  // slots
  double* read_slots(uint64_t from, uint64_t to, double* out) {
    while (from < to) {
      const uint64_t block = from / kBlock, end = std::min(to, (block + 1) * kBlock);
      const std::lock_guard<std::mutex> guard(mutex_);  // for a block at a time, so that writers do not wait long
      const double* const kept = from < capacity_ ? kept_[block].get() : nullptr;
      for (; from < end; ++from) {
        const double p = from >= capacity_ ? 0 : kept ? kept[from % kBlock] : tree_->beside(from);
        *out++ = p > kZeroPriority ? p : 0;
      }
    }
    return out;
  }

  const pid_t process_ = ::getpid();
  uint64_t lane_capacity_, envs_;
  Seen seen_;
  std::optional<SumTree> tree_;
  uint64_t capacity_;
  std::vector<std::unique_ptr<double[]>> kept_;  // by block; null: as they are in the tree
  std::mutex mutex_;
};

// Priorities by slot. A new row gets the highest priority ever set (`max_within_buffer`: the highest among the stored rows);
// an overwritten one has none. Follows one store at a time and restarts with another.
class Priorities {
 public:
  // With `starts` only rows that `open_starts` has opened are drawn.
  Priorities(double alpha, double eps, bool max_within_buffer, bool starts = false)
      : transform_{alpha, eps}, max_within_buffer_(max_within_buffer), starts_(starts) {}
  Priorities(const Priorities&) = delete;

  // ---- following ----
  void poll(const Store& store) {
    same_store_ = follower_.follows(store);
    // Before new rows get the highest priority of those that are stored.
    if (max_within_buffer_ && same_store_ && store.lanes.removals() != removals_) forget_removed(store, store.lanes.removals());
    follower_.poll(store, Visitor{*this, store});
    // Who was killed while it removed rows has raised their count, but may not have said that it is done.
    const uint64_t removals = store.lanes.removals(), removed = removals ? store.lanes.removed_rows() : 0;
    if (removals != removals_ || removed > removed_) forget_removed(store, removals);
    removed_ = removed;
    if (edited_.empty()) return;
    const double priority = new_priority(), leaf = transform_.leaf(priority);
    changes_.restart(edited_.size());  // allocates before the first change
    if (const auto snapshot = frozen())
      for (uint64_t slot : edited_) snapshot->preserve(slot, slot + 1);
    for (uint64_t slot : edited_)
      if (holds(slot) || takes_place_of_removed(store, slot)) set_one(slot, priority, leaf);
    tree_->refresh(changes_);
    edited_.clear();  // only now: if memory ran out, the next poll takes them again
  }
  void forget() {
    follower_.forget();
    seen_ = latest_ = 1;
    skipped_ = 0;
  }
  uint64_t rows() const {
    uint64_t n = 0;
    for (const auto& s : follower_.seen()) n += s.published > s.first ? s.published - s.first : 0;
    return n;
  }
  double total() const { return tree_ ? tree_->total() : 0; }
  double lowest() const { return tree_ ? tree_->lowest() : 0; }
  bool draws_starts() const { return starts_; }
  // The priority of new rows.
  double new_priority() const {
    if (!max_within_buffer_) return seen_;
    const double best = tree_ ? tree_->highest() : 0;
    if (best == kZeroPriority) return 0;
    return best > 0 ? best : latest_;
  }

  // Opens the rows at which slices can start, as far as the index has them (poll the index first), in trajectories of at least
  // `min_length` stored rows: rows with `least` rows of the trajectory from them on, and the first row of a trajectory with
  // fewer than `least` rows. O(1) for each new row.
  void open_starts(const Store& store, const EpisodeIndex& index, uint64_t least, uint64_t min_length) {
    if (reopen_ || least_ != least || min_length_ != min_length || restarts_ != index.restarts() ||
        edits_ != index.edits()) {
      close_all();
      opened_.assign(index.envs(), 0);
      closed_.assign(index.envs(), 0);
      reopen_ = false, least_ = least, min_length_ = min_length;
      restarts_ = index.restarts(), edits_ = index.edits();
    }
    const StoreGeometry& s = store.geometry();
    for (uint64_t k = 0; k < opened_.size(); ++k) {
      const uint64_t lane = k / index.per_lane(), published = index.indexed(lane).published;
      const Follower::Seen& seen = follower_.seen()[lane];
      const uint64_t replaced = seen.published > s.lane_capacity ? seen.published - s.lane_capacity : 0;
      const uint64_t oldest = std::max({index.indexed(lane).first, seen.first, replaced});
      uint64_t& next = opened_[k];
      next = std::max(next, oldest);
      Trajectory t;
      while (next < published && index.find(k, next, t)) {
        const uint64_t first = std::max(t.start, oldest), whole = t.stop + 1 > least ? t.stop + 1 - least : 0;
        const uint64_t end = t.length() >= min_length ? std::max(first + 1, whole) : 0;
        if (next < end) set_open(s, lane, k % index.per_lane(), next, end, true), next = end;
        if (t.stop == published) break;  // it may still grow
        next = t.stop;
      }
      if (min_length > least && index.count(k) > 0) close_short(s, index, k, published);
      // When rows are overwritten, another row becomes the first of the oldest trajectory.
      if (min_length < least && oldest < published && is_closed(slot_of(s, lane, oldest, k % index.per_lane())) &&
          index.find(k, oldest, t) && t.stop - oldest >= min_length)
        set_open(s, lane, k % index.per_lane(), oldest, oldest + 1, true);
    }
  }

  // ---- drawing: after `poll`, if total() is above 0 ----
  void draw(uint64_t seed, int64_t* slots, double* leaves, size_t n) const {
    double prefix[kBlock];
    uint64_t leaf[kBlock];
    const double total = tree_->total();
    for (size_t done = 0; done < n; done += kBlock) {
      const size_t take = std::min(kBlock, n - done);
      draw_parts(seed + done * 0x9E3779B97F4A7C15ull, total, prefix, take);
      tree_->find(prefix, leaf, leaves + done, take);
      for (size_t i = 0; i < take; ++i) slots[done + i] = static_cast<int64_t>(leaf[i]);
    }
  }
  double leaf(uint64_t slot) const { return slot < capacity_ ? tree_->leaf(slot) : 0; }
  // (P / P_min)^-beta, P_min over all rows that can be drawn.
  template <typename Float>
  void weights(const double* leaves, double beta, Float* out, size_t n) const {
    const double lowest = tree_->lowest();
    double ratio[kBlock];
    for (size_t done = 0; done < n; done += kBlock) {
      const size_t take = std::min(kBlock, n - done);
      for (size_t i = 0; i < take; ++i) ratio[i] = leaves[done + i] / lowest;
      raise_to(ratio, take, -beta);
      for (size_t i = 0; i < take; ++i) out[done + i] = static_cast<Float>(ratio[i]);
    }
  }

  // ---- changing: after `poll` ----
  bool holds(uint64_t slot) const { return slot < capacity_ && tree_->beside(slot) > 0; }
  // Sets the priorities, and with them the leaves, of slots; for a repeated slot the last value counts. Slots without a row are
  // skipped and counted.
  void set(const int64_t* slots, const double* priorities, const double* leaves, size_t n) {
    if (!tree_) return skip(n);
    changes_.restart(n);  // allocates before the first change
    if (const auto snapshot = frozen())
      for (size_t i = 0; i < n; ++i) snapshot->preserve(static_cast<uint64_t>(slots[i]), static_cast<uint64_t>(slots[i]) + 1);
    for (size_t done = 0; done < n; done += kAhead) {
      const size_t end = std::min(n, done + kAhead);
      tree_->prefetch(slots + done, end - done);
      for (size_t i = done; i < end; ++i) {
        const auto slot = static_cast<uint64_t>(slots[i]);
        if (!holds(slot)) {
          skip(1);
          continue;
        }
        set_one(slot, priorities[i], leaves[i]);
        seen_ = std::max(seen_, priorities[i]);
      }
    }
    tree_->refresh(changes_);
  }
  // New rows get at least this priority from now on.
  void raise_new(double priority) { seen_ = std::max(seen_, priority); }
  void skip(uint64_t n) { skipped_ += n; }
  uint64_t skipped() const { return skipped_; }
  const PriorityTransform& transform() const { return transform_; }
  double priority(uint64_t slot) const {
    return holds(slot) && tree_->beside(slot) > kZeroPriority ? tree_->beside(slot) : 0;
  }
  double highest_seen() const { return std::max(seen_, latest_); }
  void use(PriorityTransform transform) {
    transform_ = transform;
    if (!tree_) return;
    set_leaves(0, capacity_);
    rebuild();
  }

  // ---- state ----
  struct State {
    std::vector<std::pair<uint64_t, uint64_t>> seen;  // for each lane: the rows [first, published)
    double highest = 1, latest = 1;
    uint64_t skipped = 0;
  };
  State state() const {
    State s{{}, seen_, latest_, skipped_};
    for (const auto& lane : follower_.seen()) s.seen.push_back({lane.first, std::max(lane.first, lane.published)});
    return s;
  }
  // The priorities of the rows of now, for a thread that reads them later; there is one at a time.
  std::shared_ptr<PrioritySnapshot> freeze(const StoreGeometry& geometry) {
    auto snapshot = std::make_shared<PrioritySnapshot>(geometry, state().seen, tree_ ? &*tree_ : nullptr, capacity_);
    frozen_ = snapshot;
    return snapshot;
  }
  // The snapshot that is not read yet. Null: there is none; a forked child leaves that of its parent alone.
  std::shared_ptr<PrioritySnapshot> frozen() const {
    auto snapshot = frozen_.lock();
    return snapshot && snapshot->is_of_this_process() ? snapshot : nullptr;
  }
  // Calls visit(lane, sequence, slot) for each row: lane after lane, oldest first.
  template <typename Visit>
  static void each_row(const StoreGeometry& geometry, const std::vector<std::pair<uint64_t, uint64_t>>& seen, Visit&& visit) {
    for (uint64_t l = 0; l < seen.size(); ++l)
      for (uint64_t w = seen[l].first; w < seen[l].second; ++w)
        for (uint64_t env = 0; env < geometry.envs; ++env) visit(l, w, slot_of(geometry, l, w, env));
  }
  // Continues with a state and the priorities of its rows, for those of these rows that are stored; other rows are new.
  void resume(const Store& store, const State& state, const double* priorities) {
    start(store);
    seen_ = state.highest, latest_ = state.latest, skipped_ = state.skipped;
    const StoreGeometry& s = store.geometry();
    std::vector<Follower::Seen> stored(s.lanes);
    for (uint64_t l = 0; l < s.lanes && l < state.seen.size(); ++l) {
      const LaneView view = store.lanes.view(l);
      stored[l].published = std::min(state.seen[l].second, view.published);
      stored[l].first = std::min(view.first, stored[l].published);
      // Rows that the saved store still had, but the state did not any more.
      const uint64_t old = std::clamp(state.seen[l].first, stored[l].first, stored[l].published);
      if (old > stored[l].first) add(store, l, stored[l].first, old, new_priority());
    }
    size_t i = 0;
    uint64_t lowest = capacity_, end = 0;  // the range of slots that get priorities
    each_row(s, state.seen, [&](uint64_t l, uint64_t w, uint64_t slot) {
      const double p = priorities[i++];
      if (l >= stored.size() || w < stored[l].first || w >= stored[l].published) return;
      if (store.lanes.is_ragged() && !store.lanes.is_head(slot)) return;
      reserve(slot + 1);
      raw(slot) = std::max(p, kZeroPriority);
      lowest = std::min(lowest, slot), end = std::max(end, slot + 1);
    });
    set_leaves(lowest, end);
    follower_.resume(store, std::move(stored));
    rebuild();
  }
  const std::vector<Follower::Seen>& seen() const { return follower_.seen(); }
  // The rows that slots refer to that are drawn before the next poll.
  DrawnRows drawn() const { return DrawnRows(follower_); }

 private:
  struct Visitor {
    Priorities& self;
    const Store& store;
    void restart(const Store&) {
      self.start(store);
      self.edited_.clear();
      if (!self.same_store_) self.seen_ = self.latest_ = 1, self.skipped_ = 0;
    }
    void vanished(uint64_t lane, uint64_t from, uint64_t to) { self.fill(store.geometry(), lane, from, to, {}); }
    void rows(uint64_t lane, uint64_t from, uint64_t to) {
      if (self.max_within_buffer_) {
        // All new rows get the priority of the first of them, even if that row is overwritten: since then a row of that
        // priority was always stored.
        const uint64_t first = self.follower_.seen()[lane].published;
        self.fill(store.geometry(), lane, first, first + 1, {});
        self.latest_ = self.new_priority();
      }
      self.add(store, lane, from, to, self.new_priority());
    }
    void edited(uint64_t slot) { self.edited_.push_back(slot); }
  };

  static constexpr size_t kBlock = 64;   // the number of cache misses that a core can have in flight
  static constexpr size_t kAhead = 256;  // their lines stay in the first two caches until they are written

  // The priority of a slot as it was set; 0: the slot holds no row.
  double& raw(uint64_t slot) { return tree_->beside(slot); }

  // A storage without limit has a capacity of 2^40: its tree grows with its rows.
  static constexpr uint64_t kAtOnce = uint64_t{1} << 32;
  void start(const Store& store) {
    make(store.slots() <= kAtOnce ? store.slots() : 1024);
    removals_ = 0;
  }
  void reserve(uint64_t slots) {
    if (slots <= capacity_) return;
    const SumTree old = *tree_;  // shares its memory
    const uint64_t n = capacity_;
    make(std::bit_ceil(slots));
    for (uint64_t slot = 0; slot < n; ++slot) raw(slot) = old.beside(slot);
    use(transform_);
  }
  void make(uint64_t slots) {
    SumTree tree(slots, max_within_buffer_);
    if (starts_) open_ = MappedRegion::map(-1, round_up(std::max<uint64_t>(slots, 1), kWide));
    tree_.emplace(std::move(tree));
    reopen_ = true;
    capacity_ = slots;
  }
  // Recomputes the leaves of these slots from their priorities.
  void set_leaves(uint64_t from, uint64_t end) {
    double leaves[kBlock];
    for (uint64_t to; from < end; from = to) {
      to = std::min(from + kBlock, end);
      bool any = false;
      for (uint64_t slot = from; slot < to; ++slot) any |= (leaves[slot - from] = raw(slot)) > 0;
      if (!any) continue;  // pages without rows stay untouched
      transform_.leaves(leaves, to - from);
      for (uint64_t slot = from; slot < to; ++slot)
        tree_->leaf(slot) = holds(slot) && drawable(slot) ? leaves[slot - from] : 0;
    }
  }
  void rebuild() {
    tree_->refresh(0, tree_->leaf_nodes() - 1);
  }

  // Removed rows have no priority, as if their slots held none.
  void forget_removed(const Store& store, uint64_t removals) {
    std::vector<uint64_t> gone;
    bool are_all = true;  // of those that have been removed; others are not taken in yet
    for (uint64_t l = 0; l < store.lanes.count(); ++l)
      store.lanes.each_removed(l, [&](uint64_t w, uint64_t env) {
        const uint64_t slot = slot_of(store.geometry(), l, w, env);
        if (w >= follower_.seen()[l].published) are_all = false;
        else if (holds(slot)) gone.push_back(slot);
      });
    changes_.restart(gone.size());  // allocates before the first change
    if (const auto snapshot = frozen())
      for (uint64_t slot : gone) snapshot->preserve(slot, slot + 1);
    for (uint64_t slot : gone) tree_->set(slot, 0, 0, changes_);
    if (tree_) tree_->refresh(changes_);
    removals_ = are_all ? removals : 0;
  }
  // Whether a row that was written over another one is stored where one was removed.
  bool takes_place_of_removed(const Store& store, uint64_t slot) const {
    const StoreGeometry& s = store.geometry();
    if (slot >= capacity_ || !store.lanes.has_flow() || store.lanes.is_removed(slot)) return false;
    const uint64_t time = slot / s.envs, lane = time / s.lane_capacity;
    LaneView seen;
    seen.published = follower_.seen()[lane].published, seen.first = follower_.seen()[lane].first;
    uint64_t w = 0;
    return SlotSequences(seen, s.lane_capacity).find(time % s.lane_capacity, w);
  }

  // New rows of a lane. Of rows of any length only the heads are rows; a bit may be that of a newer page, which the next poll adds.
  void add(const Store& store, uint64_t lane, uint64_t from, uint64_t to, double priority) {
    if (!store.lanes.is_ragged()) return fill(store.geometry(), lane, from, to, priority);
    reserve(store.slots());
    fill(store.geometry(), lane, from, to, {});
    const std::vector<uint64_t> heads = store.lanes.protocol(lane).seams_of(from, to);
    const double leaf = transform_.leaf(std::max(priority, kZeroPriority));
    changes_.restart(heads.size());
    for (uint64_t w : heads) set_one(slot_of(store.geometry(), lane, w), priority, leaf);
    tree_->refresh(changes_);
  }
  // Rows of a lane, whose slots are consecutive up to the ring's end; at most as many as a lane holds.
  void fill(const StoreGeometry& s, uint64_t lane, uint64_t from, uint64_t to, std::optional<double> priority) {
    const uint64_t start = from % s.lane_capacity, n = to - from, before_wrap = std::min(n, s.lane_capacity - start);
    const uint64_t base = lane * s.lane_capacity;
    fill_slots((base + start) * s.envs, (base + start + before_wrap) * s.envs, priority);
    if (n > before_wrap) fill_slots(base * s.envs, (base + n - before_wrap) * s.envs, priority);
  }
  void fill_slots(uint64_t from, uint64_t to, std::optional<double> priority) {
    if (!priority) to = std::min(to, capacity_);
    if (from >= to) return;
    reserve(to);
    if (const auto snapshot = frozen()) snapshot->preserve(from, to);
    const double given = priority ? std::max(*priority, kZeroPriority) : 0;
    const double leaf = priority && !starts_ ? transform_.leaf(given) : 0;
    for (uint64_t slot = from; slot < to; ++slot) tree_->leaf(slot) = leaf, raw(slot) = given;
    if (starts_) std::memset(open_->data() + from, 0, to - from);
    tree_->refresh(from / kWide, (to - 1) / kWide);
  }
  // ---- starts of slices ----
  bool drawable(uint64_t slot) const { return !starts_ || open_->data()[slot]; }
  bool is_closed(uint64_t slot) const { return holds(slot) && !drawable(slot); }
  void close_all() {
    std::memset(open_->data(), 0, capacity_);
    for (uint64_t slot = 0; slot < capacity_; ++slot)
      if (tree_->leaf(slot) != 0) tree_->leaf(slot) = 0;  // pages without rows stay untouched
    rebuild();
  }
  // As its rows are overwritten, the oldest trajectory becomes too short; if it is the running one, it may grow again.
  void close_short(const StoreGeometry& s, const EpisodeIndex& index, uint64_t k, uint64_t published) {
    const Trajectory oldest = index.trajectory(k, 0);
    uint64_t& next = opened_[k];
    if (oldest.length() >= min_length_ || next <= oldest.start || closed_[k] >= oldest.stop) return;
    set_open(s, oldest.lane, oldest.env, oldest.start, std::min(next, oldest.stop), false);
    if (oldest.stop == published) next = oldest.start;
    else closed_[k] = oldest.stop;
  }
  void set_open(const StoreGeometry& s, uint64_t lane, uint64_t env, uint64_t from, uint64_t to, bool open) {
    dirty_.clear();
    dirty_.reserve(to - from);  // allocate before the first change
    double last = 0, leaf = 0;
    for (uint64_t w = from; w < to; ++w) {
      const uint64_t slot = slot_of(s, lane, w, env);
      if (!holds(slot)) continue;
      if (open && raw(slot) != last) last = raw(slot), leaf = transform_.leaf(last);
      open_->data()[slot] = open;
      tree_->leaf(slot) = leaf;
      if (dirty_.nodes().empty() || dirty_.nodes().back() != slot / kWide) dirty_.add(slot / kWide);
    }
    tree_->refresh(dirty_);
  }

  void set_one(uint64_t slot, double priority, double leaf) {
    tree_->set(slot, drawable(slot) ? leaf : 0, std::max(priority, kZeroPriority), changes_);
  }

  PriorityTransform transform_;
  bool max_within_buffer_, starts_, same_store_ = false;
  Follower follower_;
  uint64_t capacity_ = 0, skipped_ = 0;
  uint64_t removals_ = 0, removed_ = 0;  // of the store, when its removed rows were looked at last
  double seen_ = 1;    // the highest priority ever set
  double latest_ = 1;  // with `max_within_buffer_`: the priority of the last new rows
  std::optional<SumTree> tree_;   // beside each leaf the priority as it was set
  std::shared_ptr<MappedRegion> open_;  // with `starts_`: a byte for each slot, 1 where a slice may start
  std::vector<uint64_t> opened_;  // for each environment: rows below this sequence are decided
  std::vector<uint64_t> closed_;  // rows below this sequence are closed again
  uint64_t least_ = 0, min_length_ = 0, restarts_ = 0, edits_ = 0;  // the settings that the open starts depend on
  bool reopen_ = true;
  std::vector<uint64_t> edited_;
  std::weak_ptr<PrioritySnapshot> frozen_;  // of this tree, or of one before
  LeafChanges changes_;
  DirtyNodes dirty_;
};

}  // namespace engram
