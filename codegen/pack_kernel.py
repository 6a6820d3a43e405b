"""Packing as a kernel: the code that brings rows of a block format into `PackedLayout`, from its description.

Vectors run across rows: the same four bytes of up to 8 rows are loaded side by side, the bits that belong
together are shifted into place, and out comes a contiguous piece of the packed group. Whatever is packed is
described by the bit addresses that its bits come from; so a format is only data here. `packing.pack_rows`
says the same in numpy, and is what tests compare with.

    kernel(thread, threads, control, raw, packed)

`control` holds two i32: groups of `lanes` rows, and blocks per row. `raw` has all rows of these groups, and
`packed` gets every byte of the groups, their padding included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from tvm import tirx

from zllmc.codegen.packing import ROW_PAD, STEPS, UNIT, PackedLayout
from zllmc.codegen.rows import share
from zllmc.codegen.tir import Expr, Kernel, Memory, bind, bits, cast, const, lanes_of, serial
from zllmc.targets.cpu import CpuTarget
from zllmc.zllm_ir.block_format import BlockFormat, Field, Float, Grid, Plane, Trits
from zllmc.zllm_ir.formats import FORMATS
from zllmc.zllm_ir.kernel_graph import KernelCall

_ROWS = 8  # side by side: their addresses fit a processor's registers
_WORD = 4  # bytes

Bits = Sequence[int | None]  # where each bit comes from, as a bit address within the block; None: it is 0


def pack(call: KernelCall, target: CpuTarget, name: str) -> Any:
    """The kernel of a `packing.pack_call`. `target` is the machine that packs, not the one packed for."""
    fmt, lanes = FORMATS[call.attributes["format"]], int(call.attributes["lanes"])
    layout = PackedLayout(fmt, ROW_PAD, fmt.block, lanes)  # of one block
    together = min(lanes, _ROWS)
    with Kernel(name, control="int32", raw="uint8", packed="uint8") as kernel:
        control, raw, packed = kernel.arguments
        groups, blocks = bind(control.load(0)), bind(control.load(1))
        row_bytes = bind(cast(blocks * fmt.nbytes, "int64"))
        end = bind(blocks * layout.block_bytes)
        group_bytes = bind(tirx.truncdiv(end + 63, 64) * 64)
        begin, stop = share(kernel, groups)
        with serial(begin, stop) as group:
            out = packed.from_(cast(group, "int64") * cast(group_bytes, "int64"))
            with serial(0, lanes // together) as part:
                lane = bind(part * together)
                first = bind(group * lanes + lane)
                rows = [raw.from_(cast(first + row, "int64") * row_bytes) for row in range(together)]
                with serial(0, blocks) as block:
                    source = _Block(fmt, rows, bind(block * fmt.nbytes))
                    parts = chain(_scales(layout, source), _codes(layout, source))
                    _store(out, bind(block * layout.block_bytes), parts, lane, lanes, together)
            with serial(0, tirx.truncdiv(group_bytes - end, lanes)) as i:
                out.store(end + i * lanes, const(0, "uint8", lanes))
    return kernel.function


def _store(out: Memory, at: Expr, pieces: Iterator[Expr], lane: Expr, lanes: int, rows: int) -> None:
    """Store pieces one after the other, each with as many bytes of every row; they have `rows` of the lanes,
    from `lane` on."""
    offset = 0
    for piece in pieces:
        width = lanes_of(piece) // rows
        out.store(at + offset + width * lane, piece)
        offset += width * lanes


class _Block:
    """One block of each of the rows side by side, which starts at byte `at` of the row."""

    def __init__(self, format: BlockFormat, rows: list[Memory], at: Expr) -> None:
        self.format, self.rows, self.at = format, rows, at
        self._words: dict[int, Expr] = {}

    def load(self, offset: int, nbytes: int) -> Expr:
        """Bytes `offset` … of every row: u8 [rows · nbytes]."""
        parts = [row.load(self.at + offset, nbytes) for row in self.rows]
        return bind(tirx.Shuffle(parts, list(range(len(parts) * nbytes))))

    def gather(self, sources: Bits) -> Expr:
        """8, 16 or 32 bits of every row, each from its place in the block: u8 [rows · bits / 8]."""
        lanes = len(self.rows)
        value: Expr = None
        for (offset, distance), mask in self._moves(sources).items():
            part = self._word(offset)
            possible = 0xFFFFFFFF
            if distance:
                by = const(abs(distance), "uint32", lanes)
                part = part << by if distance > 0 else part >> by
                possible = possible << distance & possible if distance > 0 else possible >> -distance
            if mask != possible:
                part = part & const(mask, "uint32", lanes)
            value = part if value is None else value | part
        if len(sources) < 8 * _WORD:
            value = cast(value, f"uint{len(sources)}")
        return bind(bits(value, f"uint8x{len(sources) // 8 * lanes}"))

    def _moves(self, sources: Bits) -> dict[tuple[int, int], int]:
        """(offset of a word, distance to the left): mask of the bits that come from there. They are few where
        neighbouring bits move alike."""
        words: list[int] = []
        for byte in sorted({source // 8 for source in sources if source is not None}):
            if not words or byte >= words[-1] + _WORD:
                words.append(min(byte, self.format.nbytes - _WORD))
        masks: dict[tuple[int, int], int] = {}
        for bit, source in enumerate(sources):
            if source is not None:
                offset = max(word for word in words if 8 * word <= source)
                move = offset, bit - (source - 8 * offset)
                masks[move] = masks.get(move, 0) | 1 << bit
        return masks

    def _word(self, offset: int) -> Expr:
        """Bytes `offset` … offset+3 of every row: u32 [rows]."""
        if offset not in self._words:
            self._words[offset] = bind(bits(self.load(offset, _WORD), f"uint32x{len(self.rows)}"))
        return self._words[offset]


# -- codes ---------------------------------------------------------------------------------------------------


def _codes(layout: PackedLayout, source: _Block) -> Iterator[Expr]:
    """What is packed of the block's codes, in the layout's order."""
    fmt = layout.format
    if fmt.plain is not None:
        yield source.load(0, fmt.nbytes)
        return
    codes = layout.codes
    for start in range(0, fmt.block, UNIT):
        unit = slice(start, start + UNIT)
        match codes:
            case Field(planes=planes):
                for plane in planes:
                    words = (
                        source.gather(_interleave(plane.at[unit], plane.bits, vector))
                        for vector in range(plane.bits)
                    )
                    yield from _runs(words, min(layout.run, plane.bits), len(source.rows))
            case Grid(signs=signs):
                yield from _indices(layout, codes, source, start // UNIT)
                if signs is not None:
                    yield _signs(signs, source, unit)
            case Trits(byte=byte, digit=digit):
                trits = (_trits(byte[unit], digit[unit], source, vector) for vector in range(2))
                yield from _runs(trits, min(layout.run, 2), len(source.rows))


def _runs(pieces: Iterable[Expr], run: int, rows: int) -> Iterator[Expr]:
    """Pieces of 4 bytes of every row, `run` of them side by side for each row."""
    words = list(pieces)
    for first in range(0, len(words), run):
        together = words[first : first + run]
        order = [4 * (rows * i + row) + byte for row in range(rows) for i in range(run) for byte in range(4)]
        yield bind(tirx.Shuffle(together, order)) if run > 1 else together[0]


def _interleave(at: Sequence[int | None], width: int, vector: int) -> list[int | None]:
    """The unit's elements in this vector of a plane: byte j has column j of all steps in the vector."""
    return [
        None if (address := at[4 * (high * width + vector) + column]) is None else address + bit
        for column in range(4)
        for high in range(STEPS // width)
        for bit in range(width)
    ]


def _element(field: Field, i: int) -> list[int]:
    """The bits of one integer as it is stored."""
    return [plane.at[i] + bit for plane in field.planes for bit in range(plane.bits)]


def _fill(sources: Bits, size: int) -> Bits:
    return [*sources, *[None] * (size - len(sources))]


def _indices(layout: PackedLayout, codes: Grid, source: _Block, unit: int) -> Iterator[Expr]:
    """Low bytes of the unit's indices, then their other bits, with the shifts on top."""
    shifts = () if codes.shift is None else codes.shift.planes[0].at
    high: list[int] = []
    for i in range(unit * layout.indices, (unit + 1) * layout.indices):
        index = _element(codes.index, i)
        if shifts:
            index.append(shifts[i * len(shifts) // codes.index.count])
        yield source.gather(_fill(index[:8], 8))
        high += index[8:]
    if high:
        yield source.gather(_fill(high, 8 * layout.high_bytes))


def _signs(signs: Plane, source: _Block, unit: slice) -> Expr:
    """The signs of the unit's elements; every eighth follows from the seven before where it isn't stored."""
    if len(signs.at) == source.format.block:
        return source.gather(_interleave(signs.at[unit], 1, 0))
    at: list[int | None] = [
        None if i % 8 == 7 else signs.at[i // 8 * 7 + i % 8] for i in range(unit.start, unit.stop)
    ]
    lanes = len(source.rows)

    def by(distance: int) -> Expr:
        return const(distance, "uint32", lanes)

    stored = bind(bits(source.gather(_interleave(at, 1, 0)), f"uint32x{lanes}"))
    # Elements 8m … 8m+7 are bits 2m and 2m+1 of the four bytes.
    columns = bind(stored ^ stored >> by(16))
    columns = bind(columns ^ columns >> by(8))
    odd = (columns ^ columns >> by(1)) & const(0b01010101, "uint32", lanes)
    return bind(bits(stored | odd << by(25), f"uint8x{4 * lanes}"))


def _trits(byte: Sequence[int], digit: Sequence[int], source: _Block, vector: int) -> Expr:
    """One vector of the unit's digits, 0 … 2."""
    size = 4 * len(source.rows)
    packed: Expr = None
    for high in range(STEPS // 2):
        first = 4 * (high * 2 + vector)
        elements = range(first, first + 4)
        held = source.gather([8 * byte[i] + bit for i in elements for bit in range(8)])
        powers = int.from_bytes(bytes(3 ** digit[i] for i in elements), "little")
        rest = bind(held * bits(const(powers, "uint32", size // 4), f"uint8x{size}"))
        # 3 · rest / 256, rounded down
        trit = [cast(rest > const(limit, "uint8", size), "uint8") for limit in (85, 170)]
        value = (trit[0] + trit[1]) << const(2 * high, "uint8", size)
        packed = value if packed is None else packed | value
    return bind(packed)


# -- scales --------------------------------------------------------------------------------------------------


def _scales(layout: PackedLayout, source: _Block) -> Iterator[Expr]:
    """What is packed of the block's scales, in the layout's order."""
    fmt = layout.format
    for field in (fmt.sub_scales, fmt.sub_mins):
        if field is not None:
            pair = UNIT // fmt.sub_block
            for first in range(0, field.count, pair):
                stored = (_fill(_element(field, i), 8) for i in range(first, first + pair))
                yield _value(field, source.gather([bit for element in stored for bit in element]))
    for number in (fmt.scale, fmt.minimum):
        if number is not None:
            for i in range(number.count):
                yield _float(number, source, i)


def _value(field: Field, stored: Expr) -> Expr:
    """The integers that `stored` stands for, modulo 256."""
    size = lanes_of(stored)
    zero = field.zero
    if field.signed:  # flipping the sign bit of a two's complement number adds half its range
        half = 1 << field.bits - 1
        stored = stored ^ const(half, "uint8", size)
        zero += half
    if field.step != 1:
        stored = stored * const(field.step, "uint8", size)
    return stored if zero == 0 else stored - const(zero % 256, "uint8", size)


def _float(number: Float, source: _Block, i: int) -> Expr:
    if number.nibbles is not None:
        return source.gather([address + bit for address in number.nibbles for bit in range(4)])
    raw = source.load(number.offset + i * number.nbytes, number.nbytes)
    if number.kind != "ue4m3_half":
        return raw
    size = lanes_of(raw)
    magnitude = raw & const(0x7F, "uint8", size)
    return tirx.Select(raw == const(0x7F, "uint8", size), const(0, "uint8", size), magnitude)
