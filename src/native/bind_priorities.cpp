// Python bindings of priorities: arguments are checked here, before anything changes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bare_tree.hpp"
#include "bind_episodes.hpp"
#include "bind_ranks.hpp"
#include "bind_store.hpp"
#include "bindings.hpp"
#include "priorities.hpp"
#include "priority_updates.hpp"
#include "row_draw.hpp"

namespace engram {

constexpr uint32_t kMostPlaces = uint32_t{1} << 30;

static std::string text_of(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", x);
  return text;
}

static void refuse_priority(double p, size_t at) {
  const bool large = p > 0 && std::isfinite(p);
  throw nb::value_error(("priority " + text_of(p) + " at position " + std::to_string(at) +
                         (large ? " is too large for this alpha" : ": priorities are finite and 0 or more") +
                         "; nothing was changed").c_str());
}

static void check_priorities(const Priorities& self, const NumbersArg& p) {
  for (size_t i = 0; i < p.n; ++i)
    if (!self.transform().takes(p[i])) refuse_priority(p[i], i);
}

// n priorities as float64 [n], in memory of their own. None: the argument has another form.
static std::optional<Tensor> checked_priorities(const Priorities& self, nb::handle priorities, size_t n) {
  if (!is_tensor(priorities.ptr())) return std::nullopt;
  const NumbersArg given(priorities);
  if (!given.fits() || given.n != n) return std::nullopt;
  Results out;
  out.add({kDLFloat, 64}, n);
  out.take();
  auto* const own = out.data<double>(0);
  given.copy_to(own);
  bool are_finite = true;
  double highest = 0;
  for (size_t i = 0; i < n; ++i) {
    are_finite &= own[i] >= 0 && own[i] <= std::numeric_limits<double>::max();
    highest = std::max(highest, own[i]);
  }
  if (!are_finite || !self.transform().takes(highest))  // leaves grow with priorities: the highest stands for all
    for (size_t i = 0; i < n; ++i)
      if (!self.transform().takes(own[i])) refuse_priority(own[i], i);
  return out.make(0);
}

// The rows of a store that exist, according to a follower that has just polled it.
class StoredRows {
 public:
  StoredRows(const Store& store, const Priorities& p) : geometry_(store.geometry()), slots_(store.slots()), priorities_(p) {
    for (uint64_t l = 0; l < geometry_.lanes; ++l) {
      LaneView view;
      view.published = p.seen()[l].published;
      view.first = store.lanes.lane(l).base.load(std::memory_order_relaxed);
      sequences_.emplace_back(view, geometry_.lane_capacity);
    }
  }
  // Whether all of these slots hold rows, if that can be decided quickly; false: they must be checked one by one.
  bool all_hold_rows(const int64_t* slots, size_t n) const {
    return geometry_.lanes == 1 && geometry_.envs == 1 && sequences_[0].find_all(slots, n);
  }
  // Whether the row that the caller refers to is stored: the slot's current one, or the one of this generation. Raises
  // IndexError for slots that can never have held a row.
  bool is_stored(int64_t given, const int64_t* generation) const {
    const auto slot = static_cast<uint64_t>(given);
    if (slot >= slots_) refuse(given, " lies outside 0 to " + std::to_string(slots_ - 1));
    uint64_t time = slot, lane = 0, sequence = 0;
    if (geometry_.envs > 1) time /= geometry_.envs;
    if (geometry_.lanes > 1) lane = time / geometry_.lane_capacity, time -= lane * geometry_.lane_capacity;
    const bool written = sequences_[lane].find(time, sequence);
    if (generation)
      return written && priorities_.holds(slot) && *generation >= 0 && static_cast<uint64_t>(*generation) == sequence;
    if (!written) refuse(given, " has not been written");
    return priorities_.holds(slot);
  }

 private:
  [[noreturn, gnu::noinline]] static void refuse(int64_t given, const std::string& why) {
    throw nb::index_error(("index " + std::to_string(given) + why + "; nothing was changed").c_str());
  }

