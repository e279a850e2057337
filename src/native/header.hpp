// The first pages of a store, byte for byte the same in plain memory, shared memory and files.
// docs/store-format.md and docs/memory-model.md describe each field; moving a field needs a new version number.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace engram {

using Counter = std::atomic<uint64_t>;
static_assert(Counter::is_always_lock_free && sizeof(Counter) == 8);

constexpr char kMagic[8] = {'E', 'N', 'G', 'R', 'A', 'M', 'S', '1'};
constexpr uint32_t kVersion = 2;
constexpr uint32_t kLaneVersion = 1;
constexpr uint64_t kLogEntries = 8192;
constexpr uint64_t kLogBatch = 2048;       // most entries of one change before the log's head moves
constexpr uint64_t kReservedBytes = 4096;  // of each reserved page

// Optional features of a store: bit i of `features` is called kFeatures[i]. Code that does not know a set bit must refuse the
// store; the file carries the names, so that the error can name the feature.
constexpr const char* kFeatures[] = {"trailers", "observations", "stints", "flow", "ragged"};
constexpr uint64_t kHasTrailer = 1, kHasObservations = 2, kHasExtents = 4, kHasFlow = 8, kIsRagged = 16;
constexpr uint64_t kKnownFeatures = kHasTrailer | kHasObservations | kHasExtents | kHasFlow | kIsRagged;
// What a store with `flow` has ever been used for: bit i of `Flow::in_use` is called kUses[i]. A store with an unknown one is
// refused, as one with an unknown feature is; but a new one needs no bit on stores that never use it.
constexpr const char* kUses[] = {"removed rows", "rate limiter", "queue"};
constexpr uint64_t kRemovesRows = 1, kLimitsRate = 2, kIsQueue = 4, kKnownUses = kRemovesRows | kLimitsRate | kIsQueue;
constexpr uint64_t kExtents = 4;      // that a lane keeps
constexpr uint64_t kExtentWords = 3;  // of each

// The constant part of the header, written when the store is created; `crc` covers the bytes before it.
struct StoreGeometry {
  char magic[8];
  uint32_t version;
  uint32_t lane_version;    // of each lane's header, which repeats it
  uint64_t features;
  char feature_names[128];  // of the set bits, lowest first, separated by commas
  uint64_t lanes;
  uint64_t lane_capacity;   // time steps
  uint64_t envs;         // environments that share a lane's counters
  uint64_t payload_bytes;   // of one row, without its trailer
  uint64_t row_stride;      // payload and trailer, a multiple of the alignment
  uint64_t seams_offset;    // a bit for each time slot
  uint64_t seams_bytes;     // of one lane, whole cache lines; 0 where rows are kept elsewhere
  uint64_t layout_bytes;    // JSON, at layout_offset
  uint64_t layout_offset;
  uint64_t log_offset;      // kLogEntries slots (uint64)
  uint64_t redo_offset;
  uint64_t redo_bytes;
  uint64_t consumers_offset;  // of `Flow`
  uint64_t arena_offset;      // reserved: counters of a second ring of bytes
  uint64_t rows_offset;
  uint64_t total_bytes;
  uint8_t store_id[16];
  uint32_t layout_crc;      // of the layout's JSON
  uint32_t crc;
};
static_assert(sizeof(StoreGeometry) == 304);

struct StoreHeader {
  union {
    StoreGeometry geometry;
    uint8_t geometry_lines[512];
  };
  alignas(64) Counter incarnation;  // odd while sequences start again (empty, loads); raised twice by each
  alignas(64) Counter edits;        // odd while rows are changed in place; raised twice by each change
  Counter log_head;                 // in-place writes ever entered in the log
  Counter replaced;                 // total number of sequences given to rows that were written over others out of turn
  alignas(64) uint8_t boot_id[16];  // of the machine, in the last session that wrote
  uint32_t clean;                   // 1: closed by its last user, everything on disk
  uint32_t session_unused;
  uint8_t host_id[16];              // of that machine, unchanged by a restart; zeros: unknown
  Counter tickets;                  // of several lanes: how many stints were ever begun
  uint8_t unused[1024 - 512 - 216];
};
static_assert(sizeof(StoreHeader) == 1024);

struct LaneHeader {
  alignas(64) Counter claimed;    // rows below claimed - lane_capacity may be half overwritten
  alignas(64) Counter published;  // rows below this are whole
  alignas(64) Counter base;       // rows below this do not exist
  alignas(64) Counter origin;     // write_count = published - origin (modulo 2^64)
  Counter durable;                // published at the last flush
  Counter term;                   // raised when a process takes the lane, and by recovery
  alignas(64) uint32_t version;   // kLaneVersion
  uint32_t version_unused;
  Counter border_looked;          // border rule: the writer has searched for two consecutive steps up to this row,
  Counter border_agreed;          // and a bit for each entry that agreed between the last two; kBorderKnown: there were two
  alignas(64) Counter turn;       // the writer that is appending, where several take turns; 0: none
  Counter last_writer;            // the writer of the newest row; 0: unknown
  Counter writers;                // how many numbers were given to writers that take turns
  Counter written_at;             // of several lanes: when the newest row was written, ns since 1970; 0: unknown
  Counter ticket;                 // of several lanes: which of the store's stints the last one here was; 0: there was none
  Counter until;                  // where the last stint ends
  Counter extents_claimed;        // of the ring of extents, as those of rows
  Counter extents_published;
  Counter extents_base;
  Counter extents[kExtents * kExtentWords];  // start, stream, position
  uint8_t unused[512 - 320 - 72 - 8 * kExtents * kExtentWords];
};
static_assert(sizeof(LaneHeader) == 512);
static_assert(offsetof(LaneHeader, turn) == 320 && offsetof(LaneHeader, ticket) == 352 && offsetof(LaneHeader, unused) == 488);
static_assert(offsetof(StoreHeader, tickets) == 680);
constexpr uint64_t kBorderKnown = uint64_t{1} << 63;

