// Where callgrind counts: between `count_start` and `count_stop`, which writes what it counted under a name.
// Without callgrind both do nothing.
#include <stdint.h>
#include <string.h>
#include <valgrind/callgrind.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

void count_start(void) {
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
}

void count_stop(const char* name) {
  CALLGRIND_DUMP_STATS_AT(name);
  CALLGRIND_STOP_INSTRUMENTATION;
}

// The CPU that this process sees, in the numbers of `cpuid` by which libraries choose their code: vendor, model, features.
// Under valgrind they are those of the CPU that it emulates, whatever the real one is. All zero on other architectures.
void cpu_seen(uint32_t numbers[9]) {
  memset(numbers, 0, 9 * sizeof(uint32_t));
#if defined(__x86_64__)
  uint32_t highest, other;
  __cpuid(0, highest, numbers[0], numbers[2], numbers[1]);  // the vendor's name is in ebx, edx, ecx
  __cpuid(1, numbers[3], other, numbers[4], numbers[5]);    // ebx has the number of the core
  if (highest >= 7) __cpuid_count(7, 0, other, numbers[6], numbers[7], numbers[8]);
#endif
}