  const StoreGeometry& geometry_;
  uint64_t slots_;
  const Priorities& priorities_;
  std::vector<SlotSequences> sequences_;
};

constexpr const char* kAllZero =
    "the priorities of all stored steps are 0, so that none can be drawn; give one a priority with update_priority, or "
    "the sampler an eps above 0";

// There are rows, and none can be drawn.
[[noreturn, gnu::noinline]] static void refuse_to_draw(const Store& store) {
  const uint64_t rows = store.lanes.rows() * store.geometry().envs;
  if (store.lanes.removed_rows() < rows) throw std::runtime_error(kAllZero);
  throw std::runtime_error("all " + std::to_string(rows) + " stored rows were removed; add or extend it first");
}

// Draws n rows: (slots, weights, drawn rows); None: no row is stored.
static std::optional<std::tuple<Tensor, Tensor, DrawnRows>> draw_by_priority(Priorities& self, const Store& store,
                                                                              nb::handle seed_in, size_t n, double beta,
                                                                              bool wide) {
  const SlotsArg seed(nb::borrow(seed_in));
  if (seed.n < 1) throw nb::value_error("no seed");
  Results out;
  out.add({kDLInt, 64}, n);
  out.add({kDLFloat, static_cast<uint8_t>(wide ? 64 : 32)}, n);
  out.take();
  self.poll(store);
  if (self.rows() == 0) return std::nullopt;
  if (!(self.total() > 0)) refuse_to_draw(store);
  static thread_local std::vector<double> leaves;
  leaves.resize(n);
  self.draw(static_cast<uint64_t>(seed.data[0]), out.data<int64_t>(0), leaves.data(), n);
  DrawnRows drawn = self.drawn();
  if (wide)
    self.weights(leaves.data(), beta, out.data<double>(1), n);
  else
    self.weights(leaves.data(), beta, out.data<float>(1), n);
  Tensor slots = out.make(0), weights = out.make(1);
  return std::tuple(std::move(slots), std::move(weights), std::move(drawn));
}

// Draws by priority: `draw_by_priority` of a seed from the sampler.
class PriorityDraw final : public RowDraw {
 public:
  // `follow`: a callable that gives the priorities of the storage's rows, beta, and whether weights are float64.
  PriorityDraw(nb::object sampler, nb::object lock, nb::object follow, bool wide)
      : seeds_(std::move(sampler), std::move(lock)), follow_(std::move(follow)), wide_(wide) {}
  std::optional<DType> weight_type() const override { return DType{kDLFloat, static_cast<uint8_t>(wide_ ? 64 : 32)}; }
  bool joins() const override { return true; }
  bool prepare(Store& store) override {
    if (store.lanes.rows() == 0) return false;  // before a random number is drawn
    const nb::object following = follow_();
    if (following.is_none()) return false;
    const auto [priorities, beta, wide] = nb::cast<std::tuple<nb::object, double, bool>>(following);
    if (wide != wide_) return false;  // the dtype of the weights was changed since
    const uint64_t seed = seeds_.next();
    // Assigned last, because a finaliser may also sample.
    priorities_ = priorities, beta_ = beta, seed_ = seed;
    return true;
  }
  bool draw(Store& store, size_t n, DrawnBatch& drawn) override {
    Priorities& priorities = nb::cast<Priorities&>(priorities_);
    priorities.poll(store);
    if (priorities.rows() == 0) return false;
    if (!(priorities.total() > 0)) refuse_to_draw(store);
    drawn.slots.resize(n), drawn.leaves.resize(n);
    priorities.draw(seed_, drawn.slots.data(), drawn.leaves.data(), n);
    if (!drawn.with_weights) return true;
    drawn.weights.resize(n * (wide_ ? sizeof(double) : sizeof(float)));
    if (wide_)
      priorities.weights(drawn.leaves.data(), beta_, reinterpret_cast<double*>(drawn.weights.data()), n);
    else
      priorities.weights(drawn.leaves.data(), beta_, reinterpret_cast<float*>(drawn.weights.data()), n);
    return true;
  }

