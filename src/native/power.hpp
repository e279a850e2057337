// Powers whose bits are the same on every machine: only explicit operations of IEEE 754, no function of the machine's libm, and
// no product that is rounded together with a sum (the core is compiled with -ffp-contract=off).
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "wide_vectors.hpp"

namespace engram {

// x to the power y, for x >= 0 (infinity too) and a finite y other than 0, as 2^(y log2(x)): within 2 ulp where |y| <= 1,
// beyond that within 2 |y|. Computes `kNumbers` at a time, because compilers do not vectorise this by themselves; that number
// changes no bit.
template <size_t kNumbers>
class Power {
 public:
  typedef double Numbers __attribute__((vector_size(kNumbers * sizeof(double))));

  explicit Power(double y)
      : y_(y), high_(std::bit_cast<double>(std::bit_cast<uint64_t>(y) & ~uint64_t{0x7FF})), low_(y - high_),
        of_infinity_(y > 0 ? kInfinity : 0), of_zero_(y > 0 ? 0 : kInfinity) {}

  [[gnu::always_inline]] void raise(Numbers& x) const {
    const Numbers none{};
    // x = a 2^-(offset - 2^52 - 1023) with a normal a. The bits of a subnormal x are read as an integer, because a thread may
    // be set to treat subnormal numbers as 0.
    const Mask subnormal = x < std::numeric_limits<double>::min();
    const Numbers a = subnormal ? (Numbers)((Bits)x | kTwo52) - 0x1p52 : x;
    const Numbers offset = subnormal ? none + (0x1p52 + 1023 + 1074) : none + (0x1p52 + 1023);
    // a = m 2^e, with m from sqrt(1/2) to sqrt(2).
    const Bits bits = (Bits)a, k = (bits + (kOne - kRootOfHalf)) >> 52;
    const Numbers m = (Numbers)(bits - (k << 52) + kOne), e = (Numbers)(k | kTwo52) - offset;
    // log2(m) = 2 / ln(2) artanh(s), by a minimax polynomial.
    const Numbers s = (m - 1) / (m + 1), z = s * s, w = z * z;
    const Numbers even =
        0x1.ec709dc3a04b8p-1 + w * (0x1.a61762e4f17b8p-2 + w * (0x1.0ca25c64cc3b4p-2 + w * 0x1.b74de360ff1aap-3));
    const Numbers odd = 0x1.2776c50eda765p-1 + w * (0x1.484af63a3310dp-2 + w * 0x1.c43f0e37ce354p-3);
    const Numbers log = s * 0x1.71547652b82fep+1 + s * z * (even + z * odd);
    // y log2(x) = n + f with a whole n. `high_` has so few bits that its product with e is exact.
    const Numbers product = high_ * e, rest = low_ * e + y_ * log, exponent = product + rest;
    const Mask tiny = exponent < -kMost, large = exponent > kMost;
    const Numbers within = tiny ? none - kMost : large ? none + kMost : exponent;
    const Numbers n = (within + kRound) - kRound, f = (product - n) + rest;
    // 2^f, by a minimax polynomial.
    const Numbers g = f * f;
    const Numbers evens =
        0x1.ebfbdff82c5a5p-3 +
        g * (0x1.3b2ab6fb9ffc9p-7 + g * (0x1.4309130f1e85dp-13 + g * (0x1.62bfc6ed61369p-20 + g * 0x1.e61c7c8f0862ap-28)));
    const Numbers odds =
        0x1.c6b08d704a0cfp-5 +
        g * (0x1.5d87fe78a1bd0p-10 + g * (0x1.ffcbfc79810d2p-17 + g * (0x1.b524d22d5cf0dp-24 + g * 0x1.ea13460dfc2cep-32)));
    const Numbers fraction = 1 + f * (0x1.62e42fefa39efp-1 + f * (evens + f * odds));
    // Times 2^n in two steps, of which only the second one may round.
    const Numbers half = (n * 0.5 + kRound) - kRound;
    const Bits first = (Bits)(half + (kRound + 1023)), second = (Bits)(n - half + (kRound + 1023));
    const Numbers scaled = fraction * (Numbers)(first << 52) * (Numbers)(second << 52);
    const Numbers finite = tiny ? none : large ? none + kInfinity : scaled;
    const Mask zero = a == 0, infinite = x == kInfinity;
    x = zero ? none + of_zero_ : infinite ? none + of_infinity_ : finite;
  }

 private:
  typedef int64_t Mask __attribute__((vector_size(kNumbers * sizeof(int64_t))));
  typedef uint64_t Bits __attribute__((vector_size(kNumbers * sizeof(uint64_t))));
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  static constexpr double kMost = 1100;       // 2 to a larger power is 0 or infinite
  static constexpr double kRound = 0x1.8p52;  // adding it rounds to a whole number
  static constexpr uint64_t kTwo52 = 0x4330000000000000, kOne = 0x3FF0000000000000, kRootOfHalf = 0x3FE6A09E667F3BCD;
  double y_, high_, low_, of_infinity_, of_zero_;
};

// Each x[i] >= 0 becomes x[i] to the power y, which is finite. Anything to the power 0 is 1.
template <size_t kNumbers>
[[gnu::always_inline]] inline void raise_numbers(double* x, size_t n, double y) {
  if (y == 0) return void(std::fill_n(x, n, 1.0));
  const Power<kNumbers> power(y);
  size_t i = 0;
  for (; i + kNumbers <= n; i += kNumbers) {
    typename Power<kNumbers>::Numbers numbers;
    std::memcpy(&numbers, x + i, sizeof numbers);
    power.raise(numbers);
    std::memcpy(x + i, &numbers, sizeof numbers);
  }
  if (i == n) return;
  typename Power<kNumbers>::Numbers numbers{};
  std::memcpy(&numbers, x + i, (n - i) * sizeof(double));
  power.raise(numbers);
  std::memcpy(x + i, &numbers, (n - i) * sizeof(double));
}
inline double raised(double x, double y) {
  if (y == 0) return 1;
  Power<2>::Numbers numbers{x, 1};
  Power<2>(y).raise(numbers);
  return numbers[0];
}
#ifdef ENGRAM_CHOOSES_VECTORS
__attribute__((target("default"))) inline void raise_to(double* x, size_t n, double y) { raise_numbers<2>(x, n, y); }
__attribute__((target("avx2"))) inline void raise_to(double* x, size_t n, double y) { raise_numbers<4>(x, n, y); }
__attribute__((target("arch=x86-64-v4"))) inline void raise_to(double* x, size_t n, double y) { raise_numbers<8>(x, n, y); }
#else
inline void raise_to(double* x, size_t n, double y) { raise_numbers<2>(x, n, y); }
#endif

}  // namespace engram
