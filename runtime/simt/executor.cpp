// Runs launches of compiled GPU kernels on the CPU. runtime/emulator.py calls it, and says what it finds.
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "block.h"

namespace {

constexpr size_t BUFFER_GUARD = 64 << 20;  // inaccessible bytes before and after a buffer
constexpr size_t ALIGNMENT = 16;    // of a buffer: of the widest load

void fiber() {
  Worker& w = *worker;
  for (;;) {  // one turn for each block
    w.launch->kernel(w.launch->arguments);
    if (all_at(w, {SIMT_BLOCK, 0, nullptr})) swap_stacks(&w.stack_pointers[w.turn], w.home);
  }
}

// -- faults -------------------------------------------------------------------------------------------------

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE};
struct sigaction previous[3];

void on_signal(int signal, siginfo_t* info, void* context) {
  Worker* w = worker;
  if (!w || !w->on_fiber) {  // not a kernel's: returning repeats the fault under the handler before ours
    for (int i = 0; i < 3; ++i)
      if (SIGNALS[i] == signal) sigaction(signal, &previous[i], nullptr);
    return;
  }
  w->signal = signal;
  w->fault = info->si_addr;
#if defined(__x86_64__) && defined(__linux__)
  w->access = reinterpret_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2 ? "writes" : "reads";
#else
  (void)context;
  w->access = "reads or writes";
#endif
  siglongjmp(w->escape, 1);
}

void install_handlers() {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 3; ++i) {
    struct sigaction now;
    sigaction(SIGNALS[i], nullptr, &now);
    if (now.sa_sigaction == on_signal) continue;
    previous[i] = now;
    memset(&now, 0, sizeof now);
    now.sa_sigaction = on_signal;
    now.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGNALS[i], &now, nullptr);
  }
  pthread_mutex_unlock(&lock);
}

void describe_fault(Worker& w) {
  const char* at = static_cast<char*>(w.fault);
  w.failed = true;
  char* text = w.failure.text;
  const size_t size = sizeof w.failure.text;
  if (w.signal == SIGFPE) {
    snprintf(text, size, "a division by zero");
  } else if (at >= w.stacks && at < w.stacks + MAX_THREADS * STACK) {
    snprintf(text, size, "the thread's variables do not fit its stack");
  } else if (at >= w.shared && at < w.shared + MAX_SHARED * SHARED) {
    const unsigned number = (at - w.shared) / SHARED;
    snprintf(text, size, "%s outside shared array %u, which has %zu bytes, at %td", w.access, number,
             w.shared_sizes[number], at - shared_array(w, number));
  } else if (!at) {
    snprintf(text, size, "an access to address 0, or to one that cannot exist");
  } else {
    snprintf(text, size, "%s", w.access);  // emulator.py knows the buffers
    w.failure.address = reinterpret_cast<uintptr_t>(at);
  }
}

// -- workers ------------------------------------------------------------------------------------------------

pthread_mutex_t idle_lock = PTHREAD_MUTEX_INITIALIZER;
Worker* idle;

char* reserve(size_t bytes, int protection) {
  void* at = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}

Worker* new_worker() {
  constexpr size_t SIGNAL_STACK = 256 << 10;
  char* memory = reserve(sizeof(Worker) + SIGNAL_STACK, PROT_READ | PROT_WRITE);
  char* stacks = reserve(MAX_THREADS * STACK, PROT_READ | PROT_WRITE);
  char* shared = reserve(MAX_SHARED * SHARED, PROT_READ | PROT_WRITE);
  if (!memory || !stacks || !shared) return nullptr;
  for (unsigned i = 0; i < MAX_THREADS; ++i) mprotect(stacks + i * STACK, GUARD, PROT_NONE);
  for (unsigned i = 0; i < MAX_SHARED; ++i) mprotect(shared + (i + 1) * SHARED - GUARD, GUARD, PROT_NONE);
  Worker* w = reinterpret_cast<Worker*>(memory);
  w->stacks = stacks;
  w->shared = shared;
  w->signal_stack.ss_sp = memory + sizeof(Worker);
  w->signal_stack.ss_size = SIGNAL_STACK;
  return w;
}

