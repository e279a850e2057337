// The floors: native code that copies the same bytes as a replay buffer does, with nothing around it.
//
// A table is packed rows: all leaves of one step next to each other. `gather` draws random rows and copies each leaf into
// an array of its own; `scatter` does the reverse at the write cursor. The mapped forms read random rows of a file.
// Everything returns seconds (a negative value is -errno), so that Python only divides.
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "random.hpp"
#include "tree.hpp"

namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Leaf {
  size_t offset, bytes;
  std::vector<char> batch;  // one array of the caller's
};

struct Table {
  size_t rows, row_bytes, batch;
  std::vector<Leaf> leaves;
  char* data;
  size_t mapped;
  Random random{12345};
  size_t cursor = 0;
};

std::vector<Leaf> lay_out(const size_t* leaf_bytes, size_t n, size_t batch) {
  std::vector<Leaf> leaves;
  size_t offset = 0;
  for (size_t i = 0; i < n; ++i) {
    leaves.push_back({offset, leaf_bytes[i], std::vector<char>(leaf_bytes[i] * batch)});
    offset += leaf_bytes[i];
  }
  return leaves;
}

template <size_t N>
void copy_leaf(char* out, const char* const* rows, size_t n, size_t offset) {
  for (size_t i = 0; i < n; ++i) std::memcpy(out + i * N, rows[i] + offset, N);
}

void copy_leaf(char* out, const char* const* rows, size_t n, size_t offset, size_t bytes) {
  switch (bytes) {  // the sizes that occur often, known to the compiler
    case 1: return copy_leaf<1>(out, rows, n, offset);
    case 4: return copy_leaf<4>(out, rows, n, offset);
    case 8: return copy_leaf<8>(out, rows, n, offset);
    case 16: return copy_leaf<16>(out, rows, n, offset);
    case 32: return copy_leaf<32>(out, rows, n, offset);
    default:
      for (size_t i = 0; i < n; ++i) std::memcpy(out + i * bytes, rows[i] + offset, bytes);
  }
}

constexpr size_t kBlock = 32;
constexpr size_t kLine = 64;
constexpr size_t kPrefetchedBytes = 1024;  // longer rows stream by themselves

void prefetch(const char* const* rows, size_t n, size_t row_bytes) {
  if (row_bytes > kPrefetchedBytes) return;
  for (size_t i = 0; i < n; ++i) {
    for (size_t at = 0; at < row_bytes; at += kLine) __builtin_prefetch(rows[i] + at);
    __builtin_prefetch(rows[i] + row_bytes - 1);
  }
}

void gather(std::vector<Leaf>& leaves, const std::vector<const char*>& rows, size_t row_bytes) {
  const size_t n = rows.size();
  prefetch(rows.data(), n < kBlock ? n : kBlock, row_bytes);
  for (size_t start = 0; start < n; start += kBlock) {
    const size_t count = n - start < kBlock ? n - start : kBlock;
    const size_t next = start + count;
    if (next < n) prefetch(rows.data() + next, n - next < kBlock ? n - next : kBlock, row_bytes);
    for (Leaf& leaf : leaves) {
      copy_leaf(leaf.batch.data() + start * leaf.bytes, rows.data() + start, count, leaf.offset, leaf.bytes);
    }
  }
}

