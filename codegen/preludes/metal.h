// What generated kernels are written in, for the Metal shading language (3.0 and newer).
//
// load and store take addresses aligned to their size. `barrier` orders threadgroup memory. A unit is 32
// neighbouring lanes, here a whole subgroup; unit and subgroup functions are called by all of its lanes together.
// Float functions are the precise ones: within 5 ulp (fpow 16); half conversions round to nearest even. There
// are no doubles. Compile with fast math off: masks are infinities.
#include <metal_stdlib>
using namespace metal;

#define SUBGROUP 32
#define DEVICE_FUNCTION static inline __attribute__((always_inline))

DEVICE_FUNCTION void barrier() { threadgroup_barrier(mem_flags::mem_threadgroup); }
DEVICE_FUNCTION void unit_sync() { simdgroup_barrier(mem_flags::mem_threadgroup); }

template <class T> DEVICE_FUNCTION T unit_shuffle(T v, int lane) { return simd_shuffle(v, ushort(lane)); }
template <class T> DEVICE_FUNCTION T unit_shuffle_xor(T v, int mask) { return simd_shuffle_xor(v, ushort(mask)); }
template <class T> DEVICE_FUNCTION T unit_add(T v) { return simd_sum(v); }
template <class T> DEVICE_FUNCTION T unit_max(T v) { return simd_max(v); }
#define subgroup_shuffle unit_shuffle
#define subgroup_shuffle_xor unit_shuffle_xor
#define subgroup_add unit_add
#define subgroup_max unit_max

// c + the four products of the signed bytes of a and b
DEVICE_FUNCTION int dot4(int a, int b, int c) {
    const int4 products = int4(as_type<char4>(a)) * int4(as_type<char4>(b));
    return c + products.x + products.y + products.z + products.w;
}

// Four bytes of a table of 16, each picked by the low four bits of a byte of `index`.
DEVICE_FUNCTION uint lookup16(uint index, uint a, uint b, uint c, uint d) {
    uint result = 0;
    for (int i = 0; i < 32; i += 8) {
        const uint k = index >> i & 15u;
        const uint word = k & 8u ? (k & 4u ? d : c) : (k & 4u ? b : a);
        result |= (word >> 8 * (k & 3u) & 0xffu) << i;
    }
    return result;
}

DEVICE_FUNCTION float as_float(uint v) { return as_type<float>(v); }
DEVICE_FUNCTION uint as_uint(float v) { return as_type<uint>(v); }
DEVICE_FUNCTION int as_int(uint v) { return int(v); }

DEVICE_FUNCTION float half_to_float(ushort v) { return float(as_type<half>(v)); }
DEVICE_FUNCTION ushort float_to_half(float v) { return as_type<ushort>(half(v)); }

DEVICE_FUNCTION uint4 make_uint4(uint x, uint y, uint z, uint w) { return uint4(x, y, z, w); }
DEVICE_FUNCTION uint2 make_uint2(uint x, uint y) { return uint2(x, y); }

DEVICE_FUNCTION uint4 load16(device const uchar* p) { return *reinterpret_cast<device const uint4*>(p); }
DEVICE_FUNCTION uint4 load16(constant uchar* p) { return *reinterpret_cast<constant uint4*>(p); }
DEVICE_FUNCTION uint4 load16(threadgroup const uchar* p) { return *reinterpret_cast<threadgroup const uint4*>(p); }
DEVICE_FUNCTION uint2 load8(device const uchar* p) { return *reinterpret_cast<device const uint2*>(p); }
DEVICE_FUNCTION uint2 load8(constant uchar* p) { return *reinterpret_cast<constant uint2*>(p); }
DEVICE_FUNCTION uint2 load8(threadgroup const uchar* p) { return *reinterpret_cast<threadgroup const uint2*>(p); }
DEVICE_FUNCTION void store16(device uchar* p, uint4 v) { *reinterpret_cast<device uint4*>(p) = v; }
DEVICE_FUNCTION void store16(threadgroup uchar* p, uint4 v) { *reinterpret_cast<threadgroup uint4*>(p) = v; }


// Four signed bytes as halves: that of byte b + 128 is 1024 + it, once its bits are the last of the half 1024.
DEVICE_FUNCTION uint2 bytes_to_f16(uint v) {
    const uint bytes = v ^ 0x80808080u;
    const uint low = (bytes & 0xffu) | (bytes & 0xff00u) << 8, high = (bytes >> 16 & 0xffu) | (bytes >> 8 & 0xff0000u);
    const half2 zero = as_type<half2>(0x64806480u);  // 1024 + 128
    return uint2(as_type<uint>(as_type<half2>(low | 0x64006400u) - zero),
                 as_type<uint>(as_type<half2>(high | 0x64006400u) - zero));
}

// C += A × B; targets.metal says which elements are a lane's.
DEVICE_FUNCTION void matrix_f16(thread float* c, thread const uint* a, thread const uint* b) {
    simdgroup_half8x8 left, right;
    simdgroup_float8x8 sums;
    for (int i = 0; i < 2; ++i) {
        left.thread_elements()[i] = as_type<half2>(a[0])[i];
        right.thread_elements()[i] = as_type<half2>(b[0])[i];
        sums.thread_elements()[i] = c[i];
    }
    simdgroup_multiply_accumulate(sums, left, right, sums);
    for (int i = 0; i < 2; ++i) c[i] = sums.thread_elements()[i];
}
DEVICE_FUNCTION void matrix_f32(thread float* c, thread const uint* a, thread const uint* b) {
    simdgroup_float8x8 left, right;
    simdgroup_float8x8 sums;
    for (int i = 0; i < 2; ++i) {
        left.thread_elements()[i] = as_type<float>(a[i]);
        right.thread_elements()[i] = as_type<float>(b[i]);
        sums.thread_elements()[i] = c[i];
    }
    simdgroup_multiply_accumulate(sums, left, right, sums);
    for (int i = 0; i < 2; ++i) c[i] = sums.thread_elements()[i];
}

// To threadgroup memory; there once `copies_wait` returns, which on CUDA is later.
DEVICE_FUNCTION void copy_async4(threadgroup float* to, device const float* from) { *to = *from; }
DEVICE_FUNCTION void copies_wait() {}

DEVICE_FUNCTION float fexp(float x) { return precise::exp(x); }
DEVICE_FUNCTION float flog(float x) { return precise::log(x); }
DEVICE_FUNCTION float fsqrt(float x) { return precise::sqrt(x); }
DEVICE_FUNCTION float frsqrt(float x) { return precise::rsqrt(x); }
DEVICE_FUNCTION float fsin(float x) { return precise::sin(x); }
DEVICE_FUNCTION float fcos(float x) { return precise::cos(x); }
DEVICE_FUNCTION float ftanh(float x) { return precise::tanh(x); }
DEVICE_FUNCTION float fpow(float x, float y) { return precise::pow(x, y); }
DEVICE_FUNCTION float frint(float x) { return rint(x); }
DEVICE_FUNCTION float ffma(float a, float b, float c) { return fma(a, b, c); }
DEVICE_FUNCTION float fmin_(float a, float b) { return fmin(a, b); }
DEVICE_FUNCTION float fmax_(float a, float b) { return fmax(a, b); }
DEVICE_FUNCTION float fabs_(float x) { return fabs(x); }
DEVICE_FUNCTION int imin(int a, int b) { return min(a, b); }
DEVICE_FUNCTION int imax(int a, int b) { return max(a, b); }
