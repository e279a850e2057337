// The border between two batches: whether the first new step continues the newest stored one.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "leaf_source.hpp"
#include "store.hpp"

namespace engram {

// The `next` entries of a step hold the observation that follows it. If the newest stored step is not done, and the first new
// step differs from them, steps of another source begin: a seam, regardless of the ids. If it is done and both steps have the
// same trajectory id, two sources used the same ids: also a seam.
//
// An entry that exists at the root and under `next` is evidence only if it agreed between the last two steps of one
// trajectory: in n-step rows, and where a transform changes one side only, it never agrees.
class BorderCheck {
 public:
  explicit BorderCheck(const Store& store) : store_(store), rule_(store.border()) {}

  // Whether the rule applies to leaves of these sizes: there is no rule, or it was made for them.
  bool fits(const std::vector<LeafSource>& leaves) const {
    const BorderRule& rule = rule_;
    if (rule.leaves != leaves.size()) return rule.leaves == 0;
    auto has = [&](size_t leaf, uint64_t bytes) { return leaf < leaves.size() && leaves[leaf].bytes == bytes; };
    auto has_flag = [&](const BorderRule::Flag& flag) { return has(flag.leaf, flag.bytes); };
    return std::all_of(rule.entries.begin(), rule.entries.end(),
                       [&](const BorderRule::Entry& e) { return has(e.leaf, e.bytes) && has(e.next_leaf, e.bytes); }) &&
           std::all_of(rule.done.begin(), rule.done.end(), has_flag) && (!rule.id || has_flag(*rule.id));
  }
  // Whether a trajectory begins at the first of n new steps.
  bool begins(uint64_t lane, uint64_t n, const std::vector<LeafSource>& leaves) const {
    const BorderRule& rule = rule_;
    if (rule.leaves != leaves.size()) return false;  // no rule was set
    const LaneView view = store_.lanes.view(lane);
    if (view.rows() == 0) return false;
    const uint64_t envs = store_.geometry().envs;
    uint64_t differs = 0;
    for (uint64_t env = 0; env < envs; ++env) {
      const uint8_t* newest = row(lane, env, view.published - 1);
      const auto [any, all] = done(newest);
      if (any) {
        if (all && rule.id && same(newest + rule.id->offset, leaves[rule.id->leaf].at(0, env), rule.id->bytes)) return true;
        continue;
      }
      for (size_t k = 0; k < rule.entries.size(); ++k) {
        const BorderRule::Entry& e = rule.entries[k];
        const uint8_t* const x = leaves[e.leaf].at(0, env);
        const bool agrees = e.is_observed ? follows(lane, env, view.published - 1, e.key, x) : same(newest + e.next_offset, x, e.bytes);
        if (!agrees) differs |= uint64_t{1} << k;
      }
    }
    return differs && (differs & evidence(lane, n, leaves)) != 0;
  }
  // Looks which entries agreed between the last two steps of one trajectory in a lane: a bit for each, and kBorderKnown if there
  // are two such steps. The lane's header keeps the result, which outlives these steps. The caller is the lane's writer.
  uint64_t look(uint64_t lane) const {
    const LaneView view = store_.lanes.view(lane);
    LaneHeader& header = store_.lanes.lane(lane);
    if (rule_.leaves == 0 || view.rows() == 0) return header.border_agreed.load(std::memory_order_relaxed);
    const uint64_t newest = view.published - 1, floor = newest > kLookBack ? newest - kLookBack : 0;
    const uint64_t looked = header.border_looked.load(std::memory_order_relaxed);
    for (uint64_t k = newest; k > std::max({view.first, looked, floor}); --k) {
      if (store_.seam(lane, k)) continue;
      Agreed agreed;
      for (uint64_t env = 0; env < store_.geometry().envs; ++env) {
        const uint8_t* before = row(lane, env, k - 1);
        const uint8_t* after = row(lane, env, k);
        if (!done(before).first && !other_ids(before, after)) agreed.add(agreeing(lane, env, k - 1, before, after));
      }
      if (!agreed.any) continue;
      header.border_agreed.store(agreed.entries | kBorderKnown, std::memory_order_relaxed);
      break;
    }
    header.border_looked.store(newest, std::memory_order_relaxed);
    return header.border_agreed.load(std::memory_order_relaxed);
  }

