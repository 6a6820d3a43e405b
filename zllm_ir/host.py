"""What the machine says of its CPU: to choose a target when compiling, to refuse a wrong one at load."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def host_flags() -> frozenset[str]:
    """The CPU flags that Linux reports for this machine; empty where there are none to read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def host_architecture() -> str:
    """`x86_64`, `aarch64`, …"""
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
