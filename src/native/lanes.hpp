// Lanes: which rows exist and which of them a reader may trust. One process appends to a lane; any process reads.
// Each fence is explained in docs/memory-model.md; ENGRAM_PLANT_* builds replace it by the reordering that it forbids.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "crc32c.hpp"
#include "header.hpp"
#include "lane_protocol.hpp"
#include "mapping.hpp"
#include "queue_protocol.hpp"
#include "stint_protocol.hpp"

namespace engram {

// The sequence of the row in a slot of a lane, without a division for each row.
struct SlotSequences {
  uint64_t newest = 0, newest_slot = 0, capacity = 1, first = 0;
  bool any = false;
  SlotSequences() = default;
  SlotSequences(const LaneView& v, uint64_t lane_capacity) : capacity(lane_capacity), first(v.first) {
    any = v.rows() > 0;
    if (any) newest = v.published - 1, newest_slot = newest % capacity;
  }
  // False: the slot holds no row.
  bool find(uint64_t slot, uint64_t& sequence) const {
    if (!any) return false;
    const uint64_t back = this->back(slot);
    if (back > newest) return false;
    sequence = newest - back;
    return sequence >= first;
  }
  // From the newest slot.
  uint64_t back(uint64_t slot) const { return newest_slot - slot + (slot <= newest_slot ? 0 : capacity); }
  // Of slots of the lane.
  struct Range {
    uint64_t from = 0, width = 0;
    bool has(uint64_t slot) const { return slot - from < width; }
  };
  // The slots of all rows but the n oldest; n: at least 1. Where these go round, those of the gap are left out of all numbers.
  Range without_oldest(uint64_t n) const {
    const uint64_t rows = any ? newest - first + 1 : 0;
    if (rows <= n) return {};
    const uint64_t gap = capacity - (rows - n), behind = newest_slot + 1;
    return behind >= rows - n ? Range{behind - (rows - n), rows - n} : Range{behind + gap, -gap};
  }
  // Whether all of these slots hold rows; slots of another lane or beyond do not.
  bool find_all(const int64_t* slots, size_t n) const {
    uint64_t missing = !any && n > 0;
    const uint64_t reach = newest - first;  // steps from the newest row to the oldest
    for (size_t i = 0; i < n; ++i) {
      const auto slot = static_cast<uint64_t>(slots[i]);
      missing |= static_cast<uint64_t>(slot >= capacity) | static_cast<uint64_t>(back(slot) > reach);
    }
    return !missing;
  }
};

// Bits in memory of this process that grow: the removed rows of stores that only count, whose capacity may be larger than any
// memory. Readers need no lock: an array that was too short is kept until all are forgotten.
class GrowingBits {
 public:
  // Those of a lane with this count; of an older array, while another thread makes a longer one.
  RemovedRows<StdMemory> with(Counter& count) const {
    const Array* const now = now_.load(std::memory_order_acquire);
    if (!now) return {nullptr, &count, 0};
    return {now->words.get(), &count, now->n * 64};
  }
  // Makes room for bits below `end`; one thread at a time.
  void reserve(uint64_t end) {
    const Array* const old = now_.load(std::memory_order_relaxed);
    const uint64_t had = old ? old->n : 0, need = (end + 63) / 64;
    if (need <= had) return;
    auto longer = std::make_unique<Array>();
    longer->n = std::max(need, 2 * had);
    longer->words = std::make_unique<Counter[]>(longer->n);
    for (uint64_t i = 0; i < had; ++i) longer->words[i].store(old->words[i].load(std::memory_order_relaxed), std::memory_order_relaxed);
    arrays_.push_back(std::move(longer));
    now_.store(arrays_.back().get(), std::memory_order_release);
  }

