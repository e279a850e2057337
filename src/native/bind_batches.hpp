// Whole batches in one native call: draw, look, copy, tensors, and the form of the stored data.
//
// A `RowDraw` is a sampler's part of it, a `RowSource` the table's, a `BatchMaker` one buffer's reader, which puts them
// together. Whatever is not plain is left to the caller: the call returns None, and the batch is made in Python.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_store.hpp"
#include "copy_threads.hpp"
#include "episodes.hpp"
#include "reuse.hpp"

namespace engram {

// The rows that batches are read from. Holds the store and its codec.
class RowSource {
 public:
  RowSource(nb::object store, nb::object codec, bool mapped)
      : store_object_(std::move(store)), codec_object_(std::move(codec)), store_(nb::cast<Store*>(store_object_)),
        codec_(nb::cast<const Codec*>(codec_object_)), mapped_(mapped) {
    if (!store_ || !codec_) throw nb::type_error("a store and its codec are needed, not None");
    check_codec(*store_, *codec_);
  }
  Store& store() const { return *store_; }
  const Codec& codec() const { return *codec_; }
  bool mapped() const { return mapped_; }  // a file lies behind the rows
  uint64_t id() const { return id_; }      // no other one ever has it

 private:
  static uint64_t new_id() {
    static uint64_t last = 0;
    return ++last;
  }
  nb::object store_object_, codec_object_;
  Store* store_;
  const Codec* codec_;
  bool mapped_;
  uint64_t id_ = new_id();
};

// Calls a method without positional arguments; `names` is a tuple of the keyword, if there is one.
inline nb::object call_method(PyObject* self, PyObject* method, PyObject* keyword = nullptr, PyObject* names = nullptr) {
  PyObject* const args[2] = {self, keyword};
  PyObject* result = PyObject_VectorcallMethod(method, args, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
  if (!result) throw nb::python_error();
  return nb::steal(result);
}

// Holds one of Python's locks; the GIL is released only where somebody else has it.
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

// What a sampler's seeds are made of: 63 bits, as torch gives.
inline uint64_t next_seed(CounterGenerator& generator) { return generator.next() >> 1; }

// The random numbers of a sampler, as its `_draw_seed` gets them.
class SeedSource {
 public:
  // `lock`: of torch's random numbers, which a fork waits for.
  SeedSource(nb::object sampler, nb::object lock) : sampler_(std::move(sampler)), lock_(std::move(lock)) {}
  // Runs Python code.
  uint64_t next() const {
    static PyObject* seed = PyUnicode_InternFromString("_seed");
    static PyObject* generator = PyUnicode_InternFromString("_generator");
    static PyObject* random = PyUnicode_InternFromString("random_");
    static PyObject* names = Py_BuildValue("(s)", "generator");
    const nb::object from = attribute(sampler_, generator);
    if (CounterGenerator* own = nullptr; !from.is_none() && nb::try_cast(from, own)) return next_seed(*own);
    const nb::object out = attribute(sampler_, seed);
    const HeldLock held(lock_);
    const nb::object drawn = call_method(out.ptr(), random, from.ptr(), names);
    const SlotsArg value(drawn);
    if (value.n < 1) throw nb::value_error("no seed");
    return static_cast<uint64_t>(value.data[0]);
  }

 private:
  nb::object sampler_, lock_;
};

// What a sampler draws for one batch.
struct DrawnBatch {
  std::vector<int64_t> slots;
  bool with_weights = false;     // whether weights are to be drawn, where the sampler has any
  std::vector<uint8_t> weights;  // of each row, in the sampler's type
  std::vector<double> leaves;    // while it is drawn
  SliceBatch slices;             // whose rows these are, where the sampler draws slices
  int64_t member = 0;            // of an ensemble, whose rows these are
};

// The form in which the batches of a table are handed out: that of the stored data, with entries besides, which are leaves
// numbered behind the rows' own.
class BatchForm {
 public:
  enum Content { kIndex, kWeight, kSliceId, kMask, kFirst, kLast, kMember };
  struct Entry {
    Content content;
    DType dtype;
    size_t item_bytes() const { return dtype.bits / 8; }
    bool is_column() const { return content == kFirst || content == kLast; }  // [n, 1]
  };
  // A leaf of the rows, bool, that is true at each slice's first or last step, whatever is stored.
  struct Mark {
    size_t leaf;
    bool last;
  };

  BatchForm() = default;
  // `number`: no form of another table or with other entries has it.
  BatchForm(const Codec& codec, uint64_t number) : number_(number), leaves_(codec.leaves().size()), codec_(&codec) {
    if (codec.root() && codec.root()->kind != Node::kLeaf) root_ = *codec.root(), has_keys_ = true;
  }
  uint64_t number() const { return number_; }
  // Whether batches of this form are made in one native call.
  bool is_made_here() const { return is_made_here_; }
  void set_made_here(bool is) { is_made_here_ = is; }
  bool has_keys() const { return has_keys_; }  // else there is no place for entries
  const Node& root() const { return root_; }
  const std::vector<Entry>& entries() const { return entries_; }
  const std::vector<Mark>& marks() const { return marks_; }

  // Adds an entry at the root, whatever the dimensions of the batch there.
  void add_to_root(const nb::object& key, Entry entry) {
    if (has_keys_) put(root_, key, entry);
    else entries_.push_back(entry);
  }
  // Adds entries together under one key of the root, in the place of what is stored there. False: there is no place for them.
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
  void add_outside(Entry entry) { entries_.push_back(entry); }
  // Adds an entry under a path, with the dictionaries on the way to it. False: there is no place for it.
  bool add(nb::tuple path, Entry entry) {
    Node* const node = parent(path, true);
    if (!node) return false;
    const nb::object key = path[path.size() - 1];
    if (const Node* child = child_of(*node, key); child && child->kind != Node::kLeaf) return false;
    put(*node, key, entry);
    return true;
  }
  // Marks each slice's first or last step in the leaf under a path; adds one where there is none. False: it cannot be marked.
  bool mark(nb::tuple path, bool last) {
    Node* const node = parent(path, false);
    const Node* const child = node ? child_of(*node, path[path.size() - 1]) : nullptr;
    if (!child) return add(path, {last ? kLast : kFirst, {kDLBool, 8}});
    if (child->kind != Node::kLeaf || child->leaf >= leaves_ || !(codec_->leaves()[child->leaf].dtype == DType{kDLBool, 8}))
      return false;
    marks_.push_back({child->leaf, last});
    return true;
  }
  // Marks each slice's first step in a flag at the root, where there is one and the batch is flat. False: it is no bool.
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
  // What holds the entry of a path. Null: it is no dictionary, has more dimensions than the batch, or (unless it is `made`)
  // is missing.
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
  const Codec* codec_ = nullptr;  // while it is made
  bool is_made_here_ = false, has_keys_ = false;
  Node root_;
  std::vector<Entry> entries_;
  std::vector<Mark> marks_;
};

// How a sampler draws the rows of one batch. The caller holds the sampler's lock.
class RowDraw {
 public:
  virtual ~RowDraw() = default;
  // The type of its weights; none: it has no weights.
  virtual std::optional<DType> weight_type() const { return std::nullopt; }
  // Gets ready for batches of n, before `prepare`; may run Python code. False: as `prepare`.
  virtual bool plan(Store&, size_t) { return true; }
  // Changes with what `complete` does.
  virtual uint64_t form_version() const { return 0; }
  // Adds the entries and marks of such batches. False: they are not made here.
  virtual bool complete(BatchForm&) const { return true; }
  // Gets what it needs from Python, such as random numbers. False: there are no rows, or it takes more than this.
  virtual bool prepare(Store& store) = 0;
  // Draws n rows that exist. False: as `prepare`; the sampler must then be as it was, apart from random numbers. Runs no
  // Python code.
  virtual bool draw(Store& store, size_t n, DrawnBatch& drawn) = 0;
  // Whether rows that come in the places of drawn ones before these are read are as good, as what was drawn are slots.
  virtual bool takes_newer_rows() const { return false; }
};

// As `Lanes.uniform` of a seed from the sampler.
class UniformDraw final : public RowDraw {
 public:
  UniformDraw(nb::object sampler, nb::object lock) : seeds_(std::move(sampler), std::move(lock)) {}
  bool prepare(Store& store) override {
    if (store.lanes.rows() == 0) return false;  // before a random number is drawn
    seed_ = seeds_.next();
    return true;
  }
  bool draw(Store& store, size_t n, DrawnBatch& drawn) override {
    drawn.slots.resize(n);
    return draw_uniform(store.lanes, seed_, drawn.slots.data(), n);
  }
  bool takes_newer_rows() const override { return true; }

 private:
  SeedSource seeds_;
  uint64_t seed_ = 0;
};

// The next rows of an epoch that is running, of which at least a batch more is left after them; the first batch, the last
// ones, and those after rows of the epoch were overwritten are the sampler's.
class EpochDraw final : public RowDraw {
 public:
  // `running`: a callable that gives the walk, and a dict with the `position` in it; None: there is no such epoch.
  explicit EpochDraw(nb::object running) : running_(std::move(running)) {}
  bool prepare(Store&) override {
    const nb::object running = running_();
    if (running.is_none()) return false;
    const auto [walk, epoch] = nb::cast<std::pair<nb::object, nb::dict>>(running);
    position_ = nb::cast<uint64_t>(epoch[key()]);
    walk_ = walk, epoch_ = epoch;
    return true;
  }
  bool draw(Store& store, size_t n, DrawnBatch& drawn) override {
    const EpochWalk& walk = nb::cast<const EpochWalk&>(walk_);
    drawn.slots.clear();
    drawn.slots.reserve(n);
    if (!walk.is_of(store) || walk.some_overwritten(store)) return false;
    const uint64_t position = walk.draw(store, position_, n, walk.size(), drawn.slots);
    if (walk.size() - position < n || drawn.slots.size() < n || walk.some_overwritten(store)) return false;
    epoch_[key()] = position;
    return true;
  }

 private:
  static nb::handle key() {
    static PyObject* position = PyUnicode_InternFromString("position");
    return position;
  }
  nb::object running_, walk_;
  nb::dict epoch_;
  uint64_t position_ = 0;
};

// Makes the batches of one buffer.
class BatchMaker {
 public:
  // `index_key`: of an entry at the batch's root with each row's slot, int64 [n]; None: there is none. `weight_key`: of one
  // with each row's weight, [n], where the sampler has weights.
  // `reuse`: callables without arguments; while all of them say no, batches are read into tensors of earlier ones that
  // nobody has any more. None: each batch gets new tensors.
  BatchMaker(nb::object draw, nb::object sampler, nb::object index_key, nb::object reuse, nb::object weight_key)
      : draw_object_(std::move(draw)), draw_(nb::cast<RowDraw*>(draw_object_)), sampler_(std::move(sampler)) {
    if (!draw_) throw nb::type_error("a draw is needed, not None");
    if (!index_key.is_none()) entries_.push_back({std::move(index_key), {BatchForm::kIndex, {kDLInt, 64}}});
    const auto weight_type = draw_->weight_type();
    if (!weight_key.is_none() && weight_type)
      entries_.push_back({std::move(weight_key), {BatchForm::kWeight, *weight_type}}), with_weights_ = true;
    if (reuse.is_none()) return;
    reuses_ = true;
    for (nb::handle prevented : nb::cast<nb::tuple>(reuse)) prevents_reuse_.push_back(nb::borrow(prevented));
  }

  // A batch of n rows; None: it takes more than this call does, and the caller makes it. `as_numpy`: dicts of arrays.
  nb::object sample(const RowSource& source, size_t n, bool as_numpy) {
    Store& store = source.store();
    if (joined_after_fork()) return nb::none();
    store.check_file();
    if (n > kMostBytes / 8) throw std::bad_alloc();
    if (as_numpy && !has_arrays(source.codec())) return nb::none();
    if (!as_numpy && store.geometry().row_stride > kThreadedBytes / std::max<size_t>(1, n) && torch_has_threads())
      return sample_with_a_thread(source, n);
    // Taken out, as the making of tensors may run a finaliser that samples, too.
    std::unique_ptr<Scratch> scratch = std::exchange(scratch_, nullptr);
    if (!scratch) scratch = std::make_unique<Scratch>();
    SharedForm form;
    RowReader reader(store, scratch->read);
    nb::object batch = draw(source, n, reader, scratch->drawn, form)
                           ? read(source, reader, scratch->drawn, std::move(form), as_numpy)
                           : nb::none();
    scratch_ = std::move(scratch);
    return batch;
  }

  // Draws n rows, looks which exist, and locates them. `is_made_here` is called once the draw is ready. False: it takes more
  // than this.
  template <typename Ready>
  static bool draw_rows(RowDraw& draw, const nb::object& sampler, Store& store, size_t n, RowReader& reader,
                        DrawnBatch& drawn, Ready&& is_made_here) {
    static PyObject* lock = PyUnicode_InternFromString("lock");
    const HeldLock held(attribute(sampler, lock));  // a forked child has another one
    if (!draw.plan(store, n) || !is_made_here() || !draw.prepare(store)) return false;
    if (store.geometry().lanes > std::max<size_t>(n, 1) && draw.takes_newer_rows() && !store.read_only())
      return draw.draw(store, n, drawn) && reader.find(drawn.slots.data(), drawn.slots.size());
    reader.look();
    // Only in a store that this process may not write can another one be replacing all rows.
    if (store.read_only() && reader.rows_are_being_replaced()) return false;
    return draw.draw(store, n, drawn) && reader.locate(drawn.slots.data(), drawn.slots.size());
  }

  // Writes an entry's values of the drawn rows.
  static void fill(const BatchForm::Entry& entry, const DrawnBatch& drawn, uint8_t* out) {
    const size_t n = drawn.slots.size();
    switch (entry.content) {
      case BatchForm::kIndex: std::memcpy(out, drawn.slots.data(), n * sizeof(int64_t)); break;
      case BatchForm::kWeight: std::memcpy(out, drawn.weights.data(), n * entry.item_bytes()); break;
      case BatchForm::kSliceId: drawn.slices.ids(reinterpret_cast<int64_t*>(out)); break;
      case BatchForm::kMask: drawn.slices.mask(out); break;
      case BatchForm::kMember: std::fill_n(reinterpret_cast<int64_t*>(out), n, drawn.member); break;
      case BatchForm::kFirst:
      case BatchForm::kLast:
        std::fill_n(out, n, uint8_t{0});
        drawn.slices.ends([&](uint64_t first, uint64_t last) { out[entry.content == BatchForm::kLast ? last : first] = 1; });
    }
  }

  // As `sample`, but threads copy the rows from now on, and the batch is made when it is taken. `maker` is this object.
  static nb::object prepare(nb::object maker, nb::object source, size_t n, CopyThreads& threads);

 private:
  friend class PreparedBatch;
  // Rows of so many bytes are copied by two threads, where torch may use several: to wake one takes the time of 100 KB.
  static constexpr size_t kThreadedBytes = 1 << 20;
  static bool torch_has_threads() {
    static PyObject* number = nb::object(nb::module_::import_("torch").attr("get_num_threads")).release().ptr();
    const nb::object threads = nb::steal(PyObject_CallNoArgs(number));
    if (!threads.is_valid()) throw nb::python_error();
    return nb::cast<int64_t>(threads) > 1;
  }
  nb::object sample_with_a_thread(const RowSource& source, size_t n);

  struct Scratch {
    ReadScratch read;
    DrawnBatch drawn;
  };
  using SharedForm = std::shared_ptr<const BatchForm>;

  bool draw(const RowSource& source, size_t n, RowReader& reader, DrawnBatch& drawn, SharedForm& form) {
    drawn.with_weights = with_weights_;
    return draw_rows(*draw_, sampler_, source.store(), n, reader, drawn, [&] {
      form = form_of(source);
      return form->is_made_here();
    });
  }
  SharedForm form_of(const RowSource& source) {
    const uint64_t number = source.id() << 20 | (draw_->form_version() & 0xFFFFF);
    if (form_ && form_->number() == number) return form_;
    const auto form = std::make_shared<BatchForm>(source.codec(), number);
    for (const auto& [key, entry] : entries_) form->add_to_root(key, entry);
    form->set_made_here(draw_->complete(*form));
    return form_ = form;
  }

  // A batch whose tensors are not all made, or whose rows are not all copied.
  struct Unread {
    Unread(size_t n, size_t count, SharedForm form)
        : lead(1, static_cast<int64_t>(n)), form(std::move(form)), tensors(count), data(count), memory(count) {}
    const std::vector<int64_t> lead;
    const SharedForm form;
    std::vector<nb::object> tensors;  // that there are already
    std::vector<uint8_t*> data;
    LeafMemory memory;  // of the others
    size_t made = 0;
    bool as_numpy = false, reuses = false, found = false;
  };

  nb::object read(const RowSource& source, RowReader& reader, const DrawnBatch& drawn, SharedForm form, bool as_numpy) {
    const auto& leaves = source.codec().leaves();
    const size_t n = drawn.slots.size(), count = leaves.size() + form->entries().size();  // these come last
    Unread batch(n, count, std::move(form));
    batch.as_numpy = as_numpy, batch.reuses = reuses_ && !as_numpy && may_reuse();
    if (as_numpy) make_arrays(batch, leaves);
    batch.found = batch.reuses && take_kept(batch);
    take_memory(batch, leaves);
    // Make the tensors while the rows are being prefetched; then copy the rows into the tensors' memory.
    size_t bytes = 0;
    for (size_t k = 0; k < count; ++k) {
      reader.warm(k, count);
      bytes += k < leaves.size() ? leaves[k].bytes * n : 0;
      make_tensor(batch, k);
    }
    fill_entries(batch, leaves.size(), drawn);
    // No Python code runs to the end of the copy: a finaliser that samples would use the same memory for these.
    static thread_local std::vector<LeafCopy> copies;
    list_copies(batch, source.codec(), copies);
    bool whole = false;
    maybe_without_gil(bytes > kGilBytes || (source.mapped() && source.store().readahead().on()), [&] {
      reader.copy(copies.data(), copies.size(), source.mapped());
      whole = reader.are_whole();
    });
    // Rows that were overwritten meanwhile are drawn anew where each sampler's way of doing so is. As the look was before the
    // draw, whole rows are those that were drawn, and have their weights.
    return whole ? finish(source, batch, drawn) : nb::none();
  }

  // ---- the steps of `read` ----
  void take_memory(Unread& batch, const std::vector<Leaf>& leaves) const {
    const auto n = static_cast<size_t>(batch.lead[0]);
    for (size_t k = 0; k < batch.data.size(); ++k)
      if (!batch.data[k]) plan(batch.memory, leaves, *batch.form, k, batch.lead, n);
    batch.memory.take();
    size_t place = 0;
    for (size_t k = 0; k < batch.data.size(); ++k)
      if (!batch.data[k]) batch.data[k] = batch.memory.data(place++);
  }
  static void make_tensor(Unread& batch, size_t k) {
    if (!batch.tensors[k].is_valid()) batch.tensors[k] = batch.memory.make(batch.made++);
  }
  static void fill_entries(const Unread& batch, size_t leaves, const DrawnBatch& drawn) {
    const auto& entries = batch.form->entries();
    for (size_t e = 0; e < entries.size(); ++e) fill(entries[e], drawn, batch.data[leaves + e]);
  }
  static void list_copies(const Unread& batch, const Codec& codec, std::vector<LeafCopy>& copies) {
    const auto& leaves = codec.leaves();
    copies.clear();
    for (size_t k : codec.in_row())
      copies.push_back({leaves[k].offset, leaves[k].bytes, batch.data[k], static_cast<ptrdiff_t>(leaves[k].bytes)});
  }
  nb::object finish(const RowSource& source, Unread& batch, const DrawnBatch& drawn) {
    const Codec& codec = source.codec();
    const auto& leaves = codec.leaves();
    for (const BatchForm::Mark& mark : batch.form->marks()) {
      const size_t bytes = leaves[mark.leaf].bytes;
      drawn.slices.ends([&](uint64_t first, uint64_t last) {
        std::memset(batch.data[mark.leaf] + (mark.last ? last : first) * bytes, 1, bytes);
      });
    }
    if (batch.reuses && !batch.found && kept_.wants_more()) keep(batch, leaves);
    if (batch.as_numpy)
      return codec.build_dicts(batch.form->has_keys() ? batch.form->root() : *codec.root(), batch.tensors);
    return batch.form->has_keys() ? codec.build(batch.form->root(), batch.tensors, batch.lead)
                                  : codec.build(batch.tensors, batch.lead, nb::none());
  }

  // Whether all that a batch consists of can be an array.
  bool has_arrays(const Codec& codec) const {
    for (const Leaf& leaf : codec.leaves())
      if (!ArrayMaker::dtype(leaf.dtype).is_valid()) return false;
    for (const auto& [key, entry] : entries_)
      if (!ArrayMaker::dtype(entry.dtype).is_valid()) return false;
    return codec.root() != nullptr;
  }
  static void make_arrays(Unread& batch, const std::vector<Leaf>& leaves) {
    static const std::vector<int64_t> scalar, one = {1};
    const auto n = static_cast<size_t>(batch.lead[0]);
    for (size_t k = 0; k < batch.tensors.size(); ++k) {
      const bool is_leaf = k < leaves.size();
      if (is_leaf && leaves[k].bytes > kMostBytes / std::max<size_t>(1, n)) throw std::bad_alloc();
      const size_t bytes = bytes_of_leaf(leaves, *batch.form, k, n);
      const BatchForm::Entry* entry = is_leaf ? nullptr : &batch.form->entries()[k - leaves.size()];
      std::tie(batch.tensors[k], batch.data[k]) =
          is_leaf ? ArrayMaker::make(leaves[k].dtype, n, leaves[k].shape, bytes)
                  : ArrayMaker::make(entry->dtype, n, entry->is_column() ? one : scalar, bytes);
    }
  }

  static size_t bytes_of_leaf(const std::vector<Leaf>& leaves, const BatchForm& form, size_t k, size_t n) {
    return n * (k < leaves.size() ? leaves[k].bytes : form.entries()[k - leaves.size()].item_bytes());
  }
  static void plan(LeafMemory& memory, const std::vector<Leaf>& leaves, const BatchForm& form, size_t k,
                   const std::vector<int64_t>& lead, size_t n) {
    static const std::vector<int64_t> scalar, one = {1};
    if (k < leaves.size()) {
      memory.plan(leaves[k], lead, n);
      return;
    }
    const BatchForm::Entry& entry = form.entries()[k - leaves.size()];
    memory.plan(entry.dtype, lead, entry.is_column() ? one : scalar, bytes_of_leaf(leaves, form, k, n));
  }

  // ---- tensors that are used again ----
  bool may_reuse() const {
    for (const nb::object& prevented : prevents_reuse_)
      if (nb::cast<bool>(prevented())) return false;
    return true;
  }
  // Holds the tensors from here on: what Python runs later finds them in use.
  bool take_kept(Unread& batch) {
    const auto* places = kept_.find(batch.form->number(), static_cast<size_t>(batch.lead[0]));
    if (!places) return false;
    for (const KeptBatches::Place& place : *places)
      batch.tensors[place.leaf] = nb::borrow(place.kept.tensor()), batch.data[place.leaf] = place.data;
    return true;
  }
  void keep(const Unread& batch, const std::vector<Leaf>& leaves) {
    const auto n = static_cast<size_t>(batch.lead[0]);
    std::vector<KeptBatches::Place> places;
    size_t bytes = 0;
    for (size_t k = 0; k < batch.tensors.size(); ++k) {
      const size_t size = bytes_of_leaf(leaves, *batch.form, k, n);
      if (size <= KeptBatches::kMostLeaf)
        places.push_back({k, batch.data[k], KeptTensor(batch.tensors[k])}), bytes += size;
    }
    kept_.keep(n, bytes, std::move(places));
  }

  nb::object draw_object_;
  RowDraw* draw_;
  nb::object sampler_;
  std::vector<std::pair<nb::object, BatchForm::Entry>> entries_;  // at a batch's root: the index, the weights
  bool with_weights_ = false;
  std::shared_ptr<const BatchForm> form_;  // of the last batch
  bool reuses_ = false;
  std::vector<nb::object> prevents_reuse_;
  KeptBatches kept_;
  std::unique_ptr<Scratch> scratch_;  // for the next batch
};

// A batch that was drawn, and whose rows are being copied. Keeps the store mapped until no thread reads from it.
class PreparedBatch {
 public:
  PreparedBatch(nb::object maker, nb::object source)
      : maker_object_(std::move(maker)), source_object_(std::move(source)), maker_(nb::cast<BatchMaker&>(maker_object_)),
        source_(nb::cast<const RowSource&>(source_object_)), rows_(std::make_shared<RowCopy>(source_.store())) {}
  PreparedBatch(const PreparedBatch&) = delete;
  PreparedBatch& operator=(const PreparedBatch&) = delete;
  ~PreparedBatch() {
    rows_->cancel();
    // In a forked child a thread of the parent may wait for it for ever: it cannot be destroyed.
    if (forks() != forks_) new std::shared_ptr<RowCopy>(std::move(rows_));
  }

  // `at_once`: it is taken next, before anything else runs, and may be read into tensors of earlier batches.
  bool start(size_t n, CopyThreads& threads, bool at_once = false) {
    const auto begin = std::chrono::steady_clock::now();
    const auto& leaves = source_.codec().leaves();
    BatchMaker::SharedForm form;
    if (!maker_.draw(source_, n, rows_->reader(), drawn_, form)) return false;
    const size_t count = leaves.size() + form->entries().size();
    batch_ = std::make_unique<BatchMaker::Unread>(drawn_.slots.size(), count, std::move(form));
    batch_->reuses = at_once && maker_.reuses_ && maker_.may_reuse();
    batch_->found = batch_->reuses && maker_.take_kept(*batch_);
    maker_.take_memory(*batch_, leaves);
    maker_.fill_entries(*batch_, leaves.size(), drawn_);
    std::vector<LeafCopy> copies;
    maker_.list_copies(*batch_, source_.codec(), copies);
    rows_->set(drawn_.slots.size(), std::move(copies), source_.mapped(), maker_.draw_->takes_newer_rows());
    threads.add(rows_);
    took_ = std::chrono::steady_clock::now() - begin;
    return true;
  }
  // The batch; None: some of its rows were overwritten before they were copied. Only once.
  nb::object take() {
    if (!batch_) throw nb::value_error("this batch was taken already");
    if (!rows_->done()) {
      nb::gil_scoped_release unlocked;
      rows_->finish();
    }
    const auto begin = std::chrono::steady_clock::now();
    const std::unique_ptr<BatchMaker::Unread> batch = std::move(batch_);  // Python code may run below
    if (!rows_->whole()) return nb::none();
    for (size_t k = 0; k < batch->tensors.size(); ++k) maker_.make_tensor(*batch, k);
    nb::object made = maker_.finish(source_, *batch, drawn_);
    took_ += std::chrono::steady_clock::now() - begin;
    return made;
  }
  // Nothing is copied any more when this returns.
  void cancel() {
    nb::gil_scoped_release unlocked;
    rows_->cancel();
  }
  // What it took to make it, in all threads.
  double seconds() const { return std::chrono::duration<double>(took_).count() + rows_->seconds(); }

 private:
  nb::object maker_object_, source_object_;
  BatchMaker& maker_;
  const RowSource& source_;
  DrawnBatch drawn_;
  std::unique_ptr<BatchMaker::Unread> batch_;
  std::shared_ptr<RowCopy> rows_;
  const uint64_t forks_ = forks();
  std::chrono::steady_clock::duration took_{};
};

// As `prepare` and `take` at once: this thread copies rows, too.
inline nb::object BatchMaker::sample_with_a_thread(const RowSource& source, size_t n) {
  static CopyThreads* threads = nullptr;  // never destroyed: its thread waits when the process ends; a fork has none
  static uint64_t forks_before = 0;
  if (!threads || forks_before != forks()) threads = new CopyThreads(1), forks_before = forks();
  PreparedBatch batch(nb::find(*this), nb::find(source));
  return batch.start(n, *threads, true) ? batch.take() : nb::none();
}

inline nb::object BatchMaker::prepare(nb::object maker, nb::object source, size_t n, CopyThreads& threads) {
  if (joined_after_fork()) return nb::none();
  nb::cast<const RowSource&>(source).store().check_file();
  if (n > kMostBytes / 8) throw std::bad_alloc();
  auto prepared = std::make_unique<PreparedBatch>(std::move(maker), std::move(source));
  return prepared->start(n, threads) ? nb::cast(std::move(prepared)) : nb::none();
}

inline void bind_generator(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<CounterGenerator>(m, "CounterGenerator")
      .def(nb::init<>())
      .def_rw("key", &CounterGenerator::key)
      .def_rw("counter", &CounterGenerator::counter)
      .def("next", &CounterGenerator::next)
      .def("random", [](CounterGenerator& g) { return static_cast<double>(g.next() >> 11) * 0x1p-53; })
      .def("write_seed", [](CounterGenerator& g, nb::handle out) {
        const SlotsArg value(nb::borrow(out));
        if (value.n < 1) throw nb::value_error("no room for a seed");
        *const_cast<int64_t*>(value.data) = static_cast<int64_t>(next_seed(g));
      }, "out"_a);
  m.def("mix", &mix64, "number"_a);
}

inline void bind_batches(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<RowSource>(m, "RowSource")
      .def(nb::init<nb::object, nb::object, bool>(), "store"_a, "codec"_a, "mapped"_a);
  nb::class_<KeptTensor>(m, "KeptTensor")
      .def(nb::init<nb::object>(), "tensor"_a)
      .def("is_free", &KeptTensor::is_free)
      .def_prop_ro("tensor", [](const KeptTensor& kept) { return nb::borrow<Tensor>(kept.tensor()); });
  bind_generator(m);
  nb::class_<RowDraw>(m, "RowDraw");
  nb::class_<UniformDraw, RowDraw>(m, "UniformDraw")
      .def(nb::init<nb::object, nb::object>(), "sampler"_a, "lock"_a);
  nb::class_<EpochDraw, RowDraw>(m, "EpochDraw").def(nb::init<nb::object>(), "running"_a);
  nb::class_<BatchMaker>(m, "BatchMaker")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object>(), "draw"_a, "sampler"_a,
           "index_key"_a.none() = nb::none(), "reuse"_a.none() = nb::none(), "weight_key"_a.none() = nb::none())
      .def("sample", &BatchMaker::sample, "source"_a, "n"_a, "as_numpy"_a = false)
      .def("prepare", &BatchMaker::prepare, "source"_a, "n"_a, "threads"_a,
           nb::sig("def prepare(self, source: RowSource, n: int, threads: CopyThreads) -> PreparedBatch | None"));
  nb::class_<CopyThreads>(m, "CopyThreads")
      .def(nb::init<size_t>(), "most"_a)
      .def("close", &CopyThreads::close);
  nb::class_<PreparedBatch>(m, "PreparedBatch")
      .def("take", &PreparedBatch::take)
      .def("cancel", &PreparedBatch::cancel)
      .def_prop_ro("seconds", &PreparedBatch::seconds);
}

}  // namespace engram
