"""Block formats: their descriptions hold together, and decoding agrees with ggml bit for bit."""

import math
import pathlib
import struct
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocks import LARGEST, field_values, random_rows
from zllmc.zllm_ir import formats
from zllmc.zllm_ir.block_format import BlockFormat, Field, Float, Grid, Plane, Trits, strided
from zllmc.zllm_ir.formats import (
    BY_GGML_TYPE,
    FORMATS,
    Bytes,
    decode,
    decode_codes,
    decode_field,
    decode_float,
    row_bytes,
)
from zllmc.zllm_ir.grids import book

PACKED = [fmt for fmt in FORMATS.values() if fmt.plain is None]
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
every_packed_format = pytest.mark.parametrize("fmt", PACKED, ids=lambda fmt: fmt.name)


def fields(fmt: BlockFormat) -> list[Field]:
    match fmt.codes:
        case Grid(index=index, signs=signs, shift=shift):
            codes = [index, Field((signs,)) if signs else None, shift]
        case Trits(byte=byte):
            codes = [Field((Plane(8, tuple(8 * b for b in sorted(set(byte)))),))]
        case _:
            codes = [fmt.codes]
    return [field for field in (*codes, fmt.sub_scales, fmt.sub_mins) if field is not None]


def floats(fmt: BlockFormat) -> list[Float]:
    return [number for number in (fmt.scale, fmt.minimum) if number is not None]


# ---- agreement with ggml


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "F32"])
def test_decoding_equals_ggml_bit_for_bit(name: str, conformance: pathlib.Path) -> None:
    vectors = np.load(conformance / "codecs" / f"{name}.npz")
    fmt = FORMATS[name]
    assert BY_GGML_TYPE[int(vectors["ggml_type"])] is fmt
    assert (fmt.block, fmt.nbytes) == (vectors["block_size"], vectors["type_size"])
    ours = decode(fmt, vectors["raw"])
    theirs = vectors["f32"]
    same = ours.view(np.uint32) == theirs.view(np.uint32)
    same |= np.isnan(ours) & np.isnan(theirs)  # whether a signalling NaN turns quiet is up to the processor
    different = np.flatnonzero(~same.all(axis=1))
    kinds = np.broadcast_to(vectors["kinds"], len(ours))
    assert Counter(kinds[different]) == {}


# ---- the descriptions


@every_packed_format
def test_every_bit_of_a_block_has_exactly_one_meaning(fmt: BlockFormat) -> None:
    uses = Counter(
        address + bit
        for field in fields(fmt)
        for plane in field.planes
        for address in plane.at
        for bit in range(plane.bits)
    )
    for number in floats(fmt):
        end = number.offset + number.count * number.nbytes
        nibbles = range(8 * number.offset, 8 * end, 4) if number.nibbles is None else number.nibbles
        uses.update(address + bit for address in nibbles for bit in range(4))
    assert uses == Counter(range(8 * fmt.nbytes))


@every_packed_format
def test_counts_fit_the_block(fmt: BlockFormat) -> None:
    assert fmt.scale is not None
    assert decode_codes(fmt, np.zeros((1, fmt.nbytes), np.uint8)).shape == (1, fmt.block)
    assert fmt.scale.nibbles is None or len(fmt.scale.nibbles) == 2 * fmt.scale.nbytes
    assert fmt.block % fmt.sub_block == 0
    assert fmt.sub_mins is None or fmt.minimum is not None
    for field in (fmt.sub_scales, fmt.sub_mins):
        assert field is None or field.count * fmt.sub_block == fmt.block


@every_packed_format
def test_integers_fit_int8(fmt: BlockFormat) -> None:
    assert fmt.codes is not None
    codes = decode_codes(fmt, random_rows(fmt, 64, fmt.block, np.random.default_rng(0)))
    assert -128 <= codes.min() <= codes.max() <= 127
    assert np.abs(codes + fmt.codes.zero).max() <= fmt.codes.largest
    for field in (fmt.sub_scales, fmt.sub_mins):
        assert field is None or -128 <= field_values(field).min() <= field_values(field).max() <= 127


@pytest.mark.parametrize("fmt", [f for f in PACKED if isinstance(f.codes, Grid)], ids=lambda fmt: fmt.name)
def test_every_index_finds_a_vector_of_its_own(fmt: BlockFormat) -> None:
    assert isinstance(fmt.codes, Grid)
    vectors = book(fmt.codes.book)
    assert vectors.shape == (1 << fmt.codes.index.bits, fmt.block // fmt.codes.index.count)
    assert len(np.unique(vectors, axis=0)) == len(vectors)
    assert set(np.unique(vectors)) == set(range(len(fmt.codes.values)))


def test_strided_counts_the_last_digit_fastest() -> None:
    assert strided((2, 4), (3, 8), base=16) == (16, 24, 32, 20, 28, 36)


@pytest.mark.parametrize(("bits", "address"), [(4, 5), (2, 7), (8, 1), (1, -1)])
def test_a_part_that_straddles_bytes_is_refused(bits: int, address: int) -> None:
    with pytest.raises(ValueError, match="within one byte"):
        Plane(bits, (0, address))


def test_fields_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="same number"):
        Field((Plane(4, (0, 8)), Plane(1, (4,))))
    with pytest.raises(ValueError, match="at most 12"):
        Field((Plane(8, (0,)), Plane(5, (8,))))
    with pytest.raises(ValueError, match="code book"):
        Field((Plane(2, (0,)),), table=(1, 2, 3))
    with pytest.raises(ValueError, match="one of its 5 digits"):
        Trits(byte=(0, 0), digit=(4, 5))


