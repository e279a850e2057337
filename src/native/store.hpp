// A store: header, lanes, log, redo area and rows in one region.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "copy.hpp"
#include "lanes.hpp"
#include "paging.hpp"
#include "save_pass.hpp"

namespace engram {

struct StoreSpec {
  uint64_t lanes = 1, lane_capacity = 1, strands = 1;
  uint64_t payload_bytes = 0, alignment = 8;  // payload_bytes 0: counters only, the rows are kept elsewhere
  bool trailer = false;
  std::string layout;
  std::string store_id;
};

inline Shape shape_of(const StoreSpec& s) {
  auto refuse = [](const std::string& why) { throw std::invalid_argument(why); };
  if (s.lanes < 1 || s.lanes > 4096) refuse("lanes must be 1 to 4096, got " + std::to_string(s.lanes));
  const unsigned __int128 limit = uint64_t{1} << 56;
  if (s.lane_capacity < 1) refuse("a lane needs room for at least one row");
  if (s.strands < 1) refuse("strands must be at least 1");
  // Each alone first: products and roundings below must not wrap around.
  if (s.lane_capacity > limit || s.strands > limit || s.payload_bytes > limit || s.layout.size() > limit)
    refuse("the store would be larger than 2^56");
  if (s.trailer && s.payload_bytes == 0) refuse("rows without bytes have no trailer");
  if (s.alignment < 8 || s.alignment > 64 || (s.alignment & (s.alignment - 1))) refuse("alignment must be 8 to 64");
  if (s.store_id.size() != 16) refuse("store_id must have 16 bytes");
  Shape h{};
  std::memcpy(h.magic, kMagic, 8);
  h.version = kVersion;
  h.flags = s.trailer ? kHasTrailer : 0;
  h.lanes = s.lanes, h.lane_capacity = s.lane_capacity, h.strands = s.strands, h.payload_bytes = s.payload_bytes;
  h.row_stride = s.payload_bytes ? round_up(s.payload_bytes, 8) + (s.trailer ? sizeof(Trailer) : 0) : 0;
  h.row_stride = round_up(h.row_stride, s.alignment);
  const auto rows = static_cast<unsigned __int128>(s.lanes) * s.lane_capacity * s.strands;
  if (rows > limit || rows * std::max<uint64_t>(h.row_stride, 1) > limit) refuse("the store would be larger than 2^56");
  h.layout_bytes = s.layout.size();
  h.layout_offset = sizeof(StoreHeader) + s.lanes * sizeof(LaneHeader);
  h.log_offset = round_up(h.layout_offset + s.layout.size(), 64);
  h.redo_offset = h.log_offset + kLogEntries * 8;
  h.redo_bytes = s.trailer ? std::max<uint64_t>(round_up(sizeof(RedoHeader) + 8 + h.row_stride, 64), 1 << 16) : 0;
  h.rows_offset = round_up(h.redo_offset + h.redo_bytes, kPage);
  h.total_bytes = round_up(h.rows_offset + static_cast<uint64_t>(rows) * h.row_stride, kPage);
  std::memcpy(h.store_id, s.store_id.data(), 16);
  h.layout_crc = crc32c(0, s.layout.data(), s.layout.size());
  h.crc = crc32c(0, &h, offsetof(Shape, crc));
  return h;
}

// The shape of a store that came from a file, or what is wrong with it. Afterwards every address computed from it lies
// inside the file: it equals, byte for byte, the one that this code would make.
inline Shape checked_shape(const uint8_t* file, size_t bytes) {
  auto refuse = [](const std::string& why) { throw std::runtime_error(why); };
  if (bytes < sizeof(StoreHeader)) refuse("the file is shorter than a header");
  Shape h;
  std::memcpy(&h, file, sizeof h);
  if (std::memcmp(h.magic, kMagic, 8) != 0) refuse("not an engram store (wrong first bytes)");
  if (h.version != kVersion)
    refuse("format version " + std::to_string(h.version) + "; this engram reads version " + std::to_string(kVersion));
  if (crc32c(0, &h, offsetof(Shape, crc)) != h.crc) refuse("the header's checksum does not fit its bytes");
  if (h.total_bytes > bytes)
    refuse("the file has " + std::to_string(bytes) + " bytes, its header needs " + std::to_string(h.total_bytes));
  if (h.layout_bytes > bytes || h.layout_offset > bytes - h.layout_bytes) refuse("the header points outside the file");
  StoreSpec spec{h.lanes, h.lane_capacity, h.strands, h.payload_bytes, 8, (h.flags & kHasTrailer) != 0, "", ""};
  spec.layout.assign(reinterpret_cast<const char*>(file) + h.layout_offset, h.layout_bytes);
  spec.store_id.assign(reinterpret_cast<const char*>(h.store_id), 16);
  for (spec.alignment = 8; spec.alignment < 64 && shape_of(spec).row_stride != h.row_stride; spec.alignment *= 2) {}
  const Shape again = shape_of(spec);
  if (again.layout_crc != h.layout_crc) refuse("the layout's checksum does not fit its bytes");
  if (std::memcmp(&again, &h, sizeof h) != 0) refuse("the header contradicts itself");
  return h;
}

struct ReadResult {
  std::vector<uint64_t> numbers;    // each row's write number, if asked for
  std::vector<uint32_t> missing;    // positions of rows that were overwritten while they were read
  std::vector<uint32_t> unwritten;  // positions of slots that held no row to begin with
};

// Somebody else has cut the file of a store short: to touch what it lacks would be a bus error.
struct FileCutShort : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Store {
 public:
  // fd < 0: private memory. A file must have the store's size already: touching what it lacks is a bus error.
  static std::shared_ptr<Store> create(int fd, const StoreSpec& spec) {
    const Shape shape = shape_of(spec);
    if (fd >= 0 && file_bytes(fd) < shape.total_bytes) throw std::invalid_argument("the file is smaller than the store");
    auto store = std::shared_ptr<Store>(new Store(Region::map(fd, shape.total_bytes), fd));
    store->header()->shape = shape;
    std::memcpy(store->at(shape.layout_offset), spec.layout.data(), spec.layout.size());
    store->ready(shape);
    return store;
  }
  // Maps a store that exists: `bytes` is the size of the file.
  static std::shared_ptr<Store> open(int fd, size_t bytes) {
    if (bytes < sizeof(StoreHeader) || file_bytes(fd) < bytes)
      throw std::runtime_error("the file is shorter than " + std::to_string(std::max(bytes, sizeof(StoreHeader))) +
                               " bytes");
    auto store = std::shared_ptr<Store>(new Store(Region::map(fd, bytes), fd));
    store->ready(checked_shape(store->at(0), bytes));
    return store;
  }

