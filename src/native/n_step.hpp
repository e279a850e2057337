// The steps that follow on a row in its episode, as returns over several steps are made of them.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bind_store.hpp"

namespace engram {

// The slots of the rows that follow on each of n, at most `steps` with the first one; behind a lane's newest row it is repeated.
struct FollowingSlots {
  std::vector<int64_t> slots;
  std::vector<int64_t> sequences;  // that these rows have
  std::vector<size_t> counts;      // of each of n: how many of `steps` are other rows

  // False: a slot holds no row.
  bool find(const Store& store, const int64_t* first, size_t n, size_t steps) {
    const StoreGeometry& s = store.geometry();
    std::vector<SlotSequences> lanes;
    for (uint64_t l = 0; l < s.lanes; ++l) lanes.emplace_back(store.lanes.view(l), s.lane_capacity);
    slots.clear(), sequences.clear(), counts.clear();
    slots.reserve(n * steps), sequences.reserve(n * steps), counts.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      const auto slot = static_cast<uint64_t>(first[i]);
      if (slot >= store.slots()) refuse_slots(store);
      uint64_t time = slot, env = 0, lane = 0, sequence = 0;
      if (s.envs > 1) time = slot / s.envs, env = slot - time * s.envs;
      if (s.lanes > 1) lane = time / s.lane_capacity, time -= lane * s.lane_capacity;
      if (!lanes[lane].find(time, sequence)) return false;
      const uint64_t count = std::min<uint64_t>(steps, lanes[lane].newest - sequence + 1);
      counts.push_back(count);
      for (size_t k = 0; k < steps; ++k) {
        slots.push_back(static_cast<int64_t>((lane * s.lane_capacity + time) * s.envs + env));
        sequences.push_back(static_cast<int64_t>(sequence));
        if (k + 1 < count) ++sequence, time = time + 1 == s.lane_capacity ? 0 : time + 1;
      }
    }
    return true;
  }
};

// Reads the numbers of one leaf in the rows that follow on each of n slots, up to `steps` of them: to the first with a flag in the
// bool leaf `over`, or to the lane's newest. Returns the numbers [n, steps], 0 behind the last; the slot of the last; and how many
// they are. None: a slot holds no row, or rows were overwritten meanwhile.
inline nb::object read_following(Store& store, const Codec& codec, nb::handle slots_in, size_t steps, size_t numbers,
                                 size_t over, bool mapped) {
  check_codec(store, codec);
  const SlotsArg first(nb::borrow(slots_in));
  const Leaf &number = leaf_of(codec, numbers), &flag = leaf_of(codec, over);
  if (number.bytes != number.itemsize) throw nb::value_error("a leaf of one number is needed");
  if (!(flag.dtype == DType{kDLBool, 8})) throw nb::value_error("a bool leaf is needed to say where episodes end");
  if (steps < 1) throw nb::value_error("at least one step is needed");
  const size_t n = first.n, most = kMostBytes / (8 + number.bytes + flag.bytes);
  if (n > most || steps > most / std::max<size_t>(1, n)) throw std::bad_alloc();
  FollowingSlots following;
  if (!following.find(store, first.data, n, steps)) return nb::none();
  std::vector<uint8_t> flags(n * steps * flag.bytes);
  const std::vector<int64_t> scalar, lead{static_cast<int64_t>(n)}, matrix{static_cast<int64_t>(n), static_cast<int64_t>(steps)};
  LeafMemory memory(3);
  memory.plan(number.dtype, matrix, scalar, n * steps * number.bytes);
  memory.plan({kDLInt, 64}, lead, scalar, n * 8);
  memory.plan({kDLInt, 64}, lead, scalar, n * 8);
  memory.take();
  std::vector<LeafCopy> copies{{number.offset, number.bytes, memory.data(0), static_cast<ptrdiff_t>(number.bytes)},
                               {flag.offset, flag.bytes, flags.data(), static_cast<ptrdiff_t>(flag.bytes)}};
  if (copies[1].offset < copies[0].offset) std::swap(copies[0], copies[1]);
  Reading reading;
  const bool release = !store.grows() && (memory.bytes() > kGilBytes || (mapped && store.readahead().on()));
  maybe_without_gil(release, [&] {
    read_rows(store, following.slots.data(), following.slots.size(), copies, mapped, true, reading);
  });
  const std::vector<uint64_t>& read = reading.result.sequences;
  const bool same = reading.inside && std::equal(read.begin(), read.end(), following.sequences.begin(), following.sequences.end(),
                                                 [](uint64_t a, int64_t b) { return a == static_cast<uint64_t>(b); });
  if (!same || !reading.result.missing.empty() || !reading.result.unwritten.empty()) return nb::none();
  auto* const last = reinterpret_cast<int64_t*>(memory.data(1));
  auto* const counts = reinterpret_cast<int64_t*>(memory.data(2));
  for (size_t i = 0; i < n; ++i) {
    size_t count = 1;
    const auto is_over = [&](size_t k) {
      const uint8_t* const of = flags.data() + (i * steps + k) * flag.bytes;
      return std::any_of(of, of + flag.bytes, [](uint8_t one) { return one != 0; });
    };
    while (count < following.counts[i] && !is_over(count - 1)) ++count;
    std::memset(memory.data(0) + (i * steps + count) * number.bytes, 0, (steps - count) * number.bytes);
    last[i] = following.slots[i * steps + count - 1], counts[i] = static_cast<int64_t>(count);
  }
  const nb::object made = memory.make(0), last_slots = memory.make(1);
  return nb::make_tuple(made, last_slots, memory.make(2));
}

inline void bind_n_step(nb::module_& m) {
  using namespace nb::literals;
  m.def("read_following", &read_following, "store"_a, "codec"_a, "slots"_a, "steps"_a, "numbers"_a, "over"_a, "mapped"_a = false,
        nb::sig("def read_following(store: Store, codec: Codec, slots: object, steps: int, numbers: int, over: int, "
                "mapped: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None"));
}

}  // namespace engram
