"""The launches of a recording as a graph of CUDA or HIP, which is launched as a whole."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from zllmc.runtime.driver_api import Driver
from zllmc.runtime.gpu_memory import attempt
from zllmc.zllm_ir.plan import Launch


class Graph:
    """An executable graph of all `launches`, with a node for each, all enabled.

    `nodes` are their parameters, which the driver copies when a node is made or set. Where the vendor
    `forks`, launches with no barrier between them wait for the same others. Raises DriverError, as do its
    methods.
    """

    def __init__(self, driver: Driver, launches: Sequence[Launch], nodes: NDArray[Any]) -> None:
        self._driver = driver
        self._parameters = nodes
        self._nodes: list[int] = []
        self.enabled = [True] * len(launches)
        self._instance = 0
        self._graph = driver.made(driver.graph, 0)
        try:
            before: list[int] = []
            beside: list[int] = []
            for number, launch in enumerate(launches):
                dependencies = (ctypes.c_void_p * len(before))(*before)
                parameters = self._parameters_of(number)
                node = driver.made(driver.add_kernel_node, self._graph, dependencies, len(before), parameters)
                self._nodes.append(node)
                beside.append(node)
                if launch.barrier or not driver.vendor.forks:
                    before, beside = beside, []
            self._instance = driver.made(driver.instantiate, self._graph, 0)
        except BaseException:
            self.destroy()
            raise

    def set(self, number: int) -> None:
        """Takes over the parameters of launch `number`. The graph must not be running."""
        self._driver.set_kernel_node(self._instance, self._nodes[number], self._parameters_of(number))

    def enable(self, number: int, on: bool) -> None:
        """Makes launch `number` run or not. The graph must not be running."""
        self._driver.enable_node(self._instance, self._nodes[number], int(on))
        self.enabled[number] = on

    def launch(self, stream: int) -> None:
        """Starts the graph."""
        self._driver.launch_graph(self._instance, stream)

    def destroy(self) -> None:
        """Frees it; the driver does so when it has run."""
        if self._instance:
            attempt(self._driver.destroy_instance, self._instance)
        attempt(self._driver.destroy_graph, self._graph)

    def _parameters_of(self, number: int) -> int:
        return self._parameters.ctypes.data + number * self._parameters.itemsize
