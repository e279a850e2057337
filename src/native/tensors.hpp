// Tensors in and out through the DLPack C exchange API (no torch headers, no torch ABI), and the memory of output batches.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "casters.hpp"
#include "dtypes.hpp"

namespace nb = nanobind;

namespace engram {

// ---- Python objects that are made once ----
// Returns `place`, a static pointer, filled by `make` at the first call. C++'s own way for this, a static that a call makes,
// has a guard: making allocates, so it may collect garbage and run a finaliser, which would wait here for itself.
template <class Make>
PyObject* made_once(PyObject*& place, Make make) {
  if (place) return place;
  nb::object made = make();
  if (!made.is_valid()) throw nb::python_error();
  if (!place) place = made.release().ptr();
  return place;
}
inline PyObject* imported_once(PyObject*& place, const char* module, const char* name) {
  return made_once(place, [&] { return nb::object(nb::module_::import_(module).attr(name)); });
}

// ---- memory for output batches, used again: fresh pages cost more than the copy into them ----
constexpr size_t kBlockAlign = 64;

struct Block {
  std::atomic<uint32_t> users;
  uint32_t size_class;
  Block* next;
};
static_assert(sizeof(Block) <= kBlockAlign);

// Blocks are returned by any thread, with or without the GIL: a spin lock guards lists that are held for nanoseconds.
// The pool is never destroyed, because a tensor may outlive every other object of the process.
class BlockPool {
 public:
  static constexpr size_t kCap = size_t{512} << 20;  // bytes kept for later use
  static BlockPool& instance() {
    static BlockPool* pool = [] {
      auto* p = new BlockPool;
      // A child may be forked while another thread holds the lock, so the child starts with an empty pool.
      ::pthread_atfork(nullptr, nullptr, [] { instance().forget(); });
      return p;
    }();
    return *pool;
  }
  // A block with at least `bytes` bytes after its first 64, for `users` tensors.
  Block* take(size_t bytes, uint32_t users) {
    const uint32_t c = class_of(bytes + kBlockAlign);
    Block* b = nullptr;
    if (c < kClasses) {
      lock();
      if ((b = free_[c])) free_[c] = b->next, free_bytes_ -= class_bytes(c);
      unlock();
    }
    if (!b) {
      const size_t size = c < kClasses ? class_bytes(c) : (bytes + 2 * kBlockAlign) & ~(kBlockAlign - 1);
      void* at = std::aligned_alloc(kBlockAlign, size);
      if (!at) throw std::bad_alloc();
      b = new (at) Block{};
    }
    b->users.store(users, std::memory_order_relaxed);
    b->size_class = c;
    return b;
  }
  void give(Block* b) {
    if (b->users.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const uint32_t c = b->size_class;
    if (c < kClasses) {
      lock();
      if (free_bytes_ + class_bytes(c) <= kCap) {
        b->next = free_[c], free_[c] = b, free_bytes_ += class_bytes(c);
        unlock();
        return;
      }
      unlock();
    }
    std::free(b);
  }
  size_t free_bytes() const { return free_bytes_; }
  // Returns the free blocks to the system.
  void empty() {
    for (Block*& list : free_) {
      lock();
      Block* b = list;
      list = nullptr;
      for (Block* one = b; one; one = one->next) free_bytes_ -= class_bytes(one->size_class);
      unlock();
      while (b) std::free(std::exchange(b, b->next));
    }
  }

 private:
  // Four classes for each doubling from 1 KB to 1 GB.
  static constexpr uint32_t kClasses = 80;
  static size_t class_bytes(uint32_t c) { return (size_t{1024} << (c / 4)) / 4 * (4 + c % 4); }
  static uint32_t class_of(size_t bytes) {
    if (bytes <= 1024) return 0;
    const int top = 63 - std::countl_zero(bytes - 1);  // 2^top < bytes <= 2^(top+1)
    const size_t quarter = size_t{1} << (top - 2);
    const auto q = static_cast<uint32_t>((bytes - (size_t{1} << top) + quarter - 1) / quarter);  // 1..4
    return static_cast<uint32_t>(top - 10) * 4 + q;
  }
  void lock() {
    while (busy_.test_and_set(std::memory_order_acquire)) {}
  }
  void unlock() { busy_.clear(std::memory_order_release); }
  void forget() {
    for (auto& f : free_) f = nullptr;
    free_bytes_ = 0;
    unlock();
  }

  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  Block* free_[kClasses] = {};
  size_t free_bytes_ = 0;
};

inline uint8_t* block_data(Block* b) { return reinterpret_cast<uint8_t*>(b) + kBlockAlign; }

// Strided memory that another object keeps alive.
struct Strided {
  const uint8_t* data = nullptr;
  DType dtype{};
  int ndim = 0;
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;  // in elements; null: contiguous
  bool in_bytes = false;             // strides count bytes
};

// The functions of torch. Without the exchange API, Python reads and makes tensors (`describe`, `make`), which is slower; code
// above this file does not see the difference.
struct Torch {
  PyTypeObject* tensor = nullptr;
  const DLPackExchangeAPI* api = nullptr;  // null: a torch without it
  PyObject* lazy_bits = nullptr;           // tensor -> whether it is a lazily negated or conjugated view
  PyObject* describe = nullptr;            // tensor -> (address, dtype code, bits, (*shape, *strides)), or None
  PyObject* make = nullptr;                // (uint8 array, dtype code, bits, shape) -> a tensor over the array's memory
};

inline Torch& torch_api() {
  static Torch torch;
  return torch;
}

// Where a tensor's dispatch keys lie, which distinguish lazily negated and conjugated views from other tensors: asking torch
// for them takes a hundred times as long. Their position is internal to torch: Python finds it with tensors of all kinds.
class DispatchKeys {
 public:
  static DispatchKeys& instance() {
    static DispatchKeys keys;
    return keys;
  }
  void forget() { known_ = false; }
  // `tensors`: (tensor, address of torch's part of it, its keys). False: the keys do not all lie at one position, or a second
  // position fits as well.
  bool learn(nb::list tensors, uint64_t lazy);
  bool known() const { return known_; }
  // Whether the keys of a tensor mark a lazy view.
  bool are_lazy(PyObject* tensor) const {
    const auto part = reinterpret_cast<const void*>(word(tensor, object_));
    return part && word(part, part_) & lazy_;  // a tensor made without its constructor has no part
  }

