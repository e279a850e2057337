// What is plain arithmetic in the protocol: the words of seams, of 64 slots, against a list of them; and the size of pieces.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "../../src/native/lane_protocol.hpp"

namespace {

using Protocol = engram::LaneProtocol<engram::StdMemory>;

void check(bool ok, const char* what, uint64_t capacity, uint64_t at, uint64_t n) {
  if (ok) return;
  std::printf("%s: capacity %llu, %llu from %llu on\n", what, static_cast<unsigned long long>(capacity),
              static_cast<unsigned long long>(n), static_cast<unsigned long long>(at));
  std::exit(1);
}

// Pieces of all lengths, from any number on, around the ring; every row's seam, and ranges of them.
void try_words(uint64_t capacity, std::mt19937_64& random) {
  std::atomic<uint64_t> claimed{0}, published{0}, base{0};
  const uint64_t words = (capacity + 63) / 64;
  std::vector<std::atomic<uint64_t>> seams(words + 1);  // and one behind them, which nobody touches
  for (auto& word : seams) word = random();
  const uint64_t behind = seams[words], last = capacity % 64 ? ~uint64_t{0} << capacity % 64 : 0, unused = seams[words - 1] & last;
  const Protocol lane{claimed, published, base, seams.data(), capacity};
  const uint64_t start = random() >> random() % 64;
  std::vector<bool> expected(capacity, false);
  lane.mark(start, capacity, false);
  uint64_t at = start;
  for (int piece = 0; piece < 50; ++piece) {
    const uint64_t n = 1 + random() % (piece % 2 ? capacity : std::min<uint64_t>(capacity, 3));
    const bool begins = random() % 2;
    lane.mark(at, n, begins);
    for (uint64_t w = at; w < at + n; ++w) expected[w % capacity] = begins && w == at;
    at += n;
    const uint64_t from = at + random() % capacity, to = from + random() % (capacity + 1);
    std::vector<uint64_t> found;
    for (uint64_t w = from; w < to; ++w) {
      if (expected[w % capacity]) found.push_back(w);
      check(lane.seam(w) == expected[w % capacity], "seam", capacity, w, 1);
    }
    check(lane.seams_of(from, to) == found, "seams_of", capacity, from, to - from);
    check(seams[words] == behind && (seams[words - 1] & last) == unused, "mark wrote behind the slots", capacity, at, n);
  }
}

void try_pieces(uint64_t capacity, uint64_t stride) {
  const uint64_t alone = engram::claim_steps(capacity, stride, false), seen = engram::claim_steps(capacity, stride, true);
  check(alone == std::max<uint64_t>(1, capacity / 8), "the piece of a lane that nobody else sees", capacity, stride, alone);
  check(seen >= 1 && seen <= alone && seen <= 64 && (seen == 1 || seen * stride <= 64 << 10), "the piece of a lane", capacity,
        stride, seen);
  const uint64_t more = seen + 1;
  check(more > capacity / 8 || more > 64 || more * stride > 64 << 10, "the piece could be larger", capacity, stride, seen);
}

}  // namespace

int main() {
  std::mt19937_64 random(1);
  for (uint64_t capacity = 1; capacity <= 400; ++capacity)
    for (int round = 0; round < 10; ++round) try_words(capacity, random);
  for (uint64_t capacity : {1, 7, 8, 15, 16, 511, 512, 519, 520, 1000, 1 << 30})
    for (uint64_t stride : {0, 8, 88, 1023, 1024, 1025, 8192, 32768, 32769, 65536, 65537, 1 << 24}) try_pieces(capacity, stride);
  std::printf("Words of seams and sizes of pieces: as a plain list and the rule have them\n");
}
