// The vocabulary of generated kernels, for the emulated GPU: what `prelude.h` of each dialect gives on a device.
//
// No system headers: this is compiled again for every set of kernels.
#pragma once
#include "executor.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef SimtIndex uint3;
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#if defined(ZLLMC_METAL)
#define kernel extern "C"
#define device
#define constant const
#define threadgroup  // but for the arrays, whose declarations are rewritten before they get here
#elif defined(ZLLMC_CUDA) || defined(ZLLMC_HIP)
#define __global__
#define __device__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx simt_thread()
#define blockIdx simt_block()
#endif

// -- what the compiler checks -------------------------------------------------------------------------------
//
// Calls of these end a check that fails (the interface of GCC's and Clang's undefined-behaviour sanitizer).

struct SimtSource {
  const char* file;
  unsigned line, column;
};

#define SIMT_CHECK(name, ...) extern "C" __attribute__((weak, used)) void __ubsan_handle_##name##_abort(__VA_ARGS__)
SIMT_CHECK(type_mismatch_v1, SimtSource* at, void*) { simt_fail("an access is misaligned", at->line); }
SIMT_CHECK(out_of_bounds, SimtSource* at, void*) { simt_fail("an index lies outside its array", at->line); }
SIMT_CHECK(shift_out_of_bounds, SimtSource* at, void*, void*) {
  simt_fail("a number is shifted by as many bits as it has, or more", at->line);
}

#define DEVICE_FUNCTION static inline
#define SIMT_LINE int line = __builtin_LINE()
#define INFINITY __builtin_inff()

// -- bits ---------------------------------------------------------------------------------------------------

template <class To, class From>
inline To simt_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To result;
  __builtin_memcpy(&result, &value, sizeof result);
  return result;
}

inline float as_float(unsigned bits) { return simt_bits<float>(bits); }
inline unsigned as_uint(float value) { return simt_bits<unsigned>(value); }
inline int as_int(unsigned bits) { return int(bits); }

inline float half_to_float(unsigned short half) {
  const unsigned sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // The exponent's bias goes from 15 to 127 by a multiplication, which also normalizes what is subnormal.
  return as_float(sign | as_uint(as_float(rest << 13) * 0x1p112f));
}

