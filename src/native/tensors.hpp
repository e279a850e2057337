// Tensors in and out through the DLPack C exchange API: no torch headers, no torch ABI.
#pragma once
#include <nanobind/nanobind.h>

#include <string>
#include <utility>
#include <vector>

#include "pool.hpp"
#include "third_party/dlpack.h"

namespace nb = nanobind;

namespace engram {

struct DType {
  uint8_t code, bits;
  bool operator==(const DType& o) const { return code == o.code && bits == o.bits; }
};

// Strided memory that somebody else keeps alive.
struct Strided {
  const uint8_t* data = nullptr;
  DType dtype{};
  int ndim = 0;
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;  // in elements; null: contiguous
  bool in_bytes = false;             // strides count bytes
};

// What torch offers, looked up once.
struct Torch {
  PyTypeObject* tensor = nullptr;
  const DLPackExchangeAPI* api = nullptr;  // null: a torch without the exchange API
  PyObject* lazy_bits = nullptr;           // tensor -> whether it is a lazily negated or conjugated view

  bool view(PyObject* t, DLTensor& out) const {
    if (!api || Py_TYPE(t) != tensor) return false;
    if (api->dltensor_from_py_object_no_sync(t, &out) != 0) {
      PyErr_Clear();  // sparse, meta, functorch, quantised: the caller's slow path names the leaf
      return false;
    }
    if (out.device.device_type != kDLCPU || out.dtype.lanes != 1) return false;
    for (int i = 0; i < out.ndim; ++i)
      if (out.shape[i] == 0) return true;
    return out.data != nullptr;  // a tensor of zeros without memory behind it
  }
};

inline Torch& torch_api() {
  static Torch torch;
  return torch;
}

inline void use_torch(nb::handle tensor_type, nb::handle capsule, nb::handle lazy_bits) {
  Torch& torch = torch_api();
  torch.tensor = reinterpret_cast<PyTypeObject*>(tensor_type.ptr());
  torch.api = nullptr;
  if (!lazy_bits.is_none()) Py_XDECREF(std::exchange(torch.lazy_bits, nb::borrow(lazy_bits).release().ptr()));
  if (capsule.is_none()) return;
  auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!api) throw nb::python_error();
  if (api->header.version.major == DLPACK_MAJOR_VERSION) torch.api = api;
}

// ---- out ----
// One tensor of a block; lives in the block itself.
struct OutTensor {
  DLManagedTensorVersioned managed;
  Block* block;
};
inline void out_tensor_deleter(DLManagedTensorVersioned* self) {
  BlockPool::instance().give(static_cast<OutTensor*>(self->manager_ctx)->block);
}

// Several tensors in one block of memory: plan their places, take the block, then make them.
class OutBlock {
 public:
  explicit OutBlock(size_t expected = 1) { entries_.reserve(expected); }
  OutBlock(const OutBlock&) = delete;
  // Registers a tensor [lead..., inner...]; returns its position.
  size_t plan(DType dtype, const int64_t* lead, size_t n_lead, const std::vector<int64_t>& inner, size_t bytes) {
    const size_t ndim = n_lead + inner.size();
    Entry e;
    e.dtype = dtype, e.ndim = ndim, e.lead = lead, e.n_lead = n_lead, e.inner = &inner;
    e.record = records_;
    records_ += (sizeof(OutTensor) + 2 * ndim * sizeof(int64_t) + 15) / 16 * 16;
    e.data = data_;
    data_ += (bytes + kBlockAlign - 1) / kBlockAlign * kBlockAlign;
    entries_.push_back(e);
    return entries_.size() - 1;
  }
  // A tensor over a part of the memory of tensor i, from `offset` (bytes) on.
  size_t alias(size_t i, const int64_t* lead, size_t n_lead, size_t offset) {
    const size_t data = data_;
    const size_t at = plan(entries_[i].dtype, lead, n_lead, *entries_[i].inner, 0);
    data_ = data, entries_[at].data = entries_[i].data + offset;
    return at;
  }
  void take() {
    records_ = (records_ + kBlockAlign - 1) / kBlockAlign * kBlockAlign;
    block_ = BlockPool::instance().take(records_ + data_, static_cast<uint32_t>(entries_.size()));
    left_ = static_cast<uint32_t>(entries_.size());
  }
  ~OutBlock() {
    for (; left_ > 0; --left_) BlockPool::instance().give(block_);  // tensors that were never made
  }
  uint8_t* data(size_t i) const { return block_data(block_) + records_ + entries_[i].data; }

