"""The CPU back end: which family makes which op's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.target import Target

from zllmc.codegen import (
    attention,
    attention_decode,
    elementwise,
    embedding,
    linear,
    norm,
    pack_kernel,
    quantize,
    rope_kv,
)
from zllmc.codegen.build_object import compile_object
from zllmc.codegen.cpu_executor import executor_object
from zllmc.codegen.kernel_cache import EXECUTOR
from zllmc.targets.cpu import CpuTarget
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.kernel_graph import KernelCall, symbol

Family = Callable[[KernelCall, CpuTarget, str], Any]

# An op's kernel family is the function of the op's name in its module.
FAMILIES: dict[str, Family] = {
    op: getattr(module, op)
    for module, ops in (
        (attention, ("attention_rows",)),
        (attention_decode, ("attention_partial", "attention_merge", "attention_merge_quantize")),
        (elementwise, ("activation", "add", "glu", "glu_quantize", "scale", "select_rows", "softcap")),
        (embedding, ("embedding",)),
        (linear, ("linear",)),
        (norm, ("layer_norm", "norm_add", "rms_norm", "rms_norm_quantize")),
        (pack_kernel, ("pack",)),
        (quantize, ("quantize",)),
        (rope_kv, ("kv_append", "rope", "rope_append", "rope_table")),
    )
    for op in ops
}


def family_of(op: str) -> Family:
    """The kernel family of that op; an error that names the supported ones where there is none."""
    if op not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ZllmcError(f"no CPU kernel for op {op!r}; there are kernels for {known}")
    return FAMILIES[op]


def build_kernel(call: KernelCall, target: CpuTarget) -> bytes:
    """The object of one kernel, or of the executor. Raises ZllmcError for what has no kernel."""
    if call == EXECUTOR:
        return build_executor(target)
    name = symbol(call)
    try:
        function = family_of(call.op)(call, target, name)
    except ZllmcError as error:
        raise ZllmcError(f"{call.op} for {target}: {error}") from error
    return compile_object({name: function}, Target(target.llvm))


def build_executor(target: CpuTarget) -> bytes:
    return executor_object(Target(target.llvm))
