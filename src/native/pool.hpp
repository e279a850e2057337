// Memory for output batches, used again: fresh pages cost more than the copy into them.
#pragma once
#include <pthread.h>

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace engram {

constexpr size_t kBlockAlign = 64;

struct Block {
  std::atomic<uint32_t> users;
  uint32_t size_class;
  Block* next;
};
static_assert(sizeof(Block) <= kBlockAlign);

// Blocks go back from any thread, with or without the GIL: a spin lock guards lists that are touched for nanoseconds.
// The pool is never destroyed, because a tensor may outlive every other object of the process.
class BlockPool {
 public:
  static constexpr size_t kCap = size_t{512} << 20;  // bytes kept for later
  static BlockPool& instance() {
    static BlockPool* pool = [] {
      auto* p = new BlockPool;
      // A child that was forked while another thread held the lock starts with an empty pool.
      ::pthread_atfork(nullptr, nullptr, [] { instance().forget(); });
      return p;
    }();
    return *pool;
  }
  // A block with room for `bytes` after its first 64, for `users` tensors.
  Block* take(size_t bytes, uint32_t users) {
    const uint32_t c = class_of(bytes + kBlockAlign);
    Block* b = nullptr;
    if (c < kClasses) {
      lock();
      if ((b = free_[c])) free_[c] = b->next, kept_ -= class_bytes(c);
      unlock();
    }
    if (!b) {
      const size_t size = c < kClasses ? class_bytes(c) : (bytes + 2 * kBlockAlign) & ~(kBlockAlign - 1);
      void* at = std::aligned_alloc(kBlockAlign, size);
      if (!at) throw std::bad_alloc();
      b = new (at) Block{};
    }
    b->users.store(users, std::memory_order_relaxed);
    b->size_class = c;
    return b;
  }
  void give(Block* b) {
    if (b->users.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const uint32_t c = b->size_class;
    if (c < kClasses) {
      lock();
      if (kept_ + class_bytes(c) <= kCap) {
        b->next = free_[c], free_[c] = b, kept_ += class_bytes(c);
        unlock();
        return;
      }
      unlock();
    }
    std::free(b);
  }
  size_t kept() const { return kept_; }
  // Gives what is kept back to the system.
  void empty() {
    for (Block*& list : free_) {
      lock();
      Block* b = list;
      list = nullptr;
      for (Block* one = b; one; one = one->next) kept_ -= class_bytes(one->size_class);
      unlock();
      while (b) std::free(std::exchange(b, b->next));
    }
  }

 private:
  // Four classes for each doubling from 1 KB to 1 GB.
  static constexpr uint32_t kClasses = 80;
  static size_t class_bytes(uint32_t c) { return (size_t{1024} << (c / 4)) / 4 * (4 + c % 4); }
  static uint32_t class_of(size_t bytes) {
    if (bytes <= 1024) return 0;
    const int top = 63 - std::countl_zero(bytes - 1);  // 2^top < bytes <= 2^(top+1)
    const size_t quarter = size_t{1} << (top - 2);
    const auto q = static_cast<uint32_t>((bytes - (size_t{1} << top) + quarter - 1) / quarter);  // 1..4
    return static_cast<uint32_t>(top - 10) * 4 + q;
  }
  void lock() {
    while (busy_.test_and_set(std::memory_order_acquire)) {}
  }
  void unlock() { busy_.clear(std::memory_order_release); }
  void forget() {
    for (auto& f : free_) f = nullptr;
    kept_ = 0;
    unlock();
  }

  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  Block* free_[kClasses] = {};
  size_t kept_ = 0;
};

inline uint8_t* block_data(Block* b) { return reinterpret_cast<uint8_t*>(b) + kBlockAlign; }

}  // namespace engram
