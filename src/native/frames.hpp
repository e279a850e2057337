// Stacks of frames: the last frames of a trajectory at each step, concatenated, in one copy; and rows of whole batches.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "leaves.hpp"

namespace engram {

// Larger copies release the GIL: they take a millisecond, as getting it back beside a busy thread may.
constexpr size_t kLongCopyBytes = size_t{8} << 20;

// A contiguous tensor [n, frame...]. False: it is not one that can be read as bytes.
inline bool frames_of(nb::handle from, TensorView& view) {
  if (!view.of(from.ptr()) || view.ndim < 1) return false;
  const auto [code, bits] = view.dtype;
  const bool is_real = code == kDLInt || code == kDLUInt || code == kDLBool;
  if (bits % 8 || !(is_real || code == kDLFloat || code == kDLBfloat || code == kDLComplex)) return false;
  bool is_contiguous = true;
  int64_t step = 1;
  for (int d = view.ndim - 1; d >= 0; --d) {
    is_contiguous &= !view.strides || view.shape[d] == 1 || view.strides[d] == step;
    step *= view.shape[d];
  }
  return (is_contiguous || step == 0) && (is_real || !is_lazy(from.ptr()));
}

inline size_t bytes_of_one(const TensorView& view) {
  size_t bytes = view.dtype.bits / 8;
  for (int d = 1; d < view.ndim; ++d) bytes *= static_cast<size_t>(view.shape[d]);
  return bytes;
}

inline bool are_alike(const TensorView& a, const TensorView& b) {
  return a.dtype == b.dtype && a.ndim == b.ndim && std::equal(a.shape + 1, a.shape + a.ndim, b.shape + 1);
}

// Row r of the result, [rows, frame...], has the `n` frames of `frames` [m, frame...] that end in frame `at[r]`, concatenated along
// `dim`, which counts from the end, oldest first; with `newest` [rows of a batch, frame...] the n - 1 frames that end there, and
// then frame `rows[r]`, or r, of `newest`. Instead of those before frame `first[r]` it has frame `first[r]`, or with `pad`, a tensor of one
// element, a frame of that. Returns None where the tensors are not plain ones on the CPU, contiguous and of one form.
inline std::optional<Tensor> stack_frames(nb::handle frames_in, nb::handle at_in, nb::handle first_in, size_t n, int64_t dim,
                                          nb::handle newest_in, nb::handle rows_in, nb::handle pad_in) {
  TensorView frames, newest, pad;
  const bool has_newest = !newest_in.is_none(), has_pad = !pad_in.is_none();
  if (!frames_of(frames_in, frames)) return std::nullopt;
  if (has_newest && !(frames_of(newest_in, newest) && are_alike(frames, newest))) return std::nullopt;
  const SlotsArg at(at_in), first(first_in);
  std::optional<SlotsArg> rows;
  if (has_newest && !rows_in.is_none()) rows.emplace(rows_in);
  if (first.n != at.n || (rows && rows->n != at.n)) throw nb::value_error("not as many frames as rows");
  if (at.n && n > kMostBytes / sizeof(void*) / at.n) throw std::bad_alloc();
  if (n < 1 || dim >= 0 || dim <= -frames.ndim) throw nb::value_error("frames have no such dimension");
  const size_t item = frames.dtype.bits / 8;
  if (has_pad && !(pad.of(pad_in.ptr()) && pad.dtype == frames.dtype && pad.ndim == 0))
    throw nb::value_error("padding is a single value of the frames' dtype");

  std::vector<int64_t> shape(frames.shape + 1, frames.shape + frames.ndim);
  const size_t split = shape.size() - static_cast<size_t>(-dim);
  size_t outer = 1, run = item;  // a frame is `outer` runs of bytes, which lie between those of other frames
  for (size_t d = 0; d < shape.size(); ++d) (d < split ? outer : run) *= static_cast<size_t>(shape[d]);
  const size_t bytes = outer * run;
  if (bytes && at.n * n > kMostBytes / bytes) throw std::bad_alloc();
  shape[split] *= static_cast<int64_t>(n);

  const size_t past = n - has_newest;
  const int64_t total = frames.shape[0];
  std::vector<uint8_t> padding;
  if (has_pad) {
    padding.resize(bytes);
    for (size_t i = 0; i < bytes; i += item) std::memcpy(padding.data() + i, pad.data, item);
  }
  // All places are looked up before the GIL is released.
  std::vector<const uint8_t*> sources;
  sources.reserve(at.n * n);
  for (size_t r = 0; r < at.n; ++r) {
    const int64_t last = at.data[r], begin = first.data[r];
    if (begin < 0 || begin > last || last >= total) throw nb::index_error("a frame outside of those given");
    for (size_t k = 0; k < past; ++k) {
      const int64_t place = last - static_cast<int64_t>(past - 1 - k);
      const bool is_before = place < begin;
      sources.push_back(is_before && has_pad ? padding.data()
                                             : frames.data + static_cast<size_t>(is_before ? begin : place) * bytes);
    }
    if (!has_newest) continue;
    const int64_t row = rows ? rows->data[r] : static_cast<int64_t>(r);
    if (row < 0 || row >= newest.shape[0]) throw nb::index_error("a newest frame outside of those given");
    sources.push_back(newest.data + static_cast<size_t>(row) * bytes);
  }

  OutBlock block;
  const auto lead = static_cast<int64_t>(at.n);
  block.plan(frames.dtype, &lead, 1, shape, sources.size() * bytes);
  block.take();
  uint8_t* out = block.data(0);
  maybe_without_gil(sources.size() * bytes > kLongCopyBytes, [&] {
    for (size_t r = 0; run && r < at.n; ++r, out += n * bytes)  // frames of no numbers may have no memory
      for (size_t k = 0; k < n; ++k)
        for (size_t o = 0; o < outer; ++o) std::memcpy(out + (o * n + k) * run, sources[r * n + k] + o * run, run);
  });
  return block.make(0);
}

// The last and the first row of each slice, int64 [slices], by the number of each row's slice.
inline std::pair<Tensor, Tensor> slice_bounds(nb::handle ids_in) {
  const SlotsArg ids(ids_in);
  std::vector<int64_t> last;
  for (size_t r = 0; r < ids.n; ++r)
    if (r + 1 == ids.n || ids.data[r + 1] != ids.data[r]) last.push_back(static_cast<int64_t>(r));
  const auto copied = [&](int64_t* out) { std::copy(last.begin(), last.end(), out); };
  const auto begins = [&](int64_t* out) {
    for (size_t i = 0; i < last.size(); ++i) out[i] = i ? last[i - 1] + 1 : 0;
  };
  return {slots_out(last.size(), copied), slots_out(last.size(), begins)};
}

// Copies certain rows of all tensors [m, ...]. Returns None where one is not a plain tensor on the CPU, contiguous.
inline std::optional<nb::list> take_rows(nb::list tensors, nb::handle rows_in) {
  std::vector<TensorView> views(nb::len(tensors));
  for (size_t k = 0; k < views.size(); ++k)
    if (!frames_of(tensors[k], views[k])) return std::nullopt;
  const SlotsArg rows(rows_in);  // after the tensors: rows of those of another device lie there, too
  const auto lead = static_cast<int64_t>(rows.n);
  std::vector<std::vector<int64_t>> shapes;
  int64_t shortest = INT64_MAX;
  size_t total = 0;
  for (const TensorView& view : views) {
    shortest = std::min(shortest, view.shape[0]);
    shapes.emplace_back(view.shape + 1, view.shape + view.ndim);
    const size_t bytes = bytes_of_one(view);
    if (bytes && rows.n > (kMostBytes - total) / bytes) throw std::bad_alloc();
    total += rows.n * bytes;
  }
  std::vector<size_t> at(rows.n);
  for (size_t r = 0; r < rows.n; ++r) {
    if (rows.data[r] < 0 || rows.data[r] >= shortest) throw nb::index_error("a row outside of those given");
    at[r] = static_cast<size_t>(rows.data[r]);
  }
  OutBlock block(views.size());
  for (size_t k = 0; k < views.size(); ++k)
    block.plan(views[k].dtype, &lead, 1, shapes[k], rows.n * bytes_of_one(views[k]));
  nb::list taken;
  if (views.empty()) return taken;
  block.take();
  maybe_without_gil(total > kLongCopyBytes, [&] {
    for (size_t k = 0; k < views.size(); ++k) {
      const size_t bytes = bytes_of_one(views[k]);
      for (size_t r = 0; bytes && r < at.size(); ++r) std::memcpy(block.data(k) + r * bytes, views[k].data + at[r] * bytes, bytes);
    }
  });
  for (size_t k = 0; k < views.size(); ++k) taken.append(block.make(k));
  return taken;
}

}  // namespace engram
