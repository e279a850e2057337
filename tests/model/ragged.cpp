// Rows of any length: rows of 1 to kMost pages in a ring, of two writers, one after the other, the first killed at any of its stores. A
// reader beside them chooses a page by chance, believes that a row begins there by its bit, and believes the row by its head alone.
#include "memory.hpp"

namespace model {

// The writers append kRows rows each, as `RowWriter::append_row` does; the reader is that of src/native/pages.hpp.
template <uint64_t kCapacity, uint64_t kMost, uint64_t kRows>
struct Ragged : rl::test_suite<Ragged<kCapacity, kMost, kRows>, 3> {
  static constexpr bool kExhaustive = false;
  static constexpr unsigned kLooks = 6;
  static constexpr uint64_t kStores = kRows * (2 * kMost + 4);
  using Copy = typename Lane<kCapacity>::Copy;

  Lane<kCapacity> lane;
  Threads<false> threads;
  struct {
    uint64_t head, pages, number, tag;
  } truth[kCapacity + 2 * kRows * kMost];  // of each published page: its row's, and which of its pages it is

  void before() {
    Memory::stores_left = Memory::kNever;
    lane.begin(0);
    for (uint64_t there = 0, n = 0; there < kCapacity; there += n) append(0, n = 1 + rl::rand(std::min(kMost, kCapacity - there)));
    threads.begin(kStores);
  }
  void thread(unsigned i) {
    threads.run(i, [&] { write(1); }, [&] { write(2); }, [&] { read(); });
  }

  // What a page has in both words tells all of it, and so how many pages its row has, which is what a head says.
  static uint64_t tag_of(uint64_t head, uint64_t pages, uint64_t number, uint64_t writer) {
    return ((head * 8 + pages) * 8 + number) * 8 + writer + 1;
  }
  static uint64_t pages_of(const Copy& head) { return std::clamp<uint64_t>(head.words[0] / 64 % 8, 1, kMost); }

  void write(uint64_t writer) {
    for (uint64_t i = 0; i < kRows; ++i) append(writer, 1 + rl::rand(kMost));
  }
  void append(uint64_t writer, uint64_t n) {
    const Protocol p = lane.protocol();
    const uint64_t head = Memory::load(lane.published);
    const auto copy_some = [&](uint64_t at, uint64_t pages) {
      for (uint64_t w = at; w < at + pages; ++w) {
        truth[w] = {head, n, w - head, tag_of(head, n, w - head, writer)};
        lane.put(w, truth[w].tag);
      }
    };
    const auto copy = [&](uint64_t at) { copy_some(at, n); };
    switch (wrong) {
      default: return p.append(n, true, copy);
      case Wrong::kRowInPieces:
        for (uint64_t i = 0; i < n; ++i) p.append(1, i == 0, [&](uint64_t at) { copy_some(at, 1); });
        return;
      case Wrong::kSeamsBeforeClaim: return p.mark(head, n, true), void(p.claim(n)), copy(head), p.publish(head, n);
      case Wrong::kSeamsAfterPublish: return void(p.claim(n)), copy(head), p.publish(head, n), p.mark(head, n, true);
    }
  }

  void read() {
    const Protocol p = lane.protocol();
    for (unsigned look = 0; look < kLooks; ++look) {
      const engram::LaneView v = p.look();
      if (v.rows() == 0) continue;
      const uint64_t w = v.first + rl::rand(static_cast<unsigned>(v.rows()));
      const bool looks_late = wrong == Wrong::kSeamsAfterCheck;
      if (wrong != Wrong::kSeamsNotRead && !looks_late && !p.seam(w)) continue;
      Copy pages[kMost];
      pages[0] = lane.copy(w);
      uint64_t n = pages_of(pages[0]);
      for (uint64_t i = 1; i < n; ++i) pages[i] = lane.copy(w + i);
      Protocol::after_reading();
      const uint64_t first = p.first_now();
      if (wrong == Wrong::kLengthAfterCheck) n = pages_of(lane.copy(w));
      if ((looks_late && !p.seam(w)) || w < first) continue;
      RL_ASSERT(w + n <= v.published);
      RL_ASSERT(truth[w].number == 0 && truth[w].pages == n);
      for (uint64_t i = 0; i < n; ++i) RL_ASSERT(truth[w + i].head == w && pages[i].is(truth[w + i].tag));
      ++believed.rows, ++believed.seams;
    }
  }
};

}  // namespace model

int main(int argc, char** argv) {
  using namespace model;
  const uint64_t executions = argc > 1 ? std::stoull(argv[1]) : 100000;
  using Test = Ragged<4, 2, 3>;
  std::printf("Rows of any length, a kill, a takeover\n");
  bool ok = run<Ragged<7, 3, 2>>({"everything in place: 7 pages, rows of 1 to 3"}, executions);
  ok &= run<Test>({"everything in place: 4 pages, rows of 1 and 2"}, executions);
  ok &= run<Ragged<3, 3, 2>>({"everything in place: 3 pages, rows as long as the ring"}, executions);
  ok &= run<Test>(
      {
          {"A2 gone: the fence after the claim", Order::kClaimBeforeRows},
          {"A4 relaxed: the store of published", Order::kRowsBeforePublish},
          {"R1 relaxed: the load of published", Order::kPublishBeforeRows},
          {"R3 gone: the fence before the second look at claimed", Order::kRowsBeforeCheck},
          {"a row published page by page", {}, Wrong::kRowInPieces},
          {"heads' bits stored before the claim", {}, Wrong::kSeamsBeforeClaim},
          {"heads' bits stored after published", {}, Wrong::kSeamsAfterPublish},
          {"the length loaded after the second look at claimed", {}, Wrong::kLengthAfterCheck},
          {"the bit loaded after the second look at claimed", {}, Wrong::kSeamsAfterCheck},
          {"no look at the bit", {}, Wrong::kSeamsNotRead},
      },
      executions);
  return ok ? 0 : 1;
}
