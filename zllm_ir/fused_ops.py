"""Ops that passes introduce: each is one kernel, and its reference is the composition that it stands for.

`a8` is the type of a quantized activation row: int8 codes in groups of 32 with one f32 scale each. The
references carry such a value as the float32 numbers it stands for, so every consumer's reference is the same
with and without quantization.

`a8_limited` is an `a8` whose codes leave room for sums in 16 bits, as AVX2 makes them of products with 8-bit
weights: neighbours of one sign add up to 128 at most, and the four magnitudes that meet in one sum, of two
such pairs 4 columns apart, to 255. Its scales are larger than they would be where those are exceeded, which
adds about a fifth to what rounding does to a model's activations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zllmc.zllm_ir import ops
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.op import register
from zllmc.zllm_ir.types import KVType, TensorType

Array = NDArray[Any]

GROUP = 32  # elements that share one activation scale
LIMITED_PAIR, LIMITED_FOUR = 128, 255  # what those of `a8_limited` add up to, at most


def is_a8(dtype: str) -> bool:
    """Whether this is the type of quantized activations, limited or not."""
    return dtype in ("a8", "a8_limited")


def a8_type(shape: tuple[Any, ...], limited: bool = False) -> TensorType:
    return TensorType("a8_limited" if limited else "a8", shape)


def _a8(x: TensorType, *_operands: Any, limited: bool, **_attrs: Any) -> TensorType:
    if int(x.shape[-1]) % GROUP:
        raise IRError(f"quantize: the last axis of {x} is no multiple of {GROUP}")
    return a8_type(x.shape, limited)


def _peak(groups: Array, limited: bool) -> Array:
    """What becomes 127."""
    peak: Array = np.abs(groups).max(axis=-1, keepdims=True)
    if not limited:
        return peak
    # Two columns of four times two pairs, 4 columns apart. Rounding adds ½ at most to each code.
    pairs = groups.reshape(*groups.shape[:-1], 4, 2, 2, 2)
    sums = np.abs(pairs[..., 0] + pairs[..., 1]).max(axis=(-3, -2, -1))
    magnitudes = np.abs(pairs)
    fours = ((magnitudes[..., 0] + magnitudes[..., 1]).sum(axis=-2)).max(axis=(-2, -1))
    fours = fours * np.float32(127 / (LIMITED_FOUR - 2))
    limit: Array = np.maximum(peak, np.maximum(sums, fours)[..., None])
    return limit


def _quantize(x: Array, limited: bool = False) -> Array:
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    peak = _peak(groups, limited)
    scale = (peak / np.float32(127)).astype(np.float32)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    rounded: Array = (np.rint(groups * inverse) * scale).reshape(x.shape).astype(np.float32)
    return rounded


@register(infer=_a8)
def quantize(x: Array, *, limited: bool = False) -> Array:
    """f32 (T, D) → a8: per group of 32, scale = max|x| / 127 and codes = round-to-nearest-even(x / scale).
    With `limited` → a8_limited, where a scale is max|xᵢ + xᵢ₊₁| / 127 over pairs or Σ|x| / 253 over the fours
    that meet in a sum, if that is more."""
    return _quantize(x, limited)


@register(infer=_a8)
def rms_norm_quantize(x: Array, weight: Array | None = None, *, eps: float, limited: bool = False) -> Array:
    """quantize(rms_norm(x, weight))."""
    return _quantize(ops.rms_norm(x, weight, eps=eps), limited)


@register(infer=_a8)
def glu_quantize(gate: Array, up: Array, *, act: str, limited: bool = False) -> Array:
    """quantize(glu(gate, up))."""
    return _quantize(ops.glu(gate, up, act=act), limited)


@register(infer=lambda y, residual, weight, eps: residual)
def norm_add(y: Array, residual: Array, weight: Array | None = None, *, eps: float) -> Array:
    """residual + rms_norm(y, weight): the sandwich norm of Gemma 2, 3 and OLMo 2."""
    return residual + ops.rms_norm(y, weight, eps=eps)


def _infer_rope_append(
    q: TensorType, k: TensorType, v: TensorType, state: KVType, *_operands: Any, heads: int, **_attrs: Any
) -> tuple[TensorType, KVType]:
    if k.shape[-1] != state.kv_heads * state.head_dim or q.shape[-1] != heads * state.head_dim:
        raise IRError(f"rope_append: q is {q}, k is {k} and the state {state}")
    return TensorType("f32", (q.shape[0], heads, state.head_dim)), state


@register(infer=_infer_rope_append, writes="state")
def rope_append(
    q: Array,
    k: Array,
    v: Array,
    state: Any,
    cos: Array | None = None,
    sin: Array | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    *,
    heads: int,
    style: str = "norm",
    eps: float = 0.0,
) -> tuple[Array, Any]:
    """Per-head norms and rotation of q and k, and k, v appended to the state.

    q (T, H·E), k and v (T, K·E) → q (T, H, E), state. Absent `q_norm`/`k_norm` (E,): no norm. Absent `cos`
    and `sin`: no rotation.
    """
    kv_heads = state.type.kv_heads
    q, k, v = (
        ops.split_heads(q, heads=heads),
        ops.split_heads(k, heads=kv_heads),
        ops.split_heads(v, heads=kv_heads),
    )
    if q_norm is not None:
        q = ops.rms_norm(q, q_norm, eps=eps)
    if k_norm is not None:
        k = ops.rms_norm(k, k_norm, eps=eps)
    if cos is not None and sin is not None:
        q, k = ops.rope(q, cos, sin, style=style), ops.rope(k, cos, sin, style=style)
    return q, state.append(k, v)


def _infer_attention_rows(q: TensorType, state: KVType, **_attrs: Any) -> TensorType:
    return TensorType("f32", (q.shape[0], q.shape[1] * q.shape[2]))


def _infer_concat(*parts: TensorType | None) -> TensorType:
    present = [p for p in parts if p is not None]
    first = present[0]
    if any((p.dtype, p.shape[1:]) != (first.dtype, first.shape[1:]) for p in present):
        raise IRError(f"concat_rows: the parts are {', '.join(map(str, present))}")
    return TensorType(first.dtype, (sum(int(p.shape[0]) for p in present), *first.shape[1:]))


@register(infer=_infer_concat)
def concat_rows(a: Any, b: Any, c: Any = None) -> Array:
    """The rows of two or three weights, packed matrices or vectors, as those of one.

    No kernel does this: the parts lie one after the other in memory.
    """
    return np.concatenate([part[:] for part in (a, b, c) if part is not None])


@register(infer=_infer_attention_rows)
def attention_rows(q: Array, state: Any, *, scale: float, window: int = 0, softcap: float = 0.0) -> Array:
    """merge_heads(attention(q, state)): (T, H, E) → (T, H·E)."""
    return ops.merge_heads(ops.attention(q, state, scale=scale, window=window, softcap=softcap))
