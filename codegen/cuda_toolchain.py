"""CUDA C++ to cubins or PTX: by NVRTC, a library that needs no headers and no host compiler, or by nvcc."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zllmc.codegen.gpu_toolchain import Binary, KernelResources, prelude, run_compiler
from zllmc.targets.gpu import GpuTarget
from zllmc.zllm_ir.errors import ZllmcError

_ARCHITECTURE_OPTION, _STANDARD, _REPORT = "--gpu-architecture=", "--std=c++17", "--ptxas-options=-v"


@dataclass(frozen=True)
class Nvrtc:
    """NVIDIA's runtime compilation library, as its documentation describes its C interface."""

    path: str

    def supports(self, target: GpuTarget) -> bool:
        """Whether the library is there and knows the architecture."""
        try:
            library = ctypes.CDLL(self.path)
        except OSError:
            return False
        count = ctypes.c_int()
        library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        library.nvrtcGetSupportedArchs(numbers)
        return target.name in {f"sm_{number}" for number in numbers}

    def compile(self, source: str, target: GpuTarget, output: str) -> tuple[bytes, str]:
        """The `output`, "cubin" or "ptx", and the log."""
        library = ctypes.CDLL(self.path)
        program = ctypes.c_void_p()

        def fetch(what: str) -> bytes:
            size = ctypes.c_size_t()
            getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
            buffer = ctypes.create_string_buffer(size.value)
            getattr(library, f"nvrtcGet{what}")(program, buffer)
            return buffer.raw

        headers = (ctypes.c_char_p * 1)(prelude("cuda").encode())
        names = (ctypes.c_char_p * 1)(b"prelude.h")
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 1, headers, names)
        try:
            architecture = target.name if output == "cubin" else target.name.replace("sm_", "compute_")
            texts = [
                _ARCHITECTURE_OPTION + architecture,
                _STANDARD,
                *([_REPORT] if output == "cubin" else []),
            ]
            options = (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
            status = library.nvrtcCompileProgram(program, len(texts), options)
            log = fetch("ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                raise ValueError(f"{self.path} {' '.join(texts)}: failed ({status})\n{log}")
            return fetch(output.upper()), log
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))


@dataclass(frozen=True)
class Nvcc:
    """The compiler driver of a CUDA installation."""

    path: str

    def supports(self, target: GpuTarget) -> bool:
        """Whether it knows the architecture."""
        try:
            return target.name in run_compiler([self.path, "--list-gpu-code"], Path()).split()
        except (OSError, ValueError):  # it does not even run
            return False

    def compile(self, source: str, target: GpuTarget, output: str) -> tuple[bytes, str]:
        """The `output`, "cubin" or "ptx", and the log."""
        with tempfile.TemporaryDirectory(prefix="zllmc-") as name:
            folder = Path(name)
            (folder / "kernels.cu").write_text(source)
            (folder / "prelude.h").write_text(prelude("cuda"))
            command = [self.path, f"--{output}", _ARCHITECTURE_OPTION + target.name, _STANDARD, _REPORT]
            log = run_compiler([*command, "-o", "kernels.out", "kernels.cu"], folder)
            return (folder / "kernels.out").read_bytes(), log


def _candidates() -> Iterator[Nvrtc | Nvcc]:
    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            held = importlib.metadata.files(wheel) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        yield from (Nvrtc(str(f.locate())) for f in held if f.name.startswith("libnvrtc.so"))
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes.append("/usr/local/cuda")
    yield from (Nvrtc(f"{home}/lib64/libnvrtc.so") for home in homes)
    yield from (Nvrtc(f"libnvrtc.so.{major}") for major in (13, 12))
    nvccs = (shutil.which("nvcc", path=f"{home}/bin") for home in homes)
    yield from (Nvcc(path) for path in (*nvccs, shutil.which("nvcc")) if path)


@cache
def find_cuda_compiler(target: GpuTarget) -> Nvrtc | Nvcc:
    """The first compiler found that knows the target; without one, ZllmcError says what to install."""
    for candidate in _candidates():
        if candidate.supports(target):
            return candidate
    raise ZllmcError(
        f"compiling for {target} needs NVRTC or nvcc, of a version that knows {target.name}: none is in this "
        "Python environment, $CUDA_HOME, $CUDA_PATH, /usr/local/cuda, the library path or PATH; "
        "`pip install nvidia-cuda-nvrtc` (140 MB) is enough"
    )


def compile_cuda(source: str, target: GpuTarget, output: str = "cubin") -> Binary:
    """Compiles kernels that include "prelude.h"; `output`: "cubin" for this architecture, or "ptx".

    PTX also runs on later architectures, after the driver has compiled it. Raises ZllmcError without a
    compiler, and ValueError with the compiler's log when it refuses the source.
    """
    code, log = find_cuda_compiler(target).compile(source, target, output)
    return Binary(code, output, resources(log) if output == "cubin" else {})


def resources(log: str) -> dict[str, KernelResources]:
    """What `ptxas -v` reports of each kernel."""
    memory = {
        name: (int(stack), int(spills))
        for name, stack, spills in re.findall(
            r"Function properties for (\S+)\s[^\d]*(\d+) bytes stack frame, (\d+) bytes spill stores", log
        )
    }
    kernels = {}
    for entry in log.split("Compiling entry function ")[1:]:
        name = entry.split("'")[1]
        used = re.search(r"Used (\d+) registers(.*)", entry)
        if used is None or name not in memory:
            raise ValueError(f"no resources of {name} in the compiler's log:\n{log}")
        shared = re.search(r"(\d+) bytes smem", used[2])
        stack, spills = memory[name]
        kernels[name] = KernelResources(int(used[1]), spills, stack, int(shared[1]) if shared else 0)
    return kernels


def disassemble(code: bytes) -> str:
    """A cubin's SASS, by nvdisasm; raises ZllmcError where that is missing."""
    wheel = importlib.util.find_spec("nvidia.cu13")
    folders = [f"{folder}/bin" for folder in (wheel.submodule_search_locations if wheel else None) or ()]
    nvdisasm = shutil.which("nvdisasm", path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))
    if nvdisasm is None:
        raise ZllmcError("no nvdisasm in this Python environment or PATH: `pip install nvidia-cuda-nvdisasm`")
    with tempfile.TemporaryDirectory(prefix="zllmc-") as name:
        (Path(name) / "kernels.cubin").write_bytes(code)
        return run_compiler([nvdisasm, "--print-code", "kernels.cubin"], Path(name))
