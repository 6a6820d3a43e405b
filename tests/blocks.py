"""Valid random blocks for tests of decoders, packers and kernels.

They are written from the description in `zllmc.zllm_ir.formats`, so they need no quantizer.
"""

import numpy as np
import numpy.typing as npt

from zllmc.zllm_ir.formats import BlockFormat, Bytes, Field, Float, decode_field, row_bytes

LARGEST = 65504.0  # the largest finite f16; dot products of such weights stay finite in float32


def random_rows(
    fmt: BlockFormat, rows: int, columns: int, rng: np.random.Generator, *, extreme: bool = False
) -> Bytes:
    """Packed rows, uint8 (rows, row_bytes), all weights finite.

    By default codes and sub-scales are uniform, scales have both signs, and weights are O(1 / sqrt(columns)).
    `extreme` puts every number at an end of its range, with scales of magnitude 65504. The rows cycle through
    the combinations: bit 0 of the row's index picks the smallest or largest code, bit 1 the same for the
    sub-scales, bit 2 the sign of the scale; 8 rows see all of them. Sub-minima are always at their largest.
    """
    width = row_bytes(fmt, columns)
    count = rows * (columns // fmt.block)
    if not extreme:
        return _random_blocks(fmt, count, rng, columns**-0.5).reshape(rows, width)
    row = np.arange(count) // max(1, columns // fmt.block)
    return _extreme_blocks(fmt, row).reshape(rows, width)


def _random_blocks(fmt: BlockFormat, n: int, rng: np.random.Generator, magnitude: float) -> Bytes:
    if fmt.plain is not None:
        blocks = np.empty((n, fmt.nbytes), np.uint8)
        write_float(Float(0, fmt.plain), blocks, rng.normal(0, magnitude, n))
        return blocks
    blocks = rng.integers(0, 256, (n, fmt.nbytes), np.uint8)
    for number, factors in (
        (fmt.scale, (fmt.codes, fmt.sub_scales)),
        (fmt.minimum, (fmt.sub_mins,)),
    ):
        if number is not None:
            values = magnitude * rng.uniform(0.5, 1.5, n) * rng.choice((-1, 1), n)
            for field in factors:
                if field is not None:
                    values /= np.sqrt(np.mean(np.square(field_values(field), dtype=float)))
            write_float(number, blocks, values)
    return blocks


def _extreme_blocks(fmt: BlockFormat, row: npt.NDArray[np.int_]) -> Bytes:
    blocks = np.zeros((len(row), fmt.nbytes), np.uint8)
    if fmt.plain is not None:
        write_float(Float(0, fmt.plain), blocks, np.where(row & 1, LARGEST, -LARGEST))
        return blocks
    for field, largest in (
        (fmt.codes, row & 1),
        (fmt.sub_scales, row & 2),
        (fmt.sub_mins, np.ones_like(row)),
    ):
        if field is not None:
            values = field_values(field)
            stored = np.where(largest, values.argmax(), values.argmin())
            write_field(field, blocks, np.broadcast_to(stored[:, None], (len(row), field.count)))
    for number in (fmt.scale, fmt.minimum):
        if number is not None:
            write_float(number, blocks, np.where(row & 4, -LARGEST, LARGEST))
    return blocks


def field_values(field: Field) -> npt.NDArray[np.int16]:
    """The value that each of the 2**bits bit patterns stands for, by pattern."""
    nbytes = 1 + max(address for plane in field.planes for address in plane.at) // 8
    patterns = np.arange(1 << field.bits, dtype=np.uint8)
    blocks = np.zeros((len(patterns), nbytes), np.uint8)
    write_field(field, blocks, np.broadcast_to(patterns[:, None], (len(patterns), field.count)))
    holder = BlockFormat("", ggml_type=-1, block=field.count, nbytes=nbytes)
    return decode_field(holder, field, blocks)[:, 0]


def write_field(field: Field, blocks: Bytes, stored: npt.NDArray[np.integer]) -> None:
    """Put bit patterns (n, count) into blocks (n, nbytes), leaving all other bits alone."""
    low = 0
    for plane in field.planes:
        mask = (1 << plane.bits) - 1
        for i, address in enumerate(plane.at):
            byte, shift = divmod(address, 8)
            part = (stored[:, i].astype(np.int64) >> low) & mask
            blocks[:, byte] = blocks[:, byte] & ~np.uint8(mask << shift) | (part << shift).astype(np.uint8)
        low += plane.bits


def write_float(f: Float, blocks: Bytes, values: npt.NDArray[np.floating]) -> None:
    """Put floats (n,) into blocks (n, nbytes). An exponent-only kind keeps the rounded magnitude."""
    number = np.asarray(values, np.float32)
    match f.kind:
        case "f32":
            stored: npt.NDArray[np.generic] = number.astype("<f4")
        case "f16":
            stored = number.astype("<f2")
        case "bf16":
            bits = number.view(np.uint32)
            stored = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        case "e8m0_half":
            stored = (np.rint(np.log2(np.abs(number))) + 128).astype(np.uint8)
        case _:
            raise ValueError(f"unknown kind of float: {f.kind}")
    blocks[:, f.offset : f.offset + f.nbytes] = stored[:, None].view(np.uint8)
