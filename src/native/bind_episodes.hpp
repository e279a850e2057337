// Python bindings of the episode index and of slices.
#pragma once
#include <sched.h>

#include <atomic>
#include <thread>
#include <utility>

#include "bind_store.hpp"
#include "copy_threads.hpp"
#include "episodes.hpp"
#include "row_draw.hpp"

namespace engram {

// Flags or ids from Python: `fetch(lane, from, to)` returns an array [time, env] of them.
class FetchedSignals {
 public:
  FetchedSignals(nb::handle fetch, uint64_t envs, uint64_t bytes) : fetch_(fetch), envs_(envs), bytes_(bytes) {}
  void expect(uint64_t lane, uint64_t from, uint64_t to) {
    array_ = fetch_(lane, from, to);
    buffer_ = std::make_unique<Buffer>();
    if (!buffer_->get(array_.ptr()) || !PyBuffer_IsContiguous(&buffer_->view(), 'C') ||
        static_cast<uint64_t>(buffer_->view().len) != (to - from) * envs_ * bytes_)
      throw nb::value_error("flags or ids must be a contiguous array [time, env] of the index's item size");
    lane_ = lane, from_ = from, to_ = to;
  }
  SignalRun run(uint64_t lane, uint64_t env, uint64_t from, uint64_t n) const {
    if (!buffer_ || lane != lane_ || from < from_ || from + n > to_) throw nb::value_error("rows that were not fetched");
    const auto* data = static_cast<const uint8_t*>(buffer_->view().buf);
    return {data + ((from - from_) * envs_ + env) * bytes_, static_cast<ptrdiff_t>(envs_ * bytes_)};
  }

 private:
  nb::handle fetch_;
  uint64_t envs_, bytes_, lane_ = 0, from_ = 0, to_ = 0;
  nb::object array_;
  std::unique_ptr<Buffer> buffer_;
};

// A mutex for threads with and without the GIL; a forked child finds it free.
class ForkSafeMutex {
 public:
  class Lock {
   public:
    explicit Lock(ForkSafeMutex& mutex) : mutex_(mutex) {
      const std::thread::id me = std::this_thread::get_id();
      if (mutex_.busy_.load() && mutex_.forks_ == forks() && mutex_.owner_.load() == me)
        throw std::runtime_error("this sampler is drawing already: a finaliser must not sample");
      if (!mutex_.take()) {
        nb::gil_scoped_release unlocked;
        while (!mutex_.take()) ::sched_yield();
      }
      mutex_.owner_.store(me);
    }
    Lock(const Lock&) = delete;
    ~Lock() {
      mutex_.owner_.store(std::thread::id());
      mutex_.busy_.store(false, std::memory_order_release);
    }

   private:
    ForkSafeMutex& mutex_;
  };
  // Whether another process (the parent) held it last: that process may have stopped in the middle of a change.
  bool forked() {
    const uint64_t now = forks();  // `getpid` is a system call
    return std::exchange(forks_, now) != now;
  }

 private:
  bool take() {
    if (forks_ != forks()) busy_.store(true);  // the holder is a thread of the parent
    else if (busy_.exchange(true, std::memory_order_acquire)) return false;
    return true;
  }
  std::atomic<bool> busy_{false};
  std::atomic<std::thread::id> owner_{};
  uint64_t forks_ = forks();
};

// The episode index of one storage, and slices drawn from it.
class Episodes {
 public:
  // `offset`: of the flag or id in a packed row; none: Python fetches it. `bytes`: its size.
  Episodes(bool by_id, std::optional<uint64_t> offset, uint64_t bytes)
      : by_id_(by_id), offset_(offset), bytes_(bytes), index_(by_id, bytes) {
    if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) throw nb::value_error("a flag or id has 1, 2, 4 or 8 bytes");
  }

