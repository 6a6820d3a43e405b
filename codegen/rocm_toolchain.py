"""HIP C++ to AMD code objects, by any clang that has the AMDGPU back end: no ROCm is needed."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from zllmc.codegen.gpu_toolchain import Binary, KernelResources, prelude, run_compiler
from zllmc.targets.gpu import GpuTarget
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.gpu_binary import code_object_metadata

_OLDEST = 18  # the first clang that knows every target

# Code object version 5 is loaded by every ROCm since 5.7; newer clangs would write 6.
_OPTIONS = (
    *("-x", "hip", "-std=c++17", "-O3", "-nogpuinc", "-nogpulib"),
    *("--cuda-device-only", "--no-gpu-bundle-output", "-mcode-object-version=5"),
)


@dataclass(frozen=True)
class Clang:
    """A clang's command. `linker`: how LLD is called, where clang does not find it by itself."""

    command: tuple[str, ...]
    linker: tuple[str, ...] = ()

    def usable(self) -> bool:
        """Whether it is new enough, has the AMDGPU back end, and a linker for it."""
        try:
            version = re.search(r"clang version (\d+)", self._ask("--version"))
            if version is None or int(version[1]) < _OLDEST or "amdgcn" not in self._ask("--print-targets"):
                return False
            return bool(self.linker) or Path(self._ask("--print-prog-name=lld").strip()).is_absolute()
        except (OSError, ValueError):  # it does not even run
            return False

    def _ask(self, question: str) -> str:
        return run_compiler([*self.command, question], Path())

    def compile(self, source: str, architecture: str, *options: str) -> bytes:
        """The code object, or what the further options make clang write instead."""
        with tempfile.TemporaryDirectory(prefix="zllmc-") as name:
            folder = Path(name)
            (folder / "kernels.hip").write_text(source)
            (folder / "prelude.h").write_text(prelude("hip"))
            command = [*self.command, *_OPTIONS, f"--offload-arch={architecture}", *options]
            if self.linker:
                # clang runs `lld -flavor gnu …`
                script = folder / "lld"
                script.write_text(
                    f'#!/bin/sh\nshift 2\nexec {" ".join(map(shlex.quote, self.linker))} "$@"\n'
                )
                script.chmod(0o700)
                command += ["-B", "."]
            run_compiler([*command, "-o", "kernels.out", "kernels.hip"], folder)
            return (folder / "kernels.out").read_bytes()


def _candidates() -> Iterator[Clang]:
    path = os.pathsep.join(
        [f"{os.environ.get('ROCM_PATH') or '/opt/rocm'}/llvm/bin", os.environ.get("PATH", "")]
    )
    for name in ("amdclang++", "clang", *(f"clang-{version}" for version in range(30, _OLDEST - 1, -1))):
        if found := shutil.which(name, path=path):
            yield Clang((found,))
    wheel = importlib.util.find_spec("ziglang")  # the whole of clang and LLD in one program
    zig = str(Path(wheel.origin).with_name("zig")) if wheel and wheel.origin else shutil.which("zig")
    if zig:
        yield Clang((zig, "clang"), (zig, "ld.lld"))


@cache
def find_hip_compiler() -> Clang:
    """The first clang found that can; raises ZllmcError, with what to install, if there is none."""
    for candidate in _candidates():
        if candidate.usable():
            return candidate
    raise ZllmcError(
        f"compiling for AMD GPUs needs clang {_OLDEST} or newer with its AMDGPU back end and LLD: none is in "
        "$ROCM_PATH, /opt/rocm, PATH or this Python environment; `pip install ziglang` (410 MB) is enough"
    )


def compile_hip(source: str, target: GpuTarget) -> Binary:
    """Compiles kernels that include "prelude.h" to a code object for this architecture.

    Raises ZllmcError without a compiler, and ValueError with its messages when it refuses the source.
    """
    code = find_hip_compiler().compile(source, target.name)
    return Binary(code, "hsaco", resources(code))


def assembly(source: str, target: GpuTarget) -> str:
    """What `compile_hip` gives, as text."""
    return find_hip_compiler().compile(source, target.name, "-S").decode()


class _Kernel(msgspec.Struct, rename=lambda field: f".{field}"):
    name: str
    vgpr_count: int
    vgpr_spill_count: int
    private_segment_fixed_size: int
    group_segment_fixed_size: int


class _Metadata(msgspec.Struct):
    kernels: list[_Kernel] = msgspec.field(name="amdhsa.kernels")


def resources(code: bytes) -> dict[str, KernelResources]:
    """What a code object's metadata tells of each kernel."""
    metadata = msgspec.convert(code_object_metadata(code), _Metadata)
    return {
        k.name: KernelResources(
            k.vgpr_count, 4 * k.vgpr_spill_count, k.private_segment_fixed_size, k.group_segment_fixed_size
        )
        for k in metadata.kernels
    }
