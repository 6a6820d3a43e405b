"""Elementary functions on vectors of any width, as straight-line code: LLVM would call libm once per lane."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx

from zllmc.codegen.tir import Expr, bind, bits, cast, const, hold, lanes_of, llvm
from zllmc.zllm_ir.errors import IRError


def typed(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a·b + c, rounded once."""
    return llvm("llvm.fma", str(a.ty.dtype), a, b, c)


def sqrt(x: Expr) -> Expr:
    return llvm("llvm.sqrt", str(x.ty.dtype), x)


def polynomial(x: Expr, coefficients: Sequence[float], dtype: str = "float32") -> Expr:
    """Σ coefficients[i] · xⁱ (Horner)."""
    lanes = lanes_of(x)
    y = const(coefficients[-1], dtype, lanes)
    for c in reversed(coefficients[:-1]):
        y = fma(y, x, const(c, dtype, lanes))
    return y


# (eʳ − 1 − r − r²/2) / r³ on |r| ≤ ln2 / 2, a Chebyshev fit: relative error of eʳ below 2⁻²⁵.
_EXP_TAIL = (0.16666631, 0.041666556, 0.0083572026, 0.0013926178)


def _exp_parts(x: Expr) -> tuple[Expr, Expr]:
    """(2ⁿ, eʳ − 1) with x = n·ln2 + r, |r| ≤ ln2 / 2. x is held within ±88, where 2ⁿ is 0 at the low end."""
    lanes = lanes_of(x)
    # With the bound first, NaN passes both comparisons.
    x = bind(tirx.max(const(-88.0, "float32", lanes), tirx.min(const(88.0, "float32", lanes), x)))
    n = bind(llvm("llvm.rint", typed("float32", lanes), x * const(1 / math.log(2), "float32", lanes)))
    # ln2 in two parts: n times the first, of 12 bits, is exact.
    r = bind(fma(n, const(-0.693359375, "float32", lanes), x))
    r = bind(fma(n, const(0.693359375 - math.log(2), "float32", lanes), r))
    exponent = cast(n, "int32") + const(127, "int32", lanes)
    power = bits(exponent << const(23, "int32", lanes), typed("float32", lanes))
    quadratic = fma(polynomial(r, _EXP_TAIL), r, const(0.5, "float32", lanes))
    return bind(power), bind(fma(r * r, quadratic, r))


def exp(x: Expr) -> Expr:
    """eˣ within 2 ulp on [−87, 88]; saturates above, 0 below −88 (and so at −∞)."""
    power, rest = _exp_parts(x)
    return fma(power, rest, power)


# Added to |x| < 2²² it leaves x rounded to an integer, plus 127, in the low bits: a float's exponent.
_SHIFT = 1.5 * 2**23 + 127

# (2ʳ − 1) / r on |r| ≤ 1/2, a minimax fit: relative error of 2ʳ below 2⁻²³.
_EXP2 = (0.693146978, 0.240222421, 0.0555073375, 0.00967151272, 0.00132647267)


def exp2(x: Expr) -> Expr:
    """2ˣ within 3 ulp on [−126, 127]; 0 below −127 (and so at −∞), undefined above 127."""
    lanes = lanes_of(x)
    x = bind(tirx.max(const(-127.0, "float32", lanes), x))  # with the bound first, NaN passes
    shifted = hold(x + const(_SHIFT, "float32", lanes))  # TVM would take x + c − c for x
    r = bind(x - bind(shifted - const(_SHIFT, "float32", lanes)))
    exponent = bits(shifted, typed("int32", lanes)) << const(23, "int32", lanes)
    power = bind(bits(exponent, typed("float32", lanes)))
    return fma(power, polynomial(r, _EXP2) * r, power)


# 2ʳ on |r| ≤ 1/2, a minimax fit: relative error below 2⁻¹⁸.
_EXP2_SHORT = (0.999999261, 0.693121815, 0.240247448, 0.0559178603, 0.00957010179)


def exp2_short(x: Expr) -> Expr:
    """2ˣ for x ≤ 0, within 2⁻¹⁸ of it; 2⁻¹²⁶ below −126 (and so at −∞)."""
    lanes = lanes_of(x)
    x = bind(tirx.max(const(-126.0, "float32", lanes), x))  # with the bound first, NaN passes
    shift = const(_SHIFT - 127, "float32", lanes)  # leaves the exponent alone: 2ʳ has the bias
    shifted = hold(x + shift)
    r = bind(x - bind(shifted - shift))
    fraction = bits(polynomial(r, _EXP2_SHORT), typed("int32", lanes))
    exponent = bits(shifted, typed("int32", lanes)) << const(23, "int32", lanes)
    return bits(fraction + exponent, typed("float32", lanes))


def tanh(x: Expr) -> Expr:
    """tanh x = (e²ˣ − 1) / (e²ˣ + 1), a few ulp also near 0."""
    lanes = lanes_of(x)
    power, rest = _exp_parts(x * const(2.0, "float32", lanes))
    m = bind(fma(power, rest, power - const(1.0, "float32", lanes)))
    return m / (m + const(2.0, "float32", lanes))


def _sigmoid_times(x: Expr, u: Expr) -> Expr:
    """x / (1 + e⁻ᵘ)."""
    lanes = lanes_of(x)
    return x / (const(1.0, "float32", lanes) + exp(const(0.0, "float32", lanes) - u))


def _gelu(x: Expr) -> Expr:
    """The tanh form: (1 + tanh u) / 2 is the sigmoid of 2u, with u = √(2/π) · (x + 0.044715·x³)."""
    c = 2 * math.sqrt(2 / math.pi)
    return _sigmoid_times(x, x * polynomial(x * x, (c, c * 0.044715)))


