"""From TIR functions to one relocatable object, through TVM's LLVM backend.

The object is all that a CPU artifact needs: the runtime links it in memory (ORC), so no linker and no TVM
are needed where it runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

import tvm
from tvm import tirx
from tvm.target import Target

# Passes of TVM's pipeline that change no kernel here (an array may stay larger than what is used of it), and
# take a quarter of the time of all: kernels allocate what they need, have their branches where they belong,
# and know nothing of layouts of a GPU's memory.
_NEEDLESS_PASSES = ("s_tir.CompactBufferAllocation", "s_tir.HoistIfThenElse", "s_tir.InjectPermutedLayout")


def llvm_target(
    triple: str, cpu: str = "", features: Sequence[str] = (), fast_math: Sequence[str] = ()
) -> Target:
    """An LLVM target, e.g. `llvm_target("x86_64-linux-gnu", "x86-64-v3", ["+avx512vnni"])`.

    `features` use LLVM's names with their sign. `fast_math` holds LLVM's flags for all float arithmetic
    (contract, reassoc, nsz, arcp, nnan, ninf): without reassoc a float reduction stays scalar and in order,
    without contract only explicit fma fuses; nnan and ninf break code that masks with infinity.
    """
    options: dict[str, object] = {"kind": "llvm", "mtriple": triple, "opt-level": 3}
    if cpu:
        options["mcpu"] = cpu
    if features:
        options["mattr"] = list(features)
    options |= {f"fast-math-{flag}": True for flag in fast_math}
    return Target(options)


def compile_module(functions: Mapping[str, tirx.PrimFunc], target: Target) -> tvm.runtime.Module:
    """Compiles TIR functions as they are named: a module that runs in this process, or is written."""
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    with tvm.transform.PassContext(disabled_pass=_NEEDLESS_PASSES):
        return tvm.compile(module, target=target).mod


def compile_object(functions: Mapping[str, tirx.PrimFunc], target: Target) -> bytes:
    """Compiles TIR functions into one object; function `name` becomes symbol `__tvm_ffi_<name>`.

    The symbols follow the TVM FFI C ABI (tvm/ffi/c_api.h, TVMFFISafeCallType). Raises ValueError when the
    code would call the TVM runtime library, as T.parallel does.
    """
    compiled = compile_module(functions, target)
    with open(os.memfd_create("kernels"), "rb") as file:  # a process that is killed leaves no file behind
        compiled.write_to_file(f"/proc/self/fd/{file.fileno()}", "o")
        code = file.read()
    if needed := sorted(set(re.findall(rb"TVMBackend\w+", code))):
        raise ValueError(f"{', '.join(functions)}: needs {b', '.join(needed).decode()} of the TVM runtime")
    return code
