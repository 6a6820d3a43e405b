"""What compilers make of the kernels: the instructions that matter, no spills, limits kept."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from binaries import compile_metal, is_for
from compiled import entry_file
from models import DENSE
from zllmc import targets
from zllmc.codegen.cuda_toolchain import compile_cuda, disassemble
from zllmc.codegen.gpu import kernel_source
from zllmc.codegen.gpu_toolchain import PRELUDE_INCLUDE, Binary, with_prelude
from zllmc.codegen.metal_check import check_metal
from zllmc.codegen.rocm_toolchain import assembly, compile_hip
from zllmc.frontends.model import load_model
from zllmc.passes.pipeline import lower_entries
from zllmc.passes.plan import kernel_calls
from zllmc.targets.gpu import GpuTarget
from zllmc.zllm_ir.gpu_binary import parameters
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand, symbol
from zllmc.zllm_ir.types import TensorType

SIZE = 4096


def gemv(format: str) -> KernelCall:
    """Decode: one row of x against a square matrix."""
    return KernelCall(
        "linear",
        (("alpha", 1.0),),
        (
            Operand(TensorType("a8", (1, SIZE)), SIZE),
            Operand(TensorType(format, (SIZE, SIZE))),
            None,
            None,
        ),
        (Operand(TensorType("f32", (1, SIZE)), SIZE),),
    )


def compiled(text: str, target: GpuTarget) -> Binary:
    return compile_cuda(text, target) if target.kind == "cuda" else compile_hip(text, target)


@pytest.mark.parametrize("format", ["Q4_K", "Q8_0", "Q6_K", "Q4_0"])
@pytest.mark.parametrize(
    ("name", "wide", "dot"),
    [
        ("cuda:sm_80", r"LDG\.E\.128", r"IDP\.4A"),
        ("cuda:sm_90", r"LDG\.E\.128", r"IDP\.4A"),
        ("rocm:gfx1100", "global_load_b128", "v_dot4_i32_iu8"),
        ("rocm:gfx942", "global_load_dwordx4", "v_dot4c?_i32_i8"),
    ],
)
def test_a_gemv_loads_16_bytes_at_once_and_multiplies_by_dot_instructions(name, wide, dot, format):
    target = targets.parse(name)
    source = kernel_source(gemv(format), target)
    binary = compiled(source.text, target)
    code = disassemble(binary.code) if target.kind == "cuda" else assembly(source.text, target)
    found = Counter(re.findall(f"{wide}|{dot}", code))
    assert any(re.fullmatch(wide, what) for what in found) and any(re.fullmatch(dot, what) for what in found)
    assert sum(count for what, count in found.items() if re.fullmatch(dot, what)) % 8 == 0  # whole units
    (resources,) = binary.kernels.values()
    assert resources.spills == 0 and resources.stack == 0


def check_kernels(file, target, folder):
    """All kernels of a model: the output is the target's, nothing spills, and no limit is exceeded."""
    model = load_model(file, context=256, kv="f16")
    calls = kernel_calls(lower_entries(model.graph, target, context=256).values()).values()
    sources = {symbol(call): kernel_source(call, target) for call in calls}
    assert len(sources) > 15
    # One text for all, which compiles in half the time.
    bodies = (source.text.removeprefix(PRELUDE_INCLUDE) for source in sources.values())
    text = PRELUDE_INCLUDE + "".join(f"namespace k{i} {{\n{body}}}\n" for i, body in enumerate(bodies))
    if target.kind == "metal":
        kernels = check_metal(text, target)
        compile_metal(with_prelude(text, "metal"), folder)
    else:
        binary = compiled(text, target)
        assert is_for(binary.code, target)
        kernels = binary.kernels
        assert parameters(binary.code).keys() == sources.keys()
    assert kernels.keys() == sources.keys()
    for name, resources in kernels.items():
        threads = sources[name].threads
        assert (resources.spills, resources.stack) == (0, 0), f"{name} spills on {target}: {resources}"
        assert resources.shared_memory <= target.static_shared_memory, name
        assert resources.registers <= target.registers and threads <= target.max_threads, name


@pytest.mark.parametrize("name", ["cuda:sm_90", "rocm:gfx1100", "rocm:gfx942", "metal:apple9"])
def test_kernels_of_smollm2_keep_the_limits(name, models, tmp_path):
    check_kernels(models("SmolLM2-135M-Instruct.Q4_1.gguf"), targets.parse(name), tmp_path)


@pytest.mark.skipif(not DENSE, reason="no conformance data: set ZLLMC_SHARED")
@pytest.mark.parametrize("name", ["cuda:sm_80", "cuda:sm_120", "rocm:gfx1201", "metal:apple7"])
def test_kernels_of_gemma3_keep_the_limits(name, tmp_path):
    check_kernels(entry_file("quants/gemma3-dense-Q4_K_M", tmp_path), targets.parse(name), tmp_path)
