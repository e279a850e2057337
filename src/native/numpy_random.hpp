// Integers as NumPy's global generator draws them: its `randint` takes longer for a batch of slots than copying the rows.
#pragma once
#include <nanobind/nanobind.h>

#include <bit>
#include <cstdint>
#include <vector>

#include "leaves.hpp"
#include "row_draw.hpp"

namespace engram {

// The interface of a NumPy bit generator, as the capsule of each of them has it (numpy/random/bitgen.h).
struct BitGenerator {
  void* state;
  uint64_t (*next_uint64)(void*);
  uint32_t (*next_uint32)(void*);
  double (*next_double)(void*);
  uint64_t (*next_raw)(void*);
};

// As `numpy.random.randint(0, bound)` of the legacy generator, whose numbers NumPy keeps for good: the lowest bits of 32, drawn
// again where they are too large. Of one number none is drawn.
inline uint64_t draw_below(const BitGenerator& from, uint64_t bound) {
  if (bound == 1) return 0;
  const uint64_t highest = bound - 1;
  const bool small = highest <= UINT32_MAX;
  const uint64_t mask = ~uint64_t{0} >> std::countl_zero(highest);
  for (;;) {
    const uint64_t bits = small ? from.next_uint32(from.state) : from.next_uint64(from.state);
    if (const uint64_t drawn = bits & mask; drawn <= highest) return drawn;
  }
}

// The slots of n rows of `envs` environments in `times` time slots: first all their times are drawn, then all environments.
// `generator`: a NumPy bit generator.
inline Tensor draw_slots_by_numpy(nb::object generator, size_t n, uint64_t times, uint64_t envs) {
  if (times < 1 || envs < 1) throw nb::value_error("there is nothing to draw from");
  const unsigned __int128 slots = static_cast<unsigned __int128>(times) * envs;
  if (slots > (uint64_t{1} << 62)) throw nb::value_error("there are not so many slots");
  static PyObject* const lock = PyUnicode_InternFromString("lock");
  static PyObject* const capsule = PyUnicode_InternFromString("capsule");
  const nb::object held = attribute(generator, capsule);
  const auto* bits = static_cast<const BitGenerator*>(PyCapsule_GetPointer(held.ptr(), "BitGenerator"));
  if (!bits) throw nb::python_error();
  return slots_out(n, [&](int64_t* out) {
    const HeldLock locked(attribute(generator, lock));
    for (size_t i = 0; i < n; ++i) out[i] = static_cast<int64_t>(draw_below(*bits, times));
    for (size_t i = 0; i < n; ++i)
      out[i] = out[i] * static_cast<int64_t>(envs) + static_cast<int64_t>(draw_below(*bits, envs));
  });
}

}  // namespace engram
