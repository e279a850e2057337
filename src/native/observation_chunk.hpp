// Rows of a chunk of a checkpoint with each observation once, as docs/format.md describes them.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "leaves.hpp"

namespace engram {

// The rows of a chunk, environment after environment, and where their observations lie.
class ObservationChunk {
 public:
  // X and next.X in a row: `frames` frames each, the oldest first.
  struct Key {
    uint64_t x, next, frames, frame_bytes;
    uint64_t bytes() const { return frames * frame_bytes; }
  };
  struct Run {
    uint64_t offset, bytes;
  };
  // The byte that a row has for each key: how X is made, and above these bits next.X.
  enum X : uint8_t { kMoved, kEqual, kZero, kGiven };
  static constexpr uint8_t kXBits = 2, kXMask = 3;
  // next.X is X of a later row; or 1 + s: X moved by s frames, and s frames that are given.
  static constexpr uint8_t kLater = 0;
  static constexpr uint64_t kMostFrames = 15;

  ObservationChunk(uint64_t envs, uint64_t steps, uint64_t row_bytes, uint64_t ahead, const std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>>& keys)
      : envs_(envs), steps_(steps), row_bytes_(row_bytes), ahead_(ahead) {
    if (!envs || !steps || !ahead || keys.empty()) throw std::invalid_argument("a chunk has rows, and they have observations");
    if (row_bytes > kMostBytes / envs / steps / (2 * kMostFrames)) throw std::bad_alloc();
    std::vector<Run> taken;
    for (const auto& [x, next, frames, frame_bytes] : keys) {
      if (frames < 1 || frames > kMostFrames || frame_bytes < 1 || frame_bytes > row_bytes) throw std::invalid_argument("an observation has 1 to 15 frames of a byte or more");
      keys_.push_back({x, next, frames, frame_bytes});
      for (const uint64_t at : {x, next}) taken.push_back({at, frames * frame_bytes});
    }
    std::ranges::sort(taken, {}, &Run::offset);
    uint64_t at = 0;
    for (const Run& run : taken) {
      if (run.offset < at || run.offset > row_bytes || run.bytes > row_bytes - run.offset) throw std::invalid_argument("observations lie side by side in a row");
      if (run.offset > at) rest_.push_back({at, run.offset - at});
      at = run.offset + run.bytes;
    }
    if (at < row_bytes) rest_.push_back({at, row_bytes - at});
    for (const Run& run : rest_) rest_bytes_ += run.bytes;
  }

  uint64_t rows() const { return envs_ * steps_; }
  uint64_t envs() const { return envs_; }
  uint64_t steps() const { return steps_; }
  uint64_t row_bytes() const { return row_bytes_; }
  const std::vector<Key>& keys() const { return keys_; }

 protected:
  uint64_t envs_, steps_, row_bytes_, ahead_, rest_bytes_ = 0;
  std::vector<Key> keys_;
  std::vector<Run> rest_;  // of a row: what is no observation
};

// Takes the rows of a chunk piece by piece, and has its sections in the end.
class ObservationEncoder : public ObservationChunk {
 public:
  using Bytes = std::unique_ptr<uint8_t[]>;
  // Of one key.
  struct Sections {
    Bytes kinds, newest;
    std::vector<std::vector<uint8_t>> given;  // of each environment
  };

  template <class... Form>
  explicit ObservationEncoder(Form&&... form)
      : ObservationChunk(std::forward<Form>(form)...), rest(new uint8_t[rows() * rest_bytes_]), kept_rows_(std::min(ahead_, steps_)),
        kept_(new uint8_t[envs_ * kept_rows_ * row_bytes_]) {
    for (const Key& key : keys_) {
      sections.push_back({Bytes(new uint8_t[rows()]), Bytes(new uint8_t[rows() * key.frame_bytes]), {}});
      sections.back().given.resize(envs_);
    }
  }

  uint64_t rest_bytes() const { return rows() * rest_bytes_; }
  bool is_whole() const { return done_ == steps_; }
  // Rows [envs, n, row bytes] that follow those before them.
  void append(const uint8_t* piece, uint64_t n) {
    if (n > steps_ - done_) throw std::invalid_argument("more rows than the chunk has");
    piece_ = piece, piece_steps_ = n;
    for (uint64_t env = 0; env < envs_; ++env)
      for (uint64_t w = done_; w < done_ + n; ++w) {
        copy_rest(env, w);
        for (size_t k = 0; k < keys_.size(); ++k) {
          put_x(k, env, w);
          if (w >= ahead_) put_next(k, env, w - ahead_, w);
        }
      }
    for (uint64_t env = 0; env < envs_; ++env)
      for (uint64_t w = done_ + n - std::min(n, kept_rows_); w < done_ + n; ++w) std::memcpy(kept(env, w), row(env, w), row_bytes_);
    done_ += n, piece_ = nullptr, piece_steps_ = 0;
    if (is_whole()) put_last();
  }

  const Bytes rest;
  std::vector<Sections> sections;

