// What tensors.hpp declares: compiled once, as every unit uses it.
#include "tensors.hpp"

#include "bindings.hpp"

namespace engram {

bool DispatchKeys::learn(nb::list tensors, uint64_t lazy) {
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

void use_torch(nb::handle tensor_type, nb::handle exchange_api, nb::callable lazy_bits, nb::callable describe,
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

bool TensorView::described(PyObject* o) {
  const nb::object answer = nb::handle(torch_api().describe)(nb::handle(o));
  if (answer.is_none()) return false;
  const auto fields = nb::cast<nb::tuple>(answer);
  data = reinterpret_cast<const uint8_t*>(nb::cast<uintptr_t>(fields[0]));
  dtype = {nb::cast<uint8_t>(fields[1]), nb::cast<uint8_t>(fields[2])};
  for (nb::handle d : nb::cast<nb::tuple>(fields[3])) dims_.push_back(nb::cast<int64_t>(d));
  ndim = static_cast<int>(dims_.size() / 2), shape = dims_.data(), strides = shape + ndim;
  return data != nullptr || is_empty();
}

static void out_tensor_deleter(DLManagedTensorVersioned* self) {
  BlockPool::instance().give(static_cast<OutTensor*>(self->manager_ctx)->block);
}

void OutBlock::take() {
  records_ = (records_ + kBlockAlign - 1) / kBlockAlign * kBlockAlign;
  block_ = BlockPool::instance().take(records_ + data_, static_cast<uint32_t>(entries_.size()));
  left_ = static_cast<uint32_t>(entries_.size());
}

PyObject* OutBlock::lend(const Entry& e) {
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

Tensor OutBlock::make(size_t i) { return nb::steal<Tensor>(torch_api().api ? lend(entries_[i]) : wrap(entries_[i])); }

OutBlock::~OutBlock() {
  for (; left_ > 0; --left_) BlockPool::instance().give(block_);  // tensors that were never made
}

PyObject* OutBlock::wrap(const Entry& e) {
  size_t bytes = e.dtype.bits / 8;
  nb::list shape;
  for (size_t d = 0; d < e.ndim; ++d) shape.append(e.size(d)), bytes *= static_cast<size_t>(e.size(d));
  const nb::capsule share(block_, [](void* block) noexcept { BlockPool::instance().give(static_cast<Block*>(block)); });
  --left_;
  const nb::object array = nb::cast(nb::ndarray<nb::numpy, uint8_t>(data(e), 1, &bytes, share));
  return nb::handle(torch_api().make)(array, e.dtype.code, e.dtype.bits, shape).release().ptr();
}

nb::handle ArrayMaker::dtype(DType d) {
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

std::pair<nb::object, uint8_t*> ArrayMaker::make(DType d, size_t n, const std::vector<int64_t>& inner, size_t bytes) {
  const nb::object shape = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(1 + inner.size())));
  if (!shape.is_valid()) throw nb::python_error();
  for (size_t i = 0; i <= inner.size(); ++i) {
    PyObject* size = PyLong_FromLongLong(i ? inner[i - 1] : static_cast<int64_t>(n));
    if (!size || PyTuple_SetItem(shape.ptr(), static_cast<Py_ssize_t>(i), size) != 0) throw nb::python_error();
  }
  return bytes >= kPooled ? pooled(dtype(d), shape, bytes) : fresh(dtype(d), shape);
}

std::pair<nb::object, uint8_t*> ArrayMaker::fresh(nb::handle dtype, const nb::object& shape) {
  static PyObject* empty = nullptr;
  PyObject* const args[] = {shape.ptr(), dtype.ptr()};
  nb::object array = nb::steal(PyObject_Vectorcall(imported_once(empty, "numpy", "empty"), args, 2, nullptr));
  if (!array.is_valid()) throw nb::python_error();
  Buffer buffer;
  if (!buffer.get(array.ptr(), true)) throw nb::type_error("numpy gave no memory that can be written");
  auto* const data = static_cast<uint8_t*>(buffer.view().buf);
  return {std::move(array), data};
}

std::pair<nb::object, uint8_t*> ArrayMaker::pooled(nb::handle dtype, const nb::object& shape, size_t bytes) {
  Block* const block = BlockPool::instance().take(bytes, 1);
  const nb::capsule share(block, [](void* b) noexcept { BlockPool::instance().give(static_cast<Block*>(b)); });
  const nb::object array = nb::cast(nb::ndarray<nb::numpy, uint8_t>(block_data(block), 1, &bytes, share));
  return {array.attr("view")(dtype).attr("reshape")(shape), block_data(block)};
}

SlotsArg::SlotsArg(nb::handle o, bool any_shape) {
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

NumbersArg::NumbersArg(nb::handle o) {
  TensorView t;
  DType d{};
  if (t.of(o.ptr())) {
    if (is_lazy(o.ptr())) return;
    fits_ = t.ndim == 1 && (!t.strides || t.strides[0] == 1 || t.shape[0] <= 1) && take(t.dtype, t.data);
    n = t.ndim == 1 ? static_cast<size_t>(t.shape[0]) : 0;
  } else if (!is_tensor(o.ptr()) && buffer_.get(o.ptr())) {
    const Py_buffer& v = buffer_.view();
    fits_ = v.ndim == 1 && dtype_of_format(v.format, v.itemsize, d) && (v.strides[0] == v.itemsize || v.shape[0] <= 1) &&
            take(d, v.buf);
    n = v.ndim == 1 ? static_cast<size_t>(v.shape[0]) : 0;
  }
}

void bind_torch(nb::module_& m) {
  using namespace nb::literals;
  m.def("use_torch", &use_torch, "tensor_type"_a, "exchange_api"_a.none(), "lazy_bits"_a, "describe"_a, "make"_a);
  m.def("use_dispatch_keys", [](nb::list tensors, uint64_t lazy) { return DispatchKeys::instance().learn(tensors, lazy); },
        "tensors"_a, "lazy"_a);
}

}  // namespace engram
