"""KV buffers as the runtime holds them, built in numpy from float32 keys and values."""

from __future__ import annotations

import numpy as np

from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, KVOperand


class State:
    """What a reference op reads: the keys and values (S + T, K, E) that a buffer gives back."""

    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.keys, self.values = keys, values


def interleave(keys: np.ndarray) -> np.ndarray:
    """[kv_heads][capacity][n] → [kv_heads][capacity / KEY_BLOCK][n][KEY_BLOCK]."""
    heads, capacity, n = keys.shape
    return keys.reshape(heads, capacity // KEY_BLOCK, KEY_BLOCK, n).swapaxes(2, 3)


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

    def place(offset: int, x: np.ndarray, keys: bool) -> None:
        heads_first = x.swapaxes(0, 1)
        raw = np.full((x.shape[1], operand.capacity, x.shape[2] * x.itemsize), 0xFF, np.uint8)
        full = raw.view(x.dtype)
        full[:, :tokens] = heads_first
        flat = np.ascontiguousarray(interleave(full) if keys else full).view(np.uint8).reshape(-1)
        buffer[offset : offset + flat.size] = flat

    if storage == "f16":
        place(layout.keys, keys.astype(np.float16), True)
        place(layout.values, values.astype(np.float16), False)
    else:
        for x, codes_at, scales_at, is_keys in (
            (keys, layout.keys, layout.key_scales, True),
            (values, layout.values, layout.value_scales, False),
        ):
            codes, scales = quantize_groups(x)
            place(codes_at, codes, is_keys)
            place(scales_at, scales, is_keys)
    return buffer
