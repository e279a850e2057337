// A stretch of mapped memory: private to the process, or shared through a file descriptor.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

namespace engram {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Becomes a MemoryError in Python. Its text is made without allocating memory.
class NoMemoryToMap : public std::bad_alloc {
 public:
  explicit NoMemoryToMap(size_t bytes) { std::snprintf(text_, sizeof text_, "no memory to map %zu bytes", bytes); }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[64];
};

class MappedRegion {
 public:
  // fd < 0: private memory. The caller has made the file at least `bytes` long. `read_only`: any store raises a signal.
  // `grows`: memory for `grow`, which takes stretches only whose pages are all of one kind.
  static std::shared_ptr<MappedRegion> map(int fd, size_t bytes, bool read_only = false, bool grows = false) {
    auto region = std::shared_ptr<MappedRegion>(new MappedRegion);  // allocated before the map, which it must unmap
    const bool is_private = fd < 0;
    // Private memory starts on a huge page, so that the kernel can back a big table with huge pages.
    const size_t slack = is_private && !grows && bytes >= kHugePage ? kHugePage : 0;
    void* at = ::mmap(nullptr, bytes + slack, read_only ? PROT_READ : PROT_READ | PROT_WRITE,
                      is_private ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED, fd, 0);
    if (at == MAP_FAILED && errno == ENOMEM) throw NoMemoryToMap(bytes);
    if (at == MAP_FAILED)
      throw std::runtime_error("cannot map " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
    region->mapped_ = region->start_ = static_cast<uint8_t*>(at), region->mapped_bytes_ = bytes + slack;
    if (slack) {
      region->start_ += (kHugePage - reinterpret_cast<uintptr_t>(at) % kHugePage) % kHugePage;
      ::madvise(region->start_, bytes, MADV_HUGEPAGE);
    }
    return region;
  }
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;
  ~MappedRegion() {
    if (mapped_) ::munmap(mapped_, mapped_bytes_);
  }

  // Makes private memory this long, at least as long as before; its bytes may lie elsewhere afterwards.
  void grow(size_t bytes) {
    void* at = ::mremap(mapped_, mapped_bytes_, bytes, MREMAP_MAYMOVE);
    if (at == MAP_FAILED && errno == ENOMEM) throw NoMemoryToMap(bytes);
    if (at == MAP_FAILED)
      throw std::runtime_error("cannot map " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
    mapped_ = start_ = static_cast<uint8_t*>(at), mapped_bytes_ = bytes;
  }

  uint8_t* data() const { return start_; }
  size_t bytes() const { return mapped_bytes_ - static_cast<size_t>(start_ - mapped_); }

 private:
  MappedRegion() = default;
  uint8_t* mapped_ = nullptr;
  uint8_t* start_ = nullptr;
  size_t mapped_bytes_ = 0;
};

}  // namespace engram