# Hastings, Approximations for Digital Computers (1955), sheet 43: erfc z = (a₁t + … + a₅t⁵)·e^(−z²) with
# t = 1 / (1 + pz) for z ≥ 0, within 1.5e-7.
_ERFC_P = 0.3275911
_ERFC = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _gelu_erf(x: Expr) -> Expr:
    lanes = lanes_of(x)

    def c(value: float) -> Expr:
        return const(value, "float32", lanes)

    magnitude = bind(absolute(x))
    t = bind(c(1.0) / fma(magnitude, c(_ERFC_P / math.sqrt(2)), c(1.0)))
    tail = polynomial(t, _ERFC) * t * exp(x * x * c(-0.5)) * c(0.5)  # normal probability beyond |x|
    tail = bind(magnitude * tail)
    return tirx.max(x, c(0.0)) - tail


def absolute(x: Expr) -> Expr:
    lanes = lanes_of(x)
    return bits(bits(x, typed("int32", lanes)) & const(0x7FFFFFFF, "int32", lanes), typed("float32", lanes))


def _relu(x: Expr) -> Expr:
    return tirx.max(x, const(0.0, "float32", lanes_of(x)))


def _relu2(x: Expr) -> Expr:
    y = bind(_relu(x))
    return y * y


_ACTIVATIONS: dict[str, Callable[[Expr], Expr]] = {
    "silu": lambda x: _sigmoid_times(x, x),
    "gelu": _gelu,
    "gelu_erf": _gelu_erf,
    "relu": _relu,
    "relu2": _relu2,
}


def activate(x: Expr, act: str) -> Expr:
    """The activation named `act` (see `zllm_ir.ops.activate`) of an f32 vector."""
    if act not in _ACTIVATIONS:
        raise IRError(f"no kernel for activation {act!r}: one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[act](bind(x))


_HALF_PI = math.pi / 2
_HALF_PI_LOW = 6.123233995736766e-17  # π/2 − float64(π/2)


def sin_cos(angle: Expr) -> tuple[Expr, Expr]:
    """sin and cos of an f64 vector, within 1e-9 for |angle| < 2³⁰.

    The angle is reduced by the nearest multiple of π/2 (Cody & Waite, π/2 in two parts); then Taylor series,
    of which enough terms are kept for |r| ≤ π/4.
    """
    lanes = lanes_of(angle)

    def c(value: float) -> Expr:
        return const(value, "float64", lanes)

    n = bind(llvm("llvm.rint", typed("float64", lanes), angle * c(1 / _HALF_PI)))
    r = bind(fma(n, c(-_HALF_PI), angle))
    r = bind(fma(n, c(-_HALF_PI_LOW), r))
    return _sin_cos_near(r, cast(n, "int32"), terms=7)


def sin_cos_turns(turns: Expr, rest: Expr) -> tuple[Expr, Expr]:
    """sin and cos of 2π · (turns + rest), f32 vectors with |rest| far below 1, within 2e-7."""
    lanes = lanes_of(turns)

    def whole(x: Expr) -> Expr:
        return bind(llvm("llvm.rint", typed("float32", lanes), x))

    fraction = bind((turns - whole(turns)) + rest)
    quarters = whole(fraction * const(4.0, "float32", lanes))
    r = bind(fma(quarters, const(-0.25, "float32", lanes), fraction) * const(2 * math.pi, "float32", lanes))
    return _sin_cos_near(r, cast(quarters, "int32"), terms=5)


def _sin_cos_near(r: Expr, quadrant: Expr, terms: int) -> tuple[Expr, Expr]:
    """sin and cos of r + quadrant · π/2 with |r| ≤ π/4, by `terms` terms of the Taylor series."""
    lanes, dtype = lanes_of(r), str(r.ty.dtype).split("x")[0]
    quadrant = bind(quadrant)
    square = bind(r * r)
    sines = [(-1) ** i / math.factorial(2 * i + 1) for i in range(terms - 1)]
    cosines = [(-1) ** i / math.factorial(2 * i) for i in range(terms)]
    sine, cosine = bind(r * polynomial(square, sines, dtype)), bind(polynomial(square, cosines, dtype))
    zero = const(0.0, dtype, lanes)

    def has(value: Expr, mask: int) -> Expr:
        return tirx.NE(value & const(mask, "int32", lanes), const(0, "int32", lanes))

    swapped_sine = bind(tirx.Select(has(quadrant, 1), cosine, sine))
    swapped_cosine = bind(tirx.Select(has(quadrant, 1), sine, cosine))
    return (
        tirx.Select(has(quadrant, 2), zero - swapped_sine, swapped_sine),
        tirx.Select(has(quadrant + const(1, "int32", lanes), 2), zero - swapped_cosine, swapped_cosine),
    )


def sum_lanes(x: Expr) -> Expr:
    """The sum of an f32 vector's elements, by halves."""
    lanes = lanes_of(x)
    while lanes > 1:
        lanes //= 2
        x = bind(x)
        low, high = (tirx.Shuffle([x], list(range(i, i + lanes))) for i in (0, lanes))
        x = low + high
    return x


def max_lanes(x: Expr) -> Expr:
    """The largest of an f32 vector's elements, by halves."""
    lanes = lanes_of(x)
    while lanes > 1:
        lanes //= 2
        x = bind(x)
        x = tirx.max(*(tirx.Shuffle([x], list(range(i, i + lanes))) for i in (0, lanes)))
    return x
