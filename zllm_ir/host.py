"""What the machine says of its CPU: to choose a target when compiling, to refuse a wrong one at load."""

from __future__ import annotations

import ctypes
import functools
import platform
import re
from pathlib import Path

# Linux gives a process the registers of AMX when it asks: Documentation/arch/x86/xstate.rst.
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILE_DATA = 158, 0x1023, 18


@functools.cache
def host_flags() -> frozenset[str]:
    """The flags that Linux reports of this machine's CPU, as far as this process may use what they name;
    empty where there are none to read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = frozenset(match[1].split()) if match else frozenset()
    return flags if "amx_tile" not in flags or _has_tiles() else flags - {"amx_tile"}


def _has_tiles() -> bool:
    """Ask for the tile registers, for all threads of this process from now on."""
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILE_DATA) == 0)


def host_architecture() -> str:
    """`x86_64`, `aarch64`, …"""
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
