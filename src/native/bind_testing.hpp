// Views of a store's internals, for tests.
#pragma once
#include <nanobind/nanobind.h>

#include <cstddef>
#include <tuple>
#include <vector>

#include "bind_store.hpp"

namespace engram {

// As `Store.keep_durable_tails` of the first lane; `meanwhile` is called when it is known which rows are the newest.
inline bool keep_durable_tails_interrupted(Store& store, const nb::callable& meanwhile) {
  const Observations::Rows rows = store.lanes.protocol(0);
  const LaneView v = rows.look();
  meanwhile();
  return store.observations()->copy_newest_tails(rows, 0, v, store.lanes.lane(0).durable.load());
}

// Name, offset and bytes of each field of the blocks of a store's file, for tests that damage them.
using Fields = std::vector<std::tuple<const char*, size_t, size_t>>;
inline nb::dict block_fields() {
#define ENGRAM_FIELD(name) {#name, offsetof(Block, name), sizeof(Block::name)}
  const auto geometry = [] {
    using Block = StoreGeometry;
    return Fields{ENGRAM_FIELD(magic), ENGRAM_FIELD(version), ENGRAM_FIELD(lane_version), ENGRAM_FIELD(features),
                  ENGRAM_FIELD(feature_names), ENGRAM_FIELD(lanes), ENGRAM_FIELD(lane_capacity), ENGRAM_FIELD(envs),
                  ENGRAM_FIELD(payload_bytes), ENGRAM_FIELD(row_stride), ENGRAM_FIELD(seams_offset),
                  ENGRAM_FIELD(seams_bytes), ENGRAM_FIELD(layout_bytes), ENGRAM_FIELD(layout_offset),
                  ENGRAM_FIELD(log_offset), ENGRAM_FIELD(redo_offset), ENGRAM_FIELD(redo_bytes),
                  ENGRAM_FIELD(consumers_offset), ENGRAM_FIELD(arena_offset), ENGRAM_FIELD(rows_offset),
                  ENGRAM_FIELD(total_bytes), ENGRAM_FIELD(store_id), ENGRAM_FIELD(layout_crc), ENGRAM_FIELD(crc)};
  };
  const auto session = [] {
    using Block = StoreHeader;
    return Fields{ENGRAM_FIELD(incarnation), ENGRAM_FIELD(edits), ENGRAM_FIELD(log_head), ENGRAM_FIELD(replaced),
                  ENGRAM_FIELD(boot_id), ENGRAM_FIELD(clean), ENGRAM_FIELD(session_unused), ENGRAM_FIELD(host_id),
                  ENGRAM_FIELD(tickets), ENGRAM_FIELD(unused)};
  };
  const auto lane = [] {
    using Block = LaneHeader;
    return Fields{ENGRAM_FIELD(claimed), ENGRAM_FIELD(published), ENGRAM_FIELD(base), ENGRAM_FIELD(origin),
                  ENGRAM_FIELD(durable), ENGRAM_FIELD(term), ENGRAM_FIELD(version), ENGRAM_FIELD(version_unused),
                  ENGRAM_FIELD(border_looked), ENGRAM_FIELD(border_agreed), ENGRAM_FIELD(turn),
                  ENGRAM_FIELD(last_writer), ENGRAM_FIELD(writers), ENGRAM_FIELD(written_at),
                  ENGRAM_FIELD(ticket), ENGRAM_FIELD(until), ENGRAM_FIELD(extents_claimed),
                  ENGRAM_FIELD(extents_published), ENGRAM_FIELD(extents_base), ENGRAM_FIELD(extents), ENGRAM_FIELD(unused)};
  };
  const auto trailer = [] {
    using Block = Trailer;
    return Fields{ENGRAM_FIELD(sequence_and_seam), ENGRAM_FIELD(term), ENGRAM_FIELD(crc)};
  };
  const auto redo = [] {
    using Block = RedoHeader;
    return Fields{ENGRAM_FIELD(state), ENGRAM_FIELD(crc), ENGRAM_FIELD(rows), ENGRAM_FIELD(row_stride),
                  ENGRAM_FIELD(log_head)};
  };
#undef ENGRAM_FIELD
  nb::dict blocks;
  const auto add = [&](const char* block, size_t bytes, const Fields& fields) {
    nb::dict named;
    for (const auto& [name, offset, size] : fields) named[name] = nb::make_tuple(offset, size);
    blocks[block] = nb::make_tuple(bytes, named);
  };
  add("StoreGeometry", sizeof(StoreGeometry), geometry()), add("StoreHeader", sizeof(StoreHeader), session());
  add("LaneHeader", sizeof(LaneHeader), lane()), add("Trailer", sizeof(Trailer), trailer());
  add("RedoHeader", sizeof(RedoHeader), redo());
  return blocks;
}

}  // namespace engram
