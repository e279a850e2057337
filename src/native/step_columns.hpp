// Environments that step together: what each call gave, copied into columns [calls, n, ...], and the frames of a batch from these.
#pragma once
#include <nanobind/nanobind.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bind_store.hpp"
#include "trajectories.hpp"

namespace engram {

// numpy's class of arrays. Its children (masked arrays) may have more to them than their memory.
inline bool is_array(PyObject* o) {
  static PyObject* type = nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr();
  return reinterpret_cast<PyObject*>(Py_TYPE(o)) == type;
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
  std::vector<StepColumn> observations;
  StepColumn reward, terminated, truncated, done, idle;
};

// Copies what calls give into columns: row c of rewards and flags is what call c gave, row c + 1 of an observation what the
// environments showed after it. A call is a frame of each environment that it did not only reset (`idle`), and frames are
// counted in `waiting` [n].
class StepRecorder {
 public:
  enum Result { kNoneEnds = 0, kSomeEnd = 1, kOtherForm = -1, kBeyondFloat = -2 };

  StepRecorder(nb::list observations, nb::handle reward, nb::handle terminated, nb::handle truncated, nb::handle done,
               nb::handle idle, CpuArray<int64_t, 1> waiting)
      : to_{{}, {reward, true, kFloat}, {terminated, true, kBool}, {truncated, true, kBool}, {done, true, kBool},
            {idle, true, kBool}},
        waiting_(std::move(waiting)) {
    to_.observations.reserve(nb::len(observations));
    for (nb::handle column : observations) to_.observations.emplace_back(column, true);
    shown_.reserve(to_.observations.size());
    const size_t n = to_.reward.envs(), calls = to_.reward.rows();
    bool fit = waiting_.shape(0) == n && to_.reward.bytes() == sizeof(float);
    for (const StepColumn* flag : {&to_.terminated, &to_.truncated, &to_.done, &to_.idle})
      fit = fit && flag->envs() == n && flag->rows() >= calls && flag->bytes() == 1;
    for (const StepColumn& column : to_.observations) fit = fit && column.envs() == n && column.rows() > calls;
    if (!fit) throw nb::value_error("the columns are not of the same environments and calls");
  }
  // Returns whether an episode ends with the call. kOtherForm: an array is not exactly of its column's form, kBeyondFloat: a
  // reward is beyond float32; the call is then not counted. Rewards are float32 or float64; `idle` None: no environment.
  int add(size_t call, nb::tuple observations, nb::handle reward, nb::handle terminated, nb::handle truncated,
          nb::handle idle) {
    if (call >= to_.reward.rows()) throw nb::index_error("the columns have no row for this call");
    const Shown shown(shown_);
    if (nb::len(observations) != to_.observations.size()) return kOtherForm;
    for (size_t k = 0; k < to_.observations.size(); ++k)
      if (!shown_.emplace_back().of(nb::handle(observations[k]).ptr()) || !to_.observations[k].takes(shown_[k]))
        return kOtherForm;
    const size_t n = to_.reward.envs();
    ArrayView rewards, terminations, truncations, resets;
    if (!rewards.of(reward.ptr()) || !(rewards.is_row(kFloat, n) || rewards.is_row(kDouble, n))) return kOtherForm;
    if (!terminations.of(terminated.ptr()) || !terminations.is_row(kBool, n)) return kOtherForm;
    if (!truncations.of(truncated.ptr()) || !truncations.is_row(kBool, n)) return kOtherForm;
    if (!idle.is_none() && !(resets.of(idle.ptr()) && resets.is_row(kBool, n))) return kOtherForm;
    if (rewards.dtype() == kFloat) copy_array(to_.reward.row(call), rewards.view());
    else if (!narrow(to_.reward.row(call), rewards.view())) return kBeyondFloat;
    for (size_t k = 0; k < shown_.size(); ++k) copy_array(to_.observations[k].row(call + 1), shown_[k].view());
    uint8_t *terminates = to_.terminated.row(call), *truncates = to_.truncated.row(call), *ends = to_.done.row(call);
    copy_array(terminates, terminations.view());
    copy_array(truncates, truncations.view());
    uint8_t any = 0;
    for (size_t env = 0; env < n; ++env) any |= ends[env] = terminates[env] | truncates[env];
    count(to_.idle.row(call), idle.is_none() ? nullptr : &resets.view());
    return any ? kSomeEnd : kNoneEnds;
  }