 private:
  SeedSource seeds_;
  nb::object follow_, priorities_;
  bool wide_;
  double beta_ = 0;
  uint64_t seed_ = 0;
};

// Positions in the batch whose rows differ from the drawn ones by now; None: there are none.
static nb::object stale_places(const DrawnRows& drawn, const Store& store, nb::handle slots_in) {
  if (drawn.lasts(store)) return nb::none();
  const SlotsArg slots(nb::borrow(slots_in));
  return positions(drawn.stale(store, slots.data, slots.n));
}

// Opens the starts of slices that a rule allows, up to the newest row and trajectory that were polled.
static void open_starts(Priorities& self, const Store& store, const EpisodeIndex& index, const SliceRule& rule) {
  if (!self.draws_starts()) throw nb::value_error("these are priorities of steps, not of starts of slices");
  self.open_starts(store, index, rule.length - rule.after, rule.min_length);
}

// Polls the new rows, and opens the starts of slices that a rule allows.
static void poll_starts(Priorities& self, Store& store, Episodes& episodes, const SliceRule& rule, nb::handle fetch) {
  episodes.with_index(store, rule, fetch, [&](const EpisodeIndex& index, const SliceBatch&) {
    self.poll(store);
    open_starts(self, store, index, rule);
  });
}

// Draws slices whose starts are drawn by priority; None: no row can be a start.
static std::optional<SliceBatch> draw_starts(Priorities& self, Store& store, Episodes& episodes, const SliceRule& rule,
                                             nb::handle seed_in, size_t n, nb::handle fetch) {
  const SlotsArg seed(nb::borrow(seed_in));
  if (seed.n < 1) throw nb::value_error("no seed");
  if (n > kMostBytes / 8) throw std::bad_alloc();
  const auto first = static_cast<uint64_t>(seed.data[0]);
  return episodes.with_index(store, rule, fetch, [&](const EpisodeIndex& index, SliceBatch batch) -> std::optional<SliceBatch> {
    self.poll(store);
    open_starts(self, store, index, rule);
    if (!(self.total() > 0)) {
      if (index.longest() < rule.min_length) return std::nullopt;
      if (store.lanes.some_removed()) Episodes::throw_all_removed();
      refuse_to_draw(store);
    }
    std::vector<int64_t> slots(n);
    std::vector<double> leaves(n);
    self.draw(first, slots.data(), leaves.data(), n);
    const StoreGeometry& s = store.geometry();
    const bool some_removed = store.lanes.some_removed();
    uint64_t again = 0;
    for (size_t i = 0; i < n;) {
      const int64_t slot = slots[i];
      const uint64_t time = static_cast<uint64_t>(slot) / s.envs, lane = time / s.lane_capacity;
      const uint64_t env = static_cast<uint64_t>(slot) % s.envs;
      uint64_t sequence = 0;
      Trajectory t;
      if (!SlotSequences(index.indexed(lane), s.lane_capacity).find(time % s.lane_capacity, sequence) ||
          !index.find(lane * s.envs + env, sequence, t))
        return std::nullopt;  // overwritten after the index was updated
      // A window that starts at the first row may begin ahead of the trajectory.
      const uint64_t ahead = sequence == t.start && rule.before ? below(random_at(mix64(first), i), rule.before + 1) : 0;
      const Slice slice = slice_of(rule, t, static_cast<int64_t>(sequence) - static_cast<int64_t>(ahead));
      if (some_removed && has_removed(store.lanes, slice)) {
        if (++again % Episodes::kStartTries == 0 && again >= Episodes::kStartTries * (i + 1)) {
          EligibleTrajectories all(rule);
          all.follow(index);
          if (!(all.left(store.lanes, index, rule) > 0)) Episodes::throw_all_removed();
          Episodes::throw_removed(static_cast<double>(again) / static_cast<double>(again + i + 1));
        }
        self.draw(mix64(first ^ mix64(again)), &slots[i], &leaves[i], 1);
        continue;
      }
      batch.slices.push_back(slice);
      ++i;
    }
    return batch;
  });
}
// The weight of each row of a batch, which is that of its slice's start.
static Tensor start_weights(const Priorities& self, const SliceBatch& batch, double beta, bool wide) {
  Results out;
  out.add({kDLFloat, static_cast<uint8_t>(wide ? 64 : 32)}, batch.rows());
  out.take();
  std::vector<double> leaves, of_slices(batch.slices.size());
  for (const Slice& slice : batch.slices) {
    const double leaf = self.leaf(slot_of(batch.geometry, slice.lane, slice.first, slice.env));
    leaves.push_back(leaf == 0 ? self.lowest() : leaf);  // 0: overwritten since the draw
  }
  self.weights(leaves.data(), beta, of_slices.data(), leaves.size());
  auto fill = [&](auto* at) {
    for (size_t i = 0; i < of_slices.size(); ++i)
      at = std::fill_n(at, batch.slices[i].size(), static_cast<std::remove_reference_t<decltype(*at)>>(of_slices[i]));
  };
  wide ? fill(out.data<double>(0)) : fill(out.data<float>(0));
  return out.make(0);
}

// New priorities, with their leaves.
struct PriorityChanges {
  std::vector<int64_t> slots;  // set by `keep_stored`
  std::vector<double> priorities, leaves;

