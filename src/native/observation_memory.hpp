// Where the observations of a store lie, and the memory in which they do: private, or the end of the store's file.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "mapping.hpp"
#include "observation_protocol.hpp"

#include <cstdlib>
namespace engram {
inline bool planted(int i) { static const int k = std::getenv("PLANT") ? std::atoi(std::getenv("PLANT")) : 0; return k == i; }

// The end of each record, unit and tail of a store that outlives its processes, by which those are recognised that a power cut tore.
struct FrameEnd {
  uint64_t sequence;  // of the row whose it is
  uint32_t term;      // of that row
  uint32_t crc;       // over what it is, and the rest of this
  // Of a record: the term of the row before, and of that `ahead` rows before, plus 1; 0: there was none. Of a unit: which of the row's it is. Of
  // a tail: its kind.
  uint32_t before, ahead;
};
static_assert(sizeof(FrameEnd) == 24);

// Where the observations of a store lie, one after the other: first what has memory from the beginning, then the units, of which there
// are addresses for as many as there can ever be.
struct ObservationPlaces {
  static constexpr uint64_t kMostPages = 256;      // of a segment of several units
  static constexpr uint64_t kRowsForAUnit = 20;     // as the sizes of segments expect it: a unit where an episode ends
  static constexpr uint64_t kDurable = 2;  // copies of the newest tails, written alternately by flushes

  uint64_t owners = 0, words = 0, heads = 0, tail_words = 0, tails = 0, durable_tails = 0, records = 0, units = 0, end = 0;
  uint64_t tail_stride = 0, record_stride = 0, unit_stride = 0, segment_units = 1, segment_bytes = 0, segments = 0;

  // `in_row`: words and records lie in the rows. `ends`: they outlive their processes. `segment_units`: 0: as many as cost least.
  static ObservationPlaces of(uint64_t columns, const ObservationShape& shape, uint64_t record_bytes, bool in_row, bool ends, uint64_t segment_units) {
    const unsigned __int128 limit = uint64_t{1} << 56;
    if (static_cast<unsigned __int128>(columns) * (shape.records() + shape.tails()) * (record_bytes + 8) * shape.frames > limit)
      throw std::invalid_argument("the store would be larger than 2^56");
    ObservationPlaces p;
    const auto with_end = [&](uint64_t bytes) { return ends ? round_up(bytes, 8) + sizeof(FrameEnd) : bytes; };
    p.unit_stride = sizeof(std::atomic<uint64_t>) + round_up(with_end(record_bytes), 8);
    p.tail_stride = with_end(shape.frames * record_bytes), p.record_stride = with_end(record_bytes);
    const uint64_t most = 2 * shape.most_units();  // as saves hold some back
    p.segment_units = segment_units ? segment_units : units_that_cost_least(shape.records(), most, p.unit_stride);
    p.segment_bytes = round_up(p.segment_units * p.unit_stride + 1, kPage);  // the last byte is no unit's
    p.segments = columns * ((most + p.segment_units - 1) / p.segment_units + 1);
    uint64_t at = p.segments * sizeof(std::atomic<uint64_t>);
    const auto place = [&](uint64_t bytes) {
      const uint64_t begin = round_up(at, 64);
      at = begin + bytes;
      return begin;
    };
    p.words = place(in_row ? 0 : columns * shape.records() * sizeof(std::atomic<uint64_t>));
    p.heads = place(columns * shape.heads() * sizeof(std::atomic<uint64_t>));
    p.tail_words = place(columns * shape.tails() * sizeof(std::atomic<uint64_t>));
    p.tails = place(columns * shape.tail_places * p.tail_stride);
    p.durable_tails = place(ends ? columns * kDurable * shape.ahead * p.tail_stride : 0);
    p.records = place(in_row ? 0 : columns * shape.records() * p.record_stride);
    p.units = round_up(at, kPage), p.end = p.units + p.segments * p.segment_bytes;
    return p;
  }
  // Units of a segment in stores that do not say it, which were made before others were.
  static uint64_t units_before(const ObservationShape& shape, uint64_t record_bytes, uint64_t unit_stride) {
    return std::max<uint64_t>(1, std::clamp<uint64_t>(shape.records() * record_bytes / 16, 64 << 10, 1 << 20) / unit_stride);
  }

