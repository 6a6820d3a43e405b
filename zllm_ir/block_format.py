"""The terms in which block formats are described: addresses and numbers, never code.

A row of weights is stored as consecutive blocks: `block` elements in `nbytes` bytes. Element k of a block is

    w[k] = (d * sc[k // sub_block]) * code[k] + min_sign * (m * mn[k // sub_block])

evaluated in float32 in that order, which gives ggml's dequantized values bit for bit. One description serves
the decoder (`formats`), the packers and the generated kernels.
"""

import itertools
from dataclasses import dataclass


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

    The value is `table[stored]` where there is a code book, otherwise `step * stored - zero`, with `stored`
    sign-extended from `bits` first when `signed`.
    """

    planes: tuple[Plane, ...]
    zero: int = 0
    step: int = 1
    signed: bool = False
    table: tuple[int, ...] | None = None  # 2**bits values that fit int8

    def __post_init__(self) -> None:
        if len({len(plane.at) for plane in self.planes}) != 1:
            raise ValueError("the planes of a field must describe the same number of elements")
        if self.bits > 12:
            raise ValueError(f"a field of {self.bits} bits: at most 12 are supported")
        if self.table is not None and len(self.table) != 1 << self.bits:
            raise ValueError(f"a code book of {len(self.table)} values for {self.bits} bits")

    @property
    def count(self) -> int:
        return len(self.planes[0].at)

    @property
    def bits(self) -> int:
        return sum(plane.bits for plane in self.planes)

    @property
    def largest(self) -> int:
        """The largest magnitude of table[stored], or of `stored`."""
        if self.table is not None:
            return max(map(abs, self.table))
        return 1 << self.bits - 1 if self.signed else (1 << self.bits) - 1


@dataclass(frozen=True)
class Grid:
    """Codes that come several at a time: `index` picks a vector of the code book `book` (see `grids`), whose
    digits stand for `values`.

    Either each code has a sign, or the codes are `value - shift - zero`. `signs` addresses one bit per code,
    1 for minus; where it has only 7 for each 8 codes, the eighth makes the number of minuses even.
    """

    book: str
    values: tuple[int, ...]  # 0 … 127
    index: Field
    signs: Plane | None = None
    shift: Field | None = None
    zero: int = 0

    @property
    def signed(self) -> bool:
        return self.signs is not None

    @property
    def largest(self) -> int:
        """The largest magnitude of a code before `zero` is subtracted."""
        return max(self.values)


@dataclass(frozen=True)
class Trits:
    """Codes -1, 0, 1, several in a byte: it holds the fraction 0.t0 t1 t2 … in base 3, rounded up, in units
    of 1/256. Code i is digit `digit[i]`, minus 1, of byte `byte[i]` of the block."""

    byte: tuple[int, ...]
    digit: tuple[int, ...]
    zero: int = 1
    signed: bool = False
    largest: int = 2

    def __post_init__(self) -> None:
        if len(self.byte) != len(self.digit) or not all(0 <= d <= 4 for d in self.digit):
            raise ValueError("every code needs the address of a byte, and one of its 5 digits")


@dataclass(frozen=True)
class Float:
    """`count` little-endian floats from byte `offset` of the block on, times `factor`, a power of two.

    Kinds: f32, f16, bf16; e8m0_half: the exponent byte of the OCP MX formats, halved (2**(e - 128)), and
    ue4m3_half: an unsigned e4m3 byte (its top bit ignored, 0x7F counting as 0), halved. They are halved
    because the code books that go with them hold doubled e2m1 values to stay integers.

    A float may be scattered: `nibbles` are then the bit addresses of its fours of bits, the lowest first.
    """

    offset: int
    kind: str
    factor: float = 1.0
    count: int = 1
    nibbles: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one of them."""
        return FLOAT_BYTES[self.kind]


FLOAT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "e8m0_half": 1, "ue4m3_half": 1}


@dataclass(frozen=True)
class BlockFormat:
    """One storage format. Either `plain` is set (a bare float per element) or `codes` and `scale` are."""

    name: str
    ggml_type: int
    block: int  # elements
    nbytes: int
    codes: Field | Grid | Trits | None = None
    plain: str | None = None  # kind of float
    scale: Float | None = None  # d; each of several for an equal part of the block
    minimum: Float | None = None
    min_sign: int = -1
    sub_scales: Field | None = None  # sc; 1 where absent
    sub_mins: Field | None = None  # mn; 1 where absent

    @property
    def signed(self) -> bool:
        """Whether the integers, as they are taken from the block, have a sign."""
        by_table = isinstance(self.codes, Field) and self.codes.table is not None
        return self.codes is not None and (self.codes.signed or by_table)

    @property
    def wide(self) -> bool:
        """Whether the integers have a sign and take all of 8 bits. Lifted to unsigned codes, two products of
        theirs with activations outgrow 16 bits; those of smaller ones don't."""
        return self.signed and self.codes is not None and self.codes.largest > 64

    @property
    def sub_block(self) -> int:
        """Elements that share a scale and a sub-scale; the whole block where there is one scale only."""
        if self.sub_scales is not None:
            return self.block // self.sub_scales.count
        return self.block // self.scale.count if self.scale is not None else self.block


def strided(*digits: tuple[int, int], base: int) -> tuple[int, ...]:
    """Bit addresses that are affine in the mixed-radix digits of the element's index.

    Each digit is (extent, stride in bits), the most significant first: `strided((2, 4), (16, 8), base=16)`
    places elements 0-15 in the low nibbles of bytes 2-17 and elements 16-31 in their high nibbles.
    """
    offsets = [range(0, extent * stride, stride) for extent, stride in digits]
    return tuple(base + sum(parts) for parts in itertools.product(*offsets))
