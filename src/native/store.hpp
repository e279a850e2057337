// A store: header, lanes, log, redo area and rows in one region.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>

#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fork_page.hpp"
#include "lanes.hpp"
#include "observations.hpp"
#include "readahead.hpp"
#include "snapshot.hpp"
#include "stream_table.hpp"
#include "writer_locks.hpp"

namespace engram {

struct StoreSpec {
  uint64_t lanes = 1, lane_capacity = 1, envs = 1;
  uint64_t payload_bytes = 0, alignment = 8;  // payload_bytes 0: counters only, the rows are kept elsewhere
  bool trailer = false;
  std::string layout;
  std::string store_id;
  bool extents = false;       // each lane tells whose rows it has
  bool observations = false;  // some are kept beside the rows: see `Store::keep_observations`
  bool flow = true;           // rows can be removed; false: as an engram made it that knew nothing of it
  bool ragged = false;        // rows have any length: see `RowHead`
};

// The names of these features, lowest bit first, with commas between.
inline std::string feature_names(uint64_t features) {
  std::string names;
  for (size_t i = 0; i < std::size(kFeatures); ++i)
    if (features >> i & 1) names += (names.empty() ? "" : ",") + std::string(kFeatures[i]);
  return names;
}

inline StoreGeometry geometry_of(const StoreSpec& s) {
  auto refuse = [](const std::string& why) { throw std::invalid_argument(why); };
  if (s.lanes < 1 || s.lanes > 4096) refuse("lanes must be 1 to 4096, got " + std::to_string(s.lanes));
  const unsigned __int128 limit = uint64_t{1} << 56;
  if (s.lane_capacity < 1) refuse("a lane needs room for at least one row");
  if (s.envs < 1) refuse("a store needs at least one environment");
  // Checks each value by itself first: the products and roundings below must not overflow.
  if (s.lane_capacity > limit || s.envs > limit || s.payload_bytes > limit || s.layout.size() > limit)
    refuse("the store would be larger than 2^56");
  if (s.trailer && s.payload_bytes == 0) refuse("rows without bytes have no trailer");
  if (s.alignment < 8 || s.alignment > 64 || (s.alignment & (s.alignment - 1))) refuse("alignment must be 8 to 64");
  if (s.store_id.size() != 16) refuse("store_id must have 16 bytes");
  if (s.ragged && (s.payload_bytes < sizeof(RowHead) || s.payload_bytes % 8))
    refuse("pages of rows of any length have a multiple of 8 bytes, at least 8; got " + std::to_string(s.payload_bytes));
  if (s.ragged && (s.envs > 1 || s.observations)) refuse("rows of any length are those of one environment, and hold all that they have");
  StoreGeometry h{};
  std::memcpy(h.magic, kMagic, 8);
  h.version = kVersion, h.lane_version = kLaneVersion;
  h.features = (s.trailer ? kHasTrailer : 0) | (s.extents ? kHasExtents : 0) | (s.observations ? kHasObservations : 0) |
               (s.flow ? kHasFlow : 0) | (s.ragged ? kIsRagged : 0);
  const std::string names = feature_names(h.features);
  std::memcpy(h.feature_names, names.data(), std::min(names.size(), sizeof h.feature_names));
  h.lanes = s.lanes, h.lane_capacity = s.lane_capacity, h.envs = s.envs, h.payload_bytes = s.payload_bytes;
  h.row_stride = s.payload_bytes ? round_up(s.payload_bytes, 8) + (s.trailer ? sizeof(Trailer) : 0) : 0;
  h.row_stride = round_up(h.row_stride, s.alignment);
  const auto rows = static_cast<unsigned __int128>(s.lanes) * s.lane_capacity * s.envs;
  if (rows > limit || rows * std::max<uint64_t>(h.row_stride, 1) > limit) refuse("the store would be larger than 2^56");
  // Words of 64 time slots, on cache lines that no two lanes share.
  h.seams_offset = sizeof(StoreHeader) + s.lanes * sizeof(LaneHeader);
  h.seams_bytes = s.payload_bytes ? round_up(round_up(s.lane_capacity, 64) / 8, 64) : 0;
  h.layout_bytes = s.layout.size();
  h.layout_offset = flow_offset(h) + flow_bytes(h);
  h.log_offset = round_up(h.layout_offset + s.layout.size(), 64);
  h.redo_offset = h.log_offset + kLogEntries * 8;
  h.redo_bytes = s.trailer ? std::max<uint64_t>(round_up(sizeof(RedoHeader) + 8 + h.row_stride, 64), 1 << 16) : 0;
  h.consumers_offset = round_up(h.redo_offset + h.redo_bytes, kPage);
  h.arena_offset = h.consumers_offset + kReservedBytes;
  h.rows_offset = h.arena_offset + kReservedBytes;
  h.total_bytes = round_up(h.rows_offset + static_cast<uint64_t>(rows) * h.row_stride, kPage);
  std::memcpy(h.store_id, s.store_id.data(), 16);
  h.layout_crc = crc32c(0, s.layout.data(), s.layout.size());
  h.crc = crc32c(0, &h, offsetof(StoreGeometry, crc));
  return h;
}

// The name that the store's creator gave to the feature of bit i.
inline std::string named_feature(const StoreGeometry& h, uint64_t i) {
  std::string names(h.feature_names, strnlen(h.feature_names, sizeof h.feature_names));
  for (uint64_t bit = 0; bit < i; ++bit)
    if (h.features >> bit & 1) names = names.find(',') == std::string::npos ? "" : names.substr(names.find(',') + 1);
  names = names.substr(0, names.find(','));
  for (char& c : names)
    if (c < ' ' || c > '~') c = '?';
  return (names.empty() ? "without a name" : "'" + names + "'") + " (bit " + std::to_string(i) + ")";
}

// The geometry of a store in a file; an error says which part of it is wrong. Every address computed from it lies inside the
// file, because the geometry equals, byte for byte, the one that this code would make.
inline StoreGeometry checked_geometry(const uint8_t* file, size_t bytes) {
  auto refuse = [](const std::string& why) { throw std::runtime_error(why); };
  if (bytes < sizeof(StoreHeader)) refuse("the file is shorter than a header");
  StoreGeometry h;
  std::memcpy(&h, file, sizeof h);
  if (std::memcmp(h.magic, kMagic, 8) != 0) refuse("not an engram store (wrong first bytes)");
  if (h.version != kVersion)
    refuse("format version " + std::to_string(h.version) + "; this engram reads version " + std::to_string(kVersion));
  if (crc32c(0, &h, offsetof(StoreGeometry, crc)) != h.crc) refuse("the header's checksum does not fit its bytes");
  for (uint64_t unknown = h.features & ~kKnownFeatures, i = 0; unknown >> i; ++i)
    if (unknown >> i & 1)
      refuse("it uses the feature " + named_feature(h, i) + ", which this engram does not know; open it with a newer one");
  if (h.lane_version != kLaneVersion)
    refuse("version " + std::to_string(h.lane_version) + " of its lanes' blocks; this engram reads version " +
           std::to_string(kLaneVersion));
  if (h.total_bytes > bytes)
    refuse("the file has " + std::to_string(bytes) + " bytes, its header needs " + std::to_string(h.total_bytes));
  if (h.layout_bytes > bytes || h.layout_offset > bytes - h.layout_bytes) refuse("the header points outside the file");
  StoreSpec spec{h.lanes, h.lane_capacity, h.envs, h.payload_bytes, 8, (h.features & kHasTrailer) != 0, "", "",
                 (h.features & kHasExtents) != 0, (h.features & kHasObservations) != 0, (h.features & kHasFlow) != 0,
                 (h.features & kIsRagged) != 0};
  spec.layout.assign(reinterpret_cast<const char*>(file) + h.layout_offset, h.layout_bytes);
  spec.store_id.assign(reinterpret_cast<const char*>(h.store_id), 16);
  for (spec.alignment = 8; spec.alignment < 64 && geometry_of(spec).row_stride != h.row_stride; spec.alignment *= 2) {}
  const StoreGeometry again = geometry_of(spec);
  if (again.layout_crc != h.layout_crc) refuse("the layout's checksum does not fit its bytes");
  if (std::memcmp(&again, &h, sizeof h) != 0) refuse("the header contradicts itself");
  for (uint64_t l = 0; l < h.lanes; ++l) {
    uint32_t version;
    std::memcpy(&version, file + sizeof(StoreHeader) + l * sizeof(LaneHeader) + offsetof(LaneHeader, version), 4);
    if (version != kLaneVersion)
      refuse("the block of lane " + std::to_string(l) + " has version " + std::to_string(version) +
             "; this engram reads version " + std::to_string(kLaneVersion));
  }
  uint64_t in_use = 0;
  if (h.features & kHasFlow) std::memcpy(&in_use, file + h.consumers_offset + offsetof(Flow, in_use), sizeof in_use);
  if (in_use & ~kKnownUses)
    refuse("it has been used for what this engram does not know (bits " + std::to_string(in_use & ~kKnownUses) +
           " of `in_use`); open it with a newer one");
  return h;
}

// A sync failed. The state of pages that were not synced before is unknown.
struct SyncFailed : std::runtime_error {
  explicit SyncFailed(const std::string& what) : std::runtime_error("cannot sync " + what + ": " + std::strerror(errno)) {}
};

struct ReadResult {
  std::vector<uint64_t> sequences;    // each row's sequence, if asked for
  std::vector<uint32_t> missing;    // positions of rows that were overwritten while they were read
  std::vector<uint32_t> unwritten;  // positions of slots that held no row when the read began
};

// Another process has truncated the store's file: touching the missing part would be a bus error.
struct FileCutShort : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// This process's record of seams besides the bits in the store: whether its next row in a lane will have one; and, for stores
// whose rows are kept elsewhere, all seams, which are dropped with their rows.
class SeamNotes {
 public:
  void use(uint64_t lanes) { next_ = std::make_unique<std::atomic<bool>[]>(lanes), listed_.resize(lanes); }
  // Allocates nothing: the caller is in the middle of a change.
  void forget() {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (uint64_t l = 0; l < listed_.size(); ++l) next_[l].store(false, std::memory_order_relaxed), listed_[l].clear();
  }
  bool next(uint64_t l) const { return next_[l].load(std::memory_order_relaxed); }
  void set_next(uint64_t l, bool next) { next_[l].store(next, std::memory_order_relaxed); }
  void add(uint64_t l, uint64_t at, uint64_t first) {
    const std::lock_guard<std::mutex> guard(mutex_);
    std::vector<uint64_t>& seams = listed_[l];
    const auto left = std::upper_bound(seams.begin(), seams.end(), first);
    if (2 * (left - seams.begin()) > seams.end() - seams.begin()) seams.erase(seams.begin(), left);
    const auto place = std::lower_bound(seams.begin(), seams.end(), at);
    if (place == seams.end() || *place != at) seams.insert(place, at);
  }
  // Replaces a lane's seams by those of n ascending sequences at(i) that are below `published`. Allocates nothing if the list
  // already had that length.
  template <typename At>
  void replace(uint64_t l, uint64_t n, At&& at, uint64_t published) {
    const std::lock_guard<std::mutex> guard(mutex_);
    listed_[l].clear();
    for (uint64_t i = 0; i < n && at(i) < published; ++i) listed_[l].push_back(at(i));
  }
  std::vector<uint64_t> of(uint64_t l, uint64_t from, uint64_t to) const {
    const std::lock_guard<std::mutex> guard(mutex_);
    const std::vector<uint64_t>& seams = listed_[l];
    const auto begin = std::lower_bound(seams.begin(), seams.end(), from);
    return {begin, std::lower_bound(begin, seams.end(), std::max(from, to))};
  }
  // Called in a forked child: a thread of the parent may have held the mutex.
  void after_fork() { new (&mutex_) std::mutex; }

