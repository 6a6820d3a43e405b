"""A stand-in for PyObjC's modules Metal and objc: what the driver uses of them, over memory of the host.

It raises AssertionError at misuse. Work is done when it is waited for; that of a command which was recorded
indirectly and without a barrier, before that of the command before it.
"""

import contextlib
import itertools
import threading
from types import SimpleNamespace

import numpy as np

ADDRESSES = itertools.count(1 << 32, 1 << 20)


def accumulate(arguments, grid, threads):
    x, y = (it.view(np.float32) for it in arguments)
    y[:threads] = y[:threads] * 2 + x[:threads]


def copy(arguments, grid, threads):
    control, x, y = (it.view(np.float32) for it in arguments)
    count = min(64 * control.view(np.int32)[0], grid[1] * threads)
    y[:count] = x[:count]


def fail(arguments, grid, threads):
    raise MemoryError


KERNELS = {"accumulate": accumulate, "copy": copy, "fail": fail}


class Text(SimpleNamespace):
    def localizedDescription(self):
        return self.text


class Settings:
    """An object of setters that take one value."""

    @classmethod
    def alloc(cls):
        return cls()

    def init(self):
        return self

    def __getattr__(self, name):
        assert name.startswith("set") and name.endswith("_"), name
        return lambda value: self.__dict__.update({name[3:-1]: value})


class Buffer:
    def __init__(self, size):
        self.data = np.full(size, 0xFF, np.uint8)
        self.address = next(ADDRESSES)
        self.length = lambda: size
        self.gpuAddress = lambda: self.address
        self.contents = lambda: SimpleNamespace(as_buffer=lambda count: memoryview(self.data)[:count])


class Arguments:
    """What a launch is given, by an encoder or an indirect command."""

    def __init__(self):
        self.pipeline, self.buffers, self.sizes, self.barrier = None, {}, None, False

    def setComputePipelineState_(self, pipeline):
        self.pipeline = pipeline

    def run(self):
        count = self.pipeline.source.count("[[buffer(")
        given = [self.buffers[i] for i in range(count)]
        self.pipeline.run([buffer.data[offset:] for buffer, offset in given], *self.sizes)


class IndirectCommand(Arguments):
    def __init__(self, descriptor):
        super().__init__()
        self.descriptor = descriptor

    def reset(self):
        self.__init__(self.descriptor)

    def setKernelBuffer_offset_atIndex_(self, buffer, offset, index):
        assert isinstance(buffer, Buffer) and index < self.descriptor.MaxKernelBufferBindCount
        self.buffers[index] = buffer, offset

    def concurrentDispatchThreadgroups_threadsPerThreadgroup_(self, groups, threads):
        assert self.pipeline.indirect
        self.sizes = groups[:2], threads[0]

    def setBarrier(self):
        self.barrier = True


class Encoder(Arguments):
    def __init__(self, command):
        super().__init__()
        self.command, self.used, self.ended = command, [], False

    def setBuffer_offset_atIndex_(self, buffer, offset, index):
        assert isinstance(buffer, Buffer) and not self.ended
        self.buffers[index] = buffer, offset

    def dispatchThreadgroups_threadsPerThreadgroup_(self, groups, threads):
        launch = Arguments()
        launch.pipeline, launch.buffers, launch.sizes = (
            self.pipeline,
            dict(self.buffers),
            (groups[:2], threads[0]),
        )
        self.command.work.append(launch.run)

    def useResource_usage_(self, buffer, usage):
        assert isinstance(buffer, Buffer) and usage == 3
        self.used.append(buffer)

    def executeCommandsInBuffer_withRange_(self, commands, places):
        self.command.work.append(lambda: self._execute(commands[slice(*places)]))

    def _execute(self, commands):
        ready = []
        for command in commands:
            if command.sizes is None:
                continue
            for buffer, _ in command.buffers.values():
                assert buffer in self.used, "a buffer is not resident"
            if command.barrier:
                while ready:
                    ready.pop().run()
            ready.append(command)
        while ready:
            ready.pop().run()

    def endEncoding(self):
        assert not self.ended
        self.ended = True


