// Items of one form (TensorDicts or dicts of tensors) as packed rows by slot: copied in from items or a batch of them, and
// built again when they are read. A Python list has a marker at the slots that hold such rows.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "push.hpp"
#include "reuse.hpp"

namespace engram {

// New tensors [lead..., ...] for each leaf of a codec, and the targets that rows are copied to. Made before a row is looked up:
// making a tensor may run Python code.
struct OutLeaves {
  OutLeaves(const Codec& codec, const std::vector<int64_t>& lead, size_t rows) : memory(codec.leaves(), lead, rows, 0) {
    memory.take();
    tensors.reserve(codec.leaves().size());
    for (size_t k = 0; k < codec.leaves().size(); ++k) tensors.push_back(memory.make(k));
    for (size_t k : codec.in_row()) {
      const Leaf& leaf = codec.leaves()[k];
      copies.push_back({leaf.offset, leaf.bytes, memory.data(k), static_cast<ptrdiff_t>(leaf.bytes)});
    }
  }
  LeafMemory memory;
  std::vector<nb::object> tensors;
  std::vector<LeafCopy> copies;
};

class ItemRows {
 public:
  // `row`: the marker in a list for an item that is a row here. `most`: the number of slots that there will be; 0: no limit is
  // known.
  ItemRows(nb::object codec, nb::object row, uint64_t most) : kept_(std::move(codec)), row_(std::move(row)) {
    codec_ = nb::cast<const Codec*>(kept_);
    if (codec_->sequence()) throw nb::value_error("items carry no sequence");
    stride_ = round_up(std::max<size_t>(1, codec_->row_end()), 8);
    const uint64_t fitting = std::clamp<uint64_t>(kChunkBytes / stride_, 1, 4096);
    per_chunk_ = std::bit_ceil(most ? std::min<uint64_t>(most, fitting) : fitting);
    clear();
  }
  void clear() { chunks_ = std::make_shared<Chunks>(); }

