"""One file per target: features, limits, peaks."""

from __future__ import annotations

from collections.abc import Callable

from zllmc.targets import cpu, cuda, metal, rocm
from zllmc.targets.cpu import CpuTarget
from zllmc.targets.gpu import GpuTarget
from zllmc.zllm_ir.errors import ZllmcError

Target = CpuTarget | GpuTarget

_PARSERS: dict[str, Callable[[str], Target]] = {
    "cpu": cpu.parse,
    "cuda": cuda.parse,
    "rocm": rocm.parse,
    "metal": metal.parse,
}


def all_targets() -> list[Target]:
    """Every target that there is."""
    return [
        *cpu.TARGETS.values(),
        *cuda.TARGETS.values(),
        *rocm.TARGETS.values(),
        *metal.TARGETS.values(),
    ]


def parse(text: str) -> Target:
    """The target that `--target` names: `KIND:NAME`, or `KIND` alone for this machine's device of that kind.

    Raises ZllmcError for unknown names, and for a kind alone where no such device is found.
    """
    kind = text.partition(":")[0]
    if kind not in _PARSERS:
        known = ", ".join(str(t) for module in (cpu, cuda, rocm, metal) for t in module.TARGETS.values())
        raise ZllmcError(
            f"unknown target {text!r}: known are {', '.join(_PARSERS)} (this machine's), {known}"
        )
    return _PARSERS[kind](text)
