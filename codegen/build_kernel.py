"""One kernel for any target."""

from __future__ import annotations

from zllmc.targets.cpu import CpuTarget
from zllmc.targets.gpu import GpuTarget
from zllmc.zllm_ir.kernel_graph import KernelCall


def build_kernel(call: KernelCall, target: CpuTarget | GpuTarget) -> bytes:
    """What `codegen.cpu` or `codegen.gpu` builds of a call. Raises ZllmcError for what has no kernel."""
    if isinstance(target, CpuTarget):
        from zllmc.codegen import cpu

        return cpu.build_kernel(call, target)
    from zllmc.codegen import gpu

    return gpu.build_kernel(call, target)
