// Environments that step together: what each call gave, copied into columns [calls, n, ...], and the frames of a batch from these.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "leaves.hpp"
#include "trajectories.hpp"

namespace engram {

// numpy's class of arrays. Its children (masked arrays) may have more to them than their memory.
inline bool is_array(PyObject* o) {
  static PyObject* type = nullptr;
  return reinterpret_cast<PyObject*>(Py_TYPE(o)) == imported_once(type, "numpy", "ndarray");
}

// A numpy array as it lies in memory, whose dtype is one that tensors have.
class ArrayView {
 public:
  bool of(PyObject* o, bool writable = false) {
    return is_array(o) && buffer_.get(o, writable) && dtype_of_format(view().format, view().itemsize, dtype_);
  }
  const Py_buffer& view() const { return buffer_.view(); }
  DType dtype() const { return dtype_; }
  size_t dim(int d) const { return static_cast<size_t>(view().shape[d]); }
  bool is_row(DType dtype, size_t n) const { return dtype_ == dtype && view().ndim == 1 && dim(0) == n; }

 private:
  Buffer buffer_;
  DType dtype_{};
};

// Copies the elements of a strided array in C order.
template <typename Item>
void copy_items(uint8_t*& to, const uint8_t* from, const Py_buffer& v, int dim) {
  const Py_ssize_t stride = v.strides[dim];
  for (Py_ssize_t i = 0; i < v.shape[dim]; ++i, from += stride)
    if (dim + 1 < v.ndim) copy_items<Item>(to, from, v, dim + 1);
    else std::memcpy(to, from, sizeof(Item)), to += sizeof(Item);
}
struct Complex128 {
  uint8_t bytes[16];
};
inline void copy_array(uint8_t* to, const Py_buffer& v) {
  const auto* from = static_cast<const uint8_t*>(v.buf);
  if (v.len == 0) return;
  if (PyBuffer_IsContiguous(&v, 'C')) std::memcpy(to, from, static_cast<size_t>(v.len));
  else if (v.itemsize == 1) copy_items<uint8_t>(to, from, v, 0);
  else if (v.itemsize == 2) copy_items<uint16_t>(to, from, v, 0);
  else if (v.itemsize == 4) copy_items<uint32_t>(to, from, v, 0);
  else if (v.itemsize == 8) copy_items<uint64_t>(to, from, v, 0);
  else copy_items<Complex128>(to, from, v, 0);
}

constexpr DType kBool{kDLBool, 8}, kFloat{kDLFloat, 32}, kDouble{kDLFloat, 64}, kInt64{kDLInt, 64};

// A contiguous array [rows, n, ...] of our own.
class StepColumn {
 public:
  StepColumn(nb::handle array, bool writable, std::optional<DType> dtype = {}) {
    if (!view_.of(array.ptr(), writable) || view_.view().ndim < 2 || !PyBuffer_IsContiguous(&view_.view(), 'C') ||
        (dtype && !(view_.dtype() == *dtype)))
      throw nb::type_error("a column is a contiguous array [calls, environments, ...]");
    for (int d = 2; d < view_.view().ndim; ++d) inner_.push_back(view_.view().shape[d]);
    bytes_ = static_cast<size_t>(view_.view().itemsize);
    for (int64_t size : inner_) bytes_ *= static_cast<size_t>(size);
  }
  size_t rows() const { return view_.dim(0); }
  size_t envs() const { return view_.dim(1); }
  size_t bytes() const { return bytes_; }  // of one environment's element
  DType dtype() const { return view_.dtype(); }
  const std::vector<int64_t>& inner() const { return inner_; }
  uint8_t* row(size_t call) const { return static_cast<uint8_t*>(view_.view().buf) + call * envs() * bytes_; }
  // Whether an array has the form of one row.
  bool takes(const ArrayView& array) const {
    const Py_buffer &mine = view_.view(), &other = array.view();
    if (!(array.dtype() == view_.dtype()) || other.ndim != mine.ndim - 1) return false;
    for (int d = 0; d < other.ndim; ++d)
      if (other.shape[d] != mine.shape[d + 1]) return false;
    return true;
  }

