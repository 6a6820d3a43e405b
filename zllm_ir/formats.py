"""The block formats by name, and their decoder to float32: the meaning that all kernels must keep."""

import numpy as np
import numpy.typing as npt

from zllmc.zllm_ir.block_format import BlockFormat, Field, Float, Grid, Plane, Trits
from zllmc.zllm_ir.format_table import ALL_FORMATS
from zllmc.zllm_ir.grids import book

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int16]

FORMATS: dict[str, BlockFormat] = {fmt.name: fmt for fmt in ALL_FORMATS}
BY_GGML_TYPE: dict[int, BlockFormat] = {fmt.ggml_type: fmt for fmt in ALL_FORMATS}


def row_bytes(fmt: BlockFormat, columns: int) -> int:
    """Bytes of a row of `columns` elements; ValueError unless they fill whole blocks."""
    if columns < 0 or columns % fmt.block:
        raise ValueError(
            f"a {fmt.name} row of {columns} elements: not a multiple of its block of {fmt.block}"
        )
    return columns // fmt.block * fmt.nbytes


# Elements decoded at a time: the temporaries stay within the processor's caches and a few megabytes.
_CHUNK = 1 << 17


def decode(fmt: BlockFormat, raw: Bytes) -> Floats:
    """Packed bytes (..., blocks * nbytes), uint8, to float32 (..., blocks * block).

    Temporary memory does not grow with `raw` (apart from a copy when `raw` is not contiguous). ValueError
    when the bytes are not uint8 or do not form whole blocks.
    """
    if raw.dtype != np.uint8 or raw.ndim == 0:
        raise ValueError(f"{fmt.name} blocks come as an array of uint8, not {raw.dtype} of shape {raw.shape}")
    count, rest = divmod(raw.shape[-1], fmt.nbytes)
    if rest:
        raise ValueError(f"{raw.shape[-1]} bytes are not whole {fmt.name} blocks of {fmt.nbytes}")
    blocks = raw.reshape(-1, fmt.nbytes)
    weights = np.empty((len(blocks), fmt.block), np.float32)
    step = max(1, _CHUNK // fmt.block)
    with np.errstate(invalid="ignore", over="ignore"):  # scales may be infinite or NaN
        for start in range(0, len(blocks), step):
            _decode_blocks(fmt, blocks[start : start + step], weights[start : start + step])
    return weights.reshape(*raw.shape[:-1], count * fmt.block)


def _decode_blocks(fmt: BlockFormat, blocks: Bytes, out: Floats) -> None:
    """Blocks (n, nbytes) into `out` (n, block), contiguous."""
    if fmt.plain is not None:
        out[:] = decode_float(Float(0, fmt.plain), blocks)
        return
    if fmt.scale is None:
        raise ValueError(f"the description of {fmt.name} has neither plain floats nor codes with a scale")
    scales = decode_float(fmt.scale, blocks)
    if fmt.sub_scales is not None:
        scales = scales * decode_field(fmt, fmt.sub_scales, blocks).astype(np.float32)
    by_scale = out.reshape(len(out), -1, fmt.sub_block)
    by_scale[...] = decode_codes(fmt, blocks).reshape(by_scale.shape)
    by_scale *= scales[..., None]
    if fmt.minimum is not None:
        minima = decode_float(fmt.minimum, blocks)
        if fmt.sub_mins is not None:
            minima = minima * decode_field(fmt, fmt.sub_mins, blocks).astype(np.float32)
        by_scale += np.float32(fmt.min_sign) * minima[..., None]


def decode_codes(fmt: BlockFormat, raw_blocks: Bytes) -> Integers:
    """The codes of every block, uint8 (n, nbytes) to int16 (n, block)."""
    match fmt.codes:
        case Field():
            return decode_field(fmt, fmt.codes, raw_blocks)
        case Grid(index=index, zero=zero):
            vectors = np.array(fmt.codes.values, np.int16)[book(fmt.codes.book)] - np.int16(zero)
            codes = vectors[decode_field(fmt, index, raw_blocks)].reshape(len(raw_blocks), fmt.block)
            if fmt.codes.shift is not None:
                shift = decode_field(fmt, fmt.codes.shift, raw_blocks)
                codes.reshape(*shift.shape, -1)[...] -= shift[..., None]
            if fmt.codes.signs is not None:
                np.negative(codes, out=codes, where=decode_signs(fmt, fmt.codes.signs, raw_blocks) != 0)
            return codes
        case Trits(byte=byte, digit=digit, zero=zero):
            # Multiplied by 3**digit, a byte has lost the digits before; 3 times it has the next one on top.
            rest = raw_blocks[:, byte] * (3 ** np.array(digit)).astype(np.uint8)
            return (3 * rest.astype(np.int16) >> 8) - np.int16(zero)
    raise ValueError(f"the description of {fmt.name} has no codes")


def decode_signs(fmt: BlockFormat, signs: Plane, raw_blocks: Bytes) -> Bytes:
    """The sign bits of a grid's codes, with those that only parity gives: uint8 (n, block), 1 for minus."""
    stored = decode_field(fmt, Field((signs,)), raw_blocks).astype(np.uint8)
    if len(signs.at) == fmt.block:
        return stored
    sevens = stored.reshape(len(stored), -1, 7)
    parity = np.bitwise_xor.reduce(sevens, axis=-1, keepdims=True)
    return np.concatenate([sevens, parity], axis=-1).reshape(len(stored), fmt.block)


def decode_field(fmt: BlockFormat, field: Field, raw_blocks: Bytes) -> Integers:
    """The integers of a field of `fmt`: blocks (n, nbytes), uint8, to int16 (n, field.count)."""
    if raw_blocks.ndim != 2 or raw_blocks.shape[1] != fmt.nbytes:
        raise ValueError(f"{fmt.name} blocks have shape (n, {fmt.nbytes}), not {raw_blocks.shape}")
    stored = np.zeros((len(raw_blocks), field.count), np.uint8 if field.bits <= 8 else np.uint16)
    low = 0
    for plane in field.planes:
        address = np.array(plane.at)
        part = np.take(raw_blocks, address // 8, axis=1)
        part >>= (address % 8).astype(np.uint8)
        part &= np.uint8((1 << plane.bits) - 1)
        stored |= np.left_shift(part, low, dtype=stored.dtype)
        low += plane.bits
    if field.table is not None:
        return np.take(np.array(field.table, np.int16), stored)
    zero = field.zero
    if field.signed:  # flipping the sign bit of a two's complement number adds half its range
        half = 1 << (field.bits - 1)
        stored ^= stored.dtype.type(half)
        zero += half
    return stored.astype(np.int16) * np.int16(field.step) - np.int16(zero)


def decode_float(f: Float, raw_blocks: Bytes) -> Floats:
    """The floats that `f` describes, of every block: uint8 (n, nbytes) to float32 (n, f.count)."""
    stored = float_bytes(f, raw_blocks)
    match f.kind:
        case "f32":
            number = stored.view("<f4").astype(np.float32)
        case "f16":
            number = stored.view("<f2").astype(np.float32)
        case "bf16":
            number = (stored.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        case "e8m0_half":
            number = np.ldexp(np.float32(1), stored.astype(np.int32) - 128)
        case "ue4m3_half":
            # The same exponent and mantissa fields as f16's, with a bias of 7 instead of 15.
            as_f16 = np.where(stored == 0x7F, 0, stored & 0x7F).astype("<u2") << 7
            number = as_f16.view("<f2").astype(np.float32) * np.float32(2**8 / 2)
        case _:
            raise ValueError(f"unknown kind of float: {f.kind}")
    return number if f.factor == 1 else number * np.float32(f.factor)


def float_bytes(f: Float, raw_blocks: Bytes) -> Bytes:
    """The bytes of `f` in every block, put together: uint8 (n, f.count * f.nbytes)."""
    if f.nibbles is None:
        return np.ascontiguousarray(raw_blocks[:, f.offset : f.offset + f.count * f.nbytes])
    address = np.array(f.nibbles)
    parts = raw_blocks[:, address // 8] >> (address % 8).astype(np.uint8) & np.uint8(15)
    return np.ascontiguousarray(parts[:, ::2] | parts[:, 1::2] << np.uint8(4))
