// Trajectories in batches of environments that step together: their ids, and the totals of the episodes that end.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "casters.hpp"

namespace engram {

namespace nb = nanobind;

template <typename T, int dims>
using CpuArray = nb::ndarray<T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;

// The end of the steps [first, stop) of arrays that have so many; without `stop` that of the arrays.
inline size_t stop_of(size_t steps, size_t first, std::optional<size_t> stop) {
  const size_t end = stop.value_or(steps);
  if (first > end || end > steps) throw nb::index_error("the arrays have fewer steps");
  return end;
}

// Where the steps [first, stop) of n environments, [n, steps], end an episode: step and environment, in this order. They are
// few, so that a look at each byte finds them faster than a loop with a branch at each step.
inline std::vector<std::pair<size_t, size_t>> episode_ends(const bool* done, size_t n, size_t steps, size_t first, size_t stop) {
  std::vector<std::pair<size_t, size_t>> found;
  for (size_t env = 0; env < n; ++env) {
    const auto* const row = reinterpret_cast<const uint8_t*>(done + env * steps);
    for (size_t t = first; t < stop; ++t) {
      const void* const at = std::memchr(row + t, 1, stop - t);
      if (!at) break;
      t = static_cast<size_t>(static_cast<const uint8_t*>(at) - row);
      found.emplace_back(t, env);
    }
  }
  if (n == 1 || found.size() < 2) return found;
  std::vector<size_t> next(stop - first + 1);  // by step, the place of the next one
  for (const auto& one : found) ++next[one.first - first + 1];
  for (size_t t = 1; t < next.size(); ++t) next[t] += next[t - 1];
  std::vector<std::pair<size_t, size_t>> sorted(found.size());
  for (const auto& one : found) sorted[next[one.first - first]++] = one;
  return sorted;
}

// Gives the steps [first, stop) of n environments, [n, steps], the ids of their trajectories: new ids count up from `count` in
// the order of the trajectories' first steps; ties go by environment. `current` [n] has the id of each environment's last step,
// and `starts` [n] marks the environments whose next step begins a trajectory; both are updated. Returns the next id.
inline int64_t number_trajectories(CpuArray<const bool, 2> done, CpuArray<int64_t, 1> current, CpuArray<bool, 1> starts,
                                   int64_t count, CpuArray<int64_t, 2> ids, size_t first, std::optional<size_t> stop) {
  const size_t n = done.shape(0), steps = done.shape(1), end = stop_of(steps, first, stop);
  if (current.shape(0) != n || starts.shape(0) != n || ids.shape(0) != n || ids.shape(1) != steps)
    throw nb::value_error("the arrays are not of the same environments and steps");
  if (first == end) return count;
  int64_t* now = current.data();
  bool* begins = starts.data();
  int64_t* out = ids.data();
  for (size_t env = 0; env < n; ++env)
    if (begins[env]) now[env] = count++, begins[env] = false;
  std::vector<size_t> from(n, first);  // the first step of each environment that has no id yet
  for (const auto& [t, env] : episode_ends(done.data(), n, steps, first, end)) {
    std::fill(out + env * steps + from[env], out + env * steps + t + 1, now[env]);
    from[env] = t + 1;
    if (t + 1 < end) now[env] = count++;
    else begins[env] = true;
  }
  for (size_t env = 0; env < n; ++env) std::fill(out + env * steps + from[env], out + env * steps + end, now[env]);
  return count;
}

// Adds rewards and flags of the steps [first, stop) of n environments, [n, steps], to the totals of their unfinished episodes,
// [n] each. Returns how many episodes ended, and the returns and lengths of the last `most` of them, in the order of their ends;
// ties go by environment.
template <typename Reward>
nb::tuple add_episodes(CpuArray<const Reward, 2> reward, CpuArray<const bool, 2> done, CpuArray<double, 1> totals,
                       CpuArray<int64_t, 1> lengths, size_t most, size_t first, std::optional<size_t> stop) {
  const size_t n = done.shape(0), steps = done.shape(1), end = stop_of(steps, first, stop);
  if (reward.shape(0) != n || reward.shape(1) != steps || totals.shape(0) != n || lengths.shape(0) != n)
    throw nb::value_error("the arrays are not of the same environments and steps");
  std::vector<size_t> from(n, first);  // the first step of each environment that is not added yet
  const auto add_until = [&](size_t env, size_t until) {
    double total = totals.data()[env];
    for (size_t t = from[env]; t < until; ++t) total += static_cast<double>(reward.data()[env * steps + t]);
    totals.data()[env] = total;
    lengths.data()[env] += static_cast<int64_t>(until - from[env]);
    from[env] = until;
  };
  const auto ends = episode_ends(done.data(), n, steps, first, end);
  size_t left_out = ends.size() - std::min(ends.size(), most);
  nb::list returns, sizes;
  for (const auto& [t, env] : ends) {
    add_until(env, t + 1);
    double& total = totals.data()[env];
    int64_t& length = lengths.data()[env];
    if (left_out) --left_out;
    else returns.append(total), sizes.append(length);
    total = 0, length = 0;
  }
  for (size_t env = 0; env < n; ++env) add_until(env, end);
  return nb::make_tuple(ends.size(), returns, sizes);
}

// Takes the first `steps` waiting frames of each of n environments, oldest first. `idle` has one byte for each call and
// environment, [calls, n]: whether the call only reset the environment, and so made no frame. `taken` [n] says how many frames
// of each environment were taken before. Writes the call that made each frame to `taken_calls` [n, steps], and returns how many
// calls, from the oldest on, have no waiting frame left; `taken` and `waiting` count without these calls afterwards.
inline size_t take_frames_of(const void* idle, size_t size, CpuArray<int64_t, 1> taken, CpuArray<int64_t, 1> waiting,
                             CpuArray<int64_t, 2> taken_calls) {
  const size_t n = taken.shape(0), steps = taken_calls.shape(1);
  if (n == 0 || waiting.shape(0) != n || taken_calls.shape(0) != n || size % n != 0)
    throw nb::value_error("the arrays are not of the same environments");
  const size_t calls = size / n;
  const auto* only_reset = static_cast<const char*>(idle);
  size_t dropped = calls;
  for (size_t env = 0; env < n; ++env) {
    int64_t number = -taken.data()[env];  // of the next frame, counted from the first one that waits
    const auto count = static_cast<int64_t>(steps);
    size_t call = 0;
    for (; call < calls && number <= count; ++call) {
      if (only_reset[call * n + env]) continue;
      if (number == count) break;
      if (number >= 0) taken_calls.data()[env * steps + static_cast<size_t>(number)] = static_cast<int64_t>(call);
      ++number;
    }
    if (number < count) throw nb::value_error("an environment has fewer frames");
    dropped = std::min(dropped, call);
  }
  for (size_t env = 0; env < n; ++env) {
    int64_t frames = 0;
    for (size_t call = 0; call < dropped; ++call) frames += !only_reset[call * n + env];
    waiting.data()[env] -= static_cast<int64_t>(steps);
    taken.data()[env] += static_cast<int64_t>(steps) - frames;
  }
  return dropped;
}

inline size_t take_frames(nb::bytes idle, CpuArray<int64_t, 1> taken, CpuArray<int64_t, 1> waiting, CpuArray<int64_t, 2> calls) {
  return take_frames_of(idle.c_str(), idle.size(), taken, waiting, calls);
}
inline size_t take_frames_of_rows(CpuArray<const bool, 2> idle, CpuArray<int64_t, 1> taken, CpuArray<int64_t, 1> waiting,
                                  CpuArray<int64_t, 2> calls) {
  if (idle.shape(1) != taken.shape(0)) throw nb::value_error("the arrays are not of the same environments");
  return take_frames_of(idle.data(), idle.size(), taken, waiting, calls);
}

}  // namespace engram
