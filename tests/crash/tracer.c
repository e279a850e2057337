/* Runs a process under ptrace and ends it, or lets a call fail, at its n-th system call that touches files below a
 * folder, or at its n-th store to a watched address. A seccomp filter stops it at the calls of the table below, raw
 * ones too, in every thread.
 *
 * The child calls `crash_ready`, the parent `crash_trace`. The child then gives orders by prctl(CRASH, ...):
 * start counting, report a number, watch an address. */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#define CRASH 0x43524153
enum { START = 1, MARK = 2, WATCH = 3, STOP = 4 };

/* What a call does, as bits, so that a plan can choose. */
enum { OPEN = 1, READ = 2, WRITE = 4, SIZE = 8, SYNC = 16, NAME = 32, CLOSE = 64, OTHER = 128, MAP = 256, STORE = 512, STAT = 1024 };
/* Where its arguments name a file. */
enum { FD0, FD02, FD4, PATH0, PATH01, AT01, AT23, ANYWHERE };

static const struct { const char *name; long number; int kind, where; } CALLS[] = {
#ifdef __NR_open
  {"open", __NR_open, OPEN, PATH0}, {"creat", __NR_creat, OPEN, PATH0}, {"rename", __NR_rename, NAME, PATH01},
  {"link", __NR_link, NAME, PATH01}, {"unlink", __NR_unlink, NAME, PATH0}, {"mkdir", __NR_mkdir, NAME, PATH0},
  {"rmdir", __NR_rmdir, NAME, PATH0}, {"symlink", __NR_symlink, NAME, PATH01}, {"stat", __NR_stat, STAT, PATH0},
  {"lstat", __NR_lstat, STAT, PATH0}, {"access", __NR_access, STAT, PATH0},
#endif
#ifdef __NR_renameat
  {"renameat", __NR_renameat, NAME, AT23},
#endif
#ifdef __NR_openat2
  {"openat2", __NR_openat2, OPEN, AT01},
#endif
  {"openat", __NR_openat, OPEN, AT01}, {"renameat2", __NR_renameat2, NAME, AT23}, {"linkat", __NR_linkat, NAME, AT23},
  {"unlinkat", __NR_unlinkat, NAME, AT01}, {"mkdirat", __NR_mkdirat, NAME, AT01}, {"read", __NR_read, READ, FD0},
  {"pread64", __NR_pread64, READ, FD0}, {"readv", __NR_readv, READ, FD0}, {"preadv", __NR_preadv, READ, FD0},
  {"getdents64", __NR_getdents64, READ, FD0}, {"write", __NR_write, WRITE, FD0}, {"pwrite64", __NR_pwrite64, WRITE, FD0},
  {"writev", __NR_writev, WRITE, FD0}, {"pwritev", __NR_pwritev, WRITE, FD0}, {"pwritev2", __NR_pwritev2, WRITE, FD0},
  {"copy_file_range", __NR_copy_file_range, WRITE, FD02}, {"sendfile", __NR_sendfile, WRITE, FD0},
  {"splice", __NR_splice, WRITE, FD02}, {"truncate", __NR_truncate, SIZE, PATH0},
  {"ftruncate", __NR_ftruncate, SIZE, FD0}, {"fallocate", __NR_fallocate, SIZE, FD0}, {"fsync", __NR_fsync, SYNC, FD0},
  {"fdatasync", __NR_fdatasync, SYNC, FD0}, {"msync", __NR_msync, SYNC, ANYWHERE},
  {"sync_file_range", __NR_sync_file_range, SYNC, FD0}, {"syncfs", __NR_syncfs, SYNC, FD0},
  {"close", __NR_close, CLOSE, FD0}, {"fchmod", __NR_fchmod, OTHER, FD0}, {"flock", __NR_flock, OTHER, FD0},
  {"fcntl", __NR_fcntl, OTHER, FD0}, {"fadvise64", __NR_fadvise64, OTHER, FD0}, {"mmap", __NR_mmap, MAP, FD4},
#ifdef __NR_newfstatat
  {"newfstatat", __NR_newfstatat, STAT, AT01},
#endif
  {"statx", __NR_statx, STAT, AT01}, {"faccessat", __NR_faccessat, STAT, AT01},
  {"statfs", __NR_statfs, STAT, PATH0},
};
#define N_CALLS ((int)(sizeof CALLS / sizeof CALLS[0]))

