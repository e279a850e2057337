// The table of streams: how many rows each writer has appended, for whoever continues its work. A stream's record is a copy of its
// newest extent, which stays when its lanes have gone to others. docs/memory-model.md explains each step; the model
// (tests/model/streams.cpp) runs this very code.
#pragma once
#include <cstdint>

#include "crc32c.hpp"

namespace engram {

// Rows of `lane` from `start` on are those of `stream`, from its row number `position` on, if it wrote the newest row there.
// `owner`: the number with which the process that appends them takes turns.
struct StreamPlace {
  static constexpr uint64_t kNoLane = ~uint64_t{0};
  uint64_t stream = 0, owner = 0, lane = kNoLane, start = 0, position = 0;

  // How many rows the stream has, while nobody else appends in the lane. `writer`: of the newest row there, which ends at
  // `published`.
  uint64_t count(uint64_t writer, uint64_t published) const {
    return writer == stream && published > start ? position + (published - start) : position;
  }
};

// A record is stored twice, in turns, each time with a checksum, so that a kill leaves the one before. Only who has the turn in a
// lane changes the records that name it: its writer, or who takes the turn over when that one has died.
template <class Memory>
class StreamRecord {
 public:
  using Word = typename Memory::Word;
  static constexpr uint64_t kFields = 6, kCopyWords = kFields + 1;  // round, the fields of a StreamPlace, checksum
  static constexpr uint64_t kWords = 2 * kCopyWords;

  explicit StreamRecord(Word* words) : words_(words) {}

  // The newest whole copy; a stream of 0: there is none.
  StreamPlace read() const { return newest().place; }
  void write(const StreamPlace& place) const {
    const Copy last = newest();
    Word* const to = words_ + (last.index ^ 1) * kCopyWords;
    const uint64_t words[] = {last.round + 1, place.stream, place.owner, place.lane, place.start, place.position};
    for (uint64_t i = 0; i < kFields; ++i) Memory::store(to[i], words[i]);
    Memory::store(to[kFields], check(words));
  }
  // S2: rows of a process that died in a lane, up to `published`, are counted before anybody else writes there. `writer`: of the
  // newest one. The record of a stream that lives has another owner, and is left alone.
  void settle(uint64_t lane, uint64_t dead, uint64_t writer, uint64_t published) const {
    const StreamPlace place = read();
    if (place.stream != writer || place.owner != dead || place.lane != lane || published <= place.start) return;
    write({place.stream, place.owner, lane, published, place.count(writer, published)});
  }

 private:
  struct Copy {
    uint64_t round = 0, index = 1;
    StreamPlace place;
  };
  Copy newest() const {
    Copy best;
    for (uint64_t k = 0; k < 2; ++k) {
      uint64_t words[kCopyWords];
      for (uint64_t i = 0; i < kCopyWords; ++i) words[i] = Memory::load(words_[k * kCopyWords + i]);
      if (words[0] > best.round && words[kFields] == check(words))
        best = {words[0], k, {words[1], words[2], words[3], words[4], words[5]}};
    }
    return best;
  }
  static uint64_t check(const uint64_t* words) { return crc32c(0, words, kFields * sizeof(uint64_t)) | uint64_t{1} << 32; }

  Word* words_;
};

}  // namespace engram
