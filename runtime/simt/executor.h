// What compiled kernels ask of the executor. Everything here is called on a fiber, by one GPU thread.
//
// `line` is where the kernel calls, for messages, and to tell whether all have come to the same place.
#pragma once

struct SimtIndex {
  unsigned x, y, z;
};

struct SimtPointer {  // an argument, whatever its type
  void* address;

  template <class T>
  operator T*() const {
    return (T*)address;
  }
};

// Groups of threads, each a part of the next: a unit is 32 neighbours, half of a subgroup of 64.
enum SimtScope { SIMT_UNIT, SIMT_SUBGROUP, SIMT_BLOCK };
constexpr unsigned SIMT_UNIT_LANES = 32;

extern "C" {
SimtIndex simt_thread();  // within the block
SimtIndex simt_block();   // within the grid

// All threads of the scope wait for each other. Then `complete`, if given, runs once on what each of them
// brought: it reads and changes operands[lane] where they lie, which is on the threads' stacks.
void simt_meet(SimtScope scope, int line, void* operand, void (*complete)(void* const* operands));

// Shared array number `number` of the kernel.
void* simt_shared(unsigned number, unsigned bytes, unsigned alignment);

// Copies of the running thread, each aligned to its size, which the second call makes.
void simt_copy_later(void* to, const void* from, unsigned bytes, int line);
void simt_copy_now();

[[noreturn]] void simt_fail(const char* what, int line);
}
