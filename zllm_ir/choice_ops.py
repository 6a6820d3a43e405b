"""The choice of the next token where the logits are: their largest, and what the next round begins with.

Many vector units look through a part of the vocabulary each, and one merges what they found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.op import register
from zllmc.zllm_ir.types import Dim, TensorType

Array = NDArray[Any]

PART = 512  # logits that one vector unit looks through


def _top(rows: Dim, k: Dim) -> tuple[TensorType, TensorType]:
    return TensorType("f32", (rows, k)), TensorType("i32", (rows, k))


def _infer_top_k(logits: TensorType, k: int) -> tuple[TensorType, TensorType]:
    rows, vocab = logits.shape
    if not 1 <= k <= int(vocab):
        raise IRError(f"top_k: {k} of {logits}")
    return _top(rows, k)


def _infer_partial(logits: TensorType, k: int) -> tuple[TensorType, TensorType]:
    rows, vocab = logits.shape
    if rows != 1 or not 1 <= k <= min(int(vocab), PART):
        raise IRError(f"top_k_partial: {k} of {logits}")
    return _top(-(-int(vocab) // PART), k)


def _infer_choose(
    values: TensorType, ids: TensorType, position: TensorType, chosen: TensorType
) -> tuple[TensorType, ...]:
    (one,), (row, _) = position.shape, chosen.shape
    if (ids.dtype, ids.shape, one, row) != ("i32", values.shape, 1, 1):
        raise IRError(f"choose: values {values}, ids {ids}, position {position} and chosen {chosen}")
    return (*_top(1, values.shape[1]), TensorType("i32", (1,)), position, chosen)


@register(infer=_infer_top_k)
def top_k(logits: Array, *, k: int) -> tuple[Array, Array]:
    """The `k` largest logits of each row (R, V) in falling order, of equal ones the lowest index first, and
    their indices → f32 (R, k), i32 (R, k). What is not a number counts as +inf."""
    values = np.where(np.isnan(logits), np.float32(np.inf), logits).astype(np.float32)
    ids = np.argsort(-values, axis=-1, kind="stable")[:, :k]
    return np.take_along_axis(values, ids, axis=-1), ids.astype(np.int32)


@register(infer=_infer_partial)
def top_k_partial(logits: Array, *, k: int) -> tuple[Array, Array]:
    """`top_k` of each PART of one row of logits (1, V), which is taken to go on with −inf to a whole part
    → f32 (parts, k), i32 (parts, k). The indices are those in the row."""
    padded = np.pad(logits, [(0, 0), (0, -logits.size % PART)], constant_values=-np.inf)
    values, ids = top_k(padded.reshape(-1, PART), k=k)
    return values, (ids + PART * np.arange(len(ids))[:, None]).astype(np.int32)


@register(infer=_infer_choose)
def choose(values: Array, ids: Array, position: Array, chosen: Array) -> tuple[Array, ...]:
    """The end of a greedy round, from what `top_k_partial` gives.

    → `top_k` of the whole row (1, k) twice; the token that comes next, the likeliest (1,); its position (1,),
    one after this round's; and `chosen` (1, N), the last N tokens chosen, each at its round's position mod N,
    in place: −1 where the largest logit isn't finite, so that there is no next token.
    """
    order = np.argsort(-values.reshape(-1), kind="stable")[: values.shape[1]]
    top, top_ids = (x.reshape(-1)[order][None] for x in (values, ids))
    chosen = chosen.copy()
    chosen[0, position[0] % chosen.shape[1]] = top_ids[0, 0] if np.isfinite(top[0, 0]) else -1
    return top, top_ids, top_ids[0, :1], position + np.int32(1), chosen
