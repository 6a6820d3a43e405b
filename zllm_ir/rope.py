"""Rotary frequencies: plain, linear, with factors (llama 3, longrope), and YaRN."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def rope_frequencies(
    factors: NDArray[np.float64] | None,
    dims: int,
    base: float,
    freq_scale: float,
    ext_factor: float,
    attn_factor: float,
    beta_fast: float,
    beta_slow: float,
    original_context: int,
) -> tuple[NDArray[np.float64], float]:
    """Radians per position (dims/2,), and the magnitude that multiplies cos and sin.

    θᵢ = base^(−2i/dims) / factorsᵢ, times `freq_scale` (1 / the linear factor). With `ext_factor` > 0,
    YaRN (Peng et al. 2023): dimensions that turn more than `beta_fast` times within the original context
    keep θ, those that turn less than `beta_slow` times are interpolated, the rest are mixed linearly, and
    the magnitude grows by 1 + 0.1·ln(1/freq_scale).
    """
    i = np.arange(dims // 2)
    extrapolated = base ** (-2.0 * i / dims)
    if factors is not None:
        extrapolated = extrapolated / factors
    interpolated = extrapolated * freq_scale
    if not ext_factor:
        return interpolated, attn_factor

    def dimension_turning(turns: float) -> float:
        return dims * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(0.0, math.floor(dimension_turning(beta_fast)))
    high = min(dims - 1.0, math.ceil(dimension_turning(beta_slow)))
    ramp = 1 - np.clip((i - low) / max(0.001, high - low), 0, 1)
    mix = ramp * ext_factor
    magnitude = attn_factor * (1 + 0.1 * math.log(1 / freq_scale))
    return interpolated * (1 - mix) + extrapolated * mix, magnitude
