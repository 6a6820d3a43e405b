"""Norm kernels against the ops' references."""

import numpy as np
import pytest

from harness import (
    UNTOUCHED,
    calls,
    control,
    on_targets,
    on_work,
    operand,
    random,
    read_activations,
    run,
    weight,
)
from zllmc.codegen.norm import layer_norm, norm_add, rms_norm, rms_norm_quantize
from zllmc.targets.cpu import TARGETS
from zllmc.zllm_ir import ops
from zllmc.zllm_ir.fused_ops import GROUP
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand, activation_row_bytes
from zllmc.zllm_ir.types import T, TensorType

EPS = 1e-5


def fresh(rows: int, *shape: int) -> np.ndarray:
    return np.full((rows, *shape), UNTOUCHED, np.float32)


def norm_call(op: str, attrs: dict, *operands) -> KernelCall:
    *inputs, result = operands
    return KernelCall(op, tuple(attrs.items()), tuple(inputs), (result,))


@on_targets
@on_work
@pytest.mark.parametrize("width", [5, 96, 131])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(target, first_axis, tokens, threads, width, weighted):
    x, gain, y = random(tokens + 1, width + 5)[:, :width], random(width), fresh(tokens + 1, width)
    call = norm_call(
        "rms_norm",
        {"eps": EPS},
        operand(x, first_axis),
        weight(gain) if weighted else None,
        operand(y, first_axis),
    )
    run(rms_norm, call, control(tokens), x, *[gain] * weighted, y, threads=threads, target=target)
    expected = ops.rms_norm(x[:tokens], gain if weighted else None, eps=EPS)
    np.testing.assert_allclose(y[:tokens], expected, rtol=1e-6, atol=1e-7)
    assert (y[tokens:] == UNTOUCHED).all()


@on_targets
@on_work
@pytest.mark.parametrize("gain_shape", [(40,), (3, 40)])
def test_rms_norm_of_each_head(target, first_axis, tokens, threads, gain_shape):
    x, gain, y = random(tokens, 3, 40), random(*gain_shape), fresh(tokens, 3, 40)
    call = norm_call("rms_norm", {"eps": EPS}, operand(x, first_axis), weight(gain), operand(y, first_axis))
    run(rms_norm, call, control(tokens), x, gain, y, threads=threads, target=target)
    np.testing.assert_allclose(y, ops.rms_norm(x, gain, eps=EPS), rtol=1e-6, atol=1e-7)


@on_targets
def test_rms_norm_of_zeros_is_zero_and_of_large_values_is_finite(target):
    x, y = np.zeros((2, 64), np.float32), fresh(2, 64)
    x[1] = 1e15
    run(rms_norm, norm_call("rms_norm", {"eps": EPS}, operand(x, T), None, operand(y, T)), control(2), x, y)
    np.testing.assert_allclose(y, np.repeat([[0.0], [1.0]], 64, axis=1), rtol=1e-6)


@on_targets
@on_work
@pytest.mark.parametrize("width", [67, 96])
@pytest.mark.parametrize("weighted", [True, False])
def test_norm_add(target, first_axis, tokens, threads, width, weighted):
    y, residual, gain = random(tokens + 1, width), random(tokens + 1, width + 3)[:, :width], random(width)
    out = fresh(tokens + 1, width)
    inputs = [operand(y, first_axis), operand(residual, first_axis), weight(gain) if weighted else None]
    call = norm_call("norm_add", {"eps": EPS}, *inputs, operand(out, first_axis))
    run(norm_add, call, control(tokens), y, residual, *[gain] * weighted, out, threads=threads, target=target)
    expected = residual[:tokens] + ops.rms_norm(y[:tokens], gain if weighted else None, eps=EPS)
    np.testing.assert_allclose(out[:tokens], expected, rtol=1e-6, atol=1e-6)
    assert (out[tokens:] == UNTOUCHED).all()


@on_targets
@on_work
@pytest.mark.parametrize("width", [67, 96])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm(target, first_axis, tokens, threads, width, biased):
    x, gain, bias, y = random(tokens + 1, width) + 100, random(width), random(width), fresh(tokens + 1, width)
    inputs = [operand(x, first_axis), weight(gain), weight(bias) if biased else None]
    call = norm_call("layer_norm", {"eps": EPS}, *inputs, operand(y, first_axis))
    run(layer_norm, call, control(tokens), x, gain, *[bias] * biased, y, threads=threads, target=target)
    expected = ops.layer_norm(x[:tokens], gain, bias if biased else None, eps=EPS)
    # A mean of 100 is rounded to 1e-5; E[x²] − mean² would be off by 1e-3.
    np.testing.assert_allclose(y[:tokens], expected, rtol=1e-4, atol=1e-4)
    assert (y[tokens:] == UNTOUCHED).all()


def quantized_norm(width: int, first_axis=T, weighted: bool = True) -> KernelCall:
    x = Operand(TensorType("f32", (first_axis, width)), width)
    gain = Operand(TensorType("f32", (width,))) if weighted else None
    return norm_call(
        "rms_norm_quantize", {"eps": EPS}, x, gain, Operand(TensorType("a8", (first_axis, width)))
    )


@on_targets
@on_work
@pytest.mark.parametrize("width", [32, 160])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_quantize(target, first_axis, tokens, threads, width, weighted):
    x, gain = random(tokens, width), random(width)
    raw = np.full((tokens + 1, activation_row_bytes(width)), 0x11, np.uint8)
    call = quantized_norm(width, first_axis, weighted)
    run(rms_norm_quantize, call, control(tokens), x, *[gain] * weighted, raw, threads=threads, target=target)
    expected = ops.rms_norm(x, gain if weighted else None, eps=EPS)
    got = read_activations(raw[:tokens], width)
    np.testing.assert_allclose(
        got.scales, np.abs(expected).reshape(tokens, -1, GROUP).max(axis=-1) / 127, rtol=1e-6
    )
    step = np.repeat(got.scales, GROUP, axis=1)
    assert (np.abs(got.values - expected) <= 0.501 * step).all()
    assert (raw[tokens:] == 0x11).all()


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_every_target_gets_code_without_library_calls(target):
    assert not calls(rms_norm_quantize, quantized_norm(96), target)
