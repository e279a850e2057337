// Trajectories in batches of environments that step together: their ids, and the totals of the episodes that end.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace engram {

namespace nb = nanobind;

template <typename T, int dims>
using CpuArray = nb::ndarray<T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;

// The steps [n, steps] that end an episode: their environments by step, those of step t from `starts[t]` to `starts[t + 1]`.
// They are few, so one look at each byte finds them faster than a loop over steps and environments.
struct EpisodeEnds {
  EpisodeEnds(const bool* done, size_t n, size_t steps) : starts(steps + 2) {
    std::vector<std::pair<size_t, size_t>> found;  // step and environment, by environment
    const auto *const first = reinterpret_cast<const uint8_t*>(done), *const end = first + n * steps;
    for (const uint8_t* at = first; at != end; ++at) {
      if (!(at = static_cast<const uint8_t*>(std::memchr(at, 1, static_cast<size_t>(end - at))))) break;
      const auto place = static_cast<size_t>(at - first);
      found.emplace_back(place % steps, place / steps);
      ++starts[place % steps + 2];
    }
    for (size_t t = 2; t < starts.size(); ++t) starts[t] += starts[t - 1];
    envs.resize(found.size());
    for (const auto& [t, env] : found) envs[starts[t + 1]++] = env;  // starts[t + 1] ends as the start of step t + 1
    starts.pop_back();
  }
  std::vector<size_t> starts, envs;
};

// Gives the steps of n environments, [n, steps], the ids of their trajectories: new ids count up from `count` in the order of
// the trajectories' first steps; ties go by environment. `current` [n] has the id of each environment's last step, and `starts`
// [n] marks the environments whose next step begins a trajectory; both are updated. Returns the next id.
inline int64_t number_trajectories(CpuArray<const bool, 2> done, CpuArray<int64_t, 1> current, CpuArray<bool, 1> starts,
                                   int64_t count, CpuArray<int64_t, 2> ids) {
  const size_t n = done.shape(0), steps = done.shape(1);
  if (current.shape(0) != n || starts.shape(0) != n || ids.shape(0) != n || ids.shape(1) != steps)
    throw nb::value_error("the arrays are not of the same environments and steps");
  if (steps == 0) return count;
  const EpisodeEnds ends(done.data(), n, steps);
  int64_t* now = current.data();
  bool* begins = starts.data();
  int64_t* out = ids.data();
  std::vector<size_t> from(n);  // the first step of each environment that has no id yet
  for (size_t env = 0; env < n; ++env) {
    if (begins[env]) now[env] = count++;
    begins[env] = false;
  }
  for (size_t t = 0; t < steps; ++t)
    for (size_t k = ends.starts[t]; k < ends.starts[t + 1]; ++k) {
      const size_t env = ends.envs[k];
      std::fill(out + env * steps + from[env], out + env * steps + t + 1, now[env]);
      from[env] = t + 1;
      if (t + 1 < steps) now[env] = count++;
      else begins[env] = true;
    }
  for (size_t env = 0; env < n; ++env) std::fill(out + env * steps + from[env], out + (env + 1) * steps, now[env]);
  return count;
}

// Adds rewards and flags of n environments, [n, steps], to the totals of their unfinished episodes, [n] each. Returns how many
// episodes ended, and the returns and lengths of the last `most` of them, in the order of their ends; ties go by environment.
template <typename Reward>
nb::tuple add_episodes(CpuArray<const Reward, 2> reward, CpuArray<const bool, 2> done, CpuArray<double, 1> totals,
                       CpuArray<int64_t, 1> lengths, size_t most) {
  const size_t n = done.shape(0), steps = done.shape(1);
  if (reward.shape(0) != n || reward.shape(1) != steps || totals.shape(0) != n || lengths.shape(0) != n)
    throw nb::value_error("the arrays are not of the same environments and steps");
  const EpisodeEnds ends(done.data(), n, steps);
  std::vector<size_t> from(n);  // the first step of each environment that is not added yet
  const auto add = [&](size_t env, size_t stop) {
    double total = totals.data()[env];
    for (size_t t = from[env]; t < stop; ++t) total += static_cast<double>(reward.data()[env * steps + t]);
    totals.data()[env] = total;
    lengths.data()[env] += static_cast<int64_t>(stop - from[env]);
    from[env] = stop;
  };
  nb::list returns, sizes;
  const size_t ended = ends.envs.size(), left_out = ended - std::min(ended, most);
  for (size_t t = 0; t < steps; ++t)
    for (size_t k = ends.starts[t]; k < ends.starts[t + 1]; ++k) {
      const size_t env = ends.envs[k];
      add(env, t + 1);
      if (k >= left_out) returns.append(totals.data()[env]), sizes.append(lengths.data()[env]);
      totals.data()[env] = 0, lengths.data()[env] = 0;
    }
  for (size_t env = 0; env < n; ++env) add(env, steps);
  return nb::make_tuple(ended, returns, sizes);
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

inline void bind_trajectories(nb::module_& m) {
  using namespace nb::literals;
  m.def("number_trajectories", &number_trajectories, "done"_a, "current"_a.noconvert(), "starts"_a.noconvert(), "count"_a,
        "ids"_a.noconvert());
  m.def("take_frames", &take_frames, "idle"_a, "taken"_a.noconvert(), "waiting"_a.noconvert(), "calls"_a.noconvert());
  m.def("take_frames", &take_frames_of_rows, "idle"_a.noconvert(), "taken"_a.noconvert(), "waiting"_a.noconvert(),
        "calls"_a.noconvert());
  m.def("add_episodes", &add_episodes<float>, "reward"_a.noconvert(), "done"_a, "totals"_a.noconvert(),
        "lengths"_a.noconvert(), "most"_a);
  m.def("add_episodes", &add_episodes<double>, "reward"_a.noconvert(), "done"_a, "totals"_a.noconvert(),
        "lengths"_a.noconvert(), "most"_a);
}

}  // namespace engram
