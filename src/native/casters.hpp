// Types of the standard library as arguments and results. Only this file includes nanobind's converters: a unit that lacked one
// would take its type for a class that is bound, or have another converter of vectors than the others.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/detail/nb_list.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <optional>
#include <utility>
#include <vector>

namespace nanobind::detail {

// Access to the result of `PySequence_Fast`, a list or a tuple. The stable ABI has no such macros.
#ifdef Py_LIMITED_API
inline Py_ssize_t fast_size(PyObject* items) { return PySequence_Size(items); }
inline PyObject* fast_item(PyObject* items, Py_ssize_t i) {
  return PyList_Check(items) ? PyList_GetItem(items, i) : PyTuple_GetItem(items, i);
}
#else
inline Py_ssize_t fast_size(PyObject* items) { return PySequence_Fast_GET_SIZE(items); }
inline PyObject* fast_item(PyObject* items, Py_ssize_t i) { return PySequence_Fast_GET_ITEM(items, i); }
#endif

// Sequences. nanobind's own converter of a `std::vector` is noexcept: without memory it ends the process.
template <typename T>
struct type_caster<std::vector<T>> : list_caster<std::vector<T>, T> {
  template <typename Flags>
  bool from_python(handle src, Flags flags, cleanup_list* cleanup) {
    PyObject* o = src.ptr();
    if (PyUnicode_CheckExact(o) || PyBytes_CheckExact(o) || !PySequence_Check(o)) return false;
    const object items = steal(PySequence_Fast(o, ""));
    if (!items.is_valid()) {
      PyErr_Clear();
      return false;
    }
    const auto n = static_cast<size_t>(fast_size(items.ptr()));
    std::vector<T> values;
    values.reserve(n);
    flags = flags_for_local_caster<T>(flags);
    make_caster<T> item;
    for (size_t i = 0; i < n; ++i) {
      if (!item.from_python(fast_item(items.ptr(), static_cast<Py_ssize_t>(i)), flags, cleanup) ||
          !item.template can_cast<T>())
        return false;
      values.push_back(item.operator cast_t<T>());
    }
    this->value = std::move(values);
    return true;
  }
};

template <typename T>
struct type_caster<std::optional<std::vector<T>>> : optional_caster<std::optional<std::vector<T>>> {
  template <typename Flags>
  bool from_python(handle src, Flags flags, cleanup_list* cleanup) {
    this->value.reset();
    if (src.is_none()) return true;
    make_caster<std::vector<T>> inner;
    if (!inner.from_python(src, flags_for_local_caster<std::vector<T>>(flags), cleanup)) return false;
    this->value.emplace(std::move(inner.value));
    return true;
  }
};

}  // namespace nanobind::detail
