// The protocol of a queue: each row of a lane is handed out once, and no writer replaces one that may still be wanted.
// Two numbers a lane do it, in rows (time steps x environments): rows below `consumed` were handed out, rows below `kept` may be
// overwritten. Writers look at `kept` in the lane's turn; consumers have a turn of their own, for all lanes. docs/memory-model.md
// explains each step; the model (tests/model/queue.cpp) runs this very code.
#pragma once
#include <algorithm>
#include <cstdint>

#include "lane_protocol.hpp"

namespace engram {

template <class Memory>
struct QueueProtocol {
  using Word = typename Memory::Word;
  struct Waiting {
    uint64_t from = 0, end = 0, missed = 0;  // rows [from, end) can be handed out; the `missed` before them were overwritten
    uint64_t rows() const { return end - from; }
  };

  LaneProtocol<Memory> rows;
  Word& consumed;
  Word& kept;

  // ---- the writer, in the lane's turn ----
  // How many time steps it may append.
  uint64_t room() const {
    const uint64_t kept_now = Memory::acquire(kept, Order::kKeptBeforeClaim) / rows.envs;  // Q1
    const uint64_t end = std::max(kept_now, Memory::load(rows.base)) + rows.capacity, at = Memory::load(rows.published);
    return end > at ? end - at : 0;
  }

  // ---- the consumer that has the turn: `waiting`, copy, `hand_out` ----
  Waiting waiting() const {
    const LaneView v = rows.look();
    const uint64_t first = v.first * rows.envs, next = Memory::load(consumed), from = std::max(next, first);
    return {from, std::max(from, v.published * rows.envs), from - next};
  }
  // Rows below `to` are handed out; with `lets_go` they may be overwritten from now on, and so may those of a consumer that was killed
  // in between.
  void hand_out(uint64_t to, bool lets_go) const {
    Memory::store(consumed, to);
    if (lets_go) Memory::release(kept, to, Order::kCopiesBeforeKept);  // Q2
  }
  // Rows below `to`, which were handed out, may be overwritten.
  void let_go(uint64_t to) const {
    const uint64_t up_to = std::min(to, Memory::load(consumed));
    if (up_to > Memory::load(kept)) Memory::release(kept, up_to, Order::kCopiesBeforeKept);
  }
  // Rows from `to` on are handed out next, once more where they were; what of them is still there stays until it is let go.
  // `replaced`: how many of those that come again are gone, as others took their places; `lost`: and how many that nobody was to
  // replace, by a power cut before they were flushed.
  struct Sought {
    uint64_t replaced = 0, lost = 0;
  };
  Sought seek(uint64_t to) const {
    const uint64_t first = rows.look().first * rows.envs, base = Memory::load(rows.base) * rows.envs;
    const uint64_t kept_now = Memory::load(kept), lost = to < kept_now || base < to ? 0 : base - to;
    // A writer that sees this value, and never saw the one before, must see the copies of rows below it, too.
    if (to < kept_now) Memory::release(kept, std::max(to, std::min(first, kept_now)), Order::kCopiesBeforeKept);
    Memory::store(consumed, to + lost);
    return {first > to + lost ? first - to - lost : 0, lost};
  }
  // From here on rows wait: all that are there, but for those that were handed out where the rows were saved. Those that were
  // overwritten before count as missed, unless they were `known` to be no queue's.
  void begin(bool known = false) const {
    const uint64_t from = known ? rows.look().first : Memory::load(rows.base);
    Memory::store(consumed, std::max(Memory::load(consumed), from * rows.envs));
    Memory::store(kept, std::max(Memory::load(kept), rows.look().first * rows.envs));
  }
  // What was handed out is forgotten.
  void end() const {
    const uint64_t base = Memory::load(rows.base) * rows.envs;
    Memory::store(consumed, base), Memory::store(kept, base);
  }
};

}  // namespace engram
