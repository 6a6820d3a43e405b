"""The driver of Apple's GPUs, through PyObjC.

The GPU shares its buffers with the host, which waits for all work before it touches one. A pass is one
command buffer, in which a launch begins when the one before has ended. Where grids stay the same, commands
are recorded once, in an indirect command buffer. On GPUs before Apple 9, where those have been seen to crash,
and in prefill, they are encoded anew for each pass. Metal keeps what it compiled between runs by itself.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zllmc.runtime.device import DeviceBuffer, KernelError, pointers, single_launch
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.plan import EntryPoint, Launch

_FAMILY = 1000  # MTLGPUFamilyApple1 is 1001
_INDIRECT_FROM = 9


class MetalDevice:
    """An Apple GPU with `kernels`: complete Metal sources by the name of the kernel in them.

    `architecture` (`apple9`) and `subgroup` are what they were made for. `number`: which of the machine's
    GPUs. Without `graphs`, all passes are encoded launch by launch. With `blocking`, each launch is waited
    for: the error of one that fails names it.

    Raises ZllmcError where there is no Metal or no such GPU, and KernelError for sources that it refuses.
    """

    def __init__(
        self,
        kernels: Mapping[str, bytes],
        architecture: str,
        subgroup: int,
        *,
        number: int = 0,
        graphs: bool = True,
        blocking: bool = False,
    ) -> None:
        try:
            metal: Any = import_module("Metal")
            pool: Any = import_module("objc").autorelease_pool
        except ImportError as error:
            raise ZllmcError(
                "Metal kernels run on a Mac with PyObjC (`pip install pyobjc-framework-Metal`), "
                f"or on the emulated device, with --device emulate: {error}"
            ) from error
        self.metal, self._pool = metal, pool
        gpus = metal.MTLCopyAllDevices()
        if not 0 <= number < len(gpus):
            raise ZllmcError(f"there is no metal device {number}: the system finds {len(gpus)} of them.")
        self.gpu = gpus[number]
        self.name = str(self.gpu.name())
        family = int(architecture.removeprefix("apple"))
        if not self.gpu.supportsFamily_(_FAMILY + family):
            raise ZllmcError(
                f"the kernels were made for {architecture}, and {self.name} is older: "
                "compile the model again, for an older family."
            )
        self.subgroup = subgroup
        self.blocking = blocking
        self.graphs = graphs and not blocking and self.gpu.supportsFamily_(_FAMILY + _INDIRECT_FROM)
        self.queue = self.gpu.newCommandQueue()
        with ThreadPoolExecutor() as threads:
            pipelines = threads.map(self._pipeline, kernels, kernels.values())
            self.pipelines: dict[str, Any] = dict(zip(kernels, pipelines, strict=True))
        self._memory: dict[int, tuple[Any, NDArray[np.uint8]]] = {}  # buffers and their bytes, by address
        self._returned: deque[int] = deque()  # by finalizers, which may run at any time
        self._running: list[tuple[Any, str]] = []  # command buffers, and what they are
        self._lock = threading.RLock()
        self._closed = False

    def allocate(self, size: int) -> DeviceBuffer:
        with self.work():
            buffer = self.gpu.newBufferWithLength_options_(
                max(size, 16), self.metal.MTLResourceStorageModeShared
            )
            if buffer is None:
                raise ZllmcError(
                    f"{self.name} has no memory for a buffer of {size:,} bytes: it holds "
                    f"{self.gpu.currentAllocatedSize():,} bytes of at most "
                    f"{self.gpu.recommendedMaxWorkingSetSize():,}, each of at most "
                    f"{self.gpu.maxBufferLength():,}. Close other programs, or compile the model with a "
                    "smaller --context."
                )
            address = int(buffer.gpuAddress())
            content = buffer.contents().as_buffer(buffer.length())
            self._memory[address] = buffer, np.frombuffer(content, np.uint8)[:size]
        return DeviceBuffer(address, size, self._give_back)

    def load(self, path: Path) -> DeviceBuffer:
        """The bytes of a file. Raises OSError when it cannot be read."""
        with path.open("rb", buffering=0) as file:
            buffer = self.allocate(file.seek(0, 2))
            file.seek(0)
            rest = self._memory[buffer.address][1].data
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise OSError(f"{path}: became shorter while it was read")
                rest = rest[count:]
        return buffer

    def write(self, buffer: DeviceBuffer, data: NDArray[Any], offset: int = 0) -> None:
        data = np.ascontiguousarray(data)
        buffer.check(offset, data.nbytes)
        with self.work():
            self.wait()
            _, content = self._memory[buffer.address]
            content[offset : offset + data.nbytes] = data.reshape(-1).view(np.uint8)

    def read(
        self, buffer: DeviceBuffer, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> NDArray[Any]:
        return self.read_later(buffer, dtype, shape, offset)()

    def read_later(
        self, buffer: DeviceBuffer, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> Callable[[], NDArray[Any]]:
        size = np.empty(shape, dtype).nbytes
        buffer.check(offset, size)
        with self.work():
            last = self._running[-1][0] if self._running else None
            _, content = self._memory[buffer.address]

        def wait() -> NDArray[Any]:
            with self.work():
                if last is not None:
                    self.wait(last)
                return content[offset : offset + size].copy().view(dtype).reshape(shape)

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

    def record(self, entry: EntryPoint, buffers: Sequence[DeviceBuffer]) -> MetalRecording:
        """As `Device.record`. Raises KernelError for a launch that the device would refuse."""
        return MetalRecording(self, entry, buffers)

    def synchronize(self) -> None:
        with self.work():
            self.wait()

    def close(self) -> None:
        with self._lock:
            for command, _ in self._running:
                command.waitUntilCompleted()
            self._closed = True
            self._running.clear()
            self._memory.clear()
            self.pipelines.clear()

    @contextmanager
    def work(self) -> Iterator[None]:
        """One piece of work of this thread at a time. What Metal makes meanwhile is released at its end."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the device is closed")
            with self._pool():
                yield

    def memory(self, buffer: DeviceBuffer) -> Any:
        """Metal's object of a buffer."""
        return self._memory[buffer.address][0]

    @contextmanager
    def encoder(self, what: str) -> Iterator[tuple[Any, Any]]:
        """A command buffer and its encoder, which the GPU is given at the end."""
        command = self.queue.commandBuffer()
        encoder = command.computeCommandEncoder()
        try:
            yield command, encoder
        finally:
            encoder.endEncoding()
        command.commit()
        self._running.append((command, what))
        if self.blocking:
            self.wait()

    def wait(self, last: Any = None) -> None:
        """Returns when all work is done, or that up to the command buffer `last`. Raises KernelError when any
        of it failed."""
        commands = [command for command, _ in self._running]
        count = len(commands) if last is None else commands.index(last) + 1 if last in commands else 0
        running, self._running = self._running[:count], self._running[count:]
        for command, _ in running:
            command.waitUntilCompleted()
        while self._returned and not self._running:
            del self._memory[self._returned.popleft()]
        for command, what in running:
            if error := command.error():
                raise KernelError(f"{self.name}, {what}: {error.localizedDescription()}")

    def _give_back(self, address: int, size: int) -> None:
        self._returned.append(address)

    def _pipeline(self, kernel: str, source: bytes) -> Any:
        with self._pool():
            options = self.metal.MTLCompileOptions.alloc().init()
            options.setFastMathEnabled_(False)
            options.setLanguageVersion_(self.metal.MTLLanguageVersion3_0)
            library, error = self.gpu.newLibraryWithSource_options_error_(source.decode(), options, None)
            if library is None:
                raise KernelError(f"{kernel} does not compile: {error.localizedDescription()}")
            function = library.newFunctionWithName_(kernel)
            if function is None:
                raise KernelError(f"{kernel} is not in its source")
            descriptor = self.metal.MTLComputePipelineDescriptor.alloc().init()
            descriptor.setComputeFunction_(function)
            descriptor.setSupportIndirectCommandBuffers_(self.graphs)
            # With or without a reflection between them, by PyObjC's version.
            pipeline, *_, error = self.gpu.newComputePipelineStateWithDescriptor_options_reflection_error_(
                descriptor, self.metal.MTLPipelineOptionNone, None, None
            )
            if pipeline is None:
                raise KernelError(f"{kernel} cannot be used: {error.localizedDescription()}")
            if pipeline.threadExecutionWidth() != self.subgroup:
                raise ZllmcError(
                    f"the kernels were made for subgroups of {self.subgroup} lanes; "
                    f"those of {self.name} have {pipeline.threadExecutionWidth()}"
                )
            return pipeline


