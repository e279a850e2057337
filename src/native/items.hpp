// Reads packed rows as items of one form (tensors, TensorDicts or dicts of tensors), which are built again. A Python list has a
// marker at the slots that hold such rows.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "bind_store.hpp"
#include "reuse.hpp"

namespace engram {

class ItemReader {
 public:
  // `row`: the marker in a list for an item that is a row of the store.
  ItemReader(nb::object store, nb::object codec, nb::object row)
      : store_object_(std::move(store)), codec_object_(std::move(codec)), row_(std::move(row)),
        store_(nb::cast<Store*>(store_object_)), codec_(nb::cast<const Codec*>(codec_object_)) {
    if (!store_ || !codec_) throw nb::type_error("a store and its codec are needed, not None");
    check_codec(*store_, *codec_);
  }
  ItemReader(const ItemReader&) = delete;
  // The list's items at these places, with rows built as new items. With `reuse` a small list of rows is read into the tensors
  // of an earlier list that have no other owner any more.
  nb::list pick(nb::list list, nb::list slots, bool reuse) {
    const size_t n = nb::len(slots), leaves = codec_->leaves().size();
    reuse = reuse && n <= kMostKept / leaves && n <= kMostKeptBytes / stride();
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
    if (keep && places.size() == n * leaves) lists_.keep(n, n * stride(), std::move(places));
    return picked;
  }
  nb::object item(uint64_t slot) const { return built([&] { return row(slot); }); }

 private:
  static constexpr size_t kMostKept = 2048, kMostKeptBytes = size_t{1} << 20;  // tensors of a list, and bytes of their rows
  size_t stride() const { return store_->geometry().row_stride; }
  const uint8_t* row(uint64_t slot) const {
    if (slot >= store_->room()) throw nb::index_error("this slot holds no row");
    return store_->row(slot);
  }
  // An item of the row that `find` returns after its tensors were made; the tensors are added to `places` for reuse.
  nb::object built(auto&& find, std::vector<KeptBatches::Place>* places = nullptr) const {
    const std::vector<Leaf>& leaves = codec_->leaves();
    LeafMemory memory(leaves, kNoDims, 1, 0);
    memory.take();
    std::vector<nb::object> tensors;
    tensors.reserve(leaves.size());
    for (size_t k = 0; k < leaves.size(); ++k) tensors.push_back(memory.make(k));
    for (size_t k : codec_->in_row())
      if (places) places->push_back({k, memory.data(k), KeptTensor(tensors[k])});
    const uint8_t* row = find();
    for (size_t k = 0; k < leaves.size(); ++k)
      if (leaves[k].bytes) std::memcpy(memory.data(k), row + leaves[k].offset, leaves[k].bytes);
    return codec_->build(tensors, kNoDims, nb::none());
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
  nb::object store_object_, codec_object_, row_;
  Store* store_;
  const Codec* codec_;
  KeptBatches lists_;  // of items that were returned
};

}  // namespace engram
