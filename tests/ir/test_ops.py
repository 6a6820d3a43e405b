"""Every op: its reference against a formula written out in plain Python, and its type rule."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zllmc.zllm_ir import ops
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.formats import FORMATS, decode
from zllmc.zllm_ir.interpreter import KVState, PackedRows
from zllmc.zllm_ir.op import OPS
from zllmc.zllm_ir.types import KVType, R, TensorType

rng = np.random.default_rng(7)


def f32(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def packed(values: np.ndarray) -> PackedRows:
    raw = values.astype("<f4").view(np.uint8).reshape(len(values), -1)
    return PackedRows("F32", values.shape, raw)


def state_with(k: np.ndarray, v: np.ndarray, storage: str = "f32") -> KVState:
    return KVState.empty(KVType(k.shape[1], k.shape[2], storage)).append(k, v)


def type_of(value: Any) -> Any:
    if value is None or isinstance(value, KVState):
        return value and value.type
    if isinstance(value, PackedRows):
        return TensorType("F32", value.shape)
    return TensorType("i32" if value.dtype == np.int32 else "f32", value.shape)


# --- type rules ----------------------------------------------------------------------------------------

X, HEADS = f32(5, 8), f32(5, 2, 4)
TOKENS = np.array([3, 0, 9, 3, 1], np.int32)
COS, SIN = ops.rope_table(TOKENS, None, dims=4, base=100.0)
CACHE = state_with(HEADS, HEADS)

CALLS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "embedding": ([TOKENS, packed(f32(10, 8))], {"scale": 2.0}),
    "linear": ([X, packed(f32(6, 8)), f32(6), f32(5, 6)], {"alpha": 0.5}),
    "rms_norm": ([X, f32(8)], {"eps": 1e-5}),
    "layer_norm": ([X, f32(8), f32(8)], {"eps": 1e-5}),
    "add": ([X, X], {}),
    "scale": ([X], {"value": 3.0}),
    "softcap": ([X], {"cap": 2.0}),
    "activation": ([X], {"act": "gelu"}),
    "glu": ([X, X], {"act": "silu"}),
    "split": ([X], {"sizes": (5, 3)}),
    "split_heads": ([X], {"heads": 2}),
    "merge_heads": ([HEADS], {}),
    "rope_table": ([TOKENS, f32(2)], {"dims": 4, "base": 100.0}),
    "rope": ([HEADS, COS, SIN], {"style": "norm"}),
    "kv_append": ([CACHE, HEADS, HEADS], {}),
    "attention": ([HEADS, CACHE], {"scale": 0.5}),
    "argmax": ([X], {}),
    "select_rows": ([X, np.int32(2)], {}),
}


def test_every_op_is_called_here() -> None:
    own = {name for name, op in OPS.items() if op.reference.__module__ == ops.__name__}
    assert own == set(CALLS)
    assert all(OPS[name].doc for name in own)


@pytest.mark.parametrize("name", CALLS)
def test_the_type_rule_gives_the_reference_s_types(name: str) -> None:
    op, (operands, attrs) = OPS[name], CALLS[name]
    result = op.reference(*operands, **attrs)
    results = result if isinstance(result, tuple) else (result,)
    inferred = op.infer_types([type_of(v) for v in op.bind(operands)], op.bind_attrs(attrs))
    found = tuple(map(type_of, results))
    if name == "select_rows":  # the only op whose number of rows is a symbol
        found = (TensorType("f32", (R, *found[0].shape[1:])),)
    assert inferred == found


def tensor(*shape: int) -> TensorType:
    return TensorType("f32", shape)


@pytest.mark.parametrize(
    "name, operands, attrs",
    [
        ("embedding", [tensor(5), tensor(10)], {"scale": 1.0}),
        ("linear", [tensor(5, 8), tensor(6, 9), None], {}),
        ("linear", [tensor(5, 8), tensor(6, 8), tensor(8)], {}),
        ("linear", [tensor(5, 8), tensor(2, 6, 8), None], {}),
        ("linear", [tensor(5, 8), tensor(6, 8), None, tensor(5, 8)], {}),
        ("rms_norm", [tensor(5, 8), tensor(4)], {"eps": 1e-5}),
        ("rms_norm", [tensor(5, 2, 4), tensor(3, 4)], {"eps": 1e-5}),
        ("add", [tensor(5, 8), tensor(5, 1)], {}),
        ("glu", [tensor(5, 8), tensor(5, 9)], {"act": "silu"}),
        ("split", [tensor(5, 8)], {"sizes": (4, 5)}),
        ("split_heads", [tensor(5, 8)], {"heads": 3}),
        ("split_heads", [tensor(5, 8)], {"heads": 0}),
        ("merge_heads", [tensor(5)], {}),
        ("rope_table", [tensor(5), None], {"dims": 5, "base": 1e4}),
        ("rope_table", [tensor(5), tensor(4)], {"dims": 4, "base": 1e4}),
        ("rope", [tensor(5, 2, 4), tensor(5, 2), tensor(5, 1)], {"style": "norm"}),
        ("rope", [tensor(5, 2, 4), tensor(4, 2), tensor(4, 2)], {"style": "norm"}),
        ("rope", [tensor(5, 2, 4), tensor(5, 3), tensor(5, 3)], {"style": "norm"}),
        ("rope", [tensor(5, 2, 4), tensor(5, 2), tensor(5, 2)], {"style": "both"}),
        ("kv_append", [KVType(2, 4), tensor(5, 2, 4), tensor(5, 1, 4)], {}),
        ("kv_append", [KVType(2, 4), tensor(5, 1, 4), tensor(5, 1, 4)], {}),
        ("attention", [tensor(5, 3, 4), KVType(2, 4)], {"scale": 1.0}),
        ("attention", [tensor(5, 4, 8), KVType(2, 4)], {"scale": 1.0}),
    ],
)
def test_operands_that_do_not_fit_are_refused(name: str, operands: list[Any], attrs: dict[str, Any]) -> None:
    with pytest.raises(IRError, match=name if name not in ("add", "glu", "rms_norm") else "operands|norm"):
        OPS[name].infer_types(OPS[name].bind(operands), OPS[name].bind_attrs(attrs))


def test_ops_on_unknown_names_are_refused() -> None:
    with pytest.raises(IRError, match="unknown activation 'tanh'"):
        ops.activation(X, act="tanh")
    with pytest.raises(IRError, match="unknown KV storage 'f8'"):
        ops.round_to_storage(HEADS, "f8")


# --- references ----------------------------------------------------------------------------------------


def test_embedding_takes_scaled_rows() -> None:
    table = f32(10, 8)
    np.testing.assert_array_equal(ops.embedding(TOKENS, packed(table), scale=2.0), table[TOKENS] * 2)


@pytest.mark.parametrize("token", [-1, 10])
def test_embedding_refuses_tokens_outside_the_table(token: int) -> None:
    with pytest.raises(IRError, match="of a table with 10 rows"):
        ops.embedding(np.array([0, token], np.int32), packed(f32(10, 8)))


def test_linear_is_x_times_weight_transposed_plus_bias() -> None:
    x, w, b = f32(3, 64), f32(130, 64), f32(130)
    expected = [[sum(x[t] * w[n]) + b[n] for n in range(130)] for t in range(3)]
    np.testing.assert_allclose(ops.linear(x, packed(w), b), expected, rtol=1e-4, atol=1e-4)
    product, residual = np.array(expected) - b, f32(3, 130)
    np.testing.assert_allclose(ops.linear(x, packed(w)), product, rtol=1e-4, atol=1e-4)
    scaled = ops.linear(x, packed(w), b, residual, alpha=0.5)
    np.testing.assert_allclose(scaled, 0.5 * product + b + residual, rtol=1e-4, atol=1e-4)


def test_linear_decodes_packed_rows() -> None:
    raw = rng.integers(0, 100, (4, 2 * 34), dtype=np.uint8)  # 2 Q8_0 blocks a row
    x = f32(3, 64)
    result = ops.linear(x, PackedRows("Q8_0", (4, 64), raw))
    np.testing.assert_allclose(result, x @ decode(FORMATS["Q8_0"], raw).T, rtol=1e-6)


def test_rms_norm_over_a_row_and_over_each_head() -> None:
    def norm(row: np.ndarray, gain: np.ndarray) -> list[float]:
        scale = 1 / math.sqrt(sum(float(v) ** 2 for v in row) / len(row) + 0.1)
        return [float(v) * scale * float(g) for v, g in zip(row, gain, strict=True)]

    gain, gains = f32(8), f32(2, 4)
    np.testing.assert_allclose(ops.rms_norm(X, gain, eps=0.1), [norm(r, gain) for r in X], rtol=1e-6)
    per_head = [[norm(h, g) for h, g in zip(row, gains, strict=True)] for row in HEADS]
    np.testing.assert_allclose(ops.rms_norm(HEADS, gains, eps=0.1), per_head, rtol=1e-6)
    np.testing.assert_allclose(ops.rms_norm(HEADS, packed(gains), eps=0.1), per_head, rtol=1e-6)
    np.testing.assert_allclose(ops.rms_norm(X, None, eps=0.1), [norm(r, np.ones(8)) for r in X], rtol=1e-6)


def test_layer_norm_has_mean_bias_and_variance_gain() -> None:
    gain, bias = np.full(8, 3, np.float32), np.full(8, 2, np.float32)
    y = ops.layer_norm(X, gain, bias, eps=0.0)
    np.testing.assert_allclose(y.mean(-1), 2, rtol=1e-6)
    np.testing.assert_allclose(y.std(-1), 3, rtol=1e-6)
    np.testing.assert_allclose(ops.layer_norm(X, gain, eps=0.0) + bias, y, rtol=1e-6, atol=1e-6)


ACTIVATIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act: str) -> None:
    x = np.array([-100, -3.5, -0.25, 0, 0.5, 2, 60], np.float32)
    expected = [ACTIVATIONS[act](float(v)) for v in x]
    np.testing.assert_allclose(ops.activation(x, act=act), expected, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(ops.glu(x, x[::-1], act=act), expected * x[::-1], rtol=1e-6, atol=1e-12)


def test_softcap_is_linear_near_zero_and_bounded() -> None:
    x = np.array([-1e6, -1e-3, 0, 1e-3, 1e6], np.float32)
    np.testing.assert_allclose(ops.softcap(x, cap=30.0), [-30, -1e-3, 0, 1e-3, 30], rtol=1e-6)


def test_heads_split_and_merge() -> None:
    assert ops.split_heads(X, heads=2)[3, 1].tolist() == X[3, 4:].tolist()
    np.testing.assert_array_equal(ops.merge_heads(ops.split_heads(X, heads=2)), X)
    a, b = ops.split(X, sizes=(5, 3))
    np.testing.assert_array_equal(np.concatenate([a, b], axis=1), X)


def test_argmax_takes_the_lowest_of_equals() -> None:
    assert ops.argmax(np.array([[1, 3, 3, 0], [-5, -5, -6, -5]], np.float32)).tolist() == [1, 0]


def test_select_rows_keeps_the_last() -> None:
    np.testing.assert_array_equal(ops.select_rows(X, np.int32(3)), X[3:])


# --- rope ----------------------------------------------------------------------------------------------


PAIRS = {"norm": lambda i: (2 * i, 2 * i + 1), "neox": lambda i: (i, i + 3)}


@pytest.mark.parametrize("style", PAIRS)
def test_rope_rotates_pairs_of_the_first_dims(style: str) -> None:
    x, positions = f32(2, 3, 8), np.array([5, 1000], np.int32)
    y = ops.rope(x, *ops.rope_table(positions, None, dims=6, base=500.0), style=style)
    expected = x.astype(np.float64)
    for t, position in enumerate(positions):
        for i in range(3):
            angle, (a, b) = float(position) * 500.0 ** (-2 * i / 6), PAIRS[style](i)
            expected[t, :, a] = x[t, :, a] * math.cos(angle) - x[t, :, b] * math.sin(angle)
            expected[t, :, b] = x[t, :, a] * math.sin(angle) + x[t, :, b] * math.cos(angle)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(y[..., 6:], x[..., 6:])


@given(st.integers(0, 5000), st.integers(0, 5000))
@settings(max_examples=25)
def test_rotated_products_depend_on_the_distance_only(m: int, n: int) -> None:
    q, k = (np.random.default_rng(i).normal(size=(1, 1, 16)).astype(np.float32) for i in (0, 1))

    def product(a: int, b: int) -> float:
        parts = [
            ops.rope(x, *ops.rope_table(np.array([p], np.int32), None, dims=16, base=1e4), style="neox")
            for x, p in ((q, a), (k, b))
        ]
        return float(np.sum(parts[0] * parts[1]))

    assert product(m, n) == pytest.approx(product(m + 77, n + 77), abs=1e-4)


def test_linear_scaling_and_factors_slow_the_angles() -> None:
    positions = np.array([12], np.int32)
    plain = ops.rope_table(np.array([3], np.int32), None, dims=4, base=100.0)
    linear = ops.rope_table(positions, None, dims=4, base=100.0, freq_scale=0.25)
    factors = ops.rope_table(positions, np.full(2, 4, np.float32), dims=4, base=100.0)
    for a, b, c in zip(plain, linear, factors, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        np.testing.assert_allclose(a, c, rtol=1e-6)


def test_yarn_keeps_fast_dims_interpolates_slow_ones_and_grows_the_magnitude() -> None:
    def angles(**attrs: float) -> np.ndarray:
        cos, sin = ops.rope_table(np.array([1], np.int32), None, dims=64, base=1e4, **attrs)
        return np.arctan2(sin, cos)[0]

    plain, yarn = angles(), angles(freq_scale=0.25, ext_factor=1.0, original_context=4096)
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(yarn[turns > 40], plain[turns > 40], rtol=1e-5)
    np.testing.assert_allclose(yarn[turns < 0.8], plain[turns < 0.8] / 4, rtol=1e-5)
    between = (turns > 2) & (turns < 20)
    assert (
        between.any()
        and np.all(yarn[between] < plain[between])
        and np.all(yarn[between] > plain[between] / 4)
    )
    cos, sin = ops.rope_table(
        np.array([9], np.int32),
        None,
        dims=64,
        base=1e4,
        freq_scale=0.25,
        ext_factor=1.0,
        original_context=4096,
    )
    np.testing.assert_allclose(np.hypot(cos, sin), 1 + 0.1 * math.log(4), rtol=1e-6)


# --- state and attention -------------------------------------------------------------------------------


def naive_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int, cap: float
) -> np.ndarray:
    """One query, one head, one key at a time, in float64."""
    tokens, heads, _ = q.shape
    cached, group = len(k) - tokens, heads // k.shape[1]
    y = np.zeros(q.shape)
    for t in range(tokens):
        last = cached + t
        first = max(0, last - window + 1) if window else 0
        for h in range(heads):
            scores = [float(q[t, h].astype(float) @ k[s, h // group]) * scale for s in range(first, last + 1)]
            scores = [cap * math.tanh(s / cap) for s in scores] if cap else scores
            weights = np.exp(np.array(scores) - max(scores))
            y[t, h] = (weights / weights.sum()) @ v[first : last + 1, h // group]
    return y


@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 6),
    st.sampled_from([0.0, 2.0]),
)
@settings(max_examples=40)
def test_attention_against_plain_loops(
    total: int, tokens: int, kv_heads: int, group: int, window: int, cap: float
) -> None:
    random = np.random.default_rng(total)
    tokens = min(tokens, total)
    k, v = (random.normal(size=(total, kv_heads, 4)).astype(np.float32) * 2 for _ in "kv")
    q = random.normal(size=(tokens, kv_heads * group, 4)).astype(np.float32) * 2
    y = ops.attention(q, state_with(k, v), scale=0.7, window=window, softcap=cap)
    np.testing.assert_allclose(y, naive_attention(q, k, v, 0.7, window, cap), rtol=1e-4, atol=1e-5)


def test_attention_with_huge_scores_stays_finite() -> None:
    q = k = np.full((3, 1, 4), 1e4, np.float32)
    np.testing.assert_allclose(ops.attention(q, state_with(k, q), scale=1.0), q)


def test_appending_leaves_the_old_state_as_it_was() -> None:
    before = state_with(HEADS, HEADS)
    after = ops.kv_append(before, HEADS + 1, HEADS + 2)
    assert len(before.keys) == 5
    np.testing.assert_array_equal(after.keys, np.concatenate([HEADS, HEADS + 1]))
    np.testing.assert_array_equal(after.values, np.concatenate([HEADS, HEADS + 2]))


def test_kv_storage_rounds_as_it_says() -> None:
    x = f32(3, 2, 96)
    np.testing.assert_array_equal(ops.round_to_storage(x, "f32"), x)
    np.testing.assert_array_equal(ops.round_to_storage(x, "f16"), x.astype(np.float16))
    q8 = ops.round_to_storage(x, "q8")
    for part in (slice(0, 64), slice(64, 96)):  # groups of 64 along the head, the last one shorter
        scale = np.abs(x[..., part]).max(-1, keepdims=True) / 127
        assert np.all(
            np.abs(q8[..., part] - x[..., part]) <= scale * 0.51 + 1e-4 * np.abs(x[..., part]).max()
        )
    np.testing.assert_array_equal(ops.round_to_storage(np.zeros((1, 1, 64), np.float32), "q8"), 0)
