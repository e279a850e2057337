// Tensors in and out through the DLPack C exchange API (no torch headers, no torch ABI), and the memory of output batches.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <pthread.h>

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

#include "third_party/dlpack.h"

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

struct DType {
  uint8_t code, bits;
  bool operator==(const DType& o) const { return code == o.code && bits == o.bits; }
};

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
  bool learn(nb::list tensors, uint64_t lazy) {
    known_ = false;
    const auto bytes = nb::cast<size_t>(nb::handle(reinterpret_cast<PyObject*>(torch_api().tensor)).attr("__basicsize__"));
    std::vector<size_t> objects = multiples_of_8(sizeof(PyObject), bytes), parts = multiples_of_8(0, kPartBytes);
    bool some_lazy = false, some_usual = false;
    for (nb::handle entry : tensors) {
      const auto [tensor, part, keys] = nb::cast<std::tuple<nb::object, uintptr_t, uint64_t>>(entry);
      if (!is_plain(tensor.ptr())) return false;
      (keys & lazy ? some_lazy : some_usual) = true;
      std::erase_if(objects, [&](size_t at) { return word(tensor.ptr(), at) != part; });
      std::erase_if(parts, [&](size_t at) { return word(reinterpret_cast<const void*>(part), at) != keys; });
    }
    if (objects.size() != 1 || parts.size() != 1 || !some_lazy || !some_usual) return false;
    object_ = objects[0], part_ = parts[0], lazy_ = lazy;
    return known_ = true;
  }
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
inline void use_torch(nb::handle tensor_type, nb::handle exchange_api, nb::callable lazy_bits, nb::callable describe,
                      nb::callable make) {
  const DLPackExchangeAPI* api = nullptr;
  if (!exchange_api.is_none()) {
    api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(exchange_api.ptr(), "dlpack_exchange_api"));
    if (!api) throw nb::python_error();
    if (api->header.version.major != DLPACK_MAJOR_VERSION) api = nullptr;
  }
  Torch& torch = torch_api();
  torch.tensor = reinterpret_cast<PyTypeObject*>(tensor_type.ptr());
  torch.api = api;
  DispatchKeys::instance().forget();
  Py_XDECREF(std::exchange(torch.lazy_bits, lazy_bits.release().ptr()));
  Py_XDECREF(std::exchange(torch.describe, describe.release().ptr()));
  Py_XDECREF(std::exchange(torch.make, make.release().ptr()));
}

