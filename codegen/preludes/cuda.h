// What generated kernels are written in, for CUDA: nvcc or NVRTC, without any other header.
//
// load and store take addresses aligned to their size. `barrier` orders shared memory. A unit is 32 neighbouring
// lanes, here a whole subgroup; unit and subgroup functions are called by all of its lanes together. Float
// functions are CUDA's accurate ones: within 2 ulp (fpow 4), and half conversions round to nearest even.
#define SUBGROUP 32
#define DEVICE_FUNCTION static __device__ __forceinline__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

DEVICE_FUNCTION void barrier() { __syncthreads(); }
DEVICE_FUNCTION void unit_sync() { __syncwarp(); }

template <class T> DEVICE_FUNCTION T unit_shuffle(T v, int lane) { return __shfl_sync(~0u, v, lane); }
template <class T> DEVICE_FUNCTION T unit_shuffle_xor(T v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE_FUNCTION int unit_add(int v) { return __reduce_add_sync(~0u, v); }
DEVICE_FUNCTION int unit_max(int v) { return __reduce_max_sync(~0u, v); }
DEVICE_FUNCTION float unit_add(float v) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) v += unit_shuffle_xor(v, mask);
    return v;
}
DEVICE_FUNCTION float unit_max(float v) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) v = fmaxf(v, unit_shuffle_xor(v, mask));
    return v;
}
#define subgroup_shuffle unit_shuffle
#define subgroup_shuffle_xor unit_shuffle_xor
#define subgroup_add unit_add
#define subgroup_max unit_max

// c + the four products of the signed bytes of a and b
DEVICE_FUNCTION int dot4(int a, int b, int c) { return __dp4a(a, b, c); }

// Four bytes of a table of 16, each picked by the low four bits of a byte of `index`.
DEVICE_FUNCTION unsigned lookup16(unsigned index, unsigned a, unsigned b, unsigned c, unsigned d) {
    const unsigned low = index & 0x07070707u, places = __byte_perm(low | low >> 4, 0, 0x4420);  // a nibble each
    unsigned upper;  // 0xff where the bit above is set: copies of signs
    asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(upper) : "r"(index << 4));
    return (__byte_perm(a, b, places) & ~upper) | (__byte_perm(c, d, places) & upper);
}

// C += A × B by the target's matrix instruction; targets.cuda says which element each 32-bit register holds.
DEVICE_FUNCTION void matrix_s8(int* c, const unsigned* a, const unsigned* b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE_FUNCTION void matrix_f16(float* c, const unsigned* a, const unsigned* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE_FUNCTION void matrix_bf16(float* c, const unsigned* a, const unsigned* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two floats as a matrix instruction's inputs; halves stay finite.
DEVICE_FUNCTION unsigned pack_f16(float low, float high) {
    unsigned result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2; min.f16x2 %0, %0, %3; max.f16x2 %0, %0, %4;"
        : "=&r"(result)
        : "f"(high), "f"(low), "r"(0x7bff7bff), "r"(0xfbfffbff));
    return result;
}
DEVICE_FUNCTION unsigned pack_bf16(float low, float high) {
    unsigned result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

DEVICE_FUNCTION float as_float(unsigned v) { return __uint_as_float(v); }
DEVICE_FUNCTION unsigned as_uint(float v) { return __float_as_uint(v); }
DEVICE_FUNCTION int as_int(unsigned v) { return static_cast<int>(v); }

DEVICE_FUNCTION float half_to_float(unsigned short v) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(v));
    return result;
}
DEVICE_FUNCTION unsigned short float_to_half(float v) {
    unsigned short result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(v));
    return result;
}

DEVICE_FUNCTION uint4 load16(const unsigned char* p) { return *reinterpret_cast<const uint4*>(p); }
DEVICE_FUNCTION uint2 load8(const unsigned char* p) { return *reinterpret_cast<const uint2*>(p); }
DEVICE_FUNCTION void store16(unsigned char* p, uint4 v) { *reinterpret_cast<uint4*>(p) = v; }


// From global to shared memory, past the registers; there once `copies_wait` returns, and to others after a barrier.
DEVICE_FUNCTION unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
DEVICE_FUNCTION void copy_async16(unsigned* to, const unsigned char* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE_FUNCTION void copy_async4(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE_FUNCTION void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

DEVICE_FUNCTION float fexp(float x) { return expf(x); }
DEVICE_FUNCTION float flog(float x) { return logf(x); }
DEVICE_FUNCTION float fsqrt(float x) { return sqrtf(x); }
DEVICE_FUNCTION float frsqrt(float x) { return rsqrtf(x); }
DEVICE_FUNCTION float fsin(float x) { return sinf(x); }
DEVICE_FUNCTION float fcos(float x) { return cosf(x); }
DEVICE_FUNCTION float ftanh(float x) { return tanhf(x); }
DEVICE_FUNCTION float fpow(float x, float y) { return powf(x, y); }
DEVICE_FUNCTION float frint(float x) { return rintf(x); }
DEVICE_FUNCTION float ffma(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE_FUNCTION double drint(double x) { return rint(x); }
DEVICE_FUNCTION double dfma(double a, double b, double c) { return fma(a, b, c); }
DEVICE_FUNCTION float fmin_(float a, float b) { return fminf(a, b); }
DEVICE_FUNCTION float fmax_(float a, float b) { return fmaxf(a, b); }
DEVICE_FUNCTION float fabs_(float x) { return fabsf(x); }
DEVICE_FUNCTION int imin(int a, int b) { return a < b ? a : b; }
DEVICE_FUNCTION int imax(int a, int b) { return a > b ? a : b; }