 private:
  mutable std::mutex mutex_;
  std::unique_ptr<std::atomic<bool>[]> next_;
  std::vector<std::vector<uint64_t>> listed_;
};

// Which parts of a row tell whether the next row continues it: see BorderCheck.
struct BorderRule {
  struct Entry {  // exists at the root and under `next`
    uint64_t offset, next_offset, bytes;
    size_t leaf, next_leaf;
    bool is_observed = false;  // stored once: this key of the store's observations
    size_t key = 0;
  };
  struct Flag {
    uint64_t offset, bytes;
    size_t leaf;
  };
  static constexpr size_t kMostEntries = 63;  // bits of LaneHeader::border_agreed
  std::vector<Entry> entries;
  std::vector<Flag> done;
  bool either = false;     // one set flag is enough; else all must be set
  std::optional<Flag> id;
  size_t leaves = 0;       // of a row
  uint64_t codec = 0;      // the number of the codec whose leaves these are
};

// A snapshot as Python holds it: the store drops its own reference when the save ends.
struct SharedSnapshot {
  std::shared_ptr<CopyOnWriteSnapshot> snapshot;
};

constexpr uint64_t kMostRowBytes = uint64_t{1} << 46;  // of rows that grow

class Store {
 public:
  // fd < 0: private memory. A file must already have the store's size: touching a missing part is a bus error.
  static std::unique_ptr<Store> create(int fd, const StoreSpec& spec) {
    const StoreGeometry geometry = geometry_of(spec);
    struct stat file{};
    if (fd >= 0) file = file_of(fd);
    if (fd >= 0 && static_cast<uint64_t>(file.st_size) < geometry.total_bytes)
      throw std::invalid_argument("the file is smaller than the store");
    auto store = std::unique_ptr<Store>(new Store(MappedRegion::map(fd, geometry.total_bytes), fd, file));
    store->header()->geometry = geometry;
    std::memcpy(store->at(geometry.layout_offset), spec.layout.data(), spec.layout.size());
    store->ready(geometry);
    for (uint64_t l = 0; l < geometry.lanes; ++l) store->lanes.lane(l).version = kLaneVersion;
    return store;
  }
  // Maps an existing store. `size` is the file's; none: as the system reports it.
  static std::unique_ptr<Store> open(int fd, std::optional<size_t> size = std::nullopt, bool read_only = false) {
    const struct stat file = file_of(fd);
    const size_t bytes = size.value_or(static_cast<size_t>(file.st_size));
    if (bytes < sizeof(StoreHeader) || static_cast<uint64_t>(file.st_size) < bytes)
      throw std::runtime_error("the file is shorter than " + std::to_string(std::max(bytes, sizeof(StoreHeader))) +
                               " bytes");
    auto store = std::unique_ptr<Store>(new Store(MappedRegion::map(fd, bytes, read_only), fd, file));
    store->read_only_ = read_only, store->refuses_writes_ = read_only;
    store->ready(checked_geometry(store->at(0), bytes));
    return store;
  }
  // The lane of a store that counts only, with rows of so many bytes in private memory, which grows with the slots that are
  // written: the capacity may be larger than any memory. Whoever reads or writes these rows keeps all others out.
  static std::unique_ptr<Store> with_growing_rows(const Store& counts, uint64_t payload_bytes) {
    StoreGeometry geometry = counts.geometry();
    if (counts.fd_ >= 0 || geometry.payload_bytes || geometry.lanes != 1 || geometry.envs != 1)
      throw std::invalid_argument("only one lane without rows, in private memory, gets rows that grow");
    if (payload_bytes < 1 || payload_bytes > kMostRowBytes) throw std::invalid_argument("rows have 1 to 2^46 bytes");
    geometry.payload_bytes = payload_bytes, geometry.row_stride = round_up(payload_bytes, 8);
    auto store = std::unique_ptr<Store>(new Store(counts.region_, -1, {}));
    store->seams_ = counts.seams_;
    store->use_lanes(geometry);
    store->lanes.share_removed(counts.lanes);
    store->growing_ = MappedRegion::map(-1, round_up(geometry.row_stride, kPage), false, true);
    store->use_room();
    return store;
  }
  // Keeps X and next.X of some keys beside the rows (`Observations`), before anything else is done with a store that was made for it.
  // `sizes`: those that its maker had, as the header of a file says them; empty: it is made now.
  void keep_observations(uint64_t ahead, std::vector<Observations::KeyGeometry> keys, std::optional<Observations::InRow> in_row,
                         const std::vector<uint64_t>& sizes) {
    const StoreGeometry& s = geometry();
    if (!(s.features & kHasObservations) || s.payload_bytes == 0 || grows() || observations_)
      throw std::invalid_argument("observations are kept beside the rows of a store that was made for them");
    Observations::Geometry g = observations_beside(s, ahead, std::move(keys), std::move(in_row));
    if (sizes.size() == 3) g = Observations::as_made(g, Observations::sizes_before(g, sizes[0], sizes[1], sizes[2]));
    else if (sizes.size() == 4) g = Observations::as_made(g, {sizes[0], sizes[1], sizes[2], sizes[3]});
    else if (!sizes.empty()) throw std::invalid_argument("sizes of observations are four numbers, or three");
    const Observations::Sizes here = Observations::sizes_of(g);
    std::optional<ObservationMemory::File> file;
    if (fd_ >= 0) {
      if (static_cast<uint64_t>(file_of(fd_).st_size) < s.total_bytes + here.sure_bytes)
        throw std::runtime_error("the file is shorter than the " + std::to_string(s.total_bytes + here.sure_bytes) + " bytes of rows and observations");
      file = ObservationMemory::File{fd_, s.total_bytes, read_only_};
    }
    auto observations = std::make_shared<Observations>(g, rows_, file);
    lanes.limit_piece(g.longest_piece);
    observations_ = std::move(observations);
    refuses_writes_ = read_only_;
  }
  // The geometry of the observations of a store.
  static Observations::Geometry observations_beside(const StoreGeometry& s, uint64_t ahead, std::vector<Observations::KeyGeometry> keys,
                                                    std::optional<Observations::InRow> in_row) {
    Observations::Geometry g{s.lanes, s.envs, s.lane_capacity, ahead, 1, s.payload_bytes, std::move(keys), std::move(in_row),
                             (s.features & kHasTrailer) != 0, crc32c(0, s.store_id, sizeof s.store_id)};
    uint64_t bytes = s.payload_bytes;
    if (g.in_row) {
      g.in_row->row_stride = s.row_stride;
      bool fits = g.in_row->x.size() == g.keys.size() && g.in_row->word < s.payload_bytes;
      for (size_t k = 0; fits && k < g.keys.size(); ++k)
        fits = g.in_row->x[k] <= s.payload_bytes && g.keys[k].bytes() <= s.payload_bytes - g.in_row->x[k];
      if (!fits) throw std::invalid_argument("the word or an observation lies outside the row");
    }
    for (const Observations::KeyGeometry& key : g.keys) {
      if (key.frames > ObservationShape::kMostFrames || key.frame_bytes > kMostRowBytes) throw std::invalid_argument("an observation is too large");
      bytes += 2 * key.bytes();
    }
    g.longest_piece = std::clamp<uint64_t>(kPieceBytes / (bytes * s.envs), 1, claim_steps(s.lane_capacity, s.row_stride, true));
    return g;
  }
  // Null: rows hold all that they have.
  Observations* observations() const { return observations_.get(); }
  // Whether rows have a leaf there, in themselves or among the observations.
  bool has_leaf(uint64_t offset, uint64_t bytes) const {
    return offset + bytes <= geometry().payload_bytes || (observations_ && observations_->leaf(offset, bytes));
  }
  // Bytes of a row as batches have it.
  uint64_t bytes_of_whole_row() const { return geometry().row_stride + (observations_ ? observations_->bytes_of_leaves() : 0); }
  bool grows() const { return growing_ != nullptr; }
  // The first slots, which have memory.
  uint64_t room() const { return room_; }
  // Takes memory for the first slots of rows that grow; addresses of rows change.
  void make_room(uint64_t slots) {
    if (slots <= room_) return;
    const uint64_t stride = geometry().row_stride;
    if (slots > geometry().lane_capacity || slots > kMostRowBytes / stride) throw std::bad_alloc();
    const uint64_t more = std::min({std::max(slots, 2 * room_), geometry().lane_capacity, kMostRowBytes / stride});
    try {
      growing_->grow(round_up(more * stride, kPage));
    } catch (const NoMemoryToMap&) {
      growing_->grow(round_up(slots * stride, kPage));
    }
    use_room();
  }
  // As `make_room`, for n rows behind the newest one of a lane, and for all slots that hold rows.
  void make_room_behind(uint64_t l, uint64_t n) {
    const uint64_t capacity = geometry().lane_capacity, at = lanes.lane(l).published.load();
    const bool wraps = at / capacity * capacity > lanes.lane(l).base.load() || n > capacity - at % capacity;
    make_room(wraps ? capacity : at % capacity + n);
  }

