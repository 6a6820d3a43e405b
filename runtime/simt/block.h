// One block of GPU threads, run by one thread of the system.
//
// GPU threads are fibers. Each runs until it has to wait for others, then the next one does, in order or in
// reverse. The last of a unit (subgroup, block) that comes to where the whole unit (subgroup, block) meets
// completes the operation, and its first one goes on. So who runs next follows from who runs, and all that a
// fiber keeps is its stack.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "executor.h"
#include "fibers.h"

constexpr unsigned MAX_THREADS = 1024, MAX_SUBGROUP = 64, MAX_SHARED = 32, MAX_COPIES = 64;
// Of each stack and each shared array, one part of which is inaccessible. All are multiples of any page's size.
constexpr size_t STACK = 192 << 10, SHARED = 256 << 10, GUARD = 64 << 10;
constexpr int POISON = 0xff;  // makes NaNs, and indices that lie outside everything

struct Launch {
  void (*kernel)(void* const* arguments);
  void* const* arguments;
  uint32_t grid_x, grid_y;
  uint32_t rows;  // if not 0, the grid's y is ceil(tokens / rows)
  uint32_t threads;
};

struct Options {
  uint32_t subgroup;
  uint32_t workers;
  uint32_t reverse;
  uint32_t shared_bytes;  // that a block can have
};

struct Failure {
  uint32_t launch, block_x, block_y, thread;
  uint64_t address;  // of the access that failed, or 0
  char text[232];
};

struct Site {  // where threads meet
  SimtScope scope;
  int line;  // 0: the kernel's end
  void (*complete)(void* const*);

  bool operator!=(const Site& other) const {
    return scope != other.scope || line != other.line || complete != other.complete;
  }
};

struct Copy {
  void* to;
  const void* from;
  unsigned bytes;
};

struct Worker {
  // The block and where it stands.
  const Launch* launch;
  const Options* options;
  unsigned turn, thread;     // the running thread's place in the order, and its number
  unsigned positions[3];     // of each scope: what masks a turn to the place in its group
  unsigned sizes[3];         // of each scope: threads of a group
  Site sites[3];             // of each scope: where those wait that came before
  void* operands[MAX_SUBGROUP];
  void* stack_pointers[MAX_THREADS];  // by turn
  void* home;                         // the stack pointer of the worker itself while a fiber runs
  size_t shared_sizes[MAX_SHARED], shared_total;
  unsigned copy_counts[MAX_THREADS];  // that are under way, by thread
  Copy copies[MAX_THREADS][MAX_COPIES];

  // What went wrong.
  volatile bool on_fiber, failed;
  Failure failure;
  sigjmp_buf escape;  // from a fault
  volatile int signal;
  const char* volatile access;
  void* volatile fault;

  // Memory that it keeps.
  char *stacks, *shared;
  stack_t signal_stack;
  Worker* next;  // of the idle ones
};

inline thread_local Worker* worker;

inline void start_fibers(Worker& w, const Launch& launch, const Options& options, void (*fiber)()) {
  w.launch = &launch;
  w.options = &options;
  const unsigned sizes[] = {SIMT_UNIT_LANES, options.subgroup, launch.threads};
  memcpy(w.sizes, sizes, sizeof sizes);
  const unsigned positions[] = {SIMT_UNIT_LANES - 1, options.subgroup - 1, ~0u};
  memcpy(w.positions, positions, sizeof positions);
  memset(w.shared_sizes, 0, sizeof w.shared_sizes);
  memset(w.copy_counts, 0, sizeof w.copy_counts);
  w.shared_total = 0;
  for (unsigned turn = 0; turn < launch.threads; ++turn)
    // Tops at equal distances would share few sets of the caches.
    w.stack_pointers[turn] = new_stack(w.stacks + (turn + 1) * STACK - turn % 32 * 2112, fiber);
}

inline char* shared_array(const Worker& w, unsigned number) {
  return w.shared + (number + 1) * SHARED - GUARD - w.shared_sizes[number];
}

inline void set_turn(Worker& w, unsigned turn) {
  w.turn = turn;
  w.thread = w.options->reverse ? w.launch->threads - 1 - turn : turn;
}

inline void run_block(Worker& w) {
  for (unsigned number = 0; number < MAX_SHARED; ++number)
    if (w.shared_sizes[number]) memset(shared_array(w, number), POISON, w.shared_sizes[number]);
  set_turn(w, 0);
  w.on_fiber = true;
  swap_stacks(&w.home, w.stack_pointers[0]);
}

inline void resume(Worker& w, unsigned turn) {
  void** save = &w.stack_pointers[w.turn];
  set_turn(w, turn);
  swap_stacks(save, w.stack_pointers[turn]);
}

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(Worker& w, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(w.failure.text, sizeof w.failure.text, format, arguments);
  va_end(arguments);
  w.failed = true;
  void* forgotten;
  swap_stacks(&forgotten, w.home);
  __builtin_unreachable();
}

[[noreturn]] inline void diverge(Worker& w, const Site& other, const Site& site) {
  char texts[2][64];
  for (int i = 0; i < 2; ++i) {
    const Site& s = i ? other : site;
    if (s.line == 0) snprintf(texts[i], sizeof texts[i], "has left the kernel");
    else snprintf(texts[i], sizeof texts[i], "is at the %s in line %d",
                  s.scope == SIMT_BLOCK ? "barrier" : "subgroup operation", s.line);
  }
  fail(w, "threads diverge: this one %s, one before it %s", texts[0], texts[1]);
}

// The running thread has come to `site`: whether all have. If not, the others run before this returns.
inline bool all_at(Worker& w, const Site& site) {
  unsigned part = 1;  // threads that have just come there together
  for (int scope = 0; scope <= site.scope; ++scope) {
    const unsigned position = w.turn & w.positions[scope];
    if (position < part) w.sites[scope] = site;
    else if (w.sites[scope] != site) diverge(w, w.sites[scope], site);
    if (position != w.sizes[scope] - 1) {
      resume(w, w.turn + 1);
      return false;
    }
    part = w.sizes[scope];
  }
  return true;
}
