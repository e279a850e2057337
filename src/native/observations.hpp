// Observations that are stored once, in private memory: the columns of `ObservationProtocol`, and what appends to them and reads from them.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "border.hpp"
#include "mapping.hpp"
#include "observation_protocol.hpp"

namespace engram {

// The units of all lanes: addresses for as many as there can ever be, of which segments get memory when a lane takes them.
class UnitMemory {
 public:
  static constexpr uint64_t kLeastBytes = 64 << 10, kMostBytes = 1 << 20, kParts = 16;  // a segment's, and a lane's segments at least

  UnitMemory(uint64_t lanes, uint64_t lane_bytes, uint64_t lane_units, uint64_t record_bytes)
      : stride_(sizeof(std::atomic<uint64_t>) + round_up(record_bytes, 8)) {
    const uint64_t wanted = std::clamp<uint64_t>(lane_bytes / kParts, kLeastBytes, kMostBytes);
    segment_units_ = std::max<uint64_t>(1, wanted / stride_);
    segment_bytes_ = round_up(segment_units_ * stride_, kPage);
    segments_ = lanes * ((lane_units + segment_units_ - 1) / segment_units_ + 1);
    owners_ = std::make_unique<std::atomic<uint64_t>[]>(segments_);
    void* at = ::mmap(nullptr, segments_ * segment_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw NoMemoryToMap(segments_ * segment_bytes_);
    memory_ = static_cast<uint8_t*>(at);
  }
  UnitMemory(const UnitMemory&) = delete;
  UnitMemory& operator=(const UnitMemory&) = delete;
  ~UnitMemory() { ::munmap(memory_, segments_ * segment_bytes_); }

  uint64_t segment_units() const { return segment_units_; }
  uint64_t segments() const { return segments_; }
  std::atomic<uint64_t>* owners() const { return owners_.get(); }
  uint64_t owner(uint64_t unit) const {
    const uint64_t segment = unit / segment_units_;
    return segment < segments_ ? owners_[segment].load(std::memory_order_relaxed) : 0;
  }
  void make_segment(uint64_t segment) const {
    if (::mprotect(memory_ + segment * segment_bytes_, segment_bytes_, PROT_READ | PROT_WRITE) != 0) throw NoMemoryToMap(segment_bytes_);
  }
  std::atomic<uint64_t>& link(uint64_t unit) const { return *reinterpret_cast<std::atomic<uint64_t>*>(at(unit)); }
  uint8_t* record(uint64_t unit) const { return at(unit) + sizeof(std::atomic<uint64_t>); }
  // Of the segments that lanes have.
  uint64_t bytes() const {
    const auto has = std::count_if(owners_.get(), owners_.get() + segments_, [](const auto& owner) { return owner.load() != 0; });
    return static_cast<uint64_t>(has) * segment_bytes_;
  }

 private:
  uint8_t* at(uint64_t unit) const {
    return memory_ + unit / segment_units_ * segment_bytes_ + unit % segment_units_ * stride_;
  }

  uint64_t stride_, segment_units_, segment_bytes_, segments_;
  std::unique_ptr<std::atomic<uint64_t>[]> owners_;
  uint8_t* memory_ = nullptr;
};

// The observations of all rows. A *record* is the frames of all keys that are stored once, side by side. Each environment of a lane
// has columns and units of its own: for the protocol it is a lane.
class Observations {
 public:
  using Rows = LaneProtocol<StdMemory>;
  struct Geometry {
    uint64_t lanes = 1, envs = 1, capacity = 1, frames = 1, ahead = 1, longest_piece = 1;
    std::vector<uint64_t> frame_bytes;  // of each key
  };
  // X and next.X of one key, in the batch that is appended or the one that is read: stacks of frames side by side.
  struct Key {
    LeafSource x, next;
  };

  explicit Observations(Geometry geometry)
      : geometry_(std::move(geometry)),
        record_bytes_(std::accumulate(geometry_.frame_bytes.begin(), geometry_.frame_bytes.end(), uint64_t{0})),
        columns_count_(geometry_.lanes * geometry_.envs),
        shape_{geometry_.capacity, geometry_.frames, geometry_.ahead, geometry_.longest_piece, 0, 0},
        units_(columns_count_, shape_.records() * record_bytes_, 2 * (2 * geometry_.frames - 1) * shape_.records(), record_bytes_) {
    shape_.segment_units = units_.segment_units(), shape_.segments = units_.segments();
    const uint64_t words = columns_count_ * shape_.records(), kinds = columns_count_ * shape_.tails();
    tail_bytes_ = geometry_.frames * record_bytes_;
    words_ = MappedRegion::map(-1, words * sizeof(std::atomic<uint64_t>));
    records_ = MappedRegion::map(-1, std::max<uint64_t>(1, words * record_bytes_));
    tails_ = MappedRegion::map(-1, kinds * (sizeof(std::atomic<uint64_t>) + tail_bytes_));
    for (uint64_t c = 0; c < columns_count_; ++c) pools_.emplace_back(shape_.segment_units);
    planned_.resize(geometry_.envs);
  }