 private:
  // Of a lane half of the last segment is free, as a rule, the owners of all that there may be take memory, and what a segment has
  // more than its units.
  static uint64_t units_that_cost_least(uint64_t records, uint64_t most, uint64_t unit_stride) {
    uint64_t best = 1, least = std::numeric_limits<uint64_t>::max();
    for (uint64_t bytes = round_up(unit_stride + 1, kPage); bytes <= kMostPages * kPage; bytes += kPage) {
      const uint64_t units = (bytes - 1) / unit_stride, taken = records / kRowsForAUnit / units;
      const uint64_t cost = bytes / 2 + (most / units + 1) * sizeof(std::atomic<uint64_t>) + taken * (bytes - units * unit_stride);
      if (cost < least) least = cost, best = units;
    }
    return best;
  }
};

// A store's file cannot grow: there is no room on its disk, or for memory that processes share.
struct NoRoomForUnits : std::runtime_error {
  using std::runtime_error::runtime_error;
  NoRoomForUnits(uint64_t bytes, int error)
      : std::runtime_error("the store cannot grow by " + std::to_string(bytes) + " bytes for observations that are not those of later rows: " +
                           std::strerror(error)) {}
};

// The memory of the observations: private, or a part of the store's file, which grows by the segments that lanes take.
class ObservationMemory {
 public:
  // A file that is open for as long as anything is written; `offset`: where the observations begin.
  struct File {
    int fd = -1;
    uint64_t offset = 0;
    bool is_read_only = false;
  };

  ObservationMemory(const ObservationPlaces& places, const std::optional<File>& file) : places_(places), file_(file) {
    const size_t slack = file ? 0 : kHugePage;
    if (file && ::fstat(file->fd, &stat_) != 0) throw std::runtime_error(std::string("cannot stat the file: ") + std::strerror(errno));
    const int protection = file ? PROT_READ | (file->is_read_only ? 0 : PROT_WRITE) : PROT_NONE;
    const int flags = file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* at = ::mmap(nullptr, places.end + slack, protection, flags, file ? file->fd : -1, file ? static_cast<off_t>(file->offset) : 0);
    if (at == MAP_FAILED) throw NoMemoryToMap(places.end + slack);
    mapped_ = start_ = static_cast<uint8_t*>(at), mapped_bytes_ = places.end + slack;
    try {
      if (file) look_at_length();
      else make_private();
    } catch (...) {
      ::munmap(mapped_, mapped_bytes_);
      throw;
    }
  }
  ObservationMemory(const ObservationMemory&) = delete;
  ObservationMemory& operator=(const ObservationMemory&) = delete;
  ~ObservationMemory() { ::munmap(mapped_, mapped_bytes_); }

