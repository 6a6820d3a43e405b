"""Metal sources, as far as they can be checked without a Mac."""

from pathlib import Path

import pytest

from binaries import compile_metal
from zllmc.codegen.gpu_toolchain import prelude, with_prelude
from zllmc.codegen.metal_check import check_metal
from zllmc.targets import metal

METAL = metal.TARGETS["apple9"]
MSL = """#include "prelude.h"
[[max_total_threads_per_threadgroup(256)]]
kernel void first(device const int* control [[buffer(0)]], device const uchar* x [[buffer(1)]],
                  device float* y [[buffer(2)]], uint thread_position [[thread_position_in_threadgroup]],
                  uint3 block_position [[threadgroup_position_in_grid]]) {
    threadgroup float values[16][256], other[8];  // a comment may name int* pointers
    threadgroup half halves[32];
    device const uint4* p = reinterpret_cast<device const uint4*>(x);
    const float product = float(x[0]) * values[0][thread_position];
}
kernel void second(device float* y [[buffer(0)]]) { y[0] = 1.0f; }
"""


def test_metal_sources_are_measured() -> None:
    shared = {name: resources.shared_memory for name, resources in check_metal(MSL, METAL).items()}
    assert shared == {"first": 4 * (16 * 256 + 8) + 2 * 32, "second": 0}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("values[16][256]", "values[33][256]", r"first has 33\d+ bytes of threadgroup memory.*32768"),
        ("values[16][256]", "values[rows]", r"no number: `values\[rows\]`"),
        (
            "device float* y [[buffer(2)]]",
            ", ".join(f"device float* y{i} [[buffer({i})]]" for i in range(2, 32)),
            "first has 32 buffers.*31",
        ),
        ("[[buffer(2)]]", "[[buffer(3)]]", r"`device float\* y \[\[buffer\(3\)\]\]` is neither buffer 2"),
        ("device float* y [[buffer(2)]]", "threadgroup float* y [[buffer(2)]]", "is neither buffer 2"),
        ("[[thread_position_in_threadgroup]]", "[[stage_in]]", "is neither buffer 3 nor a position"),
        ("threadgroup(256)", "threadgroup(2048)", "first has 2048 threads.*1024"),
        ("device const uint4* p", "const uint4* p", "`const uint4\\*` in line 8 has no address space"),
        ("<device const uint4*>", "<const uint4*>", "line 8 has no address space"),
        ("<device const uint4*>", "<threadgroup const uint4*>", "line 8 mixes .* to threadgroup and device"),
        ("device const uint4* p", "constant uint4* p", "line 8 mixes pointers to constant and device"),
        ("float(x[0])", "((threadgroup int*)(x + 4))[0]", "line 9 mixes pointers to threadgroup and device"),
        ("values[0]", "other[0], y = other + 8, z", "line 9 mixes pointers to device and threadgroup"),
        ("const float product", "const double product", "`double` in line 9"),
        ("values[0][thread_position]", "(float)3ll", "`3ll` in line 9"),
        ("const float product", "const long long product", "`long long` in line 9"),
        ("const float product", "const float thread", "`thread` in line 9"),
        ("device float* y [[buffer(0)]]", "float& y [[buffer(0)]]", "line 11 has no address space"),
    ],
)
def test_metal_sources_beyond_the_limits_are_refused(old: str, new: str, message: str) -> None:
    assert old in MSL
    with pytest.raises(ValueError, match=message):
        check_metal(MSL.replace(old, new), METAL)


def test_pointers_of_several_spaces_may_meet_in_an_index_or_a_call() -> None:
    for product in "x[((threadgroup int*)other)[0]]", "dot(x, other) + (x + int(other[0]))[1]":
        check_metal(MSL.replace("float(x[0])", product), METAL)


def test_metal_sources_carry_their_prelude_as_text() -> None:
    text = with_prelude(MSL, "metal")
    assert "prelude.h" not in text and text.startswith(prelude("metal"))
    assert set(check_metal(text, METAL)) == {"first", "second"}
    with pytest.raises(ValueError, match="begin with"):
        with_prelude("kernel void f() {}", "metal")


USE = """
int use(device uchar* d, constant uchar* c, threadgroup uchar* t, device float* x, threadgroup float* y) {
    copy_async4(y, x);
    copies_wait();
    uint4 a = load16(d);
    store16(t, a + load16(c) + load16(static_cast<threadgroup const uchar*>(t)));
    store16(d, make_uint4(a.x, 1, 2, 3) + load16(static_cast<device const uchar*>(d)));
    uint2 b = load8(d) + load8(c) + load8(t) + make_uint2(1, 2);
    barrier();
    unit_sync();
    float f = half_to_float(float_to_half(as_float(b.x))) + subgroup_add(1.0f) + subgroup_max(2.0f);
    f += subgroup_shuffle(f, 1) + subgroup_shuffle_xor(f, 2) + subgroup_shuffle(b.x, 1);
    f += fexp(f) + flog(f) + fsqrt(f) + frsqrt(f) + fsin(f) + fcos(f) + ftanh(f) + fpow(f, f);
    f += unit_shuffle(f, 1) + unit_shuffle_xor(b.y, 2) + unit_add(f) + unit_max(2) + frint(f);
    float sums[2] = {f, f};
    uint words[2] = {bytes_to_f16(b.x).x, bytes_to_f16(b.y).y};
    matrix_f16(sums, words, words);
    matrix_f32(sums, words, words);
    f += fmin_(f, 1) + fmax_(f, 2) + fabs_(f) + ffma(f, f, f);
    return dot4(as_int(a.y), int(as_uint(f)), imin(1, imax(2, 3))) + subgroup_add(SUBGROUP);
}
"""


def test_the_prelude_s_types_fit(tmp_path: Path) -> None:
    compile_metal(prelude("metal") + USE, tmp_path)