  const Geometry& geometry() const { return geometry_; }
  uint64_t bytes() const {
    return columns_count_ * (shape_.records() * (8 + record_bytes_) + shape_.tails() * (8 + tail_bytes_)) + units_.bytes();
  }

  // ---- the writer, a piece of n steps behind `published`: `plan`, then `store` in the claim. The caller keeps other writers out ----
  // Takes the memory that these steps need: a failure leaves everything as it was. `from`: the first one's step in the batch.
  void plan(const Rows& rows, uint64_t lane, uint64_t n, const std::vector<Key>& keys, uint64_t from) {
    const uint64_t at = StdMemory::load(rows.published);
    for (uint64_t env = 0; env < geometry_.envs; ++env) {
      const Columns columns = columns_of(lane, env, {&keys, at, from});
      const Protocol protocol = protocol_of(rows, columns);
      UnitPool& pool = pools_[columns.owner - 1];
      protocol.learn(pool);
      const uint64_t needed = protocol.plan(at, n, planned_[env]);
      if (!protocol.prepare(pool, needed, at, n, [&](uint64_t segment) { units_.make_segment(segment); })) throw std::bad_alloc();
    }
  }
  void store(const Rows& rows, uint64_t lane, uint64_t at, uint64_t n, const std::vector<Key>& keys, uint64_t from) {
    for (uint64_t env = 0; env < geometry_.envs; ++env) {
      const Columns columns = columns_of(lane, env, {&keys, at, from});
      const Protocol protocol = protocol_of(rows, columns);
      UnitPool& pool = pools_[columns.owner - 1];
      protocol.release(pool, at, n);
      protocol.store_units(at, planned_[env], pool);
      protocol.store_records(at, planned_[env]);
      protocol.store_tails(at, n);
      protocol.written(pool, at, n);
    }
  }

  // ---- readers, between `rows.look` and `rows.after_reading` ----
  void prefetch(uint64_t lane, uint64_t env, uint64_t w) const {
    const uint64_t place = (lane * geometry_.envs + env) * shape_.records() + w % shape_.records();
    __builtin_prefetch(words_->data() + place * sizeof(uint64_t));
    const uint8_t* const record = records_->data() + place * record_bytes_;
    for (uint64_t b = 0; b < std::min<uint64_t>(record_bytes_, 512); b += 64) __builtin_prefetch(record + b);
  }
  // Copies X and next.X of row w to place `i` of the batch. Returns whether next.X came from the row's tail, which must then be looked at
  // again (`tail_is_there`).
  bool copy(const Rows& rows, uint64_t lane, uint64_t env, uint64_t w, uint64_t published, const std::vector<Key>& to, uint64_t i) const {
    const Columns columns = columns_of(lane, env, {});
    const Protocol protocol = protocol_of(rows, columns);
    StackPlaces places;
    protocol.find_x(w, places);
    for (size_t k = 0; k < to.size(); ++k) columns.copy_stack(places, k, const_cast<uint8_t*>(to[k].x.at(i, 0)));
    const bool is_newest = protocol.is_newest(w, published);
    protocol.find_next(w, is_newest, places);
    for (size_t k = 0; k < to.size(); ++k) columns.copy_stack(places, k, const_cast<uint8_t*>(to[k].next.at(i, 0)));
    return is_newest;
  }
  bool tail_is_there(const Rows& rows, uint64_t w) const {
    return StdMemory::load(rows.claimed) <= w + shape_.tails();
  }

 private:
  // What is appended: row `at` is step `from` of the keys.
  struct Batch {
    const std::vector<Key>* keys = nullptr;
    uint64_t at = 0, from = 0;
  };
  // The words and frames of one environment of a lane.
  struct Columns {
    const Observations& all;
    std::atomic<uint64_t>* words;
    uint8_t* records;
    std::atomic<uint64_t>* tail_kinds;
    uint8_t* tails;
    uint64_t owner, env;
    Batch batch;

