"""KV buffers as the runtime holds them, built in numpy from float32 keys and values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, QUAD, KVOperand


class State:
    """What a reference op reads: the keys and values (S + T, K, E) that a buffer gives back."""

    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.keys, self.values = keys, values


def interleave(keys: np.ndarray) -> np.ndarray:
    """[kv_heads][capacity][n] → [kv_heads][capacity / KEY_BLOCK][n][KEY_BLOCK]."""
    heads, capacity, n = keys.shape
    return keys.reshape(heads, capacity // KEY_BLOCK, KEY_BLOCK, n).swapaxes(2, 3)


def key_codes(codes: np.ndarray) -> np.ndarray:
    """[kv_heads][capacity][E] → [kv_heads][capacity / KEY_BLOCK][E / QUAD][KEY_BLOCK][QUAD]."""
    heads, capacity, n = codes.shape
    return codes.reshape(heads, capacity // KEY_BLOCK, KEY_BLOCK, n // QUAD, QUAD).swapaxes(2, 3)


def value_codes(codes: np.ndarray) -> np.ndarray:
    """[kv_heads][capacity][E] → [kv_heads][capacity / KEY_BLOCK][rows][E][QUAD]: 0, 4, 8, 12 in row 0."""
    heads, capacity, n = codes.shape
    rows = KEY_BLOCK // QUAD
    return codes.reshape(heads, capacity // KEY_BLOCK, QUAD, rows, n).transpose(0, 1, 3, 4, 2)


def quantize_groups(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x (…, E) → int8 codes (…, E) and f16 scales (…, ⌈E / 64⌉), as `round_to_storage` rounds."""
    width = x.shape[-1]
    groups = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -width % 64)]).reshape(*x.shape[:-1], -1, 64)
    scales = (np.abs(groups).max(axis=-1) / 127).astype(np.float16)
    wide = scales.astype(np.float32)[..., None]
    codes = np.clip(np.rint(np.divide(groups, wide, out=np.zeros_like(groups), where=wide > 0)), -127, 127)
    return codes.reshape(*x.shape[:-1], -1)[..., :width].astype(np.int8), scales


def kv_buffer(operand: KVOperand, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The layer's buffer (uint8) with keys and values (tokens, K, E) in its first slots; every other byte is
    0xFF, which is NaN as f16."""
    layout, storage = operand.layout, operand.type.storage
    buffer = np.full(layout.bytes, 0xFF, np.uint8)
    tokens = keys.shape[0]

    def place(offset: int, x: np.ndarray, order: Callable[[np.ndarray], np.ndarray]) -> None:
        heads_first = x.swapaxes(0, 1)
        raw = np.full((x.shape[1], operand.capacity, x.shape[2] * x.itemsize), 0xFF, np.uint8)
        full = raw.view(x.dtype)
        full[:, :tokens] = heads_first
        flat = np.ascontiguousarray(order(full)).view(np.uint8).reshape(-1)
        buffer[offset : offset + flat.size] = flat

    def same(x: np.ndarray) -> np.ndarray:
        return x

    if storage == "f16":
        place(layout.keys, keys.astype(np.float16), interleave)
        place(layout.values, values.astype(np.float16), same)
    else:
        for x, codes_at, codes_order, scales_at, scales_order in (
            (keys, layout.keys, key_codes, layout.key_scales, interleave),
            (values, layout.values, value_codes, layout.value_scales, same),
        ):
            codes, scales = quantize_groups(x)
            place(codes_at, codes, codes_order)
            place(scales_at, scales, scales_order)
    return buffer
