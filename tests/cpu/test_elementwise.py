"""Elementwise kernels, quantization and activations against the ops' references."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import (
    RUNNABLE,
    UNTOUCHED,
    calls,
    control,
    on_targets,
    on_work,
    operand,
    random,
    read_activations,
    run,
)
from zllmc.codegen import elementwise
from zllmc.codegen.quantize import quantize
from zllmc.codegen.tir import Kernel, serial
from zllmc.codegen.vector_math import exp
from zllmc.targets.cpu import TARGETS
from zllmc.zllm_ir import fused_ops, ops
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.fused_ops import GROUP, LIMITED_FOUR, LIMITED_PAIR
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand, activation_row_bytes
from zllmc.zllm_ir.op import OPS
from zllmc.zllm_ir.types import R, T, TensorType


def a8(rows, width: int) -> Operand:
    return Operand(TensorType("a8", (rows, width)))


def check(op: str, attrs: dict, inputs: list[np.ndarray], first_axis, tokens, threads, target, **tolerance):
    """Runs the op's kernel on the first `tokens` rows of its inputs."""
    y = np.full(inputs[0].shape, UNTOUCHED, np.float32)
    call = KernelCall(
        op, tuple(attrs.items()), tuple(operand(x, first_axis) for x in inputs), (operand(y, first_axis),)
    )
    run(getattr(elementwise, op), call, control(tokens), *inputs, y, threads=threads, target=target)
    expected = OPS[op].reference(*(x[:tokens] for x in inputs), **attrs)
    np.testing.assert_allclose(y[:tokens], expected, **tolerance)
    assert (y[tokens:] == UNTOUCHED).all()


@on_targets
@on_work
@pytest.mark.parametrize("width", [5, 77])
@pytest.mark.parametrize(("op", "attrs", "arity"), [("add", {}, 2), ("scale", {"value": 0.37}, 1)])
def test_arithmetic_is_exact(target, first_axis, tokens, threads, width, op, attrs, arity):
    inputs = [random(tokens + 1, width + i)[:, :width] for i in range(arity)]
    check(op, attrs, inputs, first_axis, tokens, threads, target, rtol=0)


@on_targets
@on_work
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_glu_of_two_halves_of_one_projection(target, first_axis, tokens, threads, act):
    fused = 4 * random(tokens + 1, 2 * 77)
    inputs = [fused[:, :77], fused[:, 77:]]
    check("glu", {"act": act}, inputs, first_axis, tokens, threads, target, rtol=2e-6, atol=1e-5)


EVERYWHERE = np.concatenate(
    [
        np.linspace(-12, 12, 4001),
        [-1e30, -1e4, -700, -89, -88, -87, 87, 88, 89, 1e4, 0.0, -0.0, 1e-30, -1e-30],
    ]
).astype(np.float32)[None]


@on_targets
@pytest.mark.parametrize(
    ("act", "atol"), [("silu", 2e-6), ("gelu", 2e-6), ("gelu_erf", 1e-6), ("relu", 0), ("relu2", 0)]
)
def test_activations_everywhere(target, act, atol):
    check("activation", {"act": act}, [EVERYWHERE], 1, 1, 1, target, rtol=1e-6, atol=atol)


@on_targets
def test_softcap_everywhere(target):
    """Relative precision down to tiny values: most logits lie far below the cap."""
    check("softcap", {"cap": 30.0}, [EVERYWHERE * 10], 1, 1, 1, target, rtol=1e-6, atol=1e-35)


@on_targets
@pytest.mark.parametrize(("op", "attrs"), [("activation", {"act": "silu"}), ("softcap", {"cap": 30.0})])
def test_what_is_not_a_number_stays_visible(target, op, attrs):
    check(op, attrs, [np.full((1, 11), np.nan, np.float32)], 1, 1, 1, target)