    uint64_t word(uint64_t w) const { return StdMemory::load(words[w % all.shape_.records()]); }
    void set_word(uint64_t w, uint64_t bits) const { StdMemory::store(words[w % all.shape_.records()], bits); }
    uint64_t link(uint64_t unit) const { return StdMemory::load(all.units_.link(unit)); }
    void set_link(uint64_t unit, uint64_t next) const { StdMemory::store(all.units_.link(unit), next); }
    uint64_t tail_kind(uint64_t w) const { return StdMemory::load(tail_kinds[w % all.shape_.tails()]); }
    void set_tail_kind(uint64_t w, uint64_t kind) const { StdMemory::store(tail_kinds[w % all.shape_.tails()], kind); }
    bool owns(uint64_t unit) const { return all.units_.owner(unit) == owner; }

    bool same(const FramePlace& a, const FramePlace& b) const {
      for (size_t k = 0, offset = 0; k < all.geometry_.frame_bytes.size(); offset += all.geometry_.frame_bytes[k++]) {
        const uint8_t *one = frame(a, k, offset), *other = frame(b, k, offset);
        if (one == other) continue;
        const bool equal = one && other ? std::memcmp(one, other, all.geometry_.frame_bytes[k]) == 0 : zeros(one ? one : other, k);
        if (!equal) return false;
      }
      return true;
    }
    bool is_zero(const FramePlace& a) const { return same(a, FramePlace{}); }
    void put(const FramePlace& to, const FramePlace& from_place) const {
      for (size_t k = 0, offset = 0; k < all.geometry_.frame_bytes.size(); offset += all.geometry_.frame_bytes[k++])
        copy_frame(const_cast<uint8_t*>(frame(to, k, offset)), frame(from_place, k, offset), all.geometry_.frame_bytes[k]);
    }
    void copy_stack(const StackPlaces& places, size_t k, uint8_t* to) const {
      uint64_t offset = 0;
      for (size_t before = 0; before < k; ++before) offset += all.geometry_.frame_bytes[before];
      for (uint64_t j = 0, bytes = all.geometry_.frame_bytes[k]; j < all.geometry_.frames; ++j, to += bytes)
        copy_frame(to, frame(places[j], k, offset), bytes);
    }

   private:
    static void copy_frame(uint8_t* to, const uint8_t* frame, uint64_t bytes) {
      if (frame) std::memcpy(to, frame, bytes);
      else std::memset(to, 0, bytes);
    }
    bool zeros(const uint8_t* frame, size_t k) const {
      const uint64_t bytes = all.geometry_.frame_bytes[k];
      return bytes == 0 || (frame[0] == 0 && std::memcmp(frame, frame + 1, bytes - 1) == 0);
    }
    // Where the frame of a key lies; null: it is zeros. `offset`: of the key in a record.
    const uint8_t* frame(const FramePlace& place, size_t k, uint64_t offset) const {
      const uint64_t bytes = all.geometry_.frame_bytes[k];
      switch (place.kind) {
        case FramePlace::kRecord: return records + place.number % all.shape_.records() * all.record_bytes_ + offset;
        case FramePlace::kUnit: return all.units_.record(place.number) + offset;
        case FramePlace::kTail:
          return tails + place.number % all.shape_.tails() * all.tail_bytes_ + place.frame * all.record_bytes_ + offset;
        case FramePlace::kNewX: return (*batch.keys)[k].x.at(batch.from + (place.number - batch.at), env) + place.frame * bytes;
        case FramePlace::kNewNext: return (*batch.keys)[k].next.at(batch.from + (place.number - batch.at), env) + place.frame * bytes;
        default: return nullptr;
      }
    }
  };
  using Protocol = ObservationProtocol<StdMemory, const Columns>;

  Columns columns_of(uint64_t lane, uint64_t env, Batch batch) const {
    const uint64_t c = lane * geometry_.envs + env, records = shape_.records(), tails = shape_.tails();
    auto* const words = reinterpret_cast<std::atomic<uint64_t>*>(words_->data());
    auto* const kinds = reinterpret_cast<std::atomic<uint64_t>*>(tails_->data());
    uint8_t* const frames_of_tails = tails_->data() + columns_count_ * tails * sizeof(uint64_t);
    return {*this,
            words + c * records, records_->data() + c * records * record_bytes_,
            kinds + c * tails, frames_of_tails + c * tails * tail_bytes_,
            c + 1, env, batch};
  }
  Protocol protocol_of(const Rows& rows, const Columns& columns) const {
    return {rows, shape_, columns, units_.owners(), columns.owner};
  }

  Geometry geometry_;
  uint64_t record_bytes_, columns_count_, tail_bytes_ = 0;
  ObservationShape shape_;
  UnitMemory units_;
  std::shared_ptr<MappedRegion> words_, records_, tails_;  // tails: the kinds of all, then their frames
  std::vector<UnitPool> pools_;                            // of this process's writer, of each lane's environments
  std::vector<Protocol::Words> planned_;                   // of each environment
};

}  // namespace engram