 private:
  struct Array {
    uint64_t n = 0;
    std::unique_ptr<Counter[]> words;
  };
  std::atomic<const Array*> now_{nullptr};
  std::vector<std::unique_ptr<Array>> arrays_;
};

// Compared before and after a read: if both are equal, only appends happened in between.
struct Epoch {
  uint64_t incarnation = 0, edits = 0;
  bool operator==(const Epoch& o) const { return incarnation == o.incarnation && edits == o.edits; }
  bool quiet() const { return edits % 2 == 0; }
};

class Lanes {
 public:
  using Protocol = LaneProtocol<StdMemory>;

  Lanes() = default;
  // `geometry` is a checked copy: the one in the store may change at any time (a damaged disk, another process).
  Lanes(StoreHeader* header, LaneHeader* lanes, Counter* seams, const StoreGeometry& geometry, bool others_see_it)
      : header_(header), lanes_(lanes), ends_(lanes), seams_(geometry.seams_bytes ? seams : nullptr), geometry_(geometry),
        piece_(claim_steps(geometry.lane_capacity, geometry.row_stride, others_see_it)), longest_(longest_row(geometry)) {
    if (!(geometry.features & kHasFlow)) return;
    auto* const at = reinterpret_cast<uint8_t*>(header);
    flow_ = reinterpret_cast<Flow*>(at + geometry.consumers_offset);
    lane_flows_ = reinterpret_cast<LaneFlow*>(at + flow_offset(geometry));
    removed_ = reinterpret_cast<Counter*>(at + removed_offset(geometry));
    plane_words_ = plane_bytes(geometry) / sizeof(Counter);
    if (!plane_words_) removed_here_ = std::make_shared<std::vector<GrowingBits>>(geometry.lanes);
  }

  const StoreGeometry& geometry() const { return geometry_; }
  uint64_t count() const { return geometry().lanes; }
  uint64_t capacity() const { return geometry().lane_capacity; }
  uint64_t envs() const { return geometry().envs; }
  // Whether rows have any length, and the most pages of one (`RowHead`); 1 where all rows have one length.
  bool is_ragged() const { return geometry_.features & kIsRagged; }
  uint64_t longest() const { return longest_; }
  // Whether a row begins in a slot of the store. The bit is that of whatever row is there now.
  bool is_head(uint64_t slot) const { return protocol(slot / capacity()).seam(slot % capacity()); }
  StoreHeader& header() const { return *header_; }
  LaneHeader& lane(uint64_t l) const { return lanes_[l]; }
  Protocol protocol(uint64_t l) const {
    LaneHeader& h = lanes_[l];
    Counter* const seams = seams_ ? seams_ + l * (geometry_.seams_bytes / sizeof(Counter)) : nullptr;
    return {h.claimed, ends_[l].published, h.base, seams, capacity(), envs()};
  }
  // The same with the removed rows, for who writes or removes, and who looks at their bits.
  Protocol with_removed(uint64_t l) const {
    Protocol lane = protocol(l);
    lane.removed = removed(l);
    return lane;
  }
  // From here on this object sees no newer rows than those of now; overwritten rows still disappear.
  void freeze() {
    ends_ = lanes_;
    std::shared_ptr<LaneHeader[]> ends(new LaneHeader[count()]{});
    for (uint64_t l = 0; l < count(); ++l) {
      ends[l].published.store(view(l).published);
      ends[l].origin.store(lanes_[l].origin.load());
    }
    frozen_ = std::move(ends), ends_ = frozen_.get();
  }
  bool is_frozen() const { return ends_ != lanes_; }
  // As `view(l).published`, whatever `freeze` hides.
  uint64_t published_now(uint64_t l) const { return lanes_[l].published.load(std::memory_order_acquire); }