def test_an_unknown_activation_is_an_error():
    x = Operand(TensorType("f32", (T, 8)), 8)
    with pytest.raises(IRError, match="'swish'"):
        elementwise.activation(KernelCall("activation", (("act", "swish"),), (x,), (x,)), RUNNABLE[-1], "f")


@on_targets
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("tokens", "first"), [(7, 6), (7, 0), (33, 30), (1, 0)])
def test_select_rows(target, tokens, first, threads):
    x = random(tokens, 50)[:, :45]
    y = np.full((tokens - first + 1, 45), UNTOUCHED, np.float32)
    call = KernelCall("select_rows", (), (operand(x, T), Operand(TensorType("i32", ()))), (operand(y, R),))
    row = np.array([first], np.int32)
    run(elementwise.select_rows, call, control(tokens, 0, first), x, row, y, threads=threads, target=target)
    np.testing.assert_array_equal(y[:-1], x[first:])
    assert (y[-1] == UNTOUCHED).all()


@on_targets
def test_rows_with_logits_are_counted_from_the_first(target):
    x = random(9, 40)
    y = np.full_like(x, UNTOUCHED)
    call = KernelCall("scale", (("value", 2.0),), (operand(x, R),), (operand(y, R),))
    run(elementwise.scale, call, control(9, 0, 6), x, y, threads=2, target=target)
    np.testing.assert_array_equal(y[:3], x[:3] * 2)
    assert (y[3:] == UNTOUCHED).all()


def test_a_row_count_that_no_kernel_knows_is_an_error():
    x = Operand(TensorType("f32", (2 * T, 8)), 8)
    with pytest.raises(IRError, match="how many rows"):
        elementwise.add(KernelCall("add", (), (x, x), (x,)), RUNNABLE[-1], "f")


def has_limited(target) -> bool:
    """Whether there are kernels that give limited activations; only a target that wants them needs any."""
    return target.lanes >= 8


@on_targets
@on_work
@pytest.mark.parametrize("width", [32, 160])
def test_limited_quantize_is_exact_and_keeps_within_its_limits(target, first_axis, tokens, threads, width):
    if not has_limited(target):
        pytest.skip("vectors are too short")
    x = random(tokens, width)
    x[0, :8] = 1  # all limits at once
    x[-1, -32:] = 0
    raw = np.zeros((tokens, activation_row_bytes(width)), np.uint8)
    result = Operand(TensorType("a8_limited", (first_axis, width)))
    call = KernelCall("quantize", (("limited", True),), (operand(x, first_axis),), (result,))
    run(quantize, call, control(tokens), x, raw, threads=threads, target=target)
    got = read_activations(raw, width)
    np.testing.assert_array_equal(got.values, fused_ops.quantize(x, limited=True))
    pairs = got.codes.astype(int).reshape(-1, 2, 2, 2)
    assert np.abs(pairs.sum(-1)).max() <= LIMITED_PAIR
    assert np.abs(pairs).sum((1, 3)).max() <= LIMITED_FOUR


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 3e37])
@given(codes=st.lists(st.integers(-127, 127), min_size=32, max_size=32))
def test_limits_hold_whatever_is_quantized(magnitude, codes):
    x = np.array([codes], np.float32) * np.float32(magnitude / 127)
    values = fused_ops.quantize(x, limited=True)
    scale = fused_ops._peak(x.reshape(1, 1, 32), True)[0, 0, 0] / np.float32(127)
    pairs = np.rint(values / scale if scale else values).reshape(-1, 2, 2, 2)
    assert np.abs(pairs.sum(-1)).max() <= LIMITED_PAIR
    assert np.abs(pairs).sum((1, 3)).max() <= LIMITED_FOUR


