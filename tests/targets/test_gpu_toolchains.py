"""Generated sources become cubins and code objects of the right architecture, and what they take is known."""

import os
import re
from functools import cache
from pathlib import Path

import pytest

from binaries import is_for
from zllmc.codegen import cuda_toolchain, rocm_toolchain
from zllmc.codegen.cuda_toolchain import compile_cuda, disassemble, find_cuda_compiler
from zllmc.codegen.gpu_toolchain import Binary, KernelResources
from zllmc.codegen.rocm_toolchain import Clang, assembly, compile_hip, find_hip_compiler
from zllmc.targets import cuda, rocm
from zllmc.targets.gpu import GpuTarget
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.gpu_binary import code_object_metadata, parameters
from zllmc.zllm_ir.matrix_unit import MatrixInstruction

CUDA = [cuda.TARGETS[name] for name in ("sm_80", "sm_90", "sm_120")]
ROCM = list(rocm.TARGETS.values())


@pytest.fixture(autouse=True)
def toolchains() -> None:
    """Without a toolchain these tests are skipped, but not on CI."""
    try:
        find_cuda_compiler(CUDA[0])
        find_hip_compiler()
    except ZllmcError as error:
        if not os.environ.get("CI"):
            pytest.skip(str(error))
        raise


# Uses all that the preludes have.
EVERYTHING = """#include "prelude.h"
extern "C" __global__ void __launch_bounds__(256, 1)
everything(const int* __restrict__ control, const unsigned char* __restrict__ x, float* __restrict__ y) {
    const int thread = threadIdx.x;
    const int block_x = blockIdx.x;
    const int block_y = blockIdx.y;
    __shared__ float values[256];
    __shared__ __attribute__((aligned(16))) unsigned char bytes[4096];
    const uint4 a = load16(x + 16 * (block_x * 256 + thread));
    const uint2 b = load8(x + 8 * (block_y * 256 + thread));
    store16(bytes + 16 * thread, make_uint4(a.w, a.z, b.x, b.y));
    const int d = dot4(as_int(a.x), as_int(a.y), imin(as_int(a.z), imax(control[0], 3)));
    values[thread] = half_to_float((unsigned short)a.w) * d;
    barrier();
    float f = values[255 - thread] + as_float(load16(bytes + 4080 - 16 * thread).y);
    f += subgroup_add(f) + subgroup_max(f) + subgroup_add(d) + subgroup_shuffle(f, 3) + float_to_half(f);
    f += subgroup_shuffle(d, thread % 7) + subgroup_shuffle(as_uint(f), 2);
    f += subgroup_shuffle_xor(f, SUBGROUP / 2) + subgroup_shuffle_xor(d, 1);
    f += subgroup_shuffle_xor(as_uint(f), 5) + subgroup_max(d);
    f += unit_add(f) + unit_max(f) + unit_add(d) + unit_max(d);
    f += unit_shuffle(f, 31) + unit_shuffle_xor(d, 16);
    values[thread] = fmin_(f, INFINITY);
    unit_sync();
    f += values[thread ^ 1];
    y[block_x * 256 + thread] = f + make_uint2(a.x, b.y).y;
}
extern "C" __global__ void __launch_bounds__(64)
math(const float* __restrict__ x, float* __restrict__ y) {
    const float v = x[threadIdx.x];
    float r[14] = {fexp(v), flog(v), fsqrt(v), frsqrt(v), fsin(v), fcos(v), ftanh(v), fpow(v, x[64]),
                   fmin_(v, 1.0f), fmax_(v, 2.0f), fabs_(v), ffma(v, v, v),
                   frint(v), float(drint(dfma(v, v, v)))};
    for (int i = 0; i < 14; i++) y[threadIdx.x * 14 + i] = r[i];
}
"""
# Keeps more floats alive than a thread has registers.
SPILLING = """#include "prelude.h"
extern "C" __global__ void __launch_bounds__(1024)
spilling(float* y) {
    float r[160];
#pragma unroll
    for (int i = 0; i < 160; i++) r[i] = y[threadIdx.x + 1024 * i];
    barrier();
#pragma unroll
    for (int i = 0; i < 160; i++) y[threadIdx.x + 1024 * i] = r[i] * r[159 - i];
}
"""