 private:
  ArrayView view_;
  std::vector<int64_t> inner_;
  size_t bytes_;
};

// Columns [calls, n, ...] of what calls give. Row c of an observation is what the environments showed before call c.
struct StepColumns {
  std::vector<StepColumn> observations, actions;
  StepColumn reward, terminated, truncated, done, idle;

  StepColumns(nb::list shown, nb::list acted, nb::handle reward, nb::handle terminated, nb::handle truncated, nb::handle done,
              nb::handle idle, size_t n)
      : reward(reward, true, kFloat), terminated(terminated, true, kBool), truncated(truncated, true, kBool),
        done(done, true, kBool), idle(idle, true, kBool) {
    for (nb::handle column : shown) observations.emplace_back(column, true);
    for (nb::handle column : acted) actions.emplace_back(column, true);
    bool fit = this->reward.bytes() == sizeof(float);
    for (const StepColumn* flag : {&this->terminated, &this->truncated, &this->done, &this->idle}) fit = fit && flag->bytes() == 1;
    for (const StepColumn* column : by_call()) fit = fit && column->envs() == n && column->rows() >= rows();
    for (const StepColumn& column : observations) fit = fit && column.envs() == n && column.rows() > rows();
    if (!fit) throw nb::value_error("the columns are not of the same environments and calls");
  }
  size_t rows() const { return reward.rows(); }
  // The columns that have a row for each call, in the order in which batches are laid out; idle comes last.
  std::vector<const StepColumn*> by_call() const {
    std::vector<const StepColumn*> all;
    for (const StepColumn& column : actions) all.push_back(&column);
    for (const StepColumn* column : {&reward, &terminated, &truncated, &done, &idle}) all.push_back(column);
    return all;
  }
};

// Frames of one environment, number `frame` and those after it, of as many calls from `call` on.
struct FrameRun {
  size_t call, frame, frames;
};

// The first `steps` waiting frames of each environment, oldest first, as runs of calls that only one that makes no frame
// (`idle`) parts. `taken` [n] says how many frames of each were taken before.
class FrameRuns {
 public:
  FrameRuns(const StepColumn& idle, size_t calls, size_t steps, const int64_t* taken) : dropped(calls), starts_(idle.envs() + 1) {
    const size_t n = idle.envs();
    const uint8_t *flags = idle.row(0), *const end = flags + calls * n;
    std::vector<std::pair<size_t, size_t>> resets;  // call and environment
    for (const uint8_t* at = flags; at != end && (at = static_cast<const uint8_t*>(std::memchr(at, 1, static_cast<size_t>(end - at)))); ++at)
      resets.emplace_back(static_cast<size_t>(at - flags) / n, static_cast<size_t>(at - flags) % n);
    std::vector<size_t> ends(n + 1), of_env(resets.size());
    for (const auto& [call, env] : resets) ++ends[env + 1];
    for (size_t env = 0; env < n; ++env) ends[env + 1] += ends[env];
    std::vector<size_t> next(ends.begin(), ends.end() - 1);
    for (const auto& [call, env] : resets) of_env[next[env]++] = call;
    runs_.reserve(n + resets.size());
    is_even = true;
    for (size_t env = 0; env < n; ++env) {
      const size_t *reset = of_env.data() + ends[env], *const last = of_env.data() + ends[env + 1];
      size_t call = 0, skipped = taken[env] < 0 ? 0 : static_cast<size_t>(taken[env]), wanted = steps;
      for (;; ++reset) {
        const size_t stop = reset == last ? calls : *reset;
        const size_t gone = std::min(skipped, stop - call);
        skipped -= gone, call += gone;
        if (const size_t frames = std::min(wanted, stop - call)) {
          is_even = is_even && call == 0 && frames == steps;
          runs_.push_back({call, steps - wanted, frames});
          call += frames, wanted -= frames;
        }
        if (call < stop || reset == last) break;
        call = stop + 1;
      }
      if (wanted) throw nb::value_error("an environment has fewer frames");
      starts_[env + 1] = runs_.size();
      dropped = std::min(dropped, call);
    }
    for (size_t env = 0; env < n; ++env) {  // resets of the calls that have no waiting frame left
      const auto first = of_env.begin() + static_cast<ptrdiff_t>(ends[env]);
      const auto last = of_env.begin() + static_cast<ptrdiff_t>(ends[env + 1]);
      const auto before = static_cast<int64_t>(std::lower_bound(first, last, dropped) - first);
      taken_after.push_back(taken[env] + static_cast<int64_t>(steps) - static_cast<int64_t>(dropped) + before);
    }
  }
  const FrameRun* begin(size_t env) const { return runs_.data() + starts_[env]; }
  const FrameRun* end(size_t env) const { return runs_.data() + starts_[env + 1]; }
  size_t dropped;                    // calls, from the oldest on, that have no waiting frame left
  std::vector<int64_t> taken_after;  // as `taken`, without those calls
  bool is_even;                      // frame t of each environment is of call t

