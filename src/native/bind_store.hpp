// What bindings of stores share, and what one unit defines and another one binds.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "codec.hpp"
#include "pages.hpp"

namespace engram {

inline void check_lane(const Store& store, uint64_t lane) {
  store.check_file();
  if (lane >= store.geometry().lanes)
    throw nb::index_error(("lane " + std::to_string(lane) + " of " + std::to_string(store.geometry().lanes)).c_str());
}

// The time slots that n steps appended at sequence `first` take.
inline Tensor slots_from(const Store& store, uint64_t lane, uint64_t first, size_t n) {
  const uint64_t capacity = store.geometry().lane_capacity;
  return slots_out(n, [&](int64_t* out) {
    uint64_t slot = first % capacity;
    for (size_t i = 0; i < n; ++i) {
      out[i] = static_cast<int64_t>(lane * capacity + slot);
      if (++slot == capacity) slot = 0;
    }
  });
}

inline Tensor next_slots(Store& store, uint64_t lane, size_t n) {
  check_lane(store, lane);
  return slots_from(store, lane, store.lanes.lane(lane).published.load(), n);
}

// The numbers of the index that a row stores of itself in a leaf: for each step of an item that of time, and where there are
// dimensions of environments those, too.
class IndexNumbers {
 public:
  // `dims`: how many numbers an index has.
  IndexNumbers(const Store& store, size_t leaf_bytes, size_t dims) : each_(leaf_bytes / 8), dims_(dims), envs_(store.env_shape()) {
    if (dims != envs_.size() + 1) throw nb::value_error("this index is of other environments");
  }
  size_t each() const { return each_; }
  void put(uint64_t time_slot, uint64_t env, int64_t* to) const {
    if (each_ == 1) {
      *to = static_cast<int64_t>(time_slot);
      return;
    }
    for (size_t k = 0; k < each_; k += dims_) {
      to[k] = static_cast<int64_t>(time_slot);
      uint64_t rest = env;
      for (size_t d = dims_ - 1; d > 0; rest /= envs_[d - 1], --d) to[k + d] = static_cast<int64_t>(rest % envs_[d - 1]);
    }
  }

 private:
  size_t each_, dims_;
  const std::vector<uint64_t>& envs_;
};

inline nb::object positions(const std::vector<uint32_t>& at) {
  if (at.empty()) return nb::none();
  nb::list list;
  for (uint32_t i : at) list.append(i);
  return nb::object(list);
}

[[gnu::noinline]] inline bool has_all_leaves(const Store& store, const Codec& codec) {
  return !codec.sequence() && std::all_of(codec.leaves().begin(), codec.leaves().end(),
                                          [&](const Leaf& leaf) { return store.has_leaf(leaf.offset, leaf.bytes); });
}
inline void check_codec(const Store& store, const Codec& codec) {
  store.check_file();
  if (codec.row_end() > store.geometry().payload_bytes && !has_all_leaves(store, codec))
    throw nb::value_error("the layout does not fit the rows of this store");
}

inline void refuse_slots(const Store& store) {
  throw nb::index_error(("a slot lies outside 0 to " + std::to_string(store.slots() - 1)).c_str());
}

// The positions among these slots of rows that are removed.
inline std::vector<uint32_t> removed_places(const Store& store, const int64_t* slots, size_t n) {
  std::vector<uint32_t> places;
  if (!store.lanes.some_removed()) return places;
  if (store.lanes.count() == 1) {  // as below, without a division for each
    const RemovedRows<StdMemory> removed = store.lanes.removed(0);
    for (size_t i = 0; i < n; ++i)
      if (removed.has(static_cast<uint64_t>(slots[i]))) places.push_back(static_cast<uint32_t>(i));
    return places;
  }
  for (size_t i = 0; i < n; ++i)
    if (store.lanes.is_removed(static_cast<uint64_t>(slots[i]))) places.push_back(static_cast<uint32_t>(i));
  return places;
}

inline const Leaf& leaf_of(const Codec& codec, size_t k) {
  if (k >= codec.leaves().size()) throw nb::index_error("the rows have no such leaf");
  return codec.leaves()[k];
}

inline Observations& observations_of(Store& store, uint64_t lane) {
  store.must_be_writable();
  check_lane(store, lane);
  if (!store.observations()) throw nb::value_error("this store keeps no observations beside its rows");
  return *store.observations();
}

// (frames, bytes of a frame) of each key.
using KeySizes = std::vector<std::pair<uint64_t, uint64_t>>;
inline std::vector<Observations::KeyGeometry> key_geometries(const KeySizes& keys) {
  std::vector<Observations::KeyGeometry> all;
  for (const auto& [frames, bytes] : keys) all.push_back({frames, bytes});
  return all;
}

inline void check_packed(const PackedRows& rows, size_t row_bytes, const char* whose) {
  if (rows.shape(1) != row_bytes)
    throw nb::value_error(("the rows have " + std::to_string(rows.shape(1)) + " bytes each, those of " + whose + " " +
                           std::to_string(row_bytes)).c_str());
  check_packed_bytes(rows);
}

inline void check_ragged(const Store& store) {
  if (!store.lanes.is_ragged()) throw nb::value_error("the rows of this store have one length");
}

// ---- of stores, too, but defined in bind_rows.cpp, beside what else puts rows in ----
using RowBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
nb::object append_row(Store& store, uint64_t lane, const RowBytes& row);
nb::object append(Store& store, uint64_t lane, const Plan& plan, size_t first, std::optional<size_t> n, bool wanted,
                  bool waits);
Tensor pack(const Plan& plan, size_t row_bytes);
void put_leaves(Store& store, uint64_t lane, uint64_t start, const Plan& plan);

// ---- and beside what else gets rows out ----
nb::tuple read_rows(Store& store, nb::handle slots_in);
nb::tuple gather(Store& store, const Codec& codec, nb::handle slots_in, std::optional<std::vector<int64_t>> shape,
                 nb::handle extra, bool mapped, bool sequences);
nb::tuple gather_many(const std::vector<Store*>& stores, const Codec& codec, nb::handle slots_in,
                      std::optional<std::vector<int64_t>> shape, nb::handle extra, bool mapped, bool sequences,
                      nb::handle parts = nb::none());
nb::tuple gather_leaves(Store& store, const Codec& codec, nb::handle slots_in, const std::vector<size_t>& chosen, bool mapped);
nb::object unpack(const Codec& codec, const PackedRows& packed, nb::handle extra);
std::optional<std::pair<Tensor, Tensor>> joint_index(nb::list drawn, const std::vector<int64_t>& members);
std::optional<Tensor> uniform(Store& store, nb::handle seed_in, size_t n);

}  // namespace engram
