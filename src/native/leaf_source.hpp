// Where a leaf of a batch of steps lies in memory, and where in a row.
#pragma once
#include <cstddef>
#include <cstdint>

namespace engram {

// Element (time, env) of a leaf lies at array + time * stride + env * env_stride.
struct LeafSource {
  size_t offset, bytes;
  const uint8_t* array;
  ptrdiff_t stride, env_stride;
  const uint8_t* at(uint64_t time, uint64_t env) const {
    return array + static_cast<ptrdiff_t>(time) * stride + static_cast<ptrdiff_t>(env) * env_stride;
  }
};

}  // namespace engram
