"""Attention kernels against the ops' references, over KV buffers whose unused slots hold NaN."""

import ctypes
import re

import numpy as np
import pytest

from harness import NATIVE, RUNNABLE, assembly, calls, compiled, control, operand, read_activations, run
from kv_buffers import State, kv_buffer
from zllmc.codegen.attention import attention_rows
from zllmc.codegen.attention_decode import (
    attention_merge,
    attention_merge_quantize,
    attention_partial,
    tiles_of,
)
from zllmc.targets.cpu import TARGETS
from zllmc.zllm_ir import attention_ops, fused_ops, ops
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.kernel_graph import KernelCall, KVOperand, Operand, activation_row_bytes
from zllmc.zllm_ir.types import KVType, T, TensorType

UNTOUCHED = 7777.0
# Of outputs, whose values are normal: f32 sums; a q8 cache's queries and weights are rounded to i16.
TOLERANCE = {"f16": 3e-6, "q8": 6e-4}
CAPACITY = 1040
SHAPES = [  # (heads, kv heads, E), storage
    ((8, 2, 64), "f16"),
    ((3, 3, 128), "f16"),
    ((5, 1, 80), "f16"),
    ((16, 1, 32), "f16"),
    ((14, 2, 96), "f16"),
    ((2, 1, 256), "f16"),
    ((13, 1, 64), "q8"),
    ((5, 1, 80), "q8"),
    ((4, 2, 128), "q8"),
]
WINDOWS = [(1, "f16"), (50, "f16"), (64, "q8")]

on_targets = pytest.mark.parametrize("target", RUNNABLE, ids=str)
# All shapes on this machine's target; on emulated ones, which have other lanes, one of each sort: rows that
# fill their tiles and that do not, heads of a few vectors and of many, both storages.
on_shapes = pytest.mark.parametrize(
    ("target", "shape", "storage"),
    [
        (target, *shape)
        for target in RUNNABLE
        for shape in SHAPES
        if target in NATIVE or shape[0] in {(5, 1, 80), (14, 2, 96), (2, 1, 256), (13, 1, 64)}
    ],
    ids=str,
)
on_windows = pytest.mark.parametrize(("window", "storage"), WINDOWS)


class Case:
    """Random queries, keys and values of a pass of `tokens` tokens after `cached` ones."""

    def __init__(self, shape, storage, tokens, cached, magnitude=1.0):
        heads, kv_heads, head_dim = shape
        rng = np.random.default_rng(tokens * 10007 + cached)

        def random(*dims):
            return (magnitude * rng.standard_normal(dims)).astype(np.float32)

        self.state = State(
            *(ops.round_to_storage(random(cached + tokens, kv_heads, head_dim), storage) for _ in range(2))
        )
        # Queries and results lie in wider rows, with one row after the last.
        self.q = random(tokens + 1, heads + 1, head_dim)[:, :heads]
        self.result = np.full((tokens + 1, heads * head_dim + 8), UNTOUCHED, np.float32)
        self.cache = KVOperand(KVType(kv_heads, head_dim, storage), CAPACITY)
        self.buffer = kv_buffer(self.cache, self.state.keys, self.state.values)
        self.tokens, self.control = tokens, control(tokens, cached)

    def call(self, op, first_axis, result, **attrs):
        attrs = {"scale": self.q.shape[-1] ** -0.5, "window": 0, "softcap": 0.0} | attrs
        q = operand(self.q, first_axis)
        return KernelCall(op, tuple(attrs.items()), (q, self.cache), (result,))

    def check_rows(self, target, threads=1, first_axis=T, tolerance=None, **attrs):
        width = self.q.shape[1] * self.q.shape[2]
        result = Operand(TensorType("f32", (first_axis, width)), self.result.shape[1])
        call = self.call("attention_rows", first_axis, result, **attrs)
        run(
            attention_rows,
            call,
            self.control,
            self.q,
            self.buffer,
            self.result,
            threads=threads,
            target=target,
        )
        expected = fused_ops.attention_rows(self.q[: self.tokens], self.state, **call.attributes)
        atol = TOLERANCE[self.cache.type.storage] if tolerance is None else tolerance
        np.testing.assert_allclose(self.result[: self.tokens, :width], expected, atol=atol)
        assert (self.result[: self.tokens, width:] == UNTOUCHED).all()
        assert (self.result[self.tokens :] == UNTOUCHED).all()

    def partial(self, target, splits, threads=1, **attrs):
        """(kernel's parts, expected parts) of the first token."""
        heads, head_dim = self.q.shape[1:]
        parts = np.full((heads, splits * (head_dim + 2)), UNTOUCHED, np.float32)
        call = self.call("attention_partial", 1, operand(parts), splits=splits, **attrs)
        run(
            attention_partial,
            call,
            self.control,
            self.q,
            self.buffer,
            parts,
            threads=threads,
            target=target,
        )
        return parts, attention_ops.attention_partial(self.q[:1], self.state, **call.attributes)

    def check_partial(self, target, splits, threads=1, **attrs):
        parts, expected = self.partial(target, splits, threads, **attrs)
        tolerance = TOLERANCE[self.cache.type.storage]
        np.testing.assert_allclose(parts, expected, rtol=3 * tolerance, atol=6 * tolerance)
        merged = merge(parts, splits, target)
        attrs = {"scale": self.q.shape[-1] ** -0.5} | attrs
        whole = fused_ops.attention_rows(self.q[:1], self.state, **attrs)
        np.testing.assert_allclose(merged, whole, atol=tolerance)


