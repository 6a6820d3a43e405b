"""Rotary embeddings of a model file: which angles and which magnitude, for every kind of scaling.

Sources: YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024), Llama 3's `rope_scaling` in `transformers`,
and what llama.cpp makes of the GGUF keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zllmc.frontends.architectures.fields import Fields

SCALING_TYPES = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True)
class Rope:
    """One rotary configuration: the attributes of the ops `rope_table` and `rope`.

    `factors` names the weight (dims/2 numbers) that divides the frequencies, or is empty.
    """

    dims: int
    base: float
    style: str  # norm | neox
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_context: int = 0
    factors: str = ""

    def plain(self, base: float | None = None) -> Rope:
        """The same without any scaling, and with another base: what some local layers use."""
        return Rope(self.dims, self.base if base is None else base, self.style)


def read_rope(f: Fields, tensors: Mapping[str, Any], head_dim: int, style: str, context: int) -> Rope:
    """The file's main rotary configuration, for sequences of up to `context` tokens.

    longrope has two sets of factors: the long ones are taken if `context` exceeds the original context,
    for all positions, so that every cached key was rotated in the same way.
    """
    dims = f.integer("rope.dimension_count", head_dim)
    if dims > head_dim or dims % 2:
        f.fail("rope.dimension_count", f"is {dims}, not an even number up to the head width {head_dim}")
    original = f.integer("rope.scaling.original_context_length", f.integer("context_length", default=context))
    kind = f.text("rope.scaling.type", "linear")
    if kind not in SCALING_TYPES:
        f.fail("rope.scaling.type", f"is {kind!r}, not one of {', '.join(SCALING_TYPES)}")
    factor = f.number("rope.scaling.factor", f.number("rope.scale_linear", default=1.0))
    if kind == "yarn" and factor < 1:
        f.fail("rope.scaling.factor", f"is {factor}: YaRN can't shrink the context")
    base = f.number("rope.freq_base", default=10000.0)
    if base <= 1:
        f.fail("rope.freq_base", f"is {base}, not above 1")
    magnitude = f.number("rope.scaling.attn_factor", default=1.0)
    rope = Rope(
        dims,
        base,
        style,
        freq_scale=1.0 if kind == "none" else 1 / factor,
        attn_factor=magnitude * f.number("rope.scaling.yarn_attn_factor", default=1.0),
        factors=_choose_factors(tensors, long=context > original),
    )
    if kind != "yarn":
        return rope
    all_dims = f.number("rope.scaling.yarn_log_multiplier", default=0.0)
    magnitude *= yarn_magnitude(factor) / yarn_magnitude(factor, all_dims)
    return replace(
        rope,
        ext_factor=1.0,
        attn_factor=magnitude / (1 + 0.1 * math.log(factor)),  # the op multiplies by this, as YaRN proposes
        beta_fast=f.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=f.number("rope.scaling.yarn_beta_slow", default=1.0),
        original_context=original,
    )


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """How much YaRN enlarges queries and keys when the context grows by `factor`."""
    return 1.0 if factor <= 1 else 1 + 0.1 * multiplier * math.log(factor)


def _choose_factors(tensors: Mapping[str, Any], long: bool) -> str:
    wanted = ("rope_freqs.weight", f"rope_factors_{'long' if long else 'short'}.weight")
    return next((name for name in wanted if name in tensors), "")


def llama3_factors(f: Fields, dims: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Llama 3's frequency divisors (dims/2,): 1 for short waves, `factor` for long ones, mixed between."""
    factor = f.number("rope.scaling.factor")
    low, high = f.number("rope.scaling.low_freq_factor"), f.number("rope.scaling.high_freq_factor")
    if high <= low:
        f.fail("rope.scaling.high_freq_factor", f"is {high}, not above low_freq_factor {low}")
    base = f.number("rope.freq_base", default=10000.0)
    turns = (
        f.integer("rope.scaling.original_context_length")
        * base ** (-np.arange(0, dims, 2) / dims)
        / (2 * np.pi)
    )
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    divisors: np.ndarray[Any, np.dtype[np.float32]] = (1 / ((1 - smooth) / factor + smooth)).astype(
        np.float32
    )
    return divisors
