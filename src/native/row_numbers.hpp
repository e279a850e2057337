// The write numbers of rows that were replaced out of turn. A ring's counters give each slot its number; a max-value
// writer puts other rows there, which must not be taken for those that they replaced.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "store.hpp"

namespace engram {

// Replaced rows are numbered in the order of their writing, from 2^62 on: no ring gets there, so a number that was
// handed out never means another row of its slot again. For stores of one lane and one strand.
class RowNumbers {
 public:
  static constexpr uint64_t kFirst = uint64_t{1} << 62;

  explicit RowNumbers(const Store& store) : slots_(store.slots()) {
    if (store.shape().lanes != 1 || store.shape().strands != 1)
      throw std::invalid_argument("rows are replaced one by one in stores of one lane and one strand");
    start(store);
  }

  // Each of these rows has just been replaced; -1: not. The same slot may come again. Counts them as written.
  void replaced(const Store& store, const int64_t* slots, size_t n) {
    catch_up(store);
    const uint64_t before = next_;
    for (size_t i = 0; i < n; ++i)
      if (slots[i] >= 0) at(static_cast<uint64_t>(slots[i])).store(next_++, std::memory_order_release);
    store.lanes.lane(0).origin.fetch_sub(next_ - before, std::memory_order_relaxed);
  }
  // A slot's number, given the one that the ring has for it.
  uint64_t number(const Store& store, uint64_t slot, uint64_t ring) const {
    if (ring >= known_ || store.header()->incarnation.load(std::memory_order_relaxed) != incarnation_) return ring;
    const uint64_t found = at(slot).load(std::memory_order_acquire);
    return found ? found : ring;
  }

  // ---- state ----
  uint64_t slots() const { return slots_; }
  uint64_t next() const { return next_; }
  void restore(const Store& store, const int64_t* numbers, size_t n, uint64_t next) {
    start(store);
    next_ = std::max(kFirst, next);
    for (size_t i = 0; i < n; ++i) at(i).store(static_cast<uint64_t>(numbers[i]), std::memory_order_relaxed);
  }

 private:
  using Number = std::atomic<uint64_t>;
  Number& at(uint64_t slot) const { return reinterpret_cast<Number*>(memory_->data())[slot]; }
  void start(const Store& store) {
    memory_ = Region::map(-1, slots_ * sizeof(Number));  // zeros; pages are taken when rows are replaced
    incarnation_ = store.header()->incarnation.load(), known_ = store.lanes.view(0).published;
  }
  // Rows that were appended since have the ring's numbers again.
  void catch_up(const Store& store) {
    const LaneView view = store.lanes.view(0);
    if (store.header()->incarnation.load() != incarnation_ || view.published - known_ >= slots_) return start(store);
    for (; known_ < view.published; ++known_) at(known_ % slots_).store(0, std::memory_order_relaxed);
  }

  uint64_t slots_;
  std::shared_ptr<Region> memory_;
  uint64_t incarnation_ = 0;
  uint64_t known_ = 0;  // of rows below this write number is known what was replaced
  uint64_t next_ = kFirst;
};

}  // namespace engram