inline unsigned short float_to_half(float value) {
  const unsigned bits = as_uint(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return sign | 0x7e00u;
  if (rest >= 0x477ff000u) return sign | 0x7c00u;  // rounds to 65536 or more
  if (rest < 0x38800000u)  // subnormal: the sum's last bit weighs 2^-24, so that the addition rounds
    return sign | (as_uint(as_float(rest) + 0.5f) - 0x3f000000u);
  return sign | ((rest + 0xfffu + (rest >> 13 & 1u) - 0x38000000u) >> 13);
}

// -- memory -------------------------------------------------------------------------------------------------

template <class Vector>
inline Vector simt_load(const uchar* from, int line) {
  if ((unsigned long)from % sizeof(Vector)) simt_fail("a vector load is misaligned", line);
  return *reinterpret_cast<const Vector*>(from);
}

inline uint4 load16(const uchar* from, SIMT_LINE) { return simt_load<uint4>(from, line); }
inline uint2 load8(const uchar* from, SIMT_LINE) { return simt_load<uint2>(from, line); }
inline void store16(uchar* to, uint4 value, SIMT_LINE) {
  if ((unsigned long)to % 16) simt_fail("a vector store is misaligned", line);
  *reinterpret_cast<uint4*>(to) = value;
}

// Copies to shared memory that are there when `copies_wait` returns, and not before, in every dialect.
inline void copy_async16(uint* to, const uchar* from, SIMT_LINE) { simt_copy_later(to, from, 16, line); }
inline void copy_async4(float* to, const float* from, SIMT_LINE) { simt_copy_later(to, from, 4, line); }
inline void copies_wait() { simt_copy_now(); }

// -- arithmetic ---------------------------------------------------------------------------------------------

inline int dot4(int a, int b, int c) {
  for (int shift = 0; shift < 32; shift += 8) c += (signed char)(a >> shift) * (signed char)(b >> shift);
  return c;
}

inline unsigned lookup16(unsigned index, unsigned a, unsigned b, unsigned c, unsigned d) {
  unsigned result = 0;
  for (int i = 0; i < 32; i += 8) {
    const unsigned k = index >> i & 15u;
    const unsigned word = k & 8u ? (k & 4u ? d : c) : (k & 4u ? b : a);
    result |= (word >> 8 * (k & 3u) & 0xffu) << i;
  }
  return result;
}

inline float fexp(float x) { return __builtin_expf(x); }
inline float flog(float x) { return __builtin_logf(x); }
inline float fsqrt(float x) { return __builtin_sqrtf(x); }
inline float frsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float fsin(float x) { return __builtin_sinf(x); }
inline float fcos(float x) { return __builtin_cosf(x); }
inline float ftanh(float x) { return __builtin_tanhf(x); }
inline float fpow(float x, float y) { return __builtin_powf(x, y); }
inline float frint(float x) { return __builtin_rintf(x); }
inline float ffma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double dfma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline double drint(double x) { return __builtin_rint(x); }
inline float fabs_(float x) { return __builtin_fabsf(x); }
// A device may drop the NaN of an operand; here it stays, so that a value read from poisoned memory shows.
inline float fmin_(float a, float b) { return a != a || a < b ? a : b; }
inline float fmax_(float a, float b) { return a != a || a > b ? a : b; }
inline int imin(int a, int b) { return a < b ? a : b; }
inline int imax(int a, int b) { return a > b ? a : b; }

// -- threads ------------------------------------------------------------------------------------------------

inline void barrier(SIMT_LINE) { simt_meet(SIMT_BLOCK, line, nullptr, nullptr); }
inline void unit_sync(SIMT_LINE) { simt_meet(SIMT_UNIT, line, nullptr, nullptr); }

struct SimtAdd {
  template <class T>
  static T of(T a, T b) { return a + b; }
};
struct SimtMax {
  template <class T>
  static T of(T a, T b) { return a != a || a > b ? a : b; }
};

// Adds in the order of a butterfly, as the devices do: first the lanes that are half a group apart.
template <int lanes, class Operation, class T>
void simt_reduce(void* const* operands) {
  T values[lanes];
  for (int lane = 0; lane < lanes; ++lane) values[lane] = *static_cast<T*>(operands[lane]);
  for (int apart = lanes / 2; apart; apart /= 2)
    for (int lane = 0; lane < apart; ++lane) values[lane] = Operation::of(values[lane], values[lane + apart]);
  for (int lane = 0; lane < lanes; ++lane) *static_cast<T*>(operands[lane]) = values[0];
}

template <class T>
struct SimtShuffle {
  T value;
  unsigned lane;  // to read
};

template <int lanes, class T>
void simt_exchange(void* const* operands) {
  T values[lanes];
  for (int lane = 0; lane < lanes; ++lane) values[lane] = static_cast<SimtShuffle<T>*>(operands[lane])->value;
  for (int lane = 0; lane < lanes; ++lane) {
    auto* operand = static_cast<SimtShuffle<T>*>(operands[lane]);
    operand->value = values[operand->lane];
  }
}

template <SimtScope scope, int lanes, class T>
inline T simt_shuffle(T value, unsigned lane, int line) {
  if (lane >= lanes) simt_fail("a shuffle reads a lane that does not exist", line);
  SimtShuffle<T> operand = {value, lane};
  simt_meet(scope, line, &operand, simt_exchange<lanes, T>);
  return operand.value;
}

// A unit is 32 neighbouring lanes: a subgroup, or half of one of 64 whose halves may take different ways.
#define SIMT_GROUP(name, scope, lanes)                                              \
  template <class T>                                                                \
  inline T name##_add(T value, SIMT_LINE) {                                         \
    simt_meet(scope, line, &value, simt_reduce<lanes, SimtAdd, T>);                 \
    return value;                                                                   \
  }                                                                                 \
  template <class T>                                                                \
  inline T name##_max(T value, SIMT_LINE) {                                         \
    simt_meet(scope, line, &value, simt_reduce<lanes, SimtMax, T>);                 \
    return value;                                                                   \
  }                                                                                 \
  template <class T>                                                                \
  inline T name##_shuffle(T value, int lane, SIMT_LINE) {                           \
    return simt_shuffle<scope, lanes>(value, lane, line);                           \
  }                                                                                 \
  template <class T>                                                                \
  inline T name##_shuffle_xor(T value, int mask, SIMT_LINE) {                       \
    return simt_shuffle<scope, lanes>(value, simt_thread().x % lanes ^ mask, line); \
  }

SIMT_GROUP(subgroup, SIMT_SUBGROUP, SUBGROUP)
SIMT_GROUP(unit, SIMT_UNIT, 32)

// -- matrix units -------------------------------------------------------------------------------------------