 private:
  uint8_t* kept(uint64_t env, uint64_t w) const { return kept_.get() + (env * kept_rows_ + w % kept_rows_) * row_bytes_; }
  const uint8_t* row(uint64_t env, uint64_t w) const {
    return w < done_ ? kept(env, w) : piece_ + (env * piece_steps_ + (w - done_)) * row_bytes_;
  }
  static bool same(const uint8_t* a, const uint8_t* b, uint64_t bytes) { return std::memcmp(a, b, bytes) == 0; }

  void copy_rest(uint64_t env, uint64_t w) const {
    uint8_t* to = rest.get() + (env * steps_ + w) * rest_bytes_;
    for (const Run& run : rest_) std::memcpy(to, row(env, w) + run.offset, run.bytes), to += run.bytes;
  }
  void put_x(size_t k, uint64_t env, uint64_t w) {
    const Key& key = keys_[k];
    const uint64_t at = env * steps_ + w, older = (key.frames - 1) * key.frame_bytes;
    const uint8_t* const x = row(env, w) + key.x;
    std::memcpy(sections[k].newest.get() + at * key.frame_bytes, x + older, key.frame_bytes);
    X kind = kGiven;
    if (w > 0 && same(x, row(env, w - 1) + key.x + key.frame_bytes, older)) kind = kMoved;
    else if (repeats(x, older, x + older, key.frame_bytes)) kind = kEqual;
    else if (std::all_of(x, x + older, [](uint8_t b) { return b == 0; })) kind = kZero;
    else give(k, env, x, older);
    sections[k].kinds[at] = kind;
  }
  static bool repeats(const uint8_t* frames, uint64_t bytes, const uint8_t* frame, uint64_t frame_bytes) {
    for (uint64_t b = 0; b < bytes; b += frame_bytes)
      if (!same(frames + b, frame, frame_bytes)) return false;
    return true;
  }
  // `later`: of the row whose X is mostly next.X of row w.
  void put_next(size_t k, uint64_t env, uint64_t w, uint64_t later) {
    const Key& key = keys_[k];
    if (!same(row(env, w) + key.next, row(env, later) + key.x, key.bytes())) put_moved(k, env, w);
  }
  void put_moved(size_t k, uint64_t env, uint64_t w) {
    const Key& key = keys_[k];
    const uint8_t *const x = row(env, w) + key.x, *const next = row(env, w) + key.next;
    uint64_t by = 0;
    while (by < key.frames && !same(next, x + by * key.frame_bytes, (key.frames - by) * key.frame_bytes)) ++by;
    give(k, env, next + (key.frames - by) * key.frame_bytes, by * key.frame_bytes);
    sections[k].kinds[env * steps_ + w] |= static_cast<uint8_t>((1 + by) << kXBits);
  }
  // The newest rows of each environment, which none follows.
  void put_last() {
    for (uint64_t env = 0; env < envs_; ++env)
      for (uint64_t w = steps_ - kept_rows_; w < steps_; ++w)
        for (size_t k = 0; k < keys_.size(); ++k) put_moved(k, env, w);
  }
  void give(size_t k, uint64_t env, const uint8_t* frames, uint64_t bytes) {
    std::vector<uint8_t>& given = sections[k].given[env];
    given.insert(given.end(), frames, frames + bytes);
  }

  uint64_t kept_rows_, done_ = 0, piece_steps_ = 0;
  const Bytes kept_;  // the last rows of the pieces before
  const uint8_t* piece_ = nullptr;
};

// Gives any rows of a chunk's content, of which nothing is believed: all that says where a frame lies is checked when this is made.
class ObservationDecoder : public ObservationChunk {
 public:
  // `given`: of each key the number of its frames. Throws std::invalid_argument where these are no rows.
  template <class... Form>
  ObservationDecoder(const uint8_t* content, uint64_t bytes, const std::vector<uint64_t>& given, Form&&... form)
      : ObservationChunk(std::forward<Form>(form)...), rest_at_(content) {
    if (given.size() != keys_.size()) throw std::invalid_argument("it says how many frames are given for other keys");
    uint64_t at = rows() * rest_bytes_;
    for (size_t k = 0; k < keys_.size(); ++k) {
      const uint64_t frame_bytes = keys_[k].frame_bytes;
      sections_.push_back({content + at, content + at + rows(), content + at + rows() * (1 + frame_bytes), {}, {}});
      at += rows() * (1 + frame_bytes) + given[k] * frame_bytes;
    }
    if (at != bytes) throw std::invalid_argument("its content is not as long as its details say");
    // Too high a number could still fit, modulo 2^64: of each key it is compared with what the rows need before the next key is looked at.
    for (size_t k = 0; k < keys_.size(); ++k) find_given(keys_[k], sections_[k], given[k]);
  }

