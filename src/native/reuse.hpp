// Tensors that batches are read into again once no other code holds them.
#pragma once
#include <nanobind/nanobind.h>

#include <array>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "tensors.hpp"

namespace engram {

// A tensor that was returned, and its state at that time: the bytes of Python's object, of torch's tensor and of its storage
// (addresses, sizes, strides, dtype, gradients, numbers of users). `is_free` compares these bytes, so that any use or change by
// other code is noticed without a list of all possible ones. Their positions are an internal matter of torch; before any tensor
// is used again, Python tests that the fields that matter are among the compared bytes.
class KeptTensor {
 public:
  explicit KeptTensor(nb::object tensor) : tensor_(std::move(tensor)) {
    if (!is_tensor(tensor_.ptr())) throw nb::type_error("a plain tensor is needed");
    {
      const nb::object storage = tensor_.attr("untyped_storage")();
      storage_ = address(storage);
      storage_object_ = storage.ptr();  // torch keeps it as long as the storage
    }
    impl_ = address(tensor_);
    if (!has_no_attributes()) throw nb::type_error("a tensor without attributes is needed");
    storage_users_ = Py_REFCNT(storage_object_);
    std::memcpy(object_bytes_.data(), body(), body_bytes());
    std::memcpy(impl_bytes_.data(), impl_, kImplBytes);
    std::memcpy(storage_bytes_.data(), storage_, kStorageBytes);
  }
  PyObject* tensor() const { return tensor_.ptr(); }
  // Whether no other code has the tensor, its memory or a weak reference to it, and the tensor is unchanged.
  bool is_free() const {
    PyObject* const o = tensor_.ptr();
    // The order matters: each check proves that the data that the next one reads is in its place.
    const bool is_free = Py_REFCNT(o) == 1 && Py_TYPE(o) == torch_api().tensor && no_weak_references() &&
                         std::memcmp(object_bytes_.data(), body(), body_bytes()) == 0 &&
                         std::memcmp(impl_bytes_.data(), impl_, kImplBytes) == 0 &&
                         std::memcmp(storage_bytes_.data(), storage_, kStorageBytes) == 0 &&
                         Py_REFCNT(storage_object_) == storage_users_ && has_no_attributes();
    std::atomic_thread_fence(std::memory_order_acquire);  // other threads' reads happen before the writes here
    return is_free;
  }

 private:
  // Lower bounds: these objects are larger in every version of torch.
  static constexpr size_t kImplBytes = 168, kStorageBytes = 80, kMostBody = 64;

  static const uint8_t* address(nb::handle of) {
    return reinterpret_cast<const uint8_t*>(nb::cast<uintptr_t>(of.attr("_cdata")));
  }
  struct Offsets {
    Py_ssize_t size, weak;
    Offsets() {
      const nb::handle type(reinterpret_cast<PyObject*>(torch_api().tensor));
      size = nb::cast<Py_ssize_t>(type.attr("__basicsize__")), weak = nb::cast<Py_ssize_t>(type.attr("__weakrefoffset__"));
      if (size > static_cast<Py_ssize_t>(sizeof(PyObject) + kMostBody) || weak == 0)
        throw nb::type_error("tensors of this torch have an unknown form");
    }
  };
  static const Offsets& offsets() {
    static const Offsets found;
    return found;
  }
  // The part of Python's object behind its reference count and type: torch's tensor, hooks.
  const uint8_t* body() const { return reinterpret_cast<const uint8_t*>(tensor_.ptr()) + sizeof(PyObject); }
  static size_t body_bytes() { return static_cast<size_t>(offsets().size) - sizeof(PyObject); }
  bool no_weak_references() const {
    PyObject* list = nullptr;
    std::memcpy(&list, reinterpret_cast<const uint8_t*>(tensor_.ptr()) + offsets().weak, sizeof list);
    return list == nullptr;
  }
  bool has_no_attributes() const {
    const nb::object attributes = nb::steal(PyObject_GenericGetDict(tensor_.ptr(), nullptr));
    if (!attributes.is_valid()) return PyErr_Clear(), false;
    return PyDict_Size(attributes.ptr()) == 0;
  }

  nb::object tensor_;
  const uint8_t *impl_ = nullptr, *storage_ = nullptr;
  PyObject* storage_object_ = nullptr;
  Py_ssize_t storage_users_ = 0;
  std::array<uint8_t, kMostBody> object_bytes_{};
  std::array<uint8_t, kImplBytes> impl_bytes_{};
  std::array<uint8_t, kStorageBytes> storage_bytes_{};
};

// The tensors of the last batches of one buffer.
class KeptBatches {
 public:
  static constexpr size_t kMost = 8, kMostBytes = size_t{64} << 20;  // batches, and bytes of all of them
  static constexpr size_t kMostLeaf = size_t{1} << 20;               // larger tensors are new in each batch

  struct Place {
    size_t leaf;
    uint8_t* data;
    KeptTensor kept;
  };
  // A free batch of n rows of this source; null: there is none.
  const std::vector<Place>* find(uint64_t source, size_t n) {
    if (source != source_) batches_.clear(), bytes_ = 0, source_ = source;
    for (size_t i = 0; i < batches_.size(); ++i) {
      next_ = next_ + 1 < batches_.size() ? next_ + 1 : 0;
      const Batch& batch = batches_[next_];
      if (batch.n == n && is_free(batch)) return misses_ = 0, &batch.places;
    }
    return nullptr;
  }
  // Whether to keep the batch that is made now because none was free: if all kept batches are in use, only now and then,
  // because keeping a batch takes longer than making one.
  bool wants_more() {
    if (batches_.size() < kMost) return true;
    const uint64_t every = uint64_t{1} << std::min<uint64_t>(6, misses_ / kMost);
    return ++misses_ % every == 0;
  }
  void keep(size_t n, size_t bytes, std::vector<Place> places) {
    if (bytes > kMostBytes || places.empty()) return;
    while (!batches_.empty() && (batches_.size() == kMost || bytes_ + bytes > kMostBytes)) drop_oldest();
    batches_.push_back({n, bytes, std::move(places)}), bytes_ += bytes;
  }

 private:
  struct Batch {
    size_t n, bytes;
    std::vector<Place> places;
  };
  static bool is_free(const Batch& batch) {
    for (const Place& place : batch.places)
      if (Py_REFCNT(place.kept.tensor()) != 1) return false;
    for (const Place& place : batch.places)
      if (!place.kept.is_free()) return false;
    return true;
  }
  void drop_oldest() {
    const Batch oldest = std::move(batches_.front());  // destroyed last, when no change is half done
    batches_.erase(batches_.begin()), bytes_ -= oldest.bytes, next_ = 0;
  }

  std::vector<Batch> batches_;
  size_t bytes_ = 0, next_ = 0;
  uint64_t source_ = 0, misses_ = 0;
};

}  // namespace engram
