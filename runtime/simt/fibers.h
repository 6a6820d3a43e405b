// Fibers: stacks, and the switch from one to another.
//
// A stack that is not in use has on it what a call preserves, and the address to go on at.
#pragma once

// Saves this stack, its pointer in *save, and goes on where the one that `stack` points to was saved.
extern "C" void swap_stacks(void** save, void* stack) __asm__("zllmc_simt_swap");

#if defined(__x86_64__)
constexpr unsigned SAVED_WORDS = 7, RETURN_WORD = 6;
__asm__(R"(
  .text
zllmc_simt_swap:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
#elif defined(__aarch64__)
constexpr unsigned SAVED_WORDS = 20, RETURN_WORD = 11;
__asm__(R"(
  .text
  .balign 4
zllmc_simt_swap:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the emulated GPU runs on x86-64 and aarch64 only"
#endif

// A stack that ends at `top`, a multiple of 16, and on which `function`, which never returns, begins.
inline void* new_stack(char* top, void (*function)()) {
  // On x86-64 a function finds the address to return to, here 0, right below a multiple of 16.
  void** stack = reinterpret_cast<void**>(top) - (SAVED_WORDS / 2 + 1) * 2;
  for (unsigned word = 0; word <= SAVED_WORDS; ++word) stack[word] = nullptr;
  stack[RETURN_WORD] = reinterpret_cast<void*>(function);
  return stack;
}