  Lanes lanes;
  // The save that is going on; rows are preserved for it before they change.
  std::shared_ptr<SavePass> begin_save() { return pass_ = watch_save(); }
  // A save during which no writer of this process runs, so that nothing has to be preserved for it.
  std::shared_ptr<SavePass> watch_save() {
    std::vector<SavePass::Range> ranges;
    for (uint64_t l = 0; l < shape().lanes; ++l) {
      const LaneView v = lanes.view(l);
      ranges.push_back({v.first, std::max(v.first, v.published)});
    }
    return std::make_shared<SavePass>(region_, lanes, row(0), std::move(ranges));
  }
  void end_save() { pass_.reset(); }
  SavePass* saving() const { return pass_.get(); }
  const Shape& shape() const { return lanes.shape(); }
  StoreHeader* header() const {
    check_file();
    return reinterpret_cast<StoreHeader*>(region_->data());
  }
  // Before a call touches the map: a FileCutShort where its file is shorter than the store by now. Private memory, and
  // shared memory that is sealed against it, cost a branch; a file one fstat, which is no promise for the call's length.
  void check_file() const {
    if (watched_ && is_cut_short()) refuse_file();
  }
  uint8_t* at(uint64_t offset) const { return region_->data() + offset; }
  std::shared_ptr<Region> region() const { return region_; }
  int fd() const { return fd_; }
  // Whether the descriptor, which is the caller's, still is that of the mapped file, as long as the store.
  bool file_is_there() const {
    struct stat found;
    return fd_ >= 0 && ::fstat(fd_, &found) == 0 && found.st_dev == device_ && found.st_ino == inode_ &&
           static_cast<uint64_t>(found.st_size) >= shape().total_bytes;
  }
  PageAsker& pages() { return pages_; }
  std::string layout() const {
    return {reinterpret_cast<const char*>(at(shape().layout_offset)), shape().layout_bytes};
  }
  // The physical row of a time slot of a lane: each strand's rows are consecutive in time.
  uint64_t physical(uint64_t lane, uint64_t strand, uint64_t slot) const {
    const Shape& s = shape();
    return (lane * s.strands + strand) * s.lane_capacity + slot;
  }
  uint8_t* row(uint64_t physical_row) const {
    return region_->data() + shape().rows_offset + physical_row * shape().row_stride;
  }
  bool has_trailer() const { return shape().flags & kHasTrailer; }
  uint64_t slots() const { return shape().lanes * shape().lane_capacity * shape().strands; }

