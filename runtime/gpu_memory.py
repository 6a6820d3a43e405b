"""Memory for the driver of NVIDIA's and AMD's GPUs: the device's, and the host's that copies go through."""

from __future__ import annotations

from collections import defaultdict, deque
from contextlib import ExitStack, suppress
from typing import Any

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


def attempt(function: Any, *arguments: Any) -> None:
    """Frees something. Once a kernel has failed nothing can be freed, and the driver does it at the end."""
    with suppress(DriverError):
        function(*arguments)