  Lanes lanes;

  // ---- seams: rows at which a trajectory begins, whatever flags and ids say ----
  // The next row that this process writes to a lane will have a seam, unless it is the lane's first row.
  // Of a process that moves from lane to lane, whatever the lane: the first row of a stint has one in any case.
  void mark_seam(uint64_t l) const {
    if (moves_on()) l = stint().lane;
    if (l < lanes.count() && lanes.view(l).rows() > 0) seams_->set_next(l, true);
  }
  // Whether the next row will have a seam: where writers take turns, also if another one wrote the newest row; where they move
  // from lane to lane, also if this process's next row there begins a stint.
  bool next_is_seam(uint64_t l) const {
    if (seams_->next(l)) return true;
    if (!writer_) return false;
    const bool goes_on = moves_on() ? stint().lane == l && lanes.stints(l).goes_on(author()) : lanes.turns(l).continues(writer_);
    return !goes_on && lanes.view(l).rows() > 0;
  }
  void note_written(uint64_t l) const { seams_->set_next(l, false); }
  // For rows that are kept elsewhere: counts n rows as written; returns the first one's sequence.
  uint64_t advance(uint64_t l, uint64_t n, bool begins = false) const {
    // Before the claim, because it may allocate.
    if (begins || seams_->next(l)) seams_->add(l, lanes.lane(l).published.load(), lanes.first_now(l));
    const uint64_t at = lanes.claim(l, n);
    if (lanes.removed_rows(l)) lanes.with_removed(l).clear_removed(at, n);
    seams_->set_next(l, false);
    lanes.publish(l, at, n);
    return at;
  }
  // For rows that are kept elsewhere: adds a seam at a row that is already written.
  void add_seam(uint64_t l, uint64_t sequence) const { seams_->add(l, sequence, lanes.first_now(l)); }
  // The seams of rows [from, to) of a lane, ascending. The caller discards those of rows that were overwritten meanwhile.
  std::vector<uint64_t> seams_of(uint64_t l, uint64_t from, uint64_t to) const {
    return geometry().seams_bytes ? lanes.protocol(l).seams_of(from, to) : seams_->of(l, from, to);
  }
  bool seam(uint64_t l, uint64_t w) const {
    return geometry().seams_bytes ? lanes.protocol(l).seam(w) : !seams_->of(l, w, w + 1).empty();
  }
  // All seams between two stored rows, and `published` where this process's next row will have one.
  std::vector<uint64_t> seams(uint64_t l) const {
    const LaneView v = lanes.view(l);
    std::vector<uint64_t> at = seams_of(l, v.first + 1, std::max(v.first + 1, v.published));
    Lanes::Protocol::after_reading();
    const uint64_t first = lanes.first_now(l);
    std::erase_if(at, [first](uint64_t w) { return w <= first; });
    if (next_is_seam(l) && v.published > first) at.push_back(v.published);
    return at;
  }
  // Called before restored rows are written, because their trailers carry the seams: at(0), ..., at(n - 1), ascending. A seam
  // at `published` belongs to the next row.
  template <typename At>
  void set_seams(uint64_t l, uint64_t base, uint64_t published, uint64_t n, At&& at) const {
    lanes.set_seams(l, base, published, n, at);
    seams_->replace(l, geometry().seams_bytes ? 0 : n, at, published);
    seams_->set_next(l, published > base && n > 0 && at(n - 1) == published);
  }
  void forget_seams() const { seams_->forget(); }
  // Copies the counters, log and seams of a store with as many lanes and slots; the caller copies the rows.
  void take_counters(const Store& other) {
    const StoreGeometry &mine = geometry(), &its = other.geometry();
    constexpr size_t session = sizeof(StoreHeader::geometry_lines);
    std::memcpy(at(session), other.at(session), sizeof(StoreHeader) - session);
    std::memcpy(at(sizeof(StoreHeader)), other.at(sizeof(StoreHeader)), its.lanes * (sizeof(LaneHeader) + its.seams_bytes));
    if (mine.features & its.features & kHasFlow) {
      std::memcpy(at(flow_offset(mine)), other.at(flow_offset(its)), flow_bytes(its));
      std::memcpy(at(mine.consumers_offset), other.at(its.consumers_offset), sizeof(Flow));
    }
    std::memcpy(at(mine.log_offset), other.at(its.log_offset), kLogEntries * 8);
    for (uint64_t l = 0; l < its.lanes; ++l) seams_->set_next(l, other.seams_->next(l));
  }
  void after_fork() {
    seams_->after_fork();
    if (observations_) observations_->after_fork();
    writer_ = guest_ = 0, has_turn_ = has_written_ = removes_ = takes_ = false;
    stint_ = {}, write_as(nullptr), streams_ = {}, kept_.clear();
  }