  Trailer* trailer(uint8_t* row) const {
    return reinterpret_cast<Trailer*>(row + shape().row_stride - sizeof(Trailer));
  }
  uint32_t row_crc(const uint8_t* row, uint64_t physical_row, uint64_t number, uint32_t term) const {
    struct { uint64_t row, number, term; } end{physical_row, number, term};
    const uint32_t crc = crc32c(id_crc_, row, shape().payload_bytes);
    return crc32c(crc, &end, sizeof end);
  }
  void seal(uint8_t* row, uint64_t physical_row, uint64_t number, uint32_t term) const {
    Trailer* t = trailer(row);
    t->number = number, t->term = term, t->crc = row_crc(row, physical_row, number, term);
  }
  // A row that was written whole, in this place.
  bool whole(uint64_t physical_row) const {
    uint8_t* r = row(physical_row);
    const Trailer t = *trailer(r);
    return t.number % shape().lane_capacity == physical_row % shape().lane_capacity &&
           t.crc == row_crc(r, physical_row, t.number, t.term);
  }

 private:
  Store(std::shared_ptr<Region> region, int fd) : region_(std::move(region)), fd_(fd), pages_(fd) {
    struct stat found;
    if (fd >= 0 && ::fstat(fd, &found) == 0) device_ = found.st_dev, inode_ = found.st_ino;
  }
  void ready(const Shape& shape) {
    lanes = Lanes(header(), reinterpret_cast<LaneHeader*>(at(sizeof(StoreHeader))), shape);
    id_crc_ = crc32c(0, shape.store_id, 16);
    watched_ = fd_ >= 0 && !cannot_shrink(fd_);
  }
  static bool cannot_shrink(int fd) {
#if defined(F_GET_SEALS) && defined(F_SEAL_SHRINK)
    const int seals = ::fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK);
#else
    return false;
#endif
  }
  // The descriptor is the caller's, and may be closed, or another file's, by now: then nothing is known.
  [[gnu::noinline]] bool is_cut_short() const {
    struct stat found;
    return ::fstat(fd_, &found) == 0 && found.st_dev == device_ && found.st_ino == inode_ &&
           static_cast<uint64_t>(found.st_size) < shape().total_bytes;
  }
  [[noreturn, gnu::noinline]] void refuse_file() const {
    throw FileCutShort("the store's file was cut short: it has fewer than the " + std::to_string(shape().total_bytes) +
                       " bytes of the store, and what it lacks cannot be read or written. Close this storage, put the "
                       "file back from a copy, or load a checkpoint into a new one");
  }
  static uint64_t file_bytes(int fd) {
    struct stat found;
    if (::fstat(fd, &found) != 0) throw std::runtime_error(std::string("cannot look at the file: ") + std::strerror(errno));
    return static_cast<uint64_t>(found.st_size);
  }

  std::shared_ptr<Region> region_;
  int fd_;
  bool watched_ = false;  // a file that others can shorten
  dev_t device_ = 0;
  ino_t inode_ = 0;
  PageAsker pages_;
  uint32_t id_crc_ = 0;
  std::shared_ptr<SavePass> pass_;  // set and read by threads that hold the storage's mutex
};

}  // namespace engram
