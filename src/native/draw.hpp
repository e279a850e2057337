// Which slots to read: uniform draws, and permutations that need no memory.
#pragma once
#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "lanes.hpp"
#include "wide_vectors.hpp"

namespace engram {

// SplitMix64 (Steele, Lea and Flood, 2014), as a function of a counter.
inline uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// The seed of a draw at this rank, 63 bits: others than at rank 0, whose own it is.
inline uint64_t seed_of_rank(uint64_t seed, uint64_t rank) { return rank ? mix64(seed ^ mix64(rank)) >> 1 : seed; }

// Counter-based random numbers: the n-th one of a key does not depend on the numbers drawn before.
struct CounterGenerator {
  uint64_t key = 0, counter = 0;
  uint64_t next() { return mix64(key + mix64(counter++)); }
};
inline uint64_t below(uint64_t random, uint64_t n) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(random) * n) >> 64);
}

constexpr size_t kFewLanes = 16;  // looking at this many one by one is as quick as a search

// The rows of all lanes at one moment, and the slot of the i-th of them.
class RowMap {
 public:
  explicit RowMap(const Lanes& lanes) : capacity_(lanes.capacity()), envs_(lanes.envs()) {
    parts_.reserve(lanes.count());
    for (uint64_t l = 0; l < lanes.count(); ++l) {
      const LaneView v = lanes.view(l);
      add(v.first, v.rows());
    }
  }
  RowMap(uint64_t capacity, uint64_t envs) : capacity_(capacity), envs_(envs) {}
  void add(uint64_t first, uint64_t rows) {
    parts_.push_back({first, rows, rows ? first % capacity_ : 0, total_ / envs_});
    total_ += rows * envs_;
  }
  uint64_t total() const { return total_; }
  // In the order of age, oldest first, lane after lane.
  int64_t by_age(uint64_t i) const {
    uint64_t time = i, env = 0;
    if (envs_ > 1) time = i / envs_, env = i - time * envs_;
    const uint64_t lane = lane_of(time);
    uint64_t slot = parts_[lane].first_slot + time;
    if (slot >= capacity_) slot -= capacity_;
    return static_cast<int64_t>((lane * capacity_ + slot) * envs_ + env);
  }
  // In the order of slots, lane after lane; also gives the row's lane and sequence.
  int64_t by_slot(uint64_t i, uint64_t& lane, uint64_t& sequence) const {
    uint64_t time = i, env = 0;
    if (envs_ > 1) time = i / envs_, env = i - time * envs_;
    lane = lane_of(time);
    const Part& p = parts_[lane];
    const uint64_t before_wrap = std::min(p.rows, capacity_ - p.first_slot);  // rows from `first` to the ring's end
    const uint64_t wrapped = p.rows - before_wrap;
    sequence = p.first + (time < wrapped ? before_wrap + time : time - wrapped);
    const uint64_t slot = time < wrapped ? time : p.first_slot + (time - wrapped);
    return static_cast<int64_t>((lane * capacity_ + slot) * envs_ + env);
  }
  // Whether all rows lie in one ring.
  bool is_one_ring() const { return envs_ == 1 && parts_.size() == 1; }
  // As `by_slot` of n numbers, for rows in one ring.
  void slots_in_ring(const uint64_t* numbers, size_t n, int64_t* out) const {
    const Part& p = parts_[0];
    const uint64_t before_wrap = std::min(p.rows, capacity_ - p.first_slot), wrapped = p.rows - before_wrap;
    for (size_t i = 0; i < n; ++i)
      out[i] = static_cast<int64_t>(numbers[i] < wrapped ? numbers[i] : p.first_slot + (numbers[i] - wrapped));
  }

 private:
  struct Part {
    uint64_t first, rows, first_slot, before;  // `before`: rows of the lanes before it
  };
  // Returns the lane of a row; changes the row's number to the one within that lane.
  uint64_t lane_of(uint64_t& time) const {
    uint64_t lane = 0;
    if (parts_.size() > kFewLanes) {  // too many to look at one by one
      const auto behind = std::upper_bound(parts_.begin(), parts_.end(), time,
                                           [](uint64_t row, const Part& part) { return row < part.before; });
      lane = static_cast<uint64_t>(behind - parts_.begin()) - 1;  // the last of those with this sum: it has rows
      time -= parts_[lane].before;
    }
    while (time >= parts_[lane].rows) time -= parts_[lane++].rows;
    return lane;
  }
  uint64_t capacity_, envs_, total_ = 0;
  std::vector<Part> parts_;
};