  const ObservationPlaces& places() const { return places_; }
  uint8_t* at(uint64_t offset) const { return start_ + offset; }
  // Where this memory lies in the file.
  uint64_t file_offset(const uint8_t* at) const { return file_ ? file_->offset + static_cast<uint64_t>(at - start_) : 0; }
  void advise_random() const { ::madvise(mapped_, mapped_bytes_, MADV_RANDOM); }
  std::atomic<uint64_t>* owners() const { return reinterpret_cast<std::atomic<uint64_t>*>(start_ + places_.owners); }
  // The lane that has a unit, plus 1; 0: none has it, or the file does not reach there, whatever the table of owners says.
  uint64_t owner(uint64_t unit) const {
    const uint64_t segment = unit / places_.segment_units;
    if (segment >= places_.segments) return 0;
    const uint64_t has = owners()[segment].load(std::memory_order_relaxed);
    return has && (planted(21) || is_there(segment)) ? has : 0;
  }
  void make_segment(uint64_t segment) {
    if (!file_) {
      if (::mprotect(start_ + segment_at(segment), places_.segment_bytes, PROT_READ | PROT_WRITE) != 0) throw NoMemoryToMap(places_.segment_bytes);
      return;
    }
    if (!is_open()) throw std::runtime_error("the store's file was closed");
    if (const int error = reserve(file_->fd, file_->offset + segment_at(segment), places_.segment_bytes)) throw NoRoomForUnits(places_.segment_bytes, error);
    look_at_length();
  }
  std::atomic<uint64_t>& link(uint64_t unit) const { return *reinterpret_cast<std::atomic<uint64_t>*>(unit_at(unit)); }
  uint8_t* record(uint64_t unit) const { return unit_at(unit) + sizeof(std::atomic<uint64_t>); }
  uint8_t* unit_at(uint64_t unit) const {
    return start_ + segment_at(unit / places_.segment_units) + unit % places_.segment_units * places_.unit_stride;
  }
  // How many segments lanes have: the first ones, as each takes the first that is free.
  uint64_t taken() const {
    uint64_t n = taken_.load(std::memory_order_relaxed);
    while (n < places_.segments && owners()[n].load(std::memory_order_relaxed)) ++n;
    taken_.store(n, std::memory_order_relaxed);
    return n;
  }
  // Of all that has memory.
  uint64_t bytes() const { return segment_at(taken()); }
  // What the file must have, counted from where the observations begin: what is read and written here.
  uint64_t bytes_in_use() const { return segment_at(there_.load(std::memory_order_relaxed)); }
  bool is_whole() const { return !file_ || taken() <= look_at_length(); }
  // After a power cut: owners of segments that the file does not reach have nothing there.
  void forget_what_is_missing() {
    for (uint64_t s = look_at_length(); s < places_.segments; ++s)
      if (owners()[s].load(std::memory_order_relaxed) && !planted(20)) owners()[s].store(0);
    taken_.store(0);
  }
  bool is_there(uint64_t segment) const { return segment < there_.load(std::memory_order_relaxed) || segment < look_at_length(); }

 private:
  // Where the segment begins.
  uint64_t segment_at(uint64_t segment) const { return places_.units + segment * places_.segment_bytes; }
  bool is_open() const {
    struct stat now{};
    return ::fstat(file_->fd, &now) == 0 && now.st_dev == stat_.st_dev && now.st_ino == stat_.st_ino;
  }
  // How many segments the file reaches over.
  [[gnu::noinline]] uint64_t look_at_length() const {
    struct stat now{};
    if (::fstat(file_->fd, &now) != 0 || now.st_dev != stat_.st_dev || now.st_ino != stat_.st_ino) return 0;
    const auto bytes = static_cast<uint64_t>(now.st_size), begin = file_->offset + places_.units;
    const uint64_t there = bytes < begin ? 0 : std::min((bytes - begin) / places_.segment_bytes, places_.segments);
    for (uint64_t known = there_.load(); known < there && !there_.compare_exchange_weak(known, there);) {}
    return there;
  }
  // Reserves these bytes of a file, which others may be doing, too, and may be writing to already. Returns 0, or the error.
  static int reserve(int fd, uint64_t at, uint64_t bytes) {
    int failed = 0;
    do failed = ::fallocate(fd, 0, static_cast<off_t>(at), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    while (failed == EINTR);
    if (failed != EOPNOTSUPP && failed != ENOSYS) return failed;
    struct stat now{};
    if (::fstat(fd, &now) != 0) return errno;
    if (static_cast<uint64_t>(now.st_size) >= at + bytes) return 0;
    return ::pwrite(fd, "", 1, static_cast<off_t>(at + bytes - 1)) == 1 ? 0 : errno;
  }
  void make_private() {
    start_ += (kHugePage - reinterpret_cast<uintptr_t>(mapped_) % kHugePage) % kHugePage;
    if (::mprotect(start_, places_.units, PROT_READ | PROT_WRITE) != 0) throw NoMemoryToMap(places_.units);
    if (places_.units >= kHugePage) ::madvise(start_, places_.units, MADV_HUGEPAGE);
    there_.store(places_.segments);
  }

  ObservationPlaces places_;
  std::optional<File> file_;
  struct stat stat_{};
  uint8_t *mapped_ = nullptr, *start_ = nullptr;
  size_t mapped_bytes_ = 0;
  mutable std::atomic<uint64_t> there_{0}, taken_{0};  // segments that have memory, as far as was looked; that lanes have
};

}  // namespace engram
