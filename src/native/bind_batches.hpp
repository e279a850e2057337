// Makes whole batches in one native call: draws rows, looks up which exist, copies them, and makes tensors in the form of the
// stored data.
//
// A `RowDraw` draws rows for a sampler, a `RowSource` holds the rows of a table, and a `BatchMaker` combines them for a reader
// of one or several tables. Input that is not plain is left to the caller: the call returns None, and Python makes the batch.
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
  bool mapped() const { return mapped_; }  // whether the rows lie in a mapped file
  uint64_t id() const { return id_; }      // unique within the process

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

// Draws uniformly: `Lanes.uniform` of a seed from the sampler.
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
  bool joins() const override { return true; }
  bool asks_counters_only() const override { return true; }

 private:
  SeedSource seeds_;
  uint64_t seed_ = 0;
};

// Draws the next rows of a running epoch that has at least one more batch after them. The sampler itself draws the first batch,
// the last ones, and those after rows of the epoch were overwritten.
class EpochDraw final : public RowDraw {
 public:
  // `running`: a callable that returns the walk, and a dict with the `position` in it; None: no such epoch is running.
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
    if (store.lanes.some_removed() && !walk.goes_on(store, position)) return false;  // what is left was removed
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

// Makes the batches of one table, [n], or of several, [members, rows of each].
class BatchMaker {
 public:
  // `members`: for each table, how its rows are drawn, and the sampler whose lock the draw takes. Several tables have one
  // layout, and all their draws `join`.
  // `chooser`: its method `choose` returns the members of a batch of n, and the number of rows of each, under its lock; None:
  // there is one table, and no dimension of members.
  // `forms`: the forms that batches can have. Each is a list of the entries at the root besides the rows: a key with an entry,
  // or a key with a list of keys and entries. An entry is each row's "index" or "weight", or the number of its "member"; where
  // the key is None, it is returned beside the batch. Where samplers have no weights, weights are left out.
  // `reuse`: callables without arguments; while all of them return false, batches are read into tensors of earlier batches that
  // have no other owner any more. None: each batch gets new tensors.
  BatchMaker(nb::list members, nb::object chooser, nb::list forms, nb::object reuse) : chooser_(std::move(chooser)) {
    for (nb::handle one : members) {
      const auto [draw, sampler] = nb::cast<std::pair<nb::object, nb::object>>(one);
      members_.push_back({draw, sampler, nb::cast<RowDraw*>(draw)});
      if (!members_.back().draw) throw nb::type_error("a draw is needed, not None");
    }
    if (members_.empty()) throw nb::value_error("a draw and a sampler are needed for each member");
    if (chooser_.is_none() && members_.size() > 1) throw nb::value_error("who chooses among several members?");
    const auto weights = members_[0].draw->weight_type();
    for (const Member& member : members_)
      is_made_here_ &= chooser_.is_none() || (member.draw->joins() && member.draw->weight_type() == weights);
    for (nb::handle form : forms) {
      forms_.emplace_back();
      for (nb::handle entry : nb::cast<nb::list>(form)) add_entry(forms_.back().entries, entry, weights);
    }
    if (forms_.empty()) forms_.emplace_back();
    if (reuse.is_none()) return;
    reuses_ = true;
    for (nb::handle prevented : nb::cast<nb::tuple>(reuse)) prevents_reuse_.push_back(nb::borrow(prevented));
  }
  BatchMaker(const BatchMaker&) = delete;
  BatchMaker& operator=(const BatchMaker&) = delete;
  // Whether native code can make any of the batches.
  bool is_made_here() const { return is_made_here_; }

