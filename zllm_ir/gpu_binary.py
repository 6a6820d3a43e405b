"""What GPU binaries say of their kernels. Cubins and AMD's code objects are ELF files.

Cubins: each kernel has a section `.nv.info.NAME` of attributes, which NVIDIA documents only by what
`cuobjdump -elf` prints of them: EIATTR_CBANK_PARAM_SIZE is the size of the kernel's parameters. Code objects:
LLVM, "User Guide for AMDGPU Backend", sections "ELF Code Object" and "Code Object V5 Metadata".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

_WITH_DATA, _PARAMETER_BYTES = 4, 0x19  # a form of attribute, and the attribute EIATTR_CBANK_PARAM_SIZE
_AMDGPU_METADATA = 32  # the type of a note


def parameters(code: bytes) -> dict[str, int]:
    """How many pointers each kernel takes. Kernels that are not described, as in PTX, are left out."""
    counts: dict[str, int] = {}
    for name, section in _sections(code):
        if name.startswith(".nv.info."):
            for attribute, value in _attributes(section):
                if attribute == _PARAMETER_BYTES:
                    counts[name.removeprefix(".nv.info.")] = value // 8
        elif name == ".note":
            for kernel in code_object_metadata(code)["amdhsa.kernels"]:
                kinds = [argument[".value_kind"] for argument in kernel.get(".args", ())]
                counts[kernel[".name"]] = sum(not kind.startswith("hidden_") for kind in kinds)
    return counts


def code_object_metadata(code: bytes) -> dict[str, Any]:
    """The metadata of a code object. Raises ValueError where there is none."""
    for name, section in _sections(code):
        at = 0
        while name == ".note" and at + 12 <= len(section):
            owner_size, size, kind = struct.unpack_from("<III", section, at)
            data = at + 12 + (owner_size + 3) // 4 * 4
            if kind == _AMDGPU_METADATA and section[at + 12 : at + 19] == b"AMDGPU\0":
                return msgspec.msgpack.decode(section[data : data + size], type=dict[str, Any])
            at = data + (size + 3) // 4 * 4
    raise ValueError("a code object without metadata")


def _sections(code: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of an ELF64's sections; of what is no such file, none."""
    if code[:5] != b"\x7fELF\x02":
        return
    (headers,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    sections = []
    for header in range(headers, headers + size * count, size):
        (name,) = struct.unpack_from("<I", code, header)
        offset, length = struct.unpack_from("<QQ", code, header + 0x18)
        sections.append((name, code[offset : offset + length]))
    texts = sections[names][1]
    for name, section in sections:
        yield texts[name : texts.index(b"\0", name)].decode(), section


def _attributes(section: bytes) -> Iterator[tuple[int, int]]:
    """Numbers and values of a cubin's attributes; an attribute with data has its size for a value."""
    at = 0
    while at + 4 <= len(section):
        form, attribute, value = struct.unpack_from("<BBH", section, at)
        yield attribute, value
        at += 4 + (value if form == _WITH_DATA else 0)
