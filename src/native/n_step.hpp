// Returns over several steps (Sutton, 1988), of rewards and flags as they lie in the rows of a store.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bind_store.hpp"
#include "casts.hpp"

namespace engram {

// The sum of float32 numbers side by side, in the order in which numpy adds them: its returns are the same to the last bit.
inline float numpy_sum(const float* x, size_t n) {
  if (n < 8) {
    float sum = 0;
    for (size_t i = 0; i < n; ++i) sum += x[i];
    return sum;
  }
  if (n > 128) {
    const size_t half = n / 2 / 8 * 8;
    return numpy_sum(x, half) + numpy_sum(x + half, n - half);
  }
  float r[8];
  std::copy_n(x, 8, r);
  size_t i = 8;
  for (; i < n / 8 * 8; i += 8)
    for (size_t k = 0; k < 8; ++k) r[k] += x[i + k];
  float sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
  for (; i < n; ++i) sum += x[i];
  return sum;
}

// Reads rows where they lie, from one to the next in time. As `RowReader`: rows that were overwritten meanwhile are noticed
// afterwards.
class StepWalk {
 public:
  StepWalk(const Store& store, const Leaf& reward, const Leaf& done)
      : store_(store), reward_(reward), done_(done), is_float_(reward.dtype == DType{kDLFloat, 32}) {
    epoch_ = store.lanes.epoch();
    for (uint64_t l = 0; l < store.geometry().lanes; ++l) {
      const LaneView view = store.lanes.view(l);
      lanes_.emplace_back(view, store.geometry().lane_capacity);
      oldest_.push_back(view.published);
    }
  }
  // The rewards of the row in a slot and of those behind it, at most n: to the first with a flag, or the lane's newest. Returns
  // how many they are, and changes the slot to that of the last; 0: the slot holds no row.
  size_t read(uint64_t& slot, size_t n, float* rewards) {
    const StoreGeometry& s = store_.geometry();
    uint64_t time = slot, env = 0, lane = 0, sequence = 0;
    if (s.envs > 1) time = slot / s.envs, env = slot - time * s.envs;
    if (s.lanes > 1) lane = time / s.lane_capacity, time -= lane * s.lane_capacity;
    if (!lanes_[lane].find(time, sequence)) return 0;
    oldest_[lane] = std::min(oldest_[lane], sequence);
    const uint64_t first = store_.physical(lane, env, 0);
    for (size_t count = 1;; ++count) {
      const uint8_t* const row = store_.row(first + time);
      if (is_float_) std::memcpy(rewards, row + reward_.offset, sizeof(float));
      else if (!cast_reward(row, rewards)) return 0;
      ++rewards;
      const uint8_t* const flags = row + done_.offset;
      const bool done = std::any_of(flags, flags + done_.bytes, [](uint8_t flag) { return flag != 0; });
      if (done || count == n || sequence == lanes_[lane].newest) {
        slot = (lane * s.lane_capacity + time) * s.envs + env;
        return count;
      }
      ++sequence, time = time + 1 == s.lane_capacity ? 0 : time + 1;
    }
  }
  // Whether all rows that were read are whole.
  bool is_whole() const {
    Lanes::Protocol::after_reading();
    const Epoch now = store_.lanes.epoch();
    for (uint64_t l = 0; l < lanes_.size(); ++l)
      if (lanes_[l].any && store_.lanes.first_now(l) > oldest_[l]) return false;
    return epoch_ == now && epoch_.quiet() && epoch_.incarnation % 2 == 0;
  }

 private:
  // Apart from the loop, which is tight.
  [[gnu::noinline]] bool cast_reward(const uint8_t* row, float* to) const {
    return cast_numbers(reward_.dtype, row + reward_.offset, {kDLFloat, 32}, reinterpret_cast<uint8_t*>(to), 1);
  }

