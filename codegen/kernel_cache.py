"""The cache of compiled kernels. Looking into it needs no TVM, which takes two seconds to import.

It is content-addressed: an entry's name is the digest of the call, the target and the compiler's own sources.
So it is shared between models and processes, and nothing has to be invalidated.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import astuple
from functools import cache
from importlib.metadata import version
from pathlib import Path

from zllmc.targets.cpu import CpuTarget
from zllmc.targets.gpu import GpuTarget
from zllmc.zllm_ir.errors import room_to_write
from zllmc.zllm_ir.kernel_graph import KernelCall

EXECUTOR = KernelCall("executor", (), (), ())  # stands for the executor, which is not called by kernel graphs

_DIGEST = hashlib.sha256().digest_size
_ABANDONED = 3600  # seconds after which a file that is still being written has lost its writer


class KernelCache:
    """Objects of kernels in a folder; without one, nothing is found and nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, call: KernelCall, target: CpuTarget | GpuTarget) -> bytes | None:
        """The object of an equal call that was stored before."""
        if self._folder is None:
            return None
        try:
            entry = (self._folder / _name(call, target)).read_bytes()
        except FileNotFoundError:
            return None
        digest, code = entry[:_DIGEST], entry[_DIGEST:]
        # A file system that lost power may have the name, but not all of the bytes.
        return code if hashlib.sha256(code).digest() == digest else None

    def put(self, call: KernelCall, target: CpuTarget | GpuTarget, code: bytes) -> None:
        """Store an object. It appears whole or not at all, also if the process is killed."""
        if self._folder is None:
            return
        with room_to_write(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix="tmp", delete=False) as file:
                try:
                    file.write(hashlib.sha256(code).digest() + code)
                    file.flush()
                    os.replace(file.name, self._folder / _name(call, target))
                except BaseException:
                    with suppress(FileNotFoundError):
                        os.unlink(file.name)
                    raise

    def sweep(self) -> None:
        """Remove what killed writers have left."""
        if self._folder is not None and self._folder.is_dir():
            for left in self._folder.glob("tmp*"):
                with suppress(FileNotFoundError):  # another process sweeps too
                    if left.stat().st_mtime < time.time() - _ABANDONED:
                        left.unlink()


def _name(call: KernelCall, target: CpuTarget | GpuTarget) -> str:
    # A set's text is in another order in every process.
    facts = [sorted(fact) if isinstance(fact, frozenset) else fact for fact in astuple(target)]
    key = f"{call!r}\n{facts!r}\n{compiler_fingerprint()}"
    return hashlib.sha256(key.encode()).hexdigest() + ".o"


@cache
def compiler_fingerprint() -> str:
    """A digest of everything that decides what code a call becomes."""
    digest = hashlib.sha256(version("apache-tvm").encode())
    here = Path(__file__).parent
    for folder in (here, here.parent / "zllm_ir", here.parent / "targets"):
        for path in sorted([*folder.glob("*.py"), *folder.glob("preludes/*.h")]):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