  // Rows [start, stop) of each environment.
  void read(uint64_t start, uint64_t stop, uint8_t* out) const {
    for (uint64_t env = 0; env < envs_; ++env)
      for (uint64_t w = start; w < stop; ++w, out += row_bytes_) {
        const uint64_t row = env * steps_ + w;
        const uint8_t* from = rest_at_ + row * rest_bytes_;
        for (const Run& run : rest_) std::memcpy(out + run.offset, from, run.bytes), from += run.bytes;
        for (size_t k = 0; k < keys_.size(); ++k) {
          copy_x(keys_[k], sections_[k], row, 0, out + keys_[k].x);
          copy_next(keys_[k], sections_[k], row, out + keys_[k].next);
        }
      }
  }

 private:
  struct Sections {
    const uint8_t *kinds, *newest, *given;
    std::vector<uint64_t> x, next;  // of each row: the first frame that is given for it
  };

  // The frames are given in the order in which `ObservationEncoder` comes to them.
  void find_given(const Key& key, Sections& its, uint64_t count) const {
    its.x.resize(rows()), its.next.resize(rows());
    uint64_t found = 0;
    for (uint64_t env = 0; env < envs_; ++env)
      for (uint64_t w = 0; w < steps_ + std::min(ahead_, steps_); ++w) {
        const uint64_t row = env * steps_ + w;
        if (w < steps_) {
          const uint8_t x = its.kinds[row] & kXMask;
          if (x == kMoved && w == 0) throw std::invalid_argument("a first observation has no row before it");
          its.x[row] = found;
          if (x == kGiven) found += key.frames - 1;
        }
        const uint64_t earlier = w < steps_ ? w - ahead_ : w - std::min(ahead_, steps_);
        if (w < steps_ && w < ahead_) continue;
        const uint8_t next = its.kinds[env * steps_ + earlier] >> kXBits;
        if (next == kLater && w >= steps_) throw std::invalid_argument("a last observation has no row behind it");
        if (next > 1 + key.frames) throw std::invalid_argument("an observation has moved by more frames than it has");
        its.next[env * steps_ + earlier] = found;
        if (next != kLater) found += next - 1u;
      }
    if (found != count) throw std::invalid_argument("not as many frames are given as its rows need");
  }
  // X without its oldest frames.
  void copy_x(const Key& key, const Sections& its, uint64_t row, uint64_t without, uint8_t* to) const {
    const uint64_t f = key.frame_bytes;
    uint64_t left = key.frames, run = 0;  // frames to copy are those up to `left`
    const auto put = [&](const uint8_t* frame) {
      std::memcpy(to + (--left - without) * f, frame, f);
    };
    put(its.newest + row * f);
    while (left > without && (its.kinds[row] & kXMask) == kMoved) put(its.newest + --row * f), ++run;
    if (left <= without) return;
    const uint8_t kind = its.kinds[row] & kXMask;
    if (kind == kZero) std::memset(to, 0, (left - without) * f);
    else if (kind == kGiven) std::memcpy(to, its.given + (its.x[row] + run + without) * f, (left - without) * f);
    else while (left > without) put(its.newest + row * f);
  }
  void copy_next(const Key& key, const Sections& its, uint64_t row, uint8_t* to) const {
    const uint8_t next = its.kinds[row] >> kXBits;
    if (next == kLater) return copy_x(key, its, row + ahead_, 0, to);
    const uint64_t by = next - 1u;
    if (by < key.frames) copy_x(key, its, row, by, to);
    std::memcpy(to + (key.frames - by) * key.frame_bytes, its.given + its.next[row] * key.frame_bytes, by * key.frame_bytes);
  }

  const uint8_t* rest_at_;
  std::vector<Sections> sections_;
};

using ChunkBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ChunkKeys = std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>>;

// A decoder and the content that it reads.
struct DecodedChunk {
  ChunkBytes content;
  ObservationDecoder decoder;
};

// What a chunk's file holds, section after section, in memory of the encoder `self`; and how many frames are given for each key.
inline std::pair<nb::list, std::vector<uint64_t>> chunk_sections(nb::handle self) {
  ObservationEncoder& encoder = nb::cast<ObservationEncoder&>(self);
  if (!encoder.is_whole()) throw nb::value_error("rows of the chunk are missing");
  nb::list blocks;
  std::vector<uint64_t> given;
  const auto add = [&](const uint8_t* data, uint64_t bytes) {
    const size_t shape[1] = {bytes};
    if (bytes) blocks.append(nb::cast(nb::ndarray<nb::numpy, const uint8_t>(data, 1, shape, self)));
  };
  add(encoder.rest.get(), encoder.rest_bytes());
  for (size_t k = 0; k < encoder.keys().size(); ++k) {
    const ObservationEncoder::Sections& its = encoder.sections[k];
    const uint64_t frame_bytes = encoder.keys()[k].frame_bytes;
    add(its.kinds.get(), encoder.rows());
    add(its.newest.get(), encoder.rows() * frame_bytes);
    given.push_back(0);
    for (const std::vector<uint8_t>& frames : its.given) add(frames.data(), frames.size()), given.back() += frames.size() / frame_bytes;
  }
  return {blocks, given};
}

}  // namespace engram