  // Draws n slices: a trajectory that is long enough, uniformly, then a start or, by window, uniformly over all windows.
  // None: no trajectory is long enough.
  std::optional<SliceBatch> draw(Store& store, const SliceRule& rule, nb::handle seed_in, size_t n, nb::handle fetch) {
    SliceBatch batch = empty_batch(store, rule);
    if (!draw(store, rule, seed_of(seed_in), n, fetch, batch.slices)) return std::nullopt;
    return batch;
  }
  // As above. False: no trajectory is long enough.
  bool draw(Store& store, const SliceRule& rule, uint64_t seed, size_t n, nb::handle fetch, std::vector<Slice>& slices) {
    const ForkSafeMutex::Lock lock(mutex_);
    poll(store, fetch);
    const EligibleTrajectories& all = eligible(rule);
    if (all.total() == 0) return false;
    if (n > kMostBytes / sizeof(Slice)) throw std::bad_alloc();
    slices.clear();
    slices.reserve(n);
    if (rule.by_window)
      for (size_t i = 0; i < n; ++i)
        slices.push_back(all.window(index_, rule, below(random_at(seed, i), all.total())));
    else
      for (size_t from = 0; from < n; from += kAskedTogether)
        draw_some(all, rule, seed, from, std::min(n, from + kAskedTogether), slices);
    if (store.lanes.some_removed()) redraw_removed(store, rule, seed, slices);
    return true;
  }
  // The n slices that end last: one of each environment's newest trajectory that is long enough, then one of each one's
  // second newest, and so on; from the newest on again where there are fewer. None: no trajectory is long enough.
  std::optional<SliceBatch> newest(Store& store, const SliceRule& rule, size_t n, nb::handle fetch) {
    const ForkSafeMutex::Lock lock(mutex_);
    poll(store, fetch);
    const EligibleTrajectories& all = eligible(rule);
    if (all.total() == 0) return std::nullopt;
    if (n > kMostBytes / sizeof(Slice)) throw std::bad_alloc();
    SliceBatch batch = empty_batch(store, rule);
    batch.slices.reserve(n);
    uint64_t most = 0;  // trajectories of an environment
    for (uint64_t k = 0; k < index_.envs(); ++k) most = std::max(most, all.count(k));
    for (uint64_t age = 0; batch.slices.size() < n; ++age) {
      const size_t before = batch.slices.size();
      for (uint64_t k = 0; k < index_.envs() && batch.slices.size() < n; ++k)
        if (age < all.count(k)) {
          const Slice slice = last_slice(rule, all.at(index_, k, all.count(k) - 1 - age));
          if (!has_removed(store.lanes, slice)) batch.slices.push_back(slice);
        }
      if (batch.slices.size() > before || age < most) continue;
      if (batch.slices.empty()) throw_all_removed();
      age = static_cast<uint64_t>(-1);  // begins again
    }
    return batch;
  }
  // The number of trajectories or, by window, of windows that `draw` chooses from, without those that removed rows take from it.
  double choices(Store& store, const SliceRule& rule, nb::handle fetch) {
    const ForkSafeMutex::Lock lock(mutex_);
    poll(store, fetch);
    return eligible(rule).left(store.lanes, index_, rule);
  }
  // Puts others in the places of slices that have removed rows, until none has one.
  void redraw_removed(const Store& store, const SliceRule& rule, uint64_t seed, std::vector<Slice>& slices) {
    EligibleTrajectories& all = eligible(rule);
    uint64_t drawn = 2 * slices.size();  // random numbers of this seed
    std::optional<SlicesLeft> listed;
    for (Slice& slice : slices)
      for (int tries = 0; has_removed(store.lanes, slice); ++tries) {
        if (tries == kTries) {  // of so few all are listed
          if (!listed) listed.emplace(store.lanes, index_, all, rule);
          if (!listed->any()) throw_all_removed();
          slice = listed->draw(random_at(seed, drawn), random_at(seed, drawn + 1));
          drawn += 2;
          break;
        }
        const uint64_t which = below(random_at(seed, drawn), all.total()), window = random_at(seed, drawn + 1);
        slice = rule.by_window ? all.window(index_, rule, which) : draw_slice(rule, all.at(index_, which), window);
        drawn += 2;
      }
  }
  static constexpr int kTries = 100;        // to draw a slice without removed rows, before all are listed
  static constexpr int kStartTries = 1000;  // to draw one by the priority of its start
  [[noreturn]] static void throw_all_removed() {
    throw std::runtime_error("every slice that can be drawn has rows that were removed; use shorter slices, or store more rows");
  }
  // `share`: of the slices that could be drawn, which have removed rows.
  [[noreturn]] static void throw_removed(double share) {
    if (share >= 1) throw_all_removed();
    char percent[32];
    std::snprintf(percent, sizeof percent, "%.4g", 100 * share);
    throw std::runtime_error(std::string(percent) + " % of the slices that could be drawn have rows that were removed, and " +
                             std::to_string(kStartTries) + " draws found none without; use shorter slices, or store more rows");
  }
  // Calls `use` with the updated index and an empty batch of slices.
  template <typename Use>
  auto with_index(Store& store, const SliceRule& rule, nb::handle fetch, Use&& use) {
    const ForkSafeMutex::Lock lock(mutex_);
    poll(store, fetch);
    return use(index_, empty_batch(store, rule));
  }
  using Trajectories = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;
  // Every trajectory as (lane, env, first sequence, length), lane by lane, environment by environment, oldest first.
  Trajectories trajectories(Store& store, nb::handle fetch) { return trajectories_and_rows(store, fetch).first; }
  // The same, and for each lane the sequences [first, stop) of the rows of these trajectories.
  std::pair<Trajectories, Ranges> trajectories_and_rows(Store& store, nb::handle fetch) {
    std::vector<int64_t> out[4];
    Ranges ranges;
    {
      const ForkSafeMutex::Lock lock(mutex_);
      poll(store, fetch);
      for (uint64_t l = 0; l < store.geometry().lanes; ++l) {
        const LaneView rows = index_.indexed(l);
        ranges.emplace_back(std::min(rows.first, rows.published), rows.published);
      }
      for (uint64_t k = 0; k < index_.envs(); ++k)
        for (uint64_t i = 0; i < index_.count(k); ++i) {
          const Trajectory t = index_.trajectory(k, i);
          const uint64_t values[4] = {t.lane, t.env, t.start, t.length()};
          for (int c = 0; c < 4; ++c) out[c].push_back(static_cast<int64_t>(values[c]));
        }
    }
    return {{copied_out(out[0]), copied_out(out[1]), copied_out(out[2]), copied_out(out[3])}, std::move(ranges)};
  }
  uint64_t longest(Store& store, nb::handle fetch) {
    const ForkSafeMutex::Lock lock(mutex_);
    poll(store, fetch);
    return index_.longest();
  }