Worker* take_worker() {
  pthread_mutex_lock(&idle_lock);
  Worker* w = idle;
  if (w) idle = w->next;
  pthread_mutex_unlock(&idle_lock);
  return w ? w : new_worker();
}

void give_worker(Worker* w) {
  pthread_mutex_lock(&idle_lock);
  w->next = idle;
  idle = w;
  pthread_mutex_unlock(&idle_lock);
}

// -- a run --------------------------------------------------------------------------------------------------

struct Run {
  const Launch* launches;
  uint32_t count, tokens;
  const Options* options;
  Failure* failure;
  uint32_t next_block, failed;  // atomic
  pthread_mutex_t lock;  // of what follows
  pthread_cond_t all_arrived;
  uint32_t workers, arrived, generation;
  bool over;
};

// Waits until all workers have finished the launch. False when one of them failed.
bool meet(Run& run) {
  pthread_mutex_lock(&run.lock);
  const uint32_t generation = run.generation;
  if (++run.arrived == run.workers) {
    run.arrived = 0;
    run.next_block = 0;
    run.over = run.failed;  // as all of them see it: `failed` may be set in the next launch, before some wake
    ++run.generation;
    pthread_cond_broadcast(&run.all_arrived);
  }
  while (run.generation == generation) pthread_cond_wait(&run.all_arrived, &run.lock);
  pthread_mutex_unlock(&run.lock);
  return !run.over;
}

