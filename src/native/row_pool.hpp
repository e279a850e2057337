// Rows that several shards have drawn, and batches of them as from one buffer; src/engram/distributed/batches.py says why they
// are as likely as they should be.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "draw.hpp"
#include "tensors.hpp"

namespace engram {

class RowPool {
 public:
  // `unit`: rows that are taken together, one behind the other. `widths`: bytes of a row in each part of a block.
  RowPool(size_t shards, size_t unit, std::vector<size_t> widths, uint64_t seed)
      : answers_(shards), ends_(shards), unit_(unit), widths_(std::move(widths)), random_{seed} {
    if (shards == 0 || unit == 0 || widths_.empty()) throw nb::value_error("a pool needs shards, rows of a unit, and parts");
    for (const size_t width : widths_) inner_.push_back({static_cast<int64_t>(width)});
  }

  // Takes a shard's answer in, in place of the one before it.
  //   share: what the shard drew from, in proportion to the others; lowest: the least leaf of its rows, for weights.
  //   parts: arrays uint8 [n, width]; slots, generation: int64 [n]; ratio: float64 [n]; last, mask: bool [n].
  //   first_index: what is added to its slots; low: how many rows are left when `low()` names the shard.
  void put(size_t shard, double share, std::optional<double> lowest, nb::sequence parts, nb::object slots,
           nb::object generation, nb::object ratio, nb::object last, nb::object mask, int64_t first_index, size_t low) {
    check(shard);
    if (!(share >= 0) || !std::isfinite(share)) throw nb::value_error("a share is finite and 0 or more");
    auto answer = std::make_unique<Answer>();
    Answer& a = *answer;
    a.slots = column<int64_t>(slots, a, {kDLInt, 64});
    a.generation = column<int64_t>(generation, a, {kDLInt, 64});
    if (!ratio.is_none()) a.ratio = column<double>(ratio, a, {kDLFloat, 64});
    if (!last.is_none()) a.last = column<uint8_t>(last, a, {kDLBool, 8});
    if (!mask.is_none()) a.mask = column<uint8_t>(mask, a, {kDLBool, 8});
    if (nb::len(parts) != widths_.size()) throw nb::value_error("a block has another number of parts");
    a.parts.reserve(widths_.size());
    for (size_t p = 0; p < widths_.size(); ++p) {
      Buffer& buffer = a.parts.emplace_back();
      const nb::object part = parts[p];
      if (!buffer.get(part.ptr())) throw nb::type_error("parts of a block are arrays of uint8 [n, bytes]");
      const Py_buffer& v = buffer.view();
      if (v.ndim != 2 || v.itemsize != 1 || static_cast<size_t>(v.shape[0]) != a.rows ||
          static_cast<size_t>(v.shape[1]) != widths_[p] || (v.shape[0] > 0 && widths_[p] > 1 && v.strides[1] != 1))
        throw nb::value_error("a part of a block is not uint8 [n, bytes] of this layout");
    }
    if (a.rows % unit_) throw nb::value_error("an answer has no whole number of units");
    a.share = share, a.first_index = first_index, a.low = low;
    a.lowest = lowest.value_or(std::numeric_limits<double>::quiet_NaN());
    drop(shard);
    if (share > 0) {
      least_ = std::fmin(least_, a.lowest);
      if (a.rows == 0) used_up_.push_back(shard);
    }
    answers_[shard] = std::move(answer);
    changed_ = true;
  }
  // Forgets a shard's answer: nothing is taken from it until it has another.
  void drop(size_t shard) {
    check(shard);
    answers_[shard].reset();
    std::erase(used_up_, shard), std::erase(low_, shard);
    changed_ = true;
  }
  // The sum of all shares.
  double total() {
    add_up();
    return total_;
  }
  // Rows of a shard's answer that were not taken.
  size_t left(size_t shard) const {
    check(shard);
    return answers_[shard] ? answers_[shard]->rows - answers_[shard]->next : 0;
  }
  // The shards that have few rows left since this was asked last.
  std::vector<size_t> low() { return std::exchange(low_, {}); }

