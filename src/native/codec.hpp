// Converts between Python's batches and packed rows: where each leaf of a TensorDict or dict lies in a row, and back.
// This is the fast path: it takes plain data and rejects everything else; Python then converts the batch or names the fault.
#pragma once
#include <atomic>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "casters.hpp"
#include "casts.hpp"
#include "leaves.hpp"
#include "rows.hpp"

namespace engram {

constexpr size_t kMostLeafBytes = size_t{1} << 40;
constexpr size_t kSequenceBytes = 8;

struct Node {
  enum Kind { kLeaf, kTensorDict, kDict } kind = kLeaf;
  size_t leaf = 0;
  std::vector<std::pair<nb::object, Node>> items;
  std::vector<int64_t> batch;    // a TensorDict's batch dimensions after the batch's own
  mutable nb::object size;       // the torch.Size that was returned last
  mutable std::vector<int64_t> size_lead;
};

// A checked batch: where its leaves lie, and all objects that must live until they are copied.
struct Plan {
  Plan() = default;
  Plan(Plan&&) = default;
  Plan(const Plan&) = delete;
  size_t steps = 0, envs = 1;
  bool sized = false;   // steps and envs are known: a leaf has been looked at
  bool single = false;  // one step of one environment, without batch dimensions
  std::vector<LeafSource> leaves;
  std::vector<nb::object> keep;
  std::vector<Buffer> buffers;
  std::vector<std::array<uint8_t, 16>> scalars;
  size_t bytes = 0;  // of all rows together
  bool carries_sequence = false;  // the last of `leaves` is the rows' own sequence: 0, which stands for the lane's sequence
  uint64_t codec = 0;  // the number of the codec that checked it
  std::vector<uint8_t> staged;  // the rows of a list of items, side by side
  std::vector<int64_t> given_index;  // what rows store in the leaf of their own index, where that is given
  // The leaf in which rows get their own index when they are written, which nothing in the plan has, and of how many numbers that is.
  std::optional<size_t> own;
  size_t own_dims = 1;
  std::vector<LeafSource> looked_at;  // where `leaves` is the whole of packed rows: the leaves in them
  std::shared_ptr<void> memory;       // that of packed rows

  // Forgets the batch; the vectors keep their memory.
  void clear() {
    steps = 0, envs = 1, bytes = 0, sized = single = carries_sequence = false;
    leaves.clear(), keep.clear(), buffers.clear(), scalars.clear(), staged.clear(), given_index.clear(), looked_at.clear();
    own.reset(), memory.reset();
  }
};

// uint8 [n, row bytes], in the layout of a store.
using PackedRows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;

inline void check_packed_bytes(const PackedRows& rows) {
  if (rows.shape(0) > 0 && rows.shape(1) > 1 && rows.stride(1) != 1) throw nb::value_error("the bytes of a row must lie side by side");
  if (rows.shape(0) > kMostBytes / std::max<size_t>(1, rows.shape(1))) throw std::bad_alloc();
}

// How Python numbers of a batch are read.
struct Numbers {
  // In a list of items, a number has the dtype that `torch.as_tensor` gives it: int64, or a float of so many bits.
  std::optional<int> float_bits;
};

class Codec {
 public:
  // leaves: (code, bits, shape, offset); tree: (kind, payload) as RowLayout describes it, or None for lists of leaves.
  // sequence: the offset of a row's own sequence (int64), which no batch has. of_items: rows stand for items, equal ones of which are
  // built again, so all that is written has exactly this form (`check_same`).
  Codec(nb::list leaves, nb::object tree, nb::handle td_type, nb::object td_template, nb::object size_type,
        nb::handle array_type, nb::handle scalar_type, std::optional<size_t> sequence, bool of_items)
      : sequence_(sequence), of_items_(of_items), td_type_(nb::borrow(td_type)), size_type_(std::move(size_type)), array_type_(nb::borrow(array_type)),
        scalar_type_(nb::borrow(scalar_type)) {
    for (nb::handle h : leaves) add_leaf(tuple_of(h, 4));
    in_row_.resize(leaves_.size());
    std::iota(in_row_.begin(), in_row_.end(), size_t{0});
    std::stable_sort(in_row_.begin(), in_row_.end(), [&](size_t a, size_t b) { return leaves_[a].offset < leaves_[b].offset; });
    if (sequence && *sequence > kMostLeafBytes) throw nb::value_error("a leaf lies too far inside the row");
    if (!tree.is_none()) {
      if (!PyType_Check(td_type.ptr())) throw nb::type_error("td_type must be a type");
      std::vector<bool> named(leaves_.size(), false);
      root_ = parse(tuple_of(tree, 2), named), has_tree_ = true;
      for (bool is_named : named)
        if (!is_named) throw nb::value_error("the tree must name each leaf once");
    }
    if (!td_template.is_none())
      for (auto [k, v] : nb::cast<nb::dict>(td_template)) {
        td_template_.emplace_back(nb::borrow(k), nb::borrow(v));
        if (nb::cast<std::string>(k) == "_device") device_ = nb::borrow(v);
      }
    scalars_reserved_ = leaves_.size();
  }
  Codec(const Codec&) = delete;