  // ---- removed rows ----
  // Whether rows can be removed: not in stores of an engram before the feature `flow`.
  bool has_flow() const { return flow_ != nullptr; }
  Flow& flow() const { return *flow_; }
  // Whether users of the store wait for each other: bits of `FlowMode`.
  uint64_t flow_mode() const { return flow_ ? flow_->mode.load(std::memory_order_relaxed) : 0; }
  bool is_limited() const { return flow_mode() & FlowMode::kLimits; }
  bool is_queue() const { return flow_mode() & FlowMode::kQueue; }
  QueueProtocol<StdMemory> queue(uint64_t l) const { return {protocol(l), lane_flows_[l].consumed, lane_flows_[l].kept}; }
  // Rows that were lost, or replaced by others, are no writes and no draws of those that come: both are counted from here on.
  // Draws are forgotten last: whoever looks in between has fewer to give, not more.
  void count_anew() const {
    if (!flow_) return;
    flow_->inserts_base.store(kCountsAnew);
    flow_->samples.store(0);
  }
  // Before rows of a save come: what was counted of others, and the version that trained on them, are not theirs.
  void forget_counts() const {
    count_anew();
    if (flow_) flow_->missed.store(0), flow_->stale.store(0), flow_->consumer_version.store(0);
  }
  // Another number when rows were removed since; 0: none ever were. A reader that looks at the bits after it sees all that were
  // removed before.
  uint64_t removals() const { return flow_ ? flow_->removals.load(std::memory_order_acquire) : 0; }
  void note_removals() const { flow_->removals.fetch_add(1, std::memory_order_release); }
  // How many rows of a lane are removed; after a kill perhaps fewer than that.
  uint64_t removed_rows(uint64_t l) const { return flow_ ? lane_flows_[l].removed.load(std::memory_order_relaxed) : 0; }
  uint64_t removed_rows() const {
    uint64_t n = 0;
    for (uint64_t l = 0; removals() && l < count(); ++l) n += removed_rows(l);
    return n;
  }
  bool some_removed() const { return removals() && removed_rows() > 0; }
  RemovedRows<StdMemory> removed(uint64_t l) const {
    if (!flow_) return {};
    Counter& count = lane_flows_[l].removed;
    if (!plane_words_) return (*removed_here_)[l].with(count);
    return {removed_ + l * plane_words_, &count, capacity() * envs()};
  }
  bool is_removed(uint64_t slot) const {
    const uint64_t rows = capacity() * envs();
    return slot / rows < count() && removed(slot / rows).has(slot % rows);
  }
  // Before a row of a lane is removed, in stores that keep the bits in this process.
  void make_room_to_remove(uint64_t l, uint64_t end) const {
    if (removed_here_) (*removed_here_)[l].reserve(end);
  }
  // Uses the bits of the lanes of another store of the same memory.
  void share_removed(const Lanes& other) { removed_here_ = other.removed_here_; }
  // Calls visit(w, env) for each removed row of a lane that exists.
  template <class Visit>
  void each_removed(uint64_t l, Visit&& visit) const {
    const RemovedRows<StdMemory> bits = removed(l);
    if (!bits.any()) return;
    const SlotSequences sequences(view(l), capacity());
    for (uint64_t word = 0; word * 64 < bits.end; ++word)
      for (uint64_t set = StdMemory::load(bits.bits[word]); set; set &= set - 1) {
        const uint64_t bit = word * 64 + static_cast<uint64_t>(__builtin_ctzll(set));
        uint64_t w = 0;
        if (sequences.find(bit / envs(), w)) visit(w, bit % envs());
      }
  }
  // Where the bits may not be those of the rows: counts them anew.
  void recount_removed(uint64_t l) const {
    if (!flow_) return;
    removed(l).recount();
    if (removed_rows(l) == 0) return;
    flow_->in_use.fetch_or(kRemovesRows, std::memory_order_relaxed);
    note_removals();
  }

  TurnProtocol<StdMemory> turns(uint64_t l) const { return {lanes_[l].turn, lanes_[l].last_writer}; }
  using Stints = StintProtocol<StdMemory>;
  Stints stints(uint64_t l) const {
    LaneHeader& h = lanes_[l];
    Counter* const records = geometry_.features & kHasExtents ? h.extents : nullptr;
    return {protocol(l), turns(l), h.ticket, h.until,
            {h.extents_claimed, h.extents_published, h.extents_base, nullptr, kExtents}, records};
  }
  uint64_t draw_ticket() const { return header_->tickets.fetch_add(1, std::memory_order_relaxed) + 1; }
  // Forgets a lane's stints; for a process that has the store to itself.
  void forget_stints(uint64_t l) const {
    LaneHeader& h = lanes_[l];
    const uint64_t end = std::max(h.extents_claimed.load(), h.extents_published.load());
    h.ticket.store(0), h.until.store(0);
    h.extents_claimed.store(end), h.extents_published.store(end), h.extents_base.store(end);
  }

