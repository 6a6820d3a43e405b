"""Block formats as data: where every bit of a packed weight lies, and what it means.

A row of weights is stored as consecutive blocks: `block` elements in `nbytes` bytes. Element k of a block is

    w[k] = (d * sc[k // sub_block]) * code[k] + min_sign * (m * mn[k // sub_block])

evaluated in float32 in that order, which gives ggml's dequantized values bit for bit. One description serves
the decoder below, the packers and the generated kernels, so it holds addresses and numbers, never code.

The layouts are those of ggml (https://github.com/ggml-org/ggml, `ggml-common.h` for the structures and
`ggml-quants.c` for their meaning). Formats whose codes index a grid of vectors (IQ1, IQ2, IQ3), store base-3
digits (TQ1_0), or have one float per sub-block (NVFP4) do not fit this model and are not described here.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Plane:
    """`bits` bits of every element of a field.

    `at[i]` is the bit address of element i's part within the block: byte `at[i] // 8`, shifted left by
    `at[i] % 8`. A part never straddles two bytes.
    """

    bits: int
    at: tuple[int, ...]

    def __post_init__(self) -> None:
        for address in self.at:
            if address < 0 or address % 8 + self.bits > 8:
                raise ValueError(f"{self.bits} bits at bit address {address} do not lie within one byte")


@dataclass(frozen=True)
class Field:
    """`count` small integers, each spread over `planes`, the least significant plane first.

    The value is `table[stored]` where there is a code book, otherwise `stored - zero`, with `stored`
    sign-extended from `bits` first when `signed`.
    """

    planes: tuple[Plane, ...]
    zero: int = 0
    signed: bool = False
    table: tuple[int, ...] | None = None  # 2**bits values that fit int8

    def __post_init__(self) -> None:
        if len({len(plane.at) for plane in self.planes}) != 1:
            raise ValueError("the planes of a field must describe the same number of elements")
        if self.bits > 8:
            raise ValueError(f"a field of {self.bits} bits: at most 8 are supported")
        if self.table is not None and len(self.table) != 1 << self.bits:
            raise ValueError(f"a code book of {len(self.table)} values for {self.bits} bits")

    @property
    def count(self) -> int:
        return len(self.planes[0].at)

    @property
    def bits(self) -> int:
        return sum(plane.bits for plane in self.planes)


@dataclass(frozen=True)
class Float:
    """A little-endian float at byte `offset` of the block.

    Kinds: f32, f16, bf16, and e8m0_half: the exponent byte of the OCP MX formats, halved (2**(e - 128)),
    because the code books that go with it hold doubled e2m1 values to stay integers.
    """

    offset: int
    kind: str

    @property
    def nbytes(self) -> int:
        return FLOAT_BYTES[self.kind]


FLOAT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "e8m0_half": 1}


@dataclass(frozen=True)
class BlockFormat:
    """One storage format. Either `plain` is set (a bare float per element) or `codes` and `scale` are."""

    name: str
    ggml_type: int
    block: int  # elements
    nbytes: int
    codes: Field | None = None
    plain: str | None = None  # kind of float
    scale: Float | None = None
    minimum: Float | None = None
    min_sign: int = -1
    sub_scales: Field | None = None  # sc; 1 where absent
    sub_mins: Field | None = None  # mn; 1 where absent

    @property
    def sub_block(self) -> int:
        """Elements that share a sub-scale; the whole block where there are none."""
        return self.block // self.sub_scales.count if self.sub_scales else self.block


def strided(*digits: tuple[int, int], base: int) -> tuple[int, ...]:
    """Bit addresses that are affine in the mixed-radix digits of the element's index.

    Each digit is (extent, stride in bits), the most significant first: `strided((2, 4), (16, 8), base=16)`
    places elements 0-15 in the low nibbles of bytes 2-17 and elements 16-31 in their high nibbles.
    """
    offsets = [range(0, extent * stride, stride) for extent, stride in digits]
    return tuple(base + sum(parts) for parts in itertools.product(*offsets))


# The code books are public constants: ggml's non-linear 4-bit values, and OCP e2m1 doubled.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# The 6-bit scales and minima of Q4_K and Q5_K share 12 bytes. Entries 0-3 are the low 6 bits of bytes 0-3
# (minima: 4-7). Entries 4-7 keep 4 bits in a nibble of bytes 8-11 and 2 in the top of bytes 0-3 (4-7).
_K_SCALES = Field((Plane(4, strided((2, 64), (4, 8), base=32)), Plane(2, strided((2, 2), (4, 8), base=36))))
_K_MINS = Field((Plane(4, strided((2, 36), (4, 8), base=64)), Plane(2, strided((2, 2), (4, 8), base=68))))


def _nibbles(base: int) -> Plane:
    """32 nibbles from bit `base` on: 16 low ones, then the 16 high ones of the same bytes."""
    return Plane(4, strided((2, 4), (16, 8), base=base))


def _pairs(base: int) -> Plane:
    """256 pairs of bits in 64 bytes from bit `base` on; elements 32 apart share a byte."""
    return Plane(2, strided((2, 256), (4, 2), (32, 8), base=base))


_F16_SCALE = Float(0, "f16")
_F16_MINIMUM = Float(2, "f16")

_ALL = (
    BlockFormat("F32", ggml_type=0, block=1, nbytes=4, plain="f32"),
    BlockFormat("F16", ggml_type=1, block=1, nbytes=2, plain="f16"),
    BlockFormat("BF16", ggml_type=30, block=1, nbytes=2, plain="bf16"),
    BlockFormat(
        "Q4_0",
        ggml_type=2,
        block=32,
        nbytes=18,
        codes=Field((_nibbles(16),), zero=8),
        scale=_F16_SCALE,
    ),
    BlockFormat(
        "Q4_1",
        ggml_type=3,
        block=32,
        nbytes=20,
        codes=Field((_nibbles(32),)),
        scale=_F16_SCALE,
        minimum=_F16_MINIMUM,
        min_sign=1,
    ),
    BlockFormat(
        "Q5_0",
        ggml_type=6,
        block=32,
        nbytes=22,
        codes=Field((_nibbles(48), Plane(1, strided((32, 1), base=16))), zero=16),
        scale=_F16_SCALE,
    ),
    BlockFormat(
        "Q5_1",
        ggml_type=7,
        block=32,
        nbytes=24,
        codes=Field((_nibbles(64), Plane(1, strided((32, 1), base=32)))),
        scale=_F16_SCALE,
        minimum=_F16_MINIMUM,
        min_sign=1,
    ),
    BlockFormat(
        "Q8_0",
        ggml_type=8,
        block=32,
        nbytes=34,
        codes=Field((Plane(8, strided((32, 8), base=16)),), signed=True),
        scale=_F16_SCALE,
    ),
    BlockFormat(
        "Q2_K",
        ggml_type=10,
        block=256,
        nbytes=84,
        codes=Field((_pairs(128),)),
        scale=Float(80, "f16"),
        minimum=Float(82, "f16"),
        sub_scales=Field((Plane(4, strided((16, 8), base=0)),)),
        sub_mins=Field((Plane(4, strided((16, 8), base=4)),)),
    ),
    BlockFormat(
        "Q3_K",
        ggml_type=11,
        block=256,
        nbytes=110,
        codes=Field((_pairs(256), Plane(1, strided((8, 1), (32, 8), base=0))), zero=4),
        scale=Float(108, "f16"),
        sub_scales=Field(
            (Plane(4, strided((2, 4), (8, 8), base=768)), Plane(2, strided((4, 2), (4, 8), base=832))),
            zero=32,
        ),
    ),
    BlockFormat(
        "Q4_K",
        ggml_type=12,
        block=256,
        nbytes=144,
        codes=Field((Plane(4, strided((4, 256), (2, 4), (32, 8), base=128)),)),
        scale=_F16_SCALE,
        minimum=_F16_MINIMUM,
        sub_scales=_K_SCALES,
        sub_mins=_K_MINS,
    ),
    BlockFormat(
        "Q5_K",
        ggml_type=13,
        block=256,
        nbytes=176,
        codes=Field(
            (
                Plane(4, strided((4, 256), (2, 4), (32, 8), base=384)),
                Plane(1, strided((8, 1), (32, 8), base=128)),
            )
        ),
        scale=_F16_SCALE,
        minimum=_F16_MINIMUM,
        sub_scales=_K_SCALES,
        sub_mins=_K_MINS,
    ),
    BlockFormat(
        "Q6_K",
        ggml_type=14,
        block=256,
        nbytes=210,
        codes=Field((Plane(4, strided((2, 512), (2, 4), (64, 8), base=0)), _pairs(1024)), zero=32),
        scale=Float(208, "f16"),
        sub_scales=Field((Plane(8, strided((16, 8), base=1536)),), signed=True),
    ),
    BlockFormat(
        "IQ4_NL",
        ggml_type=20,
        block=32,
        nbytes=18,
        codes=Field((_nibbles(16),), table=_IQ4_VALUES),
        scale=_F16_SCALE,
    ),
    BlockFormat(
        "IQ4_XS",
        ggml_type=23,
        block=256,
        nbytes=136,
        codes=Field((Plane(4, strided((8, 128), (2, 4), (16, 8), base=64)),), table=_IQ4_VALUES),
        scale=_F16_SCALE,
        sub_scales=Field((Plane(4, strided((8, 4), base=32)), Plane(2, strided((8, 2), base=16))), zero=32),
    ),
    BlockFormat(
        "TQ2_0",
        ggml_type=35,
        block=256,
        nbytes=66,
        codes=Field((_pairs(0),), zero=1),
        scale=Float(64, "f16"),
    ),
    BlockFormat(
        "MXFP4",
        ggml_type=39,
        block=32,
        nbytes=17,
        codes=Field((_nibbles(8),), table=_E2M1_DOUBLED),
        scale=Float(0, "e8m0_half"),
    ),
    BlockFormat(
        "Q1_0",
        ggml_type=41,
        block=128,
        nbytes=18,
        codes=Field((Plane(1, strided((128, 1), base=16)),), table=(-1, 1)),
        scale=_F16_SCALE,
    ),
    BlockFormat(
        "Q2_0",
        ggml_type=42,
        block=64,
        nbytes=18,
        codes=Field((Plane(2, strided((64, 2), base=16)),), zero=1),
        scale=_F16_SCALE,
    ),
)

FORMATS: dict[str, BlockFormat] = {fmt.name: fmt for fmt in _ALL}
BY_GGML_TYPE: dict[int, BlockFormat] = {fmt.ggml_type: fmt for fmt in _ALL}


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
        out[:, 0] = decode_float(Float(0, fmt.plain), blocks)
        return
    if fmt.codes is None or fmt.scale is None:
        raise ValueError(f"the description of {fmt.name} has neither plain floats nor codes with a scale")
    scales = decode_float(fmt.scale, blocks)[:, None]
    if fmt.sub_scales is not None:
        scales = scales * decode_field(fmt, fmt.sub_scales, blocks).astype(np.float32)
    by_scale = out.reshape(len(out), -1, fmt.sub_block)
    by_scale[...] = decode_field(fmt, fmt.codes, blocks).reshape(by_scale.shape)
    by_scale *= scales[..., None]
    if fmt.minimum is not None:
        minima = decode_float(fmt.minimum, blocks)[:, None]
        if fmt.sub_mins is not None:
            minima = minima * decode_field(fmt, fmt.sub_mins, blocks).astype(np.float32)
        by_scale += np.float32(fmt.min_sign) * minima[..., None]


def decode_field(fmt: BlockFormat, field: Field, raw_blocks: Bytes) -> Integers:
    """The integers of a field of `fmt`: blocks (n, nbytes), uint8, to int16 (n, field.count)."""
    if raw_blocks.ndim != 2 or raw_blocks.shape[1] != fmt.nbytes:
        raise ValueError(f"{fmt.name} blocks have shape (n, {fmt.nbytes}), not {raw_blocks.shape}")
    stored = np.zeros((len(raw_blocks), field.count), np.uint8)
    low = 0
    for plane in field.planes:
        address = np.array(plane.at)
        part = np.take(raw_blocks, address // 8, axis=1)
        part >>= (address % 8).astype(np.uint8)
        part &= np.uint8((1 << plane.bits) - 1)
        part <<= np.uint8(low)
        stored |= part
        low += plane.bits
    if field.table is not None:
        return np.take(np.array(field.table, np.int16), stored)
    zero = field.zero
    if field.signed:  # flipping the sign bit of a two's complement number adds half its range
        half = 1 << (field.bits - 1)
        stored ^= np.uint8(half)
        zero += half
    return stored.astype(np.int16) - np.int16(zero)


def decode_float(f: Float, raw_blocks: Bytes) -> Floats:
    """The float that `f` describes, of every block: uint8 (n, nbytes) to float32 (n,)."""
    stored = np.ascontiguousarray(raw_blocks[:, f.offset : f.offset + f.nbytes])
    match f.kind:
        case "f32":
            return stored.view("<f4")[:, 0].astype(np.float32)
        case "f16":
            return stored.view("<f2")[:, 0].astype(np.float32)
        case "bf16":
            return (stored.view("<u2")[:, 0].astype(np.uint32) << np.uint32(16)).view(np.float32)
        case "e8m0_half":
            return np.ldexp(np.float32(1), stored[:, 0].astype(np.int32) - 128)
    raise ValueError(f"unknown kind of float: {f.kind}")
