"""The ops of dense transformers: type rules and float32 reference semantics.

Shapes: T tokens in this pass, D model width, H query heads, K kv heads, E head width. Weights come as
`PackedRows` (see `zllm_ir.interpreter`): `weight[a:b]` decodes rows a..b to float32.
"""

# mypy: disable-error-code="no-any-return"
# (numpy's stubs give Any for arithmetic on arrays of any dtype)

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.op import register
from zllmc.zllm_ir.rope import rope_frequencies
from zllmc.zllm_ir.types import Dim, KVType, R, TensorType

Array = NDArray[Any]


def _f32(*shape: Dim) -> TensorType:
    return TensorType("f32", shape)


def _same(x: TensorType, *_operands: Any, **_attrs: Any) -> TensorType:
    return x


def _infer_embedding(tokens: TensorType, table: TensorType, **_attrs: Any) -> TensorType:
    (count,), (_, width) = tokens.shape, table.shape
    return _f32(count, width)


def _infer_linear(
    x: TensorType, weight: TensorType, bias: TensorType | None, residual: TensorType | None, alpha: float
) -> TensorType:
    rows, columns = weight.shape
    if x.shape[-1] != columns:
        raise IRError(f"linear: x is {x} and the weight {weight}: the last axes differ")
    if bias is not None and bias.shape != (rows,):
        raise IRError(f"linear: the weight is {weight} and the bias {bias}")
    y = _f32(*x.shape[:-1], rows)
    if residual not in (None, y):
        raise IRError(f"linear: the result is {y} and the residual {residual}")
    return y


def _infer_binary(a: TensorType, b: TensorType, **_attrs: Any) -> TensorType:
    if a != b:
        raise IRError(f"operands differ: {a} and {b}")
    return a


def _infer_norm(x: TensorType, weight: TensorType | None, *_bias: Any, **_attrs: Any) -> TensorType:
    if weight is not None and weight.shape != x.shape[-len(weight.shape) :]:
        raise IRError(f"norm: x is {x} and the weight {weight}")
    return x


@register(infer=_infer_embedding)
def embedding(tokens: Array, table: Any, *, scale: float = 1.0) -> Array:
    """Rows of a packed table (vocab, D) for i32 token ids (T,) → f32 (T, D), times `scale`."""
    unique, inverse = np.unique(tokens, return_inverse=True)
    if unique.size and not 0 <= unique[0] <= unique[-1] < table.shape[0]:
        raise IRError(f"embedding: tokens {unique[0]} … {unique[-1]} of a table with {table.shape[0]} rows")
    rows = np.concatenate([table[int(t) : int(t) + 1] for t in unique])
    return rows[inverse.reshape(-1)] * np.float32(scale)


@register(infer=_infer_linear)
def linear(
    x: Array, weight: Any, bias: Array | None = None, residual: Array | None = None, *, alpha: float = 1.0
) -> Array:
    """y = alpha · (x · weightᵀ) + bias + residual.

    x (T, D), weight packed (N, D), bias (N,), residual (T, N) → f32 (T, N). `x` may be quantized (`a8`).
    Passes fold the residual stream and constant scales into `residual` and `alpha`.
    """
    step = max(1, (1 << 22) // weight.shape[1])
    blocks = [x @ weight[a : a + step].T for a in range(0, weight.shape[0], step)]
    y = np.concatenate(blocks, axis=-1) * np.float32(alpha)
    y = y if bias is None else y + bias
    return y if residual is None else y + residual


@register(infer=_infer_norm)
def rms_norm(x: Array, weight: Array | None = None, *, eps: float) -> Array:
    """y = x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang & Sennrich 2019).

    x (…, D). `weight` has the shape of x's last axis, or of its last two for a norm with a gain per head.
    """
    y = x / np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True) + eps)
    return (y if weight is None else y * weight[:]).astype(np.float32)


@register(infer=_infer_norm)
def layer_norm(x: Array, weight: Array, bias: Array | None = None, *, eps: float) -> Array:
    """y = (x − mean) / sqrt(var + eps) · weight + bias over the last axis. x (…, D), weight, bias (D,)."""
    centred = x.astype(np.float64) - x.mean(axis=-1, keepdims=True, dtype=np.float64)
    y = centred / np.sqrt(np.mean(np.square(centred), axis=-1, keepdims=True) + eps) * weight
    return (y if bias is None else y + bias).astype(np.float32)