// The first failure is the one that is told.
void report(Run& run, const Failure& failure) {
  uint32_t none = 0;
  if (__atomic_compare_exchange_n(&run.failed, &none, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
    *run.failure = failure;
}

void run_launch(Run& run, Worker& w, uint32_t number) {
  const Launch& launch = run.launches[number];
  const uint32_t height = launch.rows ? (run.tokens + launch.rows - 1) / launch.rows : launch.grid_y;
  const uint32_t blocks = launch.grid_x * height;
  start_fibers(w, launch, *run.options, fiber);
  w.failed = false;
  while (!w.failed && !__atomic_load_n(&run.failed, __ATOMIC_ACQUIRE)) {
    uint32_t block = __atomic_fetch_add(&run.next_block, 1, __ATOMIC_RELAXED);
    if (block >= blocks) return;
    if (run.options->reverse) block = blocks - 1 - block;
    w.failure = {number, block % launch.grid_x, block / launch.grid_x, 0, 0, ""};
    if (sigsetjmp(w.escape, 1)) describe_fault(w);
    else run_block(w);
    w.on_fiber = false;
    w.failure.thread = w.thread;
  }
  if (w.failed) report(run, w.failure);
}

void* work(void* argument) {
  Run& run = *static_cast<Run*>(argument);
  Worker* w = take_worker();
  if (!w) {
    Failure failure = {};
    snprintf(failure.text, sizeof failure.text, "there is no memory for the threads' stacks");
    report(run, failure);
    while (meet(run)) {}
    return nullptr;
  }
  stack_t before;
  sigaltstack(&w->signal_stack, &before);
  worker = w;
  for (uint32_t number = 0; number < run.count; ++number) {
    run_launch(run, *w, number);
    if (!meet(run)) break;
  }
  worker = nullptr;
  sigaltstack(&before, nullptr);
  give_worker(w);
  return nullptr;
}

}  // namespace

// -- what kernels call --------------------------------------------------------------------------------------

SimtIndex simt_thread() { return {worker->thread, 0, 0}; }
SimtIndex simt_block() { return {worker->failure.block_x, worker->failure.block_y, 0}; }

void simt_meet(SimtScope scope, int line, void* operand, void (*complete)(void* const*)) {
  Worker& w = *worker;
  if (complete) w.operands[w.thread & w.positions[scope]] = operand;
  if (!all_at(w, {scope, line, complete})) return;
  if (complete) complete(w.operands);
  resume(w, w.turn - (w.sizes[scope] - 1));
}

void* simt_shared(unsigned number, unsigned bytes, unsigned alignment) {
  Worker& w = *worker;
  if (number >= MAX_SHARED) fail(w, "a kernel can have %u shared arrays", MAX_SHARED);
  if (!w.shared_sizes[number]) {
    w.shared_total += bytes;
    if (w.shared_total > size_t{w.options->shared_bytes} || bytes > SHARED - GUARD)
      fail(w, "the shared arrays take %zu bytes, of %zu", w.shared_total, size_t{w.options->shared_bytes});
    w.shared_sizes[number] = (bytes + alignment - 1) / alignment * alignment;
    memset(shared_array(w, number), POISON, w.shared_sizes[number]);
  }
  return shared_array(w, number);
}

void simt_copy_later(void* to, const void* from, unsigned bytes, int line) {
  Worker& w = *worker;
  unsigned& count = w.copy_counts[w.thread];
  if (((uintptr_t)to | (uintptr_t)from) % bytes) simt_fail("an asynchronous copy is misaligned", line);
  if (count == MAX_COPIES) simt_fail("there are too many asynchronous copies", line);
  w.copies[w.thread][count++] = {to, from, bytes};
}

void simt_copy_now() {
  Worker& w = *worker;
  for (unsigned i = 0; i < w.copy_counts[w.thread]; ++i) {
    const Copy& copy = w.copies[w.thread][i];
    memcpy(copy.to, copy.from, copy.bytes);
  }
  w.copy_counts[w.thread] = 0;
}

void simt_fail(const char* what, int line) { fail(*worker, "%s in line %d", what, line); }

// -- what emulator.py calls ---------------------------------------------------------------------------------

extern "C" {

// Poisoned memory whose end, or with `left` whose beginning, is as near to an inaccessible page as its
// alignment allows; null if there is none.
void* simt_allocate(size_t size, int left) {
  const size_t page = sysconf(_SC_PAGESIZE), pages = (size + page - 1) / page * page;
  char* memory = reserve(BUFFER_GUARD + pages + BUFFER_GUARD, PROT_NONE);
  if (!memory) return nullptr;
  char* begin = memory + BUFFER_GUARD;
  if (mprotect(begin, pages, PROT_READ | PROT_WRITE)) {
    munmap(memory, BUFFER_GUARD + pages + BUFFER_GUARD);
    return nullptr;
  }
  memset(begin, POISON, pages);
  return left ? begin : begin + (pages - size) / ALIGNMENT * ALIGNMENT;
}

void simt_free(void* memory, size_t size) {
  const size_t page = sysconf(_SC_PAGESIZE), pages = (size + page - 1) / page * page;
  char* begin = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(memory) / page * page);
  munmap(begin - BUFFER_GUARD, BUFFER_GUARD + pages + BUFFER_GUARD);
}

// Runs the launches one after another. 0, or 1 and what went wrong in *failure.
int simt_run(const Launch* launches, uint32_t count, uint32_t tokens, const Options* options, Failure* failure) {
  constexpr unsigned MAX_HELPERS = 63;
  pthread_t helpers[MAX_HELPERS];
  Run run = {launches, count, tokens, options, failure, 0, 0, PTHREAD_MUTEX_INITIALIZER,
             PTHREAD_COND_INITIALIZER, 1, 0, 0, false};
  if (!count) return 0;
  install_handlers();
  pthread_mutex_lock(&run.lock);  // nobody meets before it is known how many will
  while (run.workers < options->workers && run.workers <= MAX_HELPERS &&
         !pthread_create(&helpers[run.workers - 1], nullptr, work, &run))
    ++run.workers;
  pthread_mutex_unlock(&run.lock);
  work(&run);
  for (unsigned i = 0; i + 1 < run.workers; ++i) pthread_join(helpers[i], nullptr);
  return run.failed;
}
}