  // Raises, before any change, where a value is not a priority.
  void take(const NumbersArg& given, const PriorityTransform& transform) {
    const size_t n = given.n;
    priorities.resize(n), leaves.resize(n);
    given.copy_to(priorities.data());
    for (size_t i = 0; i < n; ++i) leaves[i] = priorities[i] > kZeroPriority ? priorities[i] : kZeroPriority;
    transform.leaves(leaves.data(), n);
    const auto is_refused = [this](size_t i) -> uint64_t {
      const double p = priorities[i];
      return !(p >= 0) | !(p <= std::numeric_limits<double>::max()) | !(leaves[i] <= kMostLeaf);
    };
    uint64_t refused = 0;
    for (size_t i = 0; i < n; ++i) refused |= is_refused(i);
    for (size_t i = 0; refused && i < n; ++i)
      if (is_refused(i)) refuse_priority(priorities[i], i);
  }
  // Keeps the priorities of stored rows; returns the number of the others.
  uint64_t keep_stored(const StoredRows& stored, const SlotsArg& given, const int64_t* generations) {
    slots.assign(given.data, given.data + given.n);
    size_t n = 0;
    for (size_t i = 0; i < given.n; ++i) {
      if (!stored.is_stored(slots[i], generations ? generations + i : nullptr)) continue;
      slots[n] = slots[i], priorities[n] = priorities[i], leaves[n] = leaves[i];
      ++n;
    }
    slots.resize(n);
    return given.n - n;
  }
};

// Sets priorities. False: the arguments are not plain 1-D tensors or arrays of one length.
static bool set_priorities(Priorities& self, const Store& store, nb::handle slots_in, nb::handle priorities_in,
                           nb::handle generations_in) {
  const NumbersArg priorities(priorities_in);
  if (!priorities.fits()) return false;
  std::optional<SlotsArg> slots, generations;
  try {
    slots.emplace(nb::borrow(slots_in));
    if (!generations_in.is_none()) generations.emplace(nb::borrow(generations_in));
  } catch (const nb::builtin_exception&) {
    return false;
  }
  if (slots->n != priorities.n || (generations && generations->n != slots->n)) return false;
  self.poll(store);
  const StoredRows stored(store, self);
  static thread_local PriorityChanges all_changes;
  PriorityChanges& changes = all_changes;
  changes.take(priorities, self.transform());
  if (generations || !stored.all_hold_rows(slots->data, slots->n)) {
    self.skip(changes.keep_stored(stored, *slots, generations ? generations->data : nullptr));
    self.set(changes.slots.data(), changes.priorities.data(), changes.leaves.data(), changes.slots.size());
  } else {
    self.set(slots->data, changes.priorities.data(), changes.leaves.data(), slots->n);
  }
  return true;
}

// Gives rows the priority of new ones.
static void mark_priorities(Priorities& self, const Store& store, nb::handle slots_in) {
  const SlotsArg slots{nb::borrow(slots_in)};
  self.poll(store);
  const StoredRows stored(store, self);
  const double priority = self.new_priority(), leaf = self.transform().leaf(priority);
  std::vector<int64_t> changed;
  for (size_t i = 0; i < slots.n; ++i)
    if (stored.is_stored(slots.data[i], nullptr)) changed.push_back(slots.data[i]);
  const std::vector<double> priorities(changed.size(), priority), leaves(changed.size(), leaf);
  self.set(changed.data(), priorities.data(), leaves.data(), changed.size());
}

// Priorities of slots; -1 where a slot holds no row.
static Tensor priorities_of(Priorities& self, const Store& store, nb::handle slots_in) {
  const SlotsArg slots{nb::borrow(slots_in)};
  Results out;
  out.add({kDLFloat, 64}, slots.n);
  out.take();
  self.poll(store);
  for (size_t i = 0; i < slots.n; ++i) {
    const auto slot = static_cast<uint64_t>(slots.data[i]);
    if (slot >= store.slots()) refuse_slots(store);
    out.data<double>(0)[i] = self.holds(slot) ? self.priority(slot) : -1;
  }
  return out.make(0);
}

// The leaves of slots in the sum tree, which are the weights of the draws; 0 where a slot cannot be drawn.
static Tensor leaves_of(Priorities& self, const Store& store, nb::handle slots_in) {
  const SlotsArg slots{nb::borrow(slots_in)};
  Results out;
  out.add({kDLFloat, 64}, slots.n);
  out.take();
  self.poll(store);
  for (size_t i = 0; i < slots.n; ++i) {
    const auto slot = static_cast<uint64_t>(slots.data[i]);
    if (slot >= store.slots()) refuse_slots(store);
    out.data<double>(0)[i] = self.leaf(slot);
  }
  return out.make(0);
}

using SeenRows = std::vector<std::pair<uint64_t, uint64_t>>;

// The state: (rows seen of each lane, highest, latest, skipped, priorities of these rows in the order of age).
static std::tuple<SeenRows, double, double, uint64_t, Tensor> priorities_state(Priorities& self, const Store& store) {
  self.poll(store);
  const Priorities::State state = self.state();
  uint64_t rows = 0;
  for (auto [first, published] : state.seen) rows += published - first;
  Results out;
  out.add({kDLFloat, 64}, rows * store.geometry().envs);
  out.take();
  auto* at = out.data<double>(0);
  Priorities::each_row(store.geometry(), state.seen,
                       [&](uint64_t, uint64_t, uint64_t slot) { *at++ = self.priority(slot); });
  return {state.seen, state.highest, state.latest, state.skipped, out.make(0)};
}

// The same, of this moment, with a snapshot in place of the priorities.
static std::tuple<SeenRows, double, double, uint64_t, std::shared_ptr<PrioritySnapshot>> freeze_priorities(Priorities& self,
                                                                                                           const Store& store) {
  self.poll(store);
  if (self.frozen()) throw std::runtime_error("these priorities are being saved; wait for that save's result()");
  const Priorities::State state = self.state();
  return {state.seen, state.highest, state.latest, state.skipped, self.freeze(store.geometry())};
}

static Tensor read_snapshot(PrioritySnapshot& self) {
  const uint64_t n = self.rows();
  Results out;
  out.add({kDLFloat, 64}, n);
  out.take();
  maybe_without_gil(n * sizeof(double) > kGilBytes, [&] { self.read(out.data<double>(0)); });
  return out.make(0);
}

static void resume_priorities(Priorities& self, const Store& store, const SeenRows& seen, double highest, double latest,
                              uint64_t skipped, nb::handle priorities_in) {
  const NumbersArg priorities(priorities_in);
  std::vector<double> own;
  unsigned __int128 rows = 0;
  for (auto [first, published] : seen) {
    if (published < first) throw nb::value_error("a saved lane ends before it begins");
    rows += published - first;
  }
  if (!priorities.fits() || rows * store.geometry().envs != priorities.n)
    throw nb::value_error("the saved state must have one priority for each row");
  check_priorities(self, priorities);
  if (!self.transform().takes(highest) || !self.transform().takes(latest))
    throw nb::value_error("the saved highest priority is not a priority");
  for (size_t i = 0; i < priorities.n; ++i) own.push_back(priorities[i]);
  self.resume(store, {seen, highest, latest, skipped}, own.data());
}

static void use_transform(Priorities& self, double alpha, double eps) {
  const PriorityTransform next{alpha, eps};
  if (!next.takes(self.highest_seen()))
    throw nb::value_error(("alpha=" + text_of(alpha) + " makes the priority " + text_of(self.highest_seen()) +
                           " too large to be summed").c_str());
  if (!next.same(self.transform())) self.use(next);
}

void bind_episodes(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<SliceRule>(m, "SliceRule")
      .def("__init__", [](SliceRule* rule, uint64_t length, uint64_t min_length, uint64_t before, uint64_t after,
                          bool pad, bool by_window, bool pad_behind) {
        if (length > kMostBytes)
          throw nb::value_error(("a slice of " + std::to_string(length) + " rows is longer than any memory").c_str());
        if (length < 1 || min_length < 1 || before >= length || after >= length)
          throw nb::value_error("a slice has at least one row, and its window at least one stored row");
        if (pad && pad_behind) throw nb::value_error("padding stands around the rows or behind them");
        const SliceRule checked{length, min_length, before, after, pad, by_window, pad_behind};
        if (by_window && min_length <= kMostBytes && static_cast<int64_t>(min_length) + checked.more_windows() < 1)
          throw nb::value_error("by_window each trajectory that is long enough has a window");
        new (rule) SliceRule(checked);
      }, "length"_a, "min_length"_a, "before"_a = 0, "after"_a = 0, "pad"_a = false, "by_window"_a = false,
         "pad_behind"_a = false)
      .def_ro("length", &SliceRule::length)
      .def_ro("min_length", &SliceRule::min_length);
  nb::class_<SliceBatch>(m, "SliceBatch")
      .def("__len__", [](const SliceBatch& b) { return b.slices.size(); })
      .def_prop_ro("rows", &SliceBatch::rows)
      .def("slots", [](const SliceBatch& b) { return slots_out(b.rows(), [&](int64_t* out) { b.slots(out); }); })
      .def("ids", [](const SliceBatch& b) { return slots_out(b.rows(), [&](int64_t* out) { b.ids(out); }); })
      .def("mask", [](const SliceBatch& b) { return flags_out(b.rows(), false, [&](uint8_t* out) { b.mask(out); }); })
      .def("first", [](const SliceBatch& b) { return end_flags(b, false); })
      .def("last", [](const SliceBatch& b) { return end_flags(b, true); })
      .def("mark_first", [](const SliceBatch& b, nb::handle t) { return mark_rows(b, t, false); }, "tensor"_a)
      .def("mark_last", [](const SliceBatch& b, nb::handle t) { return mark_rows(b, t, true); }, "tensor"_a)
      .def_ro("rule", &SliceBatch::rule)
      .def("replaced", [](const SliceBatch& old, const std::vector<uint64_t>& which, const SliceBatch& fresh) {
        if (which.size() != fresh.slices.size()) throw nb::value_error("one fresh slice for each that is replaced");
        SliceBatch batch = fresh;
        batch.slices = old.slices;
        for (size_t i = 0; i < which.size(); ++i) batch.slices.at(which[i]) = fresh.slices[i];
        return batch;
      }, "which"_a, "fresh"_a)
      .def("without", [](const SliceBatch& all, const std::vector<uint64_t>& which) {
        SliceBatch batch = all;
        batch.slices.clear();
        for (uint64_t i = 0; i < all.slices.size(); ++i)
          if (std::find(which.begin(), which.end(), i) == which.end()) batch.slices.push_back(all.slices[i]);
        return batch;
      }, "which"_a)
      .def("stale", [](const SliceBatch& b, const Store& s, nb::handle) -> std::optional<std::vector<uint32_t>> {
        std::vector<uint32_t> places = b.stale(s);
        return places.empty() ? std::nullopt : std::optional(std::move(places));
      }, "store"_a, "slots"_a = nb::none());  // the signature of DrawnRows, which needs the slots
  nb::class_<SliceEpoch>(m, "SliceEpoch")
      .def("__init__", [](SliceEpoch* epoch, uint64_t key, bool shuffle, std::vector<uint64_t> counts,
                          std::vector<int64_t> lasts) {
        uint64_t total = 0;
        for (uint64_t n : counts)
          if (n > kMostBytes || (total += n) > kMostBytes) throw nb::value_error("an epoch beyond any memory");
        if (counts.size() != lasts.size()) throw nb::value_error("a last row for each environment");
        new (epoch) SliceEpoch(key, shuffle, std::move(counts), std::move(lasts));
      }, "key"_a, "shuffle"_a, "counts"_a, "lasts"_a)
      .def("__len__", &SliceEpoch::size)
      .def("rest", [](const SliceEpoch& e, uint64_t position) {
        return slots_out(e.size() - std::min(position, e.size()), [&](int64_t* out) { e.rest(position, out); });
      }, "position"_a)
      .def_ro("counts", &SliceEpoch::counts)
      .def_ro("lasts", &SliceEpoch::lasts);
  nb::class_<Episodes>(m, "Episodes")
      .def(nb::init<bool, std::optional<uint64_t>, uint64_t>(), "by_id"_a, "offset"_a.none(), "bytes"_a)
      .def("draw", nb::overload_cast<Store&, const SliceRule&, nb::handle, size_t, nb::handle>(&Episodes::draw), "store"_a,
           "rule"_a, "seed"_a, "n"_a, "fetch"_a.none() = nb::none())
      .def("newest", &Episodes::newest, "store"_a, "rule"_a, "n"_a, "fetch"_a.none() = nb::none())
      .def("choices", &Episodes::choices, "store"_a, "rule"_a, "fetch"_a.none() = nb::none())
      .def("trajectories", &Episodes::trajectories, "store"_a, "fetch"_a.none() = nb::none())
      .def("trajectories_and_rows", &Episodes::trajectories_and_rows, "store"_a, "fetch"_a.none() = nb::none())
      .def("longest", &Episodes::longest, "store"_a, "fetch"_a.none() = nb::none())
      .def("begin_epoch", &Episodes::begin_epoch, "store"_a, "rule"_a, "key"_a, "shuffle"_a,
           "fetch"_a.none() = nb::none())
      .def("take", &Episodes::take, "store"_a, "rule"_a, "epoch"_a, "position"_a, "seed"_a, "n"_a, "least"_a,
           "fetch"_a.none() = nb::none());
  nb::class_<SliceDraw, RowDraw>(m, "SliceDraw")
      .def(nb::init<nb::object, nb::object, nb::object, nb::tuple>(), "sampler"_a, "lock"_a, "planned"_a, "watched"_a);
}

void bind_priorities(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<PrioritySnapshot>(m, "PrioritySnapshot").def("read", &read_snapshot);
  nb::class_<Priorities>(m, "Priorities")
      .def(nb::init<double, double, bool, bool>(), "alpha"_a, "eps"_a, "within_buffer"_a, "starts"_a = false)
      .def("draw_starts", &draw_starts, "store"_a, "episodes"_a, "rule"_a, "seed"_a, "n"_a,
           "fetch"_a.none() = nb::none())
      .def("poll_starts", &poll_starts, "store"_a, "episodes"_a, "rule"_a, "fetch"_a.none() = nb::none())
      .def("start_weights", &start_weights, "batch"_a, "beta"_a, "wide"_a)
      .def("draw", &draw_by_priority, "store"_a, "seed"_a, "n"_a, "beta"_a, "wide"_a)
      .def("poll", &Priorities::poll, "store"_a)
      .def("set", &set_priorities, "store"_a, "slots"_a, "priorities"_a, "generations"_a.none() = nb::none())
      .def("raise_new", [](Priorities& self, const Store& store, double priority) {
        if (!self.transform().takes(priority))
          throw nb::value_error(("priority " + text_of(priority) +
                                 ": priorities are finite, 0 or more, and not too large for alpha; nothing was changed").c_str());
        self.poll(store);  // rows that are stored already get the priorities that they would have if they had been followed
        self.raise_new(priority);
      }, "store"_a, "priority"_a)
      .def("mark", &mark_priorities, "store"_a, "slots"_a)
      .def("check", [](const Priorities& self, nb::handle priorities) {
        const NumbersArg given(priorities);
        if (!given.fits()) throw nb::type_error("priorities must be contiguous float32 or float64");
        check_priorities(self, given);
      }, "priorities"_a)
      .def("checked", &checked_priorities, "priorities"_a, "n"_a)
      .def("of", &priorities_of, "store"_a, "slots"_a)
      .def("leaves", &leaves_of, "store"_a, "slots"_a)
      .def("use", &use_transform, "alpha"_a, "eps"_a)
      .def("forget", &Priorities::forget)
      .def("state", &priorities_state, "store"_a)
      .def("freeze", &freeze_priorities, "store"_a)
      .def("resume", &resume_priorities, "store"_a, "seen"_a, "highest"_a, "latest"_a, "skipped"_a, "priorities"_a)
      .def_prop_ro("new_priority", &Priorities::new_priority)
      .def_prop_ro("skipped", &Priorities::skipped)
      .def_prop_ro("total", &Priorities::total)
      .def_prop_ro("lowest", &Priorities::lowest);
  nb::class_<PriorityDraw, RowDraw>(m, "PriorityDraw")
      .def(nb::init<nb::object, nb::object, nb::object, bool>(), "sampler"_a, "lock"_a, "follow"_a, "wide"_a);
  nb::class_<DrawnRows>(m, "DrawnRows")
      .def("stale", &stale_places, "store"_a, "slots"_a)
      .def("replace", [](DrawnRows& drawn, const std::vector<uint32_t>& places, const DrawnRows& fresh) {
        for (uint32_t place : places)
          if (place > kMostPlaces) throw nb::value_error("a place beyond any batch");
        drawn.replace(places, fresh);
      }, "places"_a, "fresh"_a);
}

void bind_ranks(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<RankHeap>(m, "RankHeap")
      .def(nb::init<uint64_t>(), "capacity"_a)
      .def_prop_ro("capacity", &RankHeap::capacity)
      .def("behind", &heap_behind, "store"_a)
      .def("put", &heap_put, "slots"_a, "values"_a, "reduction"_a)
      .def("place", &heap_place, "store"_a.none(), "values"_a, "reduction"_a)
      .def("undo", &RankHeap::undo)
      .def("written", [](RankHeap& heap, const Store& store) {
        const LaneView view = store.lanes.view(0);
        try {
          heap.follower().resume(store, {{view.first, view.published}});
        } catch (const std::bad_alloc&) {
          heap.follower().forget();  // the rows are written: the next poll reads all ranks again
        }
      }, "store"_a)
      .def("forget", [](RankHeap& heap) {
        heap.follower().forget();
        heap.clear();
      });
  m.def("ranks", [](nb::handle values, const char* reduction) {
    return ranks_of(values, reduction_of(reduction));
  }, "values"_a, "reduction"_a);
}

void bind_priority_updates(nb::module_& m) {
  using namespace nb::literals;
  m.def("copy_updates", &copy_updates, "index"_a, "priority"_a, "generation"_a.none(), "end"_a);
  m.def("divide_updates", &divide_updates, "updates"_a, "capacity"_a, "shards"_a);
}

void bind_priorities_testing(nb::module_& m) {
  using namespace nb::literals;
  m.def("all_powers", &all_powers, "values"_a, "exponent"_a);
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