  const std::vector<Leaf>& leaves() const { return leaves_; }
  // The numbers of the leaves in the order in which they lie in a row.
  const std::vector<size_t>& in_row() const { return in_row_; }
  // Unique within this process.
  uint64_t number() const { return number_; }
  // The number of leaves that a plan writes, including the row's own sequence, which no batch has.
  size_t sources() const { return leaves_.size() + sequence_.has_value(); }
  std::optional<size_t> sequence() const { return sequence_; }
  bool of_items() const { return of_items_; }
  // The form of a batch; null: it is a list of leaves.
  const Node* root() const { return has_tree_ ? &root_ : nullptr; }
  // Where the row's last leaf ends.
  size_t row_end() const {
    size_t end = sequence_ ? *sequence_ + kSequenceBytes : 0;
    for (const Leaf& leaf : leaves_) end = std::max(end, leaf.offset + leaf.bytes);
    return end;
  }

  // batch_dims 0: one step; 1: [time]; 2: [environment, time] or, with time_dim 0, [time, environment].
  // time_dim -1 with batch_dims 1: [environment], one time step. `extra` is a (key, value) of the root, the rows' own
  // index, which replaces the batch's own entry if it has one; without a value rows get it when they are written. None: not plain,
  // or not of this layout.
  std::optional<Plan> check(nb::handle batch, int batch_dims, int time_dim, nb::handle extra) const {
    check_dims(batch_dims, time_dim);
    PyObject *key = nullptr, *value = nullptr;
    if (!extra.is_none()) {
      if (!PyTuple_Check(extra.ptr())) throw nb::type_error("extra must be a tuple of a key and a value");
      if (!PyArg_ParseTuple(extra.ptr(), "OO", &key, &value)) throw nb::python_error();
    }
    const std::optional<size_t> own = key ? root_leaf(key) : std::nullopt;
    if (!has_tree_ || (key && !own)) return std::nullopt;
    std::vector<nb::object> values(leaves_.size());
    if (!flatten_root(batch.ptr(), values, own, nullptr)) return std::nullopt;
    const bool is_given = value && value != Py_None;
    if (is_given) values[*own] = nb::borrow(value);
    Plan plan;
    plan.codec = number_;
    plan.scalars.reserve(scalars_reserved_);
    plan.leaves.reserve(sources()), plan.keep.reserve(leaves_.size());
    for (size_t k = 0; k < leaves_.size(); ++k) {
      if (k == own && !is_given)
        plan.leaves.push_back({leaves_[k].offset, leaves_[k].bytes, nullptr, 0, 0});
      else if (!take(k, values[k].ptr(), batch_dims, time_dim, plan, {}))
        return std::nullopt;
    }
    if (own && !is_given && (!plan.sized || !set_own(plan, *own))) return std::nullopt;
    for (nb::object& o : values) plan.keep.push_back(std::move(o));
    finish(plan, batch_dims);
    return plan;
  }
  // The leaf under a key of the root.
  std::optional<size_t> root_leaf(PyObject* key) const {
    for (const auto& [name, child] : root_.items)
      if (child.kind == Node::kLeaf && PyObject_RichCompareBool(name.ptr(), key, Py_EQ) == 1) return child.leaf;
    PyErr_Clear();
    return std::nullopt;
  }
  // Lets rows get their own index in a leaf when they are written. False: it has no room for one.
  bool set_own(Plan& plan, size_t k) const {
    plan.own_dims = index_dims(k);
    if (plan.own_dims) plan.own = k;
    return plan.own_dims > 0;
  }
  static void check_dims(int batch_dims, int time_dim) {
    const bool good = batch_dims == 0 || (batch_dims == 1 && (time_dim == 0 || time_dim == -1)) ||
                      (batch_dims == 2 && (time_dim == 0 || time_dim == 1));
    if (!good) throw nb::value_error("batch_dims must be 0 to 2, time_dim one of them (or -1 with one)");
  }
  // Packed rows, uint8 [n, row bytes], as they are.
  Plan check_packed(PackedRows rows) const {
    const size_t row_bytes = rows.shape(1);
    if (sequence_) throw nb::value_error("rows that carry their own sequence are not appended as they are");
    if (row_end() > row_bytes)
      throw nb::value_error(("the rows have " + std::to_string(row_bytes) + " bytes each, their layout " + std::to_string(row_end())).c_str());
    check_packed_bytes(rows);
    Plan plan;
    plan.codec = number_, plan.steps = rows.shape(0), plan.sized = true, plan.bytes = plan.steps * row_bytes;
    const ptrdiff_t stride = rows.stride(0);
    plan.leaves.push_back({0, row_bytes, rows.data(), stride, 0});
    for (const Leaf& leaf : leaves_) plan.looked_at.push_back({leaf.offset, leaf.bytes, rows.data() + leaf.offset, stride, 0});
    plan.memory = std::make_shared<PackedRows>(std::move(rows));
    return plan;
  }
  // A list of leaves in layout order.
  std::optional<Plan> check_list(nb::list list, int batch_dims, int time_dim) const {
    check_dims(batch_dims, time_dim);
    if (nb::len(list) != leaves_.size()) return std::nullopt;
    Plan plan;
    plan.codec = number_;
    plan.scalars.reserve(scalars_reserved_);
    for (size_t k = 0; k < leaves_.size(); ++k)
      if (k >= nb::len(list) || !take(k, plan.keep.emplace_back(list[k]).ptr(), batch_dims, time_dim, plan, {}))
        return std::nullopt;
    finish(plan, batch_dims);
    return plan;
  }