enum { NOTHING, KILL, KILL_AFTER, FAIL, SHORTEN, SHORTEN_AND_KILL, FAIL_FROM_HERE, FAIL_TWO_SYNCS };

struct plan { const char *root; uint64_t at; int what, error, kinds; };
struct report { uint64_t counted, mark; int status, done; char name[32], path[512]; };
/* Before each counted call and at each mark; the tracee stands still. `data`: the arguments of the call. */
typedef void (*listener)(const char *name, const char *path, const char *path2, const uint64_t *args);

/* ---- registers ---- */
#if defined(__x86_64__)
typedef struct user_regs_struct regs_t;
static long number_of(regs_t *r) { return (long)r->orig_rax; }
static uint64_t arg(regs_t *r, int i) {
  const uint64_t a[] = {r->rdi, r->rsi, r->rdx, r->r10, r->r8, r->r9};
  return a[i];
}
static void set_third(regs_t *r, uint64_t to) { r->rdx = to; }
static int get_regs(pid_t t, regs_t *r) { return ptrace(PTRACE_GETREGS, t, 0, r); }
static int set_regs(pid_t t, regs_t *r) { return ptrace(PTRACE_SETREGS, t, 0, r); }
static void set_result(pid_t t, regs_t *r, long result) { r->rax = result, set_regs(t, r); }
static void skip(pid_t t, regs_t *r, long result) { r->orig_rax = -1, set_result(t, r, result); }
#elif defined(__aarch64__)
typedef struct user_regs_struct regs_t;
static long number_of(regs_t *r) { return (long)r->regs[8]; }
static uint64_t arg(regs_t *r, int i) { return r->regs[i]; }
static void set_third(regs_t *r, uint64_t to) { r->regs[2] = to; }
static int get_regs(pid_t t, regs_t *r) {
  struct iovec v = {r, sizeof *r};
  return ptrace(PTRACE_GETREGSET, t, (void *)NT_PRSTATUS, &v);
}
static int set_regs(pid_t t, regs_t *r) {
  struct iovec v = {r, sizeof *r};
  return ptrace(PTRACE_SETREGSET, t, (void *)NT_PRSTATUS, &v);
}
static void set_result(pid_t t, regs_t *r, long result) { r->regs[0] = result, set_regs(t, r); }
static void skip(pid_t t, regs_t *r, long result) {
  int none = -1;
  struct iovec v = {&none, sizeof none};
  ptrace(PTRACE_SETREGSET, t, (void *)0x404 /* NT_ARM_SYSTEM_CALL */, &v);
  set_result(t, r, result);
}
#else
#error "the tracer knows x86-64 and aarch64"
#endif