 private:
  std::vector<size_t> starts_;  // of each environment's runs
  std::vector<FrameRun> runs_;
};

// The last observations of episodes, which stand in for those that a reset showed: number k is that of environment `envs[k]`
// after call `calls[k]`.
class LastRows {
 public:
  LastRows(nb::handle calls, nb::handle envs, size_t n) : starts_(n + 1, 0) {
    const SlotsArg at(calls), of(envs);
    if (at.n != of.n) throw nb::value_error("one call and one environment for each last observation");
    for (size_t k = 0; k < of.n; ++k) {
      if (of.data[k] < 0 || static_cast<size_t>(of.data[k]) >= n) throw nb::index_error("no such environment");
      ++starts_[static_cast<size_t>(of.data[k]) + 1];
    }
    for (size_t env = 0; env < n; ++env) starts_[env + 1] += starts_[env];
    std::vector<size_t> next(starts_.begin(), starts_.end() - 1);
    entries_.resize(of.n);
    for (size_t k = 0; k < of.n; ++k) entries_[next[static_cast<size_t>(of.data[k])]++] = {at.data[k], k};
    for (size_t env = 0; env < n; ++env)
      for (size_t k = starts_[env] + 1; k < starts_[env + 1]; ++k)
        if (entries_[k].call <= entries_[k - 1].call) throw nb::value_error("last observations in another order than calls");
  }
  size_t size() const { return entries_.size(); }
  // Copies those of the runs' frames to [n, steps, ...] from `rows` [size(), ...], elements of so many bytes.
  void copy(uint8_t* to, size_t bytes, size_t steps, const FrameRuns& runs, const uint8_t* rows) const {
    for (size_t env = 0; env + 1 < starts_.size(); ++env, to += steps * bytes) {
      const Entry *entry = entries_.data() + starts_[env], *const end = entries_.data() + starts_[env + 1];
      for (const FrameRun* run = runs.begin(env); run != runs.end(env); ++run) {
        const auto first = static_cast<int64_t>(run->call), stop = first + static_cast<int64_t>(run->frames);
        for (; entry != end && entry->call < stop; ++entry)
          if (entry->call >= first)
            std::memcpy(to + (run->frame + static_cast<size_t>(entry->call - first)) * bytes, rows + entry->row * bytes, bytes);
      }
    }
  }

