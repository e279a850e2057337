// Saving rows while they are overwritten: a writer copies a block that is not saved yet before it overwrites it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "lanes.hpp"
#include "mapping.hpp"
#include "observations.hpp"

namespace engram {

// The rows of one moment, each of which is read once, by sequence, in any order.
//
// It works on slots, so that it does not depend on counters that change meanwhile. Writers of this process call `preserve`
// before they claim. The lane's counters reveal rows that other processes overwrite, while the mutex keeps this process's
// writers from claiming rows of a block that is not copied.
class CopyOnWriteSnapshot {
 public:
  static constexpr uint64_t kBlockBytes = 1 << 20;
  struct Range {
    uint64_t first, stop;  // sequences
  };

  // `observations`: those that are kept beside the rows; null: there are none.
  CopyOnWriteSnapshot(std::shared_ptr<MappedRegion> region, const Lanes& lanes, const uint8_t* rows, std::vector<Range> ranges,
                      std::shared_ptr<const Observations> observations)
      : region_(std::move(region)), lanes_(lanes), rows_(rows), ranges_(std::move(ranges)), observations_(std::move(observations)) {
    if (observations_) observed_ = observations_->targets();
    for (const Range& r : ranges_) lost_.push_back(r.first);  // overwritten between reading the counters and this
    const StoreGeometry& s = lanes.geometry();
    block_rows_ = std::clamp<uint64_t>(kBlockBytes / std::max<uint64_t>(1, kept_stride()), 1, s.lane_capacity);
    per_line_ = (s.lane_capacity + block_rows_ - 1) / block_rows_;
    blocks_ = std::vector<Block>(s.lanes * s.envs * per_line_);
    for (uint64_t l = 0; l < ranges_.size(); ++l)
      for (uint64_t w = ranges_[l].first; w < ranges_[l].stop;) {
        const uint64_t slot = w % s.lane_capacity, n = std::min(ranges_[l].stop - w, left_in_block(slot));
        for (uint64_t env = 0; env < s.envs; ++env) {
          Block& b = block(l * s.envs + env, slot);
          b.unread += n;
          b.state.store(kPending, std::memory_order_relaxed);
        }
        w += n;
      }
  }

  // Called before rows in these slots of a lane change, in all environments.
  void preserve(uint64_t lane, uint64_t slot, uint64_t n) {
    const uint64_t envs = lanes_.envs(), capacity = lanes_.capacity();
    for (n = std::min(n, capacity); n > 0;) {
      const uint64_t take = std::min({n, left_in_block(slot), capacity - slot});
      for (uint64_t env = 0; env < envs; ++env) preserve_block(lane * envs + env, slot);
      slot = (slot + take) % capacity, n -= take;
    }
  }

  // Bytes of a row as `read` copies it: its payload, then its observations.
  uint64_t row_bytes() const { return geometry().payload_bytes + (observations_ ? observations_->bytes_of_leaves() : 0); }
  // Copies rows [start, stop) of a lane, environment after environment. Each row is read once.
  void read(uint64_t lane, uint64_t start, uint64_t stop, uint8_t* out) {
    const StoreGeometry& s = lanes_.geometry();
    for (uint64_t env = 0; env < s.envs; ++env)
      for (uint64_t w = start; w < stop;) {
        const uint64_t slot = w % s.lane_capacity, n = std::min(stop - w, left_in_block(slot));
        read_piece(lane, env, w, slot, n, out);
        out += n * row_bytes(), w += n;
      }
  }

  // Rows of a lane below this sequence were overwritten by another process before they were read.
  uint64_t lost_below(uint64_t lane) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return lost_[lane];
  }
  bool covers(uint64_t lane, uint64_t start, uint64_t stop) const {
    return lane < ranges_.size() && ranges_[lane].first <= start && start <= stop && stop <= ranges_[lane].stop;
  }
  // Called before this process replaces all rows and resets the counters: copies the rows that were not read yet.
  void settle() {
    const StoreGeometry& s = lanes_.geometry();
    for (uint64_t lane = 0; lane < s.lanes; ++lane) preserve(lane, 0, s.lane_capacity);
  }
  const StoreGeometry& geometry() const { return lanes_.geometry(); }

 private:
  enum State : uint8_t { kDone, kPending, kPreserved };
  struct Block {
    std::atomic<uint8_t> state{kDone};
    uint64_t unread = 0;
    Block() = default;
    Block(const Block& o) : state(o.state.load()), unread(o.unread) {}
  };

  uint64_t left_in_block(uint64_t slot) const {
    return std::min(block_rows_ - slot % block_rows_, lanes_.capacity() - slot);
  }
  uint64_t index(uint64_t line, uint64_t slot) const { return line * per_line_ + slot / block_rows_; }
  Block& block(uint64_t line, uint64_t slot) { return blocks_[index(line, slot)]; }
  const uint8_t* row(uint64_t line, uint64_t slot) const {
    return rows_ + (line * lanes_.capacity() + slot) * lanes_.geometry().row_stride;
  }