  // ---- writers that take turns in a lane. The caller keeps this process's other threads out ----
  // This process's number among the writers of a lane, with its pid in the lowest bits; 0: one writer holds the lane.
  uint64_t writer() const { return writer_; }
  void set_writer(uint64_t writer) { writer_ = writer; }
  bool has_turn() const { return has_turn_; }
  // Whether this process has ever appended in a turn.
  bool has_written() const { return has_written_; }
  // Takes the turn from `dead`, a writer that died with it; 0: from no writer. Returns 0, or the writer that has the turn or
  // had it just now.
  uint64_t begin_turn(uint64_t l, uint64_t dead = 0) {
    const auto turns = lanes.turns(l);
    while (!(has_turn_ = turns.take(writer_, dead)))
      if (const uint64_t holder = turns.holder(); holder || dead) return holder ? holder : dead;
    if (dead && lanes.removed_rows(l)) lanes.recount_removed(l);
    return 0;
  }
  void end_turn(uint64_t l) {
    if (!has_turn_) return;
    has_turn_ = false;
    lanes.turns(l).give_back();
  }
  // Returns the turn to the writer that died with it, so that the next process that takes it makes the repairs that are due
  // then.
  void undo_takeover(uint64_t l, uint64_t dead) {
    if (!has_turn_ && !removes_) return;
    has_turn_ = removes_ = false;
    lanes.lane(l).turn.store(dead, std::memory_order_release);
  }
  // The stint of this process: its lane, or kNone; the ticket that the lane has after it (0: that of the stint); rows that it has
  // appended to the store; and which entries of its rows agree at a border (BorderCheck), known in the lane of the stint before.
  // `stream`, `record`: of one that this process appends for another (0: its own), and which the table of streams counts.
  struct Stint {
    static constexpr uint64_t kNone = LaneChoice::kNone;
    uint64_t lane = kNone, ticket_after = 0, position = 0, border_agreed = 0, stream = 0;
    Counter* record = nullptr;
    bool keeps = false;  // the turn of its lane between appends, so that it is known where its next rows go
  };
  bool keeps_turn(uint64_t l) const { return l < kept_.size() && kept_[l]; }
  bool kept_for(uint64_t l, const Stint& stint) const { return keeps_turn(l) && kept_[l] == &stint; }
  void keep_turn(uint64_t l) {
    kept_.resize(lanes.count());
    kept_[l] = &stint();
  }
  void give_turn_back(uint64_t l) {
    if (l < kept_.size()) kept_[l] = nullptr;
    lanes.turns(l).give_back();
  }
  // Gives the turn back that is kept for a stream, or for any; null: for all.
  void give_kept_back(const Stint* stint) {
    for (uint64_t l = 0; l < kept_.size(); ++l)
      if (kept_[l] && (!stint || kept_[l] == stint)) give_turn_back(l);
  }
  // Whether this process moves from lane to lane.
  bool moves_on() const { return writer_ && lanes.count() > 1; }
  const WriterLocks& writer_locks() const { return writer_locks_; }
  void set_writer_locks(const WriterLocks& locks) { writer_locks_ = locks; }
  Stint& stint() { return other_ ? *other_ : stint_; }
  const Stint& stint() const { return other_ ? *other_ : stint_; }
  // From now on this process appends the rows of another stream; null: its own.
  void write_as(Stint* other) { other_ = other; }
  // The number that names the writer of the rows that are appended.
  uint64_t author() const { return stint().stream ? stint().stream : writer_; }
  void use_streams(StreamTable streams) { streams_ = std::move(streams); }
  const StreamTable& streams() const { return streams_; }

