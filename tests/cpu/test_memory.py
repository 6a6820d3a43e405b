"""Buffers and mapped files: alignment, lifetime, bounds."""

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest

from zllmc.runtime.memory import allocate, map_file
from zllmc.runtime.processors import physical_cores, processors

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("size", [1, 4096, (2 << 20) - 1, 2 << 20, 5 << 20])
def test_allocation_is_aligned_and_zero(size):
    memory = allocate(size, huge=True)
    assert memory.size == size
    assert memory.address % (4096 if size < 2 << 20 else 2 << 20) == 0
    view = memory.view(np.uint8, (size,))
    assert view.ctypes.data == memory.address
    assert not view.any()
    view[-1] = 7


def test_an_empty_allocation_has_an_empty_view():
    memory = allocate(0)
    assert memory.size == 0
    assert memory.view(np.float32, (0, 4)).shape == (0, 4)


def test_a_view_outlives_its_memory():
    view = allocate(4 << 20).view(np.int64, (2, 1000), offset=8)
    view[:] = np.arange(2000).reshape(2, 1000)
    gc.collect()
    others = [allocate(4 << 20) for _ in range(8)]
    for other in others:
        other.view(np.uint8, (4 << 20,))[:] = 255
    np.testing.assert_array_equal(view.ravel(), np.arange(2000))


@pytest.mark.parametrize(("shape", "offset"), [((5,), 0), ((4,), 1), ((1,), -4), ((0,), 17)])
def test_a_view_that_does_not_fit_is_refused(shape, offset):
    with pytest.raises(ValueError, match="16 bytes"):
        allocate(16).view(np.int32, shape, offset)


@pytest.mark.parametrize("copy", [False, True])
def test_a_file_arrives_whole_and_read_only(tmp_path: Path, copy):
    path = tmp_path / "weights"
    size = (6 << 20) + 5  # parts of 4 and 2 MiB
    with path.open("wb") as file:  # sparse
        file.write(b"start")
        file.seek((4 << 20) - 2)
        file.write(b"seam")
        file.seek(size - 3)
        file.write(b"end")
    memory = map_file(path, copy=copy, threads=2)
    assert memory.size == size
    data = memory.view(np.uint8, (size,))
    assert data[:5].tobytes() == b"start"
    assert data[(4 << 20) - 2 :][:4].tobytes() == b"seam"
    assert data[-3:].tobytes() == b"end"
    assert np.count_nonzero(data) == 12
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


@pytest.mark.parametrize("copy", [False, True])
def test_empty_and_missing_files(tmp_path: Path, copy):
    (tmp_path / "empty").touch()
    assert map_file(tmp_path / "empty", copy=copy).size == 0
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "missing", copy=copy)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_only_allowed_processors_count():
    allowed = os.sched_getaffinity(0)
    assert sorted(processors()) == sorted(allowed)
    assert 1 <= physical_cores() <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert processors() == [min(allowed)]
        assert physical_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.skipif(
    not HUGE_PAGES.is_file() or "[never]" in HUGE_PAGES.read_text(), reason="the system has no huge pages"
)
def test_weights_lie_in_huge_pages(tmp_path):
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)) * (64 << 10))
    memory = map_file(tmp_path / "weights.bin", copy=True)
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())

    def holds(mapping: str) -> bool:
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", mapping)
        return span is not None and int(span[1], 16) <= memory.address < int(span[2], 16)

    (mapping,) = filter(holds, mappings)
    assert int(re.search(r"AnonHugePages:\s+(\d+) kB", mapping)[1]) >= 2048