  void preserve_block(uint64_t line, uint64_t slot) {
    Block& b = block(line, slot);
    if (b.state.load(std::memory_order_acquire) != kPending) return;
    const std::lock_guard<std::mutex> guard(mutex_);
    if (b.state.load(std::memory_order_relaxed) == kPending) keep(b, line, slot);
  }
  void keep(Block& b, uint64_t line, uint64_t slot) {
    const uint64_t first = slot / block_rows_ * block_rows_, stride = kept_stride();
    const uint64_t n = std::min(block_rows_, lanes_.capacity() - first);
    auto copy = std::make_unique<uint8_t[]>(n * stride);
    const uint64_t lane = line / lanes_.envs();
    if (!observations_) std::memcpy(copy.get(), row(line, first), n * stride);
    for (uint64_t i = 0, w = 0; i < n; ++i) {
      if (!saves(lane, first + i, w)) continue;
      if (observations_) copy_whole(line, first + i, w, copy.get() + i * stride);
      note_lost(lane, w, w + 1);
    }
    copies_[index(line, slot)] = std::move(copy);
    b.state.store(kPreserved, std::memory_order_release);
  }
  void read_piece(uint64_t lane, uint64_t env, uint64_t sequence, uint64_t slot, uint64_t n, uint8_t* out) {
    const StoreGeometry& s = lanes_.geometry();
    const uint64_t line = lane * s.envs + env;
    Block& b = block(line, slot);
    const std::lock_guard<std::mutex> guard(mutex_);
    if (b.state.load(std::memory_order_relaxed) == kPending && n < b.unread) keep(b, line, slot);
    const bool preserved = b.state.load(std::memory_order_relaxed) == kPreserved;
    const uint64_t stride = kept_stride(), bytes = row_bytes();
    const uint8_t* from = preserved ? copies_[index(line, slot)].get() + slot % block_rows_ * stride : row(line, slot);
    for (uint64_t i = 0; i < n; ++i) {
      if (observations_ && !preserved) copy_whole(line, slot + i, sequence + i, out + i * bytes);
      else std::memcpy(out + i * bytes, from + i * stride, bytes);
    }
    if (!preserved) note_lost(lane, sequence, sequence + n);
    b.unread -= std::min(n, b.unread);
    if (b.unread > 0) return;
    b.state.store(kDone, std::memory_order_release);
    copies_.erase(index(line, slot));
  }
  // From one row to the next in a copy of a block.
  uint64_t kept_stride() const { return observations_ ? row_bytes() : geometry().row_stride; }
  // Copies a row that no writer overwrites meanwhile, and its observations; the next one of the newest rows lies elsewhere when rows are
  // appended behind them.
  void copy_whole(uint64_t line, uint64_t slot, uint64_t w, uint8_t* out) const {
    std::memcpy(out, row(line, slot), geometry().payload_bytes);
    std::vector<Observations::Target> to = observed_;
    for (Observations::Target& one : to) one.array = out + one.stride;
    const uint64_t lane = line / lanes_.envs(), env = line % lanes_.envs();
    const Lanes::Protocol protocol = lanes_.protocol(lane);
    bool is_whole = false;
    while (!is_whole) {
      const bool from_tail = observations_->copy(protocol, lane, env, w, lanes_.published_now(lane), to, 0);
      Lanes::Protocol::after_reading();
      is_whole = !from_tail || observations_->is_newest(w, lanes_.published_now(lane));
    }
  }
  // Called after rows [start, stop) were copied: rows below the oldest whole row may be torn.
  void note_lost(uint64_t lane, uint64_t start, uint64_t stop) {
    std::atomic_thread_fence(std::memory_order_acquire);
    const uint64_t first = lanes_.first_now(lane);
    if (start < first) lost_[lane] = std::max(lost_[lane], std::min(first, stop));
  }
  // Whether the row in a slot is part of the save, and its sequence.
  bool saves(uint64_t lane, uint64_t slot, uint64_t& sequence) const {
    const Range& r = ranges_[lane];
    if (r.first == r.stop) return false;
    const uint64_t newest = r.stop - 1, capacity = lanes_.capacity();
    const uint64_t back = (newest % capacity + capacity - slot) % capacity;
    sequence = newest - back;
    return back <= newest && sequence >= r.first;
  }

  std::shared_ptr<MappedRegion> region_;
  Lanes lanes_;
  const uint8_t* rows_;
  std::vector<Range> ranges_;
  std::shared_ptr<const Observations> observations_;
  std::vector<Observations::Target> observed_;  // `stride`: where each leaf lies in a copied row
  std::vector<uint64_t> lost_;
  uint64_t block_rows_ = 1, per_line_ = 1;
  std::vector<Block> blocks_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::unique_ptr<uint8_t[]>> copies_;
};

}  // namespace engram
