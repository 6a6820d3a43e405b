// What generated kernels are written in, for AMD GPUs: clang's HIP mode, without any other header or library.
//
// load and store take addresses aligned to their size. `barrier` orders shared memory. A unit is 32 neighbouring
// lanes: a subgroup, or half of one of 64 whose halves may take different ways. Unit and subgroup functions are
// called by all of its lanes together. Half conversions round to nearest even. Float functions are within 1 ulp
// where nothing else is said.
#if defined(__gfx90a__) || defined(__gfx942__)
#define SUBGROUP 64
#else
#define SUBGROUP 32
#endif

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
// The blocks that a multiprocessor should hold, which may come second, are the compiler's choice here.
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define DEVICE_FUNCTION static __device__ __forceinline__
#define INFINITY __builtin_inff()

struct Index3 {
    unsigned x, y, z;
};
#define threadIdx                                                                                            \
    (Index3{__builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),                              \
            __builtin_amdgcn_workitem_id_z()})
#define blockIdx                                                                                             \
    (Index3{__builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),                            \
            __builtin_amdgcn_workgroup_id_z()})

typedef unsigned uint2 __attribute__((ext_vector_type(2)));
typedef unsigned uint4 __attribute__((ext_vector_type(4)));
DEVICE_FUNCTION uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }
DEVICE_FUNCTION uint2 make_uint2(unsigned x, unsigned y) { return uint2{x, y}; }

DEVICE_FUNCTION float as_float(unsigned v) { return __builtin_bit_cast(float, v); }
DEVICE_FUNCTION unsigned as_uint(float v) { return __builtin_bit_cast(unsigned, v); }
DEVICE_FUNCTION int as_int(unsigned v) { return static_cast<int>(v); }

DEVICE_FUNCTION float half_to_float(unsigned short v) { return __builtin_bit_cast(_Float16, v); }
DEVICE_FUNCTION unsigned short float_to_half(float v) {
    return __builtin_bit_cast(unsigned short, static_cast<_Float16>(v));
}

DEVICE_FUNCTION uint4 load16(const unsigned char* p) { return *reinterpret_cast<const uint4*>(p); }
DEVICE_FUNCTION uint2 load8(const unsigned char* p) { return *reinterpret_cast<const uint2*>(p); }
DEVICE_FUNCTION void store16(unsigned char* p, uint4 v) { *reinterpret_cast<uint4*>(p) = v; }

// c + the four products of the signed bytes of a and b
DEVICE_FUNCTION int dot4(int a, int b, int c) {
#if defined(__GFX11__) || defined(__GFX12__)
    return __builtin_amdgcn_sudot4(true, a, true, b, c, false);
#else
    return __builtin_amdgcn_sdot4(a, b, c, false);
#endif
}

// Four bytes of a table of 16, each picked by the low four bits of a byte of `index`.
DEVICE_FUNCTION unsigned lookup16(unsigned index, unsigned a, unsigned b, unsigned c, unsigned d) {
    const unsigned low = index & 0x07070707u, bit = index & 0x08080808u;
    const unsigned upper = (bit << 5) - (bit >> 3);  // 0xff where the bit is set
    return (__builtin_amdgcn_perm(b, a, low) & ~upper) | (__builtin_amdgcn_perm(d, c, low) & upper);
}

