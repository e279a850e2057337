// Numbers of one dtype as those of another one, as numpy's `astype` converts them.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dtypes.hpp"

namespace engram {

// Converts n numbers. False: one of the dtypes has no C++ type, or floats would become integers, which C++ does not define for all
// of them.
bool cast_numbers(DType from_type, const uint8_t* from, DType to_type, uint8_t* to, size_t n);

}  // namespace engram
