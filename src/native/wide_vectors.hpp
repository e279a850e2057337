// Loops that run on the processor's widest vectors.
#pragma once

// Compiled once more for processors with wider registers; the loader chooses the version when the library is loaded. Not under
// sanitizers, which are not initialised at that time. Defined with ENGRAM_CHOOSES_VECTORS: functions of one name may be written
// for each of these targets.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ENGRAM_CHOOSES_VECTORS
#define ENGRAM_WIDE_VECTORS __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define ENGRAM_WIDE_VECTORS
#endif