  // Returns a batch of n rows of a RowSource, or of a sequence with one for each member, in one of the forms, in a tuple with
  // the entries that are returned beside it; None: the batch needs more than this call does, and the caller makes it.
  // `as_numpy`: dicts of arrays.
  nb::object sample(nb::object sources, size_t n, bool as_numpy, size_t form) {
    if (!is_made_here_ || joined_after_fork()) return nb::none();
    // Taken out of this object, because making tensors may run a finaliser that also samples.
    const TakenScratch taken(*this);
    Scratch& scratch = *taken.scratch;
    size_t row_bytes = 0;
    list_sources(sources, form, scratch.sources);
    for (const RowSource* source : scratch.sources) {
      source->store().check_file();
      row_bytes = std::max<size_t>(row_bytes, source->store().bytes_of_whole_row());
    }
    if (n > kMostBytes / 8) throw std::bad_alloc();
    if (as_numpy && !(chooser_.is_none() && has_arrays(scratch.sources[0]->codec(), form))) return nb::none();
    if (!as_numpy && row_bytes > kThreadedBytes / std::max<size_t>(1, n) && torch_has_threads())
      return sample_with_a_thread(std::move(sources), n, form);
    Drawn drawn;
    const auto part = [&](size_t p, const RowSource& source) -> Part& {
      if (p == scratch.parts.size()) scratch.parts.push_back(std::make_unique<ReadPart>());
      ReadPart& part = *scratch.parts[p];
      part.reader = &part.own_reader.emplace(source.store(), part.scratch);
      return part;
    };
    if (!draw(scratch.sources, n, form, drawn, part)) return nb::none();
    return read(drawn, scratch.parts, as_numpy);
  }

  // As `sample`, but threads copy the rows from now on, and `take` makes the batch. `maker` is this object.
  static nb::object prepare(nb::object maker, nb::object sources, size_t n, CopyThreads& threads, size_t form);

 private:
  friend class PreparedBatch;
  // From this size on two threads copy the rows, if torch may use several: waking a thread takes as long as copying 100 KB.
  static constexpr size_t kThreadedBytes = 1 << 20;
  static bool torch_has_threads() {
    static PyObject* number = nullptr;
    const nb::object threads = nb::steal(PyObject_CallNoArgs(imported_once(number, "torch", "get_num_threads")));
    if (!threads.is_valid()) throw nb::python_error();
    return nb::cast<int64_t>(threads) > 1;
  }
  nb::object sample_with_a_thread(nb::object sources, size_t n, size_t form);

  struct Member {
    nb::object draw_object, sampler;
    RowDraw* draw;
  };
  using Entries = std::vector<std::pair<nb::object, BatchForm::Entry>>;
  using SharedForm = std::shared_ptr<const BatchForm>;
  // The entries of one form: keys of the root with one entry, or with several below it.
  struct Form {
    std::vector<std::tuple<nb::object, BatchForm::Entry, Entries>> entries;
    std::vector<uint64_t> made_of;  // the versions that `made`, the form of the last batch, depends on
    SharedForm made;
  };
  using Sources = std::vector<const RowSource*>;
  // The part of a batch that comes from one table.
  struct Part {
    DrawnBatch drawn;
    const RowSource* source = nullptr;
    const RowDraw* draw = nullptr;
    RowReader* reader = nullptr;
  };
  struct ReadPart : Part {
    ReadScratch scratch;
    std::optional<RowReader> own_reader;
  };
  struct Scratch {
    Sources sources;
    std::vector<std::unique_ptr<ReadPart>> parts;
  };
  struct TakenScratch {
    explicit TakenScratch(BatchMaker& maker) : maker(maker), scratch(std::exchange(maker.scratch_, nullptr)) {
      if (!scratch) scratch = std::make_unique<Scratch>();
    }
    ~TakenScratch() { maker.scratch_ = std::move(scratch); }
    TakenScratch(const TakenScratch&) = delete;
    TakenScratch& operator=(const TakenScratch&) = delete;
    BatchMaker& maker;
    mutable std::unique_ptr<Scratch> scratch;
  };
  // A drawn batch of several parts, each with the same number of rows.
  struct Drawn {
    size_t parts = 0, each = 0;
    SharedForm form;
  };

