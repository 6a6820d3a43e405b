"""The host's C++ compiler: finds it, and compiles shared libraries into a cache.

A library's key covers all that decides its content, so an entry never goes stale, and a cached one needs no
compiler.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from zllmc.zllm_ir.errors import ZllmcError

_FLAGS = ["-std=c++17", "-fPIC", "-w", "-fno-exceptions", "-fno-stack-protector", "-U_FORTIFY_SOURCE"]
_LINK = ["-shared"]
if sys.platform == "darwin":
    _LINK += ["-undefined", "dynamic_lookup"]  # as elsewhere by default


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
    text: str, flags: Sequence[str], headers: Sequence[Path], cache: Path | None = None
) -> Path:
    """The shared library of a C++ source, compiled now if it is not in the folder `cache`.

    `headers` are the files that `text` includes from folders in `flags`. Raises CompileError with the
    compiler's first complaints, and ZllmcError when there is no compiler.
    """
    digest = hashlib.sha256("\0".join([text, *_FLAGS, *flags, *_LINK]).encode())
    for header in headers:
        digest.update(header.read_bytes())
    folder = cache or _cache_folder()
    library = folder / f"{digest.hexdigest()[:32]}.so"
    if library.exists():
        return library
    command = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        source, compiled, linked = (Path(name) / f"source.{suffix}" for suffix in ("cpp", "o", "so"))
        source.write_text(text)
        _run([*command, *_FLAGS, *flags, "-c", "-o", compiled, source])
        # On its own: with the flags of the sources it would ask for libraries of sanitizers.
        _run([*command, *_LINK, "-o", linked, compiled, "-lm", "-lpthread"])
        linked.replace(library)
    return library


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise CompileError("\n".join(done.stderr.splitlines()[:20]))


def _cache_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("ZLLMC_CACHE") or cache / "zllmc") / "emulator"