@on_targets
@on_work
@pytest.mark.parametrize("width", [32, 160])
def test_quantize_is_exact(target, first_axis, tokens, threads, width):
    x = random(tokens, width + 3)[:, :width] * np.float32(3)
    x[0, :3] = 127, 2.5, -3.5  # scale 1: halves round to even
    x[-1, -32:] = 0
    raw = np.full((tokens + 1, activation_row_bytes(width)), 0x11, np.uint8)
    call = KernelCall("quantize", (), (operand(x, first_axis),), (a8(first_axis, width),))
    run(quantize, call, control(tokens), x, raw, threads=threads, target=target)
    got = read_activations(raw[:tokens], width)
    np.testing.assert_array_equal(got.values, fused_ops.quantize(x))
    assert (raw[tokens:] == 0x11).all()


@on_targets
def test_quantize_at_the_ends_of_the_range(target):
    """Groups too small to scale become zeros, large ones don't overflow, NaN stays visible."""
    x = np.repeat(np.array([[1e-40], [1e-37], [1e36], [np.nan]], np.float32), GROUP, axis=1)
    raw = np.zeros((4, activation_row_bytes(GROUP)), np.uint8)
    run(quantize, KernelCall("quantize", (), (operand(x, T),), (a8(T, GROUP),)), control(4), x, raw)
    got = read_activations(raw, GROUP)
    assert (got.codes[:2] == 0).all()
    np.testing.assert_allclose(got.values[2], x[2], rtol=1e-6)
    assert np.isnan(got.scales[3]).all()


def glu_quantize_call(gate: Operand, up: Operand, act: str) -> KernelCall:
    rows, width = gate.type.shape
    return KernelCall("glu_quantize", (("act", act),), (gate, up), (a8(rows, int(width)),))


@on_targets
@on_work
def test_glu_quantize(target, first_axis, tokens, threads):
    width, act = 96, "silu"
    fused = random(tokens, 2 * width) * np.float32(3)
    gate, up = fused[:, :width], fused[:, width:]
    raw = np.full((tokens + 1, activation_row_bytes(width)), 0x11, np.uint8)
    call = glu_quantize_call(operand(gate, first_axis), operand(up, first_axis), act)
    run(elementwise.glu_quantize, call, control(tokens), gate, up, raw, threads=threads, target=target)
    got, expected = read_activations(raw[:tokens], width), ops.glu(gate, up, act=act)
    step = np.repeat(got.scales, GROUP, axis=1)
    assert (np.abs(got.values - expected) <= 0.501 * step + 1e-6).all()
    peak = np.abs(expected).reshape(tokens, -1, GROUP).max(axis=-1)
    np.testing.assert_allclose(got.scales, peak / 127, rtol=1e-5)
    assert (raw[tokens:] == 0x11).all()


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_erf"])
def test_every_target_gets_code_without_library_calls(target, act):
    gate = Operand(TensorType("f32", (T, 96)), 96)
    assert not calls(elementwise.glu_quantize, glu_quantize_call(gate, gate, act), target)


def exp_kernel(call: KernelCall, target, name: str):
    with Kernel(name, control="int32", x="float32", y="float32") as k:
        _, x, y = k.arguments
        with serial(0, call.results[0].width // target.lanes) as i:
            y.store(i * target.lanes, exp(x.load(i * target.lanes, target.lanes)))
    return k.function


@on_targets
def test_exp_is_within_two_ulp_and_saturates(target):
    x = np.linspace(-87, 88, 1 << 16, dtype=np.float32)[None]
    x[0, :8] = -np.inf, -1e30, -89, np.inf, 89, 88, 0, -0.0
    y = np.empty_like(x)
    run(exp_kernel, KernelCall("exp", (), (operand(x),), (operand(y),)), control(1), x, y, target=target)
    largest = np.exp(np.float64(88))
    expected = np.concatenate(
        [[0, 0, 0, largest, largest, largest, 1, 1], np.exp(x[0, 8:].astype(np.float64))]
    )
    ulp = np.spacing(expected.astype(np.float32))
    assert (np.abs(y[0] - expected) <= 2 * ulp).all()
