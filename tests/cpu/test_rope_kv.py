"""Rotation and the cache's write side against the ops' references."""

import numpy as np
import pytest

import kv_buffers
from harness import RUNNABLE, calls, control, operand, run, weight
from zllmc.codegen.rope_kv import kv_append, rope, rope_append, rope_table
from zllmc.targets.cpu import TARGETS
from zllmc.zllm_ir import fused_ops, ops
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.interpreter import KVState
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, KernelCall, KVOperand, Operand
from zllmc.zllm_ir.types import KVType, T, TensorType

EPS = 1e-6
UNTOUCHED = 7777.0

on_targets = pytest.mark.parametrize("target", RUNNABLE, ids=str)
on_storages = pytest.mark.parametrize("storage", ["f16", "q8"])


def kv_buffer(state: KVOperand, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The layer's buffer with these tokens' keys and values (tokens, K, E); every other byte is 0xFF."""
    if not len(keys):
        return np.full(state.layout.bytes, 0xFF, np.uint8)
    return kv_buffers.kv_buffer(state, keys, values)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


YARN = {"base": 1e4, "freq_scale": 1 / 16, "ext_factor": 1.0, "attn_factor": 1.1, "original_context": 4096}


@on_targets
@pytest.mark.parametrize(("first_axis", "threads"), [(T, 1), (T, 3), (1, 2)])
@pytest.mark.parametrize(
    ("dims", "attrs", "with_factors"),
    [
        (64, {"base": 1e4}, False),
        (20, {"base": 5e5, "freq_scale": 0.25, "attn_factor": 1.5}, True),
        (46, YARN, False),
        (46, YARN, True),
    ],
)
def test_rope_table(target, first_axis, threads, dims, attrs, with_factors):
    positions = np.array([0, 1, 2, 1234, 131071, 999_999], np.int32)
    if first_axis == 1:
        positions = positions[-1:]
    tokens, half = len(positions), dims // 2
    factors = np.linspace(1, 40, half).astype(np.float32)
    tables = [np.full((tokens + 1, half + 3), UNTOUCHED, np.float32)[:, :half] for _ in range(2)]
    call = KernelCall(
        "rope_table",
        (("dims", dims), *attrs.items()),
        (Operand(TensorType("i32", (first_axis,)), 1), weight(factors) if with_factors else None),
        tuple(operand(t, first_axis) for t in tables),
    )
    inputs = [positions, *[factors] * with_factors]
    run(rope_table, call, control(tokens), *inputs, *tables, threads=threads, target=target)
    expected = ops.rope_table(positions, factors if with_factors else None, dims=dims, **attrs)
    for got, want in zip(tables, expected, strict=True):
        np.testing.assert_allclose(got[:tokens], want, rtol=0, atol=1.3e-7)  # one rounding of up to 1.6
        assert (got[tokens:] == UNTOUCHED).all()


def tables_for(tokens: int, half: int) -> list[np.ndarray]:
    return [random(tokens, half + 6)[:, :half], random(tokens, half + 6)[:, 6:]]


@on_targets
@pytest.mark.parametrize("style", ["norm", "neox"])
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (40, 20), (40, 7), (6, 1)])
@pytest.mark.parametrize(("first_axis", "tokens", "threads"), [(T, 5, 3), (1, 1, 2)])
def test_rope(target, style, head_dim, half, first_axis, tokens, threads):
    x, (cos, sin), y = random(tokens, 3, head_dim), tables_for(tokens, half), np.empty((tokens, 3, head_dim))
    y = y.astype(np.float32)
    call = KernelCall(
        "rope",
        (("style", style),),
        tuple(operand(a, first_axis) for a in (x, cos, sin)),
        (operand(y, first_axis),),
    )
    run(rope, call, control(tokens), x, cos, sin, y, threads=threads, target=target)
    np.testing.assert_allclose(y, ops.rope(x, cos, sin, style=style), rtol=1e-5, atol=1e-6)


@on_targets
@pytest.mark.parametrize(("storage", "head_dim"), [("f16", 77), ("f16", 128), ("q8", 76), ("q8", 128)])
@pytest.mark.parametrize(
    ("cached", "tokens", "threads", "first_axis"),
    [(0, 33, 3, T), (13, 5, 7, T), (30, 1, 2, 1), (47, 1, 1, T)],
)
def test_kv_append_gives_exactly_the_bytes_of_the_layout(
    target, storage, head_dim, cached, tokens, threads, first_axis
):
    state = KVOperand(KVType(2, head_dim, storage), 3 * KEY_BLOCK)
    keys, values = random(cached + tokens, 2, head_dim), random(cached + tokens, 2, head_dim) * np.float32(9)
    values[-1, 0, :64] = 0
    keys[-1, 1, 0] = 1e-9
    buffer = kv_buffer(state, keys[:cached], values[:cached])
    k, v = keys[cached:], values[cached:]
    call = KernelCall("kv_append", (), (state, operand(k, first_axis), operand(v, first_axis)), ())
    run(kv_append, call, control(tokens, cached), buffer, k, v, threads=threads, target=target)
    np.testing.assert_array_equal(buffer, kv_buffer(state, keys, values))


def test_q8_values_are_what_round_to_storage_gives():
    """Also where the scale is subnormal as f16, or rounds to 0."""
    state = KVOperand(KVType(1, 72, "q8"), KEY_BLOCK)
    values = random(4, 1, 72) * np.array([1, 1e-4, 1e-6, 1e-7], np.float32)[:, None, None]
    buffer = kv_buffer(state, values[:0], values[:0])
    call = KernelCall("kv_append", (), (state, operand(values, T), operand(values, T)), ())
    run(kv_append, call, control(4), buffer, values, values)
    for got in read(state, buffer, 4):
        np.testing.assert_array_equal(got, ops.round_to_storage(values, "q8"))


def read(state: KVOperand, buffer: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Keys and values (tokens, K, E) that a buffer holds."""
    layout, heads, head_dim = state.layout, state.type.kv_heads, state.type.head_dim
    blocks = state.capacity // KEY_BLOCK

    def region(
        offset: int, dtype: type, shape: tuple[int, ...], order: tuple[int, ...], n: int
    ) -> np.ndarray:
        """(tokens, K, n) from what lies as [K][blocks] and `shape`, whose axes come in that order."""
        count = heads * state.capacity * n
        flat = buffer[offset : offset + count * np.dtype(dtype).itemsize].view(dtype)
        turned = flat.reshape(heads, blocks, *shape).transpose(0, 1, *(2 + axis for axis in order))
        return turned.reshape(heads, -1, n)[:, :tokens].swapaxes(0, 1).astype(np.float32)

    def columns(offset: int, n: int) -> np.ndarray:
        return region(offset, np.float16, (n, KEY_BLOCK), (1, 0), n)

    def rows(offset: int, n: int) -> np.ndarray:
        return region(offset, np.float16, (KEY_BLOCK, n), (0, 1), n)

    if state.type.storage == "f16":
        return [columns(layout.keys, head_dim), rows(layout.values, head_dim)]
    keys = region(layout.keys, np.int8, (head_dim // 4, KEY_BLOCK, 4), (1, 0, 2), head_dim)
    values = region(layout.values, np.int8, (4, head_dim, 4), (2, 0, 1), head_dim)
    scales = columns(layout.key_scales, layout.groups), rows(layout.value_scales, layout.groups)
    return [
        codes * np.repeat(scale, 64, axis=-1)[..., :head_dim]
        for codes, scale in zip((keys, values), scales, strict=True)
    ]


H, K = 6, 2


def rope_append_call(state: KVOperand, q, k, v, tables, gains, result, **attrs) -> KernelCall:
    return KernelCall(
        "rope_append", (("heads", H), *attrs.items()), (q, k, v, state, *tables, *gains), (result,)
    )


@on_targets
@on_storages
@pytest.mark.parametrize(
    ("style", "head_dim", "half", "normed"),
    [("norm", 64, 32, True), ("neox", 40, 12, False), ("neox", 64, 32, True), ("norm", 72, 0, True)],
)
@pytest.mark.parametrize(
    ("cached", "tokens", "threads", "first_axis"), [(0, 33, 3, T), (13, 2, 1, T), (30, 1, 7, 1)]
)
def test_rope_append(target, storage, style, head_dim, half, normed, cached, tokens, threads, first_axis):
    """q, k and v are views of one fused projection; half = 0: no rotation."""
    state = KVOperand(KVType(K, head_dim, storage), 3 * KEY_BLOCK)
    fused = random(tokens, (H + 2 * K) * head_dim)
    q, k, v = np.split(fused, [H * head_dim, (H + K) * head_dim], axis=1)
    before = random(cached, K, head_dim)
    tables = tables_for(tokens, half) if half else [None, None]
    gains = [random(head_dim), random(head_dim) + 1] if normed else [None, None]
    result = np.full((tokens + 1, H, head_dim), UNTOUCHED, np.float32)
    buffer = kv_buffer(state, before, before)

    call = rope_append_call(
        state,
        *(operand(a, first_axis) for a in (q, k, v)),
        [None if a is None else operand(a, first_axis) for a in tables],
        [None if a is None else weight(a) for a in gains],
        operand(result, first_axis),
        style=style,
        eps=EPS,
    )
    optional = [a for a in (*tables, *gains) if a is not None]
    run(
        rope_append,
        call,
        control(tokens, cached),
        *(q, k, v, buffer, *optional, result),
        threads=threads,
        target=target,
    )

    expected_q, after = fused_ops.rope_append(
        q, k, v, KVState.empty(state.type), *tables, *gains, heads=H, style=style, eps=EPS
    )
    np.testing.assert_allclose(result[:tokens], expected_q, rtol=1e-5, atol=2e-6)
    assert (result[tokens:] == UNTOUCHED).all()
    keys, values = read(state, buffer, cached + tokens)
    np.testing.assert_array_equal(values[cached:], after.values)
    # A last bit that differs before rounding may move a key by one step of its storage.
    step = (
        np.abs(after.keys) / 1024
        if storage == "f16"
        else np.abs(after.keys).max(axis=-1, keepdims=True) / 120
    )
    assert (np.abs(keys[cached:] - after.keys) <= step + 1e-6).all()
    assert np.mean(keys[cached:] == after.keys) > 0.95
    assert_rest_untouched(state, buffer, before, tokens)


def assert_rest_untouched(state: KVOperand, buffer: np.ndarray, before: np.ndarray, tokens: int) -> None:
    """Every byte is as it was, but those of the appended tokens."""
    anything = np.zeros((tokens, *before.shape[1:]), np.float32)
    appended = kv_buffer(state, np.concatenate([before, anything]), np.concatenate([before, anything]))
    ours = appended != kv_buffer(state, before, before)
    np.testing.assert_array_equal(buffer[~ours], appended[~ours])


@on_targets
def test_a_gain_per_head_is_taken_by_head(target):
    state = KVOperand(KVType(K, 32), KEY_BLOCK)
    q, k, v = random(2, H * 32), random(2, K * 32), random(2, K * 32)
    q_norm, k_norm, result = random(H, 32), random(K, 32), np.zeros((2, H, 32), np.float32)
    buffer = kv_buffer(state, np.zeros((0, K, 32), np.float32), np.zeros((0, K, 32), np.float32))
    gains = [weight(q_norm), weight(k_norm)]
    call = rope_append_call(
        state, *(operand(a, T) for a in (q, k, v)), [None, None], gains, operand(result, T), eps=EPS
    )
    run(rope_append, call, control(2), q, k, v, buffer, q_norm, k_norm, result, threads=2, target=target)
    expected, after = fused_ops.rope_append(
        q, k, v, KVState.empty(state.type), None, None, q_norm, k_norm, heads=H, eps=EPS
    )
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(read(state, buffer, 2)[0], after.keys, rtol=1e-3)


def test_an_unknown_style_is_an_error():
    x = Operand(TensorType("f32", (T, 2, 8)), 16)
    table = Operand(TensorType("f32", (T, 4)), 4)
    with pytest.raises(IRError, match="'glm'"):
        rope(KernelCall("rope", (("style", "glm"),), (x, table, table), (x,)), RUNNABLE[-1], "f")


@on_storages
@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_every_target_gets_code_without_library_calls(target, storage):
    """The conversions to f16 above all."""
    state = KVOperand(KVType(K, 64, storage), KEY_BLOCK)
    q, k = (Operand(TensorType("f32", (T, n * 64)), n * 64) for n in (H, K))
    table, gain = Operand(TensorType("f32", (T, 32)), 32), Operand(TensorType("f32", (64,)))
    result = Operand(TensorType("f32", (T, H, 64)), H * 64)
    call = rope_append_call(state, q, k, k, [table, table], [gain, gain], result, style="norm", eps=EPS)
    assert not calls(rope_append, call, target)
    positions = Operand(TensorType("i32", (T,)), 1)
    attrs = (("dims", 64), ("base", 1e4))
    assert not calls(rope_table, KernelCall("rope_table", attrs, (positions, None), (table, table)), target)
