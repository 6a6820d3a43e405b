"""The CPU target: which instructions a kernel may use, and what LLVM is told."""

from __future__ import annotations

import os
from dataclasses import dataclass

from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.host import host_architecture, host_flags


@dataclass(frozen=True)
class CpuTarget:
    """One instruction-set level of one architecture.

    `lanes`: f32 lanes of a vector register. `dot`: how int8 products are summed: `maddubs` (AVX2: u8·i8
    pairs, saturating in i16), `vnni` (AVX-VNNI and AVX-512 VNNI: u8·i8 quads into i32), `sdot` (Arm dotprod:
    i8·i8 quads into i32). `matrix`: whether it has AMX-INT8, which multiplies tiles of i8.
    """

    name: str
    triple: str
    cpu: str
    features: tuple[str, ...]
    lanes: int
    registers: int
    dot: str
    requires: frozenset[str]  # /proc/cpuinfo flags that the machine must have
    float64: bool = True
    matrix: bool = False

    def __str__(self) -> str:
        return f"cpu:{self.name}"

    @property
    def limits_activations(self) -> bool:
        """Whether products with 8-bit weights take activations that are limited, see `fused_ops`."""
        return self.dot == "maddubs"

    @property
    def units(self) -> int:
        """Vector units that can meet within a kernel."""
        return 1

    @property
    def llvm(self) -> dict[str, object]:
        """The target as TVM's LLVM back end takes it."""
        target: dict[str, object] = {
            "kind": "llvm",
            "mtriple": self.triple,
            "mcpu": self.cpu,
            "mattr": [f"+{f}" for f in self.features],
        }
        if self.triple == _X86:
            # Else LLVM adds integers as a tree, which takes more registers than a tile of a product has.
            target["cl-opt"] = ["-x86-machine-combiner:bool=false"]
        return target


_X86 = "x86_64-unknown-linux-gnu"
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_vnni"}

TARGETS = {
    t.name: t
    for t in (
        # Best first: detection takes the first whose flags the machine has.
        # Intel's server processors since Sapphire Rapids.
        CpuTarget(
            "amx",
            _X86,
            "x86-64-v4",
            ("avx512vnni", "amx-tile", "amx-int8"),
            16,
            32,
            "vnni",
            _AVX512 | {"amx_tile", "amx_int8"},
            matrix=True,
        ),
        CpuTarget("avx512vnni", _X86, "x86-64-v4", ("avx512vnni",), 16, 32, "vnni", _AVX512),
        # Intel's desktop and mobile processors since Alder Lake, which have no AVX-512.
        CpuTarget("avxvnni", _X86, "x86-64-v3", ("avxvnni",), 8, 16, "vnni", _AVX2 | {"avx_vnni"}),
        CpuTarget("avx2", _X86, "x86-64-v3", (), 8, 16, "maddubs", _AVX2),
        CpuTarget(
            "dotprod",
            "aarch64-unknown-linux-gnu",
            "generic",
            ("v8.2a", "dotprod", "fullfp16"),
            4,
            32,
            "sdot",
            frozenset({"asimddp", "fphp", "asimdhp"}),
        ),
    )
}


def detect() -> CpuTarget:
    """The best target that this machine can run."""
    flags = host_flags()
    for target in TARGETS.values():
        if target.triple.startswith(host_architecture()) and target.requires <= flags:
            return target
    raise ZllmcError(
        f"no CPU target fits this machine ({host_architecture()}): {os.uname().sysname} reports none of "
        + "; ".join(f"{t.name} (needs {', '.join(sorted(t.requires))})" for t in TARGETS.values())
    )


def parse(text: str) -> CpuTarget:
    """`cpu` (this machine) or `cpu:NAME`."""
    kind, _, name = text.partition(":")
    if kind != "cpu":
        raise ZllmcError(
            f"unknown target {text!r}: known are cpu and " + ", ".join(f"cpu:{n}" for n in TARGETS)
        )
    if not name:
        return detect()
    if name not in TARGETS:
        raise ZllmcError(f"unknown CPU target {name!r}: known are {', '.join(TARGETS)}")
    return TARGETS[name]
