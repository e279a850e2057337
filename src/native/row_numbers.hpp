// The write numbers of rows that were replaced out of turn. A ring's counters give each slot its number; a max-value
// writer puts other rows there, which must not be taken for those that they replaced.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "store.hpp"

namespace engram {

// Replaced rows are numbered in the order of their writing, from 2^62 on: no ring gets there, so a number that was
// handed out never means another row of its slot again. The store's header counts them, for who opens it later. For
// stores of one lane and one strand.
class RowNumbers {
 public:
  static constexpr uint64_t kFirst = uint64_t{1} << 62;

  explicit RowNumbers(const Store& store) : slots_(store.slots()) {
    if (store.geometry().lanes != 1 || store.geometry().envs != 1)
      throw std::invalid_argument("rows are replaced one by one in stores of one lane and one strand");
    start(store);
    next_ = kFirst + std::min(store.header()->replaced.load(), kFirst / 2);  // a damaged header
  }

  // Before rows are replaced: whoever opens the store after a kill must not give their numbers to others.
  void reserve(const Store& store, uint64_t n) {
    store.must_be_writable();
    catch_up(store);  // which may need memory: not when the rows are replaced already
    raise(store, next_ + n);
  }
  // Nobody knows which of the stored rows were replaced, before this process opened the store: all get new numbers.
  void renumber(const Store& store) {
    store.must_be_writable();
    start(store);
    block_ = kFirst + std::min(store.header()->replaced.fetch_add(slots_), kFirst / 2);
    next_ = block_ + slots_;
  }

  // Each of these rows has just been replaced; -1: not. The same slot may come again. Counts them as written.
  void replaced(const Store& store, const int64_t* slots, size_t n) {
    store.must_be_writable();
    catch_up(store);
    const uint64_t before = next_;
    for (size_t i = 0; i < n; ++i)
      if (slots[i] >= 0) at(static_cast<uint64_t>(slots[i])).store(next_++, std::memory_order_release);
    raise(store, next_);
    store.lanes.lane(0).origin.fetch_sub(next_ - before, std::memory_order_relaxed);
  }
  // A slot's number, given the one that the ring has for it.
  uint64_t number(const Store& store, uint64_t slot, uint64_t ring) const {
    if (ring >= known_ || store.lanes.header().incarnation.load(std::memory_order_relaxed) != incarnation_) return ring;
    const uint64_t found = at(slot).load(std::memory_order_acquire);
    return found >= kFirst ? found : block_ && found != kAppended ? block_ + slot : ring;
  }

  // ---- state ----
  uint64_t slots() const { return slots_; }
  uint64_t next() const { return next_; }
  void restore(const Store& store, const int64_t* numbers, size_t n, uint64_t next) {
    store.must_be_writable();
    start(store);
    next_ = std::max(kFirst, next);
    store.header()->replaced.store(next_ - kFirst);
    for (size_t i = 0; i < n; ++i) at(i).store(static_cast<uint64_t>(numbers[i]), std::memory_order_relaxed);
  }

 private:
  using Number = std::atomic<uint64_t>;
  static constexpr uint64_t kAppended = 1;  // in the place of a number: the ring's, in a block of new ones
  Number& at(uint64_t slot) const { return reinterpret_cast<Number*>(memory_->data())[slot]; }
  // Takes memory at the first time only: rows may have been replaced already.
  void start(const Store& store) {
    if (!memory_)
      memory_ = MappedRegion::map(-1, slots_ * sizeof(Number));  // zeros; pages are taken when rows are replaced
    else if (::madvise(memory_->data(), memory_->bytes(), MADV_DONTNEED) != 0)
      std::memset(memory_->data(), 0, slots_ * sizeof(Number));
    block_ = 0;
    incarnation_ = store.header()->incarnation.load(), known_ = store.lanes.view(0).published;
  }
  static void raise(const Store& store, uint64_t next) {
    Counter& replaced = store.header()->replaced;
    if (replaced.load(std::memory_order_relaxed) < next - kFirst) replaced.store(next - kFirst);
  }
  // Rows that were appended since have the ring's numbers again.
  void catch_up(const Store& store) {
    const LaneView view = store.lanes.view(0);
    if (store.header()->incarnation.load() != incarnation_ || view.published - known_ >= slots_) return start(store);
    for (; known_ < view.published; ++known_) at(known_ % slots_).store(block_ ? kAppended : 0, std::memory_order_relaxed);
  }

  uint64_t slots_;
  std::shared_ptr<MappedRegion> memory_;
  uint64_t incarnation_ = 0;
  uint64_t known_ = 0;  // of rows below this write number is known what was replaced
  uint64_t next_ = kFirst;
  uint64_t block_ = 0;  // stored rows without a number of their own have the block's; 0: the ring's
};

}  // namespace engram
