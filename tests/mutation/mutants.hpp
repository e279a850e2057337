// What planted mutants of the native core are written with. Included before all else in their build.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <utility>

namespace mutants {

struct State {
  uint32_t active = 0;            // number of the mutant that is planted
  unsigned char* hits = nullptr;  // a byte for each place, shared with child processes
  State() {
    if (const char* number = std::getenv("ENGRAM_NATIVE_MUTANT")) active = std::strtoul(number, nullptr, 16);
    const char* path = std::getenv("ENGRAM_HITS");
    const int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    struct stat about;
    if (file >= 0 && fstat(file, &about) == 0) {
      void* at = mmap(nullptr, about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (at != MAP_FAILED) hits = static_cast<unsigned char*>(at);
    }
    if (file >= 0) close(file);
  }
};
inline const State state;

template <uint32_t number, uint32_t place>
inline bool planted() {
  if (state.hits) state.hits[place] = 1;
  return state.active == number;
}

template <char op, typename A, typename B>
inline bool compared(A&& a, B&& b) {
  if constexpr (op == 'l') return a < b;
  if constexpr (op == 'L') return a <= b;
  if constexpr (op == 'g') return a > b;
  if constexpr (op == 'G') return a >= b;
  if constexpr (op == 'e') return a == b;
  if constexpr (op == 'n') return a != b;
}

// `a < b` becomes `a < At{} < b`, which binds as the original does; `a == b` likewise.
template <uint32_t number, uint32_t place, char was, char is>
struct At {};
template <typename A, uint32_t number, uint32_t place, char was, char is>
struct Left {
  A&& a;
  template <typename B>
  bool with(B&& b) const {
    return planted<number, place>() ? compared<is>(a, b) : compared<was>(a, b);
  }
  template <typename B>
  friend bool operator<(const Left& left, B&& b) { return left.with(b); }
  template <typename B>
  friend bool operator==(const Left& left, B&& b) { return left.with(b); }
};
template <typename A, uint32_t number, uint32_t place, char was, char is>
Left<A, number, place, was, is> operator<(A&& a, At<number, place, was, is>) { return {std::forward<A>(a)}; }
template <typename A, uint32_t number, uint32_t place, char was, char is>
Left<A, number, place, was, is> operator==(A&& a, At<number, place, was, is>) { return {std::forward<A>(a)}; }

template <uint32_t number, uint32_t place>
inline bool constant(bool value) { return planted<number, place>() ? !value : value; }
template <uint32_t number, uint32_t place, typename T>
inline T constant(T value) { return planted<number, place>() ? static_cast<T>(value + 1) : value; }

template <uint32_t number, uint32_t place, typename M>
inline std::unique_lock<M> lock(M& mutex) {
  return planted<number, place>() ? std::unique_lock<M>() : std::unique_lock<M>(mutex);
}

}  // namespace mutants
