"""The emulated GPU: runs kernels in CUDA, HIP or Metal source on the CPU, and finds their mistakes.

The host's C++ compiler compiles the kernels, with `simt/prelude.h` in place of the dialect's own, and
`simt/executor.cpp` runs them: a GPU thread is a fiber, a block is one thread of the system. The driver has
the interface of `device.py`, and plays by a GPU's rules. Memory is poisoned when a kernel begins to use it
(0xFF: NaNs), blocks come in any order, and these end a launch with a KernelError that says where it was:

* an access outside a buffer or an array, or one that is not aligned; a shift by 32 or more
* threads that do not all come to the same barrier, or lanes to the same subgroup operation
* more threads or shared memory than the kernel was declared with, or the dialect allows

Threads run one after another from barrier to barrier, in order or in reverse. Where a barrier is missing, a
thread reads what another has not written yet in one of the two: a kernel is right if it is in both. What a
device's memory model allows between the lanes of a subgroup is not emulated.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zllmc.runtime.device import DeviceBuffer, KernelError, load_file, pointers, single_launch
from zllmc.runtime.host_compiler import CompileError, compile_library
from zllmc.runtime.processors import physical_cores
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.host import host_architecture, host_flags
from zllmc.zllm_ir.matrix_unit import Fragment, MatrixInstruction
from zllmc.zllm_ir.plan import EntryPoint, Launch, Pointer

Dialect = Literal["cuda", "hip", "metal"]

_SIMT = Path(__file__).with_name("simt")
_MAX_THREADS = 1024  # of a block
_GUARD = 64 << 20  # bytes around a buffer that are not accessible
# Bytes of shared arrays that a kernel may declare: CUDA Programming Guide, "Compute Capabilities"; AMD's ISA
# documents, "LDS"; Metal Feature Set Tables, "Maximum total threadgroup memory allocation".
_SHARED_MEMORY: dict[Dialect, int] = {"cuda": 48 << 10, "hip": 64 << 10, "metal": 32 << 10}

# What devices do not fuse the host must not; prelude.h has the functions that a failed check calls.
_FLAGS = [f"-I{_SIMT}", "-fsigned-char", "-ffp-contract=off", "-fstack-clash-protection"]
_FLAGS += ["-mfma"] if host_architecture() == "x86_64" and "fma" in host_flags() else []
_FLAGS += ["-fsanitize=alignment,bounds,shift-exponent", "-fno-sanitize-recover=all"]

# The structures of executor.cpp.
_LAUNCH = np.dtype(
    [
        ("kernel", np.int64),
        ("arguments", np.int64),
        ("grid_x", np.uint32),
        ("grid_y", np.uint32),
        ("rows", np.uint32),
        ("threads", np.uint32),
    ]
)
_OPTIONS = np.dtype([(name, np.uint32) for name in ("subgroup", "workers", "reverse", "shared_bytes")])
_FAILURE = np.dtype(
    [
        ("launch", np.uint32),
        ("x", np.uint32),
        ("y", np.uint32),
        ("thread", np.uint32),
        ("address", np.uint64),
        ("text", "S232"),
    ]
)

_KERNEL = (
    r"(?:__global__\s+void\s+(?:__launch_bounds__\((?P<bound>\d+)[^)]*\)\s*)?|\bkernel\s+void\s+)"
    r"(?P<kernel>\w+)\s*\((?P<parameters>[^{;]*)\)\s*\{"
)
_SHARED = (
    r"\b(?:__shared__|threadgroup)\s+(?:(?:alignas|__align__)\((?P<alignment>\d+)\)\s*)?"
    r"(?P<type>[a-z][\w ]*?)\s+(?P<array>\w+)\s*(?P<extents>(?:\[[^\]]+\])+)\s*;"
)


@dataclass(frozen=True)
class _Kernel:
    pointers: int
    max_threads: int


class EmulatedDevice:
    """A GPU with the kernels of `sources` (texts by file name), in waves of `subgroup` lanes.

    `threads`: of the system, by default one for each physical core. `reverse`: thread, subgroup and block
    order. `left`: buffers lie against the inaccessible memory before them instead of that after them.
    `matrix`: its matrix instructions, which a kernel calls `matrix_s8`, `matrix_f16` and so on. Without
    `optimize`, sources are compiled in a quarter of the time to kernels that take several times as long. They
    are kept in the folder `cache`. Raises ZllmcError without a C++ compiler, and KernelError for sources that
    it refuses.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        dialect: Dialect,
        subgroup: int,
        *,
        threads: int | None = None,
        reverse: bool = False,
        left: bool = False,
        matrix: Sequence[MatrixInstruction] = (),
        optimize: bool = True,
        cache: Path | None = None,
    ) -> None:
        if subgroup not in (32, 64):
            raise ValueError(f"subgroups of {subgroup} lanes; there are those of 32 and 64")
        self.subgroup = subgroup
        self._left = left
        self._executor = _executor(cache)
        texts, self._kernels = _translation_units(sources, dialect)
        instructions = "".join(_matrix_instruction(it, subgroup) for it in matrix)
        texts = [text.replace("\n", f"\n{instructions}", 1) if "matrix_" in text else text for text in texts]
        flags = [
            *_FLAGS,
            "-O1" if optimize else "-O0",
            f"-DSUBGROUP={subgroup}",
            f"-DZLLMC_{dialect.upper()}",
        ]
        headers = [_SIMT / "executor.h", _SIMT / "prelude.h"]
        try:
            self._library = ctypes.CDLL(str(compile_library(texts, flags, headers, cache)))
        except CompileError as error:
            raise KernelError(f"the {dialect} sources do not compile: {error}") from error
        self._options = np.zeros(1, _OPTIONS)
        self._options[0] = (subgroup, threads or physical_cores(), reverse, _SHARED_MEMORY[dialect])
        self._lock = threading.Lock()  # one pass at a time
        self._closed = False

    def allocate(self, size: int) -> DeviceBuffer:
        address = self._executor.simt_allocate(size, self._left)
        if not address:
            raise ZllmcError(f"there is no memory for a buffer of {size:,} bytes")
        return DeviceBuffer(address, size, self._executor.simt_free)

    def load(self, path: Path) -> DeviceBuffer:
        return load_file(self, path)

    def write(self, buffer: DeviceBuffer, data: NDArray[Any], offset: int = 0) -> None:
        data = np.ascontiguousarray(data)
        buffer.check(offset, data.nbytes)
        ctypes.memmove(buffer.address + offset, data.ctypes.data, data.nbytes)

    def read(
        self, buffer: DeviceBuffer, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> NDArray[Any]:
        data = np.empty(shape, dtype)
        buffer.check(offset, data.nbytes)
        ctypes.memmove(data.ctypes.data, buffer.address + offset, data.nbytes)
        return data

    def read_later(
        self, buffer: DeviceBuffer, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> Callable[[], NDArray[Any]]:
        data = self.read(buffer, dtype, shape, offset)
        return lambda: data

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[tuple[DeviceBuffer, int]],
    ) -> None:
        self.record(*single_launch(kernel, grid, threads, arguments)).replay()

    def record(self, entry: EntryPoint, buffers: Sequence[DeviceBuffer]) -> EmulatedRecording:
        """As `Device.record`. Raises KernelError for a launch that the kernel was not declared for."""
        return EmulatedRecording(self, entry, buffers)

    def synchronize(self) -> None:
        """Every replay is done when it returns."""

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _kernel(self, launch: Launch) -> int:
        """The address of a launch's kernel. Raises KernelError when the device would refuse the launch."""
        kernel = self._kernels.get(launch.kernel)
        if kernel is None:
            raise KernelError(f"there is no kernel {launch.kernel}")
        if len(launch.args) != kernel.pointers:
            raise KernelError(f"{launch.kernel} takes {kernel.pointers} pointers, not {len(launch.args)}")
        if launch.threads % self.subgroup or not 0 < launch.threads <= kernel.max_threads:
            raise KernelError(
                f"{launch.kernel}: {launch.threads} threads in a block; it can have a multiple of "
                f"{self.subgroup}, up to {kernel.max_threads}"
            )
        return ctypes.cast(self._library[f"simt_entry_{launch.kernel}"], ctypes.c_void_p).value or 0

    def _run(self, table: NDArray[Any], tokens: int, failure: NDArray[Any]) -> bool:
        with self._lock:
            if self._closed:
                raise RuntimeError("the device is closed")
            done: int = self._executor.simt_run(
                table.ctypes.data, len(table), tokens, self._options.ctypes.data, failure.ctypes.data
            )
            return done == 0


class EmulatedRecording:
    """As `Recording`. Its launches are a table that the executor runs in one call."""

    def __init__(self, device: EmulatedDevice, entry: EntryPoint, buffers: Sequence[DeviceBuffer]) -> None:
        self._device = device
        self._entry = entry
        self._buffers: dict[tuple[int, int | None], DeviceBuffer] = {}
        self._arguments: NDArray[np.int64] = np.zeros(sum(len(it.args) for it in entry.launches), np.int64)
        self._table: NDArray[Any] = np.zeros(len(entry.launches), _LAUNCH)
        # (buffer, slot): (index among the arguments, offset in the buffer)
        places: dict[tuple[int, int | None], list[tuple[int, int]]] = {}
        first = 0
        for number, launch in enumerate(entry.launches):
            start = self._arguments.ctypes.data + 8 * first
            self._table[number] = (device._kernel(launch), start, *launch.grid, launch.rows, launch.threads)
            for index, pointer in enumerate(pointers(launch), first):
                places.setdefault((pointer.buffer, launch.slot), []).append((index, pointer.offset))
            first += len(launch.args)
        self._places = {key: np.array(found, np.int64).T for key, found in places.items()}
        for buffer, slot in self._places:
            self.rebind(buffer, buffers[buffer], slot)
        self._limited: dict[int | None, tuple[tuple[Launch, ...], NDArray[Any]]] = {}
        self.limit(None)

    def rebind(self, buffer: int, memory: DeviceBuffer | None, slot: int | None = None) -> None:
        if (buffer, slot) not in self._places:
            return
        indices, offsets = self._places[buffer, slot]
        if memory is None:
            self._arguments[indices] = 0
            self._buffers.pop((buffer, slot), None)
            return
        if offsets.min() < 0 or offsets.max() >= memory.size:
            raise ValueError(
                f"{self._entry.name}: a launch points {offsets.max()} bytes into buffer {buffer}, "
                f"which has {memory.size}"
            )
        self._arguments[indices] = memory.address + offsets
        self._buffers[buffer, slot] = memory

    def limit(self, slots: int | None) -> None:
        if slots not in self._limited:
            every = self._entry.launches
            kept = [i for i, it in enumerate(every) if slots is None or it.slot is None or it.slot < slots]
            self._limited[slots] = tuple(every[i] for i in kept), self._table[kept]
        self.launches, self._running = self._limited[slots]

    def replay(self, tokens: int = 1) -> None:
        failure: NDArray[Any] = np.zeros(1, _FAILURE)
        if self._device._run(self._running, tokens, failure):
            return
        number, x, y, thread, address, text = failure[0].item()
        what = text.decode()
        if address:
            what = f"{what} {self._place(address, self.launches[number])}"
        raise KernelError(f"{self.describe(number)}, block ({x}, {y}), thread {thread}: {what}")

    def describe(self, launch: int) -> str:
        """Names launch number `launch` for a message."""
        return f"{self._entry.name}, launch {launch}, kernel {self.launches[launch].kernel}"

    def _place(self, address: int, launch: Launch) -> str:
        """Where an address lies that no access may go to, as seen from the nearest buffer of the launch."""

        def seen_from(argument: int, pointer: Pointer) -> tuple[int, str]:
            memory = self._buffers.get((pointer.buffer, launch.slot))
            if memory is None:
                return _GUARD, ""
            byte = address - memory.address
            text = f"at byte {byte} of buffer {pointer.buffer} (argument {argument}), "
            return max(-byte, byte - memory.size), f"{text}which has {memory.size} bytes"

        distance, text = min(
            (seen_from(number, pointer) for number, pointer in enumerate(pointers(launch))),
            default=(_GUARD, ""),
        )
        return text if distance < _GUARD else f"address {address:#x}, which is in no buffer"


_loading = threading.Lock()
_loaded: list[ctypes.CDLL] = []  # one executor, which handles the process's signals


def _executor(cache: Path | None) -> ctypes.CDLL:
    """The library that runs kernels. Its symbols are global, for theirs."""
    with _loading:
        if not _loaded:
            _loaded.append(_load_executor(cache))
        return _loaded[0]


def _load_executor(cache: Path | None) -> ctypes.CDLL:
    source = (_SIMT / "executor.cpp").read_text()
    headers = [_SIMT / name for name in ("executor.h", "fibers.h", "block.h")]
    path = compile_library([source], [f"-I{_SIMT}", "-O2"], headers, cache)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.simt_allocate.argtypes = [ctypes.c_size_t, ctypes.c_int]
    library.simt_allocate.restype = ctypes.c_void_p
    library.simt_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    library.simt_run.argtypes = [pointer, number, number, pointer, pointer]
    return library


def _translation_units(sources: Mapping[str, str], dialect: Dialect) -> tuple[list[str], dict[str, _Kernel]]:
    """The sources as C++, with their lines kept, and their kernels.

    Each kernel gets an entry `simt_entry_NAME` that takes an array of pointers.
    """
    position = ["simt_thread().x", "simt_block()"] if dialect == "metal" else []
    kernels: dict[str, _Kernel] = {}
    texts = []
    for file, text in sources.items():
        if dialect == "metal":  # the address space of variables
            text = re.sub(r"\bthread (?=[a-z ]+\*)", "", text)
        parts = ['#include "prelude.h"', "namespace {", f'#line 1 "{file}"', _with_shared_arrays(text), "}"]
        for match in re.finditer(_KERNEL, text):
            name, pointers = match["kernel"], match["parameters"].count("*")
            if name in kernels:
                raise KernelError(f"{file}: there are two kernels {name}")
            kernels[name] = _Kernel(pointers, int(match["bound"] or _MAX_THREADS))
            arguments = ", ".join([f"SimtPointer{{a[{i}]}}" for i in range(pointers)] + position)
            parts.append(f'extern "C" void simt_entry_{name}(void* const* a) {{ {name}({arguments}); }}')
        texts.append("\n".join(parts) + "\n")
    return texts, kernels


def _with_shared_arrays(text: str) -> str:
    """Makes a kernel's shared arrays references to what the executor gives out by number."""
    numbers = itertools.count()

    def rewrite(match: re.Match[str]) -> str:
        nonlocal numbers
        if match["kernel"]:
            numbers = itertools.count()
            return match[0]
        element, extents = match["type"], match["extents"]
        alignment = match["alignment"] or f"alignof({element})"
        memory = f"simt_shared({next(numbers)}, sizeof({element}{extents}), {alignment})"
        return f"{element} (&{match['array']}){extents} = *({element} (*){extents}){memory};"

    return re.sub(f"{_KERNEL}|{_SHARED}", rewrite, text)


def _matrix_instruction(it: MatrixInstruction, subgroup: int) -> str:
    """The C++ of a matrix instruction: where its elements lie, as tables."""

    def table(fragment: Fragment) -> str:
        elements = range(fragment.elements)
        lanes = [[fragment.position(lane, element) for element in elements] for lane in range(subgroup)]
        return str(lanes).translate(str.maketrans("[]()", "{}{}"))

    places = f"simt_places_{it.inputs}"
    sizes = it.m, it.n, it.k, it.a.elements, it.b.elements, it.c.elements
    input, sum = f"Simt{it.inputs.upper()}", "int" if it.accumulator == "s32" else "float"
    return (
        f"static constexpr SimtMatrix<{', '.join(map(str, sizes))}> {places} = "
        f"{{{table(it.a)}, {table(it.b)}, {table(it.c)}}};\n"
        f"SIMT_MATRIX(matrix_{it.inputs}, {input}, {sum}, {places})\n"
    )
