// Observations that are stored once, by themselves, for tests.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "bind_store.hpp"
#include "observations.hpp"

namespace engram {

// Observations by themselves, with the counters of lanes and no rows.
class BareObservations {
 public:
  using Stacks = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;      // [steps, envs, frames * bytes]
  using StacksOut = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;         // [rows, frames * bytes]

  // `keys`: frames and bytes of a frame of each.
  BareObservations(uint64_t lanes, uint64_t envs, uint64_t capacity, uint64_t ahead, uint64_t longest_piece,
                   const std::vector<std::pair<uint64_t, uint64_t>>& keys)
      : observations_(Observations::Geometry{lanes, envs, capacity, ahead, longest_piece, 0, key_geometries(keys), {}}),
        counters_(3 * lanes) {}
  uint64_t bytes() const { return observations_.bytes(); }
  uint64_t published(uint64_t lane) const { return counters_.at(3 * lane + 1).load(); }
  // Appends steps to a lane, piece by piece.
  void extend(uint64_t lane, const std::vector<std::pair<Stacks, Stacks>>& keys) {
    const Observations::Geometry& g = observations_.geometry();
    std::vector<Observations::Key> from;
    for (size_t k = 0; k < keys.size(); ++k) from.push_back({source(k, keys[k].first), source(k, keys[k].second)});
    const uint64_t n = keys.empty() ? 0 : keys[0].first.shape(0);
    if (keys.size() != g.keys.size() || lane >= g.lanes) throw nb::value_error("one X and one next.X for each key");
    for (const auto& [x, next] : keys)
      if (x.shape(0) != n || next.shape(0) != n) throw nb::value_error("as many steps of each");
    const Observations::Rows rows = lane_of(lane);
    observations_.plan(rows, 0, lane, n, from, 0);
    for (uint64_t done = 0; done < n;) {
      const uint64_t take = std::min(n - done, g.longest_piece);
      rows.append(take, false, [&](uint64_t at) { observations_.store(rows, lane, at, take, from, 0); });
      done += take;
    }
  }
  // Reads rows (lane, environment, sequence) of which all are stored. Returns how many were not whole.
  size_t read(const std::vector<std::array<uint64_t, 3>>& wanted, const std::vector<std::pair<StacksOut, StacksOut>>& out) const {
    const Observations::Geometry& g = observations_.geometry();
    std::vector<Observations::Target> to;
    for (size_t k = 0; k < out.size(); ++k) {
      if (k >= g.keys.size()) throw nb::value_error("one X and one next.X for each key");
      for (const bool is_next : {false, true}) {
        const StacksOut& one = is_next ? out[k].second : out[k].first;
        if (one.shape(0) < wanted.size() || one.shape(1) != g.keys[k].bytes()) throw nb::value_error("a stack for each row");
        to.push_back({{k, is_next}, one.data(), static_cast<ptrdiff_t>(one.shape(1))});
      }
    }
    std::vector<char> is_newest(wanted.size());
    size_t gone = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const uint64_t lane = wanted[i][0], env = wanted[i][1], w = wanted[i][2];
      if (lane >= g.lanes || env >= g.envs) throw nb::index_error("no such lane or environment");
      const LaneView v = lane_of(lane).look();
      if (w < v.first || w >= v.published) throw nb::index_error("no such row");
      if (i + 1 < wanted.size() && wanted[i + 1][0] < g.lanes && wanted[i + 1][1] < g.envs)
        observations_.prefetch(wanted[i + 1][0], wanted[i + 1][1], wanted[i + 1][2]);
      is_newest[i] = observations_.copy(lane_of(lane), lane, env, w, v.published, to, i);
    }
    Observations::Rows::after_reading();
    for (size_t i = 0; i < wanted.size(); ++i) {
      const Observations::Rows rows = lane_of(wanted[i][0]);
      gone += wanted[i][2] < rows.first_now() || (is_newest[i] && !observations_.is_newest(wanted[i][2], rows.look().published));
    }
    return gone;
  }

 private:
  LeafSource source(size_t k, const Stacks& stacks) const {
    const Observations::Geometry& g = observations_.geometry();
    if (k >= g.keys.size() || stacks.shape(1) != g.envs || stacks.shape(2) != g.keys[k].bytes())
      throw nb::value_error("[steps, environments, frames * bytes]");
    const auto bytes = static_cast<ptrdiff_t>(stacks.shape(2));
    return {0, stacks.shape(2), stacks.data(), bytes * static_cast<ptrdiff_t>(g.envs), bytes};
  }
  Observations::Rows lane_of(uint64_t lane) const {
    auto& c = const_cast<std::vector<Counter>&>(counters_);
    return {c[3 * lane], c[3 * lane + 1], c[3 * lane + 2], nullptr, observations_.geometry().capacity};
  }

  Observations observations_;
  std::vector<Counter> counters_;  // claimed, published and base of each lane
};

}  // namespace engram