  // As `check`, for rows that get their own index in leaf `own`: an entry of the batch there is ignored. False: not plain, or not
  // of this layout.
  bool check_without(Plan& plan, std::vector<nb::object>& values, PyObject* batch, int batch_dims, int time_dim,
                     std::optional<size_t> own, const Numbers& numbers, const std::vector<int64_t>* lead = nullptr) const {
    use_own(plan, own);
    if (!has_tree_ || (own && root_.kind == Node::kLeaf)) return false;
    values.resize(leaves_.size());
    if (!flatten_root(batch, values, own, lead)) return false;
    plan.scalars.reserve(scalars_reserved_), plan.leaves.reserve(sources());
    for (size_t k = 0; k < leaves_.size(); ++k) {
      if (k == own)
        plan.leaves.push_back({leaves_[k].offset, leaves_[k].bytes, nullptr, 0, 0});
      else if (!take(k, values[k].ptr(), batch_dims, time_dim, plan, numbers))
        return false;
    }
    if (!plan.sized) return false;
    finish(plan, batch_dims);
    return true;
  }
  // As `check_without`, of the leaves of a batch in the order of the layout; what stands for leaf `own` is ignored.
  bool check_columns(Plan& plan, PyObject* columns, int batch_dims, int time_dim, std::optional<size_t> own) const {
    use_own(plan, own);
    if (!PyList_CheckExact(columns)) return false;
    plan.codec = number_;
    plan.scalars.reserve(scalars_reserved_), plan.leaves.reserve(sources()), plan.keep.reserve(leaves_.size());
    for (size_t k = 0; k < leaves_.size(); ++k) {
      if (PyList_Size(columns) != static_cast<Py_ssize_t>(leaves_.size())) return false;  // also if taking one changed it
      PyObject* column = PyList_GetItem(columns, static_cast<Py_ssize_t>(k));
      if (k == own)
        plan.leaves.push_back({leaves_[k].offset, leaves_[k].bytes, nullptr, 0, 0});
      else if (!take(k, plan.keep.emplace_back(nb::borrow(column)).ptr(), batch_dims, time_dim, plan, {}))
        return false;
    }
    if (!plan.sized) return false;
    finish(plan, batch_dims);
    return true;
  }
  // As `check_without`, for items (`batch`: a batch of them) that are exactly of this form, so that equal items can be built
  // again: plain tensors, keys in the same order, the batch dimensions and the device of each TensorDict, no names.
  bool check_same(Plan& plan, std::vector<nb::object>& values, PyObject* items, bool batch, std::optional<size_t> own) const {
    use_own(plan, own);
    if (!has_tree_) return false;
    std::optional<int64_t> lead;
    if (batch && !first_length(root_, items, lead)) return false;
    values.assign(leaves_.size(), nb::object());
    if (!flatten_same(root_, items, values, batch ? std::vector<int64_t>{*lead} : std::vector<int64_t>{}, own)) return false;
    plan.leaves.reserve(leaves_.size());
    for (size_t k = 0; k < leaves_.size(); ++k) {
      if (k == own)
        plan.leaves.push_back({leaves_[k].offset, leaves_[k].bytes, nullptr, 0, 0});
      else if (!is_tensor(values[k].ptr()) || !take(k, values[k].ptr(), batch ? 1 : 0, 0, plan, {}))
        return false;
    }
    plan.codec = number_;
    if (plan.sized) finish(plan, 1);
    return plan.sized;
  }
  // As `check_without`, of one time step of `envs` environments, whose entries are numpy arrays of as many numbers as the rows
  // have, in any shape and any dtype that `cast_numbers` converts. Converted numbers are kept in `plan.staged`.
  bool check_step(Plan& plan, std::vector<nb::object>& values, PyObject* step, size_t envs) const {
    if (!has_tree_) return false;
    values.resize(leaves_.size());
    if (!flatten_root(step, values, std::nullopt, nullptr)) return false;
    plan.leaves.reserve(sources()), plan.buffers.reserve(leaves_.size());
    size_t staged = 0;
    for (size_t k = 0; k < leaves_.size(); ++k)
      if (!take_cast(leaves_[k], values[k].ptr(), envs, plan, staged)) return false;
    plan.steps = 1, plan.envs = envs, plan.sized = true, plan.codec = number_;
    finish(plan, 1);
    return true;
  }
  // As `set_own`; a ValueError where there is no room.
  void use_own(Plan& plan, std::optional<size_t> own) const {
    if (own && !set_own(plan, *own)) throw nb::value_error("this leaf has no room for an index");
  }
  // Of how many numbers the rows' own index in a leaf is, for each step of an item: that of time, then those of environments.
  // 0: it has no room for one.
  size_t index_dims(size_t k) const {
    if (k >= leaves_.size() || !(leaves_[k].dtype == DType{kDLInt, 64}) || leaves_[k].bytes == 0) return 0;
    const std::vector<int64_t>&shape = leaves_[k].shape, &within = root_.batch;
    if (shape.size() < within.size() || shape.size() > within.size() + 1) return 0;
    if (!std::equal(within.begin(), within.end(), shape.begin())) return 0;
    return shape.size() == within.size() ? 1 : shape.back() > 1 ? static_cast<size_t>(shape.back()) : 0;
  }

