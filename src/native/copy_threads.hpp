// Threads that copy the rows of batches ahead of their use. They never take the GIL. A thread that needs a batch before it is
// ready helps them: at worst it copies all rows itself.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "fork_page.hpp"
#include "rows.hpp"

namespace engram {

// Copies the rows of one batch into its memory, in pieces, by any number of threads. The first piece looks up which rows exist,
// and the last one detects which were overwritten meanwhile. The store, the slots and the memory must live until `cancel` has
// returned.
class RowCopy {
 public:
  explicit RowCopy(Store& store) : store_(store), reader_(store, scratch_) {}
  RowCopy(const RowCopy&) = delete;
  RowCopy& operator=(const RowCopy&) = delete;

  // Looks up and locates the rows before any is copied.
  RowReader& reader() { return reader_; }
  // `leaves`: memory for n rows. `newer`: rows that replaced the drawn ones are equally valid.
  void set(size_t n, std::vector<LeafCopy> leaves, bool mapped_file, bool newer) {
    n_ = n, leaves_ = std::move(leaves), mapped_file_ = mapped_file, newer_ = newer;
    size_t row_bytes = 1;
    for (const LeafCopy& leaf : leaves_) row_bytes += leaf.bytes;
    piece_ = std::max<size_t>(1, kPieceBytes / row_bytes);
    if (piece_ > kBlockRows) piece_ -= piece_ % kBlockRows;
    leaves_.resize(reader_.observe(leaves_.data(), leaves_.size()));
  }
  // Copies one piece; false: no piece is left to begin.
  bool copy_piece() {
    std::unique_lock lock(mutex_);
    if (failed_ || (opened_ ? next_ == n_ : opening_)) return false;
    const auto start = std::chrono::steady_clock::now();
    const size_t from = next_;
    size_t to = from;
    ++active_;
    if (opened_)
      next_ = to = std::min(n_, from + piece_);
    else
      opening_ = true;
    const bool opens = !opened_;
    lock.unlock();
    bool failed = false;
    try {
      if (opens)
        to = open();
      else
        reader_.copy_rows(from, to, leaves_.data(), leaves_.size());
    } catch (const std::exception&) {  // out of memory, or the file was cut short: reading the rows again raises it
      failed = true;
    }
    lock.lock();
    failed_ |= failed, copied_ += to - from;
    if (opens) opened_ = true, next_ = to;
    const bool last = copied_ == n_ && !failed_;
    if (last) {
      lock.unlock();
      const bool whole = is_whole();
      lock.lock();
      whole_ = whole, done_ = true;
    }
    --active_;
    took_ += std::chrono::steady_clock::now() - start;
    changed_.notify_all();
    return true;
  }
  // Copies the pieces that no thread has begun, and waits for the others.
  void finish() {
    while (copy_piece()) {}
    std::unique_lock lock(mutex_);
    while (!done_ && !(failed_ && active_ == 0)) {
      if (opened_ && next_ < n_ && !failed_) {  // another thread has just finished the lookup
        lock.unlock();
        while (copy_piece()) {}
        lock.lock();
      } else {
        changed_.wait(lock);
      }
    }
  }
  // Stops further pieces from beginning; when this returns, no thread is copying one.
  void cancel() {
    if (forks() != forks_) return;
    std::unique_lock lock(mutex_);
    failed_ = true;
    changed_.wait(lock, [&] { return active_ == 0; });
  }
  // Whether all copying has ended.
  bool done() const {
    const std::lock_guard lock(mutex_);
    return done_ || (failed_ && active_ == 0);
  }
  // Whether all rows are copied and existed throughout the copy.
  bool whole() const {
    const std::lock_guard lock(mutex_);
    return done_ && whole_ && !failed_;  // false after a cancel
  }
  // Time spent on all pieces.
  double seconds() const {
    const std::lock_guard lock(mutex_);
    return std::chrono::duration<double>(took_).count();
  }

 private:
  static constexpr size_t kPieceBytes = 256 << 10;
  static constexpr int kRounds = 8;

  // Runs before any other copy; returns how many rows it has copied.
  size_t open() {
    store_.check_file();
    if (newer_) reader_.look();
    if (!mapped_file_) return 0;
    std::vector<LeafCopy> leaves = leaves_;
    return reader_.copy_first(leaves.data(), leaves.size());
  }
  bool is_whole() {
    try {
      // The look came after the draw: a drawn row may have been half replaced then, which `are_whole` would not detect.
      return newer_ ? reader_.copy_newer(leaves_.data(), leaves_.size(), kRounds) : reader_.are_whole();
    } catch (const std::exception&) {
      return false;
    }
  }

  Store& store_;
  ReadScratch scratch_;
  RowReader reader_;
  size_t n_ = 0, piece_ = 1;
  std::vector<LeafCopy> leaves_;
  bool mapped_file_ = false, newer_ = false;
  const uint64_t forks_ = forks();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  size_t next_ = 0, copied_ = 0, active_ = 0;  // rows begun, and rows copied; threads that have a piece
  bool opening_ = false, opened_ = false, failed_ = false, done_ = false, whole_ = false;
  std::chrono::steady_clock::duration took_{};
};

// Threads that wait for rows to copy.
class CopyThreads {
 public:
  explicit CopyThreads(size_t most) : most_(most) {}
  CopyThreads(const CopyThreads&) = delete;
  CopyThreads& operator=(const CopyThreads&) = delete;
  ~CopyThreads() { close(); }

  // If no thread can be started, the thread that needs the rows copies them.
  void add(std::shared_ptr<RowCopy> rows) {
    if (forks() != forks_) return;
    {
      const std::lock_guard lock(state_->mutex);
      if (state_->ended) return;
      state_->waiting.push_back(std::move(rows));
      if (state_->idle < state_->waiting.size() && threads_.size() < most_) start();
    }
    state_->added.notify_one();
  }
  // Ends the threads after the pieces that they have begun. The rest is copied by the threads that need it.
  void close() {
    if (forks() != forks_) {  // the threads, and the locks that they held, belong to the parent
      for (std::thread& thread : threads_) new std::thread(std::move(thread));
      new std::shared_ptr<State>(std::move(state_));
      threads_.clear(), state_ = std::make_shared<State>(), state_->ended = true, forks_ = forks();
      return;
    }
    {
      const std::lock_guard lock(state_->mutex);
      state_->ended = true;
      state_->waiting.clear();
    }
    state_->added.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable added;
    std::deque<std::shared_ptr<RowCopy>> waiting;
    size_t idle = 0;
    std::atomic<bool> ended{false};
  };

  void start() {
    // Blocks signals, which belong to threads that Python knows, but for those that a thread causes itself.
    sigset_t all, before;
    ::sigfillset(&all);
    for (int own : {SIGBUS, SIGFPE, SIGILL, SIGSEGV}) ::sigdelset(&all, own);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      threads_.reserve(most_);
      threads_.emplace_back(run, state_);
      ::pthread_setname_np(threads_.back().native_handle(), "engram-copy");
    } catch (const std::exception&) {
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  static void run(std::shared_ptr<State> state) {
    for (;;) {
      std::shared_ptr<RowCopy> rows;
      {
        std::unique_lock lock(state->mutex);
        ++state->idle;
        state->added.wait(lock, [&] { return state->ended || !state->waiting.empty(); });
        --state->idle;
        if (state->ended) return;
        rows = std::move(state->waiting.front());
        state->waiting.pop_front();
      }
      while (!state->ended && rows->copy_piece()) {}
    }
  }

  size_t most_;
  uint64_t forks_ = forks();
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::vector<std::thread> threads_;
};

}  // namespace engram