  static std::optional<BatchForm::Entry> entry_of(std::string_view content, std::optional<DType> weights) {
    if (content == "index") return BatchForm::Entry{BatchForm::kIndex, {kDLInt, 64}};
    if (content == "member") return BatchForm::Entry{BatchForm::kMember, {kDLInt, 64}};
    if (content != "weight") throw nb::value_error("entries are each row's index, weight or member");
    if (weights) return BatchForm::Entry{BatchForm::kWeight, *weights};
    return std::nullopt;
  }
  void add_entry(std::vector<std::tuple<nb::object, BatchForm::Entry, Entries>>& entries, nb::handle given,
                 std::optional<DType> weights) {
    const auto [key, content] = nb::cast<std::pair<nb::object, nb::object>>(given);
    std::string name;
    if (nb::try_cast(content, name)) {
      const auto entry = entry_of(name, weights);
      if (entry) entries.emplace_back(key, *entry, Entries());
      with_weights_ |= entry && entry->content == BatchForm::kWeight;
      return;
    }
    Entries group;
    for (nb::handle one : nb::cast<nb::list>(content)) {
      const auto [inner, what] = nb::cast<std::pair<nb::object, std::string>>(one);
      const auto entry = entry_of(what, weights);
      if (entry) group.emplace_back(inner, *entry);
      with_weights_ |= entry && entry->content == BatchForm::kWeight;
    }
    if (group.empty()) throw nb::value_error("a group without entries");
    entries.emplace_back(key, group[0].second, std::move(group));
  }

  // The sources in `given`, which the caller keeps alive; several are a tuple from then on, which no other code changes
  // while they are used.
  void list_sources(nb::object& given, size_t form, Sources& sources) const {
    if (form >= forms_.size()) throw nb::index_error("no such form");
    sources.clear();
    RowSource* one = nullptr;
    if (nb::try_cast(given, one) && one) {
      sources.push_back(one);
    } else {
      given = nb::tuple(given);
      for (nb::handle source : nb::borrow<nb::tuple>(given)) {
        if (!nb::try_cast(source, one) || !one) throw nb::type_error("a source is needed for each member, not None");
        sources.push_back(one);
      }
    }
    if (sources.size() != members_.size()) throw nb::value_error("a source is needed for each member");
  }