 private:
  // The views of one call's observations, which are released when the call is recorded.
  struct Shown {
    explicit Shown(std::vector<ArrayView>& views) : views(views) { views.clear(); }
    ~Shown() { views.clear(); }
    std::vector<ArrayView>& views;
  };
  void count(uint8_t* row, const Py_buffer* resets) {
    const size_t n = to_.reward.envs();
    if (resets) copy_array(row, *resets);
    else std::memset(row, 0, n);
    int64_t* waiting = waiting_.data();
    for (size_t env = 0; env < n; ++env) waiting[env] += !row[env];
  }
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
  StepColumns to_;
  CpuArray<int64_t, 1> waiting_;
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
  struct Entry {
    int64_t call;
    size_t row;
  };
  const Entry* begin(size_t env) const { return entries_.data() + starts_[env]; }
  const Entry* end(size_t env) const { return entries_.data() + starts_[env + 1]; }

 private:
  std::vector<size_t> starts_;  // of each environment's entries
  std::vector<Entry> entries_;  // by environment, then call
};

// Copies frame t of each environment, which is of call `calls[env * steps + t]` (null: of call t), to [n, steps, ...].
template <size_t fixed, bool with_last>
void copy_frames(uint8_t* to, const StepColumn& column, size_t first_row, size_t steps, const int64_t* calls,
                 const LastRows* last, const uint8_t* last_rows) {
  const size_t n = column.envs(), bytes = fixed ? fixed : column.bytes(), row_bytes = n * column.bytes();
  for (size_t env = 0; env < n; ++env) {
    const uint8_t* from = column.row(first_row) + env * bytes;
    const LastRows::Entry* entry = with_last ? last->begin(env) : nullptr;
    const LastRows::Entry* const end = with_last ? last->end(env) : nullptr;
    for (size_t t = 0; t < steps; ++t, to += bytes) {
      const size_t call = calls ? static_cast<size_t>(calls[env * steps + t]) : t;
      const uint8_t* row = from + call * row_bytes;
      if constexpr (with_last) {
        while (entry != end && entry->call < static_cast<int64_t>(call)) ++entry;
        if (entry != end && entry->call == static_cast<int64_t>(call)) row = last_rows + entry->row * bytes;
      }
      std::memcpy(to, row, bytes);
    }
  }
}
inline void copy_frames_of(uint8_t* to, const StepColumn& column, size_t first_row, size_t steps, const int64_t* calls,
                           const LastRows* last, const uint8_t* last_rows) {
  const auto copy = [&](auto size) {
    if (last && last->size()) copy_frames<size(), true>(to, column, first_row, steps, calls, last, last_rows);
    else copy_frames<size(), false>(to, column, first_row, steps, calls, nullptr, nullptr);
  };
  switch (column.bytes()) {
    case 0: return;
    case 1: return copy(std::integral_constant<size_t, 1>{});
    case 4: return copy(std::integral_constant<size_t, 4>{});
    case 8: return copy(std::integral_constant<size_t, 8>{});
    case 16: return copy(std::integral_constant<size_t, 16>{});
    default: return copy(std::integral_constant<size_t, 0>{});
  }
}

// The frames of a batch as tensors [n, steps, ...]: one of each column, of the rows of the frames' calls, then one of each of
// `following`, of the rows after those. `calls` [n, steps] says which call each frame is of; None: frame t is of call t. For
// `following`, `last_rows` has the arrays [k, ...] of the last observations of episodes, see `LastRows`.
inline nb::list lay_out_frames(nb::list columns, nb::list following, size_t steps, nb::handle calls, nb::handle last_calls,
                               nb::handle last_envs, nb::list last_rows) {
  std::vector<StepColumn> all;
  const size_t present = nb::len(columns), total = present + nb::len(following);
  all.reserve(total);
  for (nb::handle column : columns) all.emplace_back(column, false);
  for (nb::handle column : following) all.emplace_back(column, false);
  if (all.empty()) return nb::list();
  const size_t n = all[0].envs();
  ArrayView frames;
  const int64_t* numbers = nullptr;
  auto highest = static_cast<int64_t>(steps) - 1;
  if (!calls.is_none()) {
    if (!frames.of(calls.ptr()) || !(frames.dtype() == kInt64) || frames.view().ndim != 2 || frames.dim(0) != n ||
        frames.dim(1) != steps || !PyBuffer_IsContiguous(&frames.view(), 'C'))
      throw nb::type_error("calls are a contiguous int64 array [environments, steps]");
    numbers = static_cast<const int64_t*>(frames.view().buf);
    highest = -1;
    for (size_t i = 0; i < n * steps; ++i) {
      if (numbers[i] < 0) throw nb::index_error("no such call");
      highest = std::max(highest, numbers[i]);
    }
  }
  for (size_t k = 0; k < total; ++k)
    if (all[k].envs() != n || static_cast<int64_t>(all[k].rows()) - (k >= present) <= highest)
      throw nb::index_error("the columns are of other environments or have no row of a call");
  const LastRows last(last_calls, last_envs, n);
  std::vector<ArrayView> lasts(nb::len(last_rows));
  if (lasts.size() != total - present) throw nb::value_error("one array of last observations for each column");
  for (size_t k = 0; k < lasts.size(); ++k)
    if (!lasts[k].of(nb::handle(last_rows[k]).ptr()) || !PyBuffer_IsContiguous(&lasts[k].view(), 'C') ||
        static_cast<size_t>(lasts[k].view().len) != last.size() * all[present + k].bytes())
      throw nb::value_error("an array of last observations is not of its column's form");
  const std::vector<int64_t> lead{static_cast<int64_t>(n), static_cast<int64_t>(steps)};
  LeafMemory memory(total);
  for (const StepColumn& column : all) {
    if (column.bytes() && n * steps > kMostBytes / column.bytes()) throw std::bad_alloc();
    memory.plan(column.dtype(), lead, column.inner(), n * steps * column.bytes());
  }
  memory.take();
  maybe_without_gil(memory.bytes() > kGilBytes, [&] {
    for (size_t k = 0; k < total; ++k) {
      const bool is_next = k >= present;
      const auto* rows = is_next ? static_cast<const uint8_t*>(lasts[k - present].view().buf) : nullptr;
      copy_frames_of(memory.data(k), all[k], is_next, steps, numbers, is_next ? &last : nullptr, rows);
    }
  });
  nb::list tensors;
  for (size_t k = 0; k < total; ++k) tensors.append(memory.make(k));
  return tensors;
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

inline void bind_step_columns(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<StepRecorder>(m, "StepRecorder")
      .def(nb::init<nb::list, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, CpuArray<int64_t, 1>>(),
           "observations"_a, "reward"_a, "terminated"_a, "truncated"_a, "done"_a, "idle"_a, "waiting"_a.noconvert())
      .def("add", &StepRecorder::add, "call"_a, "observations"_a, "reward"_a.none(), "terminated"_a.none(),
           "truncated"_a.none(), "idle"_a.none());
  m.def("ended_envs", &ended_envs, "n"_a, "terminated"_a.none(), "truncated"_a.none(), "idle"_a.none() = nb::none(),
        nb::sig("def ended_envs(n: int, terminated: object | None, truncated: object | None, idle: object | None = None) -> "
                "numpy.typing.NDArray[numpy.bool_] | None"));
  m.def("one_hot", &one_hot, "choices"_a, "start"_a, "n"_a);
  m.def("lay_out_frames", &lay_out_frames, "columns"_a, "following"_a, "steps"_a, "calls"_a.none(), "last_calls"_a,
        "last_envs"_a, "last_rows"_a);
}

}  // namespace engram
