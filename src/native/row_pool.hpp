// Rows that several shards have drawn, and batches of them as from one buffer; src/engram/distributed/batches.py says why they
// are as likely as they should be.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "codec.hpp"
#include "draw.hpp"
#include "power.hpp"

namespace engram {

class RowPool {
 public:
  // `unit`: rows that are taken together, one behind the other. `widths`: bytes of a row in each part of a block.
  RowPool(size_t shards, size_t unit, std::vector<size_t> widths, uint64_t seed)
      : answers_(shards), ends_(shards), unit_(unit), widths_(std::move(widths)), random_{seed} {
    if (shards == 0 || unit == 0 || widths_.empty()) throw nb::value_error("a pool needs shards, rows of a unit, and parts");
    for (const size_t width : widths_) inner_.push_back({static_cast<int64_t>(width)}), width_ += width;
  }
  RowPool(const RowPool&) = delete;

  // Takes a shard's answer in, in place of the one before it.
  //   share: what the shard drew from, in proportion to the others; lowest: the least leaf of its rows, for weights.
  //   parts: arrays uint8 [n, width]; slots, generation: int64 [n]; ratio: float64 [n]; last, mask: bool [n].
  //   first_index: what is added to its slots; low: how many rows are left when `low()` names the shard.
  void put(size_t shard, double share, std::optional<double> lowest, nb::sequence parts, nb::object slots,
           nb::object generation, nb::object ratio, nb::object last, nb::object mask, int64_t first_index, size_t low) {
    check(shard);
    if (!(share >= 0) || !std::isfinite(share)) throw nb::value_error("a share is finite and 0 or more");
    auto answer = std::make_shared<Answer>();
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
    if (a.ratio && !(a.lowest > 0)) throw nb::value_error("ratios of leaves need the least leaf of the shard, above 0");
    const auto before = forget(shard);
    if (share > 0) {
      batch_.least = std::fmin(batch_.least, a.lowest);
      if (a.rows == 0) used_up_.push_back(shard);
    }
    answers_[shard] = std::move(answer);
    changed_ = true;
  }
  // Forgets a shard's answer: nothing is taken from it until it has another.
  void drop(size_t shard) {
    check(shard);
    forget(shard);
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
    Batch batch;
    batch.places.reserve(n / unit_);  // without memory no batch is begun
    batch.n = n, batch.is_begun = true;
    batch.is_near = widths_[0] <= kPrefetchBytes && n * widths_[0] <= kWarmBytes;
    for (const auto& answer : answers_)
      if (answer && answer->share > 0) batch.least = std::fmin(batch.least, answer->lowest);
    std::swap(batch_, batch);  // the one before goes when this one is whole: its end may run Python code
  }
  // Goes on with the batch. None: it is whole. Else a shard whose rows are used up: it must get another answer, or be dropped,
  // before the next row can be drawn, as that decides by what each shard drew from.
  std::optional<size_t> fill() {
    if (!batch_.is_begun) throw nb::value_error("no batch was begun");
    while (batch_.rows(unit_) < batch_.n) {
      if (!used_up_.empty()) return used_up_.back();
      add_up();
      if (!(total_ > 0)) throw std::runtime_error("no shard has a share");
      const size_t most = (batch_.n - batch_.rows(unit_)) / unit_;
      if (sharers_ == 1)
        choose_all(most);
      else
        choose(most);
    }
    return std::nullopt;
  }
  // The batch: its rows, as `codec` says, or without one as its parts, uint8 [n, width]; index and generation, int64 [n];
  // importance weights, float32 or float64 [n], where there is a `beta` and every row has a ratio; where slices end and are not
  // padded, bool [n], or None. `attaches`: index, and with weights also these and the generation, are entries of the batch.
  std::tuple<nb::object, Tensor, Tensor, std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>> take(
      const Codec* codec, bool attaches, std::optional<double> beta, bool wide) {
    if (!batch_.is_begun || batch_.rows(unit_) < batch_.n) throw nb::value_error("the batch is not whole");
    if (codec && (widths_.size() != 1 || std::max<size_t>(1, codec->row_end()) != widths_[0]))
      throw nb::value_error("the layout is not that of the rows");
    if (beta && !std::isfinite(*beta)) throw nb::value_error("beta must be finite");
    const size_t n = batch_.n;
    const std::vector<int64_t> lead(1, static_cast<int64_t>(n));
    const bool weighs = beta && batch_.all_have(&Answer::ratio);
    Columns columns(lead, weighs, wide, batch_.all_have(&Answer::last), batch_.all_have(&Answer::mask));
    std::vector<std::unique_ptr<OutBlock>> own;  // of leaves that are so long that one of them shall not keep the others
    std::vector<LeafCopy> copies;
    std::vector<std::pair<OutBlock*, size_t>> places;
    const auto plan = [&](DType dtype, const std::vector<int64_t>& inner, size_t offset, size_t bytes) {
      OutBlock* block = &columns.block;
      if (bytes * n >= kBigLeaf) block = own.emplace_back(std::make_unique<OutBlock>()).get();
      places.emplace_back(block, block->plan(dtype, lead.data(), 1, inner, bytes * n));
      copies.push_back({offset, bytes, nullptr, static_cast<ptrdiff_t>(bytes)});
    };
    if (codec)
      for (const Leaf& leaf : codec->leaves()) plan(leaf.dtype, leaf.shape, leaf.offset, leaf.bytes);
    else
      for (size_t p = 0; p < widths_.size(); ++p) plan({kDLUInt, 8}, inner_[p], 0, widths_[p]);
    columns.block.take();
    for (const auto& block : own) block->take();
    for (size_t k = 0; k < copies.size(); ++k) copies[k].array = places[k].first->data(places[k].second);
    std::vector<const uint8_t*> rows(n);
    std::vector<double> ratios(weighs ? n : 0);
    const Batch batch = std::exchange(batch_, {});
    // While other threads run, they may give shards new answers, and these rows are of the old ones.
    const bool releases = n * width_ > kGilBytes;
    const auto held = releases ? answers_ : decltype(answers_){};
    maybe_without_gil(releases, [&] {
      copy_columns(batch, columns, ratios);
      if (weighs) raise_to(ratios.data(), n, *beta);
      if (weighs) columns.put_weights(ratios, wide);
      if (codec) {
        find_rows(batch, 0, rows.data());
        gather_rows(rows.data(), n, widths_[0], copies.data(), copies.size(), batch.is_near);
      }
      for (size_t p = 0; p < widths_.size() && !codec; ++p) {
        find_rows(batch, p, rows.data());
        gather_rows(rows.data(), n, widths_[p], &copies[p], 1);
      }
    });
    std::vector<nb::object> tensors;
    for (const auto& [block, at] : places) tensors.push_back(block->make(at));
    Tensor index = columns.block.make(0), generation = columns.block.make(1);
    const auto optional = [&](std::optional<size_t> at) {
      return at ? std::optional(columns.block.make(*at)) : std::nullopt;
    };
    std::optional<Tensor> weight = optional(columns.weight), last = optional(columns.last), mask = optional(columns.mask);
    nb::object made;
    if (!codec) {
      nb::list parts;
      for (auto& part : tensors) parts.append(std::move(part));
      made = std::move(parts);
    } else if (attaches) {
      nb::dict entries;
      entries["index"] = index;
      if (weight) entries["generation"] = generation, entries["priority_weight"] = *weight;
      made = codec->build(tensors, lead, entries);
    } else {
      made = codec->build(tensors, lead, nb::none());
    }
    return {std::move(made), std::move(index), std::move(generation), std::move(weight), std::move(last), std::move(mask)};
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

  // The first row of a unit.
  struct Place {
    const Answer* answer;
    size_t row;
  };
  struct Batch {
    bool is_begun = false, is_near = false;  // near: its rows are asked for as they are chosen
    size_t n = 0;
    std::vector<Place> places;
    std::vector<std::shared_ptr<Answer>> replaced;  // answers of its rows that their shards have no more
    double least = std::numeric_limits<double>::quiet_NaN();  // of the leaves of all shards
    size_t rows(size_t unit) const { return places.size() * unit; }
    template <typename Column>
    bool all_have(Column Answer::*column) const {
      return std::all_of(places.begin(), places.end(), [&](const Place& p) { return p.answer->*column != nullptr; });
    }
  };
  // The tensors beside the rows; `weight`, `last` and `mask`: which of the block they are.
  struct Columns {
    Columns(const std::vector<int64_t>& lead, bool weighs, bool wide, bool has_last, bool has_mask) : block(24) {
      static const std::vector<int64_t> scalar;
      const auto plan = [&](DType dtype) {
        return block.plan(dtype, lead.data(), 1, scalar, static_cast<size_t>(lead[0]) * (dtype.bits / 8));
      };
      plan({kDLInt, 64}), plan({kDLInt, 64});
      if (weighs) weight = plan({kDLFloat, static_cast<uint8_t>(wide ? 64 : 32)});
      if (has_last) last = plan({kDLBool, 8});
      if (has_mask) mask = plan({kDLBool, 8});
    }
    void put_weights(const std::vector<double>& weights, bool wide) {
      if (wide)
        std::copy(weights.begin(), weights.end(), reinterpret_cast<double*>(block.data(*weight)));
      else
        std::transform(weights.begin(), weights.end(), reinterpret_cast<float*>(block.data(*weight)),
                       [](double w) { return static_cast<float>(w); });
    }
    OutBlock block;
    std::optional<size_t> weight, last, mask;
  };

  // The next rows of the only shard with a share.
  void choose_all(size_t most) {
    const Answer& a = *answers_[only_];
    const size_t first = a.next, units = std::min(most, (a.rows - a.next) / unit_);
    for (size_t i = 0; i < units; ++i) place({&a, first + i * unit_});
    use(only_, units * unit_);
  }
  // Rows of all shards, until one has no more.
  void choose(size_t most) {
    for (size_t i = 0; i < most && used_up_.empty(); ++i) {
      const double point = static_cast<double>(random_.next() >> 11) * 0x1p-53 * total_;
      auto shard = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), point) - ends_.begin());
      if (shard > last_) shard = last_;  // rounding may give the total itself
      const Answer& a = *answers_[shard];
      place({&a, a.next});
      use(shard, unit_);
    }
  }
  // Rows lie all over memory: that of each is asked for long before it is copied.
  void place(Place p) {
    const Answer& a = *p.answer;
    __builtin_prefetch(a.slots + p.row), __builtin_prefetch(a.generation + p.row);
    if (a.ratio) __builtin_prefetch(a.ratio + p.row);
    if (batch_.is_near && widths_[0])
      for (size_t i = 0; i < unit_; ++i) prefetch_row<0, 2>(row_of(a, 0, p.row + i), widths_[0]);
    batch_.places.push_back(p);
  }
  static const uint8_t* row_of(const Answer& a, size_t part, size_t row) {
    const Py_buffer& v = a.parts[part].view();
    return static_cast<const uint8_t*>(v.buf) + static_cast<Py_ssize_t>(row) * v.strides[0];
  }
  void find_rows(const Batch& batch, size_t part, const uint8_t** rows) const {
    for (const Place& p : batch.places)
      for (size_t i = 0; i < unit_; ++i) *rows++ = row_of(*p.answer, part, p.row + i);
  }
  void copy_columns(const Batch& batch, const Columns& columns, std::vector<double>& ratios) const {
    auto* index = reinterpret_cast<int64_t*>(columns.block.data(0));
    auto* generation = reinterpret_cast<int64_t*>(columns.block.data(1));
    double* ratio = ratios.data();
    size_t at = 0;
    for (const auto& [answer, row] : batch.places) {
      const Answer& a = *answer;
      for (size_t i = 0; i < unit_; ++i) *index++ = a.first_index + a.slots[row + i];
      std::memcpy(generation + at, a.generation + row, unit_ * sizeof *generation);
      const double of_all = batch.least / a.lowest;
      for (size_t i = 0; i < unit_ && !ratios.empty(); ++i) *ratio++ = a.ratio[row + i] * of_all;
      if (columns.last) std::memcpy(columns.block.data(*columns.last) + at, a.last + row, unit_);
      if (columns.mask) std::memcpy(columns.block.data(*columns.mask) + at, a.mask + row, unit_);
      at += unit_;
    }
  }

  void check(size_t shard) const {
    if (shard >= answers_.size()) throw nb::index_error("no such shard");
  }
  // A shard's answer, which it has no more; its end may run Python code.
  std::shared_ptr<Answer> forget(size_t shard) {
    if (answers_[shard] && !batch_.places.empty()) batch_.replaced.push_back(answers_[shard]);
    std::erase(used_up_, shard), std::erase(low_, shard);
    changed_ = true;
    return std::exchange(answers_[shard], nullptr);
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
  std::vector<std::shared_ptr<Answer>> answers_;
  std::vector<double> ends_;  // sums of the shares up to each shard
  std::vector<size_t> used_up_, low_;
  size_t unit_;
  std::vector<size_t> widths_;
  size_t width_ = 0;  // of all parts
  std::vector<std::vector<int64_t>> inner_;
  CounterGenerator random_;
  bool changed_ = true;
  double total_ = 0;
  size_t sharers_ = 0, only_ = 0, last_ = 0;  // how many shards have a share, and the last of them
  Batch batch_;
};

}  // namespace engram