  // ---- appending: only by the process that holds the lane or has the turn ----
  uint64_t piece() const { return piece_; }
  void limit_piece(uint64_t steps) { piece_ = std::clamp<uint64_t>(piece_, 1, std::max<uint64_t>(1, steps)); }
  uint64_t claim(uint64_t l, uint64_t n) const { return protocol(l).claim(n); }
  void publish(uint64_t l, uint64_t at, uint64_t n) const { protocol(l).publish(at, n); }
  // Notes when rows were written, so that the lane whose newest row is the oldest can be found. Accuracy does not matter: the
  // time only decides which lane a writer takes.
  void note_time(uint64_t l) const {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    const auto ns = static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
    lanes_[l].written_at.store(ns, std::memory_order_relaxed);
  }

  // ---- reading ----
  Epoch epoch() const {
    Epoch e;
    e.incarnation = header_->incarnation.load(std::memory_order_acquire);
    e.edits = Protocol::edits_before_reading(header_->edits);
    return e;
  }
  LaneView view(uint64_t l) const { return protocol(l).look(); }
  uint64_t origin(uint64_t l) const { return ends_[l].origin.load(); }
  // As `view`, at one moment: a reader that was suspended between its two loads, while a whole ring of rows was written, would
  // find no rows. `first` is at most `published`.
  LaneView settled_view(uint64_t l) const {
    LaneView v = view(l);
    for (int looks = 0; v.first > v.published && ends_ == lanes_ && looks < kLooks; ++looks) v = view(l);
    v.first = std::min(v.first, v.published);
    return v;
  }
  // The oldest row that is still whole, for a reader that has just copied rows: call after its acquire fence.
  uint64_t first_now(uint64_t l) const { return protocol(l).first_now(); }

  uint64_t rows() const {
    uint64_t total = 0;
    for (uint64_t l = 0; l < count(); ++l) {
      const LaneView v = view(l);
      total += v.first > v.published ? settled_view(l).rows() : v.published - v.first;
    }
    return total;
  }
  uint64_t write_count() const {
    uint64_t total = 0;
    for (uint64_t l = 0; l < count(); ++l)
      total += ends_[l].published.load(std::memory_order_acquire) - ends_[l].origin.load(std::memory_order_relaxed);
    return total;
  }

