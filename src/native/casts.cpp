// Numbers of one dtype as those of another one, as numpy's `astype` converts them.
#include "casts.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace engram {

template <typename T>
struct NumberType {
  using type = T;
};

// Calls `with(NumberType<T>)` for the C++ type of a dtype; false: there is none here.
template <typename With>
static bool with_number_type(DType d, With&& with) {
  const auto of_bits = [&]<typename T8, typename T16, typename T32, typename T64>() {
    switch (d.bits) {
      case 8: return with(NumberType<T8>{});
      case 16: return with(NumberType<T16>{});
      case 32: return with(NumberType<T32>{});
      case 64: return with(NumberType<T64>{});
      default: return false;
    }
  };
  if (d == DType{kDLBool, 8}) return with(NumberType<bool>{});
  if (d.code == kDLInt) return of_bits.template operator()<int8_t, int16_t, int32_t, int64_t>();
  if (d.code == kDLUInt) return of_bits.template operator()<uint8_t, uint16_t, uint32_t, uint64_t>();
  if (d == DType{kDLFloat, 32}) return with(NumberType<float>{});
  return d == DType{kDLFloat, 64} && with(NumberType<double>{});
}

// Neither memory needs to be aligned. A bool is any byte but 0.
template <typename From, typename To>
static void cast_each(const uint8_t* from, uint8_t* to, size_t n) {
  using Stored = std::conditional_t<std::is_same_v<From, bool>, uint8_t, From>;
  for (size_t i = 0; i < n; ++i, from += sizeof(Stored), to += sizeof(To)) {
    Stored x;
    std::memcpy(&x, from, sizeof x);
    To y;
    if constexpr (std::is_same_v<From, bool> || std::is_same_v<To, bool>)
      y = static_cast<To>(x != 0);
    else
      y = static_cast<To>(x);
    std::memcpy(to, &y, sizeof y);
  }
}

bool cast_numbers(DType from_type, const uint8_t* from, DType to_type, uint8_t* to, size_t n) {
  return with_number_type(from_type, [&]<typename From>(NumberType<From>) {
    return with_number_type(to_type, [&]<typename To>(NumberType<To>) {
      if constexpr (std::is_floating_point_v<From> && !std::is_floating_point_v<To> && !std::is_same_v<To, bool>) return false;
      else return cast_each<From, To>(from, to, n), true;
    });
  });
}

}  // namespace engram