class MetalRecording:
    """As `Recording`. `eager`: encodes launch by launch, even where indirect command buffers can be used."""

    def __init__(self, device: MetalDevice, entry: EntryPoint, buffers: Sequence[DeviceBuffer]) -> None:
        self._device = device
        self._entry = entry
        self.eager = any(0 < launch.rows < entry.max_tokens for launch in entry.launches)
        self._pipelines = [_pipeline(device, launch) for launch in entry.launches]
        self._memory: dict[tuple[int, int | None], DeviceBuffer | None] = {}
        self._commands: Any = None  # the indirect command buffer
        self._changed = set(range(len(entry.launches)))  # commands that are not up to date
        # (buffer, slot): offsets in the buffer, and numbers of launches
        self._places: dict[tuple[int, int | None], list[tuple[int, int]]] = {}
        for number, launch in enumerate(entry.launches):
            for pointer in pointers(launch):
                self._places.setdefault((pointer.buffer, launch.slot), []).append((pointer.offset, number))
        for buffer, slot in self._places:
            self.rebind(buffer, buffers[buffer], slot)
        self._running: list[int] = []
        self.limit(None)

    def rebind(self, buffer: int, memory: DeviceBuffer | None, slot: int | None = None) -> None:
        places = self._places.get((buffer, slot), [])
        if not places:
            return
        if memory is not None:
            first, last = min(places)[0], max(places)[0]
            if first < 0 or last >= memory.size:
                raise ValueError(
                    f"{self._entry.name}: a launch points {last} bytes into buffer {buffer}, "
                    f"which has {memory.size}"
                )
            self._changed.update(number for _, number in places)
        self._memory[buffer, slot] = memory

    def limit(self, slots: int | None) -> None:
        every = self._entry.launches
        running = [i for i, it in enumerate(every) if it.slot is None or slots is None or it.slot < slots]
        self._changed.update(set(self._running).symmetric_difference(running))
        self._slots, self._running = slots, running
        self.launches = tuple(every[i] for i in running)

    def replay(self, tokens: int = 1) -> None:
        self._check_buffers()
        device, name = self._device, self._entry.name
        with device.work():
            if device.blocking:
                self._run_singly(tokens)
            elif device.graphs and not self.eager and self._update_commands():
                with device.encoder(name) as (_, encoder):
                    for memory in {id(it): it for it in self._memory.values() if it}.values():
                        usage = device.metal.MTLResourceUsageRead | device.metal.MTLResourceUsageWrite
                        encoder.useResource_usage_(device.memory(memory), usage)
                    every = device.metal.NSMakeRange(0, len(self._entry.launches))
                    encoder.executeCommandsInBuffer_withRange_(self._commands, every)
            else:
                with device.encoder(name) as (_, encoder):
                    for number in self._running:
                        self._encode(encoder, number, tokens)

    def profile(self, tokens: int = 1) -> NDArray[np.int64]:
        """Replays once, launch by launch: nanoseconds of each of `launches` by the GPU's clock."""
        self._check_buffers()
        with self._device.work():
            commands = self._run_singly(tokens)
            self._device.wait()
            times = [command.GPUEndTime() - command.GPUStartTime() for command in commands]
        return np.rint(np.array(times, np.float64) * 1e9).astype(np.int64)

    def describe(self, launch: int) -> str:
        """Names launch number `launch` of `launches` for a message."""
        return f"{self._entry.name}, launch {launch}, kernel {self.launches[launch].kernel}"

    def _check_buffers(self) -> None:
        for (buffer, slot), memory in self._memory.items():
            if memory is None and (slot is None or self._slots is None or slot < self._slots):
                raise ValueError(f"{self._entry.name}: buffer {buffer} of slot {slot} has no memory")

    def _arguments(self, launch: Launch) -> Iterator[tuple[Any, int]]:
        """Metal's buffers and offsets of a launch that runs."""
        for pointer in pointers(launch):
            if memory := self._memory[pointer.buffer, launch.slot]:
                yield self._device.memory(memory), pointer.offset

    def _sizes(self, launch: Launch, tokens: int) -> tuple[Any, Any]:
        x, y = launch.grid
        size = self._device.metal.MTLSizeMake
        return size(x, -(-tokens // launch.rows) if launch.rows else y, 1), size(launch.threads, 1, 1)

    def _encode(self, encoder: Any, number: int, tokens: int) -> None:
        launch = self._entry.launches[number]
        encoder.setComputePipelineState_(self._pipelines[number])
        for index, (buffer, offset) in enumerate(self._arguments(launch)):
            encoder.setBuffer_offset_atIndex_(buffer, offset, index)
        encoder.dispatchThreadgroups_threadsPerThreadgroup_(*self._sizes(launch, tokens))

    def _run_singly(self, tokens: int) -> list[Any]:
        """Starts the launches with a command buffer for each, and gives those."""
        commands = []
        for place, number in enumerate(self._running):
            with self._device.encoder(self.describe(place)) as (command, encoder):
                self._encode(encoder, number, tokens)
            commands.append(command)
        return commands

    def _update_commands(self) -> bool:
        """Makes the indirect command buffer, or brings it up to date. False if Metal makes none."""
        device, metal, launches = self._device, self._device.metal, self._entry.launches
        if self._commands is None:
            descriptor = metal.MTLIndirectCommandBufferDescriptor.alloc().init()
            descriptor.setCommandTypes_(metal.MTLIndirectCommandTypeConcurrentDispatch)
            descriptor.setInheritBuffers_(False)
            descriptor.setInheritPipelineState_(False)
            descriptor.setMaxKernelBufferBindCount_(max(len(launch.args) for launch in launches))
            self._commands = device.gpu.newIndirectCommandBufferWithDescriptor_maxCommandCount_options_(
                descriptor, len(launches), metal.MTLResourceStorageModeShared
            )
            if self._commands is None:
                device.graphs = False
                warnings.warn(
                    f"{device.name} replays launch by launch, which is slower: it makes no indirect command "
                    f"buffer for {len(launches)} launches",
                    RuntimeWarning,
                    stacklevel=3,
                )
                return False
        if self._changed:
            device.wait()
        for number in self._changed:
            command, launch = self._commands.indirectComputeCommandAtIndex_(number), launches[number]
            command.reset()
            if number in self._running:
                command.setComputePipelineState_(self._pipelines[number])
                for index, (buffer, offset) in enumerate(self._arguments(launch)):
                    command.setKernelBuffer_offset_atIndex_(buffer, offset, index)
                sizes = self._sizes(launch, self._entry.max_tokens)
                command.concurrentDispatchThreadgroups_threadsPerThreadgroup_(*sizes)
                command.setBarrier()  # for those before; without, commands run side by side
        self._changed.clear()
        return True


def _pipeline(device: MetalDevice, launch: Launch) -> Any:
    """The pipeline of a launch. Raises KernelError when the device would refuse the launch."""
    pipeline = device.pipelines.get(launch.kernel)
    if pipeline is None:
        raise KernelError(f"there is no kernel {launch.kernel}")
    if not 0 < launch.threads <= pipeline.maxTotalThreadsPerThreadgroup():
        raise KernelError(
            f"{launch.kernel}: {launch.threads} threads in a block; it can have up to "
            f"{pipeline.maxTotalThreadsPerThreadgroup()}"
        )
    return pipeline