// C += A × B by the target's matrix instruction, where it has one; targets.rocm says which element each 32-bit
// register holds.
template <class T, int elements> struct Vector {
    typedef T Type __attribute__((ext_vector_type(elements)));
};
template <class V, class T> DEVICE_FUNCTION V gather(const T* registers) {
    V v;
    __builtin_memcpy(&v, registers, sizeof v);
    return v;
}
template <class V, class T> DEVICE_FUNCTION void scatter(T* registers, V v) {
    __builtin_memcpy(registers, &v, sizeof v);
}
#if defined(__GFX11__) || defined(__GFX12__)
using Sums = Vector<int, 8>::Type;
using FloatSums = Vector<float, 8>::Type;
#if defined(__GFX11__)
using Bytes = Vector<int, 4>::Type;
using Halves = Vector<_Float16, 16>::Type;
using BrainHalves = Vector<short, 16>::Type;
#define MATRIX_S8(a, b, c) __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, a, true, b, c, false)
#define MATRIX_F16(a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c)
#define MATRIX_BF16(a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c)
#else
using Bytes = Vector<int, 2>::Type;
using Halves = Vector<_Float16, 8>::Type;
using BrainHalves = Vector<short, 8>::Type;
#define MATRIX_S8(a, b, c) __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, a, true, b, c, false)
#define MATRIX_F16(a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, c)
#define MATRIX_BF16(a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(a, b, c)
#endif
#elif SUBGROUP == 64
using Sums = Vector<int, 4>::Type;
using FloatSums = Vector<float, 4>::Type;
using Halves = Vector<_Float16, 4>::Type;
using BrainHalves = Vector<short, 4>::Type;
#if defined(__gfx942__)
using Bytes = long;
#define MATRIX_S8(a, b, c) __builtin_amdgcn_mfma_i32_16x16x32_i8(a, b, c, 0, 0, 0)
#else
using Bytes = int;
#define MATRIX_S8(a, b, c) __builtin_amdgcn_mfma_i32_16x16x16i8(a, b, c, 0, 0, 0)
#endif
#define MATRIX_F16(a, b, c) __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0)
#define MATRIX_BF16(a, b, c) __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0)
#endif
#ifdef MATRIX_S8
DEVICE_FUNCTION void matrix_s8(int* c, const unsigned* a, const unsigned* b) {
    scatter(c, MATRIX_S8(gather<Bytes>(a), gather<Bytes>(b), gather<Sums>(c)));
}
DEVICE_FUNCTION void matrix_f16(float* c, const unsigned* a, const unsigned* b) {
    scatter(c, MATRIX_F16(gather<Halves>(a), gather<Halves>(b), gather<FloatSums>(c)));
}
DEVICE_FUNCTION void matrix_bf16(float* c, const unsigned* a, const unsigned* b) {
    scatter(c, MATRIX_BF16(gather<BrainHalves>(a), gather<BrainHalves>(b), gather<FloatSums>(c)));
}
#endif

// Two floats as a matrix instruction's inputs; halves stay finite.
DEVICE_FUNCTION unsigned pack_f16(float low, float high) {
    low = __builtin_fminf(__builtin_fmaxf(low, -65504.0f), 65504.0f);
    high = __builtin_fminf(__builtin_fmaxf(high, -65504.0f), 65504.0f);
    return float_to_half(low) | static_cast<unsigned>(float_to_half(high)) << 16;
}
DEVICE_FUNCTION unsigned round_bf16(float v) {  // in the upper half; of finite numbers
    const unsigned bits = as_uint(v);
    return bits + 0x7fffu + (bits >> 16 & 1u);
}
DEVICE_FUNCTION unsigned pack_bf16(float low, float high) {
    return round_bf16(low) >> 16 | (round_bf16(high) & 0xffff0000u);
}

// To shared memory; there once `copies_wait` returns, which on CUDA is later.
DEVICE_FUNCTION void copy_async16(unsigned* to, const unsigned char* from) {
    store16(reinterpret_cast<unsigned char*>(to), load16(from));
}
DEVICE_FUNCTION void copy_async4(float* to, const float* from) { *to = *from; }
DEVICE_FUNCTION void copies_wait() {}

// Only shared memory is waited for where the compiler can tell (clang 19 and newer): loads from global memory
// stay in flight over the barrier.
#if __clang_major__ >= 19
#define SHARED_FENCE(order) __builtin_amdgcn_fence(order, "workgroup", "local")
#else
#define SHARED_FENCE(order) __builtin_amdgcn_fence(order, "workgroup")
#endif
DEVICE_FUNCTION void barrier() {
    SHARED_FENCE(__ATOMIC_RELEASE);
    __builtin_amdgcn_s_barrier();
    SHARED_FENCE(__ATOMIC_ACQUIRE);
}

// The lanes of a wave run in step, and its accesses to shared memory in order: only the compiler must keep them.
DEVICE_FUNCTION void unit_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

DEVICE_FUNCTION int subgroup_lane() {
    const unsigned low = __builtin_amdgcn_mbcnt_lo(~0u, 0);
    return static_cast<int>(SUBGROUP == 32 ? low : __builtin_amdgcn_mbcnt_hi(~0u, low));
}

// Any pattern goes through the crossbar of the shared memory unit.
template <class T> DEVICE_FUNCTION T subgroup_shuffle(T v, int lane) {
    return __builtin_bit_cast(T, __builtin_amdgcn_ds_bpermute(4 * lane, __builtin_bit_cast(int, v)));
}
template <class T> DEVICE_FUNCTION T unit_shuffle(T v, int lane) {
    return subgroup_shuffle(v, SUBGROUP == 32 ? lane : (subgroup_lane() & 32) | lane);
}

