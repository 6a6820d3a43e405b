"""Quantized activation rows in numpy: the layout of `a8` as documented in zllm_ir.kernel_graph."""

from __future__ import annotations

import numpy as np

from zllmc.zllm_ir.fused_ops import GROUP, _peak, _quantize
from zllmc.zllm_ir.kernel_graph import activation_row_bytes


def a8_rows(x: np.ndarray, limited: bool = False) -> np.ndarray:
    """f32 (T, D) → u8 (T, row bytes)."""
    tokens, width = x.shape
    groups = x.reshape(tokens, -1, GROUP)
    peak = _peak(groups, limited)
    scale = (peak / np.float32(127)).astype(np.float32)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    codes = np.rint(groups * inverse).astype(np.int8)
    rows = np.zeros((tokens, activation_row_bytes(width)), np.uint8)
    sums = codes.sum(axis=-1, dtype=np.int32)
    halves = codes.reshape(tokens, -1, GROUP // 2).sum(axis=-1, dtype=np.int16)
    parts = (codes, scale, (scale[..., 0] * sums).astype(np.float32), halves)
    flat = [np.ascontiguousarray(p).reshape(tokens, -1).view(np.uint8).reshape(tokens, -1) for p in parts]
    packed = np.concatenate(flat, axis=1)
    rows[:, : packed.shape[1]] = packed
    return rows


def seen_by(inputs: str, x: np.ndarray) -> np.ndarray:
    """f32 activations as a linear multiplies them: quantized, or rounded to the inputs of a matrix unit."""
    match inputs:
        case "a8":
            return _quantize(x)
        case "f16":
            return np.clip(x, -65504, 65504).astype(np.float16)
        case "bf16":
            bits = x.view(np.uint32)
            return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    return x
