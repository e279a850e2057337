// How samplers draw the rows of a batch, and the form in which batches are returned. `BatchMaker` puts both together.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "codec.hpp"
#include "draw.hpp"
#include "episodes.hpp"

namespace engram {

// Calls a method without positional arguments; `names` is a tuple of the keyword, if there is one.
inline nb::object call_method(PyObject* self, PyObject* method, PyObject* keyword = nullptr, PyObject* names = nullptr) {
  PyObject* const args[2] = {self, keyword};
  PyObject* result = PyObject_VectorcallMethod(method, args, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
  if (!result) throw nb::python_error();
  return nb::steal(result);
}

// Holds one of Python's locks; releases the GIL only where another thread has the lock.
class HeldLock {
 public:
  explicit HeldLock(nb::object lock) : lock_(std::move(lock)) {
    static PyObject* acquire = PyUnicode_InternFromString("acquire");
    call_method(lock_.ptr(), acquire);
  }
  ~HeldLock() {
    static PyObject* release = PyUnicode_InternFromString("release");
    PyObject* const self = lock_.ptr();
    Py_XDECREF(PyObject_VectorcallMethod(release, &self, 1, nullptr));
  }
  HeldLock(const HeldLock&) = delete;
  HeldLock& operator=(const HeldLock&) = delete;

 private:
  nb::object lock_;
};

inline nb::object attribute(const nb::object& of, PyObject* name) {
  PyObject* value = PyObject_GetAttr(of.ptr(), name);
  if (!value) throw nb::python_error();
  return nb::steal(value);
}

// A sampler's seed: 63 bits, as torch's seeds have.
inline uint64_t next_seed(CounterGenerator& generator) { return generator.next() >> 1; }

// The random numbers of a sampler, as its `_draw_seed` gets them.
class SeedSource {
 public:
  // `lock`: guards torch's random numbers; a fork waits for it.
  SeedSource(nb::object sampler, nb::object lock)
      : sampler_(std::move(sampler)), lock_(std::move(lock)), rank_(nb::cast<uint64_t>(sampler_.attr("_rank"))) {}
  // Runs Python code.
  uint64_t next() const { return seed_of_rank(drawn(), rank_); }

 private:
  uint64_t drawn() const {
    static PyObject* seed = PyUnicode_InternFromString("_seed");
    static PyObject* generator = PyUnicode_InternFromString("_generator");
    static PyObject* random = PyUnicode_InternFromString("random_");
    static PyObject* keyword = nullptr;
    PyObject* const names = made_once(keyword, [] { return nb::steal(Py_BuildValue("(s)", "generator")); });
    const nb::object from = attribute(sampler_, generator);
    if (CounterGenerator* own = nullptr; !from.is_none() && nb::try_cast(from, own)) return next_seed(*own);
    const nb::object out = attribute(sampler_, seed);
    const HeldLock held(lock_);
    // Before the draw: to find the memory may run Python code (older torches), and a finaliser that samples there would
    // put its own seed in place of this one, so that both batches had the same rows.
    const SlotsArg value(out);
    if (value.n < 1) throw nb::value_error("no seed");
    call_method(out.ptr(), random, from.ptr(), names);
    return static_cast<uint64_t>(value.data[0]);
  }

  nb::object sampler_, lock_;
  uint64_t rank_;
};

// The rows that a sampler draws for one batch.
struct DrawnBatch {
  std::vector<int64_t> slots;
  bool with_weights = false;     // whether to draw weights, if the sampler has any
  std::vector<uint8_t> weights;  // of each row, in the sampler's type
  std::vector<double> leaves;    // of the sum tree, during the draw only
  SliceBatch slices;             // the slices that the rows form, if the sampler draws slices
  int64_t member = 0;            // of an ensemble: the member that the rows come from
};

// The form in which a table's batches are returned: that of the stored data, and added entries, which are leaves numbered
// behind the rows' own.
class BatchForm {
 public:
  enum Content { kIndex, kWeight, kSliceId, kMask, kFirst, kLast, kMember };
  struct Entry {
    Content content;
    DType dtype;
    size_t item_bytes() const { return dtype.bits / 8; }
    bool is_column() const { return content == kFirst || content == kLast; }  // [n, 1]
  };
  // A bool leaf of the rows that is true at each slice's first or last step, whatever value is stored.
  struct Mark {
    size_t leaf;
    bool last;
  };

  BatchForm() = default;
  // `number`: unique to this table and these entries.
  BatchForm(const Codec& codec, uint64_t number) : number_(number), leaves_(codec.leaves().size()), codec_(&codec) {
    if (codec.root() && codec.root()->kind != Node::kLeaf) root_ = *codec.root(), has_keys_ = true;
  }
  uint64_t number() const { return number_; }
  // Whether one native call makes batches of this form.
  bool is_made_here() const { return is_made_here_; }
  void set_made_here(bool is) { is_made_here_ = is; }
  bool has_keys() const { return has_keys_; }  // without keys there is no place for entries
  const Node& root() const { return root_; }
  const std::vector<Entry>& entries() const { return entries_; }
  const std::vector<Mark>& marks() const { return marks_; }

  const std::vector<size_t>& outside() const { return outside_; }  // the leaves that have no place in the batch

  // Adds an entry at the root, if batches have keys, regardless of the batch dimensions there.
  void add_to_root(const nb::object& key, Entry entry) {
    if (has_keys_) put(root_, key, entry);
  }
  // Adds several entries under one key of the root, replacing the stored entry. False: there is no place for them.
  bool add_group_to_root(const nb::object& key, const std::vector<std::pair<nb::object, Entry>>& group) {
    if (!has_keys_ || !root_.batch.empty()) return false;
    Node* child = child_of(root_, key);
    if (!child) child = &root_.items.emplace_back(key, Node{}).second;
    *child = Node{};
    child->kind = root_.kind;
    for (const auto& [name, entry] : group) put(*child, name, entry);
    return true;
  }
  // Adds an entry that has no place in the batch.
  void add_outside(Entry entry) {
    outside_.push_back(leaves_ + entries_.size());
    entries_.push_back(entry);
  }
  // Adds an entry under a path, with the dictionaries on the way to it. False: there is no place for it.
  bool add(nb::tuple path, Entry entry) {
    Node* const node = parent(path, true);
    if (!node) return false;
    const nb::object key = path[path.size() - 1];
    if (const Node* child = child_of(*node, key); child && child->kind != Node::kLeaf) return false;
    put(*node, key, entry);
    return true;
  }
  // Marks each slice's first or last step in the leaf under a path; adds the leaf if it is missing. False: it cannot be marked.
  bool mark(nb::tuple path, bool last) {
    Node* const node = parent(path, false);
    const Node* const child = node ? child_of(*node, path[path.size() - 1]) : nullptr;
    if (!child) return add(path, {last ? kLast : kFirst, {kDLBool, 8}});
    if (child->kind != Node::kLeaf || child->leaf >= leaves_ || !(codec_->leaves()[child->leaf].dtype == DType{kDLBool, 8}))
      return false;
    marks_.push_back({child->leaf, last});
    return true;
  }
  // Marks each slice's first step in a flag at the root, if there is one and the batch is flat. False: the entry is not bool.
  bool mark_first_if_any(nb::tuple path) {
    Node* const node = parent(path, false);
    const Node* const child = node ? child_of(*node, path[path.size() - 1]) : nullptr;
    if (!child || child->kind != Node::kLeaf || child->leaf >= leaves_) return true;
    const Leaf& leaf = codec_->leaves()[child->leaf];
    if (node->kind == Node::kDict && leaf.bytes != leaf.dtype.bits / 8) return true;  // steps of several trajectories
    return mark(path, false);
  }

 private:
  static Node* child_of(Node& node, nb::handle key) {
    for (auto& [name, child] : node.items) {
      const int same = PyObject_RichCompareBool(name.ptr(), key.ptr(), Py_EQ);
      if (same < 0) throw nb::python_error();
      if (same) return &child;
    }
    return nullptr;
  }
  void put(Node& node, const nb::object& key, Entry entry) {
    Node* child = child_of(node, key);
    if (!child) child = &node.items.emplace_back(key, Node{}).second;
    *child = Node{};
    child->leaf = leaves_ + entries_.size();
    entries_.push_back(entry);
  }
  // The dictionary that holds the entry of a path. Null: that entry is not a dictionary, has more dimensions than the batch, or
  // is missing (and `made` is false).
  Node* parent(nb::tuple path, bool made) {
    Node* node = &root_;
    for (size_t i = 0; i + 1 < path.size(); ++i) {
      if (node->kind == Node::kLeaf) return nullptr;
      Node* child = child_of(*node, path[i]);
      if (!child) {
        if (!made || !node->batch.empty()) return nullptr;
        Node nested;
        nested.kind = node->kind;
        child = &node->items.emplace_back(nb::object(path[i]), std::move(nested)).second;
      }
      node = child;
    }
    return node->kind == Node::kLeaf || !node->batch.empty() || path.size() == 0 ? nullptr : node;
  }

  uint64_t number_ = 0;
  size_t leaves_ = 0;
  const Codec* codec_ = nullptr;  // valid only while the form is built
  bool is_made_here_ = false, has_keys_ = false;
  Node root_;
  std::vector<Entry> entries_;
  std::vector<size_t> outside_;
  std::vector<Mark> marks_;
};

// How a sampler draws the rows of one batch. The caller holds the sampler's lock.
class RowDraw {
 public:
  RowDraw() = default;
  RowDraw(const RowDraw&) = delete;
  virtual ~RowDraw() = default;
  // The type of the sampler's weights; none: the sampler has no weights.
  virtual std::optional<DType> weight_type() const { return std::nullopt; }
  // Prepares for batches of n, before `prepare`; may run Python code. False: same meaning as in `prepare`.
  virtual bool plan(Store&, size_t) { return true; }
  // Changes whenever the entries and marks that `complete` adds change.
  virtual uint64_t form_version() const { return 0; }
  // Adds the entries and marks of such batches. False: Python makes such batches.
  virtual bool complete(BatchForm&) const { return true; }
  // Fetches from Python what the draw needs, such as random numbers. False: no row is stored, or Python must make the batch.
  virtual bool prepare(Store& store) = 0;
  // Draws n rows that exist. Runs no Python code. False: same meaning as in `prepare`; the sampler must then be unchanged,
  // apart from random numbers.
  virtual bool draw(Store& store, size_t n, DrawnBatch& drawn) = 0;
  // Whether a row that replaces a drawn one before it is read is equally valid, because the sampler draws slots.
  virtual bool takes_newer_rows() const { return false; }
  // Whether a batch of several tables may contain such rows: the sampler adds nothing to the form, and no draw depends on the
  // one before.
  virtual bool joins() const { return false; }
  // Whether the draw reads only the store's counters, which say at any time which rows exist, whichever process writes them.
  virtual bool asks_counters_only() const { return false; }
};

}  // namespace engram
