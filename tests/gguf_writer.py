"""Builds GGUF files from raw pieces, so that tests can make valid files and any invalid one."""

import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "?",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return u64(len(raw)) + raw


def scalar(kind, value):
    return string(value) if kind == STRING else struct.pack("<" + CODES[kind], value)


def array(kind, items):
    """The payload of an array; nested arrays are given as payloads already."""
    payloads = items if kind == ARRAY else [scalar(kind, item) for item in items]
    return u32(kind) + u64(len(items)) + b"".join(payloads)


def key(name, kind, payload):
    return string(name) + u32(kind) + payload


def tensor_info(name, ne, type_id, offset):
    return string(name) + u32(len(ne)) + b"".join(map(u64, ne)) + u32(type_id) + u64(offset)


def model(keys=(), infos=(), data=b"", *, alignment=32, version=3, key_count=None, tensor_count=None):
    """A whole file: header, padding to the alignment, data. The counts can be made to lie."""
    header = b"GGUF" + u32(version)
    header += u64(len(infos) if tensor_count is None else tensor_count)
    header += u64(len(keys) if key_count is None else key_count)
    header += b"".join(keys) + b"".join(infos)
    return header + bytes(-len(header) % alignment) + data


def model_of(tensors, keys=(), *, alignment=32, version=3):
    """A valid file that holds `tensors`: (name, ne, type id, bytes) each."""
    if alignment != 32:
        keys = [*keys, key("general.alignment", U32, u32(alignment))]
    infos, data = [], b""
    for name, ne, type_id, raw in tensors:
        data += bytes(-len(data) % alignment)
        infos.append(tensor_info(name, ne, type_id, len(data)))
        data += raw
    return model(keys, infos, data, alignment=alignment, version=version)