  nb::object build(const Node& node, std::vector<nb::object>& tensors, const std::vector<int64_t>& lead) const {
    if (node.kind == Node::kLeaf) return std::move(tensors[node.leaf]);
    nb::dict items;
    for (const auto& [key, child] : node.items) items[key] = build(child, tensors, lead);
    return node.kind == Node::kDict ? nb::object(items) : wrap(node, items, lead);
  }
  nb::object build(std::vector<nb::object>& tensors, const std::vector<int64_t>& lead, nb::handle extra) const {
    if (!has_tree_) {
      nb::list list;
      for (auto& t : tensors) list.append(std::move(t));
      return nb::object(list);
    }
    if (root_.kind == Node::kLeaf || extra.is_none()) return build(root_, tensors, lead);
    nb::dict items;
    for (const auto& [key, child] : root_.items) items[key] = build(child, tensors, lead);
    if (PyDict_Update(items.ptr(), extra.ptr()) != 0) throw nb::python_error();
    return root_.kind == Node::kDict ? nb::object(items) : wrap(root_, items, lead);
  }

  // As `build`, with a dict for each TensorDict.
  nb::object build_dicts(const Node& node, std::vector<nb::object>& arrays) const {
    if (node.kind == Node::kLeaf) return std::move(arrays[node.leaf]);
    nb::dict items;
    for (const auto& [key, child] : node.items) items[key] = build_dicts(child, arrays);
    return nb::object(items);
  }

 private:
  static nb::tuple tuple_of(nb::handle h, size_t least) {
    auto t = nb::cast<nb::tuple>(h);
    if (t.size() < least) throw nb::value_error("a tuple is too short");
    return t;
  }
  // Dtypes of torch: it must never refuse a tensor that is made over memory of this library.
  static bool is_supported(DType d) {
    switch (d.code) {
      case kDLInt: case kDLUInt: return d.bits == 8 || d.bits == 16 || d.bits == 32 || d.bits == 64;
      case kDLFloat: return d.bits == 16 || d.bits == 32 || d.bits == 64;
      case kDLBfloat: return d.bits == 16;
      case kDLComplex: return d.bits == 64 || d.bits == 128;
      case kDLBool: return d.bits == 8;
      default: return false;
    }
  }
  void add_leaf(nb::tuple spec) {
    Leaf leaf;
    leaf.dtype = {nb::cast<uint8_t>(spec[0]), nb::cast<uint8_t>(spec[1])};
    if (!is_supported(leaf.dtype)) throw nb::value_error("a leaf has a dtype that tensors do not have");
    leaf.itemsize = leaf.dtype.bits / 8;
    leaf.bytes = leaf.itemsize;
    size_t span = leaf.itemsize;  // computed as if no dimension were 0, as strides are
    for (nb::handle d : nb::cast<nb::tuple>(spec[2])) {
      const auto size = nb::cast<int64_t>(d);
      if (size < 0 || (size > 0 && span > kMostLeafBytes / static_cast<size_t>(size)))
        throw nb::value_error("a leaf's shape is negative or too large");
      span *= std::max<size_t>(1, static_cast<size_t>(size));
      leaf.shape.push_back(size), leaf.bytes *= static_cast<size_t>(size);
    }
    leaf.offset = nb::cast<size_t>(spec[3]);
    if (leaf.offset > kMostLeafBytes) throw nb::value_error("a leaf lies too far inside the row");
    leaf.lazy_bits = leaf.dtype.code == kDLFloat || leaf.dtype.code == kDLComplex || leaf.dtype.code == kDLBfloat;
    leaves_.push_back(std::move(leaf));
  }
  Node parse(nb::tuple t, std::vector<bool>& named) {
    Node node;
    const auto kind = nb::cast<std::string>(t[0]);
    if (kind == "leaf") {
      node.leaf = nb::cast<size_t>(t[1]);
      if (node.leaf >= leaves_.size()) throw nb::value_error("the tree names a leaf that is not there");
      if (named[node.leaf]) throw nb::value_error("the tree must name each leaf once");
      named[node.leaf] = true;
      return node;
    }
    if (kind != "td" && kind != "dict") throw nb::value_error("unknown kind of node");
    node.kind = kind == "td" ? Node::kTensorDict : Node::kDict;
    for (nb::handle item : nb::cast<nb::tuple>(t[1])) {
      auto pair = tuple_of(item, 2);
      node.items.emplace_back(nb::object(pair[0]), parse(tuple_of(pair[1], 2), named));
    }
    if (kind == "td")
      for (nb::handle d : nb::cast<nb::tuple>(tuple_of(t, 3)[2])) node.batch.push_back(nb::cast<int64_t>(d));
    return node;
  }