  // ---- removing rows and taking them out of a queue, by this process, which need not be a writer: a turn for a moment, under a
  // number of its own ----
  void set_guest(uint64_t number) { guest_ = number; }
  uint64_t guest() const { return guest_; }
  // As `begin_turn`. Where this process has the turn for an append, or keeps it for a stream, it has it already.
  uint64_t begin_removing(uint64_t l, uint64_t dead = 0) {
    if (has_turn_ || keeps_turn(l)) return 0;
    const auto turns = lanes.turns(l);
    while (!(removes_ = turns.take(guest_, dead)))
      if (const uint64_t holder = turns.holder(); holder || dead) return holder ? holder : dead;
    if (dead && lanes.removed_rows(l)) lanes.recount_removed(l);
    return 0;
  }
  void end_removing(uint64_t l) {
    if (!std::exchange(removes_, false)) return;
    lanes.turns(l).give_back();
  }
  // The turn to take rows out of a queue. Without a number nobody else uses the store.
  uint64_t begin_taking(uint64_t dead = 0) {
    if (!guest_) return 0;
    const TurnProtocol<StdMemory> turns{lanes.flow().consumer_turn, lanes.flow().consumer_turn};
    while (!(takes_ = turns.take(guest_, dead)))
      if (const uint64_t holder = turns.holder(); holder || dead) return holder ? holder : dead;
    return 0;
  }
  void end_taking() {
    if (std::exchange(takes_, false)) lanes.flow().consumer_turn.store(0, std::memory_order_release);
  }
  // Before the bit of row w is set: that a power cut cannot leave the bit without the count of rows that says whose it is
  // (docs/memory-model.md, "Power loss").
  void sync_before_removing(uint64_t l, uint64_t w) {
    if (!has_trailer() || planted(24)) return;
    const uint64_t incarnation = header()->incarnation.load();
    if (std::exchange(counted_in_, incarnation) != incarnation) counted_on_disk_.clear();  // a load may count from fewer rows
    counted_on_disk_.resize(lanes.count());
    if (w < std::max(counted_on_disk_[l], lanes.lane(l).durable.load())) return;
    std::vector<uint64_t> published;
    for (uint64_t i = 0; i < lanes.count(); ++i) published.push_back(lanes.published_now(i));
    if (!synced(0, flow_offset(geometry()))) throw SyncFailed("the header");
    counted_on_disk_ = std::move(published);
  }

