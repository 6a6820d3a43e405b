"""Checks of Metal sources that need no Metal compiler: an artifact's MSL is first compiled on the Mac."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping

from zllmc.codegen.gpu_toolchain import KernelResources
from zllmc.targets.gpu import GpuTarget

_SPACE = "device|constant|threadgroup|thread"
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
    rf"|\b(?:{_SPACE})\b(?!\s+(?:const\s+)?(?:{_TYPE})\b)"
)
_POINTER = re.compile(rf"([\w\s]*?)\b(?:{_TYPE})\s*(?:const\s*)?[*&]")
_KERNEL = re.compile(r"\bkernel\s+void\s+(\w+)\s*\(")
_SHARED = re.compile(rf"\bthreadgroup\s+({_TYPE})\s+(\w+\s*\[[^;]*);")
_ARRAYS = re.compile(rf"(?:\b({_SPACE})\s+)?\b(?:{_TYPE})\s+(\w+\s*\[(?!\[)[^;=]*)")


def _pointer(space: str) -> str:
    """A pattern of pointer and reference types, whose address space is the group `space`."""
    type = rf"(?:{_TYPE})\s*(?:const\s*)?[*&](?:\s*const\b)?"
    return rf"(?:\bconst\s+)?\b(?P<{space}>{_SPACE})\s+(?:const\s+)?{type}"


_DECLARED = re.compile(rf"{_pointer('space')}\s*(?P<name>\w+)")
_TOKEN = re.compile(
    rf"\(\s*{_pointer('cast')}\s*\)|\w+_cast\s*<\s*{_pointer('named_cast')}\s*>|{_pointer('declared')}"
    r"|\.?\w+|\S"
)


def check_metal(source: str, target: GpuTarget) -> dict[str, KernelResources]:
    """Checks a source without its prelude against the target's limits; each kernel's threadgroup memory.

    Raises ValueError for more threadgroup memory, buffers or threads than the target has, for a pointer or
    reference without an address space or made of one of another space, for parameters other than buffers 0,
    1, … and then positions, for a threadgroup array whose size is no number, and for words that Metal lacks
    (`double`, `long long`) or reserves (`thread`). Registers are unknown until the Mac compiles, and given as
    0. Made for what codegen writes, not for all of MSL.
    """
    text = re.sub(r"//.*|^[ \t]*#.*", "", source, flags=re.MULTILINE)
    for foreign in _FOREIGN.finditer(text):
        line = text.count("\n", 0, foreign.start()) + 1
        raise ValueError(f"`{foreign[0]}` in line {line} does not mean in Metal what it does in C++")
    for pointer in _POINTER.finditer(text):
        if not re.search(rf"\b(?:{_SPACE})\b", pointer[1]):
            line = text.count("\n", 0, pointer.end()) + 1
            raise ValueError(f"`{pointer[0].strip()}` in line {line} has no address space")
    kernels = {}
    heads = list(_KERNEL.finditer(text))
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        end = following.start() if following else len(text)
        parameters, body = _split(text[head.end() : end])
        shared = sum(_bytes(kind, names) for kind, names in _SHARED.findall(body))
        threads = re.search(r"max_total_threads_per_threadgroup\((\d+)\)", text[: head.start()][-80:])
        buffers = _buffers(parameters)
        for what, has, limit in (
            ("bytes of threadgroup memory", shared, target.static_shared_memory),
            ("buffers", buffers, target.max_buffers),
            ("threads", int(threads[1]) if threads else 0, target.max_threads),
        ):
            if has > limit:
                raise ValueError(f"kernel {head[1]} has {has} {what}; {target} allows {limit}")
        spaces = {
            name: space or "thread"
            for space, arrays in _ARRAYS.findall(body)
            for name in re.findall(r"(\w+)\s*\[", arrays)
        }
        spaces |= {pointer["name"]: pointer["space"] for pointer in _DECLARED.finditer(parameters + body)}
        _check_spaces(deque(_TOKEN.finditer(text, end - len(body), end)), spaces)
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


def _buffers(parameters: str) -> int:
    """How many of the parameters are buffers. They come first, in the order of their numbers."""
    count = 0
    for parameter in parameters.split(","):
        pointer = _DECLARED.match(parameter.strip())
        attribute = parameter.partition("[[")[2].rpartition("]]")[0].strip()
        if pointer and pointer["space"] in ("device", "constant") and attribute == f"buffer({count})":
            count += 1
        elif pointer or "position" not in attribute:
            raise ValueError(f"`{parameter.strip()}` is neither buffer {count} nor a position")
    return count


def _check_spaces(tokens: deque[re.Match[str]], spaces: Mapping[str, str], closing: str = "") -> str | None:
    """The address space of the pointer that the tokens up to `closing` make, or None. `spaces`: of names.

    Raises ValueError for a cast, a sum, an assignment or an initializer of pointers of different spaces.
    """
    space = None  # of the expression so far, and of what it is assigned to
    while tokens and (token := tokens[0])[0] != closing:
        if token[0] in ",;{}?:":
            space = None
            tokens.popleft()
        else:
            space = _same(space, _operand(tokens, spaces), token)
    if tokens:
        tokens.popleft()
    return space


def _operand(tokens: deque[re.Match[str]], spaces: Mapping[str, str]) -> str | None:
    """The address space of the next operand, or None if it is no pointer or the next token is an operator."""
    token = tokens.popleft()
    if cast := token["cast"] or token["named_cast"]:
        return _same(cast, _operand(tokens, spaces), token)
    space = _check_spaces(tokens, spaces, ")") if token[0] == "(" else spaces.get(token[0])
    while tokens and tokens[0][0] in "([" and (space or token[0][-1].isalnum()):  # an element, or a call
        _check_spaces(tokens, spaces, {"(": ")", "[": "]"}[tokens.popleft()[0]])
        space = None
    return space


def _same(space: str | None, other: str | None, token: re.Match[str]) -> str | None:
    if space and other and space != other:
        line = token.string.count("\n", 0, token.start()) + 1
        raise ValueError(f"`{token[0]}` in line {line} mixes pointers to {space} and {other} memory")
    return space or other


def _bytes(kind: str, declarators: str) -> int:
    """Bytes of `float a[2][3], b[32]`."""
    elements = 0
    for declarator in declarators.split(","):
        sizes = re.findall(r"\[([^\]]*)\]", declarator)
        if not all(size.strip().isdecimal() for size in sizes):
            raise ValueError(f"the size of a threadgroup array is no number: `{declarator.strip()}`")
        elements += math.prod(map(int, sizes))
    return _TYPE_BYTES[kind] * elements