@cache
def compiled(target: GpuTarget, source: str = EVERYTHING) -> Binary:
    return (compile_cuda if target.kind == "cuda" else compile_hip)(source, target)


@pytest.mark.parametrize("target", [*CUDA, *ROCM], ids=str)
def test_preludes_compile_and_the_kernels_resources_are_known(target: GpuTarget) -> None:
    binary = compiled(target)
    assert set(binary.kernels) == {"everything", "math"}
    everything = binary.kernels["everything"]
    assert everything.shared_memory == 4096 + 1024
    assert 8 <= everything.registers <= 64
    assert (everything.spills, binary.kernels["math"].spills) == (0, 0)
    assert parameters(binary.code) == {"everything": 3, "math": 2}


@pytest.mark.parametrize("target", [*CUDA, *ROCM], ids=str)
def test_a_binary_is_of_its_architecture(target: GpuTarget) -> None:
    code = compiled(target).code
    assert [other for other in (*CUDA, *ROCM) if is_for(code, other)] == [target]
    assert target.kind == "cuda" or code[7:9] == b"\x40\x03"  # OSABI_AMDGPU_HSA, code object version 5


def test_parameters_that_the_compiler_adds_are_not_counted() -> None:
    body = "y[0] = __builtin_amdgcn_workgroup_size_x();"  # which is read from a hidden argument
    source = f'#include "prelude.h"\nextern "C" __global__ void size(float* y) {{ {body} }}\n'
    code = compiled(rocm.TARGETS["gfx942"], source).code
    assert len(code_object_metadata(code)["amdhsa.kernels"][0][".args"]) > 1
    assert parameters(code) == {"size": 1}


@pytest.mark.parametrize("target", CUDA, ids=str)
def test_nvidia_gets_int8_dots_and_wide_loads(target: GpuTarget) -> None:
    sass = disassemble(compiled(target).code)
    assert "IDP.4A.S8.S8" in sass
    assert re.search(r"LDG\.E\.128", sass)


@pytest.mark.parametrize("target", ROCM, ids=str)
def test_amd_gets_int8_dots_and_wide_loads(target: GpuTarget) -> None:
    text = assembly(EVERYTHING, target)
    assert re.search({"sdot4": r"v_dot4c?_i32_i8", "sudot4": r"v_dot4_i32_iu8"}[target.dot4 or ""], text)
    assert re.search(r"global_load_(b128|dwordx4)", text)
    assert f".amdhsa_wavefront_size32 {int(target.subgroup == 32)}" in text or target.subgroup == 64


def matrix_kernel(target: GpuTarget, instruction: MatrixInstruction) -> str:
    """A kernel that multiplies once, with as many registers as the target's fragments say."""
    number, bits = {"s8": ("int", 8)}.get(instruction.inputs, ("float", 16))
    a, b, c = instruction.a.elements * bits // 32, instruction.b.elements * bits // 32, instruction.c.elements
    operand = {"s8": "Bytes", "f16": "Halves", "bf16": "BrainHalves"}[instruction.inputs]
    check = f"static_assert(sizeof({operand}) == 4 * {a} && {a} == {b} && sizeof(Sums) == 4 * {c});"
    return f"""{check if target.kind == "rocm" else ""}
extern "C" __global__ void __launch_bounds__(64) {instruction.inputs}(const unsigned* x, {number}* y) {{
    unsigned a[{a}], b[{b}];
    {number} c[{c}];
    for (int i = 0; i < {a}; i++) a[i] = x[threadIdx.x * {a} + i];
    for (int i = 0; i < {b}; i++) b[i] = x[4096 + threadIdx.x * {b} + i];
    for (int i = 0; i < {c}; i++) c[i] = y[threadIdx.x * {c} + i];
    matrix_{instruction.inputs}(c, a, b);
    for (int i = 0; i < {c}; i++) y[threadIdx.x * {c} + i] = c[i];
}}
"""


@pytest.mark.parametrize("target", [t for t in (*CUDA, *ROCM) if t.matrix], ids=str)
def test_matrix_units_are_used_with_the_registers_that_the_fragments_take(target: GpuTarget) -> None:
    source = '#include "prelude.h"\n' + "".join(matrix_kernel(target, i) for i in target.matrix)
    binary = compiled(target, source)
    assert [binary.kernels[inputs].stack for inputs in ("s8", "f16", "bf16")] == [0, 0, 0]
    if target.kind == "cuda":
        sass = disassemble(binary.code)
        assert all(it in sass for it in ("IMMA.16832.S8.S8", "HMMA.16816.F32 ", "HMMA.16816.F32.BF16 "))
    else:
        text = assembly(source, target)
        for instruction in target.matrix:  # older assembly has no underscore after the shape
            assert re.search(instruction.name.replace("16_", "16_?", 1), text)