 private:
  static constexpr size_t kPartBytes = 176;  // a lower bound for every version of torch
  static bool is_plain(PyObject* o) { return Py_TYPE(o) == torch_api().tensor; }
  static uint64_t word(const void* of, size_t at) {
    uint64_t word;
    std::memcpy(&word, static_cast<const uint8_t*>(of) + at, sizeof word);
    return word;
  }
  static std::vector<size_t> multiples_of_8(size_t from, size_t to) {
    std::vector<size_t> all;
    for (; from + 8 <= to; from += 8) all.push_back(from);
    return all;
  }

  bool known_ = false;
  size_t object_ = 0, part_ = 0;  // offsets of torch's part in Python's object, and of the keys in that part
  uint64_t lazy_ = 0;             // the keys of lazy views
};

// If it raises, nothing has changed.
void use_torch(nb::handle tensor_type, nb::handle exchange_api, nb::callable lazy_bits, nb::callable describe,
               nb::callable make);

inline bool is_tensor(PyObject* o) { return Py_TYPE(o) == torch_api().tensor; }

// Whether a tensor is a lazily negated or conjugated view. Where its dispatch keys cannot be read, torch is asked, but only
// about tensors that can be lazy, because its `is_neg` releases the GIL: lazy tensors are views, or were made in inference
// mode (and have no version).
inline bool is_lazy(PyObject* o) {
  if (const DispatchKeys& keys = DispatchKeys::instance(); keys.known()) return keys.are_lazy(o);
  static PyObject* base = PyUnicode_InternFromString("_base");
  static PyObject* version = PyUnicode_InternFromString("_version");
  const nb::object viewed = nb::steal(PyObject_GetAttr(o, base));
  if (viewed.is_valid() && viewed.is_none()) {
    if (nb::steal(PyObject_GetAttr(o, version)).is_valid()) return false;
  }
  PyErr_Clear();
  nb::object answer = nb::steal(PyObject_CallFunctionObjArgs(torch_api().lazy_bits, o, nullptr));
  if (!answer.is_valid()) return PyErr_Clear(), true;
  return answer.ptr() != Py_False;
}

// A tensor as the result of a function.
class Tensor : public nb::object {
  NB_OBJECT(Tensor, nb::object, "torch.Tensor", is_tensor)
};

// ---- in ----
// A plain tensor on the CPU as it lies in memory. The tensor must live as long as this is used.
class TensorView : public Strided {
 public:
  // False: the object is not a tensor, or its memory cannot be read directly (sparse, meta, functorch, quantised, another
  // device). The caller's slow path names the leaf.
  bool of(PyObject* o) {
    if (!is_tensor(o)) return false;
    return torch_api().api ? lent(o) : described(o);
  }

