"""How the CPU keeps a weight matrix: the block format's own bits, with rows interleaved for the vector unit.

A group of `lanes` rows is stored together, so that one vector register holds the same few columns of every
row and a dot product needs no horizontal sum:

    group g:  for each block: [scales][codes]; padded to 64 bytes. What is read together lies in one run,
              which memory delivers faster than two.
    codes:    units of 32 columns; each unit: for each plane of `bits` bits, `bits` vectors of 4·lanes bytes.
              Byte 4·r + j of the vector of step s is column 4·s + j of row r, and step s of the unit's 8
              lies in vector s % bits, at bit (s // bits) · bits. For 32 lanes, up to four vectors lie row by
              row: 16 bytes of a row at a time.
              A grid's signs are a plane of 1 bit. Its indices come before: [index of the unit][lanes] low
              bytes, then [lanes] u8 or u16 with the bits above 8 of all of the unit's indices, the first
              index lowest; a shift is one more bit above its index's.
    scales:   sub-scales i8, sub-mins u8, scales d [count][lanes] and minimum [lanes] in the format's own kind
              of float. Sub-scales of 32 columns: [unit][lanes]; of 16 columns: pairs [unit][lanes][2].

Plain floats are stored as [column][lanes] in their own width. Rows are padded with zeros to a multiple of 16.
The size is that of the GGUF, but for what is not worth its unpacking: sub-scales take a byte each, all 8
signs of a grid's vector are stored (1/8 bit per weight more where the GGUF has 7), and ternary digits 2 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zllmc.zllm_ir.block_format import BlockFormat, Field, Float, Grid, Trits
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.formats import FORMATS, decode_codes, decode_field, decode_signs, float_bytes
from zllmc.zllm_ir.kernel_graph import KernelCall

ROW_PAD = 16
UNIT = 32  # columns that share one activation scale
STEPS = 8  # of 4 columns in a unit
SCALE_KINDS = ("f16", "e8m0_half", "ue4m3_half")
_PLAIN = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class PackedLayout:
    """Offsets of one packed matrix of (rows, columns) in `format` for `lanes` rows per vector; bytes."""

    format: BlockFormat
    rows: int
    columns: int
    lanes: int

    def __post_init__(self) -> None:
        fmt = self.format
        if fmt.plain is None:
            # This is the shape of every format that the kernels can unpack; a new one must say so here.
            if fmt.block % UNIT or fmt.sub_block not in (16, 32, fmt.block):
                raise ZllmcError(f"no CPU kernel for {fmt.name}: blocks of {fmt.block}/{fmt.sub_block}")
            if fmt.scale is None or fmt.scale.kind not in SCALE_KINDS:
                kind, known = fmt.scale and fmt.scale.kind, " or ".join(SCALE_KINDS)
                raise ZllmcError(f"no CPU kernel for {fmt.name}: its scale is {kind}, not {known}")
            if fmt.scale.count > 1 and (fmt.sub_block != UNIT // 2 or fmt.sub_scales or fmt.minimum):
                raise ZllmcError(f"no CPU kernel for {fmt.name}: several scales of {fmt.sub_block} columns")
        if self.columns % max(fmt.block, 1):
            raise ZllmcError(f"{fmt.name}: {self.columns} columns are no multiple of {fmt.block}")

    @property
    def run(self) -> int:
        """Vectors of a plane whose bytes of one row lie side by side, if it has as many: a GPU's lane loads
        16 bytes at once."""
        return 4 if self.lanes == 32 else 1

    @property
    def row_pad(self) -> int:
        """Rows are packed in multiples of this."""
        return max(ROW_PAD, self.lanes)

    @property
    def padded_rows(self) -> int:
        return -(-self.rows // self.row_pad) * self.row_pad

    @property
    def groups(self) -> int:
        return self.padded_rows // self.lanes

    @property
    def codes(self) -> Field | Grid | Trits:
        if self.format.codes is None:
            raise ZllmcError(f"{self.format.name} has no codes")
        return self.format.codes

    @property
    def plane_bits(self) -> tuple[int, ...]:
        match self.codes:
            case Field(planes=planes):
                return tuple(plane.bits for plane in planes)
            case Grid(signs=signs):
                return () if signs is None else (1,)
            case Trits():
                return (2,)

    @property
    def indices(self) -> int:
        """Grid indices of a row's unit (0 without)."""
        return self.codes.index.count * UNIT // self.format.block if isinstance(self.codes, Grid) else 0

    @property
    def high_bits(self) -> int:
        """Bits of an index, and of its shift, above the lowest 8."""
        codes = self.codes
        return codes.index.bits - 8 + (codes.shift is not None) if isinstance(codes, Grid) else 0

    @property
    def high_bytes(self) -> int:
        """Bytes that hold these bits for all indices of a row's unit."""
        return -(-self.indices * self.high_bits // 8)

    @property
    def planes_offset(self) -> int:
        """Of the planes within a unit."""
        return (self.indices + self.high_bytes) * self.lanes

    @property
    def unit_bytes(self) -> int:
        """Code bytes of one unit of a group."""
        return self.planes_offset + sum(self.plane_bits) * 4 * self.lanes

    @property
    def units(self) -> int:
        """Of a block."""
        return self.format.block // UNIT

    @property
    def subs(self) -> int:
        """Sub-scales of a block (0 without)."""
        return 0 if self.format.sub_scales is None else self.format.sub_scales.count

    @property
    def sub_mins(self) -> int:
        return 0 if self.format.sub_mins is None else self.format.sub_mins.count

    @property
    def unit_subs(self) -> int:
        """Of a unit, those with sub-scales of their own."""
        return UNIT // min(self.format.sub_block, UNIT)

    @property
    def parts(self) -> int:
        """Of a unit, those whose scales are floats of the block: its halves, or all of it."""
        return 2 if self.format.scale is not None and self.format.scale.count > 1 else 1

    @property
    def scale_offset(self) -> int:
        """Of the block's scale within its scale record."""
        return (self.subs + self.sub_mins) * self.lanes

    @property
    def minimum_offset(self) -> int:
        """Of the block's minimum within its scale record."""
        scale = self.format.scale
        return self.scale_offset + (scale.count * scale.nbytes * self.lanes if scale else 0)

    @property
    def block_scale_bytes(self) -> int:
        """Bytes of a block's scales, which come before its codes."""
        return self.minimum_offset + (self.format.minimum.nbytes * self.lanes if self.format.minimum else 0)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of all rows in a group; of a column of plain floats."""
        if self.format.plain is not None:
            return self.lanes * _PLAIN[self.format.plain]
        return self.block_scale_bytes + self.units * self.unit_bytes

    def codes_at(self, unit: Any) -> Any:
        """The byte of a group where the codes of this unit of columns begin."""
        inside = self.block_scale_bytes + unit % self.units * self.unit_bytes
        return unit // self.units * self.block_bytes + inside

    @property
    def group_bytes(self) -> int:
        return -(-(self.columns // self.format.block * self.block_bytes) // 64) * 64

    @property
    def nbytes(self) -> int:
        return self.groups * self.group_bytes


def pack_rows(layout: PackedLayout, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack consecutive rows (n, row bytes); n is padded to `row_pad`. Returns (groups, group_bytes) u8.

    This is the reference of `pack_kernel`, which is some hundred times as fast.
    """
    fmt, lanes = layout.format, layout.lanes
    rows = -(-len(raw) // layout.row_pad) * layout.row_pad
    if rows != len(raw):
        raw = np.concatenate([raw, np.zeros((rows - len(raw), raw.shape[1]), np.uint8)])
    groups = rows // lanes
    out = np.zeros((groups, layout.group_bytes), np.uint8)
    if fmt.plain is not None:
        width = _PLAIN[fmt.plain]
        elements = raw.reshape(groups, lanes, layout.columns, width).transpose(0, 2, 1, 3)
        packed = elements.reshape(groups, -1)
    else:
        blocks = np.ascontiguousarray(raw).reshape(-1, fmt.nbytes)
        scales, codes = _pack_scales(layout, blocks, groups), _pack_codes(layout, blocks, groups)
        packed = np.concatenate([scales, codes], axis=2).reshape(groups, -1)
    out[:, : packed.shape[1]] = packed
    return out


def _pack_codes(layout: PackedLayout, blocks: NDArray[np.uint8], groups: int) -> NDArray[np.uint8]:
    """(groups, blocks of a row, bytes)."""
    fmt, codes = layout.format, layout.codes
    match codes:
        case Field():
            parts = [
                _interleave(layout, decode_field(fmt, Field((plane,)), blocks), plane.bits, groups)
                for plane in codes.planes
            ]
        case Grid():
            parts = _pack_indices(layout, codes, blocks, groups)
            if codes.signs is not None:
                parts.append(_interleave(layout, decode_signs(fmt, codes.signs, blocks), 1, groups))
        case Trits():
            parts = [_interleave(layout, decode_codes(fmt, blocks) + codes.zero, 2, groups)]
    return np.concatenate(parts, axis=2).reshape(groups, layout.columns // fmt.block, -1)


def _interleave(layout: PackedLayout, values: NDArray[Any], bits: int, groups: int) -> NDArray[np.uint8]:
    """One plane: values of every block, (n, block), to (groups, units, bytes)."""
    lanes, units = layout.lanes, layout.columns // UNIT
    # (group, row, unit, high, vector, column of 4): step = high · bits + vector
    steps = values.astype(np.uint8).reshape(groups, lanes, units, STEPS // bits, bits, 4)
    packed = steps[:, :, :, 0].copy()
    for high in range(1, STEPS // bits):
        packed |= steps[:, :, :, high] << (high * bits)
    run = min(layout.run, bits)
    runs = packed.reshape(groups, lanes, units, bits // run, run, 4)
    return runs.transpose(0, 2, 3, 1, 4, 5).reshape(groups, units, -1)


def _pack_indices(
    layout: PackedLayout, codes: Grid, blocks: NDArray[np.uint8], groups: int
) -> list[NDArray[np.uint8]]:
    """The low bytes of a grid's indices, and the rest of their bits; each (groups, units, bytes)."""
    lanes, units, indices = layout.lanes, layout.columns // UNIT, layout.indices
    stored = decode_field(layout.format, codes.index, blocks)
    if codes.shift is not None:
        shift = decode_field(layout.format, codes.shift, blocks) != 0
        stored |= np.repeat(shift, codes.index.count // codes.shift.count, axis=1) * np.int16(
            1 << codes.index.bits
        )
    rows = stored.view(np.uint16).reshape(groups, lanes, units, indices)
    parts = [rows.astype(np.uint8).transpose(0, 2, 3, 1).reshape(groups, units, -1)]
    if layout.high_bytes:
        shifts = np.arange(indices, dtype=np.uint16) * np.uint16(layout.high_bits)
        high = np.bitwise_or.reduce(rows >> 8 << shifts, axis=3).astype(f"<u{layout.high_bytes}")
        parts.append(np.ascontiguousarray(high.transpose(0, 2, 1)).view(np.uint8))
    return parts


def _pack_scales(layout: PackedLayout, blocks: NDArray[np.uint8], groups: int) -> NDArray[np.uint8]:
    """(groups, blocks of a row, bytes)."""
    fmt, lanes = layout.format, layout.lanes
    per_row = layout.columns // fmt.block
    parts = []
    for field in (fmt.sub_scales, fmt.sub_mins):
        if field is None:
            continue
        values = decode_field(fmt, field, blocks).astype(np.int8).view(np.uint8)
        pair = UNIT // fmt.sub_block
        units = values.reshape(groups, lanes, per_row, field.count // pair, pair)
        parts.append(units.transpose(0, 2, 3, 1, 4).reshape(groups, per_row, -1))
    for number in (fmt.scale, fmt.minimum):
        if number is not None:
            raw = _float_bytes(number, blocks).reshape(groups, lanes, per_row, number.count, number.nbytes)
            parts.append(raw.transpose(0, 2, 3, 1, 4).reshape(groups, per_row, -1))
    return np.concatenate(parts, axis=2)


def _float_bytes(number: Float, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    raw = float_bytes(number, blocks)
    if number.kind == "ue4m3_half":  # the kernels leave out the exceptions
        return np.where(raw == 0x7F, 0, raw & 0x7F).astype(np.uint8)
    return raw


def layout_of(format: str, shape: tuple[int, ...], lanes: int) -> PackedLayout:
    """The layout of a weight matrix; an error that names the format where no kernel can read it."""
    if format not in FORMATS:
        raise ZllmcError(f"no CPU kernel for {format}: supported are {', '.join(FORMATS)}")
    rows, columns = shape
    return PackedLayout(FORMATS[format], rows, columns, lanes)


def pack_call(format: str, lanes: int) -> KernelCall:
    """The call that packs matrices of any size in `format` for a target with `lanes` lanes."""
    return KernelCall("pack", (("format", format), ("lanes", lanes)), (), ())