  // ---- epochs ----
  SliceEpoch begin_epoch(Store& store, const SliceRule& rule, uint64_t key, bool shuffle, nb::handle fetch) {
    const ForkSafeMutex::Lock lock(mutex_);
    poll(store, fetch);
    return SliceEpoch::begin(index_, eligible(rule), key, shuffle);
  }
  // Returns up to n slices from a position of the epoch on, the position after them, and whether at least `least` more follow.
  std::tuple<SliceBatch, uint64_t, bool> take(Store& store, const SliceRule& rule, SliceEpoch& epoch, uint64_t position,
                                              nb::handle seed_in, size_t n, size_t least, nb::handle fetch) {
    const uint64_t seed = seed_of(seed_in);
    const ForkSafeMutex::Lock lock(mutex_);
    poll(store, fetch);
    if (epoch.counts.size() != index_.envs()) throw nb::value_error("the epoch was made for another store");
    const EligibleTrajectories& all = eligible(rule);
    epoch.follow(index_, all);
    SliceBatch batch = empty_batch(store, rule);
    Trajectory t;
    for (; position < epoch.size() && batch.slices.size() < n; ++position)
      if (epoch.at(index_, all, position, t))
        if (const auto slice = draw_slice_left(store.lanes, rule, t, random_at(seed, position))) batch.slices.push_back(*slice);
    size_t more = 0;
    for (uint64_t p = position; p < epoch.size() && more < least; ++p)
      more += epoch.at(index_, all, p, t) && draw_slice_left(store.lanes, rule, t, 0);
    return {std::move(batch), position, more >= least};
  }

