"""Memory for the driver of NVIDIA's and AMD's GPUs: the device's, and the host's that copies go through."""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from numpy.typing import NDArray

from zllmc.runtime.device import READ_LATER
from zllmc.runtime.driver_api import DISABLE_TIMING, OUT_OF_MEMORY, Driver, DriverError

_ALIGNMENT = 512  # sizes of blocks of memory
SLOT = 4 << 20  # bytes of one part of the staging memory
_SLOTS = 4


class DeviceMemory:
    """The device's memory that a device has taken."""

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver = driver
        self._stream = stream
        self._sizes: dict[int, int] = {}  # by address
        self._spare: defaultdict[int, list[int]] = defaultdict(list)  # addresses by size
        self._returned: deque[int] = deque()

    def allocate(self, size: int) -> int:
        """Raises DriverError."""
        size = max(-(-size // _ALIGNMENT), 1) * _ALIGNMENT
        while self._returned:
            address = self._returned.popleft()
            self._spare[self._sizes[address]].append(address)
        if self._spare[size]:
            return self._spare[size].pop()
        try:
            address = self._driver.made(self._driver.allocate, size)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            self._driver.synchronize(self._stream)
            for spare in self._spare.values():
                while spare:
                    self._free(spare.pop())
            address = self._driver.made(self._driver.allocate, size)
        self._sizes[address] = size
        return address

    def give_back(self, address: int, size: int) -> None:
        """Lets the next work have the memory. May be called at any time."""
        self._returned.append(address)

    def close(self) -> None:
        for address in list(self._sizes):
            attempt(self._free, address)

    def _free(self, address: int) -> None:
        del self._sizes[address]
        self._driver.free(address)


class Staging:
    """Pinned memory, taken piece by piece from one slot after the other. A slot is taken again when the
    copies of its pieces are done."""

    def __init__(self, driver: Driver, stream: int, closing: ExitStack) -> None:
        self._driver = driver
        self._stream = stream
        self._start = driver.made(driver.allocate_host, SLOT * _SLOTS, 0)
        closing.callback(attempt, driver.free_host, self._start)
        self._events: list[int] = []
        for _ in range(_SLOTS):
            self._events.append(driver.made(driver.event, DISABLE_TIMING))
            closing.callback(attempt, driver.destroy_event, self._events[-1])
        self._left: set[int] = set()  # slots whose event was recorded
        self._slot, self._used = 0, 0

    def take(self, size: int) -> int:
        """The address of `size` bytes, at most SLOT, for a copy that is started before the next is taken."""
        if self._used + size > SLOT:
            self._driver.record_event(self._events[self._slot], self._stream)
            self._left.add(self._slot)
            self._slot, self._used = (self._slot + 1) % _SLOTS, 0
            if self._slot in self._left:
                self._driver.wait_for_event(self._events[self._slot])
        address = self._start + SLOT * self._slot + self._used
        self._used += -(-size // 64) * 64
        return address


class LateCopies:
    """Copies of a few bytes to the host, each of which can be waited for while later work goes on."""

    def __init__(self, driver: Driver, stream: int, closing: ExitStack) -> None:
        self._driver = driver
        self._stream = stream
        start = driver.made(driver.allocate_host, READ_LATER * _SLOTS, 0)
        closing.callback(attempt, driver.free_host, start)
        # Addresses in pinned memory, the events after their copies, and what ends the latest of those.
        self._places: deque[tuple[int, int, Callable[[], None]]] = deque()
        for place in range(start, start + READ_LATER * _SLOTS, READ_LATER):
            event = driver.made(driver.event, DISABLE_TIMING)
            closing.callback(attempt, driver.destroy_event, event)
            self._places.append((place, event, lambda: None))

    def start(self, address: int, data: NDArray[Any]) -> Callable[[], None]:
        """Starts a copy of the bytes from `address` on to an array, which has them when what this gives was
        called. ValueError for more than READ_LATER bytes."""
        if data.nbytes > READ_LATER:
            raise ValueError(f"{data.nbytes} bytes to read later; there is room for {READ_LATER}")
        place, event, finish_last = self._places[0]
        finish_last()
        self._driver.read(place, address, data.nbytes, self._stream)
        self._driver.record_event(event, self._stream)
        is_done = False

        def finish() -> None:
            nonlocal is_done
            if not is_done:
                self._driver.wait_for_event(event)
                ctypes.memmove(data.ctypes.data, place, data.nbytes)
                is_done = True

        self._places.popleft()
        self._places.append((place, event, finish))
        return finish


def attempt(function: Any, *arguments: Any) -> None:
    """Frees something. Once a kernel has failed nothing can be freed, and the driver does it at the end."""
    with suppress(DriverError):
        function(*arguments)