def merge(parts, splits, target, threads=1):
    merged = np.full((1, len(parts) * (parts.shape[1] // splits - 2)), UNTOUCHED, np.float32)
    call = KernelCall("attention_merge", (("splits", splits),), (operand(parts),), (operand(merged),))
    run(attention_merge, call, control(1), parts, merged, threads=threads, target=target)
    return merged


@on_shapes
def test_rows_agree_with_the_reference(target, shape, storage):
    for tokens, cached, threads in [
        (1, 0, 1),
        (1, 100, 2),
        (2, 15, 3),
        (33, 0, 2),
        (33, 31, 3),
        (3, 1000, 1),
    ]:
        Case(shape, storage, tokens, cached).check_rows(target, threads)


@on_targets
def test_rows_with_many_threads_and_a_static_single_token(target):
    Case((8, 2, 64), "f16", 5, 64).check_rows(target, threads=7)
    Case((8, 2, 64), "f16", 70, 5).check_rows(target, threads=5)
    Case((8, 2, 64), "f16", 1, 64).check_rows(target, threads=2, first_axis=1)


@on_targets
@pytest.mark.parametrize("shape", [(4, 2, 16), (8, 2, 64)])
def test_a_row_gives_the_same_bits_whatever_others_follow_it(target, shape):
    """Tokens that follow have keys of their own, of which the row sees none."""
    case = Case(shape, "f16", 24, 5)
    case.check_rows(target)
    together = case.result.copy()
    keys, values = case.state.keys, case.state.values
    for tokens in (1, 2, 3, 7, 10, 11, 15, 23):
        case.tokens, case.control = tokens, control(tokens, 5)
        case.result[:] = UNTOUCHED
        case.state = State(keys[: 5 + tokens], values[: 5 + tokens])
        case.check_rows(target)
        np.testing.assert_array_equal(case.result[:tokens], together[:tokens])


@on_targets
@on_windows
def test_rows_within_a_window(target, window, storage):
    for total in {window - 1, window, window + 1, 3 * window} - {0}:
        for tokens in {1, min(33, total), total}:
            Case((4, 2, 64), storage, tokens, total - tokens).check_rows(target, window=window)


@on_targets
@pytest.mark.parametrize("window", [0, 20])
def test_rows_with_a_softcap(target, window):
    Case((4, 2, 64), "f16", 33, 40, magnitude=3.0).check_rows(
        target, window=window, softcap=5.0, tolerance=2e-5
    )


@on_targets
def test_large_scores_neither_overflow_nor_vanish(target):
    case = Case((4, 2, 64), "f16", 33, 100, magnitude=30.0)  # scores of ± 2000
    case.check_rows(target, tolerance=0.05)


@on_shapes
def test_parts_agree_with_the_reference(target, shape, storage):
    for cached, threads in [(0, 1), (63, 2), (64, 3), (511, 1), (1000, 7)]:
        Case(shape, storage, 1, cached).check_partial(target, 4, threads)


@on_targets
@pytest.mark.parametrize("splits", [1, 11, 32])
def test_parts_of_any_number(target, splits):
    for cached in (0, 200, 1023):
        Case((8, 2, 64), "f16", 1, cached).check_partial(target, splits, threads=2)


@on_targets
@on_windows
def test_parts_within_a_window(target, window, storage):
    for total in {window - 1, window, window + 1, 3 * window} - {0}:
        Case((4, 2, 64), storage, 1, total - 1).check_partial(target, 3, window=window)


@on_targets
def test_parts_with_a_softcap(target):
    Case((4, 2, 64), "f16", 1, 150).check_partial(target, 3, softcap=2.0)


@on_targets
def test_a_part_without_keys_says_so(target):
    parts, _ = Case((4, 2, 64), "f16", 1, 64).partial(target, 4)
    outputs, maxima, sums = np.split(parts, [4 * 64, 4 * 64 + 4], axis=1)
    assert (maxima[:, 2:] == -np.inf).all()
    assert (sums[:, 2:] == 0).all()
    assert (outputs[:, 2 * 64 :] == 0).all()


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1]), (6, [6]), (7, [4, 3]), (13, [5, 4, 4])])
def test_rows_are_cut_into_tiles_of_about_one_size(rows, sizes):
    tiles = tiles_of(rows, most=6)
    assert [t.rows for t in tiles for _ in range(t.count)] == sizes
    assert [t.first for t in tiles] == [0, tiles[0].rows * tiles[0].count][: len(tiles)]