struct SimtS8 {
  static constexpr int bits = 8;
  static int value(unsigned element) { return (signed char)element; }
};
struct SimtF16 {
  static constexpr int bits = 16;
  static float value(unsigned element) { return half_to_float(element); }
};
struct SimtBF16 {
  static constexpr int bits = 16;
  static float value(unsigned element) { return as_float(element << 16); }
};
struct SimtF32 {
  static constexpr int bits = 32;
  static float value(unsigned element) { return as_float(element); }
};

inline unsigned pack_f16(float low, float high) {
  low = fmin_(fmax_(low, -65504.0f), 65504.0f);
  high = fmin_(fmax_(high, -65504.0f), 65504.0f);
  return float_to_half(low) | unsigned(float_to_half(high)) << 16;
}
inline unsigned simt_to_bf16(float value) {
  const unsigned bits = as_uint(value);
  return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
inline unsigned pack_bf16(float low, float high) { return simt_to_bf16(low) | simt_to_bf16(high) << 16; }

// Four signed bytes as halves.
inline uint2 bytes_to_f16(unsigned v) {
  unsigned halves[4];
  for (int i = 0; i < 4; ++i) halves[i] = float_to_half((signed char)(v >> 8 * i));
  return {halves[0] | halves[1] << 16, halves[2] | halves[3] << 16};
}

struct SimtPlace {
  uchar row, column;
};

// C (m×n) += A (m×k) × B (k×n): the place in its matrix of each element of each lane.
template <int m_, int n_, int k_, int a_elements, int b_elements, int c_elements>
struct SimtMatrix {
  static constexpr int m = m_, n = n_, k = k_;
  SimtPlace a[SUBGROUP][a_elements], b[SUBGROUP][b_elements], c[SUBGROUP][c_elements];
};

template <class Sum>
struct SimtMatrixOperand {
  Sum* c;
  const unsigned *a, *b;
  int line;
};

// A matrix that lanes hold in words. Where several hold the same element, it must be the same.
template <class Input, int rows, int columns>
struct SimtOperand {
  long bits[rows][columns];
  decltype(Input::value(0)) values[rows][columns];

  SimtOperand() { __builtin_memset(bits, -1, sizeof bits); }

  template <int elements>
  void gather(const SimtPlace (&places)[elements], const unsigned* words, int line) {
    constexpr int each = 32 / Input::bits;
    for (int element = 0; element < elements; ++element) {
      const unsigned part = words[element / each] >> element % each * Input::bits & (0xffffffffu >> (32 - Input::bits));
      auto [row, column] = places[element];
      long& home = bits[row][column];
      if (home >= 0 && home != part) simt_fail("lanes disagree about an element of a matrix", line);
      home = part;
      values[row][column] = Input::value(part);
    }
  }
};

template <class Input, class Sum, class Matrix, Matrix& at>
void simt_multiply(void* const* operands) {
  constexpr int m = Matrix::m, n = Matrix::n, k = Matrix::k;
  SimtOperand<Input, m, k> a;
  SimtOperand<Input, k, n> b;
  for (int lane = 0; lane < SUBGROUP; ++lane) {
    auto* operand = static_cast<SimtMatrixOperand<Sum>*>(operands[lane]);
    a.gather(at.a[lane], operand->a, operand->line);
    b.gather(at.b[lane], operand->b, operand->line);
  }
  for (int lane = 0; lane < SUBGROUP; ++lane) {
    Sum* c = static_cast<SimtMatrixOperand<Sum>*>(operands[lane])->c;
    for (auto [row, column] : at.c[lane]) {
      for (int i = 0; i < k; ++i) *c += a.values[row][i] * b.values[i][column];
      ++c;
    }
  }
}

// Operands are arrays of exactly the registers that the instruction takes.
#define SIMT_MATRIX(name, Input, Sum, at)                                                          \
  template <int A, int B, int C>                                                                   \
  inline void name(Sum (&c)[C], const unsigned (&a)[A], const unsigned (&b)[B], SIMT_LINE) {       \
    constexpr int a_bits = sizeof at.a[0] / sizeof(SimtPlace) * Input::bits;                       \
    constexpr int b_bits = sizeof at.b[0] / sizeof(SimtPlace) * Input::bits;                       \
    static_assert(a_bits == 32 * A && b_bits == 32 * B && sizeof at.c[0] / sizeof(SimtPlace) == C, \
                  "an operand has another number of registers");                                   \
    SimtMatrixOperand<Sum> operand = {c, a, b, line};                                              \
    simt_meet(SIMT_SUBGROUP, line, &operand, simt_multiply<Input, Sum, decltype(at), at>);         \
  }