 private:
  struct Entry {
    int64_t call;
    size_t row;
  };
  std::vector<size_t> starts_;  // of each environment's entries
  std::vector<Entry> entries_;  // by environment, then call
};

// Copies the frames of the runs to [n, steps, ...], of which each lies `first_row` rows after that of its call.
template <size_t fixed>
void copy_frames(uint8_t* to, const StepColumn& column, size_t first_row, const FrameRuns& runs) {
  const size_t n = column.envs(), bytes = fixed ? fixed : column.bytes(), row_bytes = n * bytes;
  for (size_t env = 0; env < n; ++env)
    for (const FrameRun* run = runs.begin(env); run != runs.end(env); ++run) {
      const uint8_t* from = column.row(first_row + run->call) + env * bytes;
      for (size_t t = 0; t < run->frames; ++t, to += bytes, from += row_bytes) std::memcpy(to, from, bytes);
    }
}
// The same for flags of few frames, of which only those that are set are looked up; false: too many are set.
inline bool copy_rare_flags(uint8_t* to, const StepColumn& column, size_t calls, size_t steps, const FrameRuns& runs) {
  const size_t n = column.envs();
  const uint8_t *const first = column.row(0), *const end = first + calls * n;
  std::memset(to, 0, n * steps);
  size_t most = n * steps / 8;
  for (const uint8_t* at = first; at != end; ++at) {
    if (!(at = static_cast<const uint8_t*>(std::memchr(at, 1, static_cast<size_t>(end - at))))) break;
    if (most-- == 0) return false;
    const size_t call = static_cast<size_t>(at - first) / n, env = static_cast<size_t>(at - first) % n;
    const FrameRun* run = runs.begin(env);
    while (run != runs.end(env) && call >= run->call + run->frames) ++run;
    if (run != runs.end(env) && call >= run->call) to[env * steps + run->frame + call - run->call] = 1;
  }
  return true;
}
inline void copy_frames_of(uint8_t* to, const StepColumn& column, size_t first_row, const FrameRuns& runs) {
  switch (column.bytes()) {
    case 0: return;
    case 1: return copy_frames<1>(to, column, first_row, runs);
    case 4: return copy_frames<4>(to, column, first_row, runs);
    case 8: return copy_frames<8>(to, column, first_row, runs);
    case 16: return copy_frames<16>(to, column, first_row, runs);
    default: return copy_frames<0>(to, column, first_row, runs);
  }
}

// Copies what calls give into columns: row c of rewards and flags is what call c gave, row c + 1 of an observation what the
// environments showed after it. A call is a frame of each environment that it did not only reset (`idle`), and frames are
// counted in `waiting` [n]; `taken` [n] counts those of the columns that batches have taken. `over` [n] says whose episode the
// last call ended, of environments that the next call only resets then.
class StepRecorder {
 public:
  enum Result { kSomeEnd = 1, kSomeIdle = 2, kOtherForm = -1, kBeyondFloat = -2 };

  StepRecorder(CpuArray<int64_t, 1> waiting, CpuArray<int64_t, 1> taken, CpuArray<bool, 1> over)
      : waiting_(std::move(waiting)), taken_(std::move(taken)), over_(std::move(over)) {
    if (taken_.shape(0) != envs() || over_.shape(0) != envs()) throw nb::value_error("the arrays are not of the same environments");
  }
  StepRecorder(const StepRecorder&) = delete;
  size_t envs() const { return waiting_.shape(0); }

  // Records in these columns from now on. `kept`: a first call and a number of calls of the columns before, whose rows become
  // the first ones.
  void use(nb::list observations, nb::list actions, nb::handle reward, nb::handle terminated, nb::handle truncated,
           nb::handle done, nb::handle idle, std::optional<std::pair<size_t, size_t>> kept) {
    StepColumns columns(observations, actions, reward, terminated, truncated, done, idle, envs());
    if (kept) copy_calls(columns, kept->first, kept->second);
    to_ = std::make_shared<const StepColumns>(std::move(columns));
  }
  // Keeps the rows of so many calls from `first` on, which become the first ones.
  void keep(size_t first, size_t calls) { copy_calls(columns(), first, calls); }

  // Adds a call; returns whether an episode ends with it. kOtherForm: an array is not exactly of its column's form,
  // kBeyondFloat: a reward is beyond float32; the call is then not counted. Rewards are float32 or float64; `idle` None: no
  // environment.
  int add(size_t call, nb::tuple observations, nb::handle reward, nb::handle terminated, nb::handle truncated,
          nb::handle idle) {
    ArrayView resets;
    if (!idle.is_none() && !(resets.of(idle.ptr()) && resets.is_row(kBool, envs()))) return kOtherForm;
    std::vector<nb::handle> shown;
    for (nb::handle one : observations) shown.push_back(one);
    return record(call, shown.data(), shown.size(), reward, terminated, truncated, [&](uint8_t* row) {
      if (idle.is_none()) return false;
      copy_array(row, resets.view());
      return true;
    });
  }
  // Adds a call by what gymnasium's `step` of a vector environment returned, whose observation is one array, and which only
  // resets the environments whose episode the call before ended (`over`). Returns a sum of kSomeEnd and kSomeIdle, or as `add`.
  int add_result(size_t call, nb::handle result) {
    if (!PyTuple_CheckExact(result.ptr()) || PyTuple_Size(result.ptr()) != 5) return kOtherForm;
    const auto item = [&](Py_ssize_t i) { return nb::handle(PyTuple_GetItem(result.ptr(), i)); };
    const nb::handle shown = item(0);
    const size_t n = envs();
    bool* over = over_.data();
    bool resets = false;
    const int ends = record(call, &shown, 1, item(1), item(2), item(3), [&](uint8_t* row) {
      resets = n && std::memchr(over, 1, n);
      if (resets) std::memcpy(row, over, n);
      return resets;
    });
    if (ends < 0) return ends;
    const uint8_t *done = to_->done.row(call), *idle = to_->idle.row(call);
    if (ends || resets)
      for (size_t env = 0; env < n; ++env) over[env] = done[env] && !idle[env];
    return ends + (resets ? kSomeIdle : 0);
  }

