// What a policy gets and gives at each step: observations in memory of its own, outputs that are copied into columns [steps, ...],
// and actions as arrays for environments.
#pragma once
#include <nanobind/nanobind.h>

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "leaves.hpp"
#include "step_columns.hpp"

namespace engram {

// A plain tensor as a buffer, so that it is copied as arrays are. It must live as long as this is used.
class TensorBuffer {
 public:
  static constexpr int kMostDims = 8;
  // False: it is not one that can be read as bytes in the order of its strides.
  bool of(PyObject* tensor) {
    if (!view_.of(tensor) || view_.ndim > kMostDims || view_.dtype.bits % 8 || is_lazy(tensor)) return false;
    buffer_.itemsize = view_.dtype.bits / 8, buffer_.len = buffer_.itemsize, buffer_.ndim = view_.ndim;
    buffer_.buf = const_cast<uint8_t*>(view_.data);
    for (int d = view_.ndim - 1; d >= 0; --d) {
      shape_[d] = view_.shape[d];
      strides_[d] = view_.strides ? view_.strides[d] * buffer_.itemsize : buffer_.len;
      buffer_.len *= shape_[d];
    }
    return true;
  }
  DType dtype() const { return view_.dtype; }
  bool is_shaped(const Py_ssize_t* shape, int ndim) const {
    return ndim == view_.ndim && std::equal(shape, shape + ndim, shape_.begin());
  }
  size_t bytes() const { return static_cast<size_t>(buffer_.len); }
  void copy_to(uint8_t* to) {
    buffer_.shape = shape_.data(), buffer_.strides = strides_.data();
    copy_array(to, buffer_);
  }

 private:
  TensorView view_;
  Py_buffer buffer_{};
  std::array<Py_ssize_t, kMostDims> shape_{}, strides_{};
};

// Copies the outputs of steps into the rows of columns, contiguous arrays [steps, ...], one for each key, a string.
class OutputRecorder {
 public:
  OutputRecorder(nb::list keys, nb::list columns) : columns_(nb::len(columns)) {
    if (nb::len(keys) != columns_.size()) throw nb::value_error("one key for each column");
    for (nb::handle key : keys) {
      if (!PyUnicode_CheckExact(key.ptr())) throw nb::type_error("keys are strings");
      keys_.push_back(nb::borrow(key));
    }
    for (size_t k = 0; k < columns_.size(); ++k)
      if (!columns_[k].of(nb::handle(columns[k]).ptr(), true) || columns_[k].view().ndim < 1 ||
          !PyBuffer_IsContiguous(&columns_[k].view(), 'C') || columns_[k].dim(0) != columns_[0].dim(0))
        throw nb::type_error("columns are contiguous arrays [steps, ...]");
  }
  OutputRecorder(const OutputRecorder&) = delete;
  // Whether the outputs, a dict, were copied to row `step`. If not, nothing was: they have other keys, or one is not a plain tensor
  // of its column's form.
  bool put(size_t step, nb::handle outputs) const {
    if (columns_.empty() || step >= columns_[0].dim(0)) throw nb::index_error("the columns have no row for this step");
    PyObject* const dict = outputs.ptr();
    if (!PyDict_CheckExact(dict) || static_cast<size_t>(PyDict_Size(dict)) != columns_.size()) return false;
    std::vector<nb::object> held(columns_.size());  // reading a tensor may run Python code
    PyObject *key = nullptr, *value = nullptr;
    size_t next = 0;  // they come in the order of the columns, as a rule
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) {
      const size_t k = place_of(key, next++);
      if (k == columns_.size()) return false;
      held[k] = nb::borrow(value);
    }
    std::vector<TensorBuffer> from(columns_.size());
    for (size_t k = 0; k < columns_.size(); ++k) {
      const Py_buffer& to = columns_[k].view();
      if (!from[k].of(held[k].ptr()) || !(from[k].dtype() == columns_[k].dtype())) return false;
      if (!from[k].is_shaped(to.shape + 1, to.ndim - 1)) return false;
    }
    for (size_t k = 0; k < columns_.size(); ++k)
      from[k].copy_to(static_cast<uint8_t*>(columns_[k].view().buf) + step * from[k].bytes());
    return true;
  }

