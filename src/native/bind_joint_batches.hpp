// Whole batches of several stores of one layout in one native call: draw, look, copy, tensors, for each its equal part.
// Whatever is not plain is left to the caller, as in bind_batches.hpp.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bind_batches.hpp"

namespace engram {

// Makes the batches of an ensemble: [members, rows].
class JointBatchMaker {
 public:
  // `sampler`: its method `choose` gives the members of a batch and how many rows are of each. `draws`, `samplers`, `sources`:
  // one of each member; the draws add nothing to a batch's form, and the rows have one layout. `attaches`: whether batches
  // get their members' slots and weights at their root, "index" and "priority_weight".
  JointBatchMaker(nb::object sampler, nb::list draws, nb::list samplers, nb::list sources, bool attaches)
      : sampler_(std::move(sampler)), attaches_(attaches) {
    if (nb::len(draws) == 0 || nb::len(draws) != nb::len(samplers) || nb::len(draws) != nb::len(sources))
      throw nb::value_error("a draw, a sampler and a source are needed for each member");
    for (size_t i = 0; i < nb::len(draws); ++i) {
      members_.push_back({draws[i], samplers[i], sources[i], nb::cast<RowDraw*>(draws[i]), nb::cast<RowSource*>(sources[i])});
      if (!members_.back().draw || !members_.back().source) throw nb::type_error("a draw or source is None");
    }
    const auto weights = members_[0].draw->weight_type();
    for (const Member& member : members_) is_made_here_ &= member.draw->weight_type() == weights;
    for (bool nested : {false, true}) forms_[nested] = form(nested, weights);
    with_weights_ = attaches && weights;
  }
  JointBatchMaker(const JointBatchMaker&) = delete;
  JointBatchMaker& operator=(const JointBatchMaker&) = delete;
  // Whether batches are made here.
  bool is_made_here() const { return is_made_here_; }

  // A batch of n rows, its slots and the number of the member that each row is of, int64 [members, rows]; `nested`: the batch
  // alone, which has both at its root, if it has keys, under "index". None: it takes more than this call does.
  nb::object sample(size_t n, bool nested) {
    if (!is_made_here_ || joined_after_fork()) return nb::none();
    for (const Member& member : members_) member.source->store().check_file();
    if (n > kMostBytes / 8) throw std::bad_alloc();
    // Taken out, as the making of tensors may run a finaliser that samples, too.
    Parts parts = std::exchange(parts_, {});
    size_t each = 0;
    const size_t count = draw(n, parts, each);
    nb::object batch = count ? read(parts, count, each, nested) : nb::none();
    parts_ = std::move(parts);
    return batch;
  }

 private:
  struct Member {
    nb::object draw_object, sampler, source_object;
    RowDraw* draw;
    RowSource* source;
  };
  // What one member gives to a batch.
  struct Part {
    ReadScratch scratch;
    DrawnBatch drawn;
    std::optional<RowReader> reader;
    const RowSource* source = nullptr;
  };
  using Parts = std::vector<std::unique_ptr<Part>>;

  BatchForm form(bool nested, std::optional<DType> weights) {
    const BatchForm::Entry index{BatchForm::kIndex, {kDLInt, 64}}, member{BatchForm::kMember, {kDLInt, 64}};
    const nb::object index_key = nb::str("index"), weight_key = nb::str("priority_weight");
    BatchForm form(members_[0].source->codec(), 0);
    if (!nested && attaches_) form.add_to_root(index_key, index);
    if (attaches_ && weights) form.add_to_root(weight_key, {BatchForm::kWeight, *weights});
    if (!nested) {
      if (!attaches_) form.add_outside(index);
      form.add_outside(member);
    } else if (form.has_keys()) {
      is_made_here_ &= form.add_group_to_root(index_key, {{index_key, index}, {nb::str("buffer_ids"), member}});
    }
    return form;
  }