 private:
  static uint64_t seed_of(nb::handle seed_in) {
    const SlotsArg seed(nb::borrow(seed_in));
    if (seed.n < 1) throw nb::value_error("no seed");
    return static_cast<uint64_t>(seed.data[0]);
  }
  static Tensor copied_out(const std::vector<int64_t>& values) {
    return slots_out(values.size(), [&](int64_t* out) { std::copy(values.begin(), values.end(), out); });
  }
  static SliceBatch empty_batch(const Store& store, const SliceRule& rule) {
    return {store.geometry(), store.header()->incarnation.load(std::memory_order_acquire), rule, {}};
  }
  // Draws the slices of a range of numbers. Prefetches the data of their trajectories, which may lie anywhere.
  void draw_some(const EligibleTrajectories& all, const SliceRule& rule, uint64_t seed, size_t from, size_t to,
                 std::vector<Slice>& slices) const {
    uint64_t which[kAskedTogether];
    for (size_t i = from; i < to; ++i) {
      which[i - from] = below(random_at(seed, 2 * i), all.total());
      all.prefetch_place(which[i - from]);
    }
    for (size_t i = from; i < to; ++i) all.prefetch_start(index_, which[i - from]);
    for (size_t i = from; i < to; ++i)
      slices.push_back(draw_slice(rule, all.at(index_, which[i - from]), random_at(seed, 2 * i + 1)));
  }
  void poll(Store& store, nb::handle fetch) {
    if (offset_ && (store.geometry().payload_bytes < bytes_ || *offset_ > store.geometry().payload_bytes - bytes_))
      throw nb::value_error("the flag or id lies outside the rows of this store");
    if (!offset_ && fetch.is_none()) throw nb::value_error("flags or ids must be fetched");
    if (mutex_.forked()) index_ = EpisodeIndex(by_id_, bytes_), lists_.clear();
    try {
      for (int looks = 0; looks == 0 || (looks < kLooks && index_.overtaken(store)); ++looks) poll_once(store, fetch);
    } catch (...) {
      index_.forget_all();  // a scan stopped in the middle: memory ran out, or Python raised
      throw;
    }
  }
  void poll_once(Store& store, nb::handle fetch) {
    if (offset_) {
      PackedSignals signals(store, *offset_);
      maybe_without_gil(index_.news(store) > kGilRows, [&] { index_.poll(store, signals); });
    } else {
      FetchedSignals signals(fetch, store.geometry().envs, bytes_);
      index_.poll(store, signals);
    }
  }
  EligibleTrajectories& eligible(const SliceRule& rule) {
    size_t i = 0;
    while (i < lists_.size() && !lists_[i]->serves(rule)) ++i;
    if (i == lists_.size()) {
      if (i == kLists) lists_.erase(lists_.begin()), --i;  // evict the rule that was made first
      lists_.push_back(std::make_unique<EligibleTrajectories>(rule));
    }
    try {
      lists_[i]->follow(index_);
    } catch (...) {
      lists_.erase(lists_.begin() + static_cast<ptrdiff_t>(i));  // memory ran out in the middle
      throw;
    }
    return *lists_[i];
  }

  static constexpr uint64_t kGilRows = 1 << 14;  // a longer scan releases the GIL
  static constexpr size_t kAskedTogether = 64;   // trajectories prefetched together
  static constexpr size_t kLists = 4;
  static constexpr int kLooks = 100;
  bool by_id_;
  std::optional<uint64_t> offset_;
  uint64_t bytes_;
  ForkSafeMutex mutex_;
  EpisodeIndex index_;
  std::vector<std::unique_ptr<EligibleTrajectories>> lists_;
};

// Draws slices whose flags or ids lie in packed rows: `Episodes.draw` of a seed from the sampler.
class SliceDraw final : public RowDraw {
 public:
  // `planned`: a callable of a batch size that returns the episodes, their store, the number of slices, their rule, and the
  // changes to make to batches: pairs of one of "last", "first", "first if any", "mask" and "slice_id", and a path. None: the
  // store has no index yet, or Python draws such slices. It is called again when one of the sampler's attributes named by
  // `watched` is another object.
  SliceDraw(nb::object sampler, nb::object lock, nb::object planned, nb::tuple watched)
      : seeds_(sampler, std::move(lock)), sampler_(std::move(sampler)), planned_(std::move(planned)) {
    for (nb::handle name : watched) {
      PyObject* interned = nb::borrow(name).release().ptr();
      PyUnicode_InternInPlace(&interned);
      watched_.emplace_back(nb::steal(interned), nb::object());
    }
  }
  bool plan(Store& store, size_t n) override {
    return (n == n_ && &store == store_ && !has_changed()) || renew(store, n);
  }
  uint64_t form_version() const override { return version_; }
  bool complete(BatchForm& form) const override {
    if (!form.has_keys()) return true;
    for (nb::handle mark : marks_) {
      const auto [what, path] = nb::cast<std::pair<std::string, nb::tuple>>(mark);
      const bool fits = what == "last" || what == "first" ? form.mark(path, what == "last")
                        : what == "first if any"          ? form.mark_first_if_any(path)
                        : what == "mask"                  ? form.add(path, {BatchForm::kMask, {kDLBool, 8}})
                                                          : form.add(path, {BatchForm::kSliceId, {kDLInt, 64}});
      if (!fits) return false;
    }
    return true;
  }
  bool prepare(Store& store) override {
    if (&store != store_ || store.lanes.rows() == 0) return false;
    Slices next = slices_;
    // Checked before a random number is drawn.
    if (nb::cast<Episodes&>(next.episodes).choices(store, next.rule, nb::none()) == 0) return false;
    next.seed = seeds_.next();
    next_ = std::move(next);  // assigned last, because a finaliser may also sample
    return true;
  }
  bool draw(Store& store, size_t, DrawnBatch& drawn) override {
    SliceBatch& batch = drawn.slices;
    auto& episodes = nb::cast<Episodes&>(next_.episodes);
    if (!episodes.draw(store, next_.rule, next_.seed, next_.n, nb::none(), batch.slices)) return false;
    batch.geometry.lane_capacity = store.geometry().lane_capacity, batch.geometry.envs = store.geometry().envs;
    drawn.slots.resize(batch.rows());
    batch.slots(drawn.slots.data());
    return true;
  }

