// Append and read: two writers, one after the other, the first killed at any of its stores, and a reader beside them.
#include "memory.hpp"

namespace model {

// The writers append kRows rows each, in pieces of kPiece at most.
template <uint64_t kCapacity, uint64_t kPiece, uint64_t kRows, bool kEvery>
struct Append : rl::test_suite<Append<kCapacity, kPiece, kRows, kEvery>, Threads<kEvery>::kCount> {
  static constexpr bool kExhaustive = kEvery;
  static constexpr unsigned kLooks = kEvery ? 1 : 4;  // what a second one may find, the first one may
  static constexpr uint64_t kStores = kRows * (kEvery ? 4 : 6);

  Lane<kCapacity> lane;
  Threads<kEvery> threads;
  struct {
    uint64_t tag;
    bool seam;
  } truth[kCapacity + 2 * kRows];  // of each published row

  void before() {
    Memory::stores_left = Memory::kNever;
    const uint64_t there = kEvery ? kCapacity : rl::rand(kCapacity + 1);
    lane.begin(there);
    for (uint64_t w = 0; w < there; ++w) truth[w] = {lane.tag(w, 0), false};
    threads.begin(kStores);
  }
  void thread(unsigned i) {
    threads.run(i, [&] { write(1); }, [&] { write(2); }, [&] { read(); });
  }

  void write(uint64_t writer) {
    bool begins = writer == 2;
    for (uint64_t left = kRows; left > 0; begins = false) {
      const uint64_t n = std::min<uint64_t>(left, kEvery ? kPiece : 1 + rl::rand(kPiece));
      append(writer, n, begins);
      left -= n;
    }
  }
  void append(uint64_t writer, uint64_t n, bool begins) {
    const Protocol p = lane.protocol();
    const auto copy = [&](uint64_t at) {
      for (uint64_t w = at; w < at + n; ++w) {
        truth[w] = {lane.tag(w, writer), begins && w == at};
        lane.put(w, truth[w].tag);
      }
    };
    const uint64_t at = Memory::load(lane.published);
    switch (wrong) {
      default: return p.append(n, begins, copy);
      case Wrong::kClaimAfterCopy: return copy(at), p.mark(at, n, begins), void(p.claim(n)), p.publish(at, n);
      case Wrong::kPublishBeforeCopy: return void(p.claim(n)), p.publish(at, n), copy(at), p.mark(at, n, begins);
      case Wrong::kSeamsBeforeClaim: return p.mark(at, n, begins), void(p.claim(n)), copy(at), p.publish(at, n);
      case Wrong::kSeamsAfterPublish: return void(p.claim(n)), copy(at), p.publish(at, n), p.mark(at, n, begins);
      case Wrong::kClaimedIsLowered: return Memory::store(lane.claimed, at + n), p.append(n, begins, copy);
    }
  }

  void read() {
    const Protocol p = lane.protocol();
    for (unsigned look = 0; look < kLooks; ++look) {
      typename Lane<kCapacity>::Copy rows[kCapacity];
      bool seam[kCapacity] = {};
      if (wrong == Wrong::kRowsBeforePublished)
        for (uint64_t slot = 0; slot < kCapacity; ++slot) rows[slot] = lane.copy(slot);
      const engram::LaneView v = p.look();
      const uint64_t early = wrong == Wrong::kClaimReadEarly ? p.first_now() : 0;
      const bool seams_first = kEvery || rl::rand(2) == 0;
      if (seams_first && wrong != Wrong::kSeamsAfterCheck) read_seams(v, seam);
      if (wrong != Wrong::kRowsBeforePublished)
        for (uint64_t w = v.first; w < v.published; ++w) rows[w % kCapacity] = lane.copy(w);
      if (!seams_first && wrong != Wrong::kSeamsAfterCheck) read_seams(v, seam);
      Protocol::after_reading();
      const uint64_t first = wrong == Wrong::kClaimReadEarly ? early : p.first_now();
      if (wrong == Wrong::kSeamsAfterCheck) read_seams(v, seam);
      for (uint64_t w = std::max(first, v.first); w < v.published; ++w) {
        RL_ASSERT(rows[w % kCapacity].is(truth[w].tag));
        RL_ASSERT(seam[w % kCapacity] == truth[w].seam);
        ++believed.rows, believed.seams += truth[w].seam;
      }
    }
  }
  void read_seams(const engram::LaneView& v, bool* seam) {
    const Protocol p = lane.protocol();
    if (kEvery)  // no vector: a search would try what Relacy does with its memory
      for (uint64_t w = v.first; w < v.published; ++w) seam[w % kCapacity] = p.seam(w);
    else
      for (uint64_t w : p.seams_of(v.first, v.published)) seam[w % kCapacity] = true;
  }
};

}  // namespace model

int main(int argc, char** argv) {
  using namespace model;
  const uint64_t executions = argc > 1 ? std::stoull(argv[1]) : 1000000;
  std::printf("Append and read, a kill, a takeover\n");
  bool ok = run<Append<3, 2, 4, false>>({"everything in place: 3 rows, pieces of 1 and 2"}, executions);
  ok &= run<Append<5, 3, 5, false>>({"everything in place: 5 rows, pieces of 1 to 3"}, executions);
  ok &= run<Append<1, 1, 3, false>>({"everything in place: 1 row"}, executions);
  ok &= run<Append<1, 1, 1, true>>({"everything in place: 1 row, every execution"}, executions);
  ok &= run<Append<3, 2, 4, false>>(
      {
          {"A2 gone: the fence after the claim", Order::kClaimBeforeRows},
          {"A4 relaxed: the store of published", Order::kRowsBeforePublish},
          {"R1 relaxed: the load of published", Order::kPublishBeforeRows},
          {"R3 gone: the fence before the second look at claimed", Order::kRowsBeforeCheck},
          {"the lane's lock orders nothing", {}, Wrong::kLockOrdersNothing},
          {"claimed stored after the copy", {}, Wrong::kClaimAfterCopy},
          {"claimed lowered by who takes over", {}, Wrong::kClaimedIsLowered},
          {"published stored before the copy", {}, Wrong::kPublishBeforeCopy},
          {"seam bits stored before the claim", {}, Wrong::kSeamsBeforeClaim},
          {"seam bits stored after published", {}, Wrong::kSeamsAfterPublish},
          {"claimed loaded before the copy", {}, Wrong::kClaimReadEarly},
          {"rows loaded before published", {}, Wrong::kRowsBeforePublished},
          {"seam bits loaded after the second look at claimed", {}, Wrong::kSeamsAfterCheck},
      },
      executions);
  return ok ? 0 : 1;
}