@register(infer=_infer_binary)
def add(a: Array, b: Array) -> Array:
    """a + b, elementwise: the residual stream."""
    return a + b


@register(infer=_same)
def scale(x: Array, *, value: float) -> Array:
    """x · value."""
    return x * np.float32(value)


@register(infer=_same)
def softcap(x: Array, *, cap: float) -> Array:
    """cap · tanh(x / cap) (Gemma 2)."""
    return np.tanh(x / np.float32(cap)) * np.float32(cap)


def activate(x: Array, act: str) -> Array:
    """The activation named `act`, in float64: silu, gelu (tanh form), gelu_erf, relu, relu2 (squared)."""
    x = x.astype(np.float64)
    match act:
        case "silu":
            return x / (1 + np.exp(-np.clip(x, -700, None)))
        case "gelu":
            return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        case "gelu_erf":
            return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / np.sqrt(2)))
        case "relu":
            return np.maximum(x, 0)
        case "relu2":
            return np.square(np.maximum(x, 0))
    raise IRError(f"unknown activation {act!r}: one of silu, gelu, gelu_erf, relu, relu2")


@register(infer=_same)
def activation(x: Array, *, act: str) -> Array:
    """act(x), elementwise; see `activate` for the names."""
    return activate(x, act).astype(np.float32)


@register(infer=_infer_binary)
def glu(gate: Array, up: Array, *, act: str) -> Array:
    """act(gate) · up, elementwise: the gated linear unit (Shazeer 2020)."""
    return (activate(gate, act) * up).astype(np.float32)


def _infer_split(x: TensorType, sizes: tuple[int, ...]) -> tuple[TensorType, ...]:
    if sum(sizes) != x.shape[-1]:
        raise IRError(f"split: sizes {sizes} of {x}")
    return tuple(_f32(*x.shape[:-1], size) for size in sizes)


@register(infer=_infer_split)
def split(x: Array, *, sizes: tuple[int, ...]) -> tuple[Array, ...]:
    """Parts of the last axis, `sizes` wide: a fused q/k/v or gate/up projection taken apart."""
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis=-1))