  // ---- in ----
  // Holds references: looking at a leaf (or comparing keys) can run Python code that drops other leaves. The entry of leaf
  // `own` is left out; the batch may lack it. With `lead` the batch dimensions of every TensorDict must be these and its own.
  bool flatten_root(PyObject* o, std::vector<nb::object>& values, std::optional<size_t> own,
                    const std::vector<int64_t>* lead) const {
    if (root_.kind == Node::kLeaf) {
      values[root_.leaf] = nb::borrow(o);
      return true;
    }
    nb::object held;
    if (!open(root_, o, held, lead)) return false;
    size_t entries = root_.items.size();
    for (const auto& [key, child] : root_.items) {
      const bool is_own = own && child.kind == Node::kLeaf && child.leaf == *own;
      PyObject* value = PyDict_GetItemWithError(o, key.ptr());
      if (!value && PyErr_Occurred()) return PyErr_Clear(), false;
      if (is_own) {
        if (!value) --entries;
        continue;
      }
      if (!value || !flatten(child, nb::object(nb::borrow(value)).ptr(), values, lead)) return false;
    }
    return static_cast<size_t>(PyDict_Size(o)) == entries;
  }
  // The first length of the first tensor of a batch.
  static bool first_length(const Node& node, PyObject* o, std::optional<int64_t>& length) {
    static PyObject* attribute = PyUnicode_InternFromString("_tensordict");
    if (node.kind == Node::kLeaf) {
      TensorView t;
      if (!t.of(o) || t.ndim < 1) return false;
      length = t.shape[0];
      return true;
    }
    const nb::object held = node.kind == Node::kDict ? nb::borrow(o) : nb::steal(PyObject_GenericGetAttr(o, attribute));
    if (!held.is_valid() || !PyDict_CheckExact(held.ptr())) return PyErr_Clear(), false;
    for (const auto& [key, child] : node.items) {
      PyObject* value = PyDict_GetItemWithError(held.ptr(), key.ptr());
      if (value && first_length(child, nb::object(nb::borrow(value)).ptr(), length)) return true;
      PyErr_Clear();
    }
    return false;
  }
  // As `flatten`, but only of exactly this form. The entry of leaf `own` may be missing where it is the last one.
  bool flatten_same(const Node& node, PyObject* o, std::vector<nb::object>& values, const std::vector<int64_t>& lead,
                    std::optional<size_t> own) const {
    if (node.kind == Node::kLeaf) {
      values[node.leaf] = nb::borrow(o);
      return true;
    }
    nb::object held;
    PyObject* const given = o;
    if (!open(node, o, held, &lead, true) || (node.kind == Node::kTensorDict && !is_as_built(given, lead.size()))) return false;
    Py_ssize_t at = 0;
    PyObject *key = nullptr, *value = nullptr;
    bool more = PyDict_Next(o, &at, &key, &value);
    for (size_t i = 0; i < node.items.size(); ++i) {
      const auto& [name, child] = node.items[i];
      const bool is_own = own && child.kind == Node::kLeaf && child.leaf == *own;
      if (!more) return is_own && i + 1 == node.items.size();
      // Plain strings: comparing them runs no Python code, which might change the dict.
      if (!PyUnicode_CheckExact(key) || (key != name.ptr() && PyUnicode_Compare(key, name.ptr()) != 0)) return false;
      if (!is_own) {
        const nb::object entry = nb::borrow(value);
        if (!flatten_same(child, entry.ptr(), values, lead, std::nullopt)) return false;
      }
      more = PyDict_Next(o, &at, &key, &value);
    }
    return !more;
  }
  // Whether a list of names contains only None after its first `lead` names.
  static bool are_unnamed(PyObject* names, size_t lead) {
    if (!PyList_CheckExact(names)) return false;
    for (size_t i = lead; i < static_cast<size_t>(PyList_Size(names)); ++i)
      if (PyList_GetItem(names, static_cast<Py_ssize_t>(i)) != Py_None) return false;
    return true;
  }
  // Whether a TensorDict has the device of the TensorDicts that are built, and no names after its first `lead` dimensions.
  bool is_as_built(PyObject* td, size_t lead) const {
    static PyObject* device = PyUnicode_InternFromString("_device");
    static PyObject* names = PyUnicode_InternFromString("_td_dim_names");
    const nb::object on = nb::steal(PyObject_GenericGetAttr(td, device)), named = nb::steal(PyObject_GenericGetAttr(td, names));
    if (!on.is_valid() || !named.is_valid() || !device_.is_valid()) return PyErr_Clear(), false;
    if (!named.is_none() && !are_unnamed(named.ptr(), lead)) return false;
    if (on.is(device_)) return true;
    const int same = PyObject_RichCompareBool(on.ptr(), device_.ptr(), Py_EQ);
    return PyErr_Clear(), same == 1;
  }
  // The dict of a node's entries; `held` keeps it alive. A dict may stand for a TensorDict and a TensorDict for a dict, but where
  // `same` form is asked for. False: the object is neither, or with `lead` a TensorDict's batch dimensions are others.
  bool open(const Node& node, PyObject*& o, nb::object& held, const std::vector<int64_t>* lead, bool same = false) const {
    const bool is_tensordict = reinterpret_cast<PyObject*>(Py_TYPE(o)) == td_type_.ptr();
    if (same && is_tensordict != (node.kind == Node::kTensorDict)) return false;
    if (is_tensordict) {
      static PyObject* attribute = PyUnicode_InternFromString("_tensordict");
      static PyObject* batch_size = PyUnicode_InternFromString("_batch_size");
      if (lead) {
        const nb::object size = nb::steal(PyObject_GenericGetAttr(o, batch_size));
        const int equal = size.is_valid() ? PyObject_RichCompareBool(size.ptr(), size_of(node, *lead), Py_EQ) : -1;
        if (equal != 1) return PyErr_Clear(), false;
      }
      held = nb::steal(PyObject_GenericGetAttr(o, attribute));
      if (!held.is_valid()) return PyErr_Clear(), false;
      o = held.ptr();  // the TensorDict keeps it alive
    }
    return PyDict_CheckExact(o);
  }
  bool flatten(const Node& node, PyObject* o, std::vector<nb::object>& values, const std::vector<int64_t>* lead) const {
    if (node.kind == Node::kLeaf) {
      values[node.leaf] = nb::borrow(o);
      return true;
    }
    return flatten_entries(node, o, values, lead);
  }
  // Apart, so that `flatten` is inlined: most entries are leaves.
  bool flatten_entries(const Node& node, PyObject* o, std::vector<nb::object>& values, const std::vector<int64_t>* lead) const {
    nb::object held;
    if (!open(node, o, held, lead) || static_cast<size_t>(PyDict_Size(o)) != node.items.size()) return false;
    for (const auto& [key, child] : node.items) {
      PyObject* value = PyDict_GetItemWithError(o, key.ptr());
      if (!value) return PyErr_Clear(), false;
      if (!flatten(child, nb::object(nb::borrow(value)).ptr(), values, lead)) return false;
    }
    return true;
  }