// n numbers in [0, total); only rounding gives `total` itself.
ENGRAM_WIDE_VECTORS inline void draw_parts(uint64_t seed, double total, double* out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint64_t random = mix64(seed + i * 0x9E3779B97F4A7C15ull);
    out[i] = static_cast<double>(static_cast<int64_t>(random >> 11)) * 0x1p-53 * total;
  }
}
struct CounterOf {
  uint64_t seed, drawn = 0;
  uint64_t next() { return mix64(seed + drawn++ * 0x9E3779B97F4A7C15ull); }
};
// Draws slots of all lanes, and keeps those that hold a row: it looks at the lane of each drawn slot, not at all lanes. Returns
// how many of n rows it has drawn; fewer than n if less than half of the slots hold rows, because the sums of all lanes are
// quicker then. That decision depends on how many slots were hit, not on which, so each row is as likely either way.
inline size_t draw_by_rejection(const Lanes& lanes, CounterOf& random, int64_t* out, size_t n) {
  constexpr size_t kFirst = 16;  // slots that are drawn in any case
  const uint64_t capacity = lanes.capacity(), envs = lanes.envs(), slots = lanes.count() * capacity * envs;
  size_t hit = 0;
  for (size_t drawn = 0; hit < n && (drawn < kFirst || 2 * hit >= drawn); ++drawn) {
    const uint64_t slot = below(random.next(), slots), time = envs == 1 ? slot : slot / envs, lane = time / capacity;
    const LaneView view = lanes.view(lane);
    if (view.rows() == 0) continue;
    const uint64_t at = time - lane * capacity, first = view.first % capacity;
    if (at - first + (at < first ? capacity : 0) < view.rows()) out[hit++] = static_cast<int64_t>(slot);
  }
  return hit;
}
// The slots of all rows that are left beside removed ones.
inline std::vector<int64_t> slots_left(const Lanes& lanes) {
  std::vector<int64_t> left;
  const uint64_t capacity = lanes.capacity(), envs = lanes.envs();
  for (uint64_t l = 0; l < lanes.count(); ++l) {
    const LaneView v = lanes.view(l);
    const RemovedRows<StdMemory> removed = lanes.removed(l);
    const auto rows_of = [&](uint64_t bit, uint64_t end) {  // a word of bits at a time: most rows are removed
      while (bit < end) {
        const uint64_t take = std::min(end - bit, 64 - bit % 64);
        const uint64_t word = bit < removed.end ? StdMemory::load(removed.bits[bit / 64]) >> bit % 64 : 0;
        for (uint64_t set = ~word & (take == 64 ? ~uint64_t{0} : (uint64_t{1} << take) - 1); set; set &= set - 1)
          left.push_back(static_cast<int64_t>(l * capacity * envs + bit + static_cast<uint64_t>(__builtin_ctzll(set))));
        bit += take;
      }
    };
    const uint64_t rows = v.rows(), first = rows ? v.first % capacity : 0, behind = std::min(rows, capacity - first);
    rows_of(first * envs, (first + behind) * envs);
    rows_of(0, (rows - behind) * envs);
  }
  return left;
}
// As `draw_uniform`, where rows have been removed: draws again where it hits one, or lists the rest where that is less work. Which
// of them it does depends on how many rows are left, and not on which.
inline bool draw_uniform_left(const Lanes& lanes, uint64_t seed, int64_t* out, size_t n) {
  const RowMap map(lanes);
  const uint64_t total = map.total(), left = total - std::min(total, lanes.removed_rows());
  CounterOf random{seed};
  size_t done = 0;
  const double tries = static_cast<double>(n) * static_cast<double>(total) / static_cast<double>(std::max<uint64_t>(1, left));
  const double listing = static_cast<double>(total) / 32 + static_cast<double>(left);
  if (left > 0 && tries <= listing) {
    auto most = static_cast<uint64_t>(64 + 16 * tries);
    if (map.is_one_ring()) {  // as below, without looking up the lane of each row
      const RemovedRows<StdMemory> removed = lanes.removed(0);
      const auto first = static_cast<uint64_t>(map.by_age(0)), capacity = lanes.capacity();
      for (; done < n && most > 0; --most) {
        uint64_t slot = first + below(random.next(), total);
        slot -= slot < capacity ? 0 : capacity;
        out[done] = static_cast<int64_t>(slot), done += !removed.has(slot);
      }
    }
    for (; done < n && most > 0; --most) {
      const int64_t slot = map.by_age(below(random.next(), total));
      if (!lanes.is_removed(static_cast<uint64_t>(slot))) out[done++] = slot;
    }
  }
  if (done == n && total > 0) return true;
  const std::vector<int64_t> rest = slots_left(lanes);
  for (; done < n && !rest.empty(); ++done) out[done] = rest[below(random.next(), rest.size())];
  return done == n && !rest.empty();
}
// The slots of all rows of any length, lane after lane, the oldest first.
inline std::vector<int64_t> heads_of(const Lanes& lanes) {
  std::vector<int64_t> slots;
  for (uint64_t l = 0; l < lanes.count(); ++l) {
    const Lanes::Protocol lane = lanes.protocol(l);
    const LaneView v = lane.look();
    const std::vector<uint64_t> heads = lane.seams_of(v.first, v.published);
    Lanes::Protocol::after_reading();
    const uint64_t first = lanes.first_now(l);
    for (uint64_t w : heads)
      if (w >= first) slots.push_back(static_cast<int64_t>(l * lanes.capacity() + w % lanes.capacity()));
  }
  return slots;
}