@pytest.mark.parametrize("target", [CUDA[0], rocm.TARGETS["gfx942"]], ids=str)
def test_a_kernel_that_spills_is_reported(target: GpuTarget) -> None:
    resources = compiled(target, SPILLING).kernels["spilling"]
    assert resources.spills > 50 and resources.stack > 50


@pytest.mark.parametrize("target", [CUDA[1], ROCM[3]], ids=str)
def test_the_same_source_gives_the_same_bytes(target: GpuTarget) -> None:
    again = compiled.__wrapped__(target)
    assert again == compiled(target)


def test_ptx_is_made_for_architectures_to_come() -> None:
    binary = compile_cuda(EVERYTHING, CUDA[0], output="ptx")
    assert b".target sm_80" in binary.code and b"ld.global.nc.v4" in binary.code
    assert (binary.format, binary.kernels, parameters(binary.code)) == ("ptx", {}, {})


@pytest.mark.parametrize("target", [CUDA[0], ROCM[0]], ids=str)
def test_a_refused_source_gives_the_compiler_s_message(target: GpuTarget) -> None:
    with pytest.raises(ValueError, match="undeclared_name"):
        compiled(target, '#include "prelude.h"\nDEVICE_FUNCTION int f() { return undeclared_name; }\n')


def test_what_nvcc_prints_is_understood() -> None:
    log = """ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_90'
ptxas info    : Function properties for a
    64 bytes stack frame, 48 bytes spill stores, 60 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers, 32 bytes cumulative stack size
ptxas info    : Compile time = 65.320 ms
ptxas info    : Compiling entry function 'b' for 'sm_90'
ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 19 registers, used 1 barriers, 1024 bytes smem, 380 bytes cmem[0]
"""
    assert cuda_toolchain.resources(log) == {
        "a": KernelResources(24, 48, 64, 0),
        "b": KernelResources(19, 0, 0, 1024),
    }
    with pytest.raises(ValueError, match="no resources of a"):
        cuda_toolchain.resources(log.split("ptxas info    : Used", maxsplit=1)[0])


def test_without_a_toolchain_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cuda_toolchain, "_candidates", lambda: iter([cuda_toolchain.Nvrtc("libmissing.so.0")])
    )
    with pytest.raises(ZllmcError, match=r"cuda:sm_90 needs NVRTC.*pip install nvidia-cuda-nvrtc"):
        find_cuda_compiler.__wrapped__(CUDA[1])
    monkeypatch.setattr(rocm_toolchain, "_candidates", lambda: iter(()))
    with pytest.raises(ZllmcError, match=r"clang 18.*pip install ziglang"):
        find_hip_compiler.__wrapped__()


def fake_clang(folder: Path, version: int, targets: str, linker: str) -> Clang:
    program = folder / f"clang-{version}"
    program.write_text(f"""#!/bin/sh
case "$1" in
--version) echo "Some clang version {version}.1.0" ;;
--print-targets) echo "{targets}" ;;
--print-prog-name=lld) echo "{linker}" ;;
esac
""")
    program.chmod(0o755)
    return Clang((str(program),))


def test_a_clang_that_is_old_or_has_no_amd_back_end_or_linker_is_passed_over(tmp_path: Path) -> None:
    assert fake_clang(tmp_path, 19, "amdgcn", "/usr/lib/llvm-19/bin/lld").usable()
    assert not fake_clang(tmp_path, 17, "amdgcn", "/usr/lib/llvm-17/bin/lld").usable()
    assert not fake_clang(tmp_path, 20, "x86-64", "/usr/lib/llvm-20/bin/lld").usable()
    assert not fake_clang(tmp_path, 21, "amdgcn", "lld").usable()
    assert not Clang(("/bin/false",)).usable()
    assert not Clang((str(tmp_path / "absent"),)).usable()
    assert not cuda_toolchain.Nvcc("/bin/false").supports(CUDA[0])