// Some patterns within a row of 16 lanes are modifiers of an operand (DPP), which cost nothing.
#define DPP_XOR1 0xb1       // quad_perm 1 0 3 2
#define DPP_XOR2 0x4e       // quad_perm 2 3 0 1
#define DPP_XOR3 0x1b       // quad_perm 3 2 1 0
#define DPP_XOR7 0x141      // row_half_mirror
#define DPP_XOR15 0x140     // row_mirror
#define DPP_ROTATE(n) (0x120 | n)  // row_ror: lane i gets what lane i - n mod 16 has
template <int pattern, class T> DEVICE_FUNCTION T dpp(T v) {
    return __builtin_bit_cast(T, __builtin_amdgcn_mov_dpp(__builtin_bit_cast(int, v), pattern, 0xf, 0xf, true));
}
template <class T> DEVICE_FUNCTION T other_row(T v) {
    const int bits = __builtin_bit_cast(int, v);
#if SUBGROUP == 32
    return __builtin_bit_cast(T, __builtin_amdgcn_permlanex16(bits, bits, 0x76543210, 0xfedcba98, false, false));
#else
    return __builtin_bit_cast(T, __builtin_amdgcn_ds_swizzle(bits, 0x401f));  // lane ^ 16
#endif
}
template <class T> DEVICE_FUNCTION T subgroup_shuffle_xor(T v, int mask) {
    switch (mask) {  // a constant, as a rule
        case 1: return dpp<DPP_XOR1>(v);
        case 2: return dpp<DPP_XOR2>(v);
        case 3: return dpp<DPP_XOR3>(v);
        case 7: return dpp<DPP_XOR7>(v);
        case 8: return dpp<DPP_ROTATE(8)>(v);
        case 15: return dpp<DPP_XOR15>(v);
        case 16: return other_row(v);
        default: return subgroup_shuffle(v, subgroup_lane() ^ mask);
    }
}
template <class T> DEVICE_FUNCTION T unit_shuffle_xor(T v, int mask) { return subgroup_shuffle_xor(v, mask); }

