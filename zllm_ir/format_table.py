"""Every block format, described.

The layouts are those of ggml (https://github.com/ggml-org/ggml, `ggml-common.h` for the structures and
`ggml-quants.c` for their meaning).
"""

from zllmc.zllm_ir.block_format import BlockFormat, Field, Float, Grid, Plane, Trits, strided

# The code books are public constants: ggml's non-linear 4-bit values, and OCP e2m1 doubled.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# What the digits of the grids stand for. The values of IQ1 are -1, 0, 1 with an eighth added or subtracted:
# 8 · value + 10, less 0 or 2, minus 9.
_IQ2_VALUES = (8, 25, 43)
_IQ3_XXS_VALUES = (4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S_VALUES = (1, 3, 5, 7, 9, 11, 13, 15)
_IQ1_VALUES, _IQ1_ZERO = (2, 10, 18), 9

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


def _odd(*planes: Plane) -> Field:
    """Sub-scales of the IQ formats: 2 · stored + 1. (Some of ggml's formulas say stored + 1/2.)"""
    return Field(planes, zero=-1, step=2)


_F16_SCALE = Float(0, "f16")
_F16_MINIMUM = Float(2, "f16")

ALL_FORMATS = (
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
        "IQ2_XXS",
        ggml_type=16,
        block=256,
        nbytes=66,
        codes=Grid(
            "iq2xxs",
            _IQ2_VALUES,
            index=Field((Plane(8, strided((8, 64), (4, 8), base=16)),)),
            signs=Plane(1, strided((8, 64), (4, 7), (7, 1), base=48)),
        ),
        scale=Float(0, "f16", factor=1 / 8),
        sub_scales=_odd(Plane(4, strided((8, 64), base=76))),
    ),
    BlockFormat(
        "IQ2_XS",
        ggml_type=17,
        block=256,
        nbytes=74,
        codes=Grid(
            "iq2xs",
            _IQ2_VALUES,
            index=Field((Plane(8, strided((32, 16), base=16)), Plane(1, strided((32, 16), base=24)))),
            signs=Plane(1, strided((32, 16), (7, 1), base=25)),
        ),
        scale=Float(0, "f16", factor=1 / 8),
        sub_scales=_odd(Plane(4, strided((16, 4), base=528))),
    ),
    BlockFormat(
        "IQ3_XXS",
        ggml_type=18,
        block=256,
        nbytes=98,
        codes=Grid(
            "iq3xxs",
            _IQ3_XXS_VALUES,
            index=Field((Plane(8, strided((64, 8), base=16)),)),
            signs=Plane(1, strided((8, 32), (4, 7), (7, 1), base=528)),
        ),
        scale=Float(0, "f16", factor=1 / 4),
        sub_scales=_odd(Plane(4, strided((8, 32), base=556))),
    ),
    BlockFormat(
        "IQ1_S",
        ggml_type=19,
        block=256,
        nbytes=50,
        codes=Grid(
            "iq1",
            _IQ1_VALUES,
            index=Field(
                (
                    Plane(8, strided((32, 8), base=16)),
                    *(Plane(1, strided((8, 16), (4, 3), base=272 + bit)) for bit in range(3)),
                )
            ),
            shift=Field((Plane(1, strided((8, 16), base=287)),), step=2),
            zero=_IQ1_ZERO,
        ),
        scale=Float(0, "f16", factor=1 / 8),
        sub_scales=_odd(Plane(3, strided((8, 16), base=284))),
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
        "IQ3_S",
        ggml_type=21,
        block=256,
        nbytes=110,
        codes=Grid(
            "iq3s",
            _IQ3_S_VALUES,
            index=Field((Plane(8, strided((64, 8), base=16)), Plane(1, strided((64, 1), base=528)))),
            signs=Plane(1, strided((256, 1), base=592)),
        ),
        scale=_F16_SCALE,
        sub_scales=_odd(Plane(4, strided((8, 4), base=848))),
    ),
    BlockFormat(
        "IQ2_S",
        ggml_type=22,
        block=256,
        nbytes=82,
        codes=Grid(
            "iq2s",
            _IQ2_VALUES,
            index=Field((Plane(8, strided((32, 8), base=16)), Plane(2, strided((32, 2), base=528)))),
            signs=Plane(1, strided((256, 1), base=272)),
        ),
        scale=Float(0, "f16", factor=1 / 8),
        sub_scales=_odd(Plane(4, strided((16, 4), base=592))),
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
        "IQ1_M",
        ggml_type=29,
        block=256,
        nbytes=56,
        codes=Grid(
            "iq1",
            _IQ1_VALUES,
            index=Field((Plane(8, strided((32, 8), base=0)), Plane(3, strided((32, 4), base=256)))),
            shift=Field((Plane(1, strided((32, 4), base=259)),), step=2),
            zero=_IQ1_ZERO,
        ),
        scale=Float(48, "f16", factor=1 / 8, nibbles=strided((4, 16), base=396)),
        sub_scales=_odd(*(Plane(1, strided((4, 16), (4, 3), base=384 + bit)) for bit in range(3))),
    ),
    BlockFormat(
        "TQ1_0",
        ggml_type=34,
        block=256,
        nbytes=54,
        # 32 and 16 bytes of 5 digits, and 4 bytes of 4; elements 32 (16, 4) apart share a byte.
        codes=Trits(
            byte=(*range(32),) * 5 + (*range(32, 48),) * 5 + (*range(48, 52),) * 4,
            digit=tuple(
                d for run, digits in ((32, 5), (16, 5), (4, 4)) for d in range(digits) for _ in range(run)
            ),
        ),
        scale=Float(52, "f16"),
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
        "NVFP4",
        ggml_type=40,
        block=64,
        nbytes=36,
        codes=Field((Plane(4, strided((4, 64), (2, 4), (8, 8), base=32)),), table=_E2M1_DOUBLED),
        scale=Float(0, "ue4m3_half", count=4),
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