// As `draw_uniform`, of rows of any length: pages by chance until a row begins in one, which are as many as a row has; where listing the
// rows is less work, some of the list. Which of them it does depends on how many pages were hit, and not on which.
inline bool draw_heads(const Lanes& lanes, uint64_t seed, int64_t* out, size_t n) {
  const RowMap map(lanes);
  const uint64_t pages = map.total();
  const bool some_removed = lanes.some_removed();
  const auto is_row = [&](int64_t slot) {
    return lanes.is_head(static_cast<uint64_t>(slot)) && !(some_removed && lanes.is_removed(static_cast<uint64_t>(slot)));
  };
  CounterOf random{seed};
  size_t done = 0;
  for (uint64_t looks = 64 + pages / 32; pages > 0 && done < n && looks > 0; --looks) {
    const int64_t slot = map.by_age(below(random.next(), pages));
    if (is_row(slot)) out[done++] = slot;
  }
  if (done == n) return pages > 0;
  std::vector<int64_t> rows = heads_of(lanes);
  if (some_removed) std::erase_if(rows, [&](int64_t slot) { return !is_row(slot); });
  for (; done < n && !rows.empty(); ++done) out[done] = rows[below(random.next(), rows.size())];
  return done == n;
}
inline bool draw_uniform(const Lanes& lanes, uint64_t seed, int64_t* out, size_t n) {
  if (lanes.is_ragged()) return draw_heads(lanes, seed, out, n);
  if (lanes.some_removed()) return draw_uniform_left(lanes, seed, out, n);
  if (lanes.count() == 1 && lanes.envs() == 1) {  // as below, without looking up the lane of each row
    const LaneView view = lanes.view(0);
    const uint64_t rows = view.rows(), capacity = lanes.capacity(), first = rows ? view.first % capacity : 0;
    for (size_t i = 0; rows && i < n; ++i) {
      const uint64_t slot = first + below(mix64(seed + i * 0x9E3779B97F4A7C15ull), rows);
      out[i] = static_cast<int64_t>(slot < capacity ? slot : slot - capacity);
    }
    return rows > 0;
  }
  CounterOf random{seed};
  const size_t hit = lanes.count() > kFewLanes ? draw_by_rejection(lanes, random, out, n) : 0;
  if (hit == n) return n > 0 || lanes.rows() > 0;
  const RowMap map(lanes);
  if (map.total() == 0) return false;
  for (size_t i = hit; i < n; ++i) out[i] = map.by_age(below(random.next(), map.total()));
  return true;
}

// A pseudorandom permutation of 0..n-1 from a key. Small ones are shuffled (Fisher and Yates); large ones are a
// Feistel network over the next power of two, walked until it lands inside (Black and Rogaway, 2002): O(1) memory.
class Permutation {
 public:
  static constexpr uint64_t kShuffled = 1 << 16;
  static constexpr int kTabledBits = 12;  // halves of so many bits: 2^24 numbers, whose tables have 64 KB
  Permutation(uint64_t key, uint64_t n, bool shuffle) : key_(key), n_(n), shuffle_(shuffle) {
    if (!shuffle || n == 0) return;
    if (n <= kShuffled) {
      order_.resize(n);
      std::iota(order_.begin(), order_.end(), 0u);
      for (uint64_t i = n - 1; i > 0; --i) std::swap(order_[i], order_[below(mix64(key ^ mix64(i)), i + 1)]);
      return;
    }
    const int bits = 64 - std::countl_zero(n - 1);
    left_bits_ = bits / 2, right_bits_ = bits - left_bits_;
    if (right_bits_ <= kTabledBits) tabulate();
  }
  uint64_t size() const { return n_; }
  uint64_t at(uint64_t i) const {
    if (!shuffle_) return i;
    if (!order_.empty()) return order_[i];
    do i = cipher(i);
    while (i >= n_);
    return i;
  }
  static constexpr size_t kBlock = 64;
  // The numbers at m <= kBlock positions from `from` on, as `at` gives them. All numbers go through each round together,
  // because the rounds of one number wait for one another, and those of different numbers do not.
  void at(uint64_t from, uint64_t* out, size_t m) const {
    if (!shuffle_ || !order_.empty()) {
      for (size_t i = 0; i < m; ++i) out[i] = shuffle_ ? order_[from + i] : from + i;
      return;
    }
    for (size_t i = 0; i < m; ++i) out[i] = from + i;
    encipher(out, m);
    uint64_t outside[kBlock];
    size_t place[kBlock];
    for (;;) {
      size_t left = 0;
      for (size_t i = 0; i < m; ++i) {  // without a branch, which could not be predicted
        outside[left] = out[i], place[left] = i;
        left += out[i] >= n_;
      }
      if (left == 0) return;
      encipher(outside, left);
      for (size_t i = 0; i < left; ++i) out[place[i]] = outside[i];
    }
  }

