// The types of numbers, as DLPack names them.
#pragma once
#include <cstdint>

#include "third_party/dlpack.h"

namespace engram {

struct DType {
  uint8_t code, bits;
  bool operator==(const DType& o) const { return code == o.code && bits == o.bits; }
};

}  // namespace engram
