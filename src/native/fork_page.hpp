// Distinguishes a forked child from its parent, however it was forked: Python calls its hooks only for `os.fork`, libc its
// handlers only for `fork`, and neither for a system call. Memory that the kernel zeroes in each child covers all three.
#pragma once
#include <Python.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace engram {

class ForkPage {
 public:
  // Whether this process was forked and the parts of the library have not been told yet.
  bool is_new_process() const { return words_->known.load(std::memory_order_relaxed) == 0; }
  void acknowledge() const { words_->known.store(1, std::memory_order_relaxed); }
  // The number of forks between the first process and this one.
  uint64_t forks() const {
    if (words_->counted.load(std::memory_order_relaxed) == 0 && words_->counted.exchange(1) == 0)
      count_.fetch_add(1, std::memory_order_relaxed);
    return count_.load(std::memory_order_relaxed);
  }
  static const ForkPage& instance() { return instance_; }

 private:
  struct Words {
    std::atomic<uint64_t> known, counted;  // 0 in a new process
  };
  static constexpr size_t kBytes = 4096;

  ForkPage() {
    void* const at = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool wiped = false;
    if (at == MAP_FAILED) {
      static Words words;
      words_ = &words;
    } else {
      words_ = new (at) Words;
#ifdef MADV_WIPEONFORK
      wiped = ::madvise(at, kBytes, MADV_WIPEONFORK) == 0;
#endif
    }
    words_->known.store(1), words_->counted.store(1);
    if (!wiped)  // Linux before 4.14: only the forks of libc are seen
      ::pthread_atfork(nullptr, nullptr, [] { instance_.words_->known.store(0), instance_.words_->counted.store(0); });
  }

  Words* words_;
  mutable std::atomic<uint64_t> count_{0};
  static const ForkPage instance_;
};
inline const ForkPage ForkPage::instance_;

// A child has none of its parent's threads, and the locks that these held stay locked there: an object that was made before a
// fork is left as it is.
inline uint64_t forks() { return ForkPage::instance().forks(); }

// Whether this thread may call Python. The stable ABI, which begins with Python 3.12, has no function that says so; there each
// thread knows its own state, which has a dict.
inline bool holds_gil() {
#ifdef Py_LIMITED_API
  return PyThreadState_GetDict() != nullptr;
#else
  return PyGILState_Check();
#endif
}

[[gnu::noinline, gnu::cold]] inline void run_fork_callbacks() {
  if (!holds_gil())
    throw std::runtime_error("this process was forked by other code than Python's, in the middle of a call of engram");
  nb::module_::import_("engram._system").attr("run_fork_callbacks")();
}
// Called before a store is used. True: this process was forked, and the parts of the library have been told only now. The
// process holds no lane, even if the caller recorded one.
inline bool joined_after_fork() {
  if (!ForkPage::instance().is_new_process()) [[likely]] return false;
  run_fork_callbacks();
  return true;
}

}  // namespace engram
