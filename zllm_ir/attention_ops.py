"""Split attention: one query token over a long cache, cut into parts that threads take independently.

Each part gives the unnormalised output of its keys with their largest score and the sum of their
exponentials; the merge rescales the parts to a common maximum and divides once ("Flash-Decoding", Dao et al.
2023).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.fused_ops import a8_type, quantize
from zllmc.zllm_ir.op import register
from zllmc.zllm_ir.types import KVType, TensorType

Array = NDArray[Any]

_LOG2_E = np.float32(1 / math.log(2))
SPLIT_KEYS = 64  # a part is a multiple of this many keys


def _infer_partial(q: TensorType, state: KVType, splits: int, **_attrs: Any) -> TensorType:
    tokens, heads, head_dim = q.shape
    if tokens != 1 or splits < 1 or head_dim != state.head_dim or int(heads) % state.kv_heads:
        raise IRError(f"attention_partial: q is {q}, the state {state} and splits {splits}")
    return TensorType("f32", (heads, splits * (head_dim + 2)))


def _infer_merge(partial: TensorType, splits: int) -> TensorType:
    heads, width = partial.shape
    if splits < 1 or int(width) % splits or int(width) // splits <= 2:
        raise IRError(f"attention_merge: {splits} splits of {partial}")
    return TensorType("f32", (1, heads * (int(width) // splits - 2)))


@register(infer=_infer_partial)
def attention_partial(
    q: Array, state: Any, *, scale: float, splits: int, window: int = 0, softcap: float = 0.0
) -> Array:
    """Attention of one token's queries (1, H, E) over each of `splits` parts of the keys that it sees.

    The visible keys, from the multiple of 16 at or before the first, are cut into equal parts of a multiple
    of SPLIT_KEYS (the last ones may be shorter or empty). → (H, splits·(E + 2)): per head, the parts'
    Σ exp(s − max)·v (splits, E), their max s · log₂e (splits,) and their Σ exp(s − max) (splits,). A part
    with no keys has zeros and a maximum of −inf.
    """
    _, heads, head_dim = q.shape
    keys, values = state.keys, state.values  # (S + 1, K, E)
    total, group = keys.shape[0], heads // keys.shape[1]
    first = max(0, total - window) if window else 0
    start = first - first % 16
    part = math.ceil(math.ceil((total - start) / splits) / SPLIT_KEYS) * SPLIT_KEYS
    scores = np.einsum("he,she->hs", q[0] * np.float32(scale), np.repeat(keys, group, axis=1))
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    scores *= _LOG2_E
    result = np.zeros((heads, splits * (head_dim + 2)), np.float32)
    outputs = result[:, : splits * head_dim].reshape(heads, splits, head_dim)
    maxima, sums = np.split(result[:, splits * head_dim :], 2, axis=1)
    maxima[...] = -np.inf
    for p in range(splits):
        visible = slice(max(first, start + p * part), min(total, start + (p + 1) * part))
        if visible.start < visible.stop:
            maxima[:, p] = scores[:, visible].max(axis=1)
            weights = np.exp2(scores[:, visible] - maxima[:, p, None])
            sums[:, p] = weights.sum(axis=1)
            outputs[:, p] = np.einsum("hs,she->he", weights, np.repeat(values[visible], group, axis=1))
    return result


@register(infer=_infer_merge)
def attention_merge(partial: Array, *, splits: int) -> Array:
    """The parts of `attention_partial` (H, splits·(E + 2)) put together → (1, H·E)."""
    heads, width = partial.shape
    head_dim = width // splits - 2
    outputs = partial[:, : splits * head_dim].reshape(heads, splits, head_dim)
    maxima, sums = np.split(partial[:, splits * head_dim :], 2, axis=1)
    weights = np.exp2(maxima - maxima.max(axis=1, keepdims=True))
    weights /= (weights * sums).sum(axis=1, keepdims=True)
    merged: Array = np.einsum("hp,hpe->he", weights, outputs).reshape(1, -1).astype(np.float32)
    return merged


def _infer_merge_quantize(partial: TensorType, splits: int, limited: bool) -> TensorType:
    merged = _infer_merge(partial, splits)
    if int(merged.shape[-1]) % 32:
        raise IRError(f"attention_merge_quantize: the width of {merged} is no multiple of 32")
    return a8_type(merged.shape, limited)


@register(infer=_infer_merge_quantize)
def attention_merge_quantize(partial: Array, *, splits: int, limited: bool = False) -> Array:
    """quantize(attention_merge(partial))."""
    result: Array = quantize(attention_merge(partial, splits=splits), limited=limited)
    return result
