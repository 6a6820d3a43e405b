"""Which processors this process may use, and how many of them at once."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def processors() -> list[int]:
    """Allowed processors: the first of each physical core, in order, then their hardware siblings."""
    allowed = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    first: list[int] = []
    rest: list[int] = []
    seen: set[str] = set()
    for processor in allowed:
        core = _core(processor)
        (rest if core in seen else first).append(processor)
        seen.add(core)
    return first + rest


def physical_cores() -> int:
    """Physical cores with an allowed processor, but no more than `quota` (a container's limit)."""
    cores = len({_core(processor) for processor in processors()})
    return min(cores, quota() or cores)


def quota() -> int | None:
    """Whole processors that the control group lets this process use at once, at least 1; None: no limit.

    https://docs.kernel.org/admin-guide/cgroup-v2.html, "cpu.max"; cgroup-v1's cpu.cfs_quota_us in containers.
    """
    root = Path("/sys/fs/cgroup")
    folders = [root]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                parts = line.removeprefix("0::/").split("/")
                folders += [root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    limits = []
    for folder in folders:
        with suppress(OSError, ValueError):  # no such file, or "max": no limit here
            limit, period = (folder / "cpu.max").read_text().split()
            limits.append(int(limit) // int(period))
    with suppress(OSError, ValueError):
        limit, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(limit) > 0:
            limits.append(int(limit) // int(period))
    return max(1, min(limits)) if limits else None


def _core(processor: int) -> str:
    """A name that hardware siblings share."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(processor)