// Combines first what is half a unit apart, then a quarter, and so on; every lane gets the same result.
// Once lanes 8 apart agree, a rotation by 4 is as good as lane ^ 4.
template <class T, class Operation> DEVICE_FUNCTION T unit_reduce(T v, Operation operation) {
    v = operation(v, other_row(v));
    v = operation(v, dpp<DPP_ROTATE(8)>(v));
    v = operation(v, dpp<DPP_ROTATE(4)>(v));
    v = operation(v, dpp<DPP_ROTATE(2)>(v));
    return operation(v, dpp<DPP_ROTATE(1)>(v));
}
template <class T, class Operation> DEVICE_FUNCTION T subgroup_reduce(T v, Operation operation) {
    if (SUBGROUP == 64) v = operation(v, subgroup_shuffle_xor(v, 32));
    return unit_reduce(v, operation);
}
struct Add {
    template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct Max {
    __device__ int operator()(int a, int b) const { return a > b ? a : b; }
    __device__ float operator()(float a, float b) const { return __builtin_fmaxf(a, b); }
};
template <class T> DEVICE_FUNCTION T unit_add(T v) { return unit_reduce(v, Add{}); }
template <class T> DEVICE_FUNCTION T unit_max(T v) { return unit_reduce(v, Max{}); }
template <class T> DEVICE_FUNCTION T subgroup_add(T v) { return subgroup_reduce(v, Add{}); }
template <class T> DEVICE_FUNCTION T subgroup_max(T v) { return subgroup_reduce(v, Max{}); }

// LLVM expands these accurately without a library: exp and log around v_exp_f32 and v_log_f32 with the
// argument's rounding error carried along, the square root correctly rounded.
DEVICE_FUNCTION float fexp(float x) { return __builtin_expf(x); }
DEVICE_FUNCTION float flog(float x) { return __builtin_logf(x); }
DEVICE_FUNCTION float fsqrt(float x) { return __builtin_sqrtf(x); }
DEVICE_FUNCTION float frint(float x) { return __builtin_rintf(x); }
DEVICE_FUNCTION float ffma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE_FUNCTION double drint(double x) { return __builtin_rint(x); }
DEVICE_FUNCTION double dfma(double a, double b, double c) { return __builtin_fma(a, b, c); }
DEVICE_FUNCTION float fmin_(float a, float b) { return __builtin_fminf(a, b); }
DEVICE_FUNCTION float fmax_(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE_FUNCTION float fabs_(float x) { return __builtin_fabsf(x); }
DEVICE_FUNCTION int imin(int a, int b) { return a < b ? a : b; }
DEVICE_FUNCTION int imax(int a, int b) { return a > b ? a : b; }

// v_rsq_f32 is within 1 ulp but takes subnormals for zero.
DEVICE_FUNCTION float frsqrt(float x) {
    const bool tiny = x < 0x1p-100f;
    const float root = __builtin_amdgcn_rsqf(tiny ? x * 0x1p100f : x);
    return tiny ? root * 0x1p50f : root;
}

// x - n·π/2 for the nearest n (Cody and Waite): with π/2 in three floats and fused multiply-adds, the first
// difference is exact and the last loses no more than 1 ulp, up to |x| = 1e6.
struct Reduced {
    float r;
    int n;
};
DEVICE_FUNCTION Reduced reduce_angle(float x) {
    const float n = __builtin_rintf(x * 0x1.45f306p-1f);
    float r = ffma(-n, 0x1.921fb6p0f, x);
    r = ffma(-n, -0x1.777a5cp-25f, r);
    r = ffma(-n, -0x1.ee59dap-50f, r);
    return {r, static_cast<int>(n)};
}
// Minimax polynomials for |r| ≤ π/4, a little over.
DEVICE_FUNCTION float sin_reduced(float r) {
    const float z = r * r;
    const float p = ffma(ffma(-0x1.98e5a8p-13f, z, 0x1.11062ap-7f), z, -0x1.555542p-3f);
    return ffma(r * z, p, r);
}
DEVICE_FUNCTION float cos_reduced(float r) {
    const float z = r * r;
    const float p = ffma(ffma(2.441650194e-5f, z, -1.388717756e-3f), z, 4.166664304e-2f);
    return ffma(z * z, p, ffma(-0.5f, z, 1.0f));
}
// Within 2 ulp up to |x| = 1e6; not made for more.
DEVICE_FUNCTION float fsin(float x) {
    const Reduced a = reduce_angle(x);
    const float v = a.n & 1 ? cos_reduced(a.r) : sin_reduced(a.r);
    return a.n & 2 ? -v : v;
}
DEVICE_FUNCTION float fcos(float x) {
    const Reduced a = reduce_angle(x);
    const float v = a.n & 1 ? sin_reduced(a.r) : cos_reduced(a.r);
    return (a.n + 1) & 2 ? -v : v;
}

// Within 2 ulp.
DEVICE_FUNCTION float ftanh(float x) {
    const float a = fabs_(x), z = x * x;
    const float p = ffma(ffma(ffma(-5.717044544e-3f, z, 2.065058682e-2f), z, -5.374349793e-2f), z, 1.333149129e-1f);
    const float small = ffma(x * z, ffma(p, z, -3.333328393e-1f), x);
    const float large = __builtin_copysignf(1.0f - 2.0f / (fexp(2.0f * a) + 1.0f), x);
    return a < 0.625f ? small : large;
}

// Within 2 ulp: the logarithm in double precision, by the series of artanh.
DEVICE_FUNCTION float fpow(float x, float y) {
    if (x == 1.0f || y == 0.0f) return 1.0f;
    if (x != x || y != y) return x + y;
    const float a = fabs_(x), infinity = __builtin_inff();
    const bool integer = __builtin_truncf(y) == y;
    const bool odd = integer && __builtin_truncf(0.5f * y) != 0.5f * y;
    if (x < 0.0f && a != infinity && !integer) return __builtin_nanf("");
    float power = 1.0f;
    if (a == 0.0f || a == infinity) {
        power = (a == 0.0f) == (y < 0.0f) ? infinity : 0.0f;
    } else if (a != 1.0f) {
        // a = m · 2^e with m in [√½, √2)
        const bool tiny = a < 0x1p-126f;
        const int bits = as_int(as_uint(tiny ? a * 0x1p24f : a));
        const int e = (bits - 0x3f3504f3) >> 23;
        const double m = __builtin_bit_cast(float, bits - (e << 23));
        const double s = (m - 1.0) / (m + 1.0), z = s * s;
        double series = 1.0 / 13;
        for (int k = 11; k > 0; k -= 2) series = series * z + 1.0 / k;
        const double log2_a = (tiny ? e - 24 : e) + 2.885390081777927 * s * series;  // 2 / ln 2
        const double exponent = __builtin_fmin(__builtin_fmax(y * log2_a, -200.0), 200.0);
        const double whole = __builtin_rint(exponent);
        const float fraction = static_cast<float>(exponent - whole);
        power = __builtin_ldexpf(__builtin_amdgcn_exp2f(fraction), static_cast<int>(whole));
    }
    return odd ? __builtin_copysignf(power, x) : power;
}