  // Returns the number of parts; 0: it takes more than this.
  size_t draw(size_t n, Parts& parts, size_t& each) {
    static PyObject* lock = PyUnicode_InternFromString("lock");
    const HeldLock held(attribute(sampler_, lock));
    const auto [ids, rows] = nb::cast<std::pair<nb::list, size_t>>(sampler_.attr("choose")(n));
    each = rows;
    for (size_t p = 0; p < nb::len(ids); ++p) {
      const auto id = nb::cast<int64_t>(ids[p]);
      if (id < 0 || static_cast<size_t>(id) >= members_.size()) throw nb::index_error("no such member");
      const Member& member = members_[static_cast<size_t>(id)];
      if (p == parts.size()) parts.push_back(std::make_unique<Part>());
      Part& part = *parts[p];
      part.source = member.source;
      part.drawn.member = id, part.drawn.with_weights = with_weights_;
      RowReader& reader = part.reader.emplace(member.source->store(), part.scratch);
      const auto ready = [] { return true; };
      if (!BatchMaker::draw_rows(*member.draw, member.sampler, member.source->store(), each, reader, part.drawn, ready) ||
          part.drawn.slots.size() != each)
        return 0;
    }
    return nb::len(ids);
  }

  nb::object read(const Parts& parts, size_t count, size_t each, bool nested) {
    static const std::vector<int64_t> scalar;
    const BatchForm& form = forms_[nested];
    const Codec& codec = members_[0].source->codec();
    const auto& leaves = codec.leaves();
    const auto& entries = form.entries();
    const std::vector<int64_t> lead = {static_cast<int64_t>(count), static_cast<int64_t>(each)};
    LeafMemory memory(leaves, lead, count * each, entries.size());
    for (const BatchForm::Entry& entry : entries) memory.plan(entry.dtype, lead, scalar, count * each * entry.item_bytes());
    memory.take();
    // Make the tensors while the rows are being prefetched; then copy the rows into the tensors' memory.
    const size_t all = leaves.size() + entries.size();
    std::vector<nb::object> tensors;
    tensors.reserve(all);
    for (size_t k = 0; k < all; ++k) {
      for (size_t p = 0; p < count; ++p) parts[p]->reader->warm(k, all);
      tensors.push_back(memory.make(k));
    }
    bool asking = false;
    for (size_t p = 0; p < count; ++p) {
      for (size_t e = 0; e < entries.size(); ++e)
        BatchMaker::fill(entries[e], parts[p]->drawn, memory.data(leaves.size() + e) + p * each * entries[e].item_bytes());
      asking |= parts[p]->source->mapped() && parts[p]->source->store().readahead().on();
    }
    // No Python code runs to the end of the copy: a finaliser that samples would use the same memory for these.
    static thread_local std::vector<LeafCopy> copies;
    bool whole = true;
    maybe_without_gil(memory.bytes() > kGilBytes || asking, [&] {
      for (size_t p = 0; p < count && whole; ++p) {
        copies.clear();
        for (size_t k : codec.in_row()) {
          const size_t bytes = leaves[k].bytes;
          copies.push_back({leaves[k].offset, bytes, memory.data(k) + p * each * bytes, static_cast<ptrdiff_t>(bytes)});
        }
        parts[p]->reader->copy(copies.data(), copies.size(), parts[p]->source->mapped());
      }
      for (size_t p = 0; p < count && whole; ++p) whole = parts[p]->reader->are_whole();
    });
    if (!whole) return nb::none();
    nb::object index, members;
    if (!nested) index = tensors[leaves.size()], members = tensors[all - 1];
    nb::object batch = form.has_keys() ? codec.build(form.root(), tensors, lead) : codec.build(tensors, lead, nb::none());
    return nested ? batch : nb::object(nb::make_tuple(batch, index, members));
  }

  nb::object sampler_;
  bool attaches_, with_weights_ = false, is_made_here_ = true;
  std::vector<Member> members_;
  BatchForm forms_[2];
  Parts parts_;  // for the next batch
};

inline void bind_joint_batches(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<JointBatchMaker>(m, "JointBatchMaker")
      .def(nb::init<nb::object, nb::list, nb::list, nb::list, bool>(), "sampler"_a, "draws"_a, "samplers"_a, "sources"_a,
           "attaches"_a)
      .def_prop_ro("is_made_here", &JointBatchMaker::is_made_here)
      .def("sample", &JointBatchMaker::sample, "n"_a, "nested"_a);
}

}  // namespace engram