// ---- of stores with the feature `flow` ----
// Of each lane, behind the seams of all lanes. Then come two planes of bits, a bit for each row of each lane in the order of slots,
// on cache lines that no two lanes share: the removed rows; and one that is not used yet.
struct LaneFlow {
  // Of a queue (queue_protocol.hpp), in rows: time steps x environments.
  alignas(64) Counter consumed;  // rows below it were handed out,
  Counter kept;                  // and rows below this one may be overwritten
  Counter removed;               // bits that are set among those of removed rows; after a kill perhaps more, never fewer
  Counter rows;                  // not used yet: rows of any length ever written
  uint8_t unused[32];
};
static_assert(sizeof(LaneFlow) == 64);

// ---- of stores with the feature `ragged` ----
// A row has any length: it takes several time slots behind one another, its *pages*, of one lane. The seam bit marks the first one,
// its *head*, and no other; the row's index is its head's slot. The bytes of a row begin with this, at the head's begin.
struct RowHead {
  uint64_t bytes;  // of the row, these included
};
static_assert(sizeof(RowHead) == 8);
// The most pages of a row: a lane keeps some rows of any length, and a writer that moves on leaves less than this of a lane unused.
inline uint64_t longest_row(const StoreGeometry& s) {
  return s.features & kIsRagged && s.lane_capacity >= 4 ? s.lane_capacity / 4 : 1;
}

// At `consumers_offset`.
struct Flow {
  Counter in_use;    // bits of kUses
  Counter removals;  // raised before and after rows are removed: what was drawn from before is looked at again
  Counter mode;          // bits of `FlowMode`; 0: nobody waits
  Counter limiter[4];    // bits of doubles: samples per insert, rows from which on, draws that samplers may be ahead, and behind
  Counter samples;       // rows drawn since the counts began
  Counter inserts_base;  // rows written before the counts began, modulo 2^64; kCountsAnew: they begin when somebody looks
  // Of a queue: the policy's version where rows are trained; who takes rows now, and how often a consumer began anew, and which.
  Counter consumer_version, consumer_turn, session, session_owner;
  Counter insert_waits, insert_waited_ns, sample_waits, sample_waited_ns;  // how often users of the store waited, and how long
  Counter missed, stale;   // rows of a queue that were overwritten before they were handed out, and that were too old
  Counter writer_waits;    // when somebody last found no room in a queue, ns since 1970
  Counter reader_waits;    // when somebody last found no batch in it
  Counter era;             // another number when all rows were replaced by others; a power cut, which loses some, leaves it
};
// Who waits for whom: a bound on draws and writes (rate_limit.hpp), or a queue (queue.hpp).
struct FlowMode {
  static constexpr uint64_t kLimits = 1, kWidens = 2;                    // a bound; it grows with the batches
  static constexpr uint64_t kQueue = 4, kOverwrites = 8, kCommits = 16;  // a queue; full, it is overwritten; rows go by `commit`
};
constexpr uint64_t kCountsAnew = uint64_t{1} << 63;
static_assert(sizeof(Flow) == 176 && sizeof(Flow) <= kReservedBytes);

inline uint64_t flow_offset(const StoreGeometry& s) { return s.seams_offset + s.lanes * s.seams_bytes; }
// Of one lane in one plane; 0 where rows are kept elsewhere, as their seams are.
inline uint64_t plane_bytes(const StoreGeometry& s) {
  return s.features & kHasFlow && s.seams_bytes ? ((s.lane_capacity * s.envs + 63) / 64 * 8 + 63) / 64 * 64 : 0;
}
inline uint64_t removed_offset(const StoreGeometry& s) { return flow_offset(s) + s.lanes * sizeof(LaneFlow); }
inline uint64_t flow_bytes(const StoreGeometry& s) {
  return s.features & kHasFlow ? s.lanes * (sizeof(LaneFlow) + 2 * plane_bytes(s)) : 0;
}

// The end of each row of a store that outlives its processes.
struct Trailer {
  static constexpr uint64_t kSeam = uint64_t{1} << 63;
  uint64_t sequence_and_seam;  // the row's sequence; the highest bit: a trajectory begins here
  uint32_t term;
  uint32_t crc;              // CRC32C over store id, physical row, payload, sequence and seam, term
  uint64_t sequence() const { return sequence_and_seam & ~kSeam; }
  bool seam() const { return sequence_and_seam & kSeam; }
};
static_assert(sizeof(Trailer) == 16);

struct RedoHeader {
  std::atomic<uint32_t> state;  // kRedoMarked: the entry is complete, and may be applied in part
  uint32_t crc;                 // over rows, row_stride and the entries
  uint64_t rows;                // and kRedoReplaces
  uint64_t row_stride;
  uint64_t log_head;            // the log's head after this change
};
static_assert(sizeof(RedoHeader) == 32);
constexpr uint32_t kRedoMarked = 0x52454430;
constexpr uint64_t kRedoReplaces = uint64_t{1} << 63;  // in `rows`: they replace others, of which some were removed

// Rows that were written over others out of turn carry their own sequence, from this one on: no lane's count reaches it.
constexpr uint64_t kFirstReplaced = uint64_t{1} << 62;

}  // namespace engram
