"""How the CPU keeps a weight matrix: the block format's own bits, with rows interleaved for the vector unit.

A group of `lanes` rows is stored together, so that one vector register holds the same few columns of every
row and a dot product needs no horizontal sum:

    group g:  [codes][scales], padded to 64 bytes
    codes:    units of 32 columns; each unit: for each plane of `bits` bits, `bits` vectors of 4·lanes bytes.
              Byte 4·r + j of the vector of step s is column 4·s + j of row r, and step s of the unit's 8
              lies in vector s % bits, at bit (s // bits) · bits.
    scales:   for each block: sub-scales i8, sub-mins u8, scale d f16 [lanes], minimum f16 [lanes].
              Sub-scales of 32 columns: [unit][lanes]; of 16 columns: pairs [unit][lanes][2].

Plain floats are stored as [column][lanes] in their own width. Rows are padded with zeros to a multiple of 16.
The size is that of the GGUF, but for the 6-bit (4-bit) sub-scales of K formats, which take a byte each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.formats import FORMATS, BlockFormat, Field, decode_field

ROW_PAD = 16
UNIT = 32  # columns that share one activation scale
STEPS = 8  # of 4 columns in a unit
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
            if fmt.scale is None or fmt.scale.kind != "f16":
                raise ZllmcError(f"no CPU kernel for {fmt.name}: its scale is no f16")
        if self.columns % max(fmt.block, 1):
            raise ZllmcError(f"{fmt.name}: {self.columns} columns are no multiple of {fmt.block}")

    @property
    def padded_rows(self) -> int:
        return -(-self.rows // ROW_PAD) * ROW_PAD

    @property
    def groups(self) -> int:
        return self.padded_rows // self.lanes

    @property
    def plane_bits(self) -> tuple[int, ...]:
        return () if self.format.codes is None else tuple(p.bits for p in self.format.codes.planes)

    @property
    def unit_bytes(self) -> int:
        """Code bytes of one unit of a group."""
        return sum(self.plane_bits) * 4 * self.lanes

    @property
    def code_bytes(self) -> int:
        if self.format.plain is not None:
            return self.columns * self.lanes * _PLAIN[self.format.plain]
        return self.columns // UNIT * self.unit_bytes

    @property
    def subs(self) -> int:
        """Sub-scales of a block (0 without)."""
        return 0 if self.format.sub_scales is None else self.format.sub_scales.count

    @property
    def sub_mins(self) -> int:
        return 0 if self.format.sub_mins is None else self.format.sub_mins.count

    @property
    def minimum_offset(self) -> int:
        """Of the block's minimum within its scale record; the scale is one vector of f16 before it."""
        return (self.subs + self.sub_mins) * self.lanes + 2 * self.lanes

    @property
    def block_scale_bytes(self) -> int:
        """Bytes of a block's scale record."""
        return self.minimum_offset + (2 * self.lanes if self.format.minimum else 0)

    @property
    def group_bytes(self) -> int:
        scales = 0 if self.format.plain else self.columns // self.format.block * self.block_scale_bytes
        return -(-(self.code_bytes + scales) // 64) * 64

    @property
    def nbytes(self) -> int:
        return self.groups * self.group_bytes


def pack_rows(layout: PackedLayout, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack consecutive rows (n, row bytes); n is padded to ROW_PAD. Returns (groups, group_bytes) u8."""
    fmt, lanes = layout.format, layout.lanes
    rows = -(-len(raw) // ROW_PAD) * ROW_PAD
    if rows != len(raw):
        raw = np.concatenate([raw, np.zeros((rows - len(raw), raw.shape[1]), np.uint8)])
    groups = rows // lanes
    out = np.zeros((groups, layout.group_bytes), np.uint8)
    if fmt.plain is not None:
        width = _PLAIN[fmt.plain]
        elements = raw.reshape(groups, lanes, layout.columns, width).transpose(0, 2, 1, 3)
        out[:, : layout.code_bytes] = elements.reshape(groups, -1)
        return out
    blocks = np.ascontiguousarray(raw).reshape(-1, fmt.nbytes)
    out[:, : layout.code_bytes] = _pack_codes(layout, blocks, groups)
    scales = _pack_scales(layout, blocks, groups)
    out[:, layout.code_bytes : layout.code_bytes + scales.shape[1]] = scales
    return out


def _pack_codes(layout: PackedLayout, blocks: NDArray[np.uint8], groups: int) -> NDArray[np.uint8]:
    codes = layout.format.codes
    if codes is None:
        raise ZllmcError(f"{layout.format.name} has no codes")
    lanes, units = layout.lanes, layout.columns // UNIT
    planes = []
    for plane in codes.planes:
        bits = plane.bits
        values = decode_field(layout.format, Field((plane,)), blocks).astype(np.uint8)
        # (group, row, unit, high, vector, column of 4): step = high · bits + vector
        steps = values.reshape(groups, lanes, units, STEPS // bits, bits, 4)
        packed = steps[:, :, :, 0].copy()
        for high in range(1, STEPS // bits):
            packed |= steps[:, :, :, high] << (high * bits)
        planes.append(packed.transpose(0, 2, 3, 1, 4).reshape(groups, units, -1))
    return np.concatenate(planes, axis=2).reshape(groups, -1)


def _pack_scales(layout: PackedLayout, blocks: NDArray[np.uint8], groups: int) -> NDArray[np.uint8]:
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
    for value in (fmt.scale, fmt.minimum):
        if value is None:
            continue
        raw = blocks[:, value.offset : value.offset + 2].reshape(groups, lanes, per_row, 2)
        parts.append(raw.transpose(0, 2, 1, 3).reshape(groups, per_row, -1))
    return np.concatenate(parts, axis=2).reshape(groups, -1)


def layout_of(format: str, shape: tuple[int, ...], lanes: int) -> PackedLayout:
    """The layout of a weight matrix; an error that names the format where no kernel can read it."""
    if format not in FORMATS:
        raise ZllmcError(f"no CPU kernel for {format}: supported are {', '.join(FORMATS)}")
    rows, columns = shape
    return PackedLayout(FORMATS[format], rows, columns, lanes)
