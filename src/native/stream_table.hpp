// The file of a table of streams: a page that engram.distributed fills, then entries, each of which begins with a StreamRecord.
#pragma once
#include <sys/stat.h>

#include <memory>
#include <stdexcept>

#include "lane_protocol.hpp"
#include "mapping.hpp"
#include "stream_protocol.hpp"

namespace engram {

class StreamTable {
 public:
  static constexpr uint64_t kHead = 4096, kEntryBytes = 512;
  static_assert(StreamRecord<StdMemory>::kWords * 8 <= 128);  // the rest of an entry is not touched here

  StreamTable() = default;
  // `fd`: the table, which keeps its size. Throws where it is none.
  explicit StreamTable(int fd) {
    struct stat status{};
    if (::fstat(fd, &status) != 0 || status.st_size < static_cast<off_t>(kHead + kEntryBytes))
      throw std::invalid_argument("the file is no table of streams");
    region_ = MappedRegion::map(fd, static_cast<size_t>(status.st_size));
    entries_ = (static_cast<uint64_t>(status.st_size) - kHead) / kEntryBytes;
  }
  uint64_t entries() const { return entries_; }
  std::atomic<uint64_t>* record(uint64_t entry) const {
    if (entry >= entries_) throw std::out_of_range("the table of streams has no such entry");
    return reinterpret_cast<std::atomic<uint64_t>*>(region_->data() + kHead + entry * kEntryBytes);
  }
  // S2 (StreamRecord::settle) of the stream that wrote the newest row of a dead writer's lane. Entries are used from 0 on.
  void settle(uint64_t lane, uint64_t dead, uint64_t writer, uint64_t published) const {
    for (uint64_t entry = 0; writer && entry < entries_; ++entry) {
      const StreamRecord<StdMemory> of(record(entry));
      const uint64_t stream = of.read().stream;
      if (!stream) return;
      if (stream == writer) of.settle(lane, dead, writer, published);
    }
  }

 private:
  std::shared_ptr<MappedRegion> region_;
  uint64_t entries_ = 0;
};

}  // namespace engram
