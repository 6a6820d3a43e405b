"""Valid random blocks for tests of decoders, packers and kernels.

They are written from the description in `zllmc.zllm_ir.formats`, so they need no quantizer.
"""

import numpy as np
import numpy.typing as npt

from zllmc.zllm_ir.block_format import BlockFormat, Field, Float, Grid, Plane, Trits
from zllmc.zllm_ir.formats import FORMATS, Bytes, decode_codes, decode_field, decode_float, row_bytes
from zllmc.zllm_ir.grids import book

LARGEST = 65504.0  # the largest finite f16; dot products of such weights stay finite in float32


def covering_formats() -> list[str]:
    """A few formats that have among them all that a description of blocks can say: what differs between the
    others is only which bits lie where, which one target proves for all."""
    wanted = {name: _features(fmt) for name, fmt in FORMATS.items()}
    left, chosen = set().union(*wanted.values()), []
    while left:
        chosen.append(max(wanted, key=lambda name: len(wanted[name] & left)))
        left -= wanted[chosen[-1]]
    return chosen


def _features(fmt: BlockFormat) -> set[tuple[object, ...]]:
    codes, scale, sub_scales = fmt.codes, fmt.scale, fmt.sub_scales
    return {
        ("block", fmt.block),
        ("plain", fmt.plain),
        ("codes", type(codes)),
        ("minimum", fmt.minimum is not None),
        ("scale", scale and (scale.kind, scale.count > 1, scale.nibbles is not None)),
        ("sub-scales", sub_scales and (sub_scales.count, sub_scales.signed)),
        ("sub-minima", fmt.sub_mins is not None),
        *((name, getattr(codes, name, None) is not None) for name in ("table", "signs", "shift")),
        *((name, getattr(codes, name, None)) for name in ("bits", "signed")),
        ("planes", len(getattr(codes, "planes", ()))),
    }


def random_rows(
    fmt: BlockFormat, rows: int, columns: int, rng: np.random.Generator, *, extreme: bool = False
) -> Bytes:
    """Packed rows, uint8 (rows, row_bytes), all weights finite.

    By default codes and sub-scales are uniform, scales have both signs, and weights are O(1 / sqrt(columns)).
    `extreme` puts every number at an end of its range, with scales of magnitude 65504 (or their kind's
    largest). The rows cycle through the combinations: bit 0 of the row's index picks the smallest or largest
    code (of a grid: a vector that has it, with equal signs), bit 1 the same for the sub-scales,
    bit 2 the sign of the scale; 8 rows see all of them. Sub-minima are always at their largest.
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
    for number, values_of in (
        (fmt.scale, (decode_codes(fmt, blocks), _values(fmt.sub_scales))),
        (fmt.minimum, (_values(fmt.sub_mins),)),
    ):
        if number is not None:
            values = magnitude * rng.uniform(0.5, 1.5, n) * rng.choice((-1, 1), n)
            for factor in values_of:
                values /= np.sqrt(np.mean(np.square(factor, dtype=float)))
            write_float(number, blocks, values)
    return blocks


def _values(field: Field | None) -> npt.NDArray[np.int16]:
    return np.ones(1, np.int16) if field is None else field_values(field)


def _extreme_blocks(fmt: BlockFormat, row: npt.NDArray[np.int_]) -> Bytes:
    blocks = np.zeros((len(row), fmt.nbytes), np.uint8)
    if fmt.plain is not None:
        write_float(Float(0, fmt.plain), blocks, np.where(row & 1, LARGEST, -LARGEST))
        return blocks
    largest_code = row & 1
    match fmt.codes:
        case Field():
            _write_ends(fmt.codes, blocks, largest_code)
        case Grid(index=index, signs=signs, shift=shift):
            digits = book(fmt.codes.book).astype(int)
            size = 100 * digits.max(axis=1) + digits.sum(axis=1)
            stored = np.where(largest_code | (signs is not None), size.argmax(), size.argmin())
            write_field(index, blocks, np.broadcast_to(stored[:, None], (len(row), index.count)))
            for field in (Field((signs,)) if signs else None, shift):  # both make a code smaller
                if field is not None:
                    _write_ends(field, blocks, 1 - largest_code)
        case Trits():
            blocks[:, list(set(fmt.codes.byte))] = np.where(largest_code, 255, 0)[:, None]
    for field, largest in ((fmt.sub_scales, row & 2), (fmt.sub_mins, np.ones_like(row))):
        if field is not None:
            _write_ends(field, blocks, largest)
    for number in (fmt.scale, fmt.minimum):
        if number is not None:
            write_float(number, blocks, np.where(row & 4, -LARGEST, LARGEST))
    return blocks


def _write_ends(field: Field, blocks: Bytes, largest: npt.NDArray[np.integer]) -> None:
    """The largest value, or the smallest, in every element of the field."""
    values = field_values(field)
    stored = np.where(largest, values.argmax(), values.argmin())
    write_field(field, blocks, np.broadcast_to(stored[:, None], (len(blocks), field.count)))


def field_values(field: Field) -> npt.NDArray[np.int16]:
    """The value that each of the 2**bits bit patterns stands for, by pattern."""
    nbytes = 1 + max(address for plane in field.planes for address in plane.at) // 8
    patterns = np.arange(1 << field.bits)
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
    """Put floats (n,) into blocks (n, nbytes), each into all `f.count` places. A kind without a sign keeps
    the rounded magnitude."""
    number = (np.asarray(values) / f.factor).astype(np.float32)
    match f.kind:
        case "f32":
            stored: npt.NDArray[np.generic] = number.astype("<f4")
        case "f16":
            stored = np.clip(number, -LARGEST, LARGEST).astype("<f2")
        case "bf16":
            bits = number.view(np.uint32)
            stored = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        case "e8m0_half":
            stored = (np.rint(np.log2(np.abs(number))) + 128).astype(np.uint8)
        case "ue4m3_half":
            known = decode_float(Float(0, f.kind), np.arange(0x7F, dtype=np.uint8)[:, None])[:, 0]
            stored = np.abs(np.abs(number)[:, None] - known).argmin(axis=1).astype(np.uint8)
        case _:
            raise ValueError(f"unknown kind of float: {f.kind}")
    raw = stored[:, None].view(np.uint8)
    if f.nibbles is None:
        blocks[:, f.offset : f.offset + f.count * f.nbytes] = np.tile(raw, f.count)
    else:
        nibbles = np.stack([raw & 15, raw >> 4], axis=2).reshape(len(raw), -1)
        write_field(Field((Plane(4, f.nibbles),)), blocks, nibbles)