  // Draws the rows of a batch, looks up which exist, and locates them. `part(p, source)`: where part p is kept, with a reader
  // of its source. False: the batch needs more than this call does.
  template <typename PartOf>
  bool draw(const Sources& sources, size_t n, size_t form, Drawn& batch, PartOf&& part) {
    if (chooser_.is_none()) {
      Part& only = part(0, *sources[0]);
      if (!draw_part(0, sources, n, form, batch, only)) return false;
      batch.parts = 1, batch.each = only.drawn.slots.size();
      return true;
    }
    static PyObject* lock = PyUnicode_InternFromString("lock");
    const HeldLock held(attribute(chooser_, lock));
    const auto [ids, each] = nb::cast<std::pair<nb::list, size_t>>(chooser_.attr("choose")(n));
    batch.parts = nb::len(ids), batch.each = each;
    for (size_t p = 0; p < batch.parts; ++p) {
      const auto id = nb::cast<int64_t>(ids[p]);
      if (id < 0 || static_cast<size_t>(id) >= members_.size()) throw nb::index_error("no such member");
      Part& one = part(p, *sources[static_cast<size_t>(id)]);
      one.drawn.member = id;
      if (!draw_part(static_cast<size_t>(id), sources, each, form, batch, one) || one.drawn.slots.size() != each) return false;
    }
    return batch.parts > 0;
  }
  bool draw_part(size_t id, const Sources& sources, size_t n, size_t form, Drawn& batch, Part& part) {
    static PyObject* lock = PyUnicode_InternFromString("lock");
    const Member& member = members_[id];
    RowDraw& draw = *member.draw;
    Store& store = sources[id]->store();
    RowReader& reader = *part.reader;
    DrawnBatch& drawn = part.drawn;
    part.source = sources[id], part.draw = &draw, drawn.with_weights = with_weights_;
    const HeldLock held(attribute(member.sampler, lock));  // looked up each time: a forked child has another lock
    if (!draw.plan(store, n)) return false;
    batch.form = form_of(sources, forms_[form]);
    if (!batch.form->is_made_here() || !draw.prepare(store)) return false;
    if (store.geometry().lanes > std::max<size_t>(n, 1) && draw.takes_newer_rows() && !store.read_only())
      return draw.draw(store, n, drawn) && reader.find(drawn.slots.data(), drawn.slots.size()) && are_left(store, drawn);
    reader.look();
    // Another process can replace all rows only in a store that this process may not write.
    if (store.read_only() && reader.rows_are_being_replaced()) return false;
    return draw.draw(store, n, drawn) && reader.locate(drawn.slots.data(), drawn.slots.size()) && are_left(store, drawn);
  }
  // Whatever a draw looks at, no batch has a row that was removed before it.
  static bool are_left(const Store& store, const DrawnBatch& drawn) {
    return !store.lanes.some_removed() || removed_places(store, drawn.slots.data(), drawn.slots.size()).empty();
  }
  const SharedForm& form_of(const Sources& sources, Form& form) {
    bool is_made = form.made != nullptr;
    for (size_t i = 0; i < sources.size() && is_made; ++i) is_made = form.made_of[i] == number(sources, i);
    if (is_made) return form.made;
    form.made_of.clear(), form.made = nullptr;
    for (size_t i = 0; i < sources.size(); ++i) {
      check_codec(sources[i]->store(), sources[0]->codec());
      form.made_of.push_back(number(sources, i));
    }
    const auto made = std::make_shared<BatchForm>(sources[0]->codec(), form.made_of[0]);
    bool is_made_here = true;
    for (const auto& [key, entry, group] : form.entries) {
      if (key.is_none()) made->add_outside(entry);
      else if (group.empty()) made->add_to_root(key, entry);
      else if (made->has_keys()) is_made_here &= made->add_group_to_root(key, group);
    }
    for (const Member& member : members_) is_made_here = is_made_here && member.draw->complete(*made);
    made->set_made_here(is_made_here);
    return form.made = made;
  }
  uint64_t number(const Sources& sources, size_t i) const {
    return sources[i]->id() << 20 | (members_[i].draw->form_version() & 0xFFFFF);
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

  // A drawn batch with tensors still to make, or rows still to copy.
  struct Unread {
    Unread(Drawn& drawn, bool joins, size_t leaves)
        : each(drawn.each), rows(drawn.parts * drawn.each), lead(lead_of(drawn, joins)), form(std::move(drawn.form)),
          tensors(leaves + form->entries().size()), data(tensors.size()), memory(tensors.size()) {}
    static std::vector<int64_t> lead_of(const Drawn& drawn, bool joins) {
      const auto each = static_cast<int64_t>(drawn.each), parts = static_cast<int64_t>(drawn.parts);
      return joins ? std::vector<int64_t>{parts, each} : std::vector<int64_t>{each};
    }
    const size_t each, rows;  // of each part, and of all parts
    const std::vector<int64_t> lead;
    const SharedForm form;
    std::vector<nb::object> tensors;  // those that exist already
    std::vector<uint8_t*> data;
    LeafMemory memory;  // of the tensors still to make
    size_t made = 0;
    bool as_numpy = false, reuses = false, found = false;
  };

  nb::object read(Drawn& drawn, const std::vector<std::unique_ptr<ReadPart>>& parts, bool as_numpy) {
    const Codec& codec = parts[0]->source->codec();
    const auto& leaves = codec.leaves();
    Unread batch(drawn, !chooser_.is_none(), leaves.size());
    const size_t count = batch.tensors.size();
    batch.as_numpy = as_numpy, batch.reuses = reuses_ && !as_numpy && may_reuse();
    if (as_numpy) make_arrays(batch, leaves);
    batch.found = batch.reuses && take_kept(batch);
    take_memory(batch, leaves);
    // Make the tensors while the rows are being prefetched; then copy the rows into the tensors' memory.
    size_t bytes = 0;
    for (size_t k = 0; k < count; ++k) {
      for (size_t p = 0; p < drawn.parts; ++p) parts[p]->reader->warm(k, count);
      bytes += k < leaves.size() ? leaves[k].bytes * batch.rows : 0;
      make_tensor(batch, k);
    }
    bool asking = false;
    for (size_t p = 0; p < drawn.parts; ++p) {
      fill_entries(batch, leaves.size(), p, parts[p]->drawn);
      asking |= parts[p]->source->mapped() && parts[p]->source->store().readahead().on();
    }
    // No Python code runs until the copy ends: a finaliser that samples would use the same memory for these.
    static thread_local std::vector<LeafCopy> copies;
    bool whole = true;
    maybe_without_gil(bytes > kGilBytes || asking, [&] {
      for (size_t p = 0; p < drawn.parts; ++p) {
        list_copies(batch, codec, p, copies);
        parts[p]->reader->copy(copies.data(), copies.size(), parts[p]->source->mapped());
      }
      for (size_t p = 0; p < drawn.parts && whole; ++p) whole = parts[p]->reader->are_whole();
    });
    // Overwritten rows are drawn again in Python, where each sampler defines how. The look came before the draw, so whole rows
    // are the drawn ones and match their weights.
    return whole ? finish(parts[0]->source->codec(), batch, parts) : nb::none();
  }

  // ---- the steps of `read` ----
  void take_memory(Unread& batch, const std::vector<Leaf>& leaves) const {
    for (size_t k = 0; k < batch.data.size(); ++k)
      if (!batch.data[k]) plan(batch, leaves, k);
    batch.memory.take();
    size_t place = 0;
    for (size_t k = 0; k < batch.data.size(); ++k)
      if (!batch.data[k]) batch.data[k] = batch.memory.data(place++);
  }
  static void make_tensor(Unread& batch, size_t k) {
    if (!batch.tensors[k].is_valid()) batch.tensors[k] = batch.memory.make(batch.made++);
  }
  static void fill_entries(const Unread& batch, size_t leaves, size_t part, const DrawnBatch& drawn) {
    const auto& entries = batch.form->entries();
    for (size_t e = 0; e < entries.size(); ++e)
      fill(entries[e], drawn, batch.data[leaves + e] + part * batch.each * entries[e].item_bytes());
  }
  static void list_copies(const Unread& batch, const Codec& codec, size_t part, std::vector<LeafCopy>& copies) {
    const auto& leaves = codec.leaves();
    copies.clear();
    for (size_t k : codec.in_row()) {
      const size_t bytes = leaves[k].bytes;
      copies.push_back({leaves[k].offset, bytes, batch.data[k] + part * batch.each * bytes, static_cast<ptrdiff_t>(bytes)});
    }
  }
  // `parts`: at least those of the batch.
  template <typename Parts>
  nb::object finish(const Codec& codec, Unread& batch, const Parts& parts) {
    const auto& leaves = codec.leaves();
    for (const BatchForm::Mark& mark : batch.form->marks()) {
      const size_t bytes = leaves[mark.leaf].bytes;
      for (size_t p = 0; p * batch.each < batch.rows; ++p) {
        uint8_t* const flags = batch.data[mark.leaf] + p * batch.each * bytes;
        parts[p]->drawn.slices.ends(
            [&](uint64_t first, uint64_t last) { std::memset(flags + (mark.last ? last : first) * bytes, 1, bytes); });
      }
    }
    if (batch.reuses && !batch.found && kept_.wants_more()) keep(batch, leaves);
    if (batch.as_numpy)
      return codec.build_dicts(batch.form->has_keys() ? batch.form->root() : *codec.root(), batch.tensors);
    nb::object made = batch.form->has_keys() ? codec.build(batch.form->root(), batch.tensors, batch.lead)
                                             : codec.build(batch.tensors, batch.lead, nb::none());
    if (batch.form->outside().empty()) return made;
    nb::list all;
    all.append(made);
    for (size_t k : batch.form->outside()) all.append(batch.tensors[k]);
    return nb::tuple(all);
  }

  // Whether every leaf and entry of a batch can be an array.
  bool has_arrays(const Codec& codec, size_t form) const {
    for (const Leaf& leaf : codec.leaves())
      if (!ArrayMaker::dtype(leaf.dtype).is_valid()) return false;
    for (const auto& [key, entry, group] : forms_[form].entries)
      if (!group.empty() || key.is_none() || !ArrayMaker::dtype(entry.dtype).is_valid()) return false;
    return codec.root() != nullptr;
  }
  static void make_arrays(Unread& batch, const std::vector<Leaf>& leaves) {
    static const std::vector<int64_t> scalar, one = {1};
    for (size_t k = 0; k < batch.tensors.size(); ++k) {
      const bool is_leaf = k < leaves.size();
      if (is_leaf && leaves[k].bytes > kMostBytes / std::max<size_t>(1, batch.rows)) throw std::bad_alloc();
      const size_t bytes = bytes_of_leaf(batch, leaves, k);
      const BatchForm::Entry* entry = is_leaf ? nullptr : &batch.form->entries()[k - leaves.size()];
      std::tie(batch.tensors[k], batch.data[k]) =
          is_leaf ? ArrayMaker::make(leaves[k].dtype, batch.rows, leaves[k].shape, bytes)
                  : ArrayMaker::make(entry->dtype, batch.rows, entry->is_column() ? one : scalar, bytes);
    }
  }

  static size_t bytes_of_leaf(const Unread& batch, const std::vector<Leaf>& leaves, size_t k) {
    return batch.rows * (k < leaves.size() ? leaves[k].bytes : batch.form->entries()[k - leaves.size()].item_bytes());
  }
  static void plan(Unread& batch, const std::vector<Leaf>& leaves, size_t k) {
    static const std::vector<int64_t> scalar, one = {1};
    if (k < leaves.size()) {
      batch.memory.plan(leaves[k], batch.lead, batch.rows);
      return;
    }
    const BatchForm::Entry& entry = batch.form->entries()[k - leaves.size()];
    batch.memory.plan(entry.dtype, batch.lead, entry.is_column() ? one : scalar, bytes_of_leaf(batch, leaves, k));
  }

  // ---- tensors that are used again ----
  bool may_reuse() const {
    for (const nb::object& prevented : prevents_reuse_)
      if (nb::cast<bool>(prevented())) return false;
    return true;
  }
  // Holds references to the tensors from here on, so that Python code that runs later finds them in use.
  bool take_kept(Unread& batch) {
    const auto* places = kept_.find(batch.form->number(), batch.rows);
    if (!places) return false;
    for (const KeptBatches::Place& place : *places)
      batch.tensors[place.leaf] = nb::borrow(place.kept.tensor()), batch.data[place.leaf] = place.data;
    return true;
  }
  void keep(const Unread& batch, const std::vector<Leaf>& leaves) {
    std::vector<KeptBatches::Place> places;
    size_t bytes = 0;
    for (size_t k = 0; k < batch.tensors.size(); ++k) {
      const size_t size = bytes_of_leaf(batch, leaves, k);
      if (size <= KeptBatches::kMostLeaf)
        places.push_back({k, batch.data[k], KeptTensor(batch.tensors[k])}), bytes += size;
    }
    kept_.keep(batch.rows, bytes, std::move(places));
  }

  std::vector<Member> members_;
  nb::object chooser_;
  bool is_made_here_ = true, with_weights_ = false;
  std::vector<Form> forms_;
  bool reuses_ = false;
  std::vector<nb::object> prevents_reuse_;
  KeptBatches kept_;
  std::unique_ptr<Scratch> scratch_;  // for the next batch
};

// A drawn batch whose rows are being copied. Keeps the stores mapped until no thread reads from them.
class PreparedBatch {
 public:
  PreparedBatch(nb::object maker, nb::object sources, size_t form)
      : maker_object_(std::move(maker)), sources_object_(std::move(sources)),
        maker_(nb::cast<BatchMaker&>(maker_object_)), form_(form) {
    maker_.list_sources(sources_object_, form, sources_);
  }
  PreparedBatch(const PreparedBatch&) = delete;
  PreparedBatch& operator=(const PreparedBatch&) = delete;
  ~PreparedBatch() {
    for (auto& part : parts_) {
      part->rows->cancel();
      // In a forked child the copy may wait for ever for a thread of the parent, so it cannot be destroyed and is leaked.
      if (forks() != forks_) new std::shared_ptr<RowCopy>(std::move(part->rows));
    }
  }