/* ---- which file a call is about ---- */
static void link_of(pid_t pid, const char *what, long fd, char *out, size_t n) {
  char at[64];
  if (fd < 0) snprintf(at, sizeof at, "/proc/%d/%s", pid, what);
  else snprintf(at, sizeof at, "/proc/%d/%s/%ld", pid, what, fd);
  const ssize_t got = readlink(at, out, n - 1);
  out[got < 0 ? 0 : got] = 0;
}
static void text_at(pid_t pid, uint64_t address, char *out, size_t n) {
  size_t done = 0;
  while (done < n - 1) {  /* page by page: the string may end before an unmapped page */
    size_t take = 4096 - (address + done) % 4096;
    if (take > n - 1 - done) take = n - 1 - done;
    struct iovec mine = {out + done, take}, its = {(void *)(address + done), take};
    if (process_vm_readv(pid, &mine, 1, &its, 1, 0) != (ssize_t)take) break;
    if (memchr(out + done, 0, take)) return;
    done += take;
  }
  out[done] = 0;
}
static void path_at(pid_t pid, int dirfd, uint64_t address, char *out, size_t n) {
  char text[256], folder[256];
  text_at(pid, address, text, sizeof text);
  long fd;
  out[0] = 0;
  if (!text[0]) return;  /* about the descriptor itself, which asks no disk */
  if (sscanf(text, "/proc/self/fd/%ld", &fd) == 1) link_of(pid, "fd", fd, out, n);
  else if (text[0] == '/') snprintf(out, n, "%s", text);
  else {
    if (dirfd == AT_FDCWD) link_of(pid, "cwd", -1, folder, sizeof folder);
    else link_of(pid, "fd", dirfd, folder, sizeof folder);
    snprintf(out, n, "%s/%s", folder, text);
  }
}
static int below(const char *path, const char *root) {
  const size_t n = strlen(root);
  return strncmp(path, root, n) == 0 && (path[n] == '/' || path[n] == 0);
}
static int touches(pid_t pid, regs_t *r, int where, const char *root, char *path, char *path2) {
  path[0] = path2[0] = 0;
  switch (where) {
    case FD0: link_of(pid, "fd", (int)arg(r, 0), path, 512); break;
    case FD02: link_of(pid, "fd", (int)arg(r, 0), path, 512), link_of(pid, "fd", (int)arg(r, 2), path2, 512); break;
    case FD4: if ((int)arg(r, 4) >= 0) link_of(pid, "fd", (int)arg(r, 4), path, 512); break;
    case PATH0: path_at(pid, AT_FDCWD, arg(r, 0), path, 512); break;
    case PATH01: path_at(pid, AT_FDCWD, arg(r, 0), path, 512), path_at(pid, AT_FDCWD, arg(r, 1), path2, 512); break;
    case AT01: path_at(pid, (int)arg(r, 0), arg(r, 1), path, 512); break;
    case AT23:
      path_at(pid, (int)arg(r, 0), arg(r, 1), path, 512), path_at(pid, (int)arg(r, 2), arg(r, 3), path2, 512);
      break;
    case ANYWHERE: return 1;
  }
  return below(path, root) || below(path2, root);
}

/* ---- in the child ---- */
int crash_ready(void) {
  struct sock_filter code[N_CALLS * 2 + 16];
  int n = 0;
  code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
  for (int i = 0; i < N_CALLS; ++i) {
    code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)CALLS[i].number, 0, 1);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE);
  }
  code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_prctl, 0, 3);
  code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0]));
  code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, CRASH, 0, 1);
  code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE);
  code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  struct sock_fprog program = {(unsigned short)n, code};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
  return (int)syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
}
void crash_order(uint64_t what, uint64_t a, uint64_t b) { prctl(CRASH, what, a, b, 0); }

/* ---- in the parent ---- */
static void watch(pid_t t, int slot, uint64_t address) {
#if defined(__x86_64__)
  const size_t dr = offsetof(struct user, u_debugreg);
  static uint64_t control;
  if (slot == 0) control = 0;
  ptrace(PTRACE_POKEUSER, t, dr + 7 * 8, 0);
  ptrace(PTRACE_POKEUSER, t, dr + slot * 8, address);
  control |= (uint64_t)1 << (slot * 2) | (uint64_t)(1 | 2 << 2) << (16 + slot * 4);  /* writes of 8 bytes */
  if (ptrace(PTRACE_POKEUSER, t, dr + 7 * 8, control)) perror("debug registers");
#else
  (void)t, (void)slot, (void)address;
#endif
}

struct tracer { pid_t pid; const struct plan *plan; struct report *report; listener listen; int counting, kill_at_exit, fail_at_exit; uint64_t syncs; };

