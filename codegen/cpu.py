"""The CPU back end: which family makes which op's kernel, and the cache of compiled ones."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target

from zllmc.codegen import attention, attention_decode, elementwise, embedding, linear, norm, quantize, rope_kv
from zllmc.codegen.build_object import compile_object
from zllmc.codegen.cpu_executor import executor_object
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


def build_kernel(call: KernelCall, target: CpuTarget, cache_folder: Path | None = None) -> bytes:
    """The object of one kernel, from the cache where an equal call was compiled before.

    The cache is content-addressed (the call, the target, the compiler's own sources), so it is shared between
    models and needs no invalidation. Writes are renamed into place: a killed compile leaves no half entry.
    """
    if cache_folder is None:
        return _compile(call, target)
    digest = hashlib.sha256(f"{call!r}\n{target!r}\n{compiler_fingerprint()}".encode()).hexdigest()
    path = cache_folder / f"{digest}.o"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        pass
    code = _compile(call, target)
    cache_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cache_folder, delete=False) as file:
        file.write(code)
    os.replace(file.name, path)
    return code


def build_executor(target: CpuTarget) -> bytes:
    return executor_object(Target(target.llvm))


def _compile(call: KernelCall, target: CpuTarget) -> bytes:
    name = symbol(call)
    try:
        function = family_of(call.op)(call, target, name)
    except ZllmcError as error:
        raise ZllmcError(f"{call.op} for {target}: {error}") from error
    return compile_object({name: function}, Target(target.llvm))


@cache
def compiler_fingerprint() -> str:
    """A digest of everything that decides what code a call becomes."""
    digest = hashlib.sha256(tvm.__version__.encode())
    here = Path(__file__).parent
    for folder in (here, here.parent / "zllm_ir", here.parent / "targets"):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