  // ---- for a process that has the store to itself ----
  // Called before and after sequences are reset. The incarnation is odd in between, so that `repair` notices a kill.
  void begin_change() const {
    if (header_->incarnation.load() % 2 == 0) header_->incarnation.fetch_add(1);
  }
  void end_change() const {
    if (header_->incarnation.load() % 2 == 1) header_->incarnation.fetch_add(1);
  }
  // Drops every row and sets the cursor to 0. Sequences never go back, so that a reader's old sequence finds no row.
  void empty(bool reset_count) const {
    begin_change();
    for (uint64_t l = 0; l < count(); ++l) empty_lane(l, reset_count);
    header_->tickets.store(0);
    count_anew();
    end_change();
  }
  // A kill in here leaves a lane without rows, and the values that `repair` needs to finish emptying it: `base` says where
  // sequences continue, `durable` how many rows were ever written.
  void set_counters(uint64_t l, uint64_t base, uint64_t published, uint64_t origin) const {
    LaneHeader& h = lanes_[l];
    h.durable.store(published - origin);
    h.base.store(kInTransition | published);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    h.origin.store(origin);
    h.border_agreed.store(0), h.border_looked.store(0);
    h.written_at.store(0);
    forget_stints(l);
    removed(l).clear(0, capacity() * envs());
    if (flow_) {
      flow_->era.fetch_add(1);
      lane_flows_[l].consumed.store(base * envs()), lane_flows_[l].kept.store(base * envs());
    }
    h.claimed.store(published);
    h.published.store(published);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    h.base.store(base);
    h.durable.store(base);
  }
  // Sets the seams of rows [base, published) to at(0), ..., at(n - 1), and clears all others.
  template <typename At>
  void set_seams(uint64_t l, uint64_t base, uint64_t published, uint64_t n, At&& at) const {
    const Protocol lane = protocol(l);
    lane.mark_seams(base, published - base, false);
    for (uint64_t i = 0; i < n; ++i)
      if (const uint64_t w = at(i); w >= base && w < published) lane.mark_seams(w, 1, true);
  }
  // No row was handed out that is not there: after rows were lost, or by a page of a damaged disk; also where the disk does not say
  // yet that the store is a queue. Rows that were lost before they were handed out count as missed, where no `seek` counts them.
  void limit_cursors(uint64_t l) const {
    if (!flow_) return;
    const uint64_t first = lanes_[l].base.load() * envs(), end = lanes_[l].published.load() * envs();
    LaneFlow& lane = lane_flows_[l];
    const uint64_t next = lane.consumed.load();
    if (next < first && is_queue() && !(flow_mode() & FlowMode::kCommits))
      flow_->missed.fetch_add(first - next), lane.consumed.store(first);
    if (next > end) lane.consumed.store(end);
    if (lane.kept.load() > end) lane.kept.store(end);
  }
  // Those that a power cut ended. The count of writers may be older than their numbers on the disk, and give these to others.
  void forget_consumers() const {
    if (!flow_) return;
    flow_->consumer_turn.store(0), flow_->session_owner.store(0);
  }
  // Finishes an `empty` that was killed, and empties lanes that a killed `loads` left half filled.
  void repair() const {
    const bool interrupted = header_->incarnation.load() % 2 == 1;
    for (uint64_t l = 0; l < count(); ++l) {
      LaneHeader& h = lanes_[l];
      const uint64_t base = h.base.load();
      if (base & kInTransition) {
        const uint64_t at = base & ~kInTransition;
        set_counters(l, at, at, at - h.durable.load());
      } else if (interrupted) {
        empty_lane(l, false);
      }
      const uint64_t published = h.published.load();
      if (h.base.load() > published) h.base.store(published);
      if (h.claimed.load() < published) h.claimed.store(published);
      if (h.durable.load() > published) h.durable.store(published);
      if (removed_rows(l)) recount_removed(l);
    }
    if (interrupted) count_anew();
    end_change();
  }

 private:
  static constexpr uint64_t kInTransition = uint64_t{1} << 63;
  static constexpr int kLooks = 1000;
  void empty_lane(uint64_t l, bool reset_count) const {
    LaneHeader& h = lanes_[l];
    const uint64_t at = h.published.load();
    const uint64_t next = round_up(std::max(at, h.claimed.load()), capacity());
    set_counters(l, next, next, next - (reset_count ? 0 : at - h.origin.load()));
  }

  StoreHeader* header_ = nullptr;
  LaneHeader* lanes_ = nullptr;
  LaneHeader* ends_ = nullptr;  // source of `published` and `origin`: `lanes_`, or the copies that `freeze` made
  std::shared_ptr<LaneHeader[]> frozen_;
  Counter* seams_ = nullptr;
  Flow* flow_ = nullptr;  // null: the store was made without
  LaneFlow* lane_flows_ = nullptr;
  Counter* removed_ = nullptr;  // the bits of all lanes, `plane_words_` of each
  uint64_t plane_words_ = 0;
  std::shared_ptr<std::vector<GrowingBits>> removed_here_;  // where the store does not hold them
  StoreGeometry geometry_{};
  uint64_t piece_ = 1, longest_ = 1;
};

}  // namespace engram
