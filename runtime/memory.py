"""Host memory with a stable address: buffers for kernels and mapped weight files."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_HUGE_PAGE = 2 << 20


class Memory:
    """A contiguous region that lives as long as this object or any view of it.

    `address` and `size` are bytes.
    """

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data
        self.address: int = data.ctypes.data
        self.size: int = data.nbytes

    def view(self, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        """An array over the memory at byte `offset`; it keeps the memory alive.

        Raises ValueError when the array does not fit.
        """
        dtype = np.dtype(dtype)
        end = offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if not 0 <= offset <= end <= self.size:
            raise ValueError(f"bytes {offset} to {end} of a region of {self.size} bytes")
        return np.ndarray(shape, dtype, self._data, offset)


def allocate(size: int, *, huge: bool = False) -> Memory:
    """Zeroed memory, on a page boundary; with `huge` in huge pages where the system has them.

    Pages become real when first touched, so a large buffer that is partly used costs only that part. A huge
    page is 2 MiB of it: good for what is used as a whole.
    """
    # Python's own default is shared memory, which most systems keep in small pages whatever they are told.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    if size < _HUGE_PAGE or not huge:
        return Memory(np.frombuffer(mmap.mmap(-1, max(size, 1), **private), np.uint8)[:size])
    pages = mmap.mmap(-1, size + _HUGE_PAGE, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages: small pages work too
            pages.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(pages, np.uint8)
    start = -data.ctypes.data % _HUGE_PAGE
    return Memory(data[start : start + size])


def map_file(path: Path, *, copy: bool = False, threads: int = 4) -> Memory:
    """The bytes of a file, read-only.

    A mapping shares the page cache with other processes and reads on demand. `copy` instead reads the whole
    file now, with `threads` readers, into huge pages: fewer TLB misses for weights that every pass streams.
    Raises OSError when the file cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            return allocate(0)
        if not copy:
            return Memory(np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8))
    memory = allocate(size, huge=True)
    target = memory.view(np.uint8, (size,))
    # Each reader has one part, of whole huge pages: it needs the interpreter once, which others keep busy.
    chunk = -(-size // threads // _HUGE_PAGE) * _HUGE_PAGE

    def read(start: int) -> None:
        part = target.data[start : start + chunk]
        with path.open("rb", buffering=0) as source:
            source.seek(start)
            while part:
                count = source.readinto(part)
                if not count:
                    raise OSError(f"{path}: became shorter while it was read")
                part = part[count:]

    with ThreadPoolExecutor(threads) as readers:
        list(readers.map(read, range(0, size, chunk)))
    memory._data.flags.writeable = False
    return memory
