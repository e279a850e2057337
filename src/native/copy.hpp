// Moving leaves between packed rows and arrays: all leaves of a block of rows while its cache lines are warm.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace engram {

constexpr size_t kBlockRows = 32;
constexpr size_t kPrefetchBytes = 1024;  // of each row; the processor follows longer ones by itself

// One leaf: where it sits in a row, and an array with a stride for each row.
struct LeafCopy {
  size_t offset;
  size_t bytes;
  uint8_t* array;
  ptrdiff_t stride;
};

template <size_t N>
inline void gather_fixed(const uint8_t* const* rows, size_t n, const LeafCopy& leaf) {
  uint8_t* to = leaf.array;
  for (size_t i = 0; i < n; ++i, to += leaf.stride) std::memcpy(to, rows[i] + leaf.offset, N);
}
template <size_t N>
inline void scatter_fixed(uint8_t* const* rows, size_t n, const LeafCopy& leaf) {
  const uint8_t* from = leaf.array;
  for (size_t i = 0; i < n; ++i, from += leaf.stride) std::memcpy(rows[i] + leaf.offset, from, N);
}

using GatherLoop = void (*)(const uint8_t* const*, size_t, const LeafCopy&);
using ScatterLoop = void (*)(uint8_t* const*, size_t, const LeafCopy&);
template <size_t... N>
constexpr std::array<GatherLoop, sizeof...(N)> gather_loops(std::index_sequence<N...>) {
  return {&gather_fixed<N + 1>...};
}
template <size_t... N>
constexpr std::array<ScatterLoop, sizeof...(N)> scatter_loops(std::index_sequence<N...>) {
  return {&scatter_fixed<N + 1>...};
}
constexpr size_t kFixedSizes = 32;  // leaves of 1 to 32 bytes have a loop of their own
inline constexpr auto kGatherLoops = gather_loops(std::make_index_sequence<kFixedSizes>{});
inline constexpr auto kScatterLoops = scatter_loops(std::make_index_sequence<kFixedSizes>{});

template <int Write>
inline void prefetch_rows(const uint8_t* const* rows, size_t n, size_t row_bytes) {
  const size_t reach = std::min(row_bytes, kPrefetchBytes);
  for (size_t i = 0; i < n; ++i) {
    const uint8_t* last = rows[i] + reach - 1;
    for (const uint8_t* p = rows[i]; p < last; p += 64) __builtin_prefetch(p, Write, 3);
    __builtin_prefetch(last, Write, 3);
  }
}

// rows[i] -> leaf.array[i], every leaf.
inline void gather_rows(const uint8_t* const* rows, size_t n, size_t row_bytes, LeafCopy* leaves, size_t n_leaves) {
  prefetch_rows<0>(rows, std::min(n, kBlockRows), row_bytes);
  for (size_t at = 0; at < n; at += kBlockRows) {
    const size_t block = std::min(kBlockRows, n - at);
    if (at + block < n) prefetch_rows<0>(rows + at + block, std::min(kBlockRows, n - at - block), row_bytes);
    for (size_t k = 0; k < n_leaves; ++k) {
      LeafCopy& leaf = leaves[k];
      if (leaf.bytes == 0) continue;
      if (leaf.bytes <= kFixedSizes)
        kGatherLoops[leaf.bytes - 1](rows + at, block, leaf);
      else
        for (size_t i = 0; i < block; ++i)
          std::memcpy(leaf.array + static_cast<ptrdiff_t>(i) * leaf.stride, rows[at + i] + leaf.offset, leaf.bytes);
      leaf.array += static_cast<ptrdiff_t>(block) * leaf.stride;
    }
  }
}

// leaf.array[i] -> rows[i], every leaf.
inline void scatter_rows(uint8_t* const* rows, size_t n, LeafCopy* leaves, size_t n_leaves) {
  for (size_t at = 0; at < n; at += kBlockRows) {
    const size_t block = std::min(kBlockRows, n - at);
    for (size_t k = 0; k < n_leaves; ++k) {
      LeafCopy& leaf = leaves[k];
      if (leaf.bytes == 0) continue;
      if (leaf.bytes <= kFixedSizes)
        kScatterLoops[leaf.bytes - 1](rows + at, block, leaf);
      else
        for (size_t i = 0; i < block; ++i)
          std::memcpy(rows[at + i] + leaf.offset, leaf.array + static_cast<ptrdiff_t>(i) * leaf.stride, leaf.bytes);
      leaf.array += static_cast<ptrdiff_t>(block) * leaf.stride;
    }
  }
}

}  // namespace engram
