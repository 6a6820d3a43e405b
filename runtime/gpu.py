"""The driver of NVIDIA's and AMD's GPUs.

All work goes to one stream, so that it is done in order. Memory that nothing refers to any more is lent again
for the next work of the stream, which begins after all that used it, and goes back to the system only when
there is no other. The host's data passes through pinned staging memory. A recording becomes a graph when it
is first replayed. What changes between replays is patched into its nodes; positions and lengths are in the
device's memory.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zllmc.runtime.device import DeviceBuffer, KernelError, single_launch
from zllmc.runtime.driver_api import NO_DEVICE, NON_BLOCKING, OUT_OF_MEMORY, Driver, DriverError, Vendor
from zllmc.runtime.gpu_graph import Graph
from zllmc.runtime.gpu_memory import SLOT, DeviceMemory, LateCopies, Staging, attempt
from zllmc.runtime.gpu_recording import GpuRecording
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.gpu_binary import parameters
from zllmc.zllm_ir.plan import EntryPoint


class GpuDevice:
    """A GPU with `kernels`: cubins or code objects by the name of the kernel in them.

    `architecture` (`sm_90`, `gfx1100`) and `subgroup` are what they were compiled for. `number`: which of the
    vendor's GPUs. Without `graphs`, recordings launch kernel by kernel. With `blocking`, so do they, and wait
    for each kernel: the error of one that fails names it. `library`: the driver's, if not where it belongs.

    Raises ZllmcError where there is no driver or no such GPU, or where the GPU does not run the kernels.
    """

    def __init__(
        self,
        vendor: Vendor,
        kernels: Mapping[str, bytes],
        architecture: str,
        subgroup: int,
        *,
        number: int = 0,
        graphs: bool = True,
        blocking: bool = False,
        library: str | None = None,
    ) -> None:
        self.graphs = graphs and not blocking
        self.blocking = blocking
        self._driver = Driver(vendor, library)
        self._kernels = kernels  # the driver may go on reading them
        self._lock = threading.RLock()
        self._begun = "nothing"  # the latest work
        # Given by finalizers, which may run at any time and so call no driver.
        self._retired: deque[Graph] = deque()
        self._graphs: set[Graph] = set()
        with ExitStack() as closing:
            try:
                self._open(closing, number, architecture, subgroup)
            except DriverError as error:
                raise ZllmcError(f"the {vendor.kind} driver cannot be used: {error}") from error
            self._closing = closing.pop_all()
        # Ends what is left when the device is collected; must not refer to it.
        self._end = weakref.finalize(self, _end, self._driver, self._selected, self._closing)

    def _open(self, closing: ExitStack, number: int, architecture: str, subgroup: int) -> None:
        driver, vendor = self._driver, self._driver.vendor
        try:
            driver.init(0)
            count = driver.number(driver.device_count)
        except DriverError as error:
            if error.code != NO_DEVICE:
                raise
            count = 0
        if not 0 <= number < count:
            raise ZllmcError(f"there is no {vendor.kind} device {number}: the driver finds {count} of them.")
        device = driver.number(driver.device, number)
        name = ctypes.create_string_buffer(256)
        driver.device_name(name, len(name), device)
        self.architecture = vendor.architecture(driver, device)
        self.subgroup = driver.number(driver.attribute, vendor.subgroup, device)
        self.name = f"{name.value.decode(errors='replace')} ({self.architecture})"
        if not vendor.runs(self.architecture, architecture):
            raise ZllmcError(
                f"the kernels were compiled for {architecture}, and {self.name} does not run them: "
                f"compile the model again, on this machine with --target {vendor.kind}."
            )
        if self.subgroup != subgroup:
            raise ZllmcError(
                f"the kernels were compiled for subgroups of {subgroup} lanes; "
                f"those of {self.name} have {self.subgroup}"
            )
        self._selected = number
        if vendor.kind == "cuda":
            retain = driver.bind("cuDevicePrimaryCtxRetain", ctypes.c_void_p, ctypes.c_int)
            self._selected = driver.made(retain, device)
            release = driver.bind("cuDevicePrimaryCtxRelease_v2", ctypes.c_int)
            closing.callback(attempt, release, device)
        driver.select(self._selected)
        self._functions: dict[str, int] = {}
        self._parameters: dict[str, int] = {}  # of the kernels whose binary says how many
        for kernel, binary in self._kernels.items():
            try:
                module = driver.made(driver.module, binary)
                closing.callback(attempt, driver.unload_module, module)
                self._functions[kernel] = driver.made(driver.function, module, kernel.encode())
            except DriverError as error:
                raise ZllmcError(f"{self.name} cannot load kernel {kernel}: {error}") from error
            self._parameters |= parameters(binary)
        self._stream = driver.made(driver.stream, NON_BLOCKING)
        closing.callback(attempt, driver.destroy_stream, self._stream)
        self._memory = DeviceMemory(driver, self._stream)
        closing.callback(self._memory.close)
        self._staging = Staging(driver, self._stream, closing)
        self._late = LateCopies(driver, self._stream, closing)
        closing.callback(_destroy, self._graphs)
        # Everything above is in use until the stream has come to its end.
        closing.callback(attempt, driver.synchronize, self._stream)

    def allocate(self, size: int) -> DeviceBuffer:
        with self._work(f"a buffer of {size:,} bytes") as driver:
            self._destroy_retired()
            try:
                address = self._memory.allocate(size)
            except DriverError as error:
                if error.code != OUT_OF_MEMORY:
                    raise
                free, total = driver.memory()
                raise ZllmcError(
                    f"{self.name} has no memory for a buffer of {size:,} bytes: of {total:,} bytes {free:,} "
                    "are free. Close other programs that use it, or compile the model with a smaller "
                    "--context."
                ) from error
        return DeviceBuffer(address, size, self._memory.give_back)

    def load(self, path: Path) -> DeviceBuffer:
        """The bytes of a file. Raises OSError when it cannot be read."""
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, 2)
            file.seek(0)
            buffer = self.allocate(size)
            with self._work(f"a copy of {size:,} bytes to the device") as driver:
                offset = 0
                while offset < size:
                    staged = self._staging.take(min(SLOT, size - offset))
                    memory = (ctypes.c_char * min(SLOT, size - offset)).from_address(staged)
                    count = file.readinto(memory)
                    if not count:
                        raise OSError(f"{path}: became shorter while it was read")
                    driver.write(buffer.address + offset, staged, count, self._stream)
                    offset += count
        return buffer

    def write(self, buffer: DeviceBuffer, data: NDArray[Any], offset: int = 0) -> None:
        data = np.ascontiguousarray(data)
        buffer.check(offset, data.nbytes)
        with self._work(f"a copy of {data.nbytes:,} bytes to the device") as driver:
            for start in range(0, data.nbytes, SLOT):
                size = min(SLOT, data.nbytes - start)
                staged = self._staging.take(size)
                ctypes.memmove(staged, data.ctypes.data + start, size)
                driver.write(buffer.address + offset + start, staged, size, self._stream)

    def read(
        self, buffer: DeviceBuffer, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> NDArray[Any]:
        data = np.empty(shape, dtype)
        buffer.check(offset, data.nbytes)
        with self._work(f"a copy of {data.nbytes:,} bytes from the device") as driver:
            for start in range(0, data.nbytes, SLOT):
                size = min(SLOT, data.nbytes - start)
                staged = self._staging.take(size)
                driver.read(staged, buffer.address + offset + start, size, self._stream)
                driver.synchronize(self._stream)
                ctypes.memmove(data.ctypes.data + start, staged, size)
        return data

    def read_later(
        self, buffer: DeviceBuffer, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> Callable[[], NDArray[Any]]:
        data = np.empty(shape, dtype)
        buffer.check(offset, data.nbytes)
        what = f"a copy of {data.nbytes:,} bytes from the device"
        with self._work(what):
            finish = self._late.start(buffer.address + offset, data)

        def wait() -> NDArray[Any]:
            with self._work(what):
                finish()
            return data

        return wait

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[tuple[DeviceBuffer, int]],
    ) -> None:
        recording = self.record(*single_launch(kernel, grid, threads, arguments))
        recording.eager = True
        recording.replay()

    def record(self, entry: EntryPoint, buffers: Sequence[DeviceBuffer]) -> GpuRecording:
        """As `Device.record`. Raises KernelError for a kernel that is not there or takes other pointers."""
        return GpuRecording(self, entry, buffers)

    def synchronize(self) -> None:
        with self._work("waiting for the device") as driver:
            driver.synchronize(self._stream)

    def close(self) -> None:
        """Waits for all work, and frees everything, buffers that are still referred to included."""
        with self._lock:
            self._end()

    @contextmanager
    def _work(self, what: str) -> Iterator[Driver]:
        """The driver, for one piece of work of this thread. Its errors become KernelErrors."""
        with self._lock:
            if not self._end.alive:
                raise RuntimeError("the device is closed")
            try:
                self._driver.select(self._selected)
                yield self._driver
            except DriverError as error:
                hint = "" if self.blocking else "; with blocking=True, the error names the kernel that fails"
                text = f"{self.name}, {what}: {error}, after {self._begun} was begun{hint}"
                raise KernelError(text) from error

    def _destroy_retired(self) -> None:
        while self._retired:
            graph = self._retired.popleft()
            self._graphs.remove(graph)
            graph.destroy()

    def _keep(self, graph: Graph, recording: GpuRecording) -> None:
        """Keeps a graph until its recording is gone."""
        self._destroy_retired()
        self._graphs.add(graph)
        weakref.finalize(recording, self._retired.append, graph).atexit = False

    def _give_up_graphs(self, error: DriverError) -> None:
        """From now on there are none. The first time, says why."""
        if self.graphs:
            self.graphs = False
            warnings.warn(
                f"{self.name} replays without graphs, which is slower: {error}", RuntimeWarning, stacklevel=4
            )


def _destroy(graphs: set[Graph]) -> None:
    for graph in graphs:
        graph.destroy()


def _end(driver: Driver, selected: int, closing: ExitStack) -> None:
    attempt(driver.select, selected)
    closing.close()
