// Leaves of batches: their form, and new tensors for them. What all bindings share; it knows no store.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "casters.hpp"
#include "tensors.hpp"

namespace engram {

// Larger sizes exceed any memory and are refused before they are multiplied.
constexpr size_t kMostBytes = size_t{1} << 46;

constexpr size_t kGilBytes = 256 << 10;  // larger copies release the GIL
constexpr size_t kBigLeaf = 256 << 10;   // a leaf of this size in a batch gets a block of its own

struct Leaf {
  DType dtype;
  size_t itemsize, bytes, offset;
  std::vector<int64_t> shape;
  bool lazy_bits;  // floats and complex numbers may be lazily negated or conjugated
};

// Releases the GIL for long copies only: acquiring it again beside a busy thread costs milliseconds.
template <typename F>
inline void maybe_without_gil(bool release, F&& work) {
  if (release) {
    nb::gil_scoped_release unlocked;
    work();
  } else {
    work();
  }
}

// int64 [n].
inline Tensor slots_out(size_t n, auto fill) {
  if (n > kMostBytes / 8) throw std::bad_alloc();
  OutBlock block;
  const int64_t lead = static_cast<int64_t>(n);
  static const std::vector<int64_t> scalar;
  block.plan({kDLInt, 64}, &lead, 1, scalar, n * 8);
  block.take();
  fill(reinterpret_cast<int64_t*>(block.data(0)));
  return block.make(0);
}

// The memory of a batch's leaves `[lead..., inner...]`: small ones share a block, each big one has a block of its own. `leaves`
// and `lead` must outlive this object. `more`: further tensors that the caller plans.
class LeafMemory {
 public:
  explicit LeafMemory(size_t expected) : shared_(expected) { at_.reserve(expected); }
  LeafMemory(const std::vector<Leaf>& leaves, const std::vector<int64_t>& lead, size_t rows, size_t more)
      : LeafMemory(leaves.size() + more) {
    for (const Leaf& leaf : leaves) plan(leaf, lead, rows);
  }
  size_t plan(const Leaf& leaf, const std::vector<int64_t>& lead, size_t rows) {
    if (leaf.bytes > kMostBytes / std::max<size_t>(1, rows)) throw std::bad_alloc();
    return plan(leaf.dtype, lead, leaf.shape, leaf.bytes * rows);
  }
  // Plans a further tensor of this many bytes; returns its position.
  size_t plan(DType dtype, const std::vector<int64_t>& lead, const std::vector<int64_t>& inner, size_t bytes) {
    if ((bytes_ += bytes) > kMostBytes) throw std::bad_alloc();
    OutBlock* block = &shared_;
    if (bytes >= kBigLeaf)
      block = own_.emplace_back(std::make_unique<OutBlock>()).get();
    else
      any_shared_ = true;
    at_.emplace_back(block, block->plan(dtype, lead.data(), lead.size(), inner, bytes));
    return at_.size() - 1;
  }
  // A tensor `[lead, inner...]` over a part of tensor i, from `offset` (bytes) on; returns its position.
  size_t alias(size_t i, const std::vector<int64_t>& lead, size_t offset) {
    const auto [block, place] = at_[i];
    at_.emplace_back(block, block->alias(place, lead.data(), lead.size(), offset));
    return at_.size() - 1;
  }
  void take() {
    if (any_shared_) shared_.take();
    for (auto& block : own_) block->take();
  }
  size_t bytes() const { return bytes_; }
  uint8_t* data(size_t i) const { return at_[i].first->data(at_[i].second); }
  Tensor make(size_t i) { return at_[i].first->make(at_[i].second); }

 private:
  OutBlock shared_;
  std::vector<std::unique_ptr<OutBlock>> own_;
  std::vector<std::pair<OutBlock*, size_t>> at_;
  size_t bytes_ = 0;
  bool any_shared_ = false;
};

// Several 1-D results: planned, filled, then made into tensors, so that no Python code runs while shared state is read.
class Results {
 public:
  void add(DType dtype, size_t n) {
    const size_t bytes = dtype.bits / 8;
    if (n > kMostBytes / bytes) throw std::bad_alloc();
    lead_.push_back(static_cast<int64_t>(n));
    parts_.push_back({dtype, n * bytes});
  }
  void take() {
    static const std::vector<int64_t> scalar;
    for (size_t i = 0; i < parts_.size(); ++i) block_.plan(parts_[i].dtype, &lead_[i], 1, scalar, parts_[i].bytes);
    block_.take();
  }
  template <typename T>
  T* data(size_t i) {
    return reinterpret_cast<T*>(block_.data(i));
  }
  Tensor make(size_t i) { return block_.make(i); }

 private:
  struct Part {
    DType dtype;
    size_t bytes;
  };
  std::vector<int64_t> lead_;
  std::vector<Part> parts_;
  OutBlock block_;
};

}  // namespace engram
