"""What tests ask of compiled kernels: which machine they are for, and whether Metal's types fit."""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from zllmc.targets.gpu import GpuTarget

EM_CUDA, EM_AMDGPU = 190, 224
# EF_AMDGPU_MACH_AMDGCN_… of LLVM's "User Guide for AMDGPU Backend"
AMD_MACHINES = {
    "gfx90a": 0x3F, "gfx942": 0x4C, "gfx1030": 0x36, "gfx1100": 0x41,
    "gfx1151": 0x4A, "gfx1200": 0x48, "gfx1201": 0x4E,
}  # fmt: skip


def is_for(code: bytes, target: GpuTarget) -> bool:
    """Whether a cubin or code object is an ELF64 file of the target's architecture."""
    assert struct.unpack_from("<4sBB", code) == (b"\x7fELF", 2, 1)
    (machine,), (flags,) = struct.unpack_from("<H", code, 0x12), struct.unpack_from("<I", code, 0x30)
    if target.kind == "rocm":
        return (machine, flags & 0xFF) == (EM_AMDGPU, AMD_MACHINES[target.name])
    # The architecture's number lies in the lowest byte, or in the second one since CUDA 13.
    number = int(target.name.removeprefix("sm_"))
    return machine == EM_CUDA and number in (flags & 0xFF, flags >> 8 & 0xFF)


def compile_metal(text: str, folder: Path) -> None:
    """Checks complete MSL with clang, for which Metal's address spaces are its own and its library is a stub.
    An AssertionError has what it says of a source that it refuses."""
    if not os.environ.get("CI"):
        pytest.importorskip("ziglang")
    # In C++, what a block shares is not one of a function's variables.
    text = re.sub(r"^(\s*)(threadgroup [\w ]+\[)", r"\1static \2", text, flags=re.MULTILINE)
    (folder / "kernels.cpp").write_text(text)
    command = [sys.executable, "-m", "ziglang", "clang", "-std=c++17", "-fsyntax-only", "-w"]
    command += [f"-I{Path(__file__).parent}", "kernels.cpp"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