  // The rows of a list of items (`dims` 0) or of a batch of them (`dims` 1); None: an item has another form. `own`: the leaf in
  // which they store their own index.
  std::unique_ptr<StagedRows> look(nb::handle items, bool batch, std::optional<size_t> own) const {
    bool with_env = false;
    if (own && (!codec_->holds_index(*own, with_env) || with_env)) throw nb::value_error("this leaf has no room for an index");
    auto rows = std::make_unique<StagedRows>();
    std::vector<nb::object> values;
    Plan plan;
    if (!batch) {
      const auto check = [&](PyObject* item, Plan& into) { return codec_->check_same(into, values, item, false, own); };
      if (!PyList_CheckExact(items.ptr()) || !rows->stage(items.ptr(), 1, stride_, plan, check)) return nullptr;
      return rows;
    }
    if (!codec_->check_same(plan, values, items.ptr(), true, own)) return nullptr;
    rows->make_room(plan.steps, stride_);
    for (const LeafSource& leaf : plan.leaves)
      for (size_t i = 0; leaf.array && leaf.bytes && i < plan.steps; ++i)
        std::memcpy(rows->bytes.data() + i * stride_ + leaf.offset, leaf.at(i, 0), leaf.bytes);
    return rows->n ? std::move(rows) : nullptr;
  }
  // Stores in each of the rows its slot, once for each step of its item.
  void set_index(StagedRows& rows, size_t own, nb::handle slots_in) const {
    check(rows);
    bool with_env = false;
    if (!codec_->holds_index(own, with_env) || with_env) throw nb::value_error("this leaf has no room for an index");
    const SlotsArg slots(nb::borrow(slots_in));
    if (slots.n != rows.n) throw nb::value_error("one slot for each row");
    const Leaf& leaf = codec_->leaves()[own];
    for (size_t i = 0; i < rows.n; ++i)
      for (size_t at = 0; at < leaf.bytes; at += 8)
        std::memcpy(rows.bytes.data() + i * stride_ + leaf.offset + at, &slots.data[i], 8);
  }
  // Takes all memory that `put` needs.
  void reserve(uint64_t slot, uint64_t n, uint64_t capacity) {
    if (slot >= capacity || n > capacity || capacity > kMostSlots) throw nb::index_error("the slots lie outside the ring");
    const uint64_t until_end = std::min(n, capacity - slot);
    make_room(slot, until_end), make_room(0, n - until_end);
  }
  // Puts n rows from `first` on into the slots from `slot` on, round a ring.
  void put(const StagedRows& rows, uint64_t first, uint64_t n, uint64_t slot, uint64_t capacity) {
    check(rows);
    if (first > rows.n || n > rows.n - first) throw nb::index_error("there are not so many rows");
    reserve(slot, n, capacity);
    const uint64_t until_end = std::min(n, capacity - slot);
    for (uint64_t i = 0; i < n; ++i)
      std::memcpy(at(i < until_end ? slot + i : i - until_end), rows.bytes.data() + (first + i) * stride_, stride_);
  }
  // The list's items at these places, with rows built as new items. With `reuse` a small list of rows is read into the tensors
  // of an earlier list that have no other owner any more.
  nb::list pick(nb::list list, nb::list slots, bool reuse) {
    const size_t n = nb::len(slots), leaves = codec_->leaves().size();
    reuse = reuse && n <= kMostKept / leaves && n <= kMostKeptBytes / stride_;
    std::vector<OldTensor> old = reuse ? free_tensors(n) : std::vector<OldTensor>();
    const bool keep = reuse && old.empty() && lists_.wants_more();
    std::vector<KeptBatches::Place> places;
    nb::list picked;
    for (size_t i = 0; i < n; ++i) {
      const auto slot = nb::cast<Py_ssize_t>(slots[i]);
      if (slot < 0 || slot >= static_cast<Py_ssize_t>(nb::len(list))) throw nb::index_error("no such slot");
      nb::object item = nb::borrow(PyList_GetItem(list.ptr(), slot));
      const auto find = [&] { return row(static_cast<uint64_t>(slot)); };
      if (!item.is(row_))
        picked.append(item);
      else if (!old.empty())
        picked.append(rebuilt(&old[i * leaves], find()));
      else
        picked.append(built(find, keep ? &places : nullptr));
    }
    if (keep && places.size() == n * leaves) lists_.keep(n, n * stride_, std::move(places));
    return picked;
  }
  nb::object item(uint64_t slot) const { return built([&] { return row(slot); }); }
  nb::object new_item(const StagedRows& rows, uint64_t i) const {
    check(rows);
    if (i >= rows.n) throw nb::index_error("no such row");
    return built([&] { return rows.bytes.data() + i * stride_; });
  }
  // Rows as one batch, with these entries at its root; None: a slot holds no row.
  nb::object gather(nb::list list, nb::handle slots_in, nb::handle extra) const {
    const SlotsArg slots(nb::borrow(slots_in));
    const std::vector<int64_t> lead(1, static_cast<int64_t>(slots.n));
    OutLeaves out(*codec_, lead, slots.n);
    std::vector<const uint8_t*> rows(slots.n);
    const auto items = static_cast<uint64_t>(nb::len(list));
    for (size_t i = 0; i < slots.n; ++i) {
      const auto slot = static_cast<uint64_t>(slots.data[i]);
      if (slot >= items || PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(slot)) != row_.ptr()) return nb::none();
      rows[i] = row(slot);
    }
    const std::shared_ptr<Chunks> held = chunks_;  // in case another thread releases them meanwhile
    maybe_without_gil(out.memory.bytes() > kGilBytes, [&] {
      gather_rows(rows.data(), rows.size(), stride_, out.copies.data(), out.copies.size());
    });
    return codec_->build(out.tensors, lead, extra);
  }
  size_t item_bytes() const {
    size_t bytes = 0;
    for (const Leaf& leaf : codec_->leaves()) bytes += leaf.bytes;
    return bytes;
  }

 private:
  static constexpr size_t kChunkBytes = 64 << 10;
  static constexpr uint64_t kMostSlots = uint64_t{1} << 56;
  static constexpr size_t kMostKept = 2048, kMostKeptBytes = size_t{1} << 20;  // tensors of a list, and bytes of their rows
  struct Chunks {
    std::vector<std::unique_ptr<uint8_t[]>> at;
  };