 private:
  bool lent(PyObject* o) {
    DLTensor t;
    if (torch_api().api->dltensor_from_py_object_no_sync(o, &t) != 0) {
      PyErr_Clear();
      return false;
    }
    if (t.device.device_type != kDLCPU || t.dtype.lanes != 1) return false;
    data = static_cast<const uint8_t*>(t.data) + t.byte_offset;
    dtype = {t.dtype.code, t.dtype.bits}, ndim = t.ndim, shape = t.shape, strides = t.strides;
    return t.data != nullptr || is_empty();  // an all-zero tensor may have no memory behind it
  }
  bool described(PyObject* o);
  bool is_empty() const {
    for (int i = 0; i < ndim; ++i)
      if (shape[i] == 0) return true;
    return false;
  }
  std::vector<int64_t> dims_;  // shape and strides from `describe`
};

// ---- out ----
// One tensor of a block; lives in the block itself.
struct OutTensor {
  DLManagedTensorVersioned managed;
  Block* block;
};

// Several tensors in one block of memory: first plans their places, then takes the block, then makes them.
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
  void take();
  ~OutBlock();
  uint8_t* data(size_t i) const { return data(entries_[i]); }

  Tensor make(size_t i);

 private:
  struct Entry {
    DType dtype;
    size_t ndim, n_lead, record, data;
    const int64_t* lead;
    const std::vector<int64_t>* inner;
    int64_t size(size_t d) const { return d < n_lead ? lead[d] : (*inner)[d - n_lead]; }
  };
  uint8_t* data(const Entry& e) const { return block_data(block_) + records_ + e.data; }

  PyObject* lend(const Entry& e);
  // Without the exchange API: a tensor over an array that owns this tensor's share of the block.
  PyObject* wrap(const Entry& e);

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

// A buffer view that releases itself.
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

// ---- arrays out ----
// Makes new numpy arrays; the memory of large ones comes from the pool, because fresh pages cost more than the copy into them.
class ArrayMaker {
 public:
  static constexpr size_t kPooled = 256 << 10;  // bytes
  // numpy's dtype; an invalid object: numpy has none.
  static nb::handle dtype(DType d);
  // Returns an array [n, inner...] and the address of its memory.
  static std::pair<nb::object, uint8_t*> make(DType d, size_t n, const std::vector<int64_t>& inner, size_t bytes);

 private:
  static std::pair<nb::object, uint8_t*> fresh(nb::handle dtype, const nb::object& shape);
  static std::pair<nb::object, uint8_t*> pooled(nb::handle dtype, const nb::object& shape, size_t bytes);
};

// Slots as an argument: a contiguous 1-D int64 tensor or array.
class SlotsArg {
 public:
  // `any_shape`: of any number of dimensions, flattened.
  explicit SlotsArg(nb::handle o, bool any_shape = false);
  const int64_t* data = nullptr;
  size_t n = 0;

 private:
  static bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % alignof(int64_t) == 0; }
  bool take(const TensorView& t) {
    if (t.ndim != 1 || (t.strides && t.strides[0] != 1 && t.shape[0] > 1)) return false;
    data = reinterpret_cast<const int64_t*>(t.data), n = static_cast<size_t>(t.shape[0]);
    return true;
  }
  bool take_all(const TensorView& t) {
    int64_t step = 1;
    for (int d = t.ndim - 1; d >= 0; --d) {
      if (t.strides && t.shape[d] > 1 && t.strides[d] != step) return false;
      step *= t.shape[d];
    }
    data = reinterpret_cast<const int64_t*>(t.data), n = static_cast<size_t>(step);
    return true;
  }
  Buffer buffer_;
};

// Numbers as an argument: a contiguous 1-D float32 or float64 tensor or array.
class NumbersArg {
 public:
  explicit NumbersArg(nb::handle o);
  bool fits() const { return fits_; }
  double operator[](size_t i) const { return wide_ ? wide_[i] : static_cast<double>(narrow_[i]); }
  void copy_to(double* out) const { wide_ ? std::copy_n(wide_, n, out) : std::copy_n(narrow_, n, out); }
  size_t n = 0;

 private:
  bool take(DType d, const void* p) {
    const bool wide = d == DType{kDLFloat, 64};
    if (!(wide || d == DType{kDLFloat, 32}) || reinterpret_cast<uintptr_t>(p) % (d.bits / 8) != 0) return false;
    wide ? void(wide_ = static_cast<const double*>(p)) : void(narrow_ = static_cast<const float*>(p));
    return true;
  }
  bool fits_ = false;
  const double* wide_ = nullptr;
  const float* narrow_ = nullptr;
  Buffer buffer_;
};

}  // namespace engram