 private:
  // The column of a key, which may be the one of a number; else their number.
  size_t place_of(PyObject* key, size_t first) const {
    if (first < keys_.size() && is_same(key, keys_[first].ptr())) return first;
    for (size_t k = 0; k < keys_.size(); ++k)
      if (is_same(key, keys_[k].ptr())) return k;
    return keys_.size();
  }
  static bool is_same(PyObject* key, PyObject* own) {
    return key == own || (PyUnicode_CheckExact(key) && PyUnicode_Compare(key, own) == 0);
  }
  std::vector<nb::object> keys_;
  std::vector<ArrayView> columns_;
};

// Makes arrays of actions, in new memory, where every number is one of the space.
class ActionReader {
 public:
  // The array has the shape and dtype of `example`. With `choices`, which are int64, numbers are from 0 to below that, and the
  // array has `start` more; without, floats are not NaN.
  ActionReader(nb::handle example, uint64_t choices, int64_t start) : choices_(choices), start_(start) {
    ArrayView like;
    if (!like.of(example.ptr()) || like.view().ndim < 1 || (choices && !(like.dtype() == kInt64)))
      throw nb::type_error("an example is an array [environments, ...], and choices are int64");
    dtype_ = like.dtype();
    shape_.assign(like.view().shape, like.view().shape + like.view().ndim);
    inner_.assign(shape_.begin() + 1, shape_.end());
  }
  // None: the action is not a plain tensor of that form, or one of its numbers is not of the space.
  nb::object read(nb::handle action) const {
    TensorBuffer from;
    if (!from.of(action.ptr()) || !(from.dtype() == dtype_)) return nb::none();
    if (!from.is_shaped(shape_.data(), static_cast<int>(shape_.size()))) return nb::none();
    auto [array, data] = ArrayMaker::make(dtype_, static_cast<size_t>(shape_[0]), inner_, from.bytes());
    from.copy_to(data);
    return choose(data, from.bytes()) ? array : nb::none();
  }

 private:
  bool choose(uint8_t* data, size_t bytes) const {
    if (choices_) {
      bool all = true;
      for (auto* n = reinterpret_cast<int64_t*>(data); bytes; bytes -= sizeof *n, ++n) {
        all &= static_cast<uint64_t>(*n) < choices_;
        *n = static_cast<int64_t>(static_cast<uint64_t>(*n) + static_cast<uint64_t>(start_));
      }
      return all;
    }
    if (dtype_ == kFloat) return none_is_nan<float>(data, bytes);
    if (dtype_ == kDouble) return none_is_nan<double>(data, bytes);
    return dtype_.code == kDLInt || dtype_.code == kDLUInt;
  }
  template <typename Number>
  static bool none_is_nan(const uint8_t* data, size_t bytes) {
    const auto* numbers = reinterpret_cast<const Number*>(data);
    bool none = true;
    for (size_t i = 0; i < bytes / sizeof(Number); ++i) none &= numbers[i] == numbers[i];
    return none;
  }

  uint64_t choices_;
  int64_t start_;
  DType dtype_{};
  std::vector<Py_ssize_t> shape_;
  std::vector<int64_t> inner_;
};

// Makes tensors of the rows of a contiguous array [rows, ...], each in memory of its own: a policy may write into what it reads.
class RowCopies {
 public:
  explicit RowCopies(nb::handle array) {
    if (!array_.of(array.ptr()) || array_.view().ndim < 1 || !PyBuffer_IsContiguous(&array_.view(), 'C'))
      throw nb::type_error("rows are copied from a contiguous array [rows, ...] of numbers");
    bytes_ = static_cast<size_t>(array_.view().itemsize);
    for (int d = 1; d < array_.view().ndim; ++d) {
      inner_.push_back(array_.view().shape[d]);
      bytes_ *= array_.dim(d);
    }
  }
  RowCopies(const RowCopies&) = delete;
  Tensor row(size_t number) const {
    if (number >= array_.dim(0)) throw nb::index_error("the array has no such row");
    OutBlock block;
    block.plan(array_.dtype(), nullptr, 0, inner_, bytes_);
    block.take();
    std::memcpy(block.data(0), static_cast<const uint8_t*>(array_.view().buf) + number * bytes_, bytes_);
    return block.make(0);
  }

 private:
  ArrayView array_;
  std::vector<int64_t> inner_;
  size_t bytes_;
};

}  // namespace engram
