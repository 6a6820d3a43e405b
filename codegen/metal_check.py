"""Checks of Metal sources that need no Metal compiler: an artifact's MSL is first compiled on the Mac."""

from __future__ import annotations

import math
import re

from zllmc.codegen.gpu_toolchain import KernelResources
from zllmc.targets.gpu import GpuTarget

_SPACES = ("device", "constant", "threadgroup", "thread")
_SCALAR_BYTES = {
    **dict.fromkeys(("bool", "char", "uchar", "signed char", "unsigned char", "int8_t", "uint8_t"), 1),
    **dict.fromkeys(("short", "ushort", "unsigned short", "half", "bfloat", "int16_t", "uint16_t"), 2),
    **dict.fromkeys(("int", "uint", "unsigned", "unsigned int", "float", "int32_t", "uint32_t"), 4),
    **dict.fromkeys(("long", "ulong", "int64_t", "uint64_t"), 8),
}
_TYPE_BYTES = _SCALAR_BYTES | {
    f"{name}{lanes}": size * (4 if lanes == 3 else lanes)
    for name, size in _SCALAR_BYTES.items()
    if " " not in name
    for lanes in (2, 3, 4)
}
_TYPE = "|".join(sorted(map(re.escape, [*_TYPE_BYTES, "void"]), key=len, reverse=True))
# What C++ has and Metal has not, and words that are Metal's own and here do not stand before a type.
_FOREIGN = re.compile(
    rf"\bdouble\b|\blong\s+long\b|\b\d+[uU]?ll\b|\b(?:goto|virtual|typeid|throw|new|delete)\b"
    rf"|\b(?:{'|'.join(_SPACES)})\b(?!\s+(?:const\s+)?(?:{_TYPE})\b)"
)
_POINTER = re.compile(rf"([\w\s]*?)\b(?:{_TYPE})\s*(?:const\s*)?[*&]")
_KERNEL = re.compile(r"\bkernel\s+void\s+(\w+)\s*\(")
_SHARED = re.compile(rf"\bthreadgroup\s+({_TYPE})\s+(\w+\s*\[[^;]*);")


def check_metal(source: str, target: GpuTarget) -> dict[str, KernelResources]:
    """Checks a source without its prelude against the target's limits; each kernel's threadgroup memory.

    Raises ValueError for more threadgroup memory, buffers or threads than the target has, for a pointer or
    reference without an address space, a threadgroup array whose size is no number, and words that Metal
    lacks (`double`, `long long`) or reserves (`thread`). Registers are unknown until the Mac compiles, and
    given as 0. Made for what codegen writes, not for all of MSL.
    """
    text = re.sub(r"//.*|^[ \t]*#.*", "", source, flags=re.MULTILINE)
    for foreign in _FOREIGN.finditer(text):
        line = text.count("\n", 0, foreign.start()) + 1
        raise ValueError(f"`{foreign[0]}` in line {line} does not mean in Metal what it does in C++")
    for pointer in _POINTER.finditer(text):
        if not re.search(rf"\b(?:{'|'.join(_SPACES)})\b", pointer[1]):
            line = text.count("\n", 0, pointer.end()) + 1
            raise ValueError(f"`{pointer[0].strip()}` in line {line} has no address space")
    kernels = {}
    heads = list(_KERNEL.finditer(text))
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        parameters, body = _split(text[head.end() : following.start() if following else len(text)])
        shared = sum(_bytes(kind, names) for kind, names in _SHARED.findall(body))
        threads = re.search(r"max_total_threads_per_threadgroup\((\d+)\)", text[: head.start()][-80:])
        buffers = len(re.findall(r"\[\[\s*buffer\s*\(", parameters))
        for what, has, limit in (
            ("bytes of threadgroup memory", shared, target.static_shared_memory),
            ("buffers", buffers, target.max_buffers),
            ("threads", int(threads[1]) if threads else 0, target.max_threads),
        ):
            if has > limit:
                raise ValueError(f"kernel {head[1]} has {has} {what}; {target} allows {limit}")
        kernels[head[1]] = KernelResources(registers=0, spills=0, stack=0, shared_memory=shared)
    return kernels


def _split(text: str) -> tuple[str, str]:
    """Parameters, up to the parenthesis that closes them, and what follows."""
    depth = 1
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:at], text[at:]
    raise ValueError(f"unbalanced parentheses after `kernel void`: {text[:80]}")


def _bytes(kind: str, declarators: str) -> int:
    """Bytes of `float a[2][3], b[32]`."""
    elements = 0
    for declarator in declarators.split(","):
        sizes = re.findall(r"\[([^\]]*)\]", declarator)
        if not all(size.strip().isdecimal() for size in sizes):
            raise ValueError(f"the size of a threadgroup array is no number: `{declarator.strip()}`")
        elements += math.prod(map(int, sizes))
    return _TYPE_BYTES[kind] * elements