  bool take(size_t k, PyObject* o, int batch_dims, int time_dim, Plan& plan, const Numbers& numbers) const {
    const Leaf& leaf = leaves_[k];
    if (TensorView t; t.of(o)) {
      if (leaf.lazy_bits && is_lazy(o)) return false;
      if (place(leaf, t, batch_dims, time_dim, plan)) return true;
      if (!inner_strided(leaf, t, batch_dims)) return false;
      nb::object tidy = nb::borrow(o).attr("contiguous")();
      TensorView whole;
      if (!whole.of(tidy.ptr())) return false;
      plan.keep.push_back(tidy);
      return place(leaf, whole, batch_dims, time_dim, plan);
    }
    const int is_scalar = PyObject_IsInstance(o, scalar_type_.ptr());
    if (is_scalar < 0) PyErr_Clear();
    if (reinterpret_cast<PyObject*>(Py_TYPE(o)) == array_type_.ptr() || is_scalar == 1) {
      Buffer buffer;
      DType dtype{};
      if (!buffer.get(o)) return false;
      const Py_buffer& v = buffer.view();
      if (!dtype_of_format(v.format, v.itemsize, dtype) || (!v.buf && v.len > 0)) return false;
      Strided s{static_cast<const uint8_t*>(v.buf), dtype, v.ndim, reinterpret_cast<const int64_t*>(v.shape),
                reinterpret_cast<const int64_t*>(v.strides), true};
      plan.buffers.push_back(std::move(buffer));
      return place(leaf, s, batch_dims, time_dim, plan);
    }
    return batch_dims == 0 && leaf.shape.empty() && fits(leaf, o, numbers) && take_number(leaf, o, plan);
  }

