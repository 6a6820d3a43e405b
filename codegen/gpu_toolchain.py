"""What the GPU toolchains share: the preludes that kernels are written in, and what a compiler gives back."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

PRELUDE_INCLUDE = '#include "prelude.h"\n'


@dataclass(frozen=True)
class KernelResources:
    """What a compiled kernel takes.

    Per thread: `registers` of 32 bits, `spills` (bytes moved to memory because registers ran out, as the
    compiler counts them), `stack` (bytes of private memory). Per block: `shared_memory` in bytes.
    """

    registers: int
    spills: int
    stack: int
    shared_memory: int


@dataclass(frozen=True)
class Binary:
    """What a driver loads: `format` is `cubin`, `ptx` or `hsaco`; `kernels` by name (empty for PTX)."""

    code: bytes
    format: str
    kernels: Mapping[str, KernelResources]


@cache
def prelude(dialect: str) -> str:
    """The header that a kernel of this dialect (`cuda`, `hip`, `metal`) includes as "prelude.h"."""
    return (files("zllmc.codegen") / "preludes" / f"{dialect}.h").read_text()


def with_prelude(source: str, dialect: str) -> str:
    """The source with its prelude in place of the include: Metal compiles sources that have no files."""
    if not source.startswith(PRELUDE_INCLUDE):
        raise ValueError(f'kernels begin with `#include "prelude.h"`, not `{source[:40]}`')
    return prelude(dialect) + source.removeprefix(PRELUDE_INCLUDE)


def run_compiler(command: Sequence[str], folder: Path) -> str:
    """Runs a compiler in a folder; what it prints. Raises ValueError when it refuses the source."""
    result = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if result.returncode:
        raise ValueError(f"{' '.join(command)}: failed ({result.returncode})\n{result.stderr}{result.stdout}")
    return result.stderr + result.stdout
