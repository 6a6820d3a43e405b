"""What the drivers of GPUs have in common: CUDA, HIP, Metal, and the emulated device.

A driver has memory of its own, which the host reaches by copies only, and replays recordings of launches with
nothing from Python between two of them. Work is done in the order in which it is given: a copy or a replay
sees the results of everything before it. An error may show up in any later call, at the latest in
`synchronize`. What work in flight uses stays alive until that work is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zllmc.zllm_ir.plan import EntryPoint, Launch, Pointer

_PIECE = 64 << 20  # bytes of a file that are read at a time
READ_LATER = 1024  # bytes


class KernelError(Exception):
    """A kernel refused its arguments or failed: an error of the compiler, not of the user."""


class DeviceBuffer:
    """`size` bytes of a device's memory, given back when nothing refers to this object any more."""

    def __init__(self, address: int, size: int, free: Callable[[int, int], object]) -> None:
        self.address = address
        self.size = size
        weakref.finalize(self, free, address, size).atexit = False

    def check(self, offset: int, size: int) -> None:
        """Raises ValueError unless bytes offset to offset + size lie in the buffer."""
        if not 0 <= offset <= offset + size <= self.size:
            raise ValueError(f"bytes {offset} to {offset + size} of a buffer of {self.size} bytes")


class Recording(Protocol):
    """One pass, ready to replay. It keeps every buffer alive that its launches point to."""

    def rebind(self, buffer: int, memory: DeviceBuffer | None, slot: int | None = None) -> None:
        """Points every argument in buffer number `buffer` to `memory`, from the next replay on: of the
        launches of `slot`, or of those of none. With None, forgets the memory; `limit` must leave `slot` out.

        Raises ValueError when an argument would lie outside `memory`.
        """

    def limit(self, slots: int | None) -> None:
        """Of a batch, run the launches of the first `slots` slots only, from the next replay on."""

    def replay(self, tokens: int = 1) -> None:
        """Starts the pass for that many tokens. Raises KernelError when a launch fails."""


class Device(Protocol):
    """A driver. `close` ends it; neither it nor its recordings can be used afterwards."""

    def allocate(self, size: int) -> DeviceBuffer:
        """Memory with any content, aligned to 16 bytes at least. Raises ZllmcError if there is none left."""

    def load(self, path: Path) -> DeviceBuffer:
        """The bytes of a file."""

    def write(self, buffer: DeviceBuffer, data: NDArray[Any], offset: int = 0) -> None:
        """Copies an array's bytes into the buffer from byte `offset` on. ValueError if they do not fit."""

    def read(
        self, buffer: DeviceBuffer, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> NDArray[Any]:
        """A copy of the buffer's bytes from `offset` on, once all work before is done."""

    def read_later(
        self, buffer: DeviceBuffer, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> Callable[[], NDArray[Any]]:
        """What `read` would give now, at most READ_LATER bytes. A call of the result waits for them, and for
        no later work. Of what such work writes before the call, it may give the old or the new."""

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[tuple[DeviceBuffer, int]],
    ) -> None:
        """Starts one kernel at once; the arguments are buffers with byte offsets."""

    def record(self, entry: EntryPoint, buffers: Sequence[DeviceBuffer]) -> Recording:
        """Resolves every launch of `entry` to addresses; `buffers` are the plan's, in the plan's order."""

    def synchronize(self) -> None:
        """Returns when all work is done. Raises KernelError when some of it failed."""

    def close(self) -> None: ...


def single_launch(
    kernel: str, grid: tuple[int, int], threads: int, arguments: Sequence[tuple[DeviceBuffer, int]]
) -> tuple[EntryPoint, list[DeviceBuffer]]:
    """`Device.launch` as a pass of its own: what a device records and replays."""
    args = tuple(Pointer(number, offset) for number, (_, offset) in enumerate(arguments))
    entry = EntryPoint("eager", 1, 1, (Launch(kernel, args, grid=grid, threads=threads),))
    return entry, [buffer for buffer, _ in arguments]


def load_file(device: Device, path: Path) -> DeviceBuffer:
    """The bytes of a file in a buffer of the device, read piece by piece."""
    buffer = device.allocate(max(path.stat().st_size, 1))
    with path.open("rb") as file:
        offset = 0
        while piece := file.read(_PIECE):
            device.write(buffer, np.frombuffer(piece, np.uint8), offset)
            offset += len(piece)
    return buffer


def pointers(launch: Launch) -> tuple[Pointer, ...]:
    """A launch's arguments. Raises KernelError for one that is a number: a GPU's kernels take none."""
    pointers = tuple(argument for argument in launch.args if isinstance(argument, Pointer))
    if len(pointers) < len(launch.args):
        raise KernelError(f"{launch.kernel} is given numbers, which a kernel of a GPU does not take")
    return pointers