class CommandBuffer:
    def __init__(self, gpu):
        self.gpu, self.work, self.committed, self.failure, self.time = gpu, [], False, None, 0

    def computeCommandEncoder(self):
        self.encoder = Encoder(self)
        return self.encoder

    def commit(self):
        assert self.encoder.ended and not self.committed
        self.committed = True
        self.gpu.committed.append(self)

    def waitUntilCompleted(self):
        assert self.committed
        while self in self.gpu.committed:
            self.gpu.committed.pop(0)._run()

    def _run(self):
        self.time = len(self.work)
        try:
            for work in self.work:
                work()
        except MemoryError:
            self.failure = Text(text="page fault")

    def error(self):
        return self.failure

    def GPUStartTime(self):
        return 100.0

    def GPUEndTime(self):
        return 100.0 + 1e-3 * self.time


class Gpu:
    def __init__(self, family=9, memory=1 << 20, indirect=True, kernel=KERNELS.__getitem__):
        self.kernel = kernel  # gives the function of a name
        self.family, self.memory, self.indirect = family, memory, indirect
        self.committed, self.buffers, self.executed = [], [], 0
        self.name = lambda: "Double"
        self.newCommandQueue = lambda: SimpleNamespace(commandBuffer=self._command_buffer)
        self.maxBufferLength = self.recommendedMaxWorkingSetSize = lambda: memory
        self.currentAllocatedSize = lambda: 0
        self.pool = threading.local()

    def supportsFamily_(self, family):
        return family - 1000 <= self.family

    def _command_buffer(self):
        assert self.pool.depth, "nothing releases it"
        return CommandBuffer(self)

    def newBufferWithLength_options_(self, size, options):
        assert size and options == 0
        return Buffer(size) if size <= self.memory else None

    def newLibraryWithSource_options_error_(self, source, options, error):
        assert options.FastMathEnabled is False and options.LanguageVersion == 3 << 16 and error is None
        if '#include "prelude.h"' in source:
            return None, Text(text="prelude.h not found")
        return SimpleNamespace(
            newFunctionWithName_=lambda name: (name, source) if name in source else None
        ), None

    def newComputePipelineStateWithDescriptor_options_reflection_error_(self, descriptor, options, *out):
        assert options == 0 and out == (None, None)
        kernel, source = descriptor.ComputeFunction
        pipeline = SimpleNamespace(
            kernel=kernel, source=source, indirect=descriptor.SupportIndirectCommandBuffers
        )
        pipeline.run = self.kernel(kernel)
        pipeline.maxTotalThreadsPerThreadgroup = lambda: 512
        pipeline.threadExecutionWidth = lambda: 32
        return pipeline, None

    def newIndirectCommandBufferWithDescriptor_maxCommandCount_options_(self, descriptor, count, options):
        assert descriptor.CommandTypes == 32 and options == 0
        assert not descriptor.InheritBuffers and not descriptor.InheritPipelineState
        if not self.indirect:
            return None
        commands = Commands(IndirectCommand(descriptor) for _ in range(count))
        commands.gpu = self
        return commands


class Commands(list):
    def indirectComputeCommandAtIndex_(self, index):
        assert not self.gpu.committed, "work is in flight"
        return self[index]


def modules(*gpus):
    """Metal and objc, for a machine with these GPUs."""

    @contextlib.contextmanager
    def autorelease_pool():
        for gpu in gpus:
            gpu.pool.depth = getattr(gpu.pool, "depth", 0) + 1
        yield
        for gpu in gpus:
            gpu.pool.depth -= 1

    metal = SimpleNamespace(
        MTLCopyAllDevices=lambda: list(gpus),
        MTLCompileOptions=type("Options", (Settings,), {}),
        MTLComputePipelineDescriptor=type("Pipeline", (Settings,), {}),
        MTLIndirectCommandBufferDescriptor=type("Indirect", (Settings,), {}),
        MTLSizeMake=lambda *sizes: sizes,
        NSMakeRange=lambda first, count: (first, first + count),
        MTLResourceStorageModeShared=0,
        MTLPipelineOptionNone=0,
        MTLLanguageVersion3_0=3 << 16,
        MTLIndirectCommandTypeConcurrentDispatch=32,
        MTLResourceUsageRead=1,
        MTLResourceUsageWrite=2,
    )
    return {"Metal": metal, "objc": SimpleNamespace(autorelease_pool=autorelease_pool)}