/* What to do about an event that counts; `r`: of a system call, or NULL. */
static void count(struct tracer *c, pid_t t, regs_t *r, const char *name, const char *path, const char *path2, int shorter) {
  const struct plan *p = c->plan;
  struct report *said = c->report;
  uint64_t args[6] = {0};
  for (int i = 0; r && i < 6; ++i) args[i] = arg(r, i);
  ++said->counted;
  if (c->listen) c->listen(name, path, path2, args);
  const int sync = strstr(name, "sync") != NULL;
  c->syncs += sync;
  if (p->what == FAIL_TWO_SYNCS) {  /* `at` counts syncs alone */
    if (!sync || !p->at || c->syncs < p->at || c->syncs > p->at + 1) return;
    snprintf(said->name, sizeof said->name, "%s", name), snprintf(said->path, sizeof said->path, "%s", path);
    said->done = 1, skip(t, r, -p->error);
    return;
  }
  const int now = said->counted == p->at || (p->what == FAIL_FROM_HERE && p->at && said->counted > p->at);
  if (!now || p->what == NOTHING) return;
  if (said->counted == p->at) {
    snprintf(said->name, sizeof said->name, "%s", name), snprintf(said->path, sizeof said->path, "%s", path);
    said->done = 1;
  }
  if (p->what == KILL || (!r && p->what == KILL_AFTER)) kill(c->pid, SIGKILL);
  else if (p->what == KILL_AFTER) c->kill_at_exit = t;
  else if (r && number_of(r) == __NR_close && p->what >= FAIL) c->fail_at_exit = t;  /* it fails and has closed */
  else if (r && (p->what == FAIL || p->what == FAIL_FROM_HERE)) skip(t, r, -p->error);
  else if (r && shorter) {
    set_third(r, arg(r, 2) > 1 ? arg(r, 2) / 2 : arg(r, 2)), set_regs(t, r);
    if (p->what == SHORTEN_AND_KILL) c->kill_at_exit = t;
  } else said->done = 0;
}
static void at_call(struct tracer *c, pid_t t) {
  regs_t r;
  if (get_regs(t, &r)) return;
  const long number = number_of(&r);
  if (number == __NR_prctl) {
    if (arg(&r, 1) == START) c->counting = 1;
    if (arg(&r, 1) == STOP) c->counting = 0;
    if (arg(&r, 1) == WATCH) watch(t, (int)arg(&r, 2), arg(&r, 3));
    if (arg(&r, 1) == MARK) {
      uint64_t args[6] = {arg(&r, 2), arg(&r, 3)};
      c->report->mark = arg(&r, 2);
      if (c->listen) c->listen("mark", "", "", args);
    }
    skip(t, &r, 0);
    return;
  }
  if (!c->counting) return;
  for (int i = 0; i < N_CALLS; ++i) {
    if (CALLS[i].number != number || !(CALLS[i].kind & c->plan->kinds)) continue;
    char path[512], path2[512];
    if (!touches(c->pid, &r, CALLS[i].where, c->plan->root, path, path2)) return;
    const int shorter = CALLS[i].kind == WRITE && CALLS[i].where == FD0 && number != __NR_sendfile;
    count(c, t, &r, CALLS[i].name, path, path2, shorter);
    return;
  }
}

/* Until the process has ended; 0, or errno. */
int crash_trace(pid_t pid, int go, const struct plan *plan, struct report *report, listener listen) {
  struct tracer c = {pid, plan, report, listen, 0, 0, 0, 0};
  memset(report, 0, sizeof *report);
  const long options = PTRACE_O_TRACESECCOMP | PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK |
                       PTRACE_O_EXITKILL | PTRACE_O_TRACESYSGOOD;
  if (ptrace(PTRACE_SEIZE, pid, 0, options)) return errno;
  if (write(go, "!", 1) != 1) return errno;
  for (;;) {
    int status;
    const pid_t t = waitpid(-1, &status, __WALL | __WNOTHREAD);
    if (t < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    if (WIFEXITED(status) || WIFSIGNALED(status)) {
      if (t != pid) continue;
      report->status = status;
      return 0;
    }
    const int event = status >> 16, sig = WSTOPSIG(status);
    int deliver = 0, how = PTRACE_CONT;
    if (event == PTRACE_EVENT_SECCOMP) {
      at_call(&c, t);
      if (c.kill_at_exit == t || c.fail_at_exit == t) how = PTRACE_SYSCALL;
    } else if (event) {
    } else if (sig == (SIGTRAP | 0x80)) {
      regs_t r;
      if (c.kill_at_exit == t) kill(pid, SIGKILL);
      else if (c.fail_at_exit == t && !get_regs(t, &r)) set_result(t, &r, -plan->error), c.fail_at_exit = 0;
    } else if (sig == SIGTRAP) {
      siginfo_t info;
      if (!ptrace(PTRACE_GETSIGINFO, t, 0, &info) && info.si_code == TRAP_HWBKPT) {
        if (c.counting && (plan->kinds & STORE)) count(&c, t, NULL, "store", "", "", 0);
      } else deliver = SIGTRAP;
    } else deliver = sig;
    ptrace(how, t, 0, deliver);
  }
}