  // Called before the first row of an append is claimed.
  void begin_rows(uint64_t l) {
    if (lanes.count() > 1) lanes.note_time(l);
    if (!writer_) return;
    lanes.turns(l).begin_rows(author());
    has_written_ = true;
  }

  // ---- the border between stored and appended rows ----
  void set_border(BorderRule rule) { border_ = std::move(rule); }
  // The dimensions of environments of a step, the last one the fastest; empty: steps have none.
  const std::vector<uint64_t>& env_shape() const { return env_shape_; }
  void set_env_shape(std::vector<uint64_t> shape) {
    uint64_t envs = 1;
    for (uint64_t d : shape) envs = d && d <= geometry().envs ? envs * d : 0;
    if (envs != geometry().envs) throw std::invalid_argument("these are not the environments of this store");
    env_shape_ = std::move(shape);
  }
  const BorderRule& border() const { return border_; }

  // The running save; rows are copied for it before they change.
  std::shared_ptr<CopyOnWriteSnapshot> begin_save() { return snapshot_ = watch_save(); }
  // A save during which no writer of this process runs, so that rows need not be copied for it.
  std::shared_ptr<CopyOnWriteSnapshot> watch_save() {
    std::vector<CopyOnWriteSnapshot::Range> ranges;
    for (uint64_t l = 0; l < geometry().lanes; ++l) {
      const LaneView v = lanes.view(l);
      ranges.push_back({v.first, std::max(v.first, v.published)});
    }
    return std::make_shared<CopyOnWriteSnapshot>(region_, lanes, row(0), std::move(ranges), observations_);
  }
  void end_save() { snapshot_.reset(); }
  CopyOnWriteSnapshot* saving() const { return snapshot_.get(); }
  const StoreGeometry& geometry() const { return lanes.geometry(); }
  StoreHeader* header() const {
    check_file();
    return reinterpret_cast<StoreHeader*>(region_->data());
  }
  // Called before the map is touched: throws FileCutShort if the file is now shorter than the store. This costs a branch for
  // private memory and sealed shared memory, and one fstat for a file, which may still be truncated during the call. In a
  // process that was forked by other code than Python's, it first runs the callbacks that Python's hooks run after a fork.
  void check_file() const {
    joined_after_fork();
    if (watched_ && is_cut_short()) refuse_file();
  }
  uint8_t* at(uint64_t offset) const { return region_->data() + offset; }
  std::shared_ptr<MappedRegion> region() const { return region_; }
  int fd() const { return fd_; }
  bool read_only() const { return read_only_; }
  // Called before any write: an observer's map is read-only.
  void must_be_writable() const {
    if (refuses_writes_) refuse_writes();
    check_file();
  }
  // Whether the caller's descriptor still refers to the mapped file, and the file is as long as the store.
  bool file_is_there() const {
    struct stat file;
    return fd_ >= 0 && ::fstat(fd_, &file) == 0 && file.st_dev == device_ && file.st_ino == inode_ &&
           static_cast<uint64_t>(file.st_size) >= bytes_in_use();
  }
  // Of the file: all that may be read and written.
  uint64_t bytes_in_use() const { return geometry().total_bytes + (observations_ ? observations_->bytes_in_use() : 0); }
  Readahead& readahead() { return readahead_; }
  std::string layout() const {
    return {reinterpret_cast<const char*>(at(geometry().layout_offset)), geometry().layout_bytes};
  }
  // Waits until these bytes are on disk.
  bool synced(uint64_t offset, uint64_t bytes) const {
    const uint64_t from = offset / kPage * kPage;
    if (::msync(at(from), offset + bytes - from, MS_SYNC) == 0) return true;
    sync_failures_.fetch_add(1);
    return false;
  }
  // The bits of removed rows, and their counts.
  bool removed_synced() const { return synced(flow_offset(geometry()), flow_bytes(geometry())); }
  // Number of failed syncs in this process.
  uint64_t sync_failures() const { return sync_failures_.load(); }
  void count_sync_failure() const { sync_failures_.fetch_add(1); }