def _infer_split_heads(x: TensorType, heads: int) -> TensorType:
    width = int(x.shape[-1])
    if width % heads:
        raise IRError(f"split_heads: {heads} heads of {x}")
    return _f32(*x.shape[:-1], heads, width // heads)


@register(infer=_infer_split_heads)
def split_heads(x: Array, *, heads: int) -> Array:
    """(T, heads · E) → (T, heads, E)."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


@register(infer=lambda x: _f32(*x.shape[:-2], x.shape[-2] * x.shape[-1]))
def merge_heads(x: Array) -> Array:
    """(T, heads, E) → (T, heads · E)."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _infer_rope_table(
    positions: TensorType, factors: TensorType | None, dims: int, **_attrs: Any
) -> tuple[TensorType, TensorType]:
    if dims % 2 or (factors is not None and factors.shape != (dims // 2,)):
        raise IRError(f"rope_table: {dims} dimensions and factors {factors}")
    table = _f32(*positions.shape, dims // 2)
    return table, table


@register(infer=_infer_rope_table)
def rope_table(
    positions: Array,
    factors: Array | None = None,
    *,
    dims: int,
    base: float,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_context: int = 0,
) -> tuple[Array, Array]:
    """cos and sin (T, dims/2) of the rotation angles at i32 `positions` (T,); see `zllm_ir.rope`.

    One table serves every layer that shares a rope configuration. `factors` (dims/2,) divides the
    frequencies (llama 3, longrope); `ext_factor` > 0 selects YaRN.
    """
    frequencies, magnitude = rope_frequencies(
        None if factors is None else np.asarray(factors, np.float64),
        dims,
        base,
        freq_scale,
        ext_factor,
        attn_factor,
        beta_fast,
        beta_slow,
        original_context,
    )
    angles = positions.astype(np.float64)[:, None] * frequencies
    return (np.cos(angles) * magnitude).astype(np.float32), (np.sin(angles) * magnitude).astype(np.float32)


def _infer_rope(x: TensorType, cos: TensorType, sin: TensorType, style: str) -> TensorType:
    tokens, _heads, head_dim = x.shape
    if cos != sin or cos.shape[0] != tokens or 2 * int(cos.shape[1]) > int(head_dim):
        raise IRError(f"rope: x is {x}, cos {cos} and sin {sin}")
    if style not in ("norm", "neox"):
        raise IRError(f"rope: unknown style {style!r}: one of norm, neox")
    return x


@register(infer=_infer_rope)
def rope(x: Array, cos: Array, sin: Array, *, style: str) -> Array:
    """Rotate the first 2·cos.shape[1] elements of each head (Su et al. 2021). x (T, heads, E).

    `style` says which elements pair up: `norm` (2i, 2i+1), or `neox` (i, i + dims/2).
    """
    half = cos.shape[1]
    first, second = {
        "norm": (slice(0, 2 * half, 2), slice(1, 2 * half, 2)),
        "neox": (slice(0, half), slice(half, 2 * half)),
    }[style]
    a, b = x[..., first], x[..., second]
    y = x.copy()
    y[..., first] = a * cos[:, None] - b * sin[:, None]
    y[..., second] = a * sin[:, None] + b * cos[:, None]
    return y


def round_to_storage(x: Array, storage: str) -> Array:
    """x (…, E) as the KV cache would give it back."""
    match storage:
        case "f32":
            return x
        case "f16":
            return x.astype(np.float16).astype(np.float32)
        case "q8":
            width = x.shape[-1]
            padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -width % 64)])
            groups = padded.reshape(*x.shape[:-1], -1, 64)
            scales = (np.abs(groups).max(axis=-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
            codes = np.rint(np.divide(groups, scales, out=np.zeros_like(groups), where=scales > 0))
            codes = np.clip(codes, -127, 127)
            return (codes * scales).reshape(padded.shape)[..., :width].astype(np.float32)
    raise IRError(f"unknown KV storage {storage!r}: one of f32, f16, q8")


def _infer_kv_append(state: KVType, k: TensorType, v: TensorType) -> KVType:
    if k != v or k.shape[1:] != (state.kv_heads, state.head_dim):
        raise IRError(f"kv_append: the state is {state}, k {k} and v {v}")
    return state


@register(infer=_infer_kv_append, writes="state")
def kv_append(state: Any, k: Array, v: Array) -> Any:
    """The state with this pass's keys and values (T, K, E) after its cached ones."""
    return state.append(k, v)


def _infer_attention(q: TensorType, state: KVType, **_attrs: Any) -> TensorType:
    heads, head_dim = q.shape[-2:]
    if head_dim != state.head_dim or int(heads) % state.kv_heads:
        raise IRError(f"attention: q is {q} and the state {state}")
    return q


@register(infer=_infer_attention)
def attention(q: Array, state: Any, *, scale: float, window: int = 0, softcap: float = 0.0) -> Array:
    """Causal grouped-query attention of this pass's queries (T, H, E) over the appended state.

    Query t is the token at position S + t and sees positions ≤ its own; with `window` > 0 only the last
    `window` of them, itself included. `softcap` > 0 caps the scaled scores as in Gemma 2.
    """
    tokens, heads, _ = q.shape
    keys, values = state.keys, state.values  # (S + T, K, E)
    group = heads // keys.shape[1]
    scores = np.einsum("tkge,ske->tkgs", q.reshape(tokens, -1, group, q.shape[-1]) * np.float32(scale), keys)
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    total = keys.shape[0]
    query_position = np.arange(total - tokens, total)[:, None]
    key_position = np.arange(total)[None, :]
    visible = key_position <= query_position
    if window:
        visible &= key_position > query_position - window
    scores = np.where(visible[:, None, None, :], scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    return np.einsum("tkgs,ske->tkge", scores, values).reshape(q.shape).astype(np.float32)


@register(infer=lambda x, first: _f32(R, *x.shape[1:]))
def select_rows(x: Array, first: Array) -> Array:
    """Rows first … T−1 of x (T, D) → (R, D): only their logits are wanted."""
    return x[int(first) :]


@register(infer=lambda logits: TensorType("i32", (logits.shape[0],)))
def argmax(logits: Array) -> Array:
    """Index of the largest logit of each row, the lowest index where several are equal."""
    return logits.argmax(axis=-1).astype(np.int32)
