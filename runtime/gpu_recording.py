"""Recordings of NVIDIA's and AMD's GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zllmc.runtime.device import DeviceBuffer, KernelError, pointers
from zllmc.runtime.driver_api import Driver, DriverError
from zllmc.runtime.gpu_graph import Graph
from zllmc.runtime.gpu_memory import attempt
from zllmc.zllm_ir.plan import EntryPoint, Launch

if TYPE_CHECKING:
    from zllmc.runtime.gpu import GpuDevice


class GpuRecording:
    """As `Recording`. `eager`: launches kernel by kernel, even where graphs can be used."""

    def __init__(self, device: GpuDevice, entry: EntryPoint, buffers: Sequence[DeviceBuffer]) -> None:
        self._device = device
        self._entry = entry
        launches = entry.launches
        # Prefill has other grids for each number of tokens. It launches while the device works.
        self.eager = entry.name == "prefill" and any(0 < it.rows < entry.max_tokens for it in launches)
        self._buffers: dict[tuple[int, int | None], DeviceBuffer] = {}
        self._unbound: set[tuple[int, int | None]] = set()
        self._arguments: NDArray[np.int64] = np.zeros(sum(len(it.args) for it in launches), np.int64)
        # The driver is given an array of pointers to arguments.
        self._pointers = self._arguments.ctypes.data + 8 * np.arange(len(self._arguments), dtype=np.int64)
        self._nodes: NDArray[Any] = np.zeros(len(launches), device._driver.vendor.node)
        self._grid_rows = np.array([it.rows for it in launches], np.int64)
        # (buffer, slot): indices of arguments, offsets in the buffer, and numbers of launches
        places: dict[tuple[int, int | None], list[tuple[int, int, int]]] = {}
        first = 0
        for number, launch in enumerate(launches):
            node = self._nodes[number]
            node["function"] = _function(device, launch)
            node["grid"], node["block"] = (*launch.grid, 1), (launch.threads, 1, 1)
            node["arguments"] = self._pointers.ctypes.data + 8 * first
            for index, pointer in enumerate(pointers(launch), first):
                places.setdefault((pointer.buffer, launch.slot), []).append((index, pointer.offset, number))
            first += len(launch.args)
        self._places = {key: np.array(found, np.int64).T for key, found in places.items()}
        self._graph: Graph | None = None
        self._changed: set[int] = set()  # launches whose nodes in the graph are not up to date
        self._tokens = 0
        for buffer, slot in self._places:
            self.rebind(buffer, buffers[buffer], slot)
        self.limit(None)

    def rebind(self, buffer: int, memory: DeviceBuffer | None, slot: int | None = None) -> None:
        if (buffer, slot) not in self._places:
            return
        if memory is None:
            self._unbound.add((buffer, slot))
            self._buffers.pop((buffer, slot), None)
            return
        indices, offsets, launches = self._places[buffer, slot]
        if offsets.min() < 0 or offsets.max() >= memory.size:
            raise ValueError(
                f"{self._entry.name}: a launch points {offsets.max()} bytes into buffer {buffer}, "
                f"which has {memory.size}"
            )
        addresses = memory.address + offsets
        self._changed.update(launches[self._arguments[indices] != addresses].tolist())
        self._arguments[indices] = addresses
        self._buffers[buffer, slot] = memory
        self._unbound.discard((buffer, slot))

    def limit(self, slots: int | None) -> None:
        self._slots = slots
        every = self._entry.launches
        self._enabled = [self._is_within(it.slot) for it in every]
        self._running = [i for i, on in enumerate(self._enabled) if on]
        self.launches = tuple(every[i] for i in self._running)

    def replay(self, tokens: int = 1) -> None:
        self._check_buffers()
        self._set_tokens(tokens)
        device = self._device
        with device._work(self._entry.name) as driver:
            device._begun = self._entry.name
            if device.graphs and not self.eager and (graph := self._updated_graph(driver)):
                graph.launch(device._stream)
                return
            for number, call in zip(self._running, self._calls(), strict=True):
                self._launch(driver, number, call)

    def profile(self, tokens: int = 1) -> NDArray[np.int64]:
        """Replays once, kernel by kernel: nanoseconds of each of `launches` by the device's clock, with a
        microsecond or two for the measurement."""
        self._check_buffers()
        self._set_tokens(tokens)
        with self._device._work(f"a profile of {self._entry.name}") as driver, ExitStack() as stack:
            stamps = []
            for _ in range(len(self._running) + 1):
                stamps.append(driver.made(driver.event, 0))
                stack.callback(attempt, driver.destroy_event, stamps[-1])
            driver.record_event(stamps[0], self._device._stream)
            for number, call, stamp in zip(self._running, self._calls(), stamps[1:], strict=True):
                self._launch(driver, number, call)
                driver.record_event(stamp, self._device._stream)
            driver.synchronize(self._device._stream)
            times = [driver.milliseconds(*pair) for pair in itertools.pairwise(stamps)]
        return np.rint(np.array(times, np.float64) * 1e6).astype(np.int64)

    def describe(self, launch: int) -> str:
        """Names launch number `launch` of `launches` for a message."""
        return f"{self._entry.name}, launch {launch}, kernel {self.launches[launch].kernel}"

    def _is_within(self, slot: int | None) -> bool:
        return slot is None or self._slots is None or slot < self._slots

    def _check_buffers(self) -> None:
        for buffer, slot in self._unbound:
            if self._is_within(slot):
                raise ValueError(f"{self._entry.name}: buffer {buffer} of slot {slot} has no memory")

    def _set_tokens(self, tokens: int) -> None:
        if tokens == self._tokens:
            return
        (by_rows,) = self._grid_rows.nonzero()
        self._nodes["grid"][by_rows, 1] = -(-tokens // self._grid_rows[by_rows])
        self._changed.update(by_rows.tolist())
        self._tokens = tokens

    def _calls(self) -> list[tuple[int, ...]]:
        """Arguments of the driver's launch function, for the launches that run."""
        stream = self._device._stream
        nodes = self._nodes[self._running]
        fields = (nodes[name].tolist() for name in ("function", "grid", "block", "arguments"))
        return [
            (function, *grid, *block, 0, stream, arguments, 0)
            for function, grid, block, arguments in zip(*fields, strict=True)
        ]

    def _launch(self, driver: Driver, number: int, call: tuple[int, ...]) -> None:
        try:
            driver.launch(*call)
            if self._device.blocking:
                driver.synchronize(self._device._stream)
        except DriverError as error:
            where = f"{self._entry.name}, launch {number}, kernel {self._entry.launches[number].kernel}"
            raise KernelError(f"{where}: {error}") from error

    def _updated_graph(self, driver: Driver) -> Graph | None:
        """The graph as it must be now, or None if the driver fails to make it so."""
        graph, enabled = self._graph, self._enabled
        # What does not run is brought up to date when it does.
        stale = [number for number in self._changed if enabled[number]]
        if graph and not stale and enabled == graph.enabled:
            return graph
        # Whether nodes may be changed while they run is not the same in all versions.
        driver.synchronize(self._device._stream)
        try:
            if graph is None:
                graph = self._graph = Graph(driver, self._entry.launches, self._nodes)
                self._device._keep(graph, self)
            else:
                for number in stale:
                    graph.set(number)
            self._changed.difference_update(stale)
            for number, on in enumerate(enabled):
                if on != graph.enabled[number]:
                    graph.enable(number, on)
        except DriverError as error:
            self._device._give_up_graphs(error)
            return None
        return graph


def _function(device: GpuDevice, launch: Launch) -> int:
    given, takes = len(launch.args), device._parameters.get(launch.kernel)
    if launch.kernel not in device._functions:
        raise KernelError(f"there is no kernel {launch.kernel}")
    if takes not in (given, None):  # the driver would read on after the last of them
        raise KernelError(f"{launch.kernel} takes {takes} pointers, not {given}")
    return device._functions[launch.kernel]
