// Where callgrind counts: between `count_start` and `count_stop`, which writes what it counted under a name.
// Without callgrind both do nothing.
#include <valgrind/callgrind.h>

void count_start(void) {
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
}

void count_stop(const char* name) {
  CALLGRIND_DUMP_STATS_AT(name);
  CALLGRIND_STOP_INSTRUMENTATION;
}
