// Blocks of restored rows: put in their places while nobody sees them.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>

#include "store.hpp"

namespace engram {

// Payloads [strands, steps], with any distance between two strands and between two steps.
struct RowBlock {
  const uint8_t* data;
  uint64_t steps;
  ptrdiff_t per_strand, per_step;
};

// Rows of a file are made in a small buffer and written to it. Stores through the map would take a fault for each page
// and have its old bytes read or zeroed first; a write of whole pages needs neither. On Linux what is written to a file
// and what its maps show are the same pages.
class RowRestorer {
 public:
  static constexpr size_t kPieceBytes = 1 << 20;  // still cached when written; smaller ones cost the file system more

  explicit RowRestorer(Store& store) : store_(store), stride_(store.shape().row_stride) {
    per_piece_ = std::max<uint64_t>(1, kPieceBytes / stride_);
    const uint64_t whole_pages = kPage / std::gcd(stride_, uint64_t{kPage});  // so many rows end where a page ends
    if (per_piece_ > whole_pages) per_piece_ -= per_piece_ % whole_pages;
    // Zeros once: rows lie at the same places in each piece, and nothing is ever put between them.
    // Without memory for them rows go through the map: a restore that ended here would have cost those of before.
    if (store.file_is_there()) piece_.reset(new (std::nothrow) uint8_t[per_piece_ * stride_]());
  }

  // Rows with write numbers from `start` on, whose seams have been set, at most as many as the lane has room for. Returns 0, or the error number
  // of a write that failed.
  int put(uint64_t lane, uint64_t start, const RowBlock& block) {
    const Shape& s = store_.shape();
    term_ = static_cast<uint32_t>(store_.lanes.lane(lane).term.load());
    lane_ = lane;
    for (uint64_t strand = 0; strand < s.strands; ++strand) {
      const uint8_t* from = block.data + static_cast<ptrdiff_t>(strand) * block.per_strand;
      for (uint64_t done = 0; done < block.steps;) {
        const uint64_t number = start + done, slot = number % s.lane_capacity;
        const uint64_t at = store_.physical(lane, strand, slot);
        const uint64_t n = std::min({block.steps - done, s.lane_capacity - slot, per_piece_ - at % per_piece_});
        if (const int error = put_piece(at, number, n, from, block.per_step)) return error;
        from += static_cast<ptrdiff_t>(n) * block.per_step, done += n;
      }
    }
    return 0;
  }

 private:
  // Consecutive rows from the physical row `at` on.
  int put_piece(uint64_t at, uint64_t number, uint64_t n, const uint8_t* from, ptrdiff_t per_step) {
    uint8_t* const rows = piece_ ? piece_.get() : store_.row(at);
    for (uint64_t i = 0; i < n; ++i) {
      uint8_t* row = rows + i * stride_;
      std::memcpy(row, from + static_cast<ptrdiff_t>(i) * per_step, store_.shape().payload_bytes);
      if (!store_.has_trailer()) continue;
      const uint64_t seam = store_.seam(lane_, number + i) ? Trailer::kSeam : 0;
      store_.seal(row, at + i, (number + i) | seam, term_);
    }
    return piece_ ? write(rows, n * stride_, store_.shape().rows_offset + at * stride_) : 0;
  }
  int write(const uint8_t* from, size_t bytes, uint64_t offset) const {
    while (bytes > 0) {
      const ssize_t done = ::pwrite(store_.fd(), from, bytes, static_cast<off_t>(offset));
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) return done < 0 ? errno : EIO;
      from += done, bytes -= static_cast<size_t>(done), offset += static_cast<uint64_t>(done);
    }
    return 0;
  }

  Store& store_;
  uint64_t stride_, per_piece_, lane_ = 0;
  uint32_t term_ = 0;
  std::unique_ptr<uint8_t[]> piece_;  // none: rows are stored where they belong
};

}  // namespace engram
