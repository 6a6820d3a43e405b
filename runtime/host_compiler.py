"""The host's C++ compiler: finds it, and compiles shared libraries into a cache.

A file's key covers all that decides its content, so an entry never goes stale, and what is cached needs no
compiler.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from zllmc.runtime.processors import physical_cores
from zllmc.zllm_ir.errors import ZllmcError, room_to_write

# Zig has checks by default, and links functions of its own for them: none but those that are asked for.
_FLAGS = ["-std=c++17", "-fPIC", "-w", "-fno-exceptions", "-fno-stack-protector", "-U_FORTIFY_SOURCE"]
_FLAGS += ["-fno-sanitize=all"]
_LINK = ["-shared", "-fno-sanitize=all"]
if sys.platform == "darwin":
    _LINK += ["-undefined", "dynamic_lookup"]  # as elsewhere by default
_LEAST_SPACE = 1 << 20  # bytes without which it is no wonder that a compiler fails


class CompileError(Exception):
    """The compiler refused a source."""


def find_compiler() -> list[str]:
    """The command of a C++ compiler: `$CXX`, one on the PATH, or that of the package `ziglang`."""
    if command := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(command[0]) is None:
            raise ZllmcError(f"$CXX names {command[0]}, which cannot be run. Correct it, or unset it.")
        return command
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise ZllmcError(
        "The emulated device compiles kernels with a C++ compiler, and there is none on the PATH. "
        "Install g++ or clang++, or `pip install ziglang`, or name one in $CXX."
    )


def compile_library(
    texts: Sequence[str], flags: Sequence[str], headers: Sequence[Path], cache: Path | None = None
) -> Path:
    """The shared library of C++ sources; what is not in the folder `cache` yet is compiled now.

    `headers` are the files that they include from folders in `flags`. Raises CompileError with the compiler's
    first complaints, and ZllmcError when there is no compiler.
    """
    folder = cache or _cache_folder()
    shared = [*_FLAGS, *flags, *(header.read_text() for header in headers)]
    objects = [folder / f"{_digest([text, *shared])}.o" for text in texts]
    library = folder / f"{_digest([*_LINK, *(path.name for path in objects)])}.so"
    if library.exists():
        return library
    command = find_compiler()
    with room_to_write(folder):
        folder.mkdir(parents=True, exist_ok=True)

        def compile(text: str, output: Path) -> None:
            if not output.exists():
                with tempfile.TemporaryDirectory(dir=folder) as name:
                    source, compiled = Path(name) / "source.cpp", Path(name) / "source.o"
                    source.write_text(text)
                    _run([*command, *_FLAGS, *flags, "-c", "-o", compiled, source], folder)
                    compiled.replace(output)

        with ThreadPoolExecutor(physical_cores()) as pool:
            list(pool.map(compile, texts, objects))
        with tempfile.TemporaryDirectory(dir=folder) as name:
            linked = Path(name) / "linked.so"
            # Without `flags`: with those it would ask for libraries of sanitizers.
            _run([*command, *_LINK, "-o", linked, *objects, "-lm", "-lpthread"], folder)
            linked.replace(library)
    return library


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _run(command: list[str | Path], folder: Path) -> None:
    # Zig keeps what it compiled in the home folder, which a service may have none of.
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(folder / "zig")} | os.environ
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    if done.returncode:
        if shutil.disk_usage(folder).free < _LEAST_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise CompileError("\n".join(done.stderr.splitlines()[:20]))


def _cache_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("ZLLMC_CACHE") or cache / "zllmc") / "emulator"