// 256 reads through one submission ring, by raw system calls.
class Ring {
 public:
  explicit Ring(unsigned entries) {
    io_uring_params p{};
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &p));
    if (fd_ < 0) return;
    sq_ = map(p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    cq_ = map(p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
    sqes_ = reinterpret_cast<io_uring_sqe*>(map(p.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
    params_ = p;
  }
  ~Ring() {
    if (fd_ >= 0) close(fd_);
  }
  bool usable() const { return fd_ >= 0; }

  // Reads `bytes` at each offset into consecutive places of `out`; false when any read fails or is short.
  bool read(int file, const std::vector<off_t>& offsets, size_t bytes, char* out) {
    auto* tail = reinterpret_cast<unsigned*>(sq_ + params_.sq_off.tail);
    const unsigned mask = *reinterpret_cast<unsigned*>(sq_ + params_.sq_off.ring_mask);
    auto* array = reinterpret_cast<unsigned*>(sq_ + params_.sq_off.array);
    unsigned at = *tail;
    for (size_t i = 0; i < offsets.size(); ++i, ++at) {
      io_uring_sqe& sqe = sqes_[at & mask];
      std::memset(&sqe, 0, sizeof sqe);
      sqe.opcode = IORING_OP_READ;
      sqe.fd = file;
      sqe.addr = reinterpret_cast<uint64_t>(out + i * bytes);
      sqe.len = static_cast<unsigned>(bytes);
      sqe.off = static_cast<uint64_t>(offsets[i]);
      array[at & mask] = at & mask;
    }
    __atomic_store_n(tail, at, __ATOMIC_RELEASE);
    const auto n = static_cast<unsigned>(offsets.size());
    unsigned submitted = 0;
    while (submitted < n) {
      const long done = syscall(__NR_io_uring_enter, fd_, n - submitted, n, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (done < 0 && errno != EINTR) return false;
      if (done > 0) submitted += static_cast<unsigned>(done);
    }
    return reap(n, bytes);
  }

 private:
  char* map(size_t bytes, off_t what) {
    return static_cast<char*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, what));
  }
  bool reap(unsigned n, size_t bytes) {
    auto* head = reinterpret_cast<unsigned*>(cq_ + params_.cq_off.head);
    auto* tail = reinterpret_cast<unsigned*>(cq_ + params_.cq_off.tail);
    const unsigned mask = *reinterpret_cast<unsigned*>(cq_ + params_.cq_off.ring_mask);
    auto* cqes = reinterpret_cast<io_uring_cqe*>(cq_ + params_.cq_off.cqes);
    bool whole = true;
    for (unsigned seen = 0; seen < n;) {
      unsigned at = *head;
      const unsigned end = __atomic_load_n(tail, __ATOMIC_ACQUIRE);
      if (at == end) {
        if (syscall(__NR_io_uring_enter, fd_, 0, 1, IORING_ENTER_GETEVENTS, nullptr, 0) < 0 && errno != EINTR) return false;
      }
      for (; at != end; ++at, ++seen) whole &= cqes[at & mask].res == static_cast<int>(bytes);
      __atomic_store_n(head, at, __ATOMIC_RELEASE);
    }
    return whole;
  }

  int fd_ = -1;
  io_uring_params params_{};
  char *sq_ = nullptr, *cq_ = nullptr;
  io_uring_sqe* sqes_ = nullptr;
};

enum Mode : int { kTouch = 0, kReadahead = 1, kUring = 2 };

}  // namespace