  // The fewest and the most frames of an environment that no batch has taken.
  std::pair<int64_t, int64_t> waiting() const {
    if (!envs()) return {0, 0};
    const auto [least, most] = std::minmax_element(waiting_.data(), waiting_.data() + envs());
    return {*least, *most};
  }

  // Takes the first `steps` waiting frames of each environment, oldest first, out of so many calls. Returns tensors [n, steps,
  // ...]: of observations, actions, the reward, the flags terminated, truncated and done, three flags that are never set, and
  // the observations that follow; then the call of each frame, int64 [n, steps] (None unless asked for, and where frame t is
  // of call t), and how many calls, from the oldest on, have no waiting frame left. `taken` and `waiting` count without these
  // calls afterwards. `last_rows` has the arrays [k, ...] of the last observations of episodes, see `LastRows`.
  nb::tuple take(size_t calls, size_t steps, bool asks_calls, nb::handle last_calls, nb::handle last_envs, nb::list last_rows) {
    const std::shared_ptr<const StepColumns> kept = to_;  // another thread may call `use` while the GIL is released
    const StepColumns& from = columns();
    if (calls > from.rows()) throw nb::index_error("the columns have no row for these calls");
    const size_t n = envs(), shown = from.observations.size();
    const FrameRuns runs(from.idle, calls, steps, taken_.data());
    const LastRows last(last_calls, last_envs, n);
    std::vector<ArrayView> lasts(nb::len(last_rows));
    if (lasts.size() != shown) throw nb::value_error("one array of last observations for each column");
    for (size_t k = 0; k < shown; ++k)
      if (!lasts[k].of(nb::handle(last_rows[k]).ptr()) || !PyBuffer_IsContiguous(&lasts[k].view(), 'C') ||
          static_cast<size_t>(lasts[k].view().len) != last.size() * from.observations[k].bytes())
        throw nb::value_error("an array of last observations is not of its column's form");
    std::vector<const StepColumn*> laid_out;
    for (const StepColumn& column : from.observations) laid_out.push_back(&column);
    for (const StepColumn* column : from.by_call()) laid_out.push_back(column);
    laid_out.pop_back();  // idle
    const size_t present = laid_out.size(), total = present + 3 + shown;
    const std::vector<int64_t> lead{static_cast<int64_t>(n), static_cast<int64_t>(steps)};
    LeafMemory memory(total);
    for (size_t k = 0; k < total; ++k) {
      const StepColumn& column = k < present ? *laid_out[k] : k < present + 3 ? from.done : from.observations[k - present - 3];
      if (column.bytes() && n * steps > kMostBytes / column.bytes()) throw std::bad_alloc();
      memory.plan(column.dtype(), lead, column.inner(), n * steps * column.bytes());
    }
    memory.take();
    maybe_without_gil(memory.bytes() > kGilBytes, [&] {
      for (size_t k = 0; k < present; ++k)
        if (k + 3 < present || !copy_rare_flags(memory.data(k), *laid_out[k], calls, steps, runs))
          copy_frames_of(memory.data(k), *laid_out[k], 0, runs);
      for (size_t k = present; k < present + 3; ++k) std::memset(memory.data(k), 0, n * steps);
      for (size_t k = 0; k < shown; ++k) {
        uint8_t* to = memory.data(present + 3 + k);
        copy_frames_of(to, from.observations[k], 1, runs);
        if (last.size())
          last.copy(to, from.observations[k].bytes(), steps, runs, static_cast<const uint8_t*>(lasts[k].view().buf));
      }
    });
    nb::list tensors;
    for (size_t k = 0; k < total; ++k) tensors.append(memory.make(k));
    nb::object frame_calls = asks_calls && !runs.is_even ? calls_of(runs, steps) : nb::none();
    for (size_t env = 0; env < n; ++env) {
      waiting_.data()[env] -= static_cast<int64_t>(steps);
      taken_.data()[env] = runs.taken_after[env];
    }
    return nb::make_tuple(tensors, frame_calls, runs.dropped);
  }