  const Store& store_;
  const Leaf &reward_, &done_;
  bool is_float_;  // the reward
  Epoch epoch_;
  std::vector<SlotSequences> lanes_;
  std::vector<uint64_t> oldest_;  // of the rows that were read, in each lane
};

// Of the rows in slots [n]: their rewards and those of the steps that follow, float32 [n, steps], 0 behind the last; the slot of
// the last, int64 [n], and their number, int64 [n]; the sum of the rewards times `discounts`, and the discount of what comes after
// the last, float32 [n, 1]. `discounts`: float32 [steps + 1]. None: a slot holds no row, or rows were overwritten meanwhile.
inline nb::object read_n_steps(Store& store, const Codec& codec, nb::handle slots_in,
                               nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu> discounts, size_t reward_leaf,
                               size_t done_leaf, bool mapped) {
  check_codec(store, codec);
  const SlotsArg slots(nb::borrow(slots_in));
  const Leaf &reward = leaf_of(codec, reward_leaf), &done = leaf_of(codec, done_leaf);
  for (const Leaf* leaf : {&reward, &done})
    if (leaf->offset + leaf->bytes > store.geometry().payload_bytes) throw nb::value_error("rewards and flags lie in the rows themselves");
  if (reward.bytes != reward.itemsize) throw nb::value_error("a reward must be one number");
  if (!(done.dtype == DType{kDLBool, 8})) throw nb::value_error("a bool leaf is needed to say where episodes end");
  if (discounts.shape(0) < 2) throw nb::value_error("discounts are needed for each step, and for what comes after the last");
  const size_t n = slots.n, steps = discounts.shape(0) - 1;
  const std::vector<int64_t> lead(1, static_cast<int64_t>(n)), scalar, one(1, 1), row(1, static_cast<int64_t>(steps));
  if (steps > kMostBytes / sizeof(float) / std::max<size_t>(1, n)) throw std::bad_alloc();
  LeafMemory memory(5);
  memory.plan({kDLFloat, 32}, lead, row, n * steps * sizeof(float));
  memory.plan({kDLInt, 64}, lead, scalar, n * 8);
  memory.plan({kDLInt, 64}, lead, scalar, n * 8);
  memory.plan({kDLFloat, 32}, lead, one, n * sizeof(float));
  memory.plan({kDLFloat, 32}, lead, one, n * sizeof(float));
  memory.take();
  auto* const rewards = reinterpret_cast<float*>(memory.data(0));
  auto* const last = reinterpret_cast<int64_t*>(memory.data(1));
  auto* const counts = reinterpret_cast<int64_t*>(memory.data(2));
  auto* const returns = reinterpret_cast<float*>(memory.data(3));
  auto* const discount = reinterpret_cast<float*>(memory.data(4));
  std::vector<float> products(steps);
  bool inside = true, whole = true;
  // Rows that grow may move while another thread runs.
  const bool release = !store.grows() && (memory.bytes() > kGilBytes || (mapped && store.readahead().on()));
  maybe_without_gil(release, [&] {
    StepWalk walk(store, reward, done);
    for (size_t i = 0; i < n && inside && whole; ++i) {
      auto slot = static_cast<uint64_t>(slots.data[i]);
      if (!(inside = slot < store.slots())) break;
      float* const mine = rewards + i * steps;
      const size_t count = walk.read(slot, steps, mine);
      whole = count > 0;
      std::fill(mine + count, mine + steps, 0.0F);
      last[i] = static_cast<int64_t>(slot), counts[i] = static_cast<int64_t>(count), discount[i] = discounts.data()[count];
      for (size_t k = 0; k < steps; ++k) products[k] = mine[k] * discounts.data()[k];
      returns[i] = numpy_sum(products.data(), steps);
    }
    whole = whole && walk.is_whole();
  });
  if (!inside) refuse_slots(store);
  if (!whole) return nb::none();
  nb::list made;
  for (size_t i = 0; i < 5; ++i) made.append(memory.make(i));
  return nb::tuple(made);
}

}  // namespace engram