  // Whether an array's numbers lie in the order of a leaf's, of all environments: its shape is theirs but for lengths of 1, or
  // either of them is flat. Others, such as images with their channels last, would be mixed up.
  static bool lies_as(const Leaf& leaf, size_t envs, const Py_buffer& v) {
    if (v.ndim == 1 || (v.ndim > 1 && leaf.shape.size() <= 1 && static_cast<size_t>(v.shape[0]) == envs)) return true;
    int d = 0;
    const auto is_next = [&](int64_t length) {
      while (d < v.ndim && v.shape[d] == 1) ++d;
      return length == 1 || (d < v.ndim && v.shape[d++] == length);
    };
    return is_next(static_cast<int64_t>(envs)) && std::all_of(leaf.shape.begin(), leaf.shape.end(), is_next);
  }
  // Plans the numbers of an array for one leaf of each environment. False: it is no plain array, has another number of them,
  // or in another order, has gaps, or another dtype that numbers are not converted from. `staged`: bytes of `plan.staged` that are in use.
  bool take_cast(const Leaf& leaf, PyObject* o, size_t envs, Plan& plan, size_t& staged) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(o)) != array_type_.ptr()) return false;
    Buffer buffer;
    DType dtype{};
    if (!buffer.get(o)) return false;
    const Py_buffer& v = buffer.view();
    const size_t bytes = envs * leaf.bytes, numbers = bytes / leaf.itemsize;
    if (!dtype_of_format(v.format, v.itemsize, dtype) || v.len != static_cast<Py_ssize_t>(numbers) * v.itemsize) return false;
    if ((!v.buf && v.len > 0) || !PyBuffer_IsContiguous(&v, 'C') || !lies_as(leaf, envs, v)) return false;
    const auto* from = static_cast<const uint8_t*>(v.buf);
    if (dtype == leaf.dtype) {
      plan.buffers.push_back(std::move(buffer));
    } else {
      if (plan.staged.empty()) plan.staged.resize(envs * leaf_bytes());  // once: addresses in it must not change
      uint8_t* const to = plan.staged.data() + staged;
      if (!cast_numbers(dtype, from, leaf.dtype, to, numbers)) return false;
      staged += bytes, from = to;
    }
    plan.leaves.push_back({leaf.offset, leaf.bytes, from, 0, static_cast<ptrdiff_t>(leaf.bytes)});
    return true;
  }

  // Whether a leaf fits, apart from gaps between the elements of one step.
  static bool inner_strided(const Leaf& leaf, const Strided& s, int batch_dims) {
    return s.dtype == leaf.dtype && s.ndim == batch_dims + static_cast<int>(leaf.shape.size());
  }

  static bool place(const Leaf& leaf, const Strided& s, int batch_dims, int time_dim, Plan& plan) {
    const int inner = static_cast<int>(leaf.shape.size());
    if (s.ndim != batch_dims + inner) return false;
    if (!(s.dtype == leaf.dtype)) return false;
    auto stride = [&](int d) -> int64_t {
      if (s.strides) return s.in_bytes ? s.strides[d] : s.strides[d] * static_cast<int64_t>(leaf.itemsize);
      int64_t step = static_cast<int64_t>(leaf.itemsize);
      for (int i = d + 1; i < s.ndim; ++i) step *= s.shape[i];
      return step;
    };
    int64_t expected = static_cast<int64_t>(leaf.itemsize);
    for (int d = inner - 1; d >= 0; --d) {
      if (s.shape[batch_dims + d] != leaf.shape[d]) return false;
      if (leaf.bytes > 0 && leaf.shape[d] > 1 && stride(batch_dims + d) != expected) return false;
      expected *= leaf.shape[d];
    }
    size_t steps = 1, envs = 1;
    LeafSource source{leaf.offset, leaf.bytes, s.data, 0, 0};
    for (int d = 0; d < batch_dims; ++d) {
      const bool time = d == time_dim;
      (time ? steps : envs) = static_cast<size_t>(s.shape[d]);
      (time ? source.stride : source.env_stride) = stride(d);
    }
    if (plan.sized && (plan.steps != steps || plan.envs != envs)) return false;
    plan.steps = steps, plan.envs = envs, plan.sized = true;
    plan.leaves.push_back(source);
    return true;
  }

  size_t leaf_bytes() const {
    size_t bytes = 0;
    for (const Leaf& leaf : leaves_) bytes += leaf.bytes;
    return bytes;
  }

  static bool fits(const Leaf& leaf, PyObject* o, const Numbers& numbers) {
    if (!numbers.float_bits || PyBool_Check(o)) return true;
    if (PyLong_Check(o)) return leaf.dtype == DType{kDLInt, 64};
    return leaf.dtype == DType{kDLFloat, static_cast<uint8_t>(*numbers.float_bits)};
  }
  bool take_number(const Leaf& leaf, PyObject* o, Plan& plan) const {
    std::array<uint8_t, 16> bytes{};
    const bool is_bool = PyBool_Check(o), is_int = PyLong_Check(o) && !is_bool;
    if (leaf.dtype == DType{kDLBool, 8} && is_bool) {
      bytes[0] = o == Py_True;
    } else if (leaf.dtype.code == kDLInt && is_int) {
      int overflow = 0;
      const long long v = PyLong_AsLongLongAndOverflow(o, &overflow);
      const int64_t limit = leaf.dtype.bits == 64 ? 0 : int64_t{1} << (leaf.dtype.bits - 1);
      if (overflow || (limit && (v < -limit || v >= limit))) return false;
      std::memcpy(bytes.data(), &v, leaf.itemsize);  // little-endian: the low bytes come first
    } else if (leaf.dtype.code == kDLFloat && (PyFloat_CheckExact(o) || is_int) && leaf.dtype.bits >= 32) {
      const double v = PyFloat_AsDouble(o);
      if (v == -1.0 && PyErr_Occurred()) return PyErr_Clear(), false;
      const auto f = static_cast<float>(v);
      if (leaf.dtype.bits == 64)
        std::memcpy(bytes.data(), &v, 8);
      else
        std::memcpy(bytes.data(), &f, 4);
    } else {
      return false;
    }
    if (plan.sized && (plan.steps != 1 || plan.envs != 1)) return false;
    plan.steps = plan.envs = 1, plan.sized = true;
    plan.scalars.push_back(bytes);  // never moves, because its memory is reserved
    plan.leaves.push_back({leaf.offset, leaf.bytes, plan.scalars.back().data(), 0, 0});
    return true;
  }

  void finish(Plan& plan, int batch_dims) const {
    plan.single = batch_dims == 0;
    size_t row = leaf_bytes();
    if (sequence_) {
      static constexpr uint8_t none[kSequenceBytes] = {};
      plan.leaves.push_back({*sequence_, kSequenceBytes, none, 0, 0});
      plan.carries_sequence = true;
      row += kSequenceBytes;
    }
    plan.bytes = row * plan.steps * plan.envs;
  }

  // ---- out ----
  nb::object wrap(const Node& node, nb::dict items, const std::vector<int64_t>& lead) const {
    static PyObject* no_arguments = PyTuple_New(0);
    static PyObject* tensordict = PyUnicode_InternFromString("_tensordict");
    static PyObject* batch_size = PyUnicode_InternFromString("_batch_size");
    static auto make = reinterpret_cast<newfunc>(PyType_GetSlot(&PyBaseObject_Type, Py_tp_new));
    nb::object td = nb::steal(make(reinterpret_cast<PyTypeObject*>(td_type_.ptr()), no_arguments, nullptr));
    if (!td.is_valid()) throw nb::python_error();
    for (const auto& [name, value] : td_template_) {
      PyObject* v = value.ptr();
      if (name.ptr() == tensordict) v = items.ptr();
      if (name.ptr() == batch_size) v = size_of(node, lead);
      if (PyObject_GenericSetAttr(td.ptr(), name.ptr(), v) != 0) throw nb::python_error();
    }
    return td;
  }
  PyObject* size_of(const Node& node, const std::vector<int64_t>& lead) const {
    if (!node.size.is_valid() || node.size_lead != lead) {
      nb::list sizes;
      for (int64_t d : lead) sizes.append(d);
      for (int64_t d : node.batch) sizes.append(d);
      node.size = size_type_(sizes), node.size_lead = lead;
    }
    return node.size.ptr();
  }

  std::vector<Leaf> leaves_;
  std::vector<size_t> in_row_;
  inline static std::atomic<uint64_t> last_number_{0};
  uint64_t number_ = ++last_number_;
  std::optional<size_t> sequence_;
  bool of_items_ = false;
  Node root_;
  bool has_tree_ = false;
  nb::object td_type_;
  std::vector<std::pair<nb::object, nb::object>> td_template_;  // names are interned
  nb::object size_type_, device_;
  nb::object array_type_, scalar_type_;
  size_t scalars_reserved_ = 0;
};

}  // namespace engram