extern "C" {

// nullptr when the memory is not to be had.
void* floor_table(size_t rows, size_t row_bytes, const size_t* leaf_bytes, size_t n_leaves, size_t batch) {
  auto* t = new Table{rows, row_bytes, batch, lay_out(leaf_bytes, n_leaves, batch), nullptr, 0};
  t->mapped = rows * row_bytes;
  void* at = mmap(nullptr, t->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) {
    delete t;
    return nullptr;
  }
  madvise(at, t->mapped, MADV_HUGEPAGE);
  std::memset(at, 1, t->mapped);
  t->data = static_cast<char*>(at);
  return t;
}

void floor_free(void* table) {
  auto* t = static_cast<Table*>(table);
  munmap(t->data, t->mapped);
  delete t;
}

// Random rows, in runs of `run` neighbours.
double floor_gather(void* table, size_t run, size_t repeats) {
  auto* t = static_cast<Table*>(table);
  std::vector<const char*> rows(t->batch);
  const auto start = Clock::now();
  for (size_t r = 0; r < repeats; ++r) {
    for (size_t i = 0; i < t->batch; i += run) {
      const char* first = t->data + t->random.below(t->rows - run + 1) * t->row_bytes;
      for (size_t k = 0; k < run && i + k < t->batch; ++k) rows[i + k] = first + k * t->row_bytes;
    }
    gather(t->leaves, rows, t->row_bytes);
  }
  return since(start);
}

void* floor_tree(size_t leaves) { return new Tree(leaves); }

void floor_tree_free(void* tree) { delete static_cast<Tree*>(tree); }

// Draws in proportion, weights them, and copies the rows.
double floor_tree_gather(void* tree, void* table, size_t repeats) {
  auto* t = static_cast<Table*>(table);
  std::vector<size_t> picked(t->batch);
  std::vector<float> weights(t->batch);
  std::vector<const char*> rows(t->batch);
  const auto start = Clock::now();
  for (size_t r = 0; r < repeats; ++r) {
    static_cast<Tree*>(tree)->draw(picked, weights);
    for (size_t i = 0; i < t->batch; ++i) rows[i] = t->data + picked[i] * t->row_bytes;
    gather(t->leaves, rows, t->row_bytes);
  }
  return since(start);
}

double floor_tree_update(void* tree, size_t batch, size_t repeats) {
  const auto start = Clock::now();
  for (size_t r = 0; r < repeats; ++r) static_cast<Tree*>(tree)->update(batch);
  return since(start);
}

double floor_scatter(void* table, size_t repeats) {
  auto* t = static_cast<Table*>(table);
  const auto start = Clock::now();
  for (size_t r = 0; r < repeats; ++r) {
    for (size_t i = 0; i < t->batch; ++i) {
      char* row = t->data + t->cursor * t->row_bytes;
      for (const Leaf& leaf : t->leaves) std::memcpy(row + leaf.offset, leaf.batch.data() + i * leaf.bytes, leaf.bytes);
      t->cursor = t->cursor + 1 == t->rows ? 0 : t->cursor + 1;
    }
  }
  return since(start);
}

// Writes `bytes` of something that is not zero, so that no file system stores it as a hole; syncs and drops it from the cache.
double floor_make_file(const char* path, size_t bytes) {
  const auto start = Clock::now();
  const int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  if (fd < 0) return -errno;
  std::vector<char> chunk(size_t{8} << 20, 7);
  int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  for (size_t done = 0; !error && done < bytes;) {
    const size_t n = bytes - done < chunk.size() ? bytes - done : chunk.size();
    const ssize_t wrote = write(fd, chunk.data(), n);
    if (wrote < 0) error = errno;
    else done += static_cast<size_t>(wrote);
  }
  if (!error && fsync(fd) != 0) error = errno;
  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  close(fd);
  return error ? -error : since(start);
}

// Times `repeats` batches of random rows of a file, one figure each into `seconds`.
double floor_mapped(const char* path, size_t rows, size_t row_bytes, const size_t* leaf_bytes, size_t n_leaves, size_t batch,
                    int mode, size_t repeats, double* seconds) {
  const auto whole = Clock::now();
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -errno;
  void* at = mmap(nullptr, rows * row_bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    const double error = -errno;
    close(fd);
    return error;
  }
  madvise(at, rows * row_bytes, MADV_RANDOM);
  posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);  // otherwise each small read brings in a whole read-ahead window
  auto leaves = lay_out(leaf_bytes, n_leaves, batch);
  std::vector<const char*> picked(batch);
  std::vector<off_t> offsets(batch);
  std::vector<char> landed(batch * row_bytes);
  Ring ring(mode == kUring ? static_cast<unsigned>(batch) : 1);
  Random random{987654321};
  double error = mode == kUring && !ring.usable() ? -ENOSYS : 0;
  for (size_t r = 0; r < repeats && error == 0; ++r) {
    const auto start = Clock::now();
    for (size_t i = 0; i < batch; ++i) {
      offsets[i] = static_cast<off_t>(random.below(rows) * row_bytes);
      picked[i] = (mode == kUring ? landed.data() + i * row_bytes : static_cast<char*>(at) + offsets[i]);
    }
    if (mode == kReadahead) {
      for (off_t offset : offsets) readahead(fd, offset, row_bytes);
    } else if (mode == kUring && !ring.read(fd, offsets, row_bytes, landed.data())) {
      error = -EIO;
    }
    gather(leaves, picked, row_bytes);
    seconds[r] = since(start);
  }
  munmap(at, rows * row_bytes);
  close(fd);
  return error != 0 ? error : since(whole);
}

}  // extern "C"