@pytest.mark.parametrize(("threads", "shares"), [(2, [3, 2]), (4, [2, 1, 1, 1])])
def test_threads_share_the_parts_that_have_keys(threads, shares):
    """320 keys are 5 parts of 64: the other 3 of 8 have none."""
    case = Case((4, 1, 64), "f16", 1, 319)
    call = case.call("attention_partial", 1, Operand(TensorType("f32", (4, 8 * 66)), 8 * 66), splits=8)
    kernel = compiled(attention_partial, call, NATIVE[-1])["kernel"]
    found = []
    for thread in range(threads):
        parts = np.full((4, 8 * 66), np.nan, np.float32)
        arrays = (case.control, np.ascontiguousarray(case.q), case.buffer, parts)
        kernel(thread, threads, *(ctypes.c_void_p(a.ctypes.data) for a in arrays))
        found.append(int(np.isfinite(parts[0, 8 * 64 : 8 * 65]).sum()))
    assert found == shares


@on_targets
@pytest.mark.parametrize(("heads", "head_dim", "splits"), [(4, 64, 8), (6, 80, 5), (2, 32, 1)])
@pytest.mark.parametrize("threads", [1, 3, 7])
def test_merge_and_quantize(target, heads, head_dim, splits, threads):
    rng = np.random.default_rng(splits)
    parts = rng.standard_normal((heads, splits * (head_dim + 2))).astype(np.float32)
    parts[:, -splits:] = 1 + rng.random((heads, splits))
    if splits > 1:  # a part without keys
        parts[:, splits * head_dim + 1], parts[:, -splits + 1] = -np.inf, 0
        parts[:, head_dim : 2 * head_dim] = 0
    merged = merge(parts, splits, target, threads)
    np.testing.assert_allclose(merged, attention_ops.attention_merge(parts, splits=splits), atol=1e-6)

    width = heads * head_dim
    rows = np.zeros((1, activation_row_bytes(width)), np.uint8)
    result = Operand(TensorType("a8", (1, width)), width)
    call = KernelCall("attention_merge_quantize", (("splits", splits),), (operand(parts),), (result,))
    run(attention_merge_quantize, call, control(1), parts, rows, threads=threads, target=target)
    np.testing.assert_allclose(
        read_activations(rows, width).values, fused_ops.quantize(merged), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_every_target_compiles_without_library_calls(target):
    rows = Operand(TensorType("f32", (T, 8 * 128)), 8 * 128)
    parts = Operand(TensorType("f32", (8, 4 * 130)), 4 * 130)
    merged = Operand(TensorType("a8", (1, 8 * 128)), 8 * 128)
    f16, q8 = (Case((8, 2, 128), storage, 1, 0) for storage in ("f16", "q8"))
    merge_attrs = (("splits", 4),)
    kernels = [
        (attention_rows, f16.call("attention_rows", T, rows, softcap=30.0, window=100)),
        (attention_rows, q8.call("attention_rows", T, rows)),
        (attention_partial, f16.call("attention_partial", 1, parts, splits=4)),
        (attention_merge_quantize, KernelCall("attention_merge_quantize", merge_attrs, (parts,), (merged,))),
    ]
    for family, call in kernels:
        # LLVM clears and copies a row's output with memset and memcpy, once per row and pass over the keys.
        assert [c for c in calls(family, call, target) if not re.search("memset|memcpy", c)] == []
    if target.triple.startswith("x86"):
        assert "vcvtph2ps" in assembly(*kernels[0], target)


def test_a_head_width_without_a_kernel_is_refused():
    with pytest.raises(IRError, match="head_dim 40"):
        Case((2, 1, 40), "f16", 1, 0).check_rows(RUNNABLE[-1])