  // Takes n rows of the only shard with a share, if it has them: the shard, and where in its answer they begin.
  std::optional<std::tuple<size_t, size_t>> take_run(size_t n) {
    add_up();
    if (sharers_ != 1 || !used_up_.empty() || n % unit_ || left(only_) < n) return std::nullopt;
    const size_t at = answers_[only_]->next;
    use(only_, n);
    return std::tuple{only_, at};
  }
  // Begins a batch of n rows; one that was begun before is forgotten, and its rows are gone.
  void begin(size_t n) {
    if (n % unit_) throw nb::value_error("a batch has no whole number of units");
    for (const size_t width : widths_)
      if (width && n > kMostRowBytes / width) throw std::bad_alloc();
    rows_.reset(), columns_.reset();  // without memory no batch is begun
    n_ = static_cast<int64_t>(n), at_ = 0;
    auto rows = std::make_unique<OutBlock>(widths_.size()), columns = std::make_unique<OutBlock>(5);
    for (size_t p = 0; p < widths_.size(); ++p) rows->plan({kDLUInt, 8}, &n_, 1, inner_[p], n * widths_[p]);
    static const std::vector<int64_t> scalar;
    for (const DType dtype : {DType{kDLInt, 64}, DType{kDLInt, 64}, DType{kDLFloat, 64}}) columns->plan(dtype, &n_, 1, scalar, n * 8);
    for (int flags = 0; flags < 2; ++flags) columns->plan({kDLBool, 8}, &n_, 1, scalar, n);
    rows->take(), columns->take();
    rows_ = std::move(rows), columns_ = std::move(columns);
    has_ratio_ = has_last_ = has_mask_ = true;
    least_ = std::numeric_limits<double>::quiet_NaN();
    for (const auto& answer : answers_)
      if (answer && answer->share > 0) least_ = std::fmin(least_, answer->lowest);
  }
  // Goes on with the batch. None: it is whole. Else a shard whose rows are used up: it must get another answer, or be dropped,
  // before the next row can be drawn, as that decides by what each shard drew from.
  std::optional<size_t> fill() {
    if (!rows_) throw nb::value_error("no batch was begun");
    Place places[kTogether];
    while (at_ < n_) {
      if (!used_up_.empty()) return used_up_.back();
      add_up();
      if (!(total_ > 0)) throw std::runtime_error("no shard has a share");
      // Rows lie all over memory: that of some of them is asked for before the first is copied.
      const size_t most = std::min(kTogether, static_cast<size_t>(n_ - at_) / unit_);
      size_t chosen = 0;
      while (chosen < most && used_up_.empty()) {
        const double point = static_cast<double>(random_.next() >> 11) * 0x1p-53 * total_;
        auto shard = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), point) - ends_.begin());
        if (shard > last_) shard = last_;  // rounding may give the total itself
        const Answer& a = *answers_[shard];
        places[chosen++] = {&a, a.next};
        prefetch(a, a.next);
        use(shard, unit_);
      }
      for (size_t i = 0; i < chosen; ++i) copy(*places[i].answer, places[i].row);
    }
    return std::nullopt;
  }
  // The batch: its parts, uint8 [n, width]; index and generation, int64 [n]; each row's leaf, float64 [n], or None; where slices
  // end and are not padded, bool [n], or None; and the least leaf of all shards.
  std::tuple<nb::list, Tensor, Tensor, std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>, double> take() {
    if (!rows_ || at_ < n_) throw nb::value_error("the batch is not whole");
    nb::list parts;
    for (size_t p = 0; p < widths_.size(); ++p) parts.append(rows_->make(p));
    const auto optional = [&](bool has, size_t i) { return has ? std::optional(columns_->make(i)) : std::nullopt; };
    Tensor index = columns_->make(0), generation = columns_->make(1);
    std::optional<Tensor> leaf = optional(has_ratio_, 2), last = optional(has_last_, 3), mask = optional(has_mask_, 4);
    rows_.reset(), columns_.reset();
    return {parts, index, generation, leaf, last, mask, least_};
  }

 private:
  static constexpr size_t kMostRowBytes = size_t{1} << 46;
  struct Answer {
    double share = 0, lowest = 0;
    size_t rows = 0, next = 0, low = 0;
    bool has_rows = false;  // whether `rows` is known
    int64_t first_index = 0;
    std::vector<Buffer> parts;
    const int64_t *slots = nullptr, *generation = nullptr;
    const double* ratio = nullptr;
    const uint8_t *last = nullptr, *mask = nullptr;
    std::vector<nb::object> owners;  // of the columns' memory
  };

  static constexpr size_t kTogether = 32;
  struct Place {
    const Answer* answer;
    size_t row;
  };
  static void prefetch(const Answer& a, size_t row) {
    for (const Buffer& part : a.parts) {
      const auto* from = static_cast<const uint8_t*>(part.view().buf) + static_cast<Py_ssize_t>(row) * part.view().strides[0];
      __builtin_prefetch(from);
      __builtin_prefetch(from + part.view().shape[1] - 1);
    }
    __builtin_prefetch(a.slots + row), __builtin_prefetch(a.generation + row);
    if (a.ratio) __builtin_prefetch(a.ratio + row);
  }

  void check(size_t shard) const {
    if (shard >= answers_.size()) throw nb::index_error("no such shard");
  }
  // The memory of a contiguous tensor [n] that is as long as those before it.
  template <typename Item>
  static const Item* column(const nb::object& tensor, Answer& a, DType dtype) {
    TensorView view;
    if (!view.of(tensor.ptr()) || !(view.dtype == dtype) || view.ndim != 1)
      throw nb::type_error("columns of an answer are tensors [n] on the CPU, of int64, float64 or bool");
    const auto n = static_cast<size_t>(view.shape[0]);
    if (view.strides && n > 1 && view.strides[0] != 1) throw nb::value_error("a column of an answer is not contiguous");
    if (a.has_rows && n != a.rows) throw nb::value_error("columns of an answer have different lengths");
    a.rows = n, a.has_rows = true;
    a.owners.push_back(tensor);
    return reinterpret_cast<const Item*>(view.data);
  }
  void add_up() {
    if (!changed_) return;
    total_ = 0, sharers_ = 0;
    for (size_t k = 0; k < answers_.size(); ++k) {
      const double share = answers_[k] ? answers_[k]->share : 0;
      if (share > 0) last_ = only_ = k, ++sharers_;
      ends_[k] = total_ += share;
    }
    changed_ = false;
  }
  void use(size_t shard, size_t n) {
    Answer& a = *answers_[shard];
    const size_t before = a.rows - a.next;
    a.next += n;
    const size_t left = a.rows - a.next;
    if (left == 0) used_up_.push_back(shard);
    if (left <= a.low && (before > a.low || a.next == n)) low_.push_back(shard);
  }
  void copy(const Answer& a, size_t row) {
    const auto to = static_cast<size_t>(at_);
    for (size_t p = 0; p < widths_.size(); ++p) {
      const Py_buffer& v = a.parts[p].view();
      const auto* from = static_cast<const uint8_t*>(v.buf) + static_cast<Py_ssize_t>(row) * v.strides[0];
      uint8_t* out = rows_->data(p) + to * widths_[p];
      for (size_t i = 0; i < unit_; ++i, from += v.strides[0], out += widths_[p]) std::memcpy(out, from, widths_[p]);
    }
    auto* const index = reinterpret_cast<int64_t*>(columns_->data(0)) + to;
    auto* const generation = reinterpret_cast<int64_t*>(columns_->data(1)) + to;
    auto* const leaf = reinterpret_cast<double*>(columns_->data(2)) + to;
    for (size_t i = 0; i < unit_; ++i) {
      index[i] = a.first_index + a.slots[row + i];
      generation[i] = a.generation[row + i];
      if (a.ratio) leaf[i] = a.lowest / a.ratio[row + i];
    }
    if (a.last) std::memcpy(columns_->data(3) + to, a.last + row, unit_);
    if (a.mask) std::memcpy(columns_->data(4) + to, a.mask + row, unit_);
    has_ratio_ &= a.ratio != nullptr, has_last_ &= a.last != nullptr, has_mask_ &= a.mask != nullptr;
    at_ += static_cast<int64_t>(unit_);
  }

  std::vector<std::unique_ptr<Answer>> answers_;
  std::vector<double> ends_;  // sums of the shares up to each shard
  std::vector<size_t> used_up_, low_;
  size_t unit_;
  std::vector<size_t> widths_;
  std::vector<std::vector<int64_t>> inner_;
  CounterGenerator random_;
  bool changed_ = true;
  double total_ = 0;
  size_t sharers_ = 0, only_ = 0, last_ = 0;  // how many shards have a share, and the last of them
  // The batch that was begun.
  int64_t n_ = 0, at_ = 0;
  std::unique_ptr<OutBlock> rows_, columns_;
  bool has_ratio_ = true, has_last_ = true, has_mask_ = true;
  double least_ = 0;
};

inline void bind_row_pool(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<RowPool>(m, "RowPool")
      .def(nb::init<size_t, size_t, std::vector<size_t>, uint64_t>(), "shards"_a, "unit"_a, "widths"_a, "seed"_a)
      .def("put", &RowPool::put, "shard"_a, "share"_a, "lowest"_a.none(), "parts"_a, "slots"_a, "generation"_a,
           "ratio"_a.none(), "last"_a.none(), "mask"_a.none(), "first_index"_a, "low"_a)
      .def("drop", &RowPool::drop, "shard"_a)
      .def_prop_ro("total", &RowPool::total)
      .def("left", &RowPool::left, "shard"_a)
      .def("low", &RowPool::low)
      .def("take_run", &RowPool::take_run, "n"_a)
      .def("begin", &RowPool::begin, "n"_a)
      .def("fill", &RowPool::fill)
      .def("take", &RowPool::take);
}

}  // namespace engram
