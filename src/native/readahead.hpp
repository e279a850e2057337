// Asks the kernel for all pages of a batch before the first is touched, as long as this saves time.
#pragma once
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace engram {

// Off: 16 rows of a batch are read directly; two major faults of this thread among them switch read-ahead on.
// On: some batches whose rows were all in memory, which their time per row shows, switch it off.
class Readahead {
 public:
  static constexpr size_t kProbeRows = 16;
  static constexpr long kFaults = 2;
  static constexpr int kQuietBatches = 8;
  static constexpr uint64_t kMemoryNsPerRow = 1500;  // a row from disk costs at least ten times this

  explicit Readahead(int fd) : fd_(fd) {}

  bool on() const { return on_.load(std::memory_order_relaxed); }
  void saw_faults(long faults) {
    if (faults >= kFaults) quiet_.store(0, std::memory_order_relaxed), on_.store(true, std::memory_order_relaxed);
  }
  void saw_batch(uint64_t ns, size_t rows) {
    if (ns > kMemoryNsPerRow * rows)
      quiet_.store(0, std::memory_order_relaxed);
    else if (quiet_.fetch_add(1, std::memory_order_relaxed) + 1 >= kQuietBatches)
      on_.store(false, std::memory_order_relaxed);
  }
  void ask(uint64_t offset, size_t bytes) const {
    const uint64_t first = offset & ~uint64_t{4095};
    ::readahead(fd_, static_cast<off_t>(first), offset + bytes - first);
  }
  static long faults_of_this_thread() {
    struct rusage u;
    return ::getrusage(RUSAGE_THREAD, &u) == 0 ? u.ru_majflt : 0;
  }

 private:
  int fd_;
  std::atomic<bool> on_{false};
  std::atomic<int> quiet_{0};
};

}  // namespace engram