  // The physical row of a time slot of a lane: each environment's rows are consecutive in time.
  uint64_t physical(uint64_t lane, uint64_t env, uint64_t slot) const {
    const StoreGeometry& s = geometry();
    return (lane * s.envs + env) * s.lane_capacity + slot;
  }
  uint8_t* row(uint64_t physical_row) const {
    return rows_ + physical_row * geometry().row_stride;
  }
  bool has_trailer() const { return geometry().features & kHasTrailer; }
  uint64_t slots() const { return geometry().lanes * geometry().lane_capacity * geometry().envs; }

  Trailer* trailer(uint8_t* row) const {
    return reinterpret_cast<Trailer*>(row + geometry().row_stride - sizeof(Trailer));
  }
  uint32_t row_crc(const uint8_t* row, uint64_t physical_row, uint64_t sequence_and_seam, uint32_t term) const {
    struct { uint64_t row, sequence_and_seam, term; } end{physical_row, sequence_and_seam, term};
    const uint32_t crc = crc32c(id_crc_, row, geometry().payload_bytes);
    return crc32c(crc, &end, sizeof end);
  }
  void seal(uint8_t* row, uint64_t physical_row, uint64_t sequence_and_seam, uint32_t term) const {
    Trailer* t = trailer(row);
    t->sequence_and_seam = sequence_and_seam, t->term = term, t->crc = row_crc(row, physical_row, sequence_and_seam, term);
  }
  // Whether row w of a lane was completely written, in an environment, with all that it has beside it. `trailer`: its own.
  bool has_whole_row(uint64_t l, uint64_t env, uint64_t w) const {
    const uint64_t p = physical(l, env, w % geometry().lane_capacity);
    const Trailer* const t = trailer(row(p));
    return whole(p) && t->sequence() == w && (!observations_ || observations_->is_whole(l, env, w, t->term));
  }
  // Whether a row was completely written, and belongs in this place.
  bool whole(uint64_t physical_row) const {
    uint8_t* r = row(physical_row);
    const Trailer t = *trailer(r);
    return t.sequence() % geometry().lane_capacity == physical_row % geometry().lane_capacity &&
           t.crc == row_crc(r, physical_row, t.sequence_and_seam, t.term);
  }

