// How many rows are drawn for each row written: a bound that all users of a store keep, whoever set it.
//
// With I rows written and S rows drawn since the counts began, and `min_size` rows that must be stored first, a store has
// D = samples_per_insert * (I - min_size) - S draws to give. Samplers wait until min_size rows are stored and D - n >= -ahead for the
// n rows that they want; producers wait while min_size rows are stored and D > behind. (Reverb's rule, Cassirer et al. 2021, whose
// `error_buffer` is both.) What holds, whoever is killed when:
//
//   1. S <= samples_per_insert * (I - min_size) + ahead at every moment: draws are counted before the rows are read, in one step with
//      the look whether they may be, so that of several samplers none sees room that another one takes. A kill in between leaves
//      draws counted that nobody got: fewer are drawn then, never more. (distributed over tests/data/test_rate_limits.py)
//   2. Producers look before they write and count nothing: together they are over the bound by one write each.
//   3. Nobody stands for ever while the others go on: n <= ahead + behind is asked for by who samples (`raise_to`, or an error),
//      no producer waits while fewer than min_size rows are stored, and a sampler that waits for a batch of its own lets more be
//      written (`let_write`), where nobody said how far it may be behind.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "lanes.hpp"

namespace engram {

struct RateLimit {
  double samples_per_insert = 1, min_size = 1, ahead = 0, behind = 0;
  bool widens = false;  // for larger batches: nobody gave `ahead` and `behind`
};

class RateLimiter {
 public:
  // `writes`: false where the memory is mapped for reading only.
  explicit RateLimiter(const Lanes& lanes, bool writes = true) : lanes_(lanes), flow_(lanes.flow()), writes_(writes) {}

  RateLimit limit() const {
    return {word(0), word(1), word(2), word(3), (flow_.mode.load(std::memory_order_acquire) & FlowMode::kWidens) != 0};
  }
  // Sets another bound, from which on the counts begin anew. The caller keeps others out that would set one.
  void set(const RateLimit& limit) const {
    clear();
    const double words[] = {limit.samples_per_insert, limit.min_size, limit.ahead, limit.behind};
    for (size_t i = 0; i < 4; ++i) flow_.limiter[i].store(std::bit_cast<uint64_t>(words[i]), std::memory_order_relaxed);
    lanes_.count_anew();
    base();  // now, so that rows count that are written before anybody looks
    flow_.in_use.fetch_or(kLimitsRate, std::memory_order_relaxed);
    flow_.mode.store(FlowMode::kLimits | (limit.widens ? FlowMode::kWidens : 0), std::memory_order_release);
  }
  void clear() const { flow_.mode.store(0, std::memory_order_release); }

  // Lets batches of n rows be drawn, if nobody said how far samplers may be ahead; false: they never can be.
  bool raise_to(uint64_t n) const {
    if (flow_.mode.load(std::memory_order_acquire) & FlowMode::kWidens)
      for (size_t i : {2, 3}) raise(flow_.limiter[i], static_cast<double>(n));
    return static_cast<double>(n) <= word(2) + word(3);
  }
  // Lets more be written for samplers that have no batch among what is stored, if nobody said how far they may be behind.
  void let_write() const {
    if (flow_.mode.load(std::memory_order_acquire) & FlowMode::kWidens && !may_insert()) raise(flow_.limiter[3], budget());
  }
  // Counts n rows as drawn; false: there are not so many draws to give, and nothing was counted.
  bool take(uint64_t n) const {
    if (static_cast<double>(n) > word(2) && !raise_to(n)) return false;
    if (static_cast<double>(stored()) < word(1)) return false;
    for (uint64_t drawn = samples();;) {
      if (budget(drawn) - static_cast<double>(n) < -word(2)) return false;
      if (flow_.samples.compare_exchange_weak(drawn, drawn + n, std::memory_order_acq_rel)) return true;
    }
  }
  // Of draws that were counted, and gave no batch.
  void give_back(uint64_t n) const {
    uint64_t drawn = samples();
    while (!flow_.samples.compare_exchange_weak(drawn, drawn - std::min(n, drawn))) {
    }
  }
  // Whether producers may write.
  bool may_insert() const { return budget(samples()) <= word(3) || static_cast<double>(stored()) < word(1); }

  // Rows written, and drawn, since the counts began.
  uint64_t inserts() const { return written() - base(); }
  uint64_t samples() const { return flow_.samples.load(std::memory_order_acquire); }
  // Continues with the counts of a save.
  void restore(uint64_t inserts, uint64_t samples) const {
    flow_.samples.store(samples);  // first: who looks in between has fewer to give
    flow_.inserts_base.store(written() - inserts);
  }
  // Rows that can be drawn.
  uint64_t stored() const {
    const uint64_t rows = lanes_.rows() * lanes_.envs(), removed = lanes_.removed_rows();
    return rows - std::min(rows, removed);
  }
  // Draws that there are to give; negative: samplers are ahead.
  double budget() const { return budget(samples()); }

 private:
  double word(size_t i) const { return std::bit_cast<double>(flow_.limiter[i].load(std::memory_order_relaxed)); }
  static void raise(Counter& word, double to) {
    uint64_t bits = word.load(std::memory_order_relaxed);
    while (std::bit_cast<double>(bits) < to &&
           !word.compare_exchange_weak(bits, std::bit_cast<uint64_t>(to), std::memory_order_relaxed)) {
    }
  }
  uint64_t written() const { return lanes_.write_count() * lanes_.envs(); }
  double budget(uint64_t drawn) const {
    return word(0) * (static_cast<double>(static_cast<int64_t>(inserts())) - word(1)) - static_cast<double>(drawn);
  }
  // Where the counts begin anew, they do so without a debt of either side: as if what is stored had been drawn from as often as it
  // may be. Of several that find out, one decides.
  uint64_t base() const {
    uint64_t base = flow_.inserts_base.load(std::memory_order_acquire);
    if (base != kCountsAnew) return base;
    const double had = std::min(static_cast<double>(stored()), std::max(0.0, word(1)));
    const uint64_t mine = written() - static_cast<uint64_t>(had);
    return !writes_ || flow_.inserts_base.compare_exchange_strong(base, mine, std::memory_order_acq_rel) ? mine : base;
  }

  const Lanes& lanes_;
  Flow& flow_;
  bool writes_;
};

// Whether who writes has to wait first for those who sample.
inline bool must_wait(const Lanes& lanes) { return lanes.is_limited() && !RateLimiter(lanes).may_insert(); }

}  // namespace engram
