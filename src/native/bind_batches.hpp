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
#include "epoch_walk.hpp"
#include "reuse.hpp"
#include "row_draw.hpp"

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

}  // namespace engram