  PyObject* make(size_t i) {
    const Entry& e = entries_[i];
    auto* out = reinterpret_cast<OutTensor*>(block_data(block_) + e.record);
    auto* shape = reinterpret_cast<int64_t*>(out + 1);
    int64_t* strides = shape + e.ndim;
    for (size_t d = 0; d < e.n_lead; ++d) shape[d] = e.lead[d];
    for (size_t d = e.n_lead; d < e.ndim; ++d) shape[d] = (*e.inner)[d - e.n_lead];
    int64_t step = 1;
    for (size_t d = e.ndim; d-- > 0;) strides[d] = step, step *= std::max<int64_t>(shape[d], 1);
    DLManagedTensorVersioned& m = out->managed;
    m = {};
    m.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    m.manager_ctx = out;
    m.deleter = out_tensor_deleter;
    m.dl_tensor.data = data(i);
    m.dl_tensor.device = {kDLCPU, 0};
    m.dl_tensor.ndim = static_cast<int32_t>(e.ndim);
    m.dl_tensor.dtype = {e.dtype.code, e.dtype.bits, 1};
    m.dl_tensor.shape = shape, m.dl_tensor.strides = strides;
    out->block = block_;
    void* tensor = nullptr;
    // Where torch refuses (a dtype that it does not know: `Codec` lets none through; no memory) it may have taken
    // the record or not: leaking the block is the harmless side.
    --left_;
    if (torch_api().api->managed_tensor_to_py_object_no_sync(&m, &tensor) != 0) throw nb::python_error();
    return static_cast<PyObject*>(tensor);
  }

 private:
  struct Entry {
    DType dtype;
    size_t ndim, n_lead, record, data;
    const int64_t* lead;
    const std::vector<int64_t>* inner;
  };
  std::vector<Entry> entries_;
  size_t records_ = 0, data_ = 0;
  Block* block_ = nullptr;
  uint32_t left_ = 0;
};

// ---- buffers (numpy arrays and scalars) ----
inline bool dtype_of_format(const char* f, Py_ssize_t itemsize, DType& out) {
  if (!f) return false;
  if (*f == '@' || *f == '=' || (*f == '<' && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)) ++f;
  const auto bits = static_cast<uint8_t>(8 * itemsize);
  switch (*f) {
    case '?': out = {kDLBool, 8}; break;
    case 'b': case 'h': case 'i': case 'l': case 'q': out = {kDLInt, bits}; break;
    case 'B': case 'H': case 'I': case 'L': case 'Q': out = {kDLUInt, bits}; break;
    case 'e': case 'f': case 'd': out = {kDLFloat, bits}; break;
    case 'Z':
      if (f[1] != 'f' && f[1] != 'd') return false;
      out = {kDLComplex, bits};
      return f[2] == 0;
    default: return false;
  }
  return f[1] == 0;
}

// A buffer view that is released in time.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& o) noexcept : view_(o.view_), held_(o.held_) { o.held_ = false; }
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() {
    if (held_) PyBuffer_Release(&view_);
  }
  bool get(PyObject* o, bool writable = false) {
    held_ = PyObject_GetBuffer(o, &view_, PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) == 0;
    if (!held_) PyErr_Clear();
    return held_;
  }
  const Py_buffer& view() const { return view_; }

 private:
  Py_buffer view_{};
  bool held_ = false;
};

// Slots that a caller hands in: a 1-D int64 tensor or array, contiguous.
class SlotsArg {
 public:
  // `any_shape`: of any number of dimensions, one after the other.
  explicit SlotsArg(nb::handle o, bool any_shape = false) {
    DLTensor t{};
    if (!torch_api().api && Py_TYPE(o.ptr()) == torch_api().tensor) {
      array_ = o.attr("numpy")();  // a torch without the exchange API
      o = array_;
    }
    if (torch_api().view(o.ptr(), t)) {
      if (any_shape && take_all(t)) return;
      const bool flat = t.ndim == 1 && t.dtype.code == kDLInt && t.dtype.bits == 64 &&
                        (!t.strides || t.strides[0] == 1 || t.shape[0] <= 1);
      if (flat && aligned(static_cast<const uint8_t*>(t.data) + t.byte_offset)) {
        data = reinterpret_cast<const int64_t*>(static_cast<const uint8_t*>(t.data) + t.byte_offset);
        n = static_cast<size_t>(t.shape[0]);
        return;
      }
    } else if (buffer_.get(o.ptr())) {
      const Py_buffer& v = buffer_.view();
      DType d{};
      if (v.ndim == 1 && dtype_of_format(v.format, v.itemsize, d) && d == DType{kDLInt, 64} &&
          (v.strides[0] == 8 || v.shape[0] <= 1) && aligned(v.buf)) {
        data = static_cast<const int64_t*>(v.buf), n = static_cast<size_t>(v.shape[0]);
        return;
      }
    }
    throw nb::type_error("slots must be a contiguous 1-D int64 tensor on the CPU");
  }
  const int64_t* data = nullptr;
  size_t n = 0;

 private:
  static bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % alignof(int64_t) == 0; }
  bool take_all(const DLTensor& t) {
    int64_t step = 1;
    for (int d = t.ndim - 1; d >= 0; --d) {
      if (t.strides && t.shape[d] > 1 && t.strides[d] != step) return false;
      step *= t.shape[d];
    }
    const auto* at = static_cast<const uint8_t*>(t.data) + t.byte_offset;
    if (t.dtype.code != kDLInt || t.dtype.bits != 64 || !aligned(at)) return false;
    data = reinterpret_cast<const int64_t*>(at), n = static_cast<size_t>(step);
    return true;
  }
  Buffer buffer_;
  nb::object array_;
};

}  // namespace engram
