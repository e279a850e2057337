// Ends a worker process when its owner ends, whatever the worker is doing.
#pragma once
#include <nanobind/nanobind.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <thread>

namespace nb = nanobind;

namespace engram {

// A thread that needs no GIL, because an environment may hold the GIL for ever in C code. It blocks signals, which belong to
// Python.
inline void exit_when_readable(int fd) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread([fd] {
      pollfd watched{fd, POLLIN, 0};
      int ready;
      do {
        ready = poll(&watched, 1, -1);
      } while (ready < 0 && errno == EINTR);
      if (ready > 0 && (watched.revents & POLLIN)) _exit(1);
    }).detach();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace engram
