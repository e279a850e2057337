// Locks of the writers of a store, as src/engram/store/locks.py takes them.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>

namespace engram {

// The lowest bits of a writer's number are its pid, for errors that name the process.
constexpr uint64_t kPidBits = 24;
static_assert((uint64_t{1} << kPidBits) > (1 << 22));  // Linux gives pids below 2^22

// Tells which writers live: each holds a byte of the file locked, through an open file description of its own.
class WriterLocks {
 public:
  // fd -1: no other process writes. `patience`: for how many seconds a writer waits while others write in each lane.
  explicit WriterLocks(int fd = -1, int64_t first_byte = 0, double patience = 0)
      : fd_(fd), first_byte_(first_byte), patience_(patience) {}
  double patience() const { return patience_; }
  bool is_alive(uint64_t writer) const {
#ifdef F_OFD_GETLK
    struct flock lock{};
    lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_len = 1;
    lock.l_start = static_cast<off_t>(first_byte_ + static_cast<int64_t>(writer >> kPidBits));
    return fd_ >= 0 && (::fcntl(fd_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK);
#else
    (void)writer;
    return fd_ >= 0;
#endif
  }

 private:
  int fd_;
  int64_t first_byte_;
  double patience_;
};

}  // namespace engram