# ---- the decoder


def number_in(block: bytes, number: Float, i: int) -> np.float32:
    if number.nibbles is not None:
        whole = int.from_bytes(block, "little")
        block = sum((whole >> at) % 16 << 4 * k for k, at in enumerate(number.nibbles)).to_bytes(2, "little")
        return np.float32(struct.unpack("<e", block)[0] * number.factor)
    byte = block[number.offset + i]
    if number.kind == "e8m0_half":
        return np.float32(math.ldexp(1, byte - 128))
    if number.kind == "ue4m3_half":
        exponent, mantissa = byte >> 3 & 15, byte & 7
        value = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
        return np.float32(0 if byte == 0x7F else value / 2)
    return np.float32(struct.unpack_from("<e", block, number.offset)[0] * number.factor)


def integer_in(block: bytes, field: Field, i: int) -> int:
    whole = int.from_bytes(block, "little")
    value = shift = 0
    for plane in field.planes:
        value += (whole >> plane.at[i]) % (1 << plane.bits) << shift
        shift += plane.bits
    if field.signed and value >= 1 << (field.bits - 1):
        value -= 1 << field.bits
    return field.table[value] if field.table else field.step * value - field.zero


def code_in(block: bytes, fmt: BlockFormat, k: int) -> int:
    codes = fmt.codes
    if isinstance(codes, Trits):
        return block[codes.byte[k]] * 3 ** (codes.digit[k] + 1) // 256 % 3 - 1
    if not isinstance(codes, Grid):
        assert codes is not None
        return integer_in(block, codes, k)
    vector, element = divmod(k, fmt.block // codes.index.count)
    value = codes.values[book(codes.book)[integer_in(block, codes.index, vector), element]] - codes.zero
    if codes.shift is not None:
        value -= integer_in(block, codes.shift, k * codes.shift.count // fmt.block)
    if codes.signs is not None:
        stored = len(codes.signs.at) * 8 // fmt.block  # of 8 signs
        bits = [integer_in(block, Field((codes.signs,)), k // 8 * stored + i) for i in range(stored)]
        value *= (-1) ** [*bits, sum(bits) % 2][k % 8]
    return value


@given(st.data())
def test_decoding_is_what_the_description_says(data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(PACKED))
    block = data.draw(st.binary(min_size=fmt.nbytes, max_size=fmt.nbytes))
    k = data.draw(st.integers(0, fmt.block - 1))
    assert fmt.scale is not None
    with np.errstate(all="ignore"):
        scale = number_in(block, fmt.scale, k * fmt.scale.count // fmt.block)
        if fmt.sub_scales:
            scale *= np.float32(integer_in(block, fmt.sub_scales, k // fmt.sub_block))
        expected = scale * np.float32(code_in(block, fmt, k))
        if fmt.minimum:
            minimum = number_in(block, fmt.minimum, 0)
            if fmt.sub_mins:
                minimum *= np.float32(integer_in(block, fmt.sub_mins, k // fmt.sub_block))
            expected = expected + minimum if fmt.min_sign > 0 else expected - minimum
    np.testing.assert_array_equal(decode(fmt, np.frombuffer(block, np.uint8))[k], expected)


@every_format
def test_decoding_in_chunks_equals_decoding_at_once(
    fmt: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = random_rows(fmt, 3, 5 * fmt.block, np.random.default_rng(0))
    at_once = decode(fmt, raw)
    monkeypatch.setattr(formats, "_CHUNK", 2 * fmt.block)
    np.testing.assert_array_equal(decode(fmt, raw), at_once)
    monkeypatch.setattr(formats, "_CHUNK", 1)
    np.testing.assert_array_equal(decode(fmt, raw), at_once)


@every_format
def test_decoding_keeps_leading_axes(fmt: BlockFormat) -> None:
    raw = random_rows(fmt, 6, 2 * fmt.block, np.random.default_rng(1))
    weights = decode(fmt, raw.reshape(2, 3, -1))
    assert weights.shape == (2, 3, 2 * fmt.block)
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights[1, 2], decode(fmt, raw[5]))
    np.testing.assert_array_equal(decode(fmt, raw[::2]), decode(fmt, raw)[::2])
    assert decode(fmt, raw[:0]).shape == (0, 2 * fmt.block)
    assert decode(fmt, raw[:, :0]).shape == (6, 0)


@every_format
def test_rows_that_do_not_fill_their_blocks_are_refused(fmt: BlockFormat) -> None:
    assert row_bytes(fmt, 3 * fmt.block) == 3 * fmt.nbytes
    with pytest.raises(ValueError, match="whole"):
        decode(fmt, np.zeros((2, 2 * fmt.nbytes - 1), np.uint8))
    with pytest.raises(ValueError, match="multiple of its block"):
        row_bytes(fmt, -fmt.block)
    if fmt.block > 1:
        with pytest.raises(ValueError, match=f"{fmt.name} row of {fmt.block + 1} .* block of {fmt.block}"):
            row_bytes(fmt, fmt.block + 1)


def test_input_of_the_wrong_kind_is_refused() -> None:
    q4_0 = FORMATS["Q4_0"]
    assert q4_0.codes is not None
    wrong: Bytes = np.zeros(18, np.int8)
    with pytest.raises(ValueError, match="uint8"):
        decode(q4_0, wrong)
    with pytest.raises(ValueError, match="shape"):
        decode_field(q4_0, q4_0.codes, np.zeros((3, 20), np.uint8))


# ---- plain floats


def plain(kind: str, *patterns: int) -> list[float]:
    fmt = FORMATS[kind]
    raw = b"".join(pattern.to_bytes(fmt.nbytes, "little") for pattern in patterns)
    return decode(fmt, np.frombuffer(raw, np.uint8)).tolist()  # type: ignore[no-any-return]


def test_f16_specials() -> None:
    assert plain("F16", 0x7C00, 0xFC00, 0x7BFF) == [math.inf, -math.inf, 65504.0]
    assert plain("F16", 0x0001, 0x83FF) == [2.0**-24, -1023 * 2.0**-24]
    assert math.isnan(plain("F16", 0x7E00)[0])
    assert math.copysign(1, plain("F16", 0x8000)[0]) == -1


def test_bf16_specials() -> None:
    assert plain("BF16", 0x7F80, 0xFF80, 0x3F80) == [math.inf, -math.inf, 1.0]
    assert plain("BF16", 0x0001, 0x807F) == [2.0**-133, -127 * 2.0**-133]
    assert math.isnan(plain("BF16", 0x7FC0)[0])
    assert math.copysign(1, plain("BF16", 0x8000)[0]) == -1


def test_f32_is_taken_as_it_is() -> None:
    patterns = np.array([0, 1, 0x80000000, 0x7F800000, 0x7FC00001, 0x3F800000], "<u4")
    decoded = decode(FORMATS["F32"], patterns.view(np.uint8))
    np.testing.assert_array_equal(decoded.view(np.uint32), patterns)


def test_exponent_scales_reach_from_subnormal_to_the_top() -> None:
    stored = np.array([[0], [1], [2], [128], [255]], np.uint8)
    decoded = decode_float(Float(0, "e8m0_half"), stored)
    assert decoded[:, 0].tolist() == [2.0**-128, 2.0**-127, 2.0**-126, 1.0, 2.0**127]


def test_unsigned_e4m3_scales_have_no_nan_and_no_sign() -> None:
    stored = np.array([[0, 1, 7, 8, 0x38, 0x7E, 0x7F, 0x80, 0xFF]], np.uint8)
    decoded = decode_float(Float(0, "ue4m3_half", count=9), stored)
    assert decoded[0].tolist() == [0, 2**-10, 7 * 2**-10, 2**-7, 0.5, 224, 0, 0, 240]


# ---- the blocks that other tests build on


@every_format
def test_random_rows_have_the_magnitude_of_real_weights(fmt: BlockFormat) -> None:
    columns = 8 * fmt.block * (1 if fmt.block > 1 else 32)
    weights = decode(fmt, random_rows(fmt, 16, columns, np.random.default_rng(2)))
    rms = float(np.sqrt(np.mean(np.square(weights, dtype=float))))
    assert 0.5 < rms * math.sqrt(columns) < 3
    assert (weights < 0).any() and (weights > 0).any()


@every_packed_format
def test_extreme_rows_reach_every_combination_of_ends(fmt: BlockFormat) -> None:
    assert fmt.scale is not None
    blocks = random_rows(fmt, 8, fmt.block, np.random.default_rng(3), extreme=True)
    codes = decode_codes(fmt, blocks)
    anything = np.random.default_rng(4).integers(0, 256, (1000, fmt.nbytes), np.uint8)
    known = decode_codes(fmt, anything)
    assert (codes.min(), codes.max()) == (known.min(), known.max())
    assert len(np.unique(codes, axis=0)) == 2
    if not isinstance(fmt.codes, Grid):
        assert (codes == codes[:, :1]).all()
    assert np.isfinite(decode(fmt, blocks)).all()
    if fmt.scale.kind == "f16":
        ends = {LARGEST * fmt.scale.factor, -LARGEST * fmt.scale.factor}
        assert set(decode_float(fmt.scale, blocks)[:, 0].tolist()) == ends
    if fmt.sub_scales is not None:
        scales = decode_field(fmt, fmt.sub_scales, blocks)
        assert len({(int(c), int(s)) for c, s in zip(codes[:, 0], scales[:, 0], strict=True)}) == 4