 private:
  Store(std::shared_ptr<MappedRegion> region, int fd, const struct stat& file)
      : region_(std::move(region)), fd_(fd), named_(fd >= 0 && file.st_nlink > 0), device_(file.st_dev),
        inode_(file.st_ino), readahead_(fd) {}
  void ready(const StoreGeometry& geometry) {
    rows_ = at(geometry.rows_offset), room_ = geometry.lanes * geometry.lane_capacity * geometry.envs;
    seams_->use(geometry.lanes);
    use_lanes(geometry);
    id_crc_ = crc32c(0, geometry.store_id, 16);
    watched_ = fd_ >= 0 && (named_ || !cannot_shrink(fd_));  // only files without a name can be sealed
  }
  void use_lanes(const StoreGeometry& geometry) {
    refuses_writes_ = read_only_ || (geometry.features & kHasObservations) != 0;
    lanes = Lanes(header(), reinterpret_cast<LaneHeader*>(at(sizeof(StoreHeader))),
                  reinterpret_cast<Counter*>(at(geometry.seams_offset)), geometry, fd_ >= 0);
  }
  void use_room() {
    rows_ = growing_->data();
    room_ = std::min(geometry().lane_capacity, growing_->bytes() / geometry().row_stride);
  }
  static bool cannot_shrink(int fd) {
#if defined(F_GET_SEALS) && defined(F_SEAL_SHRINK)
    const int seals = ::fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK);
#else
    return false;
#endif
  }
  // The descriptor belongs to the caller. False if it is closed or refers to another file by now.
  [[gnu::noinline]] bool is_cut_short() const {
    struct stat file;
    return ::fstat(fd_, &file) == 0 && file.st_dev == device_ && file.st_ino == inode_ &&
           static_cast<uint64_t>(file.st_size) < bytes_in_use();
  }
  [[noreturn, gnu::noinline]] void refuse_writes() const {
    throw std::invalid_argument(read_only_ ? "this store was opened to be observed: nothing can be written to it"
                                           : "what is kept beside the rows of this store is not known yet: nothing can be written to it");
  }
  [[noreturn, gnu::noinline]] void refuse_file() const {
    throw FileCutShort("the store's file was cut short: it has fewer than the " + std::to_string(bytes_in_use()) +
                       " bytes of the store, and what it lacks cannot be read or written. Close this storage, put the "
                       "file back from a copy, or load a checkpoint into a new one");
  }
  static struct stat file_of(int fd) {
    struct stat file;
    if (::fstat(fd, &file) != 0) throw std::runtime_error(std::string("cannot stat the file: ") + std::strerror(errno));
    return file;
  }

  std::shared_ptr<MappedRegion> region_;
  int fd_;
  bool named_;
  bool read_only_ = false;
  bool refuses_writes_ = false;  // read only, or observations are to be kept first
  bool watched_ = false;  // a file that other processes can truncate
  dev_t device_ = 0;
  ino_t inode_ = 0;
  Readahead readahead_;
  uint32_t id_crc_ = 0;
  std::shared_ptr<CopyOnWriteSnapshot> snapshot_;  // set and read by threads that hold the storage's mutex
  std::shared_ptr<SeamNotes> seams_ = std::make_shared<SeamNotes>();
  uint8_t* rows_ = nullptr;
  uint64_t room_ = 0;  // the slots that have memory
  std::shared_ptr<MappedRegion> growing_;  // of the rows, where they grow
  static constexpr uint64_t kPieceBytes = 1 << 20;  // that are claimed together, where observations are kept beside rows
  std::shared_ptr<Observations> observations_;
  uint64_t writer_ = 0, guest_ = 0;
  bool has_turn_ = false, has_written_ = false, removes_ = false, takes_ = false;
  uint64_t counted_in_ = 0;                // the incarnation in which they were counted
  std::vector<uint64_t> counted_on_disk_;  // of each lane: rows below this are counted by the header on the disk
  Stint stint_, *other_ = nullptr;
  StreamTable streams_;
  std::vector<const Stint*> kept_;  // of each lane: the stream for which its turn is kept
  WriterLocks writer_locks_;
  mutable std::atomic<uint64_t> sync_failures_{0};
  BorderRule border_;
  std::vector<uint64_t> env_shape_;
};

}  // namespace engram