 private:
  uint64_t cipher(uint64_t x) const {
    int a = left_bits_, b = right_bits_;
    uint64_t left = x >> b, right = x & ((uint64_t{1} << b) - 1);
    for (uint64_t round = 0; round < 8; ++round) {  // even, so that the widths end where they began
      const uint64_t next = left ^ (mix64(key_ + round * 0xD1B54A32D192ED03ull + mix64(right)) & ((uint64_t{1} << a) - 1));
      left = right, right = next;
      std::swap(a, b);
    }
    return (left << right_bits_) | right;
  }
  // Tabulates the output of each round of `cipher` for each right half.
  void tabulate() {
    tables_.resize(size_t{8} << right_bits_);
    uint16_t* out = tables_.data();
    for (uint64_t round = 0; round < 8; ++round, out += size_t{1} << right_bits_) {
      const int in_bits = round % 2 == 0 ? right_bits_ : left_bits_, out_bits = left_bits_ + right_bits_ - in_bits;
      const uint64_t key = key_ + round * 0xD1B54A32D192ED03ull, mask = (uint64_t{1} << out_bits) - 1;
      for (uint64_t right = 0; right < uint64_t{1} << in_bits; ++right)
        out[right] = static_cast<uint16_t>(mix64(key + mix64(right)) & mask);
    }
  }
  void encipher_by_tables(uint64_t* x, size_t m) const {
    const int b = right_bits_;
    const uint64_t mask = (uint64_t{1} << b) - 1;
    const uint16_t* of[8];
    for (size_t round = 0; round < 8; ++round) of[round] = tables_.data() + (round << b);
    // Without a loop over the rounds the processor works on several numbers at a time.
    const uint16_t *t0 = of[0], *t1 = of[1], *t2 = of[2], *t3 = of[3], *t4 = of[4], *t5 = of[5], *t6 = of[6], *t7 = of[7];
    for (size_t i = 0; i < m; ++i) {
      uint64_t left = x[i] >> b, right = x[i] & mask;
      left ^= t0[right], right ^= t1[left], left ^= t2[right], right ^= t3[left];
      left ^= t4[right], right ^= t5[left], left ^= t6[right], right ^= t7[left];
      x[i] = (left << b) | right;
    }
  }
  // `cipher` of m <= kBlock numbers, in place.
  void encipher(uint64_t* x, size_t m) const { tables_.empty() ? encipher_by_rounds(x, m) : encipher_by_tables(x, m); }
  ENGRAM_WIDE_VECTORS void encipher_by_rounds(uint64_t* x, size_t m) const {
    uint64_t left[kBlock], right[kBlock];
    int a = left_bits_, b = right_bits_;
    for (size_t i = 0; i < m; ++i) left[i] = x[i] >> b, right[i] = x[i] & ((uint64_t{1} << b) - 1);
    for (uint64_t round = 0; round < 8; ++round) {
      const uint64_t key = key_ + round * 0xD1B54A32D192ED03ull, mask = (uint64_t{1} << a) - 1;
      for (size_t i = 0; i < m; ++i) {
        const uint64_t next = left[i] ^ (mix64(key + mix64(right[i])) & mask);
        left[i] = right[i], right[i] = next;
      }
      std::swap(a, b);
    }
    for (size_t i = 0; i < m; ++i) x[i] = (left[i] << right_bits_) | right[i];
  }
  uint64_t key_, n_;
  bool shuffle_;
  int left_bits_ = 0, right_bits_ = 0;
  std::vector<uint32_t> order_;
  std::vector<uint16_t> tables_;
};

}  // namespace engram