 private:
  static constexpr uint64_t kLookBack = 4096;  // rows in which two consecutive steps of one trajectory are searched

  const uint8_t* row(uint64_t lane, uint64_t env, uint64_t sequence) const {
    return store_.row(store_.physical(lane, env, sequence % store_.geometry().lane_capacity));
  }
  static bool same(const uint8_t* a, const uint8_t* b, size_t bytes) { return std::memcmp(a, b, bytes) == 0; }
  // Whether next.X of row w, which is stored once, is X of a new step.
  [[gnu::noinline]] bool follows(uint64_t lane, uint64_t env, uint64_t w, size_t key, const uint8_t* x) const {
    return store_.observations()->has_bytes(store_.lanes.protocol(lane), lane, env, w, {key, true}, x);
  }
  // Whether next.X of row w is X of the row behind it.
  [[gnu::noinline]] bool joins(uint64_t lane, uint64_t env, uint64_t w, size_t key) const {
    return store_.observations()->continues(store_.lanes.protocol(lane), lane, env, w, w + 1, key);
  }
  // Whether any, and whether all of a step's flags are set.
  std::pair<bool, bool> done(const uint8_t* row) const {
    bool any = false, all = true;
    for (const BorderRule::Flag& flag : rule_.done)
      for (uint64_t i = 0; i < flag.bytes; ++i) row[flag.offset + i] ? any = true : all = false;
    return {any, rule_.either ? any : any && all};
  }
  // Whether two steps have different trajectory ids: they are not of one trajectory, whatever their flags say.
  bool other_ids(const uint8_t* a, const uint8_t* b) const {
    return rule_.id && !same(a + rule_.id->offset, b + rule_.id->offset, rule_.id->bytes);
  }
  // Intersection over the environments in which two steps are of one trajectory.
  struct Agreed {
    uint64_t entries = ~kBorderKnown;
    bool any = false;
    void add(uint64_t here) { entries &= here, any = true; }
  };
  // A bit for each entry that agreed between the last two steps of one trajectory, in every environment that has two such
  // steps: steps of the lane, else of the batch.
  uint64_t evidence(uint64_t lane, uint64_t n, const std::vector<LeafSource>& leaves) const {
    const uint64_t agreed = look(lane);
    return agreed & kBorderKnown ? agreed & ~kBorderKnown : n < 2 ? 0 : evidence_of(leaves);
  }
  // Of row w and the one behind it.
  uint64_t agreeing(uint64_t lane, uint64_t env, uint64_t w, const uint8_t* before, const uint8_t* after) const {
    uint64_t agreed = 0;
    for (size_t k = 0; k < rule_.entries.size(); ++k) {
      const BorderRule::Entry& e = rule_.entries[k];
      const bool agrees = e.is_observed ? joins(lane, env, w, e.key) : same(before + e.next_offset, after + e.offset, e.bytes);
      if (agrees) agreed |= uint64_t{1} << k;
    }
    return agreed;
  }
  // The same for the first two steps of a batch.
  uint64_t evidence_of(const std::vector<LeafSource>& leaves) const {
    Agreed agreed;
    for (uint64_t env = 0; env < store_.geometry().envs; ++env) {
      if (first_is_done(leaves, env)) continue;
      if (rule_.id) {
        const LeafSource& ids = leaves[rule_.id->leaf];
        if (!same(ids.at(0, env), ids.at(1, env), rule_.id->bytes)) continue;
      }
      uint64_t here = 0;
      for (size_t k = 0; k < rule_.entries.size(); ++k) {
        const BorderRule::Entry& e = rule_.entries[k];
        if (same(leaves[e.next_leaf].at(0, env), leaves[e.leaf].at(1, env), e.bytes)) here |= uint64_t{1} << k;
      }
      agreed.add(here);
    }
    return agreed.any ? agreed.entries : 0;
  }
  bool first_is_done(const std::vector<LeafSource>& leaves, uint64_t env) const {
    for (const BorderRule::Flag& flag : rule_.done)
      for (uint64_t i = 0; i < flag.bytes; ++i)
        if (leaves[flag.leaf].at(0, env)[i]) return true;
    return false;
  }

  const Store& store_;
  const BorderRule& rule_;
};

}  // namespace engram
