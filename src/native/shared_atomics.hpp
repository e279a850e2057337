// Integers that several processes share, and short waits until one of them changes.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace nb = nanobind;

namespace engram {

// Loads and stores are sequentially consistent: of two processes that each write a number and then read the other's number, at
// least one sees the other's write. A flag that requests a wake-up needs this.
class AtomicInts {
 public:
  using Array = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

  explicit AtomicInts(Array array) : array_(std::move(array)) {
    if (reinterpret_cast<uintptr_t>(array_.data()) % std::atomic_ref<int64_t>::required_alignment != 0)
      throw nb::value_error("the integers must be aligned to 8 bytes");
  }

  size_t size() const { return array_.size(); }
  int64_t get(int64_t i) const { return cell(i).load(); }
  void set(int64_t i, int64_t value) { cell(i).store(value); }

  // Writes one integer and then reads another.
  int64_t exchange(int64_t i, int64_t value, int64_t other) {
    const auto to = cell(i), from = cell(other);
    to.store(value);
    return from.load();
  }

  // Whether integer i reaches `value` within so many seconds. The thread yields its core but keeps the GIL, so it waits for
  // a tenth of a millisecond at most.
  bool reaches(int64_t i, int64_t value, double seconds) const {
    const auto it = cell(i);
    if (it.load() >= value) return true;
    const auto wait = std::chrono::duration<double>(seconds > 0 ? std::min(seconds, 1e-4) : 0.0);
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(wait);
    while (std::chrono::steady_clock::now() < end) {
      sched_yield();
      if (it.load() >= value) return true;
    }
    return false;
  }

  // Writes the number of this thread's core into integer `mine`, and returns whether one of `count` integers, from `first` on
  // in steps of `stride`, holds the same number.
  bool shares_core(int64_t mine, int64_t first, int64_t stride, int64_t count) {
    const int64_t core = sched_getcpu();
    const auto own = cell(mine);
    if (own.load(std::memory_order_relaxed) != core) own.store(core, std::memory_order_relaxed);
    for (int64_t k = 0; k < count; ++k, first = next(first, stride))
      if (cell(first).load(std::memory_order_relaxed) == core) return true;
    return false;
  }

 private:
  std::atomic_ref<int64_t> cell(int64_t i) const {
    if (static_cast<uint64_t>(i) >= array_.size()) throw nb::index_error("no such integer");
    return std::atomic_ref<int64_t>(array_.data()[i]);
  }

  // An index that overflows becomes an invalid one.
  static int64_t next(int64_t i, int64_t stride) {
    int64_t sum;
    return __builtin_add_overflow(i, stride, &sum) ? -1 : sum;
  }

  Array array_;
};

}  // namespace engram
