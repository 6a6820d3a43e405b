"""linear against its reference, for every block format, from packed bytes to the last bit of the layout."""

from __future__ import annotations

import numpy as np
import pytest

from activations import a8_rows
from blocks import covering_formats, random_rows
from harness import MATRIX, RUNNABLE, assembly, control, run
from zllmc.codegen.activations import largest_factor
from zllmc.codegen.dot import Dot
from zllmc.codegen.linear import linear
from zllmc.codegen.packing import layout_of, pack_rows
from zllmc.targets.cpu import TARGETS, CpuTarget, detect
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.formats import FORMATS, decode
from zllmc.zllm_ir.fused_ops import _quantize, a8_type
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand
from zllmc.zllm_ir.types import R, T, TensorType

ALL = [*MATRIX, *RUNNABLE]


def is_limited(format: str, target: CpuTarget) -> bool:
    """Whether the target's kernel takes limited activations."""
    return target.limits_activations and FORMATS[format].wide


def call_of(format: str, rows: int, columns: int, first=T, limited=False, **extra) -> KernelCall:
    inputs = "f32" if FORMATS[format].plain else a8_type((), limited).dtype
    stride = -(-rows // 16) * 16
    return KernelCall(
        "linear",
        (("alpha", extra.get("alpha", 1.0)),),
        (
            Operand(TensorType(inputs, (first, columns)), columns),
            Operand(TensorType(format, (rows, columns))),
            Operand(TensorType("f32", (rows,))) if extra.get("bias") else None,
            Operand(TensorType("f32", (first, rows)), stride) if extra.get("residual") else None,
        ),
        (Operand(TensorType("f32", (first, rows)), stride),),
    )


def check(
    format,
    rows,
    columns,
    tokens,
    *,
    threads=1,
    target=RUNNABLE[-1],
    decode_entry=False,
    wanted=False,
    rng,
    extreme=False,
    x=None,
    **extra,
):
    """`wanted`: the rows are the last ones of a pass."""
    raw = random_rows(FORMATS[format], rows, columns, rng, extreme=extreme)
    if x is None:
        x = rng.standard_normal((tokens, columns), dtype=np.float32)
    plain = FORMATS[format].plain is not None
    layout = layout_of(format, (rows, columns), target.lanes)
    packed = pack_rows(layout, raw)
    padded = layout.padded_rows
    limited = is_limited(format, target)
    call = call_of(format, rows, columns, 1 if decode_entry else R if wanted else T, limited, **extra)
    bias = rng.standard_normal(padded, dtype=np.float32)
    residual = rng.standard_normal((tokens, padded), dtype=np.float32)
    y = np.zeros((tokens, padded), np.float32)
    arrays = [x if plain else a8_rows(x, limited), packed]
    arrays += [bias] if extra.get("bias") else []
    arrays += [residual] if extra.get("residual") else []
    state = control(tokens + 3, first_row=3) if wanted else control(tokens)
    run(linear, call, state, *arrays, y, threads=threads, target=target)
    weights = decode(FORMATS[format], raw).astype(np.float64)
    seen = x if plain else _quantize(x, limited)
    expected = extra.get("alpha", 1.0) * (seen.astype(np.float64) @ weights.T)
    magnitude = np.abs(seen).astype(np.float64) @ np.abs(weights).T
    if extra.get("bias"):
        expected += bias[:rows]
    if extra.get("residual"):
        expected += residual[:, :rows]
    # Products are exact; what is left is the rounding of f32 sums (and of the K formats' split minimum).
    allowed = 2e-6 * magnitude + 1e-6 * np.abs(expected) + 1e-6
    if not plain and (most := largest_factor(layout, Dot(target))):
        allowed += abs(extra.get("alpha", 1.0)) * scale_rounding(x, seen, weights, most)
    assert (np.abs(y[:, :rows] - expected) <= allowed).all()
    return y[:, :rows]


def scale_rounding(x: np.ndarray, seen: np.ndarray, weights: np.ndarray, most: int) -> np.ndarray:
    """What an output may be off by, as each scale of x is by half of the largest one of its row / `most`."""
    units = x.reshape(len(x), -1, 32)
    scales = np.abs(units).max(axis=2) / 127
    codes = seen.reshape(units.shape) / np.maximum(scales, 1e-36)[..., None]
    sums = np.abs(np.einsum("tuk,ruk->tur", codes, weights.reshape(len(weights), -1, 32)))
    return scales.max(axis=1, keepdims=True) / most / 2 * sums.sum(axis=1)


@pytest.mark.parametrize("target", ALL, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_decode_row(format, target):
    check(format, 32, 512, 1, decode_entry=True, threads=2, target=target, rng=np.random.default_rng(1))


# Tiles take the longest to compile. What is proven of all formats on this machine's target, and of the decode
# entry on all targets, is how codes are unpacked; the tiles of other targets need a format of each kind.
TILED = [
    (format, target) for target in ALL for format in (FORMATS if target == detect() else covering_formats())
]
QUANTIZED = [(format, target) for format, target in TILED if FORMATS[format].plain is None]


@pytest.mark.parametrize(("format", "target"), TILED, ids=str)
def test_prefill_rows_with_short_last_tiles(format, target):
    """31 rows are one tile of every height, and of a matrix unit a full one and a last one."""
    check(format, 32, 512, 31, threads=3, target=target, rng=np.random.default_rng(2))


@pytest.mark.parametrize("target", [t for t in ALL if t.lanes == 16], ids=str)
@pytest.mark.parametrize("format", ["F16", "Q6_K"])
def test_an_odd_number_of_groups_is_taken_one_by_one(format, target):
    check(format, 48, 256, 15, threads=2, target=target, rng=np.random.default_rng(9))


@pytest.mark.parametrize(("format", "target"), QUANTIZED, ids=str)
def test_a_row_gives_the_same_bits_alone_and_among_others(format, target):
    """In every place of a tile, and in the decode entry."""
    x = np.random.default_rng(4).standard_normal((1, 512), dtype=np.float32)
    rng = np.random.default_rng
    alone = check(format, 32, 512, 1, target=target, decode_entry=True, x=x, rng=rng(5))
    among = check(format, 32, 512, 31, target=target, x=np.repeat(x, 31, axis=0), rng=rng(5))
    np.testing.assert_array_equal(among, np.repeat(alone, 31, axis=0))


@pytest.mark.parametrize("target", ALL, ids=str)
@pytest.mark.parametrize("format", [name for name, fmt in FORMATS.items() if fmt.plain is not None])
def test_plain_floats_are_summed_alike_in_every_place_of_a_tile(format, target):
    """13 rows: tiles of 8 or 6 rows, and what is left; 300 columns: a piece of weights, and what is left."""
    x = np.random.default_rng(7).standard_normal((1, 300), dtype=np.float32)
    y = check(
        format,
        32,
        300,
        13,
        threads=2,
        target=target,
        x=np.repeat(x, 13, axis=0),
        rng=np.random.default_rng(8),
    )
    np.testing.assert_array_equal(y, np.repeat(y[:1], 13, axis=0))


@pytest.mark.parametrize("format", FORMATS)
def test_extreme_codes_scales_and_signs(format):
    for tokens in (1, 2, 3):
        check(format, 16, 256, tokens, extreme=True, rng=np.random.default_rng(tokens))


@pytest.mark.parametrize("format", FORMATS)
def test_integers_hold_the_largest_sums(format):
    """Activations of ±127 only, all with one sign, alternating, and by pairs; and what the limits allow next
    to a 127, in the pair and in the four."""
    x = np.ones((8, 256), np.float32)
    x[1], x[2, ::2], x[3, ::4], x[3, 1::4] = -1, -1, -1, -1
    x[4:] = np.tile(
        [[127, -126, 0, 0, 0, 0, 0, 0], [127, 0, 0, 0, 126, 0, 0, 0], [-127, 0, 0, 0, 0, -126, 0, 0]], 32
    )[[0, 1, 2, 2]]
    for extreme in (False, True):
        check(format, 16, 256, 8, x=x, extreme=extreme, rng=np.random.default_rng(6))
        for row in range(1, 7):
            one = x[row : row + 1]
            check(format, 16, 256, 1, x=one, extreme=extreme, decode_entry=True, rng=np.random.default_rng(6))


@pytest.mark.parametrize("format", ["Q8_0", "IQ4_XS"])
def test_wide_weights_are_refused_activations_that_their_products_do_not_fit(format):
    with pytest.raises(ZllmcError, match=rf"no cpu:avx2 kernel for linear of a8\[T, 256\] with a {format}"):
        linear(call_of(format, 16, 256), TARGETS["avx2"], "f")
    for name in ("avx512vnni", "dotprod"):
        linear(call_of(format, 16, 256), TARGETS[name], "f")


@pytest.mark.parametrize("format", ["Q4_0", "Q5_1", "MXFP4", "Q8_0"])
def test_activations_of_very_different_sizes(format):
    """As where a model keeps a few values a thousand times as large as the others."""
    x = np.random.default_rng(10).standard_normal((3, 512), dtype=np.float32)
    x[1, 70] = 3000
    x[2, 64:96] *= 1e-6
    for row in range(3):
        check(format, 16, 512, 1, x=x[row : row + 1], decode_entry=True, rng=np.random.default_rng(11))
    check(format, 16, 512, 3, x=x, rng=np.random.default_rng(11))


@pytest.mark.parametrize("format", ["F16", "Q4_0", "Q8_0", "Q6_K", "IQ3_S"])
def test_wanted_rows_are_one_or_several(format):
    for tokens, threads in ((1, 1), (1, 3), (2, 1), (5, 2)):
        rng = np.random.default_rng(12)
        check(format, 48, 256, tokens, wanted=True, residual=True, bias=True, threads=threads, rng=rng)


@pytest.mark.parametrize("format", ["F16", "Q4_0", "Q8_0", "Q6_K"])
def test_bias_residual_alpha_and_padded_rows(format):
    rng = np.random.default_rng(3)
    check(format, 21, 256, 5, bias=True, residual=True, alpha=0.25, rng=rng)
    check(format, 21, 256, 1, decode_entry=True, residual=True, threads=5, rng=rng)


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_every_target_compiles(format, target):
    text = assembly(linear, call_of(format, 32, 512, 1, is_limited(format, target)), target)
    assert {"maddubs": "vpmaddubsw", "vnni": "vpdpbusd", "sdot": "sdot"}[target.dot] in text or FORMATS[
        format
    ].plain
    if target.matrix:
        text = assembly(linear, call_of(format, 32, 512), target)
        assert "tdpbssd" in text or FORMATS[format].plain


@pytest.mark.parametrize("target", MATRIX, ids=str)
def test_rows_and_columns_in_many_pieces_on_a_matrix_unit(target):
    """Full tiles of rows, and last ones of 1, 8 and 15; units in several pieces, the last one shorter."""
    for format, columns in (("Q4_0", 1888), ("Q4_K", 1792), ("Q6_K", 1792), ("Q2_K", 1792)):
        for tokens in (2, 16, 17, 40, 63):
            check(format, 48, columns, tokens, threads=2, target=target, rng=np.random.default_rng(tokens))


@pytest.mark.parametrize("target", MATRIX, ids=str)
@pytest.mark.parametrize("format", [name for name, fmt in FORMATS.items() if fmt.sub_scales])
def test_the_largest_sums_times_sub_scales_are_exact_in_floats(format, target):
    """A matrix unit's sums are multiplied as floats, those of one row as integers."""
    x = np.where(np.arange(512) % 3, 127, -127).astype(np.float32).reshape(1, 512)
    x = np.concatenate([x, np.ones_like(x), -np.ones_like(x)])
    rng = np.random.default_rng
    among = check(format, 32, 512, 3, target=target, x=x, extreme=True, rng=rng(5))
    for row in range(3):
        one = x[row : row + 1]
        alone = check(format, 32, 512, 1, target=target, decode_entry=True, x=one, extreme=True, rng=rng(5))
        np.testing.assert_array_equal(among[row : row + 1], alone)