 private:
  const StepColumns& columns() const {
    if (!to_) throw nb::value_error("there are no columns");
    return *to_;
  }
  // `reset_row` writes which environments the call only reset, if any, and returns whether it did.
  template <typename ResetRow>
  int record(size_t call, const nb::handle* observations, size_t n_observations, nb::handle reward, nb::handle terminated,
             nb::handle truncated, ResetRow reset_row) {
    if (call >= columns().rows()) throw nb::index_error("the columns have no row for this call");
    const StepColumns& to = *to_;
    const Shown shown(shown_);
    if (n_observations != to.observations.size()) return kOtherForm;
    shown_.reserve(n_observations);
    for (size_t k = 0; k < n_observations; ++k)
      if (!shown_.emplace_back().of(observations[k].ptr()) || !to.observations[k].takes(shown_[k])) return kOtherForm;
    const size_t n = envs();
    ArrayView rewards, terminations, truncations;
    if (!rewards.of(reward.ptr()) || !(rewards.is_row(kFloat, n) || rewards.is_row(kDouble, n))) return kOtherForm;
    if (!terminations.of(terminated.ptr()) || !terminations.is_row(kBool, n)) return kOtherForm;
    if (!truncations.of(truncated.ptr()) || !truncations.is_row(kBool, n)) return kOtherForm;
    if (rewards.dtype() == kFloat) copy_array(to.reward.row(call), rewards.view());
    else if (!narrow(to.reward.row(call), rewards.view())) return kBeyondFloat;
    for (size_t k = 0; k < shown_.size(); ++k) copy_array(to.observations[k].row(call + 1), shown_[k].view());
    uint8_t *terminates = to.terminated.row(call), *truncates = to.truncated.row(call), *ends = to.done.row(call);
    copy_array(terminates, terminations.view());
    copy_array(truncates, truncations.view());
    uint8_t any = 0;
    for (size_t env = 0; env < n; ++env) {  // a flag is 0 or 1 from here on, whatever byte the environment has for True
      terminates[env] = terminates[env] != 0, truncates[env] = truncates[env] != 0;
      any |= ends[env] = terminates[env] | truncates[env];
    }
    uint8_t* idle = to.idle.row(call);
    if (!reset_row(idle)) std::memset(idle, 0, n);
    int64_t* waiting = waiting_.data();
    for (size_t env = 0; env < n; ++env) waiting[env] += !(idle[env] = idle[env] != 0);
    return any ? kSomeEnd : 0;
  }
  // The views of one call's observations, which are released when the call is recorded.
  struct Shown {
    explicit Shown(std::vector<ArrayView>& views) : views(views) { views.clear(); }
    ~Shown() { views.clear(); }
    std::vector<ArrayView>& views;
  };
  // False: a finite number is beyond float32.
  static bool narrow(uint8_t* to, const Py_buffer& v) {
    const auto* from = static_cast<const uint8_t*>(v.buf);
    for (Py_ssize_t i = 0; i < v.shape[0]; ++i, from += v.strides[0], to += sizeof(float)) {
      double wide;
      std::memcpy(&wide, from, sizeof wide);
      const auto single = static_cast<float>(wide);
      if (std::isinf(single) && !std::isinf(wide)) return false;
      std::memcpy(to, &single, sizeof single);
    }
    return true;
  }
  void copy_calls(const StepColumns& to, size_t first, size_t calls) const {
    const StepColumns& from = columns();
    if (first > from.rows() || calls > from.rows() - first || calls > to.rows())
      throw nb::index_error("the columns have no row for these calls");
    const auto copy = [&](const StepColumn& target, const StepColumn& source, size_t rows) {
      if (target.bytes() != source.bytes()) throw nb::value_error("the columns are not of the same form");
      if (const size_t bytes = rows * envs() * source.bytes()) std::memmove(target.row(0), source.row(first), bytes);
    };
    const auto targets = to.by_call(), sources = from.by_call();
    if (targets.size() != sources.size() || to.observations.size() != from.observations.size())
      throw nb::value_error("the columns are not of the same form");
    for (size_t k = 0; k < targets.size(); ++k) copy(*targets[k], *sources[k], calls);
    for (size_t k = 0; k < to.observations.size(); ++k) copy(to.observations[k], from.observations[k], calls + 1);
  }
  nb::object calls_of(const FrameRuns& runs, size_t steps) const {
    const std::vector<int64_t> inner{static_cast<int64_t>(steps)};
    auto [array, data] = ArrayMaker::make(kInt64, envs(), inner, envs() * steps * sizeof(int64_t));
    auto* to = reinterpret_cast<int64_t*>(data);
    for (size_t env = 0; env < envs(); ++env)
      for (const FrameRun* run = runs.begin(env); run != runs.end(env); ++run)
        for (size_t t = 0; t < run->frames; ++t) *to++ = static_cast<int64_t>(run->call + t);
    return array;
  }
  std::shared_ptr<const StepColumns> to_;
  CpuArray<int64_t, 1> waiting_, taken_;
  CpuArray<bool, 1> over_;
  std::vector<ArrayView> shown_;
};

// The environments whose episode ends with a call, bool [n], without those that it only reset (`idle`); None: there are none.
// TypeError: the flags are not bool arrays [n].
inline nb::object ended_envs(size_t n, nb::handle terminated, nb::handle truncated, nb::handle idle) {
  ArrayView flags[3];
  const size_t given = idle.is_none() ? 2 : 3;
  const nb::handle arrays[] = {terminated, truncated, idle};
  for (size_t k = 0; k < given; ++k)
    if (!flags[k].of(arrays[k].ptr()) || !flags[k].is_row(kBool, n)) throw nb::type_error("flags are bool arrays [n]");
  const auto holds = [&](size_t k, size_t env) {
    const Py_buffer& v = flags[k].view();
    return static_cast<const uint8_t*>(v.buf)[static_cast<Py_ssize_t>(env) * v.strides[0]] != 0;
  };
  const auto ends = [&](size_t env) { return (holds(0, env) || holds(1, env)) && !(given == 3 && holds(2, env)); };
  size_t env = 0;
  while (env < n && !ends(env)) ++env;
  if (env == n) return nb::none();
  static const std::vector<int64_t> scalar;
  auto [array, data] = ArrayMaker::make(kBool, n, scalar, n);
  std::memset(data, 0, env);
  for (; env < n; ++env) data[env] = ends(env);
  return array;
}

// Choices, int64 [...] from `start` on, as one-hot vectors, int64 [..., n]. TypeError: they are no contiguous int64 array.
// IndexError: one is beyond the n choices.
inline Tensor one_hot(nb::handle choices, int64_t start, size_t n) {
  ArrayView view;
  if (!view.of(choices.ptr()) || !(view.dtype() == kInt64) || !PyBuffer_IsContiguous(&view.view(), 'C'))
    throw nb::type_error("choices are a contiguous int64 array");
  const size_t total = static_cast<size_t>(view.view().len) / sizeof(int64_t);
  if (n == 0 || total > kMostBytes / sizeof(int64_t) / n) throw std::bad_alloc();
  std::vector<int64_t> shape(view.view().shape, view.view().shape + view.view().ndim);
  const std::vector<int64_t> inner{static_cast<int64_t>(n)};
  OutBlock block;
  block.plan(kInt64, shape.data(), shape.size(), inner, total * n * sizeof(int64_t));
  block.take();
  auto* to = reinterpret_cast<int64_t*>(block.data(0));
  std::memset(to, 0, total * n * sizeof(int64_t));
  const auto* from = static_cast<const int64_t*>(view.view().buf);
  for (size_t i = 0; i < total; ++i, to += n) {
    const uint64_t choice = static_cast<uint64_t>(from[i]) - static_cast<uint64_t>(start);
    if (choice >= n) throw nb::index_error("a choice is beyond the space");
    to[choice] = 1;
  }
  return block.make(0);
}

}  // namespace engram