  // `at_once`: the batch is taken next, before any other code runs, and may be read into tensors of earlier batches.
  bool start(size_t n, CopyThreads& threads, bool at_once = false) {
    const auto begin = std::chrono::steady_clock::now();
    BatchMaker::Drawn drawn;
    const auto part = [&](size_t, const RowSource& source) -> BatchMaker::Part& {
      parts_.push_back(std::make_unique<Part>(source.store()));
      return *parts_.back();
    };
    if (!maker_.draw(sources_, n, form_, drawn, part)) return false;
    const Codec& codec = parts_[0]->source->codec();
    const auto& leaves = codec.leaves();
    batch_ = std::make_unique<BatchMaker::Unread>(drawn, !maker_.chooser_.is_none(), leaves.size());
    batch_->reuses = at_once && maker_.reuses_ && maker_.may_reuse();
    batch_->found = batch_->reuses && maker_.take_kept(*batch_);
    maker_.take_memory(*batch_, leaves);
    for (size_t p = 0; p < parts_.size(); ++p) {
      Part& one = *parts_[p];
      maker_.fill_entries(*batch_, leaves.size(), p, one.drawn);
      std::vector<LeafCopy> copies;
      maker_.list_copies(*batch_, codec, p, copies);
      one.rows->set(drawn.each, std::move(copies), one.source->mapped(), one.draw->takes_newer_rows());
    }
    for (const auto& one : parts_) threads.add(one->rows);
    took_ = std::chrono::steady_clock::now() - begin;
    return true;
  }
  // Returns the batch; None: some of its rows were overwritten before they were copied. Call it once.
  nb::object take() {
    if (!batch_) throw nb::value_error("this batch was taken already");
    if (!std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->rows->done(); })) {
      nb::gil_scoped_release unlocked;
      for (const auto& part : parts_) part->rows->finish();
    }
    const auto begin = std::chrono::steady_clock::now();
    const std::unique_ptr<BatchMaker::Unread> batch = std::move(batch_);  // Python code may run below
    if (!std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->rows->whole(); })) return nb::none();
    for (size_t k = 0; k < batch->tensors.size(); ++k) maker_.make_tensor(*batch, k);
    nb::object made = maker_.finish(parts_[0]->source->codec(), *batch, parts_);
    took_ += std::chrono::steady_clock::now() - begin;
    return made;
  }
  // Raises for stores whose files have become shorter.
  void check_files() const {
    for (const RowSource* source : sources_) source->store().check_file();
  }
  // When this returns, no thread copies any more.
  void cancel() {
    nb::gil_scoped_release unlocked;
    for (const auto& part : parts_) part->rows->cancel();
  }
  // Time spent on the batch, summed over all threads.
  double seconds() const {
    double seconds = std::chrono::duration<double>(took_).count();
    for (const auto& part : parts_) seconds += part->rows->seconds();
    return seconds;
  }

 private:
  struct Part : BatchMaker::Part {
    explicit Part(Store& store) : rows(std::make_shared<RowCopy>(store)) { reader = &rows->reader(); }
    std::shared_ptr<RowCopy> rows;
  };
  nb::object maker_object_, sources_object_;
  BatchMaker& maker_;
  const size_t form_;
  std::vector<const RowSource*> sources_;
  std::unique_ptr<BatchMaker::Unread> batch_;
  std::vector<std::unique_ptr<Part>> parts_;
  const uint64_t forks_ = forks();
  std::chrono::steady_clock::duration took_{};
};