inline bool is_tensor(PyObject* o) { return Py_TYPE(o) == torch_api().tensor; }

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
  bool described(PyObject* o) {
    const nb::object answer = nb::handle(torch_api().describe)(nb::handle(o));
    if (answer.is_none()) return false;
    const auto fields = nb::cast<nb::tuple>(answer);
    data = reinterpret_cast<const uint8_t*>(nb::cast<uintptr_t>(fields[0]));
    dtype = {nb::cast<uint8_t>(fields[1]), nb::cast<uint8_t>(fields[2])};
    for (nb::handle d : nb::cast<nb::tuple>(fields[3])) dims_.push_back(nb::cast<int64_t>(d));
    ndim = static_cast<int>(dims_.size() / 2), shape = dims_.data(), strides = shape + ndim;
    return data != nullptr || is_empty();
  }
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
inline void out_tensor_deleter(DLManagedTensorVersioned* self) {
  BlockPool::instance().give(static_cast<OutTensor*>(self->manager_ctx)->block);
}

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
  void take() {
    records_ = (records_ + kBlockAlign - 1) / kBlockAlign * kBlockAlign;
    block_ = BlockPool::instance().take(records_ + data_, static_cast<uint32_t>(entries_.size()));
    left_ = static_cast<uint32_t>(entries_.size());
  }
  ~OutBlock() {
    for (; left_ > 0; --left_) BlockPool::instance().give(block_);  // tensors that were never made
  }
  uint8_t* data(size_t i) const { return data(entries_[i]); }

  Tensor make(size_t i) { return nb::steal<Tensor>(torch_api().api ? lend(entries_[i]) : wrap(entries_[i])); }

 private:
  struct Entry {
    DType dtype;
    size_t ndim, n_lead, record, data;
    const int64_t* lead;
    const std::vector<int64_t>* inner;
    int64_t size(size_t d) const { return d < n_lead ? lead[d] : (*inner)[d - n_lead]; }
  };
  uint8_t* data(const Entry& e) const { return block_data(block_) + records_ + e.data; }

  PyObject* lend(const Entry& e) {
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
    m.dl_tensor.data = data(e);
    m.dl_tensor.device = {kDLCPU, 0};
    m.dl_tensor.ndim = static_cast<int32_t>(e.ndim);
    m.dl_tensor.dtype = {e.dtype.code, e.dtype.bits, 1};
    m.dl_tensor.shape = shape, m.dl_tensor.strides = strides;
    out->block = block_;
    void* tensor = nullptr;
    // If torch refuses (out of memory; unknown dtypes do not get here) it may or may not have taken the record: leaking the
    // block is harmless.
    --left_;
    if (torch_api().api->managed_tensor_to_py_object_no_sync(&m, &tensor) != 0) throw nb::python_error();
    return static_cast<PyObject*>(tensor);
  }
  // Without the exchange API: a tensor over an array that owns this tensor's share of the block.
  PyObject* wrap(const Entry& e) {
    size_t bytes = e.dtype.bits / 8;
    nb::list shape;
    for (size_t d = 0; d < e.ndim; ++d) shape.append(e.size(d)), bytes *= static_cast<size_t>(e.size(d));
    const nb::capsule share(block_, [](void* block) noexcept { BlockPool::instance().give(static_cast<Block*>(block)); });
    --left_;
    const nb::object array = nb::cast(nb::ndarray<nb::numpy, uint8_t>(data(e), 1, &bytes, share));
    return nb::handle(torch_api().make)(array, e.dtype.code, e.dtype.bits, shape).release().ptr();
  }

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
  static nb::handle dtype(DType d) {
    static PyObject* dtypes[256][256] = {};  // never destroyed
    PyObject*& known = dtypes[d.code][d.bits];
    if (known) return known;
    const char kind = d.code == kDLInt ? 'i' : d.code == kDLUInt ? 'u' : d.code == kDLFloat ? 'f'
                      : d.code == kDLComplex ? 'c' : d.code == kDLBool ? 'b' : 0;
    if (!kind) return {};
    const std::string name = kind + std::to_string(d.bits / 8);
    known = nb::module_::import_("numpy").attr("dtype")(name.c_str()).release().ptr();
    return known;
  }
  // Returns an array [n, inner...] and the address of its memory.
  static std::pair<nb::object, uint8_t*> make(DType d, size_t n, const std::vector<int64_t>& inner, size_t bytes) {
    const nb::object shape = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(1 + inner.size())));
    if (!shape.is_valid()) throw nb::python_error();
    for (size_t i = 0; i <= inner.size(); ++i) {
      PyObject* size = PyLong_FromLongLong(i ? inner[i - 1] : static_cast<int64_t>(n));
      if (!size || PyTuple_SetItem(shape.ptr(), static_cast<Py_ssize_t>(i), size) != 0) throw nb::python_error();
    }
    return bytes >= kPooled ? pooled(dtype(d), shape, bytes) : fresh(dtype(d), shape);
  }

 private:
  static std::pair<nb::object, uint8_t*> fresh(nb::handle dtype, const nb::object& shape) {
    static PyObject* empty = nullptr;
    PyObject* const args[] = {shape.ptr(), dtype.ptr()};
    nb::object array = nb::steal(PyObject_Vectorcall(imported_once(empty, "numpy", "empty"), args, 2, nullptr));
    if (!array.is_valid()) throw nb::python_error();
    Buffer buffer;
    if (!buffer.get(array.ptr(), true)) throw nb::type_error("numpy gave no memory that can be written");
    auto* const data = static_cast<uint8_t*>(buffer.view().buf);
    return {std::move(array), data};
  }
  static std::pair<nb::object, uint8_t*> pooled(nb::handle dtype, const nb::object& shape, size_t bytes) {
    Block* const block = BlockPool::instance().take(bytes, 1);
    const nb::capsule share(block, [](void* b) noexcept { BlockPool::instance().give(static_cast<Block*>(b)); });
    const nb::object array = nb::cast(nb::ndarray<nb::numpy, uint8_t>(block_data(block), 1, &bytes, share));
    return {array.attr("view")(dtype).attr("reshape")(shape), block_data(block)};
  }
};

// Slots as an argument: a contiguous 1-D int64 tensor or array.
class SlotsArg {
 public:
  // `any_shape`: of any number of dimensions, flattened.
  explicit SlotsArg(nb::handle o, bool any_shape = false) {
    TensorView t;
    if (t.of(o.ptr())) {
      if (t.dtype == DType{kDLInt, 64} && aligned(t.data) && (any_shape ? take_all(t) : take(t))) return;
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

}  // namespace engram
