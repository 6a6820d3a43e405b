"""The CPU driver: loads kernel objects and replays a recorded pass on persistent threads.

Threads are Python threads that live inside one native call, so no Python runs between the launches of a pass
and the GIL is free meanwhile. `codegen/cpu_executor.py` is the native side and describes what they share.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi_orcjit
from numpy.typing import DTypeLike, NDArray

from zllmc.runtime.device import KernelError
from zllmc.runtime.memory import Memory, allocate, map_file
from zllmc.runtime.processors import physical_cores, processors, quota
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.plan import EntryPoint, Launch, Pointer

_LAYOUT = 2  # of the structures below, as `executor_layout` names it
_POOL_BYTES = 384
_POOL = np.dtype(
    {
        "names": ["threads", "idle_spins", "barrier_spins", "failed"],
        "formats": [np.int32] * 4,
        "offsets": [16, 20, 24, 256],
        "itemsize": _POOL_BYTES,
    }
)
_RECORDING = np.dtype(
    [(name, np.int64) for name in ("launches", "table", "arguments", "row_bytes", "stamps")]
)
_LAUNCH = np.dtype(
    [
        ("function", np.int64),
        ("first", np.int32),
        ("count", np.int32),
        ("barrier", np.int32),
        ("pieces", np.int32),
        ("taken", np.int32),
        ("unused", np.int32),
    ]
)
_ARGUMENT = np.dtype([("type", np.int32), ("zero", np.int32), ("value", np.int64)])  # TVMFFIAny
_INTEGER, _POINTER = 1, 4  # TVMFFITypeIndex: kTVMFFIInt, kTVMFFIOpaquePtr

# One round is some 20 to 60 ns. A worker stays awake through the host's work between two tokens. At a barrier
# that is not reached within 0.1 ms, a thread waits for one without a processor: perhaps for its own.
_IDLE_SPINS, _BARRIER_SPINS = 8_000, 2_000
# For each thread: with fewer, a fast one finds none left to take from a slow one, and more cost more.
_LEAST_PIECES, _MOST_PIECES = 3, 6
_MOST_THREADS = 1_024  # tens of thousands would take minutes to start, and to stop
_CROWDED_SPINS = 50  # more threads than processors: the one waited for needs this processor


class CpuDevice:
    """Kernels and the threads that run them.

    `objects` are relocatable objects (paths or bytes), the executor among them. `threads` counts the calling
    thread; by default there is one for each physical core that this process may use. With `pin`, each worker
    stays on one processor where there are enough of them; `pin_main` does the same to the calling thread
    until `close`. Raises ZllmcError for objects that this machine cannot load.
    """

    def __init__(
        self,
        objects: Sequence[Path | bytes],
        threads: int | None = None,
        *,
        pin: bool = True,
        pin_main: bool = False,
    ) -> None:
        self.threads = physical_cores() if threads is None else threads
        if self.threads < 1:
            raise ValueError(f"threads is {self.threads}, must be at least 1")
        if self.threads > _MOST_THREADS:
            raise ZllmcError(f"{self.threads:,} threads: there may be {_MOST_THREADS:,} at most")
        self._module = load_objects(objects)
        layout = self._function("executor_layout")()
        if layout != _LAYOUT:
            raise ZllmcError(
                f"the artifact's executor has layout {layout}, this version of zllmc runs {_LAYOUT}"
            )
        self._run = self._function("executor_run")
        stop = self._function("executor_stop")

        allowed = processors()
        crowded = self.threads > min(len(allowed), quota() or len(allowed))
        pool_memory = allocate(_POOL_BYTES)
        self._pool: NDArray[Any] = pool_memory.view(_POOL, (1,))
        self._pool["threads"] = self.threads
        self._pool["idle_spins"] = _CROWDED_SPINS if crowded else _IDLE_SPINS
        self._pool["barrier_spins"] = _CROWDED_SPINS if crowded else _BARRIER_SPINS
        self._pool_address = pool_memory.address
        self._lock = threading.Lock()  # one pass at a time

        pins = allowed if pin and not crowded and hasattr(os, "sched_setaffinity") else None
        before = os.sched_getaffinity(0) if pins and pin_main else None
        workers: list[threading.Thread] = []
        # Runs at close, when the device is collected or when the interpreter exits; must not refer to self.
        self._stop = weakref.finalize(self, _stop, stop, pool_memory, workers, before)
        worker = self._function("executor_worker")
        for number in range(1, self.threads):
            thread = threading.Thread(
                target=_work,
                args=(worker, pool_memory, number, pins[number] if pins else None),
                name=f"zllmc-{number}",
                daemon=True,  # else the interpreter would wait for it before it calls the finalizer
            )
            try:
                thread.start()
            except RuntimeError as error:  # a limit on processes or memory
                self._stop()
                raise ZllmcError(f"the system starts no more than {number} threads") from error
            workers.append(thread)
        if pins and before:
            os.sched_setaffinity(0, {pins[0]})

    def allocate(self, size: int) -> Memory:
        """Zeroed memory that becomes real as it is used."""
        return allocate(size)

    def load(self, path: Path) -> Memory:
        """The bytes of a file, in huge pages: they read a third faster than the file's own of 4 KiB."""
        return map_file(path, copy=True)

    def write(self, buffer: Memory, data: NDArray[Any], offset: int = 0) -> None:
        """Copies an array to byte `offset` of the buffer. ValueError if it does not fit."""
        buffer.view(data.dtype, data.shape, offset)[...] = data

    def read(self, buffer: Memory, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        """The buffer's memory itself, as an array: what it shows changes with the next pass."""
        return buffer.view(dtype, shape, offset)

    def record(self, entry: EntryPoint, buffers: Sequence[Memory]) -> Recording:
        """Resolves every launch of `entry` to addresses; `buffers` are the plan's, in the plan's order.

        Raises ZllmcError for a kernel that was not loaded and ValueError for a pointer outside its buffer.
        """
        return Recording(self, entry, buffers)

    def close(self) -> None:
        """Ends the threads; no recording of this device can be replayed afterwards. May be called twice."""
        with self._lock:
            self._stop()

    def _function(self, name: str) -> Any:
        return native_function(self._module, name)

    def _replay(self, recording: Recording) -> None:
        with self._lock:
            if not self._stop.alive:
                raise RuntimeError("the device is closed")
            try:
                failed = int(self._run(self._pool_address, recording.address))
            except Exception as error:  # whatever the kernel raised, on any thread
                failed = int(self._pool["failed"][0])
                raise KernelError(f"{recording.describe(failed)}: {error}") from error
        if failed >= 0:
            raise KernelError(recording.describe(failed))


class Recording:
    """One pass, ready to replay. It owns a reference to every buffer that its launches point to.

    `launches` are those that a replay runs: all of the entry, or those that `limit` leaves.
    """

    def __init__(self, device: CpuDevice, entry: EntryPoint, buffers: Sequence[Memory]) -> None:
        self._device = device
        self._entry = entry
        self._buffers: dict[tuple[int, int | None], Memory] = {}
        names = dict.fromkeys(launch.kernel for launch in entry.launches)
        self._functions = {name: device._function(name) for name in names}
        handles = {name: function.__chandle__() for name, function in self._functions.items()}

        self._table: NDArray[Any] = np.zeros(len(entry.launches), _LAUNCH)
        row: list[tuple[int, int, int]] = []
        # (buffer, slot): (index in the row, offset in the buffer)
        places: dict[tuple[int, int | None], list[tuple[int, int]]] = {}
        starts = []
        for number, launch in enumerate(entry.launches):
            starts.append(len(row))
            pieces = min(launch.pieces, _MOST_PIECES * device.threads)
            if device.threads == 1 or pieces < _LEAST_PIECES * device.threads:
                pieces = 0
            row += [(_INTEGER, 0, 0), (_INTEGER, 0, pieces or device.threads)]
            for argument in launch.args:
                if isinstance(argument, Pointer):
                    places.setdefault((argument.buffer, launch.slot), []).append((len(row), argument.offset))
                    row.append((_POINTER, 0, 0))
                else:
                    row.append((_INTEGER, 0, argument))
            count = len(row) - starts[-1]
            self._table[number] = (handles[launch.kernel], starts[-1], count, launch.barrier, pieces, 0, 0)
        self._arguments: NDArray[Any] = np.tile(np.array(row, _ARGUMENT), (device.threads, 1))
        # Work that does not divide evenly burdens the first threads: those are others in each slot.
        first = np.array([launch.slot or 0 for launch in entry.launches], np.int64)
        threads = np.arange(device.threads)[:, None]
        self._arguments["value"][:, starts] = (threads + first) % device.threads
        self._places = {key: np.array(found, np.int64).T for key, found in places.items()}
        for buffer, slot in self._places:
            self.rebind(buffer, buffers[buffer], slot)
        self._header: NDArray[Any] = np.zeros(1, _RECORDING)
        self._header["arguments"] = self._arguments.ctypes.data
        self._header["row_bytes"] = self._arguments.strides[0]
        self.address: int = self._header.ctypes.data
        self._limited: dict[int | None, tuple[tuple[Launch, ...], NDArray[Any]]] = {}
        self.limit(None)

    def limit(self, slots: int | None) -> None:
        """Of a batch, run the launches of the first `slots` slots only, from the next replay on."""
        if slots not in self._limited:
            every = self._entry.launches
            kept = [i for i, it in enumerate(every) if slots is None or it.slot is None or it.slot < slots]
            # A launch that is left out leaves its barrier to those before it.
            barriers_before = np.cumsum(self._table["barrier"]) - self._table["barrier"]
            table = self._table[kept]
            table["barrier"][:-1] = np.diff(barriers_before[kept]) > 0
            self._limited[slots] = tuple(every[i] for i in kept), table
        self.launches, table = self._limited[slots]
        self._header["launches"] = len(table)
        self._header["table"] = table.ctypes.data

    def rebind(self, buffer: int, memory: Memory | None, slot: int | None = None) -> None:
        """Points every argument in buffer number `buffer` to `memory`, from the next replay on: of the
        launches of `slot`, or of those of none. With None, forgets the memory; `limit` must leave `slot` out.

        Raises ValueError when an argument would lie outside `memory`.
        """
        if (buffer, slot) not in self._places:
            return
        indices, offsets = self._places[buffer, slot]
        if memory is None:
            self._arguments["value"][:, indices] = 0
            self._buffers.pop((buffer, slot), None)
            return
        if offsets.min() < 0 or offsets.max() >= memory.size:
            raise ValueError(
                f"{self._entry.name}: a launch points {offsets.max()} bytes into buffer {buffer}, "
                f"which has {memory.size}"
            )
        self._arguments["value"][:, indices] = memory.address + offsets
        self._buffers[buffer, slot] = memory

    def replay(self, tokens: int = 1) -> None:
        """Runs the pass on all threads, to its end. Raises KernelError when a launch fails.

        The number of tokens is in the control block; a GPU's grid depends on it too.
        """
        self._device._replay(self)

    def describe(self, launch: int) -> str:
        """Names launch number `launch` for a message."""
        return f"{self._entry.name}, launch {launch}, kernel {self.launches[launch].kernel}"

    def profile(self) -> NDArray[np.int64]:
        """Replays once: nanoseconds of each of `launches` as thread 0 sees them, with the barrier after it if
        any."""
        stamps = np.zeros(len(self.launches) + 1, np.int64)
        self._header["stamps"] = stamps.ctypes.data
        try:
            self.replay()
        finally:
            self._header["stamps"] = 0
        return np.diff(stamps)


def load_objects(objects: Sequence[Path | bytes]) -> Any:
    """Relocatable objects (paths or bytes) linked into memory. Raises ZllmcError for what this machine cannot
    load."""
    try:
        # `cxx` names no program: the loader would run the user's compiler to look for C++ libraries.
        return tvm_ffi_orcjit.default_session().load_module(
            [item if isinstance(item, bytes) else str(item) for item in objects], cxx="no-compiler-needed"
        )
    except (AttributeError, RuntimeError, ValueError) as error:
        raise ZllmcError(f"the kernels cannot be loaded on this machine: {error}") from error


def native_function(module: Any, name: str) -> Any:
    """A function of `load_objects`. Calls of it leave the GIL to other threads."""
    try:
        function = module.get_function(name)
    except AttributeError as error:
        raise ZllmcError(f"kernel {name} is not among the artifact's objects") from error
    function.release_gil = True
    return function


def _work(worker: Any, pool: Memory, number: int, processor: int | None) -> None:
    if processor is not None:
        os.sched_setaffinity(0, {processor})
    worker(pool.address, number)


def _stop(stop: Any, pool: Memory, workers: list[threading.Thread], affinity: set[int] | None) -> None:
    stop(pool.address)
    for thread in workers:
        thread.join()
    if affinity:
        os.sched_setaffinity(0, affinity)
