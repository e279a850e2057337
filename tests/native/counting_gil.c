// Counts how often anybody gives the GIL away: stands between extension modules and Python, by LD_PRELOAD.
#define _GNU_SOURCE
#include <dlfcn.h>

static long releases = 0;

void *PyEval_SaveThread(void) {
  static void *(*save)(void);
  if (!save) save = (void *(*)(void))dlsym(RTLD_NEXT, "PyEval_SaveThread");
  ++releases;
  return save();
}

long gil_releases(void) { return releases; }