// `prepare` and `take` in one call, in which this thread copies rows as well.
inline nb::object BatchMaker::sample_with_a_thread(nb::object sources, size_t n, size_t form) {
  static CopyThreads* threads = nullptr;  // never destroyed: its thread still waits when the process ends; a fork has none
  static uint64_t forks_before = 0;
  if (!threads || forks_before != forks()) threads = new CopyThreads(1), forks_before = forks();
  PreparedBatch batch(nb::find(*this), std::move(sources), form);
  return batch.start(n, *threads, true) ? batch.take() : nb::none();
}

inline nb::object BatchMaker::prepare(nb::object maker, nb::object sources, size_t n, CopyThreads& threads, size_t form) {
  if (!nb::cast<BatchMaker&>(maker).is_made_here_ || joined_after_fork()) return nb::none();
  if (n > kMostBytes / 8) throw std::bad_alloc();
  auto prepared = std::make_unique<PreparedBatch>(std::move(maker), std::move(sources), form);
  prepared->check_files();
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
  m.def("seed_of_rank", &seed_of_rank, "seed"_a, "rank"_a);
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
  nb::class_<RowDraw>(m, "RowDraw")
      .def_prop_ro("joins", &RowDraw::joins)
      .def_prop_ro("asks_counters_only", &RowDraw::asks_counters_only);
  nb::class_<UniformDraw, RowDraw>(m, "UniformDraw")
      .def(nb::init<nb::object, nb::object>(), "sampler"_a, "lock"_a);
  nb::class_<EpochDraw, RowDraw>(m, "EpochDraw").def(nb::init<nb::object>(), "running"_a);
  nb::class_<BatchMaker>(m, "BatchMaker")
      .def(nb::init<nb::list, nb::object, nb::list, nb::object>(), "members"_a, "chooser"_a.none() = nb::none(),
           "forms"_a = nb::list(), "reuse"_a.none() = nb::none(),
           nb::sig("def __init__(self, members: list, chooser: object | None = None, "
                   "forms: list = [], reuse: object | None = None) -> None"))
      .def_prop_ro("is_made_here", &BatchMaker::is_made_here)
      .def("sample", &BatchMaker::sample, "sources"_a, "n"_a, "as_numpy"_a = false, "form"_a = 0)
      .def("prepare", &BatchMaker::prepare, "sources"_a, "n"_a, "threads"_a, "form"_a = 0,
           nb::sig("def prepare(self, sources: object, n: int, threads: CopyThreads, form: int = 0) -> "
                   "PreparedBatch | None"));
  nb::class_<CopyThreads>(m, "CopyThreads")
      .def(nb::init<size_t>(), "most"_a)
      .def("close", &CopyThreads::close);
  nb::class_<PreparedBatch>(m, "PreparedBatch")
      .def("take", &PreparedBatch::take)
      .def("cancel", &PreparedBatch::cancel)
      .def_prop_ro("seconds", &PreparedBatch::seconds);
}

}  // namespace engram