 private:
  // The slices of one batch.
  struct Slices {
    nb::object episodes;
    SliceRule rule;
    size_t n = 0;
    uint64_t seed = 0;
  };
  bool has_changed() const {
    for (const auto& [name, value] : watched_)
      if (!attribute(sampler_, name.ptr()).is(value)) return true;
    return false;
  }
  bool renew(Store& store, size_t n) {
    store_ = nullptr, n_ = 0;
    // Read before the plan is made: a change meanwhile, by another thread, is seen at the next batch.
    for (auto& [name, value] : watched_) value = attribute(sampler_, name.ptr());
    const nb::object plan = planned_(n);
    if (plan.is_none()) return false;
    auto [episodes, of_store, slices, rule, marks] =
        nb::cast<std::tuple<nb::object, nb::object, size_t, SliceRule, nb::tuple>>(plan);
    if (nb::cast<Store*>(of_store) != &store) return false;
    if (!marks_.is_valid() || !marks_.equal(marks)) marks_ = marks, ++version_;
    nb::cast<Episodes&>(episodes);
    slices_ = {std::move(episodes), rule, slices, 0};
    store_object_ = std::move(of_store), store_ = &store, n_ = n;
    return true;
  }

  SeedSource seeds_;
  nb::object sampler_, planned_, store_object_;
  std::vector<std::pair<nb::object, nb::object>> watched_;  // names of attributes, and their values at planning time
  nb::tuple marks_;
  uint64_t version_ = 0;
  Store* store_ = nullptr;  // the store of the plan; null: there is no plan
  size_t n_ = 0;            // rows
  Slices slices_, next_;    // those of the plan, and those of the batch that is being drawn
};

// bool [n] or [n, 1].
inline Tensor flags_out(size_t n, bool column, auto fill) {
  OutBlock block;
  const int64_t lead = static_cast<int64_t>(n);
  static const std::vector<int64_t> scalar, one = {1};
  block.plan({kDLBool, 8}, &lead, 1, column ? one : scalar, n);
  block.take();
  fill(block.data(0));
  return block.make(0);
}

// Sets a bool tensor [n, ...] to true in each slice's last (or first) stored row, in place. False: it is not such a tensor.
inline bool mark_rows(const SliceBatch& batch, nb::handle tensor, bool last) {
  TensorView t;
  if (!t.of(tensor.ptr()) || t.dtype.code != kDLBool || t.ndim < 1) return false;
  int64_t width = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.strides && t.shape[d] > 1 && t.strides[d] != width) return false;
    if (d > 0) width *= t.shape[d];
  }
  if (t.shape[0] < 0 || static_cast<uint64_t>(t.shape[0]) != batch.rows()) return false;
  auto* data = const_cast<uint8_t*>(t.data);
  batch.ends([&](uint64_t first, uint64_t end) {
    std::memset(data + (last ? end : first) * static_cast<uint64_t>(width), 1, static_cast<size_t>(width));
  });
  return true;
}

inline Tensor end_flags(const SliceBatch& batch, bool last) {
  const size_t n = batch.rows();
  return flags_out(n, true, [&](uint8_t* out) {
    std::fill_n(out, n, uint8_t{0});
    batch.ends([&](uint64_t first, uint64_t end) { out[last ? end : first] = 1; });
  });
}

}  // namespace engram