  void check(const StagedRows& rows) const {
    if (rows.bytes.size() != rows.n * stride_) throw nb::value_error("these rows are of another form");
  }
  void make_room(uint64_t slot, uint64_t n) {
    if (n == 0) return;
    auto& chunks = chunks_->at;
    const uint64_t last = (slot + n - 1) / per_chunk_;
    if (last >= kMostBytes / (per_chunk_ * stride_)) throw std::bad_alloc();
    if (last >= chunks.size()) chunks.resize(last + 1);
    for (uint64_t c = slot / per_chunk_; c <= last; ++c)
      if (!chunks[c]) chunks[c] = std::make_unique<uint8_t[]>(per_chunk_ * stride_);
  }
  uint8_t* at(uint64_t slot) const { return chunks_->at[slot / per_chunk_].get() + slot % per_chunk_ * stride_; }
  const uint8_t* row(uint64_t slot) const {
    const uint64_t c = slot / per_chunk_;
    if (c >= chunks_->at.size() || !chunks_->at[c]) throw nb::index_error("this slot holds no row");
    return at(slot);
  }
  // An item of the row that `find` returns after its tensors were made; the tensors are added to `places` for reuse.
  nb::object built(auto&& find, std::vector<KeptBatches::Place>* places = nullptr) const {
    OutLeaves out(*codec_, kNoDims, 1);
    for (size_t i = 0; places && i < out.copies.size(); ++i) {
      const size_t leaf = codec_->in_row()[i];
      places->push_back({leaf, out.copies[i].array, KeptTensor(out.tensors[leaf])});
    }
    const uint8_t* row = find();
    for (const LeafCopy& leaf : out.copies)
      if (leaf.bytes) std::memcpy(leaf.array, row + leaf.offset, leaf.bytes);
    return codec_->build(out.tensors, kNoDims, nb::none());
  }
  // A tensor that was returned before and is used again.
  struct OldTensor {
    size_t leaf = 0;
    uint8_t* data = nullptr;
    nb::object tensor;
  };
  // The tensors of an earlier list of n items, leaf by leaf in row order; none: they are still in use. Held from here on, so
  // that Python code that runs later finds them in use.
  std::vector<OldTensor> free_tensors(size_t n) {
    std::vector<OldTensor> old;
    if (const auto* places = lists_.find(0, n)) {
      old.reserve(places->size());
      for (const KeptBatches::Place& place : *places)
        old.push_back({place.leaf, place.data, nb::borrow(place.kept.tensor())});
    }
    return old;
  }
  nb::object rebuilt(OldTensor* old, const uint8_t* row) const {
    std::vector<nb::object> tensors(codec_->leaves().size());
    for (size_t i = 0; i < tensors.size(); ++i, ++old) {
      const Leaf& leaf = codec_->leaves()[old->leaf];
      if (leaf.bytes) std::memcpy(old->data, row + leaf.offset, leaf.bytes);
      tensors[old->leaf] = std::move(old->tensor);
    }
    return codec_->build(tensors, kNoDims, nb::none());
  }

  inline static const std::vector<int64_t> kNoDims;
  nb::object kept_, row_;
  const Codec* codec_ = nullptr;
  uint64_t stride_ = 8, per_chunk_ = 1;
  std::shared_ptr<Chunks> chunks_;
  KeptBatches lists_;  // of items that were returned
};

inline void bind_item_rows(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<StagedRows>(m, "NewItemRows").def("__len__", [](const StagedRows& rows) { return rows.n; });
  nb::class_<ItemRows>(m, "ItemRows")
      .def(nb::init<nb::object, nb::object, uint64_t>(), "codec"_a, "row"_a, "most"_a = 0)
      .def("look", &ItemRows::look, "items"_a.none(), "batch"_a, "own"_a.none() = nb::none(),
           nb::sig("def look(self, items: object, batch: bool, own: int | None = None) -> NewItemRows | None"))
      .def("set_index", &ItemRows::set_index, "rows"_a, "own"_a, "slots"_a)
      .def("reserve", &ItemRows::reserve, "slot"_a, "n"_a, "capacity"_a)
      .def("put", &ItemRows::put, "rows"_a, "first"_a, "n"_a, "slot"_a, "capacity"_a)
      .def("pick", &ItemRows::pick, "list"_a, "slots"_a, "reuse"_a = false)
      .def("item", &ItemRows::item, "slot"_a)
      .def("new_item", &ItemRows::new_item, "rows"_a, "i"_a)
      .def("gather", &ItemRows::gather, "list"_a, "slots"_a, "extra"_a.none() = nb::none())
      .def("clear", &ItemRows::clear)
      .def_prop_ro("item_bytes", &ItemRows::item_bytes);
}

}  // namespace engram
