"""A compiled GPU kernel, as the compiler hands it to the artifact."""

from __future__ import annotations

import msgspec


class GpuKernel(msgspec.Struct, frozen=True):
    """`text`: the source, which includes "prelude.h". `code`: what the driver loads, a cubin or code object,
    empty for Metal, which compiles the source. A launch has `blocks` blocks of `threads` threads.
    """

    text: str
    code: bytes
    blocks: int
    threads: int
