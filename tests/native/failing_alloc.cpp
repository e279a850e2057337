// Makes one of the native core's allocations fail: its calls of `operator new`, `aligned_alloc` and `mmap` go through
// here, by its table of imported functions. Nobody else's are touched. For Linux on x86-64 and aarch64.
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

bool armed = false, for_good = false;
pthread_t thread;
long counted = 0, failing = 0;

bool fails() {
  if (!armed || !pthread_equal(pthread_self(), thread)) return false;
  return ++counted == failing || (for_good && failing && counted > failing);
}

void* failing_new(size_t n) {
  if (fails()) throw std::bad_alloc();
  return ::operator new(n);
}
void* failing_new_array(size_t n) {
  if (fails()) throw std::bad_alloc();
  return ::operator new[](n);
}
void* failing_new_nothrow(size_t n, const std::nothrow_t& tag) noexcept {
  return fails() ? nullptr : ::operator new(n, tag);
}
void* failing_new_array_nothrow(size_t n, const std::nothrow_t& tag) noexcept {
  return fails() ? nullptr : ::operator new[](n, tag);
}
void* failing_new_aligned(size_t n, std::align_val_t align) {
  if (fails()) throw std::bad_alloc();
  return ::operator new(n, align);
}
void* failing_aligned_alloc(size_t align, size_t n) { return fails() ? nullptr : std::aligned_alloc(align, n); }
void* failing_mmap(void* at, size_t n, int protection, int flags, int fd, off_t offset) {
  if (!fails()) return ::mmap(at, n, protection, flags, fd, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}

const struct { const char* name; void* ours; } kHooks[] = {
  {"_Znwm", reinterpret_cast<void*>(failing_new)},
  {"_Znam", reinterpret_cast<void*>(failing_new_array)},
  {"_ZnwmRKSt9nothrow_t", reinterpret_cast<void*>(failing_new_nothrow)},
  {"_ZnamRKSt9nothrow_t", reinterpret_cast<void*>(failing_new_array_nothrow)},
  {"_ZnwmSt11align_val_t", reinterpret_cast<void*>(failing_new_aligned)},
  {"aligned_alloc", reinterpret_cast<void*>(failing_aligned_alloc)},
  {"mmap", reinterpret_cast<void*>(failing_mmap)},
  {"mmap64", reinterpret_cast<void*>(failing_mmap)},
};

struct Search { const char* path; int hooked; };

void hook(const char* name, void** place, int& hooked) {
  for (const auto& one : kHooks) {
    if (std::strcmp(one.name, name) != 0) continue;
    const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    void* start = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(place) / page * page);
    if (::mprotect(start, page, PROT_READ | PROT_WRITE) != 0) return;  // read-only once it is linked
    *place = one.ours, ++hooked;
  }
}

int look(dl_phdr_info* info, size_t, void* data) {
  auto* search = static_cast<Search*>(data);
  if (!info->dlpi_name || std::strcmp(info->dlpi_name, search->path) != 0) return 0;
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i)
    if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
  const ElfW(Sym)* symbols = nullptr;
  const char* strings = nullptr;
  struct { const ElfW(Rela)* at; size_t bytes; } tables[2] = {{nullptr, 0}, {nullptr, 0}};
  for (; dynamic && dynamic->d_tag != DT_NULL; ++dynamic) {
    const auto at = dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(at);
    if (dynamic->d_tag == DT_STRTAB) strings = reinterpret_cast<const char*>(at);
    if (dynamic->d_tag == DT_JMPREL) tables[0].at = reinterpret_cast<const ElfW(Rela)*>(at);
    if (dynamic->d_tag == DT_PLTRELSZ) tables[0].bytes = dynamic->d_un.d_val;
    if (dynamic->d_tag == DT_RELA) tables[1].at = reinterpret_cast<const ElfW(Rela)*>(at);
    if (dynamic->d_tag == DT_RELASZ) tables[1].bytes = dynamic->d_un.d_val;
  }
#if defined(__x86_64__)
  const auto ours = [](uint64_t type) { return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT; };
#else
  const auto ours = [](uint64_t type) { return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT; };
#endif
  for (const auto& table : tables)
    for (size_t i = 0; symbols && strings && table.at && i < table.bytes / sizeof(ElfW(Rela)); ++i) {
      const ElfW(Rela)& r = table.at[i];
      if (ours(ELF64_R_TYPE(r.r_info)))
        hook(strings + symbols[ELF64_R_SYM(r.r_info)].st_name, reinterpret_cast<void**>(info->dlpi_addr + r.r_offset),
             search->hooked);
    }
  return 1;
}

}  // namespace

extern "C" {

// From here on the allocations of the library of this path can be made to fail; how many places were changed.
int alloc_hook(const char* path) {
  Search search{path, 0};
  ::dl_iterate_phdr(look, &search);
  return search.hooked;
}
// The `at`-th allocation that this thread makes from here on fails, with `rest` all after it, too; 0: they are counted.
void alloc_arm(long at, bool rest) {
  thread = ::pthread_self(), counted = 0, failing = at, for_good = rest, armed = true;
}
// Ends that; how many there were.
long alloc_disarm() {
  armed = false;
  return counted;
}

}
